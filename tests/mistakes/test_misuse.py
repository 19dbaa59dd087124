"""What users do by accident: each is refused on all ranks alike, or made to be right, and the next step is good."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard.errors import BatchError, LossError, NonFiniteError, PlanError, TreeError, UnitError
from tests.shared.bad import Raised, attempt
from tests.shared.workers import Pools

ROWS = 8


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """A linear map and tanh."""
    return torch.tanh(x @ p["w"])


def params() -> dict[str, Any]:
    """Two layers and a table that code between units reads."""
    made = torch.Generator().manual_seed(0)
    layers = {str(i): {"w": torch.randn(4, 4, generator=made)} for i in range(2)}
    return {"layers": layers, "table": torch.ones(4)}


def model(p: Any, x: Tensor) -> Tensor:
    """The program."""
    for i in "01":
        x = layer(p["layers"][i], x)
    return x * p["table"]


def loss(p: Any, batch: Any) -> Tensor:
    """A mean loss."""
    return F.mse_loss(model(p, batch["x"]), batch["y"])


def batch_of(rank: int = 0) -> dict[str, Tensor]:
    """A rank's batch."""
    made = torch.Generator().manual_seed(5 + rank)
    return {"x": torch.randn(ROWS, 4, generator=made), "y": torch.randn(ROWS, 4, generator=made)}


def made(fn: Any = loss, mesh: fs.Mesh | None = None, opt: Any = None, **options: Any) -> tuple[Any, fs.TrainState]:
    """A step and its state."""
    mesh = mesh or fs.make_mesh((-1,), ("shard",))
    plan = fs.make_plan(params(), mesh, [(".*", fs.fsdp("shard"))], units=("layers.*",))
    opt = opt or fs.optim.sgd(0.1)
    return fs.make_train_step(fn, opt, plan, **options), fs.init_state(plan, opt, params=params())


def test_a_unit_cannot_have_the_name_of_the_code_between_units() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.root = nn.Linear(2, 2)

    with pytest.raises(PlanError, match="cannot be called 'root'"):
        fs.make_plan(fs.split(Net(), units=("root",)), fs.abstract_mesh((2,), ("shard",)), [(".*", fs.fsdp("shard"))])
    with pytest.raises(PlanError, match="cannot be called 'root'"):
        fs.make_plan({"root": {"w": torch.ones(2)}}, fs.abstract_mesh((2,), ("shard",)), [(".*", fs.P())], units=("*",))


def test_parameters_of_an_earlier_step_are_refused() -> None:
    kept: dict[str, Any] = {}
    mode = ["plain"]

    def late(p: Any, batch: Any) -> Tensor:
        if mode[0] == "keep":
            kept.update(p)
        return loss(p, batch) + (kept["layers"]["0"]["w"].sum() if mode[0] == "use" else 0.0)

    step, state = made(late)
    for mode[0] in ("plain", "keep"):
        state, _ = step(state, batch_of())
    other, mode[0] = made(late)[0], "plain"
    state, _ = other(state, batch_of())
    mode[0] = "use"
    with pytest.raises(UnitError, match="another step"):
        other(state, batch_of())
    mode[0] = "plain"
    state, metrics = step(state, batch_of())
    assert metrics.loss.isfinite()


def test_autocast_around_the_loop_sees_new_weights() -> None:
    def run(cast: bool) -> list[float]:
        step, state = made(opt=fs.optim.sgd(1.0))
        out = []
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            for _ in range(4):
                state, metrics = step(state, batch_of())
                out.append(metrics.loss.item())
        return out

    plain, cast = run(False), run(True)
    assert plain[-1] < 0.9 * plain[0]
    assert all(abs(a - b) < 0.03 for a, b in zip(plain, cast, strict=True))


def test_code_between_units_cannot_write_to_parameters() -> None:
    def writes(p: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            p["table"].add_(1.0)
        return loss(p, batch)

    step, state = made(writes)
    with pytest.raises(UnitError, match="table"):
        step(state, batch_of())
    assert torch.equal(state.params["table"], torch.ones(4))


def test_values_that_no_step_should_take() -> None:
    step, state = made(lambda p, batch: loss(p, batch) + float("nan"))
    with pytest.raises(NonFiniteError, match="can be used again"):
        step(state, batch_of())
    with pytest.raises(TreeError, match="takes what init_state"):
        step(state.params, batch_of())
    halves, state = made(accumulate=2)
    with pytest.raises(BatchError, match="no tensor"):
        halves(state, {**batch_of(), "z": batch_of()["x"].numpy()})
    with pytest.raises(BatchError, match="different leading dims"):
        halves(state, {**batch_of(), "weights": torch.ones(2)})
    with pytest.raises(PlanError, match="complex"):
        complex_leaf = {"w": torch.ones(2, dtype=torch.complex64)}
        fs.make_plan(complex_leaf, fs.abstract_mesh((1,), ("shard",)), [(".*", fs.P())])
    with pytest.raises(PlanError, match=r"fs\.split"):
        fs.make_plan(nn.Linear(2, 2), fs.abstract_mesh((1,), ("shard",)), [(".*", fs.P())])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_without_sizes_are_refused_before_anything_is_sent() -> None:
    step, state = made()
    state, _ = step(state, batch_of())  # whose program knows such a batch
    ragged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(1, 4)])
    with pytest.raises(BatchError, match=r"batch\['x'\]\s+Make them with layout=torch.jagged"):
        step(state, {**batch_of(), "x": ragged})
    step(state, batch_of())


def test_microbatches_return_the_same_things() -> None:
    def fickle(p: Any, batch: Any) -> Any:
        value = loss(p, batch)
        return value, ({"a": value} if batch["x"].sum() > 0 else {"b": value})

    def by_count(p: Any, batch: Any) -> Any:
        return fs.Mean(loss(p, batch) * 3, torch.ones(3))

    step, state = made(fickle, accumulate=2)
    batch = batch_of()
    batch["x"] = torch.cat((batch["x"][:4].abs(), -batch["x"][:4].abs()))
    with pytest.raises(LossError, match="two microbatches"):
        step(state, batch)
    step, state = made(by_count)
    with pytest.raises(LossError, match="0-dim count"):
        step(state, batch_of())


def test_units_made_inside_of_the_loss_leave_nothing_behind() -> None:
    def inner(p: Any, batch: Any) -> Tensor:
        big = torch.zeros(1000)

        @fs.unit
        def fresh(q: Any, x: Tensor) -> Tensor:
            return x @ q["w"] + big[0]

        return F.mse_loss(fresh(p["layers"]["0"], batch["x"]), batch["y"])

    step, state = made(inner)
    for _ in range(5):
        state, _ = step(state, batch_of())
    assert len(step._runner.latest.prepared.engine.units.reads) == 1


def one_sided(name: str) -> tuple[Raised | None, float, float]:
    """On a rank: what a step raised that is wrong on rank 0 alone, and the losses of the next two."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        wrong = [mesh.rank == 0]

        def fn(p: Any, batch: Any) -> Any:
            value = loss(p, batch)
            if name == "mean in aux":
                return value, ({"count": fs.Mean(value.detach() * 2, 2)} if wrong[0] else {"count": value})
            return fs.Mean(value * ROWS, ROWS) if name == "mean" and wrong[0] else value

        def rate(step: int) -> float:
            if name == "rate" and wrong[0]:
                raise ZeroDivisionError("no such rate")
            return 0.1

        step, state = made(fn, mesh, fs.optim.sgd(rate))
        if name == "requires grad" and wrong[0]:
            state.params["table"].requires_grad_()
        raised = attempt(lambda: step(state, batch_of(mesh.rank)))
        wrong[0] = False
        step, state = made(fn, mesh, fs.optim.sgd(rate))
        state, first = step(state, batch_of(mesh.rank))
        state, second = step(state, batch_of(mesh.rank))
        return raised, first.loss.item(), second.loss.item()


@pytest.mark.parametrize("name", ["mean in aux", "mean", "rate", "requires grad"])
def test_what_is_wrong_on_one_rank_reaches_all(pool: Pools, name: str) -> None:
    ranks = pool(2).run(one_sided, name)
    raised = [rank[0] for rank in ranks]
    if name == "requires grad":
        assert raised == [None, None]
    else:
        assert all(error is not None for error in raised), raised
        assert ("ZeroDivisionError" in raised[0].kinds and "PeerError" in raised[1].kinds) or all(
            "LossError" in error.kinds or "ScheduleError" in error.kinds for error in raised
        ), raised
    assert ranks[0][1:] == ranks[1][1:]


CALLS: dict[str, Any] = {
    "evaluation step": lambda plan, state, x: fs.make_eval_step(model, plan)(state, x),
    "train step": lambda plan, state, x: made()[0](state, batch_of()),
    "part of a step": lambda plan, state, x: fs.value_and_grad(loss, plan)(state.params, batch_of())[0],
    "step": lambda plan, state, x: fs.make_step(lambda s, b: (s, {}), plan)(state, x),
    "unshard": lambda plan, state, x: fs.unshard(state.params, plan),
}
"""Collective calls of their own."""


@pytest.mark.parametrize("reads", [False, True], ids=["traced", "on demand"])
@pytest.mark.parametrize("call", CALLS)
def test_a_collective_call_inside_of_a_loss_is_told(call: str, reads: bool) -> None:
    def nested(p: Any, batch: Any) -> Tensor:
        if reads:
            batch["x"].sum().item()
        CALLS[call](other.plan, teacher, batch["x"])
        return loss(p, batch)

    other, teacher = made()
    step, state = made(nested)
    with pytest.raises(LossError, match=rf"^{call}: a function that a step runs made this collective call of its own"):
        step(state, batch_of())
    assert other(teacher, batch_of())[0].step == 1
