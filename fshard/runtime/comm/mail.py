"""Parts of collectives, handed from rank to rank of one host through memory that they share.

What a rank has to give it copies once into memory of its own, and says so in a short message to each peer. A peer reads
it there, straight to where it is wanted or into a sum, and answers that it was read; then the memory is used again.
"""

import ctypes
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from fshard.runtime.comm.links import Link, make_memory, map_memory

HEAD = struct.Struct("=cqqqq")
"""Kind of the message, number of the collective, number of the memory, and from which byte to which."""

READY, READ = b"+", b"-"
"""A rank's part of a collective is there; it was read."""

INLINE = 4096
"""Bytes that travel in the message itself, which is quicker than by way of memory."""

PAGE, LINE = 4096, 64
"""Memory is made in whole pages; parts begin at multiples of a cache line."""


@dataclass
class Own:
    """Memory that this rank writes. ``readers``: the peers that have not read what is in it."""

    data: Tensor
    readers: int = 0


@dataclass
class Peer:
    """A peer: its link, its memory, and what it has announced, by the number of the collective."""

    link: Link
    memory: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[int, tuple[int, Tensor]] = field(default_factory=dict)


class Mail:
    """This rank's end of all links of a lane.

    Args:
        links: by position; None at this rank's own.
        timeout: seconds that a rank waits for a peer.
    """

    def __init__(self, links: Sequence[Link | None], timeout: float) -> None:
        self.peers = {at: Peer(link) for at, link in enumerate(links) if link is not None}
        self.timeout = timeout
        self.own: list[Own] = []

    def publish(self, number: int, parts: Mapping[int, Tensor]) -> None:
        """Let each peer read its part of a collective.

        Args:
            number: the collective's, the same on all ranks and never used again.
            parts: 1-D, contiguous, by peer; one tensor may be the part of several. They may be overwritten on return.

        Raises:
            OSError: a peer is gone, or takes too long.
        """
        if max(part.nbytes for part in parts.values()) <= INLINE:
            for at, part in parts.items():
                text = ctypes.string_at(part.data_ptr(), part.nbytes)  # an array would pin the storage's size for good
                self._send(at, HEAD.pack(READY, number, -1, 0, len(text)) + text)
            return
        for peer in self.peers.values():
            while self._take(peer, 0.0):
                pass
        distinct = {id(part): part for part in parts.values()}
        ends = list(accumulate(-(-part.nbytes // LINE) * LINE for part in distinct.values()))
        slot, files = self._memory(ends[-1])
        places = {}
        for (key, part), begin in zip(distinct.items(), (0, *ends), strict=False):
            places[key] = begin, begin + part.nbytes
            self.own[slot].data[slice(*places[key])].view(part.dtype).copy_(part)
        self.own[slot].readers = len(parts)
        try:
            for at, part in parts.items():
                self._send(at, HEAD.pack(READY, number, slot, *places[id(part)]), files)
        finally:
            for file in files:
                os.close(file)

    @contextmanager
    def part(self, at: int, number: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """A peer's part of a collective, once it is there. It is over with the context.

        Raises:
            OSError: the peer is gone, or takes too long.
        """
        peer = self.peers[at]
        deadline = time.monotonic() + self.timeout
        while number not in peer.parts:
            if not self._take(peer, deadline - time.monotonic()):
                raise TimeoutError(f"timed out after {self.timeout:g} s: rank {at} of the lane did not come")
        slot, data = peer.parts.pop(number)
        yield data.view(dtype)
        if slot >= 0:
            with suppress(ConnectionError):  # a peer that has left does not want its memory back
                self._send(at, HEAD.pack(READ, number, slot, 0, 0))

    def close(self) -> None:
        """Close all links; peers that wait for this rank learn of it."""
        for peer in self.peers.values():
            peer.link.close()
        self.own.clear()

    def _memory(self, size: int) -> tuple[int, list[int]]:
        """Memory that nobody reads: its number, and its file if peers do not know it yet."""
        fits = [slot for slot, own in enumerate(self.own) if not own.readers and own.data.nbytes >= size]
        if fits:
            return min(fits, key=lambda slot: self.own[slot].data.nbytes), []
        data, file = make_memory(-(-size // PAGE) * PAGE)
        self.own.append(Own(data))
        return len(self.own) - 1, [file]

    def _send(self, at: int, message: bytes, files: Sequence[int] = ()) -> None:
        """Send. While the link is full, read what peers send: they may be waiting for just that."""
        deadline = time.monotonic() + self.timeout
        while not self.peers[at].link.send(message, files):
            for peer in self.peers.values():
                with suppress(ConnectionError):
                    self._take(peer, 0.001)
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out after {self.timeout:g} s: rank {at} of the lane does not read")

    def _take(self, peer: Peer, seconds: float) -> bool:
        """Handle one message. False if none came in time."""
        received = peer.link.receive(max(0.0, seconds))
        if received is None:
            return False
        message, files = received
        kind, number, slot, begin, end = HEAD.unpack_from(message)
        for file in files:
            peer.memory[slot] = map_memory(file)
            os.close(file)
        if kind == READ:
            self.own[slot].readers -= 1
        elif slot < 0:
            text = bytearray(message[HEAD.size :])
            peer.parts[number] = slot, torch.frombuffer(text, dtype=torch.uint8)
        else:
            peer.parts[number] = slot, peer.memory[slot][begin:end]
        return True
