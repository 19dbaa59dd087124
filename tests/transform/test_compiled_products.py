"""Derivatives whose units run as graphs: those of plain PyTorch, and the bits of units that run as they are."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import PlanError
from tests.shared.virtual import Job
from tests.transform import cases as cases
from tests.transform.test_tools import outer_loss, whole_gnvp, whole_hvp
from tests.transform.test_transforms import FLAT, differences, mine

F = torch.func
X = cases.batch()
WIDTH = 6


class Block(nn.Module):
    """Operators whose derivatives PyTorch gets wrong or has not: a norm and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.gain * nn.functional.gelu(self.out(mixed.transpose(0, 1).flatten(1)))


class Turn(nn.Module):
    """A layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(self.turn(x)))


@fs.unit
def affine(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


@fs.unit
def again(p: Any, x: Tensor) -> Tensor:
    return fs.remat(lambda w, x: torch.sin(x @ w))(p["w"], x) + p["b"]


@fs.unit
def wave(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.fft.fft(torch.tanh(x @ p["w"])), x @ p["w"] + p["b"]


@fs.unit
def mixed(p: Any, x: Tensor, *, power: int) -> dict[str, Any]:
    out = x @ p["w"] * p["b"].cos()
    return {"out": out**power, "most": out.argmax(1), "power": power}


@fs.unit
def halves(p: Any, x: Tensor) -> Tensor:
    return x[:, :3] if len(x) > 99 else (x * 1.0 if p is None else x).unflatten(1, (3, 2))


def shared(params: Any, x: Tensor) -> Tensor:
    x = affine(params["a"], affine(params["a"], x))
    return affine({"w": params["a"]["w"], "b": params["b"]["b"]}, x).square().mean()


def several(params: Any, x: Tensor) -> Tensor:
    one = mixed(params["a"], x, power=2)
    two = mixed(params["b"], one["out"] + x, power=one["power"] + 1)
    return (two["out"] * (1 + two["most"].unsqueeze(1))).square().mean()


def waves(params: Any, x: Tensor) -> Tensor:
    turned, plain = wave(params["a"], x)
    return (affine(params["b"], plain) + (turned * turned).imag).square().mean()


def viewed(params: Any, x: Tensor) -> Tensor:
    return (affine(params["b"], affine(params["a"], halves(params["a"], x).flatten(1))) + 1).log().mean()


def remat(params: Any, x: Tensor) -> Tensor:
    return again(params["b"], again(params["a"], x)).square().mean()


class Program(NamedTuple):
    """A loss of parameters, and what is told of units that run as they are."""

    loss: Callable[[Any, Tensor], Tensor]
    model: Any
    told: str = ""
    plain: bool = True


def leaves(frozen: str = "") -> Any:
    draw = torch.Generator().manual_seed(2)
    shapes = {"w": (WIDTH, WIDTH), "b": (WIDTH,)}
    made = {name: {k: torch.randn(v, generator=draw).double() for k, v in shapes.items()} for name in "ab"}
    return made


def of_modules(kind: type[nn.Module]) -> Program:
    torch.manual_seed(3)
    model = fs.split(nn.Sequential(kind(), kind(), kind()).double(), units=("*",))
    return Program(lambda p, x: model.apply(p, x).square().mean(), model, plain=kind is not Turn)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "norms and attention": lambda: of_modules(Block),
    "dropout": lambda: of_modules(Turn),
    "shared leaves": lambda: Program(shared, leaves()),
    "several results": lambda: Program(several, leaves()),
    "complex results": lambda: Program(waves, leaves()),
    "views": lambda: Program(viewed, leaves(), "it returns a view of an argument"),
    "remat": lambda: Program(remat, leaves()),
}


def rows() -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def tools(program: Program, plan: fs.Plan, compile: str | None) -> dict[str, Any]:
    return {
        "hvp": fs.func.hvp(program.loss, plan, compile=compile),
        "resharded": fs.func.hvp(program.loss, plan, reshard=True, compile=compile),
        "jvp": fs.func.jvp(program.loss, plan, compile=compile),
        "gnvp": fs.func.gnvp(lambda p, x: program.loss(p, x).exp(), lambda out, x: out.square(), plan, compile=compile),
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_give_the_bits_of_units_and_the_numbers_of_plain_pytorch(name: str) -> None:
    program, x = PROGRAMS[name](), rows()
    plan = fs.make_plan(program.model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    whole = program.model if isinstance(program.model, dict) else program.model.params
    params, v = fs.shard(whole, plan), fs.shard(tree.map(torch.cos, whole), plan)
    eager, compiled = tools(program, plan, None), tools(program, plan, "fx")
    for tool, product in compiled.items():
        for _ in range(3):
            torch.manual_seed(7)
            got = product(params, v, x)
        torch.manual_seed(7)
        want = eager[tool](params, v, x)
        assert all(map(torch.equal, tree.leaves(got), tree.leaves(want))), tool
        lines = [line for line in product.units.splitlines() if "as it is" in line]
        assert bool(lines) == bool(program.told), product.units
        assert all(program.told in line for line in lines) and "fx graph 0" in product.units
        assert product.record == product.schedule.ops
    if program.plain:
        slope = F.grad(lambda p: program.loss(p, x))
        want = F.vjp(slope, whole)[1](tree.map(torch.cos, whole))[0]
        for a, b in zip(tree.leaves(fs.unshard(compiled["hvp"](params, v, x), plan)), tree.leaves(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(b.abs().max()))
