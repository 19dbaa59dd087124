"""One restore: which tensor each entry of a state is read from, and the state that they fill."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fshard.checkpoint.files import file_errors
from fshard.checkpoint.folder import read_manifest, step_folder
from fshard.checkpoint.manifest import Manifest, TensorInfo, typed
from fshard.checkpoint.problems import damaged, listed, mismatched, other_checkpoints, other_folder
from fshard.checkpoint.read import Target, read_into
from fshard.checkpoint.tensorfile import NAMES
from fshard.errors import PlanError, ShardError, lines
from fshard.optim.base import Optimizer
from fshard.runtime.comm import Communicator, all_ranks_or_raise, each_rank_or_raise
from fshard.sharding.plan import Plan
from fshard.state.entries import Entry, assemble, entries, scalars
from fshard.state.past import Past, Run
from fshard.state.train_state import TrainState

TakeRules = Sequence[tuple[str, str | None]]
"""``(pattern, source)`` pairs on the names of a state's entries, the first match wins: the name in the checkpoint, with
``\\1`` for groups of the pattern, or None for an entry that keeps the value it starts with."""


@dataclass(frozen=True)
class Request:
    """The arguments of a restore.

    Attributes:
        plan: where the leaves are to live.
        opt: the optimizer; None reads the parameters only.
        cast: whether a tensor may have another dtype than its entry.
        rules: what to read; None reads everything by its own name.
        into: the values of entries that rules do not read.
    """

    plan: Plan
    opt: Optimizer | None
    cast: bool = False
    rules: TakeRules | None = None
    into: TrainState | None = None


def restore_step(comm: Communicator, root: str, first: str, step: int, request: Request) -> tuple[TrainState, Manifest]:
    """The state of one step in the folder ``root``, which rank 0 calls ``first``. Collective."""
    folder, rank = step_folder(root, step), request.plan.mesh.rank

    def look() -> tuple[TrainState, list[Target], Manifest]:
        if rank and not os.path.isdir(folder):
            raise other_folder(rank, root, first, os.path.basename(folder))
        manifest = read_manifest(folder)
        return *prepare(folder, manifest, request), manifest

    def read() -> None:
        with file_errors("read", folder):
            read_into(folder, manifest, targets)

    state, targets, manifest = each_rank_or_raise(comm, look)
    place = f"{folder}, of run {manifest.run_id}, sealed {manifest.seal[:16]}"
    seen = all_ranks_or_raise(comm, lambda: [manifest.seal, place])
    if any(seal != manifest.seal for seal, _ in seen):
        raise other_checkpoints(step, [f"rank {rank}: {place}" for rank, (_, place) in enumerate(seen)])
    each_rank_or_raise(comm, read)
    return state, manifest


def prepare(folder: str, manifest: Manifest, request: Request) -> tuple[TrainState, list[Target]]:
    """A state with the values that the checkpoint does not give, and what to read into the rest. Local."""
    into = request.into
    kept: Mapping[str, Entry] = {entry.name: entry for entry in entries(into)} if into is not None else {}
    values = scalars(into) if into is not None else manifest.scalars
    blank: list[Entry] = []
    try:
        past = Past(made={}, run=Run({manifest.run_id}))
        state = assemble(request.plan, request.opt, blank.append, values, past)
    except ShardError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(folder, [f"its scalars {dict(values)} make no state: {error!r}"]) from error
    names = sources(folder, manifest, blank, request)
    rest = [entry for entry in blank if entry.name not in names]
    if rest and into is None:
        raise PlanError(
            f"rules= read {len(names)} entries from the checkpoint and leave {len(rest)}, such as {rest[0].name}: give "
            f"into=fs.init_state(plan, opt), whose values those keep"
        )
    for entry in rest:
        entry.tensor.copy_(kept[entry.name].tensor)
    return state, [Target(names[entry.name], entry.piece, entry.tensor) for entry in blank if entry.name in names]


def sources(path: str, manifest: Manifest, entries: Sequence[Entry], request: Request) -> dict[str, str]:
    """The name of the tensor that each entry is read from, by the entry's name; all misfits in one TreeError."""
    have = manifest.tensors
    wanted = {e.name: e.name for e in entries} if request.rules is None else _by_rules(request.rules, entries)
    extra = _unread(have, wanted, request) if request.rules is None else []
    misfits = [
        text
        for entry in entries
        if entry.name in wanted and (text := _misfit(entry, wanted[entry.name], have, request.cast))
    ]
    if misfits or extra:
        missing = [text for text in misfits if text.startswith("missing")]
        wrong = [text for text in misfits if not text.startswith("missing")]
        counts = f"{len(missing)} missing, {len(extra)} extra, {len(wrong)} mismatched of {len(have)} tensors"
        raise mismatched(path, [row for kind in (missing, extra, wrong) for row in listed(kind)], counts)
    return wanted


def _unread(have: Mapping[str, TensorInfo], wanted: Mapping[str, str], request: Request) -> list[str]:
    """The tensors that no entry reads; without an optimizer its tensors may be left."""
    required = "" if request.opt is not None else "params."
    return [f"extra  {n}  {typed(info)}" for n, info in have.items() if n not in wanted and n.startswith(required)]


def _misfit(entry: Entry, source: str, have: Mapping[str, TensorInfo], cast: bool) -> str:
    """Why an entry cannot be read from a tensor; empty if it can."""
    told = f"{entry.name}  {NAMES.get(entry.dtype, entry.dtype)}{list(entry.shape)}"
    told += "" if source == entry.name else f" from {source}"
    if source not in have:
        return f"missing  {told}"
    if have[source].shape != entry.shape:
        return f"misshapen  {told}: the checkpoint has {typed(have[source])}"
    if have[source].dtype != entry.dtype and not cast:
        return f"other dtype  {told}: the checkpoint has {typed(have[source])}"
    return ""


def _by_rules(rules: TakeRules, entries: Sequence[Entry]) -> dict[str, str]:
    """What the rules read; entries that keep their value are left out."""
    compiled = [_compiled(number, rule) for number, rule in enumerate(rules)]
    used: set[int] = set()
    unmatched: list[str] = []
    out: dict[str, str] = {}
    for entry in entries:
        hit = next(((i, m, s) for i, (p, s) in enumerate(compiled) if (m := p.fullmatch(entry.name))), None)
        if hit is None:
            unmatched.append(entry.name)
            continue
        number, match, source = hit
        used.add(number)
        if source is not None:
            try:
                out[entry.name] = match.expand(source)
            except (re.error, IndexError) as error:
                raise PlanError(f"rules[{number}]: {source!r} does not expand for {entry.name}: {error}") from None
    idle = [f"rules[{i}] {rule[0]!r} decides no entry" for i, rule in enumerate(rules) if i not in used]
    if unmatched or idle:
        problems = listed([f"{name} is matched by no rule" for name in unmatched]) + idle
        remedy = "Say what becomes of every entry: end with (r'.*', None) for those that keep their value."
        raise PlanError(lines("rules= of a restore:", problems, remedy))
    return out


def _compiled(number: int, rule: tuple[str, str | None]) -> tuple[re.Pattern[str], str | None]:
    try:
        pattern, source = rule
        if source is not None and not isinstance(source, str):
            raise TypeError(f"{source!r} is no name")
        return re.compile(pattern), source
    except (re.error, TypeError, ValueError) as error:
        raise PlanError(
            f"rules[{number}] is {rule!r}, not (pattern, name in the checkpoint or None): {error}"
        ) from None
