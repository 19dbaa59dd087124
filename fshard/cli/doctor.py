"""``fshard doctor``: what this machine has for fshard, and whether two ranks can train on it."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fshard.arguments import size_text
from fshard.cli.link_tests import findings, link_tests
from fshard.launch import make_mesh
from fshard.launching.caller import launch
from fshard.model.split import split
from fshard.optim import adamw
from fshard.played.virtual import virtual_mesh
from fshard.runtime.comm.devices import available_backends
from fshard.sharding.plan import make_plan
from fshard.sharding.spec import P, fsdp
from fshard.state.init import init_state
from fshard.training.make_step import make_train_step
from fshard.version import VERSION

PACKAGES = ("torch", "optree", "numpy", "safetensors", "transformers", "matplotlib", "rich", "cloudpickle")
SMALL = 64 << 20
"""Bytes of shared memory below which ranks of one host may not find room for their groups."""

SLOW = 10.0
"""Seconds that the self-test takes at most on a machine that is free."""

Finding = tuple[str, str, str, str]
"""A section, a name, what was found, and what to do about it, if anything."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-test", action="store_true", help="leave the self-test on two ranks out")
    parser.add_argument(
        "--full",
        action="store_true",
        help="measure links and clocks, and compare versions: of two ranks here, or under torchrun of all of the job",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look, test and print; 1 if something is wrong."""
    found = [*versions(), *devices(), *links()]
    in_a_job = "RANK" in os.environ
    if not arguments.no_test and not in_a_job:
        found.append(tested())
    if arguments.full:
        found += linked(in_a_job)
    if in_a_job and os.environ["RANK"] != "0":  # rank 0 tells what all have found
        return 0
    if arguments.json:
        keys = ("section", "name", "value", "problem")
        print(json.dumps([dict(zip(keys, one, strict=True)) for one in found], indent=1))
    else:
        print("\n".join(table(found)))
    return int(any(problem for *_, problem in found))


def table(found: list[Finding]) -> Iterator[str]:
    """The lines to print."""
    wide = max(len(name) for _, name, _, _ in found)
    last = ""
    for section, name, value, problem in found:
        if section != last:
            yield f"{section}:"
            last = section
        yield f"  {name:<{wide}}  {value}"
        if problem:
            yield f"  {'':<{wide}}  ! {problem}"


def versions() -> Iterator[Finding]:
    """Of fshard, Python and the packages that fshard can use."""
    yield "versions", "fshard", VERSION, ""
    yield "versions", "Python", f"{platform.python_version()} on {platform.platform()}", ""
    for name in PACKAGES:
        value = "not installed"
        with suppress(importlib.metadata.PackageNotFoundError):
            value = importlib.metadata.version(name)
        yield "versions", name, value, ""


def devices() -> Iterator[Finding]:
    """Backends, GPUs and processors."""
    yield "devices", "backends", ", ".join(available_backends()), ""
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    yield "devices", "CUDA", ", ".join(gpus) or "none", ""
    threads = os.environ.get("OMP_NUM_THREADS")
    usable = len(os.sched_getaffinity(0))
    yield "devices", "processors", f"{usable} usable, OMP_NUM_THREADS={threads or 'unset'}", ""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or "none: compile='inductor' needs one"
    yield "devices", "C++ compiler", compiler, ""


def links() -> Iterator[Finding]:
    """Return what ranks of this host communicate over."""
    names = ", ".join(name for _, name in socket.if_nameindex())
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    unknown = f"no such interface: {chosen}" if chosen and chosen not in names.split(", ") else ""
    yield "links", "interfaces", names, unknown
    yield "links", "GLOO_SOCKET_IFNAME", chosen or "unset: gloo takes that of the host's name", ""
    name, problem = socket.gethostname(), ""
    try:
        value = f"{name}, {socket.gethostbyname(name)}"
    except OSError as error:
        value, problem = name, f"the host's name has no address ({error}): set GLOO_SOCKET_IFNAME, such as lo"
    yield "links", "host name", value, "" if chosen else problem
    yield shared_memory()


def shared_memory() -> Finding:
    """Tell whether ranks can share memory, and how much of it there is."""
    try:
        os.close(os.memfd_create("fshard-doctor"))
    except (AttributeError, OSError) as error:
        return "links", "shared memory", "not available", f"{error}: ranks of one host use gloo, which is slower"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    low = f"less than {size_text(SMALL)} of memory is free" if free < SMALL else ""
    return "links", "shared memory", f"anonymous files, {size_text(free)} of memory free", low


def tested() -> Finding:
    """Train a small model on two ranks, and compare it with one."""
    began = time.monotonic()
    try:
        there: list[Any] = launch(selftest, ranks=2, all_ranks=True)
    except Exception as error:
        return "self-test", "two ranks", "failed", f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    (here,) = virtual_mesh((1,), ("data",)).run(selftest)
    off = max(abs(one - other) for rank in there for one, other in zip(rank["losses"], here["losses"], strict=True))
    value = f"{len(here['losses'])} steps in {seconds:.1f} s, {there[0]['device']}, over {there[0]['links']}"
    problem = f"losses differ from those of one rank by {off:.2g}" if off > 1e-5 else ""
    late = f"slower than {SLOW:g} s: the machine is busy, or imports come from a slow disk" if seconds > SLOW else ""
    return "self-test", "two ranks", value + (f" ({late})" if late else ""), problem


def linked(in_a_job: bool) -> list[Finding]:
    """Measure links and clocks: of all ranks of a job, or of two that are started for it."""
    try:
        return [*findings(link_tests() if in_a_job else launch(link_tests, ranks=2))]
    except Exception as error:
        return [("links", "all ranks", "failed", f"{type(error).__name__}: {error}")]


LINKS = {"HostCommunicator": "shared memory", "GlooCommunicator": "gloo", "NcclCommunicator": "NCCL"}
"""Kinds of communicators, by their class."""


def selftest() -> dict[str, Any]:
    """On a rank: the losses of some steps, and what its messages went over."""
    with make_mesh((-1,), ("data",), timeout=30.0) as mesh:
        model = split(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), units=("0", "2"))
        plan = make_plan(model, mesh, [(".*", fsdp("data"))], batch=P("data"))
        opt = adamw(1e-2)

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            loss: Tensor = (model.apply(params, x) - x.sum(1, True)).square().mean()
            return loss

        state, step = init_state(plan, opt, seed=0), make_train_step(loss_fn, opt, plan)
        batch, losses = torch.linspace(-1, 1, 128).view(16, 8), []
        for _ in range(5):
            state, metrics = step(state, plan.local_batch(batch).to(mesh.device))
            losses.append(metrics.loss.item())
        kind = type(mesh.transport.communicator("all_gather", ("data",))).__name__
        return {"losses": losses, "device": mesh.device.type, "links": LINKS.get(kind, kind)}
