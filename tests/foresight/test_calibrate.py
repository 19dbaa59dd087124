"""Calibration: known costs are found again, real steps are timed, and a choice goes by what they took."""

import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard.errors import PlanError
from fshard.runtime.steps.calibrate import fitted
from fshard.runtime.steps.streams import streams
from fshard.schedule import Costs, Link, Policy, Schedule, build, check, simulate
from fshard.schedule.auto import Rates
from fshard.schedule.fit import APART, OpTime, fit, mean
from fshard.schedule.fit_links import LinkStream, settled
from fshard.schedule.footprint import footprint
from fshard.schedule.transfers import awaited, started
from tests.schedule.test_costs import over
from tests.schedule.test_simulate import chain
from tests.shared.workers import Pools

LINK = Link(1e3, 0.001, sending=1e-3, beside=2e-3, taking=4e-3)


def timed(schedule: Schedule, costs: Costs, link: Link = LINK) -> list[OpTime]:
    """What the ops of a schedule take on a rank, if compute hides what goes on beside it."""
    moves = {(move.kind, group.name): move for group in schedule.groups for move in group.transfers}
    rows = []
    for op in schedule:
        own = costs.of(op.kind, op.target)
        row = awaited(op.kind)
        if started(op.kind):
            own += moves[op.kind, op.target].sent * link.sending
            rows.append(OpTime(own, own, own, 0.0))
        elif row is not None:
            sent = moves[row.name, op.target].sent
            thread = own + sent * link.taking
            wall = thread + link.latency + sent / link.bytes_per_s
            rows.append(OpTime(wall, thread, thread + sent * link.beside, 0.0))
        else:
            rows.append(OpTime(own, own, own, 0.0))
    return rows


def test_apart_waits_at_once_for_all_that_it_starts() -> None:
    schedule = over(3, APART)
    check(schedule)
    for at, op in enumerate(schedule):
        if started(op.kind):
            assert schedule[at + 1].kind == f"wait {op.kind}" and schedule[at + 1].target == op.target
    assert schedule.memory.peak_bytes <= over(3, Policy(prefetch=0, reduces=1)).memory.peak_bytes


def test_known_costs_are_found_again() -> None:
    schedule = over(3, APART)
    seconds = {("forward", "u0"): 1.0, ("forward", "u1"): 2.0, ("forward", "u2"): 3.0, ("consensus", ""): 0.25}
    seconds |= {("backward", f"u{i}"): 4.0 + i for i in range(3)} | {("update", f"u{i}"): 0.5 for i in range(3)}
    truth = Costs(seconds, links={"shard": LINK}, host=0.125, processors=1)
    found = fit(schedule, [timed(schedule, truth)] * 2, 0.125, 1.0, "here")
    assert {op: found.of(*op) for op in seconds} == pytest.approx(seconds)
    for policy in (APART, Policy(), Policy(prefetch=0, reduces=1), Policy(reshard=False)):
        other = over(3, policy)
        exact, fitted = simulate(other, truth), simulate(other, found)
        assert fitted.seconds == pytest.approx(exact.seconds, rel=0.02), policy
        assert fitted.beside == pytest.approx(exact.beside, rel=0.02, abs=1e-9)


@given(st.lists(st.lists(st.floats(0.0, 3.0), min_size=40, max_size=40), min_size=1, max_size=3), st.floats(0.0, 2.0))
@settings(max_examples=40, deadline=None)
def test_costs_foresee_the_steps_that_they_come_from(late: list[list[float]], host: float) -> None:
    schedule = over(3, APART)
    waits = [at for at, op in enumerate(schedule) if awaited(op.kind) or op.kind in ("handshake", "consensus")]
    ranks = [timed(schedule, Costs(QUICK), replace(LINK, beside=0.0)) for _ in late]
    for row, seconds in zip(ranks, late, strict=True):  # ranks wait for each other, now this one and now that one
        for at, more in zip(waits, seconds[: len(waits)], strict=True):
            row[at] = replace(row[at], wall=row[at].wall + more, gap=more / 10)
    found = fit(schedule, ranks, host, 1.0, "here")
    took = host + sum(time.wall + time.gap for row in ranks for time in row) / len(ranks)
    assert simulate(schedule, found).seconds == pytest.approx(took, rel=1e-6)


def test_a_start_that_other_threads_interrupt_is_on_its_way() -> None:
    schedule = over(3, APART)
    begun = next(at for at, op in enumerate(schedule) if started(op.kind))
    row = timed(schedule, Costs(QUICK, links={"shard": LINK}, processors=1))
    row[begun] = replace(row[begun], wall=row[begun].wall + 0.5)
    plain, found = (
        fit(schedule, [each], 0.0, 1.0, "") for each in (timed(schedule, Costs(QUICK, links={"shard": LINK})), row)
    )
    kind = schedule[begun].kind
    assert found.of(kind, "") == plain.of(kind, "")
    assert found.links[f"{kind} over shard"].sending == pytest.approx(plain.links[f"{kind} over shard"].sending)
    ahead = over(3, Policy(prefetch=3))
    assert simulate(ahead, found).compute == pytest.approx(simulate(ahead, plain).compute)


SHAPED = Link(50.0, 0.01, sending=1e-3, beside=1e-4, taking=2e-3, burst=150.0, peak=1000.0)
LAYERS = 2
QUICK = {("forward", ""): 0.1, ("backward", ""): 0.2}


def as_simulated(schedule: Schedule, costs: Costs) -> list[OpTime]:
    """What ops take on a rank, by the clock of a simulation: waits hold the device until a transfer has arrived."""
    run = simulate(schedule, costs)
    moves = {(move.kind, group.name): move for group in schedule.groups for move in group.transfers}
    rows = []
    for at, op in enumerate(schedule):
        wall = (*run.issued, run.seconds - costs.host)[at + 1] - run.issued[at]
        row = awaited(op.kind)
        thread = wall if row is None else moves[row.name, op.target].sent * SHAPED.taking
        beside = 0.0 if row is None else moves[row.name, op.target].sent * SHAPED.beside
        rows.append(OpTime(wall, thread, thread + beside, 0.0))
    return rows


def test_a_link_that_lets_bursts_pass_is_foreseen_at_its_steady_rate() -> None:
    schedule, truth = over(3, APART), Costs(QUICK, links={"shard": SHAPED}, host=5.0)
    rows = [as_simulated(schedule, truth)]
    found = fit(schedule, rows, 5.0, 2.0, "", {"shard": LinkStream(SHAPED.bytes_per_s, SHAPED.burst)})
    blind = fit(schedule, rows, 5.0, 2.0, "")
    for policy in (APART, Policy(), Policy(prefetch=0, reduces=1), Policy(reshard=False)):
        exact, fitted = simulate(over(3, policy), truth), simulate(over(3, policy), found)
        assert fitted.seconds == pytest.approx(exact.seconds, rel=0.02), policy
    ahead = over(3, Policy(prefetch=3))
    exact, wrong = simulate(ahead, truth), simulate(ahead, blind)
    assert wrong.seconds - 5.0 < 0.95 * (exact.seconds - 5.0)  # what pauses hide
    assert found.links["shard"].burst == 150.0 and blind.links["shard"].burst == 0.0
    several = fit(schedule, rows, 5.0, 2.0, "", {"shard": LinkStream(SHAPED.bytes_per_s, SHAPED.burst, together=2)})
    assert several.links == {key: replace(link, together=2) for key, link in found.links.items()}


AHEAD = replace(SHAPED, latency=0.0, burst=40.0, peak=math.inf)  # by less bytes than any transfer has


def unequal(policy: Policy) -> Schedule:
    """Three units that send 200, 400 and 300 bytes for each gather and each reduction."""
    (program, groups), sizes = chain(3), {"u0": 200, "u1": 400, "u2": 300}
    moved = [
        replace(each, transfers=[replace(move, axes="shard", sent=sizes[each.name]) for move in each.transfers])
        for each in groups
    ]
    return build(program, moved, policy)


@pytest.mark.parametrize(("late", "uneven"), [(0.0, 0.0), (9.0, 0.0), (0.0, 0.4)])
def test_a_link_that_is_ahead_by_a_few_bytes_has_the_rate_of_the_busy_link(late: float, uneven: float) -> None:
    """A line through their sizes would say that transfers apart from each other are faster than the link.

    So would means, where what else runs makes the small ones longer.
    """
    schedule = unequal(APART)
    truth = Costs({("forward", ""): 2.0, ("backward", ""): 4.0}, links={"shard": AHEAD})
    row = as_simulated(schedule, truth)
    at = next(at for at, op in enumerate(schedule) if op.kind == "wait all_gather")
    row[at] = replace(row[at], wall=row[at].wall + late)  # something else ran
    more = {"u0": uneven * 100 / AHEAD.bytes_per_s, "u1": -uneven * 100 / AHEAD.bytes_per_s}  # of 200, 400
    for at in [at for at, op in enumerate(schedule) if awaited(op.kind)]:
        row[at] = replace(row[at], wall=row[at].wall + more.get(schedule[at].target, 0.0))
    found = fit(schedule, [row], 0.0, 2.0, "", {"shard": LinkStream(AHEAD.bytes_per_s, 0.0)})
    assert found.links["shard"].bytes_per_s == AHEAD.bytes_per_s
    assert simulate(schedule, found).seconds == pytest.approx(simulate(schedule, truth).seconds + late, rel=1e-3)
    if not late:
        assert found.links["shard"].burst == pytest.approx(AHEAD.burst)
        for policy in (Policy(), Policy(prefetch=0, reduces=1), Policy(reshard=False)):
            exact, fitted = simulate(unequal(policy), truth), simulate(unequal(policy), found)
            assert fitted.seconds == pytest.approx(exact.seconds, rel=0.01), policy


def test_transfers_within_a_burst_do_not_say_how_large_it_is() -> None:
    truth = Costs({("forward", ""): 20.0, ("backward", ""): 40.0}, links={"shard": replace(SHAPED, burst=1e4)})
    row = as_simulated(unequal(APART), truth)
    link = fit(unequal(APART), [row], 0.0, 2.0, "", {"shard": LinkStream(SHAPED.bytes_per_s, 1e4)}).links["shard"]
    assert link.burst == 1e4 and link.peak == pytest.approx(SHAPED.peak, rel=1e-3)


def test_a_burst_is_what_series_were_ahead_of_the_steady_rate() -> None:
    def series(count: int, held: float) -> list[float]:  # 100 bytes each, 50 a second, of which the first ones at once
        return [max(100.0 * (n + 1) - held, 1.0) / 50.0 for n in range(count)]

    # The first series ends within the burst, and a pause brings some of it back.
    found = settled([series(4, 500.0), series(8, 100.0), series(16, 20.0)], 100)
    assert found.rate == pytest.approx(50.0) and found.burst == pytest.approx(500.0, rel=0.01)
    assert settled([series(4, 150.0), series(8, 40.0)], 100).burst == pytest.approx(150.0)


def test_transfers_of_one_size_have_a_latency_where_the_busy_link_says_so() -> None:
    schedule = over(3, APART)  # each of its transfers has the same size
    rows = [timed(schedule, Costs(QUICK), Link(100.0, 0.5))]
    sent = schedule.groups[0].transfers[0].sent
    link = fit(schedule, rows, 0.0, 1.0, "", {"shard": LinkStream(100.0, 0.0)}).links["shard"]
    assert (link.latency, link.peak) == pytest.approx((0.5, 100.0))
    blind = fit(schedule, rows, 0.0, 1.0, "").links["shard"]
    assert (blind.latency, blind.bytes_per_s) == pytest.approx((0.0, sent / (0.5 + sent / 100.0)))


def test_the_rate_of_a_link_is_that_of_most_stretches_of_its_fastest_series() -> None:
    steady = [2.0 * (n + 1) for n in range(64)]
    disturbed = [time + 20.0 * (n > 34) + 9.0 * (n > 60) for n, time in enumerate(steady)]
    assert settled([steady], 100).rate == pytest.approx(50.0)
    assert settled([disturbed], 100).rate == pytest.approx(50.0)
    slow = [time * 1.5 for time in steady]
    assert settled([slow, disturbed, slow], 100).rate == pytest.approx(50.0)  # of equal series the fastest


SLOW = Link(50.0, 0.01, sending=1e-3, taking=4e-3)


@pytest.mark.parametrize(("slow", "rate"), [(SLOW, 80.0), (replace(SLOW, sending=1e-2, taking=2e-2), 20.0)])
def test_a_link_that_is_not_shaped_has_a_rate_when_it_is_busy_and_one_for_a_transfer_alone(
    slow: Link, rate: float
) -> None:
    """One that leaves it idle, and one whose threads do more than it, so that they are what is busy."""
    schedule, ahead = over(3, APART), over(3, Policy(prefetch=3, reshard=False))
    rows = [timed(schedule, Costs(QUICK), slow)]
    plain = fit(schedule, rows, 0.0, 1.0, "")
    found = fit(schedule, rows, 0.0, 1.0, "", {"shard": LinkStream(rate, 40.0, together=2)})
    link = found.links["shard"]
    assert (link.burst, link.together) == (0.0, 2) and link.bytes_per_s == pytest.approx(max(rate, link.peak))
    assert simulate(schedule, found).seconds == pytest.approx(simulate(schedule, plain).seconds)
    both = simulate(ahead, found).seconds, simulate(ahead, plain).seconds
    # Two on their way at once take less than one after the other where one leaves the link idle.
    assert both[0] < 0.9 * both[1] if rate > slow.bytes_per_s else both[0] == pytest.approx(both[1], rel=1e-3)


def test_code_between_units_belongs_to_the_unit_before() -> None:
    schedule = over(2, APART)
    at = next(at for at, op in enumerate(schedule) if op.kind == "forward" and op.target == "u0")
    row = [OpTime(1.0, 1.0, 1.0, 0.0) for _ in schedule]
    row[at + 1] = OpTime(0.0, 0.0, 0.0, 3.0)
    assert fit(schedule, [row], 0.0, 2.0, "").of("forward", "u0") == 4.0
    with pytest.raises(PlanError, match="1 ops? were measured|ops were measured"):
        fit(schedule, [row[:1]], 0.0, 2.0, "")


def test_costs_add_up_to_steps_and_not_to_medians_of_ops() -> None:
    schedule = over(2, APART)
    rows = [[OpTime(1.0, 1.0, 1.0, 0.0) for _ in schedule] for _ in schedule]
    for late, row in enumerate(rows):  # in each step another op is late, so that no op's median is
        row[late] = OpTime(1.1, 1.0, 1.0, 0.0)
    assert sum(time.wall for time in mean(rows)) == pytest.approx(len(schedule) + 0.1)


def made(mesh: fs.Mesh, schedule: Any = None) -> tuple[Any, Any]:
    """A state and a step of two layers."""
    params = {f"l{i}": {"w": torch.eye(16)} for i in range(LAYERS)}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], units=("*",))
    opt = fs.optim.adamw(1e-2)

    @fs.unit
    def layer(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ params["w"])

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for i in range(LAYERS):
            x = layer(params[f"l{i}"], x)
        return x.square().mean()

    return fs.init_state(plan, opt, params=params), fs.make_train_step(loss, opt, plan, schedule=schedule)


@pytest.mark.long
def test_a_step_is_calibrated_and_stays_as_it_is() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))

    def on_a_rank() -> Any:
        state, step = made(mesh)
        state, _ = step(state, torch.ones(2, 16))
        before = step.schedule
        costs = step.calibrate(torch.ones(2, 16), rounds=2)
        assert step.schedule is before and state.step == 1
        run = fs.sim.simulate(before, costs)
        return costs, run.seconds

    (one, seconds), (two, _) = mesh.run(on_a_rank)
    assert one == two and seconds > 0
    assert {"forward", "backward", "update", "handshake", "consensus", "all_gather"} <= {
        kind for kind, _ in one.seconds
    }
    assert (
        set(one.links) == {"shard", "all_gather over shard", "reduce_scatter over shard"} and "2 ranks" in one.machine
    )
    assert {target for kind, target in one.seconds if kind == "forward"} >= {f"layer(l{i}.w)" for i in range(LAYERS)}
    with pytest.raises(PlanError, match="rounds=0"):
        mesh.run(lambda: made(mesh)[1].calibrate(torch.ones(2, 16), rounds=0))


def test_steps_that_were_disturbed_on_any_rank_do_not_count_on_any() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))

    def on_a_rank() -> float:
        _, step = made(mesh, APART)
        schedule = step.trace(torch.ones(2, 16)).schedule
        slow, fast, calm = ([OpTime(each, each, each, 0.0) for _ in schedule] for each in (9e-3, 5e-4, 1e-3))
        rows = [slow if number % 2 == mesh.rank else fast for number in range(20)] + [calm] * 20
        return fitted(step.programs.comms, schedule, rows, 0.0).of("update", "l0")

    assert mesh.run(on_a_rank) == [pytest.approx(1e-3)] * 2


def calibrated(shared: bool) -> tuple[Costs, int, float]:
    """On a rank: the costs, how often the loss has run, and the rate of the link that is kept busy."""
    calls = 0

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.tanh(x @ params["w"]).square().mean()

    with fs.make_mesh((-1,), ("shard",), shared_memory=shared) as mesh:
        plan = fs.make_plan({"w": torch.eye(768)}, mesh, [(".*", fs.fsdp("shard"))])
        step = fs.make_train_step(loss, fs.optim.sgd(0.1), plan)
        costs = step.calibrate(torch.ones(2, 768), rounds=2)
        return costs, calls, streams(step.programs.comms, step.trace(torch.ones(2, 768)).schedule)["shard"].rate


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_measure_short_steps_longer_and_what_their_links_take_from_compute(pool: Pools, shared: bool) -> None:
    (one, calls, rate), (two, others, _) = pool(2).run(calibrated, shared)
    assert math.isinf(rate) is shared  # shared memory has none: the thread that computes copies
    assert one == two and calls == others > 20  # two warm ones, two rounds, and traces are fewer
    link = one.links["shard"]
    assert link.peers == 1 and link.each > 0
    assert shared or link.beside > 0  # gloo's threads, whoever measures them
    assert link.together == (1 if shared else 2)  # and of its threads each carries one


def bound() -> tuple[float, int, str]:
    """On a rank that may run on one processor: the processors of a rank, and what costs say of the machine."""
    every = sorted(os.sched_getaffinity(0))
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan({"w": torch.eye(8)}, mesh, [(".*", fs.fsdp("shard"))])
        step = fs.make_train_step(lambda params, x: (x @ params["w"]).sum(), fs.optim.sgd(0.1), plan)
        try:
            os.sched_setaffinity(0, {every[mesh.rank % len(every)]})
            costs = step.calibrate(torch.ones(2, 8), rounds=1)
        finally:
            os.sched_setaffinity(0, set(every))
    return costs.processors, len(every), costs.machine


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to processors here")
def test_ranks_that_are_bound_to_processors_of_their_own_do_not_share_them(pool: Pools) -> None:
    found = pool(2).run(bound)
    (count, every, machine), _ = found
    assert count == min(every, 2) / 2 and f"{min(every, 2)} processors" in machine
    assert len({words for _, _, words in found}) == 1


@pytest.mark.long
def test_auto_times_its_first_steps_and_chooses_by_them() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))
    batches = [torch.randn(2, 16, generator=torch.Generator().manual_seed(n)) for n in range(240)]

    def trained(schedule: Any, steps: int) -> Any:
        state, step = made(mesh, schedule)
        losses, policies, settled = [], [], []
        for batch in batches[:steps]:
            state, metrics = step(state, batch)
            losses.append(metrics.loss.item())
            assert step.record == step.schedule.ops
            policies.append(step.schedule.policy)
            choice = step.trace(batch).choice
            settled.append(choice is not None and choice.settled)
            if sum(settled) == 3:
                break
        return losses, policies, choice, settled

    (losses, policies, choice, settled), (other, same, words, _) = mesh.run(lambda: trained("auto", 240))
    plain = mesh.run(lambda: trained(None, len(losses)))[0][0]
    assert losses == plain and policies == same and str(choice) == str(words) and other == losses
    assert policies[:6] == [APART] * 6 and APART not in policies[6:] and policies[-3:] == [choice.policy] * 3
    assert not any(settled[:6]) and settled[-3:] == [True] * 3 and sum(settled) == 3
    assert set(policies[6:]) == set(choice.measured or policies[-1:])
    assert isinstance(choice.rates, Costs) and "measured on" in str(choice)
    given = mesh.run(lambda: trained(fs.Auto(compute=1e9, wire=1e9), 3))[0]
    assert len(set(given[1])) == 1 and isinstance(given[2].rates, Rates) and all(given[3])


@pytest.mark.long
def test_timed_steps_keep_the_limit_of_memory() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))

    def trained() -> Any:
        known = made(mesh, fs.Auto(compute=1e9, wire=1e9))[1].trace(torch.ones(2, 16)).choice
        least = min(each.memory.peak_bytes for each in known.candidates)
        state, step = made(mesh, fs.Auto(memory=least))
        seen = []
        for _ in range(8):
            state, _ = step(state, torch.ones(2, 16))
            seen.append(step.schedule)
        return least, seen, step.trace(torch.ones(2, 16)).needs

    least, seen, needs = mesh.run(trained)[0]
    assert all(footprint(schedule, needs).peak_bytes <= least for schedule in seen)
