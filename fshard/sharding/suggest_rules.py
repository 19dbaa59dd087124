"""Proposals of rules, and what a plan without units costs."""

import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from fshard import tree
from fshard.arguments import Want, expect, size_text
from fshard.errors import PlanError
from fshard.model.split import Model
from fshard.model.suggest_units import largest, repeated
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.model_cuts import cut_rules, model_cuts
from fshard.sharding.rules import RuleLike
from fshard.sharding.spec import P, Shape, fsdp

LARGE = 16 << 20
"""Bytes from which on a model without units costs something."""

REPLICAS = ("replica", "replicas", "ddp", "dp_replicate")
OTHERS = tuple("tp tensor model ep expert sp sequence pp pipeline stage stages".split())
"""Names of axes over which FSDP does not shard: those of replicas, and those that cut layers, experts or stages."""


def suggest_rules(model: nn.Module | Model | Mapping[str, Any], mesh: Mesh) -> list[RuleLike]:
    """Rules that shard all leaves over the axes of a mesh that are for it, for ``fs.make_plan`` to start from.

    * Axes named ``tp``, ``ep`` or alike are left to ``fs.parallel``, and ``stage`` to ``fs.Stages``: which
      layers they cut is a property of the layers. A model that ``fs.parallel.parallelize`` returned says it, and gets a
      rule for each kind of cut leaf; for layers written by hand ``fs.parallel.megatron_rules`` does.
    * Axes of the context (``cp``) have tokens of their own, so parameters are sharded over them as over data axes, and
      the batch names them: ``batch=fs.P("data", "cp")``.
    * If another axis is left beside one named ``replica`` or alike, parameters are sharded over that one, and
      replicated over the replicas (HSDP).
    * All leaves get one rule: a group of flat-sharded leaves has one gather, whatever their sizes, so small leaves need
      no rule of their own. Leaves of whole numbers, such as counters, are kept whole.

    Args:
        model: the module, what ``fs.split`` made of it, or a nested dict of tensors.
        mesh: the mesh.

    Returns:
        Rules: pairs of a pattern and a spec. Print and edit them.

    Raises:
        PlanError: arguments of other types, or a mesh on which no axis is left.

    >>> mesh = fs.abstract_mesh((2, 4), ("replica", "data"))
    >>> fs.suggest_rules(torch.nn.Linear(4, 4), mesh)
    [('.*', fsdp(axis='data', min_size=0))]
    """
    meant = "an nn.Module, what fs.split returned, or a nested dict of tensors"
    wants: list[Want] = [
        ("model", model, (nn.Module, Model, Mapping), meant),
        ("mesh", mesh, Mesh, "what fs.make_mesh returned"),
    ]
    expect("fs.suggest_rules(model, mesh)", wants)
    params = model.params if isinstance(model, Model) else model
    leaves = dict(params.named_parameters() if isinstance(params, nn.Module) else tree.paths(params))
    cuts = {path: cut for path, cut in model_cuts(model).items() if cut.axis in mesh.axis_names}
    flat = _flat_axes(mesh)
    shard = tuple(dict.fromkeys((*flat, *(cut.axis for cut in cuts.values() if cut.local))))
    if not shard:
        raise PlanError(
            f"fs.suggest_rules: fs.parallel cuts layers over every axis of {mesh.axis_names}, and none is left for "
            f"parameters: add an axis "
            f"to shard over, such as 'shard', or see fs.parallel.megatron_rules"
        )
    numbers = [name for name, leaf in leaves.items() if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex)]
    rules: list[RuleLike] = [(name.replace(".", r"\."), P()) for name in numbers]
    rules += cut_rules(cuts, {path: tuple(leaf.shape) for path, leaf in leaves.items()}, flat)
    if len(cuts) + len(numbers) < max(len(leaves), 1):
        rules.append((".*", fsdp(shard[0] if len(shard) == 1 else shard)))
    return rules


def _flat_axes(mesh: Mesh) -> Axes:
    """The axes of a mesh for flat shards: those of data, without replicas if there are others."""
    data = [axis for axis in mesh.axis_names if axis.lower() not in OTHERS]
    return tuple([axis for axis in data if axis.lower() not in REPLICAS] or data)


def warn_of_no_units(shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], units: Collection[str]) -> None:
    """Say what a plan without units costs on several ranks, and which units there could be."""
    size = sum(math.prod(shape) * dtypes[path].itemsize for path, shape in shapes.items())
    patterns = () if units or size < LARGE else repeated(shapes)
    if patterns:
        most = largest(shapes, patterns) * max(dtype.itemsize for dtype in dtypes.values())
        warnings.warn(
            f"the model has no units, so every step gathers all of its {size_text(size)} at once, on every rank, "
            f"before it computes anything: fs.split(module, units={patterns}) gathers {size_text(most)} at a time, "
            f"while the unit before computes; fs.suggest_units(module) proposes units",
            stacklevel=4,
        )
