"""The simulator: exact where a hand can follow, and lawful everywhere."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fshard.errors import PlanError, ScheduleError
from fshard.schedule import Costs, GroupInfo, Link, Op, Policy, Program, Schedule, Simulation, build, simulate
from fshard.schedule.policy import keep
from tests.schedule.cases import calls, gpt, group, recipes, sending

FORWARD, BACKWARD = 2.0, 4.0


def chain(count: int, sent: int = 100) -> tuple[Program, list[GroupInfo]]:
    """Units one after the other, each with a group that takes a second at 100 bytes a second."""
    names = [f"u{i}" for i in range(count)]
    groups = [group(n, 2 * sent, sent, 2 * sent, staging=sent, all_gather=sent, reduce_scatter=sent) for n in names]
    forward = calls(*names)
    return Program(forward, forward[::-1], {name: (i,) for i, name in enumerate(names)}), groups


def costs(schedule: Schedule, link: Link, reduces: Link | None = None, **seconds: float) -> Costs:
    """Every forward takes 2, every backward 4, code outside of units nothing, the rest as given by kind."""
    each = {"forward": FORWARD, "backward": BACKWARD, **seconds}
    table = {(op.kind, op.target): each[op.kind] for op in schedule if op.kind in each and op.target != "root"}
    return Costs(table, link, reduces)


def spans(simulation: Simulation, *kinds: str) -> list[tuple[str, float, float]]:
    """The ops of these kinds with begin and end."""
    rows = zip(simulation.schedule, simulation.starts, simulation.ends, strict=True)
    return [(str(op), start, end) for op, start, end in rows if op.kind in kinds]


def test_prefetch_hides_all_but_the_first_gather() -> None:
    schedule = build(*chain(3), Policy(prefetch=1))
    run = simulate(schedule, costs(schedule, Link(100.0)))
    assert spans(run, "all_gather", "reduce_scatter", "forward", "backward") == [
        ("all_gather u0", 0, 1),
        ("forward root", 0, 0),
        ("all_gather u1", 1, 2),
        ("forward u0", 1, 3),
        ("all_gather u2", 3, 4),
        ("forward u1", 3, 5),
        ("forward u2", 5, 7),
        ("backward u2", 7, 11),
        ("reduce_scatter u2", 11, 12),  # the link is one, and carries them in the order of issue
        ("all_gather u0", 12, 13),
        ("backward u1", 11, 15),
        ("reduce_scatter u1", 15, 16),
        ("backward u0", 15, 19),
        ("reduce_scatter u0", 19, 20),
        ("backward root", 19, 19),
    ]
    assert (run.seconds, run.exposed) == (20, 2)


def test_no_prefetch_waits_for_every_gather() -> None:
    schedule = build(*chain(2), Policy(prefetch=0, reduces=1))
    run = simulate(schedule, costs(schedule, Link(100.0)))
    assert spans(run, "forward", "backward", "all_gather", "reduce_scatter") == [
        ("forward root", 0, 0),
        ("all_gather u0", 0, 1),
        ("forward u0", 1, 3),
        ("all_gather u1", 3, 4),
        ("forward u1", 4, 6),
        ("backward u1", 6, 10),
        ("reduce_scatter u1", 10, 11),
        ("all_gather u0", 11, 12),
        ("backward u0", 12, 16),
        ("reduce_scatter u0", 16, 17),
        ("backward root", 16, 16),
    ]
    assert (run.seconds, run.compute, run.wire, run.sent, run.exposed) == (17, 12, 5, 500, 5)
    assert run.waits() == [
        (2.0, Op("wait all_gather", "u0")),
        (1.0, Op("wait all_gather", "u0")),
        (1.0, Op("wait all_gather", "u1")),
        (1.0, Op("wait reduce_scatter", "u0")),
    ]


def test_links_of_their_own_do_not_wait_for_each_other() -> None:
    schedule = build(*chain(2), Policy(prefetch=0, reduces=1))
    run = simulate(schedule, costs(schedule, Link(100.0), Link(50.0, latency=0.5)))
    assert ("all_gather u0", 10, 11) in spans(run, "all_gather") and ("reduce_scatter u1", 10.5, 12.5) in spans(
        run, "reduce_scatter"
    )
    assert (run.seconds, run.wire) == (17.5, 4.0)  # the last reduction: 15 to 15.5 latency, then 2


def test_kept_groups_are_not_waited_for_again() -> None:
    schedule = build(*chain(3), Policy(prefetch=0, reshard=keep(last=2)))
    run = simulate(schedule, costs(schedule, Link(100.0)))
    assert [op for _, op in run.waits()].count(Op("wait all_gather", "u1")) == 1
    assert run.sent == 700  # four gathers and three reductions


def test_the_step_is_as_long_as_the_wire_where_the_wire_is_slow() -> None:
    schedule = build(*chain(4), Policy(prefetch=9, reshard=False, reduces=9))
    run = simulate(schedule, costs(schedule, Link(1.0)))
    assert run.wire == 800.0
    assert run.seconds == pytest.approx(800.0 + FORWARD + BACKWARD, abs=1e-9)  # the last unit's, between the two


def test_a_limit_on_reductions_holds_the_device() -> None:
    made, groups = chain(3)
    slow = [sending(each, "reduce_scatter", 1000) for each in groups]
    one, many = (build(made, slow, Policy(reshard=False, reduces=reduces)) for reduces in (1, 9))
    first = simulate(one, costs(one, Link(100.0)))
    second = simulate(many, costs(many, Link(100.0)))
    assert spans(first, "reduce_scatter") == [
        ("reduce_scatter u2", 11, 21),
        ("reduce_scatter u1", 21, 31),
        ("reduce_scatter u0", 31, 41),
    ]
    assert first.seconds == second.seconds == 41
    assert spans(first, "backward")[2] == ("backward u0", 21, 25) and spans(second, "backward")[2][1] == 15


def test_replicas_add_up_once_a_step() -> None:
    made, groups = chain(1)
    groups = [group("u0", 200, 100, 200, staging=100, all_gather=100, reduce_scatter=100, replica_reduce=300)]
    schedule = build(made, groups, Policy(), accumulate=2)
    run = simulate(schedule, costs(schedule, Link(100.0)))
    assert run.sent == 100 * (1 + 2) + 300
    assert run.seconds == 1 + 2 * (FORWARD + BACKWARD) + 1 + 3
    alone = build(made, [sending(groups[0], "reduce_scatter", 0)], Policy(), accumulate=2)
    run = simulate(alone, costs(alone, Link(100.0)))
    assert spans(run, "reduce_scatter", "replica_reduce") == [
        ("reduce_scatter u0", 7, 7),
        ("reduce_scatter u0 @1", 13, 13),
        ("replica_reduce u0", 13, 16),
    ]


def test_updates_and_the_rest_take_the_device() -> None:
    schedule = build(*chain(1), Policy())
    run = simulate(
        schedule, costs(schedule, Link(), update=0.5, handshake=0.25, consensus=0.25, **{"wait reduce_scatter": 1.0})
    )
    assert (run.seconds, run.exposed) == (FORWARD + BACKWARD + 2.0, 0.0)


def test_it_prints() -> None:
    schedule = build(*chain(2), Policy(prefetch=0))
    lines = str(simulate(schedule, costs(schedule, Link(100.0)))).splitlines()
    assert lines[0] == "step 17.000 s: compute 12.000 s, wire 5.000 s for 500 B sent, exposed 5.000 s"
    assert lines[1] == "   2.000 s  wait all_gather u0"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda: Link(0.0, -1.0), ["bytes_per_s=0.0", "latency=-1.0"]),
        (lambda: Costs({("gather", "a"): 1.0, ("forward", "a"): -1.0}), ["gather a", "forward a takes -1.0"]),
        (lambda: simulate(build(*chain(1), Policy()), Costs({("forward", "x"): 1.0})), ["forward x: no such op"]),
    ],
)
def test_what_cannot_be_is_refused(bad: Any, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        bad()
    for word in words:
        assert word in str(caught.value)


def test_a_wait_for_nothing() -> None:
    broken = Schedule((Op("handshake"), Op("wait all_gather", "u0")), tuple(chain(1)[1]), chain(1)[0], Policy())
    with pytest.raises(ScheduleError, match="all_gather of u0 at op 1, 'wait all_gather u0': none is in flight"):
        simulate(broken, Costs())


@st.composite
def prices(draw: st.DrawFn, schedule: Schedule) -> Costs:
    """Any costs of a schedule's ops, in numbers whose sums are exact."""
    amounts = st.integers(0, 64).map(float)
    seconds = {}
    for op in schedule:
        if op.kind in ("forward", "backward", "update", "wait reduce_scatter", "consensus"):
            seconds[op.kind, op.target] = draw(amounts)
    links = st.builds(Link, st.sampled_from((1.0, 16.0, 1024.0)), st.sampled_from((0.0, 2.0)))
    return Costs(seconds, draw(links), draw(st.none() | links))


@given(recipes(most=4), st.data())
def test_any_run_is_lawful(recipe: Any, data: st.DataObject) -> None:
    schedule = build(*recipe)
    given_ = data.draw(prices(schedule))
    run = simulate(schedule, given_)
    assert run == simulate(schedule, given_)
    assert run.seconds >= max(run.compute, run.wire)
    assert run.compute == sum(given_.seconds.get((op.kind, op.target), 0.0) for op in schedule)
    assert list(run.issued) == sorted(run.issued)
    axes = {(move.kind, group.name): move.axes for group in schedule.groups for move in group.transfers}
    ends: Counter[tuple[str, str]] = Counter()
    for op, start, end in zip(schedule, run.starts, run.ends, strict=True):
        if op.kind in ("all_gather", "reduce_scatter") and start < end:
            lane = op.kind, axes[op.kind, op.target]
            assert ends[lane] <= end
            ends[lane] = end  # type: ignore[assignment]
    for at, op in enumerate(schedule):
        if op.kind in ("wait all_gather", "wait reduce_scatter"):
            awaited = "all_gather" if op.kind == "wait all_gather" else "reduce_scatter"
            issue = max(i for i in range(at) if (schedule[i].kind, schedule[i].target) == (awaited, op.target))
            assert run.ends[issue] <= run.ends[at] and run.issued[issue] <= run.starts[issue]


@given(recipes(most=4), st.data())
def test_nothing_gets_slower_when_a_cost_falls(recipe: Any, data: st.DataObject) -> None:
    schedule = build(*recipe)
    dear = data.draw(prices(schedule))
    factor = data.draw(st.sampled_from((1.0, 2.0, 4.0)))
    cheap = Costs(
        {key: data.draw(st.sampled_from((value, value / 2, 0.0))) for key, value in dear.seconds.items()},
        Link(dear.link.bytes_per_s * factor, dear.link.latency / factor),
        dear.reduces and Link(dear.reduces.bytes_per_s * factor, dear.reduces.latency / factor),
    )
    slow, fast = simulate(schedule, dear), simulate(schedule, cheap)
    assert all(b <= a for a, b in zip(slow.ends, fast.ends, strict=True))


@given(st.integers(1, 6), st.lists(st.integers(0, 400), min_size=6, max_size=6), st.booleans(), st.data())
def test_more_prefetch_is_never_slower_where_gathers_have_their_link(
    count: int, sent: list[int], reshard: bool, data: st.DataObject
) -> None:
    made, groups = chain(count)
    groups = [sending(each, "all_gather", n) for each, n in zip(groups, sent, strict=False)]
    seconds = {}
    for op in build(made, groups, Policy()):
        if op.kind in ("forward", "backward"):
            seconds[op.kind, op.target] = float(data.draw(st.integers(0, 10)))
    times = []
    for ahead in range(5):
        schedule = build(made, groups, Policy(prefetch=ahead, reshard=reshard))
        times.append(simulate(schedule, Costs(seconds, Link(100.0), Link(50.0))).seconds)
    assert all(b <= a + 1e-9 for a, b in zip(times, times[1:], strict=False)), times


@given(recipes(most=4), st.data())
def test_more_reductions_in_flight_are_never_slower(recipe: Any, data: st.DataObject) -> None:
    made, groups, policy, *rest = recipe
    times = []
    prices_ = data.draw(prices(build(made, groups, policy, *rest)))
    for reduces in (1, 2, 5):
        schedule = build(made, groups, replace(policy, reduces=reduces, update="deferred"), *rest)
        known = {key: v for key, v in prices_.seconds.items() if key[0] in ("forward", "backward")}
        times.append(simulate(schedule, Costs(known, prices_.link, Link(16.0))).seconds)
    assert times == sorted(times, reverse=True)


def test_gpt_of_many_blocks() -> None:
    schedule = build(*gpt(200), Policy())
    assert simulate(schedule, costs(schedule, Link(1e9))).seconds > 0
