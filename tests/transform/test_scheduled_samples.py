"""Gradients of single samples on schedules: what travels, by formula; departures; what has no schedule, and why."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import TransformError
from fshard.schedule import check, parse
from tests.transform.test_ghost_norms import off, one_by_one, wrong
from tests.transform.test_scheduled_products import UNITS, WIDTH, Layers
from tests.transform.test_transforms import FLAT, mine

ROWS = torch.ones(4, WIDTH).double()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_collectives_are_those_of_the_formula(ranks: int, reshard: bool) -> None:
    layers = Layers(fs.abstract_mesh((ranks,), ("shard",)))
    samples = fs.func.per_sample_grad(layers.loss, layers.plan, reshard=reshard)
    clipped = fs.func.clipped_grad(layers.loss, layers.plan, 1.0, reshard=reshard)
    around = fs.Policy().prefetch + 1  # units that stay gathered from one pass to the next
    again = (UNITS - around) * reshard
    for tool, gathers, reductions in ((samples, UNITS + again, 0), (clipped, UNITS + again, UNITS)):
        schedule = tool.trace(ROWS).schedule
        check(schedule)
        assert parse(str(schedule)) == schedule
        counts = Counter(op.kind for op in schedule)
        apart = ranks > 1
        assert (counts["all_gather"], counts["reduce_scatter"]) == (gathers * apart, reductions * apart)
        assert counts["weight"] == reductions
        assert tool.reshard == reshard == schedule.policy.reshard


def test_sums_begin_after_the_norms_and_reductions_are_in_flight() -> None:
    layers = Layers(fs.abstract_mesh((2,), ("shard",)))
    kinds = [op.kind for op in fs.func.clipped_grad(layers.loss, layers.plan, 1.0).trace(ROWS).schedule]
    assert kinds.index("weight") > max(
        at for at, kind in enumerate(kinds) if kind == "backward" and at < len(kinds) - 9
    )
    assert kinds.index("wait reduce_scatter") > kinds.index("reduce_scatter") + 2


def departures() -> list[str]:
    """On a rank: what is wrong where a program leaves its schedule, and where it comes back."""
    out = []
    with fs.make_mesh(*FLAT) as mesh:
        layers = Layers(mesh)
        params, x = fs.shard(layers.whole, layers.plan), mine(layers.x, mesh)
        clipped = fs.func.clipped_grad(layers.loss, layers.plan, 0.01)
        samples = fs.func.per_sample_grad(layers.loss, layers.plan)
        for turn in range(3):
            if turn == 1:
                layers.order.reverse()
            want = one_by_one(layers.loss, layers.whole, layers.x)
            norms = sum(g.flatten(1).square().sum(1) for g in want.values()).sqrt()  # type: ignore[union-attr]
            factor = (0.01 / norms).clamp(max=1)
            total, found = clipped(params, x)
            got, rows = dict(tree.paths(fs.unshard(total, layers.plan))), dict(tree.paths(samples(params, x)))
            out += [f"{turn} {path}" for path, g in want.items() if off(got[path], torch.tensordot(factor, g, 1))]
            out += [f"{turn} rows of {path}" for path, g in want.items() if off(rows[path], mine(g, mesh))]
            out += [f"{turn} norms"] * off(found, mine(norms, mesh))
            if turn != 1:
                out += [f"{turn} record" for tool in (clipped, samples) if tool.record != tool.schedule.ops]
    return out


@pytest.mark.parametrize("ranks", [1, 2])
def test_programs_that_leave_their_schedule(ranks: int) -> None:
    assert not sum(fs.virtual_mesh((ranks,), ("any",)).run(departures), [])


def test_a_call_without_a_schedule_says_why() -> None:
    layers = Layers(fs.make_mesh((1,), ("shard",)))
    params = fs.shard(layers.whole, layers.plan)
    samples = fs.func.per_sample_grad(layers.loss, layers.plan)
    rows = torch.vmap(lambda p: samples(p, ROWS)["0"]["0"]["bias"])(tree.map(lambda x: x.expand(2, *x.shape), params))
    assert rows.shape == (2, 4, WIDTH)
    with pytest.raises(fs.errors.PlanError, match="no schedule.*since a transform is under way"):
        _ = samples.schedule
    assert torch.allclose(samples(params, ROWS)["0"]["0"]["bias"], rows[0], rtol=1e-10, atol=1e-14)
    assert samples.record == samples.schedule.ops


def noisy() -> bool:
    """On a rank: whether a clipped sum with noise of a tree of shards is the same without a schedule."""
    with fs.make_mesh(*FLAT) as mesh:
        layers = Layers(mesh)
        clipped = fs.func.clipped_grad(layers.loss, layers.plan, 0.01)
        total, _ = clipped(fs.shard(layers.whole, layers.plan), mine(layers.x, mesh))
        noise = fs.tree.normal(fs.random.key(0), layers.plan)
        found = tree.map(lambda g, z: g + 0.5 * z, total, noise)
        return all(
            torch.equal(a, b + 0.5 * z) for a, b, z in zip(*map(tree.leaves, (found, total, noise)), strict=True)
        )


def test_noise_is_added_to_sums() -> None:
    assert all(fs.virtual_mesh((2,), ("any",)).run(noisy))


@pytest.mark.parametrize("where", ["in unit 0, dropout", "dropout"])
def test_random_numbers_of_torch_are_refused_by_name(where: str) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model = fs.split(nn.Sequential(inner), units=("0",) if "unit" in where else ())
    plan = fs.make_plan(model, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    params = fs.shard(model.params, plan)
    for tool in (fs.func.per_sample_grad, lambda *args: fs.func.clipped_grad(*args, 1.0)):
        with pytest.raises(TransformError, match=rf"^{where} draws from torch's generator.*fs\.random"):
            tool(lambda p, x: model.apply(p, x).sum(), plan)(params, torch.ones(3, 4))


class Heads(nn.Module):
    """Attention to what came before, with a mask and without one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """The output of both."""
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        x = x + self.first(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x + self.second(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


IMAGES, TEXTS, ROW = (5, 6, 8, 8), (5, 4, 6), (5, 6)
MODULES: dict[str, tuple[Any, Any]] = {
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), TEXTS),
    "heads": (lambda: Heads(), TEXTS),
    "in place": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), TEXTS),
    "norms": (lambda: nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 3), nn.LayerNorm((4, 3), bias=False)), TEXTS),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.Conv2d(6, 4, 3)), IMAGES),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm2d(6, affine=True), nn.Conv2d(6, 4, 3, groups=2)), IMAGES),
    "transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(6, 4, 3)), IMAGES),
    "convolution in 3d": (lambda: nn.Sequential(nn.Conv3d(1, 2, 2)), (3, 1, 4, 4, 4)),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(6)), ROW),
    "one embedding": (lambda: nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 3)), (5,)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), TEXTS),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODULES)
def test_layers_of_torch(name: str) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make().double()
    model = fs.split(module, units=("*",) if isinstance(module, nn.Sequential) else ())
    reads = any(isinstance(part, nn.Embedding) for part in module.modules())
    batch = torch.randint(7, shape) if reads else torch.randn(shape).double()

    def loss(p: Any, x: Tensor) -> Any:
        return model.apply(p, x).square().mean()

    assert not wrong(model, loss, batch, microbatches=(None,))
