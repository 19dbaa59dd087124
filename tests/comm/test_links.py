"""Links between processes of one host: strangers, malformed messages, memory that could shrink."""

import fcntl
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fshard.runtime.comm import links as links_module
from fshard.runtime.comm.links import PeerLink, Rendezvous, close_links, make_memory, map_memory
from fshard.runtime.comm.shared_memory import HEAD, READ, READY, SharedMemory
from fshard.runtime.comm.watchdog import Watchdog

SILENT = 300
"""More strangers than may wait at a rendezvous."""


def open_files() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def pair() -> tuple[PeerLink, PeerLink]:
    """Both ends of a link."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return PeerLink(one), PeerLink(other)


def connected(name: str) -> socket.socket:
    """A stranger at a rendezvous."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.settimeout(2)
    try:
        end.connect("\0" + name)
    except BaseException:
        end.close()
        raise
    return end


def meet(points: list[Rendezvous]) -> list[list[PeerLink | None]]:
    """Open all rendezvous points to each other, each in a thread of its own."""
    addresses = [point.address for point in points]
    with ThreadPoolExecutor(len(points)) as pool:
        return list(pool.map(lambda me: points[me].open(me, addresses), range(len(points))))


def test_strangers_that_say_nothing_or_nonsense_do_not_delay_the_ranks() -> None:
    points = [Rendezvous(), Rendezvous(), Rendezvous()]
    strangers = [connected(points[0].name) for _ in range(SILENT)]
    secret = points[0].secret
    for number, text in enumerate([b"x", b"wrong 1", f"{secret} 7".encode(), f"{secret} x".encode()]):
        strangers[number].send(text)
    begin = time.monotonic()
    found = meet(points)
    assert time.monotonic() - begin < 10  # one silent stranger took 20 s
    for me, row in enumerate(found):
        assert [link is None for link in row] == [at == me for at in range(3)]
    for row in found:
        close_links(row)
    for end in [*strangers, *points]:
        end.close()


def test_a_stranger_of_another_user_is_turned_away_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Rendezvous(), Rendezvous()
    mine = os.getuid()
    asked: list[socket.socket] = []

    def user(end: socket.socket) -> int:
        asked.append(end)
        return mine + 1 if len(asked) == 1 else mine  # the first to come in is of another user

    stranger = connected(one.name)
    stranger.send(f"{one.secret} 1".encode())  # even one that knows the secret
    monkeypatch.setattr(links_module, "user_of", user)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one.open, 0, [one.address, other.address])
        deadline = time.monotonic() + 10
        while not asked and time.monotonic() < deadline:
            time.sleep(0.01)
        second = pool.submit(other.open, 1, [one.address, other.address])
        rows = [first.result(20), second.result(20)]
    with pytest.raises(ConnectionResetError):  # closed, with what it said unread
        stranger.recv(10)
    assert rows[0][1] is not None and rows[1][0] is not None
    rows[1][0].send(b"hello")
    assert rows[0][1].receive(5) == (b"hello", [])
    for row in rows:
        close_links(row)
    for end in (stranger, one, other):
        end.close()


def test_a_rank_keeps_its_secret_from_a_rendezvous_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, mine = Rendezvous(), Rendezvous()
    before = open_files()
    monkeypatch.setattr(links_module, "user_of", lambda end: os.getuid() + 1)
    with pytest.raises(ConnectionRefusedError, match="is of user"):
        mine.open(1, [theirs.address, mine.address])
    end, _ = theirs.listener.accept()
    assert end.recv(100) == b""
    end.close()
    assert open_files() == before
    theirs.close()
    mine.close()


def test_a_peer_that_does_not_come_is_named_in_bounded_time_and_nothing_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links_module, "ATTEMPT", 0.5)
    points = [Rendezvous(), Rendezvous(), Rendezvous()]
    addresses = [point.address for point in points]
    before, stop = open_files(), threading.Event()

    def keep_calling() -> None:
        while not stop.is_set():
            try:
                connected(points[1].name).close()
            except OSError:
                return

    caller = threading.Thread(target=keep_calling)
    caller.start()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"positions \[2\]"):
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(lambda: points[0].open(0, addresses[:2]))
            try:
                points[1].open(1, addresses)
            finally:
                close_links(first.result(20))
    assert time.monotonic() - begin < 10
    stop.set()
    caller.join()
    assert open_files() == before
    for point in points:
        point.close()


def message(
    kind: bytes = READY, call: bytes = b"g", number: int = 0, slot: int = -1, at: tuple[int, int] = (0, 8)
) -> bytes:
    """A message between ranks."""
    return HEAD.pack(kind, call, number, slot, *at)


NONSENSE: dict[str, tuple[list[bytes], str]] = {
    "short": ([b"+g"], "what is no message"),
    "of no kind": ([message(b"?")], "of kind b'\\?'"),
    "of no collective": (
        [message(call=b"?") + b"8 bytes.", message(call=b"g")],
        "of kind b'\\+' for collective 0, b'\\?'",
    ),
    "of memory that was never sent": ([message(slot=3)], "what is no message: 3"),
    "that has read what it was not given": ([message(READ, slot=0)], "what is no message"),
    "that has read memory of no number": ([message(READ, slot=-1)], "which nobody was to read"),
    "twice": ([message(number=1) + b"8 bytes."] * 2, "for collective 1"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_message_that_is_none_is_an_error_that_names_the_rank(name: str) -> None:
    sent, says = NONSENSE[name]
    here, there = pair()
    memory = SharedMemory([None, here], [0, 5], Watchdog(0, 5.0, print))
    for text in sent:
        there.send(text)
    with pytest.raises(ConnectionError, match=f"rank 5 .*{says}"):
        for number in (0, 1):
            with memory.part(1, number, b"g", torch.zeros(8, dtype=torch.uint8)):
                pass
    memory.close()
    there.close()


def test_bytes_outside_of_memory_are_refused_and_descriptors_do_not_stay() -> None:
    here, there = pair()
    memory = SharedMemory([None, here], [0, 5], Watchdog(0, 5.0, print))
    data, file = make_memory(4096)
    before = open_files()
    there.send(message(slot=0, at=(-64, 8)), [file])
    with pytest.raises(ConnectionError, match="bytes -64 to 8 of memory of 4096"):
        with memory.part(1, 0, b"g", data):
            pass
    assert open_files() == before + 1  # the map's own; what came with the message is closed
    memory.close()
    there.close()
    os.close(file)


def loose(size: int, seals: int) -> int:
    """Memory with other seals."""
    file = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


@pytest.mark.parametrize("kind", ["no seals", "may grow", "empty", "a file", "a pipe"])
def test_memory_that_could_shrink_is_not_mapped(kind: str, tmp_path: Any) -> None:
    spare = -1
    if kind == "a file":
        (tmp_path / "file").write_bytes(b"x" * 4096)
        file = os.open(tmp_path / "file", os.O_RDWR)
    elif kind == "a pipe":
        file, spare = os.pipe()
    else:
        seals = {"no seals": 0, "may grow": fcntl.F_SEAL_SHRINK, "empty": links_module.SEALS}[kind]
        file = loose(0 if kind == "empty" else 4096, seals)
    here, there = pair()
    memory = SharedMemory([None, here], [0, 5], Watchdog(0, 5.0, print))
    there.send(message(slot=0), [file])
    with pytest.raises(ConnectionError, match="rank 5 has sent (memory|a file that is no memory)"):
        with memory.part(1, 0, b"g", torch.zeros(8, dtype=torch.uint8)):
            pass
    memory.close()
    there.close()
    for number in (file, spare):
        if number >= 0:
            os.close(number)


def test_the_size_of_shared_memory_is_for_good() -> None:
    data, file = make_memory(8192)
    again = map_memory(file)
    data[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert again[:3].tolist() == [1, 2, 3]
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(file)
