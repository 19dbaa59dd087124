"""Steps whose linear layers multiply in float8: against plain PyTorch, on any number of ranks, in every form."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import errors, tree
from fshard.model.float8 import FLOAT8
from tests.training.float8_runs import (
    BF16,
    FLOAT8_ROWS,
    LR,
    ROWS,
    RULES,
    STEPS,
    Block,
    Run,
    alone,
    batch,
    loss_of,
    model,
    same,
    trained,
)


def kept(x: Tensor) -> Tensor:
    """A matrix as rounding by rows leaves it."""
    scales = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / scales).to(FLOAT8).float() * scales


class Rounded(torch.autograd.Function):
    """A linear layer of rounded rows, in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (kept(x.flatten(0, -2)) @ kept(w).T).to(BF16).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x, w), flat = ctx.saved_tensors, grad.flatten(0, -2)
        scales = w.float().abs().amax(1) / 448
        by_x = kept(flat.float() * scales) @ (kept(w) / scales[:, None])
        return by_x.to(BF16).view(x.shape), (flat.float().T @ x.flatten(0, -2).float()).to(BF16)


def plain(product: Any) -> Run:
    """The same run in plain PyTorch: parameters in float32, compute in bfloat16."""
    masters = {path: leaf.clone() for path, leaf in tree.paths(model().params)}
    losses = []
    for number in range(STEPS):
        p = {path: leaf.to(BF16).requires_grad_() for path, leaf in masters.items()}
        x = F.embedding(batch(number)["x"], p["embed.weight"])
        for b in ("blocks.0", "blocks.1"):
            y = F.layer_norm(x, (32,), p[f"{b}.norm.weight"], p[f"{b}.norm.bias"])
            y = F.gelu(product(y, p[f"{b}.up.weight"]) + p[f"{b}.up.bias"])
            x = x + product(y, p[f"{b}.down.weight"])
        out = F.linear(x, p["head.weight"], p["head.bias"])
        loss = F.cross_entropy(out.float().flatten(0, 1), batch(number)["y"].flatten())
        grads = torch.autograd.grad(loss, list(p.values()))
        for master, grad in zip(masters.values(), grads, strict=True):
            master -= LR * grad.float()
        losses.append(float(loss.detach()))
    return losses, masters


def far(one: Run, other: Run) -> float:
    """The distance of what two runs have learned, relative to it."""
    start = dict(tree.paths(model().params))
    apart = sum(float((leaf - other[1][path]).square().sum()) for path, leaf in one[1].items())
    moved = sum(float((leaf - start[path]).square().sum()) for path, leaf in one[1].items())
    return (apart / moved) ** 0.5


def test_it_is_the_same_roundings_in_plain_pytorch() -> None:
    """Nearer by far than a run without float8."""
    ours, meant, without = alone(), plain(Rounded.apply), plain(F.linear)
    assert ours[0] == pytest.approx(meant[0], rel=2e-3)
    assert far(ours, meant) < 0.003 < 0.012 < far(ours, without)


@pytest.mark.parametrize("world", [2, 8])
def test_ranks_compute_what_one_rank_computes_bit_for_bit(world: int) -> None:
    one = trained(accumulate=world)  # whose microbatches are the parts of the ranks
    for run in fs.virtual_mesh((world,), ("any",)).run(lambda _: trained(), 0):
        assert same(run, one)


FORMS: dict[str, dict[str, Any]] = {
    "graphs": {"compile": "fx"},
    "computed again": {"remat": "all"},
    "graphs, computed again": {"compile": "fx", "remat": "all"},
    "debug": {"debug": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_step_has_equal_bits(form: str) -> None:
    assert same(trained(**FORMS[form]), alone())


def test_of_float32_units_too() -> None:
    """Without ``compute=``, units read float32, and results of products are cast to it."""
    found = trained(precision=fs.Precision(products="float8_rowwise"))
    assert found[0] == pytest.approx(alone()[0], rel=0.02) and found[0] != alone()[0]
    assert {leaf.dtype for leaf in found[1].values()} == {torch.float32}


def test_rules_name_some_leaves() -> None:
    ups = fs.Rule(r".*\.up\.weight", fs.fsdp("data"), precision=FLOAT8_ROWS)
    bf16 = fs.Precision(BF16, inputs=True)
    some, none = trained(rules=[ups, *RULES], precision=bf16), trained(precision=bf16)
    assert not same(some, alone()) and not same(some, none)
    exact = fs.Rule(r".*\.(up|down)\.weight", fs.fsdp("data"), precision=bf16)
    one = fs.Rule(r"blocks\.0\.up\.weight", fs.fsdp("data"), precision=FLOAT8_ROWS)
    assert not same(trained(rules=[one, exact, *RULES], precision=bf16), none)
    assert same(trained(rules=[exact, *RULES], precision=bf16), none)


def test_the_base_of_adapters_is_frozen() -> None:
    net = fs.lora.wrap(model(), [r".*\.(up|down)\.weight"], rank=2)
    losses, after = trained(net)
    exact, _ = trained(net, precision=fs.Precision(BF16, inputs=True))
    before = dict(tree.paths(net.params))
    changed = {path for path, leaf in after.items() if not torch.equal(leaf, before[path])}
    assert changed and all(path.endswith(("_lora_a", "_lora_b")) for path in changed)
    assert losses[-1] < losses[0] and losses != exact and losses == pytest.approx(exact, rel=0.02)
    assert same((losses, after), trained(net, compile="fx"))


def test_checkpoints_hold_what_they_hold_without_float8(tmp_path: Path) -> None:
    mesh, opt, net = fs.make_mesh((-1,), ("data",)), fs.optim.adamw(1e-2), model()
    plan = fs.make_plan(net, mesh, RULES, precision=FLOAT8_ROWS)
    without = plan.replace(precision=fs.Precision(BF16, inputs=True))
    step = fs.make_train_step(lambda p, rows: loss_of(net, p, rows), opt, plan)
    state, _ = step(fs.init_state(plan, opt, params=net.params), batch(0))
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(state)
        back, again = ckpt.restore(without, opt), ckpt.restore(plan, opt)
    whole = fs.settle(state).params
    assert all(map(torch.equal, tree.leaves(back.params), tree.leaves(whole)))
    assert {leaf.dtype for leaf in tree.leaves(back.params)} == {torch.float32}
    assert torch.equal(step(again, batch(1))[1].loss, step(state, batch(1))[1].loss)


def test_evaluation_in_another_precision() -> None:
    mesh, net = fs.make_mesh((-1,), ("data",)), model()
    plan = fs.make_plan(net, mesh, RULES, precision=FLOAT8_ROWS)
    state = fs.init_state(plan, fs.optim.sgd(LR), params=net.params)

    def evaluated(precision: fs.Precision | None) -> float:
        return float(
            fs.make_eval_step(lambda p, rows: loss_of(net, p, rows), plan, precision=precision)(state, batch(0))
        )

    exact = float(loss_of(net, net.params, batch(0)))
    assert evaluated(fs.Precision()) == pytest.approx(exact, rel=1e-6)
    assert evaluated(None) == alone()[0][0] != exact
    assert evaluated(fs.Precision(products="float8_rowwise")) not in (exact, evaluated(None))


def test_a_plan_says_what_is_multiplied_in_float8() -> None:
    plan = fs.make_plan(model(), fs.abstract_mesh((4,), ("data",)), RULES, precision=FLOAT8_ROWS)
    text = str(plan).splitlines()[-4:]
    assert text == [
        "products in float8_rowwise: 4 leaves",
        "  not of 1, Embedding: embed.weight",
        "  not of 1, outside of units: head.weight",
        "  not of 7, 1 dims: head.bias, blocks.0.norm.weight, blocks.0.norm.bias, ...",
    ]


@fs.unit
def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """A unit written by hand."""
    return F.linear(x, p["w"], p["b"])


@fs.unit
def looked_up(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One that reads its weight in another way."""
    return F.embedding(x, p["w"])


@fs.unit
def checkpointed(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One that computes its layer again, by itself."""
    made: Tensor = checkpoint(lambda x: F.linear(x, p["w"], p["b"]), x, use_reentrant=False)
    return made


@fs.unit
def computed_again(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The same by ``fs.remat``."""
    made: Tensor = fs.remat(F.linear)(x, p["w"], p["b"])
    return made


def outside(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Code that is no unit."""
    return F.linear(x, p["w"], p["b"])


def tree_of() -> dict[str, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return {name: {"w": torch.randn(32, 32, generator=draw) / 6, "b": torch.zeros(32)} for name in ("one", "two")}


def by_hand(second: Any, precision: fs.Precision = FLOAT8_ROWS) -> float:
    """The loss of a step of two layers of a plain tree."""
    mesh = fs.make_mesh((-1,), ("data",))
    plan = fs.make_plan(tree_of(), mesh, RULES, precision=precision)
    opt = fs.optim.sgd(0.1)
    x = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(7))

    def loss(p: Any, x: Tensor) -> Tensor:
        middle = layer(p["one"], x)
        given = middle.abs().long() % 32 if second is looked_up else middle
        return second(p["two"], given).square().mean()

    _, metrics = fs.make_train_step(loss, opt, plan)(fs.init_state(plan, opt, params=tree_of()), x)
    return float(metrics.loss)


def test_units_written_by_hand() -> None:
    one, exact = by_hand(layer), by_hand(layer, fs.Precision(BF16, inputs=True))
    assert one != exact and one == pytest.approx(exact, rel=0.05)
    assert by_hand(on_demand) == one
    assert fs.virtual_mesh((2,), ("any",)).run(lambda _: (by_hand(layer), by_hand(on_demand)), 0) == [(one, one)] * 2


def on_demand(p: Any, x: Tensor) -> Tensor:
    """Code that depends on values, so that no trace tells what follows."""
    return layer(p, x) if float(x.detach().sum()) < 1e9 else x


@fs.unit
def joined(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One that reads its weight among others."""
    return x @ torch.cat([p["w"], p["w"]])[:32]


@fs.unit
def parted(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One that reads parts of its weight."""
    return x @ torch.cat(p["w"].chunk(2))


@fs.unit
def written(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One that copies its weight."""
    out = torch.zeros_like(x[:1]).repeat(32, 1)
    out[:] = p["w"]
    return x @ out


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("second", "error", "says"),
    [
        (looked_up, errors.PlanError, "two.w is to be multiplied in float8.* by embedding in a unit: give it a rule"),
        (joined, errors.PlanError, "two.w is .* by cat in a unit"),
        (parted, errors.PlanError, "two.w is .* by chunk in a unit"),
        (written, errors.PlanError, "two.w is .* by __setitem__ in a unit"),
        (outside, errors.PlanError, "two.w is to be multiplied in float8.* by code outside of units: give it a rule"),
        (checkpointed, errors.UnitError, "two.w saves by hooks of its own.*remat='all'"),
        (computed_again, errors.RematError, "fs.remat inside of a unit"),
    ],
)
def test_what_would_be_left_out_silently_is_refused(world: int, second: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        fs.virtual_mesh((world,), ("any",)).run(lambda _: by_hand(second), 0)


class Tied(nn.Module):
    """A head that shares the weight of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.mid = nn.Embedding(16, 32), nn.Linear(32, 16, bias=False), nn.Linear(32, 32)
        self.head.weight = self.embed.weight


def test_a_tied_weight_stays_as_it_is() -> None:
    plan = fs.make_plan(fs.split(Tied(), units=("*",)), fs.abstract_mesh((2,), ("data",)), RULES, precision=FLOAT8_ROWS)
    assert [path for path, leaf in plan.leaves.items() if leaf.products] == ["mid.weight"]
    assert plan.leaves["embed.weight"].unscaled == "Embedding"


def test_what_fits_no_leaf_is_an_error() -> None:
    mesh, norms = fs.abstract_mesh((2,), ("data",)), fs.Rule(r".*norm.*", fs.fsdp("data"), precision=FLOAT8_ROWS)
    with pytest.raises(errors.PlanError, match=r"of the rule '.*norm.*' fits none of its leaves"):
        fs.make_plan(model(), mesh, [norms, *RULES])
    odd = {"w": torch.zeros(32, 30), "b": torch.zeros(2)}
    with pytest.raises(
        errors.PlanError, match=r"of the plan fits none .*\n  w  \[32, 30\]: 32 x 30 is no multiple of 16"
    ):
        fs.make_plan(odd, mesh, RULES, precision=FLOAT8_ROWS)
    with pytest.raises(errors.PlanError, match="outside of units"):
        fs.make_plan(fs.split(Block()), mesh, RULES, precision=FLOAT8_ROWS)
    with pytest.raises(errors.PlanError, match="products='int8'.*'float8_rowwise'"):
        fs.Precision(products="int8")  # type: ignore[arg-type]


def test_a_part_of_a_tensor_counts_by_its_own_size() -> None:
    """A leaf that tensor parallelism cuts to 24 x 32 on each rank cannot be multiplied; one of 32 x 48 can."""
    mesh = fs.abstract_mesh((2, 2), ("data", "tp"))
    rules = [fs.Rule("a", fs.P("tp", flat="data")), fs.Rule("b", fs.P(None, "tp", flat="data"))]
    given = {"a": torch.zeros(48, 32), "b": torch.zeros(32, 96)}
    plan = fs.make_plan(given, mesh, rules, batch=fs.P("data"), precision=FLOAT8_ROWS)
    assert plan.leaves["a"].unscaled == "24 x 32 is no multiple of 16" and plan.leaves["b"].products


def test_transforms_refuse_it() -> None:
    plan = fs.make_plan(model(), fs.make_mesh((-1,), ("data",)), RULES, precision=FLOAT8_ROWS)
    params = fs.shard(model().params, plan)
    for reshard in (True, False):
        f = fs.func.sharded_loss(lambda p, rows: loss_of(model(), p, rows), plan, reshard=reshard)
        with pytest.raises(errors.TransformError, match="multiplies 4 leaves in float8, such as blocks.0.up.weight"):
            f(params, batch(0))
        hvp = fs.func.hvp(lambda p, rows: loss_of(model(), p, rows), plan, reshard=reshard)
        with pytest.raises(errors.TransformError, match=r"4 leaves in float8.*fs\.reshard_state\(state, exact, opt\)"):
            hvp(params, params, batch(0))


def test_the_way_to_derivatives_that_the_refusal_names() -> None:
    """Shards of a plan without float8: they are cut elsewhere than at rows."""

    def on_a_rank(mesh: fs.Mesh) -> torch.Tensor:
        opt = fs.optim.sgd(0.1)
        plan = fs.make_plan(model(), mesh, RULES, batch=fs.P("data"), precision=FLOAT8_ROWS)
        state, exact = fs.init_state(plan, opt, params=model().params), plan.replace(precision=fs.Precision())
        params = fs.reshard_state(state, exact, opt).params
        rows = exact.local_batch(batch(0))
        return fs.tree.norm(fs.func.hvp(lambda p, b: loss_of(model(), p, b), exact)(params, params, rows), exact)

    one, two = (fs.virtual_mesh((size,), ("data",)) for size in (1, 2))
    torch.testing.assert_close(two.run(lambda: on_a_rank(two))[0], one.run(lambda: on_a_rank(one))[0])


def test_devices_without_float8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = fs.abstract_mesh((2,), ("data",), device="cuda")
    monkeypatch.setattr(type(old), "device_here", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(errors.PlanError, match=r"capability 8.0, which does not multiply .* capability 8.9 or later"):
        fs.make_plan(model(), old, RULES, precision=FLOAT8_ROWS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert fs.make_plan(model(), old, RULES, precision=FLOAT8_ROWS)


def test_a_step_is_verified_against_plain_pytorch() -> None:
    plan = fs.make_plan(model(), fs.make_mesh((-1,), ("data",)), RULES, precision=FLOAT8_ROWS)
    opt = fs.optim.sgd(LR)
    step = fs.make_train_step(lambda p, rows: loss_of(model(), p, rows), opt, plan)
    fs.verify(step, fs.init_state(plan, opt, params=model().params), batch(0))
