"""Bad input of outer steps: errors on all ranks alike, before anything is sent, and nothing is lost."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.errors import NonFiniteError, PlanError
from tests.outer_steps.cases import Case, flat_of, start, step_of, steps_of
from tests.shared.bad import attempt
from tests.training.wire_cases import batch, loss_fn

MESH = fs.abstract_mesh((2, 2), ("replica", "data"))
SGD = fs.optim.sgd(0.7)


FLAT, BOTH = P(flat="data"), P(("replica", "data"))


def inner(spec: Any = FLAT, batch: Any = BOTH, **more: Any) -> Any:
    """A train step over two replicas."""
    opt = more.pop("opt", fs.optim.sgd(0.1))
    rule = fs.Rule(".*", spec, opt=more.pop("opt_spec", None))
    plan = fs.make_plan(start(), MESH, [rule], batch=batch, units=("one", "two"))
    return fs.make_train_step(loss_fn, opt, plan, **more)


NUMBERS = {
    "delay": ({"every": 4, "delay": 4}, r"delay=4 must be from 0 to every - 1 = 3: a fragment arrives before"),
    "every": ({"every": 0}, "every=0 must be at least 1"),
    "no number": ({"every": 2.5}, "every=2.5 must be an int"),
    "too many": ({"every": 2, "fragments": 3}, "fragments=3: 3 are more than the 2 steps"),
    "none": ({"every": 2, "fragments": []}, r"fragments=\[\]: give a number from 1 on"),
    "format": ({"every": 2, "wire": "int3"}, "wire='int3' is none of 'fp32'"),
    "mix": ({"every": 2, "mix": 1.0}, r"mix=1.0 must be a number in \[0, 1\)"),
    "pattern": ({"every": 3, "fragments": ["one.*", "thre.*", ".*"]}, "'thre.*' matches no trained leaf"),
    "uncovered": ({"every": 2, "fragments": ["one.*"]}, "two.w is in no fragment"),
    "blocks": (
        {"every": 99, "wire": "int8", "fragments": 40},
        "fragments=40: the trained leaves have .* blocks of 256",
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_and_names_that_cannot_be(name: str) -> None:
    given, says = NUMBERS[name]
    with pytest.raises(PlanError, match=says):
        fs.outer(inner(), SGD, **given)


STEPS: dict[str, tuple[Any, Any, str]] = {
    "sharded": (
        lambda: inner(P(flat="replica")),
        SGD,
        r"sharded along that axis:\n.*one.w  \[24, 16\]  P\(flat='replica'\)",
    ),
    "optimizer sharded": (lambda: inner(opt_spec=P(flat=("data", "replica"))), SGD, "sharded along that axis"),
    "one batch": (
        lambda: inner(batch=P("data")),
        SGD,
        "is not cut along that axis, so all replicas would train on the",
    ),
    "skips": (lambda: inner(skip_norm=1.0), SGD, "skip_norm= of the inner step skips steps on one replica"),
    "scales": (lambda: inner(loss_scale=fs.LossScale()), SGD, "loss_scale= of the inner step"),
    "every": (lambda: inner(opt=fs.optim.every(2, SGD)), SGD, "fs.optim.every inside: use accumulate="),
    "matrices": (inner, fs.optim.adafactor(0.1), "must update each element by itself, as fs.optim.sgd does"),
    "no optimizer": (inner, 0.7, "outer = 0.7: must be an optimizer"),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_and_optimizers_that_cannot_be(name: str) -> None:
    make, opt, says = STEPS[name]
    with pytest.raises(PlanError, match=says):
        step = fs.outer(make(), opt, every=4)
        fs.init_state(step.plan, step.opt, params=start())


def test_other_arguments() -> None:
    with pytest.raises(fs.errors.ShardError, match="axis 'hosts' is not in the mesh"):
        fs.outer(inner(), SGD, every=2, over="hosts")
    with pytest.raises(PlanError, match="step is an outer step already"):
        fs.outer(fs.outer(inner(), SGD, every=2), SGD, every=2)
    with pytest.raises(PlanError, match="must be what fs.make_train_step returned|what fs.make_train_step returned"):
        fs.outer(loss_fn, SGD, every=2)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="shards cut these leaves within a block of 256"):
        fs.outer(inner(P("data")), SGD, every=2, wire="int8")
    mesh = fs.virtual_mesh((2, 1), ("replica", "data"))
    plan = fs.make_plan(start(), mesh, [(".*", fs.fsdp("data"))], batch=P(("replica", "data")))
    with pytest.raises(PlanError, match="make and call it in mesh.run"):
        fs.outer(fs.make_train_step(loss_fn, SGD, plan), SGD, every=2)


def test_replicas_that_differ_find_out_before_the_first_step() -> None:
    mesh = fs.virtual_mesh((2, 1), ("replica", "data"))

    def main() -> Any:
        step = step_of(Case(every=2 + mesh.rank), mesh)
        state = fs.init_state(step.plan, step.opt, params=start())
        raised = attempt(lambda: step(state, batch(0, mesh.rank)))
        return raised, state.step, state.params["one"]["w"].sum().item()

    found: Any = mesh.run(main)
    assert all("every: rank 0: 2, rank 1: 3" in raised.text for raised, *_ in found)
    assert found[0][1:] == found[1][1:] == (0, pytest.approx(start()["one"]["w"].sum().item(), rel=1e-6))


def test_a_plain_state_is_refused() -> None:
    mesh = fs.virtual_mesh((2, 1), ("replica", "data"))

    def main() -> Any:
        step = step_of(Case(), mesh)
        plain = fs.init_state(step.plan, step.opt.opt, params=start())
        return attempt(lambda: step(plain, batch(0, 0)))

    assert all("make the state with fs.init_state(plan, opt, ...)" in raised.text for raised in mesh.run(main))  # type: ignore[union-attr]


@pytest.mark.parametrize("delay", [0, 1])
def test_parameters_that_are_not_finite_reach_no_anchor(delay: int) -> None:
    mesh = fs.virtual_mesh((2, 1), ("replica", "data"))
    case = Case(every=2, wire="int8", delay=delay, inner="sgd")

    def main() -> Any:
        step = step_of(case, mesh)
        state, _ = steps_of(step, fs.init_state(step.plan, step.opt, params=start()), 0, 1)
        anchor = flat_of(fs.averaged(state, "anchor").params)

        def more() -> None:
            rows = tuple(1e3 * x for x in batch(1, mesh.rank))
            after, _ = step(state, rows, lr=3e38 if mesh.rank == 1 else None)
            steps_of(step, after, 2, 2 + delay)

        return attempt(more), anchor

    found: Any = mesh.run(main)
    assert [raised.kinds[0] for raised, _ in found] == ["NonFiniteError"] * 2
    if delay == 0:
        assert all("parameters of replica 1 are not finite after step 2" in raised.text for raised, _ in found)


def test_a_replica_that_fails_alone_keeps_its_state_and_the_others_wait() -> None:
    """It tries again, and both arrive at the exchange."""
    mesh = fs.virtual_mesh((2, 1), ("replica", "data"))

    def main() -> Any:
        step = step_of(Case(every=2), mesh)
        state, _ = steps_of(step, fs.init_state(step.plan, step.opt, params=start()), 0, 1)
        if mesh.rank == 0:
            with pytest.raises(NonFiniteError):
                step(state, tuple(x * float("nan") for x in batch(1, 0)))
        state, _ = steps_of(step, state, 1, 2)
        return state.params["one"]["w"]

    one, other = mesh.run(main)
    assert torch.equal(one, other)
