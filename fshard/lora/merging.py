"""Adapters added to their weights: of a tree of whole tensors, and of a state, shard by shard."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import expect
from fshard.errors import PlanError, TreeError, lines
from fshard.lora import modules as adapted
from fshard.lora.modules import PATHS
from fshard.played.everywhere import called_on_each_rank
from fshard.runtime.comm import collective_call, enter
from fshard.sharding.layout import Piece
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages
from fshard.state.entries import entries
from fshard.state.move import whole_entry
from fshard.state.pieces import PARAMS, Entry
from fshard.state.settle import settle
from fshard.state.train_state import TrainState


def merge(params: Mapping[str, Any], *, alpha: float) -> dict[str, Any]:
    """The tree without adapters: each adapted weight becomes ``weight + alpha / rank * b @ a``.

    Args:
        params: a nested dict of whole tensors, of ``wrap`` or ``init``. ``absorb`` does it to shards.
        alpha: as given to ``wrap`` or ``linear``. The rank is that of the adapters.

    Returns:
        A nested dict like the one before there were adapters. Sums are in float32, and rounded once.

    Raises:
        TreeError: there are no adapters, an adapter lacks its pair, or a shape is wrong.

    >>> p = {"w": torch.ones(1, 2), "w_lora_a": torch.tensor([[1.0, 2.0]]), "w_lora_b": torch.tensor([[10.0]])}
    >>> fs.lora.merge(p, alpha=1.0)["w"]
    tensor([[11., 21.]])
    """
    expect("lora.merge(params)", [("alpha", alpha, (int, float), "a number")])
    flat = dict(tree.paths(params))
    _check_pairs(flat)
    if not any(path + adapted.A in flat for path in flat):
        remedy = "A tree that was merged already, or a model that lora.wrap did not make, is used as it is."
        raise TreeError(f"merge: {_without(flat)}. {remedy}")
    out = {}
    for path, leaf in flat.items():
        if path + adapted.A in flat:
            a, b = (flat[path + suffix] for suffix in (adapted.A, adapted.B))
            wide = torch.promote_types(leaf.dtype, torch.float32)
            out[path] = (leaf.to(wide) + adapted.delta(a.to(wide), b.to(wide), alpha / a.shape[-2])).to(leaf.dtype)
        elif not re.fullmatch(PATHS, path):
            out[path] = leaf
    return tree.nest(out)


@called_on_each_rank
@collective_call
def absorb(state: TrainState, *, alpha: float) -> TrainState:
    """A state with its adapters added to their weights, and ``b`` zero again. Collective.

    No rank makes a whole weight: each updates its own shard, and gathers two adapters at a time. The state computes
    the same function, so ``fs.io.save_hf(absorb(state, alpha=16), folder, rename=[(PATHS, None)])`` writes
    the model without adapters. Training may go on from it, with a higher rank in sum (ReLoRA, Lialin et al., 2023).

    Args:
        state: a state of a plan with adapters. It stays as it is; it is settled first, see ``fs.settle``.
        alpha: as given to ``wrap`` or ``linear``.

    Returns:
        A state of its own memory, of the same plan. The optimizer's state is as it was. Sums are in float32, and
        rounded once.

    Raises:
        DonatedError: the state was donated to a step.
        TreeError: the state has no adapters, an adapter lacks its pair, or a shape is wrong.
        PlanError: ``state`` is not a state.

    >>> model = fs.lora.wrap(fs.split(torch.nn.Linear(4, 6)), "weight", rank=2, alpha=16)
    >>> plan = fs.make_plan(model, fs.make_mesh((-1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> state = fs.init_state(plan, fs.optim.adamw(1e-3), params=model.params)
    >>> bool((fs.lora.absorb(state, alpha=16).params["weight_lora_b"] == 0).all())
    True
    """
    wants = [("state", state, TrainState, "what a step returned"), ("alpha", alpha, (int, float), "a number")]
    expect("lora.absorb(state)", wants)
    refuse_stages("lora.absorb(state)", state.plan)
    plan = state.plan
    _check_pairs(plan.leaves)
    new = copy.deepcopy(settle(state))
    by_path = {e.name.removeprefix(PARAMS): e for e in entries(new) if e.name.startswith(PARAMS)}
    chosen = [path for path in plan.leaves if path + adapted.A in by_path]
    if packed := [f"{path}  in {plan.leaves[path].packed}" for path in chosen if path not in by_path]:
        remedy = "Merge whole tensors: fs.lora.merge(fs.unshard(state.params, plan), alpha=alpha)."
        raise PlanError(lines("absorb: what is added to these weights would be rounded away:", packed, remedy))
    if not chosen:
        raise TreeError(f"absorb: {_without(by_path)}. Give a state of a plan of what lora.wrap or lora.init made.")
    enter(plan.mesh, "absorb")
    for path in chosen:
        a, b = (_gathered(plan, path + suffix, by_path[path + suffix]) for suffix in (adapted.A, adapted.B))
        entry = by_path[path]
        wide = torch.promote_types(entry.dtype, torch.float32)
        for begin, end, part in _deltas(entry.piece, a.to(wide), b.to(wide), alpha / a.shape[-2]):
            own = entry.tensor[begin:end]
            own.copy_(own.to(wide) + part.to(own.device))  # weights may be kept in host memory
        by_path[path + adapted.B].tensor.zero_()
    return new


def _gathered(plan: Plan, path: str, entry: Entry) -> Tensor:
    """The whole of a leaf, on every rank."""
    group, number = plan.places()[path]
    pieces = [group.piece(number, plan.mesh, rank) for rank in range(plan.mesh.size)]
    return whole_entry(plan.mesh, entry, pieces)


def _deltas(piece: Piece, a: Tensor, b: Tensor, scale: float) -> Iterator[tuple[int, int, Tensor]]:
    """The ranges of a piece of a weight, one a matrix, each with the sum that adapters add to it."""
    *batch, n, m = piece.shape
    *lead, top, left = piece.offset
    for number in range(piece.start // max(n * m, 1), -(-piece.stop // max(n * m, 1))):
        low, high = max(piece.start - number * n * m, 0), min(piece.stop - number * n * m, n * m)
        first, last = low // m, -(-high // m)
        place = torch.unravel_index(torch.tensor(number, device="cpu"), batch)
        spot: Any = [o + int(i) for o, i in zip(lead, place, strict=True)]
        rows, columns = b[(*spot, slice(top + first, top + last))], a[(*spot, slice(None), slice(left, left + m))]
        begin = number * n * m + low - piece.start
        part = adapted.delta(columns, rows, scale).reshape(-1)[low - first * m : high - first * m]
        yield begin, begin + high - low, part


def _without(flat: Iterable[str]) -> str:
    """The sentence that says so."""
    paths = list(flat)
    return f"none of {len(paths)} leaves is an adapter, such as {next(iter(paths), 'w')}{adapted.A}"


def _check_pairs(flat: Mapping[str, Any]) -> None:  # tensors, or leaves of a plan
    wrong = []
    for base in dict.fromkeys(path[: -len(adapted.A)] for path in flat if re.fullmatch(PATHS, path)):
        names = (base, base + adapted.A, base + adapted.B)
        missing = [name for name in names if name not in flat]
        if missing:
            wrong.append(f"{base}: {', '.join(missing)} is missing")
            continue
        weight, *pair = (tuple(flat[name].shape) for name in names)
        if len(weight) < 2 or len(pair[0]) < 2 or list(adapted.shapes(weight, pair[0][-2]).values()) != pair:
            wrong.append(f"{base}: {list(weight)} beside {list(pair[0])} and {list(pair[1])}")
    if wrong:
        raise TreeError(lines("merge: adapters do not fit their weights:", wrong, "Give a tree of whole tensors."))
