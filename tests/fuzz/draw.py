"""Cases: all of a generated run, as data that prints as it is made and travels to other processes."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fshard as fs
from fshard import P
from fshard import optim as O  # noqa: N812
from tests.fuzz import models

ROWS = 72

ELEMENTWISE: dict[str, Callable[[], Any]] = {
    "sgd": lambda: O.sgd(0.1),
    "momentum": lambda: O.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda: O.adamw(0.01, eps=1e-6, weight_decay=0.1, decay=O.matrices),
    "scheduled": lambda: O.adamw(O.schedules.warmup_cosine(0.02, 2, 8), eps=1e-6),
    "lion": lambda: O.lion(0.003),
    "NAdam": lambda: O.from_torch(torch.optim.NAdam, lr=0.01, eps=1e-6),
    "Adagrad": lambda: O.from_torch(torch.optim.Adagrad, lr=0.02, initial_accumulator_value=0.1),
    "RMSprop": lambda: O.from_torch(torch.optim.RMSprop, lr=0.005, eps=1e-4, momentum=0.9),
    "ASGD": lambda: O.from_torch(torch.optim.ASGD, lr=0.05, t0=2),
    "chain": lambda: O.chain(O.clip_value(0.1), O.scale(0.5), O.add_decay(0.01), O.sgd(0.2, momentum=0.5)),
    "ema": lambda: O.ema(O.sgd(0.1, momentum=0.9), 0.7),
    "masked": lambda: O.masked(O.sgd(0.1), r".*weight"),
    "partition": lambda: O.partition([(r".*bias", O.sgd(0.2)), (r".*", O.ema(O.adamw(0.01, eps=1e-6), 0.5))]),
}
WHOLE: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: O.adafactor(0.02),
    "muon": lambda: O.partition(
        [(r"blocks\.\d\.(up|down)\.weight", O.muon(0.02, dtype=torch.float64)), (r".*", O.sgd(0.1, momentum=0.9))]
    ),
}
BLOCKS: dict[str, Callable[[], Any]] = {"adamw8bit": lambda: O.adamw8bit(0.01, eps=1e-6, weight_decay=0.1)}


@dataclass(frozen=True)
class Leg:
    """Some steps on one mesh.

    Attributes:
        sizes: of the mesh.
        names: of its axes.
        batch: the data axes.
        steps: how many.
        rows: of each data rank; empty for equal ones.
        accumulate: as for ``fs.make_train_step``.
        specs: for weights, for other leaves and for blocks: keys of ``SPECS``.
        policy: as for ``fs.Policy``, or "auto".
        options: of the train step.
        proven: whether ``fs.verify`` is asked before the first step.
        wire: the format of gathers, in blocks of 16; None for none.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    batch: tuple[str, ...]
    steps: int
    rows: tuple[int, ...]
    accumulate: int
    specs: tuple[str, str, str]
    policy: Any
    options: tuple[tuple[str, Any], ...]
    proven: bool
    wire: str | None

    @property
    def ranks(self) -> int:
        """Of the mesh."""
        return torch.Size(self.sizes).numel()


@dataclass(frozen=True)
class Case:
    """A run: a model, an optimizer and a loss, and the legs on which they train."""

    number: int
    model: models.Shape
    opt: str
    every: int
    mean: bool
    clip: Any
    compute: str | None
    through: str
    real: bool
    legs: tuple[Leg, ...]

    def optimizer(self) -> Any:
        """The optimizer."""
        opt = {**ELEMENTWISE, **WHOLE, **BLOCKS}[self.opt]()
        return O.every(self.every, opt) if self.every > 1 else opt


def spec(key: str, leg: Leg, align: Any) -> dict[str, Any]:
    """The arguments of a rule beside its pattern."""
    last, data = leg.names[-1], leg.batch
    inner = last if last in data else data[-1]
    table: dict[str, dict[str, Any]] = {
        "replicated": {"at_rest": P()},
        "flat": {"at_rest": fs.fsdp(inner)},
        "flat over all": {"at_rest": fs.fsdp(data if len(data) > 1 else inner)},
        "dim": {"at_rest": P(inner)},
        "dim and flat": {"at_rest": P(data[0], flat=inner) if data[0] != inner else P(None, inner)},
        "spread": {"at_rest": P(), "opt": fs.fsdp(data if len(data) > 1 else inner)},
        "spread more": {"at_rest": fs.fsdp(inner), "opt": fs.fsdp((inner, *[a for a in data if a != inner]))},
        "host": {"at_rest": fs.fsdp(inner), "memory_kind": "unpinned_host"},
        "host state": {"at_rest": fs.fsdp(inner), "opt_memory_kind": "unpinned_host"},
        "host update": {"at_rest": P(), "opt_memory_kind": "unpinned_host", "update_on": "host"},
    }
    found = table[key]
    return {**found, "align": align} if found["at_rest"] != P() or "opt" in found else found


SPECS = ("replicated", "flat", "flat over all", "dim", "dim and flat", "spread", "spread more", "host", "host state")
LIKELY = ("flat", "flat over all", "flat", "replicated", "spread", "host")


def draw(seed: int, number: int, real: float = 0.0) -> Case:
    """The case of this number; ``real`` is the share of cases on real processes."""
    rng = random.Random(f"{seed}/{number}")
    early = rng.random() < 0.15
    mean = rng.random() < 0.5 and not early
    kinds = rng.choices([ELEMENTWISE, WHOLE, BLOCKS], [10, 2, 1])[0]
    every = rng.choice([1, 1, 1, 2, 3]) if not early or rng.random() < 0.1 else 1
    clip = rng.choice([None, None, 0.5, ((r".*bias", 0.2), (r".*", 0.6))]) if not early or rng.random() < 0.1 else None
    compute = rng.choice([None] * 7 + ["float32"])
    legs = tuple(_leg(rng, mean, early) for _ in range(rng.choice([1, 2, 2, 3])))
    through = rng.choice(["entries", "checkpoint"])
    opt = rng.choice(list(kinds))
    model = models.draw(rng)
    return Case(number, model, opt, every, mean, clip, compute, through, rng.random() < real, legs)


def _leg(rng: random.Random, mean: bool, early: bool) -> Leg:
    sizes, names, batch = rng.choice(
        [
            ((1,), ("shard",), ("shard",)),
            ((2,), ("shard",), ("shard",)),
            ((3,), ("shard",), ("shard",)),
            ((4,), ("shard",), ("shard",)),
            ((2, 2), ("replica", "shard"), ("replica", "shard")),
            ((2, 2), ("shard", "replica"), ("shard", "replica")),
            ((1, 3), ("replica", "shard"), ("replica", "shard")),
            ((2, 2), ("shard", "model"), ("shard",)),
        ]
    )
    data = torch.Size(size for size, name in zip(sizes, names, strict=True) if name in batch).numel()
    accumulate = rng.choice([1, 1, 2, 3])
    rows = _rows(rng, data, accumulate) if mean else ()
    chosen = SPECS if rng.random() < 0.25 else LIKELY
    specs = (rng.choice(chosen), rng.choice(chosen), rng.choice(chosen))
    options: dict[str, Any] = {
        "compile": rng.choice([None, None, "fx"]),
        "remat": rng.choice([None, "offload", "all", (("blocks.*", "all"), ("**", None))]),
        "donate": rng.random() < 0.7,
        "debug": rng.random() < 0.4,
    }
    if rng.random() < 0.15 and not early:
        options["loss_scale"] = (8.0, 3)
    policy, steps, given = _policy(rng, early, names), rng.randint(1, 3), tuple(options.items())
    whole = set(specs) <= {"replicated", "flat", "flat over all", "host", "host state"}  # blocks are not cut
    wire = rng.choice([None, None, "bf16", "int8", "int4"]) if whole else None
    return Leg(sizes, names, batch, steps, rows, accumulate, specs, policy, given, rng.random() < 0.3, wire)


def _policy(rng: random.Random, early: bool, names: tuple[str, ...]) -> Any:
    if rng.random() < 0.1:
        return "auto"
    reshard = rng.choice([True, True, False, "keep", *names])
    return (
        ("prefetch", rng.randint(0, 4)),
        ("reduces", rng.randint(1, 3)),
        ("reshard", reshard),
        ("accumulation", rng.choice(["sharded", "sharded", "full"])),
        ("update", "in_backward" if early else "deferred"),
    )


def _rows(rng: random.Random, parts: int, least: int) -> tuple[int, ...]:
    """How many rows each part has, none fewer than ``least``."""
    spare = [rng.random() for _ in range(parts)]
    rows = [least + int(x / sum(spare) * (ROWS - parts * least)) for x in spare]
    rows[0] += ROWS - sum(rows)
    return tuple(rows)
