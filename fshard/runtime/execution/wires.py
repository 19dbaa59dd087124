"""Transfers in wire formats: what is sent is packed by the start of a transfer, and unpacked by its wait.

A reduction packs each rank's gradient once. The parts travel all-to-all, or to all replicas, and are summed in the
order of ranks, in the dtype of the sum: nothing is packed again on the way (ZeRO++, Wang et al., 2023).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.runtime.comm import Handle
from fshard.runtime.comm.communicator import Communicator
from fshard.runtime.comm.nccl import NcclCommunicator
from fshard.runtime.comm.packing import (
    MOST,
    PIECE,
    Kernels,
    no_kernels,
    pack_rows,
    packed,
    unpack,
    unpack_rows,
    unpack_sum,
)
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Mesh
from fshard.sharding.wire import WireFormat


def compile_kernels(groups: Iterable[Group], mesh: Mesh, kernels: Kernels) -> None:
    """Compile what transfers of these groups use: no rank waits for another's compiler in the middle of a run."""
    for group in groups:
        sums = {"reduce_scatter": [group.scatter_axes], "replica_reduce": [group.opt_axes, group.rest_axes]}
        for kind, form in group.wires.items() if group.numel >= PIECE else ():
            if kind == "all_gather" and group.row:
                continue
            kernels("pack", form, 1)
            sizes = [mesh.axis_size(axes) for axes in sums[kind]] if kind in sums else [1]
            for rows in [rows for rows in sizes if rows > 1 or kind not in sums]:
                at_once = [min(MOST, rows - begin) for begin in range(0, rows, MOST)]
                kernels("unpack", form, at_once[0])
                adds = at_once if kind == "reduce_scatter" else at_once[1:]  # of microbatches; and of more rows
                for ranges in dict.fromkeys(adds):
                    kernels("add", form, ranges)


@dataclass(frozen=True)
class Continued:
    """The handle of a transfer whose result is computed of what arrives. ``held`` keeps what travels until then."""

    work: Handle
    finish: Callable[[], None]
    held: tuple[Tensor, ...]

    def wait(self) -> None:
        """Wait for what travels, then compute the result."""
        self.work.wait()
        self.finish()


def gathered(
    work: Handle, rows: Tensor, form: WireFormat, out: Tensor, sent: Tensor, kernels: Kernels = no_kernels
) -> Handle:
    """An all-gather of packed shards, under way to ``rows``, that arrives in ``out``."""
    parts = rows.numel() // max(1, sent.numel())

    return Continued(
        work, lambda: unpack_rows(rows.view(parts, -1), form, out.view(parts, -1), 0, kernels), (rows, sent)
    )


@dataclass(frozen=True)
class JointHandle:
    """The handle of several transfers that are waited for together."""

    handles: tuple[Handle, ...]

    def wait(self) -> None:
        """Wait for all of them."""
        for handle in self.handles:
            handle.wait()


def rows_gathered(comm: Communicator, full: Tensor, shard: Tensor, numel: int) -> Handle:
    """Start an all-gather of rounded rows, which arrive where units read them: payloads, and behind them scales.

    Args:
        comm: the communicator.
        full: bytes for all rows.
        shard: this rank's.
        numel: the elements of all rows, each a byte of the payload.
    """
    own = numel // comm.size
    outs, parts = (full[numel:], full[:numel]), (shard[own:], shard[:own])
    if isinstance(comm, NcclCommunicator):
        return comm.all_gathers(outs, parts)
    return JointHandle(tuple([comm.all_gather(out, part) for out, part in zip(outs, parts, strict=True)]))


def scattered(
    comm: Communicator,
    full: Tensor,
    form: WireFormat,
    out: Tensor,
    add: bool,
    kernels: Kernels = no_kernels,
) -> Handle:
    """Start a reduce-scatter: ``out`` = this rank's chunk of the sum over ranks, plus its own value if ``add``.

    ``full`` can be overwritten at once.
    """
    sent = full.new_empty((comm.size, form.nbytes(out.numel())), dtype=torch.uint8)
    pack_rows(full.view(comm.size, -1), form, sent, kernels)
    rows = torch.empty_like(sent)
    work = comm.all_to_all(rows.view(-1), sent.view(-1), None, None)
    return Continued(work, lambda: unpack_sum(rows, form, out, add, kernels), (sent, rows))


def updated(comm: Communicator, own: Tensor, param: Tensor, held: Tensor, form: WireFormat) -> Handle:
    """Start to tell other ranks what this one has updated of a shard: the difference to what they hold.

    Args:
        comm: the communicator of the ranks that hold the shard.
        own: the exact values of this rank's part.
        param: the shard as all of them hold it, which is the same on all of them after the wait.
        held: this rank's part of it.
        form: the format.
    """
    sent = packed(own - held, form)
    rows = sent.new_empty((comm.size, sent.numel()))
    work = comm.all_gather(rows.view(-1), sent)
    return Continued(work, lambda: add_rows(rows, form, param), (sent, rows))


def add_rows(rows: Tensor, form: WireFormat, param: Tensor) -> None:
    """Add the differences of all ranks, by row, to the parts of a shard."""
    unpack_rows(rows, form, param.view(len(rows), -1), 1)


@dataclass(frozen=True)
class Residual:
    """The rest that rounding has left out of this rank's part of a sum, and what it leaves out of this one.

    Attributes:
        before: what earlier sums have left out. It does not change.
        factor: what it is multiplied by when it is added.
        after: memory for what this sum leaves out.
    """

    before: Tensor
    factor: float | Tensor
    after: Tensor

    def added(self, own: Tensor) -> Tensor:
        """This rank's part with what is left of the sums before, in ``after``."""
        if isinstance(self.factor, float) and self.factor == 1.0:
            return torch.add(own, self.before, out=self.after)
        # Two roundings, as in a graph, whose factor is in device memory.
        return torch.mul(self.before, self.factor, out=self.after).add_(own)


def summed(
    comm: Communicator,
    own: Tensor,
    form: WireFormat,
    kernels: Kernels = no_kernels,
    residual: Residual | None = None,
) -> Handle:
    """Start a sum over replicas, in place. Every replica gets the same bits.

    With a residual, what is sent is this rank's part and what is left of the sums before; what rounding leaves out of
    that is subtracted while it travels.
    """
    sent = packed(own if residual is None else residual.added(own), form, kernels)
    rows = sent.new_empty((comm.size, sent.numel()))
    work = comm.all_gather(rows.view(-1), sent)
    if residual is not None:
        unpack(sent, form, residual.after, -1)
    return Continued(work, lambda: unpack_sum(rows, form, own, False, kernels), (sent, rows))
