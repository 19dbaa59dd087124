"""Models that bring plans: tiny ones of transformers, and a module whose plan has every style of layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import parallel
from tests.outside.mixtures import SMALL, _settable
from tests.shared import parity
from tests.shared.parity import Run

VOCAB, ROWS, LENGTH, STEPS = 64, 4, 8, 3
SGD = {"lr": 0.5, "momentum": 0.9}

DENSE = ("Llama", "Qwen2", "Qwen3", "Gemma3", "Phi3", "Olmo2")
MIXED = ("Qwen3Moe", "Mixtral", "GptOss", "DeepseekV3")
MORE_MIXED = """
Afmoe AriaText BailingHybrid Beam Cohere2Moe DeepseekV2 Dots1 Ernie4_5_Moe ExaoneMoe FlexOlmo Glm4Moe Glm4MoeLite
GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared HYV3 HYV4 HunYuanMoEV1 MiMoV2Flash MiniMax MiniMaxM2
NemotronH Olmoe Qwen2Moe Qwen3Next Qwen3_5Moe SolarOpen
""".split()


def hugging_face(family: str, **options: Any) -> nn.Module:
    """A ``...ForCausalLM`` of transformers with two layers; with the same values in every process."""
    import transformers

    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class
    sizes = {**SMALL, "vocab_size": VOCAB, "num_hidden_layers": 2}
    sizes = {key: value for key, value in sizes.items() if _settable(config, key)}
    if "qk_rope_head_dim" in sizes:
        sizes |= {"num_key_value_heads": 4}
        sizes.pop("head_dim", None)
    held = getattr(config(), "layer_types", None)
    if isinstance(held, list | tuple):
        sizes["layer_types"] = (list(dict.fromkeys(held)) * 2)[:2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = kind(config(**sizes | options))
    assert isinstance(made, nn.Module)
    return made.train()


class HeadNorm(nn.Module):
    """A norm of each head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x.unflatten(-1, (-1, len(self.weight))) * self.weight
        return out.flatten(-2)


class Block(nn.Module):
    """Layers in pairs, one for each kind of entry."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.heads, self.down = nn.Linear(width, 2 * width), HeadNorm(4), nn.Linear(2 * width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.heads(self.up(self.norm(x)).tanh()))
        out: Tensor = x + self.narrow(self.wide(input=x).softmax(-1))
        return out


class Net(nn.Module):
    """A language model whose head is its embedding, and which brings a plan."""

    _tp_plan = {
        "embed": "embedding_rowwise",
        "place": "embedding_colwise",
        "blocks.*.norm": "sequence_parallel",
        "blocks.*.up": "colwise",
        "blocks.*.heads": "replicated_with_grad_allreduce",
        "blocks.*.down": "rowwise",
        "blocks.*.wide": "colwise_gather_output",
        "blocks.*.narrow": "rowwise_split_input",
        "blocks.*.norm.bias": "replicate",
    }

    def __init__(self, width: int = 8, pad: int | None = 1) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, width, padding_idx=pad), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCAB)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Tensor:
        x = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def net(pad: int | None = 1) -> Net:
    """The module, with the same values in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net(pad=pad)


def batch(step: int) -> dict[str, Tensor]:
    """The global batch of a step; padding is among its words."""
    words = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": words, "labels": words.roll(1, -1)}


def loss_of(out: Any) -> Tensor:
    """The loss that a model returns."""
    loss: Tensor = out if isinstance(out, Tensor) else out.loss
    return loss


def planned(module: nn.Module, mesh: fs.Mesh, entries: Any = None, **options: Any) -> tuple[fs.Model, fs.Plan]:
    """A module as fshard's users make it parallel."""
    model = parallel.parallelize(fs.split(module, units="auto"), mesh, entries)
    rows = fs.P(tuple(axis for axis in mesh.axis_names if axis != "tp"))
    return model, fs.make_plan(model, mesh, "auto", batch=rows, **options)


def train(module: nn.Module, axes: Sequence[str], entries: Any = None, **options: Any) -> Run:
    """On a rank: train over axes of two ranks each."""
    mesh = fs.make_mesh((2,) * len(axes), tuple(axes))
    model, plan = planned(module, mesh, entries)
    opt = fs.optim.sgd(**SGD)
    state = fs.init_state(plan, opt, params=model.params)
    chunks = options.pop("chunks", None)
    loss = lambda p, b: loss_of(model.apply(p, **b, use_cache=False))  # noqa: E731
    loss = fs.causal_lm_loss(model, chunks=chunks) if chunks else loss
    step = fs.make_train_step(loss, opt, plan, **options)
    run, _ = parity.sharded(step, state, plan, (plan.local_batch(batch(i)) for i in range(STEPS)), scheduled_from=None)
    return run


Gradients = tuple[float, dict[str, Tensor]]
"""The loss of a batch, and its gradient by the path of each leaf."""


def differentiate(module: nn.Module, axes: Sequence[str]) -> Gradients:
    """On a rank: the loss of the first batch and its whole gradients, on axes of two ranks each."""
    mesh = fs.make_mesh((2,) * len(axes), tuple(axes))
    model, plan = planned(module, mesh)
    grad = fs.value_and_grad(lambda p, b: loss_of(model.apply(p, **b, use_cache=False)), plan)
    loss, grads = grad(fs.shard(model.params, plan), plan.local_batch(batch(0)))
    return float(loss), parity.whole(fs.unshard(grads, plan))


def far_gradients(got: Gradients, module: nn.Module, near: float = 1e-5) -> list[str]:
    """Where a loss and gradients are not those of plain PyTorch, relative to the largest number of each leaf.

    A gradient that is zero but for rounding counts relative to a thousandth of the largest of all.
    """
    params = dict(module.named_parameters())
    loss = loss_of(module(**batch(0), use_cache=False))
    found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    want = {path: torch.zeros_like(p) if g is None else g for (path, p), g in zip(params.items(), found, strict=True)}
    most = max(g.abs().max() for g in want.values())
    sizes = {path: max(g.abs().max(), most / 1000) for path, g in want.items()}
    scaled = [{path: g / sizes[path] for path, g in grads.items()} for grads in (got[1], want)]
    told = [] if abs(got[0] - loss.item()) <= near * abs(loss.item()) else [f"loss {got[0]}, expected {loss.item()}"]
    return told + parity.far_leaves(*scaled, near)


def plain(module: nn.Module) -> Run:
    """One process of plain PyTorch, which changes the module."""
    params = dict(module.named_parameters())

    def backward(step: int) -> float:
        return parity.backward(loss_of(module(**batch(step), use_cache=False)))

    return parity.plain(params, torch.optim.SGD(params.values(), **SGD), backward, STEPS)
