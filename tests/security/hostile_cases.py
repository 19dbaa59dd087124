"""Hostile files, by number: each is made from good folders of fshard, safetensors and DCP by a seeded generator.

Bytes are flipped, cut and put in; sizes, offsets, counts, shapes, dtypes and names take other values; JSON nests, has
keys twice and long numbers; pickles get opcodes; files become huge and empty, links, pipes, sockets and devices.
"""

import copy
import dataclasses
import io
import json
import os
import pickle
import random
import socket
import struct
import zipfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import fshard as fs
from fshard.checkpoint.folder import read_manifest
from fshard.checkpoint.manifest import FileInfo
from fshard.checkpoint.read import verify_step
from fshard.checkpoint.rewrite import load_tensor
from fshard.interchange.convert import to_state
from fshard.interchange.hf_files import INDEX, SINGLE
from tests.checkpoint.test_crafted import places
from tests.checkpoint.test_damaged import seal

OPT = fs.optim.adamw(1e-3)
LEAVES = {"w": torch.arange(24.0).view(4, 6), "b": torch.arange(5.0), "n": torch.arange(3, dtype=torch.bfloat16)}
STEP, MANIFEST = "step-00000003", "manifest.json"
Files = dict[str, bytes]

HUGE = [0, 1, -1, 2**31, 2**32 - 1, 2**40, 2**53 + 1, 2**60, 2**61 - 1, 2**62, 2**63, 2**64, 10**30, 1e308, -0.5]
WORDS = ["", "\0", "../x", "/dev/zero", "a/b", "\ud800", "\x1b[2J", "x" * 5000, "F32", "BF16", "w", "object", ".", ".."]
ODD = [None, True, [], {}, [[]], {"": {}}, *HUGE, *WORDS]


@dataclass(frozen=True)
class Case:
    """One hostile folder: what was done to make it, where it is, and what is tried with it."""

    kind: str
    how: str
    path: Path
    attempts: tuple[Callable[[], Any], ...]


def plan() -> fs.Plan:
    """Where the leaves are to live."""
    return fs.make_plan(LEAVES, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])


def good(root: Path) -> dict[str, Files]:
    """Good folders, as bytes by the names of their files."""
    state = fs.init_state(plan(), OPT, params=LEAVES)
    state = dataclasses.replace(state, step=3)
    with fs.Checkpointer(root / "native") as ckpt:
        ckpt.save(state, data={"position": [1, 2.5, "x"]})
    fs.io.save_hf(state, root / "hf")
    fs.io.save_hf(state, root / "index", max_shard_size=100)
    fs.io.save_dcp(state, root / "dcp", OPT)
    folders = {"native": root / "native" / STEP, **{kind: root / kind for kind in ("hf", "index", "dcp")}}
    return {kind: {p.name: p.read_bytes() for p in path.iterdir()} for kind, path in folders.items()}


def make(number: int, seed: int, made: dict[str, Files], root: Path) -> Case:
    """The case of a number, written to an empty folder."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.choice(["native", "native", "hf", "index", "dcp", "dcp"])
    files = dict(made[kind])
    how = draw.choice([*STRUCTURE[kind], *STRUCTURE[kind], *ANY])
    path = root / STEP if kind == "native" else root
    path.mkdir(parents=True, exist_ok=True)
    after = how(draw, files)
    for name, data in files.items():
        (path / name).write_bytes(data)
    if after is not None:
        after(path)
    return Case(kind, how.__name__, path, tuple(attempts(kind, root, path)))


def attempts(kind: str, root: Path, path: Path) -> list[Callable[[], Any]]:
    """What reads such a folder."""
    if kind == "native":

        def tensors() -> Any:
            manifest = read_manifest(str(path))
            return [load_tensor(str(path), manifest, name).sum() for name in manifest.tensors]

        return [lambda: fs.Checkpointer(root).restore(plan(), OPT), lambda: verify_step(str(path)), tensors]
    mesh = fs.make_mesh((1,), ("shard",))
    if kind == "dcp":
        return [lambda: fs.io.load_dcp(path, plan(), OPT), lambda: to_state(str(path), "dcp", mesh)]
    return [lambda: fs.io.load_hf(path, plan(), OPT), lambda: to_state(str(path), "hf", mesh)]


def pick(draw: random.Random, files: Files) -> str:
    """A file, those that describe others more often."""
    return draw.choice([*files, *(name for name in files if name in (MANIFEST, INDEX, ".metadata"))])


# Anything can happen to any file.


def flipped(draw: random.Random, files: Files) -> None:
    """Some bytes are others."""
    name = pick(draw, files)
    data = bytearray(files[name])
    for _ in range(draw.choice([1, 1, 3, 30])):
        data[draw.randrange(min(len(data), draw.choice([64, 1 << 20])))] = draw.randrange(256)
    files[name] = bytes(data)


def spliced(draw: random.Random, files: Files) -> None:
    """A range is gone, twice there, zero, or that of another file; numbers in it are extreme."""
    name = pick(draw, files)
    data = files[name]
    a, b = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    extreme = struct.pack(
        draw.choice("<>") + "Q", draw.choice([n for n in HUGE if isinstance(n, int) and 0 <= n < 2**64])
    )
    put = draw.choice([b"", data[a:b] * 2, bytes(b - a), draw.choice(list(files.values()))[:500], extreme, b"[" * 5000])
    files[name] = data[:a] + put + data[b if draw.random() < 0.7 else a :]


def cut(draw: random.Random, files: Files) -> None:
    """A file ends early."""
    name = pick(draw, files)
    files[name] = files[name][: draw.choice([0, 1, 8, draw.randrange(len(files[name]))])]


def sparse(draw: random.Random, files: Files) -> Callable[[Path], None]:
    """A file claims to be huge and holds next to nothing."""
    name, size = pick(draw, files), draw.choice([1 << 20, 90 << 20, 1 << 30, 1 << 34, 1 << 40])
    if draw.random() < 0.5 and name.endswith(".safetensors"):
        files[name] = struct.pack("<Q", min(size - 8, draw.choice([90_000_000, size]))) + files[name][8:]
    return lambda path: os.truncate(path / name, size)


def special(draw: random.Random, files: Files) -> Callable[[Path], None]:
    """A name means something that is no plain file of its own."""
    name = pick(draw, files)
    kind = draw.choice(
        ["fifo", "socket", "folder", "loop", "dangling", "/dev/zero", "/dev/full", "/dev/tty", "/proc/kmsg"]
    )
    through = draw.random() < 0.5

    def spoil(path: Path) -> None:
        (path / name).unlink()
        at = path / "aside" if through else path / name
        if kind == "fifo":
            os.mkfifo(at)
        elif kind == "socket":
            with closing(socket.socket(socket.AF_UNIX)) as end:
                end.bind(str(at))
        elif kind == "folder":
            at.mkdir()
        else:
            at.symlink_to({"loop": at.name, "dangling": "nowhere"}.get(kind, kind))
        if through:
            (path / name).symlink_to(at.name)

    return spoil


ANY = [flipped, spliced, cut, sparse, special]


# JSON: manifests, headers and indices.


def mutated(draw: random.Random, body: Any) -> Any:
    """A value of JSON of which some parts are others."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice([1, 1, 2, 4])):
        found = places(body)
        if not found:
            break
        node, key = draw.choice(found)
        old, how = node[key], draw.random()
        if how < 0.25 and isinstance(old, int):
            node[key] = old + draw.choice([-64, -8, -1, 1, 8, 64, 4096, 2**40])
        elif how < 0.35:
            del node[key]
        elif how < 0.5 and isinstance(node, list):
            node.extend([copy.deepcopy(old)] * draw.choice([1, 2, 50]))
        elif how < 0.6 and isinstance(node, dict):
            node[draw.choice([str(word) for word in WORDS])] = node.pop(key)
        else:
            node[key] = copy.deepcopy(draw.choice(ODD))
    return body


def text_of(draw: random.Random, body: Any) -> bytes:
    """JSON text, now and then of a kind that no writer makes."""
    text = json.dumps(body).encode()
    return draw.choice([text, text, text, text[:-1] + draw.choice(TAILS)()])


TAILS: list[Callable[[], bytes]] = [
    lambda: b',"deep":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    lambda: b',"deep":' + b'{"":' * 150 + b"1" + b"}" * 151,
    lambda: b"".join(b',"k%d":0' % n for n in range(100_000)) + b',"k9":0}',
    lambda: b',"many":[' + b"[]," * 600_000 + b"0]}",
    lambda: b',"many":[' + b'{"":0},' * 300_000 + b"0]}",
    lambda: b',"many":[' + b"0," * 800_000 + b"0]}",
    lambda: b',"long":' + b"9" * 1_000_000 + b"}",
    lambda: b',"long":1.' + b"9" * 1_000_000 + b"}",
    lambda: b',"text":"' + b"\\u0000" * 300_000 + b'"}',
    lambda: b',"nan":NaN,"more":-Infinity}',
    lambda: b',"a":1,"a":2}',
    lambda: b',"a":"' + b"\\" * 99_999 + b'"}',
    lambda: b" " * 2_000_000 + b"}",
]


def header(draw: random.Random, files: Files) -> None:
    """Another header before the data of safetensors."""
    name = draw.choice([name for name in files if name.endswith(".safetensors")])
    data = files[name]
    length = struct.unpack("<Q", data[:8])[0]
    text = text_of(draw, mutated(draw, json.loads(data[8 : 8 + length])))
    said = draw.choice([len(text), len(text), len(text), len(text) + 8, 2**40, 2**63])
    files[name] = struct.pack("<Q", said) + text + data[8 + length :]


def index(draw: random.Random, files: Files) -> None:
    """Another index."""
    files[INDEX] = text_of(draw, mutated(draw, json.loads(files[INDEX])))


def manifest(draw: random.Random, files: Files) -> None:
    """Another manifest, mostly with a right seal."""
    body = mutated(draw, json.loads(files[MANIFEST]))
    if isinstance(body, dict) and draw.random() < 0.8:
        files[MANIFEST] = seal(body)
        return
    files[MANIFEST] = text_of(draw, body)


def claims(draw: random.Random, files: Files) -> Callable[[Path], None]:
    """A manifest that is right in itself, of a file that claims to hold far more than there is."""
    body = json.loads(files[MANIFEST])
    size, chunk = draw.choice([1 << 26, 1 << 30]), draw.choice([1 << 20, 1 << 24, 1 << 30])
    name = next(iter(body["files"]))
    zeros = "30e14955ebf1352266dc2ff8067e68104607e750abb9d3b36582b8af909fcb58"  # SHA-256 of a MiB of zeros
    info = FileInfo(size, (zeros,) * -(-size // chunk), chunk)
    body["files"][name] = {"size": size, "chunk": chunk, "sha256": info.sha256, "chunks": list(info.chunks)}
    count = size // 2 // 4
    row = {"dtype": "F32", "shape": [count], "spec": "P()", "extents": [[name, size // 2, [0], [count], 0, count]]}
    body["tensors"]["params.b"] = row
    files[MANIFEST] = seal(body)
    return (lambda path: os.truncate(path / name, size)) if draw.random() < 0.5 else (lambda path: None)


def header_of_holes(draw: random.Random, files: Files) -> Callable[[Path], None]:
    """A right header of tensors that lie in holes."""
    count = draw.choice([1 << 24, 1 << 28, 1 << 40])
    text = json.dumps({"w": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
    files.clear()
    files[SINGLE] = struct.pack("<Q", len(text)) + text
    return lambda path: os.truncate(path / SINGLE, 8 + len(text) + count)


# DCP: its list of chunks, and the archive of each chunk.


def metadata(draw: random.Random, files: Files) -> None:
    """Other values where the list of chunks has names, sizes and places."""
    found = pickle.loads(files[".metadata"])
    listed, places_ = found.state_dict_metadata, found.storage_data
    for _ in range(draw.choice([1, 1, 3])):
        what = listed[draw.choice(["model.w", "model.b", "model.n", "optim.state.w.exp_avg"])]
        where = places_[draw.choice(list(places_))]
        odd, field = (
            draw.choice(ODD),
            draw.choice(["offset", "length", "relative_path", "where", "name", "again", "top"]),
        )
        extreme = torch.Size([draw.choice([n for n in HUGE if isinstance(n, int)]) % 2**63])
        if field in ("offset", "length", "relative_path"):
            setattr(where, field, odd if draw.random() < 0.6 else draw.choice(WORDS))
        elif field == "where":
            places_[draw.choice(list(places_))] = draw.choice([odd, where])
        elif field == "name":
            listed[draw.choice([*listed, *WORDS])] = draw.choice([odd, what])
        elif field == "again":
            what.chunks = [*what.chunks, *what.chunks * 3]
        elif field == "top" and draw.random() < 0.3:
            setattr(found, draw.choice(["state_dict_metadata", "storage_data", "planner_data"]), odd)
            break
        else:
            setattr(what, draw.choice(["size", "chunks", "properties"]), draw.choice([odd, extreme]))
            break
        if not all(isinstance(place, _StorageInfo) for place in places_.values()) or odd in listed.values():
            break
    files[".metadata"] = pickle.dumps(found, protocol=draw.choice([2, 4, 5]))


def crowded(draw: random.Random, files: Files) -> None:
    """Many chunks in one row, or at offsets whose tuples have one hash."""
    found, prime = pickle.loads(files[".metadata"]), 2**61 - 1
    place = next(iter(found.storage_data.values()))
    if draw.random() < 0.5:
        count, offsets = 4000, [(0, n) for n in range(4000)]
    else:
        count, offsets = 0, [tuple(prime * (n >> d & 1) for d in range(11)) for n in range(2048)]
    what = found.state_dict_metadata["model.w"]
    what.size = torch.Size([1, count]) if count else torch.Size([2**62 - 1] * 11)
    what.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size([1] * len(o))) for o in offsets]
    if draw.random() < 0.3:
        what.chunks[-1] = what.chunks[0]
    for offset in offsets:
        where = _StorageInfo(place.relative_path, place.offset, place.length)
        found.storage_data[MetadataIndex("model.w", torch.Size(offset))] = where
    files[".metadata"] = pickle.dumps(found)


def program(draw: random.Random) -> bytes:
    """Opcodes that a pickle of tensors has no use for, or has in excess."""
    wild = bytes(draw.randrange(256) for _ in range(draw.choice([1, 5, 40])))
    return draw.choice(
        [
            lambda: b"Nr" + struct.pack("<I", draw.choice([2**31 - 1, 2**32 - 1])) + b"0",  # memo of gigabytes
            lambda: b"j" + struct.pack("<I", 2**32 - 1),
            lambda: b"\x95" + struct.pack("<Q", 2**62),
            lambda: draw.choice([b"\x8e", b"\x8d", b"\x96"]) + struct.pack("<Q", 2**40),
            lambda: b"\x8b" + struct.pack("<i", 2**31 - 1),
            lambda: b"\x8a\xff" + b"\xff" * 255,
            lambda: b")" + b"\x94h\x00h\x00\x86" * 60,
            lambda: b"N\x94" + b"".join(b"h%c\x85\x94" % n for n in range(200)),
            lambda: b"K\x01" + b"".join(b"q%ch%ch%c\x86" % (n, n, n) for n in range(200)),  # tuples that share parts
            lambda: b"]q\x07h\x07a" + b"h\x07h\x07\x86" * 50,  # a list that contains itself
            lambda: b"}" * draw.choice([10, 10, 200_000]),
            lambda: b"]" * draw.choice([10, 10, 200_000]),
            lambda: b"(" * draw.choice([10, 10, 200_000]),
            lambda: b"N2" * draw.choice([10, 10, 200_000]),
            lambda: b"cos\nsystem\nX\x02\x00\x00\x00id\x85R",
            lambda: b"ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb",  # sets attributes of what a name gave
            lambda: b"ctorch.serialization\n_get_layout\n}X\x08\x00\x00\x00__code__Nsb",
            lambda: b"cpathlib\nPosixPath\n)\x81}X\x04\x00\x00\x00_rawNsb",
            lambda: b"ctorch\nSize\n(J\xff\xff\xff\xff" + b"K\x01" * 1000 + b"t\x85R",
            lambda: b"P1\n" + b"Q",
            lambda: wild,
        ]
    )()


def opcodes(draw: random.Random, files: Files) -> None:
    """A program before, inside of, or in place of the list of chunks."""
    data, extra = files[".metadata"], program(draw)
    at = draw.choice([2, 11, draw.randrange(len(data)), len(data) - 1])
    files[".metadata"] = draw.choice([data[:at] + extra + data[at:], b"\x80\x04" + extra + b"."])


def archive(draw: random.Random, files: Files) -> None:
    """Another archive for a chunk: compressed, inflated, of other members, or with another pickle."""
    found = pickle.loads(files[".metadata"])
    key = draw.choice([key for key in found.storage_data if key.offset is not None])
    place, buffer, how = found.storage_data[key], io.BytesIO(), draw.randrange(5)
    data = files[place.relative_path]
    old = zipfile.ZipFile(io.BytesIO(data[place.offset : place.offset + place.length]))
    members = {name: old.read(name) for name in old.namelist()}
    pkl = next(name for name in members if name.endswith("data.pkl"))
    if how == 0:
        members[draw.choice(list(members))] = bytes(draw.choice([1 << 20, 30 << 20]))
    elif how == 1:
        at = draw.randrange(len(members[pkl]))
        members[pkl] = members[pkl][:at] + program(draw) + members[pkl][at:]
    elif how == 2:
        members |= {f"archive/{n}": b"" for n in range(draw.choice([3, 3000]))}
    elif how == 3:
        members.pop(draw.choice(list(members)))
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if how in (0, 4) else zipfile.ZIP_STORED) as new:
        for name, text in members.items():
            new.writestr(name, text)
    text = bytearray(buffer.getvalue())
    if draw.random() < 0.3:
        for _ in range(3):
            text[draw.randrange(max(0, len(text) - 400), len(text))] = draw.choice([0, 255, draw.randrange(256)])
    place.offset, place.length = len(data), len(text)
    files[place.relative_path] = data + bytes(text)
    files[".metadata"] = pickle.dumps(found)


STRUCTURE: dict[str, list[Any]] = {
    "native": [manifest, manifest, manifest, header, claims],
    "hf": [header, header, header_of_holes],
    "index": [index, index, header],
    "dcp": [*[metadata] * 6, *[opcodes] * 6, *[archive] * 3, crowded],
}
