"""The part of a pipelined step on the ranks of one position: its calls, the order of its portions, and its messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fshard.pipeline.orders import Action, PipelineOrder
from fshard.pipeline.staged_trace import StagedProgram, ValueEdge
from fshard.schedule.ops import ROOT, Call, GroupInfo, Program
from fshard.schedule.step_program import Edge, Pass, Portion, StepProgram
from fshard.schedule.transfers import EDGE, Transfer
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import StageTable


class Lane(NamedTuple):
    """A way between two stages in one direction: its messages come in one order on both sides.

    Attributes:
        sender: the position that sends.
        receiver: the position that receives.
        source: the stage that sends.
        target: the stage that receives.
    """

    sender: int
    receiver: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source}>{self.target}"


class MessageKind(NamedTuple):
    """The messages of one edge in one direction.

    Attributes:
        sender: the position that sends them.
        receiver: the position that receives them.
        gradient: whether they are gradients, which go back.
    """

    edge: ValueEdge
    sender: int
    receiver: int
    gradient: bool

    @property
    def lane(self) -> Lane:
        """Its way."""
        ends = (self.edge.source, self.edge.target)
        return Lane(self.sender, self.receiver, *(ends[::-1] if self.gradient else ends))


@dataclass(frozen=True)
class RankProgram:
    """The part of a step that the ranks of one position do.

    Attributes:
        position: on the axis of stages.
        stages: the numbers of its stages.
        program: its calls, by the groups of its own plan.
        infos: its groups, with one for each edge behind those of the plan.
        turns: what it runs, in order, each with its portion of the step; no action for the end of a microbatch alone.
        messages: what goes over each edge, by the name of its group.
    """

    position: int
    stages: tuple[int, ...]
    program: Program
    step: StepProgram
    infos: tuple[GroupInfo, ...]
    turns: tuple[tuple[Action | None, Portion], ...]
    messages: Mapping[str, MessageKind]


def rank_program(
    staged: StagedProgram,
    plan: Plan,
    infos: Sequence[GroupInfo],
    order: PipelineOrder,
    position: int,
    train: bool,
    most: int = 1,
) -> RankProgram:
    """Return what the ranks of a position do.

    Args:
        staged: the program, cut into stages.
        plan: the plan of what they hold.
        infos: its groups.
        order: the order of the pipeline.
        train: whether there are gradients.
        most: the messages that may be under way on an edge.
    """
    whole = plan.whole
    assert whole is not None and whole.stages is not None
    table, local = whole.stages, whole.stages.at(position)
    program = _program(staged, plan, whole, local, any(action.kind == "I" for action in order.ranks[position]))
    spans = _Spans(staged, program, local)
    turns = _turns(order.ranks[position], spans, order.microbatches)
    messages = _messages(staged, table, position)
    edges, more = [], list[GroupInfo]()
    for name, kind in messages.items():
        edges.append(Edge(len(infos) + len(more), spans.at(kind, position), most))
        more.append(_info(name, kind, position, table.axis))
    own = {g: g for g, info in enumerate(infos) if info.trainable and train}
    each = Pass(program, order.microbatches, own, tuple([portion for _, portion in turns]), tuple(edges))
    step = StepProgram((each,), dict(own))
    return RankProgram(position, local, program, step, (*infos, *more), turns, messages)


def _turns(actions: Sequence[Action], spans: "_Spans", microbatches: int) -> tuple[tuple[Action | None, Portion], ...]:
    """The actions of a rank with their portions; the end of a microbatch is part of its last one, if it can be."""
    parted, turns = spans.program.parted, list[tuple[Action | None, Portion]]()
    for action in actions:
        whole = parted and action.kind == "B"
        for one in [replace(action, kind="I"), replace(action, kind="W")] if whole else [action]:
            first, end = spans.of(one)
            if first < end:
                turns.append((one, Portion(one.microbatch, first, end)))
    last = len(spans.program.computes) - 1
    for microbatch in range(microbatches):
        at = max(at for at, (_, portion) in enumerate(turns) if portion.microbatch == microbatch)
        latest, portion = turns[at]
        if portion.end == last:
            turns[at] = latest, portion._replace(end=last + 1)
        else:
            turns.insert(at + 1, (None, Portion(microbatch, last, last + 1)))
    return tuple(turns)


def _program(staged: StagedProgram, plan: Plan, whole: Plan, local: Sequence[int], parted: bool) -> Program:
    """The calls of some stages: forwards stage by stage, and backwards in the opposite order of stages."""
    ids = {group.name: group.id for group in plan.groups}
    stage_of = dict(zip(staged.calls, staged.stages, strict=True))
    traced = staged.trace.program
    forward = [call for stage in local for call in traced.forward if stage_of[call] == stage]
    backward = [call for stage in reversed(local) for call in traced.backward if stage_of[call] == stage]
    units = dict.fromkeys(call.unit for call in forward)
    reads = {unit: tuple([ids[whole.groups[group].name] for group in traced.reads[unit]]) for unit in units}
    places = plan.places()
    outside = dict.fromkeys(path for stage in local for path in staged.outside[stage])
    reads[ROOT] = tuple(sorted({places[path][0].id for path in outside}))
    return Program(tuple(forward), tuple(backward), reads, parted)


class _Spans:
    """The places of the stages of a position among the compute ops of a microbatch."""

    def __init__(self, staged: StagedProgram, program: Program, local: Sequence[int]) -> None:
        stage_of = dict(zip(staged.calls, staged.stages, strict=True))
        self.spans: dict[tuple[int, str], tuple[int, int]] = {}
        self.staged, self.program = staged, program
        at = 1
        for stage in local:
            end = at + sum(stage_of[call] == stage for call in program.forward)
            self.spans[stage, "F"] = (0 if stage == local[0] else at, end)
            at = end
        for kind in ("I", "W") if program.parted else ("B",):
            for stage in reversed(local):
                end = at + sum(stage_of[call] == stage for call in program.backward)
                self.spans[stage, kind] = (at, end)
                at = end
        self.backward = "I" if program.parted else "B"
        self.calls = {call: 1 + number for number, call in enumerate(program.forward)}

    def of(self, action: Action) -> tuple[int, int]:
        """The compute ops of an action."""
        return self.spans[action.stage, action.kind]

    def at(self, kind: MessageKind, position: int) -> int:
        """The compute op after which a message is sent, or before which it is received."""
        edge = kind.edge
        if not kind.gradient:
            if kind.sender == position:
                return self.calls[self.staged.calls[edge.call]]
            return self.spans[edge.target, "F"][0]
        if kind.receiver == position:
            return self.spans[edge.source, self.backward][0]
        return self.spans[edge.target, self.backward][1] - 1


def _messages(staged: StagedProgram, table: StageTable, position: int) -> dict[str, MessageKind]:
    """The messages that a position sends and receives, by name."""
    found = {}
    for edge in staged.edges:
        source, target = table.homes[edge.source], table.homes[edge.target]
        if source == target or position not in (source, target):
            continue
        call: Call = staged.calls[edge.call]
        found[f"{call}:{edge.output}>{edge.target}"] = MessageKind(edge, source, target, False)
        if edge.grad:
            found[f"{call}:{edge.output}<{edge.target}"] = MessageKind(edge, target, source, True)
    return found


def _info(name: str, kind: MessageKind, position: int, axis: str) -> GroupInfo:
    """The group that stands for an edge. What waits to be sent is an activation still, but for a gradient."""
    nbytes = kind.edge.nbytes
    move = Transfer("receive", EDGE, EDGE, 0, nbytes, axis)
    if kind.sender == position:
        move = replace(move, kind="send", sent=nbytes, staging=nbytes if kind.gradient else 0)
    return GroupInfo(name, 0, 0, 0, False, (move,))
