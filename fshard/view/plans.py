"""``fs.view.plan``: what every rank holds of a model, as text, in a notebook, and as a picture."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fshard import markup
from fshard.arguments import expect, size_text
from fshard.sharding.plan import Plan
from fshard.sharding.plan_table import held_of_units, rank_bars, rank_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR = 24
"""Characters of the longest bar of the text."""


@dataclass(frozen=True)
class PlanView:
    """The bytes of parameters of each unit on each rank. ``print`` it; notebooks show it; ``figure()`` draws it.

    Attributes:
        units: their names.
        held: bytes by unit and rank.
    """

    plan: Plan
    units: tuple[str, ...]
    held: tuple[tuple[int, ...], ...]

    @property
    def totals(self) -> list[int]:
        """The bytes of each rank."""
        return [sum(column) for column in zip(*self.held, strict=True)]

    def __str__(self) -> str:
        ranks = range(self.plan.mesh.size)
        if len(ranks) <= 8:
            head = ["unit", *(f"rank {rank}" for rank in ranks)]
            rows = [[unit, *(f"{size:,}" for size in row)] for unit, row in zip(self.units, self.held, strict=True)]
        else:
            head = ["unit", "least", "most"]
            rows = [[unit, f"{min(row):,}", f"{max(row):,}"] for unit, row in zip(self.units, self.held, strict=True)]
        table = markup.aligned([head, *rows], [n < 1 for n in range(len(head))])
        return "\n".join([self._title(), *table, "", *self._bars()])

    def _repr_html_(self) -> str:
        bars = rank_bars(self.plan.mesh, dict(zip(self.units, self.held, strict=True)))
        names = self.units if len(self.units) <= len(markup.COLORS) else ()
        return markup.shown(self._title(), bars, markup.legend(names))

    def figure(self) -> "Figure":
        """A picture, drawn by matplotlib: a bar for each rank, in the order of the mesh, with its units.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from fshard.view.figures import bar_figure  # matplotlib takes a second to import

        labels = [f"rank {rank_text(self.plan.mesh, rank)}" for rank in range(self.plan.mesh.size)]
        return bar_figure(self._title(), labels, self.units, self.held)

    def _title(self) -> str:
        mesh = self.plan.mesh
        axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
        return f"bytes of parameters at rest on {mesh.size} ranks, {axes}"

    def _bars(self) -> list[str]:
        most = max([*self.totals, 1])
        lines = []
        for rank, total in enumerate(self.totals):
            place = ", ".join(
                f"{name}={at}" for name, at in zip(self.plan.mesh.axis_names, self.plan.mesh.coords(rank), strict=True)
            )
            lines.append(f"rank {rank:<3} {place}  {'#' * round(total / most * BAR):<{BAR}} {size_text(total)}")
        return lines


def plan(plan: Plan) -> PlanView:
    """Show what every rank holds of the parameters of a model. Local: any mesh will do.

    Args:
        plan: what ``fs.make_plan`` returned.

    Raises:
        PlanError: it is not a plan.

    >>> params = {"embed": {"w": torch.zeros(8, 4)}, "head": torch.zeros(4)}
    >>> mesh = fs.abstract_mesh((2,), ("data",))
    >>> rules = [("embed.*", fs.fsdp("data")), ("head", fs.P())]
    >>> print(fs.view.plan(fs.make_plan(params, mesh, rules, units=["embed"])))
    bytes of parameters at rest on 2 ranks, data=2
    unit   rank 0  rank 1
    embed      64      64
    root       16      16
    <BLANKLINE>
    rank 0   data=0  ######################## 80 B
    rank 1   data=1  ######################## 80 B
    """
    expect("fs.view.plan(plan)", [("plan", plan, Plan, "what fs.make_plan returned")])
    units = held_of_units(plan.mesh, plan.places(), plan.stages)
    return PlanView(plan, tuple(units), tuple(units.values()))
