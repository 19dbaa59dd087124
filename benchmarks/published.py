"""Published runs: foresight's tokens a second for runs of pure FSDP by MosaicML and torchtitan, beside those measured.

No network, no GPU: the published numbers are in ``published_runs.py``. One assumption for each kind of GPU is fitted,
by one run: the share of the peak that matrix products reach. All else are defaults of ``fs.sim.hardware``, so all
other rows are predictions. Two orders of transfers are foreseen:

* fshard's own: gathers and reductions beside compute, in the forward and in the backward;
* Composer's: its FSDP has one communicator and ``BACKWARD_POST``, which issues the gather of a layer behind the
  reduction of the one before. Both wait for compute, and compute for both, so in the backward nothing overlaps.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import Report, Row, arguments
from plan_time import LLAMA
from published_runs import GPUS, LENGTH, MOSAIC_RUNS, MPT, SIZES, TITAN_RUNS, Run

import fshard as fs
from fshard.cli.plan_command import seldom_collected
from fshard.foresight.foresee import on_plan, sizes, state_bytes, task_of
from fshard.foresight.hardware import Hardware
from fshard.foresight.huggingface import hugging_face
from fshard.foresight.jobs import Job
from fshard.model.meta import empty_weights
from fshard.schedule.auto import timed, weighed
from fshard.schedule.candidates import PolicyTask
from fshard.schedule.simulate import Simulation
from fshard.sharding.plan import Plan

RANKS = 1024
OWN, COMPOSER = "fshard", "composer"
"""Orders of transfers."""

HEAD = ("GPU", "model", "ranks", "microbatch", "measured", "MFU", "foreseen", "MFU", "foreseen / measured")
MORE = ("fshard's order", f"{RANKS:,} ranks", f"{RANKS:,}, fshard's order")

LLAMAS = {
    "llama 8B": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32},
    "llama 70B": LLAMA,
}
LLAMA_LENGTH = 8192
UNKNOWN = [Run("H100 80GB", "llama 70B", RANKS, 1, 1, True)]
"""Nothing published is compared with this one."""


def job(run: Run) -> Job:
    """The step of a run, on the meta device: float32 parameters and state, gathers and sums in bfloat16."""
    remat = "all" if run.remat else None
    if run.model in LLAMAS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(LLAMAS[run.model]))
            return hugging_face(str(path), run.rows, LLAMA_LENGTH, remat=remat, accumulate=run.accumulate)
    size = SIZES[run.model]
    with empty_weights():
        module = MPT(size)
    count = sum(p.numel() for p in module.parameters())
    assert count == size.parameters, f"{run.model} has {count:,} parameters, and {size.parameters:,} are published"
    model = fs.split(module, units=("blocks.*",))
    batch = torch.zeros(run.rows * run.accumulate, LENGTH, dtype=torch.int64, device="meta")
    short = fs.Precision(torch.bfloat16, torch.bfloat16)
    return Job(model, model.apply, batch, precision=short, remat=remat, accumulate=run.accumulate)


class Foreseen:
    """The step of a run on any number of ranks; its program is traced once."""

    def __init__(self, run: Run) -> None:
        self.job = job(run)
        self.task: PolicyTask | None = None

    def on(self, ranks: int) -> tuple[PolicyTask, Plan, int]:
        """What is run, where the leaves are, and bytes of state of a rank."""
        plan = self.job.plan(fs.abstract_mesh((ranks,), ("data",)))
        step, batch = self.job.step_of(plan)
        if self.task is None:
            self.task = task_of(step, step.trace(batch), plan)
        return on_plan(self.task, plan, step), plan, state_bytes(step, plan)

    @property
    def tokens(self) -> int:
        """Of a rank's batch."""
        return sizes(self.job.batch)[1]


@cache
def foreseen(program: Run) -> Foreseen:
    """That of all runs which differ in nothing else than what ``program`` leaves out."""
    return Foreseen(program)


def program(run: Run) -> Foreseen:
    """The step of a run; runs that differ in their ranks and GPUs share it."""
    return foreseen(replace(run, gpu="", ranks=0, rate=0, mfu=0.0))


def machine(gpu: str, products: float) -> Hardware:
    """What a run was on."""
    known = GPUS[gpu]
    found = fs.sim.hardware(known.device, known.link, known.inside, products=products)
    if not known.bytes_per_s:
        return found
    part = known.bytes_per_s / fs.sim.DEVICES[known.device].bytes_per_s
    return replace(found, speed=replace(found.speed, bytes_per_s=found.speed.bytes_per_s * part))


def gathers(run: Simulation, compute: str) -> float:
    """Seconds in which forwards, or backwards, wait for gathers."""
    total = waited = 0.0
    for op, begin, end in zip(run.schedule, run.issued, run.ends, strict=True):
        if op.kind == "wait all_gather":
            waited += end - begin
        elif op.kind in ("forward", "backward"):
            total += waited if op.kind == compute else 0.0
            waited = 0.0
    return total


def seconds(run: Run, ranks: int, products: float, order: str) -> float:
    """Of a step."""
    task, plan, _ = program(run).on(ranks)
    costs = machine(run.gpu, products).of(task, plan)
    if order == OWN:
        return timed(task, fs.Policy(), costs).seconds
    alone = timed(task, fs.Policy(prefetch=0, reduces=0), costs)
    ahead = timed(task, fs.Policy(prefetch=1, reduces=1), costs)
    return alone.seconds - gathers(alone, "forward") + gathers(ahead, "forward")


def rate(run: Run, ranks: int, products: float, order: str) -> float:
    """Tokens a second of one GPU."""
    return program(run).tokens / seconds(run, ranks, products, order)


def fitted(runs: Sequence[Run], gpu: str, order: str) -> float:
    """The share of the peak with which the named run of a kind of GPU is foreseen as measured."""
    run = next(run for run in runs if run.gpu == gpu and (run.model, run.ranks) == GPUS[gpu].fitted)
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(run, run.ranks, middle, order) < run.rate else (low, middle)
    return high


def usual(run: Run) -> str:
    """The order that the runs on a kind of GPU had."""
    return OWN if run.model in LLAMAS else COMPOSER


def row(run: Run, shares: dict[tuple[str, str], float]) -> dict[str, Any]:
    """All numbers of a run."""
    task, plan, state = program(run).on(run.ranks)
    order = usual(run)
    hardware = machine(run.gpu, shares[run.gpu, order])
    flops = task.flops * task.accumulate / program(run).tokens / hardware.speed.peak
    held = state + weighed(task, timed(task, fs.Policy(), hardware.of(task, plan))).memory.peak_bytes
    found = {
        f"{name} {ranks}": rate(run, ranks, shares[run.gpu, each], each)
        for name, each in (("order", order), ("own", OWN))
        for ranks in (run.ranks, RANKS)
    }
    own = GPUS[run.gpu].fitted == (run.model, run.ranks)
    mfu = run.mfu / 100 if run.mfu else flops * run.rate
    facts = {"gpu": run.gpu, "model": run.model, "ranks": run.ranks, "rows": run.rows, "accumulate": run.accumulate}
    return facts | {
        "fitted": own,
        "measured": run.rate,
        "measured MFU": mfu,
        "foreseen": found[f"order {run.ranks}"],
        "foreseen MFU": flops * found[f"order {run.ranks}"],
        "fshard's order": found[f"own {run.ranks}"],
        f"on {RANKS}": found[f"order {RANKS}"],
        f"on {RANKS}, fshard's order": found[f"own {RANKS}"],
        "peak bytes": held,
    }


def line(each: dict[str, Any]) -> str:
    """A row of the table."""
    rows = f"{each['rows']} x {each['accumulate']}" if each["accumulate"] > 1 else f"{each['rows']}"
    known = each["measured"]
    cells = [each["gpu"], each["model"], f"{each['ranks']:,}", rows]
    cells += [f"{known:,}", f"{each['measured MFU']:.1%}"] if known else ["", ""]
    cells += [f"{each['foreseen']:,.0f}", f"{each['foreseen MFU']:.1%}"]
    cells.append("fitted" if each["fitted"] else f"{each['foreseen'] / known:.2f}" if known else "")
    cells.append("" if each["fitted"] or not known else f"{each[MORE[0]] / known:.2f}")
    cells += [f"{each[f'on {RANKS}']:,.0f}", f"{each[f'on {RANKS}, ' + MORE[0]]:,.0f}"]
    return f"| {' | '.join(cells)} |"


def errors(found: Sequence[dict[str, Any]], key: str) -> list[float]:
    """How far predictions are from what was measured, without sign; the fitted runs do not count."""
    return [abs(each[key] / each["measured"] - 1) for each in found if each["measured"] and not each["fitted"]]


def measure(args: argparse.Namespace) -> int:
    """Foresee, compare, report."""
    runs = [*MOSAIC_RUNS, *TITAN_RUNS, *UNKNOWN]
    if args.quick:
        runs = [run for run in MOSAIC_RUNS if run.gpu == "A100 80GB" and run.model in ("3b", "7b")]
    report = Report("published", __doc__.splitlines()[0], {"gpus": {name: vars(gpu) for name, gpu in GPUS.items()}})
    if importlib.util.find_spec("transformers") is None:
        runs = [run for run in runs if run.model not in LLAMAS]
        report.notes += ["Runs of Llama were left out: transformers is not installed.", ""]
    orders = {(run.gpu, order): None for run in runs for order in (usual(run), OWN)}
    with seldom_collected():
        shares = {(gpu, order): fitted(runs, gpu, order) for gpu, order in orders}
        found = [row(run, shares) for run in runs]
    for gpu in dict.fromkeys(run.gpu for run in runs):
        report.rows += rows_of(gpu, [each for each in found if each["gpu"] == gpu])
    report.rows += rows_of("all", found)
    report.rows += [Row(f"{gpu}: products, {order}'s order", "share", share) for (gpu, order), share in shares.items()]
    head = [*HEAD, *MORE]
    report.notes += [f"| {' | '.join(head)} |", "|---|---|---:|---" + "|---:" * (len(head) - 4) + "|"]
    report.notes += [line(each) for each in found]
    report.medians = {"runs": found}
    return report.finish(args)


def rows_of(name: str, found: Sequence[dict[str, Any]]) -> list[Row]:
    """The median error and the worst of some runs, in both orders."""
    rows = []
    for words, key in (("the runs' order", "foreseen"), ("fshard's order", MORE[0])):
        off = errors(found, key)
        rows.append(Row(f"{name}: {len(off)} predictions, {words}: median error", "share", statistics.median(off)))
        rows.append(Row(f"{name}: {len(off)} predictions, {words}: worst error", "share", max(off)))
    return rows


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__)))
