"""Every access of memory is ordered by the runtime's own events, and every one of these events is needed."""

import dataclasses
import functools
import gc
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import tree
from fshard.checkpoint.ranges import Slice
from fshard.checkpoint.save import Snapshot
from fshard.checkpoint.states import all_entries
from fshard.checkpoint.write import owned
from fshard.collectives import all_to_all, ppermute, psum_scatter, ragged_all_to_all
from fshard.outer_steps.outer_step import OuterStep
from tests.runtime.test_lanes import CASES as LANES
from tests.runtime.test_lanes import ROWS, SHARD, WIDTH, Case, loss, made, params, shared_out
from tests.shared.clocks import COMPUTE, HOST, OTHER, Clocks, Mark
from tests.shared.model_streams import Group, ModelTransport, modelled


def raced(
    case: Case, drop: str = "", device: str = "cpu", steps: int = 3, streams: Sequence[str] = (COMPUTE,)
) -> tuple[list[str], set[str]]:
    """Some steps on a virtual mesh: the races of any rank, and the events and waits of the runtime.

    After each step the case may look at the state: what it reads then, or later, must be ordered, too. Each call is
    made on the next of some compute streams.
    """

    def work(mesh: fs.Mesh, mine: Clocks) -> None:
        plan, opt = made(mesh, case.rules, case.precision, case.wire), fs.optim.adamw(1e-2)
        step, look = case.make(case, plan, opt), case.look()
        if isinstance(step, OuterStep):
            plan, opt = step.plan, step.opt
        state = fs.init_state(plan, opt, params=params())
        with mine:
            calls = itertools.cycle(streams)
            for number in range(steps):
                with mine.on(next(calls)):
                    state, _ = step(state, batch_of(mesh, number))
                with mine.on(next(calls)):
                    look(state)
            with mine.on(next(calls)):
                settled = fs.settle(state)
                assert all(leaf.isfinite().all() for leaf in tree.leaves(settled.params))  # read where it lies
                leaves = tree.leaves(fs.unshard(settled.params, plan))
                assert all(leaf.isfinite().all().item() for leaf in leaves)

    return watched(case.axes, work, drop, device)


def batch_of(mesh: fs.Mesh, number: int) -> torch.Tensor:
    """This rank's rows of a batch."""
    whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
    return whole.chunk(mesh.size)[mesh.rank].to(mesh.device)


def watched(
    axes: Any, work: Callable[[fs.Mesh, Clocks], None], drop: str = "", device: str = "cpu"
) -> tuple[list[str], set[str]]:
    """Some work on a virtual mesh: the races of any rank, and the events and waits of the runtime."""
    clocks: dict[int, Clocks] = {}

    def rank() -> None:
        mesh = fs.make_mesh(*axes)
        mine = clocks[threading.get_ident()] = Clocks(mesh.device, drop)
        work(dataclasses.replace(mesh, transport=ModelTransport(mesh.transport, mine)), mine)

    patch = pytest.MonkeyPatch()
    with modelled(patch, clocks):
        fs.virtual_mesh(*axes, device=device).run(rank)
    races = [race for one in clocks.values() for race in one.races]
    return list(dict.fromkeys(races)), {site for one in clocks.values() for site in one.sites}


def exported() -> Callable[[fs.TrainState], None]:
    """Streams the state to all ranks and to one, and makes a state dict of it."""

    def look(state: fs.TrainState) -> None:
        for to in (None, 1):
            for _, leaf in fs.io.export(state, what="state", to=to):
                assert leaf.isfinite().all().item()

    return look


def snapshots() -> Callable[[fs.TrainState], None]:
    """Copies the state for a checkpoint, and reads the copy as soon as may be, as the thread that writes does."""
    snapshot = Snapshot()

    def look(state: fs.TrainState) -> None:
        kept = taken(snapshot, state)
        snapshot.finish()
        assert all(s.data.isfinite().all() for s in kept)

    return look


def late_snapshots() -> Callable[[fs.TrainState], None]:
    """The same where the thread that writes does not come to copy before the next update is about to overwrite."""
    snapshot, kept = Snapshot(), list[Slice]()

    def look(state: fs.TrainState) -> None:
        fs.settle(state)
        snapshot.finish()
        assert all(s.data.isfinite().all() for s in kept)
        kept[:] = taken(snapshot, state)

    return look


def taken(snapshot: Snapshot, state: fs.TrainState) -> list[Slice]:
    """What an asynchronous save does of a state."""
    settled = fs.settle(state)
    settled.shards().readers.append(snapshot.finish)
    return snapshot.take(owned(all_entries({"": settled}), settled.plan.mesh.rank))


def of_parts(case: Case, plan: fs.Plan, opt: fs.optim.Optimizer) -> Any:
    """A step of parts: two passes, arithmetic between them, an update."""
    grad, update = fs.value_and_grad(case.fn, plan), fs.make_update(opt, plan, clip_norm=0.1)

    def sharpness_aware(state: Any, batch: Any) -> Any:
        value, first = grad(state.params, batch)
        value, second = grad(fs.tree.add(state.params, fs.tree.scale(first, 0.05)), batch)
        state, _ = update(state, second)
        return state, value

    return fs.make_step(sharpness_aware, plan)


def talkative(p: Any, batch: Any) -> Any:
    """A loss with collectives of every kind that sends messages."""
    x = all_to_all(batch * 2, "shard", 0, 0, tiled=True) + ppermute(batch * 3, "shard", [(0, 1), (1, 0)])
    x = x + ragged_all_to_all(batch * 4, "shard", (4, 4), (4, 4))
    return loss(p, x) + psum_scatter(batch * 5, "shard", tiled=True).mean()


def apart(case: Case, plan: fs.Plan, opt: fs.optim.Optimizer) -> Any:
    """Replicas that train apart: a part of the model leaves after each step, and arrives after the next one."""
    inner = fs.make_train_step(case.fn, opt, plan)
    return fs.outer(inner, fs.optim.sgd(0.7, momentum=0.9), every=2, fragments=2, delay=1, wire="int8")


CASES = {
    **LANES,
    "replicas apart": replace(LANES["hsdp, default"], make=apart),
    "collectives of every kind": replace(LANES["flat, default"], fn=talkative),
    "exports": replace(LANES["flat, default"], look=exported),
    "parts": replace(LANES["hsdp, default"], make=of_parts),
    "snapshots": replace(LANES["flat, default"], look=snapshots),
    "late snapshots": replace(LANES["flat, default"], look=late_snapshots),
    "host, parts": replace(LANES["host, default"], make=of_parts),
    "kept on the host, parts": replace(LANES["kept on the host, default"], make=of_parts),
    "host, snapshots": replace(LANES["host, updated there, default"], look=snapshots),
    "host, exports": replace(LANES["host, default"], look=exported),
}
NAMES = [
    name
    for name in CASES
    if not name.startswith("kept on the host") and not name.startswith("host") and "snapshots" not in name
]
TRIED = {
    "flat, default": 4,
    "hsdp, far ahead": 5,
    "opt axes, whole gradients": 6,
    "bfloat16": 4,
    "a collective of the program": 5,
    "exports": 6,
    "parts": 6,
    "packed": 6,
    "packed updates": 6,
    "feedback": 5,
    "low rank": 5,
    "secondary": 5,
    "activations on the host": 7,
    "replicas apart": 6,
    "collectives of every kind": 10,
}
"""Cases of which every event is dropped in turn, and how many they have at least."""
ITS_OWN = {
    "packed": ("event: scattered", "event: summed", "wait for replica_reduce(replica)"),
    "packed updates": ("event: updated",),
    "low rank": ("event: Replicas._exact", "wait for replica_reduce(replica)"),
    "secondary": ("event: Actions._regather < Actions._begin",),
    "activations on the host": (
        "event: ActivationCopies.come",
        "event: ActivationCopies.leave",
        "wait: CopyHandle.wait < HostedActivations.came",
        "wait: CopyHandle.wait < HostedActivations.left",
    ),
    "replicas apart": ("event: Exchange._start", "wait for exchange(replica)"),
    "collectives of every kind": tuple(f"event: {how} <" for how in ("exchange", "permute", "ragged", "scatter_sum")),
}
"""The events and waits that only these have. The slow tests try the others, too."""
SLOW = (
    "flat, default",
    "bfloat16",
    "parts",
    "opt axes, whole gradients",
    "exports",
    "feedback",
    "hsdp, far ahead",
    *ITS_OWN,
)
"""Cases that the slow tests try: the others have most of their events too."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", shared_out(NAMES, 3))
def test_nothing_races(name: str) -> None:
    races, sites = raced(CASES[name])
    assert not races, "\n".join(races)
    assert sites


SWITCH, USE = "wait for another compute stream", "memory in use"
TURNS = (COMPUTE, OTHER, OTHER)
"""Streams of a user's calls: each call of the step, and each look at its state, is on another one at some time."""


@functools.cache
def sites_of(name: str, device: str = "cpu") -> list[str]:
    """The events and waits of a case."""
    return sorted(raced(CASES[name], device=device)[1])


def needless(name: str, device: str = "cpu") -> list[str]:
    """The events and waits of a case that can be dropped without a race."""
    return sorted(site for site, needed in events(name, device).items() if not needed)


def events(name: str, device: str) -> dict[str, bool]:
    """Whether each event and wait of a case is needed: mostly the first step shows it.

    That memory is in use matters where a call on another stream frees it.
    """
    case, sites = CASES[name], sites_of(name, device)
    needed = {site: any(raced(case, site, device, steps)[0] for steps in (1, 3)) for site in sites}
    held = [site for site in sites if site.startswith(USE) and not needed[site]]
    return needed | {site: bool(raced(case, site, device, 3, streams=TURNS)[0]) for site in held}


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow if n in SLOW else pytest.mark.long) for n in TRIED)]
)
def test_every_event_is_needed(name: str) -> None:
    assert len(sites_of(name)) >= TRIED[name], sites_of(name)
    assert needless(name) == []


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("name", ITS_OWN)
def test_events_of_formats_and_of_replicas_are_needed(name: str) -> None:
    for begin in ITS_OWN[name]:
        site = next(site for site in sites_of(name) if site.startswith(begin))
        assert any(raced(CASES[name], site, steps=steps)[0] for steps in (1, 3)), site


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", shared_out(NAMES, 5))
def test_calls_on_two_compute_streams_do_not_race(name: str) -> None:
    races, sites = raced(CASES[name], streams=TURNS)
    assert not races, "\n".join(races)
    assert any(site.startswith(SWITCH) for site in sites)


OVERTAKEN = {
    "step a / fail b / step c, settle a / read a": (
        f"{SWITCH}: Shards.follow < StateMemory.shards",
        f"{SWITCH}: StepMemory.follow < Actions.start",
        f"{USE}: Shards.follow < StateMemory.shards",
    ),
    "step a / fail b / settle a": (
        f"{SWITCH}: PendingUpdate.follow < StateMemory.shards",
        f"{USE}: PendingUpdate.follow < StateMemory.shards",
    ),
    "fail a / step b / step a, settle a": (
        f"{SWITCH}: PendingUpdate.follow < PendingUpdate.detach",
        f"{USE}: StepMemory.follow < Actions.start",
    ),
}
"""Calls with the states a, b and c of one step, and what they need; ``/`` goes to the other stream. A call that fails
has given the device work that the host never waits for."""


def overtaking(mesh: fs.Mesh, mine: Clocks, calls: str) -> None:
    """Calls on two streams; at the end all memory goes."""
    plan, opt, fails = made(mesh, [fs.Rule(".*", fs.fsdp("shard"))]), fs.optim.adamw(1e-2), list[str]()

    def fn(p: Any, batch: torch.Tensor) -> torch.Tensor:
        out = loss(p, batch)
        if fails:
            raise ValueError(fails.pop())
        return out

    step = fs.make_train_step(fn, opt, plan, clip_norm=0.1)
    states = {name: fs.init_state(plan, opt, params=params()) for name in "abc"}
    with mine:
        for stream, group in zip(itertools.cycle((COMPUTE, OTHER)), calls.split(" / "), strict=False):
            with mine.on(stream):
                for what, name in map(str.split, group.split(", ")):
                    if what == "step":
                        states[name], _ = step(states[name], batch_of(mesh, 0))
                    elif what == "fail":
                        fails.append("now")
                        with pytest.raises(ValueError, match="now"):
                            step(states[name], batch_of(mesh, 1))
                    elif what == "settle":
                        states[name] = fs.settle(states[name])
                    else:
                        sum(leaf.sum() for leaf in tree.leaves(states[name].params))
        with mine.on(stream):
            del step
            states.clear()
            gc.collect()
            torch.zeros(1).add_(1)  # whose memory may be what was freed


@pytest.mark.long
@pytest.mark.parametrize("calls", OVERTAKEN)
def test_every_memory_knows_the_stream_that_worked_on_it(calls: str) -> None:
    work = functools.partial(overtaking, calls=calls)
    races, _ = watched(SHARD, work)
    assert not races, "\n".join(races)
    assert [site for site in OVERTAKEN[calls] if not watched(SHARD, work, site)[0]] == []


def test_calls_on_two_compute_streams_race_without_waits() -> None:
    races, _ = raced(CASES["flat, default"], SWITCH, steps=2, streams=TURNS)
    assert any(f"{COMPUTE} is not" in race or f"on {OTHER}" in race for race in races)


def test_the_model_sees_a_race() -> None:
    clocks, x, y = Clocks(torch.device("cpu")), torch.zeros(4), torch.zeros(4)
    with clocks:
        x.add_(1)
        with clocks.on("side"):
            y.copy_(x)
    assert len(clocks.races) == 1 and "aten.copy_" in next(iter(clocks.races))
    ordered = Clocks(torch.device("cpu"))
    with ordered:
        x.add_(1)
        ordered.join("side", ordered.clock(COMPUTE))
        with ordered.on("side"):
            y.copy_(x)
        x[:2].sum()  # reads do not race
        assert not ordered.races
        x[2:].zero_()
    assert len(ordered.races) == 1 and "aten.zero_" in next(iter(ordered.races))


def test_the_model_sees_memory_that_is_freed_too_early() -> None:
    clocks = Clocks(torch.device("cpu"))
    with clocks:
        x = torch.ones(4)
        clocks.join("side", clocks.clock(COMPUTE))
        with clocks.on("side"):
            x.sum()
        del x
        torch.zeros(1)
    assert [race for race in clocks.races if "memory is freed" in race]


def test_the_model_sees_what_the_host_reads_too_early() -> None:
    clocks = Clocks(torch.device("cpu"))
    x = torch.zeros(2)
    clocks.touch(x, True, "copy", "side")
    clocks.touch(x, False, "read", HOST)
    assert len(clocks.races) == 1
    other = Clocks(torch.device("cpu"))
    other.touch(x, True, "copy", "side")
    Mark(other, dict(other.clock("side"))).synchronize()
    other.touch(x, False, "read", HOST)
    assert not other.races


def test_a_collective_that_nobody_waits_for_races() -> None:
    clocks, out = Clocks(torch.device("cpu")), torch.zeros(2)
    group = Group(clocks, "g", fs.runtime.comm.communicator.SingleRank())  # type: ignore[attr-defined]
    with clocks:
        work = group.run("all_gather", [out], [out], out, out)
        out.sum()
        assert len(clocks.races) == 1
        work.wait()
        out.sum()
    assert len(clocks.races) == 1
