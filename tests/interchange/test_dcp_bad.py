"""Folders of torch.distributed.checkpoint that are not what they should be, or that were made to do harm."""

import enum
import io
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import fshard as fs
from fshard.errors import CheckpointError, DamagedError, PlanError, ShardError, TreeError
from fshard.interchange.convert import to_state
from fshard.interchange.metadata import read_metadata
from tests.shared.workers import Pools

OPT = fs.optim.adamw(1e-3)
LEAVES = {"w": torch.arange(24.0).view(4, 6), "b": torch.arange(5.0)}
FILE = "__0_0.distcp"


def placed(mesh: fs.Mesh | None = None) -> fs.Plan:
    """A plan of two leaves."""
    return fs.make_plan(LEAVES, mesh or fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good folder."""
    fs.io.save_dcp(fs.init_state(placed(), OPT, params=LEAVES), tmp_path / "dcp", OPT)
    return tmp_path / "dcp"


class Harm:
    """A pickle of this runs a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


class Method:
    """A pickle of this calls a function of torch."""

    def __reduce__(self) -> Any:
        return torch.load, ("x",)


def _edit(change: Callable[[Metadata], Any]) -> Callable[[Path], None]:
    """Change the metadata as torch reads it."""

    def spoil(folder: Path) -> None:
        found = pickle.loads((folder / ".metadata").read_bytes())
        new = change(found)
        (folder / ".metadata").write_bytes(pickle.dumps(found if new is None else new))

    return spoil


def _write(text: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / ".metadata").write_bytes(text) and None


def _got(of: bytes, name: bytes) -> bytes:
    """A pickle that takes an attribute."""
    return b"cbuiltins\ngetattr\n(" + of + b"X" + struct.pack("<I", len(name)) + name + b"tR."


def _first(found: Metadata) -> _StorageInfo:
    return found.storage_data[MetadataIndex("model.w", [0, 0])]


def _cut(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-9])


def _swap(folder: Path) -> None:
    """Another tensor's bytes where the first one should lie."""
    _edit(lambda m: setattr(_first(m), "offset", m.storage_data[MetadataIndex("model.b", [0])].offset))(folder)


def _poison(folder: Path) -> None:
    """A pickle that does harm, in place of a tensor."""
    at = (folder / FILE).stat().st_size
    with open(folder / FILE, "ab") as file:
        torch.save(Harm(), file)
    end = (folder / FILE).stat().st_size

    def point(found: Metadata) -> None:
        _first(found).offset, _first(found).length = at, end - at

    _edit(point)(folder)


def _link(folder: Path) -> None:
    (folder / FILE).rename(folder.parent / "elsewhere")
    (folder / FILE).symlink_to(folder.parent / "elsewhere")


W = "model.w"
CASES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "none": (lambda folder: (folder / ".metadata").unlink(), CheckpointError, "cannot be read.*dcp.save"),
    "runs a command": (_write(pickle.dumps(Harm())), CheckpointError, r"names posix.system, .*was not read"),
    "calls torch": (_write(pickle.dumps(Method())), CheckpointError, "names torch.serialization.load"),
    "by getattr": (_write(_got(b"ctorch\nSize\n", b"load")), CheckpointError, "names torch.Size.load"),
    "by getattr of a value": (_write(_got(b"}", b"load")), CheckpointError, "names builtins.getattr"),
    "getattr itself": (_write(b"cbuiltins\ngetattr\n."), DamagedError, "holds a GlobalName"),
    "by a dotted name": (_write(b"\x80\x04\x8c\x05torch\x8c\x09hub.load_\x93."), CheckpointError, "names torch.hub"),
    "persistent id": (_write(b"P1\n."), DamagedError, "is the opcode b'P'"),
    "harm inside": (_edit(lambda m: setattr(m, "planner_data", Harm())), CheckpointError, "names posix.system"),
    "empty": (_write(b""), DamagedError, "is not a whole pickle"),
    "text": (_write(b"hello"), DamagedError, "is not a whole pickle"),
    "truncated": (
        lambda folder: (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:99]),
        DamagedError,
        "is not a whole pickle",
    ),
    "a dict": (_edit(lambda m: {"state_dict_metadata": {}}), DamagedError, "holds a dict, not the Metadata"),
    "nothing listed": (_edit(lambda m: m.state_dict_metadata.clear()), DamagedError, "lists no tensor"),
    "no places": (_edit(lambda m: setattr(m, "storage_data", None)), DamagedError, "lies nowhere"),
    "outside": (_edit(lambda m: setattr(_first(m), "relative_path", "../x")), DamagedError, "'../x'.*folder itself"),
    "absolute": (_edit(lambda m: setattr(_first(m), "relative_path", "/etc/passwd")), DamagedError, "folder itself"),
    "no such file": (_edit(lambda m: setattr(_first(m), "relative_path", "y")), DamagedError, "of y, which has -1"),
    "a link": (_link, DamagedError, "which has -1"),
    "beyond the end": (_edit(lambda m: setattr(_first(m), "length", 1 << 40)), DamagedError, "bytes 0 to"),
    "negative": (_edit(lambda m: setattr(_first(m), "offset", -1)), DamagedError, "bytes -1 to"),
    "compressed": (_edit(lambda m: setattr(_first(m), "transform_descriptors", ["zstd"])), DamagedError, "zstd"),
    "huge": (
        _edit(lambda m: setattr(m.state_dict_metadata[W], "size", torch.Size([1 << 50, 6]))),
        DamagedError,
        "fill",
    ),
    "overlap": (
        _edit(
            lambda m: m.state_dict_metadata[W].chunks.append(
                ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 6]))
            )
        ),
        DamagedError,
        "2 chunks do not fill",
    ),
    "too large a chunk": (
        _edit(lambda m: setattr(m.state_dict_metadata[W].chunks[0], "sizes", torch.Size([5, 6]))),
        DamagedError,
        "a chunk of offset and size",
    ),
    "cut": (_cut, DamagedError, "which has"),
    "other bytes": (_swap, DamagedError, "chunk of model.w.*"),
    "harm in a tensor": (_poison, DamagedError, "is not a whole tensor of torch.save"),
}


class ByName(pickle.Pickler):
    """Writes members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        """What makes a value."""
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_members_of_enums_may_be_written_by_name(folder: Path) -> None:
    found = pickle.loads((folder / ".metadata").read_bytes())
    buffer = io.BytesIO()
    ByName(buffer).dump(found)
    assert b"getattr" in buffer.getvalue() and pickle.loads(buffer.getvalue()) == found
    before = read_metadata(folder)
    (folder / ".metadata").write_bytes(buffer.getvalue())
    assert read_metadata(folder) == before


@pytest.mark.parametrize("name", CASES)
def test_a_bad_folder_is_refused(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    spoil, error, text = CASES[name]
    spoil(folder)
    with pytest.raises(error, match=text) as caught:
        fs.io.load_dcp(folder, placed(), OPT)
    assert str(folder) in str(caught.value)
    assert not (folder.parent / "harmed").exists()


def test_bytes_that_flip_give_clean_errors_or_the_same_list(folder: Path) -> None:
    good = (folder / ".metadata").read_bytes()
    draw, refused = random.Random(0), 0
    for _ in range(400):
        text = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            text[draw.randrange(len(text))] = draw.randrange(256)
        (folder / ".metadata").write_bytes(text[: draw.choice([len(text), draw.randrange(len(text))])])
        try:
            read_metadata(folder)
        except ShardError:
            refused += 1
    assert refused > 200


MISFITS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no such model": ({"model": "net"}, TreeError, "nothing under 'net'; its names begin with 'model', 'optim'"),
    "no such optimizer": ({"optimizer": "opt"}, TreeError, "nothing under 'opt'"),
    "all of it": ({"model": ""}, TreeError, "unexpected  model.w"),
    "a rule for nothing": ({"rename": [("model.w", "w")]}, PlanError, "decide no name"),
    "another optimizer": ({"opt": fs.optim.sgd(0.1, momentum=0.9)}, TreeError, "missing     state.w.momentum_buffer"),
    "a part of it": ({"opt": fs.optim.sgd(0.1)}, TreeError, "unexpected  state.w.exp_avg"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named(folder: Path, name: str) -> None:
    arguments, error, text = MISFITS[name]
    opt = arguments.get("opt", OPT)
    with pytest.raises(error, match=text):
        fs.io.load_dcp(folder, placed(), opt, **{key: value for key, value in arguments.items() if key != "opt"})


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_quantized_parameters_are_no_state(folder: Path) -> None:
    _edit(lambda m: setattr(m.state_dict_metadata[W].properties, "dtype", torch.qint8))(folder)
    with pytest.raises(PlanError, match=r"not:\n  w: torch.qint8, .*\n.*dequantized"):
        to_state(str(folder), "dcp", fs.make_mesh((1,), ("shard",)))
    with pytest.raises(TreeError, match="w: qint8 would be rounded to float32"):
        fs.io.load_dcp(folder, placed(), OPT, cast=True)


def test_parameters_alone(folder: Path, tmp_path: Path) -> None:
    state = fs.io.load_dcp(folder, placed(), fs.optim.sgd(0.1), optimizer=None, step=9)
    assert state.step == 9 and torch.equal(fs.io.to_state_dict(state)["w"], LEAVES["w"])
    fs.io.save_dcp(state, tmp_path / "alone", None, model="", rename=[("(.)", r"net.\1")])
    assert set(read_metadata(tmp_path / "alone").tensors) == {"net.w", "net.b"}
    again = fs.io.load_dcp(tmp_path / "alone", placed(), OPT, model="", optimizer=None, rename=[(r"net\.(.)", r"\1")])
    assert torch.equal(fs.io.to_state_dict(again)["b"], LEAVES["b"])


def test_names_of_a_job_reach_its_settings(tmp_path: Path) -> None:
    rules: Any = [("(.)", r"net.\1")]
    fs.io.save_dcp(fs.init_state(placed(), OPT, params=LEAVES), tmp_path / "dcp", OPT, rename=rules)
    found = read_metadata(tmp_path / "dcp")
    assert {"optim.state.net.w.exp_avg", "optim.state.net.w.step", "model.net.w"} <= set(found.tensors)
    where = found.others["optim.param_groups.0.params"]
    text = (tmp_path / "dcp" / where.file).read_bytes()[where.begin : where.begin + where.length]
    assert torch.load(io.BytesIO(text), weights_only=True) == ["net.w", "net.b"]
    assert fs.io.load_dcp(tmp_path / "dcp", placed(), OPT, rename=[(r"net\.(.)", r"\1")]).step == 0
    with pytest.raises(TreeError, match="cannot transpose"):
        turned = [fs.io.Rename("w", "w", transpose=True)]
        fs.io.save_dcp(fs.init_state(placed(), OPT, params=LEAVES), tmp_path / "other", OPT, rename=turned)


def test_a_checkpoint_that_is_there_stays(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    state = fs.init_state(placed(), OPT, params={name: leaf + 1 for name, leaf in LEAVES.items()})
    with pytest.raises(CheckpointError, match="holds a checkpoint already.*overwrite=True"):
        fs.io.save_dcp(state, folder, OPT)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "__7_0.distcp").write_bytes(b"of a larger job")
    fs.io.save_dcp(state, folder, OPT, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", FILE]
    assert torch.equal(fs.io.to_state_dict(fs.io.load_dcp(folder, placed(), OPT))["w"], LEAVES["w"] + 1)


def refused(folder: str) -> str:
    """On a rank: what becomes of a folder that cannot be written to."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        try:
            fs.io.save_dcp(fs.init_state(placed(mesh), OPT, params=LEAVES), folder, OPT)
        except CheckpointError as error:
            return str(error)
        return "nothing"


def test_all_ranks_learn_that_a_folder_cannot_be_written(pool: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = pool(2).run(refused, str(tmp_path / "file"))
    assert first == second and "cannot write to" in first
