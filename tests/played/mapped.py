"""What ``fs.shard_map`` means, in plain PyTorch, and random programs for it.

A program is a generator: it yields ``(collective, axes, tensor)`` and is sent the result. On a rank a real collective
answers it. The reference runs one generator a rank in lockstep and answers with a plain function of what they yielded.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, collectives
from fshard.sharding.spec import axes_of

Program = Callable[..., Generator[Any, Any, Any]]
Axes = tuple[str, ...]

PLAIN: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "psum": lambda xs: [sum(xs, torch.zeros(()))] * len(xs),
    "pmean": lambda xs: [sum(xs, torch.zeros(())) / len(xs)] * len(xs),
    "pmax": lambda xs: [torch.stack(xs).amax(0)] * len(xs),
    "pvary": lambda xs: xs,
    "all_gather": lambda xs: [torch.stack(xs)] * len(xs),
    "psum_scatter": lambda xs: list(sum(xs, torch.zeros(())).unbind(0)),
    "all_to_all": lambda xs: [torch.stack([x[r] for x in xs]) for r in range(len(xs))],
    "ring": lambda xs: xs[-1:] + xs[:-1],
    "down": lambda xs: [*xs[1:], torch.zeros_like(xs[0])],
    "index": lambda xs: [torch.tensor(float(r)) for r in range(len(xs))],
}


def reference(program: Program, mesh: fs.Mesh, in_specs: Sequence[P], out_specs: Sequence[P]) -> Callable[..., Any]:
    """The function of global tensors: slices, a program on each rank, and their results joined."""

    def cut(x: Tensor, spec: P, rank: int) -> Tensor:
        for dim, entry in enumerate(spec.dims):
            size = x.shape[dim] // mesh.axis_size(axes_of(entry))
            x = x.narrow(dim, mesh.index(axes_of(entry), rank) * size, size)
        return x

    def join(xs: list[Tensor], spec: P) -> Tensor:
        total = torch.zeros((), dtype=xs[0].dtype)
        for rank, x in enumerate(xs):
            if mesh.index(tuple(a for a in mesh.axis_names if a not in spec.axes), rank) == 0:
                pads = [(0, 0)] * x.dim()
                for dim, entry in enumerate(spec.dims):
                    at, n = mesh.index(axes_of(entry), rank), mesh.axis_size(axes_of(entry))
                    pads[dim] = (at * x.shape[dim], (n - 1 - at) * x.shape[dim])
                total = total + F.pad(x, [edge for pad in reversed(pads) for edge in pad])
        return total

    def f(*args: Tensor) -> tuple[Tensor, ...]:
        slices = [[cut(x, s, r) for x, s in zip(args, in_specs, strict=True)] for r in range(mesh.size)]
        results = lockstep([program(*mine) for mine in slices], mesh)
        return tuple(join([r[i] for r in results], spec) for i, spec in enumerate(out_specs))

    return f


def lockstep(ranks: list[Generator[Any, Any, Any]], mesh: fs.Mesh) -> list[Any]:
    """Run the programs of all ranks together; what each returned."""
    results: list[Any] = [None] * len(ranks)
    answers: list[Any] = [None] * len(ranks)
    while True:
        asked = []
        for rank, run in enumerate(ranks):
            try:
                asked.append(run.send(answers[rank]))
            except StopIteration as end:
                results[rank] = end.value
        if not asked:
            return results
        name, axes, _ = asked[0]
        for members in mesh.partition(axes):
            for rank, y in zip(members, PLAIN[name]([asked[r][2] for r in members]), strict=True):
                answers[rank] = y


def on_rank(program: Program) -> Callable[..., Any]:
    """The program with real collectives."""

    def f(*args: Tensor) -> Any:
        run = program(*args)
        answer = None
        try:
            while True:
                name, axes, x = run.send(answer)
                n = collectives.axis_size(axes)
                if name == "index":
                    answer = torch.tensor(float(collectives.axis_index(axes)))
                elif name == "ring":
                    answer = collectives.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])
                elif name == "down":
                    answer = collectives.ppermute(x, axes, [(i + 1, i) for i in range(n - 1)])
                elif name == "all_to_all":
                    answer = collectives.all_to_all(x, axes, 0, 0)
                else:
                    answer = getattr(collectives, name)(x, axes)
        except StopIteration as end:
            return end.value

    return f


STEPS = (
    "sin",
    "weigh",
    "norm",
    "total",
    "pmean",
    "pmax",
    "pvary",
    "gather",
    "scatter",
    "exchange",
    "ring",
    "down",
    "index",
)


def program_of(steps: Sequence[tuple[str, Axes]], every: Axes) -> Program:
    """A program of these steps on a matrix ``x`` and a weight ``w``: it returns its matrix and a global loss."""

    def program(x: Tensor, w: Tensor) -> Generator[Any, Any, Any]:
        for step, axes in steps:
            if step == "sin":
                x = x.sin()
            elif step == "weigh":
                x = torch.tanh(x * (1 + w.square().mean()))
            elif step == "norm":
                x = x / (1 + (yield "psum", axes, x.square().sum()))
            elif step == "total":
                x = x * (yield "psum", axes, x.cos())
            elif step == "gather":
                x = x + (yield "all_gather", axes, x).sin().mean(0)
            elif step in ("scatter", "exchange"):
                everyone = yield "all_gather", axes, x
                if step == "scatter":
                    x = x + (yield "psum_scatter", axes, everyone * x)
                else:
                    x = x * (yield "all_to_all", axes, everyone + x).sum(0)
            elif step == "pmax":
                x = x - (yield "pmax", axes, x.detach())
            elif step == "index":
                x = x * (1 + (yield "index", axes, x))
            else:
                x = x + x * (yield step, axes, x)
        loss = yield "psum", every, (x.square().sum() + w.sum() * x.mean())
        return x, loss

    return program
