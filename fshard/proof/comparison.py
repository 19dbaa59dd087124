"""A step compared with plain PyTorch: whole leaves, one at a time, on all ranks."""

import functools
import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fshard.interchange.export_plan import pieces_of_ranks
from fshard.optim.around import CARRIED
from fshard.proof.plain_torch import PlainResult
from fshard.proof.verification import Row, Tolerance, number_row
from fshard.proof.watched_step import ProofStep
from fshard.runtime.comm import Communicator, exchange_bytes
from fshard.runtime.graphs.graph_proof import gap
from fshard.runtime.memory.optimizer_layout import BASIS, KEPT, MASTER, RESIDUAL
from fshard.sharding.layout import Piece
from fshard.sharding.plan import Plan
from fshard.sharding.wire import FIELDS
from fshard.state.entries import entries
from fshard.state.init import take
from fshard.state.move import whole_entry
from fshard.state.pieces import Entry, gradients, split_name
from fshard.state.settle import settle
from fshard.state.train_state import TrainState
from fshard.training.metrics import Metrics

FLOOR = 1e-3
"""The tolerance of a leaf's gradient by the largest gradient of all leaves, relative to that by its own largest value:
a gradient that should be zero holds the rounding errors of terms that cancel."""

COPIES = "ranks hold different values of it"


@dataclass
class Comparison:
    """A step's results and those of plain PyTorch.

    Attributes:
        unequal: the entries whose copies differ between this rank and others.
        norms: the norm of the step's gradients for each rule of clipping.
    """

    watched: ProofStep
    state: TrainState  # before the step
    following: TrainState  # after it
    metrics: Metrics
    plain: PlainResult
    tolerance: Tolerance
    comm: Communicator
    unequal: list[str] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @functools.cached_property
    def units(self) -> dict[str, str]:
        """The unit of each leaf."""
        return {leaf.path: group.unit for group in self.watched.plan.groups for leaf in group.leaves}

    @functools.cached_property
    def dtypes(self) -> list[torch.dtype]:
        """All dtypes of parameters, computation and reductions."""
        groups = self.watched.plan.groups
        return sorted({d for g in groups for d in (g.dtype, g.compute_dtype, g.reduce_dtype)}, key=str)

    @functools.cached_property
    def graded(self) -> list[torch.dtype]:
        """Those, and the formats in which gradients travel: one that lies between two codes may go to either."""
        groups = self.watched.plan.groups
        reduced = [form for g in groups for kind, form in g.wires.items() if FIELDS[kind] == "reduce"]
        forms = [form for form in reduced if not form.feedback]  # what these leave out is known
        return [*self.dtypes, *(form.codes.tolerance for form in forms)]

    def rows(self) -> list[Row]:
        """All comparisons. Collective."""
        wide, graded_wide = [*self.dtypes, self.metrics.loss.dtype], [*self.graded, self.metrics.loss.dtype]
        rows = [number_row("loss", self.plain.loss, float(self.watched.seen.loss), self.tolerance, wide)]
        graded, norm = self._gradients()
        if self.watched.kept and not self.metrics.skipped:
            rows.append(number_row("grad_norm", norm, float(self.metrics.grad_norm), self.tolerance, graded_wide))
        return self._alike([*rows, *graded, *self._updates()])

    def _gradients(self) -> tuple[list[Row], float]:
        """The comparisons of gradients of the mean, and the norm of all gradients in plain PyTorch."""
        plan, kept = self.watched.plan, self.watched.kept
        mine = gradients(plan, kept) if kept else []
        theirs = gradients(plan, self._means())
        largest = self._largest(theirs)
        before, after = self._left(self.state), self._left(self.following)
        rows, squares = [], []
        self.norms = [0.0] * len(self.watched.options.clip.rules)
        for number, (entry, pieces) in enumerate(zip(theirs, pieces_of_ranks(plan.mesh, theirs), strict=True)):
            plain, path = whole_entry(plan.mesh, entry, pieces), entry.name.removeprefix("grad.")
            if path in before and not self.metrics.skipped:
                plain = plain + (before[path] - after[path])
            squares.append(float(torch.linalg.vector_norm(plain)) ** 2)
            if not mine or self.metrics.skipped:
                continue
            step = whole_entry(plan.mesh, mine[number], pieces).double() * self.watched.mean
            self.norms[self.watched.options.clip.number(path)] += float(torch.linalg.vector_norm(step)) ** 2
            far, size = gap(step, plain)
            limit = self.tolerance.limit(max(size, FLOOR * largest), self.graded)
            rows.append(Row(entry.name, _norm(plain), _norm(step), far, limit, self.units[path]))
        self.norms = [math.sqrt(square) for square in self.norms]
        return rows, math.sqrt(math.fsum(squares))

    def _left(self, state: TrainState) -> dict[str, Tensor]:
        """Return what rounding has left out of the gradients of all replicas, by leaf."""
        plan, count = self.watched.plan, self.plain.count if self.plain.weighted else 1.0
        found = [entry for entry in entries(settle(state)) if entry.rows == "sum"]
        pieces = pieces_of_ranks(plan.mesh, found)
        return {
            split_name(entry.name, plan.leaves)[1]: whole_entry(plan.mesh, entry, where).sum(0) / count
            for entry, where in zip(found, pieces, strict=True)
        }

    def _means(self) -> dict[int, Tensor]:
        """This rank's gradient of the mean in plain PyTorch, with the gradients carried from earlier steps."""
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
        values = map(float, exchange_bytes(self.comm, repr(mine).encode()))
        return max(0.0 if math.isnan(value) else value for value in values)

    def _updates(self) -> Iterator[Row]:
        """The comparisons of the updated state with the optimizer's update of whole leaves by the step's gradient."""
        plan = self.watched.plan
        before = entries(self.state, plan.leaves)
        after = {entry.name: entry for entry in entries(settle(self.following), plan.leaves)}
        source = self.watched.kept or self._means()
        grads = {entry.name: entry for entry in gradients(plan, source)} if not self.metrics.skipped else {}
        listed = [*before, *grads.values()]
        where = {e.name: pieces for e, pieces in zip(listed, pieces_of_ranks(plan.mesh, listed), strict=True)}
        for path, parts in _by_leaf(before, plan).items():
            old = {e.name: self._whole(e, where[e.name]) for e in parts}
            new = {name: self._whole(after[name], where[name]) for name in old}
            want = {name: value.clone() for name, value in old.items()}
            grad = grads.get(f"grad.{path}")
            if grad is not None and want[f"params.{path}"].numel():  # no rank holds state of an empty leaf
                self._apply(path, want, whole_entry(plan.mesh, grad, where[grad.name]))
            for name in _exact(path, old):
                far, _ = gap(new[name], want[name])
                limit = self._limit(old[name], want[name], name == f"params.{path}")
                yield Row(name, _norm(want[name]), _norm(new[name]), far, limit, self.units[path])

    def _apply(self, path: str, leaf: dict[str, Tensor], grad: Tensor) -> None:
        """The optimizer's update of one whole leaf, in place."""
        watched, step = self.watched, self.state.step
        rule = watched.options.clip.number(path)
        if not watched.kept:
            factor = 1.0
        elif watched._decide.updates(step):
            factor = watched.mean * watched.options.clip.factors(self.norms)[rule]
        else:
            factor = watched.carry
        master = f"opt.{MASTER}.{path}"  # what others hold of it is rounded
        param = leaf[master if master in leaf else f"params.{path}"].view(-1)
        kept = {f"opt.{name}.{path}" for name in KEPT}
        own = {name: x.view(-1) for name, x in leaf.items() if name.startswith("opt.") and name not in kept}
        states = {name.removeprefix("opt.").removesuffix(f".{path}"): x for name, x in own.items()}
        late = self.state.late.get(path, 0)
        more: dict[str, Any] = {"late": late} if late else {}
        hyper = watched.opt.hyper(path, watched.plan.leaves[path].shape)
        scaled = (grad.double() * factor).to(param.dtype).reshape(-1)
        with torch.no_grad():
            watched.opt.update([param], [scaled], [states], step=step + 1, hyper=hyper, **more)

    def _limit(self, old: Tensor, want: Tensor, param: bool) -> float:
        """The largest difference that is allowed, by the size of the update and the last bits of the value."""
        if not want.dtype.is_floating_point:
            return self.tolerance.limit(0.0, [want.dtype])
        (moved, _), (_, size) = gap(want, old), gap(old, want)
        rough = 1.0 if self.watched.kept else 100.0
        return rough * self.tolerance.limit(moved, [want.dtype]) + 4 * torch.finfo(want.dtype).eps * size

    def _whole(self, entry: Entry, pieces: list[Piece]) -> Tensor:
        whole = whole_entry(self.watched.plan.mesh, entry, pieces)
        own = entry.tensor.to(whole.device).reshape(-1)
        if gap(take(whole, entry.piece), own)[0] > 0:
            self.unequal.append(entry.name)
        return whole

    def _alike(self, rows: list[Row]) -> list[Row]:
        """The rows, marked as wrong on all ranks if they are wrong on any."""
        wrong = {row.name: "" for row in rows if not row.right} | dict.fromkeys(self.unequal, COPIES)
        found: dict[str, str] = {}
        for said in map(json.loads, exchange_bytes(self.comm, json.dumps(wrong).encode())):
            found.update({name: found.get(name) or why for name, why in said.items()})
        notes = {
            row.name: found[row.name] or "differs on another rank" * row.right for row in rows if row.name in found
        }
        return [replace(row, note=notes[row.name]) if row.name in notes else row for row in rows]


def _by_leaf(found: Sequence[Entry], plan: Plan) -> dict[str, list[Entry]]:
    """The entries of a state by leaf."""
    out: dict[str, list[Entry]] = {path: [] for path in plan.leaves}
    for entry in found:
        kind, _, path = entry.name.partition(".")
        out[path if kind == "params" else split_name(entry.name, plan.leaves)[1]].append(entry)
    return out


def _exact(path: str, names: Collection[str]) -> list[str]:
    """The entries of a leaf that an update determines: not what rounding leaves, nor what it makes of exact values."""
    rounded = {
        f"opt.{RESIDUAL}.{path}",
        f"opt.{BASIS}.{path}",
        f"params.{path}" if f"opt.{MASTER}.{path}" in names else "",
    }
    return [name for name in names if name not in rounded]


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.to(torch.complex128 if x.is_complex() else torch.float64)))
