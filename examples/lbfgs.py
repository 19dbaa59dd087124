"""L-BFGS with a line search on sharded parameters: curvature out of inner products, many passes in one step.

Run it as `python examples/lbfgs.py`, or as `torchrun --nproc-per-node 2 examples/lbfgs.py`. The direction of a step is
made of the last few moves and of how the gradient changed along them (Nocedal 1980). The step tries some lengths of it,
and takes the longest that lowers the loss enough (Armijo 1966). Moves and gradients stay shards.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs

try:
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example needs scikit-learn and tqdm: pip install "fshard[examples]"') from None


def inverse(x: Tensor) -> Tensor:
    """1 / x of what is positive, else 0: a move that was not made, or along which the slope has not grown."""
    return torch.where(x > 0, 1 / x, 0.0)


def direction(grads: Any, moves: list[tuple[Any, Any]], plan: fs.Plan) -> Any:
    """The gradient times the inverse of the Hessian that the moves tell of, the latest last (two-loop recursion)."""
    rates = [inverse(fs.tree.vdot(change, move, plan)) for move, change in moves]
    way, sizes = grads, []
    for (move, change), rate in zip(reversed(moves), reversed(rates), strict=True):
        sizes.insert(0, rate * fs.tree.vdot(move, way, plan))
        way = fs.tree.add(way, change, -sizes[0])
    scale = inverse(rates[-1] * fs.tree.vdot(moves[-1][1], moves[-1][1], plan))
    way = fs.tree.scale(way, torch.where(scale > 0, scale, 1 / fs.tree.norm(grads, plan)))
    for (move, change), rate, size in zip(moves, rates, sizes, strict=True):
        way = fs.tree.add(way, move, size - rate * fs.tree.vdot(change, way, plan))
    return way


def lbfgs_step(loss_fn: Any, plan: fs.Plan, tries: int) -> Any:
    """A step of L-BFGS. Its state has the point and the gradient there, and the moves that led to it, all as states."""
    grad, evaluate = fs.value_and_grad(loss_fn, plan), fs.make_eval_step(loss_fn, plan)

    def fn(state: dict[str, Any], rows: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        point, grads, moves = state["point"], state["grads"].params, state["moves"]
        way = direction(grads, [(move.params, change.params) for move, change in moves], plan)
        slope, loss = fs.tree.vdot(grads, way, plan), evaluate(point, rows)
        length = torch.full_like(slope, 0.5**tries)
        for power in reversed(range(tries)):
            there = evaluate(point.replace(params=fs.tree.add(point.params, way, -(0.5**power))), rows)
            length = torch.where(there <= loss - 1e-4 * 0.5**power * slope, 0.5**power, length)
        move = fs.tree.scale(way, -length)
        point = point.replace(params=fs.tree.add(point.params, move))
        loss, following = grad(point, rows)
        (oldest, other), *moves = moves
        latest = oldest.replace(params=move), other.replace(params=fs.tree.add(following, grads, -1.0))
        state = {"point": point, "grads": state["grads"].replace(params=following), "moves": [*moves, latest]}
        return state, {"loss": loss, "length": length}

    return fs.make_step(fn, plan)


def begin(loss_fn: Any, plan: fs.Plan, start: fs.TrainState, rows: Any, memory: int) -> dict[str, Any]:
    """The state of a first step, without moves."""
    _, grads = fs.value_and_grad(loss_fn, plan)(start, rows)
    none = fs.tree.scale(grads, 0.0)
    moves = [(start.replace(params=none), start.replace(params=none)) for _ in range(memory)]
    return {"point": start, "grads": start.replace(params=grads), "moves": moves}


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=60, help="steps")
    cli.add_argument("--memory", type=int, default=8, help="moves that are remembered")
    cli.add_argument("--tries", type=int, default=4, help="lengths that a step tries")
    cli.add_argument("--seed", type=int, default=0, help="of initial values")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        net, data = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double(), load_digits()
        model = fs.split(net, units=("0", "2"))
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))
        rows = plan.local_batch((torch.tensor(data.data / 16)[:1440], torch.tensor(data.target)[:1440]))

        def loss_fn(params: Any, rows: tuple[Tensor, Tensor]) -> Tensor:
            decay = sum((leaf**2).sum() for leaf in fs.tree.leaves(params))
            return nn.functional.cross_entropy(model.apply(params, rows[0]), rows[1]) + 5e-4 * decay

        start = fs.init_state(plan, fs.optim.sgd(0.0), seed=args.seed)  # nothing calls this optimizer
        state, step = begin(loss_fn, plan, start, rows, args.memory), lbfgs_step(loss_fn, plan, args.tries)
        for _ in tqdm(range(args.steps), disable=mesh.rank != 0):
            state, reached = step(state, rows)
        opt = fs.optim.adamw(fs.optim.schedules.linear(0.03, 0.0, args.steps), weight_decay=0.0)
        plain, train = fs.init_state(plan, opt, seed=args.seed), fs.make_train_step(loss_fn, opt, plan)
        for _ in range(args.steps):
            plain, metrics = train(plain, rows)
        if mesh.rank == 0:
            print(f"loss after {args.steps} steps: L-BFGS {reached['loss']:.5f}, AdamW {metrics.loss:.5f}")
