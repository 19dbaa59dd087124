"""Training in stages on a virtual mesh, and the same training in one plain process."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import fshard as fs
from fshard import tree
from tests.pipeline.programs import PROGRAMS
from tests.shared import parity
from tests.shared.plain import Plain

STEPS, CLIP = 3, 0.3


def adamw() -> Any:
    """The optimizer."""
    return fs.optim.adamw(1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class StagedRun:
    """How a training in stages is made.

    Attributes:
        program: by name.
        sizes: of the mesh; the first axis is that of stages, and is left out of a mesh without.
        axes: its names.
        rules: of the plan.
        stages: options of ``fs.Stages``.
        plan: of ``fs.make_plan``.
        step: of ``fs.make_train_step``.
        policy: of ``fs.Policy``.
        accumulate: the microbatches of a step.
        opt: makes the optimizer.
        state: of ``fs.init_state``.
    """

    program: str = "stack"
    sizes: tuple[int, ...] = (2, 1)
    axes: tuple[str, ...] = ("stage", "data")
    rules: Any = ((".*", fs.fsdp("data")),)
    stages: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 4
    opt: Any = adamw
    state: dict[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> "StagedRun":
        """The same with other values."""
        return replace(self, **changes)


def made(run: StagedRun, mesh: fs.Mesh) -> tuple[Any, fs.Plan, Any, Any]:
    """On a rank: the step, the plan, the first state, and a maker of batches."""
    program = PROGRAMS[run.program]()
    start = tree.nest({path: leaf.clone() for path, leaf in program.params.items()})
    data = tuple([axis for axis in mesh.axis_names if axis not in ("stage", "tp")])
    options: dict[str, Any] = {"batch": fs.P(data), "units": program.units, **run.plan}
    if "stage" in mesh.axis_names:
        leaves = program.leaves(mesh.axis_size("stage") * run.stages.get("chunks", 1))
        options["stages"] = fs.Stages("stage", **{"leaves": leaves, **run.stages})
    plan = fs.make_plan(start, mesh, run.rules, **options)
    opt, policy = run.opt(), fs.Policy(**run.policy)
    options = {"clip_norm": CLIP, "accumulate": run.accumulate, "schedule": policy, **run.step}
    step = fs.make_train_step(program.make(fs.unit), opt, plan, **options)
    state = fs.init_state(plan, opt, params=start, **run.state)
    return step, plan, state, lambda number: plan.local_batch(program.batch(number))


def on_rank(run: StagedRun, mesh: fs.Mesh, steps: int = STEPS) -> parity.Run:
    """On a rank: train."""
    step, plan, state, batch = made(run, mesh)
    return parity.sharded(step, state, plan, (batch(number) for number in range(steps)))[0]


def staged(run: StagedRun, steps: int = STEPS) -> list[parity.Run]:
    """Train on a virtual mesh."""
    mesh = fs.virtual_mesh(run.sizes, run.axes)
    return mesh.run(lambda: on_rank(run, mesh, steps))


@functools.cache
def plain(program: str, opt: Any = adamw, clip: Any = CLIP, steps: int = STEPS) -> parity.Run:
    """Train in one plain process."""
    made = PROGRAMS[program]()
    one = Plain(made.make(lambda fn: fn), opt(), made.params, clip)
    losses, norms = [], []
    for number in range(steps):
        losses.append(one.step(made.batch(number)))
        norms.append(one.norm)
    return parity.Run(losses, norms, {path: leaf.clone() for path, leaf in one.params.items()})


@functools.cache
def unstaged(run: StagedRun) -> parity.Run:
    """Train on one rank without stages."""
    return staged(run)[0]


def problems(run: StagedRun, near: parity.Near = parity.Near(1e-5, 1e-5, 2e-5)) -> list[str]:  # noqa: B008
    """How a training in stages differs from that in one plain process."""
    clip = run.step.get("clip_norm", CLIP)
    return parity.differences(staged(run), plain(run.program, run.opt, clip), near)
