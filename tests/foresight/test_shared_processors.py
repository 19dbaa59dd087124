"""Costs of ranks that share processors, and costs where more ranks take part."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard.errors import PlanError
from fshard.runtime.execution.timed import Stopwatch
from fshard.runtime.steps import calibrate
from fshard.runtime.steps.calibrate import TimedOps, fitted_by_all, op_times
from fshard.schedule import Costs, Link, Policy, Schedule, simulate
from fshard.schedule.clock import TICK, turn
from fshard.schedule.fit import APART, BESIDE, OpTime, Overlap, fit
from fshard.schedule.fit_links import LinkStream
from fshard.schedule.link import AROUND
from fshard.schedule.ops import Op
from fshard.schedule.transfers import awaited, started
from fshard.training import calibrate as calibrated
from tests.foresight.test_calibrate import LINK, QUICK, made, over, timed


def test_too_few_processors_are_taken_out_of_what_was_measured() -> None:
    schedule = over(2, APART)
    alone = [OpTime(1.0, 1.0, 1.0, 0.5, 0.5) for _ in schedule]
    among = [OpTime(2.0, 1.0, 1.0, 1.0, 0.5) for _ in schedule]  # every op takes twice as long, as others compute
    whole, half = fit(schedule, [alone], 0.0, 1.0, ""), fit(schedule, [among], 0.0, 0.5, "")
    assert half.of("forward", "u0") == whole.of("forward", "u0") > 1.0
    assert half.links == whole.links and half.links["shard"].latency == 0.0
    assert simulate(schedule, half).seconds == pytest.approx(2 * simulate(schedule, whole).seconds)


def test_more_ranks_that_shard_have_less_to_update() -> None:
    """By the part of the time that went by bytes in the calibration: here half of it, for a shard of mean size."""
    schedule = over(2, APART)
    sizes = {group.name: group.shard_bytes for group in schedule.groups}
    mean_size = sum(sizes.values()) / len(sizes)
    row = [OpTime(*[1.0 + sizes[op.target] / mean_size if op.kind == "update" else 1.0] * 3, 0.0) for op in schedule]
    costs = fit(schedule, [row] * 2, 0.0, 1.0, "", {"shard": LinkStream(float("inf"), 0.0, peers=1)})
    assert 0.5 <= costs.updates_by_bytes <= 1.0
    four, replicas = fs.abstract_mesh((4,), ("shard",)), fs.abstract_mesh((2, 2), ("replica", "shard"))
    for op in [op for op in costs.seconds if op[0] == "update"]:
        assert costs.among(replicas).seconds[op] == pytest.approx(costs.seconds[op])
        assert costs.among(four).seconds[op] == pytest.approx(costs.seconds[op] * (1 - costs.updates_by_bytes / 2))


def test_waits_for_copies_are_the_time_of_those_who_compute_meanwhile() -> None:
    """Ranks that share a processor and memory have nothing on its way; on a processor of one's own a wait is a wait."""
    schedule, shared_memory = over(2, APART), {"shard": LinkStream(float("inf"), 0.0, peers=1)}
    row = [OpTime(7.0 if op.kind.startswith("wait") else 1.0, 1.0, 1.0, 0.0) for op in schedule]
    one, half = (fit(schedule, [row], 0.0, processors, "", shared_memory) for processors in (1.0, 0.5))
    assert one.links["shard"].latency + one.links["shard"].bytes_per_s < float("inf")
    assert half.links["shard"].latency == 0.0 and half.links["shard"].bytes_per_s == float("inf")
    assert one.links["shard"].shared_memory and half.links["all_gather over shard"].shared_memory
    assert not fit(schedule, [row], 0.0, 0.5, "", {"shard": LinkStream(1e3, 0.0, peers=1)}).links["shard"].shared_memory
    assert simulate(schedule, half).seconds == pytest.approx(2.0 * len(schedule))


@pytest.mark.parametrize("by_bytes", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_the_way_from_mesh_to_mesh_does_not_matter(by_bytes: float, kind: str) -> None:
    link = fs.sim.Link(1e9, sending=0.06, each=0.1, peers=1)
    seconds = {("update", "u0"): 8.0, (f"wait {kind}", ""): 1.0, ("handshake", ""): 1.0}
    links = {"shard": link, f"{kind} over shard": link}
    costs = fs.sim.Costs(seconds, links=links, ranks=2, updates_by_bytes=by_bytes)
    few, many = fs.abstract_mesh((4,), ("shard",)), fs.abstract_mesh((64,), ("shard",))
    at_once, later = costs.among(many), costs.among(few).among(many)
    assert at_once.seconds == pytest.approx(later.seconds) and at_once.ranks == later.ranks == 64
    assert at_once.updates_by_bytes == pytest.approx(later.updates_by_bytes)
    for name, each in at_once.links.items():
        assert vars(each) == pytest.approx(vars(later.links[name]))
    back = costs.among(few).among(fs.abstract_mesh((2,), ("shard",)))
    assert back.seconds == pytest.approx(costs.seconds) and back.updates_by_bytes == pytest.approx(by_bytes)


def test_neighbours_that_interrupt_some_ops_are_not_of_these() -> None:
    """Where ranks share a processor, all of an op's time on the wall may be somebody else's."""
    schedule = over(2, APART)
    usual = [OpTime(2.0, 1.0, 1.0, 0.0) for _ in schedule]
    moved = [OpTime(1.0 + (at % 2) * 2.0, 1.0, 1.0, 0.0) for at, _ in enumerate(schedule)]
    costs, other = (fit(schedule, [row], 0.0, 0.5, "").seconds for row in (usual, moved))
    assert costs == other


def test_costs_keep_on_disk_what_goes_by_bytes(tmp_path: Path) -> None:
    costs = fs.sim.Costs({("update", "u0"): 1.0}, updates_by_bytes=0.25)
    costs.save(tmp_path / "costs.json")
    assert fs.sim.read_costs(tmp_path / "costs.json") == costs
    with pytest.raises(PlanError, match="updates_by_bytes=1.5"):
        fs.sim.Costs(updates_by_bytes=1.5)


def test_a_rank_has_the_processors_that_it_is_said_to_have() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))
    (one, two) = mesh.run(lambda: made(mesh)[1].calibrate(torch.ones(2, 16), rounds=2, processors=0.5))
    assert one == two and one.processors == 0.5
    for wrong in (0, -1.0, float("inf")):
        with pytest.raises(PlanError, match="processors="):
            mesh.run(lambda wrong=wrong: made(mesh)[1].calibrate(torch.ones(2, 16), processors=wrong))


def test_a_rank_that_left_its_schedule_is_told_to_all() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))

    def on_a_rank() -> bool:
        _, step = made(mesh, APART)
        schedule = step.trace(torch.ones(2, 16)).schedule
        whole, left = Stopwatch(), Stopwatch()
        for op in range(len(schedule)):
            whole.begin(op)
            whole.end(op)
        comms = step.programs.comms
        good, bad = TimedOps(schedule, [whole] * 3), TimedOps(schedule, [whole, left if mesh.rank else whole])
        assert fitted_by_all(comms, good) is not None and fitted_by_all(comms, good, beside=good) is not None
        return fitted_by_all(comms, bad) is None and fitted_by_all(comms, good, beside=bad) is None

    assert mesh.run(on_a_rank) == [True, True]


def test_what_reading_the_clocks_takes_is_no_time_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "readings", lambda: ((0.5, 0.25, 0.125), (1.0, 0.5, 0.25)))
    watch = Stopwatch(
        begins={0: (0.0, 0.0, 0.0), 1: (4.0, 3.0, 3.0), 2: (8.0, 4.0, 4.0)},
        ends={0: (2.0, 1.0, 1.0), 1: (4.25, 3.0, 3.0), 2: (9.0, 5.0, 5.0)},
    )
    first, second, last = op_times([watch], 3)[0]
    assert first == OpTime(1.5, 0.75, 0.875, gap=1.0, gap_thread=1.5, gap_process=1.75)
    assert second == OpTime(0.0, 0.0, 0.0, gap=2.75, gap_thread=0.5, gap_process=0.75)  # never less than nothing
    assert last == OpTime(0.5, 0.75, 0.875, gap=0.0, gap_thread=0.0, gap_process=0.0)
    assert op_times([watch], 4) == [[]]


def test_ranks_that_share_a_processor_do_not_count_the_compute_of_others_twice() -> None:
    schedule = over(3, APART)
    truth = Costs(QUICK, links={"shard": LINK}, processors=1)
    late = [at for at, op in enumerate(schedule) if awaited(op.kind)]
    first, last = timed(schedule, truth), timed(schedule, truth)
    for at in late:  # while the last rank computes, the first one waits
        first[at] = replace(first[at], wall=first[at].wall + 5.0)
    assert fit(schedule, [first, last], 0.0, 0.5, "").links == fit(schedule, [last, last], 0.0, 0.5, "").links


def slowed(rows: list[OpTime], schedule: Schedule, own: dict[str, float], others: dict[str, float]) -> list[OpTime]:
    """Ops of some kinds take so much longer, of their thread and of others."""
    found = [(own.get(op.kind, 0.0), others.get(op.kind, 0.0)) for op in schedule]
    more = [(thread, thread + beside) for thread, beside in found]
    return [
        replace(row, wall=row.wall + own, thread=row.thread + own, process=row.process + every)
        for row, (own, every) in zip(rows, more, strict=True)
    ]


def sent_by(schedule: Schedule) -> list[int]:
    """The bytes of each transfer of a step."""
    sizes = {(move.kind, group.name): move.sent for group in schedule.groups for move in group.transfers}
    return [sizes[op.kind, op.target] for op in schedule if sizes.get((op.kind, op.target))]


@given(st.floats(-0.01, 5.0), st.floats(0.0, 5.0), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.01, 9]))
@settings(max_examples=60, deadline=None)
def test_what_transfers_take_from_compute_is_what_steps_take_more(
    more: float, kernels: float, own: float, each: float
) -> None:
    """Threads that compute with this one (``kernels``) are no work of transfers: they are there without any.

    Messages take of it what they usually do. If that is more than all of it (``each`` of 9), they take all of it.
    """
    apart, beside = over(3, APART), over(3, BESIDE)
    link = replace(LINK, bytes_per_s=50.0)  # slower than what threads do for it, whatever ranks share
    truth, always = Costs(QUICK, links={"shard": link}), dict.fromkeys(("forward", "backward"), kernels)
    alone = slowed(timed(apart, truth, link), apart, {}, always)
    among = slowed(timed(beside, truth, link), beside, {"backward": more}, always)
    streams = {"shard": LinkStream(50.0, 0.0, each, peers=1)}
    costs = fit(apart, [alone] * 2, 0.0, own, "", streams, Overlap(beside, [among] * 2))
    count, moved = sum(op.kind == "backward" for op in beside), sent_by(beside)
    taken, messages = link.beside * sum(moved) + count * more, len(moved) * AROUND * each
    wanted, around = max(taken - messages, 0.0) / sum(moved), AROUND * (min(taken / messages, 1.0) if messages else 1.0)
    assert [each.beside for each in costs.links.values()] == pytest.approx([wanted] * len(costs.links), abs=1e-9)
    assert [each.around for each in costs.links.values()] == pytest.approx([around] * len(costs.links), abs=1e-9)
    longer = simulate(beside, replace(costs, processors=1.0))  # all that processors do in such a step, no less
    spent = sum(time.process for time in among) - sum(op.kind in always for op in beside) * kernels
    assert longer.compute + sum(map(costs.links["shard"].work, moved)) == pytest.approx(spent)


def test_steps_with_overlap_that_take_less_leave_transfers_without_work() -> None:
    apart, beside = over(3, APART), over(3, BESIDE)
    truth = Costs(QUICK, links={"shard": LINK})
    fast = [replace(row, process=0.0, thread=0.0) for row in timed(beside, truth)]
    costs = fit(apart, [timed(apart, truth)], 0.0, 1.0, "", overlap=Overlap(beside, [fast]))
    assert costs.links["shard"].beside == 0.0


@given(st.floats(-0.5, 2.0), st.floats(0.0, 5.0), st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=20, deadline=None)
def test_copies_take_more_or_less_where_ranks_do_not_meet_at_each(more: float, spun: float, own: float) -> None:
    """The thread that computes copies: bytes take nothing beside it, but a step with overlap differs from one without.

    What it takes more or less is that of transfers which are not waited for at once; steps apart stay as they were.
    Other threads that spin while it waits (``spun``) change nothing.
    """
    apart, beside = over(3, APART), over(3, BESIDE)
    truth, shared_memory = Costs(QUICK, links={"shard": LINK}), {"shard": LinkStream(math.inf, 0.0, peers=1)}
    rows = timed(apart, truth)
    among = slowed(timed(beside, truth), beside, {"backward": more}, {"wait all_gather": spun})
    plain = fit(apart, [rows], 0.0, own, "", shared_memory)
    costs = fit(apart, [rows], 0.0, own, "", shared_memory, Overlap(beside, [among]))
    later = [at for at, op in enumerate(beside) if started(op.kind) and beside[at + 1] != waits(op)]
    wanted = more * sum(op.kind == "backward" for op in beside) / len(later)
    assert [link.ahead for link in costs.links.values()] == pytest.approx([wanted] * len(costs.links), abs=1e-9)
    assert {key: replace(link, ahead=0.0) for key, link in costs.links.items()} == plain.links
    assert simulate(apart, costs) == simulate(apart, plain)
    longer, as_long = (simulate(beside, replace(each, processors=1.0)).compute for each in (costs, plain))
    assert longer - as_long == pytest.approx(more * sum(op.kind == "backward" for op in beside), abs=1e-9)


def test_links_without_a_rate_that_share_no_memory_take_nothing_ahead() -> None:
    """Their transfers are no copies of this thread: on a GPU, for one, its time is that of the host."""
    apart, beside = over(3, APART), over(3, BESIDE)
    truth = Costs(QUICK, links={"shard": Link()})
    among = slowed(timed(beside, truth, Link()), beside, {"backward": 1.0}, {})
    plain = fit(apart, [timed(apart, truth, Link())], 0.0, 1.0, "")
    assert {link.bytes_per_s for link in plain.links.values()} == {math.inf}
    assert fit(apart, [timed(apart, truth, Link())], 0.0, 1.0, "", overlap=Overlap(beside, [among])) == plain


def waits(op: Op) -> Op:
    return replace(op, kind=f"wait {op.kind}")


def test_no_wait_takes_less_than_nothing() -> None:
    costs = Costs({("wait all_gather", ""): 1.0}, Link(math.inf, ahead=-9.0, shared_memory=True))
    run = simulate(over(3, BESIDE), costs)
    assert run.seconds < simulate(over(3, APART), costs).seconds
    assert min(end - start for start, end in zip(run.starts, run.ends, strict=True)) == 0


def test_calibrations_see_steps_with_transfers_beside_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[TimedOps, TimedOps]] = []
    fitted = calibrated.fitted_by_all

    def noted(comms: Any, apart: TimedOps, host: float, own: Any, beside: TimedOps) -> Costs | None:
        seen.append((apart, beside))
        return fitted(comms, apart, host, own, beside)

    monkeypatch.setattr(calibrated, "fitted_by_all", noted)
    mesh = fs.virtual_mesh((2,), ("shard",))
    costs, _ = mesh.run(lambda: made(mesh)[1].calibrate(torch.ones(2, 16), rounds=2))
    assert len(seen) == 2 and isinstance(costs, Costs)
    for apart, beside in seen:
        assert (apart.schedule.policy, beside.schedule.policy) == (APART, BESIDE)
        assert len(apart.watches) >= 2 and len(beside.watches) >= 2
        assert all(op_times(beside.watches, len(beside.schedule)))


def test_the_last_of_more_ranks_has_its_turn_later() -> None:
    """The mean of the latest of so many times between two ticks."""
    drawn = torch.rand(100_000, 4, generator=torch.Generator().manual_seed(0)) * TICK
    for ranks in range(1, 5):
        late = drawn[:, :ranks].amax(1).mean().item()
        assert turn(Link(1e9, peers=ranks - 1)) == pytest.approx(late, rel=0.01)


@pytest.mark.parametrize(("processors", "rate", "late"), [(0.5, 1e9, TICK / 2), (1.0, 1e9, 0.0), (0.5, math.inf, 0.0)])
def test_transfers_beside_compute_wait_for_a_processor_that_ranks_share(
    processors: float, rate: float, late: float
) -> None:
    """Those that threads carry: not those that are copied, nor those that the device waits for at once."""
    costs = Costs({("forward", ""): 1.0, ("backward", ""): 2.0}, Link(rate), processors=processors)
    for policy, wanted in ((Policy(prefetch=2), late), (APART, 0.0)):
        schedule = over(3, policy)
        run = simulate(schedule, costs)
        began = [run.starts[at] - run.issued[at] for at, op in enumerate(schedule) if started(op.kind)]
        assert max(began) == pytest.approx(wanted, abs=1e-5)


def test_a_device_that_waits_gives_its_processor_to_transfers_of_all_wires() -> None:
    """No wait begins with a transfer that has not had its turn, on the wire that it waits for or on another."""
    schedule = over(3, Policy())
    costs = Costs({("backward", ""): 1e-4}, Link(1e6, together=9), Link(1e5, together=9), processors=0.5)
    run, early = simulate(schedule, costs), set()
    for at, op in enumerate(schedule):
        row = awaited(op.kind)
        if row is None or not row.link or run.ends[at] <= run.issued[at]:
            continue
        for before in range(at):
            other = started(schedule[before].kind)
            if other is not None and other.link:
                assert run.starts[before] <= run.issued[at] + 1e-12
                if run.issued[at] < run.issued[before] + turn(Link()):
                    early.add(row.link != other.link)
    assert early == {True, False}
