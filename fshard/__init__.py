"""fshard: JAX-style functional sharding on PyTorch.

The spec says where, the schedule says when, the runtime does it::

    errors, tree, arguments, patterns  what every room needs
    model/          modules as parameter trees and pure functions, units, initial values
    optim/          update rules, fused on flat buffers
    sharding/       WHERE: mesh, spec, rules, layout, plan
    schedule/       WHEN: ops, build, check, text, memory, simulate, auto
    runtime/        HOW: communication, arena, engine, executor
    collectives/    psum, all_gather, ... by axis name, differentiable
    parallel/       tensor, sequence, expert and context parallelism, for the code of units
    played/         virtual meshes, whose ranks are played in one process; fs.shard_map
    state/          the train state, and its ways in and out of whole tensors
    data/           the order of samples, a loader that resumes on any number of ranks, packed sequences
    checkpoint/     train states on disk: complete or not at all, restored onto any mesh
    interchange/    states from and to the formats of other libraries, leaf by leaf
    tracking/       metrics as plain numbers, and where they go: files, TensorBoard, the terminal
    outer_steps/    replicas that train apart, and exchanges between them
    training/       train and evaluation steps, their metrics, buffers that change, the training loop
    proof/          fs.verify: a step compared with plain PyTorch; fs.recheck: with itself
    parts/          the parts of a step: gradients, updates, arithmetic, and steps composed of them
    transform/      losses of shards for torch.func, and tools on them
    foresight/      what a step would hold, send and take on a mesh that need not exist
    recipe/         fs.train: training from a file, by a script that stands alone
    cli/            the command ``fshard``: checkpoints, plans, the machine
    losses/         a head and its cross-entropy by chunks of rows, for hand-written and Hugging Face models
    generation/     sampling with a key-value cache, perplexity, lm-evaluation-harness
    lora/           low-rank adapters beside frozen weights
    launch          meshes of real processes; launching/ starts them from a notebook
    func, io, sim, trackers, types  names of less frequent use: derivatives, other formats, simulation, ...
    view/           what every rank holds, steps op by op, pictures of schedules
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fshard import torch_internals as torch_internals  # before all that imports torch

# isort: split
from fshard import collectives, errors, optim, tree
from fshard.hints import unknown_name
from fshard.launch import make_mesh
from fshard.launching.caller import launch
from fshard.model import checkpoint_policies, random
from fshard.model import initial_values as init
from fshard.model.meta import empty_weights
from fshard.model.precision import Precision
from fshard.model.remat_function import remat
from fshard.model.split import Model, split
from fshard.model.suggest_units import suggest_units
from fshard.model.unit import unit
from fshard.optim.scaling import LossScale
from fshard.patterns import glob
from fshard.runtime.engine import Mean, Microbatches
from fshard.runtime.engine.buckets import Buckets
from fshard.schedule.auto import Auto
from fshard.schedule.policy import Policy, keep, secondary
from fshard.schedule.schedule import Schedule
from fshard.sharding.mesh import Mesh, abstract_mesh
from fshard.sharding.plan import Plan, make_plan
from fshard.sharding.rules import Rule
from fshard.sharding.spec import P, fsdp
from fshard.sharding.suggest_rules import suggest_rules
from fshard.sharding.wire import Wire
from fshard.state.init import init_state, shard, unshard
from fshard.state.move import reshard_state
from fshard.state.settle import averaged, settle
from fshard.state.train_state import TrainState
from fshard.training.evaluate import make_eval_step
from fshard.training.make_step import make_train_step
from fshard.version import VERSION

if TYPE_CHECKING:
    from fshard import data, func, generation, io, lora, parallel, sim, trackers, types, view
    from fshard.checkpoint.checkpointer import Checkpointer
    from fshard.generation.generate import generate
    from fshard.generation.score import perplexity
    from fshard.losses.causal_lm import causal_lm_loss
    from fshard.losses.chunked_cross_entropy import chunked_cross_entropy
    from fshard.outer_steps.outer_step import outer
    from fshard.parts.grad import value_and_grad
    from fshard.parts.make_update import make_update
    from fshard.parts.step_function import make_step
    from fshard.pipeline.stages import Stages
    from fshard.played.mapping import shard_map
    from fshard.played.virtual import virtual_mesh
    from fshard.proof.recheck import recheck
    from fshard.proof.verification import VerifyError
    from fshard.proof.verify import verify
    from fshard.recipe.run_config import train
    from fshard.runtime.engine.stopped import stop_gradient
    from fshard.sharding.local_batch import Rows
    from fshard.tracking.track import track
    from fshard.training.buffer_sync import Whole, sync_buffers
    from fshard.training.elastic import Preempted, Preemption, train_loop

__version__ = VERSION

_LATER = (
    ("fshard", "data func generation io lora parallel sim trackers types view"),
    ("fshard.training.buffer_sync", "Whole sync_buffers"),
    ("fshard.sharding.local_batch", "Rows"),
    ("fshard.checkpoint.checkpointer", "Checkpointer"),
    ("fshard.tracking.track", "track"),
    ("fshard.training.elastic", "Preempted Preemption train_loop"),
    ("fshard.pipeline.stages", "Stages"),
    ("fshard.played.mapping", "shard_map"),
    ("fshard.proof.verification", "VerifyError"),
    ("fshard.proof.recheck", "recheck"),
    ("fshard.proof.verify", "verify"),
    ("fshard.recipe.run_config", "train"),
    ("fshard.generation.generate", "generate"),
    ("fshard.generation.score", "perplexity"),
    ("fshard.losses.causal_lm", "causal_lm_loss"),
    ("fshard.losses.chunked_cross_entropy", "chunked_cross_entropy"),
    ("fshard.outer_steps.outer_step", "outer"),
    ("fshard.parts.grad", "value_and_grad"),
    ("fshard.parts.step_function", "make_step"),
    ("fshard.parts.make_update", "make_update"),
    ("fshard.runtime.engine.stopped", "stop_gradient"),
    ("fshard.played.virtual", "virtual_mesh"),
)
"""What is imported when it is first asked for, since not every program needs it: modules, and the names in them."""


def __getattr__(name: str) -> Any:
    """A name of ``_LATER`` (PEP 562)."""
    for module, names in _LATER:
        if name in names.split():
            return import_module(f"{module}.{name}") if module == "fshard" else getattr(import_module(module), name)
    raise unknown_name("fshard", name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "Auto",
    "Buckets",
    "Checkpointer",
    "LossScale",
    "Mean",
    "Mesh",
    "Microbatches",
    "Model",
    "P",
    "Plan",
    "Policy",
    "Precision",
    "Preempted",
    "Preemption",
    "Rows",
    "Rule",
    "Schedule",
    "Stages",
    "TrainState",
    "VerifyError",
    "Whole",
    "Wire",
    "abstract_mesh",
    "averaged",
    "causal_lm_loss",
    "checkpoint_policies",
    "chunked_cross_entropy",
    "collectives",
    "data",
    "empty_weights",
    "errors",
    "fsdp",
    "func",
    "generate",
    "generation",
    "glob",
    "init",
    "init_state",
    "io",
    "keep",
    "launch",
    "lora",
    "make_eval_step",
    "make_mesh",
    "make_plan",
    "make_step",
    "make_train_step",
    "make_update",
    "optim",
    "outer",
    "parallel",
    "perplexity",
    "random",
    "recheck",
    "remat",
    "reshard_state",
    "secondary",
    "settle",
    "shard",
    "shard_map",
    "sim",
    "split",
    "stop_gradient",
    "suggest_rules",
    "suggest_units",
    "sync_buffers",
    "track",
    "trackers",
    "train",
    "train_loop",
    "tree",
    "types",
    "unit",
    "unshard",
    "value_and_grad",
    "verify",
    "view",
    "virtual_mesh",
]
