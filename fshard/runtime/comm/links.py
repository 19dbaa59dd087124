"""Links between processes of one host: sockets for short messages and shared memory.

A link is a Unix socket that preserves message boundaries. Memory is sent over it as the file descriptor of an anonymous
file. Such a file has no name that could be left behind, and is freed when the last process that maps it ends. A peer
that dies closes its links, so ranks that wait for it get an error at once.

An abstract Unix socket has no permissions: any process of the network namespace can connect. The kernel identifies the
user of the other end, so connections of other users are closed before a byte is read. A silent connection delays no
rank.
"""

import array
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

ATTEMPT = 20.0
"""Seconds for making all links of a communicator."""

LONGEST = 1 << 16
"""Most bytes of a message."""

WAITING = 128
"""Most unidentified connections, beside one for each peer. The oldest is closed first."""

SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SEAL", 1)
"""Seals that memory must have before it is mapped: reading a file that was shrunk ends the process."""

CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid of a peer."""


def host_key() -> str:
    """Equal for two processes that can open links to each other; empty if links are not supported.

    Links exist within a network namespace: two containers of one host are like two hosts.
    """
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return ""


class PeerLink:
    """This process's end of a link."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self.ready = select.poll()
        self.ready.register(end, select.POLLIN)

    def send(self, message: bytes, files: Sequence[int] = ()) -> bool:
        """Send a message with files. False if the link is full of unread messages."""
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        try:
            self.end.sendmsg([message], extra)
        except BlockingIOError:
            return False
        return True

    def receive(self, seconds: float) -> tuple[bytes, list[int]] | None:
        """The next message and its files; None if none arrives in time.

        Raises:
            OSError: the peer is gone.
        """
        if not self.ready.poll(1000 * seconds):
            return None
        try:
            message, extra, _, _ = self._next()
        except ConnectionResetError:  # the peer left without reading all; its earlier messages are still there
            message, extra, _, _ = self._next()
        files = array.array("i")
        for level, kind, data in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files.frombytes(data)
        if not message:
            close_files(files)
            raise ConnectionError("has closed its link: it ended or failed")
        return message, list(files)

    def _next(self) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
        return self.end.recvmsg(LONGEST, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)

    def close(self) -> None:
        """Close this end, which the peer detects."""
        self.end.close()


class Rendezvous:
    """The socket at which the peers of one communicator connect to this process. Only they know its ``address``."""

    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.name, self.secret = f"fshard-{secrets.token_hex(8)}", secrets.token_hex(16)
        self.listener.bind("\0" + self.name)
        self.listener.listen(1024)

    @property
    def address(self) -> str:
        """Name and secret."""
        return f"{self.name} {self.secret}"

    def open(self, me: int, addresses: Sequence[str]) -> list[PeerLink | None]:
        """Links to all peers by their position; None at this process's own.

        Args:
            me: this process's position.
            addresses: of all ranks, by position.

        Raises:
            OSError: a peer could not be reached.
        """
        links: list[PeerLink | None] = [None] * len(addresses)
        deadline = time.monotonic() + ATTEMPT
        try:
            for position in range(me):
                links[position] = self._dial(addresses[position], me, deadline)
            self._accept(links, me, deadline)
        except BaseException:
            close_links(links)
            raise
        return links

    def _dial(self, address: str, me: int, deadline: float) -> PeerLink:
        """Connect to a peer that accepts."""
        name, _, secret = address.partition(" ")
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            end.settimeout(max(0.001, deadline - time.monotonic()))
            end.connect("\0" + name)
            if user_of(end) != os.getuid():
                raise ConnectionRefusedError(f"the socket {name} is of user {user_of(end)}, who is no rank of this job")
            end.send(f"{secret} {me}".encode())
        except BaseException:
            end.close()
            raise
        return PeerLink(end)

    def _accept(self, links: list[PeerLink | None], me: int, deadline: float) -> None:
        """Accept the connections of the peers after this one, all at once, and fill in their links."""
        self.listener.setblocking(False)
        ready = select.poll()
        ready.register(self.listener, select.POLLIN)
        waiting: dict[int, socket.socket] = {}
        try:
            while None in links[me + 1 :]:
                events = ready.poll(1000 * max(0.0, deadline - time.monotonic()))
                if time.monotonic() > deadline:  # also if strangers never stop connecting
                    gone = [position for position in range(me + 1, len(links)) if links[position] is None]
                    raise TimeoutError(f"no link to the ranks at positions {gone} after {ATTEMPT:g} s")
                for number, _ in events:
                    if number == self.listener.fileno():
                        self._admit(ready, waiting, len(links))
                        continue
                    end = waiting.pop(number, None)
                    if end is None:  # it was closed meanwhile
                        continue
                    ready.unregister(number)
                    position = self._position(end, links, me)
                    if position is None:
                        end.close()
                    else:
                        links[position] = PeerLink(end)
        finally:
            for end in waiting.values():
                end.close()

    def _admit(self, ready: select.poll, waiting: dict[int, socket.socket], peers: int) -> None:
        """Accept a connection of this user; close the oldest one if too many are unidentified."""
        with suppress(BlockingIOError, ConnectionAbortedError):
            end, _ = self.listener.accept()
            if user_of(end) != os.getuid():
                end.close()
                return
            end.setblocking(False)
            waiting[end.fileno()] = end
            ready.register(end, select.POLLIN)
            if len(waiting) > peers + WAITING:
                oldest = next(iter(waiting))
                ready.unregister(oldest)
                waiting.pop(oldest).close()

    def _position(self, end: socket.socket, links: Sequence[PeerLink | None], me: int) -> int | None:
        """The position of the peer at the other end; None if it does not know the secret or is already connected."""
        try:
            secret, _, text = end.recv(LONGEST).decode(errors="replace").partition(" ")
        except OSError:
            return None
        if not secrets.compare_digest(secret.encode(), self.secret.encode()) or not text.isdecimal() or len(text) > 9:
            return None
        position = int(text)
        return position if me < position < len(links) and links[position] is None else None

    def close(self) -> None:
        """Accept no further connections."""
        self.listener.close()


def make_memory(size: int) -> tuple[Tensor, int]:
    """New shared memory of a fixed size, as bytes, and the file descriptor by which peers map it."""
    file = os.memfd_create("fshard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        return _mapped(file, size), file
    except BaseException:
        os.close(file)
        raise


def map_memory(file: int) -> Tensor:
    """The memory behind a peer's file descriptor, as bytes. It stays mapped as long as the tensor lives.

    Raises:
        OSError: it is not memory of a fixed size.
    """
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ConnectionError(f"has sent a file that is no memory: {error.strerror}") from None
    size = os.fstat(file).st_size
    if seals & SEALS != SEALS or size <= 0:
        raise ConnectionError(f"has sent memory of {size} bytes with the seals {seals}, which could shrink under a map")
    return _mapped(file, size)


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def close_files(files: Sequence[int]) -> None:
    """Close the descriptors of a message."""
    for file in files:
        with suppress(OSError):
            os.close(file)


def close_links(links: Sequence[PeerLink | None]) -> None:
    """Close links."""
    for link in links:
        if link is not None:
            link.close()


def user_of(end: socket.socket) -> int:
    """The user of the other end, from the kernel."""
    data = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(data)[1])
