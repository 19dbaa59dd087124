"""Rules for the leaves of parallel layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fshard.errors import PlanError
from fshard.sharding.rules import Rule
from fshard.sharding.spec import Entry, P, Shape


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

    >>> column_rule(r".*up\\.weight", flat="data").at_rest((8, 4))
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

    >>> rule = row_rule(r".*down\\..*", flat="data")
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

    >>> rule = expert_rule(r".*experts\\..*", flat=("replica", "data"))
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

    >>> rules = megatron_rules(column=r".*(qkv|up)\\.weight", row=r".*(out|down)\\.weight", flat="data")
    >>> rules[0].at_rest((8, 8)), rules[1].at_rest((8, 8)), rules[2].at_rest
    (P('tp', None, flat='data'), P(None, 'tp', flat='data'), P(flat='data'))
    """
    columns, rows = ([given] if isinstance(given, str) else list(given) for given in (column, row))
    if not columns and not rows:
        raise PlanError("megatron_rules: no layer is parallel; name at least one in column= or row=")
    rules = [column_rule(pattern, axis, flat=flat) for pattern in columns]
    rules += [row_rule(pattern, axis, flat=flat) for pattern in rows]
    return [*rules, Rule(".*", P(flat=flat))]
