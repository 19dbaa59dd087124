"""The tensors behind a train state: buffers that steps update where they lie, and the trees that are read of them."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import described
from fshard.errors import DonatedError, StateError, TreeError, lines
from fshard.runtime.comm.device_streams import ComputeOrder
from fshard.runtime.execution import HELD_LOCALLY, PendingUpdate, Several, Shard, Shards, held_back
from fshard.runtime.memory import BufferLayout, keep, memory_space, values_of
from fshard.sharding.layout import Group
from fshard.sharding.plan import Plan
from fshard.state.elementwise import ShardMark


class Donated(Tensor):
    """A tensor of a donated state: any use of it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every operation."""
        raise DonatedError(
            "this tensor belongs to a state that was donated to a train step, which updated its memory in place: "
            "read it from the state that the step returned, clone it first, or build the step with donate=False"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<a tensor of a donated state>"


@dataclass(frozen=True)
class Layout:
    """A maker of trees from buffers: the plan, and where the optimizer's buffers keep what belongs to a leaf.

    Attributes:
        layouts: of the optimizer's buffers, by name, for each group.
        parts: the range of each group's shard that this rank updates; None for all of it.
    """

    plan: Plan
    layouts: tuple[Mapping[str, BufferLayout], ...]
    parts: tuple[tuple[int, int] | None, ...]

    def __hash__(self) -> int:
        return hash((self.plan.mesh, tuple(self.plan.leaves), self.parts))

    def pack(self, params: Any, opt_state: Any) -> Shards:
        """Buffers of their own memory that hold these trees, and zeros between the leaves.

        Raises:
            TreeError: leaves are missing, unknown, of another shape or dtype, or no tensors.
        """
        plan, shards = self.plan, []
        flat = plan.check_tree(params, whole=False, what="state.params")
        if not isinstance(opt_state, Mapping):
            raise TreeError(f"state.opt_state is {described(opt_state)}: give a dict of trees, as state.opt_state was")
        states = {name: dict(tree.paths(value)) for name, value in opt_state.items()}
        for group, layouts, part in zip(plan.groups, self.layouts, self.parts, strict=True):
            param = memory_space(group.kinds.param, plan.mesh).zeros(group.chunk, group.dtype)
            begins = [group.shard_range(n, plan.mesh.index(group.gather_axes)) for n in range(len(group.leaves))]
            _fill(param, dict(enumerate(begins)), group, flat, "params")
            place = memory_space(group.kinds.opt, plan.mesh)
            opt = {name: place.zeros(kept.length, kept.dtype) for name, kept in layouts.items()}
            for name, kept in layouts.items():
                _fill(opt[name], kept.ranges, group, states.get(name, {}), f"opt_state[{name!r}]")
            shards.append(Shard(keep(group, plan.mesh, param), opt, layouts, part))
        return Shards(shards)


def _fill(
    buffer: Tensor, ranges: Mapping[int, tuple[int, int]], group: Group, flat: Mapping[str, Any], what: str
) -> None:
    """Write the leaves of a group to their ranges."""
    for number, (begin, end) in ranges.items():
        path, want = group.leaves[number].path, end - begin
        leaf = flat.get(path)
        if not isinstance(leaf, Tensor) or leaf.numel() != want or leaf.dtype != buffer.dtype:
            given = f"{list(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else described(leaf)
            raise TreeError(
                f"state.{what}: the leaf {path} is {given}, and this rank holds {want} elements of {buffer.dtype}: map "
                f"states to tensors of equal shape and dtype; fs.reshard_state and plan.replace change the others"
            )
        buffer[begin:end] = leaf.detach().reshape(-1)


@dataclass(frozen=True)
class Loose:
    """The trees of a state that have not become buffers yet.

    Attributes:
        layout: makes the buffers.
        params: the parameters.
        opt: the optimizer's trees, by name.
    """

    layout: Layout
    params: Any
    opt: Any


@dataclass(frozen=True)
class Donation:
    """Memory that was given away, until the next state is used.

    Attributes:
        to: the memory of the next state, while anybody holds it.
        shards: the shards, which it shares.
        pending: the update that waited for them.
        stale: the groups that lacked what other ranks had updated.
    """

    to: Callable[[], "StateMemory | None"]
    shards: Shards
    pending: PendingUpdate | Several | None
    stale: dict[int, None]


class StateMemory:
    """The memory of a state: the shards, the update that still waits for them, and the trees that were read.

    States that are equal because one is a copy of the other, as by ``dataclasses.replace``, have one memory.

    Args:
        plan: where leaves live.
        shards: by group id.
        pending: the update; None if it was applied.
        stale: the groups whose shards lack what other ranks have updated.

    Attributes:
        compared: whether ranks have compared what they hold copies of.
        lent: whether other states may have these shards too, so that an update is applied to copies.
        origin: inside of a step function that runs part by part, the number of the state that it came from; else None.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Shards | None,
        pending: PendingUpdate | Several | None = None,
        stale: Mapping[int, None] | None = None,
    ) -> None:
        self.plan, self.pending, self.stale = plan, pending, dict(stale or {})
        self.compared = self.lent = False
        self.origin: int | None = None
        self._streams = plan.mesh.device.type in ComputeOrder.kinds
        self._shards = shards
        if self._streams and shards is not None:
            shards.follow(plan.mesh.device)
        self._loose: Loose | None = None
        self._params: Any = None
        self._opt: Any = None
        self._read: list[tuple[Tensor, int]] = []
        self._given: Donation | None = None
        self._giver: StateMemory | None = None

    @classmethod
    def of(cls, layout: Layout, params: Any, opt_state: Any) -> "StateMemory":
        """The memory of trees. They become buffers when a step, or anything else, asks for these."""
        out = cls(layout.plan, None)
        out._loose = Loose(layout, params, opt_state)
        return out

    @property
    def donated(self) -> bool:
        """Tell whether a step has taken it."""
        self._take_back()
        return self._shards is None and self._loose is None

    def shards(self, step: int) -> Shards:
        """The shards as they lie, with ``pending`` still to be applied; ``step`` names the state in an error.

        The current stream of the device waits for what another one does with them.

        Raises:
            DonatedError: a step has taken them.
            TreeError: trees that are not those of the plan.
        """
        if self._loose is not None:
            self._shards = self._loose.layout.pack(self._loose.params, self._loose.opt)
            self._loose = None
        self._take_back()
        if self._giver is not None:  # somebody holds this memory, and what follows may write to it
            self._giver._given = None
            self._giver = None
        if self._shards is None:
            raise DonatedError(
                f"the state of step {step} was donated to a train step, which updated its memory in place: "
                f"use the state that the step returned, or build the step with donate=False"
            )
        if self._streams:
            if self.pending is not None:
                self.pending.follow()
            self._shards.follow(self.plan.mesh.device)
        return self._shards

    def applied(self, step: int) -> Shards:
        """The shards, with no update waiting. Local: what other ranks update may still be missing."""
        shards = self.shards(step)
        if self.pending is not None:
            with held_back(HELD_LOCALLY):  # an update that was applied, and still seems to wait, would be applied twice
                if self.lent:
                    self._shards = shards = shards.clone()
                self.pending.finish(shards)
                self.pending = None
        return shards

    def whole(self, step: int) -> Shards:
        """The shards as they are after the last step. Local.

        Raises:
            StateError: other ranks hold some of that.
        """
        shards = self.applied(step)
        if self.stale:
            raise _not_whole(step, [self.plan.groups[group] for group in self.stale])
        return shards

    def layout(self, step: int) -> Layout:
        """Return what makes buffers of its trees."""
        if self._loose is not None:
            return self._loose.layout
        shards = self.shards(step)
        return Layout(self.plan, shards.layouts, tuple([shard.part for shard in shards]))

    def params(self, step: int, *, stale: bool = False) -> Any:
        """The tree of parameters, made once.

        Args:
            step: names the state in an error.
            stale: give also what lacks the updates of other ranks.
        """
        if self._loose is not None:
            return self._loose.params
        shards = self.applied(step) if stale else self.whole(step)
        if self._params is None:
            chunks = [values_of(group, shards[group.id].param) for group in self.plan.groups]
            if self.lent:  # who writes to them is refused later, and must not have written to other states
                chunks = [chunk.clone() for chunk in chunks]
            params = self._tree(lambda group, n: local_view(self.plan, group, n, chunks[group.id]))
            self._read = [(leaf, version(leaf)) for _, leaf in tree.paths(params)]
            self._params = params
        return self._params

    def opt_state(self, step: int) -> Any:
        """The trees of the optimizer's state, made once."""
        if self._loose is not None:
            return self._loose.opt
        shards = self.applied(step)
        if self._opt is None:
            names = dict.fromkeys(name for shard in shards for name in shard.opt)
            self._opt = {name: self._tree(_viewer(self.plan, shards, name)) for name in names}
        return self._opt

    def clone(self, step: int) -> "StateMemory":
        """The same values in memory of its own."""
        if self._loose is not None:
            params, opt = tree.mapped(_cloned, (self._loose.params, self._loose.opt))
            return StateMemory.of(self._loose.layout, params, opt)
        return StateMemory(self.plan, self.applied(step).clone(), None, self.stale)

    def with_params(self, step: int, params: Any) -> "StateMemory":
        """Memory of its own with other parameters and the same optimizer state."""
        flat = self.plan.check_tree(params, whole=False, what="params")
        opt = tree.mapped(_cloned, self.opt_state(step))
        made = StateMemory.of(self.layout(step), tree.mapped(_cloned, tree.nest(flat)), opt)
        if any("update_gather" in group.wires for group in self.plan.groups):
            made = StateMemory(self.plan, Shards([shard.with_param(shard.param) for shard in made.shards(step)]))
        made.lent = self.lent
        made.origin = self.origin
        return made

    def note_compared(self) -> None:
        """Note that ranks have compared what they hold copies of."""
        self.compared = True

    def donate(self, to: "StateMemory | None" = None) -> None:
        """Give the memory away: every tensor that was read from it can no longer be used.

        Args:
            to: the memory of the next state, which shares this one's tensors and has written to none of them. If nobody
                holds it, because an interrupt came before the caller had it, this memory is as it was.
        """
        # An interrupt may come between any two lines: the trees are let go first, so that this memory never shows an
        # emptied tensor, and the way back is there before the shards go.
        read = [held for held in (self._params, self._opt) if held is not None]
        self._params = self._opt = None
        for tensor in tree.leaves(read) if read else ():
            if isinstance(tensor, Tensor):
                with torch.no_grad():
                    tensor.set_()  # type: ignore[call-overload]
                tensor.__class__ = Donated
        if to is not None and self._shards is not None:
            self._given, to._giver = Donation(weakref.ref(to), self._shards, self.pending, self.stale), self
        self._shards = self.pending = None
        self.stale = {}

    def _take_back(self) -> None:
        """Be as before ``donate`` if nobody holds the memory of the next state."""
        given = self._given
        if given is not None and given.to() is None:
            self._shards, self.pending, self.stale, self._given = given.shards, given.pending, given.stale, None

    def check_unwritten(self) -> None:
        """Refuse memory whose ``params`` were written to: what is assigned there never reaches the shards.

        Raises:
            TreeError: naming the leaves.
        """
        if self._params is None:
            return
        now = dict(tree.paths(self._params))
        kept = list(zip(self.plan.leaves, self._read, strict=True))
        wrong = [f"{path}: was replaced" for path, (leaf, _) in kept if now.get(path) is not leaf]
        wrong += [f"{path}: is not in the plan" for path in now if path not in self.plan.leaves]
        wrong += [
            f"{path}, or a leaf beside it in its group: was written to in place"
            for path, (leaf, n) in kept
            if not wrong and version(leaf) != n
        ]
        if wrong:
            raise TreeError(
                lines(
                    "state.params is read-only, and it was written to:",
                    wrong,
                    "A state is a value: make one of new parameters with fs.init_state(plan, opt, params=whole), where "
                    "whole = fs.unshard(state.params, plan) with your changes.",
                )
            )

    def _tree(self, view: Callable[[Group, int], Tensor | None]) -> dict[str, Any]:
        places = self.plan.places()
        flat = {path: view(*places[path]) for path in self.plan.leaves}
        for path, leaf in flat.items():
            if leaf is not None and leaf.shape == places[path][0].local_shape(places[path][1], self.plan.mesh):
                setattr(leaf, tree.WATCHED, ShardMark(places[path]))
        return tree.nest({path: leaf for path, leaf in flat.items() if leaf is not None})


def _viewer(plan: Plan, shards: Shards, name: str) -> Callable[[Group, int], Tensor | None]:
    """Return what views one of the optimizer's buffers, leaf by leaf."""

    def view(group: Group, number: int) -> Tensor | None:
        shard, owned = shards[group.id], group.owned
        layout = shard.layouts.get(name)
        if layout is None or number not in layout.ranges:
            return None
        if layout.plain:
            return local_view(plan, owned, number, shard.opt[name])
        begin, end = layout.ranges[number]
        form, local = layout.forms[number], owned.local_shape(number, plan.mesh)
        part = shard.opt[name][begin:end].detach()
        if form.shape is None:
            return part.view(local) if form.block == 1 else part
        return part.view(form.shape) if end > begin else part

    return view


def local_view(plan: Plan, group: Group, number: int, shard: Tensor) -> Tensor:
    """This rank's tensor of one leaf, as a view of its group's shard."""
    begin, end = group.shard_range(number, plan.mesh.index(group.gather_axes))
    return shard[begin:end].detach().view(group.local_shape(number, plan.mesh))


def version(leaf: Tensor) -> int:
    """The number of writes to a tensor so far; 0 for one of inference mode, which counts none."""
    return 0 if leaf.is_inference() else leaf._version


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _not_whole(step: int, groups: list[Group]) -> StateError:
    """Parameters that are read before other ranks have sent what they updated of them."""
    rows = [f"{group.name}: {len(group.leaves)} leaves, such as {group.leaves[0].path}" for group in groups]
    return StateError(
        lines(
            f"the state of step {step} cannot be read yet: other ranks hold updates of parameters of these groups:",
            rows,
            "Their optimizer state is cut over more ranks, fs.Rule(opt=), and reading never communicates. "
            "Call fs.settle(state) on all ranks first. The next step needs no such call.",
        )
    )
