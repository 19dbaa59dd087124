"""Modules for sequences, as people write them: each is called with parts of a batch by name and returns its loss."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

from tests.outside.case import VOCAB


class Experts(nn.Module):
    """A router and experts; the balance loss of a call is left behind as an attribute."""

    aux: Tensor

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) / 6)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        """Two experts a token, all of them computed, those that were not chosen with weight 0."""
        odds = self.router(x).softmax(-1)
        top, which = odds.topk(2, -1)
        weights = torch.zeros_like(odds).scatter(-1, which, top / top.sum(-1, keepdim=True))
        share = F.one_hot(which, odds.shape[-1]).sum(-2).to(odds.dtype).mean((0, 1))
        self.aux = odds.shape[-1] * (share * odds.mean((0, 1))).sum()
        every = torch.einsum("bld,edh->bleh", x, self.up)
        return torch.einsum("bleh,ehd,ble->bld", F.gelu(every), self.down, weights)


class ExpertBlock(nn.Module):
    """Mixing along the sequence, and experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.experts = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        """With residuals."""
        past = torch.cumsum(self.mix(self.norm(x)), 1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + past
        return x + self.experts(x)


class AuxExperts(nn.Module):
    """A language model that adds up the balance losses that its blocks left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(ExpertBlock(16) for _ in range(3))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, words: Tensor) -> Tensor:
        """Cross entropy of the next word, and a tenth of the balance losses."""
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        return loss + 0.1 * sum(block.experts.aux for block in self.blocks)


class RecurrentSpeller(nn.Module):
    """An LSTM that reads both ways over packed rows, and a GRU that writes, with attention; the table is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12, padding_idx=0)
        self.reader = nn.LSTM(12, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.writer = nn.ModuleList([nn.GRU(12, 16, batch_first=True), nn.GRU(16, 16, batch_first=True)])
        self.bridge = nn.Linear(16, 16)
        self.out = nn.Linear(32, 12)
        self.head = nn.Linear(12, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of what is written."""
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        read, (last, _) = self.reader(packed)
        memory, _ = nn.utils.rnn.pad_packed_sequence(read, batch_first=True, total_length=words.shape[1])
        state = torch.tanh(self.bridge(torch.cat([last[-2], last[-1]], -1)))[None]
        x = self.embed(targets[:, :-1])
        for layer in self.writer:
            x, _ = layer(x, state)
        seen = (x @ memory.mT).softmax(-1) @ memory
        return F.cross_entropy(self.head(self.out(torch.cat([x, seen], -1))).flatten(0, 1), targets[:, 1:].flatten())


class StateSpace(nn.Module):
    """A diagonal state space (S4D): a long convolution whose kernel is a sum of complex exponentials."""

    def __init__(self, width: int, size: int = 4) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.full((width,), -2.0))
        self.real = nn.Parameter(torch.full((width, size), -0.7))
        self.imaginary = nn.Parameter(math.pi * torch.arange(size).expand(width, size).clone())
        self.mix = nn.Parameter(torch.randn(width, size, 2) / 2)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve along the sequence, and gate."""
        length = x.shape[1]
        rates = torch.complex(-self.real.exp(), self.imaginary) * self.step.exp()[:, None]
        powers = torch.exp(rates[..., None] * torch.arange(length))
        scaled = torch.view_as_complex(self.mix) * (torch.exp(rates) - 1) / rates
        kernel = 2 * torch.einsum("dn,dnl->dl", scaled, powers).real
        waves = torch.fft.rfft(self.norm(x).mT, 2 * length) * torch.fft.rfft(kernel, 2 * length)
        return x + F.glu(self.out(F.gelu(torch.fft.irfft(waves, 2 * length)[..., :length].mT)))


class StateSpaceClassifier(nn.Module):
    """State spaces in a row, over a series."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(2, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(StateSpace(8) for _ in range(3))

    def forward(self, series: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of the class of each series."""
        x = self.enter(series)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


class GatedConvolution(nn.Module):
    """A causal convolution with a gate, its weights held as length and direction by a hook of the old kind."""

    def __init__(self, width: int, dilation: int, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.dilation = dilation
        self.wide = norm(nn.Conv1d(width, 2 * width, 2, dilation=dilation))
        self.out = norm(nn.Conv1d(width, 2 * width, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What goes on, and what is added up in the end."""
        a, b = self.wide(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        on, aside = self.out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
        return x + on, aside


class WaveNet(nn.Module):
    """Dilated causal convolutions over a wave, with weight normalization of the old kind and of the new."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, 8, 1)
        old: Callable[[nn.Module], nn.Module] = nn.utils.weight_norm
        self.layers = nn.ModuleList(
            GatedConvolution(8, 2**i, old if i % 2 else parametrizations.weight_norm) for i in range(4)
        )
        self.leave = nn.Conv1d(8, 16, 1)

    def forward(self, wave: Tensor, levels: Tensor) -> Tensor:
        """Cross entropy of the next level."""
        x, total = self.enter(wave[:, None]), torch.zeros(())
        for layer in self.layers:
            x, aside = layer(x)
            total = total + aside
        return F.cross_entropy(self.leave(F.relu(total))[..., :-1], levels[:, 1:])


class Tower(nn.Module):
    """Stages of layers of a transformer, some of which a list of the batch leaves out."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )

    def forward(self, x: Tensor, kept: list[bool]) -> Tensor:
        """Through the layers that are kept."""
        for layer, here in zip(self.layers, kept, strict=True):
            x = layer(x) if here else x
        return x


class TwoTowers(nn.Module):
    """Retrieval: questions and answers through towers that share some layers, in-batch negatives, dropped layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.shared, self.left, self.right = Tower(16, 1), Tower(16, 3), Tower(16, 2)
        self.heat = nn.Parameter(torch.tensor(1.5))

    def forward(self, questions: Tensor, answers: Tensor, kept: dict[str, list[bool]]) -> Tensor:
        """Cross entropy of each question's answer among the answers at hand."""
        left = self.left(self.shared(self.embed(questions), [True]), kept["left"]).mean(1)
        right = self.right(self.shared(self.embed(answers), [True]), kept["right"]).mean(1)
        scores = F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).mT * self.heat.exp()
        return F.cross_entropy(scores, torch.arange(len(scores)))
