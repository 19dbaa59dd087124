"""Processes of their own for functions of tests, with an environment and an output of their own.

They come from the fork server of the pools, so they start at once, where a new interpreter takes two seconds of
imports. No process group is made in them, and nothing is patched.
"""

import gc
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.shared.workers import PRELOAD


class Child:
    """A process that runs a function.

    Args:
        function: of a module that can be imported.
        *args: pickled.
        out: a file that gets all that the process writes to its standard output and standard error.
        environment: variables beside those of the fork server.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, out: Path, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.out = out
        out.write_text("")
        name = function.__module__, function.__qualname__
        self.process = context.Process(target=_run, args=(*name, args, str(out), dict(environment)))
        self.process.start()

    def printed(self, seconds: float) -> str:
        """What it wrote until it ended.

        Raises:
            TimeoutError: it has not ended.
        """
        self.process.join(seconds)
        if self.process.exitcode is None:
            raise TimeoutError(f"it runs after {seconds:g} s and has written: {self.out.read_text()}")
        return self.out.read_text()

    def kill(self) -> None:
        """End it, if it has not ended."""
        self.process.kill()
        self.process.join()
        self.process.close()


def _run(module: str, name: str, args: tuple[Any, ...], out: str, environment: dict[str, str]) -> None:
    gc.freeze()  # what the fork server imported is no garbage
    os.environ |= environment
    file = os.open(out, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    getattr(importlib.import_module(module), name)(*args)
