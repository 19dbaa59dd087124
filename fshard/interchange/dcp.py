"""Folders of torch.distributed.checkpoint, as FSDP2 jobs write and read them: model and optimizer.

Such a folder holds tensors in chunks, boxes of any size, each a small file of ``torch.save`` inside of a larger one,
and a list of them. A rank takes the chunks that it needs something of, one at a time; nothing is gathered.
"""

import io
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from fshard.arguments import expect
from fshard.checkpoint.ranges import Block, overlap
from fshard.errors import DamagedError, TreeError
from fshard.interchange.metadata import Chunk, Extent, read_metadata
from fshard.interchange.moments import Moments
from fshard.interchange.rename import RenameLike
from fshard.interchange.source import Source, Stored, load
from fshard.optim.base import Optimizer
from fshard.sharding.plan import Plan
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

    Each rank reads the chunks of which it holds a part, one at a time. The list of chunks is a pickle, which is read by
    an unpickler that knows its dozen classes and nothing else; chunks are read with ``weights_only=True``.

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

    >>> import fshard as fs
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
        """Copy from each chunk in which some of it lies; one chunk is held at a time."""
        for chunk in self.chunks[name]:
            held: Tensor | None = None
            for block, out in parts:
                box = overlap(chunk.block, block)
                if box is None:
                    continue
                held = self._chunk(name, chunk) if held is None else held
                to = tuple(slice(a - o, b - o) for a, b, o in zip(*box, block.offset, strict=True))
                of = tuple(slice(a - o, b - o) for a, b, o in zip(*box, chunk.block.offset, strict=True))
                out[to].copy_(held[of])

    def _chunk(self, name: str, chunk: Chunk) -> Tensor:
        try:
            with open(self.folder / chunk.where.file, "rb") as file:
                value = torch.load(cast(IO[bytes], Window(file, chunk.where)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise DamagedError(f"{self._where(name, chunk)} is no whole tensor of torch.save: {reason}") from error
        stored = self.tensors[name]
        if type(value) is not Tensor or tuple(value.shape) != chunk.block.shape or value.dtype != stored.dtype:
            found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise DamagedError(
                f"{self._where(name, chunk)} holds {found}, and the metadata says {stored.dtype} "
                f"{list(chunk.block.shape)}: the folder is damaged, or was changed"
            )
        return value

    def _where(self, name: str, chunk: Chunk) -> str:
        at = f"bytes {chunk.where.begin} to {chunk.where.begin + chunk.where.length}"
        return f"{self.folder / chunk.where.file}, {at}, the chunk of {name} at {list(chunk.block.offset)},"


class Window(io.RawIOBase):
    """A part of a file as a file, so that nothing around it is read."""

    def __init__(self, file: Any, where: Extent) -> None:
        self.file, self.where, self.at = file, where, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a byte of the part."""
        self.at = offset + (0, self.at, self.where.length)[whence]
        return self.at

    def tell(self) -> int:
        """The next byte of the part."""
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Read on, no further than the part."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.where.length - self.at))
        self.file.seek(self.where.begin + self.at)
        got = int(self.file.readinto(view[:count]))
        self.at += got
        return got


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
