"""Calls of step functions: each is one step, whatever it updates, and each does what the function does now."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.errors import LossError, ScheduleError, TreeError

OPT = fs.optim.adamw(0.1, weight_decay=0.0)
BATCH = torch.linspace(-1, 1, 8 * 3).view(8, 3)


def loss(params: Any, x: Tensor) -> Tensor:
    """A mean over rows, of which dropout leaves half."""
    return torch.nn.functional.dropout(x @ params["w"].T + params["b"], 0.5).square().mean()


def smooth(params: Any, x: Tensor) -> Tensor:
    """The same without dropout."""
    return (x @ params["w"].T + params["b"]).square().mean()


def whole() -> dict[str, Tensor]:
    """Parameters."""
    return {"w": torch.linspace(1, 2, 12).view(4, 3), "b": torch.ones(4)}


class Tools:
    """Parts, and what a step function does with them now: numbers of passes, evaluations and updates."""

    def __init__(self, ranks: int, of: Callable[[Any, Any], Tensor] = smooth) -> None:
        self.mesh = fs.virtual_mesh((ranks,), ("data",))
        self.plan = fs.make_plan(whole(), self.mesh, [(".*", fs.fsdp("data"))], batch=P("data"))
        self.grad, self.update = fs.value_and_grad(of, self.plan), fs.make_update(OPT, self.plan)
        self.evaluate = fs.make_eval_step(lambda params, x: {"seen": of(params, x)}, self.plan)
        self.does = SimpleNamespace(passes=1, evaluations=0, updates=1, asks=False, hand=0.0)
        self.step = fs.make_step(self.fn, self.plan)

    def fn(self, state: Any, batch: Any) -> Any:
        """The step function."""
        does, told = self.does, dict[str, Any]()
        if does.asks:
            float(batch.sum())
        for number in range(does.passes):
            told[f"loss {number}"], grads = self.grad(state, batch)
            if number < does.updates:
                state, metrics = self.update(state, grads)
                told[f"norm {number}"] = metrics.grad_norm
            elif does.hand:
                state = state.replace(params=fs.tree.add(state.params, grads, alpha=-does.hand))
        for number in range(does.evaluations):
            told[f"seen {number}"] = self.evaluate(state, batch)["seen"]
        return state, told


def plainly(flags: list[dict[str, Any]]) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The same calls in plain PyTorch, without dropout."""
    params = {name: leaf.clone().requires_grad_() for name, leaf in whole().items()}
    opt = torch.optim.AdamW([*params.values()], lr=0.1, weight_decay=0.0)
    does, out = SimpleNamespace(passes=1, evaluations=0, updates=1, asks=False, hand=0.0), []
    for each in flags:
        vars(does).update(each)
        told: dict[str, float] = {}
        for number in range(does.passes):
            value = smooth(params, BATCH)
            grads = torch.autograd.grad(value, [*params.values()])
            told[f"loss {number}"] = value.item()
            if number < does.updates:
                for leaf, found in zip(params.values(), grads, strict=True):
                    leaf.grad = found
                opt.step()
                told[f"norm {number}"] = torch.cat([found.flatten() for found in grads]).norm().item()
        for number in range(does.evaluations):
            told[f"seen {number}"] = smooth(params, BATCH).item()
        out.append(told)
    return {name: leaf.detach() for name, leaf in params.items()}, out


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(
    "does", [{"hand": 0.0, "updates": 0}, {"hand": 0.01, "updates": 0}, {}, {"passes": 2, "updates": 2}]
)
@pytest.mark.filterwarnings("ignore:.*run one by one")
def test_every_call_is_one_step_with_numbers_of_its_own(ranks: int, asks: bool, does: dict[str, Any]) -> None:
    tools = Tools(ranks, loss)
    vars(tools.does).update(does | {"asks": asks})
    state, seen, updates = fs.init_state(tools.plan, OPT, params=whole()), [], tools.does.updates
    for number in range(4):
        state, told = tools.step(state, BATCH)
        assert state.step == number + 1
        assert {state.step - state.late.get(path, 0) for path in ("w", "b")} == {updates * (number + 1)}
        seen.append(told["loss 0"].item())
    assert len(set(seen)) == 4  # dropout draws anew, also where nothing changes the parameters


FLAGS: list[dict[str, Any]] = [
    {}, {"evaluations": 2}, {"evaluations": 0}, {"updates": 0}, {"updates": 1}, {"passes": 2}, {"updates": 2},
    {"passes": 1}, {"updates": 0, "passes": 3}, {"passes": 1, "updates": 1, "evaluations": 1},
    {"passes": 2, "updates": 2}, {"evaluations": 0}, {"asks": True}, {"passes": 1}, {"asks": False},
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("start", range(4))
@pytest.mark.filterwarnings("ignore:.*run one by one", "ignore:.*left their schedule")
def test_flags_that_change_what_a_function_does(ranks: int, start: int) -> None:
    """Passes, updates and evaluations come and go: the numbers are those of plain PyTorch."""
    flags = FLAGS[start:] + FLAGS[:start]
    tools, numbers = Tools(ranks), []
    state = fs.init_state(tools.plan, OPT, params=whole())
    for each in flags:
        vars(tools.does).update(each)
        state, told = tools.step(state, BATCH)
        numbers.append({name: float(value) for name, value in told.items()})
    params, expected = plainly(flags)
    for mine, theirs in zip(numbers, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    found = dict(fs.tree.paths(state.params))
    assert state.step == len(flags) and all(torch.allclose(found[path], params[path], rtol=1e-4) for path in params)


def test_a_function_that_changed_is_recorded_anew() -> None:
    """One call runs part by part, and the next on a schedule of its own."""
    tools = Tools(2)
    state = fs.init_state(tools.plan, OPT, params=whole())
    state, _ = tools.step(state, BATCH)
    tools.does.evaluations = 1
    with pytest.warns(UserWarning, match="run one by one"):
        state, _ = tools.step(state, BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = tools.step(state, BATCH)
    assert tools.step.record == tools.step.schedule.ops and state.step == 3


@pytest.mark.filterwarnings("ignore:.*run one by one")
@pytest.mark.parametrize("flag", ["passes", "updates", "evaluations"])
def test_a_flag_that_differs_between_ranks_is_an_error_on_all(flag: str) -> None:
    tools = Tools(2)
    state = fs.init_state(tools.plan, OPT, params=whole())
    vars(tools.does)[flag] += 1
    tools.does.passes = max(tools.does.passes, tools.does.updates)
    state, _ = tools.step(state, BATCH)
    before = {path: leaf.clone() for path, leaf in fs.tree.paths(state.params)}
    many = vars(tools.does)[flag]

    class Unlike(SimpleNamespace):
        def __getattribute__(self, name: str) -> Any:
            return many - (tools.mesh.rank == 1) if name == flag else super().__getattribute__(name)

    alike, tools.does = tools.does, Unlike(**vars(tools.does))
    with pytest.raises(ScheduleError, match=r"different (calls|schedules)"):
        tools.step(state, BATCH)
    assert all(torch.equal(leaf, before[path]) for path, leaf in fs.tree.paths(state.params))
    tools.does = alike
    state, _ = tools.step(state, BATCH)
    assert state.step == 2


@pytest.mark.filterwarnings("ignore:.*run one by one")
@pytest.mark.parametrize("returned", ["whole number", "gradients", "rows"])
def test_what_differs_between_ranks_is_refused_and_takes_no_state(returned: str) -> None:
    """Outside of ``run`` it cannot be joined; the state is as before, and the next call continues from it."""
    tools, on = Tools(2), [True]

    def fn(state: Any, batch: Any) -> Any:
        _, grads = tools.grad(state, batch)
        state, metrics = tools.update(state, grads)
        told = {"whole number": tools.plan.mesh.rank, "gradients": grads, "rows": batch}[returned]
        return state, {"norm": metrics.grad_norm, **({"told": told} if on[0] else {})}

    step = fs.make_step(fn, tools.plan)
    state, kept = fs.init_state(tools.plan, OPT, params=whole()), list[Any]()
    for number in range(3):
        before = {path: leaf.clone() for path, leaf in fs.tree.paths(state.params)}
        on[0] = True
        try:
            step(state, BATCH)
        except (TreeError, LossError) as error:
            kept[:] = [error]  # as notebooks keep the latest error
        assert ("between ranks" in str(kept[0]) or "equal on all ranks" in str(kept[0])) and state.step == number
        assert all(torch.equal(leaf, before[path]) for path, leaf in fs.tree.paths(state.params))
        on[0] = False
        state, _ = step(state, BATCH)
    assert state.step == 3
