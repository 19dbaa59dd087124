"""Parts that the solvers share: vectors that are trees of shards, and iterations that all ranks make alike.

A number that decides anything is an inner product of whole tensors, which is equal on all ranks, bit for bit. It is a
part of the name of the iteration that follows, so ranks whose numbers differ are told.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import Want, expect
from fshard.errors import PlanError, SolverError
from fshard.runtime.steps.batch_rows import BatchRows
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages
from fshard.state.elementwise import unguarded
from fshard.state.equal import Equal
from fshard.transform.meeting import meeting
from fshard.transform.tree_vectors import vdots

T = TypeVar("T")
Vector = dict[str, Tensor]


@dataclass(frozen=True)
class Solving:
    """One call of a solver.

    Attributes:
        name: of the solver.
        product: the linear map.
    """

    name: str
    plan: Plan
    product: Callable[[Any], Any]

    def begin(self, body: Callable[[], T], settings: Mapping[str, Any]) -> T:
        """Return what ``body`` makes of the arguments, if all ranks could, and have the same settings."""
        ranks = meeting(self.plan.mesh, None, BatchRows())
        found: T = ranks.all_ranks(self.name, body, ranks.facts(Equal(self.plan, {"solver": self.name, **settings})))
        return found

    def all_ranks(self, place: str, body: Callable[[], T]) -> T:
        """The result of a part of the work; what it raises on one rank is raised on all."""
        found: T = meeting(self.plan.mesh, None, BatchRows()).all_ranks(f"{self.name}, {place}", body)
        return found

    def vector(self, given: Any, what: str) -> Vector:
        """A tree of shards by path, in memory of its own, zero where nothing is trained.

        Raises:
            TreeError: it is not this rank's part of the plan's tree.
        """
        flat = self.plan.check_tree(given, whole=self.plan.mesh.everywhere, what=what)
        trained = {path for path, leaf in self.plan.leaves.items() if leaf.trainable and leaf.dtype.is_floating_point}
        return {path: x.detach().clone() if path in trained else torch.zeros_like(x) for path, x in flat.items()}

    def times(self, v: Vector) -> Vector:
        """The product with a vector."""
        return self.vector(self.product(tree.nest(v)), "the product")

    def dots(self, *pairs: tuple[Vector, Vector]) -> list[float]:
        """Inner products of whole tensors, equal on all ranks, by one exchange."""
        found: list[float] = vdots([(tree.nest(a), tree.nest(b)) for a, b in pairs], self.plan).tolist()
        return found

    def finite(self, number: float, what: str, place: str) -> float:
        """The number, if it is finite.

        Raises:
            SolverError: it is not.
        """
        if not math.isfinite(number):
            raise SolverError(
                f"{self.name}, {place}: {what} is {number}. The product or the start holds values that are not finite, "
                f"or the vectors grow beyond their dtype: scale them, or solve in float64"
            )
        return number

    @property
    def rounding(self) -> float:
        """The relative error above which two numbers that must be equal are not: the root of the widest epsilon."""
        floats = [leaf.dtype for leaf in self.plan.leaves.values() if leaf.trainable and leaf.dtype.is_floating_point]
        return math.sqrt(max(torch.finfo(dtype).eps for dtype in floats)) if floats else 0.0


def combined(x: Vector, by: float, y: Vector) -> Vector:
    """``x + by * y``."""
    with unguarded():
        return {
            path: torch.add(x[path], y[path].to(x[path].dtype), alpha=by) if _real(x[path]) else x[path] for path in x
        }


def scaled(x: Vector, by: float) -> Vector:
    """``by * x``."""
    with unguarded():
        return {path: leaf * by if _real(leaf) else leaf for path, leaf in x.items()}


def _real(leaf: Tensor) -> bool:
    return leaf.is_floating_point()


def check_solver(call: str, plan: Any, wants: list[Want], limits: Mapping[str, tuple[Any, float]]) -> None:
    """Refuse arguments of the wrong type, and numbers below their limit.

    Raises:
        PlanError: naming each.
    """
    expect(call, [*wants, ("plan", plan, Plan, "what fs.make_plan returned")])
    refuse_stages(call, plan)
    low = [f"{name}={given!r}" for name, (given, least) in limits.items() if not least <= given < math.inf]
    if low:
        least = ", ".join(f"{name} >= {least:g}" for name, (_, least) in limits.items())
        raise PlanError(f"{call}: {', '.join(low)}: give finite numbers, {least}")
