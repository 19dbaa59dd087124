"""The examples run, briefly: alone, and one of them on two ranks. What they reach is told in examples/README.md."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
BRIEF = {
    "dp_sgd": (["--steps", "3"], "epsilon"),
    "influence": (["--steps", "3", "--solve", "2"], "Area under the ROC curve"),
    "sam": (["--steps", "3"], "held-out digits right"),
    "gan": (["--steps", "3"], "of 8 modes"),
    "actor_critic": (["--steps", "1"], "of at most 500"),
    "dpo": (["--steps", "3"], "by the policy"),
    "distill": (["--steps", "3"], "student of the teacher"),
    "pcgrad": (["--steps", "3"], "gradient surgery"),
    "reptile": (["--steps", "2"], "learned start values"),
    "lbfgs": (["--steps", "3"], "L-BFGS"),
    "maml": (["--steps", "2", "--tasks", "2"], "right from learned start values"),
    "energy": (["--steps", "3", "--depth", "1"], "slope of the energy"),
    "train_tp": (["--steps", "3", "--depth", "1", "--debug"], "in one process"),
    "train_moe": (["--steps", "3", "--depth", "1", "--debug"], "bits per byte of held-out text; balance"),
    "train_vit": (["--steps", "3", "--depth", "1"], "held-out digits are right"),
    "finetune_lora": (
        ["--steps", "3", "--pretrain", "2", "--depth", "1", "--out", "FOLDER"],
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


def test_the_llama_is_short() -> None:
    assert len((ROOT / "examples" / "train_llama.py").read_text().splitlines()) <= 62


@pytest.mark.slow
def test_two_hosts_and_curves(tmp_path: Path) -> None:
    out = run(sys.executable, "examples/two_hosts.py", "--steps", "5", "--depth", "2", "--width", "16")
    assert out.count("off that of one rank") == 2 and out.count("Gbit/s between them, a step") == 2
    lines = tmp_path / "run.jsonl"
    lines.write_text("".join(json.dumps({"step": n, "loss": 1 / n}) + "\n" for n in range(1, 9)))
    run(sys.executable, "examples/plot_run.py", str(lines), "--names", "loss", "--out", str(tmp_path / "run.png"))
    assert (tmp_path / "run.png").stat().st_size > 1000


@pytest.mark.parametrize("name", BRIEF)
def test_examples_have_help(name: str) -> None:
    source = (ROOT / "examples" / f"{name}.py").read_text()
    assert "ArgumentDefaultsHelpFormatter" in source and "tqdm" in source and "fshard[examples]" in source
