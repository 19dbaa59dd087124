"""A trial of an optimizer that fshard did not write: its update of a whole vector against that of two slices."""

import copy
import warnings
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from fshard.errors import PlanError
from fshard.optim.base import Optimizer, rate
from fshard.optim.checks import is_optimizer
from fshard.optim.contract import Contract, contract

LENGTH, CUT, UPDATES = 24, 10, 3
"""The elements of the vector, where it is cut, and how often it is updated."""

CLOSE = 1e-5
"""The largest gap between results, as a part of the distance moved: kernels round the ends of slices otherwise."""

SCALING: dict[str, Any] = {"grad_scale": None, "found_inf": None}
"""Arguments that every update is given."""

REMEDY = (
    "An optimizer is a pure rule of single elements, which works on slices of flat shards. A rule that needs more of a "
    "leaf defines grain(hyper); norms of whole leaves are fs.tree.norms in a step function; a count of updates is step"
)


def check_own_rules(made: Contract, hyper: Hashable, device: torch.device) -> None:
    """Try each optimizer in ``made`` that another package has written, if it says of itself that it is elementwise.

    Args:
        made: the contract of the outermost optimizer.
        hyper: its hyper-parameters of a leaf.
        device: where shards lie: kernels of its own may run nowhere else.

    Raises:
        PlanError: its ``init`` or ``update`` has another signature; an update returns something, or gives other numbers
            where the vector is cut.
    """
    for opt in _foreign(made.opt):
        own = made if opt is made.opt else contract(opt)
        given = hyper if opt is made.opt else opt.hyper("w", (LENGTH,))
        if own.uniform and own.grain(given) == 1 and own.steps is None:
            _try(own, given, device)


def _foreign(held: Any) -> Iterator[Optimizer]:
    """The optimizers of other packages in an optimizer, or in what one holds."""
    if isinstance(held, tuple | list):
        for each in held:
            yield from _foreign(each)
    elif is_optimizer(held):
        if type(held).__module__.partition(".")[0] == "fshard":
            yield from _foreign([*getattr(held, "__dict__", {}).values()])
        else:
            yield held


def _try(own: Contract, hyper: Any, device: torch.device) -> None:
    name = type(own.opt).__name__
    try:
        copies: list[Any] = [copy.deepcopy(own.opt) for _ in range(2)]  # what one counts on itself stays as it is
    except Exception:  # a trial without a copy would change it
        return
    start = torch.linspace(-1.0, 1.0, LENGTH, dtype=torch.float32, device=device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        drawn = _generators(device)
        try:
            whole = _updated(copies[0], own, hyper, start, [LENGTH])
            cut = _updated(copies[1], own, hyper, start, [CUT, LENGTH - CUT])
        except (TypeError, AttributeError, RuntimeError, KeyError) as error:
            raise PlanError(
                f"the optimizer {name} failed on a vector of {LENGTH} elements: {type(error).__name__}: {error}: write "
                f"init(self, param), and update(self, params, grads, states, *, step, hyper, **more), which writes "
                f"into lists of slices; with forms(self, hyper), init is init(self, param, hyper)"
            ) from error
        draws = _generators(device) != drawn
    moved = (whole - start).abs().max().item()
    gap = (whole - cut).abs().max().item()
    if gap > CLOSE * moved and not draws:
        raise PlanError(
            f"the optimizer {name} depends on how a leaf is cut: after {UPDATES} updates of {LENGTH} elements, in one "
            f"slice and in two, they are {gap:.1e} apart, and have moved by {moved:.1e}. {REMEDY}"
        )
    if moved == 0 and any(rate(own.lr, step) for step in range(1, UPDATES + 1)):
        warnings.warn(
            f"the optimizer {name} changes no parameter in {UPDATES} updates: its update must write in place, such as "
            f"param.sub_(lr * grad), not make a new tensor",
            stacklevel=2,
        )


def _generators(device: torch.device) -> list[bytes]:
    """The states of the generators of random numbers that a rule may use."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [bytes(state.tolist()) for state in states]


def _updated(opt: Any, own: Contract, hyper: Any, start: Tensor, sizes: list[int]) -> Tensor:
    """The vector after the updates of its slices, one slice at a time.

    Raises:
        PlanError: an update returns something.
    """
    params = [part.clone() for part in torch.split(start, sizes)]
    states = [own.init(param, hyper) for param in params]
    for step in range(1, UPDATES + 1):
        grads = torch.split(start.square() + 0.5 * step, sizes)
        for param, grad, state in zip(params, grads, states, strict=True):
            result = opt.update([param], [grad.clone()], [state], step=step, hyper=hyper, **SCALING)
            if result is not None:
                raise PlanError(
                    f"update of the optimizer {type(opt).__name__} returned {type(result).__name__}: it must write the "
                    f"new values in place, into params and states, and return nothing"
                )
    return torch.cat(params)
