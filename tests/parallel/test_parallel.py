"""Tensor, sequence, expert and context parallel training equals one plain PyTorch process, on every kind of mesh."""

import pytest
import torch

import fshard as fs
from tests.parallel.cases import Case, Config, differences, expected, train
from tests.shared.virtual import Job
from tests.shared.workers import Pools

PLAIN = Config()
MANY = [
    PLAIN,
    Config(reshard=False, prefetch=2),
    Config(prefetch=0, accumulate=2),
    Config(prefetch=3, compile="fx", debug=False),
    Config(remat="all"),
]
"""Programs with collectives inside of units under schedules; with graphs they run as they are."""

TWO = [
    Case("tensor", (2,), ("tp",)),
    Case("sequence", (2, 1), ("tp", "shard")),
    Case("dropless", (2,), ("ep",)),
    Case("capacity", (2, 1), ("ep", "shard")),
    Case("context", (2,), ("cp",)),
]
FOUR = [
    Case("tensor", (2, 2), ("shard", "tp")),
    Case("sequence", (2, 2), ("tp", "shard")),
    Case("dropless", (2, 2), ("shard", "ep")),
    Case("capacity", (2, 2), ("ep", "shard")),
    Case("context", (2, 2), ("shard", "cp")),
]
EIGHT = [
    Case("sequence", (2, 2, 2), ("data", "tp", "shard")),
    Case("tensor", (2, 2, 2), ("data", "shard", "tp")),
    Case("dropless", (2, 2, 2), ("data", "ep", "shard")),
    Case("capacity", (2, 2, 2), ("data", "ep", "shard")),
    Case("context", (2, 4), ("shard", "cp")),
]


def name(case: Case) -> str:
    """For ids."""
    return "-".join([case.kind, *map(str, case.sizes)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", FOUR, ids=name)
def test_training_equals_one_process(job: Job, case: Case) -> None:
    assert not differences(case, [PLAIN], job(4).run(train, case, [PLAIN]))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*TWO, *FOUR, *EIGHT], ids=name)
def test_training_equals_one_process_under_every_schedule(pool: Pools, case: Case) -> None:
    world = 2 if case in TWO else 4 if case in FOUR else 8
    # Ranks that share rows along dim 1 alone cannot cut their batch into microbatches.
    configs = [each for each in MANY if case != TWO[-1] or each.accumulate == 1]
    ranks = pool(world).run(train, case, configs, timeout=170.0)
    assert not differences(case, configs, ranks)
    assert ranks[0][0].like(ranks[0][1]), "values change with the schedule"


@pytest.mark.parametrize(
    "case", [FOUR[0], *(pytest.param(case, marks=pytest.mark.slow) for case in (*TWO, *FOUR[1:]))], ids=name
)
def test_training_in_bfloat16_equals_the_same_casts_in_one_process(pool: Pools, case: Case) -> None:
    """As far as sums of rounded parts can: a token that other experts get, or none, is a jump."""
    want = expected(case.kind, True, torch.bfloat16).losses
    for (run,) in pool(2 if case in TWO else 4).run(train, case, [Config(compute=torch.bfloat16)]):
        assert not run.problems
        assert run.losses == pytest.approx(want, abs=0.05 if case.moe else 0.01)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("case", [EIGHT[0], pytest.param(EIGHT[2], marks=pytest.mark.slow)], ids=name)
def test_three_axes_equal_one_process(case: Case) -> None:
    ranks = fs.virtual_mesh(case.sizes, case.names).run(train, case, [PLAIN])
    assert not differences(case, [PLAIN], ranks)
