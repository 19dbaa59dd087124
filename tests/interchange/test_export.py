"""Export leaf by leaf, state dicts, and DTensors: values, who gets what, and the memory that it takes."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fshard as fs
from fshard import P, tree
from fshard.collectives.ranks import Ranks
from fshard.errors import CheckpointError, DonatedError, PlanError, TreeError
from fshard.interchange import export_plan
from fshard.interchange.export_plan import exchange_pieces
from fshard.sharding.layout import Piece
from tests.runtime.test_memory_measured import Peak
from tests.shared.workers import Pools

OPT = fs.optim.adamw(1e-2)
EXPERTS = {
    "experts": {"w": torch.randn(4, 5, 3), "b": torch.randn(4, 7)},
    "router": torch.randn(3, 4),
    "s": torch.tensor(2.0),
}


def placed(mesh: fs.Mesh) -> fs.Plan:
    """Experts local on ``ep``, which is a data axis as well; all else flat-sharded over both."""
    experts = [
        fs.Rule(r"experts\.w", P("ep", flat="dp"), compute=P("ep")),
        fs.Rule(r"experts\.b", P("ep"), compute=P("ep")),
    ]
    return fs.make_plan(EXPERTS, mesh, [*experts, (r".*", fs.fsdp(("dp", "ep")))], batch=P(("dp", "ep")))


def moved(state: fs.TrainState) -> fs.TrainState:
    """The state with optimizer buffers that tell elements apart."""
    for path, leaf in tree.paths(state.params):
        at = dict(tree.paths(state.opt_state["exp_avg"]))[path]
        at.copy_(leaf * 2)
        dict(tree.paths(state.opt_state["exp_avg_sq"]))[path].copy_(leaf.abs())
    return state


def local(whole: Tensor, mesh: fs.Mesh) -> Tensor:
    """The experts of this rank."""
    at = dict(zip(mesh.axis_names, mesh.coords(), strict=True))["ep"]
    return whole.chunk(2)[at]


def experts_stay() -> tuple[int, list[str]]:
    """On a rank: export in every form, check what comes; returns the rank and the names it got of ``to=1``."""
    mesh = fs.make_mesh((2, 2), ("dp", "ep"))
    state = moved(fs.init_state(placed(mesh), OPT, params=EXPERTS))
    whole = dict(tree.paths(EXPERTS))
    here = {path: local(leaf, mesh) if path.startswith("experts") else leaf for path, leaf in whole.items()}
    for axes, expected in (((), here), (("ep",), whole), ("all", whole), (("dp",), here)):
        found = dict(fs.io.export(state, axes=axes))
        assert list(found) == list(expected)
        for path, leaf in expected.items():
            assert found[path].shape == leaf.shape and torch.equal(found[path], leaf), (axes, path)
    # The consolidated optimizer state has an entry for each buffer of each leaf, in the shape of what was exported.
    for axes, expected in (((), here), ("all", whole)):
        found = fs.io.to_optim_state_dict(state, OPT, axes=axes)["state"]
        assert list(found) == list(expected)
        for path, leaf in expected.items():
            assert found[path].keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert torch.equal(found[path]["exp_avg"], leaf * 2) and torch.equal(found[path]["exp_avg_sq"], leaf.abs())
    every = [name for name, _ in fs.io.export(state, what="state", to=1)]
    got = [name for name, leaf in fs.io.export(state, to=1)]
    assert len(every) == 3 * len(got)
    assert [name for name, _ in fs.io.export(state, what="opt_state", to=1, axes="all")] == [
        f"{buffer}.{path}" for buffer in ("exp_avg", "exp_avg_sq") for path in whole if mesh.rank == 1
    ]
    return mesh.rank, got


def test_experts_stay_where_they_are_unless_asked_for() -> None:
    got = dict(fs.virtual_mesh((2, 2), ("dp", "ep")).run(experts_stay))
    # Rank 1 has the second half of the experts; the first half comes to the rank beside it on "ep", and alone.
    assert got == {0: ["experts.w", "experts.b"], 1: ["experts.w", "experts.b", "router", "s"], 2: [], 3: []}


LEAVES = {"a": torch.randn(11, 3), "b": torch.randn(4, 6), "c": torch.randn(8), "e": torch.randn(0, 2)}


def everywhere(spec: Any, sizes: Any) -> None:
    """On a rank: every way out and in gives the same values as ``unshard``."""
    names = ("replica", "shard")[-len(sizes) :]
    mesh = fs.make_mesh(sizes, names)
    plan = fs.make_plan(LEAVES, mesh, [("b", spec), (".*", fs.fsdp("shard"))], batch=P("shard"))
    state = moved(fs.init_state(plan, OPT, params=LEAVES))
    whole = dict(tree.paths(fs.unshard(state.params, plan)))
    for found in (dict(fs.io.export(state)), dict(fs.io.export(state.params, plan)), fs.io.to_state_dict(state)):
        assert list(found) == list(whole) and all(torch.equal(found[k], v) for k, v in whole.items())
        assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in found.values())
    for root in range(mesh.size):
        found = dict(fs.io.export(state, to=root, dtype=torch.bfloat16))
        assert list(found) == (list(whole) if mesh.rank == root else [])
        assert all(torch.equal(leaf, whole[path].bfloat16()) for path, leaf in found.items())
    back = fs.io.from_state_dict(fs.io.to_state_dict(state), plan, OPT, fs.io.to_optim_state_dict(state, OPT), step=7)
    assert back.step == 7
    for (path, mine), (_, other) in zip(tree.paths(back.opt_state), tree.paths(state.opt_state), strict=True):
        assert torch.equal(mine, other), path
    again = fs.init_state(plan, OPT, shards=back.params)
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(tree.paths(again.params), tree.paths(state.params), strict=True)
    )


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("sizes", [(1,), (3,), (4,), (2, 2)])
@pytest.mark.parametrize("spec", [P(), P(flat="shard"), P("shard"), P(None, "shard")], ids=str)
def test_every_way_out_and_in_gives_the_same_values(spec: P, sizes: tuple[int, ...]) -> None:
    if sizes == (3,) and spec == P("shard"):
        spec = P(None, "shard")
    if sizes == (4,) and spec == P(None, "shard"):
        spec = P("shard")
    names = ("replica", "shard")[-len(sizes) :]
    fs.virtual_mesh(sizes, names).run(everywhere, spec, sizes)


def tensor_parallel() -> None:
    """On a rank: leaves that are local on a tensor-parallel axis, with slabs of a few elements."""
    mesh = fs.make_mesh((2, 2), ("shard", "tp"))
    whole = {"col": torch.randn(6, 8), "row": torch.randn(8, 6), "norm": torch.randn(5)}
    rules = [("col", P(None, "tp", flat="shard")), ("row", P("tp", None, flat="shard")), (".*", fs.fsdp("shard"))]
    plan = fs.make_plan(whole, mesh, rules, batch=P("shard"))
    state = fs.init_state(plan, OPT, params=whole)
    at = mesh.coords()[1]
    mine = {"col": whole["col"].chunk(2, 1)[at], "row": whole["row"].chunk(2)[at], "norm": whole["norm"]}
    for axes, expected in (((), mine), ("all", whole)):
        for to in (None, 2):
            found = dict(fs.io.export(state, axes=axes, to=to))
            assert all(torch.equal(leaf, expected[path]) for path, leaf in found.items())
            assert to == 2 or list(found) == list(whole)
    turned = dict(fs.io.export(state, axes="all", rename=[fs.io.Rename("(col|row)", r"\1.t", transpose=True)]))
    assert torch.equal(turned["col.t"], whole["col"].t()) and turned["row.t"].is_contiguous()


@pytest.mark.long
@pytest.mark.parametrize("slab", [1 << 20, 20, 4])
def test_tensor_parallel_slices_come_as_they_are_or_whole(monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    monkeypatch.setattr(export_plan, "SLAB", slab)
    fs.virtual_mesh((2, 2), ("shard", "tp")).run(tensor_parallel)


MEBI = 1 << 20
LARGEST = 24 * MEBI


def streamed(to: int | None, way: str) -> dict[str, Any]:
    """On a rank: the memory that a stream takes, where the caller keeps nothing."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        params = {"big": torch.empty(LARGEST // 4), **{f"l{n}": torch.empty(2 * MEBI) for n in range(6)}}
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))])
        state = fs.init_state(plan, fs.optim.sgd(0.1), init=[(".*", fs.init.ones())])
        del params
        seen = 0
        for _ in fs.io.export(state, to=to):  # communicators and their shared memory are made at the first call
            pass
        with Peak() as peak:
            if way == "callback":
                fs.io.export(state, to=to, callback=lambda name, leaf: None)
            else:
                for _, leaf in fs.io.export(state, to=to):
                    seen += leaf.numel()
                    del leaf
        total = sum(math.prod(leaf.shape) for leaf in plan.leaves.values())
        return {"above": peak.above, "seen": seen, "total": total, "bytes": 4 * total}


@pytest.mark.parametrize(("to", "way"), [(None, "iterator"), (0, "callback")])
def test_a_stream_takes_the_memory_of_its_largest_leaf(pool: Pools, to: int | None, way: str) -> None:
    for rank, seen in enumerate(pool(2).run(streamed, to, way)):
        receives = to is None or rank == to
        assert seen["bytes"] == LARGEST + 6 * 8 * MEBI
        assert way == "callback" or seen["seen"] == seen["total"] * receives
        # Beside the leaf, what arrives or leaves of a slab.
        assert seen["above"] <= _bound(receives), seen


def _bound(receives: bool) -> int:
    return LARGEST * receives + export_plan.SLAB + MEBI


def broken(where: int) -> str:
    """On a rank: a callback that fails on one rank."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(LEAVES, mesh, [(".*", fs.fsdp("shard"))])
        state, names = fs.init_state(plan, OPT, params=LEAVES), []

        def push(name: str, leaf: Tensor) -> None:
            names.append(name)
            if mesh.rank == where and name == "b":
                raise OSError("the engine hung up")

        try:
            fs.io.export(state, callback=push)
        except Exception as error:
            return f"{type(error).__name__}: {error} {names}"
        return "nothing"


def test_a_callback_that_fails_fails_on_all_ranks(pool: Pools) -> None:
    ours, theirs = pool(2).run(broken, 0)
    assert ours == "OSError: the engine hung up ['a', 'b']"
    assert (
        "PeerError" in theirs and "rank 0: OSError: the engine hung up" in theirs and "['a', 'b', 'c', 'e']" in theirs
    )


def disagreeing() -> str:
    """On a rank: another leaf than on other ranks."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(LEAVES, mesh, [(".*", fs.fsdp("shard"))])
        with pytest.raises(CheckpointError) as caught:
            fs.io.export(fs.init_state(plan, OPT, params=LEAVES), to=mesh.rank)
        return str(caught.value)


def test_ranks_that_want_different_things_are_told(pool: Pools) -> None:
    first, second = pool(2).run(disagreeing)
    assert first == second and "export: to: rank 0: 0, rank 1: 1" in first


def one() -> tuple[fs.Plan, fs.TrainState]:
    """A state on a mesh of one."""
    plan = fs.make_plan(LEAVES, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    return plan, fs.init_state(plan, OPT, params=LEAVES)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "what": ({"what": "grads"}, PlanError, "what='grads'"),
    "to": ({"to": 1}, PlanError, "to=1 must be a rank of the mesh, 0 to 0"),
    "to a name": ({"to": "all"}, PlanError, "to='all'"),
    "axes": ({"axes": ("tp",)}, Exception, "axis 'tp' is not in the mesh"),
    "dtype": ({"dtype": torch.int8}, PlanError, "dtype=torch.int8"),
    "rename": ({"rename": [("x", "y")]}, PlanError, "decide no name"),
    "collision": ({"rename": [("[ab]", "y")]}, TreeError, "same name"),
    "turned": ({"rename": [fs.io.Rename("c", "c", transpose=True)]}, TreeError, "have not two dims"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_cannot_be(name: str) -> None:
    arguments, error, text = BAD[name]
    with pytest.raises(error, match=text):
        fs.io.export(one()[1], **arguments)


def test_states_and_trees_that_cannot_be_exported() -> None:
    plan, state = one()
    with pytest.raises(PlanError, match="give plan= with a tree"):
        fs.io.export(state.params)
    with pytest.raises(PlanError, match="give plan= with a tree"):
        fs.io.export(state.params, plan, what="state")
    with pytest.raises(TreeError, match="missing  b"):
        fs.io.export({"a": state.params["a"]}, plan)
    with pytest.raises(PlanError, match="abstract"):
        mesh = fs.abstract_mesh((2,), ("shard",))
        fs.io.export(fs.init_state(fs.make_plan(LEAVES, mesh, [(".*", P())]), OPT, params=LEAVES))
    stream = fs.io.export(state)
    next(stream)
    state.memory.donate()
    with pytest.raises(DonatedError):
        next(stream)


@given(st.data())
def test_any_layout_becomes_any_other(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    world, total = data.draw(st.integers(1, 4)), math.prod(shape)
    ends = sorted(data.draw(st.lists(st.integers(0, total), min_size=world - 1, max_size=world - 1)))
    ranges = [Piece((0,) * len(shape), shape, a, b) for a, b in zip([0, *ends], [*ends, total], strict=True)]
    copies = [Piece((0,) * len(shape), shape, 0, total)] * world
    boxes = _boxes(shape, world, data.draw(st.integers(0, max(len(shape) - 1, 0))))
    have, want = data.draw(st.permutations([ranges, copies, boxes]))[:2]
    whole = torch.arange(float(total)).view(shape)

    def held(piece: Piece) -> Tensor:
        box = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]
        return box.reshape(-1)[piece.start : piece.stop].clone()

    def on_rank() -> bool:
        mesh = fs.make_mesh((world,), ("x",))
        part = exchange_pieces(Ranks(mesh, ("x",)), held(have[mesh.rank]), have, want)
        return torch.equal(part, held(want[mesh.rank]))

    assert all(fs.virtual_mesh((world,), ("x",)).run(on_rank))


def _boxes(shape: tuple[int, ...], world: int, dim: int) -> list[Piece]:
    if not shape:
        return [Piece((), (), 0, 1)] * world
    width = -(-shape[dim] // world)
    out = []
    for rank in range(world):
        begin = min(rank * width, shape[dim])
        size = tuple(min(width, n - begin) if d == dim else n for d, n in enumerate(shape))
        out.append(Piece(tuple(begin * (d == dim) for d in range(len(shape))), size, 0, math.prod(size)))
    return out
