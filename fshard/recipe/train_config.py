"""The keys of a config: a tree of frozen dataclasses, which is the schema, the help and the defaults in one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fshard.pipeline.named_orders import ORDERS

T = TypeVar("T")

VERSION = 1
"""The version of configs that this library reads."""


def key(
    default: T,
    text: str,
    *,
    choices: Sequence[str] = (),
    least: float | None = None,
    below: float | None = None,
    free: bool = False,
) -> T:
    """A key of a config.

    Args:
        default: its default, which also says its type.
        text: a line of help.
        choices: the values that it may have; none for any.
        least: the least number that it may be.
        below: the number that it must be below.
        free: whether a run may go on with another value.
    """
    more = {"choices": tuple(choices), "least": least, "below": below, "free": free}
    return field(default=default, metadata={"help": text, **more})


def table(cls: type[T], *, free: bool = False) -> T:
    """A table of keys. With ``free`` all of its keys may change from one start of a run to the next."""
    return field(default_factory=cls, metadata={"free": free})


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside frozen weights."""

    rank: int = key(0, "rank of the adapters; 0 trains the weights themselves", least=0)
    alpha: float = key(16.0, "adapters count with alpha / rank")
    targets: tuple[str, ...] = key((), "patterns of the paths with adapters; none: all matrices of units")


@dataclass(frozen=True)
class ModelConfig:
    """The model."""

    source: str = key("", "FILE.py:FUNCTION, a config.json, or a folder or name of Hugging Face; required")
    options: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "keyword arguments of FUNCTION, or changes of a Hugging Face config"}
    )
    weights: str = key("auto", "where values come from; auto: read, if the source has any", choices=("auto", "fresh"))
    init: tuple[tuple[Any, ...], ...] = key((), 'fresh values: [[pattern, "normal", std], [pattern, "ones"], ...]')
    units: tuple[str, ...] = key(("auto",), "globs of the modules that are gathered as a whole; auto finds them")
    lora: LoraConfig = table(LoraConfig)


@dataclass(frozen=True)
class DataConfig:
    """The data."""

    source: tuple[str, ...] = key((), "files, folders or globs, or one Hugging Face data set; none: CPython's docs")
    format: str = key(
        "auto", "kind of the source; auto: by its name", choices=("auto", "text", "jsonl", "parquet", "huggingface")
    )
    split: str = key("train", "split of a Hugging Face data set")
    tokenizer: str = key(
        "auto", "bytes, or one of Hugging Face; auto: the model's, if its weights are read, else bytes"
    )
    text: str = key("text", "field of the text")
    prompt: str = key("prompt", "field of the prompt, for sft and dpo")
    answer: str = key("answer", "field of the answer, for sft")
    chosen: str = key("chosen", "field of the better answer, for dpo")
    rejected: str = key("rejected", "field of the worse answer, for dpo")
    length: int = key(128, "tokens of a row", least=1)
    rows: str = key(
        "packed", "packed: each token once an epoch; windows: random places of the text", choices=("packed", "windows")
    )
    whole: bool = key(False, "whether packed documents are kept whole, not cut where a row ends")
    isolate: bool = key(True, "whether a Hugging Face model sees each packed document alone (mask and positions)")
    held_out: float = key(0.1, "share of the data that is held out for evaluation, at its end", least=0.0, below=1.0)


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss."""

    kind: str = key(
        "next-token", "next-token; sft: answers alone; dpo: pairs of answers", choices=("next-token", "sft", "dpo")
    )
    bits: bool = key(False, "whether the loss is in bits a token, in place of nats")
    beta: float = key(0.1, "dpo: what a departure from the first weights costs", least=0.0)


@dataclass(frozen=True)
class MeshConfig:
    """The ranks, and what they hold."""

    shape: tuple[int, ...] = key((-1,), "ranks along each axis; one may be -1, for all that are left", free=True)
    axes: tuple[str, ...] = key(
        ("data",), "names of the axes; leaves are not sharded over one named replica", free=True
    )
    rules: tuple[tuple[str, ...], ...] = key(
        (), '[[pattern, "fsdp", axis...], [pattern, "replicated"], [pattern, "dims", axis or "", ...]]', free=True
    )
    batch: tuple[str, ...] = key((), "axes over which a batch is cut; none: all but that of stages", free=True)
    stages: str = key("", "axis of the stages of a pipeline; none: no pipeline", free=True)
    leaves: tuple[tuple[Any, ...], ...] = key(
        (), "stages of leaves outside of units: [[pattern, stage, ...], ...]; -1 is the last", free=True
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """The update."""

    name: str = key("adamw", "muon: matrices of units by Muon, all else by AdamW", choices=("adamw", "muon"))
    betas: tuple[float, ...] = key((0.9, 0.95), "decay rates of AdamW's moments")
    eps: float = key(1e-8, "added to the root of AdamW's second moment", least=0.0)
    momentum: float = key(0.95, "Muon's momentum", least=0.0, below=1.0)
    weight_decay: float = key(0.1, "weight decay", least=0.0)
    decay: str = key("matrices", "leaves that decay: no vectors, or all", choices=("matrices", "all"))
    clip_norm: float = key(1.0, "largest norm of the gradient; 0 does not clip", least=0.0)
    average: float = key(
        0.0, "decay of an average of the weights, which is evaluated; 0 for none", least=0.0, below=1.0
    )


@dataclass(frozen=True)
class RateConfig:
    """The learning rate over time."""

    kind: str = key("cosine", "shape of the fall", choices=("cosine", "linear", "wsd", "constant"))
    peak: float = key(3e-4, "highest rate", least=0.0)
    floor: float = key(0.0, "last rate", least=0.0)
    warmup: int = key(-1, "steps of the rise; -1: an eighth of the total, at most 100", least=-1)
    total: int = key(0, "step at which the rate reaches the floor; 0: steps", least=0)
    cooldown: int = key(-1, "wsd: steps of the fall; -1: a fifth of the total", least=-1)


@dataclass(frozen=True)
class StepConfig:
    """The way in which a step runs."""

    precision: str = key("fp32", "dtype in which units compute; parameters stay fp32", choices=("fp32", "bf16"))
    accumulate: int = key(1, "microbatches of a step", least=1, free=True)
    remat: str = key(
        "none", "activations: computed again, or kept on the host", choices=("none", "all", "offload"), free=True
    )
    compile: str = key("none", "graphs of units", choices=("none", "fx", "inductor"), free=True)
    schedule: str = key(
        "default", "auto: measure a few schedules and keep the best", choices=("default", "auto"), free=True
    )
    pipeline: str = key(
        "", "order of a pipeline's stages; empty: 1f1b, or what auto finds", choices=("", *ORDERS), free=True
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """The evaluation on held-out data."""

    every: int = key(0, "steps between two evaluations; 0: after the last step alone", least=0)
    batches: int = key(0, "batches of an evaluation at most; 0: all that are held out", least=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints, in the folder checkpoints of out."""

    every: int = key(0, "steps between two checkpoints; 0: after the last step alone", least=0)
    keep: int = key(3, "newest checkpoints that are kept; 0 keeps all", least=0)
    asynchronous: bool = key(False, "whether checkpoints are written while the next steps run")


@dataclass(frozen=True)
class TrackConfig:
    """The trackers. With out, metrics.jsonl there has each step's numbers."""

    live: bool = key(True, "whether the terminal shows the run")
    tensorboard: bool = key(False, "whether event files go to the folder tensorboard of out")
    wandb: str = key("", "project of Weights & Biases")
    mlflow: str = key("", "experiment of MLflow")


@dataclass(frozen=True)
class TrainConfig:
    """A run: all that a config file says."""

    version: int = key(VERSION, "version of the config", free=True)
    steps: int = key(1000, "train steps", least=1, free=True)
    batch: int = key(32, "rows of a step, over all ranks", least=1)
    seed: int = key(0, "seed of first values and of the order of data")
    out: str = key("", "folder of checkpoints, metrics and this config; none: nothing is kept", free=True)
    model: ModelConfig = table(ModelConfig)
    data: DataConfig = table(DataConfig)
    objective: ObjectiveConfig = table(ObjectiveConfig)
    mesh: MeshConfig = table(MeshConfig, free=True)
    optimizer: OptimizerConfig = table(OptimizerConfig)
    rate: RateConfig = table(RateConfig)
    step: StepConfig = table(StepConfig)
    evaluation: EvaluationConfig = table(EvaluationConfig, free=True)
    checkpoints: CheckpointConfig = table(CheckpointConfig, free=True)
    track: TrackConfig = table(TrackConfig, free=True)
