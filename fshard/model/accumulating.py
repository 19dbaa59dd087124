"""Attributes that forwards compute from their own values, as counters do. Each call begins with those at the split."""

import dis
import inspect
import warnings
from collections.abc import Iterator
from types import CodeType

from torch import Tensor, nn

from fshard.model.writes import Surface


def tell_accumulating(surface: Surface, examined: set[str]) -> None:
    """Warn once of numbers and tensors in attributes that would add up over calls in plain PyTorch.

    Args:
        surface: the modules after a call that wrote to them.
        examined: the attributes that need no further look.
    """
    found = []
    for seen, module in zip(surface.scene.views, surface.modules, strict=True):
        for name, before in zip(seen.names, seen.kept, strict=True):
            spot = f"{seen.path}.{name}" if seen.path else name
            now = module.__dict__.get(name, before)
            if spot in examined or now is before or not (_adds_up(before) and _adds_up(now)):
                continue
            examined.add(spot)
            if accumulates(type(module), name):
                found.append(f"{spot} = {before if not isinstance(before, Tensor) else '...'}")
    if found:
        warnings.warn(
            f"a forward computes attributes from their own values, and each call begins with those at the split, "
            f"{', '.join(found)}: they do not add up over steps as in plain PyTorch. Give what changes from step to "
            f"step with the batch, or register it as a buffer and pass model.apply(..., buffers=)",
            stacklevel=2,
        )


def accumulates(kind: type, name: str) -> bool:
    """Tell whether a class computes an attribute from its own value, as ``self.n += 1`` does, and never sets it anew.

    >>> class Counter:
    ...     def forward(self):
    ...         self.calls += 1
    ...         self.size = 3
    >>> accumulates(Counter, "calls"), accumulates(Counter, "size")
    (True, False)
    """
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)] if nn.Module in kind.__mro__ else kind.__mro__
    methods = [value for base in bases for key, value in vars(base).items() if key != "__init__"]
    codes = [method.__code__ for method in methods if inspect.isfunction(method) and name in method.__code__.co_names]
    updates = [update for code in codes for update in _updates(code, name)]
    return bool(updates) and all(updates)


def _updates(code: CodeType, name: str) -> Iterator[bool]:
    """For each statement of a method that sets an attribute, whether it reads the attribute first."""
    before, read = None, -1
    for op in dis.get_instructions(code):
        line = op.positions.lineno if op.positions is not None and op.positions.lineno is not None else -2
        if op.argval == name and op.opname == "LOAD_ATTR" and before is not None and _own(before, code):
            read = line
        elif op.argval == name and op.opname == "STORE_ATTR":
            yield read == line
            read = -1
        before = op


def _own(op: dis.Instruction, code: CodeType) -> bool:
    """Tell whether an instruction puts the method's own object onto the stack."""
    put = op.argval if isinstance(op.argval, tuple) else (op.argval,)
    return op.opname == "COPY" or op.opname.startswith("LOAD_FAST") and put[-1] in code.co_varnames[:1]


def _adds_up(value: object) -> bool:
    return isinstance(value, int | float | complex | Tensor) and not isinstance(value, bool)
