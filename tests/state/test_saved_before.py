"""A checkpoint that an earlier version wrote: it restores on any number of ranks, to the very values, and trains on.

``saved/0.1.0`` holds it. Two ranks made five steps of ``fs.optim.every(3, adamw)`` with clipping, a loss scale, two
microbatches and a leaf whose optimizer state is sharded further, so gradients of two steps are carried and an update
was waiting. ``python -m tests.state.test_saved_before FOLDER`` writes one with the version at hand.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P, tree
from fshard.checkpoint.folder import step_folder
from fshard.state.entries import entries, scalars
from fshard.state.move import whole_entry
from tests.shared.bad import UNITS, weights
from tests.shared.workers import Pool, Pools
from tests.state.test_state import first, last, middle

SAVED = Path(__file__).parent / "saved" / "0.1.0"
STEPS = 5


def rows(step: int, rank: int, world: int) -> Tensor:
    """A rank's part of 12 rows."""
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]


def loss(params: Any, x: Tensor) -> Any:
    """A mean over rows, as a sum and a count."""
    y = last(params["last"], middle(params["middle"], first(params["first"], x)))
    each = (y - x[:, :3].sin()).square().mean(1)
    return fs.Mean(each.sum(), len(each))


def parts(mesh: fs.Mesh) -> tuple[fs.Plan, Any, Any]:
    """The plan, the optimizer and the step of the run."""
    rules = [fs.Rule(r"middle.*", P(), opt=fs.fsdp("shard")), (r"first\.b", P()), (r".*", fs.fsdp("shard"))]
    plan = fs.make_plan(weights(), mesh, rules, batch=P("shard"), units=UNITS)
    opt = fs.optim.every(3, fs.optim.adamw(0.05, weight_decay=0.1))
    scale = fs.LossScale(initial=8.0, interval=2)
    return plan, opt, fs.make_train_step(loss, opt, plan, clip_norm=0.4, accumulate=2, loss_scale=scale)


def told(state: fs.TrainState) -> dict[str, Any]:
    """Every entry of a state as a whole, and its scalars. Collective."""
    out: dict[str, Any] = {"scalars": scalars(state)}
    places = state.plan.places()
    for entry in entries(fs.settle(state)):
        group, number = places[entry.name.split(".", 1 if entry.name.startswith("params.") else 2)[-1]]
        cut = group if entry.name.startswith("params.") else group.owned
        mesh = state.plan.mesh
        whole = whole_entry(mesh, entry, [cut.piece(number, mesh, rank) for rank in range(mesh.size)])
        out[entry.name] = whole.tolist()
    return out


def train(state: fs.TrainState, step: Any, count: int) -> fs.TrainState:
    """Make some steps."""
    mesh = state.plan.mesh
    for _ in range(count):
        state, _ = step(state, rows(state.step, mesh.rank, mesh.size))
    return state


def write(folder: str) -> None:
    """On a rank: make the checkpoint, and tell what it holds and what the next four steps make of it."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, opt, step = parts(mesh)
        state = train(fs.init_state(plan, opt, seed=7, params=weights()), step, STEPS)
        with fs.Checkpointer(folder) as checkpoints:
            checkpoints.save(state, data={"epoch": 1})
        held = told(state)
        after = told(train(state, step, 4))
        if mesh.rank == 0:
            (Path(folder) / "told.json").write_text(json.dumps({"held": held, "after": after}))


def read(folder: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """On a rank: what a checkpoint holds, and what four steps make of it."""
    with fs.make_mesh((-1,), ("shard",)) as mesh, fs.Checkpointer(folder) as checkpoints:
        plan, opt, step = parts(mesh)
        state = checkpoints.restore(plan, opt)
        held = told(state)
        return held, told(train(state, step, 4)), checkpoints.restored


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_checkpoint_of_an_earlier_version(pool: Pools, world: int) -> None:
    want = json.loads((SAVED / "told.json").read_text())
    assert want["held"]["scalars"]["carried_count"] == 24.0 and want["held"]["scalars"]["step"] == STEPS
    for held, after, restored in pool(world).run(read, str(SAVED)):
        assert held == want["held"]
        assert restored.step == STEPS and restored.data == {"epoch": 1}
        assert after.keys() == want["after"].keys() and after["scalars"] == want["after"]["scalars"]
        for name in held.keys() - {"scalars"}:
            mine, theirs = torch.tensor(after[name]), torch.tensor(want["after"][name])
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5, msg=name)


def test_it_holds_what_the_test_is_about() -> None:
    want = json.loads((SAVED / "told.json").read_text())
    carried = [name for name in want["held"] if name.startswith("opt.carried.")]
    assert len(carried) == len(dict(tree.paths(weights())))
    assert all(torch.tensor(want["held"][name]).any() for name in carried)
    assert all(
        not torch.equal(torch.tensor(v), torch.tensor(want["after"][n]))
        for n, v in want["held"].items()
        if n[:2] == "pa"
    )
    assert Path(step_folder(str(SAVED), STEPS)).is_dir()


if __name__ == "__main__":
    Pool(2).run(write, sys.argv[1])
