"""Frozen leaves that are kept in few bits: values, training against plain PyTorch, memory, bytes, checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P, tree
from fshard.cli.main import main as command
from fshard.errors import PlanError, TreeError
from fshard.foresight.foresee import state_bytes
from tests.runtime.test_memory_measured import Peak
from tests.shared.workers import Pools
from tests.training.wire_cases import LR, STEPS, Tree, batch, loss_fn, start

pytestmark = pytest.mark.long

FORMATS = ("nf4/64", "int4/32", "int8/64", "fp8_e4m3/256")
FIXED = r".*\.w"
"""Matrices are frozen, vectors learn."""

QUANTILES = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
QUANTILES += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
QUANTILES += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
QUANTILES += [0.7229568362236023, 1.0]
"""Of the paper of QLoRA, appendix E."""


def reference(x: Tensor, text: str) -> Tensor:
    """A leaf after quantising and dequantising, block by block, in the plainest way."""
    name, _, size = text.partition("/")
    flat, out = x.reshape(-1), []
    for block in flat.split(int(size)):
        if name == "nf4":
            scale = block.abs().max()
            far = (block[:, None] / scale - torch.tensor(QUANTILES)).abs()
            out.append(torch.tensor(QUANTILES)[far.argmin(1)] * scale)
            continue
        largest = {"int4": 7.0, "int8": 127.0, "fp8_e4m3": 448.0}[name]
        scale = block.abs().max() * (1 / largest)
        codes = block / scale
        codes = codes.to(torch.float8_e4m3fn).float() if name == "fp8_e4m3" else codes.round()
        out.append(codes * scale)
    return torch.cat(out).view(x.shape)


def read(text: str) -> Tree:
    """The tree that units read: matrices rounded."""
    return {u: {n: reference(x, text) if n == "w" else x for n, x in leaves.items()} for u, leaves in start().items()}


def plan_of(text: str | None, mesh: fs.Mesh, **more: Any) -> fs.Plan:
    spec = more.pop("spec", fs.fsdp("data"))
    fixed = fs.Rule(FIXED, spec, trainable=False, packed=text, **more)
    return fs.make_plan(start(), mesh, [fixed, (".*", fs.fsdp("data"))], units=("one", "two"))


def trained(text: str | None, mesh: fs.Mesh, params: Tree | None = None, **more: Any) -> tuple[list[float], Tree]:
    """On a rank: losses, and whole parameters after training."""
    options = {name: more.pop(name) for name in ("schedule", "remat", "compile", "accumulate") if name in more}
    plan, opt = plan_of(text, mesh, **more), fs.optim.sgd(LR)
    step = fs.make_train_step(loss_fn, opt, plan, **options)
    state, losses = fs.init_state(plan, opt, params=params or start()), []
    for number in range(STEPS):
        state, metrics = step(state, batch(number, mesh.rank))
        losses.append(float(metrics.loss))
    return losses, fs.unshard(state.params, plan)


def plain(text: str, world: int) -> tuple[list[float], Tree]:
    """Plain PyTorch whose matrices went through the format. Gradients are added in the order of ranks."""
    tree, losses = read(text), []
    for number in range(STEPS):
        sums: Tree = {unit: {} for unit in tree}
        values = []
        for rank in range(world):
            leaves = {u: {n: x.clone().requires_grad_(n == "b") for n, x in tree[u].items()} for u in tree}
            value = loss_fn(leaves, batch(number, rank))
            value.backward(torch.full_like(value, 1 / world))
            values.append(value.item())
            for unit in tree:
                grad = leaves[unit]["b"].grad
                assert grad is not None
                sums[unit]["b"] = sums[unit]["b"] + grad if rank else grad
        losses.append(sum(values) / world)
        tree = {u: {"w": tree[u]["w"], "b": tree[u]["b"] - LR * sums[u]["b"]} for u in tree}
    return losses, tree


def same(one: Tree, other: Tree) -> bool:
    return all(torch.equal(leaf, other[unit][name]) for unit in one for name, leaf in one[unit].items())


RUNS = [(text, world) for text in FORMATS for world in (1, 2, 3, 4) if world in (1, 3) or text in ("nf4/64", "int8/64")]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("text", "world"), RUNS)
def test_training_equals_plain_pytorch_with_rounded_weights(text: str, world: int) -> None:
    """Bit for bit: what units read, and what the other leaves learn."""
    mesh = fs.virtual_mesh((world,), ("data",))
    losses, want = plain(text, world)
    for seen, whole in mesh.run(lambda: trained(text, mesh)):
        assert seen == pytest.approx(losses, rel=1e-6)
        assert same(whole, want)


VARIANTS: dict[str, dict[str, Any]] = {
    "replicated": {"spec": P()},
    "host memory": {"memory_kind": "unpinned_host"},
    "kept in compute": {"schedule": fs.Policy(reshard=False)},
    "recomputed": {"remat": "all"},
    "graphs": {"compile": "fx"},
    "microbatches": {"accumulate": 2},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_with_other_features_it_equals_rounded_weights_that_are_not_packed(name: str) -> None:
    more, mesh = VARIANTS[name], fs.virtual_mesh((2,), ("data",))
    one: Any = mesh.run(lambda: trained("nf4/64", mesh, **more))
    two: Any = mesh.run(lambda: trained(None, mesh, read("nf4/64"), **more))
    for (losses, whole), (others, leaves) in zip(one, two, strict=True):
        assert losses == others and same(whole, leaves)


def on_ranks(text: str) -> Any:
    with fs.make_mesh((-1,), ("data",)) as mesh:
        return trained(text, mesh)


@pytest.mark.long
def test_real_ranks_equal_plain_pytorch(pool: Pools) -> None:
    _, want = plain("nf4/64", 2)
    assert all(same(whole, want) for _, whole in pool(2).run(on_ranks, "nf4/64"))


def test_what_a_step_says_is_what_it_holds_and_sends() -> None:
    mesh = fs.virtual_mesh((2,), ("data",))

    def main() -> Any:
        plan, opt = plan_of("nf4/64", mesh), fs.optim.adamw(1e-3)
        state = fs.init_state(plan, opt, params=start())
        step = fs.make_train_step(loss_fn, opt, plan)
        shards = state.shards()
        held = {group.name: (shards[group.id].param.nbytes, len(shards[group.id].opt)) for group in plan.groups}
        return plan, held, step.trace(batch(0, 0)).schedule

    plan, held, schedule = mesh.run(main)[0]
    for group in plan.groups:
        if group.packed is None:
            continue
        leaf = group.leaves[0]
        payload, scales = leaf.numel / 2, 4 * leaf.numel / 64
        assert held[group.name][1] == 0
        assert held[group.name][0] * 2 <= (payload + scales) * 1.01 + 2 * 64
        move = schedule.groups[group.id].transfer("all_gather")
        assert move.wire == "nf4/64" and move.sent == held[group.name][0] and move.staging == 2 * move.sent
    text = str(plan)
    assert "f32[24, 16]@flat(data) frozen in nf4/64" in text
    assert "at rest in nf4/64: 504 B, of 3.5 KiB, in 3 groups" in text
    unpacked = plan_of(None, fs.abstract_mesh((2,), ("data",)))
    other = fs.make_train_step(loss_fn, fs.optim.adamw(1e-3), unpacked).trace(batch(0, 0)).schedule
    assert schedule.hash != other.hash


def test_a_step_says_it_on_one_rank_too() -> None:
    """Nothing travels; units read what was unpacked in the arena."""
    plan = plan_of("int8/64", fs.abstract_mesh((1,), ("data",)))
    schedule = fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan).trace(batch(0, 0)).schedule
    moves = [move for group in schedule.groups for move in group.transfers if move.wire]
    assert [(move.sent, move.staging) for move in moves] == [(0, 0)] * 3


OPT = fs.optim.adamw(1e-2)


def saved(text: str, folder: str, mesh: fs.Mesh) -> Any:
    plan = plan_of(text, mesh)
    step, state = fs.make_train_step(loss_fn, OPT, plan), fs.init_state(plan, OPT, params=start())
    state, _ = step(state, batch(0, 0))
    fs.Checkpointer(folder).save(state)
    return fs.unshard(state.params, plan)


def restored(text: str | None, folder: str, mesh: fs.Mesh) -> Any:
    plan = plan_of(text, mesh)
    state = fs.Checkpointer(folder).restore(plan, OPT)
    packed = [state.shards()[group.id].param.clone() for group in plan.groups if group.packed is not None]
    whole = fs.unshard(state.params, plan)
    return packed, whole


@pytest.mark.parametrize("text", FORMATS[:3])
def test_checkpoints_hold_the_packed_bits_on_any_mesh(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, two = str(tmp_path), fs.virtual_mesh((2,), ("data",))
    want = two.run(lambda: saved(text, folder, two))[0]
    for world in (1, 2, 3):
        mesh = fs.virtual_mesh((world,), ("data",))
        for _, whole in mesh.run(lambda mesh=mesh: restored(text, folder, mesh)):  # type: ignore[misc]
            assert same(whole, want)
    one = fs.virtual_mesh((1,), ("data",))
    size = sum(part.stat().st_size for part in Path(folder).rglob("*") if part.is_file())
    assert size < 60_000
    assert command(["ckpt", "convert", folder, str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert f"params.one.w:{text}: codes, or scales, of a packed leaf" in capsys.readouterr().err
    with pytest.raises(TreeError, match=r"missing  params.one.w  F32\[24, 16\](?s:.*)change it with fs.reshard_state"):
        one.run(lambda: restored(None, folder, one))


def test_other_users_of_states_read_the_same_values() -> None:
    """``fs.verify``, evaluation, pure losses, steps of parts, state dicts and copies."""
    mesh = fs.virtual_mesh((2,), ("data",))

    def main() -> Any:
        plan, rows = plan_of("nf4/64", mesh), batch(0, mesh.rank)
        state = fs.init_state(plan, OPT, params=start())
        seen = fs.verify(fs.make_train_step(loss_fn, OPT, plan), state, rows)
        pure = fs.func.sharded_loss(loss_fn, plan)(state.params, rows)
        losses = [pure.item(), fs.make_eval_step(loss_fn, plan)(state, rows).item()]
        again = fs.unshard(state.replace(params=state.params).params, plan)
        dicts = fs.io.to_state_dict(state)
        grad, update = fs.value_and_grad(loss_fn, plan), fs.make_update(OPT, plan)

        def twice(state: Any, rows: Any) -> Any:
            """The gradient at parameters that the step has made."""
            _, first = grad(state, rows)
            moved = state.replace(params=tree.map(lambda leaf: leaf * 1.0, state.params))
            value, second = grad(moved, rows)
            return update(state, tree.map(lambda a, b: (a + b) / 2, first, second))[0], value

        after, value = fs.make_step(twice, plan)(state, rows)
        losses.append(float(value))
        return str(seen), losses, again, dicts, fs.unshard(after.params, plan)

    for seen, losses, again, dicts, after in mesh.run(main):
        assert "params.one.b" in seen and losses == pytest.approx([losses[0]] * 3, rel=1e-6)
        assert same(again, read("nf4/64")) and torch.equal(dicts["two.w"], read("nf4/64")["two"]["w"])
        assert torch.equal(after["one"]["w"], again["one"]["w"]) and not torch.equal(
            after["one"]["b"], again["one"]["b"]
        )


def test_a_state_goes_on_with_other_formats() -> None:
    """``fs.reshard_state`` packs, unpacks, and keeps bits where the format stays."""
    mesh = fs.virtual_mesh((2,), ("data",))

    def main() -> Any:
        plans = {text: plan_of(text, mesh) for text in (None, "nf4/64", "int8/64")}
        plans["whole"] = plan_of("nf4/64", mesh, spec=P())
        state = fs.init_state(plans[None], OPT, params=start())
        packed = fs.reshard_state(state, plans["nf4/64"], OPT)
        made = fs.init_state(plans["nf4/64"], OPT, params=start())
        again = fs.reshard_state(packed, plans["whole"], OPT)
        other = fs.reshard_state(packed, plans["int8/64"], OPT)
        loose = fs.reshard_state(packed, plans[None], OPT)
        named = {"packed": (packed, "nf4/64"), "made": (made, "nf4/64"), "again": (again, "whole")}
        named |= {"other": (other, "int8/64"), "loose": (loose, None)}
        return {name: fs.unshard(one.params, plans[text]) for name, (one, text) in named.items()}

    for found in mesh.run(main):
        want = read("nf4/64")
        assert all(same(found[name], want) for name in ("packed", "made", "again", "loose"))
        twice = {u: {n: reference(x, "int8/64") if n == "w" else x for n, x in ls.items()} for u, ls in want.items()}
        assert same(found["other"], twice)


def adapted(packed: str | None, params: Any, mesh: fs.Mesh) -> Any:
    """On a rank: adapters learn beside frozen weights."""
    torch.manual_seed(0)
    stack = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16))
    model = fs.lora.wrap(fs.split(stack, units=("0", "2")), r".*weight", rank=2, alpha=4.0)
    rules = [fs.Rule(r".*weight", fs.fsdp("data"), packed=packed), (r".*", fs.fsdp("data"))]
    plan, opt = fs.make_plan(model, mesh, rules), fs.optim.adamw(1e-2)
    state = fs.init_state(plan, opt, params=params or model.params)
    step = fs.make_train_step(lambda p, x: model.apply(p, x).square().mean(), opt, plan)
    evaluate = fs.make_eval_step(lambda p, x: model.apply(p, x).square().mean(), plan)
    first, losses = fs.unshard(state.params, plan), []
    draw = torch.Generator().manual_seed(mesh.rank)
    for _ in range(3):
        state, metrics = step(state, torch.randn(4, 32, generator=draw))
        losses.append(float(metrics.loss))
    held = evaluate(state, torch.ones(4, 32)).item()
    refused = "" if packed is None else str(pytest.raises(PlanError, fs.lora.absorb, state, alpha=4.0).value)
    return first, losses, held, fs.unshard(state.params, plan), refused


def test_adapters_learn_on_a_packed_base() -> None:
    """As QLoRA: bit for bit what they learn on a base that went through the format."""
    mesh = fs.virtual_mesh((2,), ("data",))
    packed: Any = mesh.run(lambda: adapted("nf4/32", None, mesh))
    loose: Any = mesh.run(lambda: adapted(None, packed[0][0], mesh))
    weight = next(leaf for path, leaf in tree.paths(packed[0][0]) if path == "0.weight")
    assert torch.equal(weight, reference(weight, "nf4/32"))
    for (_, losses, held, whole, refused), (_, others, again, leaves, _) in zip(packed, loose, strict=True):
        assert losses == others and held == again and losses[0] != losses[-1]
        pairs = zip(tree.paths(whole), tree.paths(leaves), strict=True)
        assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
        assert "0.weight  in nf4/32" in refused and "fs.lora.merge(fs.unshard" in refused
    merged = fs.lora.merge(packed[0][3], alpha=4.0)
    assert all(leaf.dtype == torch.float32 for _, leaf in tree.paths(merged))


WIDE, UNITS = 512, 12
SHAPES = {"w": (WIDE, WIDE), "b": (WIDE,)}
SCRATCH = 3 << 19
"""Bytes: what packing and unpacking take for a piece of 128 K elements."""


@fs.unit
def wide(p: Any, x: Tensor) -> Tensor:
    """A layer whose matrix is all of its memory."""
    return torch.tanh(x @ p["w"] + p["b"])


def wide_loss(params: Any, x: Tensor) -> Tensor:
    for leaves in params.values():
        x = wide(leaves, x)
    return x.square().mean()


def loaded(folder: str) -> Any:
    """On a rank: what reading a model into packed shards takes, and what a step does."""
    like = {str(n): {"w": torch.empty(WIDE, WIDE), "b": torch.empty(WIDE)} for n in range(UNITS)}
    with fs.make_mesh((-1,), ("data",)) as mesh:
        rules = [fs.Rule(FIXED, fs.fsdp("data"), trainable=False, packed="nf4"), (".*", fs.fsdp("data"))]
        plan, opt = fs.make_plan(like, mesh, rules, units=("*",)), fs.optim.adamw(1e-3)
        with Peak() as reading:
            state = fs.io.load_hf(folder, plan, opt)
        step = fs.make_train_step(wide_loss, opt, plan)
        rows = torch.ones(2, WIDE)
        memory = step.trace(rows).schedule.memory
        with Peak() as first:
            state, _ = step(state, rows)
        buffers = [buffer for shard in state.shards() for buffer in (shard.param, *shard.opt.values())]
        held = sum(buffer.nbytes for buffer in buffers)
        return (
            reading.above,
            held,
            state_bytes(step, plan),
            first.above,
            memory.peak_bytes,
            fs.unshard(state.params, plan),
        )


def test_a_model_is_read_one_group_at_a_time_and_takes_what_is_said(pool: Pools, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    model = {f"{n}.{name}": torch.randn(*shape, generator=draw) for n in range(UNITS) for name, shape in SHAPES.items()}
    safetensors.torch.save_file(model, tmp_path / "model.safetensors")
    exact = UNITS * WIDE * WIDE * 4 // 2
    for reading, held, said, above, peak, whole in pool(2).run(loaded, str(tmp_path)):
        assert held == said and abs(held - exact * 4.5 / 32) < 0.01 * held + UNITS * WIDE * 8
        assert reading <= held + exact // UNITS + SCRATCH < exact
        assert 0.99 * peak <= above <= 1.01 * peak + SCRATCH
        assert torch.equal(whole["3"]["w"], reference(model["3.w"], "nf4/64"))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "trained": ({"trainable": True}, r"one.w  \[24, 16\]  .*the leaf is trained, and most updates are less than half"),
    "format": ({"packed": "nf5"}, r"rules\[0\] .*packed='nf5' must be one of 'fp8_e4m3', 'int8', 'int4', 'nf4'"),
    "no blocks": ({"packed": "bf16"}, "packed='bf16' must be one of"),
    "block": ({"packed": "nf4/48"}, "packed='nf4/48' must be .* a power of two from 16 on"),
    "small block": ({"packed": "int8/8"}, "packed='int8/8' must be"),
    "no string": ({"packed": 4}, "packed=4 must be one of"),
    "cut": ({"at_rest": P("data")}, "a tensor dim is cut along 'data', and blocks are elements in a row"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_packed_is_refused(name: str) -> None:
    given, says = WRONG[name]
    rule = dataclasses.replace(fs.Rule(FIXED, fs.fsdp("data"), trainable=False, packed="nf4"), **given)
    with pytest.raises(PlanError, match=says):
        fs.make_plan(start(), fs.abstract_mesh((2,), ("data",)), [rule, (".*", fs.fsdp("data"))])


def test_integers_are_not_packed() -> None:
    params = {"w": torch.zeros(64, dtype=torch.int64)}
    with pytest.raises(PlanError, match=r"its dtype is torch.int64, and values of 16 bits and more are packed"):
        rule = fs.Rule("w", fs.fsdp("data"), trainable=False, packed="nf4")
        fs.make_plan(params, fs.abstract_mesh((2,), ("data",)), [rule])
