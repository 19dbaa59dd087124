"""``fs.view.sharding``: which rank holds which part of one tensor, as text, in a notebook, and as a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fshard import markup
from fshard.arguments import described
from fshard.collectives.scope import SCOPE
from fshard.errors import PlanError, TreeError
from fshard.patterns import meant_by
from fshard.sharding.layout import Piece, box
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.sharding.plan_table import rank_text
from fshard.sharding.spec import P, Shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS, COLUMNS = 12, 16
"""Cells of a picture, at most. A larger tensor is drawn coarser: a cell has the ranks that hold its middle."""


@dataclass(frozen=True)
class ShardingView:
    """Parts of a tensor by the ranks that hold them. ``print`` it; notebooks show it; ``figure()`` draws it.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        spec: how it is cut.
        pieces: of each rank, in rank order.
    """

    name: str
    shape: Shape
    spec: P
    mesh: Mesh
    pieces: tuple[Piece, ...]

    @property
    def sizes(self) -> tuple[int, int]:
        """The tensor as rows and columns: its first dim, and all others. A tensor of one dim is one row."""
        if len(self.shape) < 2:
            return 1, math.prod(self.shape)
        return self.shape[0], math.prod(self.shape[1:])

    def holders(self, element: int) -> tuple[int, ...]:
        """The ranks that hold the element with this number, in row-major order."""
        return tuple(rank for rank, piece in enumerate(self.pieces) if _holds(piece, self.shape, element))

    def cells(self) -> list[list[tuple[int, ...]]]:
        """The ranks of each cell of the picture, row by row."""
        height, width = self.sizes
        if not height * width:
            return []
        rows, columns = min(height, ROWS), min(width, COLUMNS)
        return [
            [
                self.holders(int((row + 0.5) * height / rows) * width + int((column + 0.5) * width / columns))
                for column in range(columns)
            ]
            for row in range(rows)
        ]

    def __str__(self) -> str:
        cells = [[_ranks(ranks) for ranks in row] for row in self.cells()]
        if not cells:
            return f"{self._title()}\nno elements"
        wide = max(len(text) for row in cells for text in row)
        line = "+" + "+".join(["-" * (wide + 2)] * len(cells[0])) + "+"
        lines = [line]
        for number, row in enumerate(cells):
            lines.append("|" + _joined([f" {text:^{wide}} " for text in row], row))
            below = cells[number + 1] if number + 1 < len(cells) else None
            lines.append(line if below is None else "+" + _border(row, below, wide))
        return "\n".join([self._title(), *lines, *self._legend()])

    def _repr_html_(self) -> str:
        parts = [self._row(row) for row in self.cells()]
        grid = f'<div style="width:fit-content;border:1px solid #8a8f99">{"".join(parts)}</div>'
        held = [[rank_text(self.mesh, rank), f"{p.numel:,}", _range(p)] for rank, p in enumerate(self.pieces)]
        table = markup.table(["rank", "elements", "which"], held)
        return markup.shown(self._title(), grid, markup.fold(f"{len(held)} ranks", table))

    def figure(self) -> "Figure":
        """A picture, drawn by matplotlib.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from fshard.view.figures import cell_figure  # matplotlib takes a second to import

        return cell_figure(self._title(), self.cells(), self.mesh.size)

    def _title(self) -> str:
        axes = " x ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        return f"{self.name} {list(self.shape)} with {self.spec} on {axes}"

    def _legend(self) -> list[str]:
        height, width = self.sizes
        coarse = height > ROWS or width > COLUMNS
        kept = ", ".join(f"rank {rank}: {piece.numel:,}" for rank, piece in enumerate(self.pieces[:8]))
        more = f", and {len(self.pieces) - 8} more" if len(self.pieces) > 8 else ""
        scale = f"; {height} x {width} elements drawn as {min(height, ROWS)} x {min(width, COLUMNS)} cells"
        return [f"elements: {kept}{more}{scale if coarse else ''}"]

    def _row(self, row: Sequence[tuple[int, ...]]) -> str:
        spans: list[list[Any]] = []
        for ranks in row:
            if spans and spans[-1][0] == ranks:
                spans[-1][1] += 1
            else:
                spans.append([ranks, 1])
        cells = (
            f'<div title="{_ranks(ranks)}" style="width:{count * 28}px;height:20px;overflow:hidden;text-align:center;'
            f'background:{markup.COLORS[min(ranks, default=7) % len(markup.COLORS)]};color:#fff">{_ranks(ranks)}</div>'
            for ranks, count in spans
        )
        return f'<div style="display:flex">{"".join(cells)}</div>'


def sharding(of: Any, leaf: Any, *, mesh: Mesh | None = None) -> ShardingView:
    """Show which rank holds which part of a tensor (``jax.debug.visualize_array_sharding``). Local.

    Args:
        of: a plan; or a tensor, inside of a function of ``fs.shard_map`` or ``mesh.run``: this rank's slice.
        leaf: the path of a leaf of the plan; or the spec of the slice.
        mesh: for a slice, the mesh; None for that of the function around.

    Raises:
        TreeError: the plan has no such leaf.
        PlanError: arguments of other types, or a slice where no mesh is in scope.

    >>> mesh = fs.abstract_mesh((2, 2), ("replica", "data"))
    >>> rules = [("w", fs.P("data"))]
    >>> plan = fs.make_plan({"w": torch.zeros(4, 3)}, mesh, rules, batch=fs.P(("replica", "data")))
    >>> print(fs.view.sharding(plan, "w"))
    w [4, 3] with P('data') on replica=2 x data=2
    +-----+-----+-----+
    | 0 2   0 2   0 2 |
    +     +     +     +
    | 0 2   0 2   0 2 |
    +-----+-----+-----+
    | 1 3   1 3   1 3 |
    +     +     +     +
    | 1 3   1 3   1 3 |
    +-----+-----+-----+
    elements: rank 0: 6, rank 1: 6, rank 2: 6, rank 3: 6
    """
    if isinstance(of, Plan) and isinstance(leaf, str):
        return _of_leaf(of, leaf)
    if isinstance(of, Tensor) and isinstance(leaf, P):
        return _of_slice(of, leaf, mesh)
    raise PlanError(
        f"fs.view.sharding takes a plan and the path of a leaf, or a rank's slice and its spec, and was given "
        f"{described(of)} and {described(leaf)}"
    )


def _of_leaf(plan: Plan, path: str) -> ShardingView:
    places = plan.places()
    if path not in places:
        raise TreeError(f"the plan has no leaf {path!r}{meant_by(path, plan.leaves)}")
    (group, number), leaf = places[path], plan.leaves[path]
    pieces = [group.piece(number, plan.mesh, rank) for rank in range(plan.mesh.size)]
    if plan.stages is not None:  # ranks of other stages hold nothing
        homes, axis = plan.stages.positions(path), plan.stages.axis
        none = Piece((0,) * len(leaf.shape), (0,) * len(leaf.shape), 0, 0)
        pieces = [each if plan.mesh.index(axis, rank) in homes else none for rank, each in enumerate(pieces)]
    return ShardingView(path, leaf.shape, leaf.at_rest, plan.mesh, tuple(pieces))


def _of_slice(x: Tensor, spec: P, mesh: Mesh | None) -> ShardingView:
    scope = SCOPE.get()
    if mesh is None and scope is None:
        raise PlanError("fs.view.sharding(slice, spec): no mesh is in scope here: give mesh=")
    seen = mesh if mesh is not None else scope.mesh if scope is not None else None
    assert seen is not None
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec.dims]
    entries += [()] * (x.dim() - len(entries))
    parts = [seen.axis_size(axes) if axes else 1 for axes in entries]
    shape = tuple(size * count for size, count in zip(x.shape, parts, strict=True))
    boxes = [box(shape, spec, seen, rank) for rank in range(seen.size)]
    pieces = tuple(Piece(offset, size, 0, math.prod(size)) for offset, size in boxes)
    return ShardingView("slice", shape, spec, seen, pieces)


def _holds(piece: Piece, shape: Shape, element: int) -> bool:
    """Tell whether a piece has the element with this row-major number in the whole tensor."""
    at, inside = element, 0
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for dim, stride in enumerate(strides):
        index, at = divmod(at, stride)
        local = index - piece.offset[dim]
        if not 0 <= local < piece.shape[dim]:
            return False
        inside = inside * piece.shape[dim] + local
    return piece.start <= inside < piece.stop


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks)) if len(ranks) <= 6 else f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"


def _range(piece: Piece) -> str:
    inside = "x".join(map(str, piece.shape)) or "1"
    where = f" at {list(piece.offset)}" if any(piece.offset) else ""
    return f"{piece.start} to {piece.stop} of {inside}{where}"


def _joined(texts: Sequence[str], row: Sequence[str]) -> str:
    """A line of cells, with a border where the ranks change."""
    out = ""
    for number, text in enumerate(texts):
        last = number + 1 == len(texts)
        out += text + ("|" if last or row[number] != row[number + 1] else " ")
    return out


def _border(row: Sequence[str], below: Sequence[str], wide: int) -> str:
    """The line between two rows, drawn where the ranks change."""
    return "".join((("-" if one != other else " ") * (wide + 2)) + "+" for one, other in zip(row, below, strict=True))
