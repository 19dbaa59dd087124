"""The contract of an optimizer, with the defaults of what it may leave out."""

import copy
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard.errors import PlanError
from fshard.optim.base import Optimizer, Rate, State, rate, unscale
from fshard.optim.form import Form, Grain, LeafInfo

LearningRate = float | Mapping[str, float] | None
"""What a call gives as its learning rate: one, several by the patterns of ``fs.optim.partition``, or none."""


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
            lr: the learning rate, a finite number >= 0; or such numbers by the patterns of ``partition``.

        Raises:
            PlanError: it is not a learning rate; the optimizer has several, or none.
        """
        rates = lr if isinstance(lr, Mapping) else {"": lr}
        for one in rates.values():
            rate(one, 1)
        opt = with_rate(self.opt, lr)
        if opt is None:
            raise PlanError(
                f"lr={lr!r} does not fit {self.opt!r}: one learning rate replaces exactly one, and those of "
                f"fs.optim.partition are replaced by a mapping from its patterns, such as {{'.*': 0.1}}; or give each "
                f"of its parts a function of the step"
            )
        return replace(self, opt=opt, update=update_of(opt))

    def at_step(self, step: int) -> "Contract":
        """The same with learning rates that are numbers: those of the update number ``step``, counted from 1.

        An update may wait. What a rate reads may have changed by then.

        Raises:
            PlanError: there is no rate for this update.
        """
        opt = at_step(self.opt, step)
        return self if opt is self.opt else replace(self, opt=opt, update=update_of(opt))


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
        update=update_of(opt),
        init=(lambda param, hyper: opt.init(param)) if forms is None else opt.init,
        forms=forms or (lambda hyper: dict.fromkeys(opt.init(torch.empty(0, device="cpu")), Form())),
        grain=getattr(opt, "grain", lambda hyper: 1),
        problems=getattr(opt, "problems", lambda leaves: []),
        uniform=forms is None,
        steps=getattr(opt, "steps_per_update", None),
    )


def update_of(opt: Optimizer) -> Callable[..., None]:
    """The update of an optimizer, with gradients divided first where it does not name ``grad_scale``.

    The scale holds clipping, the scale of a loss in float16 and the mean over several steps, so no rule may miss it.

    >>> from fshard.optim.sgd import sgd
    >>> opt = sgd(0.1)
    >>> update_of(opt) == opt.update
    True
    """
    return opt.update if _takes_scale(type(opt)) else functools.partial(_divided_update, opt)


@functools.cache
def _takes_scale(kind: type) -> bool:
    """Tell whether the updates of a class divide by the scale. Rules around rules of fshard pass it on."""
    if kind.__module__.partition(".")[0] == "fshard":
        return True
    update = getattr(kind, "update", None)
    return update is not None and "grad_scale" in inspect.signature(update).parameters


def _divided_update(
    opt: Optimizer, params: list[Tensor], grads: list[Tensor], states: list[State], **more: Any
) -> None:
    scale = more.get("grad_scale")
    if scale is not None:  # copies are divided: a rule that fails is called once more, with the gradients as they were
        grads = [grad.clone() for grad in grads]
        unscale(grads, scale)
    opt.update(params, grads, states, **{**more, "grad_scale": None})


def with_rate(opt: Any, lr: Any) -> Any:
    """A copy of an optimizer with another learning rate, or around one; None if it has not exactly one.

    Several rates are a mapping, which ``partition`` takes.
    """
    held = getattr(opt, "__dict__", {})
    if (own := getattr(opt, "with_rate", None)) is not None:
        return own(lr)
    name = "lr" if "lr" in held else "opt"
    number = None if isinstance(lr, Mapping) else lr
    value: Any = number if name == "lr" else with_rate(held["opt"], lr) if "opt" in held else None
    return None if value is None else altered(opt, name, value)


def at_step(opt: Any, step: int) -> Any:
    """An optimizer whose learning rates are those of one update, counted from 1; itself if they are numbers already."""
    held = getattr(opt, "__dict__", {})
    if (own := getattr(opt, "at_step", None)) is not None:
        return own(step)
    if "lr" in held:
        return altered(opt, "lr", rate(held["lr"], step)) if callable(held["lr"]) else opt
    inner = at_step(held["opt"], step) if "opt" in held else None
    return opt if inner is None or inner is held["opt"] else altered(opt, "opt", inner)


def altered(opt: Any, name: str, value: Any) -> Any:
    """A copy of an optimizer, or of a part of one, with another attribute."""
    made = copy.copy(opt)
    object.__setattr__(made, name, value)  # optimizers are frozen, and some have arguments of their own
    return made
