"""Models of Hugging Face's transformers for ``fs.generate``."""

from importlib import import_module
from typing import Any

from torch import Tensor

from fshard.arguments import expect
from fshard.generation.places import Forward, Places
from fshard.model.split import Model


def hugging_face(model: Model) -> Forward:
    """Adapt a decoder of transformers, split by ``fs.split``, to ``fs.generate``, which reads tokens with a cache.

    It hands the keys and values to the model as a ``DynamicCache``. Models whose layers keep something else than keys
    and values of all tokens (sliding windows, state spaces) are not served by it: run their own ``generate`` in an
    evaluation step.

    Args:
        model: what ``fs.split`` made of a ``...ForCausalLM``.

    Example::

        model = fs.split(LlamaForCausalLM(config), units="auto")
        made = fs.generate(state, fs.generation.hugging_face(model), [prompt], max_new=100)
    """
    expect("hugging_face(model)", [("model", model, Model, "what fs.split returned")])
    make = import_module("transformers").DynamicCache

    def forward(params: Any, tokens: Tensor, cache: Any, places: Places) -> tuple[Tensor, Any]:
        past = make()
        for number, (keys, values) in enumerate(cache or ()):
            past.update(keys, values, number)
        out = model.apply(
            params,
            input_ids=tokens,
            attention_mask=places.keys.long(),
            position_ids=places.positions,
            past_key_values=past,
            use_cache=True,
            training=False,
        )
        return out.logits, tuple((layer.keys, layer.values) for layer in past.layers)

    return forward
