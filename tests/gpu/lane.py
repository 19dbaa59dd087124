"""Every method of the NCCL communicator on a group of one rank, while kernels are late.

A sleeping kernel goes before what a collective reads, and another before the collective on its side stream: a
communicator that forgets an event reads, or lets others read, what is not there yet. A gather without its event, and
one that is read without its wait, show that the delay would be seen. On CPU the group is one of gloo, and nothing is
late.
"""

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fshard.runtime.comm.device_streams import make_stream
from fshard.runtime.comm.nccl import NcclCommunicator
from tests.gpu.place import Clock, Found, Place

COUNT, LATE = 1 << 16, 40.0
"""Elements of a tensor, and milliseconds of a delay."""

Call = Callable[[NcclCommunicator, Tensor, Tensor, Any], Any]


def _reduced(add: bool, dtype: torch.dtype = torch.float32) -> Call:
    def call(comm: NcclCommunicator, out: Tensor, given: Tensor, after: Any) -> Any:
        stage = torch.empty(2 * COUNT, dtype=dtype, device=given.device)
        return comm.reduce_scatter(out, given, stage, add, after)

    return call


CALLS: dict[str, tuple[Call, torch.dtype, float]] = {
    "all_gather": (lambda comm, out, given, after: comm.all_gather(out, given, after), torch.float32, 0.0),
    "all_gather of bytes": (
        lambda comm, out, given, after: comm.all_gather(out.view(torch.uint8), given.view(torch.uint8), after),
        torch.float32,
        0.0,
    ),
    "all_gather, bfloat16": (lambda comm, out, given, after: comm.all_gather(out, given, after), torch.bfloat16, 0.0),
    "reduce_scatter": (_reduced(False), torch.float32, 0.0),
    "reduce_scatter that adds": (_reduced(True), torch.float32, 10.0),
    "reduce_scatter of bfloat16 to float32": (_reduced(False, torch.bfloat16), torch.bfloat16, 0.0),
    "reduce_scatter of bfloat16 that adds": (_reduced(True, torch.bfloat16), torch.bfloat16, 10.0),
    "all_to_all": (lambda comm, out, given, after: comm.all_to_all(out, given, None, None, after), torch.float32, 0.0),
    "all_to_all with sizes": (
        lambda comm, out, given, after: comm.all_to_all(out, given, [COUNT], [COUNT], after),
        torch.float32,
        0.0,
    ),
}
"""By name: the call, the dtype of what is sent, and what is in the output before."""


def run(place: Place, found: Found) -> None:
    """Make the group, call every method on it, and end it in the middle of a collective."""
    backend = place.of("nccl", "gloo")
    if place.dry:
        found.leave("NCCL, its streams and events: the group is one of gloo, and nothing is late")
    options: dict[str, Any] = {} if place.dry else {"device_id": place.device}
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=30), **options
    )
    group = dist.new_group([0], backend=backend)
    comm = NcclCommunicator("lane", 1, group, make_stream(place.device))
    for name, (call, dtype, before) in CALLS.items():
        with found.trying(name):
            _right(place, found, comm, name, call, dtype, before)
    with found.trying("all_reduce"):
        _all_reduce(place, found, comm)
    for check in () if place.dry else (_shows, _aborted):
        with found.trying(check.__name__):
            check(place, found, comm)
    _closed(found, comm)


def _right(
    place: Place, found: Found, comm: NcclCommunicator, name: str, call: Call, dtype: torch.dtype, before: float
) -> None:
    """Whether the result is there after the wait, with a late input and with a late collective."""
    wide = torch.float32 if "reduce_scatter" in name else dtype
    for late in ("input", "input, without events", "collective"):
        for turn in range(2):  # the first makes NCCL's own communicator
            out = torch.full((COUNT,), before, dtype=wide, device=place.device)
            given = torch.full((COUNT,), -1.0, dtype=dtype, device=place.device)
            place.synchronize()
            clock = Clock()
            if late != "collective":
                place.sleep(LATE)
            given.fill_(3.0)
            after = None if late == "input, without events" else (comm.stream.record(),)
            if late == "collective":
                with comm.stream.after(()):
                    place.sleep(LATE)
            handle = call(comm, out, given, after)
            issued = clock.seconds()
            handle.wait()
            waited = clock.seconds()
            seen = out.clone()
            place.synchronize()
            found.check(bool((seen == before + 3).all()), f"{name}, late {late}, turn {turn}: {seen[:2].tolist()}")
            if turn and not place.dry:
                found.number(
                    f"{name}, late {late}: ms of the host", [1e3 * issued, 1e3 * waited, 1e3 * clock.seconds()]
                )
                found.check(waited < LATE / 2e3, f"{name}, late {late}: the host waited {1e3 * waited:.1f} ms")
                found.check(clock.seconds() > LATE / 4e3, f"{name}, late {late}: nothing was late")


def _all_reduce(place: Place, found: Found, comm: NcclCommunicator) -> None:
    """A sum over one rank changes nothing, so its order shows in the time alone."""
    for late in (False, True):
        buffer = torch.full((COUNT,), 2.0, device=place.device)
        place.synchronize()
        clock = Clock()
        if late:
            with comm.stream.after(()):
                place.sleep(LATE)
        comm.all_reduce(buffer, (comm.stream.record(),)).wait()
        seen = buffer + 1
        place.synchronize()
        found.check(bool((seen == 3).all()), f"all_reduce: {seen[:2].tolist()}")
        if late and not place.dry:
            found.check(clock.seconds() > LATE / 4e3, "all_reduce: the compute stream did not wait for the collective")


def _shows(place: Place, found: Found, comm: NcclCommunicator) -> None:
    """Without the event, or without the wait, the delay shows: else the checks above prove nothing."""
    out, given = (torch.full((COUNT,), value, device=place.device) for value in (0.0, -1.0))
    place.synchronize()
    place.sleep(LATE)
    given.fill_(3.0)
    handle = comm.all_gather(out, given, ())
    handle.wait()
    place.synchronize()
    found.check(
        bool((out == -1).all()), f"without its event a gather reads {out[:2].tolist()}: the delay does not show"
    )
    out.zero_()
    place.synchronize()
    with comm.stream.after(()):
        place.sleep(LATE)
    handle = comm.all_gather(out, given, (comm.stream.record(),))
    seen = out.clone()
    handle.wait()
    place.synchronize()
    found.check(
        bool((seen == 0).all()), f"without its wait a gather gives {seen[:2].tolist()}: the delay does not show"
    )


def _aborted(place: Place, found: Found, comm: NcclCommunicator) -> None:
    """Abort a group while a collective of it is late: the abort returns, and the device can be read."""
    group = dist.new_group([0], backend="nccl")
    other = NcclCommunicator("aborted", 1, group, make_stream(place.device))
    out, given = (torch.full((COUNT,), value, device=place.device) for value in (0.0, 5.0))
    other.all_gather(out, given).wait()
    place.synchronize()
    with other.stream.after(()):
        place.sleep(10 * LATE)
    other.all_gather(out, given, ())
    gone: Any = other.close("it is over")
    thread, clock = threading.Thread(target=gone.abort, daemon=True), Clock()
    thread.start()
    thread.join(10)
    found.number("seconds of an abort", clock.seconds())
    found.check(not thread.is_alive(), "an abort of a group with a late collective did not return in 10 s")
    clock = Clock()
    place.synchronize()
    found.number("seconds until the device is done after it", clock.seconds())
    _right(place, found, comm, "all_gather after an abort", *CALLS["all_gather"])


def _closed(found: Found, comm: NcclCommunicator) -> None:
    """A closed communicator refuses, and the process group ends in time."""
    comm.close("the stage is over")
    try:
        comm.all_reduce(torch.ones(1))
        found.check(False, "a closed communicator took a collective")
    except RuntimeError as error:
        found.check("the stage is over" in str(error), f"a closed communicator says: {error}")
    thread, began = threading.Thread(target=dist.destroy_process_group, daemon=True), time.perf_counter()
    thread.start()
    thread.join(10)
    found.check(not thread.is_alive(), "the process group did not end in 10 s")
    found.number("seconds to end the process group", time.perf_counter() - began)
