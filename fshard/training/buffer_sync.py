"""Buffers that change, such as the statistics of batch normalization: through a step, and averaged over ranks."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import Want, expect
from fshard.collectives.linear import LinearSum, apply
from fshard.collectives.ranks import Ranks
from fshard.errors import PlanError, TreeError, lines, no_processes
from fshard.patterns import bad_regexes, first_matches, meant_by
from fshard.runtime.comm import collective_call, enter
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages

HOW = ("mean", "local")


class Whole:
    """A part of a batch that has no rows: every microbatch gets the whole value.

    Args:
        value: any pytree, such as ``model.buffers``. The loss function reads it as ``batch["buffers"].value``.

    >>> fs.Whole({"angles": 3})
    Whole({'angles': 3})
    """

    # No dataclass: trees would take it apart.
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Whole({self.value!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be used as a tensor."""
        raise _not_read(f"{getattr(func, '__name__', func)}(...)")

    def __getattr__(self, name: str) -> Any:
        """Refuse what a tensor would have."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(str(_not_read(f".{name}")))

    def __getitem__(self, key: Any) -> Any:
        """Refuse to be indexed."""
        raise _not_read(f"[{key!r}]")


def _not_read(use: str) -> TreeError:
    return TreeError(f"an fs.Whole was used as the value that it holds, by {use}: read it as batch['name'].value")


@collective_call
def sync_buffers(
    buffers: Mapping[str, Any],
    plan: Plan,
    rules: Sequence[tuple[str, str]] = ((".*", "mean"),),
    *,
    microbatches: int = 1,
) -> dict[str, Any]:
    """Average the buffers of all ranks, or leave them to each rank, by rules. Collective.

    Each part of a batch updates the statistics of batch normalization from the same start. Their mean is the update of
    one process by the mean of the parts' statistics. (DDP instead broadcasts those of the first rank.)

    Args:
        buffers: a nested dict of this rank's tensors, as ``model.apply(..., buffers=)`` or ``metrics.aux`` gave them.
        plan: the mean is over its data axes.
        rules: ``(pattern, how)`` on paths, the first match wins: ``"mean"`` averages floating-point buffers, in their
            own dtype, in the order of ranks; ``"local"`` leaves them unchanged. Other buffers, such as counts of
            batches, are never averaged.
        microbatches: if the step had several, leaves are stacked along a first dim of this length, as in
            ``metrics.aux``: floating-point ones are averaged along it, whatever the rules say; of others the last one
            is taken.

    Raises:
        PlanError: no rule matches a buffer, a rule matches none, or it says neither ``"mean"`` nor ``"local"``.
        TreeError: a leaf is not stacked.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.P())])
    >>> fs.sync_buffers({"norm": {"mean": torch.tensor([[1.0], [3.0]])}}, plan, microbatches=2)
    {'norm': {'mean': tensor([2.])}}
    """
    wants: list[Want] = [
        ("plan", plan, Plan, "what fs.make_plan returned"),
        ("rules", rules, (list, tuple), "a list of (pattern, 'mean' or 'local')"),
        ("microbatches", microbatches, int, "the number of microbatches"),
    ]
    expect("sync_buffers(buffers, plan)", wants)
    refuse_stages("sync_buffers(buffers, plan)", plan)
    if plan.mesh.transport is None and plan.mesh.size > 1:
        raise no_processes()
    flat = {path: _joined(path, leaf, microbatches) for path, leaf in tree.paths(buffers)}
    chosen = _chosen(flat, rules)
    by_dtype: dict[torch.dtype, list[str]] = {}
    for path in chosen:
        by_dtype.setdefault(flat[path].dtype, []).append(path)
    enter(plan.mesh, "sync_buffers")
    ranks = Ranks(plan.mesh, plan.data_axes)
    with torch.no_grad():
        for paths in by_dtype.values():
            row = torch.cat([flat[path].detach().reshape(-1) for path in paths])
            mean = apply(row, LinearSum(ranks)) / ranks.size
            sizes = [flat[path].numel() for path in paths]
            flat |= {p: part.view(flat[p].shape) for p, part in zip(paths, mean.split_with_sizes(sizes), strict=True)}
    return tree.nest(flat)


def _joined(path: str, leaf: Any, count: int) -> Any:
    """One value from those of all microbatches."""
    if count == 1 or not isinstance(leaf, Tensor):
        return leaf
    if leaf.ndim == 0 or leaf.shape[0] != count:
        raise TreeError(
            f"sync_buffers: {path} has shape {list(leaf.shape)}, not one value for each of microbatches={count}: give "
            f"what metrics.aux holds after a step with accumulate={count}"
        )
    return leaf.mean(0) if leaf.is_floating_point() else leaf[-1]


def _chosen(flat: Mapping[str, Any], rules: Sequence[tuple[str, str]]) -> list[str]:
    """The paths of the buffers to average."""
    _check_rules(rules, flat)
    hits = first_matches([pattern for pattern, _ in rules], flat)
    lost = [path for path, hit in hits.items() if hit is None]
    if lost:
        raise PlanError(lines("sync_buffers: no rule matches:", lost, "Add a rule such as ('.*', 'mean') at the end."))
    floating = {path for path, leaf in flat.items() if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    return [path for path, hit in hits.items() if hit is not None and rules[hit[0]][1] == "mean" and path in floating]


def _check_rules(rules: Sequence[Any], flat: Mapping[str, Any]) -> None:
    pairs = [rule if isinstance(rule, tuple) and len(rule) == 2 else (rule, None) for rule in rules]
    wrong = [f"{pattern!r}: {how!r}" for pattern, how in pairs if how not in HOW]
    if wrong:
        raise PlanError(lines("sync_buffers: invalid rules:", wrong, "Say 'mean' or 'local'."))
    if problems := bad_regexes(pattern for pattern, _ in rules):
        raise PlanError(lines("sync_buffers: invalid patterns:", problems, "Patterns match whole paths."))
    idle = [pattern for pattern, _ in rules if not any(re.fullmatch(pattern, path) for path in flat)]
    if flat and idle:
        problems = [f"{pattern!r}{meant_by(pattern, flat)}" for pattern in idle]
        raise PlanError(lines("sync_buffers: rules match no buffer:", problems, "Patterns match whole paths."))
