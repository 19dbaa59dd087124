"""Training on 1 to 4 ranks equals one plain PyTorch process on the global batch, under every schedule.

One call of a pool runs one model on one world under many configurations. A failure names world, model and
configuration.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

import fshard as fs
from fshard.schedule.policy import Keep
from tests.shared import parity, reference, zoo
from tests.shared.parity import Run
from tests.shared.virtual import Job
from tests.shared.workers import Pools

STEPS = 20
SHORT, FEWER = 8, 6
"""Steps of most runs: what goes wrong does so in the first few. Programs take turns for up to six steps."""
NEAR = {"sgd": parity.Near(), "adamw": parity.Near(loss=1e-4)}
ON_DEMAND = ("branching",)
"""Programs that no schedule foresees: values decide which units run."""
FLAT, REPLICAS = ((-1,), ("shard",)), ((2, -1), ("replica", "shard"))
WORLDS = (1, 2, 3, 4)
PROGRAMS = sorted(zoo.EXAMPLES.keys() - {"gpt"})


@dataclass(frozen=True)
class Config:
    """How a step is made. Those with equal ``values`` must agree in every bit, whatever their schedule."""

    opt: str
    clip: bool = False
    accumulate: int = 1
    reshard: bool | Keep = True
    prefetch: int = 1
    reduces: int = 1
    update: str = "deferred"
    accumulation: str = "sharded"
    donate: bool = True
    debug: bool = False

    @property
    def values(self) -> tuple[str, bool, int, str]:
        """What may change the order of float sums."""
        return self.opt, self.clip, self.accumulate, self.accumulation


def _product() -> list[Config]:
    options = itertools.product(("sgd", "adamw"), (False, True), (True, False), range(4))
    return [Config(opt, clip, reshard=reshard, prefetch=ahead) for opt, clip, reshard, ahead in options]


EVERY = [
    *_product(),
    Config("sgd", True, 2, reshard=True, prefetch=1),
    Config("sgd", True, 2, reshard=False, prefetch=2, debug=True),
    Config("adamw", True, 2, reshard=True, prefetch=3),
    Config("sgd", debug=True),
    Config("adamw", True, 1, reshard=False, prefetch=3, debug=True),
    Config("sgd", reduces=4),
    Config("sgd", reduces=2),
    Config("adamw", donate=False),
    Config("sgd", reshard=fs.keep(last=1)),
    Config("adamw", True, 2, reshard=fs.keep(last=2), prefetch=0, debug=True),
    Config("sgd", True, 2, accumulation="full"),
    Config("sgd", True, 2, reshard=False, prefetch=2, accumulation="full", debug=True),
    Config("adamw", True, 2, reduces=1, accumulation="full"),
]

SOME = [  # every pair of (reshard, prefetch), with every other option on and off
    Config("sgd", False, reshard=True, prefetch=0),
    Config("sgd", False, reshard=False, prefetch=1),
    Config("sgd", True, reshard=True, prefetch=3),
    Config("sgd", True, reshard=False, prefetch=2, debug=True),
    Config("adamw", False, reshard=True, prefetch=2, debug=True),
    Config("adamw", False, reshard=False, prefetch=3),
    Config("adamw", True, reshard=True, prefetch=1),
    Config("adamw", True, reshard=False, prefetch=0, donate=False),
    Config("sgd", True, 2, True, 1, debug=True),
    Config("sgd", True, 2, False, 2),
    Config("sgd", True, 2, fs.keep(last=1), 0, debug=True),
    Config("adamw", True, 2, prefetch=2, accumulation="full", debug=True),
]


FEW = [
    Config("sgd", reshard=True, prefetch=1, debug=True),
    Config("sgd", reshard=True, prefetch=1),
    Config("adamw", True, reshard=False, prefetch=2),
    Config("sgd", True, 2, reshard=True, prefetch=3, debug=True),
    Config("sgd", True, 2, reshard=fs.keep(last=2), prefetch=1, accumulation="full", debug=True),
]

IN_BACKWARD = list(
    dict.fromkeys(
        replace(c, update="in_backward", clip=False, accumulate=2 if c.accumulation == "full" else 1) for c in SOME
    )
)
UPDATED_IN_BACKWARD = ("gpt", "twice", "skipping", "conv", "adapted")


def train(name: str, configs: Sequence[Config], axes: tuple[tuple[int, ...], tuple[str, ...]], steps: int) -> list[Run]:
    """On a rank: train an example under each configuration."""
    example = zoo.build(name)
    with fs.make_mesh(*axes) as mesh:
        return [_train(name, example, mesh, config, steps) for config in configs]


def _train(name: str, example: zoo.Example, mesh: fs.Mesh, config: Config, steps: int) -> Run:
    plan = example.plan(mesh)
    rule = fs.optim.sgd(**reference.SGD) if config.opt == "sgd" else fs.optim.adamw(**reference.ADAMW)
    step = fs.make_train_step(
        example.loss_fn,
        rule,
        plan,
        clip_norm=example.clip if config.clip else None,
        accumulate=config.accumulate,
        schedule=fs.Policy(config.prefetch, config.reduces, config.reshard, config.update, config.accumulation),
        donate=config.donate,
        debug=config.debug,
    )
    state = fs.init_state(plan, rule, params=example.params())
    first = None if name in ON_DEMAND else 0
    return parity.sharded(step, state, plan, example.batches(mesh, steps), scheduled_from=first)[0]


@functools.cache
def _expected(name: str, opt: str, clip: bool, steps: int) -> Run:
    example = zoo.build(name)
    return reference.train(example, opt, example.clip if clip else None, steps)


def check(job: Job, world: int, name: str, configs: Sequence[Config], axes: Any = FLAT, steps: int = SHORT) -> None:
    ranks = job(world).run(train, name, configs, axes, steps, timeout=110.0)
    problems: list[str] = []
    first: dict[tuple[str, bool, int, str], Run] = {}
    for number, config in enumerate(configs):
        runs = [results[number] for results in ranks]
        want = _expected(name, config.opt, config.clip, steps)
        found = parity.differences(runs, want, NEAR[config.opt])
        found += parity.other_bits(runs[0], first.setdefault(config.values, runs[0]))
        problems += [f"world={world} model={name} {config}\n    {line}" for line in found]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", sorted(zoo.EXAMPLES))
def test_clipping_bites(name: str) -> None:
    example = zoo.build(name)
    assert max(_expected(name, "sgd", True, FEWER).norms) > example.clip


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (at % 2)) for at, name in enumerate(PROGRAMS)]
)
def test_schedules_change_no_bit_of_any_program(pool: Pools, name: str) -> None:
    base = Config("adamw", clip=True, accumulate=2)
    others = [
        replace(base, prefetch=0, reshard=fs.keep(last=1), reduces=4),
        replace(base, prefetch=3, reshard=False, donate=False, debug=True),
    ]
    check(pool, 2, name, [base, others[PROGRAMS.index(name) // 2 % 2]], steps=FEWER)


@pytest.mark.slow
def test_schedules_change_no_bit(pool: Pools) -> None:
    check(pool, 2, "gpt", SOME, steps=FEWER)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("opt", ["sgd", "adamw"])
def test_every_schedule_equals_one_process(pool: Pools, world: int, opt: str) -> None:
    check(pool, world, "gpt", [config for config in EVERY if config.opt == opt], steps=STEPS if world != 3 else SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", sorted(zoo.EXAMPLES))
def test_every_program_under_some_schedules(pool: Pools, world: int, name: str) -> None:
    check(pool, world, name, SOME)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("opt", ["sgd", "adamw"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_under_every_schedule(pool: Pools, name: str, opt: str, world: int) -> None:
    check(pool, world, name, [config for config in EVERY if config.opt == opt], steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(zoo.TRICKY))
def test_hard_programs_equal_one_process(pool: Pools, world: int, name: str) -> None:
    check(pool, world, name, FEW)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [("gpt", 2), ("gpt", 4), ("conv", 4), ("skipping", 4)])
def test_replicas_of_shards_equal_one_process(pool: Pools, world: int, name: str) -> None:
    check(pool, world, name, SOME, REPLICAS)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", UPDATED_IN_BACKWARD)
def test_update_in_backward_equals_one_process(pool: Pools, world: int, name: str) -> None:
    check(pool, world, name, IN_BACKWARD)
