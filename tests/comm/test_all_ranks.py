"""One rank's failure is every rank's: local work whose results, or one error, all ranks get."""

from collections.abc import Callable
from typing import Any

import pytest

import fshard as fs
from fshard.errors import DamagedError, PlanError, StateError
from fshard.runtime.comm import (
    all_ranks_or_raise,
    each_rank_or_raise,
    first_rank_or_raise,
    mesh_communicator,
    raise_failures,
)
from fshard.runtime.comm.communicator import SingleRank
from tests.shared.workers import Pools

Body = Callable[[], Any]


def failing(error: BaseException, ranks: tuple[int, ...], rank: int) -> Body:
    """A function that raises on these ranks, and returns the rank on others."""

    def body() -> int:
        if rank in ranks:
            raise error
        return rank

    return body


def damaged_on(ranks: tuple[int, ...], rank: int) -> Body:
    return failing(DamagedError(f"bad bytes on {rank}"), ranks, rank)


CASES: dict[str, Callable[[Any, int], Any]] = {
    "results": lambda comm, rank: all_ranks_or_raise(comm, lambda: {"rank": rank, "more": [rank] * 1000}),
    "own result": lambda comm, rank: repr(each_rank_or_raise(comm, lambda: {rank})),
    "rank 0's result": lambda comm, rank: first_rank_or_raise(comm, rank, lambda: f"of {rank}"),
    "rank 0 fails": lambda comm, rank: first_rank_or_raise(comm, rank, damaged_on((0, 1), rank)),
    "one fails": lambda comm, rank: each_rank_or_raise(comm, damaged_on((1,), rank)),
    "two fail": lambda comm, rank: all_ranks_or_raise(comm, damaged_on((0, 1), rank)),
    "alike": lambda comm, rank: all_ranks_or_raise(comm, failing(PlanError("no \udcff"), (0, 1), rank)),
    "half an update": lambda comm, rank: each_rank_or_raise(comm, failing(StateError("half"), (1,), rank)),
    "unknown class": lambda comm, rank: all_ranks_or_raise(comm, failing(ZeroDivisionError("by 0"), (1,), rank)),
    "interrupt": lambda comm, rank: all_ranks_or_raise(comm, failing(KeyboardInterrupt(), (1,), rank)),
    "nobody failed": lambda comm, rank: raise_failures(comm, None, "head", "remedy"),
    "own failure": lambda comm, rank: raise_failures(comm, ValueError("mine") if rank else None, "head", "remedy"),
    "cut off": lambda comm, rank: raise_failures(
        comm, ValueError(f"of {rank}"), "head", "remedy", causes=[0], cut_off=rank == 1
    ),
}


def outcomes() -> list[Any]:
    """What each case returns or raises on this rank."""
    out: list[Any] = []
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        comm = mesh_communicator(mesh)
        for case in CASES.values():
            try:
                out.append(case(comm, mesh.rank))
            except BaseException as error:
                out.append((type(error).__name__, str(error)))
    return out


def test_results_and_errors_of_all_ranks(pool: Pools) -> None:
    first, second = (dict(zip(CASES, rank, strict=True)) for rank in pool(2).run(outcomes))
    rows = [{"rank": rank, "more": [rank] * 1000} for rank in (0, 1)]
    both = "2 of 2 ranks failed:\n  rank 0: bad bytes on 0\n  rank 1: bad bytes on 1\nWhat is on disk is as it was."
    same = {
        "results": rows,
        "rank 0's result": "of 0",
        "rank 0 fails": ("DamagedError", "bad bytes on 0"),
        "one fails": ("DamagedError", "bad bytes on 1"),
        "two fail": ("DamagedError", both),
        "alike": ("PlanError", "no \udcff"),
        "half an update": ("StateError", "half"),
        "unknown class": ("CheckpointError", "ZeroDivisionError: by 0"),
        "nobody failed": None,
    }
    for name, value in same.items():
        assert first[name] == second[name] == value, name
    assert (first["own result"], second["own result"]) == ("{0}", "{1}")
    assert first["interrupt"][0] == "CheckpointError" and "KeyboardInterrupt" in first["interrupt"][1]
    assert second["interrupt"][0] == "KeyboardInterrupt"
    assert first["own failure"] == ("PeerError", "head\n  rank 1: ValueError: mine\nremedy")
    assert second["own failure"] == ("ValueError", "mine")
    assert first["cut off"] == ("ValueError", "of 0")
    assert second["cut off"] == ("PeerError", "head\n  rank 0: ValueError: of 0\nremedy")


def test_one_rank_raises_what_it_raised() -> None:
    comm = SingleRank()
    assert all_ranks_or_raise(comm, lambda: {1}) == [{1}]
    assert first_rank_or_raise(comm, 0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        each_rank_or_raise(comm, lambda: 1 // 0)
    raise_failures(comm, None, "head", "remedy")
    with pytest.raises(ValueError, match="mine"):
        raise_failures(comm, ValueError("mine"), "head", "remedy")


def test_an_abstract_mesh_has_no_ranks_to_ask() -> None:
    assert isinstance(mesh_communicator(fs.abstract_mesh((1,), ("shard",))), SingleRank)
    with pytest.raises(PlanError, match="abstract mesh has no processes"):
        mesh_communicator(fs.abstract_mesh((2,), ("shard",)))
