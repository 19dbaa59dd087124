"""What pytest collects of the package: the modules that have examples in their docstrings."""

from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave modules without tests and examples out, so that they are not imported to find none."""
    if collection_path.suffix != ".py" or collection_path.name.startswith("test_"):
        return None
    return None if ">>>" in collection_path.read_text() else True
