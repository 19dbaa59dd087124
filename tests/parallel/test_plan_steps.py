"""Forty dense families of transformers, sharded: twenty steps of Adam, with a checkpoint, equal one process.

They are the steps that transformers has for its own sharding: one batch again and again, losses, norms and parameters
within 1e-5, a checkpoint that is restored after random numbers were drawn, files that are equal in every bit, with
tied embeddings and with others.
"""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import fshard as fs
from fshard import tree
from tests.parallel.plan_models import ROWS, VOCAB, hugging_face, planned
from tests.shared import parity
from tests.shared.parity import Run

FAMILIES = """
Apertus Arcee Cohere Cohere2 Cwm Ernie4_5 Exaone4 GPTNeoX Gemma Gemma2 Gemma3 Glm Glm4 Granite GraniteSWA Helium
HrmText HyperCLOVAX Jais2 Llama MiniCPM3 Ministral Ministral3 Mistral NanoChat Nemotron Olmo Olmo2 Olmo3 OlmoHybrid
Phi Phi3 Qwen2 Qwen3 Qwen3_5 SeedOss SmolLM3 Starcoder2 VaultGemma Youtu
""".split()

GAPS = {"Apertus": {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}}
"""Entries that a family's own plan lacks: Apertus learns the shape of its activation, between cut layers."""

ADAM = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-6}
"""The bias of keys changes no attention: its gradient is rounding, 1e-9 and less, which a smaller eps would amplify."""

HALF, LENGTH = 10, 16


def build(family: str, tied: bool) -> nn.Module:
    """A tiny model without dropout."""
    made = hugging_face(family, tie_word_embeddings=tied)
    for below in made.modules():
        for name in [name for name in vars(below) if "dropout" in name and isinstance(vars(below)[name], float)]:
            setattr(below, name, 0.0)
        if isinstance(below, nn.Dropout):
            below.p = 0.0
    return made


def words() -> dict[str, torch.Tensor]:
    """The batch of all steps."""
    found = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(42))
    return {"input_ids": found, "labels": found}


def train(module: nn.Module, folder: Path, axes: tuple[str, ...], entries: Any) -> Run:
    """On a rank: half of the steps, a checkpoint, and the other half by a new step from what the checkpoint holds."""
    mesh = fs.make_mesh((2,) * len(axes), axes)
    model, plan = planned(module, mesh, entries)
    opt, batch = fs.optim.adamw(**ADAM, weight_decay=0.0), plan.local_batch(words())

    def steps(state: fs.TrainState) -> tuple[Run, fs.TrainState]:
        step = fs.make_train_step(lambda p, b: model.apply(p, **b, use_cache=False).loss, opt, plan)
        return parity.sharded(step, state, plan, [batch] * HALF, scheduled_from=None)

    first, state = steps(fs.init_state(plan, opt, params=model.params))
    fs.Checkpointer(folder / "run").save(state)
    torch.manual_seed(1276)
    torch.randn(7)
    then, state = steps(fs.Checkpointer(folder / "run").restore(plan, opt))
    fs.io.save_hf(state, folder / "ours", config=module.config)  # type: ignore[arg-type]
    again = dict(tree.paths(fs.unshard(fs.io.load_hf(folder / "ours", plan).params, plan)))
    wrong = [f"{path}: other bits" for path, leaf in then.params.items() if not torch.equal(leaf, again[path])]
    return Run(first.losses + then.losses, first.norms + then.norms, then.params, wrong)


def plain(module: nn.Module) -> Run:
    """One process of plain PyTorch."""
    params = dict(module.named_parameters())
    rule = torch.optim.Adam(params.values(), **ADAM)  # type: ignore[arg-type]
    return parity.plain(params, rule, lambda _: parity.backward(module(**words(), use_cache=False).loss), 2 * HALF)


@pytest.mark.long
@pytest.mark.sample(160)
@pytest.mark.parametrize("axes", [("data", "tp"), ("data",)], ids="x".join)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_with_a_checkpoint_equal_one_process(
    family: str, tied: bool, axes: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    module: Any = build(family, tied)
    entries = GAPS.get(family) if "tp" in axes else None
    ranks = fs.virtual_mesh((2,) * len(axes), axes).run(train, module, tmp_path, axes, entries)
    assert parity.differences(ranks, plain(module)) == []
    with torch.no_grad():
        for path, leaf in module.named_parameters():
            leaf.copy_(ranks[0].params[path])
    module.save_pretrained(tmp_path / "theirs")
    ours, theirs = (safetensors.torch.load_file(tmp_path / one / "model.safetensors") for one in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(leaf, theirs[name]) for name, leaf in ours.items())
