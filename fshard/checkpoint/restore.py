"""One restore: a manifest and a plan become a state, and each rank reads what it needs."""

import os
from collections.abc import Mapping

from fshard.checkpoint.folder import read_manifest, step_folder, telling
from fshard.checkpoint.manifest import Manifest
from fshard.checkpoint.match import Request, sources
from fshard.checkpoint.meeting import Meeting
from fshard.checkpoint.problems import damaged, other_checkpoints, other_folder
from fshard.checkpoint.read import Want, read_into
from fshard.errors import PlanError, ShardError
from fshard.optim.base import Optimizer
from fshard.sharding.plan import Plan
from fshard.state.entries import Entry, assemble, entries, scalars
from fshard.state.past import Past, Run
from fshard.state.train_state import TrainState


def restore_step(
    meeting: Meeting,
    root: str,
    first: str,
    step: int,
    plan: Plan,
    opt: Optimizer | None,
    request: Request,
    into: TrainState | None,
) -> tuple[TrainState, Manifest]:
    """The state of one step. Collective.

    Args:
        meeting: the ranks.
        root: the folder of all steps.
        first: the same, as rank 0 calls it.
        step: which one.
        plan: where leaves are to live.
        opt: the optimizer, or None.
        request: what is taken.
        into: values of the entries that are not taken.

    Raises:
        DamagedError: the checkpoint is not as it was written.
        CheckpointError: it cannot be read.
        TreeError: it does not fit the plan.
        PlanError: rules that cannot be.
        All of them alike on every rank.
    """
    folder = step_folder(root, step)
    found: list[tuple[TrainState, Manifest, list[Want]]] = []

    def look() -> list[str]:
        if meeting.rank and not os.path.isdir(folder):
            raise other_folder(meeting.rank, root, first, os.path.basename(folder))
        manifest = read_manifest(folder)
        state, wants = prepared(folder, manifest, plan, opt, request, into)
        found.append((state, manifest, wants))
        return [manifest.seal, f"{folder}, of run {manifest.run_id}, sealed {manifest.seal[:16]}"]

    def read() -> int:
        with telling("read", folder):
            return read_into(folder, found[0][1], found[0][2])

    looked = meeting.together(look)
    if any(seal != looked[0][0] for seal, _ in looked):
        raise other_checkpoints(step, [f"rank {rank}: {text}" for rank, (_, text) in enumerate(looked)])
    meeting.together(read)
    state, manifest, _ = found[0]
    return state, manifest


def prepared(
    folder: str, manifest: Manifest, plan: Plan, opt: Optimizer | None, request: Request, into: TrainState | None
) -> tuple[TrainState, list[Want]]:
    """A state that holds everything that the checkpoint does not give, and what to read into the rest. Local."""
    kept: Mapping[str, Entry] = {entry.name: entry for entry in entries(into)} if into is not None else {}
    values = scalars(into) if into is not None else manifest.scalars
    blank: list[Entry] = []
    try:
        state = assemble(plan, opt, blank.append, values, Past(made={}, run=Run({manifest.run_id})))
    except ShardError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(folder, [f"its scalars {dict(values)} make no state: {error!r}"]) from error
    names = sources(folder, manifest, blank, request)
    rest = [entry.name for entry in blank if entry.name not in names]
    if rest and into is None:
        raise PlanError(
            f"rules= take {len(names)} entries from the checkpoint and leave {len(rest)}, such as {rest[0]}: give "
            f"into=fs.init_state(plan, opt), whose values those keep"
        )
    for entry in blank:
        if entry.name not in names:
            entry.tensor.copy_(kept[entry.name].tensor)
    return state, [Want(names[entry.name], entry.piece, entry.tensor) for entry in blank if entry.name in names]
