"""Steps computed twice: a bit that flips on any rank is caught before the update, and named."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.errors import CorruptionError, PlanError

OPT = fs.optim.adamw(1e-2)


class Flip(torch.autograd.Function):
    """The identity, whose backward flips the lowest bit of one element where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flips: Any) -> Tensor:
        """Hand on."""
        ctx.flips = flips
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Hand on, but for a bit."""
        if ctx.flips():
            grad = grad.clone()
            grad.view(torch.int32).view(-1)[0] ^= 1 << 20
        return grad, None


class Net(nn.Module):
    """Three blocks; the gradient that reaches the middle one may be wrong."""

    def __init__(self, flips: Any = bool) -> None:
        super().__init__()
        self.blocks, self.flips = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), flips

    def forward(self, x: Tensor) -> Tensor:
        """Rows to rows."""
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if number == 1:
                x = Flip.apply(x, self.flips)
        return x


def trained(mesh: Any, every: int, bad: int = -1, at: int = 3, rules: Any = None, **options: Any) -> list[Tensor]:
    """The losses of five steps; on one rank, in one of two computations of a step, a bit is wrong."""
    calls = {"step": 0, "left": 1}

    def flips() -> bool:
        if bad == mesh.rank and calls["step"] == at and calls["left"]:
            calls["left"] -= 1
            return True
        return False

    model = fs.split(Net(flips), units=("blocks.*",))
    plan = fs.make_plan(model, mesh, rules or [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    step = fs.recheck(
        fs.make_train_step(lambda p, x: model.apply(p, x).square().mean(), OPT, plan, **options), every=every
    )
    state, losses = fs.init_state(plan, OPT, seed=0), []
    for number in range(5):
        calls["step"] = number + 1
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number * 10 + mesh.rank))
        try:
            state, metrics = step(state, x)
        except CorruptionError:
            kept = fs.unshard(state.params, plan)
            state, metrics = step(state, x)
            assert not all(
                map(torch.equal, fs.tree.leaves(kept), fs.tree.leaves(fs.unshard(fs.settle(state).params, plan)))
            )
            losses.append(torch.tensor(-1.0))
        losses.append(metrics.loss)
    return losses


def on(ranks: int, *args: Any, **options: Any) -> list[Any]:
    """The losses of each rank, or the error."""
    mesh = fs.virtual_mesh((ranks,), ("data",))
    torch.manual_seed(0)
    return mesh.run(lambda: trained(mesh, *args, **options))


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"rules": [(".*", fs.P())]}, {"compile": "fx"}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_computed_twice_train_alike(ranks: int, options: Any) -> None:
    (once, *_), (twice, *_) = on(ranks, 100, **options), on(ranks, 2, **options)
    assert all(map(torch.equal, once, twice))


@pytest.mark.sample(4)
@pytest.mark.parametrize("rules", [None, [(".*", fs.P())], [fs.Rule(".*", fs.P(), opt=fs.fsdp("data"))]])
@pytest.mark.parametrize("bad", range(4))
def test_a_flipped_bit_is_caught_and_named(bad: int, rules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    real = CorruptionError.__init__
    monkeypatch.setattr(CorruptionError, "__init__", lambda self, text: (said.append(text), real(self, text))[1])
    good, found = on(4, 3, rules=rules), on(4, 3, bad, rules=rules)
    for mine, other in zip(good, found, strict=True):
        assert other[2].item() == -1.0 and all(map(torch.equal, mine, [*other[:2], *other[3:]]))
    assert len(said) == 4 and len(set(said)) == 1
    assert "step 3 was computed twice" in said[0] and f"rank {bad}, on " in said[0]
    assert "from the backward of blocks.1" in said[0] and said[0].count("rank ") == 2


def test_a_flip_in_a_step_that_is_computed_once_is_not_seen() -> None:
    good, found = on(2, 2, -1), on(2, 2, 1)
    assert not all(map(torch.equal, good[0], found[0]))


def test_what_cannot_be_computed_again_is_refused() -> None:
    plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    step = fs.make_train_step(lambda p, x: p["w"].sum(), OPT, plan, schedule=fs.Policy(update="in_backward"))
    tried = ((step, 2, "in_backward"), (lambda s, x: s, 2, "give what fs.make_train_step"), (step, 0, "int >= 1"))
    for given, every, why in tried:
        with pytest.raises(PlanError, match=why):
            fs.recheck(given, every=every)


def test_a_cell_may_recheck_a_virtual_mesh() -> None:
    mesh = fs.virtual_mesh((2,), ("data",))
    plan = fs.make_plan({"w": torch.ones(4)}, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    step = fs.make_train_step(lambda p, x: (p["w"] * x).mean(), OPT, plan)
    checked, state = fs.recheck(step, every=2), fs.init_state(plan, OPT, params={"w": torch.ones(4)})
    for _ in range(4):
        state, metrics = checked(state, torch.ones(4, 4))
    assert state.step == 4 and metrics.loss.isfinite()


def test_steps_on_demand_are_computed_once() -> None:
    mesh = fs.make_mesh((1,), ("data",))
    plan = fs.make_plan({"w": torch.ones(4)}, mesh, [(".*", fs.fsdp("data"))])
    calls = []

    def loss(params: Any, x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            calls.append(x.shape)
        return (params["w"] * x).mean()

    step, state = (
        fs.recheck(fs.make_train_step(loss, OPT, plan), every=1),
        fs.init_state(plan, OPT, params={"w": torch.ones(4)}),
    )
    for rows in (1, 2, 3):
        state, _ = step(state, torch.ones(rows, 4))
    assert state.step == 3
