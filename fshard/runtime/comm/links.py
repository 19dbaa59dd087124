"""Links between processes of one host: sockets that carry short messages and memory.

A link is a Unix socket that keeps messages apart. Memory is announced over it as a file descriptor of an anonymous
file, so it has no name that could be left behind, and goes when the last process that maps it goes. A peer that dies
closes its links: whoever waits for it learns so at once.

An abstract Unix socket has no permissions: any process of the network namespace may connect. The kernel says of which
user the other end is, so those of other users are turned away before a byte of theirs is read, and a connection that
says nothing holds up nobody.
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
"""Seconds that setting up all links of a communicator may take."""

LONGEST = 1 << 16
"""Bytes of a message at most."""

WAITING = 128
"""Connections that may be open before they have said who they are, beside one for each peer; the oldest goes first."""

SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SEAL", 1)
"""What memory must promise before it is mapped: a file that shrinks under a map ends the process that reads it."""

CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid of a peer."""


def host_key() -> str:
    """Equal for two processes that can open links to each other, empty where there are none.

    Links live in a network namespace: two containers of one host are as far apart as two hosts.
    """
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return ""


class Link:
    """This process's end of a link."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self.ready = select.poll()
        self.ready.register(end, select.POLLIN)

    def send(self, message: bytes, files: Sequence[int] = ()) -> bool:
        """Send a message, with files. False if the link is full of messages that the peer has not read."""
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        try:
            self.end.sendmsg([message], extra)
        except BlockingIOError:
            return False
        return True

    def receive(self, seconds: float) -> tuple[bytes, list[int]] | None:
        """The next message and its files; None if there is none in time.

        Raises:
            OSError: the peer is gone.
        """
        if not self.ready.poll(1000 * seconds):
            return None
        try:
            message, extra, _, _ = self._next()
        except ConnectionResetError:  # the peer left without reading all; what it sent before is still there
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
        """Close this end. The peer learns of it."""
        self.end.close()


class Rendezvous:
    """Where the peers of one communicator find this process. ``address`` is for them alone."""

    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.name, self.secret = f"fshard-{secrets.token_hex(8)}", secrets.token_hex(16)
        self.listener.bind("\0" + self.name)
        self.listener.listen(1024)

    @property
    def address(self) -> str:
        """Name and secret."""
        return f"{self.name} {self.secret}"

    def open(self, me: int, addresses: Sequence[str]) -> list[Link | None]:
        """Links to all peers by their position; None at this process's own.

        Args:
            me: this process's position.
            addresses: of all doors, by position.

        Raises:
            OSError: a peer could not be reached.
        """
        links: list[Link | None] = [None] * len(addresses)
        deadline = time.monotonic() + ATTEMPT
        try:
            for position in range(me):
                links[position] = self._call(addresses[position], me, deadline)
            self._answer(links, me, deadline)
        except BaseException:
            close_links(links)
            raise
        return links

    def _call(self, address: str, me: int, deadline: float) -> Link:
        """A link to a peer that is to answer."""
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
        return Link(end)

    def _answer(self, links: list[Link | None], me: int, deadline: float) -> None:
        """Fill in the links to the peers after this one, who call. All that call are listened to at once."""
        self.listener.setblocking(False)
        ready = select.poll()
        ready.register(self.listener, select.POLLIN)
        waiting: dict[int, socket.socket] = {}
        try:
            while None in links[me + 1 :]:
                events = ready.poll(1000 * max(0.0, deadline - time.monotonic()))
                if time.monotonic() > deadline:  # also where strangers never stop calling
                    gone = [position for position in range(me + 1, len(links)) if links[position] is None]
                    raise TimeoutError(f"no link to the ranks at positions {gone} after {ATTEMPT:g} s")
                for number, _ in events:
                    if number == self.listener.fileno():
                        self._admit(ready, waiting, len(links))
                        continue
                    end = waiting.pop(number, None)
                    if end is None:  # it was sent away meanwhile
                        continue
                    ready.unregister(number)
                    position = self._position(end, links, me)
                    if position is None:
                        end.close()
                    else:
                        links[position] = Link(end)
        finally:
            for end in waiting.values():
                end.close()

    def _admit(self, ready: select.poll, waiting: dict[int, socket.socket], peers: int) -> None:
        """Let in who is of this user; the one that has waited longest goes where too many are silent."""
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

    def _position(self, end: socket.socket, links: Sequence[Link | None], me: int) -> int | None:
        """Which peer is at the other end; None if it does not know the secret, or is expected no more."""
        try:
            secret, _, text = end.recv(LONGEST).decode(errors="replace").partition(" ")
        except OSError:
            return None
        if not secrets.compare_digest(secret.encode(), self.secret.encode()) or not text.isdecimal() or len(text) > 9:
            return None
        position = int(text)
        return position if me < position < len(links) and links[position] is None else None

    def close(self) -> None:
        """Let nobody else in."""
        self.listener.close()


def make_memory(size: int) -> tuple[Tensor, int]:
    """New memory that can be shared, as bytes, and the file descriptor by which peers map it. Its size is for good."""
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
        OSError: it is no memory whose size is for good.
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
    """Close descriptors that a message brought."""
    for file in files:
        with suppress(OSError):
            os.close(file)


def close_links(links: Sequence[Link | None]) -> None:
    """Close links that nobody is to use."""
    for link in links:
        if link is not None:
            link.close()


def user_of(end: socket.socket) -> int:
    """The user at the other end, as the kernel knows."""
    data = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(data)[1])
