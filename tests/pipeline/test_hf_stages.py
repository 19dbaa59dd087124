"""Language models of transformers in stages: code that nobody here wrote, with tables and router logits that travel."""

from typing import Any

import pytest
import torch

import fshard as fs
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
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}


def on_rank(name: str, options: dict[str, Any], mesh: fs.Mesh, chunks: int) -> parity.Run:
    """On a rank: train."""
    transformers = pytest.importorskip("transformers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SIZES, **options)
        model = fs.split(getattr(transformers, f"{name}ForCausalLM")(config), units=("model.layers.*",))
    stages = fs.Stages("stage", chunks=chunks) if "stage" in mesh.axis_names else None
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"), stages=stages)
    opt = fs.optim.sgd(0.1, momentum=0.9)
    step = fs.make_train_step(lambda p, b: model.apply(p, **b).loss, opt, plan, accumulate=4, clip_norm=0.3)
    state = fs.init_state(plan, opt, params=model.params)
    rows = [torch.randint(64, (8, 6), generator=torch.Generator().manual_seed(number)) for number in range(3)]
    batches = [plan.local_batch({"input_ids": x, "labels": x}) for x in rows]
    return parity.sharded(step, state, plan, batches)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "stages", "chunks"),
    [
        ("Llama", {"tie_word_embeddings": False}, 4, 1),
        ("Llama", {"tie_word_embeddings": True}, 2, 2),
        ("Mixtral", EXPERTS, 2, 1),
    ],
)
def test_transformers(name: str, options: dict[str, Any], stages: int, chunks: int) -> None:
    """Stages give what one rank gives."""
    mesh, one = fs.virtual_mesh((stages, 1), ("stage", "data")), fs.virtual_mesh((1,), ("data",))
    want = one.run(lambda: on_rank(name, options, one, 1))[0]
    assert parity.differences(mesh.run(lambda: on_rank(name, options, mesh, chunks)), want) == []
