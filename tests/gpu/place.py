"""Where a stage of ``make gpu`` runs, what it finds there, and streams that do nothing on a CPU."""

import json
import math
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

CYCLES = 2_000_000
"""Cycles of a GPU in a millisecond, about: ``torch.cuda._sleep`` counts cycles."""


@dataclass(frozen=True)
class Place:
    """Where a stage runs.

    Attributes:
        device: the GPU, or the CPU in a dry run.
        short: whether the dry run is the short one, as in tests.
    """

    device: torch.device
    short: bool = False

    @property
    def dry(self) -> bool:
        """Whether there is no GPU."""
        return self.device.type != "cuda"

    def of(self, gpu: Any, dry: Any, short: Any = None) -> Any:
        """One of three values: for a GPU, for a dry run, and for a short one."""
        return gpu if not self.dry else short if self.short and short is not None else dry

    def synchronize(self) -> None:
        """Wait until the device is done."""
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def deterministic(self) -> None:
        """From now on use kernels that give equal bits on every run, where there are any: runs are compared in bits."""
        if not self.dry:
            torch.use_deterministic_algorithms(True, warn_only=True)

    def sleep(self, milliseconds: float) -> None:
        """Let the current stream of the GPU wait."""
        if not self.dry:
            torch.cuda._sleep(int(milliseconds * CYCLES))  # type: ignore[no-untyped-call]

    def stream(self) -> Any:
        """A new stream; None on a CPU."""
        return None if self.dry else torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Inside, work is issued on a stream."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)


@dataclass
class Found:
    """What a stage has found so far. It is written to a file at every change, so that a stage that is cut keeps it.

    Attributes:
        path: the file.
        numbers: what was measured or compared, by name.
        problems: what is wrong.
        left_out: what this run did not do.
        done: how many checks were made.
    """

    path: Path
    numbers: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    done: int = 0

    def number(self, name: str, value: Any) -> None:
        """Note a number, or a record of numbers."""
        self.numbers[name] = value
        self._write()

    def check(self, right: bool, problem: str) -> None:
        """Count a check; note what is wrong unless it is right."""
        self.done += 1
        if not right:
            self.problems.append(problem)
            print(f"problem: {problem}", flush=True)
        self._write()

    def near(self, name: str, got: float, want: float, bound: float) -> None:
        """Check that a number is another one, up to a relative error. The error is noted; nan is never near."""
        error = abs(got - want) / abs(want) if want else abs(got)
        self.number(f"{name}: relative error", error)
        self.check(error <= bound, f"{name}: {got} where {want} was expected: off by {error:.3g}, more than {bound:g}")

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """What is raised inside is a problem, and the stage goes on; but after an error of the device nothing works."""
        try:
            yield
        except torch.AcceleratorError:
            raise
        except Exception as error:
            traceback.print_exc()
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            at = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
            text = " / ".join(str(error).splitlines()[:3])
            self.check(False, f"{what}: {type(error).__name__}: {text} (at {at})")

    def leave(self, what: str) -> None:
        """Note what this run does not do."""
        self.left_out.append(what)
        self._write()

    def _write(self) -> None:
        content = {name: value for name, value in asdict(self).items() if name != "path"}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(plain(content)))
        part.rename(self.path)


def plain(value: Any) -> Any:
    """The same for strict JSON, with six digits a number; nan and infinities are texts."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def seconds(self) -> float:
        """So many."""
        return time.perf_counter() - self.began
