"""What an optimizer carries from step to step means the same on every mesh, under every ``accumulate=``."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import optim as O  # noqa: N812
from fshard import tree
from fshard.errors import LossError, StateError
from fshard.state.entries import assemble, entries, scalars
from fshard.state.init import take
from tests.optim.test_states import whole
from tests.shared.plain import Plain, difference

ROWS, K = 12, 3
CUTS = {1: (12,), 2: (7, 5), 3: (5, 3, 4), 4: (2, 4, 1, 5)}
"""How many rows each rank has, if the loss is an ``fs.Mean``; every rank has microbatches of unequal counts then."""

OPTS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: O.sgd(0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda: O.adamw(0.02, weight_decay=0.1),
    "lion": lambda: O.lion(0.01),
    "ema": lambda: O.ema(O.sgd(0.1, momentum=0.9), 0.7),
    "chain": lambda: O.chain(O.clip_value(0.05), O.scale(lambda step: 1.0 / (1 + step)), O.add_decay(0.1), O.sgd(0.3)),
    "partition": lambda: O.partition([(r".*bias", O.sgd(0.2)), (r".*", O.ema(O.adamw(0.01), 0.5))]),
    "masked": lambda: O.masked(O.sgd(O.schedules.warmup_cosine(0.3, 2, 9)), r".*weight"),
    "from_torch": lambda: O.from_torch(torch.optim.NAdam, lr=0.02),
    "muon": lambda: O.partition([(r".*weight", O.muon(0.02, dtype=torch.float64)), (r".*", O.sgd(0.1))]),
    "adafactor": lambda: O.adafactor(0.05),
}


@dataclass(frozen=True)
class Leg:
    """Some steps on one mesh."""

    ranks: int
    accumulate: int
    steps: int


def params() -> dict[str, Tensor]:
    """A small net in float64, so that nothing is hidden by rounding."""
    generator = torch.Generator().manual_seed(4)
    shapes = {"a.weight": (7, 5), "a.bias": (7,), "b.weight": (3, 7), "b.bias": (3,)}
    return {path: torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for path, shape in shapes.items()}


def global_batch(step: int) -> Tensor:
    """Twelve rows."""
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(70 + step), dtype=torch.float64)


def loss_of(mean: bool) -> Callable[[Any, Tensor], Any]:
    """A mean over rows, or over those elements of them that count, whose number differs from part to part."""

    def loss_fn(p: Any, x: Tensor) -> Any:
        y = torch.tanh(x @ p["a"]["weight"].T + p["a"]["bias"]) @ p["b"]["weight"].T + p["b"]["bias"]
        losses = (y - x[:, :3]).square().sum(1)
        counts = 1.0 + (x[:, 0] > 0)
        return fs.Mean((losses * counts).sum(), counts.sum()) if mean else losses.mean()

    return loss_fn


def leg(opt: Any, mean: bool, leg: Leg, clip: float | None, start: Any, memory: str | None) -> Any:
    """On a played rank: some steps from what other ranks left, and what it leaves itself, as whole entries."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        rules = [fs.Rule(r".*", fs.fsdp("shard"), align="leaf", opt_memory_kind=memory)]
        plan = fs.make_plan(tree.nest(params()), mesh, rules)
        if start is None:
            state = fs.init_state(plan, opt, params=tree.nest(params()))
        else:
            state = assemble(plan, opt, lambda e: e.tensor.copy_(take(start[0][e.name], e.piece)), start[1])
        step = fs.make_train_step(loss_of(mean), opt, plan, accumulate=leg.accumulate, clip_norm=clip)
        for _ in range(leg.steps):
            rows = CUTS[mesh.size] if mean else (ROWS // mesh.size,) * mesh.size
            state, _ = step(state, global_batch(state.step).split(rows)[mesh.rank])
        whole = fs.unshard(state.params, plan)
        return whole_entries(state), scalars(state), dict(tree.paths(whole))


def whole_entries(state: fs.TrainState) -> Any:
    """This rank's pieces, to be put together."""
    return [(e.name, e.shape, e.piece, e.tensor.clone()) for e in entries(state)]


def together(results: list[Any]) -> Any:
    """The whole entries of all ranks, and the numbers beside them."""
    return whole([rank[0] for rank in results]), results[0][1], results[0][2]


def train(name: str, mean: bool, legs: list[Leg], clip: float | None, memory: str | None) -> dict[str, Tensor]:
    """Train over several meshes, one after the other."""
    opt, found = O.every(K, OPTS[name]()), None
    for one in legs:
        found = together(fs.virtual_mesh((one.ranks,), ("any",)).run(leg, opt, mean, one, clip, found, memory))
    assert found is not None
    return found[2]


def drawn(seed: int) -> list[Leg]:
    """Two to four legs, of which no two neighbours have the same parts, cut anywhere between updates."""
    rng, legs = random.Random(seed), []
    for steps in rng.choice([(1, 5), (2, 1, 3), (4, 2), (5, 3, 1), (2, 5, 2), (1, 1, 1, 3)]):
        others = [
            (r, a) for r in (1, 2, 3, 4) for a in (1, 2) if not legs or r * a != legs[-1].ranks * legs[-1].accumulate
        ]
        ranks, accumulate = rng.choice(others)
        legs.append(Leg(ranks, accumulate if (ROWS // ranks) % accumulate == 0 else 1, steps))
    return legs


def differs(name: str, mean: bool, seed: int) -> float:
    """How far a run that moves between meshes is from one process."""
    legs, rng = drawn(seed), random.Random(seed)
    clip, memory = rng.choice([None, 0.4]), rng.choice([None, "unpinned_host"])
    got = train(name, mean, legs, clip, memory)
    one = Plain(loss_of(mean), O.every(K, OPTS[name]()), params(), clip)
    for step in range(sum(x.steps for x in legs)):
        one.step(global_batch(step))
    return difference(got, one.params)


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("name", list(OPTS))
def test_a_run_that_moves_to_another_mesh_between_updates_is_that_of_one_process(name: str) -> None:
    number = list(OPTS).index(name)
    assert differs(name, number % 4 > 0, number) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("mean", [False, True], ids=["plain mean", "fs.Mean"])
@pytest.mark.parametrize("name", list(OPTS))
def test_many_runs_that_move_between_meshes_are_those_of_one_process(name: str, mean: bool) -> None:
    for seed in range(100, 108):
        assert differs(name, mean, seed) < 1e-11, drawn(seed)


def test_what_is_carried_is_the_same_on_every_mesh() -> None:
    found = []
    for ranks, accumulate in [(1, 1), (2, 1), (3, 2), (4, 1)]:
        one = Leg(ranks, accumulate, 2)
        found.append(
            together(fs.virtual_mesh((ranks,), ("any",)).run(leg, O.every(K, O.sgd(0.1)), True, one, None, None, None))
        )
    for kept, numbers, _ in found:
        assert numbers == found[0][1] and numbers["carried_count"] == found[0][1]["carried_count"] > ROWS
        assert difference(kept, found[0][0]) < 1e-13


def test_ranks_that_hold_copies_along_a_model_axis_count_elements_once() -> None:
    def run() -> Any:
        with fs.make_mesh((2, 2), ("data", "model")) as mesh:
            plan = fs.make_plan(tree.nest(params()), mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))
            opt = O.every(K, O.sgd(0.1))
            state = fs.init_state(plan, opt, params=tree.nest(params()))
            step = fs.make_train_step(loss_of(True), opt, plan)
            for _ in range(2):
                state, _ = step(state, global_batch(state.step).chunk(2)[mesh.index("data")])
            return scalars(state)["carried_count"]

    one = Leg(1, 1, 2)
    alone = together(fs.virtual_mesh((1,), ("any",)).run(leg, O.every(K, O.sgd(0.1)), True, one, None, None, None))
    assert set(fs.virtual_mesh((4,), ("any",)).run(run)) == {alone[1]["carried_count"]}


@pytest.mark.parametrize("first", [False, True])
def test_a_loss_that_changes_its_kind_between_updates_is_refused(first: bool) -> None:
    def run() -> None:
        with fs.make_mesh((-1,), ("shard",)) as mesh:
            plan = fs.make_plan(tree.nest(params()), mesh, [(r".*", fs.fsdp("shard"))])
            opt = O.every(K, O.sgd(0.1))
            state = fs.init_state(plan, opt, params=tree.nest(params()))
            x = global_batch(0).chunk(mesh.size)[mesh.rank]
            state, _ = fs.make_train_step(loss_of(first), opt, plan)(state, x)
            other = fs.make_train_step(loss_of(not first), opt, plan)
            with pytest.raises(LossError, match=r"the same kind in all steps between two updates"):
                other(state, x)
            state, _ = fs.make_train_step(loss_of(first), opt, plan)(state, x)
            assert state.step == 2

    fs.virtual_mesh((2,), ("any",)).run(run)


def test_a_state_that_was_saved_in_units_of_its_mesh_is_refused() -> None:
    with fs.make_mesh((1,), ("shard",)) as mesh:
        plan = fs.make_plan(tree.nest(params()), mesh, [(r".*", fs.fsdp("shard"))])
        with pytest.raises(StateError, match=r"step 4 carries gradients of fs.Mean between two updates"):
            assemble(plan, O.every(K, O.sgd(0.1)), lambda entry: None, {"step": 4, "seed": 0, "count": 24.0})
        assert assemble(plan, O.every(K, O.sgd(0.1)), lambda entry: None, {"step": 4, "seed": 0}).step == 4
