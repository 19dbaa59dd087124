"""``fs.Checkpointer``: saves and restores train states, in Orbax's manner."""

import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from fshard.arguments import expect, kind
from fshard.checkpoint.folder import Folder, choose_steps, list_steps, step_folder
from fshard.checkpoint.match import Request, TakeRules
from fshard.checkpoint.meeting import Meeting, meet, only_first
from fshard.checkpoint.problems import other_folder
from fshard.checkpoint.restore import restore_step
from fshard.checkpoint.save import Saving, check_json, head_of, perform, save_facts, withdraw
from fshard.checkpoint.snapshot import Snapshot
from fshard.checkpoint.write import owned
from fshard.errors import CheckpointError, CheckpointWarning, DamagedError, PlanError, TreeError
from fshard.optim.base import Optimizer
from fshard.runtime.comm import SharedTransport, enter
from fshard.runtime.equal import compare
from fshard.schedule.schedule import Schedule
from fshard.sharding.plan import Plan
from fshard.state.entries import entries
from fshard.state.equal import Equal
from fshard.state.past import Run
from fshard.state.train_state import TrainState


@dataclass(frozen=True)
class Restored:
    """Where a state came from.

    Attributes:
        step: the step.
        folder: of the checkpoint.
        data: what was saved as ``data=``.
        metadata: what was saved as ``metadata=``.
        skipped: what was wrong with newer checkpoints, which ``fallback=True`` left out.
    """

    step: int
    folder: str
    data: Any
    metadata: Any
    skipped: tuple[str, ...] = ()


class Checkpointer:
    """Saves and restores train states in a folder, one folder a step (``orbax.checkpoint.CheckpointManager``).

    Files are safetensors and JSON, every byte hashed, none of it able to run code. A checkpoint exists whole or not at
    all. What goes wrong on one rank is the same error on all, and leaves what is on disk as it was. See
    docs/checkpoints.md.

    Args:
        directory: the folder, which all ranks see; made by the first save. One Checkpointer at a time writes to it, and
            one run: whoever begins anew, and has restored nothing from a folder, cannot save where checkpoints are.
        keep: how many steps to keep, the newest by number; None keeps all.
        every: for ``due``: the number of steps from one checkpoint to the next.
        async_: copy the state in ``save`` and write it while the next steps run. It takes host memory for one more copy
            of what this rank writes. (On a virtual mesh, whose ranks are threads that take turns, ``save`` writes.)

    Raises:
        PlanError: arguments of the wrong type, or out of range.

    >>> import fshard as fs, tempfile, torch
    >>> plan = fs.make_plan({"w": torch.ones(3, 2)}, fs.make_mesh((-1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    >>> opt = fs.optim.adamw(3e-4)
    >>> with tempfile.TemporaryDirectory() as folder, fs.Checkpointer(folder, keep=3) as ckpt:
    ...     ckpt.save(fs.init_state(plan, opt, params={"w": torch.ones(3, 2)}), data={"epoch": 0})
    ...     state = ckpt.restore(plan, opt)
    ...     print(ckpt.steps(), state.step, ckpt.restored.data)
    [0] 0 {'epoch': 0}
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int | None = 3, every: int | None = None, async_: bool = False
    ) -> None:
        expect("Checkpointer(directory)", [("directory", directory, (str, os.PathLike), "the path of a folder")])
        if not os.fspath(directory):
            raise PlanError("Checkpointer(directory=''): give the path of a folder; '.' is the one that you are in")
        for name, value in (("keep", keep), ("every", every)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise PlanError(f"Checkpointer({name}={value!r}): give an int >= 1, or None")
        self.directory = os.path.abspath(os.fspath(directory))
        self.keep, self.every, self.async_ = keep, every, async_
        self.restored: Restored | None = None
        """Where the last state that was restored came from; None before."""
        self._folder = Folder(self.directory)
        self._run = Run()
        self._damaged: set[int] = set()
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"Checkpointer({self.directory!r}, keep={self.keep}, every={self.every}, async_={self.async_})"

    def save(
        self,
        state: TrainState,
        *,
        data: Any = None,
        metadata: Any = None,
        schedule: Schedule | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint of a state. Collective.

        An earlier save that still writes is waited for. With ``async_`` the call returns when the state is copied, and
        the next step may be made; if the write fails then, the next call says so.

        Args:
            state: the state; an update that waits is finished first.
            data: where the data loader is: any JSON, equal on all ranks.
            metadata: any other JSON, equal on all ranks.
            schedule: the schedule of the train step, whose hash is recorded.
            overwrite: replace the step if it is there already. A damaged one that a fallback passed over is replaced
                anyway.

        Raises:
            CheckpointError: the step is there already, another job writes here, the folder is that of another run, the
                file system says no, ``data`` is no JSON, or ranks differ in what they save, in copies of leaves or in
                their folders; alike on all ranks, and what is on disk is as it was.
            DonatedError: the state was donated to a step.
        """
        self.wait()
        if not isinstance(state, TrainState):
            raise TreeError(f"save(state) takes a train state, and was given {kind(state)}")
        expect("save(state)", [("schedule", schedule, (Schedule, type(None)), "step.schedule")])
        mesh = state.plan.mesh
        enter(mesh, "save")
        meeting = meet(mesh, "control")
        user = {"data": data, "metadata": metadata, "schedule": schedule.hash if schedule is not None else None}
        begun: list[str] = []
        ready: list[Saving] = []
        later = None

        def prepare() -> None:
            path = self._here(meeting.rank, heads[0]["path"])
            head = head_of(state, {**user, "run": heads[0]["run"]})
            saving = Saving(path, head, owned(entries(state), meeting.rank))
            ready.append(saving if later is None else replace(saving, slices=self._snapshot.take(saving.slices)))

        try:
            heads = meeting.together(lambda: self._begin(meeting.rank, state, user, overwrite, begun))
            if mesh.size > 1:
                facts = save_facts(state, user, {"overwrite": overwrite, "keep": self.keep, "async_": self.async_})
                compare(meeting.lane, facts, CheckpointError)
            if self.async_ and not isinstance(mesh.transport, SharedTransport):
                later = meet(mesh, f"checkpoint {os.path.dirname(heads[0]['path'])}")
            meeting.together(prepare)
        except BaseException as error:
            withdraw(meeting, "".join(begun) or None, error)
            raise
        for run in (self._run, state.past.run):
            run.ids.add(heads[0]["run"])
        if later is None:
            perform(meeting, self._folder, self.keep, ready[0])
        else:
            self._start(later, ready[0])
        self._damaged.discard(state.step)

    def restore(
        self,
        plan: Plan,
        opt: Optimizer | None,
        step: int | None = None,
        *,
        fallback: bool = False,
        cast: bool = False,
        rules: TakeRules | None = None,
        into: TrainState | None = None,
    ) -> TrainState:
        """Read a state, onto any mesh and into any layout. Collective. ``restored`` has what was saved beside it.

        Each rank reads the chunks that hold what it needs, and every one of them is verified.

        Args:
            plan: where leaves are to live; it need not be the plan of the run that saved.
            opt: the optimizer; None reads parameters alone.
            step: which one; None for the newest.
            fallback: if that step is damaged, warn (``CheckpointWarning``) and take the newest good one before it.
            cast: read tensors into other dtypes than they were saved in.
            rules: take a part, or by other names (a warm start): pairs of a pattern on the names of entries
                (``params.blocks.0.weight``, ``opt.exp_avg.blocks.0.weight``) and the name to read, with ``\\1`` for
                groups of the pattern, or None for an entry that keeps its value in ``into``. The first match wins, each
                entry needs one, and what else the checkpoint holds is left.
            into: the state whose values, step and seed are kept where rules take nothing. It is not changed.

        Raises:
            CheckpointError: no checkpoint here, no such step, a newer format, no permission; ranks see different
                folders, or ask for different things.
            DamagedError: the bytes are not those that were written.
            TreeError: missing, extra and mismatched leaves, in one report.
            PlanError: rules that cannot be.
        """
        self.wait()
        if not isinstance(plan, Plan):
            raise PlanError(f"restore(plan, opt) takes a plan, and was given {kind(plan)}")
        pairs = "a list of (pattern, name in the checkpoint or None)"
        expect("restore(plan, opt)", [("step", step, (int, type(None)), "an int, or None for the newest")])
        known = ("into", into, (TrainState, type(None)), "a train state")
        expect("restore(plan, opt)", [("rules", rules, (list, tuple, type(None)), pairs), known])
        if into is not None:
            into.check_plan(plan)
        enter(plan.mesh, "restore")
        meeting = meet(plan.mesh, "control")
        if plan.mesh.size > 1:
            said = {"step": step, "fallback": fallback, "cast": cast, "rules": rules, "into": into is not None}
            compare(meeting.lane, Equal(plan, said, opt).fixed(), CheckpointError)
        found = meeting.together(only_first(meeting.rank, lambda: (self.directory, choose_steps(self.directory, step))))
        assert found[0] is not None
        first, steps = found[0]
        request, skipped = Request(cast, rules, opt is None), []
        for chosen in steps if fallback else steps[:1]:
            try:
                state, manifest = restore_step(meeting, self.directory, first, chosen, plan, opt, request, into)
            except DamagedError as error:
                if not fallback or chosen == steps[-1]:
                    raise
                skipped.append(str(error))
                self._damaged.add(chosen)
                warnings.warn(f"step {chosen} was passed over: {error}", CheckpointWarning, stacklevel=2)
                continue
            self._run.ids.add(manifest.run_id)
            folder = step_folder(self.directory, chosen)
            self.restored = Restored(chosen, folder, manifest.data, manifest.metadata, tuple(skipped))
            return state
        raise AssertionError("choose_steps gave no step")

    def due(self, state: TrainState) -> bool:
        """Whether a checkpoint of this state is due: its step is a multiple of ``every``, and not 0."""
        return self.every is not None and state.step > 0 and state.step % self.every == 0

    def steps(self) -> list[int]:
        """The steps that are on disk, in order. Local; of other ranks' folders it knows nothing.

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
            CheckpointError: it failed; alike on all ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for what is being written, and let others write to the folder.

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

    def _begin(
        self, rank: int, state: TrainState, user: Mapping[str, Any], overwrite: bool, begun: list[str]
    ) -> dict[str, Any]:
        """Check what this rank was given; rank 0 makes the temporary folder, and adds it to ``begun``."""
        for name in ("data", "metadata"):
            check_json(name, user[name])
        entries(state)
        if rank == 0:
            known = self._run.ids | state.past.run.ids
            begun.append(self._folder.begin(state.step, overwrite or state.step in self._damaged, known))
        return {"path": "".join(begun), "run": self._folder.run}

    def _here(self, rank: int, path: str) -> str:
        """The temporary folder of rank 0 as this rank sees it, by its random name: hosts may mount it elsewhere."""
        first, name = os.path.split(path)
        here = os.path.join(self.directory, name)
        if rank and not os.path.isdir(here):
            raise other_folder(rank, self.directory, first, name)
        return here

    def _start(self, meeting: Meeting, saving: Saving) -> None:
        """Write in a thread of its own. It is no daemon: a script that ends has its checkpoint."""

        def write() -> None:
            try:
                self._snapshot.wait()
                perform(meeting, self._folder, self.keep, saving)
            except BaseException as error:  # raised by the next call
                self._failure = error

        self._thread = threading.Thread(target=write, name="fshard-checkpoint")
        self._thread.start()
