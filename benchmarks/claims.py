"""The ten claims that a user cares about, all measured on one commit: the first table of this folder's README.md."""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HERE, RESULTS

FOLDER = RESULTS / "claims"
BEGIN, END = "<!-- claims: made by claims.py -->", "<!-- end of claims -->"
RUNS: dict[str, tuple[str, ...]] = {
    "host_overhead": ("--peers", "eager", "fshard", "fshard fx", "--rounds", "200"),
    "step_time": ("--ranks", "2", "--peers", "fsdp2", "fshard"),
    "wire": ("--ranks", "2", "--peers", "fsdp2", "fshard"),
    "formats": ("--ranks", "2", "--rates", "200mbit"),
    "memory": (),
    "checkpoint": (),
    "steps": ("--ranks", "2", "--rates", "loopback", "--peers", "alone", "train step", "by parts"),
}
"""The benchmarks that the claims need, and how they run: with the peers that are compared, and no others."""


@dataclass(frozen=True)
class Claim:
    """A sentence, and the row that shows it.

    Attributes:
        sentence: what is measured, and relative to what.
        shown: the benchmark, and the case and the measure of its row.
    """

    sentence: str
    shown: tuple[str, str, str]

    def row(self, found: Mapping[str, Any]) -> dict[str, Any] | None:
        """The row of this claim in what was measured."""
        name, case, measure = self.shown
        rows = found.get(name, {}).get("rows", ())
        return next((row for row in rows if (row["case"], row["measure"]) == (case, measure)), None)


CLAIMS = (
    Claim(
        "Processor time of a tiny GPT's step in one process, relative to plain PyTorch",
        ("host_overhead", "fshard / eager", "cpu"),
    ),
    Claim('The same with unit graphs, `compile="fx"`', ("host_overhead", "fshard fx / eager", "cpu")),
    Claim(
        "Time of a step on two ranks of one host, relative to FSDP2", ("step_time", "2 ranks: fshard / fsdp2", "wall")
    ),
    Claim("The same over links of 1 Gbit/s", ("wire", "1gbit 2 ranks: fshard / fsdp2", "wall")),
    Claim("The same over links of 200 Mbit/s", ("wire", "200mbit 2 ranks: fshard / fsdp2", "wall")),
    Claim('The same with `wire="int8"`', ("formats", "200mbit 2 ranks: fshard int8 / fsdp2", "wall")),
    Claim(
        "Bytes that a rank sends, relative to the fewest that its gathers and reductions need",
        ("wire", "1gbit 2 ranks: fshard / its minimum", "bytes"),
    ),
    Claim("Peak of memory, relative to what the schedule foretells", ("memory", "fshard / its prediction", "tensors")),
    Claim(
        "Processor time of a train step written by hand from parts, relative to the ready-made one",
        ("steps", "loopback 2 ranks: by parts / train step", "cpu"),
    ),
    Claim(
        "Time to save 1 GB of state on four ranks, relative to `torch.distributed.checkpoint`",
        ("checkpoint", "save: fshard / dcp", "wall"),
    ),
)


def table(found: Mapping[str, Any]) -> list[str]:
    """The claims with their numbers, the targets and what shows them."""
    lines = ["| claim | measured | 95 % interval | target | shown by |", "|---|---:|---|---|---|"]
    for claim in CLAIMS:
        row, number, interval, target = claim.row(found), "", "", ""
        if row is not None:
            number = f"**{row['value']:.3f}**"
            interval = "" if row["low"] is None else f"{row['low']:.3f} .. {row['high']:.3f}"
            target = "" if row["target"] is None else f"≤ {row['target']:g}: {row['verdict']}"
        lines.append(f"| {claim.sentence} | {number} | {interval} | {target} | `{claim.shown[0]}.py` |")
    return lines


def circumstances(found: Mapping[str, Any]) -> str:
    """When, of which commit, and where the claims were measured."""
    around = [content["environment"] for content in found.values()]
    commits = dict.fromkeys(each["commit"][:10] + " with changes" * each["changed"] for each in around)
    loads = [each["load"][0] for each in around]
    one = around[0]
    return (
        f"{min(each['date'] for each in around)}, commit {', '.join(f'`{commit}`' for commit in commits)}, PyTorch "
        f"{one['torch']}, Python {one['python']}, {one['cores']} cores of {one['processor']}; load average before each "
        f"{min(loads)} .. {max(loads)}."
    )


def page(text: str, found: Mapping[str, Any]) -> str:
    """The README with the claims between their markers."""
    before, rest = text.split(BEGIN)
    told = [circumstances(found)] if found else ["Not measured yet."]
    return before + "\n".join([BEGIN, "", *table(found), "", *told, "", END]) + rest.split(END)[1]


def measure(names: list[str], folder: Path) -> list[str]:
    """Run benchmarks one after the other. Returns those that failed."""
    failed = []
    for at, name in enumerate(names):
        print(f"claims: {name}.py, {at + 1} of {len(names)}", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), *RUNS[name], "--results", str(folder)]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    return failed


def main() -> int:
    """Measure, render, write."""
    cli = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    cli.add_argument(
        "--only", nargs="*", choices=RUNS, help="measure these alone; without a name, only write the table"
    )
    cli.add_argument("--results", type=Path, default=FOLDER, help="folder of the JSON")
    args = cli.parse_args()
    failed = measure([*RUNS] if args.only is None else args.only, args.results)
    paths = [args.results / f"{name}.json" for name in RUNS]
    found = {path.stem: json.loads(path.read_text()) for path in paths if path.exists()}
    readme = HERE / "README.md"
    readme.write_text(page(readme.read_text(), found))
    for name in failed:
        print(f"claims: {name}.py failed: the table shows what it measured before, if it did")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
