"""The policy of a schedule: how far it runs ahead, and what it keeps."""

import json
from dataclasses import dataclass

from fshard.patterns import glob_matches, glob_meant
from fshard.schedule import schedule_refusals
from fshard.schedule.ops import ROOT
from fshard.schedule.step_program import StepProgram

UPDATES = ("deferred", "beside", "in_backward")
ACCUMULATIONS = ("sharded", "full")
GRAPHS = ("none", "step", "segments")
SPACE = "\\u0020"
"""A space within a token of a schedule's text."""


@dataclass(frozen=True)
class Keep:
    """The units that a schedule does not reshard after their forward. Made by ``fs.keep``."""

    units: tuple[str, ...] = ()
    last: int = 0

    def __str__(self) -> str:
        patterns = [json.dumps(pattern).replace(" ", SPACE) for pattern in self.units]
        return f"keep({','.join([*patterns, *([f'last={self.last}'] if self.last else [])])})"


def keep(*units: str, last: int = 0) -> Keep:
    """Say which units stay gathered between their forward and their backward: ``Policy(reshard=fs.keep(last=2))``.

    What the last units read is needed again soonest, so to keep it costs memory for the shortest time and saves as
    many gathers as keeping anything else.

    Args:
        units: globs of names of units, as in ``fs.split(module, units=...)``: ``"blocks.*"``, ``"decoder.[0-3]"``.
        last: as many of the units whose last call comes latest.

    Raises:
        PlanError: neither is given, or a value is of another type.

    >>> print(fs.keep("embed", last=2))
    keep("embed",last=2)
    """
    problems = [f"{unit!r} is not a pattern of unit names" for unit in units if not isinstance(unit, str) or not unit]
    if type(last) is not int or last < 0:
        problems.append(f"last={last!r} is not an int of at least 0")
    elif not units and not last:
        problems.append("it keeps nothing: name units, or give last=")
    if problems:
        raise schedule_refusals.bad_policy(problems)
    return Keep(tuple(units), last)


@dataclass(frozen=True)
class Secondary:
    """The axes over which a schedule keeps gathered groups sharded. Made by ``fs.secondary``."""

    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"secondary({','.join([json.dumps(axis).replace(' ', SPACE) for axis in self.axes])})"


def secondary(*axes: str) -> Secondary:
    """Over which axes groups stay sharded between their uses in a step: ``Policy(reshard=fs.secondary("local"))``.

    A group is gathered over all of its axes once a step. From then on each rank keeps a part of it, its secondary
    shard, which the ranks of these axes have all of together; further gathers, such as those of the backward, are over
    these axes alone, and never cross a slower link (ZeRO++'s hpZ, Wang et al., 2023; FSDP2's integer
    ``reshard_after_forward``). Groups that other axes alone shard, or none, are resharded as with ``True``.

    Args:
        axes: names of mesh axes, such as the one within a host.

    Raises:
        PlanError: no axis, or a value that is no name.

    >>> print(fs.secondary("local"))
    secondary("local")
    """
    problems = [f"{axis!r} is not the name of an axis" for axis in axes if not isinstance(axis, str) or not axis]
    if not axes:
        problems.append("fs.secondary() names no axis")
    if problems:
        raise schedule_refusals.bad_policy(problems)
    return Secondary(tuple(dict.fromkeys(axes)))


@dataclass(frozen=True)
class Policy:
    """Rules for a schedule: how far it runs ahead, and what it keeps.

    Args:
        prefetch: compute calls ahead of the running one whose groups may already be gathered. 0 gathers each
            group just before it is read, with nothing to hide behind. Each keeps one more unit's parameters
            alive. 2 also rides out calls that are shorter than a gather. (Of groups whose optimizer state is
            sharded further, the first gather of a step is one call ahead at most: it waits for other ranks' parts.)
        reduces: gradient reductions in flight at most. Each keeps a full flat gradient alive. With 0, each is waited
            for as soon as it has begun, so that nothing runs beside compute: for measurements. With 1,
            a unit's reduction hides behind the next unit's backward alone; with 2, the link does not fall idle
            between the two, and since activations have been freed by then, a step's peak seldom grows. (One that a
            sum over replicas follows is over when the next begins: that sum takes the slower link.)
        reshard: free a group after its forward and gather it again for its backward (ZeRO-3, FSDP's reshard
            after forward). False keeps each group from its first use in the step to its last, and
            ``fs.keep(...)`` does so for what some units read. ``fs.secondary(axis)`` frees it, but keeps it sharded
            over a fast axis, for gathers over that alone. What the first backward calls read stays after
            its forward in any case, as far as ``prefetch`` reaches: it is all there at the first backward
            anyway, so to free and gather it would save no memory.
        update: ``"deferred"`` leaves the optimizer update to the next step, which applies it group by group
            before its gathers: the step is atomic and global clipping exact. ``"beside"`` does the same on a
            stream of its own on a GPU, beside compute, each update ``prefetch`` computes before its gather: the same
            bits, not timed on a GPU yet. ``"in_backward"`` applies it as
            soon as a group's last gradient is reduced: nothing waits, and no step can be undone.
        accumulation: with several microbatches, ``"sharded"`` reduces each one's gradients and adds up this
            rank's shards of them. ``"full"`` adds up whole gradients and reduces once, in the last microbatch
            (FSDP's ``no_sync``): less to send, and the memory of all gradients.
        pipeline: with stages, the order in which each rank runs forwards and backwards of its stages: ``"gpipe"``,
            ``"1f1b"``, ``"interleaved"``, ``"zb_h1"``, ``"zbv"``, ``"dualpipev"``, or the text of an order, also of a
            CSV file of PyTorch's pipelines. Empty for ``"1f1b"``, or ``"interleaved"`` where ranks have several stages,
            or ``"zbv"`` where these go forth and back.
        graph: ``"step"`` captures a train step as one CUDA graph, the waiting update included, and replays it. Steps
            that cannot be captured run eagerly: ``metrics.ran.graph`` says why. ``"segments"`` captures the compute
            between transfers, and the host issues these: for collectives that no graph can hold.

    Raises:
        PlanError: a value is of another type or out of range; all of them are listed.

    >>> fs.Policy()
    Policy(prefetch=2, reduces=2, reshard=True, update='deferred', accumulation='sharded', pipeline='', graph='none')
    """

    prefetch: int = 2
    reduces: int = 2
    reshard: bool | Keep | Secondary = True
    update: str = "deferred"
    accumulation: str = "sharded"
    pipeline: str = ""
    graph: str = "none"

    def __post_init__(self) -> None:
        problems = [] if isinstance(self.pipeline, str) else [f"pipeline={self.pipeline!r} is no name or text"]
        for name, least in (("prefetch", 0), ("reduces", 0)):
            value = getattr(self, name)
            if type(value) is not int:
                problems.append(f"{name}={value!r} is of type {type(value).__name__}, not int")
            elif value < least:
                problems.append(f"{name}={value} is less than {least}")
        if type(self.reshard) not in (bool, Keep, Secondary):
            kind = type(self.reshard).__name__
            problems.append(
                f"reshard={self.reshard!r} is of type {kind}, not bool, and not made by fs.keep(...) or "
                f"fs.secondary(...)"
            )
        for name, allowed in (("update", UPDATES), ("accumulation", ACCUMULATIONS), ("graph", GRAPHS)):
            value = getattr(self, name)
            if value not in allowed:
                problems.append(f"{name}={value!r} is none of {', '.join(map(repr, allowed))}")
        if problems:
            raise schedule_refusals.bad_policy(problems)

    @property
    def secondary(self) -> tuple[str, ...]:
        """The axes over which groups stay sharded between their uses; none if they are freed or kept."""
        return self.reshard.axes if isinstance(self.reshard, Secondary) else ()

    def kept(self, stages: StepProgram) -> frozenset[int]:
        """The ids of the groups that stay from their first use in a step to their last.

        The groups of ``root`` do under every policy, since any code may read them.

        Raises:
            PlanError: a pattern of ``fs.keep`` matches no unit of the step.
        """
        programs = [each.program for each in stages.passes]
        orders = [list(dict.fromkeys(call.unit for call in reversed(each.forward)))[::-1] for each in programs]
        if isinstance(self.reshard, Keep):
            called = list(dict.fromkeys(unit for order in orders for unit in order))
            absent = [p for p in self.reshard.units if not any(glob_matches(p, unit) for unit in called)]
            if absent:
                raise schedule_refusals.no_unit_to_keep({p: glob_meant(p, called) for p in absent}, called)
        kept = zip(programs, map(self._kept_units, orders), strict=True)
        return frozenset(group for program, units in kept for unit in (ROOT, *units) for group in program.reads[unit])

    def _kept_units(self, order: list[str]) -> set[str]:
        """The units of a pass, in the order of their last calls, whose groups stay."""
        if not isinstance(self.reshard, Keep):
            return set() if self.reshard else set(order)
        units = {unit for unit in order if any(glob_matches(p, unit) for p in self.reshard.units)}
        return units.union(order[max(len(order) - self.reshard.last, 0) :])

    def horizons(self, stages: StepProgram) -> list[int]:
        """For each compute op of a step, and for the end, the last one for which a group may keep its memory.

        That is ``prefetch`` computes ahead. Around a turn (from the last forward call to the first backward call, and
        from a microbatch to the next) it is that of the first call after it. What that one holds is there at that call
        anyway, and so is less than that before it: to keep it costs no memory and saves gathers.
        """
        horizons = [k + self.prefetch for k in range(len(stages.steps) + 1)]
        for last, first in stages.turns:
            for k in range(max(last - self.prefetch + 1, 0), min(first + 1, len(horizons))):
                horizons[k] = max(horizons[k], first + self.prefetch)
        return horizons

    def reduces_in(self, microbatch: int, accumulate: int) -> bool:
        """Tell whether gradients are reduced in a microbatch of a step."""
        return self.accumulation == "sharded" or microbatch == accumulate - 1

    def __str__(self) -> str:
        reshard = str(self.reshard).lower() if isinstance(self.reshard, bool) else self.reshard
        accumulation = "" if self.accumulation == "sharded" else f" accumulation={self.accumulation}"
        pipeline = json.dumps(self.pipeline).replace(" ", SPACE) if self.pipeline else ""
        more = accumulation + (f" pipeline={pipeline}" if pipeline else "")
        more += "" if self.graph == "none" else f" graph={self.graph}"
        return f"prefetch={self.prefetch} reduces={self.reduces} reshard={reshard} update={self.update}{more}"
