"""Every peer of ``benchmarks/gpu.py`` is built on the CPU and trains as plain PyTorch does, before a card meets it."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu.ladder import played

FOLDER = Path(__file__).parents[2] / "benchmarks"
RANKS = ("hsdp", "hosts")
"""Words of peers that need several ranks."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of the peers: FSDP1 says that one rank shards nothing
STEPS = 5
"""A captured step is replayed from the fourth on."""


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The scripts, which are no package."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        names = ("peers", "gpu_peers", "model", "gpu", "gpu_worker", "silent")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(FOLDER))
        for name in {name for name in set(sys.modules) - before if (FOLDER / f"{name}.py").exists()}:
            del sys.modules[name]


@pytest.fixture
def alone(bench: Any) -> Iterator[None]:
    """A group of one rank, and captures that the CPU plays."""
    with bench.peers.process_group(), played():
        yield


def kind_of(bench: Any, name: str) -> str:
    """What a peer needs to be built on a CPU, or who else meets it."""
    words = name.split()
    if any(word in words for word in RANKS):
        return "ranks"
    if "inductor" in words:
        return "inductor"
    if any(word in words for word in ("compiled", "titan")):
        return "dynamo"
    met = {peer for case in bench.gpu.CASES for peer in bench.gpu.parts_of(case)[1:]} | {*bench.gpu_peers.FORMS}
    return "plain" if name.removesuffix(" bf16") in met else "of others"


def check(bench: Any, *kinds: str) -> None:
    """All peers of some kinds train as plain PyTorch does, from equal weights."""
    size = bench.gpu_worker.DRY
    for name in [name for name in bench.gpu_peers.PEERS if kind_of(bench, name) in kinds]:
        base = "eager clip" if "clip" in name.split() else "eager"
        peer = bench.gpu_peers.PEERS[name](bench.model.make(size))
        pair = {base: bench.gpu_peers.PEERS[base](bench.model.make(size)), name: peer}
        bench.peers.check_agreement(pair, size, STEPS)
        assert getattr(peer, "ran", "replayed") == "replayed", (name, peer.ran)


@pytest.mark.long
@pytest.mark.usefixtures("alone")
def test_every_peer_trains_alike(bench: Any) -> None:
    check(bench, "plain")


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_every_peer_that_dynamo_traces_trains_alike(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **more: real(fn, backend="eager"))
    check(bench, "dynamo", "of others")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("alone")
def test_every_peer_that_inductor_compiles_trains_alike(bench: Any) -> None:
    if why := bench.peers.compiler_works():
        pytest.skip(why)
    check(bench, "inductor")


def test_every_case_has_its_peers_in_every_dtype(bench: Any) -> None:
    met = {peer for case in bench.gpu.CASES for peer in bench.gpu.parts_of(case)[1:]} - {"jax"}
    forms = {bench.gpu_worker.form(peer, dtype) for peer in met for dtype in bench.gpu_worker.DTYPES}
    assert forms <= set(bench.gpu_peers.PEERS), forms - set(bench.gpu_peers.PEERS)
