"""``fs.train``: runs the script of a config, writes the config as TOML, and says which key a failure is about."""

import ast
import json
import linecache
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from fshard.arguments import Want, expect, raised
from fshard.checkpoint.checkpointer import Checkpointer
from fshard.errors import CheckpointError, PlanError, ShardError, TreeError, lines, missing_extra
from fshard.launch import make_mesh
from fshard.recipe.config_checks import check_config, data_axes, reads_weights
from fshard.recipe.read_config import ReadConfig, flat, keys, read_config, type_text
from fshard.recipe.train_config import TrainConfig
from fshard.recipe.train_script import script_of
from fshard.sharding.mesh import Mesh, abstract_mesh, resolve_sizes
from fshard.state.init import first_values
from fshard.state.train_state import TrainState
from fshard.training.train_step import TrainStep
from fshard.writing import write_whole

ABOUT = {
    "make_tokens": ("data.tokenizer", "give bytes, or a name or folder of Hugging Face"),
    "read_data": ("data.source", "give other files, or data.format"),
    "make_model": ("model.source", "give FILE.py:FUNCTION, a config.json, or a folder or name of Hugging Face"),
    "make_plan": ("mesh.rules", "give other rules"),
    "make_step": ("optimizer", "give other values"),
    "make_trackers": ("track", "give other values"),
}
"""The functions of a script: the key that a failure in each is about, and what to do if the failure does not say."""

USUAL = (ShardError, ImportError, OSError, ValueError, LookupError)
"""Failures that a config leads to; others are defects, except in the code of a model."""


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
    script = loaded(read)
    with about(read, "mesh.shape"):
        mesh = make_mesh(read.config.mesh.shape, read.config.mesh.axes)
    with mesh:
        _check_batch(read, mesh)
        with about(read, "out", "give another folder", (CheckpointError, TreeError, OSError)):
            if read.config.out and mesh.rank == 0:
                Path(read.config.out).mkdir(parents=True, exist_ok=True)
                write_whole(Path(read.config.out) / "config.toml", to_toml(read.config))
            state: TrainState = script["train"](mesh)
    return state


@contextmanager
def about(read: ReadConfig, name: str, remedy: str = "", kinds: Any = USUAL) -> Iterator[None]:
    """Say which key, of which line, a failure is about, its value, and what to do if the failure does not say."""
    try:
        yield
    except (Exception, SystemExit) as error:
        known = isinstance(error, kinds) or name == "model.source" or "fs.Stages(" in str(error)
        if not known or "told" in vars(error):  # by a function that this one calls
            raise
        values, text = flat(read.config), _told(error, remedy)
        table = name.rpartition(".")[0]  # a failure may begin with the name of its argument, such as units
        names = {key[len(table) + 1 :]: key for key in values if key.rpartition(".")[0] == table}
        keys = [key for last, key in names.items() if text.startswith(last) or f"({last}=)" in text]
        name = [*keys, name][0]
        place = f"{read.place(name)}: {name}{f' = {values[name]!r}' if name in values else ''}: "
        kind = ImportError if isinstance(error, ImportError) else PlanError
        found = kind(place + in_keys(text))
        vars(found).update(told=True)
        raise found from error


def in_keys(text: str) -> str:
    """A failure that names ``fs.Stages``, in the words of a config.

    >>> in_keys("give fs.Stages(axis, leaves=[('norm', 1), ('table', (0, 1))]).")
    'give mesh.leaves = [["norm", 1], ["table", 0, 1]].'
    """

    def key(found: re.Match[str]) -> str:
        pairs = [pair for pair in ast.literal_eval(found[1]) if pair is not ...]
        rows = [[pattern, *(stages if isinstance(stages, tuple) else [stages])] for pattern, stages in pairs]
        return f"mesh.leaves = {json.dumps(rows)}"

    text = re.sub(r"fs\.Stages\(axis, leaves=(\[.*\])\)", key, text)
    return text.replace("fs.Stages(leaves=)", "mesh.leaves").replace(
        "fs.Stages(axis, cut=(2, 3))", "in a script (--emit-script), fs.Stages(axis, cut=(2, 3))"
    )


def _told(error: BaseException, remedy: str) -> str:
    """A failure in words, with a remedy."""
    text, name = str(error), (getattr(error, "name", None) or "").partition(".")[0]
    if name in ("transformers", "huggingface_hub", "datasets", "pyarrow"):
        return str(missing_extra("it", name, "recipe"))
    if isinstance(error, ImportError) and "pip install" not in text:
        return f"{text}: install it"
    if isinstance(error, ShardError | ImportError) or ": give " in text:
        return text
    if isinstance(error, OSError) and error.filename:
        text = f"{error.strerror}: {os.fspath(error.filename)!r}"
    elif isinstance(error, OSError | ValueError) and text:
        text = text.splitlines()[0].strip().rstrip(".:")
    else:
        text = raised(error)
    return f"{text}: {remedy}"


def loaded(read: ReadConfig) -> dict[str, Any]:
    """The functions of a config's script, which say what a failure is about. Tracebacks show its lines."""
    check_config(read)
    _check_run(read)
    text, name = script_of(read.config), f"<script of {read.file or 'a config'}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    script: dict[str, Any] = {"__name__": name}
    exec(compile(text, name, "exec"), script)
    script |= {name: about(read, *told)(script[name]) for name, told in ABOUT.items()}
    return script


def _check_run(read: ReadConfig) -> None:
    """Refuse a folder that cannot be one of a run, or that has checkpoints of another run."""
    out = Path(read.config.out)
    there = next(each for each in (out, *out.parents) if os.path.lexists(each))
    if read.config.out and not (there.is_dir() and os.access(there, os.W_OK)):
        raise PlanError(f"{read.place('out')}: out = {read.config.out!r}: no folder can be there: give another path")
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
    ranks = mesh.axis_size(data_axes(config))
    if config.batch % (ranks * config.step.accumulate):
        parts = f"{ranks} ranks x step.accumulate = {config.step.accumulate}"
        raise PlanError(f"{read.place('batch')}: batch = {config.batch}: must be a multiple of {parts}")


def planned(read: ReadConfig, ranks: int) -> tuple[TrainStep, Any]:
    """The train step on so many ranks, and a rank's batch, without processes. It is traced once.

    Raises:
        PlanError: anything in the config that the run would fail by, with its line.
    """
    check_config(read)
    config = read.config
    # ``auto`` chooses by what the first step measures: the default stands for it.
    script = loaded(replace(read, config=replace(config, step=replace(config.step, schedule="default"))))
    with about(read, "mesh.shape", f"give sizes for {ranks} ranks"):
        sizes = resolve_sizes(config.mesh.shape, config.mesh.axes, ranks)
        mesh = abstract_mesh(sizes, config.mesh.axes)
    _check_batch(read, mesh)
    model, (rows, _) = script["make_model"](), script["read_data"]()
    script["make_trackers"]()
    plan = script["make_plan"](model, mesh)
    step: TrainStep = script["make_step"](model, plan)
    if not reads_weights(config):
        with about(read, "model.init", "give other first values"):
            first_values(plan, script["first_values"](model))
    batch = plan.local_batch(script["on_device"]([rows[i] for i in range(config.batch)], mesh.device))
    if config.objective.kind == "dpo":
        batch["before"] = torch.zeros(len(batch["tokens"]), device="cpu")
    with about(read, "model.source", "give a model of tokens that returns logits"):
        step.trace(batch)
    return step, batch


def to_toml(config: TrainConfig) -> str:
    """A config as TOML, with every key."""
    out, table = [], ""
    for name, value in flat(config).items():
        head, _, last = name.rpartition(".")
        if head != table:
            out.append(f"\n[{head}]")
            table = head
        out.append(f"{last} = {value_text(value)}")
    return "\n".join(out) + "\n"


def value_text(value: Any) -> str:
    """A value as TOML.

    >>> value_text({"depth": 2, "b c": [1.0, True]})
    '{ depth = 2, "b c" = [1.0, true] }'
    """
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key_text(name)} = {value_text(each)}" for name, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _key_text(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def key_table() -> Iterator[tuple[str, str, str, str]]:
    """Every key with its type, its default and a line of help."""
    defaults = flat(TrainConfig())
    for name, each in keys(TrainConfig):
        kinds = each.metadata.get("choices") or (type_text(each.type).removeprefix("a "),)
        yield name, " | ".join(kinds), value_text(defaults[name]), each.metadata["help"]


def changed_meaning(before: TrainConfig, now: TrainConfig) -> list[str]:
    """The keys in which two configs mean different runs, with both values. The steps count where the rate needs them.

    >>> from dataclasses import replace
    >>> changed_meaning(TrainConfig(), replace(TrainConfig(), seed=1, out="runs/b"))
    ['seed: the run has 0, and the config now 1']
    """
    tables = {each.name for each in fields(TrainConfig) if each.metadata.get("free")}  # may change as a whole
    free = {name for name, each in keys(TrainConfig) if each.metadata.get("free") or name.partition(".")[0] in tables}
    told = {"rate.total": lambda config: config.rate.total or config.steps}
    out, old_values = [], flat(before)
    for name, value in flat(now).items():
        old = old_values[name]
        if name in told and now.rate.kind != "constant":
            old, value = told[name](before), told[name](now)
        if old != value and name not in free:
            out.append(f"{name}: the run has {value_text(old)}, and the config now {value_text(value)}")
    return out
