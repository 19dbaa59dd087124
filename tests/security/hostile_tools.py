"""Hostile files of tools: records of ranks, schedules as text, costs, lines of scalars, configurations of models."""

import json
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fshard as fs
from fshard.foresight.huggingface import _values
from fshard.reading.texts import read_text
from fshard.runtime.flight.rank_records import HEADER, RECORD, file_name, read_records, schedule_name
from fshard.runtime.flight.verdict import verdict
from fshard.schedule.schedule import parse
from fshard.tracking.json_lines import JsonLines, read_lines
from tests.security.hostile_cases import ANY, Case, Files, mutated, text_of

KINDS = ("flight", "schedule", "costs", "lines", "config")
NUMBER = 7


def good() -> dict[str, Files]:
    """Good files of tools, by kind and name."""
    model = fs.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=("*",))
    plan = fs.make_plan(model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.sgd(0.1)
    step = fs.make_train_step(lambda params, x: model.apply(params, x).sum(), opt, plan)
    text = str(step.trace(torch.ones(2, 4)).schedule).encode()
    head = json.dumps({"rank": 0, "ranks": 2, "clock": 1e9, "reason": "why", "written": 2.5, "lost": True}).encode()
    rows = b"".join(RECORD.pack(0.1 * n, 1 + n // 4, n % 4, NUMBER) for n in range(1, 9))
    costs = fs.sim.Costs({("forward", "0"): 0.5}, fs.sim.Link(1e9))
    folder = {file_name(0): head.ljust(HEADER) + rows, schedule_name(0, NUMBER): text}
    return {
        "flight": folder,
        "schedule": {"step.schedule": text},
        "costs": {"costs.json": saved(costs)},
        "lines": {
            "run.jsonl": b"".join(b'{"step": %d, "loss": %s}\n' % (n, b"NaN" if n == 3 else b"0.5") for n in range(9))
        },
        "config": {"config.json": json.dumps({"model_type": "llama", "hidden_size": 8, "vocab_size": 16}).encode()},
    }


def saved(costs: fs.sim.Costs) -> bytes:
    """The file of costs."""
    with tempfile.TemporaryDirectory() as folder:
        costs.save(f"{folder}/costs.json")
        return Path(f"{folder}/costs.json").read_bytes()


def attempts(kind: str, path: Path) -> list[Callable[[], Any]]:
    """Calls that read such a folder."""
    readers: dict[str, list[Callable[[], Any]]] = {
        "flight": [lambda: plain(verdict(read_records(path)))],
        "schedule": [lambda: parse(read_text(path / "step.schedule"))],
        "costs": [lambda: fs.sim.read_costs(path / "costs.json")],
        "lines": [lambda: read_lines(path / "run.jsonl"), lambda: resumed(path / "run.jsonl")],
        "config": [lambda: _values(str(path))],
    }
    return readers[kind]


def plain(text: str) -> None:
    """Check that a text writes nothing but text to a terminal."""
    assert all(line.isprintable() for line in text.splitlines()), text


def resumed(path: Path) -> None:
    """Resume a file of lines."""
    tracker = JsonLines(path)
    tracker.begin(5, {})
    tracker.close()


def told(draw: random.Random, files: Files) -> None:
    """A record whose header says odd things, or whose entries do."""
    name = file_name(0)
    head = json.loads(files[name][:HEADER])
    key = draw.choice(list(head))
    head[key] = draw.choice([10**9, -1, 1e308, "\x1b[2J" * 9, None, [], {}, True, 10**400, "x" * 3000])
    entry = struct.pack(
        "<dIiQ",
        draw.choice([1.0, 1e308, -1.0, float("nan"), float("inf")]),
        draw.randrange(2**32),
        draw.randrange(-(2**31), 2**31),
        draw.randrange(2**64),
    )
    files[name] = (
        json.dumps(head).encode()[:HEADER].ljust(HEADER) + files[name][HEADER:] + entry * draw.choice([0, 1, 9000])
    )


def worded(draw: random.Random, files: Files) -> None:
    """A schedule with another word in it."""
    name = draw.choice([name for name in files if name.endswith(".schedule")])
    words = files[name].split(b" ")
    odd = [
        b'"' + b"\\u001b[2J" * 20 + b'"',
        b"keep(" + b"[" * 100_000 + b")",
        b"9" * 5000,
        b"-1",
        b"secondary(" + b"[" * 9000 + b"]" * 9000 + b")",
    ]
    words[draw.randrange(len(words))] = draw.choice(
        [*odd, b"reshard=keep(last=" + b"9" * 4000 + b")", b"\n" * 9, b"accumulate=1000000000"]
    )
    files[name] = b" ".join(words) * draw.choice([1, 1, 1, 200])


def described(draw: random.Random, files: Files) -> None:
    """Another value in a file of JSON."""
    name = draw.choice([name for name in files if ".json" in name])
    lines = files[name].splitlines() if name.endswith("l") else [files[name]]
    number = draw.randrange(len(lines))
    lines[number] = text_of(draw, mutated(draw, json.loads(lines[number])))
    files[name] = b"\n".join(lines)


STRUCTURE: dict[str, list[Any]] = {
    "flight": [told, told, worded],
    "schedule": [worded],
    **{kind: [described] for kind in ("costs", "lines", "config")},
}


def make(number: int, seed: int, made: dict[str, Files], root: Path) -> Case:
    """The case of a number, written to an empty folder."""
    draw = random.Random(f"tools/{seed}/{number}")
    kind = draw.choice(KINDS)
    files = dict(made[kind])
    how = draw.choice([*STRUCTURE[kind] * 2, *ANY])
    root.mkdir(parents=True, exist_ok=True)
    after = how(draw, files)
    for name, data in files.items():
        (root / name).write_bytes(data)
    if after is not None:
        after(root)
    return Case(kind, how.__name__, root, tuple(attempts(kind, root)))
