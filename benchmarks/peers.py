"""The peers: one class each, the same model, the same start weights, ``step(rows)``; and how they take turns."""

import contextlib
import functools
import gc
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from model import Block, Size, loss_of, make, rows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fshard as fs

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 0.5
"""Far below the norms of these models' gradients, so that clipping does something."""


class Peer(Protocol):
    """Something that trains. ``loss`` is that of the latest step: this rank's own, or the global mean."""

    loss: Tensor

    def step(self, rows: Tensor) -> None:
        """One train step on this rank's rows."""


class Torch:
    """A module, ``torch.optim.AdamW(fused=True)``, and what a wrapper makes of the module.

    Args:
        module: the model, not wrapped.
        wrap: what makes it what it is a peer as: DDP, FSDP1, FSDP2, ``torch.compile``; nothing for plain PyTorch.
        clip: the norm to clip to.
        autocast: compute in bfloat16 by autocast.
    """

    def __init__(
        self,
        module: nn.Module,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
        clip: float | None = None,
        autocast: bool = False,
    ) -> None:
        self.module, self.clip = wrap(module), clip
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True, **ADAMW)
        self.loss = torch.tensor(0.0)
        self.autocast = functools.partial(torch.autocast, device_type(), torch.bfloat16, autocast)

    def step(self, rows: Tensor) -> None:
        """Forward, backward, clip, update; gradients are dropped at the end, so none is resident between steps."""
        with self.autocast():
            loss = loss_of(self.module(rows[:, :-1]), rows)
        loss.backward()
        self.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()

    def update(self) -> None:
        """Clip and update."""
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()


class Fshard:
    """This library.

    Args:
        module: the model.
        clip: the norm to clip to.
        units: patterns of the units.
        mesh: instead of one axis of all ranks; all of its axes are data axes.
        over: the axes that shard the parameters.
        precision: the dtypes.
        compile: as for ``fs.make_train_step``.
        opt: axes over which the optimizer is sharded, if not just ``shard``.
        norms: as for ``fs.make_train_step``.
        wire: the formats of what travels.
        policy: of ``fs.Policy``.
    """

    def __init__(
        self,
        module: nn.Module,
        clip: float | None = None,
        units: Sequence[str] = ("blocks.*",),
        mesh: fs.Mesh | None = None,
        precision: fs.Precision | None = None,
        compile: str | None = None,
        opt: Sequence[str] | None = None,
        norms: str | None = None,
        wire: fs.Wire | None = None,
        over: tuple[str, ...] = ("shard",),
        **policy: Any,
    ) -> None:
        self.mesh = mesh or fs.make_mesh((-1,), ("shard",))
        model = fs.split(module, units=units)

        def loss_fn(params: dict[str, Any], rows: Tensor) -> Tensor:
            return loss_of(model.apply(params, rows[:, :-1]), rows)

        rules = [fs.Rule(r".*", fs.fsdp(over), opt=fs.fsdp(tuple(opt)) if opt else None)]
        plan = fs.make_plan(model, self.mesh, rules, batch=fs.P(self.mesh.axis_names), precision=precision, wire=wire)
        adamw = fs.optim.adamw(**ADAMW)
        self.plan, self.state = plan, fs.init_state(plan, adamw, params=model.params)
        self.train = fs.make_train_step(
            loss_fn, adamw, plan, clip_norm=clip, schedule=fs.Policy(**policy), compile=compile, norms=norms
        )
        self.loss = torch.tensor(0.0)

    def step(self, rows: Tensor) -> None:
        """One step."""
        self.state, metrics = self.train(self.state, rows)
        self.loss = metrics.loss


class Tracked(Fshard):
    """This library, with all that a step can tell: norms of groups, and two trackers that get every step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, norms="groups")
        self.folder = tempfile.TemporaryDirectory()
        files = [fs.trackers.JsonLines(f"{self.folder.name}/run.jsonl")]
        board = [fs.trackers.TensorBoard(f"{self.folder.name}/board")] if find_spec("tensorboard") else []
        self.track = fs.track([*files, *board], self.train, peak=1e12)
        self.records: list[float] = []  # seconds of each

    def step(self, rows: Tensor) -> None:
        """One step, and its record."""
        self.state, metrics = self.train(self.state, rows)
        begun = time.perf_counter()
        self.track(self.state.step, metrics)
        self.records.append(time.perf_counter() - begun)
        self.loss = metrics.loss


class Recorded(Fshard):
    """This library, with its flight recorder on."""

    def __init__(self, module: nn.Module) -> None:
        self.folder = tempfile.TemporaryDirectory()
        with mock.patch.dict(os.environ, FSHARD_RECORD=self.folder.name):
            super().__init__(module)


def fsdp2(
    module: nn.Module,
    reshard: bool = True,
    prefetch: int = 0,
    unshard_async: bool = False,
    compiled: bool = False,
    dtype: torch.dtype | None = None,
    replicas: int = 1,
) -> nn.Module:
    """``fully_shard`` for each block and for the rest, as its documentation recommends.

    Args:
        module: the model.
        reshard: whether to reshard after forward; the rest, which the backward reads first, never does.
        prefetch: blocks ahead whose weights the forward asks for; FSDP2's backward prefetches one by itself.
        unshard_async: let gathers run beside compute. On CPU, where there are no streams, nothing else does.
        compiled: ``torch.compile`` each block first.
        dtype: to compute and to communicate in, if not that of the parameters.
        replicas: more than one is HSDP: a mesh of two axes, of which the second one shards.
    """
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    if replicas > 1:
        sizes = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=("replica", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    blocks = [block for block in module.modules() if type(block).__name__ == "Block"]
    for block in blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(module, mesh=mesh, reshard_after_forward=None if reshard else False, mp_policy=policy)
    chain: Any = [module, *blocks]
    for i, one in enumerate(chain):
        if prefetch and chain[i + 1 : i + 1 + prefetch]:
            one.set_modules_to_forward_prefetch(chain[i + 1 : i + 1 + prefetch])
        if prefetch > 1 and chain[max(1, i - prefetch) : i]:
            one.set_modules_to_backward_prefetch(chain[max(1, i - prefetch) : i][::-1])
    if unshard_async:
        chain[0]._set_unshard_async_op(True)
    return module


def replicated() -> fs.Mesh:
    """A mesh of two replicas. Ranks of a replica are neighbours."""
    return fs.make_mesh((2, -1), ("replica", "shard"))


def hosts() -> fs.Mesh:
    """A mesh of two hosts. Ranks of a host are neighbours."""
    return fs.make_mesh((2, -1), ("host", "local"))


def fsdp1(module: nn.Module, prefetch: bool = False) -> nn.Module:
    """``FullyShardedDataParallel`` with one flat parameter a block; ``prefetch`` in the forward, too."""
    policy = ModuleWrapPolicy({Block})
    device = torch.device(device_type())
    return FullyShardedDataParallel(
        module, auto_wrap_policy=policy, device_id=device, use_orig_params=True, forward_prefetch=prefetch
    )


def ddp(module: nn.Module, bucket: float = 25) -> nn.Module:
    """``DistributedDataParallel`` without copies of gradients, for a graph that stays; buckets of so many MB."""
    return DistributedDataParallel(module, bucket_cap_mb=bucket, gradient_as_bucket_view=True, static_graph=True)


def compiled(module: nn.Module) -> nn.Module:
    """``torch.compile`` of the whole model."""
    return torch.compile(module)  # type: ignore[return-value]


PEERS: dict[str, Callable[[nn.Module], Peer]] = {
    "eager": Torch,
    "eager clip": lambda module: Torch(module, clip=CLIP),
    "compiled": lambda module: Torch(module, compiled),
    "ddp": lambda module: Torch(module, ddp),
    "ddp small buckets": lambda module: Torch(module, lambda m: ddp(m, bucket=4)),
    "fsdp1": lambda module: Torch(module, fsdp1),
    "fsdp1 prefetch": lambda module: Torch(module, lambda m: fsdp1(m, prefetch=True)),
    "fsdp2": lambda module: Torch(module, fsdp2),
    "fsdp2 prefetch": lambda module: Torch(module, lambda m: fsdp2(m, prefetch=1)),
    "fsdp2 prefetch 2": lambda module: Torch(module, lambda m: fsdp2(m, prefetch=2)),
    "fsdp2 async": lambda module: Torch(module, lambda m: fsdp2(m, prefetch=1, unshard_async=True)),
    "fsdp2 async 2": lambda module: Torch(module, lambda m: fsdp2(m, prefetch=2, unshard_async=True)),
    "fsdp2 no reshard": lambda module: Torch(module, lambda m: fsdp2(m, reshard=False)),
    "fsdp2 async no reshard": lambda m: Torch(m, lambda m: fsdp2(m, reshard=False, prefetch=1, unshard_async=True)),
    "fsdp2 clip": lambda module: Torch(module, fsdp2, CLIP),
    "fsdp2 compiled": lambda module: Torch(module, lambda m: fsdp2(m, compiled=True)),
    "fsdp2 hsdp": lambda module: Torch(module, lambda m: fsdp2(m, replicas=2)),
    "fshard hsdp": lambda module: Fshard(module, mesh=replicated()),
    "fshard hsdp parted": lambda module: Fshard(module, mesh=replicated(), opt=("shard", "replica")),
    "fshard hosts": lambda m: Fshard(m, mesh=hosts(), over=("host", "local")),
    "fshard hosts secondary": lambda m: Fshard(m, mesh=hosts(), over=("host", "local"), reshard=fs.secondary("local")),
    "fshard hsdp int4": lambda m: Fshard(m, mesh=replicated(), wire=fs.Wire(reduce={"replica": "int4"})),
    "fshard hsdp powersgd": lambda m: Fshard(m, mesh=replicated(), wire=fs.Wire(reduce={"replica": "powersgd"})),
    "fshard": Fshard,
    "fshard tracked": Tracked,
    "fshard recorded": Recorded,
    "fshard int8": lambda module: Fshard(module, wire=fs.Wire("int8", "int8")),
    "fshard lean": lambda module: Fshard(module, prefetch=1, reduces=1),
    "fshard prefetch 3": lambda module: Fshard(module, prefetch=3),
    "fshard no reshard": lambda module: Fshard(module, reshard=False),
    "fshard clip": lambda module: Fshard(module, clip=CLIP),
    "eager bf16": lambda module: Torch(module, autocast=True),
    "compiled bf16": lambda module: Torch(module, compiled, autocast=True),
    "fsdp2 bf16": lambda module: Torch(module, lambda m: fsdp2(m, dtype=torch.bfloat16)),
    "fsdp2 async bf16": lambda m: Torch(m, lambda m: fsdp2(m, prefetch=1, unshard_async=True, dtype=torch.bfloat16)),
    "fshard bf16": lambda module: Fshard(module, precision=fs.Precision(torch.bfloat16, torch.bfloat16)),
    "fshard fx": lambda module: Fshard(module, compile="fx"),
    "fshard inductor": lambda module: Fshard(module, compile="inductor"),
}
"""By name. ``clip``: to a global norm, exactly. ``bf16``: parameters stay float32, compute and communication do not."""


@functools.cache
def compiler_works() -> str | None:
    """Why ``torch.compile`` cannot be a peer here, or None."""
    device = "cuda" if torch.cuda.is_available() else "cpu"  # each has a compiler of its own
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(4, device=device))
    except Exception as error:  # whatever is missing: a compiler, headers, a backend
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return None


def obstacle(name: str) -> str | None:
    """Why there is no such peer here, or None."""
    if name not in PEERS:
        return f"there is no such peer; known: {', '.join(PEERS)}"
    why = compiler_works() if any(word in name for word in ("compiled", "inductor")) else None
    return f"torch.compile does not work here ({why})" if why else None


def select(names: Sequence[str], notes: list[str]) -> list[str]:
    """The names of those peers that are there; why others are not goes to the notes."""
    obstacles = {name: obstacle(name) for name in names}
    notes += [f"{name}: skipped: {why}" for name, why in obstacles.items() if why]
    return [name for name, why in obstacles.items() if not why]


def build(names: Sequence[str], size: Size) -> dict[str, Peer]:
    """The peers with these names, all from the same start weights."""
    return {name: PEERS[name](make(size)) for name in names}


def check_agreement(peers: Mapping[str, Peer], size: Size, steps: int = 3, tolerance: float = 1e-4) -> None:
    """See that all peers train alike: the global mean loss of each, over some steps, those that clip among themselves.

    On several ranks plain PyTorch trains each rank alone, so it is left out: it is there for its time.

    Raises:
        SystemExit: they do not; a benchmark of a wrong thing is worthless.
    """
    rank, world = _place()
    seen: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(steps):
        for name, peer in peers.items():
            peer.step(rows(size, number, rank))
            loss = torch.as_tensor(peer.loss, dtype=torch.float64).clone()
            if world > 1:
                dist.all_reduce(loss)
            seen[name].append(float(loss) / world)
    together = {name: losses for name, losses in seen.items() if world == 1 or not name.startswith("eager")}
    for kind in (True, False):
        alike = {name: losses for name, losses in together.items() if ("clip" in name.split()) is kind}
        for name, losses in alike.items():
            first = next(iter(alike.values()))
            rough = any(word in name for word in ("bf16", "int8", "int4", "powersgd"))  # bfloat16 has 3 digits
            bound = tolerance * (100 if rough else 1)
            if any(abs(a - b) > bound * abs(b) for a, b in zip(losses, first, strict=True)):
                raise SystemExit(f"the peers do not train alike: {name} {losses}, {next(iter(alike))} {first}")


Count = Callable[[], int] | None
Sample = dict[str, list[float]]
"""What was measured of one peer in each round, by measure."""


def interleave(
    peers: Mapping[str, Peer], size: Size, rounds: int, counter: Count = None, warm: int = 0, part: int | None = None
) -> dict[str, Sample]:
    """Let the peers take turns, and measure each step: ``wall`` and ``cpu`` seconds of this process, ``sent`` bytes.

    Who begins changes from round to round. All ranks begin a step together, each on its rows, or on those of ``part``.
    ``cpu`` counts every thread of the process. One round before the first is not counted. In each turn ``warm`` steps
    go before the one that is measured, so that small steps find their own code and data in the caches.
    """
    rank, world = _place()
    names = list(peers)
    samples: dict[str, Sample] = {name: {"wall": [], "cpu": [], "sent": []} for name in names}
    gc.collect()
    gc.freeze()
    for number in range(-1, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            batch = rows(size, number + 100, rank if part is None else part)
            for _ in range(warm):
                peers[name].step(batch)
            _barrier(world)
            sent = counter() if counter else 0
            wall, cpu = time.perf_counter(), time.process_time()
            peers[name].step(batch)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if counter:
                _barrier(world)
            if number >= 0:
                sample = samples[name]
                sample["wall"].append(wall)
                sample["cpu"].append(cpu)
                sample["sent"].append((counter() if counter else 0) - sent)
    gc.unfreeze()
    return samples


@contextlib.contextmanager
def process_group() -> Any:
    """The ranks that torchrun or the lab started; without them, a group of one."""
    alone = "RANK" not in os.environ
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def device_type() -> str:
    """Where the peers train: a GPU under NCCL, and under the fake group where there is one."""
    backend = str(dist.get_backend()) if dist.is_initialized() else ""
    return "cuda" if torch.cuda.is_available() and backend != "gloo" else "cpu"


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _barrier(world: int) -> None:
    if world > 1:
        dist.all_reduce(torch.zeros(1))
