"""Configs: what is wrong with one is said with its line, before any process trains; what is read is written again."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.cli.main import main
from fshard.errors import PlanError
from fshard.recipe.read_config import key_lines, read_config
from fshard.recipe.run_config import key_table, planned, to_toml
from fshard.recipe.train_config import TrainConfig
from tests.project.test_docs import blocks
from tests.recipe.runs import CONFIGS, ROOT

MODEL = """
import torch
from torch import nn


def make(width=8):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2)]
    return nn.Sequential(nn.Embedding(256, width), *blocks, nn.Linear(width, 256))


def wrong():
    return nn.Linear(3, 4)


def number():
    return 3


def small():
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)]
    return nn.Sequential(nn.Embedding(100, 8), *blocks, nn.Linear(8, 100))


def exits():
    raise SystemExit("no GPU")
"""
CONFIG = """version = 1
steps = 2
batch = 4
[model]
source = "model.py:make"
[data]
source = ["text.txt"]
length = 8
held_out = 0.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, data of all kinds and a config, which the test is in."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("text.txt").write_text("All work and no play makes Jack a dull boy. " * 20)
    Path("empty.txt").write_text("")
    Path("binary.txt").write_bytes(b"text\xff\xfe" * 9)
    Path("zeros.txt").write_bytes(bytes(90))
    Path("cut.parquet").write_bytes(b"PAR1abc")
    Path("bad.jsonl").write_text('{"text": "one"}\n{"text": \n')
    Path("run.toml").write_text(CONFIG)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *changes: str, ranks: int = 2) -> str:
    """What the command says that is wrong."""
    assert main(["train", "run.toml", "--ranks", str(ranks), *changes]) == 2
    return capsys.readouterr().err


STAGED = ("mesh.shape=[2, 1]", "mesh.axes=['stage', 'data']", "mesh.stages=stage")
"""Changes that cut a model into stages."""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("steps", "stepz", "run.toml:2: stepz is no key: did you mean steps?"),
        ("length", "lenght", "run.toml:8: data.lenght is no key: did you mean data.length?"),
        ("[data]", "[dta]", "run.toml:6: dta is no key: did you mean data?"),
        ("steps = 2", 'steps = "2"', "run.toml:2: steps = '2': must be a whole number"),
        ("batch = 4", "batch = true", "run.toml:3: batch = True: must be a whole number"),
        ("steps = 2", "steps = 0", "run.toml:2: steps = 0: must be 1 or more"),
        ('["text.txt"]', '"text.txt"', "run.toml:7: data.source = 'text.txt': must be a list of strings, ['text.txt']"),
        ("batch = 4", "batch = 4\nmesh = 3", "run.toml:4: mesh = 3, an int: must be a table, [mesh]"),
        ("held_out", 'format = "txt"\nheld_out', "run.toml:9: data.format = 'txt': must be one of auto, text"),
        ("version = 1", "version = 2", "run.toml:1: version = 2: this fshard reads configs of version 1"),
        ("steps = 2", "steps = ", "run.toml is not TOML: Invalid value (at line 2, column 9)"),
        ("held_out = 0.0", "held_out = 1.5", "run.toml:9: data.held_out = 1.5: must be below 1"),
        ("model.py:make", "", "run.toml:5: model.source = '': give FILE.py:FUNCTION"),
        ("model.py:make", "models.py:make", "run.toml:5: model.source = 'models.py:make': No such file or directory"),
        ("model.py:make", "model.py:exits", "run.toml:5: model.source = 'model.py:exits': SystemExit: no GPU: give"),
        ("model.py:make", "model.py:small", "the model knows 100 tokens, and data.tokenizer has 256: give"),
        ("model.py:make", "model.py:mak", "run.toml:5: model.source = 'model.py:mak': model.py has no function 'mak'"),
        ("model.py:make", "model.py:number", "run.toml:5: model.source = 'model.py:number': fs.split"),
        ("model.py:make", "model.py:wrong", "run.toml:4: model.units = ['auto']: units='auto' finds no unit"),
        ("model.py:make", "no/such-model", "run.toml:5: model.source = 'no/such-model': We couldn't connect"),
        ("text.txt", "texts.txt", "run.toml:7: data.source = ['texts.txt']: there is no file 'texts.txt'"),
        ("text.txt", "empty.txt", "run.toml:7: data.source = ['empty.txt']: empty.txt is empty: give"),
        ("text.txt", "binary.txt", "binary.txt is no text: 'utf-8' codec can't decode byte 0xff in position 4"),
        (
            "text.txt",
            "zeros.txt",
            "data.source = ['zeros.txt']: zeros.txt is no text: it has a byte 0: give",
        ),
        ("text.txt", "bad.jsonl", "run.toml:7: data.source = ['bad.jsonl']: bad.jsonl:2: this line is no JSON"),
        ("batch = 4", "batch = 3", "run.toml:3: batch = 3: must be a multiple of 2 ranks x step.accumulate = 1"),
        ("length = 8", "length = 900\nrows = 'windows'", "0 rows of 900 tokens to train on, and 0 held out, are"),
        (
            "batch = 4",
            "batch = 400",
            "110 rows of 8 tokens to train on, and 0 held out, are too few for",
        ),
        ("text.txt", "cut.parquet", "run.toml:7: data.source = ['cut.parquet']: "),
        ("[model]", "[[model]]", "run.toml:4: model = a list: must be a table"),
    ],
)
def test_a_mistake_is_said_with_its_line(
    old: str, new: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fshard.cli.train_command.launch", lambda *args, **more: pytest.fail("processes were started"))
    Path("run.toml").write_text(CONFIG.replace(old, new, 1))
    assert says in told(capsys)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["optimizer.raet=1"], "command line: optimizer.raet is no key"),
        (["optimizer.lr=1"], "command line: optimizer.lr is no key: give rate.peak"),
        (["batch_size=8"], "command line: batch_size is no key: give batch"),
        (["step=3"], "must be a table, [step]; did you mean steps?"),
        (["version=9"], "command line: version = 9: this fshard reads configs of version 1"),
        (["steps"], "'steps' is not key=value"),
        (["steps.x=1"], "command line: steps.x=1: steps is a value, and no table"),
        (
            ["mesh.shape=[3]"],
            "command line: mesh.shape = [3]: mesh sizes (3,) multiply to 3",
        ),
        (["mesh.shape=[2, 1]"], "run.toml: mesh.axes = ['data']: give a name for each of the 2 sizes of mesh.shape"),
        (
            ["mesh.rules=[['nothing', 'fsdp']]"],
            "command line: mesh.rules = [['nothing', 'fsdp']]: 7 of 7 leaves",
        ),
        (["mesh.rules=[['.*', 'shard']]"], 'give [pattern, "fsdp", axis...]'),
        (["model.init=[['.*', 'nromal', 1.0]]"], "['.*', 'nromal', 1.0] is no value: give [pattern, one of"),
        (
            ["model.init=[['nothing', 'ones']]"],
            "command line: model.init = [['nothing', 'ones']]: rules of",
        ),
        (["model.units=['nothing']"], "command line: model.units = ['nothing']: units: 'nothing' matches no submodule"),
        (["mesh.batch=['model']"], "command line: mesh.batch = ['model']: give some of mesh.axes, data"),
        (["mesh.stages=pipe"], "command line: mesh.stages = 'pipe': give one of mesh.axes, data, and another for"),
        (["step.pipeline=zbv"], "command line: step.pipeline = 'zbv': orders are those of stages: give mesh.stages"),
        ([*STAGED, "step.pipeline=zbv", "step.schedule=auto"], "step.schedule = 'auto': it chooses the order"),
        ([*STAGED, "mesh.leaves=[['a']]"], "mesh.leaves = [['a']]: ['a'] is no leaf of stages: give [pattern, stage"),
        ([*STAGED, "mesh.leaves=[['embed.*', 7]]"], "command line: mesh.leaves = [['embed.*', 7]]: mesh.leaves: pat"),
        (["rate.warmup=5"], "command line: rate.warmup = 5: give fewer steps than the 2 of the run"),
        (["rate.floor=1.0"], "command line: rate.floor = 1.0: give at most rate.peak = 0.0003"),
        (["out=text.txt/run"], "command line: out = 'text.txt/run': no folder can be there: give another path"),
        (["evaluation.every=-1"], "command line: evaluation.every = -1: must be 0 or more"),
        (["data.rows=windows", "data.held_out=0.01"], "and 1 held out, are too few for a batch of 4: give"),
        (["objective.kind=sft"], "command line: objective.kind = 'sft': it needs records"),
        (["data.text=body", "data.format=jsonl", "data.source=['a.jsonl']"], "no text in a field 'body'; its fields:"),
        (["optimizer.betas=[1.0]"], "command line: optimizer.betas = [1.0]: give two numbers"),
        (["model.options={depth = 3}"], "run.toml:5: model.source = 'model.py:make': TypeError"),
        (["data.tokenizer=no/such"], "command line: data.tokenizer = 'no/such': We couldn't connect"),
        (["model.source=small.json"], "the model knows 9 tokens, and data.tokenizer has 256"),
        (["checkpoints.every=3"], "command line: checkpoints.every = 3: it writes to a folder: give out"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_on_the_command_line(
    changes: Sequence[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.jsonl").write_text('{"text": "one"}\n')
    small = {"model_type": "llama", "vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2}
    Path("small.json").write_text(json.dumps(small))
    assert says in told(capsys, *changes)


def test_the_remedy_for_leaves_of_stages_is_a_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    staged = [*STAGED, "step.accumulate=2"]
    found = re.search(
        r"mesh\.leaves = (\[\[.*?\]\])", told(capsys, *staged, "mesh.leaves=[['3.*', 0]]").splitlines()[-1]
    )
    assert found is not None
    assert main(["train", "run.toml", "--dry-run", "--ranks", "2", *staged, f"mesh.leaves={found[1]}"]) == 0


def test_a_half_set_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(PlanError, match=r"run.toml: mesh.shape = \[-1\]: .*WORLD_SIZE"):
        fs.train("run.toml")


def test_a_missing_library_names_its_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'command line: model.source = .*pip install "fshard\[recipe\]"'):
        fs.train("run.toml", [f"model.source={CONFIGS / 'llama.json'}"])
    with pytest.raises(ImportError, match=r'data.source = .*pip install "fshard\[recipe\]"'):
        fs.train("run.toml", ["data.format=huggingface"])


def test_every_key_is_written_and_read_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ['model.options={width = 4, name = "a \\"b\\" ü"}', "model.init=[['.*', 'normal', 0.5]]", "rate.peak=1"]
    assert main(["train", "run.toml", *changes, "--print-config"]) == 0
    Path("again.toml").write_text(capsys.readouterr().out)
    before, again = read_config("run.toml", changes).config, read_config("again.toml").config
    assert again == before and again.model.options == {"width": 4, "name": 'a "b" ü'} and again.rate.peak == 1.0
    assert all(f"\n{name.rpartition('.')[2]} = " in f"\n{to_toml(again)}" for name, *_ in key_table())


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    for name, kind, default, text in key_table():
        assert f"  {name}: {kind}, default {default}\n      {text}" in out and text


def test_places_of_keys() -> None:
    text = 'a.b = [\n  1,\n]\n\n[c]\nd = """\n[e]\nf = 1\n"""\ng = { h = 1 }\n[[i.j]]\nk = 2\n'
    lines = {name: int(place[2:]) for name, place in key_lines(text, "f")}
    assert lines == {"a": 1, "a.b": 1, "c": 5, "c.d": 6, "c.g": 10, "c.g.h": 10, "i": 11, "i.j": 11, "i.j.k": 12}


def test_a_dry_run_starts_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml", "out=run", "--dry-run", "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert "mesh data=2" in out and "in 3 groups" in out and "state of a rank: 26.6 KiB" in out and "at its peak" in out
    assert "h100 at 70% of its peak" in out and "Bytes by link" in out and "Policies, the best of" in out
    assert not Path("run").exists()


def test_a_schedule_that_the_first_step_chooses_is_checked_without_it(folder: Path) -> None:
    step, _ = planned(read_config("run.toml", ["step.schedule=auto"]), 2)
    assert isinstance(step.options.running.policy, fs.Policy)


def test_all_kinds_of_data_are_read(folder: Path) -> None:
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [{"text": f"{n} and {n} are {2 * n}"} for n in range(20)]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, records)))
    parquet.write_table(pyarrow.Table.from_pylist(records), "a.parquet")
    datasets.Dataset.from_list(records).save_to_disk("saved")
    batches = []
    for source, form in (("a.jsonl", "auto"), ("a.parquet", "auto"), ("saved", "huggingface")):
        _, batch = planned(read_config("run.toml", [f"data.source=['{source}']", f"data.format={form}"]), 1)
        batches.append(batch)
    assert all(torch.equal(batch["tokens"], batches[0]["tokens"]) for batch in batches)
    assert bytes(batches[0]["tokens"].flatten()[:16].tolist()) == b"0 and 0 are 0\x001 "


def test_a_tokenizer_of_hugging_face(folder: Path) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": 0, "All": 1, "work": 2}, unk_token="<end>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained("words")
    _, batch = planned(read_config("run.toml", ["data.tokenizer=words"]), 1)
    assert batch["tokens"].flatten()[:4].tolist() == [1, 2, 0, 0]


def test_targets_of_answers_alone(folder: Path) -> None:
    Path("a.jsonl").write_text('{"prompt": "ab", "answer": "cd"}\n{"prompt": "e", "answer": "fg"}\n')
    changes = ["data.source=['a.jsonl']", "objective.kind=sft", "batch=1", "data.length=9"]
    _, batch = planned(read_config("run.toml", changes), 1)
    tokens = bytes(batch["tokens"][0].tolist())
    assert tokens == b"abcd\0efg\0"
    assert batch["targets"][0].tolist() == [-100, *b"cd\0", -100, *b"fg\0", -100]


def test_a_config_may_be_of_a_program() -> None:
    with pytest.raises(PlanError, match="config: modle is no key: did you mean model"):
        read_config({"modle": {}})
    assert read_config(TrainConfig(steps=3)).config == read_config({"steps": 3}).config


def test_example_configs_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert sorted(path.stem for path in CONFIGS.glob("*.toml")) == ["dpo", "lora", "pretrain", "sft"]
    for path in CONFIGS.glob("*.toml"):
        assert read_config(path).config.version == 1


def test_the_page_is_short_and_names_real_keys(folder: Path) -> None:
    text = (ROOT / "docs" / "train.md").read_text()
    assert len(text.split()) <= 600
    (shortest,) = [body for info, body, _ in blocks(ROOT / "docs" / "train.md") if info == "toml"]
    Path("short.toml").write_text(shortest)
    assert read_config("short.toml").config.model.options == {"depth": 2, "width": 64}
    rows = dict(re.findall(r"^\| `\[([\w.]+)\]` \| (.*) \|$", text, re.MULTILINE))
    names = {name for name, *_ in key_table()}
    for table, words in rows.items():
        keys = [word for word in re.findall(r"`(\w+)`", words.split(":")[0]) if f"{table}.{word}" in names]
        assert keys, table
