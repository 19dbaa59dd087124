"""Models of Hugging Face's transformers for ``fs.generate``."""

import inspect
from importlib import import_module
from typing import Any

from torch import Tensor

from fshard.arguments import expect
from fshard.errors import PlanError
from fshard.generation.places import Forward, Places, given, taken
from fshard.model.split import Model
from fshard.parallel.hf_attention import attends_over_ranks

CACHES = ("past_key_values", "cache_params")
"""The names under which models take their cache."""


def hugging_face(model: Model) -> Forward:
    """Adapt a decoder of transformers, split by ``fs.split``, to ``fs.generate``, which reads tokens with a cache.

    The model keeps what its configuration says: keys and values of all tokens or of a window, states of convolutions
    and of recurrent layers (LFM2, Qwen3-Next, Mamba).

    Args:
        model: what ``fs.split`` made of a ``...ForCausalLM``.

    Raises:
        PlanError: the model takes no cache of ``transformers`` (RWKV), has one of its own (xLSTM, MiniMax), or computes
            attention over a sequence that is cut over ranks.

    Example::

        model = fs.split(LlamaForCausalLM(config), units="auto")
        made = fs.generate(state, fs.generation.hugging_face(model), [prompt], max_new=100)
    """
    expect("hugging_face(model)", [("model", model, Model, "what fs.split returned")])
    kind = type(model.module)
    takes = set(inspect.signature(kind.forward).parameters)
    name = next((name for name in CACHES if name in takes), None)
    config = getattr(model.module, "config", None)
    if name is None or config is None or _own_cache(kind):
        raise _no_cache(kind)
    if attends_over_ranks(model.module):
        raise PlanError(
            f"fs.generation.hugging_face: attn_implementation={config._attn_implementation!r} reads no cache: give "
            f"another model, fs.split of {kind.__name__} with attn_implementation='sdpa'; the state fits both"
        )
    make = import_module("transformers").DynamicCache

    def forward(params: Any, tokens: Tensor, cache: Any, places: Places) -> tuple[Tensor, Any]:
        past = make(config=config)
        if cache is not None:
            past = given(past, cache, places.keys.shape[1] - tokens.shape[1])
        options: dict[str, Any] = {name: past, "attention_mask": places.keys.long(), "use_cache": True}
        if name == "cache_params" and cache is not None:
            del options["attention_mask"]  # of recurrent layers alone: the new token is no padding
        if "position_ids" in takes:
            options["position_ids"] = places.positions
        out = model.apply(params, input_ids=tokens, training=False, **options)
        made = getattr(out, name, None)
        if type(made) is not type(past):
            raise _no_cache(kind)
        return out.logits, taken(made)

    return forward


def _own_cache(kind: type) -> bool:
    """Tell whether a model's own file has a class of caches."""
    library, file = import_module("transformers.cache_utils"), import_module(kind.__module__)
    found = [value for value in vars(file).values() if isinstance(value, type) and issubclass(value, library.Cache)]
    return any(value.__module__ == kind.__module__ for value in found)


def _no_cache(kind: type) -> PlanError:
    return PlanError(
        f"fs.generation.hugging_face: {kind.__name__} takes no DynamicCache of transformers: write its forward "
        f"(params, tokens, cache, places) by hand, or call its own generate in an evaluation step: "
        f"model.apply(params, tokens, method='generate', max_new_tokens=100)"
    )
