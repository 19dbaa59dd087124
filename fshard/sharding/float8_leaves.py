"""The leaves that are multiplied in float8, and why others cannot be: ``fs.Precision(products="float8_rowwise")``."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from fshard.arguments import alike
from fshard.errors import PlanError, TransformError, lines
from fshard.model.float8 import MULTIPLE
from fshard.sharding.leaf import Leaf
from fshard.sharding.mesh import Mesh
from fshard.sharding.owners import ROOT
from fshard.sharding.rules import Decision
from fshard.sharding.spec import Shape

CAPABLE = (8, 9)
"""The least compute capability of a GPU that multiplies in float8."""


def unscaled(shape: Shape, dtype: torch.dtype, owner: str, names: Sequence[str], module: nn.Module | None) -> str:
    """Say why a leaf cannot be multiplied in float8; empty if it can.

    Args:
        shape: the shape that a unit reads on one rank.
        dtype: of the leaf.
        owner: its unit.
        names: all of its paths.
        module: the module that was split; None of a plain tree, whose units show only when they are called.

    >>> unscaled((64, 30), torch.float32, "up", ["up.weight"], None)
    '64 x 30 is no multiple of 16'
    """
    if len(shape) != 2 or not dtype.is_floating_point:
        return f"{len(shape)} dims" if dtype.is_floating_point else str(dtype).removeprefix("torch.")
    if any(n % MULTIPLE for n in shape):
        return f"{shape[0]} x {shape[1]} is no multiple of {MULTIPLE}"
    if module is None:
        return ""
    return "outside of units" if owner == ROOT else next(filter(None, (_holder(module, path) for path in names)), "")


def _holder(module: nn.Module, path: str) -> str:
    """The class of the module that holds a parameter, if that is known not to multiply it as a linear layer does."""
    above, _, name = path.rpartition(".")
    held = module.get_submodule(above)
    if isinstance(held, nn.Linear):
        return "" if name == "weight" else f"{name} of a linear layer"
    return type(held).__name__ if type(held).__module__.startswith("torch.nn") else ""


def check_products(leaves: Mapping[str, Leaf], decided: Mapping[str, Decision], mesh: Mesh) -> None:
    """Refuse rules, and a plan, whose ``products=`` fits none of their leaves, and devices without float8.

    Raises:
        PlanError: naming the leaves and their problems.
    """
    asked = [leaf for leaf in leaves.values() if leaf.precision.products is not None]
    if not asked:
        return
    by = {id(decided[leaf.path].rule): decided[leaf.path].rule for leaf in asked}
    for rule in by.values():
        own = [leaf for leaf in asked if decided[leaf.path].rule is rule and rule.precision is not None]
        _check_fit(own, f"the rule {rule.pattern!r}")
    _check_fit([leaf for leaf in asked if decided[leaf.path].rule.precision is None], "the plan")
    _check_device(mesh)


def _check_fit(leaves: Sequence[Leaf], who: str) -> None:
    if leaves and not any(leaf.products for leaf in leaves):
        wrong = alike([(f"{leaf.path}  {list(leaf.shape)}", f": {leaf.unscaled}") for leaf in leaves])
        remedy = (
            f"Weights of linear layers inside of units can, if their sizes are multiples of {MULTIPLE}. Leave it away "
            "here, or name such leaves; fs.split(module, units=) makes units."
        )
        kind = leaves[0].precision.products
        raise PlanError(lines(f"products={kind!r} of {who} fits none of its leaves:", wrong, remedy))


def _check_device(mesh: Mesh) -> None:
    kind = mesh.device.type
    found = torch.cuda.get_device_capability(mesh.device) if kind == "cuda" and mesh.device_here else CAPABLE
    if kind not in ("cpu", "cuda") or found < CAPABLE:
        what = f"{mesh.device} of compute capability {found[0]}.{found[1]}" if kind == "cuda" else kind
        least = ".".join(map(str, CAPABLE))
        raise PlanError(
            f"products= in float8 on {what}, which does not multiply in float8: leave it away, or use GPUs of compute "
            f"capability {least} or later"
        )


def products_told(leaves: Mapping[str, Leaf]) -> Iterator[str]:
    """The lines of a plan's table: how many leaves are multiplied in float8, and why others are not."""
    asked = [leaf for leaf in leaves.values() if leaf.precision.products is not None]
    why: dict[str, list[str]] = {}
    for leaf in asked:
        if not leaf.products:
            why.setdefault(leaf.unscaled, []).append(leaf.path)
    if asked:
        yield f"products in {asked[0].precision.products}: {sum(leaf.products is not None for leaf in asked)} leaves"
    for reason, paths in why.items():
        yield f"  not of {len(paths)}, {reason}: {', '.join(paths[:3])}{', ...' * (len(paths) > 3)}"


def refuse_float8(leaves: Mapping[str, Leaf]) -> None:
    """Refuse to take derivatives by ``torch.func`` of a plan with products in float8, which have the first one alone.

    Raises:
        TransformError: the plan has such products.
    """
    some = [path for path, leaf in leaves.items() if leaf.products]
    if some:
        raise TransformError(
            f"fs.func: the plan multiplies {len(some)} leaves in float8, such as {some[0]}, and such products have no "
            f"derivatives of higher order: make a plan without products=, such as exact = "
            f"plan.replace(precision=fs.Precision()), and give the shards of fs.reshard_state(state, exact, opt)"
        )
