"""States: whole tensors to shards and back on real ranks, and what becomes of a state that a step takes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, tree
from fshard.errors import DonatedError, PlanError, TreeError
from tests.shared.bad import FLAT, UNITS, place, rule, weights
from tests.shared.workers import Pools
from tests.training.test_bad_steps import first, last, middle

Meshes = tuple[tuple[int, ...], tuple[str, ...]]

SHARD: Meshes = ((-1,), ("shard",))
REPLICA: Meshes = ((2, -1), ("replica", "shard"))
TENSOR: Meshes = ((2, -1), ("tp", "shard"))
TENSOR_LAST: Meshes = ((-1, 2), ("shard", "tp"))

LEAVES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "scale": ((), torch.float32),
    "one": ((1,), torch.float64),
    "uneven": ((5, 7), torch.float32),
    "long": ((101,), torch.bfloat16),
    "cut.rows": ((12, 5), torch.float32),
    "cut.columns": ((3, 12, 2), torch.float32),
    "cut.both": ((12, 12), torch.float32),
    "cut.flat": ((4, 9), torch.float32),
    "same": ((3, 3), torch.float32),
    "table": ((6, 2), torch.int64),
}


def _whole() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(5)
    leaves = {path: torch.randn(shape, generator=draw) * 100 for path, (shape, _) in LEAVES.items()}
    return tree.nest({path: leaf.to(LEAVES[path][1]) for path, leaf in leaves.items()})


def _plan(mesh: fs.Mesh) -> fs.Plan:
    other = "tp" if "tp" in mesh.axis_names else None
    rules = [
        (r"same", P()),
        (r"cut\.rows", P("shard")),
        (r"cut\.columns", P(None, "shard")),
        (r"cut\.both", P("shard", other)),
        (r"cut\.flat", P(other, None, flat="shard")),
        (r".*", fs.fsdp("shard")),
    ]
    data = [axis for axis in mesh.axis_names if axis != "tp"]
    return fs.make_plan(_whole(), mesh, rules, batch=P(tuple(data)), units=("cut",))


def there_and_back(axes: Meshes) -> list[str]:
    """On a rank: what is not as it should be."""
    out = []
    with fs.make_mesh(*axes) as mesh:
        plan, whole = _plan(mesh), _whole()
        parts = fs.shard(whole, plan)
        state = fs.init_state(plan, rule(), params=whole)
        for name, params in {"shard": parts, "init_state": state.params}.items():
            back = dict(tree.paths(fs.unshard(params, plan)))
            again = dict(tree.paths(fs.shard(tree.nest(back), plan)))
            for path, leaf in tree.paths(whole):
                if back[path].dtype != leaf.dtype or not torch.equal(back[path], leaf):
                    out.append(f"{name}: {path} came back as {back[path]}")
            out += [f"{name}: {path}" for path, part in tree.paths(params) if not torch.equal(part, again[path])]
            out += [f"{name}: order" for _ in range(list(back) != list(plan.leaves))]
        for path, leaf in tree.paths(fs.unshard(parts, plan)):
            leaf.zero_()  # memory of its own
            group, number = plan.places()[path]
            if math.prod(group.local_shape(number, mesh)) and not dict(tree.paths(parts))[path].any():
                out.append(f"{path} shares memory with what unshard made")
        held = sum(leaf.numel() for _, leaf in tree.paths(parts))
        out.append(str(held))
    return out


@pytest.mark.parametrize(
    ("world", "axes"),
    [(1, SHARD), (2, SHARD), (3, SHARD), (4, SHARD), (4, REPLICA), (2, TENSOR), (4, TENSOR), (4, TENSOR_LAST)],
)
def test_shard_and_unshard_are_inverse(pool: Pools, world: int, axes: Meshes) -> None:
    ranks = pool(world).run(there_and_back, axes)
    assert [problems[:-1] for problems in ranks] == [[]] * world
    if axes == SHARD:
        total = sum(math.prod(shape) for shape, _ in LEAVES.values())
        assert sum(int(problems[-1]) for problems in ranks) == total + 9 * (world - 1)


def test_an_abstract_mesh_can_shard_and_cannot_unshard() -> None:
    plan = _plan(fs.abstract_mesh((2,), ("shard",), rank=1))
    parts = fs.shard(_whole(), plan)
    with pytest.raises(PlanError, match="abstract mesh"):
        fs.unshard(parts, plan)


def test_an_abstract_mesh_of_one_rank_runs() -> None:
    plan = place(fs.abstract_mesh((1,), ("shard",)))
    state, _ = fs.make_train_step(loss, rule(), plan)(fs.init_state(plan, rule(), params=weights()), batch(0, 0, 1))
    assert fs.unshard(state.params, plan)["last"]["b"].any()


def loss(params: Any, batch: Any) -> Tensor:
    """A loss of three units."""
    x = middle(params["middle"], first(params["first"], batch["x"]))
    return F.mse_loss(last(params["last"], x), batch["y"])


def short_loss(params: Any, batch: Any) -> Tensor:
    """A loss that does without the unit in the middle, and reads a leaf itself."""
    x = last(params["last"], first(params["first"], batch["x"]))
    return F.l1_loss(x, batch["y"]) + params["first"]["b"].square().sum()


def batch(step: int, rank: int, world: int) -> dict[str, Tensor]:
    """A rank's part of 12 rows."""
    draw = torch.Generator().manual_seed(step)
    whole = {"x": torch.randn(12, 6, generator=draw), "y": torch.randn(12, 3, generator=draw)}
    return {name: rows.chunk(world)[rank] for name, rows in whole.items()}


def _flat(params: Any, plan: fs.Plan) -> dict[str, Tensor]:
    return dict(tree.paths(fs.unshard(params, plan)))


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(leaf, b[path]) for path, leaf in a.items())


def alternating(read: bool) -> tuple[list[float], dict[str, Tensor], list[bool]]:
    """On a rank: two train steps take turns on one state."""
    with fs.make_mesh(*SHARD) as mesh:
        plan = place(mesh)
        state = fs.init_state(plan, rule(), params=weights())
        steps = [fs.make_train_step(fn, rule(), plan) for fn in (loss, short_loss)]
        losses, waits = [], []
        for number in range(6):
            state, metrics = steps[number % 3 == 1](state, batch(number, mesh.rank, mesh.size))
            losses.append(metrics.loss.item())
            waits.append(state.pending is not None)
            if read:
                assert state.opt_state and state.params and state.pending is None
        return losses, _flat(state.params, plan), waits


@pytest.mark.parametrize("world", [1, 2, 3])
def test_two_steps_take_turns_on_one_state(pool: Pools, world: int) -> None:
    runs = pool(world).run(alternating, False)
    own = {path: leaf.clone().requires_grad_() for path, leaf in tree.paths(weights())}
    sgd = torch.optim.SGD(own.values(), lr=0.05, momentum=0.9)
    for number in range(6):
        for leaf in own.values():
            leaf.grad = torch.zeros_like(leaf)
        value = (short_loss if number % 3 == 1 else loss)(tree.nest(own), batch(number, 0, 1))
        value.backward()
        sgd.step()
        for losses, _, waits in runs:
            assert abs(losses[number] - value.item()) < 1e-5, number
            assert waits[number]
    for _, params, _ in runs:
        for path, leaf in own.items():
            torch.testing.assert_close(params[path], leaf.detach(), rtol=0, atol=1e-5)


def test_reading_finishes_what_is_pending_and_changes_nothing(pool: Pools) -> None:
    for (losses, params, _), (read_losses, read_params, _) in zip(
        pool(2).run(alternating, False), pool(2).run(alternating, True), strict=True
    ):
        assert losses == read_losses and _equal(params, read_params)


def _started(donate: bool = True) -> tuple[fs.Plan, Any, Any]:
    plan = place(fs.make_mesh(*SHARD))
    state = fs.init_state(plan, rule(), params=weights())
    return plan, state, fs.make_train_step(loss, rule(), plan, donate=donate)


USES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda t: t + 1,
    "radd": lambda t: 1 + t,
    "sum": lambda t: t.sum(),
    "index": lambda t: t[0],
    "write": lambda t: t.zero_(),
    "assign": lambda t: t.__setitem__(0, 1.0),
    "shape": lambda t: t.shape,
    "function": lambda t: F.relu(t),
    "stack": lambda t: torch.stack([t, t]),
    "out": lambda t: torch.add(torch.ones(1), torch.ones(1), out=t),
    "tolist": lambda t: t.tolist(),
    "clone": lambda t: t.clone(),
    "data": lambda t: t.data,
    "format": lambda t: f"{t:.2f}",
}


@pytest.mark.parametrize("use", USES)
def test_a_tensor_of_a_donated_state_says_so(use: str) -> None:
    _, state, step = _started()
    taken = [state.params["middle"]["w"], next(leaf for _, leaf in tree.paths(state.opt_state))]
    step(state, batch(0, 0, 1))
    for tensor in taken:
        with pytest.raises(DonatedError, match="donate=False"):
            USES[use](tensor)


def test_donated_states_and_tensors_can_be_printed() -> None:
    _, state, step = _started()
    taken, text = state.params["middle"]["w"], repr(state)
    new, _ = step(state, batch(0, 0, 1))
    assert "5 leaves on rank 0" in text and "step 1" in repr(new)
    assert "donated" in repr(state) and "donated" in repr(taken) and "donated" in str(taken)
    for read in (lambda: state.params, lambda: state.opt_state, lambda: state.finished(), lambda: state.shards()):
        with pytest.raises(DonatedError, match="state of step 0"):
            read()


def test_a_kept_state_and_its_successors_go_separate_ways() -> None:
    plan, state, step = _started(donate=False)
    taken, start = state.params["middle"]["w"], _flat(state.params, plan)
    before = taken.clone()
    left, _ = step(state, batch(0, 0, 1))
    right, _ = step(state, batch(1, 0, 1))  # takes its gradients while those of the left one may still wait
    left_two, _ = step(left, batch(1, 0, 1))
    assert _equal(_flat(state.params, plan), start) and torch.equal(taken, before)
    _, alone, step_alone = _started()
    alone, _ = step_alone(alone, batch(0, 0, 1))
    assert _equal(_flat(alone.params, plan), _flat(left.params, plan))
    alone, _ = step_alone(alone, batch(1, 0, 1))
    assert _equal(_flat(alone.params, plan), _flat(left_two.params, plan))
    _, other, step_other = _started()
    other, _ = step_other(other, batch(1, 0, 1))
    assert _equal(_flat(other.params, plan), _flat(right.params, plan))


def test_a_state_of_another_plan_is_refused() -> None:
    plan, state, _ = _started()
    other = place(plan.mesh, [(r"last\.b", P()), *FLAT])
    with pytest.raises(TreeError, match="another plan"):
        fs.make_train_step(loss, rule(), other)(state, batch(0, 0, 1))
    # An equal plan is the same plan, and nothing happened to the state.
    fs.make_train_step(loss, rule(), place(plan.mesh))(state, batch(0, 0, 1))


def test_a_state_of_another_optimizer_is_refused() -> None:
    plan, state, _ = _started()
    with pytest.raises(TreeError, match="exp_avg.*fs.init_state"):
        fs.make_train_step(loss, fs.optim.adamw(1e-3), plan)(state, batch(0, 0, 1))
    with pytest.raises(TreeError, match="another plan"):
        other = fs.make_plan(weights(), fs.abstract_mesh((1,), ("x",)), [(".*", P())], units=UNITS)
        fs.make_eval_step(loss, other)(state, batch(0, 0, 1))


def test_opt_state_is_laid_out_like_params() -> None:
    plan, state, step = _started()
    state, _ = step(state, batch(0, 0, 1))
    assert list(state.opt_state) and all(
        [(path, leaf.shape) for path, leaf in tree.paths(moments)]
        == [(path, leaf.shape) for path, leaf in tree.paths(state.params)]
        for moments in state.opt_state.values()
    )
