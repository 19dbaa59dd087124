"""Export leaf by leaf, state dicts, and DTensors: values, who gets what, and the memory that it takes."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fshard as fs
from fshard import P, tree
from fshard.collectives.group import Group
from fshard.errors import CheckpointError, DonatedError, PlanError, TreeError
from fshard.interchange import parcels
from fshard.interchange.transfer import transfer
from fshard.sharding.layout import Piece
from tests.test_memory_measured import Peak
from tests.workers import Pools

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
        found = dict(fs.export(state, axes=axes))
        assert list(found) == list(expected)
        for path, leaf in expected.items():
            assert found[path].shape == leaf.shape and torch.equal(found[path], leaf), (axes, path)
    # The consolidated optimizer state has an entry for each buffer of each leaf, in the shape of what was exported.
    for axes, expected in (((), here), ("all", whole)):
        found = fs.to_optim_state_dict(state, OPT, axes=axes)["state"]
        assert list(found) == list(expected)
        for path, leaf in expected.items():
            assert found[path].keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert torch.equal(found[path]["exp_avg"], leaf * 2) and torch.equal(found[path]["exp_avg_sq"], leaf.abs())
    every = [name for name, _ in fs.export(state, what="state", to=1)]
    got = [name for name, leaf in fs.export(state, to=1)]
    assert len(every) == 3 * len(got)
    assert [name for name, _ in fs.export(state, what="opt_state", to=1, axes="all")] == [
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
    for found in (dict(fs.export(state)), dict(fs.export(state.params, plan)), fs.to_state_dict(state)):
        assert list(found) == list(whole) and all(torch.equal(found[k], v) for k, v in whole.items())
        assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in found.values())
    for root in range(mesh.size):
        found = dict(fs.export(state, to=root, dtype=torch.bfloat16))
        assert list(found) == (list(whole) if mesh.rank == root else [])
        assert all(torch.equal(leaf, whole[path].bfloat16()) for path, leaf in found.items())
    back = fs.from_state_dict(plan, OPT, fs.to_state_dict(state), fs.to_optim_state_dict(state, OPT), step=7)
    assert back.step == 7
    for (path, mine), (_, other) in zip(tree.paths(back.opt_state), tree.paths(state.opt_state), strict=True):
        assert torch.equal(mine, other), path
    again = fs.init_state(plan, OPT, shards=back.params)
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(tree.paths(again.params), tree.paths(state.params), strict=True)
    )


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
            found = dict(fs.export(state, axes=axes, to=to))
            assert all(torch.equal(leaf, expected[path]) for path, leaf in found.items())
            assert to == 2 or list(found) == list(whole)
    turned = dict(fs.export(state, axes="all", rename=[fs.Rename("(col|row)", r"\1.t", transpose=True)]))
    assert torch.equal(turned["col.t"], whole["col"].t()) and turned["row.t"].is_contiguous()


@pytest.mark.parametrize("slab", [1 << 20, 20, 4])
def test_tensor_parallel_slices_come_as_they_are_or_whole(monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    monkeypatch.setattr(parcels, "SLAB", slab)
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
        for _ in fs.export(state, to=to):  # lanes and their shared memory are made at the first call
            pass
        with Peak() as peak:
            if way == "callback":
                fs.export(state, to=to, callback=lambda name, leaf: None)
            else:
                for _, leaf in fs.export(state, to=to):
                    seen += leaf.numel()
                    del leaf
        total = sum(math.prod(leaf.shape) for leaf in plan.leaves.values())
        return {"above": peak.above, "seen": seen, "total": total, "bytes": 4 * total}


@pytest.mark.parametrize("way", ["iterator", "callback"])
@pytest.mark.parametrize("to", [None, 0])
def test_a_stream_takes_the_memory_of_its_largest_leaf(pool: Pools, to: int | None, way: str) -> None:
    for rank, seen in enumerate(pool(2).run(streamed, to, way)):
        receives = to is None or rank == to
        assert seen["bytes"] == LARGEST + 6 * 8 * MEBI
        assert way == "callback" or seen["seen"] == seen["total"] * receives
        # Beside the leaf, what arrives or leaves of a slab.
        assert seen["above"] <= _bound(receives), seen


def _bound(receives: bool) -> int:
    return LARGEST * receives + parcels.SLAB + MEBI


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
            fs.export(state, callback=push)
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
            fs.export(fs.init_state(plan, OPT, params=LEAVES), to=mesh.rank)
        return str(caught.value)


def test_ranks_that_want_different_things_are_told(pool: Pools) -> None:
    first, second = pool(2).run(disagreeing)
    assert first == second and "the arguments of export differ between ranks" in first


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
    "turned": ({"rename": [fs.Rename("c", "c", transpose=True)]}, TreeError, "have not two dims"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_cannot_be(name: str) -> None:
    arguments, error, text = BAD[name]
    with pytest.raises(error, match=text):
        fs.export(one()[1], **arguments)


def test_states_and_trees_that_cannot_be_exported() -> None:
    plan, state = one()
    with pytest.raises(PlanError, match="give plan= with a tree"):
        fs.export(state.params)
    with pytest.raises(PlanError, match="give plan= with a tree"):
        fs.export(state.params, plan, what="state")
    with pytest.raises(TreeError, match="missing  b"):
        fs.export({"a": state.params["a"]}, plan)
    with pytest.raises(PlanError, match="abstract"):
        mesh = fs.abstract_mesh((2,), ("shard",))
        fs.export(fs.init_state(fs.make_plan(LEAVES, mesh, [(".*", P())]), OPT, params=LEAVES))
    stream = fs.export(state)
    next(stream)
    state.donate()
    with pytest.raises(DonatedError):
        next(stream)


@settings(max_examples=60, deadline=None)
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
        part = transfer(Group(mesh, ("x",)), held(have[mesh.rank]), have, want)
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


def dtensors(sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    """On a rank: a tree to DTensors and back, and what DTensor itself distributes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    with fs.make_mesh(sizes, names) as mesh:
        whole = {**LEAVES, "d": torch.randn(4, 4), "s": torch.tensor(3.0)}
        del whole["e"]
        rules = [("b", P("shard")), ("c", P()), ("d", P(*names)), (".*", fs.fsdp("shard"))]
        plan = fs.make_plan(whole, mesh, rules, batch=P("shard"))
        state = fs.init_state(plan, OPT, params=whole)
        theirs = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        placed = fs.to_dtensor(state.params, plan, device_mesh=theirs)
        for path, leaf in placed.items():
            assert isinstance(leaf, DTensor) and torch.equal(leaf.full_tensor(), whole[path]), path
            again = distribute_tensor(whole[path], theirs, leaf.placements)
            assert torch.equal(again.to_local(), leaf.to_local()), path
        spread = {
            path: distribute_tensor(leaf, theirs, [Shard(0)] * len(sizes)) for path, leaf in whole.items() if leaf.ndim
        }
        summed = DTensor.from_local(torch.tensor(3.0) / mesh.size, theirs, [Partial()] * len(sizes))
        for tree_ in (placed, {**spread, "s": whole["s"]}, {**spread, "s": summed}):
            back = fs.from_dtensor(tree_, plan)
            for path, leaf in tree.paths(state.params):
                torch.testing.assert_close(back[path], leaf, rtol=0, atol=0 if path != "s" else 1e-6)
        with pytest.raises(TreeError, match="unknown    x"):
            fs.from_dtensor({**placed, "x": placed["b"]}, plan)
        with pytest.raises(TreeError, match="a DTensor; use fs.from_dtensor"):
            fs.from_state_dict(plan, OPT, placed)
        wrong = init_device_mesh("cpu", (mesh.size, 1), mesh_dim_names=("x", "y"))
        with pytest.raises(PlanError, match="device_mesh has dims"):
            fs.to_dtensor(state.params, plan, device_mesh=wrong)
        with pytest.raises(TreeError, match="lies on"):
            fs.from_dtensor({**placed, "b": distribute_tensor(whole["b"], wrong)}, plan)
        dist.barrier()


@pytest.mark.parametrize(("sizes", "names"), [((2,), ("shard",)), ((2, 2), ("shard", "tp")), ((2, 2), ("tp", "shard"))])
def test_trees_become_dtensors_and_back(pool: Pools, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    pool(math.prod(sizes)).run(dtensors, sizes, names)


def test_a_dtensor_needs_processes() -> None:
    plan, state = one()
    with pytest.raises(PlanError, match="needs a process group"):
        fs.to_dtensor(state.params, plan)


def linears() -> nn.Module:
    """A module with a tied weight."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    module[1].weight = module[0].weight
    return module


TORCH = {
    "adamw": (lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.2), fs.optim.adamw(0.01, weight_decay=0.2)),
    "sgd": (lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9), fs.optim.sgd(0.01, momentum=0.9)),
    "plain sgd": (lambda ps: torch.optim.SGD(ps, 0.01), fs.optim.sgd(0.01)),
    "adagrad": (lambda ps: torch.optim.Adagrad(ps, 0.01), fs.optim.from_torch(torch.optim.Adagrad, lr=0.01)),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", TORCH)
def test_optimizers_of_torch_go_on_here_and_back(name: str, named: bool) -> None:
    make, opt = TORCH[name]
    module = linears()
    theirs = make(module.named_parameters() if named else module.parameters())
    for _ in range(3):
        module(torch.randn(8, 4)).square().mean().backward()
        theirs.step()
    plan = fs.make_plan(fs.split(module), fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    counted = {} if "sgd" not in name else {"step": 3}
    no_buffers = [(r"2\.(running_.*|num_batches_tracked)", None)]
    state = fs.from_state_dict(plan, opt, module.state_dict(), theirs.state_dict(), rename=no_buffers, **counted)
    assert state.step == 3
    full = fs.to_state_dict(state, buffers=fs.split(module).buffers)
    assert full.keys() == module.state_dict().keys()
    twin = linears()
    twin.load_state_dict(full)
    ours = make(twin.parameters())
    ours.load_state_dict(fs.to_optim_state_dict(state, opt, keys="index"))
    for number, row in theirs.state_dict()["state"].items():
        for key, value in row.items():
            assert value is None or torch.equal(torch.as_tensor(ours.state_dict()["state"][number][key]), value)
    batch = torch.randn(8, 4)
    for job, rule in ((module, theirs), (twin, ours)):
        rule.zero_grad()
        job(batch).square().mean().backward()
        rule.step()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), twin.parameters(), strict=True))


def test_decay_of_some_leaves_makes_two_groups_and_comes_back() -> None:
    plan, state = one()
    opt = fs.optim.adamw(fs.optim.linear(0.1, 0.0, 10), decay=fs.optim.matrices)
    found = fs.to_optim_state_dict(fs.init_state(plan, opt, params=LEAVES), opt, keys="index")
    assert [(group["weight_decay"], group["lr"], group["param_names"]) for group in found["param_groups"]] == [
        (0.01, 0.1, ["a", "b", "e"]),
        (0.0, 0.1, ["c"]),
    ]
    assert fs.from_state_dict(plan, opt, LEAVES, found).step == 0
    for group in found["param_groups"]:
        group.pop("param_names")
    with pytest.raises(TreeError, match="numbers 4 parameters in 2 groups.*named_parameters"):
        fs.from_state_dict(plan, opt, LEAVES, found)


def _rows(change: Any) -> dict[str, Any]:
    found = fs.to_optim_state_dict(one()[1], OPT)
    change(found)
    return found


BAD_OPTIM: dict[str, tuple[Any, str]] = {
    "nothing": (lambda o: o.clear(), "a dict of 'state' and 'param_groups'"),
    "missing": (lambda o: o["state"]["a"].pop("exp_avg"), r"missing     state.a.exp_avg  \[11, 3\]"),
    "no leaf": (lambda o: o["state"].pop("b"), "missing     state.b.exp_avg "),
    "unexpected": (
        lambda o: o["state"]["a"].update(max_exp_avg_sq=torch.ones(11, 3)),
        "unexpected  state.a.max_exp_avg_sq",
    ),
    "shape": (lambda o: o["state"]["c"].update(exp_avg=torch.ones(7)), r"mismatched  state.c.exp_avg: \[7\], .*\[8\]"),
    "dtype": (lambda o: o["state"]["c"].update(exp_avg=torch.ones(8).double()), "would be rounded"),
    "steps": (lambda o: o["state"]["c"].update(step=torch.tensor(3.0)), "different numbers of updates"),
    "value": (lambda o: o["state"]["c"].update(exp_avg="x"), "state.c.exp_avg: str"),
}


@pytest.mark.parametrize("name", BAD_OPTIM)
def test_an_optimizer_state_that_does_not_fit(name: str) -> None:
    change, text = BAD_OPTIM[name]
    with pytest.raises(TreeError, match=text):
        fs.from_state_dict(one()[0], OPT, LEAVES, _rows(change))


def test_state_dicts_that_do_not_fit() -> None:
    plan, state = one()
    with pytest.raises(TreeError, match="holds what is no plain tensor:\n  a: ndarray|list"):
        fs.from_state_dict(plan, OPT, {**LEAVES, "a": [1.0]})
    with pytest.raises(PlanError, match="keys='path'"):
        fs.to_optim_state_dict(state, OPT, keys="path")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="params= and shards="):
        fs.init_state(plan, OPT, params=LEAVES, shards=state.params)
    with pytest.raises(TreeError, match="shards has 1 leaves"):
        fs.init_state(plan, OPT, shards={"a": state.params["a"]})
    nested = fs.to_state_dict(
        fs.init_state(placed(fs.make_mesh((1, 1), ("dp", "ep"))), OPT, params=EXPERTS), nested=True
    )
    assert torch.equal(nested["experts"]["b"], EXPERTS["experts"]["b"])  # type: ignore[index]
