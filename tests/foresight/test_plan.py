"""``fshard plan``: what it prints is what a trace, a plan and a simulation say, and bad input says what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.arguments import bytes_of
from fshard.cli.main import main
from fshard.cli.plan_command import read_mesh
from fshard.errors import PlanError
from fshard.foresight.foresee import foresee
from fshard.foresight.jobs import Job, named
from fshard.runtime.execution.trace_program import on_device
from fshard.writing import write_whole

JOB = """
import torch, fshard as fs

LAYERS, WIDTH = 4, 64


def loss(params, x):
    for i in range(LAYERS):
        x = layer(params[f"l{i}"], x)
    return x.square().mean()


@fs.unit
def layer(params, x):
    return torch.tanh(x @ params["w"])


def make():
    params = {f"l{i}": {"w": torch.empty(WIDTH, WIDTH, device="meta")} for i in range(LAYERS)}
    batch = torch.empty(32, WIDTH, device="meta")
    return {"model": params, "loss": loss, "batch": batch, "optimizer": fs.optim.sgd(0.1)}


def make_on(mesh):
    params = {f"l{i}": {"w": torch.empty(WIDTH, WIDTH)} for i in range(LAYERS)}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))], units=("*",), batch=fs.P("data"))
    return fs.make_train_step(loss, fs.optim.adamw(1e-3), plan), torch.empty(32, WIDTH)


def odd():
    return 3


def partly():
    return {"model": 3, "lose": 4}


def values():
    def loss(params, x):
        return params["w"].sum() * (1 if x.sum().item() > 0 else 2)
    return {"model": {"w": torch.ones(4)}, "loss": loss, "batch": torch.ones(2)}


def fails():
    return {}["width"]


def wrong():
    return make() | {"loss": lambda params, x: x @ params["nothing"]["w"]}


def leaves():
    raise SystemExit("no GPU")


def lists():
    return make() | {"model": {"layers": [torch.ones(2)]}}


def strict():
    rules = [(".*w", fs.P("nothing"))]
    return make() | {"rules": rules}
"""

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 32,
}


@pytest.fixture
def job(tmp_path: Path) -> str:
    """The file of a job."""
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    """The exit status, and the JSON."""
    status = main(["plan", *argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_numbers_are_those_of_the_step(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = planned(capsys, f"{job}:make_on", "--mesh", "8", "--memory", "1G")
    assert status == 1 and not found["fits"] and "communicators" in found["largest"][0]
    status, found = planned(capsys, f"{job}:make_on", "--mesh", "8", "--memory", "1G", "--communicator", "200Mi")
    assert status == 0 and found["fits"]
    mesh = fs.abstract_mesh((8,), ("data",))
    from fshard.foresight.jobs import Job, read_job

    made = read_job(f"{job}:make_on", mesh)
    assert not isinstance(made, Job)
    step, batch = made
    step = fs.make_train_step(step.loss_fn, step.opt, on_device(step.plan, "cuda"))
    least = min(each["peak_bytes"] for each in found["policies"])
    trace = step.trace(batch)
    state = sum(group.chunk * 4 * 3 for group in step.plan.groups)  # parameters and two moments
    assert found["state_bytes"] == state
    default = next(each for each in found["policies"] if each["policy"] == str(trace.schedule.policy))
    assert found["communicators"] == ["all_gather over data", "reduce_scatter over data"]
    assert default["peak_bytes"] == state + 2 * 200 * 2**20 + trace.footprint.peak_bytes >= least
    sent = sum(move.sent for group in trace.schedule.groups for move in group.transfers)
    assert sent <= found["sent_bytes"] <= 2 * sent and found["sent_by_axes"] == {"data": found["sent_bytes"]}
    assert found["seconds"] == min(each["seconds"] for each in found["policies"])
    assert found["seconds"] == pytest.approx(found["compute_seconds"] + found["exposed_seconds"])
    assert 0 < found["mfu"] < 1 and [row["parameters"] for row in found["groups"]] == [4096] * 4
    assert [*found["scaling"]] == ["1", "2", "4", "8"] and found["scaling"]["8"] == found["seconds"]


def test_a_slower_link_is_slower_and_a_mesh_of_two_axes_has_three(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    times = [
        planned(capsys, f"{job}:make", "--mesh", "4x2", "--link", link)[1]["seconds"] for link in ("ib400", "eth1")
    ]
    assert times[0] < times[1]
    found = planned(capsys, f"{job}:make", "--mesh", "replica=2,data=4")[1]
    assert found["mesh"] == {"replica": 2, "data": 4} and {*found["sent_by_axes"]} == {"data", "replica"}


def test_what_does_not_fit_says_what_is_largest_and_what_would_do(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--mesh", "8", "--memory", "90K", "--communicator", "1"]
    status, found = planned(capsys, f"{job}:make", *flags)
    assert status == 1 and not found["fits"] and found["largest"]
    assert len(found["remedies"]) >= 2 and found["notes"]
    assert all(each["peak_bytes"] <= found["peak_bytes"] for each in found["remedies"])
    assert main(["plan", f"{job}:make", *flags]) == 1
    printed = capsys.readouterr().out
    for words in ("no policy fits into 87.9 KiB: the least is", "what would change it:", "in a microbatch", "at op "):
        assert words in printed


def test_it_prints_tables(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{job}:make", "--mesh", "8"]) == 0
    printed = capsys.readouterr().out
    for words in ("l0 .. l", "prefetch=", "<- chosen", "MFU", "data=8, 8 ranks", "Scaling"):
        assert words in printed


@pytest.mark.long
def test_the_page_needs_no_other_file(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", f"{job}:make", "--mesh", "8", "--html", str(page), "--memory", "90K"]) == 1
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 3 and "http" not in text and "No policy fits" in text
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in (".py", ".html")] in ([], ["__pycache__"])


@pytest.mark.long
def test_a_config_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    status, found = planned(capsys, "--hf", str(tmp_path), "--mesh", "16", "--rows", "2")
    assert status == 0 and len(found["groups"]) == 4 and found["tokens_per_s"] > 0
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert [row["parameters"] for row in found["groups"]] == [2 * 101 * 64 + 64, layer, layer, layer]
    for config, words in (
        ({"model_type": "lama"}, "knows no model_type 'lama' (near to it: "),
        ({}, "has no model_type"),
        ({**LLAMA, "max_position_embeddings": 8}, "--length 16 is more than the 8 positions"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["plan", "--hf", str(tmp_path / "config.json"), "--length", "16"]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["FILE:odd"], "returned 3, an int: return a dict with 'model', 'loss', 'batch'"),
        (["FILE:partly"], "'loss' is missing, 'batch' is missing, 'lose' is unknown"),
        (["FILE:other"], "has no function 'other': it has loss, make, make_on, odd, partly, values, fails, "),
        (["FILE:fails"], "FILE:fails raised KeyError: 'width'\n  FILE:"),
        (["FILE:fails"], 'in fails: return {}["width"]'),
        (["FILE:wrong"], "FILE:wrong raised KeyError: 'nothing'\n  FILE:"),
        (["FILE:leaves"], "FILE:leaves raised SystemExit: no GPU"),
        (["FILE:loss"], "FILE:loss takes 2 arguments: it is called with the mesh, or with nothing"),
        (["FILE:lists"], "layers: list"),
        (["FOLDER/broken.py:make"], "FOLDER/broken.py:make raised SyntaxError: "),
        (["FILE:make", "--mesh", "9999999"], "--mesh '9999999' has 9,999,999 ranks: give at most 1,048,576"),
        (["FILE:make", "--html", "FOLDER"], "FOLDER cannot be written: it is there already, and is no file"),
        (["FILE:make", "--html", "FOLDER/a/b.html"], "b.html cannot be written: there is no folder FOLDER/a"),
        (["FILE:make", "--costs", "FOLDER/others.json"], "the costs of FOLDER/others.json are not those of this"),
        (["FILE:make", "--costs", "FOLDER/others.json"], "  forward l9: the program has no such op"),
        (["FILE:make", "--costs", "FOLDER/none.json"], ": not in the costs"),
        (["nothing.py:make"], "there is no file 'nothing.py'"),
        (["FILE:values"], "depends on values"),
        (["FILE:strict"], "nothing"),
        ([], "give either FILE.py:FUNCTION or --hf CONFIG"),
        (["FILE:make", "--mesh", "8by8"], "--mesh '8by8': give ranks along each axis"),
        (["FILE:make", "--link", "fast"], "no link is named 'fast': there are loopback, eth1"),
        (["FILE:make", "--memory", "much"], "'much' is not a number of bytes"),
        (["FILE:make", "--device", "abacus"], "no device is named 'abacus'"),
        (["FILE:make", "--costs", "nothing.json"], "nothing.json cannot be read: it is missing"),
        (["FILE:make", "--products", "2"], "products=2.0 is no share"),
        (["--hf", "nothing.json"], "nothing.json cannot be read: it is missing"),
    ],
)
def test_bad_input(argv: list[str], words: str, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(job).parent
    (folder / "broken.py").write_text("def make(:\n")
    fs.sim.Costs({("forward", "l9"): 1e-3}).save(folder / "others.json")
    fs.sim.Costs().save(folder / "none.json")

    def here(text: str) -> str:
        return text.replace("FILE:", f"{job}:").replace("FOLDER", str(folder))

    assert main(["plan", *map(here, argv)]) == 2
    said = capsys.readouterr()
    assert here(words) in said.err and not said.out and "Traceback" not in said.err


def test_meshes_and_bytes() -> None:
    assert read_mesh("1024").sizes == (1024,) and read_mesh("2x3x4").axis_names == ("outer", "middle", "inner")
    assert (bytes_of("1.5Ki"), bytes_of("2 kB"), bytes_of("7")) == (1536, 2000, 7)


def test_a_page_is_there_whole_or_not_at_all(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "plan.html"
    page.write_text("old")

    def full(self: Path, *rest: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(PlanError, match="plan.html cannot be written: No space left on device"):
        write_whole(page, "new")
    assert page.read_text() == "old" and not [*tmp_path.glob("*.tmp")]


def test_a_link_is_followed_and_a_device_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
    with pytest.raises(PlanError, match="/dev/null cannot be written: it is there already, and is no file"):
        write_whole("/dev/null", "text")


def test_defects_of_the_library_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError):
        named("train.py:make")(bytes_of)(3)  # type: ignore[arg-type]
    monkeypatch.setenv("FSHARD_TRACEBACKS", "full")
    with pytest.raises(SystemExit), named("train.py:make"):
        raise SystemExit(1)


def test_interrupted(job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fshard.cli.plan_command.foresee", interrupt)
    assert main(["plan", f"{job}:make"]) == 130 and capsys.readouterr().err == "fshard: interrupted\n"


@pytest.mark.parametrize("options", [{}, {"remat": "all"}, {"accumulate": 2}], ids=str)
def test_operations_are_those_of_the_model(options: dict[str, Any]) -> None:
    """A head outside of units begins its backward within the last forward op, which must not count threefold."""
    params = {"unit": {"w": torch.empty(8, 8, device="meta")}, "head": torch.empty(8, 64, device="meta")}
    layer = fs.unit(lambda params, x: torch.tanh(x @ params["w"]))
    job = Job(params, lambda p, x: (layer(p["unit"], x) @ p["head"]).square().mean(), torch.empty(4, 8), **options)
    step, batch = job.step(fs.abstract_mesh((2,), ("data",)))
    seen = foresee(step, batch, fs.sim.hardware("h100"))
    square, head = 2 * 4 * 8 * 8, 2 * 4 * 8 * 64
    assert seen.flops == 2 * square + 3 * head  # nobody needs the gradient of the batch
    found = fs.sim.search(job, [step.plan.mesh], fs.sim.hardware("h100"), remats=[options.get("remat")])
    assert found.best.mfu == seen.flops / (found.best.seconds * seen.hardware.speed_for(seen.plan).peak)
