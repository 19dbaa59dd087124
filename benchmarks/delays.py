"""Links that hold each packet for a given time, in a process of their own: where the kernel has no netem.

Each namespace gets a tun device, whose packets this process reads, holds, and writes to the device of the address that
they are for. Made for messages between ranks that compute: at gigabits a second this process would be the link.

    python benchmarks/delays.py SECONDS DEVICE NAMESPACE=ADDRESS ...
"""

import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

NAMESPACES = Path("/run/netns")
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
SET_DEVICE, PACKETS = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI
MOST = 65535
"""Bytes of a packet."""


def device_in(namespace: str, name: str) -> int:
    """A new tun device of a namespace, there as long as the file that is returned. Moves this process there."""
    with (NAMESPACES / namespace).open() as entered:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(entered.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, SET_DEVICE, struct.pack("16sH22x", name.encode(), PACKETS))
    return file


def receiver(packet: bytes) -> str:
    """The address that a packet of IPv4 is for; of other packets an empty text."""
    return socket.inet_ntoa(packet[16:20]) if len(packet) >= 20 and packet[0] >> 4 == 4 else ""


def forward(files: Mapping[str, int], seconds: float) -> None:
    """Hand packets on, each so many seconds after it came, in their order. Does not return."""
    held = deque[tuple[float, bytes]]()
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        for file in select.select([*files.values()], [], [], wait)[0]:
            try:
                while True:
                    held.append((time.monotonic() + seconds, os.read(file, MOST)))
            except BlockingIOError:
                pass  # that were all
        while held and held[0][0] <= time.monotonic():
            _, packet = held.popleft()
            target = files.get(receiver(packet))
            if target is not None:
                try:
                    os.write(target, packet)
                except OSError:
                    pass  # its device is not up, or full: packets may be lost


def main() -> int:
    """Make the devices, say that they are there, forward until this process is ended."""
    seconds, device, pairs = float(sys.argv[1]), sys.argv[2], [word.split("=") for word in sys.argv[3:]]
    files = {address: device_in(namespace, device) for namespace, address in pairs}
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # before ranks that compute, or packets wait longer
    except PermissionError:
        pass
    print("ready", flush=True)
    forward(files, seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
