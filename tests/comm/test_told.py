"""One message for an error of another rank: the cause first, with rank and host, and no chain of tracebacks."""

import os
import socket
import traceback
from typing import Any

import pytest
import torch.distributed as dist

import fshard as fs
from fshard.errors import CommError, PlanError
from fshard.runtime.comm import joining
from fshard.runtime.comm import start as interfaces
from fshard.runtime.comm.ending import Ending
from fshard.runtime.comm.joining import Alive
from fshard.runtime.comm.launchers import as_torchrun
from fshard.runtime.comm.pending import naming_errors
from fshard.runtime.comm.start import interface
from fshard.runtime.comm.watchdog import Watchdog

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4711. This is "
    "typically caused by a remote worker hanging or bugs in the application. Check the logs. GLHF!"
)


def test_an_error_of_another_rank_is_one_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    error = CommError("it failed")
    for full, count in (("", 1), ("full", 2)):
        monkeypatch.setenv("FSHARD_TRACEBACKS", full)
        with pytest.raises(CommError) as caught:
            call_that_fails()
        text = "".join(traceback.format_exception(caught.value))
        assert text.count("Traceback (most recent call last)") == count, text
        assert ("Connection closed" in text) == bool(full)
    assert str(error) == "it failed"


class Transport:
    """A transport whose ranks are gone."""

    def abort(self, role: str, reason: str = "") -> None:
        """Does nothing."""


def call_that_fails() -> None:
    """A collective call that loses rank 3, as its decorator raises it."""
    from fshard.runtime.comm.collective_call import telling

    mesh: Any = fs.abstract_mesh((4,), ("data",))
    object.__setattr__(mesh, "transport", Transport())
    with telling(mesh, always=False), naming_errors("all-gather on control", 3):
        raise RuntimeError(GLOO)


def test_a_closed_connection_is_that_of_a_rank() -> None:
    with pytest.raises(CommError) as caught, naming_errors("all-gather on control", 3):
        raise RuntimeError(GLOO)
    assert str(caught.value) == "all-gather on control failed: rank 3 has closed its connection: it ended or failed"
    with pytest.raises(CommError) as caught, naming_errors("all-gather on control", 3):
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")
    assert "rank 3 is gone, stuck, or at another collective: Timed out" in str(caught.value)
    with pytest.raises(CommError) as caught, naming_errors("a sum"):
        raise RuntimeError(GLOO)
    assert str(caught.value) == "a sum failed: Connection closed by peer [10.0.0.1]:4711."


@pytest.mark.parametrize("fatal", [False, True])
def test_hosts_of_ranks_are_told_where_there_are_several(fatal: bool) -> None:
    aborted: list[str] = []
    watchdog = Watchdog(1, 5.0, aborted.append)
    for hosts, told in (({0: "a", 1: "a", 2: "a"}, ""), ({0: "a", 1: "b", 2: "c"}, "\nHosts: rank 2 on c")):
        watchdog.notes.hosts = hosts
        with pytest.raises(CommError) as caught, watchdog.explaining([0, 1, 2], fatal):
            raise CommError("all-gather failed: rank 2 has closed its connection: it ended or failed")
        assert str(caught.value).endswith(f"it ended or failed{told}")
        assert "same calls" not in str(caught.value)
    assert bool(aborted) == fatal


def test_ranks_whose_store_ends_while_they_join_are_told_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "there")
    monkeypatch.setenv("MASTER_PORT", "77")
    alive = Alive(dist.HashStore(), 1, 2)

    def lost() -> None:
        raise dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed.")

    with pytest.raises(
        CommError, match="the store of the job at there:77 has ended before .* rank 0 or torchrun's agent"
    ):
        joining._in_time(lost, 5.0, alive)
    alive.unread, alive.processes = [], {0: f"{os.getpid()} 1"}
    with pytest.raises(CommError, match="rank 0 has ended"):
        joining._in_time(lost, 5.0, alive)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"RANK": "1"}, "RANK=1, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK is not set"),
    ],
)
def test_half_of_a_launchers_variables_is_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=f"{says}.*torchrun"):
        as_torchrun(given)


ACROSS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (ACROSS, "eth7"),
        (ACROSS | {"MASTER_ADDR": "here"}, "eth7"),
        (ACROSS | {"GLOO_SOCKET_IFNAME": "eth1"}, ""),
        (ACROSS | {"LOCAL_WORLD_SIZE": "4"}, ""),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "here"}, ""),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "n1"}, "eth7"),
    ],
)
def test_hosts_whose_name_leads_to_themselves(given: Any, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"here": "127.0.1.1", "n1": "10.1.1.1"}
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "gethostbyname", addresses.__getitem__)
    monkeypatch.setattr(
        interfaces, "_own_address", lambda other: {"10.1.1.1": "", "n1": "10.1.1.2"}.get(other, "10.1.1.2")
    )
    monkeypatch.setattr(interfaces, "_named", {"10.1.1.2": "eth7", "": ""}.__getitem__)
    assert interface(given) == named
    addresses["here"] = "10.1.1.2"
    assert interface(given) == ""


def test_the_interface_of_an_address() -> None:
    own = interfaces._own_address(interfaces.ELSEWHERE)
    assert interfaces._named("127.0.0.1") == "" == interfaces._named("203.0.113.9")
    assert not own or interfaces._named(own) in {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize(("error", "later"), [(CommError("x"), 1), (ValueError("x"), 0), (None, 0)])
def test_ranks_that_another_one_has_failed_end_after_it(
    error: Any, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("atexit.register", lambda body: None)
    monkeypatch.setattr("fshard.runtime.comm.ending.left", lambda seconds: [])
    monkeypatch.setattr("fshard.runtime.comm.ending.uncaught", lambda: error)
    monkeypatch.setattr("time.sleep", slept.append)
    Ending().end()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    Ending().end()
    assert len(slept) == later
