"""Sums that leave something for the next step come in graphs to the bits of eager steps."""

from typing import Any

import pytest

import fshard as fs
from tests.shared.capture_device import capturing
from tests.training import test_low_rank as low_rank
from tests.training import wire_cases as wires
from tests.whole_graph.test_whole_graph import POLICIES, Trace

STEPS = 8


def weighted(params: Any, rows: Any) -> fs.Mean:
    """A mean whose residuals are those of sums: they are multiplied by what is no power of two on three ranks."""
    return fs.Mean(wires.loss_fn(params, rows) * rows[0].shape[0], rows[0].shape[0])


ONE, TWO = ((3,), ("shard",)), ((2, 2), ("replica", "shard"))
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "replicated, skips": (ONE, "feedback", {"skip_norm": 30.0, "clip_norm": 0.1}),
    "a weighted loss": (ONE, "feedback", {"loss": weighted}),
    "loss scale": (ONE, "feedback, fp8", {"loss_scale": fs.LossScale(2.0**8, interval=3)}),
    "replicas, microbatches": (TWO, "feedback", {"accumulate": 2}),
    "low rank": (TWO, "flat", {"skip_norm": 30.0}),
}


def trained(mesh: fs.Mesh, case: str, policy: fs.Policy) -> Trace:
    """Some steps."""
    axes, name, options = CASES[case]
    if "low rank" in case:
        plan = low_rank.plan_of(mesh, name)
    else:
        plan = wires.plan_of((wires.CASES if axes is ONE else wires.REPLICAS)[name], mesh)
    found, opt, options = Trace(), fs.optim.sgd(wires.LR), dict(options)
    step = fs.make_train_step(options.pop("loss", wires.loss_fn), opt, plan, schedule=policy, **options)
    state = fs.init_state(plan, opt, params=wires.start())
    for number in range(STEPS):
        rows = wires.batch(number, mesh.rank)
        if number in (4, 6):  # whose gradients are skipped, where any are
            rows = (rows[0], rows[1] * 200)
        state, metrics = step(state, rows)
        found.note(metrics)
    return found.end(state)


@pytest.mark.sample(4)
@pytest.mark.parametrize("graph", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_what_sums_leave_has_the_bits_of_eager_steps(case: str, graph: str) -> None:
    axes = CASES[case][0]

    def rank() -> tuple[Trace, Trace]:
        mesh, _ = on(fs.make_mesh(*axes))
        return trained(mesh, case, POLICIES[graph]), trained(mesh, case, fs.Policy())

    with capturing() as on:
        for graphed, eager in fs.virtual_mesh(*axes, device="cpu").run(rank):
            graphed.same(eager)
            assert graphed.how[2] == "captured" and graphed.how.count("replayed") == STEPS - 3
            assert ("skip_norm" in CASES[case][2]) is any(graphed.skipped)
