"""What a step needs, read off fake tensors: exact for a program that a hand can follow, and true of a real step."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard.errors import PlanError
from fshard.runtime.engine.batch import microbatches
from fshard.runtime.execution.trace_program import trace
from fshard.schedule import Policy, build
from fshard.schedule.footprint import Footprint, Need, footprint
from tests.runtime.test_memory_measured import Peak
from tests.schedule.cases import group, program
from tests.shared.workers import Pools

WIDTH, ROWS, LAYERS = 64, 128, 4
X, W = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """A linear map and tanh."""
    return torch.tanh(F.linear(x, p["w"]))


@fs.unit
def scaled(p: Any, x: Tensor) -> Tensor:
    """No product of matrices: those of bfloat16 take memory for themselves, which no trace sees."""
    return x * p["w"][0]


def loss(p: Any, b: Any, unit: Any = layer) -> Tensor:
    """A stack of layers."""
    for number in range(LAYERS):
        b = unit(p[str(number)], b)
    return b.square().mean()


def make(
    mesh: fs.Mesh, policy: fs.Policy, accumulate: int = 1, precision: fs.Precision | None = None, width: int = WIDTH
) -> tuple[Any, fs.types.TrainStep]:
    """State and step of the stack."""
    params = {str(number): {"w": torch.eye(width)} for number in range(LAYERS)}
    rules, batch = [(".*", fs.fsdp("shard"))], fs.P("shard")
    plan = fs.make_plan(params, mesh, rules, units=("*",), batch=batch, precision=precision)
    rule = fs.optim.sgd(1e-3)
    fn = loss if precision is None else functools.partial(loss, unit=scaled)
    step = fs.make_train_step(fn, rule, plan, schedule=policy, accumulate=accumulate)
    return (fs.init_state(plan, rule, params=params) if mesh.transport is not None else None), step


def test_needs_of_a_stack_of_layers() -> None:
    _, step = make(fs.abstract_mesh((2,), ("shard",)), fs.Policy())
    found = trace(loss, step.plan, torch.ones(ROWS, WIDTH), True)
    assert found is not None
    root, *forward = found.needs[: LAYERS + 1]
    backward, last = found.needs[LAYERS + 1 : -1], found.needs[-1]
    assert root == Need(0, 0, 0)
    for number, need in enumerate(forward[:-1]):
        flops, moved = 2 * ROWS * WIDTH * WIDTH, 2 * X  # tanh keeps its output alone, and reads and writes
        assert need == Need((number + 2) * X, (number + 1) * X, flops, moved)
    for number, need in enumerate(backward):
        inputs = 2 if number < LAYERS - 1 else 1  # nobody asks for the gradient of the batch
        assert need.flops == inputs * 2 * ROWS * WIDTH * WIDTH
        assert W < need.peak <= (LAYERS - number + 3) * X + W
        assert (LAYERS - number - 1) * X <= need.after <= (LAYERS - number + 1) * X
    assert last.after <= 8 and last.flops == 0  # the loss


@fs.unit
def naming(p: Any, x: Tensor) -> Tensor:
    """Python keeps what has a name until the call is over; a graph keeps it until its last use."""
    first = F.linear(x, p["w"])
    second = torch.tanh(first)
    third = second * 2
    return third + 1


def test_what_names_keep_ends_with_its_last_use_in_graphs() -> None:
    _, step = make(fs.abstract_mesh((2,), ("shard",)), fs.Policy())
    fn = functools.partial(loss, unit=naming)
    found = trace(fn, step.plan, torch.ones(ROWS, WIDTH), False)
    assert found is not None
    first, second = found.needs[1], found.needs[2]
    assert (first.peak, first.bare, first.after) == (4 * X, 2 * X, X)
    assert (second.peak, second.bare) == (5 * X, 3 * X)  # the loss holds the result of the first
    schedule = build(found.program, step._runner.programs.infos, Policy(), 1, False)
    eager, graphs = (footprint(schedule, found.needs, graphs).activation_bytes for graphs in (False, True))
    assert (eager, graphs) == (5 * X, 3 * X)


def test_the_peak_is_where_items_and_activations_are_most_together() -> None:
    alone = group("a", 1024, 512, 1024, staging=512)
    schedule = build(program(("a",), {"a": (0,)}), [alone], Policy())
    needs = [Need(0, 0, 0), Need(10_000, 9_000, 0), Need(11_000, 50, 0), Need(60, 0, 0)]
    found = footprint(schedule, needs)
    assert found == Footprint(1024 + 11_000, found.op, "backward a", 1024, 0, 11_000)
    late = footprint(schedule, [Need(0, 0, 0), Need(10, 10, 0), Need(100, 50, 0), Need(40, 0, 0)])
    assert (late.where, late.gradient_bytes) == ("reduce_scatter a", 1024 + 512 + 512)
    assert str(late).startswith("at most 3.0 KiB beside the state, at op ")


def test_gradients_that_are_added_wait_beside_the_flat_one_at_the_end_of_a_backward() -> None:
    alone = group("a", 1024, 512, 1024, staging=512)
    schedule = build(program(("a",), {"a": (0,)}), [alone], Policy(accumulation="full"), 2)
    lives = schedule.memory.lifetimes["fill:a"]
    assert [str(schedule[first]) for first, _ in lives] == ["backward a @1"]
    assert schedule.memory.sizes["fill:a"] == 2 * 1024
    flat, needs = 1024 + 1024, [Need(0, 0, 0), Need(100, 90, 0), Need(9_000, 8_000, 0), Need(60, 0, 0)]
    found = footprint(schedule, needs)
    assert (found.where, found.peak_bytes) == ("backward a @1", flat + 8_000 + 2 * 1024)
    assert footprint(schedule, needs, graphs=True).peak_bytes < found.peak_bytes  # the flat one is there from the start
    high = [*needs[:2], Need(20_000, 8_000, 0), needs[3]]
    assert footprint(schedule, high).peak_bytes == flat + 20_000


def test_the_flat_gradient_of_a_unit_that_is_called_twice_comes_with_its_last_backward() -> None:
    twice = program(("a", "a"), {"a": (0,)})
    schedule = build(twice, [group("a", 1024, 512, 1024, staging=512)], Policy())
    needs = [Need(0, 0, 0), Need(10, 10, 0), Need(20, 20, 0), Need(9_000, 3_000, 0)]
    needs += [Need(8_500, 50, 0, bare=8_400), Need(0, 0, 0)]
    found = footprint(schedule, needs)
    assert (found.where, found.peak_bytes) == ("backward a #1", 1024 + 9_000)
    assert footprint(schedule, needs, graphs=True) == found  # autograd adds up what the graphs of the calls return


@pytest.mark.parametrize("policy", [fs.Policy(), fs.Policy(0, 1), fs.Policy(reshard=False), fs.Policy(2, 3)], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_microbatches_need_their_part(policy: fs.Policy, accumulate: int) -> None:
    _, step = make(fs.abstract_mesh((2,), ("shard",)), policy, accumulate)
    batch = torch.ones(ROWS, WIDTH)
    said = step.trace(batch).footprint
    found = trace(loss, step.plan, microbatches(batch, accumulate)[0], True)
    assert found is not None and said == footprint(step.trace(batch).schedule, found.needs)
    assert said.peak_bytes == said.arena_bytes + said.gradient_bytes + said.activation_bytes


def test_what_only_a_real_step_finds_has_no_footprint() -> None:
    _, step = make(fs.abstract_mesh((2,), ("shard",)), fs.Policy())
    branching = fs.make_train_step(lambda p, b: loss(p, b) * b.sum().item(), step.opt, step.plan)
    with pytest.raises(PlanError, match="run it once"):
        branching.trace(torch.ones(ROWS, WIDTH))


def measured(
    policy: fs.Policy, accumulate: int, rows: int, precision: fs.Precision | None = None, width: int = WIDTH
) -> tuple[int, int]:
    """On a rank: the peak of the first step above what was there before, and what was said of it."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        state, step = make(mesh, policy, accumulate, precision, width)
        batch = torch.ones(rows, width)
        said = step.trace(batch).footprint.peak_bytes
        with Peak() as peak:
            step(state, batch)
        return peak.above, said


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", [fs.Policy(), fs.Policy(0, 1), fs.Policy(reshard=False)], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_holds_what_was_said(pool: Pools, policy: fs.Policy, accumulate: int) -> None:
    for above, said in pool(2).run(measured, policy, accumulate, 16 * ROWS):
        assert 0.98 * said <= above <= 1.02 * said


BF16 = torch.bfloat16
EXACT = fs.Precision(BF16, inputs=True)


@pytest.mark.parametrize("precision", [None, EXACT, fs.Precision(BF16, BF16, inputs=True)], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_and_casts_that_are_kept_between_steps_are_in_it(
    pool: Pools, world: int, precision: fs.Precision | None
) -> None:
    low = 0.96 if precision == EXACT else 0.98  # gradients of leaves wait in the dtype of compute, which is shorter
    for above, said in pool(world).run(measured, fs.Policy(), 1, ROWS, precision, 4 * WIDTH):
        assert low * said <= above <= 1.02 * said


def test_graphs_hold_the_flat_gradient_from_the_begin_of_a_backward() -> None:
    """A backward makes first its largest activation, then a small gradient of a leaf."""
    alone = group("a", 1024, 512, 1024, staging=512)
    schedule = build(program(("a",), {"a": (0,)}), [alone], Policy())
    needs = [Need(0, 0, 0), Need(10_000, 9_000, 0), Need(11_000, 50, 0, bare=10_900), Need(60, 0, 0)]
    eager, graphs = footprint(schedule, needs), footprint(schedule, needs, graphs=True)
    assert eager.where == graphs.where == "backward a"
    assert graphs.peak_bytes == eager.peak_bytes - 100 + 1024


def test_what_a_need_is_without_gradients_of_leaves() -> None:
    _, step = make(fs.abstract_mesh((2,), ("shard",)), fs.Policy())
    found = trace(loss, step.plan, torch.ones(8, WIDTH), True)  # activations are an eighth of a gradient
    assert found is not None
    assert all(need.bare == need.peak for need in found.needs[: LAYERS + 1])
    for need in found.needs[LAYERS + 1 : -1]:
        assert need.after <= need.bare <= need.peak - W // 2
