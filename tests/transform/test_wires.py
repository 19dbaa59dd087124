"""Transforms round nothing: they are derivatives of the exact loss at the exact parameters."""

from typing import Any

import torch

import fshard as fs
from fshard import tree
from tests.training.wire_cases import Case, batch, loss_fn, plan_of, start

WIRE = fs.Wire("int4", "int4", block=16)


def test_transforms_are_exact_where_steps_round() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))

    def main() -> Any:
        rows, found = batch(0, mesh.rank), []
        for wire in (fs.Wire(), WIRE):
            plan = plan_of(Case(wire), mesh)
            params, loss = fs.shard(start(), plan), fs.func.sharded_loss(loss_fn, plan)
            grads, value = torch.func.grad_and_value(loss)(params, rows)
            there = torch.func.grad(lambda p, plan=plan: fs.value_and_grad(loss_fn, plan)(p, rows)[0])(params)
            rough = fs.value_and_grad(loss_fn, plan)(params, rows)[0]
            found.append(([fs.unshard(one, plan) for one in (grads, there)], float(value), float(rough)))
        return found

    for exact, coarse in mesh.run(main):
        for one in coarse[0]:
            assert all(
                torch.equal(a, b) for (_, a), (_, b) in zip(tree.paths(exact[0][0]), tree.paths(one), strict=True)
            )
        assert exact[1] == exact[2] == coarse[1] != coarse[2]
