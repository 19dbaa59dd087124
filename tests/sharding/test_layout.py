"""Layouts: on any mesh, every element of a leaf lies where the spec says, once, and groups are what the wire needs."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fshard as fs
from fshard import P, tree
from fshard.errors import PlanError
from fshard.sharding.layout import ALIGN, Group, box, global_index
from fshard.state.init import take

DATA = ("replica", "shard")
MESHES = [
    ((1,), ("shard",)),
    ((2,), ("shard",)),
    ((3,), ("shard",)),
    ((8,), ("shard",)),
    ((2, 2), ("replica", "shard")),
    ((2, 3), ("tp", "shard")),
    ((3, 2), ("shard", "tp")),
    ((2, 2, 2), ("replica", "tp", "shard")),
]


@st.composite
def plans(draw: Any) -> fs.Plan:
    """Some leaves with specs that a layout has, on some mesh. Units are the first components of paths."""
    sizes, names = draw(st.sampled_from(MESHES))
    mesh = fs.abstract_mesh(sizes, names)
    data = tuple(name for name in names if name in DATA)
    leaves, rules = {}, []
    for number in range(draw(st.integers(1, 6))):
        shape, spec, compute = draw(leaves_and_specs(mesh, data))
        path = f"unit{draw(st.integers(0, 1))}.leaf{number}"
        dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.int64]))
        leaves[path] = torch.empty(shape, dtype=dtype, device="meta")
        align = draw(st.sampled_from([None, None, "leaf", 48])) if spec.flat is not None else None
        rules.append(fs.Rule(path.replace(".", r"\."), spec, compute, align=align))
    units = sorted({path.split(".")[0] for path in leaves})
    return fs.make_plan(tree.nest(leaves), mesh, rules, batch=P(data), units=units)


@st.composite
def leaves_and_specs(draw: Any, mesh: fs.Mesh, data: tuple[str, ...]) -> tuple[tuple[int, ...], P, P | None]:
    """A shape, a spec for it, and maybe a spec for compute."""
    shape = list(draw(st.lists(st.integers(0, 7), max_size=3)))
    dims: list[Any] = [None] * len(shape)
    kind = draw(st.sampled_from(["replicated", "flat", "flat", "dim", "expert"]))
    local = "tp" in mesh.axis_names and draw(st.booleans())
    if shape and local:
        at = draw(st.integers(0, len(shape) - 1))
        dims[at], shape[at] = "tp", shape[at] * mesh.shape["tp"]
    free = [i for i, entry in enumerate(dims) if entry is None]
    if kind in ("dim", "expert") and free:
        axes = data if kind == "dim" and draw(st.booleans()) else ("shard",)
        at = draw(st.sampled_from(free))
        dims[at], shape[at] = axes, shape[at] * mesh.axis_size(axes)
        return tuple(shape), P(*dims), P(*dims) if kind == "expert" else None
    flat = None if kind == "replicated" else data if draw(st.booleans()) else "shard"
    return tuple(shape), P(*dims, flat=flat), None


def whole_leaf(shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    """A leaf whose elements are their own global indices."""
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


@given(plans())
def test_every_element_is_held_once(plan: fs.Plan) -> None:
    mesh = plan.mesh
    for group in plan.groups:
        for number, leaf in enumerate(group.leaves):
            copies = mesh.size // mesh.axis_size(leaf.at_rest.axes)
            held: Counter[int] = Counter()
            for rank in range(mesh.size):
                held.update(global_index(leaf.shape, group.piece(number, mesh, rank), mesh.device).tolist())
            assert held == Counter(dict.fromkeys(range(math.prod(leaf.shape)), copies))


@given(plans())
def test_a_piece_lies_in_the_box_that_its_spec_gives(plan: fs.Plan) -> None:
    mesh = plan.mesh
    for group in plan.groups:
        for number, leaf in enumerate(group.leaves):
            whole = whole_leaf(leaf.shape)
            for rank in range(mesh.size):
                piece = group.piece(number, mesh, rank)
                offset, shape = box(leaf.shape, leaf.at_rest, mesh, rank)
                assert (piece.offset, piece.shape) == (offset, shape)
                inside = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
                assert torch.equal(take(whole, piece), inside.reshape(-1)[piece.start : piece.stop])
                assert torch.equal(take(whole, piece), global_index(leaf.shape, piece, mesh.device))


@given(plans())
def test_groups(plan: fs.Plan) -> None:
    assert [group.id for group in plan.groups] == list(range(len(plan.groups)))
    assert sorted(leaf.path for group in plan.groups for leaf in group.leaves) == sorted(plan.leaves)
    assert len({group.name for group in plan.groups}) == len(plan.groups)
    keys = set()
    for group in plan.groups:
        alike = {
            (leaf.gather_axes, leaf.compute.axes, leaf.dtype, leaf.trainable, leaf.gather_dim is None, leaf.align)
            for leaf in group.leaves
        }
        assert len(alike) == 1
        keys.add((group.unit, *alike))
        assert group.name.split("/")[0] == group.unit
        assert all(leaf.path.startswith(group.unit) for leaf in group.leaves)
        assert group.kind == ("flat" if group.leaves[0].gather_dim is None else "dim")
        assert set(group.sum_axes) == set(plan.data_axes) - set(group.leaves[0].at_rest.axes)
        assert group.trainable is group.dtype.is_floating_point
        for begin, end in [(0, group.numel)] if group.leaves[0].align != "leaf" else _chunks(group):
            inside = [leaf for leaf, start in zip(group.leaves, group.starts, strict=True) if begin <= start < end]
            matrices = [len(leaf.shape) >= 2 for leaf in inside if leaf.numel]
            assert matrices == sorted(matrices, reverse=True)
        _check_buffer(group, plan.mesh)
    assert len(keys) == len(plan.groups)


def _check_buffer(group: Group, mesh: fs.Mesh) -> None:
    align = group.leaves[0].align
    step = 48 if align == 48 else ALIGN * (group.parts if group.kind == "dim" else 1)
    assert group.parts == mesh.axis_size(group.gather_axes)
    assert group.numel == group.parts * group.chunk and group.chunk % ALIGN == 0
    # No more padding than alignment asks for.
    used = sum(-(-leaf.numel // step) * step for leaf in group.leaves)
    if align == "leaf":
        _check_whole(group)
    else:
        assert used <= group.numel < used + group.parts * max(ALIGN, step if align else 0)
        assert not align or group.chunk % step == 0
    covered = Counter[int]()
    for start, leaf in zip(group.starts, group.leaves, strict=True):
        assert start % step == 0 and leaf.numel == math.prod(leaf.compute_shape)
        covered.update(range(start, start + leaf.numel))
    for begin, end in group.gaps:
        assert begin < end
        covered.update(range(begin, end))
    assert covered == Counter(range(group.numel))
    for part in range(group.parts):
        ends = [group.shard_range(number, part) for number in range(len(group.leaves))]
        filled = [span for span in ends if span[1] > span[0]]
        assert filled == sorted(filled) and all(0 <= a <= b <= group.chunk for a, b in ends)
        assert all(mine[1] <= after[0] for mine, after in zip(filled, filled[1:], strict=False))


def _chunks(group: Group) -> list[tuple[int, int]]:
    return [(part * group.chunk, (part + 1) * group.chunk) for part in range(group.parts)]


def _check_whole(group: Group) -> None:
    """Each leaf lies in one chunk, and the chunks are as short as 4/3 of the best packing, or the longest leaf."""
    sizes = [-(-leaf.numel // ALIGN) * ALIGN for leaf in group.leaves]
    for start, leaf in zip(group.starts, group.leaves, strict=True):
        assert not leaf.numel or start // group.chunk == (start + leaf.numel - 1) // group.chunk
    least = max(*sizes, 0) if len(sizes) > 1 else sizes[0]
    assert group.chunk <= max(least, sum(sizes) / group.parts) * 4 / 3 + ALIGN or group.chunk <= _two_largest(
        sizes, group
    )


def _two_largest(sizes: list[int], group: Group) -> int:
    """With more leaves than chunks, some chunk holds two of the first ``parts + 1`` leaves."""
    ordered = sorted(sizes, reverse=True)
    return ordered[group.parts - 1] + ordered[group.parts] if len(ordered) > group.parts else ordered[0]


def test_whole_leaves_are_spread_over_ranks_and_groups() -> None:
    sizes = {"qkv": (48, 16), "out": (16, 16), "up": (64, 16), "down": (16, 64), "bias": (64,)}
    tensors = {f"b{n}": {k: torch.empty(v, device="meta") for k, v in sizes.items()} for n in range(6)}
    mesh = fs.abstract_mesh((4,), ("shard",))
    plan = fs.make_plan(tensors, mesh, [fs.Rule(".*", fs.fsdp("shard"), align="leaf")], units=("b*",))
    load = [0] * 4
    for group in plan.groups:
        assert group.chunk == 1024  # the largest leaf: no packing does with less
        for part in range(4):
            held = [group.shard_range(n, part) for n in range(5)]
            load[part] += sum(b - a for a, b in held)
    assert max(load) <= 1.1 * sum(load) / 4, load  # and a rank that has much of one unit has little of another
    assert "b0: 3.8 KiB of padding, 23.4%, in 4 chunks" in str(plan) and "f32[48, 16]@flat(shard) align=leaf" in str(
        plan
    )


@pytest.mark.parametrize("align", ["leaf", 64])
def test_align_needs_a_flat_spec(align: Any) -> None:
    mesh = fs.abstract_mesh((2,), ("shard",))
    with pytest.raises(PlanError, match=r"w  P\('shard'\)\n.*flat="):
        fs.make_plan({"w": torch.empty(4, 4)}, mesh, [fs.Rule("w", P("shard"), align=align)])
    replicated = fs.make_plan({"w": torch.empty(4, 4)}, mesh, [fs.Rule("w", P(), align=align)])
    assert replicated.leaves["w"].align is None


@pytest.mark.parametrize("align", ["leaves", 0, -16, 2.0, True])
def test_what_is_no_alignment(align: Any) -> None:
    with pytest.raises(PlanError, match=r"rules\[0\] 'w': align="):
        fs.make_plan({"w": torch.empty(4)}, fs.abstract_mesh((2,), ("s",)), [fs.Rule("w", P(flat="s"), align=align)])


@given(plans())
def test_local_shapes(plan: fs.Plan) -> None:
    for rank in range(plan.mesh.size):
        mesh = fs.abstract_mesh(plan.mesh.sizes, plan.mesh.axis_names, rank=rank)
        for group in plan.groups:
            for number, leaf in enumerate(group.leaves):
                piece, shape = group.piece(number, mesh), group.local_shape(number, mesh)
                assert math.prod(shape) == piece.numel
                assert shape == ((piece.numel,) if leaf.at_rest.flat is not None else piece.shape)


@pytest.mark.long
@given(plans())
def test_shards_of_all_ranks_make_up_the_whole(plan: fs.Plan) -> None:
    full = {path: whole_leaf(leaf.shape, leaf.dtype) for path, leaf in plan.leaves.items()}
    built = {path: torch.full_like(leaf, -1) for path, leaf in full.items()}
    for rank in range(plan.mesh.size):
        mine = _seen_from(plan, rank)
        parts = dict(tree.paths(fs.shard(tree.nest(full), mine)))
        assert list(parts) == list(plan.leaves)
        for path, (group, number) in mine.places().items():
            piece = group.piece(number, mine.mesh)
            assert parts[path].dtype == full[path].dtype and parts[path].shape == group.local_shape(number, mine.mesh)
            index = global_index(full[path].shape, piece, mine.mesh.device)
            built[path].view(-1)[index] = parts[path].reshape(-1)
    for path, leaf in full.items():
        assert torch.equal(built[path], leaf), path


def _seen_from(plan: fs.Plan, rank: int) -> fs.Plan:
    mesh = fs.abstract_mesh(plan.mesh.sizes, plan.mesh.axis_names, rank=rank)
    params = {path: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for path, leaf in plan.leaves.items()}
    rules = [
        fs.Rule(path.replace(".", r"\."), leaf.at_rest, leaf.compute, align=leaf.align)
        for path, leaf in plan.leaves.items()
    ]
    units = sorted({path.split(".")[0] for path in plan.leaves})
    return fs.make_plan(tree.nest(params), mesh, rules, batch=plan.batch, units=units)


@pytest.mark.long
@given(plans())
def test_all_ranks_see_one_layout(plan: fs.Plan) -> None:
    for rank in range(plan.mesh.size):
        other = _seen_from(plan, rank)
        assert other.groups == plan.groups and dict(other.leaves) == dict(plan.leaves)


def _one(shape: tuple[int, ...], spec: Any, mesh: fs.Mesh, batch: P, compute: P | None = None) -> Group:
    params = {"w": torch.empty(shape, device="meta")}
    (group,) = fs.make_plan(params, mesh, [fs.Rule("w", spec, compute)], batch=batch).groups
    return group


def test_a_flat_leaf_that_is_shorter_than_a_chunk_lies_on_one_rank() -> None:
    mesh = fs.abstract_mesh((4,), ("shard",))
    group = _one((3,), fs.fsdp("shard"), mesh, P("shard"))
    assert (group.parts, group.chunk, group.gaps) == (4, 16, ((3, 64),))
    assert [group.piece(0, mesh, rank).numel for rank in range(4)] == [3, 0, 0, 0]


def test_a_leaf_that_is_tensor_parallel_and_flat() -> None:
    mesh = fs.abstract_mesh((2, 2), ("tp", "shard"), rank=3)
    group = _one((4, 10), P("tp", None, flat="shard"), mesh, P("shard"))
    (leaf,) = group.leaves
    assert (leaf.compute, leaf.compute_shape, group.kind) == (P("tp", None), (2, 10), "flat")
    assert (group.gather_axes, group.sum_axes, group.parts, group.chunk) == (("shard",), (), 2, 16)
    # Rows 2 and 3 on the second tp rank, of whose 20 elements its second shard rank holds the last 4.
    assert take(whole_leaf((4, 10)), group.piece(0, mesh)).tolist() == [36, 37, 38, 39]


def test_a_leaf_that_stays_local_on_a_data_axis() -> None:
    mesh = fs.abstract_mesh((2, 2), ("data", "expert"), rank=2)
    group = _one((4, 3), P("expert", flat="data"), mesh, P(("data", "expert")), compute=P("expert"))
    assert (group.gather_axes, group.sum_axes, group.leaves[0].compute_shape) == (("data",), (), (2, 3))
    alone = _one((4, 3), P("expert"), mesh, P(("data", "expert")), compute=P("expert"))
    assert (alone.gather_axes, alone.sum_axes, alone.parts, alone.kind) == ((), ("data",), 1, "flat")
    usual = _one((4, 3), P("expert"), mesh, P(("data", "expert")))
    assert (usual.gather_axes, usual.sum_axes, usual.kind, usual.staged) == (("expert",), ("data",), "dim", True)


@pytest.mark.parametrize("rank", range(4))
def test_hybrid_sharding_repeats_shards_over_replicas(rank: int) -> None:
    mesh = fs.abstract_mesh((2, 2), ("replica", "shard"), rank=rank)
    group = _one((40,), fs.fsdp("shard"), mesh, P(("replica", "shard")))
    assert (group.gather_axes, group.sum_axes) == (("shard",), ("replica",))
    assert group.piece(0, mesh) == group.piece(0, mesh, (rank + 2) % 4)


def test_global_index_of_a_box() -> None:
    mesh = fs.abstract_mesh((2,), ("x",), rank=1)
    group = _one((2, 4, 3), P(None, "x"), mesh, P("x"))
    want = whole_leaf((2, 4, 3))[:, 2:].reshape(-1)
    assert torch.equal(global_index((2, 4, 3), group.piece(0, mesh), mesh.device), want)


def test_an_empty_leaf_moves_nothing() -> None:
    full = {"a": torch.tensor(3.0), "b": torch.empty(0), "c": torch.arange(5.0)}
    plan = fs.make_plan(full, fs.abstract_mesh((1,), ("shard",)), [(r".*", fs.fsdp("shard"))])
    for path, leaf in fs.shard(full, plan).items():
        assert torch.equal(leaf, full[path].reshape(leaf.shape)), path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_begin_where_libraries_of_gpus_like_them(dtype: torch.dtype) -> None:
    """At multiples of 256 bytes of their group, whatever vectors are beside them, and at 16 elements at the least."""
    with torch.device("meta"):
        module = torch.nn.TransformerEncoderLayer(192, 6, 770, dtype=dtype)
    plan = fs.make_plan(fs.split(module), fs.abstract_mesh((8,), ("data",)), [(".*", fs.fsdp("data"))])
    (group,) = plan.groups
    size = dtype.itemsize
    starts = {leaf.path: start for leaf, start in zip(group.leaves, group.starts, strict=True)}
    assert len(starts) == 12 and all(start % ALIGN == 0 for start in starts.values())
    assert [path for path in starts if "weight" in path and "norm" not in path and starts[path] * size % 256] == []
    assert group.chunk * size % 16 == 0  # where NCCL and vector loads begin
