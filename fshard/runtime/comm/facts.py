"""Values that must be equal on all ranks. One number compares them; an error names differences by item and rank."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fshard.errors import ReplicationError, ShardError, lines
from fshard.runtime.comm.communicator import Communicator
from fshard.runtime.comm.copies import Copy, unequal_copies
from fshard.runtime.comm.exchange import exchange, exchange_bytes
from fshard.sharding.fact_texts import Texts

Tiers = Sequence[Mapping[str, str]]
"""Texts by name. Items that follow from others are in a later tier, which is reported only if earlier tiers agree."""

WIDTH = 400
"""Characters of a value that an error shows."""


@dataclass(frozen=True)
class Facts:
    """Facts that a rank compares with other ranks before a step, a save or a restore.

    Attributes:
        number: equal on two ranks if their items are.
        items: returns the items; called only if numbers differ.
        copies: returns the tensors of which other ranks hold copies, compared if numbers agree; None on all ranks to
            leave them out.
    """

    number: int = 0
    items: Callable[[], Tiers] = tuple
    copies: Callable[[], Sequence[Copy]] | None = None


def facts_of(*tiers: Mapping[str, str]) -> Facts:
    """The facts of given items."""
    return Facts(digest([sorted(tier.items()) for tier in tiers]), lambda: tiers)


def compare(comm: Communicator, facts: Facts, error: type[ShardError] = ReplicationError) -> None:
    """Compare facts. Collective.

    Raises:
        ReplicationError: or ``error``: they differ; on all ranks alike.
    """
    if comm.size > 1:
        compare_numbers(
            comm, exchange(comm, torch.tensor([facts.number], device="cpu")).view(-1).tolist(), facts, error
        )


def compare_numbers(
    comm: Communicator, numbers: Sequence[int], facts: Facts, error: type[ShardError] = ReplicationError
) -> None:
    """Compare facts whose numbers were exchanged. Collective if numbers differ or copies are compared.

    Raises:
        ReplicationError: or ``error``: they differ; on all ranks alike.
    """
    if any(number != numbers[0] for number in numbers):
        said = zlib.compress(json.dumps([dict(tier) for tier in facts.items()]).encode())
        rows = [json.loads(zlib.decompress(row)) for row in exchange_bytes(comm, said)]
        found = next(filter(None, (differences(tiers) for tiers in _by_tier(rows))), ["(what differs has no text)"])
        raise error(lines("ranks differ in what must be equal:", found, REMEDY))
    unequal = unequal_copies(comm, facts.copies()) if facts.copies is not None else []
    if unequal:
        told = [f"{name}: {by_rank(values)}" for name, values in unequal]
        raise error(lines("ranks differ in values of which each has a copy:", told, COPIES))


REMEDY = "Give the same on every rank. Nothing was changed, and the state can be used."
COPIES = (
    "Make states on all ranks from equal values: by fs.init_state(plan, opt, seed), from the same params=, or by "
    "restoring one checkpoint. Nothing was changed."
)


def _by_tier(rows: Sequence[Sequence[Texts]]) -> Iterable[list[Texts]]:
    """The rows of all ranks, one tier after the other."""
    most = max(map(len, rows))
    return ([row[i] if i < len(row) else {} for row in rows] for i in range(most))


def differences(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The items that differ between ranks, one line each.

    >>> differences([{"seed": "0", "lr": "0.1"}, {"seed": "1", "lr": "0.1"}])
    ['seed: rank 0: 0, rank 1: 1']
    """
    names = dict.fromkeys(name for row in rows for name in row)
    table = {name: {rank: row.get(name, "nothing") for rank, row in enumerate(rows)} for name in names}
    return [f"{name}: {by_rank(values)}" for name, values in table.items() if len(set(values.values())) > 1]


def by_rank(values: Mapping[int, str]) -> str:
    """Values by rank; ranks with equal values are listed together.

    >>> by_rank({0: "a", 1: "a", 2: "b", 3: "a"})
    'ranks 0, 1, 3: a, rank 2: b'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    rows = [(f"rank{'s' * (len(some) > 1)} {_few(some)}", value) for value, some in ranks.items()]
    return ", ".join(f"{who}: {value if len(value) <= WIDTH else value[:WIDTH] + '...'}" for who, value in rows)


def _few(ranks: Sequence[int]) -> str:
    """Ranks, or the first of them if they are many."""
    more = f" and {len(ranks) - 6} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:6] if more else ranks)) + more


def digest(value: object) -> int:
    """62 bits of a hash of the value's repr: the same on every rank and in every process."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 2
