"""Any elementwise class of ``torch.optim`` as an optimizer of flat shards."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard import errors
from fshard.arguments import described
from fshard.optim import checks
from fshard.optim.base import Rate, State, States, Tensors, Unfused, rate
from fshard.optim.decay import Decay, Masked, decays
from fshard.optim.form import Form

PROBE = 24
"""Elements of the vector on which a class is tried."""

TRIAL_RATE = 0.01
"""The learning rate of that trial: the user's own may be too small for a difference to show."""


@dataclass(frozen=True)
class from_torch(Masked, Unfused):  # noqa: N801 - reads as the function it is in a train script
    """A class of ``torch.optim``, or one derived from its ``Optimizer``, whose rule is elementwise.

    Its own ``step`` runs on slices of flat shards, with the state that the train state keeps: the class is a function
    here. That it is elementwise is tried when this is made: updates of a vector must be those of its two halves. So
    ``Adagrad``, ``Adam``, ``NAdam``, ``RAdam``, ``Rprop`` and their like work, and ``LBFGS``, ``Adafactor``, ``Muon``
    and ``SparseAdam`` do not.

    Args:
        cls: the class.
        lr: the learning rate, or a function of the step; None for the default of the class.
        decay: which leaves ``weight_decay`` touches: ``None`` for all, a regex over whole paths, a function of path and
            shape.
        kwargs: what else the class takes, by keyword.

    Raises:
        PlanError: a class that is not elementwise, or arguments that it does not take.

    >>> opt = from_torch(torch.optim.Adagrad, lr=0.1)
    >>> opt, sorted(opt.init(torch.zeros(3), opt.hyper("w", (3,))))
    (from_torch(Adagrad, lr=0.1), ['sum'])
    """

    cls: type[torch.optim.Optimizer]
    lr: Rate
    decay: Decay
    kwargs: Mapping[str, Any]
    found: Mapping[str, tuple[Form, float]] = field(repr=False, compare=False)

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
            vars(self).update(found=self._found())
            self._check_elementwise()
        except errors.PlanError:
            raise
        except Exception as error:
            if isinstance(error, TypeError | ValueError) and (kwargs or "__init__" in str(error)):
                raise errors.bad_arguments(f"from_torch({cls.__name__})", [str(error)]) from error
            raise errors.not_elementwise(cls.__name__, f"it failed on a vector: {error}") from error

    def __repr__(self) -> str:
        given = {"lr": self.lr, **({} if self.decay is None else {"decay": self.decay}), **self.kwargs}
        return f"from_torch({self.cls.__name__}, {', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def __hash__(self) -> int:
        return hash((self.cls, self.decay, tuple(self.kwargs)))

    def init(self, param: Tensor, hyper: Any = None) -> State:
        """The class's buffers before its first gradient."""
        out = {}
        for name, (form, value) in self.found.items():
            size = len(param) if form.shape is None else 1
            out[name] = torch.full((size,), value, dtype=form.dtype or param.dtype, device=param.device)
        return out

    def hyper(self, path: str, shape: tuple[int, ...]) -> bool:
        """Whether the leaf decays."""
        return decays(self.decay, path, shape)

    def forms(self, hyper: bool) -> dict[str, Form]:
        """Buffers like the leaf, and single numbers."""
        return {name: form for name, (form, _) in self.found.items()}

    def _update(self, params: Tensors, grads: Tensors, states: States, step: int, lr: float, hyper: bool) -> None:
        views = [param.detach() for param in params]
        rule = self._make(views, lr, hyper)
        for view, grad, state in zip(views, grads, states, strict=True):
            view.grad = grad
            if step > 1:  # before that the class makes its state as it sees fit
                given = {
                    k: state[k] if form.shape is None else state[k].view(()) for k, (form, _) in self.found.items()
                }
                rule.state[view] = {"step": torch.tensor(float(step - 1), device="cpu"), **given}
        with _steps_on_cpu():
            rule.step()
        for view, state in zip(views, states, strict=True):
            for name in self.found:  # optimizers around this one may keep more
                value, new = state[name], rule.state[view].get(name)
                if isinstance(new, Tensor) and new.untyped_storage()._cdata != value.untyped_storage()._cdata:
                    value.copy_(new.reshape(-1))
                elif isinstance(new, float):
                    value.fill_(new)

    def _make(self, params: list[Tensor], lr: float | None = None, decays: bool = True) -> torch.optim.Optimizer:
        options = dict(self.kwargs) if lr is None else {**self.kwargs, "lr": lr}
        if not decays and "weight_decay" in options:
            options["weight_decay"] = 0.0
        rule: torch.optim.Optimizer = self.cls(params, **options)
        if not decays and "weight_decay" not in options and "weight_decay" in rule.defaults:
            rule.param_groups[0]["weight_decay"] = 0.0
        return rule

    def _check_elementwise(self) -> None:
        """Refuse a class whose updates of a vector are not those of its halves."""
        generator = torch.Generator("cpu").manual_seed(0)
        start = torch.randn(PROBE, generator=generator, device="cpu")
        grads = [torch.randn(PROBE, generator=generator, device="cpu") for _ in range(3)]
        whole = self._trial([start], [[grad] for grad in grads])
        halves = self._trial(list(start.chunk(2)), [list(grad.chunk(2)) for grad in grads])
        gap, moved = (whole - halves).abs().max().item(), (whole - start).abs().max().item()
        if not gap <= 1e-4 * moved:
            reason = f"after updates by {moved:.1e} a vector and its two halves came out {gap:.1e} apart"
            raise errors.not_elementwise(self.cls.__name__, reason)

    def _found(self) -> dict[str, tuple[Form, float]]:
        """The class's buffers with their first values, found by an update with gradient zero."""
        param = torch.zeros(PROBE, device="cpu")
        param.grad = torch.zeros(PROBE, device="cpu")
        rule = self._make([param], rate(self.lr, 1))
        with _steps_on_cpu():
            rule.step()
        found: dict[str, tuple[Form, float]] = {}
        for name, value in rule.state[param].items():
            if name == "step":
                continue
            number = value if isinstance(value, int | float) else None
            if number is not None or (isinstance(value, Tensor) and value.numel() == 1):
                found[name] = (Form(shape=(), dtype=torch.float32), float(value))
            elif isinstance(value, Tensor) and value.shape == param.shape:
                dtype = None if value.dtype == param.dtype else value.dtype
                found[name] = (Form(dtype=dtype), float(value[0]))
            elif value is not None:
                raise errors.not_elementwise(self.cls.__name__, f"its state {name!r} is not shaped like its parameters")
        return found

    def _trial(self, params: list[Tensor], grads: list[list[Tensor]]) -> Tensor:
        params = [param.clone() for param in params]
        states = [self.init(param) for param in params]
        for step, given in enumerate(grads, start=1):
            self._update(params, [grad.clone() for grad in given], states, step, TRIAL_RATE, True)
        return torch.cat(params)


def _steps_on_cpu() -> AbstractContextManager[object]:
    """Where a class counts its steps: on the default device, which the user may have set to another one."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
