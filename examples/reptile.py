"""Learning to learn sine waves: Reptile, inner steps and a step back, all of them one step of a schedule.

Run it as `python examples/reptile.py`, or as `torchrun --nproc-per-node 2 examples/reptile.py`. A task is a wave of
random amplitude and phase. Each step descends on the points of some tasks, from the same start values, and then moves
the start values towards where the descents came out (Nichol, Achiam and Schulman 2018).
"""

import math
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree

try:
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example shows its progress with tqdm: pip install "fshard[examples]"') from None


def reptile_step(loss_fn: Callable[..., Any], opt: fs.optim.Optimizer, plan: fs.Plan, rate: float) -> Any:
    """A step whose gradient is the way back from where inner steps come out; its batch: for each task their batches."""
    grad, update = fs.value_and_grad(loss_fn, plan), fs.make_update(opt, plan)

    def fn(state: fs.TrainState, tasks: list[list[Any]]) -> tuple[fs.TrainState, dict[str, Tensor]]:
        start, back, losses = state.params, None, []
        for task in tasks:
            params = start
            for batch in task:
                loss, grads = grad(params, batch)
                params = tree.add(params, grads, -rate)
            losses.append(loss)
            way = tree.add(start, params, -1.0)
            back = way if back is None else tree.add(back, way)
        state, metrics = update(state, tree.scale(back, 1 / len(tasks)))
        return state, {"losses": losses, "norm": metrics.grad_norm}

    return fs.make_step(fn, plan)


def waves(count: int, draw: torch.Generator, steps: int, rows: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Tasks: for each step points (rows, 1) on the task's wave, and its values there."""
    amplitude, phase = 0.1 + 4.9 * torch.rand(count, generator=draw), 2 * math.pi * torch.rand(count, generator=draw)
    x = 10 * torch.rand(count, steps, rows, 1, generator=draw) - 5
    y = amplitude[:, None, None, None] * torch.sin(x + phase[:, None, None, None])
    return [list(zip(*task, strict=True)) for task in zip(x, y, strict=True)]


def adapted(loss_fn: Callable[..., Tensor], params: Any, rate: float) -> float:
    """The mean loss on new waves after 32 steps on ten points of each, of whole tensors."""
    total = 0.0
    for seen, new in waves(20, torch.Generator().manual_seed(123), 2, 10):
        mine = params
        for _ in range(32):
            mine = tree.add(mine, torch.func.grad(loss_fn)(mine, seen), -rate)
        total += loss_fn(mine, new).item() / 20
    return total


def main(args: Namespace, mesh: fs.Mesh) -> None:
    """Meta-train, then learn new waves."""
    layers = [nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
    model = fs.split(nn.Sequential(*layers), units=("0", "2", "4"))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.sgd(fs.optim.schedules.linear(args.lr, 0.0, args.steps))

    def loss_fn(params: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model.apply(params, batch[0]), batch[1])

    state, step = fs.init_state(plan, opt, seed=args.seed), reptile_step(loss_fn, opt, plan, args.inner_lr)
    draw, before = torch.Generator().manual_seed(args.seed), fs.unshard(state.params, plan)
    for _ in tqdm(range(args.steps), disable=mesh.rank != 0):
        tasks = waves(args.tasks, draw, args.inner_steps, 10)
        state, metrics = step(state, tree.map(lambda x: x.to(mesh.device), plan.local_batch(tasks)))
    after = fs.unshard(state.params, plan)
    if mesh.rank == 0:
        for name, params in (("random", before), ("learned", after)):
            error = {rate: adapted(loss_fn, params, rate) for rate in (0.003, 0.01, 0.02, 0.05)}
            best = min(error, key=error.__getitem__)
            print(f"{name} start values: error {error[best]:.3f} on new waves after 32 steps of rate {best}")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=1000, help="meta-train steps")
    cli.add_argument("--tasks", type=int, default=2, help="tasks in a step")
    cli.add_argument("--inner-steps", type=int, default=5, help="steps of descent within a task")
    cli.add_argument("--inner-lr", type=float, default=0.02, help="learning rate within a task")
    cli.add_argument("--lr", type=float, default=1.0, help="how far to go towards the results, at first")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and tasks")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        main(args, mesh)
