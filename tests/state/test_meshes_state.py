"""States whose optimizer is sharded over more axes than the parameters: carried over to other plans, and saved."""

from pathlib import Path
from typing import Any

import pytest

import fshard as fs
from fshard import P, tree
from tests.shared import zoo
from tests.shared.workers import Pools

PARTED = [
    fs.Rule(r"norm.*", P(), opt=P(flat="shard")),
    fs.Rule(r".*", fs.fsdp("shard"), opt=fs.fsdp(("shard", "replica"))),
]
PLAIN = [(r"norm.*", P()), (r".*", fs.fsdp("shard"))]
BATCH = P(("replica", "shard"))


def _run(state: fs.TrainState, step: Any, mesh: fs.Mesh, first: int) -> tuple[fs.TrainState, list[float]]:
    example, losses = zoo.build("odd"), []
    for number in range(first, first + 3):
        state, metrics = step(state, zoo.cut(example.batch(number), mesh.rank, mesh.size))
        losses.append(float(metrics.loss))
    return state, losses


def carried(folder: str) -> list[list[float]]:
    """On a rank: losses of three steps after three others, under the same plan, another one, and from a checkpoint."""
    example, out = zoo.build("odd"), []
    with fs.make_mesh((2, 2), ("replica", "shard")) as mesh:
        plans = [
            fs.make_plan(example.model, mesh, rules, batch=BATCH, units=example.units) for rules in (PARTED, PLAIN)
        ]
        opt = fs.optim.adamw(2e-3)
        steps = [fs.make_train_step(example.loss_fn, opt, plan) for plan in plans]
        state, _ = _run(fs.init_state(plans[0], opt, params=example.params()), steps[0], mesh, 0)
        moved = fs.reshard_state(state, plans[1], opt)
        back = fs.reshard_state(moved, plans[0], opt)
        with fs.Checkpointer(Path(folder) / "run") as saver:
            saver.save(state)
            restored = [saver.restore(plan, opt) for plan in plans]
        for start, step in ((state, 0), (moved, 1), (back, 0), (restored[0], 0), (restored[1], 1)):
            out.append(_run(start, steps[step], mesh, 3)[1])
    return out


def test_states_are_carried_between_plans(pool: Pools, tmp_path: Path) -> None:
    ranks = pool(4).run(carried, str(tmp_path))
    for losses in ranks:
        assert losses == ranks[0]
        for other in losses[1:]:
            assert other == pytest.approx(losses[0], abs=1e-6)


def read_between() -> tuple[dict[str, Any], dict[str, Any]]:
    """On a rank: parameters that are read between steps, under a plan with parts and one without."""
    example, out = zoo.build("odd"), []
    with fs.make_mesh((2, 2), ("replica", "shard")) as mesh:
        for rules in (PARTED, PLAIN):
            plan = fs.make_plan(example.model, mesh, rules, batch=BATCH, units=example.units)
            opt = fs.optim.adamw(2e-3)
            state, step = (
                fs.init_state(plan, opt, params=example.params()),
                fs.make_train_step(example.loss_fn, opt, plan),
            )
            state, _ = _run(state, step, mesh, 0)
            out.append({path: leaf.clone() for path, leaf in tree.paths(fs.unshard(fs.settle(state).params, plan))})
    return out[0], out[1]


def test_reading_parameters_finishes_the_update_on_all_ranks(pool: Pools) -> None:
    for parted, plain in pool(4).run(read_between):
        for path, leaf in parted.items():
            assert leaf.allclose(plain[path], rtol=0, atol=1e-6), path
