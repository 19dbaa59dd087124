"""Gradient surgery: two tasks whose gradients are kept from undoing each other's work.

Run it as `python examples/pcgrad.py`, or as `torchrun --nproc-per-node 2 examples/pcgrad.py`. Each image shows two
digits over each other; one task is the left digit, the other, with a loss ten times as large, the right one. Where the
two gradients point against each other, each loses its part along the other (Yu et al. 2020).
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs

try:
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example needs scikit-learn and tqdm: pip install "fshard[examples]"') from None


def surgery_step(losses: list[Callable[..., Any]], opt: fs.optim.Optimizer, plan: fs.Plan, surgery: bool = True) -> Any:
    """A step with the sum of two gradients, each without what it has against the other."""
    (one, two), update = [fs.value_and_grad(loss, plan) for loss in losses], fs.make_update(opt, plan)

    def fn(state: fs.TrainState, batch: Any) -> tuple[fs.TrainState, dict[str, Tensor]]:
        left, a = one(state, batch)
        right, b = two(state, batch)
        dot = fs.tree.vdot(a, b, plan)
        against = dot.clamp(max=0.0) if surgery else 0.0 * dot
        a_kept = fs.tree.add(a, b, -against / fs.tree.vdot(b, b, plan))
        b_kept = fs.tree.add(b, a, -against / fs.tree.vdot(a, a, plan))
        state, _ = update(state, fs.tree.add(a_kept, b_kept))
        return state, {"left": left, "right": right, "against": dot < 0}

    return fs.make_step(fn, plan)


class Two(nn.Module):
    """Images (rows, 96) to logits of the left and of the right digit, (rows, 2, 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(96, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.Linear(width, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(self.trunk(x)).unflatten(-1, (2, 10))


def pairs(images: Tensor, labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of digits, four columns apart: images (pairs, 96), and labels (pairs, 2)."""
    left, right = images[rows[:, 0]], images[rows[:, 1]]
    return torch.maximum(nn.functional.pad(left, (0, 4)), nn.functional.pad(right, (4, 0))).flatten(1), labels[rows]


def train(args: Namespace, mesh: fs.Mesh, surgery: bool) -> tuple[Tensor, float]:
    """Train; returns the accuracy on both held-out digits, and the share of steps whose gradients were in conflict."""
    data, draw = load_digits(), torch.Generator().manual_seed(args.seed)
    order = torch.randperm(1797, generator=draw)
    images, labels = torch.tensor(data.images / 16, dtype=torch.float32)[order], torch.tensor(data.target)[order]
    held = pairs(images, labels, torch.randint(360, (4000, 2), generator=draw))
    model = fs.split(Two(args.width), units=("trunk.0", "trunk.2", "heads"))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))

    def of_task(task: int, weight: float = 1.0) -> Callable[..., Tensor]:
        entropy = nn.functional.cross_entropy
        return lambda params, batch: weight * entropy(model.apply(params, batch[0])[:, task], batch[1][:, task])

    opt = fs.optim.adamw(args.lr, weight_decay=0.0)
    step = surgery_step([of_task(0), of_task(1, args.weight)], opt, plan, surgery)
    state = fs.init_state(plan, opt, seed=args.seed)
    against = 0.0
    for _ in tqdm(range(args.steps), desc="surgery" if surgery else "sum", disable=mesh.rank != 0):
        batch = pairs(images, labels, torch.randint(360, 1797, (args.batch, 2), generator=draw))
        state, metrics = step(state, tuple(x.to(mesh.device) for x in plan.local_batch(batch)))
        against += metrics["against"].item() / args.steps
    guess = model.apply(fs.unshard(state.params, plan), held[0].to(mesh.device)).argmax(-1).cpu()
    return (guess == held[1]).float().mean(0), against


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=1500, help="train steps")
    cli.add_argument("--batch", type=int, default=96, help="images in a step, over all ranks; the ranks divide it")
    cli.add_argument("--width", type=int, default=32, help="features of the trunk")
    cli.add_argument("--weight", type=float, default=10.0, help="of the right digit's loss; the left one's is 1")
    cli.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and pairs")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        for surgery in (True, False):
            (left, right), against = train(args, mesh, surgery)
            if mesh.rank == 0:
                name = "gradient surgery:" if surgery else "sum of gradients:"
                print(f"{name} {left:.1%} of left digits right, {right:.1%} of right ones; conflicts {against:.0%}")
