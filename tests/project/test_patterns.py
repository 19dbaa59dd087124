"""Globs name units, regular expressions name paths, and each place that takes one says so where it gets the other."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import PlanError
from fshard.patterns import glob_matches, glob_meant

GLOBS = [
    # glob, what it matches, what it does not
    ("blocks.*", ["blocks.0", "blocks.x"], ["blocks", "blocks.0.attn", "blocksx0"]),
    ("*coder.layers.?", ["encoder.layers.0", "coder.layers.9"], ["encoder.layers.10", "a.encoder.layers.0"]),
    ("a.[0-3]", ["a.0", "a.3"], ["a.4", "a.00"]),
    ("a.[!0-3]", ["a.4", "a.x"], ["a.0", "a.."]),
    ("**", ["a", "a.b.c"], []),
    ("**.attn", ["attn", "a.b.attn"], ["a.b.xattn", "attn.b"]),
    ("a.**", ["a", "a.b", "a.b.c"], ["ab", "b.a"]),
    ("a.**.c", ["a.c", "a.b.b.c"], ["a.b", "ac"]),
    ("**.**", ["a", "a.b"], []),
    ("block(blocks.*)", ["block(blocks.0)"], ["block(other.0)"]),
    ("a+b", ["a+b"], ["aab"]),
]


@pytest.mark.parametrize(("glob", "yes", "no"), GLOBS, ids=lambda value: str(value))
def test_globs_match_part_by_part(glob: str, yes: list[str], no: list[str]) -> None:
    assert [name for name in yes + no if glob_matches(glob, name)] == yes
    assert all(re.fullmatch(fs.glob(glob), below) for name in yes for below in (name, f"{name}.weight"))
    for name in no:  # for paths a glob names subtrees as well
        above = [".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 2)]
        assert bool(re.fullmatch(fs.glob(glob), name)) == any(glob_matches(glob, prefix) for prefix in above)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (r"blocks\..*", "it is a regular expression already"),
        ("", "it is not a glob"),
        (3, "it is not a glob"),
        ("[z-a]", "is not a glob: bad character range"),
    ],
)
def test_what_is_no_glob_is_refused(given: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        fs.glob(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "meant"),
    [(r".*", "**"), (r"blocks\..*", "blocks.*"), (r"blocks\.\d+", "blocks.*"), (r".*\.attn", "**.attn")],
)
def test_a_regular_expression_for_units_gets_its_glob(written: str, meant: str) -> None:
    assert glob_meant(written, ["blocks.0", "a.attn"]).endswith(
        f"these are globs, not regular expressions: write {meant!r}"
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


MODEL = fs.split(Net(), units=("blocks.*",))
MESH = fs.abstract_mesh((2,), ("shard",))
PLAN = fs.make_plan(MODEL, MESH, [(r".*", fs.fsdp("shard"))])
REGEX = r"blocks\.\d"


def trace(**options: object) -> object:
    """Find the schedule of a step."""
    step = fs.make_train_step(lambda p, x: MODEL.apply(p, x).mean(), fs.optim.sgd(0.1), PLAN, **options)  # type: ignore[arg-type]
    return step.trace(torch.zeros(2, 4)).schedule


UNITS: dict[str, Callable[[str], object]] = {
    "split": lambda pattern: fs.split(Net(), units=(pattern,)),
    "make_plan": lambda pattern: fs.make_plan(MODEL.params, MESH, [(r".*", fs.P())], units=(pattern,)),
    "keep": lambda pattern: trace(schedule=fs.Policy(reshard=fs.keep(pattern))),
    "remat": lambda pattern: trace(remat=[(pattern, "all")]),
}


@pytest.mark.parametrize("place", UNITS)
def test_units_are_named_by_globs_everywhere(place: str) -> None:
    for glob in ("blocks.*", "blocks.[01]", "**.1"):
        UNITS[place](glob)
    with pytest.raises(PlanError, match=r"these are globs, not regular expressions: write 'blocks\.\*'"):
        UNITS[place](REGEX)


def rules(pattern: str) -> object:
    return fs.make_plan(MODEL, MESH, [(pattern, fs.fsdp("shard")), (r".*", fs.P())])


PATHS: dict[str, Callable[[str], object]] = {
    "rules": rules,
    "fs.Rule": lambda pattern: fs.make_plan(MODEL, MESH, [fs.Rule(pattern, fs.P()), (r".*", fs.P())]),
    "init": lambda pattern: fs.init_state(PLAN, fs.optim.sgd(0.1), init=[(pattern, fs.init.zeros())]),
    "clip_norm": lambda pattern: trace(clip_norm=[(pattern, 1.0), (r".*", None)]),
    "decay": lambda pattern: fs.init_state(PLAN, fs.optim.adamw(0.1, decay=pattern)),
    "partition": lambda pattern: fs.init_state(
        PLAN, fs.optim.partition([(pattern, fs.optim.sgd(0.1)), (r".*", fs.optim.lion(0.1))])
    ),
    "masked": lambda pattern: fs.init_state(PLAN, fs.optim.masked(fs.optim.sgd(0.1), pattern)),
    "lora": lambda pattern: fs.lora.wrap(MODEL, pattern),
    "ignore": lambda pattern: fs.split(Net().requires_grad_(False), ignore=pattern),
    "sync_buffers": lambda pattern: fs.sync_buffers(
        {"blocks": {"0": {"weight": torch.zeros(1)}}},
        fs.make_plan(MODEL, fs.make_mesh((1,), ("shard",)), [(r".*", fs.P())]),
        [(pattern, "mean"), (r".*", "mean")],
    ),
}


@pytest.mark.parametrize("place", PATHS)
def test_paths_are_named_by_regular_expressions_everywhere(place: str) -> None:
    for pattern in (r"blocks\.0\.weight", fs.glob("blocks.0.weight"), fs.glob("**.weight")):
        PATHS[place](pattern)
    with pytest.raises(PlanError, match=r"is a glob, not a regular expression: write r'\.\*\\\.weight'"):
        PATHS[place]("*.weight")


@pytest.mark.parametrize("place", PATHS)
def test_a_regular_expression_that_misses_gets_the_one_that_was_meant(place: str) -> None:
    with pytest.raises(PlanError, match=r"r'\.\*weight\.\*' matches [12], such as 'blocks\.0\.weight'"):
        PATHS[place]("weight")
