"""Precision: what is cast, what is rounded, and what is not. Every run equals the same casts in one plain process."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its name everywhere
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P
from fshard.schedule.infos import group_infos
from tests.shared.virtual import Job

BF16, F32 = torch.bfloat16, torch.float32
LR, STEPS, ROWS = 0.3, 4, 4
CAST = fs.Precision(BF16, BF16)


@dataclasses.dataclass(frozen=True)
class Case:
    """A run."""

    precision: fs.Precision
    spec: P = P(flat="shard")
    accumulate: int = 1
    reshard: bool = True
    compile: str | None = None
    shared_memory: bool = True
    update: str = "deferred"
    opt: P | None = None
    replicas: int = 1


CASES = {
    "as kept": Case(fs.Precision()),
    "compute": Case(fs.Precision(compute=BF16)),
    "reduce": Case(fs.Precision(reduce=BF16)),
    "both": Case(fs.Precision(BF16, BF16)),
    "both, by gloo": Case(fs.Precision(BF16, BF16), shared_memory=False),
    "both, microbatches": Case(fs.Precision(BF16, BF16), accumulate=2, reshard=False),
    "both, rows": Case(fs.Precision(BF16, BF16), spec=P("shard")),
    "both, replicated": Case(fs.Precision(BF16, BF16), spec=P()),
    "compute, update in backward": Case(fs.Precision(compute=BF16), update="in_backward"),
    "reduce, graphs": Case(fs.Precision(reduce=BF16), compile="fx"),
}

MESHES = {
    "as kept, replicas": Case(fs.Precision(), replicas=2),
    "reduce, replicas": Case(fs.Precision(reduce=BF16), replicas=2),
    "both, replicas, by gloo": Case(fs.Precision(BF16, BF16), replicas=2, shared_memory=False),
    "compute, replicas, microbatches": Case(fs.Precision(compute=BF16), replicas=2, accumulate=2),
    "reduce, optimizer everywhere": Case(fs.Precision(reduce=BF16), replicas=2, opt=fs.fsdp(("shard", "replica"))),
    "reduce, zero": Case(fs.Precision(reduce=BF16), spec=P(), opt=fs.fsdp("shard")),
}
"""On meshes of several axes, or with optimizer state over more of them than the parameters."""


def start() -> dict[str, dict[str, Tensor]]:
    """Start values whose sums depend on rounding."""
    draw = torch.Generator().manual_seed(5)

    def layer(n: int, m: int) -> dict[str, Tensor]:
        return {"w": torch.randn(n, m, generator=draw) / m**0.5, "b": torch.randn(n, generator=draw)}

    return {"one": layer(32, 16), "two": layer(16, 32), "out": layer(8, 16)}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's rows."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 16, generator=draw), torch.randn(ROWS, 8, generator=draw)


@fs.unit
def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One unit. It brings its input to the dtype of its weights."""
    return torch.tanh(F.linear(x.to(p["w"].dtype), p["w"], p["b"]))


def loss_fn(params: dict[str, dict[str, Tensor]], rows: tuple[Tensor, Tensor]) -> Tensor:
    """Squared error, in float32."""
    x = layer(params["two"], layer(params["one"], rows[0]))
    out = F.linear(x, params["out"]["w"], params["out"]["b"])
    return (out.float() - rows[1]).square().mean()


def trained(case: Case) -> tuple[list[float], dict[str, Tensor], dict[str, set[torch.dtype]]]:
    """On a rank: losses, parameters after training, and the dtypes that there were."""
    sizes, axes = ((case.replicas, -1), ("replica", "shard")) if case.replicas > 1 else ((-1,), ("shard",))
    with fs.make_mesh(sizes, axes, shared_memory=case.shared_memory) as mesh:
        params = start()
        rules = [fs.Rule(".*", case.spec, opt=case.opt)]
        plan = fs.make_plan(params, mesh, rules, batch=P(axes), units=("one", "two"), precision=case.precision)
        opt = fs.optim.sgd(LR)
        policy = fs.Policy(reshard=case.reshard, update=case.update)
        more: dict[str, Any] = {"compile": case.compile} if case.compile else {}
        seen: dict[str, set[torch.dtype]] = {"read": set(), "kept": set()}

        def watched(p: Any, rows: Any) -> Tensor:
            seen["read"].add(p["out"]["w"].dtype)
            return loss_fn(p, rows)

        step = fs.make_train_step(watched, opt, plan, accumulate=case.accumulate, schedule=policy, debug=True, **more)
        state = fs.init_state(plan, opt, params=params)
        losses = []
        for number in range(STEPS):
            state, metrics = step(state, batch(number, mesh.rank))
            losses.append(float(metrics.loss))
        whole = fs.unshard(fs.settle(state).params, plan)
        flat = {f"{unit}.{name}": whole[unit][name] for unit in whole for name in whole[unit]}
        seen["kept"] = {leaf.dtype for leaf in flat.values()} | {g.dtype for g in step._decide.grads.shards.values()}
        return losses, flat, seen


def plain(case: Case, world: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same casts and roundings in one process. Gradients that no peer needs are not rounded.

    Two replicas round what they have added up once more, to send it to each other.
    """
    kept = {f"{unit}.{name}": leaf for unit, leaves in start().items() for name, leaf in leaves.items()}
    compute = case.precision.compute or F32
    shards, scattered = world // case.replicas, case.spec.axes or case.opt
    reduce = case.precision.reduce if case.precision.reduce and shards > 1 and scattered else F32
    again = (case.precision.reduce or F32) if case.replicas > 1 else F32
    losses = []
    for number in range(STEPS):
        sums: list[dict[str, Tensor]] = [{} for _ in range(case.replicas)]
        values = []
        for part in range(case.accumulate):
            for rank in range(world):
                held = {path: leaf.detach().to(compute, copy=True).requires_grad_() for path, leaf in kept.items()}
                tree: dict[str, dict[str, Tensor]] = {}
                for path, leaf in held.items():
                    tree.setdefault(path.split(".")[0], {})[path.split(".")[1]] = leaf
                rows = [x.chunk(case.accumulate)[part] for x in batch(number, rank)]
                value = loss_fn(tree, (rows[0], rows[1]))
                value.backward(torch.full_like(value, 1 / (world * case.accumulate)))
                values.append(value.item())
                for path, leaf in held.items():
                    assert leaf.grad is not None
                    mine, held_by = leaf.grad.to(reduce).to(F32), sums[rank // shards]
                    held_by[path] = held_by[path] + mine if path in held_by else mine
        losses.append(sum(values) / len(values))
        whole = {path: torch.stack([part[path].to(again).to(F32) for part in sums]).sum(0) for path in kept}
        # With one rounding, as in the optimizer: after two, a later gradient may round to another number of BF16.
        kept = {path: leaf.add(whole[path], alpha=-LR) for path, leaf in kept.items()}
    return losses, kept


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", CASES)
def test_training_equals_the_same_casts_in_one_process(job: Job, world: int, name: str) -> None:
    compare(job, world, CASES[name])


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", MESHES)
def test_it_does_on_meshes_of_several_axes(job: Job, world: int, name: str) -> None:
    compare(job, world, MESHES[name])


def compare(job: Job, world: int, case: Case) -> None:
    """Train on ranks and in one plain process."""
    losses, params = plain(case, world)
    for rank, (theirs, whole, seen) in enumerate(job(world).run(trained, case)):
        assert theirs == pytest.approx(losses, rel=1e-6), (rank, seen)
        for path, leaf in params.items():
            torch.testing.assert_close(whole[path], leaf, rtol=1e-6, atol=1e-6, msg=lambda m, p=path: f"{p}: {m}")
        assert seen == {"read": {case.precision.compute or F32}, "kept": {F32}}


def test_rounding_shows() -> None:
    """The cases differ by more than the tolerance that they are compared with."""
    ends = [plain(CASES[name], 2)[1]["one.w"] for name in ("as kept", "compute", "reduce")]
    for i, one in enumerate(ends):
        assert all((one - other).abs().max() > 1e-5 for other in ends[:i])


class Casts(TorchDispatchMode):
    """Writes down what is copied from float32 to bfloat16: where to, and how many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (args[0].dtype, args[1].dtype) == (BF16, F32):
            self.seen.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_shard_is_cast_once_an_update_and_not_at_each_gather() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))

    def main() -> None:
        plan = fs.make_plan(start(), mesh, [(".*", fs.fsdp("shard"))], units=("one", "two"), precision=CAST)
        opt = fs.optim.sgd(LR)
        policy = fs.Policy(prefetch=0, reduces=1)
        step = fs.make_train_step(loss_fn, opt, plan, accumulate=2, schedule=policy)
        state = fs.init_state(plan, opt, params=start())
        for number in range(3):
            with Casts() as casts:
                state, metrics = step(state, batch(number, mesh.rank))
                metrics.loss.item()
            assert sorted(casts.seen) == sorted(group.chunk for group in plan.groups)
            assert [op.target for op in step.record if op.kind == "all_gather"].count("one") == 3

    mesh.run(main)


def test_half_the_bytes() -> None:
    params, mesh = start(), fs.abstract_mesh((4,), ("shard",))

    def info(precision: fs.Precision | None) -> dict[str, int]:
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], units=("one", "two"), precision=precision)
        group = group_infos(plan)[0]
        gather, reduce = group.transfers
        sizes = {"full": group.full_bytes, "grad": group.grad_bytes}
        sizes |= {"shard": group.shard_bytes, "cast": group.cast_bytes, "late": int(reduce.late)}
        return {**sizes, "gather": gather.sent, "reduce": reduce.sent, "staging": reduce.staging}

    kept, both, compute = info(None), info(fs.Precision(BF16, BF16)), info(fs.Precision(compute=BF16))
    for name in ("full", "grad", "staging", "gather", "reduce"):
        assert both[name] * 2 == kept[name], name
    assert (compute["full"], compute["gather"]) == (both["full"], both["gather"])
    assert (compute["grad"], compute["reduce"]) == (kept["grad"], kept["reduce"])
    assert both["shard"] == kept["shard"] == 2 * both["cast"] and kept["cast"] == 0
    assert (kept["late"], compute["late"], both["late"]) == (1, 1, 0)  # staging of the dtype of the shard holds the sum


def test_the_table_says_it() -> None:
    params, mesh = start(), fs.abstract_mesh((4,), ("shard",))
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], precision=fs.Precision(BF16, BF16))
    assert str(plan).splitlines()[0].endswith(", compute in bf16, reduce in bf16")
    assert plan.groups[0].dtype == F32


def test_integers_stay() -> None:
    params = {"w": torch.ones(16), "ids": torch.arange(16)}
    mesh = fs.abstract_mesh((4,), ("shard",))
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], precision=fs.Precision(BF16, BF16))
    assert {g.leaves[0].path: g.compute_dtype for g in plan.groups} == {"w": BF16, "ids": torch.int64}


@pytest.mark.parametrize("wrong", [torch.int32, "bfloat16", torch.float8_e4m3fn])
def test_dtypes_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(fs.errors.PlanError, match=r"fs\.Precision\(reduce=.*give one of torch\.bfloat16"):
        fs.Precision(reduce=wrong)


def test_something_else_for_a_precision() -> None:
    with pytest.raises(fs.errors.PlanError, match=r"precision=torch\.bfloat16 must be fs\.Precision"):
        fs.make_plan(start(), fs.abstract_mesh((2,), ("s",)), [(".*", fs.fsdp("s"))], precision=BF16)  # type: ignore[arg-type]


def test_whole_gradients_are_not_added_up_rounded() -> None:
    params, mesh = start(), fs.abstract_mesh((2,), ("shard",))
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], precision=fs.Precision(reduce=BF16))
    policy = fs.Policy(accumulation="full")
    with pytest.raises(fs.errors.PlanError, match="accumulation"):
        fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan, accumulate=2, schedule=policy)
    fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan, schedule=policy)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("clip", [1.0, [("w", 1.0), ("b", None)]])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.filterwarnings("ignore:gradients of:UserWarning")
def test_norms_of_short_dtypes(dtype: torch.dtype, clip: Any, update: str) -> None:
    """A norm has more digits than its elements, and may be larger than any of their dtype."""
    if update == "in_backward" and clip != 1.0:
        pytest.skip("a norm that is found in the backward clips nothing")
    params = {"w": torch.zeros(4, 4, dtype=dtype), "b": torch.zeros(3, dtype=dtype)}
    plan = fs.make_plan(params, fs.make_mesh((1,), ("shard",)), [("b", P()), ("w", fs.fsdp("shard"))])
    opt, x = fs.optim.sgd(1.0), torch.full((4, 4), 3.0e4).to(dtype) / torch.tensor([1.0, 3, 7, 9]).to(dtype)
    options: Any = {"schedule": fs.Policy(update="in_backward")} if update == "in_backward" else {"clip_norm": clip}
    step = fs.make_train_step(lambda p, x: (p["w"] * x).sum(dtype=F32) + p["b"].sum(dtype=F32), opt, plan, **options)
    state, metrics = step(fs.init_state(plan, opt, params=params), x)
    want = (x.double().square().sum() + 3).sqrt()
    torch.testing.assert_close(metrics.grad_norm.double(), want, rtol=1e-6, atol=0)
    if update == "deferred":
        want = x.double().norm() if clip != 1.0 else want
        torch.testing.assert_close(state.params["w"].view(4, 4), (-x.double() / want).to(dtype), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_parts_of_a_loss_in_bfloat16(parts: int) -> None:
    """A third has no bfloat16: gradients of a loss in bfloat16 are still those of the mean, to float32's digits."""
    params, x = {"w": torch.zeros(4)}, torch.arange(4.0 * parts).view(parts, 4)
    bf16 = fs.Precision(torch.bfloat16, torch.bfloat16)
    plan = fs.make_plan(params, fs.make_mesh((1,), ("shard",)), [("w", fs.fsdp("shard"))], precision=bf16)
    opt = fs.optim.sgd(1.0)
    step = fs.make_train_step(lambda p, x: (p["w"] * x.bfloat16()).sum(), opt, plan, accumulate=parts)
    state, metrics = step(fs.init_state(plan, opt, params=params), x)
    torch.testing.assert_close(state.params["w"], -x.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics.grad_norm, x.mean(0).norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", [fs.optim.sgd(0.1, momentum=0.5), fs.optim.adamw(0.1)])
def test_clipping_where_plain_tensors_are_float64(rule: Any) -> None:
    """Kernels take the factor as one float32 number, whatever the default dtype is."""
    found = []
    for default in (F32, torch.float64):
        params = {"w": torch.arange(4.0, dtype=torch.float64)}
        plan = fs.make_plan(params, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
        step = fs.make_train_step(lambda p, x: (p["w"] * x).square().sum(), rule, plan, clip_norm=0.1)
        torch.set_default_dtype(default)
        try:
            state, _ = step(fs.init_state(plan, rule, params=params), torch.ones(4, dtype=torch.float64))
            found.append(state.params["w"].clone())
        finally:
            torch.set_default_dtype(F32)
    assert torch.equal(*found)
