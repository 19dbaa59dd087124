"""Trees outside of ``run`` of a virtual mesh are of whole tensors, random ones and products too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs

RULES = [("a.*", fs.fsdp("data")), ("b", fs.P("data")), (".*", fs.P())]
PARAMS = {"a": {"w": torch.ones(5, 3)}, "b": torch.ones(4, 2), "c": torch.ones(3)}


@pytest.mark.parametrize("make", [fs.tree.normal, fs.tree.rademacher])
def test_random_trees_are_those_of_one_rank(make: Callable[..., Any]) -> None:
    mesh = fs.virtual_mesh((2,), ("data",))
    plan = fs.make_plan(PARAMS, mesh, RULES)
    alone = fs.make_plan(PARAMS, fs.make_mesh((1,), ("data",)), [(".*", fs.P())])
    key = fs.random.key(3)
    want, outside = make(key, alone), make(key, plan)
    inside = mesh.run(lambda: fs.unshard(make(key, plan), plan))[1]
    for found in (outside, inside):
        assert all(torch.equal(x, y) for x, y in zip(fs.tree.leaves(want), fs.tree.leaves(found), strict=True))


def test_products_are_those_of_whole_tensors() -> None:
    mesh = fs.virtual_mesh((2,), ("data",))
    plan = fs.make_plan(PARAMS, mesh, RULES)
    key = fs.random.key(3)
    tree = fs.tree.normal(key, plan)
    want = sum(leaf.square().sum() for leaf in fs.tree.leaves(tree))
    inside = mesh.run(lambda: fs.tree.vdot(fs.tree.normal(key, plan), fs.tree.normal(key, plan), plan))[0]
    torch.testing.assert_close(fs.tree.vdot(tree, tree, plan), want)
    torch.testing.assert_close(inside, want)
    torch.testing.assert_close(fs.tree.norm(tree, plan), want.sqrt())
