"""One folder, one run: a second run cannot mix its steps in, ranks must see one folder, and what they save is equal."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.checkpoint.folder import read_manifest, step_folder
from fshard.collectives import psum
from fshard.errors import CheckpointError
from fshard.state.entries import entries
from tests.checkpoint.played import save_all, states
from tests.shared.workers import Pools

OPT = fs.optim.adamw(0.1)
RULES = [("b", fs.P()), (".*", fs.fsdp("data"))]


def values() -> dict[str, Any]:
    return {"w": torch.arange(24.0).view(8, 3), "b": torch.zeros(3)}


def plan_here() -> fs.Plan:
    return fs.make_plan(values(), fs.make_mesh((-1,), ("data",)), RULES)


def fresh(step: int = 0) -> fs.TrainState:
    """A state of a run that begins."""
    state = fs.init_state(plan_here(), OPT, params=values())
    state = dataclasses.replace(state, step=step)
    return state


def told(body: Any) -> str:
    try:
        body()
    except CheckpointError as error:
        return str(error)
    return "no error"


def run_of(root: Path, step: int) -> str | None:
    return read_manifest(step_folder(str(root), step)).run


def test_a_run_that_began_elsewhere_is_refused_at_its_first_save(tmp_path: Path) -> None:
    """Both started on the empty folder; the one that comes second learns of it before anything is written."""
    first, second = fresh(1), fresh(2)
    with fs.Checkpointer(tmp_path) as one:
        one.save(first)
    before = sorted(os.listdir(tmp_path))
    with fs.Checkpointer(tmp_path) as two:
        for overwrite in (False, True):
            text = told(lambda overwrite=overwrite: two.save(second, overwrite=overwrite))
            assert f"{tmp_path} holds the checkpoints of another run:\n  run {run_of(tmp_path, 1)}, its newest" in text
            assert "Restore from the folder to go on with its run, or give this run a folder of its own." in text
        assert sorted(os.listdir(tmp_path)) == before
        one.save(dataclasses.replace(first, step=3))  # the refused one holds no lock
    assert fs.Checkpointer(tmp_path).steps() == [1, 3]


def test_a_run_goes_on_under_its_id(tmp_path: Path) -> None:
    """By the Checkpointer that restored, by another one with the state, and by the state that was saved before."""
    state = fresh()
    with fs.Checkpointer(tmp_path, keep=None) as ckpt:
        ckpt.save(state)
    run = run_of(tmp_path, 0)
    assert run is not None and len(run) == 16
    step = fs.make_train_step(lambda p, x: (x @ p["w"] + p["b"]).square().mean(), OPT, state.plan)
    state, _ = step(state, torch.ones(2, 8))
    with fs.Checkpointer(tmp_path, keep=None) as ckpt:
        ckpt.save(state)
    state = fs.Checkpointer(tmp_path).restore(state.plan, OPT)
    state, _ = step(state, torch.ones(2, 8))
    with fs.Checkpointer(tmp_path, keep=None) as ckpt:
        ckpt.save(state)
    with fs.Checkpointer(tmp_path, keep=None) as ckpt:
        ckpt.restore(state.plan, OPT)
        ckpt.save(fresh(9))  # of another optimizer, say: whoever restored from a folder goes on with its run
    assert [run_of(tmp_path, n) for n in (0, 1, 2, 9)] == [run] * 4


def test_another_folder_is_another_run(tmp_path: Path) -> None:
    """Two runs that start from one checkpoint, and into one new folder, are two."""
    with fs.Checkpointer(tmp_path / "base") as ckpt:
        ckpt.save(fresh())
    one, two = (fs.Checkpointer(tmp_path / "base").restore(plan_here(), OPT) for _ in range(2))
    with fs.Checkpointer(tmp_path / "new") as ckpt:
        ckpt.save(one)
    assert run_of(tmp_path / "new", 0) != run_of(tmp_path / "base", 0)
    later = dataclasses.replace(two, step=1)
    assert "another run" in told(lambda: fs.Checkpointer(tmp_path / "new").save(later))


def test_checkpoints_without_an_id_are_restored_and_gone_on_with(tmp_path: Path) -> None:
    save_all(str(tmp_path), states(values(), RULES, (1, 1), OPT))
    text = json.loads((tmp_path / "step-00000000" / "manifest.json").read_text())
    assert text["version"] == 1 and "run" not in text
    assert "another run" in told(lambda: fs.Checkpointer(tmp_path).save(fresh(1)))
    state = fs.Checkpointer(tmp_path).restore(plan_here(), OPT)
    for number in (1, 2):
        state = dataclasses.replace(state, step=number)
        with fs.Checkpointer(tmp_path) as ckpt:
            ckpt.save(state)
        state = fs.Checkpointer(tmp_path).restore(plan_here(), OPT)
    assert run_of(tmp_path, 1) == run_of(tmp_path, 2) == text["sha256"][:16]


def racing(root: str) -> tuple[int | None, str]:
    """In a process: a run of its own, of one rank, which saves when the others do."""
    others = fs.make_mesh((-1,), ("runs",))
    plan = fs.make_plan(values(), fs.abstract_mesh((1,), ("data",)), RULES)
    state = fs.init_state(plan, OPT, params=values())
    state = dataclasses.replace(state, step=others.rank + 1)
    ckpt = fs.Checkpointer(root)
    latest = ckpt.latest()
    psum(torch.zeros(()), "runs", mesh=others)
    with ckpt:
        return latest, told(lambda: ckpt.save(state))


def test_of_runs_that_start_at_once_one_gets_the_folder(pool: Pools, tmp_path: Path) -> None:
    """Processes that have all seen an empty folder, and save at the same moment."""
    got = pool(3).run(racing, str(tmp_path / "run"))
    said = [text for _, text in got]
    assert [latest for latest, _ in got] == [None] * 3 and said.count("no error") == 1, said
    late = [text for text in said if text != "no error"]
    assert all("another run" in text or "by another Checkpointer" in text for text in late), said  # if it is slow
    assert fs.Checkpointer(tmp_path / "run").steps() == [said.index("no error") + 1]


def apart(root: str, name: str) -> list[str]:
    """On a rank: what is told where ranks differ in a save or a restore."""
    mesh = fs.make_mesh((-1,), ("data",))
    odd = mesh.rank == 1
    own = root + "/other" if odd else root
    state = fresh(3)
    if name == "folder":
        return [told(lambda: fs.Checkpointer(own).save(state))]
    if name == "keep":
        return [told(lambda: fs.Checkpointer(root, keep=1 + odd).save(state))]
    if name == "async":
        return [told(lambda: fs.Checkpointer(root, async_=odd).save(state))]
    if name == "optimizer":
        other = fs.init_state(state.plan, fs.optim.sgd(0.1), params=values())
        other = dataclasses.replace(other, step=3)
        return [told(lambda: fs.Checkpointer(root).save(other if odd else state))]
    if name == "copies":
        state.params["b"].data[1] = float(mesh.rank)
        return [told(lambda: fs.Checkpointer(root).save(state))]
    with fs.Checkpointer(root) as ckpt:
        ckpt.save(state)
    absent = told(lambda: fs.Checkpointer(own).restore(state.plan, OPT))
    if odd:
        others = states(values(), RULES, (2, 1), OPT)
        save_all(own, [dataclasses.replace(other, step=3) for other in others])
    there = told(lambda: fs.Checkpointer(own).restore(state.plan, OPT))
    cast = told(lambda: fs.Checkpointer(root).restore(state.plan, OPT, cast=odd))
    return [absent, there, cast]


SAYS = {
    "folder": (("rank 1: its folder ", "/other holds no step-00000003.tmp-", "which is in rank 0's folder"),),
    "keep": (("keep: rank 0: 1, rank 1: 2",),),
    "async": (("async_: rank 0: False, rank 1: True",),),
    "optimizer": (("tensor['opt.exp_avg.b']: rank 0: 'torch.float32 [3]', rank 1: nothing",),),
    "copies": (("params.b, element 1: rank 0: 0, rank 1: 1",),),
    "restore": (
        ("rank 1: its folder ", "/other holds no step-00000003, which is in rank 0's folder"),
        ("rank 1: ", "/other/step-00000003"),
        ("cast: rank 0: False, rank 1: True",),
    ),
}


@pytest.mark.parametrize("name", SAYS)
def test_ranks_that_differ_in_a_save_or_a_restore_are_told_alike(pool: Pools, tmp_path: Path, name: str) -> None:
    root = str(tmp_path / "run")
    got = pool(2).run(apart, root, name)
    assert got[0] == got[1]
    for text, parts in zip(got[0], SAYS[name], strict=True):
        assert not [part for part in parts if part not in text], text
    assert fs.Checkpointer(root).steps() == ([3] if name == "restore" else [])


def mounted(root: str) -> list[Any]:
    """On a rank: a save and a restore by way of a path of its own to the one folder."""
    mesh = fs.make_mesh((-1,), ("data",))
    own = f"{root}/mount{mesh.rank}"
    with fs.Checkpointer(own, async_=True) as ckpt:
        ckpt.save(fresh(4))
        ckpt.wait()
        state = ckpt.restore(plan_here(), OPT)
    return [entry.tensor.tolist() for entry in entries(state)] == [e.tensor.tolist() for e in entries(fresh(4))]


def test_paths_to_one_folder_may_differ(pool: Pools, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for rank in range(2):
        (tmp_path / f"mount{rank}").symlink_to(tmp_path / "run")
    assert pool(2).run(mounted, str(tmp_path)) == [True, True]
    assert fs.Checkpointer(tmp_path / "run").steps() == [4]
