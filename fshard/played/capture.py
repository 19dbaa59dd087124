"""Tensors that a function closes over: no spec says how their gradients add up."""

import dis
import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fshard import tree
from fshard.errors import CollectiveError, lines
from fshard.torch_internals import functorch


def check_captured(f: Callable[..., Any]) -> None:
    """Refuse a function whose closure, defaults, globals or own attributes hold tensors that need a gradient.

    Raises:
        CollectiveError: naming them.
    """
    names = [name for name, value in _held(f, set()) if _needs_gradient(value)]
    if names and (torch.is_grad_enabled() or any("transform" in name for name in names)):
        remedy = (
            "A spec says how gradients are added over ranks, and only arguments have specs: pass them as "
            "arguments, or detach them."
        )
        raise CollectiveError(lines("shard_map: the function uses tensors that need a gradient:", names, remedy))


def _needs_gradient(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad or functorch.is_functorch_wrapped_tensor(value)
    return isinstance(value, nn.Module) and any(leaf.requires_grad for leaf in value.parameters())


def _held(f: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The tensors and modules that a callable holds, by name."""
    if id(f) in seen:
        return
    seen.add(id(f))
    if isinstance(f, functools.partial):
        yield from _held(f.func, seen)
        yield from _tensors("partial argument", (f.args, f.keywords), seen)
    elif isinstance(f, MethodType):
        yield from _held(f.__func__, seen)
        yield from _tensors("self", f.__self__, seen)
    elif isinstance(f, FunctionType):
        cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
        for name, cell in cells:
            try:
                yield from _tensors(name, cell.cell_contents, seen)
            except ValueError:  # not assigned yet
                continue
        yield from _tensors("default argument", (f.__defaults__, f.__kwdefaults__), seen)
        for name in _globals(f.__code__):
            value = f.__globals__.get(name)
            if not isinstance(value, FunctionType):
                yield from _tensors(name, value, seen)
    elif isinstance(f, nn.Module):
        yield type(f).__name__, f
    elif hasattr(f, "__wrapped__"):
        yield from _held(f.__wrapped__, seen)


@functools.lru_cache(maxsize=1024)
def _globals(code: CodeType) -> tuple[str, ...]:
    """The globals that a function reads."""
    return tuple({str(one.argval): None for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"})


def _tensors(name: str, value: Any, seen: set[int], depth: int = 2) -> Iterator[tuple[str, Any]]:
    for leaf in tree.leaves(value):
        if isinstance(leaf, Tensor | nn.Module):
            yield name, leaf
        elif isinstance(leaf, FunctionType | MethodType | functools.partial):
            yield from ((f"{name}: {inner}", held) for inner, held in _held(leaf, seen))
        elif depth and id(leaf) not in seen and _plain(leaf):
            seen.add(id(leaf))
            for inner, held in vars(leaf).items():
                yield from _tensors(f"{name}.{inner}", held, seen, depth - 1)


def _plain(value: Any) -> bool:
    """Tell whether a value is an object of a user's class."""
    if isinstance(value, type | ModuleType) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.split(".")[0] not in ("fshard", "torch", "builtins", "functools")
