"""Headers and manifests that were crafted, or made by a fuzzer: clean errors, and nothing else."""

import contextlib
import copy
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard.checkpoint.manifest import parse
from fshard.checkpoint.tensorfile import read_header
from fshard.errors import CheckpointError, DamagedError, ShardError
from fshard.reading.files import File, damaged
from tests.checkpoint.test_damaged import NAME, OPT, make_plan, save, seal


def header(**rows: Any) -> bytes:
    """A safetensors file of 64 bytes of data with this header."""
    text = json.dumps(rows).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


def row(dtype: Any, shape: Any, *offsets: Any) -> dict[str, Any]:
    """A row of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


FILES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "does not fit its 0 bytes"),
    "oversized header": (struct.pack("<Q", 1 << 62) + bytes(100), "header of 4611686018427387904 bytes does not fit"),
    "header over the limit": (struct.pack("<Q", 200_000_000) + bytes(100), "does not fit its 108 bytes"),
    "overlap": (header(a=row("F32", [16], 0, 64), b=row("F32", [4], 16, 32)), "overlaps"),
    "gap": (header(a=row("F32", [4], 0, 16), b=row("F32", [4], 48, 64)), "leaves a gap"),
    "short": (header(a=row("F32", [4], 0, 16)), "end at byte"),
    "behind the end": (header(a=row("F32", [1 << 20], 0, 1 << 22)), "end at byte"),
    "huge": (header(a=row("F32", [1 << 60, 1 << 60], 0, 64)), "shape"),
    "negative": (header(a=row("F32", [-4, -4], 0, 64)), "shape"),
    "wrong size": (header(a=row("F32", [8], 0, 64)), r"F32\[8\] takes 32 bytes, and has 64"),
    "object": (header(a=row("object", [8], 0, 64)), "dtype 'object'"),
    "backwards": (header(a=row("F32", [16], 64, 0)), "takes 64 bytes"),
    "no offsets": (header(a={"dtype": "F32", "shape": [16]}), "not an object of"),
    "metadata": (header(__metadata__={"a": 1}), "__metadata__"),
    "a list": (struct.pack("<Q", 2) + b"[]", "is a list"),
    "floats": (header(a=row("F32", [16.0], 0, 64)), "shape"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_crafted_header_is_refused(tmp_path: Path, name: str) -> None:
    data, says = FILES[name]
    with pytest.raises(DamagedError, match=says) as caught:
        parsed("x/file.safetensors", data)
    assert "x/file.safetensors" in str(caught.value)


def parsed(path: str, data: bytes) -> Any:
    """The header of a file."""
    with open(os.memfd_create("header"), "wb") as file:
        file.write(data)
        file.flush()
        return read_header(File(path, file.fileno(), len(data), damaged))


FUZZ = int(os.environ.get("FSHARD_FUZZ", "60"))
"""Cases of each fuzzer; set it higher to search longer."""
SMALL = st.integers(-2, 70) | st.integers(-(2**70), 2**70)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | SMALL
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["F32", "BF16", NAME, "../x", "a"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
GOOD = safetensors.torch.save(
    {"a": torch.zeros(4, 2), "b": torch.zeros(8, dtype=torch.bfloat16), "c": torch.zeros(0, 3)}
)


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a value of JSON."""
    items = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else [])
    return [(node, key) for key, _ in items] + [place for _, value in items for place in places(value)]


def mutate(draw: st.DrawFn, body: Any) -> Any:
    """A value of JSON with a few of its parts changed, removed or doubled."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        node, key = draw(st.sampled_from(places(body)))
        how = draw(st.sampled_from(["set", "near", "drop", "again"]))
        value = (
            node[key] if isinstance(node, dict) and key in node or isinstance(node, list) and key < len(node) else None
        )
        if how == "near" and isinstance(value, int):
            node[key] = value + draw(st.sampled_from([-64, -8, -1, 1, 8, 64]))
        elif how == "drop" and len(node) > 1 and value is not None:
            del node[key]
        elif how == "again" and isinstance(node, list):
            node.append(copy.deepcopy(value))
        else:
            node[key] = draw(JSON)
        if not places(body):
            break
    return body


@pytest.mark.long
@given(st.data())
@settings(max_examples=FUZZ, deadline=None, suppress_health_check=list(HealthCheck))
def test_fuzzed_headers_give_clean_errors(data: st.DataObject) -> None:
    length = struct.unpack("<Q", GOOD[:8])[0]
    if data.draw(st.booleans()):
        text = json.dumps(mutate(data.draw, json.loads(GOOD[8 : 8 + length]))).encode()
        file = struct.pack("<Q", len(text)) + text + GOOD[8 + length :]
    else:
        file = bytearray(GOOD)
        for at in data.draw(st.lists(st.integers(0, len(GOOD) - 1), max_size=4)):
            file[at] = data.draw(st.integers(0, 255))
        file = bytes(file[: data.draw(st.integers(0, len(GOOD)) | st.just(len(GOOD)))])
    try:
        tensors = parsed("file", file)
    except DamagedError:
        return
    held = safetensors.torch.load(file)  # what is read here, the safetensors library takes
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == {k: s.shape for k, s in tensors.items()}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose manifest is changed over and over."""
    return save(tmp_path_factory.mktemp("fuzz"), 7)


@given(st.data())
@settings(max_examples=FUZZ, deadline=None, suppress_health_check=list(HealthCheck))
def test_fuzzed_manifests_give_clean_errors(once: Path, data: st.DataObject) -> None:
    good = fuzzable(once)
    if data.draw(st.integers(0, 3)):
        text = seal(mutate(data.draw, json.loads(good)))
    else:
        raw = bytearray(good)
        for at in data.draw(st.lists(st.integers(0, len(good) - 1), min_size=1, max_size=4)):
            raw[at] = data.draw(st.integers(0, 255))
        text = bytes(raw)
    try:
        (once / "manifest.json").write_bytes(text)
        with contextlib.suppress(CheckpointError):
            manifest = parse("manifest", text)
            assert parse("manifest", manifest.dump()) == manifest
        with contextlib.suppress(ShardError):
            fs.Checkpointer(once.parent).restore(make_plan(), OPT)
    finally:
        (once / "manifest.json").write_bytes(good)


def fuzzable(folder: Path) -> bytes:
    """The good manifest."""
    return (folder / "manifest.json").read_bytes()
