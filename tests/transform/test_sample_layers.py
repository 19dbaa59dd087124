"""Layers of torch.nn in gradients of single samples: each is right, or refused by name."""

import re
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.errors import TransformError
from fshard.transform import samples
from tests.transform.test_ghost_norms import wrong


class Heads(nn.Module):
    """Attention to what came before, with a mask and without one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = (nn.MultiheadAttention(6, 2, batch_first=True, **options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """The output of both."""
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        x = x + self.first(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x + self.second(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


class Bias(nn.Module):
    """A bias, which is added."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(shape))

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        return x.tanh() + self.bias


class Twice(nn.Module):
    """A module of two inputs, which is given one twice; its first result."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """The result."""
        out = self.inner(x, x)
        return out if isinstance(out, Tensor) else out[0]


class First(Twice):
    """The first result of a module of one input."""

    def forward(self, x: Tensor) -> Tensor:
        """The result."""
        out: Tensor = self.inner(x)[0]
        return out


class Saved(Twice):
    """A module whose activations are computed again by PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        """The result."""
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def bag(mode: str) -> Any:
    """A bag of embeddings."""
    return lambda: nn.Sequential(nn.EmbeddingBag(7, 6, mode=mode))


IMAGES, TEXTS, ROW = (5, 6, 8, 8), (5, 4, 6), (5, 6)
MODULES: dict[str, tuple[Any, Any]] = {
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), TEXTS),
    "heads": (lambda: Heads(), TEXTS),
    "in place": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), TEXTS),
    "norms": (lambda: nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 3), nn.LayerNorm((4, 3), bias=False)), TEXTS),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.Conv2d(6, 4, 3)), IMAGES),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm2d(6, affine=True), nn.Conv2d(6, 4, 3, groups=2)), IMAGES),
    "transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(6, 4, 3)), IMAGES),
    "convolution in 3d": (lambda: nn.Sequential(nn.Conv3d(1, 2, 2)), (3, 1, 4, 4, 4)),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(6)), ROW),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv1d(6, 4, 3, stride=2), nn.Conv1d(4, 4, 3, padding="same")),
        (5, 6, 9),
    ),
    "reflected": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect")), IMAGES),
    "norm over two dims": (lambda: nn.Sequential(nn.LayerNorm((4, 6)), nn.RMSNorm((4, 6))), TEXTS),
    "heads with biases": (lambda: Heads(add_bias_kv=True, add_zero_attn=True), TEXTS),
    "sequence bias": (lambda: Bias((1, 1, 6)), TEXTS),
    "bias of no dims": (lambda: nn.Sequential(nn.Linear(6, 3), Bias(())), TEXTS),
    "bilinear": (lambda: Twice(nn.Bilinear(6, 6, 3)), ROW),
    "decoder": (lambda: Twice(nn.TransformerDecoderLayer(6, 2, 8, dropout=0.0, batch_first=True)), TEXTS),
    "cells": (lambda: nn.Sequential(nn.RNNCell(6, 5), nn.GRUCell(5, 3)), ROW),
    **{f"bag of {mode}": (bag(mode), (5, 4)) for mode in ("sum", "mean", "max")},
    "by frequency": (lambda: nn.Sequential(nn.Embedding(7, 6, scale_grad_by_freq=True)), (5, 8)),
    "one embedding": (lambda: nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 3)), (5,)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), TEXTS),
}


def values_for(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """A batch: indices if a module looks them up."""
    reads = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in module.modules())
    return torch.randint(7, shape) if reads else torch.randn(shape).double()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODULES)
def test_layers_of_torch(name: str) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make().double()
    model = fs.split(module, units=("*",) if isinstance(module, nn.Sequential) else ())
    batch = values_for(module, shape)

    def loss(p: Any, x: Tensor) -> Any:
        return model.apply(p, x).square().mean()

    assert not wrong(model, loss, batch, microbatches=(None,))


LOOP = "has no form.*loop over positions"
LINEARS = nn.Linear(6, 3), nn.Dropout(0.5)
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "rnn": (lambda: First(nn.RNN(6, 5)), TEXTS, f"rnn_tanh {LOOP}"),
    "gru": (lambda: First(nn.GRU(6, 5)), TEXTS, f"gru {LOOP}"),
    "lstm": (lambda: First(nn.LSTM(6, 5)), TEXTS, f"weight_ih_l0 and 3 more leaves, lstm {LOOP}"),
    "cell": (lambda: First(nn.LSTMCell(6, 5)), ROW, f"lstm_cell {LOOP}"),
    "largest norm": (lambda: nn.Embedding(7, 6, max_norm=1.0), (5, 4), "on 0.weight, embedding with max_norm=.*clamp"),
    "of a bag": (lambda: nn.EmbeddingBag(7, 6, max_norm=1.0), (5, 4), "on 0.weight, embedding_bag with max.*clamp"),
    "checkpoint": (lambda: Saved(nn.Linear(6, 3)), TEXTS, "on 0.inner.weight and 1 more leaves, linear runs.*fs.remat"),
    "dropout": (lambda: nn.Sequential(*LINEARS), TEXTS, r"dropout draws from torch's generator.*fs\.random"),
}


def told(name: str, outside: bool) -> list[str]:
    """On a rank: what tools say of a layer that they cannot run, before anything is gathered."""
    make, shape, _ = REFUSED[name]
    torch.manual_seed(0)
    found, module = [], nn.Sequential(make(), Bias(())).double()
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        model = fs.split(module, units=() if outside else ("*",))
        plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))])
        params, batch = fs.shard(model.params, plan), values_for(module, shape)

        def loss(p: Any, x: Tensor) -> Any:
            return model.apply(p, x).square().mean()

        for how in (None, "fx"):
            for tool in (
                fs.func.per_sample_grad(loss, plan, compile=how),
                fs.func.clipped_grad(loss, plan, 1.0, compile=how),
            ):
                with pytest.raises(TransformError) as error:
                    tool(params, batch)
                found.append(str(error.value))
    return found


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_have_no_form_for_samples_are_refused_before_anything_is_gathered(name: str, outside: bool) -> None:
    with patch.object(samples, "gather_all", None), patch.object(samples, "gather_some", None):
        first, second = fs.virtual_mesh((2,), ("any",)).run(told, name, outside)
    assert first == second and len({*first}) == 1
    where = "" if outside else "in unit 0, "
    assert re.search(f"^{where}(?!in unit).*{REFUSED[name][2]}", first[0])


def by_backward(model: Any, p: Any, x: Tensor) -> Tensor:
    """A loss that runs a backward of its own."""
    model.apply(p, x).sum().backward()
    out: Tensor = model.apply(p, x).sum()
    return out


def marked(model: Any, p: Any, x: Tensor) -> Tensor:
    """A loss of the input's derivative by plain autograd."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model.apply(p, x).sum(), x, create_graph=True)[0].square().mean()


def decided(model: Any, p: Any, x: Tensor) -> Tensor:
    """A loss that decides by values."""
    out: Tensor = model.apply(p, x).sum()
    return out if x.sum() > 0 else -out


PLAIN = [(by_backward, "torch.func.grad"), (marked, "torch.func.grad"), (decided, "torch.where")]


@pytest.mark.parametrize(("loss", "remedy"), PLAIN)
def test_derivatives_and_decisions_of_plain_pytorch_are_refused(loss: Any, remedy: str) -> None:
    model = fs.split(nn.Sequential(nn.Linear(6, 3)), units=("*",))
    plan = fs.make_plan(model, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    tool = fs.func.clipped_grad(lambda p, x: loss(model, p, x), plan, 1.0)
    with pytest.raises(TransformError, match=f"^(requires_grad_|backward|__bool__) .*{remedy}"):
        tool(fs.shard(model.params, plan), torch.ones(4, 6))


def test_a_table_by_frequency_warns_of_nothing() -> None:
    """Each sample counts its own rows, on any number of ranks."""

    def on_rank() -> list[str]:
        with fs.make_mesh((-1,), ("shard",)) as mesh, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = fs.split(nn.Sequential(nn.Embedding(7, 6, scale_grad_by_freq=True)), units=("*",))
            plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))])
            tool = fs.func.clipped_grad(lambda p, x: model.apply(p, x).sum(), plan, 1.0)
            tool(fs.shard(model.params, plan), torch.zeros(2, 3, dtype=torch.int64))
        return [text for each in caught if "freq" in (text := str(each.message))]

    assert fs.virtual_mesh((2,), ("any",)).run(on_rank) == [[], []]
