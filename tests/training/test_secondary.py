"""Secondary shards: gathers after the first are over the fast axis alone, and change no bit."""

import dataclasses
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.errors import PlanError, ScheduleError
from fshard.schedule import Policy, check, parse
from fshard.schedule.costs import Costs, Link
from fshard.schedule.simulate import simulate
from tests.shared.workers import Pools
from tests.training.wire_cases import LR, STEPS, batch, loss_fn, start

NAMES, WAY = ("host", "local"), fs.secondary("local")
Result = tuple[list[tuple[float, float]], dict[str, torch.Tensor], list[str]]


def plan_of(mesh: fs.Mesh, **more: Any) -> fs.Plan:
    rules = [("out.*", P()), fs.Rule(".*", P(flat=NAMES), memory_kind=more.pop("memory", None))]
    return fs.make_plan(start(), mesh, rules, batch=P(NAMES), units=("one", "two"), **more)


def trained(mesh: fs.Mesh, policy: fs.Policy, accumulate: int = 1, **more: Any) -> Result:
    """On a rank: losses and norms, parameters, and what ran in the last step."""
    plan, opt = plan_of(mesh, **more), fs.optim.sgd(LR)
    step = fs.make_train_step(loss_fn, opt, plan, accumulate=accumulate, schedule=policy, clip_norm=0.5, debug=True)
    state, seen = fs.init_state(plan, opt, params=start()), []
    for number in range(STEPS):
        state, metrics = step(state, batch(number, mesh.rank))
        seen.append((float(metrics.loss), float(metrics.grad_norm)))
    whole = fs.unshard(state.params, plan)
    params = {f"{unit}.{name}": whole[unit][name] for unit in whole for name in whole[unit]}
    return seen, params, [str(op) for op in step.record]


def played(policy: fs.Policy, sizes: tuple[int, int] = (2, 2), **more: Any) -> list[Result]:
    mesh = fs.virtual_mesh(sizes, NAMES)
    found: Any = mesh.run(lambda: trained(mesh, policy, **more))
    return list(found)


def same(one: list[Result], other: list[Result]) -> None:
    for (seen, params, _), (others, whole, _) in zip(one, other, strict=True):
        assert seen == others
        assert all(torch.equal(params[path], whole[path]) for path in params)


CASES: dict[str, dict[str, Any]] = {
    "once": {},
    "microbatches": {"accumulate": 2},
    "three within": {"sizes": (2, 3)},
    "alone within": {"sizes": (2, 1)},
    "compute in bf16": {"precision": fs.Precision(compute=torch.bfloat16)},
    "compressed": {"wire": fs.Wire(gather={"host+local": "int8"}, reduce={"host+local": "int8"}), "accumulate": 2},
    "in host memory": {"memory": "unpinned_host"},
}


OFTEN = ("microbatches", "compressed")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in CASES]
)
def test_secondary_shards_change_no_bit(name: str) -> None:
    policy = fs.Policy(prefetch=0, reduces=1)
    found = played(dataclasses.replace(policy, reshard=WAY), **CASES[name])
    same(played(policy, **CASES[name]), found)
    for _, _, ran in found:
        assert ran.count("all_gather layer(one)") <= 1
        for unit in ("one", "two"):
            assert ran.count(f"all_gather {unit}") == 1
            assert ran.count(f"regather {unit}") == ran.count(f"reshard {unit}") >= (unit == "one")
            assert ran.count(f"free {unit}") == 1


def schedule_of(policy: fs.Policy, accumulate: int = 1, sizes: tuple[int, int] = (2, 4)) -> fs.Schedule:
    mesh = fs.abstract_mesh(sizes, NAMES)
    step = fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan_of(mesh), accumulate=accumulate, schedule=policy)
    schedule: fs.Schedule = step.trace(tuple(x.repeat(accumulate, 1) for x in batch(0, 0))).schedule
    return schedule


def test_only_the_first_gather_crosses_the_slow_link() -> None:
    costs = Costs(links={"local": Link(1e9)}, link=Link(1e6))
    for accumulate in (1, 3):
        usual = schedule_of(Policy(prefetch=0, reduces=1), accumulate)
        found = schedule_of(Policy(prefetch=0, reduces=1, reshard=WAY), accumulate)
        gathers = [op.target for op in found if op.kind == "all_gather"]
        assert len(gathers) == len({*gathers})
        assert {op.target for op in usual if op.kind == "all_gather"} == {*gathers}
        assert simulate(found, costs).seconds < simulate(usual, costs).seconds


def test_the_text_the_memory_and_the_check() -> None:
    schedule = schedule_of(Policy(prefetch=0, reduces=1, reshard=WAY))
    assert 'reshard=secondary("local")' in str(schedule)
    assert parse(str(schedule)) == schedule
    group = next(group for group in schedule.groups if group.name == "one")
    again = group.transfer("regather")
    assert again is not None
    assert (again.axes, again.sent, group.second_bytes) == ("local", 3 * group.full_bytes // 4, group.full_bytes // 4)
    ops = [str(op) for op in schedule]
    held = ops.index("reshard one"), ops.index("free one")
    assert schedule.memory.lifetimes["second:one"] == (held,)
    assert schedule.memory.sizes["second:one"] == -(-group.second_bytes // 256) * 256
    for wrong, message in (
        (("reshard", "free"), "one is gathered again from secondary shards"),
        (("free", "reshard"), "one is not gathered again from secondary shards"),
        (("regather", "all_gather"), "one has secondary shards"),
        (("all_gather", "regather"), "one has no secondary shards"),
    ):
        was, becomes = wrong
        changed = tuple(
            dataclasses.replace(op, kind=op.kind.replace(was, becomes)) if op.target == "one" and was in op.kind else op
            for op in schedule.ops
        )
        with pytest.raises(ScheduleError, match=message):
            check(dataclasses.replace(schedule, ops=changed))


def test_groups_that_it_does_not_concern() -> None:
    """Replicated ones, and those that the fast axis alone shards."""
    mesh = fs.abstract_mesh((2, 2), NAMES)
    rules = [("one.*", fs.fsdp("local")), ("two.*", fs.fsdp("host")), (".*", P())]
    plan = fs.make_plan(start(), mesh, rules, batch=P(NAMES), units=("one", "two"))
    step = fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan, schedule=Policy(prefetch=0, reduces=1, reshard=WAY))
    groups = {group.name: group for group in step.trace(batch(0, 0)).schedule.groups}
    assert not any(group.transfer("regather") for group in groups.values())


BAD = {
    "an unknown axis": (
        lambda: schedule_of(Policy(reshard=fs.secondary("pod"))), "'pod', and the axes of the mesh are host, local",
    ),
    "no axis": (fs.secondary, "names no axis"),
    "an axis that is no name": (lambda: fs.secondary(1), "1 is not the name of an axis"),  # type: ignore[arg-type]
    "a name alone": (lambda: Policy(reshard="local"), r"fs\.secondary\(\.\.\.\)"),  # type: ignore[arg-type]
    "a step of parts": (
        lambda: fs.make_step(
            lambda state, rows: (state, {}), plan_of(fs.abstract_mesh((2, 2), NAMES)), schedule=Policy(reshard=WAY)
        ),
        "a step of parts gathers several versions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize("text", ["secondary()", "secondary(local)", 'secondary("local"', "secondary(1)"])
def test_it_must_be_written_right(text: str) -> None:
    whole = str(schedule_of(Policy(reshard=WAY))).replace('reshard=secondary("local")', f"reshard={text}")
    with pytest.raises(ScheduleError, match="line 2 "):
        parse(whole)


def real(policy: fs.Policy) -> Result:
    """On a real rank."""
    with fs.make_mesh((2, -1), NAMES) as mesh:
        return trained(mesh, policy)


@pytest.mark.slow
def test_real_ranks_equal_played_ranks(pool: Pools) -> None:
    policy = fs.Policy(prefetch=0, reduces=1, reshard=WAY)
    same(played(policy), pool(4).run(real, policy))
