"""``fs.causal_lm_loss``: the loss function of a Hugging Face decoder, with logits of one chunk of rows at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fshard.arguments import described, expect
from fshard.collectives.scope import bound_size
from fshard.errors import PlanError
from fshard.lora.modules import A, B
from fshard.losses.chunked_cross_entropy import chunked_cross_entropy
from fshard.model.split import Model
from fshard.parallel.hf_attention import attends_over_ranks
from fshard.parallel.layer_styles import ColumnStyle
from fshard.parallel.plan_checks import cut_along
from fshard.runtime.engine.mean import Mean

HEAD = "lm_head"
"""The submodule that makes logits, in every class below."""

DECODERS: Mapping[str, str] = {
    "LlamaForCausalLM": "model",
    "MistralForCausalLM": "model",
    "Qwen2ForCausalLM": "model",
    "Qwen3ForCausalLM": "model",
    "Gemma2ForCausalLM": "model",
    "GPT2LMHeadModel": "transformer",
}
"""The submodule that makes hidden states, by class. Their forwards do nothing but this, the head and the softcap."""

SHIFTED = "shift_labels"
"""The entry of a batch with the label of each token's next one."""

SOFTCAP = "final_logit_softcapping"
"""The entry of a configuration that caps logits."""


def causal_lm_loss(
    model: Model, *, chunks: int, z_loss: float = 0.0, label_smoothing: float = 0.0, ignore_index: int = -100
) -> Callable[[Any, Mapping[str, Any]], Mean]:
    """A loss function of parameters and batch: that of ``model.apply(params, **batch).loss``, without whole logits.

    Labels are shifted by one token, as transformers does, unless the batch has ``shift_labels``, which are shifted
    already. ``fs.chunked_cross_entropy`` has the loss.

    Args:
        model: what ``fs.split`` made of a ``LlamaForCausalLM``, ``MistralForCausalLM``, ``Qwen2ForCausalLM``,
            ``Qwen3ForCausalLM``, ``Gemma2ForCausalLM`` or ``GPT2LMHeadModel``; ``fs.lora.wrap`` may have given it
            adapters, and ``fs.parallel.parallelize`` may have cut it: then no rank has logits of the whole
            vocabulary. Its head must be no unit.
        chunks: into how many parts the rows of logits, a microbatch's tokens, are cut.
        z_loss: weight of the squared log-sum-exp.
        label_smoothing: from 0 to 1.
        ignore_index: labels that do not count. Give it to padding, as for transformers: the attention mask hides
            tokens from attention alone.

    Returns:
        ``loss(params, batch)``, an ``fs.Mean`` over the labels that count. The batch is a mapping with ``labels``
        (rows, tokens); everything else in it, such as ``input_ids`` and ``attention_mask``, goes to the decoder.

    Raises:
        PlanError: the model is of another class, or its head is a unit or no linear layer; a batch has no labels, or,
            for a sequence that is cut over ranks, no ``shift_labels``.

    Example::

        model = fs.split(LlamaForCausalLM(config), units="auto")
        step = fs.make_train_step(fs.causal_lm_loss(model, chunks=8), opt, plan)
    """
    expect("fs.causal_lm_loss(model)", [("model", model, Model, "what fs.split(module) returned")])
    decoder, head = _found(model)
    softcap = getattr(getattr(model.module, "config", None), SOFTCAP, None)
    options: dict[str, Any] = {
        "z_loss": z_loss,
        "label_smoothing": label_smoothing,
        "ignore_index": ignore_index,
        "softcap": softcap,
    }

    def loss(params: Any, batch: Mapping[str, Any]) -> Mean:
        following = _following(model, batch, ignore_index)
        if not attends_over_ranks(model.module) and (axes := cut_along(head.leaf(params, "weight"), 1)):
            raise PlanError(
                f"fs.causal_lm_loss: batch= cuts sequences over the ranks of {axes}, and the attention of this model "
                f"sees a rank's own tokens alone: call fs.parallel.register_attention() and build the model with "
                f"attn_implementation='fshard_ring' or 'fshard_ulysses'"
            )
        given = {name: each for name, each in batch.items() if name not in ("labels", SHIFTED)}
        hidden = model.apply(params, method=decoder, **{"use_cache": False, **given}).last_hidden_state
        hiddens, weights = head.pairs(params, hidden)
        axis = None if head.axis is None or bound_size(head.axis) == 1 else head.axis
        found: Mean = chunked_cross_entropy(
            hiddens, weights, following, chunks=chunks, bias=head.bias(params), reduction="parts", axis=axis, **options
        )
        return found

    return loss


def _following(model: Model, batch: Any, ignore_index: int) -> Any:
    """The label of each token's next one.

    Raises:
        PlanError: the batch has no labels; or it is a part of a sequence, without ``shift_labels``.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        has = f"the keys {list(batch)}" if isinstance(batch, Mapping) else described(batch)
        raise PlanError(f"fs.causal_lm_loss: a batch with {has}: give a mapping with labels, a tensor (rows, tokens)")
    shifted = batch.get(SHIFTED)
    if shifted is None and attends_over_ranks(model.module):
        raise PlanError(
            f"fs.causal_lm_loss: this rank's labels {list(labels.shape)} are a part of the sequence, so the token "
            f"after each of its chunks is on another rank: give shift_labels, as fs.parallel.context_batch does"
        )
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index) if shifted is None else shifted


def takes_chunks(module: nn.Module) -> bool:
    """Tell whether a module is of a class that ``causal_lm_loss`` knows."""
    kind = type(module)
    return kind.__name__ in DECODERS and kind.__module__.startswith("transformers.models.")


@dataclass(frozen=True)
class LinearHead:
    """A head's leaves in a tree of parameters, by their paths."""

    paths: Mapping[str, str]  # by their names in the module
    scale: float  # of adapters
    axis: str | None  # over which ranks have parts of the vocabulary

    def pairs(self, params: Any, hidden: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Hidden states and weights whose products add to the logits."""
        hiddens, weights = [hidden], [self.leaf(params, "weight")]
        if "weight" + A in self.paths:
            a, b = self.leaf(params, "weight" + A), self.leaf(params, "weight" + B)
            low = F.linear(hidden.to(a.dtype), a) * self.scale
            hiddens, weights = [hidden, low.to(hidden.dtype)], [*weights, b.to(weights[0].dtype)]
        return hiddens, weights

    def bias(self, params: Any) -> Tensor | None:
        """The head's bias, if it has one."""
        return self.leaf(params, "bias") if "bias" in self.paths else None

    def leaf(self, params: Any, name: str) -> Any:
        """A leaf of the head, by its name in the module."""
        for key in self.paths[name].split("."):
            params = params[key]
        return params


def _found(model: Model) -> tuple[str, LinearHead]:
    """The name of the decoder, and the head."""
    module = model.module
    kind = type(module)
    if not takes_chunks(module):
        raise PlanError(
            f"fs.causal_lm_loss: {kind.__module__}.{kind.__name__} is none of transformers' {', '.join(DECODERS)}, "
            f"whose forwards are known to be a decoder and {HEAD!r}: call fs.chunked_cross_entropy(hidden, weight, "
            f"labels, chunks=) in a loss function of your own"
        )
    decoder, head = DECODERS[kind.__name__], getattr(module, HEAD, None)
    plain = isinstance(head, nn.Linear) and not (head._forward_hooks or head._forward_pre_hooks)
    if not isinstance(getattr(module, decoder, None), nn.Module) or not plain:
        raise PlanError(
            f"fs.causal_lm_loss: looked for {decoder!r}, a module, and {HEAD!r}, an nn.Linear without hooks, in "
            f"{kind.__name__}, and found {described(head)} as {HEAD!r}: call fs.chunked_cross_entropy in a loss "
            f"function of your own"
        )
    if HEAD in model.units:
        raise PlanError(
            f"fs.causal_lm_loss: {HEAD!r} is a unit, whose weight only its own call may read: leave it out of "
            f"fs.split(units=), as units='auto' does"
        )
    assert head is not None
    named = {name: f"{HEAD}.{name}" for name, each in head._parameters.items() if each is not None}
    paths = {name: model.aliases.get(path, path) for name, path in named.items()}
    around = model.around.get(HEAD)
    if not (around is None or isinstance(around, ColumnStyle)):
        raise PlanError(
            f"fs.causal_lm_loss: the plan of the model cuts the inputs of {HEAD!r} over {around.axis!r}, and the loss "
            f"wants its rows cut, or all of it: fs.parallel.parallelize(model, mesh, {{{HEAD!r}: 'colwise'}})"
        )
    axis = None if around is None else around.axis
    return decoder, LinearHead(paths, float(vars(head).get("lora_scale", 1.0)), axis)
