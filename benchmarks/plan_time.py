"""Plan time: how long a plan and a schedule take on the host, for 1,000 units of 8 leaves on a mesh of 1,024 ranks.

The claim: under 2 seconds, and linear in the number of units. And ``import fshard`` adds less than 0.3 seconds to
``import torch``. ``fshard plan`` for a Llama of 70B parameters on 1,024 ranks takes under 15 seconds and 1 GiB, imports
of PyTorch and transformers included; with ``--search``, on all shapes of so many ranks, with recomputation and without.

What is counted is CPU time: nothing here waits, so on an idle machine it is the time that passes.
"""

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from common import Report, arguments, middle, ratio

import fshard as fs
from fshard.schedule.build import build
from fshard.schedule.check import check
from fshard.schedule.infos import group_infos
from fshard.schedule.ops import Call, Program

RANKS, LEAVES, WIDTH = 1024, 8, 64
LINEAR = 2.4
"""Twice the units may take so many times as long: 2, and some noise. Quadratic would be 4."""

IMPORT = """
import time
import torch
begin = time.process_time()
import fshard
print(time.process_time() - begin)
"""


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
"""The configuration of a Llama of 70B parameters."""

COMMANDS = {"fshard plan, 70B on 1,024 ranks": ("--remat", "all"), "the same, with --search": ("--search",)}
"""What is timed of ``fshard plan``, and its flags."""


def tree(units: int) -> dict[str, Any]:
    """A nested dict of meta tensors: a chain of linear maps."""
    with torch.device("meta"):
        return {"layers": {str(i): {f"w{j}": torch.empty(WIDTH, WIDTH) for j in range(LEAVES)} for i in range(units)}}


def plan_and_schedule(params: dict[str, Any], units: int) -> dict[str, float]:
    """Seconds of each part: the plan; the schedule, with its check, memory and hash."""
    begin = time.process_time()
    mesh = fs.abstract_mesh((RANKS,), ("shard",), rank=0)
    plan = fs.make_plan(params, mesh, [(r".*", fs.fsdp("shard"))], units=("layers.*",))
    planned = time.process_time()
    calls = tuple(Call(f"layers.{i}") for i in range(units))
    program = Program(calls, calls[::-1], {call.unit: (i,) for i, call in enumerate(calls)})
    schedule = build(program, group_infos(plan), fs.Policy())
    check(schedule)
    assert schedule.memory.arena_bytes and schedule.hash
    scheduled = time.process_time()
    return {"plan": planned - begin, "schedule": scheduled - planned, "both": scheduled - begin}


def importing(bytecode: str) -> float:
    """Seconds of ``import fshard`` after ``import torch``, in a fresh process that keeps its bytecode in a folder.

    Python may have been told not to write any (``PYTHONDONTWRITEBYTECODE``); an installed package has it.
    """
    env = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", IMPORT]
    return float(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)


def command(config: str, flags: Sequence[str]) -> tuple[float, float]:
    """CPU seconds of ``fshard plan``, and the most memory that it took in MiB, in a process of its own."""
    flags = ["--mesh", "128x8", "--link", "ib400", "--inside", "nvlink4", "--json", *flags]
    started = [sys.executable, "-m", "fshard", "plan", "--hf", config, *flags]
    with subprocess.Popen(started, stdout=subprocess.DEVNULL) as child:
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode in (0, 1), child.returncode  # 1: nothing fits
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def commands(report: Report, rounds: int) -> None:
    """Time the commands, in turns."""
    if importlib.util.find_spec("transformers") is None:
        report.notes.append("`fshard plan --hf` was not timed: transformers is not installed.")
        return
    used: dict[str, list[tuple[float, float]]] = {case: [] for case in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        config = os.path.join(folder, "config.json")
        with open(config, "w") as file:
            json.dump(LLAMA, file)
        for _ in range(rounds):
            for case, flags in COMMANDS.items():
                used[case].append(command(config, flags))
    for case, found in used.items():
        report.rows.append(middle(case, "s", [seconds for seconds, _ in found], 15.0, strict=False))
        report.rows.append(middle(f"{case}: memory", "MiB", [most for _, most in found], 1024.0))


def measure(args: argparse.Namespace) -> int:
    """Time, report."""
    rounds = 3 if args.quick else 7
    counts = (500, 1000, 2000)
    configuration = {"ranks": RANKS, "units": counts, "leaves a unit": LEAVES, "width": WIDTH, "rounds": rounds}
    report = Report("plan_time", __doc__.splitlines()[0], configuration)
    trees = {units: tree(units) for units in counts}
    plan_and_schedule(trees[counts[0]], counts[0])
    # A full collection goes over all that PyTorch has loaded, a tenth of a second, and falls into one size or another.
    gc.collect()
    gc.freeze()
    times: dict[int, list[dict[str, float]]] = {units: [] for units in counts}
    for _ in range(rounds):
        for units in counts:
            times[units].append(plan_and_schedule(trees[units], units))
    for part in ("plan", "schedule", "both"):
        seconds = [run[part] for run in times[1000]]
        target = 2.0 if part == "both" else None
        report.rows.append(middle(f"{part}, 1000 units", "s", seconds, target, strict=False))
    for less, more in pairwise(counts):
        pair = ([run["both"] for run in times[units]] for units in (more, less))
        report.rows.append(ratio(f"{more} / {less} units", "cpu", *pair, LINEAR))
    with tempfile.TemporaryDirectory() as bytecode:
        importing(bytecode)  # the first compiles
        imports = [importing(bytecode) for _ in range(rounds)]
    report.rows.append(middle("import fshard after torch", "s", imports, 0.3, strict=False))
    commands(report, 1 if args.quick else 3)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__)))
