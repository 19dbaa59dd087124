"""Modules as people write them: small, of many kinds, and with no thought of sharding.

Each is called with the parts of a batch by name and returns its loss. Numbers that a module would draw (dropped paths,
noise) come with the batch, so that any process can compute the same.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

ROWS, LENGTH, VOCAB = 8, 8, 61


class SqueezeExcite(nn.Module):
    """Channels weighted by what the whole image says of them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels."""
        gate = self.up(F.silu(self.down(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(gate)


class InvertedBottleneck(nn.Module):
    """MBConv: expand, convolve each channel, squeeze and excite, project; the path may be dropped."""

    def __init__(self, width: int, out: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = 2 * width
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU())
        spatial = nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False)
        self.spatial = nn.Sequential(spatial, nn.BatchNorm2d(inner, momentum=0.01), nn.SiLU(inplace=True))
        self.excite = SqueezeExcite(inner, 4)
        self.project = nn.Sequential(nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out))
        self.skips = stride == 1 and width == out

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """Rows where ``kept`` is 0 take the skip alone."""
        y = self.project(self.excite(self.spatial(self.expand(x))))
        return x + y * kept[:, None, None, None] if self.skips else y


class EfficientNet(nn.Module):
    """Inverted bottlenecks with squeeze and excitation, batch normalization and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        shapes = [(8, 8, 3, 1), (8, 12, 3, 2), (12, 12, 5, 1), (12, 12, 5, 1)]
        self.blocks = nn.ModuleList(InvertedBottleneck(*shape) for shape in shapes)
        self.head = nn.Linear(12, 5)

    def forward(self, pixels: Tensor, kept: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of classes."""
        x = self.stem(pixels)
        for number, block in enumerate(self.blocks):
            x = block(x, kept[:, number])
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Reversed(torch.autograd.Function):
    """The identity, whose gradient changes its sign: both players of a game in one backward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """The value itself."""
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The other sign."""
        return -grad


class SpectralGan(nn.Module):
    """A generator, and a discriminator whose layers have a spectral norm of 1 by a power iteration at every call."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Sequential(nn.Linear(6, 4 * 4 * 8), nn.Unflatten(1, (8, 4, 4)), nn.ReLU()),
            nn.Sequential(nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.GroupNorm(2, 8), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 3, 3, padding=1), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            nn.Sequential(norm(nn.Conv2d(3, 8, 3, 2, 1)), nn.LeakyReLU(0.1)),
            nn.Sequential(norm(nn.Conv2d(8, 8, 3, 2, 1)), nn.LeakyReLU(0.1)),
            nn.Sequential(nn.Flatten(), norm(nn.Linear(32, 1))),
        )

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        """The hinge loss of the discriminator, which the generator, behind a reversed gradient, makes larger."""
        fake = Reversed.apply(self.generator(noise))
        scores = self.discriminator(torch.stack([real, fake], 1).flatten(0, 1)).view(-1, 2)
        return F.softplus(-scores[:, 0]).mean() + F.softplus(scores[:, 1]).mean()


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


def angles(time: Tensor, width: int) -> Tensor:
    """Sines and cosines of a time."""
    rates = torch.exp(-math.log(100.0) * torch.arange(width // 2) / (width // 2))
    return torch.cat([(time[:, None] * rates).sin(), (time[:, None] * rates).cos()], -1)


class TimedBlock(nn.Module):
    """A residual block of a U-Net, shifted by the embedding of the time."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, out, 3, padding=1))
        self.time = nn.Linear(16, 2 * out)
        self.second = nn.Sequential(nn.GroupNorm(4, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Convolve, scale and shift, convolve."""
        scale, shift = self.time(time)[:, :, None, None].chunk(2, 1)
        return self.skip(x) + self.second(self.first(x) * (1 + scale) + shift)


class PixelAttention(nn.Module):
    """Attention among all pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The time is for others."""
        pixels = self.norm(x).flatten(2).mT
        return x + self.attention(pixels, pixels, pixels)[0].mT.view_as(x)


class DiffusionUNet(nn.Module):
    """A U-Net that predicts the noise in an image, with skips from its way down to its way up."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([TimedBlock(8, 8), TimedBlock(8, 16)])
        self.middle = nn.ModuleList([TimedBlock(16, 16), PixelAttention(16), TimedBlock(16, 16)])
        self.up = nn.ModuleList([TimedBlock(32, 8), TimedBlock(16, 8)])
        self.leave = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, pixels: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The squared error of the noise."""
        kept = torch.cos(time * math.pi / 2)[:, None, None, None]
        x = self.enter(kept * pixels + (1 - kept**2).sqrt() * noise)
        t = self.time(angles(100 * time, 16))
        skips = []
        for block in self.down:
            x = block(x, t)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.middle:
            x = block(x, t)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1), t)
        return F.mse_loss(self.leave(x), noise)


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


class GraphLayer(nn.Module):
    """Attention from each node to its neighbours, by a softmax over the edges that end in a node."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.score = nn.Linear(width, width), nn.Linear(2 * width, 1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """``x`` has a row for each node of all graphs."""
        values = self.value(x)
        scores = F.leaky_relu(self.score(torch.cat([values[source], values[target]], -1)))[:, 0]
        most = scores.new_full((len(x),), -1e9).scatter_reduce(0, target, scores, "amax")
        weights = torch.exp(scores - most[target])
        total = torch.zeros_like(most).index_add(0, target, weights)
        heard = torch.zeros_like(values).index_add(0, target, values[source] * (weights / total[target])[:, None])
        return self.norm(x + F.elu(heard))


class GraphAttention(nn.Module):
    """A graph attention network over several graphs at once, their edges moved to where their nodes are."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 12)
        self.layers = nn.ModuleList(GraphLayer(12) for _ in range(3))
        self.head = nn.Linear(12, 3)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of the class of each graph."""
        graphs, count, _ = nodes.shape
        source, target = (edges + count * torch.arange(graphs)[:, None, None]).flatten(0, 1).unbind(-1)
        x = self.enter(nodes).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, source, target)
        return F.cross_entropy(self.head(x.view(graphs, count, -1).mean(1)), labels)


class SpectralConvolution(nn.Module):
    """A Fourier layer: some frequencies are multiplied by complex weights, which are held as pairs of real numbers."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, modes, 2) / width**2)
        self.local = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Through the frequencies and back."""
        waves = torch.fft.rfft2(x)
        m = self.modes
        low = torch.einsum("bixy,ioxy->boxy", waves[:, :, :m, :m], torch.view_as_complex(self.weight))
        full = torch.zeros_like(waves)
        full[:, :, :m, :m] = low
        return F.gelu(torch.fft.irfft2(full, s=x.shape[-2:]) + self.local(x))


class FourierOperator(nn.Module):
    """A Fourier neural operator: from a field to a field."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, 6, 1)
        self.layers = nn.ModuleList(SpectralConvolution(6, 3) for _ in range(3))
        self.lower = nn.Conv2d(6, 1, 1)

    def forward(self, field: Tensor, wanted: Tensor) -> Tensor:
        """The squared error of the field."""
        x = self.lift(field)
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.lower(x), wanted)


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


class ComplexNet(nn.Module):
    """Complex parameters, as of signal processing, with a magnitude in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.complex64) for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, signal: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of the class of each signal."""
        x = torch.fft.fft(signal)
        for layer in self.layers:
            x = layer(x)
            x = torch.complex(torch.tanh(x.real), torch.tanh(x.imag))
        return F.cross_entropy(self.head(x.abs()), labels)


class Coupling(nn.Module):
    """An affine coupling layer: one half moves the other, and the logarithm of the volume goes along."""

    def __init__(self, width: int, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.net = nn.Sequential(nn.Linear(width // 2, 16), nn.Tanh(), nn.Linear(16, width))

    def forward(self, x: Tensor, volume: Tensor) -> tuple[Tensor, Tensor]:
        """The moved value, and the volume so far."""
        still, moved = x.chunk(2, -1)[:: -1 if self.turned else 1]
        scale, shift = self.net(still).chunk(2, -1)
        moved = moved * torch.tanh(scale).exp() + shift
        parts = [moved, still] if self.turned else [still, moved]
        return torch.cat(parts, -1), volume + torch.tanh(scale).sum(-1)


class Flow(nn.Module):
    """A normalizing flow (RealNVP), with a triangular map kept by a parametrization with orthogonal factors."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = parametrizations.orthogonal(nn.Linear(6, 6, bias=False))
        self.layers = nn.ModuleList(Coupling(6, bool(i % 2)) for i in range(4))

    def forward(self, points: Tensor) -> Tensor:
        """The negative logarithm of the likelihood."""
        x, volume = self.turn(points), torch.zeros(len(points))
        for layer in self.layers:
            x, volume = layer(x, volume)
        return (x.square().sum(-1) / 2 - volume).mean()


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


class HookedDistiller(nn.Module):
    """A network whose hooks collect its hidden states, which its loss compares with those of a frozen twin."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.teacher = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.teacher.requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy, and the distance between hidden states."""
        seen: dict[str, list[Tensor]] = {"student": [], "teacher": []}
        handles = []
        for name, states in seen.items():
            for block in getattr(self, name):
                handles.append(block.register_forward_hook(lambda _m, _a, out, to=states: to.append(out)))
        try:
            out = self.student(x)
            self.teacher(x)
        finally:
            for handle in handles:
                handle.remove()
        far = sum(F.mse_loss(a, b) for a, b in zip(*seen.values(), strict=True))
        return F.cross_entropy(self.head(out), labels) + far


class Ponder(nn.Module):
    """Adaptive computation: one layer, applied to all rows until all have halted."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6), nn.LayerNorm(6))
        self.halt, self.head = nn.Linear(6, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of the mean state by the odds of halting, and the price of thinking."""
        left, mean, price = torch.ones(len(x)), torch.zeros_like(x), torch.zeros(())
        for _ in range(4):
            x = x + self.cell(x)
            odds = left * torch.sigmoid(self.halt(x))[:, 0]
            mean, left, price = mean + odds[:, None] * x, left - odds, price + left.mean()
            if bool((left < 0.2).all()):
                break
        return F.cross_entropy(self.head(mean), labels) + 0.01 * price


class Hypernetwork(nn.Module):
    """A network whose weights another one makes for each row, called by ``functional_call``."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3 * 6 + 3))
        self.made = nn.Linear(6, 3)

    def forward(self, context: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The squared error."""
        weights = self.maker(context)

        def one(row: Tensor, point: Tensor) -> Tensor:
            leaves = {"weight": self.made.weight + row[:18].view(3, 6), "bias": self.made.bias + row[18:]}
            out: Tensor = torch.func.functional_call(self.made, leaves, (point,))
            return out

        return F.mse_loss(torch.func.vmap(one)(weights, x), y)


class Physics(nn.Module):
    """A field that should obey an equation: the loss holds its second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        widths = [2, 12, 12, 1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))

    def field(self, points: Tensor) -> Tensor:
        """A number for each point."""
        x = points
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        out: Tensor = self.layers[-1](x)[:, 0]
        return out

    def forward(self, points: Tensor) -> Tensor:
        """How far the field is from having a Laplacian of 1."""
        points = points.requires_grad_()
        (slope,) = torch.autograd.grad(self.field(points).sum(), points, create_graph=True)
        bend = [torch.autograd.grad(slope[:, i].sum(), points, create_graph=True)[0][:, i] for i in range(2)]
        return (bend[0] + bend[1] - 1).square().mean()


class Codebook(nn.Module):
    """Vector quantization: the nearest code, straight through; codes follow what they stand for, as buffers."""

    codes: Tensor
    counts: Tensor

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(count, width))
        self.register_buffer("counts", torch.ones(count))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The codes, and how far the values are from them."""
        which = torch.cdist(x, self.codes).argmin(-1)
        with torch.no_grad():
            hot = F.one_hot(which, len(self.codes)).to(x.dtype).flatten(0, -2)
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes += 0.1 * (hot.mT @ (x.flatten(0, -2)) - hot.sum(0)[:, None] * self.codes) / self.counts[:, None]
        code = self.codes[which]
        return x + (code - x).detach(), F.mse_loss(x, code)


class Quantizer(nn.Module):
    """VQ-VAE with a codebook that moves by averages."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv1d(8, 4, 3, 1, 1))
        self.codebook = Codebook(4, 7)
        self.decoder = nn.Sequential(nn.Conv1d(4, 8, 3, 1, 1), nn.ReLU(), nn.ConvTranspose1d(8, 1, 4, 2, 1))

    def forward(self, wave: Tensor) -> Tensor:
        """The error of what comes back, and the distance to the codes."""
        codes, far = self.codebook(self.encoder(wave[:, None]).mT)
        return F.mse_loss(self.decoder(codes.mT)[:, 0], wave) + 0.25 * far
