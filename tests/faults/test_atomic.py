"""A step is atomic: whatever fails in it, wherever, on one rank or all, nothing of it is left on any rank."""

import signal
import time
from contextlib import contextmanager
from typing import Any

import pytest

import fshard as fs
from tests.faults.program import KINDS, PHASES, Fault, batch, differing, make_loss, snapshot, start
from tests.shared.workers import Pools

pytestmark = pytest.mark.processes

TIMEOUT = 25.0
"""Seconds that ranks wait for each other. Nobody has to."""

STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("", {}),
    "clipped microbatches": ("", {"accumulate": 2, "clip_norm": 0.01}),
    "remat": ("", {"remat": "all"}),
    "fx": ("", {"compile": "fx"}),
    "kept state": ("mean", {"donate": False}),
    "on demand": ("look", {}),
    "collectives": ("talk", {}),
    "collectives, on one reduction": ("talk", {"schedule": fs.Policy(prefetch=0, reduces=1, reshard=False)}),
}


@contextmanager
def interruptible() -> Any:
    """Ctrl-C raises here, as it does in a program; the ranks of a pool ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def failing(styles: list[str], faults: list[tuple[str, str, str]], gloo: bool, sizes: tuple[int, ...]) -> list[str]:
    """On a rank: steps with faults among them; what is not as in a run without."""
    out: list[str] = []
    names = ("replica", "shard")[-len(sizes) :]
    with interruptible(), fs.make_mesh(sizes, names, timeout=TIMEOUT, shared_memory=not gloo) as mesh:
        for style in styles:
            kind, options = STYLES[style]
            plan, opt, state = start(mesh)
            want, _, good = start(mesh)[2], None, fs.make_train_step(make_loss(Fault(), kind), opt, plan, **options)
            fault = Fault()
            step = fs.make_train_step(make_loss(fault, kind), opt, plan, **options)
            for number, (phase, error, where) in enumerate(faults):
                before = snapshot(state)
                if where == "all" or int(where) == mesh.rank:
                    fault.phase, fault.kind = phase, error
                    own = True
                else:
                    own = False
                began = time.monotonic()
                try:
                    step(state, batch(1000 + number, mesh.rank))
                    text = "nothing"
                except BaseException as caught:
                    text = f"{type(caught).__name__}: {caught}"
                told = f"{style}: {error} at {phase} on {where}: rank {mesh.rank}"
                fault.phase = ""
                expected = text.startswith(error) if own else text.startswith("PeerError") and f": {error}" in text
                out += [f"{told} raised {text}"] * (not expected)
                out += [f"{told} took {time.monotonic() - began:.1f} s"] * (time.monotonic() - began > TIMEOUT)
                out += [f"{told} changed {name}" for name in differing(before, snapshot(state))]
                state, metrics = step(state, batch(number, mesh.rank))
                want, expect = good(want, batch(number, mesh.rank))
                out += [f"{told}: another loss"] * (metrics.loss.item() != expect.loss.item())
                out += [f"{told} left {name}" for name in differing(snapshot(want), snapshot(state))]
                if out:
                    return out
    return out


def _cases(phases: Any, kinds: Any, where: Any) -> list[tuple[str, str, str]]:
    """Every phase, with kinds and ranks in turn."""
    return [(p, kinds[i % len(kinds)], where[(i // 2) % len(where)]) for i, p in enumerate(phases)]


FEW = _cases(PHASES, list(KINDS), ["1", "0", "all"])
ALL = [(phase, kind, where) for phase in PHASES for kind in KINDS for where in ("0", "1", "all")]
IN_GRAPHS = ("forward first", "forward middle", "forward last")  # which run no Python of a unit


def _faults(style: str, faults: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return [fault for fault in faults if style != "fx" or fault[0] not in IN_GRAPHS]


FAST = ("plain", "fx", "on demand", "collectives")
"""What `make test` tries; all of them are tried at every phase among the slow tests."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("style", FAST)
def test_a_step_that_fails_leaves_nothing(pool: Pools, style: str) -> None:
    assert pool(2).run(failing, [style], _faults(style, FEW), False, (-1,)) == [[]] * 2


def test_over_gloo(pool: Pools, style: str = "collectives") -> None:
    assert pool(2).run(failing, [style], _faults(style, FEW)[::3], True, (-1,)) == [[]] * 2


def test_with_replicas(pool: Pools) -> None:
    assert pool(4).run(failing, ["plain", "collectives"], FEW[1::3], False, (2, 2)) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("gloo", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_every_fault_at_every_phase(pool: Pools, style: str, gloo: bool) -> None:
    assert pool(2).run(failing, [style], _faults(style, ALL), gloo, (-1,), timeout=170.0) == [[]] * 2
