"""A device packs and unpacks with few kernels, whose number does not depend on that of ranks, and with the host's bits.
A transfer over NCCL is one call.

It is the host that runs them here: no GPU is needed to count them.
"""

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fshard.errors import CommError
from fshard.runtime.comm import packing, row_sums
from fshard.runtime.comm.device_streams import Stream
from fshard.runtime.comm.nccl import NcclCommunicator
from fshard.runtime.comm.packing import pack_rows, packed, unpack_rows, unpack_sum
from fshard.runtime.execution.wires import rows_gathered
from fshard.sharding.wire import FORMATS, WireFormat
from tests.comm.test_packing import FORMS, IDS, OPTIONS, values
from tests.shared.launches import Launches

MOST = 6
"""Kernels of the start of a transfer, and of its wait."""

TRAVELS = [WireFormat(name, 256 if codes.largest else 1) for name, codes in FORMATS.items() if codes.travels]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What a device does, and its kernel that sums rows, which is one launch."""
    launches = Launches()

    def kernel(out: Tensor, rows: Tensor, add: bool) -> None:
        with launches.as_one():
            row_sums._sum_one_by_one(out, rows, add)

    monkeypatch.setattr(packing, "on_host", lambda device: False)
    monkeypatch.setattr(row_sums, "kernel_of", lambda device: kernel)
    return launches


def gradients(rows: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of numbers of many sizes, with halves of codes, and what is no number."""
    x = torch.stack([values(count) * (number + 1) for number in range(rows)])
    x[0, 1], x[0, 256], x[-1, 600], x[:, 1000:1200] = math.inf, math.nan, -math.inf, -0.0
    ties = torch.arange(-127, 128) / 2
    x[:, 1536 : 1536 + len(ties)] = ties
    x[:, 1792] = 7.0
    x[:, 1793 : 1793 + 29] = torch.arange(-14, 15) / 2
    x[:, 1793 + 29 : 2048] = 0
    return x.to(dtype)


@pytest.mark.parametrize("form", [*FORMS, *OPTIONS], **IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_device_has_the_bits_of_the_host(
    form: WireFormat, dtype: torch.dtype, device: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = gradients(5, 2048, dtype)

    def moved() -> dict[str, Tensor]:
        sent = torch.zeros(len(rows), form.nbytes(2048), dtype=torch.uint8)
        pack_rows(rows, form, sent)
        out = dict[str, Tensor]()
        for add in (0, 1, -1):
            out[f"rows {add}"] = torch.full_like(rows, -0.0)
            unpack_rows(sent, form, out[f"rows {add}"], add)
        for add in (False, True):
            out[f"sum {add}"] = torch.full_like(rows[0], -0.0)
            unpack_sum(sent, form, out[f"sum {add}"], add)
        return out

    ours = moved()
    monkeypatch.setattr(packing, "on_host", lambda device: True)
    for (name, one), other in zip(ours.items(), moved().values(), strict=True):
        wrong = ~one.isfinite()
        assert torch.equal(wrong, ~other.isfinite())
        bits = [x.masked_fill(wrong, 0).view(torch.uint8) for x in (one, other)]
        assert torch.equal(*bits), name
    # Codes of a block that is not finite mean nothing; those of others are equal, too.
    finite = gradients(5, 2048, dtype).masked_fill(~rows.isfinite(), 0)[2]
    host = packed(finite, form)
    monkeypatch.setattr(packing, "on_host", lambda device: False)
    assert torch.equal(packed(finite, form), host)


@pytest.mark.parametrize("form", TRAVELS, **IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_ranks_does_not_change_the_number_of_launches(
    form: WireFormat, dtype: torch.dtype, device: Launches
) -> None:
    counts: list[dict[str, int]] = []
    for ranks in (2, 8, 64):
        full, shard = torch.randn(ranks, 512).to(dtype), torch.zeros(512, dtype=dtype)
        sent, out = torch.zeros(ranks, form.nbytes(512), dtype=torch.uint8), torch.zeros_like(full)
        calls: dict[str, Any] = {
            "pack": lambda full=full, sent=sent: pack_rows(full, form, sent),
            "unpack": lambda sent=sent, out=out: unpack_rows(sent, form, out),
            "add": lambda sent=sent, out=out: unpack_rows(sent, form, out, 1),
        }
        if dtype == torch.float32:  # gradients are summed in it
            calls["sum"] = lambda sent=sent, shard=shard: unpack_sum(sent, form, shard, False)
            calls["sum and add"] = lambda sent=sent, shard=shard: unpack_sum(sent, form, shard, True)
        counts.append({name: device.of(call) for name, call in calls.items()})
    assert max(count for each in counts for count in each.values()) <= MOST, counts
    assert counts[1] == counts[2], counts


class Group:
    """A process group of NCCL that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            assert args[-1].asyncOp
            self.calls.append(name)
            return self

        return call

    def wait(self) -> None:
        """The current stream waits."""


COLLECTIVES = {
    "all_gather_single": lambda comm, x: comm.all_gather(x, x[:4]),
    "all_gather_single_coalesced": lambda comm, x: rows_gathered(comm, x, x[:4], 4),
    "reduce_scatter_single": lambda comm, x: comm.reduce_scatter(x[:4], x, x, False),
    "allreduce": lambda comm, x: comm.all_reduce(x),
    "all_to_all_single": lambda comm, x: comm.all_to_all(x, x, None, None),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_transfer_over_nccl_is_one_call_and_makes_no_event(name: str) -> None:
    """NCCL's stream waits for the current one by itself. The side stream, which is None here, is for given events."""
    group, calls = Group(), list[str]()
    if not hasattr(ProcessGroup, name):
        pytest.skip(f"this PyTorch has another name for {name}")
    comm = NcclCommunicator("c", 2, group, None)  # type: ignore[arg-type]
    COLLECTIVES[name](comm, torch.zeros(8)).wait()  # makes the options
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        COLLECTIVES[name](comm, torch.zeros(8)).wait()
    finally:
        sys.setprofile(None)
    assert group.calls == [name, name]
    assert len(calls) <= 14, calls  # 46 with an event, a side stream and a call of torch.distributed
    comm.close("over")
    with pytest.raises(CommError, match="closed: over"):
        COLLECTIVES[name](comm, torch.zeros(8))


def test_a_collective_after_events_goes_by_the_side_stream() -> None:
    seen = list[object]()

    class Side(Stream):
        def after(self, after: Any) -> Any:
            seen.extend(after)
            return super().after(after)

    NcclCommunicator("c", 2, Group(), Side()).all_gather(torch.zeros(4), torch.zeros(2), (None,))
    assert seen == [None]
