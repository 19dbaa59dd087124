"""Tables of links and devices, with their sources, and the costs of a cluster that is made of them.

What a link or a device promises is not what a program gets. The shares that a program does get are arguments with
defaults, so that they are named wherever a prediction is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fshard.errors import PlanError
from fshard.schedule.costs import Costs, Link
from fshard.schedule.footprint import Need
from fshard.schedule.step_program import StepProgram
from fshard.sharding.mesh import Mesh

ETHERNET = 1448 / 1538
"""The share of Ethernet's rate that is left for data: 1,448 bytes of a TCP segment in 1,538 on the wire."""


COMMUNICATOR = 688 << 20
"""Bytes of a GPU that NCCL takes for a communicator: an assumption. Measured on A100 over NVLink with all-reduces of
three and four GPUs (NVIDIA/nccl, issue 964); two took 544 MiB. It grows with NCCL_BUFFSIZE, the number of channels and
the algorithms in use; versions since 2.22 connect only those that are used."""


@dataclass(frozen=True)
class NamedLink:
    """A link of the table.

    Attributes:
        link: its rate in one direction, and its latency.
        what: what it is.
        source: where its rate is stated.
    """

    link: Link
    what: str
    source: str


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        flops: dense operations a second of matrix products in bfloat16 (float16 on the V100).
        flops32: the same in float32, as PyTorch computes by default.
        bytes_per_s: of its memory.
        memory: bytes.
        copies_per_s: bytes a second to its host, and as many from there.
        source: where these are stated.
    """

    flops: float
    flops32: float
    bytes_per_s: float
    memory: int
    copies_per_s: float
    source: str


def _ethernet(gigabits: float, latency: float, source: str) -> NamedLink:
    return NamedLink(Link(gigabits * 1e9 / 8 * ETHERNET, latency), f"Ethernet, {gigabits:g} Gbit/s", source)


LINKS: Mapping[str, NamedLink] = MappingProxyType(
    {
        "loopback": NamedLink(
            Link(3e9, 100e-6), "ranks of one host, over shared memory", "an order of magnitude: measure your own"
        ),
        "eth1": _ethernet(1, 100e-6, "IEEE 802.3ab (1000BASE-T)"),
        "eth10": _ethernet(10, 50e-6, "IEEE 802.3ae"),
        "eth25": _ethernet(25, 30e-6, "IEEE 802.3by"),
        "ib100": NamedLink(Link(12.5e9, 10e-6), "InfiniBand EDR, 4 lanes, 100 Gbit/s", "IBTA InfiniBand roadmap"),
        "ib200": NamedLink(Link(25e9, 10e-6), "InfiniBand HDR, 4 lanes, 200 Gbit/s", "IBTA InfiniBand roadmap"),
        "ib400": NamedLink(Link(50e9, 10e-6), "InfiniBand NDR, 4 lanes, 400 Gbit/s", "IBTA InfiniBand roadmap"),
        "nvlink2": NamedLink(Link(150e9, 5e-6), "NVLink 2, 6 links (V100)", "NVIDIA Tesla V100 whitepaper: 300 GB/s"),
        "nvlink3": NamedLink(Link(300e9, 5e-6), "NVLink 3, 12 links (A100)", "NVIDIA A100 whitepaper: 600 GB/s"),
        "nvlink4": NamedLink(Link(450e9, 5e-6), "NVLink 4, 18 links (H100)", "NVIDIA H100 whitepaper: 900 GB/s"),
        "nvlink5": NamedLink(Link(900e9, 5e-6), "NVLink 5, 18 links (B200)", "NVIDIA Blackwell brief: 1.8 TB/s"),
    }
)
"""Links by name: what one rank can send in one direction. Sources of NVLink state both directions together. Latencies
are those of a collective's first byte, and orders of magnitude.

>>> fs.sim.LINKS["ib400"].link
Link(bytes_per_s=50000000000.0, latency=1e-05)
"""

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "v100": Device(125e12, 15.7e12, 900e9, 32 * 10**9, 16e9, "NVIDIA V100 SXM2 datasheet"),
        "a100-40": Device(312e12, 19.5e12, 1555e9, 40 * 10**9, 32e9, "NVIDIA A100 40GB SXM datasheet"),
        "a100": Device(312e12, 19.5e12, 2039e9, 80 * 10**9, 32e9, "NVIDIA A100 80GB SXM datasheet"),
        "h100": Device(989.4e12, 66.9e12, 3350e9, 80 * 10**9, 64e9, "NVIDIA H100 SXM datasheet"),
        "h200": Device(989.4e12, 66.9e12, 4800e9, 141 * 10**9, 64e9, "NVIDIA H200 SXM datasheet"),
        "b200": Device(2250e12, 75e12, 7700e9, 180 * 10**9, 64e9, "NVIDIA DGX B200 datasheet"),
    }
)
"""Accelerators by name. Sources of PCIe state both directions together, as those of NVLink do.

>>> fs.sim.DEVICES["h100"].memory
80000000000
"""


def named_link(name: str) -> Link:
    """A link of the table, or one of ``RATE[,LATENCY]``: bytes a second and seconds.

    Raises:
        PlanError: neither.

    >>> named_link("ib400"), named_link("125e6,50e-6")
    (Link(bytes_per_s=50000000000.0, latency=1e-05), Link(bytes_per_s=125000000.0, latency=5e-05))
    """
    if name in LINKS:
        return LINKS[name].link
    try:
        rate, latency = map(float, name.split(",") if "," in name else (name, "0"))
        return Link(rate, latency)
    except (ValueError, TypeError) as error:
        raise PlanError(
            f"no link is named {name!r}: there are {', '.join(LINKS)}, or give bytes a second and a latency in "
            f"seconds, such as 125e6,50e-6"
        ) from error


def named_device(name: str) -> Device:
    """A device of the table.

    Raises:
        PlanError: there is none.
    """
    if name not in DEVICES:
        raise PlanError(f"no device is named {name!r}: there are {', '.join(DEVICES)}")
    return DEVICES[name]


@dataclass(frozen=True)
class Cluster:
    """Ranks on hosts, and the links between them.

    Consecutive ranks share a host. Collectives between hosts run through the adapters of all ranks of a host at once,
    as the rings of NCCL do, so a host with 8 adapters sends 8 times as much as one, and its ranks among each other as
    much as the link inside allows.

    Attributes:
        between: the link of one rank to other hosts.
        inside: the link of ranks of one host; None if it is the same.
        per_host: ranks on a host.
        share: of the rates of links that a collective gets.
        hop: further seconds of latency for each doubling of the ranks.

    >>> ib = fs.sim.Cluster(between=fs.sim.LINKS["ib400"], inside=fs.sim.LINKS["nvlink4"], per_host=8)
    >>> ib.share
    0.85
    """

    between: Link
    inside: Link | None = None
    per_host: int = 1
    share: float = 0.85
    hop: float = 10e-6

    def __post_init__(self) -> None:
        if self.per_host < 1 or not 0 < self.share <= 1:
            raise PlanError(f"per_host={self.per_host!r}, share={self.share!r}: at least 1, and above 0 and up to 1")

    def over(self, mesh: Mesh, axes: Sequence[str]) -> Link:
        """The link of collectives over some axes of a mesh."""
        near, ranks, stride = 1, 1, mesh.size
        for name, size in zip(mesh.axis_names, mesh.sizes, strict=True):
            stride //= size
            if name in axes:
                ranks *= size
                near *= max(min(size, self.per_host // max(stride, 1)), 1)
        inside = self.inside or self.between
        slowest = inside
        if ranks > near:  # some are on other hosts
            rate = self.between.bytes_per_s * near
            slowest = Link(min(rate, inside.bytes_per_s) if near > 1 else rate, self.between.latency)
        return Link(slowest.bytes_per_s * self.share, slowest.latency + self.hop * (ranks - 1).bit_length())

    def links(self, mesh: Mesh) -> dict[str, Link]:
        """The links of all sets of axes that transfers may go over, by their names joined by ``+``."""
        sets: list[tuple[str, ...]] = [()]
        for name in mesh.axis_names:
            sets += [(*axes, name) for axes in sets]
        return {"+".join(axes): self.over(mesh, axes) for axes in sets if axes}


@dataclass(frozen=True)
class Speed:
    """Rates of a device, or its host, in a program: its peak times the share that programs reach.

    Attributes:
        flops: operations a second of matrix products.
        bytes_per_s: of memory, for everything else.
        peak: the operations a second that MFU refers to.
        copies_per_s: bytes a second between a device and the memory of its host, in one direction.
    """

    flops: float
    bytes_per_s: float
    peak: float
    copies_per_s: float = math.inf

    def seconds(self, need: Need) -> float:
        """Return what a compute op takes, or an update."""
        return need.flops / self.flops + need.moved / self.bytes_per_s + need.copied / self.copies_per_s


def speed(device: Device, short: bool = True, products: float = 0.7, memory: float = 0.8, copies: float = 0.8) -> Speed:
    """The speed of a device.

    Args:
        short: whether it computes in bfloat16 or float16, not float32.
        products: the share of its peak that matrix products reach.
        memory: the share of its memory's rate that other operators reach.
        copies: the share of the rate to its host that copies of page-locked memory reach.
    """
    peak = device.flops if short else device.flops32
    return Speed(peak * products, device.bytes_per_s * memory, peak, device.copies_per_s * copies)


def unit_seconds(stages: StepProgram, needs: Sequence[Need], speed: Speed) -> dict[tuple[str, str], float]:
    """Return what compute ops take: the mean over the calls of a unit."""
    times: dict[tuple[str, str], list[float]] = {}
    for op, need in zip(stages.computes, needs, strict=bool(needs)):
        times.setdefault((op.kind, op.target), []).append(speed.seconds(need))
    return {op: sum(each) / len(each) for op, each in times.items()}


def hosted_seconds(stages: StepProgram, needs: Sequence[Need], rate: float) -> dict[tuple[str, str], float]:
    """Return what copies of activations to the host and back take at a rate: the mean over the calls of a unit."""
    words = {"forward": "activation_offload", "backward": "activation_fetch"}
    times: dict[tuple[str, str], list[float]] = {}
    for op, need in zip(stages.computes, needs, strict=bool(needs)):
        if need.hosted:
            times.setdefault((words[op.kind], op.target), []).append(need.hosted / rate)
    return {op: sum(each) / len(each) for op, each in times.items()}


def foreseen_costs(stages: StepProgram, needs: Sequence[Need], speed: Speed, links: Mapping[str, Link]) -> Costs:
    """Costs of a program on a device and links that nothing was measured on."""
    return Costs(unit_seconds(stages, needs, speed), links=links)
