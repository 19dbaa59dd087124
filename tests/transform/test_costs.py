"""The collectives of each tool, counted, are those of the table in docs/transforms.md."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.collectives.linear import LinearCollective
from fshard.runtime.execution.executor import Scheduled

UNITS = 4
NAMES = {"GatherShards": "gathers", "ScatterShards": "reductions", "LinearSum": "sums"}
KINDS = {"all_gather": "GatherShards", "reduce_scatter": "ScatterShards"}
PRODUCTS = 3
STAYING = fs.Policy().prefetch + 1
"""Units whose groups stay gathered from their forward to their backward, since no other comes between."""
HVP = (2 * UNITS + 2 * (UNITS - STAYING)) / UNITS, 1
"""Gathers of parameters and tangents for the forward, and for the backward; and one reduction."""

COSTS = {
    # tool: with resharding, gathers and reductions of each unit; without
    "gradient": (((2 * UNITS - STAYING) / UNITS, 1), (1, 1)),
    "jvp": ((2, 0), (2, 0)),
    "hvp": (HVP, (2, 1)),
    "hvp.linearize": ((2, 1), (1, 1)),
    "hvp.linearize, product": ((3, 3), (1, 1)),
    "trace": ((1 + PRODUCTS, 0), (1 + PRODUCTS, 0)),
    "linearize": ((1, 0), (1, 0)),
    "linearize, first product": ((3, 2), (1, 1)),
    "linearize, product": ((2, 1), (1, 0)),
    "linearize, transposed": ((1, 1), (0, 1)),
    "gnvp": (None, (2, 1)),
    "gnvp.linearize": (None, (1, 0)),
    "gnvp.linearize, first product": (None, (1, 2)),
    "gnvp.linearize, product": (None, (1, 1)),
    "per_sample_grad": (None, (1, 0)),
    "clipped_grad": (None, (1, 1)),
}
"""For each tool the collectives of parameters of one unit; None where there is no resharding."""


def calls_of(
    plan: fs.Plan, loss: Any, predict: Any, params: Any, x: Tensor, reshard: bool
) -> dict[str, Callable[[], Any]]:
    """Each tool, in the order in which they must be called."""
    v, f = tree.map(torch.ones_like, params), fs.func.sharded_loss(loss, plan, reshard=reshard)
    hvp, gnvp = (
        fs.func.hvp(loss, plan, reshard=reshard),
        fs.func.gnvp(predict, lambda out, batch: out.square().mean(), plan),
    )
    trace, made = fs.func.hessian_trace_samples(loss, plan, PRODUCTS, reshard=reshard), list[Any]()
    return {
        "gradient": lambda: torch.func.grad(f)(params, x),
        "jvp": lambda: fs.func.jvp(loss, plan, reshard=reshard)(params, v, x),
        "hvp": lambda: hvp(params, v, x),
        "hvp.linearize": lambda: made.append(hvp.linearize(params, x)),
        "hvp.linearize, product": lambda: made[-1](v),
        "trace": lambda: trace(params, x, fs.random.key(0)),
        "linearize": lambda: made.append(fs.func.linearize(predict, plan, reshard=reshard)(params, x)),
        "linearize, first product": lambda: made[-1](v),
        "linearize, product": lambda: made[-1](v),
        "linearize, transposed": lambda: made[-1].pull(made[-1].value),
        "gnvp": lambda: gnvp(params, v, x),
        "gnvp.linearize": lambda: made.append(gnvp.linearize(params, x)),
        "gnvp.linearize, first product": lambda: made[-1](v),
        "gnvp.linearize, product": lambda: made[-1](v),
        "per_sample_grad": lambda: fs.func.per_sample_grad(loss, plan)(params, x),
        "clipped_grad": lambda: fs.func.clipped_grad(loss, plan, 1.0, microbatch=1)(params, x),
    }  # fmt: skip


def counted(reshard: bool) -> dict[str, Counter[str]]:
    """On a rank: the collectives of each tool, by kind."""
    thread: Any = threading.current_thread()
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        model = fs.split(
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(UNITS))), units=("*",)
        )
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))])
        params, out = fs.init_state(plan, fs.optim.sgd(0.1), seed=0).params, {}

        def loss(p: Any, x: Tensor) -> Any:
            return model.apply(p, x).square().mean()

        for name, call in calls_of(plan, loss, model.apply, params, torch.ones(2, 8), reshard).items():
            thread.counted = out[name] = Counter()
            call()
        thread.counted = Counter()
        for solver, args in ((fs.func.cg, ()), (fs.func.lanczos, (PRODUCTS,))):
            thread.counted = out[solver.__name__] = Counter()
            options = {} if args else {"maxiter": PRODUCTS, "rtol": 0.0}
            solver(lambda v: tree.map(lambda x, p: x * (1 + p * p), v, params), params, plan, *args, **options)
        thread.counted = Counter()
    return out


@pytest.mark.parametrize("reshard", [True, False])
def test_collectives_are_those_of_the_page(reshard: bool) -> None:
    begin = LinearCollective.begin

    def noted(op: LinearCollective, x: Tensor) -> Any:
        if op.sends:
            getattr(threading.current_thread(), "counted", Counter())[type(op).__name__] += 1
        return begin(op, x)

    def performed(executor: Scheduled, run: Any) -> Any:
        name = KINDS.get(executor.ops[executor.cursor].kind)
        if name is not None:
            getattr(threading.current_thread(), "counted", Counter())[name] += 1
        return perform(executor, run)

    perform = Scheduled._perform
    with patch.object(LinearCollective, "begin", noted), patch.object(Scheduled, "_perform", performed):
        ranks = fs.virtual_mesh((2,), ("any",)).run(counted, reshard)
    assert ranks[0] == ranks[1]
    for tool, (resharded, kept) in COSTS.items():
        wanted = resharded if reshard and resharded is not None else kept
        found = ranks[0][tool]
        assert (found["GatherShards"] / UNITS, found["ScatterShards"] / UNITS) == wanted, tool
        assert found.keys() <= NAMES.keys()
    assert ranks[0]["cg"] == {"LinearSum": 1 + 2 * PRODUCTS}
    assert ranks[0]["lanczos"] == {"LinearSum": 1 + 3 * PRODUCTS}
