"""What links do when they are kept busy: series of transfers without a pause, after one; and what a message takes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from time import perf_counter, sleep, thread_time

import torch

from fshard.runtime.comm import Communicator, exchange
from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.comm.gloo import GlooCommunicator
from fshard.runtime.comm.host import HostCommunicator
from fshard.runtime.comm.shared_memory import INLINE
from fshard.schedule.fit_links import LinkStream, settled
from fshard.schedule.schedule import Schedule

SPAN, PAUSE = 0.25, 0.05
"""Seconds that the longest series takes at least, and those before a series."""

FIRST, MOST = 4, 2048
"""Transfers of the first series, of which each further one has twice as many, and of the longest."""

AHEAD = 2
"""Transfers under way at once. Gloo has as many threads for those of a communicator; NCCL makes one after the other."""

MESSAGES = 40
"""Collectives that tell what a message takes. The lower quartile counts, as it does of steps."""

COPIED = 3
"""Those under way at once through shared memory. A rank that waits for the first of some finds the others there, as it
does those of further peers: waiting is most of what a single one takes."""

MESSAGE = 2 * INLINE
"""Its bytes: parts of transfers lie in shared memory, are announced, and are answered when they were read."""

LARGEST = 4 << 20
"""Most bytes that a rank sends to each other in one of them."""

TRIES = 3
"""Longest series. The fastest counts: something else may have run beside the others."""


def streams(comms: Communicators, schedule: Schedule) -> Mapping[str, LinkStream]:
    """Return what each link of a schedule does when it is kept busy, by the axes that it joins. Collective.

    Transfers apart from each other do not tell: a link that is shaped lets some bytes pass at once, and gets slower
    when it has no pauses.
    """
    sizes: dict[str, int] = {}
    for move in [move for group in schedule.groups for move in group.transfers if move.sent and move.row.link]:
        sizes[move.axes] = max(sizes.get(move.axes, 0), move.sent)
    links = {"+".join(axes): comm for (_, axes), comm in reversed([*comms.made.items()])}
    device = comms.plan.mesh.device
    found = {axes: _stream(links[axes], comms.control, sent, device) for axes, sent in sizes.items() if axes in links}
    return {axes: stream for axes, stream in found.items() if stream is not None}


def _stream(comm: Communicator, control: Communicator, sent: int, device: torch.device) -> LinkStream | None:
    """Return what one link does; None if that cannot be known."""
    if comm.size == 1:
        return None
    copied = isinstance(comm, HostCommunicator)
    known = LinkStream(inf, 0.0, _message(comm, control, device, COPIED if copied else 1), comm.size - 1)
    if copied:
        return known  # this thread copies, before and after: nothing is on its way by itself
    shard = torch.zeros(max(min(sent // (comm.size - 1), LARGEST), 1), dtype=torch.uint8, device=device)
    full = torch.empty(comm.size * shard.numel(), dtype=torch.uint8, device=device)
    exchange(control, torch.zeros(1, device="cpu"))
    sleep(PAUSE)
    series = lengthened(partial(_series, comm, control, full, shard))
    sent = (comm.size - 1) * shard.numel()
    found = settled(series, sent)
    together = AHEAD if isinstance(comm, GlooCommunicator) else 1
    return replace(known, rate=found.rate, burst=found.burst, together=together)


def lengthened(take: Callable[[int], list[float]]) -> list[list[float]]:
    """Series of ever more transfers, and the longest one again: the fastest of those counts.

    Args:
        take: makes a series of so many transfers, and says in seconds from its begin when each had arrived.

    >>> [len(times) for times in lengthened(lambda count: [0.02 * (n + 1) for n in range(count)])]
    [4, 8, 16, 16, 16]
    """
    series: list[list[float]] = []
    count = FIRST
    while not series or (series[-1][-1] < SPAN and count <= MOST):
        series.append(take(count))
        count *= 2
    return series + [take(len(series[-1])) for _ in range(TRIES - 1)]


def _series(
    comm: Communicator, control: Communicator, full: torch.Tensor, shard: torch.Tensor, count: int
) -> list[float]:
    """Say when each of some gathers without a pause had arrived on all ranks, in seconds from the begin. Collective."""
    arrivals: list[float] = []
    begun = perf_counter()
    under_way = [comm.all_gather(full, shard) for _ in range(AHEAD)]
    for number in range(count):
        under_way.pop(0).wait()
        arrivals.append(perf_counter() - begun)
        if number + AHEAD < count:
            under_way.append(comm.all_gather(full, shard))
    row = torch.tensor(arrivals, dtype=torch.float64, device="cpu")
    times: list[float] = exchange(control, row).max(0).values.tolist()
    return times


def _message(comm: Communicator, control: Communicator, device: torch.device, count: int) -> float:
    """The seconds of this thread for one peer more, in collectives that send each a message of its own. Collective."""
    more = message(partial(_try, comm, device, count)) / count / (comm.size - 1)
    return float(exchange(control, torch.tensor([more], dtype=torch.float64, device="cpu")).mean())


def message(take: Callable[[int], float]) -> float:
    """The seconds that the messages of a try take.

    Args:
        take: makes collectives with so many bytes for each peer, and says how long they took.

    >>> message(lambda size: 2.0 if size else 0.5)
    1.5
    """
    empty, full = (sorted(take(size) for _ in range(MESSAGES))[MESSAGES // 4] for size in (0, MESSAGE))
    return max(full - empty, 0.0)


def _try(comm: Communicator, device: torch.device, count: int, size: int) -> float:
    """The seconds of this thread in some collectives that are under way at once. Collective."""
    full, sizes = torch.zeros(comm.size * size, dtype=torch.uint8, device=device), [size] * comm.size
    outs = [torch.empty_like(full) for _ in range(count)]
    begun = thread_time()
    for handle in [comm.all_to_all(out, full, sizes, sizes) for out in outs]:
        handle.wait()
    return thread_time() - begun
