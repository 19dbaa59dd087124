"""Folders of torch.distributed.checkpoint (DCP), as FSDP2 jobs write and read them: model and optimizer.

Such a folder holds tensors in chunks, boxes of any size, each an archive of ``torch.save`` inside of a larger file, and
a list of the chunks. A rank reads its own part of each chunk.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor

from fshard.arguments import expect
from fshard.checkpoint.ranges import Block, cut_box, overlap
from fshard.checkpoint.tensorfile import TensorMeta
from fshard.errors import DamagedError, TreeError
from fshard.interchange.archive import StridedData, find_tensor, read_strided
from fshard.interchange.metadata import Chunk, read_metadata
from fshard.interchange.optimizer_state import load_with_optimizer
from fshard.interchange.rename import RenameLike
from fshard.interchange.source import MemorySource, PrefixSource, TensorSource, read_box
from fshard.optim.base import Optimizer
from fshard.played.everywhere import called_on_each_rank
from fshard.reading.files import File, open_file, printable, unusable
from fshard.sharding.plan import Plan
from fshard.sharding.spec import Shape
from fshard.state.init import Inits
from fshard.state.train_state import TrainState


@called_on_each_rank
def load_dcp(
    path: str | os.PathLike[str],
    plan: Plan,
    opt: Optimizer | None = None,
    *,
    model: str = "model",
    optimizer: str | None = "optim",
    rename: Sequence[RenameLike] = (),
    init: Inits = (),
    seed: int = 0,
    step: int | None = None,
    cast: bool = False,
) -> TrainState:
    """A train state from a folder of ``torch.distributed.checkpoint``, as FSDP2 jobs write it. Local.

    Each rank reads its own part of each chunk. The list of chunks and the description of each chunk are pickles: they
    are read as data, by opcodes, and no name in them is looked up or called.

    Args:
        path: the folder.
        plan: the plan, on any mesh.
        opt: the optimizer, whose buffers must have torch's names, as those of ``fs.optim.adamw`` and ``sgd`` do. It
            gives the hyper-parameters; those in the folder are ignored. None reads parameters alone.
        model: the key of the model in the job's state dict; ``""`` if the model's is the whole state dict.
        optimizer: the key of the optimizer's state, as from ``get_optimizer_state_dict``; None to start it anew.
        rename: rules from the job's names to paths; ``(pattern, None)`` leaves a tensor, such as a buffer, out.
        init: ``(pattern, initializer)`` rules for leaves that the folder does not have.
        seed: the seed of these values, and of random numbers inside of steps.
        step: the number of updates of every leaf; by default the number in the optimizer's state, or 0.
        cast: whether floating-point tensors may be rounded to the leaf's dtype.

    Raises:
        CheckpointError: no such folder, or its metadata contains a name that is refused; ``DamagedError`` if it is
            incomplete.
        PlanError, TreeError: as ``load_hf``, also for the optimizer's state.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> import tempfile
    >>> opt = fs.optim.adamw(1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fs.io.save_dcp(fs.init_state(plan, opt, params={"w": w}), folder, opt)
    ...     fs.io.load_dcp(folder, plan, opt).params["w"]
    tensor([1., 2., 3., 4.])
    """
    expect(
        "load_dcp(path, plan, opt)",
        [("path", path, (str, os.PathLike), "a folder"), ("plan", plan, Plan, "what fs.make_plan returned")],
    )
    source = DcpSource(Path(path))
    params = _under(source, model, optimizer)
    optim = _under(source, optimizer, None) if optimizer is not None and opt is not None else None
    return load_with_optimizer(plan, opt, params, optim, step=step, cast=cast, rename=rename, init=init, seed=seed)


class DcpSource:
    """The tensors of a folder, in chunks; raises as ``read_metadata``."""

    def __init__(self, folder: Path) -> None:
        self.name, self.folder = str(folder), folder
        contents = read_metadata(folder)
        self.tensors: Mapping[str, TensorMeta] = contents.tensors
        self.chunks, self.others = contents.chunks, contents.others

    def read(self, name: str, parts: Sequence[tuple[Shape, Tensor]]) -> None:
        """Read the boxes from each chunk. A chunk that is not in row-major order is read as a whole."""
        dtype = self.tensors[name].dtype
        for chunk in self.chunks[name]:
            block, wanted = chunk.block, []
            for offset, out in parts:
                if (box := overlap(block, Block(offset, tuple(out.shape), 0))) is not None:
                    corner = tuple(a - o for a, o in zip(box[0], block.offset, strict=True))
                    wanted.append((corner, cut_box(out, box, offset)))
            if wanted:
                with self._open(chunk.where.file) as file:
                    data = self._find(file, name, chunk)
                    if data.contiguous(block.shape):
                        for corner, out in wanted:
                            read_box(file, data.begin, block.shape, corner, out, dtype)
                    else:
                        MemorySource(name, {name: read_strided(file, data, block.shape, dtype)}).read(name, wanted)

    def check_dense(self) -> None:
        """Refuse files that consist almost only of holes, before memory is allocated by their sizes."""
        for name in {chunk.where.file for chunks in self.chunks.values() for chunk in chunks}:
            with self._open(name) as file:
                file.check_dense()

    def _open(self, name: str) -> AbstractContextManager[File]:
        return open_file(self.name, name, folder_link=True, refuse=unusable)

    def _find(self, file: File, name: str, chunk: Chunk) -> StridedData:
        """A chunk's elements in its file, where the archive and the metadata agree on dtype and shape."""
        stored, end = self.tensors[name], chunk.where.begin + chunk.where.length
        here = f"{file.path}, bytes {chunk.where.begin} to {end}, the chunk of {name} at {list(chunk.block.offset)},"
        try:
            dtype, shape, data = find_tensor(file, chunk.where.begin, chunk.where.length)
        except ValueError as error:
            raise DamagedError(f"{here} is not a whole tensor of torch.save: {printable(str(error))}") from error
        if shape != chunk.block.shape or dtype != stored.dtype:
            raise DamagedError(
                f"{here} holds {dtype} {list(shape)}, and the metadata says {stored.dtype} {list(chunk.block.shape)}: "
                f"the folder is damaged, or was changed"
            )
        return data


def _under(source: TensorSource, key: str, other: str | None) -> TensorSource:
    """The tensors under a key of the job's state dict."""
    found = PrefixSource(source, f"{key}." if key else "", f"{other}." if other and not key else None)
    if not found.tensors:
        keys = ", ".join(repr(key) for key in dict.fromkeys(name.partition(".")[0] for name in source.tensors))
        raise TreeError(
            f"{source.name} holds nothing under {key!r}; its names begin with {keys}: give the keys under which the "
            f"job saved its model and its optimizer as model= and optimizer=, or optimizer=None to start that anew"
        )
    return found
