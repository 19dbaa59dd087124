"""Initial values are those of (seed, path, global index) on every mesh, and no rank makes more than its own."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P, init, tree
from fshard.errors import PlanError
from fshard.model.initial_values import Initializer, fill
from fshard.model.philox import fold
from tests.shared import modules
from tests.shared.workers import Pools

Meshes = tuple[tuple[int, ...], tuple[str, ...]]


def _mixed_plan(mesh: fs.Mesh) -> fs.Plan:
    module = nn.Sequential(modules.OddMLP(), nn.Conv2d(4, 8, 3), nn.Linear(12, 24), nn.Embedding(10, 3, padding_idx=4))
    model = fs.split(module.to("meta"), units=("0", "2"))
    rules = [
        (r"0\.norm\..*", P()),
        (r"2\.weight", P("shard", None)),
        (r"1\.weight", P(None, None, "shard") if mesh.shape["shard"] in (1, 3) else P("shard")),
        (r".*", fs.fsdp("shard")),
    ]
    return fs.make_plan(model, mesh, rules, batch=P(mesh.axis_names))


def _gpt_plan(mesh: fs.Mesh) -> fs.Plan:
    model = fs.split(modules.GPT().to("meta"), units=("blocks.*",))
    return fs.make_plan(model, mesh, [(r".*norm.*", P()), (r".*", fs.fsdp("shard"))], batch=P(mesh.axis_names))


PLANS = {"mixed": _mixed_plan, "gpt": _gpt_plan}
INITS = [(r"0\.(scale|pair)", init.normal(0.5)), (r"0\.shift", init.uniform())]


def values(name: str, axes: Meshes) -> dict[str, Tensor]:
    """On a rank: the whole initial values."""
    with fs.make_mesh(*axes) as mesh:
        plan = PLANS[name](mesh)
        state = fs.init_state(plan, fs.optim.sgd(0.1), seed=7, init=INITS if name == "mixed" else ())
        whole = dict(tree.paths(fs.unshard(state.params, plan)))
        for leaf in whole.values():
            assert leaf.isfinite().all()
        return whole


@pytest.mark.parametrize("name", PLANS)
def test_values_do_not_depend_on_the_mesh(pool: Pools, name: str) -> None:
    (want,) = pool(1).run(values, name, ((-1,), ("shard",)))
    for world, axes in (
        (2, ((-1,), ("shard",))),
        (3, ((-1,), ("shard",))),
        (4, ((-1,), ("shard",))),
        (4, ((2, 2), ("replica", "shard"))),
    ):
        for rank, got in enumerate(pool(world).run(values, name, axes)):
            assert list(got) == list(want)
            off = [path for path, leaf in want.items() if not torch.equal(got[path], leaf)]
            assert not off, f"{world} ranks as {axes}, rank {rank}: {off}"


def test_a_value_is_that_of_its_seed_path_and_index() -> None:
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = _gpt_plan(mesh)
        state = fs.init_state(plan, fs.optim.sgd(0.1), seed=3)
        other = fs.init_state(plan, fs.optim.sgd(0.1), seed=4)
    path = "blocks.1.mlp.0.weight"
    leaf, theirs = (dict(tree.paths(s.params))[path] for s in (state, other))
    shape = plan.leaves[path].shape
    assert torch.equal(leaf, fill(plan.inits[path], fold(3, path), shape, range(leaf.numel())))
    assert not torch.equal(leaf, theirs)
    alike = dict(tree.paths(state.params))["blocks.2.mlp.0.weight"]
    assert not torch.equal(leaf, alike)


@dataclasses.dataclass(frozen=True)
class Noted:
    """An initializer that notes how much of the leaf it is asked for."""

    asked: list[int] = dataclasses.field(compare=False)

    def __call__(self, key: int, shape: tuple[int, ...], index: Tensor) -> Tensor:
        self.asked.append(index.numel())
        return index.float()


class Largest(TorchDispatchMode):
    """The bytes of the largest storage that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and look at what it returns."""
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree.leaves(out) if isinstance(x, Tensor) and not x.is_meta]
        self.bytes = max([self.bytes, *sizes])
        return out


@pytest.mark.parametrize("initializer", [init.normal(0.02), init.zeros(), init.xavier_uniform()])
def test_no_rank_makes_the_whole_tree(initializer: Initializer) -> None:
    mesh = fs.abstract_mesh((64,), ("shard",), rank=9)
    params = {"flat": torch.empty(1 << 12, 1 << 12, device="meta"), "rows": torch.empty(1 << 12, 512, device="meta")}
    plan = fs.make_plan(params, mesh, [("rows", P("shard")), (".*", fs.fsdp("shard"))])
    shard = plan.places()["flat"][0].chunk  # elements: a 64th of 2**24
    with Largest() as seen:
        state = fs.init_state(plan, fs.optim.adamw(1e-3), init=[(".*", initializer)])
    assert state.params["flat"].numel() == shard == 1 << 18
    # int64 indices and float64 intermediates of one shard; the whole leaf would be 64 MiB in float32.
    assert seen.bytes <= 8 * shard + (1 << 12)


def test_an_initializer_is_asked_for_the_rank_s_part_alone() -> None:
    mesh = fs.abstract_mesh((4,), ("shard",), rank=1)
    asked: list[int] = []
    params = {"flat": torch.empty(100, device="meta"), "rows": torch.empty(8, 5, device="meta")}
    plan = fs.make_plan(params, mesh, [("rows", P("shard")), (".*", fs.fsdp("shard"))])
    state = fs.init_state(plan, fs.optim.sgd(0.1), init=[(".*", Noted(asked))])
    assert sorted(asked) == [10, 32]
    assert state.params["flat"].tolist() == list(range(32, 64))
    assert state.params["rows"].flatten().tolist() == list(range(10, 20))


def test_leaves_without_an_initializer_are_all_named() -> None:
    plan = fs.make_plan(
        {"a": torch.empty(3), "b": {"c": torch.empty(2, 2), "d": torch.empty(())}},
        fs.abstract_mesh((1,), ("shard",)),
        [(".*", P())],
    )
    with pytest.raises(PlanError) as caught:
        fs.init_state(plan, fs.optim.sgd(0.1), init=[(r"b\.c", init.zeros())])
    for part in ("2 leaves have no initializer", "a  [3]", "b.d  []", "init="):
        assert part in str(caught.value)
    with pytest.raises(PlanError, match=r"init\[1\] 'c'"):
        fs.init_state(plan, fs.optim.sgd(0.1), init=[(".*", init.zeros()), ("c", init.ones())])


def test_the_first_rule_that_matches_wins_over_the_module() -> None:
    plan = _gpt_plan(fs.abstract_mesh((1,), ("shard",)))
    rules = [(r"pos\.weight", init.ones()), (r"(pos|tok)\..*", init.constant(2.0))]
    params = fs.init_state(plan, fs.optim.sgd(0.1), init=rules).params
    assert params["pos"]["weight"].eq(1).all() and params["tok"]["weight"].eq(2).all()
    assert params["norm"]["weight"].eq(1).all() and params["norm"]["bias"].eq(0).all()


def test_starting_from_whole_tensors_copies_them() -> None:
    plan = _gpt_plan(fs.abstract_mesh((1,), ("shard",)))
    whole = {path: torch.randn(leaf.shape, requires_grad=True) for path, leaf in plan.leaves.items()}
    state = fs.init_state(plan, fs.optim.sgd(0.1), params=tree.nest(whole))
    for path, leaf in tree.paths(state.params):
        assert torch.equal(leaf.flatten(), whole[path].flatten()) and not leaf.requires_grad
        assert leaf.data_ptr() != whole[path].data_ptr()
