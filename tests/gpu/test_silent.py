"""The group of ranks that are not there: it launches nothing, at any number of ranks, and orders streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.test_peers import bench as bench
from tests.shared.launches import Launches

WORLDS = (8, 64)
pytestmark = pytest.mark.filterwarnings("ignore")


@contextmanager
def joined(bench: Any, world: int) -> Iterator[dict[Any, torch.Tensor]]:
    """A silent group in this process."""
    truth = bench.silent.join(world)
    try:
        yield truth
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", WORLDS)
def test_what_a_collective_launches_does_not_depend_on_the_number_of_ranks(bench: Any, world: int) -> None:
    count, part, whole = Launches(), torch.ones(4), torch.arange(4.0 * world)
    out, sent, rows = torch.empty(4 * world), torch.randn(4 * world), torch.empty(4 * world)
    with joined(bench, world) as truth:
        truth[out.numel(), out.dtype] = whole
        gather = lambda: dist.all_gather_into_tensor(out, part)  # noqa: E731
        assert count.of(gather) <= 2 and torch.equal(out, torch.cat([part, whole[4:]]))
        out.mul_(2)
        assert count.of(gather) == 0 and torch.equal(out[4:], 2 * whole[4:]), "a later gather copies nothing"
        assert count.of(lambda: dist.reduce_scatter_tensor(part, sent)) == 1 and torch.equal(part, sent[:4])
        assert count.of(lambda: dist.all_to_all_single(rows, sent)) == 1 and torch.equal(rows, sent)
        assert count.of(lambda: dist.all_reduce(sent)) == 0
        messages = torch.empty(world, dtype=torch.int64)
        assert count.of(lambda: dist.all_gather_into_tensor(messages, torch.tensor([7]))) == 1
        assert messages.tolist() == [7] * world


def test_a_step_launches_as_much_on_64_ranks_as_on_8_and_its_loss_is_that_of_the_model(bench: Any) -> None:
    size = replace(bench.gpu_worker.DRY, depth=1)  # all blocks have the weights of the first
    plain, batch = bench.peers.Torch(bench.model.make(size)), bench.model.rows(size, 0)
    plain.step(batch)
    launches = {}
    for world in WORLDS:
        with joined(bench, world) as truth:
            worker = bench.gpu_worker.Worker("fshard", size, "fp32", truth)
            losses = [worker.step(batch)["loss"] for _ in range(3)]
            launches[world] = Launches().of(lambda worker=worker: worker.peer.step(batch))
        assert losses == pytest.approx([float(plain.loss)] * 3, rel=1e-6)
    assert launches[8] == launches[64], launches


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("fsdp2 titan", marks=pytest.mark.slow)])
def test_fsdp2_begins_from_the_weights_of_the_model(bench: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **more: real(fn, backend="eager"))
    size = replace(bench.gpu_worker.DRY, depth=1)
    plain, batch = bench.peers.Torch(bench.model.make(size)), bench.model.rows(size, 0)
    plain.step(batch)
    with joined(bench, 8) as truth:
        worker = bench.gpu_worker.Worker(name, size, "fp32", truth)
        assert worker.step(batch)["loss"] == pytest.approx(float(plain.loss), rel=1e-6)


@dataclass
class Noted:
    """A stream that notes what it is told."""

    notes: list[str]
    on: list[str] = field(default_factory=lambda: ["compute"])

    def record(self) -> str:
        """An event after the work of the stream that is current."""
        self.notes.append(f"record on {self.on[-1]}")
        return f"event {len(self.notes)}"

    @contextmanager
    def after(self, events: Any) -> Iterator[None]:
        """Inside, this stream is current."""
        self.notes.append(f"side waits for {', '.join(events)}")
        self.on.append("side")
        yield
        self.on.pop()

    def wait_for(self, events: Any) -> None:
        """The current stream waits."""
        self.notes.append(f"{self.on[-1]} waits for {', '.join(events)}")


def test_a_wait_orders_the_current_stream_behind_the_collective(bench: Any) -> None:
    notes: list[str] = []
    group = bench.silent.Silent(4, {}, lambda device: Noted(notes))
    work = group._reduce_scatter_base(torch.zeros(2), torch.ones(8))
    assert notes == ["record on compute", "side waits for event 1", "record on side"]
    assert work.tensors, "kept until it was waited for"
    work.wait()
    assert notes[3:] == ["compute waits for event 3"] and not work.tensors
