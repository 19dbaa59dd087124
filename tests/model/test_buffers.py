"""Buffers of a split module: returned when they change, and never written."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from fshard import tree
from fshard.errors import UnitError
from fshard.model import split
from tests.model.cases import Normed, close, equal, flat


@pytest.mark.parametrize("units", [(), "blocks.*", "stem", nn.BatchNorm1d])
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_changed_buffers_are_returned_and_never_written(units: Any, guard: Any) -> None:
    net = Normed()
    model = split(net, units)
    x = torch.randn(6, 4)
    given = tree.map(torch.clone, model.buffers)
    before = tree.map(torch.clone, model.buffers)
    with guard():
        out, new = model.apply(model.params, x, buffers=given)
    equal(given, before)
    equal(model.buffers, before)
    mirror = copy.deepcopy(net)
    equal(out.detach(), mirror(x).detach())
    equal(flat(new), {path: buffer for path, buffer in mirror.named_buffers()})
    out, new = model.apply(model.params, x, buffers=new)
    equal(out, mirror(x))
    equal(flat(new), {path: buffer for path, buffer in mirror.named_buffers()})


@pytest.mark.parametrize("units", [(), "blocks.*"])
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.inference_mode])
def test_unchanged_buffers_are_the_same_tensors(units: Any, guard: Any) -> None:
    net = Normed().eval()
    model = split(net, units)
    with guard():
        _, new = model.apply(model.params, torch.randn(2, 4), buffers=model.buffers)
    same = {path for path, buffer in tree.paths(new) if buffer is flat(model.buffers)[path]}
    assert same == set(flat(model.buffers)) - {"calls"}


@pytest.mark.parametrize("units", [(), "blocks.*"])
def test_a_change_without_buffers_is_an_error_naming_them(units: Any) -> None:
    model = split(Normed(), units)
    with pytest.raises(UnitError, match=r"(?s)calls.*stem\.running_mean.*blocks\.1\.1\.running_var.*buffers=batch"):
        model.apply(model.params, torch.randn(3, 4))
    with pytest.raises(UnitError, match="blocks.0.1.num_batches_tracked"):
        torch.func.grad(lambda p: model.apply(p, torch.randn(3, 4)).sum())(model.params)


def test_buffers_through_grad_with_aux() -> None:
    net = Normed()
    model = split(net, "blocks.*")
    x = torch.randn(3, 4)

    def loss(p: Any, b: Any) -> Any:
        out, new = model.apply(p, x, buffers=b)
        return out.square().sum(), new

    _, new = torch.func.grad(loss, has_aux=True)(model.params, model.buffers)
    net(x)
    equal(flat(new), dict(net.named_buffers()))


def test_a_unit_called_twice_sees_its_own_change() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.same = self.norm

        def forward(self, x: Tensor) -> Tensor:
            return self.same(self.norm(x)) + self.norm.running_mean

    net = Twice()
    model = split(net, "norm")
    x = torch.randn(5, 3)
    out, new = model.apply(model.params, x, buffers=model.buffers)
    equal(out, net(x))
    equal(flat(new), {path: buffer for path, buffer in net.named_buffers()})


class Masked(nn.Module):
    """A large buffer, which is changed when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(100, 100))

    def forward(self, x: Tensor, write: float = 0.0) -> Tensor:
        if write:
            self.mask.mul_(write)
        return self.lin(x) * self.mask[:4, :4].clone()


class Outer(nn.Sequential):
    def forward(self, x: Tensor, write: float = 0.0) -> Tensor:
        return self[0](x, write)


@pytest.mark.parametrize("units", [(), "0"])
def test_large_buffers_are_never_written_either(units: Any) -> None:
    net = Outer(Masked())
    model = split(net, units)
    x = torch.randn(4, 4)
    plain = net[0].lin(x)
    mask = model.buffers["0"]["mask"]
    for _ in range(2):
        close(model.apply(model.params, x), plain)
    for _ in range(2):  # the clone kept from above must not carry one call's change into the next
        out, new = model.apply(model.params, x, 2.0, buffers=model.buffers)
        close(out, 2 * plain)
        assert new["0"]["mask"][0, 0] == 2 and mask[0, 0] == 1
        close(model.apply(model.params, x), plain)
    close(model.apply(model.params, x, buffers=new)[0], 2 * plain)
    grads = torch.func.grad(lambda p: model.apply(p, x, 3.0, buffers=model.buffers)[0].sum())(model.params)
    close(grads["0"]["lin"]["bias"], torch.full((4,), 12.0))
    mask.mul_(5)  # by its owner
    close(model.apply(model.params, x), 5 * plain)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake, _ = model.apply(model.params, x, 2.0, buffers=model.buffers)
    assert type(fake).__name__ == "FakeTensor"
    close(model.apply(model.params, x), 5 * plain)
    assert model.apply(model.params, x, buffers=model.buffers)[1]["0"]["mask"] is mask


class Statistics(nn.Module):
    """A batch normalization of its own: the kernel writes the statistics, and no version counter tells."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.frozen = frozen
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=not self.frozen)


@pytest.mark.parametrize("units", [(), "0"])
def test_statistics_that_a_kernel_writes_silently(units: Any) -> None:
    x = torch.randn(5, 3)
    net = nn.Sequential(Statistics())
    model = split(net, units)
    with pytest.raises(UnitError, match=r"(?s)0\.mean.*0\.var"):
        model.apply({}, x)
    out, new = model.apply({}, x, buffers=model.buffers)
    assert model.buffers["0"]["mean"].abs().sum() == 0
    equal(out, net(x))
    equal(flat(new), dict(net.named_buffers()))
    frozen = split(nn.Sequential(Statistics(frozen=True)), units)
    equal(frozen.apply({}, x), nn.Sequential(Statistics(frozen=True))(x))


@pytest.mark.parametrize("norm", [nn.InstanceNorm1d(4, track_running_stats=True), nn.BatchNorm1d(4, momentum=None)])
def test_running_statistics_of_torchs_own_norms(norm: nn.Module) -> None:
    x = torch.randn(5, 4, 6)
    model = split(norm)
    _, new = model.apply(model.params, x, buffers=model.buffers)
    norm(x)
    equal(flat(new), dict(norm.named_buffers()))


def test_replaced_buffers_and_buffers_with_a_history() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x)
            self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
            return y - self.mean

    net = nn.Sequential(Average())
    for units in ((), "0"):
        model = split(net, units)
        params = tree.map(lambda leaf: leaf.clone().requires_grad_(), model.params)
        out, new = model.apply(params, torch.ones(3, 2), buffers=model.buffers)
        assert not new["0"]["mean"].requires_grad and out.requires_grad
        equal(new["0"]["mean"], 0.1 * net[0].lin(torch.ones(3, 2)).mean(0).detach())
