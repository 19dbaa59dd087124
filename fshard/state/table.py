"""A train state in a notebook: what its buffers hold, group by group. Nothing is read, applied or communicated."""

from collections.abc import Sequence

from fshard import markup
from fshard.arguments import size_text
from fshard.runtime.execution import Shard
from fshard.sharding.plan import Plan


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


def _bytes(shard: Shard) -> int:
    return int(shard.param.nbytes + sum(buffer.nbytes for buffer in shard.opt.values()))
