"""What the stages train: a GPT with attention and dropout, and its data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P


@dataclass(frozen=True)
class Size:
    """The sizes of a GPT and of its batch; ``attending`` is the dropout inside of attention."""

    depth: int = 3
    width: int = 128
    heads: int = 4
    tokens: int = 64
    batch: int = 8
    vocabulary: int = 256
    dropout: float = 0.0
    attending: float = 0.0


TINY = Size(depth=2, width=32, heads=2, tokens=8, batch=4, vocabulary=32)


class Block(nn.Module):
    """Attention and an MLP, with dropout in both."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads, self.dropout, self.attending = size.heads, size.dropout, size.attending
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.attending)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class GPT(nn.Module):
    """Tokens (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rows(size: Size, number: int, mesh: fs.Mesh) -> Tensor:
    """A rank's part of a batch: (batch / ranks, tokens + 1). Each token is the last one plus one."""
    generator = torch.Generator().manual_seed(number)
    first = torch.randint(size.vocabulary, (size.batch, 1), generator=generator)
    whole = (first + torch.arange(size.tokens + 1)) % size.vocabulary
    return whole.chunk(mesh.size)[mesh.rank].to(mesh.device)


@dataclass(frozen=True)
class Job:
    """A plan, a loss function and an update rule for a GPT; the weights are drawn on the CPU."""

    size: Size
    mesh: fs.Mesh
    plan: fs.Plan
    loss: Callable[[Any, Tensor], Tensor]
    opt: fs.optim.Optimizer
    params: Any

    def start(self) -> fs.TrainState:
        """The first state."""
        return fs.init_state(self.plan, self.opt, params=self.params)

    def step(self, **options: Any) -> Any:
        """A train step."""
        return fs.make_train_step(self.loss, self.opt, self.plan, **options)


def job(
    size: Size,
    mesh: fs.Mesh,
    opt: fs.optim.Optimizer | None = None,
    precision: fs.Precision | None = None,
    **kinds: Any,
) -> Job:
    """A GPT on a mesh; ``kinds`` are those of ``fs.Rule``."""
    torch.manual_seed(0)
    model = fs.split(GPT(size), units=("blocks.*",))
    axis = mesh.axis_names[0]
    plan = fs.make_plan(
        model, mesh, [fs.Rule(r".*", fs.fsdp(axis), **kinds)], batch=P(mesh.axis_names), precision=precision
    )

    def loss(params: Any, batch: Tensor) -> Tensor:
        logits = model.apply(params, batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    return Job(size, mesh, plan, loss, opt or fs.optim.adamw(1e-3), model.params)


def alone(device: torch.device) -> fs.Mesh:
    """A mesh of one rank on a device."""
    return fs.make_mesh((1,), ("data",), device=device)


def losses(made: Job, steps: int, **options: Any) -> tuple[list[float], list[float], fs.TrainState]:
    """The losses and norms of some steps, and the last state."""
    state, step, found, norms = made.start(), made.step(**options), [], []
    for number in range(steps):
        state, metrics = step(state, rows(made.size, number, made.mesh))
        found.append(metrics.loss.item())
        norms.append(metrics.grad_norm.item())
    return found, norms, state
