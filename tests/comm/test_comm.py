"""Communicators between real processes, over gloo and shared memory: what they compute, and what if a peer is gone."""

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fshard as fs
from fshard.runtime.comm import exchange, exchange_text
from fshard.runtime.comm.communicator import SingleRank
from fshard.runtime.comm.gloo import GlooCommunicator
from fshard.runtime.comm.host import HostCommunicator
from tests.shared.bad import Raised, attempt
from tests.shared.children import Child
from tests.shared.workers import Pool, Pools, WorkerError, await_files

pytestmark = pytest.mark.processes

SIZES = (1, 2, 3, 16, 1000, 5000)
KINDS = {"gloo": GlooCommunicator, "host": HostCommunicator}


def _mesh(kind: str, sizes: tuple[int, ...] = (-1,), names: tuple[str, ...] = ("shard",), **more: Any) -> fs.Mesh:
    """A mesh whose communicators are of this kind."""
    return fs.make_mesh(sizes, names, shared_memory=kind == "host", **more)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of communicator under test."""
    return str(request.param)


def _chunks(rank: int, world: int, size: int, dtype: torch.dtype) -> Tensor:
    """What a rank sends: values whose sum depends on the order of addition."""
    draw = torch.Generator().manual_seed(97 * rank + size)
    return (torch.randn(world * size, generator=draw) * 10.0 ** (3 * (rank % 3))).to(dtype)


def collectives(kind: str) -> list[str]:
    """On a rank: what is not as it should be."""
    out = []
    with _mesh(kind) as mesh:
        comm = mesh.transport.communicator("reduce_scatter", ("shard",))
        assert mesh.size == 1 or type(comm) is KINDS[kind]
        for size in SIZES:
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                every = [_chunks(rank, mesh.size, size, dtype) for rank in range(mesh.size)]
                mine = every[mesh.rank]
                out += [f"{what} of {size} {dtype}" for what in _wrong(comm, mesh, every, mine.clone(), size)]
    return out


def _wrong(comm: Any, mesh: fs.Mesh, every: list[Tensor], mine: Tensor, size: int) -> list[str]:
    here, out = slice(mesh.rank * size, (mesh.rank + 1) * size), []
    for add in (False, True):
        result = torch.full((size,), 0.5 if add else torch.nan, dtype=mine.dtype)
        want = result.clone() if add else torch.zeros_like(result)
        for row in every:  # in rank order, one after the other
            want = want + row[here]
        comm.reduce_scatter(result, mine.clone(), torch.empty_like(mine), add).wait()
        out += ["reduce_scatter, add" if add else "reduce_scatter"] * (not torch.equal(result, want))
    # The result may lie in the stage: this is how the runtime calls it where replicas are summed after.
    stage = torch.empty_like(mine)
    comm.reduce_scatter(stage[:size], mine.clone(), stage, False).wait()
    out += ["reduce_scatter in its stage"] * (not torch.equal(stage[:size], _plain(every, here)))
    gathered = torch.empty_like(mine)
    comm.all_gather(gathered, mine[:size].contiguous()).wait()
    out += ["all_gather"] * (not torch.equal(gathered, torch.cat([row[:size] for row in every])))
    total = mine.double().clone()
    comm.all_reduce(total).wait()
    out += ["all_reduce"] * (not torch.allclose(total, torch.stack([row.double() for row in every]).sum(0)))
    chunks = [row.view(mesh.size, size)[mesh.rank] for row in every]
    into = torch.empty_like(mine)
    comm.all_to_all(into, mine.clone(), None, None).wait()
    out += ["all_to_all"] * (not torch.equal(into, torch.cat(chunks)))
    # Rank r has r elements for the next rank, and nothing for others.
    send, receive = [0] * mesh.size, [0] * mesh.size
    before = (mesh.rank - 1) % mesh.size
    send[(mesh.rank + 1) % mesh.size], receive[before] = mesh.rank, before
    into = torch.empty(before, dtype=mine.dtype)
    comm.all_to_all(into, torch.full((mesh.rank,), mesh.rank, dtype=mine.dtype), receive, send).wait()
    out += ["all_to_all, uneven"] * (not torch.equal(into, torch.full((before,), before, dtype=mine.dtype)))
    return out


def _plain(every: list[Tensor], here: slice) -> Tensor:
    total = every[0][here]
    for row in every[1:]:
        total = total + row[here]
    return total


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_collectives(pool: Pools, world: int, kind: str) -> None:
    assert pool(world).run(collectives, kind) == [[]] * world


def many_at_once(kind: str) -> bool:
    """On a rank: several collectives of a communicator under way, finished out of order."""
    with _mesh(kind) as mesh:
        comm = mesh.transport.communicator("all_gather", ("shard",))
        mine = [torch.full((900 * i + 1,), 10.0 * i + mesh.rank) for i in range(8)]
        outs = [torch.empty(mesh.size * (900 * i + 1)) for i in range(8)]
        handles = [comm.all_gather(out, part) for out, part in zip(outs, mine, strict=True)]
        for handle in reversed(handles):
            handle.wait()
        ranks = range(mesh.size)
        wants = [torch.cat([torch.full((900 * i + 1,), 10.0 * i + r) for r in ranks]) for i in range(8)]
        return all(map(torch.equal, outs, wants))


def test_several_collectives_under_way(pool: Pools, kind: str) -> None:
    assert pool(3).run(many_at_once, kind) == [True] * 3


def comms(kind: str) -> tuple[list[tuple[int, ...]], bool, bool]:
    """On a rank: the members of some communicators, whether they differ, and whether alike ones are the same."""
    with _mesh(kind, (2, -1), ("replica", "shard")) as mesh:
        asked = [
            (role, axes)
            for role in ("all_gather", "reduce_scatter")
            for axes in (("shard",), ("replica",), mesh.axis_names)
        ]
        made = [mesh.transport.communicator(role, axes) for role, axes in asked]
        assert all(type(comm) is KINDS[kind] for comm in made)
        members = [tuple(exchange(comm, torch.tensor([mesh.rank])).view(-1).tolist()) for comm in made]
        want = [tuple(sorted(mesh.ranks(axes))) for _, axes in asked]
        apart = len(set(map(id, made))) == len(made) and members == want
        again = [mesh.transport.communicator(role, axes) for role, axes in asked]
        # Messages of two communicators do not meet, in whatever order they are sent.
        order = made[:2] if mesh.rank % 2 else made[1::-1]
        sums = {id(comm): torch.tensor([float(made.index(comm))]) for comm in order}
        handles = [comm.all_reduce(sums[id(comm)]) for comm in order]
        for handle in handles:
            handle.wait()
        apart &= [sums[id(comm)].item() for comm in made[:2]] == [0.0, 2.0]
        return members, apart, all(map(lambda a, b: a is b, made, again))


def test_communicators_are_groups_of_their_own(pool: Pools, kind: str) -> None:
    for members, apart, same in pool(4).run(comms, kind):
        assert apart and same, members


def test_one_rank_needs_no_group() -> None:
    with fs.make_mesh((1, 1), ("a", "b")) as mesh:
        assert isinstance(mesh.transport.communicator("all_gather", ("a",)), SingleRank)


def slow_reader() -> bool:
    """On a rank: far more small messages than a link holds, to a rank that does not read them until the end."""
    with _mesh("host") as mesh:
        comm = mesh.transport.communicator("all_gather", ("shard",))
        outs = [torch.empty(2 * mesh.size) for _ in range(2000)]
        shards = [torch.full((2,), float(2000 * mesh.rank + i)) for i in range(2000)]
        handles = [comm.all_gather(out, shard) for out, shard in zip(outs, shards, strict=True)]
        for handle in handles:
            handle.wait()
        wants = [torch.tensor([2000.0 * r + i for r in range(mesh.size) for _ in range(2)]) for i in range(2000)]
        return all(map(torch.equal, outs, wants))


def test_links_that_are_full(pool: Pools) -> None:
    assert pool(3).run(slow_reader) == [True] * 3


def memory_in_use() -> list[int]:
    """On a rank: how much shared memory a communicator has made after some steps, in parts that were sent."""
    with _mesh("host") as mesh:
        comm = mesh.transport.communicator("all_gather", ("shard",))
        shard, outs = torch.ones(5000), [torch.empty(5000 * mesh.size) for _ in range(2)]
        sizes = []
        for _ in range(50):
            handles = [comm.all_gather(out, shard) for out in outs]
            for handle in handles:
                handle.wait()
            sizes.append(len(comm.memory.own))
        return sizes


def test_shared_memory_is_used_again(pool: Pools) -> None:
    for sizes in pool(3).run(memory_in_use):
        assert 1 <= sizes[0] <= 2 and max(sizes) <= 6  # two under way, and those that peers have not read yet


def control(kind: str) -> tuple[list[int], list[str]]:
    """On a rank: rows and texts of all ranks."""
    with _mesh(kind) as mesh:
        comm = mesh.transport.communicator("control", ("shard",))
        rows = exchange(comm, torch.tensor([mesh.rank, 7]))
        texts = exchange_text(comm, f"rank {mesh.rank}: " + "\N{GREEK SMALL LETTER MU}" * 1500 * mesh.rank, 64)
        return rows[:, 0].tolist(), list(texts)


def _some_then_all(kind: str) -> list[str]:
    """On a rank: large parts for one peer alone, then for everybody, in the same memory."""
    out = []
    with _mesh(kind) as mesh:
        comm = mesh.transport.communicator("all_gather", ("shard",))
        for round_ in range(3):
            size, last = 3000 + round_, mesh.size - 1
            send = [size if peer == last else 0 for peer in range(mesh.size)]
            receive = [size if mesh.rank == last else 0] * mesh.size
            into = torch.empty(sum(receive))
            comm.all_to_all(into, torch.full((size,), float(mesh.rank)), receive, send).wait()
            every = torch.arange(mesh.size, dtype=torch.float32).repeat_interleave(size)
            out += [f"all_to_all {round_}"] * (mesh.rank == last and not torch.equal(into, every))
            whole = torch.empty(mesh.size * size)
            comm.all_gather(whole, torch.full((size,), float(mesh.rank))).wait()
            out += [f"all_gather {round_}"] * (not torch.equal(whole, every))
    return out


@pytest.mark.parametrize("world", [2, 4])
def test_peers_that_got_nothing_before(pool: Pools, kind: str, world: int) -> None:
    assert pool(world).run(_some_then_all, kind) == [[]] * world


def test_control_messages(pool: Pools, kind: str) -> None:
    for rows, texts in pool(2).run(control, kind):
        assert rows == [0, 1]
        assert texts[0] == "rank 0: " and texts[1].startswith("rank 1: \N{GREEK SMALL LETTER MU}")
        assert len(texts[1].encode()) <= 66  # the last character may be cut


def shared_files() -> int:
    """How many files of shared memory this process has open."""
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("memfd" in os.readlink(path) for path in paths if os.path.lexists(path))


def closed(kind: str) -> bool:
    """On a rank: a mesh that is closed leaves the process group that it found, and no file open."""
    before = shared_files()  # of meshes that other tests have left open
    mesh = _mesh(kind)
    mesh.transport.communicator("all_gather", ("shard",)).all_reduce(
        torch.ones(2000)
    ).wait()  # all have met before one leaves
    mesh.close()
    mesh.close()
    with pytest.raises(fs.errors.CommError, match="by mesh.close.. or at the end of its `with`: make steps"):
        mesh.transport.communicator("reduce_scatter", ("shard",))
    with _mesh(kind) as again:
        buffer = torch.ones(2000)
        again.transport.communicator("all_gather", ("shard",)).all_reduce(buffer).wait()
    return dist.is_initialized() and buffer[0].item() == dist.get_world_size() and shared_files() <= before


def test_closing_a_mesh(pool: Pools, kind: str) -> None:
    assert pool(2).run(closed, kind) == [True] * 2


def one_of_eight() -> None:
    """In a process of its own: train on a rank of PyTorch's fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    mesh = fs.make_mesh((-1,), ("shard",))
    params = {"w": torch.ones(256)}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    opt = fs.optim.sgd(0.1)
    step = fs.make_train_step(lambda p, b: (p["w"] * b).mean(), opt, plan, clip_norm=0.01)
    state = fs.init_state(plan, opt, params=params)
    for _ in range(3):
        state, _ = step(state, torch.ones(1))
    print(mesh.size, mesh.rank, state.params["w"].shape[0], [op.kind for op in step.record].count("all_gather"))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="before, what the fake process group gathers is uninitialized")
def test_one_rank_of_eight_over_the_fake_process_group(tmp_path: Path) -> None:
    child = Child(one_of_eight, out=tmp_path / "out", environment={})
    try:
        assert child.printed(60).split() == ["8", "3", "32", "1"]
    finally:
        child.kill()


TIMEOUT, LONG = 2.0, 25.0
"""Seconds that a communicator waits; and where what it waits for is found out at once."""


def bereft(kind: str, what: str, numel: int, how: str, report: str) -> None:
    """On a rank: two collectives, during the first of which rank 1 leaves; the others write down what is raised.

    Whatever a rank has put into shared memory before it dies is there, so that the first may succeed.
    """
    dist.barrier()  # ranks begin together, however busy the machine is
    mesh = _mesh(kind, timeout=TIMEOUT)
    comm = mesh.transport.communicator("all_gather", ("shard",))
    comm.all_reduce(torch.ones(1)).wait()
    buffer, part = torch.ones(numel * mesh.size), torch.ones(numel)
    calls = {
        "all-gather": lambda: comm.all_gather(buffer, part),
        "reduce-scatter": lambda: comm.reduce_scatter(part, buffer, torch.ones(numel * mesh.size), False),
        "all-reduce": lambda: comm.all_reduce(buffer),
    }
    if mesh.rank == 1:
        _leave(how, calls[what], report, mesh.size)
        return
    _write_down(lambda: [calls[what]().wait() for _ in range(2)], f"{report}{mesh.rank}")


def step_without_peer(kind: str, how: str, report: str) -> None:
    """On a rank: a train step that rank 1 does not make."""
    dist.barrier()
    mesh = _mesh(kind, timeout=TIMEOUT if how == "sleeps" else LONG)
    params = {"w": torch.ones(40)}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))])
    rule = fs.optim.sgd(0.1)
    step = fs.make_train_step(lambda p, b: (p["w"] * b).sum(), rule, plan)
    state, _ = step(fs.init_state(plan, rule, params=params), torch.ones(1))
    if mesh.rank == 1:
        _leave(how, lambda: None, report, mesh.size)
        return
    _write_down(lambda: step(state, torch.ones(1)), f"{report}{mesh.rank}")


def _leave(how: str, begin: Callable[[], Any], report: str, world: int) -> None:
    """Stay away until the others have told, or come and die at once, by a signal that no process can handle."""
    if how == "killed":
        begin()
        os.kill(os.getpid(), signal.SIGKILL)
    await_files([f"{report}{rank}" for rank in range(world) if rank != 1], LONG)


def _write_down(call: Callable[[], Any], report: str) -> None:
    began = time.monotonic()
    raised = attempt(call)
    Path(report).write_bytes(pickle.dumps((raised, time.monotonic() - began)))


def _run(function: Callable[..., None], *args: Any, world: int, folder: Path) -> list[tuple[Raised, float]]:
    own = Pool(world, LONG)  # whose process group is lost
    try:
        with contextlib.suppress(WorkerError):  # rank 1 may die
            own.run(function, *args, f"{folder}/")
    finally:
        own.kill()
    seen = [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world) if rank != 1]
    assert all(raised is not None for raised, _ in seen), seen
    return seen


@pytest.mark.parametrize(
    ("what", "how"),
    [
        *((what, "killed") for what in ("all-gather", "all-reduce")),
        pytest.param("reduce-scatter", "killed", marks=pytest.mark.slow),
        *(pytest.param(what, "sleeps", marks=pytest.mark.slow) for what in ("reduce-scatter", "all-reduce")),
    ],
)
def test_a_peer_that_does_not_come(kind: str, what: str, how: str, tmp_path: Path) -> None:
    for raised, seconds in _run(bereft, kind, what, 4, how, world=2, folder=tmp_path):
        assert "CommError" in raised.kinds and f"{what} on all_gather(shard) failed: " in raised.text
        assert seconds < LONG


@pytest.mark.parametrize("kind", ["gloo", pytest.param("host", marks=pytest.mark.slow)])
def test_a_peer_that_the_others_wait_for(kind: str, tmp_path: Path) -> None:
    test_a_peer_that_does_not_come(kind, "all-gather", "sleeps", tmp_path)


@pytest.mark.parametrize("what", ["all-gather", pytest.param("reduce-scatter", marks=pytest.mark.slow)])
def test_a_peer_that_is_killed_in_the_middle(kind: str, what: str, tmp_path: Path) -> None:
    """16 MB a message: far more than a socket holds, so it is under way when rank 1 dies."""
    for raised, seconds in _run(bereft, kind, what, 1 << 22, "killed", world=3, folder=tmp_path):
        assert "CommError" in raised.kinds and f"{what} on all_gather(shard) failed: " in raised.text
        assert seconds < LONG


@pytest.mark.parametrize("how", [pytest.param("sleeps", marks=pytest.mark.slow), "killed"])
def test_a_step_whose_peer_does_not_come_names_the_op(kind: str, how: str, tmp_path: Path) -> None:
    for raised, seconds in _run(step_without_peer, kind, how, world=2, folder=tmp_path):
        assert "CommError" in raised.kinds
        for part in ("op 0 of", "'handshake'", "all-gather on control(shard) failed: "):
            assert part in raised.text, raised
        assert seconds < LONG
