"""What fails once on one rank, at whatever point of a step, fails that step on all ranks and leaves the mesh whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.runtime.execution.actions import Actions
from tests.shared.workers import Pools


class WrongError(Exception):
    """What the fault raises."""


def scheduled(model: fs.Model) -> Callable[..., Any]:
    """A loss that a trace finds."""
    return lambda params, batch: model.apply(params, batch["x"]).square().mean()


def demanded(model: fs.Model) -> Callable[..., Any]:
    """A loss that asks for a value, so that its first step gathers on demand."""

    def loss(params: Any, batch: Any) -> Tensor:
        y = model.apply(params, batch["x"])
        return y.square().mean() * (2.0 if y.sum().item() > 1e9 else 1.0)

    return loss


def leaving(model: fs.Model) -> Callable[..., Any]:
    """A loss that leaves its schedule where the batch's number says so: a unit is called once more."""

    def loss(params: Any, batch: Any) -> Tensor:
        y = model.apply(params, batch["x"])
        if not isinstance(y, torch._subclasses.FakeTensor) and batch["again"].item():
            y = model.apply(params, y)
        return y.square().mean()

    return loss


def failing(name: str, rank: int) -> None:
    """Let a function of actions fail at its next call on rank 1, before it does anything."""
    right, calls = getattr(Actions, name), []

    def once(self: Actions, buffers: Any) -> Any:
        calls.append(rank)
        if calls == [1]:
            raise WrongError(name)
        return right(self, buffers)

    setattr(Actions, name, once)


CASES: dict[str, tuple[Callable[[fs.Model], Any], str, bool, str]] = {
    "a gather on demand": (demanded, "_gather", False, "WrongError|PeerError"),
    "a gather's end on demand": (demanded, "_gathered", False, "WrongError|PeerError"),
    "a reduction on demand": (demanded, "_reduce", False, "WrongError|PeerError"),
    "a reduction's end on demand": (demanded, "_reduced", False, "WrongError|PeerError"),
    "a reduction": (scheduled, "_reduce", False, "WrongError|PeerError"),
    "a gather": (scheduled, "_gather", False, "WrongError|PeerError"),
    "a reduction after leaving the schedule": (leaving, "_reduce", True, "made"),
}


def on_rank(name: str) -> tuple[str, bool, str]:
    """What the step with the fault raised, whether the state was as before, and whether the next one was made."""
    make, function, again, _ = CASES[name]
    with fs.make_mesh((-1,), ("shard",), timeout=8.0) as mesh:
        torch.manual_seed(0)
        model = fs.split(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), units=["*"])
        plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))])
        opt = fs.optim.adamw(1e-2)
        state = fs.init_state(plan, opt, seed=0)
        step = fs.make_train_step(make(model), opt, plan)
        before = [leaf.clone() for leaf in fs.tree.leaves(state.params)]
        batch = {"x": torch.ones(2, 8) * (mesh.rank + 1), "again": torch.tensor(again)}
        right = getattr(Actions, function)
        failing(function, mesh.rank)
        raised = "made"
        try:
            state, _ = step(state, batch)
        except Exception as error:
            raised = type(error).__name__
        finally:
            setattr(Actions, function, right)
        same = all(torch.equal(a, b) for a, b in zip(before, fs.tree.leaves(state.params), strict=True))
        state, metrics = step(state, batch)
        return raised, same, "made" if torch.isfinite(metrics.loss) else "nan"


@pytest.mark.parametrize("name", list(CASES))
def test_what_fails_once_fails_one_step(pool: Pools, name: str) -> None:
    want = CASES[name][3]
    found = pool(2).run("tests.faults.test_once:on_rank", name)
    assert {raised for raised, *_ in found} == set(want.split("|"))
    assert [same for _, same, _ in found] == [want != "made"] * 2
    assert [following for *_, following in found] == ["made"] * 2


def with_means(kind: str) -> tuple[str, str]:
    """What a step with infinities of both signs came to, and the next one."""
    with fs.make_mesh((-1,), ("shard",), timeout=8.0) as mesh:
        params = {"w": torch.ones(8, 8)}
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))])
        opt = fs.optim.sgd(0.1)

        def loss(params: Any, batch: Tensor) -> Any:
            value = (batch[:, 1:] @ params["w"]).square().mean()
            if kind == "loss":
                return value + batch[0, 0]
            return value, {"m": fs.Mean(batch[0, 0], 1.0)}

        state = fs.init_state(plan, opt, params=params)
        step = fs.make_train_step(loss, opt, plan)
        told = []
        for value in (-torch.inf if mesh.rank else torch.inf, 0.0):
            batch = torch.ones(2, 9)
            batch[0, 0] = value
            try:
                state, metrics = step(state, batch)
                told.append(f"{metrics.aux['m'].item()}" if kind != "loss" else "made")
            except Exception as error:
                told.append(type(error).__name__)
        return told[0], told[1]


@pytest.mark.parametrize(("kind", "want"), [("aux", "nan"), ("loss", "NonFiniteError")])
def test_infinities_of_both_signs_leave_the_mesh_whole(pool: Pools, kind: str, want: str) -> None:
    found = pool(2).run("tests.faults.test_once:with_means", kind)
    assert [first for first, _ in found] == [want] * 2
    assert [second for _, second in found] == ["0.0" if kind == "aux" else "made"] * 2


def uneven_inside() -> tuple[str, str]:
    """What a step on demand came to whose microbatches are unequal on one rank alone, and the next one."""
    with fs.make_mesh((-1,), ("shard",), timeout=8.0) as mesh:
        params = {"w": torch.ones(8, 8)}
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))])
        opt = fs.optim.sgd(0.1)

        def loss(params: Any, batch: Tensor) -> Tensor:
            y = batch @ params["w"]
            return y.square().mean() * (2.0 if y.sum().item() > 1e9 else 1.0)

        state = fs.init_state(plan, opt, params=params)
        step = fs.make_train_step(loss, opt, plan, accumulate=2)
        told = []
        for odd in (mesh.rank == 1, False):
            parts = [torch.ones(2, 3 + odd, 8), torch.ones(2, 3, 8)]
            try:
                state, _ = step(state, fs.Microbatches(parts))
                told.append("made")
            except Exception as error:
                told.append(type(error).__name__)
        return told[0], told[1]


def test_unequal_microbatches_on_one_rank_are_told_to_all(pool: Pools) -> None:
    found = pool(2).run("tests.faults.test_once:uneven_inside")
    assert found == [("PeerError", "made"), ("BatchError", "made")]


def test_a_mean_of_many_elements_is_refused_in_evaluation() -> None:
    params = {"w": torch.ones(2, 2)}
    plan = fs.make_plan(params, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    state = fs.init_state(plan, fs.optim.sgd(0.1), params=params)
    one = fs.make_eval_step(lambda p, b: fs.Mean((b @ p["w"]).sum().reshape(1), torch.tensor([4])), plan)
    assert one(state, torch.ones(2, 2)).item() == 2.0
    several = fs.make_eval_step(lambda p, b: fs.Mean((b @ p["w"]).sum(0), 2), plan)
    with pytest.raises(fs.errors.LossError, match=r"\[2\]"):
        several(state, torch.ones(2, 2))
