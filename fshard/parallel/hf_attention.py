"""Attention over a sequence that is cut over ranks, for unchanged models of Hugging Face.

transformers asks a registry for the attention function that a configuration names, and for one that makes its mask.
Both functions here are values that hold the names of axes and nothing else: keys and values of a call end with it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import collectives
from fshard.arguments import Want, expect
from fshard.collectives.linear import is_fake
from fshard.collectives.scope import resolve
from fshard.errors import PlanError, missing_extra
from fshard.parallel.plan_checks import divided
from fshard.parallel.ring import ring_attention
from fshard.parallel.ulysses import check_cut, check_documents, ulysses_attention
from fshard.parallel.zigzag import unzigzag
from fshard.torch_internals import assert_async

RING, ULYSSES = "fshard_ring", "fshard_ulysses"
"""The names in transformers' registry."""

PADDING = -1
"""The document of padding."""

HARMLESS = frozenset(
    {
        *("position_ids", "documents", "labels", "shift_labels", "num_items_in_batch", "use_cache", "cache_position"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
    }
)
"""Arguments of a model's call that reach its attention and change nothing there, or are used here."""

MASKS = frozenset(
    {
        *("and_masks", "causal_mask_function", "bidirectional_mask_function"),
        *("packed_sequence_mask_function", "remap_positions_for_packed_sequence"),
    }
)
"""The functions of transformers of which a mask may be made. Those of packed sequences are guesses from positions,
which jump where a sequence is cut; ``documents`` take their place."""

ATTENTION = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})
"""The kinds of layers in a configuration whose tokens meet in attention alone."""

WINDOW = "sliding_window_overlay"
"""The function of transformers that makes a sliding window."""


def register_attention(*, axis: str = "cp", heads: str | None = None) -> None:
    """Register ``attn_implementation="fshard_ring"`` and ``"fshard_ulysses"`` with transformers, for this process.

    A model of such a configuration computes attention over the sequence of all ranks, in ``shard_map``, in loss
    functions of steps, and under ``use_mesh``. Elsewhere it raises: it never attends to a rank's own tokens alone. Give
    each rank its part and its positions by ``context_batch``; a model whose positions are not those of the cut sequence
    is refused. A call with other axes replaces the registration.

    Args:
        axis: the context-parallel axis, a data axis: of the ring, or of Ulysses' heads where ``heads`` is None.
        heads: another data axis, whose ranks share the heads in ``"fshard_ulysses"``, inside of a ring over ``axis``.

    Raises:
        PlanError: an axis is no name, or both are one.
        ImportError: transformers is not installed, or has no such registry (before 5).

    Models raise a ``PlanError`` for what is not computed here: dropout, sliding windows shorter than the sequence,
    softcaps, sinks, keys of a cache, masks but those of padding, and arguments that are not known.

    >>> fs.parallel.register_attention()  # before the model is made
    """
    wants: list[Want] = [("axis", axis, str, "the name of a mesh axis")]
    wants += [] if heads is None else [("heads", heads if heads != axis else None, str, f"an axis other than {axis!r}")]
    expect("register_attention(axis=, heads=)", wants)
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise missing_extra("fs.parallel.register_attention", "transformers>=5", "examples") from error
    axes = (axis,) if heads is None else (axis, heads)
    for name, function in ((RING, ContextAttention(RING, (axis,))), (ULYSSES, ContextAttention(ULYSSES, axes))):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, function.mask)


def attends_over_ranks(module: Any) -> bool:
    """Tell whether a model of transformers computes attention over a sequence that is cut over ranks."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) in (RING, ULYSSES)


@dataclass(frozen=True)
class ContextAttention:
    """An attention function of transformers' registry, and its mask.

    Attributes:
        name: in the registry.
        axes: that cut the sequence, the ring's first.
    """

    name: str
    axes: tuple[str, ...]

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of (batch, heads, time, width), given back as (batch, time, heads, width)."""
        where = f"{self.name} in {type(module).__name__}"
        layer = getattr(module, "layer_idx", None)
        where += "" if layer is None else f" of layer {layer}"
        everyone = resolve(self.axes)
        whole = query.shape[2] * everyone.size
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if key.shape[2] != query.shape[2]:
            raise PlanError(
                f"{where}: {key.shape[2]} keys for {query.shape[2]} queries: keys of a cache, or of another sequence, "
                f'are not cut over ranks. Give no past_key_values; generate with attn_implementation="sdpa"'
            )
        _check_layers(where, getattr(module, "config", None))
        check_cut(where, query, everyone, causal)
        if self.name == ULYSSES:
            divided(query.shape[1], self.axes[-1], f"heads in {where}")
        changes = {"dropout": dropout or None, "sliding_window": sliding_window, **kwargs}
        _check_arguments(where, changes, whole)
        check_documents(where, query, kwargs.get("documents"))
        documents = _documents(where, query, attention_mask, kwargs.get("documents"))
        if not layer:
            self._check_positions(where, kwargs.get("position_ids"), documents, query, causal)
        out = self._attention(query, key, value, causal=causal, scale=scaling, documents=documents)
        return out.transpose(1, 2).contiguous(), None

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if self.name == RING:
            return ring_attention(query, key, value, axis=self.axes[0], **options)
        ring = self.axes[0] if len(self.axes) > 1 else None
        return ulysses_attention(query, key, value, axis=self.axes[-1], ring=ring, **options)

    def mask(
        self,
        *,
        q_length: int,
        mask_function: Callable[..., Any],
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        **_: Any,
    ) -> Tensor | None:
        """The mask of padding, (batch, time) bool, if there is one; all else is known without a mask."""
        whole = q_length * resolve(self.axes).size
        fits = {WINDOW} if local_size is not None and local_size >= whole else set()
        strange = sorted(_roots(mask_function) - MASKS - fits)
        if strange:
            raise PlanError(
                f"{self.name}: a mask made of transformers' {', '.join(strange)} is not computed over a sequence of "
                f"{whole} tokens that is cut over ranks: only causal and whole attention, padding, and documents are"
            )
        return attention_mask

    def _check_positions(
        self, where: str, positions: Any, documents: Tensor | None, query: Tensor, causal: bool
    ) -> None:
        """Refuse positions that do not rise by one from token to token of the whole sequence, inside of a document.

        Without a causal mask the cut may be any; then a position that a document has twice is refused.
        """
        batch, time = query.shape[0], query.shape[2]
        if not isinstance(positions, Tensor) or positions.shape not in ((batch, time), (1, time)):
            shown = list(positions.shape) if isinstance(positions, Tensor) else positions
            raise PlanError(
                f"{where}: position_ids={shown} at attention, not ({batch}, {time}), so it is not known whether "
                f"positions are those of the cut sequence. Models that do not hand them on are not supported"
            )
        size = resolve(self.axes).size
        places = self._whole(positions.expand(batch, -1), causal)
        ids = torch.zeros_like(places) if documents is None else self._whole(documents, causal)
        if not causal:
            order = (ids * (places.max() + 1) + places).argsort(1)
            places, ids = places.gather(1, order), ids.gather(1, order)
        step = places.diff(dim=1)
        wrong = (step != 1 if causal else step == 0) & (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
        says = (
            f"{where}: position_ids do not follow the whole sequence of {time * size} tokens, cut"
            f"{' by zigzag' * causal} over {size} ranks of {'+'.join(self.axes)}"
        )
        remedy = "give position_ids, as fs.parallel.context_batch does: transformers counts a rank's own tokens"
        if is_fake(wrong):
            return
        if wrong.device.type != "cpu":
            assert_async(~wrong.any(), f"{says}: {remedy}")
        elif wrong.any():
            row, at = wrong.nonzero()[0].tolist()
            before, here = places[row, at : at + 2].tolist()
            raise PlanError(f"{says}: in row {row} token {at} has {before}, and token {at + 1} has {here}; {remedy}")

    def _whole(self, x: Tensor, causal: bool) -> Tensor:
        """The whole sequence, and in its order if it was cut by zigzag."""
        whole: Tensor = collectives.all_gather(x.detach(), self.axes, dim=1, tiled=True)
        size = resolve(self.axes).size
        return unzigzag(whole, size) if causal and size > 1 else whole


def _documents(where: str, query: Tensor, mask: Tensor | None, documents: Tensor | None) -> Tensor | None:
    """The document of each token; padding is a document of its own."""
    if mask is None:
        return documents
    expected = (query.shape[0], query.shape[2])
    if mask.shape != expected:
        raise PlanError(
            f"{where}: an attention mask {list(mask.shape)} for {expected[0]} rows of {expected[1]} tokens on this "
            f"rank: only masks of padding, {list(expected)} and cut as the tokens are, go with a cut sequence"
        )
    kept = mask.bool()
    if documents is None:
        return kept.long() - 1
    return documents.masked_fill(~kept, PADDING)


def _check_layers(where: str, config: Any) -> None:
    """Refuse models whose other layers mix tokens, too, and would mix those of a rank alone."""
    kinds = {kind for name in ("layer_types", "layers_block_type") for kind in getattr(config, name, None) or ()}
    if kinds - ATTENTION:
        raise PlanError(
            f"{where}: this model has layers of {sorted(kinds - ATTENTION)}, which mix the tokens of a rank alone: "
            f"only attention is computed over a sequence that is cut over ranks"
        )


def _check_arguments(where: str, given: dict[str, Any], whole: int) -> None:
    """Refuse what would change attention, and is not computed here."""
    window = given["sliding_window"]
    harmless = HARMLESS if window is None or window < whole else {*HARMLESS, "sliding_window"}
    shown = {
        name: list(x.shape) if isinstance(x, Tensor) else x
        for name, x in given.items()
        if name not in harmless and x is not None and x is not False
    }
    if shown:
        raise PlanError(
            f"{where}: {', '.join(f'{name}={x}' for name, x in shown.items())} is not computed over a sequence of "
            f"{whole} tokens that is cut over ranks. Switch it off in the configuration, or leave the argument out; "
            f"documents= keeps packed documents apart"
        )


def _roots(function: Any) -> set[str]:
    """The names of the functions of which a mask function is made."""
    return {each.__qualname__.partition(".")[0] for each in _functions(function)}


def _functions(function: Any) -> Iterator[Any]:
    if isinstance(function, tuple | list):
        for each in function:
            yield from _functions(each)
    elif callable(function) and hasattr(function, "__qualname__"):
        yield function
        for cell in getattr(function, "__closure__", None) or ():
            yield from _functions(cell.cell_contents)
