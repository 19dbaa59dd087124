"""Groups on different axes: each is gathered on a communicator of its own, in one order on all ranks."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.errors import PlanError
from fshard.schedule import Op
from fshard.schedule.costs import Costs, Link
from fshard.schedule.simulate import measured, simulate
from tests.shared.workers import Pools

WIDE = 1 << 16
"""Elements of the expert's group. The others have 256."""

SLOW = 1.0
"""Seconds that a gather of it takes longer, in the step that is looked at."""


class InOrder:
    """A transport whose communicators carry one gather at a time, as a stream of NCCL does, and note when."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.seen: list[tuple[int, list[float]]] = []
        self.slow = False

    def communicator(self, role: str, axes: tuple[str, ...]) -> Any:
        comm = self.transport.communicator(role, axes)
        return Stream(comm, self) if role == "all_gather" and comm.size > 1 else comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class Stream:
    """A communicator with a thread that issues its gathers one after the other. Those of many elements are slow."""

    def __init__(self, comm: Any, watch: InOrder) -> None:
        self.comm, self.watch, self.size = comm, watch, comm.size
        self.thread = ThreadPoolExecutor(1)

    def all_gather(self, out: Tensor, shard: Tensor, after: Any = ()) -> Any:
        span = [time.perf_counter(), 0.0]
        self.watch.seen.append((out.numel(), span))
        delay = SLOW if self.watch.slow and out.numel() >= WIDE else 0.0

        def carry() -> None:
            time.sleep(delay)
            self.comm.all_gather(out, shard).wait()
            span[1] = time.perf_counter()

        return Under(self.thread.submit(carry))


@dataclasses.dataclass(frozen=True)
class Under:
    """The handle of a gather."""

    future: Any

    def wait(self) -> None:
        self.future.result()


def branches() -> tuple[dict[str, Any], Any]:
    """Two branches that read the same input, one an expert with many weights, and a unit that joins them."""
    dense = fs.unit(lambda p, x: torch.tanh(x @ p["w"]))
    expert = fs.unit(lambda p, x: x * p["w"].view(-1, x.shape[1]).mean(0))
    joined = fs.unit(lambda p, x, y: (x + y) @ p["w"])
    draw = torch.Generator().manual_seed(3)
    params = {name: {"w": torch.randn(16, 16, generator=draw)} for name in ("dense", "joined")}
    params["expert"] = {"w": torch.randn(WIDE, generator=draw)}

    def loss(params: Any, x: Tensor) -> Tensor:
        first = dense(params["dense"], x)
        return joined(params["joined"], first, expert(params["expert"], x)).square().mean()

    return params, loss


def make(mesh: fs.Mesh, axes: str, policy: fs.Policy) -> Any:
    """A step on a mesh of two axes, whose expert is sharded over this one and the rest over the other."""
    params, loss = branches()
    rules = [(r"expert\..*", fs.fsdp(axes)), (r".*", fs.fsdp("near"))]
    plan = fs.make_plan(params, mesh, rules, batch=P(("far", "near")), units=("dense", "expert", "joined"))
    opt = fs.optim.sgd(0.01)
    return plan, opt, params, fs.make_train_step(loss, opt, plan, schedule=policy)


def timed(axes: str) -> tuple[list[Op], dict[str, list[tuple[float, float]]]]:
    """On a rank: the ops of a step, and when gathers of the dense units and of the expert began and arrived."""
    with fs.make_mesh((2, 2), ("far", "near"), shared_memory=False) as mesh:
        watch = InOrder(mesh.transport)
        # Far ahead, so that the expert is asked for before what follows it.
        _, opt, params, step = make(dataclasses.replace(mesh, transport=watch), axes, fs.Policy(prefetch=4))
        state = fs.init_state(step.plan, opt, params=params)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(mesh.rank))
        for number in range(3):
            watch.seen.clear()
            watch.slow = number == 2
            state, _ = step(state, x)
    spans: dict[str, list[tuple[float, float]]] = {"dense": [], "expert": []}
    for size, (begin, end) in watch.seen:
        spans["expert" if size >= WIDE else "dense"].append((begin, end))
    return list(step.record), spans


@pytest.mark.parametrize("axes", [pytest.param("far", marks=pytest.mark.slow), "near"])
def test_a_slow_gather_delays_only_what_shares_its_communicator(pool: Pools, axes: str) -> None:
    for ops, spans in pool(4).run(timed, axes):
        names = [op.target for op in ops if op.kind == "all_gather"]
        assert names[:3] == ["dense", "expert", "joined"]  # what the last unit reads is asked for after the expert
        asked, there = spans["expert"][0]
        later, arrived = spans["dense"][1]
        assert asked < later
        assert (arrived < there) is (axes == "far"), (there - asked, arrived - later)


def layer(p: Any, x: Tensor) -> Tensor:
    """What a dense unit computes."""
    return torch.tanh(x @ p["w"])


def held(folder: Path, shared_memory: bool) -> tuple[Any, list[Op], bool]:
    """On a rank: a step whose expert is gathered with peers that come when the dense units are over, not before.

    Ranks 2 and 3 stand still in the loss until ranks 0 and 1, their peers along ``far``, have run all dense units. What
    they have not issued by then is what stands behind the first unit: the step runs two units ahead.
    """
    with fs.make_mesh((2, 2), ("far", "near"), shared_memory=shared_memory) as mesh:
        params, _ = branches()
        params |= {name: {"w": torch.eye(16)} for name in ("first", "second")}
        dense, expert = fs.unit(layer), fs.unit(lambda p, x: x * p["w"].view(-1, x.shape[1]).mean(0))
        waits: list[bool] = []

        def loss(params: Any, x: Tensor) -> Tensor:
            if waits and mesh.rank >= 2:
                waits[0] = all(appears(folder / str(rank)) for rank in (0, 1))
            y = dense(params["dense"], dense(params["second"], dense(params["first"], x)))
            if waits and mesh.rank < 2:
                (folder / str(mesh.rank)).touch()
            return dense(params["joined"], y + expert(params["expert"], x)).square().mean()

        rules = [(r"expert\..*", fs.fsdp("far")), (r".*", fs.fsdp("near"))]
        plan = fs.make_plan(params, mesh, rules, batch=P(("far", "near")), units=tuple(params))
        opt = fs.optim.sgd(0.01)
        step = fs.make_train_step(loss, opt, plan, debug=True)
        state = fs.init_state(plan, opt, params=params)
        for number in range(2):
            waits += [True] * number  # the first step traces the loss, too
            state, _ = step(state, torch.ones(2, 16))
        assert step.record == step.schedule.ops
        return dataclasses.replace(step.measured, schedule=()), list(step.record), waits[0]


def appears(file: Path, seconds: float = 20.0) -> bool:
    """Whether a file comes to be within that time."""
    end = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.005)
    return file.exists()


@pytest.mark.parametrize("shared_memory", [False, True])
def test_dense_units_run_while_the_expert_is_gathered(pool: Pools, tmp_path: Path, shared_memory: bool) -> None:
    for rank, (run, ops, came) in enumerate(pool(4).run(held, tmp_path, shared_memory)):
        assert came, "peers that run dense units wait for a gather that they do not need"
        at = {(op.kind, op.target): number for number, op in reversed([*enumerate(ops)])}
        gather, dense = at["all_gather", "expert"], at["forward", "layer(dense.w)"]
        assert (
            at["forward", "layer(first.w)"]
            < gather
            < at["all_gather", "joined"]
            < dense
            < at["wait all_gather", "expert"]
        )
        if rank < 2:  # the peer had not even begun when this unit was over
            assert run.starts[gather] < run.starts[dense] < run.ends[dense] < run.ends[gather]


def test_one_order_of_issue_on_all_ranks(pool: Pools) -> None:
    ranks = pool(4).run(timed, "far")
    assert all(ops == ranks[0][0] for ops, _ in ranks)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_branches_have_one_order_at_any_depth(prefetch: int) -> None:
    schedules = set()
    for rank in range(4):
        mesh = fs.abstract_mesh((2, 2), ("far", "near"), rank=rank)
        _, _, _, step = make(mesh, "far", fs.Policy(prefetch))
        schedules.add(step.trace(torch.zeros(8, 16)).schedule.hash)
    assert len(schedules) == 1


def test_waits_in_the_simulation_are_for_what_a_unit_needs() -> None:
    held = {}
    for axes in ("far", "near"):
        _, _, _, step = make(fs.abstract_mesh((2, 2), ("far", "near")), axes, fs.Policy(prefetch=4))
        schedule = step.trace(torch.zeros(8, 16)).schedule
        run = simulate(schedule, Costs(links={"far": Link(1e6), "near": Link(1e6)}))
        at = next(i for i, op in enumerate(schedule) if op == Op("all_gather", "joined"))
        held[axes] = run.ends[at] - run.issued[at]
    assert held["far"] < 0.01 < 0.1 < held["near"]  # half a KiB, or 128 KiB before it


def test_what_was_measured_can_be_read_like_a_simulation() -> None:
    params, loss = branches()
    plan = fs.make_plan(params, fs.make_mesh((1,), ("shard",)), [(r".*", fs.fsdp("shard"))], units=("dense",))
    opt = fs.optim.sgd(0.01)
    step = fs.make_train_step(loss, opt, plan)
    state = fs.init_state(plan, opt, params=params)
    with pytest.raises(PlanError, match="no schedule yet|nothing was measured"):
        _ = step.measured
    step(state, torch.zeros(8, 16))
    run = step.measured
    assert run.schedule == step.schedule and len(run.issued) == len(step.schedule)
    assert list(run.issued) == sorted(run.issued) and run.seconds > 0
    with pytest.raises(PlanError, match="times for"):
        measured(step.schedule, [0.0])
