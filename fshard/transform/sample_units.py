"""A loss of single samples as a function of all samples of a rank, and its units as units of all samples.

The loss of a sample runs under ``torch.vmap``, and so does the code between its units. The call of a unit leaves that
transform: the engine runs an ordinary unit, of tensors with a row for each sample, and sees where it begins, forward
and backward.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.collectives.scope import bind
from fshard.errors import BatchError, lines
from fshard.model.precision import Casting
from fshard.model.unit import Slot, Unit, attach, slot_of
from fshard.runtime.engine import Mean, leading_dims, read_loss
from fshard.runtime.engine.batch import check_cuttable
from fshard.sharding.plan import Plan
from fshard.torch_internals import batched, below_transforms, functorch, transforms_depth, without_function_mode
from fshard.transform.dual_units import Pair, TransformedUnits, joined, parted, refuse_views, traced_as
from fshard.transform.sample_layers import CaughtLayers, RowsOf, caught
from fshard.transform.sample_tape import OUTSIDE, Place, SampleTape
from fshard.transform.slopes import params_of

Row = Callable[[Any, list[Tensor]], Tensor]
"""A loss of parameters and of the tensors of one row."""


class SampleUnits(TransformedUnits):
    """Runs units of a loss of one sample, for all samples.

    Args:
        pairs: each leaf, as the engine has it, by path.
        tape: takes the gradients of samples.
        layers: runs layers that read leaves outside of units.
        known: the units made so far.
    """

    def __init__(
        self, pairs: Mapping[str, Pair], tape: SampleTape, layers: CaughtLayers, known: dict[Unit, Unit]
    ) -> None:
        super().__init__(pairs)
        self.tape, self.layers, self.known = tape, layers, known

    def handles(self, shapes: Mapping[str, tuple[int, ...]], casting: Casting | None) -> dict[str, Tensor]:
        """A handle for each leaf. ``shapes`` are those of whole leaves."""
        found = super().handles(shapes, casting)
        leaves = [self.pairs[path][0] for path in found]
        self.layers.leaves = caught([*found.values()], [*found], leaves)
        return found

    def dual(self, pair: Pair) -> Tensor:
        """A leaf once for each sample."""
        slot = slot_of(pair[0])
        assert slot is not None
        return rows_of(self.tape, self.tape.rows, OUTSIDE, slot.path, pair[0])

    def run(self, engine: Any, unit: Unit, held: list[Pair], given: Any) -> Any:
        """The result of a unit."""
        params, *rest = given
        leaves, spec = tree.flatten(rest)
        inputs = [_parts(x) for x in leaves]
        args, kwargs = tree.unflatten(spec, [x for x, _ in inputs])
        dims = [dim for x, dim in inputs if isinstance(x, Tensor)]
        if (made := self.known.get(unit)) is None:
            function = traced_as(functools.partial(sample_function, unit.fn, self.tape), unit.fn)
            vars(function)["tape"] = self.tape
            made = self.known[unit] = Unit(unit.name, function)
        at = tree.unflatten(tree.flatten(params)[1], [leaf for leaf, _ in held])
        with below_transforms(self.depth - 1), without_function_mode(self.layers):
            result = engine.call(made, at, (self.tape.rows, dims, args, kwargs), {})
        return tree.mapped(lambda x: batched(x, self.depth) if isinstance(x, Tensor) else x, result)


def sample_function(
    fn: Callable[..., Any],
    tape: SampleTape,
    params: Any,
    rows: int,
    dims: list[int | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A unit's result, of tensors with a row for each sample.

    Args:
        fn: the unit's function.
        tape: takes the gradients of samples.
        params: its parameters, without rows.
        rows: the number of samples.
        dims: the dim of samples of each tensor among the other arguments; None for one that all samples share.
        args: its other arguments.
        kwargs: those by keyword.
    """
    (leaves, at), (given, spec) = tree.flatten(params), tree.flatten((args, kwargs))
    slots = [slot for leaf in leaves if (slot := slot_of(leaf)) is not None]  # there is none in a trace
    paths: Sequence[Any] = [slot.path for slot in slots] or range(len(leaves))
    engine: Any = slots[0].engine if slots else None
    place, device = None if engine is None else engine.place, leaves[0].device
    places = [i for i, x in enumerate(given) if isinstance(x, Tensor)]
    structure: list[Any] = []
    if place is None:
        tape.tried()

    def of(_: Tensor, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        filled = list(given)
        for i, x in zip(places, inputs, strict=True):
            filled[i] = x
        args, kwargs = tree.unflatten(spec, filled)
        own = [rows_of(tape, rows, place, path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        with CaughtLayers(tape, rows, device.type, place, caught(own, paths, leaves)):
            made, found, others = parted(fn(tree.unflatten(at, own), *args, **kwargs))
        structure[:] = [made]
        return found, others

    some = torch.zeros(rows, device=device)
    found, others = torch.vmap(of, (0, dims))(some, [given[i] for i in places])
    refuse_views(getattr(fn, "__name__", "unit"), found, leaves)
    return joined(structure[0], found, others)


def rows_of(tape: SampleTape, rows: int, place: Place | None, path: Any, leaf: Tensor) -> Tensor:
    """A leaf once for each sample if it is trained, in the innermost transform."""
    depth = transforms_depth()
    with below_transforms(depth - 1):
        if not leaf.requires_grad:
            return leaf
        made: Any = RowsOf.apply(leaf, rows, functools.partial(tape.hold, place, path))  # type: ignore[no-untyped-call]
    return batched(made, depth)


def _parts(x: Any) -> tuple[Any, int | None]:
    """A value as it is below the ``vmap`` of samples, and the dim of samples."""
    if not isinstance(x, Tensor) or not functorch.is_batchedtensor(x):
        return x, None
    return functorch.get_unwrapped(x), functorch.maybe_get_bdim(x)


@dataclass(frozen=True, eq=False)
class SampleLoss:
    """The losses of a rank's samples, added up, as a loss function that runs on schedules and without one.

    Attributes:
        loss_fn: the loss of a batch.
        plan: the plan.
        tape: takes the gradients of samples.
        known: the units made so far.
    """

    loss_fn: Callable[[Any, Any], Any]
    plan: Plan
    tape: SampleTape
    known: dict[Unit, Unit] = field(default_factory=dict, repr=False)

    def __call__(self, params: Any, batch: Any) -> Mean:
        """The sum, an ``fs.Mean``, so that ranks may have unequal rows. Its backward leaves gradients on the tape."""
        leaves = {path: (leaf, ()) for path, leaf in tree.paths(params)}
        loss, tensors = of_rows(self.loss_fn, self.plan, batch)
        self.tape.begin(len(tensors[0]))

        def of(row: list[Tensor]) -> Tensor:
            layers = CaughtLayers(self.tape, self.tape.rows, tensors[0].device.type)
            with layers, SampleUnits(leaves, self.tape, layers, self.known) as units:
                return loss(params_of(self.plan, units), row)

        return Mean(torch.vmap(of)(tensors).sum(), 1.0)

    def gathered(self, leaves: Mapping[str, Tensor], batch: Any) -> Mean:
        """The same of leaves that are gathered; those that require grad are trained."""
        engine = GatheredUnits()
        for path, leaf in leaves.items():
            attach(leaf, Slot(engine, path, None, self.plan.leaves[path].shape))
        return self(tree.nest(dict(leaves)), batch)


class GatheredUnits:
    """Stands in for an engine where all leaves are there.

    Attributes:
        place: the call of a unit that runs.
    """

    def __init__(self) -> None:
        self.place = OUTSIDE

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit."""
        self.place = unit.name or getattr(unit.fn, "__name__", "unit"), 0
        try:
            return unit.fn(params, *args, **kwargs)
        finally:
            self.place = OUTSIDE


def of_rows(loss_fn: Callable[[Any, Any], Any], plan: Plan, batch: Any) -> tuple[Row, list[Tensor]]:
    """The loss of one row, and the tensors that have rows."""
    leaves, spec = tree.flatten(batch)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim > 0]

    def one(params: Any, row: list[Tensor]) -> Tensor:
        filled = list(leaves)
        for i, x in zip(at, row, strict=True):
            filled[i] = x.unsqueeze(0)
        with bind(plan.mesh, plan.data_axes, single=True):
            loss = read_loss(loss_fn(params, tree.unflatten(spec, filled)))
        return loss.total if loss.count is None else loss.total / loss.count

    return one, [leaves[i] for i in at]


def row_count(batch: Any) -> int:
    """The number of rows of a batch."""
    check_cuttable(batch, "cannot be cut into samples", "Give tensors with the samples along dim 0.")
    dims = leading_dims(batch)
    if not dims or len(set(dims)) > 1:
        named = zip(tree.names(batch, "batch"), tree.leaves(batch), strict=True)
        shapes = [f"{name}: {list(x.shape)}" for name, x in named if isinstance(x, Tensor)]
        head = "the tensors of the batch do not have one row a sample:"
        raise BatchError(lines(head, shapes, "Give tensors with the samples along dim 0; 0-dim ones go to all."))
    return dims[0]


def filled(batch: Any) -> tuple[Any, int | None]:
    """A batch that has rows, and how many of them count; None for all.

    A rank without samples, as Poisson sampling draws them, takes part in all collectives with a row of zeros.
    """
    if row_count(batch):
        return batch, None
    return tree.mapped(lambda x: x.new_zeros(1, *x.shape[1:]) if isinstance(x, Tensor) and x.ndim else x, batch), 0


def cut_rows(batch: Any, rows: int | None) -> list[Any]:
    """A batch in parts of so many rows."""
    leaves, spec = tree.flatten(batch)
    count = 1 if rows is None else -(-row_count(batch) // rows)
    cut = [torch.split(x, rows or len(x)) if isinstance(x, Tensor) and x.ndim else [x] * count for x in leaves]
    return [tree.unflatten(spec, list(part)) for part in zip(*cut, strict=True)]
