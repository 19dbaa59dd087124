"""What would have to change for a step to fit into a device's memory, each computed, not guessed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fshard.arguments import size_text
from fshard.errors import PlanError
from fshard.foresight.foresee import Foresight, on_plan, state_bytes, task_of
from fshard.schedule.auto import Candidate, tried
from fshard.schedule.candidates import Task
from fshard.schedule.footprint import Need
from fshard.schedule.transfers import item_words
from fshard.sharding.mesh import abstract_mesh
from fshard.training.step import TrainStep

Remade = Callable[..., tuple[TrainStep, Any]]
"""Makes the step and its batch with other options: ``remat="all"``."""

MOST_RANKS = 64
"""Times as many ranks as there are, which are tried at most."""


@dataclass(frozen=True)
class Remedy:
    """A change, the bytes that a rank would hold with it, and whether that is enough."""

    change: str
    peak_bytes: int
    enough: bool

    def __str__(self) -> str:
        return f"{self.change}: {size_text(self.peak_bytes)}{', which fits' if self.enough else ''}"


def remedies(seen: Foresight, step: TrainStep, remade: Remade | None = None) -> Iterator[Remedy]:
    """Changes that lower the peak, in the order in which most would try them.

    Args:
        seen: what does not fit.
        step: the step.
        remade: makes the step anew with other options.
    """
    limit = seen.hardware.memory or 0
    policy = seen.least.policy
    task = seen.task
    costs = seen.hardware.of(task, seen.plan)

    def remedy(change: str, other: Task, state: int = seen.state_bytes) -> Remedy:
        peak = state + seen.hardware.held(seen.plan, tried(other, policy, costs)[0], other)
        return Remedy(change, peak, peak <= limit)

    yield remedy(f"the policy {policy}", task)
    if remade is not None:
        again, batch = remade(remat="all")
        yield remedy(
            'remat="all": units are computed again in their backward',
            task_of(again, again.trace(batch), seen.plan),
        )
    if seen.rows > 1:
        less = [Need(need.peak // 2, need.after // 2, need.flops // 2, need.moved // 2) for need in task.needs]
        yield remedy("half the rows in a microbatch, with accumulate= doubled (about)", replace(task, needs=less))
    yield from _more_ranks(seen, step, task, limit)


def _more_ranks(seen: Foresight, step: TrainStep, task: Task, limit: int) -> Iterator[Remedy]:
    """The fewest ranks that do, in doublings."""
    if seen.plan.source is None:  # of one replica of fs.outer
        return
    first, *rest = seen.plan.mesh.sizes
    times = 2
    while times <= MOST_RANKS:
        mesh = abstract_mesh((first * times, *rest), seen.plan.mesh.axis_names)
        try:
            plan = seen.plan.source.plan(mesh, seen.plan.batch, seen.plan.precision)
        except PlanError:  # more ranks do not divide a dim, or have no use for a format
            return
        wider = on_plan(task, plan, step)
        one, _ = tried(wider, seen.least.policy, seen.hardware.of(wider, plan))
        peak = state_bytes(step, plan) + seen.hardware.held(plan, one, wider)
        if peak <= limit:
            yield Remedy(f"{mesh.size:,} ranks, with as many rows each", peak, True)
            return
        times *= 2


def largest(seen: Foresight, count: int = 6) -> list[str]:
    """What a rank holds most of at the peak of the policy that holds least, in words."""
    least: Candidate = seen.least
    memory = least.memory
    rows = [
        (seen.state_bytes, "parameter shards and optimizer state"),
        (seen.held(least) - seen.state_bytes - memory.peak_bytes, "communicators"),
        (memory.activation_bytes, "activations and what else compute needs"),
        (memory.arena_bytes, "the arena: gathered parameters"),
        (memory.gradient_bytes, "gradients, their shards and staging"),
    ]
    big = max(seen.groups, key=lambda row: row.gathered)
    words = item_words()["param"]
    listed = [f"{size_text(size)}  {text}" for size, text in sorted(rows, reverse=True) if size]
    return [*listed[:count], f"{size_text(big.gathered)}  of these are the {words} of {big.name}, the largest group"]
