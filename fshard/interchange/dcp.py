"""Folders of torch.distributed.checkpoint, as FSDP2 jobs write and read them: model and optimizer.

Such a folder holds tensors in chunks, boxes of any size, each a small file of ``torch.save`` inside of a larger one,
and a list of them. A rank reads what it needs of each chunk; nothing is gathered.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from fshard.arguments import expect
from fshard.checkpoint.files import File, file_errors, folder_at, plain_file
from fshard.checkpoint.problems import printable, unreachable, unusable
from fshard.checkpoint.ranges import Block, overlap
from fshard.errors import DamagedError, TreeError
from fshard.interchange.archive import Placed, find_tensor, strided
from fshard.interchange.boxes import read_box
from fshard.interchange.metadata import Chunk, read_metadata
from fshard.interchange.moments import Moments
from fshard.interchange.rename import RenameLike
from fshard.interchange.source import Source, Stored, load
from fshard.optim.base import Optimizer
from fshard.sharding.plan import Plan
from fshard.sharding.spec import Shape
from fshard.state.init import Inits
from fshard.state.train_state import TrainState


def load_dcp(
    plan: Plan,
    opt: Optimizer,
    path: str | os.PathLike[str],
    *,
    model: str = "model",
    optimizer: str | None = "optim",
    rename: Sequence[RenameLike] = (),
    init: Inits = (),
    seed: int = 0,
    step: int | None = None,
    cast: bool = False,
) -> TrainState:
    """A train state from a folder that ``torch.distributed.checkpoint`` wrote, as FSDP2 jobs do. Local.

    Each rank reads what it holds of each chunk. The list of chunks is a pickle, and so is what describes each of them:
    both are read as data, by opcodes, and nothing that they name is looked up or called.

    Args:
        plan: the plan, on any mesh.
        opt: the optimizer. Its buffers must have torch's names, as those of ``fs.optim.adamw`` and ``sgd`` do.
            Hyper-parameters are those of ``opt``, not those in the folder.
        path: the folder.
        model: the key under which the job put the state dict of its model; ``""`` if it is the whole.
        optimizer: the key of that of its optimizer, as ``get_optimizer_state_dict`` gives it; None to start anew.
        rename: rules from the job's names to paths; ``(pattern, None)`` leaves a tensor, such as a buffer, out.
        init: ``(pattern, initializer)`` rules for leaves that the folder does not have.
        seed: of those values, and of random numbers inside of steps.
        step: the number of updates that were made, by all leaves; by default what the optimizer's state says, or 0.
        cast: whether floating-point tensors may be rounded to the leaf's dtype.

    Raises:
        CheckpointError: no such folder, or one whose metadata names what it should not; ``DamagedError`` if it is not
            whole.
        PlanError, TreeError: as ``load_hf``, and for the optimizer's state likewise.

    >>> import fshard as fs, torch
    >>> mesh, w = fs.make_mesh((1,), ("shard",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("shard"))])
    >>> import tempfile
    >>> opt = fs.optim.adamw(1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fs.save_dcp(fs.init_state(plan, opt, params={"w": w}), opt, folder)
    ...     load_dcp(plan, opt, folder).params["w"]
    tensor([1., 2., 3., 4.])
    """
    expect(
        "load_dcp(plan, opt, path)",
        [("plan", plan, Plan, "what fs.make_plan returned"), ("path", path, (str, os.PathLike), "a folder")],
    )
    source = Chunks(Path(path))
    params = _under(source, model, optimizer)
    if optimizer is None:
        return load(plan, opt, params, rename=rename, init=init, seed=seed, cast=cast, step=step or 0)
    moments = Moments(plan, _under(source, optimizer, None), "state.", cast)
    if step is None:
        step = moments.step(list(params.tensors))
    state = load(plan, opt, params, rename=rename, init=init, seed=seed, cast=cast, step=step, moments=moments.fill)
    moments.check()
    state.late = moments.late(state)
    return state


class Chunks:
    """A source of tensors in chunks.

    Args:
        folder: where they are.

    Raises:
        CheckpointError, DamagedError: as ``read_metadata``.
    """

    def __init__(self, folder: Path) -> None:
        self.name, self.folder = str(folder), folder
        contents = read_metadata(folder)
        self.tensors: Mapping[str, Stored] = contents.tensors
        self.chunks, self.others = contents.chunks, contents.others

    def read(self, name: str, parts: Sequence[tuple[Block, Tensor]]) -> None:
        """Read from each chunk what lies in it. A chunk that is not in row-major order is held as a whole."""
        for chunk in self.chunks[name]:
            boxes = [(box, block, out) for block, out in parts if (box := overlap(chunk.block, block)) is not None]
            if boxes:
                try:
                    self._read(name, chunk, boxes)
                except OSError as error:
                    raise unreachable(str(self.folder / chunk.where.file), "read", error) from error

    def check_dense(self) -> None:
        """Refuse files that are nearly all holes, before memory is taken for all that they claim.

        Raises:
            DamagedError: one is.
        """
        names = {chunk.where.file for chunks in self.chunks.values() for chunk in chunks}
        with file_errors("read", self.name), folder_at(self.name, links=True) as at:
            for name in names:
                with plain_file(self.name, name, at, refuse=unusable) as file:
                    file.check_dense()

    def _read(self, name: str, chunk: Chunk, boxes: Sequence[tuple[tuple[Shape, Shape], Block, Tensor]]) -> None:
        with (
            folder_at(self.name, links=True) as at,
            plain_file(self.name, chunk.where.file, at, refuse=unusable) as file,
        ):
            placed, shape = self._placed(file, name, chunk), chunk.block.shape
            dtype = self.tensors[name].dtype
            whole = None if placed.contiguous(shape) else strided(file, placed, shape, dtype)
            for (low, high), block, out in boxes:
                into = out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, block.offset, strict=True))]
                corner = tuple(a - o for a, o in zip(low, chunk.block.offset, strict=True))
                if whole is None:
                    read_box(file, placed.begin, shape, corner, into, dtype)
                else:
                    into.copy_(whole[tuple(slice(c, c + n) for c, n in zip(corner, into.shape, strict=True))])

    def _placed(self, file: File, name: str, chunk: Chunk) -> Placed:
        """Where a chunk's elements lie, once its archive and the metadata say the same."""
        stored, end = self.tensors[name], chunk.where.begin + chunk.where.length
        here = f"{file.path}, bytes {chunk.where.begin} to {end}, the chunk of {name} at {list(chunk.block.offset)},"
        try:
            dtype, shape, placed = find_tensor(file, chunk.where.begin, chunk.where.length)
        except ValueError as error:
            raise DamagedError(f"{here} is no whole tensor of torch.save: {printable(str(error))}") from error
        if shape != chunk.block.shape or dtype != stored.dtype:
            raise DamagedError(
                f"{here} holds {dtype} {list(shape)}, and the metadata says {stored.dtype} {list(chunk.block.shape)}: "
                f"the folder is damaged, or was changed"
            )
        return placed


class Under:
    """The tensors of a source whose names begin with a prefix, without it."""

    def __init__(self, source: Source, prefix: str, without: Sequence[str]) -> None:
        self.name, self.source, self.prefix = source.name, source, prefix
        self.tensors: Mapping[str, Stored] = {
            name.removeprefix(prefix): stored
            for name, stored in source.tensors.items()
            if name.startswith(prefix) and not any(name.startswith(other) for other in without)
        }

    def read(self, name: str, parts: Sequence[tuple[Block, Tensor]]) -> None:
        """Read under the full name."""
        self.source.read(self.prefix + name, parts)


def _under(source: Source, key: str, other: str | None) -> Source:
    """What a job put under a key of its state dict."""
    found = Under(source, f"{key}." if key else "", [f"{other}."] if other and not key else [])
    if not found.tensors:
        keys = ", ".join(repr(key) for key in dict.fromkeys(name.partition(".")[0] for name in source.tensors))
        raise TreeError(
            f"{source.name} holds nothing under {key!r}; its names begin with {keys}: say under which keys the job "
            f"saved its model and its optimizer with model= and optimizer=, optimizer=None to start that anew"
        )
    return found
