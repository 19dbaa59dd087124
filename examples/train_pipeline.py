"""Train a small GPT whose blocks are on different ranks, and shard each stage over further ones.

Run it as `torchrun --nproc-per-node 4 examples/train_pipeline.py`: 2 stages of 2 shards. Alone, as
`python examples/train_pipeline.py`, there is one stage. With `--out FOLDER` it saves its state there, and the same
command goes on from the last one, also with another number of `--stages`.
"""

import math
import os
import random
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from train_gpt import GPT  # the same model

import fshard as fs

try:
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example shows its progress with tqdm: pip install "fshard[examples]"') from None


def train(args: Namespace, mesh: fs.Mesh) -> None:
    """Train, save and evaluate."""
    parts = mesh.shape["data"]
    if args.batch % (parts * args.microbatches) or args.width % 32:
        raise SystemExit(f"--batch must be a multiple of {parts * args.microbatches}, and --width one of 32")
    data = bytearray("".join(topics[name] for name in sorted(topics)).encode())  # CPython's own documentation
    text = torch.frombuffer(data, dtype=torch.uint8).to(mesh.device)
    seen, unseen = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    windows = seen.unfold(0, args.context + 1, 1)  # a view: every window, with the byte after it
    tests = unseen[: 48 * (args.context + 1)].view(48, -1)[: 48 // parts * parts]

    with fs.empty_weights():
        model = fs.split(GPT(args.depth, args.width), units=("blocks.*",))
    # The head is the embedding: that leaf is read before the first block and behind the last one.
    stages = fs.Stages("stage", chunks=args.chunks, leaves=[(r"embed\.weight", (0, -1)), (r"norm\.weight", -1)])
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"), stages=stages)
    opt = fs.optim.adamw(args.lr, betas=(0.9, 0.95), weight_decay=0.1, decay=fs.optim.matrices)
    normal, narrow = fs.init.normal(0.04), fs.init.normal(0.04 / math.sqrt(2 * args.depth))  # norms start at 1
    init = [(r".*\.(out|down)\.weight", narrow), (r"(.*\.)?(embed|qkv|up)\.weight", normal)]

    def bits_per_byte(params: dict, rows: Tensor) -> Tensor:
        logits = model.apply(params, rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / math.log(2)

    def draw(i: int) -> Tensor:  # ranks of one pipeline have the same rows
        rows = windows[random.Random(f"{args.seed} {i}").choices(range(len(windows)), k=args.batch)]
        return plan.local_batch(rows).long()

    policy = fs.Policy(pipeline=args.schedule)
    step = fs.make_train_step(
        bits_per_byte, opt, plan, accumulate=args.microbatches, clip_norm=1.0, schedule=policy, debug=args.debug
    )
    evaluate = fs.make_eval_step(bits_per_byte, plan)
    saved = fs.Checkpointer(args.out) if args.out else None
    if saved and saved.latest() is not None:
        state = saved.restore(plan, opt)
    else:
        state = fs.init_state(plan, opt, seed=args.seed, init=init)
    say = tqdm.write if mesh.rank == 0 else lambda line: None
    say(f"{args.stages} stages of {parts} shards, step {state.step}: rank 0 holds {len(plan.own.leaves)} leaves")
    if args.print_plan:
        say(str(plan.own))
    begun = state.step
    for i in (bar := tqdm(range(begun, args.steps), unit="step", disable=mesh.rank != 0)):
        state, metrics = step(state, draw(i))
        if i % 10 == 0:
            bar.set_postfix_str(f"loss {metrics.loss:.3f}, gradient norm {metrics.grad_norm:.2f}")
        if i == begun or (i + 1) % max(1, args.steps // 4) == 0 or i + 1 == args.steps:
            bits = evaluate(state, plan.local_batch(tests).long()).item()
            say(f"step {i + 1}: loss {metrics.loss:.3f}, {bits:.3f} bits per byte of held-out text")
    if args.print_schedule and args.steps > begun:
        say(str(step.schedule))
    if saved and args.steps > begun:
        saved.save(state)
        say(f"step {state.step} is saved: the same command goes on there, on any number of stages")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    cli.add_argument("--stages", type=int, default=math.gcd(2, ranks), help="ranks of a pipeline")
    cli.add_argument("--chunks", type=int, default=1, help="stages on each of them")
    orders = ("gpipe", "1f1b", "interleaved", "zb_h1")
    cli.add_argument("--schedule", default="", choices=("", *orders), help="1f1b, or interleaved with chunks")
    cli.add_argument("--microbatches", type=int, default=4, help="in a step")
    cli.add_argument("--steps", type=int, default=120, help="train steps, those of runs before included")
    cli.add_argument("--out", type=Path, metavar="FOLDER", help="for checkpoints, from which a run goes on")
    cli.add_argument("--batch", type=int, default=16, help="windows in a step, over all ranks")
    cli.add_argument("--context", type=int, default=128, help="bytes in a window")
    cli.add_argument("--depth", type=int, default=4, help="blocks")
    cli.add_argument("--width", type=int, default=128, help="features, a multiple of 32")
    cli.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and data order")
    cli.add_argument("--debug", action="store_true", help="poison freed memory, compare gradients of copies")
    cli.add_argument("--print-plan", action="store_true", help="print what rank 0 holds")
    cli.add_argument("--print-schedule", action="store_true", help="print what a step of rank 0 does, in order")
    args = cli.parse_args()
    with fs.make_mesh((args.stages, -1), ("stage", "data")) as mesh:
        train(args, mesh)
