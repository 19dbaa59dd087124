"""Collectives on data: plain tensors in, plain tensors out, no derivatives.

Each starts its communication and returns a function that waits for the result. Moved data travel as bytes, in any
dtype. This module adds in the order of ranks, so equal inputs give equal bits on every run and on every rank.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fshard.collectives.ranks import Ranks
from fshard.errors import ReplicationError, lines
from fshard.runtime.comm import Handle
from fshard.runtime.comm.row_sums import sum_rows

Finish = Callable[[], Tensor]

SMALL = 1 << 16
"""Up to this many bytes of all rows together a reduction gathers: one message instead of two."""


def gather(group: Ranks, x: Tensor) -> Finish:
    """The tensors of all ranks: ``(ranks, *shape)``."""
    flat = _flat(x)
    out = flat.new_empty((group.size, flat.numel()))
    if x.numel() == 0:
        return lambda: x.new_empty((group.size, *x.shape))
    handle = group.comm.all_gather(_bytes(out), _bytes(flat))
    return _after(handle, lambda: _by_group(group, out).view(group.size, *x.shape))


def exchange(group: Ranks, rows: Tensor) -> Finish:
    """Row ``i`` goes to rank ``i``; the result's row ``i`` came from it."""
    flat = _by_communicator(group, _flat(rows).view(rows.shape))
    out = torch.empty_like(flat)
    if rows.numel() == 0:
        return lambda: out
    handle = group.comm.all_to_all(_bytes(out), _bytes(flat), None, None)
    return _after(handle, lambda: _by_group(group, out))


def ragged(group: Ranks, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Finish:
    """The first ``send[0]`` rows go to rank 0, and so on; the result's first ``receive[0]`` rows came from it."""
    place = group.order or list(range(group.size))
    shape, width = (sum(receive), *rows.shape[1:]), math.prod(rows.shape[1:]) * rows.element_size()
    flat, sizes, arriving = _bytes(_flat(rows)), [0] * group.size, [0] * group.size
    for rank, at in enumerate(place):
        sizes[at], arriving[at] = send[rank] * width, receive[rank] * width
    if group.order is not None:
        parts = torch.split(flat, [count * width for count in send])
        flat = torch.cat([parts[rank] for rank in _inverse(place)])
    out = flat.new_empty(sum(arriving))
    handle = group.comm.all_to_all(out, flat, arriving, sizes)

    def result() -> Tensor:
        parts = torch.split(out, arriving)
        ordered = out if group.order is None else torch.cat([parts[at] for at in place])
        return ordered.view(rows.dtype).view(shape)

    return _after(handle, result)


def permute(group: Ranks, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Finish:
    """The tensor of the source that is paired with this rank, or zeros."""
    flat = _bytes(_flat(x))
    place = group.order or list(range(group.size))
    send, receive = [0] * group.size, [0] * group.size
    for source, target in pairs:
        if source == group.index:
            send[place[target]] = flat.numel()
        if target == group.index:
            receive[place[source]] = flat.numel()
    if not any(receive):
        out, arriving = torch.zeros_like(flat), flat.new_empty(0)
    else:
        out = arriving = torch.empty_like(flat)
    if flat.numel() == 0:
        return lambda: x.clone()
    handle = group.comm.all_to_all(arriving, flat if any(send) else flat[:0], receive, send)
    return _after(handle, lambda: out.view(x.dtype).view(x.shape))


def scatter_sum(group: Ranks, rows: Tensor) -> Finish:
    """This rank's row of the sum over ranks."""
    flat = _by_communicator(group, _flat(rows).view(rows.shape))
    if rows.numel() == 0:
        return lambda: torch.empty_like(rows[0])
    if not rows.is_floating_point():  # not every communicator adds all integers and complex numbers
        arriving = exchange(group, rows)
        return lambda: _add(arriving())
    # The communicator may overwrite what it is given.
    flat = flat.clone() if flat.data_ptr() == rows.data_ptr() else flat
    out = torch.empty_like(flat[0])
    handle = group.comm.reduce_scatter(out.view(-1), flat.view(-1), torch.empty_like(flat).view(-1), False)
    return _after(handle, lambda: out)


def sum_all(group: Ranks, x: Tensor) -> Finish:
    """The sum over ranks, on all of them."""
    if _small(group, x):
        rows = gather(group, x)
        return lambda: _add(rows())
    chunks = scatter_sum(group, _chunks(group, x))
    return lambda: gather(group, chunks())().reshape(-1)[: x.numel()].view(x.shape)


def max_all(group: Ranks, x: Tensor) -> Finish:
    """The maximum over ranks, element by element; nan wins."""
    if _small(group, x):
        rows = gather(group, x)
        return lambda: rows().amax(0)
    arriving = exchange(group, _chunks(group, x))
    return lambda: gather(group, arriving().amax(0))().reshape(-1)[: x.numel()].view(x.shape)


def _after(handle: Handle, result: Finish) -> Finish:
    def finish() -> Tensor:
        handle.wait()
        return result()

    return finish


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _small(group: Ranks, x: Tensor) -> bool:
    return x.numel() * x.element_size() * group.size <= SMALL


def _add(rows: Tensor) -> Tensor:
    total = rows.new_empty(rows.shape[1:])
    sum_rows(total.view(-1), rows.reshape(len(rows), -1), False)
    return total


def _chunks(group: Ranks, x: Tensor) -> Tensor:
    """The elements in one row a rank, padded with zeros."""
    width = -(-x.numel() // group.size)
    out = x.new_zeros(group.size * width)
    out[: x.numel()] = x.reshape(-1)
    return out.view(group.size, width)


def _flat(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous().view(-1)


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(-1).view(torch.uint8)


def _by_group(group: Ranks, rows: Tensor) -> Tensor:
    return rows if group.order is None else _taken(rows, group.order)


def _by_communicator(group: Ranks, rows: Tensor) -> Tensor:
    return rows if group.order is None else _taken(rows, _inverse(group.order))


def _taken(rows: Tensor, order: Sequence[int]) -> Tensor:
    """Rows in another order. An index would be copied to the device, which waits for it."""
    return torch.stack([rows[number] for number in order])


def check_invariant(group: Ranks, x: Tensor, label: str) -> None:
    """Compare a tensor over the ranks of a group; nan equals nan. All ranks raise the same error.

    Raises:
        ReplicationError: it differs.
    """
    rows = gather(group, x)()
    same = (rows == rows[0]) | ((rows != rows) & (rows[0] != rows[0]))
    wrong = ~same.reshape(group.size, -1)
    if not wrong.any():
        return
    ranks = group.mesh.ranks(group.axes)
    problems = []
    for row in torch.nonzero(wrong.any(1)).flatten().tolist():
        at = int(wrong[row].int().argmax())
        place = list(torch.unravel_index(torch.tensor(at, device="cpu"), x.shape)) if x.dim() else []
        index = f"[{', '.join(str(int(i)) for i in place)}]"
        first, here = rows[0].flatten()[at].item(), rows[row].flatten()[at].item()
        count = int(wrong[row].sum())
        problems.append(f"rank {ranks[row]}: {count} of {x.numel()} differ; first at {index}: {here}, not {first}")
    remedy = f"Name the axis in its spec, or make it equal first, such as by psum or pmean over {str(group)!r}."
    head = f"{label} must be the same along {str(group)!r}, but differs from the value of rank {ranks[0]}:"
    raise ReplicationError(lines(head, problems, remedy))
