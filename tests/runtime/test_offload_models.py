"""Models of transformers with activations on the host: most of them leave the device, and no bit changes."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, tree
from tests.losses.test_causal_lm import CALM

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.long  # transformers takes seconds to import

VOCAB, LAYERS, LENGTH = 61, 6, 32
SIZES = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0, **CALM}
MODELS = {
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": VOCAB, **GPT2}),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {"vocab_size": VOCAB, "num_key_value_heads": 2, **SIZES}),
}


def trained(name: str, remat: Any) -> tuple[Any, Any, Any]:
    """Losses and parameters of two steps, what the step says of itself, and the buffers on the host."""
    kind, config, options = MODELS[name]
    torch.manual_seed(0)
    module = getattr(transformers, kind)(getattr(transformers, config)(**options))
    model = fs.split(module.train(), units="auto")
    mesh = fs.make_mesh((1,), ("data",))
    plan, opt = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=P("data")), fs.optim.adamw(1e-3)
    state = fs.init_state(plan, opt, params=model.params)
    step, losses = fs.make_train_step(fs.causal_lm_loss(model, chunks=4), opt, plan, remat=remat), []
    for number in range(2):
        words = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(number))
        batch = {"input_ids": words, "labels": words}
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
        assert tuple(step.record) == tuple(step.schedule.ops)
    return (losses, tree.leaves(fs.settle(state).params)), step.trace(batch), step._runner.programs.memory.host


@pytest.mark.parametrize("name", MODELS)
def test_most_of_what_is_kept_leaves_the_device(name: str) -> None:
    (want, kept, _), (got, found, host) = trained(name, None), trained(name, "offload")
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(want)))
    computes = kept.schedule.stages.computes
    turn = max(number for number, op in enumerate(computes) if op.kind == "forward")
    before = kept.needs[turn].after  # activations at the end of the forward
    assert host.most >= 0.5 * before
    # transformers makes a mask in each layer where it sees no values, and none where it finds that all tokens count.
    assert 0.9 * found.footprint.host_bytes <= host.most <= found.footprint.host_bytes
    assert found.needs[turn].after <= 0.5 * before
    assert found.footprint.activation_bytes <= 0.6 * kept.footprint.activation_bytes
