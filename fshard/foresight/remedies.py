"""What would have to change for a step to fit into a device's memory, each computed, not guessed."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fshard.arguments import size_text
from fshard.errors import PlanError
from fshard.foresight.foresee import Foresight, on_plan, state_bytes, task_of
from fshard.runtime.engine.batch import along_rows
from fshard.schedule.auto import Candidate, tried
from fshard.schedule.candidates import Task
from fshard.schedule.simulate import time_text
from fshard.schedule.transfers import item_words
from fshard.sharding.mesh import abstract_mesh
from fshard.sharding.plan import Plan
from fshard.sharding.rules import Rule
from fshard.training.step import TrainStep

Remade = Callable[..., tuple[TrainStep, Any]]
"""Makes the step and its batch with other options: ``remat="all"``."""

AWAY = "pinned_host"

HOSTED: Mapping[str, Mapping[str, Any]] = {
    "optimizer state in host memory (opt_memory_kind=)": {"opt_memory_kind": AWAY, "update_on": "device"},
    'parameters, too (memory_kind=, update_on="device")': {"memory_kind": AWAY, "update_on": "device"},
    "and updated there (memory_kind=)": {"memory_kind": AWAY, "update_on": "host"},
}
"""What may be kept in host memory, and what rules say of it."""

MOST_RANKS = 64
"""Times as many ranks as there are, which are tried at most."""


@dataclass(frozen=True)
class Remedy:
    """A change, the bytes that a rank would hold with it, whether that is enough, and what a step would take."""

    change: str
    peak_bytes: int
    enough: bool
    seconds: float

    def __str__(self) -> str:
        fits = ", which fits" if self.enough else ""
        return f"{self.change}: {size_text(self.peak_bytes)}{fits}; a step of {time_text(self.seconds)}"


def remedies(seen: Foresight, step: TrainStep, remade: Remade | None = None) -> Iterator[Remedy]:
    """Changes that lower the peak, in the order in which most would try them, and the first ones together.

    Args:
        seen: what does not fit.
        step: the step.
        remade: makes the step anew with other options.
    """
    task, plan = seen.task, seen.plan
    held = functools.partial(_remedy, seen, step)
    now = held(f"the policy {seen.least.policy}", task, plan)
    yield now
    slim, where, least = task, plan, now.peak_bytes
    if remade is not None:
        made, batch = remade(remat="all")
        again = task_of(made, made.trace(batch), plan)
        found = held('remat="all": units are computed again in their backward', again, plan)
        yield found
        slim = again if found.peak_bytes < now.peak_bytes else slim
    if seen.rows > 1 and along_rows(plan.batch):
        found = held("half the rows in a microbatch, with accumulate= doubled (about)", _of_half_the_rows(task), plan)
        yield found
        slim = _of_half_the_rows(slim) if found.peak_bytes < now.peak_bytes else slim
    away = ((words, _in_host_memory(plan, given)) for words, given in HOSTED.items())
    for words, other in [(words, other) for words, other in away if other is not None]:
        found = held(words, on_plan(task, other, step), other)
        if found.peak_bytes < least:
            least, where = found.peak_bytes, other
            yield found
    if where is not plan and slim is not task:
        yield held("all of these that help, together", on_plan(slim, where, step), where)
    yield from _more_ranks(seen, step, task)


def none_will_do(found: Sequence[Remedy]) -> Iterator[str]:
    """What is said where no change is enough; nothing where one is."""
    if not any(remedy.enough for remedy in found):
        yield (
            "None of these is enough: give devices with more memory, shorter rows, axes that cut leaves, or a smaller "
            "model."
        )


def _remedy(seen: Foresight, step: TrainStep, change: str, task: Task, plan: Plan) -> Remedy:
    """What the policy that holds least would hold and take for a task, on a plan."""
    candidate, _ = tried(task, seen.least.policy, seen.hardware.of(task, plan))
    peak = state_bytes(step, plan) + seen.hardware.held(plan, candidate, task)
    return Remedy(change, peak, peak <= (seen.hardware.memory or 0), candidate.seconds)


def _of_half_the_rows(task: Task) -> Task:
    """Twice as many microbatches, of half the rows each."""
    halves = ("peak", "after", "flops", "moved")
    less = [replace(need, **{name: getattr(need, name) // 2 for name in halves}) for need in task.needs]
    return replace(task, needs=less, accumulate=2 * task.accumulate)


def _in_host_memory(plan: Plan, given: Mapping[str, Any]) -> Plan | None:
    """The plan with some of what is trained in host memory; None if it is there, or cannot be.

    Args:
        plan: the plan.
        given: what rules say of it.
    """
    if plan.source is None:  # of one replica of fs.outer
        return None
    on_cpu = plan.mesh.device.type == "cpu"  # where no memory can be page-locked
    kinds: dict[str, Any] = {name: "unpinned_host" if on_cpu and kind == AWAY else kind for name, kind in given.items()}
    full = [rule if isinstance(rule, Rule) else Rule(*rule) for rule in plan.source.rules]
    kinds = {"opt_memory_kind": None, **kinds}
    rules = [rule if rule.trainable is False else replace(rule, **kinds) for rule in full]
    try:
        other = plan.replace(rules=rules)
    except PlanError:  # the optimizer's state is sharded over further axes
        return None
    same = [group.kinds for group in other.groups] == [group.kinds for group in plan.groups]
    return None if same or len(other.groups) != len(plan.groups) else other


def _more_ranks(seen: Foresight, step: TrainStep, task: Task) -> Iterator[Remedy]:
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
        remedy = _remedy(seen, step, f"{mesh.size:,} ranks, with as many rows each", wider, plan)
        if remedy.enough:
            yield remedy
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
