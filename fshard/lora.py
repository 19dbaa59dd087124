"""LoRA: low-rank adapters beside frozen weights (Hu et al., "Low-Rank Adaptation of Large Language Models", 2021).

The adapters of a leaf ``blocks.0.q.weight`` of shape ``(n, m)`` are two more leaves of the same tree:
``blocks.0.q.weight_lora_a``, ``(rank, m)``, random, and ``blocks.0.q.weight_lora_b``, ``(n, rank)``, zero at first.
The weight reads as ``weight + alpha / rank * b @ a``. So adapters belong to the unit of the weight, and are sharded,
trained and saved like all other leaves; the weights themselves are frozen.
"""

import copy
import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fshard import tree
from fshard.arguments import expect
from fshard.errors import PlanError, TreeError, lines
from fshard.model import adapters as adapted
from fshard.model import init as inits
from fshard.model.philox import fold
from fshard.model.split import Model, split
from fshard.patterns import bad_regexes, meant_by
from fshard.sharding.layout import Piece
from fshard.sharding.plan import Plan
from fshard.state.entries import Entry, entries
from fshard.state.move import whole_entry
from fshard.state.settle import settle
from fshard.state.train_state import TrainState

__all__ = ["PATHS", "absorb", "adapters", "init", "linear", "merge", "wrap"]

PATHS = r".*_lora_[ab]"
"""The paths of all adapters, for rules: a hand-written function's tree is frozen and trained by them."""


def init(
    params: Mapping[str, Any],
    targets: str | Iterable[str],
    *,
    rank: int = 8,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """A tree with adapters beside some of its leaves, for hand-written functions; modules are for ``wrap``.

    Args:
        params: a nested dict of tensors.
        targets: regular expressions for whole paths of leaves of two or more dims. Of a leaf with more than two,
            each matrix of the last two has adapters of its own.
        rank: the rank of the learned matrix.
        seed: values depend on ``(seed, path, global index)`` alone, as those of ``fs.init_state``.
        dtype: of the adapters; None for that of the weight.

    Returns:
        A new nested dict, with the leaves of ``params`` themselves. Give the adapters a rule of their own:
        ``fs.Rule(fs.lora.PATHS, spec)``, before ``fs.Rule(".*", spec, trainable=False)``.

    Raises:
        PlanError: a pattern matches nothing, or a leaf that cannot have adapters.

    >>> small = init({"w": torch.zeros(6, 4), "b": torch.zeros(6)}, "w", rank=2)
    >>> {path: tuple(leaf.shape) for path, leaf in tree.paths(small)}
    {'w': (6, 4), 'w_lora_a': (2, 4), 'w_lora_b': (6, 2), 'b': (6,)}
    """
    flat = dict(tree.paths(params))
    chosen = _chosen(flat, targets, rank)
    out: dict[str, Any] = {}
    for path, leaf in flat.items():
        out[path] = leaf
        if path in chosen:
            out |= _fresh(path, leaf, rank, seed, dtype)
    return tree.nest(out)


def linear(params: Mapping[str, Any], x: Tensor, *, alpha: float, name: str = "weight", bias: str = "bias") -> Tensor:
    """A linear layer with adapters, for hand-written functions.

    Args:
        params: a subtree with the weight, ``(n, m)``, its adapters, and maybe a bias, ``(n,)``.
        x: ``(..., m)``, of the weight's dtype. Adapters of another dtype compute in theirs.
        alpha: the adapters count with ``alpha / rank``.
        name: the key of the weight.
        bias: the key of the bias.

    Returns:
        ``(..., n)``: ``x @ (weight + alpha / rank * b @ a).T + bias``, without making that matrix.

    >>> p = init({"weight": torch.ones(2, 3)}, "weight", rank=1)
    >>> linear(p, torch.ones(1, 3), alpha=1)
    tensor([[3., 3.]])
    """
    missing = [key for key in (name, name + adapted.A, name + adapted.B) if key not in params]
    if missing:
        raise TreeError(f"lora.linear: the subtree has {list(params)} and no {missing}: see name=, and fs.lora.init")
    a, b = params[name + adapted.A], params[name + adapted.B]
    return adapted.linear(params[name], a, b, params.get(bias), x, alpha / a.shape[-2])


def wrap(
    model: Model,
    targets: str | Iterable[str],
    *,
    rank: int = 8,
    alpha: float = 16.0,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Model:
    """A model with adapters, whose own leaves are frozen. Its units are those of the model.

    Args:
        model: what ``fs.split`` returned. It is not changed.
        targets: regular expressions for whole paths of parameters, such as ``r".*[qv]_proj\\.weight"``. They may
            belong to any module: those that are linear layers or embeddings never make the adapted matrix.
        rank: the rank of the learned matrix.
        alpha: the adapters count with ``alpha / rank``.
        seed: of the adapters' first values; see ``init``.
        dtype: of the adapters; None for that of their weights.

    Returns:
        The model. Its ``params`` are the given model's, not copied, with adapters beside them. Plans freeze all but the
        adapters; a rule with ``trainable=True`` says otherwise.

    Raises:
        PlanError: a pattern matches nothing, or a leaf that cannot have adapters.

    >>> model = wrap(split(nn.Linear(4, 6)), "weight", rank=2)
    >>> [path for path, _ in tree.paths(model.params)], sorted(model.frozen)
    (['weight', 'bias', 'weight_lora_a', 'weight_lora_b'], ['bias', 'weight'])
    """
    wants = [("model", model, Model, "what fs.split(module) returned"), ("alpha", alpha, (int, float), "a number")]
    expect("lora.wrap(model, targets)", wants)
    flat = dict(tree.paths(model.params))
    chosen = _chosen(flat, targets, rank)
    kept = [*model.module.buffers(), *tree.leaves(model.ignored)]
    twin = copy.deepcopy(model.module, {id(leaf): leaf for leaf in kept})
    named = dict(twin.named_parameters())
    pairs = {id(named[path]): (path, _pair(named[path], rank)) for path in chosen}
    made: dict[Any, Any] = {}
    for below in list(twin.modules()):
        owned = {name: pairs[id(p)][1] for name, p in below._parameters.items() if id(p) in pairs}
        if owned:
            adapted.adapt(below, owned, alpha / rank, made)
    for leaf in named.values():
        leaf.requires_grad_(False)
    new = split(twin, units=model.units)
    values = {**flat}
    for path in chosen:
        values |= _fresh(path, flat[path], rank, seed, dtype)
    return dataclasses.replace(
        new,
        params=tree.nest({path: values[path] for path, _ in tree.paths(new.params)}),
        ignored=model.ignored,
        inits={**model.inits, **{p: i for path in chosen for p, i in _inits(path, flat[path]).items()}},
    )


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
    >>> merge(p, alpha=1.0)["w"]
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


def absorb(state: TrainState, *, alpha: float) -> TrainState:
    """A state with its adapters added to their weights, and ``b`` zero again. Collective.

    No rank makes a whole weight: each updates its own shard, and gathers two adapters at a time. The state computes
    the same function, so ``fs.save_hf(absorb(state, alpha=16), folder, rename=[(PATHS, None)])`` writes
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

    >>> import fshard as fs
    >>> model = wrap(split(nn.Linear(4, 6)), "weight", rank=2, alpha=16)
    >>> plan = fs.make_plan(model, fs.make_mesh((-1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    >>> state = fs.init_state(plan, fs.optim.adamw(1e-3), params=model.params)
    >>> bool((absorb(state, alpha=16).params["weight_lora_b"] == 0).all())
    True
    """
    wants = [("state", state, TrainState, "what a step returned"), ("alpha", alpha, (int, float), "a number")]
    expect("lora.absorb(state)", wants)
    plan = state.plan
    _check_pairs(plan.leaves)
    new = copy.deepcopy(settle(state))
    by_path = {entry.name.removeprefix("params."): entry for entry in entries(new)[: len(plan.leaves)]}
    chosen = [path for path in by_path if path + adapted.A in by_path]
    if not chosen:
        raise TreeError(f"absorb: {_without(by_path)}. Give a state of a plan of what lora.wrap or lora.init made.")
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
        spot: Any = [o + int(i) for o, i in zip(lead, torch.unravel_index(torch.tensor(number), batch), strict=True)]
        rows, columns = b[(*spot, slice(top + first, top + last))], a[(*spot, slice(None), slice(left, left + m))]
        begin = number * n * m + low - piece.start
        part = adapted.delta(columns, rows, scale).reshape(-1)[low - first * m : high - first * m]
        yield begin, begin + high - low, part


def adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """The adapters of a tree, whole tensors or shards: the part of it that a finetuning run trains.

    >>> list(adapters(init({"w": torch.zeros(2, 2), "b": torch.zeros(2)}, "w")))
    ['w_lora_a', 'w_lora_b']
    """
    return tree.nest({path: leaf for path, leaf in tree.paths(params) if re.fullmatch(PATHS, path)})


def _chosen(flat: Mapping[str, Any], targets: str | Iterable[str], rank: int) -> list[str]:
    """The paths of the leaves that get adapters."""
    if not isinstance(rank, int) or rank < 1:
        raise PlanError(f"lora: rank={rank!r} must be an int >= 1")
    wanted = _hits(_patterns(targets), flat)
    chosen = [path for path in flat if path in wanted]
    wrong = [f"{path}{problem}" for path in chosen for problem in _unfit(path, flat)]
    if wrong:
        remedy = "Adapters belong to floating-point leaves of two or more dims that have none: narrow the targets."
        raise PlanError(lines("lora: targets match leaves that cannot have adapters:", wrong, remedy))
    return chosen


def _hits(patterns: Collection[str], flat: Mapping[str, Any]) -> set[str]:
    """The paths that patterns match."""
    hits = {pattern: [path for path in flat if re.fullmatch(pattern, path)] for pattern in patterns}
    idle = [f"{pattern!r}{meant_by(pattern, flat)}" for pattern, paths in hits.items() if not paths]
    if idle or not patterns:
        remedy = f"Targets are regular expressions for whole paths of leaves, such as {next(iter(flat), 'w')!r}."
        raise PlanError(lines("lora: targets match no leaf:", idle or ["none given"], remedy))
    return {path for paths in hits.values() for path in paths}


def _patterns(targets: str | Iterable[str]) -> Collection[str]:
    patterns = [targets] if isinstance(targets, str) else targets
    if not isinstance(patterns, Collection) or any(not isinstance(pattern, str) for pattern in patterns):
        raise PlanError(f"lora: targets={targets!r}: give a regular expression, or a list of them")
    if problems := bad_regexes(patterns):
        raise PlanError(lines("lora: invalid targets:", problems, "Write regular expressions for whole paths."))
    return patterns


def _unfit(path: str, flat: Mapping[str, Any]) -> Iterator[str]:
    """Why a leaf cannot have adapters."""
    leaf = flat[path]
    if leaf.ndim < 2 or not leaf.dtype.is_floating_point:
        yield f"  {list(leaf.shape)}  {leaf.dtype}"
    if path + adapted.A in flat:
        yield ": has adapters already"
    if re.fullmatch(PATHS, path):
        yield ": is an adapter itself"


def _inits(path: str, leaf: Tensor) -> dict[str, inits.Initializer]:
    """The initializers of a leaf's adapters: those of the paper's code, He's with a slope of sqrt(5), and zeros."""
    bound = 1 / math.sqrt(max(leaf.shape[-1], 1))
    return {path + adapted.A: inits.uniform(-bound, bound), path + adapted.B: inits.zeros()}


def _fresh(path: str, leaf: Tensor, rank: int, seed: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The first adapters of a leaf, on its device."""
    out = {}
    for suffix, shape in adapted.shapes(leaf.shape, rank).items():
        name = path + suffix
        out[name] = new = torch.empty(shape, dtype=dtype or leaf.dtype, device=leaf.device)
        if not new.is_meta:
            inits.fill(_inits(path, leaf)[name], fold(seed, name), shape, range(new.numel()), new.view(-1))
    return out


def _pair(leaf: Tensor, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    a, b = (nn.Parameter(leaf.new_empty(shape)) for shape in adapted.shapes(leaf.shape, rank).values())
    return a, b


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
