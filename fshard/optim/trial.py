"""A trial of a class of ``torch.optim`` against its adapter: what the class keeps, and how its results differ."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.optim.form import Form

SHAPES = ((24,), (4, 6), (2, 3, 4), (2, 3, 2, 2), ())
"""Shapes of parameters on which a class is tried: rules may go by the number of dims."""

STEPS = 12
"""Updates in a trial: some rules change after five or six."""

FEW = 4
"""Updates of parameters that are no vectors."""

TRIAL_RATE = 0.01
"""The first learning rate of a trial: the user's own may be too small for a difference to show."""

RATES = tuple([TRIAL_RATE * (1.0, 0.5, 1.5)[step % 3] for step in range(STEPS)])
"""The learning rates of a trial."""

CLOSE = {torch.float64: 1e-8, torch.float32: 1e-4}
"""How far results may be apart, as a part of how far parameters moved. Classes that take float64 are tried in it."""

Make = Callable[[list[Tensor], float], torch.optim.Optimizer]
Step = Callable[[list[Tensor], list[Tensor], list[dict[str, Tensor]], int, float], None]


@dataclass(frozen=True)
class Buffer:
    """One entry of ``state[param]``.

    Attributes:
        form: its form as a buffer of shards.
        start: its value before the first update.
        since: the number of updates after which the class has it.
        kind: the type of a plain number; None for a tensor.
        shape: that of a tensor of one element.
    """

    form: Form
    start: float
    since: int = 1
    kind: type | None = None
    shape: tuple[int, ...] = ()

    def given(self, value: Tensor) -> Any:
        """The buffer as the class knows it."""
        if self.kind is not None:
            return self.kind(value.item())
        return value if self.form.shape is None else value.view(self.shape)


@dataclass(frozen=True)
class TrialState:
    """The state that a class keeps of a parameter.

    Attributes:
        buffers: its entries of ``state[param]`` by name.
        counter: ``state[param]["step"]`` after the first update, where that is the number of updates.
    """

    buffers: Mapping[str, Buffer]
    counter: Any = None

    def counted(self, updates: int) -> dict[str, Any]:
        """The class's own count of updates."""
        if self.counter is None:
            return {}
        if isinstance(self.counter, Tensor):
            # Not by full_like: of a tensor that torch.tensor makes, a trace on fake tensors knows the value.
            count = torch.tensor(float(updates), dtype=self.counter.dtype, device="cpu")
            return {"step": count if self.counter.ndim == 0 else count.reshape(self.counter.shape)}
        return {"step": type(self.counter)(updates)}


class MisfitError(Exception):
    """A reason why a class cannot be run on slices.

    Attributes:
        elementwise: whether the class fails since its rule is not elementwise.
    """

    def __init__(self, reason: str, elementwise: bool = True) -> None:
        super().__init__(reason)
        self.elementwise = elementwise


def find(make: Make) -> TrialState:
    """Return what a class keeps of a parameter, found by updates of its own.

    Raises:
        MisfitError: it keeps what belongs to no parameter, or has another shape.
    """
    seen = {dtype: _history(make, dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)}
    first, wider, narrow = seen[torch.float32], seen[torch.float64], seen[torch.bfloat16]
    if isinstance(first, Exception):
        raise first
    counted = _counted(first)
    start = _start(make)
    names = [name for name in dict.fromkeys(name for row in first for name in row) if name != "step" or not counted]
    rows = [[] if isinstance(rows, Exception) else rows[-1:] for rows in (first, wider, narrow)]
    last = {name: [next(iter(row), {}).get(name) for row in rows] for name in names}
    buffers = {name: _buffer(name, last[name], start.get(name), _since(name, first)) for name in names}
    return TrialState(buffers, first[0]["step"] if counted else None)


def _counted(history: list[dict[str, Any]]) -> bool:
    """Tell whether ``state["step"]`` is the number of updates."""
    return all(_number(row.get("step")) == updates for updates, row in enumerate(history, start=1))


def _since(name: str, history: list[dict[str, Any]]) -> int:
    """The number of updates after which the state has an entry.

    Raises:
        MisfitError: it comes and goes.
    """
    since = next(updates for updates, row in enumerate(history, start=1) if name in row)
    if any(name not in row for row in history[since - 1 :]):
        raise MisfitError(f"its state {name!r} comes and goes from update to update", elementwise=False)
    return since


def _history(make: Make, dtype: torch.dtype) -> list[dict[str, Any]] | Exception:
    """The state of a vector after each update; the exception of a class that does not take the dtype."""
    try:
        return [state for _, state in _updates(make, *_drawn((24,), dtype))]
    except MisfitError:
        raise
    except Exception as error:
        return error


def _start(make: Make) -> dict[str, Any]:
    """The state of a vector of zeros after an update with the gradient zero."""
    zeros = torch.zeros(24, device="cpu")
    try:
        return next(_updates(make, zeros, [zeros]))[1]
    except ArithmeticError:  # of a rule that divides by the size of the gradient
        return {}


def _updates(make: Make, start: Tensor, grads: list[Tensor]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """A parameter and its state after each update by the class itself.

    Raises:
        MisfitError: an update changes what belongs to no parameter.
    """
    param = torch.nn.Parameter(start.clone())
    with steps_on_cpu():
        rule = make([param], RATES[0])
        for rate, grad in zip(RATES, grads, strict=False):
            rule.param_groups[0]["lr"], param.grad = rate, grad.clone()
            before = _outside(rule, param)
            rule.step()
            after = _outside(rule, param)
            changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            if changed:
                kept = f"an update changes {changed[0]}, which is not kept for a parameter in state[param]"
                raise MisfitError(kept, elementwise=False)
            state = {name: value for name, value in rule.state[param].items() if value is not None}
            yield param.detach().clone(), copy.deepcopy(state)


def _outside(rule: torch.optim.Optimizer, param: Tensor) -> dict[str, str]:
    """Return what a class keeps elsewhere than in ``state[param]``: texts by name."""
    own = {"state", "param_groups", "defaults"}
    kept = {f"self.{name}": value for name, value in vars(rule).items() if name not in own}
    kept |= {f'param_groups[0]["{name}"]': value for name, value in rule.param_groups[0].items() if name != "params"}
    kept |= {f"state[{key!r}]": value for key, value in rule.state.items() if not isinstance(key, Tensor)}
    return {name: _text(value, param) for name, value in kept.items()}


def _text(value: Any, param: Tensor) -> str:
    """The numbers in a value; the parameter itself and other objects do not count."""
    plain = [leaf for leaf in tree.leaves(value) if leaf is not param]
    return str([x.tolist() if isinstance(x, Tensor) else x for x in plain if isinstance(x, Tensor | int | float | str)])


def _buffer(name: str, values: list[Any], start: Any, since: int) -> Buffer:
    """The form of one entry of the state, from its values for parameters in float32, float64 and bfloat16.

    Raises:
        MisfitError: it is not a number, and not like the parameter.
    """
    value, wider, narrow = values
    if isinstance(value, bool | int | float):
        return Buffer(Form(shape=(), dtype=torch.float64), _number(start) or 0.0, since, type(value))
    if not isinstance(value, Tensor) or (value.numel() != 1 and value.shape != (24,)):
        raise MisfitError(f"its state {name!r} is not shaped like its parameters")
    if isinstance(wider, Tensor) and wider.dtype != value.dtype:
        dtype, wide = None, isinstance(narrow, Tensor) and narrow.dtype == value.dtype
        if (value.dtype, wider.dtype) != (torch.float32, torch.float64):
            raise MisfitError(f"its state {name!r} is {value.dtype} for float32 and {wider.dtype} for float64")
    else:
        dtype, wide = value.dtype, False
        if wider is None and value.dtype == torch.float32:  # the class takes no other dtype
            dtype = None
    shape = None if value.shape == (24,) else ()
    return Buffer(Form(shape=shape, dtype=dtype, wide=wide), _number(start) or 0.0, since, None, tuple(value.shape))


def _number(value: Any) -> float | None:
    """The first number of a value; None if it has none."""
    if isinstance(value, Tensor):
        return float(value.reshape(-1)[0])
    return float(value) if isinstance(value, int | float) else None


def compare(make: Make, init: Callable[[Tensor], dict[str, Tensor]], step: Step) -> None:
    """Hold an adapter against its class: parameters of several shapes, flattened and cut in two for the adapter.

    Args:
        make: makes the class's optimizer of parameters and a learning rate.
        init: the adapter's state of a slice.
        step: the adapter's update.

    Raises:
        MisfitError: they differ.
    """
    drawn, dtype = torch.get_rng_state(), torch.float64
    for shape in SHAPES:
        try:
            start, wanted, grads = _wanted(make, shape, dtype)
        except MisfitError:
            raise
        except Exception:  # a class that does not take float64
            dtype = torch.float32
            start, wanted, grads = _wanted(make, shape, dtype)
        for parts in {1: None, min(2, start.numel()): None} if start.ndim == 1 else (min(2, start.numel()),):
            got = _adapted(init, step, start, grads, parts)
            _check(start, wanted, got, CLOSE[dtype], parts, torch.equal(drawn, torch.get_rng_state()))


def _wanted(make: Make, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A parameter, its values after each update by the class itself, flattened, and its gradients."""
    start, grads = _drawn(shape, dtype)
    grads = grads if len(shape) == 1 else grads[:FEW]
    return start, [param.reshape(-1) for param, _ in _updates(make, start, grads)], grads


def _adapted(
    init: Callable[[Tensor], dict[str, Tensor]], step: Step, start: Tensor, grads: list[Tensor], parts: int
) -> list[Tensor]:
    """A parameter, flattened, after each of the adapter's updates, which has it in so many parts."""
    params = [part.clone() for part in start.reshape(-1).chunk(parts)]
    states, found = [init(param) for param in params], []
    for number, (rate, grad) in enumerate(zip(RATES, grads, strict=False), start=1):
        for param, part, state in zip(params, grad.reshape(-1).chunk(parts), states, strict=True):
            step([param], [part.clone()], [state], number, rate)
        found.append(torch.cat(params))
    return found


def _check(start: Tensor, wanted: list[Tensor], got: list[Tensor], close: float, parts: int, quiet: bool) -> None:
    """Compare after each update.

    Raises:
        MisfitError: the results differ.
    """
    before = start.reshape(-1)
    moved = max([(want - before).abs().max().item() for want in wanted])
    for number, (want, have) in enumerate(zip(wanted, got, strict=True), start=1):
        gap = (want - have).abs().max().item()
        if gap <= close * moved:
            continue
        what = f"a parameter of shape {list(start.shape)}" + (", flattened" if start.ndim > 1 else "")
        pieces = what if parts == 1 else f"{what} and cut into halves" if start.ndim > 1 else f"{what}, cut into halves"
        why = "" if quiet else "; it draws random numbers"
        raise MisfitError(
            f"after update {number} of {pieces}, it is {gap:.1e} apart from that of the class itself, which has moved "
            f"it by {moved:.1e}{why}"
        )


def _drawn(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """A parameter and its gradients."""
    generator = torch.Generator("cpu").manual_seed(0)
    draws = [torch.randn(shape, generator=generator, device="cpu", dtype=torch.float64) for _ in range(STEPS + 1)]
    start, *grads = [draw.to(dtype) for draw in draws]
    return start, grads


def steps_on_cpu() -> AbstractContextManager[object]:
    """Say where a class counts its steps: on the default device, which the user may have set to another one."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
