"""What docs/security.md promises of files of strangers: bounds before memory, no waits, no code, by one reader."""

import ast
import contextlib
import dataclasses
import json
import os
import random
import re
import resource
import signal
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.checkpoint.folder import LOCK, read_manifest
from fshard.checkpoint.rewrite import load_tensor
from fshard.errors import CheckpointError, DamagedError, ShardError, TreeError
from fshard.interchange.convert import to_state
from fshard.interchange.hf_files import INDEX, SINGLE
from fshard.reading.texts import DEPTH, parse_json, weigh
from tests.checkpoint.test_damaged import seal, unprivileged
from tests.security import hostile
from tests.security.hostile_cases import LEAVES, OPT, STEP, good, plan

ROOT = Path(__file__).parents[2]
Folders = dict[str, Path]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Good folders by kind."""
    good(tmp_path)
    return {"native": tmp_path / "native" / STEP, **{kind: tmp_path / kind for kind in ("hf", "index", "dcp")}}


@contextlib.contextmanager
def within(seconds: int, room: int = 256 << 20) -> Iterator[None]:
    """Bounds of time, and of memory that may be taken, whether it is used or not."""

    def late(*_: Any) -> None:
        raise AssertionError(f"it takes more than {seconds} s")

    before, old = resource.getrlimit(resource.RLIMIT_DATA), signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_DATA, (hostile.status("VmData") + room, before[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_DATA, before)


def load(kind: str, path: Path) -> Any:
    """Read a folder in the way of its kind."""
    if kind == "native":
        return fs.Checkpointer(path.parent).restore(plan(), OPT)
    return fs.io.load_dcp(path, plan(), OPT) if kind == "dcp" else fs.io.load_hf(path, plan(), OPT)


@pytest.mark.long
def test_a_share_of_the_hostile_files_is_refused_or_harmless() -> None:
    report = hostile.run(24, seed=1)
    assert not report.faults, "\n".join(report.faults)
    assert sum(report.outcomes.values()) == 24
    assert sum(count for (_, word), count in report.outcomes.items() if word == "refused") > 14


def test_two_megabytes_of_json_with_a_key_twice_are_refused_at_once() -> None:
    text = b"{" + b",".join(b'"key%d":1' % n for n in range(150_000)) + b',"key149999":2}'
    with within(10), pytest.raises(ValueError, match="'key149999' occurs twice"):
        parse_json(text)


BOUNDS: dict[str, tuple[bytes, str]] = {
    "deep": (b"[" * 100_000, f"nested too deeply.*at most {DEPTH}"),
    "deep, in spite of quotes": (b'["\\\\", "[", ' + b'{"\\"":' * 300, "nested too deeply"),
    "many lists": (b"[" + b"[]," * 900_000 + b"0]", "would take some .* bytes of memory"),
    "many objects": (b"[" + b'{"":0},' * 300_000 + b"0]", "would take some .* bytes of memory"),
    "a long number": (b"1" * 1_000_000, "is not a number"),
    "a long fraction": (b"1." + b"1" * 1_000_000, "is not a number"),
    "infinite": (b"[1e999]", "1e999 is not a number"),
    "nan": (b"[NaN]", "NaN is not a number"),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_json_beyond_its_bounds_is_not_made(name: str) -> None:
    text, says = BOUNDS[name]
    with within(10, 64 << 20), pytest.raises(ValueError, match=says):
        parse_json(text)


def test_the_weight_of_json_is_its_depth_and_no_less_than_it_takes() -> None:
    draw = random.Random(0)

    def value(depth: int) -> Any:
        if depth > 5 or draw.random() < 0.3:
            return draw.choice([1, 2.5, None, True, "a[[", '\\"{[', '"', "\\", "]}", {}, []])
        inner = [value(depth + 1) for _ in range(draw.randrange(5))]
        return inner if draw.random() < 0.5 else {draw.choice('ab"\\[{') + str(n): v for n, v in enumerate(inner)}

    def deep(node: Any) -> int:
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else None
        return 0 if inner is None else 1 + max(map(deep, inner), default=0)

    for _ in range(300):
        body = value(0)
        text = json.dumps(body).encode()
        assert weigh(text)[0] == deep(body) and parse_json(text) == body


def test_what_is_saved_can_be_read_again_or_is_refused_when_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fshard.reading.texts.SPACE", 1 << 10)
    state = fs.init_state(plan(), OPT, params=LEAVES)
    with fs.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(CheckpointError, match="too large to be read again.*pass less as data="):
            ckpt.save(state, data=[[[]]] * 6000)
        assert ckpt.steps() == []


# What is no plain file.

SPECIAL: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to a pipe": lambda path: (os.mkfifo(path.parent / "pipe"), path.symlink_to("pipe")),
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a loop": lambda path: path.symlink_to(path.name),
    "a folder": lambda path: path.mkdir(),
}
FILES = [
    ("native", "manifest.json"),
    ("native", "rank-00000-000.safetensors"),
    ("hf", SINGLE),
    ("index", INDEX),
    ("index", "model-00001-of-00002.safetensors"),
    ("dcp", ".metadata"),
    ("dcp", "__0_0.distcp"),
]


@pytest.mark.parametrize("what", SPECIAL)
def test_nothing_waits_for_what_is_no_plain_file(folders: Folders, what: str) -> None:
    for kind, name in FILES:
        path = folders[kind] / name
        data = path.read_bytes()
        path.unlink()
        SPECIAL[what](path)
        with within(10), pytest.raises(CheckpointError, match=re.escape(str(folders[kind]))):
            load(kind, folders[kind])
        path.rmdir() if what == "a folder" else path.unlink()
        (folders[kind] / "pipe").unlink(missing_ok=True)
        path.write_bytes(data)
        load(kind, folders[kind])


def test_links_of_the_hubs_cache_are_followed_to_plain_files(folders: Folders) -> None:
    folder = folders["index"]
    for path in list(folder.iterdir()):
        path.rename(folder.parent / path.name)
        path.symlink_to(Path("..") / path.name)
    assert torch.equal(fs.io.to_state_dict(load("index", folder))["w"], LEAVES["w"])


# Sizes that are claims.


def claimed(folder: Path, size: int, chunk: int) -> None:
    """A manifest that is right in itself, of a file of this size."""
    from fshard.checkpoint.manifest import FileInfo

    body = json.loads((folder / "manifest.json").read_bytes())
    name, count = next(iter(body["files"])), size // 8
    info = FileInfo(size, ("0" * 64,) * -(-size // chunk), chunk)
    body["files"][name] = {"size": size, "chunk": chunk, "sha256": info.sha256, "chunks": list(info.chunks)}
    row = {"dtype": "F32", "shape": [count], "spec": "P()", "extents": [[name, size // 2, [0], [count], 0, count]]}
    body["tensors"]["params.b"] = row
    (folder / "manifest.json").write_bytes(seal(body))


@pytest.mark.parametrize("chunk", [1 << 20, 1 << 30])
def test_a_kilobyte_that_claims_a_gigabyte_takes_none(folders: Folders, chunk: int) -> None:
    folder = folders["native"]
    claimed(folder, 1 << 31, chunk)
    for read in (
        lambda: load_tensor(str(folder), read_manifest(str(folder)), "params.b"),
        lambda: fs.Checkpointer(folder.parent).restore(plan(), OPT, rules=[(r".*", "params.b")]),
    ):
        with within(10), pytest.raises(ShardError, match=re.escape(str(folder))):
            read()


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_holes_take_no_memory(folders: Folders, kind: str, name: str) -> None:
    path = folders[kind] / name
    data = path.read_bytes()
    start = struct.pack("<Q", 90_000_000) if name.endswith(".safetensors") else data[:8]
    path.write_bytes(start + data[8:])
    os.truncate(path, 1 << 36)
    with within(10, 64 << 20):
        if name == "__0_0.distcp":  # only what the list of chunks names is read of it
            load(kind, folders[kind])
            with pytest.raises(DamagedError, match="the rest are holes"):
                to_state(str(folders[kind]), "dcp", fs.make_mesh((1,), ("shard",)))
        else:
            with pytest.raises(CheckpointError, match=re.escape(str(folders[kind]))):
                load(kind, folders[kind])


def test_a_tensor_of_holes_is_not_converted(folders: Folders) -> None:
    text = json.dumps({"w": {"dtype": "U8", "shape": [1 << 33], "data_offsets": [0, 1 << 33]}}).encode()
    path = folders["hf"] / SINGLE
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + (1 << 33))
    with within(10), pytest.raises(DamagedError, match="bytes are on disk, and the rest are holes"):
        to_state(str(folders["hf"]), "hf", fs.make_mesh((1,), ("shard",)))


# The lock, and what errors say.


def test_who_may_only_read_a_folder_cannot_hold_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fshard.checkpoint.folder.PATIENCE", 0.1)
    os.chmod(tmp_path, 0o755)
    (tmp_path / LOCK).write_text("")
    (tmp_path / LOCK).chmod(0o644)  # as older versions made it
    state = fs.init_state(plan(), OPT, params=LEAVES)
    with fs.Checkpointer(tmp_path) as ckpt:
        ckpt.save(state)
        assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600
        with (
            fs.Checkpointer(tmp_path) as other,
            pytest.raises(CheckpointError, match=rf"process {os.getpid()} of .*lslocks"),
        ):
            state = dataclasses.replace(state, step=1)
            other.save(state)
    if os.geteuid() == 0:
        with unprivileged(), pytest.raises(PermissionError):
            os.open(tmp_path / LOCK, os.O_RDONLY)


@pytest.mark.parametrize("kind", ["a hard link", "a pipe", "a link"])
def test_a_lock_that_is_something_else_is_left_alone(tmp_path: Path, kind: str) -> None:
    folder, victim = tmp_path / "runs", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    {"a hard link": lambda p: p.hardlink_to(victim), "a pipe": os.mkfifo, "a link": lambda p: p.symlink_to(victim)}[
        kind
    ](folder / LOCK)
    with within(10), pytest.raises(CheckpointError, match=LOCK):
        fs.Checkpointer(folder).save(fs.init_state(plan(), OPT, params=LEAVES))
    assert victim.read_text() == "precious"


def test_names_of_strangers_cannot_write_to_a_terminal(folders: Folders) -> None:
    name = "w\x1b[2J\n\u202ew" + "x" * 100_000
    text = json.dumps({name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (folders["hf"] / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(TreeError) as caught:
        load("hf", folders["hf"])
    told = str(caught.value)
    assert "\x1b" not in told and "\u202e" not in told and "x" * 1000 not in told and r"w\x1b[2J\n" in told


# The one reader, and the page.

OPENERS = {"open", "read_text", "read_bytes", "load", "loads", "mmap", "from_file", "safe_open", "fdopen", "Unpickler"}
OPEN = {
    ("files.py", "os.open"),  # the reader
    ("folder.py", "os.open"),  # the lock, what is written, folders that are synced
    ("folder.py", "os.fdopen"),
    ("write.py", "os.open"),  # what is written: new files alone
    ("write.py", "open"),
    ("convert.py", "open"),
    ("dcp_write.py", "open"),
    ("hf_files.py", "open"),
    ("save.py", "json.loads"),  # what was made a line before
    ("texts.py", "json.loads"),  # behind its bounds
    ("hf.py", "load"),  # of a source, which opens by the reader
    ("optimizer_state.py", "load"),
    ("texts.py", "read_text"),  # tools read whole files by the reader
    ("rank_records.py", "read_text"),
    ("rank_records.py", "read_bytes"),
    ("mapped_file.py", "unfinished.open"),  # what this rank writes: a new file
    ("mapped_file.py", "mmap.mmap"),
    ("json_lines.py", "read_text"),
    ("json_lines.py", "self.path.open"),  # what is written: a regular file, or a new one
}


def test_one_reader_opens_what_strangers_wrote() -> None:
    found = set()
    rooms = ("checkpoint", "interchange", "cli", "reading", "schedule", "tracking", "foresight", "view")
    rooms = (*rooms, "runtime/flight")
    paths = [path for room in rooms for path in (ROOT / "fshard" / room).glob("*.py")]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in OPENERS:
                found.add((path.name, ast.unparse(node.func)))
    assert found <= OPEN, found - OPEN


PROMISE = re.compile(r"`(tests/[a-z_/]+\.py)::(test_[a-z0-9_]+)`")


def test_every_promise_of_the_page_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    section = page.partition("## Promises about hostile files")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) >= 12
    for row in rows:
        named = PROMISE.findall(row)
        assert named, row
        for file, test in named:
            functions = [
                node.name
                for node in ast.walk(ast.parse((ROOT / file).read_text()))
                if isinstance(node, ast.FunctionDef)
            ]
            assert test in functions, row
    links = [
        ROOT / "README.md",
        *(ROOT / "docs" / f"{name}.md" for name in ("checkpoints", "interchange", "reliability")),
    ]
    assert all("security.md" in path.read_text() for path in links)
