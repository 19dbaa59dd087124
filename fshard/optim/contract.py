"""What the library asks of an optimizer, with the defaults of what an optimizer may leave out."""

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard.errors import PlanError
from fshard.optim.base import Optimizer, Rate, State, rate
from fshard.optim.form import Form, Grain, LeafInfo


@dataclass(frozen=True)
class Contract:
    """An optimizer with every part of the contract. Made by ``contract``.

    Attributes:
        opt: the optimizer itself.
        init: the state of a slice before the first update, from ``(param, hyper)``.
        forms, grain, problems: see ``Optimizer``.
        uniform: whether all buffers are like the parameters, so that ``init`` takes a whole shard.
        steps: the number of steps to an update, for an optimizer that carries gradients between steps; else None.
    """

    opt: Optimizer
    hyper: Callable[[str, tuple[int, ...]], Hashable]
    update: Callable[..., None]
    init: Callable[[Tensor, Any], State]
    forms: Callable[[Any], dict[str, Form]]
    grain: Callable[[Any], Grain]
    problems: Callable[[list[LeafInfo]], list[str]]
    uniform: bool
    steps: int | None

    @property
    def lr(self) -> Rate:
        """The optimizer's own learning rate."""
        return self.opt.lr

    def with_rate(self, lr: Any) -> "Contract":
        """The same with another learning rate, in the place of a number or of a function of the step.

        Args:
            lr: the learning rate, a finite number >= 0.

        Raises:
            PlanError: it is not a learning rate; the optimizer has several, or none.
        """
        rate(lr, 1)
        opt = with_rate(self.opt, lr)
        if opt is None:
            raise PlanError(
                f"lr={lr!r} is one learning rate, and {self.opt!r} has not exactly one that it could replace: give "
                f"each of its parts a function of the step"
            )
        return replace(self, opt=opt, update=opt.update)


def contract(opt: Optimizer) -> Contract:
    """Complete an optimizer: what it leaves out has the defaults of a rule that updates each element by itself.

    >>> from fshard.optim.sgd import sgd
    >>> made = contract(sgd(0.1, momentum=0.9))
    >>> list(made.forms(0.0)), made.grain(0.0), made.uniform
    (['momentum_buffer'], 1, True)
    """
    forms = getattr(opt, "forms", None)
    return Contract(
        opt=opt,
        hyper=opt.hyper,
        update=opt.update,
        init=(lambda param, hyper: opt.init(param)) if forms is None else opt.init,
        forms=forms or (lambda hyper: dict.fromkeys(opt.init(torch.empty(0, device="cpu")), Form())),
        grain=getattr(opt, "grain", lambda hyper: 1),
        problems=getattr(opt, "problems", lambda leaves: []),
        uniform=forms is None,
        steps=getattr(opt, "steps_per_update", None),
    )


def with_rate(opt: Any, lr: float) -> Any:
    """A copy of an optimizer with another learning rate, or around one; None if it has not exactly one."""
    held = getattr(opt, "__dict__", {})
    if (own := getattr(opt, "with_rate", None)) is not None:
        return own(lr)
    name = "lr" if "lr" in held else "opt"
    value: Any = lr if name == "lr" else with_rate(held["opt"], lr) if "opt" in held else None
    if value is None:
        return None
    made = copy.copy(opt)
    object.__setattr__(made, name, value)  # optimizers are frozen, and some have arguments of their own
    return made
