"""Published runs of pure FSDP: facts from MosaicML's and torchtitan's tables, and the model that MosaicML trained."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

MOSAIC = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"

WORDS, LENGTH = 50368, 2048
"""The vocabulary of all MPT models, and the tokens of a row in all runs of them here."""


@dataclass(frozen=True)
class Size:
    """An MPT model: width, layers, heads; and the number of its parameters that the table states."""

    width: int
    depth: int
    heads: int
    parameters: int


SIZES = {
    "3b": Size(2560, 32, 20, 2_651_837_440),
    "7b": Size(4096, 32, 32, 6_658_859_008),
    "13b": Size(5120, 40, 40, 12_853_954_560),
    "30b": Size(7168, 48, 56, 29_975_214_080),
    "70b": Size(8192, 80, 64, 64_862_437_376),
}


@dataclass(frozen=True)
class Run:
    """A row of a table.

    Attributes:
        gpu: what it ran on, a name of ``GPUS``.
        model: a name of ``SIZES``, or of a Llama.
        ranks: GPUs.
        rows: of a rank's microbatch.
        accumulate: microbatches of a step.
        remat: whether each layer was computed again.
        rate: tokens a second of one GPU, as measured; 0 where nothing was published.
        mfu: as published, in percent; 0 where it was not.
    """

    gpu: str
    model: str
    ranks: int
    rows: int
    accumulate: int
    remat: bool
    rate: int = 0
    mfu: float = 0.0


@dataclass(frozen=True)
class Gpu:
    """What runs were on, in names of fshard.

    Attributes:
        device: a name of ``fs.sim.DEVICES``.
        link: between hosts of 8, for each GPU.
        inside: between GPUs of a host.
        fitted: model and ranks of the run from which the share of the peak is taken.
        bytes_per_s: of its memory, where it is not that of the device.
    """

    device: str
    link: str
    inside: str
    fitted: tuple[str, int]
    bytes_per_s: float = 0.0


GPUS = {
    "A100 40GB": Gpu("a100-40", "ib200", "nvlink3", ("7b", 8)),
    "A100 80GB": Gpu("a100", "ib200", "nvlink3", ("7b", 8)),
    "H100 80GB": Gpu("h100", "ib400", "nvlink4", ("7b", 8)),
    "H100 96GB, 500 W": Gpu("h100", "ib400", "nvlink4", ("llama 8B", 8), 2400e9),
}
"""MosaicML states 1,600 Gbit/s a host of A100s, and nothing of the H100s: 400 Gbit/s a GPU is assumed."""

Fact = tuple[str, int, int, int, bool, int, float]
"""Model, ranks, rows, microbatches, whether layers were computed again, tokens a second, MFU."""


def _runs(gpu: str, *rows: Fact) -> list[Run]:
    return [Run(gpu, *row) for row in rows]


MOSAIC_RUNS = [
    *_runs(
        "A100 40GB",
        ("70b", 128, 4, 1, True, 376, 48.91),
        ("70b", 64, 2, 1, True, 276, 35.87),
        ("30b", 128, 6, 1, True, 865, 52.25),
        ("30b", 32, 4, 1, True, 857, 51.74),
        ("13b", 128, 16, 1, True, 1972, 51.93),
        ("13b", 64, 16, 1, True, 1976, 52.04),
        ("13b", 32, 14, 1, True, 1998, 52.62),
        ("13b", 16, 10, 1, True, 1993, 52.5),
        ("13b", 8, 4, 16, True, 1668, 43.94),
        ("7b", 128, 18, 1, True, 3623, 50.14),
        ("7b", 64, 18, 1, True, 3665, 50.73),
        ("7b", 32, 18, 1, True, 3725, 51.55),
        ("7b", 16, 16, 1, True, 3645, 50.44),
        ("7b", 8, 12, 4, True, 3679, 50.92),
        ("3b", 128, 6, 1, False, 9538, 54.8),
        ("3b", 64, 6, 1, False, 9736, 55.94),
        ("3b", 32, 6, 1, False, 9914, 56.96),
        ("3b", 16, 5, 1, False, 9750, 56.02),
        ("3b", 8, 5, 8, False, 10065, 57.82),
    ),
    *_runs(
        "A100 80GB",
        ("70b", 64, 8, 4, True, 410, 53.33),
        ("70b", 32, 2, 16, True, 373, 48.56),
        ("30b", 8, 3, 21, True, 916, 55.3),
        ("13b", 8, 2, 3, False, 2262, 59.57),
        ("7b", 8, 6, 2, False, 4641, 64.23),
        ("3b", 8, 10, 2, False, 10811, 62.11),
    ),
    *_runs(
        "H100 80GB",
        ("70b", 64, 8, 4, True, 1039, 42.57),
        ("70b", 32, 2, 16, True, 882, 36.15),
        ("30b", 32, 14, 3, True, 2308, 43.92),
        ("30b", 16, 10, 3, True, 2263, 43.07),
        ("30b", 8, 3, 21, True, 2002, 38.11),
        ("13b", 64, 2, 1, False, 4800, 39.86),
        ("13b", 32, 2, 1, False, 4811, 39.95),
        ("13b", 16, 2, 1, False, 4767, 39.58),
        ("13b", 8, 2, 1, False, 4792, 39.79),
        ("7b", 8, 6, 1, False, 10643, 46.44),
        ("3b", 64, 6, 3, False, 22525, 40.8),
        ("3b", 32, 6, 3, False, 23021, 41.7),
        ("3b", 16, 10, 3, False, 24142, 43.73),
    ),
]
"""All rows of MosaicML's tables in bfloat16 with at least 3b parameters and 2,048 tokens a row."""


TITAN_RUNS = _runs(
    "H100 96GB, 500 W", ("llama 8B", 128, 2, 1, False, 5605, 0.0), ("llama 8B", 8, 2, 1, False, 5762, 0.0)
)
"""torchtitan's, eager. Each second matrix product of a layer was computed again, which is not in the prediction."""


class Block(nn.Module):
    """A layer of an MPT model, with the biases that the stated numbers of parameters include."""

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


class MPT(nn.Module):
    """Tokens (rows, tokens) to the loss: learned positions, one table for inputs and outputs."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, size.width), nn.Embedding(LENGTH, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
