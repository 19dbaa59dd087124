"""The options of running are the same for train and evaluation steps, gradients and steps of parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.errors import PlanError
from tests.parts.test_trace import OPT, WIDTH, loss, plan_on, weights
from tests.shared import zoo
from tests.shared.workers import Pools

AUTO = fs.Auto(compute=1e9, wire=1e6)


def composed(plan: fs.Plan, **options: Any) -> fs.types.Step:
    """A gradient, an evaluation and an update."""
    grad, evaluate, update = fs.value_and_grad(loss, plan), fs.make_eval_step(loss, plan), fs.make_update(OPT, plan)

    def step(state: Any, batch: Any) -> Any:
        value, grads = grad(state, batch)
        return update(state, grads)[0], (value, evaluate(state, batch))

    return fs.make_step(step, plan, **options)


RUNS: dict[str, Callable[..., Any]] = {
    "train": lambda plan, **options: fs.make_train_step(loss, OPT, plan, **options),
    "evaluation": lambda plan, **options: fs.make_eval_step(loss, plan, **options),
    "gradients": lambda plan, **options: fs.value_and_grad(loss, plan, **options),
    "parts": composed,
}


@pytest.mark.parametrize("name", RUNS)
def test_options_that_cannot_be_get_the_same_errors(name: str) -> None:
    make, plan = RUNS[name], plan_on(fs.abstract_mesh((2,), ("shard",)))
    for schedule in ("fast", {"prefetch": 2}):
        with pytest.raises(PlanError, match=r"schedule=.* must be fs\.Policy\(\.\.\.\), 'auto' or fs\.Auto\(\.\.\.\)"):
            make(plan, schedule=schedule)
    with pytest.raises(PlanError, match="debug=1 must be True or False"):
        make(plan, debug=1)
    if name != "train":
        for early in (fs.Policy(update="in_backward"), fs.Auto(update="in_backward")):
            with pytest.raises(PlanError, match="only fs.make_train_step can have update='in_backward'"):
                make(plan, schedule=early)
    if name != "parts":
        with pytest.raises(PlanError, match="compile='xla' must be None, 'fx' or 'inductor'"):
            make(plan, compile="xla")


@pytest.mark.parametrize("name", RUNS)
def test_a_choice_without_processes(name: str) -> None:
    plan, batch = plan_on(fs.abstract_mesh((2,), ("shard",))), torch.ones(8, WIDTH)
    state = [fs.init_state(plan, OPT, params=weights())] if name == "parts" else []
    found = RUNS[name](plan, schedule=AUTO).trace(*state, batch)
    assert found.choice is not None and found.choice.policy == found.schedule.policy
    assert found.schedule.train is (name != "evaluation")
    least = min(each.memory.peak_bytes for each in found.choice.candidates)
    assert any(each.memory == found.footprint for each in found.choice.candidates)
    tight = fs.Auto(memory=least - 1, compute=1e9, wire=1e6)
    with pytest.raises(PlanError, match=f"memory={least - 1} bytes is too small"):
        RUNS[name](plan, schedule=tight).trace(*state, batch)
    with pytest.raises(PlanError, match=r"fs.Auto\(compute=..., wire=...\)"):
        RUNS[name](plan, schedule="auto").trace(*state, batch)


def chosen(name: str, schedule: Any, steps: int) -> tuple[list[Any], str, bool]:
    """On a rank: results in numbers, the choice in words, and whether the schedule was kept to."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, out, kept = plan_on(mesh), list[Any](), True
        run, state = RUNS[name](plan, schedule=schedule), fs.init_state(plan, OPT, params=weights())
        for number in range(steps):
            batch = torch.full((4, WIDTH), 0.1 * (number + mesh.rank + 1))
            result = run(state, batch)
            state = result[0] if name in ("train", "parts") else state
            values = [result[1].loss] if name == "train" else [x for x in fs.tree.leaves(result) if x is not None]
            out.append([x.sum().item() for x in values if isinstance(x, torch.Tensor)])
            kept = kept and run.record == run.schedule.ops
            found = run.trace(*([state] if name == "parts" else []), batch)
            if steps > 2 and number > 2 and found.choice is not None and found.choice.settled:
                break
        return out, str(found.choice), kept and found.schedule == run.schedule


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", ["auto", AUTO], ids=str)
@pytest.mark.parametrize("name", ["evaluation", "gradients", "parts"])
def test_all_ranks_choose_alike(pool: Pools, name: str, schedule: Any) -> None:
    steps = 240 if schedule == "auto" and name != "parts" else 2  # it times some, until it has settled
    ranks = pool(2).run(chosen, name, schedule, steps)
    plain = pool(2).run(chosen, name, None, len(ranks[0][0]))
    assert len({words for _, words, _ in ranks}) == 1 and ranks[0][1].startswith("chose ")
    assert all(kept for _, _, kept in [*ranks, *plain])
    assert [out for out, _, _ in ranks] == [out for out, _, _ in plain]


@pytest.mark.parametrize("debug", [False, True])
def test_debug_of_a_step_is_that_of_its_parts(debug: bool) -> None:
    plan = plan_on(fs.make_mesh((1,), ("shard",)))
    step = composed(plan, debug=debug)
    step(fs.init_state(plan, OPT, params=weights()), torch.ones(4, WIDTH))
    (replay,) = step._runner.replays.values()
    assert [prepared.actions.poison for prepared in replay.step.passes] == [debug, debug]


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt", "unet", "translator", "skipping"])
def test_evaluations_in_graphs_keep_their_bits(name: str) -> None:
    example = zoo.build(name)
    plan = example.plan(fs.make_mesh((1,), ("shard",)))
    state = fs.init_state(plan, OPT, params=example.params())
    eager, graphs = (fs.make_eval_step(example.loss_fn, plan, compile=compile) for compile in (None, "fx"))
    for number in range(2):
        batch = example.batch(number)
        assert all(map(torch.equal, fs.tree.leaves(eager(state, batch)), fs.tree.leaves(graphs(state, batch))))
    assert "fx graph" in graphs.units and "compile=None" in eager.units and graphs.schedule == eager.schedule


def test_a_step_says_what_the_units_of_its_passes_run_as() -> None:
    plan = plan_on(fs.make_mesh((1,), ("shard",)))
    compiled, plain = fs.value_and_grad(loss, plan, compile="fx"), fs.value_and_grad(loss, plan)
    update = fs.make_update(OPT, plan)

    def fn(state: Any, batch: Any) -> Any:
        _, one = compiled(state, batch)
        _, two = plain(state, batch)
        return update(state, fs.tree.add(one, two))

    step = fs.make_step(fn, plan)
    assert step.units.startswith("no units yet")
    step(fs.init_state(plan, OPT, params=weights()), torch.ones(4, WIDTH))
    one, two = step.units.split("pass 1\n")
    assert one.startswith("pass 0\n") and "fx graph 0" in one and "as it is: compile=None" in two
