"""Derivatives whose units run as graphs: those of plain PyTorch, and the bits of units that run as they are."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P, tree
from fshard.errors import PlanError
from tests.transform import cases as cases
from tests.transform.test_tools import outer_loss, whole_gnvp, whole_hvp
from tests.transform.test_transforms import differences, mine

F, KEY = torch.func, fs.random.key(4)
X = cases.batch()
WIDTH, OPTIONS = 6, SimpleNamespace(gain=1.0)


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
    """A layer with dropout, which reads a global."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(self.turn(x))) * OPTIONS.gain


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
    return {"out": out**power, "most": out.argmax(1), "none": None, "power": power}


@fs.unit
def halves(p: Any, x: Tensor) -> Tensor:
    return x.unflatten(1, (3, 2))


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


def frozen(params: Any, x: Tensor) -> Tensor:
    return affine(params["b"], mixed(params["a"], x, power=1)["out"]).square().mean()


def remat(params: Any, x: Tensor) -> Tensor:
    return again(params["b"], again(params["a"], x)).square().mean()


class Program(NamedTuple):
    """A loss of parameters, and what is told of units that run as they are."""

    loss: Callable[[Any, Tensor], Tensor]
    model: Any
    told: str = ""
    trained: str = ".*"
    plain: bool = True


def leaves() -> Any:
    draw = torch.Generator().manual_seed(2)
    shapes = {"w": (WIDTH, WIDTH), "b": (WIDTH,)}
    return {name: {k: torch.randn(v, generator=draw).double() for k, v in shapes.items()} for name in "ab"}


def net(*layers: nn.Module) -> Program:
    torch.manual_seed(3)
    model = fs.split(nn.Sequential(*layers).double(), units=("*",))
    return Program(lambda p, x: model.apply(p, x).square().mean(), model, plain=isinstance(layers[0], Block))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "norms and attention": lambda: net(Block(), Block()),
    "dropout": lambda: net(Turn(), Turn()),
    "shared leaves": lambda: Program(shared, leaves()),
    "several results": lambda: Program(several, leaves()),
    "complex results": lambda: Program(waves, leaves()),
    "views": lambda: Program(viewed, leaves(), "it returns a view of an argument"),
    "a frozen unit": lambda: Program(frozen, leaves(), trained="b.*"),
    "remat": lambda: Program(remat, leaves()),
}


def rows() -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def same(one: Any, other: Any) -> bool:
    return all(map(torch.equal, tree.leaves(one), tree.leaves(other)))


def moving(whole: Any, plan: fs.Plan) -> Any:
    """A tree of whole tensors, with zeros for frozen leaves."""
    return tree.nest({path: x * plan.leaves[path].trainable for path, x in tree.paths(whole)})


def tools(program: Program, plan: fs.Plan, compile: str | None) -> dict[str, Any]:
    return {
        "hvp": fs.func.hvp(program.loss, plan, compile=compile),
        "resharded": fs.func.hvp(program.loss, plan, reshard=True, compile=compile),
        "jvp": fs.func.jvp(program.loss, plan, compile=compile),
        "gnvp": fs.func.gnvp(
            lambda p, x: program.loss(p, x).log1p(), lambda out, x: out.square(), plan, compile=compile
        ),
    }


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_give_the_bits_of_units_and_the_numbers_of_plain_pytorch(name: str) -> None:
    program, x = PROGRAMS[name](), rows()
    rules = [fs.Rule(program.trained, fs.fsdp("data")), fs.Rule(".*", fs.fsdp("data"), trainable=False)]
    plan = fs.make_plan(program.model, fs.make_mesh((1,), ("data",)), rules[: 1 + (program.trained != ".*")])
    whole = program.model if isinstance(program.model, dict) else program.model.params
    params, v = fs.shard(whole, plan), fs.shard(tree.map(torch.cos, whole), plan)
    eager, compiled = tools(program, plan, None), tools(program, plan, "fx")
    for tool, product in compiled.items():
        for _ in range(3):
            torch.manual_seed(7)
            got = product(params, v, x)
        torch.manual_seed(7)
        want = eager[tool](params, v, x)
        assert same(got, want), tool
        lines = [line for line in product.units.splitlines() if "as it is" in line]
        assert bool(lines) == bool(program.told), product.units
        assert all(program.told in line for line in lines) and "fx graph 0" in product.units
        assert product.record == product.schedule.ops
    if program.plain:
        slope = F.grad(lambda p: program.loss(p, x))
        found = fs.unshard(compiled["hvp"](params, v, x), plan)
        want = moving(F.vjp(slope, whole)[1](moving(tree.map(torch.cos, whole), plan))[0], plan)
        for a, b in zip(tree.leaves(found), tree.leaves(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(b.abs().max()))


def on_ranks(mesh: fs.Mesh) -> list[str]:
    """What differs from plain PyTorch, and from units that run as they are."""
    plan, x, found = cases.plan_on(mesh), mine(X, mesh), list[str]()
    params, v = fs.shard(cases.whole(), plan), fs.shard(cases.directions(), plan)
    plain = cases.reference(cases.weighted_loss)
    want = {
        "hvp": whole_hvp(cases.directions()),
        "gnvp": whole_gnvp(cases.directions()),
        "jvp": F.jvp(lambda p: plain(p, X), (cases.whole(),), (cases.directions(),)),
    }
    for name in want:
        both = []
        for compile in (None, "fx"):
            first = (cases.predict, outer_loss) if name == "gnvp" else (cases.weighted_loss,)
            tool = getattr(fs.func, name)(*first, plan, compile=compile)
            both.append([tool(params, v, x) for _ in range(2)][1])
        found += differences(both[1], want[name], plan, name)
        found += [] if same(*both) else [f"{name}: other bits"]
        found += [] if tool.units.count("fx graph") == 2 else [tool.units]
    probes = [fs.func.hessian_trace_samples(cases.weighted_loss, plan, 3, compile=how) for how in (None, "fx")]
    eager, compiled = [[probe(params, x, KEY) for _ in range(2)][1] for probe in probes]
    found += [] if same(eager, compiled) and probes[1].units.count("fx graph") == 2 else [probes[1].units]
    return found


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_graphs_on_several_ranks(ranks: int) -> None:
    mesh = fs.virtual_mesh((ranks,), ("shard",))
    assert not sum(mesh.run(on_ranks, mesh), [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hvp", "jvp"])
def test_inductor_gives_the_numbers_of_plain_pytorch(name: str) -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return affine(p["b"], affine(p["a"], x)).square().mean()

    whole, x = leaves(), rows()
    along, plan = tree.map(torch.cos, whole), fs.make_plan(whole, fs.make_mesh((1,), ("data",)), [(".*", P())])
    tool = getattr(fs.func, name)(loss, plan, compile="inductor")
    got = [tool(whole, along, x) for _ in range(3)][2]
    assert tool.units.count("inductor graph") == 2, tool.units
    want = {
        "hvp": lambda: F.vjp(F.grad(lambda p: loss(p, x)), whole)[1](along)[0],
        "jvp": lambda: F.jvp(lambda p: loss(p, x), (whole,), (along,)),
    }[name]()
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_graphs_see_that_what_units_read_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"gain": 2.0}

    @fs.unit
    def scaled(p: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ p["w"]) * numbers["gain"]

    handwritten = Program(lambda p, x: scaled(p["a"], x).square().mean(), leaves())
    changes = (
        (handwritten, lambda: numbers.update(gain=3.0)),
        (net(Turn()), lambda: monkeypatch.setattr(OPTIONS, "gain", 2.0)),
    )
    for one, change in changes:
        plan = fs.make_plan(one.model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
        params = fs.shard(one.model if isinstance(one.model, dict) else one.model.params, plan)
        products = [fs.func.hvp(one.loss, plan, compile=compile) for compile in (None, "fx")]
        found = []
        for _ in range(2):
            for product in products:
                torch.manual_seed(1)
                found.append(product(params, params, rows()))
            change()
        assert same(found[0], found[1]) and same(found[2], found[3]) and not same(found[1], found[3])
        assert products[1].units.count("fx graph") == 2


def newton(plan: fs.Plan, compile: str | None) -> tuple[Any, Any]:
    """The parameters after three steps that take a product each, and the step."""
    gradient = fs.value_and_grad(cases.weighted_loss, plan, compile=compile)
    product = fs.func.hvp(cases.weighted_loss, plan, compile=compile)
    opt = fs.optim.sgd(0.01)
    update = fs.make_update(opt, plan)

    def advanced(state: Any, batch: Any) -> Any:
        loss, g = gradient(state, batch)
        return update(state, fs.tree.add(g, product(state.params, g, batch), -0.1))[0], loss

    state, step = fs.init_state(plan, opt, params=cases.whole()), fs.make_step(advanced, plan)
    for _ in range(3):
        state, _ = step(state, X)
    return state.params, step


def test_passes_of_a_step_function_run_graphs() -> None:
    plan = cases.plan_on(fs.make_mesh((1,), ("shard",)))
    (want, _), (got, step) = newton(plan, None), newton(plan, "fx")
    assert same(got, want) and step.record == step.schedule.ops
    assert step.units.count("fx graph") == 4


def test_backends_are_checked_and_calls_without_a_schedule_say_so() -> None:
    plan = cases.plan_on(fs.make_mesh((1,), ("shard",)))
    for make in (fs.func.hvp, fs.func.jvp):
        with pytest.raises(PlanError, match="compile='no' must be None, 'fx' or 'inductor'"):
            make(cases.weighted_loss, plan, compile="no")
    params, v = fs.shard(cases.whole(), plan), fs.shard(cases.directions(), plan)
    product = fs.func.hvp(lambda p, x: cases.mean_loss(p, x) * float(x["w"].sum()), plan, compile="fx")
    product(params, v, X)
    with pytest.raises(PlanError, match="no schedule: .* depends on values"):
        print(product.units)
