"""Names and calls that people know of other libraries and try first: each error names the way, and the way is right."""

import copy
import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.errors import LossError, PlanError, TreeError
from fshard.hints import OF_MODULES
from fshard.training.metrics import Metrics

MESH = fs.virtual_mesh((2,), ("data",))
RULES = [(".*", fs.fsdp("data"))]
OPT = fs.optim.sgd(1.0, momentum=0.9)


def net() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))


MODEL = fs.split(net())
PLAN = fs.make_plan(MODEL, MESH, RULES, batch=fs.P("data"))


def loss(params: Any, x: Tensor) -> Tensor:
    """The mean of squares."""
    mean: Tensor = MODEL.apply(params, x).square().mean()
    return mean


def state() -> fs.TrainState:
    """A state of all ranks."""
    return fs.init_state(PLAN, OPT)


def gradients() -> list[Any]:
    """The gradients that ``mesh.run`` returns: the shards of each rank."""
    own = state()
    return MESH.run(lambda: fs.value_and_grad(loss, PLAN)(own.params, torch.ones(2, 3))[1])


def distributed(name: str, inside: bool = False) -> nn.Module:
    """A module as one of PyTorch's wrappers makes it, which need processes."""
    kind = type(name, (nn.Sequential,), {"__module__": "torch.nn.parallel.distributed"})
    made: nn.Module = kind(nn.Linear(2, 2))
    return nn.Sequential(made) if inside else made


A, B = fs.Mean(torch.tensor(1.0), 2), fs.Mean(torch.tensor(1.0), torch.tensor(2))
X = torch.ones(2, 3)

TRIES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: MODEL.train(), AttributeError, "model.apply(params, x, training=False)"),
    (lambda: MODEL.eval(), AttributeError, "model.apply(params, x, training=False)"),
    (lambda: MODEL(X), TypeError, "model.apply(params, x)"),
    (lambda: MODEL.forward(X), AttributeError, "model.apply(params, x)"),
    (lambda: MODEL.parameters(), AttributeError, "model.params"),
    (lambda: MODEL.named_parameters(), AttributeError, "fs.tree.paths(model.params)"),
    (lambda: MODEL.state_dict(), AttributeError, "fs.io.to_state_dict(state)"),
    (lambda: MODEL.load_state_dict({}), AttributeError, "fs.io.from_state_dict"),
    (lambda: MODEL.to("cuda"), AttributeError, "fs.make_mesh(device=)"),
    (lambda: MODEL.zero_grad(), AttributeError, "fs.value_and_grad"),
    (lambda: MODEL.modules(), AttributeError, "model.module"),
    (lambda: MODEL.unheard_of, AttributeError, "has no attribute 'unheard_of'"),
    (lambda: state().state_dict(), AttributeError, "fs.io.to_state_dict(state)"),
    (lambda: state().load_state_dict({}), AttributeError, "restore(plan, opt)"),
    (lambda: state().parameters(), AttributeError, "fs.unshard(state.params, plan)"),
    (lambda: state().train(), AttributeError, "training=False"),
    (lambda: state().apply(X), AttributeError, "fs.make_eval_step"),
    (lambda: state()(X), TypeError, "fs.make_eval_step"),
    (lambda: state()["params"], TypeError, "state.params"),
    (lambda: state().zero_grad(), AttributeError, "state, metrics = step(state, batch)"),
    (lambda: state().optimizer, AttributeError, "state.opt_state"),
    (lambda: state().to("cpu"), AttributeError, "fs.reshard_state(state, plan, opt)"),
    (lambda: pickle.dumps(state()), TypeError, "fs.Checkpointer(folder).save(state)"),
    (lambda: fs.make_train_step(MODEL, OPT, PLAN), PlanError, "loss_fn is Model"),
    (lambda: fs.split(distributed("DistributedDataParallel")), PlanError, ".module of a wrapper"),
    (lambda: fs.split(nn.DataParallel(nn.Linear(2, 2))), PlanError, ".module of a wrapper"),
    (lambda: fs.func.hvp(loss, PLAN)(MODEL.params, MODEL.params, X), TreeError, "parts of them in mesh.run"),
    (lambda: Metrics(torch.ones(()), torch.ones(()))["loss"], TypeError, "read as metrics.loss"),
    (lambda: fs.split(distributed("FSDPModule", True)), PlanError, "0: FSDPModule"),
    (lambda: fs.make_plan({"a": MODEL, "b": MODEL}, MESH, RULES), PlanError, "fs.tree.map(torch.clone, model.params)"),
    (lambda: fs.make_plan({"a": MODEL.params, "b": MODEL.params}, MESH, RULES), PlanError, "clone one"),
    (lambda: A + B, LossError, "fs.Mean.sum(a, b, counts=)"),
    (lambda: A + torch.tensor(1.0), LossError, "term * mean.count"),
    (lambda: 3 - A, LossError, "term * mean.count"),
    (lambda: A * torch.ones(2), LossError, "a number or a 0-dim tensor"),
    (lambda: fs.Mean.sum(A, B, counts=torch.ones(3)), LossError, "2 means and counts of [3]"),
    (lambda: fs.Mean.sum(A, torch.ones(()), counts=torch.ones(2)), LossError, "a Tensor among its means"),
    (lambda: A.backward(), AttributeError, "the step calls backward"),
    (lambda: A.item(), AttributeError, "metrics.loss.item()"),
    (lambda: MESH.join(gradients()), TreeError, "fs.unshard(results, plan)"),
    (lambda: fs.unshard(gradients()[0], PLAN), TreeError, "fs.unshard(results of mesh.run, plan)"),
    (lambda: fs.unshard(gradients()[:1], PLAN), TreeError, "a list of 2 trees of shards"),
    (lambda: state().replace(params={}), TreeError, "missing  0.weight"),
]


@pytest.mark.parametrize("number", range(len(TRIES)))
def test_what_is_tried_first_is_told_the_way(number: int) -> None:
    attempt, error, says = TRIES[number]
    with pytest.raises(error) as caught:
        attempt()
    assert says in str(caught.value), str(caught.value)


def test_names_that_are_not_there_are_not_there() -> None:
    """Code that looks for an attribute does not find one, so that other libraries take these for what they are."""
    assert not hasattr(MODEL, "state_dict") and not hasattr(state(), "parameters") and not hasattr(A, "item")
    assert copy.deepcopy(MODEL).units == MODEL.units and pickle.loads(pickle.dumps(MODEL)).units == MODEL.units
    assert pickle.loads(pickle.dumps(A)) == A


def test_gradients_of_all_ranks_are_made_whole_outside_of_run() -> None:
    whole, own = fs.unshard(gradients(), PLAN), state().params
    right = torch.func.grad(loss)(own, torch.ones(2, 3))
    for path, leaf in fs.tree.paths(right):
        torch.testing.assert_close(dict(fs.tree.paths(whole))[path], leaf)


@pytest.mark.parametrize("rules", [RULES, [(r".*weight", fs.P(None, "data")), (".*", fs.P())]])
def test_replaced_parameters_outside_of_run_are_those_that_steps_see(rules: Any) -> None:
    plan = fs.make_plan({"w": {"weight": torch.ones(3, 4)}, "b": torch.ones(5)}, MESH, rules, batch=fs.P("data"))
    begun = fs.init_state(plan, OPT, params={"w": {"weight": torch.ones(3, 4)}, "b": torch.ones(5)})
    values = {"w": {"weight": torch.arange(12.0).view(3, 4)}, "b": torch.arange(5.0)}
    replaced = begun.replace(params=values)
    assert all(map(torch.equal, fs.tree.leaves(replaced.params), fs.tree.leaves(values)))
    assert torch.equal(begun.params["b"], torch.ones(5)) and replaced.opt_state.keys() == begun.opt_state.keys()
    step = fs.make_train_step(lambda p, x: p["w"]["weight"].sum() * x.mean() + p["b"].sum(), OPT, plan)
    after, _ = step(replaced, torch.ones(2))
    assert torch.equal(after.params["b"], torch.arange(5.0) - 1.0)


@pytest.mark.parametrize("empty", [False, True])
def test_sums_of_means_with_counts_of_their_own_are_exact(empty: bool) -> None:
    """Over ranks and microbatches of unequal counts, as plain PyTorch computes them of the whole batch."""
    drawn = torch.Generator().manual_seed(3)
    x, w = torch.randn(8, 3, generator=drawn, dtype=torch.float64), torch.randn(3, generator=drawn, dtype=torch.float64)
    one, two = torch.rand(8, generator=drawn) > 0.6, (torch.rand(8, generator=drawn) > 0.3) & (not empty)

    def loss(params: Any, batch: Any) -> fs.Mean:
        y = batch["x"] @ params["w"]
        squares = fs.Mean((y.square() * batch["one"]).sum(), batch["one"].sum())
        sizes = fs.Mean((y.abs() * batch["two"]).sum(), batch["two"].sum())
        return fs.Mean.sum(squares, -sizes / 2, counts=batch["counts"].value)

    plan = fs.make_plan({"w": w}, MESH, RULES, batch=fs.P("data"))
    step = fs.make_train_step(loss, fs.optim.sgd(1.0), plan, accumulate=2)
    batch = {"x": x, "one": one, "two": two, "counts": fs.Whole(torch.stack([one.sum(), two.sum()]))}
    after, metrics = step(fs.init_state(plan, fs.optim.sgd(1.0), params={"w": w}), batch)
    leaf = w.clone().requires_grad_()
    y = x @ leaf
    right = (y.square() * one).sum() / one.sum() - (y.abs() * two).sum() / two.sum().clamp(min=1) / 2
    right.backward()
    torch.testing.assert_close(metrics.loss, right.detach(), check_dtype=False)
    assert leaf.grad is not None
    torch.testing.assert_close(after.params["w"], w - leaf.grad)


def test_arithmetic_on_one_mean() -> None:
    total, count = torch.tensor(6.0), torch.tensor(3)
    mean = fs.Mean(total, count)
    for made, value in ((2 * mean, 4.0), (mean / 4, 0.5), (mean + mean, 4.0), (mean - mean * 3, -4.0), (-mean, -2.0)):
        assert made.value.item() == value and made.count is count
    assert sum([mean, mean], start=0).value.item() == 4.0


def test_a_loss_may_be_an_object_that_holds_parameters() -> None:
    class Loss:
        params = MODEL.params

        def __call__(self, params: Any, x: Tensor) -> Tensor:
            return loss(params, x)

    begin = fs.init_state(PLAN, OPT, params=MODEL.params)
    _, metrics = fs.make_train_step(Loss(), OPT, PLAN)(begin, X)
    assert metrics.loss.item() == pytest.approx(loss(MODEL.params, X).item())


@pytest.mark.parametrize("module", [fs, fs.optim, fs.optim.schedules, fs.tree], ids=lambda module: module.__name__)
def test_names_of_other_libraries_are_told_the_way(module: Any) -> None:
    names = {name: hint for names, hint in OF_MODULES[module.__name__].items() for name in names.split()}
    for name, hint in names.items():
        assert name not in module.__all__
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': "):
            getattr(module, name)
        for way in re.findall(r"fs((?:\.\w+)+)", hint):
            assert functools.reduce(getattr, way[1:].split("."), fs) is not None, (name, way)
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_that'$"):
        _ = module.nothing_of_that
