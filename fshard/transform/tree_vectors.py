"""Trees of shards as vectors: inner products, norms, stacks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import expect, kind
from fshard.collectives.linear import LinearSum, apply
from fshard.collectives.ranks import Ranks
from fshard.collectives.scope import cutting
from fshard.errors import TreeError, lines
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages
from fshard.sharding.validate import misfit
from fshard.state.elementwise import ALIKE_REMEDY, cut_of, unguarded
from fshard.state.flat import known_flat, path_of, same_layout


def vdot(a: Any, b: Any, plan: Plan) -> Tensor:
    """The inner product of the whole tensors of two trees of shards, equal on all ranks.

    Sharded leaves are summed over the ranks that hold their parts; replicated leaves count once. Integer leaves are
    left out; bfloat16 and float16 leaves are multiplied and summed in float32. Outside of ``run`` of a virtual mesh
    trees are of whole tensors.

    Args:
        a, b: trees of shards, such as ``state.params`` or gradients, or subtrees of these, such as
            ``state.params["student"]``.
        plan: the plan.

    Raises:
        TreeError: a tree is not this rank's part of the plan's; leaves of two subtrees are cut differently.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> fs.tree.vdot({"w": w.flatten()}, {"w": torch.ones(4)}, plan)
    tensor(10.)
    """
    expect_plan("fs.tree.vdot(a, b, plan)", plan)
    with cutting(plan.mesh), unguarded():
        return _dot(a, b, plan)


def vdots(pairs: Sequence[tuple[Any, Any]], plan: Plan) -> Tensor:
    """The inner products of several pairs of trees of the plan, ``(len(pairs),)``, by the exchanges of one."""
    with cutting(plan.mesh), unguarded():
        parts = [_parts(a, b, plan) for a, b in pairs]
        return _summed({axes: torch.stack([part[axes] for part in parts]) for axes in parts[0]}, plan)


def _dot(a: Any, b: Any, plan: Plan) -> Tensor:
    return _summed(_parts(a, b, plan), plan)


def _parts(a: Any, b: Any, plan: Plan) -> dict[Axes, Tensor]:
    """This rank's inner products, by the axes over which ranks hold different parts."""
    if (by_chunk := _of_chunks(a, b, plan)) is not None:
        return by_chunk
    left, right = _leaves("a", a, plan), _leaves("b", b, plan)
    _check_pairs(left, right, plan)
    sums: dict[Axes, Tensor] = {}
    places, here = plan.places(), plan.mesh.everywhere
    for (path, one), other in zip(left.items(), right.values(), strict=True):
        if plan.leaves[path].dtype.is_floating_point:
            axes = () if here else _held(places[path][0], plan)
            pair = one.to(plan.mesh.device), other.to(plan.mesh.device)
            wide = torch.promote_types(torch.promote_types(pair[0].dtype, pair[1].dtype), torch.float32)
            dot = (pair[0].to(wide) * pair[1].to(wide)).sum()
            sums[axes] = sums[axes] + dot if axes in sums else dot
    if not sums:
        raise TreeError(
            "no leaf of the plan is floating-point, so it has no inner product: train at least one such leaf"
        )
    return sums


def _leaves(name: str, given: Any, plan: Plan) -> dict[str, Tensor]:
    """The leaves of a tree or of a subtree, by their paths in the plan, in the plan's order.

    Raises:
        TreeError: leaves of no subtree of the plan's tree, or of several; leaves of other shapes.
    """
    found = dict(tree.paths(given)) if isinstance(given, Mapping) and given else {}
    if not found or found.keys() == plan.leaves.keys():
        return plan.check_tree(given, whole=plan.mesh.everywhere, what=name)
    root = _root(name, found, plan)
    paths = {f"{root}{path}": leaf for path, leaf in found.items()}
    shapes = {path: plan.leaves[path].shape for path in paths}
    if not plan.mesh.everywhere:
        places = plan.places()
        shapes = {path: places[path][0].local_shape(places[path][1], plan.mesh) for path in paths}
    wrong = [wrong for path, leaf in paths.items() if (wrong := misfit(path, leaf, shapes[path]))]
    if wrong:
        raise TreeError(lines(f"{name} has leaves of other shapes than this rank's:", wrong, "Give trees of the plan."))
    return {path: paths[path] for path in plan.leaves if path in paths}


def _root(name: str, found: Mapping[str, Any], plan: Plan) -> str:
    """The path of a subtree in the plan's tree, with a dot behind it; empty for leaves named by their whole paths."""
    first = next(iter(found))
    ends = [path.removesuffix(first) for path in plan.leaves if path == first or path.endswith(f".{first}")]
    roots = [root for root in ends if all(f"{root}{path}" in plan.leaves for path in found)]
    if len(roots) > 1:
        known = [root for root in roots if all(path_of(leaf) == f"{root}{path}" for path, leaf in found.items())]
        roots = known or roots
    if len(roots) == 1:
        return roots[0]
    raise _no_root(name, found, plan, roots)


def _no_root(name: str, found: Mapping[str, Any], plan: Plan, roots: list[str]) -> TreeError:
    """Names of leaves that are those of several subtrees, or of none."""
    first = next(iter(found))
    if roots:
        told = ", ".join([repr(root[:-1] or "the whole tree") for root in roots[:3]])
        return TreeError(
            f"{name} is a subtree of the plan's tree by its names, but which one cannot be told: {told}. Give it with "
            f"its path, such as fs.tree.nest({{'{roots[-1]}{first}': leaf, ...}})"
        )
    unknown = [path for path in found if path not in plan.leaves]
    return TreeError(
        lines(
            f"{name} has {len(found)} leaves, and they are of no subtree of the plan's tree of {len(plan.leaves)}:",
            [f"unknown  {path}" for path in unknown],
            "Give a tree like state.params, or a subtree of it.",
        )
    )


def _check_pairs(left: Mapping[str, Any], right: Mapping[str, Any], plan: Plan) -> None:
    """Refuse pairs of leaves that are not there, or are cut differently."""
    if len(left) != len(right):
        lost = sorted(left.keys() ^ right.keys())
        raise TreeError(
            f"a has {len(left)} leaves and b {len(right)}: {', '.join(lost[:4])}. Give trees of equal leaves"
        )
    for mine, other in zip(left, right, strict=True):
        if mine != other and cut_of(plan, mine) != cut_of(plan, other):
            raise TreeError(f"the leaves {mine} and {other} are cut at different elements. {ALIKE_REMEDY}")


def _of_chunks(a: Any, b: Any, plan: Plan) -> dict[Axes, Tensor] | None:
    """This rank's inner products, by one kernel a group.

    None if the trees do not know their chunks, or are not of the same leaves.
    """
    left, right = known_flat(a), known_flat(b)
    if left is None or right is None or left.form.order.paths != right.form.order.paths:
        return None
    if not same_layout(left.form.plan, plan) or not same_layout(right.form.plan, plan):
        return None
    mine, theirs, sums = left.chunks, right.chunks, dict[Axes, Tensor]()
    for group in left.form.groups:
        if group.dtype.is_floating_point:
            pair = mine[group.id].to(plan.mesh.device), theirs[group.id].to(plan.mesh.device)
            wide = torch.promote_types(group.dtype, torch.float32)
            dot = torch.dot(pair[0].to(wide), pair[1].to(wide))
            axes = _held(group, plan)
            sums[axes] = sums[axes] + dot if axes in sums else dot
    return sums or None


def _held(group: Group, plan: Plan) -> Axes:
    """The axes over which ranks hold different parts of a group."""
    held = (*group.gather_axes, *group.leaves[0].compute.axes)
    return tuple(axis for axis in plan.mesh.axis_names if axis in held)


def _summed(sums: Mapping[Axes, Tensor], plan: Plan) -> Tensor:
    parts = [(Ranks(plan.mesh, axes), value) for axes, value in sums.items()]
    return torch.stack([apply(value, LinearSum(ranks)) if ranks.size > 1 else value for ranks, value in parts]).sum(0)


def norm(a: Any, plan: Plan) -> Tensor:
    """The Euclidean norm of all whole tensors of a tree of shards, equal on all ranks.

    Args:
        a: this rank's part of each leaf, a tree like ``state.params``, or a subtree of it.
        plan: the plan.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> fs.tree.norm({"w": torch.tensor([3.0, 0.0, 0.0, 4.0])}, plan)
    tensor(5.)
    """
    expect_plan("fs.tree.norm(a, plan)", plan)
    return vdot(a, a, plan).sqrt()


def norms(a: Any, plan: Plan) -> dict[str, Any]:
    """The Euclidean norm of each whole tensor of a tree of shards, equal on all ranks, as LARS and LAMB need.

    One exchange for all leaves. Inside of a step function too; outside of ``run`` of a virtual mesh trees are of whole
    tensors.

    Args:
        a: this rank's part of each leaf, a tree like ``state.params``, or a subtree of it.
        plan: the plan.

    Returns:
        A tree like ``a`` of 0-dim tensors, float32 at least.

    Raises:
        TreeError: the tree is not this rank's part of the plan's.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w, "b": torch.ones(4)}, mesh, [(".*", fs.fsdp("data"))])
    >>> fs.tree.norms({"w": torch.tensor([3.0, 0.0, 0.0, 4.0]), "b": torch.ones(4)}, plan)
    {'w': tensor(5.), 'b': tensor(2.)}
    """
    expect_plan("fs.tree.norms(a, plan)", plan)
    with cutting(plan.mesh), unguarded():
        found, places, here = _leaves("a", a, plan), plan.places(), plan.mesh.everywhere
        squares: dict[tuple[Axes, torch.dtype], dict[str, Tensor]] = {}
        for path, leaf in found.items():
            axes, wide = () if here else _held(places[path][0], plan), torch.promote_types(leaf.dtype, torch.float32)
            square = leaf.to(plan.mesh.device, wide).square().sum()
            squares.setdefault((axes, wide), {})[path] = square
        out = dict[str, Tensor]()
        for (axes, _), by_path in squares.items():
            ranks, sums = Ranks(plan.mesh, axes), torch.stack([*by_path.values()])
            out.update(
                zip(by_path, (apply(sums, LinearSum(ranks)) if ranks.size > 1 else sums).sqrt().unbind(), strict=True)
            )
        root = _root("a", dict(tree.paths(a)), plan) if len(found) < len(plan.leaves) else ""
    return tree.nest({path: out[f"{root}{path}"] for path, _ in tree.paths(a)})


def stack(trees: Sequence[Any]) -> Any:
    """Equal trees as one, with a new first dim for ``torch.vmap``: the members of an ensemble.

    Args:
        trees: trees of one structure, whose leaves have one shape.

    Raises:
        TreeError: no trees, or unequal ones.

    >>> fs.tree.stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])["w"].shape
    torch.Size([2, 2])
    """
    if not isinstance(trees, (list, tuple)) or not trees:
        raise TreeError(
            f"fs.tree.stack(trees) takes a list of trees of one structure, and was given {kind(trees)} of no trees"
        )
    return tree.mapped(lambda *leaves: torch.stack(leaves), *trees)


def split_trainable(plan: Plan, params: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The leaves that get gradients, and all others, by path."""
    flat = plan.check_tree(params, whole=False)
    trained = {path: leaf for path, leaf in flat.items() if plan.leaves[path].trainable}
    return trained, {path: leaf for path, leaf in flat.items() if path not in trained}


def check_direction(plan: Plan, v: Any) -> dict[str, Tensor]:
    """The leaves of a direction by path, if it is a tree of this rank's shards, and moves what it moves by real steps.

    Raises:
        TreeError: it is not.
    """
    found = plan.check_tree(v, whole=False, what="v")
    odd = [
        f"{path}: {x.dtype}" for path, x in found.items() if plan.leaves[path].trainable and not x.is_floating_point()
    ]
    if odd:
        raise TreeError(lines("v has integers along trained leaves:", odd, "Give floating-point tensors, x.float()."))
    return found


def zero_filled(plan: Plan, found: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tree of the leaves found, with zeros for the rest."""
    whole = {**{path: torch.zeros_like(leaf) for path, leaf in rest.items()}, **found}
    return tree.nest({path: whole[path] for path in plan.leaves})


def expect_plan(call: str, plan: Any) -> None:
    """Refuse anything but a plan without stages."""
    expect(call, [("plan", plan, Plan, "what fs.make_plan returned")])
    refuse_stages(call, plan)
