"""Trees of shards that know the buffers behind them: one 1-D chunk a group, of which each leaf is a view.

Arithmetic on such trees is one kernel a group, and a pass reads the chunks as they lie. To users they are nested dicts
of tensors like any other. Each leaf carries a mark, so nothing else has to be kept to find the chunks again.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import described
from fshard.errors import DonatedError, TreeError, lines
from fshard.model.leaves import LeafOrder
from fshard.runtime.memory import memory_space
from fshard.sharding.layout import Group
from fshard.sharding.plan import Plan
from fshard.state.elementwise import LeafCut, ShardMark, cut_of, cut_of_shard, unguarded

_ATTRIBUTE = "_fshard_flat"


@dataclass(frozen=True, eq=False)
class FlatForm:
    """Leaves of a plan that a tree has, and the place of each in the chunk of its group.

    Attributes:
        order: the leaves.
        what: the name of such a tree, for errors.
    """

    plan: Plan
    order: LeafOrder
    what: str

    @functools.cached_property
    def places(self) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """For each leaf, in order, its group's id, its range in the chunk, and its shape on this rank."""
        found, mesh, out = self.plan.places(), self.plan.mesh, []
        for path in self.order.paths:
            group, number = found[path]
            begin, end = group.shard_range(number, mesh.index(group.gather_axes))
            out.append((group.id, begin, end, group.local_shape(number, mesh)))
        return out

    @functools.cached_property
    def likes(self) -> list[Tensor]:
        """For each leaf, in order, a tensor without data that has its shape and dtype on this rank."""
        dtypes = {group.id: group.dtype for group in self.groups}
        return [torch.empty(shape, dtype=dtypes[group], device="meta") for group, _, _, shape in self.places]

    @functools.cached_property
    def cuts(self) -> list[LeafCut | None]:
        """For each leaf, in order, its cut; None if every rank has all of it."""
        return [cut_of(self.plan, path) for path in self.order.paths]

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups that hold a leaf of it."""
        held = {group for group, *_ in self.places}
        return tuple(group for group in self.plan.groups if group.id in held)

    def zero_chunks(self) -> dict[int, Tensor]:
        """The gradients of groups that get none: zeros that take no memory."""
        idle, device = [group for group in self.groups if not group.trainable], self.plan.mesh.device
        return {g.id: torch.zeros(1, dtype=g.dtype, device=device).expand(g.chunk) for g in idle}

    def views(self, chunks: Mapping[int, Tensor]) -> list[Tensor]:
        """Each leaf as a view of its group's chunk."""
        return [chunks[group][begin:end].view(shape) for group, begin, end, shape in self.places]

    def read(self, given: Any, what: str = "") -> list[Tensor]:
        """The leaves of a tree, in order.

        Raises:
            TreeError: leaves are missing, unknown, of another shape, or no tensors.
        """
        what = what or self.what
        leaves = self.order.read(given)
        if leaves is None:
            leaves = self._found(given, what)
        shapes = [shape for *_, shape in self.places]
        wrong = [
            f"{path}: {list(getattr(leaf, 'shape', ()))}, this rank's part has {list(shape)}"
            for path, leaf, shape in zip(self.order.paths, leaves, shapes, strict=True)
            if not isinstance(leaf, Tensor) or leaf.shape != shape
        ]
        if wrong:
            raise TreeError(lines(f"{what} does not have this rank's shapes:", wrong, f"Give {self.what}."))
        return leaves

    def _found(self, given: Any, what: str) -> list[Any]:
        """The leaves of a tree of other mappings than plain dicts."""
        if not isinstance(given, Mapping):
            raise TreeError(f"{what} is {described(given)}, not a nested dict of tensors: give {self.what}")
        found = dict(tree.paths(given))
        wrong = [f"missing  {path}" for path in self.order.paths if path not in found]
        wrong += [f"unknown  {path}" for path in found if path not in self.order.paths]
        if wrong:
            raise TreeError(lines(f"{what} is not a tree of these leaves:", wrong, f"Give {self.what}."))
        return [found[path] for path in self.order.paths]


def form_of(plan: Plan, paths: Sequence[str] | None = None, what: str = "this rank's part of each leaf") -> FlatForm:
    """The form of trees with these leaves of a plan; by default with all."""
    return FlatForm(plan, LeafOrder(what, plan.leaves if paths is None else paths), what)


class Flat:
    """A tree of shards by group.

    Args:
        form: its leaves.
        chunks: this rank's chunk of each group, 1-D, by group id. Elements of no leaf of it are zero.
    """

    def __init__(self, form: FlatForm, chunks: Mapping[int, Tensor]) -> None:
        self.form, self._chunks = form, chunks

    donated = False
    """Whether an update has taken the chunks, which it spends."""

    passing: frozenset[int] = frozenset()
    """The groups whose chunks have memory for a while alone: what reads them last lets go of it."""

    @property
    def chunks(self) -> Mapping[int, Tensor]:
        """The chunks."""
        return self._chunks

    @property
    def held(self) -> Mapping[int, Tensor]:
        """The chunks as they lie, whether or not what fills them is over."""
        return self._chunks

    @functools.cached_property
    def leaves(self) -> list[Tensor]:
        """A tensor for each leaf, in the order of the form, each with the mark of this tree."""
        found, places = self.form.views(self._chunks), self.form.plan.places()
        for leaf, path in zip(found, self.form.order.paths, strict=True):
            setattr(leaf, tree.WATCHED, ShardMark(places[path]))
        return self.marked(found)

    def marked(self, leaves: list[Tensor]) -> list[Tensor]:
        """The leaves with the mark of this tree."""
        for leaf in leaves:
            setattr(leaf, _ATTRIBUTE, self)
        return leaves

    def tree(self) -> dict[str, Any]:
        """The nested dict of the leaves."""
        return self.form.order.tree(self.leaves)

    def donate(self) -> None:
        """Give the chunks away: every leaf that was handed out can no longer be used."""
        self.donated = True
        for leaf in self.__dict__.get("leaves", ()):
            with torch.no_grad():
                leaf.set_()
            leaf.__class__ = Spent

    def made(self, chunks: Mapping[int, Tensor]) -> "Flat":
        """Return what arithmetic on this tree makes: a tree of the same kind with other chunks."""
        return Flat(self.form, chunks)


class Spent(Tensor):
    """A gradient that was donated to an update: any use of it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every operation."""
        raise _spent()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<a gradient that was donated to an update>"


def _spent() -> DonatedError:
    return DonatedError(
        "these gradients were donated to an update, which spends their memory: clone them before the update, or make "
        "it by fs.make_update(..., donate=False)"
    )


def mark_of(leaf: Any) -> Flat | None:
    """The tree that a tensor is a leaf of, if it has one."""
    return getattr(leaf, _ATTRIBUTE, None)


def path_of(leaf: Any) -> str | None:
    """The path of a leaf of a tree that knows its chunks; None for others."""
    flat = mark_of(leaf)
    if flat is None:
        return None
    return next((path for mine, path in zip(flat.leaves, flat.form.order.paths, strict=True) if mine is leaf), None)


def cut_of_leaf(leaf: Any) -> LeafCut | None:
    """The cut of a leaf of a tree that knows its chunks; None for others, and where every rank has all of it."""
    flat, path = mark_of(leaf), path_of(leaf)
    return cut_of_shard(leaf) if flat is None or path is None else cut_of(flat.form.plan, path)


def known_flat(given: Any) -> Flat | None:
    """The buffers behind a nested dict of tensors; None if it is not just the leaves of one tree."""
    below = given
    while type(below) is dict and below:
        below = next(iter(below.values()))
    flat = mark_of(below)
    if flat is None:
        return None
    if flat.donated:
        raise _spent()
    leaves = flat.form.order.read(given)
    same = leaves is not None and all(map(operator.is_, leaves, flat.leaves))
    return flat if same else None


def flat_of(given: Any, form: FlatForm, what: str = "") -> Flat:
    """A tree of shards as chunks: those behind it, or new ones with copies of its leaves.

    Raises:
        TreeError: it does not have these leaves.
    """
    flat = known_flat(given)
    if flat is not None and (flat.form is form or alike(flat.form, form)):
        return flat
    leaves = form.read(given, what)
    with unguarded():
        return Flat(form, _filled(form, leaves))


def _filled(form: FlatForm, leaves: Sequence[Tensor]) -> dict[int, Tensor]:
    """Chunks with copies of leaves."""
    chunks = {
        group.id: memory_space(group.kinds.param, form.plan.mesh).zeros(group.chunk, group.dtype)
        for group in form.groups
    }
    with torch.no_grad():
        for leaf, view in zip(leaves, form.views(chunks), strict=True):
            view.copy_(leaf.detach())
    return chunks


def each_chunk(call: Callable[..., Tensor], *flats: Flat) -> dict[int, Tensor]:
    """``call(chunk, ...)`` for each group of the first tree."""
    with torch.no_grad():
        columns = [flat.chunks for flat in flats]
        return {group: call(*[column[group] for column in columns]) for group in columns[0]}


def same_layout(a: Plan, b: Plan) -> bool:
    """Tell whether the leaves of two plans lie alike."""
    if a.mesh is not b.mesh or len(a.groups) != len(b.groups):
        return False
    return all(
        g.chunk == h.chunk and g.starts == h.starts and [x.path for x in g.leaves] == [x.path for x in h.leaves]
        for g, h in zip(a.groups, b.groups, strict=True)
    )


def alike(a: FlatForm, b: FlatForm) -> bool:
    """Tell whether trees of two forms have the same leaves at the same places."""
    return a.order.paths == b.order.paths and same_layout(a.plan, b.plan)
