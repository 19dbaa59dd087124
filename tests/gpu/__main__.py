"""``python -m tests.gpu``: what there is to know of one GPU, in 25 minutes. ``make gpu`` runs it.

Each stage has a process and a limit of its own, so one that crashes or hangs ends alone. After each the result file is
written again. Without a GPU all of it is a dry run: each stage does what it can on the CPU, and says what it left out.
"""

import argparse
import sys
from pathlib import Path

import torch

from tests.gpu.plan import run_plan
from tests.gpu.runner import Record, missing, run_stages
from tests.gpu.stages import PLAN, STAGES, TOTAL, UNTESTED

ROOT = Path(__file__).resolve().parents[2]
RESULT, DRY = ROOT / "benchmarks" / "results" / "gpu_stages.json", ROOT / "build" / "gpu_dry_run.json"
PLANNED = "the five commands of the first 25 minutes of a card, or those with these numbers"
HOURS = 2 * 3600.0
"""Seconds for the plan where it runs dry: compilers are slow there."""


def main() -> int:
    """Run the stages. 1 if one of them failed, timed out, or was not reached."""
    names = [stage.name for stage in STAGES]
    cli = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    cli.add_argument("--dry", action="store_true", help="a dry run, also where there is a GPU")
    cli.add_argument("--short", action="store_true", help="the short form of a dry run")
    cli.add_argument("--stages", nargs="+", choices=names, default=names, help="only these; others keep their results")
    cli.add_argument("--plan", nargs="*", type=int, choices=range(1, len(PLAN) + 1), metavar="N", help=PLANNED)
    cli.add_argument("--rest", action="store_true", help="only those that have not passed with these sources")
    cli.add_argument("--minutes", type=float, default=TOTAL / 60, help="for all stages together")
    cli.add_argument("--results", type=Path, help=f"the result file, instead of {RESULT.relative_to(ROOT)}")
    args = cli.parse_args()
    dry = args.dry or args.short or not torch.cuda.is_available()
    if lacks := missing():
        print(f"cannot begin: no {', '.join(lacks)} in this Python, {sys.executable}")
        return 2
    default = DRY if dry else RESULT
    if args.plan is not None:
        record = Record.open(args.results or default.with_name(default.name.replace("gpu_", "gpu_plan_")), dry)
        stages = run_plan(record, args.plan, HOURS if dry else 60 * args.minutes, args.rest, args.short)
        print(f"written to {record.path}")
        return 0 if record.good(stages) else 1
    record = Record.open(args.results or default, dry)
    stages = [stage for stage in STAGES if stage.name in args.stages and not (args.rest and record.has(stage.name))]
    run_stages(record, stages, 60 * args.minutes, args.short)
    print(f"\nWhat one GPU leaves untested:\n{''.join(f'  * {line}' + chr(10) for line in UNTESTED)}")
    print(f"written to {record.path}")
    return 0 if record.good(stages) else 1


if __name__ == "__main__":
    sys.exit(main())
