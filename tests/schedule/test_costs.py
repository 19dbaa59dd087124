"""Costs: those of real steps, saving and composing, noise, and the tables of machines."""

import json
import math
import statistics
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
from fshard.schedule.machines import DEVICES, LINKS, Cluster, named_device, named_link, speed
from fshard.schedule.simulate import measured
from tests.schedule.cases import recipes
from tests.schedule.test_simulate import chain

AHEAD = Policy(prefetch=1)


def over(count: int = 3, policy: Policy = AHEAD) -> Schedule:
    """A chain whose transfers go over the axis ``shard``."""
    program, groups = chain(count)
    moved = [replace(each, transfers=[replace(move, axes="shard") for move in each.transfers]) for each in groups]
    return build(program, moved, policy)


def run(schedule: Schedule, device: str = "cpu", pause: float = 1.0) -> fs.sim.Simulation:
    """A run whose op number n takes n times ``pause``."""
    times = [pause * at * (at - 1) / 2 for at in range(len(schedule) + 1)]
    return measured(schedule, times, device=device)


def test_costs_of_real_steps_are_the_medians_of_what_their_ops_took() -> None:
    schedule = over(2)
    costs = Costs.of(run(schedule), run(schedule, pause=2.0), run(schedule, pause=9.0))
    for at, op in enumerate(schedule):
        left_out = op.kind in ("handshake", "consensus") or op.kind.startswith("wait")
        rest = [2.0 * n for n, one in enumerate(schedule) if (one.kind, one.target) == (op.kind, op.target)]
        assert left_out or 2.0 * at in rest
        assert costs.seconds.get((op.kind, op.target), 0.0) == (0.0 if left_out else pytest.approx(middle(rest)))
    again = simulate(schedule, costs)
    assert again.exposed == 0.0 and again.clock is None and run(schedule).clock == "cpu"
    assert simulate(schedule, costs.over(Link(1.0))).exposed > 0


def middle(values: list[float]) -> float:
    """The median of an op's times in the three runs, which are 1/2, 1 and 9/2 of these."""
    return statistics.median(value * factor for value in values for factor in (0.5, 1.0, 4.5))


def test_a_link_carries_one_transfer_after_the_other() -> None:
    schedule = over(3, Policy(prefetch=3, reshard=False))
    one = simulate(schedule, Costs(SECONDS, Link(100.0, 0.25)))
    spans = [(one.starts[at], one.ends[at]) for at, op in enumerate(schedule) if op.kind == "all_gather"]
    assert spans == [(0.25, 1.25), (1.5, 2.5), (2.75, 3.75)]
    two = simulate(schedule, Costs(SECONDS, Link(100.0), Link(50.0)))
    reduces = [(two.starts[at], two.ends[at]) for at, op in enumerate(schedule) if op.kind == "reduce_scatter"]
    assert [end - start for start, end in reduces] == [2.0] * 3 and two.sent_by_axes == {"shard": 600}


SECONDS = {("forward", ""): 2.0, ("backward", ""): 4.0, ("forward", "root"): 0.0, ("backward", "root"): 0.0}


@st.composite
def priced(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    schedule = build(*draw(recipes(most=3)))
    amounts = st.integers(0, 64).map(lambda n: n / 16)
    kinds = sorted({op.kind for op in schedule} - {"local"})
    seconds = {(kind, ""): draw(amounts) for kind in kinds}
    rates = st.sampled_from((1.0, 16.0))
    link = st.builds(Link, rates, amounts)
    return schedule, Costs(seconds, draw(link), draw(link))


@settings(max_examples=30, deadline=None)
@given(priced())
def test_a_fleet_of_equal_ranks_is_one_rank(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
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
        simulate(schedule, Costs({**SECONDS, ("all_gather", ""): sending}, Link(1e3)), mesh, noise).seconds
        for sending in (0.0, 1e-7, 1e-1)
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
        Link(1.0),
        host=2.0,
    )
    units = replace(units, machine="here")
    links = Costs({("all_gather", ""): 0.5}, links={"shard": Link(1e9, 1e-5)}, machine="there")
    units.save(tmp_path / "a.json")
    assert read_costs(tmp_path / "a.json") == units and [path.name for path in tmp_path.iterdir()] == ["a.json"]
    both = units.over(links)
    assert both.seconds == {("forward", "u0"): 1.0, ("all_gather", ""): 0.5} and both.links == links.links
    assert (both.host, both.machine) == (2.0, "units of here; links of there")
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


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "fshard costs 3"}', '{"format": "fshard costs 4"}'])
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


def test_costs_of_another_format_are_refused(tmp_path: Path) -> None:
    Costs(links={"shard": Link(1e9)}).save(tmp_path / "a.json")
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text().replace("costs 3", "costs 2"))
    with pytest.raises(PlanError, match="its format is not 'fshard costs 3'.*measure again"):
        read_costs(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda: Link(0.0), "bytes_per_s=0.0 is not positive"),
        (lambda: Link(latency=math.nan), "latency=nan"),
        (lambda: Costs.of(), "no run was given: give step.measured"),
        (lambda: Costs.of([run(over())]), "a list is no measured run: give step.measured .* Costs.of"),  # type: ignore[arg-type]
        (lambda: Costs.of(simulate(over(), Costs())), "the times of a simulation were not measured"),
        (lambda: Costs.of(run(over()), run(over(2))), "of several schedules"),
        (lambda: Costs.of(run(over(), "cuda")), "runs ahead of a device of type cuda"),
        (lambda: Costs(host=-1.0), "host=-1.0"),
        (lambda: Costs({"root": 1.0}), r"'root' is no op: give a pair"),  # type: ignore[dict-item]
        (lambda: Costs({("forward", "root"): (1.0, 2.0)}), r"forward root takes \(1.0, 2.0\) seconds"),
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
