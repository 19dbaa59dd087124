"""One stage of ``make gpu`` in its process: ``python -m tests.gpu.stage NAME --out FILE [--dry] [--short]``."""

import argparse
import importlib
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

import torch

from tests.gpu.place import Found, Place

WRONG = 3
"""The exit status of a stage that has found something wrong."""

TIMED = ("bench", "ladder", "micro")
"""Modules whose products have the workspace that users have, not the one for equal bits on several streams."""


def main() -> int:
    """Run the stage. What it finds goes to the file, what it says to the standard output."""
    cli = argparse.ArgumentParser(prog="python -m tests.gpu.stage", description=__doc__)
    cli.add_argument("name")
    cli.add_argument("--out", type=Path, required=True)
    cli.add_argument("--dry", action="store_true")
    cli.add_argument("--short", action="store_true")
    args = cli.parse_args()
    module, _, rest = args.name.partition(".")
    if module not in TIMED:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device("cpu") if args.dry else torch.device("cuda", torch.cuda.current_device())
    found = Found(args.out)
    importlib.import_module(f"tests.gpu.{module}").run(Place(device, args.short), found, *filter(None, [rest]))
    return WRONG if found.problems else 0


def end(status: int) -> NoReturn:
    """End the process without the destructors of libraries, some of which wait for a device."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    end(status)
