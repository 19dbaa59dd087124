"""Values that units read beside their arguments: from the stage that made them, or an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.errors import PlanError

Loss = Callable[[Any, Tensor], Tensor]


def leaves() -> dict[str, Any]:
    """Four matrices in float64."""
    made = torch.Generator().manual_seed(0)
    return {str(i): {"w": torch.randn(6, 6, generator=made, dtype=torch.float64) / 2} for i in range(4)}


def layers(fn: Callable[..., Tensor], p: Any, x: Tensor) -> Tensor:
    """The layers in a row."""
    for i in range(4):
        x = fn(p[str(i)], x)
    return x


def reads_code_between() -> Loss:
    """Layers read what the code between them has put into a list, computed of the first one's output."""
    held = list[Tensor]()
    first = fs.unit(lambda p, x: torch.tanh(x @ p["w"]))
    layer = fs.unit(lambda p, x: torch.tanh(x @ p["w"]) + held[0])

    def loss(p: Any, x: Tensor) -> Tensor:
        x = first(p["0"], x)
        held[:] = [2 * x]
        for i in range(1, 4):
            x = layer(p[str(i)], x)
        return x.square().mean()

    return loss


def reads_another_call() -> Loss:
    """Each layer reads what is inside of the one before."""
    held = list[Tensor]()

    def fn(p: Any, x: Tensor) -> Tensor:
        h = x @ p["w"] + sum(held)
        held[:] = [h.detach()]
        return x + torch.tanh(h)

    layer = fs.unit(fn)

    def loss(p: Any, x: Tensor) -> Tensor:
        held.clear()
        return layers(layer, p, x).square().mean()

    return loss


def counts_in_its_closure() -> Loss:
    """The number of a layer is in no argument."""
    count = 0

    def fn(p: Any, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x + count * torch.tanh(x @ p["w"])

    layer = fs.unit(fn)

    def loss(p: Any, x: Tensor) -> Tensor:
        nonlocal count
        count = 0
        return layers(layer, p, x).square().mean()

    return loss


def counts_in_an_argument() -> Loss:
    """The number of a layer is in a dict."""

    def fn(p: Any, x: Tensor, told: dict[str, int]) -> Tensor:
        told["n"] += 1
        return x + told["n"] * torch.tanh(x @ p["w"])

    layer = fs.unit(fn)

    def loss(p: Any, x: Tensor) -> Tensor:
        told = {"n": 0}
        return layers(lambda q, y: layer(q, y, told), p, x).square().mean()

    return loss


def trained(mesh: Any, make: Callable[[], Loss], stages: Any) -> dict[str, Tensor]:
    """The leaves after two steps."""
    plan = fs.make_plan(leaves(), mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"), units=["*"], stages=stages)
    opt = fs.optim.sgd(0.05)
    step, state = fs.make_train_step(make(), opt, plan, accumulate=2), fs.init_state(plan, opt, params=leaves())
    for i in range(2):
        made = torch.Generator().manual_seed(i)
        state, _ = step(state, plan.local_batch(torch.randn(8, 6, generator=made, dtype=torch.float64)))
    return dict(tree.paths(fs.unshard(fs.settle(state).params, plan)))


def staged(make: Callable[[], Loss], ranks: int = 2) -> dict[str, Tensor]:
    """The same with a stage on each rank."""
    mesh = fs.virtual_mesh((ranks, 1), ("stage", "data"))
    found: dict[str, Tensor] = mesh.run(trained, mesh, make, fs.Stages("stage"))[0]
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_code_between_units_hands_over_travels(ranks: int) -> None:
    one = fs.virtual_mesh((1,), ("data",))
    plain = one.run(trained, one, reads_code_between, None)[0]
    found = staged(reads_code_between, ranks)
    assert max(float((found[path] - leaf).abs().max()) for path, leaf in plain.items()) < 1e-12


@pytest.mark.parametrize(
    "make, text",
    [
        (reads_another_call, r"from inside of these units:\n  fn\(1\.w\)\nReturn them"),
        (counts_in_its_closure, r"unit fn\(0\.w\) changes a number or text in its arguments or its closure"),
        (counts_in_an_argument, r"unit fn\(0\.w\) changes a number or text in its arguments or its closure"),
    ],
)
def test_what_only_the_rank_of_a_unit_would_see_is_an_error(make: Callable[[], Loss], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        staged(make)
