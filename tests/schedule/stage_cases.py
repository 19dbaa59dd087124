"""Steps of several passes to schedule: by hand, and any."""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from fshard.schedule import GroupInfo, Local, Pass, Policy, Program, StepProgram
from fshard.schedule.policy import keep
from tests.schedule.cases import SENT, calls, group, info, program

Step = tuple[StepProgram, list[GroupInfo]]


def chain(*groups: int, names: Sequence[str] = "ab") -> Program:
    """Units in a row, each reading one group."""
    units = names[: len(groups)]
    return program(units, {unit: (g,) for unit, g in zip(units, groups, strict=True)})


def sam() -> Step:
    """A gradient, weights moved along it, and the gradient there, which is what updates the weights."""
    move = Local(gradients=(0, 1), updated=(0, 1), makes=(2, 3))
    stages = StepProgram((Pass(chain(0, 1)), move, Pass(chain(2, 3))), {0: 2, 1: 3})
    return stages, [info("a"), info("b"), info("a.moved"), info("b.moved")]


def gan() -> Step:
    """Two losses of one plan, which read what both have and fill the gradients of one each."""
    judge, make = chain(0, 1, names=("maker", "judge")), chain(0, 1, names=("maker", "judge"))
    stages = StepProgram((Pass(judge, gradients={1: 1}), Pass(make, gradients={0: 0})), {0: 0, 1: 1})
    return stages, [info("maker"), info("judge")]


def surgery() -> Step:
    """Two gradients of the same parameters, of which code after both makes one."""
    again = info("a.second", gathered=False)
    merge = Local(gradients=(0, 1), updated=())
    stages = StepProgram((Pass(chain(0), gradients={0: 0}), Pass(chain(0), 2, {0: 1}), merge), {0: 0})
    return stages, [info("a"), again]


def distilled() -> Step:
    """A frozen model that runs forward, and one that learns from it."""
    teacher = Program(calls("teacher"), (), {"teacher": (0,)})
    stages = StepProgram((Pass(teacher, gradients={}), Pass(chain(1, names=("student",)))), {1: 1})
    return stages, [info("teacher", trainable=False), info("student")]


def replicas() -> Step:
    """Weights moved where ranks sum over replicas and update parts; a gradient that no update and no code reads."""
    sent: dict[str, Any] = {"all_gather": 100, "reduce_scatter": 100, "replica_reduce": 50}
    groups = [
        info("a", own=512, sums=1024, update_gather=50, **sent),
        info("b", own=512, update_gather=10, **sent),
        info("a.moved", own=512, **sent),
        info("root", gathered=False, reduced=False),
        info("b.spare", gathered=False, reduce_scatter=10),
    ]
    first = Pass(program(("a", "b"), {"root": (3,), "a": (0,), "b": (1,)}), 2, {0: 0, 3: 3})
    second = Pass(program(("a", "b", "a"), {"a": (2,), "b": (1,)}), 1, {1: 1, 2: 2})
    third = Pass(program(("b",), {"b": (1,)}), 1, {1: 4})
    stages = (first, Local(gradients=(0,), updated=(0, 3), makes=(2,)), second, Local(gradients=(2, 0)), third)
    return StepProgram(stages, {0: 2, 1: 1, 3: 3}), groups


STEPS: dict[str, Callable[[], Step]] = {
    "sam": sam,
    "gan": gan,
    "surgery": surgery,
    "distilled": distilled,
    "replicas": replicas,
    "locals_alone": lambda: (StepProgram((Local(updated=(0,)), Local()), {0: None, 1: None}), [
        info("a", trainable=False, update_gather=9), info("b", trainable=False, gathered=False)
    ]),
}  # fmt: skip


@st.composite
def any_group(draw: st.DrawFn, name: str, trainable: bool, updated: bool) -> GroupInfo:
    """A group of any sizes and transfers."""
    sizes = st.integers(0, 5000)
    full, grad, stage = draw(sizes), draw(sizes) * trainable, draw(sizes) * trainable
    sent = {kind: draw(sizes) * draw(st.booleans()) for kind in SENT}
    if grad >= full // 2 and draw(st.booleans()):
        sent["reduce_scatter"] = grad - full // 2  # what travels has the dtype of the shard
    sent["update_gather"] *= updated
    held = {kind: draw(sizes) * draw(st.booleans()) for kind in ("sums", "own")}
    does = {"gathered": draw(st.booleans()), "reduced": draw(st.booleans()), "trainable": trainable}
    return group(name, full, full // 2, grad, staging=stage, **does, **held, **sent)


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepProgram, tuple[GroupInfo, ...], Policy]:
    """Arguments for ``build``: any passes, with any code between them."""
    states = draw(st.integers(0, 3))
    pending = [g for g in range(states) if draw(st.booleans())]
    count, filled, there, stages = states, list[int](), list(range(states)), list[Pass | Local]()
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 2)):
            fills = draw(st.lists(st.sampled_from(there), unique=True, max_size=3)) if there else []
            gradients = {}
            for read in fills:
                if read in filled or draw(st.integers(0, 4)) == 0:  # a gradient in a group of its own
                    gradients[read], count = count, count + 1
                else:
                    gradients[read] = read
            filled += gradients.values()
            stages.append(Pass(draw(_programs(there)), draw(st.integers(1, 2)), gradients))
        else:
            made = range(count, count + draw(st.integers(0, 2)))
            count += len(made)
            there += made
            stages.append(Local(draw(_some(filled)), draw(_some(pending)), tuple(made)))
    updates = {g: draw(st.sampled_from([None, *filled])) for g in pending}
    groups = [draw(any_group(f"g{g}", g in filled, g in updates)) for g in range(count)]
    called = sorted({call.unit for each in stages if isinstance(each, Pass) for call in each.program.forward})
    units = draw(st.lists(st.sampled_from(called), max_size=2)) if called else []
    last = draw(st.integers(0, 2))
    reshard = keep(*units, last=last) if units or last else draw(st.booleans())
    accumulation = draw(st.sampled_from(("sharded", "full")))
    policy = Policy(draw(st.integers(0, 4)), draw(st.integers(1, 4)), reshard, "deferred", accumulation)
    return StepProgram(tuple(stages), updates), tuple(groups), policy


def _some(of: Sequence[int]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.sampled_from(of), unique=True, max_size=2).map(tuple) if of else st.just(())


@st.composite
def _programs(draw: st.DrawFn, there: Sequence[int]) -> Program:
    """Any calls of units that read any of these groups, in any backward order."""
    units = [f"u{i}" for i in range(draw(st.integers(0, 3)))]
    reads = {unit: draw(_some(there)) for unit in ("root", *units)}
    forward = calls(*draw(st.lists(st.sampled_from(units), max_size=4))) if units else ()
    backward = draw(st.permutations(forward)) if draw(st.booleans()) else list(reversed(forward))
    skipped = draw(st.sets(st.sampled_from(forward))) if forward else set()
    return Program(forward, tuple(call for call in backward if call not in skipped), reads)
