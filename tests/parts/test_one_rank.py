"""Step functions of parts on one rank equal plain PyTorch, and keep to their schedules."""

import warnings
from typing import Any

import pytest

import fshard as fs
from fshard import tree
from tests.parts.plain import FUNCTIONS, Parts, Plain, PlainState, close, local, plan_on, trained, whole

OPTIMIZERS = {"adamw": fs.optim.adamw(1e-2, weight_decay=0.0), "sgd": fs.optim.sgd(0.05, momentum=0.9)}


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("opt", OPTIMIZERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_step_function_equals_plain_pytorch(name: str, opt: str) -> None:
    plan, rule, steps = plan_on(fs.make_mesh((1,), ("shard",))), OPTIMIZERS[opt], list[Any]()

    def make(fn: Any) -> Any:
        steps.append(fs.make_step(fn, plan))
        return steps[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = fs.init_state(plan, rule, params=whole())
        state, said = trained(Parts(plan, rule), name, state, make, 3, lambda x: local(x, plan))
    plain, told = trained(Plain(rule), name, PlainState(whole()), lambda fn: fn, 3, lambda x: x)
    got = dict(tree.paths(fs.unshard(state.params, plan)))
    assert max((got[path] - leaf).abs().max() for path, leaf in tree.paths(plain.params)) < 1e-9
    assert all(close(a, b) for mine, theirs in zip(said, told, strict=True) for a, b in zip(mine, theirs, strict=True))
    assert steps[0].record == steps[0].schedule.ops
