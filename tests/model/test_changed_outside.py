"""Units whose modules code outside of them changes: the value of plain PyTorch, or an error that names all."""

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs


class Block(nn.Module):
    """A unit with children, a list of them, plain attributes and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.act, self.more = nn.Linear(4, 4), nn.Tanh(), nn.ModuleList([nn.Linear(4, 4)])
        self.scale, self.terms = 1.0, [0.5]
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """All that can be changed takes part."""
        x = self.act(self.lin(x)) * self.scale + sum(self.terms) + getattr(self, "extra", 0.0)
        for layer in self.more:
            x = layer(x)
        return x + self.shift


class Net(nn.Module):
    """Two units; the first may hold the second in a list, which registers nothing."""

    def __init__(self, change: Callable[[Any], Any], place: str) -> None:
        super().__init__()
        self.first, self.block = First(), Block()
        self.first.others = [self.block] if place == "unit" else []
        self.change, self.place = change, place
        self.first.change = change

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        if self.place == "around":
            self.change(self.block)
        return self.block(self.first(x)).square().mean()


class First(nn.Module):
    """A unit that may change another one."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        for other in self.others:
            self.change(other)
        return self.lin(x)


KINDS: dict[str, Callable[[Any], Any]] = {
    "replace": lambda b: setattr(b, "act", nn.ReLU()),
    "append": lambda b: b.more.append(nn.ReLU()),
    "add_module": lambda b: b.add_module("act", nn.Sigmoid()),
    "new list": lambda b: setattr(b, "more", nn.ModuleList([b.more[0], b.more[0]])),
    "item": lambda b: b.more.__setitem__(0, nn.Identity()),
    "pop": lambda b: b.more.pop(0) if len(b.more) else None,
    "delete": lambda b: delattr(b.lin, "bias") or setattr(b.lin, "bias", None),
    "wrap": lambda b: setattr(b, "act", nn.Sequential(b.act, nn.ReLU())),
    "parameter": lambda b: setattr(b.lin, "weight", nn.Parameter(torch.ones(4, 4))),
    "no bias": lambda b: setattr(b.lin, "bias", None),
    "register_parameter": lambda b: b.register_parameter("extra", nn.Parameter(torch.ones(4))),
    "buffer": lambda b: b.register_buffer("extra", torch.ones(4)),
    "other buffer": lambda b: setattr(b, "shift", torch.zeros(4)),
    "attribute": lambda b: setattr(b, "scale", 3.0),
    "new attribute": lambda b: setattr(b, "extra", 2.0),
    "list": lambda b: b.terms.append(1.0),
    "tie": lambda b: setattr(b.lin, "weight", b.more[0].weight),
    "freeze": lambda b: b.lin.weight.requires_grad_(False),
    "eval": lambda b: b.eval(),
}
PLACES = ("around", "unit", "before", "between", "loss")
SEEN = ("around", "unit")
"""The places that are part of the module: others change the user's own module, and a model is as it was at split."""

CASES = list(itertools.product(KINDS, PLACES, (None, "fx")))


def losses(kind: str, place: str, compiled: Any) -> tuple[list[float], list[float]]:
    """The losses of two steps, and those of plain PyTorch, whose calls each start from the module as it was."""
    torch.manual_seed(0)
    change = KINDS[kind]
    net = Net(change, place)
    x, kept = torch.randn(4, 4), copy.deepcopy(net)
    model = fs.split(net, ["first", "block"])
    plan = fs.make_plan(model, fs.virtual_mesh((2,), ("data",)), [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.sgd(0.1)

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        if place == "loss":
            change(net.block)
        out: Tensor = model.apply(params, batch, buffers=model.buffers)[0]
        return out

    if place == "before":
        change(net.block)
    step, state = fs.make_train_step(loss_fn, opt, plan, compile=compiled), None
    state = fs.init_state(plan, opt, params=model.params)
    found, wanted = [], []
    for _ in range(2):
        state, metrics = step(state, x)
        found.append(metrics.loss.item())
        used = copy.deepcopy(kept)
        loss = used(x)
        wanted.append(loss.item())
        own = {name: p for name, p in used.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
        with torch.no_grad():
            named = dict(kept.named_parameters())
            for name, grad in zip(own, grads, strict=True):
                if grad is not None and name in named:
                    named[name] -= 0.1 * grad
        if place == "between":
            change(net.block)
    return found, wanted


def check(kind: str, place: str, compiled: Any) -> bool:
    """The losses are those of plain PyTorch, or an error names the unit or the leaf, and what to do."""
    try:
        found, wanted = losses(kind, place, compiled)
    except fs.errors.UnitError as error:
        assert place in SEEN, f"{kind}, {place}: {error}"
        assert "block" in str(error) or "the module" in str(error), error
        assert ":" in str(error), error
        return False
    assert found == pytest.approx(wanted, rel=1e-5), f"{kind}, {place}, compile={compiled}"
    return True


@pytest.mark.long
def test_a_changed_unit_gives_the_value_of_plain_pytorch_or_is_refused() -> None:
    rng = random.Random(7)
    around = [case for case in CASES if case[1] == "around" and case[2] is None]
    for case in [*around, *rng.sample([case for case in CASES if case not in around], 16)]:
        check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_change_in_every_place_is_seen_or_refused(case: tuple[str, str, Any]) -> None:
    check(*case)


@pytest.mark.parametrize("kind", ["replace", "append", "parameter", "register_parameter", "wrap"])
def test_other_modules_and_parameters_are_refused_by_name(kind: str) -> None:
    net = Net(KINDS[kind], "around")
    model = fs.split(net, ["first", "block"])
    says = r"code outside of unit block replaced, added or removed block\..*before fs\.split"
    with pytest.raises(fs.errors.UnitError, match=says):
        model.apply(model.params, torch.ones(2, 4))


def test_they_are_seen_where_no_unit_contains_them() -> None:
    net = Net(KINDS["wrap"], "around")
    model = fs.split(net, ["first"])
    torch.testing.assert_close(model.apply(model.params, torch.ones(2, 4)), copy.deepcopy(net)(torch.ones(2, 4)))


def test_what_is_frozen_after_split_is_frozen_in_the_plan() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = fs.split(net, "*")
    net[0].requires_grad_(False)
    plan = fs.make_plan(model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    assert [leaf.path for leaf in plan.leaves.values() if leaf.trainable] == ["1.weight", "1.bias"]
    again = copy.deepcopy(model)
    del net
    assert again.frozen == {"0.weight", "0.bias"}


class Heated(nn.Module):
    """A layer that reads a number, a configuration and a rate of dropout, which users change while they train."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear, self.drop, self.heat, self.config = nn.Linear(4, 4), nn.Dropout(0.1), 1.0, config

    def forward(self, x: Tensor) -> Tensor:
        """All of them take part."""
        return self.drop(self.linear(x)) * self.heat * self.config.scale


class Config:
    """An object of a class of its own."""

    scale: float

    def __init__(self) -> None:
        self.scale = 1.0


@pytest.mark.parametrize("what", ["0.heat", "0.drop.p", "0.config.scale"])
def test_attributes_that_are_changed_after_the_split_are_told_once(what: str) -> None:
    """The model keeps those at the split: an annealed number would stay as it was without a word."""
    net = nn.Sequential(Heated(Config()), nn.Linear(4, 4))
    model = fs.split(net, "*")
    x = torch.ones(2, 4)
    model.apply(model.params, x)
    net.train(False)
    model.apply(model.params, x)
    holder, name = {"heat": (net[0], "heat"), "p": (net[0].drop, "p")}.get(
        what.split(".")[-1], (net[0].config, "scale")
    )
    was = getattr(holder, name)
    setattr(holder, name, 0.25)
    with pytest.warns(UserWarning, match="after fs.split") as said:
        model.apply(model.params, x)
        model.apply(model.params, x)
    assert [f"{what} was {was} and is 0.25." in str(each.message) for each in said] == [True]
    copy.deepcopy(model).apply(model.params, x)
    fs.split(net, "*").apply(model.params, x)
