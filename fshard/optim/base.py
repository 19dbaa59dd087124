"""The optimizer as a protocol that the step calls, and the learning rate of a step."""

import math
from collections.abc import Callable, Hashable
from numbers import Real
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from fshard import errors
from fshard.torch_internals import foreach_div_

Rate = float | Callable[[int], float]
"""A learning rate: a number, or a pure function of the step that counts from 0 for the first update.

>>> halving: fs.optim.Rate = lambda step: 0.1 / 2**step
>>> fs.optim.rate(halving, step=2)
0.05
"""

State = dict[str, Tensor]
"""An optimizer's buffers for one slice, each of its length and dtype unless the rule's ``forms`` say otherwise (see
``fshard.optim.form``); ``{}`` for a rule that keeps none.

>>> state: fs.optim.State = fs.optim.sgd(0.1, momentum=0.9).init(torch.ones(2))
>>> state
{'momentum_buffer': tensor([0., 0.])}
"""

Tensors = list[Tensor]
States = list[State]


@runtime_checkable
class Optimizer(Protocol):
    """Two pure functions, ``init`` and ``update``, and the hyper-parameters they are frozen with.

    An optimizer such as ``sgd`` keeps buffers of a parameter's length and updates each element by itself. Others have
    one or more of these methods besides:

    * ``forms(hyper) -> dict[str, Form]``: what it keeps of a leaf; its ``init`` then takes ``(param, hyper)``.
    * ``grain(hyper) -> Grain``: how much of a leaf one rank must hold in one piece.
    * ``problems(leaves) -> list[str]``: which of its arguments do not fit the leaves of a plan.

    The split is that of Optax (``init``/``update``), except that ``update`` owns its arguments, as a donated
    argument of a jitted JAX function is owned: it writes the new values where the old ones lay. Seen from
    outside that is the pure function ``(params, grads, states, step) -> (params, states)``, whose inputs no
    longer exist after the call. All it depends on is passed in, so equal inputs give equal results and a
    state that was saved resumes exactly.

    >>> opt = fs.optim.sgd(0.5, momentum=0.9)
    >>> param, grad = torch.ones(2), torch.tensor([1.0, 2.0])
    >>> state = opt.init(param)
    >>> opt.update([param], [grad], [state], step=1, hyper=opt.hyper("w", (2,)))
    >>> param, state
    (tensor([0.5000, 0.0000]), {'momentum_buffer': tensor([1., 2.])})
    """

    @property
    def lr(self) -> Rate:
        """The learning rate, or the function that gives it for a step."""

    @property
    def init(self) -> Callable[..., State]:
        """The state before the first update: a method that takes ``(param)``, or ``(param, hyper)`` with ``forms``.

        Args:
            param: a flat shard, 1-D, on any device; only its length, dtype and device matter, meta will do.

        Returns:
            Fresh buffers of the same length, dtype and device.
        """

    def hyper(self, path: str, shape: tuple[int, ...]) -> Hashable:
        """The hyper-parameters that differ between leaves; neighbours with equal ones share a kernel call.

        Args:
            path: the leaf's path in the parameter tree.
            shape: the leaf's full shape.
        """

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[State],
        *,
        step: int,
        hyper: Any,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        late: int = 0,
    ) -> None:
        """One update, in place, of slices that share their hyper-parameters.

        An element's new value depends on nothing but its own old value, gradient and state, so a shard may be
        updated whole or cut in any way. Kernels round the elements at the end of a slice, where no full SIMD
        vector is left, on another path: a cut can move the last bit, never more.

        Args:
            params: slices of flat shards, 1-D and contiguous, of one dtype and device; some may be empty.
            grads: their gradients, of equal lengths and dtype. Spent by the call: with ``grad_scale`` they
                may be left divided.
            states: what ``init`` returned for them, sliced alike.
            step: the number of this update, counted from 1.
            hyper: the value that ``hyper`` returned for the leaves of these slices.
            grad_scale: what gradients are divided by first: one element on the slices' device, float64 where they are,
                else float32. Fused kernels take float32 alone (``Fused`` divides by a wider one first).
            found_inf: one float32 element on the same device. At exactly 1 nothing changes, at 0 the update
                happens; no other value means anything, so a sum over ranks has to be clamped.
            late: how many updates there were before the leaves of these slices began to train. Learning rates go by
                ``step``; what counts a leaf's own updates, such as the bias correction of Adam, by ``step - late``.
        """


class Fused:
    """Optimizers whose update, ``_fused``, divides gradients and skips itself by tensors on its own device.

    ``capturable`` says of a class, not of what inherits from it, that it also takes its rate and count as tensors.
    """

    lr: Rate
    capturable: ClassVar[bool] = False

    def update(
        self,
        params: Tensors,
        grads: Tensors,
        states: States,
        *,
        step: int,
        hyper: Any,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        late: int = 0,
        numbers: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """One update in place; see ``Optimizer.update``.

        A capturable optimizer also takes ``numbers``, the learning rate and the number of the update, which is not the
        first one: 0-dim, float32, on the slices' device, in the place of the values of ``lr`` and ``step``.
        """
        lr = rate(self.lr, step)
        if grad_scale is not None and grad_scale.dtype == torch.float64:  # kernels read the scale as float32
            unscale(grads, grad_scale)
            grad_scale = None
        if not params:
            return
        scaling = {"grad_scale": grad_scale, "found_inf": found_inf}
        if numbers is None:
            self._fused(params, grads, states, step - late, lr, hyper, **scaling)
        else:
            lr, step = cast(float, numbers[0]), cast(int, numbers[1])
            self._fused(params, grads, states, step, lr, hyper, **scaling)

    def _fused(
        self, params: Tensors, grads: Tensors, states: States, step: int, lr: float, hyper: Any, **scaling: Any
    ) -> None:
        raise NotImplementedError


class Unfused(Fused):
    """Optimizers in ordinary operators: ``_update`` gets whole gradients, and ``step`` counts a leaf's own updates."""

    def _fused(
        self, params: Tensors, grads: Tensors, states: States, step: int, lr: float, hyper: Any, **scaling: Any
    ) -> None:
        if scaling["found_inf"] is None or scaling["found_inf"].item() != 1:
            unscale(grads, scaling["grad_scale"])
            self._update(params, grads, states, step, lr, hyper)

    def _update(self, params: Tensors, grads: Tensors, states: States, step: int, lr: float, hyper: Any) -> None:
        raise NotImplementedError


def rate(lr: Rate, step: int) -> float:
    """The learning rate of update number ``step``.

    Args:
        lr: a number or a schedule.
        step: the number of the update, counted from 1. Schedules count from 0 and are asked for ``step - 1``.

    Raises:
        PlanError: there is no such update, or the schedule returned something else than a finite number >= 0.
            Raised before anything is written.

    >>> fs.optim.rate(lambda step: 1.0 / (step + 1), step=4)
    0.25
    """
    if not isinstance(step, int):
        raise errors.bad_rate(lr, 1, step)
    value = lr(step - 1) if callable(lr) else lr
    # The general question takes a microsecond.
    real = type(value) is float or isinstance(value, Real) and not isinstance(value, bool)
    if step < 1 or not real or not 0 <= value < math.inf:
        raise errors.bad_rate(lr, step, value)
    return float(value)


def unscale(grads: Tensors, scale: Tensor | None) -> None:
    """Divide gradients by their scale, in place; ``None`` stands for 1."""
    if scale is not None and grads:
        foreach_div_(grads, scale.to(grads[0].dtype).view(()))
