"""Products with Hessians and slopes inside of step functions: passes of the step, with the values of plain PyTorch."""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp

import fshard as fs
from fshard import tree
from fshard.errors import PlanError
from fshard.schedule import check
from tests.parts.test_derivatives import Flat, far, net, rows
from tests.shared.workers import Pools

RATE, STEPS, TOLERANCE = 0.05, 2, 1e-12
POLICIES = [None, fs.Policy(reshard=False), fs.Policy(prefetch=0), fs.Policy(prefetch=3, reduces=0), "auto"]


def outer(out: Tensor, batch: Any) -> Tensor:
    """The loss of outputs."""
    return (out - batch[1]).square().sum(1).mean()


def plainly() -> tuple[Flat, list[float]]:
    """The parameters after some steps of plain PyTorch, and the last numbers."""
    made, batch, told = net(), rows(), list[float]()

    def f(p: Flat) -> Tensor:
        return outer(functional_call(made, p, (batch[0],)), batch)

    p = {path: leaf.detach().clone() for path, leaf in made.named_parameters()}
    for _ in range(STEPS):
        v = grad(f)(p)
        loss, slope = jvp(f, (p,), (v,))
        for _ in range(2):
            v = tree.map(lambda x, y: x - 0.01 * y, v, jvp(grad(f), (p,), (v,))[1])
        out, pull = vjp(lambda p: functional_call(made, p, (batch[0],)), p)
        moved = jvp(lambda p: functional_call(made, p, (batch[0],)), (p,), (v,))[1]
        bent = jvp(grad(lambda out: outer(out, batch)), (out,), (moved,))[1]
        p = tree.map(lambda x, y, z: x - RATE * (y + 0.1 * z), p, v, pull(bent)[0])
        told = [loss.item(), slope.item()]
    return p, told


class Newton:
    """A step function of gradients, products and slopes.

    Args:
        mesh: the mesh.
        around: wraps the loss.
    """

    def __init__(self, mesh: Any, around: Callable[[Any], Any] = lambda x: x) -> None:
        self.model = fs.split(net(), units=("*",))
        self.plan = fs.make_plan(self.model, mesh, [("0.bias", fs.P()), (".*", fs.fsdp("data"))], batch=fs.P("data"))
        self.opt = fs.optim.sgd(RATE)

        def loss_fn(params: Any, batch: Any) -> Any:
            return around(outer(self.model.apply(params, batch[0]), batch))

        self.gradient, self.update = fs.value_and_grad(loss_fn, self.plan), fs.make_update(self.opt, self.plan)
        self.product, self.along = fs.func.hvp(loss_fn, self.plan), fs.func.jvp(loss_fn, self.plan)
        self.curved = fs.func.gnvp(lambda p, batch: self.model.apply(p, batch[0]), outer, self.plan)
        self.samples = fs.func.hessian_trace_samples(loss_fn, self.plan, 3)

    def __call__(self, state: Any, batch: Any) -> Any:
        """The next state."""
        _, v = self.gradient(state, batch)
        loss, slope = self.along(state.params, v, batch)
        for _ in range(2):
            v = fs.tree.add(v, self.product(state.params, v, batch), -0.01)
        v = fs.tree.add(v, self.curved(state.params, v, batch), 0.1)
        return self.update(state, v)[0], [loss, slope]

    def start(self) -> fs.TrainState:
        """The first state."""
        return fs.init_state(self.plan, self.opt, params=self.model.params)

    def steps(self, fn: Any, **options: Any) -> tuple[Flat, list[float], Any]:
        """The parameters after some steps, the last numbers, and the step."""
        step, state, told = fs.make_step(fn, self.plan, **options), self.start(), list[Any]()
        for _ in range(STEPS):
            state, told = step(state, self.plan.local_batch(rows()))
        return dict(tree.paths(fs.unshard(state.params, self.plan))), [float(x) for x in told], step


def wrong(mesh: Any, **options: Any) -> list[str]:
    """What is wrong with a step function on a mesh."""
    newton, (want, numbers) = Newton(mesh), plainly()
    found, told, step = newton.steps(newton, **options)
    out = [f"parameters by {far(found, want)}"] * (far(found, want) > TOLERANCE)
    out += [f"{told}, plain {numbers}"] * any(abs(a - b) > TOLERANCE for a, b in zip(told, numbers, strict=True))
    with pytest.raises(PlanError, match=r"was a pass of a step function.*print\(step.schedule\)"):
        print(newton.product.schedule)
    return out + ["it left its schedule"] * (step.record != step.schedule.ops)


def test_products_are_those_of_plain_pytorch() -> None:
    assert not wrong(fs.virtual_mesh((2,), ("data",)))


@pytest.mark.long
@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_products_on_every_schedule(ranks: int, policy: Any) -> None:
    debug = policy is None
    assert not wrong(fs.virtual_mesh((ranks,), ("data",)), schedule=policy, donate=not debug, debug=debug)


def on_rank() -> list[str]:
    """On a rank: what is wrong."""
    with fs.make_mesh((-1,), ("data",)) as mesh:
        return wrong(mesh)


@pytest.mark.slow
@pytest.mark.processes
def test_products_in_a_step_function_on_processes(pool: Pools) -> None:
    assert not sum(pool(2).run(on_rank), [])


def test_a_step_of_products_is_one_program() -> None:
    newton = Newton(fs.abstract_mesh((2,), ("data",)))
    kept = fs.Policy(reshard=False)
    trace = fs.make_step(newton, newton.plan, schedule=kept).trace(newton.start(), newton.plan.local_batch(rows()))
    check(trace.schedule)
    counts = Counter((op.kind, op.target.partition("~")[0]) for op in trace.schedule)
    # One gradient, one slope, two Hessian products and one Gauss-Newton product: tangents travel, and are not reduced.
    assert counts["all_gather", "0'"] == counts["all_gather", "2'"] == 4
    # Parameters are gathered once for all five.
    assert counts["all_gather", "0"] == counts["all_gather", "2"] == 1
    assert counts["reduce_scatter", "0"] == 4 and not counts["reduce_scatter", "0'"]
    assert counts["forward", "root"] == 5 and counts["handshake", ""] == counts["consensus", ""] == 1


def moving(newton: Any, state: Any, batch: Any) -> Any:
    """A step whose first pass is a product, and which takes products elsewhere, twice at one point."""
    v = newton.product(state.params, state.params, batch)
    there = fs.tree.add(state.params, v, -0.01)
    _, slope = newton.along(there, v, batch)
    w = newton.product(there, newton.product(there, v, batch), batch)
    loss, g = newton.gradient(there, batch)
    return newton.update(state, fs.tree.add(g, w, 0.01))[0], [loss, slope]


@pytest.mark.parametrize("policy", [None, fs.Policy(reshard=False)])
def test_products_share_what_is_gathered_at_one_point(policy: Any) -> None:
    newton, made, x = Newton(fs.virtual_mesh((2,), ("data",))), net(), rows()
    found, _, step = newton.steps(lambda state, batch: moving(newton, state, batch), schedule=policy, debug=True)
    f = lambda p: outer(functional_call(made, p, (x[0],)), x)  # noqa: E731
    times = lambda p, v: jvp(grad(f), (p,), (v,))[1]  # noqa: E731
    p = {path: leaf.detach().clone() for path, leaf in made.named_parameters()}
    for _ in range(STEPS):
        v = times(p, p)
        there = tree.map(lambda x, y: x - 0.01 * y, p, v)
        w = times(there, times(there, v))
        p = tree.map(lambda x, y, z: x - RATE * (y + 0.01 * z), p, grad(f)(there), w)
    assert far(found, p) < TOLERANCE and step.record == step.schedule.ops


def test_products_at_one_point_read_it_each_in_its_own_dtype() -> None:
    """Bfloat16 and float16 have as many bytes. A gradient in another dtype than the state's is on the schedule, too."""
    newton, dtypes = Newton(fs.virtual_mesh((2,), ("data",))), (torch.bfloat16, torch.float16, torch.float64)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        out = newton.model.apply(params, batch[0].to(params["0"]["weight"].dtype))
        return outer(out.double(), batch)

    plans = [newton.plan.replace(precision=fs.Precision(compute=dtype)) for dtype in dtypes]
    gradients = [fs.value_and_grad(loss_fn, plan) for plan in plans]
    products = [fs.func.hvp(loss_fn, plan) for plan in plans]

    def of_all(state: Any, batch: Any) -> list[Tensor]:
        vectors = [gradient(state.params, batch)[1] for gradient in gradients]
        made = [product(state.params, state.params, batch) for product in products]
        return [fs.tree.norm(x, newton.plan) for x in (*vectors, *made)]

    step, batch = fs.make_step(lambda state, batch: (state, of_all(state, batch)), newton.plan), rows()
    found = step(newton.start(), newton.plan.local_batch(batch))[1]
    for at, dtype in enumerate(dtypes):
        p = {path: leaf.detach().to(dtype) for path, leaf in net().named_parameters()}
        made, x = net().to(dtype), batch[0].to(dtype)
        f = lambda p: outer(functional_call(made, p, (x,)).double(), batch)  # noqa: B023, E731
        for mine, want in zip(found[at::3], (grad(f)(p), vjp(grad(f), p)[1](p)[0]), strict=True):
            plain = sum(float(leaf.double().square().sum()) for leaf in want.values()) ** 0.5
            assert abs(float(mine) / plain - 1) < 0.02
    assert step.record == step.schedule.ops


def test_the_loss_of_a_product_may_read_a_number_of_the_step() -> None:
    newton, made, x, told = Newton(fs.virtual_mesh((2,), ("data",))), net(), rows(), dict[int, Tensor]()

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return told[newton.plan.here.mesh.rank] * outer(newton.model.apply(params, batch[0]), batch)

    product = fs.func.hvp(loss_fn, newton.plan)

    def fn(state: Any, batch: Any) -> Any:
        loss, v = newton.gradient(state, batch)
        told[newton.plan.here.mesh.rank] = loss
        return newton.update(state, product(state.params, v, batch))[0], []

    found, _, step = newton.steps(fn)
    f = lambda p: outer(functional_call(made, p, (x[0],)), x)  # noqa: E731
    p = {path: leaf.detach().clone() for path, leaf in made.named_parameters()}
    for _ in range(STEPS):
        loss, v = f(p), jvp(grad(f), (p,), (grad(f)(p),))[1]
        p = tree.map(lambda x, y: x - RATE * loss * y, p, v)  # noqa: B023
    assert far(found, p) < TOLERANCE and step.record == step.schedule.ops


def test_samples_of_the_trace_are_a_pass_too() -> None:
    newton, key = Newton(fs.virtual_mesh((2,), ("data",))), fs.random.key(3)
    state, batch = newton.start(), newton.plan.local_batch(rows())
    one = Newton(fs.make_mesh((1,), ("data",)))
    want = one.samples(one.start().params, rows(), key)

    def fn(state: Any, batch: Any) -> Any:
        return state, newton.samples(state.params, batch, key)

    step = fs.make_step(fn, newton.plan)
    state, found = step(state, batch)
    assert torch.allclose(found, want, rtol=1e-12, atol=0) and step.record == step.schedule.ops
    assert Counter(op.kind for op in step.schedule)["all_gather"] == 2 * (3 + 1)


def test_a_rank_that_fails_in_a_product_leaves_the_state_as_it_was() -> None:
    mesh, armed = fs.virtual_mesh((2,), ("data",)), list[int]()
    calls = Counter[int]()

    def around(loss: Tensor) -> Tensor:
        calls[mesh.here.rank] += 1
        if mesh.here.rank in armed and calls[mesh.here.rank] == 3:
            raise ValueError("by hand")
        return loss

    newton = Newton(mesh, around)
    step, state, batch = fs.make_step(newton, newton.plan), newton.start(), newton.plan.local_batch(rows())
    state, _ = step(state, batch)
    before = tree.map(torch.clone, fs.unshard(state.params, newton.plan))
    calls.clear()
    armed.append(1)
    with pytest.raises(ValueError, match="by hand"):
        step(state, batch)
    armed.clear()
    assert all(map(torch.equal, tree.leaves(fs.unshard(state.params, newton.plan)), tree.leaves(before)))
    step(state, batch)
    assert step.record == step.schedule.ops


class Cube(torch.autograd.Function):
    """A cube without a forward derivative."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * grad * x**2


def cubed(loss: Tensor) -> Tensor:
    """A loss without a forward derivative."""
    found: Tensor = Cube.apply(loss / 9)  # type: ignore[no-untyped-call]
    return found


def test_what_no_trace_finds_gathers_where_units_run() -> None:
    found = []
    for around in (cubed, lambda loss: (loss / 9) ** 3):
        newton = Newton(fs.virtual_mesh((2,), ("data",)), around)

        def fn(state: Any, batch: Any, newton: Newton = newton) -> Any:
            _, v = newton.gradient(state, batch)
            return newton.update(state, newton.product(state.params, v, batch))[0], []

        params, _, step = newton.steps(fn)
        assert step.record == step.schedule.ops
        found.append((params, any(op.target.startswith("0'") for op in step.schedule)))
    assert far(found[0][0], found[1][0]) < TOLERANCE and [each[1] for each in found] == [False, True]


def test_loops_until_a_residual_run_pass_by_pass_on_schedules() -> None:
    newton = Newton(fs.virtual_mesh((2,), ("data",)))

    def fn(state: Any, batch: Any) -> Any:
        _, v = newton.gradient(state, batch)
        for _ in range(3):
            v = fs.tree.add(v, newton.product(state.params, v, batch), -0.01)
            if fs.tree.norm(v, newton.plan) < 1e-9:
                break
        return newton.update(state, v)[0], []

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params, _, step = newton.steps(fn)
    with pytest.raises(PlanError, match="part by part"):
        print(step.schedule)
    assert newton.product.record == newton.product.schedule.ops
    whole, _, other = newton.steps(lambda state, batch: (newton.update(state, apart(newton, state, batch))[0], []))
    assert far(params, whole) < TOLERANCE and other.record == other.schedule.ops


def apart(newton: Newton, state: Any, batch: Any) -> Any:
    """The direction after three products."""
    _, v = newton.gradient(state, batch)
    for _ in range(3):
        v = fs.tree.add(v, newton.product(state.params, v, batch), -0.01)
    return v


def test_a_step_of_another_number_of_products_runs_part_by_part_and_is_traced_anew() -> None:
    newton, many = Newton(fs.virtual_mesh((2,), ("data",))), [1]

    def fn(state: Any, batch: Any) -> Any:
        _, v = newton.gradient(state, batch)
        for _ in range(many[0]):
            v = fs.tree.add(v, newton.product(state.params, v, batch), -0.01)
        return newton.update(state, v)[0], []

    step, state, batch = fs.make_step(fn, newton.plan), newton.start(), newton.plan.local_batch(rows())
    state, _ = step(state, batch)
    many[0] = 2
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state, _ = step(state, batch)
    assert any("more derivatives than when it was traced" in str(one.message) for one in said)
    step(state, batch)
    assert step.record == step.schedule.ops and step.schedule.hash


BAD: dict[str, Callable[[Any], Any]] = {
    "another tree": lambda v: {"0": v["0"]},
    "another shape": lambda v: tree.map(lambda x: torch.zeros(len(x) + 1, dtype=x.dtype), v),
    "another dtype": lambda v: tree.map(lambda x: torch.zeros(x.shape, dtype=torch.int64), v),
    "another layout": lambda v: tree.map(lambda x: torch.zeros(1, *x.shape, dtype=x.dtype), v),
}


def refused(bad: str, first: bool) -> tuple[str, bool]:
    """On a rank: what a step says of a bad direction on the last rank, and whether the next step runs its schedule."""
    with fs.make_mesh((-1,), ("data",)) as mesh:
        newton, armed = Newton(mesh), list[int]()

        def fn(state: Any, batch: Any) -> Any:
            _, v = newton.gradient(state, batch)
            v = BAD[bad](v) if mesh.rank in armed else v
            return newton.update(state, newton.product(state.params, v, batch))[0], []

        step, state, batch = fs.make_step(fn, newton.plan), newton.start(), newton.plan.local_batch(rows())
        if not first:
            state, _ = step(state, batch)
        armed.append(mesh.size - 1)
        try:
            step(state, batch)
            said = "nothing"
        except fs.errors.ShardError as error:
            said = f"{type(error).__name__}: {error}"
        armed.clear()
        state, _ = step(state, batch)
        return said, step.record == step.schedule.ops


@pytest.mark.filterwarnings("ignore:the parts of")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bad", BAD)
def test_bad_directions_of_one_rank_are_refused_on_all(bad: str, first: bool) -> None:
    (other, well), (own, also) = fs.virtual_mesh((2,), ("data",)).run(refused, bad, first)
    assert well and also
    assert other.startswith("PeerError") and "rank 1" in other
    assert own.startswith("TreeError: v"), own
