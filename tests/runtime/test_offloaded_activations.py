"""Activations that wait on the host: the same bits, less memory of the device, as much as the step says."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, tree
from fshard.errors import PlanError, RematError
from fshard.patterns import escaped
from fshard.schedule.footprint import Footprint, footprint
from tests.runtime.test_memory_measured import Peak
from tests.runtime.test_remat_units import EITHER, train, without
from tests.shared import parity
from tests.shared.workers import Pools

AHEAD = fs.checkpoint_policies.offload(prefetch=2)


def differences(name: str, mesh: fs.Mesh, remat: Any, **options: Any) -> list[str]:
    """What differs with activations on the host from without."""
    want, got = without(name, mesh), train(name, mesh, remat, **options)
    return [f"{name} {remat}: {line}" for line in want.problems + got.problems + parity.other_bits(got, want)]


@pytest.mark.parametrize("remat", ["offload", AHEAD], ids=str)
def test_every_bit_is_kept(remat: Any) -> None:
    assert not differences("gpt", fs.make_mesh((1,), ("shard",)), remat, debug=True)


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize(("name", "compile"), EITHER)
def test_every_bit_of_any_program_is_kept(name: str, compile: str | None) -> None:
    mesh = fs.make_mesh((1,), ("shard",))
    if name == "differentiated":
        with pytest.raises(RematError, match="unit inner.* takes gradients by torch.func, which PyTorch refuses"):
            differences(name, mesh, "offload", compile=compile)
    elif name == "penalised":
        with pytest.raises(PlanError, match="differentiates affine.* itself"):
            differences(name, mesh, "offload", compile=compile)
    else:
        assert not differences(name, mesh, "offload", compile=compile)


def _on_ranks(names: list[str]) -> list[str]:
    mesh = fs.make_mesh((-1,), ("shard",))
    return [line for name in names for line in differences(name, mesh, "offload", debug=True)]


def test_every_bit_is_kept_on_ranks(pool: Pools) -> None:
    for problems in pool(2).run(_on_ranks, ["gpt", "twice", "handwritten"]):
        assert not problems, "\n".join(problems)


@fs.unit
def mixed(p: Any, x: Tensor, shared: Tensor) -> Tensor:
    """Saves views of one storage, a tensor twice, one that it has written to in place, and one of another unit."""
    q, k, v = F.linear(x, p["w"], p["b"]).chunk(3, -1)
    q = F.relu(q.clone(), inplace=True)  # what is saved is the result, after the write
    h = (q * q) @ k.transpose(-1, -2) @ v.contiguous()
    h = F.dropout(h, 0.25)
    return torch.tanh(x + h * shared.to(h.dtype)) @ p["w"][: x.shape[-1]]  # tanh is saved here, and by who reads it


def mixture(p: Any, x: Tensor) -> Tensor:
    """Layers of it, the first of which runs twice, with tied weights and a tensor that all of them save."""
    shared = torch.sigmoid(x)
    for name in ("0", "1", "2", "0", "3"):
        x = mixed({"w": p[name]["w"], "b": p["tied"]}, x, shared)
    return x.float().square().mean()


def mixture_params(dtype: torch.dtype) -> dict[str, Any]:
    """Start values."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    tensors = {str(i): {"w": (draw(24, 8) / 8).to(dtype)} for i in range(4)}
    return {**tensors, "tied": draw(24).to(dtype) / 8}


def trained(remat: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """Losses and parameters of three steps, and the step."""
    mesh, params = fs.make_mesh((1,), ("shard",)), mixture_params(dtype)
    precision = options.pop("precision", None)
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=P("shard"), precision=precision)
    opt = fs.optim.adamw(1e-2)
    state = fs.init_state(plan, opt, params=params)
    step, losses = fs.make_train_step(mixture, opt, plan, remat=remat, **options), []
    for number in range(3):
        batch = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(number)).to(dtype)
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
        assert step.record == step.schedule.ops
    return (losses, tree.leaves(fs.settle(state).params)), step


SETTINGS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    **{str(dtype): (dtype, {}) for dtype in (torch.float64, torch.float32, torch.bfloat16)},
    "float16": (torch.float16, {"loss_scale": fs.LossScale()}),
    "microbatches": (torch.float32, {"accumulate": 2}),
    "mixed precision": (
        torch.float32,
        {"precision": fs.Precision(torch.bfloat16, inputs=True), "accumulate": 2, "clip_norm": 0.1},
    ),
    "debug": (torch.float32, {"debug": True, "schedule": fs.Policy(0, 1)}),
    "graphs": (torch.float32, {"compile": "fx"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_whatever_is_saved_comes_back(name: str) -> None:
    dtype, options = SETTINGS[name]
    (want, _), (got, step) = (trained(remat, dtype, **options) for remat in (None, "offload"))
    kinds = [op.kind for op in step.schedule]
    assert kinds.count("activation_offload") == kinds.count("wait activation_fetch") == 4 * options.get("accumulate", 1)
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(want)))
    host = step._runner.programs.memory.host
    assert host.used == 0 and host.most > 0


def test_parameters_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves is no view of the arena or of a shard, nor the batch."""
    from fshard.runtime.memory.activation_copies import ActivationCopies

    seen: list[int] = []
    real = ActivationCopies.leave

    def leave(self: Any, call: Any, sources: Any) -> Any:
        seen.extend(source.untyped_storage()._cdata for source in sources)
        return real(self, call, sources)

    monkeypatch.setattr(ActivationCopies, "leave", leave)
    _, step = trained("offload", torch.float32)
    (prepared,) = step._runner.programs.made.values()
    assert seen and not prepared.engine.slots.storages.intersection(seen)


def stack(remat: Any, forward: Callable[[nn.Module, Tensor], Tensor], **options: Any) -> tuple[Footprint, int, int]:
    """Six blocks: what a step says that it holds, what it allocates, and what the host keeps."""
    torch.manual_seed(0)
    model = fs.split(nn.Sequential(*(Block(forward) for _ in range(6))), units=("*",))
    mesh = fs.make_mesh((1,), ("shard",))
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))], batch=P("shard"))
    opt = fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, params=model.params)
    step = fs.make_train_step(lambda p, x: model.apply(p, x).square().mean(), opt, plan, remat=remat, **options)
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        state, _ = step(state, x)
    state = fs.settle(state)  # gradients that wait are freed in the step, which no profiler sees
    with Peak() as peak:
        state, _ = step(state, x)
    found = step.trace(x)
    assert tuple(step.record) == tuple(found.schedule.ops)
    return footprint(found.schedule, found.needs), peak.above, step._runner.programs.memory.host.most


class Block(nn.Module):
    """A residual perceptron whose inside is four times as wide."""

    def __init__(self, forward: Callable[["Block", Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(32, 128), nn.Linear(128, 32), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self, x)


def wide(block: Any, x: Tensor) -> Tensor:
    """Keeps three tensors of its width."""
    return x + block.down(torch.tanh(F.gelu(F.dropout(block.up(x), 0.25))))


def sharing(block: Any, x: Tensor) -> Tensor:
    """Keeps its result, which the next one keeps too."""
    return torch.tanh(block.down(torch.sigmoid(block.up(x))))


@pytest.mark.parametrize("forward", [wide, sharing])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["whole", "microbatches"])
def test_memory_is_what_the_step_says(forward: Any, options: dict[str, Any]) -> None:
    kept, _, _ = stack(None, forward, **options)
    for remat in ("offload", AHEAD):
        told, measured, host = stack(remat, forward, **options)
        assert told.peak_bytes <= 0.7 * kept.peak_bytes
        assert abs(measured - told.peak_bytes) <= 0.01 * told.peak_bytes
        assert host == told.host_bytes > 0
        assert "activations on the host" in str(told)


class Fails(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("not now")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_fails_leaves_nothing_on_the_host(where: str) -> None:
    fails = [False]

    def loss(p: Any, x: Tensor) -> Tensor:
        shared = torch.sigmoid(x)
        for name in ("0", "1", "2", "3"):
            x = mixed({"w": p[name]["w"], "b": p["tied"]}, x, shared)
            if fails[0] and name == "1" and where == "backward":
                x = Fails.apply(x)  # type: ignore[no-untyped-call]
        if fails[0] and where == "forward":
            raise ValueError("not now")
        return x.square().mean()

    mesh, params = fs.make_mesh((1,), ("shard",)), mixture_params(torch.float32)
    plan, opt = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=P("shard")), fs.optim.sgd(0.1)
    step, x = fs.make_train_step(loss, opt, plan, remat="offload"), torch.ones(4, 6, 8)
    state, first = step(fs.init_state(plan, opt, params=params), x)
    fails[0] = True
    with pytest.raises(ValueError, match="not now"):
        step(state, x)
    host = step._runner.programs.memory.host
    assert host.used == 0
    fails[0] = False
    _, metrics = step(state, x)
    assert host.used == 0 and host.idle == host.most and metrics.loss != first.loss


def test_the_pool_never_holds_more_than_was_in_use() -> None:
    from fshard.runtime.memory.activation_copies import HostPool

    pool = HostPool(fs.make_mesh((1,), ("shard",)))
    first = [pool.take(size) for size in (100, 200, 300)]
    for buffer in first:
        pool.give(buffer)
    assert (pool.used, pool.idle, pool.most) == (0, 600, 600)
    again = pool.take(200)
    assert any(again is one for one in first) and pool.idle == 400
    pool.take(350)  # those of 300 must go for it
    assert pool.used + pool.idle <= pool.most == 600 and pool.used == 550


def test_parts_of_a_step_have_it_too() -> None:
    """Two gradients and an update in one step, each pass with its own activations."""

    def run(remat: Any) -> tuple[Any, list[str]]:
        mesh, params = fs.make_mesh((1,), ("shard",)), mixture_params(torch.float32)
        plan, opt = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=P("shard")), fs.optim.sgd(0.1)
        grad, update = fs.value_and_grad(mixture, plan, accumulate=2, remat=remat), fs.make_update(opt, plan)

        def sharpness_aware(state: Any, batch: Any) -> Any:
            _, first = grad(state.params, batch)
            value, second = grad(fs.tree.add(state.params, fs.tree.scale(first, 0.05)), batch)
            state, _ = update(state, second)
            return state, value

        step, state, values = fs.make_step(sharpness_aware, plan), fs.init_state(plan, opt, params=params), []
        for number in range(3):
            state, value = step(state, torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(number)))
            values.append(value)
            assert tuple(step.record) == tuple(step.schedule.ops)
        return (values, tree.leaves(fs.settle(state).params)), [op.kind for op in step.schedule]

    (want, _), (got, kinds) = run(None), run("offload")
    assert kinds.count("activation_offload") == kinds.count("wait activation_fetch") == 2 * 2 * 4
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(want)))


@pytest.mark.parametrize("options", [{}, {"compile": "fx"}], ids=["eager", "graphs"])
def test_it_goes_with_recomputation_of_other_units(options: dict[str, Any]) -> None:
    """And with a loss that is an ``fs.Mean``: the first rule that matches a unit counts."""

    @fs.unit
    def layer(p: Any, x: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(F.linear(x, p["w"])))

    def loss(p: Any, x: Tensor) -> fs.Mean:
        count = (x > 0).sum()
        for name in "0123":
            x = layer(p[name], x)
        return fs.Mean(x.square().sum(), count)

    def run(remat: Any) -> tuple[list[Tensor], list[str]]:
        params = {name: {"w": torch.randn(8, 8, generator=torch.Generator().manual_seed(int(name)))} for name in "0123"}
        plan = fs.make_plan(params, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))], batch=P("shard"))
        opt, losses = fs.optim.adamw(1e-2), list[Tensor]()
        state = fs.init_state(plan, opt, params=params)
        step = fs.make_train_step(loss, opt, plan, remat=remat, accumulate=2, clip_norm=0.1, **options)
        for number in range(3):
            state, metrics = step(state, torch.randn(6, 8, generator=torch.Generator().manual_seed(number)))
            losses.append(metrics.loss)
        return [*losses, *tree.leaves(fs.settle(state).params)], [str(op) for op in step.schedule]

    mixed_rules = [("layer(0.w)", "offload"), ("layer(1.w)", "all"), ("layer(2.w)", "offload"), ("**", None)]
    (want, _), (got, ops) = (
        run(None),
        run([(unit if unit == "**" else escaped(unit), policy) for unit, policy in mixed_rules]),
    )
    assert all(map(torch.equal, got, want))
    assert [op for op in ops if op.startswith("activation_offload")] == [
        f"activation_offload layer({number}.w){microbatch}" for microbatch in ("", " @1") for number in (0, 2)
    ]


def test_what_came_back_goes_as_it_would_have_gone() -> None:
    """In the backward of the second unit both ways hold what two units keep: not a byte more where it came back.

    The peak of these backwards is at their end, when what was saved last is gone.
    """

    def late(block: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(torch.sigmoid(torch.tanh(block.down(torch.sigmoid(block.up(x))))))

    def backward(remat: Any) -> dict[str, tuple[int, int]]:
        model = fs.split(nn.Sequential(*(Block(late) for _ in range(4))), units=("*",))
        plan = fs.make_plan(model, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))], batch=P("shard"))
        step = fs.make_train_step(lambda p, x: model.apply(p, x).square().mean(), fs.optim.sgd(0.1), plan, remat=remat)
        found = step.trace(torch.ones(64, 32))
        needs = zip(found.schedule.stages.computes, found.needs, strict=True)
        return {op.target: (need.peak, need.after) for op, need in needs if op.kind == "backward"}

    kept, hosted = backward(None), backward("offload")
    assert hosted["1"][0] == kept["1"][0] and hosted["0"] == kept["0"]
    assert hosted["2"][0] < kept["2"][0]


def test_a_step_with_it_can_be_looked_at(tmp_path: Any) -> None:
    """Text, pictures, a trace for Perfetto, a simulation by measured costs, and a comparison with plain PyTorch."""
    mesh, params = fs.make_mesh((1,), ("shard",)), mixture_params(torch.float32)
    plan, opt = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], batch=P("shard")), fs.optim.adamw(1e-2)
    step, state = fs.make_train_step(mixture, opt, plan, remat="offload"), fs.init_state(plan, opt, params=params)
    state, _ = step(state, torch.randn(4, 6, 8))
    run, word = step.measured, "activation_offload"
    assert word in step.schedule._repr_html_()
    fs.view.trace(tmp_path / "trace.json", run)
    assert word in (tmp_path / "trace.json").read_text()
    kinds = {op.kind for op in step.schedule}
    assert fs.sim.simulate(step.schedule, fs.sim.Costs.of(run).only(kinds)).seconds > 0
    assert fs.verify(step, state, torch.randn(4, 6, 8)).right
