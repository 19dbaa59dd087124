"""The CSV files of PyTorch's pipelines: a row a rank, a cell a time step.

==========================================  =========================================================================
cell                                        meaning
==========================================  =========================================================================
``0F1`` ``0B1`` ``0I1`` ``0W1``             an action, kept
``(0F1;1B2)OVERLAP_F_B``                    several actions that may run together, kept one after the other
``0SEND_F1`` ``1RECV_F1``                   what stage 0 sends after its F, and stage 1 receives before its own
``1SEND_B1`` ``0RECV_B1``                   what stage 1 sends after its B or I, and stage 0 receives before its own
``0UNSHARD`` ``0RESHARD`` ``0REDUCE_GRAD``  the parameters or gradients of a stage
empty                                       idle time
==========================================  =========================================================================

Communication is checked and dropped: fshard places it itself.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fshard.pipeline import pipeline_refusals
from fshard.pipeline.orders import PipelineOrder
from fshard.pipeline.pipeline_actions import KINDS, Action, Result, needs, results

MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
STORES = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
OVERLAP = "OVERLAP_F_B"
KNOWN = f"{', '.join((*KINDS, *MESSAGES, *STORES))} and (...;...){OVERLAP}"

WORD = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{1,9})?", re.ASCII)
TOGETHER = re.compile(rf"\((.*)\){OVERLAP}")


@dataclass(frozen=True)
class CsvCell:
    """A cell of a file: an action, or communication of a stage.

    Attributes:
        row, column: its place, from 1.
        text: what stands there.
        word: what it does.
        microbatch: the microbatch; -1 for what concerns all.

    >>> next(_cells("0F1,1SEND_B0", 1)).word
    'F'
    """

    row: int
    column: int
    text: str
    stage: int
    word: str
    microbatch: int


Home = tuple[int, CsvCell]
"""The rank of a stage, and a cell that says so."""


def parse_csv(text: str, name: str = "csv") -> PipelineOrder:
    """Read an order from the text of a CSV file of PyTorch's pipelines.

    Args:
        text: the rows, with communication or without. Rows may differ in length.
        name: what the order is called.

    Returns:
        The actions of each row in their order. The home of a stage is the row that has its actions.

    Raises:
        ScheduleError: a cell is unknown or contradicts others; it is named by its row and column, from 1. Where there
            is any send or receive, each must have its other end, and each dependency between ranks must have both.

    >>> print(parse_csv("0F0,0SEND_F0,0RECV_B0,0B0\\n1RECV_F0,1F0,1B0,1SEND_B0", name="mine"))
    pipeline mine
    homes 0 1
    rank 0  0F0         0B0
    rank 1      1F0 1B0
    <BLANKLINE>
    """
    rows = [list(_cells(line, number)) for number, line in enumerate(text.splitlines(), 1)]
    homes = _homes(rows)
    ranks = [[Action(cell.stage, cell.word, cell.microbatch) for cell in row if cell.word in KINDS] for row in rows]
    order = PipelineOrder(name, homes, tuple(map(tuple, ranks)))
    if any(cell.word in MESSAGES for row in rows for cell in row):
        _check_messages(rows, order)
    return order


def _cells(line: str, row: int) -> Iterator[CsvCell]:
    """Read the cells of a row; those of actions that may run together one by one."""
    for column, given in enumerate(line.split(","), 1):
        text = given.strip()
        if not text:
            continue
        together = TOGETHER.fullmatch(text)
        for part in together[1].split(";") if together else [text]:
            match = WORD.fullmatch(part.strip())
            if match is None or match[2] not in (KINDS if together else (*KINDS, *MESSAGES, *STORES)):
                raise pipeline_refusals.bad_cell(row, column, text, f"unknown action: the known ones are {KNOWN}")
            if (match[3] is None) != (match[2] in STORES):
                problem = f"{match[2]} has {'no' if match[3] else 'a'} microbatch"
                raise pipeline_refusals.bad_cell(row, column, text, f"{problem}: the known ones are {KNOWN}")
            yield CsvCell(row, column, text, int(match[1]), match[2], int(match[3] or -1))


def _homes(rows: list[list[CsvCell]]) -> tuple[int, ...]:
    """Find the rank of each stage."""
    homes: dict[int, Home] = {}
    for rank, row in enumerate(rows):
        for cell in row:
            if cell.word in KINDS:
                home, first = homes.setdefault(cell.stage, (rank, cell))
                if home != rank:
                    problem = f"stage {cell.stage} is on rank {home}, where {first.text!r} is in column {first.column}"
                    raise _refused(cell, f"{problem}: move the cell to that row")
    if not homes or max(homes) >= len(homes):
        lacking = next(stage for stage in range(len(homes) + 1) if stage not in homes)
        raise pipeline_refusals.bad_table(f"there is no action of stage {lacking}")
    for rank, row in enumerate(rows):
        for cell in row:
            if cell.stage not in homes or homes[cell.stage][0] != rank:
                where = f"on rank {homes[cell.stage][0]}" if cell.stage in homes else f"not among {len(homes)} stages"
                raise _refused(cell, f"stage {cell.stage} is {where}, and this is rank {rank}")
    return tuple([homes[stage][0] for stage in range(len(homes))])


def _check_messages(rows: list[list[CsvCell]], order: PipelineOrder) -> None:
    """Hold sends and receives against the dependencies between ranks."""
    cells = [cell for row in rows for cell in row]
    ends: dict[tuple[str, Result], CsvCell] = {}
    for cell in [cell for cell in cells if cell.word in MESSAGES]:
        before = ends.setdefault((cell.word[:4], _message(cell)), cell)
        if before is not cell:
            raise _refused(cell, f"the same is in column {before.column}")
    due = dict(_crossing(cells, order))
    for result, (maker, user) in due.items():
        _check_message(result, maker, user, ends)
    for (end, result), cell in ends.items():
        if result not in due:
            raise _refused(cell, f"no action of another rank needs this {'message' if end == 'SEND' else 'receive'}")


def _crossing(cells: list[CsvCell], order: PipelineOrder) -> Iterator[tuple[Result, tuple[CsvCell, CsvCell]]]:
    """Find the results that go from one rank to another, with the action that makes it and the one that needs it."""
    actions = [(cell, Action(cell.stage, cell.word, cell.microbatch)) for cell in cells if cell.word in KINDS]
    computed = {result: cell for cell, action in actions for result in results(action)}
    for cell, action in actions:
        for result in needs(action, order.stages):
            if order.homes[result[1]] != order.homes[cell.stage]:
                if result not in computed:
                    word = "F" if result[0] == "F" else "B or I"
                    raise _refused(
                        cell, f"it needs a {word} of stage {result[1]} for microbatch {result[2]}, and no row has one"
                    )
                yield result, (computed[result], cell)


def _check_message(result: Result, maker: CsvCell, user: CsvCell, ends: dict[tuple[str, Result], CsvCell]) -> None:
    """Hold the two ends of one message against the action that makes it and the one that needs it."""
    word = "F" if result[0] == "F" else "B"
    for end, action in (("SEND", maker), ("RECV", user)):
        cell, text = ends.get((end, result)), f"{action.stage}{end}_{word}{action.microbatch}"
        where = f"{text} is due {'after' if end == 'SEND' else 'before'} it, on the same rank"
        if cell is None:
            raise _refused(action, f"{where}, and is not there")
        if (cell.column < action.column) == (end == "SEND"):
            raise _refused(action, f"{where}, and is in column {cell.column}")


def _message(cell: CsvCell) -> Result:
    """The result that a send or a receive carries."""
    kind = "F" if cell.word.endswith("F") else "I"
    step = {"SEND_F": 0, "RECV_F": -1, "SEND_B": 0, "RECV_B": 1}[cell.word]
    return kind, cell.stage + step, cell.microbatch


def _refused(cell: CsvCell, problem: str) -> Exception:
    """The error of a cell."""
    return pipeline_refusals.bad_cell(cell.row, cell.column, cell.text, problem)
