"""Leaves with their rules resolved against a mesh."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fshard.model.precision import Precision
from fshard.sharding.code import Code
from fshard.sharding.float8_leaves import check_products, unscaled
from fshard.sharding.kinds import kinds_of
from fshard.sharding.layout import box
from fshard.sharding.leaf import Leaf, ReadAs
from fshard.sharding.mesh import Mesh
from fshard.sharding.model_cuts import ModelCut
from fshard.sharding.rules import Decision, RuleLike
from fshard.sharding.spec import P, Shape
from fshard.sharding.stage_table import StageCut, StageFacts, StageTable, refuse_cut_leaves
from fshard.sharding.validate import check_aligned, check_kinds, check_opt, check_trainable
from fshard.sharding.wire import Wire, packed_format


@dataclass(frozen=True)
class Inputs:
    """The inputs of a plan beside its mesh: facts about the model, by path, and the rules as given.

    ``owners`` are the units of leaves; ``aliases`` have the first path of a tied leaf by each of its other paths.
    """

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]
    owners: Mapping[str, str]
    aliases: Mapping[str, str]
    frozen: frozenset[str]
    inits: Mapping[str, Any]
    rules: tuple[RuleLike, ...]
    wire: Wire
    code: Code = Code()
    stages: StageCut | None = None
    cuts: Mapping[str, ModelCut] = field(default_factory=dict)


def stages_of(source: Inputs, decided: Mapping[str, Decision], mesh: Mesh, batch: P) -> StageTable | None:
    """The stages of a plan; None of one without.

    Raises:
        PlanError: the model cannot be cut so, or a leaf is cut along the axis of stages.
    """
    if source.stages is None:
        return None
    nbytes = {path: math.prod(shape) * source.dtypes[path].itemsize for path, shape in source.shapes.items()}
    table = source.stages.table(StageFacts(source.shapes, nbytes, source.owners, source.aliases, batch.axes), mesh)
    specs = {path: [spec for spec in (d.at_rest, d.compute, d.opt) if spec is not None] for path, d in decided.items()}
    refuse_cut_leaves(table, [path for path, some in specs.items() if any(table.axis in spec.axes for spec in some)])
    return table


def resolve_leaves(
    source: Inputs, decided: Mapping[str, Decision], mesh: Mesh, batch: P, precision: Precision
) -> dict[str, Leaf]:
    """Each leaf with its rule resolved against the mesh.

    Args:
        source: the inputs of the plan.
        decided: what rules say of each leaf.
        batch: the spec of the batch.
        precision: the dtypes of compute and communication.

    Raises:
        PlanError: naming the leaves that a rule does not fit.
    """
    given = {path: decision.rule.trainable for path, decision in decided.items()}
    trained = {path: path not in source.frozen if train is None else train for path, train in given.items()}
    check_trainable(source.dtypes, given, trained)
    check_aligned(decided)
    leaves = {}
    for path, shape in source.shapes.items():
        at_rest, compute, rule, opt = decided[path]
        compute = at_rest.without(batch.axes) if compute is None else compute
        aliases = tuple(a for a, canonical in source.aliases.items() if canonical == path)
        held = box(shape, compute, mesh)[1]
        train = trained[path] and source.dtypes[path].is_floating_point
        leaves[path] = Leaf(
            path=path,
            shape=shape,
            dtype=source.dtypes[path],
            trainable=train,
            at_rest=at_rest,
            compute=compute,
            compute_shape=held,
            aliases=aliases,
            reading=ReadAs(
                precision if rule.precision is None else rule.precision,
                unscaled(held, source.dtypes[path], source.owners[path], (path, *aliases), source.code.module),
            ),
            align=None if at_rest.flat is None and opt is None else rule.align,
            opt=opt,
            kinds=kinds_of(rule.memory_kind, rule.opt_memory_kind, rule.update_on, train),
            wire=(rule.wire or source.wire) if source.dtypes[path].is_floating_point else Wire(),
            packed=packed_format(rule.packed),
        )
    check_opt(leaves.values(), mesh, batch.axes)
    check_products(leaves, decided, mesh)
    check_kinds(leaves.values(), {path: d.rule for path, d in decided.items()}, mesh)
    return leaves
