"""JAX: the GPT of 25 MB on loopback against JAX's own FSDP, ``NamedSharding`` over as many gloo processes.

The claim: a step takes at most 0.45 of JAX's time. Same model, same AdamW, same start weights, same rows; losses are
compared before anything is timed. JAX cannot live in the process of PyTorch's ranks, so they take turns: a coordinator
says whose step it is, and the others sleep (``turns.py``). JAX's gloo does not start in the lab: loopback only.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import peers
from common import HERE, QUIET, Report, Row, arguments, free_port, ratio
from model import SMALL, Size, make, rows
from turns import Family

TORCH = ("fsdp2", "fshard", "fshard no reshard")
TARGET = 0.45
CLAIMS = (
    ("fshard", "jax", TARGET),
    ("fshard no reshard", "jax", TARGET),
    ("fsdp2", "jax", None),
    ("jax", "fsdp2", None),
)
FORMS = {
    "jax": {},
    "jax scan": {"scan": 1},
}
"""Ways to write it."""
TOLERANCE = 1e-4
CHECKED = 3
PYTORCH = {**QUIET, "OMP_NUM_THREADS": "1"}
JAX = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "true"}


def obstacle() -> str | None:
    """Why JAX cannot be a peer here, or None."""
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("jaxlib") is None:
        return "JAX is not installed: pip install 'fshard[bench-jax]'"
    return None


def write_data(path: Path, size: Size, ranks: int, numbers: int) -> None:
    """The start weights and the rows of all batches, (numbers, ranks, batch, tokens + 1), for processes without PyTorch."""
    weights = {f"w:{name}": leaf.detach().numpy() for name, leaf in make(size).state_dict().items()}
    batches = np.stack([np.stack([rows(size, n, r).numpy() for r in range(ranks)]) for n in range(numbers)])
    np.savez(path, rows=batches.astype(np.int32), **weights)


def jax_command(data: Path, size: Size, form: dict[str, Any], platform: str = "cpu") -> list[str]:
    """What starts one rank of JAX."""
    options = {"data": data, "hyper": json.dumps(peers.ADAMW), "platform": platform, **form}
    options |= {"depth": size.depth, "heads": size.heads}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(HERE / "jax_rank.py"), *words]


def torch_command(size: Size, names: list[str]) -> list[str]:
    """What starts one rank of PyTorch."""
    sizes = {name: value for name, value in asdict(size).items() if name != "vocabulary"}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(HERE / "torch_rank.py"), *words, "--peers", *names]


def around() -> dict[str, str]:
    """How the ranks of one family find each other."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}


def check(families: dict[str, Family]) -> None:
    """See that all train alike.

    Raises:
        SystemExit: they do not.
    """
    seen = {name: [family.step(name, n)["loss"] for n in range(CHECKED)] for name, family in families.items()}
    first = next(iter(seen.values()))
    for name, losses in seen.items():
        if any(abs(a - b) > TOLERANCE * abs(b) for a, b in zip(losses, first, strict=True)):
            raise SystemExit(f"the peers do not train alike: {name} {losses}, {next(iter(seen))} {first}")


def interleave(families: dict[str, Family], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Turns, as ``peers.interleave`` has them: who begins changes from round to round; one round is not counted."""
    names = list(families)
    samples: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in names}
    for number in range(-1, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            found = families[name].step(name, CHECKED + 1 + number)
            if number >= 0:
                for kind, values in samples[name].items():
                    values.append(found[kind])
    return samples


def run(ranks: int, size: Size, rounds: int, names: list[str], forms: dict[str, dict[str, Any]]) -> Any:
    """The samples of all peers on this many ranks."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        data = Path(folder) / "data.npz"
        write_data(data, size, ranks, CHECKED + 1 + rounds)
        families: dict[str, Family] = {}
        if names:
            torch_family = Family("PyTorch", [torch_command(size, names)] * ranks, {**PYTORCH, **around()})
            stack.enter_context(torch_family)
            families.update(dict.fromkeys(names, torch_family))
        for name, form in forms.items():
            commands = [jax_command(data, size, form)] * ranks
            families[name] = stack.enter_context(Family(name, commands, {**JAX, **around()}))
        check(families)
        return interleave(families, rounds)


def measure(args: argparse.Namespace) -> int:
    """Take turns on each number of ranks, report."""
    why = obstacle()
    if why:
        print(f"jax_fsdp: skipped: {why}")
        return 0
    rounds = args.rounds or (6 if args.quick else 20)
    size = replace(SMALL, depth=args.depth) if args.depth else SMALL
    forms = {name: FORMS[name] for name in args.forms}
    configuration = {"model": asdict(size), "ranks": args.ranks, "rounds": rounds, "peers": [*TORCH, *forms]}
    report = Report("jax_fsdp", __doc__.splitlines()[0], configuration)
    for ranks in args.ranks:
        samples = run(ranks, size, rounds, list(TORCH), forms)
        report.medians[f"{ranks} ranks"] = {
            name: {kind: statistics.median(values) for kind, values in sample.items()}
            for name, sample in samples.items()
        }
        print(report.medians)
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    cli.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    cli.add_argument("--rounds", type=int, help="steps of each peer")
    cli.add_argument("--depth", type=int, help="blocks, instead of the benchmark's own")
    cli.add_argument("--forms", nargs="+", default=["jax"], choices=FORMS, help="ways to write it in JAX")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
