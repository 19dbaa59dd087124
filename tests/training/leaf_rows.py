"""Runs of one small language model whose leaves are frozen, cast and kept in all ways, on ranks and in one process.

The reference is plain PyTorch: for each part of the batch the module is called, by ``torch.func.functional_call``, with
leaves that were cast as the case says; the gradients are rounded as the case says, and added up in float32.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P
from tests.shared import modules, parity
from tests.shared.parity import Run

STEPS, ROWS, LENGTH, VOCAB = 6, 8, 16, 64
LR, MOMENTUM = 0.1, 0.9
SHARDED = (r".*", fs.fsdp("shard"))


@dataclass(frozen=True)
class Row:
    """A kind of run.

    Attributes:
        rules: of the plan.
        frozen: a pattern of the frozen leaves, for the reference.
        precision: of the plan.
        kept: a pattern of the leaves that are not cast, for the reference.
        rounded: a pattern of the leaves whose gradients are rounded to bfloat16, for the reference.
        step: arguments of ``make_train_step``.
        cast: whether blocks get inputs in bfloat16 and give results in float32.
        later: what follows after the first half of the steps: the rules and the frozen leaves.
    """

    rules: Sequence[Any] = (SHARDED,)
    frozen: str = "-"
    precision: fs.Precision = fs.Precision()
    kept: str = "-"
    rounded: str = "-"
    step: Mapping[str, Any] = field(default_factory=dict)
    cast: bool = False
    later: tuple[Sequence[Any], str] | None = None


def module() -> modules.GPT:
    """The model with its first values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return modules.GPT()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A global batch."""
    x = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step % 2))
    return x, (3 * x + 1) % VOCAB


def part(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """A rank's part of it."""
    x, y = batch(step)
    return x.chunk(world)[rank], y.chunk(world)[rank]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """In float32, whatever the logits are."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def run(row: Row) -> list[Run]:
    """On a rank: train under each of the row's rules."""
    model = fs.split(module(), units=("blocks.*",))
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(model, mesh, row.rules, precision=row.precision)
        opt = fs.optim.sgd(LR, momentum=MOMENTUM)
        state = fs.init_state(plan, opt, params=model.params)
        runs: list[Run] = []
        phases = (row.rules, row.later[0]) if row.later else (row.rules,)
        for number, rules in enumerate(phases):
            if runs:
                plan = plan.replace(rules=rules)
                state = fs.reshard_state(state, plan, opt)
            step = fs.make_train_step(loss_fn(model), opt, plan, debug=True, **row.step)
            steps = STEPS // len(phases)
            batches = (part(i, mesh.rank, mesh.size) for i in range(number * steps, (number + 1) * steps))
            run, state = parity.sharded(step, state, plan, batches)
            runs.append(run)
        return runs


def loss_fn(model: fs.Model) -> Callable[[Any, Any], Tensor]:
    """The loss of a split model."""
    return lambda params, b: loss_of(model.apply(params, b[0]), b[1])


def plain(row: Row, world: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process: losses and last parameters."""
    net = module()
    for block in net.blocks if row.cast else ():
        block.register_forward_pre_hook(lambda module, args: tuple(x.bfloat16() for x in args))
        block.register_forward_hook(lambda module, args, out: out.float())
    kept = {path: leaf.detach().clone() for path, leaf in net.named_parameters()}
    buffers: dict[str, Tensor] = {}
    losses = []
    for step in range(STEPS):
        frozen = row.later[1] if row.later and step >= STEPS // 2 else row.frozen
        trained = [path for path in kept if not re.fullmatch(frozen, path)]
        sums = {path: torch.zeros_like(kept[path]) for path in trained}
        values = []
        for rank in range(world):
            held = {path: _cast(row, path, leaf).requires_grad_(path in sums) for path, leaf in kept.items()}
            x, y = part(step, rank, world)
            loss = loss_of(torch.func.functional_call(net, held, (x,)), y)
            grads = torch.autograd.grad(loss / world, [held[path] for path in trained])
            values.append(loss.item())
            for path, grad in zip(trained, grads, strict=True):
                sums[path] += (grad.bfloat16() if re.fullmatch(row.rounded, path) else grad).float()
        losses.append(sum(values) / world)
        for path, total in sums.items():
            buffers[path] = MOMENTUM * buffers[path] + total if path in buffers else total
            kept[path] = kept[path] - LR * buffers[path]
    return losses, kept


def _cast(row: Row, path: str, leaf: Tensor) -> Tensor:
    compute = row.precision.compute
    return leaf.clone() if compute is None or re.fullmatch(row.kept, path) else leaf.to(compute)


FROZEN_BLOCK = fs.Rule(r"blocks\.0\..*", fs.fsdp("shard"), trainable=False)
NORMS = r".*norm.*"
EXACT_NORMS = fs.Rule(NORMS, P(), precision=fs.Precision())
ROOT = r"(tok|pos|norm)\..*"
BF16 = fs.Precision(torch.bfloat16)

ROWS_OF_LEAVES: dict[str, Row] = {
    "a block": Row([FROZEN_BLOCK, SHARDED], r"blocks\.0\..*"),
    "a block, kept with the last": Row(
        [FROZEN_BLOCK, SHARDED],
        r"blocks\.0\..*",
        step={"schedule": fs.Policy(reshard=fs.keep("blocks.0", last=1)), "accumulate": 2},
    ),
    "small and some large persist, in bfloat16": Row(
        [fs.Rule(r"blocks\.2\..*", fs.fsdp("shard", min_size=200), trainable=False), (r".*", fs.fsdp("shard", 200))],
        r"blocks\.2\..*",
        BF16,
        step={"schedule": fs.Policy(prefetch=0, reshard=fs.keep("blocks.[12]"))},
    ),
    "the first units": Row(
        [fs.Rule(r"(blocks\.[01]|tok|pos)\..*", fs.fsdp("shard"), trainable=False), SHARDED],
        r"(blocks\.[01]|tok|pos)\..*",
    ),
    "all but norms": Row([(NORMS, P()), fs.Rule(".*", fs.fsdp("shard"), trainable=False)], "(?!.*norm).*"),
    "all but biases, rows": Row(
        [fs.Rule(r".*bias", P()), fs.Rule(".*", P("shard"), trainable=False)], "(?!.*bias).*", step={"compile": "fx"}
    ),
    "frozen in bfloat16": Row([FROZEN_BLOCK, SHARDED], r"blocks\.0\..*", BF16),
    "norms in float32": Row([EXACT_NORMS, SHARDED], precision=BF16, kept=NORMS),
    "rounded gradients of norms": Row(
        [fs.Rule(NORMS, fs.fsdp("shard"), precision=fs.Precision(reduce=torch.bfloat16)), SHARDED], rounded=NORMS
    ),
    "inputs and outputs": Row(
        [fs.Rule(ROOT, fs.fsdp("shard"), precision=fs.Precision()), SHARDED],
        precision=fs.Precision(torch.bfloat16, output=torch.float32, inputs=True),
        kept=ROOT,
        cast=True,
    ),
    "inputs and outputs, graphs": Row(
        [fs.Rule(ROOT, fs.fsdp("shard"), precision=fs.Precision()), SHARDED],
        precision=fs.Precision(torch.bfloat16, output=torch.float32, inputs=True),
        kept=ROOT,
        cast=True,
        step={"compile": "fx", "remat": "all", "accumulate": 1},
    ),
    "unfrozen": Row(
        [FROZEN_BLOCK, SHARDED],
        r"blocks\.0\..*",
        later=([SHARDED], "-"),
    ),
    "frozen later": Row(
        [SHARDED], later=([fs.Rule(r".*weight", fs.fsdp("shard"), trainable=False), SHARDED], ".*weight")
    ),
    "unfrozen, otherwise sharded": Row(
        [fs.Rule(r".*attn.*", P("shard"), trainable=False), (NORMS, P()), SHARDED],
        r".*attn.*",
        later=([(r".*mlp.*weight", P("shard")), SHARDED], "-"),
    ),
}
