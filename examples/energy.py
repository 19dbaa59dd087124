"""An energy-based model of handwritten digits with a gradient penalty: double backward through sharded units.

Run it as `python examples/energy.py`, or as `torchrun --nproc-per-node 2 examples/energy.py`. The model gives digits a
low energy and digits with some pixels shuffled a high one. The penalty is the squared slope of the energy at both,
which is a gradient inside of the loss, so training differentiates twice. Units are gathered where they run, freed after
their forward, and gathered again in the backward, and in the backward of the backward.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace

import torch
from torch import Tensor, nn

import fshard as fs

try:
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example needs scikit-learn and tqdm: pip install "fshard[examples]"') from None


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


class Energy(nn.Module):
    """Images (batch, 64) to energies (batch,)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(64, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def corrupted(images: Tensor, key: Tensor, share: float) -> Tensor:
    """Some pixels of each image replaced by those of other places in the same image."""
    places, chosen = fs.random.split(key)
    order = fs.random.uniform(places, images.shape).argsort(1).to(images.device)
    return torch.where(
        fs.random.bernoulli(chosen, share, images.shape).to(images.device), images.gather(1, order), images
    )


def area(low: Tensor, high: Tensor) -> float:
    """The chance that a number of the first kind lies below one of the second: the area under the ROC curve."""
    return (low[:, None] < high[None]).float().mean().item()


def train(args: Namespace, mesh: fs.Mesh, penalty: float) -> tuple[float, float]:
    """Train; returns the area under the ROC curve on held-out digits, and the mean slope of the energy there."""
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32).to(mesh.device)
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(1))]
    model = fs.split(Energy(args.width, args.depth), units=("blocks.*",))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))])

    def loss_fn(params: dict, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict]:
        def energy(x: Tensor) -> tuple[Tensor, Tensor]:
            energies = model.apply(params, x)
            return energies.sum(), energies

        slopes, energies = torch.func.grad(energy, has_aux=True)(torch.cat(batch))
        low, high = energies.chunk(2)
        loss = nn.functional.softplus(low).mean() + nn.functional.softplus(-high).mean()
        return loss + penalty * slopes.square().sum(1).mean(), {"loss": fs.Mean(loss, 1.0)}

    gradient = torch.func.grad(fs.func.sharded_loss(loss_fn, plan, has_aux=True), has_aux=True)
    opt = fs.optim.adamw(args.lr, weight_decay=0.0)
    params = fs.init_state(plan, opt, seed=args.seed).params
    update, key = fs.func.differentiable(opt, plan), fs.random.key(args.seed)
    state = update.init(params)
    for i in (bar := tqdm(range(args.steps), desc=f"penalty {penalty}", disable=mesh.rank != 0)):
        pick, noise = fs.random.split(fs.random.fold_in(key, i))
        rows = 360 + (fs.random.uniform(pick, (args.batch,)) * (len(images) - 360)).long().to(mesh.device)
        batch = (images[rows], corrupted(images[rows], noise, args.share))
        grads, aux = gradient(params, plan.local_batch(batch))
        params, state = update(params, grads, state)
        if i % 20 == 0:
            bar.set_postfix_str(f"loss {aux['loss']:.3f}")
    whole = fs.unshard(params, plan)
    real = images[:360]
    fake = corrupted(real, fs.random.key(123), args.share)
    slope = torch.func.grad(lambda x: model.apply(whole, x).sum())(real).norm(dim=1).mean().item()
    return area(model.apply(whole, real), model.apply(whole, fake)), slope


def main(args: Namespace, mesh: fs.Mesh) -> None:
    """Train with and without the penalty."""
    results = {penalty: train(args, mesh, penalty) for penalty in (args.penalty, 0.0)}
    if mesh.rank == 0:
        print(f"held-out digits against the same with {args.share:.0%} of their pixels shuffled:")
        for penalty, (auc, slope) in results.items():
            print(f"penalty {penalty:<4} area under the ROC curve {auc:.3f}, slope of the energy {slope:.2f}")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=150, help="train steps")
    cli.add_argument("--batch", type=int, default=96, help="digits in a step, over all ranks")
    cli.add_argument("--width", type=int, default=64, help="features")
    cli.add_argument("--depth", type=int, default=3, help="blocks")
    cli.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    cli.add_argument("--penalty", type=float, default=0.1, help="weight of the squared slope")
    cli.add_argument("--share", type=float, default=0.3, help="of the pixels that are shuffled")
    cli.add_argument("--seed", type=int, default=0, help="of initial values, data order and corruption")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        if args.batch % mesh.size:
            raise SystemExit(f"--batch must be a multiple of {mesh.size}, the number of ranks")
        main(args, mesh)
