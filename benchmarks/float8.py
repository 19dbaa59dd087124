"""Training in float8: held-out losses of the GPT of examples, with products in float8 and in bfloat16, over seeds.

The claim: the mean over seeds of the held-out loss in float8 is at most 1.01 of that in bfloat16. Both start from the
same parameters and read the same rows, on one process. Nothing is timed: CPUs have no fast products in float8.
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

sys.path.insert(0, str(HERE.parent / "examples"))

BF16 = fs.Precision(torch.bfloat16, inputs=True)
KINDS = {"bf16": BF16, "float8": fs.Precision(torch.bfloat16, inputs=True, products="float8_rowwise")}
SIZES = {"depth": 4, "width": 128}
ROWS, CONTEXT = 16, 96


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
        model = fs.split(GPT(**SIZES), units=("blocks.*",))
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
    means = {kind: statistics.mean(losses) for kind, losses in found.items()}
    report.rows.append(Row("float8 / bf16, held out", "loss", means["float8"] / means["bf16"], target=1.01))
    spread = (max(found["bf16"]) - min(found["bf16"])) / means["bf16"]
    report.rows.append(Row("spread of bf16 over seeds, relative", "loss", spread))
    report.notes.append("one CPU process; not run on a GPU, and not compared with torchao")
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """How long, and from how many starts."""
    cli.add_argument("--steps", type=int, default=300, help="steps of each run")
    cli.add_argument("--seeds", type=int, default=2, help="starts")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
