"""One restore: which tensor each entry of a state is read from, and the state that they fill."""

import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard.arguments import Want, expect, kind
from fshard.checkpoint.folder import read_manifest, step_folder
from fshard.checkpoint.manifest import Manifest, TensorInfo, other_folder
from fshard.checkpoint.ranges import Slice
from fshard.checkpoint.read import read_into
from fshard.checkpoint.states import beside, by_name, one_mesh, whole_entries
from fshard.checkpoint.tensorfile import NAMES
from fshard.errors import CheckpointError, PlanError, ShardError, TreeError, lines
from fshard.optim.around import CARRIED, EMA
from fshard.optim.base import Optimizer
from fshard.patterns import bad_regex, first_matches, idle
from fshard.reading.files import damaged, file_errors, listed
from fshard.runtime.comm import Communicator, all_ranks_or_raise, each_rank_or_raise
from fshard.runtime.memory.optimizer_layout import BASIS, RESIDUAL
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.state.entries import LATE, assemble, scalars
from fshard.state.exchanges import ANCHOR
from fshard.state.pieces import PARAMS, Entry, split_name
from fshard.state.provenance import Past, RunIdentity
from fshard.state.replica_entries import of_all_replicas, saved_at, with_replicas
from fshard.state.train_state import TrainState

TakeRules = Sequence[tuple[str, str | None]]
"""``(pattern, source)`` pairs on the names of a state's entries, the first match wins: the name in the checkpoint, with
``\\1`` for groups of the pattern, or None for an entry that keeps the value it starts with."""


@dataclass(frozen=True)
class RestoreRequest:
    """The arguments of a restore, as ``Checkpointer.restore`` takes them."""

    plan: Plan
    opt: Optimizer | None
    cast: bool = False
    rules: TakeRules | None = None
    into: TrainState | None = None


Prepared = tuple[Manifest, TrainState, list[Slice]]
"""The part of a manifest that tells of one state, the state, and what to read into it."""


def restore_step(
    comm: Communicator, root: str, first: str, step: int, requests: Mapping[str, RestoreRequest]
) -> tuple[dict[str, TrainState], Manifest]:
    """The states of one step in the folder ``root``, which rank 0 calls ``first``. Collective."""
    folder, rank = step_folder(root, step), one_mesh({name: one.plan for name, one in requests.items()}).rank

    def look() -> tuple[Manifest, dict[str, Prepared]]:
        if rank and not os.path.isdir(folder):
            raise other_folder(rank, root, first, os.path.basename(folder))
        manifest = read_manifest(folder)
        parts = {name: _part(folder, manifest, name) for name in requests}
        return manifest, {name: (part, *prepare(folder, part, requests[name])) for name, part in parts.items()}

    def read() -> None:
        with file_errors("read", folder):
            for part, _, targets in prepared.values():
                read_into(folder, part, targets)

    manifest, prepared = each_rank_or_raise(comm, look)
    place = f"{folder}, of run {manifest.run_id}, sealed {manifest.seal[:16]}"
    seen = all_ranks_or_raise(comm, lambda: [manifest.seal, place])
    if any(seal != manifest.seal for seal, _ in seen):
        rows = [f"rank {rank}: {place}" for rank, (_, place) in enumerate(seen)]
        remedy = "Give all ranks one folder, on a file system that all of them see."
        raise CheckpointError(lines(f"ranks read different checkpoints of step {step}:", rows, remedy))
    each_rank_or_raise(comm, read)
    return {name: state for name, (_, state, _) in prepared.items()}, manifest


def _part(folder: str, manifest: Manifest, name: str) -> Manifest:
    """Return what a manifest tells of one state."""
    if name in manifest.states:
        return manifest.of(name)
    if not name and not manifest.states:
        return manifest
    if manifest.states:
        known = ", ".join(f"{state!r}: plan" for state in manifest.states)
        asked = f"the state {name!r}" if name else "one state"
        raise TreeError(
            f"{folder} holds {', '.join(map(repr, manifest.states))}, and {asked} was asked for: "
            f"give restore({{{known}}}, ...), or some of them"
        )
    raise TreeError(f"{folder} holds one state, and {name!r} was asked for: give restore(plan, opt)")


def prepare(folder: str, manifest: Manifest, request: RestoreRequest) -> tuple[TrainState, list[Slice]]:
    """A state with the values that the checkpoint does not give, and what to read into the rest. Local."""
    into, plan = request.into, request.plan.whole or request.plan
    kept: Mapping[str, Entry] = {entry.name: entry for entry in whole_entries(into)} if into is not None else {}
    values = scalars(into) if into is not None else manifest.scalars
    blank: list[Entry] = []
    try:
        past = Past(made={}, run=RunIdentity({manifest.run_id}))
        state = assemble(plan.own, request.opt, blank.append, values, past)
    except ShardError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(folder, [f"its scalars {dict(values)} make no state: {error!r}"]) from error
    mesh, saved = plan.own.mesh, {name: info.shape for name, info in manifest.tensors.items()}
    blank = with_replicas(of_all_replicas(blank, mesh), mesh, saved)
    names = stored_names(folder, manifest, blank, request)
    rest = [entry for entry in blank if entry.name not in names] if request.rules is not None else []
    if rest and into is None:
        raise PlanError(
            f"rules= read {len(names)} entries from the checkpoint and leave {len(rest)}, such as {rest[0].name}: give "
            f"into=fs.init_state(plan, opt), whose values those keep"
        )
    for entry in rest:
        entry.tensor.copy_(kept[entry.name].tensor)
    state = replace(state, late=late_by_moments(state, into, manifest, [entry.name for entry in blank], names))
    return state, [*_slices(blank, names, mesh)]


def _slices(entries: Sequence[Entry], names: Mapping[str, str], mesh: Mesh) -> Iterator[Slice]:
    """Return what is read, and from where."""
    for entry in entries:
        places = saved_at(entry, names[entry.name], mesh) if entry.name in names else []
        yield from (Slice(*place, entry.tensor) for place in places[:1])
        yield from (Slice(*place, torch.empty_like(entry.tensor), entry.tensor) for place in places[1:])


def stored_names(path: str, manifest: Manifest, entries: Sequence[Entry], request: RestoreRequest) -> dict[str, str]:
    """The name of the tensor that each entry is read from, by the entry's name; all misfits in one TreeError."""
    have = manifest.tensors
    wanted = _by_rules(request.rules, entries) if request.rules is not None else _by_name(entries, have)
    missing, wrong = _misfits([(e, wanted[e.name]) for e in entries if e.name in wanted], have, request.cast)
    extra = [] if request.rules is not None else _unread(have, wanted, request)
    if missing or extra or wrong:
        counts = f"{len(missing)} missing, {len(extra)} extra, {len(wrong)} mismatched of {len(have)} tensors"
        rows = [row for kind in (missing, extra, wrong) for row in listed(kind)]
        raise TreeError(lines(f"{path} does not fit the plan ({counts}):", rows, _remedy([*missing, *extra])))
    return wanted


def _unread(have: Mapping[str, TensorInfo], wanted: Container[str], request: RestoreRequest) -> list[str]:
    """The tensors that no rank reads. Without an optimizer its tensors may be left."""
    start = "" if request.opt is not None else "params."
    plan = request.plan.whole or request.plan
    ours = plan.own.leaves if plan.stages is not None else plan.leaves
    other = tuple([f".{path}" for path in plan.leaves if path not in ours])  # what ranks of other stages read
    left = [name for name in have if name not in wanted and not name.endswith(other)]
    return [f"extra  {name}  {have[name]}" for name in left if name.startswith(start)]


def _by_name(entries: Sequence[Entry], have: Container[str]) -> dict[str, str]:
    """Return what is read without rules: all entries, but where rounding has left nothing out of a sum yet."""
    return {entry.name: entry.name for entry in entries if entry.name in have or not entry.rows}


def _remedy(other: Sequence[str]) -> str:
    """Return what to do about a checkpoint that does not fit, given the rows of names that are on one side alone."""
    remedies = [
        "Restore with the model and optimizer that it was saved with, pass cast=True for other dtypes, or select "
        "what to read with rules=."
    ]
    if any("  params." in row and ":" in row for row in other):
        remedies.append(
            "Packed leaves are saved as codes and scales: restore with the packed= that they were saved with, and "
            "change it with fs.reshard_state(state, plan, opt)."
        )
    if any(row.startswith("extra  opt.residual.") for row in other):
        remedies.append(
            "opt.residual is what rounding has left out of sums: give a plan whose fs.Wire has feedback=; "
            "rules=[('.*', r'\\g<0>')] leave it out."
        )
    return " ".join(remedies)


def _misfits(
    wanted: Sequence[tuple[Entry, str]], have: Mapping[str, TensorInfo], cast: bool
) -> tuple[list[str], list[str]]:
    """Entries whose tensor is missing, and those whose tensor has another shape or dtype."""
    missing, wrong = [], []
    for entry, name in wanted:
        text = f"{entry.name}  {NAMES.get(entry.dtype, entry.dtype)}{list(entry.shape)}"
        text += "" if name == entry.name else f" from {name}"
        if name not in have:
            missing.append(f"missing  {text}")
        elif have[name].shape != entry.shape:
            wrong.append(f"misshapen  {text}: the checkpoint has {have[name]}")
        elif have[name].dtype != entry.dtype and not cast:
            wrong.append(f"other dtype  {text}: the checkpoint has {have[name]}")
    return missing, wrong


def _check_rules(rules: TakeRules) -> None:
    """Refuse rules that are not pairs of a pattern and a name."""
    for number, rule in enumerate(rules):
        problem: str | None = "it is not such a pair"
        if isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[1], str | None):
            problem = bad_regex(rule[0])
        if problem is not None:
            raise PlanError(f"rules[{number}] is {rule!r}, not (pattern, name in the checkpoint or None): {problem}")


def _by_rules(rules: TakeRules, entries: Sequence[Entry]) -> dict[str, str]:
    """Return what the rules read; entries that keep their value are left out."""
    _check_rules(rules)
    hits = first_matches([pattern for pattern, _ in rules], [entry.name for entry in entries])
    out: dict[str, str] = {}
    for name, (number, match) in ((name, hit) for name, hit in hits.items() if hit is not None):
        stored = rules[number][1]
        if stored is not None:
            try:
                out[name] = match.expand(stored)
            except (re.error, IndexError) as error:
                raise PlanError(f"rules[{number}]: {stored!r} does not expand for {name}: {error}") from None
    unused = [f"rules[{number}] {rules[number][0]!r} decides no entry" for number in idle(len(rules), hits)]
    unmatched = [f"{name} is matched by no rule" for name, hit in hits.items() if hit is None]
    if unmatched or unused:
        remedy = "Say what becomes of every entry: end with (r'.*', None) for those that keep their value."
        raise PlanError(lines("rules= of a restore:", listed(unmatched) + unused, remedy))
    return out


UNCOUNTED = {EMA, CARRIED, RESIDUAL, BASIS, ANCHOR}
"""Buffers that no number of updates corrects."""


def late_by_moments(
    state: TrainState, into: TrainState | None, manifest: Manifest, entries: Sequence[str], names: Mapping[str, str]
) -> dict[str, int]:
    """Return how many updates fewer than the state's step each leaf has had; less than nothing where it has had more.

    Args:
        state: the state, whose step is that of ``into`` if that is given.
        into: the state that gives what is not read.
        manifest: what the checkpoint holds.
        entries: the names of all entries of the state.
        names: of the tensors that entries are read from, by the names of the entries.

    Raises:
        PlanError: moments of one leaf come from states in which it has had unlike numbers of updates.
    """
    counts: dict[str, dict[int, str]] = {}
    for path, count, where in _counted(state, into, manifest, entries, names):
        counts.setdefault(path, {})[count] = where
    unlike = {path: each for path, each in counts.items() if len(each) > 1}
    if unlike:
        rows = [f"{path}: {count}, that of {where}" for path, each in unlike.items() for count, where in each.items()]
        remedy = "Let rules= read all optimizer state of a leaf, or none of it: one count corrects its moments."
        raise PlanError(lines("optimizer state of one leaf has had unlike numbers of updates:", rows, remedy))
    late = dict(state.late) | {path: state.step - next(iter(each)) for path, each in counts.items()}
    return {path: missed for path, missed in late.items() if missed}


def _counted(
    state: TrainState, into: TrainState | None, manifest: Manifest, entries: Sequence[str], names: Mapping[str, str]
) -> Iterator[tuple[str, int, str]]:
    """The leaf of each moment, the number of its updates, and where it comes from."""
    saved = {name.removeprefix(PARAMS) for name in manifest.tensors if name.startswith(PARAMS)}
    for name in entries:
        buffer, path = split_name(name, state.plan.leaves)
        if not name.startswith("opt.") or buffer in UNCOUNTED:
            continue
        if name in names:
            missed = manifest.scalars.get(LATE + split_name(names[name], saved)[1])
            missed = missed if isinstance(missed, int) else 0
            yield path, manifest.step - missed, f"{names[name]} in the checkpoint"
        elif into is not None:
            yield path, into.step - into.late.get(path, 0), f"{name} of into="


def requests_of(
    plan: Any, opt: Any, step: int | None, cast: bool, rules: TakeRules | None, into: Any
) -> dict[str, RestoreRequest]:
    """The arguments of a restore for each state, checked."""
    call = "restore(plan, opt)"
    if not isinstance(plan, Plan | Mapping):
        raise PlanError(f"{call} takes a plan, and was given {kind(plan)}")
    plans = by_name(plan, Plan, call)
    opts, kept = beside(opt, plans, call, "opt"), beside(into, plans, call, "into")
    wants: list[Want] = [
        ("step", step, (int, type(None)), "an int, or None for the newest"),
        ("rules", rules, (list, tuple, type(None)), "a list of (pattern, name in the checkpoint or None)"),
        *(("into", one, (TrainState, type(None)), "a train state") for one in kept.values()),
    ]
    expect(call, wants)
    for name, one in kept.items():
        if one is not None:
            one.check_plan(plans[name])
    return {name: RestoreRequest(plans[name], opts[name], cast, rules, kept[name]) for name in plans}
