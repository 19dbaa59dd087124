"""Two hosts that train apart and exchange four bits an element every 30 steps, beside a synchronous run.

Run it as `python examples/outer.py`, which plays both hosts in one process, or as
`torchrun --nproc-per-node 2 examples/outer.py`, on any even number of ranks.
"""

import math
import os
import random
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from train_gpt import GPT

import fshard as fs

try:
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example shows its progress with tqdm: pip install "fshard[examples]"') from None


def texts(args: Namespace) -> tuple[Tensor, Tensor]:
    """Windows of CPython's documentation to train on, and the rows that judge."""
    data = "".join(topics[name] for name in sorted(topics)).encode()
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    rows = text[cut:].unfold(0, args.context + 1, args.context)
    return text[:cut].unfold(0, args.context + 1, 1), rows[: len(rows) // args.batch * args.batch][: 16 * args.batch]


def train(args: Namespace, mesh: fs.Mesh, apart: bool) -> tuple[float, int]:
    """Bits per byte of the held-out text after training, and the bytes that this rank has sent to the other host."""
    windows, tests = texts(args)
    with fs.empty_weights():
        model = fs.split(GPT(args.depth, args.width), units=("blocks.*",))

    def bits_per_byte(params: dict, rows: Tensor) -> Tensor:
        logits = model.apply(params, rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / math.log(2)

    early = 3 * args.steps // 20 // args.early * args.early
    until = early + bool(early) if args.until is None else args.until
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P(("host", "data")))
    rate = fs.optim.schedules.warmup_cosine(args.lr, warmup=args.steps // 8, total=args.steps)
    opt = fs.optim.adamw(rate, betas=(0.9, 0.95), weight_decay=0.1, decay=fs.optim.matrices)
    step = later = fs.make_train_step(bits_per_byte, opt, plan, clip_norm=1.0)
    if apart:
        outer = fs.optim.sgd(args.outer_lr, momentum=args.momentum, nesterov=args.momentum > 0)
        kinds = {"fragments": args.fragments, "delay": args.delay}
        later = fs.outer(step, outer, every=args.every, over="host", wire=args.wire, **kinds)
        # At first replicas learn fast, and move apart fast: the whole model is exchanged more often.
        step = fs.outer(step, outer, every=args.early, over="host", wire=args.wire)
    init = [(r".*\.(out|down)\.weight", fs.init.normal(0.04 / math.sqrt(2 * args.depth)))]
    init += [(r"(.*\.)?(embed|qkv|up)\.weight", fs.init.normal(0.04))]
    state = fs.init_state(step.plan, step.opt, seed=args.seed, init=init)
    if apart and mesh.rank == 0:
        print(f"{step.exchanges}\nand from step {until + 1} on:\n{later.exchanges}")

    sent = 0
    for number in tqdm(range(args.steps), desc="apart" if apart else "together", disable=mesh.rank != 0):
        if number == until and apart:  # no fragment is under way
            state, step = fs.reshard_state(state, later.plan, later.opt), later
        drawn = random.Random(f"{args.seed} {number}").choices(range(len(windows)), k=args.batch)
        state, metrics = step(state, plan.local_batch(windows[drawn]).long())
        moves = {} if apart else {move: move.sent for g in step.schedule.groups for move in g.transfers}
        sent += step.sent(state.step) if apart else sum(n for move, n in moves.items() if "host" in move.axes)
    # What all replicas agree on is the anchor. Each host judges it by half of the rows.
    evaluate = fs.make_eval_step(bits_per_byte, step.plan)
    judged = fs.averaged(state, "anchor") if apart else state
    parts = [tests[at : at + args.batch] for at in range(0, len(tests), args.batch)]
    bits = sum(evaluate(judged, step.plan.local_batch(rows).long()).item() for rows in parts) / len(parts)
    return bits, sent


def main(args: Namespace) -> None:
    """Both runs, of as many tokens."""
    with fs.make_mesh((2, -1), ("host", "data")) as mesh:
        found = {apart: train(args, mesh, apart) for apart in (False, True)}
        both = [fs.collectives.pmean(torch.tensor(bits), "host", mesh=mesh).item() for bits, _ in found.values()]
        if mesh.rank == 0:
            for name, bits, (_, sent) in zip(("together", "apart"), both, found.values(), strict=True):
                each = sent / args.steps
                print(f"{name}: {bits:.3f} bits per byte of the held-out text; {each:,.0f} bytes a step between hosts")
            print(f"apart sends {found[False][1] / max(1, found[True][1]):.0f} times less")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=240, help="train steps")
    cli.add_argument("--batch", type=int, default=24, help="windows in a step, over both hosts")
    cli.add_argument("--context", type=int, default=128, help="bytes in a window")
    cli.add_argument("--depth", type=int, default=4, help="blocks")
    cli.add_argument("--width", type=int, default=128, help="features, a multiple of 32")
    cli.add_argument("--lr", type=float, default=6e-3, help="peak learning rate of the inner optimizer")
    cli.add_argument("--outer-lr", type=float, default=1.0, help="learning rate of the outer optimizer")
    cli.add_argument("--momentum", type=float, default=0.0, help="of the outer optimizer; DiLoCo: 0.7 and 0.9")
    cli.add_argument("--early", type=int, default=5, help="steps between two exchanges of the whole model at first")
    cli.add_argument("--until", type=int, help="steps with that, 0 for none; a seventh of all if it is not given")
    cli.add_argument("--every", type=int, default=30, help="steps between two exchanges of a fragment")
    cli.add_argument("--wire", choices=("fp32", "bf16", "int8", "int4"), default="int4", help="format of differences")
    cli.add_argument("--fragments", type=int, default=4, help="parts of the model that leave one after the other")
    cli.add_argument("--delay", type=int, default=1, help="steps for which a fragment travels")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and data order")
    args = cli.parse_args()
    if "RANK" in os.environ:
        main(args)
    else:
        fs.virtual_mesh((2, 1), ("host", "data")).run(main, args)
