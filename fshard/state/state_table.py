"""A train state in a notebook: what its buffers hold, group by group. Nothing is read, applied or communicated."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import markup, tree
from fshard.arguments import size_text
from fshard.runtime.execution import Shard
from fshard.sharding.plan import Plan

HALVES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes that numpy lacks."""


def state_html(plan: Plan, title: str, shards: Sequence[Shard] | None) -> str:
    """The bytes of parameters and optimizer state on a rank; ``shards`` is None for a donated state."""
    if shards is None:
        return markup.shown(title, "<div>a step has taken its memory: use the state that the step returned</div>")
    names = list(dict.fromkeys(name for shard in shards for name in shard.opt))
    rows, most = [], max((_bytes(shard) for shard in shards), default=0)
    for group, shard in zip(plan.groups, shards, strict=True):
        kept = {name: buffer.nbytes for name, buffer in shard.opt.items()}
        parts: list[markup.Part] = [("params", shard.param.nbytes), *((name, kept.get(name, 0)) for name in names)]
        rows.append(
            [group.name, f"{len(group.leaves)}", *(f"{int(size):,}" for _, size in parts), markup.bar(parts, most)]
        )
    head = ["group", "leaves", "params", *names, ""]
    total = size_text(sum(map(_bytes, shards)))
    where = "each rank" if plan.mesh.everywhere else f"rank {plan.mesh.rank}"
    folded = markup.fold(f"{total} on {where}, in {len(rows)} groups", markup.table(head, rows), len(rows) < 9)
    return markup.shown(title, folded, markup.legend(["params", *names]))


def arrays(params: Any) -> Any:
    """A tree of tensors as arrays of numpy: treescope 0.1 asks tensors for names, which PyTorch 2.13 has no more."""
    return tree.mapped(_array, params)


def _array(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    here = leaf.detach().cpu()
    return (here.float() if here.dtype in HALVES else here).numpy()


def _bytes(shard: Shard) -> int:
    return int(shard.param.nbytes + sum(buffer.nbytes for buffer in shard.opt.values()))
