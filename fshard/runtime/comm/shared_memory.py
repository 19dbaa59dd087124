"""The shared-memory transport between ranks of one host: parts of collectives in memory that peers map.

A rank copies its parts once into its own memory, and announces them in a short message to each peer. A peer reads them
there, directly to their destination or into a sum, and answers that it has read them; then the memory is used again.
"""

import ctypes
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from threading import get_ident

import torch
from torch import Tensor

from fshard.forks import own
from fshard.runtime.comm.communicator import CLOSED
from fshard.runtime.comm.links import PeerLink, close_files, make_memory, map_memory
from fshard.runtime.comm.watchdog import Watchdog

HEAD = struct.Struct("=ccqqqq")
"""A message: its kind, the collective and its number, the number of the memory, its first byte and its end."""

READY, READ, GONE = b"+", b"-", b"!"
"""Kinds: a part of a collective is ready; it was read; the rank leaves, for a reason."""

CALLS = {b"g": "all-gather", b"s": "reduce-scatter", b"r": "all-reduce", b"a": "all-to-all"}
"""The collectives in messages: ranks at different collectives must not read each other's data."""

INLINE = 4096
"""Parts of at most this many bytes are sent in the message, which is faster than through memory."""

PAGE, LINE = 4096, 64
"""Memory is made in whole pages; parts begin at multiples of a cache line."""


@dataclass
class OwnMemory:
    """Shared memory that this rank writes.

    Attributes:
        data: the memory.
        file: its file descriptor, until all peers have it; then -1.
        known: the peers that have it. A collective may involve only some peers, so others get it later.
        readers: the number of peers that have not yet read it.
    """

    data: Tensor
    file: int
    known: set[int] = field(default_factory=set)
    readers: int = 0

    def close(self) -> None:
        """Close the file descriptor; the memory stays."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)


@dataclass
class Peer:
    """A peer: its rank, link and memory, its announced parts by the number of the collective, and why it left."""

    rank: int
    link: PeerLink
    memory: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[int, tuple[int, Tensor, bytes]] = field(default_factory=dict)
    gone: str = ""


class SharedMemory:
    """This rank's end of all links of a communicator.

    Args:
        links: by position; None at this rank's own.
        ranks: by position, for errors.
        watchdog: sees long waits, and has the timeout.
    """

    def __init__(self, links: Sequence[PeerLink | None], ranks: Sequence[int], watchdog: Watchdog) -> None:
        pairs = enumerate(zip(ranks, links, strict=True))
        self.peers = {at: Peer(rank, link) for at, (rank, link) in pairs if link is not None}
        self.watchdog, self.timeout = watchdog, watchdog.timeout
        self.own: list[OwnMemory] = []
        self.closed = ""
        own(self)

    def disown(self, why: str) -> None:
        """Close this process's descriptors. The parent's stay open, and peers get no message."""
        self.closed = why
        self.close()

    def publish(self, number: int, call: bytes, parts: Mapping[int, Tensor]) -> None:
        """Let each peer read its part of a collective.

        Args:
            number: of the collective, the same on all ranks and never reused.
            call: the kind of collective.
            parts: 1-D, contiguous, by peer; peers may share a tensor. They may be overwritten on return.

        Raises:
            OSError: a peer is gone, or takes too long.
        """
        self._check_open()
        if max(part.nbytes for part in parts.values()) <= INLINE:
            for at, part in parts.items():
                text = ctypes.string_at(part.data_ptr(), part.nbytes)  # an array would pin the storage's size for good
                self._send(at, HEAD.pack(READY, call, number, -1, 0, len(text)) + text)
            return
        for peer in self.peers.values():
            while self._take(peer, 0.0):
                pass
        distinct = {id(part): part for part in parts.values()}
        ends = list(accumulate(-(-part.nbytes // LINE) * LINE for part in distinct.values()))
        slot, memory = self._memory(ends[-1])
        spans = {}
        for (key, part), begin in zip(distinct.items(), (0, *ends), strict=False):
            spans[key] = begin, begin + part.nbytes
            memory.data[slice(*spans[key])].view(part.dtype).copy_(part)
        memory.readers = len(parts)
        for at, part in parts.items():
            files = [] if at in memory.known else [memory.file]
            self._send(at, HEAD.pack(READY, call, number, slot, *spans[id(part)]), files)
            memory.known.add(at)
        if len(memory.known) == len(self.peers):
            memory.close()

    @contextmanager
    def part(self, at: int, number: int, call: bytes, like: Tensor) -> Iterator[Tensor]:
        """Wait for a peer's part of a collective, of the length of ``like``. It is valid inside of the context.

        Raises:
            OSError: the peer is gone, takes too long, or is at another collective.
        """
        self._check_open()
        peer = self.peers[at]
        if number not in peer.parts:
            self._await(peer, number, call)
        slot, data, theirs = peer.parts.pop(number)
        if theirs != call or data.nbytes != like.nbytes:
            raise OSError(
                f"rank {peer.rank} has come to another collective: {CALLS[theirs]} of {data.nbytes} bytes, where this "
                f"rank is at {CALLS[call]} of {like.nbytes}; all ranks must make the same calls in one order"
            )
        yield data.view(like.dtype)
        if slot >= 0:
            with suppress(ConnectionError):  # a peer that has left needs no answer
                self._send(at, HEAD.pack(READ, call, number, slot, 0, 0))

    def _await(self, peer: Peer, number: int, call: bytes) -> None:
        """Handle messages of a peer until its part of a collective is ready."""
        deadline = time.monotonic() + self.timeout
        waits, me = self.watchdog.waits, get_ident()
        waits[me] = CALLS[call], peer.rank
        try:
            while number not in peer.parts:
                if not self._take(peer, deadline - time.monotonic()):
                    raise TimeoutError(f"timed out after {self.timeout:g} s: rank {peer.rank} did not come")
        finally:
            del waits[me]

    def close(self, reason: str = "") -> None:
        """Close all links; peers that wait for this rank get the reason.

        Another thread may be inside of a collective: it learns why first, and no descriptor is closed twice, since its
        number may be another file's by then.
        """
        told = bool(reason) and not self.closed
        self.closed = self.closed or reason or CLOSED
        text = HEAD.pack(GONE, b"-", 0, 0, 0, 0) + reason.encode(errors="replace")[:INLINE]
        for peer in self.peers.values():
            if told:
                with suppress(OSError):
                    peer.link.send(text)
            peer.link.close()
        while self.own:
            with suppress(IndexError):  # both threads took the last one
                self.own.pop().close()

    def _check_open(self) -> None:
        if self.closed:
            raise ConnectionError(f"it is closed: {self.closed}")

    def _memory(self, size: int) -> tuple[int, OwnMemory]:
        """Memory without readers, and its number."""
        fits = [(slot, one) for slot, one in enumerate(self.own) if not one.readers and one.data.nbytes >= size]
        if fits:
            return min(fits, key=lambda each: each[1].data.nbytes)
        made = OwnMemory(*make_memory(-(-size // PAGE) * PAGE))
        self.own.append(made)
        return len(self.own) - 1, made

    def _send(self, at: int, message: bytes, files: Sequence[int] = ()) -> None:
        """Send. While the link is full, read messages of peers, which may be waiting for that."""
        to = self.peers[at]
        if self._sent(to, message, files):
            return
        deadline = time.monotonic() + self.timeout
        with self.watchdog.waiting("sending", to.rank):
            while not self._sent(to, message, files):
                for peer in self.peers.values():
                    with suppress(ConnectionError):
                        self._take(peer, 0.001)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"timed out after {self.timeout:g} s: rank {to.rank} does not read")

    def _sent(self, peer: Peer, message: bytes, files: Sequence[int]) -> bool:
        try:
            return peer.link.send(message, files)
        except OSError as error:
            while self._take(peer, 0.0):  # it may have sent why it left
                pass
            raise ConnectionError(f"rank {peer.rank} cannot be reached: {error}") from error

    def _take(self, peer: Peer, seconds: float) -> bool:
        """Handle one message. False if none came in time."""
        if peer.gone:
            raise ConnectionError(f"rank {peer.rank} {peer.gone}")
        try:
            received = peer.link.receive(max(0.0, seconds))
        except OSError as error:
            self._check_open()  # if another thread has closed it, raise its reason
            peer.gone = str(error)
            raise ConnectionError(f"rank {peer.rank} {error}") from error
        if received is None:
            return False
        message, files = received
        try:
            self._handle(peer, message, files)
        except (struct.error, LookupError, ValueError, OSError) as error:
            self._check_open()  # another thread has let go of the memory that is meant
            peer.gone = peer.gone or (
                str(error) if isinstance(error, OSError) else f"has sent what is no message: {error}"
            )
            raise ConnectionError(f"rank {peer.rank} {peer.gone}") from error
        finally:
            close_files(files)
        return True

    def _handle(self, peer: Peer, message: bytes, files: Sequence[int]) -> None:
        """Act on a message. An invalid one is an error, since its sender could corrupt memory."""
        kind, call, number, slot, begin, end = HEAD.unpack_from(message)
        if kind == GONE:
            raise ConnectionError(f"gave up: {message[HEAD.size :].decode(errors='replace')}")
        for file in files:
            peer.memory[slot] = map_memory(file)
        if kind == READ:
            if slot < 0 or self.own[slot].readers <= 0:
                raise ValueError(f"it has read memory {slot}, which nobody was to read")
            self.own[slot].readers -= 1
            return
        if kind != READY or call not in CALLS or number in peer.parts:
            raise ValueError(f"of kind {kind!r} for collective {number}, {call!r}")
        if slot < 0:
            text = bytearray(message[HEAD.size :])
            peer.parts[number] = slot, torch.frombuffer(text, dtype=torch.uint8), call
            return
        memory = peer.memory[slot]
        if not 0 <= begin <= end <= memory.nbytes:
            raise ValueError(f"bytes {begin} to {end} of memory of {memory.nbytes}")
        peer.parts[number] = slot, memory[begin:end], call
