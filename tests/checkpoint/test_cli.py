"""The ``fshard`` command, on checkpoints that were written without processes."""

import dataclasses
import os
import re
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fshard as fs
from fshard.cli.main import main
from fshard.state.entries import entries
from tests.checkpoint.played import restore_all, save_all, states, taken, values, whole_params

OPT = fs.optim.sgd(0.1, momentum=0.9)
LEAVES: dict[str, Any] = {
    "block.w": ((40, 8), torch.float32),
    "block.b": ((8,), torch.bfloat16),
    "c": ((), torch.float64),
    "none": ((0, 3), torch.int64),
}
RULES = [(".*", fs.fsdp("data"))]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--version"], rf"^fshard {re.escape(fs.__version__)}\n$"),
        (["--help"], r"--version(?s:.*)commands:(?s:.*)list, verify and convert checkpoints"),
        (["ckpt", "--help"], r"List, verify(?s:.*)ls +List the steps(?s:.*)Exit status: 0; 1 if"),
        (["ckpt", "verify", "--help"], "the step; all of them by default"),
        (["ckpt", "show", "--help"], "the step; the newest by default"),
    ],
)
def test_what_the_command_says_of_itself(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0 and re.search(says, capsys.readouterr().out)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Steps 0 and 3 of two ranks."""
    ranks = states(whole_params(LEAVES), RULES, (2, 1), OPT)
    for step in (0, 3):
        ranks = [dataclasses.replace(state, step=step) for state in ranks]
        for state in ranks:
            entries(state)[0].tensor.add_(step)
        save_all(str(tmp_path / "run"), ranks, user={"data": {"at": step}, "metadata": None, "schedule": None})
    return tmp_path / "run"


def fshard(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Run the command: exit status, output, errors."""
    status = main(["ckpt", *map(str, argv)])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_ls(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "step-00000004.tmp-0123abcd").mkdir()
    status, out, _ = fshard(capsys, "ls", run_folder)
    lines = out.splitlines()
    assert status == 0 and lines[0].split() == ["step", "tensors", "files", "bytes", "mesh"]
    assert lines[1].split() == ["0", "7", "2", "3.4", "KiB", "data=2", "x", "tensor=1"], lines
    assert lines[3].startswith("step-00000004.tmp-0123abcd: of a save that")
    (run_folder / "step-00000003" / "manifest.json").write_text("{}")
    status, out, _ = fshard(capsys, "ls", run_folder)
    assert status == 1 and "not a checkpoint of fshard" in out.splitlines()[2]


def test_show(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run_folder, run_folder / "step-00000003"):
        status, out, _ = fshard(capsys, "show", path)
        assert status == 0 and "step 3, " in out and 'data: {"at": 3}' in out
        assert re.search(r"params\.block\.w +F32\[40, 8\] +P\(flat='data'\) +1\.2 KiB +2\n", out), out
        assert re.search(r"rank-00001-000\.safetensors +\d+ +[0-9a-f]{64}\n", out)
    status, out, _ = fshard(capsys, "show", run_folder, "--step", 0, "--match", r"params\.b.*")
    assert status == 0 and "params.block.b" in out and "params.c" not in out and "opt." not in out


def test_verify(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = fshard(capsys, "verify", run_folder)
    assert status == 0 and out.count(", good") == 2
    (run_folder / "step-00000003" / "more").write_text("")
    file = run_folder / "step-00000000" / "rank-00001-000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    status, out, _ = fshard(capsys, "verify", run_folder)
    assert status == 1 and ", good" not in out and "have the SHA-256" in out and "'more' is not in the manifest" in out
    assert fshard(capsys, "verify", run_folder, "--step", 3)[0] == 1


def test_convert_to_a_file(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.safetensors"
    status, text, _ = fshard(capsys, "convert", run_folder, out, "--params", "--step", 0)
    assert status == 0 and "4 tensors" in text
    held = safetensors.torch.load_file(out)
    assert {name: (tuple(t.shape), t.dtype) for name, t in held.items()} == LEAVES
    for name, tensor in held.items():
        assert torch.equal(tensor, values(f"params.{name}", tensor.shape, tensor.dtype))
    before = out.read_bytes()
    status, _, error = fshard(capsys, "convert", run_folder, out)
    assert status == 2 and "exists already" in error and out.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "run"]
    assert fshard(capsys, "convert", run_folder, tmp_path / "all.safetensors")[0] == 0
    assert "opt.momentum_buffer.c" in safetensors.torch.load_file(tmp_path / "all.safetensors")


def test_convert_to_more_ranks(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    assert fshard(capsys, "convert", run_folder, other, "--ranks", 3, "--step", 0)[0] == 0
    assert fshard(capsys, "verify", other)[0] == 0
    plans = [state.plan for state in states(whole_params(LEAVES), [(".*", fs.P())], (1, 2), OPT)]
    for state in restore_all(str(other), plans, OPT):
        for entry in entries(state):
            assert torch.equal(entry.tensor, taken(values(entry.name, entry.shape, entry.dtype), entry))
    status, out, _ = fshard(capsys, "diff", run_folder, other, "--step", 0, "--values")
    assert (status, out) == (0, "no difference\n")
    assert fshard(capsys, "convert", run_folder, other, "--step", 0)[0] == 2


def test_diff(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = fshard(capsys, "diff", run_folder, run_folder, "--step", 0, "--values")
    assert status == 1
    assert out.splitlines() == [
        'scalars: {"step": 0, "seed": 3} and {"step": 3, "seed": 3}',
        'data: {"at": 0} and {"at": 3}',
        "params.block.w: 320 of 320 elements differ, by 3 at most",
    ]
    leaves = {**LEAVES, "block.b": ((8,), torch.float32), "d": ((2,), torch.float32)}
    del leaves["c"]
    save_all(str(tmp_path / "b"), states(whole_params(leaves), RULES, (1, 1), OPT))
    out = fshard(capsys, "diff", run_folder, tmp_path / "b")[1]
    assert "params.block.b: BF16[8] and F32[8]" in out and "params.c: F64[] is only in" in out
    assert f"params.d: F32[2] is only in {tmp_path / 'b'}" in out


def test_what_is_not_there(tmp_path: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["ls", tmp_path], ["show", tmp_path / "no"], ["verify", tmp_path]):
        status, out, error = fshard(capsys, *argv)
        assert status == 2 and not out and "holds no checkpoint: check the path" in error
    for argv, says in (
        (["show", run_folder, "--step", 9], "holds no step 9; it holds 0, 3"),
        (["show", run_folder, "--match", "("], "not a regular expression"),
        (["convert", run_folder, tmp_path / "x", "--ranks", 0], "--ranks 0: give 1 or more"),
    ):
        status, _, error = fshard(capsys, *argv)
        assert status == 2 and says in error
    assert os.listdir(tmp_path) == ["run"]


def test_the_console_script_is_the_module(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"fshard": "fshard.cli.main:main"}
    monkeypatch.setattr(sys, "argv", ["fshard", "ckpt", "ls", str(run_folder)])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("fshard", run_name="__main__", alter_sys=True)
    done = capsys.readouterr()
    assert not left.value.code and done.out.split()[:5] == ["step", "tensors", "files", "bytes", "mesh"]
    assert not done.err
