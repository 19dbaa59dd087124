"""One rank of JAX: the GPT of ``jax_model.py`` on all ranks, stepped when a line on standard input says so.

Started by ``jax_fsdp.py``, ``jax_products.py`` and ``gpu.py``, which write the start weights and the rows to a file
first, so that this process needs no PyTorch. See ``turns.py`` for the lines.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_model import AXIS, Form, init, make_product, make_step, spec, stack
from turns import answering, serve

PRODUCTS = ("jax", "jax backward")
"""Hessian-vector products, by name."""


class Rank:
    """This process's part of the peer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.ranks, self.rank = args.ranks, args.rank
        self.mesh = Mesh(np.array(jax.devices()), (AXIS,))
        given = np.load(args.data)
        self.rows = given["rows"]
        leaves = {name.removeprefix("w:"): given[name] for name in given.files if name.startswith("w:")}
        form = Form(
            args.heads,
            bool(args.scan),
            args.least,
            "cudnn" if args.platform == "cuda" and args.dtype == "bf16" else None,
        )
        leaves = stack(leaves, args.depth) if form.scan else leaves
        specs = {name: spec(name, leaf.shape, self.ranks, form.least) for name, leaf in leaves.items()}
        dtype = jnp.bfloat16 if args.dtype == "bf16" else jnp.float32
        params = {name: self._place(np.asarray(leaf).astype(dtype), specs[name]) for name, leaf in leaves.items()}
        self.state = init(params)
        self.train = make_step(form, self.mesh, json.loads(args.hyper), specs)
        if vector := {name.removeprefix("v:"): given[name] for name in given.files if name.startswith("v:")}:
            self.v = {name: self._place(leaf, specs[name]) for name, leaf in vector.items()}
            self.products = {name: make_product(form, self.mesh, specs, name == "jax backward") for name in PRODUCTS}
        whole = NamedSharding(self.mesh, PartitionSpec())
        self.meet, self.gather = jax.jit(jnp.sum, out_shardings=whole), jax.jit(lambda x: x, out_shardings=whole)
        self.ones = self._place(np.ones(self.ranks, np.float32), PartitionSpec(AXIS))

    def step(self, number: int) -> dict[str, float]:
        """One step on the batch of this number: begin together, end when all of this rank's results are there."""
        batch = self._batch(number)
        self.meet(self.ones).block_until_ready()
        wall, cpu = time.perf_counter(), time.process_time()
        self.state, loss = jax.block_until_ready(self.train(self.state, batch))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"wall": wall, "cpu": cpu, "loss": float(loss)}

    def product(self, name: str, number: int) -> dict[str, float]:
        """One Hessian-vector product on the batch of this number, timed as a step; it has no loss."""
        batch = self._batch(number)
        self.meet(self.ones).block_until_ready()
        wall, cpu = time.perf_counter(), time.process_time()
        self.found = jax.block_until_ready(self.products[name](self.state[0], self.v, batch))
        return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "loss": 0.0}

    def answer(self, word: str, number: int) -> dict[str, float]:
        """A step; a product; or the last product written to a file: ``write PATH``."""
        if not word.startswith("write "):
            return self.product(word, number) if hasattr(self, "v") else self.step(number)
        whole = {name: np.asarray(self.gather(leaf)) for name, leaf in self.found.items()}
        if self.rank == 0:
            np.savez(word.removeprefix("write "), **whole)
        return {"wall": 0.0, "cpu": 0.0, "loss": 0.0}

    def text(self) -> str:
        """The compiled step."""
        return str(self.train.lower(self.state, self._batch(0)).compile().as_text())

    def _batch(self, number: int) -> jax.Array:
        spread = NamedSharding(self.mesh, PartitionSpec(AXIS))
        return jax.make_array_from_process_local_data(spread, self.rows[number, self.rank])

    def _place(self, leaf: Any, where: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, NamedSharding(self.mesh, where), lambda index: leaf[index])


def main() -> int:
    """Join, build, obey."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--data", type=Path, required=True, help="npz: start weights and rows")
    cli.add_argument("--hyper", required=True, help="AdamW's hyper-parameters as JSON")
    cli.add_argument("--platform", default="cpu", help="cpu or cuda")
    cli.add_argument("--depth", type=int, required=True)
    cli.add_argument("--heads", type=int, required=True)
    cli.add_argument("--scan", type=int, default=0)
    cli.add_argument("--least", type=int, default=0)
    cli.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "mixed"))
    cli.add_argument("--hlo", type=Path, help="write the compiled program here")
    args = cli.parse_args()
    args.rank, args.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    answers = answering()
    jax.config.update("jax_platforms", args.platform)
    if args.ranks > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, args.ranks, args.rank)
    rank = Rank(args)
    if args.hlo:
        text = rank.text()
        if args.rank == 0:
            args.hlo.write_text(text)
    serve(rank.answer, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
