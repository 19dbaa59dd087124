"""Memory kinds: on which side of the bus parameters and optimizer state are kept, and where they are updated.

The kinds are JAX's (``jax.sharding.NamedSharding(mesh, spec, memory_kind="pinned_host")``). What they are for is known
from ZeRO-Offload (Ren et al., 2021), ZeRO-Infinity (Rajbhandari et al., 2021) and FSDP2's ``CPUOffloadPolicy``: the
memory of a host is ten times that of its GPUs, and of most state a step needs but a part at a time.
"""

from dataclasses import dataclass
from typing import Literal

MemoryKind = Literal["device", "pinned_host", "unpinned_host"]
"""The memory of the mesh's device; that of its host, page-locked, so that copies run beside compute; or any of it."""

Side = Literal["device", "host"]
"""Where an update runs."""

KINDS: tuple[MemoryKind, ...] = ("device", "pinned_host", "unpinned_host")
SIDES: tuple[Side, ...] = ("device", "host")


@dataclass(frozen=True)
class Kinds:
    """Where one leaf is kept.

    Attributes:
        param: its parameter.
        opt: its optimizer state.
        update: the side on which its update runs.

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
        """Whether the parameter is kept in host memory."""
        return self.param != "device"

    @property
    def moved(self) -> tuple[bool, bool]:
        """Whether the parameter, and whether the optimizer state, must come to the other side for the update."""
        here = self.update == "device"
        return (self.param == "device") != here, (self.opt == "device") != here


def kinds_of(
    memory_kind: MemoryKind | None,
    opt_memory_kind: MemoryKind | None = None,
    update_on: Side | None = None,
    trainable: bool = True,
) -> Kinds:
    """What a rule says of a leaf; None where it leaves it open. A frozen leaf has a parameter alone."""
    param = memory_kind or "device"
    if not trainable:
        return Kinds(param)
    opt = opt_memory_kind or param
    return Kinds(param, opt, update_on or _usual(param, opt))


def _usual(param: MemoryKind, opt: MemoryKind) -> Side:
    """Where the update runs if nobody says so: on the host if all that it writes is there."""
    return "host" if "device" not in (param, opt) else "device"
