"""Several states in one checkpoint: complete or not at all, and each where it belongs."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fshard as fs
from fshard import tree
from fshard.cli.main import main
from fshard.errors import CheckpointError, DamagedError, PlanError, TreeError

OPTS = {"gen": fs.optim.adamw(0.1), "dis": fs.optim.sgd(0.1, momentum=0.9)}
LEAVES = {"gen": {"params": torch.ones(5, 2), "b": torch.zeros(3)}, "dis": {"w": torch.full((4, 3), 2.0)}}
FLAT = [(r".*", fs.fsdp("shard"))]


def plans(mesh: fs.Mesh) -> dict[str, fs.Plan]:
    return {name: fs.make_plan(leaves, mesh, FLAT) for name, leaves in LEAVES.items()}


def trained(mesh: fs.Mesh, rounds: int = 2) -> dict[str, fs.TrainState]:
    """States after one step of the generator, and two of the discriminator, a round."""
    states = {}
    for name, plan in plans(mesh).items():
        state = fs.init_state(plan, OPTS[name], seed=len(name), params=LEAVES[name])
        step = fs.make_train_step(
            lambda p, x: torch.stack([(leaf.sum() * x.mean()).square() for leaf in tree.leaves(p)]).sum(),
            OPTS[name],
            plan,
        )
        for _ in range(rounds * (1 if name == "gen" else 2)):
            state, _ = step(state, torch.ones(2))
        states[name] = fs.settle(state)
    return states


def whole(states: dict[str, fs.TrainState]) -> dict[str, Any]:
    """All of some states, as whole tensors and numbers."""
    return {
        name: (state.step, state.seed, dict(fs.io.export(state, what="state")))
        for name, state in sorted(states.items())
    }


def same(ours: Any, theirs: Any) -> bool:
    return bool(
        ours.keys() == theirs.keys()
        and all(ours[n][:2] == theirs[n][:2] and ours[n][2].keys() == theirs[n][2].keys() for n in ours)
        and all(torch.equal(ours[n][2][key], theirs[n][2][key]) for n in ours for key in ours[n][2])
    )


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (2, 3)])
def test_what_was_saved_comes_back_on_any_mesh(tmp_path: Path, ranks: tuple[int, int], async_: bool) -> None:
    def save() -> Any:
        mesh = fs.make_mesh((-1,), ("shard",))
        states = trained(mesh)
        with fs.Checkpointer(tmp_path / "c", every=2, async_=async_) as ckpt:
            assert ckpt.due(states)
            ckpt.save(states, data={"position": 3})
        return whole(states)

    def restore() -> Any:
        mesh = fs.make_mesh((-1,), ("shard",))
        ckpt = fs.Checkpointer(tmp_path / "c")
        states = ckpt.restore(plans(mesh), OPTS)
        assert ckpt.restored is not None and ckpt.restored.data == {"position": 3} and ckpt.restored.step == 4
        alone = ckpt.restore({"dis": plans(mesh)["dis"]}, {"dis": OPTS["dis"]})
        bare = ckpt.restore({"gen": plans(mesh)["gen"]})
        assert alone["dis"] == states["dis"] and list(alone) == ["dis"] and bare["gen"].opt_state == {}
        return whole(states)

    saved = fs.virtual_mesh(ranks[:1], ("any",)).run(save)
    found = fs.virtual_mesh(ranks[1:], ("any",)).run(restore)
    assert all(same(saved[0], one) for one in found)
    manifest = json.loads((tmp_path / "c" / "step-00000004" / "manifest.json").read_text())
    assert manifest["version"] == 3 and manifest["states"] == ["gen", "dis"]
    assert {name.split(".")[0] for name in manifest["tensors"]} == {"gen", "dis"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with fs.make_mesh((-1,), ("shard",)) as mesh, fs.Checkpointer(tmp_path / "several") as ckpt:
        ckpt.save(trained(mesh))
        with fs.Checkpointer(tmp_path / "one") as other:
            other.save(trained(mesh)["gen"])
    return tmp_path


def test_bad_input_is_told(folder: Path) -> None:
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        states, made = trained(mesh), plans(mesh)
        several, one = fs.Checkpointer(folder / "several"), fs.Checkpointer(folder / "one")
        with pytest.raises(TreeError, match=r"holds 'gen', 'dis', and one state was asked for: give restore\(\{'gen'"):
            several.restore(made["gen"], OPTS["gen"])
        with pytest.raises(TreeError, match="and the state 'teacher' was asked for"):
            several.restore({"teacher": made["gen"]})
        with pytest.raises(TreeError, match="holds one state, and 'gen' was asked for"):
            one.restore(made, OPTS)
        with pytest.raises(TreeError, match=r"gen|missing  params\.params"):
            several.restore({"dis": made["gen"]})
        with pytest.raises(PlanError, match="opt is an adamw: give a dict with 'gen', 'dis'"):
            several.restore(made, OPTS["gen"])  # type: ignore[call-overload]
        with pytest.raises(PlanError, match=r"opt is \['gen'\]: give a dict with 'gen', 'dis'"):
            several.restore(made, {"gen": OPTS["gen"]})
        for bad, words in (
            ({}, "was given a dict"),
            ({"a.b": states["gen"]}, "'a.b' cannot name a state"),
            ({"gen": made["gen"]}, "'gen' is a Plan, no TrainState"),
            (3, "takes one TrainState, or a dict of them by name, and was given 3"),
        ):
            with pytest.raises(TreeError, match=words):
                several.save(bad)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="exists already"):
            several.save(several.restore(made, OPTS))


def test_damage_in_one_state_is_damage_of_the_checkpoint(folder: Path) -> None:
    file = next((folder / "several" / "step-00000004").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with fs.make_mesh((-1,), ("shard",)) as mesh, pytest.raises(DamagedError):
        fs.Checkpointer(folder / "several").restore(plans(mesh), OPTS)


def test_a_failure_on_one_rank_saves_none_of_the_states(tmp_path: Path) -> None:
    def save() -> str:
        mesh = fs.make_mesh((-1,), ("shard",))
        states: Any = trained(mesh)
        if mesh.rank == 1:
            states = {"dis": states["dis"], "gen": states["gen"]}
        try:
            fs.Checkpointer(tmp_path / "c").save(states)
        except CheckpointError as error:
            return str(error)
        return ""

    told = fs.virtual_mesh((2,), ("any",)).run(save)
    assert all("states: rank 0: ('gen', 'dis'), rank 1: ('dis', 'gen')" in text for text in told)
    assert not list((tmp_path / "c").glob("step-*"))


def test_rules_and_into_go_to_each_state(folder: Path) -> None:
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        made = plans(mesh)
        into = {name: fs.init_state(plan, OPTS[name], params=LEAVES[name]) for name, plan in made.items()}
        rules = [(r"params\..*", r"\g<0>"), (r".*", None)]
        found = fs.Checkpointer(folder / "several").restore(made, OPTS, rules=rules, into=into)
        expected = trained(mesh)
        for name, state in found.items():
            assert state.step == 0 and all(not leaf.any() for leaf in tree.leaves(state.opt_state))
            ours, theirs = tree.leaves(state.params), tree.leaves(expected[name].params)
            assert all(map(torch.equal, ours, theirs))


def test_the_command_line_converts_one_of_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(folder / "several")
    assert main(["ckpt", "show", source]) == 0 and "states: gen, dis" in capsys.readouterr().out
    assert main(["ckpt", "convert", source, str(folder / "dis.safetensors"), "--params", "--state", "dis"]) == 0
    assert main(["ckpt", "convert", source, str(folder / "cut"), "--ranks", "2", "--state", "dis"]) == 0
    assert main(["ckpt", "convert", source, str(folder / "all"), "--ranks", "2"]) == 0
    assert main(["ckpt", "convert", source, str(folder / "x.safetensors")]) != 0
    assert "for --state None: give one of gen, dis" in capsys.readouterr().err
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        made, expected = plans(mesh), trained(mesh)
        alone = fs.Checkpointer(folder / "cut").restore(made["dis"], OPTS["dis"])
        again = fs.Checkpointer(folder / "all").restore(made, OPTS)
        assert same(whole({"dis": alone}), whole({"dis": expected["dis"]}))
        assert same(whole(again), whole(expected))
    assert safetensors.torch.load_file(folder / "dis.safetensors")["w"].shape == (4, 3)
