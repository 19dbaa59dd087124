"""Runs of configs for tests: brief, on the two ranks of a virtual mesh."""

from pathlib import Path
from typing import Any

import fshard as fs

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
BRIEF = ["batch=4", "data.length=32", "track.live=false", "evaluation.every=0", "evaluation.batches=1"]
SMALL = ["model.options={depth = 1, width = 32}", "model.init=[]"]
"""Changes that make a run of examples/train_gpt.py:GPT brief."""


def on_two(function: Any, *args: Any) -> Any:
    """What a function returns on the first of two ranks."""
    return fs.virtual_mesh((2,), ("any",)).run(function, *args)[0]


def losses(out: Path) -> list[float]:
    """The losses of a run, step by step."""
    rows = fs.trackers.read_lines(out / "metrics.jsonl")
    return [row["loss"] for row in rows]


def trained(name: str, out: Path, *changes: str) -> list[float]:
    """The losses of an example config, made brief, on two ranks."""
    small = ["model.options={num_hidden_layers = 1}"] if name == "lora" else SMALL
    on_two(fs.train, CONFIGS / f"{name}.toml", [*BRIEF, *small, f"out={out}", "checkpoints.every=0", *changes])
    return losses(out)
