"""Leaves that are frozen, cast and carried over: training equals one plain process, and holds no more than it says."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, tree
from fshard.errors import PlanError, TreeError
from tests.shared.virtual import Virtual
from tests.shared.workers import Pools
from tests.training import leaf_rows
from tests.training.leaf_rows import ROWS_OF_LEAVES, SHARDED

FOUR = ("unfrozen, otherwise sharded",)
"""The rows that run on four processes in the default suite; the others run on two virtual ranks."""
RUNS = [
    pytest.param(name, world, marks=[] if (world == 4) == (name in FOUR) else [pytest.mark.slow])
    for name in ROWS_OF_LEAVES
    for world in (2, 4)
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "world"), RUNS)
def test_training_equals_one_process(pool: Pools, world: int, name: str) -> None:
    row = ROWS_OF_LEAVES[name]
    losses, params = leaf_rows.plain(row, world)
    # In bfloat16 a product may sum in another order where its operands lie elsewhere.
    tolerance, near = (1e-5, 1e-5) if row.precision.compute is None else (5e-4, 2e-3)
    assert losses[0] - losses[4] > 0.002  # the same rows
    frozen = (row.later[1] if row.later else row.frozen), row.frozen
    ranks = pool(world) if world == 4 else Virtual(world)
    for runs in ranks.run(leaf_rows.run, row):
        assert not any(run.problems for run in runs)
        assert [loss for run in runs for loss in run.losses] == pytest.approx(losses, rel=tolerance)
        kept = {f"momentum_buffer.{path}" for path in params if not _matches(frozen[0], path)}
        assert runs[-1].state.keys() == kept
        for path, leaf in runs[-1].params.items():
            if all(_matches(pattern, path) for pattern in frozen):
                assert torch.equal(leaf, params[path]), path
            torch.testing.assert_close(leaf, params[path], rtol=near, atol=near)


def test_units_read_each_leaf_in_its_own_dtype() -> None:
    seen = {}

    @fs.unit
    def layer(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        seen.update({name: leaf.dtype for name, leaf in p.items()})
        return torch.nn.functional.layer_norm(x @ p["w"].float(), (4,), p["norm"])

    params = {"a": {"w": torch.ones(4, 4), "norm": torch.ones(4)}}
    rules = [fs.Rule(r".*norm", P(), precision=fs.Precision()), (".*", fs.fsdp("shard"))]
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(params, mesh, rules, units=("a",), precision=leaf_rows.BF16)
        opt = fs.optim.sgd(0.1)
        step = fs.make_train_step(lambda p, x: layer(p["a"], x).square().mean(), opt, plan, debug=True)
        step(fs.init_state(plan, opt, params=params), torch.randn(2, 4))
    assert seen == {"w": torch.bfloat16, "norm": torch.float32}


def test_rounded_gradients_show() -> None:
    """By more than the tolerance."""
    one, other = leaf_rows.plain(ROWS_OF_LEAVES["rounded gradients of norms"], 2), leaf_rows.plain(leaf_rows.Row(), 2)
    assert max(float((one[1][path] - other[1][path]).abs().max()) for path in one[1]) > 3e-5


def _matches(pattern: str, path: str) -> bool:
    return leaf_rows.re.fullmatch(pattern, path) is not None


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_frozen_groups_take_nothing(prefetch: int) -> None:
    """No op but gather, wait and free; no gradient; free right behind the unit's backward; half the bytes."""
    model, plan = _frozen_block()
    policy = fs.Policy(prefetch=prefetch)
    step = fs.make_train_step(leaf_rows.loss_fn(model), fs.optim.adamw(0.1), plan, schedule=policy)
    schedule = step.trace(leaf_rows.part(0, 0, 4)).schedule
    ops = [(op.kind, op.target) for op in schedule.ops]
    words = {"all_gather", "wait all_gather", "free", "forward", "backward"}
    assert {kind for kind, target in ops if target == "blocks.1"} == words
    assert ops[ops.index(("backward", "blocks.1")) + 1] == ("free", "blocks.1")
    assert {item for item in schedule.memory.sizes if item.endswith(":blocks.1")} == {"param:blocks.1", "cast:blocks.1"}
    group = next(group for group in plan.groups if group.name == "blocks.1")
    assert schedule.memory.sizes["param:blocks.1"] == pytest.approx(group.numel * 2, abs=256)
    state = fs.init_state(plan, fs.optim.adamw(0.1), params=model.params)
    assert not [path for path, _ in tree.paths(state.opt_state["exp_avg"]) if path.startswith("blocks.1.")]


def _frozen_block() -> tuple[fs.Model, fs.Plan]:
    """The middle one of three blocks is frozen."""
    model = fs.split(leaf_rows.module(), units=("blocks.*",))
    rules = [fs.Rule(r"blocks\.1\..*", fs.fsdp("shard"), trainable=False), leaf_rows.SHARDED]
    return model, fs.make_plan(model, fs.abstract_mesh((4,), ("shard",)), rules, precision=leaf_rows.BF16)


@pytest.mark.parametrize("kept", [fs.keep("blocks.1"), fs.keep("blocks.0", last=2), True, False])
def test_what_is_kept_is_gathered_once(kept: Any) -> None:
    """Frozen or not, with several microbatches, in each step anew; and what is not kept twice a microbatch."""
    model, plan = _frozen_block()
    policy = fs.Policy(prefetch=0, reshard=kept)
    step = fs.make_train_step(leaf_rows.loss_fn(model), fs.optim.sgd(0.1), plan, schedule=policy, accumulate=3)
    batch = fs.tree.map(lambda x: x[:3], leaf_rows.part(0, 0, 2))
    ops = [(op.kind, op.target) for op in step.trace(batch).schedule.ops]
    once = {"blocks.1"} if kept == fs.keep("blocks.1") else {f"blocks.{n}" for n in range(3) if kept is not True}
    for name in ("blocks.0", "blocks.1", "blocks.2"):
        often = 1 if name in once else {"blocks.0": 4, "blocks.1": 6, "blocks.2": 3}[name]  # neighbours across turns
        assert ops.count(("all_gather", name)) == ops.count(("free", name)) == often, name
        if name in once:
            assert ops.index(("free", name)) > max(at for at, op in enumerate(ops) if op == ("backward", name))


def test_units_below_which_nothing_trains_have_no_backward() -> None:
    mesh = fs.abstract_mesh((4,), ("shard",))
    model = fs.split(leaf_rows.module(), units=("blocks.*",))
    plan = fs.make_plan(model, mesh, ROWS_OF_LEAVES["the first units"].rules)
    step = fs.make_train_step(leaf_rows.loss_fn(model), fs.optim.sgd(0.1), plan)
    ops = step.trace(leaf_rows.part(0, 0, 4)).schedule.ops
    assert {op.target for op in ops if op.kind == "backward"} == {"blocks.2", "root"}
    assert sum(op.kind == "all_gather" and op.target == "blocks.0" for op in ops) == 1


def test_a_module_that_freezes_is_overruled() -> None:
    module = torch.nn.Linear(4, 4)
    module.weight.requires_grad_(False)
    mesh, model = fs.abstract_mesh((2,), ("shard",)), fs.split(module)
    for trainable, trained in ((None, {"bias"}), (True, {"bias", "weight"}), (False, set())):
        plan = fs.make_plan(model, mesh, [fs.Rule(".*", P("shard"), trainable=trainable)])
        assert {path for path, leaf in plan.leaves.items() if leaf.trainable} == trained


def test_integers_cannot_be_trained() -> None:
    params = {"w": torch.ones(4), "ids": torch.arange(4), "mask": torch.ones(4, dtype=torch.bool)}
    mesh = fs.abstract_mesh((2,), ("shard",))
    with pytest.raises(PlanError, match=r"(?s)ids  torch.int64.*mask  torch.bool.*without trainable=True"):
        fs.make_plan(params, mesh, [fs.Rule(".*", fs.fsdp("shard"), trainable=True)])


def test_floats_of_8_bits_cannot_be_trained() -> None:
    """They may be kept, gathered and read: quantized weights are frozen leaves."""
    module = torch.nn.Linear(16, 16)
    module.weight = torch.nn.Parameter(module.weight.detach().to(torch.float8_e4m3fn))
    mesh, sharded = fs.make_mesh((1,), ("shard",)), (".*", fs.fsdp("shard"))
    for trainable in (None, True):
        with pytest.raises(PlanError, match=r"weight  torch.float8_e4m3fn(.|\n)*trainable=False, or keep them in bfl"):
            fs.make_plan(fs.split(module), mesh, [fs.Rule("weight", P(), trainable=trainable), sharded])
    module.weight.requires_grad_(False)
    model, opt = fs.split(module), fs.optim.sgd(0.1)
    plan = fs.make_plan(model, mesh, [sharded])

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, p["weight"].float(), p["bias"]).square().mean()

    state = fs.init_state(plan, opt, params=model.params)
    state, _ = fs.make_train_step(loss, opt, plan)(state, torch.ones(2, 16))
    assert torch.equal(fs.unshard(state.params, plan)["weight"].float(), module.weight.float())


def test_dtypes_that_do_not_go_together_are_named() -> None:
    model = fs.split(torch.nn.Sequential(torch.nn.Linear(4, 4)), units=("0",))
    mesh, opt, x = fs.make_mesh((1,), ("shard",)), fs.optim.sgd(0.1), torch.ones(2, 4)

    def run(precision: fs.Precision) -> None:
        plan = fs.make_plan(model, mesh, [SHARDED], precision=precision)
        step = fs.make_train_step(lambda p, x: model.apply(p, x).float().sum(), opt, plan)
        step(fs.init_state(plan, opt, params=model.params), x)

    with pytest.raises(RuntimeError) as caught:
        run(leaf_rows.BF16)
    told = "Unit 0 was called with float32 and reads parameters in bfloat16: cast the input, or let fs"
    assert any(told in note for note in caught.value.__notes__)
    run(fs.Precision(torch.bfloat16, inputs=True))


def _small(trainable: bool | None = None, mesh: fs.Mesh | None = None) -> fs.Plan:
    rules = [fs.Rule("w", fs.fsdp("shard"), trainable=trainable), ("b", P())]
    mesh = fs.abstract_mesh((1,), ("shard",)) if mesh is None else mesh
    return fs.make_plan({"w": torch.ones(8, 3), "b": torch.ones(3)}, mesh, rules)


def test_replace_keeps_the_rest() -> None:
    plan = _small(False)
    same = plan.replace()
    assert same == plan and same.groups == plan.groups
    rounded = plan.replace(precision=leaf_rows.BF16)
    assert not rounded.leaves["w"].trainable and rounded.groups[0].compute_dtype == torch.bfloat16
    assert rounded.replace(precision=fs.Precision()) == plan


@pytest.mark.parametrize("name", ["mesh", "batch", "model", "units", "dtype"])
def test_a_replace_that_changes_more_than_it_may(name: str) -> None:
    with pytest.raises(
        PlanError, match=rf"plan\.replace: {name}= cannot be replaced, only rules=, precision=, wire= and stages="
    ):
        _small().replace(**{name: None})


def test_states_that_cannot_be_carried_over() -> None:
    plan = _small(False)
    state = fs.init_state(plan, fs.optim.sgd(0.1, momentum=0.9), params={"w": torch.ones(8, 3), "b": torch.ones(3)})
    other = fs.make_plan({"w": torch.ones(8, 4)}, plan.mesh, [(".*", P())])
    with pytest.raises(PlanError, match=r"(?s)b: only the state has it.*w: \[8, 3\].*in the state, \[8, 4\]"):
        fs.reshard_state(state, other, fs.optim.sgd(0.1, momentum=0.9))
    with pytest.raises(PlanError, match="two meshes"):
        fs.reshard_state(state, _small(mesh=fs.abstract_mesh((2,), ("shard",))), fs.optim.sgd(0.1, momentum=0.9))
    with pytest.raises(
        TreeError, match=r"(?s)opt.momentum_buffer.b: only the state has it.*opt.exp_avg.b: only the opt"
    ):
        fs.reshard_state(state, _small(), fs.optim.adamw(0.1))


@pytest.mark.parametrize("compile", [None, "fx"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_unit_that_is_given_a_leaf_twice(times: int, compile: str | None) -> None:
    """Its gradient counts once, and the other leaf of the group, of which there are as many then, has none."""

    @fs.unit
    def body(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ params["up"]) @ params["down"].mT

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            x = body({"up": params["w"], "down": params["w"]}, x)
        return x.square().mean()

    torch.manual_seed(0)
    params, x = {"w": torch.randn(4, 4), "idle": torch.randn(4, 4)}, torch.randn(3, 4)
    plan = fs.make_plan(params, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    opt = fs.optim.sgd(1.0)
    step = fs.make_train_step(loss_fn, opt, plan, compile=compile, debug=True)
    state, _ = step(fs.init_state(plan, opt, params=params), x)
    found = fs.unshard(state.params, plan)
    w = params["w"].requires_grad_()
    (grad,) = torch.autograd.grad(loss_fn({"w": w}, x), w)
    torch.testing.assert_close(found, {"w": w.detach() - grad, "idle": params["idle"]})
