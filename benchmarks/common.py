"""What every benchmark shares: statistics of interleaved samples, rows with targets, the table, the JSON.

Times are compared only with times of the same round: peers take turns, step by step, and what is reported is the
median over rounds of one peer's time divided by another's in the same round. A machine that slows down slows both.
"""

import argparse
import datetime
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import lab
import torch

import fshard

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
QUICK = HERE.parent / "build" / "bench"
"""Where quick results go: they are no basis for a table, so they are not kept with the others."""

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""PyTorch's remarks on name servers and the like would end up between the tables."""

RESAMPLES = 1000


@dataclass(frozen=True)
class Row:
    """One number of a table.

    Attributes:
        case: what was measured: the configuration, and which peer against which.
        measure: the unit of the number: ``wall``, ``cpu``, ``bytes``, ...
        value: the number; for ratios the median over rounds; None if nothing was measured.
        low: the lower end of its 95 % confidence interval.
        high: the upper end.
        target: what the number should not exceed; None for a number that is only told.
        strict: False for absolute times: a slower machine misses them without anything being wrong.
        why: the reason why nothing was measured.
    """

    case: str
    measure: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    target: float | None = None
    strict: bool = True
    why: str = ""

    @property
    def short(self) -> bool:
        """Whether the target is missed."""
        return self.target is not None and (self.value is None or not self.value <= self.target)

    @property
    def verdict(self) -> str:
        """``ok``, by how much the target is missed, or nothing where there is no target."""
        if self.target is None or self.value is None:
            return self.why
        return f"{self.value / self.target - 1:+.0%}" if self.short else "ok"


@dataclass
class Report:
    """What a benchmark found."""

    name: str
    claim: str
    configuration: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    medians: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=lambda: environment())

    def finish(self, args: argparse.Namespace) -> int:
        """Print the table and write the JSON. Returns the exit status."""
        print(f"\n{self.claim}\n{table(self.rows)}")
        for note in self.notes:
            print(note)
        self.write(args)
        shown = any(row.value is not None for row in self.rows)
        missed = not shown or any(row.short and row.strict for row in self.rows)
        return 1 if args.strict and missed else 0

    def write(self, args: argparse.Namespace) -> None:
        """Write the JSON."""
        self.environment["load_after"] = load()
        content = {**asdict(self), "quick": args.quick}
        for row, written in zip(self.rows, content["rows"], strict=True):
            written["verdict"] = row.verdict
        path = results_path(args, self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(rounded(content), indent=1) + "\n")
        part.rename(path)


def results_path(args: argparse.Namespace, name: str) -> Path:
    """Where the JSON of a benchmark lies."""
    folder: Path = args.results or (QUICK if args.quick else RESULTS)
    return folder / f"{name}.json"


def arguments(doc: str, add: Callable[[argparse.ArgumentParser], None] = lambda cli: None) -> argparse.Namespace:
    """The command line of a benchmark, with ``--quick``, ``--strict`` and ``--results`` everywhere."""
    cli = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    cli.add_argument("--quick", action="store_true", help="fewer rounds and peers: a minute or so")
    cli.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed, or nothing was measured")
    cli.add_argument("--results", type=Path, help="folder of the JSON, instead of the usual one")
    add(cli)
    return cli.parse_args()


def peers_option(cli: argparse.ArgumentParser) -> None:
    """Which peers take part."""
    cli.add_argument(
        "--peers", nargs="+", metavar="NAME", help="instead of the usual ones; one that is not there is skipped"
    )


def ratio(
    case: str, measure: str, over: Sequence[float], under: Sequence[float], target: float | None = None, **more: Any
) -> Row:
    """The median over rounds of ``over[i] / under[i]``, with a bootstrap interval of that median."""
    return middle(case, measure, [a / b for a, b in zip(over, under, strict=True)], target, **more)


def middle(case: str, measure: str, values: Sequence[float], target: float | None = None, **more: Any) -> Row:
    """The median of some values, with a bootstrap interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, high = medians[RESAMPLES // 40], medians[-RESAMPLES // 40]
    return Row(case, measure, statistics.median(values), low, high, target, **more)


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one a line."""
    head = ("case", "measure", "value", "95 % interval", "target", "")
    cells = [head, *(cells_of(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    cells.insert(1, tuple("-" * width for width in widths))
    left = (0, 1)
    return "\n".join(
        "  ".join(
            text.ljust(w) if i in left else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def cells_of(row: Row) -> tuple[str, ...]:
    """A row's texts, in the columns of a table."""
    interval = "" if row.low is None or row.high is None else f"{row.low:.3f} .. {row.high:.3f}"
    target = "" if row.target is None else f"<= {row.target:g}"
    value = "-" if row.value is None else f"{row.value:.3f}"
    return row.case, row.measure, value, interval, target, row.verdict


def environment() -> dict[str, Any]:
    """What the numbers depend on: versions, commit, machine. No name of a host, a user or a path."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--", ".")),
        "fshard": fshard.__version__,
        "torch": torch.__version__,
        "optree": metadata.version("optree"),
        "python": platform.python_version(),
        "device": "cpu",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": load(),
    }


def load() -> list[float]:
    """The load average over 1 and 5 minutes: what else the machine was doing, this benchmark included."""
    return [round(value, 1) for value in os.getloadavg()[:2]]


def run_workers(
    ranks: int,
    rate: str | None,
    options: Mapping[str, Any],
    script: str = "worker.py",
    timeout: float = 900,
    together: int = 1,
    delay: float = 0.0,
) -> Any:
    """Run a script on every rank, and return what rank 0 has written.

    Args:
        ranks: how many processes.
        rate: of the lab's links; None for loopback.
        options: its command line, ``{"rounds": 5}`` for ``--rounds 5``; lists become several words.
        script: in this folder; it gets ``--out FILE``, too.
        timeout: seconds until the workers are given up.
        together: ranks on one host of the lab.
        delay: seconds for which links of the lab hold each packet.
    """
    lab.unwind_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / script), "--out", str(out)]
        for name, value in options.items():
            words = value if isinstance(value, list | tuple) else [value]
            command += [f"--{name}", *map(str, words)]
        if rate is None:
            around = {**QUIET, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
            status = lab.run_ranks([command] * ranks, around, timeout)
        else:
            with lab.Lab(ranks, rate, together, delay) as links:
                commands = [links.command(rank, command) for rank in range(ranks)]
                status = lab.run_ranks(commands, {**QUIET, **links.environment()}, timeout)
        if status:
            raise SystemExit(f"{script} failed on {ranks} ranks with status {status}")
        return json.loads(out.read_text())


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rounded(value: Any) -> Any:
    """The same, with five digits a number: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list | tuple) else value


def _git(*words: str) -> str:
    around = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(
        ["git", "-C", str(Path(fshard.__file__).parent), *words], capture_output=True, text=True, env=around
    )
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
