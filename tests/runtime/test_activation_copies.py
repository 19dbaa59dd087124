"""The model of streams and the lazy lane refuse a runtime that uses memory of activations too early, or twice."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.runtime.comm.device_streams import Stream
from fshard.runtime.engine.hosted_activations import HostedActivations
from fshard.runtime.memory.activation_copies import ActivationCopies, Copied, HostPool
from tests.runtime.test_happens_before import raced
from tests.runtime.test_lanes import CASES, trained
from tests.shared.lanes import LaneCopies

CASE = CASES["activations on the host"]


def source_freed(change: pytest.MonkeyPatch) -> None:
    """The fault: a source is let go of when its copy begins."""
    real = HostedActivations.leave

    def leave(self: HostedActivations, call: Any) -> None:
        real(self, call)
        for one in self.under_way[True, call][0]:
            one.source = None

    change.setattr(HostedActivations, "leave", leave)


def target_reused(change: pytest.MonkeyPatch) -> None:
    """The fault: what comes back is written over what came back before, which a backward still reads."""
    for copies in (ActivationCopies, LaneCopies):
        _reuse(change, copies)


def _reuse(change: pytest.MonkeyPatch, copies: Any) -> None:
    real, pool = torch.empty_like, dict[int, Tensor]()
    come: Callable[..., Copied] = copies.come

    def reused(self: ActivationCopies, call: Any, kept: Sequence[Tensor]) -> Copied:
        def again(size: int, like: Any = None) -> Tensor:
            made = real(like) if like is not None else torch.zeros(size, dtype=torch.uint8)
            return pool.setdefault(made.numel(), made)

        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(torch, "empty_like", lambda x: again(x.numel(), x))
            inside.setattr(torch, "empty", lambda size, **_: again(size))
            return come(self, call, kept)

    change.setattr(copies, "come", reused)


def buffer_reused(change: pytest.MonkeyPatch) -> None:
    """The fault: a buffer on the host goes to the next call as soon as it is written."""
    real = HostedActivations.left

    def left(self: HostedActivations, call: Any) -> None:
        leaving = self.under_way[True, call][0]
        real(self, call)
        self.copies.drop([one.kept for one in leaving if one.kept is not None])

    change.setattr(HostedActivations, "left", left)


FAULTS = {"source freed": source_freed, "target reused": target_reused, "buffer reused": buffer_reused}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_lazy_lane_refuses_the_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want, _ = trained(CASE, "plain")
    assert trained(CASE, "lazy")[0] == want
    FAULTS[fault](monkeypatch)
    try:
        got = trained(CASE, "lazy")[0]
    except Exception as error:
        assert fault != "source freed" or "a source was freed before its copy was over" in str(error)
    else:
        assert repr(got) != repr(want)


@pytest.mark.parametrize("fault", ["source freed", "target reused"])
def test_the_model_of_streams_refuses_the_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that is reused in order of one stream is no race; it is wrong bytes, which the lane finds."""
    assert not raced(CASE)[0]
    FAULTS[fault](monkeypatch)
    races, _ = raced(CASE)
    words = "memory is freed" if fault == "source freed" else "is not ordered behind"
    assert any(words in race and "activation_copies" in race or "ActivationCopies" in race for race in races), races


class Counting(Stream):
    """A stream that notes each new event."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def record(self, event: Any = None) -> Any:
        """The event that is given, or a new one."""
        if event is None:
            self.made.append(object())
        return event or self.made[-1]


def test_each_call_has_one_event_each_way_for_all_steps() -> None:
    streams: Any = SimpleNamespace(outward=Counting(), inward=Counting())
    copies = ActivationCopies(streams, HostPool(fs.make_mesh((1,), ("data",), device="cpu")))
    for _ in range(3):
        for call in (("0", 0), ("0", 1), ("1", 0)):
            kept = copies.leave(call, [torch.zeros(4, dtype=torch.uint8)]).tensors
            copies.come(call, kept)
            copies.drop(kept)
    assert len(streams.outward.made) == len(streams.inward.made) == 3
