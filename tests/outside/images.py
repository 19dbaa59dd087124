"""Modules for images, as people write them: each is called with the parts of a batch by name and returns its loss.

Numbers that a module would draw (dropped paths, noise) come with the batch, so that any process can compute the same.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


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
