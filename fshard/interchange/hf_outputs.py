"""The tensors of a Hugging Face folder, made of leaves as these arrive."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fshard import tree
from fshard.checkpoint.tensorfile import TensorMeta
from fshard.errors import TreeError, lines
from fshard.interchange.export_plan import ExportItem
from fshard.interchange.hf_names import persistent, to_files, unsaved
from fshard.interchange.source import MemorySource
from fshard.interchange.woven import Woven


class HfOutputs:
    """The tensors that are written, in the order in which their leaves arrive.

    Attributes:
        items: the leaves to gather.
        tensors: what is written, by name.
    """

    def __init__(
        self, module: Any, items: Sequence[ExportItem], buffers: Mapping[str, Any] | None, renamed: frozenset[str]
    ) -> None:
        """Plan the outputs; names in ``renamed`` are those of leaves that a user's rule decided."""
        given = _buffers(module, buffers)
        skipped = frozenset[str]() if module is None else unsaved(module)
        self.items = [item for item in items if item.name not in skipped or item.entry.name in renamed]
        if both := sorted({item.name for item in self.items} & given.keys()):
            raise TreeError(lines("buffers= has names of leaves:", both, "Leave them out."))
        self._made = _made(module, self.items, given, renamed)
        self._held: dict[str, Tensor] = dict(given)
        self._outputs = _in_order(self._made, [*given], [item.name for item in self.items])
        self._left = {item.name: sum(item.name in x.names for x in self._made.values()) for item in self.items}
        ordered = [(name, self._made[name]) for names in self._outputs.values() for name in names]
        self.tensors = {name: TensorMeta(tuple(one.shape), one.dtype) for name, one in ordered}

    def take(self, name: str, leaf: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors to write, now that a leaf has arrived; leaves that nothing needs any more are dropped."""
        self._held[name] = leaf
        for output in self._outputs.pop(name, ()):
            one = self._made[output]
            yield (
                output,
                leaf
                if one.boxes == Woven.of(name, leaf.shape, leaf.dtype).boxes
                else one.whole(MemorySource("leaves", self._held).read),
            )
            for used in one.names & self._left.keys():
                self._left[used] -= 1
                if not self._left[used]:
                    del self._held[used]


def _buffers(module: Any, given: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """The buffers to write by name."""
    own = {} if module is None else persistent(module)
    if given is None:
        return own
    return {path: buffer for path, buffer in tree.paths(given) if module is None or path in own}


def _made(
    module: Any, items: Sequence[ExportItem], buffers: Mapping[str, Tensor], renamed: frozenset[str]
) -> dict[str, Woven]:
    """The tensors of files, made of leaves and buffers; those that users renamed stay what they are."""
    own = {item.name: TensorMeta(item.shape, item.dtype) for item in items if item.entry.name in renamed}
    rest = {item.name: TensorMeta(item.shape, item.dtype) for item in items if item.entry.name not in renamed}
    rest |= {name: TensorMeta(tuple(x.shape), x.dtype) for name, x in buffers.items()}
    return _plain(own) | (_plain(rest) if module is None else to_files(module, rest))


def _plain(metas: Mapping[str, TensorMeta]) -> dict[str, Woven]:
    return {name: Woven.of(name, meta.shape, meta.dtype) for name, meta in metas.items()}


def _in_order(made: Mapping[str, Woven], before: Sequence[str], arrivals: Sequence[str]) -> dict[str, list[str]]:
    """The outputs that each arrival completes; those of nothing else come with the first."""
    number = {name: 0 for name in before} | {name: i for i, name in enumerate(arrivals)}
    out: dict[str, list[str]] = {name: [] for name in arrivals}
    for name, one in made.items():
        out[arrivals[max((number[used] for used in one.names), default=0)]].append(name)
    return out
