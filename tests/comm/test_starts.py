"""How the ranks of one start find each other in a store that earlier starts have used."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fshard.errors import CommError
from fshard.runtime.comm.start import start_name

TIMEOUT = 25.0


@pytest.fixture
def store() -> Any:
    """A store of this process alone."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=TIMEOUT), wait_for_workers=False)


def names(store: Any, ranks: list[int], world: int, timeout: float = TIMEOUT) -> list[Any]:
    """What these ranks find, or the error; each with a connection of its own, as processes have."""

    def find(rank: int) -> Any:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=TIMEOUT))
        try:
            return start_name(own, rank, world, timeout)
        except CommError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(find, ranks))


def test_all_ranks_of_a_start_find_one_name_and_no_two_starts_the_same(store: Any) -> None:
    seen = []
    for world in (1, 3, 3, 2, 1, 4):
        found = names(store, list(range(world)), world)
        assert len(set(found)) == 1 and isinstance(found[0], str)
        seen.append(found[0])
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("there", [[0], [1], [0, 1], [1, 2]])
def test_a_start_that_some_ranks_did_not_reach_leads_nobody_astray(store: Any, there: list[int]) -> None:
    first = names(store, [0, 1, 2], 3)[0]
    for error in names(store, there, 3, timeout=0.3):  # the others died before they said that they are here
        assert isinstance(error, CommError) and "3 ranks of this start did not all come within 0.3 s" in str(error)
    found = names(store, [0, 1, 2], 3)
    assert len(set(found)) == 1 and found[0] != first


def test_ranks_that_come_late_are_waited_for(store: Any) -> None:
    with ThreadPoolExecutor(2) as threads:
        early = threads.submit(names, store, [0, 2], 3)
        late = threads.submit(names, store, [1], 3)
        assert len({*early.result(), *late.result()}) == 1
