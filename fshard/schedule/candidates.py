"""Candidates for a step: policies, secondary shards among them, and the units computed again.

One list for all who choose: ``schedule="auto"``, ``fshard plan`` and ``fs.sim.search``. None of it changes a bit of a
result: policies and secondary shards move results in time, and a unit that is computed again keeps its gradients.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from fshard.schedule.footprint import Need
from fshard.schedule.ops import ROOT, GroupInfo, Program
from fshard.schedule.policy import Keep, Policy, Secondary, secondary
from fshard.schedule.step_program import Pass, StepProgram, as_step_program
from fshard.sharding.mesh import Axes

SHARES = 4
"""Units computed again are tried in so many steps, from a quarter of them to all."""


@dataclass(frozen=True)
class PolicyTask:
    """A step for which a policy is chosen.

    Attributes:
        program: what is run.
        groups: its groups, as they are without secondary shards.
        needs: those of a microbatch's compute ops, in order; empty if not known. With several passes they are those of
            ``StepProgram.computes``.
        accumulate: microbatches.
        full: whether whole gradients may be added up over microbatches.
        train: whether a program has a backward.
        second: by axes over which groups may stay sharded between their uses, the groups as they then are.
        again: the units that are computed again in their backward. ``needs`` are those with it.
        hosted: whether these units keep their activations on the host, in place of computing them again.
        axes: mesh axes of the collectives that the program itself calls.
        graphs: whether unit graphs write gradients where they are flat.
        flops: operations of the model for one microbatch, without what is computed again; 0 if not known.
        updates: what the update of each group on the device reads, writes and computes, by the group's name.
    """

    program: Program | StepProgram
    groups: Sequence[GroupInfo]
    needs: Sequence[Need]
    accumulate: int = 1
    full: bool = True
    train: bool = True
    second: Mapping[Axes, Sequence[GroupInfo]] = field(default_factory=dict)
    again: tuple[str, ...] = ()
    hosted: bool = False
    axes: Sequence[Axes] = ()
    graphs: bool = False
    flops: int = 0
    updates: Mapping[str, Need] = field(default_factory=dict)

    @property
    def stages(self) -> StepProgram:
        """Return what the step does."""
        return as_step_program(self.program, self.groups, self.accumulate, self.train)

    def under(self, policy: Policy) -> "PolicyTask":
        """The task on the groups that a policy has."""
        return replace(self, groups=self.second[policy.secondary]) if policy.secondary else self


def candidates(task: PolicyTask, update: str) -> Iterator[Policy]:
    """The policies that are tried: the simplest first, so that ties go to them."""
    passes = task.stages.passes
    several = task.full and any(each.accumulate > 1 for each in passes)
    reduces = (1, 2) if task.train else (2,)  # nothing is reduced without a backward
    kept = product(_kept(passes), (0, 1, 2, 3), reduces)
    second = product(task.second if task.train else (), (1, 2, 3))
    ways = [(prefetch, reduce, reshard) for reshard, prefetch, reduce in kept]
    ways += [(prefetch, 2, secondary(*axes)) for axes, prefetch in second]
    for accumulation in ("sharded", "full") if several else ("sharded",):
        yield from (Policy(*way, update, accumulation) for way in ways)


def _kept(passes: Sequence[Pass]) -> list[bool | Keep | Secondary]:
    """Return what may be kept between forward and backward: nothing, the last units, everything."""
    units = max([len({call.unit for call in each.program.forward}) for each in passes], default=0)
    parts = sorted({units * share // 4 for share in (1, 2, 3)} - {0, units})
    return [True, *(Keep(last=part) for part in parts), False]


def units_again(program: Program | StepProgram) -> list[tuple[str, ...]]:
    """The units that may be computed again, fewest first: those called first, whose activations are held longest.

    >>> from fshard.schedule import Call
    >>> units_again(Program((Call("a"), Call("b")), (Call("b"), Call("a")), {"a": (), "b": ()}))
    [('a',), ('a', 'b')]
    """
    if isinstance(program, StepProgram):
        return []
    units = [unit for unit in dict.fromkeys(call.unit for call in program.forward) if unit != ROOT]
    counts = sorted({-(-len(units) * share // SHARES) for share in range(1, SHARES + 1)} - {0})
    return [tuple(units[:count]) for count in counts]
