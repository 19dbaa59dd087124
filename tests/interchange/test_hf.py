"""Hugging Face's safetensors: read straight into shards, and written so that transformers loads them."""

import json
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P, tree
from fshard.checkpoint.tensorfile import TensorMeta
from fshard.errors import CheckpointError, DamagedError, PeerError, PlanError, TreeError
from fshard.interchange import hf_files
from fshard.interchange.hf_files import INDEX, SINGLE, HfFiles
from fshard.interchange.source import MemorySource, load
from tests.shared.workers import Pools

OPT = fs.optim.adamw(1e-3)


def tiny(kind: str) -> Any:
    """A small model of transformers with the same values every time."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        config = transformers.GPT2Config(vocab_size=97, n_positions=16, n_embd=12, n_layer=2, n_head=2, **ends)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=61, num_key_value_heads=2, max_position_embeddings=32, **sizes)
    return transformers.LlamaForCausalLM(config)


def flat_plan(model: Any, mesh: fs.Mesh) -> fs.Plan:
    """All leaves flat-sharded over the mesh's first axis."""
    return fs.make_plan(model, mesh, [(r".*", fs.fsdp(mesh.axis_names[0]))], batch=P(mesh.axis_names[0]))


def there_and_back(kind: str, source: str, target: str, size: str) -> list[str]:
    """On a rank: read a model of transformers, write it again; returns the leaves that are not the model's."""
    module = tiny(kind)
    model = fs.split(module, units=("transformer.h.*",) if kind == "gpt2" else ("model.layers.*",))
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = flat_plan(model, mesh)
        state = fs.io.load_hf(source, plan, OPT)
        full = dict(tree.paths(fs.unshard(state.params, plan)))
        fs.io.save_hf(state, target, config=module.config, max_shard_size=size)
    return [path for path, leaf in tree.paths(model.params) if not torch.equal(leaf, full[path])]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "world", "size"), [("gpt2", 2, "10KB"), ("gpt2", 3, "5GB"), ("llama", 2, "4KB")])
def test_transformers_loads_what_is_written(tmp_path: Path, kind: str, world: int, size: str) -> None:
    module, source, target = tiny(kind), tmp_path / "source", tmp_path / "target"
    module.save_pretrained(source, max_shard_size=size)
    assert (source / (SINGLE if size == "5GB" else INDEX)).exists()
    mesh = fs.virtual_mesh((world,), ("shard",))  # real ranks would import transformers, each for itself
    assert mesh.run(there_and_back, kind, str(source), str(target), size) == [[]] * world
    loaded, info = type(module).from_pretrained(target, output_loading_info=True)
    assert not any(info[key] for key in info)
    ours, theirs = loaded.state_dict(), module.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    tokens = torch.arange(8).view(1, 8)
    assert torch.equal(loaded.eval()(tokens).logits, module.eval()(tokens).logits)
    assert sorted(p.name for p in target.iterdir()) == sorted(
        p.name for p in source.iterdir() if p.name != "generation_config.json"
    )


class Mlp(nn.Module):
    """GPT-2's feed-forward block, by linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)


GPT2_MLP = [
    fs.io.Rename(r"transformer\.h\.(\d)\.mlp\.c_fc\.weight", r"\1.up.weight", transpose=True),
    fs.io.Rename(r"transformer\.h\.(\d)\.mlp\.c_proj\.weight", r"\1.down.weight", transpose=True),
    (r"transformer\.h\.(\d)\.mlp\.c_fc\.bias", r"\1.up.bias"),
    (r"transformer\.h\.(\d)\.mlp\.c_proj\.bias", r"\1.down.bias"),
    (r".*", None),
]


def transposed(source: str, target: str) -> Any:
    """On a rank: the feed-forward blocks of GPT-2 as linear maps, and back as they were."""
    model = fs.split(nn.Sequential(Mlp(), Mlp()))
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = flat_plan(model, mesh)
        state = fs.io.load_hf(source, plan, OPT, rename=GPT2_MLP)
        back = [fs.io.Rename(r"(\d)\.up\.(weight)", r"h.\1.c_fc.\2", transpose=True), (r".*(bias|down\.weight)", None)]
        fs.io.save_hf(state, target, rename=back)
        return fs.io.to_state_dict(state)


@pytest.mark.long
def test_names_are_mapped_and_matrices_transposed(tmp_path: Path) -> None:
    module = tiny("gpt2")
    module.save_pretrained(tmp_path / "source")
    mesh = fs.virtual_mesh((2,), ("shard",))
    found = mesh.run(transposed, str(tmp_path / "source"), str(tmp_path / "target"))[1]
    for number, block in enumerate(module.transformer.h):
        assert torch.equal(found[f"{number}.up.weight"], block.mlp.c_fc.weight.t())
        assert torch.equal(found[f"{number}.down.weight"], block.mlp.c_proj.weight.t())
        assert torch.equal(found[f"{number}.down.bias"], block.mlp.c_proj.bias)
    written = safetensors.torch.load_file(tmp_path / "target" / SINGLE)
    assert set(written) == {"h.0.c_fc.weight", "h.1.c_fc.weight"}
    assert torch.equal(written["h.1.c_fc.weight"], module.transformer.h[1].mlp.c_fc.weight)


def small(mesh: fs.Mesh | None = None, dtype: torch.dtype = torch.float32) -> fs.Plan:
    """A plan of two leaves."""
    params = {"net": {"w": torch.empty(4, 6, dtype=dtype)}, "b": torch.empty(5, dtype=dtype)}
    return flat_plan(params, fs.make_mesh((1,), ("shard",)) if mesh is None else mesh)


def written(folder: Path, **tensors: Tensor) -> Path:
    """A folder with one file."""
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file({name.replace("__", "."): leaf for name, leaf in tensors.items()}, folder / SINGLE)
    return folder


GOOD = {"net__w": torch.arange(24.0).view(4, 6), "b": torch.arange(5.0)}


class Spy(MemorySource):
    """A source that notes how many elements of each tensor were read."""

    def read(self, name: str, parts: Sequence[tuple[tuple[int, ...], Tensor]]) -> None:
        """Read, and count."""
        for _, out in parts:
            counts[name] = counts.get(name, 0) + out.numel()
        super().read(name, parts)


counts: dict[str, int] = {}


@pytest.mark.parametrize("rename", [[], [fs.io.Rename("w", "w", transpose=True)]])
def test_each_rank_reads_what_it_holds_and_no_more(rename: list[Any]) -> None:
    whole = {"w": torch.randn(7, 5), "cut": torch.randn(6, 4), "s": torch.tensor(2.0)}
    read: dict[str, int] = {}
    given = {**whole, "w": whole["w"].t().contiguous()} if rename else whole
    for rank in range(3):
        mesh = fs.abstract_mesh((3,), ("shard",), rank=rank)
        plan = fs.make_plan(whole, mesh, [("cut", P("shard")), (".*", fs.fsdp("shard"))])
        counts.clear()
        state = load(plan, OPT, Spy("spy", given), rename=rename)
        held = {path: leaf.numel() for path, leaf in tree.paths(state.params)}
        assert counts == {path: count for path, count in held.items() if count}
        expected = dict(tree.paths(fs.shard(whole, plan)))
        assert all(torch.equal(leaf, expected[path]) for path, leaf in tree.paths(state.params))
        for path, count in counts.items():
            read[path] = read.get(path, 0) + count
    assert read == {path: leaf.numel() for path, leaf in whole.items()}


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
def test_widening_is_fine_and_rounding_must_be_asked_for(tmp_path: Path, kept: torch.dtype) -> None:
    narrow = written(tmp_path / "narrow", **{name: leaf.to(kept) for name, leaf in GOOD.items()})
    state = fs.io.load_hf(narrow, small(), OPT)
    assert torch.equal(fs.io.to_state_dict(state)["net.w"], GOOD["net__w"])
    wide, plan = written(tmp_path / "wide", **GOOD), small(dtype=kept)
    with pytest.raises(TreeError, match=f"float32 would be rounded to {str(kept)[6:]}.*\n.*\n.*cast=True"):
        fs.io.load_hf(wide, plan, OPT)
    assert fs.io.load_hf(wide, plan, OPT, cast=True).params["b"].dtype == kept


def test_new_leaves_start_as_their_rules_say(tmp_path: Path) -> None:
    folder = written(tmp_path / "part", net__w=GOOD["net__w"])
    state = fs.io.load_hf(folder, small(), OPT, init=[("b", fs.init.ones())])
    assert fs.io.to_state_dict(state)["b"].eq(1).all()
    with pytest.raises(PlanError, match=r"match no missing leaf:\n  init\[0\] 'net.w'"):
        fs.io.load_hf(folder, small(), OPT, init=[("net.w", fs.init.ones())])


def test_what_does_not_fit_is_one_report(tmp_path: Path) -> None:
    folder = written(tmp_path / "odd", net__w=torch.zeros(6, 4), c=torch.zeros(2), d=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TreeError) as caught:
        fs.io.load_hf(folder, small(), OPT)
    for part in (str(folder), "missing     b  [5]", "mismatched  net.w: [6, 4], the plan has [4, 6]", "unexpected  c"):
        assert part in str(caught.value)
    with pytest.raises(TreeError, match="c .as d.: int64 would be rounded"):
        plan = flat_plan({"c": torch.empty(2)}, fs.make_mesh((1,), ("shard",)))
        fs.io.load_hf(folder, plan, OPT, rename=[("d", "c"), (".*", None)])


BAD_RULES: dict[str, tuple[Any, type[Exception], str]] = {
    "matches nothing": ([(r"nett\..*", "x")], PlanError, r"decide no name.*\n  rename\[0\] 'nett"),
    "is shadowed": ([(r".*", r"\g<0>"), (r"b", "c")], PlanError, r"rename\[1\] 'b'"),
    "collides": ([(r"net\.w", "b")], TreeError, "the same name:\n  b: from b and from net.w|b: from net.w and from b"),
    "is no expression": ([(r"net(", "b")], PlanError, "rename rule .*regular expression"),
    "names no group": ([(r"net\.w", r"\1")], PlanError, "invalid group reference"),
    "is no rule": (["net.w"], PlanError, r"rename\[0\] is 'net.w'"),
    "turns a vector": ([fs.io.Rename("b", "b", transpose=True)], TreeError, "cannot be transposed"),
}


@pytest.mark.parametrize("name", BAD_RULES)
def test_a_rule_that_cannot_be(tmp_path: Path, name: str) -> None:
    rules, error, text = BAD_RULES[name]
    with pytest.raises(error, match=text):
        fs.io.load_hf(written(tmp_path / "good", **GOOD), small(), OPT, rename=rules)


def test_tied_leaves_may_be_there_once_or_twice_but_not_differ(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    plan = flat_plan(fs.split(module), fs.make_mesh((1,), ("shard",)))
    one = torch.randn(3, 3)
    for names in (["0.weight"], ["1.weight"], ["0.weight", "1.weight"]):
        folder = tmp_path / names[-1] / names[0]
        folder.mkdir(parents=True)
        safetensors.torch.save_file({name: one.clone() for name in names}, folder / SINGLE)
        assert torch.equal(fs.io.to_state_dict(fs.io.load_hf(folder, plan, OPT))["1.weight"], one)
    safetensors.torch.save_file({"0.weight": one, "1.weight": one + 1}, tmp_path / SINGLE)
    with pytest.raises(TreeError, match=r"other values in 1.weight than in 0.weight.*rename=\[\('1.weight', None\)\]"):
        fs.io.load_hf(tmp_path, plan, OPT)


def _index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        text = json.loads((folder / INDEX).read_text())
        new = change(text)
        (folder / INDEX).write_text(new if isinstance(new, str) else json.dumps(text))

    return spoil


def _cut(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def _header(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])


def _pickle(folder: Path) -> None:
    torch.save(GOOD, folder / "model-00001-of-00002.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "no index": (lambda folder: (folder / INDEX).unlink(), CheckpointError, "holds neither"),
    "index is no JSON": (_index(lambda text: "{"), DamagedError, "is not an index"),
    "index is a list": (_index(lambda text: "[]"), DamagedError, "is not an index"),
    "index without a map": (_index(lambda text: text.pop("weight_map")), DamagedError, "is not an index"),
    "index of numbers": (_index(lambda text: text["weight_map"].update(b=3)), DamagedError, "gives the name of a file"),
    "file elsewhere": (_index(lambda text: text["weight_map"].update(b="../x.safetensors")), DamagedError, "may not"),
    "absolute file": (_index(lambda text: text["weight_map"].update(b="/x.safetensors")), DamagedError, "may not"),
    "pickle in index": (_index(lambda text: text["weight_map"].update(b="x.bin")), DamagedError, "may not"),
    "file gone": (
        _index(lambda text: text["weight_map"].update(b="x.safetensors")),
        DamagedError,
        "not exist:\n  x.s",
    ),
    "name gone": (_index(lambda text: text["weight_map"].pop("b") and None), DamagedError, "b: the index says nothing"),
    "name too many": (
        _index(lambda text: text["weight_map"].update(c="model-00001-of-00002.safetensors")),
        DamagedError,
        "c: the index says model-00001",
    ),
    "truncated": (_cut, DamagedError, "model-00001.* is not a whole safetensors file"),
    "huge header": (_header, DamagedError, "is not a whole safetensors file"),
    "a pickle": (_pickle, CheckpointError, "is a pickle.*run code"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_an_error_with_its_path(tmp_path: Path, name: str) -> None:
    plan = flat_plan({"w": torch.empty(5, 5), "a": torch.empty(5), "b": torch.empty(5)}, fs.make_mesh((1,), ("shard",)))
    folder = tmp_path / "parts"
    fs.io.save_hf(fs.init_state(plan, OPT, init=[(".*", fs.init.ones())]), folder, max_shard_size=100)
    assert len(json.loads((folder / INDEX).read_text())["weight_map"]) == 3
    assert len(list(folder.glob("*.safetensors"))) == 2
    spoil, error, text = DAMAGE[name]
    spoil(folder)
    with pytest.raises(error, match=text) as caught:
        fs.io.load_hf(folder, plan, OPT)
    assert str(folder) in str(caught.value)


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="snapshot_download"):
        fs.io.load_hf("gpt2", small(), OPT)
    torch.save(GOOD, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="It holds pytorch_model.bin: pickles"):
        fs.io.load_hf(tmp_path, small(), OPT)
    (tmp_path / "new.safetensors").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointError, match="is a pickle"):
        fs.io.load_hf(tmp_path / "new.safetensors", small(), OPT)
    torch.save(GOOD, tmp_path / "old.safetensors", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="is a pickle"):
        fs.io.load_hf(tmp_path / "old.safetensors", small(), OPT)


def test_no_header_length_makes_safetensors_a_pickle() -> None:
    for length in range(2, 70_001):
        start = length.to_bytes(8, "little") + b"{"
        assert not hf_files.is_pickle(start), length
    for kept in range(2, 6):
        assert hf_files.is_pickle(pickle.dumps({"w": 1.0}, protocol=kept)), kept


@pytest.mark.parametrize("length", [640, 1152, 1408, 640 + 65536])
def test_headers_of_the_lengths_that_pickles_begin_with(tmp_path: Path, length: int) -> None:
    leaves = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}
    bare = safetensors.torch.save(leaves, {"pad": ""})
    text = safetensors.torch.save(leaves, {"pad": "x" * (length - int.from_bytes(bare[:8], "little"))})
    assert int.from_bytes(text[:8], "little") == length
    (tmp_path / SINGLE).write_bytes(text)
    plan = flat_plan(leaves, fs.make_mesh((1,), ("shard",)))
    assert torch.equal(fs.io.to_state_dict(fs.io.load_hf(tmp_path, plan, OPT))["a"], leaves["a"])


def test_one_file_and_the_index_itself_can_be_named(tmp_path: Path) -> None:
    written(tmp_path, **GOOD)
    state = fs.io.load_hf(tmp_path / SINGLE, small(), OPT)
    fs.io.save_hf(state, tmp_path / "parts", max_shard_size=100)
    again = fs.io.load_hf(tmp_path / "parts" / INDEX, small(), OPT)
    assert torch.equal(fs.io.to_state_dict(again)["net.w"], GOOD["net__w"])


def test_weights_that_are_there_are_not_overwritten_by_chance(tmp_path: Path) -> None:
    folder = written(tmp_path / "there", **GOOD)
    state = fs.io.load_hf(folder, small(), OPT)
    before = (folder / SINGLE).read_bytes()
    with pytest.raises(CheckpointError, match="holds weights already:\n  model.safetensors\n.*overwrite=True"):
        fs.io.save_hf(state, folder)
    assert (folder / SINGLE).read_bytes() == before
    fs.io.save_hf(state, folder, overwrite=True, max_shard_size=40, config={"model_type": "x"}, dtype=torch.bfloat16)
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert {stored.dtype for stored in HfFiles(folder).tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("size", ["GB", "5X", 0, -3, True, "0GB", 1.5])
def test_a_size_that_is_none(tmp_path: Path, size: Any) -> None:
    state = fs.io.load_hf(written(tmp_path, **GOOD), small(), OPT)
    with pytest.raises(PlanError, match="max_shard_size"):
        fs.io.save_hf(state, tmp_path / "out", max_shard_size=size)
    with pytest.raises(PlanError, match="config="):
        fs.io.save_hf(state, tmp_path / "out", config="config.json")
    assert not (tmp_path / "out").exists()


def refused(folder: str) -> str:
    """On a rank: what becomes of a folder that cannot be written to."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        state = fs.init_state(small(mesh), OPT, init=[(".*", fs.init.ones())])
        try:
            fs.io.save_hf(state, folder)
        except (CheckpointError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


def test_all_ranks_learn_that_rank_0_could_not_write(pool: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    ours, theirs = pool(2).run(refused, str(tmp_path / "file"))
    assert ours == theirs and ours.startswith("CheckpointError: cannot write to") and "File exists" in ours


def test_files_hold_tensors_up_to_the_limit() -> None:
    sizes = {
        name: TensorMeta((count,), torch.uint8) for name, count in {"a": 4, "b": 5, "c": 12, "d": 1, "e": 9}.items()
    }
    assert [list(part) for part in hf_files.split_files(sizes, 10)] == [["a", "b"], ["c"], ["d", "e"]]


def test_rules_read_as_they_are_written() -> None:
    rule = fs.io.Rename(r"(?P<layer>\d+)\.w", r"blocks.\g<layer>.w")
    assert rule.of("12.w") == "blocks.12.w" and rule.of("x.w") is None
    assert re.fullmatch(r"Rename\(.*\)", repr(rule))


def test_parameters_alone_are_a_state_for_evaluation(tmp_path: Path) -> None:
    folder, plan = written(tmp_path, **GOOD), small()
    state, trained = fs.io.load_hf(folder, plan), fs.io.load_hf(folder, plan, OPT)
    assert state.opt_state == {} and trained.opt_state
    assert all(torch.equal(a, b) for a, b in zip(*map(tree.leaves, (state.params, trained.params)), strict=True))

    def total(params: Any, batch: Any) -> torch.Tensor:
        return torch.stack([leaf.sum() for leaf in tree.leaves(params)]).sum() * batch.mean()

    evaluate, batch = fs.make_eval_step(total, plan), torch.ones(2)
    assert torch.equal(evaluate(state, batch), evaluate(trained, batch))
    with pytest.raises(TreeError, match=r"the state holds \[\] for the optimizer"):
        fs.make_train_step(total, fs.optim.adamw(0.1), plan)(state, batch)
