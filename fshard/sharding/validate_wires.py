"""Checks of the formats in which leaves travel, and are kept, after those of specs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fshard.errors import PlanError
from fshard.sharding.kinds import Kinds
from fshard.sharding.leaf import Leaf
from fshard.sharding.low_rank import basis_shape
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.spec import axes_of
from fshard.sharding.validate import refuse
from fshard.sharding.wire import FIELDS, Wire, WireFormat, wire_formats


def check_wires(leaves: Iterable[Leaf], mesh: Mesh, data_axes: Axes) -> None:
    """Check the formats of few bits, after all specs."""
    leaves = [*leaves]
    _check_packed(leaves)
    by_wire: dict[Wire, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.wire != Wire():
            by_wire.setdefault(leaf.wire, []).append(leaf)
    problems = [
        (f"{leaf.path}  {list(leaf.shape)}", f"  {leaf.at_rest}, {wire}: {text}")
        for wire, members in by_wire.items()
        for leaf in members
        for text in _wire_problems(leaf, mesh, data_axes)
    ]
    for wire, members in by_wire.items():
        moved = [_moved(leaf, data_axes) for leaf in members]
        forms = {form for leaf, axes in zip(members, moved, strict=True) if (form := _low_rank(leaf, axes)) is not None}
        if forms and not any(basis_shape(leaf.shape, form.rank) for leaf in members for form in forms):
            problems.append(
                (str(wire), f": {forms.pop()} saves nothing: no leaf of it is a matrix that is large enough")
            )
        problems += [(str(wire), f": {text}") for text in _idle_formats(wire, moved)]
    refuse(problems, f"wire= on the mesh {dict(mesh.shape)}", "Correct wire= of the plan or of these rules.")


def _check_packed(leaves: Iterable[Leaf]) -> None:
    """Check the leaves that are kept in few bits."""
    problems = [
        (f"{leaf.path}  {list(leaf.shape)}", f"  {leaf.at_rest}, packed={str(leaf.packed)!r}: {why}")
        for leaf in leaves
        if leaf.packed is not None and (why := _unpackable(leaf))
    ]
    refuse(problems, "packed=", "Correct the rules of these leaves, or leave packed= out of them.")


def _unpackable(leaf: Leaf) -> str:
    """Say why a leaf cannot be kept in few bits; nothing if it can."""
    if leaf.trainable:
        return "the leaf is trained, and most updates are less than half of a code: freeze it, trainable=False"
    if not leaf.dtype.is_floating_point or leaf.dtype.itemsize < 2:
        return f"its dtype is {leaf.dtype}, and values of 16 bits and more are packed"
    cut = [axis for entry in leaf.at_rest.dims for axis in axes_of(entry)]
    if cut:
        return f"a tensor dim is cut along {cut[0]!r}, and blocks are elements in a row of the whole leaf; use flat="
    return ""


def _low_rank(leaf: Leaf, moved: Mapping[str, Axes]) -> WireFormat | None:
    """The format of a leaf's sums over replicas, where it has a low rank."""
    form = wire_formats(leaf.wire, moved, leaf.dtype).get("replica_reduce")
    return form if form is not None and form.rank else None


def _moved(leaf: Leaf, data_axes: Axes) -> dict[str, Axes]:
    """The axes of a leaf's transfers, by kind."""
    replicas = tuple(a for a in data_axes if a not in leaf.gather_axes and a not in leaf.compute.axes)
    rest = tuple(a for a in replicas if a not in leaf.opt_axes)
    return {
        "all_gather": leaf.gather_axes,
        "reduce_scatter": leaf.gather_axes or leaf.opt_axes,
        "replica_reduce": replicas if leaf.gather_axes and leaf.opt_axes else rest,
        "update_gather": leaf.opt_axes,
    }


def _idle_formats(wire: Wire, moved: Sequence[Mapping[str, Axes]]) -> list[str]:
    """The formats of a wire that none of its leaves uses."""
    out = []
    for field in ("gather", "reduce", "update"):
        kinds = [kind for kind, each in FIELDS.items() if each == field]
        over = sorted({"+".join(axes[kind]) for axes in moved for kind in kinds} - {""})
        there = f"these leaves have transfers over {', '.join(over)}" if over else "these leaves have none"
        out += [f"{field}= names {key!r}, and {there}" for key in wire.keys(field) if key not in over]
        if isinstance(getattr(wire, field), str) and not over:
            out.append(f"{field}={getattr(wire, field)!r} has no effect: none of its {len(moved)} leaves moves so")
    sums = sorted({"+".join(axes["replica_reduce"]) for axes in moved} - {""})
    if isinstance(wire.feedback, str) and wire.feedback not in sums:
        there = f"sums of these leaves over replicas are over {', '.join(sums)}" if sums else "these leaves have none"
        out.append(f"feedback={wire.feedback!r} names no axes of a sum over replicas: {there}")
    return out


def _wire_problems(leaf: Leaf, mesh: Mesh, data_axes: Axes) -> Iterator[str]:
    moved = _moved(leaf, data_axes)
    for kind, form in wire_formats(leaf.wire, moved, leaf.dtype).items():
        if form.largest is not None and leaf.gather_dim is not None and kind != "replica_reduce":
            yield (
                f"{kind} in {form}: its blocks are {form.block} elements in a row, which a shard along dim "
                f"{leaf.gather_dim} cuts; use flat=, such as fs.fsdp('{leaf.gather_axes[0]}'), or 'bf16'"
            )
        if form.feedback:
            yield from _feedback_problems(leaf, kind, form)
        if form.rank:
            yield from _low_rank_problems(leaf, kind, form)
            continue
        if kind == "update_gather" and leaf.kinds != Kinds():
            yield (
                f"{kind} in {form}: exact parameters lie beside what other ranks hold, and the leaf or its optimizer "
                f"state is in host memory ({leaf.kinds}); keep both on the device, or leave update= out"
            )
        ranks = mesh.axis_size(moved[kind])
        sent, exact = form.nbytes(form.block * ranks), 2 * form.block * leaf.dtype.itemsize
        if kind == "replica_reduce" and leaf.opt is None and ranks > 1 and sent > exact:
            yield (
                f"{kind} in {form}: each of {ranks} replicas would send its shard to each other one, more than an "
                f"exact sum takes; let each update a part of it, opt=, or compress a smaller axis"
            )


def _feedback_problems(leaf: Leaf, kind: str, form: WireFormat) -> Iterator[str]:
    """Say why what rounding leaves out of a sum of gradients of a leaf cannot be kept."""
    if kind == "reduce_scatter":
        yield (
            f"{kind} in {form}: each rank would keep a gradient of the whole leaf, since it rounds all of it before a "
            f"part is left to each; keep feedback= to axes of replicas, as in feedback='replica', or leave it out"
        )
    elif leaf.gather_axes and leaf.opt_axes:
        yield (
            f"{kind} in {form}: the shard is cut further for the optimizer, {leaf.opt}, so each rank would keep more "
            f"than the part that it updates; leave opt= or feedback= out"
        )
    elif leaf.kinds != Kinds():
        yield (
            f"{kind} in {form}: what is left of a sum lies on the device, and the leaf or its optimizer state is in "
            f"host memory ({leaf.kinds}); keep both on the device, or leave feedback= out"
        )


def _low_rank_problems(leaf: Leaf, kind: str, form: WireFormat) -> Iterator[str]:
    """Say why a leaf cannot be summed as a product of low rank."""
    if leaf.compute.axes:
        yield f"{kind} in {form}: it takes rows of a matrix, and ranks compute with parts of this one; leave it out"
    elif leaf.gather_dim:
        yield (
            f"{kind} in {form}: it takes whole rows of a matrix, and dim {leaf.gather_dim} is cut; use flat=, such as "
            f"fs.fsdp('{leaf.gather_axes[0]}'), or cut dim 0"
        )


def expect_wire(call: str, wire: object) -> None:
    """Refuse what is no wire; ``call`` is what it was given to, for the error."""
    if not isinstance(wire, Wire | None):
        raise PlanError(f"{call}wire={wire!r} must be fs.Wire(...)")
