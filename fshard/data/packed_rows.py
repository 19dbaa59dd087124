"""Packed sequences: documents of different lengths side by side in rows of one length, without padding between."""

import bisect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.arguments import Want, expect
from fshard.errors import PlanError, lines

IGNORED = -100
"""The target where there is none: what PyTorch's cross-entropy ignores."""

Span = tuple[int, int, int]
"""A document, and the begin and the end of a part of it."""


class Packed:
    """A data set of rows of equal length, each of which holds documents side by side. For ``fs.data.Loader``.

    Row ``i`` is a dict of int64 tensors of ``length`` elements:

    * ``tokens``: the documents' tokens; zeros after the last one.
    * ``targets``: the next token of the same document, also where it lies in another row; -100, which PyTorch's
      cross-entropy ignores, at the end of a document and after the last one.
    * ``positions``: the place of each token in its part of the document.
    * ``documents``: the number of its part in the row, counted from 0; -1 after the last one.
      ``fs.data.document_mask`` makes an attention mask of it.

    Args:
        documents: a sequence of 1-D tensors or lists of ints, each with one token or more.
        length: the tokens of a row.
        split: whether documents are cut at the end of a row, and go on in the next one: then only the last row has
            room left. Else each lies in one row as a whole, the longest first, in the row with the least room for it.

    Raises:
        PlanError: empty documents; or, without ``split``, documents longer than a row.

    >>> rows = fs.data.Packed([[1, 2, 3], [4, 5]], length=4)
    >>> len(rows), rows[0]["tokens"].tolist(), rows[0]["targets"].tolist(), rows[1]["documents"].tolist()
    (2, [1, 2, 3, 4], [2, 3, -100, 5], [0, -1, -1, -1])
    """

    def __init__(self, documents: Sequence[Any], length: int, *, split: bool = True) -> None:
        wants: list[Want] = [
            (
                "length",
                length if not isinstance(length, bool) and length > 0 else None,
                int,
                "the tokens of a row, >= 1",
            ),
            ("split", split, bool, "True or False"),
        ]
        expect("fs.data.Packed(documents, length)", wants)
        self.documents, self.length = documents, length
        sizes = [len(document) for document in documents]
        _check(sizes, length, split)
        self.rows = _cut(sizes, length) if split else _fit(sizes, length)
        """The parts of documents in each row."""

    def __repr__(self) -> str:
        return f"Packed({len(self.documents)} documents in {len(self)} rows of {self.length})"

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def filled(self) -> float:
        """The part of all places that hold a token."""
        held = sum(end - begin for row in self.rows for _, begin, end in row)
        return held / (len(self) * self.length) if self.rows else 1.0

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        tokens, positions = torch.zeros(2, self.length, dtype=torch.int64, device="cpu")
        targets = torch.full((self.length,), IGNORED, device="cpu")
        documents = torch.full((self.length,), -1, device="cpu")
        at = 0
        for number, (document, begin, end) in enumerate(self.rows[row]):
            known = torch.as_tensor(self.documents[document][begin : end + 1], dtype=torch.int64, device="cpu")
            size = end - begin
            tokens[at : at + size] = known[:size]
            targets[at : at + len(known) - 1] = known[1:]
            positions[at : at + size] = torch.arange(size, device="cpu")
            documents[at : at + size] = number
            at += size
        return {"tokens": tokens, "targets": targets, "positions": positions, "documents": documents}


def document_mask(documents: Tensor) -> Tensor:
    """The causal attention mask of packed rows: each token sees those before it in its own document, and itself.

    Args:
        documents: of ``Packed``, ``(rows, length)``.

    Returns:
        bool, ``(rows, 1, length, length)``, for ``torch.nn.functional.scaled_dot_product_attention(attn_mask=)``.

    >>> fs.data.document_mask(torch.tensor([[0, 0, 1]]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril().unsqueeze(1)


def _check(sizes: Sequence[int], length: int, split: bool) -> None:
    empty = [f"documents[{i}] has no token" for i, size in enumerate(sizes) if not size]
    if empty:
        raise PlanError(lines("fs.data.Packed: empty documents:", empty, "Leave them out."))
    long = [f"documents[{i}] has {size} tokens" for i, size in enumerate(sizes) if size > length and not split]
    if long:
        remedy = "Give split=True, or longer rows."
        raise PlanError(lines(f"fs.data.Packed: documents longer than a row of {length} tokens:", long, remedy))


def _cut(sizes: Sequence[int], length: int) -> list[list[Span]]:
    """Documents one after the other, cut where a row ends."""
    rows: list[list[Span]] = []
    room = 0
    for document, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if not room:
                rows.append([])
                room = length
            end = min(size, begin + room)
            rows[-1].append((document, begin, end))
            room -= end - begin
            begin = end
    return rows


def _fit(sizes: Sequence[int], length: int) -> list[list[Span]]:
    """Whole documents, the longest first, each in the row that it fills best (best-fit decreasing)."""
    rows: list[list[Span]] = []
    rooms: list[tuple[int, int]] = []  # the room that is left, and the row, ascending
    for document in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect.bisect_left(rooms, (sizes[document], -1))
        if at == len(rooms):
            rows.append([])
            room, row = length, len(rows) - 1
        else:
            room, row = rooms.pop(at)
        rows[row].append((document, 0, sizes[document]))
        bisect.insort(rooms, (room - sizes[document], row))
    return rows
