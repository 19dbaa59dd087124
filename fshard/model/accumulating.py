"""Attributes that forwards compute from their own values, as counters do. Each call begins with those at the split."""

import dis
import inspect
import warnings
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from torch import Tensor, nn

from fshard.model.containers import inside, matches
from fshard.model.writes import Surface, TableView


def tell_accumulating(surface: Surface, examined: set[str]) -> None:
    """Warn once of numbers and tensors in attributes that would add up over calls in plain PyTorch.

    Args:
        surface: the modules after a call that wrote to them.
        examined: the attributes that need no further look.
    """
    found = []
    for seen, module in zip(surface.scene.views, surface.modules, strict=True):
        for name, told in _changed(seen, module.__dict__):
            spot = f"{seen.path}.{name}" if seen.path else name
            if spot not in examined and accumulates(type(module), name):
                found.append(f"{spot} = {told}")
            examined.add(spot)
    if found:
        warnings.warn(
            f"a forward computes attributes from their own values, and each call begins with those at the split, "
            f"{', '.join(found)}: they do not add up over steps as in plain PyTorch. Give what changes from step to "
            f"step with the batch, or register it as a buffer and pass model.apply(..., buffers=)",
            stacklevel=2,
        )


def _changed(seen: TableView, now: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """The attributes of numbers, or of containers of them, that a call has changed, and their values before it."""
    for name, before in zip(seen.names, seen.kept, strict=True):
        if now.get(name, before) is not before and _adds_up(before) and _adds_up(now[name]):
            yield name, "..." if isinstance(before, Tensor) else before
    for name, kept in seen.holding:
        if name in now and not matches(now[name], kept) and any(map(_adds_up, inside(now[name]))):
            yield name, "..."


def accumulates(kind: type, name: str) -> bool:
    """Tell whether a class computes an attribute from its own value, as ``self.n += 1`` does, and never sets it anew.

    >>> class Counter:
    ...     def forward(self):
    ...         calls = self.calls + 1
    ...         self.calls = calls
    ...         self.rows["seen"] += 8
    ...         self.size = 3
    >>> accumulates(Counter, "calls"), accumulates(Counter, "rows"), accumulates(Counter, "size")
    (True, True, False)
    """
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)] if nn.Module in kind.__mro__ else kind.__mro__
    methods = [value for base in bases for key, value in vars(base).items() if key != "__init__"]
    codes = [method.__code__ for method in methods if inspect.isfunction(method) and name in method.__code__.co_names]
    updates = [update for code in codes for update in _updates(code, name)]
    return bool(updates) and all(updates)


def _updates(code: CodeType, name: str) -> Iterator[bool]:
    """For each statement of a method that sets an attribute, or an item of it, whether it reads the attribute first.

    A local variable that was computed from the attribute stands for it.
    """
    before, line, reads, copies, local = None, -1, 0, False, dict[str, None]()
    for op in dis.get_instructions(code):
        if (at := _line(op)) != line:
            line, reads, copies = at, 0, False
        reads += _loads(op, local) or (op.opname, op.argval) == ("LOAD_ATTR", name) and _own(before, code)
        copies = copies or op.opname == "COPY"
        if op.opname == "STORE_ATTR" and op.argval == name:
            yield reads > 0
            reads = 0
        elif op.opname == "STORE_SUBSCR" and reads:  # the item's container is a first read
            yield copies or reads > 1
        elif op.opname.startswith("STORE_FAST"):
            local |= {op.argval: None} if reads and isinstance(op.argval, str) else {}
        before = op


def _line(op: dis.Instruction) -> int:
    return op.positions.lineno if op.positions is not None and op.positions.lineno is not None else -2


def _loads(op: dis.Instruction, local: Mapping[str, None]) -> bool:
    names = op.argval if isinstance(op.argval, tuple) else (op.argval,)
    return op.opname.startswith("LOAD_FAST") and any(name in local for name in names)


def _own(op: dis.Instruction | None, code: CodeType) -> bool:
    """Tell whether an instruction puts the method's own object onto the stack."""
    if op is None:
        return False
    put = op.argval if isinstance(op.argval, tuple) else (op.argval,)
    return op.opname == "COPY" or op.opname.startswith("LOAD_FAST") and put[-1] in code.co_varnames[:1]


def _adds_up(value: object) -> bool:
    return isinstance(value, int | float | complex | Tensor) and not isinstance(value, bool)
