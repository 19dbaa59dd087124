"""Remedies for a step that does not fit into a device's memory, each computed, not guessed."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fshard.arguments import size_text
from fshard.errors import PlanError, RematError
from fshard.foresight.foresee import Foresight, on_plan, resized, scalable, sizes, state_bytes, task_of
from fshard.foresight.jobs import Job
from fshard.runtime.engine.batch import along_rows
from fshard.schedule.auto import Candidate, timed
from fshard.schedule.build import build
from fshard.schedule.candidates import PolicyTask, candidates
from fshard.schedule.footprint import footprint
from fshard.schedule.policy import Policy
from fshard.schedule.simulate import time_text
from fshard.schedule.transfers import item_words
from fshard.sharding.plan import Plan, plan_of
from fshard.sharding.rules import Rule
from fshard.training.train_step import TrainStep

Remade = Callable[..., tuple[TrainStep, Any]]
"""Makes the step and its batch with other options: ``remat="all"``."""

REMAT = 'remat="all": units are computed again in their backward'
OFFLOAD = 'remat="offload": what units keep for their backward waits in host memory'
CHUNKS = 8
CHUNKED = f"chunks={CHUNKS}: the head and its loss by chunks of rows (fs.causal_lm_loss)"
ONCE_MORE: Mapping[str, Mapping[str, Any]] = {OFFLOAD: {"remat": "offload"}, REMAT: {"remat": "all"}}
"""The options that a step is made anew with, unless the caller says which. Of two that exclude each other the later
counts among those that help together."""

IN_HOST_MEMORY: Mapping[str, Mapping[str, Any]] = {
    'optimizer state in host memory (opt_memory_kind="pinned_host")': {
        "opt_memory_kind": "pinned_host",
        "update_on": "device",
    },
    'parameters and state in host memory (memory_kind="pinned_host", update_on="device")': {
        "memory_kind": "pinned_host",
        "update_on": "device",
    },
    'both in host memory, and updated there (memory_kind="pinned_host")': {
        "memory_kind": "pinned_host",
        "update_on": "host",
    },
}
"""What may be kept in host memory, and what rules say of it."""

WORTH = 0.98
"""The most of a peak that a change leaves which is worth it."""

MOST_PARTS = 64
"""Into how many microbatches of fewer rows those that there are may be cut."""

MOST_RANKS = 64
"""Times as many ranks as there are, which are tried at most."""


@dataclass(frozen=True)
class Remedy:
    """A change, and what a step would hold and take with it under the policy that holds least.

    Attributes:
        change: what would change.
        peak_bytes: the most that a rank would hold.
        enough: whether that fits.
        seconds: of a step; None where costs were measured, which are those of the step without the change.
    """

    change: str
    peak_bytes: int
    enough: bool
    seconds: float | None

    def __str__(self) -> str:
        fits = ", which fits" if self.enough else ""
        takes = "" if self.seconds is None else f"; a step of {time_text(self.seconds)}"
        return f"{self.change}: {size_text(self.peak_bytes)}{fits}{takes}"


def open_changes(job: Job) -> dict[str, Mapping[str, Any]]:
    """Return by its words what ``job.step`` takes that a job leaves open."""
    found = dict(ONCE_MORE) if job.remat is None else {}
    enough = sizes(job.batch)[1] // job.accumulate > CHUNKS
    return {**found, **({CHUNKED: {"chunks": CHUNKS}} if job.chunked is not None and enough else {})}


def remedies(
    seen: Foresight, step: TrainStep, remade: Remade | None = None, changes: Mapping[str, Mapping[str, Any]] = ONCE_MORE
) -> Iterator[Remedy]:
    """Changes that lower the peak, in the order in which most would try them; those that help, together; more ranks.

    Args:
        seen: what does not fit.
        remade: makes the step anew with other options.
        changes: by their words, the options that it is tried with.
    """
    task, plan = seen.task, seen.plan
    held = functools.partial(_remedy, seen, step)
    now = seen.held(seen.least)
    seconds = seen.least.seconds if seen.hardware.costs is None else None
    yield Remedy(f"the policy {seen.least.policy}", now, now <= (seen.hardware.memory or 0), seconds)
    helping: list[Remedy] = []
    slim, where, fewer = task, plan, False
    every: dict[str, Any] = {}
    for found, again, options in _helpful(held, plan, remade, changes, now):
        slim = _task(remade, plan, every | dict(options)) if every else again
        helping, every = [*helping, found], every | dict(options)
        yield found
    rows = seen.rows // task.accumulate if along_rows(plan.batch) else 1
    if rows > 1:
        found = _fewer_rows(held, "", task, plan, rows)
        if found.peak_bytes < WORTH * now:
            helping, fewer = [*helping, found], True
            yield found
    least = WORTH * now
    for words, given in IN_HOST_MEMORY.items():
        other = _in_host_memory(plan, given)
        if other is None:
            continue
        found = held(words, on_plan(task, other, step), other)
        if found.peak_bytes < least:
            helping, where, least = [*helping, found], other, found.peak_bytes
            yield found
    if len(every) + fewer + (where is not plan) > 1:
        found = _fewer_rows(held, "those that help, together", on_plan(slim, where, step), where, rows)
        if found.peak_bytes < min(each.peak_bytes for each in helping):
            yield found
    yield from _more_ranks(seen, step, task)


def _helpful(
    held: Callable[..., Remedy],
    plan: Plan,
    remade: Remade | None,
    changes: Mapping[str, Mapping[str, Any]],
    now: int,
) -> Iterator[tuple[Remedy, PolicyTask, Mapping[str, Any]]]:
    """The options of a step that lower its peak: the remedy, the task with them, and the options."""
    for words, options in changes.items() if remade is not None else ():
        try:
            again = _task(remade, plan, options)
        except (PlanError, RematError):  # what this model's units compute cannot run so
            continue
        found = held(words, again, plan)
        if found.peak_bytes < WORTH * now:
            yield found, again, options


def _task(remade: Remade | None, plan: Plan, options: Mapping[str, Any]) -> PolicyTask:
    assert remade is not None
    made, batch = remade(**options)
    return task_of(made, made.trace(batch), plan)


def closing(seen: Foresight, found: Sequence[Remedy]) -> Iterator[str]:
    """Return what is said below remedies: what they assume of host memory, and whether none of them is enough."""
    if any("host memory" in remedy.change for remedy in found):
        yield f"Host memory: {seen.hardware.host_words(seen.plan)}."
    if not any(remedy.enough for remedy in found):
        yield (
            "None of these is enough: give devices with more memory, shorter rows, axes that cut leaves, or a smaller "
            "model."
        )


def _remedy(seen: Foresight, step: TrainStep, change: str, task: PolicyTask, plan: Plan, parts: int = 1) -> Remedy:
    """Return what a task would hold and take on a plan, under the policy that holds least.

    Args:
        seen: what does not fit.
        change: what would change.
        task: with the change.
        plan: with the change.
        parts: into how many more microbatches its batches are cut. Two hold as much as more do.
    """
    for _ in range(parts.bit_length() - 1):
        task = _of_half_the_rows(task)
    two = replace(task, accumulate=task.accumulate * 2 // parts) if parts > 1 else task
    state = state_bytes(step, plan)
    peaks = {policy: state + _peak(seen, policy, two, plan) for policy in candidates(two, "deferred")}
    policy = min(peaks, key=peaks.__getitem__)
    peak, seconds = peaks[policy], None
    if seen.hardware.costs is None:
        seconds = timed(task, policy, seen.hardware.of(task, plan)).seconds
    return Remedy(change, peak, peak <= (seen.hardware.memory or 0), seconds)


def _peak(seen: Foresight, policy: Policy, task: PolicyTask, plan: Plan) -> int:
    """Return what a policy holds beside the state, which takes less to know than its time."""
    schedule = build(task.program, task.under(policy).groups, policy, task.accumulate, task.train)
    memory = footprint(schedule, task.needs, task.graphs)
    return memory.peak_bytes + seen.hardware.joined(plan, policy.secondary, task)


def _fewer_rows(held: Callable[..., Remedy], change: str, task: PolicyTask, plan: Plan, rows: int) -> Remedy:
    """The largest microbatches that fit, by halves; if none does, the largest that hold hardly more than any.

    Args:
        held: what a task would hold on a plan.
        change: what else has changed.
        task: with that.
        plan: with that.
        rows: of a microbatch now.
    """
    found = [held(change, task, plan)] if change else []
    parts = 1
    while rows // parts > 1 and parts < MOST_PARTS and not (found and found[-1].enough):
        parts *= 2
        words = f"{rows // parts} of {rows} rows in a microbatch, accumulate={task.accumulate * parts} (about)"
        found.append(held(f"{change}: {words}" if change else words, task, plan, parts))
    least = min(each.peak_bytes for each in found)
    return next(each for each in found if each.enough or WORTH * each.peak_bytes <= least)


def _of_half_the_rows(task: PolicyTask) -> PolicyTask:
    """Twice as many microbatches, of half the rows each."""
    halves = ("peak", "after", "flops", "moved", "bare", "hosted")
    less = [replace(need, **{name: getattr(need, name) // 2 for name in halves}) for need in task.needs]
    return replace(task, needs=less, accumulate=2 * task.accumulate)


def _in_host_memory(plan: Plan, given: Mapping[str, Any]) -> Plan | None:
    """The plan with more of its leaves in host memory; None if none can be.

    Args:
        given: what rules say of leaves that are on the device. Frozen ones have no update, and no state.
    """
    if plan.source is None:  # of one replica of fs.outer
        return None
    full = [rule if isinstance(rule, Rule) else Rule(*rule) for rule in plan.source.rules]
    frozen = {name: kind for name, kind in given.items() if name == "memory_kind"}
    rules = [_moved(rule, frozen if rule.trainable is False else given) for rule in full]
    try:
        other = plan.replace(rules=rules)
    except PlanError:  # the optimizer's state is sharded over further axes
        return None
    same = [group.kinds for group in other.groups] == [group.kinds for group in plan.groups]
    return None if same or len(other.groups) != len(plan.groups) else other


def _moved(rule: Rule, given: Mapping[str, Any]) -> Rule:
    """A rule with other kinds of memory, if what moves is on the device."""
    here = rule.memory_kind in (None, "device")
    if "memory_kind" not in given:
        here = here and rule.opt_memory_kind in (None, "device")
    return replace(rule, **{"opt_memory_kind": None, **given}) if here and given else rule


def _more_ranks(seen: Foresight, step: TrainStep, task: PolicyTask) -> Iterator[Remedy]:
    """The fewest ranks that do, in doublings of the first data axis that shards parameters."""
    if seen.plan.source is None:  # of one replica of fs.outer
        return
    sharding = {axis for group in seen.plan.groups for axis in group.gather_axes}
    axis = next((axis for axis in scalable(seen.plan) if axis in sharding), None)
    if axis is None:
        return
    times = 2
    while times <= MOST_RANKS:
        mesh = resized(seen.plan, axis, seen.plan.mesh.shape[axis] * times)
        try:
            plan = plan_of(seen.plan.source, mesh, seen.plan.batch, seen.plan.precision)
        except PlanError:  # more ranks do not divide a dim, or have no use for a format
            return
        words = f"{mesh.size:,} ranks, {axis}={mesh.shape[axis]:,}, with as many rows each"
        remedy = _remedy(seen, step, words, on_plan(task, plan, step), plan)
        if remedy.enough:
            yield remedy
            return
        times *= 2


def largest(seen: Foresight, count: int = 6) -> list[str]:
    """Return what a rank holds most of at the peak of the policy that holds least, in words."""
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
