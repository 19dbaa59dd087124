"""Training a model of Hugging Face's on all ranks of a pool, and the same in plain PyTorch on the global batch."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import PlanError
from tests.outside.hf_models import CASES, Batch, Case
from tests.shared import parity
from tests.shared.parity import Run
from tests.shared.zoo import cut

STEPS = 5
RATE = 0.05


@dataclass(frozen=True)
class Outcome:
    """What became of a model.

    Attributes:
        found: by a rank.
        wanted: the same in one plain process.
        gap: the largest difference of any parameter after the last step.
        foreseen: whether the program was found before the first step; else that one gathered on demand.
        names: of the units.
        units: for each unit how it ran; empty without ``compile``.
    """

    found: Run
    wanted: Run
    gap: float
    foreseen: bool
    names: list[str]
    units: dict[str, str]

    @property
    def problems(self) -> list[str]:
        """Where this is not what one process does, or not what the schedule said."""
        return self.differences + self.found.problems

    @property
    def differences(self) -> list[str]:
        """Where this is not what one process does."""
        far = [f"loss of step {i}: {a}, plain {b}" for i, (a, b) in self._pairs() if not abs(a - b) <= 1e-5]
        return far if self.gap <= 1e-5 else [*far, f"parameters differ by {self.gap:.1e}"]

    @property
    def loss_gap(self) -> float:
        """The largest difference of a loss."""
        return max(abs(a - b) for _, (a, b) in self._pairs())

    def _pairs(self) -> Iterator[tuple[int, tuple[float, float]]]:
        return enumerate(zip(self.found.losses, self.wanted.losses, strict=True))


def run(name: str, compile: str | None = None, **options: Any) -> Outcome:
    """On each rank: a case of ``hf_models``, sharded and plain.

    Args:
        name: of the case.
        compile: as for ``fs.make_train_step``; the model is called without a cache then.
        options: for ``fs.make_train_step``.
    """
    case = CASES[name]
    module = case.build()
    extra = {"use_cache": False} if compile and case.cached else {}
    batches = [{**case.at(step), **extra} for step in range(STEPS)]
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        return _compare(case, module, batches, mesh, compile, options)


def _compare(
    case: Case, module: nn.Module, batches: list[Batch], mesh: fs.Mesh, compile: str | None, options: dict[str, Any]
) -> Outcome:
    model = fs.split(module, units=case.units)
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    opt = fs.optim.sgd(RATE)
    state = fs.init_state(plan, opt, params=tree.map(torch.clone, model.params))
    step = fs.make_train_step(_objective(case, model.apply), opt, plan, compile=compile, debug=True, **options)
    early = foreseen(step, cut(batches[0], mesh.rank, mesh.size))
    parts = (cut(batch, mesh.rank, mesh.size) for batch in batches)
    found, _ = parity.sharded(step, state, plan, parts, scheduled_from=0 if early else 1)
    wanted = _plain(case, copy.deepcopy(module), batches)
    gap = max((found.params[path] - leaf).abs().max().item() for path, leaf in wanted.params.items())
    units = dict(line.split(": ", 1) for line in str(step.units).splitlines()) if compile else {}
    return Outcome(found, wanted, gap, early, list(model.units), units)


def foreseen(step: Any, batch: Batch) -> bool:
    """Whether the program is found on fake tensors; else its first step gathers on demand."""
    try:
        step.trace(batch)
    except PlanError as error:
        assert "depends on values" in str(error)
        return False
    return True


def _objective(case: Case, apply: Callable[..., Any]) -> Callable[[Any, Batch], Tensor]:
    return lambda params, batch: case.loss(apply(params, **batch))


def _plain(case: Case, module: nn.Module, batches: list[Batch]) -> Run:
    rule = torch.optim.SGD(module.parameters(), lr=RATE)
    leaves = dict(module.named_parameters())
    return parity.plain(leaves, rule, lambda step: parity.backward(case.loss(module(**batches[step]))), len(batches))
