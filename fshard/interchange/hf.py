"""Models of Hugging Face: safetensors read into shards, and written so that ``transformers`` loads them."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fshard.arguments import expect
from fshard.checkpoint.tensorfile import TensorMeta
from fshard.errors import PlanError
from fshard.interchange.export import deliver, export_entries, on_one_replica, stream
from fshard.interchange.export_plan import ROLE, plan_export
from fshard.interchange.hf_files import HfFiles, HfWriter, size_in_bytes
from fshard.interchange.rename import RenameLike
from fshard.interchange.source import load
from fshard.optim.base import Optimizer
from fshard.played.everywhere import called_on_each_rank
from fshard.runtime.comm import collective_call, first_rank_or_raise, mesh_communicator
from fshard.sharding.plan import Plan
from fshard.state.init import Inits
from fshard.state.pieces import Entry
from fshard.state.train_state import TrainState


@called_on_each_rank
def load_hf(
    path: str | os.PathLike[str],
    plan: Plan,
    opt: Optimizer | None = None,
    *,
    rename: Sequence[RenameLike] = (),
    init: Inits = (),
    seed: int = 0,
    cast: bool = False,
) -> TrainState:
    """A train state with the parameters of a Hugging Face model. Local: ranks do not communicate.

    Each rank reads its own part of the files: no rank reads or holds the whole model.

    Args:
        path: a folder with ``model.safetensors`` or ``model.safetensors.index.json``, or one ``.safetensors`` file.
        plan: the plan. If it was split from a ``transformers`` module, its paths are the names in the files, up to the
            prefix of the base model, which some files lack.
        opt: the optimizer, whose state starts anew; None for parameters alone: a state for eval steps, such as a frozen
            reference model, whose ``params`` are the tree of shards.
        rename: rules from names in the files to paths: ``(pattern, path)`` or ``fs.io.Rename``. The first rule that
            matches a whole name applies; ``(pattern, None)`` leaves a tensor out.
        init: ``(pattern, initializer)`` rules for leaves that the files do not have, such as a new head.
        seed: the seed of these values, and of random numbers inside of steps.
        cast: whether floating-point tensors may be rounded to the leaf's dtype. Widening is always allowed.

    Raises:
        CheckpointError: the files do not exist or cannot be read; ``DamagedError`` if they are incomplete.
        PlanError: an invalid rule, or one that matches nothing.
        TreeError: tensors are missing, unexpected, misshapen or would be rounded, all in one report; rules give two
            tensors one name; tied leaves have different values.

    >>> import fshard as fs, safetensors.torch, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> safetensors.torch.save_file({"net.w": torch.ones(2, 3)}, f"{folder}/model.safetensors")
    >>> plan = fs.make_plan({"w": torch.empty(2, 3)}, fs.make_mesh((-1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> fs.io.load_hf(folder, plan, fs.optim.sgd(0.1), rename=[(r"net\\.(.*)", r"\\1")]).params["w"].sum()
    tensor(6.)
    """
    expect(
        "load_hf(path, plan, opt)",
        [("path", path, (str, os.PathLike), "a folder or a file"), ("plan", plan, Plan, "what fs.make_plan returned")],
    )
    return load(plan, opt, HfFiles(path), rename=rename, init=init, seed=seed, cast=cast)


@called_on_each_rank
@collective_call
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

    Rank 0 writes each tensor when it is gathered, and holds one at a time. The files get their names when all of them
    are complete. Tied leaves are written once, under their first name, as ``transformers`` does. Replicas that train
    apart (``fs.outer``) write what they agree on: ``fs.averaged(state, "anchor")``.

    Args:
        state: a state, or a tree such as ``state.params`` together with ``plan``.
        path: the folder, which rank 0 makes if it does not exist.
        plan: the plan of a tree.
        rename: rules from paths to names in the files.
        config: a ``transformers`` config, or a dict, to write as ``config.json``.
        dtype: the dtype to which floating-point leaves are cast, such as ``torch.bfloat16``.
        max_shard_size: the most bytes of a file, such as ``"5GB"``; a larger model gets several files and an index.
        overwrite: whether weights in the folder may be removed once the new ones are complete.

    Raises:
        CheckpointError: the folder holds weights, or cannot be written to; equal on all ranks. The folder's files are
            as they were.
        PlanError, TreeError: as ``export``.

    >>> import fshard as fs
    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_hf({"w": w.flatten()}, folder, plan, config={"model_type": "mine"})
    ...     sorted(path.name for path in pathlib.Path(folder).iterdir())
    ['config.json', 'model.safetensors']
    """
    expect("save_hf(state, path)", [("path", path, (str, os.PathLike), "a folder")])
    limit = size_in_bytes(max_shard_size)
    settings = config.to_dict() if hasattr(config, "to_dict") else config
    if settings is not None and not isinstance(settings, Mapping):
        raise PlanError(f"config={type(settings).__name__} must be a config of transformers, or a dict")
    plan, listed, check_alive = export_entries(state, plan, "params")

    def write() -> None:
        _write(plan, listed, check_alive, HfOptions(Path(path), tuple(rename), settings, dtype, limit, overwrite))

    on_one_replica(plan, listed, "save_hf", write)


class HfOptions(NamedTuple):
    """How a model is written: where, under which names, with which config, in which dtype, in files of which size."""

    path: Path
    rename: Sequence[RenameLike]
    settings: Mapping[str, Any] | None
    dtype: torch.dtype | None
    limit: int
    overwrite: bool


def _write(plan: Plan, listed: Sequence[Entry], check_alive: Callable[[], object], options: HfOptions) -> None:
    """Write the entries of a plan. Collective."""
    path, rename, settings, dtype, limit, overwrite = options
    items = plan_export(plan, listed, to=0, axes="all", dtype=dtype, rename=rename)
    items.sort(key=lambda item: -item.dtype.itemsize)  # aligns every element of a file
    tensors = {item.name: TensorMeta(item.shape, item.dtype) for item in items}
    writer = HfWriter(path, tensors, limit, overwrite)
    comm, rank = mesh_communicator(plan.mesh, ROLE), plan.mesh.rank

    def publish() -> None:
        if failure is not None:
            raise failure
        writer.publish(settings)

    try:
        first_rank_or_raise(comm, rank, writer.prepare)
        failure = deliver(stream(items, check_alive), lambda pair: writer.write(*pair))
        first_rank_or_raise(comm, rank, publish)
    finally:
        writer.discard()
