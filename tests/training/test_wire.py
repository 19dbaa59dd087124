"""Wire formats in steps: units read gather-then-round, and training equals the same rounding in one process.

Every run is on played ranks and compared in all bits with a plain PyTorch process; some are on real ranks too.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor

import fshard as fs
from fshard import P
from fshard.sharding.wire import Wire
from tests.shared.workers import Pools
from tests.training.wire_cases import (
    CASES,
    INT8,
    LR,
    REPLICAS,
    STEPS,
    TWO,
    Case,
    Tree,
    batch,
    loss_fn,
    plain,
    plan_of,
    played,
    start,
    through,
    trained,
)


def compare(case: Case, world: int) -> None:
    losses, params = plain(case, world)
    for rank, (seen, whole) in enumerate(played(case, world)):
        assert [loss for loss, _ in seen] == pytest.approx(losses, rel=1e-6), rank
        for path, leaf in params.items():
            if case.clip is None:
                assert torch.equal(whole[path], leaf), (rank, path)


OFTEN = ("int8", "bf16, rows", "int4", "rotated", "microbatches", "optimizer state apart", "host memory", "feedback")
"""Cases that differ in what they move. The others are run with all of them."""


def rarely(often: bool) -> list[pytest.MarkDecorator]:
    """The marks of a case that runs by default, or where all is run."""
    return [] if often else [pytest.mark.slow]


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=rarely((world == 2 and name in OFTEN) or (name, world) == ("int8", 3)))
        for name in CASES
        for world in (1, 2, 3)
        if world < 3 or name not in TWO
    ],
)
def test_training_equals_the_same_rounding_in_one_process(name: str, world: int) -> None:
    compare(dataclasses.replace(CASES[name], clip=None), world)


@pytest.mark.parametrize("name", [pytest.param(name, marks=rarely("axis" in name)) for name in REPLICAS])
def test_it_does_on_meshes_of_two_axes(name: str) -> None:
    compare(REPLICAS[name], 4)


@pytest.mark.parametrize(
    "wire", [INT8, fs.Wire("bf16"), fs.Wire("int4", block=16), fs.Wire("fp8_e4m3", block=64)], ids=str
)
def test_units_read_what_gather_then_round_yields(wire: Wire) -> None:
    """Bit for bit, on any number of ranks, in forward and backward."""
    seen: dict[int, list[Tensor]] = {}

    def main(mesh: fs.Mesh) -> None:
        read = []

        def loss(p: Tree, x: Tensor) -> Tensor:
            if not isinstance(p["one"]["w"], FakeTensor):
                read.extend(leaf.detach().clone() for leaves in p.values() for leaf in leaves.values())
            return sum((leaf.sum() for leaves in p.values() for leaf in leaves.values()), x.sum())

        plan = fs.make_plan(start(), mesh, [(".*", fs.fsdp("shard"))], wire=wire)
        value = fs.make_eval_step(loss, plan)(fs.init_state(plan, fs.optim.sgd(LR), params=start()), torch.zeros(1))
        assert value.isfinite()
        seen[mesh.size] = read

    for world in (1, 2, 3, 4):
        mesh = fs.virtual_mesh((world,), ("shard",))
        mesh.run(lambda mesh=mesh: main(mesh))
    form = wire.over("all_gather", ("shard",))
    want = [through(leaf, form) for leaves in start().values() for leaf in leaves.values()]
    given = [leaf for leaves in start().values() for leaf in leaves.values()]
    assert any(not torch.equal(*pair) for pair in zip(want, given, strict=True))
    for world, read in seen.items():
        assert len(read) == len(want), world
        assert all(torch.equal(*pair) for pair in zip(read, want, strict=True)), world


SAME = {
    "prefetch": {"policy": fs.Policy(prefetch=0, reduces=1)},
    "kept": {"policy": fs.Policy(prefetch=3, reduces=3, reshard=False)},
    "remat": {"more": (("remat", "all"),)},
    "graphs": {"more": (("compile", "fx"),)},
    "in host memory": {"memory": "unpinned_host"},
}
"""Changes that change no bit."""


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize(
    "base",
    [pytest.param(Case(clip=0.3), marks=pytest.mark.slow), Case(clip=0.3, accumulate=2)],
    ids=["once", "microbatches"],
)
def test_schedules_change_no_bit(base: Case, name: str) -> None:
    want = played(base, 2)
    found = played(dataclasses.replace(base, **SAME[name]), 2)
    for (seen, params), (others, whole) in zip(want, found, strict=True):
        assert seen == others
        assert all(torch.equal(params[path], whole[path]) for path in params)


def test_no_wire_is_bit_for_bit_what_it_was() -> None:
    exact = Case(fs.Wire("fp32", "fp32"), clip=0.3)
    texts = []
    for case in (exact, dataclasses.replace(exact, wire=fs.Wire())):
        mesh = fs.abstract_mesh((2,), ("shard",))
        plan = plan_of(case, mesh)
        texts.append(str(fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan).trace(batch(0, 0)).schedule))
        assert not any(group.wires for group in plan.groups)
    assert texts[0] == texts[1]
    assert " as " not in texts[0]
    for (seen, params), (others, whole) in zip(
        played(exact, 2), played(dataclasses.replace(exact, wire=fs.Wire()), 2), strict=True
    ):
        assert seen == others
        assert all(torch.equal(params[path], whole[path]) for path in params)


def test_clipping_uses_the_norm_of_what_is_applied() -> None:
    """The norm is that of the rounded sums: an update of SGD shows it."""
    case = Case(fs.Wire(reduce="int4", block=32, rotate=True), clip=None)
    (seen, params), _ = played(dataclasses.replace(case), 2)
    (clipped, _), _ = played(dataclasses.replace(case, clip=1e9), 2)
    assert seen == clipped
    mesh = fs.virtual_mesh((2,), ("shard",))

    def main() -> tuple[float, float]:
        plan, opt = plan_of(case, mesh), fs.optim.sgd(1.0)
        step = fs.make_train_step(loss_fn, opt, plan)
        state, metrics = step(fs.init_state(plan, opt, params=start()), batch(0, mesh.rank))
        after = fs.unshard(state.params, plan)
        moved = [(after[u][n].double() - start()[u][n]).square().sum() for u in after for n in after[u]]
        return float(metrics.grad_norm), math.sqrt(sum(map(float, moved)))

    results: Any = mesh.run(main)
    for norm, moved in results:
        assert norm == pytest.approx(moved, rel=1e-5)


@pytest.mark.parametrize("wrong", [math.inf, math.nan, -math.inf])
@pytest.mark.parametrize(
    "wire", [INT8, fs.Wire(reduce="int4", rotate=True), fs.Wire(reduce="bf16"), fs.Wire(reduce="fp8_e4m3")], ids=str
)
def test_a_gradient_that_is_not_finite_is_an_error_on_all_ranks(wire: Wire, wrong: float) -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))

    def main() -> str:
        plan, opt = plan_of(Case(wire), mesh), fs.optim.sgd(LR)
        state = fs.init_state(plan, opt, params=start())
        step = fs.make_train_step(lambda p, x: Poison.apply(p["one"]["w"], x).sum() + p["two"]["b"].sum(), opt, plan)
        before = fs.unshard(state.params, plan)
        try:
            step(state, torch.full((1,), wrong if mesh.rank == 1 else 0.0))
        except fs.errors.NonFiniteError as error:
            after = fs.unshard(state.params, plan)
            assert all(torch.equal(before[u][n], after[u][n]) for u in before for n in before[u])
            return str(error)
        return ""

    results: Any = mesh.run(main)
    assert all("gradient" in text for text in results), results


class Poison(torch.autograd.Function):
    """The identity, whose gradient has one element that the batch says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wrong: Tensor) -> Tensor:
        ctx.save_for_backward(wrong)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (wrong,) = ctx.saved_tensors
        out = grad.clone()
        out[3, 5] += wrong[0]
        return out, None


def real(case: Case, shared_memory: bool) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """On a real rank."""
    sizes, axes = ((case.replicas, -1), ("replica", "shard")) if case.replicas > 1 else ((-1,), ("shard",))
    with fs.make_mesh(sizes, axes, shared_memory=shared_memory) as mesh:
        return trained(case, mesh)


@pytest.mark.long
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
def test_real_ranks_equal_played_ranks(pool: Pools, shared_memory: bool) -> None:
    case = Case(fs.Wire("int8", "int4", block=32), accumulate=2)
    for (seen, params), (others, whole) in zip(played(case, 2), pool(2).run(real, case, shared_memory), strict=True):
        assert seen == others
        assert all(torch.equal(params[path], whole[path]) for path in params)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLICAS)
def test_they_do_on_meshes_of_two_axes(pool: Pools, name: str) -> None:
    case = REPLICAS[name]
    for (seen, params), (others, whole) in zip(played(case, 4), pool(4).run(real, case, False), strict=True):
        assert seen == others
        assert all(torch.equal(params[path], whole[path]) for path in params)


def test_steps_of_parts_and_programs_without_a_schedule() -> None:
    """They have the bits of the train step."""
    case, mesh = Case(clip=0.3), fs.virtual_mesh((2,), ("shard",))
    want = played(case, 2)

    def branching(p: Tree, rows: tuple[Tensor, Tensor]) -> Tensor:
        return loss_fn(p, rows) if rows[0].sum().item() > -1e9 else p["one"]["b"].sum()

    def main(kind: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
        plan, opt = plan_of(case, mesh), fs.optim.sgd(LR)
        part = fs.value_and_grad(loss_fn, plan)
        update = fs.make_update(opt, plan, clip_norm=case.clip)

        def fn(state: fs.TrainState, rows: Any) -> Any:
            loss, grads = part(state.params, rows)
            state, metrics = update(state, grads)
            return state, (loss, metrics.grad_norm)

        step: Any = fs.make_step(fn, plan, debug=True)
        if kind == "on demand":
            train = fs.make_train_step(branching, opt, plan, clip_norm=case.clip, debug=True)

            def step(state: fs.TrainState, rows: Any) -> Any:
                state, metrics = train(state, rows)
                return state, (metrics.loss, metrics.grad_norm)

        state, seen = fs.init_state(plan, opt, params=start()), []
        for number in range(STEPS):
            state, (loss, norm) = step(state, batch(number, mesh.rank))
            seen.append((float(loss), float(norm)))
        whole = fs.unshard(fs.settle(state).params, plan)
        return seen, {f"{unit}.{name}": whole[unit][name] for unit in whole for name in whole[unit]}

    for kind in ("parts", "on demand"):
        found: Any = mesh.run(lambda kind=kind: main(kind))
        for (seen, params), (others, whole) in zip(want, found, strict=True):
            assert seen == others, kind
            assert all(torch.equal(params[path], whole[path]) for path in params), kind


@pytest.mark.parametrize("flat", [None, "shard"])
def test_beside_a_tensor_parallel_axis(flat: str | None) -> None:
    """Blocks are those of the tensor that a rank computes with."""
    mesh = fs.virtual_mesh((2, 2), ("tp", "shard"))
    wire = fs.Wire("int8", "int4", block=16)
    w = start()["one"]["w"]

    def main() -> tuple[Tensor, Tensor]:
        rules = [fs.Rule("w", P("tp", flat="shard")), fs.Rule("v", P(flat="shard"))]
        plan = fs.make_plan({"w": w, "v": torch.ones(3)}, mesh, rules, batch=P("shard"), wire=wire)
        read: list[Tensor] = []

        def loss(p: Any, x: Tensor) -> Tensor:
            if not isinstance(p["w"], FakeTensor):
                read.append(p["w"].detach().clone())
            return (p["w"] * x).sum() + p["v"].sum()

        opt = fs.optim.sgd(LR)
        step = fs.make_train_step(loss, opt, plan)
        state, _ = step(fs.init_state(plan, opt, params={"w": w, "v": torch.ones(3)}), gradient(mesh))
        return read[0], fs.unshard(state.params, plan)["w"]

    def gradient(mesh: fs.Mesh) -> Tensor:
        draw = torch.Generator().manual_seed(mesh.rank)
        return torch.randn(12, 16, generator=draw)

    results: Any = mesh.run(main)
    gather, reduce = wire.over("all_gather", ("shard",)), wire.over("reduce_scatter", ("shard",))
    halves, draws = w.chunk(2), [torch.Generator().manual_seed(rank) for rank in range(4)]
    grads = [through(torch.randn(12, 16, generator=draw) / 2, reduce) for draw in draws]
    want = torch.cat([half - LR * (grads[2 * part] + grads[2 * part + 1]) for part, half in enumerate(halves)])
    for rank, (read, after) in enumerate(results):
        assert torch.equal(read, through(halves[rank // 2], gather))
        assert torch.equal(after, want)


def test_verify_rounds_as_the_step_does() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))

    def main() -> bool:
        plan, opt = plan_of(Case(), mesh), fs.optim.adamw(1e-3)
        step = fs.make_train_step(loss_fn, opt, plan)
        fs.verify(step, fs.init_state(plan, opt, params=start()), batch(0, mesh.rank))
        return True

    assert all(mesh.run(main))


class Exact:
    """An optimizer that needs exact sums: it says so of leaves whose gradients are rounded."""

    def __init__(self) -> None:
        self.rule = fs.optim.sgd(LR)
        self.lr, self.init, self.hyper, self.update = LR, self.rule.init, self.rule.hyper, self.rule.update

    def problems(self, leaves: list[Any]) -> list[str]:
        return [f"{leaf.path}: sums must be exact, and travel as {leaf.rounded}" for leaf in leaves if leaf.rounded]


def test_an_optimizer_that_needs_exact_sums() -> None:
    mesh = fs.abstract_mesh((2,), ("shard",))
    rules = [fs.Rule("one.*", fs.fsdp("shard"), wire=fs.Wire(gather="int8")), (".*", fs.fsdp("shard"))]
    plan = fs.make_plan(start(), mesh, rules, units=("one", "two"), wire=fs.Wire("int8", "int4"))
    with pytest.raises(
        fs.errors.PlanError, match=r"(?s)Exact does not fit.*two\.w: sums must be exact.*as int4/256"
    ) as caught:
        fs.make_train_step(loss_fn, Exact(), plan)
    assert "one.w" not in str(caught.value)
    fs.make_train_step(loss_fn, Exact(), plan.replace(wire=fs.Wire(gather="int8")))
