"""Searching the mesh too: shapes of it, recomputation and policies, each foreseen, and the table of what was found.

Enumeration over few shapes and a cost model, as in Galvatron (Miao et al., 2023), where Alpa (Zheng et al., 2022)
solves for layouts: a table of all that was tried can be read and argued with.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fshard import markup
from fshard.arguments import Want, expect, size_text
from fshard.errors import PlanError, lines
from fshard.foresight.foresee import Hardware, Progress, model_flops, on_plan, sizes, state_bytes, task_of
from fshard.foresight.jobs import Job, job_of
from fshard.schedule.auto import Candidate, tried
from fshard.schedule.candidates import Task, candidates
from fshard.schedule.policy import Policy
from fshard.schedule.simulate import time_text
from fshard.sharding.mesh import Mesh, abstract_mesh
from fshard.training.step import TrainStep

SHOWN = 12
"""Rows that ``print`` shows."""


@dataclass(frozen=True)
class Option:
    """A mesh, what is computed again, and the best policy for them.

    Attributes:
        mesh: without processes.
        remat: as for ``fs.make_train_step``.
        policy: the fastest that fits; the one that holds least, if none does.
        peak_bytes: the most that a rank holds, state included.
        seconds: of a step.
        exposed: seconds of it in which a device waits for transfers.
        rows_per_s: rows of all ranks a second.
        mfu: operations of the model to those that the devices could do.
        fits: whether a device has as much memory.

    >>> import fshard as fs, torch
    >>> job = {"model": {"w": torch.empty(64, 64, device="meta")}, "batch": torch.empty(8, 64, device="meta")}
    >>> job["loss"] = lambda params, x: (x @ params["w"]).square().mean()
    >>> option = fs.sim.search(job, 2, fs.sim.hardware("a100", link="eth25"), remats=[None]).best
    >>> option.shape, option.fits
    ('data=2', True)
    """

    mesh: Mesh
    remat: Any
    policy: Policy
    peak_bytes: int
    seconds: float
    exposed: float
    rows_per_s: float
    mfu: float
    fits: bool

    @property
    def shape(self) -> str:
        """The mesh in words: ``replica=4,data=8``, as ``fshard plan --mesh`` takes it."""
        return shape_of(self.mesh)


@dataclass(frozen=True)
class Search:
    """What a search found. ``print`` it.

    Attributes:
        options: those that fit first, and of these the one with most rows a second first.
        refused: meshes that the plan or the program refused, and why.
        words: what the step would run on.

    >>> import fshard as fs, torch
    >>> job = {"model": {"w": torch.empty(64, 64, device="meta")}, "batch": torch.empty(8, 64, device="meta")}
    >>> job["loss"] = lambda params, x: (x @ params["w"]).square().mean()
    >>> found = fs.sim.search(job, 2, fs.sim.hardware("a100", link="eth25"), remats=[None])
    >>> print(found)
    mesh    remat ...
    """

    options: Sequence[Option]
    refused: Mapping[str, str] = field(default_factory=dict)
    words: str = ""

    @property
    def best(self) -> Option:
        """The first of all."""
        return self.options[0]

    def table(self) -> Iterator[tuple[str, ...]]:
        """A row for each option."""
        for each in self.options:
            yield (
                each.shape,
                str(each.remat or "none"),
                time_text(each.seconds),
                f"{each.exposed / each.seconds:.1%}" if each.seconds else "",
                f"{each.rows_per_s:,.1f}",
                f"{each.mfu:.1%}",
                size_text(each.peak_bytes) + ("" if each.fits else ", too much"),
                str(each.policy),
            )

    def __str__(self) -> str:
        rows = [HEAD, *self.table()][: 1 + SHOWN]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
        told = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        told += [f"and {len(self.options) - SHOWN} more"] if len(self.options) > SHOWN else []
        told += [f"{shape}: {why}" for shape, why in self.refused.items()]
        return "\n".join(told)

    def _repr_html_(self) -> str:
        return markup.shown(self.words or "a search", markup.table(HEAD, [list(row) for row in self.table()], 2))


HEAD = ("mesh", "remat", "step", "exposed", "rows/s", "MFU", "peak memory", "policy")


def search(
    job: Mapping[str, Any] | Job | Callable[[Mesh], Any],
    meshes: int | Sequence[Mesh],
    hardware: Hardware,
    remats: Sequence[Any] = (None, "all"),
    progress: Progress = lambda what, part: None,
) -> Search:
    """Foresee a training step on several meshes, with and without recomputation, under all policies.

    Args:
        job: a dict with ``model``, ``loss`` and ``batch``, as ``fshard plan`` takes it; or a function of the mesh that
            returns one, or a train step and a batch, where rules or the program depend on the mesh.
        meshes: meshes of ``fs.abstract_mesh``; or a number of ranks, for all shapes of ``shapes(ranks, hardware)``.
        hardware: what the step would run on: ``fs.sim.hardware("h100", link="ib400")``.
        remats: what is tried for ``remat=``, where the job leaves that open.
        progress: is told how far it is.

    Returns:
        The options. A step on more data ranks makes more of a batch: rows a second compare them.

    Raises:
        PlanError: no mesh, or none that the plan and the program can use.

    >>> import torch, fshard as fs
    >>> layers = {f"l{i}": {"w": torch.empty(256, 256, device="meta")} for i in range(4)}
    >>> def loss(params, x):
    ...     for layer in params.values():
    ...         x = torch.tanh(x @ layer["w"])
    ...     return x.square().mean()
    >>> job = {"model": layers, "loss": loss, "batch": torch.empty(64, 256, device="meta")}
    >>> found = fs.sim.search(job, 16, fs.sim.hardware("a100", link="eth25", per_host=8), remats=[None])
    >>> len(found.options), found.best.shape, found.best.fits
    (5, 'replica=8,data=2', True)
    """
    wants: list[Want] = [
        ("meshes", meshes, int | Sequence, "a number of ranks, or meshes of fs.abstract_mesh"),
        ("hardware", hardware, Hardware, 'fs.sim.hardware("h100")'),
    ]
    expect("search(job, meshes, hardware)", wants)
    meshes = shapes(meshes, hardware.cluster.per_host) if isinstance(meshes, int) else [*meshes]
    if not meshes:
        raise PlanError("search: no mesh is given: give a number of ranks, or fs.abstract_mesh(...) of each shape")
    options: list[Option] = []
    refused: dict[str, str] = {}
    programs = Programs(job, remats)
    for number, mesh in enumerate(meshes):
        shape = shape_of(mesh)
        progress(shape, number / len(meshes))
        try:
            for remat, step, batch, task in programs.on(mesh):
                options.append(_best(mesh, remat, step, batch, task, hardware))
        except PlanError as error:
            refused[shape] = " ".join(map(str.strip, str(error).splitlines()[:2]))
    if not options:
        problems = [f"{shape}: {why}" for shape, why in refused.items()]
        raise PlanError(lines("no mesh can be used", problems, "Give other meshes, or rules for their axes."))
    options.sort(key=lambda each: (-each.rows_per_s, each.peak_bytes) if each.fits else (0.0, each.peak_bytes))
    return Search(options, refused, hardware.words)


def shape_of(mesh: Mesh) -> str:
    """The axes of a mesh and their sizes, in words."""
    return ",".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.sizes, strict=True))


def shapes(ranks: int, per_host: int) -> list[Mesh]:
    """Meshes of so many ranks: one axis ``data``; hosts and their ranks, which both shard, so that secondary shards can
    stay on a host; and replicas of parts of whole hosts, or of parts of a host.

    >>> [mesh.sizes for mesh in shapes(32, 8)]
    [(32,), (4, 8), (2, 16), (4, 8), (8, 4), (16, 2)]
    """
    found = [abstract_mesh((ranks,), ("data",))]
    if ranks > per_host > 1 and ranks % per_host == 0:
        found.append(abstract_mesh((ranks // per_host, per_host), ("host", "local")))
    parts = [ranks >> shift for shift in range(1, ranks.bit_length()) if ranks % (1 << shift) == 0]
    for part in parts:
        if part > 1 and (part % per_host == 0 or per_host % part == 0):
            found.append(abstract_mesh((ranks // part, part), ("replica", "data")))
    return found


class Programs:
    """The step of a job on each mesh. The program of a dict is traced once for all meshes on which leaves are whole."""

    def __init__(self, job: Any, remats: Sequence[Any]) -> None:
        self.job, self.remats = job, remats
        self.tasks: dict[str, Task] = {}

    def on(self, mesh: Mesh) -> Iterator[tuple[Any, TrainStep, Any, Task]]:
        """Recomputation, step, batch and task, for each kind of recomputation.

        Raises:
            PlanError: the mesh cannot be used.
        """
        made = job_of("search", self.job(mesh)) if callable(self.job) else job_of("search", self.job)
        if not isinstance(made, Job):
            step, batch = made
            yield step.options.running.remat, step, batch, task_of(step, step.trace(batch), step.plan)
            return
        for remat in self.remats if made.remat is None else [made.remat]:
            step, batch = made.step(mesh, remat=remat)
            if callable(self.job) or any(leaf.compute.axes for leaf in step.plan.leaves.values()):
                yield remat, step, batch, task_of(step, step.trace(batch), step.plan)
                continue
            key = repr(remat)  # it may be a list
            if key not in self.tasks:
                self.tasks[key] = task_of(step, step.trace(batch), step.plan)
            yield remat, step, batch, on_plan(self.tasks[key], step.plan)


def _best(mesh: Mesh, remat: Any, step: TrainStep, batch: Any, task: Task, hardware: Hardware) -> Option:
    """The fastest policy that fits."""
    costs, state = hardware.of(task, mesh), state_bytes(step, step.plan)
    limit = math.inf if hardware.memory is None else hardware.memory - state
    found = [tried(task, policy, costs)[0] for policy in candidates(task, "deferred")]
    held = functools.partial(hardware.held, step.plan, task=task)
    fits = [each for each in found if held(each) <= limit]
    chosen: Candidate = min(fits, key=lambda each: (each.seconds, held(each))) if fits else min(found, key=held)
    rows = sizes(batch)[0] * step.plan.data_size
    seconds = chosen.seconds or math.nan
    mfu = model_flops(task) / (seconds * hardware.speed.peak)
    peak = state + held(chosen)
    return Option(mesh, remat, chosen.policy, peak, chosen.seconds, chosen.exposed, rows / seconds, mfu, bool(fits))
