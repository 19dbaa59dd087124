"""What must be equal on all ranks: whatever differs on one of them is named on all, before any state has changed."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.errors import ReplicationError
from fshard.runtime.comm.copies import bits
from fshard.sharding.fact_texts import texts
from tests.shared.workers import Pools

Changes = dict[str, Any]
"""What a rank gives in place of ``USUAL``."""


def rows(*widths: int) -> dict[str, Any]:
    """Parameters of two units: a matrix that is sharded, and a bias of which every rank has a copy."""
    shapes = [(2 * width, width) for width in widths or (8, 8)]
    return {
        f"unit{i}": {"w": torch.ones(shape) / 8, "b": torch.full(shape[1:], 0.56)} for i, shape in enumerate(shapes)
    }


def other(path: str, value: float, at: int = 0) -> dict[str, Any]:
    """The parameters with another value of one element."""
    out = rows()
    dict(tree.paths(out))[path].view(-1)[at] = value
    return out


def rate(step: int) -> float:
    return 0.01 if step != 3 else 0.02


FLAT = [(".*b", fs.P()), (".*", fs.fsdp("data"))]
USUAL: Changes = {
    "params": rows(),
    "made": rows(),
    "axes": ("data",),
    "rules": FLAT,
    "units": ("unit*",),
    "precision": None,
    "opt": lambda: fs.optim.adamw(0.001),
    "seed": 0,
    "init": (),
    "step": {},
    "torch": str(torch.__version__),
}
CHANGES: dict[str, tuple[Changes, tuple[str, ...]]] = {
    "learning rate": ({"opt": lambda: fs.optim.adamw(0.002)}, ("learning rate: ", "0.001", "0.002")),
    "weight decay": ({"opt": lambda: fs.optim.adamw(0.001, weight_decay=0.5)}, ("weight_decay: ", "0.01", "0.5")),
    "betas": ({"opt": lambda: fs.optim.adamw(0.001, betas=(0.8, 0.9))}, ("betas: ", "(0.9, 0.999)", "(0.8, 0.9)")),
    "eps": ({"opt": lambda: fs.optim.adamw(0.001, eps=1e-6)}, ("optimizer.eps: ", "1e-08", "1e-06")),
    "which decay": (
        {"opt": lambda: fs.optim.adamw(0.001, decay=lambda path, shape: len(shape) > 1)},
        ("optimizer.decay: ", "None"),
    ),
    "class": ({"opt": lambda: fs.optim.lion(0.001)}, ("optimizer: ", "adamw", "lion")),
    "class of torch": ({"opt": lambda: fs.optim.from_torch(torch.optim.Adam, lr=0.001)}, ("adamw", "from_torch")),
    "schedule": ({"opt": lambda: fs.optim.adamw(lambda step: 0.001 * (step < 10))}, ("0.0 at steps 10, 100",)),
    "made schedule": (
        {"opt": lambda: fs.optim.adamw(fs.optim.schedules.warmup_cosine(0.001, 1, 9))},
        ("learning rate.peak: ", "nothing", "0.001"),
    ),
    "chain": ({"opt": lambda: fs.optim.chain(fs.optim.clip_value(1.0), fs.optim.adamw(0.001))}, ("chain", "adamw")),
    "clip norm": ({"step": {"clip_norm": 2.0}}, ("clip_norm[0]: ", "None", "2.0")),
    "skip norm": ({"step": {"skip_norm": 9.0}}, ("skip_norm: ", "None", "9.0")),
    "accumulate": ({"step": {"accumulate": 2}}, ("accumulate: ", "1", "2")),
    "policy": ({"step": {"schedule": fs.Policy(prefetch=3)}}, ("schedule.prefetch: ", "3")),
    "remat": ({"step": {"remat": "all"}}, ("remat", "nothing")),
    "compile": ({"step": {"compile": "fx"}}, ("compile: ", "None", "'fx'")),
    "loss scale": ({"step": {"loss_scale": fs.LossScale(4.0)}}, ("loss_scale.initial", "4.0")),
    "debug": ({"step": {"debug": True}}, ("debug: ", "False", "True")),
    "seed": ({"seed": 1}, ("the state's seed: ", "0", "1")),
    "initializers": ({"params": None, "init": [(".*", fs.init.ones())]}, ("initializer of unit0.w", "Constant")),
    "replicated values": ({"params": other("unit1.b", 0.12)}, ("params= of unit1.b: ", "0.56", "0.12")),
    "sharded values": ({"params": other("unit0.w", 0.5, at=17)}, ("params= of unit0.w: ", "bits")),
    "precision": ({"precision": fs.Precision(torch.bfloat16)}, ("precision.compute: ", "None", "torch.bfloat16")),
    "rules": ({"rules": [(".*", fs.fsdp("data"))]}, ("leaf unit0.b: ", "P()")),
    "frozen": ({"rules": [fs.Rule("unit0.b", fs.P(), trainable=False), *FLAT]}, ("leaf unit0.b: ", "frozen")),
    "units": ({"units": ()}, ("leaf unit1.w: ", "of unit unit1", "of unit root")),
    "structure": ({"params": rows(8, 4), "made": rows(8, 4)}, ("leaf unit1.w: ", "[16, 8]", "[8, 4]")),
    "dtype": (
        {"params": tree.map(Tensor.double, rows()), "made": tree.map(Tensor.double, rows())},
        ("leaf unit0.w: ", "torch.float32", "torch.float64"),
    ),
    "axis": ({"axes": ("rows",), "rules": [(".*b", fs.P()), (".*", fs.fsdp("rows"))]}, ("mesh: ", "data=", "rows=")),
}


def loss(params: Any, batch: Tensor) -> Tensor:
    """Of any of the structures: ranks may disagree on them."""
    total = batch.sum() * 0
    for unit in params.values():
        total = total + (unit["w"].float().mean() * batch).square().mean() + unit["b"].float().square().mean()
    return total


def made(given: Changes) -> tuple[fs.Mesh, Any, fs.TrainState]:
    mesh = fs.make_mesh((-1,), given["axes"])
    plan = fs.make_plan(given["made"], mesh, given["rules"], units=given["units"], precision=given["precision"])
    opt = given["opt"]()
    state = fs.init_state(plan, opt, given["seed"], params=given["params"], init=given["init"])
    return mesh, fs.make_train_step(loss, opt, plan, **given["step"]), state


def attempt(name: str, who: int) -> tuple[str, bool]:
    """On a rank: the first step of a run of which one rank was given something else; and whether its state is whole."""
    given = {**USUAL, "init": [(".*", fs.init.zeros())]} if name == "initializers" else USUAL
    given = {**given, "params": None} if name == "initializers" else given
    mesh = fs.make_mesh((-1,), ("any",))
    if mesh.rank == who:
        given = {**given, **CHANGES[name][0]}
    mesh, step, state = made(given)
    before = [bits(leaf) for leaf in tree.leaves((state.params, state.opt_state))]
    text = told(lambda: step(state, torch.ones(4, 3)))
    after = [bits(leaf) for leaf in tree.leaves((state.params, state.opt_state))]
    return text, before == after and state.step == 0


def told(body: Callable[[], object]) -> str:
    """What ranks are told, which must be the one error for this."""
    try:
        body()
    except ReplicationError as error:
        return str(error)
    return "no error"


def check(got: list[tuple[str, bool]], who: int, wanted: tuple[str, ...]) -> None:
    assert len({text for text, _ in got}) == 1 and all(whole for _, whole in got)
    text = got[0][0]
    assert text.startswith("ranks differ in what must be equal:")
    assert all(word in text for word in wanted) and f"rank {who}: " in text, text
    others = [rank for rank in range(len(got)) if rank != who]
    assert f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}: " in text, text


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_on_any_rank_is_named_on_all(name: str) -> None:
    draw = random.Random(name)
    world = draw.randint(2, 4)
    who = draw.randrange(world)
    check(fs.virtual_mesh((world,), ("any",)).run(attempt, name, who), who, CHANGES[name][1])


@pytest.mark.parametrize(("name", "who"), [("learning rate", 1), ("rules", 0), ("axis", 2)])
def test_what_differs_between_processes_is_named_on_all(pool: Pools, name: str, who: int) -> None:
    check(pool(3).run(attempt, name, who), who, CHANGES[name][1])


def another_torch(who: int) -> tuple[str, bool]:
    """On a rank, which has another version of torch."""
    mesh, step, state = made(USUAL)
    version = torch.__version__
    try:
        if mesh.rank == who:
            torch.__version__ = "9.9.9"
        text = told(lambda: step(state, torch.ones(4, 3)))
    finally:
        torch.__version__ = version
    return text, state.step == 0


def test_another_version_of_torch_on_one_rank_is_named(pool: Pools) -> None:
    check(pool(3).run(another_torch, 1), 1, ("version of torch: ", "9.9.9", str(torch.__version__)))


def test_several_things_that_differ_are_named_together() -> None:
    def run() -> str:
        rank = fs.make_mesh((-1,), ("any",)).rank
        opt = fs.optim.adamw(0.001 * (rank + 1), weight_decay=rank / 10)
        _, step, state = made({**USUAL, "opt": lambda: opt, "seed": rank, "step": {"clip_norm": 1.0 + rank}})
        return told(lambda: step(state, torch.ones(4, 3)))

    text = fs.virtual_mesh((3,), ("any",)).run(run)[2]
    assert "  learning rate: rank 0: 0.001, rank 1: 0.002, rank 2: 0.003\n" in text
    assert "  the state's seed: rank 0: 0, rank 1: 1, rank 2: 2\n" in text
    assert "weight_decay: rank 0: 0.0, rank 1: 0.1" in text and "clip_norm[0]: rank 0: " in text


def test_a_learning_rate_that_differs_later_is_told_at_its_step() -> None:
    """Each step's rate goes with the handshake: a function of the step may differ where nobody looked."""

    def run() -> tuple[int, str]:
        rank = fs.make_mesh((-1,), ("any",)).rank
        own = rate if rank == 1 else lambda step: 0.01
        _, step, state = made({**USUAL, "opt": lambda: fs.optim.adamw(own)})
        while True:
            try:
                state, _ = step(state, torch.ones(4, 3))
            except ReplicationError as error:
                return state.step, str(error)

    for done, text in fs.virtual_mesh((2,), ("any",)).run(run):
        assert done == 3 and "learning rate of step 3: rank 0: 0.01, rank 1: 0.02\n" in text


def poked(after: int, debug: bool, replicas: bool) -> str:
    """On a rank: training in which rank 1 writes to what it holds a copy of, after so many steps."""
    sizes, axes = ((2, -1), ("replica", "data")) if replicas else ((-1,), ("data",))
    mesh = fs.make_mesh(sizes, axes)
    plan = fs.make_plan(rows(), mesh, FLAT, batch=fs.P(axes), units=("unit*",))
    opt = fs.optim.adamw(0.001)
    state = fs.init_state(plan, opt, params=rows())
    step = fs.make_train_step(loss, opt, plan, debug=debug)

    def train() -> None:
        here = state
        for number in range(4):
            if number == after and mesh.rank == 1:
                leaf = here.params["unit0"]["w" if replicas else "b"]
                leaf.data.view(-1)[3] = 5.0  # as a fault of memory would: no version tells
            here, _ = step(here, torch.ones(4, 3))

    return told(train)


@pytest.mark.parametrize(
    ("after", "debug", "replicas"), [(0, False, False), (0, False, True), (2, True, False), (2, True, True)]
)
def test_copies_are_compared_once_and_under_debug_at_every_step(after: int, debug: bool, replicas: bool) -> None:
    """Replicated leaves, and under HSDP the shards of replicas: of four ranks 1 and 3 hold the same."""
    texts = fs.virtual_mesh((4 if replicas else 3,), ("any",)).run(poked, after, debug, replicas)
    name = (
        "params.unit0.w, element 67: rank 1: 5, rank 3: 0.1" if replicas else "params.unit0.b, element 3: ranks 0, 2: "
    )
    assert len(set(texts)) == 1 and texts[0].startswith("ranks differ in values of which each has a copy:"), texts[0]
    assert name in texts[0] and "rank 1: 5" in texts[0]


def test_a_restored_state_is_compared_too(tmp_path: Any) -> None:
    def run() -> str:
        _, step, state = made(USUAL)
        with fs.Checkpointer(tmp_path) as ckpt:
            ckpt.save(state)
            state = ckpt.restore(state.plan, fs.optim.adamw(0.001))
        if state.plan.mesh.rank == 1:
            state.opt_state["exp_avg"]["unit1"]["b"][2] = 3.0
        return told(lambda: step(state, torch.ones(4, 3)))

    for text in fs.virtual_mesh((2,), ("any",)).run(run):
        assert "opt.exp_avg.unit1.b, element 2: rank 0: 0, rank 1: 3\n" in text


def test_evaluation_and_gradients_compare_as_well() -> None:
    def run() -> list[str]:
        rank = fs.make_mesh((-1,), ("any",)).rank
        policy = fs.Policy(prefetch=2 + rank)
        _, _, state = made({**USUAL, "params": other("unit0.b", 0.1 * rank)})
        plan, batch = state.plan, torch.ones(4, 3)
        return [
            told(lambda: fs.make_eval_step(loss, plan)(state, batch)),
            told(lambda: fs.make_eval_step(loss, plan, schedule=policy)(state, batch)),
            told(lambda: fs.value_and_grad(loss, plan, schedule=policy)(state.params, batch)),
            told(lambda: fs.func.sharded_loss(loss, plan, reshard=rank == 0)(state.params, batch)),
        ]

    for values, policies, grads, transform in fs.virtual_mesh((2,), ("any",)).run(run):
        assert "params= of unit0.b: rank 0: from 0, " in values
        assert "schedule.prefetch: rank 0: 2, rank 1: 3\n" in policies and "schedule.prefetch: " in grads
        assert "reshard: rank 0: True, rank 1: False\n" in transform


def legitimate() -> tuple[float, list[Any]]:
    """On a rank: a run in which everything differs that may."""
    mesh = fs.make_mesh((-1,), ("data",))
    draw = torch.Generator().manual_seed(mesh.rank)
    rates = {"rate": 0.01}
    opt = fs.optim.partition([(".*b", fs.optim.sgd(lambda step: rates["rate"])), (".*", fs.optim.adamw(0.001))])
    plan = fs.make_plan(rows(), mesh, FLAT, units=("unit*",))
    state = fs.init_state(plan, opt, params=rows())
    step = fs.make_train_step(
        lambda params, batch: fs.Mean(loss(params, batch["x"]) * len(batch["x"]), len(batch["x"])),
        opt,
        plan,
        donate=mesh.rank != 0,
        debug=True,
    )
    for _ in range(3):
        batch = {"x": torch.randn(2 + mesh.rank, 3, generator=draw), "weight": float(mesh.rank)}
        state, metrics = step(state, batch, stop=mesh.rank == 1)
    return metrics.loss.item(), tree.leaves(fs.unshard(state.params, plan))


def test_what_may_differ_between_ranks_is_let_pass() -> None:
    """Batches and their rows, floats in them, donate=, stop=, and objects of equal value."""
    runs = fs.virtual_mesh((3,), ("any",)).run(legitimate)
    assert len({value for value, _ in runs}) == 1
    for _, leaves in runs:
        for mine, first in zip(leaves, runs[0][1], strict=True):
            assert torch.equal(mine, first)


def test_texts_do_not_depend_on_addresses_or_on_the_order_of_sets() -> None:
    class Plain:
        def __init__(self, value: int) -> None:
            self.value, self._cache = value, object()

    def told_of(value: int) -> dict[str, str]:
        return texts("x", [Plain(value), {"b", "a", "c"}, lambda step: value * step, object(), torch.tensor([value])])

    assert told_of(1) == told_of(1) != told_of(2)
    assert told_of(1)["x[1]"] == "{'a', 'b', 'c'}" and told_of(1)["x[0].value"] == "1"


def test_a_hash_of_bits_changes_with_any_element() -> None:
    draw = random.Random(5)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool):
        for length in (0, 1, 7, 1000, 70_003):
            start = (torch.rand(length, generator=torch.Generator().manual_seed(length)) * 90).to(dtype)
            first = bits(start)
            assert bits(start.clone()) == first == bits(torch.cat([start, start])[length:])
            for _ in range(3 if length else 0):
                at = draw.randrange(length)
                changed = start.clone()
                changed[at] = ~changed[at] if dtype == torch.bool else changed[at] + 1
                assert bits(changed) != first
