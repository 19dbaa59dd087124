"""``fs.func.cg``: solutions of symmetric positive definite systems of trees of shards."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fshard import tree
from fshard.errors import PlanError, SolverError
from fshard.runtime.comm import collective_call
from fshard.sharding.plan import Plan
from fshard.transform.solving import Solving, Vector, check_solver, combined


class Solution(NamedTuple):
    """The result of ``fs.func.cg``, and all that it needs to go on.

    It holds nothing but tensors and numbers, so ``torch.save(solution._asdict(), file)`` on each rank keeps it, and
    ``fs.func.cg(..., resume=Solution(**torch.load(file)))`` goes on to the same bits.

    Attributes:
        x: the solution so far, a tree of shards.
        residual: ``b - (A + damping) x``, as the recurrence has it.
        direction: the next search direction.
        square: the inner product of the residual and the preconditioned residual.
        history: the norm of the residual at the start, and after each iteration.
        converged: whether the last of them is within the tolerance.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> diagonal = torch.tensor([1.0, 2.0])
    >>> half = fs.func.cg(lambda v: {"w": diagonal * v["w"]}, {"w": torch.ones(2)}, plan, maxiter=1)
    >>> saved = half._asdict()
    >>> resume = fs.func.Solution(**saved)
    >>> fs.func.cg(lambda v: {"w": diagonal * v["w"]}, {"w": torch.ones(2)}, plan, resume=resume).iterations
    2
    """

    x: Any
    residual: Any
    direction: Any
    square: float
    history: list[float]
    converged: bool

    @property
    def iterations(self) -> int:
        """The number of iterations."""
        return len(self.history) - 1


Report = Callable[[Solution], Any] | None


@dataclass(frozen=True)
class ConjugateGradients(Solving):
    """A call of ``fs.func.cg``."""

    preconditioner: Callable[[Any], Any] | None = None
    damping: float = 0.0
    callback: Report = None

    def begun(
        self, b: Any, x0: Any, resume: Solution | None, tolerance: tuple[float, float], settings: dict[str, Any]
    ) -> "Iterate":
        """The iterate that the first iteration begins from."""
        right, zeros, given = self.begin(lambda: self.start(b, x0), settings)
        if resume is not None:
            return self.all_ranks("the start", lambda: self.again(resume, right, tolerance))
        return self.all_ranks("the start", lambda: self.first(right, zeros, given, tolerance))

    def start(self, b: Any, x0: Any) -> tuple[Vector, Vector, Vector | None]:
        """The right side, and the start as given, checked before anything is sent."""
        given = self.vector(b, "b")
        zeros = {path: torch.zeros_like(leaf) for path, leaf in given.items()}
        return given, zeros, None if x0 is None else self.vector(x0, "x0")

    def first(self, b: Vector, zeros: Vector, x0: Vector | None, tolerance: tuple[float, float]) -> "Iterate":
        """The iterate before the first iteration."""
        x, rest = (zeros, b) if x0 is None else (x0, combined(b, -1.0, self.damped(x0)))
        way = self.preconditioned(rest)
        size, square, residual = self.dots((b, b), (rest, way), (rest, rest))
        goal = max(tolerance[0] * math.sqrt(self.finite(size, "the square of b", "the start")), tolerance[1])
        return self.told(Iterate(x, rest, way, self.kept(square, residual, "the start"), [math.sqrt(residual)], goal))

    def again(self, solution: Solution, b: Vector, tolerance: tuple[float, float]) -> "Iterate":
        """The iterate of an earlier call."""
        (size,) = self.dots((b, b))
        goal = max(tolerance[0] * math.sqrt(size), tolerance[1])
        x, rest = self.vector(solution.x, "resume.x"), self.vector(solution.residual, "resume.residual")
        way = self.vector(solution.direction, "resume.direction")
        return Iterate(x, rest, way, solution.square, [*solution.history], goal)

    def damped(self, v: Vector) -> Vector:
        """The product with the matrix that is solved."""
        return combined(self.times(v), self.damping, v)

    def preconditioned(self, rest: Vector) -> Vector:
        """The residual, preconditioned."""
        if self.preconditioner is None:
            return rest
        return self.vector(self.preconditioner(tree.nest(rest)), "the preconditioned residual")

    def step(self, at: "Iterate") -> "Iterate":
        """One iteration."""
        place = f"iteration {at.number + 1}"
        curved = self.damped(at.way)
        pairs = [(at.way, curved), (at.way, at.way)]
        if at.before is not None:  # a symmetric matrix has equal products on both sides
            pairs += [(at.way, at.before[1]), (at.before[0], curved), (at.before[1], at.before[1])]
        curvature, length, *sides = self.dots(*pairs)
        self.finite(curvature, "the curvature", place)
        if sides:
            self.symmetric(sides, length, place)
        if curvature <= 0:
            raise self.no_curvature(curvature, length, place)
        size = at.square / curvature
        x, rest = combined(at.x, size, at.way), combined(at.rest, -size, curved)
        ahead = self.preconditioned(rest)
        square, residual = self.dots((rest, ahead), (rest, rest))
        self.kept(square, residual, place)
        way = combined(ahead, square / at.square, at.way)
        before = (at.way, curved) if at.number == 0 else None
        history = [*at.history, math.sqrt(residual)]
        return self.told(replace(at, x=x, rest=rest, way=way, square=square, history=history, before=before))

    def told(self, at: "Iterate") -> "Iterate":
        """The iterate, after the callback has seen it."""
        if self.callback is not None:
            self.callback(at.solution())
        return at

    def kept(self, square: float, residual: float, place: str) -> float:
        """The inner product of the residual and the preconditioned one, if it can be gone on from.

        Raises:
            SolverError: it cannot.
        """
        self.finite(residual, "the square of the residual", place)
        self.finite(square, "the residual times the preconditioned residual", place)
        if square <= 0 < residual and self.preconditioner is not None:
            raise SolverError(
                f"cg, {place}: the preconditioner is not positive definite: the residual of norm "
                f"{math.sqrt(residual):.6g} times the preconditioned residual is {square:.6g}. Give one that is "
                f"symmetric and positive, such as the inverse of a positive diagonal"
            )
        return square

    def symmetric(self, sides: list[float], length: float, place: str) -> None:
        """Refuse a matrix that is not symmetric.

        Raises:
            SolverError: the products of the first two directions differ by their order.
        """
        left, right, square = sides
        if abs(left - right) > 10 * self.rounding * math.sqrt(length * square):
            raise SolverError(
                f"cg, {place}: the matrix is not symmetric: v @ A @ w is {left:.6g} and w @ A @ v {right:.6g} for the "
                f"first two directions. Conjugate gradients need a symmetric matrix: a Hessian (fs.func.hvp) or a "
                f"Gauss-Newton matrix (fs.func.gnvp) of one batch, without random numbers"
            )

    def no_curvature(self, curvature: float, length: float, place: str) -> SolverError:
        """The error of a matrix that is not positive definite."""
        return SolverError(
            f"cg, {place}: the matrix is not positive definite: along a direction of norm {math.sqrt(length):.6g} its "
            f"curvature, with damping={self.damping:g}, is {curvature / length if length else 0.0:.6g}. Give "
            f"damping= above the size of its most negative eigenvalue, which fs.func.lanczos estimates, or use "
            f"fs.func.gnvp, which has none. What was found before is what callback= has seen"
        )


@dataclass(frozen=True)
class Iterate:
    """The state of conjugate gradients between two iterations."""

    x: Vector
    rest: Vector
    way: Vector
    square: float
    history: list[float]
    goal: float
    before: tuple[Vector, Vector] | None = None

    @property
    def number(self) -> int:
        """The number of iterations made."""
        return len(self.history) - 1

    @property
    def done(self) -> bool:
        """True when the residual is within the tolerance."""
        return self.history[-1] <= self.goal

    def solution(self) -> Solution:
        """The state as users see it."""
        x, rest, way = tree.nest(self.x), tree.nest(self.rest), tree.nest(self.way)
        return Solution(x, rest, way, self.square, [*self.history], self.done)


@collective_call
def cg(
    matvec: Callable[[Any], Any],
    b: Any,
    plan: Plan,
    *,
    x0: Any = None,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int = 100,
    damping: float = 0.0,
    preconditioner: Callable[[Any], Any] | None = None,
    callback: Report = None,
    resume: Solution | None = None,
) -> Solution:
    """The solution of ``(A + damping * I) x = b`` by conjugate gradients (Hestenes and Stiefel, 1952). Collective.

    Every rank makes the same decisions, from inner products of whole tensors. An iteration takes one product, and two
    exchanges of a few numbers; vectors take the memory of up to nine trees of shards.

    Args:
        matvec: ``matvec(v)``, the product of a symmetric positive definite matrix with a tree of shards, such as
            ``fs.func.hvp(loss_fn, plan).linearize(params, batch)``.
        b: the right side, a tree of shards like ``params``. Its values for frozen leaves are ignored.
        plan: the plan.
        x0: where to start; None for zero.
        rtol, atol: the solver stops when the norm of the residual is at most ``max(rtol * norm(b), atol)``.
        maxiter: the solver stops after so many iterations, those before ``resume`` included.
        damping: added to the diagonal.
        preconditioner: ``preconditioner(r)``, the product with an approximate inverse, symmetric and positive definite.
        callback: called on each rank at the start and after each iteration with the ``Solution`` so far, to show or
            save it.
        resume: what an earlier call returned, or a callback saw, of the same matrix, right side and damping.

    Returns:
        A ``Solution``: ``x``, ``history`` (the norms of residuals), ``iterations``, ``converged``.

    Raises:
        TreeError: ``b``, ``x0`` or a product is not this rank's part of the plan's tree.
        PlanError: invalid arguments.
        SolverError: a direction of curvature zero or below, a matrix or a preconditioner that is found not to be
            symmetric and positive, or numbers that are not finite; alike on all ranks.
        ReplicationError: ranks differ in their arguments.
        PeerError: another rank failed.

    >>> plan = fs.make_plan({"w": torch.ones(3)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> diagonal = torch.tensor([1.0, 2.0, 4.0])
    >>> found = fs.func.cg(lambda v: {"w": diagonal * v["w"]}, {"w": torch.ones(3)}, plan)
    >>> found.x["w"].round(decimals=4), found.iterations, found.converged
    (tensor([1.0000, 0.5000, 0.2500]), 3, True)
    """
    wants = [
        ("matvec", matvec, Callable, "a function of a tree of shards"),
        *(
            (name, x, (Callable, type(None)), "a function, or None")
            for name, x in (("preconditioner", preconditioner), ("callback", callback))
        ),
        *((name, x, (int, float), "a number") for name, x in (("rtol", rtol), ("atol", atol), ("damping", damping))),
        ("maxiter", maxiter, int, "a number of iterations"),
        ("resume", resume, (Solution, type(None)), "what fs.func.cg returned"),
    ]
    limits = {"rtol": (rtol, 0.0), "atol": (atol, 0.0), "damping": (damping, 0.0), "maxiter": (maxiter, 0)}
    check_solver("fs.func.cg(matvec, b, plan)", plan, wants, limits)
    if resume is not None and x0 is not None:
        raise PlanError("fs.func.cg was given x0= and resume=: a solution that goes on has its own start")
    solver = ConjugateGradients("cg", plan, matvec, preconditioner, damping, callback)
    numbers = None if resume is None else (resume.square, resume.history)
    settings: dict[str, Any] = {name: given for name, (given, _) in limits.items()}
    settings |= {"preconditioned": preconditioner is not None, "callback": callback is not None, "resumed": numbers}
    at = solver.begun(b, x0, resume, (rtol, atol), settings)
    while not at.done and at.number < maxiter:
        at = solver.all_ranks(f"iteration {at.number + 1}, residual {at.history[-1]!r}", lambda: solver.step(at))  # noqa: B023
    return at.solution()
