"""The models of ``auto.py``: a GPT, an MLP of unequal layers, an encoder and a decoder; each with a batch."""

from collections.abc import Callable
from typing import Any

import torch
from model import Size, loss_of, make, rows
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

import fshard as fs

GPT = Size(depth=6, width=160, heads=4, tokens=64, batch=4)
WIDTHS = (96, 512, 256, 1024, 128, 768, 96)
WIDTH, WORDS, LENGTH, ROWS = 128, 300, 32, 4


class Odd(nn.Module):
    """Layers of which no two are alike."""

    def __init__(self) -> None:
        super().__init__()
        pairs = zip(WIDTHS, WIDTHS[1:], strict=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b)) for a, b in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class Translator(nn.Module):
    """An encoder and a decoder with one table of words."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        own = {"nhead": 4, "dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, **own) for _ in range(depth))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, **own) for _ in range(depth))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.words(source), self.words(target)
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x)
        return y @ self.words.weight.t()


def build(name: str, times: int = 1) -> tuple[Any, Callable[..., Tensor], Callable[[int, int], Any]]:
    """The split model, its loss, and what gives a rank's batch of ``times`` microbatches."""
    torch.manual_seed(0)
    if name == "gpt":
        model = fs.split(make(GPT), units=("blocks.*",))
        size = Size(**{**vars(GPT), "batch": GPT.batch * times})
        return model, lambda params, x: loss_of(model.apply(params, x[:, :-1]), x), lambda n, r: rows(size, n, r)
    if name == "odd":
        model = fs.split(Odd(), units=("layers.*",))

        def inputs(number: int, rank: int) -> Tensor:
            return torch.randn(64 * times, WIDTHS[0], generator=torch.Generator().manual_seed(1000 * number + rank))

        return model, lambda params, x: (model.apply(params, x) - x).square().mean(), inputs
    model = fs.split(Translator(), units=("encoder.*", "decoder.*"))

    def pairs(number: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        return torch.randint(WORDS, (ROWS * times, 2, LENGTH), generator=generator)

    def loss(params: Any, words: Tensor) -> Tensor:
        source, target = words[:, 0], words[:, 1]
        return F.cross_entropy(model.apply(params, source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())

    return model, loss, pairs


MODELS = ("gpt", "odd", "translator")
