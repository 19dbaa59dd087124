"""Gradients of samples whose units run as graphs: the bits of units that run as they are, plain PyTorch's numbers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import PlanError
from tests.shared.workers import Pools
from tests.transform.test_compiled_products import PROGRAMS, leaves, rows, same
from tests.transform.test_ghost_norms import SPLITS, one_by_one, words
from tests.transform.test_sample_layers import MODULES, values_for

VIEW = "it returns a view of an argument"
Case = tuple[Any, Callable[[Any, Any], Any], Any]


def of_layers(name: str) -> Case:
    """A model, its loss and a batch, of layers of torch.nn."""
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make().double()
    model = fs.split(module if isinstance(module, nn.Sequential) else nn.Sequential(module), units=("*",))
    return model, lambda p, x: model.apply(p, x).square().mean(), values_for(module, shape)


def of_program(name: str) -> Case:
    """The same of a program of units."""
    program = PROGRAMS[name]()
    return program.model, program.loss, rows()


@fs.unit
def both(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results, of two leaves."""
    return torch.tanh(x @ p["w"]), x * p["b"]


def one_read(params: Any, x: Tensor) -> Tensor:
    """A loss that reads a result less of one of two calls."""
    first, second = both(params["a"], x)
    return (first * both(params["a"], second)[0]).mean() + both(params["b"], first)[1].square().mean()


CASES: dict[str, Callable[[], Case]] = {
    **{name: lambda name=name: of_layers(name) for name in ("transformer", "in place", "one embedding", "bag of max")},
    **{name: lambda name=name: of_program(name) for name in PROGRAMS if name != "dropout"},
    "words": words,
    "tied": lambda: words(tied=True),
    "a result less": lambda: (leaves(), one_read, rows()),
}


def wrong(name: str, reshard: bool | None = True) -> list[str]:
    """On a rank: what differs from plain PyTorch, and from units that run as they are."""
    model, loss, whole = CASES[name]()
    trained = "b.*" if name == "a frozen unit" else ".*"
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        rules = [fs.Rule(trained, fs.fsdp("shard")), fs.Rule(".*", fs.fsdp("shard"), trainable=False)]
        plan = fs.make_plan(model, mesh, rules[: 1 + (trained != ".*")])
        every = getattr(model, "params", model)
        mine = lambda x: x.tensor_split(SPLITS[mesh.size])[mesh.rank]  # noqa: E731 - ranks have unequal rows
        params, x = fs.shard(every, plan), tree.map(mine, whole)
        want = {path: g for path, g in one_by_one(loss, every, whole).items() if plan.leaves[path].trainable}
        norms = sum(g.reshape(len(g), -1).square().sum(1) for g in want.values()).sqrt()  # type: ignore[union-attr]
        limit = norms.median().item()
        tools = []
        for how in (None, "fx"):
            samples = fs.func.per_sample_grad(loss, plan, reshard=reshard, compile=how)
            clipped = fs.func.clipped_grad(loss, plan, limit, microbatch=2, reshard=reshard, compile=how)
            tools.append((samples, clipped, [(samples(params, x), *clipped(params, x)) for _ in range(2)]))
        (_, _, eager), (samples, clipped, graphs) = tools
        out = ["other bits"] * (not same(eager, graphs)) + ["again"] * (not same(*graphs))
        found, total, lengths = graphs[1]
        summed = dict(tree.paths(fs.unshard(total, plan)))
        pairs = {f"rows of {path}": (g, mine(want[path])) for path, g in tree.paths(found)} | {
            path: (summed[path], torch.tensordot((limit / norms).clamp(max=1), g, 1)) for path, g in want.items()
        }
        pairs["norms"] = lengths, mine(norms)
        out += [name for name, (a, b) in pairs.items() if not (a - b).abs().max() <= 1e-12 * (b.abs().max() + 1e-3)]
        for tool in (samples, clipped):
            as_it_is = [line for line in tool.units.splitlines() if "as it is" in line]
            out += as_it_is if name != "views" or VIEW not in "".join(as_it_is) else []
            out += [tool.units] * ("fx graph 0" not in tool.units)
            out += ["record"] * (tool.record != tool.schedule.ops)
        return out


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", CASES)
def test_graphs_give_the_bits_of_units_and_the_numbers_of_plain_pytorch(name: str) -> None:
    assert not wrong(name)


@pytest.mark.parametrize("reshard", [None, True, False])
def test_graphs_on_two_ranks(reshard: bool | None) -> None:
    assert not sum(fs.virtual_mesh((2,), ("any",)).run(wrong, "tied", reshard), [])


def test_graphs_on_real_ranks(pool: Pools) -> None:
    assert not sum(pool(2).run(wrong, "tied"), [])


OPTIONS = SimpleNamespace(gain=1.0)


@fs.unit
def scaled(p: Any, x: Tensor) -> Tensor:
    """A layer that reads a value beside its arguments."""
    return torch.tanh(x @ p["w"]) * OPTIONS.gain


def test_graphs_see_that_what_units_read_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leaves()
    plan = fs.make_plan(whole, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    params, found = fs.shard(whole, plan), []
    tools = [fs.func.clipped_grad(lambda p, x: scaled(p["a"], x).mean(), plan, 1.0, compile=c) for c in (None, "fx")]
    for gain in (1.0, 0.5):
        monkeypatch.setattr(OPTIONS, "gain", gain)
        found += [tool(params, rows()) for tool in tools]
    assert same(found[0], found[1]) and same(found[2], found[3]) and not same(found[1], found[3])
    assert tools[1].units.count("fx graph") == 2


@pytest.mark.slow
def test_graphs_of_inductor() -> None:
    whole, x = leaves(), rows()
    plan = fs.make_plan(whole, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    plain, compiled = (
        fs.func.clipped_grad(lambda p, x: scaled(p["a"], x).mean(), plan, 0.1, compile=how)
        for how in (None, "inductor")
    )
    (want, lengths), (found, norms) = [tool(fs.shard(whole, plan), x) for tool in (plain, compiled)]
    for a, b in zip(tree.leaves((found, norms)), tree.leaves((want, lengths)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert "inductor graph 0" in compiled.units


def test_backends_are_checked() -> None:
    plan = fs.make_plan(leaves(), fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    for make in (
        lambda: fs.func.per_sample_grad(one_read, plan, compile="no"),
        lambda: fs.func.clipped_grad(one_read, plan, 1.0, compile="no"),
    ):
        with pytest.raises(PlanError, match="compile='no' must be None, 'fx' or 'inductor'"):
            make()
