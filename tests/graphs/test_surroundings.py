"""What a unit's Python reads beside its arguments: graphs see that it changes between calls, wherever it is."""

import array
import cProfile
import ctypes
import functools
import gc
import itertools
import threading
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from tests.graphs.cases import affine, params_of, rows, trained

GAIN = 2.0
TABLE: dict[str, Any] = {"gain": 2.0, "nested": [1.0, 2.0]}
PLACE = types.SimpleNamespace(gain=2.0, below=types.SimpleNamespace(gain=3.0))
CONTEXT: ContextVar[float] = ContextVar("gain", default=2.0)
WRITTEN: list[int] = []


class Fixed:
    """An object whose class holds a number."""

    gain = 2.0

    def of(self) -> float:
        """It."""
        return self.gain


class Slotted:
    """An object without a dict."""

    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 2.0


@dataclass
class Options:
    """Options of a model."""

    gain: float = 2.0


class Scaled(nn.Module):
    """A module with a flag of the usual kind."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) if not self.training else x * 2


FIXED, SLOTTED, OPTIONS, SCALED = Fixed(), Slotted(), Options(), Scaled()


def helper() -> float:
    """Reads a global of its own."""
    return GAIN


def decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function through a closure."""

    @functools.wraps(fn)
    def around(*args: Any) -> Any:
        return fn(*args)

    return around


def ways() -> dict[str, tuple[Callable[..., Any], Callable[[float], Any]]]:
    """Units that read something in ways of their own, and what changes that."""
    local, cell, default = types.SimpleNamespace(gain=2.0), [2.0], [2.0]

    def inner() -> float:
        return cell[0]

    def defaulted(p: Any, x: Tensor, by: list[float] = default) -> Tensor:
        return affine(p, x) * by[0]

    def scaled(number: Callable[[], float]) -> Callable[..., Any]:
        return lambda p, x: affine(p, x) * number()

    def replaced(value: float) -> None:
        nonlocal inner

        def inner() -> float:
            return value

    return {
        "a global": (scaled(lambda: GAIN), lambda v: globals().update(GAIN=v)),
        "a global of a function that it calls": (scaled(lambda: helper()), lambda v: globals().update(GAIN=v)),
        "a global function": (scaled(lambda: helper()), lambda v: globals().update(helper=lambda: v)),
        "a dict": (scaled(lambda: TABLE["gain"]), lambda v: TABLE.update(gain=v)),
        "a list in a dict": (scaled(lambda: sum(TABLE["nested"])), lambda v: TABLE["nested"].__setitem__(0, v)),
        "an attribute of an object": (scaled(lambda: PLACE.gain), lambda v: setattr(PLACE, "gain", v)),
        "an attribute behind two": (scaled(lambda: PLACE.below.gain), lambda v: setattr(PLACE.below, "gain", v)),
        "an attribute of a class": (scaled(lambda: FIXED.of()), lambda v: setattr(Fixed, "gain", v)),
        "an attribute over that of the class": (scaled(lambda: OPTIONS.gain), lambda v: setattr(OPTIONS, "gain", v)),
        "a slot": (scaled(lambda: SLOTTED.gain), lambda v: setattr(SLOTTED, "gain", v)),
        "an object in a closure": (scaled(lambda: local.gain), lambda v: setattr(local, "gain", v)),
        "a closure of a closure": (scaled(lambda: inner()), lambda v: cell.__setitem__(0, v)),
        "a function in a closure": (scaled(lambda: inner()), replaced),
        "a closure behind a decorator": (decorated(scaled(lambda: cell[0])), lambda v: cell.__setitem__(0, v)),
        "a partial": (functools.partial(lambda c, p, x: affine(p, x) * c[0], cell), lambda v: cell.__setitem__(0, v)),
        "a default": (defaulted, lambda v: setattr(defaulted, "__defaults__", ([v],))),
        "what a default holds": (defaulted, lambda v: default.__setitem__(0, v)),
        "a context variable": (scaled(lambda: CONTEXT.get()), CONTEXT.set),
        "a module's flag": (lambda p, x: SCALED(affine(p, x)), lambda v: SCALED.train(v < 5.0)),
        "a unit inside": (fs.unit(scaled(lambda: cell[0])).__call__, lambda v: cell.__setitem__(0, v)),
    }


class Told:
    """A descriptor that reads a closure."""

    def __init__(self, tell: Callable[[], float]) -> None:
        self.tell = tell

    def __get__(self, held: Any, kind: Any = None) -> float:
        return self.tell()


def unnamed_ways() -> dict[str, tuple[Callable[..., Any], Callable[[float], Any]]]:
    """The same, for values that no attribute in the unit's code names: library classes, arrays, names that are made."""
    cell, held, tensor = [2.0], types.SimpleNamespace(gain=2.0), torch.full((2,), 2.0)
    described = type("Described", (), {"gain": Told(lambda: cell[0])})()
    buffer, matrix, flags = array.array("d", [2.0]), numpy.full((2, 2), 2.0), bytearray(b"\2")
    user, chain = UserDict(gain=2.0), ChainMap(TABLE)
    event, local, weak, proxy = threading.Event(), threading.local(), weakref.ref(OPTIONS), weakref.proxy(OPTIONS)
    number, table, view = ctypes.c_double(2.0), types.MappingProxyType(TABLE), TABLE.values()
    local.gain = 2.0

    def coded() -> float:
        return 2.0

    def one() -> float:
        return 3.0

    def other() -> float:
        return 4.0

    def scaled(number: Callable[[], float]) -> Callable[..., Any]:
        return lambda p, x: affine(p, x) * number()

    return {
        "an array": (scaled(lambda: buffer[0]), lambda v: buffer.__setitem__(0, v)),
        "an array of numpy": (scaled(lambda: float(matrix[0, 1])), lambda v: matrix.__setitem__((0, 1), v)),
        "bytes": (scaled(lambda: flags[0]), lambda v: flags.__setitem__(0, int(v))),
        "a number of ctypes": (scaled(lambda: number.value), lambda v: setattr(number, "value", v)),
        "numbers of a tensor": (scaled(lambda: tensor.tolist()[0]), lambda v: tensor.fill_(v)),
        "a UserDict": (scaled(lambda: user["gain"]), lambda v: user.__setitem__("gain", v)),
        "a ChainMap": (scaled(lambda: chain["gain"]), lambda v: TABLE.update(gain=v)),
        "a read-only dict": (scaled(lambda: table["gain"]), lambda v: TABLE.update(gain=v)),
        "a view of a dict": (scaled(lambda: next(iter(view))), lambda v: TABLE.update(gain=v)),
        "an event": (scaled(lambda: 1.0 + event.is_set()), lambda v: (event.set if v > 4 else event.clear)()),
        "a tensor that is trained": (
            scaled(lambda: 1.0 + tensor.requires_grad),
            lambda v: tensor.requires_grad_(v > 4),
        ),
        "what a thread holds": (scaled(lambda: local.gain), lambda v: setattr(local, "gain", v)),
        "a weak reference": (scaled(lambda: weak().gain), lambda v: setattr(OPTIONS, "gain", v)),
        "a weak proxy": (scaled(lambda: proxy.gain), lambda v: setattr(OPTIONS, "gain", v)),
        "a descriptor": (scaled(lambda: described.gain), lambda v: cell.__setitem__(0, v)),
        "code": (scaled(lambda: coded()), lambda v: setattr(coded, "__code__", (one, other)[v > 4].__code__)),
        "a name that is made": (scaled(lambda: getattr(held, "ga" + "in")), lambda v: setattr(held, "gain", v)),
        "attributes as a dict": (scaled(lambda: vars(held)["gain"]), lambda v: setattr(held, "gain", v)),
        "globals as a dict": (scaled(lambda: globals()["GA" + "IN"]), lambda v: globals().update(GAIN=v)),
    }


@pytest.fixture
def untouched() -> Iterator[None]:
    """Put everything back."""
    held = GAIN, helper
    yield
    globals().update(GAIN=held[0], helper=held[1])
    TABLE.update(gain=2.0, nested=[1.0, 2.0])
    PLACE.gain = PLACE.below.gain = Fixed.gain = OPTIONS.gain = SLOTTED.gain = 2.0
    SCALED.train()


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("name", sorted(ways() | unnamed_ways()))
@pytest.mark.usefixtures("untouched")
def test_what_a_unit_reads_is_seen_to_change(name: str) -> None:
    batches = [{"x": rows(n), "gain": gain} for n, gain in enumerate((2.0, 2.0, 5.0, 2.0, 6.0))]
    seen = []
    for compile in (None, "fx"):
        body, change = (ways() | unnamed_ways())[name]
        unit = fs.unit(body)

        def loss(params: Any, batch: Any, unit: Any = unit, change: Any = change) -> Tensor:
            change(batch["gain"])
            y = unit(params["a"], batch["x"])
            change(batch["gain"] + 1)
            return (y + unit(params["a"], batch["x"])).square().mean()

        torch.manual_seed(0)
        step, losses, leaves = trained(loss, params_of("a"), batches, compile)
        seen.append((losses, leaves))
    assert seen[0][0] == seen[1][0] and all(map(torch.equal, seen[0][1], seen[1][1]))
    assert len(set(seen[0][0])) == 5 and step.units.count("fx graph") >= 2 and "as it is" not in step.units


def test_a_unit_that_changes_what_it_reads_is_no_graph() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.seen = nn.Linear(6, 6), [0]

        def forward(self, x: Tensor) -> Tensor:
            self.seen[0] += 1
            WRITTEN.append(1)
            return torch.tanh(self.line(x))

    model = fs.split(nn.Sequential(Counting()), units=("0",))
    plan = fs.make_plan(model, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    opt = fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, params=model.params)
    step = fs.make_train_step(lambda p, x: model.apply(p, x).square().mean(), opt, plan, compile="fx")
    with pytest.warns(UserWarning, match="0.seen"):
        state, _ = step(state, rows(0))
    before = len(WRITTEN)
    step(state, rows(1))
    assert "its Python changes what it reads" in step.units and len(WRITTEN) == before + 1


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (dict.fromkeys(range(5000), 1.0), "table, over which <lambda> closes, which holds 5000 values"),
        (numpy.ones(5000), "table, over which <lambda> closes, which holds 40000 bytes"),
        (itertools.repeat(1.0), "table, over which <lambda> closes, an iterator"),
    ],
)
def test_what_cannot_be_watched_is_told(table: Any, told: str) -> None:
    unit = fs.unit(lambda p, x: affine(p, x) * (next(table) if hasattr(table, "__next__") else float(table[3])))
    step, _, _ = trained(lambda params, x: unit(params["a"], x).mean(), params_of("a"), [rows(0), rows(1)], "fx")
    assert f"reads {told}" in step.units


def test_equal_numbers_in_other_objects_are_no_change() -> None:
    held = [types.SimpleNamespace(gain=float("2.5"))]
    unit = fs.unit(lambda p, x: affine(p, x) * held[0].gain)

    def loss(params: Any, x: Tensor) -> Tensor:
        held[0].gain = float("2.5")
        return unit(params["a"], x).mean()

    step, _, _ = trained(loss, params_of("a"), [rows(n) for n in range(3)], "fx")
    assert step.units == "<lambda>(a): fx graph 0"


def test_a_table_that_makes_what_it_is_asked_for_is_not_asked() -> None:
    class Making(OrderedDict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return super().__getitem__(key)()

    table = Making(gain=nn.Tanh, other=nn.ReLU)
    unit = fs.unit(lambda p, x: table["gain"](affine(p, x)))

    def loss(params: Any, batch: Any) -> Tensor:
        OrderedDict.__setitem__(table, "gain", batch["kind"])
        return unit(params["a"], batch["x"]).mean()

    batches = [{"x": rows(n), "kind": kind} for n, kind in enumerate((nn.Tanh, nn.Tanh, nn.ReLU))]
    step, losses, _ = trained(loss, params_of("a"), batches[:2], "fx")
    assert step.units == "<lambda>(a): fx graph 0"
    assert trained(loss, params_of("a"), batches, "fx")[1] == trained(loss, params_of("a"), batches, None)[1]
    assert losses


def test_profilers_and_collections_go_on_while_units_are_traced() -> None:
    seen: list[str] = []

    def collected(phase: str, info: Any) -> None:
        seen.append(phase)

    unit = fs.unit(lambda p, x: affine(p, x) * len(phases()))
    profile = cProfile.Profile()
    gc.callbacks.append(collected)
    try:
        profile.enable()
        step, _, _ = trained(lambda params, x: unit(params["a"], x).mean(), params_of("a"), [rows(0), rows(1)], "fx")
        profile.disable()
    finally:
        gc.callbacks.remove(collected)
    assert step.units == "<lambda>(a): fx graph 0" and gc.isenabled() and profile.getstats()


def phases() -> list[int]:
    """Makes enough garbage for the collector to run."""
    for _ in range(2000):
        [[] for _ in range(2)].append([])
    return [1, 2]
