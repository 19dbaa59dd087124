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
from tests.transform.test_transforms import FLAT, HSDP, Axes, differences, mine

F = torch.func
X = cases.batch()
DAMPING = 20.0
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


def solved(axes: Axes, matrix: Tensor, b: Tensor) -> list[str]:
    """On a rank: what differs from solutions of the dense system."""
    damped = matrix + DAMPING * torch.eye(len(b), dtype=b.dtype)
    out: list[str] = []
    with fs.make_mesh(*axes) as mesh:
        plan = cases.plan_on(mesh)
        times, right = matrix_of(plan), fs.shard({**nested(b), "frozen": torch.ones(cases.WIDTH).double()}, plan)
        found = fs.func.cg(times, right, plan, damping=DAMPING, rtol=1e-12, maxiter=400)
        out += differences(found.x, nested(torch.linalg.solve(damped, b)), plan, "solution")
        out += [f"history {found.history}"] * (not found.converged or found.history[-1] > 1e-12 * found.history[0])
        few = fs.func.cg(times, right, plan, damping=DAMPING, maxiter=4, rtol=0.0)
        want, history = plain_cg(damped, b, 4)
        out += differences(few.x, nested(want), plan, "after four")
        out += ["history of four"] * (not torch.allclose(torch.tensor(few.history), torch.tensor(history), rtol=1e-9))
        out += [f"{few.iterations}, {few.converged}"] * (few.iterations != 4 or few.converged)
        near = fs.func.cg(times, right, plan, damping=DAMPING, x0=found.x, rtol=1e-9)
        out += [f"from the solution {near.iterations}"] * (near.iterations > 0)
        diagonal = fs.shard(nested(damped.diagonal()), plan)
        scaled = fs.func.cg(
            times, right, plan, damping=DAMPING, rtol=1e-12, maxiter=400,
            preconditioner=lambda r: tree.map(lambda x, d: x / d.clamp(min=DAMPING), r, diagonal),
        )  # fmt: skip
        out += differences(scaled.x, nested(torch.linalg.solve(damped, b)), plan, "scaled")
        out += resumed(plan, times, right)
    return out


def resumed(plan: fs.Plan, times: Any, right: Any) -> list[str]:
    """What of a solution differs when it is saved on the way, and read again."""
    seen: list[fs.func.Solution] = []
    full = fs.func.cg(times, right, plan, damping=DAMPING, maxiter=5, rtol=0.0, callback=seen.append)
    out = [f"{len(seen)} calls"] * ([s.iterations for s in seen] != [*range(6)])
    file = io.BytesIO()
    torch.save(seen[2]._asdict(), file)
    file.seek(0)
    half = fs.func.Solution(**torch.load(file, weights_only=True))
    again = fs.func.cg(times, right, plan, damping=DAMPING, maxiter=5, rtol=0.0, resume=half)
    same = all(
        torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(full), strict=True) if isinstance(a, Tensor)
    )
    return out + ["resumed"] * (not same or again.history != full.history or again.square != full.square)


def spectrum(axes: Axes, matrix: Tensor, b: Tensor) -> list[str]:
    """On a rank: what differs from the eigenvalues of the dense matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    out: list[str] = []
    with fs.make_mesh(*axes) as mesh:
        plan = cases.plan_on(mesh)
        times, start = matrix_of(plan), fs.shard(nested(b), plan)
        seen: list[fs.func.Lanczos] = []
        found = fs.func.lanczos(times, start, plan, 14, callback=seen.append)
        gap = (values[:, None] - found.eigenvalues).abs().min(0).values
        out += [f"bounds {gap - found.errors}"] * (not bool((gap <= found.errors + 1e-10).all()))
        out += [f"largest {found.eigenvalues[-1]}"] * (not torch.allclose(found.eigenvalues[-1], values[-1]))
        top = vectors[:, -1] * (vectors[:, -1] @ b).sign()
        mine_ = found.vector(-1)
        signed = fs.tree.vdot(mine_, start, plan).sign().item()
        out += differences(tree.map(lambda x: signed * x, mine_), nested(top), plan, "vector")
        unit = b / b.norm()
        moments = torch.stack([unit @ torch.linalg.matrix_power(matrix, n) @ unit for n in range(6)])
        got = torch.stack([(found.weights * found.eigenvalues**n).sum() for n in range(6)])
        out += ["moments"] * (not torch.allclose(got, moments, rtol=1e-9))
        file = io.BytesIO()
        torch.save(seen[5]._asdict(), file)
        file.seek(0)
        half = fs.func.Lanczos(**torch.load(file, weights_only=True))
        again = fs.func.lanczos(times, start, plan, 14, resume=half)
        pairs = zip(tree.leaves(again.basis), tree.leaves(found.basis), strict=True)
        same = all(torch.equal(one, other) for one, other in pairs)
        out += ["resumed"] * (not same or again[:2] != found[:2] or half.steps != 6)
        whole = fs.func.lanczos(lambda v: tree.map(lambda x: 2 * x, v), start, plan, 5)
        out += [f"closed {whole[:2]}"] * (
            whole.steps != 1 or abs(whole.diagonal[0] - 2) > 1e-14 or whole.beside != [0.0]
        )
    return out


def both(axes: Axes, matrix: Tensor, b: Tensor) -> list[str]:
    """On a rank: both solvers."""
    return solved(axes, matrix, b) + spectrum(axes, matrix, b)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_equal_to_dense_solvers(job: Job, world: int) -> None:
    assert not sum(job(world).run(both, FLAT, *dense()), [])


@pytest.mark.long
def test_on_replicas_of_shards(job: Job) -> None:
    assert not sum(job(4).run(both, HSDP, *dense()), [])


def single() -> tuple[fs.Plan, Any]:
    """The plan of three numbers on one rank, and a vector."""
    w = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    return fs.make_plan({"w": w}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))]), {"w": w}


def map_by(rows: list[list[float]]) -> Any:
    """The product with a matrix."""
    matrix = torch.tensor(rows, dtype=torch.float64)
    return lambda v: {"w": matrix @ v["w"]}


BAD = [
    ([[1, 0, 0], [0, -3, 0], [0, 0, 1]], "cg", r"cg, iteration 2: the matrix is not positive definite: .* is -0\.\d+"),
    ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], "cg", r"with damping=0, is 0\. Give damping="),
    ([[2, 1, 0], [0, 2, 0], [0, 0, 2]], "cg", r"cg, iteration 2: the matrix is not symmetric: v @ A @ w is"),
    ([[2, 1, 0], [0, 2, 0], [0, 0, 2]], "lanczos", r"lanczos, step 2: the matrix is not symmetric: v @ A @ w is"),
    ([[float("nan"), 0, 0], [0, 2, 0], [0, 0, 2]], "cg", r"cg, iteration 1: the curvature is nan"),
    ([[float("inf"), 0, 0], [0, 2, 0], [0, 0, 2]], "lanczos", r"lanczos, step 1: the square of a product is inf"),
]


@pytest.mark.parametrize(("rows", "solver", "says"), BAD, ids=[f"{solver}-{i}" for i, (_, solver, _) in enumerate(BAD)])
def test_matrices_that_cannot_be_solved_are_told_by_their_numbers(rows: Any, solver: str, says: str) -> None:
    plan, v = single()
    more = [3] if solver == "lanczos" else []
    with pytest.raises(SolverError, match=says):
        getattr(fs.func, solver)(map_by(rows), v, plan, *more)


def test_damping_makes_an_indefinite_matrix_solvable() -> None:
    plan, v = single()
    found = fs.func.cg(map_by([[1, 0, 0], [0, -3, 0], [0, 0, 1]]), v, plan, damping=5.0)
    assert torch.allclose(found.x["w"], v["w"] / torch.tensor([6.0, 2.0, 6.0]).double())


def test_a_preconditioner_that_is_not_positive_is_refused() -> None:
    plan, v = single()
    with pytest.raises(SolverError, match="the preconditioner is not positive definite: the residual of norm 4.58"):
        fs.func.cg(lambda v: v, v, plan, preconditioner=lambda r: {"w": -r["w"]})


def test_nothing_is_computed_for_a_right_side_of_zeros() -> None:
    plan, v = single()
    found = fs.func.cg(lambda v: 1 / 0, {"w": 0 * v["w"]}, plan)
    assert found.converged and found.iterations == 0 and not found.x["w"].any()


def test_wrong_arguments_are_refused() -> None:
    plan, v = single()
    calls: list[Any] = [
        lambda: fs.func.cg(v, v, plan),
        lambda: fs.func.cg(lambda v: v, v, plan, rtol=-1.0),
        lambda: fs.func.cg(lambda v: v, v, plan, maxiter=2.5),  # type: ignore[arg-type]
        lambda: fs.func.cg(lambda v: v, v, plan, damping=float("inf")),
        lambda: fs.func.cg(lambda v: v, v, plan, x0=v, resume=fs.func.cg(lambda v: v, v, plan)),
        lambda: fs.func.lanczos(lambda v: v, v, plan, 0),
        lambda: fs.func.lanczos(lambda v: v, v, plan, 1).vector(1),
    ]
    for call in calls:
        with pytest.raises(PlanError):
            call()
    with pytest.raises(SolverError, match="v0 is zero"):
        fs.func.lanczos(lambda v: v, {"w": 0 * v["w"]}, plan, 1)


def mistakes() -> list[tuple[Raised | None, Raised | None]]:
    """On a rank: what each mistake of rank 1 alone raises, and what the right call raises after it."""
    out = []
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = cases.plan_on(mesh)
        times, right = matrix_of(plan), fs.shard(cases.directions(), plan)
        odd = mesh.rank == 1
        product = fs.func.hvp(cases.mean_loss, plan)

        def failing(v: Any) -> Any:
            return 1 / 0 if odd else times(v)

        def late(v: Any) -> Any:
            found = times(v)
            return {"table": found["table"]} if odd else found

        def nested_call(v: Any) -> Any:
            return product({} if odd else right, v, mine(X, mesh))

        def seen(found: Any) -> None:
            if odd and getattr(found, "iterations", getattr(found, "steps", 0)) == 2:
                raise KeyError("disk full")

        calls: list[Any] = [
            lambda: fs.func.cg(times, {} if odd else right, plan, damping=9.0),
            lambda: fs.func.cg(times, right, plan, damping=9.0, rtol=1e-3 if odd else 1e-4),
            lambda: fs.func.cg(times, right, plan, damping=9.0, maxiter=-1 if odd else 5),
            lambda: fs.func.cg(failing, right, plan, damping=9.0),
            lambda: fs.func.cg(late, right, plan, damping=9.0),
            lambda: fs.func.cg(nested_call, right, plan, damping=9.0),
            lambda: fs.func.cg(times, right, plan, damping=9.0, callback=seen),
            lambda: fs.func.cg(times, right, plan, preconditioner=lambda r: 3 if odd else r),
            lambda: fs.func.lanczos(times, 3 if odd else right, plan, 4),
            lambda: fs.func.lanczos(failing, right, plan, 4),
            lambda: fs.func.lanczos(late, right, plan, 4),
            lambda: fs.func.lanczos(times, right, plan, 4, callback=seen),
        ]
        for call in calls:
            found = attempt(call)
            out.append((found, attempt(lambda: fs.func.cg(times, right, plan, damping=9.0, maxiter=2))))
    return out


def test_what_one_rank_raises_is_told_to_all(job: Job) -> None:
    first, second = job(2).run(mistakes)
    for number, ((others, after), (own, _)) in enumerate(zip(first, second, strict=True)):
        assert own is not None and others is not None and after is None, (number, own, others, after)
        if number == 1:
            assert ReplicationError.__name__ in own.kinds and "rtol" in others.text
        else:
            assert "PeerError" in others.kinds and own.text.splitlines()[0] in others.text, (number, own, others)


def in_a_step() -> list[str]:
    """On a rank: what differs of a Newton step that a step function solves for, and of one outside of it."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, x, opt = cases.plan_on(mesh), mine(X, mesh), fs.optim.sgd(1.0)
        grad, update = fs.value_and_grad(cases.weighted_loss, plan), fs.make_update(opt, plan)
        product = fs.func.hvp(cases.weighted_loss, plan)

        def solve(params: Any, batch: Any) -> Any:
            _, slopes = grad(params, batch)
            return fs.func.cg(lambda v: product(params, v, batch), slopes, plan, damping=30.0, maxiter=3, rtol=0.0).x

        def newton(state: Any, batch: Any) -> Any:
            return update(state, solve(state.params, batch))[0], {}

        params = fs.shard(cases.whole(), plan)
        want = tree.map(lambda p, d: p - d, params, solve(params, x))
        state, _ = fs.make_step(newton, plan)(fs.init_state(plan, opt, params=cases.whole()), x)
        return differences(state.params, fs.unshard(want, plan), plan, "newton")


@pytest.mark.filterwarnings("ignore:the parts of")
def test_a_step_function_may_solve() -> None:
    assert not sum(fs.virtual_mesh((2,), ("any",)).run(in_a_step), [])
