"""L-BFGS with a line search on sharded parameters: curvature out of inner products, many passes in one step.

Run it as `python examples/lbfgs.py`, or as `torchrun --nproc-per-node 2 examples/lbfgs.py`. The direction of a step is
made of the last few moves and of how the gradient changed along them (Nocedal 1980). The step tries some lengths of it,
and takes the first that lowers the loss enough (Armijo 1966). Moves and gradients stay shards.
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


def inverse(x: Tensor) -> Tensor:
    """1 / x of what is positive, else 0: a move that was not made, or along which the slope has not grown."""
    return torch.where(x > 0, 1 / x, 0.0)


def direction(grads: Any, moves: list[tuple[Any, Any]], plan: fs.Plan) -> Any:
    """The gradient times the inverse of the Hessian that the moves tell of, the latest last (two-loop recursion)."""
    rates = [inverse(fs.tree_vdot(change, move, plan)) for move, change in moves]
    way, sizes = grads, []
    for (move, change), rate in zip(reversed(moves), reversed(rates), strict=True):
        sizes.insert(0, rate * fs.tree_vdot(move, way, plan))
        way = fs.tree_add(way, change, -sizes[0])
    scale = inverse(rates[-1] * fs.tree_vdot(moves[-1][1], moves[-1][1], plan))
    way = fs.tree_scale(way, torch.where(scale > 0, scale, 1 / fs.tree_norm(grads, plan)))
    for (move, change), rate, size in zip(moves, rates, sizes, strict=True):
        way = fs.tree_add(way, move, size - rate * fs.tree_vdot(change, way, plan))
    return way


def lbfgs_step(loss_fn: Callable[..., Any], plan: fs.Plan, tries: int) -> tuple[Any, fs.optim.Optimizer]:
    """A step of L-BFGS, and the optimizer of its state: going one direction by one."""
    opt = fs.optim.sgd(1.0)
    grad, update = fs.value_and_grad(loss_fn, plan), fs.make_update(opt, plan)

    def fn(state: fs.TrainState, batch: dict[str, Any]) -> tuple[fs.TrainState, dict[str, Any]]:
        loss, grads, moves = batch["loss"], batch["grads"], batch["moves"]
        way = direction(grads, moves, plan)
        slope = fs.tree_vdot(grads, way, plan)
        length = torch.full_like(slope, 0.5**tries)
        for power in reversed(range(tries)):
            there, _ = grad(fs.tree_add(state.params, way, -(0.5**power)), batch["rows"])
            length = torch.where(there <= loss - 1e-4 * 0.5**power * slope, 0.5**power, length)
        way = fs.tree_scale(way, length)
        state, _ = update(state, way)
        loss, following = grad(state, batch["rows"])
        moves = [*moves[1:], (fs.tree_scale(way, -1.0), fs.tree_add(following, grads, -1.0))]
        return state, {"loss": loss, "grads": following, "moves": moves, "length": length}

    return fs.make_step(fn, plan), opt
