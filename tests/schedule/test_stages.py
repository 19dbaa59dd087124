"""Steps of several passes: their ops by hand, their memory, times and pictures, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given

from fshard.errors import PlanError, ScheduleError
from fshard.schedule import Call, Costs, Link, Op, Policy, Program, Schedule, build, check, parse, simulate
from fshard.schedule.auto import Auto, Rates, choose
from fshard.schedule.candidates import PolicyTask
from fshard.schedule.footprint import Need, footprint
from fshard.schedule.policy import keep
from fshard.schedule.step_program import Local, Pass, StepProgram
from fshard.view import timeline
from fshard.view.timeline import bars, live
from tests.schedule.cases import CASES, POLICIES, gpt, group, info, recipes
from tests.schedule.stage_cases import STEPS, chain, distilled, gan, sam, steps, surgery


def ops(schedule: Schedule) -> list[str]:
    """The ops as text."""
    return [str(op) for op in schedule]


def test_two_gradients_with_code_between_them() -> None:
    schedule = build(*sam(), Policy(1, 1))
    assert ops(schedule) == [
        "handshake",
        "update a", "all_gather a", "forward root",
        "update b", "all_gather b", "wait all_gather a", "forward a",
        "wait all_gather b", "forward b", "backward b", "free b", "reduce_scatter b",
        "backward a", "free a", "wait reduce_scatter b", "reduce_scatter a", "backward root",
        "wait reduce_scatter a", "local",
        "all_gather a.moved", "forward root @1",
        "all_gather b.moved", "wait all_gather a.moved", "forward a @1",
        "wait all_gather b.moved", "forward b @1", "backward b @1", "free b.moved", "reduce_scatter b.moved @1",
        "backward a @1", "free a.moved", "wait reduce_scatter b.moved @1", "reduce_scatter a.moved @1",
        "backward root @1", "wait reduce_scatter a.moved @1",
        "consensus",
    ]  # fmt: skip
    at = {op: i for i, op in enumerate(ops(schedule))}
    lives = schedule.memory.lifetimes
    assert lives["shard:a"] == ((at["reduce_scatter a"], at["local"]),)
    assert lives["shard:b.moved"] == ((0, at["update b"]), (at["reduce_scatter b.moved @1"], at["consensus"]))
    assert "shard:b" in lives and schedule.stages.freed == ((0, 1),)


def test_two_losses_of_one_plan_share_gathers_and_overlap() -> None:
    schedule = build(*gan(), Policy(1, 2))
    assert ops(schedule) == [
        "handshake",
        "update maker", "all_gather maker", "forward root",
        "update judge", "all_gather judge", "wait all_gather maker", "forward maker",
        "wait all_gather judge", "forward judge", "backward judge", "reduce_scatter judge",
        "backward maker", "backward root",
        "forward root @1", "forward maker @1", "forward judge @1", "backward judge @1", "free judge",
        "backward maker @1", "free maker", "reduce_scatter maker @1", "backward root @1",
        "wait reduce_scatter judge", "wait reduce_scatter maker @1",
        "consensus",
    ]  # fmt: skip
    again = build(*gan(), Policy(0, 2))
    assert ops(again).count("all_gather judge") == 2 and ops(again).count("all_gather maker") == 3


def test_two_gradients_of_the_same_parameters() -> None:
    schedule = build(*surgery(), Policy(1, 1))
    assert ops(schedule) == [
        "handshake",
        "update a", "all_gather a", "forward root", "wait all_gather a", "forward a", "backward a",
        "reduce_scatter a", "backward root",
        "forward root @1", "forward a @1", "backward a @1", "wait reduce_scatter a", "reduce_scatter a.second @1",
        "backward root @1",
        "forward root @2", "forward a @2", "wait reduce_scatter a.second @1", "backward a @2", "free a",
        "reduce_scatter a.second @2", "backward root @2", "wait reduce_scatter a.second @2",
        "local",
        "consensus",
    ]  # fmt: skip
    at = {op: i for i, op in enumerate(ops(schedule))}
    assert schedule.memory.lifetimes["shard:a"] == ((0, at["update a"]), (at["reduce_scatter a"], at["consensus"]))
    assert schedule.memory.lifetimes["shard:a.second"] == ((at["reduce_scatter a.second @1"], at["local"]),)
    whole = build(*surgery(), Policy(1, 1, accumulation="full"))
    assert [op for op in ops(whole) if op.startswith("reduce_scatter")] == [
        "reduce_scatter a", "reduce_scatter a.second @2",
    ]  # fmt: skip
    first = whole.ops.index(Op("backward", "a", 0, 1))
    assert whole.memory.lifetimes["grad:a.second"] == ((first, len(whole) - 3),)


def test_a_frozen_model_beside_one_that_learns() -> None:
    schedule = build(*distilled(), Policy(1, 1))
    assert ops(schedule) == [
        "handshake",
        "all_gather teacher", "forward root", "wait all_gather teacher", "forward teacher", "free teacher",
        "backward root",
        "update student", "all_gather student", "forward root @1", "wait all_gather student", "forward student @1",
        "backward student @1", "free student", "reduce_scatter student @1", "backward root @1",
        "wait reduce_scatter student @1",
        "consensus",
    ]  # fmt: skip


def test_transfers_of_all_gradients_that_code_reads_are_waited_for_kind_by_kind() -> None:
    stages, groups = surgery()
    moves = group("a", 0, 0, 8, gathered=False, reduce_scatter=8, replica_reduce=8).transfers
    sums = [replace(each, transfers=moves) for each in groups]
    schedule = build(stages, sums, Policy(1, 3))
    at = ops(schedule).index("local")
    assert ops(schedule)[at - 4 : at] == [
        "wait reduce_scatter a.second @2", "replica_reduce a.second", "wait replica_reduce a",
        "wait replica_reduce a.second",
    ]  # fmt: skip


@given(recipes())
def test_a_program_is_a_step_of_one_pass(recipe: Any) -> None:
    made, groups, policy, accumulate, train = recipe
    updates = {g: g for g, each in enumerate(groups) if each.trainable}
    whole = build(made, groups, policy, accumulate, train)
    for gradients in (None, updates):
        stages = StepProgram((Pass(made, accumulate, gradients),), updates)
        schedule = build(stages, groups, policy, train=train)
        assert schedule.ops == whole.ops
        check(schedule)
        for field in ("sizes", "lifetimes", "offsets", "profile", "arena_bytes", "peak_bytes"):
            assert getattr(schedule.memory, field) == getattr(whole.memory, field)
        assert parse(str(schedule)) == schedule and schedule.hash != whole.hash
    assert whole.stages == (stages if train else stages.forward_only())


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_cases_are_steps_of_one_pass(case: str, policy: Policy) -> None:
    made, groups = CASES[case]()
    updates = {g: g for g, each in enumerate(groups) if each.trainable}
    assert build(StepProgram((Pass(made, 2),), updates), groups, policy).ops == build(made, groups, policy, 2).ops


@given(steps())
def test_gradients_live_while_somebody_reads_them(recipe: Any) -> None:
    schedule = build(*recipe)
    stages, memory, last = schedule.stages, schedule.memory, len(schedule) - 1
    place = {str(op): i for i, op in enumerate(schedule)}
    for g, each in enumerate(schedule.groups):
        path = each.at("gradient")
        if not path:
            assert not {f"grad:{each.name}", f"own:{each.name}"} & set(memory.sizes)
        if not path and g not in stages.fillings:
            assert f"shard:{each.name}" not in memory.lifetimes
            continue
        kept = f"{path[-1].target if path else 'shard'}:{each.name}"
        *before, (begin, end) = memory.lifetimes[kept]
        updates = [place[f"update {schedule.groups[u].name}"] for u, source in stages.updates.items() if source == g]
        assert before == ([(0, max(updates))] if updates else [])
        reading = [n for n, local in enumerate(stages.locals) if g in local.gradients]
        over = place[str(Op("local", "", reading[-1]))] if reading and not updates else last
        assert end == over and any(g in freed for freed in stages.freed) == (bool(reading) and not updates)
        if not path:
            filling = stages.fillings[g]
            fills = [i for i, op in enumerate(schedule) if op.kind == "backward"]
            fills = [i for i in fills if filling.first <= schedule[i].microbatch <= filling.last]
            units = [unit for unit, ids in filling.program.reads.items() if filling.read in ids]
            fills = [i for i in fills if schedule[i].target in ("root", *units)]
            assert fills[0] <= begin <= fills[-1] and schedule[begin].kind == "backward"
            continue
        maker = next(move for move in path if move.target == path[-1].target)
        word = maker.row.wait if maker.late else maker.kind
        born = next(i for i, op in enumerate(schedule) if (op.kind, op.target) == (word, each.name))
        assert begin == born + maker.late
        assert all(a[1] < b[0] for spans in memory.lifetimes.values() for a, b in pairwise(spans))


def test_the_text_of_a_step_reads_well() -> None:
    text = str(build(*surgery(), Policy(1, 1)))
    assert text.startswith("fshard schedule 4\n") and str(build(*gpt(2), Policy())).startswith("fshard schedule 3\n")
    lines = text.splitlines()
    assert lines[2] == "step train stages=3"
    assert lines[lines.index("pass accumulate=1 gradients=given") : lines.index("ops 25")] == [
        "pass accumulate=1 gradients=given",
        "  fills a -> a",
        "unit root reads",
        "unit a reads a",
        "forward a",
        "backward a",
        "pass accumulate=2 gradients=given",
        "  fills a -> a.second",
        "unit root reads",
        "unit a reads a",
        "forward a",
        "backward a",
        "local",
        "  gradients a a.second",
        "update a from a",
    ]
    assert "\n  23 local\n" in text
    assert "  updated a b\n  makes a.moved b.moved\n" in str(build(*sam(), Policy()))
    assert "gradients=own" in str(build(*sam(), Policy()))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("schedule 4", "schedule 3", "expected accumulate=..."),
        ("stages=3", "accumulate=3", "expected stages=..."),
        ("stages=3", "stages=4", "the text has 3 of 4 stages"),
        ("gradients=given", "gradients=some", "gradients=some is neither own nor given"),
        ("gradients=given", "gradients=own", "below a pass with gradients=given"),
        ("fills a -> a\n", "fills a a\n", "a gradient is written 'fills GROUP -> GROUP'"),
        ("fills a -> a\n", "fills a -> a\nfills a -> a\n", "group a fills two gradients"),
        ("fills a -> a\n", "fills a -> x\n", "no group 'x' stands above"),
        ("pass accumulate=1 gradients=given\n", "", "fills stands below a pass"),
        ("pass accumulate=2", "pass accumulate=two", "'two' is not of the form NUMBER"),
        ("\nlocal\n", "\nlocal a\n", "local stands alone"),
        ("\nlocal\n", "\n", "gradients stands below a local"),
        ("update a from a", "update a to a", "an update is written 'GROUP from GROUP'"),
        ("update a from a", "update a\nupdate a", "group a is updated twice"),
        ("\nlocal\n", "\nlocals\n", "'locals' is none of policy, step, group, ops, unit, forward, backward,"),
    ],
)
def test_what_cannot_be_read_is_named(old: str, new: str, words: str) -> None:
    text = str(build(*surgery(), Policy(1, 1)))
    assert old in text
    with pytest.raises(ScheduleError) as caught:
        parse(text.replace(old, new, 1))
    assert words in str(caught.value)


@pytest.mark.parametrize("several", [False, True])
def test_names_that_are_words_of_the_text(several: bool) -> None:
    names = ["->", "makes"] if several else ["from", "a b"]
    made = Pass(chain(0, names=("local",)), gradients={0: 1})
    stages = StepProgram((made, Local((1,), (0,))), {0: 1})
    groups = [info(names[0], trainable=False), info(names[1], gathered=False)]
    schedule = build(stages, groups, Policy())
    assert parse(str(schedule)) == schedule


def test_code_between_passes_takes_the_device_and_no_link() -> None:
    schedule = build(*gan_apart(), Policy(1, 1))
    free, busy = (simulate(schedule, Costs(seconds, Link(100.0))) for seconds in ({}, {("local", ""): 2.0}))
    assert busy.compute - free.compute == 2.0 and busy.sent == free.sent and busy.wire == free.wire
    at = schedule.ops.index(Op("local"))
    assert busy.ends[at] - busy.starts[at] == 2.0 and free.ends[at] == free.starts[at]
    with pytest.raises(PlanError, match="local: no such op"):
        simulate(build(*gpt(2), Policy()), Costs({("local", ""): 1.0}))


def gan_apart() -> tuple[StepProgram, Any]:
    """The two losses with code between them that reads nothing."""
    stages, groups = gan()
    sent = {"all_gather": 100, "reduce_scatter": 100}
    return StepProgram((stages.stages[0], Local(), stages.stages[1]), stages.updates), [
        info(each.name, **sent) for each in groups
    ]


def test_the_footprint_takes_needs_of_each_pass() -> None:
    stages, groups = surgery()
    schedule = build(stages, groups, Policy(1, 1))
    needs = [Need(n, 0, 0) for n in range(len(stages.computes))]
    assert len(needs) == 4 + 4 + 1
    top = 2**30
    for n, where in ((6, "backward a @1"), (8, "local")):
        needs[n] = Need(top, 0, 0)
        peak = footprint(schedule, needs)
        assert (peak.where, peak.activation_bytes) == (where, top)
        top *= 2
    assert footprint(schedule, [Need(2**40, 0, 0)]).activation_bytes == 2**40


def test_a_policy_is_chosen_for_several_passes() -> None:
    stages, groups = surgery()
    needs = [Need(100, 50, 1000)] * len(stages.computes)
    choice = choose(PolicyTask(stages, groups, needs), Auto(), Rates(1e3, 1e6))
    check(choice.schedule)
    assert choice.schedule.program == stages
    assert {each.policy.accumulation for each in choice.candidates} == {"sharded", "full"}


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("case", STEPS)
def test_it_draws(case: str, tmp_path: Any) -> None:
    schedule = build(*STEPS[case](), Policy())
    timeline(schedule).savefig(tmp_path / "step.png", dpi=40)
    computes = [op for op in schedule if op.kind in ("forward", "backward", "local")]
    labels = [op.target or str(op) for op in computes]
    assert [bar.label for bar in bars(schedule) if bar.lane == "compute"] == labels
    assert tuple(map(sum, zip(*live(schedule).values(), strict=True))) == schedule.memory.profile


def test_bars_have_the_colors_of_what_their_pass_reads() -> None:
    compute = [bar.group for bar in bars(build(*sam(), Policy())) if bar.lane == "compute"]
    assert [name for name in compute if name] == ["a", "b", "b", "a", "a.moved", "b.moved", "b.moved", "a.moved"]


def test_an_evaluation_of_several_passes() -> None:
    stages, groups = sam()
    schedule = build(stages, groups, Policy(1, 1), train=False)
    check(schedule)
    assert parse(str(schedule)) == schedule
    assert not {op.kind for op in schedule} & {"update", "reduce_scatter", "consensus"}
    assert ops(schedule).index("local") < ops(schedule).index("all_gather a.moved")


def test_patterns_to_keep_are_those_of_any_pass() -> None:
    stages, groups = distilled()
    schedule = build(stages, groups, Policy(0, 1, reshard=keep("student")))
    assert ops(schedule).count("all_gather student") == 1
    with pytest.raises(PlanError, match="'pupil' matches none"):
        build(stages, groups, Policy(reshard=keep("pupil")))


def test_a_schedule_of_stages_is_a_value() -> None:
    schedule, again = build(*sam(), Policy()), build(*sam(), Policy())
    assert schedule == again and hash(schedule) == hash(again) and schedule.hash == again.hash
    assert "4 groups, 4 calls, 2 passes" in repr(schedule)
    assert schedule.stages.stages[0] == replace(sam()[0].stages[0], gradients={0: 0, 1: 1})
    one, two = Pass(chain(0, 1), 1, {1: 1, 0: 0}), Pass(chain(0, 1), 1, {0: 0, 1: 1})
    assert one == two and repr(one) == repr(two)


def sam_with(*stages: Pass | Local, updates: Any = None, policy: Policy | None = None) -> Schedule:
    """A schedule of other stages for the groups of ``sam``."""
    return build(StepProgram(stages, {0: 2, 1: 3} if updates is None else updates), sam()[1], policy or Policy())


FIRST, SECOND = Pass(chain(0, 1)), Pass(chain(2, 3))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda: StepProgram((), {}), ["at least one stage"]),
        (lambda: StepProgram((chain(0),), {}), ["is neither a Pass nor a Local"]),  # type: ignore[arg-type]
        (lambda: Pass(chain(0), 0), ["accumulate=0 is not an int of at least 1"]),
        (lambda: Pass(chain(0), True), ["accumulate=True"]),
        (lambda: build(sam()[0], sam()[1], Policy(), accumulate=2), ["accumulate=2", "those of its passes"]),
        (lambda: sam_with(Pass(chain(0, 9)), SECOND), ["pass 0: unit 'b' reads group 9; there are 4 groups"]),
        (lambda: sam_with(FIRST, Pass(chain(2), 1, {2: 7, -1: 3})), ["pass 1 fills the gradient of group 7", "-1"]),
        (lambda: sam_with(FIRST, Local((4,), (-1,), (2, 2)), SECOND), [
            "local 0: gradients has group 4", "local 0: updated has group -1", "local 0: makes has group 2 twice",
        ]),
        (lambda: sam_with(FIRST, SECOND, updates={0: 9, 7: None}), ["updates has group 0 with the gradient of group 9",
            "updates has group 7"]),
        (lambda: sam_with(FIRST, FIRST, SECOND), [
            "the gradient of 'a' is filled by pass 0, through 'a', and by pass 1: give the second",
        ]),
        (lambda: sam_with(Pass(chain(0, 1), 1, {0: 0, 1: 0})), [
            "the gradient of 'a' is filled by pass 0, through 'a', and by pass 0",
            "group 'b' is trainable, and no pass fills its gradient",
        ]),
        (lambda: sam_with(Local((0,)), FIRST, SECOND), [
            "local 0 reads the gradient of 'a', which no pass before it fills",
        ]),
        (lambda: sam_with(FIRST, Local((), (2,)), SECOND), [
            "local 0 waits for the update of 'a.moved', which has none pending",
        ]),
        (lambda: sam_with(FIRST, SECOND, Local((), (), (2,))), ["pass 1 reads 'a.moved' before local 0 makes it"]),
        (lambda: sam_with(FIRST, Local((), (), (2,)), Local((), (), (2,)), SECOND), [
            "'a.moved' is made by local 0 and by local 1",
        ]),
        (lambda: sam_with(Local((), (), (0,)), FIRST, SECOND), ["local 0 makes 'a', which has an update pending"]),
        (lambda: build(distilled()[0], [info("t", trainable=False), info("s", trainable=False)], Policy()), [
            "the update of 's' reads the gradient of 's', which is frozen",
        ]),
        (lambda: build(StepProgram((Pass(chain(0), 1, {0: 0}),), {}), [info("t", trainable=False)], Policy()), [
            "pass 0 fills the gradient of 't', which is frozen",
        ]),
        (lambda: sam_with(FIRST, SECOND, policy=Policy(update="in_backward")), [
            "update='in_backward' goes with a step of one pass", "use update='deferred'",
        ]),
        (lambda: build(StepProgram((Pass(chain(0)),), {0: None}), [info("a")], Policy(update="in_backward")), [
            "each trainable group updated with its own gradient",
        ]),
        (lambda: Schedule((), tuple(sam()[1]), sam()[0], Policy(), train=False), [
            "'a' has a pending update in an eval step",
        ]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(bad: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        bad()
    for word in words:
        assert word in str(caught.value)


def test_gradients_that_no_pass_reads_are_zeros_of_the_last_pass_with_its_own() -> None:
    groups = [info("a"), info("b"), info("idle")]
    stages = StepProgram((Pass(chain(0)), Pass(chain(1), 2), Pass(chain(1), gradients={})), {0: 0, 1: 1, 2: 2})
    schedule = build(stages, groups, Policy(1, 1))
    check(schedule)
    assert [op for op in ops(schedule) if op.startswith("reduce_scatter idle")] == [
        "reduce_scatter idle @1", "reduce_scatter idle @2",
    ]  # fmt: skip
    assert Call("a") in stages.passes[0].program.forward and isinstance(stages.passes[0].program, Program)
