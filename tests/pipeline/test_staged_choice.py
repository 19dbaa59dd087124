"""``schedule="auto"`` with stages: orders are tried by foresight, then timed; evaluations; numbers stay right."""

from typing import Any, NamedTuple

import pytest

import fshard as fs
from fshard.pipeline.staged_choice import StagedOptions, TriedOrder
from fshard.schedule.auto import Rates
from fshard.schedule.contest import FINALISTS, MOST, TURNS
from tests.pipeline.staged_runs import StagedRun, made

RATES = {"compute": 1e9, "wire": 1e9}


class Chosen(NamedTuple):
    """A run on a rank: its losses, the policy of each step, and the last choice."""

    losses: list[float]
    policies: list[str]
    settled: bool
    measured: int


def train(run: StagedRun, mesh: fs.Mesh, steps: int) -> Chosen:
    """On a rank: train."""
    step, _, state, batch = made(run, mesh)
    losses, policies = [], []
    for number in range(steps):
        state, metrics = step(state, batch(number))
        losses.append(metrics.loss.item())
        policies.append(str(step.schedule.policy))
    choice = step.trace(batch(0)).choice
    return Chosen(losses, policies, choice is None or choice.settled, 0 if choice is None else len(choice.measured))


@pytest.mark.parametrize("stages", [{}, {"chunks": 2, "placement": "v"}], ids=["one stage a rank", "v"])
def test_steps_are_timed_and_their_numbers_are_right(stages: dict[str, Any]) -> None:
    """Contenders take turns; every loss is that of a run under one policy; all ranks agree."""
    run = StagedRun(sizes=(2, 2), stages=stages)
    mesh = fs.virtual_mesh(run.sizes, run.axes)
    steps = (1 + TURNS[0]) * MOST + (1 + TURNS[1]) * FINALISTS + 2
    found = mesh.run(lambda: train(run.with_(step={"schedule": "auto"}), mesh, steps))
    fixed = mesh.run(lambda: train(run, mesh, steps))
    assert found[0].losses == pytest.approx(fixed[0].losses, rel=1e-5)
    assert all(each.policies == found[0].policies for each in found)
    assert len(set(found[0].policies[:4])) > 1  # they take turns
    assert len(set(found[0].policies[-2:])) == 1  # and one has won
    assert all(each.settled and each.measured > 1 for each in found)


def options(auto: fs.Auto, **step: Any) -> StagedOptions:
    """The orders of a step on an abstract mesh."""
    run = StagedRun(sizes=(2, 2), step={"schedule": auto, **step})
    made_step, _, _, batch = abstract(run)
    return StagedOptions.of(made_step.task(batch(0)), auto, Rates(1e9, 1e9))


def abstract(run: StagedRun) -> Any:
    """The step of a run on a mesh without processes."""
    from tests.pipeline.programs import PROGRAMS

    mesh = fs.abstract_mesh(run.sizes, run.axes)
    program = PROGRAMS[run.program]()
    cut = fs.Stages("stage", leaves=program.leaves(2))
    plan = fs.make_plan(
        fs.tree.nest(program.params), mesh, run.rules, batch=fs.P("data"), units=program.units, stages=cut
    )
    step = fs.make_train_step(program.make(fs.unit), run.opt(), plan, accumulate=4, **run.step)
    return step, plan, None, lambda number: plan.local_batch(program.batch(number))


def test_memory_decides() -> None:
    """Within a limit that only one order keeps, that one is chosen; the fastest holds more."""
    free = options(fs.Auto(**RATES))
    peaks = {each.policy: each.candidate.memory.peak_bytes for each in free.tried}
    least = min(peaks.values())
    assert peaks[free.choice.policy] > least
    tight = options(fs.Auto(memory=least, **RATES)).choice
    assert tight.policy.pipeline == "1f1b" and peaks[tight.policy] == least
    assert "(over the limit)" in str(tight) and f"at most {least}" not in str(free.choice)
    with pytest.raises(fs.errors.PlanError, match=f"memory={least - 1}"):
        _ = options(fs.Auto(memory=least - 1, **RATES)).choice


def test_orders_with_parted_backwards_are_tried_where_units_are_compiled() -> None:
    """A compiled unit has both parts."""

    def names(tried: tuple[TriedOrder, ...]) -> set[str]:
        return {each.policy.pipeline for each in tried}

    auto = fs.Auto(**RATES)
    assert names(options(auto).tried) == names(options(auto, compile="fx").tried) == {"gpipe", "1f1b", "zb_h1"}


def test_a_trace_chooses_by_given_rates() -> None:
    """Before any step; without rates it is refused."""
    step, _, _, batch = abstract(StagedRun(sizes=(2, 2), step={"schedule": fs.Auto(**RATES)}))
    found = step.trace(batch(0))
    assert found.choice.policy == found.schedule.policy == found.schedules.ranks[1].policy
    step, _, _, batch = abstract(StagedRun(sizes=(2, 2), step={"schedule": "auto"}))
    with pytest.raises(fs.errors.PlanError, match="compute"):
        step.trace(batch(0))


def test_evaluations_choose_too() -> None:
    """All forwards in one order; what is chosen is whether parameters are kept."""
    run = StagedRun(sizes=(2, 2))
    mesh = fs.virtual_mesh(run.sizes, run.axes)

    def evaluated() -> list[float]:
        _, plan, state, batch = made(run, mesh)
        loss_fn = made(run, mesh)[0].loss_fn
        steps = [fs.make_eval_step(loss_fn, plan, schedule=how) for how in ("auto", None)]
        return [float(step(state, batch(0))) for step in steps for _ in range(2)]

    for found in mesh.run(evaluated):
        assert len(set(found)) == 1


@pytest.mark.parametrize("stages", [{}, {"chunks": 2, "placement": "v"}], ids=["one stage a rank", "v"])
def test_perplexity(stages: dict[str, Any]) -> None:
    """Data ranks have unequal numbers of batches; the result is that of a mesh without stages."""

    def found(run: StagedRun, mesh: fs.Mesh) -> fs.generation.Perplexity:
        step, plan, state, batch = made(run, mesh)
        batches = [batch(number) for number in range(3 - plan.data_rank)]
        return fs.perplexity(state, step.loss_fn, batches)

    run, mesh = StagedRun(sizes=(2, 2), stages=stages), fs.virtual_mesh((2, 2), ("stage", "data"))
    flat = fs.virtual_mesh((2,), ("data",))
    want = flat.run(lambda: found(StagedRun(sizes=(2,), axes=("data",)), flat))[0]
    assert all(tuple(each) == pytest.approx(tuple(want)) for each in mesh.run(lambda: found(run, mesh)))
