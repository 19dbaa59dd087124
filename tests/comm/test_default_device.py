"""What fshard makes for itself stays where it is needed, whatever ``torch.set_default_device`` says.

"meta" stands for any device but the one of the mesh: a control tensor that landed there would hold no values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, tree
from fshard.collectives import all_gather, pmean, psum
from tests.shared.workers import Pools


@contextmanager
def elsewhere() -> Iterator[None]:
    """Another device is the default one."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """A linear map, dropout and tanh."""
    return torch.tanh(F.dropout(F.linear(x, p["w"]), 0.1))


def loss(p: Any, b: Tensor) -> Any:
    """A mean that says of how many, with an auxiliary one."""
    x = layer(p["b"], layer(p["a"], b))
    return fs.Mean(x.square().sum(), x.numel()), {"first": fs.Mean(x[:, 0].sum(), len(x))}


def plain(p: Any, b: Tensor) -> Tensor:
    """A plain mean."""
    return layer(p["b"], layer(p["a"], b)).square().mean()


def made(mesh: fs.Mesh, opt: Any) -> tuple[fs.Plan, fs.TrainState, Tensor]:
    """A plan, a state, and this rank's batch."""
    params = {name: {"w": torch.ones(4, 4, device="cpu") / 4} for name in "ab"}
    plan = fs.make_plan(params, mesh, [fs.Rule(".*", fs.fsdp("shard"), align=256)], batch=P("shard"))
    return plan, fs.init_state(plan, opt, seed=3, params=params), torch.arange(16.0, device="cpu").view(4, 4) / 16


def steps(mesh: fs.Mesh, folder: str) -> list[float]:
    """Steps of all kinds of losses."""
    out = []
    for fn, options in [(loss, {"accumulate": 2}), (plain, {"clip_norm": [("a.*", 0.1), (".*", 1.0)]})]:
        opt = fs.optim.adamw(1e-2)
        plan, state, batch = made(mesh, opt)
        step = fs.make_train_step(fn, opt, plan, skip=lambda metrics: False, **options)
        for _ in range(2):
            state, metrics = step(state, batch)
            out += [metrics.loss.item(), metrics.grad_norm.item()]
        out.append(sum(x.sum().item() for x in tree.leaves(fs.unshard(state.params, plan))))
        evaluate = fs.make_eval_step(lambda p, b: {"m": fs.Mean(b.sum(), len(b))}, plan)
        out.append(float(evaluate(state, batch)["m"]))
    return out


def optimizers(mesh: fs.Mesh, folder: str) -> list[float]:
    """The optimizers that make tensors of their own."""
    out = []
    for opt in (fs.optim.adamw8bit(1e-2), fs.optim.from_torch(torch.optim.RAdam, lr=1e-2)):
        plan, state, batch = made(mesh, opt)
        step = fs.make_train_step(plain, opt, plan)
        for _ in range(2):
            state, metrics = step(state, batch)
        out.append(metrics.loss.item())
    return out


def parts(mesh: fs.Mesh, folder: str) -> list[float]:
    """A step of parts."""
    opt = fs.optim.sgd(0.1)
    plan, state, batch = made(mesh, opt)
    grad, update = fs.value_and_grad(plain, plan), fs.make_update(opt, plan, clip_norm=1.0)

    def fn(state: Any, batch: Any) -> Any:
        value, grads = grad(state.params, batch)
        state, metrics = update(state, grads)
        return state, {"loss": value, "norm": metrics.grad_norm}

    step = fs.make_step(fn, plan)
    state, found = step(state, batch)
    return [float(found["loss"]), float(found["norm"])]


def collectives(mesh: fs.Mesh, folder: str) -> list[float]:
    """Collectives by name and of the host, and a comparison of copies."""
    x = torch.ones(3, device="cpu") * (mesh.rank + 1)
    found = [psum(x, "shard", mesh=mesh), pmean(x, "shard", mesh=mesh), all_gather(x, "shard", mesh=mesh)]
    return [value.sum().item() for value in found]


def checkpoints(mesh: fs.Mesh, folder: str) -> list[float]:
    """A checkpoint, written by a thread, and read again."""
    opt = fs.optim.adamw(1e-2)
    plan, state, batch = made(mesh, opt)
    state, _ = fs.make_train_step(plain, opt, plan)(state, batch)
    with fs.Checkpointer(f"{folder}/{mesh.size}") as checkpointer:
        checkpointer.save(state)
        checkpointer.wait()
        restored = checkpointer.restore(plan, opt)
    restored = getattr(restored, "state", restored)
    return [x.sum().item() for x in tree.leaves(fs.unshard(restored.params, plan))]


SUITES: dict[str, Callable[[fs.Mesh, str], list[float]]] = {
    fn.__name__: fn for fn in (steps, optimizers, parts, collectives, checkpoints)
}


def both(name: str, folder: str) -> list[list[float]]:
    """A suite as it is, and where another device is the default."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        usual = SUITES[name](mesh, f"{folder}/usual")
    with elsewhere(), fs.make_mesh((-1,), ("shard",)) as mesh:
        return [usual, SUITES[name](mesh, f"{folder}/elsewhere")]


@pytest.mark.parametrize("name", SUITES)
def test_on_one_rank(name: str, tmp_path: Any) -> None:
    usual, found = both(name, str(tmp_path))
    assert found == usual


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SUITES)
def test_on_two_ranks(pool: Pools, name: str, tmp_path: Any) -> None:
    for usual, found in pool(2).run(both, name, str(tmp_path)):
        assert found == usual
