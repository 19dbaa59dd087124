"""Memory kinds: parameters and optimizer state in host memory, updated on either side.

On a mesh of processors the memory of the "device" and of its "host" is one, so ``unpinned_host`` does everything that
``pinned_host`` does on a GPU but wait for streams: shards lie elsewhere than what units read, and all copies are made.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from tests.shared import parity, reference, zoo
from tests.shared.parity import Run
from tests.shared.virtual import Virtual
from tests.shared.workers import Pools

HOST = "unpinned_host"
STEPS = 6
KINDS: dict[str, dict[str, Any]] = {
    "all on the host": {"memory_kind": HOST},
    "kept on the host": {"memory_kind": HOST, "update_on": "device"},
    "state on the host": {"opt_memory_kind": HOST},
    "state on the host, updated there": {"opt_memory_kind": HOST, "update_on": "host"},
    "parameters on the host": {"memory_kind": HOST, "opt_memory_kind": "device"},
    "parameters on the host, updated there": {
        "memory_kind": HOST,
        "opt_memory_kind": "device",
        "update_on": "host",
    },
}


@dataclass(frozen=True)
class Config:
    """How a step is made. With ``some`` rules, only their leaves are not simply on the device."""

    opt: str = "adamw"
    name: str = "odd"
    policy: fs.Policy = fs.Policy()
    precision: fs.Precision | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    some: Sequence[Any] = ()


CONFIGS = {
    "microbatches": Config("sgd", options={"accumulate": 2, "clip_norm": 0.1}),
    "whole gradients": Config(policy=fs.Policy(2, 2, accumulation="full"), options={"accumulate": 2}),
    "update in the backward": Config(policy=fs.Policy(update="in_backward")),
    "nothing donated": Config(options={"donate": False}),
    "kept gathered": Config(policy=fs.Policy(prefetch=2, reshard=False)),
    "clip by rule": Config(options={"clip_norm": [(r".*norm.*", 0.01), (r".*", 0.1)]}),
    "graphs": Config(options={"compile": "fx"}),
    "bfloat16": Config(name="gpt", precision=fs.Precision(torch.bfloat16)),
    "scaled": Config(options={"loss_scale": fs.LossScale(64.0, 2)}),
    "every second": Config("every", options={"clip_norm": 0.1}),
    "average": Config("ema"),
    "rows and columns": Config(name="conv"),
    "adapters": Config(name="adapted"),
    "on demand": Config(name="branching"),
    "means": Config(name="masked"),
    "some leaves": Config(some=[(r"(first\..*|norm\.weight)", fs.fsdp("shard"))], options={"clip_norm": 0.1}),
    "tied, some leaves": Config("sgd", "gpt", some=[(r"blocks\.\d\.attn.*", P())]),
}
HERE = ["all on the host", "kept on the host", "state on the host, updated there"]
"""The kinds under which every configuration is run: the host updates, the device does, and what is copied for it."""


def hosted(rules: Sequence[Any], kinds: Mapping[str, Any]) -> list[Any]:
    """The rules, with leaves in other memory."""
    full = [rule if isinstance(rule, fs.Rule) else fs.Rule(*rule) for rule in rules]
    return [dataclasses.replace(rule, **kinds) for rule in full]


def optimizer(name: str) -> Any:
    """The optimizer of a configuration."""
    adamw = fs.optim.adamw(**reference.ADAMW)
    makers = {
        "sgd": lambda: fs.optim.sgd(**reference.SGD),
        "adamw": lambda: adamw,
        "every": lambda: fs.optim.every(2, adamw),
        "ema": lambda: fs.optim.ema(adamw, 0.9),
    }
    return makers[name]()


def train(
    configs: Sequence[tuple[Config, Mapping[str, Any]]], steps: int = STEPS, axes: Any = ((-1,), ("shard",))
) -> list[Run]:
    """On a rank: train under each configuration, with freed ranges poisoned."""
    with fs.make_mesh(*axes) as mesh:
        return [_train(mesh, config, kinds, steps) for config, kinds in configs]


def _plan(mesh: fs.Mesh, config: Config, kinds: Mapping[str, Any]) -> tuple[zoo.Example, fs.Plan]:
    example, names = zoo.build(config.name), mesh.axis_names
    rules = [*hosted(config.some, kinds), *hosted(example.rules, {} if config.some else kinds)]
    spec = P(names[0] if len(names) == 1 else names)
    return example, fs.make_plan(
        example.model, mesh, rules, batch=spec, units=example.units, precision=config.precision
    )


def _train(mesh: fs.Mesh, config: Config, kinds: Mapping[str, Any], steps: int) -> Run:
    example, plan = _plan(mesh, config, kinds)
    rule = optimizer(config.opt)
    state = fs.init_state(plan, rule, params=example.params())
    options = {"debug": True, **config.options}
    step = fs.make_train_step(example.loss_fn, rule, plan, schedule=config.policy, **options)
    run, _ = parity.sharded(
        step, state, plan, example.batches(mesh, steps), scheduled_from=None if config.name == "branching" else 0
    )
    made = step._runner.programs.memory.gradients
    left = [g for g, each in made.items() if each.own is not each.home and each.own.untyped_storage().nbytes()]
    run.problems.extend(f"the gradient of group {g} is still on the device" for g in left)
    return run


@functools.cache
def _expected(name: str, opt: str) -> Run:
    return reference.train(zoo.build(name), opt, None, STEPS)


def check(pool: Pools, world: int, name: str) -> None:
    """Train under every combination and compare with one plain process."""
    cases = [(opt, kinds) for opt in ("sgd", "adamw") for kinds in KINDS]
    runs = pool(world).run(train, [(Config(opt, name), KINDS[kinds]) for opt, kinds in cases], timeout=280.0)
    problems = []
    for number, (opt, kinds) in enumerate(cases):
        found = parity.differences([rank[number] for rank in runs], _expected(name, opt))
        problems += [f"{opt}, {kinds}: {text}" for text in found]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_combination_equals_one_process(pool: Pools, world: int) -> None:
    check(pool, world, "odd")


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt", "unet", "conv", "twice"])
def test_every_combination_of_other_programs(pool: Pools, name: str, world: int) -> None:
    check(pool, world, name)


def some(position: int, many: int) -> list[str]:
    """So many of three, others for other positions."""
    return [HERE[(position + number) % len(HERE)] for number in range(many)]


@pytest.mark.slow
@pytest.mark.parametrize("many", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*left their schedule")
def test_where_things_lie_changes_no_bit(pool: Pools, many: int) -> None:
    """With one kind on virtual ranks, with three on processes."""
    chosen = [(at, config) for at, config in enumerate(CONFIGS) if many > 1 or at % 2]
    cases = [(config, kinds) for at, config in chosen for kinds in ("", *some(at, many))]
    ranks = pool(2) if many == 3 else Virtual(2)
    runs = ranks.run(train, [(CONFIGS[c], KINDS.get(k, {})) for c, k in cases], 3, timeout=110.0)
    problems = []
    for rank, seen in enumerate(runs):
        by_case = dict(zip(cases, seen, strict=True))
        for (config, kinds), run in by_case.items():
            where = f"{config}, {kinds or 'on the device'}, rank {rank}"
            problems += [f"{where}: {text}" for text in run.problems]
            problems += [f"{where}: {text}" for text in _unlike(run, by_case[config, ""], bool(CONFIGS[config].some))]
    assert not problems, "\n".join(problems)


def _unlike(run: Run, other: Run, close: bool) -> list[str]:
    """How two runs differ. Where a unit's leaves are kept in two memories, groups are others, and sums are close."""
    out = []
    if not torch.allclose(torch.tensor(run.norms), torch.tensor(other.norms), rtol=1e-6 if close else 0, atol=0):
        out.append(f"norms {run.norms}, expected {other.norms}")
    if not torch.allclose(torch.tensor(run.losses), torch.tensor(other.losses), rtol=0, atol=1e-6 if close else 0):
        out.append(f"losses {run.losses}, expected {other.losses}")
    for path, leaf in other.params.items():
        same = torch.allclose(leaf, run.params[path], atol=1e-6) if close else torch.equal(leaf, run.params[path])
        out += [] if same else [f"{path} differs"]
    for path, leaf in other.state.items() if not close else ():
        out += [] if torch.equal(leaf, run.state[path]) else [f"{path} differs"]
    return out[:3]
