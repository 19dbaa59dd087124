"""A data loader whose position is saved with a state, and resumes exactly on any number of ranks."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fshard import tree
from fshard.arguments import described, expect
from fshard.data.order import Order
from fshard.errors import CheckpointError, PlanError, lines
from fshard.hints import teaching
from fshard.sharding.local_batch import local_part
from fshard.sharding.plan import Plan
from fshard.sharding.spec import P, axes_of

OWN = frozenset(("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"))
"""Options of PyTorch's data loader that ``Order`` stands for."""


class Loader:
    """This rank's batches of a map-style data set, in an order that depends on neither ranks nor workers.

    The order of global batches is a function of the seed (``Order``); each rank loads its part of each of them, as
    ``plan.local_batch`` would cut it. So the position is one number, the same on all ranks: ``fs.train_loop`` saves it
    with each checkpoint and goes on from it, on as many ranks as there are then. In a loop of your own give
    ``Checkpointer.save(state, data=loader)``, and ``loader.load_state_dict(checkpointer.restored.data)`` after a
    restore.

    An iteration goes from the present position to the end of the last epoch. A batch counts as taken when it is handed
    out, whatever workers have loaded ahead.

    Args:
        dataset: anything with ``len(dataset)`` and ``dataset[i]``.
        plan: says which part of a global batch this rank computes.
        batch: the samples of a global batch, over all ranks.
        seed: of the shuffle.
        shuffle: whether each epoch has an order of its own.
        epochs: how many epochs an iteration goes through; None for no end.
        partial: ``"drop"``, or ``"keep"`` for a smaller batch at the end of an epoch, of which ranks may get unequal
            parts, or none, as tensors of 0 rows: then the loss must be an ``fs.Mean``.
        collate: makes a batch of a list of samples; PyTorch's ``default_collate`` by default.
        **options: further options of ``torch.utils.data.DataLoader``, such as ``num_workers=``.

    Raises:
        PlanError: a data set without a length, a batch that ranks cannot share, or an option that is not there.

    >>> plans = [
    ...     fs.make_plan({"w": torch.ones(2)}, fs.abstract_mesh((2,), ("data",), rank=rank), [(".*", fs.P())],
    ...                  batch=fs.P("data"))
    ...     for rank in (0, 1)
    ... ]
    >>> [next(iter(fs.data.Loader(range(10), plan, batch=4, shuffle=False))).tolist() for plan in plans]
    [[0, 1], [2, 3]]
    """

    global_position = True
    """``fs.train_loop`` and ``fs.Checkpointer`` save the position once, for all ranks."""

    @functools.partial(teaching, name="Loader")
    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        *,
        batch: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        partial: str = "drop",
        collate: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        expect("fs.data.Loader(dataset, plan)", [("plan", plan, Plan, "what fs.make_plan returned")])
        _check_dataset(dataset)
        _check_options(epochs, options)
        self.dataset, self.plan, self.epochs = dataset, plan, epochs
        self.order = Order(len(dataset), batch, seed, shuffle, partial)
        self.options = {**options, "collate_fn": collate}
        try:
            DataLoader(dataset, batch_size=1, **self.options)
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"fs.data.Loader: PyTorch's data loader refuses {', '.join(f'{name}=' for name in options)}: {error}"
            ) from error
        self.position = 0
        """The global batches that were handed out so far."""
        rows, *rest = plan.batch.dims or (None,)
        axes = axes_of(rows)
        self._parts, self._part = plan.mesh.axis_size(axes), plan.mesh.index(axes)
        self._rest = P(None, *rest) if any(rest) else None
        if partial == "drop" and batch % self._parts:
            raise PlanError(
                f"fs.data.Loader(batch={batch}) is not a multiple of {self._parts}, the ranks along "
                f"{'+'.join(axes)!r}: give the size of the global batch, which they share"
            )

    def __repr__(self) -> str:
        return f"Loader({len(self.dataset)} samples in batches of {self.order.batch}, at batch {self.position})"

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""
        return self.order.place(self.position)[0]

    @property
    def end(self) -> int | None:
        """The number of batches in all epochs; None without an end."""
        return None if self.epochs is None else self.epochs * self.order.batches

    def rows(self, number: int) -> list[int]:
        """This rank's samples of a global batch."""
        found = self.order(number).tolist()
        return found[self._part * len(found) // self._parts : (self._part + 1) * len(found) // self._parts]

    def __iter__(self) -> Iterator[Any]:
        """The batches from the present position on."""
        loader = DataLoader(self.dataset, batch_sampler=_Rows(self, self.position), **self.options)
        for batch in loader:
            if self.order.partial == "keep" and not self.rows(self.position):
                batch = tree.mapped(lambda x: x[:0] if isinstance(x, Tensor) else x, batch)
            self.position += 1
            yield batch if self._rest is None else local_part(batch, self._rest, self.plan.mesh)

    def state_dict(self) -> dict[str, Any]:
        """The position: JSON, the same on all ranks."""
        return {"position": self.position, **vars(self.order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position, which iterations that begin from now on start from.

        Raises:
            CheckpointError: it is not a position of this loader: of another length, batch, seed or order.
        """
        if not isinstance(state, Mapping) or "position" not in state:
            raise CheckpointError(
                f"{described(state)} is not a position of an fs.data.Loader: give what state_dict returned"
            )
        mine = vars(self.order)
        other = [
            f"{name}: saved {state.get(name)!r}, now {mine[name]!r}" for name in mine if state.get(name) != mine[name]
        ]
        if other:
            remedy = "The order of samples depends on all of these. Give the loader what the run had, or begin anew."
            raise CheckpointError(lines("the position is of another order of samples:", other, remedy))
        self.position = int(state["position"])


class _Rows:
    """The samples of each batch of one iteration, for PyTorch's data loader."""

    def __init__(self, loader: Loader, begin: int) -> None:
        self.loader, self.begin = loader, begin

    def __iter__(self) -> Iterator[list[int]]:
        number, end = self.begin, self.loader.end
        while end is None or number < end:
            yield self.loader.rows(number) or [0]  # a sample that says what a batch is, and is cut off again
            number += 1


def _check_dataset(dataset: Any) -> None:
    """Refuse data sets whose order only they know."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise PlanError(
            f"fs.data.Loader: {described(dataset)} has no len(dataset) and dataset[i], so only it knows its order: "
            f"give fs.train_loop torchdata's StatefulDataLoader of it, whose position is saved for each rank "
            f'(pip install "fshard[data]"), or batches as a function of the step'
        )
    if not len(dataset):
        raise PlanError(
            f"fs.data.Loader: the data set, {described(dataset)}, has no samples: look at what it was read from"
        )


def without_position(batches: Any) -> str:
    """List what is wrong with a data loader whose position must be saved; nothing if it has one."""
    if not isinstance(batches, DataLoader) or hasattr(batches, "state_dict"):
        return ""
    return (
        f"{type(batches).__name__} has no position that a checkpoint could hold, so a resumed run would see other "
        f"batches: give fs.data.Loader(dataset, plan, batch=...), torchdata's StatefulDataLoader, or batches as a "
        f"function of the step"
    )


def _check_options(epochs: int | None, options: Mapping[str, Any]) -> None:
    if epochs is not None and (not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1):
        raise PlanError(f"fs.data.Loader(epochs={epochs!r}): give an int >= 1, or None for no end")
    if taken := sorted(OWN & options.keys()):
        raise PlanError(
            f"fs.data.Loader: {', '.join(taken)} cannot be given: batch=, shuffle= and partial= say the order"
        )
