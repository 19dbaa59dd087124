"""The most memory that a step allocates, against its footprint, which was made before anything ran."""

import gc
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard.runtime.comm import nccl
from tests.gpu.models import TINY, Job, Size, alone, job, rows
from tests.gpu.place import Found, Place

ROOT, BOUND = Path(__file__).resolve().parents[2], 0.01
LARGE = Size(depth=8, width=1024, heads=16, tokens=512, batch=8, vocabulary=8192)
BF16 = fs.Precision(torch.bfloat16, torch.bfloat16)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "remat": ({}, {"remat": "all"}),
    "microbatches": ({}, {"accumulate": 2}),
    "in backward": ({}, {"schedule": fs.Policy(update="in_backward")}),
    "bfloat16": ({"precision": BF16}, {}),
    "optimizer in host memory": ({"opt_memory_kind": "pinned_host", "update_on": "host"}, {}),
}
POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "lean": {"schedule": fs.Policy(prefetch=1, reduces=1)},
    "no reshard": {"schedule": fs.Policy(reshard=False)},
}


def run(place: Place, found: Found) -> None:
    """Steps of one rank, and of one rank of eight."""
    if place.dry:
        found.leave("what was allocated: a CPU keeps no account of it (benchmarks/memory.py measures the heap)")
    size = place.of(LARGE, TINY)
    for name, (plan, options) in CASES.items():
        if place.dry and "opt_memory_kind" in plan:
            continue
        with found.trying(name):
            _measure(place, found, name, job(size, alone(place.device), **plan), options)
    with pytest.MonkeyPatch.context() as change:
        change.syspath_prepend(str(ROOT / "benchmarks"))
        for name in ("reduce_scatter", "dist"):
            change.setattr(nccl, name, getattr(nccl, name))  # put back at the end
        for name, options in POLICIES.items():
            with found.trying(f"one rank of 8, {name}"):
                _faked(place, found, name, size, options)


def _measure(place: Place, found: Found, name: str, made: Job, options: dict[str, Any]) -> None:
    state, step, batch = made.start(), made.step(**options), rows(made.size, 0, made.mesh)
    predicted = step.trace(batch).footprint
    found.number(f"{name}: predicted bytes", predicted.peak_bytes)
    if place.dry:
        step(state, batch)
        found.check(predicted.peak_bytes > 0, f"{name}: the footprint is empty")
        return
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # those of the case before: they would be subtracted twice
    torch.cuda.synchronize()
    state_bytes = torch.cuda.memory_allocated()  # parameters, optimizer state, the batch
    for _ in range(2):
        state, _ = step(state, batch)
    warm = _workspaces()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    state, _ = step(state, batch)
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - state_bytes - warm
    found.number(f"{name}: measured bytes", measured)
    found.near(f"{name}: peak", measured, predicted.peak_bytes, BOUND)
    del state, step
    gc.collect()
    torch.cuda.empty_cache()


def _workspaces() -> int:
    """Bytes of cuBLAS: its workspaces come from the same allocator, and stay. They are made anew when next needed."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    freed = before - torch.cuda.memory_allocated()
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    return freed


def _faked(place: Place, found: Found, name: str, size: Size, options: dict[str, Any]) -> None:
    """One rank's share of eight, whose collectives send nothing."""
    importlib.import_module("silent").join(8)
    try:
        mesh = fs.make_mesh((8,), ("data",), device=place.device)
        made = job(replace(size, batch=8 * size.batch), mesh)
        _measure(place, found, f"one rank of 8, {name}", made, options)
        mesh.close()
    finally:
        dist.destroy_process_group()
