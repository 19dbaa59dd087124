"""Training on meshes of several axes equals one plain process: HSDP, ZeRO-1 and 2, optimizers over all ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P, tree
from tests.shared import reference, zoo
from tests.shared.workers import Pools

STEPS = 10
LOSS = {"sgd": 1e-5, "adamw": 1e-4}
PARAM = 1e-5

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


@dataclass(frozen=True)
class Run:
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]
    problems: list[str]
    local: dict[str, Tensor]


def train(name: str, rules: Sequence[Any], axes: Any, configs: Sequence[Config]) -> list[Run]:
    """On a rank: train an example under each configuration."""
    example = zoo.build(name)
    with fs.make_mesh(*axes) as mesh:
        return [_train(example, rules, mesh, config) for config in configs]


def _train(example: zoo.Example, rules: Sequence[Any], mesh: fs.Mesh, config: Config) -> Run:
    batch = P(mesh.axis_names[0] if len(mesh.axis_names) == 1 else mesh.axis_names)
    plan = fs.make_plan(example.model, mesh, rules, batch=batch, units=example.units)
    rule = fs.optim.sgd(**reference.SGD) if config.opt == "sgd" else fs.optim.adamw(**reference.ADAMW)
    state = fs.init_state(plan, rule, params=example.params())
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
    losses, norms, problems = [], [], []
    for number in range(STEPS):
        state, metrics = step(state, zoo.cut(example.batch(number), mesh.rank, mesh.size))
        losses.append(metrics.loss.item())
        norms.append(metrics.grad_norm.item())
        if step.record != step.schedule.ops:
            pairs = enumerate(itertools.zip_longest(step.record, step.schedule.ops))
            problems.append(f"step {number}: {next((i, pair) for i, pair in pairs if pair[0] != pair[1])}")
    for name, held in state.opt_state.items():
        wrong = [path for path, buffer in tree.paths(held) if buffer.numel() != _held(plan, path)]
        problems += [f"{name} of {path} is not of the optimizer's own part" for path in wrong]
    whole = {path: leaf.clone() for path, leaf in tree.paths(fs.unshard(state.params, plan))}
    return Run(losses, norms, whole if mesh.rank == 0 else {}, problems, {})


def _held(plan: fs.Plan, path: str) -> int:
    group, number = plan.places()[path]
    return group.owned.piece(number, plan.mesh).numel


def check(pool: Pools, world: int, name: str, rules: Sequence[Any], axes: Any, configs: Sequence[Config]) -> None:
    """Train on a world of ranks and compare with one plain process."""
    ranks = pool(world).run(train, name, rules, axes, configs, timeout=110.0)
    problems: list[str] = []
    example = zoo.build(name)
    for number, config in enumerate(configs):
        runs = [rank[number] for rank in ranks]
        want = reference.train(example, config.opt, example.clip if config.update == "deferred" else None, STEPS)
        found = [text for run in runs for text in run.problems[:2]]
        if any(run.losses != runs[0].losses or run.norms != runs[0].norms for run in runs):
            found.append("ranks saw different losses or norms")
        found += [
            f"loss {a} of step {i}, expected {b}"
            for i, (a, b) in enumerate(zip(runs[0].losses, want.losses, strict=True))
            if not abs(a - b) <= LOSS[config.opt]
        ][:1]
        found += [
            f"norm {a} of step {i}, expected {b}"
            for i, (a, b) in enumerate(zip(runs[0].norms, want.norms, strict=True))
            if not abs(a - b) <= 1e-4 * max(1, b)
        ][:1]
        if config.opt == "sgd":
            found += [
                f"{path} is off by {(leaf - want.params[path]).abs().max():.2e}"
                for path, leaf in runs[0].params.items()
                if not torch.allclose(leaf, want.params[path], rtol=0, atol=PARAM)
            ][:2]
        problems += [f"{world} ranks, {name}, {config}: {text}" for text in found]
    assert not problems, "\n".join(problems)


def some(position: int) -> list[Config]:
    """Two of the configurations, others for other positions: together the cases see all of them."""
    return [CONFIGS[position % len(CONFIGS)], CONFIGS[(position + 2) % len(CONFIGS)]]


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
