"""``python -m tests.fuzz [--of runs|steps] [--cases N] [--seed S] [--minutes M] [--case K] [--real SHARE]``."""

import argparse
import collections
import itertools
import sys
import time
import warnings
from typing import Any

import torch

from tests.fuzz import draw, run, step_draw, step_run
from tests.shared.workers import Pools

KINDS: dict[str, tuple[Any, Any]] = {
    "runs": (draw.draw, run.check), "steps": (step_draw.draw, step_run.check)
}  # fmt: skip
"""What draws cases, and what runs them."""


def main() -> int:
    """Run cases, print those that fail as commands that run them again; 1 if any does."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Generated runs against one plain process."
    )
    parser.add_argument("--of", choices=[*KINDS], default=None, help="by default both, one step for each run")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long, whatever --cases says")
    parser.add_argument("--case", type=int, default=None, help="run this one alone, and print it")
    parser.add_argument("--real", type=float, default=0.05, help="the share of cases on real processes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pools, began = Pools(), time.monotonic()
    kinds = [*KINDS] if args.of is None and args.case is None else [args.of or "runs"]
    numbers = range(args.cases) if args.case is None else [args.case]
    counts: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    try:
        for number, kind in itertools.product(numbers, kinds):
            if args.minutes is not None and time.monotonic() - began > 60 * args.minutes:
                break
            drawn, check = KINDS[kind]
            case = drawn(args.seed, number, args.real)
            verdict = check(case, pools)
            counts[verdict.kind] += 1
            refusals[verdict.why[:100]] += verdict.kind == "refused"
            if verdict.kind == "wrong" or args.case is not None:
                again = f"python -m tests.fuzz --of {kind} --seed {args.seed} --case {number} --real {args.real}"
                print(f"\r{verdict.kind}: {again}\n  {verdict.why[:1500]}\n  {case}", flush=True)
            if args.case is not None:
                print(verdict.trace)
            if sum(counts.values()) % 10 == 0:
                print(f"\r{_line(counts, began)}", end="", flush=True)
    finally:
        pools.close()
    print(f"\r{_line(counts, began)}; seed {args.seed}")
    for why, count in refusals.most_common(5) if counts["refused"] else ():
        print(f"  {count} refused: {why}")
    many = counts["refused"] > max(3, sum(counts.values()) / 3)
    if many:
        print("more than a third were refused: draw better ones")
    return int(bool(counts["wrong"]) or many)


def _line(counts: collections.Counter[str], began: float) -> str:
    said = ", ".join(f"{counts[kind]} {kind}" for kind in ("right", "refused", "wrong"))
    return f"{sum(counts.values())} cases: {said}; {time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
