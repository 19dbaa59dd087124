"""Every two options of a training meet in some run, and each run equals one plain process.

The rows are drawn here, and not where the ranks' function is: each rank would draw them when it imports that.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

import fshard as fs
from tests.shared import pairwise, zoo
from tests.shared.virtual import Job
from tests.training.test_parity import FEWER, FLAT, REPLICAS, UPDATED_IN_BACKWARD, WORLDS, Config, check

NAMES = sorted(zoo.EXAMPLES | zoo.TRICKY)
OPTIONS: dict[str, Sequence[Any]] = {
    "name": NAMES,
    "world": WORLDS,
    "prefetch": (0, 1, 3),
    "reshard": (True, False, fs.keep(last=1)),
    "reduces": (1, 2, 4),
    "opt": ("sgd", "adamw"),
    "clip": (False, True),
    "accumulate": (1, 2),
    "accumulation": ("sharded", "full"),
    "update": ("deferred", "in_backward"),
    "donate": (True, False),
    "debug": (False, True),
    "replicas": (False, True),
}
"""All that a run is made of. The default tests run every pair of these values, the slow ones most of the product.

A program runs on two of the four worlds, and the one after it on the other two.
"""


def _allowed(row: pairwise.Row) -> bool:
    """Whether there is such a run; of what a row lacks, any value may follow."""
    if row.get("accumulation") == "full" and row.get("accumulate") == 1:
        return False
    if row.get("replicas") and row.get("world") not in (None, 4):
        return False
    world = 4 if row.get("replicas") else row.get("world")
    if world and "name" in row and (NAMES.index(row["name"]) + world) % 2:
        return False
    in_backward = row.get("update") == "in_backward"
    return not in_backward or (not row.get("clip") and row.get("name", "gpt") in UPDATED_IN_BACKWARD)


FEWEST = 3
"""Steps of programs that do not take turns."""

PAIRWISE = pairwise.rows(OPTIONS, _allowed)


def _row(row: pairwise.Row) -> tuple[Config, Any]:
    """The configuration of a row, and its mesh."""
    left = {option: value for option, value in row.items() if option not in ("name", "world", "replicas")}
    return Config(**left), REPLICAS if row["replicas"] else FLAT


def test_the_rows_have_every_pair_of_options() -> None:
    """But those that no run can have."""
    got = {frozenset(pair) for row in PAIRWISE for pair in itertools.combinations(row.items(), 2)}
    every = {
        frozenset(((a, x), (b, y)))
        for (a, some), (b, others) in itertools.combinations(OPTIONS.items(), 2)
        for x, y in itertools.product(some, others)
    }
    assert got == {pair for pair in every if _allowed(dict(pair))}
    assert len(PAIRWISE) < 75


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:.*left their schedule")
@pytest.mark.parametrize("row", PAIRWISE, ids=lambda row: f"{row['name']}-{row['world']}")
def test_every_pair_of_options_equals_one_process(job: Job, row: pairwise.Row) -> None:
    config, axes = _row(row)
    check(job, row["world"], row["name"], [config], axes, FEWER if row["name"] in zoo.TRICKY else FEWEST)
