"""Two hosts of two ranks, simulated in one process: HSDP against FSDP over a slow link between the hosts.

Run it as `python examples/two_hosts.py`. It plays all four ranks on a virtual mesh, trains on them, and compares the
losses with those of one rank. Then it says what a step would take on machines that it does not have, from the schedule
and the costs of links.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs

try:
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example shows its progress with tqdm: pip install "fshard[examples]"') from None

LAYOUTS = {"FSDP over all ranks": ("host", "data"), "HSDP: a copy on each host": ("data",)}


class Net(nn.Module):
    """Residual blocks."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def make(args: Namespace, mesh: fs.Mesh, axes: tuple[str, ...]) -> tuple[Any, ...]:
    """The step of a layout, its plan and its first state's maker."""
    with fs.empty_weights():
        model = fs.split(Net(args.depth, args.width), units=("blocks.*",))
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp(axes))], batch=fs.P(("host", "data")))
    opt = fs.optim.adamw(1e-3)

    def loss_fn(params: dict, x: Tensor) -> Tensor:
        return (model.apply(params, x) - x.roll(1, -1)).square().mean()

    init = [(r".*weight", fs.init.normal(args.width**-0.5 / 2)), (r".*bias", fs.init.zeros())]
    return fs.make_train_step(loss_fn, opt, plan), plan, lambda: fs.init_state(plan, opt, seed=args.seed, init=init)


def batch(args: Namespace, number: int) -> Tensor:
    """A global batch, a function of the step."""
    return torch.randn(args.batch, args.width, generator=torch.Generator().manual_seed(args.seed + number))


def train(args: Namespace, sizes: tuple[int, int], axes: tuple[str, ...]) -> list[float]:
    """The losses of a run on one rank: of a virtual mesh, or alone."""
    mesh = fs.make_mesh(sizes, ("host", "data"))
    step, plan, start = make(args, mesh, axes)
    state, losses = start(), []
    for number in tqdm(range(args.steps), desc=" + ".join(axes), disable=mesh.rank != 0):
        state, metrics = step(state, plan.local_batch(batch(args, number)))
        losses.append(metrics.loss.item())
    return losses


def foreseen(args: Namespace, axes: tuple[str, ...], rate: float) -> fs.sim.Simulation:
    """When the ops of a step would run on two hosts, if a block's forward takes 2 ms and its backward 4.

    ``rate`` is that of the link between the hosts, in Gbit/s.
    """
    mesh = fs.abstract_mesh((2, 2), ("host", "data"))
    step, plan, _ = make(args, mesh, axes)
    schedule = step.trace(plan.local_batch(batch(args, 0))).schedule
    seconds = {("forward", "root"): 0.0}
    for number in range(args.depth):
        seconds |= {("forward", f"blocks.{number}"): 2e-3, ("backward", f"blocks.{number}"): 4e-3}
    slow = fs.sim.Link(rate * 125e6, latency=50e-6)
    links = {"host": slow, "host+data": slow}
    return fs.sim.simulate(schedule, fs.sim.Costs(seconds, fs.sim.Link(args.fast * 125e6), links=links))


def plot(args: Namespace) -> None:
    """Draw what a step takes on both layouts, by the rate of the link between the hosts."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit('--plot needs matplotlib: pip install "fshard[view]"') from None
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes, rates = figure.subplots(), [0.25 * 2**power for power in range(10)]
    for name, layout in LAYOUTS.items():
        axes.plot(rates, [1e3 * foreseen(args, layout, rate).seconds for rate in rates], "o-", label=name)
    axes.set(xscale="log", xlabel="Gbit/s between the hosts", ylabel="ms for a step, simulated", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(args.plot, dpi=110, metadata={"Software": ""})


def main(args: Namespace) -> None:
    """Train on both layouts and alone; then look ahead."""
    alone = train(args, (1, 1), ("data",))
    for name, axes in LAYOUTS.items():
        runs = fs.virtual_mesh((2, 2), ("host", "data")).run(lambda axes=axes: train(args, (2, 2), axes))
        off = max(abs(a / b - 1) for a, b in zip(runs[0], alone, strict=True))
        assert all(run == runs[0] for run in runs)
        print(f"{name}: loss {runs[0][0]:.4f} to {runs[0][-1]:.4f}, at most {off:.0e} off that of one rank")
        print(f"  on two hosts, {args.fast:g} Gbit/s inside and {args.slow:g} Gbit/s between them, a ", end="")
        print(str(foreseen(args, axes, args.slow)).splitlines()[0])
    if args.plot:
        plot(args)


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=100, help="train steps")
    cli.add_argument("--batch", type=int, default=64, help="rows of a step, over all ranks, a multiple of 4")
    cli.add_argument("--depth", type=int, default=8, help="blocks")
    cli.add_argument("--width", type=int, default=256, help="features")
    cli.add_argument("--fast", type=float, default=100.0, help="Gbit/s inside of a host")
    cli.add_argument("--slow", type=float, default=1.0, help="Gbit/s between hosts")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and data")
    cli.add_argument("--plot", type=Path, default=None, metavar="FILE", help="draw step times by the link's rate")
    main(cli.parse_args())
