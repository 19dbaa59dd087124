"""Three ways to train with Muon: matrices whole on one rank, and gathered for the update, here and over FSDP2.

Muon takes the four matrices of each block, AdamW everything else. All iterate in float32, in which CPUs multiply best.
"""

import re
from collections.abc import Callable
from typing import Any

import peers
import torch
import torch.distributed as dist
from model import loss_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fshard as fs
from fshard import tree

HIDDEN = r"blocks\.\d+\.(qkv|out|up|down)\.weight"
ADAMW: dict[str, Any] = {**peers.ADAMW, "weight_decay": 0.0}
MUON = fs.optim.muon(0.02, dtype=torch.float32)


class Whole(peers.Fshard):
    """Each matrix lies on one rank, ``align="leaf"``, and the update is part of the step."""

    def __init__(self, module: nn.Module) -> None:
        mesh = fs.make_mesh((-1,), ("shard",))
        model = fs.split(module, units=("blocks.*",))
        rules = [fs.Rule(HIDDEN, fs.fsdp("shard"), align="leaf"), (r".*", fs.fsdp("shard"))]
        self.plan = fs.make_plan(model, mesh, rules)
        opt = fs.optim.partition([(HIDDEN, MUON), (r".*", fs.optim.adamw(**ADAMW))])
        self.state = fs.init_state(self.plan, opt, params=model.params)
        self.train = fs.make_train_step(_loss(model), opt, self.plan)
        self.loss = torch.tensor(0.0)


class Gathered:
    """Flat shards; directions are gathered, one collective a block, and every rank iterates every matrix."""

    def __init__(self, module: nn.Module) -> None:
        model = fs.split(module, units=("blocks.*",))
        rules = [fs.Rule(HIDDEN, fs.fsdp("shard"), align=16), (r".*", fs.fsdp("shard"))]  # a group for the matrices
        self.plan = fs.make_plan(model, fs.make_mesh((-1,), ("shard",)), rules)
        hidden = {
            path: torch.empty(leaf.shape, device="meta") for path, leaf in self.plan.leaves.items() if _hidden(path)
        }
        self.matrices = fs.make_plan(tree.nest(hidden), self.plan.mesh, rules[:1], units=("blocks.*",))
        self.params = dict(tree.paths(fs.shard(model.params, self.plan)))
        self.gradient = fs.value_and_grad(_loss(model), self.plan)
        self.kept = [torch.zeros_like(self.params[path]) for path in hidden]
        self.hidden, self.rest = list(hidden), [path for path in self.params if path not in hidden]
        self.adamw = fs.optim.adamw(**ADAMW)
        self.moments = [self.adamw.init(self.params[path]) for path in self.rest]
        self.number, self.loss = 0, torch.tensor(0.0)

    def step(self, rows: Tensor) -> None:
        """One step."""
        self.number += 1
        self.loss, nested = self.gradient(tree.nest(self.params), rows)
        grads = dict(tree.paths(nested))
        rest = [[of[path] for path in self.rest] for of in (self.params, grads)]
        with torch.no_grad():
            self.adamw.update(rest[0], rest[1], self.moments, step=self.number, hyper=0.0)
            self._muon([grads[path] for path in self.hidden])

    def _muon(self, grads: list[Tensor]) -> None:
        torch._foreach_lerp_(self.kept, grads, 1 - MUON.momentum)
        directions = torch._foreach_lerp(grads, self.kept, MUON.momentum)
        nested = tree.nest(dict(zip(self.hidden, directions, strict=True)))
        whole = fs.unshard(nested, self.matrices)
        steps = {path: orthogonal(direction) for path, direction in tree.paths(whole)}
        for path, piece in tree.paths(fs.shard(tree.nest(steps), self.matrices)):
            self.params[path].mul_(1 - 0.02 * MUON.weight_decay).sub_(piece)


class Fsdp2(peers.Torch):
    """FSDP2: each matrix's direction becomes a full tensor, and every rank iterates it (``DTensor.full_tensor``)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, peers.fsdp2)
        named = dict(self.module.named_parameters())
        self.hidden: list[Any] = [leaf for path, leaf in named.items() if _hidden(path)]
        rest = [leaf for path, leaf in named.items() if not _hidden(path)]
        self.optimizer = torch.optim.AdamW(rest, fused=True, **ADAMW)
        self.kept = [torch.zeros_like(leaf.to_local()) for leaf in self.hidden]

    @torch.no_grad()
    def update(self) -> None:
        """AdamW, then Muon matrix by matrix."""
        self.optimizer.step()
        for leaf, kept in zip(self.hidden, self.kept, strict=True):
            grad = leaf.grad.to_local()
            kept.lerp_(grad, 1 - MUON.momentum)
            cut = DTensor.from_local(grad.lerp(kept, MUON.momentum), leaf.device_mesh, leaf.placements, run_check=False)
            step = orthogonal(cut.full_tensor())
            leaf.to_local().mul_(1 - 0.02 * MUON.weight_decay).sub_(step.chunk(dist.get_world_size())[dist.get_rank()])
            leaf.grad = None


def orthogonal(direction: Tensor) -> Tensor:
    """What Muon subtracts for a whole direction."""
    return 0.02 * max(1.0, direction.shape[0] / direction.shape[1]) ** 0.5 * MUON._orthogonal(direction)


PEERS: dict[str, Callable[[nn.Module], peers.Peer]] = {
    "muon whole": Whole,
    "muon gathered": Gathered,
    "fsdp2 muon gathered": Fsdp2,
}


def _hidden(path: str) -> bool:
    return re.fullmatch(HIDDEN, path) is not None


def _loss(model: fs.Model) -> Callable[[Any, Tensor], Tensor]:
    return lambda params, rows: loss_of(model.apply(params, rows[:, :-1]), rows)
