"""The first 25 minutes of a card: five commands in order, each within ten minutes, and a table of their numbers."""

from collections.abc import Iterator, Sequence
from typing import Any

from tests.gpu.runner import Record, run_stages
from tests.gpu.stages import PLAN, Stage


def chosen(numbers: Sequence[int]) -> list[tuple[int, float, list[Stage]]]:
    """The commands with these numbers, all if there are none: number, seconds, stages."""
    return [(n, one.seconds, [*one.stages]) for n, one in enumerate(PLAN, 1) if not numbers or n in numbers]


def told() -> str:
    """The commands as they are called one by one, with their limits, and what their numbers decide."""
    lines = []
    for number, one in enumerate(PLAN, 1):
        lines += [f'{number}. make gpu ARGS="--plan {number}"  ({one.seconds:.0f} s)  {one.what}', f"   {one.decides}"]
    return "\n".join(lines)


def run_plan(record: Record, numbers: Sequence[int], seconds: float, rest: bool, short: bool) -> list[Stage]:
    """Print the plan, run its commands within their limits, print the table. Returns the stages."""
    print(told(), flush=True)
    all_stages, left = [], seconds
    for number, limit, stages in chosen(numbers):
        all_stages += stages
        limit = (sum(stage.dry for stage in stages) if record.content["dry"] else limit) if left > 0 else 0
        limit = min(limit, left)
        print(f"\n== {number}, within {limit:.0f} s", flush=True)
        left -= run_stages(record, [one for one in stages if not (rest and record.has(one.name))], limit, short)
    print(f"\n{table(record)}")
    return all_stages


def table(record: Record) -> str:
    """Every number of the plan, a line for each peer or product, and why where there is none."""
    rows = [("what", "numbers")]
    for stage in (stage for one in PLAN for stage in one.stages):
        found = record.content["stages"].get(stage.name, {"status": "not reached"})
        status, dry = found["status"], record.content["dry"]
        if dry or not found.get("numbers"):
            away = "not run on a card" if dry or status == "not reached" else ""
            rows.append((stage.name, "; ".join(filter(None, (status, *found.get("problems", ()), away)))))
        for what, numbers in () if dry else found.get("numbers", {}).items():
            rows.append((what, ", ".join(cells(numbers))))
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"{what:{width}}  {numbers}" for what, numbers in rows)


def cells(numbers: Any) -> Iterator[str]:
    """Numbers with their names; of three, the first and the range of the others."""
    if not isinstance(numbers, dict):
        yield f"{numbers}"
        return
    for name, value in numbers.items():
        if isinstance(value, dict):
            yield f"{name} ({', '.join(cells(value))})"
        elif isinstance(value, list | tuple):
            middle, low, high = value
            yield f"{name} {middle:.4g} ({low:.4g} .. {high:.4g})"
        else:
            yield f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
