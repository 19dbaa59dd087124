"""A rank that fails before the first collective of its program: no other rank waits, be it a process or virtual.

The communicator of a program's collectives is made when the first of them is called. A rank that has failed by then
makes none.
"""

import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor

import fshard as fs
from fshard.errors import CommError, PeerError
from tests.shared.workers import Pools

TIMEOUT = 20.0
"""Seconds that ranks wait for each other. Nobody has to."""

POINTS = ("function", "loss")
"""Where a rank fails: in the code around the parts, or in a loss function, before its ``psum``."""


def make_step(plan: fs.Plan, opt: Any, armed: list[str], known: bool) -> Any:
    """A step function of one loss with a ``psum``, run part by part unless its schedule is ``known``."""
    mesh = plan.mesh

    def hit(point: str, x: Tensor) -> None:
        if point in armed and not isinstance(x, FakeTensor):  # the trace goes well
            armed.clear()
            raise ValueError(f"injected in the {point}")

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        hit("loss", x)
        y = x @ params["w"]
        return (y - fs.collectives.pmean(y.detach().mean(), "shard", mesh=mesh)).square().mean()

    value_and_grad, update = fs.value_and_grad(loss_fn, plan), fs.make_update(opt, plan)

    def fn(state: Any, x: Tensor) -> Any:
        hit("function", x)
        if not known and x.isnan().any():  # no trace finds what comes after a look at a value
            raise ValueError("nan in the batch")
        x = x - fs.collectives.pmean(x.mean(), "shard", mesh=mesh)
        loss, grads = value_and_grad(state, x)
        return update(state, grads)[0], {"loss": loss}

    return fs.make_step(fn, plan)


def losses(mesh: fs.Mesh, point: str, rank: int, known: bool) -> list[str]:
    """On a rank: what is wrong with a first step that fails on one rank, and with the steps after it."""
    opt, whole = fs.optim.sgd(0.1), {"w": torch.arange(8.0).view(4, 2)}
    plan = fs.make_plan(whole, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    out, armed = list[str](), [point] if mesh.rank == rank else []
    began = time.monotonic()
    try:
        got = _told(mesh, plan, opt, whole, armed, known, first_fails=ValueError if armed else PeerError)
    except CommError as error:
        return [f"{point} on {rank}: the mesh is lost: {error}"]
    if (seconds := time.monotonic() - began) > TIMEOUT / 2:
        out.append(f"{point} on {rank}: somebody waited {seconds:.0f} s")
    if not got[0].startswith("True"):
        out.append(f"{point} on {rank}: the first step raised {got[0]}")
    want = _told(mesh, plan, opt, whole, [], known)  # now that the communicators are made
    if got[1:] != want:
        out.append(f"{point} on {rank}: then {got[1:]} in place of {want}")
    return out


def _told(
    mesh: fs.Mesh,
    plan: fs.Plan,
    opt: Any,
    whole: Any,
    armed: list[str],
    known: bool,
    first_fails: type[Exception] | None = None,
) -> list[str]:
    """What the first step raised, if it is to fail, and the losses of two steps after it."""
    state, step, told = fs.init_state(plan, opt, params=whole), make_step(plan, opt, armed, known), list[str]()
    x = torch.linspace(0, 1, 4).repeat(2, 1) + mesh.rank
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*run one by one")
        if first_fails is not None:
            try:
                step(state, x)
                told.append("nothing")
            except Exception as error:
                told.append(f"{isinstance(error, first_fails) and 'injected' in str(error)} {error!r}")
        for _ in range(2):
            state, metrics = step(state, x)
            told.append(f"{float(metrics['loss']):.7f}")
    return told


def on_processes(cases: list[tuple[str, int]], known: bool, gloo: bool) -> list[str]:
    """On a rank: every case, each on a mesh of its own, whose communicators are new."""
    out = []
    for point, rank in cases:
        with fs.make_mesh((-1,), ("shard",), timeout=TIMEOUT, shared_memory=not gloo) as mesh:
            out += losses(mesh, point, rank, known)
    return out


@pytest.mark.parametrize("gloo", [False, True])
@pytest.mark.parametrize("known", [False, True], ids=["asking", "known"])
def test_no_process_waits_for_one_that_has_failed(pool: Pools, known: bool, gloo: bool) -> None:
    cases = [(point, rank) for point in POINTS for rank in range(2)]
    problems = [line for lines in pool(2).run(on_processes, cases, known, gloo, timeout=170.0) for line in lines]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("known", [False, True], ids=["asking", "known"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_no_virtual_rank_waits_for_one_that_has_failed(point: str, rank: int, known: bool) -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))
    problems = [line for lines in mesh.run(lambda: losses(mesh, point, rank, known)) for line in lines]
    assert not problems, "\n".join(problems)
