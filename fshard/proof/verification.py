"""The result of a verification: rows of a table, and the error that names the differences."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fshard.errors import ShardError, lines
from fshard.markup import aligned
from fshard.runtime.graphs.graph_proof import gap

RTOL = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.int8: 0.1,
    torch.float8_e4m3fn: 0.25,
    torch.quint4x2: 0.5,
}
"""The largest difference that is allowed, relative to the largest magnitude in the tensor: sums over ranks and
microbatches have another order than in one process, and compiled units round differently. Real errors are larger.
The last three are formats in which gradients travel."""


class VerifyError(ShardError, AssertionError):
    """A train step that computes something else than plain PyTorch.

    Example::

        try:
            fs.verify(step, state, batch)
        except fs.VerifyError as error:
            print(error)  # the first unit whose output differs, and every leaf whose gradient does
    """


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that is allowed: ``atol + rtol * largest``; ``rtol=None`` takes the dtype's own."""

    rtol: float | None = None
    atol: float = 0.0

    def limit(self, largest: float, dtypes: Sequence[torch.dtype]) -> float:
        """The largest difference that counts as equal, for numbers that were computed in these dtypes."""
        if self.rtol is not None:
            return self.atol + self.rtol * largest
        known = [RTOL[dtype] for dtype in dtypes if dtype in RTOL]
        if not known:  # codes of eight bits may be rounded up or down
            return max(self.atol, 1.0) if any(dtype == torch.uint8 for dtype in dtypes) else self.atol
        return self.atol + max(known) * largest


@dataclass(frozen=True)
class Row:
    """One comparison of "loss", "grad_norm", or an entry such as ``grad.head.weight``, ``params.head.weight``."""

    name: str
    plain: float  # the number in plain PyTorch, or the norm of a tensor
    sharded: float  # the same in the step
    difference: float  # the largest of an element
    limit: float  # the largest difference that counts as equal
    unit: str = ""
    note: str = ""  # another problem with it

    @property
    def right(self) -> bool:
        """Tell whether plain PyTorch and the step agree."""
        return not self.note and self.difference <= self.limit

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        verdict = "equal" if self.right else self.note or "DIFFERS"
        return self.name, f"{self.plain:.7g}", f"{self.sharded:.7g}", f"{self.difference:.1e}", verdict


@dataclass(frozen=True, order=True)
class Difference:
    """The first output of a unit that differs."""

    microbatch: int
    call: int
    rank: int
    unit: str
    text: str


@dataclass(frozen=True, repr=False)
class Verified:
    """The result of ``fs.verify``: the step computes what plain PyTorch computes. ``print`` it for the table.

    Attributes:
        rows: the comparisons: loss, norm, gradients, parameters and the optimizer's state.
        calls: the number of calls of units whose outputs were compared on this rank.
        first: the first output of a unit that differs; None in a returned value, since a difference raises.
        notes: what was not compared, and why.

    >>> model = fs.split(torch.nn.Linear(2, 1))
    >>> plan = fs.make_plan(model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.1)
    >>> step = fs.make_train_step(lambda params, x: model.apply(params, x).square().mean(), opt, plan)
    >>> found = fs.verify(step, fs.init_state(plan, opt, seed=0), torch.ones(4, 2))
    >>> found.right, found.rows[0].name
    (True, 'loss')
    """

    rows: tuple[Row, ...]
    calls: int
    first: Difference | None = None
    notes: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        """Tell whether everything agrees."""
        return self.first is None and all(row.right for row in self.rows)

    def __repr__(self) -> str:
        table = [("leaf", "plain", "sharded", "difference", "verdict"), *(row.cells() for row in self.rows)]
        out = [line.rstrip() for line in aligned(table, [True, False, False, False, True])]
        units = "equal" if self.first is None else f"DIFFER, first of unit {self.first.unit}"
        return "\n".join([*out, f"outputs of {self.calls} calls of units: {units}", *self.notes])

    def check(self) -> None:
        """Raise a VerifyError with the first unit whose output differs, and every leaf that differs."""
        if self.right:
            return
        wrong = [row for row in self.rows if not row.right]
        problems = [f"unit {self.first.unit}: {self.first.text}"] if self.first else ["no output of a unit differs"]
        for row in wrong:
            why = row.note or f"differs by {row.difference:.3g}, and {row.limit:.1e} is allowed"
            problems.append(f"{row.name}: {row.plain:.7g} in plain PyTorch, {row.sharded:.7g} in the step; {why}")
        graded = [row for row in self.rows if row.name.startswith("grad.")]
        if self.first is None and not all(row.right for row in graded):
            order = list(dict.fromkeys(row.unit for row in graded))
            last = max((row.unit for row in graded if not row.right), key=order.index)
            problems.append(
                f"the last unit with wrong gradients is {last}: look at its backward, and at the one after it"
            )
        remedy = (
            "Look at the unit that is named first: try debug=True and compile=None, and check custom backwards and "
            "what the unit reads beside its arguments. If this is rounding, pass rtol= and atol=."
        )
        raise VerifyError(lines("the step does not compute what plain PyTorch computes:", problems, remedy))


def number_row(name: str, plain: float, sharded: float, tolerance: Tolerance, dtypes: Sequence[torch.dtype]) -> Row:
    """A row of two numbers."""
    difference, _ = gap(*(torch.tensor(x, dtype=torch.float64, device="cpu") for x in (plain, sharded)))
    return Row(name, plain, sharded, difference, tolerance.limit(abs(plain), dtypes))
