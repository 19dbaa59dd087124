"""Turns between runtimes that cannot share a process: one family of processes works, the others sleep.

A *family* is a few processes, one a rank, that read lines from their standard input and answer each with one line of
JSON. A line is ``step NAME NUMBER``: let the peer NAME make a step on batch NUMBER. They block in between: no family
takes time from the one whose turn it is.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO


class Family:
    """Processes that take turns with those of other families.

    Args:
        name: for messages.
        commands: one for each rank.
        environment: what all of them get besides torchrun's variables.
        timeout: seconds for one answer.
    """

    def __init__(
        self, name: str, commands: Sequence[Sequence[str]], environment: Mapping[str, str], timeout: float = 300
    ) -> None:
        self.name, self.timeout = name, timeout
        self.commands, self.around = commands, {**os.environ, "WORLD_SIZE": str(len(commands)), **environment}
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Family":
        try:
            for rank, command in enumerate(self.commands):
                own = {**self.around, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                pipe = subprocess.PIPE
                self.processes.append(
                    subprocess.Popen(command, env=own, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
                )
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            for process in self.processes:
                self._tell(process, "stop")
        for process in self.processes:
            try:
                process.wait(10 if kind is None else 0)
            except subprocess.TimeoutExpired:
                pass
        self._kill()
        self._close()

    def ask(self, line: str) -> list[dict[str, Any]]:
        """Say a line to all, and return what each answers.

        Raises:
            SystemExit: one of them has died, or is silent for too long.
        """
        late = threading.Timer(self.timeout, self._kill)
        late.start()
        try:
            for process in self.processes:
                self._tell(process, line)
            answers = [process.stdout.readline() for process in self.processes if process.stdout]
        finally:
            late.cancel()
        if not all(answers):
            codes = [process.poll() for process in self.processes]
            raise SystemExit(f"{self.name}: no answer to {line!r} (exit status by rank: {codes})")
        return [json.loads(answer) for answer in answers]

    def step(self, name: str, number: int) -> dict[str, float]:
        """One step of a peer: the slowest rank's time, the CPU time of all, and the mean loss."""
        parts = self.ask(f"step {name} {number}")
        return {
            "wall": max(part["wall"] for part in parts),
            "cpu": sum(part["cpu"] for part in parts),
            "loss": sum(part["loss"] for part in parts) / len(parts),
        }

    def _tell(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died: no answer will come, and ``ask`` says so

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):  # its group may be gone a moment before it can be waited for
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _close(self) -> None:
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):  # a line that a dead process never read
                    if pipe is not None:
                        pipe.close()


def answering() -> TextIO:
    """Where a process of a family writes its answers: its standard output.

    What others print there from now on goes to standard error; gloo's C++ side does.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(step: Callable[[str, int], Mapping[str, float]], answers: TextIO) -> None:
    """Obey the lines on standard input until one says ``stop``."""
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "stop":
            return
        name, _, number = rest.rpartition(" ")
        print(json.dumps(step(name, int(number))), file=answers, flush=True)
