"""The findings of a search: options, and the table of them all."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fshard import markup
from fshard.arguments import size_text
from fshard.schedule.candidates import PolicyTask
from fshard.schedule.policy import Policy
from fshard.schedule.simulate import time_text
from fshard.sharding.mesh import Mesh
from fshard.sharding.wire import Wire

SHOWN = 12
"""Rows that ``print`` shows."""

EXACT = Wire()
"""The formats of a plan that has none."""


@dataclass(frozen=True)
class Option:
    """A mesh, what is computed again, the formats of what travels, and the best policy for them.

    Attributes:
        mesh: without processes.
        remat: as for ``fs.make_train_step``.
        wire: as for ``fs.make_plan``.
        policy: the fastest that fits; the one that holds least, if none does.
        peak_bytes: the most that a rank holds, state included.
        seconds: of a step.
        exposed: seconds of it in which a device waits for transfers.
        rows_per_s: rows of the global batch a second, along its dim 0.
        mfu: operations of the model to those that the devices could do.
        fits: whether a device has as much memory.
        shared: ranks that have parts of the same rows, where the plan cuts further dims of the batch.

    >>> job = {"model": {"w": torch.empty(64, 64, device="meta")}, "batch": torch.empty(8, 64, device="meta")}
    >>> job["loss"] = lambda params, x: (x @ params["w"]).square().mean()
    >>> option = fs.sim.search(job, 2, fs.sim.hardware("a100", link="eth25"), remats=[None]).best
    >>> option.shape, option.fits
    ('data=2', True)
    """

    mesh: Mesh
    remat: Any
    wire: Wire
    policy: Policy
    peak_bytes: int
    seconds: float
    exposed: float
    rows_per_s: float
    mfu: float
    fits: bool
    shared: int = 1

    @property
    def shape(self) -> str:
        """The mesh in words: ``replica=4,data=8``, as ``fshard plan --mesh`` takes it."""
        return shape_of(self.mesh)

    @property
    def wire_words(self) -> str:
        """The formats in words."""
        return words_of(self.wire)


@dataclass(frozen=True)
class Search:
    """The result of a search. ``print`` it.

    Attributes:
        options: those that fit first, and of these the one with most rows a second first, longer ones the more.
        refused: meshes, and formats on them, that the plan or the program refused, and why.
        words: what the step would run on.
        task: what policies were tried for in the first option.

    >>> job = {"model": {"w": torch.empty(64, 64, device="meta")}, "batch": torch.empty(8, 64, device="meta")}
    >>> job["loss"] = lambda params, x: (x @ params["w"]).square().mean()
    >>> found = fs.sim.search(job, 2, fs.sim.hardware("a100", link="eth25"), remats=[None])
    >>> print(found)
    mesh    remat ...
    """

    options: Sequence[Option]
    refused: Mapping[str, str] = field(default_factory=dict)
    words: str = ""
    task: PolicyTask | None = field(default=None, repr=False, compare=False)

    @property
    def best(self) -> Option:
        """The first of all."""
        return self.options[0]

    @property
    def head(self) -> tuple[str, ...]:
        """The heads of the table's columns. Formats have one where any are tried."""
        return ("mesh", "remat", *["wire"] * self._formats, *COLUMNS)

    @property
    def _formats(self) -> bool:
        return any(each.wire != EXACT for each in self.options)

    def table(self) -> Iterator[tuple[str, ...]]:
        """A row for each option."""
        for each in self.options:
            yield (
                each.shape,
                str(each.remat or "none"),
                *[each.wire_words] * self._formats,
                time_text(each.seconds),
                f"{each.exposed / each.seconds:.1%}" if each.seconds else "",
                f"{each.rows_per_s:,.1f}",
                f"{each.mfu:.1%}",
                size_text(each.peak_bytes) + ("" if each.fits else ", too much"),
                str(each.policy),
            )

    def __str__(self) -> str:
        rows = [self.head, *self.table()][: 1 + SHOWN]
        told = [line.rstrip() for line in markup.aligned(rows, [True] * len(self.head))]
        told += [f"and {len(self.options) - SHOWN} more"] if len(self.options) > SHOWN else []
        told += [f"{shape}: {why}" for shape, why in self.refused.items()]
        return "\n".join(told)

    def _repr_html_(self) -> str:
        return markup.shown(self.words or "a search", markup.table(self.head, [list(row) for row in self.table()], 2))


COLUMNS = ("step", "exposed", "rows/s", "MFU", "peak memory", "policy")


def shape_of(mesh: Mesh) -> str:
    """The axes of a mesh and their sizes, in words."""
    return ",".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.sizes, strict=True))


def words_of(wire: Wire | str | None) -> str:
    """Formats in words, as ``fs.Wire`` takes them.

    >>> words_of(None), words_of("int8"), words_of(Wire(reduce={"replica": "int4"}))
    ('exact', 'int8', "reduce={'replica': 'int4'}")
    """
    if isinstance(wire, str):
        return wire
    return "exact" if wire in (None, EXACT) else repr(wire)[len("Wire(") : -1]
