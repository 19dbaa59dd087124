"""Write the tables of ``results/*.json`` into this folder's README.md, between its two markers."""

import json
import sys
from typing import Any

from common import HERE, RESULTS, Row, cells_of

BEGIN, END = "<!-- results: made by report.py -->", "<!-- end of results -->"
ORDER = ("host_overhead", "step_time", "wire", "optimizer", "memory", "plan_time")


def section(content: dict[str, Any]) -> list[str]:
    """The heading, the circumstances and the table of one benchmark."""
    known = Row.__dataclass_fields__
    rows = [Row(**{key: value for key, value in row.items() if key in known}) for row in content["rows"]]
    around = content["environment"]
    state = " with changes" if around["changed"] else ""
    circumstances = (
        f"{around['date']}, commit `{around['commit'][:10]}`{state}, PyTorch {around['torch']}, "
        f"Python {around['python']}, {around['cores']} cores of {around['processor']}; load average before "
        f"{around['load'][0]}, after {around['load_after'][0]}."
    )
    lines = [f"### {content['name']}.py", "", content["claim"], "", circumstances, ""]
    lines += ["| case | measure | value | 95 % interval | target | |", "|---|---|---:|---|---|---|"]
    for row in rows:
        case, measure, value, interval, target, verdict = cells_of(row)
        cells = (case, measure, f"**{value}**" if target else value, interval, target.replace("<=", "≤"), verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, *("" for _ in content["notes"][:1]), *content["notes"], ""]


def main() -> int:
    """Read, render, write."""
    lines: list[str] = []
    for name in ORDER:
        path = RESULTS / f"{name}.json"
        if path.exists():
            lines += section(json.loads(path.read_text()))
    page = HERE / "README.md"
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(before + "\n".join([BEGIN, "", *lines]) + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
