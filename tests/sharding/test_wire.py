"""Wire formats in plans and schedules: what travels, how much of it, and what cannot be."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.errors import PlanError, ScheduleError
from fshard.schedule import Policy, Transfer, build, check, parse
from fshard.schedule.infos import group_infos
from fshard.sharding.layout import ALIGN
from tests.schedule.cases import gpt

PARAMS = {
    "a": {"w": torch.zeros(40, 30), "b": torch.zeros(7)},
    "b": torch.zeros(6),
    "ids": torch.zeros(5, dtype=torch.int64),
}
REST = (r".*", fs.fsdp("shard"))
MESH = fs.abstract_mesh((2, 4), ("replica", "shard"))


def plan_of(wire: fs.Wire | None, *rules: Any, mesh: fs.Mesh = MESH) -> fs.Plan:
    return fs.make_plan(PARAMS, mesh, rules or (REST,), batch=P(("replica", "shard")), units=("a",), wire=wire)


def transfers(plan: fs.Plan) -> dict[tuple[str, str], Transfer]:
    return {(info.name, move.kind): move for info in group_infos(plan) for move in info.transfers}


BAD = {
    "an unknown format": (lambda: fs.Wire("int7"), "gather='int7': 'int7' is none of 'fp32', 'bf16', 'fp8_e4m3', "),
    "a dtype": (lambda: fs.Wire(reduce=torch.int8), "torch.int8 is none of"),  # type: ignore[arg-type]
    "an unknown format of an axis": (lambda: fs.Wire(reduce={"shard": "fp4"}), "'fp4' is none of"),
    "no format of an axis": (lambda: fs.Wire(reduce={"shard": None}), "None is none of"),  # type: ignore[dict-item]
    "axes that are no string": (lambda: fs.Wire(reduce={("a", "b"): "int8"}), "axes are strings"),  # type: ignore[dict-item]
    "a block of three": (lambda: fs.Wire("int8", block=3), "block=3 must be a power of two, at least 16"),
    "a block that is no number": (lambda: fs.Wire("int8", block=True), "block=True must be a power of two"),
    "a rotation of nothing": (lambda: fs.Wire("int8", rotate=True), "no gradients travel in blocks"),
    "a rotation of bf16": (lambda: fs.Wire(reduce="bf16", rotate=True), "no gradients travel in blocks"),
    "a rotation that is no flag": (lambda: fs.Wire(reduce="int8", rotate=1), "rotate=1 must be True or False"),  # type: ignore[arg-type]
    "stochastic floats": (lambda: fs.Wire(reduce="fp8_e4m3", rounding="stochastic"), "no gradients travel as integers"),
    "an unknown rounding": (lambda: fs.Wire(reduce="int8", rounding="up"), "rounding='up' must be"),  # type: ignore[arg-type]
    "a plan's wire that is none": (lambda: plan_of("int8"), "wire='int8' must be fs.Wire"),  # type: ignore[arg-type]
    "a rule's wire that is none": (
        lambda: plan_of(None, fs.Rule(".*", P(), wire="int8")),  # type: ignore[arg-type]
        r"rules\[0\] '\.\*': wire='int8' must be fs.Wire",
    ),
    "another wire that is none": (lambda: plan_of(None).replace(wire="int8"), "plan.replace: wire='int8' must be"),  # type: ignore[arg-type]
    "blocks that a dim cuts": (
        lambda: plan_of(fs.Wire("int8"), fs.Rule("a.w", P("shard")), REST),
        r"(?s)a\.w  \[40, 30\]  P\('shard'\), .*all_gather in int8/256: its blocks are 256 elements in a row, which a "
        r"shard along dim 0 cuts; use flat=, such as fs\.fsdp\('shard'\), or 'bf16'",
    ),
    "a format of no transfer": (
        lambda: plan_of(fs.Wire(gather={"replica": "int8"})),
        "gather= names 'replica', and these leaves have transfers over shard",
    ),
    "a format of no leaf": (
        lambda: plan_of(fs.Wire(gather="int8"), (".*", P())), "gather='int8' has no effect: none of its 3 leaves",
    ),
    "an axis that does not exist": (
        lambda: plan_of(fs.Wire(reduce={"pod": "int8"})), "reduce= names 'pod', and these leaves",
    ),
    "too many replicas": (
        lambda: plan_of(fs.Wire(reduce="int8"), mesh=fs.abstract_mesh((8, 2), ("replica", "shard"))),
        "replica_reduce in int8/256: each of 8 replicas would send its shard to each other one, more than an exact sum",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(PlanError, match=message):
        make()


def test_a_wire_is_a_value() -> None:
    one, other = fs.Wire("int8", {"replica": "int4"}, block=64), fs.Wire("int8", {"replica": "int4"}, block=64)
    assert one == other and hash(one) == hash(other) and eval(repr(one), {"Wire": fs.Wire}) == one
    with pytest.raises(AttributeError):
        one.block = 16  # type: ignore[misc]


def test_the_bytes_are_the_formats_minimum() -> None:
    """A payload of the format's bits, and four bytes a block."""
    plan = plan_of(fs.Wire("int8", {"replica": "int4"}))
    moves = transfers(plan)
    group = next(group for group in plan.groups if group.name == "a")
    assert group.chunk % 256 == 0
    shard = group.chunk + group.chunk // 256 * 4
    assert (moves["a", "all_gather"].sent, moves["a", "all_gather"].wire) == (3 * shard, "int8/256")
    assert moves["a", "all_gather"].staging == 4 * shard
    assert moves["a", "reduce_scatter"].wire == ""
    half = group.chunk // 2 + group.chunk // 256 * 4
    assert (moves["a", "replica_reduce"].sent, moves["a", "replica_reduce"].wire) == (half, "int4/256")


@pytest.mark.parametrize(
    "rules", [(REST,), (fs.Rule(".*", fs.fsdp("shard"), align="leaf"),), (fs.Rule(".*", fs.fsdp("shard"), align=48),)]
)
@pytest.mark.parametrize("block", [16, 64, 256])
def test_no_block_is_cut(block: int, rules: Any) -> None:
    for ranks in (1, 2, 3, 5):
        mesh = fs.abstract_mesh((1, ranks), ("replica", "shard"))
        for group in plan_of(fs.Wire("int8", block=block), *rules, mesh=mesh).groups:
            grid = block if group.dtype.is_floating_point else ALIGN
            assert group.chunk % grid == 0
            for start in group.starts:
                assert start % grid == 0


def test_leaves_of_other_wires_are_other_groups() -> None:
    """Integers are as they are."""
    plan = plan_of(fs.Wire("int8"), fs.Rule("a.b", fs.fsdp("shard"), wire=fs.Wire()), REST)
    formats = {
        leaf.path: {kind: str(form) for kind, form in group.wires.items()}
        for group in plan.groups
        for leaf in group.leaves
    }
    assert formats == {"a.w": {"all_gather": "int8/256"}, "a.b": {}, "b": {"all_gather": "int8/256"}, "ids": {}}
    assert "wire" not in plan_of(None).texts[1]["leaf a.w"]
    assert "wire=Wire(gather='int8')" in plan.texts[1]["leaf a.w"]


def test_the_table_says_it() -> None:
    shown = str(plan_of(fs.Wire("int8", {"replica": "int4"}))).splitlines()
    assert shown[-2:] == [
        "all_gather in int8/256: 3.0 KiB, of 12.0 KiB, in 2 groups",
        "replica_reduce in int4/256: 396 B, of 3.0 KiB, in 2 groups",
    ]


def test_another_wire_of_the_same_plan() -> None:
    plan = plan_of(fs.Wire("int8"))
    assert plan.replace(wire=fs.Wire()) == plan_of(None)
    assert plan.replace(rules=[REST]) == plan


def test_a_schedule_says_it_and_reads_it_back() -> None:
    program, groups, policy = gpt(2)[0], gpt(2)[1], Policy()

    def packed(move: Transfer) -> Transfer:
        return replace(move, wire="int8/256", staging=512) if move.kind == "all_gather" else move

    made = [replace(group, transfers=tuple(map(packed, group.transfers))) for group in groups]
    schedule = build(program, made, policy)
    check(schedule)
    assert parse(str(schedule)) == schedule
    assert re.search(r"all_gather +state -> param sent=\d+ staging=512 as int8/256", str(schedule))
    assert schedule.hash != build(program, groups, policy).hash
    with pytest.raises(PlanError, match="is not the name of a wire format"):
        Transfer("all_gather", "state", "param", wire="int8 256")
    with pytest.raises(ScheduleError, match="expected sent="):
        parse(str(schedule).replace("as int8/256", "as", 1))


def test_a_packed_source_ends_with_the_start_of_its_transfer() -> None:
    params = {str(n): torch.zeros(64, 64) for n in range(3)}
    mesh = fs.abstract_mesh((4,), ("shard",))
    peaks = {}
    for wire in (fs.Wire(), fs.Wire(reduce="int8")):
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], units=(), wire=wire)
        step = fs.make_train_step(lambda p, x: sum((w * x).sum() for w in p.values()), fs.optim.sgd(0.1), plan)
        schedule = step.trace(torch.ones(1)).schedule
        starts = [number for number, op in enumerate(schedule) if op.kind == "reduce_scatter"]
        waits = [number for number, op in enumerate(schedule) if op.kind == "wait reduce_scatter"]
        lives = schedule.memory.lifetimes["grad:root"]
        assert lives[-1][1] == (starts if wire.reduce else waits)[-1]
        peaks[wire] = schedule.memory.peak_bytes
    assert len(peaks) == 2
