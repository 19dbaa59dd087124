"""Things that are made in one cell of a notebook and used in another, inside and outside of ``mesh.run``."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import CommError, DonatedError, PlanError, StateError, TreeError
from fshard.played.cooperative import RankThread

WIDTH, STEPS = 6, 3
OPT = fs.optim.adamw(1e-2)
BATCH = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)
NET = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
MODEL = fs.split(NET, units=("0", "2"))


def loss(params: Any, batch: Any) -> torch.Tensor:
    """The mean square of the outputs."""
    return MODEL.apply(params, batch).square().mean()


def planned(mesh: fs.Mesh) -> fs.Plan:
    """All leaves sharded over the first axis."""
    axis = mesh.axis_names[0]
    return fs.make_plan(MODEL, mesh, [(".*", fs.fsdp(axis))], batch=fs.P(axis))


def whole(params: Any) -> dict[str, torch.Tensor]:
    """Leaves by path."""
    return dict(fs.tree.paths(params))


def alone(steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and parameters of a run that is made in one call of ``mesh.run``, as scripts make it."""

    def main() -> Any:
        mesh = fs.make_mesh((-1,), ("shard",))
        plan = planned(mesh)
        state, step = fs.init_state(plan, OPT, seed=1), fs.make_train_step(loss, OPT, plan)
        losses = []
        for _ in range(steps):
            state, metrics = step(state, plan.local_batch(BATCH))
            losses.append(metrics.loss.item())
        return losses, whole(fs.unshard(state.params, plan))

    found: tuple[list[float], dict[str, torch.Tensor]] = fs.virtual_mesh((2,), ("shard",)).run(main)[0]
    return found


def same(left: Any, right: Any) -> bool:
    """Whether two trees are equal, bit for bit."""
    one, other = whole(left), whole(right)
    return one.keys() == other.keys() and all(torch.equal(leaf, other[path]) for path, leaf in one.items())


@pytest.fixture
def mesh() -> Any:
    return fs.virtual_mesh((2,), ("shard",))


def test_a_script_runs_outside_of_run_as_it_is(mesh: Any) -> None:
    """Outside, the caller stands for all ranks: batches are global, states show whole tensors."""
    plan = planned(mesh)
    state, step = fs.init_state(plan, OPT, seed=1), fs.make_train_step(loss, OPT, plan)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, plan.local_batch(BATCH))
        losses.append(metrics.loss.item())
    assert (losses, True) == (alone()[0], same(fs.unshard(state.params, plan), fs.tree.nest(alone()[1])))
    assert state.params["0"]["weight"].shape == state.opt_state["exp_avg"]["0"]["weight"].shape == (WIDTH, WIDTH)
    assert isinstance(step, fs.types.TrainStep) and "all 2 ranks" in repr(state) and "train step" in repr(step)
    assert step.schedule.hash == step.trace(BATCH).schedule.hash and len(step.record) > 9
    assert fs.shard(state.params, plan).keys() == state.params.keys()


def test_made_outside_and_used_inside_and_back(mesh: Any) -> None:
    plan = planned(mesh)
    state, step = fs.init_state(plan, OPT, seed=1), fs.make_train_step(loss, OPT, plan)

    def cell() -> Any:
        mine, metrics = step(state, plan.local_batch(BATCH))
        assert mine.params["0"]["weight"].dim() == 1  # this rank's part
        return mine, metrics.loss.item()

    results = mesh.run(cell)
    state, losses = mesh.join([mine for mine, _ in results]), [results[0][1]]
    for _ in range(STEPS - 1):
        state, metrics = step(state, BATCH)
        losses.append(metrics.loss.item())
    expected = alone()
    assert losses == expected[0] and same(state.params, fs.tree.nest(expected[1]))


def test_made_inside_and_used_in_the_next_run(mesh: Any) -> None:
    def make() -> Any:
        mine = fs.make_mesh((-1,), ("shard",))
        plan = planned(mine)
        return plan, fs.init_state(plan, OPT, seed=1), fs.make_train_step(loss, OPT, plan)

    made = mesh.run(make)

    def use() -> Any:
        plan, state, step = made[mesh.rank]
        for _ in range(STEPS):
            state, metrics = step(state, plan.local_batch(BATCH))
        return metrics.loss.item(), state

    used = mesh.run(use)
    assert [used[0][0]] == alone()[0][-1:]
    sizes = [sum(leaf.numel() for leaf in fs.tree.leaves(state.params)) for _, state in used]
    assert sum(sizes) == sum(leaf.numel() for leaf in NET.parameters()) and used[1][1].plan.mesh.rank == 1
    with pytest.raises(CommError, match=r"rank 0 outside of its run.*results\[mesh.rank\]"):
        made[0][2](used[0][1], BATCH)
    with pytest.raises(CommError, match="rank 1 uses what belongs to rank 0"):
        mesh.run(lambda: made[0][2](used[0][1], made[0][0].local_batch(BATCH)))


def test_evaluations_checkpoints_and_parts(mesh: Any, tmp_path: Path) -> None:
    plan = planned(mesh)
    state = fs.init_state(plan, OPT, seed=1)
    evaluate = fs.make_eval_step(lambda params, batch: {"loss": loss(params, batch)}, plan)
    outside = evaluate(state, BATCH)["loss"]
    assert [found["loss"] for found in mesh.run(lambda: evaluate(state, plan.local_batch(BATCH)))] == [outside] * 2
    gradient, update = fs.value_and_grad(loss, plan), fs.make_update(OPT, plan)

    def fn(state: Any, batch: Any) -> Any:
        value, grads = gradient(state, batch)
        state, _ = update(state, grads)
        return state, {"loss": value}

    step = fs.make_step(fn, plan)
    for _ in range(STEPS):
        state, metrics = step(state, BATCH)
    assert [metrics["loss"].item()] == alone()[0][-1:] and same(state.params, fs.tree.nest(alone()[1]))
    checkpoints = fs.Checkpointer(tmp_path)
    checkpoints.save(state)
    back = checkpoints.restore(plan, OPT)
    assert same(back.params, state.params) and back.step == STEPS and back == state
    other = fs.reshard_state(back, plan.replace(rules=[(".*", fs.P())]), OPT)
    assert same(other.params, state.params) and fs.settle(other).step == STEPS
    with pytest.raises(PlanError, match=r"outside of mesh.run.*fs.make_step"):
        gradient(state, BATCH)


def test_a_step_that_is_skipped_returns_the_state_of_all_ranks(mesh: Any) -> None:
    plan = planned(mesh)
    step, state = fs.make_train_step(loss, OPT, plan, skip_norm=1e-9), fs.init_state(plan, OPT, seed=1)
    before = fs.tree.map(torch.clone, state.params)
    for _ in range(2):
        state, metrics = step(state, BATCH)
        assert metrics.skipped and state.step == 0 and same(state.params, before)
    state = mesh.join(mesh.run(lambda: step(state, plan.local_batch(BATCH))[0]))
    both, _ = fs.make_step(lambda states, batch: (states, {}), plan)({"a": state, "b": fs.init_state(plan, OPT)}, BATCH)
    state, metrics = fs.make_train_step(loss, OPT, plan)(both["a"], BATCH)
    assert metrics.loss.item() == alone(1)[0][0] and state.step == 2


def test_perplexity_is_that_of_the_global_batches_and_sequences_belong_to_ranks(mesh: Any) -> None:
    plan = planned(mesh)
    state = fs.init_state(plan, seed=1)
    found = fs.perplexity(state, lambda params, batch: fs.Mean(loss(params, batch) * len(batch), len(batch)), [BATCH])
    assert found.loss == pytest.approx(fs.make_eval_step(loss, plan)(state, BATCH).item())
    with pytest.raises(PlanError, match=r"call it in mesh.run\(fn\)"):
        fs.generate(state, lambda *_: None, [[1]], max_new=1)  # type: ignore[arg-type, return-value]


def test_averages_of_all_ranks(mesh: Any) -> None:
    opt, plan = fs.optim.ema(OPT, 0.5), planned(mesh)
    step, state = fs.make_train_step(loss, opt, plan), fs.init_state(plan, opt, seed=1)
    first = {path: leaf.clone() for path, leaf in whole(state.params).items()}
    state, _ = step(state, BATCH)
    found, last = whole(fs.averaged(state).params), whole(state.params)
    assert all(torch.allclose(found[path], (first[path] + last[path]) / 2, atol=1e-7) for path in first)


def test_other_formats_take_and_return_states_of_all_ranks(mesh: Any, tmp_path: Path) -> None:
    plan = planned(mesh)
    state = fs.init_state(plan, OPT, seed=1)
    found, module = fs.io.to_state_dict(state), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    module.load_state_dict(found)
    back = fs.io.from_state_dict(found, plan, OPT, fs.io.to_optim_state_dict(state, OPT))
    assert same(back.params, state.params) and same(back.opt_state["exp_avg"], state.opt_state["exp_avg"])
    fs.io.save_dcp(state, tmp_path / "dcp", OPT)
    assert same(fs.io.load_dcp(tmp_path / "dcp", plan, OPT).params, state.params)
    pytest.importorskip("safetensors")
    fs.io.save_hf(state, tmp_path / "hf")
    assert same(fs.io.load_hf(tmp_path / "hf", plan, OPT).params, state.params)


def test_a_cell_that_saves_can_be_run_twice(mesh: Any, tmp_path: Path) -> None:
    """Nothing keeps what a run was given, not even until the garbage collector comes: its folder is free again."""
    state = fs.init_state(planned(mesh), OPT)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            fs.Checkpointer(tmp_path).save(state, overwrite=True)
    finally:
        gc.enable()
    assert same(fs.Checkpointer(tmp_path).restore(planned(mesh), OPT).params, state.params)


def test_what_is_of_one_rank_is_told_from_what_is_of_all(mesh: Any) -> None:
    plan = planned(mesh)
    state, step = fs.init_state(plan, OPT, seed=1), fs.make_train_step(loss, OPT, plan)
    after = mesh.run(lambda: step(state, plan.local_batch(BATCH))[0])
    with pytest.raises(DonatedError):
        step(state, BATCH)
    with pytest.raises(TreeError, match=r"state of all 2 ranks, and was given that of rank 1: mesh.join"):
        step(after[1], BATCH)
    with pytest.raises(TreeError, match=r"mesh.join\(states\)"):
        step(after, BATCH)
    with pytest.raises(TreeError, match=r"rank 1 was given the state of rank 0"):
        mesh.run(lambda: step(after[0], plan.local_batch(BATCH)))
    with pytest.raises(StateError, match="in the order of the ranks"):
        mesh.join(after[::-1])
    with pytest.raises(TreeError, match="a list of 2 results"):
        mesh.join(after[:1])
    with pytest.raises(TreeError, match="results differs between ranks"):
        fs.make_eval_step(lambda params, batch: MODEL.apply(params, batch), plan)(mesh.join(after), BATCH)
    with pytest.raises(TreeError, match="5"):
        step(mesh.join(after), BATCH[:5])
    with pytest.raises(PlanError, match="inside of mesh.run"):
        mesh.join(after).applied()


def test_an_error_in_a_cell_leaves_the_state_as_it_was(mesh: Any) -> None:
    plan, failing = planned(mesh), [False]

    def sometimes(params: Any, batch: Any) -> torch.Tensor:
        value = loss(params, batch)
        if failing[0] and not isinstance(batch, torch._subclasses.FakeTensor) and mesh.rank == 1:
            raise ValueError("not now")
        return value

    state, step = fs.init_state(plan, OPT, seed=1), fs.make_train_step(sometimes, OPT, plan)
    for number in range(STEPS):
        if number == 1:
            failing[0] = True
            with pytest.raises(ValueError, match="not now"):
                step(state, BATCH)
            failing[0] = False
        state, metrics = step(state, BATCH)
    assert [metrics.loss.item()] == alone()[0][-1:]


def interrupted(at: int, call: Callable[[], Any]) -> Callable[..., None]:
    """What sends this process SIGINT when it is called for the so-manieth time."""
    count = [0]

    def tick(*_: Any) -> None:
        count[0] += 1
        if count[0] == at:
            os.kill(os.getpid(), signal.SIGINT)
            call()

    return tick


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
def test_an_interrupt_ends_all_ranks_and_the_next_cell_continues(mesh: Any, at: int) -> None:
    plan = planned(mesh)
    tick = interrupted(at, lambda: time.sleep(0.02))

    def ticking(params: Any, batch: Any) -> torch.Tensor:
        if threading.current_thread().name.startswith("rank "):
            tick()
        return loss(params, batch)

    state, step = fs.init_state(plan, OPT, seed=1), fs.make_train_step(ticking, OPT, plan)
    losses: dict[int, float] = {}
    with pytest.raises(KeyboardInterrupt):
        while True:
            state, metrics = step(state, BATCH)
            losses[state.step] = metrics.loss.item()
            assert len(losses) < 9
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    while state.step < STEPS:
        state, metrics = step(state, BATCH)
        losses[state.step] = metrics.loss.item()
    expected = alone(state.step)
    assert [losses[number + 1] for number in range(state.step)] == expected[0]
    assert same(state.params, fs.tree.nest(expected[1]))


def test_an_interrupt_after_all_ranks_takes_no_state_away(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(mesh)
    state, step = fs.init_state(plan, OPT), fs.make_train_step(loss, OPT, plan)
    joined = type(mesh).join

    def interrupted(self: Any, results: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return joined(self, results)

    with monkeypatch.context() as patch:
        patch.setattr(type(mesh), "join", interrupted)
        state, _ = step(state, BATCH)
    with pytest.raises(KeyboardInterrupt):
        step(state, BATCH)
    state, _ = step(state, BATCH)
    assert state.step == 2


def test_an_interrupt_before_any_rank_leaves_no_thread(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(mesh)
    state, step = fs.init_state(plan, OPT), fs.make_train_step(loss, OPT, plan)
    state, _ = step(state, BATCH)
    start = RankThread.start

    def interrupted(thread: RankThread) -> None:
        start(thread)
        if thread.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RankThread, "start", interrupted)
        step(state, BATCH)
    for thread in [thread for thread in threading.enumerate() if isinstance(thread, RankThread)]:
        thread.join(5.0)
        assert not thread.is_alive()
    state, _ = step(state, BATCH)
    assert state.step == 2


def test_an_interrupt_ends_ranks_that_compute_and_ranks_that_wait(mesh: Any) -> None:
    tick = interrupted(1, lambda: None)

    def endless() -> None:
        if mesh.rank == 0:
            fs.collectives.psum(1, "shard", mesh=mesh)
        tick()
        while True:
            time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        mesh.run(endless)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    assert mesh.run(lambda: fs.collectives.psum(1, "shard", mesh=mesh)) == [2, 2]


def test_tracebacks_mark_internal_frames_as_hidden(mesh: Any) -> None:
    """IPython and pytest leave such frames out: of a failing unit, the user's frames and torch's functions stay."""
    plan = planned(mesh)
    step = fs.make_train_step(lambda params, batch: loss(params, batch[:, :2]), OPT, plan)
    with pytest.raises(RuntimeError) as caught:
        step(fs.init_state(plan, OPT), BATCH)
    shown, trace = [], caught.value.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_locals.get("__tracebackhide__"):
            shown.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert len(shown) < 8 and shown[0] == test_tracebacks_mark_internal_frames_as_hidden.__name__
    assert {"<lambda>", "loss"} <= set(shown)
