"""What makes a schedule right, as statements about the positions of ops. Shares no code with ``fshard.schedule``."""

import re
from collections.abc import Iterator
from itertools import pairwise

from fshard.schedule import Op, Schedule
from tests.schedule.cases import horizon, kept_groups, sequence


def valid(schedule: Schedule) -> bool:
    """Whether every statement about positions holds."""
    return all(_statements(schedule))


def _statements(s: Schedule) -> Iterator[bool]:
    computes = [i for i, op in enumerate(s.ops) if op.kind in ("forward", "backward")]
    names = {group.name for group in s.groups}
    yield [s.ops[i] for i in computes] == sequence(s.program, s.accumulate)
    yield [i for i, op in enumerate(s.ops) if op.kind == "agree"] == [0]
    yield [i for i, op in enumerate(s.ops) if op.kind == "commit"] == [len(s.ops) - 1] * s.train
    for op in s.ops:
        yield op.kind in ("forward", "backward") or op.target in (("",) if op.kind in ("agree", "commit") else names)
        yield not op.index or op.kind in ("forward", "backward")
        yield not op.microbatch or op.kind in ("forward", "backward", "reduce", "collect")
    flights = sums = 0
    sending = {group.name for group in s.groups if group.reduce_sent or not group.sum_sent}
    for op in s.ops:
        flights += ((op.kind == "reduce") - (op.kind == "collect")) * (op.target in sending)
        sums += (op.kind == "sum") - (op.kind == "total")
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
    turns = [op.kind for _, op in mine if op.kind in ("collect", "update", "sum", "total", "spread", "join")]
    summed = s.train and group.trainable and group.reduced and group.sum_sent > 0
    spread = s.train and group.trainable and group.spread_sent > 0
    yield [kind for kind in turns if kind in ("sum", "total")] == ["sum", "total"] * summed
    yield [kind for kind in turns if kind in ("spread", "join")] == ["spread", "join"] * spread
    if summed and "collect" in at and "sum" in at and "update" in at:
        yield at["collect"] < at["sum"]
        yield s.policy.update == "deferred" or at["total"] < at["update"]
    if spread and "spread" in at and "join" in at and "update" in at:
        yield at["update"] < at["spread"]
        readers = computes if g in s.program.reads["root"] else users
        gathers = [i for i, op in mine if op.kind == "gather"]
        yield s.policy.update != "deferred" or all(at["join"] < i for i in (*gathers, *readers))


def _slot_statements(
    s: Schedule, g: int, mine: list[tuple[int, str]], computes: list[int], users: list[int]
) -> Iterator[bool]:
    turns = [(i, kind) for i, kind in mine if kind in ("gather", "wait", "free")]
    yield re.fullmatch("(gather wait free )*", "".join(f"{kind} " for _, kind in turns)) is not None
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
    turns = [(i, op) for i, op in mine if op.kind in ("reduce", "collect")]
    due = s.train and s.groups[g].trainable and s.groups[g].reduced
    rounds = range(s.accumulate)[-1 if s.policy.accumulation == "full" else 0 :] if due else ()
    expected = [(kind, m) for m in rounds for kind in ("reduce", "collect")]
    yield [(op.kind, op.microbatch) for _, op in turns] == expected
    for (i, op), (_, later) in pairwise([*turns, (0, Op(""))]):
        before = [j for j in computes if j < i]
        yield not before or s.ops[before[-1]].microbatch == op.microbatch or op.kind == "collect"
        filling = [j for j in computes if s.ops[j].kind == "backward" and g in s.program.reads[s.ops[j].target]]
        ends = [j for j in computes if s.ops[j].kind == "backward" and s.ops[j].target == "root"]
        fills = [j for j in filling or ends if s.ops[j].microbatch == op.microbatch]
        yield op.kind == "collect" or all(j < i for j in fills)
        again = [j for j in filling if s.ops[j].microbatch == op.microbatch + 1]
        yield op.kind == "reduce" or all(i < j for j in again)
        yield later is not op


def _update_statements(
    s: Schedule, g: int, mine: list[tuple[int, Op]], computes: list[int], users: list[int]
) -> Iterator[bool]:
    updates = [i for i, op in mine if op.kind == "update"]
    yield len(updates) == (s.train and s.groups[g].trainable)
    if len(updates) != 1:
        return
    others = [i for i, op in mine if op.kind in ("gather", "reduce")]
    readers = computes if g in s.program.reads["root"] else users
    if s.policy.update == "deferred":
        yield all(updates[0] < i for i in (*others, *readers))
    else:
        collects = [i for i, op in mine if op.kind == "collect"]
        fills = [i for i in users if s.ops[i].kind == "backward"] or computes[-1:]
        yield all(i < updates[0] for i in (*users, *collects, *(() if s.groups[g].reduced else fills)))
