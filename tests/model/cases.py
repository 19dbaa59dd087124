"""Modules to split, an engine that records, and comparisons; shared by the tests of the model room."""

from typing import Any

import torch
from torch import Tensor, nn

from fshard import tree
from fshard.model import Slot, Unit, attach


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores + mask
        return self.proj(scores.softmax(-1) @ v)


class Block(nn.Module):
    """Returns a tuple, as the blocks of Hugging Face models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.attn(self.norm(x), mask=mask)
        return x + self.gain * y, {"norm": y.norm()}


class Net(nn.Module):
    """Direct parameters, a tied head, code that indexes, tests and reads into its blocks."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 1.5))
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids) * self.scale
        norms = []
        for block in self.blocks:
            assert isinstance(block, Block)
            x, aux = block(x, mask=mask)
            norms.append(aux["norm"])
        x = x + self.blocks[0].attn.qkv.weight.mean() + self.blocks[-1].gain.sum()
        return {"logits": self.head(x), "norms": torch.stack(norms)}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Recorder:
    """An engine that notes the calls it gets and runs them as they are."""

    def __init__(self) -> None:
        self.calls: list[tuple[Unit, tuple[str, ...]]] = []

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((unit, tuple(path for path, _ in tree.paths(params))))
        plain = tree.map(lambda leaf: leaf.detach(), params)
        return unit.fn(plain, *args, **kwargs)

    def mark(self, params: dict[str, Any]) -> dict[str, Any]:
        marked = {path: leaf.detach() for path, leaf in tree.paths(params)}
        for path, leaf in marked.items():
            attach(leaf, Slot(self, path))
        return tree.nest(marked)


def flat(nested: dict[str, Any]) -> dict[str, Any]:
    return dict(tree.paths(nested))


def equal(a: Any, b: Any) -> None:
    one, spec = tree.flatten(a)
    two, other = tree.flatten(b)
    assert spec == other
    for x, y in zip(one, two, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


IDS = torch.tensor([[1, 2, 3], [4, 5, 10]])
