"""The provenance of a state: what ranks have still to compare, and the run whose checkpoints it belongs to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fshard.runtime.comm.copies import bits
from fshard.sharding.fact_texts import Texts
from fshard.state.exchanges import Exchanges

SAMPLE = 1024
"""Elements of a whole tensor that are compared, at most."""


@dataclass
class RunIdentity:
    """The identity of a run, shared by all states that come one from the other.

    Attributes:
        ids: as in the manifests of its checkpoints, one for each folder; none before the first.
    """

    ids: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Past:
    """The origin of a state.

    Attributes:
        made: what it was made from, as texts by name; None once ranks have compared it and what they hold copies of.
        exact: whether copies are equal bit for bit where they were made, or up to rounding.
        run: the run that it belongs to.
        exchanges: of a state that an outer step has made, when its fragments leave and arrive, and which they are.
    """

    made: Mapping[str, str] | None = None
    exact: bool = True
    run: RunIdentity = field(default_factory=RunIdentity)
    exchanges: Exchanges | None = None

    def compared(self) -> "Past":
        """The same, once ranks have compared it."""
        return self if self.made is None else replace(self, made=None)

    def alone(self) -> "Past":
        """The same, for a step that a replica makes by itself."""
        return self if self.exchanges is None else replace(self, exchanges=None)

    def elsewhere(self) -> "Past":
        """The past of a state made from the leaves of this one, which ranks have not compared."""
        return Past({}, exact=False, run=self.run, exchanges=self.exchanges)


def samples(leaves: Mapping[str, Tensor]) -> Texts:
    """Some elements of each whole tensor as a text, all of small ones: their first, and a hash.

    >>> import torch
    >>> samples({"w": torch.tensor([0.5, 2.0])})["params= of w"][:9]
    'from 0.5,'
    """
    return {f"params= of {path}": _sample(leaf.detach()) for path, leaf in leaves.items()}


def _sample(leaf: Tensor) -> str:
    flat = leaf.reshape(-1)
    some = flat[:: max(1, -(-len(flat) // SAMPLE))]
    if not len(some):
        return "empty"
    return f"from {some[0].item():.6g}, bits {bits(some):016x}" if not some.is_complex() else f"bits {bits(some):016x}"


def initializers_told(inits: Iterable[tuple[str, object]]) -> Texts:
    """Initializers by path as texts."""
    return {f"initializer of {path}": repr(init) for path, init in inits}
