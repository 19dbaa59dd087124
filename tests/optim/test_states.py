"""What optimizers keep of leaves in forms of their own: as data, on other meshes, and the same on every mesh."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import optim as O  # noqa: N812
from fshard import tree
from fshard.state.entries import assemble, entries, scalars
from fshard.state.init import take
from fshard.state.pieces import Entry
from tests.shared.virtual import Job
from tests.shared.workers import Pools

SHAPES: dict[str, tuple[int, ...]] = {
    **{"a.w": (40, 30), "a.b": (700,), "a.s": ()},
    **{"c.w": (17, 20), "c.m": (20, 17), "c.e": (3, 8, 12), "c.b": (5,)},
}
RULES = [
    fs.Rule(r"a\..*", fs.fsdp("shard"), align=256),
    fs.Rule(r"c\..*", fs.fsdp("shard"), align="leaf"),
]

Parts = list[tuple[str, tuple[int, ...], Any, Tensor]]


def params() -> dict[str, Any]:
    """Leaves of numbers that are multiples of 1/8."""
    generator = torch.Generator().manual_seed(1)
    return tree.nest({path: torch.randint(-16, 16, s, generator=generator) / 8.0 for path, s in SHAPES.items()})


def every_form() -> Any:
    """Codes and scales, rows and columns, single numbers, averages and carried gradients, in two groups."""
    return O.every(
        2,
        O.ema(
            O.partition(
                [
                    (r"a\.b", O.from_torch(torch.optim.NAdam, lr=0.01)),
                    (r"a\..*", O.adamw8bit(0.01, weight_decay=0.1)),
                    (r"c\.(m|e)", O.muon(0.02)),
                    (r"c\.w", O.adafactor(0.1)),
                    (r"c\..*", O.from_torch(torch.optim.ASGD, lr=0.01)),
                ]
            ),
            0.5,
        ),
    )


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    """Gradients are multiples of powers of two, so sums of them are exact in any order."""
    factors = batch.mean(0)
    return sum((leaf.reshape(-1) * factors[: leaf.numel()]).sum() for leaf in tree.leaves(params))  # type: ignore[return-value]


def batch(step: int, mesh: fs.Mesh) -> Tensor:
    """This rank's part of 4 rows."""
    generator = torch.Generator().manual_seed(50 + step)
    return (torch.randint(-8, 9, (4, 1200), generator=generator) / 4.0).chunk(mesh.size)[mesh.rank]


def make_plan(mesh: fs.Mesh) -> fs.Plan:
    """Two units, one with blocks, one with whole leaves."""
    return fs.make_plan(params(), mesh, RULES, units=("a", "c"))


def parts(state: fs.TrainState) -> Parts:
    """The entries of this rank, to be sent."""
    return [(e.name, e.shape, e.piece, e.tensor.clone()) for e in entries(state)]


def whole(ranks: list[Parts]) -> dict[str, Tensor]:
    """The entries of all ranks put together. Every element comes from somewhere; where several give it, they agree."""
    out: dict[str, Tensor] = {}
    for same in zip(*ranks, strict=True):
        name, shape = same[0][:2]
        full = torch.zeros(shape, dtype=same[0][3].dtype)
        seen = torch.zeros(math.prod(shape), dtype=torch.bool)
        for other, _, piece, tensor in same:
            assert other == name and piece.shape == shape and piece.numel == tensor.numel(), name
            inside = slice(piece.start, piece.stop)
            assert not seen[inside].any() or torch.equal(full.view(-1)[inside], tensor), name
            full.view(-1)[inside], seen[inside] = tensor, True
        assert seen.all(), name
        out[name] = full
    return out


def train(
    start: tuple[dict[str, Tensor], dict[str, Any]] | None, steps: int, kind: str
) -> tuple[Parts, dict[str, Any]]:
    """On a rank: some steps from a start, or from what other ranks had; all of the state, and its numbers."""
    opt: Any = every_form() if kind == "every form" else O.adamw8bit(0.01, weight_decay=0.1)
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = make_plan(mesh)
        if start is None:
            state = fs.init_state(plan, opt, params=params())
        else:

            def fill(entry: Entry) -> None:
                entry.tensor.copy_(take(start[0][entry.name], entry.piece))

            state = assemble(plan, opt, fill, start[1])
        step = fs.make_train_step(loss_fn, opt, plan)
        for _ in range(steps):
            state, _ = step(state, batch(state.step, mesh))
        return parts(state), scalars(state)


def saved(folder: str, steps: int) -> Parts:
    """On a rank: make some steps from the last checkpoint, if there is one, and save."""
    opt = every_form()
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = make_plan(mesh)
        with fs.Checkpointer(folder) as checkpoints:
            state = checkpoints.restore(plan, opt) if checkpoints.steps() else fs.init_state(plan, opt, params=params())
            step = fs.make_train_step(loss_fn, opt, plan)
            for _ in range(steps):
                state, _ = step(state, batch(state.step, mesh))
            checkpoints.save(state)
        return parts(state)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names that differ in any bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def test_states_are_equal_bit_for_bit_on_every_mesh_and_move_between_meshes(job: Job) -> None:
    results = {world: job(world).run(train, None, 7, "every form") for world in (1, 2, 4)}
    wholes = {world: whole([rank[0] for rank in ranks]) for world, ranks in results.items()}
    kinds = {name.split(".")[1] for name in wholes[1] if name.startswith("opt.")}
    assert kinds >= {
        "exp_avg_code",
        "exp_root_scale",
        "row_var",
        "mu_product",
        "ema",
        "carried",
        "momentum_buffer",
        "eta",
    }
    assert wholes[1]["opt.exp_avg_scale.a.w"].shape == (5,) and wholes[1]["opt.row_var.c.w"].shape == (17,)
    assert wholes[1]["opt.carried.a.w"].any() and results[1][0][1]["step"] == 7
    assert not equal(wholes[1], wholes[2]) and not equal(wholes[1], wholes[4])
    # In the middle of accumulating two steps: from 4 ranks to 2, and to 1.
    for world in (1, 2):
        again = job(world).run(train, (wholes[4], results[4][0][1]), 6, "every form")
        straight = job(world).run(train, None, 13, "every form")
        assert not equal(whole([rank[0] for rank in again]), whole([rank[0] for rank in straight]))


def test_checkpoints_carry_every_form_to_another_mesh(pool: Pools, tmp_path: Path) -> None:
    for world, steps in ((4, 7), (2, 4)):
        last = whole(pool(world).run(saved, str(tmp_path), steps))
    assert not equal(last, whole([rank[0] for rank in pool(1).run(train, None, 11, "every form")]))


def test_moments_of_8_bits_are_the_same_on_every_mesh(job: Job) -> None:
    results = [whole([rank[0] for rank in job(world).run(train, None, 10, "8 bit")]) for world in (1, 2, 4)]
    assert not equal(results[0], results[1]) and not equal(results[0], results[2])
    assert results[0]["opt.exp_avg_code.a.w"].dtype == torch.uint8


@pytest.mark.parametrize("rank", range(3))
def test_pieces_of_states_say_who_holds_them(rank: int) -> None:
    mesh = fs.abstract_mesh((3,), ("shard",), rank=rank)
    held = {entry.name: entry for entry in entries(fs.init_state(make_plan(mesh), every_form(), params=params()))}
    scale = held["opt.exp_avg_scale.a.w"]
    assert (scale.piece.start, scale.piece.stop) == (
        held["opt.exp_avg_code.a.w"].piece.start // 256,
        -(-held["opt.exp_avg_code.a.w"].piece.stop // 256),
    )
    for name in ("opt.row_var.c.w", "opt.mu_product.a.b"):
        some = held[f"params.{name[-3:]}"].piece.numel > 0
        assert held[name].piece.numel == (math.prod(held[name].shape) if some else 0)
        assert rank in held[name].holders


def test_moments_of_8_bits_train_like_those_of_32() -> None:
    generator = torch.Generator().manual_seed(0)
    target, start = torch.randn(64, 96, generator=generator), torch.zeros(64, 96)
    mesh = fs.abstract_mesh((1,), ("shard",))
    losses = {}
    for name, opt in (("8", O.adamw8bit(0.02, betas=(0.9, 0.99))), ("32", O.adamw(0.02, betas=(0.9, 0.99)))):
        plan = fs.make_plan({"w": start}, mesh, [fs.Rule("w", fs.fsdp("shard"), align=256)])
        step = fs.make_train_step(lambda p, x: ((x @ (p["w"] - target)) ** 2).mean(), opt, plan)
        state = fs.init_state(plan, opt, params={"w": start})
        noise = torch.Generator().manual_seed(1)
        losses[name] = []
        for _ in range(150):
            state, metrics = step(state, torch.randn(32, 64, generator=noise))
            losses[name].append(metrics.loss.item())
        if name == "8":
            held = state.opt_state
            assert sum(tree.leaves(held[k])[0].nbytes for k in held) < 0.26 * 2 * 4 * start.numel()
    assert losses["32"][-1] < 0.05 * losses["32"][0]
    for step_number in (20, 60, 149):
        assert losses["8"][step_number] == pytest.approx(losses["32"][step_number], rel=0.1, abs=0.02 * losses["32"][0])


@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_single_numbers_beside_a_leaf_without_elements(name: str, tmp_path: Any) -> None:
    """No rank holds any of such a leaf, so nobody holds what the class keeps of it as a whole: it is saved without."""
    params = {"w": torch.ones(3), "empty": torch.empty(0)}
    plan = fs.make_plan(params, fs.make_mesh((-1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    opt = fs.optim.from_torch(getattr(torch.optim, name))
    step = fs.make_train_step(lambda p, x: (p["w"] * x).sum() + p["empty"].sum(), opt, plan)
    state, _ = step(fs.init_state(plan, opt, params=params), torch.ones(3))
    fs.Checkpointer(tmp_path).save(state)
    again = fs.Checkpointer(tmp_path).restore(plan, opt)
    for _ in range(2):
        state, _ = step(state, torch.ones(3))
        again, _ = step(again, torch.ones(3))
    assert torch.equal(state.params["w"], again.params["w"])
