"""The communicators of every kind of plan, counted on PyTorch's fake process group; and how those of NCCL are made."""

import datetime
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fshard as fs
from fshard import P
from fshard.collectives import pmean, psum, pvary
from fshard.foresight.foresee import foresee
from fshard.runtime.comm import joining, nccl, processes
from fshard.runtime.comm.device_streams import Stream, copy_stream
from fshard.runtime.comm.part_transport import unbound
from fshard.runtime.comm.processes import ProcessTransport

RANKS = 8
PARAMS = {"a": torch.ones(64, 8), "b": torch.ones(64)}
FSDP, HSDP = ((8,), ("data",)), ((2, 4), ("replica", "data"))
FLAT = [(".*", fs.fsdp("data"))]
CASES: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "flat": (FSDP, FLAT, fs.Policy(), ["all_gather data", "reduce_scatter data"]),
    "replicated": (FSDP, [(".*", P())], fs.Policy(), ["replica_reduce data"]),
    "dims": (FSDP, [("a", P("data")), (".*", P())], fs.Policy(), [
        "all_gather data", "reduce_scatter data", "replica_reduce data",
    ]),
    "replicas": (HSDP, FLAT, fs.Policy(), ["all_gather data", "reduce_scatter data", "replica_reduce replica"]),
    "optimizer over replicas": (HSDP, [fs.Rule(".*", fs.fsdp("data"), opt=fs.fsdp(("data", "replica")))], fs.Policy(), [
        "all_gather data", "reduce_scatter data", "replica_reduce replica",
    ]),
    "optimizer alone": (FSDP, [fs.Rule(".*", P(), opt=fs.fsdp("data"))], fs.Policy(), [
        "reduce_scatter data", "replica_reduce data",
    ]),
    "secondary": (HSDP, [(".*", fs.fsdp(("replica", "data")))], fs.Policy(reshard=fs.secondary("data")), [
        "all_gather data", "all_gather replica+data", "reduce_scatter replica+data",
    ]),
}  # fmt: skip
"""A mesh, rules, a policy, and what its transfers travel on: what never overlaps shares."""


@pytest.fixture
def eight() -> Iterator[None]:
    """This process is a rank of eight, of which the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def loss(p: Any, x: Tensor) -> Tensor:
    """A loss that reads all."""
    return (x @ p["a"].T * p["b"]).square().mean()


class Over:
    """A collective that is over."""

    def wait(self) -> None:
        """Does nothing."""


@pytest.fixture
def alike(eight: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that do not exist send what this one sends: numbers are finite, so that steps are good ones."""

    def all_gather(out: Tensor, shard: Tensor, group: Any) -> Over:
        out.view(-1, shard.numel()).copy_(shard.clone().view(1, -1))  # it may be a part of the output
        return Over()

    def reduce_scatter(out: Tensor, full: Tensor, group: Any) -> Over:
        out.copy_(full[: out.numel()])
        return Over()

    monkeypatch.setattr(nccl, "all_gather", all_gather)
    monkeypatch.setattr(nccl, "reduce_scatter", reduce_scatter)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stream]]:
    """The side streams that are made, as if on a GPU: PyTorch has 32 a device, and then hands out used ones."""
    made: list[Stream] = []

    def make(device: torch.device) -> Stream:
        made.append(Stream())
        return made[-1]

    copy_stream.cache_clear()
    for module in ("device_streams", "processes"):
        monkeypatch.setattr(f"fshard.runtime.comm.{module}.make_stream", make)
    yield made
    copy_stream.cache_clear()


@pytest.mark.usefixtures("alike")
def test_programs_of_one_mesh_share_their_side_streams(streams: list[Stream]) -> None:
    mesh, params, opt = fs.make_mesh(*HSDP), {"unit": PARAMS}, fs.optim.sgd(0.1)
    host = fs.Rule(".*a", fs.fsdp("data"), memory_kind="unpinned_host")
    plan = fs.make_plan(params, mesh, [host, *FLAT], batch=P(mesh.axis_names), units=["unit"])

    def either(p: Any, x: Any) -> Tensor:
        twice = isinstance(x, dict)
        y = unit(p["unit"], x["x"] if twice else x - pmean(x.mean(), "data"))
        return (y + unit(p["unit"], x["x"]) if twice else y).square().mean()

    step, second = [fs.make_train_step(either, opt, plan) for _ in range(2)]
    evaluate = fs.make_eval_step(lambda p, x: {"loss": either(p, x)}, plan)
    state = fs.init_state(plan, opt, params=params)
    state, _ = step(state, torch.ones(2, 8))
    before = len(streams)
    assert before == len(mesh.transport.comms) + 2, "one a communicator, and one a direction of copies"
    evaluate(state, torch.ones(2, 8))
    state, _ = step(state, {"x": torch.ones(2, 8)})
    programs = len(step.programs.made)
    assert programs == 2
    second(state, torch.ones(2, 8))
    assert len(streams) == before
    mesh.close()


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("name", CASES)
def test_communicators_of_a_plan(name: str) -> None:
    axes, rules, policy, want = CASES[name]
    mesh = fs.make_mesh(*axes)
    plan = fs.make_plan(PARAMS, mesh, rules, batch=P(mesh.axis_names))
    step = fs.make_train_step(loss, fs.optim.sgd(0.1), plan, schedule=policy)
    found = step.trace(torch.ones(2, 8)).communicators
    assert sorted(f"{role} {'+'.join(over)}" for role, over in found) == want
    transport = mesh.transport
    before = set(transport.comms)
    again = fs.make_train_step(loss, fs.optim.sgd(0.1), plan, schedule=policy)
    for one in (step, again):
        one.programs.comms.open()
    assert set(transport.comms) - before == set(found), "steps of one mesh share communicators"
    mesh.close()


@fs.unit
def unit(p: Any, x: Tensor) -> Tensor:
    """A linear map."""
    return x @ p["a"].T * p["b"]


def spoken(p: Any, x: Tensor) -> Tensor:
    """The same, with collectives of its own: over one axis, over both, and one that sends nothing."""
    x = x - pmean(x.mean(), "data") * psum(pvary(x.mean(), "replica"), ("data", "replica"))
    return loss(p, x)


OWN = [("collectives", ("data",)), ("collectives", ("replica", "data"))]


def test_a_trace_counts_the_communicators_of_the_program_itself_on_any_mesh() -> None:
    def own(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(PARAMS, mesh, FLAT, batch=P(mesh.axis_names))
        steps = [fs.make_train_step(fn, fs.optim.sgd(0.1), plan) for fn in (loss, spoken)]
        steps.append(fs.make_eval_step(lambda p, x: {"loss": spoken(p, x)}, plan))
        return [
            [need for need in step.trace(torch.ones(2, 8)).communicators if need[0] == "collectives"] for step in steps
        ]

    assert own(fs.abstract_mesh(*HSDP)) == [[], OWN, OWN]
    assert own(fs.abstract_mesh(*HSDP, device="cuda")) == [[], OWN, OWN]
    virtual = fs.virtual_mesh(*HSDP)
    assert virtual.run(lambda: own(virtual.here)) == [[[], OWN, OWN]] * RANKS
    assert own(fs.abstract_mesh((1, 1), HSDP[1])) == [[], [], []]


def test_foresight_counts_the_communicators_of_the_program_itself() -> None:
    mesh = fs.abstract_mesh(*HSDP)
    plan = fs.make_plan(PARAMS, mesh, FLAT, batch=P(mesh.axis_names))
    step = fs.make_train_step(spoken, fs.optim.sgd(0.1), plan)
    none, some = [foresee(step, torch.ones(2, 8), fs.sim.hardware("h100", communicator=each)) for each in (0, 1 << 30)]
    assert some.communicators == [*fs.make_train_step(loss, step.opt, plan).trace(torch.ones(2, 8)).communicators, *OWN]
    assert some.peak_bytes - none.peak_bytes == 5 << 30


@pytest.mark.usefixtures("alike")
def test_communicators_of_the_program_are_made_before_it_runs() -> None:
    mesh = fs.make_mesh(*HSDP)
    plan = fs.make_plan(PARAMS, mesh, FLAT, batch=P(mesh.axis_names))
    transport, opt, there = mesh.transport, fs.optim.sgd(0.1), list[set[Any]]()

    def watched(p: Any, x: Tensor) -> Tensor:
        there.append(set(transport.comms))
        return spoken(p, x)

    step = fs.make_train_step(watched, opt, plan)
    state = fs.init_state(plan, opt, params=PARAMS)
    needed = {*step.trace(torch.ones(2, 8)).communicators}
    assert needed >= {*OWN} and not needed & set(transport.comms)
    step(state, torch.ones(2, 8))
    assert needed <= there[-1] and set(transport.comms) == there[-1], "none is made inside of a step"
    mesh.close()


def test_a_step_of_parts_counts_what_its_passes_and_the_code_between_them_use() -> None:
    mesh = fs.abstract_mesh(*HSDP)
    plan, opt = fs.make_plan(PARAMS, mesh, FLAT, batch=P(mesh.axis_names)), fs.optim.sgd(0.1)
    grad, update = fs.value_and_grad(spoken, plan), fs.make_update(opt, plan)

    def both(state: Any, batch: Any) -> Any:
        value, grads = grad(state.params, batch)
        state, norm = update(state, grads)
        return state, value

    step = fs.make_step(both, plan)
    found = step.trace(fs.init_state(plan, opt, params=PARAMS), torch.ones(2, 8)).communicators
    assert {*found} >= {*OWN}


def test_an_outer_step_counts_what_travels_between_replicas() -> None:
    mesh = fs.abstract_mesh(*HSDP)
    plan = fs.make_plan(PARAMS, mesh, FLAT, batch=P(mesh.axis_names))
    inner = fs.make_train_step(loss, fs.optim.sgd(0.1), plan)
    step = fs.outer(inner, fs.optim.sgd(0.7), every=2)
    found = step.trace(torch.ones(2, 8)).communicators
    assert ("exchange", ("replica",)) in found and len(found) == 3


class Groups:
    """Notes what torch.distributed is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def init_process_group(self, backend: str, **options: Any) -> None:
        """The default group."""
        self.asked.append((backend, options))

    def new_group(self, ranks: list[int], backend: str, **options: Any) -> Any:
        """Another group."""
        self.asked.append((backend, options))
        return object()


def test_groups_of_nccl_are_made_at_once_and_split_from_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, cuda, cpu = Groups(), torch.device("cuda", 1), torch.device("cpu")
    monkeypatch.setattr(joining.dist, "init_process_group", groups.init_process_group)
    joining._init("nccl", None, 0, 2, cuda)
    joining._init("gloo", None, 0, 2, cpu)
    assert [options["device_id"] for _, options in groups.asked] == [cuda, None]
    monkeypatch.setattr(processes.dist, "new_group", groups.new_group)
    mesh = fs.abstract_mesh((2,), ("shard",), device="cuda:1")
    transport = ProcessTransport(mesh, "nccl", datetime.timedelta(seconds=5), False)
    transport._group((0, 1), "nccl")
    transport._group((0, 1), "gloo")
    assert [options.get("device_id") for _, options in groups.asked[2:]] == [cuda, None]


@pytest.mark.usefixtures("eight")
def test_groups_of_a_replica_are_made_by_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch splits a group from a default one that is bound, which takes all ranks of the job."""
    default = dist.distributed_c10d._get_default_group()  # type: ignore[attr-defined]
    default.bound_device_id = torch.device("cuda", 0)
    with unbound():
        assert default.bound_device_id is None
    assert default.bound_device_id == torch.device("cuda", 0)
    default.bound_device_id = None
