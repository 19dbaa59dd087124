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
from fshard.runtime.comm import joining, processes
from fshard.runtime.comm.part import unbound
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
