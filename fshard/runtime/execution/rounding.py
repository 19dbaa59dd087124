"""Stochastic rounding of parameters that are kept in bfloat16.

An update is often smaller than half of the last bit of a bfloat16 parameter; rounded to nearest, it is lost, and
training stalls. Rounded up with the probability of what is cut off, it counts on average (Gupta et al., "Deep Learning
with Limited Numerical Precision", 2015; Zamirai et al., "Revisiting BFloat16 Training", 2020). The random bits come
from (seed, step, path, global index), so they do not depend on the mesh.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fshard.model.philox import fold
from fshard.runtime.comm.row_sums import checked
from fshard.runtime.execution.rounding_bits import Key, LeafPart, Positions, levels, round_, signed
from fshard.runtime.execution.shards import Slices
from fshard.runtime.memory.optimizer_layout import UpdateSlice
from fshard.sharding.layout import ALIGN
from fshard.sharding.plan import Plan
from fshard.torch_internals import foreach_copy_

BATCH = 1 << 16
"""Elements of parameters up to which small slices are updated together: their operators take longer than their work."""

NARROW = torch.bfloat16

Named = tuple[int, UpdateSlice, str]
"""A slice by its group, and the name of a buffer of the optimizer; empty for the parameters."""

Kernel = Callable[[Tensor, Tensor, int, Positions, Key], None]
"""``kernel(out, x, begin, positions, key)`` writes ``x`` rounded to ``out``, whose elements begin there in a buffer."""

Rule = Callable[[list[Tensor], list[Tensor], list[dict[str, Tensor]], UpdateSlice], None]


def rounded_groups(plan: Plan) -> frozenset[int]:
    """The groups whose updates are rounded stochastically."""
    asked = (g for g in plan.groups if g.trainable and g.leaves[0].precision.rounding == "stochastic")
    return frozenset(group.id for group in asked if group.dtype == torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Rounding:
    """Updates that are computed in float32 and rounded stochastically.

    Args:
        plan: the plan.
        seed: of the random bits.
        groups: the ids of the groups that it is for.
    """

    plan: Plan
    seed: int
    groups: frozenset[int]
    _tables: dict[tuple[Named, ...], Positions] = field(default_factory=dict, init=False, repr=False)

    def key(self, step: int) -> int:
        """The key of the roundings of a step, as an int64."""
        return signed(fold(self.seed, f"round:{step}"))

    def update(self, call: Slices, key: Key, rule: Rule) -> None:
        """Update slices: parameters and those buffers that are bfloat16 too are widened, updated and rounded."""
        for part in _batches(call.params):
            batch = Slices(call.cut, call.params[part], call.grads[part], call.states[part], call.places[part])
            self._update(batch, key, rule)

    def _update(self, batch: Slices, key: Key, rule: Rule) -> None:
        cut, params, grads, states, places = batch
        kept = [(at, *item) for at, state in enumerate(states) for item in state.items() if item[1].dtype == NARROW]
        kept.sort(key=lambda one: one[2].shape != params[one[0]].shape)  # those of other shapes are rounded to nearest
        alike = len(params) + sum([value.shape == params[at].shape for at, _, value in kept])
        targets = [*params, *[value for *_, value in kept]]
        flat, views, begins = _widened([*targets, *grads])
        wide = [dict(state) for state in states]
        for (at, name, _), view in zip(kept, views[len(params) :], strict=False):
            wide[at][name] = view
        rule(views[: len(params)], views[len(targets) :], wide, cut)
        named = [(*place, "") for place in places] + [(*places[at], name) for at, name, _ in kept]
        positions = self._positions(tuple(named[:alike]), begins, flat.device)
        kernel = kernel_of(flat)
        if kernel is None:
            round_(flat, begins[alike], positions, key)
            foreach_copy_(targets, views[: len(targets)])
            return
        for target, view, begin in zip(targets[:alike], views, begins, strict=False):
            kernel(target, view, begin, positions, key)
        if targets[alike:]:
            foreach_copy_(targets[alike:], views[alike : len(targets)])

    def _positions(self, named: tuple[Named, ...], begins: Sequence[int], device: torch.device) -> Positions:
        """The leaves of these slices, which begin there in one buffer."""
        if named not in self._tables:
            rows: list[LeafPart] = []
            for (group, cut, name), begin in zip(named, begins, strict=False):
                held, mesh = self.plan.groups[group].owned, self.plan.mesh
                part = mesh.index(held.gather_axes)
                for number in range(cut.leaves[0], cut.leaves[1] + 1):
                    first, end = held.shard_range(number, part)
                    if first < end:
                        leaf, piece = held.leaves[number], held.piece(number, mesh)
                        key = fold(self.seed, f"round:{name}:{leaf.path}")
                        rows.append(LeafPart(begin + first - cut.begin, key, piece.start, levels(leaf.shape, piece)))
            self._tables[named] = Positions.of(rows, device)
        return self._tables[named]


def _batches(params: Sequence[Tensor]) -> Iterator[slice]:
    """Runs of tensors: as many as have so few elements together, or one."""
    begin = held = 0
    for number, param in enumerate(params):
        if number > begin and held + len(param) > BATCH:
            yield slice(begin, number)
            begin, held = number, 0
        held += len(param)
    yield slice(begin, len(params))


def _widened(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor], list[int]]:
    """1-D tensors in float32, one behind the other in a buffer; the parts of the buffer, and where each begins.

    They begin at multiples of ``ALIGN`` elements, as leaves do in theirs.
    """
    sizes = [size for tensor in tensors for size in (len(tensor), -len(tensor) % ALIGN)]
    begins = [*itertools.accumulate(sizes, initial=0)][::2]
    flat = torch.empty(begins[-1], dtype=torch.float32, device=tensors[0].device)
    views = list(torch.split(flat, sizes)[::2])
    foreach_copy_(views, tensors)
    return flat, views, begins


def kernel_of(x: Tensor) -> Kernel | None:
    """The kernel that rounds on a tensor's device; None where there is none. Its first call waits for the device."""
    return _kernel_on(x.device) if type(x) is Tensor and x.device.type == "cuda" else None


@functools.cache
def _kernel_on(device: torch.device) -> Kernel | None:
    from fshard.runtime.execution import rounding_kernel

    return None if rounding_kernel.KERNEL is None else right(rounding_kernel.round_to, device)


def right(kernel: Kernel, device: torch.device) -> Kernel | None:
    """A kernel, if it can be compiled here and has the bits of ``round_``; else None, with a warning."""

    def same() -> bool:
        numbers = torch.arange(3008, device=device).float().mul(12.9898).sin().pow(9)
        numbers[5], numbers[9] = float("inf"), float("nan")
        for maps in ((), ((16, 48, 7),), ((3, 5, 1), (30, 90, 60))):
            rows = [LeafPart(0, 3, 32, maps), LeafPart(16, 1 << 63, 0), LeafPart(1024, 5, 0, maps)]
            positions = Positions.of(rows, device)
            for key in (-1, torch.full((), -1, device=device)):
                out, want = torch.zeros(2997, dtype=torch.bfloat16, device=device), numbers.clone()
                kernel(out, numbers[8:3005], 8, positions, key)
                round_(want, 3008, positions, key)
                if not torch.equal(out.float().nan_to_num(1e9), want[8:3005].nan_to_num(1e9)):
                    return False
        return True

    return checked(kernel, "that rounds stochastically", device, same, "thirty kernels make them")
