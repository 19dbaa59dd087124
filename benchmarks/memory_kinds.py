"""The kinds of steps whose memory ``memory.py`` holds against what was said beforehand, beside the peers' own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from model import Size, loss_of, make
from torch import Tensor

import fshard as fs

ADAPTED = r"blocks\..*\.(qkv|out|up|down)\.weight"
TIGHT = 0.75
"""The limit of ``auto within a limit``, to what the default policy holds."""

ROWS = 8
"""Times as many rows where activations are what counts."""

PROVED, CHOSEN = 9, 210
"""Steps until graphs are proved, and until ``schedule="auto"`` has chosen."""

KINDS: dict[str, dict[str, Any]] = {
    "remat": {"remat": "all"},
    "fx": {"compile": "fx"},
    "fx, remat": {"compile": "fx", "remat": "all"},
    "optimizer state in host memory": {"host": True},
    "LoRA": {"lora": True},
    "bfloat16": {"short": True},
    "bfloat16, LoRA": {"short": True, "lora": True},
    "two microbatches": {"accumulate": 2},
    "two microbatches, full accumulation": {"accumulate": 2, "schedule": fs.Policy(accumulation="full")},
    "8-bit AdamW": {"opt": fs.optim.adamw8bit},
    "8-bit AdamW, in the backward": {"opt": fs.optim.adamw8bit, "schedule": fs.Policy(update="in_backward")},
    "nothing donated": {"donate": False},
    "whole logits": {"vocabulary": 8192, "times": 4},
    "chunked logits": {"vocabulary": 8192, "times": 4, "chunks": 8},
    "kept": {"times": ROWS},
    "offloaded": {"times": ROWS, "remat": "offload"},
    "offloaded, two ahead": {"times": ROWS, "remat": fs.checkpoint_policies.offload(prefetch=2)},
    "fx, offloaded": {"times": ROWS, "remat": "offload", "compile": "fx"},
    "auto within a limit": {"auto": True},
}


def warm(name: str) -> int:
    """The steps of a kind before those that are measured."""
    return CHOSEN if KINDS[name].get("auto") else PROVED


def made(name: str, size: Size, batch: Tensor) -> tuple[Callable[[], object], Callable[[], int], int | None]:
    """A kind's step, what is said of its memory, and its limit."""
    options = dict(KINDS[name])
    size = replace(size, vocabulary=options.pop("vocabulary", size.vocabulary))
    chunks, batch = options.pop("chunks", None), batch.repeat(options.pop("times", 1), 1)
    mesh, model = fs.make_mesh((-1,), ("shard",)), fs.split(make(size), units=("blocks.*",))
    if options.pop("lora", False):
        model = fs.lora.wrap(model, [ADAPTED], rank=8, alpha=16)
    host = {"memory_kind": "unpinned_host", "update_on": "device"} if options.pop("host", False) else {}
    short = fs.Precision(torch.bfloat16, torch.bfloat16) if options.pop("short", False) else None
    rule = options.pop("opt", fs.optim.adamw)
    align = {"align": 256} if rule is fs.optim.adamw8bit else {}
    rules = [fs.Rule(".*", fs.fsdp("shard"), **host, **align)]
    plan = fs.make_plan(model, mesh, rules, batch=fs.P("shard"), precision=short)
    opt = rule(1e-3)

    def loss(params: Any, x: Tensor) -> Tensor:
        if chunks is not None:
            hidden, head = model.apply(params, x[:, :-1], method="hidden"), params["head"]["weight"]
            return fs.chunked_cross_entropy(hidden, head, x[:, 1:], chunks=chunks)
        return loss_of(model.apply(params, x[:, :-1]), x)

    limit = None
    if options.pop("auto", False):
        limit = int(TIGHT * fs.make_train_step(loss, opt, plan).trace(batch).footprint.peak_bytes)
        options["schedule"] = fs.Auto(memory=limit)
    step = fs.make_train_step(loss, opt, plan, **options)
    states = [fs.init_state(plan, opt, params=model.params)]

    def run() -> None:
        states[0], _ = step(states[0], batch)

    return run, lambda: step.trace(batch).footprint.peak_bytes, limit
