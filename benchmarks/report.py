"""Write the tables of ``results/*.json`` to ``results/README.md``."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu
from common import RESULTS, Row, cells_of

HEAD = """# All results

The tables behind [the claims](../README.md), which also says how to read a number. `report.py` made this page of the
JSON beside it.
"""
ORDER = (
    "host_overhead",
    "step_time",
    "jax_fsdp",
    "wire",
    "hsdp",
    "pipeline",
    "bubbles",
    "formats",
    "outer",
    "balance",
    "optimizer",
    "muon",
    "memory",
    "vocabulary",
    "steps",
    "float8",
    "functional",
    "checkpoint",
    "plan_time",
    "auto",
    "published",
    "gpu",
)


def unmeasured(told: set[str]) -> list[Row]:
    """A row for each case of ``gpu.py`` that has none: what no card has run."""
    titles = [gpu.title_of(name) for name in gpu.CASES]
    return [Row(title, "wall", why="not run on a card") for title in titles if title not in told]


def section(content: dict[str, Any]) -> list[str]:
    """The heading, the circumstances and the table of one benchmark."""
    known = Row.__dataclass_fields__
    rows = [Row(**{key: value for key, value in row.items() if key in known}) for row in content["rows"]]
    if content["name"] == "gpu":
        rows += unmeasured({row.case for row in rows})
    around = content["environment"]
    state = " with changes" if around["changed"] else ""
    circumstances = (
        f"{around['date']}, commit `{around['commit'][:10]}`{state}, PyTorch {around['torch']}, "
        f"Python {around['python']}, {around['cores']} cores of {around['processor']}; load average before "
        f"{around['load'][0]}" + (f", after {around['load_after'][0]}." if "load_after" in around else ".")
    )
    lines = [f"### {content['name']}.py", "", content["claim"], "", circumstances, ""]
    lines += ["| case | measure | value | 95 % interval | target | |", "|---|---|---:|---|---|---|"]
    for row in rows:
        case, measure, value, interval, target, verdict = cells_of(row)
        cells = (case, measure, f"**{value}**" if target else value, interval, target.replace("<=", "≤"), verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, *("" for _ in content["notes"][:1]), *content["notes"], ""]


def summary(contents: Sequence[dict[str, Any]]) -> list[str]:
    """Every row with a target on one page, the missed ones first."""
    judged = [
        (content["name"], Row(**{key: value for key, value in row.items() if key in Row.__dataclass_fields__}))
        for content in contents
        for row in content["rows"]
        if row["target"] is not None
    ]
    missed = [(name, row) for name, row in judged if row.short]
    lines = [f"**{len(judged) - len(missed)} of {len(judged)} targets are met.**", ""]
    if missed:
        lines += ["| missed | case | measure | value | target | |", "|---|---|---|---:|---|---|"]
    for name, row in missed:
        case, measure, value, _, target, verdict = cells_of(row)
        lines.append(f"| `{name}.py` | {case} | {measure} | {value} | {target.replace('<=', '≤')} | {verdict} |")
    return [*lines, ""]


def page(found: Mapping[str, dict[str, Any]]) -> str:
    """The page of what was found."""
    lines = [HEAD, *summary([found[name] for name in ORDER if name in found])]
    for name in ORDER:
        lines += section(found[name]) if name in found else [f"### {name}.py", "", "Not measured yet.", ""]
    return "\n".join(lines)


def main() -> int:
    """Read, render, write."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON")
    args = cli.parse_args()
    found = {path.stem: json.loads(path.read_text()) for path in args.results.glob("*.json") if path.stem in ORDER}
    (args.results / "README.md").write_text(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
