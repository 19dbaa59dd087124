"""A state is a value: a frozen pytree that is mapped, copied, pickled and compared, and read without other ranks."""

import copy
import dataclasses
import functools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P, tree
from fshard.errors import DonatedError, ScheduleError, StateError, TreeError
from tests.shared.bad import UNITS, attempt, weights
from tests.shared.workers import Pools
from tests.state.test_state import batch, loss

FLAT = [(r"first\.b", P()), (r".*", fs.fsdp("shard"))]
WHOLE = [fs.Rule(r".*", fs.fsdp("shard"), align="leaf")]
PARTED = [fs.Rule(r"middle.*", P(), opt=fs.fsdp("shard")), *FLAT]
ADAMW = fs.optim.adamw(0.01)

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "adamw": (ADAMW, FLAT),
    "every": (fs.optim.every(3, ADAMW), FLAT),
    "ema": (fs.optim.ema(fs.optim.sgd(0.1, momentum=0.9), 0.9), FLAT),
    "adafactor": (fs.optim.adafactor(0.01), WHOLE),
    "adamw8bit": (fs.optim.adamw8bit(0.01), [fs.Rule(r".*", fs.fsdp("shard"), align=256)]),
}


def start(mesh: fs.Mesh, opt: Any = ADAMW, rules: Any = FLAT, **options: Any) -> tuple[fs.TrainState, Any]:
    """A state and a step."""
    plan = fs.make_plan(weights(), mesh, rules, batch=P("shard"), units=UNITS)
    return fs.init_state(plan, opt, params=weights()), fs.make_train_step(loss, opt, plan, clip_norm=0.5, **options)


def train(state: fs.TrainState, step: Any, until: int) -> fs.TrainState:
    """Make steps up to this number."""
    mesh = state.plan.mesh
    while state.step < until:
        state, _ = step(state, batch(state.step, mesh.rank, mesh.size))
    return state


def cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


COPIES: dict[str, Callable[[fs.TrainState], fs.TrainState]] = {
    "map": lambda state: tree.map(cloned, state),
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
}


def copied(names: list[str]) -> list[str]:
    """On a rank: copies of a state in the middle of training, which are equal to it, and train on as it does."""
    wrong = []
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        for name in names:
            opt, rules = OPTIMIZERS[name]
            state, step = start(mesh, opt, rules)
            state = train(state, step, 4)
            made = {how: make(state) for how, make in COPIES.items()}
            wrong += [f"{name}, {how}: differs" for how, other in made.items() if other != state or state != other]
            state = train(state, step, 8)
            for how, other in made.items():
                if other.step != 4 or other == state:
                    wrong.append(f"{name}, {how}: is not of its own")
                if train(other, step, 8) != state:
                    wrong.append(f"{name}, {how}: trains on otherwise")
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_copies_are_equal_and_train_on_with_equal_bits(pool: Pools, world: int) -> None:
    assert pool(world).run(copied, list(OPTIMIZERS)) == [[]] * world


def here(**options: Any) -> tuple[fs.TrainState, Any]:
    """A state and a step in this process, after one step."""
    state, step = start(fs.make_mesh((1,), ("shard",)), **options)
    return train(state, step, 1), step


def test_no_attribute_can_be_set() -> None:
    state, _ = here()
    for name in ("step", "seed", "params", "opt_state", "scale", "count", "late", "past", "plan", "memory", "other"):
        with pytest.raises(AttributeError):
            setattr(state, name, 1)
    with pytest.raises(AttributeError):
        del state.step
    assert dataclasses.replace(state, step=7).step == 7 and state.step == 1


def test_leaves_are_tensors_and_numbers_by_name() -> None:
    state, _ = here(opt=fs.optim.every(2, ADAMW))
    names = tree.names(state, "state")
    named = dict(zip(names, tree.leaves(state), strict=True))
    assert named["state.step"] == 1 and named["state.seed"] == 0 and named["state.scale"] is None
    assert torch.equal(named["state.params['middle']['w']"], state.params["middle"]["w"])
    assert named["state.opt_state['carried']['last']['b']"].any()
    assert all(leaf is None or isinstance(leaf, Tensor | int | float) for leaf in named.values())


def test_a_state_may_hold_any_leaves_until_it_is_used() -> None:
    state, step = here()
    shapes = tree.map(lambda leaf: leaf.shape if isinstance(leaf, Tensor) else leaf, state)
    assert shapes.params["middle"]["w"] == torch.Size([81]) and shapes.step == 1 and shapes != state
    with pytest.raises(TreeError, match="no tensor  first.w"):
        step(shapes, batch(1, 0, 1))
    wide = tree.map(lambda leaf: leaf.double() if isinstance(leaf, Tensor) else leaf, state)
    with pytest.raises(TreeError, match=r"leaf first.* is \[54\] torch.float64, and this rank holds 54 .*float32"):
        step(wide, batch(1, 0, 1))
    with pytest.raises(TreeError, match=r"slice of the leaf first.w .*is not elementwise"):
        tree.map(lambda leaf: leaf[:1] if isinstance(leaf, Tensor) else leaf, state)
    short = tree.map(lambda leaf: torch.ones(1) if isinstance(leaf, Tensor) else leaf, state)
    with pytest.raises(TreeError, match=r"misshapen  first.w: \[1\]"):
        short.finished()
    assert wide.params["first"]["w"].dtype == torch.float64
    train(state, step, 3)  # nothing has happened to it


def test_states_are_equal_by_their_bits() -> None:
    state, step = here()
    assert state == copy.deepcopy(state) and state != state.params and state == copy.copy(state)

    def changed(value: float) -> fs.TrainState:
        other = copy.deepcopy(state)
        other.shards()[0].param[3] = value
        return other

    assert changed(float("nan")) == changed(float("nan")) and changed(0.0) != changed(-0.0)
    assert dataclasses.replace(state, step=2) != state
    assert start(state.plan.mesh, fs.optim.sgd(0.1))[0] != state
    with pytest.raises(TypeError, match="unhashable"):
        hash(state)


def test_a_state_of_the_same_leaves_copies_them_when_it_is_used() -> None:
    state, step = here()
    other = tree.unflatten(*reversed(tree.flatten(state)))
    assert other == state and other.params["last"]["b"] is state.params["last"]["b"]
    other = train(other, step, 4)
    assert state.step == 1 and train(state, step, 4) == other


def test_what_shares_a_state_is_donated_with_it() -> None:
    state, step = here()
    same, leaves = [copy.copy(state), dataclasses.replace(state, step=5)], tree.leaves(state)
    apart = [tree.map(lambda leaf: leaf, state), copy.deepcopy(state)]
    kept, _ = step(state, batch(1, 0, 1))
    for other in (state, *same):
        with pytest.raises(DonatedError):
            other.params  # noqa: B018
        with pytest.raises(DonatedError):
            copy.deepcopy(other)
    assert "donated" in repr(same[0]) and "donated" in repr(leaves[0])
    with pytest.raises(DonatedError):  # its leaves were those of the state, and it has not copied them yet
        apart[0].finished()
    assert train(apart[1], step, 3).step == 3


def lineages(donate: bool) -> list[bool]:
    """On a rank: a step goes on with one state while the update of another still waits for its gradients."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:

        def run(number: int, together: bool) -> list[fs.TrainState]:
            _, step = start(mesh, donate=donate)
            states = [start(mesh)[0] for _ in range(2)]
            for _ in range(3):
                for which in (0, 1) if together else (number,):
                    states[which], _ = step(states[which], batch(10 * states[which].step + which, mesh.rank, mesh.size))
            return states

        both = run(0, True)
        return [both[0] == run(0, False)[0], both[1] == run(1, False)[1], both[0] != both[1]]


@pytest.mark.sample(2)
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_a_waiting_update_keeps_its_gradients(pool: Pools, world: int, donate: bool) -> None:
    assert pool(world).run(lineages, donate) == [[True] * 3] * world


READS = (operator.attrgetter("params"), tree.leaves, fs.TrainState.finished)


def alone(rules: Any) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """On a rank: one rank does with its state whatever is local, and the others do nothing; then all train on."""
    problems = []
    with fs.make_mesh((-1,), ("shard",)) as mesh:

        def run(read: bool) -> dict[str, Tensor]:
            state, step = start(mesh, rules=rules)
            for until in (2, 4):
                state = train(state, step, until)
                if read and mesh.rank == 1:
                    others = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
                    problems.extend(f"{n}: a copy differs" for n, other in enumerate(others) if other != state)
                    assert state.opt_state and repr(state) and state.pending is None
                    found = [attempt(functools.partial(how, state)) for how in READS]
                    problems.extend("" if error is None else f"{error.kinds[0]}: {error.text}" for error in found)
            state = fs.settle(state)
            assert tree.leaves(state) and fs.settle(state) is state
            return {path: leaf.clone() for path, leaf in tree.paths(fs.unshard(state.params, state.plan))}

        return problems, run(False), run(True)


@pytest.mark.parametrize("rules", [FLAT, PARTED])
def test_reading_a_state_never_communicates(pool: Pools, rules: Any) -> None:
    for rank, (problems, want, found) in enumerate(pool(2).run(alone, rules)):
        assert found.keys() == want.keys() and all(torch.equal(leaf, want[path]) for path, leaf in found.items())
        if rank == 0 or rules is FLAT:
            assert problems == [""] * (6 * rank)
        else:
            for text in problems:
                assert text.startswith("StateError: the state of step") and "middle: 1 leaves" in text
                assert "fs.settle(state) on all ranks" in text


def copies_of_parts() -> list[bool]:
    """On a rank: copies of a state whose parts are on other ranks train on as it does."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        state, step = start(mesh, rules=PARTED)
        state = train(state, step, 2)
        others = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
        state = fs.settle(train(state, step, 4))
        return [fs.settle(train(other, step, 4)) == state for other in others]


def test_copies_of_a_state_that_is_not_whole_train_on(pool: Pools) -> None:
    assert pool(2).run(copies_of_parts) == [[True, True]] * 2


def apart() -> tuple[str, bool]:
    """On a rank: one rank settles its state where the other one makes a step."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        state, step = start(mesh, rules=PARTED)
        state = train(state, step, 2)
        with pytest.raises(ScheduleError) as caught:
            fs.settle(state) if mesh.rank else train(state, step, 3)
        other, step = start(mesh, rules=PARTED)
        return str(caught.value), fs.settle(train(state, step, 4)) == fs.settle(train(other, step, 4))


def test_ranks_that_settle_and_step_are_told(pool: Pools) -> None:
    (text, goes_on), other = pool(2).run(apart)
    assert (text, goes_on) == other and goes_on and "ranks are at different calls" in text
    assert issubclass(StateError, RuntimeError)
