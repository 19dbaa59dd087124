"""Mixtures and hybrids of transformers go on with prompts as their own ``generate`` does."""

from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import PlanError
from tests.outside.mixtures import MIXTURES, mixture
from tests.outside.test_mixtures import planned

transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16, 17]]

OWN = ("MiniMaxForCausalLM", "RecurrentGemmaForCausalLM")
"""Models whose cache is of a kind of its own, or that return none."""


def theirs(net: Any, prompt: list[int], count: int) -> list[int]:
    """What the model's own function goes on with."""
    given: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = torch.tensor([prompt])
    return list(net.generate(tokens, attention_mask=torch.ones_like(tokens), **given)[0].tolist()[len(prompt) :])


def check(net: nn.Module, prompts: list[list[int]], world: int) -> None:
    """Sequences of unequal lengths on some ranks, without a word about sampling."""
    net.eval()
    expected = [theirs(net, prompt, 7) for prompt in prompts]

    def run() -> list[list[int]]:
        mesh = fs.make_mesh((-1,), ("data",))
        model = fs.split(net, units="auto")
        state = fs.init_state(planned(model, mesh), params=model.params)
        mine = prompts[mesh.rank :: world]
        return [row.tolist() for row in fs.generate(state, fs.generation.hugging_face(model), mine, max_new=7).tokens]

    for rank, found in enumerate(fs.virtual_mesh((world,), ("data",)).run(run)):
        assert found == expected[rank::world]


@pytest.mark.long
@pytest.mark.parametrize("name", ["Lfm2ForCausalLM", "Qwen3NextForCausalLM", "MambaForCausalLM"])
def test_some_hybrids_go_on_as_their_own_generate(name: str) -> None:
    check(mixture(name), PROMPTS, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MIXTURES if name not in OWN])
@pytest.mark.parametrize("world", [1, 2])
def test_every_mixture_goes_on_as_its_own_generate(name: str, world: int) -> None:
    check(mixture(name), PROMPTS, world)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_caches_of_their_own_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} takes no DynamicCache"):
        check(mixture(name), PROMPTS, 1)


def test_models_without_such_a_cache_are_refused() -> None:
    net = transformers.RwkvForCausalLM(
        transformers.RwkvConfig(vocab_size=61, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
    )
    with pytest.raises(PlanError, match="RwkvForCausalLM takes no DynamicCache.*method='generate'"):
        fs.generation.hugging_face(fs.split(net))
