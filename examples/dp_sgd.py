"""Differentially private training on handwritten digits: DP-SGD on sharded parameters.

Run it as `python examples/dp_sgd.py`, or as `torchrun --nproc-per-node 2 examples/dp_sgd.py`. Every step clips the
gradient of each sample and adds noise to their sum (Abadi et al. 2016). The same run without clipping and noise shows
what privacy costs.
"""

import math
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree

try:
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example needs scikit-learn and tqdm: pip install "fshard[examples]"') from None


def epsilon(rate: float, noise: float, steps: int, delta: float) -> float:
    """The privacy spent by subsampled Gaussian steps: their Rényi divergence at whole orders (Mironov et al. 2019)."""
    best = math.inf
    for order in range(2, 128):
        terms = torch.tensor(
            [
                math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
                + (order - k) * math.log1p(-rate) + k * math.log(rate) + (k * k - k) / (2 * noise**2)
                for k in range(order + 1)
            ],
            dtype=torch.float64,
        )  # fmt: skip
        spent = steps * torch.logsumexp(terms, 0).item() / (order - 1)
        best = min(best, spent + math.log(1 / delta) / (order - 1))
    return best


def train(args: Namespace, mesh: fs.Mesh, private: bool) -> tuple[float, float]:
    """Train; returns the accuracy on held-out digits, and the share of samples that were clipped."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(1))
    images, labels = torch.tensor(data.data / 16, dtype=torch.float32)[order], torch.tensor(data.target)[order]
    images, labels = images.to(mesh.device), labels.to(mesh.device)
    held, count = slice(0, 360), len(labels) - 360
    net = nn.Sequential(nn.Linear(64, args.width), nn.Tanh(), nn.Linear(args.width, 10))
    model = fs.split(net, units=("0", "2"))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))])
    params = fs.init_state(plan, fs.optim.sgd(0.0), seed=args.seed).params
    update = fs.func.differentiable(fs.optim.sgd(args.lr, momentum=0.9), plan)
    state, key = update.init(params), fs.random.key(args.seed)

    def loss_fn(params: dict, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model.apply(params, batch[0]), batch[1])

    clip = args.clip if private else 1e9
    gradient = fs.func.clipped_grad(loss_fn, plan, clip, microbatch=64)

    def accuracy() -> float:
        guess = model.apply(fs.unshard(params, plan), images[held]).argmax(1)
        return (guess == labels[held]).float().mean().item()

    clipped = 0.0
    label = "private" if private else "not-private"
    lines = [fs.trackers.JsonLines(args.out / f"{label}.jsonl")] if args.out else []
    with fs.track(lines, plan) as track:
        for i in tqdm(range(args.steps), desc=label, disable=mesh.rank != 0):
            draw, noise = fs.random.split(fs.random.fold_in(key, i))
            # Each sample is in with the same chance, which is what the accounting stands on. All ranks draw alike.
            chosen = 360 + fs.random.bernoulli(draw, args.batch / count, (count,)).nonzero().flatten().to(mesh.device)
            mine = chosen[plan.data_rank :: plan.data_size]
            total, norms = gradient(params, (images[mine], labels[mine]))
            if private:  # the noise of an element depends on its place in the whole leaf, not on the ranks
                normal = fs.tree.normal(noise, plan)
                total = tree.map(lambda g, z: g + args.noise * args.clip * z, total, normal)
            params, state = update(params, tree.map(lambda g: g / args.batch, total), state)
            clipped += (norms > args.clip).float().mean().item() / args.steps
            if lines and (i + 1) % 10 == 0:
                spent = {"epsilon": epsilon(args.batch / count, args.noise, i + 1, args.delta)} if private else {}
                track(i + 1, {"accuracy": accuracy(), **spent})
    return accuracy(), clipped


def main(args: Namespace, mesh: fs.Mesh) -> None:
    """Train twice, compare."""
    with_privacy, clipped = train(args, mesh, True)
    without, _ = train(args, mesh, False)
    spent = epsilon(args.batch / (1797 - 360), args.noise, args.steps, args.delta)
    if mesh.rank == 0:
        print(f"accuracy on 360 held-out digits: {with_privacy:.1%} private, {without:.1%} not private")
        print(f"privacy: epsilon {spent:.2f} at delta {args.delta:g}; {clipped:.0%} of the gradients were clipped")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=200, help="train steps")
    cli.add_argument("--batch", type=int, default=192, help="samples in a step, on average, over all ranks")
    cli.add_argument("--width", type=int, default=64, help="features of the hidden layer")
    cli.add_argument("--lr", type=float, default=0.2, help="learning rate")
    cli.add_argument("--clip", type=float, default=1.0, help="norm to which each sample's gradient is clipped")
    cli.add_argument("--noise", type=float, default=1.0, help="standard deviation of the noise, in units of --clip")
    cli.add_argument("--delta", type=float, default=1e-4, help="of the privacy that is reported")
    cli.add_argument("--seed", type=int, default=0, help="of initial values, sampling and noise")
    cli.add_argument("--out", type=Path, default=None, metavar="FOLDER", help="write accuracy and epsilon over steps")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        main(args, mesh)
