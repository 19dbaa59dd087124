"""Any elementwise class of ``torch.optim`` as an optimizer of flat shards."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard import errors
from fshard.arguments import described
from fshard.optim import checks
from fshard.optim.base import Rate, State, States, Tensors, Unfused
from fshard.optim.decay import Decay, Masked, decays
from fshard.optim.form import Form
from fshard.optim.trial import MisfitError, TrialState, compare, find, steps_on_cpu


@dataclass(frozen=True)
class from_torch(Masked, Unfused):  # noqa: N801 - reads as the function it is in a train script
    """A class of ``torch.optim``, or one derived from its ``Optimizer``, whose rule is elementwise.

    Its own ``step`` runs on slices of flat shards, with the state that the train state keeps: the class is a function
    here. It is tried when this is made: updates of flattened parameters, and of their halves, must be those that the
    class makes of vectors, matrices and tensors of more dims, and all that it keeps must be in its ``state[param]``. So
    ``Adagrad``, ``Adam``, ``NAdam``, ``RAdam``, ``Rprop`` and their like work, and ``LBFGS``, ``Adafactor``, ``Muon``
    and ``SparseAdam`` do not.

    Args:
        cls: the class.
        lr: the learning rate, or a function of the step; None for the default of the class.
        decay: which leaves ``weight_decay`` touches: ``None`` for all, a regex over whole paths, a function of path and
            shape.
        kwargs: what else the class takes, by keyword.

    Raises:
        PlanError: a class that is not elementwise, or keeps something outside of ``state[param]``; arguments that it
            does not take; ``decay`` for a class without ``weight_decay``.

    >>> opt = fs.optim.from_torch(torch.optim.Adagrad, lr=0.1)
    >>> opt, sorted(opt.init(torch.zeros(3), opt.hyper("w", (3,))))
    (from_torch(Adagrad, lr=0.1), ['sum'])
    """

    cls: type[torch.optim.Optimizer]
    lr: Rate
    decay: Decay
    kwargs: Mapping[str, Any]
    found: TrialState = field(repr=False, compare=False)

    def __init__(
        self, cls: type[torch.optim.Optimizer], *, lr: Rate | None = None, decay: Decay = None, **kwargs: Any
    ) -> None:
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise errors.bad_arguments("from_torch", [f"cls is {described(cls)}: give a class of torch.optim"])
        problems = checks.decay("decay", decay) + ([] if lr is None else checks.rate("lr", lr))
        if problems:
            raise errors.bad_arguments(f"from_torch({cls.__name__})", problems)
        vars(self).update(cls=cls, lr=lr, decay=decay, kwargs=dict(kwargs))
        try:
            if lr is None:
                vars(self).update(lr=float(self._make([torch.zeros(1, device="cpu")]).param_groups[0]["lr"]))
            self._check_decay()
            vars(self).update(found=find(self._make))
            compare(self._make, self.init, functools.partial(self._update, hyper=True))
        except errors.PlanError:
            raise
        except MisfitError as misfit:
            refusal = _not_elementwise if misfit.elementwise else _not_kept
            raise refusal(cls.__name__, str(misfit)) from misfit.__cause__
        except Exception as error:
            if isinstance(error, TypeError | ValueError) and (kwargs or "__init__" in str(error)):
                raise errors.bad_arguments(f"from_torch({cls.__name__})", [str(error)]) from error
            raise _not_elementwise(cls.__name__, f"it failed on a vector: {error}") from error

    def __repr__(self) -> str:
        given = {"lr": self.lr, **({} if self.decay is None else {"decay": self.decay}), **self.kwargs}
        return f"from_torch({self.cls.__name__}, {', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def __hash__(self) -> int:
        return hash((self.cls, self.decay, tuple(self.kwargs)))

    def init(self, param: Tensor, hyper: Any = None) -> State:
        """The class's buffers before its first gradient."""
        out = {}
        for name, buffer in self.found.buffers.items():
            size = len(param) if buffer.form.shape is None else 1
            out[name] = torch.full((size,), buffer.start, dtype=buffer.form.typed(param.dtype), device=param.device)
        return out

    def hyper(self, path: str, shape: tuple[int, ...]) -> bool:
        """Tell whether the leaf decays."""
        return decays(self.decay, path, shape)

    def forms(self, hyper: bool) -> dict[str, Form]:
        """Buffers like the leaf, and single numbers."""
        return {name: buffer.form for name, buffer in self.found.buffers.items()}

    def _update(self, params: Tensors, grads: Tensors, states: States, step: int, lr: float, hyper: bool) -> None:
        views = [param.detach() for param in params]
        rule, buffers = self._make(views, lr, hyper), self.found.buffers
        for view, grad, state in zip(views, grads, states, strict=True):
            view.grad = grad
            if step > 1:  # before that the class makes its state as it sees fit
                given = {name: each.given(state[name]) for name, each in buffers.items() if step > each.since}
                rule.state[view] = {**self.found.counted(step - 1), **given}
        with steps_on_cpu():
            rule.step()
        for view, state in zip(views, states, strict=True):
            self._keep(rule.state.get(view, {}), state, step)

    def _keep(self, made: Mapping[str, Any], state: State, step: int) -> None:
        """Keep what the class has made of the state of one slice."""
        known = {*self.found.buffers, *self.found.counted(0)}
        if extra := [name for name, new in made.items() if new is not None and name not in known]:
            raise _not_kept(self.cls.__name__, f"its state {extra[0]!r} first appears in update {step}")
        for name in self.found.buffers:  # optimizers around this one may keep more
            value, new = state[name], made.get(name)
            if isinstance(new, Tensor) and new.untyped_storage()._cdata != value.untyped_storage()._cdata:
                value.copy_(new.reshape(-1))
            elif isinstance(new, int | float):
                value.fill_(new)

    def _check_decay(self) -> None:
        """Refuse ``decay`` for a class that has no ``weight_decay``."""
        if self.decay is not None and "weight_decay" not in self._make([torch.zeros(1, device="cpu")]).defaults:
            problem = f"decay = {self.decay!r}: says which leaves weight_decay= touches, and the class has none"
            raise errors.bad_arguments(f"from_torch({self.cls.__name__})", [problem])

    def _make(self, params: list[Tensor], lr: float | None = None, decays: bool = True) -> torch.optim.Optimizer:
        options = dict(self.kwargs) if lr is None else {**self.kwargs, "lr": lr}
        if not decays and "weight_decay" in options:
            options["weight_decay"] = 0.0
        rule: torch.optim.Optimizer = self.cls(params, **options)
        if not decays and "weight_decay" not in options and "weight_decay" in rule.defaults:
            rule.param_groups[0]["weight_decay"] = 0.0
        return rule


def _not_elementwise(name: str, reason: str) -> errors.PlanError:
    """A class of ``torch.optim`` that cannot run on pieces of leaves."""
    return errors.PlanError(
        f"fs.optim.from_torch({name}): its rule is not elementwise, so it cannot run on flat shards: {reason}. Use "
        f'fs.optim.muon or fs.optim.adafactor on leaves with fs.Rule(..., align="leaf"), or an elementwise class'
    )


def _not_kept(name: str, reason: str) -> errors.PlanError:
    """A class of ``torch.optim`` that has state which no train state can hold."""
    return errors.PlanError(
        f"fs.optim.from_torch({name}): its step is no function of what it keeps for each parameter: {reason}. Keep "
        f"counts and buffers in self.state[param], from the first update on"
    )
