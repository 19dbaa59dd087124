"""What pytest collects of the package: the modules that have examples in their docstrings, and what these can read."""

from functools import cache
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave modules without tests and examples out, so that they are not imported to find none."""
    if collection_path.suffix != ".py" or collection_path.name.startswith("test_"):
        return None
    return None if ">>>" in collection_path.read_text() else True


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run examples of public names as users copy them: after ``import torch, fshard as fs``, and nothing else."""
    if isinstance(item, pytest.DoctestItem) and any(
        item.name == name or item.name.startswith(f"{name}.") for name in _public()
    ):
        import torch

        import fshard

        item.dtest.globs = {"torch": torch, "fs": fshard}


@cache
def _public() -> frozenset[str]:
    """Public classes and functions, by the modules that define them."""
    from tests.project.test_public_names import defined

    return frozenset(defined())
