"""Buffers that change: averaged over ranks and microbatches, or left to each rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import PlanError, TreeError
from tests.shared.workers import Pools

LR, STEPS, ROWS = 0.1, 10, 16


def module() -> nn.Module:
    """A small network with running statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1), nn.BatchNorm1d(1))


def rows(step: int) -> Tensor:
    """A global batch."""
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step)) * (1 + step)


RULES = [(r"1\..*", "mean"), (".*", "local")]


def trained(accumulate: int) -> tuple[list[float], dict[str, Tensor]]:
    """On a rank: losses, and the buffers after training."""
    model = fs.split(module(), units=("0", "1"))
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))])

        def loss_fn(params: Any, batch: Any) -> Any:
            out, new = model.apply(params, batch["x"], buffers=batch["buffers"].value)
            return out.square().mean() + out.mean(), {"buffers": new}

        opt = fs.optim.sgd(LR)
        step = fs.make_train_step(loss_fn, opt, plan, accumulate=accumulate, debug=True)
        state, buffers = fs.init_state(plan, opt, params=model.params), model.buffers
        losses = []
        for number in range(STEPS):
            part = rows(number).chunk(mesh.size)[mesh.rank]
            state, metrics = step(state, {"x": part, "buffers": fs.Whole(buffers)})
            assert step.record == step.schedule.ops
            losses.append(float(metrics.loss))
            buffers = fs.sync_buffers(metrics.aux["buffers"], plan, RULES, microbatches=accumulate)
        return losses, dict(tree.paths(buffers))


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_statistics_equal_those_of_one_process(pool: Pools, world: int, accumulate: int) -> None:
    net = module()
    rule = torch.optim.SGD(net.parameters(), lr=LR)
    names = [name for name, buffer in net.named_buffers() if buffer.is_floating_point()]
    own: list[dict[str, Tensor]] = [{k: v.clone() for k, v in net.named_buffers()} for _ in range(world)]
    losses = []
    for number in range(STEPS):
        rule.zero_grad()
        values, after = [], []
        for part in rows(number).chunk(world * accumulate):
            net.load_state_dict(own[len(after) // accumulate], strict=False)
            out = net(part)
            loss = out.square().mean() + out.mean()
            (loss / (world * accumulate)).backward()
            values.append(loss.item())
            after.append({k: v.clone() for k, v in net.named_buffers()})
        rule.step()
        losses.append(sum(values) / len(values))
        for rank in range(world):
            mine = after[rank * accumulate : (rank + 1) * accumulate]
            own[rank] = {k: torch.stack([a[k] for a in mine]).mean(0) if k in names else mine[-1][k] for k in mine[0]}
        for name in names:
            if name.startswith("1."):
                mean = torch.stack([held[name] for held in own]).mean(0)
                own = [{**held, name: mean} for held in own]
    for rank, (ours, buffers) in enumerate(pool(world).run(trained, accumulate)):
        assert ours == pytest.approx(losses, rel=1e-5)
        for name, buffer in own[rank].items():
            torch.testing.assert_close(buffers[name], buffer, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert not torch.equal(own[0]["4.running_mean"], own[1]["4.running_mean"])  # local


def test_buffers_that_cannot_be_synced() -> None:
    plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("shard",)), [(".*", fs.P())])
    with pytest.raises(PlanError, match="no rule matches:\n  b"):
        fs.sync_buffers({"a": torch.ones(1), "b": torch.ones(1)}, plan, [("a", "mean")])
    with pytest.raises(PlanError, match="'a': 'sum'"):
        fs.sync_buffers({"a": torch.ones(1)}, plan, [("a", "sum")])
    with pytest.raises(TreeError, match=r"a has shape \[3\], not one value for each of microbatches=2"):
        fs.sync_buffers({"a": torch.ones(3)}, plan, microbatches=2)


def test_leaves_without_a_gradient_are_named() -> None:
    params = {"used": torch.ones(4), "idle": torch.ones(4), "frozen": torch.ones(4), "some": torch.ones(4)}
    rules = [fs.Rule("frozen", fs.P(), trainable=False), (".*", fs.fsdp("shard"))]
    with fs.make_mesh((1,), ("shard",)) as mesh:
        plan = fs.make_plan(params, mesh, rules)

        def loss_fn(p: Any, batch: Any) -> Tensor:
            leaf = p["some"] if batch["some"] else p["used"]
            return (leaf * p["used"] * p["frozen"] * batch["x"].sum()).sum()

        opt = fs.optim.sgd(0.1)
        step = fs.make_train_step(loss_fn, opt, plan)
        assert step.trace({"x": torch.ones(2), "some": True}).unused == ("idle",)
        state = fs.init_state(plan, opt, params=params)
        batch = {"x": torch.ones(2), "some": False}
        state, _ = step(state, batch)
        assert step.trace(batch).unused == ("idle", "some")
        assert torch.equal(state.params["some"], params["some"])
        assert not torch.equal(state.params["used"], params["used"])
