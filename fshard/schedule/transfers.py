"""Transfers: everything that a step moves, each with two ops, its start and its wait, and the one table of their kinds.

A group's transfers are its *path*. Its gradient, once complete, goes through those of stage ``"gradient"`` one after
the other, each present or not; then comes the update, those of stage ``"updated"``, and, whenever compute needs the
parameters, that of stage ``"read"``. ``build``, ``check``, ``memory``, ``simulate``, ``text``, the pictures and the
runtime read this table, so a new kind of transfer is a new row. A compressed transfer is one of these with a wire
format: a field of its record, ``Transfer.wire``. Transfers of stage ``"between"`` are no ops of a step: they leave
after it, in every ``PeriodicTransfer.every``-th step, and travel while the next ones run.

==================  ========  ==============================================  =========================================
kind                stage     from -> to                                      is waited for
==================  ========  ==============================================  =========================================
``all_gather``      read      shard of the state -> ``param``                 before the first compute that reads it
``regather``        read      ``second`` -> ``param``, after a ``reshard``    before the next compute that reads it
``reduce_scatter``  gradient  ``grad`` -> ``shard``, summed over ranks        when the next would exceed the limit
``replica_reduce``  gradient  ``shard`` -> ``shard``, or ``own``              when the next would exceed the limit
``stage_sum``       gradient  ``shard`` or ``own`` -> itself, over stages     when the next would exceed the limit
``offload``         gradient  ``shard`` or ``own`` -> host memory             when the next would exceed the limit
``update_gather``   updated   own range of the state -> shard of the state    before the first all-gather or reader
``send``            edge      a value of this rank's part of a pipeline       when the next on its edge is sent
``receive``         edge      a value of another rank's part                  before the first compute that reads it
``exchange``        between   a fragment of the state -> itself, on replicas  ``delay`` steps after the one that it left
==================  ========  ==============================================  =========================================

Two rows move activations of a unit, and belong to no group: their ops name the unit and its call.

=======================  =======================================  ==============================================
kind                     from -> to                               is waited for
=======================  =======================================  ==============================================
``activation_offload``   what a call keeps -> host memory         after the compute that follows the call
``activation_fetch``     host memory -> what a call has kept      before the call's backward
=======================  =======================================  ==============================================
"""

from dataclasses import dataclass

from fshard.schedule import schedule_refusals

STATE, HOST, EDGE = "state", "host", "edge"
"""Sources and targets outside of the memory of a step: the resident state, host memory, and values of the program that
go between ranks, which are activations."""

COLLECTIVES = "collectives"
"""The role of the communicators of collectives that programs call themselves, which never queue behind transfers."""

SECOND = "second"
"""What a rank keeps of gathered parameters, so that they are gathered again over fewer axes. It outlives transfers."""

ITEMS = {
    "param": "gathered parameters",
    "grad": "full gradients",
    "leaf": "gradients of leaves",
    "fill": "gradients of leaves that are added",
    "shard": "gradient shards",
    "own": "summed gradients",
    "left": "what rounding has left out",
    "second": "secondary shards",
    "cast": "casts of parameter shards",
    "copy": "copies of the state",
    "update": "what its update makes, and has from host memory",
}
"""What memory holds of a group, in words. What a transfer needs while it is under way is an item of the kind's name."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the table.

    Args:
        name: the word of the op that starts the transfer. ``wait NAME`` is the op that ends it.
        stage: when it starts: ``"gradient"`` once the gradient has been through the rows above, ``"updated"`` after
            the update, ``"read"`` before compute reads the parameters, ``"edge"`` where a value goes from one stage to
            another, ``"between"`` after some steps, ``"activation"`` around the backward of a unit that keeps on the
            host what its backward reads.
        staging: what memory that it needs while under way is called in pictures.
        each_microbatch: it runs in every microbatch that reduces gradients, not once a step.
        link: the link of ``Costs`` that it takes; empty for a copy that takes no link.
        spare: transfers of this kind that may be under way beyond ``Policy.reduces``. They hold shards, not whole
            gradients, so a further one costs little, and the link is never idle while the oldest is waited for.
        lane: the kind whose communicators carry it, which are never busy at the same time over the same axes, or take
            the same link anyway; empty where it has its own.
        slow: it takes the slower link. The transfer before it in the path is therefore waited for as soon as another
            of that kind begins: every compute by which this one begins later is one more in which its link is idle.
    """

    name: str
    stage: str
    staging: str
    each_microbatch: bool = False
    link: str = "link"
    spare: int = 0
    slow: bool = False
    lane: str = ""

    @property
    def wait(self) -> str:
        """The word of the op that ends the transfer."""
        return f"wait {self.name}"

    @property
    def role(self) -> str:
        """The role of the communicators that carry it."""
        return self.lane or self.name


_ROWS = (
    Kind("update_gather", "updated", "staging of updated ranges", lane="replica_reduce"),
    Kind("all_gather", "read", "staging of gathers"),
    Kind("regather", "read", "staging of gathers again", lane="all_gather"),
    Kind("reduce_scatter", "gradient", "staging of reductions", each_microbatch=True, link="reduces"),
    Kind("replica_reduce", "gradient", "staging of sums", link="reduces", spare=1, slow=True),
    Kind("stage_sum", "gradient", "staging of sums over stages", link="reduces", spare=1, slow=True),
    Kind("offload", "gradient", "staging of copies", link="", spare=1),
    Kind("send", "edge", "staging of sends", each_microbatch=True),
    Kind("receive", "edge", "received values", each_microbatch=True),
    Kind("exchange", "between", "fragments under way"),
    Kind("activation_offload", "activation", "activations on their way to the host", each_microbatch=True, link=""),
    Kind("activation_fetch", "activation", "activations on their way back", each_microbatch=True, link=""),
)

KINDS = {row.name: row for row in _ROWS}
"""The table, by name. The order is that of a path: within a stage, each transfer follows those above it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer of a group. Sizes are bytes.

    Args:
        kind: a name in ``KINDS``.
        source: the item of memory that it reads, or ``"state"``. It ends with the wait, unless it is the target.
        target: the item that it writes, ``"state"`` or ``"host"``. An item is there from the start on.
        sent: what this rank sends.
        staging: memory that it needs while it is under way.
        axes: the mesh axes that it goes over, joined by ``+``. Transfers over the same axes share a link.
        late: its result is made in the staging, so the target is there only after the wait, when the source has gone.
        wire: the wire format of what travels; empty for that of the source. What is compressed is packed into the
            staging when the transfer starts: a source that is not the target, nor the state, ends there.

    Raises:
        PlanError: no such kind, or a negative size.
    """

    kind: str
    source: str
    target: str
    sent: int = 0
    staging: int = 0
    axes: str = ""
    late: bool = False
    wire: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise schedule_refusals.bad_program([f"{self.kind!r} is not a kind of transfer: {', '.join(KINDS)}"])
        if self.row.stage == "between" and not isinstance(self, PeriodicTransfer):
            raise schedule_refusals.bad_program([f"{self.kind}: it runs between steps: give a PeriodicTransfer"])
        if self.row.stage == "activation":
            raise schedule_refusals.bad_program([f"{self.kind}: it moves what a unit keeps, and is in no group's path"])
        if any(mark.isspace() for mark in self.wire):
            raise schedule_refusals.bad_program([f"{self.kind}: {self.wire!r} is not the name of a wire format"])
        if min(self.sent, self.staging) < 0:
            raise schedule_refusals.bad_program(
                [f"{self.kind}: {self.sent} bytes sent, {self.staging} staged; both must be >= 0"]
            )

    @property
    def spent(self) -> bool:
        """Tell whether its source ends with its start: what travels is a packed copy of it."""
        return bool(self.wire) and self.source not in (STATE, HOST, EDGE, self.target)

    @property
    def row(self) -> Kind:
        """Its row of the table."""
        return KINDS[self.kind]


@dataclass(frozen=True, slots=True)
class PeriodicTransfer(Transfer):
    """A transfer between steps: it leaves after some of them, and travels while the next ones run.

    Args:
        every: the steps from one to the next.
        first: the first step after which it leaves, modulo ``every``.
        delay: the steps for which it travels.

    Raises:
        PlanError: as a transfer, or steps that it cannot have.
    """

    every: int = 1
    first: int = 0
    delay: int = 0

    def __post_init__(self) -> None:
        Transfer.__post_init__(self)
        if not 0 <= self.first < self.every > self.delay >= 0:
            steps = f"every={self.every} first={self.first} delay={self.delay}"
            raise schedule_refusals.bad_program([f"{self.kind}: {steps}; first and delay must be from 0 to every - 1"])

    def held(self, step: int) -> bool:
        """Tell whether it is under way in a step or, without a delay, after it."""
        return (step - self.first - bool(self.delay)) % self.every < max(self.delay, 1)


def started(op: str) -> Kind | None:
    """The kind of transfer that an op of this kind starts."""
    return KINDS.get(op)


def awaited(op: str) -> Kind | None:
    """The kind of transfer that an op of this kind waits for."""
    return KINDS.get(op[5:]) if op.startswith("wait ") else None


def moves(op: str) -> bool:
    """Tell whether an op of this kind starts a transfer, or waits for one."""
    return (started(op) or awaited(op)) is not None


def item_words() -> dict[str, str]:
    """Items of memory in words: those of groups, and the staging of each kind of transfer."""
    return {**ITEMS, **{row.name: row.staging for row in KINDS.values()}}
