"""Copies of leaves stay equal: what differs by rank where it enters an update is refused, and noise by key is right."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.errors import ReplicationError

HSDP = [("w", fs.fsdp("data")), ("b", P())]
Change = Callable[[fs.Plan, Any, int], Any]


def own(plan: fs.Plan, values: Any, number: int) -> Any:
    """A number of each rank's own: a trace does not see that it differs."""
    return fs.tree.map(lambda g: g + 0.1 * plan.mesh.here.rank, values)


def keyed(plan: fs.Plan, values: Any, number: int) -> Any:
    """Noise by key."""
    noise = fs.tree.normal(fs.random.fold_in(fs.random.key(7), number), plan)
    return fs.tree.map(lambda g, n: g + n, values, noise)


def loss(params: Any, x: Tensor) -> Tensor:
    """A loss of both leaves."""
    return (params["w"] - x).square().mean() + (params["b"] * x.mean()).sum()


class Programs:
    """Steps with changed gradients or parameters, on a mesh."""

    def __init__(self, mesh: Any, rules: Any, batch: P) -> None:
        self.mesh = mesh
        self.full = {"w": torch.zeros(40), "b": torch.zeros(3)}
        self.plan = fs.make_plan(self.full, mesh, rules, batch=batch)
        self.opt = fs.optim.sgd(0.5)
        self.grad, self.update = fs.value_and_grad(loss, self.plan), fs.make_update(self.opt, self.plan)

    def gradients(self, change: Change) -> Any:
        """A step that changes gradients."""

        def step(state: Any, x: Any) -> Any:
            value, grads = self.grad(state, x)
            return self.update(state, change(self.plan, grads, 1))[0], value

        return fs.make_step(step, self.plan)

    def read_at_once(self, change: Change) -> Any:
        """A step that reads what such an update makes."""

        def step(state: Any, x: Any) -> Any:
            state, _ = self.update(state, change(self.plan, self.grad(state, x)[1], 1))
            value, grads = self.grad(state, x)
            return self.update(state, grads)[0], value

        return fs.make_step(step, self.plan)

    def parameters(self, change: Change) -> Any:
        """A step that changes parameters by hand."""

        def step(state: Any, x: Any) -> Any:
            value, grads = self.grad(state, x)
            params = fs.tree.map(lambda p, g: p - 0.5 * g, state.params, grads)
            return state.replace(params=change(self.plan, params, 1)), value

        return fs.make_step(step, self.plan)

    def alone(self, change: Change) -> Any:
        """The parts as calls of their own."""

        def step(state: Any, x: Any) -> Any:
            value, grads = self.grad(state, x)
            return self.update(state, change(self.plan, grads, 1))[0], value

        return step

    def made(self, step: Any, steps: int = 2) -> list[Any]:
        """The parameters of each rank, as it holds them."""

        def main() -> Any:
            state = fs.init_state(self.plan, self.opt, params=self.full)
            here = self.plan.mesh.here
            for _ in range(steps):
                state, _ = step(state, torch.full((1, 40), 1.0 + here.index(self.plan.data_axes)))
            return fs.settle(state).params["b"].clone()

        found: list[Any] = self.mesh.run(main)
        return found


WAYS = ("gradients", "read_at_once", "parameters", "alone")


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
def test_noise_of_a_rank_is_refused_where_copies_are(way: str) -> None:
    """The leaf and the remedy are named; noise by key keeps copies equal; without noise nothing is refused."""
    programs = Programs(fs.virtual_mesh((2,), ("data",)), HSDP, P("data"))
    make = getattr(programs, way)
    with pytest.raises(ReplicationError, match=r"of b: ranks 0 and 1 hold copies(.|\n)*fs\.tree\.normal"):
        programs.made(make(own))
    for change in (keyed, lambda plan, values, number: fs.tree.map(lambda g: 2 * g, values)):
        first, second = programs.made(make(change))
        assert torch.equal(first, second)


def test_the_state_of_a_refused_step_can_be_used() -> None:
    """Nothing is donated: the next step, without noise, is that of a run that had none."""
    programs = Programs(fs.virtual_mesh((2,), ("data",)), HSDP, P("data"))
    noisy, plain = programs.gradients(own), programs.gradients(lambda plan, grads, number: grads)

    def main(refused: bool) -> Tensor:
        state = fs.init_state(programs.plan, programs.opt, params=programs.full)
        x = torch.full((1, 40), 1.0 + programs.plan.mesh.here.rank)
        if refused:
            with pytest.raises(ReplicationError):
                noisy(state, x)
        return fs.settle(plain(state, x)[0]).params["b"].clone()

    for found, right in zip(programs.mesh.run(main, True), programs.mesh.run(main, False), strict=True):
        assert torch.equal(found, right)


def test_shards_may_have_noise_of_their_own() -> None:
    """Where each rank has elements of its own, any noise is right."""
    programs = Programs(fs.virtual_mesh((2,), ("data",)), [(".*", fs.fsdp("data"))], P("data"))
    programs.made(programs.gradients(own))


def test_any_mesh_and_rules() -> None:
    """Refused if and only if two ranks hold a copy along a data axis: meshes and rules at random."""
    draw = random.Random(11)
    rules = [P(), fs.fsdp("data"), fs.fsdp(("replica", "data")), fs.fsdp("replica")]
    for _ in range(8):
        sizes = draw.choice([(2, 2), (1, 2), (2, 1)])
        mesh = fs.virtual_mesh(sizes, ("replica", "data"))
        chosen = [("w", draw.choice(rules)), ("b", draw.choice(rules))]
        programs = Programs(mesh, chosen, P(("replica", "data")))
        way = draw.choice(WAYS)
        step = getattr(programs, way)(own)
        copied = any(mesh.axis_size(group.sum_axes) > 1 for group in programs.plan.groups)
        if copied:
            with pytest.raises(ReplicationError, match="hold copies"):
                programs.made(step, 1)
        else:
            programs.made(step, 1)
        programs.made(getattr(programs, way)(keyed), 1)
