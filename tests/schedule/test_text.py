"""The text form: there and back, readable, and precise about what it cannot read."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fshard.errors import ScheduleError
from fshard.schedule import Call, GroupInfo, Op, Policy, Program, Schedule, build, parse
from fshard.schedule.policy import Keep, keep
from tests.schedule.cases import CASES, gpt, info, program, recipes, replicas

NAMES = st.text(max_size=8) | st.sampled_from(
    ['a "b"', "#1", "@1", "#", "a#b", "a@1", "reads", "\\", "\n", "\u2028", "é"]
)


@given(recipes())
def test_round_trip(recipe: Any) -> None:
    schedule = build(*recipe)
    again = parse(str(schedule))
    assert again == schedule and str(again) == str(schedule) and again.hash == schedule.hash


@given(
    recipes(most=4),
    st.lists(NAMES.filter(bool).filter(lambda name: name != "root"), min_size=8, max_size=8, unique=True),
)
def test_round_trip_of_any_names(recipe: Any, names: list[str]) -> None:
    made, groups, policy, *rest = recipe
    policy = replace(policy, reshard=policy.reshard is not False)  # patterns would name units that are called otherwise
    new = dict(zip([f"u{i}" for i in range(4)], names[:4], strict=True))

    def renamed(calls: tuple[Call, ...]) -> tuple[Call, ...]:
        return tuple(Call(new[call.unit], call.index) for call in calls)

    reads = {new.get(unit, unit): ids for unit, ids in made.reads.items()}
    groups = [replace(group, name=name) for group, name in zip(groups, names[4:], strict=False)]
    schedule = build(Program(renamed(made.forward), renamed(made.backward), reads), groups, policy, *rest)
    assert parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    "reshard", [keep(last=3), keep("blocks.*"), keep('a "b"', "c d,last=2", "\\", last=1), keep("last=4", "#1")]
)
def test_what_is_kept_can_be_read_back(reshard: Keep) -> None:
    unread = Schedule((), (), Program((), (), {}), Policy(reshard=reshard, accumulation="full"))
    assert parse(str(unread)) == unread


@pytest.mark.parametrize("text", ["keep()", "keep(a)", 'keep("a"', "keep(last=)", 'keep("a",last=x)', "keep(last=0)"])
def test_what_is_kept_must_be_written_right(text: str) -> None:
    whole = str(build(*gpt(2), Policy())).replace("reshard=true", f"reshard={text}")
    with pytest.raises(ScheduleError, match="line 2 "):
        parse(whole)


@given(
    st.lists(
        st.builds(
            Op,
            st.sampled_from(("handshake", "all_gather", "forward", "reduce_scatter")),
            NAMES,
            st.integers(),
            st.integers(),
        )
    )
)
def test_round_trip_of_any_ops(ops: list[Op]) -> None:
    schedule = Schedule(tuple(ops), (info("a"),), program(("u",), {"u": (0,)}), Policy())
    assert parse(str(schedule)) == schedule


def test_ops_read_well() -> None:
    lines = str(build(*gpt(), Policy(1, 1))).splitlines()
    assert "  13 all_gather          blocks.2" in lines
    assert "  15 forward             blocks.1" in lines
    assert "  14 wait all_gather     blocks.1" in lines
    assert lines[3:6] == [
        "group root     full=4194304 shard=1048576 grad=8388608 trainable # 4.0 MiB, 1.0 MiB, 8.0 MiB",
        "  all_gather     state -> param sent=0",
        "  reduce_scatter grad -> shard sent=0 staging=2097152",
    ]
    assert "  replica_reduce shard -> own sent=50 staging=1024 over replica" in str(build(*replicas(), Policy()))
    twice = str(build(*CASES["twice"](), Policy(), accumulate=2)).splitlines()
    assert any(line.endswith("forward             a #1 @0") for line in twice)
    assert any(line.endswith("reduce_scatter      a @1") for line in twice)
    assert any(line.endswith(" all_gather          a") for line in twice)


def test_long_programs_are_wrapped() -> None:
    text = str(build(*gpt(200), Policy()))
    header = text[: text.index("\nops ")]
    assert len([line for line in header.splitlines() if line.startswith("forward ")]) > 10
    assert max(len(line) for line in header.splitlines() if not line.startswith("group")) <= 100
    assert parse(text) == build(*gpt(200), Policy())


def test_comments_and_blank_lines_are_skipped() -> None:
    schedule = build(*gpt(2), Policy())
    text = "".join(f"\n{line} # words\n\n" if i else f"{line}\n" for i, line in enumerate(str(schedule).splitlines()))
    assert parse(text) == schedule


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("fshard schedule 3", "fshard schedule 9", ["line 1 ", "'fshard schedule 9'", "must be 'fshard schedule 3'"]),
        ("fshard schedule 3", "fshard schedule 2", ["this text has version 2: build the schedule anew"]),
        ("fshard schedule 3", "schedule", ["line 1 ", "must be 'fshard schedule 3'"]),
        ("prefetch=2", "prefetch=-1", ["line 2 ", "prefetch=-1 is less than 0"]),
        ("prefetch=2", "prefetch=x", ["line 2 ", "'x' is not of the form NUMBER"]),
        ("prefetch=2 ", "", ["line 2 ", "expected prefetch=... reduces=..."]),
        ("reshard=true", "reshard=yes", ["line 2 ", "neither true nor false nor keep(...)"]),
        ("step train", "step test", ["line 3 ", "'train accumulate=1'"]),
        ("step train accumulate=1\n", "", ["the text ends too early", "step: None"]),
        ("trainable", "perhaps", ["line 4 ", "'perhaps' is neither frozen nor trainable"]),
        ("trainable", "trainable all=3", ["line 4 ", "a group is NAME full=BYTES"]),
        ("shard=1048576 ", "", ["line 4 ", "a group is NAME full=BYTES"]),
        ("state -> param sent=0", "state param sent=0", ["line 5 ", "a transfer is all_gather FROM -> TO sent=BYTES"]),
        ("state -> param sent=0", "state -> param", ["line 5 ", "a transfer is all_gather FROM -> TO sent=BYTES"]),
        ("state -> param sent=0", "state -> param sent=", ["line 5 ", "'' is not of the form NUMBER"]),
        ("state -> param sent=0", "state -> param sent=-1", ["line 5 ", "-1 bytes sent"]),
        ("all_gather     state", "all_reduce     state", ["line 5 ", "'all_reduce' is none of policy", "all_gather"]),
        ("grad -> shard", "grad => shard", ["line 6 ", "a transfer is reduce_scatter"]),
        ("group blocks.1", "group blocks.0", ["line 10 ", "group 'blocks.0' is there twice"]),
        ("unit blocks.1 reads blocks.1", "unit blocks.1 reads x", ["line 15 ", "no group 'x' stands above"]),
        ("unit blocks.1 reads", "unit blocks.1 needs", ["line 15 ", "'NAME reads GROUP ...'"]),
        ("unit blocks.1 reads", "unit root reads", ["line 15 ", "unit 'root' is there twice"]),
        ("forward blocks.0 blocks.1", "onward blocks.0 blocks.1", ["line 16 ", "'onward' is none of policy, step"]),
        ("forward blocks.0 blocks.1", "forward blocks.0 #x", ["line 16 ", "'#x' is not of the form #NUMBER"]),
        ("   0 handshake", "   1 handshake", ["line 19 ", "op 0 is due"]),
        ("   0 handshake", "   0 shake", ["line 19 ", "'shake' is none of activation_fetch, "]),
        ("2 all_gather          root", "2 all_gather", ["line 21 ", "all_gather needs a name"]),
        ("2 all_gather          root", "2 wait          root", ["line 21 ", "'wait root' is none of"]),
        ("2 all_gather          root", "2 all_gather   root root", ["line 21 ", "'root' is not of the form @NUMBER"]),
        ("2 all_gather          root", "2 all_gather   root @0 x", ["line 21 ", "'x' is left over"]),
        ("2 all_gather          root", '2 all_gather   "root', ["line 21 ", "'  "]),
    ],
)
def test_what_cannot_be_read_is_named(old: str, new: str, words: list[str]) -> None:
    text = str(build(*gpt(2), Policy()))
    assert old in text
    with pytest.raises(ScheduleError) as caught:
        parse(text.replace(old, new, 1))
    for word in words:
        assert word in str(caught.value)


def test_a_text_cut_short() -> None:
    text = str(build(*gpt(2), Policy()))
    with pytest.raises(ScheduleError, match="the text ends too early"):
        parse("\n".join(text.splitlines()[:-1]))
    with pytest.raises(ScheduleError, match="the text ends too early"):
        parse("")


@given(st.data())
def test_damage_never_escapes_as_another_error(data: st.DataObject) -> None:
    text = str(build(*gpt(2), Policy()))
    at = data.draw(st.integers(0, len(text) - 1))
    cut = data.draw(st.integers(0, 5))
    damaged = text[:at] + data.draw(st.text(max_size=3)) + text[at + cut :]
    try:
        schedule = parse(damaged)
    except (ScheduleError, ValueError) as error:
        assert type(error).__name__ in ("ScheduleError", "PlanError")
    else:
        assert parse(str(schedule)) == schedule


def test_sizes_for_people() -> None:
    group = GroupInfo("g", 2**40 * 3, 1023, 1536, True)
    assert "# 3.0 TiB, 1023 B, 1.5 KiB" in str(Schedule((), (group,), Program((), (), {}), Policy()))
