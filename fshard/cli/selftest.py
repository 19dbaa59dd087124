"""The test that ``fshard doctor`` runs on two ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from fshard.launch import make_mesh
from fshard.model.split import split
from fshard.optim import adamw
from fshard.sharding.plan import make_plan
from fshard.sharding.spec import P, fsdp
from fshard.state.init import init_state
from fshard.training.make_step import make_train_step

LINKS = {"HostCommunicator": "shared memory", "GlooCommunicator": "gloo", "NcclCommunicator": "NCCL"}
"""What communicators are, by their class."""


def selftest() -> dict[str, Any]:
    """On a rank: the losses of some steps, and what its messages went over."""
    with make_mesh((-1,), ("data",), timeout=30.0) as mesh:
        model = split(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), units=("0", "2"))
        plan = make_plan(model, mesh, [(".*", fsdp("data"))], batch=P("data"))
        opt = adamw(1e-2)

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            loss: Tensor = (model.apply(params, x) - x.sum(1, True)).square().mean()
            return loss

        state, step = init_state(plan, opt, seed=0), make_train_step(loss_fn, opt, plan)
        batch, losses = torch.linspace(-1, 1, 128).view(16, 8), []
        for _ in range(5):
            state, metrics = step(state, plan.local_batch(batch).to(mesh.device))
            losses.append(metrics.loss.item())
        kind = type(mesh.transport.communicator("all_gather", ("data",))).__name__
        return {"losses": losses, "device": mesh.device.type, "links": LINKS.get(kind, kind)}
