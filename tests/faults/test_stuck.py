"""Frozen ranks, cut links and lost stores: who is left gets a named error within the timeout and five seconds."""

import pytest

from benchmarks.lab import obstacle
from tests.faults.stuck import START, STEP, Case, Row, run

pytestmark = pytest.mark.processes


def check(case: Case) -> None:
    """Every rank that is left raises in time."""
    row = Row("a test")
    row.take(case, run(case))
    assert not row.problems, row.problems
    assert row.survivors == case.world - (case.how == "stop")


def test_a_frozen_rank_0_that_has_the_store() -> None:
    check(Case(STEP["wait for a gather"], 0, gloo=True, timeout=2.0))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [*START])
def test_a_frozen_rank_at_the_start(name: str, rank: int) -> None:
    check(Case(START[name], rank, step=0, timeout=3.0))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["out", "in", "down"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_link_that_is_cut(how: str, rank: int) -> None:
    if why := obstacle():
        pytest.skip(why)
    check(Case(STEP["handshake"], rank, how, gloo=True, timeout=3.0))


@pytest.mark.slow
@pytest.mark.parametrize("store", ["stop", "kill"])
def test_a_store_that_is_lost(store: str) -> None:
    check(Case(STEP["a new communicator"], 0, "none", gloo=True, store=store, timeout=3.0))
