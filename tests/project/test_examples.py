"""The examples run, briefly: alone, and one of them on two ranks. What they reach is told in examples/README.md."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
BRIEF = {
    "dp_sgd": (["--steps", "3"], "epsilon"),
    "influence": (["--steps", "30", "--solve", "2"], "Area under the ROC curve"),
    "sam": (["--steps", "3"], "held-out digits right"),
    "gan": (["--steps", "3"], "of 8 modes"),
    "actor_critic": (["--steps", "1"], "of at most 500"),
    "dpo": (["--steps", "3"], "by the policy"),
    "distill": (["--steps", "3"], "student of the teacher"),
    "pcgrad": (["--steps", "3"], "gradient surgery"),
    "reptile": (["--steps", "2"], "learned start values"),
    "lbfgs": (["--steps", "3"], "L-BFGS"),
    "newton_cg": (["--steps", "2", "--products", "2"], "Newton steps"),
    "maml": (["--steps", "2", "--tasks", "2"], "right from learned start values"),
    "energy": (["--steps", "3", "--depth", "1"], "slope of the energy"),
    "train_tp": (["--steps", "3", "--depth", "1", "--debug"], "in one process"),
    "train_pipeline": (["--steps", "2", "--width", "32", "--debug"], "bits per byte of held-out text"),
    "train_moe": (["--steps", "3", "--depth", "1", "--debug"], "bits per byte of held-out text; balance"),
    "outer": (["--steps", "6", "--depth", "1", "--width", "32", "--every", "4"], "apart sends"),
    "train_vit": (["--steps", "3", "--depth", "1"], "held-out digits are right"),
    "finetune_lora": (
        ["--steps", "3", "--pretrain", "2", "--depth", "1", "--packed", "nf4/64", "--out", "FOLDER"],
        "merged and loaded by transformers",
    ),
}


def run(*command: str) -> str:
    """What a command printed."""
    around = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", BRIEF)
def test_examples_run(name: str, tmp_path: Path) -> None:
    options, words = BRIEF[name]
    options = [str(tmp_path) if option == "FOLDER" else option for option in options]
    assert words in run(sys.executable, f"examples/{name}.py", *options)
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert words in run(*launch, f"examples/{name}.py", *options)


@pytest.mark.slow
def test_a_llama_is_pretrained_resumed_and_read_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    brief = ["--depth", "1", "--width", "32", "--every", "4", "--out", str(tmp_path)]
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "The statement" in run(*launch, "examples/train_llama.py", "--steps", "4", *brief)
    run(sys.executable, "examples/train_llama.py", "--steps", "8", *brief)  # goes on, on one rank
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, 9)]
    assert [row["step"] for row in rows if "held out/perplexity" in row] == [4, 8] and rows[-2]["mfu"] > 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.hidden_size == 32


@pytest.mark.slow
def test_a_gpt_is_pretrained_resumed_and_sampled(tmp_path: Path) -> None:
    brief = ["--depth", "1", "--width", "32", "--every", "3", "--out", str(tmp_path)]
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "gzip -9: " in run(*launch, "examples/train_gpt.py", "--steps", "5", *brief)
    for _ in range(2):  # goes on, on one rank; and is over
        assert "of the held-out text, continued" in run(sys.executable, "examples/train_gpt.py", "--steps", "7", *brief)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, 8)]
    assert [row["step"] for row in rows if "held out" in row] == [3, 5, 6, 7]
    assert len(list((tmp_path / "checkpoints").glob("step*"))) == 2


@pytest.mark.slow
def test_a_pipeline_goes_on_with_other_stages(tmp_path: Path) -> None:
    brief = ["examples/train_pipeline.py", "--width", "32", "--context", "32", "--depth", "4"]
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    said = run(*launch, "4", *brief, "--steps", "2", "--out", str(tmp_path))
    assert "2 stages of 2 shards, step 0" in said and "step 2 is saved" in said
    said = run(*launch, "2", *brief, "--steps", "4", "--chunks", "2", "--out", str(tmp_path))
    assert "2 stages of 1 shards, step 2" in said
    alone = run(sys.executable, *brief, "--steps", "4")
    last = re.compile(r"step 4: loss [\d.]+, [\d.]+ bits per byte")
    assert last.findall(said) == last.findall(alone) != []


def test_the_llama_is_short() -> None:
    assert len((ROOT / "examples" / "train_llama.py").read_text().splitlines()) <= 62


def drawn(picture: Path) -> bool:
    """Whether a picture was drawn."""
    return picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 1000


@pytest.mark.slow
def test_two_hosts_and_its_curves(tmp_path: Path) -> None:
    brief = ["--steps", "5", "--depth", "2", "--width", "16", "--plot", str(tmp_path / "hosts.png")]
    out = run(sys.executable, "examples/two_hosts.py", *brief)
    assert out.count("off that of one rank") == 2 and out.count("Gbit/s between them, a step") == 2
    assert drawn(tmp_path / "hosts.png")


@pytest.mark.slow
def test_curves_of_private_training(tmp_path: Path) -> None:
    run(sys.executable, "examples/dp_sgd.py", "--steps", "20", "--out", str(tmp_path))
    runs = [tmp_path / "private.jsonl", tmp_path / "not-private.jsonl"]
    private, plain = [[json.loads(line) for line in file.read_text().splitlines()] for file in runs]
    assert [row["step"] for row in private] == [row["step"] for row in plain] == [10, 20]
    assert 0 < private[0]["epsilon"] < private[1]["epsilon"] and "epsilon" not in plain[0]
    picture = tmp_path / "run.png"
    run(
        sys.executable, "examples/plot_run.py", *map(str, runs), "--names", "accuracy", "epsilon", "--out", str(picture)
    )
    assert drawn(picture)


@pytest.mark.slow
def test_adapters_are_tracked_from_a_file_of_weights_to_another(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    brief = ["--steps", "6", "--pretrain", "4", "--depth", "1", "--width", "32", "--out", str(tmp_path)]
    out = run(sys.executable, "examples/finetune_lora.py", *brief)
    again = re.search(r"loss on 32 windows: ([\d.]+) sharded with adapters, ([\d.]+) merged", out)
    assert again is not None and again[1] == again[2] and "Beautiful is better than" in out
    tuned = [json.loads(line) for line in (tmp_path / "fine-tuning.jsonl").read_text().splitlines()]
    assert [row["step"] for row in tuned] == [*range(1, 7)] and tuned[-1]["loss"] < tuned[0]["loss"]
    base, model = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "tuned")]
    moved = [name for name, leaf in model.named_parameters() if not leaf.equal(base.get_parameter(name))]
    assert moved and all("_proj" in name for name in moved)


@pytest.mark.parametrize("name", BRIEF)
def test_examples_have_help(name: str) -> None:
    source = (ROOT / "examples" / f"{name}.py").read_text()
    assert "ArgumentDefaultsHelpFormatter" in source and "tqdm" in source and "fshard[examples]" in source
