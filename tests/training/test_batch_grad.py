"""Tensors of a batch that require grad: a step takes no gradients of them, so they are refused."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.errors import BatchError, PeerError

RANKS = 2
MODEL = fs.split(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), units=("0", "2"))
OPT = fs.optim.sgd(0.1)
UPSTREAM = nn.Linear(3, 3)


def leaf() -> Tensor:
    """What a reader of ``x.grad`` gives."""
    return torch.ones(4, 3, requires_grad=True)


def result() -> Tensor:
    """What a model outside of the step has made."""
    return UPSTREAM(torch.ones(4, 3))


def loss(params: Any, batch: Any) -> Tensor:
    """Of rows in a dict."""
    return MODEL.apply(params, batch["rows"][0]).square().mean()


def by_value(params: Any, batch: Any) -> Tensor:
    """The same, of a program that reads a value."""
    return loss(params, batch) * (2.0 if float(batch["rows"][0].sum()) > 1e9 else 1.0)


def made(fn: Callable[..., Tensor], **options: Any) -> tuple[fs.Plan, fs.TrainState, fs.types.TrainStep]:
    """A plan, a state and a step, on this rank."""
    plan = fs.make_plan(MODEL, fs.make_mesh((-1,), ("data",)), [(".*", fs.fsdp("data"))])
    return plan, fs.init_state(plan, OPT, params=MODEL.params), fs.make_train_step(fn, OPT, plan, **options)


def train(fn: Callable[..., Tensor], **options: Any) -> Callable[[Any], Any]:
    """A train step on a state, after one on an ordinary batch: the program is known."""
    _, state, step = made(fn, donate=False, **options)
    step(state, {"rows": (torch.ones(4, 3),)})
    return lambda batch: step(state, batch)


def gradient() -> Callable[[Any], Any]:
    """A gradient of a state."""
    plan, state, _ = made(loss)
    grad = fs.value_and_grad(loss, plan)
    return lambda batch: grad(state, batch)


def parts(known: bool) -> Callable[[Any], Any]:
    """A step of parts, which may have met an ordinary batch."""
    plan, state, _ = made(loss)
    grad, update = fs.value_and_grad(loss, plan), fs.make_update(OPT, plan, donate=False)
    step = fs.make_step(lambda state, batch: update(state, grad(state, batch)[1]), plan, donate=False)
    if known:
        step(state, {"rows": (torch.ones(4, 3),)})
    return lambda batch: step(state, batch)


CALLS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "train step": lambda: train(loss),
    "microbatches": lambda: train(loss, accumulate=2),
    "fx": lambda: train(loss, compile="fx"),
    "a program that reads values": lambda: train(by_value),
    "gradient": gradient,
    "step of parts": lambda: parts(False),
    "step of parts, again": lambda: parts(True),
}


def attempted(name: str, make: Callable[[], Tensor]) -> str:
    """On a rank: what a call says of rows that require grad on rank 1."""
    call, rank = CALLS[name](), fs.make_mesh((-1,), ("data",)).rank
    rows = make() if rank == 1 else torch.ones(4, 3)
    with pytest.raises(BatchError if rank == 1 else PeerError) as caught:
        call({"rows": (rows,)})
    call({"rows": (rows.detach(),)})
    assert UPSTREAM.weight.grad is None
    return str(caught.value)


@pytest.mark.parametrize(("make", "said"), [(leaf, "a leaf"), (result, "AddmmBackward0")], ids=["leaf", "result"])
@pytest.mark.parametrize("name", CALLS)
def test_they_are_named_on_all_ranks(name: str, make: Callable[[], Tensor], said: str) -> None:
    for told in fs.virtual_mesh((RANKS,), ("data",)).run(attempted, name, make):
        assert f"batch['rows'][0] [4, 3], {said}" in told and "x.detach()" in told


def marked_inside(known: bool) -> str:
    """On a rank: what a step of parts says that makes such rows itself; rank 1 alone, if its program is known."""
    plan, state, _ = made(loss)
    grad, update, marks = fs.value_and_grad(loss, plan), fs.make_update(OPT, plan, donate=False), [not known]

    def parts(state: Any, rows: Tensor) -> Any:
        rows = rows.clone().requires_grad_() if marks[0] else rows
        return update(state, grad(state, {"rows": (rows,)})[1])

    step, rank = fs.make_step(parts, plan, donate=False), plan.mesh.rank
    if known:
        step(state, torch.ones(4, 3))
        marks[0] = rank == 1
    with pytest.raises(PeerError if known and rank != 1 else BatchError) as caught:
        step(state, torch.ones(4, 3))
    marks[0] = False
    step(state, torch.ones(4, 3))
    return str(caught.value)


@pytest.mark.parametrize("known", [False, True])
def test_so_are_those_that_a_step_function_makes(known: bool) -> None:
    for told in fs.virtual_mesh((RANKS,), ("data",)).run(marked_inside, known):
        assert "batch['rows'][0] [4, 3], a leaf" in told


def test_evaluations_take_them() -> None:
    plan, state, _ = made(loss)
    for make in (leaf, result):
        assert not fs.make_eval_step(loss, plan)(state, {"rows": (make(),)}).requires_grad


def slope(params: Any, x: Tensor) -> Tensor:
    """A loss that marks its batch, as physics-informed ones do."""
    x.requires_grad_()
    (found,) = torch.autograd.grad(MODEL.apply(params, x).sum(), x, create_graph=True)
    return (found.square().sum(1) - 1).square().mean()


@pytest.mark.parametrize("options", [{}, {"compile": "fx"}, {"remat": "all"}, {"accumulate": 2}], ids=str)
def test_a_loss_may_mark_its_batch_in_every_step(options: dict[str, Any]) -> None:
    plan, state, step = made(slope, **options)
    x, weights = torch.linspace(-1, 1, 12).view(4, 3), dict(fs.tree.paths(MODEL.params))
    plain = {path: leaf.clone().requires_grad_() for path, leaf in weights.items()}
    fs.verify(step, state, x)
    for _ in range(3):
        state, metrics = step(state, x)
        assert not x.requires_grad and x.grad is None
        want = slope(fs.tree.nest(plain), x.clone())
        torch.testing.assert_close(metrics.loss, want.detach())
        grads = torch.autograd.grad(want, list(plain.values()), allow_unused=True)
        pairs = zip(plain.items(), grads, strict=True)
        plain = {p: (w if g is None else w - 0.1 * g).detach().requires_grad_() for (p, w), g in pairs}


def test_a_loss_that_reads_a_tensor_outside_that_requires_grad_is_told_of() -> None:
    scale = torch.ones(3, requires_grad=True)
    for other in (scale, nn.Parameter(scale)):
        _, state, step = made(lambda params, x, other=other: MODEL.apply(params, x * other).mean())
        with pytest.warns(UserWarning, match=r"neither trains nor updates, of shape \[3\]"):
            step(state, torch.ones(4, 3))
    _, state, step = made(lambda params, x: MODEL.apply(params, x * torch.ones(3, requires_grad=True)).mean())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state, torch.ones(4, 3))
