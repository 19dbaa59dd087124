"""Random mistakes on one rank, before a call and in it: the steps that were made are those of plain PyTorch."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from tests.shared.workers import Pools

STEPS, LONG = 30, 20.0


class MadeUpError(Exception):
    """What a loss function raises."""


def net() -> nn.Module:
    """Three layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def data(number: int) -> Tensor:
    """The global batch of a step."""
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(number))


def run(seed: int) -> tuple[float, int, int, float]:
    """On a rank: the largest difference from plain PyTorch, the steps made, the mistakes, and the longest wait."""
    with fs.make_mesh((-1,), ("data",), timeout=LONG) as mesh:
        draw, fault = random.Random(seed), [""]
        model = fs.split(net(), units=["0", "2", "4"])
        plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
        opt = fs.optim.adamw(0.05, weight_decay=0.0)

        def loss(params: Any, x: Tensor) -> Tensor:
            if fault[0] == "early":
                raise MadeUpError
            y = model.apply(params, x)
            if fault[0] == "late":
                raise MadeUpError
            return (y * float("nan") if fault[0] == "nan" else y).square().mean()

        state = fs.init_state(plan, opt, params=model.params)
        step, evaluate = fs.make_train_step(loss, opt, plan), fs.make_eval_step(loss, plan)
        twin = net()
        rule = torch.optim.AdamW(twin.parameters(), 0.05, weight_decay=0.0)
        gone, made, told, longest = state, 0, 0, 0.0
        for number in range(STEPS):
            what, mine = draw.choice(KINDS), draw.randrange(mesh.size) == mesh.rank
            x, began = plan.local_batch(data(number)), time.monotonic()
            fault[0] = what if mine else ""
            others: dict[str, Callable[[], Any]] = {
                "donated": lambda: step(gone, x),  # noqa: B023
                "option": lambda: step(state, x, nonsense=1),  # type: ignore[call-arg]  # noqa: B023
                "state": lambda: step(None, x),  # type: ignore[arg-type]  # noqa: B023
                "shape": lambda: step(state, x[:, :3]),  # noqa: B023
                "evaluation": lambda: evaluate(state.params, x),  # type: ignore[arg-type]  # noqa: B023
                "unshard": lambda: fs.unshard({}, plan),
            }
            right = {"evaluation": lambda: evaluate(state, x), "unshard": lambda: fs.unshard(state.params, plan)}  # noqa: B023
            try:
                if what in others and mine and (what != "donated" or made):
                    others[what]()
                elif what in right:
                    right[what]()
                else:
                    before = state
                    state, _ = step(state, x)
                    gone, made = before, made + 1
                    rule.zero_grad()
                    twin(data(number)).square().mean().backward()
                    rule.step()
            except Exception:
                assert what
                told += 1
            longest = max(longest, time.monotonic() - began)
        assert state.step == made
        whole = dict(fs.tree.paths(fs.unshard(state.params, plan)))
        off = max((whole[path] - leaf).abs().max().item() for path, leaf in twin.named_parameters())
        return off, made, told, longest


KINDS = ("", "", "", "early", "late", "nan", "donated", "option", "state", "shape", "evaluation", "unshard")
"""What rank may do wrong in a step; nothing in some."""


def check(found: list[tuple[float, int, int, float]]) -> None:
    """All ranks made the same steps, with the right numbers, and none waited long."""
    assert len({row[1:3] for row in found}) == 1
    for off, made, told, longest in found:
        assert off < 1e-5 and made > 3 and told > STEPS // 3 and longest < LONG / 2


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_played_ranks_go_on_after_mistakes(seed: int) -> None:
    check(fs.virtual_mesh((3,), ("any",)).run(run, seed))


@pytest.mark.processes
def test_processes_go_on_after_mistakes(pool: Pools) -> None:
    check(pool(2).run(run, 2))
