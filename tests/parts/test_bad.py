"""What a step function over parts must not do: a clear error on all ranks, and every state as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from tests.parts.plain import batch, first, local, plan_on, second, whole
from tests.shared.bad import Raised, attempt

OPT = fs.optim.sgd(0.05, momentum=0.9)
BIASES, REST = r".*bias", r".*\.(inp|out|norm)|scale"


class Tools:
    """Parts on a rank, and things to take wrongly."""

    def __init__(self, mesh: fs.Mesh) -> None:
        self.mesh, self.plan = mesh, plan_on(mesh)
        self.other = fs.make_plan(whole(), mesh, [(r".*", fs.fsdp("shard"))], batch=fs.P("shard"))
        self.grad, self.second = fs.value_and_grad(first, self.plan), fs.value_and_grad(second, self.plan)
        self.biases = fs.value_and_grad(first, self.plan, only=BIASES)
        self.elsewhere = fs.value_and_grad(first, self.other)
        self.update, self.update_biases = fs.make_update(OPT, self.plan), fs.make_update(OPT, self.plan, only=BIASES)
        self.update_rest = fs.make_update(OPT, self.plan, only=REST)
        self.stranger = fs.init_state(self.other, OPT, params=whole(3))


def data(batch: Any) -> Any:
    """What passes are given."""
    return {name: batch[name] for name in ("x", "y", "w")}


def a_state_in_the_batch_of_a_pass(t: Tools, state: Any, batch: Any) -> Any:
    """A pass reads the parameters of one state."""
    return t.update(state, t.grad(state, batch)[1])


def gradients_of_another_plan(t: Tools, state: Any, batch: Any) -> Any:
    """The layout is another one."""
    _, grads = t.elsewhere(batch["stranger"], data(batch))
    return t.update(state, grads)


def gradients_of_other_leaves(t: Tools, state: Any, batch: Any) -> Any:
    """All gradients, for an update of some leaves."""
    return t.update_biases(state, t.grad(state, data(batch))[1])


def gradients_of_too_few_leaves(t: Tools, state: Any, batch: Any) -> Any:
    """Some gradients, for an update of all leaves."""
    return t.update(state, t.biases(state, data(batch))[1])


def the_leaves_that_only_left_out(t: Tools, state: Any, batch: Any) -> Any:
    """Gradients of the others."""
    return t.update_rest(state, t.biases(state, data(batch))[1])


def two_updates_of_a_leaf(t: Tools, state: Any, batch: Any) -> Any:
    """Both by gradients of the same parameters."""
    _, one = t.grad(state, data(batch))
    _, two = t.second(state, data(batch))
    return t.update(t.update(state, one)[0], two)


def no_state(t: Tools, state: Any, batch: Any) -> Any:
    """Parameters are none."""
    return state.params, {"loss": t.grad(state, data(batch))[0]}


def nothing(t: Tools, state: Any, batch: Any) -> None:
    """It forgets to return."""
    t.grad(state, data(batch))


def a_state_alone(t: Tools, state: Any, batch: Any) -> Any:
    """Without metrics."""
    return t.update(state, t.grad(state, data(batch))[1])[0]


def the_state_of_the_batch(t: Tools, state: Any, batch: Any) -> Any:
    """It was given to be read."""
    return batch["frozen"], {"loss": t.grad(state, data(batch))[0]}


def an_update_of_the_batch(t: Tools, state: Any, batch: Any) -> Any:
    """It was given to be read."""
    return t.update(batch["frozen"], t.grad(batch["frozen"], data(batch))[1])


def one_state_twice(t: Tools, state: Any, batch: Any) -> Any:
    """Of one that it was given."""
    return (state, state), {"loss": t.grad(state, data(batch))[0]}


def a_state_in_a_closure(t: Tools, state: Any, batch: Any) -> Any:
    """It is no argument of the step."""
    return t.stranger, {"loss": t.grad(state, data(batch))[0]}


def a_state_for_gradients(t: Tools, state: Any, batch: Any) -> Any:
    """The arguments are mixed up."""
    return t.update(state, state)


def swapped_arguments(t: Tools, state: Any, batch: Any) -> Any:
    """The batch comes second."""
    return t.update(state, t.grad(data(batch), state)[1])


def optimizer_state(t: Tools, state: Any, batch: Any) -> Any:
    """It is there when the step is over."""
    return state, {"momentum": state.opt_state}


def another_dtype(t: Tools, state: Any, batch: Any) -> Any:
    """An unknown leaf."""
    grads = t.grad(state, data(batch))[1]
    return t.update(state, {**grads, "more": torch.zeros(1)})


MISTAKES: list[tuple[Callable[[Tools, Any, Any], Any], str, tuple[str, ...]]] = [
    (a_state_in_the_batch_of_a_pass, "BatchError", ("holds 2 states", "tensors alone")),
    (gradients_of_another_plan, "TreeError", ("grads",)),
    (gradients_of_other_leaves, "TreeError", ("gen.0.inp", "the gradients of the leaves that it updates")),
    (gradients_of_too_few_leaves, "TreeError", ("missing", "gen.0.inp")),
    (the_leaves_that_only_left_out, "TreeError", ("missing", "gen.0.inp")),
    (two_updates_of_a_leaf, "TreeError", ("twice", "fs.tree.add")),
    (no_state, "LossError", ("returned no state", "return (state, metrics)")),
    (nothing, "LossError", ("None", "return (state, metrics)")),
    (a_state_alone, "LossError", ("return (state, metrics)",)),
    (the_state_of_the_batch, "LossError", ("of the batch", "only read")),
    (an_update_of_the_batch, "TreeError", ("of the batch is only read",)),
    (one_state_twice, "LossError", ("twice", "return each of them once")),
    (a_state_in_a_closure, "TreeError", ("not in a closure",)),
    (a_state_for_gradients, "TreeError", ("grads is a state",)),
    (swapped_arguments, "TreeError", ()),
    (optimizer_state, "StateError", ("the step returns",)),
    (another_dtype, "TreeError", ("unknown", "more")),
]


def make_mistakes(mesh: fs.Mesh) -> list[tuple[str, Raised | None, bool]]:
    """On a rank: what each mistake raised, and whether the state went on as without it."""
    tools, out = Tools(mesh), []
    given = {**local(batch(0), tools.plan)}

    def good(state: Any, batch: Any) -> Any:
        state, metrics = tools.update(state, tools.grad(state, batch)[1])
        return state, metrics.grad_norm

    step, want = fs.make_step(good, tools.plan), _start(tools)
    for _ in range(2):
        want = step(want, given)[0]
    for fn, *_ in MISTAKES:
        state = step(_start(tools), given)[0]
        frozen, stranger = _start(tools), fs.init_state(tools.other, OPT, params=whole(2))
        bad = fs.make_step(lambda state, batch, fn=fn: fn(tools, state, batch), tools.plan)
        raised = attempt(lambda bad=bad, s=state, f=frozen, o=stranger: bad(s, {**given, "frozen": f, "stranger": o}))
        after = step(state, given)[0]
        same = all(map(torch.equal, _all(after), _all(want))) and all(
            map(torch.equal, _all(frozen), _all(_start(tools)))
        )
        out.append((fn.__name__, raised, same))
    return out


def _start(tools: Tools) -> fs.TrainState:
    return fs.init_state(tools.plan, OPT, params=whole())


def _all(state: fs.TrainState) -> list[Tensor]:
    return [x.clone() for x in tree.leaves((state.params, state.opt_state))]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_mistakes_are_errors_alike_and_leave_the_state(world: int) -> None:
    ranks = fs.virtual_mesh((world,), ("shard",)).run(lambda: make_mistakes(fs.make_mesh((world,), ("shard",))))
    wrong = []
    for (fn, kind, says), told in zip(MISTAKES, zip(*ranks, strict=True), strict=True):
        for rank, (name, raised, same) in enumerate(told):
            assert name == fn.__name__
            if raised is None or kind not in raised.kinds or any(part not in raised.text for part in says):
                wrong.append(f"{name} on rank {rank}: {raised}")
            elif raised.text.splitlines()[0] != told[0][1].text.splitlines()[0] or not same:
                wrong.append(f"{name} on rank {rank}: another error, or another state")
    assert not wrong, "\n".join(wrong)


def test_a_state_is_given_once() -> None:
    tools = Tools(fs.make_mesh((1,), ("shard",)))
    state = _start(tools)
    step = fs.make_step(lambda states, batch: (states, {}), tools.plan)
    with pytest.raises(fs.errors.TreeError, match="one state was given twice"):
        step((state, state), batch(0))
    assert not state.memory.donated


def test_a_part_on_one_rank_alone() -> None:
    def play() -> tuple[Raised | None, float]:
        tools = Tools(fs.make_mesh((2,), ("shard",)))
        given, state = local(batch(0), tools.plan), _start(tools)

        def fn(state: Any, batch: Any) -> Any:
            if tools.mesh.rank == 1:
                tools.second(state, batch)
            return tools.update(state, tools.grad(state, batch)[1])

        raised = attempt(lambda: fs.make_step(fn, tools.plan)(state, given))
        return raised, float(tools.grad(state, given)[0])

    (one, loss), (two, other) = fs.virtual_mesh((2,), ("shard",)).run(play)
    assert one is not None and two is not None and loss == other
    assert {"ScheduleError", "ReplicationError"} & {*one.kinds} and one.text == two.text and "rank 1" in one.text


def test_options_that_cannot_be() -> None:
    tools = Tools(fs.make_mesh((1,), ("shard",)))
    with pytest.raises(fs.errors.PlanError, match="only="):
        fs.value_and_grad(first, tools.plan, only="gen.*.nothing")
    with pytest.raises(fs.errors.PlanError, match="only="):
        fs.make_update(OPT, tools.plan, only="*.bias")
    with pytest.raises(fs.errors.PlanError, match="accumulate=0"):
        fs.value_and_grad(first, tools.plan, accumulate=0)
    with pytest.raises(fs.errors.PlanError, match=r"make_update\(opt, plan\)"):
        fs.make_update(tools.plan, OPT)  # type: ignore[arg-type]
    with pytest.raises(fs.errors.PlanError):
        fs.make_step(tools.plan, first)  # type: ignore[arg-type]
    with pytest.raises(fs.errors.TreeError, match="holds no state"):
        fs.make_step(lambda s, b: (s, {}), tools.plan)(batch(0), _start(tools))


def test_gradients_are_spent_by_an_update_that_donates() -> None:
    tools = Tools(fs.make_mesh((1,), ("shard",)))
    state, given = _start(tools), batch(0)
    _, grads = tools.grad(state, given)
    state, _ = tools.update(state, grads)
    after = _all(state)
    for use in (
        lambda: tools.update(state, grads), lambda: fs.tree.scale(grads, 2.0), lambda: grads["scale"] + 1.0,
        lambda: fs.tree.norm(grads, tools.plan),
    ):  # fmt: skip
        with pytest.raises(fs.errors.DonatedError, match="clone them before the update"):
            use()
    assert all(map(torch.equal, _all(state), after))


def test_gradients_keep_their_values_where_nothing_is_donated() -> None:
    tools = Tools(fs.make_mesh((1,), ("shard",)))
    update = fs.make_update(OPT, tools.plan, clip_norm=0.01, donate=False)
    _, grads = tools.grad(_start(tools), batch(0))
    before = [x.clone() for x in tree.leaves(grads)]
    _all(update(_start(tools), grads)[0])
    assert all(map(torch.equal, tree.leaves(grads), before))


def test_what_a_step_function_keeps_is_over_with_its_step() -> None:
    tools, kept = Tools(fs.make_mesh((1,), ("shard",))), list[Any]()

    def fn(state: Any, batch: Any) -> Any:
        _, grads = tools.grad(state, batch)
        if kept and batch["add"]:
            grads = fs.tree.add(grads, kept[-1][0])
        kept.append((grads, state.params))
        return tools.update(state, grads)

    step, state = fs.make_step(fn, tools.plan), _start(tools)
    for number in range(3):
        state, _ = step(state, {**batch(number), "add": False})
        for held in kept[-1]:
            with pytest.raises(fs.errors.StateError, match="after its step was over"):
                tree.leaves(held)[0] + 1
    before = _all(state)
    with pytest.raises(fs.errors.StateError, match="in its metrics"):
        step(state, {**batch(3), "add": True})
    assert all(map(torch.equal, _all(state), before))


def test_trees_of_a_step_are_made_once() -> None:
    tools, seen = Tools(fs.make_mesh((1,), ("shard",))), list[int]()

    def fn(state: Any, batch: Any) -> Any:
        _, grads = tools.grad(state, batch)
        seen.append(id(tree.leaves(grads)[0]))
        return tools.update(state, grads)

    step, state = fs.make_step(fn, tools.plan), _start(tools)
    for number in range(4):
        state, _ = step(state, batch(number))
    assert len(set(seen[1:])) == 1


def test_a_state_of_another_optimizer_is_refused() -> None:
    tools = Tools(fs.make_mesh((1,), ("shard",)))
    other = fs.init_state(tools.plan, fs.optim.adamw(0.1), params=whole())
    before = _all(other)
    step = fs.make_step(lambda state, batch: tools.update(state, tools.grad(state, batch)[1]), tools.plan)
    with pytest.raises(fs.errors.TreeError, match="this optimizer"):
        step(other, batch(0))
    assert all(map(torch.equal, _all(other), before))


def test_a_state_on_an_equal_mesh_says_so() -> None:
    tools, other = (Tools(fs.make_mesh((1,), ("shard",))) for _ in range(2))
    step = fs.make_step(lambda state, batch: tools.update(state, tools.grad(state, batch)[1]), tools.plan)
    with pytest.raises(fs.errors.PlanError, match="state 0 and the step lie on two meshes, which are equal"):
        step(_start(other), batch(0))
    mixed = fs.make_step(lambda state, batch: tools.update(state, other.grad(state, batch)[1]), tools.plan)
    with pytest.raises(fs.errors.PlanError, match="the plan of a part and the step lie on two meshes"):
        mixed(_start(tools), batch(0))


PIECEWISE: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda given, other: ((given["one"], given["one"]), {}), "state 0, twice"),
    (lambda given, other: ((given["one"], given["frozen"]), {}), "state 2 of the batch"),
    (lambda given, other: (given["one"], {}), "1 states, and was given 2"),
    (lambda given, other: ((given["one"], other), {}), "not a state of the step"),
    (lambda given, other: ({}, {}), "returned no state"),
]


@pytest.mark.parametrize(("returns", "says"), PIECEWISE, ids=[says for _, says in PIECEWISE])
def test_a_step_part_by_part_returns_its_states(returns: Any, says: str) -> None:
    tools = Tools(fs.make_mesh((1,), ("shard",)))
    states, frozen, other = (_start(tools), _start(tools)), _start(tools), _start(tools)

    def fn(states: Any, batch: Any) -> Any:
        loss, grads = tools.grad(states[0], data(batch))
        assert loss < 1e9  # asks
        one, _ = tools.update(states[0].replace(params=states[0].params), grads)
        return returns({"one": one, "frozen": batch["frozen"]}, other)

    with pytest.raises((fs.errors.LossError, fs.errors.TreeError), match=says), pytest.warns(match="run one by one"):
        fs.make_step(fn, tools.plan)(states, {**batch(0), "frozen": frozen})
    assert all(map(torch.equal, _all(states[0]), _all(_start(tools)))) and not states[1].memory.donated


def test_use_mesh_inside_of_a_step_function() -> None:
    tools = Tools(fs.make_mesh((1,), ("shard",)))

    def fn(state: Any, batch: Any) -> Any:
        with fs.collectives.use_mesh(tools.mesh):
            params = {name: leaf * 1.0 for name, leaf in tree.paths(state.params)}  # by hand: without a mark
            loss, grads = tools.grad(tree.nest(params), batch)
        return tools.update(state, grads)[0], loss

    step = fs.make_step(fn, tools.plan)
    step(_start(tools), batch(0))
    assert step.record == step.schedule.ops and len(step.record) > 3


def test_tensors_that_a_trace_has_left_in_a_closure() -> None:
    with fs.make_mesh((1,), ("shard",)) as mesh:
        tools, kept = Tools(mesh), [torch.zeros((), dtype=torch.float64)]

        def averages(state: Any, batch: Any) -> Any:
            loss, grads = tools.grad(state.params, data(batch))
            kept[0] = 0.9 * kept[0] + 0.1 * loss
            return tools.update(state, grads)[0], {"average": kept[0]}

        step = fs.make_step(averages, tools.plan)
        state = fs.init_state(tools.plan, OPT, params=whole())
        with pytest.raises(fs.errors.LossError, match="keeps tensors from one call to the next"):
            for number in range(2):
                state, _ = step(state, local(batch(number), tools.plan))
