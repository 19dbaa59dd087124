"""Choosing a schedule: by memory and simulated time, alike on all ranks, with reasons."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.errors import PlanError
from fshard.schedule import Policy, build, check, simulate
from fshard.schedule.auto import TIE, Rates, choose
from fshard.schedule.candidates import PolicyTask, candidates
from fshard.schedule.footprint import Need, footprint
from fshard.schedule.policy import Keep
from tests.schedule.cases import group, program
from tests.shared import zoo
from tests.shared.workers import Pools

UNITS, BYTES = 8, 1 << 20
ACTIVATIONS = 3 * BYTES


def task(accumulate: int = 1, full: bool = True) -> PolicyTask:
    """A chain of equal units on two ranks: each takes a second forward and two backward at 1 GFLOP/s."""
    names = [f"u{i}" for i in range(UNITS)]
    half = BYTES // 2
    groups = [group(n, BYTES, half, BYTES, staging=half, all_gather=half, reduce_scatter=half) for n in names]
    forward = [Need((i + 1) * ACTIVATIONS, (i + 1) * ACTIVATIONS, 10**9) for i in range(UNITS)]
    backward = [Need((i + 1) * ACTIVATIONS, i * ACTIVATIONS, 2 * 10**9) for i in reversed(range(UNITS))]
    needs = [Need(0, 0, 0), *forward, *backward, Need(0, 0, 0)]
    return PolicyTask(program(names, {name: (i,) for i, name in enumerate(names)}), groups, needs, accumulate, full)


SLOW, FAST = Rates(1e9, BYTES / 8), Rates(1e9, BYTES * 1e3)
"""Links on which a gather takes four seconds, and next to nothing."""


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize(("rates", "accumulate"), [(SLOW, 3), (FAST, 1)], ids=str)
@pytest.mark.parametrize("spare", [1.0, 1.1, 1.3, 2.0, math.inf])
def test_it_is_the_least_memory_among_the_fastest_that_fit(rates: Rates, accumulate: int, spare: float) -> None:
    work = task(accumulate)
    table = choose(work, fs.Auto(), rates).candidates
    least = min(each.memory.peak_bytes for each in table)
    limit = None if spare == math.inf else int(least * spare)
    choice = choose(work, fs.Auto(memory=limit), rates)
    chosen = next(each for each in choice.candidates if each.policy == choice.policy)
    fits = [each for each in choice.candidates if limit is None or each.memory.peak_bytes <= limit]
    fastest = min(each.seconds for each in fits)
    assert chosen in fits and chosen.seconds <= TIE * fastest
    assert all(each.memory.peak_bytes >= chosen.memory.peak_bytes for each in fits if each.seconds <= TIE * fastest)
    check(choice.schedule)
    assert choice.schedule == build(work.program, work.groups, choice.policy, accumulate)
    assert chosen.memory == footprint(choice.schedule, work.needs)


def test_more_memory_is_never_slower() -> None:
    work, times = task(), []
    least = min(each.memory.peak_bytes for each in choose(work, fs.Auto(), SLOW).candidates)
    for share in range(10):
        choice = choose(work, fs.Auto(memory=least + share * BYTES), SLOW)
        times.append(next(each.seconds for each in choice.candidates if each.policy == choice.policy))
    assert all(b <= TIE * a for a, b in zip(times, times[1:], strict=False))
    assert times[-1] < times[0]


def test_a_fast_link_reshards_and_a_slow_one_keeps() -> None:
    assert choose(task(), fs.Auto(), FAST).policy.reshard is True
    kept = choose(task(), fs.Auto(), SLOW).policy.reshard
    assert kept is False or isinstance(kept, Keep)
    assert choose(task(4), fs.Auto(), SLOW).policy.accumulation == "full"
    assert choose(task(4, full=False), fs.Auto(), SLOW).policy.accumulation == "sharded"
    assert {policy.update for policy in candidates(task(), "in_backward")} == {"in_backward"}


def test_a_limit_that_nothing_keeps() -> None:
    least = min(each.memory.peak_bytes for each in choose(task(), fs.Auto(), FAST).candidates)
    assert choose(task(), fs.Auto(memory=least), FAST).policy == Policy(0, 1)
    with pytest.raises(PlanError) as caught:
        choose(task(), fs.Auto(memory=least - 1), FAST)
    text = str(caught.value)
    assert f"memory={least - 1} bytes is too small" in text and "prefetch=0 reduces=1" in text
    assert "u7: gathered parameters, 1.0 MiB" in text


def test_a_limit_where_most_memory_is_of_an_update() -> None:
    params = {"w": torch.zeros(64, 64)}
    rule = fs.Rule(".*", fs.fsdp("shard"), memory_kind="unpinned_host", update_on="device")
    plan = fs.make_plan(params, fs.abstract_mesh((1,), ("shard",)), [rule])
    auto = fs.Auto(memory=10, compute=1e9, wire=1e9)
    step = fs.make_train_step(lambda p, x: (x @ p["w"]).sum(), fs.optim.adamw(1e-3), plan, schedule=auto)
    with pytest.raises(PlanError, match="root: what its update makes, and has from host memory, 48.2 KiB"):
        step.trace(torch.zeros(2, 64))


def test_it_prints_the_table() -> None:
    choice = choose(task(), fs.Auto(memory=40 * BYTES), SLOW)
    lines = str(choice).splitlines()
    assert lines[0] == f"chose {choice.policy}"
    assert "at most 40.0 MiB; 1 GFLOP/s, 0.1311 MB/s a rank" in lines[1]
    assert len(lines) == 3 + len(choice.candidates)
    assert [line for line in lines if line.endswith(f"{choice.policy} <- chosen")]


def test_without_needs_only_the_wire_counts() -> None:
    work = task()
    choice = choose(PolicyTask(work.program, work.groups, ()), fs.Auto(), SLOW)
    run = simulate(choice.schedule, fs.sim.Costs(link=fs.sim.Link(SLOW.wire)))
    assert next(each.seconds for each in choice.candidates if each.policy == choice.policy) == run.seconds


def made(mesh: fs.Mesh, schedule: Any, weighted: bool = False, accumulate: int = 1) -> tuple[Any, fs.types.TrainStep]:
    """State and step of the zoo's GPT."""
    example = zoo.build("gpt")
    plan = example.plan(mesh)
    rule = fs.optim.adamw(1e-3)

    def loss(params: Any, batch: Any) -> Any:
        value: Tensor = example.loss_fn(params, batch)
        rows = next(iter(batch.values())).shape[0]
        return fs.Mean(value * rows, rows) if weighted else value

    state = fs.init_state(plan, rule, params=example.params()) if mesh.transport is not None else None
    return state, fs.make_train_step(loss, rule, plan, schedule=schedule, accumulate=accumulate)


def test_on_an_abstract_mesh_it_needs_numbers() -> None:
    mesh = fs.abstract_mesh((4,), ("shard",))
    batch = zoo.cut(zoo.build("gpt").batch(0), 0, 4)
    _, step = made(mesh, "auto")
    with pytest.raises(PlanError, match=r"fs.Auto\(compute=..., wire=...\)"):
        step.trace(batch)
    _, step = made(mesh, fs.Auto(compute=1e9, wire=1e6))
    found = step.trace(batch)
    assert found.choice is not None and found.schedule is found.choice.schedule
    assert made(mesh, None)[1].trace(batch).choice is None


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            lambda: fs.Auto(memory=0, compute=-1.0, wire="x", latency=-1.0, update="x"),
            ["memory=0", "compute=-1.0", "wire='x'"],
        ),
        (lambda: made(fs.abstract_mesh((2,), ("shard",)), "fast"), ["schedule='fast'", "'auto'"]),
    ],
)
def test_what_cannot_be_is_refused(bad: Any, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        bad()
    for word in words:
        assert word in str(caught.value)


def chosen(schedule: Any, weighted: bool) -> tuple[str, list[float], list[str], str]:
    """On a rank: the policy, the losses, what ran otherwise than scheduled, and the choice in words."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        state, step = made(mesh, schedule, weighted)
        losses, departures = [], []
        for number in range(3):
            batch = zoo.cut(zoo.build("gpt").batch(number), mesh.rank, mesh.size)
            if weighted and mesh.rank:
                batch = {name: value[:-1] for name, value in batch.items()}
            state, metrics = step(state, batch)
            losses.append(metrics.loss.item())
            departures += [str(number)] * (step.record != step.schedule.ops)
        words = str(step.trace(batch).choice) if not isinstance(schedule, Policy) else ""
        return str(step.schedule.policy), losses, departures, words


GIVEN = fs.Auto(wire=1e5, compute=1e9)


@pytest.mark.parametrize(
    ("schedule", "weighted"),
    [
        ("auto", False),
        (GIVEN, True),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("auto", True), (GIVEN, False))),
    ],
    ids=str,
)
def test_all_ranks_choose_alike(pool: Pools, schedule: Any, weighted: bool) -> None:
    ranks = pool(2).run(chosen, schedule, weighted)
    assert len({(policy, words) for policy, _, _, words in ranks}) == 1
    assert not [departure for _, _, departures, _ in ranks for departure in departures]
    plain = pool(2).run(chosen, Policy(), weighted)
    assert [losses for _, losses, _, _ in ranks] == [losses for _, losses, _, _ in plain]


def refused() -> list[str]:
    """On a rank: what a limit that cannot be kept raises, twice; then the state is used by a good step."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        state, step = made(mesh, fs.Auto(memory=1000))
        batch = zoo.cut(zoo.build("gpt").batch(0), mesh.rank, mesh.size)
        texts = []
        for _ in range(2):
            try:
                step(state, batch)
            except PlanError as error:
                texts.append(str(error))
        made(mesh, Policy())[1](state, batch)
        return texts


def test_a_limit_that_cannot_be_kept_is_refused_on_all_ranks(pool: Pools) -> None:
    ranks = pool(2).run(refused)
    assert ranks[0] == ranks[1] and len(ranks[0]) == 2 and "memory=1000 bytes is too small" in ranks[0][0]


def broken_on_one() -> str:
    """On a rank: the error where rank 1 brings a batch that its loss cannot take, at the first step."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        state, step = made(mesh, "auto")
        batch = zoo.cut(zoo.build("gpt").batch(0), mesh.rank, mesh.size)
        if mesh.rank == 1:
            batch = {name: value[:, :1, None] if torch.is_tensor(value) else value for name, value in batch.items()}
        try:
            step(state, batch)
        except Exception as error:
            return type(error).__name__
        return ""


def test_a_rank_that_fails_before_the_choice(pool: Pools) -> None:
    first, second = pool(2).run(broken_on_one)
    assert first == "PeerError" and second not in ("", "PeerError")
