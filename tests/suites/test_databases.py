"""A sample of PyTorch's lists of modules and operators: each right, or refused. ``make suites`` runs all of them."""

from collections.abc import Callable, Iterator

import pytest

from tests.suites.databases import Case, modules, operators
from tests.suites.run import outcome


@pytest.mark.long
@pytest.mark.parametrize(("cases", "every", "first"), [(modules, 40, 4), (operators, 140, 17)])
def test_a_sample_of_the_lists_is_right_or_refused(
    cases: Callable[..., Iterator[Case]], every: int, first: int
) -> None:
    ways = (None, "fx")
    found = [outcome(case, ways[number % 2]) for number, case in enumerate(cases(1, every, first))]
    assert sum(one.verdict == "right" for one in found) > 1, found
    assert not [one for one in found if one.verdict in ("wrong", "raw")], found
