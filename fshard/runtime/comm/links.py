"""Links between processes of one host: sockets that carry short messages and memory.

A link is a Unix socket that keeps messages apart. Memory is announced over it as a file descriptor of an anonymous
file, so it has no name that could be left behind, and goes when the last process that maps it goes. A peer that dies
closes its links: whoever waits for it learns so at once.
"""

import array
import mmap
import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

ATTEMPT = 20.0
"""Seconds that setting up a link may take."""

LONGEST = 1 << 16
"""Bytes of a message at most."""

CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid of a peer."""


def place() -> str:
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
            message, extra, _, _ = self.end.recvmsg(LONGEST, socket.CMSG_SPACE(4))
        except ConnectionResetError:  # the peer left without reading all; what it sent before is still there
            message, extra, _, _ = self.end.recvmsg(LONGEST, socket.CMSG_SPACE(4))
        if not message:
            raise ConnectionError("has closed its link: it ended or failed")
        files = array.array("i")
        for _, _, data in extra:
            files.frombytes(data)
        return message, list(files)

    def close(self) -> None:
        """Close this end. The peer learns of it."""
        self.end.close()


class Door:
    """Where the peers of one lane find this process. ``address`` is for them alone."""

    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.name, self.secret = f"fshard-{secrets.token_hex(8)}", secrets.token_hex(16)
        self.listener.bind("\0" + self.name)
        self.listener.listen(1024)
        self.listener.settimeout(ATTEMPT)

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
        for position in range(me):
            name, secret = addresses[position].split()
            end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            end.settimeout(ATTEMPT)
            end.connect("\0" + name)
            end.send(f"{secret} {me}".encode())
            links[position] = Link(end)
        while None in links[me + 1 :]:
            end, _ = self.listener.accept()
            end.settimeout(ATTEMPT)
            secret, _, position_text = end.recv(LONGEST).decode(errors="replace").partition(" ")
            if secret == self.secret and _user(end) == os.getuid():
                links[int(position_text)] = Link(end)
            else:
                end.close()
        return links

    def close(self) -> None:
        """Let nobody else in."""
        self.listener.close()


def make_memory(size: int) -> tuple[Tensor, int]:
    """New memory that can be shared, as bytes, and the file descriptor by which peers map it."""
    file = os.memfd_create("fshard")
    os.ftruncate(file, size)
    return map_memory(file), file


def map_memory(file: int) -> Tensor:
    """The memory behind a file descriptor, as bytes. It stays mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)


def _user(end: socket.socket) -> int:
    """The user at the other end."""
    data = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(data)[1])
