"""What a step tells equals what plain PyTorch computes: norms by group and pattern, learning rates, arithmetic."""

from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import tree
from fshard.errors import PlanError

WIDTH, ROWS = 16, 4


def make(mesh: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A step of two blocks and a head, its state, its model and its loss function."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    model = fs.split(nn.Sequential(*blocks, nn.Linear(WIDTH, 1)), units=("0", "1"))
    plan = fs.make_plan(model, mesh, [(r"2\..*", fs.P()), (r".*", fs.fsdp("data"))])
    opt = fs.optim.sgd(fs.optim.schedules.linear(0.1, 0.0, steps=10))

    def loss_of(params: Any, x: Any) -> Any:
        return model.apply(params, x).square().mean()

    step = fs.make_train_step(loss_of, opt, plan, **options)
    return step, fs.init_state(plan, opt, params=model.params), model, loss_of


def batch(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH) + rank


def plain_norms(ranks: int) -> dict[str, float]:
    """The norm of each leaf's gradient, by plain PyTorch on the global batch."""
    _, _, model, loss_of = make(fs.make_mesh((1,), ("data",)))
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), model.params)
    loss_of(params, torch.cat([batch(rank) for rank in range(ranks)])).backward()
    return {path: leaf.grad.norm().item() for path, leaf in tree.paths(params)}


def together(norms: dict[str, float], *starts: str) -> float:
    return sum(norm**2 for path, norm in norms.items() if path.startswith(starts)) ** 0.5


def told(options: dict[str, Any], ranks: int = 2, steps: int = 1) -> list[Any]:
    """The metrics of some steps, on each rank."""

    def run() -> list[Any]:
        mesh = fs.make_mesh((ranks,), ("data",))
        step, state, _, _ = make(mesh, **options)
        found = []
        for _ in range(steps):
            state, metrics = step(state, batch(mesh.rank))
            found.append(metrics)
        return found

    return fs.virtual_mesh((ranks,), ("data",)).run(run)


@pytest.mark.parametrize("ranks", [1, 3])
def test_norms_of_groups(ranks: int) -> None:
    plain = plain_norms(ranks)
    for (metrics,) in told({"norms": "groups"}, ranks):
        groups = {"0": ("0.",), "1": ("1.",), "root": ("2.",)}
        found = {name: norm.item() for name, norm in metrics.grad_norms.items()}
        assert found == pytest.approx({name: together(plain, *starts) for name, starts in groups.items()}, rel=1e-5)


@pytest.mark.parametrize("more", [{}, {"accumulate": 2}, {"clip_norm": 1e-3}])
def test_norms_by_pattern(more: dict[str, Any]) -> None:
    plain = plain_norms(2)
    for (metrics,) in told({"norms": [r"0\..*", r".*\.bias"], **more}):
        found = {name: norm.item() for name, norm in metrics.grad_norms.items()}
        bias = (plain["1.0.bias"] ** 2 + plain["2.bias"] ** 2) ** 0.5
        assert found == pytest.approx({r"0\..*": together(plain, "0."), r".*\.bias": bias}, rel=1e-5)


def test_rules_of_clipping_tell_their_norms() -> None:
    plain = plain_norms(2)
    for rows in told({"clip_norm": [(r"0\..*", 0.1), (r".*", None)], "norms": [r"2\..*"]}, steps=2):
        found = {name: norm.item() for name, norm in rows[0].grad_norms.items()}
        starts = {r"0\..*": ("0.",), r".*": ("1.", "2."), r"2\..*": ("2.",)}
        assert found == pytest.approx({name: together(plain, *s) for name, s in starts.items()}, rel=1e-5)


def test_learning_rates() -> None:
    for rows in told({}, 1, steps=3):
        assert [metrics.lr for metrics in rows] == pytest.approx([0.1, 0.09, 0.08])


def test_a_rate_of_several_steps_to_an_update() -> None:
    mesh = fs.make_mesh((1,), ("data",))
    _, _, model, loss_of = make(mesh)
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))])
    opt = fs.optim.every(2, fs.optim.sgd(fs.optim.schedules.linear(0.1, 0.0, steps=10)))
    step, state = fs.make_train_step(loss_of, opt, plan, norms="groups"), fs.init_state(plan, opt, params=model.params)
    found = []
    for _ in range(4):
        state, metrics = step(state, batch(0))
        assert set(metrics.grad_norms) == {"0", "1", "root"}
        found.append(metrics.lr)
    assert found == pytest.approx([0.1, 0.1, 0.09, 0.09])


@pytest.mark.parametrize("options", [{}, {"remat": "all"}, {"accumulate": 2}], ids=str)
def test_arithmetic_is_that_of_the_model(options: dict[str, Any]) -> None:
    square, head = 2 * ROWS * WIDTH * WIDTH, 2 * ROWS * WIDTH
    forward = 2 * square + head
    backward = 2 * forward - square  # nobody needs the gradient of the batch
    for (metrics,) in told(options):
        assert metrics.ran.flops == forward + backward
        assert metrics.mfu(1e9) == metrics.ran.flops / metrics.ran.seconds / 1e9


def test_a_checkpoint_in_the_model_does_not_count_twice() -> None:
    mesh = fs.make_mesh((1,), ("data",))
    _, _, model, loss_of = make(mesh)
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))])

    def again(params: Any, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(loss_of, params, x, use_reentrant=False)

    counts = []
    for fn in (loss_of, again):
        step = fs.make_train_step(fn, fs.optim.sgd(0.1), plan)
        counts.append(step(fs.init_state(plan, fs.optim.sgd(0.1), params=model.params), batch(0))[1].ran.flops)
    assert counts[0] == counts[1] > 0


def test_other_shapes_have_no_count_of_their_own() -> None:
    step, state, _, _ = make(fs.make_mesh((1,), ("data",)))
    found = []
    for rows in (ROWS, ROWS, 2 * ROWS, ROWS):
        state, metrics = step(state, batch(0).repeat(rows // ROWS, 1))
        found.append(metrics.ran.flops)
    assert found[0] == found[1] == found[3] and found[2] is None
    assert metrics.rate() is None and metrics.rate(8) == 8 / metrics.ran.seconds


def test_waiting_is_part_of_a_step() -> None:
    for rows in told({}, 2, steps=2):
        for metrics in rows:
            assert 0 < metrics.ran.exposed < metrics.ran.seconds
            ops = metrics.ran.record
            assert metrics.ran.schedule.ops == tuple(ops)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"norms": "group"}, "norms='group' must be 'groups', or a list"),
        ({"norms": []}, r"norms=\[\] must be"),
        ({"norms": ["3.*"]}, "'3.[*]' decides no trained leaf"),
        ({"norms": [".*", "0.*"]}, "'0.[*]' decides no trained leaf"),
        ({"norms": ["("]}, r"norms\[0\]"),
        ({"norms": [".*"], "schedule": fs.Policy(update="in_backward")}, "norms= by pattern needs"),
    ],
)
def test_norms_that_cannot_be_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make(fs.make_mesh((1,), ("data",)), **options)


def test_norms_of_groups_where_updates_are_in_the_backward() -> None:
    (late,), (early,) = (
        told({"norms": "groups", "schedule": fs.Policy(update=when)}, 1)[0] for when in ("deferred", "in_backward")
    )
    assert late.grad_norms == early.grad_norms
