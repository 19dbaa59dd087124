"""Step functions over parts equal plain PyTorch, in every way to run them, on 1 to 4 ranks."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.parts import ways
from tests.parts.plain import FUNCTIONS
from tests.parts.ways import FLAT, OPTS, REPLICAS, Way
from tests.shared import pairwise
from tests.shared.workers import Pools

NAMES = list(FUNCTIONS)
OPTIONS: dict[str, Sequence[Any]] = {
    "name": NAMES,
    "how": ("step", "asking", "eager"),
    "reshard": (True, False, "keep"),
    "prefetch": (1, 0, 3),
    "opt": ("sgd", "adamw"),
    "reduces": (1, 3),
    "accumulate": (1, 2),
    "remat": (None, "all"),
    "compile": (None, "fx"),
    "donate": (True, False),
    "debug": (False, True),
}
LOOKING_BACK = ("inner", "lookahead")
"""They read parameters whose state they have updated: by themselves, such updates must not donate."""


def _allowed(row: pairwise.Row) -> bool:
    if row.get("how") == "eager":
        scheduled = row.get("reshard") in (False, "keep") or row.get("prefetch") in (0, 3) or row.get("reduces") == 3
        return not scheduled and not (row.get("name") in LOOKING_BACK and row.get("donate"))
    return not (row.get("remat") and row.get("compile"))


def check(pool: Pools | None, world: int, each: Sequence[Way], axes: Any = FLAT, steps: int = ways.STEPS) -> None:
    """Run them and compare."""
    if pool is None:
        ranks = [ways.run(each, ((1,), ("shard",)), steps)]
    else:
        ranks = pool(world).run(ways.run, each, axes, steps, timeout=150.0)
    wrong = ways.problems(each, ranks, steps)
    assert not wrong, f"on {world} ranks:\n" + "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("opt", OPTS)
def test_every_function_on_one_rank(opt: str) -> None:
    check(None, 1, [Way(name, opt) for name in NAMES], steps=3)


def _two_ranks() -> list[Way]:
    """Every function once, in ways that differ. Compiling takes a second, so that one of them does."""
    found: list[Way] = []
    for number, name in enumerate(NAMES):
        how, compiled = ("step", "step", "asking")[number % 3], "fx" if number == 3 else None
        rows = [row for row in _rows() if (row["name"], row["how"], row["compile"]) == (name, how, compiled)]
        found += [Way(**row) for row in rows[:1]] or [Way(name, "sgd", how)]
    return found


def _rows() -> list[pairwise.Row]:
    return pairwise.rows(OPTIONS, _allowed)


def test_every_function_on_two_ranks(pool: Pools) -> None:
    check(pool, 2, _two_ranks(), steps=2)


def test_functions_as_parts_alone_on_two_ranks(pool: Pools) -> None:
    check(pool, 2, [Way("in_turns", "adamw", "eager"), Way("exact_sam", "sgd", "eager", donate=False)], steps=2)


def test_replicas_of_shards(pool: Pools) -> None:
    check(pool, 4, [Way("exact_sam", "sgd"), Way("in_turns", "adamw", accumulate=2)], REPLICAS, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_pair_of_options(pool: Pools, name: str, world: int) -> None:
    check(pool, world, [Way(**row) for row in _rows() if row["name"] == name])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_pair_of_options_on_replicas(pool: Pools, name: str) -> None:
    check(pool, 4, [Way(**row) for row in _rows() if row["name"] == name], REPLICAS)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("opt", OPTS)
def test_every_function_and_every_schedule(pool: Pools, opt: str, world: int) -> None:
    rows = [Way(n, opt, reshard=r, prefetch=p) for n in NAMES for r in (True, False, "keep") for p in (0, 1, 3)]
    check(pool, world, rows, steps=2)
