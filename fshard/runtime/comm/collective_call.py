"""Collective calls of the library: what a rank raises before the ranks have met in a call is raised on all of them."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from fshard.errors import CommError, PeerError, ScheduleError
from fshard.runtime.comm.all_ranks import mesh_communicator
from fshard.runtime.comm.call_site import in_program
from fshard.runtime.comm.calls import MEETING, refuse
from fshard.schedule.transfers import COLLECTIVES
from fshard.sharding.mesh import Mesh
from fshard.threads import Turn
from fshard.torch_internals import DispatchModeKey, dispatch_mode
from fshard.tracebacks import shorten

P = ParamSpec("P")
R = TypeVar("R")

KNOWN = CommError | PeerError | ScheduleError
"""What all ranks raise, or what leaves none to tell."""


@dataclass
class CallMeeting:
    """A collective call of this thread.

    Attributes:
        met: whether this rank has sent the others anything in it.
        told: the exception that the others know, or raise themselves.
    """

    met: bool = False
    told: BaseException | None = None


def collective_call(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorates a collective call. Its mesh is that of the first argument that has one.

    If it raises before this rank has sent anything, the other ranks, which wait for that, raise a PeerError with the
    exception's text. Collectives that were under way are ended on all ranks.

    A mesh is in one call at a time: ranks match calls by their order, and calls use the same memory. So a thread that
    makes one beside that of another thread raises a ScheduleError, also on a mesh of one rank.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        if torch.compiler.is_dynamo_compiling():
            return fn(*args, **kwargs)
        mesh = mesh_of([*args, *kwargs.values()])
        with _alone(mesh), telling(mesh, always=False):
            return fn(*args, **kwargs)

    return call


@contextmanager
def _alone(mesh: Mesh | None) -> Iterator[None]:
    """While a thread is in its call. The other ranks are told of calls that were refused meanwhile when it is over."""
    turn: Turn | None = getattr(None if mesh is None else mesh.transport, "turn", None)
    if mesh is None or turn is None:
        yield
        return
    if not turn.take():
        error = ScheduleError(
            f"thread {threading.current_thread().name!r} made a call of the library while one of thread "
            f"{turn.holder!r} was under way on the same mesh: make all of them in one thread, one after the other. "
            f"Nothing was sent or changed: states can be used."
        )
        turn.refused.append(error)
        raise error
    try:
        yield
    finally:
        for refused in turn.leave():
            if mesh.size > 1:
                _tell(mesh, refused)
                mesh.transport.abort(COLLECTIVES, str(refused))  # as ranks do to which the call was refused


@contextmanager
def telling(mesh: Mesh | None, always: bool = True) -> Iterator[None]:
    """Tell the other ranks, which wait in the next collective call, what leaves the block on this rank.

    Args:
        mesh: joins the ranks; None for a block that belongs to none.
        always: whether the others wait in another call even if ranks have met inside of the block, as in a loop of
            collective calls. What such a call raises is known to them.
    """
    if mesh is None or mesh.size == 1 or mesh.transport is None or _nested():
        yield
        return
    thread: Any = threading.current_thread()
    around: CallMeeting | None = getattr(thread, MEETING, None)
    here = CallMeeting()
    setattr(thread, MEETING, here)
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        if error is not here.told and (always or not here.met) and not isinstance(error, KNOWN):
            _tell(mesh, error)
        mesh.transport.abort(COLLECTIVES, f"{type(error).__name__}: {error}")
        here.told = error
        if isinstance(error, CommError | PeerError):  # of another rank: nothing in this one is its cause
            shorten(error)
        raise
    finally:
        setattr(thread, MEETING, around)
        if around is not None:
            around.met, around.told = around.met or here.met, here.told or around.told


def told(error: BaseException) -> bool:
    """Tell whether a call that this thread made inside of its collective call has told the others of an exception."""
    around: CallMeeting | None = getattr(threading.current_thread(), MEETING, None)
    return around is not None and around.told is error


def mesh_of(values: Iterable[Any]) -> Mesh | None:
    """The mesh of the first of some values that has one: a mesh, or what has a plan, or a dict of these."""
    for value in values:
        if isinstance(value, dict):
            value = next(iter(value.values()), None)
        found = value if isinstance(value, Mesh) else getattr(value, "mesh", None)
        if not isinstance(found, Mesh):
            found = getattr(getattr(value, "plan", None), "mesh", None)
        if isinstance(found, Mesh):
            return found.here
    return None


def _nested() -> bool:
    """Tell whether a step runs the function that makes the call: the step tells what the function raises."""
    return dispatch_mode(DispatchModeKey.FAKE) is not None or in_program()


def _tell(mesh: Mesh, error: BaseException) -> None:
    """Tell the other ranks of an exception. Collective; where they cannot be reached it does nothing."""
    try:
        refuse(mesh_communicator(mesh), error)
    except CommError as lost:
        error.add_note(f"the other ranks could not be told: {lost}")
