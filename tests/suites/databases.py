"""PyTorch's lists of modules and operators, ``module_db`` and ``op_db``: their sample inputs as units of a model."""

import contextlib
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fshard import tree

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)


@dataclass(frozen=True)
class Case:
    """One sample input of an operator or a module.

    Attributes:
        name: of the operator, with the number of the sample.
        make: makes the unit; the same one each time.
        args: what the unit is called with.
    """

    name: str
    make: Callable[[], nn.Module]
    args: tuple[Any, ...]


class OperatorUnit(nn.Module):
    """An operator whose differentiable inputs are parameters, beside a parameter that every result depends on."""

    def __init__(self, op: Callable[..., Any], values: list[Tensor]) -> None:
        super().__init__()
        self.op, self.gain = op, nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.held = nn.ParameterList([nn.Parameter(x.detach().clone()) for x in values])

    def forward(self, given: Any) -> Tensor:
        """A number that depends on all results."""
        held = iter(list(self.held))
        # The operator may write to its input, which a unit must not.
        args, kwargs = tree.map(lambda x: next(held) * 1 if isinstance(x, Slot) else _copied(x), given)
        return weighted(self.op(*args, **kwargs)) + 0.1 * self.gain.sum()


class ModuleUnit(nn.Module):
    """A module, beside a parameter that every result depends on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gain = inner, nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, given: Any) -> Tensor:
        """A number that depends on all results."""
        args, kwargs = tree.map(_copied, given)
        return weighted(self.inner(*args, **kwargs)) + 0.1 * self.gain.sum()


class Slot:
    """Stands for an input that is a parameter of the unit."""


def weighted(values: Any) -> Tensor:
    """A sum over all numbers of a result, each with a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for x in tree.leaves(values):
        if isinstance(x, Tensor):
            x = x.to_dense() if x.layout != torch.strided else x
            x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
            weights = torch.arange(x.numel(), dtype=torch.float64).mul(0.7).cos().reshape(x.shape)
            total = total + (x.to(torch.float64) * weights).sum()
    return total


def operators(most: int, every: int = 1, first: int = 0) -> Iterator[Case]:
    """Up to so many sample inputs of each operator of ``op_db``, or of one operator in so many."""
    with _importable():
        from torch.testing._internal.common_methods_invocations import op_db
    for info in op_db[first::every]:
        dtype = next((x for x in DTYPES if x in info.supported_dtypes("cpu")), None)
        if dtype is None:
            continue
        name = f"{info.name}{'.' + info.variant_test_name if info.variant_test_name else ''}"
        trained = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        samples = _some(lambda info=info, d=dtype, t=trained: info.sample_inputs("cpu", d, requires_grad=t), most)
        for number, sample in enumerate(samples):
            given = ((sample.input, *sample.args), sample.kwargs)
            values = [x for x in tree.leaves(given) if _trained(x)]
            rest = tree.map(lambda x: Slot() if _trained(x) else x, given)
            op = info.op
            yield Case(f"{name}[{number}]", lambda op=op, values=values: OperatorUnit(op, values), (rest,))


def modules(most: int, every: int = 1, first: int = 0) -> Iterator[Case]:
    """Up to so many sample inputs of each module of ``module_db``, or of one module in so many."""
    with _importable():
        from torch.testing._internal.common_modules import module_db
    for info in module_db[first::every]:
        for training in (True, False):
            samples = _some(
                lambda info=info, t=training: info.module_inputs_func(
                    info, device="cpu", dtype=torch.float64, requires_grad=False, training=t
                ),
                most,
            )
            for number, sample in enumerate(samples):
                if sample.forward_input is None:
                    continue
                given = (sample.forward_input.args, sample.forward_input.kwargs)
                made = sample.constructor_input
                yield Case(
                    f"{info.name}[{number}]{'' if training else ' eval'}",
                    lambda c=info.module_cls, m=made, t=training: ModuleUnit(c(*m.args, **m.kwargs).double().train(t)),
                    (given,),
                )


def _some(make: Callable[[], Any], most: int) -> list[Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        return [sample for sample, _ in zip(make(), range(most), strict=False)]
    return []


def _trained(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and x.layout == torch.strided and x.is_floating_point()


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """PyTorch's lists import ``expecttest`` for the base class of its tests alone."""
    stand_in: Any = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
