"""The library call that a thread is in, and the user's line that made it: read from the stack when it is needed."""

import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from traceback import walk_tb
from types import FrameType
from typing import Any

from fshard.runtime.comm.stacks import CodePlace, stack_of

OURS = ("fshard.", "torch.", "optree.")
"""Modules whose frames are not the user's."""

PYTHON = f"{os.path.dirname(os.__file__)}{os.sep}"
"""Where the standard library lies. Its frames are not the user's either."""

CELL = re.compile(r"[/\\]ipykernel_\d+[/\\]\d+\.py$")
"""The files that ipykernel names for cells."""

WRAPPERS = ("fshard.played.everywhere", "fshard.runtime.comm.collective_call")
"""The modules whose frames lie between a user and the function that was called."""

WRAPPER = "untraced.<locals>.call"
"""The one function elsewhere whose frames do."""

CALLS = {
    "TrainStep.__call__": "train step",
    "EvalStep.__call__": "evaluation step",
    "ShardedLoss.__call__": "sharded loss",
    "Checkpointer.save": "Checkpointer.save",
    "Checkpointer.restore": "Checkpointer.restore",
    "Step.__call__": "step of parts",
    "ValueAndGrad.__call__": "fs.value_and_grad",
    "UpdateStep.__call__": "fs.make_update",
    "OuterStep.__call__": "train step",
    "RecheckedStep.__call__": "train step",
    "Generate.__call__": "fs.generation.make_generate",
    "Exporter.__call__": "fs.io.Exporter",
    "HessianProduct.__call__": "fs.func.hvp",
    "HessianProduct.linearize": "fs.func.hvp, linearize",
    "GaussNewtonProduct.__call__": "fs.func.gnvp",
    "GaussNewtonProduct.linearize": "fs.func.gnvp, linearize",
    "LinearMap.__call__": "product of a linearize",
    "LinearMap.pull": "pull of a linearize",
    "Linearize.__call__": "fs.func.linearize",
    "SampleGradients.__call__": "fs.func.per_sample_grad",
    "ClippedGradient.__call__": "fs.func.clipped_grad",
    "DirectionalDerivative.__call__": "fs.func.jvp",
    "TraceSamples.__call__": "fs.func.hessian_trace_samples",
    "unshard": "fs.unshard",
    "export": "fs.io.export",
    "make_mesh": "fs.make_mesh",
    "make_train_step": "fs.make_train_step",
    "make_eval_step": "fs.make_eval_step",
}
"""Names in errors by qualified name. Other functions keep their own name."""


PLACES = {"Scheduled._perform": False, "Passes.run": True}
"""Functions in whose frames a step is at an op of its schedule: whether the program runs, not communication."""

PROGRAMS = ("Passes.run", "StepRunner._run.<locals>.program")
"""Functions in whose frames a step runs the user's function."""

EXECUTOR = "_fshard_executor"
"""The attribute of a thread that refers to the executor of its schedule."""


class HelperThread(threading.Thread):
    """A daemon thread that works for a waiting thread. Its call site is that of the waiting thread."""

    def __init__(self, body: Callable[[], None], what: str) -> None:
        super().__init__(target=body, name=f"fshard: {what}", daemon=True)
        self.caller = threading.get_ident()


def call_site(thread: int | None = None) -> str:
    """The calls of the library that a thread is in, innermost first, each with the line of the user that made it.

    Args:
        thread: its identity; None for the current thread.

    Returns:
        A text such as ``"fs.psum, model.py:12, in train step, train.py:38"``.
    """
    ident = threading.get_ident() if thread is None else thread
    found = {one.ident: one for one in threading.enumerate()}.get(ident)
    if isinstance(found, HelperThread):
        return call_site(found.caller)
    calls = list(_calls(stack_of(ident)))
    return ", in ".join(calls) or f"the thread {found.name if found else ident}"


def place(thread: int | None = None) -> str:
    """The call site of a thread, and the op that its step has come to: ``train step, train.py:38, at op 30 of 45,
    'forward blocks.0'``.

    Args:
        thread: its identity; None for the current thread.
    """
    op = op_of(thread)
    return call_site(thread) + (f", at {op}" if op else "")


def op_of(thread: int | None = None) -> str:
    """The op that a thread's step has come to; empty if it makes none, or has no schedule."""
    ident = threading.get_ident() if thread is None else thread
    found = next((one for one in threading.enumerate() if one.ident == ident), None)
    if isinstance(found, HelperThread):
        return op_of(found.caller)
    for frame in stack_of(ident):
        if (computing := PLACES.get(frame.function)) is not None:
            executor: Any = getattr(found, EXECUTOR, lambda: None)()
            return str(executor.place(computing)) if hasattr(executor, "place") else ""
    return ""


def in_program(*names: str) -> bool:
    """Tell whether a step of this thread runs the user's function, in one of ``PROGRAMS`` or of those named."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_qualname in (names or PROGRAMS):
            return True
        frame = frame.f_back
    return False


def executing(executor: object) -> None:
    """Let errors of other threads say at which op this thread is."""
    setattr(threading.current_thread(), EXECUTOR, weakref.ref(executor))


def _calls(stack: Iterable[CodePlace]) -> Iterator[str]:
    """Each call from a line of the user into the library, innermost first."""
    inside: list[str] = []  # qualified names of adjacent frames of the library
    innermost = True
    for module, function, file, number in stack:
        if module in WRAPPERS or function == WRAPPER:
            continue
        if module == "fshard" or module.startswith("fshard."):
            inside.append(function)
        elif not (module.startswith(OURS) or _of_python(file)) and (inside or innermost):
            line = f"{short_name(file)}:{number}"
            yield f"{_name(inside)}, {line}" if inside else line
            inside, innermost = [], False


def line_of(error: BaseException) -> str:
    """The innermost line of the user's in the traceback of an error; empty if there is none."""
    found = ""
    for frame, number in walk_tb(error.__traceback__):
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if not ((module + ".").startswith(OURS) or _of_python(file)):
            found = f"{short_name(file)}:{number}"
    return found


def _of_python(file: str) -> bool:
    """Tell whether a file is one of the standard library. Installed packages may lie in a folder of it."""
    installed = file.removeprefix(PYTHON).startswith(("site-packages", "dist-packages"))
    return file.startswith((PYTHON, "<frozen ")) and not installed


def _name(inside: list[str]) -> str:
    """The function that the user called: the outermost frame that is in ``CALLS``, else the outermost frame."""
    outer = inside[::-1]
    known = next((CALLS[name] for name in outer if name in CALLS), "")
    return known or f"fs.{outer[0].removesuffix('.__call__')}"


def short_name(file: str) -> str:
    """A file as messages name it. A notebook's cell has a file of its own, with a name that says nothing."""
    if CELL.search(file):
        return "cell"
    try:
        return file.removeprefix(os.getcwd() + os.sep)
    except OSError:  # the working directory was removed
        return file
