"""Searching the mesh too: its shapes, recomputation, wire formats and policies, each foreseen, and a table of them all.

Enumeration over few shapes and a cost model, as in Galvatron (Miao et al., 2023), where Alpa (Zheng et al., 2022)
solves for layouts: a table of all that was tried can be read and argued with.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fshard.arguments import Want, described, expect
from fshard.errors import PlanError, lines
from fshard.foresight.foresee import Progress, for_gpus, on_plan, row_parts, sizes, state_bytes, task_of
from fshard.foresight.hardware import Hardware
from fshard.foresight.jobs import Job, job_of
from fshard.foresight.search_table import EXACT, Option, Search, shape_of, words_of
from fshard.schedule.auto import Candidate, timed, weighed
from fshard.schedule.build import Builds
from fshard.schedule.candidates import PolicyTask, candidates
from fshard.schedule.costs import Costs
from fshard.schedule.simulate import Simulation
from fshard.sharding.mesh import Mesh, abstract_mesh
from fshard.sharding.plan import Plan
from fshard.sharding.wire import Wire
from fshard.training.train_step import TrainStep


def search(
    job: Mapping[str, Any] | Job | Callable[[Mesh], Any],
    meshes: int | Sequence[Mesh],
    hardware: Hardware,
    remats: Sequence[Any] = (None, "all"),
    wires: Sequence[Wire | str | None] = (None,),
    progress: Progress = lambda what, part: None,
) -> Search:
    """Foresee a training step on several meshes, with and without recomputation and wire formats, under all policies.

    Args:
        job: a dict with ``model``, ``loss`` and ``batch``, as ``fshard plan`` takes it; or a function of the mesh that
            returns one, or a train step and a batch, where rules or the program depend on the mesh.
        meshes: meshes of ``fs.abstract_mesh``; or a number of ranks, for all shapes of ``shapes(ranks, hardware)``.
        hardware: what the step would run on: ``fs.sim.hardware("h100", link="ib400")``.
        remats: what is tried for ``remat=``, where the job leaves that open.
        wires: what is tried for ``wire=`` of the plan, where the job leaves that open: None, which is exact; the name
            of a format, such as ``"int8"``, for all gathers and reductions; or an ``fs.Wire``. Rules that have formats
            of their own keep them. Formats change numbers, so none is tried that is not given. Under a name, sums over
            the axis ``replica`` are exact where so many replicas would send more in the format, if the job has no
            rules.
        progress: is told how far it is.

    Returns:
        The options. A step on more data ranks makes more of a batch: rows a second compare them. Where ranks share
        rows, whose further dims a plan cuts, rows are as much longer, and count as much more.

    Raises:
        PlanError: no mesh, or none that the plan and the program can use; an unknown format; or formats for a job that
            has a ``wire`` of its own, or that makes the step itself.

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
        ("wires", wires, list | tuple, 'a list of formats, such as [None, "int8"]'),
    ]
    expect("search(job, meshes, hardware)", wants)
    formats = known_formats(wires)
    if not remats:
        raise PlanError("search(remats=[]): nothing is tried: give what is computed again, such as [None, 'all']")
    meshes = shapes(meshes, hardware.cluster.per_host) if isinstance(meshes, int) else [*meshes]
    if not meshes:
        raise PlanError("search: no mesh is given: give a number of ranks, or fs.abstract_mesh(...) of each shape")
    found, refused = JobPrograms(job, remats, formats).tried(meshes, hardware, progress)
    if not found:
        problems = [f"{shape}: {why}" for shape, why in refused.items()]
        raise PlanError(lines("no mesh can be used", problems, "Give other meshes, or rules for their axes."))
    found.sort(key=_order)
    return Search([option for option, _ in found], refused, hardware.words, found[0][1])


def _order(found: tuple[Option, PolicyTask]) -> tuple[float, int]:
    """Those that fit first, by rows a second, longer ones the more; the others by what they hold."""
    option, _ = found
    return (-option.rows_per_s * option.shared if option.fits else 0.0, option.peak_bytes)


def known_formats(wires: Sequence[Wire | str | None]) -> list[Wire | str | None]:
    """Return what is tried for formats, each once.

    Raises:
        PlanError: none is given, or one that ``fs.Wire`` does not know.

    >>> known_formats([None, "int8", "int8"])
    [None, 'int8']
    """
    strange = [wire for wire in wires if not isinstance(wire, Wire | str | None)]
    if strange or not wires:
        what = described(strange[0]) if strange else "nothing"
        raise PlanError(
            f"search(wires=): {what} is given: give None for exact transfers, names of formats such as 'int8', or "
            f"fs.Wire(...)"
        )
    for name in wires:
        if isinstance(name, str):
            Wire(name, name)
    return [*dict.fromkeys(wires)]


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


class JobPrograms:
    """The steps of a job on each mesh. A program is traced once for all plans with the same groups of whole leaves."""

    def __init__(self, job: Any, remats: Sequence[Any], wires: Sequence[Wire | str | None]) -> None:
        self.job, self.remats, self.wires = job, remats, wires
        self.tasks: dict[Any, PolicyTask] = {}
        self.builds = Builds()

    def tried(
        self, meshes: Sequence[Mesh], hardware: Hardware, progress: Progress
    ) -> tuple[list[tuple[Option, PolicyTask]], dict[str, str]]:
        """All options, with their tasks; and the meshes, and formats on them, that cannot be used, with the reasons.

        Raises:
            PlanError: there are formats to try, and the job has its own.
        """
        options: list[tuple[Option, PolicyTask]] = []
        refused: dict[str, str] = {}
        for number, mesh in enumerate(meshes):
            shape = shape_of(mesh)
            progress(shape, number / len(meshes))
            try:
                made = job_of("search", self.job(mesh) if callable(self.job) else self.job)
            except PlanError as error:
                refused[shape] = _reason(error)
                continue
            self._check_formats(made)
            for wire in self.wires:
                try:
                    for remat, step, batch, task in self._on(mesh, made, wire):
                        best = _best(remat, step, batch, task, hardware, self.builds)
                        options.append((replace(best, mesh=mesh), task))
                except PlanError as error:
                    refused[shape + (f", {words_of(wire)}" if wire else "")] = _reason(error)
        return options, refused

    def _check_formats(self, made: Any) -> None:
        """Refuse to try formats where the job leaves no choice."""
        if not any(self.wires):
            return
        if not isinstance(made, Job):
            raise PlanError(
                "search(wires=): the job makes the step itself, so its plan has the formats that it has: return a "
                "dict with 'model', 'loss' and 'batch', or leave wires= out"
            )
        if made.wire is not None:
            raise PlanError(f"search(wires=): the job has wire={made.wire!r} already: leave one of them out")

    def _on(self, mesh: Mesh, made: Any, wire: Wire | str | None) -> "Iterator[Way]":
        """The steps of a mesh and formats, one for each kind of recomputation."""
        if not isinstance(made, Job):
            step, batch = made
            if step.plan.mesh.shape != mesh.shape:
                raise PlanError(f"the job made a step on the mesh {shape_of(step.plan.mesh)}: make it on the one given")
            remat = step.options.running.remat
            yield remat if remat.rules else None, step, batch, task_of(step, step.trace(batch), for_gpus(step.plan))
            return
        if isinstance(wire, str):
            plan = made.in_format(wire, mesh)
        else:
            plan = (made if wire is None else replace(made, wire=wire)).plan(mesh)
        for remat in self.remats if made.remat is None else [made.remat]:
            step, batch = made.step_of(plan, remat=remat)
            key = (repr(remat), *self._traced(plan))  # it may be a list
            if key not in self.tasks:
                self.tasks[key] = task_of(step, step.trace(batch), for_gpus(plan))
            yield remat, step, batch, on_plan(self.tasks[key], for_gpus(plan), step)

    def _traced(self, plan: Plan) -> Iterator[Hashable]:
        """Return what a program depends on, beside the job.

        Groups, and the mesh where leaves are cut or it makes the job.
        """
        yield tuple((group.name, *(leaf.path for leaf in group.leaves)) for group in plan.groups)
        if callable(self.job) or any(leaf.compute.axes for leaf in plan.leaves.values()):
            yield shape_of(plan.mesh)


Way = tuple[Any, TrainStep, Any, PolicyTask]
"""Recomputation, step, batch and task."""


def _reason(error: PlanError) -> str:
    return " ".join(map(str.strip, str(error).splitlines()[:2]))


def _best(remat: Any, step: TrainStep, batch: Any, task: PolicyTask, hardware: Hardware, builds: Builds) -> Option:
    """The fastest policy that fits; the one that holds least, if none does."""
    plan = for_gpus(step.plan)
    wire = EXACT if plan.source is None else plan.source.wire
    costs, state = hardware.of(task, plan), state_bytes(step, plan)
    limit = math.inf if hardware.memory is None else hardware.memory - state
    joined = functools.cache(lambda secondary: hardware.joined(plan, secondary, task))

    def held(tried: Candidate) -> int:
        return tried.memory.peak_bytes + int(joined(tried.policy.secondary))

    chosen = _fastest(task, _timed(task, costs, builds), held, limit)
    parts, shared = row_parts(plan)
    rows = sizes(batch)[0] * parts
    seconds = chosen.seconds or math.nan
    mfu = task.flops * task.accumulate / (seconds * hardware.speed_for(plan).peak)
    times = chosen.seconds, chosen.exposed, rows / seconds
    fits = held(chosen) <= limit
    return Option(plan.mesh, remat, wire, chosen.policy, state + held(chosen), *times, mfu, fits, shared)


def _timed(task: PolicyTask, costs: Costs, builds: Builds) -> list[Simulation]:
    """Return what a step takes under each policy."""
    return [timed(task, policy, costs, builds.build) for policy in candidates(task, "deferred")]


def _fastest(task: PolicyTask, runs: list[Simulation], held: Callable[[Candidate], int], limit: float) -> Candidate:
    """The fastest policy within a limit, and of equally fast ones the one that holds least; else the one of all.

    What a policy holds takes as long to find as its time, so that is done for those alone that may be chosen.
    """
    found: dict[int, Candidate] = {}
    for _, alike in itertools.groupby(sorted(enumerate(runs), key=_seconds), key=_seconds):
        tied = {number: weighed(task, run) for number, run in alike}
        fits = [each for each in tied.values() if held(each) <= limit]
        if fits:
            return min(fits, key=held)
        found |= tied
    return min((found[number] for number in range(len(runs))), key=held)


def _seconds(run: tuple[int, Simulation]) -> float:
    return run[1].seconds
