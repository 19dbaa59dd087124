"""Checkpointers on real processes: exact resumes, other meshes, retention, locks, and errors that are alike."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, tree
from tests.checkpoint.played import states, whole_params
from tests.shared.bad import Raised, alike, attempt
from tests.shared.workers import Pools

OPT = fs.optim.adamw(1e-2, weight_decay=0.1)
ROWS = 24


def weights(width: int = 16) -> dict[str, Any]:
    """A tree of two units and a head."""
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) / 4

    blocks = {str(i): {"w": normal(width, width), "b": torch.zeros(width)} for i in range(2)}
    return {"blocks": blocks, "head": normal(width, 4), "scale": torch.tensor(1.0)}


@fs.unit
def block(params: Any, x: Tensor) -> Tensor:
    """A residual block with dropout."""
    return x + F.dropout(torch.tanh(F.linear(x, params["w"], params["b"])), 0.3)


def loss(params: Any, batch: Tensor) -> Tensor:
    """A loss with dropout, which draws from the step's seed."""
    x = batch
    for unit in params["blocks"].values():
        x = block(unit, x)
    return ((x @ params["head"]) * params["scale"]).square().mean() - x.mean()


FLAT = [(".*", fs.fsdp("shard"))]
MIXED = [("blocks.*w", P("shard")), ("head", fs.fsdp("shard")), (".*", P())]


def plan_on(mesh: fs.Mesh, rules: Any = FLAT) -> fs.Plan:
    """The plan of the tree."""
    return fs.make_plan(weights(), mesh, rules, batch=P(mesh.axis_names), units=("blocks.*",))


class Loader:
    """Batches in a shuffled order that a position says: what ``data=`` is for."""

    def __init__(self, mesh: fs.Mesh, position: int = 0) -> None:
        self.mesh, self.position = mesh, position

    def next(self) -> Tensor:
        """This rank's part of the next global batch."""
        epoch, at = divmod(self.position, 3)
        order = torch.randperm(3, generator=torch.Generator().manual_seed(epoch)).tolist()
        draw = torch.Generator().manual_seed(order[at] + 100 * epoch)
        self.position += 1
        rows = torch.randn(ROWS, 16, generator=draw)
        return rows.chunk(self.mesh.size)[self.mesh.rank].clone()


def train(root: str, rules: Any, steps: int, until: int, async_: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train to step ``until``, from the newest checkpoint if there is one, saving every ``steps``."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = plan_on(mesh, rules)
        step = fs.make_train_step(loss, OPT, plan, clip_norm=0.5)
        with fs.Checkpointer(root, every=steps, async_=async_) as ckpt:
            if ckpt.latest() is None:
                state, loader = fs.init_state(plan, OPT, seed=11, params=weights()), Loader(mesh)
            else:
                state = ckpt.restore(plan, OPT)
                assert ckpt.restored is not None
                loader = Loader(mesh, ckpt.restored.data["position"])
            losses = []
            while state.step < until:
                state, metrics = step(state, loader.next())
                losses.append(metrics.loss.item())
                if ckpt.due(state):
                    ckpt.save(state, data={"position": loader.position}, schedule=step.schedule)
        whole = {**dict(tree.paths(fs.unshard(state.params, plan))), **_opt(state, plan)}
        return losses, whole


def _opt(state: fs.TrainState, plan: fs.Plan) -> dict[str, Tensor]:
    return {
        f"{name}.{path}": leaf
        for name, moments in state.opt_state.items()
        for path, leaf in tree.paths(fs.unshard(moments, plan))
    }


def test_a_resumed_run_is_the_run_that_never_stopped(pool: Pools, tmp_path: Path) -> None:
    n, configs = 4, [(FLAT, False, "flat"), (MIXED, True, "async")]
    whole = [
        pool(2).run(train, str(tmp_path / f"{name}-whole"), rules, n, 2 * n, async_) for rules, async_, name in configs
    ]
    first = [pool(2).run(train, str(tmp_path / name), rules, n, n, async_) for rules, async_, name in configs]
    pool(2).close()  # new processes
    second = [pool(2).run(train, str(tmp_path / name), rules, n, 2 * n, async_) for rules, async_, name in configs]
    for number, (_, _, name) in enumerate(configs):
        for one, two, both in zip(first[number], second[number], whole[number], strict=True):
            assert one[0] + two[0] == both[0] and len(two[0]) == n, name
            for path, leaf in both[1].items():
                assert torch.equal(leaf, two[1][path]), (name, path)
        assert sorted(os.listdir(tmp_path / name)) == [".lock", "step-00000004", "step-00000008"]


def compare(root: str, sizes: tuple[int, ...], names: tuple[str, ...], rules: Any, expected: Any) -> list[str]:
    """Restore on another mesh; which leaves differ from the expected ones."""
    with fs.make_mesh(sizes, names) as mesh:
        plan = plan_on(mesh, rules)
        state = fs.Checkpointer(root).restore(plan, OPT)
        found = {**dict(tree.paths(fs.unshard(state.params, plan))), **_opt(state, plan)}
        step = fs.make_train_step(loss, OPT, plan)
        state, _ = step(state, Loader(mesh, 4).next())
        assert state.step == 5
        return [path for path, leaf in expected.items() if not torch.equal(found[path], leaf)]


HSDP = [("head", P(None, flat="shard")), (".*", fs.fsdp("shard"))]
TENSOR = [("blocks.*w", P("replica", flat="shard")), (".*", fs.fsdp("shard"))]


def test_a_checkpoint_fits_any_mesh(pool: Pools, tmp_path: Path) -> None:
    expected = pool(2).run(train, str(tmp_path), FLAT, 4, 4, False)[0][1]
    for world, sizes, names, rules in [
        (1, (1,), ("shard",), MIXED),
        (3, (3,), ("shard",), FLAT),
        (4, (4,), ("shard",), MIXED),
        (4, (2, 2), ("replica", "shard"), HSDP),
    ]:
        wrong = pool(world).run(compare, str(tmp_path), sizes, names, rules, expected)
        assert wrong == [[]] * world, (world, sizes)


def saves(root: str, keep: int, steps: list[int]) -> list[int]:
    """Save some steps; what is left."""
    with fs.make_mesh((-1,), ("shard",)) as mesh, fs.Checkpointer(root, keep=keep) as ckpt:
        begun = ckpt.latest() is not None
        state = ckpt.restore(plan_on(mesh), OPT) if begun else fs.init_state(plan_on(mesh), OPT, params=weights())
        for step in steps:
            state = dataclasses.replace(state, step=step)
            ckpt.save(state)
            assert step in ckpt.steps()
        return ckpt.steps()


def test_old_steps_go_and_the_newest_stays(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(saves, str(tmp_path), 2, [1, 2, 3, 10, 4]) == [[4, 10]] * 2
    assert pool(2).run(saves, str(tmp_path), 1, [3]) == [[3]] * 2  # never what was just written
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000003"]


Case = Callable[[fs.Mesh, str], Any]


def case(name: str, root: str) -> Raised | None:
    """What a bad call raises on this rank."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        return attempt(lambda: CASES[name](mesh, root))


def _state(mesh: fs.Mesh, step: int = 1) -> fs.TrainState:
    state = fs.init_state(plan_on(mesh), OPT, params=weights())
    state = dataclasses.replace(state, step=step)
    return state


def _other_model(mesh: fs.Mesh, root: str) -> Any:
    params = weights(20)
    del params["scale"]
    params["extra"] = torch.zeros(3)
    plan = fs.make_plan(params, mesh, FLAT, units=("blocks.*",))
    return fs.Checkpointer(root).restore(plan, OPT)


def _one_rank(mesh: fs.Mesh, root: str, **given: Any) -> Any:
    odd = {name: values[mesh.rank == 1] for name, values in given.items()}
    state = fs.Checkpointer(root).restore(plan_on(mesh), OPT)
    state = dataclasses.replace(state, step=9)
    return fs.Checkpointer(root).save(state, **odd)


def _rules(mesh: fs.Mesh, root: str, *rules: Any, into: bool = False) -> Any:
    start = _state(mesh) if into else None
    return fs.Checkpointer(root).restore(plan_on(mesh), OPT, rules=rules, into=start)


def _locked(mesh: fs.Mesh, root: str) -> Any:
    with fs.Checkpointer(root) as first:
        state = first.restore(plan_on(mesh), OPT)
        state = dataclasses.replace(state, step=8)
        first.save(state)
        return fs.Checkpointer(root).save(_state(mesh, 9))


CASES: dict[str, Case] = {
    "no folder": lambda mesh, root: fs.Checkpointer(root + "/none").restore(plan_on(mesh), OPT),
    "no such step": lambda mesh, root: fs.Checkpointer(root).restore(plan_on(mesh), OPT, 5),
    "another model": _other_model,
    "no optimizer": lambda mesh, root: fs.Checkpointer(root).restore(plan_on(mesh), fs.optim.sgd(0.1)),
    "there already": lambda mesh, root: fs.Checkpointer(root).save(fs.Checkpointer(root).restore(plan_on(mesh), OPT)),
    "another run": lambda mesh, root: fs.Checkpointer(root).save(_state(mesh, 2), overwrite=True),
    "a file": lambda mesh, root: fs.Checkpointer(root + "/.lock").save(_state(mesh)),
    "other data": lambda mesh, root: _one_rank(mesh, root, data=({"at": 1}, {"at": 2})),
    "no JSON": lambda mesh, root: _one_rank(mesh, root, metadata=(None, {"x": torch.zeros(1)})),
    "tuples": lambda mesh, root: _one_rank(mesh, root, data=((1, 2), (1, 2))),
    "nan": lambda mesh, root: _one_rank(mesh, root, data=(float("nan"), float("nan"))),
    "rule for nothing": lambda mesh, root: _rules(mesh, root, ("nope", None), (".*", r"\g<0>")),
    "no rule": lambda mesh, root: _rules(mesh, root, ("params.head", r"\g<0>")),
    "bad rule": lambda mesh, root: _rules(mesh, root, ("(", None)),
    "bad group": lambda mesh, root: _rules(mesh, root, (".*", r"\3")),
    "nothing to keep": lambda mesh, root: _rules(mesh, root, ("opt.*", None), (".*", r"\g<0>")),
    "unknown source": lambda mesh, root: _rules(mesh, root, ("params.head", "params.tail"), (".*", None), into=True),
    "locked": _locked,
}

SAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "no folder": ("CheckpointError", ("/none holds no checkpoint", "check the path", "init_state")),
    "no such step": ("CheckpointError", ("holds no step 5; it holds 1:", "None for the newest")),
    "another model": (
        "TreeError",
        (
            "3 missing, 3 extra, 15 mismatched of 18 tensors",
            "missing  params.extra  F32[3]",
            "extra  params.scale  F32[]",
            "misshapen  params.head  F32[20, 4]: the checkpoint has F32[16, 4]",
            "rules=",
        ),
    ),
    "no optimizer": ("TreeError", ("0 missing, 12 extra, 0 mismatched", "extra  opt.exp_avg.head")),
    "there already": ("CheckpointError", ("step-00000001 exists already", "overwrite=True")),
    "a file": ("CheckpointError", (".lock is not a checkpoint of fshard: it is a file", "Give the folder")),
    "another run": ("CheckpointError", ("holds the checkpoints of another run:", "newest step is 1", "Restore from")),
    "other data": ("CheckpointError", ("data: rank 0: '{\"at\": 1}', rank 1: '{\"at\": 2}'", "Give the same")),
    "no JSON": ("CheckpointError", ("metadata= cannot be written as JSON", "not JSON serializable", "give dicts")),
    "tuples": ("CheckpointError", ("(1, 2) became [1, 2]", "give lists")),
    "nan": ("CheckpointError", ("data= cannot be written as JSON", "finite numbers")),
    "rule for nothing": ("PlanError", ("rules[0] 'nope' decides no entry",)),
    "no rule": ("PlanError", ("params.scale is matched by no rule", "(r'.*', None)")),
    "bad rule": ("PlanError", ("rules[0] is ('(', None)", "unterminated")),
    "bad group": ("PlanError", ("does not expand for params.blocks.0.w",)),
    "nothing to keep": ("PlanError", ("read 6 entries from the checkpoint and leave 12", "into=")),
    "unknown source": ("TreeError", ("1 missing", "missing  params.head  F32[16, 4] from params.tail")),
    "locked": ("CheckpointError", ("is being written to by another Checkpointer (process", "close()")),
}


def contents(root: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file() and p.name != ".lock"
    }


@pytest.fixture(scope="module")
def saved(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with step 1."""
    root = tmp_path_factory.mktemp("saved")
    pool(2).run(saves, str(root), 3, [1])
    return root


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_the_same_error_on_all_ranks(pool: Pools, saved: Path, tmp_path: Path, name: str) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    before = contents(root)
    kind, says = SAYS[name]
    alike(pool(2).run(case, name, str(root)), kind, says)
    after = contents(root)
    if name == "locked":  # the first of its two saves is good
        after = {key: value for key, value in after.items() if "step-00000008" not in key}
    assert after == before


def warm(root: str) -> list[Any]:
    """A warm start: blocks and their moments from the checkpoint under other names, the rest as it was made."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        params = {"body": weights()["blocks"], "fresh": torch.full((7,), 2.0)}
        plan = fs.make_plan(params, mesh, FLAT, units=("body.*",))
        start = fs.init_state(plan, OPT, seed=2, params=tree.nest({p: x + 1 for p, x in tree.paths(params)}))
        rules = [(r"(params|opt\.\w+)\.body\.(\d)\.w", r"\1.blocks.\2.w"), (r".*", None)]
        state = fs.Checkpointer(root).restore(plan, OPT, rules=rules, into=start)
        whole = fs.unshard(state.params, plan)
        same = torch.equal(whole["body"]["1"]["w"], weights()["blocks"]["1"]["w"])
        kept = [bool((whole["body"]["0"]["b"] == 1).all()), bool((whole["fresh"] == 3).all())]
        untouched = torch.equal(fs.unshard(start.params, plan)["fresh"], whole["fresh"])
        alone = fs.Checkpointer(root).restore(plan_on(mesh, MIXED), None)
        return [same, *kept, untouched, state.step, state.seed, alone.opt_state, alone.step]


def test_a_warm_start_takes_what_its_rules_say(pool: Pools, saved: Path) -> None:
    assert pool(2).run(warm, str(saved)) == [[True, True, True, True, 0, 2, {}, 1]] * 2


def test_arguments_are_checked() -> None:
    for bad in ({"keep": 0}, {"every": -1}, {"keep": 1.5}, {"every": True}):
        with pytest.raises(fs.errors.PlanError, match=f"{next(iter(bad))}="):
            fs.Checkpointer("x", **bad)  # type: ignore[arg-type]
    ckpt = fs.Checkpointer("x", every=3)
    state = states(whole_params({"w": ((4,), torch.float32)}), [(".*", P())], (1, 1), OPT)[0]
    due = []
    for step in range(7):
        due.append(ckpt.due(dataclasses.replace(state, step=step)))
    assert due == [False, False, False, True, False, False, True]
    assert ckpt.latest() is None and ckpt.steps() == [] and not os.path.exists("x")
