"""Runs that outlive their processes: a train loop that resumes, saves when it is due, and saves before it is ended.

torchrun restarts all ranks when one has failed (``--max-restarts``), with as many nodes as there are
(``--nnodes MIN:MAX``). The program must resume from the last checkpoint, and save one before the cluster takes its
machines back (Orbax' preemption checkpointing, ``reached_preemption`` in ``CheckpointManager``).
"""

import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Self

from fshard.arguments import expect, kind
from fshard.checkpoint.checkpointer import Checkpointer
from fshard.data.loader import without_position
from fshard.errors import PlanError
from fshard.hints import teaching
from fshard.runtime.comm import all_ranks_or_raise, enter, first_rank_or_raise, mesh_communicator, telling
from fshard.state.train_state import TrainState
from fshard.tracking.track import Track
from fshard.tracking.tracker import Tracker
from fshard.training.beside import Extra, Recorder
from fshard.training.metrics import Metrics
from fshard.training.train_step import TrainStep


class Preempted(SystemExit):
    """A signal asked the process to end, and the train loop has saved and stopped at the same step on all ranks.

    If it is not caught, the process ends with the exit code of the signal, such as 143 for SIGTERM, so that torchrun
    and schedulers know that the run is incomplete.

    Example::

        try:
            for state, metrics in fs.train_loop(step, start, batches, steps=1000, checkpoints=checkpoints):
                ...
        except fs.Preempted as stopped:
            print(stopped)  # SIGTERM: stopped after step 417
            raise  # with the exit code 143
    """

    def __init__(self, number: int, step: int) -> None:
        super().__init__(128 + number)
        self.signal, self.step = number, step

    def __str__(self) -> str:
        return f"{signal.Signals(self.signal).name}: stopped after step {self.step}"


class Preemption:
    """Records signals that ask a process to end, instead of ending it.

    Inside of the context ``asked`` is the last signal; leaving it restores the previous handlers. Only the main thread
    can have handlers: in any other thread this does nothing.

    Args:
        signals: the signals. Slurm sends the one in ``--signal``; torchrun and most others send SIGTERM.

    >>> import os, signal
    >>> with fs.Preemption() as preemption:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     preemption.asked == signal.SIGTERM
    True
    """

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM,)) -> None:
        self.signals = tuple(signals)
        self.asked: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.signals}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # None: a handler that was not installed by Python, which cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = number


@teaching
def train_loop(
    step: TrainStep,
    start: Callable[[], TrainState],
    batches: Callable[[int], Any] | Iterable[Any],
    *,
    steps: int,
    checkpoints: Checkpointer | None = None,
    signals: Sequence[int] = (signal.SIGTERM,),
    fallback: bool = True,
    track: Track | Sequence[Tracker] | None = None,
    extra: Any = None,
    evaluate: Callable[[TrainState], Any] | None = None,
    evaluate_every: int | None = None,
) -> Iterator[tuple[TrainState, Metrics]]:
    """Train until a step, from the last checkpoint if there is one: ``for state, metrics in fs.train_loop(...)``.

    The loop restores the newest checkpoint onto the current mesh, which may differ from the mesh that saved it. It
    saves when ``checkpoints.due``, after the last step, and when any rank gets one of ``signals``: then all ranks
    finish the current step, save, yield once more and raise ``Preempted``. So a script with this loop resumes by itself
    under torchrun. The loop restores the previous signal handlers when it ends.

    Args:
        step: the result of ``fs.make_train_step``.
        start: a function that makes the state of a run without a checkpoint.
        batches: this rank's batch as a function of the number of steps made, so that a resumed run sees the same
            batches; or any iterable. The position of an ``fs.data.Loader`` is saved and restored with the state, on any
            number of ranks; that of another iterable with ``state_dict`` and ``load_state_dict`` (JSON; such as
            torchdata's ``StatefulDataLoader``) on as many ranks as before. A PyTorch ``DataLoader`` has none, and is
            refused where checkpoints are saved; of any other iterable the batches that were taken are skipped. The
            loop ends when the iterable ends, which it must on all ranks.
        steps: the step at which to end.
        checkpoints: where to save and restore; None for neither.
        signals: the signals that ask the run to save and stop.
        fallback: if the newest checkpoint is damaged, warn and restore the newest good one.
        track: trackers of ``fs.trackers``, which get the metrics of each step, and are closed when the loop ends; or
            what ``fs.track`` made, which takes further options, and other metrics in the body of the loop.
        extra: state of your own in the checkpoints, equal on all ranks, such as ``{"tokens": 0}``: a dict of JSON
            values, or an object with ``state_dict`` and ``load_state_dict``. A resumed run gets it back in place. With
            it, the checkpoint of a step is saved after the body of the loop, which may have changed it.
        evaluate: a function of the state that returns a tree of scalars, such as ``{"val": {"loss": loss}}``. It is
            called on all ranks every ``evaluate_every`` steps and after the last one, before the save, and trackers get
            its numbers in the row of the step.
        evaluate_every: the number of steps between two evaluations; None for one after the last step alone.

    Yields:
        The state after each step, and its metrics. The state is donated to the next step: do not keep it.

    Raises:
        Preempted: after a signal; a ``SystemExit``.
        PlanError: arguments out of range; a data loader that was saved by another number of ranks.
        CheckpointError: a checkpoint cannot be read or written.
        Exception: the errors of the step. Nothing is saved then: the last checkpoint is good.

    >>> import tempfile
    >>> plan = fs.make_plan({"w": torch.ones(3)}, fs.make_mesh((-1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.1)
    >>> step = fs.make_train_step(lambda params, batch: (params["w"] * batch).sum(), opt, plan)
    >>> start = lambda: fs.init_state(plan, opt, params={"w": torch.ones(3)})
    >>> with tempfile.TemporaryDirectory() as folder, fs.Checkpointer(folder, every=2) as ckpt:
    ...     for end in (3, 5):
    ...         loop = fs.train_loop(step, start, lambda n: n * torch.ones(3), steps=end, checkpoints=ckpt)
    ...         print([state.step for state, metrics in loop], ckpt.steps())
    [1, 2, 3] [2, 3]
    [4, 5] [3, 4, 5]
    """
    if (
        not isinstance(step, TrainStep)
        or not callable(start)
        or not (callable(batches) or hasattr(batches, "__iter__"))
    ):
        raise PlanError(
            f"train_loop(step, start, batches) takes a train step, a function that makes a state, and batches as a "
            f"function of the step or an iterable; it was given {kind(step)}, {kind(start)} and "
            f"{kind(batches)}"
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise PlanError(f"train_loop(steps={steps!r}): give the step at which to end, an int >= 0")
    if checkpoints is not None and (problem := without_position(batches)):
        raise PlanError(f"train_loop(batches=): {problem}")
    expect("train_loop", [("checkpoints", checkpoints, (Checkpointer, type(None)), "an fs.Checkpointer, or None")])
    kinds, remedy = (list, tuple, Track, type(None)), "a list of fs.trackers, or what fs.track made"
    expect("train_loop", [("track", track, kinds, remedy)])
    source = Batches(batches, step, Extra(extra))
    recorder = Recorder(track, step, steps, evaluate, evaluate_every)
    return _loop(step, start, source, steps, checkpoints, Preemption(signals), fallback, recorder)


def _loop(
    step: TrainStep,
    start: Callable[[], TrainState],
    source: "Batches",
    steps: int,
    checkpoints: Checkpointer | None,
    preemption: Preemption,
    fallback: bool,
    recorder: Recorder,
) -> Generator[tuple[TrainState, Metrics]]:
    with preemption, recorder:
        restored = _restored(step, source, checkpoints, fallback)
        with telling(step.plan.mesh):
            state = start() if restored is None else restored
            expect("train_loop", [("what start() returned", state, TrainState, "a state, of fs.init_state(plan, opt)")])
        while state.step < steps:
            with telling(step.plan.mesh):  # the others come to the step
                batch = source.take(state.step)
            if batch is source:
                return
            state, metrics = step(state, batch, stop=preemption.asked is not None)
            recorder.record(state, metrics)
            if source.extra.given is None:
                _save(step, state, source, checkpoints, metrics.stop or state.step == steps)
            yield state, metrics
            if source.extra.given is not None:  # with what the body of the loop has made of it
                _save(step, state, source, checkpoints, metrics.stop or state.step == steps)
            if metrics.stop and state.step < steps:
                if checkpoints is not None:
                    checkpoints.wait()
                raise Preempted(preemption.asked or preemption.signals[0], state.step)
        if checkpoints is not None:
            checkpoints.wait()


def _save(step: TrainStep, state: TrainState, source: "Batches", checkpoints: Checkpointer | None, last: bool) -> None:
    """Save a checkpoint if one is due, or the loop ends."""
    if checkpoints is not None and (last or checkpoints.due(state)):
        again = checkpoints.latest() == state.step  # a skipped step leaves the step's number as it is
        checkpoints.save(state, data=source.position(), schedule=step.schedule, overwrite=again)


def _restored(
    step: TrainStep, source: "Batches", checkpoints: Checkpointer | None, fallback: bool
) -> TrainState | None:
    """The state of the newest checkpoint, with the batches where it was saved; None if there is none."""
    if checkpoints is None:
        return None
    mesh = step.plan.mesh.whole
    enter(mesh, "train_loop")
    if first_rank_or_raise(mesh_communicator(mesh), mesh.rank, checkpoints.latest) is None:
        return None
    state = checkpoints.restore(step.plan, step.opt, fallback=fallback)
    source.restore(checkpoints.restored.data if checkpoints.restored else None)
    return state


class Batches:
    """The batches of a loop, from a function of the step or an iterable, and the number of those taken.

    Args:
        step: the step that takes them.
        extra: the user's state, which is saved with their position.
    """

    def __init__(self, batches: Any, step: TrainStep, extra: Extra) -> None:
        self.batches, self.mesh, self.extra = batches, step.plan.mesh.whole, extra
        self.by_step = callable(batches)
        self.kept = not self.by_step and hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
        self.shared = self.kept and getattr(batches, "global_position", False)
        self.taken = 0
        self.under_way: Iterator[Any] | None = None

    def take(self, number: int) -> Any:
        """The next batch, or this object at the end."""
        self.taken += 1
        if self.by_step:
            return self.batches(number)
        if self.under_way is None:
            self.under_way = iter(self.batches)
        return next(self.under_way, self)

    def position(self) -> Any:
        """The position that a checkpoint holds: JSON, equal on all ranks. Collective."""
        if self.shared:
            return {"batches": self.taken, "loader": self.batches.state_dict(), **self.extra.saved()}
        loaders = all_ranks_or_raise(mesh_communicator(self.mesh), self.batches.state_dict) if self.kept else None
        return {"batches": self.taken, "loaders": loaders, **self.extra.saved()}

    def restore(self, data: Any) -> None:
        """Continue at the position of a checkpoint."""
        self.extra.restore(data)
        if not isinstance(data, dict) or "batches" not in data:
            return
        self.taken, loaders = int(data["batches"]), data.get("loaders")
        if self.shared and "loader" in data:
            self.batches.load_state_dict(data["loader"])
        elif self.kept and loaders is not None:
            if len(loaders) != self.mesh.size:
                raise PlanError(
                    f"the checkpoint holds the positions of data loaders of {len(loaders)} ranks, and there are "
                    f"{self.mesh.size} now: give an fs.data.Loader, or batches as a function of the step, which work "
                    f"on any number of ranks, or start as many ranks"
                )
            self.batches.load_state_dict(loaders[self.mesh.rank])
        elif not self.by_step:
            self.under_way = iter(self.batches)
            for _ in range(self.taken):
                next(self.under_way, None)
