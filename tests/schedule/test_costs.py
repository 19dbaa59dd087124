"""Costs: what transfers take from compute, saving and composing, noise, and the tables of machines."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard.errors import PlanError
from fshard.schedule import Costs, Link, Policy, Schedule, build, simulate
from fshard.schedule.costs import Noise, read_costs
from fshard.schedule.footprint import Need
from fshard.schedule.link import SPREAD, sleeps
from fshard.schedule.machines import DEVICES, LINKS, Cluster, named_device, named_link, speed
from tests.schedule.cases import recipes
from tests.schedule.test_simulate import assume_wires_of_their_own, chain

AHEAD = Policy(prefetch=1)


def over(count: int = 3, policy: Policy = AHEAD) -> Schedule:
    """A chain whose transfers go over the axis ``shard``."""
    program, groups = chain(count)
    moved = [replace(each, transfers=[replace(move, axes="shard") for move in each.transfers]) for each in groups]
    return build(program, moved, policy)


SECONDS = {("forward", ""): 2.0, ("backward", ""): 4.0, ("forward", "root"): 0.0, ("backward", "root"): 0.0}


def test_transfers_take_from_compute_what_threads_need() -> None:
    schedule = over()
    free = simulate(schedule, Costs(SECONDS, Link(100.0, beside=0.01), processors=2))
    shared = simulate(schedule, Costs(SECONDS, Link(100.0, beside=0.01), processors=1))
    half = simulate(schedule, Costs(SECONDS, Link(100.0, beside=0.01), processors=1.5))
    assert free.beside == 0 and free.seconds < half.seconds < shared.seconds
    moved = shared.sent * 0.01
    # The first gather has nothing to take from: the device waits for it.
    assert 0 < shared.beside <= moved and shared.compute == free.compute
    assert half.beside == pytest.approx(shared.beside / 2, rel=0.2)


def test_a_transfer_is_over_when_its_work_is() -> None:
    schedule = over(1, Policy(prefetch=0))
    run = simulate(schedule, Costs({}, Link(1e9, beside=0.05), processors=1))
    assert run.seconds == pytest.approx(200 * 0.05, rel=1e-6)  # one gather and one reduction, of 100 bytes each


def test_starts_and_waits_take_the_device() -> None:
    schedule = over(1, Policy(prefetch=0))
    costs = Costs({("all_gather", ""): 1.0}, Link(1e9, sending=0.01, taking=0.02), host=5.0)
    run = simulate(schedule, costs)
    assert run.compute == pytest.approx(1.0 + 2 * (1.0 + 2.0))
    assert run.seconds == pytest.approx(run.compute + 5.0, rel=1e-6) and run.exposed == pytest.approx(0, abs=1e-6)


def test_more_ranks_send_more_messages() -> None:
    known = Link(1e9, each=0.5, peers=1)
    costs = Costs({("consensus", ""): 1.0}, links={"shard": known, "all_gather over shard": known}, ranks=2)
    assert costs.among(fs.abstract_mesh((2,), ("shard",))) == replace(
        costs, seconds={**costs.seconds, ("wait all_gather", ""): 0.0}
    )
    four = costs.among(fs.abstract_mesh((4,), ("shard",)))
    assert four.of("wait all_gather", "") == 2 * 0.5 and four.of("consensus", "") == 1.0 + 2 * 0.5
    assert four.links["shard"].peers == 3 and four.ranks == 4
    assert four.among(fs.abstract_mesh((2,), ("shard",))).of("consensus", "") == 1.0
    hosts = costs.among(fs.abstract_mesh((2, 2), ("replica", "shard")))  # as many peers over the axis, more ranks
    assert hosts.of("wait all_gather", "") == 0.0 and hosts.of("consensus", "") == 2.0
    assert Costs(links={"shard": Link(1e9)}).among(fs.abstract_mesh((8,), ("shard",))).seconds == {}
    half = simulate(over(1), Costs({}, Link(1e9), host=1.0, processors=0.5))
    assert half.host == pytest.approx(2.0, rel=1e-6)


def test_messages_over_sockets_take_processors_as_bytes_do() -> None:
    link = Link(1e9, beside=0.25, each=3.0, peers=1)
    assert link.work(8) == 8.0 and replace(link, shared_memory=True).work(8) == 2.0
    costs = Costs({("forward", ""): 99.0, ("backward", ""): 99.0}, links={"all_gather over shard": link}, processors=1)
    four = costs.among(fs.abstract_mesh((4,), ("shard",))).links["all_gather over shard"]
    assert four.work(8) == 20.0
    schedule = over(1)
    moved = [move.sent for group in schedule.groups for move in group.transfers if move.kind == "all_gather"]
    count = sum(op.kind == "all_gather" for op in schedule)
    ticks = simulate(schedule, costs)
    assert count == len(moved) and ticks.beside == pytest.approx(sum(map(link.work, moved)))


def test_a_rank_that_waits_for_more_peers_sleeps_more_often() -> None:
    """Through shared memory it looks for one peer after the other, and sleeps for those later than all before them."""
    orders = [*itertools.permutations(range(3))]
    records = [sum(late > max(order[:at], default=-1) for at, late in enumerate(order)) for order in orders]
    assert sum(records) / len(orders) == pytest.approx(sleeps(3))
    link = Link(ahead=-6.0, peers=1, shared_memory=True)
    costs = Costs(links={"all_gather over shard": link, "shard": replace(link, peers=0)})
    four = costs.among(fs.abstract_mesh((4,), ("shard",))).links
    assert four["all_gather over shard"].ahead == pytest.approx(-6.0 * sleeps(3)) and four["shard"].ahead == -6.0


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["all_gather", "regather", "update_gather", "reduce_scatter", "replica_reduce"])
def test_through_shared_memory_a_gather_copies_a_shard_once_for_all_peers(kind: str, shared: bool) -> None:
    link = Link(1e9, sending=0.06, taking=0.06, peers=1, shared_memory=shared)
    costs = Costs(links={f"{kind} over shard": link})
    four = costs.among(fs.abstract_mesh((4,), ("shard",))).links[f"{kind} over shard"]
    assert four.sending == pytest.approx(0.02 if shared and "reduce" not in kind else 0.06)
    assert four.taking == 0.06 and four.peers == 3
    assert costs.among(fs.abstract_mesh((1,), ("shard",))).links[f"{kind} over shard"].sending == 0.06


def test_a_burst_goes_at_once_and_comes_back_in_pauses() -> None:
    schedule = over(2, Policy(prefetch=3, reshard=False))  # two gathers of 100 bytes together, then two reductions
    steady, shaped = Link(10.0), Link(10.0, burst=150.0, peak=100.0)
    slow, fast = (simulate(schedule, Costs(SECONDS, links={"shard": link}, host=100.0)) for link in (steady, shaped))

    def spans(run: fs.sim.Simulation, kind: str) -> list[float]:
        return [run.ends[at] - run.starts[at] for at, op in enumerate(schedule) if op.kind == kind]

    assert spans(slow, "all_gather") == spans(slow, "reduce_scatter") == [10.0, 10.0]
    assert spans(fast, "all_gather") == pytest.approx([1.0, 4.0])  # 150 of 200 bytes at once
    refilled = min(
        150.0,
        10.0 * (fast.starts[schedule.ops.index(next(op for op in schedule if op.kind == "reduce_scatter"))] - 5.0),
    )
    assert spans(fast, "reduce_scatter")[0] == pytest.approx(max(1.0, (100 - refilled) / 10.0))
    assert fast.seconds < slow.seconds and fast.wire < slow.wire
    without = simulate(schedule, Costs(SECONDS, links={"shard": shaped}))  # a pause, in which a burst comes back
    assert without.seconds > fast.seconds - 100.0 and without.seconds <= slow.seconds - 100.0


def test_too_few_processors_slow_everything() -> None:
    schedule = over()
    one, half = (simulate(schedule, Costs(SECONDS, Link(1e9), processors=n)) for n in (1, 0.5))
    assert half.compute == pytest.approx(2 * one.compute)


@pytest.mark.parametrize("processors", [0.5, 0.25])
def test_who_waits_leaves_the_processor_to_the_others(processors: float) -> None:
    """All takes longer by the part of a step in which the other ranks have something to do, of whatever kind."""
    schedule, seconds = over(3, Policy(prefetch=0)), {("forward", ""): 1.0, ("backward", ""): 2.0}
    alone = simulate(schedule, Costs(seconds, Link(math.inf), processors=1))
    for rate in (math.inf, 1e3, 50.0, 1.0):
        run = simulate(schedule, Costs(seconds, Link(rate), processors=processors))
        busy = run.compute / run.seconds
        assert run.compute / alone.compute == pytest.approx(1 + (1 / processors - 1) * busy, rel=0.02)
    mesh = fs.abstract_mesh((4,), ("shard",))
    costs = Costs(seconds, Link(50.0), host=0.5, processors=processors)
    alike = simulate(schedule, costs, mesh, Noise())
    assert alike.seconds == pytest.approx(simulate(schedule, costs).seconds) and alike.by_rank[3] == alike.seconds


def test_ranks_are_not_together_after_a_transfer_to_several_peers() -> None:
    """Where transfers are messages of several connections, whose ends differ."""
    for messages, shared, wanted in ((2, False, SPREAD), (1, False, 0.0), (1, True, 0.0)):
        link = Link(100.0, peers=1, together=messages, shared_memory=shared)
        costs = Costs(links={"all_gather over shard": link})
        four, two = (costs.among(fs.abstract_mesh((n,), ("shard",))).links["all_gather over shard"] for n in (4, 2))
        assert two == link and four.spread == wanted
        assert (four.bytes_per_s, four.peak) == (two.bytes_per_s, two.peak)
        back = replace(costs, links={"all_gather over shard": four}).among(fs.abstract_mesh((2,), ("shard",)))
        assert back.links["all_gather over shard"].spread == 0.0  # one peer is not behind itself


@pytest.mark.parametrize("spread", [-0.1, math.inf, math.nan])
def test_a_spread_is_a_part_of_a_time(spread: float) -> None:
    with pytest.raises(PlanError, match=f"spread={spread}: a part of a transfer's time, 0 or more"):
        Link(1e9, spread=spread)


@pytest.mark.parametrize(("prefetch", "wanted"), [(0, [1.0, 2.25]), (1, [1.0, 2.0])])
def test_who_has_waited_makes_the_next_transfer_wait_for_the_last_rank(prefetch: int, wanted: list[float]) -> None:
    """One that is on its way meanwhile has no such gap before it; and the step ends with the last rank."""
    schedule = over(2, Policy(prefetch=prefetch))
    run, even = (simulate(schedule, Costs({}, Link(100.0, together=2, spread=spread))) for spread in (0.25, 0.0))
    gathers = [at for at, op in enumerate(schedule) if op.kind == "all_gather"]
    assert [run.ends[at] - run.starts[gathers[0]] for at in gathers[:2]] == pytest.approx(wanted)
    assert run.seconds > even.seconds
    mesh = fs.abstract_mesh((4,), ("shard",))
    assert simulate(schedule, Costs({}, Link(100.0, together=2, spread=0.25)), mesh, Noise()).seconds == run.seconds


@pytest.mark.parametrize("count", [2, 6])
def test_transfers_that_nobody_waits_for_leave_nobody_behind(count: int) -> None:
    """Each takes a second, and arrives beside compute."""
    schedule, seconds = over(count), {("forward", ""): 100.0, ("backward", ""): 100.0}
    even, run = (simulate(schedule, Costs(seconds, Link(100.0, spread=spread))) for spread in (0.0, 0.25))
    assert run.seconds == even.seconds == run.compute


def test_a_kind_of_transfer_has_its_own_link_on_the_wire_of_its_axes() -> None:
    schedule = over(2, Policy(prefetch=0))
    links = {"shard": Link(100.0), "reduce_scatter over shard": Link(50.0)}
    run = simulate(schedule, Costs(SECONDS, links=links))
    spans = [(run.starts[at], run.ends[at]) for at, op in enumerate(schedule) if op.kind == "reduce_scatter"]
    gathers = [(run.starts[at], run.ends[at]) for at, op in enumerate(schedule) if op.kind == "all_gather"]
    # The first reduction and the last gather begin together: each has half of the wire, as long as both need it.
    assert [end - start for start, end in spans] == [3.0, 2.0]
    assert [end - start for start, end in gathers] == [1.0, 1.0, 2.0] and run.wire == 7.0
    assert run.sent_by_axes == {"shard": 500} and set(run.exposed_by_kind) == {"all_gather", "reduce_scatter"}


@st.composite
def priced(draw: st.DrawFn) -> tuple[Schedule, Costs, float]:
    schedule = build(*draw(recipes(most=3)))
    amounts = st.integers(0, 64).map(lambda n: n / 16)
    kinds = sorted({op.kind for op in schedule} - {"local"})
    seconds = {(kind, ""): draw(amounts) for kind in kinds}
    rates = st.sampled_from((1.0, 16.0))
    link = st.builds(Link, rates, amounts, amounts, amounts, amounts, amounts.map(lambda n: 1000 * n), rates)
    several = st.integers(1, 3)
    spread = st.sampled_from((0.0, 0.25))
    one, other = (replace(draw(link), together=draw(several), spread=draw(spread)) for _ in range(2))
    return schedule, Costs(seconds, one, other, processors=draw(st.sampled_from((0.5, 1.0, 1.5, 2.0)))), 0.5


@given(priced())
def test_nothing_gets_slower_when_work_beside_falls(case: tuple[Schedule, Costs, float]) -> None:
    schedule, costs, factor = case
    assume_wires_of_their_own(schedule, costs)
    link = costs.link
    cheap = Costs(
        costs.seconds,
        replace(link, beside=link.beside * factor, taking=link.taking * factor),
        costs.reduces,
        processors=costs.processors,
    )
    slow, fast = simulate(schedule, costs), simulate(schedule, cheap)
    assert fast.seconds <= slow.seconds + 1e-9
    assert slow.seconds >= slow.compute + slow.beside - 1e-9


@settings(max_examples=30, deadline=None)
@given(priced())
def test_a_fleet_of_equal_ranks_is_one_rank(case: tuple[Schedule, Costs, float]) -> None:
    schedule, costs, _ = case
    axes = sorted(
        {axis for group in schedule.groups for move in group.transfers for axis in move.axes.split("+") if axis}
    )
    mesh = fs.abstract_mesh((3,) * max(len(axes), 1), axes or ("shard",))
    one, all_ = simulate(schedule, costs), simulate(schedule, costs, mesh, Noise())
    assert all_.seconds == pytest.approx(one.seconds) and all_.compute == pytest.approx(one.compute)
    assert all_.by_rank == pytest.approx([one.seconds] * mesh.size)


def test_one_slow_rank_holds_all_and_only_its_own_row() -> None:
    schedule = over(4)
    mesh = fs.abstract_mesh((4, 2), ("replica", "shard"))
    costs = Costs(SECONDS, Link(1e9))
    alone = simulate(schedule, costs)
    run = simulate(schedule, costs, mesh, Noise(slow={3: 2.0}))
    assert run.by_rank[3] == pytest.approx(2 * alone.seconds, rel=1e-3) and run.seconds == max(run.by_rank)
    assert len(set(run.by_rank)) == 1  # the consensus is over all
    assert run == simulate(schedule, costs, mesh, Noise(slow={3: 2.0}))


def test_draws_of_an_op_do_not_depend_on_what_others_take() -> None:
    schedule, mesh, noise = over(4), fs.abstract_mesh((8,), ("shard",)), Noise(0.02, 0.5, seed=1)
    times = [
        simulate(schedule, Costs(SECONDS, Link(1e3, sending=sending)), mesh, noise).seconds
        for sending in (0.0, 1e-9, 1e-3)
    ]
    assert times == sorted(times) and times[1] == pytest.approx(times[0], rel=1e-5)


def test_noise_grows_with_ranks_and_repeats_by_seed() -> None:
    schedule, costs = over(4), Costs(SECONDS, Link(1e9))
    times = []
    for ranks in (1, 8, 512):
        mesh = fs.abstract_mesh((ranks,), ("shard",))
        times.append(simulate(schedule, costs, mesh, Noise(0.02, 0.05, seed=1)).seconds)
    assert times == sorted(times) and times[-1] > times[0]
    mesh = fs.abstract_mesh((8,), ("shard",))
    assert simulate(schedule, costs, mesh, Noise(0.02, seed=2)) != simulate(schedule, costs, mesh, Noise(0.02, seed=3))


def test_costs_are_saved_and_composed(tmp_path: Path) -> None:
    units = Costs(
        {("forward", "u0"): 1.0, ("all_gather", ""): 9.0},
        Link(1.0, together=2, shared_memory=True, spread=0.25),
        host=2.0,
        processors=1,
    )
    units = replace(units, machine="here")
    links = Costs({("all_gather", ""): 0.5}, links={"shard": Link(1e9, 1e-5)}, machine="there", processors=2)
    units.save(tmp_path / "a.json")
    assert read_costs(tmp_path / "a.json") == units and [path.name for path in tmp_path.iterdir()] == ["a.json"]
    both = units.over(links)
    assert both.seconds == {("forward", "u0"): 1.0, ("all_gather", ""): 0.5} and both.links == links.links
    assert (both.host, both.processors, both.machine) == (2.0, 2, "units of here; links of there")
    assert units.over(Link(5.0)).link == Link(5.0) and units.over(Link(5.0)).seconds == units.seconds


@pytest.mark.parametrize("ended", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_costs_that_were_not_written_to_the_end_leave_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: BaseException
) -> None:
    old, path = Costs({}, Link(1e9)), tmp_path / "a.json"
    old.save(path)

    def part(self: Path, text: str, **more: str) -> None:
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise ended

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", part)
        with pytest.raises(PlanError if isinstance(ended, OSError) else KeyboardInterrupt) as error:
            Costs().save(path)
    assert not isinstance(ended, OSError) or "a.json cannot be written: No space left" in str(error.value)
    assert read_costs(path) == old and [each.name for each in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(PlanError, match="there is no folder .*: make it first"):
        old.save(tmp_path / "none" / "a.json")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "fshard costs 2"}', '{"format": "fshard costs 3"}'])
def test_files_that_hold_no_costs(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(
        PlanError, match=r"a\.json(: not costs that Costs\.save has written| cannot be read: it is not JSON)"
    ):
        read_costs(tmp_path / "a.json")
    with pytest.raises(PlanError, match=r"b\.json cannot be read: it is missing"):
        read_costs(tmp_path / "b.json")


def test_numbers_of_a_file_that_are_no_costs_are_told_with_the_file(tmp_path: Path) -> None:
    Costs(links={"shard": Link(1e9)}).save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    (tmp_path / "a.json").write_text(text.replace("1000000000.0", "-1.0"))
    with pytest.raises(PlanError, match=r"a\.json: invalid costs"):
        read_costs(tmp_path / "a.json")


def test_costs_that_do_not_know_how_links_carry_are_refused(tmp_path: Path) -> None:
    """Files of the first format do not say whether ranks share memory, and count messages as bytes."""
    Costs(links={"shard": Link(1e9, each=1e-4, peers=1)}).save(tmp_path / "a.json")
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text().replace("costs 2", "costs 1"))
    with pytest.raises(PlanError, match="its format is not 'fshard costs 2'.*calibrate again"):
        read_costs(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda: Link(beside=-1.0), "beside=-1.0"),
        (lambda: Link(ahead=math.nan), "ahead=nan"),
        (lambda: Costs(host=-1.0), "host=-1.0"),
        (lambda: Costs({"root": 1.0}), r"'root' is no op: give a pair"),  # type: ignore[dict-item]
        (lambda: Costs({("forward", "root"): (1.0, 2.0)}), r"forward root takes \(1.0, 2.0\) seconds"),
        (lambda: Costs(processors=0.0), "processors=0.0"),
        (lambda: Noise(ranks=-1.0), "ranks=-1.0"),
        (lambda: simulate(over(), Costs(), noise=Noise()), "but no mesh"),
        (lambda: simulate(over(), Costs(), fs.abstract_mesh((2,), ("shard",)), Noise(slow={5: 2.0})), r"slow\[5\]"),
        (lambda: simulate(over(), Costs({("forward", "u0"): 1.0})), "forward u1: not in the costs"),
        (lambda: named_link("ib40"), "no link is named 'ib40'"),
        (lambda: named_device("tpu"), "no device is named 'tpu'"),
        (lambda: Cluster(Link(), per_host=0), "per_host=0"),
    ],
)
def test_what_cannot_be_is_refused(bad: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        bad()


def test_the_links_of_a_cluster() -> None:
    mesh = fs.abstract_mesh((16, 8), ("outer", "inner"))
    cluster = Cluster(Link(50e9, 1e-5), Link(450e9, 5e-6), per_host=8, share=1.0, hop=0.0)
    rates = {axes: link.bytes_per_s for axes, link in cluster.links(mesh).items()}
    assert rates == {"outer": 50e9, "inner": 450e9, "outer+inner": 400e9}
    one = Cluster(Link(50e9), Link(450e9), per_host=8, share=1.0).links(fs.abstract_mesh((128,), ("shard",)))
    assert one["shard"].bytes_per_s == 400e9
    half = Cluster(Link(50e9), Link(450e9), per_host=4, share=1.0).links(mesh)
    assert half["inner"].bytes_per_s == 200e9


def test_every_machine_says_where_its_numbers_are_from() -> None:
    assert {"loopback", "eth1", "eth10", "eth25", "ib100", "ib400", "nvlink4"} <= LINKS.keys()
    for link in LINKS.values():
        assert link.source and link.what and link.link.latency > 0
    for device in DEVICES.values():
        assert device.source and device.flops > device.flops32 > 0


def test_memory_bound_ops_count_by_their_bytes() -> None:
    fast = speed(DEVICES["h100"], products=0.5, memory=0.5)
    assert fast.seconds(Need(0, 0, int(989.4e12), 0)) == pytest.approx(2.0)
    assert fast.seconds(Need(0, 0, 0, int(3350e9))) == pytest.approx(2.0)
    assert json.dumps(Costs({("forward", "u"): 1.0}).as_json())
