"""The virtual mesh: the product on it gives the numbers of real ranks, and what cannot go on says so at once."""

import contextlib
import math
import random
import threading
import time
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fshard as fs
from fshard import collectives as c
from fshard.errors import CommError, TransformError
from tests.shared.parity import Run
from tests.shared.workers import Pools
from tests.training.test_parity import FEW, SHORT, train

FOUR = fs.virtual_mesh((4,), ("shard",))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "sizes", "exact"),
    [
        ("gpt", (2,), True),
        pytest.param("conv", (2, 2), True, marks=pytest.mark.slow),
        pytest.param("gpt", (3,), False, marks=pytest.mark.slow),
        ("branching", (2,), True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*left their schedule")
def test_training_gives_the_numbers_of_real_ranks(pool: Pools, name: str, sizes: tuple[int, ...], exact: bool) -> None:
    """In every bit, except where gloo's all-reduce adds three ranks in an order of its own."""
    axes = (sizes, ("shard",)) if len(sizes) == 1 else (sizes, ("replica", "shard"))
    mesh = fs.virtual_mesh((math.prod(sizes),), ("any",))
    real = pool(mesh.size).run(train, name, FEW[:2], axes, SHORT)
    for here, there in zip(mesh.run(train, name, FEW[:2], axes, SHORT), real, strict=True):
        for mine, other in zip(here, there, strict=True):
            _compare(mine, other, exact)


def _compare(mine: Run, other: Run, exact: bool) -> None:
    assert mine.problems == other.problems == []
    tolerance = 0.0 if exact else 2e-5
    assert mine.losses == pytest.approx(other.losses, rel=tolerance, abs=0)
    assert mine.norms == pytest.approx(other.norms, rel=tolerance, abs=0)
    for path, leaf in mine.params.items():
        torch.testing.assert_close(leaf, other.params[path], rtol=tolerance, atol=tolerance)


def test_evaluation(pool: Pools) -> None:
    got = fs.virtual_mesh((3,), ("any",)).run(evaluated)
    assert got == pool(3).run(evaluated)


def evaluated() -> tuple[float, list[float]]:
    """On a rank: a mean loss over uneven rows, and initial values."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        model = fs.split(torch.nn.Linear(5, 3))
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))], batch=fs.P("shard"))
        state = fs.init_state(plan, fs.optim.sgd(0.1), seed=3)

        def loss(params: Any, batch: Any) -> Any:
            return fs.Mean(model.apply(params, batch).square().sum(), batch.shape[0])

        rows = torch.arange(5.0 * (mesh.rank + 2)).view(-1, 5)
        return fs.make_eval_step(loss, plan)(state, rows).item(), fs.unshard(state.params, plan)["bias"].tolist()


def test_generators_are_those_of_each_rank() -> None:
    def draw() -> list[float]:
        out = []
        for _ in range(3):
            out += [torch.rand(()).item(), random.random()]
            c.psum(torch.ones(()), "shard", mesh=FOUR)
        return out

    torch.manual_seed(5)
    random.seed(5)
    rows = FOUR.run(draw)
    after = torch.rand(()).item()
    assert all(row == rows[0] for row in rows)
    torch.manual_seed(5)
    random.seed(5)
    assert fs.virtual_mesh((1,), ("shard",)).run(lambda: [torch.rand(()).item() for _ in range(4)])[0] == [
        *rows[0][::2],
        after,
    ]


def test_modes_of_the_caller_hold() -> None:
    with torch.no_grad():
        assert FOUR.run(torch.is_grad_enabled) == [False] * 4
    with torch.inference_mode():
        assert FOUR.run(lambda: c.psum(torch.ones(2), "shard", mesh=FOUR).is_inference()) == [True] * 4
    with torch.autocast("cpu", torch.bfloat16):
        assert FOUR.run(lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).dtype) == [torch.bfloat16] * 4
    assert FOUR.run(torch.is_grad_enabled) == [True] * 4


def test_a_rank_that_returns_early_is_named() -> None:
    def early() -> None:
        if FOUR.rank != 2:
            c.psum(torch.ones(2), "shard", mesh=FOUR)

    with pytest.raises(CommError, match=r"rank 0 waits for all-gather .* at fs.psum, .*test_virtual.py:\d+\n.*\n") as e:
        FOUR.run(early)
    assert "rank 2 returned" in str(e.value)


def test_the_error_of_a_rank_is_raised_and_ends_the_others() -> None:
    ended = []

    def broken() -> None:
        try:
            if FOUR.rank == 2:
                raise ValueError("not mine")
            c.psum(torch.ones(2), "shard", mesh=FOUR)
        except CommError as error:
            ended.append(str(error))
            raise

    began = time.monotonic()
    with pytest.raises(ValueError, match="not mine") as e:
        FOUR.run(broken)
    assert e.value.__notes__ == ["on rank 2 of a virtual mesh of 4"]
    assert len(ended) == 3 and all("rank 2 raised ValueError: not mine" in text for text in ended)
    assert time.monotonic() - began < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_ranks_that_disagree_on_a_call_are_named() -> None:
    def shapes() -> None:
        c.psum(torch.ones(2 + (FOUR.rank == 3)), "shard", mesh=FOUR)

    def kinds() -> None:
        x = torch.ones(4)
        if FOUR.rank == 1:
            c.psum_scatter(x, "shard", mesh=FOUR)
        else:
            c.all_gather(x, "shard", mesh=FOUR)

    with pytest.raises(CommError, match="rank 3 calls all-gather of 12 uint8 on .* rank 0 calls all-gather of 8"):
        FOUR.run(shapes)
    with pytest.raises(CommError, match="rank 1 calls reduce-scatter of 4 float32 .* rank 0 calls all-gather"):
        FOUR.run(kinds)


def test_two_orders_on_two_axes_do_not_hang() -> None:
    mesh = fs.virtual_mesh((2, 2), ("a", "b"))

    def crossed() -> None:
        for axis in ("a", "b") if mesh.rank in (0, 3) else ("b", "a"):
            c.psum(torch.ones(()), axis, mesh=mesh)

    with pytest.raises(CommError, match="no rank can go on"):
        mesh.run(crossed)


def test_tangents_of_one_rank_outlive_the_jvp_of_another() -> None:
    def staggered() -> float:
        def f(x: torch.Tensor) -> torch.Tensor:
            y = x * x
            for _ in range(3):
                y = y + 0 * c.psum(torch.ones(()), "shard", mesh=FOUR)
            return y

        return torch.func.jvp(f, (torch.tensor(3.0),), (torch.tensor(1.0),))[1].item()

    assert FOUR.run(staggered) == [6.0] * 4
    x = torch.tensor(2.0)
    assert torch.func.jvp(torch.sin, (x,), (x,))[1].item() == pytest.approx(2 * torch.cos(x).item())


def test_a_backward_outside_of_its_run_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    total = FOUR.run(lambda: c.psum_scatter(x.repeat(2), "shard", mesh=FOUR).sum())[1]
    with pytest.raises(fs.errors.PlanError, match="outside of mesh.run"):
        total.backward()

    def kept() -> torch.Tensor:
        mesh = fs.make_mesh((4,), ("shard",))
        return c.psum_scatter(x.repeat(2), "shard", mesh=mesh).sum()

    with pytest.raises(CommError, match="rank 1 outside of its run"):
        FOUR.run(kept)[1].backward()


def test_a_run_under_a_transform_is_refused() -> None:
    with pytest.raises(TransformError, match=r"fs\.shard_map"):
        torch.func.grad(lambda x: sum(FOUR.run(lambda: x.sum())))(torch.ones(2))


def test_outside_of_a_run_it_is_abstract() -> None:
    assert FOUR.rank == 0 and FOUR.transport is None
    with pytest.raises(fs.errors.PlanError, match="no processes"):
        c.psum(torch.ones(2), "shard", mesh=FOUR)


def test_a_run_inside_of_a_run() -> None:
    inner = fs.virtual_mesh((2,), ("i",))

    def nested() -> tuple[int, list[int], int]:
        here = inner.run(lambda: c.psum(inner.rank + 1, "i", mesh=inner))
        return FOUR.rank, here, c.psum(1, "shard", mesh=FOUR)

    assert FOUR.run(nested) == [(rank, [2, 4], 4) for rank in range(4)]


def test_each_rank_has_its_own_attention_kernels() -> None:
    """A process has one set of these switches, and a context puts back what it found: ranks take turns inside of it."""
    mesh = fs.virtual_mesh((3,), ("any",))

    def plain() -> list[bool]:
        seen = []
        with fs.make_mesh((3,), ("any",)) as mine:
            for _ in range(2):
                with sdpa_kernel(SDPBackend.MATH) if mine.rank else contextlib.nullcontext():
                    c.psum(torch.ones(1), "any", mesh=mine)
                    seen.append(torch.backends.cuda.flash_sdp_enabled())
                seen.append(torch.backends.cuda.flash_sdp_enabled())
        return seen

    assert torch.backends.cuda.flash_sdp_enabled()
    assert mesh.run(plain) == [[True] * 4, [False, True] * 2, [False, True] * 2]
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()


def test_runs_of_several_threads_come_one_after_the_other() -> None:
    """The forward-mode level of torch.func and the random generators are those of the process."""
    found: dict[int, Any] = {}

    def slope(mesh: fs.Mesh, count: int) -> list[float]:
        def f(x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.002)  # lets the other thread run
            return c.psum(x * x, "data", mesh=mesh)

        return [torch.func.jvp(f, (torch.tensor(float(n)),), (torch.tensor(1.0),))[1].item() for n in range(count)]

    def play(number: int) -> None:
        mesh = fs.virtual_mesh((2,), ("data",))
        try:
            found[number] = mesh.run(slope, mesh, 5 * number + 5)  # the first one ends first
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=play, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [[4.0 * n for n in range(5 * number + 5)]] * 2 for number in range(3)}


def test_a_rank_may_run_another_mesh() -> None:
    inner, outer = (fs.virtual_mesh((2,), (name,)) for name in ("in", "out"))
    assert outer.run(lambda: inner.run(lambda: outer.axis_names)) == [[("out",)] * 2] * 2
