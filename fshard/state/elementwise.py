"""A guard of arithmetic on shards: what is not elementwise would depend on how leaves are cut, and is refused.

It runs where a step function is traced, on fake tensors, so that a step itself pays nothing. Outside of steps it looks
at ``fs.tree.map``. Operators are allowed by PyTorch's tag ``pointwise`` and by the lists below. The guard follows what
is made of shards: their elements lie where those of the shard do.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fshard import tree
from fshard.errors import TreeError
from fshard.runtime.comm.call_site import short_name
from fshard.runtime.engine.activations import written_by
from fshard.runtime.memory.slots import storage_of
from fshard.sharding.layout import Group
from fshard.sharding.plan import Plan
from fshard.torch_internals import OpOverload, TorchDispatchMode, dispatch_mode_stack


@dataclass(frozen=True)
class LeafCut:
    """The cut of a leaf into the parts of all ranks.

    Attributes:
        path: of the leaf.
        form: what its parts depend on. Leaves with equal forms have the same elements on a rank, on a mesh of any size.
    """

    path: str = field(compare=False)
    form: tuple[Any, ...]


def cut_of(plan: Plan, path: str) -> LeafCut | None:
    """The cut of a leaf of a plan; None for a leaf that every rank has as a whole."""
    group, number = plan.places()[path]
    return group_cut(group, number)


def group_cut(group: Group, number: int) -> LeafCut | None:
    """The cut of a leaf of a group, by its number there; None for a leaf that every rank has as a whole."""
    leaf = group.leaves[number]
    if not group.gather_axes and not leaf.compute.axes:
        return None
    form: tuple[Any, ...] = (group.kind, leaf.shape, leaf.at_rest, leaf.compute, group.gather_axes)
    if group.kind == "flat" and group.gather_axes:
        form = (*form, leaf.align, number, group.starts, group.leaves[-1].shape)
    return LeafCut(leaf.path, form)


ALIKE = frozenset(
    (
        *"detach detach_ alias _to_copy lift_fresh lift_fresh_copy copy_ fill_ zero_ where masked_fill".split(),
        *"zeros_like ones_like full_like empty_like hardswish hardswish_ hardtanh_ log_sigmoid_forward _conj".split(),
    )
)
"""Operators without the tag whose results have an element for each of the shard's, made of that one alone."""

DIFFERENT = frozenset("equal.default max.default min.default where.default rrelu.default rrelu_.default".split())
"""Operators with the tag, or with a name above, that reduce, search or draw."""

QUESTIONS = frozenset(
    "sym_size sym_stride sym_numel sym_storage_offset device is_contiguous size stride numel is_same_size".split()
)
"""Operators that ask for no values."""

FILLED = frozenset(
    "zeros ones full scalar_tensor new_zeros new_ones new_full zeros_like ones_like full_like fill_ zero_".split()
)
"""Operators whose results have one value in all elements."""

SAME_VALUES = frozenset("expand view _unsafe_view reshape slice select permute unsqueeze squeeze t alias".split())
"""Operators on such results that make others."""

SAME_SHAPE = frozenset("view _unsafe_view _reshape_alias reshape view_as".split())
"""Views that are allowed where the shape stays: what ``reshape(-1)`` of a 1-D shard calls."""


class ShardArithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows shards, and notes the first operator that is refused.

    An exception cannot leave from here: it would pass through C++ code of torch, some of which ends the process.

    Args:
        cut_of: the cut of a tensor from outside, if it is known to be a shard.

    Attributes:
        fault: the refusal.
        off: how many calls are under way that may do more with shards.
        written: the refusal of a write to what ``hold`` was given.
    """

    def __init__(self, cut_of: Callable[[Tensor], LeafCut | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside = cut_of
        self._cuts: Any = WeakIdKeyDictionary()
        self._made: Any = WeakIdKeyDictionary()  # tensors that are no shards: whether all elements have one value
        self._held: dict[int | None, str] = {}  # the leaves in each storage
        self.fault: TreeError | None = None
        self.written: TreeError | None = None
        self.off = 0

    def know(self, leaf: Tensor, cut: LeafCut | None) -> None:
        """Note a shard; a tensor without a cut is no shard, and has rows or elements of its own."""
        if cut is not None:
            self._cuts[leaf] = cut
        else:
            self._made[leaf] = False

    def hold(self, chunk: Tensor, group: Group) -> None:
        """Note memory of a group that a part of a step reads: no code may write to it from now on."""
        self._held[storage_of(chunk)] = ", ".join([leaf.path for leaf in group.leaves])

    def leave(self) -> None:
        """Stop watching, and forget what was refused: derivatives, which are not followed, do more with shards."""
        self.fault = None
        self.off += 1

    def check(self) -> None:
        """Raise the refusal.

        Raises:
            TreeError: if there is one.
        """
        if (fault := self.fault or self.written) is not None:
            raise fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the operator, run it, and note what its results are."""
        kwargs = kwargs or {}
        self._check_writes(func, args, kwargs)
        if self.off or not isinstance(func, OpOverload) or _name(func) in QUESTIONS:
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        cut = next((found for x in given if (found := self._cut(x)) is not None), None)
        if cut is None:
            result = func(*args, **kwargs)
            filled = self._filled(func, given)
            for x in _tensors(result):
                self._made[x] = filled
            return result
        shape = next(x.shape for x in given if self._cut(x) is not None)
        self._refuse(self._fault(func, args, given, cut, shape))
        result = func(*args, **kwargs)
        for x in _tensors(result):
            if x.shape != shape:
                self._refuse(_not_elementwise(func, cut))
            self._cuts[x] = cut
        return result

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for x in written_by(func, args, kwargs) if self._held else ():
            if (paths := self._held.get(storage_of(x))) is not None:
                self.written = self.written or _written(func, paths)

    def known(self, x: Tensor) -> LeafCut | None:
        """The cut of a tensor that was made of shards."""
        found: LeafCut | None = self._cuts.get(x)
        return found

    def _cut(self, x: Tensor) -> LeafCut | None:
        found: LeafCut | None = self._cuts.get(x)
        return found if found is not None or x in self._made else self._outside(x)

    def _refuse(self, fault: TreeError | None) -> None:
        self.fault = self.fault or fault

    def _filled(self, func: OpOverload, given: Sequence[Tensor]) -> bool:
        """Tell whether all elements of the result are one value."""
        name = _name(func)
        if name in FILLED:
            return True
        return bool(given) and all(map(self._one_value, given)) and (elementwise(func) or name in SAME_VALUES)

    def _one_value(self, x: Tensor) -> bool:
        return x.numel() == 1 or bool(self._made.get(x, False))

    def _fault(
        self, func: OpOverload, args: Any, given: Sequence[Tensor], cut: LeafCut, shape: torch.Size
    ) -> TreeError | None:
        if _name(func) in SAME_SHAPE and list(args[1]) in ([-1], list(args[0].shape)):
            return None
        if not elementwise(func):
            return _drawn(func, cut) if torch.Tag.nondeterministic_seeded in func.tags else _not_elementwise(func, cut)
        others = given[1:] if _name(func) == "copy_" else given
        for x in others:
            mine = self._cut(x)
            if mine is not None and mine != cut:
                return _cut_otherwise(func, cut, mine)
            alone = x.ndim == 0 or bool(self._made.get(x, False)) or (x.numel() == 1 and x.shape != shape)
            if mine is None and not alone and x in self._made:
                return _no_shard(func, cut)
        return None


def _tensors(found: Any) -> list[Tensor]:
    return [x for x in tree.leaves(found) if isinstance(x, Tensor)]


def elementwise(func: OpOverload) -> bool:
    """Tell whether an operator makes each element of its results of those at the same place in its arguments alone."""
    name, overload = _name(func), f"{_name(func)}.{func._overloadname}"
    if (
        overload in DIFFERENT
        or torch.Tag.nondeterministic_seeded in func.tags
        or func.namespace not in ("aten", "prim")
    ):
        return False
    return torch.Tag.pointwise in func.tags or name in ALIKE or _in_place(name)


def _in_place(name: str) -> bool:
    """Tell whether the name is that of the in-place form of an elementwise operator."""
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def _name(func: OpOverload) -> str:
    return func._schema.name.split("::")[-1]


def guards() -> list[ShardArithmetic]:
    """The guards that watch this code."""
    return [mode for mode in dispatch_mode_stack() if isinstance(mode, ShardArithmetic)]


@contextmanager
def unguarded() -> Iterator[None]:
    """Inside, code of this library does with shards what is right on every mesh."""
    found = guards()
    for guard in found:
        guard.off += 1
    try:
        yield
    finally:
        for guard in found:
            guard.off -= 1


def watched(call: Callable[[], Any]) -> Any:
    """Call a user's arithmetic on shards, outside of steps, whose trace has a guard of its own.

    Raises:
        TreeError: it makes numbers or tensors of shards that depend on the number of ranks.
    """
    if guards():
        return call()
    guard = ShardArithmetic(cut_of_shard)
    try:
        with guard:
            made = call()
    except Exception:
        guard.check()  # a part without elements has no largest one
        raise
    found = tree.leaves(made)
    if any(isinstance(x, (Tensor, float, complex)) for x in found):  # and not printed, or a shape
        guard.check()
    for x in found:
        if isinstance(x, Tensor) and (cut := guard.known(x)) is not None:
            setattr(x, tree.WATCHED, ShardMark(cut))
    return made


class ShardMark:
    """The attribute of a shard by which ``fs.tree.map`` watches what is made of it. Copies in files have none.

    Args:
        cut: its cut, or the group whose leaf it is, and its number there.
    """

    def __init__(self, cut: LeafCut | tuple[Group, int]) -> None:
        self._cut = cut

    @property
    def cut(self) -> LeafCut | None:
        """The cut; None where every rank has all of the leaf."""
        return group_cut(*self._cut) if isinstance(self._cut, tuple) else self._cut

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Call what a user maps over trees of shards."""
        return watched(call)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardMark":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.Size, ((),)  # what torch.load(weights_only=True) takes, and nothing looks at


def cut_of_shard(leaf: Any) -> LeafCut | None:
    """The cut of a marked tensor; None for others, and where every rank has all of it."""
    mark = getattr(leaf, tree.WATCHED, None)
    return mark.cut if isinstance(mark, ShardMark) else None


def know_shards(made: Any, plan: Plan) -> None:
    """Tell the guards that a tree which such code has made is one of shards."""
    for guard in guards():
        for path, leaf in tree.paths(made):
            cut = cut_of(plan, path)
            if cut is not None:
                guard.know(leaf, cut)


def _line() -> str:
    """The line of the caller's code that runs."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.split(".")[0] not in ("torch", "fshard", "optree", "contextlib"):
            return f" (line {frame.f_lineno} of {short_name(frame.f_code.co_filename)})"
        frame = frame.f_back
    return ""


REMEDY = (
    "fs.tree.norm, fs.tree.norms (of each leaf) and fs.tree.vdot give numbers of whole tensors, equal on all ranks; "
    "fs.unshard(tree, plan) gives whole tensors, outside of steps; a loss function has them; and a rule of the plan, "
    "({path!r}, fs.P()), keeps the leaf whole on every rank"
)


def _not_elementwise(func: OpOverload, cut: LeafCut) -> TreeError:
    return TreeError(
        f"{_name(func)} of the leaf {cut.path}{_line()} is not elementwise. Code outside of loss functions has this "
        f"rank's part of a leaf, so the result would depend on the number of ranks. {REMEDY.format(path=cut.path)}"
    )


def _drawn(func: OpOverload, cut: LeafCut) -> TreeError:
    return TreeError(
        f"{_name(func)} draws numbers for this rank's part of the leaf {cut.path}{_line()}, which would depend on the "
        f"number of ranks. Draw trees of shards that do not: fs.tree.normal(key, plan), fs.tree.rademacher(key, plan)"
    )


def _no_shard(func: OpOverload, cut: LeafCut) -> TreeError:
    return TreeError(
        f"{_name(func)} of the leaf {cut.path} and a tensor that is not cut as it is{_line()}: this rank has a part of "
        f"the leaf, which other ranks continue, and the tensor was made here, or is of the batch. Combine shards "
        f"with numbers, 0-dim tensors and shards of the same leaf: fs.shard(whole, plan) cuts whole tensors, and "
        f"fs.tree.normal(key, plan) draws"
    )


def _written(func: OpOverload, paths: str) -> TreeError:
    return TreeError(
        f"{_name(func)} writes to the memory of {paths}{_line()}: parameters of a state are read-only, and so are "
        f"trees of shards that a gradient, an evaluation or an update has read. Make new ones, by fs.tree.add or "
        f"fs.tree.map(lambda x: 2 * x, tree); state.replace(params=new) is a state of them"
    )


def _cut_otherwise(func: OpOverload, cut: LeafCut, other: LeafCut) -> TreeError:
    return TreeError(
        f"{_name(func)} of the leaves {cut.path} and {other.path}{_line()}: they are cut at different elements, so "
        f"elements of one rank do not belong together. {ALIKE_REMEDY}"
    )


ALIKE_REMEDY = (
    "Leaves are cut alike where they lie at equal places of groups of equal leaves: make each model a unit, or a plan "
    "of its own, on one mesh; cut both by a positional spec, such as fs.P('data'); or compute with whole tensors, "
    "fs.unshard(tree, plan), outside of steps"
)
"""A way out where leaves are cut differently."""
