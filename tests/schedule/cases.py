"""Programs to schedule, and what schedules mean, written to be read and not to be fast.

``naive`` is the building rule word for word. It shares no code with ``fshard.schedule``.
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from fshard.schedule import Call, GroupInfo, Op, Policy, Program, Transfer
from fshard.schedule.policy import Keep, keep

MiB = 2**20

SENT = ("update_gather", "all_gather", "reduce_scatter", "replica_reduce")
"""Kinds of transfers that generated groups may have."""


def group(
    name: str,
    full: int,
    shard: int,
    grad: int = 0,
    *,
    gathered: bool = True,
    reduced: bool = True,
    trainable: bool = True,
    staging: int = 0,
    sums: int = 0,
    own: int = 0,
    axes: Sequence[str] = ("", "", "", ""),
    **sent: int,
) -> GroupInfo:
    """A group whose transfers send so many bytes, by kind. ``sums`` is the staging of sums over replicas.

    ``axes`` are those of all_gather, reduce_scatter, replica_reduce and update_gather.
    """
    moves, target = [], "own" if own and sent.get("replica_reduce") else "shard"
    if sent.get("update_gather"):
        moves.append(Transfer("update_gather", "state", "state", sent["update_gather"], 0, axes[3]))
    if gathered:
        moves.append(Transfer("all_gather", "state", "param", sent.get("all_gather", 0), 0, axes[0]))
    if reduced and trainable:
        carried = sent.get("reduce_scatter", 0)
        late = staging > 0 and shard == grad - carried
        moves.append(Transfer("reduce_scatter", "grad", "shard", carried, staging, axes[1], late))
        if sent.get("replica_reduce"):
            moves.append(Transfer("replica_reduce", "shard", target, sent["replica_reduce"], sums, axes[2]))
        if sent.get("offload"):
            moves.append(Transfer("offload", target, "host", sent["offload"]))
    return GroupInfo(name, full, shard, grad, trainable, tuple(moves), own)


def info(name: str, size: int = MiB, *, trainable: bool = True, **more: Any) -> GroupInfo:
    """A group of ``size`` bytes on 4 ranks, with gradients of twice that."""
    grad = 2 * size if trainable else 0
    return group(name, size, size // 4, grad, trainable=trainable, staging=grad // 4, **more)


def sends(info: GroupInfo, kind: str) -> int:
    """What a group sends in a transfer of this kind."""
    return sum(transfer.sent for transfer in info.transfers if transfer.kind == kind)


def sending(info: GroupInfo, kind: str, sent: int) -> GroupInfo:
    """The same group with another number of bytes in a transfer that it has."""
    moves = [replace(move, sent=sent) if move.kind == kind else move for move in info.transfers]
    return replace(info, transfers=tuple(moves))


def calls(*names: str) -> tuple[Call, ...]:
    """Calls of these units, numbered."""
    return tuple(Call(name, names[:i].count(name)) for i, name in enumerate(names))


def program(order: Sequence[str], reads: Mapping[str, tuple[int, ...]], skipped: Sequence[Call] = ()) -> Program:
    """The program that calls units in this order, and in backward all but the skipped calls in reverse."""
    forward = calls(*order)
    return Program(forward, tuple(call for call in reversed(forward) if call not in skipped), reads)


def gpt(blocks: int = 4, root: int = 4 * MiB) -> tuple[Program, list[GroupInfo]]:
    """Embedding, final norm and head outside of units, and a chain of equal blocks."""
    names = [f"blocks.{i}" for i in range(blocks)]
    forward = tuple(Call(name) for name in names)
    reads = {name: (i + 1,) for i, name in enumerate(names)}
    return Program(forward, forward[::-1], {"root": (0,), **reads}), [info("root", root), *map(info, names)]


def encoder_decoder() -> tuple[Program, list[GroupInfo]]:
    """Two chains that share the embedding unit, and a group of cross attention that every decoder layer reads."""
    names = ["embed", "encoder.0", "encoder.1", "decoder.0", "decoder.1", "cross"]
    reads = {"embed": (0,), "encoder.0": (1,), "encoder.1": (2,), "decoder.0": (3, 5), "decoder.1": (4, 5)}
    order = ("embed", "encoder.0", "encoder.1", "embed", "decoder.0", "decoder.1")
    return program(order, reads), [info(name, (i + 1) * MiB) for i, name in enumerate(names)]


def mixed() -> tuple[Program, list[GroupInfo]]:
    """A frozen group, an unused one, a resident one, one that needs no reduce, a call without backward."""
    groups = [
        info("root"),
        info("frozen", trainable=False),
        info("unused"),
        info("resident", gathered=False),
        info("local", gathered=False, reduced=False),
        info("a"),
        info("b"),
        info("stray", gathered=False, reduced=False),
    ]
    reads = {"root": (0,), "a": (5, 1), "b": (6, 3, 4), "c": (1,)}
    return program(("a", "b", "c", "a"), reads, skipped=[Call("c"), Call("b")]), groups


def replicas() -> tuple[Program, list[GroupInfo]]:
    """Blocks with replicas, of which each rank updates a part; a group without shards, a part of it likewise."""
    made, groups = gpt(3)
    over = ("shard", "shard", "replica", "replica")
    sent = {"all_gather": 100, "reduce_scatter": 100, "replica_reduce": 50, "update_gather": 50}
    blocks = [info(g.name, sums=1024, own=512, axes=over, **sent) for g in groups[1:]]
    norm = info("norm", gathered=False, replica_reduce=10, axes=("", "", "replica+shard", ""))
    zero = info("zero", gathered=False, reduce_scatter=10, update_gather=10, axes=("", "shard", "", "shard"))
    reads = {**made.reads, "blocks.0": (1, 4), "blocks.1": (2, 4, 5), "blocks.2": (3, 5)}
    return replace(made, reads=reads), [groups[0], *blocks, norm, zero]


CASES: dict[str, Callable[[], tuple[Program, list[GroupInfo]]]] = {
    "gpt": gpt,
    "encoder_decoder": encoder_decoder,
    "mixed": mixed,
    "twice": lambda: (program(("a", "b", "a"), {"a": (0,), "b": (1,)}), [info("a"), info("b")]),
    "shared": lambda: (program(("a", "b"), {"a": (0, 1), "b": (0, 2)}), [info("shared"), info("a"), info("b")]),
    "tied": lambda: (
        program(("a", "b"), {"root": (0,), "a": (0, 1), "b": (2,)}),
        [info(n) for n in ("tied", "a", "b")],
    ),
    "replicas": replicas,
    "no_units": lambda: (Program((), (), {"root": (0,)}), [info("root")]),
    "nothing": lambda: (Program((), (), {}), []),
}

POLICIES = [
    Policy(),
    Policy(prefetch=0, reduces=1),
    Policy(prefetch=2, reduces=3),
    Policy(reshard=False),
    Policy(update="in_backward"),
    Policy(prefetch=9, reduces=9, reshard=False, update="in_backward"),
    Policy(reshard=keep(last=1)),
    Policy(prefetch=2, reshard=keep(last=2), accumulation="full"),
    Policy(prefetch=0, reduces=1, reshard=True, accumulation="full", update="in_backward"),
]


@st.composite
def recipes(draw: st.DrawFn, most: int = 6) -> tuple[Program, tuple[GroupInfo, ...], Policy, int, bool]:
    """Arguments for ``build``: any reads, any calls, any backward order."""
    count = draw(st.integers(0, most))
    sizes = st.integers(0, 5000)
    groups = []
    for i in range(count):
        trainable = draw(st.booleans())
        full, grad, stage = draw(sizes), draw(sizes) * trainable, draw(sizes) * trainable
        gathered, reduced = draw(st.booleans()), draw(st.booleans()) and trainable
        sent = {kind: draw(sizes) * draw(st.booleans()) for kind in SENT}
        if reduced and grad >= full // 2 and draw(st.booleans()):
            sent["reduce_scatter"] = grad - full // 2  # what travels has the dtype of the shard
        held = {kind: draw(sizes) * draw(st.booleans()) for kind in ("sums", "own")}
        does = {"gathered": gathered, "reduced": reduced, "trainable": trainable}
        axes = draw(st.sampled_from([("", "", "", ""), ("s", "s", "r", "r"), ("a b", "c", "", '"d"')]))
        sent["update_gather"] *= trainable
        made = group(f"g{i}", full, full // 2, grad, staging=stage, axes=axes, **does, **held, **sent)
        groups.append(replace(made, cast_bytes=draw(sizes) * draw(st.booleans())))
    ids = st.lists(st.integers(0, count - 1), unique=True, max_size=3).map(tuple) if count else st.just(())
    units = [f"u{i}" for i in range(draw(st.integers(0, most)))]
    reads = {unit: draw(ids) for unit in ("root", *units)}
    order = draw(st.lists(st.sampled_from(units), max_size=2 * most)) if units else []
    forward = calls(*order)
    backward = draw(st.permutations(forward)) if draw(st.booleans()) else list(reversed(forward))
    skipped = draw(st.sets(st.sampled_from(forward))) if forward else set()
    called = st.lists(st.sampled_from(sorted({call.unit for call in forward}) or ["u0"]), max_size=2 * bool(forward))
    units_kept, last = draw(called), draw(st.integers(0, 2))
    policy = Policy(
        draw(st.integers(0, 4)),
        draw(st.integers(1, 4)),
        keep(*units_kept, last=last) if units_kept or last else draw(st.booleans()),
        draw(st.sampled_from(("deferred", "in_backward"))),
        draw(st.sampled_from(("sharded", "full"))),
    )
    once = Program(forward, tuple(call for call in backward if call not in skipped), reads)
    return once, tuple(groups), policy, draw(st.integers(1, 3)), draw(st.booleans())


def sequence(program: Program, accumulate: int) -> list[Op]:
    """The compute ops of a step."""
    once = [("forward", "root", 0), *(("forward", c.unit, c.index) for c in program.forward)]
    once += [*(("backward", c.unit, c.index) for c in program.backward), ("backward", "root", 0)]
    return [Op(*op, microbatch) for microbatch in range(accumulate) for op in once]


def kept_groups(program: Program, policy: Policy) -> set[int]:
    """Groups that stay for the step once they are there."""
    units = [call.unit for call in program.forward]
    latest = sorted(set(units), key=lambda unit: max(i for i, name in enumerate(units) if name == unit))
    names = {"root"}
    if isinstance(policy.reshard, Keep):
        names |= {unit for unit in units for pattern in policy.reshard.units if fnmatch.fnmatchcase(unit, pattern)}
        names |= set(latest[-policy.reshard.last :] if policy.reshard.last else [])
    elif not policy.reshard:
        names |= set(units)
    return {g for name in names for g in program.reads[name]}


def horizon(computes: Sequence[Op], k: int, prefetch: int) -> int:
    """The last compute whose groups may stay while compute k runs.

    Where forward turns to backward or the other way, it is that of the first call after the turn, from ``prefetch``
    calls before the turn on.
    """
    units = [i for i, op in enumerate(computes) if op.target != "root"]
    turns = [(a, b) for a, b in pairwise(units) if computes[a].kind != computes[b].kind]
    return max([k, *(b for a, b in turns if a - prefetch < k <= b)]) + prefetch


def naive(
    program: Program, groups: Sequence[GroupInfo], policy: Policy, accumulate: int, train: bool
) -> tuple[Op, ...]:
    """The ops of a step, by rescanning everything at each compute op."""
    if not train:
        program = replace(program, backward=())
    computes = sequence(program, accumulate)
    root, kept = program.reads["root"], kept_groups(program, policy)
    needs = [tuple(dict.fromkeys((*program.reads[op.target], *root))) for op in computes]
    ops = [Op("handshake")]
    slots: dict[int, str] = {}
    updated: list[int] = []
    flying: list[tuple[int, int]] = []
    summing: list[int] = []
    spreading: list[int] = []

    def update(g: int, when: str) -> None:
        if train and groups[g].trainable and policy.update == when and g not in updated:
            updated.append(g)
            ops.append(Op("update", groups[g].name))
            if sends(groups[g], "update_gather"):
                spreading.append(g)
                ops.append(Op("update_gather", groups[g].name))

    def join(g: int) -> None:
        if g in spreading:
            spreading.remove(g)
            ops.append(Op("wait update_gather", groups[g].name))

    def sums(reductions: list[tuple[int, int]]) -> bool:
        return any(sends(groups[g], "replica_reduce") and microbatch == accumulate - 1 for g, microbatch in reductions)

    def collect() -> None:
        g, microbatch = flying.pop(0)
        ops.append(Op("wait reduce_scatter", groups[g].name, 0, microbatch))
        if sums([(g, microbatch)]):
            while len(summing) > policy.reduces:
                total()
            summing.append(g)
            ops.append(Op("replica_reduce", groups[g].name))
        elif microbatch == accumulate - 1:
            update(g, "in_backward")

    def total() -> None:
        g = summing.pop(0)
        ops.append(Op("wait replica_reduce", groups[g].name))
        update(g, "in_backward")

    uses = [[k for k, op in enumerate(computes) if g in program.reads[op.target]] for g in range(len(groups))]
    for g in sorted(range(len(groups)), key=lambda g: uses[g][0] if uses[g] else len(computes)):
        if sends(groups[g], "update_gather"):
            update(g, "deferred")
    for g in range(len(groups)):
        if groups[g].gathered and not any(g in need for need in needs):
            update(g, "deferred")
    for k, op in enumerate(computes):
        for ahead, need in enumerate(needs[k : k + policy.prefetch + 1]):
            if ahead > 1 and any(groups[g].gathered and g in spreading for g in need):
                break
            for g in need:
                if groups[g].gathered and g not in slots:
                    update(g, "deferred")
                    join(g)
                    ops.append(Op("all_gather", groups[g].name))
                    slots[g] = "coming"
        for g in range(len(groups)) if k == 0 else ():
            if not groups[g].gathered:
                update(g, "deferred")
        for g in program.reads[op.target] if k else needs[k]:
            join(g)
            if slots.get(g) == "coming":
                ops.append(Op("wait all_gather", groups[g].name))
                slots[g] = "live"
        for g in program.reads[op.target] if op.kind == "backward" else ():
            while g in [flying_group for flying_group, _ in flying]:
                collect()
        ops.append(op)
        for g in needs[k]:
            later = [j for j in range(k + 1, len(computes)) if g in needs[j]]
            stays = later and (g in kept or later[0] <= horizon(computes, k + 1, policy.prefetch))
            if g in slots and not stays:
                ops.append(Op("free", groups[g].name))
                del slots[g]
        for g in finished(program, op, len(groups)) if train else ():
            if groups[g].trainable and not groups[g].reduced and op.microbatch == accumulate - 1:
                update(g, "in_backward")
            due = policy.accumulation == "sharded" or op.microbatch == accumulate - 1
            if groups[g].trainable and groups[g].reduced and due:
                # Where nothing is sent it is over at once.
                here = sends(groups[g], "replica_reduce") and not sends(groups[g], "reduce_scatter")
                aloft = [flying_group for flying_group, _ in flying]
                while not here and (g in aloft or len(flying) == policy.reduces or sums(flying[:1])):
                    collect()
                    aloft = [flying_group for flying_group, _ in flying]
                ops.append(Op("reduce_scatter", groups[g].name, 0, op.microbatch))
                flying.insert(0 if here else len(flying), (g, op.microbatch))
                if here:
                    collect()
    while flying:
        collect()
    while summing:
        total()
    for g in list(spreading):
        join(g)
    return (*ops, Op("consensus")) if train else tuple(ops)


def finished(program: Program, op: Op, count: int) -> Iterator[int]:
    """Groups whose gradient of a microbatch is complete after this op, whether or not they need one."""
    order = [*program.backward, Call("root")]
    place = Call(op.target, op.index)
    if op.kind == "backward":
        rest = order[order.index(place) + 1 :]
        yield from (g for g in program.reads[place.unit] if all(g not in program.reads[c.unit] for c in rest))
        if op.target == "root":
            yield from (g for g in range(count) if all(g not in program.reads[c.unit] for c in order))
