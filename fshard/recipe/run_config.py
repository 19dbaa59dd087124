"""``fs.train``: runs the script of a config, and says which key a failure is about."""

import linecache
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from fshard import tree
from fshard.arguments import Want, expect, raised
from fshard.checkpoint.checkpointer import Checkpointer
from fshard.errors import PlanError, ShardError, lines
from fshard.launch import make_mesh
from fshard.recipe.config_text import changed_meaning, to_toml
from fshard.recipe.read_config import ReadConfig, read_config
from fshard.recipe.train_config import TrainConfig
from fshard.recipe.train_script import script_of
from fshard.sharding.mesh import Mesh, abstract_mesh, resolve_sizes
from fshard.state.train_state import TrainState
from fshard.training.train_step import TrainStep
from fshard.writing import write_whole

ABOUT = {
    "make_tokens": "data.tokenizer",
    "read_data": "data.source",
    "make_model": "model.source",
    "make_plan": "mesh.rules",
    "make_step": "optimizer",
}
"""The functions of a script, and the key that a failure in each is about."""


def train(config: str | os.PathLike[str] | dict[str, Any] | TrainConfig, changes: Sequence[str] = ()) -> TrainState:
    """Train as a config says, and return the last state. The command is ``fshard train``.

    It trains on the ranks that it finds itself among, as ``fs.make_mesh`` does. With ``out`` in the config, the same
    call goes on from the newest checkpoint there.

    Args:
        config: a TOML file, or a dict with the same keys. ``fshard train --help`` lists them.
        changes: ``key=value``, in place of what the config says.

    Raises:
        PlanError: a key, a value, a file or a mesh that cannot be used, with the line of the config; or the run in
            ``out`` is another one.
        ImportError: the library of an extra is missing.

    Example::

        state = fs.train("examples/configs/pretrain.toml", ["steps=20", "out=runs/gpt"])
    """
    wants: list[Want] = [
        ("config", config, (str, os.PathLike, dict, TrainConfig), "a TOML file, or a dict with its keys"),
        ("changes", changes, (list, tuple), 'a list, such as ["steps=20"]'),
    ]
    expect("train(config, changes)", wants)
    read = read_config(config, changes)
    _check_run(read)
    script = loaded(read)
    with about(read, "mesh.shape"):
        mesh = make_mesh(read.config.mesh.shape, read.config.mesh.axes)
    with mesh:
        _check_batch(read, mesh)
        if read.config.out and mesh.rank == 0:
            Path(read.config.out).mkdir(parents=True, exist_ok=True)
            write_whole(Path(read.config.out) / "config.toml", to_toml(read.config))
        state: TrainState = script["train"](mesh)
    return state


@contextmanager
def about(read: ReadConfig, name: str) -> Iterator[None]:
    """Say which key, of which line, a failure is about."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, ShardError | ImportError | OSError) or name == "model.source"
        if not known or "told" in vars(error):  # by a function that this one calls
            raise
        kind = ImportError if isinstance(error, ImportError) else PlanError
        told = str(error) if isinstance(error, ShardError | ImportError) else raised(error)
        found = kind(f"{read.place(name)}: {name + ': ' if name else ''}{told}")
        vars(found).update(told=True)
        raise found from error


def loaded(read: ReadConfig) -> dict[str, Any]:
    """The functions of a config's script, which say what a failure is about. Tracebacks show its lines."""
    with about(read, ""):
        text = script_of(read.config)
    name = f"<script of {read.file or 'a config'}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    script: dict[str, Any] = {"__name__": name}
    exec(compile(text, name, "exec"), script)
    script |= {name: about(read, key)(script[name]) for name, key in ABOUT.items()}
    return script


def _check_run(read: ReadConfig) -> None:
    """Refuse a config that means another run than the one whose checkpoints are in its folder."""
    saved = Path(read.config.out) / "config.toml"
    if read.config.out and saved.is_file() and Checkpointer(saved.with_name("checkpoints")).steps():
        changed = changed_meaning(read_config(saved).config, read.config)
        if changed:
            problems = [f"{read.place(line.partition(':')[0])}: {line}" for line in changed]
            remedy = f"Give these keys the values of {saved}, or another folder as out."
            raise PlanError(lines(f"the run in {read.config.out} is another one:", problems, remedy))


def _check_batch(read: ReadConfig, mesh: Mesh) -> None:
    """Refuse a batch that ranks and microbatches cannot share."""
    config = read.config
    ranks = mesh.axis_size(config.mesh.batch or mesh.axis_names)
    if config.batch % (ranks * config.step.accumulate):
        parts = f"{ranks} ranks x step.accumulate = {config.step.accumulate}"
        raise PlanError(f"{read.place('batch')}: batch = {config.batch}: must be a multiple of {parts}")


def planned(read: ReadConfig, ranks: int) -> tuple[TrainStep, Any]:
    """The train step on so many ranks, and a rank's batch, without processes. It is traced once.

    Raises:
        PlanError: anything in the config that the run would fail by, with its line.
    """
    config, script = read.config, loaded(read)
    _check_run(read)
    with about(read, "mesh.shape"):
        mesh = abstract_mesh(resolve_sizes(config.mesh.shape, config.mesh.axes, ranks), config.mesh.axes)
    _check_batch(read, mesh)
    model, (rows, _) = script["make_model"](), script["read_data"]()
    plan = script["make_plan"](model, mesh)
    step = script["make_step"](model, plan)
    batch = default_collate([rows[i % len(rows)] for i in range(config.batch)])
    batch = plan.local_batch(tree.mapped(lambda x: x.long(), batch))
    if config.objective.kind == "dpo":
        batch["before"] = torch.zeros(len(batch["tokens"]), device="cpu")
    with about(read, "model.source"):
        step.trace(batch)
    return step, batch
