"""Which models of Hugging Face's work: trains each on ranks of this machine and writes a table of README.md.

python -m tests.outside.hf_table            # all of them, on two ranks
python -m tests.outside.hf_table Llama T5   # some, printed only
"""

import logging
import re
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.outside.hf_models import CASES
from tests.outside.hf_runs import Outcome, run
from tests.shared.workers import Pool, WorkerError

PAGE = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- begin: python -m tests.outside.hf_table -->", "<!-- end -->"
HEAD = """\
| model | class in transformers | units | eager | largest difference of a loss, of a parameter | `compile="fx"` |
|---|---|---|---|---|---|
"""


def row(name: str, pool: Pool) -> str:
    """A model's line of the table."""
    case = CASES[name]
    try:
        eager = pool.run(run, name)[0]
    except WorkerError as error:
        return f"| {name} | `{case.model}` | | fails: {_last(error)} | | |"
    try:
        compiled = graphs(pool.run(run, name, "fx")[0])
    except WorkerError as error:
        compiled = f"fails: {_last(error)}"
    gaps = f"{eager.loss_gap:.0e}, {eager.gap:.0e}"
    return f"| {name} | `{case.model}` | {units(eager)} | {verdict(eager)} | {gaps} | {compiled} |"


def rows() -> dict[str, list[str]]:
    """The cells behind each model's name, as they stand on the page."""
    lines = PAGE.read_text().partition(BEGIN + "\n" + HEAD)[2].partition(END)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: rest for name, *rest in cells}


def units(outcome: Outcome) -> str:
    """The cell of the units."""
    short = [re.sub(r"\.\d+(?=\.|$)", ".*", path) for path in outcome.names]
    return "`" + ", ".join(dict.fromkeys(short)) + "`"


def verdict(outcome: Outcome) -> str:
    """The cell of the eager run."""
    if outcome.problems:
        return f"wrong: {outcome.problems[0]}"
    return "works" if outcome.foreseen else "works; the first step gathers on demand"


def graphs(outcome: Outcome) -> str:
    """The cell of the run with graphs: how many, and behind a semicolon why some units are none."""
    if outcome.problems:
        return f"wrong: {outcome.problems[0]}"
    graphs = {how for how in outcome.units.values() if "as it is" not in how}
    reasons = {how.removeprefix("as it is: ") for how in outcome.units.values() if "as it is" in how}
    count = sum("as it is" not in how for how in outcome.units.values())
    ran = f"{count} of {len(outcome.units)} units in {len(graphs)} graphs" if graphs else "units run as they are"
    return "; ".join(["works: " + ran, *(reason.replace("|", "/") for reason in sorted(reasons))])


def _last(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if re.match(r"\s*[\w.]*(Error|Exception)", line)]
    return lines[-1].strip()[:160].replace("|", "/") if lines else str(error)[:160]


def make_table(about: str | None, names: Iterable[str], row: Callable[[str, Pool], str], begin: str, head: str) -> None:
    """Run the models that the command line names and print their lines; without any, run all and write the page."""
    cli = ArgumentParser(description=about, formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("names", nargs="*", help="models; without any, all are run and the page is written")
    cli.add_argument("--ranks", type=int, default=2, help="gloo processes")
    args = cli.parse_args()
    logging.disable()
    pool, made = Pool(args.ranks), []
    try:
        for name in args.names or names:
            made.append(row(name, pool))
            print(made[-1], file=sys.stderr, flush=True)
    finally:
        pool.close()
    if not args.names:
        before, _, rest = PAGE.read_text().partition(begin)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{begin}\n{head}{''.join(line + chr(10) for line in made)}{END}{after}")


if __name__ == "__main__":
    make_table(__doc__, CASES, row, BEGIN, HEAD)
