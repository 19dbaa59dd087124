"""Where the tensors of all messages lie that ranks send beside steps, on the device of our own."""

import dataclasses
import functools
import tempfile
import types
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from tests.device.cases import batch, loss, on, params, planned
from tests.device.own import DEVICE, load


class Sorted:
    """A transport that looks where tensors lie: NCCL takes none of the CPU, and messages of the host are no others."""

    def __init__(self, inner: Any, wrong: list[str]) -> None:
        self.inner, self.wrong = inner, wrong

    def communicator(self, role: str, axes: tuple[str, ...]) -> Any:
        """The communicator, watched."""
        comm, here = self.inner.communicator(role, axes), role.startswith(("control", "checkpoint"))

        def call(name: str, *args: Any, **kwargs: Any) -> Any:
            devices = {x.device.type for x in args if isinstance(x, Tensor)}
            if devices != {"cpu" if here else DEVICE}:
                self.wrong.append(f"{name} on {role} of tensors on {', '.join(sorted(devices))}")
            return getattr(comm, name)(*args, **kwargs)

        names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        return types.SimpleNamespace(size=comm.size, **{name: functools.partial(call, name) for name in names})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def where_messages_lie(folder: str) -> list[str]:
    """Everything that ranks say to each other beside steps: what travels over NCCL lies on the device."""
    wrong: list[str] = []

    def rank(mesh: fs.Mesh) -> None:
        mesh = dataclasses.replace(mesh.here, transport=Sorted(mesh.transport, wrong))
        plan, opt = planned(mesh), fs.optim.adamw(1e-2)
        state = fs.init_state(plan, opt, params=params())
        step = fs.make_train_step(loss, opt, plan, clip_norm=0.1)
        state, _ = step(state, batch(0, mesh))
        fs.make_eval_step(loss, plan)(state, batch(0, mesh))
        fs.value_and_grad(loss, plan)(state.params, batch(0, mesh))
        torch.func.grad(fs.func.sharded_loss(loss, plan))(state.params, batch(0, mesh))
        fs.tree.norm(state.params, plan)
        fs.unshard(state.params, plan)
        for to in (None, 1):
            list(fs.io.export(state, what="state", to=to))
        fs.io.to_state_dict(state)
        fs.io.save_hf(state, f"{folder}/hf")
        fs.io.save_dcp(state, f"{folder}/dcp")
        with fs.Checkpointer(f"{folder}/own") as checkpoints:
            checkpoints.save(state)
            checkpoints.restore(plan, opt)
        fs.collectives.psum(torch.ones(3, device=mesh.device), "shard", mesh=mesh)

    on(DEVICE, 2, rank)
    return sorted(set(wrong))


def run(library: str) -> list[str]:
    """The same in a folder that goes when it is over. In a process of a pool."""
    load(library)
    with tempfile.TemporaryDirectory() as folder:
        return where_messages_lie(folder)
