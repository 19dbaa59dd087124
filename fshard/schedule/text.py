"""The text form of a schedule, and the way back.

A header of one value a line (the policy, the step, the groups, what each unit reads, the program), then one
op a line. ``#1`` is a call's index where it is not 0, ``@1`` the microbatch where a step has several, and a
lone ``#`` begins a comment. Names that hold spaces or quotes are written as JSON strings. The text holds
everything, so its hash is the schedule's identity.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from fshard import errors
from fshard.schedule.memory import size_text
from fshard.schedule.ops import KINDS, MICROBATCH_KINDS, STEP_KINDS, Call, GroupInfo, Op, Program
from fshard.schedule.policy import Keep, Policy, keep

TITLE = "fshard schedule 2"
"""The first line; the number is the format's."""

WIDTH = 100
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
AXES = re.compile(r"[\w+.-]*")
PLAIN = re.compile(r'[^\s"#@][^\s"]*')
SIZES = ("full", "shard", "grad", "stage", "sends")
UNSPACED = r"\u0020"
EXTRA = ("sum", "own", "offload", "visit", "over")
"""Values that only groups with replicas, with something in host memory, or with axes that are named, have."""
FLAGS = (("resident", "gathered"), ("unreduced", "reduced"), ("frozen", "trainable"))
"""The words for False and True of each flag of a group."""


class Parts(NamedTuple):
    """What a schedule is made of, in the order of its constructor."""

    ops: tuple[Op, ...]
    groups: tuple[GroupInfo, ...]
    program: Program
    policy: Policy
    accumulate: int
    train: bool


def render(parts: Parts) -> str:
    """The text form."""
    return "\n".join((*_header(parts), *op_lines(parts.ops, parts.accumulate))) + "\n"


def op_lines(ops: Sequence[Op], accumulate: int) -> list[str]:
    """One numbered line an op."""
    width = max(4, len(str(len(ops))))
    return [f"{number:>{width}} {_op(op, accumulate > 1)}" for number, op in enumerate(ops)]


def scan(text: str) -> Parts:
    """The parts of the schedule with this text form.

    Raises:
        ScheduleError: a line cannot be read; it is named by its number and text.
        PlanError: the values cannot be together.
    """
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
    groups, program = parts.groups, parts.program
    yield TITLE
    yield f"policy {parts.policy}"
    yield f"step {'train' if parts.train else 'eval'} accumulate={parts.accumulate}"
    width = max((len(_name(group.name)) for group in groups), default=0)
    for group in groups:
        sizes = (group.full_bytes, group.shard_bytes, group.grad_bytes, group.stage_bytes)
        sends = f"{group.gather_sent},{group.reduce_sent},{group.sum_sent},{group.spread_sent}"
        numbers = " ".join(f"{key}={size}" for key, size in zip(SIZES, (*sizes, sends), strict=True))
        flags = (group.gathered, group.reduced, group.trainable)
        words = " ".join(pair[flag] for pair, flag in zip(FLAGS, flags, strict=True))
        words += "".join(f" {word}" for word in _extra(group))
        yield f"group {_name(group.name):<{width}} {numbers} {words} # {', '.join(map(size_text, sizes))}"
    for unit, ids in program.reads.items():
        yield " ".join(("unit", _name(unit), "reads", *(_name(groups[i].name) for i in ids)))
    yield from _calls("forward", program.forward)
    yield from _calls("backward", program.backward)
    yield f"ops {len(parts.ops)}"


def _extra(group: GroupInfo) -> Iterator[str]:
    if group.sum_bytes:
        yield f"sum={group.sum_bytes}"
    if group.own_bytes:
        yield f"own={group.own_bytes}"
    if group.offload_sent:
        yield f"offload={group.offload_sent}"
    if group.visit_bytes:
        yield f"visit={group.visit_bytes}"
    if any(group.over):
        plain = all(map(AXES.fullmatch, group.over))
        text = ",".join(group.over) if plain else json.dumps(group.over, separators=(",", ":"))
        yield f"over={text.replace(' ', UNSPACED)}"


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


def _op(op: Op, several: bool) -> str:
    name = "" if op.kind in STEP_KINDS and not op.target else _name(op.target)
    call = f" #{op.index}" if op.index else ""
    shown = op.microbatch or (several and op.kind in MICROBATCH_KINDS)
    return f"{op.kind:<8} {name}{call}{f' @{op.microbatch}' if shown else ''}".rstrip()


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
        self.policy: Policy | None = None
        self.step: tuple[bool, int] | None = None
        self.count: int | None = None
        self.titled = False
        self.groups: dict[str, GroupInfo] = {}
        self.ids: dict[str, int] = {}
        self.reads: dict[str, tuple[int, ...]] = {}
        self.forward: list[Call] = []
        self.backward: list[Call] = []
        self.ops: list[Op] = []
        self.words: dict[str, Callable[[list[str]], None]] = {
            "policy": self._policy,
            "step": self._step,
            "group": self._group,
            "unit": self._unit,
            "forward": lambda tokens: self.forward.extend(_read_calls(tokens)),
            "backward": lambda tokens: self.backward.extend(_read_calls(tokens)),
            "ops": self._count,
        }

    def take(self, line: str, tokens: list[str]) -> None:
        """Read one line that is not empty."""
        if not self.titled:
            if line != TITLE:
                raise ValueError(f"the first line must be {TITLE!r}")
            self.titled = True
        elif self.count is not None:
            self.ops.append(_read_op(tokens, len(self.ops)))
        elif tokens[0] in self.words:
            self.words[tokens[0]](tokens[1:])
        else:
            raise ValueError(f"{tokens[0]!r} is none of {', '.join(self.words)}")

    def parts(self, last: int) -> Parts:
        """Everything read, once the text is over."""
        if self.policy is None or self.step is None or self.count != len(self.ops):
            found = f"policy: {self.policy}, step: {self.step}, ops: {len(self.ops)} of {self.count}"
            raise errors.unreadable_schedule(last, "", f"the text ends too early ({found})")
        train, accumulate = self.step
        program = Program(tuple(self.forward), tuple(self.backward), self.reads)
        return Parts(tuple(self.ops), tuple(self.groups.values()), program, self.policy, accumulate, train)

    def _policy(self, tokens: list[str]) -> None:
        keys = ("prefetch", "reduces", "reshard", "update", *(("accumulation",) if len(tokens) > 4 else ()))
        prefetch, reduces, reshard, update, *accumulation = _values(tokens, keys)
        self.policy = Policy(_number(prefetch, ""), _number(reduces, ""), _read_reshard(reshard), update, *accumulation)

    def _step(self, tokens: list[str]) -> None:
        if len(tokens) != 2 or tokens[0] not in ("train", "eval"):
            raise ValueError("a step is written 'train accumulate=1' or 'eval accumulate=1'")
        self.step = tokens[0] == "train", _number(_values(tokens[1:], ("accumulate",))[0], "")

    def _group(self, tokens: list[str]) -> None:
        fixed = 1 + len(SIZES) + len(FLAGS)
        extra = {token.partition("=")[0]: token.partition("=")[2] for token in tokens[fixed:]}
        if len(tokens) < fixed or not set(extra) <= set(EXTRA):
            raise ValueError(f"a group is NAME {' '.join(f'{key}=BYTES' for key in SIZES)} and three words")
        name = _unquoted(tokens[0])
        if name in self.groups:
            raise ValueError(f"group {name!r} is there twice")
        *values, sends = _values(tokens[1:6], SIZES)
        full, shard, grad, stage = (_number(value, "") for value in values)
        if sends.count(",") != 3:
            raise ValueError(f"sends={sends} is not of the form GATHER,REDUCE,SUM,SPREAD")
        gather, reduce, total, spread = (_number(value, "") for value in sends.split(","))
        for word, pair in zip(tokens[6:fixed], FLAGS, strict=True):
            if word not in pair:
                raise ValueError(f"{word!r} is neither {pair[0]} nor {pair[1]}")
        gathered, reduced, trainable = (word == pair[1] for word, pair in zip(tokens[6:fixed], FLAGS, strict=True))
        staged, own, offload, visit = (_number(extra.get(key, "0"), "") for key in EXTRA[:4])
        over = _read_over(extra["over"]) if "over" in extra else ("", "", "", "")
        self.ids[name] = len(self.groups)
        bare = GroupInfo(name, full, shard, grad, stage, gathered, reduced, trainable, gather, reduce, total, spread)
        held = replace(bare, sum_bytes=staged, own_bytes=own, over=over)
        self.groups[name] = replace(held, offload_sent=offload, visit_bytes=visit)

    def _unit(self, tokens: list[str]) -> None:
        if len(tokens) < 2 or tokens[1] != "reads":
            raise ValueError("a unit is written 'NAME reads GROUP ...'")
        name, groups = _unquoted(tokens[0]), [_unquoted(token) for token in tokens[2:]]
        if name in self.reads:
            raise ValueError(f"unit {name!r} is there twice")
        for group in groups:
            if group not in self.ids:
                raise ValueError(f"no group {group!r} stands above")
        self.reads[name] = tuple(self.ids[group] for group in groups)

    def _count(self, tokens: list[str]) -> None:
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


def _read_over(text: str) -> tuple[str, str, str, str]:
    try:
        gather, reduce, total, spread = map(str, json.loads(text) if text.startswith("[") else text.split(","))
    except (ValueError, TypeError):
        raise ValueError(f"over={text} is not of the form [GATHER,REDUCE,SUM,SPREAD]") from None
    return gather, reduce, total, spread


def _read_calls(tokens: list[str]) -> Iterator[Call]:
    position = 0
    while position < len(tokens):
        indexed = position + 1 < len(tokens) and tokens[position + 1].startswith("#")
        yield Call(_unquoted(tokens[position]), _number(tokens[position + 1], "#") if indexed else 0)
        position += 1 + indexed


def _read_op(tokens: list[str], expected: int) -> Op:
    number, *rest = tokens
    if _number(number, "") != expected:
        raise ValueError(f"op {expected} is due")
    if not rest or rest[0] not in KINDS:
        raise ValueError(f"{rest[0] if rest else ''!r} is none of {', '.join(sorted(KINDS))}")
    kind, *rest = rest
    name = _unquoted(rest.pop(0)) if rest and rest[0][0] not in "#@" else None
    if name is None and kind not in STEP_KINDS:
        raise ValueError(f"{kind} needs a name")
    index = _number(rest.pop(0), "#") if rest and rest[0][0] == "#" else 0
    microbatch = _number(rest.pop(0), "@") if rest else 0
    if rest:
        raise ValueError(f"{' '.join(rest)!r} is left over")
    return Op(kind, name or "", index, microbatch)
