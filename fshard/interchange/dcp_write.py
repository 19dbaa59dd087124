"""Writing folders of torch.distributed.checkpoint (DCP), which FSDP2 jobs load.

Such a folder holds boxes of tensors, and a flat shard is a range of a tensor, which consists of a few boxes. So every
rank writes its pieces to a file of its own, and one of the holders writes a replicated piece. The files are renamed
when all ranks are done, and the list comes last: a folder without it is no checkpoint.
"""

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import expect
from fshard.checkpoint.ranges import Block, blocks
from fshard.checkpoint.tensorfile import TensorMeta
from fshard.checkpoint.write import new_file, owned, synced
from fshard.errors import CheckpointError, TreeError, lines
from fshard.interchange.export import on_one_replica
from fshard.interchange.export_plan import ROLE, compare_arguments
from fshard.interchange.metadata import FILE, Chunk, Contents, FileRange
from fshard.interchange.optimizer_state import STEP, left_out
from fshard.interchange.rename import RenameLike, apply_rules, written_name
from fshard.interchange.state_dicts import counts, param_groups
from fshard.interchange.torch_formats import dump_metadata
from fshard.optim.base import Optimizer
from fshard.played.everywhere import called_on_each_rank
from fshard.reading.files import file_errors
from fshard.runtime.comm import (
    all_ranks_or_raise,
    collective_call,
    each_rank_or_raise,
    first_rank_or_raise,
    mesh_communicator,
)
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.sharding.spec import Shape
from fshard.sharding.stage_table import refuse_stages
from fshard.state.entries import entries
from fshard.state.fit import check_optimizer
from fshard.state.pieces import Entry, split_name
from fshard.state.settle import settle
from fshard.state.train_state import TrainState

Keys = tuple[Any, ...]
Wrote = tuple[int | str, Shape, Shape, int, int]
"""The number of an item or the name of another value, offset and shape of a box of it, its first byte and length."""


@dataclass(frozen=True)
class Item:
    """A tensor to write, its keys in the nested state dict, and the keys of tied names."""

    entry: Entry
    keys: Keys
    again: tuple[Keys, ...] = ()


@called_on_each_rank
@collective_call
def save_dcp(
    state: TrainState,
    path: str | os.PathLike[str],
    opt: Optimizer | None = None,
    *,
    model: str = "model",
    optimizer: str = "optim",
    rename: Sequence[RenameLike] = (),
    buffers: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a folder that an FSDP2 job loads with ``dcp.load`` and ``set_state_dict``. Collective.

    Each rank writes its own pieces. Tied leaves are written once and listed under each name. What sums over replicas
    keep for the next ones (``fs.Wire(feedback=)``) has no place in such a folder: a ``CheckpointWarning`` says so.

    Args:
        state: the state.
        path: the folder, which every rank must reach; it is made if it does not exist.
        opt: its optimizer, whose hyper-parameters become the job's ``param_groups``; None to write only parameters.
        model: the key of the model in the job's state dict.
        optimizer: the key of the optimizer.
        rename: rules from paths to the job's names.
        buffers: a tree of whole tensors, such as ``model.buffers``, which the job's model has in its state dict.
        overwrite: whether an existing checkpoint may be replaced.

    Raises:
        CheckpointError: the folder holds a checkpoint already, or a rank cannot write to it; equal on all ranks.
        PlanError, TreeError: as ``export``.

    >>> import tempfile
    >>> mesh, w, opt = fs.make_mesh((1,), ("data",)), torch.ones(2, 3), fs.optim.adamw(1e-3)
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fs.io.save_dcp(fs.init_state(plan, opt, params={"w": w}), folder, opt)
    ...     state = fs.io.load_dcp(folder, plan, opt)
    >>> state.step
    0
    """
    wants = [
        ("state", state, TrainState, "what a step returned"),
        ("path", path, (str, os.PathLike), "a folder"),
        ("buffers", buffers, (Mapping, type(None)), "a tree of tensors, such as model.buffers"),
    ]
    expect("save_dcp(state, path, opt)", wants)
    refuse_stages("save_dcp(state, path, opt)", state.plan)
    if opt is not None:
        check_optimizer(state.plan, opt)
    names = _renamed(state.plan, rename)
    items = _items(state, opt, model, optimizer, names)
    values = _values(state, opt, model, optimizer, buffers or {}, names)
    mesh, folder = state.plan.mesh, Path(path)
    on_one_replica(
        state.plan,
        [item.entry for item in items],
        "save_dcp",
        lambda: _write_all(mesh, folder, items, values, overwrite),
    )


def _write_all(mesh: Mesh, folder: Path, items: Sequence[Item], values: Mapping[Keys, Any], overwrite: bool) -> None:
    """Write all ranks' files, rename them, then write the list. Collective."""
    leaves = {f"leaf {_name(item.keys)}": item.entry.shape for item in items}
    compare_arguments(mesh, "save_dcp", {"path": folder, "order": list(leaves), **leaves, "values": list(values)})
    comm, rank = mesh_communicator(mesh, ROLE), mesh.rank

    def prepare() -> None:
        if (folder / FILE).exists() and not overwrite:
            raise CheckpointError(f"{folder} holds a checkpoint already: write elsewhere, or pass overwrite=True")
        with file_errors("write to", str(folder)):
            folder.mkdir(parents=True, exist_ok=True)

    first_rank_or_raise(comm, rank, prepare)
    partial = folder / f"{_file(rank)}.partial"

    def write() -> list[Wrote]:
        """Write this rank's blocks, and on rank 0 the values; returns what each is, its box and its place."""
        wrote, numbers = list[Wrote](), {item.entry.name: number for number, item in enumerate(items)}
        with file_errors("write to", str(folder)), synced(partial) as file:
            for piece in owned([item.entry for item in items], rank):
                for block in blocks(piece.piece):
                    box = piece.data[block.at : block.at + block.numel].cpu().clone().view(block.shape)
                    wrote.append((numbers[piece.name], block.offset, block.shape, *put(file, box)))
            for keys, value in values.items() if rank == 0 else ():
                data = value.cpu().clone() if isinstance(value, Tensor) else value
                wrote.append((_name(keys), (), (), *put(file, data)))
        return wrote

    def rename() -> None:
        with file_errors("write to", str(folder)):
            partial.replace(folder / _file(rank))

    try:
        rows = all_ranks_or_raise(comm, write)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    each_rank_or_raise(comm, rename)
    first_rank_or_raise(comm, rank, lambda: _publish(folder, len(rows), *_contents(items, values, rows)))


def _items(
    state: TrainState, opt: Optimizer | None, model: str, optimizer: str, names: Mapping[str, str]
) -> list[Item]:
    """The state's tensors, with their keys in the job's state dict."""
    plan, out = state.plan, []
    head = (model,) if model else ()
    listed = entries(settle(state), plan.leaves)
    without = left_out("save_dcp", [entry.name for entry in listed], plan.leaves) if opt is not None else ()
    for entry in listed:
        kind, _, path = entry.name.partition(".")
        if kind == "params":
            every = [(*head, names[name]) for name in (path, *plan.leaves[path].aliases) if name in names]
            out += [Item(entry, every[0], tuple(every[1:]))] if every else []
        elif opt is not None and entry.name not in without:
            buffer, path = split_name(entry.name, plan.leaves)
            if path in names:
                out.append(Item(entry, (optimizer, "state", names[path], buffer)))
    return out


def _renamed(plan: Plan, rename: Sequence[RenameLike]) -> dict[str, str]:
    """The job's name of each leaf and of each of its aliases."""
    every = [name for path, leaf in plan.leaves.items() for name in (path, *leaf.aliases)]
    names = apply_rules(rename, every, "the state")
    turned = [old for old, transpose in names.values() if transpose]
    if turned:
        remedy = "A job that was written so keeps its own layout; save_hf transposes."
        raise TreeError(lines("save_dcp cannot transpose leaves, which it writes as they are:", turned, remedy))
    return {old: written_name(new, names) if new == old else new for new, (old, _) in names.items()}


def _values(
    state: TrainState,
    opt: Optimizer | None,
    model: str,
    optimizer: str,
    buffers: Mapping[str, Any],
    names: Mapping[str, str],
) -> dict[Keys, Any]:
    """The other values of the job's state dict by keys: buffers, settings, and numbers of updates."""
    head = (model,) if model else ()
    out: dict[Keys, Any] = {(*head, name): leaf.detach() for name, leaf in tree.paths(buffers)}
    if opt is None:
        return out
    for number, group in enumerate(param_groups(state.plan, opt, state.step)):
        for path in [path for path in group["params"] if counts(opt, state.plan, path)]:
            updates = torch.tensor(float(state.step - state.late.get(path, 0)), device="cpu")
            out[optimizer, "state", names.get(path, path), STEP] = updates
        group["params"] = [names.get(path, path) for path in group["params"]]
        out |= {(optimizer, "param_groups", number, key): value for key, value in group.items()}
    return out


def put(file: BinaryIO, value: Any) -> tuple[int, int]:
    """Write a value as ``torch.save`` does; returns its first byte and its length."""
    begin, text = file.tell(), io.BytesIO()
    torch.save(value, text)
    file.write(text.getbuffer())
    return begin, text.tell()


def _contents(
    items: Sequence[Item], values: Mapping[Keys, Any], rows: Sequence[Sequence[Wrote]]
) -> tuple[Contents, dict[str, Keys]]:
    """Return what was written, and the keys of each name."""
    found: dict[int | str, list[Chunk]] = {}
    for rank, wrote in enumerate(rows):
        for what, offset, shape, *where in wrote:
            found.setdefault(what, []).append(
                Chunk(Block(tuple(offset), tuple(shape), 0), FileRange(_file(rank), *where))
            )
    out, keys = Contents(), {_name(keys): keys for keys in values}
    for number, item in enumerate(items):
        for key in (item.keys, *item.again):
            name = _name(key)
            keys[name], out.tensors[name] = key, TensorMeta(item.entry.shape, item.entry.dtype)
            out.chunks[name] = tuple(found.get(number, ()))
    for name, value in ((_name(key), value) for key, value in values.items()):
        (chunk,) = found[name]
        if isinstance(value, Tensor):
            out.add(name, tuple(value.shape), value.dtype, chunk.where)
        else:
            out.others[name] = chunk.where
    return out, keys


def _publish(folder: Path, ranks: int, contents: Contents, keys: Mapping[str, Keys]) -> None:
    """Write the list, and remove files of a checkpoint that it replaces."""
    with file_errors("write to", str(folder)):
        with new_file(folder / FILE) as file:
            file.write(dump_metadata(contents, keys))
        ours = {_file(rank) for rank in range(ranks)}
        for old in folder.glob("__*_*.distcp"):
            if old.name not in ours:
                old.unlink()


def _file(rank: int) -> str:
    """The name of a rank's file in DCP."""
    return f"__{rank}_0.distcp"


def _name(keys: Keys) -> str:
    """The name of a value in a flattened state dict."""
    return ".".join(map(str, keys))
