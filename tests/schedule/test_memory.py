"""The memory of a schedule: lifetimes and ranges against definitions spelled out op by op."""

import re
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fshard.errors import ScheduleError
from fshard.schedule import Op, Pass, Policy, Schedule, StepProgram, build, parse
from fshard.schedule.offsets import pack, stack
from tests.schedule.cases import CASES, POLICIES, encoder_decoder, gpt, info, program, recipes, sends

Span = tuple[int, int]


def alive_at(schedule: Schedule) -> list[dict[str, int]]:
    """The items alive at each op, and their bytes, from the definition."""
    rows: list[dict[str, int]] = []
    now = {f"cast:{g.name}": g.cast_bytes for g in schedule.groups if g.cast_bytes}
    whole = [g for g in schedule.groups if g.trainable and not g.reduced and schedule.train]
    filled = [schedule.groups[i] for op in schedule if op.kind == "backward" for i in schedule.program.reads[op.target]]
    if schedule.policy.update == "deferred":  # the gradients of the step before
        for g in schedule.groups if schedule.train else ():
            part = g.own_bytes > 0 and sends(g, "replica_reduce") > 0
            now |= (
                {f"own:{g.name}" if part else f"shard:{g.name}": g.own_bytes if part else g.shard_bytes}
                if g.trainable
                else {}
            )
    fillings: Counter[str] = Counter()  # of gradients that no reduction has taken
    last = {(op.microbatch, op.target): at for at, op in enumerate(schedule) if op.kind == "backward"}
    for at, op in enumerate(schedule):
        done: list[str] = []
        group = next((g for g in schedule.groups if g.name == op.target), None)
        if op.kind == "backward" and schedule.train:
            for g in (schedule.groups[i] for i in schedule.program.reads[op.target]):
                over = at == last[op.microbatch, op.target]  # autograd adds up what calls of a unit make
                if g.trainable and g.reduced and over:
                    now[f"grad:{g.name}"] = g.grad_bytes
                    fillings[g.name] += 1
                    if fillings[g.name] == 2:  # those that waited, and those that are added
                        now[f"fill:{g.name}"] = 2 * min(g.grad_bytes, g.full_bytes or g.grad_bytes)
                        done.append(f"fill:{g.name}")
                if g in whole and over and f"shard:{g.name}" not in now:  # it is flat beside those of leaves
                    now[f"shard:{g.name}"] = g.shard_bytes
                    now[f"fill:{g.name}"] = min(g.grad_bytes, g.full_bytes or g.grad_bytes)
                    done.append(f"fill:{g.name}")
            if (op.target, op.microbatch) == ("root", schedule.accumulate - 1):  # those that nothing has filled
                now |= {f"shard:{g.name}": g.shard_bytes for g in whole if g not in filled}
        elif op.kind == "all_gather" and group:
            now[f"param:{op.target}"] = group.full_bytes
        elif op.kind == "reduce_scatter" and group:
            (first,) = (move for move in group.transfers if move.kind == "reduce_scatter")
            del fillings[group.name]
            if f"grad:{op.target}" in now:
                once = schedule.accumulate == 1 or schedule.policy.accumulation == "full"
                new = first.staging + group.shard_bytes * (once and not first.late)
                now[f"leaf:{op.target}"] = max(min(group.grad_bytes, group.full_bytes or group.grad_bytes) - new, 0)
                done = [f"leaf:{op.target}"]
            now[f"grad:{op.target}"] = group.grad_bytes
            if not first.late:
                now[f"shard:{op.target}"] = group.shard_bytes
            if first.staging:
                now[f"reduce_scatter:{op.target}"] = first.staging
        elif op.kind == "replica_reduce" and group:
            (second,) = (move for move in group.transfers if move.kind == "replica_reduce")
            extra = {f"replica_reduce:{op.target}": second.staging, f"own:{op.target}": group.own_bytes}
            now |= {item: size for item, size in extra.items() if size}
        elif op.kind in ("free", "wait reduce_scatter", "update", "wait replica_reduce"):
            parted = ("own",) if group and group.own_bytes and sends(group, "replica_reduce") else ("shard",)
            ends = {
                "free": ("param",),
                "wait reduce_scatter": ("grad", "reduce_scatter"),
                "update": parted,
                "wait replica_reduce": ("replica_reduce",),
            }
            kinds = ends[op.kind] + (("shard",) if op.kind == "wait replica_reduce" and parted == ("own",) else ())
            done = [f"{part}:{op.target}" for part in kinds]
        rows.append({item: -(-size // 256) * 256 for item, size in now.items()})
        for item in done:
            now.pop(item, None)
        if op.kind == "wait reduce_scatter" and group:
            now[f"shard:{op.target}"] = group.shard_bytes
    return rows


def agrees(schedule: Schedule) -> None:
    """Everything that memory claims, against the definition."""
    memory, rows = schedule.memory, alive_at(schedule)
    inside = [{item: size for item, size in row.items() if item.startswith("param:")} for row in rows]
    beside = [sum(row.values()) - sum(part.values()) for row, part in zip(rows, inside, strict=True)]
    assert set(memory.offsets) == {item for row in inside for item in row}
    assert set(memory.lifetimes) == set(memory.sizes) == {item for row in rows for item in row}
    assert memory.profile == tuple(sum(row.values()) for row in rows)
    assert [memory.peak(i) for i in range(len(schedule))] == [memory.arena_bytes + size for size in beside]
    assert memory.peak_bytes == memory.arena_bytes + max(beside)
    assert memory.lower_bound == max(sum(part.values()) for part in inside)
    assert memory.lower_bound <= memory.arena_bytes <= sum(memory.sizes[item] for item in memory.offsets)
    for row in inside:
        ranges = sorted((memory.offset(item), memory.offset(item) + size) for item, size in row.items() if size)
        assert all(a[1] <= b[0] for a, b in zip(ranges, ranges[1:], strict=False))
        assert all(start % 256 == 0 and end <= memory.arena_bytes for start, end in ranges)
    for item, lives in memory.lifetimes.items():
        assert [i for i, row in enumerate(rows) if item in row] == [
            i for first, last in lives for i in range(first, last + 1)
        ]


@given(recipes())
def test_memory_is_what_the_ops_say(recipe: Any) -> None:
    agrees(build(*recipe))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_memory_of_the_cases(case: str, policy: Policy) -> None:
    for accumulate, train in ((1, True), (3, True), (1, False)):
        agrees(build(*CASES[case](), policy, accumulate, train))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("blocks", [4, 24])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_arenas_are_close_to_the_bound(policy: Policy, blocks: int, accumulate: int) -> None:
    for made, groups in (gpt(blocks), gpt(blocks, root=50 * 2**20), encoder_decoder()):
        memory = build(made, groups, policy, accumulate).memory
        assert memory.arena_bytes <= 1.07 * memory.lower_bound


def test_a_few_slots_carry_a_chain_of_any_length() -> None:
    made, groups = gpt(50, root=0)
    resident = [info(group.name, group.full_bytes, trainable=False) for group in groups]
    for prefetch in (0, 1, 2, 3):
        assert build(made, resident, Policy(prefetch)).memory.arena_bytes == (prefetch + 1) * 2**20
    assert build(made, resident, Policy(reshard=False)).memory.arena_bytes == 50 * 2**20


def test_gradients_live_from_the_last_backward_of_their_unit_to_the_collect() -> None:
    schedule = build(*CASES["twice"](), Policy(prefetch=0), accumulate=1)
    at = {str(op): i for i, op in enumerate(schedule)}
    assert schedule.memory.lifetimes["grad:a"] == ((at["backward a"], at["wait reduce_scatter a"]),)
    assert schedule.memory.lifetimes["reduce_scatter:a"] == ((at["reduce_scatter a"], at["wait reduce_scatter a"]),)
    assert len(schedule.memory.lifetimes["param:a"]) == 3  # call 0, call 1 with its backward, backward of call 0


def test_gradients_nobody_fills_live_from_reduce_to_collect() -> None:
    schedule = build(program(("a",), {"a": (0,)}), [info("a"), info("idle")], Policy())
    at = {str(op): i for i, op in enumerate(schedule)}
    assert schedule.memory.lifetimes["grad:idle"] == ((at["reduce_scatter idle"], at["wait reduce_scatter idle"]),)
    assert "param:idle" not in schedule.memory.offsets


def test_shards_wait_for_the_update_of_the_next_step() -> None:
    schedule = build(*gpt(2), Policy(), accumulate=2)
    at = {str(op): i for i, op in enumerate(schedule)}
    last = len(schedule) - 1
    assert schedule.memory.lifetimes["shard:blocks.1"] == (
        (0, at["update blocks.1"]),
        (at["reduce_scatter blocks.1"], last),
    )
    schedule = build(*gpt(2), Policy(update="in_backward"), accumulate=2)
    at = {str(op): i for i, op in enumerate(schedule)}
    assert schedule.memory.lifetimes["shard:blocks.1"] == ((at["reduce_scatter blocks.1"], at["update blocks.1"]),)


@pytest.mark.parametrize("sent", [2 * 2**20 - 2**18, 0])
def test_a_shard_takes_memory_when_its_flat_gradient_has_gone(sent: int) -> None:
    made = program(("a",), {"a": (0,)})
    schedule = build(made, [info("a", reduce_scatter=sent)], Policy(accumulation="sharded"), accumulate=2)
    at, last = {str(op): i for i, op in enumerate(schedule)}, len(schedule) - 1
    # Where something else than the shard's dtype travels, the sum cannot be made where it is received.
    born = at["wait reduce_scatter a"] + 1 if sent else at["reduce_scatter a"]
    assert schedule.memory.lifetimes["shard:a"] == ((0, at["update a"]), (born, last))


def test_gradients_without_transfers_live_from_a_backward_to_the_update() -> None:
    groups = [info("a", gathered=False, reduced=False), info("b", gathered=False), info("c", trainable=False)]
    made = program(("a", "b"), {"a": (0, 2), "b": (1,)})
    schedule = build(made, groups, Policy())
    assert set(schedule.memory.offsets) == {"param:c"}
    items = {"param:c", "shard:a", "fill:a", "grad:b", "leaf:b", "reduce_scatter:b", "shard:b"}
    assert set(schedule.memory.sizes) == items
    at = {str(op): i for i, op in enumerate(schedule)}
    assert schedule.memory.lifetimes["shard:a"] == ((0, at["update a"]), (at["backward a"], len(schedule) - 1))
    assert schedule.memory.lifetimes["fill:a"] == ((at["backward a"], at["backward a"]),)
    assert set(build(made, groups, Policy(), train=False).memory.sizes) == {"param:c"}


def test_a_gradient_that_a_pass_does_not_fill_is_zero_after_it_and_was_applied_before() -> None:
    """The second pass alone reads b, so that nothing gathers it before, and its update could come as late."""
    groups = [info("a", gathered=False, reduced=False), info("b", reduced=False)]
    first, second = program(("a",), {"a": (0,)}), program(("a", "b"), {"a": (0,), "b": (1,)})
    stages = StepProgram((Pass(first, gradients={0: 0, 1: 1}), Pass(second, gradients={})), {0: 0, 1: 1})
    schedule = build(stages, groups, Policy(prefetch=0))
    at = {str(op): i for i, op in enumerate(schedule)}
    assert at["update b"] < at["backward root"] < at["all_gather b"]
    assert schedule.memory.lifetimes["shard:b"] == ((0, at["update b"]), (at["backward root"], len(schedule) - 1))


@pytest.mark.parametrize("train", [True, False])
def test_casts_of_shards_are_there_all_the_time(train: bool) -> None:
    groups = [replace(info("a"), cast_bytes=1024), replace(info("b", trainable=False), cast_bytes=512)]
    schedule = build(program(("a", "b"), {"a": (0,), "b": (1,)}), groups, Policy(), train=train)
    plain = build(
        program(("a", "b"), {"a": (0,), "b": (1,)}), [info("a"), info("b", trainable=False)], Policy(), 1, train
    )
    assert schedule.memory.peak_bytes == plain.memory.peak_bytes + 1024 + 512
    assert schedule.memory.lifetimes["cast:b"] == ((0, len(schedule) - 1),)
    assert parse(str(schedule)) == schedule


def test_memory_prints() -> None:
    lines = str(build(*gpt(1), Policy()).memory).splitlines()
    assert re.fullmatch(
        r"at most [\d.]+ MiB, at op \d+; arena [\d.]+ MiB, of which at most [\d.]+ MiB are alive", lines[0]
    )
    assert any(line.split()[:2] == ["beside", "grad:blocks.0"] for line in lines[1:])
    assert any(line.split()[1] == "param:blocks.0" and "ops 4-" in line for line in lines[1:])


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ([Op("all_gather", "a"), Op("all_gather", "a")], "param:a at op 1, 'all_gather a': it is alive since op 0"),
        ([Op("free", "a")], "param:a at op 0, 'free a': no lifetime of it has begun"),
        ([Op("all_gather", "a")], "param:a at op 0, 'all_gather a': its lifetime never ends"),
    ],
)
def test_ops_out_of_turn_have_no_memory(ops: list[Op], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        _ = Schedule(tuple(ops), (info("a"),), program((), {"u": (0,)}), Policy()).memory


SPANS = st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True).map(
    lambda cuts: [(a, b) for a, b in zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False)]
)


@given(st.lists(st.tuples(st.integers(0, 9), SPANS), max_size=25))
def test_packing_any_lifetimes(items: list[tuple[int, list[Span]]]) -> None:
    sizes, spans = [size for size, _ in items], [lives for _, lives in items]
    bound = max((sum(s for s, lives in items if any(a <= t <= b for a, b in lives)) for t in range(61)), default=0)
    offsets = pack(sizes, spans, bound)
    disjoint(sizes, spans, offsets)


def test_many_long_lifetimes_are_stacked() -> None:
    count = 300
    spans = [[(i, 3 * count - i)] for i in range(count)] + [[(count + i, count + i + 2)] for i in range(count)]
    sizes = [4] * count + [1] * count
    assert len(stack(sizes, spans)) > 50
    offsets = pack(sizes, spans, bound=4 * count + 3)
    disjoint(sizes, spans, offsets)
    assert max(o + s for o, s in zip(offsets, sizes, strict=True)) == 4 * count + 3


def test_stacks_leave_out_what_crosses() -> None:
    short = [[(i, i)] for i in range(1000)]
    spans = [[(0, 600)], [(300, 900)], [(100, 500)], [(610, 990)], *short]
    assert set(stack([1] * len(spans), spans)) & {0, 1, 2, 3} == {0, 2, 3}


def disjoint(sizes: list[int], spans: list[list[Span]], offsets: list[int]) -> None:
    """Items alive at the same time have disjoint ranges."""
    for i, j in combinations(range(len(sizes)), 2):
        if sizes[i] and sizes[j] and any(a <= d and c <= b for a, b in spans[i] for c, d in spans[j]):
            assert offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]
