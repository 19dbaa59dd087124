"""A foresight in tables, and as plain values."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fshard.arguments import size_text
from fshard.foresight.foresee import Foresight
from fshard.foresight.remedies import Remedy, closing, largest
from fshard.foresight.search_table import Option, Search
from fshard.schedule.ops import Op
from fshard.schedule.simulate import time_text

Section = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""A title, the heads of columns, and rows."""

SHOWN = 8
"""Rows of a table that may be long."""


def sections(seen: Foresight) -> Iterator[Section]:
    """All tables."""
    yield _summary(seen)
    yield _groups(seen)
    yield _ops(seen)
    yield _wire(seen)
    yield _policies(seen)
    heads = ("ranks", "step", "of the smallest mesh")
    base = next(iter(seen.scaling.values()), 0.0) or math.nan
    rows = [
        (f"{ranks:,}", time_text(seconds), f"{base / seconds:.1%}")
        for ranks, seconds in seen.scaling.items()
        if seconds
    ]
    yield "Scaling, with as large a batch a rank", heads, rows


def _summary(seen: Foresight) -> Section:
    run, mesh = seen.simulation, seen.plan.mesh
    shape = " x ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.sizes, strict=True))
    limit = seen.hardware.memory
    peak = size_text(seen.peak_bytes) + (f" of {size_text(limit)}{'' if seen.fits else ': too much'}" if limit else "")
    rows = [
        *[("model", words) for words in [seen.words] if words],
        ("mesh", f"{shape}, {mesh.size:,} ranks"),
        ("hardware", seen.hardware.words_for(seen.plan, seen.chosen.memory.host_bytes > 0)),
        ("parameters", f"{sum(row.parameters for row in seen.groups):,} in {len(seen.groups)} groups"),
        *[("wire formats", words) for words in [_formats(seen)] if words],
        ("policy", str(seen.chosen.policy)),
        ("peak memory", peak),
        ("", f"{size_text(seen.state_bytes)} state; {_communicators(seen)}{seen.chosen.memory}"),
        *[("host memory", f"{size_text(size)} a rank, of {_hosted(seen)}") for size in [seen.host_bytes] if size],
        ("step", f"{time_text(run.seconds)}: compute {time_text(run.compute)}, exposed {time_text(run.exposed)}"),
        ("sent", f"{size_text(run.sent)} a rank"),
        ("MFU", f"{seen.mfu:.1%}"),
    ]
    if seen.tokens and run.seconds:
        rows.append(("tokens", f"{seen.tokens_per_s:,.0f} a second, {seen.tokens / run.seconds:,.0f} a rank"))
    return "Foresight", ("", ""), rows


def _formats(seen: Foresight) -> str:
    """The transfers that are not exact, and in which formats they are."""
    moves = [move for group in seen.schedule.groups for move in group.transfers if move.wire]
    return ", ".join(dict.fromkeys(f"{move.kind} in {move.wire}" for move in moves))


def _communicators(seen: Foresight) -> str:
    count, each = len(seen.communicators), seen.hardware.communicator
    return f"{size_text(count * each)} of {count} communicators; " if count * each else ""


def _groups(seen: Foresight) -> Section:
    """Groups with equal numbers share a row."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for row in seen.groups:
        key = row.leaves, row.parameters, row.gathered, row.state, row.sent
        alike.setdefault(key, []).append(row.name)
    rows = []
    for (leaves, parameters, gathered, state, sent), names in alike.items():
        name = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
        sizes = (size_text(gathered), size_text(state), size_text(sent))
        rows.append((name, f"{leaves}", f"{parameters:,}", *sizes))
    heads = ("group", "leaves", "parameters", "gathered", "state a rank", "sent a step")
    return "The plan, by group; of groups in one row, each has these numbers", heads, rows


def _ops(seen: Foresight) -> Section:
    """Memory at the ops where most is held, and where compute waits longest."""
    schedule, memory = seen.schedule, seen.schedule.memory
    held = sorted(range(len(schedule)), key=lambda at: -memory.beside[at])[:3]
    rows = [
        (f"op {at}", str(schedule[at]), f"{size_text(memory.peak(at))} gathered and in flight, beside activations")
        for at in sorted(held)
    ]
    rows += [("waits", str(op), f"{time_text(seconds)} exposed") for seconds, op in _waits(seen)]
    return "Ops: memory, and the longest waits", ("", "op", ""), rows


def _waits(seen: Foresight) -> list[tuple[float, Op]]:
    return [(seconds, op) for seconds, op in seen.simulation.waits() if seconds > 1e-6][:SHOWN]


def _wire(seen: Foresight) -> Section:
    links = seen.hardware.cluster.links(seen.plan.mesh)
    rows = []
    for axes, sent in seen.simulation.sent_by_axes.items():
        link = links[axes]
        alone = sent / link.bytes_per_s
        rate = f"{link.bytes_per_s / 1e9:,.1f} GB/s"
        rows.append((axes, size_text(sent), rate, time_text(alone)))
    exposed = seen.simulation.exposed_by_kind
    rows += [(f"exposed: {kind}", "", "", time_text(seconds)) for kind, seconds in exposed.items() if seconds > 1e-6]
    return "Bytes by link, of one rank", ("over", "sent", "rate", "time"), rows


def _policies(seen: Foresight) -> Section:
    limit = seen.hardware.memory
    rows = []
    for each in seen.candidates[:SHOWN]:
        total = seen.held(each)
        mark = " <- chosen" if each.policy == seen.chosen.policy else " (over)" if limit and total > limit else ""
        rows.append((time_text(each.seconds), time_text(each.exposed), size_text(total), f"{each.policy}{mark}"))
    if seen.chosen not in seen.candidates[:SHOWN]:
        each, total = seen.chosen, seen.peak_bytes
        rows.append((time_text(each.seconds), time_text(each.exposed), size_text(total), f"{each.policy} <- chosen"))
    return f"Policies, the best of {len(seen.candidates)}", ("step", "exposed", "memory", "policy"), rows


def as_json(seen: Foresight, found: Sequence[Remedy], searched: Search | None = None) -> dict[str, Any]:
    """All of it in plain values. Times are seconds, sizes bytes of one rank."""
    run, mesh = seen.simulation, seen.plan.mesh
    return {
        "model": seen.words or None,
        "mesh": dict(zip(mesh.axis_names, mesh.sizes, strict=True)),
        "hardware": seen.hardware.words_for(seen.plan, seen.chosen.memory.host_bytes > 0),
        "memory_limit": seen.hardware.memory,
        "fits": seen.fits,
        "peak_bytes": seen.peak_bytes,
        "state_bytes": seen.state_bytes,
        "host_bytes": seen.host_bytes,
        "communicators": [f"{role} over {'+'.join(axes)}" for role, axes in seen.communicators],
        "communicator_bytes": seen.hardware.communicator,
        "footprint": asdict(seen.chosen.memory),
        "policy": str(seen.chosen.policy),
        "seconds": run.seconds,
        "compute_seconds": run.compute,
        "exposed_seconds": run.exposed,
        "exposed_by_kind": run.exposed_by_kind,
        "sent_bytes": run.sent,
        "sent_by_axes": run.sent_by_axes,
        "mfu": seen.mfu if run.seconds else None,
        "tokens_per_s": seen.tokens_per_s if seen.tokens and run.seconds else None,
        "groups": [asdict(row) for row in seen.groups],
        "policies": [
            {
                "policy": str(each.policy),
                "seconds": each.seconds,
                "exposed_seconds": each.exposed,
                "peak_bytes": seen.held(each),
            }
            for each in seen.candidates
        ],
        "scaling": {str(ranks): seconds for ranks, seconds in seen.scaling.items()},
        "largest": [] if seen.fits else largest(seen),
        "remedies": [asdict(remedy) for remedy in found],
        "notes": [] if seen.fits else [*closing(seen, found)],
        "search": None if searched is None else [_option(each) for each in searched.options],
    }


def _option(each: Option) -> dict[str, Any]:
    words = {"mesh": each.shape, "remat": str(each.remat or "none"), "wire": each.wire_words}
    words |= {"policy": str(each.policy)}
    numbers = {"seconds": each.seconds, "exposed_seconds": each.exposed, "peak_bytes": each.peak_bytes}
    return {**words, "fits": each.fits, **numbers, "rows_per_s": each.rows_per_s, "mfu": each.mfu}


def _hosted(seen: Foresight) -> str:
    """Kinds of tensors that the host holds, in words."""
    return "state, gradients and activations" if seen.chosen.memory.host_bytes else "state and gradients"
