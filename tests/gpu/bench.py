"""``benchmarks/gpu.py``, within the time of a stage."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.place import Found, Place

ROOT = Path(__file__).resolve().parents[2]


def run(place: Place, found: Found) -> None:
    """Measure, and keep the benchmark's own record, as far as it came."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--results", folder]
        if place.dry:
            command += [
                "--cpu-dry-run",
                "--rounds",
                "1",
                "--cases",
                *place.of((), ("1 fsdp2", "8 fsdp2"), ("1 eager",)),
            ]
            found.leave("figures: a tiny model on the CPU, and few of the peers")
        else:
            command += ["--rounds", "8", "--seconds", "330"]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            _keep(found, Path(folder))
        status = child.wait()
        record = _keep(found, Path(folder))
    found.check(status == 0, f"benchmarks/gpu.py ended with status {status}")
    rows = record.get("rows", ())
    found.check(any(row["value"] is not None for row in rows), "benchmarks/gpu.py has measured nothing")
    for note in (*record.get("notes", ()), *(f"{row['case']}: {row['why']}" for row in rows if row["why"])):
        found.leave(note)


def _keep(found: Found, folder: Path) -> dict[str, Any]:
    files = [*folder.glob("*.json")]
    record = json.loads(files[0].read_text()) if files else {}
    if record and record != found.numbers.get("benchmark"):
        found.number("benchmark", record)
    return record
