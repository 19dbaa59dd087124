"""Updated ranges as rounded differences: what is left of one goes with the next, and is part of the state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.errors import PlanError
from tests.shared.workers import Pools
from tests.training.wire_cases import LR, Tree, batch, loss_fn, start, through

STEPS = 4
WIRE = fs.Wire(update="int4", block=32)
PARTED: dict[str, tuple[tuple[int, ...], tuple[str, ...], Any, Any]] = {
    "replicated": ((3,), ("shard",), P(), P(flat="shard")),
    "hsdp": ((2, 2), ("replica", "shard"), P(flat="shard"), P(flat=("shard", "replica"))),
}


MORE = (("replicated", False), ("hsdp", True))


def plan_of(mesh: fs.Mesh, at_rest: Any, opt: Any, wire: fs.Wire = WIRE) -> fs.Plan:
    rules = [fs.Rule(".*", at_rest, opt=opt)]
    return fs.make_plan(start(), mesh, rules, batch=P(mesh.axis_names), units=("one", "two"), wire=wire)


def flat_of(tree: Tree) -> dict[str, Tensor]:
    return {f"{unit}.{name}": leaf for unit, leaves in tree.items() for name, leaf in leaves.items()}


def trained(mesh: fs.Mesh, case: str, settled: bool = False, steps: int = STEPS) -> tuple[fs.TrainState, fs.Plan, Any]:
    """On a rank: the state after some steps."""
    plan, opt = plan_of(mesh, *PARTED[case][2:]), fs.optim.sgd(LR)
    step = fs.make_train_step(loss_fn, opt, plan, debug=True)
    state = fs.init_state(plan, opt, params=start())
    for number in range(steps):
        state, _ = step(state, batch(number, mesh.rank))
        if settled:
            fs.settle(state)
    return fs.settle(state), plan, step


def plain(world: int, steps: int = STEPS) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Exact parameters, and what all ranks hold of them: gradients are those of the latter."""
    exact, form = flat_of(start()), WIRE.over("update_gather", ("any",))
    held = {path: leaf.clone() for path, leaf in exact.items()}
    for number in range(steps):
        total: dict[str, Tensor] = {}
        for rank in range(world):
            read = {path: leaf.clone().requires_grad_() for path, leaf in held.items()}
            tree: Tree = {}
            for path, leaf in read.items():
                tree.setdefault(path.split(".")[0], {})[path.split(".")[1]] = leaf
            value = loss_fn(tree, batch(number, rank))
            value.backward(torch.full_like(value, 1 / world))
            for path, leaf in read.items():
                assert leaf.grad is not None
                total[path] = total[path] + leaf.grad if path in total else leaf.grad
        exact = {path: leaf - LR * total[path] for path, leaf in exact.items()}
        held = {path: leaf + through(exact[path] - leaf, form) for path, leaf in held.items()}
    return exact, held


def masters(states: list[Any]) -> dict[str, Tensor]:
    """The exact parameters, from the ranges of all ranks: each is held by some of them."""
    found: dict[str, dict[int, Tensor]] = {}
    for ranges in states:
        for path, (begin, value) in ranges.items():
            if len(value):
                found.setdefault(path, {})[begin] = value
    return {path: torch.cat([parts[begin] for begin in sorted(parts)]) for path, parts in found.items()}


def own_ranges(state: fs.TrainState) -> dict[str, tuple[int, Tensor]]:
    """This rank's exact ranges, each with its first element in the leaf."""
    plan, found = state.plan, {}
    kept = flat_of(state.opt_state["master"])
    for path, (group, number) in plan.places().items():
        piece = group.owned.piece(number, plan.mesh)
        found[path] = piece.start, kept[path].reshape(-1).clone()
    return found


@pytest.mark.parametrize(
    ("case", "settled"),
    [("replicated", True), ("hsdp", False), *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)],
)
def test_what_is_held_and_what_is_left_are_the_exact_parameters(case: str, settled: bool) -> None:
    """Bit for bit those of one process, whether steps or ``settle`` exchange the ranges."""
    sizes, names = PARTED[case][:2]
    mesh = fs.virtual_mesh(sizes, names)

    def main() -> Any:
        state, plan, _ = trained(mesh, case, settled)
        return flat_of(fs.unshard(state.params, plan)), own_ranges(state)

    results: Any = mesh.run(main)
    exact, held = plain(mesh.size)
    whole = masters([ranges for _, ranges in results])
    for path, leaf in held.items():
        assert all(torch.allclose(params[path], leaf, rtol=0, atol=1e-6) for params, _ in results), path
        torch.testing.assert_close(whole[path].view(leaf.shape), exact[path], rtol=0, atol=1e-6)
        assert all(torch.equal(params[path], results[0][0][path]) for params, _ in results)
    left = max((exact[path] - held[path]).abs().max() for path in exact)
    assert left > 1e-4


def begun(folder: str) -> Any:
    """On a rank: two steps, a checkpoint, two more."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        state, plan, step = trained(mesh, "replicated", steps=2)
        fs.Checkpointer(folder).save(state)
        kept = own_ranges(state)
        for number in (2, 3):
            state, _ = step(state, batch(number, mesh.rank))
        return kept, flat_of(fs.unshard(fs.settle(state).params, plan)), own_ranges(state)


def resumed(folder: str, steps: tuple[int, ...]) -> Any:
    """On a rank: more steps from the checkpoint."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, opt = plan_of(mesh, *PARTED["replicated"][2:]), fs.optim.sgd(LR)
        state = fs.Checkpointer(folder).restore(plan, opt)
        step = fs.make_train_step(loss_fn, opt, plan)
        for number in steps:
            state, _ = step(state, batch(number, mesh.rank))
        return flat_of(fs.unshard(fs.settle(state).params, plan)), own_ranges(state)


@pytest.mark.long
def test_a_resumed_run_is_the_same_run(pool: Pools, tmp_path: Path) -> None:
    """On the same mesh bit for bit; on another one what is left goes along."""
    folder = str(tmp_path / "run")
    before, after = pool(2).run(begun, folder), pool(2).run(resumed, folder, (2, 3))
    for (_, params, ranges), (others, again) in zip(before, after, strict=True):
        assert all(torch.equal(params[path], others[path]) for path in params)
        assert all(torch.equal(ranges[path][1], again[path][1]) for path in ranges)
    found = pool(3).run(resumed, folder, ())
    want, got = masters([kept for kept, _, _ in before]), masters([ranges for _, ranges in found])
    assert all(torch.equal(want[path], got[path]) for path in want)
    assert want.keys() == flat_of(start()).keys()


def test_other_parameters_are_exact() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))

    def main() -> bool:
        state, plan, step = trained(mesh, "replicated", steps=2)
        state = state.replace(params=fs.tree.scale(state.params, 2.0))
        params = flat_of(state.params)
        for path, (begin, value) in own_ranges(state).items():
            assert torch.equal(params[path].reshape(-1)[begin : begin + len(value)], value)
        state, metrics = step(state, batch(3, mesh.rank))
        return bool(metrics.loss.isfinite())

    assert all(mesh.run(main))


def test_verify_updates_the_exact_values() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))

    def main() -> bool:
        state, plan, step = trained(mesh, "replicated", steps=2)
        fs.verify(step, state, batch(3, mesh.rank))
        return True

    assert all(mesh.run(main))


def test_what_travels_and_what_cannot() -> None:
    mesh = fs.abstract_mesh((4,), ("shard",))
    plan = plan_of(mesh, P(), P(flat="shard"))
    step = fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan)
    moves = {m.kind: m for m in step.trace(batch(0, 0)).schedule.groups[0].transfers}
    own = plan.groups[0].owned.chunk
    assert moves["update_gather"].sent == 3 * (own // 2 + own // 32 * 4)
    assert moves["update_gather"].wire == "int4/32"
    assert "update_gather in int4/32" in str(plan)
    with pytest.raises(PlanError, match="update='int4' has no effect"):
        plan_of(mesh, P(flat="shard"), None)
    with pytest.raises(PlanError, match="exact parameters lie beside what other ranks hold.*host memory"):
        rules = [fs.Rule(".*", P(), opt=P(flat="shard"), opt_memory_kind="unpinned_host")]
        fs.make_plan(start(), mesh, rules, wire=WIRE)
