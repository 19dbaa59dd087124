"""Train a small vision transformer on handwritten digits, sharded over however many ranks there are.

Run it as `python examples/train_vit.py`, or as `torchrun --nproc-per-node 4 examples/train_vit.py`. An image of 8 x 8
pixels becomes 16 patches; the model is written as any `nn.Module` is, and `units="auto"` finds its blocks.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch
from torch import Tensor, nn

import fshard as fs

try:
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example needs scikit-learn and tqdm: pip install "fshard[examples]"') from None

HELD_OUT = 360  # of 1797 images


class Block(nn.Module):
    """Self-attention among patches, then an MLP: each reads the normed stream and adds to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Place(nn.Module):
    """Adds to each patch what says where it is."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(patches, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class ViT(nn.Module):
    """Images (batch, 8, 8) to the logits of ten digits. The mean over patches stands for the image."""

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.place, self.norm, self.head = Place(16, width), nn.LayerNorm(width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))

    def forward(self, images: Tensor) -> Tensor:
        x = self.place(self.patch(images[:, None]).flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


def digits(device: torch.device) -> tuple[Tensor, Tensor]:
    """Images (1797, 8, 8) with values of about unit variance, and their digits, shuffled the same on all ranks."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(1))
    images = torch.tensor(data.images, dtype=torch.float32)[order]
    return ((images - 5) / 6).to(device), torch.tensor(data.target)[order].to(device)


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to one pixel in each direction: as good as five times the data."""
    padded = nn.functional.pad(images, (1, 1, 1, 1), value=images.min().item())
    up, left = torch.randint(3, (2, len(images), 1, 1), generator=generator).to(images.device)
    rows = up + torch.arange(8, device=images.device)[:, None]
    columns = left + torch.arange(8, device=images.device)
    return padded[torch.arange(len(images), device=images.device)[:, None, None], rows, columns]


def train(args: Namespace, mesh: fs.Mesh) -> None:
    """Train, and judge by digits that were held out."""
    if args.batch % mesh.size or args.width % args.heads:
        raise SystemExit(f"--batch must be a multiple of {mesh.size} (ranks), and --width one of --heads")
    images, labels = digits(mesh.device)
    with fs.empty_weights():  # init_state makes each rank's shards, and nothing is ever whole
        model = fs.split(ViT(args.depth, args.width, args.heads), units="auto")
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))
    rate = fs.optim.schedules.warmup_cosine(args.lr, warmup=args.steps // 10, total=args.steps)
    opt = fs.optim.adamw(rate, weight_decay=0.05, decay=fs.optim.matrices)
    state = fs.init_state(plan, opt, seed=args.seed, init=[(r"place\.table", fs.init.normal(0.5))])

    def loss_fn(params: dict, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model.apply(params, batch[0]), batch[1], label_smoothing=0.05)

    def right(params: dict, batch: tuple[Tensor, Tensor]) -> fs.Mean:  # ranks may hold unequal numbers of images
        hits = model.apply(params, batch[0]).argmax(1) == batch[1]
        return fs.Mean(hits.sum().float(), len(hits))

    def mine(rows: Tensor) -> Tensor:  # this rank's part of a global batch
        return rows.tensor_split(plan.data_size)[plan.data_rank]

    step, evaluate = fs.make_train_step(loss_fn, opt, plan, clip_norm=1.0), fs.make_eval_step(right, plan)
    say = tqdm.write if mesh.rank == 0 else lambda line: None
    say(f"{sum(leaf.numel for leaf in plan.leaves.values()):,} parameters in {len(plan.groups)} groups")
    losses, shares = [], []
    for i in (bar := tqdm(range(args.steps), unit="step", disable=mesh.rank != 0)):
        generator = torch.Generator().manual_seed(args.seed * 100003 + i)  # depends on seed and step, on no rank
        chosen = torch.randint(HELD_OUT, len(labels), (args.batch,), generator=generator)
        batch = moved(images[chosen], generator), labels[chosen]
        state, metrics = step(state, (mine(batch[0]), mine(batch[1])))
        losses.append(metrics.loss.item())
        if i % 10 == 0:
            bar.set_postfix_str(f"loss {metrics.loss:.3f}, gradient norm {metrics.grad_norm:.2f}")
        if (i + 1) % max(1, args.steps // 5) == 0 or i + 1 == args.steps:
            share = evaluate(state, (mine(images[:HELD_OUT]), mine(labels[:HELD_OUT]))).item()
            shares.append((i + 1, share))
            say(f"step {i + 1}: loss {losses[-1]:.3f}, {share:.1%} of {HELD_OUT} held-out digits are right")
    if args.plot and mesh.rank == 0:
        plot(losses, shares, args.plot)


def plot(losses: list[float], shares: list[tuple[int, float]], file: Path) -> None:
    """A picture of the run."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit('--plot needs matplotlib: pip install "fshard[view]"') from None
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    right = axes.twinx()
    right.plot(*zip(*shares, strict=True), "o-", color="tab:orange")
    right.set(ylabel="held-out digits right", ylim=(0, 1))
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=300, help="train steps")
    cli.add_argument("--batch", type=int, default=128, help="images in a step, over all ranks")
    cli.add_argument("--depth", type=int, default=3, help="blocks")
    cli.add_argument("--width", type=int, default=64, help="features, a multiple of --heads")
    cli.add_argument("--heads", type=int, default=4, help="attention heads")
    cli.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and data order")
    cli.add_argument("--plot", type=Path, default=None, metavar="FILE", help="draw loss and accuracy into this picture")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        train(args, mesh)
