"""Training in bfloat16 equals the same casts in one plain process, for every program of the zoo.

The reference is plain PyTorch: for each rank's part of the batch the module is called with leaves that were cast, and
the gradients, which are bfloat16, are added up in float32, the dtype in which parameters are kept.
"""

import functools

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P, tree
from tests.shared import parity, reference, zoo
from tests.shared.parity import Run
from tests.shared.reference import SGD
from tests.shared.virtual import Virtual
from tests.shared.workers import Pools

BF16 = fs.Precision(torch.bfloat16, torch.bfloat16)
STEPS = 10
POLICIES = {
    "default": (fs.Policy(), None),
    "lean": (fs.Policy(prefetch=0, reduces=1), None),
    "kept, graphs": (fs.Policy(prefetch=1, reshard=False), "fx"),
}


def narrow(batch: zoo.Batch) -> zoo.Batch:
    """A batch whose floating-point tensors are bfloat16, so that no product mixes dtypes."""
    return tree.map(lambda x: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)


def train(name: str, policies: list[str]) -> list[Run]:
    """On a rank: train under each policy."""
    out = []
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        for policy, compile in (POLICIES[word] for word in policies):
            example = zoo.build(name)
            plan = fs.make_plan(
                example.model, mesh, example.rules, batch=P("shard"), units=example.units, precision=BF16
            )
            opt = fs.optim.sgd(**SGD)
            step = fs.make_train_step(example.loss_fn, opt, plan, schedule=policy, compile=compile, debug=True)
            state = fs.init_state(plan, opt, params=example.params())
            out.append(parity.sharded(step, state, plan, map(narrow, example.batches(mesh, STEPS)))[0])
    return out


@functools.cache
def plain(name: str, world: int) -> Run:
    """The same in one process."""
    example = zoo.build(name)
    leaves = example.plain.parameters
    kept = {path: leaf.clone().requires_grad_(leaves[path].requires_grad) for path, leaf in example.start.items()}
    trained = {path: leaf for path, leaf in kept.items() if leaf.requires_grad}

    def backward(step: int) -> float:
        parts = [narrow(zoo.cut(example.batch(step), rank, world)) for rank in range(world)]
        total = 0.0
        for part in parts:
            for path, leaf in leaves.items():
                leaf.data, leaf.grad = kept[path].detach().bfloat16(), None
            value, share = _loss(example, part, parts)
            total += parity.backward(value) * share
            for path, leaf in trained.items():
                own = leaves[path].grad
                leaf.grad += 0 if own is None else own.float() * share
        return total

    return parity.plain(kept, torch.optim.SGD(trained.values(), **SGD), backward, STEPS)


def _loss(example: zoo.Example, part: zoo.Batch, parts: list[zoo.Batch]) -> tuple[Tensor, float]:
    """The loss of a part of the batch, and what it counts; where tokens are masked, the sum over those that are not."""
    if "mask" not in part:
        return example.plain.loss(part), 1 / len(parts)
    mean, _ = example.loss_fn(tree.nest(example.plain.parameters), part)
    return mean.total, 1 / float(sum(other["mask"].sum() for other in parts))


RUNS = [
    pytest.param(name, world, words, marks=[pytest.mark.slow] if world == 4 or at % 2 else [])
    for at, name in enumerate(sorted(zoo.EXAMPLES))
    for world, words in ((2, ["default"]), (4, list(POLICIES)))
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "world", "words"), RUNS)
def test_training_in_bfloat16_equals_one_process(pool: Pools, name: str, world: int, words: list[str]) -> None:
    """On two virtual ranks, or on four processes."""
    ranks = (pool(world) if world == 4 else Virtual(world)).run(train, name, words, timeout=110.0)
    want = plain(name, world)
    for runs in zip(*ranks, strict=True):
        # Losses: two units in the last place of what units compute.
        near = parity.Near(loss=2**-7 * min(want.losses), norm=2**-6, param=2e-5)
        problems = parity.differences(runs, want, near)
        assert not problems, "\n".join(problems)


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("name", sorted(zoo.EXAMPLES))
def test_rounding_shows(name: str) -> None:
    """Another cast, or another cut of the batch, leads further away than a run may differ."""
    one, other = plain(name, 2).params, plain(name, 4).params
    exact = reference.train(zoo.build(name), "sgd", None, STEPS).params
    for far in (other, exact):
        assert max(float((leaf - far[path]).abs().max()) for path, leaf in one.items()) > 1e-4
