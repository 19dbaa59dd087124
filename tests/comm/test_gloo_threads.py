"""gloo: its threads of sockets interrupt no send, and receives are posted first."""

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard.runtime.comm import gloo
from fshard.runtime.comm.gloo import Messages, without_interrupting
from tests.shared.workers import Pools

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")


def policies_of_threads() -> tuple[list[int], list[int], int]:
    """On a rank: the policies of gloo's threads of a mesh, of a group that was made without it, and of this thread."""
    before = gloo._threads()
    with fs.make_mesh((-1,), ("shard",), shared_memory=False) as mesh:
        for role in ("control", "all_gather", "reduce_scatter"):
            mesh.transport.communicator(role, ("shard",))
        own = gloo._threads() - before
        group = dist.new_group(backend="gloo")
        other = gloo._threads() - before - own
        found = [*map(os.sched_getscheduler, own)], [*map(os.sched_getscheduler, other)], os.sched_getscheduler(0)
        dist.destroy_process_group(group)
        return found


@pytest.mark.processes
def test_only_the_threads_of_own_groups_change(pool: Pools) -> None:
    for own, others, main in pool(2).run(policies_of_threads):
        assert len(own) >= 3 and set(own) == {os.SCHED_BATCH}
        assert set(others) == {os.SCHED_OTHER} and main == os.SCHED_OTHER


@pytest.mark.parametrize("name, given, wanted", [
    (gloo.NAME, os.SCHED_OTHER, os.SCHED_BATCH),
    (gloo.NAME, os.SCHED_IDLE, os.SCHED_IDLE),
    ("another", os.SCHED_OTHER, os.SCHED_OTHER),
])  # fmt: skip
def test_threads_of_another_name_or_policy_keep_it(name: str, given: int, wanted: int) -> None:
    born, over, found = threading.Event(), threading.Event(), list[int]()

    def live() -> None:
        with open("/proc/thread-self/comm", "w") as file:
            file.write(name)
        os.sched_setscheduler(0, given, os.sched_param(0))
        born.set()
        over.wait(20.0)
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=live)
    with without_interrupting():
        thread.start()
        assert born.wait(20.0)
    over.set()
    thread.join(20.0)
    assert found == [wanted]


def posted() -> list[list[str]]:
    """On a rank: what each collective posts over gloo, in order."""
    out: list[list[str]] = []
    send, receive = Messages.send, Messages.receive

    def sends(self: Messages, *args: Any) -> None:
        out[-1].append("send")
        send(self, *args)

    def receives(self: Messages, *args: Any) -> int:
        out[-1].append("receive")
        return receive(self, *args)

    with fs.make_mesh((-1,), ("shard",), shared_memory=False) as mesh, pytest.MonkeyPatch.context() as patch:
        comm = mesh.transport.communicator("reduce_scatter", ("shard",))
        patch.setattr(Messages, "send", sends)
        patch.setattr(Messages, "receive", receives)
        full = torch.ones(mesh.size * (gloo.PIECE // 4 + 1))  # two pieces for each peer
        part = full[: len(full) // mesh.size].clone()
        for call in (
            lambda: comm.all_gather(full, part),
            lambda: comm.reduce_scatter(part, full, torch.empty_like(full), False),
            lambda: comm.all_to_all(torch.empty_like(full), full, None, None),
        ):
            out.append([])
            call().wait()
    return out


@pytest.mark.processes
def test_receives_are_posted_before_sends(pool: Pools) -> None:
    """Else the message by which gloo tells a peer that it may send stands behind all that is sent to it."""
    one, two = ["receive", "send"], ["receive"] * 2 + ["send"] * 2
    assert pool(2).run(posted) == [[one, two, one]] * 2
