"""Finds the buffers that a call changed, and marks tensors that differ between ranks by right, such as these.

Calls get clones of buffers, so they never write the buffers given. The clone's version counter shows a change, or its
replacement in the module. The counter misses two kinds of writes: those inside of ``vmap``, and those of the kernels of
batch normalization, which write the running statistics without declaring it.

Clones are needed because a module may change any of its buffers in place, on any call. Small buffers are cloned on
every call, which costs about a microsecond. The clone of a large buffer (an attention mask) that the last call did not
change is bound again as long as its version counter and the original's say that they are equal.
"""

import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fshard.torch_internals import BatchNorm, dispatch_modes, functorch, peek_interpreter_stack

Place = tuple[dict[str, Any], str]
"""A dict of some module (``_parameters`` or ``_buffers``) and a name in it."""


_OWN = "_fshard_own"  # the attribute of tensors that differ between ranks by right

_LARGE = 1 << 14
"""The least bytes of a clone that is kept."""


class _Kept(NamedTuple):
    """A clone that equals its original as long as both have these versions."""

    original: Tensor
    original_version: int
    clone: Tensor
    version: int

    def serves(self, buffer: Tensor) -> bool:
        same = buffer is self.original and buffer._version == self.original_version
        return same and self.clone._version == self.version and _plain()


class BufferTracker:
    """Clones the buffers of a module, each of which has some places in it, and finds those that a call changed."""

    def __init__(self, module: nn.Module, places: Sequence[Sequence[Place]]) -> None:
        number = {(id(entries), name): i for i, some in enumerate(places) for entries, name in some}
        self._leaders: dict[int, int] = {}
        self._watched = False
        self._kept: dict[int, _Kept] = {}
        for owner in module.modules():
            if owner._buffers and _writes_silently(owner):
                self._watched = True
            elif isinstance(owner, BatchNorm):
                # torch's own forward counts a batch exactly when it lets the kernel write the statistics.
                names = ("num_batches_tracked", "running_mean", "running_var")
                leader, *led = (number.get((id(owner._buffers), name)) for name in names)
                if leader is not None:
                    self._leaders |= {i: leader for i in led if i is not None}

    def clones(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Clones of buffers, which have version counters even in inference mode."""
        made = []
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            for i, buffer in enumerate(buffers):
                # Removed for the time of the call, so that a call inside of this one gets a clone of its own.
                kept = self._kept.pop(i, None) if self._kept else None
                made.append(kept.clone if kept is not None and kept.serves(buffer) else buffer.clone())
        return made

    def watch(self) -> "Watch | nullcontext[None]":
        """The context of a call."""
        return Watch() if self._watched else nullcontext()

    def changed(
        self,
        given: Sequence[Tensor],
        own: Sequence[Tensor],
        now: Sequence[Any],
        versions: Sequence[int],
        watch: "Watch | None",
    ) -> Iterator[tuple[int, Any]]:
        """The number and the new value of each buffer that changed in a call under ``watch``.

        The call was given clones, ``own``, at these versions; the module holds ``now`` after it.
        """
        written = watch.written if watch is not None else ()
        each = zip(now, own, versions, strict=True)
        moved = [x is not old or x._version != before or id(x) in written or _batched(x) for x, old, before in each]
        for i, new in enumerate(now):
            if moved[i] or moved[self._leaders.get(i, i)]:
                yield i, new
            elif i not in self._leaders and not self._watched and _keepable(given[i], new):
                self._kept[i] = _Kept(given[i], given[i]._version, new, new._version)


class Watch(TorchFunctionMode):
    """Records the ids of the tensors that a batch normalization kernel writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "batch_norm" in getattr(func, "__name__", ""):
            # All spellings with this argument have it sixth; F.batch_norm's default is False.
            training = kwargs.get("training", args[5] if len(args) > 5 else func is not nn.functional.batch_norm)
            if training:
                self.written |= {id(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
        return func(*args, **kwargs)


def _writes_silently(owner: nn.Module) -> bool:
    """Tell whether a module of a class that is not torch's own calls batch normalization itself.

    The names in the code of its methods show it; a mode around every call would cost a microsecond an operation.
    """
    foreign = [kind for kind in type(owner).__mro__ if not kind.__module__.startswith(("torch.", "builtins"))]
    methods = [x for kind in foreign for x in vars(kind).values() if isinstance(x, types.FunctionType)]
    return any("batch_norm" in name for method in methods for name in _names(method.__code__))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def _plain() -> bool:
    """Tell whether no transform and no dispatch mode is active: they would take a kept clone for a constant."""
    return peek_interpreter_stack() is None and dispatch_modes() == 0


def _keepable(original: Tensor, clone: Tensor) -> bool:
    large = clone.nbytes >= _LARGE and not clone.requires_grad
    return large and type(clone) is type(original) is Tensor and not original.is_inference() and _plain()


def _batched(tensor: Any) -> bool:
    """Tell whether a tensor is batched by ``vmap``.

    A write there does not raise its version, so it counts as changed.
    """
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def mark_own(leaves: Iterable[Any]) -> None:
    """Mark tensors as each rank's own. Those with dims need no mark."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.ndim:
            setattr(leaf, _OWN, True)


def is_own(leaf: Tensor) -> bool:
    """Tell whether a tensor is marked as each rank's own."""
    return hasattr(leaf, _OWN)


def detached_own(leaf: Tensor) -> Tensor:
    """A tensor without its graph, with its mark."""
    found = leaf.detach()
    if is_own(leaf):
        setattr(found, _OWN, True)
    return found
