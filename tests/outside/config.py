"""Models of Hugging Face transformers from their configurations, and the sizes that many of them share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.outside.case import VOCAB, Batch, Outside


def hf(
    config: str, model: str, batch: Callable[[torch.Generator], Batch], options: dict[str, Any], **rest: Any
) -> Outside:
    """A case of ``transformers``; options that are pairs are configurations themselves."""

    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, model)(_configured(config, options))
        assert isinstance(made, nn.Module)
        return made

    return Outside(model, make, batch, **rest)


def _configured(name: str, options: dict[str, Any]) -> Any:
    import transformers

    nested = {key: _configured(*value) if isinstance(value, tuple) else value for key, value in options.items()}
    return getattr(transformers, name)(**nested)


DECODER = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
DECODER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
ENCODER = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
ENCODER |= {"num_attention_heads": 4, "max_position_embeddings": 64}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEEING = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SEEING |= {"image_size": 16, "patch_size": 4}
RESNET = ("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"})
