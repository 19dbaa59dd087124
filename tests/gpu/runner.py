"""Runs stages in processes of their own, and keeps one result file."""

import contextlib
import datetime
import hashlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fshard
from tests.gpu.place import plain
from tests.gpu.stage import WRONG
from tests.gpu.stages import UNTESTED, Stage

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("optree", "pytest", "pytest_timeout", "hypothesis")
LINES = 25
"""Last lines of a stage's output that the result file keeps where something is wrong."""


def missing() -> list[str]:
    """The packages that stages need and this Python does not have."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


@dataclass
class Record:
    """The result file.

    Attributes:
        path: of the file.
        content: what is in it.
    """

    path: Path
    content: dict[str, Any]

    @staticmethod
    def open(path: Path, dry: bool) -> "Record":
        """A new record; results that are there stay if they are of the same sources and device."""
        around, stages = environment(dry), {}
        if path.exists():
            before = json.loads(path.read_text())
            same = all(before["environment"].get(name) == around[name] for name in ("sources", "torch", "device"))
            stages = before["stages"] if same else {}
        return Record(path, {"environment": around, "dry": dry, "stages": stages, "untested": list(UNTESTED)})

    def has(self, name: str) -> bool:
        """Whether a stage has passed, or has nothing to do here."""
        return self.content["stages"].get(name, {}).get("status") in ("passed", "needs hardware")

    def good(self, stages: Sequence[Stage]) -> bool:
        """Whether all of these have."""
        return all(self.has(stage.name) for stage in stages)

    def keep(self, name: str, result: dict[str, Any]) -> None:
        """Note the result of a stage, and write the file."""
        self.content["stages"][name] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(plain(self.content), indent=1) + "\n")
        part.rename(self.path)


def run_stages(record: Record, stages: Sequence[Stage], seconds: float, short: bool = False) -> float:
    """Run stages until they or the time are over, and print a line for each. Returns the seconds that it took."""
    began = time.monotonic()
    deadline, dry = began + seconds, bool(record.content["dry"])
    around = record.content["environment"]
    print(f"{'Dry run on CPU' if dry else around['device']}, PyTorch {around['torch']}, {len(stages)} stages")
    for stage in stages:
        left = deadline - time.monotonic()
        limit = min(stage.dry if dry else stage.seconds, left)
        if limit < 1:
            result: dict[str, Any] = {"what": stage.what, "status": "not reached", "seconds": 0.0}
        else:
            result = run_stage(stage, limit, dry, short)
        record.keep(stage.name, result)
        print(line_of(stage, result), flush=True)
    return time.monotonic() - began


def run_stage(stage: Stage, limit: float, dry: bool, short: bool) -> dict[str, Any]:
    """Run one stage in its process, and end all of its processes when it is over, or late."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "found.json", Path(folder) / "log"
        command = [sys.executable, "-u", "-m", "tests.gpu.stage", stage.name, "--out", str(out)]
        command += ["--dry"] * dry + ["--short"] * short
        began = time.monotonic()
        with log.open("w") as lines:
            child = subprocess.Popen(
                command, stdout=lines, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True, env=around_of(folder)
            )
            try:
                code: int | None = child.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        found = json.loads(out.read_text()) if out.exists() else {}
        said = log.read_text(errors="replace").splitlines()
    result = {"what": stage.what, "status": status_of(code, found), "seconds": time.monotonic() - began, **found}
    if result["status"] in ("failed", "timed out"):
        result |= {"exit": code, "output": said[-LINES:]}
    return result


def status_of(code: int | None, found: dict[str, Any]) -> str:
    """What came of a stage."""
    if code is None:
        return "timed out"
    if code or found.get("problems"):
        return "failed"
    return "passed" if found.get("done") else "needs hardware"


def around_of(folder: str) -> dict[str, str]:
    """The environment of a stage: no job around it, and caches of compilers that end with it."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "OMP_NUM_THREADS": "1"}


def line_of(stage: Stage, result: dict[str, Any]) -> str:
    """A stage's result as text: the status, what is wrong, what was left out."""
    lines = [f"{stage.name:{max(16, len(stage.name))}} {result['status']:15} {result['seconds']:6.1f} s  {stage.what}"]
    lines += [f"    wrong: {problem}" for problem in result.get("problems", ())]
    if result["status"] == "failed" and result.get("exit") != WRONG or result["status"] == "timed out":
        lines += [f"    | {line}" for line in result.get("output", ())[-8:]]
    lines += [f"    not done: {what}" for what in result.get("left_out", ())]
    return "\n".join(lines)


def environment(dry: bool) -> dict[str, Any]:
    """What results depend on. No name of a host, a user or a path."""
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--", "fshard", "tests", "benchmarks/*.py")),
        "sources": sources(),
        "fshard": fshard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "device": "cpu",
    }
    if not dry:
        nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        properties = torch.cuda.get_device_properties(0)
        more = {"device": properties.name, "gpu memory": properties.total_memory, "cuda": torch.version.cuda}
        found["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found |= {**more, "cudnn": torch.backends.cudnn.version(), "nccl": ".".join(map(str, nccl))}
    return found


def sources() -> str:
    """What tells these sources from others, also where there is no git."""
    digest = hashlib.sha256()
    for folder in ("fshard", "tests/gpu", "tests/device", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _git(*words: str) -> str:
    return _said("git", "-C", str(ROOT), *words)


def _said(*command: str) -> str:
    """What a program prints; nothing where it is not on this machine."""
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
