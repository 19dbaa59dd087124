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
"""How far results may be apart, as a part of how far the vector moved: kernels round the ends of slices otherwise."""

SCALING: dict[str, Any] = {"grad_scale": None, "found_inf": None}
"""What an update is always given."""

REMEDY = (
    "An optimizer is a pure rule of single elements, which works on slices of flat shards. A rule that needs more of a "
    "leaf defines grain(hyper); norms of whole leaves are fs.tree.norms in a step function; a count of updates is step"
)


def check_own_rules(made: Contract, hyper: Hashable) -> None:
    """Try each optimizer in ``made`` that another package has written, if it says of itself that it is elementwise.

    Args:
        made: the contract of the outermost optimizer.
        hyper: its hyper-parameters of a leaf.

    Raises:
        PlanError: its ``init`` or ``update`` has another signature; an update returns something, or gives other numbers
            where the vector is cut.
    """
    for opt in _foreign(made.opt):
        own = made if opt is made.opt else contract(opt)
        given = hyper if opt is made.opt else opt.hyper("w", (LENGTH,))
        if own.uniform and own.grain(given) == 1 and own.steps is None:
            _try(own, given)


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


def _try(own: Contract, hyper: Any) -> None:
    name = type(own.opt).__name__
    drawn = torch.get_rng_state()
    start = torch.linspace(-1.0, 1.0, LENGTH, dtype=torch.float32, device="cpu")
    try:
        copy.deepcopy(own.opt)
    except Exception:  # without a copy, a trial would change what the optimizer keeps
        return
    try:
        whole, cut = (_updated(own, hyper, start, sizes) for sizes in ([LENGTH], [CUT, LENGTH - CUT]))
    except (TypeError, AttributeError, RuntimeError, KeyError) as error:
        raise PlanError(
            f"the optimizer {name} failed on a vector of {LENGTH} elements: {type(error).__name__}: {error}: write "
            f"init(self, param), and update(self, params, grads, states, *, step, hyper, **more), which writes into "
            f"lists of slices; with forms(self, hyper), init is init(self, param, hyper)"
        ) from error
    draws = not torch.equal(drawn, torch.get_rng_state())
    torch.set_rng_state(drawn)
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


def _updated(own: Contract, hyper: Any, start: Tensor, sizes: list[int]) -> Tensor:
    """The vector after the updates of its slices, one slice at a time.

    Raises:
        PlanError: an update returns something.
    """
    opt: Any = copy.deepcopy(own.opt)  # what it counts on itself begins anew
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
