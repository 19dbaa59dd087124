"""The text form of a schedule, and the way back.

A header of one value a line (the policy, the step, the groups with their transfers, and in ``stage_text.py`` what the
step does), then one op a line. ``#1`` is a call's index where it is not 0, ``@1`` the microbatch where a step has
several, and a lone ``#`` begins a comment. Names that hold spaces or quotes are written as JSON strings. The text
holds everything, so its hash is the schedule's identity.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fshard.arguments import size_text
from fshard.reading.texts import parse_json
from fshard.schedule import schedule_refusals
from fshard.schedule.ops import LOCAL, STEP_KINDS, GroupInfo, Op, Program, microbatch_kinds, op_kinds
from fshard.schedule.policy import Keep, Policy, Secondary, keep, secondary
from fshard.schedule.stage_text import TOKEN, StageReader, quoted, read_name, read_number, read_values, stage_lines
from fshard.schedule.step_program import StepProgram
from fshard.schedule.transfers import KINDS, PeriodicTransfer, Transfer

FORMAT = "fshard schedule "
VERSION = "3"
"""The first line is the name of the format and its version."""

SEVERAL = "4"
"""The version of the text of a step of several passes."""

SIZES = ("full", "shard", "grad")
FURTHER = ("own", "update", "second", "left", "cast")
"""Sizes that only some groups have; see ``GroupInfo``. Copies of states are left out: ranks may differ in them."""
TURNS = ("every", "first", "delay")
"""The steps that have a transfer, where that is not each of them."""

TRAINED = ("frozen", "trainable")
"""The words for False and True."""


HEADER = ("policy", "step", "group", "ops")
"""The words that begin lines before the ops, besides transfers and what the step does."""

NAMELESS = STEP_KINDS | {LOCAL}
"""The kinds of ops that have no target."""

Parts = tuple[tuple[Op, ...], tuple[GroupInfo, ...], Program | StepProgram, Policy, int, bool]
"""The arguments of ``Schedule``."""


def render(parts: Parts) -> str:
    """The text form."""
    ops, _, program, _, accumulate, _ = parts
    microbatches = len(program.microbatches) if isinstance(program, StepProgram) else accumulate
    return "\n".join((*_header(parts), *op_lines(ops, microbatches))) + "\n"


def op_lines(ops: Sequence[Op], microbatches: int) -> list[str]:
    """One numbered line an op."""
    width, words = max(4, len(str(len(ops)))), max([len(op.kind) for op in ops], default=0)
    each = microbatch_kinds() if microbatches > 1 else frozenset()
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
                raise schedule_refusals.unreadable_schedule(number, line, str(problem)) from None
    return reader.parts(text.count("\n") + 1)


def _header(parts: Parts) -> Iterator[str]:
    ops, groups, program, policy, accumulate, train = parts
    yield FORMAT + (SEVERAL if isinstance(program, StepProgram) else VERSION)
    yield f"policy {policy}"
    count = f"stages={len(program.stages)}" if isinstance(program, StepProgram) else f"accumulate={accumulate}"
    yield f"step {'train' if train else 'eval'} {count}"
    width = max((len(quoted(group.name)) for group in groups), default=0)
    words = max((len(move.kind) for group in groups for move in group.transfers), default=0)
    for group in groups:
        sizes = (group.full_bytes, group.shard_bytes, group.grad_bytes)
        numbers = [f"{key}={size}" for key, size in zip(SIZES, sizes, strict=True)]
        rest = group.own_bytes, group.update_bytes, group.second_bytes, group.left_bytes, group.cast_bytes
        further = zip(FURTHER, rest, strict=True)
        line = [f"group {quoted(group.name):<{width}}", *numbers, TRAINED[group.trainable]]
        line += [f"{key}={size}" for key, size in further if size]
        yield f"{' '.join(line)} # {', '.join(map(size_text, sizes))}"
        yield from (_transfer(move, words) for move in group.transfers)
    yield from stage_lines(program, [quoted(group.name) for group in groups])
    yield f"ops {len(ops)}"


def _transfer(move: Transfer, width: int) -> str:
    line = f"  {move.kind:<{width}} {move.source} -> {move.target} sent={move.sent}"
    line += f" staging={move.staging}" if move.staging else ""
    if isinstance(move, PeriodicTransfer) and move.every > 1:
        line += f" every={move.every} first={move.first} delay={move.delay}"
    line += f" as {move.wire}" if move.wire else ""
    return line + (f" over {quoted(move.axes)}" if move.axes else "") + " late" * move.late


def _target(op: Op, shown: bool) -> str:
    name = "" if op.kind in NAMELESS and not op.target else f" {quoted(op.target)}"
    call = f" #{op.index}" if op.index else ""
    return name + call + (f" @{op.microbatch}" if shown or op.microbatch else "")


class _Reader:
    """Takes lines in order: the header's, then as many ops as it announces."""

    def __init__(self) -> None:
        self.stages: StageReader | None = None
        self.policy: Policy | None = None
        self.step: tuple[bool, int] | None = None
        self.groups: dict[str, GroupInfo] = {}
        self.ids: dict[str, int] = {}
        self.count: int | None = None
        self.ops: list[Op] = []
        self.kinds = op_kinds()

    def take(self, line: str, tokens: list[str]) -> None:
        """Read one line that is not empty."""
        word, *rest = tokens
        if self.stages is None:
            self.stages = _titled(line)
        elif self.count is not None:
            self.ops.append(_read_op(tokens, len(self.ops), self.kinds))
        elif word in self.stages.words:
            self.stages.take(word, rest, self.ids)
        elif word in KINDS:
            if not self.groups:
                raise ValueError("a transfer stands below its group")
            name, group = self.groups.popitem()
            self.groups[name] = replace(group, transfers=(*group.transfers, _read_transfer(tokens)))
        elif word in HEADER:
            getattr(self, f"_{word}")(rest)
        else:
            raise ValueError(f"{word!r} is none of {', '.join((*HEADER, *self.stages.words, *KINDS))}")

    def parts(self, last: int) -> Parts:
        """Everything read, once the text is over."""
        stages = self.stages or StageReader(several=False)
        if self.policy is None or self.step is None or self.count != len(self.ops):
            found = f"policy: {self.policy}, step: {self.step}, ops: {len(self.ops)} of {self.count}"
            raise schedule_refusals.unreadable_schedule(last, "", f"the text ends too early ({found})")
        train, count = self.step
        if stages.several and count != len(stages.stages):
            raise schedule_refusals.unreadable_schedule(
                last, "", f"the text has {len(stages.stages)} of {count} stages"
            )
        accumulate = 1 if stages.several else count
        return tuple(self.ops), tuple(self.groups.values()), stages.program(), self.policy, accumulate, train

    def _policy(self, tokens: list[str]) -> None:
        given = [token.partition("=")[0] for token in tokens]
        further = [key for key in ("accumulation", "pipeline", "graph") if key in given]
        keys = ("prefetch", "reduces", "reshard", "update", *further)
        prefetch, reduces, reshard, update, *rest = read_values(tokens, keys)
        more = dict(zip(further, rest, strict=True))
        if "pipeline" in more:
            more["pipeline"] = read_name(more["pipeline"])
        self.policy = Policy(read_number(prefetch), read_number(reduces), _read_reshard(reshard), update, **more)

    def _step(self, tokens: list[str]) -> None:
        key = "stages" if self.stages and self.stages.several else "accumulate"
        if len(tokens) != 2 or tokens[0] not in ("train", "eval"):
            raise ValueError(f"a step is written 'train {key}=1' or 'eval {key}=1'")
        self.step = tokens[0] == "train", read_number(read_values(tokens[1:], (key,))[0])

    def _group(self, tokens: list[str]) -> None:
        fixed = 2 + len(SIZES)
        further = {token.partition("=")[0]: token.partition("=")[2] for token in tokens[fixed:]}
        if len(tokens) < fixed or not set(further) <= set(FURTHER):
            raise ValueError(f"a group is NAME {' '.join(f'{key}=BYTES' for key in SIZES)} and a word")
        name, trained = read_name(tokens[0]), tokens[fixed - 1]
        if name in self.groups:
            raise ValueError(f"group {name!r} is there twice")
        full, shard, grad = (read_number(value) for value in read_values(tokens[1 : fixed - 1], SIZES))
        if trained not in TRAINED:
            raise ValueError(f"{trained!r} is neither {TRAINED[0]} nor {TRAINED[1]}")
        rest = [read_number(further.get(key, "0")) for key in FURTHER]
        self.ids[name] = len(self.ids)
        self.groups[name] = GroupInfo(name, full, shard, grad, trained == TRAINED[1], (), *rest)

    def _ops(self, tokens: list[str]) -> None:
        if len(tokens) != 1:
            raise ValueError("ops is followed by their number")
        self.count = read_number(tokens[0])


def _titled(line: str) -> StageReader:
    """Return what reads the rest of a text with this first line."""
    if line not in (FORMAT + VERSION, FORMAT + SEVERAL):
        version = line.removeprefix(FORMAT)
        other = f"; this text has version {version}: build the schedule anew" if version != line else ""
        several = f", or {FORMAT + SEVERAL!r} for a step of several passes"
        raise ValueError(f"the first line must be {FORMAT + VERSION!r}{several}{other}")
    return StageReader(several=line == FORMAT + SEVERAL)


def _read_reshard(text: str) -> bool | Keep | Secondary:
    if text in ("true", "false"):
        return text == "true"
    if text.startswith("secondary(") and text.endswith(")"):
        try:
            return secondary(*parse_json(f"[{text[10:-1]}]".encode(errors="surrogatepass")))
        except (ValueError, TypeError):
            raise ValueError(f"reshard={text}: axes are written in quotes") from None
    if not (text.startswith("keep(") and text.endswith(")")):
        raise ValueError(f"reshard={text} is neither true nor false nor keep(...) nor secondary(...)")
    patterns, _, last = text[5:-1].rpartition("last=")
    try:
        listed = (patterns if last.isdecimal() else text[5:-1]).removesuffix(",")
        units = parse_json(f"[{listed}]".encode(errors="surrogatepass"))
        return keep(*units, last=read_number(last) if last.isdecimal() else 0)
    except (ValueError, TypeError):
        raise ValueError(f"reshard={text}: patterns are written in quotes, then last=NUMBER") from None


def _read_transfer(tokens: list[str]) -> Transfer:
    kind, *ends = tokens[:4]
    rest, between = tokens[4:], kind in KINDS and KINDS[kind].stage == "between"
    late = rest[-1:] == ["late"]
    rest = rest[: len(rest) - late]
    axes = read_name(rest[-1]) if rest[-2:-1] == ["over"] else ""
    rest = rest[:-2] if axes else rest
    wire = rest[-1] if rest[-2:-1] == ["as"] else ""
    rest = rest[:-2] if wire else rest
    if ends[1:2] != ["->"] or not rest:
        raise ValueError(
            f"a transfer is {kind} FROM -> TO sent=BYTES, then staging=BYTES, every=STEPS first=STEP delay=STEPS, as "
            f"FORMAT, over AXES and late if it is so"
        )
    keys = (
        "sent",
        *(
            key
            for key in ("staging", *(TURNS if between else ()))
            if any(token.startswith(f"{key}=") for token in rest)
        ),
    )
    numbers = dict(zip(keys, map(read_number, read_values(rest, keys)), strict=True))
    maker = PeriodicTransfer if between else Transfer
    return maker(kind, ends[0], ends[2], axes=axes, late=late, wire=wire, **numbers)


def _read_op(tokens: list[str], expected: int, kinds: frozenset[str]) -> Op:
    number, *rest = tokens
    if read_number(number) != expected:
        raise ValueError(f"op {expected} is due")
    words = 2 if rest[:1] == ["wait"] else 1
    kind, rest = " ".join(rest[:words]), rest[words:]
    if kind not in kinds:
        raise ValueError(f"{kind!r} is none of {', '.join(sorted(kinds))}")
    name = read_name(rest.pop(0)) if rest and rest[0][0] not in "#@" else None
    if name is None and kind not in NAMELESS:
        raise ValueError(f"{kind} needs a name")
    index = read_number(rest.pop(0), "#") if rest and rest[0][0] == "#" else 0
    microbatch = read_number(rest.pop(0), "@") if rest else 0
    if rest:
        raise ValueError(f"{' '.join(rest)!r} is left over")
    return Op(kind, name or "", index, microbatch)
