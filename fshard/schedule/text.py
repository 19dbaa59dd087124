"""The text form of a schedule, and the way back.

A header of one value a line (the policy, the step, the groups with their transfers, what each unit reads, the program),
then one op a line. ``#1`` is a call's index where it is not 0, ``@1`` the microbatch where a step has several, and a
lone ``#`` begins a comment. Names that hold spaces or quotes are written as JSON strings. The text holds
everything, so its hash is the schedule's identity.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fshard import errors
from fshard.arguments import size_text
from fshard.schedule.ops import STEP_KINDS, Call, GroupInfo, Op, Program, microbatch_kinds, op_kinds
from fshard.schedule.policy import Keep, Policy, keep
from fshard.schedule.transfers import KINDS, Transfer

FORMAT = "fshard schedule "
VERSION = "3"
"""The first line is the name of the format and its version."""

WIDTH = 100
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
PLAIN = re.compile(r'[^\s"#@][^\s"]*')
SIZES = ("full", "shard", "grad")
FURTHER = ("own", "update")
"""Sizes that only groups with partial updates, or with state in host memory, have."""
TRAINED = ("frozen", "trainable")
"""The words for False and True."""


HEADER = ("policy", "step", "group", "unit", "ops")
"""The words that begin lines before the ops, besides calls and transfers."""

Parts = tuple[tuple[Op, ...], tuple[GroupInfo, ...], Program, Policy, int, bool]
"""The arguments of ``Schedule``."""


def render(parts: Parts) -> str:
    """The text form."""
    ops, _, _, _, accumulate, _ = parts
    return "\n".join((*_header(parts), *op_lines(ops, accumulate))) + "\n"


def op_lines(ops: Sequence[Op], accumulate: int) -> list[str]:
    """One numbered line an op."""
    width, words = max(4, len(str(len(ops)))), max([len(op.kind) for op in ops], default=0)
    each = microbatch_kinds() if accumulate > 1 else frozenset()
    return [
        f"{number:>{width}} {op.kind:<{words}}{_target(op, op.kind in each)}".rstrip() for number, op in enumerate(ops)
    ]


def scan(text: str) -> Parts:
    """The parts of the schedule with this text form; see ``parse``."""
    reader = _Reader()
    for number, line in enumerate(text.split("\n"), 1):
        tokens = TOKEN.findall(line)
        if "#" in tokens:
            tokens = tokens[: tokens.index("#")]
        if tokens:
            try:
                reader.take(line.strip(), tokens)
            except ValueError as problem:
                raise errors.unreadable_schedule(number, line, str(problem)) from None
    return reader.parts(text.count("\n") + 1)


def _header(parts: Parts) -> Iterator[str]:
    ops, groups, program, policy, accumulate, train = parts
    yield FORMAT + VERSION
    yield f"policy {policy}"
    yield f"step {'train' if train else 'eval'} accumulate={accumulate}"
    width = max((len(_name(group.name)) for group in groups), default=0)
    words = max((len(move.kind) for group in groups for move in group.transfers), default=0)
    for group in groups:
        sizes = (group.full_bytes, group.shard_bytes, group.grad_bytes)
        numbers = [f"{key}={size}" for key, size in zip(SIZES, sizes, strict=True)]
        further = zip(FURTHER, (group.own_bytes, group.update_bytes), strict=True)
        line = [f"group {_name(group.name):<{width}}", *numbers, TRAINED[group.trainable]]
        line += [f"{key}={size}" for key, size in further if size]
        yield f"{' '.join(line)} # {', '.join(map(size_text, sizes))}"
        yield from (_transfer(move, words) for move in group.transfers)
    for unit, ids in program.reads.items():
        yield " ".join(("unit", _name(unit), "reads", *(_name(groups[i].name) for i in ids)))
    yield from _calls("forward", program.forward)
    yield from _calls("backward", program.backward)
    yield f"ops {len(ops)}"


def _transfer(move: Transfer, width: int) -> str:
    line = f"  {move.kind:<{width}} {move.source} -> {move.target} sent={move.sent}"
    line += f" staging={move.staging}" if move.staging else ""
    return line + (f" over {_name(move.axes)}" if move.axes else "") + " late" * move.late


def _calls(word: str, calls: Sequence[Call]) -> Iterator[str]:
    line = word
    for call in calls:
        item = f" {_name(call.unit)}" + (f" #{call.index}" if call.index else "")
        if len(line) + len(item) > WIDTH and line != word:
            yield line
            line = word
        line += item
    if line != word:
        yield line


def _target(op: Op, shown: bool) -> str:
    name = "" if op.kind in STEP_KINDS and not op.target else f" {_name(op.target)}"
    call = f" #{op.index}" if op.index else ""
    return name + call + (f" @{op.microbatch}" if shown or op.microbatch else "")


def _name(name: str) -> str:
    return name if PLAIN.fullmatch(name) and name.isprintable() else json.dumps(name)


def _unquoted(token: str) -> str:
    if token.startswith('"'):
        return str(json.loads(token))
    if not PLAIN.fullmatch(token):
        raise ValueError(f"{token!r} is not a name")
    return token


def _number(token: str, prefix: str) -> int:
    if not re.fullmatch(re.escape(prefix) + r"-?[0-9]+", token, re.ASCII):
        raise ValueError(f"{token!r} is not of the form {prefix}NUMBER")
    return int(token[len(prefix) :])


class _Reader:
    """Takes lines in order: the header's, then as many ops as it announces."""

    def __init__(self) -> None:
        self.titled = False
        self.policy: Policy | None = None
        self.step: tuple[bool, int] | None = None
        self.groups: dict[str, GroupInfo] = {}
        self.reads: dict[str, tuple[int, ...]] = {}
        self.calls: dict[str, list[Call]] = {"forward": [], "backward": []}
        self.count: int | None = None
        self.ops: list[Op] = []
        self.kinds = op_kinds()

    def take(self, line: str, tokens: list[str]) -> None:
        """Read one line that is not empty."""
        word, *rest = tokens
        if not self.titled:
            if line != FORMAT + VERSION:
                version = line.removeprefix(FORMAT)
                other = f"; this text has version {version}: build the schedule anew" if version != line else ""
                raise ValueError(f"the first line must be {FORMAT + VERSION!r}{other}")
            self.titled = True
        elif self.count is not None:
            self.ops.append(_read_op(tokens, len(self.ops), self.kinds))
        elif word in self.calls:
            self.calls[word].extend(_read_calls(rest))
        elif word in KINDS:
            if not self.groups:
                raise ValueError("a transfer stands below its group")
            name, group = self.groups.popitem()
            self.groups[name] = replace(group, transfers=(*group.transfers, _read_transfer(tokens)))
        elif word in HEADER:
            getattr(self, f"_{word}")(rest)
        else:
            raise ValueError(f"{word!r} is none of {', '.join((*HEADER, *self.calls, *KINDS))}")

    def parts(self, last: int) -> Parts:
        """Everything read, once the text is over."""
        if self.policy is None or self.step is None or self.count != len(self.ops):
            found = f"policy: {self.policy}, step: {self.step}, ops: {len(self.ops)} of {self.count}"
            raise errors.unreadable_schedule(last, "", f"the text ends too early ({found})")
        train, accumulate = self.step
        program = Program(tuple(self.calls["forward"]), tuple(self.calls["backward"]), self.reads)
        return tuple(self.ops), tuple(self.groups.values()), program, self.policy, accumulate, train

    def _policy(self, tokens: list[str]) -> None:
        keys = ("prefetch", "reduces", "reshard", "update", *(("accumulation",) if len(tokens) > 4 else ()))
        prefetch, reduces, reshard, update, *accumulation = _values(tokens, keys)
        self.policy = Policy(_number(prefetch, ""), _number(reduces, ""), _read_reshard(reshard), update, *accumulation)

    def _step(self, tokens: list[str]) -> None:
        if len(tokens) != 2 or tokens[0] not in ("train", "eval"):
            raise ValueError("a step is written 'train accumulate=1' or 'eval accumulate=1'")
        self.step = tokens[0] == "train", _number(_values(tokens[1:], ("accumulate",))[0], "")

    def _group(self, tokens: list[str]) -> None:
        fixed = 2 + len(SIZES)
        further = {token.partition("=")[0]: token.partition("=")[2] for token in tokens[fixed:]}
        if len(tokens) < fixed or not set(further) <= set(FURTHER):
            raise ValueError(f"a group is NAME {' '.join(f'{key}=BYTES' for key in SIZES)} and a word")
        name, trained = _unquoted(tokens[0]), tokens[fixed - 1]
        if name in self.groups:
            raise ValueError(f"group {name!r} is there twice")
        full, shard, grad = (_number(value, "") for value in _values(tokens[1 : fixed - 1], SIZES))
        if trained not in TRAINED:
            raise ValueError(f"{trained!r} is neither {TRAINED[0]} nor {TRAINED[1]}")
        own, update = (_number(further.get(key, "0"), "") for key in FURTHER)
        self.groups[name] = GroupInfo(name, full, shard, grad, trained == TRAINED[1], (), own, update)

    def _unit(self, tokens: list[str]) -> None:
        if len(tokens) < 2 or tokens[1] != "reads":
            raise ValueError("a unit is written 'NAME reads GROUP ...'")
        name, groups = _unquoted(tokens[0]), [_unquoted(token) for token in tokens[2:]]
        if name in self.reads:
            raise ValueError(f"unit {name!r} is there twice")
        for group in groups:
            if group not in self.groups:
                raise ValueError(f"no group {group!r} stands above")
        ids = {group: number for number, group in enumerate(self.groups)}
        self.reads[name] = tuple(ids[group] for group in groups)

    def _ops(self, tokens: list[str]) -> None:
        if len(tokens) != 1:
            raise ValueError("ops is followed by their number")
        self.count = _number(tokens[0], "")


def _values(tokens: Sequence[str], keys: Sequence[str]) -> list[str]:
    if [token.partition("=")[0] for token in tokens] != list(keys):
        raise ValueError(f"expected {' '.join(f'{key}=...' for key in keys)}")
    return [token.partition("=")[2] for token in tokens]


def _read_reshard(text: str) -> bool | Keep:
    if text in ("true", "false"):
        return text == "true"
    if not (text.startswith("keep(") and text.endswith(")")):
        raise ValueError(f"reshard={text} is neither true nor false nor keep(...)")
    patterns, _, last = text[5:-1].rpartition("last=")
    try:
        units = json.loads(f"[{(patterns if last.isdecimal() else text[5:-1]).removesuffix(',')}]")
        return keep(*units, last=int(last) if last.isdecimal() else 0)
    except (ValueError, TypeError):
        raise ValueError(f"reshard={text}: patterns are written in quotes, then last=NUMBER") from None


def _read_transfer(tokens: list[str]) -> Transfer:
    kind, *ends = tokens[:4]
    rest = tokens[4:]
    late = rest[-1:] == ["late"]
    rest = rest[: len(rest) - late]
    axes = _unquoted(rest[-1]) if rest[-2:-1] == ["over"] else ""
    rest = rest[:-2] if axes else rest
    if ends[1:2] != ["->"] or not rest:
        raise ValueError(
            f"a transfer is {kind} FROM -> TO sent=BYTES, then staging=BYTES, over AXES and late if it is so"
        )
    sent, staging = (_number(value, "") for value in (*_values(rest, ("sent", "staging")[: len(rest)]), "0")[:2])
    return Transfer(kind, ends[0], ends[2], sent, staging, axes, late)


def _read_calls(tokens: list[str]) -> Iterator[Call]:
    position = 0
    while position < len(tokens):
        indexed = position + 1 < len(tokens) and tokens[position + 1].startswith("#")
        yield Call(_unquoted(tokens[position]), _number(tokens[position + 1], "#") if indexed else 0)
        position += 1 + indexed


def _read_op(tokens: list[str], expected: int, kinds: frozenset[str]) -> Op:
    number, *rest = tokens
    if _number(number, "") != expected:
        raise ValueError(f"op {expected} is due")
    words = 2 if rest[:1] == ["wait"] else 1
    kind, rest = " ".join(rest[:words]), rest[words:]
    if kind not in kinds:
        raise ValueError(f"{kind!r} is none of {', '.join(sorted(kinds))}")
    name = _unquoted(rest.pop(0)) if rest and rest[0][0] not in "#@" else None
    if name is None and kind not in STEP_KINDS:
        raise ValueError(f"{kind} needs a name")
    index = _number(rest.pop(0), "#") if rest and rest[0][0] == "#" else 0
    microbatch = _number(rest.pop(0), "@") if rest else 0
    if rest:
        raise ValueError(f"{' '.join(rest)!r} is left over")
    return Op(kind, name or "", index, microbatch)
