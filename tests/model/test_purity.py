"""What a call writes to its modules is seen by code that runs later in the call, and gone when the call is over."""

import copy
import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import UnitError
from fshard.model.writes import Flag, tables
from tests.model.impure import WIDTH, Root
from tests.shared.workers import Pools

RULES = [(".*", fs.fsdp("shard"))]
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "fx": {"compile": "fx"},
    "remat": {"remat": "all"},
    "both": {"compile": "fx", "remat": "all"},
}
FEW, MANY = range(8), range(8, 80)


def _x(seed: int = 0) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _plain(root: nn.Module, x: Tensor) -> Tensor:
    """One call of the module, as if it were the first."""
    out: Tensor = copy.deepcopy(root)(x)
    return out


def _plain_steps(root: nn.Module, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    root = copy.deepcopy(root)
    losses = []
    for i in range(steps):
        used = copy.deepcopy(root)
        loss = used(_x(i))
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for kept, moved in zip(root.parameters(), used.parameters(), strict=True):
                if moved.grad is not None:
                    kept -= 0.01 * moved.grad
    return losses, {path: leaf.detach() for path, leaf in root.named_parameters()}


def check_applies(seed: int, units: Any) -> None:
    root = Root(seed).double()
    model = fs.split(root, units)
    for i in range(3):
        torch.testing.assert_close(model.apply(model.params, _x(i)), _plain(root, _x(i)))


def check_steps(seed: int, how: dict[str, Any], mesh: fs.Mesh) -> str:
    root = Root(seed).double()
    model = fs.split(root, "nodes.*")
    opt = fs.optim.sgd(0.01)
    plan = fs.make_plan(model, mesh, RULES, batch=fs.P("shard"))
    state = fs.init_state(plan, opt, params=model.params)
    step = fs.make_train_step(lambda params, x: model.apply(params, x), opt, plan, **how)
    losses = []
    for i in range(3):
        state, metrics = step(state, _x(i))
        losses.append(metrics.loss.item())
    expected, params = _plain_steps(root, 3)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=1e-6)
    for path, leaf in tree.paths(fs.unshard(state.params, plan)):
        torch.testing.assert_close(leaf, params[path])
    return str(step.units)


@pytest.mark.parametrize("seed", FEW)
def test_calls_of_generated_modules_leave_nothing_behind(seed: int) -> None:
    check_applies(seed, ())
    check_applies(seed, "nodes.*")


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY)
def test_calls_of_many_generated_modules_leave_nothing_behind(seed: int) -> None:
    check_applies(seed, ())
    check_applies(seed, "nodes.*")
    for how in WAYS.values():
        check_steps(seed, how, fs.make_mesh((-1,), ("shard",)))


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_steps_of_generated_modules_see_what_their_units_write(way: str) -> None:
    for seed in (1, 4):
        check_steps(seed, WAYS[way], fs.make_mesh((-1,), ("shard",)))


def _on_two_ranks(seeds: list[int], way: str) -> list[str]:
    mesh = fs.make_mesh((-1,), ("shard",))
    return [check_steps(seed, WAYS[way], mesh) for seed in seeds]


@pytest.mark.parametrize("way", ["eager", "fx", "remat"])
def test_steps_of_two_ranks_gather_again_for_what_units_wrote(pool: Pools, way: str) -> None:
    pool(2).run(_on_two_ranks, [2, 6], way)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        self.aux = share.square().sum(-1).mean()
        return x + torch.tanh(self.up(x)) * share[:, :1]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean() + sum(block.aux for block in self.blocks)


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", [False, True])
def test_a_mixture_of_experts_adds_up_the_losses_that_its_blocks_set(way: str, before: bool) -> None:
    torch.manual_seed(0)
    net = Mixture()
    if before:
        net(_x().float())  # the attributes are there when the module is split, and hold other values
        for block in net.blocks:
            block.aux = block.aux.detach() + 3
    model = fs.split(net, "blocks.*")
    opt = fs.optim.sgd(0.01)
    plan = fs.make_plan(model, fs.make_mesh((-1,), ("shard",)), RULES, batch=fs.P("shard"))
    step = fs.make_train_step(lambda params, x: model.apply(params, x), opt, plan, **WAYS[way])
    expected = net(_x().float())
    state, metrics = step(fs.init_state(plan, opt, params=model.params), _x().float())
    torch.testing.assert_close(metrics.loss, expected.detach())
    torch.testing.assert_close(model.apply(model.params, _x().float()), expected.detach())
    if "compile" in WAYS[way]:
        assert "as it is" not in str(step.units)
    expected.backward()
    for (_, leaf), old in zip(tree.paths(fs.unshard(state.params, plan)), net.parameters(), strict=True):
        torch.testing.assert_close(leaf, (old - 0.01 * old.grad).detach())


class Sets(nn.Module):
    """Sets something in its call."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act, self.linear = act, nn.Linear(WIDTH, WIDTH)
        self.count, self.box = torch.zeros(()), Box()

    def forward(self, x: Tensor) -> Tensor:
        self.act(self, x)
        return self.linear(x)


class Box:
    """An object that is no container."""

    def __init__(self) -> None:
        self.held: Any = None


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda self, x: setattr(self, "odd", (y for y in [x])), "unit 0 sets odd to a generator"),
        (lambda self, x: setattr(self.linear, "odd", iter([x])), "unit 0 sets linear.odd to a list_iterator"),
        (lambda self, x: setattr(self.box, "held", x), "unit 0 sets box.held to a tensor, in an object"),
        (lambda self, x: setattr(self, "extra", nn.Linear(1, 1)), "unit 0 sets extra to another module"),
        (lambda self, x: self.count.add_(1), "wrote in place to count"),
    ],
)
def test_what_cannot_be_a_result_is_refused_by_name(act: Any, words: str) -> None:
    model = fs.split(nn.Sequential(Sets(act)), "0")
    for _ in range(2):
        with pytest.raises(UnitError, match=words):
            model.apply(model.params, _x().float())


def test_objects_are_put_back_when_the_call_is_over() -> None:
    def count(self: Any, x: Tensor) -> None:
        self.box.held = (self.box.held or 0) + 1
        x.add_(self.box.held)

    model = fs.split(nn.Sequential(Sets(count), Sets(count)))
    first = model.apply(model.params, _x().float())
    assert torch.equal(model.apply(model.params, _x().float()), first)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 0:  # asks for a value, so no trace sees both branches
            self.factor = self.factor * 2
        return self.linear(x) * self.factor


@pytest.mark.filterwarnings("ignore:a forward computes attributes from their own values")
def test_a_write_that_only_a_later_call_makes_is_gone_after_it() -> None:
    model = fs.split(nn.Sequential(Branches(), Branches()), "*")
    opt = fs.optim.sgd(0.0)
    plan = fs.make_plan(model, fs.make_mesh((-1,), ("shard",)), RULES, batch=fs.P("shard"))
    step = fs.make_train_step(lambda params, x: model.apply(params, x).square().mean(), opt, plan)
    state = fs.init_state(plan, opt, params=model.params)
    negative, positive = -torch.ones(2, WIDTH), torch.ones(2, WIDTH)
    for x in (negative, negative, positive, negative, positive):
        state, metrics = step(state, x)
        torch.testing.assert_close(metrics.loss, model.apply(model.params, x).square().mean())


class Warming(nn.Module):
    """Numbers, tensors and a dict that count on in plain PyTorch, and two that each call sets anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls, self.heat, self.mean, self.total, self.rows = 0, 1.0, torch.zeros(()), 0.0, 0
        self.seen, self.here = {"rows": 0}, {"rows": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.heat = self.heat * 0.5
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        self.total = 0.0
        self.total += self.heat
        rows = self.rows + len(x)
        self.rows = rows
        self.seen["rows"] += len(x)
        self.here["rows"] = len(x)
        return self.linear(x) * self.total + self.mean


@pytest.mark.parametrize("units", [(), ("*",)])
def test_attributes_that_would_add_up_over_calls_are_told_once(units: Any) -> None:
    """In plain PyTorch they count on; here each call begins anew, which nobody would see."""
    model = fs.split(nn.Sequential(Warming(), nn.Linear(WIDTH, WIDTH)), units)
    with pytest.warns(UserWarning, match="add up") as said:
        first = model.apply(model.params, _x().float())
        assert torch.equal(model.apply(model.params, _x().float()), first)
    (text,) = [str(each.message) for each in said]
    assert "0.calls = 0, 0.heat = 1.0, 0.mean = ..., 0.rows = 0, 0.seen = ...: they" in text


def test_graphs_of_a_step_end_with_it_though_attributes_held_them() -> None:
    model = fs.split(Mixture(), "blocks.*")
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), model.params)
    gc.collect()
    gc.disable()
    try:
        x = _x().float().requires_grad_()
        gone = weakref.ref(x)
        model.apply(params, x).backward()
        del x
        assert gone() is None
    finally:
        gc.enable()


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.side, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        self.scale, self.terms = 1.0, [0.5]

    def forward(self, x: Tensor) -> Tensor:
        self.side(x)  # for those who listen
        return self.scale * torch.tanh(self.drop(x)) + sum(self.terms)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(WIDTH, WIDTH), _Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.linear(x))


class _Outer(nn.Module):
    """Code outside of units that writes to modules inside of them at some levels, and may undo it."""

    def __init__(self, write: str, undo: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.write, self.undo = write, undo

    def forward(self, x: Tensor, level: float) -> Tensor:
        kept: list[Tensor] = []
        inner = [block.inner for block in self.blocks]
        undone = [OUTSIDE[self.write](one, level, kept) for one in inner] if level else []
        for block in self.blocks:
            x = block(x)
        for undo in undone if self.undo else ():
            undo()
        return x.square().mean() + sum(y.square().mean() for y in kept)


def _hook(inner: _Inner, level: float, kept: list[Tensor]) -> Any:
    handle = inner.side.register_forward_hook(lambda module, args, out: kept.append(level * out))
    return handle.remove


def _set(inner: nn.Module, name: str, level: float) -> Any:
    before = getattr(inner, name, None)
    setattr(inner, name, level)
    return lambda: setattr(inner, name, before) if before is not None else delattr(inner, name)


def _append(inner: _Inner, level: float, kept: list[Tensor]) -> Any:
    inner.terms.append(level)
    return inner.terms.pop


@pytest.mark.parametrize("base", [OrderedDict, dict])
@pytest.mark.parametrize("write", ["x.clear()", "x.pop(1)", "x.popitem()", "x.setdefault(2, 3)", "x.update({2: 3})"])
def test_tables_of_modules_tell_every_way_of_writing(base: type, write: str) -> None:
    flag = Flag()
    made = next(kind for kind in tables(flag) if issubclass(kind, OrderedDict) is (base is OrderedDict))()
    base.__setitem__(made, 1, 2)
    assert not flag.raised
    exec(write, {"x": made})
    assert flag.raised


OUTSIDE: dict[str, Any] = {
    "hook": _hook,
    "attribute": lambda inner, level, kept: _set(inner, "scale", level),
    "attribute of a class of torch": lambda inner, level, kept: _set(inner.drop, "p", float(level > 0)),
    "list": _append,
}
LEVELS = (0.0, 0.5, 0.25, 0.0, 0.75, 0.0, 0.0)


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize(("undo", "compiled"), [(True, "fx"), (False, "fx"), (False, None)])
@pytest.mark.parametrize("write", OUTSIDE)
def test_a_unit_sees_what_code_outside_writes_to_its_modules_in_any_call(write: str, undo: bool, compiled: Any) -> None:
    root = _Outer(write, undo).double()
    model = fs.split(root, "blocks.*")
    mesh = fs.make_mesh((-1,), ("shard",))
    plan = fs.make_plan(model, mesh, RULES, batch=fs.P("shard"))
    opt = fs.optim.sgd(0.01)
    state = fs.init_state(plan, opt, params=model.params)
    step = fs.make_train_step(
        lambda params, batch: model.apply(params, *batch), opt, plan, compile=compiled, debug=True
    )
    used = copy.deepcopy(root)
    for i, level in enumerate(LEVELS):
        state, metrics = step(state, (_x(i), level))
        called = copy.deepcopy(root)
        called.load_state_dict(used.state_dict())
        loss = called(_x(i), level)
        assert metrics.loss.item() == pytest.approx(loss.item(), abs=1e-12), f"call {i} at level {level}"
        grads = torch.autograd.grad(loss, list(called.parameters()), allow_unused=True)
        with torch.no_grad():
            for leaf, grad in zip(used.parameters(), grads, strict=True):
                leaf -= 0.01 * (torch.zeros_like(leaf) if grad is None else grad)
