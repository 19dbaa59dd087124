"""Which tensor of a checkpoint each entry of a state is read from: by name, or by rules; all problems in one report."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fshard.checkpoint.manifest import Manifest, TensorInfo
from fshard.checkpoint.problems import listed, mismatched
from fshard.checkpoint.tensorfile import NAMES
from fshard.errors import PlanError, lines
from fshard.state.entries import Entry

TakeRules = Sequence[tuple[str, str | None]]
"""``(pattern, source)`` pairs on the names of a state's entries, the first match wins: the name in the checkpoint, with
``\\1`` for groups of the pattern, or None for an entry that keeps the value it starts with."""


@dataclass(frozen=True)
class Request:
    """What a restore may take.

    Attributes:
        cast: whether a tensor may have another dtype than its entry.
        rules: None takes everything, by its own name.
        params_only: whether the state has no optimizer, and the checkpoint's may be left.
    """

    cast: bool = False
    rules: TakeRules | None = None
    params_only: bool = False


def sources(path: str, manifest: Manifest, entries: Sequence[Entry], request: Request) -> dict[str, str]:
    """By the name of an entry the name of the tensor that it is read from.

    Raises:
        TreeError: leaves that are missing, extra or mismatched, all of them in one report.
        PlanError: a rule that cannot be, or decides nothing; an entry without a rule.
    """
    if request.rules is None:
        wanted: dict[str, str] = {entry.name: entry.name for entry in entries}
    else:
        wanted = _by_rules(request.rules, entries)
    have: Mapping[str, TensorInfo] = manifest.tensors
    extra = []
    if request.rules is None:
        names = [n for n in have if n not in wanted and not (request.params_only and not n.startswith("params."))]
        extra = [f"extra  {name}  {typed(have[name])}" for name in names]
    missing, wrong = [], []
    for entry in entries:
        source = wanted.get(entry.name)
        if source is None:
            continue
        here = f"{entry.name}  {NAMES.get(entry.dtype, entry.dtype)}{list(entry.shape)}"
        told = here if source == entry.name else f"{here} from {source}"
        if source not in have:
            missing.append(f"missing  {told}")
        elif have[source].shape != entry.shape:
            wrong.append(f"misshapen  {told}: the checkpoint has {typed(have[source])}")
        elif have[source].dtype != entry.dtype and not request.cast:
            wrong.append(f"other dtype  {told}: the checkpoint has {typed(have[source])}")
    if missing or extra or wrong:
        counts = f"{len(missing)} missing, {len(extra)} extra, {len(wrong)} mismatched of {len(have)} tensors"
        raise mismatched(path, [row for kind in (missing, extra, wrong) for row in listed(kind)], counts)
    return wanted


def typed(info: TensorInfo) -> str:
    """A tensor's dtype and shape: ``F32[4, 8]``."""
    return f"{NAMES[info.dtype]}{list(info.shape)}"


def _by_rules(rules: TakeRules, entries: Sequence[Entry]) -> dict[str, str]:
    """What the rules take; entries that keep their value are left out."""
    compiled = []
    for number, rule in enumerate(rules):
        try:
            pattern, source = rule
            if source is not None and not isinstance(source, str):
                raise TypeError(f"{source!r} is no name")
            compiled.append((re.compile(pattern), source))
        except (re.error, TypeError, ValueError) as error:
            raise PlanError(
                f"rules[{number}] is {rule!r}, not (pattern, name in the checkpoint or None): {error}"
            ) from None
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
