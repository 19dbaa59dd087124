"""Train a small mixture of experts over a mesh of three axes: replica, expert and data.

Run it as `torchrun --nproc-per-node 4 examples/train_moe.py`, or alone as `python examples/train_moe.py`.

All three axes cut the batch. Experts live on the ranks of `expert` and are never gathered over it: tokens travel to
them and back. Each expert is flat-sharded over `replica` and `data`, everything else over all ranks.
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

AXES = ("replica", "expert", "data")


class Experts(nn.Module):
    """A router and experts, of which this rank holds some: (batch, time, width) to the same, and two losses."""

    def __init__(self, width: int, experts: int, choices: int, capacity: float | None) -> None:
        super().__init__()
        self.choices, self.capacity, self.router = choices, capacity, nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, 2 * width, width))
        self.down = nn.Parameter(torch.empty(experts, width, 2 * width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.router(x)
        routing = parallel.route(logits, self.choices)
        mixed = parallel.moe(x, routing, self.compute, axis="expert", capacity=self.capacity)
        return mixed, parallel.load_balance_loss(routing, axis=AXES), parallel.z_loss(logits)

    def compute(self, rows: Tensor, counts: tuple[int, ...]) -> Tensor:
        middle = nn.functional.gelu(parallel.grouped_linear(rows, self.up, counts, axis="expert"))
        return parallel.grouped_linear(middle, self.down, counts, axis="expert")


class Block(nn.Module):
    """Causal self-attention, then a mixture of experts."""

    def __init__(self, width: int, heads: int, experts: Experts) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.experts = experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y, balance, z = self.experts(self.norm2(x))
        return x + y, balance, z


class GPT(nn.Module):
    """Bytes (batch, time) to logits of the next byte (batch, time, 256), and the means of the routers' losses."""

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        width, capacity = args.width, args.capacity or None
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(args.context, width)
        self.norm = nn.RMSNorm(width)
        experts = [Experts(width, args.experts, args.choices, capacity) for _ in range(args.depth)]
        self.blocks = nn.ModuleList(Block(width, width // 32, one) for one in experts)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, balances, zs = self.embed(tokens) + self.place.weight[: tokens.shape[1]], [], []
        for block in self.blocks:
            x, balance, z = block(x)
            balances.append(balance)
            zs.append(z)
        logits = nn.functional.linear(self.norm(x), self.embed.weight)
        return logits, torch.stack(balances).mean(), torch.stack(zs).mean()


def train(args: Namespace, mesh: fs.Mesh) -> None:
    """Train and evaluate."""
    if args.batch % mesh.size or args.width % 32:
        raise SystemExit(f"--batch must be a multiple of {mesh.size} ranks, and --width one of 32")
    data = bytearray("".join(topics[name] for name in sorted(topics)).encode())  # CPython's own documentation
    text = torch.frombuffer(data, dtype=torch.uint8).to(mesh.device)
    seen, unseen = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    windows = seen.unfold(0, args.context + 1, 1)  # a view: every window, with the byte after it
    tests = unseen[: 48 * (args.context + 1)].view(48, -1)[: 48 // mesh.size * mesh.size]

    with fs.empty_weights():
        model = fs.split(GPT(args), units=("blocks.*",))
    rules = [
        parallel.expert_rule(r".*\.experts\.(up|down)", "expert", flat=("replica", "data")),
        (r".*", fs.fsdp(AXES)),
    ]
    plan = fs.make_plan(model, mesh, rules, batch=fs.P(AXES))
    rate = fs.optim.schedules.warmup_cosine(args.lr, warmup=max(1, args.steps // 8), total=args.steps)
    opt = fs.optim.adamw(rate, betas=(0.9, 0.95), weight_decay=0.1, decay=fs.optim.matrices)
    normal, narrow = fs.init.normal(0.04), fs.init.normal(0.04 / math.sqrt(2 * args.depth))  # norms start at 1
    init = [(r".*\.(out\.weight|down)", narrow), (r"(.*\.)?((embed|place|qkv|router)\.weight|up)", normal)]
    state = fs.init_state(plan, opt, seed=args.seed, init=init)  # values that depend on no mesh

    def loss_fn(params: dict, rows: Tensor) -> tuple[Tensor, dict]:
        logits, balance, z = model.apply(params, rows[:, :-1])
        bits = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / math.log(2)
        return bits + args.balance * balance + args.z * z, {"bits": fs.Mean(bits, 1), "balance": fs.Mean(balance, 1)}

    def mine(rows: Tensor) -> Tensor:  # this rank's part of a global batch
        return plan.local_batch(rows).long()

    def draw(i: int) -> Tensor:  # depends on seed and step alone, so that any mesh sees the same data
        return mine(windows[random.Random(f"{args.seed} {i}").choices(range(len(windows)), k=args.batch)])

    step = fs.make_train_step(loss_fn, opt, plan, clip_norm=1.0, debug=args.debug)
    evaluate = fs.make_eval_step(lambda params, rows: loss_fn(params, rows)[1]["bits"], plan)
    say = tqdm.write if mesh.rank == 0 else lambda line: None
    if args.print_plan:
        say(str(plan))
    for i in (bar := tqdm(range(args.steps), unit="step", disable=mesh.rank != 0)):
        state, metrics = step(state, draw(i))
        if i % 10 == 0:
            bar.set_postfix_str(f"loss {metrics.loss:.3f}, gradient norm {metrics.grad_norm:.2f}")
        if i == 0 or (i + 1) % max(1, args.steps // 4) == 0 or i + 1 == args.steps:
            bits = evaluate(state, mine(tests)).item()
            even = metrics.aux["balance"]
            say(f"step {i + 1}: {bits:.3f} bits per byte of held-out text; balance {even:.2f}, 1 is even")


if __name__ == "__main__":
    world = int(os.environ.get("WORLD_SIZE", "1"))
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--expert", type=int, default=math.gcd(2, world), help="ranks that share out the experts")
    cli.add_argument("--data", type=int, default=2 if world % 4 == 0 else 1, help="ranks in a group of `data`")
    cli.add_argument("--experts", type=int, default=8, help="experts in a block, over all ranks")
    cli.add_argument("--choices", type=int, default=2, help="experts a token")
    cli.add_argument(
        "--capacity", type=float, default=0, help="times its even share that an expert takes; 0 drops none"
    )
    cli.add_argument("--balance", type=float, default=0.01, help="weight of the load-balance loss")
    cli.add_argument("--z", type=float, default=0.001, help="weight of the z-loss")
    cli.add_argument("--steps", type=int, default=120, help="train steps")
    cli.add_argument("--batch", type=int, default=16, help="windows in a step, over all ranks")
    cli.add_argument("--context", type=int, default=128, help="bytes in a window")
    cli.add_argument("--depth", type=int, default=2, help="blocks")
    cli.add_argument("--width", type=int, default=128, help="features, a multiple of 32")
    cli.add_argument("--lr", type=float, default=6e-3, help="peak learning rate")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and data order")
    cli.add_argument("--debug", action="store_true", help="poison freed memory")
    cli.add_argument("--print-plan", action="store_true", help="print where every parameter lives")
    args = cli.parse_args()
    with fs.make_mesh((-1, args.expert, args.data), AXES) as mesh:
        train(args, mesh)
