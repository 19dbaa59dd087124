"""Checks of leaves and specs before their layout. One report names every problem of every leaf."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fshard import tree
from fshard.arguments import alike
from fshard.errors import PlanError, lines
from fshard.sharding.leaf import Leaf
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.rules import Decision, Rule
from fshard.sharding.spec import P, Shape, axes_of

MODELS = (
    "Give their parameters, {name: model.params}, and call model.apply(params[name], x). For two that start equal and "
    "train apart, such as a student and a teacher, clone one: fs.tree.map(torch.clone, model.params)."
)
"""The remedy for models among the leaves of a tree."""


def tensors_of(params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The leaves of a parameter tree by path: at least one, all dense real tensors, no two in the same memory."""
    tensors = dict(tree.paths(params))
    if not tensors:
        raise PlanError("the model has no parameters: give a module or a tree with at least one tensor")
    wrong = [f"{path}: {odd}" for path, leaf in tensors.items() if (odd := _odd(leaf))]
    if wrong:
        if any(hasattr(leaf, "params") for leaf in tensors.values()):
            raise PlanError(lines("parameters are tensors, these are not:", wrong, MODELS))
        remedy = (
            "Make a dict of a list, {str(i): leaf for i, leaf in enumerate(...)}; keep other values out of the tree; "
            "keep complex leaves as real ones, with torch.view_as_real; keep quantized leaves dequantized, or as "
            "integers and scales."
        )
        raise PlanError(lines("parameters are dense real tensors, these are not:", wrong, remedy))
    # Two leaves in the same memory may be one tied leaf, and the plan would part them.
    first: dict[tuple[Any, ...], str] = {}
    twice = []
    for path, leaf in tensors.items():
        if leaf.numel():
            plain = type(leaf) in (torch.Tensor, torch.nn.Parameter)  # wrappers have no storage of their own
            place = (leaf.untyped_storage()._cdata, leaf.storage_offset()) if plain else (id(leaf), 0)
            other = first.setdefault(place, path)  # equal storage and offset: the first elements are the same
            if other != path:
                twice.append(f"{path}  {list(leaf.shape)} lies where {other}  {list(tensors[other].shape)} does")
    if twice:
        remedy = (
            "A plan keeps one leaf a path, so these would start equal and train apart. To share a leaf, store it at "
            "one path and read it there in both places, or split one module that holds both, which keeps their tie. "
            "For two separate leaves, clone one."
        )
        raise PlanError(lines(f"{len(twice)} of {len(tensors)} leaves share the memory of others:", twice, remedy))
    return tensors


def _odd(leaf: Any) -> str:
    """Return what a leaf is that is no dense real tensor; nothing for one that is."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    dense = leaf.layout == torch.strided and not leaf.is_complex() and not leaf.is_quantized
    return "" if dense else f"{leaf.dtype}, {leaf.layout}"


def batch_spec(batch: P | None, mesh: Mesh) -> P:
    """The spec of the batch, by default over the only axis of a mesh."""
    if batch is None:
        if len(mesh.axis_names) > 1:
            raise PlanError(f"a mesh with axes {mesh.axis_names} needs batch=P('...'), which names the data axes")
        batch = P(mesh.axis_names[0])
    bad = [axis for axis in batch.axes if axis not in mesh.axis_names]
    if bad or len(set(batch.axes)) != len(batch.axes) or batch.flat is not None:
        raise PlanError(
            f"batch={batch} on a mesh with axes {mesh.axis_names}: name each data axis once, by tensor dim, "
            f"such as batch=P({mesh.axis_names[0]!r})"
        )
    return batch


def check_specs(
    specs: Mapping[str, tuple[P, P | None]], shapes: Mapping[str, Shape], mesh: Mesh, data_axes: Axes
) -> None:
    """Check every leaf's specs against its shape, the mesh and the data axes."""
    problems: list[tuple[str, str]] = []
    for path, (at_rest, compute) in specs.items():
        shape = shapes[path]
        read = at_rest.without(data_axes) if compute is None else compute
        found = _problems(at_rest, shape, mesh, read.axes)
        if compute is not None and not found:
            left = at_rest.without(tuple(a for a in at_rest.axes if a not in compute.axes))
            found = _problems(compute, shape, mesh, read.axes)
            if not found and (not _same_dims(left, compute) or compute.flat is not None):
                found = [f"compute={compute} is not what is left of the spec after gathering some of its axes, {left}"]
        gathered = tuple(axis for axis in at_rest.axes if axis not in read.axes)
        found = found or _cut_problems(at_rest, gathered, data_axes) or _axes_problems(gathered, data_axes, mesh)
        problems += [(f"{path}  {list(shape)}", f"  {at_rest}: {problem}") for problem in found]
    refuse(problems, f"specs on the mesh {dict(mesh.shape)}", "Correct the rules that give these specs.")


def refuse(problems: list[tuple[str, str]], where: str, remedy: str) -> None:
    """Raise the problems of leaves in one report, if there are any."""
    if problems:
        raise PlanError(lines(f"{len(problems)} problems with {where}:", alike(problems), remedy))


def check_trainable(
    dtypes: Mapping[str, torch.dtype], given: Mapping[str, bool | None], trained: Mapping[str, bool]
) -> None:
    """Refuse to train leaves without gradients, and 8-bit floats, which have no arithmetic."""
    coded = [f"{p}  {t}" for p, t in dtypes.items() if t.is_floating_point and t.itemsize == 1 and trained[p]]
    if coded:
        remedy = "Give them a rule with trainable=False, or keep them in bfloat16 or wider where they train."
        raise PlanError(lines("leaves of 8 bits cannot be trained:", coded, remedy))
    whole = [f"{p}  {t}" for p, t in dtypes.items() if given[p] and not t.is_floating_point]
    if whole:
        remedy = "Only floating-point leaves have gradients: give these a rule without trainable=True before this one."
        raise PlanError(lines("rules with trainable=True decide leaves that cannot be trained:", whole, remedy))


def check_aligned(decided: Mapping[str, Decision]) -> None:
    """Refuse ``align=`` on leaves that a tensor dim cuts."""
    cut = [f"{p}  {d.at_rest}" for p, d in decided.items() if d.rule.align and not d.at_rest.flat and d.at_rest.axes]
    if cut:
        remedy = "Use flat=, such as fs.fsdp(axis): align= says where a flat-sharded leaf may be cut."
        raise PlanError(lines("rules with align= decide leaves that are not flat-sharded:", cut, remedy))


def check_rounding(leaves: Mapping[str, Leaf]) -> None:
    """Refuse stochastic rounding without a parameter in bfloat16."""
    asked = [leaf for leaf in leaves.values() if leaf.precision.rounding == "stochastic"]
    if asked and all(leaf.dtype != torch.bfloat16 for leaf in asked):
        raise PlanError(
            f"Precision(rounding='stochastic') rounds updates of parameters kept in bfloat16, and none of its "
            f"{len(asked)} leaves, such as {asked[0].path}, is: keep them in bfloat16, or leave rounding= away"
        )


def check_opt(leaves: Iterable[Leaf], mesh: Mesh, data_axes: Axes) -> None:
    """Check the specs of optimizer state, after all other specs."""
    problems = [
        (f"{leaf.path}  {list(leaf.shape)}", f"  {leaf.at_rest}, opt={leaf.opt}: {text}")
        for leaf in leaves
        if leaf.opt is not None
        for text in _opt_problems(leaf, leaf.opt, mesh, data_axes)
    ]
    remedy = "Correct the rules that give these specs, or leave opt= out."
    refuse(problems, f"opt= on the mesh {dict(mesh.shape)}", remedy)


def _opt_problems(leaf: Leaf, opt: P, mesh: Mesh, data_axes: Axes) -> list[str]:
    found = _problems(opt, leaf.shape, mesh, leaf.compute.axes)
    if found:
        return found
    if not leaf.trainable:
        return ["the leaf is frozen, so there is no optimizer state; give frozen leaves a rule of their own without it"]
    flat, more = axes_of(leaf.at_rest.flat), axes_of(opt.flat)
    if not _same_dims(leaf.at_rest, opt) or more[: len(flat)] != flat:
        example = P(*leaf.at_rest.dims, flat=(*flat, *(a for a in data_axes if a not in leaf.at_rest.axes)))
        return [f"it must be the leaf's own spec with further axes behind its flat ones, such as {example}"]
    extra = more[len(flat) :]
    foreign = [axis for axis in extra if axis not in data_axes]
    if foreign:
        return [f"{foreign[0]!r} is not a data axis (batch= names {data_axes}), so no gradients are reduced over it"]
    ordered = tuple(axis for axis in mesh.axis_names if axis in extra)
    if extra != ordered:
        return [f"the further axes {extra} stand in another order in the mesh: name them as {ordered}"]
    if extra and leaf.gather_dim is not None:
        return [f"dim {leaf.gather_dim} is gathered for compute, and such a leaf cannot be cut further; use flat="]
    return []


def _same_dims(a: P, b: P) -> bool:
    """Tell whether two specs cut the same tensor dims over the same axes."""
    return all(x == y for x, y in itertools.zip_longest(a.dims, b.dims))


def check_kinds(leaves: Iterable[Leaf], rules: Mapping[str, Rule], mesh: Mesh) -> None:
    """Check the memory kinds of leaves, after their specs."""
    problems = [
        (f"{leaf.path}  {list(leaf.shape)}", f": {text}")
        for leaf in leaves
        for text in _kind_problems(leaf, rules[leaf.path], mesh)
    ]
    where = f"memory kinds on the mesh {dict(mesh.shape)} of device {mesh.device}"
    refuse(problems, where, "Correct memory_kind=, opt_memory_kind= or update_on= in these rules.")


def _kind_problems(leaf: Leaf, rule: Rule, mesh: Mesh) -> list[str]:
    kinds = leaf.kinds
    asked = [f"{n}={getattr(rule, n)!r}" for n in ("opt_memory_kind", "update_on") if getattr(rule, n) is not None]
    if rule.trainable is False and asked:
        return [f"{asked[0]}, but trainable=False: it has no optimizer state and no update; use memory_kind= alone"]
    if mesh.device.type == "cpu" and "pinned_host" in (kinds.param, kinds.opt):
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        return [
            f"{size:,} bytes in pinned_host, but no memory is pinned where the device is the cpu; use 'unpinned_host' "
            f"here, a mesh of GPUs, or fs.abstract_mesh(..., device='cuda') to plan for one"
        ]
    if leaf.trainable and kinds.update == "host" and kinds.param == kinds.opt == "device":
        return ["update_on='host', but parameter and state are both on the device; say opt_memory_kind='pinned_host'"]
    if kinds.hosted and leaf.opt_axes:
        return [
            f"memory_kind={kinds.param!r} with opt= over {leaf.opt_axes}: ranks would send each other updated parts of "
            f"host memory; shard the leaf itself over these axes, or keep only its state there by opt_memory_kind="
        ]
    return []


def _problems(spec: P, shape: Shape, mesh: Mesh, local: Axes) -> list[str]:
    """The problems of one spec of a leaf, which compute reads cut over its local axes."""
    unknown = [axis for axis in spec.axes if axis not in mesh.axis_names]
    if unknown:
        return [f"no axis {', '.join(map(repr, unknown))} in the mesh, which has {', '.join(mesh.axis_names)}"]
    twice = sorted({axis for axis in spec.axes if spec.axes.count(axis) > 1})
    if twice:
        return [f"axis {', '.join(map(repr, twice))} is used twice; an axis can divide a leaf only once"]
    if len(spec.dims) > len(shape):
        return [f"{len(spec.dims)} entries for {len(shape)} dims; give at most one entry a dim, or flat="]
    out = []
    for dim, entry in enumerate(spec.dims):
        parts = mesh.axis_size(axes_of(entry))
        if shape[dim] % parts:
            kept = any(axis in local for axis in axes_of(entry))  # flat axes are gathered, so it cannot become flat
            fewer = f"choose a size of {entry!r} that divides {shape[dim]}"
            other = fewer if kept else f"use flat={entry!r}, which cuts any size"
            out.append(
                f"dim {dim} has {shape[dim]} elements, which {parts} ranks of {entry!r} do not divide; "
                f"pad the leaf to {-(-shape[dim] // parts) * parts}, or {other}"
            )
    return out


def _cut_problems(at_rest: P, gathered: Axes, data_axes: Axes) -> list[str]:
    """List what is wrong with how a leaf is cut along its gathered axes."""
    stuck = [axis for axis in axes_of(at_rest.flat) if axis not in gathered]
    if stuck:
        return [
            f"flat={at_rest.flat!r} is not gathered for compute, since the data axes are {data_axes}; flat-shard over "
            f"a data axis, or cut a tensor dim by {stuck[0]!r}"
        ]
    dims = [i for i, entry in enumerate(at_rest.dims) if any(axis in gathered for axis in axes_of(entry))]
    if len(dims) > 1 or (dims and at_rest.flat is not None):
        return [f"it is gathered along several dims {dims} or along a dim and flat; gather over one flat=(...) instead"]
    if dims and any(axis not in gathered for axis in axes_of(at_rest.dims[dims[0]])):
        return [f"dim {dims[0]} mixes gathered and local axes; put the gathered ones into flat="]
    return []


def _axes_problems(gathered: Axes, data_axes: Axes, mesh: Mesh) -> list[str]:
    """List what is wrong with the choice and the order of gathered axes."""
    foreign = [axis for axis in gathered if axis not in data_axes]
    if foreign:
        # Ranks along such an axis work on the same rows: no spec says whether their gradients add up or are equal.
        return [
            f"it is gathered for compute over {foreign[0]!r}, which is not a data axis, so nothing says how its "
            f"gradients add up; keep it local on that axis, or name the axis in batch="
        ]
    ordered = tuple(axis for axis in mesh.axis_names if axis in gathered)
    if gathered != ordered:
        # Process groups number their members by rank.
        return [f"it is gathered over {gathered}, but the mesh lists these axes as {ordered}; name them in that order"]
    return []


def misfit(path: str, value: Any, shape: Shape) -> str:
    """Say why a value cannot be the leaf of this path and shape; or nothing."""
    if not isinstance(value, torch.Tensor):
        return f"no tensor  {path}: {type(value).__name__}"
    if tuple(value.shape) != shape:
        return f"misshapen  {path}: {list(value.shape)}, the plan has {list(shape)}"
    if value.device.type == "meta":
        return f"no values  {path}: on the meta device; init_state without params= makes values"
    return ""
