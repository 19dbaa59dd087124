"""Memory kinds: the memory spaces of parameters and optimizer state, and the side of their update.

The kinds are JAX's (``jax.sharding.NamedSharding(mesh, spec, memory_kind="pinned_host")``). Their use is that of
ZeRO-Offload (Ren et al., 2021), ZeRO-Infinity (Rajbhandari et al., 2021) and FSDP2's ``CPUOffloadPolicy``: a host has
ten times the memory of its GPUs, and a step needs only a part of the state at a time.
"""

from dataclasses import dataclass
from typing import Literal

MemoryKind = Literal["device", "pinned_host", "unpinned_host"]
"""The mesh's device; its host, page-locked, so that copies run beside compute; or its host, pageable."""

Side = Literal["device", "host"]
"""The side of an update."""

KINDS: tuple[MemoryKind, ...] = ("device", "pinned_host", "unpinned_host")
SIDES: tuple[Side, ...] = ("device", "host")


@dataclass(frozen=True)
class Kinds:
    """The memory of one leaf's parameter and optimizer state, and the side of its update.

    >>> str(kinds_of("pinned_host")), str(kinds_of("pinned_host", update_on="device")), str(Kinds())
    ('pinned_host', 'pinned_host update=device', '')
    """

    param: MemoryKind = "device"
    opt: MemoryKind = "device"
    update: Side = "device"

    def __str__(self) -> str:
        words: list[str] = [self.param] if self.param != "device" else []
        words += [f"opt={self.opt}"] if self.opt != self.param else []
        words += [f"update={self.update}"] if self.update != _usual(self.param, self.opt) else []
        return " ".join(words)

    @property
    def hosted(self) -> bool:
        """Tell whether the parameter is kept in host memory."""
        return self.param != "device"

    @property
    def moved(self) -> tuple[bool, bool]:
        """Tell whether parameter and optimizer state must be staged on the other side for the update."""
        here = self.update == "device"
        return (self.param == "device") != here, (self.opt == "device") != here


def kinds_of(
    memory_kind: MemoryKind | None,
    opt_memory_kind: MemoryKind | None = None,
    update_on: Side | None = None,
    trainable: bool = True,
) -> Kinds:
    """The memory of a leaf by its rule, None for the default. A frozen leaf has no optimizer state."""
    param = memory_kind or "device"
    if not trainable:
        return Kinds(param)
    opt = opt_memory_kind or param
    return Kinds(param, opt, update_on or _usual(param, opt))


def _usual(param: MemoryKind, opt: MemoryKind) -> Side:
    """The default side of the update: the host if all that the update writes is there."""
    return "host" if "device" not in (param, opt) else "device"
