"""Sharpness-aware minimization on digits with wrong labels: two gradients a step, on one schedule.

Run it as `python examples/sam.py`, or as `torchrun --nproc-per-node 2 examples/sam.py`. A step climbs to the worst
point nearby and descends with the gradient of that point (Foret et al. 2021). A third of the training labels are wrong.
Plain descent learns them by heart; SAM, which looks for flat minima, does less so.
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


def sam_step(loss_fn: Callable[..., Any], opt: fs.optim.Optimizer, plan: fs.Plan, radius: float) -> Any:
    """A step of SAM: the gradient at the worst point within a radius updates the state."""
    grad, update = fs.value_and_grad(loss_fn, plan), fs.make_update(opt, plan)

    def fn(state: fs.TrainState, batch: Any) -> tuple[fs.TrainState, dict[str, Tensor]]:
        loss, grads = grad(state, batch)
        worst = fs.tree.add(state.params, grads, radius / fs.tree.norm(grads, plan))
        near, grads = grad(worst, batch)
        state, _ = update(state, grads)
        return state, {"loss": loss, "near": near}

    return fs.make_step(fn, plan)


def train(args: Namespace, mesh: fs.Mesh, radius: float) -> tuple[float, float]:
    """Train; returns the shares of held-out digits and of wrong training labels that the model tells."""
    data, draw = load_digits(), torch.Generator().manual_seed(1)
    order = torch.randperm(1797, generator=draw)
    images = torch.tensor(data.data / 16, dtype=torch.float32)[order].to(mesh.device)
    truth = torch.tensor(data.target)[order].to(mesh.device)
    wrong = torch.rand(1437, generator=draw).to(mesh.device) < args.wrong
    shift = torch.randint(1, 10, (1437,), generator=draw).to(mesh.device)
    labels = torch.where(wrong, (truth[360:] + shift) % 10, truth[360:])
    net = nn.Sequential(nn.Linear(64, args.width), nn.ReLU(), nn.Linear(args.width, args.width), nn.ReLU())
    model = fs.split(nn.Sequential(net, nn.Linear(args.width, 10)), units=("0.0", "0.2", "1"))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))

    def loss_fn(params: dict, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model.apply(params, batch[0]), batch[1])

    opt = fs.optim.sgd(args.lr, momentum=0.9)
    state = fs.init_state(plan, opt, seed=args.seed)
    step = sam_step(loss_fn, opt, plan, radius) if radius else fs.make_train_step(loss_fn, opt, plan)
    draw.manual_seed(args.seed)
    for _ in tqdm(range(args.steps), desc=f"radius {radius}", disable=mesh.rank != 0):
        rows = plan.local_batch(torch.randint(1437, (args.batch,), generator=draw)).to(mesh.device)
        state, _ = step(state, (images[360:][rows], labels[rows]))
    guess = model.apply(fs.unshard(state.params, plan), images).argmax(1)
    held, learned = (guess == truth)[:360], (guess[360:] == labels)[wrong]
    return held.float().mean().item(), learned.float().mean().item()


def main(args: Namespace, mesh: fs.Mesh) -> None:
    """Train with SAM and without."""
    results = {radius: train(args, mesh, radius) for radius in (args.radius, 0.0)}
    if mesh.rank == 0:
        print(f"{args.wrong:.0%} of the training labels are wrong; after {args.steps} steps")
        for radius, (right, learned) in results.items():
            name = f"SAM, radius {radius}:" if radius else "plain descent:"
            print(f"{name:18} {right:.1%} of 360 held-out digits right, {learned:.1%} of the wrong labels learned")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=1500, help="train steps")
    cli.add_argument("--batch", type=int, default=96, help="digits in a step, over all ranks")
    cli.add_argument("--width", type=int, default=128, help="features of the hidden layers")
    cli.add_argument("--lr", type=float, default=0.05, help="learning rate")
    cli.add_argument("--radius", type=float, default=0.2, help="how far the worst point is")
    cli.add_argument("--wrong", type=float, default=0.33, help="share of training labels that are made wrong")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and data order")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        main(args, mesh)
