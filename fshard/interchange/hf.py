"""Models of Hugging Face: safetensors read straight into shards, and written so that ``transformers`` loads them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fshard.arguments import Want, expect
from fshard.checkpoint.problems import unreachable
from fshard.errors import CheckpointError, PlanError, lines
from fshard.interchange.folders import (
    INDEX,
    Folder,
    Writer,
    fill_files,
    numbered,
    size_in_bytes,
    stale,
    write_json,
)
from fshard.interchange.parcels import ROLE, Parcel, fetch, pack
from fshard.interchange.rename import RenameLike
from fshard.interchange.source import Stored, load
from fshard.interchange.stream import listing
from fshard.optim.base import Optimizer
from fshard.runtime.comm import first_rank_or_raise, mesh_lane
from fshard.sharding.plan import Plan
from fshard.state.init import Inits
from fshard.state.train_state import TrainState


def load_hf(
    plan: Plan,
    opt: Optimizer,
    path: str | os.PathLike[str],
    *,
    rename: Sequence[RenameLike] = (),
    init: Inits = (),
    seed: int = 0,
    cast: bool = False,
) -> TrainState:
    """A train state whose parameters are those of a Hugging Face model. Local: no rank talks to another.

    Each rank maps the files and copies what it holds: no rank reads, or ever holds, the whole model.

    Args:
        plan: the plan. Split from a ``transformers`` module, its paths are the names in the files, up to the prefix of
            the base model, which some files lack.
        opt: the optimizer, whose state starts anew.
        path: a folder with ``model.safetensors`` or ``model.safetensors.index.json``, or one ``.safetensors`` file.
        rename: rules from names in the files to paths: ``(pattern, path)`` or ``fs.Rename``. The first one that
            matches a whole name decides; ``(pattern, None)`` leaves a tensor out.
        init: ``(pattern, initializer)`` rules for leaves that the files do not have, such as a new head.
        seed: of those values, and of random numbers inside of steps.
        cast: whether floating-point tensors may be rounded to the leaf's dtype. Widening is always fine.

    Raises:
        CheckpointError: no such files, or none that can be read; ``DamagedError`` if they are not whole.
        PlanError: a rule that cannot be, or that decides nothing.
        TreeError: tensors are missing, unexpected, misshapen or would be rounded, all in one report; rules give two
            tensors one name; tied leaves have two values.

    >>> import fshard as fs, safetensors.torch, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> safetensors.torch.save_file({"net.w": torch.ones(2, 3)}, f"{folder}/model.safetensors")
    >>> plan = fs.make_plan({"w": torch.empty(2, 3)}, fs.make_mesh((-1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    >>> fs.load_hf(plan, fs.optim.sgd(0.1), folder, rename=[(r"net\\.(.*)", r"\\1")]).params["w"].sum()
    tensor(6.)
    """
    wants: list[Want] = [
        ("plan", plan, Plan, "what fs.make_plan returned"),
        ("path", path, (str, os.PathLike), "a folder or a file"),
    ]
    expect("load_hf(plan, opt, path)", wants)
    return load(plan, opt, Folder(path), rename=rename, init=init, seed=seed, cast=cast)


def save_hf(
    state: TrainState | Mapping[str, Any],
    path: str | os.PathLike[str],
    plan: Plan | None = None,
    *,
    rename: Sequence[RenameLike] = (),
    config: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> None:
    """Write parameters as a folder that ``from_pretrained`` of ``transformers`` loads. Collective.

    Rank 0 writes, tensor by tensor as they are gathered, and holds no more than one at a time. Files get their names
    when all of them are complete. Tied leaves are written once, under their first name, as ``transformers`` does.

    Args:
        state: a state, or a tree such as ``state.params`` together with ``plan``.
        path: the folder; it is made if it is not there. Rank 0 must reach it.
        plan: the plan of a tree.
        rename: rules from paths to names in the files.
        config: written as ``config.json``: a ``transformers`` config, or a dict.
        dtype: what floating-point leaves are cast to, such as ``torch.bfloat16``.
        max_shard_size: bytes of a file at most, such as ``"5GB"``; what takes more gets several files and an index.
        overwrite: whether weights that lie in the folder already may be removed, once the new ones are complete.

    Raises:
        CheckpointError: the folder holds weights already, or cannot be written to; on all ranks alike. What was there
            is as it was.
        PlanError, TreeError: as ``export``.

    >>> import fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("shard",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("shard"))])
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_hf({"w": w.flatten()}, folder, plan, config={"model_type": "mine"})
    ...     sorted(path.name for path in pathlib.Path(folder).iterdir())
    ['config.json', 'model.safetensors']
    """
    expect("save_hf(state, path)", [("path", path, (str, os.PathLike), "a folder")])
    limit = size_in_bytes(max_shard_size)
    settings = _settings(config)
    plan, listed, alive = listing(state, plan, "params")
    parcels = pack(plan, listed, to=0, axes="all", dtype=dtype, rename=rename)
    parcels.sort(key=lambda parcel: -parcel.dtype.itemsize)  # then every element of a file is aligned
    lane, rank = mesh_lane(plan.mesh, ROLE), plan.mesh.rank
    job = _Job(Path(path), parcels, limit, settings, overwrite)
    first_rank_or_raise(lane, rank, job.prepare)
    failure: Exception | None = None
    for parcel in parcels:
        alive()
        tensor = fetch(plan.mesh, parcel)
        try:
            if tensor is not None and failure is None:
                job.take(parcel.name, tensor)
        except Exception as error:  # the others are waiting for this rank's part of the stream
            failure = error
    try:
        first_rank_or_raise(lane, rank, lambda: job.finish(failure))
    except BaseException:
        job.discard()
        raise


class _Job:
    """The files of one ``save_hf``, on the rank that writes them."""

    def __init__(self, folder: Path, parcels: Sequence[Parcel], limit: int, config: Any, overwrite: bool) -> None:
        self.folder, self.config, self.overwrite = folder, config, overwrite
        stored = {parcel.name: Stored(parcel.shape, parcel.dtype) for parcel in parcels}
        self.parts = fill_files(stored, limit)
        self.names = numbered(len(self.parts))
        self.done: list[Writer] = []
        self.old: list[Path] = []
        self.total = sum(torch.Size(s.shape).numel() * s.dtype.itemsize for s in stored.values())

    def prepare(self) -> None:
        """See that there is a folder, without weights that may not go."""
        self.old = stale(self.folder)
        if self.old and not self.overwrite:
            names = [file.name for file in self.old]
            remedy = "Write to another folder, or pass overwrite=True to replace them."
            raise CheckpointError(lines(f"{self.folder} holds weights already:", names, remedy))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unreachable(str(self.folder), "write to", error) from error

    def take(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor."""
        if not self.done or name not in self.parts[len(self.done) - 1]:
            self._next()
        self.done[-1].write(name, tensor)

    def finish(self, failure: Exception | None) -> None:
        """Let all files be seen, if nothing failed."""
        try:
            if failure is not None:
                raise failure
            self._publish()
        except OSError as error:
            raise unreachable(str(self.folder), "write to", error) from error

    def _publish(self) -> None:
        self.done[-1].close()
        for writer in self.done:
            writer.publish()
        if len(self.names) > 1:
            weights = {name: file for part, file in zip(self.parts, self.names, strict=True) for name in part}
            write_json(self.folder / INDEX, {"metadata": {"total_size": self.total}, "weight_map": weights})
        for file in self.old:
            if file.name not in self.names and not (file.name == INDEX and len(self.names) > 1):
                file.unlink()
        if self.config is not None:
            write_json(self.folder / "config.json", self.config)

    def discard(self) -> None:
        """Leave the folder as it was."""
        for writer in self.done:
            writer.discard()

    def _next(self) -> None:
        if self.done:
            self.done[-1].close()
        number = len(self.done)
        self.done.append(Writer(self.folder / self.names[number], self.parts[number], {"format": "pt"}))


def _settings(config: Any) -> Any:
    """What goes into ``config.json``."""
    found = config.to_dict() if hasattr(config, "to_dict") else config
    if found is not None and not isinstance(found, Mapping):
        raise PlanError(f"config={type(config).__name__} must be a config of transformers, or a dict")
    return None if found is None else dict(found)
