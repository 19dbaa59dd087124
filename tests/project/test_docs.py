"""What the README and docs/ show is true: code runs, errors read as quoted, links lead somewhere."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fshard import errors
from fshard.pipeline import bubble, make_order
from fshard.pipeline.named_orders import ORDERS
from tests.pipeline.held_microbatches import held_on_ranks

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "docs").glob("*.md"), (ROOT / "tests").rglob("*.md")
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *[page for pages in FOLDERS for page in sorted(pages)])
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(page: Path) -> Iterator[tuple[str, str, int]]:
    """The code blocks of a page: info string, text, line number."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        yield found[1], found[2], text[: found.start()].count("\n") + 2


def quoted(excerpt: str, whole: str) -> bool:
    """Whether a text holds an excerpt: its lines in a row, except where a line of three dots leaves some out."""
    at = 0
    for part in re.split(r"^\.\.\.\n", excerpt, flags=re.MULTILINE):
        at = whole.find(part.strip("\n"), at)
        if at < 0:
            return False
        at += len(part.strip("\n"))
    return True


def run(page: Path) -> int:
    """Run the python blocks of a page in order, in one namespace; returns how many there were."""
    names: dict[str, Any] = {}
    count, raised = 0, ""
    for info, text, line in blocks(page):
        language, *words = info.split() or [""]
        if language == "python":
            count += 1
            code = compile("\n" * (line - 1) + text, str(page), "exec")
            raised = ""
            if words[:1] == ["raises"]:
                with pytest.raises(getattr(errors, words[1])) as caught:
                    exec(code, names)
                raised = str(caught.value)
            else:
                exec(code, names)
        elif raised:
            assert quoted(text, raised), f"{page.name}:{line}: the message is\n{raised}"
    return count


@pytest.mark.long
def test_models_of_others() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "models.md") > 0


@pytest.mark.long
def test_writing_models(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "writing-models.md") > 10
    assert "tensor" in capsys.readouterr().out


def test_foresight() -> None:
    assert run(ROOT / "docs" / "foresight.md") == 3


def test_transforms() -> None:
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "transforms.md") > 9


@pytest.mark.long
def test_parallel() -> None:
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "parallel.md") > 6


def test_memory_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ROOT / "docs" / "memory-kinds.md") == 2
    assert "in host memory" in capsys.readouterr().out


def test_checkpoints() -> None:
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "checkpoints.md") > 3


def test_interchange() -> None:
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "interchange.md") > 6


def test_tracking(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "tracking.md") == 3
    assert "'grad_norms/blocks" in capsys.readouterr().out


def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(ROOT / "docs" / "data.md") == 4


def test_generation() -> None:
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "generation.md") == 5


def test_steps() -> None:
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "steps.md") > 14


def test_steps_are_not_longer_than_in_jax() -> None:
    found = [
        (info, [line for line in text.splitlines() if line]) for info, text, _ in blocks(ROOT / "docs" / "steps.md")
    ]
    pairs = [(one, two) for (kind, one), (other, two) in pairwise(found) if (kind, other) == ("python", "py")]
    assert len(pairs) == 3 and all(len(one) <= len(two) for one, two in pairs)


@pytest.mark.long
def test_notebooks() -> None:
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "notebooks.md") == 7


def test_collectives() -> None:
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "collectives.md") > 8


@pytest.mark.long
def test_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "optimizers.md") > 7
    assert "0/1: 16.0 KiB of padding" in capsys.readouterr().out


def test_pipelines() -> None:
    torch.manual_seed(0)
    assert run(ROOT / "docs" / "pipelines.md") == 4


def test_the_table_of_orders_is_true() -> None:
    text = (ROOT / "docs" / "pipelines.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r'\| `"\w+"', line)]
    assert [re.findall(r"\w+", row[0])[0] for row in rows] == [*ORDERS]
    for name, chunks, idle, held in rows:
        order = make_order(re.findall(r"\w+", name)[0], 4, 8, int(chunks))
        assert idle == f"{bubble(order):.0%}".replace("%", " %")
        assert held.removesuffix(", of half a size") == ", ".join(map(str, held_on_ranks(order)))


PLAIN = ("from-fsdp2.md", "from-jax.md", "gpus.md", "meshes.md", "precision.md", "reliability.md", "slow-links.md")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PLAIN)
def test_pages_that_need_nothing(name: str) -> None:
    torch.manual_seed(0)
    assert run(ROOT / "docs" / name) > 0


@pytest.mark.long
def test_contributing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ROOT / "CONTRIBUTING.md") == 4
    assert "exposed" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if not _leads(page, link)]
    assert not missing


def _leads(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not target.exists() or not anchor:
        return target.exists()
    titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
    return anchor in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_an_excerpt_is_held_against_the_whole() -> None:
    whole = "a\nb\nc\nd\n"
    assert quoted("a\n...\nc\nd\n", whole) and quoted("b\nc\n", whole)
    assert not quoted("c\n...\na\n", whole) and not quoted("a\nc\n", whole)
