"""The network interface over which gloo reaches other hosts, if the name of this host leads to itself.

gloo connects ranks at the address that a host's own name has. Many systems give that name to 127.0.1.1, which leads
other hosts to themselves: "Connection refused", far from the cause.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress

VARIABLE = "GLOO_SOCKET_IFNAME"
"""The environment variable by which gloo is told an interface."""

ELSEWHERE = "192.0.2.1"
"""An address of no host: the way to it is the way to other networks. Nothing is sent."""

ADDRESS_OF = 0x8915
"""The request for the address of an interface (``SIOCGIFADDR`` of Linux)."""


def interface(environment: Mapping[str, str]) -> str:
    """The interface to name to gloo; empty where it needs none, or where nobody can tell.

    Args:
        environment: with torchrun's variables.
    """
    alone = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
    master = environment.get("MASTER_ADDR", "")
    if VARIABLE in environment or alone or not _leads_here(socket.gethostname()):
        return ""
    if _leads_here(master) and "LOCAL_WORLD_SIZE" not in environment:
        return ""  # all ranks of a job that was started by hand may be here
    return _named(_own_address(ELSEWHERE if _leads_here(master) else master))


def _leads_here(host: str) -> bool:
    """Tell whether the address of a host is one of this host alone, or there is none."""
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return True


def _own_address(other: str) -> str:
    """The address of this host on the way to another; empty without a way."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])
    return ""


def _named(address: str) -> str:
    """The interface that has an address of other hosts' use; empty if there is none."""
    if not address or address.startswith("127."):
        return ""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                asked = struct.pack("256s", os.fsencode(name)[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), ADDRESS_OF, asked)[20:24]) == address:
                    return name
    return ""
