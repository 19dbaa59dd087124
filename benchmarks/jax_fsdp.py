"""JAX: the GPT of 25 MB on loopback against JAX's own FSDP, ``NamedSharding`` over as many gloo processes.

The claim: a step takes at most 0.45 of JAX's time. Same model, same AdamW, same start weights, same rows; losses are
compared before anything is timed. JAX cannot live in the process of PyTorch's ranks, so they take turns: a coordinator
says whose step it is, and the others sleep (``turns.py``). JAX's gloo does not start in the lab: loopback only.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from common import HERE, QUIET, Report, arguments, free_port, peers_option, ratio
from model import SMALL, Size, make, rows
from turns import Family

TORCH = ("fsdp2", "fshard", "fshard no reshard")
FORMS: dict[str, dict[str, Any]] = {"jax": {}, "jax scan": {"scan": 1}, "jax matrices": {"least": 4096}}
"""Ways to write it, by name: blocks in a row, all leaves sharded; blocks by ``lax.scan``; only matrices sharded."""

CLAIMS = (
    ("fshard", "jax", 0.45),
    ("fshard no reshard", "jax", 0.45),
    ("jax", "fsdp2", None),
    ("jax scan", "jax", None),
    ("jax matrices", "jax", None),
)
CHECKED = 3
PYTORCH = {**QUIET, "OMP_NUM_THREADS": "1"}
JAX = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "true"}


def obstacle() -> str | None:
    """Why JAX cannot be a peer here, or None."""
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("jaxlib") is None:
        return "JAX is not installed: pip install 'fshard[bench-jax]'"
    return None


def no_gpu() -> str | None:
    """Why JAX cannot use a GPU here, or None. Asked in another process: JAX takes hold of what it finds."""
    ask = "import jax; print([device.platform for device in jax.devices()])"
    around = {**os.environ, **JAX, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=around)
    return None if "gpu" in found.stdout or "cuda" in found.stdout else "JAX sees no GPU: pip install 'jax[cuda12]'"


def write_data(path: Path, size: Size, ranks: int, numbers: int, device: str = "cpu") -> None:
    """For processes without PyTorch: the start weights, and all rows, (numbers, ranks, batch, tokens + 1).

    A device draws other numbers than another: weights are drawn where the peers draw theirs.
    """
    with torch.device(device):
        module = make(size)
    weights = {f"w:{name}": leaf.detach().cpu().numpy() for name, leaf in module.state_dict().items()}
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


def check(families: dict[str, Family], tolerance: float = 1e-4, numbers: range = range(CHECKED)) -> None:
    """See that all train alike, on the batches of these numbers.

    Raises:
        SystemExit: they do not.
    """
    seen = {name: [family.step(name, n)["loss"] for n in numbers] for name, family in families.items()}
    first = next(iter(seen.values()))
    for name, losses in seen.items():
        if any(abs(a - b) > tolerance * abs(b) for a, b in zip(losses, first, strict=True)):
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
    wanted = args.peers or [*TORCH, *(["jax"] if args.quick else FORMS)]
    notes: list[str] = []
    names = peers.select([name for name in wanted if name not in FORMS], notes)
    forms = {name: FORMS[name] for name in wanted if name in FORMS}
    ranks_of = args.ranks or ([2] if args.quick else [2, 4])
    configuration = {"model": asdict(size), "ranks": ranks_of, "rounds": rounds, "peers": [*names, *forms]}
    report = Report("jax_fsdp", __doc__.splitlines()[0], {**configuration, "jax": metadata.version("jax")}, notes=notes)
    for ranks in ranks_of:
        samples = run(ranks, size, rounds, names, forms)
        report.medians[f"{ranks} ranks"] = {
            name: {kind: statistics.median(values) for kind, values in sample.items()}
            for name, sample in samples.items()
        }
        for over, under, target in CLAIMS:
            for kind in ("wall", "cpu") if over in samples and under in samples else ():
                pair = samples[over][kind], samples[under][kind]
                wanted_ratio = target if kind == "wall" else None
                report.rows.append(ratio(f"{ranks} ranks: {over} / {under}", kind, *pair, wanted_ratio))
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    cli.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks (default: 2 and 4)")
    cli.add_argument("--rounds", type=int, help="steps of each peer")
    cli.add_argument("--depth", type=int, help="blocks, instead of the benchmark's own")
    peers_option(cli)


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
