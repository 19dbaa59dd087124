"""Training a model from outside on all ranks of a mesh, and in one plain PyTorch process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import ShardError
from tests.outside.case import Batch, Outside
from tests.outside.hf_language import LANGUAGE
from tests.outside.hf_runs import RATE, STEPS, Outcome, foreseen
from tests.outside.hf_senses import SENSES
from tests.outside.own import OWN
from tests.shared import parity
from tests.shared.parity import Run
from tests.shared.zoo import cut

CASES: dict[str, Outside] = LANGUAGE | SENSES | OWN
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "without units": {"units": ()},
    '`compile="fx"`': {"compile": "fx"},
    '`remat="all"`': {"remat": "all"},
    "`accumulate=2`": {"accumulate": 2},
}
"""The ways to train that are tried with every model."""


@dataclass(frozen=True)
class Refusal:
    """The library's own error, where it does not train a model.

    Attributes:
        error: its class and first line.
    """

    error: str


def attempt(name: str, mode: str) -> Outcome | Refusal:
    """On each rank: one of ``CASES`` in one of ``MODES``, against one process."""
    try:
        return run(name, mode)
    except ShardError as error:
        return Refusal(f"{type(error).__name__}: {str(error).splitlines()[0]}")


def run(name: str, mode: str) -> Outcome:
    """What ``attempt`` finds, with every error raised."""
    case, options = CASES[name], dict(MODES[mode])
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        model = fs.split(case.build(), units=options.pop("units", case.units))
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))], batch=fs.P("shard"))
        opt = fs.optim.sgd(RATE)
        state = fs.init_state(plan, opt, params=tree.map(torch.clone, model.params))
        step = fs.make_train_step(_objective(case, model), opt, plan, debug=True, **options)
        return _train(case, model, plan, step, state, options.get("accumulate", 1))


def _objective(case: Outside, model: fs.Model) -> Any:
    def loss_fn(params: Any, batch: Batch) -> Any:
        new: dict[str, Any] = {}

        def changing(**given: Any) -> Any:
            out, new["buffers"] = model.apply(params, buffers=batch["buffers"].value, **given)
            return out

        if not case.buffers:
            return case.objective(lambda **given: model.apply(params, **given), batch)
        rows = {key: value for key, value in batch.items() if key != "buffers"}
        return case.objective(changing, rows), new

    return loss_fn


def _train(
    case: Outside, model: fs.Model, plan: fs.Plan, step: fs.types.TrainStep, state: Any, microbatches: int
) -> Outcome:
    mesh, buffers = plan.mesh, model.buffers
    losses, norms, departures, early = [], [], [], True
    for number in range(STEPS):
        batch = cut(case.at(number), mesh.rank, mesh.size)
        batch |= {"buffers": fs.Whole(buffers)} if case.buffers else {}
        early = early and (number > 0 or foreseen(step, batch))
        state, metrics = step(state, batch)
        losses.append(metrics.loss.item())
        norms.append(metrics.grad_norm.item())
        if (early or number) and tuple(step.record) != tuple(step.schedule.ops):
            departures.append(f"step {number}: {parity.departure(step)}")
        if case.buffers:
            buffers = fs.sync_buffers(metrics.aux["buffers"], plan, microbatches=microbatches)
    wanted, module = _plain(case, mesh.size * microbatches if case.parts else 1)
    found = Run(losses, norms, parity.whole(fs.unshard(state.params, plan)), departures)
    pairs = [(found.params[path], leaf) for path, leaf in wanted.params.items()]
    if case.buffers:
        moved = dict(tree.paths(buffers))
        pairs += [(moved[path], leaf) for path, leaf in module.named_buffers() if leaf.is_floating_point()]
    gap = max((_far(a, b) for a, b in pairs), default=0.0)
    units = dict(line.split(": ", 1) for line in str(step.units).splitlines())
    return Outcome(found, wanted, gap, early, list(model.units), units)


def _far(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, in units of the largest value, if that is larger than 1."""
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1)).item() if wanted.numel() else 0.0


def _plain(case: Outside, parts: int) -> tuple[Run, nn.Module]:
    """The same training in one plain process, of so many parts of each batch by themselves."""
    module = case.build()
    leaves = dict(module.named_parameters())

    def backward(number: int) -> float:
        before, after, total = _held(module), [], 0.0
        for part in range(parts):
            module.load_state_dict(before, strict=False)
            total += parity.backward(case.objective(module, cut(case.at(number), part, parts)) / parts)
            after.append(_held(module))
        module.load_state_dict(_mean(after), strict=False)
        return total

    rule = torch.optim.SGD(module.parameters(), lr=RATE)
    return parity.plain(leaves, rule, backward, STEPS), module


def _held(module: nn.Module) -> dict[str, Tensor]:
    return {path: buffer.clone() for path, buffer in module.named_buffers()}


def _mean(several: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Statistics are averaged; of counts the last stays."""
    stacked = {path: torch.stack([held[path] for held in several]) for path in several[0]}
    return {path: leaf.mean(0) if leaf.is_floating_point() else leaf[-1] for path, leaf in stacked.items()}
