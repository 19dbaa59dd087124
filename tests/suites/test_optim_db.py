"""Classes of ``torch.optim`` and classes as people write them, under ``from_torch``: each right on 1, 2 and 4 ranks of
a mesh, or refused with the reason; PyTorch's own list of optimizers and their arguments, ``optim_db``."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.errors import PlanError
from tests.optim.own_rules import REFUSED, RIGHT, SecondStep, StateCounter

STEPS = 5
SHAPES = {"a.w": (6, 5), "a.b": (5,), "c.k": (3, 2, 2, 2), "d.s": ()}
NOT_ELEMENTWISE = {"LBFGS", "Adafactor", "Muon", "SparseAdam"}


def drawn(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A tensor for each leaf."""
    generator = torch.Generator().manual_seed(seed)
    return {
        path: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for path, shape in SHAPES.items()
    }


def by_class(
    cls: type[torch.optim.Optimizer], dtype: torch.dtype, rates: Sequence[float], **kwargs: Any
) -> list[Tensor]:
    """The parameters after updates by the class itself."""
    params = {path: torch.nn.Parameter(value) for path, value in drawn(0, dtype).items()}
    rule = cls(list(params.values()), lr=rates[0], **kwargs)
    for step, rate in enumerate(rates, start=1):
        rule.param_groups[0]["lr"] = rate
        for path, grad in drawn(step, dtype).items():
            params[path].grad = grad
        rule.step()
    return [param.detach() for param in params.values()]


def by_step(opt: fs.optim.Optimizer, dtype: torch.dtype, ranks: int, steps: int) -> dict[str, Tensor]:
    """The parameters after train steps with the same gradients on a mesh of so many ranks."""
    mesh = fs.virtual_mesh((ranks,), ("data",))
    params = fs.tree.nest(drawn(0, dtype))
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))])

    def loss(params: Any, grads: Any) -> Tensor:
        given = dict(fs.tree.paths(grads))
        return torch.stack([(leaf * given[path]).sum() for path, leaf in fs.tree.paths(params)]).sum()

    def main() -> dict[str, Tensor]:
        state = fs.init_state(plan, opt, params=params)
        step = fs.make_train_step(loss, opt, plan)
        for number in range(1, steps + 1):
            state, _ = step(state, fs.tree.nest(drawn(number, dtype)))
        return dict(fs.tree.paths(fs.unshard(state.params, plan)))

    return mesh.run(main)[0]


def check(cls: type[torch.optim.Optimizer], dtype: torch.dtype, ranks: Sequence[int], **kwargs: Any) -> bool:
    """Whether a class is right on these meshes; False if it is refused with a reason."""
    rates = [0.05, 0.02, 0.03, 0.05, 0.01][:STEPS]
    try:
        opt = fs.optim.from_torch(cls, lr=rates.__getitem__, **kwargs)
    except PlanError as error:
        assert "from_torch(" in str(error) and len(str(error)) > 80
        return False
    wanted = dict(zip(SHAPES, by_class(cls, dtype, rates, **kwargs), strict=True))
    for size in ranks:
        got = by_step(opt, dtype, size, STEPS)
        for path, want in wanted.items():
            torch.testing.assert_close(got[path], want, rtol=1e-5, atol=1e-6 if dtype == torch.float32 else 1e-9)
    return True


@pytest.mark.parametrize("cls", [StateCounter, SecondStep], ids=lambda cls: cls.__name__)
def test_a_class_as_people_write_them_is_right_on_two_ranks(cls: Any) -> None:
    assert check(cls, torch.float64, (2,))


@pytest.mark.slow
@pytest.mark.parametrize("cls", RIGHT, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_class_as_people_write_them_is_right(cls: Any, dtype: torch.dtype) -> None:
    assert check(cls, dtype, (1, 2, 4))


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_a_class_that_shards_cannot_run_is_refused(cls: Any) -> None:
    with pytest.raises(PlanError, match=REFUSED[cls]):
        fs.optim.from_torch(cls, lr=0.1)


def listed() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The classes and arguments of PyTorch's list."""
    common = pytest.importorskip("torch.testing._internal.common_optimizers")
    for info in common.optim_db:
        for number, given in enumerate(info.optim_inputs_func(device="cpu")):
            kwargs = {name: value for name, value in given.kwargs.items() if name != "lr"}
            if not any(isinstance(value, Tensor) for value in kwargs.values()):
                yield f"{info.optim_cls.__name__} {number} {given.desc}", info.optim_cls, kwargs


@pytest.mark.slow
def test_all_of_optim_db_is_right_or_refused() -> None:
    wrong, count = [], 0
    for name, cls, kwargs in listed():
        count += 1
        try:
            right = check(cls, torch.float64, (1, 2, 4), **kwargs)
        except Exception as error:
            wrong.append(f"{name} {kwargs}: {type(error).__name__}: {error}")
            continue
        if right != (cls.__name__ not in NOT_ELEMENTWISE):
            wrong.append(f"{name} {kwargs}: refused" if not right else f"{name}: taken")
    assert count > 50
    assert not wrong, "\n".join(wrong)
