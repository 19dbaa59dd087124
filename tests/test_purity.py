"""What a call writes to its modules is seen by code that runs later in the call, and gone when the call is over."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from tests.impure import WIDTH, Root

RULES = [(".*", fs.fsdp("shard"))]
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "fx": {"compile": "fx"},
    "remat": {"remat": "all"},
    "both": {"compile": "fx", "remat": "all"},
}
FEW, MANY = range(12), range(12, 80)


def _x(seed: int = 0) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _plain(root: nn.Module, x: Tensor) -> Tensor:
    """One call of the module, as if it were the first."""
    out: Tensor = copy.deepcopy(root)(x)
    return out


def _plain_steps(root: nn.Module, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    root = copy.deepcopy(root)
    losses = []
    for i in range(steps):
        used = copy.deepcopy(root)
        loss = used(_x(i))
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for kept, moved in zip(root.parameters(), used.parameters(), strict=True):
                if moved.grad is not None:
                    kept -= 0.01 * moved.grad
    return losses, {path: leaf.detach() for path, leaf in root.named_parameters()}


def check_applies(seed: int, units: Any) -> None:
    root = Root(seed).double()
    model = fs.split(root, units)
    for i in range(3):
        torch.testing.assert_close(model.apply(model.params, _x(i)), _plain(root, _x(i)))


def check_steps(seed: int, how: dict[str, Any], mesh: fs.Mesh) -> str:
    root = Root(seed).double()
    model = fs.split(root, "nodes.*")
    opt = fs.optim.sgd(0.01)
    plan = fs.make_plan(model, mesh, RULES, batch=fs.P("shard"))
    state = fs.init_state(plan, opt, params=model.params)
    step = fs.make_train_step(lambda params, x: model.apply(params, x), opt, plan, **how)
    losses = []
    for i in range(3):
        state, metrics = step(state, _x(i))
        losses.append(metrics.loss.item())
    expected, params = _plain_steps(root, 3)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=1e-6)
    for path, leaf in tree.paths(fs.unshard(state.params, plan)):
        torch.testing.assert_close(leaf, params[path])
    return str(step.units)


@pytest.mark.parametrize("seed", FEW)
def test_calls_of_generated_modules_leave_nothing_behind(seed: int) -> None:
    check_applies(seed, ())
    check_applies(seed, "nodes.*")


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY)
def test_calls_of_many_generated_modules_leave_nothing_behind(seed: int) -> None:
    check_applies(seed, ())
    check_applies(seed, "nodes.*")
    for how in WAYS.values():
        check_steps(seed, how, fs.make_mesh((-1,), ("shard",)))


@pytest.mark.parametrize("way", WAYS)
def test_steps_of_generated_modules_see_what_their_units_write(way: str) -> None:
    for seed in (1, 3, 4, 7):
        check_steps(seed, WAYS[way], fs.make_mesh((-1,), ("shard",)))
