"""Models of transformers that install hooks while they run: to return hidden states, or attention weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree

transformers = pytest.importorskip("transformers")


def _llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, attn_implementation="eager", **sizes)
    return transformers.LlamaForCausalLM(config)


IDS = torch.arange(12).view(2, 6)


def _loss(out: Any) -> Tensor:
    loss: Tensor = sum(state.square().mean() for state in (*out.hidden_states, *out.attentions)) + out.logits.mean()
    return loss


@pytest.mark.long
@pytest.mark.parametrize("compile", [None, "fx"])
def test_hidden_states_and_attentions_are_the_same_at_every_call(compile: str | None) -> None:
    net = _llama()
    model = fs.split(net, "auto")
    wanted = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    for _ in range(4):
        out = model.apply(model.params, IDS, **wanted)
        assert (len(out.hidden_states), len(out.attentions)) == (4, 3)
    opt = fs.optim.sgd(0.1)
    plan = fs.make_plan(model, fs.make_mesh((-1,), ("shard",)), [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    step = fs.make_train_step(lambda p, ids: _loss(model.apply(p, ids, **wanted)), opt, plan, compile=compile)
    state, sgd = fs.init_state(plan, opt, params=model.params), torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        state, metrics = step(state, IDS)
        sgd.zero_grad()
        loss = _loss(net(IDS, **wanted))
        loss.backward()
        sgd.step()
        torch.testing.assert_close(metrics.loss, loss.detach())
    expected = dict(net.named_parameters())
    for path, leaf in tree.paths(fs.unshard(state.params, plan)):
        torch.testing.assert_close(leaf, expected[path].detach())
