"""Modules of other kinds (graphs, fields, flows), as people write them: each returns its loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations


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
