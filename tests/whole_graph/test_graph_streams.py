"""A capture waits for no event from before it, and all streams have joined it at its end.

In segments each waits for the transfers that it reads, and each transfer for the segment that has filled its buffer.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.runtime.comm.host_calls import HostCall
from fshard.runtime.comm.nccl import NcclCommunicator
from tests.runtime import test_lanes as lanes
from tests.runtime.test_happens_before import batch_of, watched
from tests.shared.clocks import COMPUTE, OTHER, Clocks

CASES = {
    **{
        f"{layout}, {name}": replace(lanes.CASES[f"{layout}, {name}"])
        for layout in ("flat", "hsdp", "opt axes", "zero")
        for name in ("default", "whole gradients")
    },
    "secondary": lanes.CASES["secondary"],
    "beside": replace(lanes.CASES["zero, default"], options={"schedule": fs.Policy(update="beside")}),
    "packed": lanes.CASES["packed"],
    "a collective of the program": lanes.CASES["a collective of the program"],
}


class ModelCapture:
    """Captures in the model of streams. What is captured is done at once, in the place of the first replay.

    So is what the host does between segments, which the compute stream is given one behind the other.
    """

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks

    def capture(self, run: Callable[[Any], Any]) -> tuple[Callable[[], None], Any]:
        """Call a function on another stream. Its graphs are launched on the compute stream."""
        clocks = self.clocks

        def cut(call: HostCall) -> None:
            segment.close()
            clocks.join(COMPUTE, clocks.clock(OTHER))
            clocks.compute = OTHER  # the stream that the capture's memory is made for
            call.run()
            clocks.compute = COMPUTE
            segment.enter_context(clocks.capture())

        with ExitStack() as segment:
            segment.enter_context(clocks.capture())
            result = run(cut)
        clocks.join(COMPUTE, clocks.clock(OTHER))
        return lambda: None, result


def captured(case: lanes.Case, drop: str = "", graph: str = "step") -> tuple[list[str], set[str]]:
    """The races of three steps, the last of which is captured and replayed, and drops an event or a wait."""
    by_thread: dict[int, Clocks] = {}

    def work(mesh: fs.Mesh, mine: Clocks) -> None:
        by_thread[threading.get_ident()] = mine
        plan, opt = lanes.made(mesh, case.rules, case.precision, case.wire), fs.optim.adamw(1e-2)
        options = {**case.options, "schedule": replace(case.options.get("schedule", fs.Policy()), graph=graph)}
        step = fs.make_train_step(case.fn, opt, plan, **options)
        state = fs.init_state(plan, opt, params=lanes.params())
        with mine:
            for number in range(3):
                mine.drop = drop if number == 2 else ""
                state, metrics = step(state, batch_of(mesh, number))
            assert metrics.ran.graph == "captured" and (mine.epoch == 2) is (graph == "step")
            fs.settle(state)

    with pytest.MonkeyPatch.context() as change:
        change.setattr(
            "fshard.runtime.whole_graph.device_capture.capture_of",
            lambda device: ModelCapture(by_thread[threading.get_ident()]),
        )
        change.setattr("fshard.runtime.whole_graph.graph_runner.HostWork", Nothing)
        change.setattr("fshard.runtime.comm.host_calls.on_memory_of", lambda x: x)  # which the model knows
        return watched(case.axes, work)


class Nothing(torch.utils._python_dispatch.TorchDispatchMode):
    """Looks at no operator."""

    found: tuple[str, ...] = ()

    def __init__(self, device: torch.device) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.long
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_a_capture_is_closed(name: str) -> None:
    races, _ = captured(CASES[name])
    assert not races, "\n".join(races)


@pytest.mark.long
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in CASES if name != "beside"])
def test_segments_and_transfers_are_ordered(name: str) -> None:
    races, _ = captured(CASES[name], graph="segments")
    assert not races, "\n".join(races)


@pytest.mark.long
def test_segments_and_transfers_that_do_not_wait_for_each_other_are_seen() -> None:
    _, sites = captured(CASES["flat, default"], graph="segments")
    found = [site for site in sites if site.startswith("wait for ") or "SegmentHandle.start" in site]
    assert len(found) == 3, found  # gathers, reductions, and segments
    for site in found:
        assert captured(CASES["flat, default"], site, graph="segments")[0], site


def test_an_event_from_before_the_capture_is_seen() -> None:
    kept: dict[int, Any] = {}
    real = NcclCommunicator.all_gather

    def late(self: NcclCommunicator, out: torch.Tensor, shard: torch.Tensor, after: Any = None) -> Any:
        mark = kept.setdefault(threading.get_ident(), self.stream.record())
        return real(self, out, shard, (mark,))

    with pytest.MonkeyPatch.context() as change:
        change.setattr(NcclCommunicator, "all_gather", late)
        races, _ = captured(CASES["flat, default"])
    assert any(race.startswith("an event from before the capture is waited for") for race in races)


def test_a_stream_that_does_not_join_is_seen() -> None:
    _, sites = captured(CASES["flat, default"])
    for site in sorted(site for site in sites if site.startswith("wait for reduce_scatter")):
        races, _ = captured(CASES["flat, default"], site)
        assert any("has not joined the capture at its end" in race for race in races), site
