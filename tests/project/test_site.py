"""The site has every page, notebook and program, and an entry for every public name; a browser finds no fault."""

import ast
import doctest
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard
from tests.project.test_docs import LINK, PAGES, blocks
from tests.project.test_public_names import public_names

ROOT = Path(__file__).parents[2]
FRONT = ROOT / "docs" / "index.md"
ENTRY = re.compile(r"^\.\. auto(\w+):: fshard\.([\w.]+)", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$|^\.\. toctree::\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


def lookup(name: str) -> Any:
    """What a public name stands for."""
    value: Any = fshard
    for part in name.split("."):
        value = getattr(value, part)
    return value


def entries() -> list[tuple[str, str]]:
    """The directive and the name of every entry of docs/api."""
    pages = sorted((ROOT / "docs" / "api").glob("*.rst"))
    return [found for page in pages for found in ENTRY.findall(page.read_text())]


def listed(page: Path) -> set[Path]:
    """The pages that toctrees of a page name."""
    found: set[Path] = set()
    for markdown, rst in TOCTREE.findall(page.read_text()):
        lines = [line.strip() for line in (markdown or rst).splitlines()]
        for line in [line for line in lines if line and not line.startswith(":")]:
            name = line[line.index("<") + 1 : -1] if line.endswith(">") else line
            matches = [*page.parent.glob(f"{name}.*")] if "*" not in name else [*page.parent.glob(f"{name}.py")]
            found |= {match.resolve() for match in matches if match.suffix in (".md", ".rst", ".ipynb", ".py")}
    return found


def reached() -> set[Path]:
    """The pages that toctrees lead to, from the front page on."""
    found, seen = set[Path](), [FRONT]
    while seen:
        page = seen.pop()
        found.add(page)
        seen += listed(page) - found if page.suffix in (".md", ".rst") else []
    return found


def test_every_page_is_in_a_toctree() -> None:
    pages = {*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").rglob("*.md")}
    pages |= {*(ROOT / "tests").rglob("*.md")}
    pages |= {*(ROOT / "docs" / "api").glob("*.rst"), *(ROOT / "examples").rglob("*.ipynb")}
    pages |= {*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.md")}
    assert not sorted(str(page.relative_to(ROOT)) for page in pages - reached()), f"not in a toctree from {FRONT.name}"


def test_links_to_sources_of_pages_lead_to_pages() -> None:
    pages = reached()
    for page in PAGES:
        links = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
        targets = {(page.parent / link).resolve() for link in links if link.endswith((".md", ".rst", ".ipynb", ".py"))}
        assert not [str(target.relative_to(ROOT)) for target in targets - pages], f"{page.name}: not on the site"


def test_every_public_name_has_one_entry() -> None:
    names = set(public_names(fshard))
    count = Counter(name for _, name in entries())
    assert names - count.keys() == set(), "add them to a page of docs/api"
    assert count.keys() - names == set(), "no public names"
    assert [name for name, times in count.items() if times > 1] == []


def test_entries_are_of_their_kind() -> None:
    kinds = {inspect.ismodule: ("module",), inspect.isclass: ("class", "exception"), inspect.isfunction: ("function",)}
    for directive, name in entries():
        wanted = next((words for fits, words in kinds.items() if fits(lookup(name))), ("data",))
        assert directive in wanted, name


def told_of_values() -> dict[int, str]:
    """The text under each assignment of the package, by the identity of what is assigned."""
    found = {}
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "fshard"]:
        body = ast.parse(inspect.getsource(module)).body
        for node, after in pairwise(body):
            told = ast.get_docstring(ast.Module([after], []))
            names = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            if told is not None and names and isinstance(names[0], ast.Name):
                found[id(getattr(module, names[0].id))] = told
    return found


def test_every_public_name_has_an_example() -> None:
    values = {name: lookup(name) for name in public_names(fshard) if not inspect.ismodule(lookup(name))}
    under = told_of_values()
    told = {name: under.get(id(value)) or inspect.getdoc(value) or "" for name, value in values.items()}
    assert sorted(name for name, text in told.items() if not re.search(r">>> |Example.*::", text)) == []


def test_examples_under_assignments_are_true() -> None:
    texts = [text for text in told_of_values().values() if ">>> " in text]
    assert len(texts) > 8
    for text in texts:
        names = {"fs": fshard, "torch": torch}
        test = doctest.DocTestParser().get_doctest(text, names, text.splitlines()[0], None, None)
        assert not doctest.DocTestRunner().run(test).failed


def test_docstrings_tell_of_each_argument() -> None:
    for name in [name for name in public_names(fshard) if inspect.isfunction(lookup(name))]:
        told, taken = inspect.getdoc(lookup(name)) or "", inspect.signature(lookup(name)).parameters
        rows = re.findall(r"^    ([*\w, ]+):", told, re.MULTILINE)
        named = {word.strip(" *") for row in rows for word in row.split(",")}
        assert not taken.keys() - named, name


def test_the_code_of_every_page_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    pages = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    with_code = [page for page in pages if any(info.split()[:1] == ["python"] for info, _, _ in blocks(page))]
    assert not [page.name for page in with_code if f'"{page.name}"' not in tests]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning_and_a_browser_finds_no_fault(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    site, options = tmp_path / "site", ("-W", "--keep-going", "-q", "-j", "2", "-c", "docs", "-d", tmp_path / "pages")
    build = (sys.executable, "-m", "sphinx", *options, ".", site)
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (site / "docs" / "index.html").exists() and (site / "_modules" / "fshard" / "tree.html").exists()
    browsers = [shutil.which(name) for name in ("chromium", "google-chrome")]
    if importlib.util.find_spec("playwright") is None or not any(browsers):
        pytest.skip("no browser to open the site with")
    look = (sys.executable, "docs/check_site.py", site)
    seen = subprocess.run(look, cwd=ROOT, capture_output=True, text=True)
    assert seen.returncode == 0, seen.stderr
