"""Hessian-vector products of the GPT of 25 MB beside JAX's, sharded by ``NamedSharding`` over as many processes.

Same weights, same vector, same rows: every leaf of the product is compared before anything is timed. The processes
take turns as in ``jax_fsdp.py``. JAX's product is ``jvp`` of ``grad``, as its documentation has it; *backward* is
``grad`` of ``jvp``, as fshard differentiates. Started as a script, this file is one rank of fshard.
"""

import argparse
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax_fsdp
import numpy as np
import torch
import torch.distributed as dist
from common import HERE, Report, Row, ratio
from model import SMALL, Size, loss_of, make
from peers import process_group
from turns import Family, answering, serve

import fshard as fs
from fshard import tree

OURS, THEIRS = ("hvp", "hvp reshard", "hvp fx"), ("jax", "jax backward")
TARGET, TOLERANCE = 0.6, 1e-3
"""Of JAX's time; and how far an entry of a leaf may be from JAX's, relative to the leaf's largest."""


class Rank:
    """The products on this rank's shards."""

    def __init__(self, data: Path, size: Size) -> None:
        given = np.load(data)
        model = fs.split(make(size), units=("blocks.*",))
        self.rows = given["rows"]
        self.plan = fs.make_plan(model, fs.make_mesh((-1,), ("shard",)), [(r".*", fs.fsdp("shard"))])

        def loss(params: Any, rows: torch.Tensor) -> torch.Tensor:
            return loss_of(model.apply(params, rows[:, :-1]), rows)

        self.params = fs.shard(model.params, self.plan)
        vector = tree.nest({path: torch.from_numpy(given[f"v:{path}"]) for path, _ in tree.paths(model.params)})
        self.v = fs.shard(vector, self.plan)
        compiled = {"hvp fx": "fx"}
        self.calls = {
            name: fs.func.hvp(loss, self.plan, reshard="reshard" in name, compile=compiled.get(name)) for name in OURS
        }

    def step(self, name: str, number: int) -> dict[str, float]:
        """One product on the batch of this number: all ranks begin together."""
        batch = torch.from_numpy(self.rows[number, dist.get_rank()]).long()
        dist.all_reduce(torch.zeros(1))
        wall, cpu = time.perf_counter(), time.process_time()
        self.product = self.calls[name](self.params, self.v, batch)
        return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "loss": 0.0}

    def answer(self, word: str, number: int) -> dict[str, float]:
        """A product, or the last one written to a file: ``write PATH``."""
        if not word.startswith("write "):
            return self.step(word, number)
        whole = fs.unshard(self.product, self.plan)
        if dist.get_rank() == 0:
            np.savez(word.removeprefix("write "), **{path: leaf.numpy() for path, leaf in tree.paths(whole)})
        return {"wall": 0.0, "cpu": 0.0, "loss": 0.0}


def write_data(path: Path, size: Size, ranks: int, numbers: int) -> None:
    """The data of ``jax_fsdp.py``, and a vector like the weights."""
    jax_fsdp.write_data(path, size, ranks, numbers)
    given, draw = dict(np.load(path)), np.random.default_rng(0)
    weights = {name.removeprefix("w:"): leaf for name, leaf in given.items() if name.startswith("w:")}
    vector = {f"v:{name}": draw.standard_normal(leaf.shape, np.float32) for name, leaf in weights.items()}
    np.savez(path, **given, **vector)


def check(families: dict[str, Family], folder: Path) -> float:
    """See that all find the same product. Returns the largest error of a leaf, relative to its largest entry.

    Raises:
        SystemExit: they do not.
    """
    want: dict[str, Any] = {}
    worst = 0.0
    for name, family in families.items():
        path = folder / f"{name.replace(' ', '_')}.npz"
        family.step(name, 0)
        family.step(f"write {path}", 0)
        found = dict(np.load(path))
        want = want or found
        for leaf, values in want.items():
            error = float(abs(found[leaf] - values).max() / abs(values).max())
            if not error <= TOLERANCE:
                first = next(iter(families))
                raise SystemExit(
                    f"{name} finds another product than {first}: {leaf} differs by {error:.1e} of its largest"
                )
            worst = max(worst, error)
    return worst


def run(ranks: int, size: Size, rounds: int) -> tuple[dict[str, dict[str, list[float]]], float]:
    """The samples of all on this many ranks, and how far their products differ."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        data = Path(folder) / "data.npz"
        write_data(data, size, ranks, jax_fsdp.CHECKED + 1 + rounds)
        words = [word for name, value in asdict(size).items() for word in (f"--{name}", str(value))]
        ours = [sys.executable, str(HERE / "jax_products.py"), "--data", str(data), *words]
        theirs = jax_fsdp.jax_command(data, size, {})
        around = {**jax_fsdp.PYTORCH, **jax_fsdp.around()}
        fshard = stack.enter_context(Family("fshard", [ours] * ranks, around))
        jax = stack.enter_context(Family("jax", [theirs] * ranks, {**jax_fsdp.JAX, **jax_fsdp.around()}))
        families = {**dict.fromkeys(OURS, fshard), **dict.fromkeys(THEIRS, jax)}
        worst = check(families, Path(folder))
        return jax_fsdp.interleave(families, rounds), worst


def add_rows(report: Report, ranks: int, rounds: int) -> None:
    """Add the rows of products on this many ranks, or one that says why there are none."""
    if why := jax_fsdp.obstacle():
        report.rows.append(Row(f"{ranks} ranks: hvp / jax, GPT", "wall", why=why))
        return
    samples, worst = run(ranks, SMALL, rounds)
    for over in OURS:
        for under in THEIRS:
            for kind, target in (("wall", TARGET), ("cpu", None)):
                pair = samples[over][kind], samples[under][kind]
                report.rows.append(ratio(f"{ranks} ranks: {over} / {under}, GPT", kind, *pair, target))
    report.notes.append(f"GPT: products of fshard and JAX differ by {worst:.1e} of a leaf's largest entry at most")


def main() -> int:
    """Join, build, obey."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--data", type=Path, required=True, help="npz: rows and the vector")
    for name in asdict(SMALL):
        cli.add_argument(f"--{name}", type=int, required=True)
    args = cli.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers = answering()
    with process_group():
        rank = Rank(args.data, Size(**{name: getattr(args, name) for name in asdict(SMALL)}))
        serve(rank.answer, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
