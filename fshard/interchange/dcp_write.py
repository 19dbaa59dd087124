"""Writing folders of torch.distributed.checkpoint, which FSDP2 jobs load.

A flat shard is a range of a tensor, which is a few boxes, and boxes are what such a folder holds: every rank writes
what it has as it lies, to a file of its own, and copies are written once, by one rank or another. Files get their names
when all ranks are done; the list of all of it comes last, so that a folder without it is no checkpoint.
"""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import expect
from fshard.checkpoint.problems import unreachable
from fshard.checkpoint.ranges import Block, blocks
from fshard.errors import CheckpointError, TreeError, lines
from fshard.interchange.metadata import FILE, Chunk, Contents, Extent
from fshard.interchange.moments import STEP, split_name
from fshard.interchange.parcels import ROLE, agree, extents
from fshard.interchange.rename import RenameLike, apply_rules
from fshard.interchange.source import Stored
from fshard.interchange.state_dicts import counts, param_groups
from fshard.interchange.torch_formats import dump_metadata
from fshard.optim.base import Optimizer
from fshard.runtime.comm import all_ranks_or_raise, each_rank_or_raise, first_rank_or_raise, mesh_lane
from fshard.sharding.layout import Piece
from fshard.sharding.plan import Plan
from fshard.state.entries import Entry, entries
from fshard.state.fit import check_optimizer
from fshard.state.train_state import TrainState

Keys = tuple[Any, ...]


@dataclass(frozen=True)
class Item:
    """One tensor to write: the keys that lead to it in the nested state dict, and others that lead to the same one."""

    entry: Entry
    keys: Keys
    again: tuple[Keys, ...] = ()


def save_dcp(
    state: TrainState,
    opt: Optimizer | None,
    path: str | os.PathLike[str],
    *,
    model: str = "model",
    optimizer: str = "optim",
    rename: Sequence[RenameLike] = (),
    buffers: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a folder that an FSDP2 job loads with ``dcp.load`` and ``set_state_dict``. Collective.

    Each rank writes what it holds; nothing is gathered. Tied leaves are written once, and are there under each name.

    Args:
        state: the state.
        opt: its optimizer, whose hyper-parameters become the job's ``param_groups``; None to write parameters alone.
        path: the folder, which every rank must reach; it is made if it is not there.
        model: the key under which the job puts the state dict of its model.
        optimizer: the key of that of its optimizer.
        rename: rules from paths to the job's names.
        buffers: a tree of whole tensors, such as ``model.buffers``, which the job's model has in its state dict.
        overwrite: whether a checkpoint that is there may be replaced.

    Raises:
        CheckpointError: the folder holds a checkpoint already, or a rank cannot write to it; on all ranks alike.
        PlanError, TreeError: as ``export``.

    >>> import fshard as fs, tempfile
    >>> mesh, w, opt = fs.make_mesh((1,), ("shard",)), torch.ones(2, 3), fs.optim.adamw(1e-3)
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("shard"))])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_dcp(fs.init_state(plan, opt, params={"w": w}), opt, folder)
    ...     state = fs.load_dcp(plan, opt, folder)
    >>> state.step
    0
    """
    wants = [
        ("state", state, TrainState, "what a step returned"),
        ("path", path, (str, os.PathLike), "a folder"),
        ("buffers", buffers, (Mapping, type(None)), "a tree of tensors, such as model.buffers"),
    ]
    expect("save_dcp(state, opt, path)", wants)
    if opt is not None:
        check_optimizer(state.plan, opt)
    mesh, folder = state.plan.mesh, Path(path)
    items = _items(state, opt, model, optimizer, rename)
    beside = _beside(state, opt, model, optimizer, buffers or {})
    for old, new in _renamed(state.plan, rename).items() if opt is not None else ():
        _put_names(beside, optimizer, old, new)
    agree(
        mesh, "save_dcp", {"path": folder, "leaves": [(i.keys, i.entry.shape) for i in items], "beside": list(beside)}
    )
    lane = mesh_lane(mesh, ROLE)
    first_rank_or_raise(lane, mesh.rank, lambda: _prepare(folder, overwrite))
    held = list(extents(mesh, [item.entry for item in items]))
    extra: dict[Keys, Extent] = {}
    try:
        rows = all_ranks_or_raise(lane, lambda: _write(folder, mesh.rank, items, held, beside, extra))
    except BaseException:
        _partial(folder, mesh.rank).unlink(missing_ok=True)
        raise
    places = [[Extent(_file(rank), *where) for where in row] for rank, row in enumerate(rows)]
    each_rank_or_raise(lane, lambda: _rename(folder, mesh.rank))
    first_rank_or_raise(lane, mesh.rank, lambda: _publish(folder, items, held, places, extra, beside))


def _items(
    state: TrainState, opt: Optimizer | None, model: str, optimizer: str, rename: Sequence[RenameLike]
) -> list[Item]:
    """The state's tensors, with the keys of the job's state dict."""
    plan = state.plan
    names = _renamed(plan, rename)
    out = []
    head = (model,) if model else ()
    for entry in entries(state):
        kind, _, path = entry.name.partition(".")
        if kind == "params":
            every = [(*head, names[name]) for name in (path, *plan.leaves[path].aliases) if name in names]
            out += [Item(entry, every[0], tuple(every[1:]))] if every else []
        elif opt is not None:
            buffer, path = split_name(plan, entry.name)
            if path in names:
                out.append(Item(entry, (optimizer, "state", names[path], buffer)))
    return out


def _renamed(plan: Plan, rename: Sequence[RenameLike]) -> dict[str, str]:
    """The job's name of each leaf, and of each further name of it."""
    every = [name for path, leaf in plan.leaves.items() for name in (path, *leaf.aliases)]
    names = apply_rules(rename, every, "the state")
    turned = [old for old, transpose in names.values() if transpose]
    if turned:
        remedy = "A job that was written so keeps its own layout; save_hf transposes."
        raise TreeError(lines("save_dcp writes what lies there, and does not transpose:", turned, remedy))
    return {old: new for new, (old, _) in names.items()}


def _beside(
    state: TrainState, opt: Optimizer | None, model: str, optimizer: str, buffers: Mapping[str, Any]
) -> dict[Keys, Any]:
    """What else the job's state dict holds: buffers, settings, and the number of updates, by keys."""
    head = (model,) if model else ()
    out: dict[Keys, Any] = {(*head, name): leaf.detach() for name, leaf in tree.paths(buffers)}
    if opt is None:
        return out
    groups = param_groups(state.plan, opt, state.step)
    for number, group in enumerate(groups):
        if counts(opt):
            for path in group["params"]:
                out[optimizer, "state", path, STEP] = torch.tensor(float(state.step - state.late.get(path, 0)))
        out |= {(optimizer, "param_groups", number, key): value for key, value in group.items()}
    return out


def _put_names(beside: dict[Keys, Any], optimizer: str, old: str, new: str) -> None:
    """Call a parameter by the job's name among the settings."""
    if old == new:
        return
    step = beside.pop((optimizer, "state", old, STEP), None)
    if step is not None:
        beside[optimizer, "state", new, STEP] = step
    for keys, value in beside.items():
        if keys[:2] == (optimizer, "param_groups") and keys[-1] == "params":
            value[:] = [new if name == old else name for name in value]


def _mine(rank: int, held: Sequence[Sequence[Piece]]) -> Iterator[tuple[int, Block]]:
    """What a rank writes: the number of an item, and a block of it. Copies are spread over those that hold them."""
    for number, pieces in enumerate(held):
        copies = [other for other, piece in enumerate(pieces) if piece == pieces[rank]]
        if copies[number % len(copies)] == rank:
            yield from ((number, block) for block in blocks(pieces[rank]) if block.numel)


def _write(
    folder: Path,
    rank: int,
    items: Sequence[Item],
    held: Sequence[Sequence[Piece]],
    beside: Mapping[Keys, Any],
    extra: dict[Keys, Extent],
) -> list[tuple[int, int]]:
    """Write this rank's file, under a name for the time being.

    Returns:
        Where in it each block lies, first byte and length; where things beside lie goes to ``extra``.
    """
    name, wrote = _file(rank), []
    try:
        with open(_partial(folder, rank), "wb") as file:
            for number, block in _mine(rank, held):
                flat = items[number].entry.tensor[block.at : block.at + block.numel]
                where = put(file, name, flat.cpu().clone().view(block.shape))
                wrote.append((where.begin, where.length))
            for keys, value in beside.items() if rank == 0 else ():
                extra[keys] = put(file, name, value.cpu().clone() if isinstance(value, Tensor) else value)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise unreachable(str(folder), "write to", error) from error
    return wrote


def put(file: BinaryIO, name: str, value: Any) -> Extent:
    """Write a value as ``torch.save`` does; returns where it lies."""
    begin = file.tell()
    text = io.BytesIO()
    torch.save(value, text)
    file.write(text.getbuffer())
    return Extent(name, begin, text.tell())


def _list(
    items: Sequence[Item],
    held: Sequence[Sequence[Piece]],
    places: Sequence[Sequence[Extent]],
    extra: Mapping[Keys, Extent],
    beside: Mapping[Keys, Any],
) -> bytes:
    """The list of all that was written."""
    chunks: dict[int, list[Chunk]] = {}
    for rank, wheres in enumerate(places):
        for (number, block), where in zip(_mine(rank, held), wheres, strict=True):
            chunks.setdefault(number, []).append(Chunk(block, where))
    paths: dict[str, Keys] = {}
    tensors: dict[str, Stored] = {}
    parts: dict[str, tuple[Chunk, ...]] = {}
    others: dict[str, Extent] = {}
    for number, item in enumerate(items):
        for keys in (item.keys, *item.again):
            name = _name(keys)
            paths[name], tensors[name] = keys, Stored(item.entry.shape, item.entry.dtype)
            parts[name] = tuple(chunks.get(number, ()))
    for keys, value in beside.items():
        name, where = _name(keys), extra[keys]
        paths[name] = keys
        if isinstance(value, Tensor):
            shape = tuple(value.shape)
            tensors[name], parts[name] = Stored(shape, value.dtype), (Chunk(Block((0,) * len(shape), shape, 0), where),)
        else:
            others[name] = where
    return dump_metadata(Contents(tensors, parts, others), paths)


def _publish(
    folder: Path,
    items: Sequence[Item],
    held: Sequence[Sequence[Piece]],
    places: Sequence[Sequence[Extent]],
    extra: Mapping[Keys, Extent],
    beside: Mapping[Keys, Any],
) -> None:
    """Write the list, and remove files of a checkpoint that it replaces."""
    partial = folder / f"{FILE}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(_list(items, held, places, extra, beside))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / FILE)
        ours = {_file(rank) for rank in range(len(places))}
        for old in folder.glob("__*_*.distcp"):
            if old.name not in ours:
                old.unlink()
    except OSError as error:
        raise unreachable(str(folder), "write to", error) from error


def _rename(folder: Path, rank: int) -> None:
    try:
        _partial(folder, rank).replace(folder / _file(rank))
    except OSError as error:
        raise unreachable(str(folder), "write to", error) from error


def _partial(folder: Path, rank: int) -> Path:
    return folder / f"{_file(rank)}.partial"


def _file(rank: int) -> str:
    """The name of a rank's file, as torch has it."""
    return f"__{rank}_0.distcp"


def _name(keys: Keys) -> str:
    """The name of a value in a flattened state dict."""
    return ".".join(map(str, keys))


def _prepare(folder: Path, overwrite: bool) -> None:
    if (folder / FILE).exists() and not overwrite:
        raise CheckpointError(f"{folder} holds a checkpoint already: write to another folder, or pass overwrite=True")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unreachable(str(folder), "write to", error) from error
