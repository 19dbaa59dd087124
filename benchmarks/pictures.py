"""Draw the ratios to FSDP2 of ``results/peers/*.json`` as bars: ``docs/pictures/peers.png``. Needs matplotlib."""

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from common import HERE, RESULTS

PICTURE = HERE.parent / "docs" / "pictures" / "peers.png"
BASE = "fsdp2"
CASES = (
    ("step_time", "2 ranks", "loopback, 2 ranks"),
    ("jax_fsdp", "2 ranks", "loopback, 2 ranks"),
    ("wire", "1gbit 2 ranks", "1 Gbit/s, 2 ranks"),
    ("wire", "200mbit 2 ranks", "200 Mbit/s, 2 ranks"),
)
PEERS = ("jax", "fsdp1", "fsdp2 async", "fsdp2 no reshard", "ddp", "fshard", "fshard no reshard")
"""From top to bottom, where they were measured."""

Bar = tuple[float, float, float]


def bars(rows: list[dict[str, Any]], case: str) -> dict[str, Bar]:
    """The ratio to FSDP2 of each peer in one case, with its interval."""
    found = {}
    for row in rows:
        match = re.fullmatch(rf"{re.escape(case)}: (.+) / {BASE}", row["case"])
        if match and row["measure"] == "wall" and match[1] in PEERS:
            found[match[1]] = (row["value"], row["low"], row["high"])
    return found


def collect(folder: Path) -> dict[str, dict[str, Bar]]:
    """The bars of each panel, by its title."""
    panels: dict[str, dict[str, Bar]] = {}
    for name, case, title in CASES:
        path = folder / f"{name}.json"
        if path.exists():
            for peer, bar in bars(json.loads(path.read_text())["rows"], case).items():
                panels.setdefault(title, {}).setdefault(peer, bar)
    return panels


def draw(panels: dict[str, dict[str, Bar]], target: Path) -> None:
    """One panel a case, one bar a peer, FSDP2 the line at 1."""
    from matplotlib.figure import Figure

    names = [name for name in reversed(PEERS) if any(name in found for found in panels.values())]
    colors = ["#1f6f8b" if name.startswith("fshard") else "#b8bfc6" for name in names]
    missing = (math.nan, math.nan, math.nan)
    figure = Figure(figsize=(1.5 + 3 * len(panels), 1 + 0.32 * len(names)), layout="constrained")
    columns = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, found) in zip(columns, panels.items(), strict=True):
        values = [found.get(name, missing) for name in names]
        errors = [[v - min(v, low) for v, low, _ in values], [max(v, high) - v for v, _, high in values]]
        axes.barh(names, [v for v, _, _ in values], xerr=errors, color=colors, ecolor="#555555", capsize=2)
        axes.axvline(1, color="#333333", linewidth=0.8, linestyle="--")
        axes.set_title(title, fontsize=10)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("step time relative to FSDP2 (shorter is faster); lines: 95 % intervals", fontsize=9)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150, metadata={"Software": ""})


def main() -> int:
    """Read, draw."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--results", type=Path, default=RESULTS / "peers", help="folder of the JSON")
    cli.add_argument("--out", type=Path, default=PICTURE, help="the picture")
    args = cli.parse_args()
    panels = collect(args.results)
    if not panels:
        print(f"pictures: nothing to draw: no ratios to {BASE} in {args.results}")
        return 0
    try:
        draw(panels, args.out)
    except ModuleNotFoundError as error:
        print(f"pictures: skipped: {error.name} is not installed: pip install 'fshard[view]'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
