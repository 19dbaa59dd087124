"""The stages of a step as lines of a schedule's text, made of names, numbers and ``key=value``, and the way back.

A program is what its units read, its calls, and those that receive gradients. A step of several passes has such lines
for each, below a line that begins the pass, and further lines for the code between passes and for pending updates::

    pass accumulate=1 gradients=given
      fills a -> a.again
    unit a reads a
    forward a
    backward a
    hosted a ahead=1
    local
      gradients a.again
    update a from a.again
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Literal

from fshard.reading.texts import parse_json
from fshard.schedule.ops import Call, Program
from fshard.schedule.step_program import Edge, Local, Pass, Portion, StepProgram

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
PLAIN = re.compile(r'[^\s"#@][^\s"]*')
WIDTH = 100


def quoted(name: str) -> str:
    """A name as one token.

    >>> quoted("blocks.0"), quoted("a b")
    ('blocks.0', '"a b"')
    """
    return name if PLAIN.fullmatch(name) and name.isprintable() else json.dumps(name)


def read_name(token: str) -> str:
    """The name that a token is.

    Raises:
        ValueError: it is none.
    """
    if token.startswith('"'):
        return str(parse_json(token.encode(errors="surrogatepass")))
    if not PLAIN.fullmatch(token):
        raise ValueError(f"{token!r} is not a name")
    return token


def read_number(token: str, prefix: str = "") -> int:
    """The number behind a prefix.

    Raises:
        ValueError: it is no such token.
    """
    if not re.fullmatch(re.escape(prefix) + r"-?[0-9]{1,100}", token, re.ASCII):
        raise ValueError(f"{token[:40]!r} is not of the form {prefix}NUMBER, of at most 100 digits")
    return int(token[len(prefix) :])


def read_values(tokens: Sequence[str], keys: Sequence[str]) -> list[str]:
    """The values of tokens that are ``key=value``, of these keys in this order.

    Raises:
        ValueError: the keys are others.
    """
    if [token.partition("=")[0] for token in tokens] != list(keys):
        raise ValueError(f"expected {' '.join(f'{key}=...' for key in keys)}")
    return [token.partition("=")[2] for token in tokens]


def wrapped(word: str, items: Iterable[str]) -> Iterator[str]:
    """Lines of a word and items, as many as fit; none without items.

    >>> list(wrapped("forward", ["a", "b"]))
    ['forward a b']
    """
    line = word
    for item in items:
        if len(line) + len(item) + 1 > WIDTH and line != word:
            yield line
            line = word
        line += f" {item}"
    if line != word:
        yield line


PROGRAM = ("unit", "forward", "backward", "parted", "hosted")
"""The words that begin lines of a program."""

LOCAL = tuple([each.name for each in fields(Local)])
STAGES = ("pass", "fills", "local", *LOCAL, "update", "order", "edges")
"""The words that begin further lines of a step of several passes."""

GRADIENTS = ("own", "given")
"""Of a pass: each group fills its own, or ``fills`` says which one it fills."""


def stage_lines(program: Program | StepProgram, names: Sequence[str]) -> Iterator[str]:
    """Return what a step does. ``names`` are those of groups, as tokens."""
    if isinstance(program, Program):
        yield from _program_lines(program, names)
        return
    for stage in program.stages:
        if isinstance(stage, Local):
            yield "local"
            for word in LOCAL:
                yield from wrapped(f"  {word}", [names[g] for g in getattr(stage, word)])
            continue
        yield f"pass accumulate={stage.accumulate} gradients={GRADIENTS[stage.gradients is not None]}"
        yield from wrapped("  order", [":".join(map(str, portion)) for portion in stage.order])
        yield from wrapped("  edges", [f"{names[edge.group]} #{edge.at}{_most(edge)}" for edge in stage.edges])
        yield from (f"  fills {names[read]} -> {names[group]}" for read, group in (stage.gradients or {}).items())
        yield from _program_lines(stage.program, names)
    for group, gradient in program.updates.items():
        yield f"update {names[group]}" + ("" if gradient is None else f" from {names[gradient]}")


def _program_lines(program: Program, names: Sequence[str]) -> Iterator[str]:
    for unit, ids in program.reads.items():
        yield " ".join(("unit", quoted(unit), "reads", *(names[i] for i in ids)))
    for word, calls in (("forward", program.forward), ("backward", program.backward)):
        yield from wrapped(word, [quoted(call.unit) + (f" #{call.index}" if call.index else "") for call in calls])
    if program.parted:
        yield "parted" + " taped" * (program.parted == "taped")
    yield from (f"hosted {quoted(unit)} ahead={ahead}" for unit, ahead in program.hosted.items())


class _PassLines:
    """Lines of a pass that were read."""

    def __init__(self, accumulate: int, given: bool) -> None:
        self.accumulate = accumulate
        self.gradients: dict[int, int] | None = {} if given else None
        self.order: list[Portion] = []
        self.edges: list[Edge] = []
        self.reads: dict[str, tuple[int, ...]] = {}
        self.calls: dict[str, list[Call]] = {"forward": [], "backward": []}
        self.parted: bool | Literal["taped"] = False
        self.hosted: dict[str, int] = {}

    def program(self) -> Program:
        calls = [tuple(self.calls[word]) for word in ("forward", "backward")]
        return Program(calls[0], calls[1], self.reads, self.parted, self.hosted)


class StageReader:
    """Takes the lines that say what a step does, in order.

    Args:
        several: whether it is a step of several passes. Else the lines are those of one program.
    """

    def __init__(self, several: bool) -> None:
        self.several = several
        self.stages: list[_PassLines | dict[str, list[int]]] = [] if several else [_PassLines(1, False)]
        self.updates: dict[int, int | None] = {}
        self.words = (*PROGRAM, *(STAGES if several else ()))

    def take(self, word: str, tokens: list[str], ids: Mapping[str, int]) -> None:
        """Read one line. ``ids`` are those of groups, by name.

        Raises:
            ValueError: it cannot be read.
        """
        if word == "pass":
            accumulate, gradients = read_values(tokens, ("accumulate", "gradients"))
            if gradients not in GRADIENTS:
                raise ValueError(f"gradients={gradients} is neither {GRADIENTS[0]} nor {GRADIENTS[1]}")
            self.stages.append(_PassLines(read_number(accumulate), gradients == GRADIENTS[1]))
        elif word == "local":
            if tokens:
                raise ValueError("local stands alone: what it reads and makes is below")
            self.stages.append({name: [] for name in LOCAL})
        elif word == "update":
            self._update(tokens, ids)
        else:
            self._detail(word, tokens, ids)

    def program(self) -> Program | StepProgram:
        """Everything read, once the text is over."""
        made: list[Pass | Local] = []
        for lines in self.stages:
            if isinstance(lines, dict):
                made.append(Local(**{name: tuple(groups) for name, groups in lines.items()}))
            elif not self.several:
                return lines.program()
            else:
                order, edges = tuple(lines.order), tuple(lines.edges)
                made.append(Pass(lines.program(), lines.accumulate, lines.gradients, order, edges))
        return StepProgram(tuple(made), self.updates)

    def _detail(self, word: str, tokens: list[str], ids: Mapping[str, int]) -> None:
        """A line below that of a pass or a local."""
        stage = self.stages[-1] if self.stages else None
        if word in LOCAL:
            if not isinstance(stage, dict):
                raise ValueError(f"{word} stands below a local")
            stage[word] += _groups(tokens, ids)
        elif not isinstance(stage, _PassLines):
            raise ValueError(f"{word} stands below a pass")
        elif word == "unit":
            _read_unit(stage, tokens, ids)
        elif word == "parted":
            if tokens not in ([], ["taped"]):
                raise ValueError("backwards in two parts are written 'parted', or 'parted taped'")
            stage.parted = "taped" if tokens else True
        elif word == "hosted":
            _read_hosted(stage, tokens)
        elif word == "fills":
            _read_filled(stage, tokens, ids)
        elif word == "order":
            stage.order += [_read_portion(token) for token in tokens]
        elif word == "edges":
            stage.edges += _read_edges(tokens, ids)
        else:
            stage.calls[word].extend(_read_calls(tokens))

    def _update(self, tokens: list[str], ids: Mapping[str, int]) -> None:
        if len(tokens) not in (1, 3) or tokens[1:2] not in ([], ["from"]):
            raise ValueError("an update is written 'GROUP from GROUP', or 'GROUP' where its gradient lies elsewhere")
        group, *gradient = _groups(tokens[::2], ids)
        if group in self.updates:
            raise ValueError(f"group {tokens[0]} is updated twice")
        self.updates[group] = gradient[0] if gradient else None


def _groups(tokens: Sequence[str], ids: Mapping[str, int]) -> list[int]:
    names = [read_name(token) for token in tokens]
    for name in names:
        if name not in ids:
            raise ValueError(f"no group {name!r} stands above")
    return [ids[name] for name in names]


def _read_unit(stage: _PassLines, tokens: list[str], ids: Mapping[str, int]) -> None:
    if len(tokens) < 2 or tokens[1] != "reads":
        raise ValueError("a unit is written 'NAME reads GROUP ...'")
    name = read_name(tokens[0])
    if name in stage.reads:
        raise ValueError(f"unit {name!r} is there twice")
    stage.reads[name] = tuple(_groups(tokens[2:], ids))


def _read_filled(stage: _PassLines, tokens: list[str], ids: Mapping[str, int]) -> None:
    if len(tokens) != 3 or tokens[1] != "->" or stage.gradients is None:
        raise ValueError("a gradient is written 'fills GROUP -> GROUP', below a pass with gradients=given")
    read, group = _groups(tokens[::2], ids)
    if read in stage.gradients:
        raise ValueError(f"group {tokens[0]} fills two gradients")
    stage.gradients[read] = group


def _read_hosted(stage: _PassLines, tokens: list[str]) -> None:
    if len(tokens) != 2:
        raise ValueError("a unit that keeps activations on the host is written 'NAME ahead=COMPUTES'")
    name, (ahead,) = read_name(tokens[0]), read_values(tokens[1:], ("ahead",))
    if name in stage.hosted:
        raise ValueError(f"unit {name!r} is hosted twice")
    stage.hosted[name] = read_number(ahead)


def _read_portion(token: str) -> Portion:
    numbers = token.split(":")
    if len(numbers) != 3:
        raise ValueError(f"{token!r}: a portion is written MICROBATCH:FIRST:END")
    return Portion(*map(read_number, numbers))


def _read_edges(tokens: list[str], ids: Mapping[str, int]) -> Iterator[Edge]:
    if len(tokens) % 2:
        raise ValueError("edges are written GROUP #OP, or GROUP #OP:MESSAGES, one behind the other")
    for group, token in zip(_groups(tokens[::2], ids), tokens[1::2], strict=True):
        at, _, most = token.partition(":")
        yield Edge(group, read_number(at, "#"), read_number(most or "1"))


def _most(edge: Edge) -> str:
    return f":{edge.most}" if edge.most > 1 else ""


def _read_calls(tokens: list[str]) -> Iterator[Call]:
    position = 0
    while position < len(tokens):
        indexed = position + 1 < len(tokens) and tokens[position + 1].startswith("#")
        yield Call(read_name(tokens[position]), read_number(tokens[position + 1], "#") if indexed else 0)
        position += 1 + indexed
