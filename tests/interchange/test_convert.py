"""``fshard ckpt convert``: checkpoints to the formats of others and back, without processes."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fshard as fs
from fshard.cli.main import main
from fshard.errors import CheckpointError
from fshard.interchange.convert import kind_of, to_state
from fshard.interchange.metadata import read_metadata

OPT = fs.optim.adamw(1e-2)
LEAVES: dict[str, Any] = {"net": {"w": torch.randn(6, 5), "h": torch.randn(7).bfloat16()}, "b": torch.randn(3)}
FLAT = {"net.w": LEAVES["net"]["w"], "net.h": LEAVES["net"]["h"], "b": LEAVES["b"]}


def plan() -> fs.Plan:
    """All leaves on one rank."""
    return fs.make_plan(LEAVES, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A checkpoint of step 4, whose optimizer state tells buffers apart."""
    state = fs.init_state(plan(), OPT, params=LEAVES)
    optim = fs.io.to_optim_state_dict(state, OPT)
    for path, row in optim["state"].items():
        row["step"], row["exp_avg"], row["exp_avg_sq"] = torch.tensor(4.0), FLAT[path] * 2, FLAT[path].abs()
    with fs.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(fs.io.from_state_dict(LEAVES, plan(), OPT, optim))
    return tmp_path / "run"


def fshard(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    """Run the command: exit status, and what it said."""
    status = main(["ckpt", "convert", *map(str, argv)])
    out = capsys.readouterr()
    return status, out.out + out.err


def test_to_hugging_face_and_back(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, parts = tmp_path / "one", tmp_path / "parts"
    assert fshard(capsys, run_folder, one, "--to", "hf")[0] == 0
    found = safetensors.torch.load_file(one / "model.safetensors")
    assert found.keys() == FLAT.keys() and all(torch.equal(found[name], leaf) for name, leaf in FLAT.items())
    assert fshard(capsys, run_folder, parts, "--to", "hf", "--max-shard-size", "130X") == (
        2,
        "fshard: --max-shard-size '130X' is not a number of bytes: give one such as 80G, or 80Gi for 80 * 2**30\n",
    )
    assert fshard(capsys, run_folder, one, "--to", "hf")[1].startswith(f"fshard: {one} holds weights already")
    assert [path.name for path in one.iterdir()] == ["model.safetensors"]
    assert fshard(capsys, one, tmp_path / "again")[0] == 0
    with fs.Checkpointer(tmp_path / "again") as ckpt:
        state = ckpt.restore(plan(), None)
    assert all(torch.equal(leaf, FLAT[name]) for name, leaf in fs.io.to_state_dict(state).items())


def test_to_torch_and_back(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "dcp"
    status, said = fshard(capsys, run_folder, out, "--to", "dcp")
    assert status == 0 and "without param_groups" in said
    names = [f"optim.state.{path}.{key}" for path in FLAT for key in ("exp_avg", "exp_avg_sq", "step")]
    assert set(read_metadata(out).tensors) == {*names, *(f"model.{path}" for path in FLAT)}
    state = fs.io.load_dcp(out, plan(), OPT)
    assert state.step == 4
    assert fshard(capsys, out, tmp_path / "again")[0] == 0
    with fs.Checkpointer(tmp_path / "again") as ckpt:
        again = ckpt.restore(plan(), OPT)
    for found in (state, again):
        assert all(torch.equal(leaf, FLAT[name]) for name, leaf in fs.io.to_state_dict(found).items())
        for path, row in fs.io.to_optim_state_dict(found, OPT)["state"].items():
            assert torch.equal(row["exp_avg"], FLAT[path] * 2) and torch.equal(row["exp_avg_sq"], FLAT[path].abs())
    assert again.step == 4
    assert fshard(capsys, run_folder, out, "--to", "dcp")[1].startswith(f"fshard: {out} holds a checkpoint already")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_itself_reads_it(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch.distributed.checkpoint as dcp

    assert fshard(capsys, run_folder, tmp_path / "dcp", "--to", "dcp")[0] == 0
    state = {"model": {name: torch.empty_like(leaf) for name, leaf in FLAT.items()}}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert all(torch.equal(leaf, FLAT[name]) for name, leaf in state["model"].items())


def test_what_cannot_be_converted(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fshard(capsys, run_folder, tmp_path / "hf", "--to", "hf")
    for more in (["--to", "dcp"], ["--step", "4"], ["--params"]):
        status, said = fshard(capsys, tmp_path / "hf", tmp_path / "x", *more)
        assert status == 2 and "is not a checkpoint of fshard (hf)" in said
    assert kind_of(str(run_folder)) is None and kind_of(str(tmp_path / "gone")) is None
    assert kind_of(str(tmp_path / "hf" / "model.safetensors")) == "hf"


def test_names_that_no_tree_has_are_told_with_the_folder(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    safetensors.torch.save_file({"../x": torch.ones(2)}, tmp_path / "bad" / "model.safetensors")
    with pytest.raises(CheckpointError, match="bad holds names that no tree has"):
        to_state(str(tmp_path / "bad"), "hf", fs.make_mesh((1,), ("shard",)))
