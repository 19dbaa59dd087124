"""Formats of few bits: of what travels (``Wire``), and of frozen leaves that are kept so at rest (``Rule.packed``).

Blockwise formats divide the elements of a leaf into blocks, in row-major order, and send a float32 scale with each
block (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022). Gathers and reductions in few bits are
those of ZeRO++ (Wang et al., 2023) and SDP4Bit (Jia et al., 2024).
"""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Literal, NamedTuple

import torch

from fshard.errors import PlanError
from fshard.sharding.mesh import Axes


class Codes(NamedTuple):
    """The codes of a format: one row of the table of formats.

    Attributes:
        bits: of an element.
        dtype: as which a code is stored; uint8 for two codes of four bits.
        tolerance: the dtype whose rounding ``fs.verify`` allows.
        largest: the code of the largest element of a block; None for a format without scales.
        whole: whether codes are whole numbers, so that they may be rounded at random.
        block: the elements that share a scale, where ``Rule(packed=)`` is told no number.
        travels: whether ``Wire`` takes it, or only ``Rule(packed=)``.
    """

    bits: int
    dtype: torch.dtype
    tolerance: torch.dtype
    largest: float | None = None
    whole: bool = False
    block: int = 256
    travels: bool = True


FORMATS = {
    "bf16": Codes(16, torch.bfloat16, torch.bfloat16),
    "fp8_e4m3": Codes(8, torch.float8_e4m3fn, torch.float8_e4m3fn, 448.0),
    "int8": Codes(8, torch.int8, torch.int8, 127.0, whole=True),
    "int4": Codes(4, torch.uint8, torch.quint4x2, 7.0, whole=True),
    "nf4": Codes(4, torch.uint8, torch.quint4x2, 1.0, block=64, travels=False),
}
"""The table of formats. ``runtime/comm/packing.py`` packs by it, and refuses none."""
POWER = "powersgd"
"""The format of sums of matrices as products of low rank, see ``sharding/low_rank.py``."""
NAMES = ("fp32", *(name for name, codes in FORMATS.items() if codes.travels), POWER)
"""The names that ``Wire`` takes."""
SCALED = tuple(name for name, codes in FORMATS.items() if codes.largest is not None)
"""The names of blockwise formats."""
WHOLE = tuple(name for name, codes in FORMATS.items() if codes.whole)
"""The names of formats that may be rounded at random."""
FIELDS = {
    "all_gather": "gather",
    "reduce_scatter": "reduce",
    "replica_reduce": "reduce",
    "update_gather": "update",
}
"""The fields of ``Wire`` that give the formats of each kind of transfer."""
SCALE = 4
"""Bytes of a block's scale."""
FEEDBACK = "+feedback"
"""How the name of a format with feedback ends."""

Formats = str | tuple[tuple[str, str], ...] | None
"""One format for all axes, or pairs of axes, joined by ``+``, and a format."""


@dataclass(frozen=True)
class WireFormat:
    """The format of one compressed transfer.

    Args:
        name: a name in ``FORMATS``, or ``"powersgd"``.
        block: elements that share a scale; 1 for formats without scales.
        rotate: whether blocks are rotated by a Hadamard matrix before they are rounded.
        stochastic: whether they are rounded up or down at random, and not to nearest.
        feedback: whether what rounding leaves out is kept, and goes with the next transfer.
        rank: of the products of ``"powersgd"``; 0 for other formats.

    >>> str(WireFormat("int8", 256)), WireFormat("int8", 256).nbytes(512)
    ('int8/256', 520)
    """

    name: str
    block: int = 1
    rotate: bool = False
    stochastic: bool = False
    feedback: bool = False
    rank: int = 0

    @property
    def largest(self) -> float | None:
        """The code of the largest element of a block; None for a format without scales."""
        return FORMATS[self.name].largest if self.name in FORMATS else None

    @property
    def codes(self) -> Codes:
        """Its row in the table of formats."""
        return FORMATS[self.name]

    def payload(self, numel: int) -> int:
        """Bytes of so many elements without their scales."""
        return numel * self.codes.bits // 8

    def nbytes(self, numel: int) -> int:
        """Bytes of so many elements, a multiple of ``block``: their payload, and behind it their scales."""
        return self.payload(numel) + (numel // self.block * SCALE if self.largest else 0)

    def __str__(self) -> str:
        block = f"/{self.block}" if self.largest else f"/{self.rank}" if self.rank else ""
        return self.name + block + "+rotate" * self.rotate + "+stochastic" * self.stochastic + FEEDBACK * self.feedback


def packed_format(text: object) -> WireFormat | None:
    """The format of ``Rule(packed=)``: the name of a blockwise one, with ``/`` and the elements that share a scale.

    Raises:
        PlanError: there is no such format, or no such block.

    >>> str(packed_format("nf4")), str(packed_format("int8/64"))
    ('nf4/64', 'int8/64')
    """
    if text is None:
        return None
    name, slash, size = text.partition("/") if isinstance(text, str) else ("", "", "")
    usual = FORMATS[name].block if name in FORMATS and not slash else 0
    block = int(size) if size.isdecimal() and len(size) < 10 else usual
    if name not in SCALED or block < 16 or block & (block - 1):
        known = ", ".join(map(repr, SCALED))
        raise PlanError(
            f"packed={text!r} must be one of {known}, with a block if the usual one does not do, a power of two from "
            f"16 on: 'nf4/64'"
        )
    return WireFormat(name, block)


@dataclass(frozen=True, init=False)
class Wire:
    """The formats in which parameters and gradients travel. Given to ``fs.make_plan(wire=)`` and ``fs.Rule(wire=)``.

    Parameters, optimizer state and sums keep their dtypes. Only floating-point leaves are concerned. A format is
    ``"bf16"``, ``"fp8_e4m3"``, ``"int8"`` or ``"int4"``, and for sums over replicas ``"powersgd"`` too; ``"fp32"`` and
    None send what is there, as without a wire.
    A dict gives formats by mesh axes, and all transfers over other axes are exact: ``reduce={"replica": "int4"}``
    compresses sums over ``replica`` alone. Transfers over several axes have a key that joins them by ``+``.

    Args:
        gather: the format of all-gathers. Units read the rounded values, on any number of ranks the same.
        reduce: the format of gradients on their way to be summed. Each rank rounds its gradient once; what arrives is
            summed in the dtype of the parameters, in the order of ranks. Takes the place of ``Precision.reduce``.
        update: the format of ranges that ranks have updated for each other (``Rule(opt=)``). What travels is the
            difference to what the other ranks hold, and the rest of it goes with the next one: error feedback, as in
            SDP4Bit. The exact parameters of its range are a rank's own, ``state.opt_state["master"]``.
        block: elements of a leaf that share a scale in the formats of 8 and 4 bits: a power of two, at least 16.
        rotate: whether gradients are rotated blockwise by a Hadamard matrix before they are rounded, which spreads
            outliers over their block (QuaRot, Ashkboos et al., 2024), and rotated back after that.
        rounding: how gradients are rounded to 8 and 4 bits: ``"nearest"``, or ``"stochastic"``, which is right on
            average. The random bits are a hash of the gradients, so a step that is made again rounds alike.
        feedback: whether each replica keeps what rounding leaves out of its part of a sum over replicas, and adds it to
            its part of the next one (Seide et al., "1-Bit SGD", 2014; Karimireddy et al., "Error Feedback Fixes
            SignSGD", 2019). True: in all formats of ``reduce=``; axes, as in a key of ``reduce=``: in sums over these
            alone. What is left is ``state.opt_state["residual"]``, as large as what a rank updates. Reduce-scatters
            have none: what is left of one would be a whole gradient on each rank.
        rank: columns of the two factors as which ``reduce={"replica": "powersgd"}`` sums matrices over replicas, a
            positive int. It has feedback always, and each sum begins with the factors of the one before, which are
            ``state.opt_state["basis"]`` (PowerSGD, Vogels et al., 2019). Other leaves travel exact.

    Raises:
        PlanError: an unknown format, or a value of another type or out of range.

    >>> fs.Wire(gather="int8", reduce={"replica": "int4"})
    Wire(gather='int8', reduce={'replica': 'int4'})
    """

    gather: Formats = None
    reduce: Formats = None
    update: Formats = None
    _: KW_ONLY
    block: int = 256
    rotate: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"
    feedback: bool | str = False
    rank: int = 4

    def __init__(
        self,
        gather: str | Mapping[str, str] | None = None,
        reduce: str | Mapping[str, str] | None = None,
        update: str | Mapping[str, str] | None = None,
        *,
        block: int = 256,
        rotate: bool = False,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        feedback: bool | str = False,
        rank: int = 4,
    ) -> None:
        given = {"gather": gather, "reduce": reduce, "update": update}
        problems = [problem for name, value in given.items() for problem in _problems(name, value)]
        problems = problems or [*_option_problems(_names(_frozen(reduce)), block, rotate, rounding)]
        problems = problems or [*_feedback_problems(_frozen(reduce), feedback)]
        if type(rank) is not int or rank < 1:
            problems.append(f"rank={rank!r} must be a positive int")
        if problems:
            raise PlanError(f"fs.Wire: {'; '.join(problems)}")
        frozen = {name: _frozen(value) for name, value in given.items()}
        options = {"block": block, "rotate": rotate, "rounding": rounding, "feedback": feedback, "rank": rank}
        for name, value in {**frozen, **options}.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        said = [f"{name}={dict(v) if isinstance(v, tuple) else v!r}" for name, v in shown.items()]
        return f"Wire({', '.join(said)})"

    def over(self, kind: str, axes: Axes) -> WireFormat | None:
        """The format of a kind of transfer over these axes; None where it is exact.

        >>> print(fs.Wire(reduce={"replica": "int4"}).over("replica_reduce", ("replica",)))
        int4/256
        """
        field = FIELDS.get(kind, "")
        formats: Formats = getattr(self, field, None) if axes else None
        name = dict(formats).get("+".join(axes)) if isinstance(formats, tuple) else formats
        if name == POWER:
            return WireFormat(name, feedback=True, rank=self.rank)
        if name not in FORMATS:
            return None
        graded = field == "reduce"
        kept = graded and self.feedback in (True, "+".join(axes))
        if name not in SCALED:
            return WireFormat(name, feedback=kept)
        return WireFormat(name, self.block, self.rotate and graded, self.rounding == "stochastic" and graded, kept)

    @property
    def grid(self) -> int:
        """Leaves begin, and chunks end, at multiples of this many elements: blocks are never cut."""
        named = [value for name in set(FIELDS.values()) for value in _names(getattr(self, name))]
        return self.block if any(name in SCALED for name in named) else 1

    def keys(self, field: str) -> tuple[str, ...]:
        """The axes that a field names."""
        formats = getattr(self, field)
        return tuple(axes for axes, _ in formats) if isinstance(formats, tuple) else ()


def _frozen(value: str | Mapping[str, str] | None) -> Formats:
    return tuple(value.items()) if isinstance(value, Mapping) else value


def _names(formats: Formats) -> list[str]:
    """The names of formats in a field."""
    if isinstance(formats, tuple):
        return [name for _, name in formats]
    return [] if formats is None else [formats]


def _option_problems(reduced: list[str], block: object, rotate: object, rounding: object) -> Iterator[str]:
    """List what is wrong with options, given the names of the formats of gradients."""
    if type(block) is not int or block < 16 or block & (block - 1):
        yield f"block={block!r} must be a power of two, at least 16"
    if not isinstance(rotate, bool):
        yield f"rotate={rotate!r} must be True or False"
    elif rotate and not {*reduced} & {*SCALED}:
        yield "rotate=True, but no gradients travel in blocks: give reduce= a format of 8 or 4 bits"
    if rounding not in ("nearest", "stochastic"):
        yield f"rounding={rounding!r} must be 'nearest' or 'stochastic'"
    elif rounding == "stochastic" and not {*reduced} & {*WHOLE}:
        known = " or ".join(map(repr, WHOLE))
        yield f"rounding='stochastic', but no gradients travel as integers: give reduce= {known}"


def _feedback_problems(reduced: Formats, feedback: object) -> Iterator[str]:
    """List what is wrong with feedback, given the formats of gradients."""
    if not isinstance(feedback, bool | str):
        yield f"feedback={feedback!r} must be True, False or axes, such as 'replica'"
    elif feedback and not {*_names(reduced)} & {*FORMATS, POWER}:
        yield f"feedback={feedback!r}, but no sums are rounded: give reduce= a format"
    elif isinstance(feedback, str) and isinstance(reduced, tuple) and feedback not in dict(reduced):
        yield f"feedback={feedback!r} names no axes of reduce=: {', '.join(repr(axes) for axes, _ in reduced)}"


def _problems(field: str, value: object) -> list[str]:
    """List what is wrong with the value of a field."""
    pairs = list(value.items()) if isinstance(value, Mapping) else [("", value)]
    wrong = [f"{field}={value!r}: axes are strings"] if any(not isinstance(axes, str) for axes, _ in pairs) else []
    known = ", ".join(map(repr, NAMES))
    unknown = [name for _, name in pairs if name not in NAMES and not (name is None and not isinstance(value, Mapping))]
    low = [name for _, name in pairs if name == POWER and field != "reduce"]
    wrong += [f"{field}={value!r}: only sums over replicas have a low rank, reduce=" for _ in low[:1]]
    return wrong + [f"{field}={value!r}: {name!r} is none of {known}" for name in unknown]


def wire_formats(wire: Wire, axes: Mapping[str, Axes], dtype: torch.dtype) -> dict[str, WireFormat]:
    """The formats of compressed transfers by kind, given the axes of each kind."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return {}
    found = {kind: wire.over(kind, over) for kind, over in axes.items()}
    return {kind: made for kind, made in found.items() if made is not None}
