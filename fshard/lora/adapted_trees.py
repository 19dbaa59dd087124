"""Adapters beside the leaves of a tree, and in the modules of a model."""

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
from fshard.lora import modules as adapted
from fshard.lora.modules import PATHS
from fshard.model import initial_values as inits
from fshard.model.philox import fold
from fshard.model.split import Model, split
from fshard.patterns import bad_regexes, meant_by


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

    >>> small = fs.lora.init({"w": torch.zeros(6, 4), "b": torch.zeros(6)}, "w", rank=2)
    >>> {path: tuple(leaf.shape) for path, leaf in fs.tree.paths(small)}
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

    >>> p = fs.lora.init({"weight": torch.ones(2, 3)}, "weight", rank=1)
    >>> fs.lora.linear(p, torch.ones(1, 3), alpha=1)
    tensor([[3., 3.]])
    """
    expect("lora.linear(params, x)", [("params", params, Mapping, "a subtree"), ("x", x, Tensor, "a tensor")])
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

    >>> model = fs.lora.wrap(fs.split(torch.nn.Linear(4, 6)), "weight", rank=2)
    >>> [path for path, _ in fs.tree.paths(model.params)], sorted(model.frozen)
    (['weight', 'bias', 'weight_lora_a', 'weight_lora_b'], ['bias', 'weight'])
    """
    wants = [("model", model, Model, "what fs.split(module) returned"), ("alpha", alpha, (int, float), "a number")]
    expect("lora.wrap(model, targets)", wants)
    if model.around:
        raise PlanError(
            f"lora.wrap: layers of the model, such as {next(iter(model.around))}, are cut over ranks by "
            "fs.parallel.parallelize, which knows no adapters: give adapters to the model as fs.split returned it"
        )
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


def adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """The adapters of a tree, whole tensors or shards: the part of it that a finetuning run trains.

    Args:
        params: a nested dict of tensors.

    >>> list(fs.lora.adapters(fs.lora.init({"w": torch.zeros(2, 2), "b": torch.zeros(2)}, "w")))
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
    """Say why a leaf cannot have adapters."""
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
