"""Models from outside train as in one plain process, in several ways, and ``README.md`` says so of each."""

import re

import pytest

import fshard as fs
from tests.outside import table
from tests.outside.own import OWN
from tests.outside.runs import CASES, MODES, Refusal, attempt
from tests.shared.workers import Pools

QUICK = ("VQ-VAE",)
"""Models that take a second each, and no ``transformers``."""


def check(name: str, mode: str, results: list[table.Outcome | Refusal]) -> None:
    """No rank found anything wrong, and the page says what ranks found."""
    page = dict(zip(MODES, table.rows()[name][2:], strict=True))[mode]
    for result in results:
        assert not (isinstance(result, table.Outcome) and result.differences), (name, mode, result)
        assert _plain(page) == _plain(table.cell(mode, result)), (name, mode)


def _plain(cell: str) -> str:
    """A cell without what depends on the machine or the rank.

    Differences are one, and which ranks' values left the schedule another. Which units are graphs is told elsewhere.
    """
    numbers = r": \d+ of \d+ units in \d+ graphs|: units run as they are|, \d+e[-+]\d+$"
    return re.sub(f"{numbers}|{re.escape(table.LEFT)}", "", cell)


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_models_of_hand_equal_one_process(name: str) -> None:
    for mode in MODES:
        check(name, mode, fs.virtual_mesh((2,), ("shard",)).run(attempt, name, mode))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_every_model_equals_one_process(pool: Pools, name: str, mode: str) -> None:
    if name not in OWN:
        pytest.importorskip("transformers")
    check(name, mode, pool(2).run(attempt, name, mode, timeout=150.0))


def test_the_table_has_a_line_for_every_model() -> None:
    page = table.rows()
    assert list(page) == list(CASES)
    for name, (named, units, *cells) in page.items():
        assert (named, units) == (f"`{CASES[name].named}`", table.chosen(name))
        assert all(re.match(r"works.*, \d+e-\d+$|refused: \w+Error: ", cell) for cell in cells), name
