"""A link to Colab under the title of each notebook, if pyproject.toml has the address of the repository."""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from tests.notebooks import addresses


def read(app: Sphinx, page: str, text: list[str]) -> None:
    """Give a notebook its link."""
    if Path(app.env.doc2path(page)).suffix == ".ipynb":
        text[0] = addresses.linked(text[0], addresses.colab(addresses.setting(), page))


def setup(app: Sphinx) -> dict[str, Any]:
    """Join the build."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
