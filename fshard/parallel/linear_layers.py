"""Linear layers cut over the ranks of an axis, and rules for their leaves.

Megatron-LM: Shoeybi et al. 2019, Korthikanti et al. 2022.

A column-parallel layer computes this rank's output features from all input features. A row-parallel layer sums over
ranks the products of their own input features. A pair of them needs one sum over ranks in the forward and one in the
backward. Between such pairs activations are equal on all ranks; with ``sequence_dim`` each rank has a slice of the
sequence there, and a reduce-scatter and an all-gather, which move equally many bytes, replace the sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fshard import collectives
from fshard.errors import PlanError
from fshard.parallel.plan_checks import check_cut, check_whole, divided
from fshard.sharding.mesh import Mesh
from fshard.sharding.rules import Rule
from fshard.sharding.spec import Entry, P, Shape


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    axis: str = "tp",
    sequence_dim: int | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """This rank's output features of a linear layer.

    Args:
        x: (..., in), the same on all ranks along the axis; with ``sequence_dim`` this rank's slice along that dim.
        weight: (out / ranks, in), this rank's rows: a leaf under ``column_rule``.
        bias: (out / ranks,), likewise.
        axis: the tensor-parallel axis.
        sequence_dim: the dim of ``x`` that the axis cuts, if any.
        mesh: where to look the axis up, if not on the mesh in scope.

    Returns:
        (..., out / ranks) with the whole sequence; each rank's own.

    Raises:
        PlanError: inside of a step, the plan does not cut weight or bias that way, or the axis is a data axis.
        AxisError: no mesh is in scope, or it has no such axis.

    >>> one = fs.make_mesh((1,), ("tp",))
    >>> fs.parallel.column_linear(torch.ones(2, 3), torch.ones(4, 3), mesh=one).shape
    torch.Size([2, 4])
    """
    for leaf in (weight, bias):
        check_cut(leaf, axis, 0, "column_linear", "fs.parallel.column_rule")
    if sequence_dim is None:
        x = collectives.pvary(x, axis, mesh=mesh)
    else:
        x = collectives.all_gather(x, axis, dim=sequence_dim, tiled=True, mesh=mesh)
    return F.linear(x, weight, bias)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    axis: str = "tp",
    sequence_dim: int | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """A linear layer of this rank's input features, summed over ranks.

    Args:
        x: (..., in / ranks), each rank's own, such as the result of ``column_linear``.
        weight: (out, in / ranks), this rank's columns: a leaf under ``row_rule``.
        bias: (out,), whole on every rank; added once.
        axis: the tensor-parallel axis.
        sequence_dim: the dim that cuts the result into slices, one a rank; None for the whole result.
        mesh: where to look the axis up, if not on the mesh in scope.

    Returns:
        (..., out), the same on all ranks; with ``sequence_dim`` this rank's slice.

    Raises:
        PlanError: inside of a step, the plan does not cut them that way, or the axis is a data axis.
        CollectiveError: the axis does not divide ``sequence_dim``.
        AxisError: no mesh is in scope, or it has no such axis.

    >>> one = fs.make_mesh((1,), ("tp",))
    >>> fs.parallel.row_linear(torch.ones(2, 3), torch.ones(4, 3), mesh=one)[0]
    tensor([3., 3., 3., 3.])
    """
    check_cut(weight, axis, 1, "row_linear", "fs.parallel.row_rule")
    check_whole(bias, axis, "row_linear")
    y: Tensor = F.linear(x, weight)
    if sequence_dim is None:
        y = collectives.psum(y, axis, mesh=mesh)
    else:
        y = collectives.psum_scatter(y, axis, dim=sequence_dim, tiled=True, mesh=mesh)
        bias = collectives.pvary(bias, axis, mesh=mesh) if bias is not None else None
    return y if bias is None else y + bias


def local_heads(heads: int, *, axis: str = "tp", mesh: Mesh | None = None) -> int:
    """The number of attention heads of each rank.

    A column-parallel layer with several outputs for each head, such as queries, keys and values, must have the head
    first: ``(heads, 3, width)``, so that a cut along dim 0 leaves heads whole.

    Args:
        heads: the heads of all ranks.
        axis: the tensor-parallel axis.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        PlanError: the axis does not divide the heads.

    >>> fs.parallel.local_heads(8, mesh=fs.make_mesh((1,), ("tp",)))
    8
    """
    return divided(heads, axis, "attention heads", mesh)


@dataclass(frozen=True)
class DimCut:
    """The tactic that cuts a leaf along a dim and flat-shards the rest. Leaves without that dim are not cut."""

    dim: int
    axis: str
    flat: Entry

    def __call__(self, shape: Shape) -> P:
        """The spec for a leaf of this shape."""
        cut = (*[None] * self.dim, self.axis, *[None] * (len(shape) - self.dim - 1)) if self.dim < len(shape) else ()
        return P(*cut, flat=self.flat)


def column_rule(pattern: str, axis: str = "tp", *, flat: Entry = None, **options: Any) -> Rule:
    """The rule for weights (out, in) and biases (out,) of ``column_linear``, and for (vocabulary, width) of
    ``vocab_embedding``: cut along dim 0.

    Args:
        pattern: a regular expression for the whole path.
        axis: the tensor-parallel axis.
        flat: the axis or axes that flat-shard the rest; None keeps it whole on each rank.
        **options: other fields of ``fs.Rule``.

    >>> fs.parallel.column_rule(r".*up\\.weight", flat="data").at_rest((8, 4))
    P('tp', None, flat='data')
    """
    return Rule(pattern, DimCut(0, axis, flat), **options)


def row_rule(pattern: str, axis: str = "tp", *, flat: Entry = None, **options: Any) -> Rule:
    """The rule for weights (out, in) of ``row_linear``, cut along dim 1, and for its biases (out,), which are whole.

    Args:
        pattern: a regular expression for the whole path.
        axis: the tensor-parallel axis.
        flat: the axis or axes that flat-shard the rest; None keeps it whole on each rank.
        **options: other fields of ``fs.Rule``.

    >>> rule = fs.parallel.row_rule(r".*down\\..*", flat="data")
    >>> rule.at_rest((4, 8)), rule.at_rest((4,))
    (P(None, 'tp', flat='data'), P(flat='data'))
    """
    return Rule(pattern, DimCut(1, axis, flat), **options)


def expert_rule(pattern: str, axis: str = "ep", *, flat: Entry = None, **options: Any) -> Rule:
    """The rule for leaves of experts (experts, ...): cut along dim 0, and never gathered over the axis, although it is
    a data axis whose ranks have their own tokens.

    Args:
        pattern: a regular expression for the whole path.
        axis: the expert-parallel axis.
        flat: the axis or axes, without that one, that flat-shard the rest.
        **options: other fields of ``fs.Rule``.

    >>> rule = fs.parallel.expert_rule(r".*experts\\..*", flat=("replica", "data"))
    >>> rule.at_rest((8, 4, 4)), rule.compute
    (P('ep', None, None, flat=('replica', 'data')), P('ep'))
    """
    return Rule(pattern, DimCut(0, axis, flat), P(axis), **options)


def megatron_rules(
    *, column: str | Sequence[str], row: str | Sequence[str], axis: str = "tp", flat: Entry = None
) -> list[Rule]:
    """The rules of a model of tensor-parallel blocks. Leaves that no pattern matches are whole along the axis.

    Args:
        column: patterns of column-parallel layers and of the embedding.
        row: patterns of row-parallel layers.
        axis: the tensor-parallel axis.
        flat: the axis or axes that flat-shard all leaves besides; None keeps the rest whole.

    >>> rules = fs.parallel.megatron_rules(column=r".*(qkv|up)\\.weight", row=r".*(out|down)\\.weight", flat="data")
    >>> rules[0].at_rest((8, 8)), rules[1].at_rest((8, 8)), rules[2].at_rest
    (P('tp', None, flat='data'), P(None, 'tp', flat='data'), P(flat='data'))
    """
    columns, rows = ([given] if isinstance(given, str) else list(given) for given in (column, row))
    if not columns and not rows:
        raise PlanError("megatron_rules: no layer is parallel; name at least one in column= or row=")
    rules = [column_rule(pattern, axis, flat=flat) for pattern in columns]
    rules += [row_rule(pattern, axis, flat=flat) for pattern in rows]
    return [*rules, Rule(".*", P(flat=flat))]
