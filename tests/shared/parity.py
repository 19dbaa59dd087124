"""Training on ranks beside one plain process: the loops of both, what a rank sees, and how two runs differ.

A test makes a step in its own way and gives it to ``sharded``; the reference is a loop of plain PyTorch, mostly
``plain``. Both return a ``Run``; ``differences`` names what is not equal.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import tree


@dataclass(frozen=True)
class Run:
    """What one rank, or one plain process, saw of a training.

    Attributes:
        losses: of each step.
        norms: of the gradient of each step, before clipping.
        params: the whole parameters after the last step, by path.
        problems: what is wrong in itself, such as a step that left its schedule.
        state: the rank's own part of the optimizer's state after the last step, by name and path.
    """

    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]
    problems: list[str] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)

    def like(self, other: "Run") -> bool:
        """Whether losses and norms are equal in every bit."""
        return (self.losses, self.norms) == (other.losses, other.norms)


@dataclass(frozen=True)
class Near:
    """How far a run may be from another.

    Losses count relative to the largest one above 1, norms to the largest one, and parameters as they are.
    """

    loss: float = 1e-5
    norm: float = 1e-5
    param: float = 1e-5


def whole(params: Any) -> dict[str, Tensor]:
    """The leaves of a tree by path, in memory of their own."""
    return {path: leaf.detach().clone() for path, leaf in tree.paths(params)}


def sharded(
    step: Any, state: Any, plan: fs.Plan, batches: Iterable[Any], *, scheduled_from: int | None = 0
) -> tuple[Run, fs.TrainState]:
    """On a rank: make a step with each of its batches.

    Args:
        step: what ``fs.make_train_step`` returned.
        state: the first state.
        plan: the state's plan.
        batches: this rank's part of each global batch.
        scheduled_from: the first step that must run its schedule op by op; None where no step has to.

    Returns:
        What the rank saw, and the last state.
    """
    losses, norms, problems = [], [], []
    for number, batch in enumerate(batches):
        state, metrics = step(state, batch)
        losses.append(metrics.loss.item())
        norms.append(metrics.grad_norm.item())
        if scheduled_from is not None and number >= scheduled_from and tuple(step.record) != tuple(step.schedule.ops):
            problems.append(f"step {number}: {departure(step)}")
    held = {f"{name}.{path}": leaf.clone() for name, of in state.opt_state.items() for path, leaf in tree.paths(of)}
    return Run(losses, norms, whole(fs.unshard(fs.settle(state).params, plan)), problems, held), state


def departure(step: Any) -> str:
    """The first op of the last step that is not the schedule's."""
    ran, said = next(pair for pair in itertools.zip_longest(step.record, step.schedule.ops) if pair[0] != pair[1])
    return f"{ran} ran where the schedule says {said}"


def plain(
    params: Mapping[str, Tensor], rule: Any, backward: Callable[[int], float], steps: int, clip: float | None = None
) -> Run:
    """One plain process: gradients, clipping by the global norm, and the rule's update.

    A leaf that a step does not use has gradient zero, as in JAX, and decays like any other; PyTorch's own optimizers
    would leave it out.

    Args:
        params: the leaves by path; those that need no gradient are not trained. Updated in place.
        rule: has ``step()``, which reads ``grad``.
        backward: adds a step's gradients to ``grad``, which is zero, and returns the loss of its global batch.
        steps: how many.
        clip: the limit of the global norm, or None.
    """
    trained = [leaf for leaf in params.values() if leaf.requires_grad]
    losses, norms = [], []
    for number in range(steps):
        for leaf in trained:
            leaf.grad = torch.zeros_like(leaf)
        losses.append(backward(number))
        norms.append(torch.nn.utils.clip_grad_norm_(trained, math.inf if clip is None else clip).item())
        rule.step()
    return Run(losses, norms, {path: leaf.detach().clone() for path, leaf in params.items()})


def backward(loss: Tensor) -> float:
    """Adds the gradients of a loss; returns its value."""
    loss.backward()
    return loss.item()


def differences(ranks: Sequence[Run], want: Run, near: Near = Near()) -> list[str]:  # noqa: B008
    """What the ranks found, where they disagree, and where rank 0 is not what the reference is."""
    got = ranks[0]
    out = [f"rank {i}: {problem}" for i, run in enumerate(ranks) for problem in run.problems[:2]]
    out += [f"rank {i} saw other losses or norms than rank 0" for i, run in enumerate(ranks) if not run.like(got)]
    out += _far("loss", got.losses, want.losses, near.loss * max([1.0, *map(abs, want.losses)]))
    out += _far("grad_norm", got.norms, want.norms, near.norm * max([1e-30, *want.norms]))
    return out + far_leaves(got.params, want.params, near.param)


def _far(what: str, got: Sequence[float], want: Sequence[float], tolerance: float) -> list[str]:
    gaps = [(i, g, w) for i, (g, w) in enumerate(zip(got, want, strict=True)) if not abs(g - w) <= tolerance]
    if not gaps:
        return []
    number, mine, right = gaps[0]
    return [f"{what} of step {number} is {mine:.8f}, expected {right:.8f} (and {len(gaps) - 1} steps more)"]


def far_leaves(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float) -> list[str]:
    """The leaves whose paths, shapes or values are not those of the reference."""
    if got.keys() != want.keys():
        return [f"paths {sorted(got)}, expected {sorted(want)}"]
    out = []
    for path, leaf in want.items():
        mine = got[path]
        gap = math.nan if mine.shape != leaf.shape else (mine - leaf).abs().max().item() if leaf.numel() else 0.0
        if not gap <= tolerance:
            out.append(f"{path} {list(mine.shape)} differs from {list(leaf.shape)} by {gap:.2e}")
    return out


def other_bits(run: Run, first: Run) -> list[str]:
    """Where two runs that must agree in every bit do not."""
    if not run.like(first):
        pairs = zip(zip(run.losses, run.norms, strict=True), zip(first.losses, first.norms, strict=True), strict=True)
        return [f"values differ from step {next(i for i, (mine, other) in enumerate(pairs) if mine != other)} on"]
    named = {**run.params, **run.state}, {**first.params, **first.state}
    leaves = [path for path, leaf in named[0].items() if not torch.equal(leaf, named[1][path])]
    return [f"values differ in {leaves}"] if leaves else []
