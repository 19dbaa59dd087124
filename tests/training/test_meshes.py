"""Training on meshes of several axes equals one plain process: HSDP, ZeRO-1 and 2, optimizers over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import fshard as fs
from fshard import P, tree
from tests.shared import parity, reference, zoo
from tests.shared.parity import Run
from tests.shared.workers import Pools

STEPS = 3
NEAR = {"sgd": parity.Near(norm=1e-4), "adamw": parity.Near(1e-4, 1e-4, 1e-3)}

FLAT = ((-1,), ("shard",))
HSDP = ((2, -1), ("replica", "shard"))
CUBE = ((2, -1, 2), ("replica", "middle", "shard"))

EVERYWHERE = {
    "hsdp": [(r".*norm.*", P()), (r".*", fs.fsdp("shard"))],
    "hsdp, optimizer everywhere": [
        fs.Rule(r".*norm.*", P(), opt=fs.fsdp(("replica", "shard"))),
        fs.Rule(r".*", fs.fsdp("shard"), opt=fs.fsdp(("shard", "replica"))),
    ],
    "zero over one of two axes": [fs.Rule(r".*", P(), opt=P(flat="replica"))],
    "all kinds": [
        fs.Rule(r".*norm.*", P(), opt=P(flat="shard")),
        fs.Rule(r".*mlp.*", fs.fsdp("replica"), opt=fs.fsdp(("replica", "shard"))),
        (r".*attn.*", fs.fsdp(("replica", "shard"))),
        (r".*", fs.fsdp("shard")),
    ],
}
CUBES = {
    "hsdp over two axes": [(r".*norm.*", P()), (r".*", fs.fsdp(("middle", "shard")))],
    "three levels": [fs.Rule(r".*", fs.fsdp("shard"), opt=fs.fsdp(("shard", "middle")))],
    "all kinds": [
        fs.Rule(r".*norm.*", P(), opt=P(flat=("replica", "shard"))),
        fs.Rule(r".*mlp.*", fs.fsdp("middle"), opt=fs.fsdp(("middle", "replica", "shard"))),
        fs.Rule(r".*attn.*", fs.fsdp(("replica", "shard"))),
        fs.Rule(r".*", P()),
    ],
}
ZERO = {
    "zero": [fs.Rule(r".*", P(), opt=fs.fsdp("shard"))],
    "zero, some sharded": [fs.Rule(r".*norm.*", P(), opt=fs.fsdp("shard")), (r".*", fs.fsdp("shard"))],
}


@dataclass(frozen=True)
class Config:
    """How a step is made."""

    opt: str
    accumulate: int = 1
    accumulation: str = "sharded"
    prefetch: int = 1
    reduces: int = 1
    reshard: bool = True
    update: str = "deferred"
    donate: bool = True


CONFIGS = [
    Config("sgd"),
    Config("sgd", 2, prefetch=2),
    Config("sgd", 2, "full", reduces=2, donate=False),
    Config("adamw", 2, prefetch=0, reshard=False),
    Config("adamw", 1, update="in_backward"),
]


def train(name: str, rules: Sequence[Any], axes: Any, configs: Sequence[Config]) -> list[Run]:
    """On a rank: train an example under each configuration."""
    example = zoo.build(name)
    with fs.make_mesh(*axes) as mesh:
        return [_train(example, rules, mesh, config) for config in configs]


def _train(example: zoo.Example, rules: Sequence[Any], mesh: fs.Mesh, config: Config) -> Run:
    batch = P(mesh.axis_names[0] if len(mesh.axis_names) == 1 else mesh.axis_names)
    plan = fs.make_plan(example.model, mesh, rules, batch=batch, units=example.units)
    rule = fs.optim.sgd(**reference.SGD) if config.opt == "sgd" else fs.optim.adamw(**reference.ADAMW)
    clip = example.clip if config.update == "deferred" else None
    policy = fs.Policy(config.prefetch, config.reduces, config.reshard, config.update, config.accumulation)
    step = fs.make_train_step(
        example.loss_fn,
        rule,
        plan,
        clip_norm=clip,
        accumulate=config.accumulate,
        schedule=policy,
        donate=config.donate,
        debug=True,
    )
    state = fs.init_state(plan, rule, params=example.params())
    run, state = parity.sharded(step, state, plan, example.batches(mesh, STEPS))
    for name, held in state.opt_state.items():
        wrong = [path for path, buffer in tree.paths(held) if buffer.numel() != _held(plan, path)]
        run.problems.extend(f"{name} of {path} is not of the optimizer's own part" for path in wrong)
    return run


def _held(plan: fs.Plan, path: str) -> int:
    group, number = plan.places()[path]
    return group.owned.piece(number, plan.mesh).numel


def check(pool: Pools, world: int, name: str, rules: Sequence[Any], axes: Any, configs: Sequence[Config]) -> None:
    """Train on a world of ranks and compare with one plain process."""
    ranks = pool(world).run(train, name, rules, axes, configs, timeout=110.0)
    problems: list[str] = []
    example = zoo.build(name)
    for number, config in enumerate(configs):
        want = reference.train(example, config.opt, example.clip if config.update == "deferred" else None, STEPS)
        found = parity.differences([rank[number] for rank in ranks], want, NEAR[config.opt])
        problems += [f"{world} ranks, {name}, {config}: {text}" for text in found]
    assert not problems, "\n".join(problems)


def some(position: int) -> list[Config]:
    """One of the configurations, another for other positions: together the cases see all of them."""
    return [CONFIGS[position % len(CONFIGS)]]


@pytest.mark.sample(2)
@pytest.mark.parametrize("rules", EVERYWHERE)
def test_two_axes_equal_one_process(pool: Pools, rules: str) -> None:
    check(pool, 4, "gpt", EVERYWHERE[rules], HSDP, some(list(EVERYWHERE).index(rules)))


@pytest.mark.parametrize(("world", "rules"), [(2, "zero, some sharded"), (4, "zero")])
def test_zero_equals_one_process(pool: Pools, rules: str, world: int) -> None:
    check(pool, world, "gpt", ZERO[rules], FLAT, some(world))


def test_three_axes_on_eight_ranks(pool: Pools) -> None:
    rules = [
        fs.Rule(r"norm.*", P(), opt=P(flat=("replica", "shard"))),
        fs.Rule(r".*", fs.fsdp("shard"), opt=fs.fsdp(("shard", "middle"))),
    ]
    check(pool, 8, "odd", rules, CUBE, [Config("sgd", 3, prefetch=2)])


def test_unequal_microbatches_equal_one_process(pool: Pools) -> None:
    configs = [Config("sgd", 5), Config("sgd", 5, "full")]  # 12 rows a rank: microbatches of 3, 3, 2, 2 and 2
    check(pool, 2, "masked", [(r".*", fs.fsdp("shard"))], FLAT, configs)


@pytest.mark.slow
@pytest.mark.parametrize("rules", EVERYWHERE)
@pytest.mark.parametrize("name", ["gpt", "masked", "skipping"])
def test_two_axes_under_every_schedule(pool: Pools, name: str, rules: str) -> None:
    check(pool, 4, name, _for(name, EVERYWHERE[rules]), HSDP, _fit(name))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("rules", ZERO)
@pytest.mark.parametrize("name", ["gpt", "masked", "skipping"])
def test_zero_under_every_schedule(pool: Pools, name: str, rules: str, world: int) -> None:
    check(pool, world, name, _for(name, ZERO[rules]), FLAT, _fit(name))


@pytest.mark.slow
@pytest.mark.parametrize("rules", CUBES)
def test_three_axes_equal_one_process(pool: Pools, rules: str) -> None:
    check(pool, 8, "gpt", CUBES[rules], CUBE, [Config("sgd"), Config("sgd", 3, "full"), Config("adamw", 3, prefetch=2)])


def _for(name: str, rules: Sequence[Any]) -> Sequence[Any]:
    """Those of the rules that decide a leaf of this example."""
    if name == "gpt":
        return rules
    return [rule for rule in rules if (rule.pattern if isinstance(rule, fs.Rule) else rule[0]) == r".*"]


def _fit(name: str) -> list[Config]:
    """The configurations that an example can have: a mean over unequal counts is known at the end of a step."""
    return [config for config in CONFIGS if name != "masked" or config.update == "deferred"]
