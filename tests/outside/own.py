"""Models written by hand, with their batches: see ``images``, ``sequences`` and ``fields``."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.outside import fields, images, sequences
from tests.outside.case import LENGTH, ROWS, Batch, Outside, labels, words
from tests.outside.case import images as pictures


def _gan(generator: torch.Generator) -> Batch:
    real = torch.randn(ROWS, 3, 8, 8, generator=generator).tanh()
    return {"noise": torch.randn(ROWS, 6, generator=generator), "real": real}


def _dropped(generator: torch.Generator) -> Batch:
    batch = pictures(generator)
    kept = (torch.rand(ROWS, 4, generator=generator) < 0.8).float() / 0.8
    return {"pixels": batch["pixel_values"], "kept": kept, "labels": batch["labels"]}


def _noised(generator: torch.Generator) -> Batch:
    drawn = {name: torch.randn(ROWS, 3, 8, 8, generator=generator) for name in ("pixels", "noise")}
    return drawn | {"time": torch.rand(ROWS, generator=generator)}


def _spelled(generator: torch.Generator) -> Batch:
    lengths = torch.randint(2, LENGTH + 1, (ROWS,), generator=generator)
    return {"words": words(generator), "lengths": lengths, "targets": words(generator, 6)}


def _graphs(generator: torch.Generator) -> Batch:
    loops = torch.arange(6)[None, :, None].expand(ROWS, 6, 2)
    edges = torch.cat([torch.randint(6, (ROWS, 9, 2), generator=generator), loops], 1)
    return {"nodes": torch.randn(ROWS, 6, 5, generator=generator), "edges": edges} | labels(generator, 3)


def _fields(generator: torch.Generator) -> Batch:
    field = torch.randn(ROWS, 1, 8, 8, generator=generator)
    return {"field": field, "wanted": field.roll(1, 2).square()}


def _retrieved(generator: torch.Generator) -> Batch:
    left, right = torch.rand(2, 3, generator=generator) < 0.7
    kept = {"left": left.tolist(), "right": right[:2].tolist()}
    return {"questions": words(generator), "answers": words(generator), "kept": kept}


def _points(name: str, width: int) -> Callable[[torch.Generator], Batch]:
    return lambda generator: {name: torch.randn(ROWS, width, generator=generator)}


def _labelled(name: str, *shape: int) -> Callable[[torch.Generator], Batch]:
    return lambda generator: {name: torch.randn(ROWS, *shape, generator=generator)} | labels(generator, 3)


def _signals(generator: torch.Generator) -> Batch:
    return {"signal": torch.randn(ROWS, 6, generator=generator)} | labels(generator, 2)


def _waves(generator: torch.Generator) -> Batch:
    levels = torch.randint(16, (ROWS, 24), generator=generator)
    return {"wave": levels / 8 - 1, "levels": levels}


def _contexts(generator: torch.Generator) -> Batch:
    widths = {"context": 4, "x": 6, "y": 3}
    return {name: torch.randn(ROWS, width, generator=generator) for name, width in widths.items()}


GAN_UNITS = ("generator.*", "discriminator.*")
OWN: dict[str, Outside] = {
    "EfficientNet": Outside(
        "EfficientNet", images.EfficientNet, _dropped, ("stem", "blocks.*"), parts=True, buffers=True
    ),
    "GAN with spectral norm": Outside(
        "SpectralGan",
        lambda: images.SpectralGan(parametrizations.spectral_norm),
        _gan,
        GAN_UNITS,
        parts=True,
        buffers=True,
    ),
    "GAN with the old spectral norm": Outside(
        "SpectralGan", lambda: images.SpectralGan(nn.utils.spectral_norm), _gan, GAN_UNITS, parts=True, buffers=True
    ),
    "Experts with losses in attributes": Outside(
        "AuxExperts", sequences.AuxExperts, lambda generator: {"words": words(generator)}, parts=True
    ),
    "Diffusion U-Net": Outside("DiffusionUNet", images.DiffusionUNet, _noised, ("down.*", "middle.*", "up.*")),
    "LSTM and GRU": Outside("RecurrentSpeller", sequences.RecurrentSpeller, _spelled, ("reader", "writer.*")),
    "Graph attention": Outside("GraphAttention", fields.GraphAttention, _graphs),
    "Fourier operator": Outside("FourierOperator", fields.FourierOperator, _fields),
    "S4D": Outside("StateSpaceClassifier", sequences.StateSpaceClassifier, _labelled("series", 16, 2)),
    "Complex network": Outside("ComplexNet", fields.ComplexNet, _signals),
    "RealNVP": Outside("Flow", fields.Flow, _points("points", 6), ("turn", "layers.*")),
    "WaveNet": Outside("WaveNet", sequences.WaveNet, _waves),
    "Two towers": Outside(
        "TwoTowers", sequences.TwoTowers, _retrieved, ("shared", "left.layers.*", "right.layers.*"), parts=True
    ),
    "Distillation by hooks": Outside(
        "HookedDistiller", fields.HookedDistiller, _labelled("x", 6), ("student.*", "teacher.*")
    ),
    "Adaptive computation": Outside("Ponder", fields.Ponder, _labelled("x", 6), ("cell", "halt"), parts=True),
    "Hypernetwork": Outside("Hypernetwork", fields.Hypernetwork, _contexts, ("maker",)),
    "Physics-informed network": Outside("Physics", fields.Physics, _points("points", 2)),
    "VQ-VAE": Outside(
        "Quantizer", images.Quantizer, _points("wave", 16), ("encoder", "codebook", "decoder"), parts=True, buffers=True
    ),
}
