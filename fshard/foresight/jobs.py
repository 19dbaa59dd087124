"""The jobs of ``fshard plan``: a step and a batch, from a file of the user's or a configuration."""

import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import described
from fshard.errors import PlanError, ShardError
from fshard.optim.adamw import adamw
from fshard.pipeline.stages import Stages
from fshard.runtime.execution.trace_program import on_device
from fshard.sharding.mesh import Axes, Mesh, abstract_mesh
from fshard.sharding.plan import Plan, make_plan
from fshard.sharding.rules import Rule
from fshard.sharding.spec import P, fsdp
from fshard.sharding.wire import Wire
from fshard.tracebacks import FULL
from fshard.training.make_step import make_train_step
from fshard.training.train_step import TrainStep

OURS = str(Path(__file__).parents[1]) + os.sep
"""The folder of the library."""

PYTHONS = sysconfig.get_paths()["stdlib"] + os.sep
"""The folder of Python's own modules."""

BELOW = (f"site-packages{os.sep}torch", f"site-packages{os.sep}optree")
"""Packages that a job calls, whose frames tell its author nothing."""

SHOWN = 3
"""Lines of code that an error names."""


@contextmanager
def named(where: str, remedy: str = "") -> Iterator[None]:
    """Inside, what the code of a job raises is a ``PlanError`` that names its line. Errors of the library stay.

    Args:
        where: ``FILE.py:FUNCTION``, or what else runs.
        remedy: what to do, if there is more to say than the error does.

    Raises:
        PlanError: the code raised something.

    >>> with named("train.py:make"):
    ...     raise SystemExit("no GPU")
    Traceback (most recent call last):
    fshard.errors.PlanError: train.py:make raised SystemExit: no GPU
    """
    try:
        yield
    except ShardError:
        raise
    except (Exception, SystemExit) as error:
        places = [*_places(traceback.extract_tb(error.__traceback__))]
        told = places or isinstance(error, SyntaxError | SystemExit)
        if not told or os.environ.get(FULL) == "full":
            raise  # a defect of the library: all of its frames are of use
        notes = [str(note) for note in getattr(error, "__notes__", ())]
        lines = [f"{where} raised {type(error).__name__}: {error}", *places[-SHOWN:], *notes]
        raise PlanError("\n".join([*lines, *[remedy] * bool(remedy)])) from error


def _places(frames: Iterable[traceback.FrameSummary]) -> Iterator[str]:
    """The lines of code that is neither the library's, nor torch's, nor Python's, the innermost last."""
    for frame in frames:
        file = frame.filename
        pythons = file.startswith(PYTHONS) and "site-packages" not in file
        if not pythons and not file.startswith((OURS, "<")) and not any(f"{name}{os.sep}" in file for name in BELOW):
            yield f"  {file}:{frame.lineno}, in {frame.name}: {frame.line}"


GPU = "cuda"
"""The device of plans that are foreseen."""

NEEDED = ("model", "loss", "batch")
OTHERS = "rules units optimizer batch_spec precision accumulate remat wire stages chunked"
KNOWN = (*NEEDED, *OTHERS.split())


@dataclass(frozen=True)
class Job:
    """The parts of which a step is made.

    Attributes:
        model: what ``fs.split`` returned, or a nested dict of tensors.
        loss: the loss function.
        batch: a rank's batch. Tensors on the meta device will do.
        rules: as for ``fs.make_plan``; by default everything is sharded over all axes but one named ``replica``.
        units: of a nested dict, as for ``fs.make_plan``; by default each dict in it.
        optimizer: by default AdamW.
        batch_spec: as for ``fs.make_plan``; by default all axes.
        precision: as for ``fs.make_plan``.
        accumulate: microbatches.
        remat: as for ``fs.make_train_step``.
        wire: as for ``fs.make_plan``.
        stages: as for ``fs.make_plan``.
        words: what the model and the batch are, where the user did not write them.
        chunked: makes the loss function with so many chunks of logits, if it has none and can have them.
    """

    model: Any
    loss: Any
    batch: Any
    rules: Any = None
    units: Any = None
    optimizer: Any = None
    batch_spec: P | None = None
    precision: Any = None
    accumulate: int = 1
    remat: Any = None
    wire: Wire | None = None
    stages: Stages | None = None
    words: str = ""
    chunked: Callable[[int], Any] | None = None

    def step(self, mesh: Mesh, **options: Any) -> tuple[TrainStep, Any]:
        """The step on a mesh, and a rank's batch.

        Raises:
            PlanError: no rule can use the mesh, or anything that ``fs.make_plan`` and ``fs.make_train_step`` refuse.
        """
        return self.step_of(self.plan(mesh), **options)

    def plan(self, mesh: Mesh) -> Plan:
        """Say where the leaves are on a mesh, of GPUs.

        Raises:
            PlanError: no rule can use the mesh, or anything else that ``fs.make_plan`` refuses.
        """
        mesh = abstract_mesh(mesh.sizes, mesh.axis_names, rank=mesh.rank, device=GPU)
        staged = self.stages.axis if self.stages is not None else ""
        axes, cut = tuple(axis for axis in mesh.axis_names if axis != staged), _cut(mesh, staged)
        if not axes:
            raise PlanError(f"--mesh {staged}={mesh.size} has no axis but that of the stages: add one, as data=1")
        rules = self.rules or [Rule(".*", fsdp(cut if len(cut) > 1 else cut[0]))]
        spec = self.batch_spec or P(axes if len(axes) > 1 else axes[0])
        nested = self.model.items() if isinstance(self.model, Mapping) else ()
        units = self.units or tuple(name for name, below in nested if isinstance(below, Mapping))
        given = {"precision": self.precision, "units": units, "wire": self.wire, "stages": self.stages}
        return make_plan(self.model, mesh, rules, batch=spec, **given)

    def step_of(self, plan: Plan, chunks: int | None = None, **options: Any) -> tuple[TrainStep, Any]:
        """The step of a plan, and a rank's batch. It is for the CPU, where batches and buffers of modules are."""
        loss = self.loss if chunks is None or self.chunked is None else self.chunked(chunks)
        opt = self.optimizer or adamw(1e-3)
        given = {"accumulate": self.accumulate, "remat": self.remat, **options}
        return make_train_step(loss, opt, on_device(plan, "cpu"), **given), tree.mapped(_real, self.batch)

    def in_format(self, name: str, mesh: Mesh) -> Plan:
        """Say where the leaves are, with gathers and reductions in a format.

        Sums over replicas are exact where so many replicas would send more of them in the format than exactly.

        Raises:
            PlanError: as ``plan``.
        """
        try:
            return replace(self, wire=Wire(name, name)).plan(mesh)
        except PlanError:
            cut = _cut(mesh)
            if self.rules or cut == mesh.axis_names:
                raise
            return replace(self, wire=Wire(name, {"+".join(cut): name})).plan(mesh)


def read_job(where: str, mesh: Mesh) -> "Job | tuple[TrainStep, Any]":
    """Return what a function of a file returns: ``FILE.py:make``, called with the mesh if it takes an argument.

    Raises:
        PlanError: there is no such file or function, or it returns something else.
    """
    make = _function(where)
    count = len(inspect.signature(make).parameters)
    if count > 1:
        raise PlanError(f"{where} takes {count} arguments: it is called with the mesh, or with nothing")
    with named(where):
        made = make(mesh) if count else make()
    return job_of(where, made)


def takes_mesh(where: str) -> bool:
    """Tell whether a function of a file is called with the mesh.

    Raises:
        PlanError: there is no such file or function.
    """
    return bool(inspect.signature(_function(where)).parameters)


def job_of(where: str, made: Any) -> "Job | tuple[TrainStep, Any]":
    """A job from what a user's function returned: a dict, or a train step and a batch.

    Raises:
        PlanError: it is something else, or the dict lacks something.
    """
    if isinstance(made, Job):
        return made
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], TrainStep):
        mesh = made[0].plan.mesh
        device = mesh.device.type if mesh.device_here else "cpu"
        return made[0], tree.mapped(functools.partial(_real, device=device), made[1])
    if isinstance(made, Mapping):
        return _job(where, made)
    raise PlanError(
        f"{where} returned {described(made)}: return a dict with {', '.join(map(repr, NEEDED))} and, if need be, "
        f"{', '.join(map(repr, KNOWN[len(NEEDED) :]))}; or a train step and a batch"
    )


def _function(where: str) -> Any:
    """The function of a file that is run for it."""
    file, _, name = where.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier() or not path.is_file():
        absent = "" if path.is_file() or not file else f": there is no file {file!r}"
        example = f": give {where}:make, if its function is make" if Path(where).is_file() else absent
        raise PlanError(f"{where!r} is no FILE.py:FUNCTION{example}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        with named(where):
            spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    make = getattr(module, name, None)
    if not callable(make):
        have = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise PlanError(f"{file} has no function {name!r}: it has {', '.join(have) or 'none'}")
    return make


def _job(where: str, made: Mapping[str, Any]) -> Job:
    missing = [name for name in NEEDED if name not in made]
    strange = [name for name in made if name not in KNOWN]
    if missing or strange:
        problems = [f"{name!r} is missing" for name in missing] + [f"{name!r} is unknown" for name in strange]
        raise PlanError(f"the dict of {where}: {', '.join(problems)}; it may have {', '.join(map(repr, KNOWN))}")
    return Job(**made)


def _cut(mesh: Mesh, staged: str = "") -> Axes:
    """The axes over which leaves are sharded where a job has no rules: not that of stages."""
    axes = tuple(axis for axis in mesh.axis_names if axis != staged)
    return tuple(axis for axis in axes if axis != "replica") or axes


def _real(x: Any, device: str = "cpu") -> Any:
    """A tensor that is elsewhere, as zeros: a batch is small, and its values do not matter."""
    if not isinstance(x, Tensor) or x.device.type == device:
        return x
    return torch.zeros(x.shape, dtype=x.dtype, device=device)
