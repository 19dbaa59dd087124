"""A small program that can be made to fail at any of its phases, and what is compared before and after."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import tree
from tests.shared.bad import weights

ROWS = 4
"""Rows of a rank's batch."""


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _raises(error: BaseException) -> Callable[[], None]:
    def go() -> None:
        raise error

    return go


KINDS: dict[str, Callable[[], None]] = {
    "ValueError": _raises(ValueError("it does not like this batch")),
    "MemoryError": _raises(MemoryError()),
    "OutOfMemoryError": _out_of_memory,
    "SystemExit": _raises(SystemExit(3)),
    "KeyboardInterrupt": lambda: signal.raise_signal(signal.SIGINT),
}


@dataclass
class Fault:
    """Something that goes wrong when the program comes to a phase, once it is armed."""

    phase: str = ""
    kind: str = "ValueError"

    def at(self, phase: str) -> None:
        """The program is at this phase."""
        if phase == self.phase:
            self.phase = ""
            KINDS[self.kind]()


class Trip(torch.autograd.Function):
    """The identity, whose backward is a phase."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault, phase: str) -> Tensor:
        """Hand on."""
        ctx.fault, ctx.phase = fault, phase
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Maybe fail."""
        ctx.fault.at(ctx.phase)
        return grad, None, None


PHASES = (
    *("forward first", "between", "forward middle", "forward last", "aux"),
    *("backward last", "backward middle", "backward first"),
)


def make_loss(fault: Fault, style: str = "") -> Callable[[Any, Any], Any]:
    """A loss of three units with dropout, which passes all of ``PHASES``.

    Args:
        fault: what it passes them to.
        style: ``"talk"`` communicates between units and in the backward; ``"look"`` reads a value, so that only a real
            step finds the program; ``"mean"`` returns an ``fs.Mean``.
    """

    @fs.unit
    def first(p: Any, x: Tensor) -> Tensor:
        fault.at("forward first")
        return F.dropout(torch.tanh(F.linear(x, p["w"], p["b"])), 0.2)

    @fs.unit
    def middle(p: Any, x: Tensor) -> Tensor:
        fault.at("forward middle")
        return torch.tanh(F.linear(x, p["w"]))

    @fs.unit
    def last(p: Any, x: Tensor) -> Tensor:
        fault.at("forward last")
        return F.linear(x, p["w"], p["b"])

    def talk(x: Tensor) -> Tensor:
        if style != "talk":
            return x
        mean = fs.collectives.pmean(x.mean(0), "shard")
        return x + 0.1 * mean

    def loss(params: Any, batch: Any) -> Any:
        x = talk(Trip.apply(first(params["first"], batch["x"]), fault, "backward first"))
        fault.at("between")
        x = talk(Trip.apply(middle(params["middle"], x), fault, "backward middle"))
        x = talk(Trip.apply(last(params["last"], x), fault, "backward last"))
        if style == "look" and x.sum().item() > 1e9:
            return x.sum()
        fault.at("aux")
        errors = (x - batch["y"]).square()
        total: Any = fs.Mean(errors.sum(), errors.numel()) if style == "mean" else errors.mean()
        return total, {"size": fs.Mean(x.detach().abs().sum(), x.numel())}

    return loss


def batch(step: int, rank: int) -> dict[str, Tensor]:
    """This rank's part of a global batch."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return {"x": torch.randn(ROWS, 6, generator=draw), "y": torch.randn(ROWS, 3, generator=draw)}


def start(mesh: fs.Mesh) -> tuple[fs.Plan, Any, Any]:
    """Plan, optimizer and state."""
    rules = [(r".*\.b", fs.P()), (r".*", fs.fsdp("shard"))]
    plan = fs.make_plan(weights(), mesh, rules, batch=fs.P(mesh.axis_names), units=("first", "middle", "last"))
    opt = fs.optim.adamw(0.05)
    return plan, opt, fs.init_state(plan, opt, params=weights())


def snapshot(state: Any) -> dict[str, Any]:
    """All of a rank's state, bit for bit, and its random generators."""
    flat = {path: leaf.clone() for path, leaf in tree.paths({"params": state.params, "opt": state.opt_state})}
    return {**flat, "step": state.step, "seed": state.seed, "rng": torch.get_rng_state()}


def differing(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """The names of what is not the same in two snapshots."""
    out = [name for name in one if name not in two]
    for name in two:
        a, b = one.get(name), two[name]
        if not (torch.equal(a, b) if isinstance(a, Tensor) else a == b):
            out.append(name)
    return out
