"""``fs.train``: the example configs train on two ranks, as their scripts do; runs resume, others are refused."""

import argparse
import functools
import importlib.util
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.cli.main import main
from fshard.errors import PlanError
from fshard.recipe.read_config import read_config
from fshard.recipe.train_script import script_of
from tests.recipe.runs import BRIEF, CONFIGS, ROOT, SMALL, losses, on_two, trained
from tests.shared.workers import Pools


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the example configs begin at the checkout."""
    monkeypatch.chdir(ROOT)


def train_gpt() -> Any:
    """The example, as a module that does not sample."""
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["sample"] = lambda *args: ""
    return module


def test_the_byte_level_config_equals_the_example_loss_by_loss(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(" ".join(f"{n} and {n + 1} are {2 * n + 1}." for n in range(200)))
    args = argparse.Namespace(
        data=[tmp_path / "text"], out=tmp_path / "example", steps=3,
        every=800, batch=8, context=16, depth=2, width=32, lr=6e-3, seed=0,
        accumulate=1, prefetch=2, no_reshard=False, wire=None, replicas=1, print_plan=False, print_schedule=False,
    )  # fmt: skip
    example = train_gpt()
    on_two(lambda: example.train(args, fs.make_mesh((-1,), ("data",))))
    changes = ["steps=3", "batch=8", "data.length=16", "model.options.width=32", "track.live=false"]
    changes += [f"data.source=['{tmp_path / 'text'}']", f"out={tmp_path / 'config'}"]
    on_two(fs.train, CONFIGS / "pretrain.toml", changes)
    rows, same = [fs.trackers.read_lines(tmp_path / name / "metrics.jsonl") for name in ("config", "example")]
    names = "step", "loss", "grad_norm", "lr"
    assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in same[:3]]
    assert rows[-1]["held out"] == same[-1]["held out"]


@pytest.mark.parametrize("name", ["pretrain", "sft", "lora", "dpo"])
@pytest.mark.long
def test_a_config_and_its_script_have_the_same_losses(name: str, tmp_path: Path) -> None:
    found = trained(name, tmp_path / "a", "steps=2")
    assert len(found) == 2 and all(map(torch.isfinite, torch.tensor(found)))
    saved = read_config(tmp_path / "a" / "config.toml", [f"out={tmp_path / 'b'}"])
    script = tmp_path / "script.py"
    script.write_text(script_of(saved.config))
    assert "fshard.recipe" not in script.read_text() and "fs.train(" not in script.read_text()
    functions = runpy.run_path(str(script))
    on_two(lambda: functions["train"](fs.make_mesh((-1,), ("data",))))
    assert losses(tmp_path / "b") == found


def test_a_run_goes_on_and_another_run_is_refused(tmp_path: Path) -> None:
    whole = trained("sft", tmp_path / "whole", "steps=3")
    first = trained("sft", tmp_path / "parts", "steps=1", "rate.total=3", "checkpoints.every=1")
    other_mesh = "mesh.shape=[1, 2]", "mesh.axes=['replica', 'data']"
    assert trained("sft", tmp_path / "parts", "steps=3", *other_mesh, "checkpoints.keep=1") == whole
    assert first == whole[:1]
    assert trained("sft", tmp_path / "parts", "steps=3") == whole  # it was over
    with pytest.raises(PlanError) as caught:
        trained("sft", tmp_path / "parts", "steps=9", "seed=1", "objective.kind=next-token")
    told = str(caught.value)
    assert "command line: seed: the run has 0, and the config now 1" in told
    assert "objective.kind" in told and "rate.total: the run has 3, and the config now 9" in told
    (tmp_path / "parts" / "config.toml").unlink()
    with pytest.raises(PlanError, match=r"command line: out = '.*parts': .* does not fit the plan"):
        trained("sft", tmp_path / "parts", "steps=9", "model.options={depth = 1, width = 16}")


@pytest.mark.parametrize(
    "changes",
    [
        "optimizer.name=muon optimizer.average=0.9 rate.kind=wsd step.precision=bf16 mesh.shape=[2,1] "
        "mesh.axes=['replica','data'] optimizer.decay=all",
        "mesh.rules=[['embed.*','replicated'],['.*','fsdp','data']] step.accumulate=2 step.remat=all data.rows=packed "
        "rate.kind=linear step.schedule=auto optimizer.clip_norm=0 data.held_out=0.0",
    ],
    ids=("muon", "rules"),
)
def test_options_train(changes: str, tmp_path: Path) -> None:
    found = trained("pretrain", tmp_path, "steps=2", *changes.split())
    assert len(found) == 2 and found[1] < found[0] * 1.5


@pytest.mark.parametrize("more", ["", "step.pipeline=zbv", "step.schedule=auto"])
def test_stages_have_the_losses_of_a_run_without(more: str, tmp_path: Path) -> None:
    size = "model.options={depth = 4, width = 32}"
    staged = "mesh.shape=[2,1] mesh.axes=['stage','data'] mesh.stages=stage step.accumulate=4".split()
    staged.append("mesh.leaves=[['embed.*',0,-1],['norm.*',-1]]")
    found = trained("pretrain", tmp_path / "a", "steps=2", size, *staged, *more.split())
    assert found == pytest.approx(trained("pretrain", tmp_path / "b", "steps=2", size), rel=1e-5)
    saved = read_config(tmp_path / "a" / "config.toml")
    assert "fs.Stages(" in script_of(saved.config)


def test_weights_of_a_folder_are_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(CONFIGS / "llama.json")
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    changes = [
        *BRIEF,
        "steps=1",
        f"model.source={tmp_path / 'model'}",
        "rate.peak=0.0",
        "model.lora.rank=0",
        "out=",
        "data.tokenizer=bytes",
    ]
    state = fs.train(CONFIGS / "lora.toml", [*changes, "data.held_out=0.0", "step.precision=fp32"])
    for path, leaf in fs.tree.paths(fs.unshard(state.params, state.plan)):
        assert torch.equal(leaf, model.get_parameter(path)), path


def test_packed_documents_are_alone_for_a_model_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(CONFIGS / "llama.json")).eval()
    documents = [torch.randint(1, 256, (count,)) for count in (5, 7)]
    row = fs.data.Packed(documents, 12)[0]
    mask = fs.data.document_mask(row["documents"][None])
    with torch.no_grad():
        packed = model(input_ids=row["tokens"][None], attention_mask=mask, position_ids=row["positions"][None]).logits
        alone = torch.cat([model(input_ids=document[None]).logits for document in documents], 1)
    assert torch.allclose(packed, alone, atol=1e-5)


def on_processes(pool: Pools, function: Any, *args: Any, ranks: int) -> Any:
    """As ``fs.launch``, on processes that are there."""
    return pool(ranks).run(function, *args)


@pytest.mark.long
def test_processes_have_the_losses_of_a_virtual_mesh(
    pool: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fshard.cli.train_command.launch", functools.partial(on_processes, pool))
    changes = [*BRIEF, *SMALL, "steps=2", f"out={tmp_path / 'run'}", f"model.source={ROOT}/examples/train_gpt.py:GPT"]
    assert main(["train", str(CONFIGS / "pretrain.toml"), *changes, "--ranks", "2"]) == 0
    trained("pretrain", tmp_path / "played", "steps=2")
    assert losses(tmp_path / "run") == losses(tmp_path / "played")


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_starts_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [*BRIEF, *SMALL, "steps=2", f"out={tmp_path / 'run'}", "track.live=true"]
    assert main(["train", str(CONFIGS / "pretrain.toml"), *changes, "--ranks", "2"]) == 0
    out, progress = capsys.readouterr()
    assert f"trained to step 2: {tmp_path / 'run'}" in out and "step 2/2" in progress


@pytest.mark.slow
@pytest.mark.processes
def test_the_script_runs_under_torchrun(tmp_path: Path) -> None:
    found = trained("sft", tmp_path / "a", "steps=2")
    shutil.move(tmp_path / "a", tmp_path / "b")
    saved = read_config(tmp_path / "b" / "config.toml")
    (tmp_path / "script.py").write_text(script_of(saved.config))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launch, str(tmp_path / "script.py")], cwd=ROOT, check=True, timeout=170)
    assert losses(tmp_path / "a") == found
