"""A generative adversarial network: two losses, two gradients and two optimizers over the parts of one state.

Run it as `python examples/gan.py`, or as `torchrun --nproc-per-node 2 examples/gan.py`. The generator learns eight
Gaussians on a circle (Metz et al. 2017) from a discriminator (Goodfellow et al. 2014). Each gradient is that of one
player's leaves alone: the other's stay sharded, are gathered unit by unit, and get no reduction.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import fshard as fs

try:
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example shows its progress with tqdm: pip install "fshard[examples]"') from None

GEN, DIS = r"gen\..*", r"dis\..*"
SPREAD = 0.05
MODES = torch.view_as_real(torch.polar(torch.ones(8), torch.arange(8) * torch.pi / 4))


def players(width: int = 64) -> nn.ModuleDict:
    """Both players in one tree of parameters: noise (rows, 8) to points (rows, 2), and points to scores (rows, 1)."""

    def perceptron(inp: int, out: int) -> nn.Sequential:
        first, second = nn.Linear(inp, width), nn.Linear(width, width)
        return nn.Sequential(first, nn.LeakyReLU(0.2), second, nn.LeakyReLU(0.2), nn.Linear(width, out))

    return nn.ModuleDict({"gen": perceptron(8, 2), "dis": perceptron(2, 1)})


def gan_step(model: fs.Model, opt: fs.optim.Optimizer, plan: fs.Plan) -> Any:
    """A step of both players at once: each learns from the other as it was before."""

    def tell(params: Any, batch: dict[str, Tensor]) -> Tensor:
        fake = model.apply(params, batch["noise"], method="gen")
        real, fake = [model.apply(params, points, method="dis") for points in (batch["real"], fake)]
        return softplus(-real).mean() + softplus(fake).mean()

    def fool(params: Any, batch: dict[str, Tensor]) -> Tensor:
        fake = model.apply(params, batch["noise"], method="gen")
        return softplus(-model.apply(params, fake, method="dis")).mean()

    dis_grad, gen_grad = fs.value_and_grad(tell, plan, only=DIS), fs.value_and_grad(fool, plan, only=GEN)
    dis_update, gen_update = fs.make_update(opt, plan, only=DIS), fs.make_update(opt, plan, only=GEN)

    def fn(state: fs.TrainState, batch: dict[str, Tensor]) -> tuple[fs.TrainState, dict[str, Tensor]]:
        dis_loss, to_dis = dis_grad(state, batch)
        gen_loss, to_gen = gen_grad(state, batch)
        state, _ = dis_update(state, to_dis)
        state, _ = gen_update(state, to_gen)
        return state, {"dis": dis_loss, "gen": gen_loss}

    return fs.make_step(fn, plan)


def main(args: Namespace, mesh: fs.Mesh) -> None:
    """Train, then look where points fall."""
    model = fs.split(players(), units=("gen.*", "dis.*"))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))
    adam = {"betas": (0.5, 0.99), "weight_decay": 0.0}
    opt = fs.optim.partition([(GEN, fs.optim.adamw(args.lr, **adam)), (DIS, fs.optim.adamw(2 * args.lr, **adam))])
    state, step = fs.init_state(plan, opt, seed=args.seed), gan_step(model, opt, plan)
    draw = torch.Generator().manual_seed(args.seed)
    for _ in tqdm(range(args.steps), disable=mesh.rank != 0):
        real = MODES[torch.randint(8, (args.batch,), generator=draw)]
        real = real + SPREAD * torch.randn(args.batch, 2, generator=draw)
        batch = plan.local_batch({"real": real, "noise": torch.randn(args.batch, 8, generator=draw)})
        state, _ = step(state, {k: x.to(mesh.device) for k, x in batch.items()})
    noise = torch.randn(4096, 8, generator=draw).to(mesh.device)
    points = model.apply(fs.unshard(state.params, plan), noise, method="gen").cpu()
    near, which = torch.cdist(points, MODES).min(1)
    counts = which[near < 4 * SPREAD].bincount(minlength=8)
    if mesh.rank == 0:
        print(f"{counts.sum() / 4096:.1%} of 4096 points lie within 4 standard deviations of a mode")
        print(f"{(counts > 40).sum()} of 8 modes have at least 1 %; their points: {counts.tolist()}")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=4000, help="train steps")
    cli.add_argument("--batch", type=int, default=240, help="points in a step, over all ranks")
    cli.add_argument("--lr", type=float, default=1e-3, help="learning rate of the generator; the other's is twice that")
    cli.add_argument("--seed", type=int, default=0, help="of initial values, points and noise")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        main(args, mesh)
