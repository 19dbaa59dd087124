"""The cooperative scheduler of a virtual mesh: ranks are threads of one process, and one of them runs at a time.

A rank runs until it must wait for other ranks; then the next one runs. So a run is deterministic, needs no locks, and
detects a deadlock at once. Each rank has its own random generators and its own choice of attention kernels, as a
process has.
"""

import contextvars
import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.backends import cuda

from fshard.errors import CommError, PeerError, lines
from fshard.played.lives import Lives
from fshard.runtime.comm.call_site import call_site
from fshard.runtime.comm.devices import carried
from fshard.schedule.transfers import COLLECTIVES
from fshard.sharding.mesh import Mesh

Ready = Callable[[], bool]


class Interrupted(KeyboardInterrupt):
    """An interrupt of a run whose ranks have all returned nevertheless: ``results``."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__()
        self.results = results


class Gate:
    """A gate at which threads wait, until another opens it for good.

    Unlike ``threading.Event``, which an interrupt can break in the middle of a wait, it is one lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Open it."""
        self._lock.release()

    def is_set(self) -> bool:
        """Tell whether it is open."""
        return not self._lock.locked()

    def wait(self, seconds: float) -> bool:
        """Wait for so long at most; whether it is open."""
        found = self._lock.acquire(timeout=seconds)
        if found:
            self._lock.release()
        return found


class RankThread(threading.Thread):
    """The thread of one rank."""

    def __init__(self, scheduler: "Scheduler", rank: int, body: Callable[[], Any]) -> None:
        super().__init__(name=f"rank {rank} of {scheduler.size}", daemon=True)
        self.scheduler, self.rank, self.body = scheduler, rank, carried(body)
        self.turn = threading.Semaphore(0)
        self.waits: tuple[Ready, str] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self.over = Gate()  # to wait for: an interrupted join takes a thread for one that has ended
        self.randomness: Any = None
        self.interrupted = False
        self.shields = 0

    def let_go(self) -> None:
        """Hold nothing of the run any more: the thread may outlive it by a moment, and states must have one holder."""
        self.result = self.error = None
        self.body = _nothing

    def check_interrupt(self) -> None:
        """Raise ``KeyboardInterrupt`` if the run was interrupted, unless a step of this rank holds that back."""
        if self.interrupted and not self.shields:
            raise KeyboardInterrupt

    def run(self) -> None:
        """Run the rank, then the next one."""
        with suppress(KeyboardInterrupt):  # one that comes at the very end: the run sees that the thread is gone
            self._run()

    def _run(self) -> None:
        self.turn.acquire()
        try:
            restore_randomness(self.randomness)
            self.check_interrupt()
            self.result = self.body()
        except BaseException as error:  # the caller of the run gets it
            self.error = error
        self.ended = True
        try:
            self.scheduler.switch(self)
        finally:
            self.over.set()

    def runnable(self) -> bool:
        """Tell whether the rank can continue."""
        return not self.ended and (self.waits is None or self.waits[0]())

    def __str__(self) -> str:
        if self.waits is not None and not self.ended:
            return f"rank {self.rank} waits for {self.waits[1]}, at {call_site(self.ident)}"
        what = "returned" if self.error is None else f"raised {type(self.error).__name__}: {_first_line(self.error)}"
        return f"rank {self.rank} {what}"


def _nothing() -> None:
    """The function of a rank whose run is over."""


class Scheduler:
    """The ranks of one run of a virtual mesh, and the logs of their communicators."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.size = mesh, mesh.size
        self.logs: dict[Any, Any] = {}
        self.lives = Lives()
        self.threads: list[RankThread] = []
        self.current: RankThread  # the one that runs
        self.failure: str | None = None

    def run(
        self,
        bodies: list[Callable[[], Any]],
        again: "Randomness | None" = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[Any]:
        """Run all ranks to their end.

        Args:
            bodies: the function of each rank.
            again: the state of random generators at the start of every rank; the caller's own then stay unchanged.
            waiting: the context in which this thread waits for the ranks.

        Returns:
            The result of each rank, in rank order.

        Raises:
            BaseException: the exception of the first rank that failed by itself, with a note that names the rank.
        """
        before = randomness()
        self.threads = [RankThread(self, rank, body) for rank, body in enumerate(bodies)]
        for thread in self.threads:
            thread.randomness = again or before
            thread.start()
        self.current = self.threads[0]
        try:
            self._wait_for_all(waiting)
            restore_randomness(before if again else self.threads[0].randomness)
            self._raise()
        except BaseException:
            for thread in self.threads:
                thread.let_go()  # a traceback that is kept must not hold states that nobody else has
            raise
        results = [thread.result for thread in self.threads]
        for thread in self.threads:
            thread.let_go()
        self.threads = []  # what the ranks were given goes when the caller lets go of it, and not with a cycle
        del self.current
        return results

    def _wait_for_all(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        try:
            self.current.turn.release()
            with waiting():  # raises an interrupt that came before
                for thread in self.threads:
                    # A signal that another thread received does not wake this one.
                    while not thread.over.wait(GRACE) and thread.is_alive():
                        continue
        except BaseException:
            self._interrupt(waiting)
            if not any(thread.error for thread in self.threads):
                raise Interrupted([thread.result for thread in self.threads]) from None
            raise

    def _interrupt(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """End all ranks. A step ends where its loss function runs, on all of them, and leaves its state as it was."""
        for thread in self.threads:
            thread.interrupted = True
        try:
            with waiting():
                while alive := [thread for thread in self.threads if thread.is_alive()]:
                    alive[0].over.wait(GRACE)
                    thread = self.current
                    if not thread.is_alive():  # the interrupt came when it was about to wake the next one
                        if not thread.ended:
                            thread.ended, thread.error = True, thread.error or KeyboardInterrupt()
                        self.switch(thread)
                    elif not thread.ended and not thread.shields and thread.waits is None:
                        _raise_in(thread)  # it computes for long, or waits outside of any collective
        except BaseException:  # a second interrupt: somebody wants out, wherever the ranks are
            self.failure = "the run was interrupted"
            raise

    def wait(self, thread: RankThread, ready: Ready, what: str) -> None:
        """Let the other ranks run until this one can continue.

        Raises:
            CommError: it never can.
        """
        thread.waits = (ready, what)
        while self.failure is None and not ready():
            self.switch(thread)
            thread.turn.acquire()
            restore_randomness(thread.randomness)
            thread.check_interrupt()
        if self.failure is not None:
            raise CommError(self.failure)
        thread.waits = None

    def switch(self, last: RankThread) -> None:
        """Wake the next rank that can run. In a deadlock, wake each waiting rank, which fails."""
        last.randomness = randomness()
        order = [self.threads[(last.rank + 1 + i) % self.size] for i in range(self.size)]
        following = next((thread for thread in order if thread.runnable()), None)
        if following is None:
            if self.idle():
                return
            following = self._parted(order)
        if following is not None:
            self.current = following
            following.turn.release()

    def _parted(self, order: list[RankThread]) -> RankThread | None:
        """The rank to wake in a deadlock, with an error: one whose program waits for a rank elsewhere, or any."""
        waiting = [thread for thread in order if not thread.ended]
        if self.failure is None:
            self.lives.part(COLLECTIVES, {thread.rank: thread.waits[1] for thread in waiting if thread.waits})
            if (thread := next((each for each in waiting if each.runnable()), None)) is not None:
                return thread
            if waiting:
                self.fail("no rank can go on:")
        return waiting[0] if waiting else None

    def idle(self) -> bool:
        """Called when no rank can go on: whether it is to stay so, until somebody else wakes one."""
        return False

    def fail(self, head: str) -> None:
        """Make every later collective of this run raise, with the position of each rank."""
        rows = [str(thread) for thread in self.threads]
        self.failure = lines(head, rows, "All ranks along an axis must make the same collective calls in one order.")

    def _raise(self) -> None:
        failed = [thread for thread in self.threads if thread.error is not None]
        if not failed:
            return
        own = [thread for thread in failed if not isinstance(thread.error, CommError | PeerError)]
        first = (own or failed)[0]
        assert first.error is not None
        first.error.add_note(f"on rank {first.rank} of a virtual mesh of {self.size}")
        raise first.error


GRACE = 0.3
"""Seconds that an interrupted rank has to reach a collective, or the loss function of a step."""


def _raise_in(thread: RankThread) -> None:
    """Raise ``KeyboardInterrupt`` at the next instruction of a thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt))


def playing() -> RankThread | None:
    """The rank of the current thread, if it has one."""
    thread = threading.current_thread()
    return thread if isinstance(thread, RankThread) else None


ATTENTION: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)
"""The switches of attention kernels, on any device: their getters and setters."""


@dataclass(frozen=True)
class Randomness:
    """The state of random generators, and of the switches of attention kernels, of which a process has one set.

    ``torch.nn.attention.sdpa_kernel`` restores the switches that it found: ranks that interleave inside of it would
    overwrite each other's.
    """

    torch: Any
    device: Any
    python: Any
    numpy: Any
    attention: tuple[bool, ...]


def randomness() -> Randomness:
    """The current state; that of numpy only if it is imported."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    kernels = tuple([enabled() for enabled, _ in ATTENTION])
    device = generator.get_state() if (generator := _device_generator()) is not None else None
    return Randomness(torch.get_rng_state(), device, random.getstate(), state, kernels)


def restore_randomness(state: Randomness) -> None:
    """Set the random generators and the switches of attention kernels."""
    for (enabled, enable), wanted in zip(ATTENTION, state.attention, strict=True):
        if enabled() != wanted:
            enable(wanted)
    torch.set_rng_state(state.torch)
    if state.device is not None and (generator := _device_generator()) is not None:
        generator.set_state(state.device)
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)


def _device_generator() -> torch.Generator | None:
    """The generator of the current CUDA device, if CUDA is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()]


def inherited() -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """A wrapper that runs a function in the current thread's context: context variables and PyTorch's modes."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}

    @contextmanager
    def modes() -> Iterator[None]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), ExitStack() as stack:
            for kind, dtype in casts.items():
                stack.enter_context(torch.autocast(kind, dtype))
            # A rank is its thread, so its backwards run there. (Leaving inference mode turns autograd's threads on.)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    def wrap(body: Callable[[], Any]) -> Callable[[], Any]:
        context = contextvars.copy_context()

        def play() -> Any:
            with modes():
                return body()

        return lambda: context.run(play)

    return wrap


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
