"""The state of all ranks of a virtual mesh: inside of ``run`` that of the rank that runs, outside whole tensors."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import PlanError, StateError, TreeError, lines
from fshard.played.cooperative import playing
from fshard.runtime.comm.copies import bits
from fshard.sharding.plan import Plan
from fshard.state.pieces import entries_of, split_name
from fshard.state.state_memory import StateMemory, version


class MemoryOfAllRanks:
    """The memories of all ranks. Inside of ``run`` it is that of the rank that runs.

    Outside of it, ``params`` and ``opt_state`` are whole tensors, put together at each reading: what is written there
    never reaches the shards, and whoever uses the state next is told of it.
    """

    def __init__(self, plan: Plan, memories: Sequence[StateMemory]) -> None:
        self.all_plan, self.memories = plan, tuple(memories)
        self._copies = WholeCopies()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "memories":
            raise AttributeError(name)
        if not self.all_plan.mesh.everywhere:
            return getattr(self.here, name)
        if name in ("donated", "pending", "stale", "compared", "lent", "within", "shards"):
            return getattr(self.memories[0], name)
        raise PlanError(
            "this state is that of all ranks of a virtual mesh, whose shards can be used inside of mesh.run(fn) only: "
            "outside, step(state, batch), evaluate(state, batch), state.params, fs.settle and the checkpointer take it"
        )

    def params(self, step: int, *, stale: bool = False) -> Any:
        """The parameters: this rank's part, or outside of ``run`` whole tensors."""
        if not self.all_plan.mesh.everywhere:
            return self.here.params(step, stale=stale)
        return self._whole_trees(step, "params").get("params", {})

    def opt_state(self, step: int) -> Any:
        """The optimizer's trees, alike."""
        if not self.all_plan.mesh.everywhere:
            return self.here.opt_state(step)
        return self._whole_trees(step, "opt")

    def clone(self, step: int) -> "MemoryOfAllRanks":
        """The same values in memory of its own."""
        if not self.all_plan.mesh.everywhere:
            made: Any = self.here.clone(step)
            return made  # type: ignore[no-any-return]
        return MemoryOfAllRanks(self.all_plan, [memory.clone(step) for memory in self.memories])

    def with_params(self, step: int, params: Any) -> Any:
        """The same with other parameters: this rank's part, or outside of ``run`` whole tensors."""
        if not self.all_plan.mesh.everywhere:
            return self.here.with_params(step, params)
        self.check_unwritten()
        whole = self.all_plan.check_tree(params, whole=True)
        made = [memory.with_params(step, _parts(memory, step, whole)) for memory in self.memories]
        return MemoryOfAllRanks(self.all_plan, made)

    def check_unwritten(self) -> None:
        """As ``StateMemory.check_unwritten``. Outside of ``run`` copies were written to: the state is as it was."""
        if not self.all_plan.mesh.everywhere:
            self.here.check_unwritten()
            return
        written = self._copies.written()
        if written:
            raise TreeError(
                lines(
                    "state.params and state.opt_state are read-only, on a virtual mesh copies of what its ranks hold. "
                    "They were written to, which no step would see:",
                    written,
                    "The state is as it was, and can be used. Clone a tensor before you write to it; "
                    "fs.init_state(plan, opt, params=whole) makes a state of other parameters, and "
                    "mesh.join(mesh.run(lambda: fs.tree.map(fn, state))) one of all leaves as fn returns them.",
                )
            )

    @property
    def here(self) -> StateMemory:
        """The memory of the rank that runs."""
        thread = playing()
        assert thread is not None
        return self.memories[thread.rank]

    def _whole_trees(self, step: int, kind: str) -> dict[str, Any]:
        """Whole tensors of what the ranks hold of one kind, put together from their pieces."""
        self.memories[0].shards(step)  # raises if it was donated
        self.check_unwritten()
        trees = _whole(self.all_plan, step, self.memories, kind)
        self._copies.note(trees, "" if kind == "params" else "opt_state.")
        return trees


Contents = tuple[int, int]
"""The writes to a tensor that PyTorch counts, and a hash of its bits: those by ``x.data`` and NumPy are not counted."""


def contents(leaf: Tensor) -> Contents:
    """The contents of a tensor, as any write to it changes them."""
    return version(leaf), bits(leaf)


class WholeCopies:
    """The whole tensors that a caller was given and may still hold: copies, so that what is written there is lost."""

    def __init__(self) -> None:
        self._last: tuple[str, Any, dict[str, Tensor]] = "", {}, {}
        self._given: list[tuple[str, weakref.ref[Tensor], Contents]] = []

    def note(self, trees: dict[str, Any], prefix: str) -> None:
        """Note what is given now. It is kept until the next is given, since a caller may write to it and let go."""
        leaves = dict(tree.paths(trees))
        found = [(f"state.{prefix}{path}", weakref.ref(leaf), contents(leaf)) for path, leaf in leaves.items()]
        self._last = prefix, trees, leaves
        self._given = [one for one in self._given if one[1]() is not None] + found

    def written(self) -> list[str]:
        """A line for each leaf that was written to or replaced since it was given. It is told once."""
        held = [(path, leaf, was) for path, ref, was in self._given if (leaf := ref()) is not None]
        wrong = [f"{path}: was written to in place" for path, leaf, was in held if contents(leaf) != was]
        prefix, trees, leaves = self._last
        now = dict(tree.paths(trees))
        wrong += [
            f"state.{prefix}{path}: was replaced" for path in {**leaves, **now} if now.get(path) is not leaves.get(path)
        ]
        if wrong:
            self._last, self._given = ("", {}, {}), []
        return list(dict.fromkeys(wrong))


def _whole(plan: Plan, step: int, memories: Sequence[StateMemory], kind: str) -> dict[str, Any]:
    """The trees of one kind of entries, ``"params"`` or ``"opt"``, of whole tensors."""
    flat: dict[str, Tensor] = {}
    for memory in memories:
        for entry in entries_of(memory.plan, memory.whole(step), plan.leaves):
            if entry.name.partition(".")[0] != kind:
                continue
            whole = flat.get(entry.name)
            if whole is None:
                whole = torch.zeros(entry.shape, dtype=entry.dtype, device=entry.tensor.device)
                flat[entry.name] = whole
            piece = entry.piece
            box = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]
            if box.is_contiguous():
                box.view(-1)[piece.start : piece.stop] = entry.tensor
                continue
            values = box.reshape(-1)
            values[piece.start : piece.stop] = entry.tensor
            box.copy_(values.view(box.shape))
    parts: dict[str, dict[str, Tensor]] = {}
    for name, whole in flat.items():
        buffer, path = split_name(name, plan.leaves) if kind == "opt" else name.split(".", 1)
        parts.setdefault(buffer, {})[path] = whole
    return {name: tree.nest(leaves) for name, leaves in parts.items()}


def _parts(memory: StateMemory, step: int, whole: Mapping[str, Tensor]) -> dict[str, Any]:
    """A rank's parts of whole parameters, a tree like its own."""
    own = dict(tree.paths(memory.params(step)))
    for entry in entries_of(memory.plan, memory.whole(step), memory.plan.leaves):
        kind, _, path = entry.name.partition(".")
        if kind == "params":
            piece = entry.piece
            box = whole[path].detach()[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]
            own[path] = box.reshape(-1)[piece.start : piece.stop].to(own[path].dtype).view(own[path].shape)
    return tree.nest(own)


def host_of(plans: Sequence[Plan], steps: Sequence[int]) -> Any:
    """The virtual mesh whose ranks have states of these plans and steps, in the order of the ranks.

    Raises:
        StateError: there is none, or the states are of several steps.
    """
    host = getattr(plans[0].mesh.transport, "host", None)
    if host is None or [plan.mesh.rank for plan in plans] != list(range(host.size)):
        raise StateError("mesh.join takes the states of all ranks of its virtual mesh, in the order of the ranks")
    if len(set(steps)) > 1:
        raise StateError(f"the states of the ranks are of steps {[*steps]}: join states that one step has returned")
    return host
