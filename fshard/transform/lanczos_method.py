"""``fs.func.lanczos``: eigenvalues of symmetric matrices of trees of shards, from products alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import PlanError, SolverError
from fshard.runtime.comm import collective_call
from fshard.sharding.plan import Plan
from fshard.transform.solving import Solving, Vector, check_solver, combined, scaled


class Lanczos(NamedTuple):
    """The result of ``fs.func.lanczos``, and all that it needs to go on.

    ``A`` is ``T`` in the basis, but for what lies outside of it: ``T`` is tridiagonal. The record holds tensors and
    numbers alone, so ``torch.save(found._asdict(), file)`` on each rank keeps it, and
    ``fs.func.lanczos(..., resume=Lanczos(**torch.load(file)))`` goes on to the same bits.

    Attributes:
        diagonal: of ``T``.
        beside: what stands beside the diagonal; the last number is the norm of what lies outside of the basis, zero if
            the basis spans a space that the matrix maps into itself.
        basis: orthonormal trees of shards, one more than the diagonal has numbers, unless that last number is zero.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> found = fs.func.lanczos(lambda v: {"w": 3 * v["w"]}, {"w": torch.ones(2)}, plan, steps=2)
    >>> found.steps, found.eigenvalues, found.beside
    (1, tensor([3.0000], dtype=torch.float64), [0.0])
    """

    diagonal: list[float]
    beside: list[float]
    basis: list[Any]

    @property
    def steps(self) -> int:
        """The number of products."""
        return len(self.diagonal)

    @property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues of ``T``, ``(steps,)``, float64, in rising order: they estimate those of the matrix."""
        return self._decomposed()[0]

    @property
    def errors(self) -> Tensor:
        """For each of them, ``(steps,)``, a bound: some eigenvalue of the matrix is at most so far from it."""
        return self._decomposed()[1][-1].abs() * (self.beside[-1] if self.beside else 0.0)

    @property
    def weights(self) -> Tensor:
        """For each of them, ``(steps,)``, the share of the start vector along its eigenvector.

        ``(weights * f(eigenvalues)).sum()`` estimates ``v @ f(A) @ v`` for the normalized start vector ``v``
        (stochastic Lanczos quadrature: Ubaru, Chen and Saad, 2017).
        """
        return self._decomposed()[1][0].square()

    def vector(self, number: int) -> Any:
        """The unit vector that belongs to an eigenvalue, a tree of shards.

        Args:
            number: of the eigenvalue; -1 for the largest.

        Raises:
            PlanError: there is no such eigenvalue.
        """
        if not -self.steps <= number < self.steps:
            raise PlanError(f"vector({number}): there are {self.steps} eigenvalues, 0 to {self.steps - 1}")
        column = self._decomposed()[1][:, number].tolist()
        out = scaled(dict(tree.paths(self.basis[0])), column[0])
        for by, one in zip(column[1:], self.basis[1:], strict=False):
            out = combined(out, by, dict(tree.paths(one)))
        return tree.nest(out)

    def _decomposed(self) -> tuple[Tensor, Tensor]:
        matrix = torch.diag(torch.tensor(self.diagonal, dtype=torch.float64, device="cpu"))
        beside = torch.tensor(self.beside[: self.steps - 1], dtype=torch.float64, device="cpu")
        found: tuple[Tensor, Tensor] = torch.linalg.eigh(matrix + torch.diag(beside, 1) + torch.diag(beside, -1))
        return found


@dataclass(frozen=True)
class LanczosSteps(Solving):
    """A call of ``fs.func.lanczos``."""

    callback: Callable[[Lanczos], Any] | None = None

    def first(self, v0: Vector) -> "KrylovBasis":
        """The basis of the start vector alone."""
        (square,) = self.dots((v0, v0))
        if self.finite(square, "the square of v0", "the start") == 0:
            raise SolverError(
                "lanczos: v0 is zero where anything is trained: give such as fs.tree.normal(fs.random.key(0), plan)"
            )
        return KrylovBasis([], [], [scaled(v0, 1 / math.sqrt(square))])

    def step(self, at: "KrylovBasis") -> "KrylovBasis":
        """One product, and the next vector of the basis, orthogonal to all others."""
        place = f"step {at.number + 1}"
        rest = self.times(at.vectors[-1])
        *along, square = self.dots(*[(one, rest) for one in at.vectors], (rest, rest))
        size = math.sqrt(self.finite(square, "the square of a product", place))
        self.symmetric(at, along, size, place)
        rest = self.without(rest, at.vectors, along)
        *left, _ = self.dots(*[(one, rest) for one in at.vectors], (rest, rest))
        rest = self.without(rest, at.vectors, left)  # twice is enough: what the first pass rounded
        (square,) = self.dots((rest, rest))
        diagonal, beside = [*at.diagonal, along[-1] + left[-1]], math.sqrt(square)
        scale = max(map(abs, [*diagonal, *at.beside, size]))
        if beside <= 100 * self.rounding**2 * scale:
            found = replace(at, diagonal=diagonal, beside=[*at.beside, 0.0])
        else:
            found = KrylovBasis(diagonal, [*at.beside, beside], [*at.vectors, scaled(rest, 1 / beside)])
        if self.callback is not None:
            self.callback(found.result())
        return found

    def without(self, rest: Vector, basis: list[Vector], along: list[float]) -> Vector:
        """A vector less its parts along others."""
        for one, by in zip(basis, along, strict=True):
            rest = combined(rest, -by, one)
        return rest

    def symmetric(self, at: "KrylovBasis", along: list[float], size: float, place: str) -> None:
        """Refuse a matrix that is not symmetric.

        Raises:
            SolverError: a product is not what the products before say of it.
        """
        wanted = [0.0] * (at.number - 1) + at.beside[-1:]
        for number, (found, meant) in enumerate(zip(along, wanted, strict=False)):
            if abs(found - meant) > 10 * self.rounding * max(size, *map(abs, at.beside)):
                raise SolverError(
                    f"lanczos, {place}: the matrix is not symmetric: v @ A @ w is {found:.6g} and w @ A @ v "
                    f"{meant:.6g} for the vectors {number + 1} and {at.number + 1} of the basis. Give a symmetric "
                    f"matrix: a Hessian (fs.func.hvp) or a Gauss-Newton matrix (fs.func.gnvp) of one batch, without "
                    f"random numbers"
                )

    def again(self, found: Lanczos) -> "KrylovBasis":
        """The basis of an earlier call."""
        vectors = [self.vector(one, f"resume.basis[{i}]") for i, one in enumerate(found.basis)]
        return KrylovBasis([*found.diagonal], [*found.beside], vectors)


@dataclass(frozen=True)
class KrylovBasis:
    """The state of Lanczos' method between two steps."""

    diagonal: list[float]
    beside: list[float]
    vectors: list[Vector]

    @property
    def number(self) -> int:
        """The number of steps made."""
        return len(self.diagonal)

    @property
    def closed(self) -> bool:
        """True when the matrix maps the basis into itself."""
        return bool(self.beside) and self.beside[-1] == 0.0

    def result(self) -> Lanczos:
        """The state as users see it."""
        return Lanczos([*self.diagonal], [*self.beside], [tree.nest(one) for one in self.vectors])


@collective_call
def lanczos(
    matvec: Callable[[Any], Any],
    v0: Any,
    plan: Plan,
    steps: int,
    *,
    callback: Callable[[Lanczos], Any] | None = None,
    resume: Lanczos | None = None,
) -> Lanczos:
    """Estimates of eigenvalues of a symmetric matrix by Lanczos' method (Lanczos, 1950). Collective.

    The largest and the smallest eigenvalues come first. The basis is made orthogonal at each step, so no eigenvalue is
    found twice; it takes the memory of ``steps + 4`` trees of shards. A step takes one product, and three exchanges of
    a few numbers. All ranks make the same decisions.

    Args:
        matvec: ``matvec(v)``, the product of a symmetric matrix with a tree of shards, such as
            ``fs.func.hvp(loss_fn, plan).linearize(params, batch)``.
        v0: where to start, a tree of shards such as ``fs.tree.normal(key, plan)``; frozen leaves are ignored.
        plan: the plan.
        steps: the number of products, those before ``resume`` included; fewer if the matrix maps what they span into
            itself.
        callback: called on each rank after each step with the ``Lanczos`` so far, to show or save it.
        resume: what an earlier call returned, or a callback saw, of the same matrix.

    Returns:
        A ``Lanczos``: ``eigenvalues``, ``errors``, ``weights``, ``vector(number)``.

    Raises:
        TreeError: ``v0`` or a product is not this rank's part of the plan's tree.
        PlanError: invalid arguments.
        SolverError: a matrix that is found not to be symmetric, a ``v0`` of zeros, or numbers that are not finite;
            alike on all ranks.
        ReplicationError: ranks differ in their arguments.
        PeerError: another rank failed.

    >>> plan = fs.make_plan({"w": torch.ones(3)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> diagonal = torch.tensor([1.0, 2.0, 4.0])
    >>> found = fs.func.lanczos(lambda v: {"w": diagonal * v["w"]}, {"w": torch.ones(3)}, plan, steps=3)
    >>> found.eigenvalues.round(decimals=4), found.vector(-1)["w"].abs().round(decimals=4)
    (tensor([1., 2., 4.], dtype=torch.float64), tensor([0., 0., 1.]))
    """
    optional = (("callback", callback, (Callable, type(None)), "a function, or None"),)
    wants = [
        ("matvec", matvec, Callable, "a function of a tree of shards"),
        ("steps", steps, int, "a number of products"),
        ("resume", resume, (Lanczos, type(None)), "what fs.func.lanczos returned"),
    ]
    check_solver("fs.func.lanczos(matvec, v0, plan, steps)", plan, [*wants, *optional], {"steps": (steps, 1)})
    solver = LanczosSteps("lanczos", plan, matvec, callback)
    numbers = None if resume is None else (resume.diagonal, resume.beside)
    settings = {"steps": steps, "callback": callback is not None, "resumed": numbers}
    if resume is None:
        given = solver.begin(lambda: solver.vector(v0, "v0"), settings)
        at = solver.all_ranks("the start", lambda: solver.first(given))
    else:
        at = solver.begin(lambda: solver.again(resume), settings)
    while at.number < steps and not at.closed:
        at = solver.all_ranks(f"step {at.number + 1}, {at.beside[-1:]}", lambda: solver.step(at))  # noqa: B023
    return at.result()
