"""The one setting of where the project lives: how notebooks install fshard, and where Colab opens them.

``Repository`` under ``[project.urls]`` of pyproject.toml is the address, such as ``"https://github.com/OWNER/NAME"``.
``make notebooks`` writes it into the first cell of each notebook, and ``make docs`` makes links to Colab of it. Without
it a notebook installs the checkout that it lies in, and pages have no such link.
"""

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALL = """\
import importlib.util

if importlib.util.find_spec("fshard") is None:  # nothing is done where fshard is installed
    %pip install -q {source}"""
CHECKOUT = '-c ../../constraints.txt "../..[notebook,view]"'


def repository(pyproject: str) -> str:
    """The address in the text of a pyproject.toml; empty where it has none.

    >>> repository('[project.urls]\\nRepository = "https://github.com/OWNER/NAME"')
    'https://github.com/OWNER/NAME'
    """
    address: str = tomllib.loads(pyproject).get("project", {}).get("urls", {}).get("Repository", "")
    return address.rstrip("/").removesuffix(".git")


def install(address: str) -> str:
    """The cell that installs fshard where it is missing.

    >>> print(install("https://github.com/OWNER/NAME").splitlines()[-1].strip())
    %pip install -q "fshard[notebook,view] @ git+https://github.com/OWNER/NAME"
    """
    return INSTALL.format(source=f'"fshard[notebook,view] @ git+{address}"' if address else CHECKOUT)


def colab(address: str, page: str) -> str:
    """Where Colab opens a notebook; empty without an address on GitHub, from which alone Colab reads.

    >>> colab("https://github.com/OWNER/NAME", "examples/a")
    'https://colab.research.google.com/github/OWNER/NAME/blob/main/examples/a.ipynb'
    """
    found = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)", address)
    return f"https://colab.research.google.com/github/{found[1]}/blob/main/{page}.ipynb" if found else ""


def linked(notebook: str, link: str) -> str:
    """The text of a notebook with a link to Colab under its title; as it is without a link."""
    if not link:
        return notebook
    found = json.loads(notebook)
    title, _, rest = "".join(found["cells"][0]["source"]).partition("\n")
    found["cells"][0]["source"] = f"{title}\n\n[Open in Colab]({link})\n{rest}"
    return json.dumps(found)


def setting() -> str:
    """The address of this checkout."""
    return repository((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
