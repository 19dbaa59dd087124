"""Step functions that write to trees in place: gradients may be written to, and what a part has read may not."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad

import fshard as fs
from fshard import tree
from fshard.errors import TreeError
from tests.parts.test_derivatives import far, net, rows
from tests.parts.test_products import RATE, TOLERANCE, Newton, outer

Step = Callable[[Newton, Any, Any], Any]


def doubled(given: Any) -> Any:
    """Doubles a tree where it lies."""
    return tree.map(lambda x: x.mul_(2.0), given)


def a_state(newton: Newton, state: Any, batch: Any) -> Any:
    """A pass may have gathered the parameters before."""
    doubled(state.params)
    return newton.update(state, newton.gradient(state, batch)[1])


def a_state_by_data(newton: Newton, state: Any, batch: Any) -> Any:
    """No version counts it."""
    tree.map(lambda x: x.data.mul_(2.0), state.params)
    return newton.update(state, newton.gradient(state, batch)[1])


def an_updated_state(newton: Newton, state: Any, batch: Any) -> Any:
    """Only parts make states."""
    state, _ = newton.update(state, newton.gradient(state, batch)[1])
    doubled(state.params)
    return state, []


def a_tree_of_two_passes(newton: Newton, state: Any, batch: Any) -> Any:
    """The second pass reads what the first one has gathered."""
    there = fs.tree.scale(state.params, 0.5)
    newton.gradient(there, batch)
    doubled(there)
    return newton.update(state, newton.product(there, there, batch))


def an_updates_gradient(newton: Newton, state: Any, batch: Any) -> Any:
    """The update waits for the next step."""
    _, grads = newton.gradient(state, batch)
    state, _ = newton.update(state, grads)
    doubled(grads)
    return state, []


WRITES = [a_state, a_state_by_data, an_updated_state, a_tree_of_two_passes, an_updates_gradient]
APART = [a_state, an_updated_state]
"""Of a step that runs part by part, each part reads and updates at once, and a state alone can be written to."""


def refused(fn: Step, apart: bool) -> str:
    """What a step says, which leaves the state as it was."""
    newton = Newton(fs.virtual_mesh((2,), ("data",)))

    def step(state: Any, batch: Any) -> Any:
        if apart and newton.gradient(state, batch)[0] < 0:
            return state, []
        return fn(newton, state, batch)

    made, state = fs.make_step(step, newton.plan), newton.start()
    before = tree.map(torch.clone, fs.unshard(state.params, newton.plan))
    with warnings.catch_warnings(), pytest.raises(TreeError) as caught:
        warnings.simplefilter("ignore")
        made(state, newton.plan.local_batch(rows()))
    assert all(map(torch.equal, tree.leaves(fs.unshard(state.params, newton.plan)), tree.leaves(before)))
    return str(caught.value)


@pytest.mark.parametrize("fn", WRITES)
def test_a_write_to_what_a_part_has_read_is_an_error(fn: Step) -> None:
    text = refused(fn, False)
    assert (
        "mul_ writes to the memory of 0." in text and "test_written_trees.py): parameters of a state are read" in text
    )


@pytest.mark.parametrize("fn", APART)
def test_it_is_one_part_by_part_too(fn: Step) -> None:
    assert "state.params is read-only, and it was written to:\n  0.weight" in refused(fn, True)


def test_gradients_may_be_written_to_before_a_part_reads_them() -> None:
    newton, made, x = Newton(fs.virtual_mesh((2,), ("data",))), net(), rows()

    def fn(state: Any, batch: Any) -> Any:
        _, g = newton.gradient(state, batch)
        tree.map(lambda x: x.clamp_(-0.1, 0.1), g)
        h = doubled(newton.product(state.params, g, batch))
        return newton.update(state, fs.tree.add(doubled(g), h))[0], []

    found, _, step = newton.steps(fn)
    f = lambda p: outer(functional_call(made, p, (x[0],)), x)  # noqa: E731
    p = {path: leaf.detach().clone() for path, leaf in made.named_parameters()}
    for _ in range(2):
        g = tree.map(lambda x: x.clamp(-0.1, 0.1), grad(f)(p))
        h = torch.func.jvp(grad(f), (p,), (g,))[1]
        p = tree.map(lambda x, y, z: x - RATE * (2 * y + 2 * z), p, g, h)
    assert far(found, p) < TOLERANCE and step.record == step.schedule.ops
