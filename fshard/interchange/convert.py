"""Checkpoints to the formats of other libraries, tensor by tensor, and such formats to states; by one process."""

import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fshard import tree
from fshard.checkpoint.manifest import Manifest
from fshard.checkpoint.rewrite import load_tensor
from fshard.checkpoint.tensorfile import TensorMeta
from fshard.checkpoint.write import new_file
from fshard.errors import CheckpointError, TreeError, lines
from fshard.interchange.dcp import DcpSource, load_dcp
from fshard.interchange.dcp_write import put
from fshard.interchange.hf import load_hf
from fshard.interchange.hf_files import INDEX, SINGLE, HfFiles, HfWriter
from fshard.interchange.metadata import FILE, Contents, FileRange
from fshard.interchange.optimizer_state import STEP, left_out
from fshard.interchange.source import PrefixSource
from fshard.interchange.torch_formats import dump_metadata
from fshard.optim import adamw, sgd
from fshard.optim.base import Optimizer
from fshard.reading.files import file_errors
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan, make_plan
from fshard.sharding.rules import Rule
from fshard.sharding.spec import P
from fshard.state.entries import LATE
from fshard.state.pieces import PARAMS, split_name
from fshard.state.replica_entries import ANCHOR
from fshard.state.train_state import TrainState

Kind = Literal["hf", "dcp"]


def kind_of(path: str) -> Kind | None:
    """The format of another library's folder or file; None for any other path."""
    folder = Path(path)
    if (folder / FILE).is_file():
        return "dcp"
    weights = folder.suffix == ".safetensors" or folder.name == INDEX
    return "hf" if (weights and folder.is_file()) or (folder / SINGLE).is_file() or (folder / INDEX).is_file() else None


def _check_whole(manifest: Manifest) -> None:
    """Refuse parameters that are not whole leaves: those of replicas that train apart, and packed ones."""
    have, problems = manifest.tensors, []
    for name in [name for name in have if name.startswith(PARAMS)]:
        anchor = have.get(ANCHOR + name.removeprefix(PARAMS))
        if ":" in name:
            problems.append(f"{name}: codes, or scales, of a packed leaf")
        elif anchor is not None and anchor.shape != have[name].shape:
            problems.append(f"{name}: {list(have[name].shape)}, a row for each replica of {list(anchor.shape)}")
    if problems:
        remedy = (
            "Restore it in a job and write it there: fs.io.save_hf(state, folder), of replicas that train apart "
            "fs.io.save_hf(fs.averaged(state, 'anchor'), folder)."
        )
        raise CheckpointError(lines("other formats hold whole leaves, and these are not whole:", problems, remedy))


def to_hf(folder: str, manifest: Manifest, out: str, limit: int) -> int:
    """Write the parameters of a step as ``save_hf`` does, in files of up to ``limit`` bytes. Returns the bytes."""
    _check_whole(manifest)
    names = [name for name in manifest.tensors if name.startswith("params.")]
    names.sort(key=lambda name: -manifest.tensors[name].dtype.itemsize)
    infos = {name.removeprefix("params."): manifest.tensors[name] for name in names}
    writer = HfWriter(Path(out), infos, limit)
    try:
        writer.prepare()
        for name in infos:
            writer.write(name, load_tensor(folder, manifest, f"params.{name}"))
        writer.publish()
    finally:
        writer.discard()
    return writer.total


def to_dcp(folder: str, manifest: Manifest, out: str) -> int:
    """Write a checkpoint as a folder of torch.distributed.checkpoint. Returns the bytes of its tensors.

    Parameters have the key ``model``, the optimizer's buffers and number of updates ``optim.state``. A checkpoint does
    not hold hyper-parameters, so there are no ``param_groups``: a job loads it with ``allow_partial_load=True``.
    """
    target, file = Path(out), "__0_0.distcp"
    if (target / FILE).exists():
        raise CheckpointError(f"{out} holds a checkpoint already: give another folder, or remove it")
    _check_whole(manifest)
    paths = {n.removeprefix("params.") for n in manifest.tensors if n.startswith("params.")}
    contents, keys = Contents(), dict[str, tuple[str, ...]]()
    without = left_out("--to dcp", [*manifest.tensors], paths)

    def add(parts: tuple[str, ...], tensor: Tensor) -> None:
        keys[".".join(parts)] = parts
        contents.add(".".join(parts), tuple(tensor.shape), tensor.dtype, FileRange(file, *put(handle, tensor)))

    with file_errors("write to", out):
        target.mkdir(parents=True, exist_ok=True)
        with new_file(target / file) as handle:
            for name in [name for name in manifest.tensors if name not in without]:
                add(_keys(name, paths), load_tensor(folder, manifest, name))
            for path in sorted({k[2] for k in keys.values() if k[0] == "optim"}):
                updates = manifest.step - (manifest.scalars.get(LATE + path) or 0)
                add(("optim", "state", path, STEP), torch.tensor(float(updates), device="cpu"))
        with new_file(target / FILE) as handle:
            handle.write(dump_metadata(contents, keys))
    return sum(info.nbytes for name, info in manifest.tensors.items() if name not in without)


def to_state(path: str, kind: Kind, mesh: Mesh) -> TrainState:
    """The state in another library's folder, under its own names, on a mesh of one rank; raises as the loaders do.

    A folder of torch.distributed.checkpoint gives the optimizer's state, too, if its buffers are those of AdamW or SGD.
    """
    if kind == "hf":
        files = HfFiles(path)
        files.check_dense()
        return load_hf(path, _plan(path, files.tensors, mesh), sgd(0.0))
    source = DcpSource(Path(path))
    source.check_dense()
    buffers = {name.rpartition(".")[2] for name in source.tensors if name.startswith("optim.state.")}
    known: dict[str, Optimizer] = {"exp_avg": adamw(0.0), "momentum_buffer": sgd(0.0, momentum=0.9)}
    opt = next((rule for name, rule in known.items() if name in buffers), sgd(0.0))
    model = "model" if any(name.startswith("model.") for name in source.tensors) else ""
    tensors = PrefixSource(source, f"{model}." if model else "", None if model else "optim.").tensors
    trained = None
    if buffers - {STEP}:
        states = PrefixSource(source, "optim.state.").tensors
        trained = {name.rpartition(".")[0] for name in states}
    plan = _plan(path, tensors, mesh, trained)
    return load_dcp(path, plan, opt, model=model, optimizer=None if trained is None else "optim")


def _keys(name: str, paths: set[str]) -> tuple[str, ...]:
    """The keys of a tensor in a job's state dict."""
    kind, _, rest = name.partition(".")
    if kind == "params":
        return ("model", rest)
    buffer, path = split_name(name, paths)
    if kind != "opt" or not path:
        raise CheckpointError(f"{name} has no place in a state dict of model and optimizer: convert to another format")
    return ("optim", "state", path, buffer)


def _plan(path: str, tensors: Mapping[str, TensorMeta], mesh: Mesh, trained: Container[str] | None = None) -> Plan:
    """A plan of a file's tensors, each replicated; all of them train but those that ``trained``, if given, lacks."""
    leaves = {name: torch.empty(meta.shape, dtype=meta.dtype, device="meta") for name, meta in tensors.items()}
    frozen = [re.escape(name) for name in leaves if trained is not None and name not in trained]
    rules = [Rule("|".join(frozen), P(), trainable=False)] if frozen else []
    rules += [Rule(".*", P())] * (len(frozen) < len(leaves))
    try:
        return make_plan(tree.nest(leaves), mesh, rules)
    except TreeError as error:
        raise CheckpointError(f"{path} holds names that no tree has: {error}") from error
