"""``fshard plan``: what a step would hold, send and take, without processes and without weights."""

import argparse
import functools
import gc
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fshard.arguments import bytes_of, size_text
from fshard.cli.console_table import print_table
from fshard.errors import PlanError
from fshard.foresight.feeding import LONGEST
from fshard.foresight.foresee import Foresight, Progress, foresee
from fshard.foresight.foresight_tables import Section, as_json, sections
from fshard.foresight.hardware import Hardware, hardware
from fshard.foresight.huggingface import hugging_face
from fshard.foresight.jobs import Job, named, read_job, takes_mesh
from fshard.foresight.page import write_page, write_staged_page
from fshard.foresight.remedies import Remedy, closing, largest, open_changes, remedies
from fshard.foresight.search import known_formats, search
from fshard.foresight.search_table import SHOWN, Option, Search
from fshard.foresight.staged_foresight import StagedForesight, foresee_stages
from fshard.foresight.staged_tables import staged_closing, staged_json, staged_sections
from fshard.pipeline.pipeline_step import PipelineStep
from fshard.pipeline.stages import Stages
from fshard.schedule.costs import read_costs
from fshard.schedule.machines import COMMUNICATOR, DEVICES, LINKS
from fshard.sharding.mesh import Mesh, abstract_mesh
from fshard.sharding.wire import NAMES, Wire
from fshard.writing import target

WRITE = "write a FILE.py:make that gives its batch, or its loss"
"""The remedy where a model of Hugging Face raises something."""

MOST_RANKS = 1 << 20
"""Ranks that a mesh may have: what each of them holds is counted."""

STAGE = "stage"
"""The mesh axis that holds stages where a job does not say so."""

FILLED = 4
"""Microbatches for each stage where none are given: ranks are idle for less than a fifth of the time."""

HF_ONLY = ("rows", "length", "accumulate", "remat", "chunks")
"""Options of models that are made from a config."""

SELDOM = 100_000
"""New objects from one search for cycles to the next, in place of some hundreds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.set_defaults(run=run)
    parser.add_argument("job", nargs="?", help="FILE.py:FUNCTION, which returns a dict, or a train step and a batch")
    parser.add_argument("--hf", metavar="CONFIG", help="a config.json of Hugging Face, or its folder")
    parser.add_argument(
        "--mesh", default="8", help="ranks along each axis, as 1024, 64x8, replica=4,data=8 or stage=4,data=8"
    )
    add_hardware(parser)
    parser.add_argument("--rows", type=int, help="with --hf: rows of a rank's microbatch (default: 1)")
    parser.add_argument(
        "--length", type=int, help=f"with --hf: tokens of a row (default: its positions, at most {LONGEST})"
    )
    words = "dtype of products; by default bf16 with --hf, and that of the plan's compute with FILE.py"
    parser.add_argument("--precision", choices=("bf16", "fp32"), help=words)
    parser.add_argument("--accumulate", type=int, help="with --hf: microbatches of a step (default: 1, or 4 a stage)")
    more = "with --hf: compute units again, or keep their activations in host memory (default: none)"
    parser.add_argument("--remat", choices=("none", "all", "offload"), help=more)
    parser.add_argument("--chunks", type=int, help="with --hf: chunks of logits, as for fs.causal_lm_loss")
    parser.add_argument("--search", action="store_true", help="try all shapes of as many ranks as --mesh has")
    words = f"with --search: formats to try too, as int8, or replica=int4 for one axis: {', '.join(NAMES)}"
    parser.add_argument("--wires", nargs="+", metavar="FORMAT", default=[], help=words)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures, which needs no other file")


def add_hardware(parser: argparse._ActionsContainer) -> None:
    """Add what says on which devices and links a step would run."""
    parser.add_argument("--link", default="ib400", help=f"between hosts: {', '.join(LINKS)}, or BYTES/S,LATENCY")
    parser.add_argument("--inside", metavar="LINK", help="between ranks of one host; by default as --link")
    parser.add_argument("--per-host", type=int, default=8, help="ranks on a host (default: 8)")
    parser.add_argument("--device", default="h100", help=f"one of {', '.join(DEVICES)} (default: h100)")
    parser.add_argument("--memory", help="of a device, as 80G; by default that of --device")
    parser.add_argument("--costs", metavar="FILE", help="measured costs of the units, as Costs.save writes them")
    parser.add_argument("--products", type=float, default=0.7, help="share of its peak that matrix products reach")
    parser.add_argument("--share", type=float, default=0.85, help="share of its rate that a link gives to collectives")
    parser.add_argument("--communicator", help="bytes of a device that NCCL takes for each communicator, as 200Mi")
    parser.add_argument("--host", help="bytes a second of updates in host memory, on one rank (default: 10G)")


def _check_model(args: argparse.Namespace) -> None:
    """Refuse two models or none, and options that the given one would not hear of."""
    if (args.job is None) == (args.hf is None):
        raise PlanError("give either FILE.py:FUNCTION or --hf CONFIG")
    given = [f"--{name}" for name in HF_ONLY if getattr(args, name) is not None]
    if args.job and given:
        raise PlanError(
            f"{', '.join(given)}: for --hf alone; {args.job} says these itself, in the dict that it returns"
        )


def run(args: argparse.Namespace) -> int:
    """Foresee, print, and say what would have to change."""
    _check_model(args)
    short = None if args.precision is None and args.job else args.precision != "fp32"
    mesh, machines, wires = read_mesh(args.mesh), read_hardware(args, short), read_wires(args.wires, args.search)
    if args.html:
        target(args.html)  # an error now, and not when all is computed
    with telling(args.json) as progress, seldom_collected():
        progress("the model", 0.0)
        job: Any = _hf(args) if args.hf else read_job(args.job, mesh)
        made, remedy = (job.words, WRITE) if args.hf else (args.job, "")
        with named(made, remedy):
            staged = staged_job(args, job, mesh)
            searched = _search(args, job, mesh, machines, wires, progress) if args.search else None
            if searched is not None:
                job, mesh = _on_best(args, job, searched.best), searched.best.mesh
            if staged is not None:
                return _show_staged(args, foresee_stages(staged, mesh, machines, progress))
            seen, found = foreseen(job, mesh, machines, searched, progress)
        if args.html:
            progress("pictures", 0.97)
            write_page(Path(args.html), seen, found)
    if args.json:
        print(json.dumps(as_json(seen, found, searched), indent=1))
    else:
        if searched is not None:
            rows = [*searched.table()][:SHOWN]
            _show_tables([(f"Meshes of {mesh.size:,} ranks, the best first", searched.head, rows)])
            print("\n".join(f"{shape}: {why}" for shape, why in searched.refused.items()))
        show(seen, found)
    return 0 if seen.fits else 1


def staged_job(args: argparse.Namespace, job: Any, mesh: Mesh) -> Any:
    """The job with the stages that it has, or that an axis named ``stage`` gives it; None without stages.

    Raises:
        PlanError: an option that stages do not have.
    """
    made = isinstance(job, Job)
    staged = job.stages is not None or STAGE in mesh.axis_names if made else isinstance(job[0], PipelineStep)
    if not staged:
        return None
    if args.search:
        raise PlanError("--search: not for meshes with stages: leave it out, or the axis of the stages")
    return job if not made or job.stages is not None else replace(job, stages=Stages(STAGE))


def show_stages(seen: StagedForesight) -> None:
    """Print a forecast of stages."""
    _show_tables(staged_sections(seen))
    if not seen.fits:
        print(staged_closing(seen))


def _show_staged(args: argparse.Namespace, seen: StagedForesight) -> int:
    """Print a forecast of stages in the form that was asked for; returns the exit status."""
    if args.html:
        write_staged_page(Path(args.html), seen)
    if args.json:
        print(json.dumps(staged_json(seen), indent=1))
    else:
        show_stages(seen)
    return 0 if seen.fits else 1


def foreseen(
    job: Any, mesh: Mesh, machines: Hardware, searched: Search | None, progress: Progress
) -> tuple[Foresight, list[Remedy]]:
    """The step on a mesh, and what would have to change for it to fit."""
    made = isinstance(job, Job)
    step, batch = job.step(mesh) if made else job
    seen = foresee(step, batch, machines, progress, searched.task if searched else None)
    if made:
        seen = replace(seen, words=job.words)
    if seen.fits:
        return seen, []
    progress("what would fit", 0.95)
    changes = open_changes(job) if made else {}
    return seen, [*remedies(seen, step, functools.partial(job.step, mesh) if changes else None, changes)]


def _search(
    args: argparse.Namespace,
    job: Any,
    mesh: Mesh,
    machines: Hardware,
    wires: Sequence[Wire | str | None],
    progress: Progress,
) -> Search:
    """The shapes of as many ranks."""
    each = job if args.hf or not takes_mesh(args.job) else lambda shape: read_job(args.job, shape)
    told: Progress = lambda what, part: progress(f"meshes: {what}", 0.8 * part)  # noqa: E731
    return search(each, mesh.size, machines, wires=wires, progress=told)


def _on_best(args: argparse.Namespace, job: Any, best: Option) -> Any:
    """The job that the best option is of."""
    job = job if args.hf else read_job(args.job, best.mesh)
    return replace(job, remat=best.remat, wire=best.wire) if isinstance(job, Job) else job


def _hf(args: argparse.Namespace) -> Job:
    remat = None if args.remat == "none" else args.remat
    staged = read_mesh(args.mesh).shape.get(STAGE, 0)
    rows = 1 if args.rows is None else args.rows
    accumulate = (FILLED * staged or 1) if args.accumulate is None else args.accumulate
    return hugging_face(args.hf, rows, args.length, args.precision or "bf16", remat, accumulate, args.chunks)


def read_mesh(text: str) -> Mesh:
    """A mesh without processes: ``1024``, ``64x8``, ``replica=4,data=8``.

    Raises:
        PlanError: none of these, or more ranks than ``MOST_RANKS``.

    >>> read_mesh("64x8").axis_names, read_mesh("replica=4,data=8").sizes
    (('outer', 'inner'), (4, 8))
    """
    if re.fullmatch(r"\d+(x\d+){0,2}", text):
        sizes = [int(size) for size in text.split("x")]
        names = {1: ["data"], 2: ["outer", "inner"], 3: ["outer", "middle", "inner"]}[len(sizes)]
    elif re.fullmatch(r"\w+=\d+(,\w+=\d+)*", text):
        pairs = [pair.split("=") for pair in text.split(",")]
        sizes, names = [int(size) for _, size in pairs], [name for name, _ in pairs]
    else:
        raise PlanError(f"--mesh {text!r}: give ranks along each axis, as 1024, 64x8 or replica=4,data=8")
    if math.prod(sizes) > MOST_RANKS:
        raise PlanError(f"--mesh {text!r} has {math.prod(sizes):,} ranks: give at most {MOST_RANKS:,}")
    return abstract_mesh(sizes, names)


def read_wires(texts: Sequence[str], searched: bool = True) -> list[Wire | str | None]:
    """Return what a search tries for formats.

    Exact transfers, and these formats of all transfers, or of sums over some axes.

    Raises:
        PlanError: a format is unknown, or formats are given without a search.

    >>> read_wires(["int8", "replica=int4"])
    [None, 'int8', Wire(reduce={'replica': 'int4'})]
    """
    if texts and not searched:
        raise PlanError("--wires says what --search tries: give both, or neither")
    found: list[Wire | str | None] = [None]
    for text in texts:
        axes, equals, name = text.rpartition("=")
        found.append(Wire(reduce={axes: name}) if equals else name)
    return known_formats(found)


def read_hardware(args: argparse.Namespace, short: bool | None = None) -> Hardware:
    """Return what the step would run on; ``short`` says whether products are in 16 bits, where the plan does not."""
    memory = bytes_of(args.memory, "--memory ") if args.memory else None
    costs = read_costs(args.costs) if args.costs else None
    room = bytes_of(args.communicator, "--communicator ") if args.communicator else COMMUNICATOR
    links = args.link, args.inside, args.per_host
    host = None if args.host is None else bytes_of(args.host, "--host ")
    found = hardware(args.device, *links, memory, args.products, args.share, short, costs, room, host)
    return replace(found, costs_of=f"the costs of {args.costs}") if costs else found


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside, Python looks for cycles of objects seldom: models and traces make millions of objects and few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def telling(silent: bool) -> Any:
    """Return the listener that is told how far the command is: a bar on standard error, if that is a terminal."""
    told: Progress = lambda what, part: None  # noqa: E731
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        silent = True
    if silent or not sys.stderr.isatty():
        yield told
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, part: bar.update(task, description=what, completed=part)


def show(seen: Foresight, found: Sequence[Remedy]) -> None:
    """Print a forecast, and what would have to change for it to fit."""
    _show_tables(sections(seen))
    if not seen.fits:
        limit = size_text(seen.hardware.memory or 0)
        peak = size_text(seen.held(seen.least))
        print(
            f"no policy fits into {limit}: the least is {peak}, at op {seen.least.memory.op}, {seen.least.memory.where}"
        )
        print("\n".join(f"  {line}" for line in largest(seen)))
        print("what would change it:")
        print("\n".join([*(f"  {remedy}" for remedy in found), *closing(seen, found)]))


def _show_tables(tables: Iterable[Section]) -> None:
    for title, heads, rows in tables:
        print_table(heads, rows, title)
        print()
