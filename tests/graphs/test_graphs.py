"""Units run as graphs: the same bits as the same units run eagerly, whatever the program; and what is refused."""

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import tree
from fshard.errors import PlanError
from fshard.runtime.graphs import partition
from fshard.runtime.graphs.partition import ATEN
from tests.graphs.cases import RARE, affine, params_of, rows, step_of, train, trained
from tests.shared import parity, zoo
from tests.shared.workers import Pools

EAGER = {  # units that are no graphs, and why
    "glue": "encode(enc): as it is: it returns a view",
    "viewed": "halves(b): as it is: it returns a view",
    "recomputed": "affine(b): as it is: it is called under torch.utils.checkpoint",
    "stretched": "affine(a): as it is: it is called under torch.utils.checkpoint",
    "penalised": "affine(a): as it is: the program differentiates it itself",
}


def differences(name: str, mesh: fs.Mesh, **options: Any) -> list[str]:
    """How training with graphs differs from training without."""
    want, first = train(name, None, mesh, **options)
    got, step = train(name, "fx", mesh, **options)
    found = want.problems + got.problems + parity.other_bits(got, want)
    if name not in RARE and step.schedule.ops != first.schedule.ops:
        found.append("the schedules differ")
    known = EAGER.get(name, "no unit of this kind")
    lines = [line for line in step.units.splitlines() if "as it is" in line]
    if bool(lines) != (name in EAGER) or (lines and not any(line.startswith(known) for line in lines)):
        found.append(f"as they are: {lines}")
    return found


PROGRAMS = sorted(zoo.EXAMPLES | zoo.TRICKY)


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_give_the_bits_of_units(name: str) -> None:
    mesh = fs.make_mesh((1,), ("shard",))
    assert not differences(name, mesh, **({"debug": True}, {"accumulate": 2})[PROGRAMS.index(name) % 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_give_the_bits_of_units_in_every_way(name: str) -> None:
    mesh = fs.make_mesh((1,), ("shard",))
    assert not differences(name, mesh, debug=True)
    assert not differences(name, mesh, accumulate=2)


def _on_ranks(names: list[str], options: list[dict[str, Any]]) -> list[str]:
    mesh = fs.make_mesh((-1,), ("shard",))
    problems = []
    for name in names:
        for some in options:
            chosen = dict(some)
            policy = fs.Policy(**chosen.pop("policy", {}))
            found = differences(name, mesh, schedule=policy, **chosen)
            problems += [f"{name} {some}: {problem}" for problem in found]
    return problems


RANKS: list[dict[str, Any]] = [
    {"debug": True},
    {"accumulate": 2, "policy": {"prefetch": 2, "reshard": False}},
    {"policy": {"prefetch": 0, "reduces": 1}, "debug": True, "accumulate": 2},
]
"""Ways to train with graphs on several ranks."""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("world", "names", "options"),
    [
        pytest.param(2, ["handwritten"], RANKS[:1], id="2-handwritten"),
        pytest.param(2, ["gpt"], RANKS[2:], id="2-gpt"),
        pytest.param(4, ["adapted"], RANKS[1:2], id="4-adapted"),
        pytest.param(2, ["gpt", "handwritten"], RANKS, id="2-all", marks=pytest.mark.slow),
        pytest.param(4, ["adapted"], RANKS, id="4-all", marks=pytest.mark.slow),
    ],
)
def test_graphs_on_several_ranks(pool: Pools, world: int, names: list[str], options: list[dict[str, Any]]) -> None:
    for problems in pool(world).run(_on_ranks, names, options, timeout=110.0):
        assert not problems, "\n".join(problems)


def _both(loss: Callable[..., Tensor], params: dict[str, Any], batches: list[Any]) -> str:
    """Train with and without graphs, assert that all bits agree, and return what the units ran as."""
    seen = [trained(loss, params, batches, compile) for compile in (None, "fx")]
    assert seen[0][1] == seen[1][1]
    assert all(map(torch.equal, seen[0][2], seen[1][2]))
    return seen[1][0].units


def test_dropout_draws_the_numbers_of_the_eager_engine() -> None:
    unit = fs.unit(lambda p, x: F.dropout(affine(p, F.dropout(x, 0.2)), 0.5))

    def loss(params: Any, x: Tensor) -> Tensor:
        return unit(params["b"], unit(params["a"], x)).square().mean()

    text = _both(loss, params_of("a", "b"), [rows(n) for n in range(3)])
    assert text.splitlines() == ["<lambda>(a): fx graph 0", "<lambda>(b): fx graph 1"]  # a's input needs none


def test_dropout_under_a_checkpoint_runs_eagerly() -> None:
    def inside(p: Any, x: Tensor) -> Tensor:
        return F.dropout(affine(p, x), 0.5)

    @fs.unit
    def unit(p: Any, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(inside, p, x, use_reentrant=False)

    text = _both(lambda params, x: unit(params["a"], x).square().mean(), params_of("a"), [rows(0), rows(1)])
    assert "draws random numbers" in text


def test_a_new_shape_or_value_is_traced_anew() -> None:
    @fs.unit
    def unit(p: Any, x: Tensor, gain: float, *, on: bool = True) -> Tensor:
        return affine(p, x) * gain if on else x + 0

    def loss(params: Any, batch: Any) -> Tensor:
        return (
            unit(params["a"], batch["x"], batch["gain"], on=batch["on"]).square().mean()
            + unit(params["b"], batch["x"].t().contiguous().t(), 1).sum()
        )

    batches = [{"x": rows(n, 4 + n % 2 * 2), "gain": 0.5 + n // 2, "on": True} for n in range(4)]
    text = _both(loss, params_of("a", "b"), [*batches, {**batches[0], "gain": 0.0}, {**batches[0], "gain": -0.0}])
    assert text.splitlines()[0].count("graph") == 6


@pytest.mark.long
def test_arguments_that_never_repeat_are_given_up() -> None:
    @fs.unit
    def unit(p: Any, x: Tensor, gain: float) -> Tensor:
        return affine(p, x) * gain

    def loss(params: Any, x: Tensor, count: list[int] = [0]) -> Tensor:  # noqa: B006 - counts the calls
        count[0] += 1
        return unit(params["a"], x, float(count[0])).mean()

    step, state = step_of(loss, params_of("a"), compile="fx")
    for _ in range(40):
        state, _ = step(state, rows(0))
    assert "pass numbers that change as tensors" in step.units


def test_two_functions_of_one_name_and_numbers_around_them() -> None:
    gain = 1.0

    @fs.unit
    def unit(p: Any, x: Tensor) -> Tensor:
        return affine(p, x) * gain

    again = fs.unit(lambda p, x: affine(p, x) - 1)
    first = fs.unit(lambda p, x: affine(p, x) + SHIFTS["by"])
    object.__setattr__(again, "__name__", "unit")

    def loss(params: Any, x: Tensor) -> Tensor:
        nonlocal gain
        gain = gain + 1.0
        y = unit(params["a"], x)
        gain = gain + 1.0
        out: Tensor = unit(params["a"], y) + again(params["a"], y) + first(params["a"], y)
        return out.square().mean()

    seen = []
    for compile in (None, "fx"):
        gain = 1.0
        step, state = step_of(loss, params_of("a", "b"), compile=compile)
        for number in range(4):
            state, metrics = step(state, rows(number))
            seen.append(metrics.loss.item())
    assert seen[:4] == seen[4:]
    assert "as it is" not in step.units


SHIFTS = {"by": 2.0}


def test_equal_modules_share_a_graph_and_unequal_ones_do_not() -> None:
    def block(slope: float) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(slope))

    module = nn.Sequential(block(0.1), block(0.1), block(0.2), nn.Sequential(nn.Linear(6, 6), nn.ELU()))
    model = fs.split(module, units=("*",))
    mesh = fs.make_mesh((1,), ("shard",))
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    opt = fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, params=model.params)
    step = fs.make_train_step(lambda p, x: model.apply(p, x).square().mean(), opt, plan, compile="fx")
    step(state, rows(0).requires_grad_(False))
    assert [line.split(": ")[1] for line in step.units.splitlines()] == [
        "fx graph 0",  # its input needs no gradient
        "fx graph 1",
        "fx graph 2",
        "fx graph 3",
    ]


def test_buffers_change_as_in_the_eager_engine() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.line = nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.line(self.norm(x))

    model = fs.split(nn.Sequential(Normed(), Normed()), units=("*",))
    mesh = fs.make_mesh((1,), ("shard",))
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    opt = fs.optim.sgd(0.1)

    def loss(params: Any, batch: Any) -> Any:
        out, buffers = model.apply(params, batch["x"], buffers=batch["buffers"])
        return out.square().mean(), {path: leaf.float() for path, leaf in tree.paths(buffers)}

    seen = []
    for compile in (None, "fx"):
        torch.manual_seed(0)
        state = fs.init_state(plan, opt, params=tree.map(torch.clone, model.params))
        step = fs.make_train_step(loss, opt, plan, compile=compile)
        buffers = model.buffers
        for number in range(3):
            state, metrics = step(state, {"x": rows(number), "buffers": tree.map(torch.clone, buffers)})
            seen.append({"loss": metrics.loss, **metrics.aux})
    assert "as it is" not in step.units
    for want, got in zip(seen[:3], seen[3:], strict=True):
        assert want.keys() == got.keys() and all(torch.equal(want[key], got[key]) for key in want)


def test_autocast_gives_the_bits_of_the_eager_engine() -> None:
    unit = fs.unit(affine)

    def loss(params: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = unit(params["b"], unit(params["a"], x))
        return unit(params["c"], x.float()).square().mean()

    text = _both(loss, params_of("a", "b", "c"), [rows(n) for n in range(3)])
    assert "as it is" not in text and text.count("graph") == 3


def test_python_randomness_is_not_baked_in() -> None:
    @fs.unit
    def unit(p: Any, x: Tensor) -> Tensor:
        return affine(p, x) if random.random() < 0.5 else x * p["w"][0]

    state_before = random.getstate()
    step, state = step_of(lambda params, x: unit(params["a"], x).mean(), params_of("a"), compile="fx")
    step(state, rows(0))
    random.setstate(state_before)
    assert "Python's random" in step.units


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda p, x: affine(p, x) * _LOOSE, "cannot be a graph"),
        (lambda p, x: affine(p, x) if x.sum() > 1e9 else 2 * affine(p, x), "cannot be a graph"),
        (lambda p, x: torch.from_numpy((x.detach().numpy() > 0) * 1.0).float() * affine(p, x), "cannot be a graph"),
        (lambda p, x: affine(p, x)[:, :3].chunk(3, 1)[1], None),
        (lambda p, x: (x, affine(p, x))[1], None),
    ],
)
def test_what_cannot_be_traced_runs_eagerly(body: Any, reason: str | None) -> None:
    unit, last = fs.unit(body), fs.unit(affine)

    def loss(params: Any, x: Tensor) -> Tensor:
        out: Tensor = unit(params["a"], last(params["b"], x))
        return out.square().mean()

    text = _both(loss, params_of("a", "b"), [rows(n) for n in range(3)])
    assert ("as it is" in text) is (reason is not None) and (reason or "") in text
    assert "affine(b): fx graph" in text


_LOOSE = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def test_a_write_to_what_a_graph_keeps_is_noticed() -> None:
    unit = fs.unit(affine)

    def loss(params: Any, x: Tensor) -> Tensor:
        y = unit(params["a"], x)
        z = unit(params["b"], y)
        y.mul_(2.0)
        return z.mean() + y.mean()

    for compile in (None, "fx"):
        step, state = step_of(loss, params_of("a", "b"), compile=compile)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(state, rows(0))


def test_gradients_of_some_outputs_only() -> None:
    @fs.unit
    def two(p: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = affine(p, x)
        return y + x, (y * x).sum(0), (y > 0).sum()

    def loss(params: Any, x: Tensor) -> Tensor:
        a, _, count = two(params["a"], x)
        _, b, _ = two(params["b"], a)
        c, d, _ = two(params["c"], a)
        return b.mean() + (c.sum(0) + d).square().mean() * count

    text = _both(loss, params_of("a", "b", "c"), [rows(n) for n in range(3)])
    assert "as it is" not in text


def test_gradients_with_other_strides() -> None:
    unit = fs.unit(affine)

    def loss(params: Any, x: Tensor) -> Tensor:
        a = unit(params["a"], x)
        return a.sum() + unit(params["b"], a).t().reshape(-1).square().sum() + unit(params["c"], a)[:, ::2].sum()

    text = _both(loss, params_of("a", "b", "c"), [rows(n) for n in range(3)])
    assert "as it is" not in text


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(PlanError, match="compile='xla' must be None, 'fx' or 'inductor'"):
        step_of(lambda params, x: x.sum(), params_of("a"), compile="xla")


@fs.unit
def turned(p: Any, x: Tensor) -> Tensor:
    """A rotary embedding by complex numbers, whose derivatives multiply by conjugates."""
    angles = torch.polar(torch.ones(3), torch.arange(3.0))
    pairs = torch.view_as_complex((x @ p["w"]).unflatten(1, (3, 2))) * angles
    return torch.view_as_real(pairs).flatten(1) + p["b"]


def test_conjugates_are_no_views_that_change_nothing() -> None:
    unit = fs.unit(lambda p, z: torch.view_as_real((z @ p["w"].to(z.dtype)).conj() * z.imag).sum((1, 2)) * p["b"].sum())

    def loss(params: Any, x: Tensor) -> Tensor:
        y = turned(params["b"], turned(params["a"], x))
        z = torch.complex(y, x)
        return unit(params["c"], z).square().sum() + unit(params["c"], z.conj()).sum() + y.square().mean()

    params = params_of("a", "b", "c")
    params["c"]["b"] = torch.ones(6)
    text = _both(loss, params, [rows(n) / 10 for n in range(3)])
    assert text.count("graph") == 3 and "conjugated or negated lazily" in text


def test_what_a_unit_computes_twice_is_computed_once_and_results_stay_apart() -> None:
    @fs.unit
    def twice(p: Any, x: Tensor) -> tuple[Tensor, ...]:
        return (x @ p["w"]).sin() + (x @ p["w"]).cos(), (x @ p["b"]).view(2, -1), (x @ p["b"]).view(2, -1)

    def loss(params: Any, x: Tensor) -> Tensor:
        out, one, other = twice(params["a"], x)
        return (out.sum(1).view(2, -1) + one.detach().mul_(2) - other).square().mean()

    with patch.object(partition, "_merge", wraps=partition._merge) as merge:
        assert _both(loss, params_of("a"), [rows(0), rows(1)]) == "twice(a): fx graph 0"
    joint = merge.call_args.args[0]
    assert sum(node.target is ATEN.mm.default and node in joint.forward for node in joint.graph.nodes) == 1
