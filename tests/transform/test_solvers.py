"""Conjugate gradients and Lanczos on trees of shards, against dense matrices of one plain process in float64."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.errors import PlanError, ReplicationError, SolverError
from tests.shared.bad import Raised, attempt
from tests.shared.virtual import Job
from tests.transform import cases as cases
from tests.transform.test_tools import flat
from tests.transform.test_transforms import FLAT, HSDP, Axes, differences, mine

F = torch.func
X = cases.batch()
DAMPING = 0.3
TRAINED = [path for path, _ in tree.paths(cases.whole()) if path != "frozen"]


def dense() -> tuple[Tensor, Tensor]:
    """The Gauss-Newton matrix of the cases' outputs by all trained leaves, and a right side."""
    whole = dict(tree.paths(cases.whole()))

    def out(leaves: dict[str, Tensor]) -> Tensor:
        return cases.predict(tree.nest({**whole, **leaves}), X).flatten()

    jacobian = F.jacrev(out)({path: whole[path] for path in TRAINED})
    rows = torch.cat([jacobian[path].reshape(cases.ROWS * 7, -1) for path in TRAINED], 1)
    v = dict(tree.paths(cases.directions()))
    return rows.T @ rows / cases.ROWS, torch.cat([v[path].flatten() for path in TRAINED])


def nested(vector: Tensor) -> Any:
    """The whole tree of a vector of the trained leaves, zero for the frozen one."""
    whole, out, at = dict(tree.paths(cases.whole())), {}, 0
    for path, leaf in whole.items():
        out[path] = torch.zeros_like(leaf)
        if path in TRAINED:
            out[path], at = vector[at : at + leaf.numel()].view(leaf.shape), at + leaf.numel()
    return tree.nest(out)


def squares(out: Tensor, batch: Any) -> Any:
    """A loss whose Hessian by the outputs is one over the number of rows."""
    return fs.Mean(out.square().sum() / 2, len(out))


def matrix_of(plan: fs.Plan) -> Any:
    """The Gauss-Newton matrix, linearized."""
    params = fs.shard(cases.whole(), plan)
    return fs.func.gnvp(cases.predict, squares, plan).linearize(params, mine(X, plan.mesh))


def plain_cg(matrix: Tensor, b: Tensor, steps: int) -> tuple[Tensor, list[float]]:
    """The textbook's, on vectors."""
    x, rest = torch.zeros_like(b), b
    way, history = rest, [rest.norm().item()]
    for _ in range(steps):
        curved = matrix @ way
        size = rest @ rest / (way @ curved)
        x, ahead = x + size * way, rest - size * curved
        way, rest = ahead + ahead @ ahead / (rest @ rest) * way, ahead
        history.append(rest.norm().item())
    return x, history


def solved(axes: Axes) -> list[str]:
    """On a rank: what differs from solutions of the dense system."""
    matrix, b = dense()
    damped = matrix + DAMPING * torch.eye(len(b), dtype=b.dtype)
    out: list[str] = []
    with fs.make_mesh(*axes) as mesh:
        plan = cases.plan_on(mesh)
        times, right = matrix_of(plan), fs.shard({**nested(b), "frozen": torch.ones(cases.WIDTH).double()}, plan)
        found = fs.func.cg(times, right, plan, damping=DAMPING, rtol=1e-13, maxiter=400)
        out += differences(found.x, nested(torch.linalg.solve(damped, b)), plan, "solution")
        out += [f"history {found.history}"] * (not found.converged or found.history[-1] > 1e-13 * found.history[0])
        few = fs.func.cg(times, right, plan, damping=DAMPING, maxiter=7, rtol=0.0)
        want, history = plain_cg(damped, b, 7)
        out += differences(few.x, nested(want), plan, "after seven")
        out += ["history of seven"] * (not torch.allclose(torch.tensor(few.history), torch.tensor(history), rtol=1e-9))
        out += [f"{few.iterations}, {few.converged}"] * (few.iterations != 7 or few.converged)
        near = fs.func.cg(times, right, plan, damping=DAMPING, x0=found.x, rtol=1e-9)
        out += [f"from the solution {near.iterations}"] * (near.iterations > 0)
        diagonal = fs.shard(nested(damped.diagonal()), plan)
        scaled = fs.func.cg(
            times, right, plan, damping=DAMPING, rtol=1e-13, maxiter=400,
            preconditioner=lambda r: tree.map(lambda x, d: x / d.clamp(min=DAMPING), r, diagonal),
        )  # fmt: skip
        out += differences(scaled.x, nested(torch.linalg.solve(damped, b)), plan, "scaled")
        out += resumed(plan, times, right)
    return out


def resumed(plan: fs.Plan, times: Any, right: Any) -> list[str]:
    """What of a solution differs when it is saved on the way, and read again."""
    seen: list[fs.func.Solution] = []
    full = fs.func.cg(times, right, plan, damping=DAMPING, maxiter=9, rtol=0.0, callback=seen.append)
    out = [f"{len(seen)} calls"] * ([s.iterations for s in seen] != [*range(10)])
    file = io.BytesIO()
    torch.save(seen[4]._asdict(), file)
    file.seek(0)
    half = fs.func.Solution(**torch.load(file, weights_only=True))
    again = fs.func.cg(times, right, plan, damping=DAMPING, maxiter=9, rtol=0.0, resume=half)
    same = all(
        torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(full), strict=True) if isinstance(a, Tensor)
    )
    return out + ["resumed"] * (not same or again.history != full.history or again.square != full.square)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_cg_solves_as_a_dense_solver(job: Job, world: int) -> None:
    assert not sum(job(world).run(solved, FLAT), [])


def test_cg_on_replicas_of_shards(job: Job) -> None:
    assert not sum(job(4).run(solved, HSDP), [])
