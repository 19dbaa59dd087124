"""Units computed again in their backward: the same bits, less memory, with and without graphs, on several ranks."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import tree
from fshard.errors import PlanError, RematError
from tests.runtime.test_memory_measured import Peak
from tests.shared import parity, zoo
from tests.shared.workers import Pools

STEPS = 3
RULES = {
    "all": "all",
    "dots": fs.checkpoint_policies.dots,
    "tanh": fs.checkpoint_policies.saving(torch.ops.aten.tanh, torch.ops.aten.gelu),
    "everything": fs.checkpoint_policies.everything,
    "some": [("blocks.[02]", "all"), ("blocks.1", fs.checkpoint_policies.dots), ("**", None)],
}


def train(name: str, mesh: fs.Mesh, remat: Any, **options: Any) -> parity.Run:
    """Some steps with the given policy of recomputation."""
    example = zoo.build(name)
    plan = example.plan(mesh)
    opt = fs.optim.adamw(1e-2)
    state = fs.init_state(plan, opt, params=example.params())
    step = fs.make_train_step(example.loss_fn, opt, plan, clip_norm=example.clip, remat=remat, **options)
    first = None if name == "branching" else 0
    run, _ = parity.sharded(step, state, plan, example.batches(mesh, STEPS), scheduled_from=first)
    return run


@functools.cache
def without(name: str, mesh: fs.Mesh) -> parity.Run:
    """The steps without recomputation: one run for all that is compared with it."""
    return train(name, mesh, None)


def differences(name: str, mesh: fs.Mesh, which: str, **options: Any) -> list[str]:
    """What differs with remat from without."""
    want, got = without(name, mesh), train(name, mesh, RULES[which], **options)
    return [f"{name} {which}: {line}" for line in want.problems + got.problems + parity.other_bits(got, want)]


KEPT = [
    pytest.param(name, which, compile, marks=pytest.mark.long if number % 2 == (compile == "fx") else pytest.mark.slow)
    for number, (name, which) in enumerate([*(("gpt", which) for which in RULES), ("translator", "all")])
    for compile in (None, "fx")
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "which", "compile"), KEPT)
def test_remat_keeps_every_bit(name: str, which: str, compile: str | None) -> None:
    mesh = fs.make_mesh((1,), ("shard",))
    assert not differences(name, mesh, which, compile=compile, debug=True)


OTHERS = sorted((zoo.EXAMPLES | zoo.TRICKY).keys() - {"gpt", "translator"})
EITHER = [
    pytest.param(name, compile, marks=[] if number % 2 == (compile == "fx") else [pytest.mark.slow])
    for number, name in enumerate(OTHERS)
    for compile in (None, "fx")
]
"""Each other program in one of two ways in the default suite, and in the other among the slow tests."""


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize(("name", "compile"), EITHER)
def test_remat_keeps_every_bit_of_any_program(name: str, compile: str | None) -> None:
    mesh = fs.make_mesh((1,), ("shard",))
    if name == "differentiated" and compile is None:
        with pytest.raises(RematError, match="unit inner.* takes gradients by torch.func"):
            differences(name, mesh, "all")
    else:
        assert not differences(name, mesh, "all", compile=compile)


def _on_ranks(runs: list[tuple[str, str | None]]) -> list[str]:
    mesh = fs.make_mesh((-1,), ("shard",))
    return [line for name, how in runs for line in differences(name, mesh, "all", compile=how, debug=True)]


ON_RANKS: list[tuple[str, str | None]] = [("gpt", None), ("twice", "fx"), ("handwritten", None)]


@pytest.mark.parametrize(
    ("world", "runs"),
    [
        pytest.param(3, ON_RANKS, id="3-some"),
        pytest.param(
            3, [(name, how) for name, _ in ON_RANKS for how in (None, "fx")], id="3-all", marks=pytest.mark.slow
        ),
    ],
)
def test_remat_reads_what_was_gathered_again(pool: Pools, world: int, runs: list[tuple[str, str | None]]) -> None:
    for problems in pool(world).run(_on_ranks, runs, timeout=110.0):
        assert not problems, "\n".join(problems)


class Block(nn.Module):
    """A residual perceptron with dropout, whose inside is eight times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 128), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(F.gelu(F.dropout(self.up(x), 0.25))))


def stack(compile: str | None, remat: Any) -> tuple[list[float], list[Tensor], int, str]:
    """Train four blocks: losses, parameters, the peak of a step's allocations, and what units ran as."""
    torch.manual_seed(0)
    model = fs.split(nn.Sequential(*(Block() for _ in range(4))), units=("*",))
    mesh = fs.make_mesh((1,), ("shard",))
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    opt = fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, params=model.params)
    step = fs.make_train_step(lambda p, x: model.apply(p, x).square().mean(), opt, plan, compile=compile, remat=remat)
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        with Peak() as peak:
            state, metrics = step(state, x)
        losses.append(metrics.loss.item())
    return losses, tree.leaves(state.params), peak.above, step.units


@pytest.mark.long
@pytest.mark.parametrize("compile", [None, pytest.param("fx", marks=pytest.mark.slow)])
def test_memory_falls_and_dropout_stays(compile: str | None) -> None:
    wide = 512 * 128 * 4
    none, dots, every = (stack(compile, remat) for remat in (None, fs.checkpoint_policies.dots, "all"))
    for other in (dots, every):
        assert other[0] == none[0] and all(map(torch.equal, other[1], none[1]))
    # Kept of each block without: a mask, its product, tanh. With dots: the matrix product, and in a graph the mask.
    # With all: only that mask.
    assert none[2] > 4 * 3 * wide
    assert dots[2] < none[2] - 2 * wide
    assert every[2] < dots[2] - 2 * wide


def test_the_footprint_knows_of_remat() -> None:
    model = fs.split(nn.Sequential(*(Block() for _ in range(8))), units=("*",))
    mesh = fs.make_mesh((1,), ("shard",))
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    peaks = []
    for remat in (None, fs.checkpoint_policies.dots, "all"):
        step = fs.make_train_step(lambda p, x: model.apply(p, x).square().mean(), fs.optim.sgd(0.1), plan, remat=remat)
        peaks.append(step.trace(torch.zeros(512, 16)).footprint.activation_bytes)
    wide = 512 * 128 * 4
    assert peaks[1] < peaks[0] - 6 * wide and peaks[2] < peaks[1] - 4 * wide


@pytest.mark.long
def test_units_of_different_policies_do_not_share_a_graph() -> None:
    units = stack("fx", [("[01]", "all"), ("2", fs.checkpoint_policies.dots)])[3]
    assert [line.split(": ")[1] for line in units.splitlines()] == [f"fx graph {number}" for number in range(4)]


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        ("some", "must be None, 'all', 'offload', a policy"),
        ([("a", "some")], "'some' is not a policy"),
        ([(r"[0-9]\.\d", "all")], r"(?s)match no unit.*\[0-9\]"),
        ([("*[z-a]", "all")], "is not a glob: bad character range"),
        ([(".*", "all")], r"(?s)'\.\*'; these are globs, not regular expressions: write '\*\*'"),
        ([("a",)], "must be None, 'all', 'offload', a policy"),
        (3, "must be None, 'all', 'offload', a policy"),
    ],
)
def test_what_is_no_remat_is_refused(remat: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        stack(None, remat)


class Field(nn.Module):
    """A unit that returns the gradient of an energy, as Hamiltonian networks and potentials do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def _field(remat: Any, steps: int = 2) -> list[float]:
    model = fs.split(nn.Sequential(Field(), Field()), units=("*",))
    plan = fs.make_plan(model, fs.make_mesh((1,), ("shard",)), [(r".*", fs.fsdp("shard"))])
    opt = fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, seed=0)
    step = fs.make_train_step(lambda p, x: (model.apply(p, x) - x).square().mean(), opt, plan, remat=remat)
    for number in range(steps):
        state, metrics = step(state, torch.randn(6, 4, generator=torch.Generator().manual_seed(number)))
    return [metrics.loss.item(), fs.tree.norm(state.params, plan).item()]


def test_a_unit_may_take_a_gradient_in_its_forward() -> None:
    """Its backward runs inside of its forward, so it is computed again there, too."""
    assert _field("all") == _field(None)
    with pytest.raises(RematError, match=r"takes a gradient in its forward.*'all'"):
        _field(fs.checkpoint_policies.dots)
