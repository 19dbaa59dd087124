"""Random trees: signs by their definition, bit by bit, on meshes that cut leaves in every way."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.model.philox import philox

SHAPES: dict[str, tuple[int, ...]] = {"a": (30, 14), "b": (7,), "c": (8, 6), "scalar": (), "exact": (128,)}
KEY = fs.random.key(3)
FLAT: list[Any] = [("exact", fs.P()), (".*", fs.fsdp("s"))]
CUTS: list[Any] = [("a", fs.P(None, "s")), ("c", fs.P("s", None)), (".*", fs.P())]


def defined() -> dict[str, Tensor]:
    """Signs one by one: the bits of the words of Philox, leaf after leaf, each from a new counter."""
    found, begin = {}, 0
    for path, shape in SHAPES.items():
        bits = []
        for at in range(math.prod(shape)):
            words = philox((KEY[0], KEY[1]), torch.tensor([begin + at // 128]))
            bits.append(words[at % 128 // 32].item() >> at % 32 & 1)
        found[path] = torch.tensor([2.0 * bit - 1 for bit in bits]).view(shape)
        begin += -(-math.prod(shape) // 128)
    return found


def signs(rules: Any) -> Any:
    """On a rank: the whole tree of signs."""
    with fs.make_mesh((-1,), ("s",)) as mesh:
        plan = fs.make_plan({path: torch.zeros(shape) for path, shape in SHAPES.items()}, mesh, rules)
        return fs.unshard(fs.tree.rademacher(KEY, plan), plan)


@pytest.mark.parametrize(("ranks", "rules"), [(1, FLAT), (2, FLAT), (3, FLAT), (2, CUTS)])
def test_signs_are_bits_of_philox_on_every_mesh(ranks: int, rules: Any) -> None:
    want = defined()
    for found in fs.virtual_mesh((ranks,), ("any",)).run(signs, rules):
        assert all(torch.equal(leaf, want[path]) for path, leaf in tree.paths(found))


def alone(**leaves: Tensor) -> fs.Plan:
    """A plan of one rank."""
    return fs.make_plan(leaves, fs.make_mesh((1,), ("s",)), [(".*", fs.fsdp("s"))])


def test_signs_of_keys_under_vmap_and_their_dtype() -> None:
    plan, keys = alone(w=torch.zeros(9, 5, dtype=torch.bfloat16)), fs.random.split(KEY, 3)
    together = torch.vmap(lambda key: fs.tree.rademacher(key, plan)["w"])(keys)
    assert torch.equal(together, torch.stack([fs.tree.rademacher(key, plan)["w"] for key in keys]))
    assert together.dtype == torch.bfloat16 and together.abs().eq(1).all()


def test_signs_are_balanced() -> None:
    found = fs.tree.rademacher(KEY, alone(w=torch.zeros(100_000)))["w"]
    assert abs(found.sum()) < 5 * 100_000**0.5 and abs((found[1:] * found[:-1]).sum()) < 5 * 100_000**0.5


def test_a_key_of_two_trees_of_signs_is_found() -> None:
    plan = alone(w=torch.zeros(3))
    with fs.random.checked():
        fs.tree.rademacher(KEY, plan), fs.tree.rademacher(fs.random.fold_in(KEY, 1), plan)
        with pytest.raises(fs.errors.KeyReuseError, match="used twice"):
            fs.tree.rademacher(KEY, plan)
