"""A step that fails changes nothing: it raises on every rank, nothing hangs, and the state stays usable.

Each case runs good steps with one bad call among them. The steps that follow must equal, bit for bit, those
of a run in which the bad call never happened.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import tree
from tests.shared.bad import Raised, alike, attempt, place, rule, weights
from tests.shared.workers import Pools

ROWS = 4
"""Rows of a rank's batch."""


@fs.unit
def first(p: Any, x: Tensor) -> Tensor:
    """An affine map and tanh."""
    return torch.tanh(F.linear(x, p["w"], p["b"]))


@fs.unit
def middle(p: Any, x: Tensor) -> Tensor:
    """A linear map and tanh."""
    return torch.tanh(F.linear(x, p["w"]))


@fs.unit
def last(p: Any, x: Tensor) -> Tensor:
    """An affine map."""
    return F.linear(x, p["w"], p["b"])


@fs.unit
def writes_input(p: Any, x: Tensor) -> Tensor:
    """Not pure."""
    x += 1.0
    return F.linear(x, p["w"])


@fs.unit
def writes_parameter(p: Any, x: Tensor) -> Tensor:
    """Not pure."""
    with torch.no_grad():
        p["w"].mul_(0.5)
    return F.linear(x, p["w"])


@fs.unit
def writes_parameter_plainly(p: Any, x: Tensor) -> Tensor:
    """Not pure, and PyTorch itself refuses it."""
    p["w"] += 1.0
    return F.linear(x, p["w"])


@fs.unit
def leaks_parameter(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a view of its parameter."""
    return F.linear(x, p["w"]), p["w"].t()


def _forward(params: Any, batch: Any, unit: Any = middle) -> Tensor:
    x = unit(params["middle"], first(params["first"], batch["x"]))
    return last(params["last"], x[0] if isinstance(x, tuple) else x)


def good_loss(params: Any, batch: Any) -> Tensor:
    """A loss without fault."""
    return F.mse_loss(_forward(params, batch), batch["y"])


def _with(unit: Any) -> Callable[[Any, Any], Tensor]:
    return lambda params, batch: F.mse_loss(_forward(params, batch, unit), batch["y"])


BAD_LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str, tuple[str, ...]]] = {
    "vector": (lambda p, b: _forward(p, b).mean(0), "LossError", ("[3]", "float32", ".mean()")),
    "integer": (lambda p, b: _forward(p, b).argmax(), "LossError", ("int64", "[]", "floating")),
    "no tensor": (lambda p, b: 1.0, "LossError", ("float", "not a tensor", "scalar tensor")),
    "constant": (lambda p, b: b["y"].mean(), "LossError", ("does not depend", "no_grad")),
    "three results": (lambda p, b: (good_loss(p, b), 1, 2), "LossError", ("tuple", "(loss, aux dict)")),
    "writes into its input": (
        _with(writes_input),
        "UnitError",
        ("writes_input(middle", "input 0", "x = x + y"),
    ),
    "writes into its parameter": (
        _with(writes_parameter),
        "UnitError",
        ("writes_parameter(middle", "parameter middle.w", "clone"),
    ),
    "writes plainly into its parameter": (
        _with(writes_parameter_plainly),
        "UnitError",
        ("writes_parameter_plainly(middle", "middle.w", "clone"),
    ),
    "returns a parameter": (
        _with(leaks_parameter),
        "UnitError",
        ("leaks_parameter(middle", "output 1", "middle.w", ".clone()"),
    ),
}


def _batch(step: int, rank: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return {"x": torch.randn(ROWS, 6, generator=draw), "y": torch.randn(ROWS, 3, generator=draw)}


def _start(mesh: fs.Mesh) -> tuple[fs.Plan, Any]:
    plan = place(mesh)
    return plan, fs.init_state(plan, rule(), params=weights())


def _whole(state: Any, plan: fs.Plan) -> dict[str, Tensor]:
    return {path: leaf.clone() for path, leaf in tree.paths(fs.unshard(state.params, plan))}


def undisturbed(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """On a rank: good steps only."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, state = _start(mesh)
        step, losses = fs.make_train_step(good_loss, rule(), plan, clip_norm=0.1), []
        for number in range(steps):
            state, metrics = step(state, _batch(number, mesh.rank))
            losses.append(metrics.loss.item())
        return losses, _whole(state, plan)


def disturbed(name: str, at: int, steps: int) -> tuple[Raised | None, bool, list[float], dict[str, Tensor]]:
    """On a rank: good steps with one bad call before step ``at``; its error, and whether params stayed."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, state = _start(mesh)
        switch = Switch()
        step = fs.make_train_step(switch.loss, rule(), plan, clip_norm=0.1)
        losses: list[float] = []
        raised, same = None, False
        for number in range(steps):
            if number == at:
                before = _whole(state, plan)
                raised = attempt(lambda s=state: DISTURBANCES[name](switch, step, s, plan, mesh.rank))  # type: ignore[misc]
                after = _whole(state, plan)
                same = all(torch.equal(leaf, after[path]) for path, leaf in before.items())
                switch.mode = ""
            state, metrics = step(state, _batch(number, mesh.rank))
            losses.append(metrics.loss.item())
        return raised, same, losses, _whole(state, plan)


class Switch:
    """A loss that can be made to fail from outside, on one rank, as a bug or a flaky data source would."""

    def __init__(self) -> None:
        self.mode = ""

    def loss(self, params: Any, batch: Any) -> Tensor:
        """The good loss, unless a mode is set."""
        if self.mode == "first":
            raise ValueError("the loss does not like this batch")
        x = first(params["first"], batch["x"])
        if self.mode == "middle":
            raise ValueError("the loss does not like this batch")
        x = middle(params["middle"], x)
        if self.mode == "backward":
            x = _Refuse.apply(x)
        return F.mse_loss(last(params["last"], x), batch["y"])


class _Refuse(torch.autograd.Function):
    """The identity; its backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("the loss does not like this batch")


def _loss_fails(mode: str, bad_rank: int) -> Callable[..., None]:
    def disturb(switch: Switch, step: Any, state: Any, plan: fs.Plan, rank: int) -> None:
        switch.mode = mode if rank == bad_rank else ""
        step(state, _batch(50, rank))

    return disturb


def _nan_batch(switch: Switch, step: Any, state: Any, plan: fs.Plan, rank: int) -> None:
    batch = _batch(50, rank)
    if rank == 1:
        batch["x"][0, 0] = float("nan")
    step(state, batch)


def _uneven_batch(switch: Switch, step: Any, state: Any, plan: fs.Plan, rank: int) -> None:
    batch = _batch(50, rank)
    step(state, {key: leaf[: ROWS - rank] for key, leaf in batch.items()})


def _bad_loss(name: str) -> Callable[..., None]:
    def disturb(switch: Switch, step: Any, state: Any, plan: fs.Plan, rank: int) -> None:
        fs.make_train_step(BAD_LOSSES[name][0], rule(), plan)(state, _batch(50, rank))

    return disturb


def _uneven_microbatches(switch: Switch, step: Any, state: Any, plan: fs.Plan, rank: int) -> None:
    fs.make_train_step(switch.loss, rule(), plan, accumulate=3)(state, _batch(50, rank))


def _mean_loss(params: Any, batch: Any) -> fs.Mean:
    errors = (_forward(params, batch) - batch["y"]).square()
    return fs.Mean(errors.sum(), errors.numel())


def _mean_updated_in_backward(switch: Switch, step: Any, state: Any, plan: fs.Plan, rank: int) -> None:
    fs.make_train_step(_mean_loss, rule(), plan, schedule=fs.Policy(update="in_backward"))(state, _batch(50, rank))


DISTURBANCES: dict[str, Callable[..., None]] = {
    **{f"loss fails at {mode}": _loss_fails(mode, 1) for mode in ("first", "middle", "backward")},
    "loss fails on rank 0": _loss_fails("middle", 0),
    "nan batch": _nan_batch,
    "uneven batch": _uneven_batch,
    "uneven microbatches": _uneven_microbatches,
    "mean updated in backward": _mean_updated_in_backward,
    **{f"bad loss: {name}": _bad_loss(name) for name in BAD_LOSSES},
}


def _disturb(pool: Pools, world: int, name: str, at: int, steps: int = 3) -> list[Raised | None]:
    """Run with the disturbance, check that nothing of it stays, and return what each rank raised."""
    want = pool(world).run(undisturbed, steps)
    got = pool(world).run(disturbed, name, at, steps)
    for rank, ((losses, params), (_, same, their_losses, theirs)) in enumerate(zip(want, got, strict=True)):
        assert same, f"{name} changed the parameters of rank {rank}"
        assert their_losses == losses, f"rank {rank} goes on otherwise after {name}"
        assert all(torch.equal(leaf, theirs[path]) for path, leaf in params.items()), f"rank {rank}: {name}"
    return [raised for raised, *_ in got]


@pytest.mark.sample(3)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", ["loss fails at first", "loss fails at middle", "loss fails at backward"])
def test_an_exception_on_one_rank_reaches_all(pool: Pools, name: str, at: int) -> None:
    one, own, two = _disturb(pool, 3, name, at)
    assert own is not None and "ValueError" in own.kinds and "does not like this batch" in own.text
    for peer in (one, two):
        assert peer is not None and "PeerError" in peer.kinds, peer
        assert "rank 1" in peer.text, peer


def test_an_exception_on_rank_0_reaches_all(pool: Pools) -> None:
    own, peer = _disturb(pool, 2, "loss fails on rank 0", 1)
    assert own is not None and "ValueError" in own.kinds
    assert peer is not None and "PeerError" in peer.kinds and "rank 0" in peer.text


@pytest.mark.parametrize("at", [0, 2])
def test_a_nan_batch_on_one_rank(pool: Pools, at: int) -> None:
    alike(_disturb(pool, 3, "nan batch", at), "NonFiniteError", ("nan",))


@pytest.mark.parametrize("at", [0, 2])
def test_a_batch_whose_rows_differ_between_ranks(pool: Pools, at: int) -> None:
    alike(_disturb(pool, 2, "uneven batch", at), "BatchError", ("rank 0", "rank 1", "4", "3"))


def test_a_batch_that_microbatches_do_not_divide(pool: Pools) -> None:
    alike(_disturb(pool, 2, "uneven microbatches", 1), "BatchError", ("accumulate=3", "[4, 6]", "multiple of 3"))


@pytest.mark.parametrize("world", [1, 2])
def test_a_mean_whose_count_comes_after_the_update(pool: Pools, world: int) -> None:
    raised = _disturb(pool, world, "mean updated in backward", 1)
    alike(raised, "ShardError", ("fs.Mean", "in_backward", "deferred"))


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", BAD_LOSSES)
def test_a_loss_or_unit_that_no_step_can_take(pool: Pools, name: str, world: int) -> None:
    _, kind, says = BAD_LOSSES[name]
    alike(_disturb(pool, world, f"bad loss: {name}", 1), kind, says)


def donated() -> list[Raised | None]:
    """On a rank: what uses of a donated state raise, and those of a tensor taken from it before."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, state = _start(mesh)
        step = fs.make_train_step(good_loss, rule(), plan)
        taken = state.params["middle"]["w"]
        new, _ = step(state, _batch(0, mesh.rank))
        uses: list[Callable[[], Any]] = [
            lambda: step(state, _batch(1, mesh.rank)),
            lambda: state.params,
            lambda: taken + 1,
            lambda: taken.sum(),
            lambda: fs.unshard({**new.params, "middle": {"w": taken}}, plan),
        ]
        raised = [attempt(use) for use in uses]
        step(new, _batch(1, mesh.rank))  # and the one that came back is good
        return raised


@pytest.mark.parametrize("world", [1, 2])
def test_a_donated_state_and_its_tensors(pool: Pools, world: int) -> None:
    for uses in zip(*pool(world).run(donated), strict=True):
        alike(list(uses), "DonatedError", ("donate=False",))


def kept() -> tuple[bool, bool]:
    """On a rank, with ``donate=False``: the old state keeps its values and gives the same step again."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, state = _start(mesh)
        step = fs.make_train_step(good_loss, rule(), plan, donate=False)
        before = _whole(state, plan)
        once, _ = step(state, _batch(0, mesh.rank))
        again, _ = step(state, _batch(0, mesh.rank))
        first_, second = _whole(once, plan), _whole(again, plan)
        same = all(torch.equal(leaf, second[path]) for path, leaf in first_.items())
        after = _whole(state, plan)
        return all(torch.equal(leaf, after[path]) for path, leaf in before.items()), same


def test_a_state_that_is_not_donated_lives_on(pool: Pools) -> None:
    assert pool(2).run(kept) == [(True, True)] * 2
