"""What a new user gets wrong with losses, steps, optimizers and checkpoints: refused, with what was meant."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P, errors
from tests.mistakes.cases import BATCH, MESH, MODEL, NET, OPT, PLAN, ck, loss, saved, st, step, v2

MISTAKES: list[tuple[str, Callable[[], Any], type[errors.ShardError], str]] = [
    (
        "clip str",
        lambda: step(clip_norm="1.0"),
        errors.PlanError,
        "a str: give a number that is positive, or None for no clipping",
    ),
    (
        "clip neg",
        lambda: step(clip_norm=-1),
        errors.PlanError,
        "clip_norm=-1 must be positive, or None for no clipping",
    ),
    (
        "torch optim step",
        lambda: fs.make_train_step(loss, torch.optim.SGD(NET.parameters(), 0.1), PLAN),
        errors.PlanError,
        "or fs.optim.from_torch(torch.optim.SGD, ...)",
    ),
    (
        "torch optim cls",
        lambda: fs.make_train_step(loss, torch.optim.AdamW, PLAN),
        errors.PlanError,
        "or fs.optim.from_torch(torch.optim.AdamW, ...)",
    ),
    (
        "opt uncalled",
        lambda: fs.make_train_step(loss, fs.optim.adamw, PLAN),
        errors.PlanError,
        "the class adamw and a Plan: make one, fs.optim.adamw(3e-4)",
    ),
    (
        "swap opt plan",
        lambda: fs.make_train_step(loss, PLAN, OPT),
        errors.PlanError,
        "of fs.optim and a plan, and was given a Plan and an adamw",
    ),
    (
        "swap loss",
        lambda: fs.make_train_step(OPT, loss, PLAN),
        errors.PlanError,
        "of fs.optim and a plan, and was given a function and a Plan",
    ),
    (
        "model as plan",
        lambda: fs.make_train_step(loss, OPT, MODEL),
        errors.PlanError,
        "of fs.optim and a plan, and was given an adamw and a Model",
    ),
    (
        "model as loss",
        lambda: fs.make_train_step(MODEL, OPT, PLAN),
        errors.PlanError,
        "(params, batch) that calls model.apply(params, ...)",
    ),
    (
        "batch order",
        lambda: step()(BATCH, st()),
        errors.TreeError,
        "init_state returns, the state itself and not state.params",
    ),
    (
        "loss float",
        lambda: step(lambda p, b: loss(p, b).item())(st(), BATCH),
        errors.LossError,
        "out .item() and float(): return a scalar tensor or fs.Mean",
    ),
    (
        "loss vector",
        lambda: step(lambda p, b: MODEL.apply(p, b["x"]).square())(st(), BATCH),
        errors.LossError,
        "losses.numel()) where counts differ between ranks",
    ),
    (
        "loss None",
        lambda: step(lambda p, b: None)(st(), BATCH),
        errors.LossError,
        "which the step calls: return a scalar tensor or fs.Mean",
    ),
    (
        "loss detached",
        lambda: step(lambda p, b: loss(p, b).detach())(st(), BATCH),
        errors.LossError,
        "params, outside of torch.no_grad() and without .detach()",
    ),
    (
        "loss list",
        lambda: step(lambda p, b: [loss(p, b)])(st(), BATCH),
        errors.LossError,
        "/ len(losses): return a scalar tensor or fs.Mean",
    ),
    (
        "loss dict",
        lambda: step(lambda p, b: {"loss": loss(p, b)})(st(), BATCH),
        errors.LossError,
        "beside it, (loss, aux): return a scalar tensor or fs.Mean",
    ),
    (
        "loss aux tensor",
        lambda: step(lambda p, b: (loss(p, b), b["x"]))(st(), BATCH),
        errors.LossError,
        "of (Tensor, Tensor): return a loss, or (loss, aux dict)",
    ),
    (
        "loss mean swapped",
        lambda: step(lambda p, b: fs.Mean(3, loss(p, b)))(st(), BATCH),
        errors.LossError,
        "whose total comes first: return a scalar tensor or fs.Mean",
    ),
    (
        "loss backward",
        lambda: step(lambda p, b: loss(p, b).backward())(st(), BATCH),
        errors.LossError,
        "which the step calls: return a scalar tensor or fs.Mean",
    ),
    (
        "loss no_grad",
        lambda: step(torch.no_grad()(loss))(st(), BATCH),
        errors.LossError,
        "params, outside of torch.no_grad() and without .detach()",
    ),
    (
        "loss lambda step str",
        lambda: step("loss"),
        errors.PlanError,
        "(params, batch) that calls model.apply(params, ...)",
    ),
    (
        "step params",
        lambda: step()(st().params, BATCH),
        errors.TreeError,
        "init_state returns, the state itself and not state.params",
    ),
    (
        "eval params",
        lambda: fs.make_eval_step(loss, PLAN)(MODEL.params, BATCH),
        errors.TreeError,
        "init_state returns, the state itself and not state.params",
    ),
    (
        "restore swapped",
        lambda: saved().restore(OPT, PLAN),
        errors.PlanError,
        "restore(plan, opt) takes a plan, and was given an adamw",
    ),
    (
        "restore model",
        lambda: saved().restore(MODEL, OPT),
        errors.PlanError,
        "restore(plan, opt) takes a plan, and was given a Model",
    ),
    (
        "restore missing step",
        lambda: saved().restore(PLAN, OPT, step=77),
        errors.CheckpointError,
        "77; it holds 0: give one of them, or None for the newest",
    ),
    (
        "restore step str",
        lambda: saved().restore(PLAN, OPT, step="0"),
        errors.PlanError,
        "step is '0', a str: give an int, or None for the newest",
    ),
    (
        "restore empty",
        lambda: ck().restore(PLAN, OPT),
        errors.CheckpointError,
        "start with fs.init_state(plan, opt) where latest() is None",
    ),
    (
        "save params",
        lambda: ck().save(st().params),
        errors.TreeError,
        "save(state): 'inp' is a dict, no TrainState",
    ),
    (
        "save metrics tuple",
        lambda: ck().save(step()(st(), BATCH)),
        errors.TreeError,
        "save(state) takes one TrainState, or a dict of them by name, and was given a tuple",
    ),
    (
        "keep str",
        lambda: fs.Checkpointer("a", keep="3"),
        errors.PlanError,
        "Checkpointer(keep='3'): give an int >= 1, or None",
    ),
    ("ckpt none", lambda: fs.Checkpointer(None), errors.PlanError, "directory is None: give the path of a folder"),
    (
        "ckpt empty str",
        lambda: fs.Checkpointer("").save(st()),
        errors.PlanError,
        "give the path of a folder; '.' is the one that you are in",
    ),
    ("accumulate 0", lambda: step(accumulate=0), errors.PlanError, "accumulate=0 must be an int >= 1"),
    ("accumulate float", lambda: step(accumulate=2.0), errors.PlanError, "accumulate=2.0 must be an int >= 1"),
    (
        "accumulate indiv",
        lambda: step(accumulate=3)(st(), {"x": torch.ones(4, 4)}),
        errors.BatchError,
        "batch['x'] has shape [4, 4]",
    ),
    (
        "remat True",
        lambda: step(remat=True)(st(), BATCH),
        errors.PlanError,
        "fs.checkpoint_policies, or a list of (glob of units, one of these)",
    ),
    (
        "remat pol",
        lambda: step(remat=torch.utils.checkpoint.checkpoint)(st(), BATCH),
        errors.PlanError,
        "fs.checkpoint_policies, or a list of (glob of units, one of these)",
    ),
    ("compile True", lambda: step(compile=True), errors.PlanError, "compile=True must be None, 'fx' or 'inductor'"),
    (
        "schedule fast",
        lambda: step(schedule="fast"),
        errors.PlanError,
        "must be fs.Policy(...), 'auto' or fs.Auto(...)",
    ),
    (
        "schedule dict",
        lambda: step(schedule={"prefetch": 2}),
        errors.PlanError,
        "2} must be fs.Policy(...), 'auto' or fs.Auto(...)",
    ),
    ("policy prefetch", lambda: fs.Policy(prefetch=-1), errors.PlanError, "prefetch=-1 is less than 0"),
    (
        "loss_scale num",
        lambda: step(loss_scale=1024.0),
        errors.PlanError,
        "loss_scale=1024.0 must be fs.LossScale(...) or None",
    ),
    (
        "lr str",
        lambda: fs.optim.adamw("1e-3"),
        errors.PlanError,
        "must be a number in [0, inf), or a function of the step",
    ),
    (
        "betas",
        lambda: fs.optim.adamw(1e-3, betas=0.9),
        errors.PlanError,
        "betas = 0.9: must be a tuple of two numbers in [0, 1)",
    ),
    (
        "wd str",
        lambda: fs.optim.adamw(1e-3, weight_decay="0.1"),
        errors.PlanError,
        "weight_decay = '0.1': must be a number in [0, inf)",
    ),
    ("ema decay", lambda: fs.optim.ema(OPT, decay=1.5), errors.PlanError, "decay = 1.5: must lie in [0, 1)"),
    (
        "averaged plain",
        lambda: fs.averaged(st()),
        errors.TreeError,
        "no 'ema': train with fs.optim.ema(opt, decay) around opt",
    ),
    ("every 0", lambda: fs.optim.every(0, OPT), errors.PlanError, "steps = 0: must be at least 1"),
    (
        "masked glob",
        lambda: fs.init_state(PLAN, fs.optim.masked(OPT, "*.weight")),
        errors.PlanError,
        "is a glob, not a regular expression: write r'.*\\.weight'",
    ),
    (
        "from_torch str",
        lambda: fs.optim.from_torch("Adam"),
        errors.PlanError,
        "cls is 'Adam', a str: give a class of torch.optim",
    ),
    (
        "hvp full v",
        lambda: v2(lambda m, p, s: fs.func.hvp(loss, p)(s.params, MODEL.params, BATCH)),
        errors.TreeError,
        "These are whole tensors: give fs.shard(v, plan), this rank's",
    ),
    (
        "hvp state",
        lambda: fs.func.hvp(loss, PLAN)(st(), st().params, BATCH),
        errors.TreeError,
        "TrainState, not a nested dict of tensors: give state.params",
    ),
    (
        "trace key int",
        lambda: fs.func.hessian_trace_samples(loss, PLAN)(st().params, BATCH, 0),
        errors.PlanError,
        "and map over several keys with torch.vmap",
    ),
    (
        "vag aux",
        lambda: fs.value_and_grad(lambda p, b: (loss(p, b), {"a": b["x"]}), PLAN)(st().params, BATCH),
        errors.LossError,
        "as to torch.func.grad, and it returns (loss, aux)",
    ),
    (
        "count of parameters",
        lambda: step(lambda p, b: fs.Mean(loss(p, b), p["norm"]["weight"].sum()))(st(), BATCH),
        errors.LossError,
        "requires grad, and gradients of counts are not taken: give count.detach()",
    ),
    (
        "loss closes module",
        lambda: step(lambda p, b: NET(b["x"]).mean())(st(), BATCH),
        errors.LossError,
        "...), not by calling the module that was split",
    ),
    (
        "loss other model",
        lambda: step(lambda p, b: fs.split(nn.Linear(4, 2)).apply(p, b["x"]).mean())(st(), BATCH),
        errors.TreeError,
        "weight: missing",
    ),
    (
        "keep none",
        lambda: step(schedule=fs.Policy(reshard=fs.keep("blok.*")))(st(), BATCH),
        errors.PlanError,
        "'blok.*' matches none",
    ),
    (
        "step other plan state",
        lambda: step()(fs.init_state(fs.make_plan(MODEL, MESH, [(".*", P())]), OPT), BATCH),
        errors.TreeError,
        "another plan: make the step and the state from the same one",
    ),
    (
        "step other opt state",
        lambda: step()(fs.init_state(PLAN, fs.optim.sgd(0.1, momentum=0.9)), BATCH),
        errors.TreeError,
        "state with fs.init_state(plan, opt, ...) and this optimizer",
    ),
    ("donate none", lambda: step(donate="yes"), errors.PlanError, "donate='yes' must be True or False"),
    ("debug str", lambda: step(debug=1), errors.PlanError, "debug=1 must be True or False"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "call", "error", "says"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_told(name: str, call: Callable[[], Any], error: type[errors.ShardError], says: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert says in str(caught.value)


def test_params_of_a_state_are_read_only() -> None:
    def replaced(state: fs.TrainState) -> None:
        state.params["inp"]["weight"] = torch.zeros(8, 4)

    def added(state: fs.TrainState) -> None:
        state.params["new"] = torch.zeros(1)

    def written(state: fs.TrainState) -> None:
        state.params["inp"]["weight"].zero_()

    for write, says in ((replaced, "inp.weight: was replaced"), (added, "new: is not in the plan"), (written, "place")):
        state = st()
        write(state)
        with pytest.raises(errors.TreeError, match=rf"state\.params is read-only(?s:.*){says}(?s:.*)init_state"):
            step()(state, BATCH)
    state = st()
    assert state.params["inp"]["weight"].sum().isfinite()  # reading is no writing
    state, _ = step()(state, BATCH)
    state.params.copy()
    step()(state, BATCH)


def test_a_step_returns_two_things() -> None:
    made = step()
    with pytest.raises(errors.TreeError, match=r"unpack it, state, metrics = step\(state, batch\)"):
        made(made(st(), BATCH), BATCH)  # type: ignore[arg-type]


def test_auxiliary_values_are_not_dropped() -> None:
    function = fs.value_and_grad(lambda p, b: (loss(p, b), {"n": b["x"].sum()}), PLAN)
    with pytest.raises(errors.LossError, match=r"\['n'\].*has_aux=True"):
        function(st().params, BATCH)


def test_a_loss_of_parameters_that_the_step_does_not_train() -> None:
    """As a function in an attribute or a hook reads them, by a closure over the module that was split."""
    trace = step(lambda p, b: loss(p, b) + sum(leaf.sum() for leaf in NET.parameters())).trace
    with pytest.warns(UserWarning, match=r"depends on \d+ leaves \(Parameter\) that .* neither trains .* of shape \["):
        trace(BATCH)
