"""Formats of torch.distributed: DTensor, and the ``.metadata`` of torch.distributed.checkpoint.

The only module outside of ``runtime/comm`` that imports torch.distributed, which owns these classes. Its only
collectives are those of making a DeviceMesh and of ``full_tensor``.
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fshard.arguments import expect
from fshard.errors import PlanError, TreeError
from fshard.interchange.metadata import Contents
from fshard.sharding.mesh import Mesh
from fshard.sharding.spec import Shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Placements = tuple[int | None, ...]
"""For each dim of a mesh the tensor dim that it divides, or None if the tensor is replicated."""


def joined_mesh(mesh: Mesh, given: "DeviceMesh | None") -> "DeviceMesh":
    """torch's mesh of the same ranks, axes and sizes: the given one, checked, or a new one, made collectively."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    expect("to_dtensor(params, plan)", [("device_mesh", given, (DeviceMesh, type(None)), "a DeviceMesh, or None")])
    if given is None:
        if mesh.whole is not mesh:
            raise PlanError(
                f"to_dtensor: this plan is that of one replica, and all ranks together make a new DeviceMesh: give "
                f"device_mesh=, a mesh of the ranks {list(mesh.members)} with the dims {mesh.axis_names}"
            )
        if not dist.is_initialized():
            raise PlanError(
                "a DTensor needs a process group, and there is none: run under torchrun, with fs.make_mesh(...); "
                "virtual meshes have none"
            )
        ranks = torch.arange(mesh.size, device="cpu").view(mesh.sizes)
        return DeviceMesh(mesh.device.type, ranks, mesh_dim_names=mesh.axis_names)
    names = given.mesh_dim_names or ()
    if tuple(given.mesh.shape) != mesh.sizes or tuple(names) not in (mesh.axis_names, ()):
        raise PlanError(
            f"device_mesh has dims {tuple(names)} of {tuple(given.mesh.shape)}, and the plan's mesh has "
            f"{mesh.axis_names} of {mesh.sizes}: they must be equal"
        )
    if given.mesh.flatten().tolist() != list(mesh.members):
        raise PlanError(f"device_mesh has other ranks than {list(mesh.members)}, in the order of the plan's mesh")
    return given


def make_dtensor(local: Tensor, mesh: "DeviceMesh", placements: Placements, shape: Shape) -> Tensor:
    """The DTensor of this shape, of which this rank holds ``local``."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    where = [Replicate() if dim is None else Shard(dim) for dim in placements]
    stride = torch.empty(shape, device="meta").stride()
    made: Tensor = DTensor.from_local(local, mesh, where, run_check=False, shape=torch.Size(shape), stride=stride)
    return made


def local_part(value: Any, path: str, mesh: Mesh) -> tuple[Tensor, Placements]:
    """This rank's part of a DTensor and its placements; all of a plain tensor, or where no placements describe it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(value, DTensor):
        return value.detach(), (None,) * len(mesh.sizes)
    theirs = value.device_mesh
    if tuple(theirs.mesh.shape) != mesh.sizes or theirs.mesh.flatten().tolist() != list(mesh.members):
        raise TreeError(
            f"{path} lies on {theirs}, and the plan on a mesh {mesh.axis_names} of {mesh.sizes}: use meshes of equal "
            f"shape, or give full tensors, value.full_tensor()"
        )
    if all(type(where) in (Shard, Replicate) for where in value.placements):
        dims = tuple(where.dim % value.ndim if isinstance(where, Shard) else None for where in value.placements)
        return value.to_local().detach(), dims
    # Partial sums and strided shards: one leaf at a time is gathered.
    return value.full_tensor().detach(), (None,) * len(mesh.sizes)


def dump_metadata(contents: Contents, paths: Mapping[str, Sequence[Any]]) -> bytes:
    """The ``.metadata`` of a folder; ``paths`` gives by name the keys of a value in the nested state dict."""
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from fshard.torch_internals import StorageInfo

    listed: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, stored in contents.tensors.items():
        rows = []
        for number, chunk in enumerate(contents.chunks[name]):
            rows.append(ChunkStorageMetadata(torch.Size(chunk.block.offset), torch.Size(chunk.block.shape)))
            place = StorageInfo(chunk.where.file, chunk.where.begin, chunk.where.length)
            places[MetadataIndex(name, chunk.block.offset, number)] = place
        listed[name] = TensorStorageMetadata(TensorProperties(stored.dtype), torch.Size(stored.shape), rows)
    for name, where in contents.others.items():
        listed[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = StorageInfo(where.file, where.begin, where.length)
    planner = {name: tuple(keys) for name, keys in paths.items()}
    return pickle.dumps(Metadata(state_dict_metadata=listed, planner_data=planner, storage_data=places))
