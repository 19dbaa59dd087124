"""The entries of tensor-parallel plans: what each style wants of its module, and the code that it puts around it."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard import collectives
from fshard.errors import PlanError
from fshard.model.around_calls import AroundCall, CutSize, plain, variant
from fshard.model.split import Model
from fshard.parallel.experts import combine, dispatch
from fshard.parallel.layer_styles import (
    Args,
    ColumnStyle,
    Kwargs,
    LatentStyle,
    RowStyle,
    SequenceStyle,
    SharedStyle,
    Style,
    SumStyle,
    VocabularyStyle,
    WidthStyle,
)
from fshard.parallel.plan_checks import EXPERTS, check_cut, check_data_axis
from fshard.parallel.routing import Routing
from fshard.sharding.mesh import Mesh


@dataclass(frozen=True)
class ExpertsStyle(Style):
    """Experts over an axis whose ranks have the same tokens: each rank computes what its experts do, and ranks add.

    ``experts``: the number of all of them. ``skips``: whether the module's forward takes the number after its last
    expert for "none", as those of ``transformers`` do that compute experts in groups.
    """

    experts: int = 0
    skips: bool = False

    def inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The sum over experts, equal on all ranks."""
        hidden, chosen, weights = _routed(module, args, kwargs)
        hidden, weights = collectives.pvary((hidden, weights), self.axis)
        count = self.experts // collectives.axis_size(self.axis)
        local = chosen - count * collectives.axis_index(self.axis)
        here = (local >= 0) & (local < count)
        mine = variant(module, {}, num_experts=count, _is_expert_parallel=True)
        if self.skips:
            out = plain(mine, (hidden, torch.where(here, local, count), weights * here), {})
        else:
            token, choice = here.nonzero(as_tuple=True)
            rows = _unweighted(mine, hidden[token], local[token, choice]) * weights[token, choice, None]
            out = torch.zeros_like(hidden).index_add(0, token, rows.to(hidden.dtype))
        return collectives.psum(out, self.axis)


@dataclass(frozen=True)
class DispatchStyle(Style):
    """Experts over a data axis: tokens go to the ranks of their experts and back. ``experts`` as above."""

    experts: int = 0

    local = True

    def inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The output for this rank's tokens."""
        check_data_axis(self.axis, type(module).__name__)
        hidden, chosen, weights = _routed(module, args, kwargs)
        routing = Routing(weights, chosen, weights.new_empty(0, self.experts))
        sent = dispatch(hidden, routing, axis=self.axis)
        counts = torch.tensor(sent.counts, device=hidden.device)
        numbers = torch.arange(len(counts), device=hidden.device).repeat_interleave(counts, output_size=len(sent.rows))
        mine = variant(module, {}, num_experts=len(counts), _is_expert_parallel=True)
        return combine(_unweighted(mine, sent.rows, numbers), sent).to(hidden.dtype)

    def _check(self, leaf: Tensor | None, dim: int) -> None:
        check_cut(leaf, self.axis, dim, EXPERTS, "the rules of fs.suggest_rules(model, mesh)")


def _routed(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor, Tensor]:
    """The three arguments of a module of experts."""
    given = (*args, *kwargs.values())
    if len(given) != 3 or not all(isinstance(x, Tensor) for x in given) or given[1].is_floating_point():
        raise PlanError(
            f"{type(module).__name__} was called with {len(given)} arguments, not as experts of transformers are, with "
            f"hidden states, the numbers of chosen experts, and their weights: leave it out of the model's plan"
        )
    hidden, chosen, weights = given
    return hidden, chosen, weights


def _unweighted(module: nn.Module, rows: Tensor, numbers: Tensor) -> Tensor:
    """The experts' results for rows, each of which has one expert. Experts' functions want at least one row."""
    if not len(rows):
        some = rows.sum(0, keepdim=True)
        return plain(module, (some, numbers.new_zeros(1, 1), rows.new_ones(1, 1)), {})[:0]  # type: ignore[no-any-return]
    return plain(module, (rows, numbers.unsqueeze(-1), rows.new_ones(len(rows), 1)), {})  # type: ignore[no-any-return]


LEAVES = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1, "grouped_gemm": 0}
"""By style, the dim that an entry for a parameter cuts."""

OWNERS = ("moe_tp_experts", "ep_dispatch_experts", "local_params")
"""The styles of modules whose parameters have entries of their own."""

EXPERT_STYLES = frozenset({"grouped_gemm", "ep_dispatch_experts"})
"""The styles over the axis of experts."""

COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
EMBEDDINGS = ("embedding_rowwise", "embedding_colwise")

STYLES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys((*COLUMNS, *ROWS), "a linear layer"),
        **dict.fromkeys(EMBEDDINGS, "an embedding"),
        **dict.fromkeys(("packed_colwise", "packed_rowwise", "grouped_gemm"), "a parameter of experts"),
        **dict.fromkeys(("moe_tp_experts", "ep_dispatch_experts"), "experts"),
        "mla_kv_a_proj": "a linear layer",
        **dict.fromkeys(("sequence_parallel", "replicated_with_grad_allreduce"), "a module"),
        **dict.fromkeys(("all_reduce", "local_params", "replicate"), "a module"),
    }
)
"""The known styles, and what each is for."""

ROUTED = ("hidden states", "numbers of chosen experts", "their weights")
"""The arguments of experts."""

GROUPED = ("grouped_mm", "batched_mm")
"""The implementations of experts in transformers that skip choices of an expert after the last one."""


class PlanEntry(NamedTuple):
    """An entry for one module, or for one parameter: its path, its style, and what lies there."""

    path: str
    style: str
    module: nn.Module | None
    owner: nn.Module | None
    leaf: Tensor | None


def problem(entry: PlanEntry, axis: str, mesh: Mesh, entries: Sequence[PlanEntry]) -> str:
    """Say why an entry cannot be followed; empty if it can."""
    if entry.module is None:
        owner = entry.path.rpartition(".")[0]
        fits = entry.style in (*LEAVES, "replicate")
        if fits and (entry.style == "replicate" or any(e.path == owner and e.style in OWNERS for e in entries)):
            return ""
        return f"{entry.path}: {entry.style!r} of a parameter, whose module has no entry that says how it computes"
    if wrong := _unfit(entry):
        return f"{entry.path}: {entry.style!r} is for {STYLES[entry.style]}, and this is {wrong}"
    ranks = mesh.shape[axis]
    for name, dim, size in _cuts(entry, entries):
        if size % ranks:
            what = f"{entry.path}.{name}: dim {dim} of {list(entry.module._parameters[name].shape)}"  # type: ignore[union-attr]
            more = "; resize_token_embeddings(pad_to_multiple_of=) makes it one" * (entry.style in EMBEDDINGS)
            return f"{what} is {size}, not a multiple of the {ranks} ranks of {axis!r}{more}"
    return _split_head(entry, axis, ranks) or _counted_heads(entry, entries)


def _heads(entry: PlanEntry) -> int:
    """The attention heads that an entry cuts; 0 where it cuts none."""
    width, out = getattr(entry.owner, "head_dim", None), getattr(entry.module, "out_features", 0)
    return out // width if entry.style == "colwise" and isinstance(width, int) and width and out % width == 0 else 0


def _split_head(entry: PlanEntry, axis: str, ranks: int) -> str:
    """Say that ranks would have parts of an attention head."""
    if (heads := _heads(entry)) % ranks:
        return f"{entry.path}: {heads} attention heads over the {ranks} ranks of {axis!r}: choose fewer ranks"
    return ""


def _counted_heads(entry: PlanEntry, entries: Sequence[PlanEntry]) -> str:
    """Say that a module of cut heads has a parameter with a number for each of them, which no entry cuts."""
    heads, path, known = _heads(entry), entry.path.rpartition(".")[0], {one.path for one in entries}
    if heads < 2 or entry.owner is None:
        return ""
    shapes = {f"{path}.{name}": leaf.shape for name, leaf in entry.owner._parameters.items() if leaf is not None}
    odd = [name for name, shape in shapes.items() if name not in known and tuple(shape) == (heads,)]
    return (
        f"{odd[0]}: a number for each of {heads} heads, and no entry for it where others cut the heads: each rank "
        f"would compute with all of them. Take away the entries of {path}.*"
        if odd
        else ""
    )


def _unfit(entry: PlanEntry) -> str:
    """A description of the module, if its style is not for it."""
    module, kind = entry.module, STYLES[entry.style]
    assert module is not None
    own = {name: leaf for name, leaf in module._parameters.items() if leaf is not None}
    what = f"a {type(module).__name__} with parameters {sorted(own)}"
    if kind == "a linear layer":
        return "" if isinstance(module, nn.Linear) and own.keys() <= {"weight", "bias"} else what
    if kind == "an embedding":
        return "" if isinstance(module, nn.Embedding) and own.keys() == {"weight"} and module.max_norm is None else what
    if kind == "experts":
        return _unfit_experts(module, {leaf.shape[0] for leaf in own.values()}, what)
    return what if kind == "a parameter of experts" else ""


def _unfit_experts(module: nn.Module, counts: set[int], what: str) -> str:
    """Say how a module is no experts: it has other numbers of them, or is called with other arguments than these."""
    count, given = (
        getattr(module, "num_experts", None),
        [*inspect.signature(type(module).forward).parameters.values()][1:],
    )
    if counts != {count}:
        return f"{what} for {sorted(counts)} experts, and num_experts={count}"
    if len(given) < len(ROUTED) and not any(one.kind is one.VAR_POSITIONAL for one in given):
        return (
            f"a {type(module).__name__}, called with {', '.join(map(str, given))} alone, not with {', '.join(ROUTED)}"
        )
    return ""


def _cuts(entry: PlanEntry, entries: Sequence[PlanEntry]) -> tuple[CutSize, ...]:
    """The cuts of a module's own parameters."""
    module = entry.module
    assert module is not None
    found = []
    for name, dim in _dims(entry, module, entries).items():
        leaf = module._parameters.get(name)
        if leaf is not None:
            number = max(dim + leaf.dim(), 0) if dim < 0 else dim
            found.append(CutSize(name, number, leaf.shape[number]))
    return tuple(found)


def _dims(entry: PlanEntry, module: nn.Module, entries: Sequence[PlanEntry]) -> dict[str, int]:
    """The dims that are cut, by the parameter's name; negative ones count from the end."""
    style = entry.style
    if style in (*COLUMNS, "embedding_rowwise"):
        return {"weight": 0, "bias": 0}
    if style in (*ROWS, "embedding_colwise"):
        return {"weight": 1}
    if STYLES[style] == "experts":
        return dict.fromkeys(module._parameters, 0)  # by whole experts, however the plan would cut each of them
    if style != "local_params":
        return {}
    within = {one.path.rpartition(".")[2]: one.style for one in entries if one.owner is module and one.module is None}
    return {name: LEAVES[kind] for name, kind in within.items() if kind in LEAVES}


def made(entry: PlanEntry, axis: str, entries: Sequence[PlanEntry]) -> AroundCall | None:
    """The code around a module; None for entries of parameters, which their modules have."""
    if entry.module is None or entry.style == "replicate":
        return None
    style, cuts = entry.style, _cuts(entry, entries)
    if style in COLUMNS:
        return ColumnStyle(axis, cuts, whole=style != "colwise")
    if style in ROWS:
        return RowStyle(axis, cuts, split=style != "rowwise")
    if style == "mla_kv_a_proj":
        return LatentStyle(axis, rotary=_rotary(entry))
    if style in ("moe_tp_experts", "ep_dispatch_experts"):
        count, config = cuts[0].size, getattr(entry.module, "config", None)
        if style == "ep_dispatch_experts":
            return DispatchStyle(axis, cuts, experts=count)
        return ExpertsStyle(axis, cuts, count, getattr(config, "_experts_implementation", None) in GROUPED)
    kinds: dict[str, type[Style]] = {
        "embedding_rowwise": VocabularyStyle,
        "embedding_colwise": WidthStyle,
        "sequence_parallel": SequenceStyle,
        "replicated_with_grad_allreduce": SharedStyle,
        "all_reduce": SumStyle,
        "local_params": Style,
    }
    return kinds[style](axis, cuts)


def _rotary(entry: PlanEntry) -> int:
    """The features of a latent projection that are turned by position."""
    for held in (entry.owner, getattr(entry.owner, "config", None)):
        if isinstance(width := getattr(held, "qk_rope_head_dim", None), int):
            return width
    raise PlanError(f"{entry.path}: 'mla_kv_a_proj' needs the attribute qk_rope_head_dim of its attention, an int")


def tied(model: Model, around: Mapping[str, AroundCall]) -> dict[str, AroundCall]:
    """The code around modules, and around those that share a cut leaf with one of them and have no entry.

    Raises:
        PlanError: such a module is neither an embedding nor a linear layer.
    """
    out = dict(around)
    paths: dict[str, list[str]] = {}
    for path, first in model.aliases.items():
        paths.setdefault(first, [first]).append(path)
    for shared in paths.values():
        owners = [path.rpartition(".")[0] for path in shared]
        held = [
            (owner, c)
            for owner in owners
            if owner in around
            for c in around[owner].cuts
            if f"{owner}.{c.name}" in shared
        ]
        for owner in owners if held else ():
            if owner not in out:
                out[owner] = _partner(model.module.get_submodule(owner), owner, around[held[0][0]].axis, held[0][1])
    return out


def _partner(module: nn.Module, path: str, axis: str, cut: CutSize) -> AroundCall:
    """The code around a module that shares its weight with one whose weight is cut along dim 0."""
    if cut.dim == 0 and isinstance(module, nn.Embedding) and module.max_norm is None:
        return VocabularyStyle(axis, (cut,))
    if cut.dim == 0 and isinstance(module, nn.Linear):
        bias: Any = () if module.bias is None else (CutSize("bias", 0, cut.size),)
        return ColumnStyle(axis, (cut, *bias), whole=True)
    raise PlanError(
        f"{path}: a {type(module).__name__} shares {cut.name} with a module whose {cut.name} the plan cuts along dim "
        f"{cut.dim}, and has no entry: give it one, or take the other one away"
    )
