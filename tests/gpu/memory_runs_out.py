"""Out of memory in a backward: all ranks fail, the memory comes back, and the next step is as if nothing had been.

On a GPU the backward asks for more than there is. On the CPU, where the system would rather end a process than refuse,
it raises the same error.
"""

import gc
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from tests.gpu.models import TINY, Size, alone, job, rows
from tests.gpu.place import Found, Place

SLACK = 1 << 20
"""Bytes that may stay allocated after a failure: workspaces of libraries."""


class Greedy(torch.autograd.Function):
    """The identity, whose backward needs more memory than there is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if grads[0].device.type == "cpu":
            raise torch.OutOfMemoryError("no memory today")
        free, total = torch.cuda.mem_get_info()
        torch.empty(2 * total, dtype=torch.uint8, device=grads[0].device)
        return grads[0]


def run(place: Place, found: Found) -> None:
    """Fail a step of one rank, and of one of two played ranks; then make it."""
    place.deterministic()
    size = place.of(Size(width=256, tokens=128), TINY)
    if place.dry:
        found.leave("a device that is out of memory: the backward raised its error itself")
    every: dict[str, dict[str, Any]] = {"plain": {}, "remat": {"remat": "all"}, "accumulate": {"accumulate": 2}}
    for option, options in place.of(every, every, {"plain": {}}).items():
        with found.trying(f"one rank, {option}"):
            want = _train(alone(place.device), size, options, None, place)
            got = _train(alone(place.device), size, options, 0, place)
            _compare(found, f"one rank, {option}", got, want)
    with found.trying("two ranks"):
        mesh = fs.virtual_mesh((2,), ("data",), device=place.device)
        good = mesh.run(lambda: _train(mesh.here, size, {}, None, place))
        bad = mesh.run(lambda: _train(mesh.here, size, {}, 1, place))
        for rank in range(2):
            _compare(found, f"rank {rank} of two", bad[rank], good[rank])


def _train(mesh: fs.Mesh, size: Size, options: dict[str, Any], greedy: int | None, place: Place) -> dict[str, Any]:
    """Two good steps, and between them one that fails on a rank; what each came to, and what stayed allocated."""
    made, fail = job(size, mesh), [False]

    def loss(params: Any, batch: Tensor) -> Tensor:
        value = made.loss(params, batch)
        return Greedy.apply(value) if fail[0] else value  # type: ignore[no-untyped-call, no-any-return]

    state, step = made.start(), fs.make_train_step(loss, made.opt, made.plan, **options)
    losses, error, kept = [], "", 0
    for number in range(3):
        fail[0] = False
        state, metrics = step(state, rows(size, number, mesh))
        losses += [metrics.loss.item(), metrics.grad_norm.item()]
        if greedy is not None and number:
            fail[0] = greedy == mesh.rank
            before = _allocated(place)
            error, kept = _failed(step, state, rows(size, number, mesh)), 0
            gc.collect()
            kept = _allocated(place) - before
    return {"losses": losses, "error": error, "kept": kept}


def _failed(step: Any, state: fs.TrainState, batch: Tensor) -> str:
    try:
        step(state, batch)
    except (torch.OutOfMemoryError, fs.errors.PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _allocated(place: Place) -> int:
    place.synchronize()
    return 0 if place.dry else torch.cuda.memory_allocated(place.device)


def _compare(found: Found, name: str, got: dict[str, Any], want: dict[str, Any]) -> None:
    found.check(got["losses"] == want["losses"], f"{name}: {got['losses']} where {want['losses']} was expected")
    memory = "OutOfMemoryError" in got["error"] or "memory" in got["error"]
    found.check(memory, f"{name}: the step that ran out of memory raised: {got['error'] or 'nothing'}")
    found.check(got["kept"] <= SLACK, f"{name}: {got['kept']} bytes stayed allocated after the failure")
    found.number(f"{name}: bytes that stayed", got["kept"])
