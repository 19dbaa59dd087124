"""Runs with wire formats, on played ranks and in one plain process that rounds alike."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its name everywhere

import fshard as fs
from fshard import P
from fshard.runtime.comm.packing import rounded
from fshard.sharding.wire import WireFormat

LR, STEPS, ROWS = 0.125, 3, 4
"""The rate is a power of two: an update has the same bits whether its product is rounded or not."""
INT8 = fs.Wire("int8", "int8")
Tree = dict[str, dict[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run."""

    wire: fs.Wire = INT8
    spec: P = P(flat="shard")
    opt: P | None = None
    replicas: int = 1
    accumulate: int = 1
    clip: float | None = None
    precision: fs.Precision = fs.Precision()
    policy: fs.Policy = fs.Policy()
    memory: str | None = None
    more: tuple[tuple[str, Any], ...] = ()


CASES = {
    "int8": Case(),
    "bf16": Case(fs.Wire("bf16", "bf16")),
    "bf16, rows": Case(fs.Wire("bf16", "bf16"), spec=P("shard")),
    "int4": Case(fs.Wire("int4", "int4", block=32)),
    "fp8": Case(fs.Wire("fp8_e4m3", "fp8_e4m3")),
    "gathers alone": Case(fs.Wire(gather="int8")),
    "reductions alone": Case(fs.Wire(reduce="int4", block=16)),
    "rotated": Case(fs.Wire(reduce="int4", block=64, rotate=True)),
    "stochastic": Case(fs.Wire("int8", "int4", rounding="stochastic")),
    "microbatches": Case(accumulate=2),
    "microbatches, whole gradients": Case(accumulate=2, policy=fs.Policy(accumulation="full")),
    "clipped": Case(clip=0.3),
    "kept": Case(policy=fs.Policy(prefetch=1, reduces=1, reshard=False)),
    "update in backward": Case(policy=fs.Policy(update="in_backward")),
    "replicated": Case(fs.Wire(reduce="int8"), spec=P()),
    "feedback": Case(fs.Wire(reduce="int4", block=16, feedback=True), spec=P()),
    "feedback, bf16": Case(fs.Wire(reduce="bf16", feedback=True), spec=P()),
    "feedback, fp8": Case(fs.Wire(reduce="fp8_e4m3", feedback=True), spec=P(), accumulate=2),
    "optimizer state apart": Case(fs.Wire(reduce="int8"), spec=P(), opt=P(flat="shard")),
    "host memory": Case(memory="unpinned_host"),
    "compute in bf16": Case(precision=fs.Precision(torch.bfloat16, torch.bfloat16)),
}
TWO = ("bf16, rows", "stochastic", "compute in bf16")
"""Not on three ranks: rows that three do not divide; and thirds of gradients, whose last bits turn codes."""
REPLICAS = {
    "all axes": Case(INT8, replicas=2),
    "the slow axis": Case(fs.Wire(reduce={"replica": "int4"}, block=32), replicas=2),
    "the fast axis": Case(fs.Wire(reduce={"shard": "int8"}), replicas=2, accumulate=2),
    "optimizer everywhere": Case(INT8, replicas=2, opt=P(flat=("shard", "replica"))),
    "rotated": Case(fs.Wire(reduce="int4", rotate=True), replicas=2, opt=P(flat=("shard", "replica"))),
    "feedback": Case(fs.Wire(reduce={"replica": "int4"}, block=32, feedback=True), replicas=2, accumulate=2),
    "feedback, slow axis": Case(
        fs.Wire("int8", {"shard": "int8", "replica": "int4"}, block=16, feedback="replica"), replicas=2
    ),
}


def start() -> Tree:
    """Start values whose sums depend on rounding. No leaf is a multiple of a block."""
    draw = torch.Generator().manual_seed(5)

    def layer(n: int, m: int) -> dict[str, Tensor]:
        return {"w": torch.randn(n, m, generator=draw) / m**0.5, "b": torch.randn(n, generator=draw)}

    return {"one": layer(24, 16), "two": layer(16, 24), "out": layer(8, 16)}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 16, generator=draw), torch.randn(ROWS, 8, generator=draw)


@fs.unit
def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One unit."""
    return torch.tanh(F.linear(x.to(p["w"].dtype), p["w"], p["b"]))


def loss_fn(params: Tree, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Squared error, in float32."""
    x = layer(params["two"], layer(params["one"], rows[0]))
    out = F.linear(x, params["out"]["w"], params["out"]["b"])
    return (out.float() - rows[1]).square().mean()


def mesh_of(case: Case, world: int, make: Any) -> Any:
    if case.replicas == 1:
        return make((world,), ("shard",))
    return make((case.replicas, world // case.replicas), ("replica", "shard"))


def plan_of(case: Case, mesh: fs.Mesh) -> fs.Plan:
    rule: Any = fs.Rule(".*", case.spec, opt=case.opt, memory_kind=case.memory)  # type: ignore[arg-type]
    batched = P(mesh.axis_names)
    return fs.make_plan(
        start(), mesh, [rule], batch=batched, units=("one", "two"), precision=case.precision, wire=case.wire
    )


def trained(case: Case, mesh: fs.Mesh) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """On a rank: losses and norms, and the parameters after training."""
    plan, opt = plan_of(case, mesh), fs.optim.sgd(LR)
    step = fs.make_train_step(
        loss_fn,
        opt,
        plan,
        accumulate=case.accumulate,
        clip_norm=case.clip,
        schedule=case.policy,
        debug=True,
        **dict(case.more),
    )
    state = fs.init_state(plan, opt, params=start())
    seen = []
    for number in range(STEPS):
        state, metrics = step(state, batch(number, mesh.rank))
        seen.append((float(metrics.loss), float(metrics.grad_norm)))
    whole = fs.unshard(fs.settle(state).params, plan)
    return seen, {f"{unit}.{name}": whole[unit][name] for unit in whole for name in whole[unit]}


def through(x: Tensor, form: WireFormat | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """A whole leaf, rounded: the reference. Blocks are in row-major order, the last one ends with zeros."""
    if form is None:
        return x.to(dtype, copy=True)
    flat = F.pad(x.reshape(-1), (0, -x.numel() % form.block))
    out = torch.empty(flat.shape, dtype=dtype)
    rounded(flat.contiguous(), form, out)
    return out[: x.numel()].reshape(x.shape)


def plain(case: Case, world: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same rounding in one process: each rank's gradient once, sums over ranks in their order."""
    shards = world // case.replicas
    cut = bool(case.spec.axes)
    parted = case.opt is not None
    scatter = case.wire.over("reduce_scatter", ("shard",)) if (cut or parted) and shards > 1 else None
    sums = ("replica",) if case.replicas > 1 else ("shard",)
    added = case.wire.over("replica_reduce", sums) if case.replicas > 1 or not (cut or parted) else None
    gather = case.wire.over("all_gather", ("shard",)) if cut else None
    dtype = case.precision.compute or torch.float32
    kept = {f"{unit}.{name}": leaf for unit, leaves in start().items() for name, leaf in leaves.items()}
    losses = []
    left: list[dict[str, Tensor]] = [{} for _ in range(world)]
    for number in range(STEPS):
        parts: list[dict[str, Tensor]] = [{} for _ in range(case.replicas if cut or parted else world)]
        values = []
        whole: list[dict[str, Tensor]] = [{} for _ in range(world)]
        for part in range(case.accumulate):
            for rank in range(world):
                read = {path: through(leaf, gather, dtype).requires_grad_() for path, leaf in kept.items()}
                tree: Tree = {}
                for path, leaf in read.items():
                    tree.setdefault(path.split(".")[0], {})[path.split(".")[1]] = leaf
                rows = [x.chunk(case.accumulate)[part] for x in batch(number, rank)]
                value = loss_fn(tree, (rows[0], rows[1]))
                value.backward(torch.full_like(value, 1 / (world * case.accumulate)))
                values.append(value.item())
                for path, leaf in read.items():
                    assert leaf.grad is not None
                    mine = leaf.grad.float()
                    if case.policy.accumulation == "full" and case.accumulate > 1:
                        whole[rank][path] = whole[rank][path] + mine if path in whole[rank] else mine
                        if part < case.accumulate - 1:
                            continue
                        mine = whole[rank][path]
                    held = parts[rank // shards if cut or parted else rank]
                    mine = through(mine, scatter)
                    held[path] = held[path] + mine if path in held else mine
        losses.append(sum(values) / len(values))
        total: dict[str, Tensor] = {}
        for held, kept_back in zip(parts, left, strict=False):
            for path, mine in held.items():
                if added is not None and added.feedback and len(parts) > 1:
                    mine = mine + kept_back.get(path, 0.0)
                    kept_back[path] = mine - through(mine, added)
                mine = through(mine, added) if len(parts) > 1 else mine
                total[path] = total[path] + mine if path in total else mine
        kept = {path: leaf - LR * total[path] for path, leaf in kept.items()}
    return losses, kept


def played(case: Case, world: int) -> list[tuple[list[tuple[float, float]], dict[str, Tensor]]]:
    mesh = mesh_of(case, world, fs.virtual_mesh)
    found: Any = mesh.run(lambda: trained(case, mesh))
    return list(found)
