"""Pipelines whose units communicate over another axis, by its name."""

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import parallel
from tests.shared import parity

RULES = parallel.megatron_rules(column=[r".*\.up", "embed"], row=r".*\.down", flat="data")[:-1]


def loss_fn(params: Any, tokens: Tensor) -> Tensor:
    """An embedding outside of units, which only the first stage holds, and units of two cut matrices."""
    x = parallel.vocab_embedding(tokens, params["embed"])
    for name in "ab":
        x = block(params[name], x)
    return x.square().mean()


@fs.unit
def block(p: Any, x: Tensor) -> Tensor:
    """A perceptron."""
    return x + parallel.row_linear(torch.tanh(parallel.column_linear(x, p["up"])), p["down"])


def trained(sizes: tuple[int, ...], names: tuple[str, ...], stages: fs.Stages | None = None) -> list[parity.Run]:
    """What ranks see of three steps."""
    draw = torch.Generator().manual_seed(0)
    params: dict[str, Any] = {"embed": torch.randn(8, 4, generator=draw)}
    for name in "ab":
        params[name] = {"up": torch.randn(6, 4, generator=draw), "down": torch.randn(4, 6, generator=draw)}
    mesh, opt = fs.virtual_mesh(sizes, names), fs.optim.adamw(1e-2)
    batches = [torch.randint(8, (4, 3), generator=torch.Generator().manual_seed(n)) for n in range(3)]

    def on_a_rank() -> parity.Run:
        plan = fs.make_plan(params, mesh, RULES, batch=fs.P("data"), units=("a", "b"), stages=stages)
        step = fs.make_train_step(loss_fn, opt, plan, accumulate=2)
        return parity.sharded(step, fs.init_state(plan, opt, params=params), plan, map(plan.local_batch, batches))[0]

    return mesh.run(on_a_rank)


def test_cut_layers_in_stages() -> None:
    """Stages, shards and cut matrices at once."""
    want = trained((1, 1), ("data", "tp"))[0]
    assert parity.differences(trained((2, 2, 2), ("stage", "data", "tp"), fs.Stages("stage")), want) == []


def mixture(params: Any, x: Tensor) -> Tensor:
    """Two layers of experts, which rows are routed to."""
    for name in "ab":
        x = routed(params[name], x)
    return x.square().mean()


@fs.unit
def routed(p: Any, x: Tensor) -> Tensor:
    """A layer of four experts."""

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        middle = torch.tanh(parallel.grouped_linear(rows, p["experts"]["up"], counts))
        return parallel.grouped_linear(middle, p["experts"]["down"], counts)

    return x + parallel.moe(x, parallel.route(torch.nn.functional.linear(x, p["router"]), k=2), experts)


def routed_runs(sizes: tuple[int, ...], names: tuple[str, ...], stages: fs.Stages | None = None) -> list[parity.Run]:
    """What ranks see of three steps."""
    draw = torch.Generator().manual_seed(0)
    params = {
        name: {
            "router": torch.randn(4, 6, generator=draw),
            "experts": {"up": torch.randn(4, 8, 6, generator=draw), "down": torch.randn(4, 6, 8, generator=draw)},
        }
        for name in "ab"
    }
    mesh, opt, axes = fs.virtual_mesh(sizes, names), fs.optim.adamw(1e-2), ("ep", "data")
    rules = [parallel.expert_rule(r".*experts\..*", flat="data"), (r".*", fs.fsdp(axes))]
    batches = [torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]

    def on_a_rank() -> parity.Run:
        plan = fs.make_plan(params, mesh, rules, batch=fs.P(axes), units=("a", "b"), stages=stages)
        step = fs.make_train_step(mixture, opt, plan, accumulate=2)
        return parity.sharded(step, fs.init_state(plan, opt, params=params), plan, map(plan.local_batch, batches))[0]

    return mesh.run(on_a_rank)


def test_experts_in_stages() -> None:
    """Stages whose experts lie on different ranks."""
    want = routed_runs((1, 1), ("ep", "data"))[0]
    assert parity.differences(routed_runs((2, 2, 1), ("stage", "ep", "data"), fs.Stages("stage")), want) == []


def adapted(sizes: tuple[int, ...], names: tuple[str, ...], stages: fs.Stages | None = None) -> list[parity.Run]:
    """What ranks see of three steps of adapters, from the same first values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(4)])
    model = fs.lora.wrap(fs.split(net, units=("*",)), [r".*\.weight"], rank=2, alpha=4)
    mesh, opt = fs.virtual_mesh(sizes, names), fs.optim.adamw(1e-2)
    batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]

    def on_a_rank() -> parity.Run:
        rules = [fs.Rule(fs.lora.PATHS, fs.fsdp("data")), fs.Rule(".*", fs.fsdp("data"), trainable=False)]
        plan = fs.make_plan(model, mesh, rules, batch=fs.P("data"), stages=stages)
        step = fs.make_train_step(lambda p, x: model.apply(p, x).square().mean(), opt, plan, accumulate=2)
        state = fs.init_state(plan, opt, seed=0)
        return parity.sharded(step, state, plan, map(plan.local_batch, batches))[0]

    return mesh.run(on_a_rank)


def test_adapters_in_stages() -> None:
    """Adapters of frozen layers train on the stages that hold these."""
    want = adapted((1,), ("data",))[0]
    assert parity.differences(adapted((2, 2), ("stage", "data"), fs.Stages("stage")), want) == []


def test_one_stage_has_the_schedule_of_none() -> None:
    """One stage runs the same ops in the same order."""
    net = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(3)])
    model, opt = fs.split(net, units=("*",)), fs.optim.sgd(0.1)

    def ops(sizes: tuple[int, ...], names: tuple[str, ...], stages: fs.Stages | None = None) -> Any:
        mesh = fs.virtual_mesh(sizes, names)

        def on_a_rank() -> Any:
            plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"), stages=stages)
            step = fs.make_train_step(lambda p, x: model.apply(p, x).square().mean(), opt, plan, accumulate=2)
            step(fs.init_state(plan, opt, seed=0), torch.ones(4, 6))
            return step.schedule.ops

        return mesh.run(on_a_rank)

    assert ops((1, 2), ("stage", "data"), fs.Stages("stage")) == ops((2,), ("data",))
