"""A state of one plan as a state of another: the same leaves on the same mesh, grouped, frozen or sharded otherwise."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard.arguments import Want, expect
from fshard.collectives.linear import Collect, apply
from fshard.collectives.ranks import Ranks
from fshard.errors import PlanError, TreeError, lines
from fshard.optim.base import Optimizer
from fshard.played.everywhere import called_on_each_rank
from fshard.runtime.comm import collective_call, enter
from fshard.runtime.comm.packing import packed
from fshard.runtime.memory.optimizer_layout import RESIDUAL
from fshard.sharding.layout import Piece
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.sharding.wire import WireFormat
from fshard.state.entries import LATE, Scalars, assemble, entries, scalars
from fshard.state.init import take
from fshard.state.pieces import PARAMS, Entry, packed_names
from fshard.state.replica_entries import DELTA, refitted
from fshard.state.settle import settle
from fshard.state.train_state import TrainState

DTYPES = tuple(sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str))
"""All dtypes, in an order that ranks have in common."""


@dataclass(frozen=True)
class Known:
    """The entries before and after a move, by name, on any rank. One that this rank lacks is described by another.

    Attributes:
        old: those before.
        new: those after.
    """

    old: Mapping[str, Entry]
    new: Mapping[str, Entry]

    @functools.cached_property
    def common(self) -> dict[str, None]:
        """The names of entries that have values before and after, in the order of all ranks."""
        return {name: None for name in self.new if name in self.old and alike(self.old[name], self.new[name])}

    def ndim(self, name: str) -> int:
        """The number of dims of an entry."""
        return len(self.old[name].shape)


def alike(old: Entry, new: Entry) -> bool:
    """Tell whether a tensor can be read from another: in rows, of which there may be other numbers, or of one shape."""
    return old.shape[bool(new.rows) :] == new.shape[bool(new.rows) :]


def known_entries(mesh: Mesh, old: Mapping[str, Entry], new: Mapping[str, Entry], stages: tuple[bool, bool]) -> Known:
    """The entries of a move, to a plan with stages, or from one, or neither. Collective where there are stages.

    Args:
        mesh: all ranks.
        old: the entries of this rank before the move.
        new: those after.
        stages: whether the plan before has stages, and whether that after has some.
    """
    if not any(stages):
        return Known(old, new)
    before = stages[0]
    every, some = (new, old) if before else (old, new)
    rows = []
    for name in every:
        mine = some.get(name)
        rows += [-1, 0] if mine is None else [DTYPES.index(mine.dtype), mine.shape[0] if mine.rows else 0]
    row = torch.tensor(rows, dtype=torch.int64, device=mesh.device)
    most = apply(row, Collect(Ranks(mesh, mesh.axis_names), -1)).view(mesh.size, -1, 2).amax(0).tolist()
    known = dict[str, Entry]()
    for (name, entry), (dtype, count) in zip(every.items(), most, strict=True):
        if dtype >= 0:
            shape = (count, *entry.shape[1:]) if entry.rows else entry.shape
            described = replace(entry, shape=shape, tensor=torch.empty(0, dtype=DTYPES[dtype], device="cpu"))
            known[name] = some.get(name, described)
    known |= {name: entry for name, entry in some.items() if name not in known}
    return Known(known, new) if before else Known(old, known)


Pieces = dict[str, list[Piece]]
"""What each rank holds of some entries."""


@called_on_each_rank
@collective_call
def reshard_state(state: TrainState, plan: Plan, opt: Optimizer | None) -> TrainState:
    """Carry a state over to another plan, such as one with fewer frozen leaves, or without stages. Collective.

    Parameters keep their values; so does the optimizer state of leaves that are trained before and after. A leaf that
    was frozen starts with fresh optimizer state, and a leaf that is frozen now loses its own. The number of the step
    goes on, and learning rates go by it; ``state.late`` knows which leaves began to train when, so that moments are
    corrected by the updates that each leaf has had, as if it had been added with ``optimizer.add_param_group``.

    Args:
        state: the state. It stays as it is; it is settled first, see ``fs.settle``.
        plan: a plan for the same leaves on the same mesh; ``state.plan.replace(...)`` gives one.
        opt: the optimizer, of the kind that the state was made with; None for parameters alone, to evaluate.

    Returns:
        A state of its own memory. What lies elsewhere under the new plan is sent, one leaf at a time: a rank needs room
        for the largest whole leaf beside the two states.

    Raises:
        DonatedError: the state was donated to a step.
        PlanError: the plan is for other leaves, or another mesh.
        TreeError: the optimizer keeps something else than the state holds.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.1)
    >>> state = fs.init_state(plan, opt, params={"w": w})
    >>> whole = plan.replace(rules=[(".*", fs.P())])
    >>> fs.reshard_state(state, whole, opt).params["w"].shape
    torch.Size([2, 2])
    """
    wants: list[Want] = [
        ("state", state, TrainState, "what a step returned"),
        ("plan", plan, Plan, "what fs.make_plan returned"),
    ]
    expect("reshard_state(state, plan, opt)", wants)
    before, after = state.plan.whole or state.plan, plan.whole or plan
    _check_plans(before, after)
    if before.stages is not None and after.stages is not None:
        between = after.replace(stages=None)  # which has all leaves on every rank
        return reshard_state(reshard_state(state, between, opt), plan, opt)
    # Leaves whose format changes are moved as values, all others as they are kept.
    loose = {path for path, leaf in after.leaves.items() if leaf.packed != before.leaves[path].packed}
    old = {
        entry.name: entry for entry in entries(settle(state), loose) if opt is not None or entry.name.startswith(PARAMS)
    }
    values = _scalars(state, before, after)
    new = {entry.name: entry for entry in entries(assemble(after.own, opt, _leave, values), loose)}
    enter(after.mesh, "reshard_state")
    known = known_entries(after.mesh, old, new, (before.stages is not None, after.stages is not None))
    if opt is not None:
        _check_names(before, after, known.old, known.new)
    with torch.no_grad():
        _receive(after, known, old, new)
        made = {name: path for path in loose for name in packed_names(path, after.leaves[path].packed)}

        def fill(entry: Entry) -> None:
            path = made.get(entry.name)
            name = entry.name if path is None else PARAMS + path
            if name in known.common:
                form, found = None if path is None else after.leaves[path].packed, new[name].tensor
                entry.tensor.copy_(found if form is None else _packed(found, form, entry))

        return assemble(after.own, opt, fill, values, state.past)


def _receive(plan: Plan, known: Known, old: dict[str, Entry], new: dict[str, Entry]) -> None:
    """Write the values of a state into the entries of another, by name. Collective, one entry after the other."""
    moved = _moved(plan.mesh, [(name, known.ndim(name), old.get(name), new.get(name)) for name in known.common])
    for name in known.common:
        before, after = old.get(name), new.get(name)
        if name not in moved:
            assert before is not None and after is not None
            after.tensor.copy_(before.tensor)
            continue
        whole = whole_entry(plan.mesh, known.old[name], moved[name])
        if after is not None:
            after.tensor.copy_(take(refitted(whole, after), after.piece))


def _scalars(state: TrainState, before: Plan, after: Plan) -> Scalars:
    """Return what the new state holds beside tensors: leaves that were frozen begin to train now."""
    new = [path for path, leaf in after.leaves.items() if leaf.trainable and not before.leaves[path].trainable]
    return scalars(state) | {LATE + path: state.step for path in new}


def _packed(values: Tensor, form: WireFormat, entry: Entry) -> Tensor:
    """The codes of some values, or their scales, as an entry wants them."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % form.block))
    both, end = packed(blocks, form), form.payload(blocks.numel())
    return both[end:].view(torch.float32) if entry.dtype == torch.float32 else both[:end]


def _leave(entry: Entry) -> None:
    """Leave an entry as it began."""


def _moved(mesh: Mesh, pairs: list[tuple[str, int, Entry | None, Entry | None]]) -> Pieces:
    """The entries of which some rank holds something else than before, with what each rank held.

    Args:
        mesh: the ranks.
        pairs: the name of each entry, its number of dims, and the entry before and after; None where this rank has, or
            had, none of it.
    """
    rows = []
    for _, dims, before, after in pairs:
        piece = Piece((0,) * dims, (0,) * dims, 0, 0) if before is None else before.piece
        differs = before is None or after is None or piece != after.piece
        rows += [int(differs), *piece.offset, *piece.shape, piece.start, piece.stop]
    row = torch.tensor(rows, dtype=torch.int64, device=mesh.device)
    table = iter(zip(*_all(mesh, row).view(mesh.size, -1).tolist(), strict=True))
    out: Pieces = {}
    for name, dims, _, _ in pairs:
        differs = any(next(table))
        columns = [next(table) for _ in range(2 * dims + 2)]
        held = [Piece(row[:dims], row[dims : 2 * dims], *row[2 * dims :]) for row in zip(*columns, strict=True)]
        if differs:
            out[name] = held
    return out


def whole_entry(mesh: Mesh, entry: Entry, pieces: list[Piece]) -> Tensor:
    """The whole tensor of an entry, on every rank."""
    longest = max(piece.numel for piece in pieces)
    mine = torch.zeros(longest, dtype=entry.dtype, device=mesh.device)
    mine[: entry.tensor.numel()] = entry.tensor
    boxes: dict[tuple[Any, Any], Tensor] = {}
    for piece, row in zip(pieces, _all(mesh, mine).view(mesh.size, longest), strict=True):
        key = piece.offset, piece.shape
        box = boxes.setdefault(key, mine.new_empty(math.prod(piece.shape)))
        box[piece.start : piece.stop] = row[: piece.numel]
    whole = mine.new_empty(entry.shape)
    for (offset, shape), box in boxes.items():
        whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = box.view(shape)
    return whole


def _all(mesh: Mesh, row: Tensor) -> Tensor:
    """The rows of all ranks, one behind the other."""
    return apply(row, Collect(Ranks(mesh, mesh.axis_names), -1))


def _check_plans(old: Plan, new: Plan) -> None:
    if new.mesh is not old.mesh and (new.mesh != old.mesh):
        raise PlanError(
            "reshard_state: the plans are for two meshes; a checkpoint carries a state from one to the other"
        )
    wrong = [f"{path}: only the state has it" for path in old.leaves if path not in new.leaves]
    wrong += [f"{path}: only the plan has it" for path in new.leaves if path not in old.leaves]
    for path in old.leaves:
        a, b = old.leaves[path], new.leaves.get(path)
        if b is not None and (a.shape, a.dtype) != (b.shape, b.dtype):
            wrong.append(f"{path}: {list(a.shape)} {a.dtype} in the state, {list(b.shape)} {b.dtype} in the plan")
    if wrong:
        remedy = "Give a plan for the same model: state.plan.replace(rules=..., precision=...) makes one."
        raise PlanError(lines("reshard_state: the plan is for other leaves than the state:", wrong, remedy))


def _check_names(before: Plan, after: Plan, old: Mapping[str, Entry], new: Mapping[str, Entry]) -> None:
    """Refuse an optimizer that keeps something else of leaves that are trained before and after."""

    def kept(names: Mapping[str, Entry]) -> set[str]:
        paths = {name: _path(name, before) for name in names if name.startswith("opt.")}
        return {n for n, path in paths.items() if before.leaves[path].trainable and after.leaves[path].trainable}

    wrong = [f"{name}: only the state has it" for name in sorted(kept(old) - kept(new)) if old[name].rows != "any"]
    begun = {name for name in new if new[name].rows or name.startswith(DELTA)}  # with nothing left, which is right
    wrong += [f"{name}: only the optimizer has it" for name in sorted(kept(new) - kept(old) - begun)]
    if wrong:
        remedy = "Give the optimizer that the state was made with."
        if any(name.startswith(f"opt.{RESIDUAL}.") for name in wrong):
            remedy = "Give the optimizer that the state was made with, and a plan whose fs.Wire has feedback=, too."
        raise TreeError(lines("reshard_state: the optimizer does not keep what the state holds:", wrong, remedy))


def _path(name: str, plan: Plan) -> str:
    """The leaf of an entry of the optimizer: the longest path that its name ends with."""
    parts = name.split(".")
    return next(path for i in range(2, len(parts)) if (path := ".".join(parts[i:])) in plan.leaves)
