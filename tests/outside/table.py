"""Trains every model from outside in several ways, and writes the second table of README.md.

python -m tests.outside.table           # all of them, on two ranks
python -m tests.outside.table S4D DETR  # some, printed only
"""

import textwrap
from dataclasses import replace

from tests.outside.hf_runs import Outcome
from tests.outside.hf_table import END, PAGE, graphs, make_table
from tests.outside.runs import CASES, MODES, Refusal, attempt
from tests.shared.workers import Pool, WorkerError

BEGIN = "<!-- begin: python -m tests.outside.table -->"
HEAD = f"| model | class | units | {' | '.join(MODES)} |\n|---|---|---|{'---|' * len(MODES)}\n"


def row(name: str, pool: Pool) -> str:
    """A model's line of the table."""
    found = {}
    for mode in MODES:
        try:
            found[mode] = cell(mode, pool.run(attempt, name, mode)[0])
        except WorkerError as error:
            found[mode] = f"fails: {str(error).splitlines()[-1]}"
    return f"| {name} | `{CASES[name].named}` | {chosen(name)} | {' | '.join(found.values())} |"


def rows() -> dict[str, list[str]]:
    """The cells behind each model's name, as they stand on the page."""
    lines = PAGE.read_text().partition(BEGIN + "\n" + HEAD)[2].partition(END)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: rest for name, *rest in cells}


def chosen(name: str) -> str:
    """The cell of the units."""
    given = CASES[name].units
    return "`" + (given if isinstance(given, str) else ", ".join(given)) + "`"


def cell(mode: str, result: Outcome | Refusal) -> str:
    """The cell of a run: a verdict, and behind a comma the largest difference of a loss or a parameter."""
    if isinstance(result, Refusal):
        return "refused: " + textwrap.shorten(result.error.replace("|", "/").rstrip(":"), 100, placeholder=" ...")
    if result.differences:
        return f"wrong: {result.differences[0]}"
    return f"{verdict(mode, result)}, {max(result.loss_gap, result.gap):.0e}"


LEFT = "; values decide what runs, and steps leave their schedule"


def verdict(mode: str, outcome: Outcome) -> str:
    """How a run went that gave the numbers of one process."""
    kept = replace(outcome, found=replace(outcome.found, problems=[]))
    said = graphs(kept).split(";")[0] if "compile" in mode else "works"
    said += "" if outcome.foreseen else "; the first step gathers on demand"
    return said + (LEFT if outcome.found.problems else "")


if __name__ == "__main__":
    make_table(__doc__, CASES, row, BEGIN, HEAD)
