"""``fs.Checkpointer``: saves and restores train states, in Orbax's manner."""

import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, overload

from fshard.arguments import expect
from fshard.checkpoint.folder import CheckpointFolder, choose_steps, list_steps, step_folder
from fshard.checkpoint.manifest import other_folder
from fshard.checkpoint.restore import TakeRules, requests_of, restore_step
from fshard.checkpoint.save import Save, Snapshot, check_json, head_of, remove_failed, save_facts, write_and_commit
from fshard.checkpoint.states import States, all_entries, by_name, one_mesh, seen_here, step_of
from fshard.checkpoint.when import Interval, Retention, check_steps
from fshard.checkpoint.write import owned
from fshard.errors import CheckpointError, CheckpointWarning, DamagedError, PlanError
from fshard.optim.base import Optimizer
from fshard.played.everywhere import called_on_each_rank
from fshard.played.transport import VirtualTransport
from fshard.runtime.comm import (
    Communicator,
    collective_call,
    each_rank_or_raise,
    enter,
    first_rank_or_raise,
    mesh_communicator,
    telling,
)
from fshard.runtime.comm.devices import carried
from fshard.runtime.comm.facts import compare
from fshard.schedule.schedule import Schedule
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.provenance import RunIdentity
from fshard.state.settle import settle
from fshard.state.train_state import TrainState
from fshard.threads import say, started


@dataclass(frozen=True)
class Restored:
    """The checkpoint that a state was restored from.

    Attributes:
        step: its step.
        folder: its folder.
        data: the value that was saved as ``data=``.
        metadata: the value that was saved as ``metadata=``.
        skipped: the errors of newer, damaged checkpoints that ``fallback=True`` skipped.

    >>> import tempfile
    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> with tempfile.TemporaryDirectory() as folder, fs.Checkpointer(folder) as checkpoints:
    ...     checkpoints.save(fs.init_state(plan, params={"w": torch.ones(2)}), data={"epoch": 3})
    ...     state = checkpoints.restore(plan)
    ...     checkpoints.restored.step, checkpoints.restored.data
    (0, {'epoch': 3})
    """

    step: int
    folder: str
    data: Any
    metadata: Any
    skipped: tuple[str, ...] = ()


class Checkpointer:
    """Saves and restores train states in a folder, one folder a step (``orbax.checkpoint.CheckpointManager``).

    Files are safetensors and JSON; every byte is hashed, and loading a checkpoint runs no code from it. A checkpoint
    exists completely or not at all. A failure on one rank raises the same error on all ranks and leaves the files on
    disk as they were. See docs/checkpoints.md.

    Args:
        directory: a folder that all ranks see; the first save makes it. One Checkpointer at a time writes to it, for
            one run: a new run that has restored nothing from the folder cannot save beside existing checkpoints.
        keep: the number of steps to keep, those with the largest numbers; None keeps all.
        every: for ``due``: the number of steps between two checkpoints, or the time, such as ``"30s"``, ``"10min"`` or
            ``"1.5h"``, by the clock of rank 0.
        async_: copy the state in ``save`` and write it while the next steps run. The copy takes host memory of the size
            of what this rank writes. (On a virtual mesh, whose ranks are threads that take turns, ``save`` writes.)
        keep_every: checkpoints of steps that are multiples of this are kept for good.

    Raises:
        PlanError: arguments of the wrong type, or out of range.

    >>> import tempfile
    >>> plan = fs.make_plan({"w": torch.ones(3, 2)}, fs.make_mesh((-1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.adamw(3e-4)
    >>> with tempfile.TemporaryDirectory() as folder, fs.Checkpointer(folder, keep=3) as ckpt:
    ...     ckpt.save(fs.init_state(plan, opt, params={"w": torch.ones(3, 2)}), data={"epoch": 0})
    ...     state = ckpt.restore(plan, opt)
    ...     print(ckpt.steps(), state.step, ckpt.restored.data)
    [0] 0 {'epoch': 0}
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        every: int | str | None = None,
        async_: bool = False,
        *,
        keep_every: int | None = None,
    ) -> None:
        expect("Checkpointer(directory)", [("directory", directory, (str, os.PathLike), "the path of a folder")])
        if not os.fspath(directory):
            raise PlanError("Checkpointer(directory=''): give the path of a folder; '.' is the one that you are in")
        check_steps("keep", keep)
        check_steps("keep_every", keep_every)
        self._interval, self._retention = Interval(every), Retention(keep, keep_every)
        self.directory = os.path.abspath(os.fspath(directory))
        self.keep, self.every, self.async_ = keep, every, async_
        self.restored: Restored | None = None
        """The checkpoint of the last restore; None before the first one."""
        self._folder = CheckpointFolder(self.directory)
        self._run = RunIdentity()
        self._mesh: Mesh | None = None  # of the latest save or restore
        self._damaged: set[int] = set()
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"Checkpointer({self.directory!r}, keep={self.keep}, every={self.every}, async_={self.async_})"

    @called_on_each_rank
    @collective_call
    def save(
        self,
        state: States,
        *,
        data: Any = None,
        metadata: Any = None,
        schedule: Schedule | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint of a state, or of several: complete or not at all. Collective.

        The call first waits for an earlier asynchronous save. With ``async_`` it returns when the state is copied, and
        the next step may run; if writing then fails, the next call raises the error.

        Args:
            state: the state, which is settled first, see ``fs.settle``; or several of one mesh by name, such as
                ``{"generator": g, "discriminator": d}``. The largest of their steps is that of the checkpoint.
            data: the data loader's position: an ``fs.data.Loader``, whose ``state_dict()`` is saved; or any JSON value,
                equal on all ranks.
            metadata: any other JSON value, equal on all ranks.
            schedule: the train step's schedule, whose hash is recorded.
            overwrite: replace the step if it exists. A damaged step that a fallback skipped is always replaced.

        Raises:
            CheckpointError: the step exists, another job writes here, the folder belongs to another run, the file
                system refuses, ``data`` is not JSON, or ranks differ in what they save, in copies of leaves or in
                their folders; equal on all ranks, and the files on disk are as they were.
            DonatedError: the state was donated to a step.
        """
        self.wait()
        with telling(seen_here(self._mesh), always=False):
            states = by_name(state, TrainState, "save(state)")
            expect("save(state)", [("schedule", schedule, (Schedule, type(None)), "step.schedule")])
            mesh = self._mesh = one_mesh(states)
        _settle_stale(*states.values())
        enter(mesh, "save")
        comm = mesh_communicator(mesh)
        data = data.state_dict() if getattr(data, "global_position", False) else data
        user = {"data": data, "metadata": metadata, "schedule": schedule.hash if schedule is not None else None}
        each_rank_or_raise(comm, lambda: _check(states, user))
        first_path, run = first_rank_or_raise(comm, mesh.rank, lambda: self._begin(states, overwrite))
        try:
            kept = {"keep": self.keep, "keep_every": self._retention.multiples}
            options = {**kept, "overwrite": overwrite, "async_": self.async_, "states": list(states)}
            for one in states.values() if mesh.size > 1 else ():
                compare(comm, save_facts(one, user, options), CheckpointError)
            head, role = {**user, "run": run}, f"checkpoint {os.path.dirname(first_path)}"
            later = None if self._waits(mesh) else mesh_communicator(mesh, role)
            save = each_rank_or_raise(comm, lambda: self._prepare(states, head, first_path, later is not None))
        except BaseException as error:
            remove_failed(comm, mesh.rank, first_path, error)
            raise
        for known in (self._run, *(one.past.run for one in states.values())):
            known.ids.add(run)
        if later is None:
            write_and_commit(comm, self._folder, self._retention, save)
        else:
            self._start(later, save)
        self._damaged.discard(step_of(states))
        self._interval.restart()

    @overload
    def restore(
        self,
        plan: Plan,
        opt: Optimizer | None = None,
        step: int | None = None,
        *,
        fallback: bool = False,
        cast: bool = False,
        rules: TakeRules | None = None,
        into: TrainState | None = None,
    ) -> TrainState: ...

    @overload
    def restore(
        self,
        plan: Mapping[str, Plan],
        opt: Mapping[str, Optimizer | None] | None = None,
        step: int | None = None,
        *,
        fallback: bool = False,
        cast: bool = False,
        rules: TakeRules | None = None,
        into: Mapping[str, TrainState] | None = None,
    ) -> dict[str, TrainState]: ...

    @called_on_each_rank
    @collective_call
    def restore(
        self,
        plan: Any,
        opt: Any = None,
        step: int | None = None,
        *,
        fallback: bool = False,
        cast: bool = False,
        rules: TakeRules | None = None,
        into: Any = None,
    ) -> Any:
        """Read a state onto any mesh and into any layout, or several. Collective. Sets ``restored``.

        Each rank reads and verifies the chunks that hold its part of the state.

        Args:
            plan: where the leaves are to live; it may differ from the plan of the run that saved. For a checkpoint of
                several states, a dict of plans by the names of states, all or some: the result is a dict, too.
            opt: the optimizer, or a dict of them; None reads the parameters only.
            step: the step to read; None for the newest.
            fallback: if that step is damaged, warn (``CheckpointWarning``) and read the newest good one before it.
            cast: convert tensors that were saved in another dtype.
            rules: read a part of the checkpoint, or by other names (a warm start): pairs of a pattern on the names of
                entries (``params.blocks.0.weight``, ``opt.exp_avg.blocks.0.weight``) and the name to read, with
                ``\\1`` for groups of the pattern, or None for an entry that keeps its value in ``into``. The first
                match wins, and each entry needs a match. Other tensors of the checkpoint are ignored.
                (Of several states, each takes the rules, on its own names.)
            into: the state that gives step, seed, and the values of entries that rules do not read; or a dict of them.
                It is not changed.

        Raises:
            CheckpointError: no checkpoint here, no such step, a newer format, no permission; ranks see different
                folders, or pass different arguments.
            DamagedError: the bytes differ from those that were written.
            TreeError: missing, extra and mismatched leaves, in one report.
            PlanError: invalid rules.
        """
        self.wait()
        with telling(seen_here(self._mesh), always=False):
            requests = requests_of(plan, opt, step, cast, rules, into)
            mesh = self._mesh = one_mesh({name: request.plan for name, request in requests.items()})
        _settle_stale(*(request.into for request in requests.values()))
        enter(mesh, "restore")
        comm = mesh_communicator(mesh)
        said = {"step": step, "fallback": fallback, "cast": cast, "rules": rules, "into": into is not None}
        for request in requests.values() if mesh.size > 1 else ():
            facts = Equal(request.plan.whole or request.plan, {**said, "states": list(requests)}, request.opt).fixed()
            compare(comm, facts, CheckpointError)
        first, steps = first_rank_or_raise(
            comm, mesh.rank, lambda: (self.directory, choose_steps(self.directory, step))
        )
        skipped: list[str] = []
        for chosen in steps:
            try:
                states, manifest = restore_step(comm, self.directory, first, chosen, requests)
                break
            except DamagedError as error:
                if not fallback or chosen == steps[-1]:
                    raise
                skipped.append(str(error))
                self._damaged.add(chosen)
                warnings.warn(f"step {chosen} was skipped: {error}", CheckpointWarning, stacklevel=4)
        self._run.ids.add(manifest.run_id)
        folder = step_folder(self.directory, chosen)
        self.restored = Restored(chosen, folder, manifest.data, manifest.metadata, tuple(skipped))
        return states.get("", states)

    def due(self, state: States) -> bool:
        """Tell whether a checkpoint is due: the state's step, or the largest of several, is a multiple of ``every``.

        Where ``every`` is a time, this is collective: rank 0 tells whether it has passed since the last save.
        """
        states = by_name(state, TrainState, "due(state)")
        step = step_of(states)
        if self._interval.seconds is None or step <= 0:
            return isinstance(self.every, int) and step > 0 and step % self.every == 0
        due, mesh = self._interval.over(), one_mesh(states)
        if mesh.size == 1 or mesh.everywhere:
            return due
        enter(mesh, "due")
        return first_rank_or_raise(mesh_communicator(mesh), mesh.rank, lambda: due)

    def steps(self) -> list[int]:
        """The steps on disk that this rank sees, in ascending order. Local.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return list_steps(self.directory)

    def latest(self) -> int | None:
        """The newest step on disk; None if there is none. Local.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Wait until an asynchronous save is on disk.

        Raises:
            CheckpointError: the save failed; equal on all ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for an asynchronous save, and unlock the folder for other writers.

        Raises:
            CheckpointError: an asynchronous save failed.
        """
        try:
            self.wait()
        finally:
            self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _waits(self, mesh: Mesh) -> bool:
        """Tell whether a save writes before it returns."""
        return not self.async_ or isinstance(mesh.transport, VirtualTransport)

    def _begin(self, states: Mapping[str, TrainState], overwrite: bool) -> tuple[str, str]:
        """On rank 0: make the temporary folder; returns its path and the run that the folder belongs to."""
        known, step = self._run.ids.union(*(one.past.run.ids for one in states.values())), step_of(states)
        path = self._folder.begin(step, overwrite or step in self._damaged, known)
        return path, self._folder.run

    def _prepare(self, states: Mapping[str, TrainState], user: Mapping[str, Any], first_path: str, copy: bool) -> Save:
        """Return what this rank writes, and where: hosts may mount rank 0's folder elsewhere, its random name tells."""
        rank = one_mesh(states).rank
        first, name = os.path.split(first_path)
        path = os.path.join(self.directory, name)
        if rank and not os.path.isdir(path):
            raise other_folder(rank, self.directory, first, name)
        slices = owned(all_entries(states), rank)
        if copy:
            slices = self._snapshot.take(slices)
            for one in states.values():
                one.shards().readers.append(self._snapshot.finish)
        staged = any(one.plan.whole is not None for one in states.values())
        return Save(rank, path, head_of(states, user), slices, staged)

    def _start(self, comm: Communicator, save: Save) -> None:
        """Write in another thread, which is no daemon: the process ends after its checkpoint is on disk."""

        def write() -> None:
            try:
                self._snapshot.finish()
                write_and_commit(comm, self._folder, self._retention, save)
            except BaseException as error:  # raised by the next call
                self._failure = error
                if not threading.main_thread().is_alive():  # there is none
                    say(f"a checkpoint was not saved: {error}")

        self._thread = started(carried(write), "a checkpoint is saved", daemon=False)


def _settle_stale(*states: TrainState | None) -> None:
    for one in states:
        if one is not None and one.stale:
            settle(one)


def _check(states: Mapping[str, TrainState], user: Mapping[str, Any]) -> None:
    """Check what this rank was given to save."""
    for name in ("data", "metadata"):
        check_json(name, user[name])
    all_entries(states)
