"""Operators that PyTorch differentiates by some of their arguments only, or not often enough, inside of units."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

import fshard as fs
from fshard import tree
from fshard.errors import CommError, TransformError
from fshard.transform.product_modes import ProductModes

Op = Callable[[Tensor, Tensor], Tensor]


def normalised(x: Tensor, y: Tensor) -> Tensor:
    """A batch norm by statistics that are given."""
    return F.batch_norm(x, y[0], y[1].square() + 1).square().sum()


def by_instance(x: Tensor, y: Tensor) -> Tensor:
    """An instance norm by statistics that are given."""
    mean, var = y[0, :3], y[1, :3].square() + 1
    return F.instance_norm(x.view(-1, 3, 2), mean, var, use_input_stats=False).sin().sum()


OPS: dict[str, Op] = {
    "batch_norm": normalised,
    "instance_norm": by_instance,
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "nll_loss": lambda x, y: F.nll_loss(x.log_softmax(1), y.argmax(1), weight=y[0].square()),
    "where": lambda x, y: torch.where(y > 0, x, y).square().sum(),
}


class Held(nn.Module):
    """A linear map and an operator, as one unit."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.map, self.op = nn.Linear(6, 6), op

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The operator of what the map makes, and the other argument."""
        return self.op(self.map(x), y)


class Outer(nn.Module):
    """The unit, in a module."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, *args: Tensor) -> Tensor:
        """Its result."""
        out: Tensor = self.unit(*args)
        return out


def found(inner: nn.Module, batch: Any, derive: Callable[..., Any], **options: Any) -> list[Any]:
    """What a function of a sharded loss makes of a unit's result, on two ranks."""
    model = fs.split(Outer(inner.double()), units=("unit",))
    mesh = fs.virtual_mesh((2,), ("data",))
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    f = fs.func.sharded_loss(lambda p, b: model.apply(p, *b), plan, **options)
    return mesh.run(lambda: derive(f, plan, fs.shard(model.params, plan), plan.local_batch(batch)))


def all_orders(f: Any, plan: fs.Plan, params: Any, batch: Any) -> Any:
    """A gradient, a Hessian times a vector and a slope."""
    gradient = torch.func.grad(f)
    product = torch.func.jvp(lambda p: gradient(p, batch), (params,), (params,))[1]
    slope = torch.func.jvp(lambda p: f(p, batch), (params,), (params,))[1]
    return gradient(params, batch), product, slope


def derivatives(inner: nn.Module, batch: Any, **options: Any) -> list[Tensor]:
    """These, of all ranks."""
    return [leaf for each in found(inner, batch, all_orders, **options) for leaf in tree.leaves(each)]


def rows() -> Any:
    """A global batch."""
    made = torch.Generator().manual_seed(3)
    return tuple(torch.randn(8, 6, generator=made, dtype=torch.float64) for _ in range(2))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPS)
def test_a_unit_that_is_computed_again_has_the_derivatives_of_one_that_is_not(name: str) -> None:
    torch.manual_seed(0)
    inner = Held(OPS[name])
    pairs = zip(derivatives(inner, rows()), derivatives(inner, rows(), reshard=False), strict=True)
    assert all([torch.allclose(mine, theirs, rtol=1e-12, atol=1e-14) for mine, theirs in pairs])


class Normed(nn.Module):
    """A linear map and a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        """A sum of squares of what the norm makes."""
        out: Tensor = self.norm(self.map(x))
        return out.square().sum()


def test_a_norm_with_running_statistics() -> None:
    torch.manual_seed(0)
    inner, batch = Normed().eval(), rows()[:1]
    pairs = zip(derivatives(inner, batch), derivatives(inner, batch, reshard=False), strict=True)
    assert all([torch.allclose(mine, theirs, rtol=1e-12, atol=1e-14) for mine, theirs in pairs])


def aligned(x: Tensor, y: Tensor) -> Tensor:
    """A loss with a first reverse derivative alone."""
    lengths = torch.tensor([1])
    return F.ctc_loss(x.log_softmax(1)[:, None], torch.ones(1, 1, dtype=torch.long), lengths + 3, lengths)


@pytest.mark.parametrize(("own", "says"), [(True, "_ctc_loss has no forward"), (False, "_ctc_loss_backward has no")])
def test_an_operator_without_a_second_derivative_is_named_with_its_unit(own: bool, says: str) -> None:
    def second(f: Any, plan: fs.Plan, params: Any, batch: Any) -> Any:
        if own:
            return torch.func.jvp(lambda p: torch.func.grad(f)(p, batch), (params,), (params,))[1]
        return fs.func.hvp(f.loss_fn, plan, reshard=True)(params, params, batch)

    with pytest.raises(TransformError, match=f"in unit unit, PyTorch's operator {says}"):
        found(Held(aligned), rows(), second)


def test_an_argument_without_a_derivative_is_named() -> None:
    inner = Held(lambda x, y: F.soft_margin_loss(y, x))
    with pytest.raises(TransformError, match=r"soft_margin_loss has no derivative by its argument 'target'"):
        derivatives(inner, rows())


def test_a_gradient_without_a_forward_derivative_is_named_or_done_without() -> None:
    torch.manual_seed(0)
    inner = Held(lambda x, y: (F.hardsigmoid(x) * y).square().sum())

    def by_hand(f: Any, plan: fs.Plan, params: Any, batch: Any) -> Any:
        return torch.func.jvp(lambda p: torch.func.jvp(lambda p: f(p, batch), (p,), (p,))[1], (params,), (params,))

    with pytest.raises(TransformError, match="operator hardsigmoid_backward has no forward derivative"):
        found(inner, rows(), by_hand, reshard=True)


def test_an_error_that_quotes_a_tool_is_no_missing_derivative() -> None:
    modes = ProductModes()

    def failing() -> None:
        raise CommError("rank 0 waits at fs.func.jvp")

    with pytest.raises(CommError, match="waits"):
        modes.run(failing, lambda: None)
    assert not modes.missing
