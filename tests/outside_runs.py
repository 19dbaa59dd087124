"""Training one of ``outside_models`` on all ranks of a mesh, and in one plain PyTorch process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from tests.hf_runs import RATE, STEPS, Outcome, foreseen
from tests.outside_models import CASES, Batch, Outside
from tests.zoo import cut

WORLD = 2
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "without units": {"units": ()},
    "fx": {"compile": "fx"},
    "remat": {"remat": "all"},
    "accumulate": {"accumulate": 2},
}
"""The ways to train that are tried with every model."""

Truth = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]
"""Losses, parameters and buffers."""


def run(name: str, mode: str, truth: Truth) -> Outcome:
    """On each rank: a case of ``outside_models`` in one of ``MODES``, against what one process does."""
    options = dict(MODES[mode])
    case = CASES[name]
    module = case.build()
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        model = fs.split(module, units=options.pop("units", case.units))
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))], batch=fs.P("shard"))
        opt = fs.optim.sgd(RATE)
        state = fs.init_state(plan, opt, params=tree.map(torch.clone, model.params))
        step = fs.make_train_step(_loss(case, model), opt, plan, debug=True, **options)
        return _train(case, model, plan, step, state, truth, options)


def _loss(case: Outside, model: fs.Model) -> Any:
    def loss_fn(params: Any, batch: Batch) -> Any:
        new: dict[str, Any] = {}

        def forward(**given: Any) -> Any:
            out, new["buffers"] = model.apply(params, buffers=batch["buffers"].value, **given)
            return out

        rows = {key: value for key, value in batch.items() if key != "buffers"}
        if "buffers" in batch:
            return case.objective(forward, rows), new
        return case.objective(lambda **given: model.apply(params, **given), rows)

    return loss_fn


def _train(
    case: Outside, model: fs.Model, plan: fs.Plan, step: fs.TrainStep, state: Any, truth: Truth, options: dict[str, Any]
) -> Outcome:
    mesh, buffers = plan.mesh, model.buffers
    losses, departures, early = [], [], True
    for number in range(STEPS):
        batch = cut(case.at(number), mesh.rank, mesh.size)
        if case.buffers:
            batch = {**batch, "buffers": fs.Whole(buffers)}
        early = early and (number > 0 or foreseen(step, batch))
        state, metrics = step(state, batch)
        losses.append(metrics.loss.item())
        if (early or number) and tuple(step.record) != tuple(step.schedule.ops):
            departures.append(number)
        if case.buffers:
            buffers = fs.sync_buffers(metrics.aux["buffers"], plan, microbatches=options.get("accumulate", 1))
    whole = dict(tree.paths(fs.unshard(state.params, plan)))
    pairs = [(whole[path], leaf) for path, leaf in truth[1].items()]
    if case.buffers:
        moved = dict(tree.paths(buffers))
        pairs += [(moved[path], leaf) for path, leaf in truth[2].items() if leaf.is_floating_point()]
    gap = max((a - b).abs().max().item() for a, b in pairs)
    units = dict(line.split(": ", 1) for line in str(step.units).splitlines()) if "compile" in options else {}
    return Outcome(losses, truth[0], gap, departures, early, list(model.units), units)


def plain(name: str, mode: str) -> Truth:
    """The same training in one plain process; a case whose rows see each other part by part, as ranks do."""
    case = CASES[name]
    module = case.build()
    rule = torch.optim.SGD(module.parameters(), lr=RATE)
    count = WORLD * MODES[mode].get("accumulate", 1) if case.parts else 1
    losses = []
    for number in range(STEPS):
        rule.zero_grad()
        before, after, value = _held(module), [], 0.0
        for part in range(count):
            module.load_state_dict(before, strict=False)
            loss = case.objective(module, cut(case.at(number), part, count)) / count
            loss.backward()
            value += loss.item()
            after.append(_held(module))
        module.load_state_dict(_mean(after), strict=False)
        rule.step()
        losses.append(value)
    return losses, {path: leaf.detach() for path, leaf in module.named_parameters()}, dict(module.named_buffers())


def _held(module: nn.Module) -> dict[str, Tensor]:
    return {path: buffer.clone() for path, buffer in module.named_buffers()}


def _mean(several: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Statistics are averaged; of counts the last stays."""
    stacked = {path: torch.stack([held[path] for held in several]) for path in several[0]}
    return {path: leaf.mean(0) if leaf.is_floating_point() else leaf[-1] for path, leaf in stacked.items()}
