"""A state of one plan as a state of another: the same leaves on the same mesh, grouped, frozen or sharded otherwise."""

import math
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
from fshard.sharding.stage_table import refuse_stages
from fshard.sharding.wire import WireFormat
from fshard.state.entries import LATE, Scalars, assemble, entries, scalars
from fshard.state.init import take
from fshard.state.pieces import PARAMS, Entry, packed_names
from fshard.state.replica_entries import DELTA, refitted
from fshard.state.settle import settle
from fshard.state.train_state import TrainState

Pieces = dict[str, list[Piece]]
"""What each rank holds of some entries."""


@called_on_each_rank
@collective_call
def reshard_state(state: TrainState, plan: Plan, opt: Optimizer) -> TrainState:
    """Carry a state over to another plan, such as one with fewer frozen leaves. Collective.

    Parameters keep their values; so does the optimizer state of leaves that are trained before and after. A leaf that
    was frozen starts with fresh optimizer state, and a leaf that is frozen now loses its own. The number of the step
    goes on, and learning rates go by it; ``state.late`` knows which leaves began to train when, so that moments are
    corrected by the updates that each leaf has had, as if it had been added with ``optimizer.add_param_group``.

    Args:
        state: the state. It stays as it is; it is settled first, see ``fs.settle``.
        plan: a plan for the same leaves on the same mesh; ``state.plan.replace(...)`` gives one.
        opt: the optimizer, of the kind that the state was made with.

    Returns:
        A state of its own memory. What lies elsewhere under the new plan is sent, one leaf at a time: a rank needs room
        for the largest whole leaf beside the two states.

    Raises:
        DonatedError: the state was donated to a step.
        PlanError: the plan is for other leaves, or another mesh.
        TreeError: the optimizer keeps something else than the state holds.

    >>> import fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.1)
    >>> state = fs.init_state(plan, opt, params={"w": w})
    >>> whole = plan.replace(rules=[(".*", fs.P())])
    >>> reshard_state(state, whole, opt).params["w"].shape
    torch.Size([2, 2])
    """
    wants: list[Want] = [
        ("state", state, TrainState, "what a step returned"),
        ("plan", plan, Plan, "what fs.make_plan returned"),
    ]
    expect("reshard_state(state, plan, opt)", wants)
    for one in (state.plan, plan):
        refuse_stages("reshard_state(state, plan, opt)", one)
    _check_plans(state.plan, plan)
    # Leaves whose format changes are moved as values, all others as they are kept.
    loose = {path for path, leaf in plan.leaves.items() if leaf.packed != state.plan.leaves[path].packed}
    old = {entry.name: entry for entry in entries(settle(state), loose)}
    values = _scalars(state, plan)
    new = {entry.name: entry for entry in entries(assemble(plan, opt, _leave, values), loose)}
    _check_names(state.plan, plan, old, new)
    enter(plan.mesh, "reshard_state")
    common = [name for name in new if name in old]
    moved = _moved(plan.mesh, [(old[name], new[name]) for name in common])
    made = {name: path for path in loose for name in packed_names(path, plan.leaves[path].packed)}

    def fill(entry: Entry) -> None:
        path = made.get(entry.name)
        name = entry.name if path is None else PARAMS + path
        if name not in old or not _alike(old[name], new[name]):
            return
        found = old[name].tensor
        if name in moved:
            found = take(refitted(whole_entry(plan.mesh, old[name], moved[name]), new[name]), new[name].piece)
        form = None if path is None else plan.leaves[path].packed
        entry.tensor.copy_(found if form is None else _packed(found, form, entry))

    with torch.no_grad():
        return assemble(plan, opt, fill, values, state.past)


def _scalars(state: TrainState, plan: Plan) -> Scalars:
    """Return what the new state holds beside tensors: leaves that were frozen begin to train now."""
    new = [path for path, leaf in plan.leaves.items() if leaf.trainable and not state.plan.leaves[path].trainable]
    return scalars(state) | {LATE + path: state.step for path in new}


def _packed(values: Tensor, form: WireFormat, entry: Entry) -> Tensor:
    """The codes of some values, or their scales, as an entry wants them."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % form.block))
    both, end = packed(blocks, form), form.payload(blocks.numel())
    return both[end:].view(torch.float32) if entry.dtype == torch.float32 else both[:end]


def _alike(old: Entry, new: Entry) -> bool:
    """Tell whether a tensor can be read from another: in rows, of which there may be other numbers, or of one shape."""
    return old.shape[bool(new.rows) :] == new.shape[bool(new.rows) :]


def _leave(entry: Entry) -> None:
    """Leave an entry as it began."""


def _moved(mesh: Mesh, pairs: list[tuple[Entry, Entry]]) -> Pieces:
    """The entries of which some rank holds something else than before, with what each rank held."""
    rows = []
    for before, after in pairs:
        piece = before.piece
        rows += [int(piece != after.piece), *piece.offset, *piece.shape, piece.start, piece.stop]
    row = torch.tensor(rows, dtype=torch.int64, device=mesh.device)
    table = iter(zip(*_all(mesh, row).view(mesh.size, -1).tolist(), strict=True))
    out: Pieces = {}
    for before, _ in pairs:
        differs = any(next(table))
        dims = len(before.piece.shape)
        columns = [next(table) for _ in range(2 * dims + 2)]
        held = [Piece(row[:dims], row[dims : 2 * dims], *row[2 * dims :]) for row in zip(*columns, strict=True)]
        if differs:
            out[before.name] = held
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


def _check_names(before: Plan, after: Plan, old: dict[str, Entry], new: dict[str, Entry]) -> None:
    """Refuse an optimizer that keeps something else of leaves that are trained before and after."""

    def kept(names: dict[str, Entry]) -> set[str]:
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
