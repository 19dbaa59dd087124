"""Checks of keys that belong together, and what a config's sources are."""

from collections.abc import Iterator
from pathlib import Path

from fshard.errors import PlanError, lines
from fshard.model import initial_values
from fshard.recipe.read_config import REMEDY, ReadConfig, flat
from fshard.recipe.train_config import TrainConfig


def check_config(read: ReadConfig) -> None:
    """Refuse keys that do not fit together.

    Raises:
        PlanError: naming the place of each key, its value, and what to give.
    """
    values = flat(read.config)
    problems = [f"{read.place(key)}: {key} = {values[key]!r}: {text}" for key, text in _problems(read.config)]
    if problems:
        raise PlanError(lines("the config cannot be used:", problems, REMEDY))


def _problems(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """The keys that do not fit to others, and what to give."""
    kind, data, mesh, rate, track = config.objective.kind, config.data, config.mesh, config.rate, config.track
    needs_out = ["track.tensorboard"] * track.tensorboard + ["checkpoints.every"] * (config.checkpoints.every > 0)
    total = config.steps if rate.total == 0 else rate.total
    tests = {
        ("model.source", "give FILE.py:FUNCTION, a config.json, or a model of Hugging Face"): not config.model.source,
        ("objective.kind", "it needs records: give data.source files of JSON lines or parquet"): (
            kind != "next-token" and source_format(config) == "text"
        ),
        ("data.rows", f"is for next-token alone: drop it for {kind!r}"): data.rows != "packed" and kind != "next-token",
        ("data.source", "give one data set of Hugging Face, and its configuration if it has several"): (
            data.format == "huggingface" and len(data.source) not in (1, 2)
        ),
        ("optimizer.name", "it trains whole matrices: give adamw with model.lora"): (
            config.model.lora.rank > 0 and config.optimizer.name == "muon"
        ),
        ("optimizer.betas", "give two numbers, each 0 or more and below 1"): (
            len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas)
        ),
        ("mesh.axes", f"give a name for each of the {len(mesh.shape)} sizes of mesh.shape"): (
            len(mesh.shape) != len(mesh.axes)
        ),
        ("mesh.batch", f"give some of mesh.axes, {', '.join(mesh.axes)}"): not {*mesh.batch} <= {*mesh.axes},
        ("rate.warmup", f"give fewer steps than the {total} of the run"): rate.kind != "constant"
        and rate.warmup >= total,
        ("rate.floor", f"give at most rate.peak = {rate.peak}"): rate.kind != "constant" and rate.floor > rate.peak,
    }
    yield from (found for found, wrong in tests.items() if wrong)
    yield from ((key, "it writes to a folder: give out") for key in needs_out if not config.out)
    yield from _rows(config)
    yield from _stages(config)


def _stages(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Problems of the stages of a pipeline."""
    mesh, order = config.mesh, config.step.pipeline
    if mesh.stages and (mesh.stages not in mesh.axes or mesh.stages in mesh.batch or len(mesh.axes) < 2):
        yield "mesh.stages", f"give one of mesh.axes, {', '.join(mesh.axes)}, and another for the batch"
    if order and not mesh.stages:
        yield "step.pipeline", "orders are those of stages: give mesh.stages"
    if order and config.step.schedule == "auto":
        yield "step.schedule", "it chooses the order: leave step.pipeline out"
    for row in mesh.leaves:
        if len(row) < 2 or not isinstance(row[0], str) or not all(type(stage) is int for stage in row[1:]):
            yield (
                "mesh.leaves",
                f"{list(row)} is no leaf of stages: give [pattern, stage, ...], as ['embed.*', 0, -1]",
            )


def _rows(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Problems of rules and first values."""
    kinds = {"fsdp": range(1, 9), "replicated": range(1, 2), "dims": range(2, 9)}
    for rule in config.mesh.rules:
        if len(rule) < 2 or len(rule) - 1 not in kinds.get(rule[1], ()):
            forms = '[pattern, "fsdp", axis...], [pattern, "replicated"] or [pattern, "dims", axis or "", ...]'
            yield "mesh.rules", f"{list(rule)} is no rule: give {forms}"
    names = [name for name in initial_values.__all__ if name.islower()]
    for value in config.model.init:
        if len(value) < 2 or value[1] not in names:
            yield "model.init", f"{list(value)} is no value: give [pattern, one of {', '.join(names)}, its numbers...]"


def data_axes(config: TrainConfig) -> tuple[str, ...]:
    """The axes over which a batch is cut."""
    mesh = config.mesh
    return mesh.batch or tuple(axis for axis in mesh.axes if axis != mesh.stages)


def source_format(config: TrainConfig) -> str:
    """The format of the data: as it says, or by the name of its first source."""
    data = config.data
    if data.format != "auto":
        return data.format
    ends = {"jsonl": "jsonl", "ndjson": "jsonl", "parquet": "parquet"}
    return ends.get(data.source[0].rpartition(".")[2], "text") if data.source else "text"


def is_function(config: TrainConfig) -> bool:
    """Tell whether the model is a function of a file."""
    file, colon, _ = config.model.source.rpartition(":")
    return bool(colon) and file.endswith(".py")


def tokenizer(config: TrainConfig) -> str:
    """The tokenizer: as the config says, or that of the model if its weights are read, or else bytes."""
    name = config.data.tokenizer
    return name if name != "auto" else config.model.source if reads_weights(config) else "bytes"


def reads_weights(config: TrainConfig) -> bool:
    """Tell whether a model of Hugging Face has values to start from, and the config wants them."""
    source, ends = Path(config.model.source), (".safetensors", ".bin", ".pt", ".index.json")
    if config.model.weights == "fresh" or is_function(config) or source.is_file():
        return False
    return not source.is_dir() or any(path.name.endswith(ends) for path in source.iterdir())
