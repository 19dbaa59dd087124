"""What a forked child of a rank does to its parent's job: programs of ranks."""

import os
import pickle
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fshard as fs
from fshard.checkpoint.folder import CheckpointFolder
from tests.faults.program import Fault, batch, make_loss, start


def in_child(body: Callable[[], object]) -> Any:
    """What a forked child's function returned, or the text of what it raised."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told: object = body()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, pickle.dumps(told))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        told = pickle.loads(file.read())
    os.waitpid(pid, 0)
    return told


class Job:
    """A rank that has stepped and saved.

    Args:
        folder: of checkpoints.
        shared_memory: whether ranks share memory.
    """

    def __init__(self, folder: str, shared_memory: bool) -> None:
        self.mesh = fs.make_mesh((-1,), ("shard",), timeout=20.0, shared_memory=shared_memory)
        self.plan, opt, self.state = start(self.mesh)
        self.step = fs.make_train_step(make_loss(Fault()), opt, self.plan)
        self.checkpoints = fs.Checkpointer(folder, keep=2)
        self.opt = opt
        self.number = 0

    def go_on(self) -> float:
        """A step and a save."""
        self.number += 1
        self.state, metrics = self.step(self.state, batch(self.number, self.mesh.rank))
        self.checkpoints.save(self.state)
        return float(metrics.loss.item())

    def leave(self) -> None:
        """Leave the block of the mesh by an exception, as ``sys.exit`` in a child does."""
        with self.mesh:
            raise SystemExit(3)

    def calls(self) -> dict[str, Callable[[], object]]:
        """Calls that a child has no right to make, by name."""
        mesh, data = self.mesh, batch(1, self.mesh.rank)
        return {
            "step": lambda: self.step(self.state, data),
            "unshard": lambda: fs.unshard(self.state.params, self.plan),
            "save": lambda: self.checkpoints.save(self.state, overwrite=True),
            "restore": lambda: self.checkpoints.restore(self.plan, self.opt),
            "a new communicator": lambda: mesh.transport.communicator("another", mesh.axis_names),
            "a known communicator": lambda: mesh.transport.communicator("control", mesh.axis_names).all_reduce(
                data["x"]
            ),
            "a new step": lambda: fs.make_train_step(make_loss(Fault()), self.opt, self.plan)(self.state, data),
            "exit": self.leave,
        }

    def close(self) -> None:
        """End."""
        self.checkpoints.close()
        self.mesh.close()


def held(folder: str) -> list[str]:
    """Descriptors of this process that are its parent's: connected sockets to ranks, and the lock of the folder."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        target = Path("/proc/self/fd", name)
        if not target.is_symlink():
            continue
        if str(target.resolve()).startswith(os.path.realpath(folder)):
            found.append(str(target.resolve()))
    return found


def calls_in_children(folder: str, shared_memory: bool, seed: int) -> tuple[list[tuple[str, Any]], list[float]]:
    """Children make all calls in a random order, each in one of its own or several in one; then the parent goes on."""
    job = Job(folder, shared_memory)
    losses, told = [job.go_on()], []
    names = list(job.calls())
    random.Random(seed).shuffle(names)

    def body(name: str) -> str:
        try:
            job.calls()[name]()
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return ""

    for name in names[:3]:
        told.append((name, in_child(lambda name=name: body(name))))
        losses.append(job.go_on())
    told += in_child(lambda: [(name, body(name)) for name in names])
    told.append(("held", in_child(lambda: held(folder))))
    losses.append(job.go_on())
    job.close()
    return told, losses


def undisturbed(folder: str, shared_memory: bool) -> list[float]:
    """The losses of the same job without children."""
    job = Job(folder, shared_memory)
    losses = [job.go_on() for _ in range(5)]
    job.close()
    return losses


def sockets_in_a_program(folder: str, shared_memory: bool) -> tuple[int, int]:
    """Sockets of this process that another program would inherit, before a mesh is made and after."""

    def inherited() -> int:
        found = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and os.get_inheritable(int(name))
            except OSError:
                continue
        return found

    before = inherited()
    job = Job(folder, shared_memory)
    job.go_on()
    after = inherited()
    job.close()
    return before, after


def locked_by_a_child(folder: str) -> str:
    """Whether another writer may come once the parent has closed its folder, while a child of it lives."""
    first = CheckpointFolder(folder)
    first.begin(1, False)
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        here.close()
        there.recv(1)
        os._exit(0)
    there.close()
    first.close()
    try:
        CheckpointFolder(folder).begin(2, False)
        return "free"
    finally:
        here.close()
        os.waitpid(pid, 0)
