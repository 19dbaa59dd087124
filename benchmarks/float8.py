"""Training in float8: held-out losses of the GPT of examples, with products in float8 and in bfloat16, over seeds.

The claim: the held-out loss in float8, from each seed, differs from that in bfloat16 by less than losses in bfloat16
differ between seeds; and so does that of torchao's recipe "rowwise", which is emulated. All start from the same
parameters and read the same rows, on one process. Nothing is timed: CPUs have no fast products in float8.
"""

import argparse
import random
import statistics
import sys
from pydoc_data.topics import topics
from typing import Any

import torch
from common import HERE, Report, Row, arguments
from torch import Tensor, nn

import fshard as fs
from fshard.model.float8 import FLOAT8, LARGEST

sys.path.insert(0, str(HERE.parent / "examples"))

BF16 = fs.Precision(torch.bfloat16, inputs=True)
FLOAT8_ROWS = fs.Precision(torch.bfloat16, inputs=True, products="float8_rowwise")
KINDS = {"bf16": BF16, "float8": FLOAT8_ROWS, "torchao's recipe": BF16}
SIZES = {"depth": 2, "width": 64}
ROWS, CONTEXT = 4, 64


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a matrix in float8, and their scales, which are powers of two."""
    wide = x.to(torch.float32)
    factor = (LARGEST / wide.abs().amax(1, keepdim=True).double().clamp(min=1e-12)).float()
    factor = torch.exp2(torch.floor(torch.log2(factor)))
    return (wide * factor).clamp(-LARGEST, LARGEST).to(FLOAT8), factor.reciprocal()


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T``, with both rounded by rows."""
    (left, by_left), (right, by_right) = cast(a), cast(b)
    return torch._scaled_mm(left, right.t(), by_left, by_right.t(), out_dtype=torch.bfloat16)


class Recipe(torch.autograd.Function):
    """A linear layer after torchao's recipe "rowwise": each of its three products rounds both factors anew."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return product(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        return product(flat, weight.t()).view(x.shape), product(flat.t(), x.flatten(0, -2).t())


class RecipeLinear(nn.Linear):
    """A layer whose products are those of the recipe."""

    def forward(self, x: Tensor) -> Tensor:
        return Recipe.apply(x, self.weight)


def windows() -> tuple[Tensor, Tensor]:
    """Rows of bytes with the byte after them: to train on, and held out."""
    text = torch.frombuffer(bytearray("".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    return text[:cut].unfold(0, CONTEXT + 1, 1), text[cut:].unfold(0, CONTEXT + 1, CONTEXT)[:64].long()


def trained(kind: str, seed: int, steps: int) -> tuple[float, float]:
    """The mean loss of the last tenth of the steps, and the held-out loss after them, in nats a byte."""
    from train_gpt import GPT

    seen, unseen = windows()
    mesh = fs.make_mesh((-1,), ("data",))
    with fs.empty_weights():
        module = GPT(**SIZES)
        for layer in [
            each for each in module.modules() if isinstance(each, nn.Linear) and kind not in ("bf16", "float8")
        ]:
            layer.__class__ = RecipeLinear
        model = fs.split(module, units=("blocks.*",))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], precision=KINDS[kind])
    rate = fs.optim.schedules.warmup_cosine(2e-3, warmup=steps // 10, total=steps)
    opt = fs.optim.adamw(rate, betas=(0.9, 0.95), weight_decay=0.1, decay=fs.optim.matrices)
    init = [(r"(.*\.)?(embed|qkv|up|out|down)\.weight", fs.init.normal(0.04))]

    def loss(params: dict[str, Any], rows: Tensor) -> Tensor:
        logits = model.apply(params, rows[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    step, losses = fs.make_train_step(loss, opt, plan, clip_norm=1.0, compile="fx"), []
    state = fs.init_state(plan, opt, seed=seed, init=init)
    for number in range(steps):
        rows = seen[random.Random(f"{seed} {number}").choices(range(len(seen)), k=ROWS)].long()
        state, metrics = step(state, rows)
        losses.append(float(metrics.loss))
    held_out = float(fs.make_eval_step(loss, plan)(state, unseen))
    return statistics.mean(losses[-max(1, steps // 10) :]), held_out


def measure(args: argparse.Namespace) -> int:
    """Train each kind from each seed, and report."""
    steps, seeds = (20, 2) if args.quick else (args.steps, args.seeds)
    report = Report("float8", __doc__.splitlines()[0], {"model": SIZES, "steps": steps, "seeds": seeds, "rows": ROWS})
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in range(seeds):
        for kind in KINDS:
            last, held_out = trained(kind, seed, steps)
            found[kind].append(held_out)
            report.rows.append(Row(f"{kind}, seed {seed}, last tenth of the steps", "nats", last))
            report.rows.append(Row(f"{kind}, seed {seed}, held out", "nats", held_out))
    bf16 = found["bf16"]
    spread = max(bf16) - min(bf16)
    report.rows.append(Row("spread of bf16 over seeds, held out", "nats", spread))
    for kind in [kind for kind in KINDS if kind != "bf16"]:
        apart = max(abs(one - other) for one, other in zip(found[kind], bf16, strict=True))
        report.rows.append(Row(f"{kind} from bf16, most of all seeds / spread", "loss", apart / spread, target=1.0))
        mean = statistics.mean(found[kind]) / statistics.mean(bf16)
        report.rows.append(Row(f"{kind} / bf16, means held out", "loss", mean, target=1.01))
    report.notes.append(
        "one CPU process; not run on a GPU. torchao's recipe is written from its description, and is not its code"
    )
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """How long, and from how many starts."""
    cli.add_argument("--steps", type=int, default=2000, help="steps of each run")
    cli.add_argument("--seeds", type=int, default=3, help="starts")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
