"""Eval steps: global means, everything else local, and no trace of them in training."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import tree
from fshard.errors import DonatedError, LossError, PlanError
from tests.shared.bad import Raised, attempt, place, rule, weights
from tests.shared.workers import Pools
from tests.training.test_bad_steps import first, last, middle

ROWS = 12


def _batch(number: int, rank: int, world: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(number)
    whole = {
        "x": torch.randn(ROWS, 6, generator=draw),
        "y": torch.randn(ROWS, 3, generator=draw),
        "mask": (torch.arange(ROWS) % 5 != 0).float(),
        "index": torch.arange(ROWS),
    }
    return {name: rows.chunk(world)[rank] for name, rows in whole.items()}


def _forward(p: Any, x: Tensor) -> Tensor:
    return last(p["last"], middle(p["middle"], first(p["first"], x)))


def loss(p: Any, b: Any) -> Tensor:
    """The training loss."""
    return F.mse_loss(_forward(p, b["x"]), b["y"])


def report(p: Any, b: Any) -> dict[str, Any]:
    """Everything that an evaluation may return."""
    out = _forward(p, b["x"])
    losses = (out - b["y"]).square().mean(1)
    return {
        "loss": losses.mean(),
        "double": losses.double().mean(),
        "exact": fs.Mean((losses * b["mask"]).sum(), b["mask"].sum()),
        "counted": fs.Mean(losses.sum(), len(losses)),
        "rows": [out, (b["index"], None)],
        "number": b["index"].sum()[None],
        "text": "as it is",
        "grad": torch.is_grad_enabled(),
        "bias": p["last"]["b"],
        "view": p["middle"]["w"][0],
    }


def evaluated(debug: bool) -> list[dict[str, Any]]:
    """On a rank: what two evaluations on different states returned, looked at after both."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = place(mesh)
        evaluate = fs.make_eval_step(report, plan, debug=debug)
        ones = tree.map(torch.ones_like, weights())
        states = [fs.init_state(plan, rule(), params=params) for params in (weights(), ones)]
        results = [evaluate(state, _batch(9, mesh.rank, mesh.size)) for state in states]
        assert evaluate.record == tuple(op for op in evaluate.schedule.ops)
        assert not {"reduce_scatter", "wait reduce_scatter", "update", "backward"} & {
            op.kind for op in evaluate.record if op.target != "root"
        }
        return results


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_results(pool: Pools, world: int, debug: bool) -> None:
    ranks = pool(world).run(evaluated, debug)
    for number, params in enumerate((weights(), tree.map(torch.ones_like, weights()))):
        whole = report(params, _batch(9, 0, 1))
        for rank, got in enumerate(results[number] for results in ranks):
            for name in ("loss", "double"):
                assert got[name].item() == pytest.approx(whole[name].item(), rel=1e-6)
            for name in ("exact", "counted"):
                assert got[name].item() == pytest.approx(whole[name].value.item(), rel=1e-6)
            part = report(params, _batch(9, rank, world))
            torch.testing.assert_close(got["rows"][0], part["rows"][0])
            assert torch.equal(got["rows"][1][0], part["rows"][1][0]) and got["rows"][1][1] is None
            assert got["number"] == part["number"]
            assert (got["text"], got["grad"]) == ("as it is", False)
            assert not got["rows"][0].requires_grad
            # Parameters are returned as values: the memory they were read from goes on to hold others.
            assert torch.equal(got["bias"], params["last"]["b"]) and torch.equal(got["view"], params["middle"]["w"][0])


def auxiliary(debug: bool) -> list[dict[str, Tensor]]:
    """On a rank: auxiliary values that are parameters, of two steps, looked at after both."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = place(mesh)
        state = fs.init_state(plan, rule(), params=weights())

        def with_aux(p: Any, b: Any) -> Any:
            return loss(p, b), {"bias": p["last"]["b"], "row": p["middle"]["w"][0]}

        step, out = fs.make_train_step(with_aux, rule(), plan, debug=debug), []
        for number in range(2):
            want = fs.unshard(state.params, plan)
            state, metrics = step(state, _batch(number, mesh.rank, mesh.size))
            out += [{**metrics.aux, "want bias": want["last"]["b"], "want row": want["middle"]["w"][0]}]
        return out


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_auxiliary_values_of_a_train_step_last(pool: Pools, world: int, debug: bool) -> None:
    for steps in pool(world).run(auxiliary, debug):
        for seen in steps:
            assert torch.equal(seen["bias"], seen["want bias"]) and torch.equal(seen["row"], seen["want row"])
            assert not seen["bias"].requires_grad


def trained(evaluations: bool) -> tuple[list[float], dict[str, Tensor]]:
    """On a rank: some steps, with or without evaluations of the state between them."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = place(mesh)
        state = fs.init_state(plan, rule(), params=weights())
        step, evaluate = fs.make_train_step(loss, rule(), plan, clip_norm=0.2), fs.make_eval_step(report, plan)
        losses = []
        for number in range(4):
            batch = _batch(number, mesh.rank, mesh.size)
            if evaluations:
                before = evaluate(state, batch)["loss"].item()
                torch.rand(3)  # random numbers of the caller change nothing either
            state, metrics = step(state, batch)
            losses.append(metrics.loss.item())
            assert not evaluations or before == pytest.approx(losses[-1], abs=1e-6)
        return losses, dict(tree.paths(fs.unshard(state.params, plan)))


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_leaves_no_trace_in_training(pool: Pools, world: int) -> None:
    for (losses, params), (same_losses, same_params) in zip(
        pool(world).run(trained, False), pool(world).run(trained, True), strict=True
    ):
        assert losses == same_losses
        assert all(torch.equal(leaf, same_params[path]) for path, leaf in params.items())


def _fails_on(bad: int, mesh: fs.Mesh, where: str) -> Any:
    def fn(p: Any, b: Any) -> Tensor:
        if mesh.rank == bad and where == "early":
            raise ValueError("not this batch")
        out = _forward(p, b["x"])
        if mesh.rank == bad and where == "late":
            raise ValueError("not this batch")
        if where == "values" and b["x"].sum() > 1e9:
            raise ValueError("never")
        if mesh.rank == bad and where == "values" and b["index"].numel():
            raise ValueError("not this batch")
        return F.mse_loss(out, b["y"])

    return fn


def failing(where: str) -> tuple[Raised | None, float]:
    """On a rank: an evaluation that fails on rank 1, and one after it that does not."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = place(mesh)
        state = fs.init_state(plan, rule(), params=weights())
        batch = _batch(0, mesh.rank, mesh.size)
        raised = attempt(lambda: fs.make_eval_step(_fails_on(1, mesh, where), plan)(state, batch))
        return raised, fs.make_eval_step(_fails_on(-1, mesh, where), plan)(state, batch).item()


@pytest.mark.parametrize("where", ["early", "late", "values"])
def test_a_failure_on_one_rank_raises_on_all(pool: Pools, where: str) -> None:
    peer, own = pool(2).run(failing, where)
    assert own[0] is not None and own[0].kinds[0] == "ValueError"
    assert peer[0] is not None and "PeerError" in peer[0].kinds and "not this batch" in peer[0].text
    assert peer[1] == own[1] == pytest.approx(loss(weights(), _batch(0, 0, 1)).item(), abs=1e-6)


def by_value(p: Any, b: Any) -> dict[str, Any]:
    """Values decide which units run."""
    x = first(p["first"], b["x"])
    if b["x"].shape[0] and b["flag"]:
        x = middle(p["middle"], x)
    return {"loss": F.mse_loss(last(p["last"], x), b["y"])}


def on_demand() -> list[float]:
    """On a rank: evaluations whose program no trace finds, and one that leaves what was learned."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = place(mesh)
        state = fs.init_state(plan, rule(), params=weights())
        evaluate, out = fs.make_eval_step(by_value, plan, debug=True), []
        for number, flag in enumerate((False, False, True, True, False)):
            batch = {**_batch(number, mesh.rank, mesh.size), "flag": torch.tensor(flag)}
            out.append(evaluate(state, batch)["loss"].item())
        assert evaluate.schedule
        return out


@pytest.mark.parametrize("world", [1, 2])
def test_programs_that_depend_on_values(pool: Pools, world: int) -> None:
    flags = (False, False, True, True, False)
    want = [by_value(weights(), {**_batch(i, 0, 1), "flag": flag})["loss"].item() for i, flag in enumerate(flags)]
    for got in pool(world).run(on_demand):
        assert got == pytest.approx(want, abs=1e-6)


def test_states_that_cannot_be_evaluated() -> None:
    plan = place(fs.make_mesh((-1,), ("shard",)))
    state = fs.init_state(plan, rule(), params=weights())
    evaluate = fs.make_eval_step(loss, plan)
    with pytest.raises(PlanError, match="no schedule yet"):
        print(evaluate.schedule)
    following, _ = fs.make_train_step(loss, rule(), plan)(state, _batch(0, 0, 1))
    with pytest.raises(DonatedError, match="state of step 0"):
        evaluate(state, _batch(0, 0, 1))


def unlike_results(kind: str) -> list[Any]:
    """On a rank: an evaluation whose results differ between ranks in what is averaged, and one after it."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = place(mesh)
        state = fs.init_state(plan, rule(), params=weights())

        def fn(params: Any, batch: Any) -> dict[str, Any]:
            if kind == "on demand" and batch["x"].sum() > 1e9:
                raise AssertionError
            number = _forward(params, batch["x"]).mean()
            more = {"two": fs.Mean(number, 1), "own": batch["x"]} if mesh.rank or not batch["odd"] else {}
            if kind == "names":
                more = {"two" if mesh.rank or not batch["odd"] else "three": number}
            return {"one": number, **more}

        evaluate, found = fs.make_eval_step(fn, plan), []
        for odd in (True, False):
            try:
                found.append(evaluate(state, _batch(0, mesh.rank, mesh.size) | {"odd": odd})["two"].item())
            except LossError as error:
                found.append(str(error))
        return found


@pytest.mark.parametrize("kind", ["traced", "on demand", "names"])
def test_results_that_have_no_common_mean(pool: Pools, kind: str) -> None:
    """All ranks raise, and none waits for an average that others do not take."""
    first, second = pool(2).run(unlike_results, kind)
    assert first == second and isinstance(first[1], float)
    told = ["rank 0: a tensor as the loss, and 0 other numbers to average", "and 1 other"]
    if kind == "names":
        told = ["['three']: rank 0: a float, rank 1: nothing", "['two']: rank 0: nothing, rank 1: a float"]
    assert all(text in first[0] for text in told)
