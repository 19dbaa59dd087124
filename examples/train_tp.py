"""Train a small GPT that is tensor-parallel and sharded at once, over a mesh of two axes.

Run it as `torchrun --nproc-per-node 4 examples/train_tp.py`, or alone as `python examples/train_tp.py`.

The ranks along `tp` work on the same rows, each with its share of heads, features and vocabulary; with `--sequence`
also with its slice of the sequence between them. What a rank has is flat-sharded over `data`, whose ranks have rows of
their own.
"""

import math
import os
import random
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import parallel

try:
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example shows its progress with tqdm: pip install "fshard[examples]"') from None


class Block(nn.Module):
    """Causal self-attention, then an MLP. A rank's weights are its heads and its features; `cut` is the dim along
    which the stream between them is cut by `tp`, if it is."""

    def __init__(self, width: int, heads: int, cut: int | None) -> None:
        super().__init__()
        self.cut, self.norm1, self.norm2 = cut, nn.RMSNorm(width), nn.RMSNorm(width)
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = parallel.local_heads(self.heads)
        mine = parallel.column_linear(norm(x, self.norm1.weight, self.cut), self.qkv.weight, sequence_dim=self.cut)
        q, k, v = mine.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4)  # a head's rows lie together
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + parallel.row_linear(mixed.transpose(1, 2).flatten(2), self.out.weight, sequence_dim=self.cut)
        mine = parallel.column_linear(norm(x, self.norm2.weight, self.cut), self.up.weight, sequence_dim=self.cut)
        return x + parallel.row_linear(nn.functional.gelu(mine), self.down.weight, sequence_dim=self.cut)


class GPT(nn.Module):
    """Bytes (batch, time) to a rank's share of the logits (batch, time, 256 / tp). The embedding is the head, too."""

    def __init__(self, depth: int, width: int, sequence: bool, head_width: int = 32) -> None:
        super().__init__()
        self.cut, self.head_width = 1 if sequence else None, head_width
        self.embed, self.norm = nn.Embedding(256, width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList(Block(width, width // head_width, self.cut) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device).float()
        angle = torch.outer(place, 10000 ** -torch.arange(0, 1, 2 / self.head_width, device=tokens.device))
        cos, sin = angle.cos(), angle.sin()
        x = parallel.vocab_embedding(tokens, self.embed.weight, sequence_dim=self.cut)
        for block in self.blocks:
            x = block(x, cos, sin)
        return parallel.column_linear(norm(x, self.norm.weight, self.cut), self.embed.weight, sequence_dim=self.cut)


def norm(x: Tensor, weight: Tensor, cut: int | None) -> Tensor:
    """On a slice of the sequence, the weight's gradient is the sum over slices."""
    return nn.functional.rms_norm(x, weight.shape, weight) if cut is None else parallel.rms_norm(x, weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with the place, so that q @ k sees distances (RoPE)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def train(args: Namespace, mesh: fs.Mesh) -> None:
    """Train and evaluate."""
    parts = mesh.shape["data"]
    if args.batch % parts or args.width % 32 or args.sequence and args.context % mesh.shape["tp"]:
        raise SystemExit(f"--batch must be a multiple of {parts}, --width one of 32, --context one of --tp")
    data = bytearray("".join(topics[name] for name in sorted(topics)).encode())  # CPython's own documentation
    text = torch.frombuffer(data, dtype=torch.uint8).to(mesh.device)
    seen, unseen = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    windows = seen.unfold(0, args.context + 1, 1)  # a view: every window, with the byte after it
    tests = unseen[: 48 * (args.context + 1)].view(48, -1)[: 48 // parts * parts]

    with fs.empty_weights():
        model = fs.split(GPT(args.depth, args.width, args.sequence), units=("blocks.*",))
    rules = parallel.megatron_rules(
        column=[r".*\.(qkv|up)\.weight", r"embed\.weight"], row=r".*\.(out|down)\.weight", flat="data"
    )
    plan = fs.make_plan(model, mesh, rules, batch=fs.P("data"))  # tp is no data axis: its ranks share their rows
    rate = fs.optim.schedules.warmup_cosine(args.lr, warmup=max(1, args.steps // 8), total=args.steps)
    opt = fs.optim.adamw(rate, betas=(0.9, 0.95), weight_decay=0.1, decay=fs.optim.matrices)
    normal, narrow = fs.init.normal(0.04), fs.init.normal(0.04 / math.sqrt(2 * args.depth))  # norms start at 1
    init = [(r".*\.(out|down)\.weight", narrow), (r"(.*\.)?(embed|qkv|up)\.weight", normal)]
    state = fs.init_state(plan, opt, seed=args.seed, init=init)  # values that depend on no mesh

    def bits_per_byte(params: dict, rows: Tensor) -> Tensor:
        logits = model.apply(params, rows[:, :-1])
        return parallel.vocab_cross_entropy(logits, rows[:, 1:]) / math.log(2)

    def draw(i: int) -> Tensor:  # depends on seed and step alone, so that any mesh sees the same data
        rows = windows[random.Random(f"{args.seed} {i}").choices(range(len(windows)), k=args.batch)]
        return plan.local_batch(rows).long()

    step = fs.make_train_step(bits_per_byte, opt, plan, clip_norm=1.0, debug=args.debug)
    evaluate = fs.make_eval_step(bits_per_byte, plan)
    say = tqdm.write if mesh.rank == 0 else lambda line: None
    if args.print_plan:
        say(str(plan))
    for i in (bar := tqdm(range(args.steps), unit="step", disable=mesh.rank != 0)):
        state, metrics = step(state, draw(i))
        if i % 10 == 0:
            bar.set_postfix_str(f"loss {metrics.loss:.3f}, gradient norm {metrics.grad_norm:.2f}")
        if i == 0 or (i + 1) % max(1, args.steps // 4) == 0 or i + 1 == args.steps:
            bits = evaluate(state, plan.local_batch(tests).long()).item()
            say(f"step {i + 1}: loss {metrics.loss:.3f}, {bits:.3f} bits per byte of held-out text")

    whole = fs.unshard(state.params, plan)  # the same model as a plain function: on a mesh of one rank
    with fs.collectives.use_mesh(fs.abstract_mesh((1,), ("tp",))), torch.no_grad():
        bits = bits_per_byte(whole, tests.long()).item()
    say(f"in one process: {bits:.3f} bits per byte of the same text")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument(
        "--tp", type=int, default=math.gcd(2, int(os.environ.get("WORLD_SIZE", "1"))), help="ranks that share rows"
    )
    cli.add_argument("--sequence", action="store_true", help="cut the stream between parallel layers by tp, too")
    cli.add_argument("--steps", type=int, default=120, help="train steps")
    cli.add_argument("--batch", type=int, default=16, help="windows in a step, over all ranks")
    cli.add_argument("--context", type=int, default=128, help="bytes in a window")
    cli.add_argument("--depth", type=int, default=3, help="blocks")
    cli.add_argument("--width", type=int, default=128, help="features, a multiple of 32")
    cli.add_argument("--lr", type=float, default=6e-3, help="peak learning rate")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and data order")
    cli.add_argument("--debug", action="store_true", help="poison freed memory, compare gradients of copies")
    cli.add_argument("--print-plan", action="store_true", help="print where every parameter lives")
    args = cli.parse_args()
    with fs.make_mesh((args.tp, -1), ("tp", "data")) as mesh:
        train(args, mesh)
