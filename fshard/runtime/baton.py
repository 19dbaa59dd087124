"""Ranks as threads of one process, of which one runs at a time.

The thread that holds the *baton* runs until it must wait for other ranks; then it hands the baton on. So a run is
deterministic, needs no locks, and knows at once when nobody can go on. Each rank has random generators of its own, and
its own choice of attention kernels, as a process would.
"""

import contextvars
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.backends import cuda

from fshard.errors import CommError, PeerError, lines
from fshard.runtime.whereabouts import whereabouts
from fshard.sharding.mesh import Mesh

Ready = Callable[[], bool]


class RankThread(threading.Thread):
    """The thread that plays one rank."""

    def __init__(self, baton: "Baton", rank: int, body: Callable[[], Any]) -> None:
        super().__init__(name=f"rank {rank} of {baton.size}", daemon=True)
        self.baton, self.rank, self.body = baton, rank, body
        self.turn = threading.Semaphore(0)
        self.waits: tuple[Ready, str] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self.randomness: Any = None

    def run(self) -> None:
        """Play the rank, and hand the baton on."""
        self.turn.acquire()
        try:
            draw_from(self.randomness)
            self.result = self.body()
        except BaseException as error:  # whatever it is, the caller of the run gets it
            self.error = error
        self.ended = True
        self.baton.hand_on(self)

    def runnable(self) -> bool:
        """Whether it can go on."""
        return not self.ended and (self.waits is None or self.waits[0]())

    def __str__(self) -> str:
        if self.waits is not None and not self.ended:
            return f"rank {self.rank} waits for {self.waits[1]}, at {whereabouts(self.ident)}"
        what = "returned" if self.error is None else f"raised {type(self.error).__name__}: {_first_line(self.error)}"
        return f"rank {self.rank} {what}"


class Baton:
    """The ranks of one run of a virtual mesh, and what they share: the boards that their communicators are."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.size = mesh, mesh.size
        self.boards: dict[Any, Any] = {}
        self.threads: list[RankThread] = []
        self.failure: str | None = None

    def run(self, bodies: list[Callable[[], Any]], again: "Randomness | None" = None) -> list[Any]:
        """Play all ranks to their end.

        Args:
            bodies: what each rank does.
            again: the random generators that every rank starts from; the caller's are then left as they were.

        Returns:
            What each returned, in rank order.

        Raises:
            BaseException: what the first rank that failed of itself raised, with a note that names the rank.
        """
        before = randomness()
        self.threads = [RankThread(self, rank, body) for rank, body in enumerate(bodies)]
        for thread in self.threads:
            thread.randomness = again or before
            thread.start()
        self.threads[0].turn.release()
        try:
            for thread in self.threads:
                thread.join()
        except BaseException:  # an interrupt: let every rank end at its next collective
            self.failure = "the run was interrupted"
            raise
        draw_from(before if again else self.threads[0].randomness)
        self._raise()
        return [thread.result for thread in self.threads]

    def wait(self, thread: RankThread, ready: Ready, what: str) -> None:
        """Let the other ranks run until this one can go on.

        Raises:
            CommError: it never can.
        """
        thread.waits = (ready, what)
        while self.failure is None and not ready():
            self.hand_on(thread)
            thread.turn.acquire()
            draw_from(thread.randomness)
        if self.failure is not None:
            raise CommError(self.failure)
        thread.waits = None

    def hand_on(self, last: RankThread) -> None:
        """Wake the next rank that can run. If there is none, all that wait are woken one by one, and fail."""
        last.randomness = randomness()
        order = [self.threads[(last.rank + 1 + i) % self.size] for i in range(self.size)]
        following = next((thread for thread in order if thread.runnable()), None)
        if following is None:
            following = next((thread for thread in order if not thread.ended), None)
            if following is not None and self.failure is None:
                self.fail("no rank can go on:")
        if following is not None:
            following.turn.release()

    def fail(self, head: str) -> None:
        """Make every collective of this run raise from now on, saying what each rank is doing."""
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


def playing() -> RankThread | None:
    """The rank that the current thread plays, if it plays one."""
    thread = threading.current_thread()
    return thread if isinstance(thread, RankThread) else None


ATTENTION: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)
"""Which kernels attention may use, on any device: whether each is, and what says so."""


@dataclass(frozen=True)
class Randomness:
    """The state of random generators, and of the other switches that a process has once: those of attention kernels.

    ``torch.nn.attention.sdpa_kernel`` puts back what it found. Ranks that enter and leave it in turns would leave the
    switches of one rank to all others.
    """

    torch: Any
    python: Any
    numpy: Any
    attention: tuple[bool, ...]


def randomness() -> Randomness:
    """The state of the random generators: PyTorch's, Python's, and numpy's if it is there; and of attention kernels."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    kernels = tuple([enabled() for enabled, _ in ATTENTION])
    return Randomness(torch.get_rng_state(), random.getstate(), state, kernels)


def draw_from(state: Randomness) -> None:
    """Set the random generators and the switches of attention kernels."""
    for (enabled, enable), wanted in zip(ATTENTION, state.attention, strict=True):
        if enabled() != wanted:
            enable(wanted)
    torch.set_rng_state(state.torch)
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)


def inherited() -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """What gives a function the context of the current thread: context variables and PyTorch's modes."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    @contextmanager
    def modes() -> Iterator[None]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.autocast("cpu", dtype, cast):
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
