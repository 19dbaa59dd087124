"""The tests that are marked gpu."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.gpu.place import Found, Place

ROOT = Path(__file__).resolve().parents[2]
MARK = "pytest.mark." + "gpu"


def run(place: Place, found: Found) -> None:
    """Run them; on a CPU only look for them. Files without the mark are not collected, which takes long."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default", *files]
    if place.dry:
        command += ["--collect-only"]
        found.leave("these tests: each needs a GPU")
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    print(done.stdout[-4000:], done.stderr[-2000:])
    last = (done.stdout.strip().splitlines() or [""])[-1]
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+)(?:/\d+)? (passed|failed|skipped|error|tests)", last)
    }
    found.number("tests", counts)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.M)
    for name in failed[:20]:
        found.check(False, name)
    if place.dry:
        if done.returncode:
            found.check(False, f"tests cannot be collected: {last}")
        return
    found.check(done.returncode == 0 and counts.get("passed", 0) > 0, f"pytest says: {last}")
