"""Folders of torch.distributed.checkpoint from strangers: pickles that are read and not run, archives, chunks."""

import ast
import dataclasses
import io
import itertools
import math
import pickle
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

import fshard as fs
from fshard.checkpoint.ranges import Block
from fshard.errors import DamagedError
from fshard.interchange.metadata import filled, read_metadata
from fshard.interchange.pickles import CallRecord, GlobalName, read_pickle
from fshard.interchange.source import read_box
from fshard.reading.files import folder_at, plain_file
from tests.security.hostile_cases import LEAVES, OPT, plan
from tests.security.test_security import ROOT, Folders, load, within


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """A good folder."""
    state = fs.init_state(plan(), OPT, params=LEAVES)
    state = dataclasses.replace(state, step=3)
    fs.io.save_dcp(state, tmp_path / "dcp", OPT)
    return {"dcp": tmp_path / "dcp"}


# Pickles.


def anything(name: GlobalName) -> bool:
    """Every name is known."""
    return bool(name)


def put(folder: Path, program: bytes) -> None:
    """Another list of chunks."""
    (folder / ".metadata").write_bytes(b"\x80\x04" + program)


def test_a_memo_of_gigabytes_is_not_made(folders: Folders) -> None:
    for index in (b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff"):
        put(folders["dcp"], b"Nr" + index + b".")
        with within(10, 64 << 20), pytest.raises(DamagedError, match="holds a NoneType, not the Metadata"):
            read_metadata(folders["dcp"])


def test_tuples_that_share_their_parts_are_never_printed_or_walked(folders: Folders) -> None:
    good, shared = (folders["dcp"] / ".metadata").read_bytes(), (1,)
    for _ in range(200):
        shared = (shared, shared)  # type: ignore[assignment]
    for field in (
        "size",
        "chunks",
        "properties",
        "listed",
        "offset",
        "length",
        "relative_path",
        "transform_descriptors",
    ):
        found = pickle.loads(good)
        if field == "listed":
            found.state_dict_metadata["model.w"] = shared
        else:
            of = found.state_dict_metadata["model.w"]
            of = of if hasattr(of, field) else next(iter(found.storage_data.values()))
            setattr(of, field, shared)
        (folders["dcp"] / ".metadata").write_bytes(pickle.dumps(found))
        with within(10, 64 << 20), pytest.raises(DamagedError) as caught:
            read_metadata(folders["dcp"])
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("name", ["torch\nSize", "torch.serialization\n_get_layout", "pathlib\nPosixPath"])
def test_a_state_is_given_to_nothing_that_a_name_gave(folders: Folders, name: str) -> None:
    put(folders["dcp"], b"c" + name.encode() + b"\n}X\x06\x00\x00\x00harmedK\x01sb.")
    with pytest.raises(DamagedError, match="is for a value that cannot have one"):
        read_metadata(folders["dcp"])
    source = (ROOT / "fshard" / "interchange" / "pickles.py").read_text()
    assert not {"getattr", "setattr", "__import__", "import_module", "eval", "exec"} & {
        node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)
    }


OPCODES: dict[str, tuple[bytes, str]] = {
    "containers": (b"}" * 300_000, "makes more containers"),
    "marks": (b"(" * 300_000, "makes more containers"),
    "duplicates": (b"N2.", "is the opcode b'2'"),
    "bytes that are not there": (b"\x8e" + struct.pack("<Q", 2**40), "is the opcode"),
    "text that is not there": (b"\x8d" + struct.pack("<Q", 2**40), "ends before byte"),
    "a long number": (b"\x8a\xff" + b"\xff" * 255 + b".", "a number of 255 bytes"),
    "a longer number": (b"\x8b\xff\xff\xff\x7f", "is the opcode"),
    "a frame": (b"\x95" + struct.pack("<Q", 2**62), "longer than the rest of the text"),
    "a key that can collide": (b"}K\x01K\x02s.", "not a string, or there twice"),
    "a call of a string": (b"X\x01\x00\x00\x00x)R.", "is of no name"),
    "more behind it": (b"N.N.", "ends at byte"),
    "an empty stack": (b"0.", "is the opcode"),
    "nothing to append": (b"Na.", "finds nothing on the stack"),
}


@pytest.mark.parametrize("name", OPCODES)
def test_opcodes_that_no_tensor_needs_are_refused(name: str) -> None:
    program, says = OPCODES[name]
    with within(10, 64 << 20), pytest.raises(ValueError, match=says):
        read_pickle(b"\x80\x04" + program, anything)


def test_opcodes_that_run_or_look_up_are_not_known() -> None:
    known = (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID)
    for code in (*known, pickle.NEXT_BUFFER, pickle.BYTEARRAY8, pickle.BINBYTES8, pickle.LONG4):
        with pytest.raises(ValueError, match="is the opcode"):
            read_pickle(b"\x80\x04" + code, anything)
    for program in (b"ccopyreg\n_reconstructor\n(tR.", b"cbuiltins\nlist\n)\x81."):  # a call, and a class
        assert isinstance(read_pickle(b"\x80\x04" + program, anything), CallRecord)


def test_pickles_are_read_as_python_reads_them() -> None:
    values = [
        None,
        True,
        -3,
        2**70,
        0.5,
        "\N{GREEK SMALL LETTER MU}" * 300,
        (1, (), [2, {"a": "b"}]),
        {"k": [1] * 2000},
    ]
    for protocol, value in itertools.product((2, 3, 4, 5), values):
        assert read_pickle(pickle.dumps(value, protocol), anything) == value
    made = read_pickle(pickle.dumps(MetadataIndex("w", [0, 2], 5)), anything)
    assert isinstance(made, CallRecord) and made.of.name == "MetadataIndex" and made.get("fqn") == "w"


def test_a_compressed_chunk_is_not_inflated(folders: Folders) -> None:
    found = pickle.loads((folders["dcp"] / ".metadata").read_bytes())
    place = found.storage_data[MetadataIndex("model.w", torch.Size([0, 0]))]
    path = folders["dcp"] / place.relative_path
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("archive/data.pkl", "archive/data/0"):
            archive.writestr(name, bytes(50 << 20))
    place.offset, place.length = path.stat().st_size, len(buffer.getvalue())
    path.write_bytes(path.read_bytes() + buffer.getvalue())
    (folders["dcp"] / ".metadata").write_bytes(pickle.dumps(found))
    with within(10, 32 << 20), pytest.raises(DamagedError, match="'data.pkl' in it is compressed"):
        load("dcp", folders["dcp"])


def test_a_number_of_updates_that_is_none_is_refused(folders: Folders) -> None:
    found = pickle.loads((folders["dcp"] / ".metadata").read_bytes())
    place = found.storage_data[MetadataIndex("optim.state.w.step", torch.Size([]))]
    path = folders["dcp"] / place.relative_path
    data = path.read_bytes()
    at = data.index(struct.pack("<f", 3.0), place.offset)
    for bad in (math.nan, math.inf, -1.0, 0.5, 1e30):
        path.write_bytes(data[:at] + struct.pack("<f", bad) + data[at + 4 :])
        with pytest.raises(DamagedError, match="not a number of updates"):
            load("dcp", folders["dcp"])


# Chunks that fill a tensor, and boxes of files.


def test_chunks_fill_a_tensor_or_do_not() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(1, 4)))
        cuts = [sorted({0, n, *(draw.randrange(n) for _ in range(2))}) for n in shape]
        spans = [list(itertools.pairwise(cut)) for cut in cuts]
        parts = [Block(tuple(a for a, _ in at), tuple(b - a for a, b in at), 0) for at in itertools.product(*spans)]
        assert filled(shape, parts)
        moved = draw.randrange(len(parts))
        old = parts[moved]
        offset = tuple(draw.randrange(n - s + 1) for n, s in zip(shape, old.shape, strict=True))
        assert filled(shape, [*parts[:moved], Block(offset, old.shape, 0), *parts[moved + 1 :]]) == (
            offset == old.offset
        )
        assert not filled(shape, parts[:-1]) and not filled(shape, [*parts, parts[0]])


def test_many_chunks_are_compared_in_linear_time() -> None:
    row = [Block((0, n), (1, 1), 0) for n in range(20_000)]
    with within(10):
        assert filled((1, 20_000), row) and not filled((1, 20_000), [*row[:-1], row[0]])


def test_boxes_of_files_are_slices_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fshard.interchange.source.SLAB", 64)
    draw = random.Random(0)
    for number in range(200):
        shape = tuple(draw.randrange(1, 9) for _ in range(draw.randrange(0, 4)))
        whole = torch.arange(math.prod(shape), dtype=torch.int16).view(shape)
        (tmp_path / "file").write_bytes(b"x" * 7 + bytes(whole.view(-1).view(torch.uint8).tolist()))
        offset = tuple(draw.randrange(n) for n in shape)
        sizes = tuple(draw.randrange(n - o + 1) for n, o in zip(shape, offset, strict=True))
        out = torch.full(sizes, -1, dtype=torch.int16 if number % 2 else torch.float32)
        out = out if number % 3 else torch.full((*sizes, 2), -1, dtype=torch.float64)[..., 0]
        with folder_at(str(tmp_path)) as at, plain_file(str(tmp_path), "file", at) as file:
            read_box(file, 7, shape, offset, out, torch.int16)
        want = whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))]
        assert torch.equal(out.to(torch.int16), want)
