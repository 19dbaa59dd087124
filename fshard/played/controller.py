"""Functions of global tensors that run all ranks of a virtual mesh, and their derivatives.

A derivative of such a function is another such function: every rank takes the derivative of its part in its own run. No
graph crosses from one run to the next, so each derivative computes the forward again: this serves experiments, not
speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard.collectives.linear import check_plain, differentiable
from fshard.collectives.specs import joined, slice_of
from fshard.errors import CollectiveError
from fshard.played.cooperative import Randomness, randomness, restore_randomness
from fshard.played.virtual import VirtualMesh, play
from fshard.sharding.spec import P

Specs = tuple[P, ...]
Spmd = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class PlayedJob:
    """A function that every rank runs on its slices.

    Attributes:
        mesh: the virtual mesh.
        fn: from the slices of a rank to its results.
        inputs: specs of the arguments.
        outputs: returns the specs of the results, after a run.
        start: the state of random generators at the start of every run, so that derivatives draw the same numbers.
    """

    mesh: VirtualMesh
    fn: Spmd
    inputs: Specs
    outputs: Callable[[], Specs]
    start: Randomness

    def run(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """From global tensors to global tensors."""

        def body() -> tuple[Tensor, ...]:
            pairs = zip(xs, self.inputs, strict=True)
            return self.fn(*(slice_of(x, spec, self.mesh, self.mesh.rank).clone() for x, spec in pairs))

        ranks = play(self.mesh, body, self.start)
        return tuple(_join([r[i] for r in ranks], spec, self.mesh, i) for i, spec in enumerate(self.outputs()))

    def pullback(self, moved: list[int], pulled: list[int]) -> "PlayedJob":
        """From the arguments and the cotangents of some results to those of some arguments."""

        def fn(*slices: Tensor) -> tuple[Tensor, ...]:
            primals, cotangents = slices[: len(self.inputs)], slices[len(self.inputs) :]
            back = torch.func.vjp(self._part(primals, moved, pulled), *(primals[i] for i in moved))[1]
            grads: tuple[Tensor, ...] = back(cotangents)
            return grads

        inputs, outputs = (*self.inputs, *(self.outputs()[i] for i in pulled)), tuple(self.inputs[i] for i in moved)
        return replace(self, fn=fn, inputs=inputs, outputs=lambda: outputs)

    def pushforward(self, moved: list[int], pushed: list[int]) -> "PlayedJob":
        """From the arguments and the tangents of some of them to those of some results."""

        def fn(*slices: Tensor) -> tuple[Tensor, ...]:
            primals, tangents = slices[: len(self.inputs)], slices[len(self.inputs) :]
            part = self._part(primals, moved, pushed)
            out: tuple[Tensor, ...] = torch.func.jvp(part, tuple(primals[i] for i in moved), tangents)[1]
            return out

        inputs, outputs = (*self.inputs, *(self.inputs[i] for i in moved)), tuple(self.outputs()[i] for i in pushed)
        return replace(self, fn=fn, inputs=inputs, outputs=lambda: outputs)

    def batched(self, batched: Sequence[bool], random: str) -> "PlayedJob":
        """With a batch dim in front of some arguments, and of every result."""
        fn = torch.vmap(self.fn, in_dims=tuple(0 if b else None for b in batched), randomness=random)
        inputs = tuple(P(None, *s.dims) if b else s for s, b in zip(self.inputs, batched, strict=True))
        return replace(self, fn=fn, inputs=inputs, outputs=lambda: tuple(P(None, *s.dims) for s in self.outputs()))

    def _part(self, primals: Sequence[Tensor], moved: list[int], results: list[int]) -> Spmd:
        """Some results as a function of some arguments."""

        def part(*some: Tensor) -> tuple[Tensor, ...]:
            given = list(primals)
            for at, x in zip(moved, some, strict=True):
                given[at] = x
            out = self.fn(*given)
            return tuple(out[i] for i in results)

        return part


class OnAllRanks(torch.autograd.Function):
    """A job as a differentiable function of global tensors."""

    @staticmethod
    def forward(job: PlayedJob, *xs: Tensor) -> tuple[Tensor, ...]:
        for x in xs:
            check_plain(x, "shard_map")
        return job.run(xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the arguments, which derivatives start from."""
        ctx.job, *xs = inputs
        ctx.save_for_backward(*xs)
        ctx.save_for_forward(*xs)
        ctx.results = [i for i, y in enumerate(output) if differentiable(y)]
        ctx.mark_non_differentiable(*(y for y in output if not differentiable(y)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The pullback, as a job of its own."""
        xs = ctx.saved_tensors
        moved = [i for i, x in enumerate(xs) if ctx.needs_input_grad[i + 1] and differentiable(x)]
        job = ctx.job.pullback(moved, ctx.results)
        found = OnAllRanks.apply(job, *xs, *(grads[i] for i in ctx.results))  # type: ignore[no-untyped-call]
        out: list[Tensor | None] = [None] * (len(xs) + 1)
        for at, grad in zip(moved, found, strict=True):
            out[at + 1] = grad
        return tuple(out)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """The pushforward, as a job of its own."""
        xs = ctx.saved_tensors
        moved = [i for i, t in enumerate(tangents) if t is not None and differentiable(xs[i])]
        job = ctx.job.pushforward(moved, ctx.results)
        found = OnAllRanks.apply(job, *xs, *(tangents[i] for i in moved))  # type: ignore[no-untyped-call]
        out: list[Tensor | None] = [None] * len(ctx.job.outputs())
        for at, tangent in zip(ctx.results, found, strict=True):
            out[at] = tangent
        return tuple(out)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], job: PlayedJob, *xs: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Every rank maps its part over the batch."""
        dims = in_dims[1:]
        front = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(xs, dims, strict=True)]
        batched = job.batched([dim is not None for dim in dims], info.randomness)
        out = OnAllRanks.apply(batched, *front)  # type: ignore[no-untyped-call]
        return out, (0,) * len(out)


def on_all_ranks(mesh: VirtualMesh, spmd: Callable[..., Any], inputs: Specs, xs: Sequence[Tensor]) -> Any:
    """A function of slices as one of global tensors.

    Args:
        mesh: a virtual mesh, outside of its ``run``.
        spmd: from a rank's slices to its result's tensors, their specs, and a function from tensors to the result.
        inputs: the specs of the arguments.
        xs: the global arguments.
    """
    kept: list[Any] = []
    grad = torch.is_grad_enabled()

    def fn(*slices: Tensor) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(grad):
            tensors, specs, rest = spmd(*slices)
        if mesh.rank == 0:
            kept[:] = [specs, rest, randomness()]
        return tuple(tensors)

    job = PlayedJob(mesh, fn, inputs, lambda: kept[0], randomness())
    results = OnAllRanks.apply(job, *xs)  # type: ignore[no-untyped-call]
    restore_randomness(kept[2])
    return kept[1](list(results))


def _join(slices: list[Tensor], spec: P, mesh: VirtualMesh, number: int) -> Tensor:
    shapes = {tuple(x.shape) for x in slices}
    if len(shapes) > 1:
        raise CollectiveError(f"shard_map: result {number} has different shapes on different ranks: {sorted(shapes)}")
    return joined(slices, spec, mesh)
