"""Generated trainings in stages: programs, cuts, orders and meshes drawn at random equal one plain process."""

import functools
import itertools
import random

import pytest

import fshard as fs
from fshard.schedule.ops import ROOT
from tests.pipeline.programs import PROGRAMS
from tests.pipeline.staged_runs import StagedRun, made, problems

RUNS = 50
PLACEMENT = {"zbv": "v", "dualpipev": "v", "interleaved": "loop"}
RANDOM_MASKS = "dropout"
"""A program whose masks differ from those of one plain process."""


@functools.cache
def units(program: str) -> int:
    """The number of units."""
    run = StagedRun(program, (1,), ("data",), accumulate=1)
    _, plan, _, _ = made(run, fs.abstract_mesh(run.sizes, run.axes))
    return len({group.unit for group in plan.groups} - {ROOT})


def drawn(seed: int) -> StagedRun:
    """A training. Its stages have different numbers of units."""
    rng = random.Random(seed)
    program = rng.choice([name for name in PROGRAMS if name != RANDOM_MASKS])
    order = rng.choice(["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"])
    chunks = 2 if order in PLACEMENT else 1
    most = units(program) // chunks
    ranks = rng.randint(1, min(4, most))
    ends = sorted(rng.sample(range(1, units(program)), ranks * chunks - 1))
    cut = tuple([end - start for start, end in itertools.pairwise([0, *ends, units(program)])])
    policy = {"pipeline": order, "prefetch": rng.randint(0, 3), "reduces": rng.randint(0, 3)}
    policy |= {"reshard": rng.choice([True, False])}
    return StagedRun(
        program,
        (ranks, rng.choice([1, 2])),
        stages={"cut": cut, "chunks": chunks, "placement": PLACEMENT.get(order, "loop")},
        step={"remat": rng.choice([None, "all"])},
        policy=policy,
        accumulate=rng.choice([2 * ranks, 6]) if order == "dualpipev" else rng.choice([1, 2, 3, 4, 6]),
        opt=functools.partial(fs.optim.sgd, 0.1, momentum=0.9),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
def test_generated_trainings(seed: int) -> None:
    run = drawn(seed)
    assert problems(run) == [], run
