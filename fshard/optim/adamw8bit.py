"""AdamW whose moments take a byte an element each."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fshard.optim import checks
from fshard.optim.base import Rate, State, States, Tensors, Unfused
from fshard.optim.decay import Decay, Decaying
from fshard.optim.form import Form, Grain, zeros
from fshard.torch_internals import disable_current_modes

DECADES = 7
"""Powers of ten that codes span."""

ZERO = 127
"""The code of zero, of those with a sign."""

PIECES = {"cpu": 1 << 16, "other": 1 << 22}
"""Elements that are updated at once, which bounds what an update takes for itself: few enough for the caches of a
processor, and enough that other devices are busy for longer than it takes to tell them."""


@dataclass(frozen=True)
class adamw8bit(Decaying, Unfused):  # noqa: N801 - reads as the function it is in a train script
    """AdamW with moments of 8 bits (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022).

    Each block of elements has a float32 scale, its largest magnitude, and each element one of 256 codes, which span
    seven decades below that. Blocks count from the start of a leaf, so they do not depend on the mesh, if shards are
    cut between them: give rules ``align=256``, or replicate. The root of the second moment is kept in its place: it
    spans half as many decades. The arithmetic is in float32.

    Args:
        lr: the learning rate, >= 0, or a function of the step.
        betas: the decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment, above 0.
        weight_decay: the fraction of a parameter that an update of learning rate 1 takes away, >= 0.
        decay: which leaves decay: ``None`` for all, a regex over whole paths, a function of path and shape.
        block: elements with one scale; a multiple of 64. The rules' ``align=`` must be a multiple of it.

    Raises:
        PlanError: arguments out of range. From ``fs.init_state``: leaves that may be cut inside of a block.

    >>> {name: (form.dtype, form.block) for name, form in fs.optim.adamw8bit(1e-3).forms(0.0).items()}["exp_avg_scale"]
    (torch.float32, 256)
    """

    lr: Rate
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay: Decay = None
    block: int = 256

    def __post_init__(self) -> None:
        wrong = not isinstance(self.block, int) or self.block < 64 or self.block % 64
        more = [f"block = {self.block!r}: must be a multiple of 64"] if wrong else []
        checks.require(self, *more, lr=checks.rate, betas=checks.betas, eps="(0, inf)", **checks.DECAYING)

    def init(self, param: Tensor, hyper: Any = None) -> State:
        """Both moments, zero, with the codes of zero: padding keeps these, whatever scale its block gets."""
        state = zeros(self.forms(hyper), param)
        state["exp_avg_code"].fill_(ZERO)
        return state

    def forms(self, hyper: Any) -> dict[str, Form]:
        """A code for each element and a scale for each block, of the first moment and of the second's root."""
        code, scale = Form(dtype=torch.uint8), Form(dtype=torch.float32, block=self.block)
        return {"exp_avg_code": code, "exp_avg_scale": scale, "exp_root_code": code, "exp_root_scale": scale}

    def grain(self, hyper: Any) -> Grain:
        """Whole blocks."""
        return self.block

    def _update(self, params: Tensors, grads: Tensors, states: States, step: int, lr: float, hyper: float) -> None:
        piece = max(PIECES["cpu" if params[0].device.type == "cpu" else "other"] // self.block, 1)
        for param, grad, state in zip(params, grads, states, strict=True):
            for first in range(0, -(-len(param) // self.block), piece):
                blocks = slice(first, first + piece)
                elements = slice(first * self.block, (first + piece) * self.block)
                part = {name: x[blocks if name.endswith("scale") else elements] for name, x in state.items()}
                self._piece(param[elements], grad[elements], part, step, lr, hyper)

    def _piece(self, param: Tensor, grad: Tensor, state: State, step: int, lr: float, decay: float) -> None:
        """Update some blocks. Whole ones, so that every element takes one way through vector kernels on every rank."""
        tables = _table(True, param.device), _table(False, param.device)
        (b1, b2), wide = self.betas, torch.promote_types(param.dtype, torch.float32)
        g = self._blocks(grad.float())
        first = _read(self._blocks(state["exp_avg_code"], ZERO), state["exp_avg_scale"], tables[0]).lerp_(g, 1 - b1)
        root = _read(self._blocks(state["exp_root_code"]), state["exp_root_scale"], tables[1])
        root = root.square_().mul_(b2).add_(g.square().mul_(1 - b2)).sqrt_()
        divisor = (root / (1 - b2**step) ** 0.5).add_(self.eps)
        p = self._blocks(param.to(wide)).mul_(1 - lr * decay).sub_((first / divisor).mul_(lr / (1 - b1**step)))
        param.copy_(p.view(-1)[: len(param)])
        del p, g, divisor
        _write(first, state["exp_avg_code"], state["exp_avg_scale"], tables[0], ZERO)
        _write(root, state["exp_root_code"], state["exp_root_scale"], tables[1], 0)

    def _blocks(self, x: Tensor, filler: int = 0) -> Tensor:
        """A vector as rows of one block each, the last one filled up."""
        return F.pad(x, (0, -len(x) % self.block), value=filler).view(-1, self.block)


def _codes(signed: bool) -> Tensor:
    """The 256 values of codes, ascending, in [-1, 1] or [0, 1]: each decade has twice as many as the one below it.

    >>> _codes(True).shape, _codes(False).unique().numel(), 0.0 in _codes(True)
    (torch.Size([256]), 256, True)
    """
    positive = []
    for decade in range(DECADES):
        count = 2 ** (decade + (0 if signed else 1)) + 1
        edges = torch.linspace(0.1, 1.0, count, dtype=torch.float64, device="cpu")
        positive.append((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade + 1 - DECADES))
    half = torch.cat(positive)
    parts = [half, torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")] + ([-half] if signed else [])
    return torch.cat(parts).sort().values.float()


@functools.cache
def _table(signed: bool, device: torch.device) -> Tensor:
    """The values on a device, copied there once: an update must not wait for the device."""
    with disable_current_modes():
        return _codes(signed).to(device)


def _read(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Rows of codes as float32."""
    return table[codes.int()] * scales[:, None]


def _write(rows: Tensor, codes: Tensor, scales: Tensor, table: Tensor, zero: int) -> None:
    """Rows of float32 as codes and scales. Tiny values get the smallest code of their sign, never that of zero."""
    largest = rows.abs().amax(1)
    scales.copy_(largest)
    relative = rows / torch.where(largest > 0, largest, 1.0)[:, None]
    found = torch.bucketize(relative, (table[1:] + table[:-1]) / 2)
    away = torch.where((found == zero) & (relative != 0), relative.sign().to(found.dtype), 0)
    codes.copy_((found + away).view(-1)[: len(codes)])
