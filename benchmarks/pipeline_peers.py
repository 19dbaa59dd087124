"""Pipelines of ``pipeline.py``: the same model, cut at the same units, by PyTorch with FSDP2 and by this library."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from model import GPT, Block, Size, loss_of, make
from peers import ADAMW, Peer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fshard as fs


@dataclass(frozen=True)
class Cut:
    """A model and its cut.

    Attributes:
        net: the whole.
        parts: what each stage computes, of the same parameters.
        units: patterns of its units.
        inputs: what the first stage is given of some rows.
        loss: of outputs and rows.
    """

    net: nn.Module
    parts: Sequence[nn.Module]
    units: Sequence[str]
    inputs: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


class Part(nn.Module):
    """The blocks of one stage, with the embedding before the first one and the head behind the last one."""

    def __init__(self, net: GPT, at: int, stages: int) -> None:
        super().__init__()
        each = len(net.blocks) // stages
        self.blocks = nn.ModuleList(net.blocks[at * each : (at + 1) * each])
        self.embed, self.place = (net.embed, net.place) if at == 0 else (None, None)
        self.norm, self.head = (net.norm, net.head) if at + 1 == stages else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None and self.place is not None:
            x = self.embed(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def gpt(size: Size, stages: int) -> Cut:
    """The GPT, with as many blocks on each stage."""
    net = make(size)
    parts = [Part(net, at, stages) for at in range(stages)]
    return Cut(net, parts, ("blocks.*",), lambda rows: rows[:, :-1], loss_of)


class Sleep(torch.autograd.Function):
    """Sleeps as long in the forward as in the backward, or there alone. Sleeping ranks need no processor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: float, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(before)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None, None


class Nap(nn.Module):
    """A linear map that sleeps as long in its forward, for the gradient of its input, and for those of its leaves."""

    def __init__(self, seconds: float, width: int = 8) -> None:
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weight = Sleep.apply(self.linear.weight, 0, self.seconds)
        return Sleep.apply(nn.functional.linear(x, weight, self.linear.bias), self.seconds, self.seconds)


def naps(stages: int, seconds: float) -> Cut:
    """One unit that sleeps on each stage; its rows have 8 inputs."""
    torch.manual_seed(0)
    net = nn.Sequential(*[Nap(seconds) for _ in range(stages)])
    return Cut(net, [*net], ("*",), lambda rows: rows[:, :8] / 256, lambda out, rows: out.square().mean())


class TorchPipeline:
    """``torch.distributed.pipelining`` with 1F1B; with several data ranks, ``fully_shard`` inside of each stage.

    As its documentation and torchtitan have it: groups stay gathered for all microbatches of a step, and gradients are
    reduced once.

    Args:
        cut: the model.
        stages: ranks of the pipeline.
        microbatches: of a step.
    """

    def __init__(self, cut: Cut, stages: int, microbatches: int) -> None:
        shape = (stages, dist.get_world_size() // stages)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("stage", "data"))
        at = mesh.get_local_rank("stage")
        part, self.cut = cut.parts[at], cut
        if shape[1] > 1:
            for block in [block for block in part.modules() if isinstance(block, Block)]:
                fully_shard(block, mesh=mesh["data"], reshard_after_forward=False)
            fully_shard(part, mesh=mesh["data"], reshard_after_forward=False)
        stage = PipelineStage(part, at, stages, torch.device("cpu"), group=mesh.get_group("stage"))
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=cut.loss)
        self.first, self.last = at == 0, at + 1 == stages
        self.optimizer = torch.optim.AdamW(part.parameters(), fused=True, **ADAMW)
        self.loss = torch.tensor(0.0)

    def step(self, rows: Tensor) -> None:
        """One step. The last stage alone knows the loss."""
        losses: list[Tensor] = []
        given = (self.cut.inputs(rows),) if self.first else ()
        self.schedule.step(
            *given, target=rows if self.last else None, losses=losses if self.last else None, return_outputs=False
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if losses:
            self.loss = torch.stack(losses).mean().detach()


class FshardPipeline:
    """This library.

    Args:
        cut: the model.
        stages: ranks of the pipeline.
        microbatches: of a step.
        staged: False is the same step without stages, on one rank of a pipeline.
        compile: of ``fs.make_train_step``.
        folded: two stages on each rank, which go forth and back.
        policy: of ``fs.Policy``.
    """

    def __init__(
        self,
        cut: Cut,
        stages: int,
        microbatches: int,
        staged: bool = True,
        compile: str | None = None,
        folded: bool = False,
        **policy: Any,
    ) -> None:
        mesh = fs.make_mesh((stages, -1), ("stage", "data"))
        model = fs.split(cut.net, units=cut.units)

        def loss_fn(params: dict[str, Any], rows: Tensor) -> Tensor:
            return cut.loss(model.apply(params, cut.inputs(rows)), rows)

        folds: Any = {"chunks": 2, "placement": "v"} if folded else {}
        stages_of = fs.Stages("stage", **folds) if staged else None
        rules = [(r".*", fs.fsdp("data"))]
        plan = fs.make_plan(model, mesh, rules, batch=fs.P("data"), stages=stages_of)
        opt = fs.optim.adamw(**ADAMW)
        self.state = fs.init_state(plan, opt, params=model.params)
        order = "1f1b" if staged else ""
        self.train = fs.make_train_step(
            loss_fn,
            opt,
            plan,
            accumulate=microbatches,
            schedule=fs.Policy(**{"pipeline": order, **policy}),
            compile=compile,
        )
        self.loss = torch.tensor(0.0)

    def step(self, rows: Tensor) -> None:
        """One step."""
        self.state, metrics = self.train(self.state, rows)
        self.loss = metrics.loss


PEERS: dict[str, Callable[[Cut, int, int], Peer]] = {
    "torch": TorchPipeline,
    "fshard": FshardPipeline,
    "fshard kept": lambda *given: FshardPipeline(*given, reshard=False, accumulation="full"),
    "fshard zb_h1": lambda *given: FshardPipeline(*given, pipeline="zb_h1"),
    "fshard fx": lambda *given: FshardPipeline(*given, compile="fx"),
    "fshard fx zb_h1": lambda *given: FshardPipeline(*given, compile="fx", pipeline="zb_h1"),
    "fshard without stages": lambda *given: FshardPipeline(*given, staged=False),
}
"""By name. ``kept``: groups stay gathered and gradients are reduced once a step, as ``torch`` does."""


def check_agreement(found: dict[str, Peer], rows: Callable[[int], Tensor], stages: int, steps: int = 3) -> None:
    """See that all peers train alike: the mean loss of the ranks with the last stage, over some steps.

    Raises:
        SystemExit: they do not.
    """
    world = dist.get_world_size()
    data = world // stages
    for number in range(steps):
        losses = {}
        for name, peer in found.items():
            peer.step(rows(number))
            last = dist.get_rank() >= world - data
            loss = torch.as_tensor(peer.loss, dtype=torch.float64) * last / data
            dist.all_reduce(loss)
            losses[name] = float(loss)
        first = next(iter(losses.values()))
        if any(abs(loss - first) > 1e-4 * abs(first) for loss in losses.values()):
            raise SystemExit(f"the peers do not train alike: step {number}: {losses}")
