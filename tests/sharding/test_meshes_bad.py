"""Specs of several axes that cannot be: errors that name the leaf, the numbers and the remedy."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.errors import PlanError

MESH = fs.abstract_mesh((2, 2, 2), ("data", "shard", "tp"))
BATCH = P(("data", "shard"))


def _plan(*rules: Any, frozen: bool = False) -> fs.Plan:
    params = {"a": {"w": torch.zeros(4, 6)}, "b": torch.zeros(6, dtype=torch.int64 if frozen else torch.float32)}
    return fs.make_plan(params, MESH, rules, batch=BATCH, units=("a",))


REST = (r".*", P())
WRONG = {
    "gathered where compute needs it local": (
        fs.Rule(r"a\.w", P("tp"), compute=P()), ["a.w  [4, 6]", "gathered for compute over 'tp'", "not a data axis"],
    ),
    "flat over an axis that is never gathered": (
        (r"a\.w", P(flat="tp")), ["flat='tp' is not gathered for compute", "cut a tensor dim by 'tp'"],
    ),
    "local where it is whole at rest": (
        fs.Rule(r"a\.w", P(), compute=P("shard")), ["compute=P('shard') is not what is left of the spec"],
    ),
    "an optimizer axis that is no data axis": (
        fs.Rule(r"a\.w", P(), opt=P(flat="tp")), ["a.w  [4, 6]", "'tp' is not a data axis", "('data', 'shard')"],
    ),
    "an optimizer axis that does not exist": (
        fs.Rule(r"a\.w", P(), opt=P(flat="replica")), ["no axis 'replica' in the mesh"],
    ),
    "an optimizer over fewer axes": (
        fs.Rule(r"a\.w", fs.fsdp(("data", "shard")), opt=fs.fsdp("data")),
        ["must be the leaf's own spec with further axes behind its flat ones"],
    ),
    "an optimizer on other axes": (
        fs.Rule(r"a\.w", fs.fsdp("shard"), opt=fs.fsdp("data")), ["such as P(flat=('shard', 'data'))"],
    ),
    "an optimizer cut along a dim": (
        fs.Rule(r"a\.w", P(), opt=P("shard")), ["must be the leaf's own spec", "such as P(flat=('data', 'shard'))"],
    ),
    "an optimizer's dim that does not divide": (
        fs.Rule(r"a\.w", P(None, "tp"), opt=P(None, ("tp", "data"), flat="shard")),
        ["dim 1 has 6 elements, which 4 ranks of ('tp', 'data') do not divide"],
    ),
    "axes in another order than the mesh's": (
        fs.Rule(r"a\.w", P(), opt=P(flat=("shard", "data"))), ["name them as ('data', 'shard')"],
    ),
    "a leaf that is gathered along a dim": (
        fs.Rule(r"a\.w", P("shard"), opt=P("shard", flat="data")), ["dim 0 is gathered for compute", "use flat="],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused(name: str) -> None:
    rule, words = WRONG[name]
    with pytest.raises(PlanError) as caught:
        _plan(rule, REST)
    for word in words:
        assert word in str(caught.value)


def test_frozen_leaves_have_no_optimizer_state_to_place() -> None:
    with pytest.raises(PlanError, match=r"b  \[6\].*frozen.*a rule of their own"):
        _plan(fs.Rule(r".*", P(), opt=P(flat="data")), frozen=True)
    with pytest.raises(PlanError, match="frozen"):
        _plan(fs.Rule(r".*", P(), opt=P(flat="data"), trainable=False))


def test_all_problems_are_in_one_report() -> None:
    with pytest.raises(PlanError, match="2 problems with opt="):
        _plan(fs.Rule(r".*", P(), opt=P(flat="tp")))


def test_it_shows_in_the_table() -> None:
    plan = _plan(fs.Rule(r"a\.w", fs.fsdp("shard"), opt=fs.fsdp(("shard", "data"))), REST)
    assert "f32[4, 6]@flat(shard) opt@flat(data)" in str(plan)
    assert len(plan.groups) == 2 and plan.groups[0].owned.numel == plan.groups[0].numel
