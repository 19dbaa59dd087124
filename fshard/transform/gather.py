"""From shards to the parameters that a loss function reads, in operations that every transform can follow.

The gather of a group is one collective whose adjoint is a reduce-scatter; replicated leaves pass through ``Vary``,
whose adjoint is a sum. With ``reshard`` the groups of a unit are gathered where the unit runs, inside of ``fs.remat``:
only shards and the unit's inputs are kept, and every derivative gathers again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.collectives import raw
from fshard.collectives.linear import Gather, LinearCollective, Scatter, Vary, apply
from fshard.collectives.ranks import Ranks
from fshard.collectives.scope import bind
from fshard.errors import TransformError
from fshard.model.remat_function import remat
from fshard.model.unit import Slot, Unit, slot_of
from fshard.runtime.engine.proxies import Proxy, make_proxy, opened
from fshard.sharding.float8_leaves import refuse_float8
from fshard.sharding.layout import Group
from fshard.sharding.leaf import casting_of
from fshard.sharding.owners import ROOT
from fshard.sharding.plan import Plan
from fshard.state.flat_maps import cut_leaves, join_pieces


def gather(plan: Plan, group: Group, pieces: Sequence[Tensor]) -> list[Tensor]:
    """The compute leaves of a group, varying over every data axis that does not cut them."""
    refuse_float8(plan.leaves)
    if not group.trainable:
        pieces = [piece.detach() for piece in pieces]
    if group.kinds.hosted:
        pieces = [piece.to(plan.mesh.device) for piece in pieces]
    sums = Ranks(plan.mesh, group.sum_axes)
    if group.parts == 1 and sums.size == 1:
        # No data move. The leaves are new views: a write by the loss function shows in their versions.
        alone = zip(group.leaves, pieces, strict=True)
        return [piece.view(leaf.compute_shape).to(group.compute_dtype) for leaf, piece in alone]
    chunk = join_pieces(group, plan.mesh, pieces)
    if group.trainable and sums.size > 1:
        chunk = apply(chunk, Vary(sums))
    if group.parts > 1:
        chunk = apply(chunk, GatherShards(Ranks(plan.mesh, group.gather_axes), -1))
    # Cast after the gather, so that gradients are added up in the dtype of the parameters.
    return cut_leaves(group, chunk.to(group.compute_dtype))


def gather_all(plan: Plan, flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """The parameter tree of compute leaves."""
    out: dict[str, Tensor] = {}
    for group in plan.groups:
        leaves = gather(plan, group, [flat[leaf.path] for leaf in group.leaves])
        out.update((leaf.path, tensor) for leaf, tensor in zip(group.leaves, leaves, strict=True))
    return tree.nest({path: out[path] for path in plan.leaves})


def gather_some(plan: Plan, flat: Mapping[str, Tensor], trainable: bool) -> dict[str, Tensor]:
    """The compute leaves, by path, of the groups that are trained, or of all others. It is linear in the shards."""
    out: dict[str, Tensor] = {}
    for group in plan.groups:
        if group.trainable == trainable:
            leaves = gather(plan, group, [flat[leaf.path] for leaf in group.leaves])
            out.update((leaf.path, tensor) for leaf, tensor in zip(group.leaves, leaves, strict=True))
    return out


class GatherShards(Gather):
    """The gather of a group, which refuses batches of directions along single elements of several ranks."""

    def start(self, x: Tensor) -> raw.Finish:
        finish = super().start(x)
        if x.dim() != 2 or x.numel() == 0:
            return finish

        def checked() -> Tensor:
            full = finish()
            refuse_elements(full.view(len(full), self.group.size, -1))
            return full

        return checked

    def transpose(self) -> LinearCollective:
        return ScatterShards(self.group, self.dim)


class ScatterShards(Scatter):
    """The adjoint of ``GatherShards``."""

    def transpose(self) -> LinearCollective:
        return GatherShards(self.group, self.dim)


def refuse_elements(rows: Tensor) -> None:
    """Refuse a batch of directions that is the standard basis of the elements of several ranks.

    ``torch.func.hessian`` and ``jacfwd`` push such a batch through a function, and each row would move one element of
    every rank. All ranks see the same rows, ``(batch, ranks, chunk)``, so all raise.
    """
    set_ = rows != 0
    if not bool(((set_.sum(-1) <= 1) & (rows.sum(-1) == set_.any(-1))).all()):
        return
    column = torch.where(set_.any(-1), set_.int().argmax(-1), -1)  # (batch, ranks)
    alone = all(bool((at[at >= 0].diff() > 0).all()) for at in column.unbind(1))
    if alone and bool(((column >= 0).sum(1) > 1).any()):
        raise TransformError(
            f"a derivative by single elements of shards: {rows.shape[1]} ranks would each move an element of their own "
            f"at the same time, which gives meaningless sums (torch.func.hessian and jacfwd do this). Differentiate by "
            f"whole tensors, g = lambda whole: f(fs.shard(whole, plan), batch), or multiply by vectors with fs.func.hvp"
        )


class Versions:
    """Tensors that must not be written to, with their versions."""

    def __init__(self) -> None:
        self._watched: list[tuple[str, Tensor, int]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Watch a tensor from now on."""
        self._watched.append((name, tensor, tensor._version))

    def written(self) -> list[str]:
        """The names of the tensors that were written to."""
        return [name for name, tensor, version in self._watched if tensor._version != version]


class Resharding:
    """Runs the units of one call of a loss function: gather, compute, free; and again in the backward.

    ``handshake`` raises on all ranks, before a gather, unless all are at this unit and none has failed. ``versions``
    watches the leaves that code between units reads.
    """

    def __init__(
        self, plan: Plan, flat: Mapping[str, Tensor], handshake: Callable[[str], object], versions: Versions
    ) -> None:
        self.plan, self.flat, self.handshake, self.versions = plan, flat, handshake, versions
        self.places = plan.places()
        self.casting = casting_of(plan.precision, plan.leaves)
        self.kept: dict[int, list[Tensor]] = {}
        self.slots: list[Slot] = []

    @contextmanager
    def params(self) -> Iterator[dict[str, Any]]:
        """The tree for the loss function, while it runs."""
        out: dict[str, Tensor] = {}
        for group in self.plan.groups:
            lazy = group.unit != ROOT and group.parts > 1
            leaves = [self._lazy(group, n) for n in range(len(group.leaves))] if lazy else self._keep(group.id)
            out.update((leaf.path, tensor) for leaf, tensor in zip(group.leaves, leaves, strict=True))
        try:
            yield tree.nest({path: out[path] for path in self.plan.leaves})
        finally:
            # Proxies, their slots and the modules that hold them form a cycle: without this, gathered leaves would
            # live until the next garbage collection.
            self.kept.clear()
            for slot in self.slots:
                slot.instances.clear()

    def leaf(self, path: str) -> Tensor:
        """A leaf that code between units reads."""
        group, number = self.places[path]
        return self._keep(group.id)[number]

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit."""
        leaves, spec = tree.flatten(params)
        slots = [slot_of(leaf) if isinstance(leaf, Proxy) else None for leaf in leaves]
        given = [leaf if slot is None else None for leaf, slot in zip(leaves, slots, strict=True)]
        at = [self.places[slot.path] if slot is not None else None for slot in slots]
        groups = {place[0].id: place[0] for place in at if place is not None}

        def body(pieces: dict[int, list[Tensor]], given: list[Any], args: Any, kwargs: Any) -> Any:
            full = {number: gather(self.plan, groups[number], pieces[number]) for number in groups}
            filled = [
                leaf if place is None else full[place[0].id][place[1]] for leaf, place in zip(given, at, strict=True)
            ]
            stopped = [slot is not None and slot.stopped for slot in slots]
            filled = [leaf.detach() if stop else leaf for leaf, stop in zip(filled, stopped, strict=True)]
            with bind(self.plan.mesh, self.plan.data_axes):  # in a backward no mesh is in scope
                return unit.fn(tree.unflatten(spec, filled), *args, **kwargs)

        pieces = {number: [self.flat[leaf.path] for leaf in group.leaves] for number, group in groups.items()}
        args, kwargs = tree.mapped(opened, (args, kwargs))
        self.handshake(", ".join(group.name for group in groups.values()))
        body.__name__ = f"unit {unit.name or getattr(unit.fn, '__name__', '')}"  # for errors
        return remat(body)(pieces, given, args, kwargs)

    def _keep(self, number: int) -> list[Tensor]:
        if number not in self.kept:
            group = self.plan.groups[number]
            if group.unit != ROOT and group.parts > 1:
                self.handshake(group.name)
            self.kept[number] = gather(self.plan, group, [self.flat[leaf.path] for leaf in group.leaves])
            for leaf, tensor in zip(group.leaves, self.kept[number], strict=True):
                self.versions.add(f"params {leaf.path}", tensor)
        return self.kept[number]

    def _lazy(self, group: Group, number: int) -> Tensor:
        leaf = group.leaves[number]
        self.slots.append(Slot(self, leaf.path, self.casting, leaf.shape))
        like, dtype, device = self.flat[leaf.path], group.compute_dtype, torch.device(self.plan.mesh.device)
        return make_proxy(self.slots[-1], like, leaf.compute_shape, dtype, device)
