"""The model that the benchmarks train: a GPT as everybody writes it, and a batch for it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere


@dataclass(frozen=True)
class Size:
    """The sizes of a GPT and of its batch; ``batch`` is one rank's rows."""

    depth: int = 8
    width: int = 256
    heads: int = 4
    tokens: int = 128
    batch: int = 2
    vocabulary: int = 256


TINY = Size(depth=12, width=32, heads=2, tokens=16)
"""So small that the host's work for each unit is most of a step."""

SMALL = Size()
"""25 MB of float32 parameters."""


class Block(nn.Module):
    """Pre-norm attention and MLP: 12 leaves."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.place = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head reads: (batch, tokens, width)."""
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


def loss_of(logits: Tensor, rows: Tensor) -> Tensor:
    """The mean cross entropy of each next token."""
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def make(size: Size) -> GPT:
    """The model, with the same weights in every process."""
    torch.manual_seed(0)
    return GPT(size)


def rows(size: Size, number: int, rank: int = 0) -> Tensor:
    """A rank's part of a batch: (batch, tokens + 1)."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(size.vocabulary, (size.batch, size.tokens + 1), generator=generator)
