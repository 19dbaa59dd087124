"""A schedule in a notebook: a strip of its ops, a table of its groups, and its text."""

from collections.abc import Sequence
from typing import Any

from fshard import markup
from fshard.arguments import size_text
from fshard.schedule.ops import GroupInfo, Op
from fshard.schedule.transfers import KINDS

COLORS = {"forward": "#5b7fb5", "backward": "#34548a", "update": "#9b7fb0", "free": "#e3e5ea"}
"""Of ops that are no transfers; starts of transfers are orange, waits are dark orange, and all others gray."""

START, WAIT, OTHER = "#d9914b", "#a35c1a", "#c4c7cf"


def render_html(schedule: Any) -> str:
    """A schedule as a notebook shows it."""
    sent = sum(transfer.sent for group in schedule.groups for transfer in group.transfers)
    arena = size_text(schedule.memory.arena_bytes)
    told = f"{len(schedule.ops)} ops, {len(schedule.groups)} groups, an arena of {arena}, {schedule.policy}"
    groups = markup.table(["group", "gathered", "shard", "gradient", "transfers"], _rows(schedule.groups))
    return markup.shown(
        told,
        _strip(schedule.ops),
        markup.fold(f"{len(schedule.groups)} groups; a rank sends {size_text(sent)} for one transfer of each", groups),
        markup.fold("the schedule as text", markup.pre(str(schedule))),
    )


def _rows(groups: Sequence[GroupInfo]) -> list[list[str]]:
    return [
        [
            group.name,
            f"{group.full_bytes:,}",
            f"{group.shard_bytes:,}",
            f"{group.grad_bytes:,}",
            ", ".join(transfer.kind for transfer in group.transfers),
        ]
        for group in groups
    ]


def _strip(ops: Sequence[Op]) -> str:
    """A box for each op, in their order; the pointer on it tells which."""
    cells = "".join(
        f'<div title="{number} {markup.escape(str(op))}" style="width:{14 if op.kind in COLORS else 7}px;height:16px;'
        f'background:{_color(op)}"></div>'
        for number, op in enumerate(ops)
    )
    named = [*COLORS.items(), ("start of a transfer", START), ("wait", WAIT)]
    keys = " ".join(f'<span style="color:{color}">&#9632;</span> {name} &nbsp;' for name, color in named)
    return f'<div style="display:flex;flex-wrap:wrap;gap:1px;margin:4px 0">{cells}</div><div>{keys}</div>'


def _color(op: Op) -> str:
    if op.kind in COLORS:
        return COLORS[op.kind]
    if op.kind in KINDS:
        return START
    return WAIT if op.kind.startswith("wait ") else OTHER
