"""The findings of a trace, as a value."""

import functools
from dataclasses import dataclass, field

from fshard.errors import PlanError
from fshard.schedule.auto import Choice
from fshard.schedule.footprint import Footprint, Need, footprint
from fshard.schedule.schedule import Schedule
from fshard.schedule.transfers import COLLECTIVES
from fshard.sharding.mesh import Axes


@dataclass(frozen=True)
class Trace:
    """The schedule, memory and choices of a step for batches like a given one, found without running it.

    ``step.trace(batch)`` of train steps, of evaluation steps and of gradients returns one, and so does
    ``step.trace(state, batch)`` of a step of parts.

    Attributes:
        schedule: the schedule.
        choice: what ``schedule="auto"`` chose, and from what; None where the policy was given.
        needs: what the compute ops of one microbatch of each pass need; nothing where only a run has found the program.
        idle: the trained leaves that get no gradient; None where only a run has found the program.
        communicators: what it communicates on between ranks, by role and axes: those of transfers, and as
            ``"collectives"`` those that the program itself uses. NCCL takes memory for each.
        graphs: whether unit graphs write gradients where they are flat.
        flops: floating-point operations of the model for one microbatch, without what is computed again; None where
            only a run has found the program, and for steps of parts.
        batch_bytes: of the tensors of the batch, which a captured step copies.

    >>> params = {"w": torch.ones(4), "idle": torch.ones(4)}
    >>> plan = fs.make_plan(params, fs.abstract_mesh((2,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> step = fs.make_train_step(lambda params, x: (params["w"] * x).sum(), fs.optim.sgd(0.1), plan)
    >>> found = step.trace(torch.ones(4))
    >>> found.communicators
    (('all_gather', ('data',)), ('reduce_scatter', ('data',)))
    >>> found.schedule, found.unused, found.footprint.arena_bytes
    (<Schedule train, 10 ops, 1 groups, 0 calls, accumulate=1, prefetch=2 reduces=2 reshard=true update=deferred>, \
('idle',), 256)
    """

    schedule: Schedule
    choice: Choice | None = field(default=None, repr=False)
    needs: tuple[Need, ...] = field(default=(), repr=False)
    idle: tuple[str, ...] | None = field(default=None, repr=False)
    communicators: tuple[tuple[str, Axes], ...] = field(default=(), repr=False)
    graphs: bool = field(default=False, repr=False)
    flops: int | None = field(default=None, repr=False)
    batch_bytes: int = field(default=0, repr=False)

    @functools.cached_property
    def footprint(self) -> Footprint:
        """Return what the step holds at its peak beside its state, on batches of these shapes.

        Activations are those that fake tensors show: memory that an operator takes for itself alone is not in it. On
        processors that is a hundredth of a step in bfloat16, whose matrices oneDNN reorders, and a twentieth to a tenth
        in convolutions. Unit graphs write gradients where they are flat, which is there from the begin of a unit's
        backward, and keep nothing beyond its last use; units that cannot be graphs take more. Where ranks hold
        different leaves (``align="leaf"``), it is that of the rank that needs most, and what pads its groups counts
        from the backward on: small steps measured 2 % less. Steps that call units twice measured up to 2 % more.

        Raises:
            PlanError: a run has found the program, which depends on values of tensors.
        """
        if not self.needs:
            raise _found_by_a_run("its memory cannot be foreseen")
        return footprint(self.schedule, self.needs, self.graphs, self.batch_bytes)

    @property
    def program_axes(self) -> tuple[Axes, ...]:
        """The axes over which the program itself communicates."""
        return tuple(axes for role, axes in self.communicators if role == COLLECTIVES)

    @property
    def unused(self) -> tuple[str, ...]:
        """The trained leaves that get no gradient: theirs is zero, and they only decay.

        Raises:
            PlanError: a run has found the program, which depends on values of tensors.
        """
        if self.idle is None:
            raise _found_by_a_run("it is not known which leaves get no gradient")
        return self.idle

    def __str__(self) -> str:
        return str(self.schedule)

    def _repr_html_(self) -> str:
        parts = [self.schedule._repr_html_()]
        parts += [self.footprint._repr_html_()] if self.needs else []
        return "".join(parts + ([] if self.choice is None else [self.choice._repr_html_()]))


def _found_by_a_run(unknown: str) -> PlanError:
    return PlanError(
        f"a run has found this program, which depends on values of the batch's tensors, and no trace can: {unknown}"
    )
