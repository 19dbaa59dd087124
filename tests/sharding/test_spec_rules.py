"""Specs and rules as values, and the reports of everything that is wrong with them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.errors import PlanError
from fshard.sharding.rules import match
from fshard.sharding.validate import check_specs

AXES = ("a", "b", "c", "d")
MESH = fs.abstract_mesh((2, 3, 4), ("data", "tp", "shard"))

entries = st.none() | st.sampled_from(AXES) | st.lists(st.sampled_from(AXES), max_size=3, unique=True).map(tuple)
specs = st.builds(lambda dims, flat: P(*dims, flat=flat), st.lists(entries, max_size=4), entries)


@given(specs)
def test_repr_reads_back(spec: P) -> None:
    again = eval(repr(spec), {"P": P})
    assert again == spec and hash(again) == hash(spec) and repr(again) == repr(spec)


def test_ways_to_write_one_spec() -> None:
    assert P(["a", "b"], flat=["c"]) == P(("a", "b"), flat="c")
    assert P(("a",), ()) == P("a", None)
    assert P("a") != P("a", None) != P(flat="a")
    assert P("a", ("b", "c"), None, flat="d").axes == ("a", "b", "c", "d")
    assert P().axes == ()
    with pytest.raises(AttributeError):
        P("a").flat = "b"  # type: ignore[misc]


@given(specs, st.lists(st.sampled_from(AXES), unique=True).map(tuple))
def test_without(spec: P, gone: tuple[str, ...]) -> None:
    left = spec.without(gone)
    assert left.axes == tuple(axis for axis in spec.axes if axis not in gone)
    assert len(left.dims) == len(spec.dims)
    assert left.without(gone) == left
    assert spec.without(()) == spec


@pytest.mark.parametrize("entry", [3, ("a", 3), ("a", None), {"a"}, 0, False, P()])
def test_entries_that_are_no_axes(entry: Any) -> None:
    for make in (lambda: P(entry), lambda: P(None, flat=entry)):
        with pytest.raises(PlanError, match="name of a mesh axis"):
            make()


def test_tactics_are_values() -> None:
    assert fs.fsdp("shard") == fs.fsdp("shard") != fs.fsdp("data")
    assert fs.fsdp(("data", "shard"))((3, 5)) == P(flat=("data", "shard"))
    assert fs.fsdp("shard", min_size=16)((3, 5)) == P()
    assert fs.fsdp("shard", min_size=15)((3, 5)) == P(flat="shard")
    assert fs.fsdp("shard")(()) == P(flat="shard")


SHAPES = {"blocks.0.w": (8, 8), "blocks.1.w": (8, 8), "norm.w": (8,), "norm.b": (8,)}


def test_the_first_rule_that_matches_the_whole_path_wins() -> None:
    chosen = match(
        [(r"norm", P("tp")), fs.Rule(r"norm\.w", P("data"), compute=P()), (r"norm.*", P()), (r".*\.w", fs.fsdp("tp"))],
        {**SHAPES, "norm": (3,)},
    )
    assert {path: decision[:2] for path, decision in chosen.items()} == {
        "blocks.0.w": (P(flat="tp"), None),
        "blocks.1.w": (P(flat="tp"), None),
        "norm.w": (P("data"), P()),
        "norm.b": (P(), None),
        "norm": (P("tp"), None),
    }
    assert list(chosen) == [*SHAPES, "norm"]
    assert {path: decision.rule.pattern for path, decision in chosen.items() if path.startswith("norm")} == {
        "norm.w": r"norm\.w",
        "norm.b": "norm.*",
        "norm": "norm",
    }


def test_every_leaf_without_a_rule_is_reported() -> None:
    with pytest.raises(PlanError) as caught:
        match([(r"norm\.w", P())], SHAPES)
    for part in ("3 of 4 leaves", "blocks.0.w  [8, 8]", "blocks.1.w  [8, 8]", "norm.b  [8]"):
        assert part in str(caught.value)
    assert "norm.w" not in str(caught.value)


def test_every_rule_without_a_leaf_is_reported() -> None:
    with pytest.raises(PlanError) as caught:
        match([(r"norm\.w", P()), (r".*", P()), (r"norm\..*", P()), (r"nrom", P())], SHAPES)
    for part in ("2 of 4 rules", "rules[2] 'norm", "taken by an earlier rule", "rules[3] 'nrom'", "matches no path"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "rule",
    [
        "w",
        ("w",),
        ("w", "shard"),
        ("w", P(), P()),
        fs.Rule("w", "shard"),
        ("(", P()),
        (3, P()),
        None,
        fs.Rule("w", P(), trainable="no"),
    ],  # type: ignore[arg-type]
)
def test_what_is_no_rule(rule: Any) -> None:
    with pytest.raises(PlanError, match=r"rules\[1\]"):
        match([(".*", P()), rule], {"w": (2,)})


@pytest.mark.parametrize("spec", [None, "ignore"])
def test_a_rule_that_leaves_a_leaf_out_is_told_what_does(spec: Any) -> None:
    with pytest.raises(PlanError, match=r"fs\.split\(module, ignore=pattern\) does, and trainable=False freezes"):
        fs.make_plan({"w": torch.ones(2)}, fs.abstract_mesh((1,), ("s",)), [("w", spec)])


PROBLEMS: dict[str, tuple[P, P | None, tuple[int, ...], str]] = {
    "unknown": (P("model"), None, (8, 8), "no axis 'model' in the mesh, which has data, tp, shard"),
    "unknown in compute": (P("shard"), P("model"), (8, 8), "no axis 'model'"),
    "twice": (P("shard", "shard"), None, (8, 8), "'shard' is used twice"),
    "twice with flat": (P("shard", flat="shard"), None, (8, 8), "'shard' is used twice"),
    "too many": (P(None, None, "tp"), None, (8, 8), "3 entries for 2 dims"),
    "0-dim": (P("tp"), None, (), "1 entries for 0 dims"),
    "odd": (P("tp", "shard"), None, (8, 6), "dim 0 has 8 elements, which 3 ranks"),
    "odd too": (P("tp", "shard"), None, (8, 6), "dim 1 has 6 elements, which 4 ranks"),
    "odd for two axes": (P(("data", "shard")), None, (12,), "which 8 ranks of ('data', 'shard')"),
    "flat on a local axis": (P(flat="tp"), None, (9, 8), "flat='tp' is not gathered for compute"),
    "two dims": (P("data", "shard"), None, (8, 8), "along several dims [0, 1]"),
    "dim and flat": (P("data", flat="shard"), None, (8, 8), "along a dim and flat"),
    "mixed dim": (P(("tp", "shard")), None, (12,), "dim 0 mixes gathered and local axes"),
    "compute adds an axis": (P("shard"), P(None, "tp"), (8, 9), "is not what is left of the spec"),
    "compute moves an axis": (P("shard"), P(None, "shard"), (8, 8), "is not what is left of the spec"),
    "gathered over no data axis": (P("tp"), P(), (9,), "'tp', which is not a data axis"),
    "out of order": (P(flat=("shard", "data")), None, (9,), "lists these axes as ('data', 'shard')"),
    "dim out of order": (P(("shard", "data")), None, (8,), "name them in that order"),
    "compute is flat": (P(flat="shard"), P(flat="shard"), (8, 8), "is not what is left of the spec"),
}


def test_every_problem_of_every_leaf_is_in_one_report() -> None:
    given_ = {path.replace(" ", "_"): (rest, compute) for path, (rest, compute, _, _) in PROBLEMS.items()}
    shapes = {path.replace(" ", "_"): shape for path, (_, _, shape, _) in PROBLEMS.items()}
    with pytest.raises(PlanError) as caught:
        check_specs(given_, shapes, MESH, ("data", "shard"))
    rows = str(caught.value).splitlines()
    for path, (rest, _, shape, says) in PROBLEMS.items():
        head = f"{path.replace(' ', '_')}  {list(shape)}  {rest}: "
        assert [row for row in rows if head in row and says in row], (path, str(caught.value))
    # Each of the two leaves with two dims that do not divide has a line for each dim.
    assert f"{len(PROBLEMS) + 2} problems" in rows[0] and len(rows) == len(PROBLEMS) + 4


@pytest.mark.parametrize(
    ("at_rest", "compute"),
    [
        (P(), None),
        (P(None, None), P()),
        (P("tp", None, flat=("data", "shard")), None),
        (P("tp", "shard"), None),
        (P(("data", "shard")), None),
        (P("shard", flat="data"), P("shard")),  # an expert-parallel leaf
        (P(("shard",)), P(("shard",))),
        (P("shard"), P()),
    ],
)
def test_specs_that_a_layout_has(at_rest: P, compute: P | None) -> None:
    check_specs({"w": (at_rest, compute)}, {"w": (24, 24)}, MESH, ("data", "shard"))


@pytest.mark.parametrize("batch", [P("model"), P(("data", "data")), P("data", "data"), P(flat="data"), None])
def test_batch_specs_that_cannot_be(batch: Any) -> None:
    with pytest.raises(PlanError, match="batch="):
        fs.make_plan({"w": torch.zeros(4)}, MESH, [(".*", P())], batch=batch)
