"""The format of checkpoints, without processes: any layout to any other bit for bit, and files that others can read."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.checkpoint import ranges
from fshard.checkpoint.folder import read_manifest, step_folder
from fshard.checkpoint.manifest import parse
from fshard.checkpoint.ranges import Slice
from fshard.checkpoint.read import plan_reads
from fshard.checkpoint.tensorfile import read_header
from fshard.checkpoint.write import owned, packed
from fshard.reading.files import open_file
from fshard.sharding.layout import Piece
from fshard.state.entries import entries
from tests.checkpoint.played import restore_all, save_all, states, taken, values, whole_params

OPT = fs.optim.adamw(0.1)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...]) -> Piece:
    """A piece of a tensor of this shape."""
    low = [draw(st.integers(0, n)) for n in shape]
    sizes = [draw(st.integers(0, n - a)) for n, a in zip(shape, low, strict=True)]
    count = math.prod(sizes)
    start = draw(st.integers(0, count))
    return Piece(tuple(low), tuple(sizes), start, draw(st.integers(start, count)))


@st.composite
def two_pieces(draw: st.DrawFn) -> tuple[tuple[int, ...], Piece, Piece]:
    """Two pieces of one tensor."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    return shape, draw(pieces(shape)), draw(pieces(shape))


def elements(whole: Tensor, piece: Piece) -> Tensor:
    """The elements of a piece."""
    box = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]
    return box.reshape(-1)[piece.start : piece.stop]


@given(two_pieces())
def test_a_transfer_copies_what_two_pieces_share(case: tuple[tuple[int, ...], Piece, Piece]) -> None:
    shape, one, other = case
    whole = torch.arange(math.prod(shape)).view(shape)
    mine, theirs = elements(whole, one), elements(whole, other)
    target = torch.full_like(mine, -1)
    ranges.copy_shared(target, one, theirs.clone(), other)
    expected = torch.where(torch.isin(mine, theirs), mine, -1)
    assert torch.equal(target, expected)
    found = ranges.shared_range(other, one)
    held = [i for i, x in enumerate(theirs.tolist()) if x in set(mine.tolist())]
    assert found == ((other.start + held[0], other.start + held[-1] + 1) if held else None)
    covered = [x for block in ranges.blocks(one) for x in range(block.at, block.at + block.numel)]
    assert covered == list(range(one.numel)) and len(ranges.blocks(one)) <= 2 * len(shape) + 1


SPECS = [P(), fs.fsdp("data"), P("tensor", flat="data"), P(None, "tensor", flat="data"), P("data"), P("tensor")]
SPECS += [P(None, "data"), fs.Rule(".*", P("data", "tensor"), P("data", "tensor")), P(None, "tensor")]
SIZES = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (4, 2)]


def rules_for(draw: st.DrawFn, shapes: dict[str, Any], sizes: tuple[int, int]) -> list[Any]:
    """A rule for each leaf that can be on a mesh of these sizes."""
    mesh = fs.abstract_mesh(sizes, ("data", "tensor"))
    out: list[Any] = []
    for path, (shape, _) in shapes.items():
        for spec in draw(st.permutations(SPECS)):
            rule = fs.Rule(path, spec.at_rest, spec.compute) if isinstance(spec, fs.Rule) else fs.Rule(path, spec)
            try:
                fs.make_plan({path: torch.zeros(shape)}, mesh, [rule], batch=P("data"))
            except fs.errors.PlanError:
                continue
            out.append(rule)
            break
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], Any, Any, Any, Any]:
    """Leaves, and two layouts of them."""
    leaf = st.tuples(
        st.lists(st.integers(0, 9).map(lambda n: n if n % 2 else 2 * n), max_size=3), st.sampled_from(DTYPES)
    )
    leaves = draw(st.lists(leaf, min_size=1, max_size=4))
    shapes = {f"leaf{i}": leaf for i, leaf in enumerate(leaves)}
    one, other = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    return shapes, one, rules_for(draw, shapes, one), other, rules_for(draw, shapes, other)


@pytest.mark.long
@given(cases(), st.sampled_from([64, 1000, 1 << 29]))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_layout_becomes_any_other(tmp_path_factory: Any, case: Any, limit: int) -> None:
    shapes, sizes, rules, other_sizes, other_rules = case
    root = tmp_path_factory.mktemp("run")
    params = whole_params(shapes)
    ranks = states(params, rules, sizes, OPT)
    manifest = save_all(root, ranks, limit)
    assert manifest == parse("manifest", manifest.dump())
    written = sum(e.piece.numel * t.dtype.itemsize for t in manifest.tensors.values() for e in t.extents)
    assert written == sum(t.nbytes for t in manifest.tensors.values())  # replicas once
    others = [state.plan for state in states(params, other_rules, other_sizes, OPT)]
    for state in restore_all(root, others, OPT):
        assert (state.step, state.seed) == (0, 3)
        for entry in entries(state):
            whole = values(entry.name, entry.shape, entry.dtype)
            assert torch.equal(entry.tensor, taken(whole, entry)), entry.name
    for name in manifest.files:  # the safetensors library reads what was written
        for key, tensor in safetensors.torch.load_file(Path(step_folder(str(root), 0)) / name).items():
            assert tensor.dtype == manifest.tensors[key].dtype and tensor.dim() == 1


LEAVES: dict[str, Any] = {"big": ((512, 512), torch.float32), "b": ((512,), torch.float32), "s": ((), torch.float32)}


def test_bytes_are_balanced_over_ranks(tmp_path: Path) -> None:
    for rules in ([(".*", P())], [(".*", fs.fsdp("data"))], [("big", P("tensor")), (".*", P())]):
        ranks = states(whole_params(LEAVES), rules, (4, 2), OPT)
        loads = [sum(s.nbytes for s in owned(entries(state), rank)) for rank, state in enumerate(ranks)]
        assert max(loads) - min(loads) < 0.02 * max(loads), loads


def test_a_rank_reads_only_what_it_needs(tmp_path: Path) -> None:
    leaves: dict[str, Any] = {f"w{i}": ((1024, 512), torch.float32) for i in range(8)}
    params = whole_params(leaves)
    manifest = save_all(str(tmp_path), states(params, [(".*", fs.fsdp("data"))], (2, 1), OPT))
    plan = states(params, [(".*", fs.fsdp("data"))], (8, 1), OPT)[3]
    wants = [Slice(e.name, e.piece, e.tensor) for e in entries(plan)]
    jobs = plan_reads(manifest, wants)
    needed = sum(want.data.numel() * 4 for want in wants)
    read = sum(job.end - job.begin for job in jobs)
    spans = [(job.file, job.begin) for job in jobs]
    assert needed <= read <= needed + 2 * len(leaves) * (1 << 20) < manifest.nbytes / 2
    assert len(set(spans)) == len(spans)


def test_files_have_a_bounded_size() -> None:
    data = torch.arange(1000.0)
    slices = [Slice("a", Piece((0,), (1000,), 0, 1000), data), Slice("b", Piece((5,), (40,), 3, 33), data[:30])]
    files = list(packed(slices, 1024))
    assert all(sum(s.nbytes for s in part) <= 1024 for part in files)
    assert [s.piece.numel for part in files for s in part] == [256, 256, 256, 232, 16, 14]
    assert torch.equal(torch.cat([s.data for part in files for s in part if s.name == "a"]), data)
    assert all(len({s.name for s in part}) == len(part) for part in files)


def test_a_manifest_is_json_that_people_can_read(tmp_path: Path) -> None:
    params = whole_params(LEAVES)
    user = {"data": {"epoch": 2, "at": [3, 4]}, "metadata": {"note": "snö"}, "schedule": "ab" * 32}
    save_all(str(tmp_path), states(params, [(".*", fs.fsdp("data"))], (2, 1), OPT), user=user)
    folder = step_folder(str(tmp_path), 0)
    text = json.loads((Path(folder) / "manifest.json").read_text())
    assert text["format"] == "fshard-checkpoint" and text["version"] == 1 and text["mesh"] == {"data": 2, "tensor": 1}
    assert text["tensors"]["params.big"]["shape"] == [512, 512]
    assert text["tensors"]["params.big"]["spec"] == "P(flat='data')"
    assert text["scalars"] == {"step": 0, "seed": 3} and text["versions"]["torch"] == torch.__version__
    manifest = read_manifest(folder)
    assert (manifest.data, manifest.metadata, manifest.schedule) == tuple(user.values())
    assert manifest.seal == text["sha256"]


def test_the_safetensors_library_is_read(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6).view(2, 3), "a": torch.zeros(3, dtype=torch.bfloat16), "e": torch.zeros(0, 4)}
    text = safetensors.torch.save(tensors, {"note": "x"})
    (tmp_path / "file").write_bytes(text)
    with open_file(str(tmp_path), "file") as file:
        found = read_header(file)
    assert {name: (s.dtype, s.shape) for name, s in found.items()} == {
        name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()
    }
    assert torch.frombuffer(bytearray(text[found["b"].begin : found["b"].end]), dtype=torch.int64).tolist() == [
        *range(6)
    ]


@pytest.mark.parametrize("cast", [False, True])
def test_other_precision(tmp_path: Path, cast: bool) -> None:
    params = whole_params(LEAVES)
    save_all(str(tmp_path), states(params, [(".*", fs.fsdp("data"))], (2, 1), OPT))
    half = whole_params({path: (shape, torch.bfloat16) for path, (shape, _) in LEAVES.items()})
    plans = [state.plan for state in states(half, [("big", P("tensor", flat="data")), (".*", P())], (3, 2), OPT)]
    if not cast:
        with pytest.raises(fs.errors.TreeError, match=r"9 mismatched.*\n.*other dtype  params.big  BF16\[512, 512\]"):
            restore_all(str(tmp_path), plans, OPT)
        return
    for state in restore_all(str(tmp_path), plans, OPT, cast=True):
        for entry in entries(state):
            whole = values(entry.name, entry.shape, torch.float32).bfloat16()
            assert entry.dtype == torch.bfloat16 and torch.equal(entry.tensor, taken(whole, entry))


MUON = fs.optim.partition([(r"big|a.w", fs.optim.muon(0.1)), (".*", fs.optim.adamw(0.1))])


@pytest.mark.parametrize(
    ("opt", "align"),
    [(fs.optim.adafactor(0.1), "leaf"), (fs.optim.adamw8bit(0.1), 256), (MUON, "leaf")],
    ids=["adafactor", "adamw8bit", "muon"],
)
def test_states_that_are_not_of_the_shape_of_a_leaf(tmp_path: Path, opt: Any, align: Any) -> None:
    shapes = {"a.w": (40, 24), "a.b": (24,), "c": (), "big": (130, 70)}
    params = whole_params({path: (shape, torch.float32) for path, shape in shapes.items()})
    rules = [fs.Rule(".*", fs.fsdp("data"), align=align)]
    for number, (one, other) in enumerate([((2, 1), (3, 1)), ((4, 1), (1, 1)), ((3, 2), (2, 1))]):
        save_all(str(tmp_path / str(number)), states(params, rules, one, opt))
        expected = states(params, rules, other, opt)
        found = restore_all(str(tmp_path / str(number)), [state.plan for state in expected], opt)
        for state, want in zip(found, expected, strict=True):
            for a, b in zip(entries(state), entries(want), strict=True):
                assert a.name == b.name and torch.equal(a.tensor, b.tensor), a.name
