"""A step beside plain PyTorch: whole leaves, one at a time, on all ranks alike."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fshard.collectives.group import Group as Ranks
from fshard.collectives.raw import gather
from fshard.metrics import Metrics
from fshard.optim.around import CARRIED
from fshard.proof.plain import Plainly
from fshard.proof.record import gap
from fshard.proof.report import Row, Tolerance, number_row
from fshard.proof.watched import Watched
from fshard.runtime.comm import Lane
from fshard.runtime.comm.exchange import exchange_bytes
from fshard.sharding.layout import Piece
from fshard.sharding.mesh import Mesh
from fshard.state.entries import Entry, entries, gradients
from fshard.state.init import take
from fshard.state.move import whole_entry
from fshard.state.train_state import TrainState

FLOOR = 1e-3
"""Differences of gradients that are allowed beside the largest of all leaves, as a part of what is allowed beside the
largest of a leaf: what should be zero is the rounding of what cancels."""

COPIES = "ranks hold different values of it"


@dataclass
class Comparison:
    """What a step made of a state, beside what plain PyTorch makes of it.

    Attributes:
        watched: the step.
        state: what it was given.
        following: what it returned.
        metrics: what it told.
        plain: the loss and the gradients of plain PyTorch.
        tolerance: how far numbers may be apart.
        lane: the control lane.
        other: the entries whose copies on this rank are not those of other ranks.
    """

    watched: Watched
    state: TrainState
    following: TrainState
    metrics: Metrics
    plain: Plainly
    tolerance: Tolerance
    lane: Lane
    other: list[str] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """All comparisons. Collective."""
        self.units = {leaf.path: group.unit for group in self.watched.plan.groups for leaf in group.leaves}
        self.dtypes = sorted(
            {d for g in self.watched.plan.groups for d in (g.dtype, g.compute_dtype, g.reduce_dtype)}, key=str
        )
        wide = [*self.dtypes, self.metrics.loss.dtype]
        rows = [number_row("loss", self.plain.loss, float(self.watched.seen.loss), self.tolerance, wide)]
        graded, norm = self._gradients()
        if self.watched.kept and not self.metrics.skipped:
            rows.append(number_row("grad_norm", norm, float(self.metrics.grad_norm), self.tolerance, wide))
        return self._alike([*rows, *graded, *self._updates()])

    def _gradients(self) -> tuple[list[Row], float]:
        """The gradient of the mean of each leaf, and the norm of all of them in plain PyTorch."""
        plan, kept = self.watched.plan, self.watched.kept
        mine = gradients(plan, kept) if kept else []
        theirs = gradients(plan, self._means())
        largest = self._largest(theirs)
        rows, squares = [], []
        self.norms = [0.0] * len(self.watched.options.clip.rules)
        for number, (entry, pieces) in enumerate(held(plan.mesh, theirs)):
            plain = whole_entry(plan.mesh, entry, pieces)
            squares.append(float(torch.linalg.vector_norm(plain)) ** 2)
            if not mine or self.metrics.skipped:
                continue
            step = whole_entry(plan.mesh, mine[number], pieces).double() * self.watched.mean
            path = entry.name.removeprefix("grad.")
            self.norms[self.watched.options.clip.number(path)] += float(torch.linalg.vector_norm(step)) ** 2
            far, size = gap(step, plain)
            limit = self.tolerance.limit(max(size, FLOOR * largest), self.dtypes)
            rows.append(Row(entry.name, _norm(plain), _norm(step), far, limit, self.units[path]))
        self.norms = [math.sqrt(square) for square in self.norms]
        return rows, math.sqrt(math.fsum(squares))

    def _means(self) -> dict[int, Tensor]:
        """The gradient of the mean in plain PyTorch, with what earlier steps carried, as this rank keeps it."""
        found, watched = self.plain, self.watched
        every, shards = watched._decide.every, self.state.finished()
        out = {}
        for group, total in found.sums.items():
            mean = total * (watched.divided / found.count)
            if every > 1 and watched._decide.updates(self.state.step):
                carried = shards[group].opt[CARRIED].to(total)
                if found.weighted:
                    mean = (total * watched.divided + carried) / (found.count + self.state.count)
                else:
                    mean = (mean + carried) / every
            out[group] = mean
        return out

    def _largest(self, found: Sequence[Entry]) -> float:
        mine = max((float(entry.tensor.abs().max()) for entry in found if entry.tensor.numel()), default=0.0)
        rows = exchange_bytes(self.lane, repr(mine).encode()) if self.lane.size > 1 else [repr(mine).encode()]
        return max(0.0 if math.isnan(value) else value for value in map(float, rows))

    def _updates(self) -> Iterator[Row]:
        """Each leaf of the updated state, by the optimizer on whole leaves and the step's own gradient."""
        plan = self.watched.plan
        before, after = entries(self.state), {entry.name: entry for entry in entries(self.following)}
        source = self.watched.kept or self._means()
        grads = {entry.name: entry for entry in gradients(plan, source)} if not self.metrics.skipped else {}
        where = {entry.name: pieces for entry, pieces in held(plan.mesh, [*before, *grads.values()])}
        for path in plan.leaves:
            names = [e.name for e in before if e.name == f"params.{path}" or _is_of(e.name, path, plan.leaves)]
            old = {e.name: self._whole(e, where[e.name]) for e in before if e.name in names}
            new = {name: self._whole(after[name], where[name]) for name in names}
            want = {name: value.clone() for name, value in old.items()}
            entry = grads.get(f"grad.{path}")
            if entry is not None and want[f"params.{path}"].numel():  # no rank holds state of an empty leaf
                self._apply(path, want, whole_entry(plan.mesh, entry, where[entry.name]))
            for name in names:
                far, _ = gap(new[name], want[name])
                limit = self._limit(old[name], want[name], name == f"params.{path}")
                yield Row(name, _norm(want[name]), _norm(new[name]), far, limit, self.units[path])

    def _apply(self, path: str, leaf: dict[str, Tensor], grad: Tensor) -> None:
        """The optimizer's update of one whole leaf, in place."""
        watched, step = self.watched, self.state.step
        rule = watched.options.clip.number(path)
        if not watched._decide.updates(step):
            factor = watched.carry if watched.kept else 1.0
        else:
            factor = watched.mean if watched.kept else 1.0
            factor *= watched.options.clip.factors(self.norms)[rule] if watched.kept else 1.0
        param = leaf[f"params.{path}"].view(-1)
        states = {
            name.removeprefix("opt.").removesuffix(f".{path}"): x.view(-1)
            for name, x in leaf.items()
            if name[:4] == "opt."
        }
        late = self.state.late.get(path, 0)
        more: dict[str, Any] = {"late": late} if late else {}
        hyper = watched.opt.hyper(path, watched.plan.leaves[path].shape)
        scaled = (grad.double() * factor).to(param.dtype).reshape(-1)
        with torch.no_grad():
            watched.opt.update([param], [scaled], [states], step=step + 1, hyper=hyper, **more)

    def _limit(self, old: Tensor, want: Tensor, param: bool) -> float:
        """What is allowed beside how far the update goes, and the last bits of what is updated."""
        if not want.dtype.is_floating_point:
            return self.tolerance.limit(0.0, [want.dtype])
        (moved, _), (_, size) = gap(want, old), gap(old, want)
        rough = 1.0 if self.watched.kept else 100.0
        return rough * self.tolerance.limit(moved, [want.dtype]) + 4 * torch.finfo(want.dtype).eps * size

    def _whole(self, entry: Entry, pieces: list[Piece]) -> Tensor:
        whole = whole_entry(self.watched.plan.mesh, entry, pieces)
        own = entry.tensor.to(whole.device).reshape(-1)
        if gap(take(whole, entry.piece), own)[0] > 0:
            self.other.append(entry.name)
        return whole

    def _alike(self, rows: list[Row]) -> list[Row]:
        """The rows, wrong on all ranks where they are wrong on any."""
        wrong = {row.name: "" for row in rows if not row.right} | dict.fromkeys(self.other, COPIES)
        texts = (
            exchange_bytes(self.lane, json.dumps(wrong).encode())
            if self.lane.size > 1
            else [json.dumps(wrong).encode()]
        )
        found: dict[str, str] = {}
        for said in map(json.loads, texts):
            found.update({name: found.get(name) or why for name, why in said.items()})
        return [
            replace(row, note=found[row.name] or ("" if not row.right else "differs on another rank"))
            if row.name in found
            else row
            for row in rows
        ]


def held(mesh: Mesh, found: Sequence[Entry]) -> list[tuple[Entry, list[Piece]]]:
    """Entries with what each rank holds of them. Collective, one exchange."""
    rows = [
        n for entry in found for n in (*entry.piece.offset, *entry.piece.shape, entry.piece.start, entry.piece.stop)
    ]
    row = torch.tensor(rows, dtype=torch.int64, device=mesh.device)
    ranks = Ranks(mesh, mesh.axis_names)
    table = iter(zip(*(gather(ranks, row)() if mesh.size > 1 else row.view(1, -1)).tolist(), strict=True))
    out = []
    for entry in found:
        dims = len(entry.piece.shape)
        columns = [next(table) for _ in range(2 * dims + 2)]
        pieces = [Piece(row[:dims], row[dims : 2 * dims], *row[2 * dims :]) for row in zip(*columns, strict=True)]
        out.append((entry, pieces))
    return out


def _is_of(name: str, path: str, leaves: Mapping[str, Any]) -> bool:
    """Whether an entry is what an optimizer keeps of a leaf: the longest path that its name ends with."""
    parts = name.split(".")
    if parts[0] != "opt":
        return False
    return next((p for i in range(2, len(parts)) if (p := ".".join(parts[i:])) in leaves), None) == path


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.to(torch.complex128 if x.is_complex() else torch.float64)))
