"""What carries transfers, and what each of them takes: on the wire, of the device, and of processors beside it."""

import math
from dataclasses import dataclass, replace

from fshard.arguments import expect
from fshard.schedule import refusals

AROUND = 2.0
"""How many times as long processors work around a message over sockets as the thread that sends it does, at most."""

SPREAD = 0.15
"""The part of a transfer's time by which the last of its ranks has it later than ranks do on average, where each sends
to several peers: their connections do not end together.
"""

USUAL = (("peak", math.inf), ("together", 1), ("around", AROUND))


@dataclass(frozen=True, repr=False)
class Link:
    """A carrier of transfers, and what it takes from the processor that computes.

    Args:
        bytes_per_s: what a rank can send in a second, when it sends all the time.
        latency: seconds from the issue of a transfer to its first byte.
        sending: seconds of the device for each byte that is sent, at the start of a transfer.
        beside: seconds of processors for each byte beside that: other threads, the kernel's work for what arrives. A
            rank that has no second processor loses them where it computes meanwhile.
        taking: seconds of the device for each byte, at the wait.
        burst: bytes that go at once after a pause. Links that are shaped, as those of most virtual machines, let so
            many pass (a token bucket), and gain them again at their rate while nothing is sent.
        peak: bytes a second of a transfer that has the link for itself, or in a burst. Where ranks answer each other
            before they go on, several transfers keep a link busier than one does.
        each: seconds of the device for the message to a peer, and that from it, where each peer has one.
        around: how many times as much processors take beside that, over sockets.
        peers: with how many peers the costs of starts and waits were measured; 0 if that is not known.
        together: transfers of one communicator that are on their way at once. The others wait for their turn.
        shared_memory: ranks copy through memory that they share: a gather's start copies a shard once for all peers.
            Over sockets it sends each its own.
        spread: the part of a transfer's time by which the last of its ranks has it later than ranks do on average. If
            ranks wait for it, their next transfer begins as much later.
        ahead: seconds of the device by which a transfer takes more, or less if negative, that is not waited for as soon
            as it has begun: where ranks meet, they sleep, are woken, and find less in their caches.

    Raises:
        PlanError: a rate that is not positive, or a negative time, size or spread.

    >>> Link(125e6, latency=50e-6)  # 1 Gbit/s
    Link(bytes_per_s=125000000.0, latency=5e-05)
    """

    bytes_per_s: float = math.inf
    latency: float = 0.0
    sending: float = 0.0
    beside: float = 0.0
    taking: float = 0.0
    burst: float = 0.0
    peak: float = math.inf
    each: float = 0.0
    peers: int = 0
    together: int = 1
    shared_memory: bool = False
    spread: float = 0.0
    around: float = AROUND
    ahead: float = 0.0

    def __post_init__(self) -> None:
        shared = "shared_memory", self.shared_memory, bool, "True or False"
        numbers = [(name, value, (int, float), "a number") for name, value in vars(self).items() if name != shared[0]]
        expect("fs.sim.Link", [*numbers, shared])
        problems = []
        for name in ("bytes_per_s", "peak"):
            if not getattr(self, name) > 0:
                problems.append(f"{name}={getattr(self, name)!r} is not positive")
        for name in ("latency", "sending", "beside", "taking", "each"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append(f"{name}={getattr(self, name)!r} is not a number of seconds")
        if not math.isfinite(self.ahead):
            problems.append(f"ahead={self.ahead!r} is not a number of seconds")
        if not 0 <= self.burst < math.inf:
            problems.append(f"burst={self.burst!r} is not a number of bytes")
        if not 0 <= self.spread < math.inf:
            problems.append(f"spread={self.spread!r}: a part of a transfer's time, 0 or more")
        if not 0 <= self.around < math.inf:
            problems.append(f"around={self.around!r}: a number of times, 0 or more")
        if not self.together >= 1:
            problems.append(f"together={self.together!r}: at least 1")
        if problems:
            raise refusals.bad_costs(problems)

    def work(self, sent: int) -> float:
        """Seconds of processors for a transfer of so many bytes, beside what the device does for it."""
        return sent * self.beside + (0.0 if self.shared_memory else self.around * self.each * self.peers)

    def to_peers(self, peers: int, gathers: bool) -> "Link":
        """The link where transfers go to so many peers; ``gathers``: of those that send each the same."""
        once = self.shared_memory and gathers and peers
        sending = self.sending * (self.peers / peers if once else 1.0)
        # Several at once are messages of gloo. In rings, each rank has one connection, whoever takes part.
        apart = self.together > 1 and self.peers == 1
        spread = 0.0 if peers < 2 else SPREAD if apart else self.spread
        ahead = self.ahead * (sleeps(peers) / sleeps(self.peers) if self.peers else 1.0)
        return replace(self, peers=peers, sending=sending, spread=spread, ahead=ahead)

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if value or name == "latency"}
        shown = {name: value for name, value in shown.items() if (name, value) not in USUAL}
        return f"Link({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def sleeps(peers: int) -> float:
    """Return how often a rank sleeps that waits for one peer after the other, and comes first itself.

    It sleeps for a peer that comes later than all those before it: in any order, one of k is last with 1/k.

    >>> sleeps(2)
    1.5
    """
    return sum(1 / (before + 1) for before in range(peers))
