"""Twenty seeded faults, each one line of the library, and the default tests that catch it.

``python -m tests.project.mutations`` puts each fault into a copy of the tree and runs its tests there, which must fail.
Numbers choose some: ``python -m tests.project.mutations 3 7``.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT = 600.0


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        file: below ``fshard``.
        right: a part of a line that occurs once in it.
        wrong: what takes its place.
        tests: below ``tests``, with options: what catches it.
    """

    file: str
    right: str
    wrong: str
    tests: str

    def apply(self, root: Path) -> None:
        """Put the fault into a tree.

        Raises:
            LookupError: the part occurs never, or several times: the source has changed, so this list must.
        """
        path = root / "fshard" / self.file
        text = path.read_text()
        if text.count(self.right) != 1:
            raise LookupError(f"fshard/{self.file} has {text.count(self.right)} times: {self.right}")
        path.write_text(text.replace(self.right, self.wrong))


MUTATIONS = [
    # WHERE
    Mutation("sharding/mesh.py", "index * shape[axis] + at[axis]", "index + shape[axis] * at[axis]", "sharding"),
    Mutation("sharding/layout.py", "low + self.chunk)\n", "low + self.chunk - 1)\n", "sharding"),
    # WHEN
    Mutation("schedule/build.py", "min(k + self.policy.prefetch,", "min(k + self.policy.prefetch + 1,", "schedule"),
    Mutation("schedule/offsets.py", "steps[last + 1] -= size", "steps[last] -= size", "schedule/test_memory.py"),
    Mutation("schedule/offsets.py", "if entry[0] >= first]", "if entry[0] > first]", "schedule/test_memory.py"),
    Mutation(
        "schedule/clock.py",
        "start = self.larger(self.meet(ready, transfer.axes), free)",
        "start = self.meet(ready, transfer.axes)",
        "schedule/test_simulate.py",
    ),
    Mutation("schedule/costs.py", "median(times) for op, times", "max(times) for op, times", "schedule/test_costs.py"),
    # HOW
    Mutation(
        "runtime/memory/gradients.py",
        "group.owned.gather_axes + group.leaves[0].compute.axes",
        "group.owned.gather_axes",
        "parallel/test_parallel.py",
    ),
    Mutation(
        "runtime/steps/decide.py",
        "verdict.scale * verdict.count / (verdict.count + count)",
        "verdict.scale",
        "training/test_update_schedules.py",
    ),
    Mutation("runtime/steps/clip.py", "limit / (norm + 1e-6)", "limit / (norm + 1e-2)", "training/test_parity.py"),
    Mutation(
        "runtime/graphs/graph_proof.py",
        "get(title), got.get(title)",
        "get(title), want.get(title)",
        "graphs/test_compare.py",
    ),
    Mutation(
        "training/buffer_sync.py",
        "apply(row, LinearSum(ranks)) / ranks.size",
        "apply(row, LinearSum(ranks))",
        "training/test_buffers_synced.py",
    ),
    # models, optimizers, states
    Mutation("model/philox.py", "(k0 + _WEYL[0]) & _MASK", "(k0 + _WEYL[1]) & _MASK", "model/test_philox.py"),
    Mutation("optim/schedules.py", "0.5 - 0.5 * math.cos", "0.5 + 0.5 * math.cos", "optim/test_schedules.py"),
    Mutation("optim/base.py", "states, step - late, lr", "states, step, lr", "training/test_late_leaves.py"),
    Mutation("state/move.py", "row[: piece.numel]", "row[-piece.numel :]", "state"),
    Mutation("checkpoint/ranges.py", "-(-start // inner), stop", "start // inner, stop", "checkpoint/test_format.py"),
    # derivatives, collectives, parallel layers
    Mutation(
        "transform/gauss_newton.py",
        "apply(count, LinearSum(data)) if data.size > 1 else count",
        "count",
        "transform/test_tools.py",
    ),
    Mutation("collectives/raw.py", "rows().amax(0)", "rows().amin(0)", "played/test_shard_map.py"),
    Mutation(
        "parallel/zigzag.py", "at in (i, 2 * parts - 1 - i)", "at in (i, parts + i)", "parallel/test_functions.py"
    ),
    Mutation(
        "parallel/vocab.py",
        "torch.where(here, picked - top,",
        "torch.where(here, picked,",
        "parallel/test_functions.py",
    ),
]


def caught(mutation: Mutation) -> str:
    """The test that fails first with this fault; empty if all pass."""
    with tempfile.TemporaryDirectory(prefix="fshard-mutation-") as folder:
        root = Path(folder)
        for part in ("fshard", "tests"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        mutation.apply(root)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{mutation.tests}"]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0] if done.returncode == 1 and lines else ""


def main() -> int:
    """Print what catches each fault; 1 if any is not caught."""
    chosen = [int(word) for word in sys.argv[1:]] or range(len(MUTATIONS))
    missed = 0
    for number in chosen:
        mutation = MUTATIONS[number]
        found = caught(mutation)
        missed += not found
        print(f"{number:2} fshard/{mutation.file}: {mutation.wrong.strip()}: {found or 'NOT CAUGHT'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
