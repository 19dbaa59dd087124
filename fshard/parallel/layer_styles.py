"""Code around the modules of a model that somebody else wrote, which makes them parallel over an axis.

Each class does what one kind of entry of a tensor-parallel plan says: Hugging Face's ``"colwise"``, ``"rowwise"`` and
others. The module computes with the leaves that it is given, this rank's parts. Without a mesh in scope, on one that
lacks the axis, or along which there is one rank, a call is that of the module alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fshard import collectives
from fshard.collectives.scope import bound_size
from fshard.errors import PlanError
from fshard.model.around_calls import AroundCall, plain, variant
from fshard.parallel.plan_checks import check_cut, path_of
from fshard.parallel.sequence import join_sequence, shared, split_sequence
from fshard.parallel.vocab import check_ids

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class Style(AroundCall):
    """Code around a module's calls that does nothing where the axis has one rank."""

    def call(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The call, parallel over the axis of the mesh in scope.

        Raises:
            PlanError: a leaf is not this rank's part.
        """
        ranks = bound_size(self.axis)
        for name, dim, size in self.cuts:
            leaf = module._parameters[name]
            if leaf is not None and leaf.shape[dim] * ranks != size:
                raise PlanError(
                    f"{type(module).__name__}.{name} {path_of(leaf)}: {list(leaf.shape)} along dim {dim} is not one of "
                    f"{ranks} parts of {size}, over axis {self.axis!r} of the mesh in scope: a plan has the rules of "
                    f"fs.suggest_rules(model, mesh); whole parameters are for calls without a mesh in scope"
                )
            if ranks > 1:
                self._check(leaf, dim)
        return plain(module, args, kwargs) if ranks == 1 else self.inside(module, args, kwargs)

    def _check(self, leaf: Tensor | None, dim: int) -> None:
        check_cut(leaf, self.axis, dim, type(self).__name__, "the rules of fs.suggest_rules(model, mesh)")

    def inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The call, where the axis has several ranks."""
        return plain(module, args, kwargs)


@dataclass(frozen=True)
class ColumnStyle(Style):
    """A linear layer of this rank's output features, of an input that is equal on all ranks.

    ``whole``: gather the output.
    """

    whole: bool = False

    def inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The output features of this rank, or of all."""
        out = plain(module, *first(args, kwargs, lambda x: collectives.pvary(x, self.axis)))
        return join_sequence(out, -1, axis=self.axis) if self.whole else out


@dataclass(frozen=True)
class RowStyle(Style):
    """A linear layer of this rank's input features, summed over ranks. ``split``: the input is equal on all ranks."""

    split: bool = False

    def inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The sum over ranks, equal on all of them."""
        if self.split:
            args, kwargs = first(args, kwargs, lambda x: split_sequence(x, -1, axis=self.axis))
        bias = module._parameters.get("bias")
        out = collectives.psum(plain(variant(module, {"bias": None}), args, kwargs), self.axis)
        return out if bias is None else out + bias


@dataclass(frozen=True)
class VocabularyStyle(Style):
    """An embedding of this rank's rows: each rank looks up the tokens that it has, and ranks add what they found."""

    def inside(self, module: Any, args: Args, kwargs: Kwargs) -> Any:
        """The embeddings, equal on all ranks."""
        rows, start = module.weight.shape[0], module.weight.shape[0] * collectives.axis_index(self.axis)
        here: list[Tensor] = []

        def local(tokens: Tensor) -> Tensor:
            check_ids(tokens, rows * bound_size(self.axis), None, type(module).__name__)
            mine: Tensor = tokens - start
            here.append((mine >= 0) & (mine < rows))
            return mine * here[0]

        pad = module.padding_idx
        pad = pad - start if pad is not None and start <= pad < start + rows else None
        mine = variant(module, {}, num_embeddings=rows, padding_idx=pad)
        found: Tensor = plain(mine, *first(args, kwargs, local))
        return collectives.psum(found * here[0].unsqueeze(-1), self.axis)


@dataclass(frozen=True)
class WidthStyle(Style):
    """An embedding of this rank's columns, gathered."""

    def inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The embeddings, equal on all ranks."""
        return join_sequence(plain(module, args, kwargs), -1, axis=self.axis)


@dataclass(frozen=True)
class SharedStyle(Style):
    """A module whose parameters are equal on all ranks, and whose input is each rank's own, such as the norm of heads.

    The gradient of a parameter is the sum over ranks.
    """

    def inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The output for this rank's input."""
        return plain(varying(module, self.axis), args, kwargs)


@dataclass(frozen=True)
class SequenceStyle(Style):
    """A module that works on each token alone: ranks compute slices of the sequence, dim 1, and gather them."""

    def inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The output for the whole sequence."""
        args, kwargs = first(args, kwargs, lambda x: split_sequence(x, 1, axis=self.axis))
        return join_sequence(plain(varying(module, self.axis), args, kwargs), 1, axis=self.axis)


@dataclass(frozen=True)
class SumStyle(Style):
    """A module whose output is a term of a sum over ranks."""

    def inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The sum, equal on all ranks."""
        out = plain(module, args, kwargs)
        return None if out is None else collectives.psum(out, self.axis)


@dataclass(frozen=True)
class LatentStyle(Style):
    """The projection of multi-head latent attention (DeepSeek-V2), equal on all ranks, whose last ``rotary`` features
    meet each rank's own heads; the features before them meet a column-parallel layer first."""

    rotary: int = 0

    def inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The projection."""
        out = plain(module, args, kwargs)
        kept = out[..., : out.shape[-1] - self.rotary]
        turned = collectives.pvary(out[..., out.shape[-1] - self.rotary :], self.axis)
        return torch.cat((kept, turned), -1)


def first(args: Args, kwargs: Mapping[str, Any], change: Callable[[Any], Any]) -> tuple[Args, Kwargs]:
    """Arguments with the first one changed, whether it comes by position or by name."""
    if args:
        return (change(args[0]), *args[1:]), dict(kwargs)
    name, value = next(iter(kwargs.items()))
    return (), {**kwargs, name: change(value)}


def varying(module: nn.Module, axis: str) -> nn.Module:
    """The module with its own parameters as values that may differ between ranks."""
    return variant(module, {n: shared(x, axis=axis) for n, x in module._parameters.items() if x is not None})
