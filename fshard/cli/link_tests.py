"""The tests that ``fshard doctor --full`` runs on all ranks: links, clocks, and versions that differ."""

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fshard.arguments import size_text
from fshard.collectives.api import ppermute
from fshard.launch import make_mesh
from fshard.runtime.comm import exchange, exchange_text, mesh_communicator
from fshard.sharding.mesh import Mesh
from fshard.version import VERSION

TRIES, CLOCK_TRIES = 5, 20
LARGE, SMALL = 8 << 20, 8
"""Bytes of the messages that tell bandwidth, and latency."""

MOST = 16
"""Ranks of which each pair is tried; of more, those of rank 0 and neighbors."""

OFF, SLOW_LINK = 0.1, 4.0
"""Seconds that clocks may be apart, and how much slower than the median a link may be, before a line says so."""

NAME_BYTES = 200


class LinkTests(NamedTuple):
    """The results of the tests, equal on all ranks.

    Attributes:
        links: by pair of ranks, bytes a second and seconds of a small message.
        clocks: by rank, the seconds that its clock is ahead of rank 0's.
        versions: by rank, those of fshard, PyTorch and Python.
        hosts: by rank, the name of its host.
    """

    links: dict[tuple[int, int], tuple[float, float]]
    clocks: Sequence[float]
    versions: Sequence[str]
    hosts: Sequence[str]


def pairs_of(ranks: int) -> list[tuple[int, int]]:
    """The pairs of ranks whose links are tried.

    >>> pairs_of(3)
    [(0, 1), (0, 2), (1, 2)]
    """
    every = [(one, other) for one in range(ranks) for other in range(one + 1, ranks)]
    return every if ranks <= MOST else [(one, other) for one, other in every if one == 0 or other == one + 1]


def link_tests() -> LinkTests:
    """Run the tests, on every rank of a job."""
    with make_mesh((-1,), ("rank",), timeout=60.0) as mesh:
        comm = mesh_communicator(mesh)
        told = f"fshard {VERSION}, PyTorch {torch.__version__}, Python {platform.python_version()}"
        versions = exchange_text(comm, told, NAME_BYTES)
        hosts = exchange_text(comm, platform.node(), NAME_BYTES)
        links = {pair: _link(mesh, pair) for pair in pairs_of(mesh.size)}
        return LinkTests(links, _clocks(mesh), versions, hosts)


def _link(mesh: Mesh, pair: tuple[int, int]) -> tuple[float, float]:
    """Bytes a second and seconds of a small message, from one rank of a pair to the other: the best of some tries."""
    large, small = (torch.zeros(size, dtype=torch.uint8, device=mesh.device) for size in (LARGE, SMALL))
    seconds = [_best(mesh, lambda x=x: ppermute(x, "rank", [pair], mesh=mesh)) for x in (large, small)]  # type: ignore[misc]
    row = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    whole, one = exchange(mesh_communicator(mesh), row)[pair[1]].tolist()
    return LARGE / whole, one


def _best(mesh: Mesh, work: Callable[[], Any]) -> float:
    comm, times = mesh_communicator(mesh), []
    for _ in range(TRIES):
        exchange(comm, torch.zeros(1, device="cpu"))  # all begin together
        begin = time.perf_counter()
        work()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        times.append(time.perf_counter() - begin)
    return min(times)


def _clocks(mesh: Mesh) -> list[float]:
    """The seconds that each rank's clock is ahead of rank 0's, to within the time of a message."""
    comm = mesh_communicator(mesh)
    rows = []
    for _ in range(CLOCK_TRIES):
        exchange(comm, torch.zeros(1, device="cpu"))
        rows.append(exchange(comm, torch.tensor([time.time()], dtype=torch.float64, device="cpu")).flatten().tolist())
    return [statistics.median([row[rank] - row[0] for row in rows]) for rank in range(mesh.size)]


def findings(found: LinkTests) -> Iterator[tuple[str, str, str, str]]:
    """The lines of the report: a section, a name, a value, and a problem if there is one."""
    for rank, version in enumerate(found.versions):
        other = "" if version == found.versions[0] else f"rank 0 has {found.versions[0]}: install the same everywhere"
        yield "ranks", f"rank {rank}", f"{found.hosts[rank]}: {version}", other
    usual = statistics.median([rate for rate, _ in found.links.values()]) if found.links else 0.0
    for (one, other_rank), (rate, latency) in found.links.items():
        slow = f"{usual / rate:.1f} times slower than the median link" if rate * SLOW_LINK < usual else ""
        yield "links", f"{one} to {other_rank}", f"{size_text(int(rate))}/s, {latency * 1e6:.0f} us", slow
    yield from _clock_findings(found.clocks)


def _clock_findings(clocks: Sequence[float]) -> Iterator[tuple[str, str, str, str]]:
    for rank, ahead in enumerate(clocks[1:], 1):
        far = "records of different hosts do not line up: set the clocks by NTP" if abs(ahead) > OFF else ""
        yield "clocks", f"rank {rank}", f"{ahead * 1e3:+.1f} ms from rank 0", far
