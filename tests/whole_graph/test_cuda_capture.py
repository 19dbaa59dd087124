"""What captures CUDA graphs calls PyTorch as it asks for, shown on a CUDA that is not there."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fshard.runtime.comm.host_calls import HostCall
from fshard.runtime.whole_graph.device_capture import CudaCapture


class FakeCuda:
    """What ``CudaCapture`` calls of ``torch.cuda``: a stream, and graphs that say what was done to them."""

    def __init__(self) -> None:
        self.current, self.said = "user", list[str]()

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        """Make a stream current, as ``torch.cuda.stream`` does."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph(self) -> Any:
        """A graph. The end of a capture that has failed raises."""
        number = sum(line.startswith("begin") for line in self.said)

        def end() -> None:
            self.said.append(f"end {number}")
            if "fails" in self.said:
                raise RuntimeError("the capture was invalidated")

        def begin(pool: int, capture_error_mode: str) -> None:
            self.said.append(f"begin {number} on {self.current} in {pool}")

        return SimpleNamespace(
            capture_begin=begin, capture_end=end, replay=lambda: self.said.append(f"replay {number} on {self.current}")
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A CUDA that is not there."""
    made = FakeCuda()
    names = {"device": lambda device: nullcontext(), "stream": made.stream, "Stream": lambda device: "side"}
    names |= {"graph_pool_handle": lambda: 1, "CUDAGraph": made.graph}
    for name, value in (names | {"synchronize": lambda: None, "empty_cache": lambda: None}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


def test_a_capture_that_fails_gives_its_stream_back_and_tells_the_first_error(fake: FakeCuda) -> None:
    capture = CudaCapture(torch.device("cuda", 0))

    def fails(cut: Any) -> None:
        cut(HostCall("send", (), lambda: None))
        fake.said.append("fails")
        raise ValueError("not permitted")

    with pytest.raises(ValueError, match="not permitted"):
        capture.capture(fails)
    assert fake.current == "user" and fake.said[-2:] == ["fails", "end 1"]
    fake.said.clear()
    assert capture.capture(lambda cut: fake.current)[1] == "side" and fake.current == "user"


def test_segments_of_cuda_share_a_pool_and_are_replayed_in_order(fake: FakeCuda) -> None:
    def run(cut: Any) -> str:
        cut(HostCall("send", (), lambda: fake.said.append(f"send on {fake.current}")))
        return "result"

    replay, result = CudaCapture(torch.device("cuda", 0)).capture(run)
    assert fake.said == ["begin 0 on side in 1", "end 0", "begin 1 on side in 1", "end 1"] and result == "result"
    fake.said.clear()
    replay()
    assert fake.said == ["replay 0 on user", "send on user", "replay 1 on user"]
