"""Bad plans, meshes and trees get an error that names the path or argument, the numbers and the remedy.

It is the same on every rank, it is raised before anything is communicated, and all problems of one kind are
in one report. Plans are asked as each rank of an abstract mesh, where nothing could be communicated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, errors
from tests.shared.bad import FLAT, UNITS, Raised, alike, attempt, place, rule, weights
from tests.shared.workers import Pools


@dataclass(frozen=True)
class Bad:
    """A call that must fail, and what its message must hold."""

    call: Callable[[fs.Mesh], Any]
    says: tuple[str, ...]
    kind: type[Exception] = errors.PlanError


def _rules(*rules: Any) -> Callable[[fs.Mesh], Any]:
    return lambda mesh: place(mesh, list(rules))


BAD_PLANS = {
    "rule without a leaf": Bad(
        _rules((r"frist\..*", P()), (r"nothing", P()), *FLAT),
        ("2 of 3 rules", r"'frist\\..*'", "'nothing'", "remove the rule"),
    ),
    "rule taken by an earlier one": Bad(
        _rules(*FLAT, (r"first\.w", P())), (r"'first\\.w'", "earlier rule", "rules[1]")
    ),
    "leaf without a rule": Bad(
        _rules((r"first\..*", fs.fsdp("shard"))),
        ("3 of 5 leaves", "middle.w  [9, 9]", "last.w  [3, 9]", "last.b  [3]", "add a rule"),
    ),
    "unknown axis": Bad(
        _rules((r".*\.w", P("model")), (r".*", fs.fsdp("shards"))),
        ("first.w", "middle.w", "last.w", "first.b", "last.b", "'model'", "'shards'", "which has shard"),
    ),
    "axis used twice": Bad(
        _rules((r"middle\.w", P("shard", "shard")), (r"last\.w", P("shard", flat="shard")), *FLAT),
        ("middle.w  [9, 9]", "last.w  [3, 9]", "'shard' is used twice"),
    ),
    "more entries than dims": Bad(
        _rules((r"first\.b", P(None, "shard")), *FLAT),
        ("first.b  [9]", "2 entries for 1 dims", "at most one entry"),
    ),
    "dim that its axis does not divide": Bad(
        _rules((r"middle\.w", P("shard")), (r"last\.w", P(None, "shard")), *FLAT),
        ("middle.w  [9, 9]", "dim 0 has 9", "last.w  [3, 9]", "dim 1 has 9", "2 ranks", "flat='shard'"),
    ),
    "unknown batch axis": Bad(
        lambda mesh: fs.make_plan(weights(), mesh, FLAT, batch=P("data"), units=UNITS), ("'data'", "'shard'")
    ),
    "unit pattern without a subtree": Bad(
        lambda mesh: fs.make_plan(weights(), mesh, FLAT, units=(*UNITS, "blocks.*")), ("'blocks.*'", "units=")
    ),
    "leaf that is no tensor": Bad(
        lambda mesh: fs.make_plan({**weights(), "depth": 3}, mesh, FLAT, units=UNITS), ("depth", "int")
    ),
    "key with a dot": Bad(
        lambda mesh: fs.make_plan({**weights(), "a.b": torch.zeros(1)}, mesh, FLAT, units=UNITS),
        ("'a.b'", "without dots"),
        errors.TreeError,
    ),
    "negative size": Bad(lambda mesh: fs.abstract_mesh((0,), ("shard",)), ("(0,)", "positive")),
    "one name for two axes": Bad(lambda mesh: fs.abstract_mesh((1, 2), ("a", "a")), ("('a', 'a')", "distinct")),
    "rank outside": Bad(lambda mesh: fs.abstract_mesh((2,), ("shard",), rank=2), ("rank=2", "0 to 1")),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_that_cannot_be(name: str) -> None:
    bad, texts = BAD_PLANS[name], set()
    for rank in range(2):
        with pytest.raises(bad.kind) as caught:
            bad.call(fs.abstract_mesh((2,), ("shard",), rank=rank))
        assert isinstance(caught.value, errors.ShardError)
        texts.add(str(caught.value))
    assert len(texts) == 1
    missing = [part for part in bad.says if part not in texts.copy().pop()]
    assert not missing, f"{missing} not in:\n{texts.pop()}"


def _misfit() -> dict[str, Any]:
    """A tree with a leaf missing, one too many, one misshapen, and one that is no tensor."""
    tree_ = weights()
    del tree_["first"]["b"]
    tree_["middle"]["w"] = torch.zeros(9, 8)
    tree_["last"]["b"] = 0.0
    return {**tree_, "extra": {"w": torch.zeros(2)}}


KINDS = ("missing", "first.b", "extra.w", "misshapen", "middle.w", "last.b", "float")
NUMBERS = ("[9]", "[9, 8]", "[9, 9]")


@pytest.mark.parametrize("what", ["init_state", "shard", "unshard"])
def test_params_that_are_not_the_plan_s(what: str) -> None:
    plan = place(fs.make_mesh((-1,), ("shard",)))
    calls = {
        "init_state": lambda: fs.init_state(plan, rule(), params=_misfit()),
        "shard": lambda: fs.shard(_misfit(), plan),
        "unshard": lambda: fs.unshard(_misfit(), plan),
    }
    with pytest.raises(errors.TreeError) as caught:
        calls[what]()
    text = str(caught.value)
    # What a rank holds of a flat leaf is a range, so unshard gives other numbers.
    parts = KINDS if what == "unshard" else KINDS + NUMBERS
    assert not [part for part in parts if part not in text], text


def mesh_on_rank(sizes: tuple[int, ...], names: tuple[str, ...]) -> Raised | None:
    """On a rank: a mesh that the world may not fit."""
    return attempt(lambda: fs.make_mesh(sizes, names))


BAD_MESHES = {
    "-1 that does not divide": (2, (3, -1), ("a", "b"), ("(3, -1)", "2 ranks", "multiple of 3", "'b'")),
    "another world": (2, (3,), ("shard",), ("(3,)", "multiply to 3", "2 ranks", "--nproc-per-node 3")),
    "a smaller mesh": (3, (2,), ("shard",), ("(2,)", "multiply to 2", "3 ranks", "-1")),
    "two open sizes": (2, (-1, -1), ("a", "b"), ("(-1, -1)", "give the sizes")),
}


@pytest.mark.parametrize("name", BAD_MESHES)
def test_a_mesh_that_the_world_does_not_fit(pool: Pools, name: str) -> None:
    world, sizes, names, says = BAD_MESHES[name]
    alike(pool(world).run(mesh_on_rank, sizes, names), "PlanError", says)
