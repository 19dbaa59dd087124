"""Collectives that cut a capture: they are noted in it, and issued on the same memory in each replay."""

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard.runtime.comm.communicator import SingleRank
from fshard.runtime.comm.host_calls import HostCall, cutting, issued


@dataclass
class Two:
    """A communicator of two ranks, of which the other one has the same as this one."""

    said: list[str] = field(default_factory=list)
    size: int = 2

    def all_gather(self, out: Tensor, shard: Tensor, after: Any = None) -> "Two":
        """Copy the shard twice."""
        self.said.append("start")
        out.view(2, -1).copy_(shard)
        return self

    def wait(self) -> None:
        """Note it."""
        self.said.append("wait")


def test_a_collective_is_noted_and_made_in_each_replay() -> None:
    comm, calls = Two(), list[HostCall]()
    out, shard = torch.zeros(4), torch.ones(2)
    with cutting(calls.append):
        handle = issued(comm).all_gather(out, shard)
        handle.wait()
        handle.wait()
    assert issued(comm) is comm and comm.said == [] and not out.any()
    assert [call.name for call in calls] == ["all_gather", "wait all_gather"] and calls[0].tensors[0] is out
    for number in (2.0, 3.0):
        shard.fill_(number)
        for call in calls:
            call.run()
        assert torch.equal(out, torch.full((4,), number))
    assert comm.said == ["start", "wait"] * 2


def test_it_works_where_its_memory_was() -> None:
    """A buffer that gives its memory back in the step has none, or other memory, when a replay begins."""
    calls, out, memory = list[HostCall](), torch.zeros(4), torch.zeros(4)
    out.set_(memory)  # type: ignore[call-overload]
    with cutting(calls.append):
        issued(Two()).all_gather(out, torch.ones(2)).wait()
    out.set_()  # type: ignore[call-overload]
    calls[0].run()
    assert torch.equal(memory, torch.ones(4))


def test_nothing_is_noted_on_one_rank() -> None:
    alone = SingleRank()
    with cutting(lambda call: None):
        assert issued(alone) is alone


def test_memory_is_held_until_the_wait_and_no_longer() -> None:
    runs = list[Any]()
    with cutting(lambda call: runs.append(call.run)):
        temporary = torch.ones(2)
        held = weakref.ref(temporary)
        handle = issued(Two()).all_gather(torch.zeros(4), temporary)
        del temporary
        gc.collect()
        assert held() is not None
        handle.wait()
        gc.collect()
        assert held() is None
