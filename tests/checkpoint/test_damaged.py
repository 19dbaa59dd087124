"""Checkpoints that were damaged, edited or crafted: each is refused by a clean error, and nothing on disk changes."""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.checkpoint.manifest import FileInfo
from fshard.checkpoint.read import verify_step
from fshard.errors import CheckpointError, CheckpointWarning, DamagedError, ShardError
from tests.checkpoint.played import values, whole_params

OPT = fs.optim.sgd(0.1, momentum=0.9)
LEAVES: dict[str, Any] = {"a.w": ((40, 8), torch.float32), "a.b": ((8,), torch.float32), "c": ((), torch.float32)}
NAME = "rank-00000-000.safetensors"
Change = Callable[[dict[str, Any]], None]


def make_plan() -> fs.Plan:
    """On one rank."""
    return fs.make_plan(whole_params(LEAVES), fs.make_mesh((-1,), ("shard",)), [(".*", fs.fsdp("shard"))])


def save(root: Path, *steps: int) -> Path:
    """Save these steps; the folder of the last."""
    state = fs.init_state(make_plan(), OPT, params=whole_params(LEAVES))
    with fs.Checkpointer(root, keep=None) as ckpt:
        for step in steps:
            ckpt.save(dataclasses.replace(state, step=step))
    return root / f"step-{steps[-1]:08d}"


def seal(body: dict[str, Any]) -> bytes:
    """A manifest whose own SHA-256 is right, whatever it says."""
    body = {key: value for key, value in body.items() if key != "sha256"}
    text = json.dumps(body, separators=(",", ":")).encode()
    return json.dumps({**body, "sha256": hashlib.sha256(text).hexdigest()}, separators=(",", ":")).encode()


def edit(folder: Path, change: Change) -> None:
    """Change a manifest as an attacker would: with a right seal."""
    path = folder / "manifest.json"
    body = json.loads(path.read_bytes())
    change(body)
    path.write_bytes(seal(body))


def flip(path: Path, at: int) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def crafted(folder: Path, data: bytes) -> None:
    """Other bytes as the file of tensors, with right hashes in the manifest."""
    size = (folder / NAME).stat().st_size
    data = data.ljust(size, b"\0")
    (folder / NAME).write_bytes(data)
    info = FileInfo(
        len(data), tuple(hashlib.sha256(data[i : i + (1 << 20)]).hexdigest() for i in range(0, len(data), 1 << 20))
    )

    def change(body: dict[str, Any]) -> None:
        body["files"] = {
            NAME: {"size": info.size, "chunk": info.chunk, "sha256": info.sha256, "chunks": [*info.chunks]}
        }

    edit(folder, change)


class Evil:
    """What a pickle can do."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.flag),)


def linked(path: Path) -> None:
    """The same thing behind a symbolic link."""
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def extents(body: dict[str, Any], name: str = "params.a.w") -> list[Any]:
    """A tensor's extents."""
    return body["tensors"][name]["extents"]  # type: ignore[no-any-return]


def slipped(name: str) -> Change:
    """The file under another name, which leads somewhere else."""

    def change(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop(NAME)
        for tensor in body["tensors"].values():
            for extent in tensor["extents"]:
                extent[0] = name

    return change


def put(value: Any, *keys: Any) -> Change:
    """A value somewhere in the manifest."""

    def change(body: dict[str, Any]) -> None:
        node: Any = body
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value

    return change


def shape_of(shape: list[int]) -> Change:
    """A tensor that says it is larger than its extents."""

    def change(body: dict[str, Any]) -> None:
        body["tensors"]["params.a.w"]["shape"] = shape
        extents(body)[0][3] = shape
        extents(body)[0][2] = [0] * len(shape)

    return change


def shared_bytes(body: dict[str, Any]) -> None:
    """Two leaves that claim one extent of a file."""
    extents(body, "params.a.b")[0][1] = extents(body)[0][1]


def backwards(body: dict[str, Any]) -> None:
    """Extents of which one ends before it begins, so that signed counts of their elements come out right."""
    (whole,) = extents(body)
    extents(body)[:] = [[*whole[:4], *bounds] for bounds in ((0, 200), (200, 100), (100, 320))]


def twice(body: dict[str, Any]) -> None:
    """Elements that two extents claim, elsewhere in the file."""
    first = extents(body)[0]
    extents(body)[:] = [[*first[:5], 100], [first[0], first[1] + 480, *first[2:4], 60, first[5]]]


def half(body: dict[str, Any]) -> None:
    """The first of two boxes."""
    extents(body)[0][3:] = [[20, 8], 0, 160]


EDITS: dict[str, tuple[Change, str]] = {
    "slip up": (slipped("../../" + NAME), "not a plain file name"),
    "absolute": (slipped("/etc/passwd"), "not a plain file name"),
    "slip down": (slipped("sub/" + NAME), "not a plain file name"),
    "nul": (slipped("rank\0.safetensors"), "not a plain file name"),
    "a leaf in no file": (put("other.safetensors", "tensors", "params.c", "extents", 0, 0), "not among the files"),
    "behind the end": (put(1 << 20, "tensors", "params.c", "extents", 0, 1), "bytes 1048576 to 1048580 of a file"),
    "unaligned": (put(1281, "tensors", "params.c", "extents", 0, 1), "bytes 1281 to 1285"),
    "negative": (put(-4, "tensors", "params.c", "extents", 0, 1), r"extents\[0\]: not \[file"),
    "shared bytes": (shared_bytes, f"both claim byte .* of {NAME}"),
    "an extent that ends before it begins": (backwards, "elements 100 to 200 of the box .* claimed twice"),
    "shared elements": (twice, "elements 60 to 100 of the box .* claimed twice"),
    "missing elements": (put(319, "tensors", "params.a.w", "extents", 0, 5), "end at element 319 of the 320"),
    "huge shape": (shape_of([1 << 30, 1 << 30]), "element 320 of the 1152921504606846976"),
    "huger shape": (shape_of([1 << 40, 1 << 40]), "shape"),
    "many dims": (shape_of([1] * 70 + [320]), "shape"),
    "boxes": (put([40, 7], "tensors", "params.a.w", "extents", 0, 3), "do not divide"),
    "between boxes": (put([1, 0], "tensors", "params.a.w", "extents", 0, 2), r"at \[1, 0\] is not one of the boxes"),
    "half of the boxes": (half, "1 of its 2 boxes are there"),
    "no dtype": (put("object", "tensors", "params.a.w", "dtype"), "dtype 'object', which is none of"),
    "no extents": (put([], "tensors", "params.a.w", "extents"), "no extents for its 320 elements"),
    "huge file": (put(1 << 50, "files", NAME, "size"), "1125899906842624 bytes need 1073741824 SHA-256"),
    "tiny chunks": (put(1, "files", NAME, "chunk"), "in chunks of 1"),
    "other hash": (put("0" * 64, "files", NAME, "chunks", 0), "its SHA-256 is not that of its chunks"),
    "other root": (put("0" * 64, "files", NAME, "sha256"), "its SHA-256 is not that of its chunks"),
    "another step": (put(8, "step"), "step: 8, and 7 among the scalars"),
    "no seed": (lambda body: body["scalars"].pop("seed") and None, "scalars .* make no state: KeyError"),
    "a word for a seed": (put("x", "scalars", "seed"), "scalars .* make no state: ValueError"),
    "a list of seeds": (put([1], "scalars", "seed"), "scalars: {"),
    "unknown key": (put(1, "exec"), "'exec': unknown"),
    "no object": (put([], "tensors"), r"tensors: \[\]"),
    "version 0": (put(0, "version"), "version is 0"),
    "scalars gone": (put({}, "scalars"), "scalars"),
}

DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit": (lambda folder: flip(folder / NAME, 900), "bytes 0 to .* have the SHA-256"),
    "a bit of the header": (lambda folder: flip(folder / NAME, 30), "bytes 0 to .* have the SHA-256"),
    "cut short": (lambda folder: os.truncate(folder / NAME, 1000), "a plain file of 1000 bytes, and the manifest says"),
    "empty": (lambda folder: os.truncate(folder / NAME, 0), "a plain file of 0 bytes"),
    "longer": (lambda folder: os.truncate(folder / NAME, 1 << 20), "a plain file of 1048576 bytes"),
    "a file gone": (lambda folder: (folder / NAME).unlink(), f"{NAME} is damaged.*\n.*it is missing"),
    "a folder for a file": (lambda folder: ((folder / NAME).unlink(), (folder / NAME).mkdir())[1], "not a plain file"),
    "a pipe for a file": (lambda folder: ((folder / NAME).unlink(), os.mkfifo(folder / NAME))[1], "not a plain file"),
    "a link for a file": (lambda folder: linked(folder / NAME), "symbolic link"),
    "a link for the manifest": (lambda folder: linked(folder / "manifest.json"), "symbolic link"),
    "a link for the step": (lambda folder: linked(folder), "symbolic link"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is damaged.*\n.*missing"),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 500), "it is not JSON"),
    "a bit of the manifest": (lambda folder: flip(folder / "manifest.json", 60), "not JSON|SHA-256|unknown|format"),
    "a huge manifest": (lambda folder: os.truncate(folder / "manifest.json", 1 << 40), "a manifest has at most"),
    "a key twice": (
        lambda folder: (
            (folder / "manifest.json").write_bytes(b'{"format":"fshard-checkpoint","step":1,"step":2}') and None
        ),
        "the key 'step' occurs twice",
    ),
    "deep": (lambda folder: (folder / "manifest.json").write_bytes(b"[" * 200_000) and None, "nested too deeply"),
    "nan": (lambda folder: (folder / "manifest.json").write_bytes(b'{"a": NaN}') and None, "NaN is not a number"),
    "infinite": (
        lambda folder: (folder / "manifest.json").write_bytes(b'{"a": 1e999}') and None,
        "1e999 is not a number",
    ),
    "digits": (lambda folder: (folder / "manifest.json").write_bytes(b"1" * 10_000) and None, "not JSON"),
    "edited": (lambda folder: by_hand(folder), "it was changed after writing"),
}


def by_hand(folder: Path) -> None:
    """An edit without a new seal."""
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"seed":0', '"seed":1'))


def tree_of(root: Path) -> dict[str, Any]:
    """What is on disk, without the contents of pipes and of sparse files."""
    out: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        small = path.is_file() and not path.is_symlink() and status.st_size < 1 << 30
        out[str(path)] = (status.st_mode, status.st_size, path.read_bytes() if small else None)
    return out


def refused(root: Path, says: str, kind: type[Exception] = CheckpointError) -> None:
    """Restoring step 7 raises; step 5 is taken if asked for; nothing on disk changes."""
    before = tree_of(root)
    ckpt = fs.Checkpointer(root)
    with pytest.raises(kind) as caught:
        ckpt.restore(make_plan(), OPT)
    assert re.search(says, str(caught.value)) and str(root) in str(caught.value), caught.value
    if isinstance(caught.value, DamagedError):
        assert "fallback=True" in str(caught.value)
        with pytest.warns(CheckpointWarning, match="step 7 was skipped"):
            state = ckpt.restore(make_plan(), OPT, fallback=True)
        assert state.step == 5 and torch.equal(
            state.params["a"]["w"].view(40, 8), values("params.a.w", (40, 8), torch.float32)
        )
        assert ckpt.restored is not None and re.search(says, ckpt.restored.skipped[0])
    assert tree_of(root) == before


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    change, says = DAMAGE[name]
    change(save(tmp_path, 5, 7))
    refused(tmp_path, says, DamagedError)


@pytest.mark.parametrize("name", EDITS)
def test_a_crafted_manifest_is_refused(tmp_path: Path, name: str) -> None:
    change, says = EDITS[name]
    edit(save(tmp_path, 5, 7), change)
    refused(tmp_path, says, DamagedError)


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    edit(save(tmp_path, 5, 7), put(4, "version"))
    refused(tmp_path, "has format 4, and this fshard reads formats up to 3: update fshard")


def test_a_leaf_of_another_dtype_does_not_fit(tmp_path: Path) -> None:
    edit(save(tmp_path, 5, 7), put("F16", "tensors", "params.a.w", "dtype"))
    refused(tmp_path, "1 mismatched", ShardError)


@pytest.mark.parametrize("form", ["pickle", "zip", "torch"])
def test_no_file_can_run_code(tmp_path: Path, form: str) -> None:
    flag, buffer = tmp_path / "flag", io.BytesIO()
    if form == "pickle":
        buffer.write(pickle.dumps(Evil(flag)))
    elif form == "torch":
        torch.save(Evil(flag), buffer)
    else:
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("../../flag", b"slipped")
    root = tmp_path / "run"
    folder = save(root, 5, 7)
    (folder / "manifest.json").write_bytes(buffer.getvalue())
    refused(root, "it is not (JSON|text)", DamagedError)
    root = tmp_path / "other"
    folder = save(root, 9)
    crafted(folder, buffer.getvalue())  # bytes are bytes: they are read as numbers, and as nothing else
    with contextlib.suppress(DamagedError):
        fs.Checkpointer(root).restore(make_plan(), OPT)
    with pytest.raises(DamagedError, match="header"):
        verify_step(str(folder))
    assert not flag.exists()


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions count, also where the tests run as root."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_no_permission() -> None:
    with tempfile.TemporaryDirectory() as name:  # of a mode that lets others in, unlike those of pytest
        root = Path(name)
        folder = save(root, 5, 7)
        state, before = fs.init_state(make_plan(), OPT, params=whole_params(LEAVES)), tree_of(root)
        state = dataclasses.replace(state, step=9)
        for path, mode in ((root, 0o555), (root / ".lock", 0o444), (folder, 0o555), (folder / NAME, 0o000)):
            path.chmod(mode)
        with unprivileged():
            with pytest.raises(CheckpointError, match=rf"cannot write to {root}.*EACCES.*change its permissions"):
                fs.Checkpointer(root).save(state)
            with pytest.raises(CheckpointError, match=rf"cannot read {folder}.*EACCES"):
                fs.Checkpointer(root).restore(make_plan(), OPT, fallback=True)  # it is not known to be damaged
            assert fs.Checkpointer(root).restore(make_plan(), OPT, 5).step == 5
        (folder / NAME).chmod(0o644)
        root.chmod(0o000)
        with unprivileged():
            for call in (fs.Checkpointer(root).latest, lambda: fs.Checkpointer(root).restore(make_plan(), OPT)):
                with pytest.raises(CheckpointError, match=rf"cannot list {root}.*EACCES"):
                    call()
        root.chmod(0o755)
        after = tree_of(root)
        assert {path: row[1:] for path, row in after.items()} == {path: row[1:] for path, row in before.items()}
