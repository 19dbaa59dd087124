"""Exports that follow each other: whole leaves at first, and from then on the elements that have changed.

A low-precision copy of weights changes little in a step of fine-tuning: most updates are smaller than the rounding of
bfloat16. So each rank keeps what it has sent of its own shard, compares bits, and sends the changed elements with their
places. Values replace values, nothing is added up, so a receiver has the bits of a whole export (Miahi and Belilovsky,
"Understanding and exploiting weight update sparsity for communication-efficient distributed RL", 2026).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from fshard.arguments import expect
from fshard.errors import TreeError
from fshard.interchange.export import What, deliver_all, export_entries
from fshard.interchange.export_plan import ROLE, ExportItem, fetch, plan_export, positions, send_rows
from fshard.interchange.rename import RenameLike
from fshard.runtime.comm import all_ranks_or_raise, collective_call, mesh_communicator
from fshard.sharding.layout import Piece
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan
from fshard.sharding.spec import Shape
from fshard.state.train_state import TrainState

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integers by the bytes of an element: equal bits are equal elements, nan and -0.0 included."""


@dataclass(frozen=True, eq=False)
class Change:
    """The change of one leaf since the export before. Made by ``fs.io.Exporter``.

    Attributes:
        name: its exported name.
        shape: its exported shape.
        number: of the export that this is from; the first is 1.
        base: of the export that last sent this leaf, whose values ``apply`` needs; None if the leaf is whole.
        places: where its changed elements are in the flat leaf, 1-D, int32 (int64 from 2**31 elements on), in no
            order; None if the leaf is whole.
        values: the new values of these elements, 1-D; or the whole leaf, of shape ``shape``.

    >>> change = fs.io.Change("w", (2, 2), 2, 1, torch.tensor([3], dtype=torch.int32), torch.tensor([5.0]))
    >>> change.apply(torch.zeros(2, 2)), change.nbytes
    (tensor([[0., 0.],
            [0., 5.]]), 8)
    """

    name: str
    shape: Shape
    number: int
    base: int | None
    places: Tensor | None
    values: Tensor

    @property
    def nbytes(self) -> int:
        """The bytes of the values and their places."""
        return self.values.nbytes + (0 if self.places is None else self.places.nbytes)

    def apply(self, leaf: Tensor | None = None) -> Tensor:
        """Write the change to a leaf, and return the leaf. Local.

        Args:
            leaf: what the receiver has, of the shape and dtype of the export. A whole leaf needs none.

        Raises:
            TreeError: a leaf of another shape or dtype, or none where only some elements have arrived.
        """
        if leaf is None and self.places is None:
            return self.values
        if leaf is None or leaf.shape != self.shape or leaf.dtype != self.values.dtype:
            has = "None" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
            raise TreeError(
                f"the change of {self.name} in export {self.number} is for a leaf {self.values.dtype}"
                f"{list(self.shape)} as export {self.base} left it, and was given {has}. Apply all changes in order; "
                f"exporter.forget() on all ranks makes the next export whole."
            )
        with torch.no_grad():
            if self.places is None:
                return leaf.copy_(self.values)
            return leaf.put_(self.places.to(leaf.device, torch.int64), self.values.to(leaf.device))

    def __repr__(self) -> str:
        return f"Change({self.name!r}, {list(self.shape)}, {self.values.numel()} of {math.prod(self.shape)} elements)"


class Exporter:
    """Exports a state again and again: the first time whole leaves, and then what has changed since. Collective.

    It keeps this rank's shard as the receivers have it, in the dtype of the export, beside the state. A leaf without a
    changed element is not sent. One of which so much has changed that places and values take more bytes than all of
    it is sent whole.

    A stream that a rank did not take to its end, or whose callback has failed, is forgotten on that rank: then the next
    export of the leaves that it holds is whole. ``Change.base`` tells a receiver whether it has missed something.

    Args:
        what: as in ``fs.io.export``, like all others.
        to: the rank that receives; None for all ranks.
        axes: axes over which leaves are gathered although compute leaves them local, or ``"all"``.
        dtype: the dtype to which floating-point leaves are cast before they are compared and sent.
        rename: rules from paths to names.

    >>> params = {"w": torch.ones(2, 3), "b": torch.zeros(3)}
    >>> plan = fs.make_plan(params, fs.make_mesh((-1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> state, exporter, engine = fs.init_state(plan, params=params), fs.io.Exporter(dtype=torch.bfloat16), {}
    >>> for change in exporter(state):
    ...     engine[change.name] = change.apply(engine.get(change.name))
    >>> params["w"][1, 2] = 5.0
    >>> state = fs.init_state(plan, params=params)
    >>> for change in exporter(state):
    ...     print(change, change.nbytes)
    ...     engine[change.name] = change.apply(engine.get(change.name))
    Change('w', [2, 3], 1 of 6 elements) 6
    >>> engine["w"][1].tolist()
    [1.0, 1.0, 5.0]
    """

    def __init__(
        self,
        *,
        what: What = "params",
        to: int | None = None,
        axes: Axes | Literal["all"] = (),
        dtype: torch.dtype | None = None,
        rename: Sequence[RenameLike] = (),
    ) -> None:
        self.what: What = what
        self.options: dict[str, Any] = {"to": to, "axes": axes, "dtype": dtype, "rename": rename}
        self.number = 0
        self._held: dict[str, _Held] = {}

    def __repr__(self) -> str:
        return f"<exporter of {self.what} after {self.number} exports>"

    def forget(self) -> None:
        """Make the next export whole, for receivers that lack something. Local; call it on all ranks."""
        self._held = {}

    @overload
    def __call__(
        self, state: TrainState | Mapping[str, Any], plan: Plan | None = ..., *, callback: None = ...
    ) -> Iterator[Change]: ...

    @overload
    def __call__(
        self,
        state: TrainState | Mapping[str, Any],
        plan: Plan | None = ...,
        *,
        callback: Callable[[Change], object],
    ) -> None: ...

    @collective_call
    def __call__(
        self,
        state: TrainState | Mapping[str, Any],
        plan: Plan | None = None,
        *,
        callback: Callable[[Change], object] | None = None,
    ) -> Iterator[Change] | None:
        """Stream the changes of a state. Collective; every rank iterates over the whole stream.

        Args:
            state: a state, or a tree such as ``state.params`` together with ``plan``.
            plan: the plan of a tree.
            callback: a function that is called with each change. If it raises on one rank, the other ranks finish
                the stream, and all ranks raise at its end.

        Returns:
            An iterator over ``Change``, on ranks that receive; with ``callback``, None at the end of the stream.

        Raises:
            PlanError, TreeError, CheckpointError, PeerError: as ``fs.io.export``.
        """
        expect("exporter(state)", [("callback", callback, (Callable, type(None)), "a function (change), or None")])
        plan, listed, check_alive = export_entries(state, plan, self.what)
        items = plan_export(plan, listed, **self.options)
        # Until the stream has ended nothing is known of what receivers have.
        held, self._held, self.number = self._held, {}, self.number + 1
        found: list[Tensor | None] = []

        def count() -> list[int]:
            found[:] = [_changed(item, held.get(item.name)) for item in items]
            return [-1 if places is None else places.numel() for places in found]

        counts = all_ranks_or_raise(mesh_communicator(plan.mesh, ROLE), count)
        rows = [[counts[rank][at] for rank in positions(item.ranks)] for at, item in enumerate(items)]
        stream = self._stream(self.number, items, held, found, rows, check_alive)
        if callback is None:
            return (change for change in stream if change is not None)
        try:
            deliver_all(plan, stream, callback)
        except BaseException:
            self.forget()
            raise
        return None

    def _stream(
        self,
        number: int,
        items: Sequence[ExportItem],
        held: "dict[str, _Held]",
        found: Sequence[Tensor | None],
        rows: Sequence[list[int]],
        check_alive: Callable[[], object],
    ) -> Iterator[Change | None]:
        kept: dict[str, _Held] = {}
        for item, changed, counts in zip(items, found, rows, strict=True):
            check_alive()
            before = held.get(item.name)
            if changed is None or before is None or not _sparse(item, counts):
                whole = fetch(item)
                if takes_part(item):
                    kept[item.name] = _Held(number, item.have, _cast(item).clone())
                yield None if whole is None else Change(item.name, item.shape, number, None, None, whole)
            elif not any(counts):
                kept[item.name] = before
            else:
                values = _cast(item)[changed]
                arrived = _send(item, counts, changed, values)
                before.tensor[changed] = values
                kept[item.name] = _Held(number, item.have, before.tensor)
                yield None if arrived is None else Change(item.name, item.shape, number, before.number, *arrived)
        if number == self.number:
            self._held = kept


@dataclass(frozen=True, eq=False)
class _Held:
    """Values that receivers have of this rank's part of a leaf, and the export that last sent it."""

    number: int
    have: tuple[Piece, ...]
    tensor: Tensor


def takes_part(item: ExportItem) -> bool:
    """Tell whether this rank sends or receives a part of the leaf."""
    return item.root is None or item.root in positions(item.ranks)


def _cast(item: ExportItem) -> Tensor:
    """This rank's part in the dtype of the export, 1-D; maybe the memory of the state."""
    return item.entry.tensor.detach().to(item.ranks.mesh.device, item.dtype)


def _index_dtype(item: ExportItem) -> torch.dtype:
    return torch.int32 if math.prod(item.shape) < 1 << 31 else torch.int64


def _pays(item: ExportItem, count: int) -> bool:
    """Tell whether so many elements with their places take fewer bytes than the whole leaf."""
    width = item.dtype.itemsize
    return count * (width + _index_dtype(item).itemsize) < math.prod(item.shape) * width


def _sparse(item: ExportItem, counts: Sequence[int]) -> bool:
    """Tell whether changed elements are sent, and not the whole leaf, given the numbers of them on all ranks."""
    pieces = dict(zip(item.have, counts, strict=True))
    return min(counts) >= 0 and (not any(counts) or _pays(item, sum(pieces.values())))


def _changed(item: ExportItem, held: _Held | None) -> Tensor | None:
    """Say where this rank's part differs from what receivers have, 1-D; None if all of the leaf has to be sent."""
    if not takes_part(item):
        return item.entry.tensor.new_empty(0, dtype=torch.int64)
    new = _cast(item)
    if held is None or held.have != item.have or held.tensor.dtype != new.dtype:
        return None
    integers, width = INTEGERS[new.element_size()], max(1, new.element_size() // 8)
    differs = torch.ne(new.view(integers), held.tensor.view(integers))
    if width > 1:
        differs = differs.view(new.numel(), width).any(1)
    places = differs.nonzero().view(-1)
    return places if places.numel() == 0 or _pays(item, places.numel()) else None


def _send(item: ExportItem, counts: Sequence[int], changed: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
    """The places and values of changed elements, on ranks that receive them. Collective over the item's ranks."""
    if not takes_part(item):
        return None
    places = _exported_places(item, changed).to(_index_dtype(item))
    size = places.element_size(), values.element_size()
    row = torch.cat([places.view(torch.uint8), values.contiguous().view(torch.uint8)])
    rows = send_rows(item, row, [count * sum(size) for count in counts])
    if rows is None:
        return None
    cuts = [len(row) // sum(size) * size[0] for row in rows]
    # Copies begin at addresses that views of wider elements need.
    where = torch.cat([row[:cut] for row, cut in zip(rows, cuts, strict=True)]).view(places.dtype)
    return where, torch.cat([row[cut:] for row, cut in zip(rows, cuts, strict=True)]).view(values.dtype)


def _exported_places(item: ExportItem, changed: Tensor) -> Tensor:
    """Places in the flat exported leaf of elements of this rank's part."""
    piece: Piece = item.have[positions(item.ranks).index(item.ranks.mesh.rank)]
    low, shape = item.block
    rest, out, stride = changed + piece.start, torch.zeros_like(changed), 1
    places: list[Tensor] = []
    for size, start, begin in zip(piece.shape[::-1], piece.offset[::-1], low[::-1], strict=True):
        places.insert(0, rest % size + (start - begin))
        rest = rest // size
    sizes = shape[::-1] if item.transpose else shape
    for place, size in zip(places if item.transpose else places[::-1], sizes[::-1], strict=True):
        out += place * stride
        stride *= size
    return out
