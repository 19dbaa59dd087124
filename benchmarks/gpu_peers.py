"""Peers that only ``gpu.py`` has: forms that need a GPU, or whose settings follow torchtitan's."""

import gc
from collections.abc import Callable, Mapping
from typing import Any

import peers
import torch
import torch.distributed as dist
from model import GPT, loss_of
from peers import CLIP, Fshard, Peer, Torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fshard as fs

COLLECT = 50
"""Steps between two collections of garbage, as torchtitan has it by default."""


class Whole(Torch):
    """Plain PyTorch of which the model and its loss are compiled as one."""

    def __init__(self, module: nn.Module, autocast: bool = False, clip: float | None = None, **options: Any) -> None:
        super().__init__(module, clip=clip, autocast=autocast)
        self.compiled = torch.compile(lambda rows: loss_of(module(rows[:, :-1]), rows), **options)

    def step(self, rows: Tensor) -> None:
        """One step."""
        with self.autocast():
            loss = self.compiled(rows)
        loss.backward()
        self.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()


class Titan(Torch):
    """FSDP2 as torchtitan sets it up: blocks compiled, groups of their own for embedding and head, garbage by hand."""

    def __init__(self, module: GPT, dtype: torch.dtype | None = None) -> None:
        self.count = 0
        mesh = init_device_mesh(peers.device_type(), (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
        for block in module.blocks:
            block.compile(fullgraph=True)
        for group in (module.embed, *module.blocks):
            fully_shard(group, mesh=mesh, mp_policy=policy)
        fully_shard([module.norm, module.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        super().__init__(module)

    def step(self, rows: Tensor) -> None:
        """One step."""
        if self.count % COLLECT == 0:
            gc.collect()
            gc.disable()
        self.count += 1
        super().step(rows)


class Captured(Fshard):
    """This library, with steps that are captured and replayed. ``ran`` says how the latest one ran."""

    ran = ""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, graph="step", **options)

    def step(self, rows: Tensor) -> None:
        """One step."""
        self.state, metrics = self.train(self.state, rows)
        self.loss, self.ran = metrics.loss, metrics.ran.graph


def _forms(suffix: str, autocast: bool, dtype: torch.dtype | None) -> dict[str, Callable[[Any], Peer]]:
    """The peers that compute in the dtype of their parameters, or all of them again in another one."""
    precision = dtype and fs.Precision(dtype, dtype)
    found: dict[str, Callable[[Any], Peer]] = {
        "eager clip": lambda module: Torch(module, clip=CLIP, autocast=autocast),
        "compiled clip": lambda module: Torch(module, peers.compiled, CLIP, autocast),
        "compiled loss": lambda module: Whole(module, autocast),
        "compiled graphs": lambda module: Whole(module, autocast, mode="reduce-overhead"),
        "fsdp2 titan": lambda module: Titan(module, dtype),
        "fshard clip": lambda module: Fshard(module, CLIP, precision=precision),
        "fshard fx": lambda module: Fshard(module, compile="fx", precision=precision),
        "fshard inductor": lambda module: Fshard(module, compile="inductor", precision=precision),
        "fshard inductor clip": lambda module: Fshard(module, CLIP, compile="inductor", precision=precision),
        "fshard graph": lambda module: Captured(module, precision=precision),
        "fshard fx graph": lambda module: Captured(module, compile="fx", precision=precision),
        "fshard inductor graph": lambda module: Captured(module, compile="inductor", precision=precision),
    }
    return {f"{name}{suffix}": make for name, make in found.items()}


FORMS = _forms("", False, None)
PEERS: Mapping[str, Callable[[Any], Peer]] = {**peers.PEERS, **FORMS, **_forms(" bf16", True, torch.bfloat16)}
"""By name. ``graph``: the whole step as one CUDA graph; ``graphs``: those of ``torch.compile``."""


def obstacle(name: str) -> str | None:
    """Why there is no such peer here, or None."""
    if name not in PEERS:
        return f"there is no such peer; known: {', '.join(PEERS)}"
    if "graph" in name and not torch.cuda.is_available():
        return "it needs CUDA graphs: not run on a card"
    why = peers.compiler_works() if any(word in name for word in ("compiled", "inductor", "titan")) else None
    return f"torch.compile does not work here ({why})" if why else None
