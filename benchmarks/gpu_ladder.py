"""One peer of ``gpu.py``, alone in a process: steps with a wait after each and as in training, and its kernels by kind.

It prints one line of JSON. ``python -m tests.gpu --plan`` runs it for ten peers, and for four at 16,384 tokens.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gpu_peers
import torch
import torch.distributed as dist
from common import arguments
from gpu_worker import DRY, DTYPES, LARGE, STEADY, Worker, flops, form, join, peak_rate

WARM, ROUNDS = 4, 5
"""Steps before the first that counts: a captured step is replayed from the fourth on; and rounds."""


def middle(take: Callable[[], float]) -> list[float]:
    """The median, the least and the most of some milliseconds."""
    found = sorted(1e3 * take() for _ in range(ROUNDS))
    return [statistics.median(found), found[0], found[-1]]


def measure(name: str, batch: int | None, dtype: str) -> dict[str, Any]:
    """What a peer takes. Times are the median, the least and the most of five, in milliseconds."""
    size = DRY if not torch.cuda.is_available() else LARGE
    size = size if batch is None else replace(size, batch=batch)
    begun = time.perf_counter()
    worker, last = Worker(name, size, dtype, join(1)), {}
    for number in range(WARM):
        last = worker.answer("step", number)
    found: dict[str, Any] = {"peer": name, "tokens": size.batch * size.tokens, "dtype": dtype, "loss": last["loss"]}
    found["seconds until warm"] = time.perf_counter() - begun
    found["ms a step"] = middle(lambda: worker.answer("step", 0)["wall"])
    found[f"ms a step of {STEADY}"] = many = middle(lambda: worker.answer("steady", 0)["wall"])
    if rate := peak_rate(dtype):
        found["MFU"] = flops(size) / (many[0] / 1e3 * rate)
    last = worker.answer("step", 1)
    found |= {key: last[key] for key in ("peak", "resident", "ran") if key in last}
    if "ran" not in last:  # a step under the profiler is not replayed
        seen = worker.answer("profile", 0)
        found |= {"busy ms": 1e3 * (seen["span"] - seen["idle"]), "kernels": seen["kernels"]}
        found["ms by kind"] = seen["ms by kind"]
    dist.destroy_process_group()
    return found


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    cli.add_argument("peer", help=f"one of: {', '.join(gpu_peers.PEERS)}")
    cli.add_argument("--rows", type=int, help="of 1,024 tokens in a step, instead of 4")
    cli.add_argument("--dtype", choices=DTYPES, default="bf16", help="as for gpu.py")


def main() -> int:
    """Measure, or say why not."""
    args = arguments(__doc__, options)
    warnings.simplefilter("ignore")
    if why := gpu_peers.obstacle(form(args.peer, args.dtype)):
        print(json.dumps({"peer": args.peer, "why": why}), flush=True)
        return 0
    print(json.dumps(measure(args.peer, args.rows, args.dtype)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
