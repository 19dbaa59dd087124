"""A backward in two parts gives the gradients of one, bit for bit, and computes nothing twice."""

import pytest
import torch
from torch import Tensor, nn

from fshard.pipeline.parted_backward import PartedBackward


class Double(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: object, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)  # type: ignore[attr-defined]
        return 2 * x * w

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * grad * w, (2 * grad * x).sum(0)


class Net(nn.Module):
    """Layers with a leaf that is read twice, one that no input reaches, and one behind the last branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)
        self.own, self.alone = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.second(torch.nn.functional.gelu(self.norm(self.first(x))))
        return Double.apply(hidden + x, self.own) + self.own, self.alone * self.own.sum()


@pytest.mark.parametrize("inputs", [True, False])
def test_both_parts_give_the_gradients_of_one_backward(inputs: bool) -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(4, 6, dtype=torch.double).requires_grad_(inputs)
    values = net(x)
    grads = [torch.randn_like(value) for value in values]
    leaves = list(net.parameters())
    want = torch.autograd.grad(values, [*leaves, *([x] if inputs else [])], grads, retain_graph=True)
    parted = PartedBackward(values, grads, [x], leaves)
    parted.of_inputs()
    assert all(leaf.grad is None for leaf in leaves)
    if inputs:
        assert x.grad is not None and torch.equal(x.grad, want[-1])
        parted.of_leaves({id(leaf): leaf for leaf in net.second.parameters()})
        assert net.second.weight.grad is not None and net.first.weight.grad is None
    parted.of_leaves()
    for leaf, grad in zip(leaves, want, strict=False):
        assert leaf.grad is not None
        # Of a leaf with several branches the sum is taken in another order.
        assert torch.allclose(leaf.grad, grad) if leaf is net.own else torch.equal(leaf.grad, grad)


def test_no_node_of_the_first_part_runs_again() -> None:
    calls: list[str] = []
    x, net = torch.randn(2, 4).requires_grad_(), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    hidden = [x]
    for layer in net:
        hidden.append(layer(hidden[-1]))
    hidden[2].grad_fn.register_hook(lambda *grads: calls.append("tanh"))  # type: ignore[union-attr]
    parted = PartedBackward([hidden[-1]], [torch.ones(2, 4)], [x], list(net.parameters()))
    parted.of_inputs()
    parted.of_leaves()
    assert calls == ["tanh"]
