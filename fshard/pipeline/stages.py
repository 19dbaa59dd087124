"""The stages of a pipeline, as a user gives them: along which axis they lie, and where the model is cut."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fshard.arguments import Want, expect
from fshard.errors import PlanError, lines
from fshard.pipeline.cut import cut_units
from fshard.sharding.mesh import Mesh
from fshard.sharding.owners import ROOT
from fshard.sharding.stage_table import StageFacts, StageTable

PLACEMENTS = ("loop", "v")
"""The ways to lay several stages on a rank: stage s on rank s modulo ranks, or forth and back."""


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline: ``fs.make_plan(..., stages=fs.Stages("stage"))``.

    Each rank holds, initialises, updates and checkpoints the leaves of its stages alone. A leaf outside of units is on
    the stage of the unit before it in the tree, or on the first one; a tied leaf is on the stages of all of its paths.

    Args:
        axis: the mesh axis along which stages lie. It is no data axis.
        cut: where the model is cut: ``"balanced"`` by the bytes of the parameters of its units, the numbers of units of
            the stages in order, or globs of the unit that begins each stage.
        chunks: the stages of each rank.
        placement: how they lie: ``"loop"`` has stage s on rank s modulo ranks, ``"v"`` goes forth and back, so that the
            first and the last stage are on one rank.
        leaves: ``(pattern, stages)`` pairs for leaves outside of units that are to be elsewhere, or on several stages;
            ``re.fullmatch`` on paths, the first match wins; -1 is the last stage.

    Raises:
        PlanError: a value of another type.

    >>> params = fs.tree.nest({f"layers.{n}.w": torch.zeros(4, 4) for n in range(4)})
    >>> mesh = fs.abstract_mesh((2, 2), ("stage", "data"))
    >>> plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"), units=["layers.*"],
    ...                     stages=fs.Stages("stage"))
    >>> list(plan.own.leaves), plan.stages.homes
    (['layers.0.w', 'layers.1.w'], (0, 1))
    """

    axis: str
    cut: str | Sequence[int] | Sequence[str] = "balanced"
    chunks: int = 1
    placement: str = "loop"
    leaves: Sequence[tuple[str, int | Sequence[int]]] = ()

    def __post_init__(self) -> None:
        wants: list[Want] = [
            ("axis", self.axis, str, 'the name of a mesh axis, such as "stage"'),
            ("cut", self.cut, (str, list, tuple), '"balanced", numbers of units, or globs'),
            ("chunks", self.chunks, int, "the number of stages of each rank"),
            ("leaves", self.leaves, (list, tuple), "a list of (pattern, stages) pairs"),
        ]
        expect("fs.Stages(axis)", wants)
        if self.placement not in PLACEMENTS:
            raise PlanError(f"fs.Stages(placement={self.placement!r}): give one of {', '.join(map(repr, PLACEMENTS))}")
        if self.chunks < 1:
            raise PlanError(f"fs.Stages(chunks={self.chunks}): each rank has at least one stage")
        object.__setattr__(self, "cut", self.cut if isinstance(self.cut, str) else tuple(self.cut))
        if bad := [repr(pair) for pair in self.leaves if not _is_pair(pair)]:
            remedy = 'Give a regular expression and a stage, or several: [("norm.*", -1), ("table", (0, -1))].'
            raise PlanError(lines("fs.Stages(leaves=): no pairs of a pattern and stages:", bad, remedy))
        object.__setattr__(self, "leaves", tuple([tuple(pair) for pair in self.leaves]))

    def table(self, facts: StageFacts, mesh: Mesh) -> StageTable:
        """Cut a model.

        Args:
            facts: of its leaves.
            mesh: the mesh of all stages.

        Raises:
            PlanError: there is no such axis, it is a data axis, or the model cannot be cut so.
        """
        ranks = mesh.axis_size(self.axis)
        if self.axis in facts.batch:
            raise PlanError(
                f"fs.Stages({self.axis!r}): batch= names this axis, so its ranks work on different rows, and the ranks "
                f"of a pipeline work on the same ones: give stages an axis of their own"
            )
        units = [unit for unit in dict.fromkeys(facts.owners.values()) if unit != ROOT]
        sizes = dict.fromkeys(units, 0)
        for path, unit in facts.owners.items():
            if unit != ROOT:
                sizes[unit] += facts.nbytes[path]
        count = ranks * self.chunks
        stages = dict(zip(units, cut_units(units, [*sizes.values()], count, self.cut), strict=True))
        return StageTable(self.axis, self._homes(ranks), stages, self._leaves(facts, stages, count))

    def train_step(self, loss_fn: Any, opt: Any, plan: Any, options: Any) -> Any:
        """Make the train step of a plan with these stages."""
        from fshard.pipeline.pipeline_step import PipelineStep  # it needs what steps are made of, and a plan does not

        return PipelineStep(loss_fn, opt, plan, options)

    def eval_step(self, fn: Any, plan: Any, running: Any, precision: Any) -> Any:
        """Make the evaluation step of a plan with these stages."""
        from fshard.pipeline.pipeline_step import PipelineEvalStep  # likewise

        return PipelineEvalStep(fn, plan, running, precision)

    def _homes(self, ranks: int) -> tuple[int, ...]:
        """The position of each stage."""
        rounds = [range(ranks)[:: -1 if turn % 2 and self.placement == "v" else 1] for turn in range(self.chunks)]
        return tuple([position for row in rounds for position in row])

    def _leaves(self, facts: StageFacts, units: Mapping[str, int], count: int) -> dict[str, tuple[int, ...]]:
        """The stages of each leaf."""
        found, used, now = dict[str, set[int]](), set[int](), 0
        for path, unit in facts.owners.items():
            now = units.get(unit, now)
            named = [number for number, (pattern, _) in enumerate(self.leaves) if re.fullmatch(pattern, path)]
            used.update(named if unit == ROOT else ())
            found[path] = _numbers(self.leaves[named[0]][1], count) if named and unit == ROOT else {now}
        for alias, path in facts.aliases.items():
            above = [alias.rsplit(".", depth)[0] for depth in range(1, alias.count(".") + 1)]
            found[path].add(next((units[prefix] for prefix in above if prefix in units), count - 1))
        idle = [repr(pattern) for number, (pattern, _) in enumerate(self.leaves) if number not in used]
        if idle:
            remedy = "Patterns match whole paths; leaves of units are where their units are, so cut= moves them."
            raise PlanError(lines("fs.Stages(leaves=): patterns match no leaf outside of units:", idle, remedy))
        return {path: tuple(sorted(stages)) for path, stages in found.items()}


def _is_pair(pair: Any) -> bool:
    """Tell whether this is a regular expression with something that may be stages."""
    try:
        pattern, stages = pair
        re.compile(pattern)
    except (TypeError, ValueError, re.error):
        return False
    return isinstance(stages, int | list | tuple)


def _numbers(stages: Any, count: int) -> set[int]:
    """The numbers of stages, of which -1 is the last."""
    given = [stages] if isinstance(stages, int) else [*stages]
    if not given or any(type(stage) is not int or not -count <= stage < count for stage in given):
        raise PlanError(f"fs.Stages(leaves=): {stages!r} are no stages of {count}: give numbers from 0 to {count - 1}")
    return {stage % count for stage in given}
