"""Checkpoints of fshard to the formats of others, tensor by tensor, and folders of others to states; no processes."""

import math
import os
import re
from pathlib import Path
from typing import Literal

import torch

from fshard import tree
from fshard.checkpoint.convert import load_tensor
from fshard.checkpoint.files import file_errors
from fshard.checkpoint.manifest import Manifest
from fshard.checkpoint.ranges import Block
from fshard.errors import CheckpointError
from fshard.interchange.dcp import Chunks, load_dcp
from fshard.interchange.dcp_write import put
from fshard.interchange.folders import INDEX, SINGLE, Folder, Writer, fill_files, numbered, stale, write_json
from fshard.interchange.hf import load_hf
from fshard.interchange.metadata import FILE, Chunk, Contents, Extent
from fshard.interchange.moments import STEP
from fshard.interchange.source import Source, Stored
from fshard.interchange.torch_formats import dump_metadata
from fshard.optim import adamw, sgd
from fshard.optim.base import Optimizer
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan, make_plan
from fshard.sharding.rules import Rule
from fshard.sharding.spec import P
from fshard.state.entries import LATE
from fshard.state.train_state import TrainState

Kind = Literal["hf", "dcp"]


def kind_of(path: str) -> Kind | None:
    """What a folder or file of others holds; None for what is not one."""
    folder = Path(path)
    if (folder / FILE).is_file():
        return "dcp"
    weights = folder.suffix == ".safetensors" or folder.name == INDEX
    return "hf" if (weights and folder.is_file()) or (folder / SINGLE).is_file() or (folder / INDEX).is_file() else None


def to_hf(folder: str, manifest: Manifest, out: str, limit: int) -> int:
    """Write the parameters of a checkpoint as safetensors, as ``save_hf`` does. Returns their bytes.

    Args:
        folder: of the checkpoint.
        manifest: its manifest.
        out: the folder to write to.
        limit: bytes of a file at most.

    Raises:
        CheckpointError: there are weights already, or it cannot be written to.
        DamagedError: the checkpoint is not as it was written.
    """
    target = Path(out)
    if stale(target):
        raise CheckpointError(f"{out} holds weights already: give another folder, or remove them")
    names = [name for name in manifest.tensors if name.startswith("params.")]
    names.sort(key=lambda name: -manifest.tensors[name].dtype.itemsize)
    stored = {n.removeprefix("params."): Stored(manifest.tensors[n].shape, manifest.tensors[n].dtype) for n in names}
    parts = fill_files(stored, limit)
    files = numbered(len(parts))
    writers: list[Writer] = []
    try:
        with file_errors("write to", out):
            target.mkdir(parents=True, exist_ok=True)
            for file, part in zip(files, parts, strict=True):
                writers.append(Writer(target / file, part, {"format": "pt"}))
                for name in part:
                    writers[-1].write(name, load_tensor(folder, manifest, f"params.{name}"))
                writers[-1].close()
            for writer in writers:
                writer.publish()
            total = sum(math.prod(s.shape) * s.dtype.itemsize for s in stored.values())
            if len(files) > 1:
                weights = {name: file for part, file in zip(parts, files, strict=True) for name in part}
                write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": weights})
    finally:
        for writer in writers:
            writer.discard()
    return total


def to_dcp(folder: str, manifest: Manifest, out: str) -> int:
    """Write a checkpoint as a folder of torch.distributed.checkpoint. Returns the bytes of its tensors.

    Parameters go under ``model``, the optimizer's buffers and its number of updates under ``optim.state``. A checkpoint
    does not know hyper-parameters, so there are no ``param_groups``: a job loads it with ``allow_partial_load=True``.

    Raises:
        CheckpointError: there is a checkpoint already, or it cannot be written to.
        DamagedError: the checkpoint is not as it was written.
    """
    target, file = Path(out), "__0_0.distcp"
    if (target / FILE).exists():
        raise CheckpointError(f"{out} holds a checkpoint already: give another folder, or remove it")
    paths = {n.removeprefix("params.") for n in manifest.tensors if n.startswith("params.")}
    tensors: dict[str, Stored] = {}
    chunks: dict[str, tuple[Chunk, ...]] = {}
    keys: dict[str, tuple[str, ...]] = {}

    def note(parts: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype, where: Extent) -> None:
        name = ".".join(parts)
        keys[name], tensors[name] = parts, Stored(shape, dtype)
        chunks[name] = (Chunk(Block((0,) * len(shape), shape, 0), where),)

    with file_errors("write to", out):
        target.mkdir(parents=True, exist_ok=True)
        with open(target / f"{file}.partial", "wb") as handle:
            for name, info in manifest.tensors.items():
                where = put(handle, file, load_tensor(folder, manifest, name))
                note(_keys(name, paths), info.shape, info.dtype, where)
            trained = sorted({k[2] for k in keys.values() if k[0] == "optim"})
            for path in trained:
                step = torch.tensor(float(manifest.step - (manifest.scalars.get(LATE + path) or 0)))
                note(("optim", "state", path, STEP), (), step.dtype, put(handle, file, step))
            os.fsync(handle.fileno())
        (target / f"{file}.partial").replace(target / file)
        (target / f"{FILE}.partial").write_bytes(dump_metadata(Contents(tensors, chunks, {}), keys))
        (target / f"{FILE}.partial").replace(target / FILE)
    return sum(info.nbytes for info in manifest.tensors.values())


def to_state(path: str, kind: Kind, mesh: Mesh) -> TrainState:
    """The state in a folder of others, under its own names, on a mesh of one rank; all of it in memory.

    From torch.distributed.checkpoint come parameters, and the optimizer's state where its buffers are those of AdamW or
    of SGD with momentum.

    Raises:
        CheckpointError, DamagedError, TreeError: as ``load_hf`` and ``load_dcp``.
    """
    if kind == "hf":
        files = Folder(path)
        files.check_dense()
        return load_hf(_plan(files, "", mesh), sgd(0.0), path)
    source = Chunks(Path(path))
    source.check_dense()
    buffers = {name.rpartition(".")[2] for name in source.tensors if name.startswith("optim.state.")}
    known: dict[str, Optimizer] = {"exp_avg": adamw(0.0), "momentum_buffer": sgd(0.0, momentum=0.9)}
    opt = next((rule for name, rule in known.items() if name in buffers), sgd(0.0))
    prefix = "model" if any(name.startswith("model.") for name in source.tensors) else ""
    optimizer = "optim" if buffers - {STEP} else None
    frozen = _frozen(source, prefix) if optimizer else frozenset()
    plan = _plan(source, f"{prefix}." if prefix else "", mesh, frozen)
    return load_dcp(plan, opt, path, model=prefix, optimizer=optimizer)


def _keys(name: str, paths: set[str]) -> tuple[str, ...]:
    """Where a tensor goes in the state dict of a job."""
    kind, _, rest = name.partition(".")
    if kind == "params":
        return ("model", rest)
    parts = rest.split(".")
    cut = next((at for at in range(1, len(parts)) if ".".join(parts[at:]) in paths), None)
    if kind != "opt" or cut is None:
        raise CheckpointError(f"{name} has no place in a state dict of model and optimizer: convert to another format")
    return ("optim", "state", ".".join(parts[cut:]), ".".join(parts[:cut]))


def _frozen(source: Source, prefix: str) -> frozenset[str]:
    """Tensors of a model that its optimizer has no state for: buffers, frozen leaves."""
    start = f"{prefix}." if prefix else ""
    names = [name.removeprefix(start) for name in source.tensors if name.startswith(start)]
    known = {name.removeprefix("optim.state.").rpartition(".")[0] for name in source.tensors}
    return frozenset(name for name in names if name not in known)


def _plan(source: Source, prefix: str, mesh: Mesh, frozen: frozenset[str] = frozenset()) -> Plan:
    """A plan of the tensors under a prefix, each as it is."""
    found = {
        name.removeprefix(prefix): torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        for name, stored in source.tensors.items()
        if name.startswith(prefix) and (prefix or not name.startswith("optim."))
    }
    held = [re.escape(name) for name in found if name in frozen]
    rules = [Rule("|".join(held), P(), trainable=False)] if held else []
    return make_plan(tree.nest(found), mesh, [*rules, *([Rule(".*", P())] if len(held) < len(found) else [])])
