"""In debug mode an error about numbers that are not finite names the operator that first made one, and its unit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.errors import NonFiniteError


class Block(nn.Module):
    """A layer and something that may not be finite."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4, bias=False), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x))


def masked(x: Tensor) -> Tensor:
    """Attention's masks are infinite, and no fault."""
    return torch.softmax(x.masked_fill(torch.arange(4) > 2, -torch.inf), -1)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "a logarithm": (lambda x: (x - x).log(), [r"inf comes from torch.ops.aten.log.default of \[2, 4\] in unit 1"]),
    "a root": (lambda x: (-(x**2) - 1).sqrt(), [r"nan comes from torch.ops.aten.sqrt.default of .* in unit 1"]),
    "a quotient in place": (lambda x: x.clone().div_(0.0), [r"inf comes from torch.ops.aten.div_.Tensor .* in unit 1"]),
    "a backward": (lambda x: (x - x).sqrt(), [r"comes from torch.ops.aten.div.Tensor of .* in the backward of unit 1"]),
    "after a mask": (lambda x: masked(x) / 0.0, [r"inf comes from torch.ops.aten.div.Tensor of \[2, 4\] in unit 1"]),
}


@pytest.fixture(params=["train", "parts"])
def train(request: Any) -> Any:
    """A step in debug mode on two ranks, and its first state."""

    def made(
        last: Callable[[Tensor], Tensor], outside: Callable[[Tensor], Tensor], **options: Any
    ) -> Callable[[], Any]:
        model = fs.split(nn.Sequential(Block(masked), Block(last)), units=["0", "1"])
        mesh = fs.virtual_mesh((2,), ("data",))
        plan, opt = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))]), fs.optim.sgd(0.1)

        def loss(params: Any, batch: Any) -> Tensor:
            return outside(model.apply(params, batch)).mean()

        if request.param == "train":
            step: Any = fs.make_train_step(loss, opt, plan, **options)
        else:
            grad, update = fs.value_and_grad(loss, plan), fs.make_update(opt, plan)

            def both(state: Any, batch: Any) -> Any:
                value, grads = grad(state.params, batch)
                state, _ = update(state, grads)
                return state, value

            step = fs.make_step(both, plan, **options)
        state = fs.init_state(plan, opt)
        return lambda: step(state, torch.arange(16.0).view(4, 4))

    return made


@pytest.mark.parametrize("case", CASES)
def test_the_first_operator_is_named(train: Any, case: str) -> None:
    last, matches = CASES[case]
    call = train(last, lambda x: x, debug=True)
    for match in matches:
        with pytest.raises(NonFiniteError, match=rf"(?s)rank 0.*{match}.*rank 1.*{match}"):
            call()


def test_code_outside_of_units_is_named(train: Any) -> None:
    call = train(masked, lambda x: (x - x).log() * 0, debug=True)
    with pytest.raises(NonFiniteError, match=r"inf comes from torch.ops.aten.log.default .* in code outside of units"):
        call()
    with pytest.raises(NonFiniteError, match=r"nan comes from torch.ops.aten.mul.Tensor .* in code outside of units"):
        call()


def test_forward_derivatives_of_constants_are_not_looked_into() -> None:
    plan = fs.make_plan({"w": torch.ones(3)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])

    def slope(p: Any, x: Tensor) -> Tensor:  # the tangent of the weight is a tensor of zeros without memory
        of = lambda x: nn.functional.linear(x, p["w"][None]).square().sum()  # noqa: E731
        return torch.func.jvp(of, (x,), (torch.ones_like(x),))[1]

    step = fs.make_train_step(slope, fs.optim.sgd(0.1), plan, debug=True)
    state = fs.init_state(plan, fs.optim.sgd(0.1), params={"w": torch.ones(3)})
    assert step(state, torch.ones(2, 3))[1].loss == 36


def test_nothing_is_looked_for_without_debug_mode(train: Any) -> None:
    with pytest.raises(NonFiniteError) as caught:
        train(lambda x: (x - x).log(), lambda x: x)()
    assert "torch.ops" not in str(caught.value)
