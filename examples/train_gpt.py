"""Train a small GPT on the bytes of real text, sharded over however many ranks there are.

Run it as `python examples/train_gpt.py`, or as `torchrun --nproc-per-node 2 examples/train_gpt.py`. With `--out FOLDER`
it saves checkpoints and metrics there, and the same command goes on from the last one, on any number of ranks.
"""

import gzip
import math
import random
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import fshard as fs  # pip install "fshard[examples]"


class Block(nn.Module):
    """Causal self-attention, then an MLP: each reads the normed stream and adds to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes (batch, time) to logits of the next byte (batch, time, 256). The embedding is the head, too."""

    def __init__(self, depth: int, width: int, head_width: int = 32) -> None:
        super().__init__()
        self.embed, self.norm, self.head_width = nn.Embedding(256, width), nn.RMSNorm(width), head_width
        self.blocks = nn.ModuleList(Block(width, width // head_width) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device).float()
        angle = torch.outer(place, 10000 ** -torch.arange(0, 1, 2 / self.head_width, device=tokens.device))
        x, cos, sin = self.embed(tokens), angle.cos(), angle.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return nn.functional.linear(self.norm(x), self.embed.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with the place, so that q @ k sees distances (RoPE)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def sample(model: fs.Model, params: dict, prompt: Tensor, context: int, count: int = 400) -> str:
    """A prompt, continued. Outside of a step, the model is a plain function of whole tensors."""
    text, generator = prompt[None].long(), torch.Generator(prompt.device).manual_seed(0)
    for _ in range(count):
        odds = (model.apply(params, text[:, -context:])[:, -1] / 0.7).softmax(-1)
        text = torch.cat((text, torch.multinomial(odds, 1, generator=generator)), dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def train(args: Namespace, mesh: fs.Mesh) -> None:
    """Train, evaluate, sample."""
    docs = "".join(topics[name] for name in sorted(topics)).encode()
    data = b"".join(file.read_bytes() for file in args.data) if args.data else docs
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(mesh.device)
    seen, unseen = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :][: 1 << 16]  # 64 KiB judge well enough
    size, parts = args.batch * args.context, mesh.size * args.accumulate
    if args.batch % parts or args.width % 32:
        raise SystemExit(f"--batch must be a multiple of {parts} (ranks x --accumulate), and --width one of 32")
    if len(unseen) <= size:
        raise SystemExit(f"{len(unseen)} held-out bytes are less than one batch of {size}: give --data more text")
    windows = seen.unfold(0, args.context + 1, 1)  # a view: every window, with the byte after it
    tests = [part.unfold(0, args.context + 1, args.context) for part in unseen.unfold(0, size + 1, size)]

    with fs.empty_weights():  # takes no memory: init_state makes each rank's shards, and nothing is ever whole
        model = fs.split(GPT(args.depth, args.width), units=("blocks.*",))
    if args.wire and args.replicas > 1:  # in how many bits gradients travel between replicas, where links are slow
        wire = fs.Wire(reduce={"replica": args.wire}, feedback=args.wire != "fp32")
    else:  # and all that travels
        wire = fs.Wire(gather=args.wire, reduce=args.wire)
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P(mesh.axis_names), wire=wire)
    rate = fs.optim.schedules.warmup_cosine(args.lr, warmup=min(100, args.steps // 8), total=args.steps)
    opt = fs.optim.adamw(rate, betas=(0.9, 0.95), weight_decay=0.1, decay=fs.optim.matrices)
    normal, narrow = fs.init.normal(0.04), fs.init.normal(0.04 / math.sqrt(2 * args.depth))  # norms start at 1
    init = [(r".*\.(out|down)\.weight", narrow), (r"(.*\.)?(embed|qkv|up)\.weight", normal)]

    def start() -> fs.TrainState:
        return fs.init_state(plan, opt, seed=args.seed, init=init)

    def bits_per_byte(params: dict, rows: Tensor) -> Tensor:
        logits = model.apply(params, rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / math.log(2)

    def mine(rows: Tensor) -> Tensor:  # this rank's part of a global batch
        return plan.local_batch(rows).long()

    def draw(i: int) -> Tensor:  # depends on seed and step alone, so that any number of ranks sees the same data
        return mine(windows[random.Random(f"{args.seed} {i}").choices(range(len(windows)), k=args.batch)])

    policy = fs.Policy(prefetch=args.prefetch, reshard=not args.no_reshard)
    step = fs.make_train_step(bits_per_byte, opt, plan, clip_norm=1.0, accumulate=args.accumulate, schedule=policy)
    evaluate = fs.make_eval_step(bits_per_byte, plan)
    say = print if mesh.rank == 0 else lambda *line: None
    if args.print_plan:
        say(plan)
    if args.print_schedule:
        say(step.trace(draw(0)))

    trackers, saved = [fs.trackers.Live(args.steps)], None
    if args.out:
        trackers.append(fs.trackers.JsonLines(args.out / "metrics.jsonl"))
        saved = fs.Checkpointer(args.out / "checkpoints", every=args.every, keep=2)
    with fs.track(trackers, step, elements=size, config=vars(args)) as track:
        for state, _ in fs.train_loop(step, start, draw, steps=args.steps, checkpoints=saved, track=track):
            if state.step % args.every == 0 or state.step == args.steps:
                bits = sum(evaluate(state, mine(rows)).item() for rows in tests) / len(tests)
                track(state.step, {"held out": bits})
                say(f"step {state.step}: {bits:.3f} bits per byte of the held-out text")
    state = saved.restore(plan, opt) if saved else state  # a run that was over yields no state

    share, zipped = unseen.bincount() / len(unseen), gzip.compress(bytes(unseen.tolist()), 9)
    say(f"order 0: {-share.xlogy(share).sum() / math.log(2):.3f}, the entropy of the held-out text's byte counts")
    say(f"gzip -9: {8 * len(zipped) / len(unseen):.3f}, the held-out text compressed alone")
    whole = fs.unshard(state.params, plan)
    if mesh.rank == 0:
        say(f"64 bytes of the held-out text, continued:\n{sample(model, whole, unseen[:64], args.context)}")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE", help="text; else CPython's own docs")
    cli.add_argument("--out", type=Path, metavar="FOLDER", help="for checkpoints and metrics, from which a run goes on")
    cli.add_argument("--steps", type=int, default=800, help="train steps")
    cli.add_argument("--every", type=int, default=200, help="steps between two evaluations, and two checkpoints")
    cli.add_argument("--batch", type=int, default=24, help="windows in a step, over all ranks")
    cli.add_argument("--context", type=int, default=128, help="bytes in a window")
    cli.add_argument("--depth", type=int, default=4, help="blocks")
    cli.add_argument("--width", type=int, default=128, help="features, a multiple of 32")
    cli.add_argument("--lr", type=float, default=6e-3, help="peak learning rate")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and data order")
    cli.add_argument("--accumulate", type=int, default=1, help="microbatches in a step")
    cli.add_argument("--prefetch", type=int, default=2, help="calls ahead of which weights are gathered")
    cli.add_argument("--no-reshard", action="store_true", help="keep gathered weights for the backward")
    formats = ("fp32", "bf16", "int8", "int4", "powersgd")
    cli.add_argument("--wire", choices=formats, help="the format of what ranks send; powersgd between replicas")
    cli.add_argument("--replicas", type=int, default=1, help="groups of ranks that shard the model each (HSDP)")
    cli.add_argument("--print-plan", action="store_true", help="print where every parameter lives")
    cli.add_argument("--print-schedule", action="store_true", help="print what a step does, in order")
    args = cli.parse_args()
    sizes = {"replica": args.replicas, "data": -1} if args.replicas > 1 else {"data": -1}
    with fs.make_mesh(tuple(sizes.values()), tuple(sizes)) as mesh:
        train(args, mesh)
