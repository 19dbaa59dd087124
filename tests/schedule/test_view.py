"""Pictures of schedules say what the schedules say."""

import builtins
from typing import Any

import pytest

import fshard as fs
from fshard.schedule import Schedule, build
from fshard.schedule.ops import UNIT_KINDS, Call, Program
from fshard.schedule.transfers import KINDS
from fshard.view import timeline
from fshard.view.timeline import bars, lanes, live, stacked
from tests.schedule.cases import group, replicas

GROUPS = tuple(
    group(name, 4096, 2048, 4096, staging=4096, all_gather=2048, reduce_scatter=2048)
    for name in ("root", "a", "b", "c")
)
CALLS = tuple(Call(name) for name in "abc")
PROGRAM = Program(CALLS, CALLS[::-1], {"root": (0,), "a": (1,), "b": (2,), "c": (3,)})

SCHEDULES = {
    "default": build(PROGRAM, GROUPS, fs.Policy()),
    "on the spot": build(PROGRAM, GROUPS, fs.Policy(prefetch=0, reduces=1)),
    "kept": build(PROGRAM, GROUPS, fs.Policy(prefetch=3, reshard=False)),
    "accumulated": build(PROGRAM, GROUPS, fs.Policy(update="in_backward"), accumulate=2),
    "evaluation": build(PROGRAM, GROUPS, fs.Policy(), train=False),
    "replicas": build(*replicas(), fs.Policy()),
    "empty": build(Program((), (), {}), (), fs.Policy()),
}


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return SCHEDULES[request.param]


@pytest.mark.sample(3)
def test_it_draws(schedule: Schedule, tmp_path: Any) -> None:
    figure = timeline(schedule)
    figure.savefig(tmp_path / "step.png", dpi=40)
    assert (tmp_path / "step.png").stat().st_size > 1000
    words = {text.get_text() for ax in figure.axes for text in ax.texts}
    assert {call.unit for call in schedule.program.forward} <= words


def test_every_transfer_compute_and_update_is_a_bar(schedule: Schedule) -> None:
    drawn = list(bars(schedule))
    kinds_of = {lane: ("forward", "backward") if lane == "compute" else (lane,) for lane in lanes()}
    for lane, kinds in kinds_of.items():
        assert [bar.label for bar in drawn if bar.lane == lane] == [op.target for op in schedule if op.kind in kinds]
    assert all(bar.begin < bar.end for bar in drawn)


def test_bars_of_a_row_do_not_overlap(schedule: Schedule) -> None:
    rows: dict[tuple[str, int], float] = {}
    for bar, row in stacked(bars(schedule), 0.1):
        assert rows.get((bar.lane, row), 0.0) <= bar.begin
        rows[bar.lane, row] = bar.end


def test_live_bytes_are_those_of_the_schedule(schedule: Schedule) -> None:
    assert tuple(map(sum, zip(*live(schedule).values(), strict=True))) == schedule.memory.profile


def test_exposed_transfers_are_those_without_compute() -> None:
    assert all(bar.exposed for bar in bars(SCHEDULES["on the spot"]) if bar.lane == "all_gather")
    assert [bar.label for bar in bars(SCHEDULES["default"]) if bar.exposed] == ["root", "root"]


@pytest.mark.sample(3)
@pytest.mark.long
def test_with_a_simulation_the_axis_is_time(schedule: Schedule, tmp_path: Any) -> None:
    costs = {(op.kind, op.target): 1.0 for op in schedule if op.kind in ("forward", "backward")}
    run = fs.sim.simulate(schedule, fs.sim.Costs(costs, fs.sim.Link(4096.0)))
    figure = timeline(schedule, run)
    figure.savefig(tmp_path / "step.png", dpi=40)
    if schedule.program.forward:
        assert str(run).splitlines()[0].removeprefix("step ") in figure.axes[1].get_xlabel()
    places = [at for at, op in enumerate(schedule) if op.kind in {*UNIT_KINDS, *KINDS, "update"}]
    for bar, at in zip(bars(schedule, run, 2.0), places, strict=True):
        assert bar.label == schedule[at].target
        assert (bar.begin, bar.end) == (2 * run.starts[at], 2 * run.ends[at])
    assert sum(bar.exposed for bar in bars(schedule, run)) == len(run.waits())


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r'pip install "fshard\[view\]"'):
        timeline(SCHEDULES["default"])


def test_nothing_of_a_small_timeline_is_cut_off() -> None:
    text = pytest.importorskip("matplotlib.text").Text
    schedule = SCHEDULES["default"]
    costs = fs.sim.Costs({("forward", ""): 1e-9, ("backward", ""): 1e-9}, fs.sim.Link(1.0, 1e-3))
    run = fs.sim.simulate(schedule, costs)
    figure = timeline(schedule, run)
    figure.draw_without_rendering()
    shown = [each for each in figure.findobj(text) if each.get_text()]
    assert max(each.get_window_extent().x1 for each in shown) <= figure.bbox.width
