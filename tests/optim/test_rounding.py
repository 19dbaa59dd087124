"""Stochastic rounding of bfloat16 parameters: right on average, the same on every mesh, and able to learn."""

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P, tree
from fshard.errors import PlanError
from fshard.model.philox import fold
from fshard.runtime.comm.triton_language import triton
from fshard.runtime.execution import rounding, rounding_bits, rounding_kernel
from fshard.runtime.execution.rounding_bits import MIX, WEYL, LeafPart, Positions, levels, round_
from fshard.sharding.layout import Piece, global_index
from tests.runtime.test_memory_kinds import KINDS, hosted
from tests.shared.workers import Pools

BF16 = torch.bfloat16
STOCHASTIC = fs.Precision(rounding="stochastic")
STEPS = 6


def params() -> dict[str, Any]:
    """Leaves of sizes that no number of ranks divides, in bfloat16, and one in float32."""
    draw = torch.Generator().manual_seed(2)
    return {
        "a": {"w": torch.randn(7, 5, generator=draw).to(BF16), "b": torch.randn(3, generator=draw).to(BF16)},
        "out": torch.randn(11, generator=draw).to(BF16),
        "exact": torch.randn(4, generator=draw),
    }


def loss_fn(p: Any, slope: Tensor) -> Tensor:
    """Linear, so that gradients are exact and equal on all ranks."""
    total: Tensor = sum((leaf.float() * slope[0]).sum() for leaf in tree.leaves(p))  # type: ignore[assignment]
    return total


def trained(name: str, spec: P, kinds: str = "") -> list[dict[str, Tensor]]:
    """On a rank: parameters and optimizer state, whole, after training; with ``kinds`` of memory."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        rules = hosted([("exact", P()), (".*", spec)], KINDS.get(kinds, {}))
        plan = fs.make_plan(params(), mesh, rules, units=("a",), precision=STOCHASTIC)
        opt = _opt(name)
        state = fs.init_state(plan, opt, seed=7, params=params())
        step = fs.make_train_step(loss_fn, opt, plan, debug=True)
        for _ in range(STEPS):
            state, _ = step(state, torch.full((2,), 0.5))
        return [dict(tree.paths(fs.unshard(t, plan))) for t in (state.params, *state.opt_state.values())]


def _opt(name: str) -> Any:
    return fs.optim.adamw(1e-3, weight_decay=0.1) if name == "adamw" else fs.optim.sgd(1e-3, momentum=0.9)


def plain(name: str) -> dict[str, Tensor]:
    """In one process, with torch's own optimizer in float32, and rounding here."""
    kept = dict(tree.paths(params()))
    made: dict[str, dict[str, Tensor]] = {path: {} for path in kept}
    for number in range(STEPS):
        for path, leaf in kept.items():
            wide = leaf.float().requires_grad_()
            rule: Any = torch.optim.SGD([wide], lr=1e-3, momentum=0.9)
            if name == "adamw":
                rule = torch.optim.AdamW([wide], lr=1e-3, weight_decay=0.1, fused=True)
            if made[path]:
                rule.state[wide] = {
                    **{k: v.float() for k, v in made[path].items()},
                    **({"step": torch.tensor(float(number))} if name == "adamw" else {}),
                }
            wide.grad = torch.full_like(wide, 0.5)
            rule.step()
            states = {k: v for k, v in rule.state[wide].items() if k != "step"}
            if leaf.dtype == BF16:
                kept[path] = _rounded(wide.detach(), number, "", path)
                made[path] = {k: _rounded(v, number, k, path) for k, v in states.items()}
            else:
                kept[path], made[path] = wide.detach(), states
    return kept


def _rounded(x: Tensor, step: int, what: str, path: str) -> Tensor:
    """Up with the probability of the cut bits, by arithmetic instead of bits."""
    key = fold(7, f"round:{what}:{path}") + fold(7, f"round:{step}")
    draw = torch.tensor([word(key, index) for index in range(x.numel())]).view(x.shape)
    down = (x.view(torch.int32) & -65536).view(torch.float32)
    up = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    share = ((x.double() - down) / (up.double() - down)).abs()
    return torch.where(share + draw.double() / 65536 >= 1, up, down).bfloat16()


def word(key: int, index: int) -> int:
    """SplitMix64 in Python's integers: the 16 bits of an element of a leaf."""
    state = (key + index // 4 * WEYL) % 2**64
    for shift, factor in MIX:
        state = (state ^ state >> shift) * factor % 2**64
    return ((state >> 16 * (index % 4)) + 2**15) % 2**16


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_values_do_not_depend_on_the_mesh(pool: Pools, name: str) -> None:
    expected = plain(name)
    ends = [
        ran
        for world, spec in ((1, P(flat="shard")), (2, P(flat="shard")), (4, P(flat="shard")), (2, P()))
        for ran in pool(world).run(trained, name, spec)
    ]
    for path, leaf in expected.items():
        assert leaf.dtype == (torch.float32 if path == "exact" else BF16)
        torch.testing.assert_close(ends[0][0][path], leaf, rtol=0, atol=1e-6 if path == "exact" else 0)
        for end in ends[1:]:
            for one, other in zip(end, ends[0], strict=True):
                assert torch.equal(one[path], other[path]), path


def in_memories(name: str, kinds: list[str]) -> list[list[dict[str, Tensor]]]:
    """On a rank: the same under several kinds of memory, flat and replicated."""
    return [trained(name, spec, kind) for kind in kinds for spec in (P(flat="shard"), P())]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
def test_values_do_not_depend_on_where_things_lie(pool: Pools, name: str) -> None:
    """Parameters or state in host memory, updated on either side: the bits of one plain process."""
    expected = plain(name)
    for ran in pool(2).run(in_memories, name, ["", *KINDS]):
        assert len(ran) == 2 * (len(KINDS) + 1)
        for end in ran:
            for path, leaf in expected.items():
                torch.testing.assert_close(end[0][path], leaf, rtol=0, atol=1e-6 if path == "exact" else 0)
            for one, other in zip(end, ran[0], strict=True):
                assert all(torch.equal(one[path], other[path]) for path in expected)


def one_leaf(key: int = 5) -> Positions:
    """A leaf that a buffer holds whole."""
    return Positions.of([LeafPart(0, key, 0)], torch.device("cpu"))


def drawn(key: int, count: int, leaf: int = 5) -> Tensor:
    """The bits of the elements of a leaf: the smallest distance below the next number that is rounded up, backwards."""
    return rounding_bits._bits(one_leaf(leaf), 0, count, key).int() + 2**15


def test_what_is_rounded_is_right_on_average() -> None:
    x = torch.full((200_000,), 1.0 + 2.0**-7 * 0.3)
    rounded = x.clone()
    round_(rounded, len(x), one_leaf(), key=3)
    assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert float(rounded.double().mean()) == pytest.approx(float(x[0]), abs=2.0**-7 * 0.005)
    assert x.bfloat16().eq(1.0).all()  # to nearest it would be lost


def test_values_without_a_fraction_stay() -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf"), float("nan"), 2.0**-133])
    special = torch.cat(
        [special, torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -8388607], dtype=torch.int32).view(torch.float32)]
    )
    for key in range(50):
        rounded = special.clone()
        round_(rounded, len(special), one_leaf(), key)
        assert torch.equal(rounded[:6], special[:6]) and rounded[7] == special[7]
        assert rounded[6].isnan() and rounded[8:].isnan().all()


def test_bits_are_those_of_the_published_generator() -> None:
    """The first numbers of SplitMix64 with seed 0."""
    mixed = rounding_bits._mixed(torch.arange(1, 4).mul_(WEYL)).tolist()
    assert [n % 2**64 for n in mixed] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_bits_are_even_and_know_nothing_of_each_other() -> None:
    """Of neighbours, of steps and of leaves: 256 bins of two half bytes, whose squares are 255 on average, +- 23."""
    count = 1 << 18
    here, next_step, other = drawn(1, count), drawn(2, count), drawn(1, count, leaf=6)
    pairs = [(here[:-lag], here[lag:]) for lag in (1, 2, 3, 4, 5, 64, 1024)]
    for one, two in [*pairs, (here, next_step), (here, other)]:
        for shift in (0, 6, 12):
            bins = torch.bincount((one >> shift & 15) * 16 + (two >> shift & 15), minlength=256)
            mean = len(one) / 256
            assert 130 < float(((bins - mean) ** 2 / mean).sum()) < 400


@given(st.data())
def test_elements_of_a_box_have_the_bits_of_the_leaf(data: st.DataObject) -> None:
    """Parts of boxes that ranks hold, behind other leaves in their buffer: the bits that the whole leaf has there."""
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=3))
    shape, part = tuple(a + b for a, b in sizes), tuple(a for a, _ in sizes)
    offset = tuple(data.draw(st.integers(0, b)) for _, b in sizes)
    numel = math.prod(part)
    start = 4 * data.draw(st.integers(0, (numel - 1) // 4))
    piece = Piece(offset, part, start, numel)
    before = 4 * data.draw(st.integers(0, 5))
    rows = [LeafPart(0, 1, 8)] * (before > 0) + [LeafPart(before, 9, start, levels(shape, piece))]
    count = numel - start
    end = before + -(-count // 4) * 4
    positions = Positions.of(rows, torch.device("cpu"))
    found = rounding_bits._bits(positions, 0, end, 77)
    assert positions.grain == (4 if part == shape else 1)
    whole = rounding_bits._bits(one_leaf(9), 0, -(-math.prod(shape) // 4) * 4, 77)
    index = global_index(shape, piece, torch.device("cpu"))
    assert torch.equal(found[before : before + count], whole[index])
    assert torch.equal(found[:before], rounding_bits._bits(one_leaf(1), 8, 8 + before, 77))
    cut = before // 2 // 4 * 4  # blocks begin anywhere
    assert torch.equal(rounding_bits._bits(positions, cut, end, 77), found[cut:])


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(rounding: str) -> int:
    """The operators of a step of three layers in bfloat16."""
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(3)]
    model = fs.split(torch.nn.Sequential(*layers).bfloat16(), units=("*",))
    with fs.make_mesh((1,), ("data",)) as mesh:
        precision = fs.Precision(rounding=rounding)  # type: ignore[arg-type]
        plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=P("data"), precision=precision)
        opt, x = fs.optim.adamw(1e-3), torch.ones(8, 16, dtype=BF16)
        state = fs.init_state(plan, opt, params=model.params)
        step = fs.make_train_step(lambda p, x: (model.apply(p, x) - x).float().square().mean(), opt, plan)
        for _ in range(2):
            state, _ = step(state, x)
        with Operators() as seen:
            step(state, x)
        return seen.count


def test_rounding_takes_few_operators() -> None:
    """All small leaves are rounded together: the step has a constant number of operators more."""
    assert operators("nearest") <= 75
    assert operators("stochastic") <= 100


def test_batches_and_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    want = trained("adamw", P(flat="shard"))
    monkeypatch.setattr(rounding, "BATCH", 16)
    monkeypatch.setattr(rounding_bits, "block", lambda device: 16)
    for one, other in zip(trained("adamw", P(flat="shard")), want, strict=True):
        assert all(torch.equal(one[path], other[path]) for path in want[0])


def of_boxes(one: bool) -> Tensor:
    """On a rank: a leaf that is cut by columns and by rows, whole, after training."""
    with fs.make_mesh((-1, 1) if one else (2, 2), ("rows", "columns")) as mesh:
        start = {"w": torch.linspace(-1, 1, 60).view(6, 10).to(BF16)}
        plan = fs.make_plan(start, mesh, [("w", P("rows", "columns"))], batch=P(), precision=STOCHASTIC)
        opt = fs.optim.adamw(1e-3)
        state = fs.init_state(plan, opt, seed=7, params=start)
        step = fs.make_train_step(loss_fn, opt, plan)
        for _ in range(3):
            state, _ = step(state, torch.full((2,), 0.5))
        whole: Tensor = fs.unshard(state.params, plan)["w"]
        return whole


def test_boxes_of_a_leaf_are_rounded_as_the_whole_leaf() -> None:
    (want,) = fs.virtual_mesh((1,), ("any",)).run(of_boxes, True)
    assert all(torch.equal(end, want) for end in fs.virtual_mesh((4,), ("any",)).run(of_boxes, False))


KERNEL = pytest.mark.skipif(rounding_kernel.KERNEL is None, reason="this build of PyTorch comes without Triton")

INTERPRETED = """
import torch
from fshard.runtime.execution import rounding_kernel
from fshard.runtime.execution.rounding import right
assert right(rounding_kernel.round_to, torch.device("cpu")) is rounding_kernel.round_to
"""


@KERNEL
def test_the_kernel_has_these_bits_where_triton_interprets_it() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-W", "error", "-c", INTERPRETED], check=True, env=environment, timeout=120)


@KERNEL
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("grain", [1, 4])
def test_the_kernel_can_be_compiled_for_a_gpu(grain: int, stored: bool) -> None:
    """This needs no GPU: Triton comes with NVIDIA's assembler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named = {
        "searches": 3,
        "levels": 0 if grain == 4 else 2,
        "grain": grain,
        "counters": rounding_kernel.BLOCK // grain,
        "stored": stored,
    }
    named |= rounding_kernel.CONSTANTS
    types = {
        "out": "*bf16",
        "x": "*fp32",
        "begin": "i32",
        "length": "i32",
        "table": "*i64",
        "leaves": "i32",
        "key": "*i64" if stored else "i64",
    }
    signature = types | dict.fromkeys(named, "constexpr")
    source = ASTSource(fn=rounding_kernel.KERNEL, signature=signature, constexprs=named)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_rounds_with_the_kernel() -> None:
    x = torch.ones(8, device="cuda")
    assert rounding.kernel_of(x) is rounding_kernel.round_to


def test_a_kernel_with_other_bits_or_that_cannot_be_compiled_is_not_used() -> None:
    cpu = torch.device("cpu")

    def right_one(out: Tensor, x: Tensor, begin: int, positions: Positions, key: int) -> None:
        flat = torch.zeros(begin + -(-len(x) // 4) * 4)
        flat[begin : begin + len(x)] = x
        round_(flat, len(flat), positions, key)
        out.copy_(flat[begin : begin + len(x)])

    def other(out: Tensor, x: Tensor, begin: int, positions: Positions, key: int) -> None:
        right_one(out, x, begin, positions, key + 1)

    def no_compiler(*args: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    assert rounding.right(right_one, cpu) is right_one
    with pytest.warns(UserWarning, match="that rounds stochastically cannot be used on cpu: it has other bits"):
        assert rounding.right(other, cpu) is None
    with pytest.warns(UserWarning, match="C compiler"):
        assert rounding.right(no_compiler, cpu) is None
    assert rounding.kernel_of(torch.ones(8)) is None


def test_small_updates_count() -> None:
    """Ten steps of 1e-3 move a parameter of 1.0 by 0.01; rounded to nearest, none of them does."""
    ends = {}
    for asked in ("nearest", "stochastic"):
        with fs.make_mesh((-1,), ("shard",)) as mesh:
            tree_ = {"w": torch.ones(4096, dtype=BF16)}
            precision = fs.Precision(rounding=asked)  # type: ignore[arg-type]
            plan = fs.make_plan(tree_, mesh, [(".*", fs.fsdp("shard"))], precision=precision)
            opt = fs.optim.sgd(1e-3)
            state = fs.init_state(plan, opt, params=tree_)
            step = fs.make_train_step(lambda p, b: -(p["w"].float() * b[0]).sum(), opt, plan)
            for _ in range(10):
                state, _ = step(state, torch.ones(2))
            ends[asked] = float(state.params["w"].double().mean())
    assert ends["nearest"] == 1.0 and ends["stochastic"] == pytest.approx(1.01, abs=5e-4)


def test_rounding_that_rounds_nothing() -> None:
    mesh = fs.abstract_mesh((2,), ("s",))
    with pytest.raises(PlanError, match="none of its 1 leaves, such as w, is"):
        fs.make_plan({"w": torch.ones(4)}, mesh, [(".*", fs.fsdp("s"))], precision=STOCHASTIC)
    with pytest.raises(PlanError, match="rounding='up'"):
        fs.Precision(rounding="up")  # type: ignore[arg-type]
