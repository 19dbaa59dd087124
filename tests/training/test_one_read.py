"""A step reads its device once, at the consensus, and exchanges two rows with the other ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard.runtime.steps.consensus import MEANS, OK, exchange_row, tally, tally_columns, verdict_of
from fshard.runtime.steps.readings import read
from tests.shared.workers import Pools

AUX = ["one", "two", "three"]


class Reads(TorchDispatchMode):
    """Counts the reads of single numbers, each of which would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def loss_of(params: Any, batch: Tensor) -> Any:
    """A mean over rows, with auxiliary means."""
    rows = (batch @ params["a"]) @ params["b"]
    means = {name: fs.Mean(rows.sum() * n, torch.tensor(rows.numel())) for n, name in enumerate(AUX)}
    return fs.Mean(rows.square().sum(), torch.tensor(rows.numel())), means


def counted(options: dict[str, Any]) -> tuple[int, int, dict[str, float]]:
    """On a rank: the reads and the exchanges of the third step, and its auxiliary means."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        params = {name: torch.linspace(-1, 1, 64).view(8, 8) for name in "ab"}
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))])
        opt = fs.optim.adamw(1e-2)
        state = fs.init_state(plan, opt, params=params)
        step = fs.make_train_step(loss_of, opt, plan, **options)
        batch = torch.arange(4.0 * 8).view(4, 8) + mesh.rank
        for _ in range(2):
            state, metrics = step(state, batch)
        control, sent = step._runner.programs.comms.control, []
        if mesh.size > 1:
            gather = control.all_gather
            control.all_gather = lambda *args: (sent.append(1), gather(*args))[1]  # type: ignore[method-assign]
        with Reads() as reads:
            state, metrics = step(state, batch)
        return reads.count, len(sent), {name: value.item() for name, value in metrics.aux.items()}


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": [("a", 0.1), ("b", None)]},
        {"accumulate": 2, "clip_norm": 0.1},
        {"loss_scale": fs.LossScale()},
        {"norms": "groups"},
        {"norms": ["a"], "clip_norm": [("a", 0.1), ("b", None)]},
    ],
    ids=["plain", "rules of clipping", "microbatches", "loss scale", "norms of groups", "norms by pattern"],
)
def test_a_step_reads_its_device_once_and_exchanges_twice(pool: Pools, world: int, options: dict[str, Any]) -> None:
    found = pool(world).run("tests.training.test_one_read:counted", options)
    for reads, sent, aux in found:
        assert reads == 0  # all numbers come in one tensor
        assert sent == (2 if world > 1 else 0)
        assert aux == found[0][2]
    assert found[0][2]["one"] == 0.0 and found[0][2]["three"] == 2 * found[0][2]["two"]


def test_reading_keeps_every_number() -> None:
    values = [torch.tensor(1.1), torch.tensor(2**40 + 1), 3, torch.tensor(1.1, dtype=torch.float64), 0.5]
    assert [*read(values)] == [torch.tensor(1.1).item(), float(2**40 + 1), 3.0, 1.1, 0.5]


@pytest.mark.parametrize("count", [0, 1, MEANS, MEANS + 1, 3 * MEANS])
def test_any_number_of_means_is_averaged(count: int) -> None:
    means = {f"{n:03}": fs.Mean(torch.tensor(float(n)), 2) for n in range(count)}
    mine = tally((), (), [(torch.tensor(1.0), 1.0)], [means, means], False, False)
    assert mine.named[0] == 2 * count
    said = fs.virtual_mesh((2,), ("any",)).run(averaged, mine)
    assert [verdict.means for verdict in said] == [tuple(n / 2 for n in range(count))] * 2


def averaged(mine: Any) -> Any:
    """On a played rank: the verdict."""
    mesh = fs.make_mesh((2,), ("any",))
    comm = mesh.transport.communicator("control", mesh.axis_names)
    return verdict_of(comm, exchange_row(comm, OK, tally_columns(mine)), mine, 2, 1, 2.0)


@pytest.mark.parametrize("size", [1, 2])
def test_a_row_has_each_number_by_its_name(size: int) -> None:
    """Ranks bring other counts of numbers, and all of them have room for as many."""
    mesh = fs.virtual_mesh((size,), ("any",))

    def on_a_rank() -> Any:
        comm, rank = mesh.transport.communicator("control", mesh.axis_names), mesh.rank
        row = exchange_row(comm, rank, {"a": ([1.0] * rank, 2), "none": ((), 0), "b": ([1e308, float(rank)], 2)})
        return row.status, row.told("a"), row.told("none"), row.summed("a"), row.summed("b")

    found = mesh.run(on_a_rank)
    assert all(each == found[0] for each in found)
    status, a, none, sums, large = found[0]
    assert status == tuple(range(size)) and [*map(list, a)] == [
        [float(at < rank) for at in range(2)] for rank in range(size)
    ]
    assert [*map(list, none)] == [[]] * size and sums == [float(size - 1), 0.0]
    assert large == [1e308 * size, float(size - 1)], "a sum that no float holds is infinite, and no error"
