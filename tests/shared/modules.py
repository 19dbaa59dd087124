"""The modules of the examples."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Attention(nn.Module):
    """Attention of two heads. No biases: a key's has no gradient, and Adam would step by its rounding."""

    def __init__(self, width: int, causal: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.causal = causal

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            t.view(rows, -1, 2, width // 2).transpose(1, 2) for t in (self.query(x), *self.keys(memory).chunk(2, -1))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    """A transformer block; with ``cross`` it attends to a memory too."""

    def __init__(self, width: int, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, causal)
        self.cross = Attention(width) if cross else None
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        h = self.norm1(x)
        x = x + self.attn(h, h)
        if self.cross is not None and memory is not None:
            x = x + self.cross(x, memory)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A causal language model whose head is its embedding."""

    def __init__(self, vocab: int = 64, width: int = 32, length: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.tok.weight, std=0.1)
        self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class OddMLP(nn.Module):
    """Sizes that nothing divides, a 0-dim leaf, and leaves of one and two elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.zeros(1))
        self.pair = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.tanh(self.norm(self.first(x)))) * self.scale + self.shift
        return torch.cat([y[:, :2] * self.pair, y[:, 2:]], 1)


class UNet(nn.Module):
    """Units whose outputs skip over other units."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(10, 8), nn.Linear(8, 6)])
        self.mid = nn.Linear(6, 6)
        self.up = nn.ModuleList([nn.Linear(12, 8), nn.Linear(16, 4)])

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.down[0](x))
        b = torch.tanh(self.down[1](a))
        c = torch.tanh(self.mid(b))
        d = torch.tanh(self.up[0](torch.cat([b, c], 1)))
        y: Tensor = self.up[1](torch.cat([a, d], 1))
        return y


class Translator(nn.Module):
    """An encoder-decoder: the encoder's output is read by each decoder unit."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(20, 16), nn.Embedding(20, 16)
        self.encoder = nn.ModuleList(Block(16) for _ in range(2))
        self.decoder = nn.ModuleList(Block(16, causal=True, cross=True) for _ in range(2))
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        memory, x = self.source(tokens), self.target(tokens.flip(1))
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory=memory)
        logits: Tensor = self.head(x)
        return logits


class Twice(nn.Module):
    """A unit that is called twice, with other units between."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.shared, self.between, self.out = (nn.Linear(*s) for s in ((6, 9), (9, 9), (9, 9), (9, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(self.inp(x)))
        x = torch.tanh(self.shared(torch.tanh(self.between(x))))
        y: Tensor = self.out(x)
        return y


class Skipping(nn.Module):
    """A unit that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.extra, self.mid, self.out = (nn.Linear(*s) for s in ((6, 9), (9, 9), (9, 9), (9, 3)))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = torch.tanh(self.inp(x))
        if extra:
            x = x + torch.tanh(self.extra(x))
        y: Tensor = self.out(torch.tanh(self.mid(x)))
        return y


class Masked(nn.Module):
    """A token-wise classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(18, 12)
        self.layers = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)])
        self.head = nn.Linear(12, 18)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits: Tensor = self.head(x)
        return logits


class ConvNet(nn.Module):
    """Convolutions with group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = x + stage(x)
        y: Tensor = self.head(x.mean((2, 3)))
        return y


class Adapter(nn.Module):
    """A base and a low-rank addition."""

    def __init__(self, base: nn.Module, low: nn.Module) -> None:
        super().__init__()
        self.base, self.a, self.b = base, low["a"], low["b"]  # type: ignore[index]  # a ModuleDict

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


class Adapted(nn.Module):
    """A frozen base with trained low-rank additions; one unit is frozen altogether."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.low = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(12, 2), "b": nn.Linear(2, 12)}) for _ in range(2))
        self.layers = nn.ModuleList(Adapter(b, a) for b, a in zip(self.base[:2], self.low, strict=True))
        self.frozen, self.out = nn.Linear(12, 12), nn.Linear(12, 4)
        del self.base, self.low
        for name, leaf in self.named_parameters():
            leaf.requires_grad_(".base." not in name and not name.startswith("frozen"))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        x = torch.tanh(self.layers[1](torch.tanh(self.frozen(x))))
        y: Tensor = self.out(x)
        return y
