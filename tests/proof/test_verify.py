"""fs.verify: right steps are right whatever they are made of, and a fault of each class is named with its unit."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P, tree
from fshard.errors import PeerError, PlanError, ShardError
from fshard.model.unit import slot_of
from fshard.runtime.engine.engine import Engine
from fshard.runtime.execution.actions import Actions
from fshard.runtime.execution.pending_update import PendingUpdate
from fshard.state.entries import entries
from tests.shared.workers import Pools

ADAM = fs.optim.adamw(1e-2)


class Block(nn.Module):
    """A residual layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 9), nn.Linear(9, 6), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


def net() -> nn.Sequential:
    """Three blocks, with the same values on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(Block(), Block(), nn.LayerNorm(6), Block())


def rows(step: int, rank: int, count: int = 6) -> Tensor:
    """A rank's rows."""
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def setup(mesh: fs.Mesh, opt: Any = ADAM, rules: Any = None, plan: Any = None, **options: Any) -> Any:
    """A step and a state."""
    model = fs.split(net(), units=("0", "1", "3"))
    rules = rules or [(r"2\..*", P()), (r".*", fs.fsdp(mesh.axis_names[-1]))]
    plan = fs.make_plan(model, mesh, rules, batch=P(mesh.axis_names), **(plan or {}))
    weighted = options.pop("weighted", False)

    def loss_fn(params: Any, x: Tensor) -> Any:
        losses = (model.apply(params, x) - x.sin()).square().mean(1)
        return fs.Mean(losses.sum(), len(losses)) if weighted else losses.mean()

    step = fs.make_train_step(loss_fn, opt, plan, **options)
    return step, fs.init_state(plan, opt, params=tree.nest(dict(net().named_parameters())))


HALF = fs.Precision(torch.bfloat16, torch.bfloat16, inputs=True)
RIGHT: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "eager": ((2,), {}),
    "graphs, recomputed, clipped": ((2,), {"compile": "fx", "remat": "all", "clip_norm": 0.1}),
    "replicas, microbatches": ((2, 2), {"accumulate": 2, "clip_norm": [(r"0\..*", 0.1), (r".*", None)]}),
    "unequal counts": ((3,), {"weighted": True, "accumulate": 2, "clip_norm": 0.1}),
    "carried": ((2,), {"opt": fs.optim.every(2, fs.optim.ema(ADAM, 0.9)), "weighted": True}),
    "scaled": ((2,), {"loss_scale": fs.LossScale(initial=8.0), "donate": False, "debug": True}),
    "bfloat16": ((2,), {"plan": {"precision": HALF}}),
    "early": ((2,), {"schedule": fs.Policy(update="in_backward")}),
    "host": ((2,), {"rules": [fs.Rule(r".*", fs.fsdp("a"), memory_kind="unpinned_host")]}),
    "frozen": ((2,), {"rules": [fs.Rule(r"1\..*", P(), trainable=False), (r".*", fs.fsdp("a"))]}),
    "spread": ((2, 2), {"rules": [fs.Rule(r".*", fs.fsdp("b"), opt=fs.fsdp(("b", "a")))]}),
    "skipped": ((2,), {"skip_norm": 1e-9}),
}


QUICK = ("graphs, recomputed, clipped", "unequal counts", "carried", "skipped")


def right(sizes: tuple[int, ...], options: dict[str, Any]) -> list[str]:
    """On a rank: verify before, between and after steps; steps that were verified are those that were not."""
    with fs.make_mesh(sizes, ("a", "b")[: len(sizes)]) as mesh:
        (step, state), (other, alone), said = setup(mesh, **options), setup(mesh, **options), []
        for number in range(3):
            x = rows(number, mesh.rank, 6 + 3 * mesh.rank * options.get("weighted", False))
            if number != 1:
                if state.memory.stale:  # verify takes such a state, and reading it here needs the other ranks
                    fs.verify(step, state, x)
                    state = fs.settle(state)
                before, drawn = [e.tensor.clone() for e in entries(state)], torch.get_rng_state()
                python, units, record = random.getstate(), step.units, step.record
                said.append(repr(fs.verify(step, state, x)))
                assert all(map(torch.equal, before, [e.tensor for e in entries(state)]))
                assert torch.equal(drawn, torch.get_rng_state()) and python == random.getstate()
                assert (units, record) == (step.units, step.record)
            state, metrics = step(state, x)
            alone, expected = other(alone, x)
            assert torch.equal(metrics.loss, expected.loss)
        for mine, theirs in zip(entries(fs.settle(state)), entries(fs.settle(alone)), strict=True):
            assert torch.equal(mine.tensor, theirs.tensor), mine.name
        return said


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in RIGHT])
def test_a_step_that_is_right(name: str) -> None:
    sizes, options = RIGHT[name]
    ranks = fs.virtual_mesh((torch.Size(sizes).numel(),), ("any",))
    said = ranks.run(right, sizes, options)
    assert all(other == said[0] for other in said)
    assert "DIFFERS" not in said[0][0] and "params.0.up.weight" in said[0][0]
    assert ("grad.0.up.weight" in said[0][0]) == (name not in ("early", "skipped"))


def broken(fault: str) -> str:
    """On a rank: what verify says of a step with a fault."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        step, state = setup(mesh, compile="fx" if fault == "graph" else None)
        x = rows(0, mesh.rank)
        state, _ = step(state, x)
        if fault == "copy" and mesh.rank == 1:
            group, number = step.plan.places()["2.weight"]
            state.finished()[group.id].param[group.shard_range(number, 0)[0] + 2] += 0.5
        with pytest.raises(ShardError) as caught:
            fs.verify(step, state, x)
        return str(caught.value)


def test_a_unit_that_computes_something_else_is_named(pool: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Engine.call

    def wrong(self: Any, unit: Any, params: Any, args: Any, kwargs: Any) -> Any:
        result = call(self, unit, params, args, kwargs)
        return result + 0.1 * torch.arange(6.0) if unit.name == "1" and self.executor is not None else result

    monkeypatch.setattr(Engine, "call", wrong)
    said = fs.virtual_mesh((2,), ("any",)).run(broken, "graph")
    assert said[0] == said[1]
    assert "unit 1: output 0 of shape [6, 6] of call 1, microbatch 0, differs by" in said[0]
    assert "grad.0.up.weight: " in said[0] and "loss: " in said[0]


def test_a_gather_that_is_wrong_names_the_unit_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = Actions._gathered

    def wrong(self: Any, slots: Any) -> None:
        gathered(self, slots)
        if slots.group.unit == "3":
            slots.leaves[0].data.view(-1)[5] += 0.1

    monkeypatch.setattr(Actions, "_gathered", wrong)
    said = fs.virtual_mesh((2,), ("any",)).run(broken, "gather")
    assert said[0] == said[1] and "unit 3: output 0" in said[0]


def test_an_update_that_leaves_a_leaf_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = PendingUpdate._rule

    def wrong(self: Any, params: Any, *rest: Any) -> None:
        kept = params[-1].clone()
        rule(self, params, *rest)
        params[-1].copy_(kept)

    monkeypatch.setattr(PendingUpdate, "_rule", wrong)
    said = fs.virtual_mesh((2,), ("any",)).run(broken, "update")
    assert said[0] == said[1] and "no output of a unit differs" in said[0]
    assert "params." in said[0] and "grad." not in said[0]


def test_a_backward_that_does_something_else_under_the_engine_is_named() -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, wrong: bool) -> Tensor:
            ctx.wrong = wrong
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad * (1.5 if ctx.wrong else 1.0), None

    @fs.unit
    def layer(p: Any, x: Tensor) -> Tensor:
        slot = slot_of(p["w"])
        return torch.tanh(x @ Odd.apply(p["w"], isinstance(slot and slot.engine, Engine)))

    def run() -> str:
        with fs.make_mesh((2,), ("shard",)) as mesh:
            params = {name: {"w": torch.eye(6) * 0.5} for name in "abc"}
            plan = fs.make_plan(params, mesh, [(r".*", fs.fsdp("shard"))], units=("a", "b", "c"))
            opt = fs.optim.sgd(0.1)

            def loss_fn(p: Any, x: Tensor) -> Tensor:
                for name in "abc":
                    x = layer(p[name], x) if name == "b" else torch.tanh(x @ p[name]["w"])
                return x.square().mean()

            step = fs.make_train_step(loss_fn, opt, plan)
            with pytest.raises(fs.VerifyError) as caught:
                fs.verify(step, fs.init_state(plan, opt, params=params), rows(0, mesh.rank))
            return str(caught.value)

    said = fs.virtual_mesh((2,), ("any",)).run(run)
    assert said[0] == said[1] and "no output of a unit differs" in said[0]
    assert (
        "grad.b.w: " in said[0] and "grad.a.w" not in said[0] and "the last unit with wrong gradients is b" in said[0]
    )


def test_a_rank_with_other_parameters_is_named_on_real_ranks(pool: Pools) -> None:
    said = pool(2).run(broken, "copy")
    assert all("2.weight" in text for text in said)


def test_a_loss_that_communicates_is_refused_and_one_that_fails_alone_is_told(pool: Pools) -> None:
    assert pool(2).run(refused) == [True, True]


def refused() -> bool:
    """On a rank: what verify cannot do."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        params = {"w": torch.ones(6, 2)}
        plan = fs.make_plan(params, mesh, [(r".*", fs.fsdp("shard"))])
        state, x = fs.init_state(plan, fs.optim.sgd(0.1), params=params), rows(0, mesh.rank)

        def summed(p: Any, x: Tensor) -> Tensor:
            return fs.collectives.psum((x @ p["w"]).square().mean(), "shard")

        with pytest.raises(PlanError, match=r"itself communicates over the axes {'shard': 2}"):
            fs.verify(fs.make_train_step(summed, fs.optim.sgd(0.1), plan), state, x)

        def fails(p: Any, x: Tensor) -> Tensor:
            slot = slot_of(p["w"])
            if not isinstance(slot and slot.engine, Engine) and mesh.rank == 1:
                raise KeyError("only alone")
            return (x @ p["w"]).square().mean()

        with pytest.raises(KeyError if mesh.rank == 1 else PeerError, match="only alone"):
            fs.verify(fs.make_train_step(fails, fs.optim.sgd(0.1), plan), state, x)
        with pytest.raises(PlanError, match="rtol"):
            fs.verify(fs.make_train_step(fails, fs.optim.sgd(0.1), plan), state, x, rtol=-1.0)
        with pytest.raises(PlanError, match="what fs.make_train_step returned"):
            fs.verify(fails, state, x)  # type: ignore[arg-type]
        return True
