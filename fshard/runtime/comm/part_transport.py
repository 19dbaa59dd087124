"""Transports of parts of a mesh: of a replica that trains apart (``fs.outer``), and of the ranks of one stage."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import torch.distributed as dist

from fshard.runtime.comm.gloo import without_interrupting
from fshard.runtime.comm.processes import ProcessTransport
from fshard.sharding.part_mesh import PartMesh
from fshard.torch_internals import default_group, default_store


class MeshTransport(ProcessTransport):
    """Joins the ranks of a job, and those of parts of its mesh."""

    def part(self, mesh: PartMesh) -> ProcessTransport:
        """The transport of a part of the mesh, made once for each."""
        made = next((part for part in self.parts if part.mesh == mesh), None)
        if made is None:
            made = PartTransport(mesh, self)
            self.parts.append(made)
        return made


class PartTransport(ProcessTransport):
    """Joins the ranks of one part. Its communicators are made and closed without the other parts.

    Errors number ranks as the mesh of all parts does. A part that gives up closes that mesh too, so that the others
    learn of it.

    Args:
        mesh: the part of the mesh.
        whole: joins the ranks of all parts.
    """

    def __init__(self, mesh: PartMesh, whole: ProcessTransport) -> None:
        super().__init__(mesh, whole.backend, whole.timeout, False, whole.shared_memory, whole.flight)
        self.whole = whole
        self._numbers, self._names = count(), dict[Any, str]()
        self._begin = f"fshard/{whole.store_name()}/part {len(whole.parts)} of {'_'.join(map(str, mesh.members))}"

    def abort_all(self, reason: str) -> str:
        """Close all communicators for good, those between replicas too."""
        return self.whole.abort_all(reason)

    def _group(self, ranks: Sequence[int], backend: str, **options: Any) -> Any:
        """A process group that only the ranks of the replica make.

        gloo's is made under a name that no other group has: ``dist.new_group`` derives names from how many groups a
        process has at that time, which differs where some ranks share memory.
        """
        number = next(self._numbers)
        if self.mesh.rank not in ranks:
            return None
        if backend != "gloo":
            with unbound():
                return super()._group(ranks, backend, use_local_synchronization=True)
        name, c10d = f"{self._begin}/{number}", cast(Any, dist)  # neither stores nor backends are exported
        store = c10d.PrefixStore(name, default_store())
        with without_interrupting(), self.descriptors.opening():
            group = c10d.ProcessGroupGloo(store, list(ranks).index(self.mesh.rank), len(ranks), self.timeout)
        self._names[group] = name
        return group

    def _name(self, group: Any) -> str:
        return self._names[group] if group in self._names else super()._name(group)

    def _destroy(self, groups: list[Any], seconds: float) -> None:
        """Destroy process groups. torch.distributed does not know gloo's, which end with their last reference."""
        known = [group for group in groups if self._names.pop(group, None) is None]
        groups.clear()
        super()._destroy(known, seconds)


@contextmanager
def unbound() -> Iterator[None]:
    """Inside, NCCL's groups are made by their own ranks alone.

    PyTorch would split them from a default group that is bound to a device, and that takes all ranks of the job.
    """
    default = default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound
