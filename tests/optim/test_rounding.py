"""Stochastic rounding of bfloat16 parameters: right on average, the same on every mesh, and able to learn."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P, tree
from fshard.errors import PlanError
from fshard.model.philox import fold, uniform
from fshard.runtime.execution.rounding import round_stochastic
from tests.runtime.test_memory_kinds import KINDS, hosted
from tests.shared.workers import Pools

BF16 = torch.bfloat16
STOCHASTIC = fs.Precision(rounding="stochastic")
STEPS = 6


def params() -> dict[str, Any]:
    """Leaves of sizes that no number of ranks divides, in bfloat16, and one in float32."""
    draw = torch.Generator().manual_seed(2)
    return {
        "a": {"w": torch.randn(7, 5, generator=draw).to(BF16), "b": torch.randn(3, generator=draw).to(BF16)},
        "out": torch.randn(11, generator=draw).to(BF16),
        "exact": torch.randn(4, generator=draw),
    }


def loss_fn(p: Any, slope: Tensor) -> Tensor:
    """Linear, so that gradients are exact and equal on all ranks."""
    total: Tensor = sum((leaf.float() * slope[0]).sum() for leaf in tree.leaves(p))  # type: ignore[assignment]
    return total


def trained(name: str, spec: P, kinds: str = "") -> list[dict[str, Tensor]]:
    """On a rank: parameters and optimizer state, whole, after training; with ``kinds`` of memory."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        rules = hosted([("exact", P()), (".*", spec)], KINDS.get(kinds, {}))
        plan = fs.make_plan(params(), mesh, rules, units=("a",), precision=STOCHASTIC)
        opt = _opt(name)
        state = fs.init_state(plan, opt, seed=7, params=params())
        step = fs.make_train_step(loss_fn, opt, plan, debug=True)
        for _ in range(STEPS):
            state, _ = step(state, torch.full((2,), 0.5))
        return [dict(tree.paths(fs.unshard(t, plan))) for t in (state.params, *state.opt_state.values())]


def _opt(name: str) -> Any:
    return fs.optim.adamw(1e-3, weight_decay=0.1) if name == "adamw" else fs.optim.sgd(1e-3, momentum=0.9)


def plain(name: str) -> dict[str, Tensor]:
    """In one process, with torch's own optimizer in float32, and rounding here."""
    kept = dict(tree.paths(params()))
    made: dict[str, dict[str, Tensor]] = {path: {} for path in kept}
    for number in range(STEPS):
        for path, leaf in kept.items():
            wide = leaf.float().requires_grad_()
            rule: Any = torch.optim.SGD([wide], lr=1e-3, momentum=0.9)
            if name == "adamw":
                rule = torch.optim.AdamW([wide], lr=1e-3, weight_decay=0.1, fused=True)
            if made[path]:
                rule.state[wide] = {
                    **{k: v.float() for k, v in made[path].items()},
                    **({"step": torch.tensor(float(number))} if name == "adamw" else {}),
                }
            wide.grad = torch.full_like(wide, 0.5)
            rule.step()
            states = {k: v for k, v in rule.state[wide].items() if k != "step"}
            if leaf.dtype == BF16:
                kept[path] = _rounded(wide.detach(), number, "", path)
                made[path] = {k: _rounded(v, number, k, path) for k, v in states.items()}
            else:
                kept[path], made[path] = wide.detach(), states
    return kept


def _rounded(x: Tensor, step: int, what: str, path: str) -> Tensor:
    """Up with the probability of the cut bits, by arithmetic instead of bits."""
    draw = uniform(fold(7, f"round:{what}:{step}:{path}"), torch.arange(x.numel())).view(x.shape)
    down = (x.view(torch.int32) & -65536).view(torch.float32)
    up = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    share = ((x.double() - down) / (up.double() - down)).abs()
    return torch.where(share + (draw * 65536).floor() / 65536 >= 1, up, down).bfloat16()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_values_do_not_depend_on_the_mesh(pool: Pools, name: str) -> None:
    expected = plain(name)
    ends = [
        ran
        for world, spec in ((1, P(flat="shard")), (2, P(flat="shard")), (4, P(flat="shard")), (2, P()))
        for ran in pool(world).run(trained, name, spec)
    ]
    for path, leaf in expected.items():
        assert leaf.dtype == (torch.float32 if path == "exact" else BF16)
        torch.testing.assert_close(ends[0][0][path], leaf, rtol=0, atol=1e-6 if path == "exact" else 0)
        for end in ends[1:]:
            for one, other in zip(end, ends[0], strict=True):
                assert torch.equal(one[path], other[path]), path


def in_memories(name: str, kinds: list[str]) -> list[list[dict[str, Tensor]]]:
    """On a rank: the same under several kinds of memory, flat and replicated."""
    return [trained(name, spec, kind) for kind in kinds for spec in (P(flat="shard"), P())]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
def test_values_do_not_depend_on_where_things_lie(pool: Pools, name: str) -> None:
    """Parameters or state in host memory, updated on either side: the bits of one plain process."""
    expected = plain(name)
    for ran in pool(2).run(in_memories, name, ["", *KINDS]):
        assert len(ran) == 2 * (len(KINDS) + 1)
        for end in ran:
            for path, leaf in expected.items():
                torch.testing.assert_close(end[0][path], leaf, rtol=0, atol=1e-6 if path == "exact" else 0)
            for one, other in zip(end, ran[0], strict=True):
                assert all(torch.equal(one[path], other[path]) for path in expected)


def test_what_is_rounded_is_right_on_average() -> None:
    x = torch.full((200_000,), 1.0 + 2.0**-7 * 0.3)
    bits = uniform(3, torch.arange(x.numel())).mul(65536).int()
    rounded = round_stochastic(x, bits).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert float(rounded.double().mean()) == pytest.approx(float(x[0]), abs=2.0**-7 * 0.005)
    assert x.bfloat16().eq(1.0).all()  # to nearest it would be lost


def test_values_without_a_fraction_stay() -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf"), float("nan"), 2.0**-133])
    rounded = round_stochastic(special, torch.full(special.shape, 65535, dtype=torch.int32))
    assert torch.equal(rounded[:6], special[:6].bfloat16()) and rounded[6].isnan() and rounded[7] == special[7]


def test_small_updates_count() -> None:
    """Ten steps of 1e-3 move a parameter of 1.0 by 0.01; rounded to nearest, none of them does."""
    ends = {}
    for rounding in ("nearest", "stochastic"):
        with fs.make_mesh((-1,), ("shard",)) as mesh:
            tree_ = {"w": torch.ones(4096, dtype=BF16)}
            precision = fs.Precision(rounding=rounding)  # type: ignore[arg-type]
            plan = fs.make_plan(tree_, mesh, [(".*", fs.fsdp("shard"))], precision=precision)
            opt = fs.optim.sgd(1e-3)
            state = fs.init_state(plan, opt, params=tree_)
            step = fs.make_train_step(lambda p, b: -(p["w"].float() * b[0]).sum(), opt, plan)
            for _ in range(10):
                state, _ = step(state, torch.ones(2))
            ends[rounding] = float(state.params["w"].double().mean())
    assert ends["nearest"] == 1.0 and ends["stochastic"] == pytest.approx(1.01, abs=5e-4)


def test_rounding_that_rounds_nothing() -> None:
    mesh = fs.abstract_mesh((2,), ("s",))
    with pytest.raises(PlanError, match="none of its 1 leaves, such as w, is"):
        fs.make_plan({"w": torch.ones(4)}, mesh, [(".*", fs.fsdp("s"))], precision=STOCHASTIC)
    with pytest.raises(PlanError, match="rounding='up'"):
        fs.Precision(rounding="up")  # type: ignore[arg-type]
