"""Tensors in dataclasses and mappings of other libraries: they are leaves of trees wherever they lie."""

import copy
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from tests.shared import zoo
from tests.shared.workers import Pools


@dataclass
class Output(OrderedDict[str, Any]):
    """A dataclass that is a mapping, too, and has its fields twice, like the outputs of transformers."""

    hidden: Tensor | None = None
    extra: Any = None

    def __post_init__(self) -> None:
        for name in ("hidden", "extra"):
            if getattr(self, name) is not None:
                super().__setitem__(name, getattr(self, name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclass(frozen=True, slots=True)
class Pair:
    """A frozen dataclass without a dict."""

    first: Any
    second: Any = 3


class Loose(dict[str, Any]):
    """A dict of another class."""


X, Y = torch.zeros(2), torch.ones(3)


def test_tensors_in_objects_are_leaves() -> None:
    whole = {"o": Output(X, (Y, None)), "u": UserDict(a=X), "p": Pair({"q": Y}), "l": Loose(z=[X])}
    leaves, spec = tree.flatten(whole)
    assert [x is y for x, y in zip(leaves, [X, Y, None, X, Y, 3, X], strict=False)].count(True) == 4  # sorted by key
    assert sum(isinstance(x, Tensor) for x in leaves) == 5 and tree.leaves(whole) == leaves
    assert tree.names(whole, "b") == [
        "b['l']['z'][0]",
        "b['o']['hidden']",
        "b['o']['extra'][0]",
        "b['o']['extra'][1]",
        "b['p'].first['q']",
        "b['p'].second",
        "b['u']['a']",
    ]
    assert tree.spread({"l": 1, "o": 2, "p": 3, "u": 4}, whole) == [1, 2, 2, 2, 3, 3, 4]
    again = tree.unflatten(spec, leaves)
    assert type(again["o"]) is Output and again["o"].hidden is X and again["o"]["hidden"] is X
    assert again["p"].first["q"] is Y and again["p"].second == 3 and type(again["l"]) is Loose
    assert tree.flatten(again)[1] == spec and hash(tree.flatten(again)[1]) == hash(spec)
    assert whole["o"].hidden is X  # nothing was changed
    doubled = tree.map(lambda a, b: a + b if isinstance(a, Tensor) else a, whole, again)
    assert torch.equal(doubled["p"].first["q"], 2 * Y) and torch.equal(doubled["u"]["a"], X)


def test_objects_without_tensors_stay_whole() -> None:
    pair, mean = Pair(1), fs.Mean(X.sum(), 2)
    assert tree.leaves([pair, mean, UserDict(a=1), Pair]) == [pair, mean, UserDict(a=1), Pair]


def test_structures_of_different_objects_differ() -> None:
    specs = [tree.flatten(x)[1] for x in (Pair(X), Pair((X,)), UserDict(first=X), Loose(first=X), Loose(second=X), [X])]
    assert len(set(specs)) == len(specs) and len(set(map(str, specs))) == len(specs)


nested = st.recursive(
    st.sampled_from([X, Y, None, 1, "a"]),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.tuples(below, below),
        st.dictionaries(st.sampled_from("abc"), below, max_size=3),
        st.dictionaries(st.sampled_from("abc"), below, max_size=3).map(UserDict),
        st.dictionaries(st.sampled_from("abc"), below, max_size=3).map(Loose),
        st.builds(Pair, below, below),
        st.builds(Output, st.sampled_from([X, Y]), below),
    ),
    max_leaves=8,
)


@given(nested)
def test_every_nesting_survives(value: Any) -> None:
    leaves, spec = tree.flatten(value)
    again = tree.unflatten(spec, leaves)
    assert tree.flatten(again)[1] == spec
    assert all(a is b for a, b in zip(tree.leaves(again), leaves, strict=True))
    assert len(tree.names(value, "v")) == len(leaves) == len(tree.spread(0, value))
    assert [id(x) for x in _tensors(value)] == [id(x) for x in _tensors(again)]
    assert sorted(id(x) for x in leaves if isinstance(x, Tensor)) == sorted(id(x) for x in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (dict, UserDict)):
        return [x for part in value.values() for x in _tensors(part)]
    if isinstance(value, Pair):
        return [*_tensors(value.first), *_tensors(value.second)]
    return [x for part in value for x in _tensors(part)] if isinstance(value, (list, tuple)) else []


class Block(nn.Module):
    """Takes and returns an object, of which two parts go on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, given: Output, pair: Pair | None = None) -> Output:
        """A residual map, and what was before."""
        assert given.hidden is not None
        x = given.hidden if pair is None else given.hidden + pair.first
        return Output(hidden=x + self.map(self.norm(x)).tanh(), extra=Loose(before=x / 4))


class Stack(nn.Module):
    """Blocks that pass objects on."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x: Tensor) -> Pair:
        """Each block gets the output of the one before, and what that one got."""
        state, pair = Output(hidden=self.inp(x)), None
        for block in self.blocks:
            state = block(state, pair=pair)
            pair = Pair(state.extra["before"], "plain")
        return Pair(self.out(state.hidden))


def train(compile: str | None, accumulate: int) -> list[str]:
    """On each rank: what differs from plain PyTorch."""
    torch.manual_seed(5)
    module = Stack()
    twin, problems = copy.deepcopy(module), []
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        model = fs.split(module, units="auto")
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))], batch=fs.P("shard"))
        opt = fs.optim.sgd(0.05)
        state = fs.init_state(plan, opt, params=tree.map(torch.clone, model.params))

        def loss_fn(params: Any, batch: UserDict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
            assert batch["x"].shape[0] == 12 // mesh.size // accumulate
            out = model.apply(params, batch["x"])
            return out.first.square().mean(), {"out": out}

        step = fs.make_train_step(loss_fn, opt, plan, compile=compile, accumulate=accumulate, debug=True)
        rule = torch.optim.SGD(twin.parameters(), lr=0.05)
        for number in range(3):
            x = torch.randn(12, 6, generator=torch.Generator().manual_seed(number))
            state, metrics = step(state, UserDict(zoo.cut({"x": x}, mesh.rank, mesh.size)))
            plain = twin(x).first.square().mean()
            rule.zero_grad()
            plain.backward()
            rule.step()
            if abs(metrics.loss.item() - plain.item()) > 1e-6:
                problems.append(f"step {number}: {metrics.loss.item()}, plain {plain.item()}")
            if tuple(step.record) != step.schedule.ops:
                problems.append(f"step {number} left its schedule")
            assert isinstance(metrics.aux["out"], Pair) and not metrics.aux["out"].first.requires_grad
        if compile and "as it is" in step.units:
            problems.append(step.units)
        whole = dict(tree.paths(fs.unshard(state.params, plan)))
    return problems + [path for path, x in twin.named_parameters() if not torch.allclose(whole[path], x, atol=1e-6)]


@pytest.mark.parametrize(("compile", "accumulate"), [(None, 1), (None, 2), ("fx", 1)])
def test_units_pass_objects_on(pool: Pools, compile: str | None, accumulate: int) -> None:
    assert pool(2).run(train, compile, accumulate) == [[], []]
