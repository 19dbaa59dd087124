"""A forecast of stages in tables, and as plain values."""

from collections.abc import Iterator
from typing import Any

from fshard.arguments import size_text
from fshard.foresight.foresight_tables import Section
from fshard.foresight.staged_foresight import StagedForesight, StagedOption
from fshard.schedule.simulate import time_text


def staged_sections(seen: StagedForesight) -> Iterator[Section]:
    """All tables."""
    yield _summary(seen)
    yield _positions(seen)
    yield _orders(seen)


def staged_closing(seen: StagedForesight) -> str:
    """The memory that is missing where no order fits, and what holds less."""
    limit, least = size_text(seen.hardware.memory or 0), size_text(max(seen.chosen.held))
    return (
        f"no order fits into {limit}: the least is {least}, {order_of(seen.chosen)}\n"
        f"what holds less: more stages, more ranks on the other axes, --remat all, fewer --rows"
    )


def order_of(option: StagedOption) -> str:
    """The order of an option in words: its name, its chunks, and what it keeps."""
    policy, stages = option.policy, option.stages
    chunks = f", {stages.chunks} stages a rank" if stages.chunks > 1 else ""
    kept = "" if policy.reshard is True else ", parameters kept"
    sums = ", gradients reduced once a step" if policy.accumulation == "full" else ""
    return f"{option.schedules.order.name}{chunks}{kept}{sums}"


def best_of_each(seen: StagedForesight) -> list[StagedOption]:
    """The options to show: the chosen one, and of each order the fastest that fits, or the one that holds least."""
    found: dict[str, StagedOption] = {}
    for each in sorted(seen.options, key=lambda each: (not seen.fit(each), each.seconds)):
        found.setdefault(each.schedules.order.name, each)
    return sorted(found.values(), key=lambda each: (each is not seen.chosen, each.seconds))


def _summary(seen: StagedForesight) -> Section:
    chosen, mesh, limit = seen.chosen, seen.mesh, seen.hardware.memory
    shape = " x ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.sizes, strict=True))
    peak = max(chosen.held)
    too = "" if seen.fits else ": too much"
    rows = [
        *[("model", words) for words in [seen.words] if words],
        ("mesh", f"{shape}, {mesh.size:,} ranks"),
        ("hardware", seen.hardware.words),
        ("parameters", f"{seen.parameters:,}"),
        ("order", f"{order_of(chosen)}; {seen.microbatches} microbatches"),
        ("peak memory", size_text(peak) + (f" of {size_text(limit)}{too}" if limit else "")),
        ("step", f"{time_text(chosen.seconds)}: ranks are idle {chosen.simulation.bubble:.1%} of it"),
        ("", f"{chosen.schedules.idle:.1%} by the order alone, if backwards take twice as long as forwards"),
        ("MFU", f"{seen.mfu(chosen):.1%}"),
    ]
    if seen.tokens and chosen.seconds:
        rows.append(("tokens", f"{seen.tokens * seen.replicas / chosen.seconds:,.0f} a second"))
    return "Foresight, with stages", ("", ""), rows


def _positions(seen: StagedForesight) -> Section:
    chosen, rows = seen.chosen, []
    homes = chosen.schedules.order.homes
    for at, run in enumerate(chosen.simulation.ranks):
        stages = ", ".join(str(stage) for stage, home in enumerate(homes) if home == at)
        waits = ", ".join(f"{kind} {time_text(took)}" for kind, took in chosen.simulation.exposed[at].items())
        sizes = size_text(chosen.states[at]), size_text(chosen.held[at])
        rows.append((f"{at}", stages, *sizes, time_text(run.compute), waits))
    heads = ("position", "stages", "state", "peak memory", "compute", "waits for")
    return "The positions on the axis of stages; numbers are those of one rank", heads, rows


def _orders(seen: StagedForesight) -> Section:
    rows = []
    for each in best_of_each(seen):
        mark = " <- chosen" if each is seen.chosen else "" if seen.fit(each) else " (over)"
        numbers = time_text(each.seconds), f"{each.simulation.bubble:.1%}", size_text(max(each.held))
        rows.append((*numbers, f"{order_of(each)}{mark}"))
    rows += [("", "", "", f"{name}: {why}") for name, why in seen.refused.items()]
    return f"Orders, the best policy of each of {len(seen.options)}", ("step", "idle", "memory", "order"), rows


def staged_json(seen: StagedForesight) -> dict[str, Any]:
    """All of it in plain values. Times are seconds, sizes bytes of one rank."""
    chosen, mesh = seen.chosen, seen.mesh
    return {
        "model": seen.words or None,
        "mesh": dict(zip(mesh.axis_names, mesh.sizes, strict=True)),
        "stages": chosen.stages.axis,
        "hardware": seen.hardware.words,
        "memory_limit": seen.hardware.memory,
        "fits": seen.fits,
        "microbatches": seen.microbatches,
        "parameters": seen.parameters,
        "mfu": seen.mfu(chosen),
        "tokens_per_s": seen.tokens * seen.replicas / chosen.seconds if seen.tokens else None,
        **_option(chosen),
        "options": [_option(each) for each in seen.options],
        "refused": dict(seen.refused),
    }


def _option(each: StagedOption) -> dict[str, Any]:
    return {
        "order": each.schedules.order.name,
        "chunks": each.stages.chunks,
        "placement": each.stages.placement,
        "policy": str(each.policy),
        "seconds": each.seconds,
        "idle": each.simulation.bubble,
        "state_bytes": list(each.states),
        "peak_bytes": list(each.held),
        "exposed_by_kind": [dict(waits) for waits in each.simulation.exposed],
    }
