"""Newton steps by conjugate gradients: products with the curvature inside of a step, on one schedule.

Run it as `python examples/newton_cg.py`, or as `torchrun --nproc-per-node 2 examples/newton_cg.py`. A step solves
`(G + damping) @ v = gradient` for the Gauss-Newton matrix `G` of all training digits (Martens, "Deep learning via
Hessian-free optimization", 2010) and moves by `v`. Each product with `G` is a pass of the step. AdamW gets as many
passes over the data.
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

Batch = tuple[Tensor, Tensor]


def loss_of(out: Tensor, batch: Batch) -> Tensor:
    """The loss of outputs."""
    return nn.functional.cross_entropy(out, batch[1])


def newton_step(
    predict: Callable[..., Any], opt: fs.optim.Optimizer, plan: fs.Plan, damping: float, products: int
) -> Any:
    """A step by the solution that conjugate gradients have found after some products."""
    gradient = fs.value_and_grad(lambda params, batch: loss_of(predict(params, batch), batch), plan)
    curved, update = fs.func.gnvp(predict, loss_of, plan), fs.make_update(opt, plan)
    add, scale, vdot = fs.tree.add, fs.tree.scale, fs.tree.vdot

    def fn(state: fs.TrainState, batch: Batch) -> tuple[fs.TrainState, dict[str, Tensor]]:
        loss, rest = gradient(state, batch)
        along, square, found = rest, vdot(rest, rest, plan), scale(rest, 0.0)
        for _ in range(products):
            bent = add(curved(state.params, along, batch), along, damping)
            far = square / vdot(along, bent, plan)
            found, rest = add(found, along, far), add(rest, bent, -far)
            before, square = square, vdot(rest, rest, plan)
            along = add(rest, along, square / before)
        return update(state, found)[0], {"loss": loss}

    return fs.make_step(fn, plan)


def train(args: Namespace, mesh: fs.Mesh, newton: bool) -> tuple[float, float]:
    """Train; returns the loss before the last step, and the share of held-out digits that are told right."""
    data, draw = load_digits(), torch.Generator().manual_seed(1)
    order = torch.randperm(1797, generator=draw)
    images = torch.tensor(data.data / 16, dtype=torch.float32)[order].to(mesh.device)
    labels = torch.tensor(data.target)[order].to(mesh.device)
    hidden = nn.Sequential(nn.Linear(64, args.width), nn.Tanh(), nn.Linear(args.width, args.width), nn.Tanh())
    model = fs.split(nn.Sequential(hidden, nn.Linear(args.width, 10)), units=("0.0", "0.2", "1"))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))

    def predict(params: dict, batch: Batch) -> Tensor:
        return model.apply(params, batch[0])

    opt = fs.optim.sgd(1.0) if newton else fs.optim.adamw(args.lr)
    state, passes = fs.init_state(plan, opt, seed=args.seed), args.products + 1
    if newton:
        step = newton_step(predict, opt, plan, args.damping, args.products)
    else:
        step = fs.make_train_step(lambda params, batch: loss_of(predict(params, batch), batch), opt, plan)
    seen = plan.local_batch((images[:1428], labels[:1428]))  # what 1, 2, 3 and 4 ranks divide
    rounds, name = (args.steps, "Newton") if newton else (args.steps * passes, "AdamW")
    for _ in tqdm(range(rounds), desc=name, disable=mesh.rank != 0):
        state, metrics = step(state, seen)
    loss = metrics["loss"] if newton else metrics.loss
    right = model.apply(fs.unshard(state.params, plan), images[1428:]).argmax(1) == labels[1428:]
    return float(loss), right.float().mean().item()


def main(args: Namespace, mesh: fs.Mesh) -> None:
    """Train in both ways."""
    for newton in (True, False):
        loss, right = train(args, mesh, newton)
        if mesh.rank == 0:
            name = f"{args.steps} Newton steps:" if newton else f"{args.steps * (args.products + 1)} AdamW steps:"
            print(f"{name:20} training loss {loss:.5f}, {right:.1%} of 369 held-out digits right")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=20, help="Newton steps")
    cli.add_argument("--products", type=int, default=8, help="products with the curvature in a step")
    cli.add_argument("--damping", type=float, default=0.1, help="is added to the curvature")
    cli.add_argument("--width", type=int, default=64, help="features of the hidden layers")
    cli.add_argument("--lr", type=float, default=0.01, help="learning rate of AdamW")
    cli.add_argument("--seed", type=int, default=0, help="of initial values")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        main(args, mesh)
