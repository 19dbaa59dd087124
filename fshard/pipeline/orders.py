"""The order of a pipeline, as a value: which actions each rank runs, one after the other.

Its text has one lane a rank, in columns of time steps: an action stands where it would run if all took one unit of
time. ``parse`` reads it back; blanks in a lane only show idle time.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fshard.pipeline import pipeline_refusals
from fshard.pipeline.order_steps import Lists, play
from fshard.pipeline.pipeline_actions import Action, read_action
from fshard.schedule.stage_text import TOKEN, quoted, read_name, read_number

__all__ = ["Action", "PipelineOrder", "lanes", "parse"]


@dataclass(frozen=True, repr=False)
class PipelineOrder:
    """The actions of all ranks of a pipeline.

    ``make_order`` makes the orders that have names. The constructor only sees that its parts belong together;
    ``check_order`` sees that the ranks can run them.

    Args:
        name: what the order is called.
        homes: for each stage, the position on the stage axis (the rank) that holds it.
        ranks: for each rank, its actions in order.

    Raises:
        PlanError: the name is empty, there is no stage or rank, or a home is no rank.

    >>> order = PipelineOrder("mine", (0,), ((Action(0, "F", 0), Action(0, "B", 0)),))
    >>> print(order)
    pipeline mine
    homes 0
    rank 0  0F0 0B0
    <BLANKLINE>
    >>> parse(str(order)) == order
    True
    """

    name: str
    homes: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "homes", tuple(self.homes))
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))
        if problems := [*_problems(self.name, self.homes, self.ranks)]:
            raise pipeline_refusals.bad_lanes(problems)

    @property
    def stages(self) -> int:
        """Count the stages.

        >>> PipelineOrder("mine", (0, 1, 1, 0), ((), ())).stages
        4
        """
        return len(self.homes)

    @property
    def microbatches(self) -> int:
        """Count the microbatches.

        >>> PipelineOrder("mine", (0,), ((Action(0, "F", 0), Action(0, "F", 1)),)).microbatches
        2
        """
        return max([action.microbatch + 1 for lane in self.ranks for action in lane], default=0)

    @property
    def chunks(self) -> int:
        """Count the stages of the rank that has the most.

        >>> PipelineOrder("mine", (0, 1, 1, 0), ((), ())).chunks
        2
        """
        return max(Counter(self.homes).values())

    def __str__(self) -> str:
        head = [f"pipeline {quoted(self.name)}", f"homes {' '.join(map(str, self.homes))}"]
        return "\n".join([*head, *lanes(self.ranks, self.stages)]) + "\n"

    def __repr__(self) -> str:
        sizes = f"{self.stages} stages on {len(self.ranks)} ranks, {self.microbatches} microbatches"
        return f"<PipelineOrder {self.name}, {sizes}>"


def lanes(ranks: Lists, stages: int, at: tuple[int, int] | None = None, around: int | None = None) -> list[str]:
    """Draw one line a rank, in columns of time steps of one unit an action.

    Args:
        ranks: the actions of each rank.
        stages: the number of stages.
        at: a rank and a position in its list, whose action is put in brackets.
        around: the number of columns to draw before and after that one; all by default.

    Returns:
        The lines. Actions that can never run stand behind those that can, without gaps.

    >>> print(*lanes([[Action(0, "F", 0), Action(0, "F", 1)], [Action(1, "F", 0)]], 2, at=(1, 0)), sep="\\n")
    rank 0   0F0   0F1
    rank 1        [1F0]
    """
    columns = _columns(ranks, stages)
    middle = columns[at[0]][at[1]] if at else 0
    first, last = (0, math.inf) if around is None else (max(middle - around, 0), middle + around)
    width = max([len(str(action)) for lane in ranks for action in lane], default=0) + 2 * (at is not None)
    rows = []
    for rank, lane in enumerate(ranks):
        row = f"rank {rank:>{len(str(len(ranks) - 1))}} "
        begin = len(row)
        for number, (action, column) in enumerate(zip(lane, columns[rank], strict=True)):
            if first <= column <= last:
                cell = f"[{action}]" if (rank, number) == at else f" {action}" if at else str(action)
                row = f"{row:<{begin + (column - first) * (width + 1)}} {cell}"
        rows.append(row.rstrip())
    return rows


def _columns(ranks: Lists, stages: int) -> list[list[int]]:
    """The time step of each action of each rank."""
    found = []
    for lane, starts in zip(ranks, play(ranks, stages, lambda action: 1.0).starts, strict=True):
        steps = [int(start) for start in starts]
        rest = range(len(lane) - len(steps))
        found.append([*steps, *[(steps[-1] if steps else -1) + 1 + number for number in rest]])
    return found


def parse(text: str) -> PipelineOrder:
    """Read the text form of an order: ``parse(str(order)) == order``.

    Args:
        text: a line ``pipeline NAME``, a line ``homes`` with the rank of each stage, and a line ``rank R`` with its
            actions for each rank. Blanks, empty lines and what follows a lone ``#`` do not count.

    Returns:
        The order.

    Raises:
        ScheduleError: a line cannot be read; it is named by its number and text.
        PlanError: the values cannot be together.

    >>> parse("pipeline mine\\nhomes 0\\nrank 0  0F0 0B0").ranks[0][1]
    Action(stage=0, kind='B', microbatch=0)
    """
    found: list[str] = []
    homes: list[int] = []
    ranks: list[list[Action]] = []
    for number, line in enumerate(text.split("\n"), 1):
        tokens = TOKEN.findall(line)
        tokens = tokens[: tokens.index("#")] if "#" in tokens else tokens
        try:
            _take(tokens, found, homes, ranks)
        except ValueError as problem:
            raise pipeline_refusals.unreadable_order(number, line, str(problem)) from None
    if not ranks:
        raise pipeline_refusals.unreadable_order(text.count("\n") + 1, "", "the text is over before a line 'rank 0'")
    return PipelineOrder(found[0], tuple(homes), tuple(map(tuple, ranks)))


def _take(tokens: list[str], found: list[str], homes: list[int], ranks: list[list[Action]]) -> None:
    """Read the tokens of one line."""
    if not tokens:
        return
    due = "pipeline" if not found else "homes" if not homes else "rank"
    if tokens[0] != due or len(tokens) < 2 or (due == "pipeline" and len(tokens) > 2):
        raise ValueError(f"a line '{due} {'NAME' if due == 'pipeline' else 'NUMBER ...'}' is due")
    if due == "pipeline":
        found.append(read_name(tokens[1]))
    elif due == "homes":
        homes += [read_number(token) for token in tokens[1:]]
    elif read_number(tokens[1]) != len(ranks):
        raise ValueError(f"the line of rank {len(ranks)} is due")
    else:
        ranks.append([read_action(token) for token in tokens[2:]])


def _problems(name: object, homes: Sequence[object], ranks: Lists) -> Iterator[str]:
    """List what is wrong with the parts of an order."""
    if not isinstance(name, str) or not name:
        yield f"name={name!r} is no name"
    if not homes or not ranks:
        yield f"{len(homes)} stages on {len(ranks)} ranks"
    for stage, home in enumerate(homes):
        if type(home) is not int or not 0 <= home < len(ranks):
            yield f"stage {stage} is on rank {home!r} of {len(ranks)}"
