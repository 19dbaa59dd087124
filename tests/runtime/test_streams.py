"""How often a link is kept busy, and which series count."""

import pytest

from fshard.runtime.steps.streams import MESSAGES, lengthened, message
from fshard.schedule.fit_links import settled


@pytest.mark.parametrize("calm", [0, 1, 2])
def test_a_link_that_was_disturbed_in_all_but_one_of_its_longest_series_has_its_own_rate(calm: int) -> None:
    longest = 0

    def take(count: int) -> list[float]:  # 100 bytes each, 50 a second; another process halves that at times
        nonlocal longest
        slow, longest = 1.0 if longest == calm else 2.0, longest + 1
        return [2.0 * slow * (n + 1) for n in range(count)]

    series = lengthened(take)
    assert [len(times) for times in series] == [4] * 3, "the first one takes long enough"
    assert settled(series, 100).rate == pytest.approx(50.0)


def test_series_get_longer_until_they_take_long_enough_or_are_as_many_as_may_be() -> None:
    counts = [len(times) for times in lengthened(lambda count: [1e-9 * (n + 1) for n in range(count)])]
    assert counts == [4 << n for n in range(10)] + [2048] * 2


def test_messages_are_those_that_nothing_disturbs() -> None:
    tries = iter(range(2 * MESSAGES))

    def take(size: int) -> float:  # three of five are interrupted
        return 20.0 + (60.0 + 40.0 * (next(tries) % 5 > 1) if size else 0.0)

    assert message(take) == pytest.approx(60.0)
