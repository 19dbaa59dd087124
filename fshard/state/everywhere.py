"""The state of all ranks of a virtual mesh: inside of ``run`` that of the rank that runs, outside whole tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import PlanError, StateError
from fshard.played.cooperative import playing
from fshard.sharding.plan import Plan
from fshard.state.memory import Memory
from fshard.state.pieces import entries_of


class MemoryOfAllRanks:
    """The memories of all ranks. Inside of ``run`` it is that of the rank that runs.

    Outside of it, ``params`` and ``opt_state`` are whole tensors, as they are at that time: what is written there never
    reaches the shards.
    """

    def __init__(self, plan: Plan, memories: Sequence[Memory]) -> None:
        self.all_plan, self.memories = plan, tuple(memories)
        self._whole: dict[str, Any] | None = None

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
        return self._whole_trees(step)["params"]

    def opt_state(self, step: int) -> Any:
        """The optimizer's trees, alike."""
        if not self.all_plan.mesh.everywhere:
            return self.here.opt_state(step)
        return {name: made for name, made in self._whole_trees(step).items() if name != "params"}

    def clone(self, step: int) -> "MemoryOfAllRanks":
        """The same values in memory of its own."""
        if not self.all_plan.mesh.everywhere:
            made: Any = self.here.clone(step)
            return made  # type: ignore[no-any-return]
        return MemoryOfAllRanks(self.all_plan, [memory.clone(step) for memory in self.memories])

    def check_unwritten(self) -> None:
        """As ``Memory.check_unwritten``; nothing can be written to the shards from outside of ``run``."""
        if not self.all_plan.mesh.everywhere:
            self.here.check_unwritten()

    @property
    def here(self) -> Memory:
        """The memory of the rank that runs."""
        thread = playing()
        assert thread is not None
        return self.memories[thread.rank]

    def _whole_trees(self, step: int) -> dict[str, Any]:
        """Whole tensors of all that the ranks hold, put together from their pieces."""
        self.memories[0].shards(step)  # raises if it was donated
        if self._whole is None:
            self._whole = _whole(self.all_plan, step, self.memories)
        return self._whole


def _whole(plan: Plan, step: int, memories: Sequence[Memory]) -> dict[str, Any]:
    flat: dict[str, Tensor] = {}
    for memory in memories:
        for entry in entries_of(memory.plan, memory.whole(step), plan.leaves):
            whole = flat.setdefault(entry.name, torch.zeros(entry.shape, dtype=entry.dtype, device=entry.tensor.device))
            piece = entry.piece
            box = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]
            values = box.reshape(-1).clone()
            values[piece.start : piece.stop] = entry.tensor
            box.copy_(values.view(box.shape))
    parts: dict[str, dict[str, Tensor]] = {"params": {}}
    for name, whole in flat.items():
        kind, _, path = name.partition(".")
        if kind == "opt":
            kind, _, path = path.partition(".")
        parts.setdefault(kind, {})[path] = whole
    return {kind: tree.nest(leaves) for kind, leaves in parts.items()}


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
