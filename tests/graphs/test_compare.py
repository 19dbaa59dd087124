"""No graph is used that computes anything else than its unit: faults put into traces are found, told, and harmless."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard.runtime.graphs.graph_proof import apart, copied, seed
from tests.graphs.cases import affine, params_of, rows, trained


def tracing() -> bool:
    """Whether the code that asks is being traced, which no operator should depend on."""
    return torch._C._len_torch_dispatch_stack() > 0


class Lying(torch.autograd.Function):
    """Triples; the trace of its backward doubles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (2 if tracing() else 3)


class Striding(torch.autograd.Function):
    """Triples; the trace of its backward doubles gradients that are not contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (2 if tracing() and not grad.is_contiguous() else 3)


def wrong_output(p: Any, x: Tensor) -> Any:
    return affine(p, x) * (2.0 if tracing() else 3.0)


def wrong_gradient(p: Any, x: Tensor) -> Any:
    return Lying.apply(affine(p, x))  # type: ignore[no-untyped-call]


def wrong_gradient_of_a_leaf(p: Any, x: Tensor) -> Any:
    return affine({"w": p["w"], "b": Lying.apply(p["b"])}, x)  # type: ignore[no-untyped-call]


def wrong_gradient_of_some_strides(p: Any, x: Tensor) -> Any:
    return Striding.apply(affine(p, x))  # type: ignore[no-untyped-call]


def wrong_draws(p: Any, x: Tensor) -> Any:
    y = F.dropout(affine(p, x), 0.5)
    if tracing():
        torch.rand(3)
    return y


def wrong_number(p: Any, x: Tensor) -> Any:
    return affine(p, x), 2.0 if tracing() else 3.0


def wrong_write(p: Any, x: Tensor) -> Any:
    mean = torch.zeros(6)
    F.batch_norm(x, mean, torch.ones(6), training=not tracing())
    return affine(p, x + mean)


FAULTS: list[tuple[Callable[..., Any], str]] = [
    (wrong_output, "output 0 differs by"),
    (wrong_gradient, "the gradient of a.b differs by"),
    (wrong_gradient_of_a_leaf, "the gradient of a.b differs by"),
    (wrong_gradient_of_some_strides, "a backward for gradients of other strides"),
    (wrong_draws, "random numbers"),
    (wrong_number, "3.0 among the results, which was 2.0 in the trace"),
    (wrong_write, "output 0 differs by"),
]


@pytest.mark.long
@pytest.mark.parametrize(("body", "told"), FAULTS)
def test_a_graph_that_differs_is_not_used(body: Callable[..., Any], told: str) -> None:
    unit, last = fs.unit(body), fs.unit(affine)

    def loss(params: Any, x: Tensor) -> Tensor:
        y = unit(params["a"], last(params["b"], x))
        y = y[0] * y[1] if isinstance(y, tuple) else y
        return y.t().reshape(-1).square().sum()  # the gradient of y is not contiguous

    torch.manual_seed(5)
    _, want, leaves = trained(loss, params_of("a", "b"), [rows(n) for n in range(4)], None)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    step, got, found = trained(loss, params_of("a", "b"), [rows(n) for n in range(4)], "fx")
    assert want == got and all(map(torch.equal, leaves, found)) and torch.equal(after, torch.get_rng_state())
    first, second = step.units.splitlines()
    assert first.startswith("affine(b): fx graph") and "as it is: fx graph" in second and told in second, step.units


def test_a_unit_that_counts_its_calls_is_no_graph() -> None:
    seen: list[int] = []

    @fs.unit
    def unit(p: Any, x: Tensor) -> Tensor:
        seen.append(1)
        return affine(p, x) * len(seen)

    step, _, _ = trained(lambda params, x: unit(params["a"], x).mean(), params_of("a"), [rows(0), rows(1)], "fx")
    assert "as it is: fx graph 0 is not used" in step.units


def test_one_tensor_given_twice_is_told_from_two() -> None:
    @fs.unit
    def unit(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return affine(p, x) * 3 if x is y else affine(p, x) - y

    def loss(params: Any, x: Tensor) -> Tensor:
        z = torch.tanh(x @ params["b"]["w"])
        return unit(params["a"], z, z).mean() + unit(params["a"], z, z + 0).mean() + unit(params["a"], z, y=z).mean()

    seen = [trained(loss, params_of("a", "b"), [rows(n) for n in range(3)], compile) for compile in (None, "fx")]
    assert seen[0][1] == seen[1][1] and all(map(torch.equal, seen[0][2], seen[1][2]))
    assert "as it is" not in seen[1][0].units


def test_how_far_two_tensors_are_apart() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), -2.0])
    assert not apart(x, x.clone(), exact=True)
    assert not apart(None, torch.zeros(3), exact=True) and "zero in one" in apart(None, torch.ones(3), exact=True)
    assert "nan in one" in apart(x, x.nan_to_num(), exact=False)
    off = x + torch.tensor([1e-4, 0.0, 0.0, 0.0])
    assert "differs by 0.0001, where its largest number is 2" in apart(x, off, exact=True)
    assert not apart(x, off, exact=False) and apart(x, x * 1.01, exact=False)
    assert apart(x, x.double(), exact=False) and apart(x, x[:3], exact=False)
    z = torch.complex(x, x)
    assert not apart(z, z.clone(), exact=True) and apart(z.conj(), z, exact=True)
    n = torch.arange(1000)
    assert apart(n, n.clamp(max=998), exact=True) and not apart(n, n.clamp(max=998), exact=False)
    assert apart(n, n + 1, exact=False)


def test_copies_have_the_strides_of_what_they_copy() -> None:
    x = torch.arange(24.0).view(4, 6)
    for view in (x, x.t(), x[:, ::2], x[1:, 1].expand(3, 3), x[:0], x[0, 0], x.unfold(0, 2, 1)):
        other = copied(view)
        assert torch.equal(other, view) and other.stride() == view.stride()
        assert not view.numel() or other.data_ptr() != view.data_ptr()
        tangent = seed(view, view.stride())
        assert tangent.shape == view.shape and tangent.stride() == view.stride() and bool((tangent.abs() <= 0.5).all())


class Normed(nn.Module):
    """A unit, and beside it batch normalization that is called by function, which writes without declaring it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.line(x), self.mean, self.var, training=True)


def test_units_of_a_module_with_statistics_of_its_own_are_graphs() -> None:
    model = fs.split(Normed(), units=("line",))
    plan = fs.make_plan(model, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    opt = fs.optim.sgd(0.1)

    def loss(params: Any, x: Tensor) -> Any:
        out, buffers = model.apply(params, x, buffers=model.buffers)
        return out.square().sum(1).tanh().mean(), buffers

    seen = []
    for compile in (None, "fx"):
        state = fs.init_state(plan, opt, params=fs.tree.map(torch.clone, model.params))
        step = fs.make_train_step(loss, opt, plan, compile=compile)
        for number in range(3):
            state, metrics = step(state, rows(number))
            seen.append([metrics.loss, *fs.tree.leaves(metrics.aux)])
    assert step.units == "line: fx graph 0"
    assert all(
        torch.equal(a, b) for one, two in zip(seen[:3], seen[3:], strict=True) for a, b in zip(one, two, strict=True)
    )


def test_units_that_never_reach_a_graph_are_told() -> None:
    unit = fs.unit(affine)

    def demanded(params: Any, x: Tensor) -> Tensor:
        return unit(params["a"], x).mean() * (2 if x.sum() > 0 else 3)

    def moded(params: Any, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            return unit(params["a"], x).mean()

    assert "gathered on demand" in trained(demanded, params_of("a"), [rows(0)], "fx")[0].units
    assert "TorchFunctionMode: DeviceContext" in trained(moded, params_of("a"), [rows(0)], "fx")[0].units


def _virtual(body: Callable[..., Any], compile: str | None) -> tuple[float, str]:
    unit, mesh, params = fs.unit(body), fs.make_mesh((2,), ("shard",)), params_of("a")
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"), units=("a",))
    opt = fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, params=fs.tree.map(torch.clone, params))
    step = fs.make_train_step(lambda p, x: unit(p["a"], x).square().mean(), opt, plan, compile=compile)
    state, _ = step(state, rows(0))
    return step(state, rows(1))[1].loss.item(), step.units


def test_what_cannot_be_traced_runs_eagerly_on_a_virtual_mesh() -> None:
    loose = torch.arange(6.0)

    def closing(p: Any, x: Tensor) -> Tensor:
        return affine(p, x) * loose

    with fs.virtual_mesh((2,), ("shard",)) as mesh:
        want, got = (mesh.run(_virtual, closing, compile) for compile in (None, "fx"))
    assert [loss for loss, _ in want] == [loss for loss, _ in got]
    assert all("reads a tensor of shape [6] that is not an argument of it" in text for _, text in got)


def test_gradients_of_leaves_may_have_other_strides() -> None:
    unit = fs.unit(lambda p, x: torch.tanh(x @ p["w"].t() + p["b"].sum().expand(6)))
    step, _, _ = trained(lambda params, x: unit(params["a"], x).mean(), params_of("a"), [rows(0), rows(1)], "fx")
    assert step.units == "<lambda>(a): fx graph 0"
