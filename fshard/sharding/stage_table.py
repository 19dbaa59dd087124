"""The stages of a pipeline as a plan holds them: which ranks hold each, and which stages each unit and leaf is on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fshard.errors import PlanError, lines
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.spec import Shape


@dataclass(frozen=True)
class StageTable:
    """The stages of a plan.

    Attributes:
        axis: the mesh axis along which stages lie.
        homes: the position on that axis which holds each stage.
        units: the stage of each unit, by name.
        leaves: the stages that hold each leaf, by path, in ascending order.
    """

    axis: str
    homes: tuple[int, ...]
    units: Mapping[str, int]
    leaves: Mapping[str, tuple[int, ...]]

    def positions(self, path: str) -> tuple[int, ...]:
        """The positions on the axis that hold a leaf, in ascending order."""
        return tuple(sorted({self.homes[stage] for stage in self.leaves[path]}))

    @property
    def texts(self) -> dict[str, str]:
        """The table as texts by name, which ranks compare."""
        homes = {f"position of stage {stage}": str(home) for stage, home in enumerate(self.homes)}
        return {**homes, **{f"stages of {path}": str(stages) for path, stages in self.leaves.items()}}

    def at(self, position: int) -> tuple[int, ...]:
        """The stages at a position on the axis."""
        return tuple([stage for stage, home in enumerate(self.homes) if home == position])


def refuse_stages(call: str, plan: Any) -> None:
    """Refuse a plan of which each rank holds some stages, where a call needs all of a model.

    Args:
        call: the name of the call.
        plan: the plan; other values are left to other checks.

    Raises:
        PlanError: it has stages, or is that of some stages.
    """
    if getattr(plan, "stages", None) is not None or getattr(plan, "whole", None) is not None:
        raise PlanError(
            f"{call}: the plan has stages, so each rank holds a part of the model, and this call needs all of it. "
            f"fs.reshard_state(state, plan.replace(stages=None), opt) brings all of it to all ranks"
        )


def refuse_cut_leaves(table: StageTable, cut: Sequence[str]) -> None:
    """Refuse leaves that are cut along the axis of stages, whose ranks hold other leaves.

    Raises:
        PlanError: there are such leaves.
    """
    if cut:
        remedy = "Let rules shard these leaves over other axes."
        raise PlanError(lines(f"specs name {table.axis!r}, along which the stages of a pipeline lie:", cut, remedy))


@dataclass(frozen=True)
class StageFacts:
    """Facts of a model by which it is cut into stages.

    Attributes:
        shapes: of all leaves, by path, in the order of the tree.
        nbytes: their sizes.
        owners: the unit of each leaf.
        aliases: the first path of a tied leaf, by each of its other paths.
        batch: the data axes.
    """

    shapes: Mapping[str, Shape]
    nbytes: Mapping[str, int]
    owners: Mapping[str, str]
    aliases: Mapping[str, str]
    batch: Axes


@runtime_checkable
class StageCut(Protocol):
    """The cut of a model into stages, ``fs.Stages``."""

    def table(self, facts: StageFacts, mesh: Mesh) -> StageTable:
        """Cut a model.

        Raises:
            PlanError: that cannot be done.
        """

    def train_step(self, loss_fn: Any, opt: Any, plan: Any, options: Any) -> Any:
        """Make the train step of a plan with these stages."""

    def eval_step(self, fn: Any, plan: Any, running: Any, precision: Any) -> Any:
        """Make the evaluation step of a plan with these stages."""
