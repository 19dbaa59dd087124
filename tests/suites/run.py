"""One case of PyTorch's lists: a step on a virtual mesh of two ranks, against one plain process."""

import copy
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import ShardError
from tests.suites.databases import Case


class Outcome(NamedTuple):
    """How a case went: ``right``, ``refused``, ``raw`` or ``wrong``; ``no`` where plain PyTorch fails, too."""

    name: str
    verdict: str
    said: str = ""


class Net(nn.Module):
    """A model of one unit."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, *args: Any) -> Tensor:
        """The unit's result."""
        out: Tensor = self.unit(*args)
        return out


def outcome(case: Case, compiled: str | None) -> Outcome:
    """Run a case."""
    name = f"{case.name}{' fx' if compiled else ''}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.manual_seed(0)
            net = Net(case.make())
            wanted, other = _plain(net, case.args, 1), _plain(net, case.args, 2)
        except Exception as error:
            return Outcome(name, "no", f"{type(error).__name__}: {error}")
        try:
            found = _sharded(net, case.args, compiled)
        except ShardError as error:
            return Outcome(name, "refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            return Outcome(name, "raw", f"{type(error).__name__}: {error}")
    if not _same(wanted, other):  # it draws random numbers, or reads memory that nobody wrote
        return Outcome(name, "right", "any value")
    return Outcome(name, "right") if _same(found, wanted) else Outcome(name, "wrong", f"{found} {wanted}"[:300])


def _plain(net: Net, args: Any, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    used = copy.deepcopy(net)
    loss = used(*args)
    grads = torch.autograd.grad(loss, list(used.parameters()), allow_unused=True)
    moved = [p if g is None else p - 0.1 * g for p, g in zip(used.parameters(), grads, strict=True)]
    return [loss.detach(), *[p.detach() for p in moved]]


def _sharded(net: Net, args: Any, compiled: str | None) -> list[Tensor]:
    model, mesh = fs.split(net, ["unit"]), fs.virtual_mesh((2,), ("data",))
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))])
    opt = fs.optim.sgd(0.1)
    paths = [path for path, _ in net.named_parameters()]

    def loss_fn(params: Any, batch: Any) -> Tensor:
        out: Tensor = model.apply(params, *args, buffers=model.buffers)[0]
        return out

    def main() -> list[Tensor]:
        state = fs.init_state(plan, opt, params=model.params)
        step = fs.make_train_step(loss_fn, opt, plan, compile=compiled)
        after, metrics = step(state, torch.ones(2))
        whole = dict(tree.paths(fs.unshard(after.params, plan)))
        return [metrics.loss, *[whole[path] for path in paths]]

    return mesh.run(main)[0]


def _same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
        for a, b in zip(found, wanted, strict=True)
    )
