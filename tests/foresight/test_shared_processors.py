"""Costs of ranks that share processors, and costs where more ranks take part."""

import pytest

import fshard as fs
from fshard.schedule import simulate
from fshard.schedule.fit import APART, OpTime, Stream, fit
from tests.foresight.test_calibrate import over


def test_too_few_processors_are_taken_out_of_what_was_measured() -> None:
    schedule = over(2, APART)
    alone = [OpTime(1.0, 1.0, 1.0, 0.5, 0.5) for _ in schedule]
    among = [OpTime(2.0, 1.0, 1.0, 1.0, 0.5) for _ in schedule]  # every op takes twice as long, as others compute
    whole, half = fit(schedule, [alone], 0.0, 1.0, ""), fit(schedule, [among], 0.0, 0.5, "")
    assert half.of("forward", "u0") == whole.of("forward", "u0") > 1.0
    assert half.links == whole.links and half.links["shard"].latency == 0.0
    assert simulate(schedule, half).seconds == pytest.approx(2 * simulate(schedule, whole).seconds)


def test_more_ranks_that_shard_have_less_to_update() -> None:
    """By the part of the time that went by bytes in the calibration: here half of it, for a shard of mean size."""
    schedule = over(2, APART)
    sizes = {group.name: group.shard_bytes for group in schedule.groups}
    mean_size = sum(sizes.values()) / len(sizes)
    row = [OpTime(*[1.0 + sizes[op.target] / mean_size if op.kind == "update" else 1.0] * 3, 0.0) for op in schedule]
    costs = fit(schedule, [row] * 2, 0.0, 1.0, "", {"shard": Stream(float("inf"), 0.0, peers=1)})
    assert 0.5 <= costs.updates_by_bytes <= 1.0
    four, replicas = fs.abstract_mesh((4,), ("shard",)), fs.abstract_mesh((2, 2), ("replica", "shard"))
    for op in [op for op in costs.seconds if op[0] == "update"]:
        assert costs.among(replicas).seconds[op] == pytest.approx(costs.seconds[op])
        assert costs.among(four).seconds[op] == pytest.approx(costs.seconds[op] * (1 - costs.updates_by_bytes / 2))


def test_neighbours_that_interrupt_some_ops_are_not_of_these() -> None:
    """Where ranks share a processor, all of an op's time on the wall may be somebody else's."""
    schedule = over(2, APART)
    usual = [OpTime(2.0, 1.0, 1.0, 0.0) for _ in schedule]
    moved = [OpTime(1.0 + (at % 2) * 2.0, 1.0, 1.0, 0.0) for at, _ in enumerate(schedule)]
    costs, other = (fit(schedule, [row], 0.0, 0.5, "").seconds for row in (usual, moved))
    assert costs == other
