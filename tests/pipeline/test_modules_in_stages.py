"""Modules in stages: language models of transformers, which nobody here wrote, and a U-Net of convolutions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.errors import PlanError
from tests.shared import parity

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "use_cache": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


WORDS = {
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 3,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}


class UNet(nn.Module):
    """Convolutions down and up again. The results of each level go to the level across, over all stages between."""

    def __init__(self, width: int = 4, depth: int = 2) -> None:
        super().__init__()
        levels = [width << level for level in range(depth + 1)]
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(w, 2 * w, 3, 2, 1), nn.GroupNorm(2, 2 * w), nn.SiLU()) for w in levels[:-1]
        )
        self.middle = nn.Sequential(nn.Conv2d(levels[-1], levels[-1], 3, padding=1), nn.SiLU())
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(4 * w, w, 2, 2), nn.GroupNorm(2, w), nn.SiLU()) for w in levels[-2::-1]
        )
        self.leave = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.enter(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([x, skips.pop()], 1))
        out: Tensor = self.leave(x)
        return out


def on_rank(
    make: Callable[[], nn.Module], units: tuple[str, ...], loss: Any, batch: Any, mesh: fs.Mesh, **cut: Any
) -> parity.Run:
    """On a rank: train."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = fs.split(make(), units=units)
    stages = fs.Stages("stage", **cut) if "stage" in mesh.axis_names else None
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"), stages=stages)
    opt = fs.optim.sgd(0.1, momentum=0.9)
    step = fs.make_train_step(lambda p, b: loss(model, p, b), opt, plan, accumulate=4, clip_norm=0.3)
    state = fs.init_state(plan, opt, params=model.params)
    return parity.sharded(step, state, plan, [plan.local_batch(batch(number)) for number in range(3)])[0]


def check(sizes: tuple[int, int], given: tuple[Any, ...], **cut: Any) -> None:
    """Stages give what one rank gives."""
    mesh, one = fs.virtual_mesh(sizes, ("stage", "data")), fs.virtual_mesh((1,), ("data",))
    want = one.run(lambda: on_rank(*given, one))[0]
    assert parity.differences(mesh.run(lambda: on_rank(*given, mesh, **cut)), want) == []


def text(number: int) -> dict[str, Tensor]:
    """Tokens, of which none is padding, and what is to be found of them."""
    x = torch.randint(1, 64, (8, 6), generator=torch.Generator().manual_seed(number))
    return {"input_ids": x, "labels": x.flip(1)}


def image(number: int) -> Tensor:
    """Images."""
    return torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(number))


def transformer(name: str, kind: str, sizes: dict[str, Any], units: tuple[str, ...]) -> tuple[Any, ...]:
    """A model of transformers, its units, its loss and its batches."""
    transformers = pytest.importorskip("transformers")
    config, model = (getattr(transformers, name + suffix) for suffix in ("Config", kind))
    return lambda: model(config(**sizes)), units, lambda model, p, b: model.apply(p, **b).loss, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "stages", "chunks"),
    [
        ("Llama", {"tie_word_embeddings": False}, 4, 1),
        ("Llama", {"tie_word_embeddings": True}, 2, 2),
        ("Mixtral", EXPERTS, 2, 2),
    ],
)
def test_transformers(name: str, options: dict[str, Any], stages: int, chunks: int) -> None:
    """Tables of angles are computed on each stage."""
    check((stages, 1), transformer(name, "ForCausalLM", SIZES | options, ("model.layers.*",)), chunks=chunks)


def test_logits_of_routers_are_refused() -> None:
    """transformers collects them by hooks, which other stages do not call: the loss would lack those."""
    given = transformer("Mixtral", "ForCausalLM", SIZES | EXPERTS | {"output_router_logits": True}, ("model.layers.*",))
    with pytest.raises(PlanError, match=r"(?s)inside of these units.*model\.layers\.0.*output_router_logits=False"):
        check((2, 1), given)


NORM = (r"encoder\.final_layer_norm\.weight", 1)
SHARED = (r"shared\.weight", (0, 1, 2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "leaves"), [((2, 2), [NORM]), ((3, 1), [SHARED, (NORM[0], (1, 2))])], ids=["two", "three"]
)
def test_an_encoder_and_its_decoder(sizes: tuple[int, int], leaves: Any) -> None:
    """T5: all blocks of the decoder read the encoder; a table of positions and one of words are on several stages."""
    given = transformer("T5", "ForConditionalGeneration", WORDS, ("encoder.block.*", "decoder.block.*"))
    check(sizes, given, leaves=leaves)


@pytest.mark.parametrize(
    ("sizes", "cut"), [((3, 1), {}), ((2, 2), {"chunks": 2, "placement": "v"})], ids=["three", "v"]
)
def test_a_unet(sizes: tuple[int, int], cut: dict[str, Any]) -> None:
    """Results of levels skip over stages."""

    def loss(model: Any, params: Any, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(model.apply(params, x), x.flip(2).sin())

    check(sizes, (UNet, ("enter", "down.*", "middle", "up.*", "leave"), loss, image), **cut)
