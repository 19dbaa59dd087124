"""Programs of hand-written pure functions, in two forms: units marked with ``fs.unit``, and plain."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs

Tree = Any


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape) / math.sqrt(shape[-1])


def embed(p: Tree, tokens: Tensor) -> Tensor:
    """Rows of a table."""
    return F.embedding(tokens, p["table"])


def layer(p: Tree, x: Tensor) -> Tensor:
    """A residual perceptron."""
    return x + F.linear(torch.tanh(F.linear(x, p["inp"]["weight"], p["inp"]["bias"])), p["out"]["weight"])


def head(p: Tree, x: Tensor) -> Tensor:
    """Logits from the table of ``embed``, and a bias. Reads two subtrees."""
    return F.linear(x, p["embed"]["table"], p["last"]["bias"])


def language_params() -> dict[str, Tensor]:
    """The leaves of ``language``."""
    whole = {"embed.table": _normal(16, 8)}
    for i in range(3):
        whole[f"layers.{i}.inp.weight"] = _normal(11, 8)
        whole[f"layers.{i}.inp.bias"] = torch.zeros(11)
        whole[f"layers.{i}.out.weight"] = _normal(8, 11)
    whole["last.bias"] = torch.zeros(16)
    return whole


def language(params: Tree, batch: Any, units: Any) -> Tensor:
    """The loss of a token-wise language model with a tied table."""
    x = units.embed(params["embed"], batch["x"])
    for i in range(3):
        x = units.layer(params["layers"][str(i)], x)
    logits = units.head({"embed": params["embed"], "last": params["last"]}, x)
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def encode(p: Tree, x: Tensor, *, gain: float, noise: Tensor | None = None) -> dict[str, Any]:
    """Two hidden tensors and the index of the larger half, in a nested result with constants in it."""
    h = torch.tanh(F.linear(x, p["weight"], p["bias"])) * gain
    if noise is not None:
        h = h + noise
    low, high = h.chunk(2, 1)
    return {"parts": (low, high), "pick": (high.sum(1) > low.sum(1)).long(), "name": "encoded", "none": None}


def mix(p: Tree, parts: tuple[Tensor, Tensor], *, where: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One hidden tensor from two, chosen by an integer tensor, and an unused second result."""
    stacked = torch.stack(parts, 1)
    chosen = stacked[torch.arange(len(stacked)), where["pick"]]
    return F.linear(chosen, p["weight"]), [stacked.mean(1)]


def routed_params() -> dict[str, Tensor]:
    """The leaves of ``routed``."""
    return {
        "enc.weight": _normal(10, 6),
        "enc.bias": torch.zeros(10),
        "temperature": torch.tensor(1.5),
        "mix.0.weight": _normal(5, 5),
        "mix.1.weight": _normal(4, 5),
    }


def routed(params: Tree, batch: Any, units: Any) -> Tensor:
    """The loss of a program whose units pass pytrees, with code between them that reads a leaf of its own."""
    x = batch["x"]
    enc = units.encode(params["enc"], x, gain=0.9, noise=0.01 * x[:, :1])
    pick = 1 - enc["pick"]
    hidden, _ = units.mix(params["mix"]["0"], enc["parts"], where={"pick": pick})
    between = hidden * params["temperature"] + 1.0
    between.mul_(0.5)  # on a tensor of this code's own, so the program is still pure
    out, (extra,) = units.mix(params["mix"]["1"], (between, hidden), where={"pick": pick})
    return F.mse_loss(out, batch["y"]) + 0.1 * extra.square().mean()


PLAIN = SimpleNamespace(embed=embed, layer=layer, head=head, encode=encode, mix=mix)
MARKED = SimpleNamespace(**{name: fs.unit(function) for name, function in vars(PLAIN).items()})
