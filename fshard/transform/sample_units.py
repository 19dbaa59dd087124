"""A loss of single samples as a function of all samples of a rank, and its units as units of all samples.

The loss of a sample runs under ``torch.vmap``, and so does the code between its units. The call of a unit leaves that
transform: the engine runs an ordinary unit, of tensors with a row for each sample, and sees where it begins, forward
and backward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from fshard.torch_internals import batched, below_transforms, functorch, transforms_depth
from fshard.transform.dual_units import Pair, Structure, TransformedUnits, joined, parted, refuse_views
from fshard.transform.sample_layers import Caught, CaughtLayers, CaughtLeaf, RowsOf
from fshard.transform.sample_tape import OUTSIDE, Place, SampleTape
from fshard.transform.slopes import params_of

Row = Callable[[Any, list[Tensor]], Tensor]
"""A loss of parameters and of the tensors of one row."""


class Frame:
    """A call of a unit beside its tensors.

    Args:
        spec: the structure of its parameters and arguments.
        plain: the leaves of these that are no tensors, and None for each tensor.
        places: where tensors are among them: the parameters, then the others.

    Attributes:
        out: the structure of its results.
    """

    def __init__(self, spec: Any, plain: list[Any], places: list[int]) -> None:
        self.spec, self.plain, self.places = spec, plain, places
        self.out: Structure | None = None

    @classmethod
    def of(cls, given: Any) -> tuple["Frame", list[Tensor]]:
        """The frame of parameters and arguments, and the tensors among these."""
        leaves, spec = tree.flatten(given)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        plain = [None if isinstance(x, Tensor) else x for x in leaves]
        return cls(spec, plain, places), [leaves[i] for i in places]

    def call(self, fn: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The results that may have gradients, and the tensors among the others."""
        filled = list(self.plain)
        for i, tensor in zip(self.places, tensors, strict=True):
            filled[i] = tensor
        params, args, kwargs = tree.unflatten(self.spec, filled)
        self.out, found, others = parted(fn(params, *args, **kwargs))
        return found, others


class SampleUnits(TransformedUnits):
    """Runs units of a loss of one sample, for all samples.

    Args:
        pairs: each leaf, as the engine has it, by path.
        tape: takes the gradients of samples.
        layers: runs layers that read leaves.
        known: the units made so far.
    """

    def __init__(
        self, pairs: Mapping[str, Pair], tape: SampleTape, layers: CaughtLayers, known: dict[Unit, Unit]
    ) -> None:
        super().__init__(pairs)
        self.tape, self.layers, self.known = tape, layers, known
        self.paths = {id(leaf): path for path, (leaf, _) in pairs.items()}

    def handles(self, shapes: Mapping[str, tuple[int, ...]], casting: Casting | None) -> dict[str, Tensor]:
        """A handle for each leaf. ``shapes`` are those of whole leaves."""
        found = super().handles(shapes, casting)
        leaves = [self.pairs[path][0] for path in found]
        self.layers.leaves = caught([*found.values()], [*found], leaves)
        return found

    def dual(self, pair: Pair) -> Tensor:
        """A leaf once for each sample."""
        return self.rows_of(self.paths[id(pair[0])], pair[0], OUTSIDE)

    def rows_of(self, path: str, leaf: Tensor, place: Place) -> Tensor:
        """A leaf once for each sample if it is trained, in the innermost transform."""
        with below_transforms(self.depth - 1):
            if not leaf.requires_grad:
                return leaf
            made: Any = RowsOf.apply(leaf, self.tape.rows, partial(self.tape.hold, place, path))  # type: ignore[no-untyped-call]
        return batched(made, self.depth)

    def run(self, engine: Any, unit: Unit, held: list[Pair], given: Any) -> Any:
        """The result of a unit."""
        frame, tensors = Frame.of(given)
        if (made := self.known.get(unit)) is None:
            made = self.known[unit] = Unit(unit.name, SampleFunction(unit))
        inputs = [_parts(x) for x in tensors[len(held) :]]
        called = SampleCall(self, engine, frame, [dim for _, dim in inputs])
        with below_transforms(self.depth - 1):
            given = called, [x for x, _ in inputs]
            found, others = engine.call(made, {"at": [leaf for leaf, _ in held]}, given, {})
        assert frame.out is not None
        return joined(frame.out, *[[batched(x, self.depth) for x in some] for some in (found, others)])


@dataclass(frozen=True, eq=False)
class SampleCall:
    """A call of a unit beside its tensors, as one value in which the engine looks for none.

    Attributes:
        units: what runs it.
        engine: the engine.
        frame: its arguments beside tensors.
        dims: the dim of samples of each input; None for one that all samples share.
    """

    units: SampleUnits
    engine: Any
    frame: Frame
    dims: list[int | None]


class SampleFunction:
    """A unit's function of tensors with a row for each sample.

    Args:
        unit: the unit.
    """

    def __init__(self, unit: Unit) -> None:
        self.fn, self.__name__ = unit.fn, getattr(unit.fn, "__name__", "unit")

    def __call__(self, read: Any, called: SampleCall, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The results that may have gradients, ``(rows, ...)``, and other tensors."""
        units, frame, leaves = called.units, called.frame, read["at"]
        place = called.engine.place
        paths = [_path(leaf) for leaf in leaves]

        def of(_: Tensor, given: list[Tensor]) -> Any:
            rows = [units.rows_of(path, leaf, place) for path, leaf in zip(paths, leaves, strict=True)]
            with units.layers.within(place, caught(rows, paths, leaves)):
                return frame.call(self.fn, [*rows, *given])

        some = torch.zeros(units.tape.rows, device=leaves[0].device)
        found, others = torch.vmap(of, (0, called.dims))(some, inputs)
        refuse_views(self.__name__, found, leaves)
        return found, others


def caught(rows: Sequence[Tensor], paths: Sequence[str], leaves: Sequence[Tensor]) -> Caught:
    """The leaves that are trained, by what a function is given for them."""
    found = zip(rows, paths, leaves, strict=True)
    return {id(row): CaughtLeaf(path, leaf, row) for row, path, leaf in found if leaf.requires_grad}


def _path(leaf: Tensor) -> str:
    slot = slot_of(leaf)
    assert slot is not None
    return slot.path


def _parts(x: Tensor) -> tuple[Tensor, int | None]:
    """A tensor as it is below the ``vmap`` of samples, and the dim of samples."""
    if not functorch.is_batchedtensor(x):
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
            layers = CaughtLayers(self.tape, transforms_depth(), tensors[0].device.type)
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
