"""What makes a schedule right, as statements about the positions of ops. Shares no code with ``fshard.schedule``."""

import re
from collections.abc import Iterator
from itertools import pairwise

from fshard.schedule import Op, Schedule
from tests.schedule.cases import horizon, kept_groups, sends, sequence


def valid(schedule: Schedule) -> bool:
    """Whether every statement about positions holds."""
    return all(_statements(schedule))


def _statements(s: Schedule) -> Iterator[bool]:
    computes = [i for i, op in enumerate(s.ops) if op.kind in ("forward", "backward")]
    names = {group.name for group in s.groups}
    yield [s.ops[i] for i in computes] == sequence(s.program, s.accumulate)
    yield [i for i, op in enumerate(s.ops) if op.kind == "handshake"] == [0]
    yield [i for i, op in enumerate(s.ops) if op.kind == "consensus"] == [len(s.ops) - 1] * s.train
    for op in s.ops:
        yield op.kind in ("forward", "backward") or op.target in (
            ("",) if op.kind in ("handshake", "consensus") else names
        )
        yield not op.index or op.kind in ("forward", "backward")
        yield not op.microbatch or op.kind in ("forward", "backward", "reduce_scatter", "wait reduce_scatter")
    flights = sums = 0
    sending = {g.name for g in s.groups if sends(g, "reduce_scatter") or not sends(g, "replica_reduce")}
    for op in s.ops:
        flights += ((op.kind == "reduce_scatter") - (op.kind == "wait reduce_scatter")) * (op.target in sending)
        sums += (op.kind == "replica_reduce") - (op.kind == "wait replica_reduce")
        yield flights <= s.policy.reduces
        yield sums <= s.policy.reduces + 1
    for g, group in enumerate(s.groups):
        mine = [
            (i, op) for i, op in enumerate(s.ops) if op.target == group.name and op.kind not in ("forward", "backward")
        ]
        users = [i for i in computes if g in s.program.reads[s.ops[i].target]]
        yield from _slot_statements(s, g, [(i, op.kind) for i, op in mine], computes, users)
        yield from _gradient_statements(s, g, mine, computes)
        yield from _update_statements(s, g, mine, computes, users)
        yield from _replica_statements(s, g, mine, computes, users)


def _replica_statements(
    s: Schedule, g: int, mine: list[tuple[int, Op]], computes: list[int], users: list[int]
) -> Iterator[bool]:
    group, at = s.groups[g], {op.kind: i for i, op in mine}
    sums, shares = ("replica_reduce", "wait replica_reduce"), ("update_gather", "wait update_gather")
    summed = s.train and group.trainable and group.reduced and sends(group, "replica_reduce") > 0
    spread = s.train and group.trainable and sends(group, "update_gather") > 0
    yield [op.kind for _, op in mine if op.kind in sums] == [*sums] * summed
    yield [op.kind for _, op in mine if op.kind in shares] == [*shares] * spread
    if summed and "wait reduce_scatter" in at and "replica_reduce" in at and "update" in at:
        yield at["wait reduce_scatter"] < at["replica_reduce"]
        yield s.policy.update == "deferred" or at["wait replica_reduce"] < at["update"]
    if spread and "update_gather" in at and "wait update_gather" in at and "update" in at:
        yield at["update"] < at["update_gather"]
        readers = computes if g in s.program.reads["root"] else users
        gathers = [i for i, op in mine if op.kind == "all_gather"]
        yield s.policy.update != "deferred" or all(at["wait update_gather"] < i for i in (*gathers, *readers))


def _slot_statements(
    s: Schedule, g: int, mine: list[tuple[int, str]], computes: list[int], users: list[int]
) -> Iterator[bool]:
    turns = [(i, kind) for i, kind in mine if kind in ("all_gather", "wait all_gather", "free")]
    yield re.fullmatch("(all_gather wait all_gather free )*", "".join(f"{kind} " for _, kind in turns)) is not None
    yield s.groups[g].gathered or not turns
    spans = [(turns[k][0], turns[k + 1][0], turns[k + 2][0]) for k in range(0, len(turns) - 2, 3)]
    in_root = g in s.program.reads["root"]
    if s.groups[g].gathered:
        for user in computes if in_root else users:
            yield any(wait < user < free for _, wait, free in spans)
    kept = g in kept_groups(s.program, s.policy)
    yield not kept or len(spans) <= 1
    for gather, _, free in spans:
        ahead = [user for user in users if user > gather]
        yield bool(ahead) and sum(gather < i < ahead[0] for i in computes) <= s.policy.prefetch
        for k, i in enumerate(computes):
            if gather < i < free and not kept:
                end = horizon([s.ops[j] for j in computes], k, s.policy.prefetch)
                yield any(j in users for j in computes[k : end + 1])


def _gradient_statements(s: Schedule, g: int, mine: list[tuple[int, Op]], computes: list[int]) -> Iterator[bool]:
    turns = [(i, op) for i, op in mine if op.kind in ("reduce_scatter", "wait reduce_scatter")]
    due = s.train and s.groups[g].trainable and s.groups[g].reduced
    rounds = range(s.accumulate)[-1 if s.policy.accumulation == "full" else 0 :] if due else ()
    expected = [(kind, m) for m in rounds for kind in ("reduce_scatter", "wait reduce_scatter")]
    yield [(op.kind, op.microbatch) for _, op in turns] == expected
    for (i, op), (_, later) in pairwise([*turns, (0, Op(""))]):
        before = [j for j in computes if j < i]
        yield not before or s.ops[before[-1]].microbatch == op.microbatch or op.kind == "wait reduce_scatter"
        filling = [j for j in computes if s.ops[j].kind == "backward" and g in s.program.reads[s.ops[j].target]]
        ends = [j for j in computes if s.ops[j].kind == "backward" and s.ops[j].target == "root"]
        fills = [j for j in filling or ends if s.ops[j].microbatch == op.microbatch]
        yield op.kind == "wait reduce_scatter" or all(j < i for j in fills)
        again = [j for j in filling if s.ops[j].microbatch == op.microbatch + 1]
        yield op.kind == "reduce_scatter" or all(i < j for j in again)
        yield later is not op


def _update_statements(
    s: Schedule, g: int, mine: list[tuple[int, Op]], computes: list[int], users: list[int]
) -> Iterator[bool]:
    updates = [i for i, op in mine if op.kind == "update"]
    yield len(updates) == (s.train and s.groups[g].trainable)
    if len(updates) != 1:
        return
    others = [i for i, op in mine if op.kind in ("all_gather", "reduce_scatter")]
    readers = computes if g in s.program.reads["root"] else users
    if s.policy.update == "deferred":
        yield all(updates[0] < i for i in (*others, *readers))
    else:
        collects = [i for i, op in mine if op.kind == "wait reduce_scatter"]
        fills = [i for i in users if s.ops[i].kind == "backward"] or computes[-1:]
        yield all(i < updates[0] for i in (*users, *collects, *(() if s.groups[g].reduced else fills)))
