"""A rank's local batch: any pytree. What of it steers the program, how it is cut into microbatches."""

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import kind
from fshard.errors import BatchError, lines
from fshard.model.foreign_objects import held, opaque, tensors_in
from fshard.sharding.local_batch import Rows, without_rows
from fshard.sharding.spec import P, axes_of

STEERING = (bool, int, str, bytes, type(None))
"""Types of batch leaves that Python control flow may depend on. Floats are left out: they change from step to step."""


def signature(batch: Any) -> Hashable:
    """Return what of a batch may decide which units run: its structure and the leaves that are not tensors."""
    leaves, spec = tree.flatten(batch)
    steering = tuple([(type(x).__name__, x) for x in leaves if isinstance(x, STEERING)])
    return spec, steering


def leading_dims(batch: Any) -> tuple[int, ...]:
    """The first dim of each tensor of a batch that has dims, and of each array: a loss may make tensors of them."""
    return tuple(x.shape[0] for x in tree.leaves(batch) if (x.ndim if isinstance(x, Tensor) else _is_array(x)))


def along_rows(spec: P) -> bool:
    """Tell whether ranks share the samples of a batch along dim 0, as far as its spec says."""
    return not spec.axes or bool(axes_of(spec.dims[0]))


def shapes(batch: Any) -> list[torch.Size]:
    """The shape of each tensor of a batch."""
    return [x.shape for x in tree.leaves(batch) if isinstance(x, Tensor)]


def forms(batch: Any) -> list[tuple[torch.Size, torch.dtype]]:
    """The shape and the dtype of each tensor of a batch."""
    return [(x.shape, x.dtype) for x in tree.leaves(batch) if isinstance(x, Tensor)]


def formed(batch: Any) -> str:
    """The tensors of a batch in words, each with its dtype and its shape.

    >>> formed({"x": torch.zeros(2, 3), "y": [torch.zeros(2, dtype=torch.int64)]})
    "batch['x'] float32 [2, 3], batch['y'][0] int64 [2]"
    """
    found = [(name, x) for name, x in _named(batch) if isinstance(x, Tensor)]
    return ", ".join(f"{name} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for name, x in found)


class Microbatches(NamedTuple):
    """The microbatches of one step, given one by one instead of cut from a batch.

    For rows that do not divide evenly, or sequences of different lengths. Where the parts are unequal, the loss must be
    an ``fs.Mean``, which is then exact over all of them.

    Attributes:
        parts: as many batches as ``accumulate=`` says, of one structure; tensors may differ in shape.

    >>> len(fs.Microbatches((torch.ones(3, 8), torch.ones(1, 8))).parts)
    2
    """

    parts: Sequence[Any]


def microbatches(batch: Any, count: int, spec: P = P()) -> list[Any]:  # noqa: B008 - a frozen value
    """A batch cut along the first dim of its tensors; 0-dim tensors and other leaves go to every part.

    Where ``count`` does not divide the rows, the first parts have one more: ``check_even`` says for whom that is wrong.

    Args:
        batch: the batch.
        count: how many parts.
        spec: how ranks share the global batch.

    Raises:
        BatchError: ranks share samples along another dim, fewer rows than parts, leaves of different leading dims, or
            ``Microbatches`` that do not fit.
    """
    if isinstance(batch, Microbatches):
        return _given(batch.parts, count)
    if count == 1:
        return [batch]
    if not along_rows(spec):
        raise BatchError(
            f"accumulate={count} cuts batches along dim 0, and batch={spec} has ranks share them along others alone: "
            f"put samples into dim 0 (x.transpose(0, 1)) with batch=P('axis'), or cut them yourself and give "
            f"fs.Microbatches(parts). Where dim 0 has the samples, and another one is that of a sequence, name a data "
            f"axis for it, of one rank if need be: batch=P('data', 'sequence')"
        )
    _check_rows(batch, count)
    leaves, structure = tree.flatten(batch)
    parts = [x.tensor_split(count) if isinstance(x, Tensor) and x.ndim else (x,) * count for x in leaves]
    return [tree.unflatten(structure, [part[i] for part in parts]) for i in range(count)]


def check_cuttable(batch: Any, what: str, remedy: str) -> None:
    """Refuse arrays, and tensors of layouts, whose rows cannot be cut.

    Args:
        batch: the batch.
        what: the end of the sentence that begins with the batch.
        remedy: what else may be given.

    Raises:
        BatchError: naming them.
    """
    wrong = [f"{name}: {problem}" for name, x in _named(batch) if (problem := without_rows(x))]
    if wrong:
        raise BatchError(lines(f"the batch {what}:", wrong, remedy))


def _check_rows(batch: Any, count: int) -> None:
    """Refuse a batch that cannot be cut along its rows."""
    remedy = "Microbatches that you cut yourself are fs.Microbatches(parts)."
    check_cuttable(batch, f"cannot be cut into accumulate={count} microbatches", remedy)
    alike = tree.swap(lambda rows: None, Rows, batch)
    if len(set(leading_dims(alike))) > 1:
        rows = [f"{name} has shape {list(x.shape)}" for name, x in _named(alike) if isinstance(x, Tensor) and x.ndim]
        head = (
            f"the leaves of the batch have different leading dims, so accumulate={count} cannot tell rows from others:"
        )
        raise BatchError(
            lines(
                head,
                rows,
                "Give all leaves one row a sample. What has no rows is fs.Whole(value), what has rows of its own "
                "fs.Rows(value); the loss reads both as .value.",
            )
        )
    dims = set(leading_dims(batch))
    if dims and min(dims) < count:
        raise BatchError(
            f"a batch of {min(dims)} rows a rank cannot be cut into accumulate={count} microbatches: give more, or "
            f"fs.Microbatches(parts), some of which may have no rows if the loss is an fs.Mean"
        )


def _given(parts: Sequence[Any], count: int) -> list[Any]:
    """Microbatches as they were given."""
    if not isinstance(parts, (list, tuple)):
        raise BatchError(
            f"fs.Microbatches(parts) takes a list of batches, and was given {kind(parts)}: put them into one"
        )
    kinds = [signature(part) for part in parts]
    if len(kinds) != count:
        raise BatchError(
            f"fs.Microbatches holds {len(kinds)} batches, and the step makes accumulate={count} of them. For a "
            f"shorter window, such as the last one of an epoch, make a second step with accumulate={len(kinds)}, which "
            f"takes the same state; or, with an fs.Mean, fill it up with batches without rows (x[:0])"
        )
    other = [f"microbatch {i}: {kind}" for i, kind in enumerate(kinds) if kind != kinds[0]]
    if other:
        head = f"microbatches differ from the first, which is {kinds[0]}:"
        remedy = "Give all of them one structure, with the same bools, ints and strings; tensors may differ in shape."
        raise BatchError(lines(head, other, remedy))
    return list(parts)


def check_even(batch: Any, count: int) -> None:
    """Refuse microbatches of different sizes, over which a plain mean would be wrong.

    Raises:
        BatchError: a first dim that ``count`` does not divide, or ``Microbatches`` of different shapes.
    """
    if isinstance(batch, Microbatches):
        _check_alike(batch)
        return
    if count == 1:  # before names are made: this is on the path of every step
        return
    odd = [
        f"{name} has shape {list(x.shape)}"
        for name, x in _named(batch)
        if isinstance(x, Tensor) and x.ndim and x.shape[0] % count
    ]
    if odd:
        head = f"the batch cannot be cut into accumulate={count} equal microbatches along dim 0:"
        remedy = (
            f"Give a multiple of {count} rows a rank, or return fs.Mean(losses.sum(), count) from the loss function."
        )
        raise BatchError(lines(head, odd, remedy))


def _check_alike(batch: Microbatches) -> None:
    """Refuse microbatches of different shapes."""
    shapes = [[list(x.shape) for x in tree.leaves(part) if isinstance(x, Tensor)] for part in batch.parts]
    if any(shape != shapes[0] for shape in shapes):
        rows = [f"microbatch {i}: {shape}" for i, shape in enumerate(shapes)]
        head = "fs.Microbatches of different shapes, over which a plain mean would be wrong:"
        remedy = "Give equal ones, or return fs.Mean(losses.sum(), count) from the loss function."
        raise BatchError(lines(head, rows, remedy))


def _named(batch: Any) -> list[tuple[str, Any]]:
    """The leaves of a batch with expressions for them."""
    return list(zip(tree.names(batch, "batch"), tree.leaves(batch), strict=True))


def _is_array(value: Any) -> bool:
    return not isinstance(value, Tensor) and hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0


class BatchWatch:
    """Watches the tensors of a batch while a function of it runs.

    Args:
        batch: the batch.
        train: whether gradients flow through what is made of it.

    Raises:
        BatchError: autograd cannot use a tensor.
    """

    def __init__(self, batch: Any, train: bool) -> None:
        self._tensors = [x for x in tree.leaves(batch) if isinstance(x, Tensor)]
        self._batch = batch
        if any([x.is_inference() for x in self._tensors]):
            self._tensors = [x for x in self._tensors if not x.is_inference()]
            if train:
                made = [name for name, x in _named(batch) if isinstance(x, Tensor) and x.is_inference()]
                remedy = "Load the data outside of it, or under torch.no_grad(), or give clones of these tensors."
                head = "the batch holds tensors made under torch.inference_mode(), which autograd cannot use:"
                raise BatchError(lines(head, made, remedy))
        self._versions = [x._version for x in self._tensors]

    def check(self) -> None:
        """Refuse what the function has written to.

        Raises:
            BatchError: naming the tensors.
        """
        if self._versions == [x._version for x in self._tensors]:
            return
        now = zip(self._tensors, self._versions, strict=True)
        written = {id(x) for x, version in now if x._version != version}
        names = [f"{name} {list(x.shape)}" for name, x in _named(self._batch) if id(x) in written]
        remedy = "Make new tensors (x = x * y, not x *= y), or clone what is to be changed: a step may run again."
        raise BatchError(lines("the function of (params, batch) wrote in place to the batch:", names, remedy))


def faked(batch: Any, fake: Callable[[Tensor], Tensor]) -> Any:
    """A batch whose tensors are fake ones, in copies of the containers and objects that hold them.

    Nothing that a function does to it reaches the batch itself. An object that cannot be copied is left as it is;
    ``check_kept`` tells whether it was written to.
    """
    memo: dict[int, Any] = {}

    def one(x: Any) -> Any:
        if isinstance(x, Tensor):
            return fake(x)
        if not opaque(x):
            return x
        memo.update({id(tensor): fake(tensor) for tensor in tensors_in(x)})
        try:
            return copy.deepcopy(x, memo)
        except Exception:  # whatever its class raises
            return x

    return tree.mapped(one, batch)


def check_kept(batch: Any, before: Sequence[Any]) -> None:
    """Refuse objects of a batch in which a function that ran on fake tensors left some.

    Args:
        batch: the batch.
        before: what ``held`` said of its opaque leaves before.

    Raises:
        BatchError: naming the objects.
    """
    kept = [(name, x) for name, x in _named(batch) if opaque(x)]
    wrong = [f"{name}: {kind(x)}" for (name, x), was in zip(kept, before, strict=True) if held(x) != was]
    if wrong:
        head = "the function writes to objects of the batch, which cannot be copied to find its schedule without that:"
        raise BatchError(lines(head, wrong, "Give their class a __deepcopy__, or make them inside of the function."))


def on_meta(batch: Any) -> list[str]:
    """Expressions for the tensors of a batch on meta, which have no values."""
    return [name for name, x in _named(batch) if isinstance(x, Tensor) and x.is_meta]


def check_detached(batch: Any) -> None:
    """Refuse tensors that require grad: a step takes gradients of its parameters alone, so theirs would be lost.

    Raises:
        BatchError: naming each, and what made it.
    """
    if any([x.requires_grad for x in tree.leaves(batch) if isinstance(x, Tensor)]):
        wrong = [(name, x) for name, x in _named(batch) if isinstance(x, Tensor) and x.requires_grad]
        rows = [f"{name} {list(x.shape)}, {'a leaf' if x.grad_fn is None else x.grad_fn.name()}" for name, x in wrong]
        head = "tensors of the batch require grad, and a step takes gradients of its parameters alone:"
        raise BatchError(lines(head, rows, _DETACH))


_DETACH = (
    "Give x.detach(). What made them is trained where the loss function computes them from params; a loss that "
    "differentiates by x itself marks it there, x = x.detach().requires_grad_()."
)


@contextmanager
def marks_undone(batches: Sequence[Any]) -> Iterator[None]:
    """After the block no tensor requires grad that did not before it: a loss may mark those that it differentiates by.

    Args:
        batches: a rank's microbatches.
    """
    plain = [x for x in tree.leaves(list(batches)) if isinstance(x, Tensor) and not x.requires_grad]
    try:
        yield
    finally:
        for x in plain:
            if x.requires_grad and x.is_leaf:
                x.requires_grad_(False)


def check_device(batch: Any, device: torch.device) -> None:
    """Refuse tensors that lie elsewhere than the parameters, also those on another device of the same kind.

    A number on the CPU (0-dim) goes with tensors of any device.

    Raises:
        BatchError: naming the leaf and both devices; or a tensor without sizes, or an iterator.
    """
    _check_lasting(batch)
    if any([_ragged(x) for x in tree.leaves(batch)]):
        ragged = [name for name, x in _named(batch) if _ragged(x)]
        remedy = "Make them with layout=torch.jagged, or pad them: torch.nested.to_padded_tensor."
        raise BatchError(lines("the batch holds nested tensors of torch.strided, without sizes:", ragged, remedy))
    far = [x for x in tree.leaves(batch) if isinstance(x, Tensor) and x.device != device]
    if any([_apart(x, device) for x in far]):
        wrong = [f"{n} is on {x.device}" for n, x in _named(batch) if isinstance(x, Tensor) and _apart(x, device)]
        raise BatchError(lines(f"the parameters are on {device}:", wrong, "Move the batch there."))


def _check_lasting(batch: Any) -> None:
    """Refuse iterators, which a function that runs twice would find empty."""
    if any([isinstance(x, Iterator) for x in tree.leaves(batch)]):
        spent = [f"{name} is {kind(x)}" for name, x in _named(batch) if isinstance(x, Iterator)]
        remedy = "Give what it yields, such as next(batches) or list(rows): a loss function may run more than once."
        raise BatchError(lines("the batch holds iterators, which can be read once:", spent, remedy))


def _ragged(x: Any) -> bool:
    """Tell whether a leaf is a nested tensor that has no sizes."""
    return isinstance(x, Tensor) and x.is_nested and x.layout is torch.strided


def _apart(x: Tensor, device: torch.device) -> bool:
    """Tell whether a tensor cannot be used with parameters on a device.

    A device without a number is any of its kind.
    """
    if x.device.type != device.type:
        return bool(x.ndim)
    return device.index is not None and x.device.index is not None and x.device.index != device.index
