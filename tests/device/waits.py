"""What makes the host wait for its device in steps of every kind, on the device of our own: one read at the end."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fshard as fs
from fshard import P, tree
from tests.device import cases
from tests.device.own import DEVICE, load
from tests.optim.runs import CASES as OPTIMIZERS
from tests.optim.runs import batch as rows
from tests.optim.runs import loss_of, net
from tests.outer_steps import cases as outer
from tests.runtime import test_lanes as lanes
from tests.runtime.test_happens_before import of_parts
from tests.training import test_low_rank as low_rank
from tests.training import wire_cases as wires

ATEN = torch.ops.aten
COPIES = (ATEN._to_copy.default, ATEN.copy_.default)
INDEXING = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default)
BY_VALUE = ("add", "sub", "mul", "div", "pow", "_foreach_mul", "_foreach_div", "_foreach_add", "fill")
"""Operators whose kernels get a number of the host as an argument."""


class Waits(TorchDispatchMode):
    """Notes what makes the host wait for the device, or copies memory of the host that is not page-locked."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.numel()]
        made = {x.device.type for x in tree_leaves(out) if isinstance(x, Tensor) and x.numel()}
        devices = {x.device.type for x in given}
        if DEVICE in devices | made:
            self._note(func, args, kwargs, given, devices | made, made)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], devices: set[str], made: set[str]) -> None:
        name = str(func)
        if func in COPIES:
            later = kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True)
            if len(devices) > 1 and not later:
                (self.reads if made == {"cpu"} else self.others).append(name)
        elif func is ATEN._local_scalar_dense.default:
            self.reads.append(name)
        elif func in INDEXING:
            index = [x for x in args[1] if x is not None]
            if any(x.dtype in (torch.bool, torch.uint8) or x.device.type == "cpu" for x in index):
                self.others.append(f"{name} by {[(x.device.type, x.dtype) for x in index]}")
        elif waits(func) or func is ATEN.lift_fresh.default:  # a tensor of numbers, or of indices, of the host
            self.others.append(name)
        elif not shape_only(func) and any(x.device.type == "cpu" and (x.ndim or not by_value(func)) for x in given):
            self.others.append(f"{name} of {[(x.device.type, list(x.shape)) for x in given]}")


def waits(func: Any) -> bool:
    """Whether an operator's shape, or its result, depends on data."""
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & {*func.tags})


def shape_only(func: Any) -> bool:
    """Whether an operator reads nothing of its argument but what it is."""
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("new_") or name.endswith("_like")


def by_value(func: Any) -> bool:
    """Whether kernels of an operator take numbers of the host as they are."""
    return func._schema.name.removeprefix("aten::").rstrip("_") in BY_VALUE


@dataclass(frozen=True)
class Kind:
    """A kind of step: the mesh, and what makes, on a rank, the step with a number.

    Attributes:
        reads: how often a rank reads its device in a step: an outer step also asks whether what leaves is finite, and
            what has arrived.
    """

    axes: tuple[tuple[int, ...], tuple[str, ...]]
    make: Callable[[fs.Mesh], Callable[[int], object]]
    reads: int = 1


def here(x: Any, mesh: fs.Mesh) -> Any:
    """A batch on the device."""
    return tree.map(lambda leaf: leaf.to(mesh.device), x)


def going(step: Any, state: fs.TrainState, batch_of: Callable[[int], Any]) -> Callable[[int], object]:
    """The steps of a state that goes from one to the next."""
    kept = [state]

    def run(number: int) -> object:
        kept[0], told = step(kept[0], batch_of(number))
        return told

    return run


def of_layers(
    mesh: fs.Mesh, loss: Any = cases.loss, short: bool = False, opt: Any = None, **options: Any
) -> Callable[[int], object]:
    """A train step of some layers."""
    start = tree.map(torch.Tensor.bfloat16, cases.params()) if short else cases.params()
    rules: list[Any] = [fs.Rule(".*", fs.fsdp("shard"), align=256)]
    rules = rules if opt else [("2.w", P("shard")), (".*", fs.fsdp("shard"))]
    plan = fs.make_plan(
        start,
        mesh,
        rules,
        batch=P("shard"),
        units=[str(number) for number in range(cases.LAYERS)],
        precision=fs.Precision(rounding="stochastic") if short else None,
    )
    opt = opt or fs.optim.adamw(1e-2)
    step = fs.make_train_step(loss, opt, plan, **options)

    def batch(number: int) -> Any:
        given = cases.batch(number, mesh)
        given = tree.map(torch.Tensor.bfloat16, given) if short else given
        return given | ({"key": fs.random.key(number, device=mesh.device)} if loss is keyed else {})

    batches = [batch(number) for number in range(4)]
    return going(step, fs.init_state(plan, opt, params=start), batches.__getitem__)


def keyed(p: Any, batch: Any) -> Tensor:
    """A loss with random numbers by key, and keys that are made in it."""
    x, key = batch["x"], fs.random.key(3, device=batch["x"].device)
    for number in range(cases.LAYERS):
        x = fs.random.dropout(fs.random.fold_in(batch["key"], number), cases.layer(p[str(number)], x), 0.1)
    x = x + fs.random.uniform(key, x.shape) + fs.random.normal(key, x[:, :1].shape, start=(0, 2), of=(len(x), 5))
    return (x * p["scale"] - batch["y"]).square().mean()


def dropped(p: Any, batch: Any) -> Tensor:
    """A loss with PyTorch's dropout."""
    return cases.loss(p, batch | {"x": F.dropout(batch["x"], 0.3)})


def summing(p: Any, batch: Any) -> Tensor:
    """A loss with collectives over axes in another order than the mesh has them."""
    axes = ("shard", "replica")
    x = batch + fs.collectives.all_gather(batch.mean(0), axes, dim=0).mean()
    x = x - fs.collectives.psum_scatter(torch.ones(4, device=x.device), axes, dim=0).mean()
    return lanes.loss(p, x * fs.collectives.pmean(batch.mean(), axes))


def of_lanes(name: str, mesh: fs.Mesh, loss: Any = None, parts: bool = False) -> Callable[[int], object]:
    """A case of the lanes; or a step of parts of it."""
    case = lanes.CASES[name]
    case = case if loss is None else replace(case, fn=loss)
    case = replace(case, make=of_parts) if parts else case
    plan, opt = lanes.made(mesh, case.rules, case.precision), fs.optim.adamw(1e-2)
    state = fs.init_state(plan, opt, params=lanes.params())
    batch = torch.linspace(-1, 1, 8 * lanes.WIDTH).view(8, lanes.WIDTH).to(mesh.device)
    return going(case.make(case, plan, opt), state, lambda number: batch)


def of_wires(case: wires.Case, mesh: fs.Mesh) -> Callable[[int], object]:
    """A train step whose transfers are compressed."""
    plan, opt = wires.plan_of(case, mesh), fs.optim.sgd(0.125)
    options = {"accumulate": case.accumulate, "clip_norm": case.clip, "schedule": case.policy, **dict(case.more)}
    step = fs.make_train_step(wires.loss_fn, opt, plan, **options)
    batches = [here(wires.batch(number, mesh.rank), mesh) for number in range(4)]
    return going(step, fs.init_state(plan, opt, params=wires.start()), batches.__getitem__)


def of_plan(plan_of: Callable[[fs.Mesh], fs.Plan], mesh: fs.Mesh) -> Callable[[int], object]:
    """A train step of a plan for the start values of the wires."""
    plan, opt = plan_of(mesh), fs.optim.sgd(0.125)
    step = fs.make_train_step(wires.loss_fn, opt, plan)
    batches = [here(wires.batch(number, mesh.rank), mesh) for number in range(4)]
    return going(step, fs.init_state(plan, opt, params=wires.start()), batches.__getitem__)


def packed(text: str, mesh: fs.Mesh) -> fs.Plan:
    """A plan whose matrices are frozen in few bits."""
    rules = [fs.Rule(r".*\.w", fs.fsdp("shard"), trainable=False, packed=text), (".*", fs.fsdp("shard"))]
    return fs.make_plan(wires.start(), mesh, rules, batch=P("shard"), units=("one", "two"))


def of_outer(case: outer.Case, mesh: fs.Mesh) -> Callable[[int], object]:
    """Outer steps."""
    step = outer.step_of(case, mesh)
    batches = [here(wires.batch(number, mesh.rank), mesh) for number in range(4)]
    return going(step, fs.init_state(step.plan, step.opt, params=wires.start()), batches.__getitem__)


def of_optimizer(name: str, mesh: fs.Mesh) -> Callable[[int], object]:
    """A train step with an optimizer."""
    case, module = OPTIMIZERS[name], net()
    model = fs.split(module, units=("blocks.*",))
    plan, opt = fs.make_plan(model, mesh, case.rules, batch=P("shard")), case.opt()
    step = fs.make_train_step(
        lambda params, x: loss_of(lambda x: model.apply(params, x), x), opt, plan, **dict(case.options)
    )
    state = fs.init_state(plan, opt, params=tree.nest(dict(module.named_parameters())))
    batches = [rows(number).chunk(mesh.size)[mesh.rank].to(mesh.device) for number in range(4)]
    return going(step, state, batches.__getitem__)


def of_eval(mesh: fs.Mesh, what: str) -> Callable[[int], object]:
    """An evaluation, a gradient, or an update of parts that are called by themselves."""
    plan, opt = cases.planned(mesh), fs.optim.adamw(1e-2)
    state, batch = fs.init_state(plan, opt, params=cases.params()), cases.batch(0, mesh)
    grad = fs.value_and_grad(cases.loss, plan)
    if what == "eval":
        evaluate = fs.make_eval_step(cases.loss, plan)
        return lambda number: evaluate(state, batch)
    if what == "gradient":
        return lambda number: grad(state.params, batch)
    update, grads = fs.make_update(opt, plan, clip_norm=0.1), [grad(state.params, batch)[1] for _ in range(3)]
    return going(update, state, grads.__getitem__)


ONE, TWO, FOUR = ((1,), ("shard",)), ((2,), ("shard",)), ((2, 2), ("replica", "shard"))
CLIPPED = [(r"0\..*", 0.01), (r"1\..*", 0.02), (r".*", 0.1)]
LAYERED: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"accumulate": 3},
    "clipping by rule": {"clip_norm": CLIPPED},
    "remat": {"remat": "all", "clip_norm": 0.1},
    "loss scale": {"loss_scale": fs.LossScale()},
    "in backward": {"schedule": fs.Policy(update="in_backward")},
    "graphs": {"compile": "fx"},
    "skipping": {"skip_norm": 1e9},
    "stochastic rounding": {"short": True},
    "random numbers by key": {"loss": keyed},
    "dropout": {"loss": dropped},
    "8-bit moments": {"opt": fs.optim.adamw8bit(1e-2)},
    "every second": {"opt": fs.optim.every(2, fs.optim.adamw(1e-2)), "clip_norm": 0.1},
}


def _layered() -> Iterator[tuple[str, Kind]]:
    for name, options in LAYERED.items():
        for ranks, axes in ((1, ONE), (2, TWO)):
            yield f"{name}, {ranks} ranks", Kind(axes, functools.partial(of_layers, **options))


def _wired() -> Iterator[tuple[str, Kind]]:
    for name, case in {**wires.CASES, **{f"replicas, {name}": case for name, case in wires.REPLICAS.items()}}.items():
        axes = TWO if case.replicas == 1 else FOUR
        yield f"wire: {name}", Kind(axes, functools.partial(of_wires, case))


KINDS: dict[str, Kind] = {
    **dict(_layered()),
    **{
        f"layout: {name}": Kind(lanes.CASES[name].axes, functools.partial(of_lanes, name))
        for name in ("some whole, default", "opt axes, whole gradients", "zero, kept", "kept on the host, default")
    },
    "collectives": Kind(FOUR, functools.partial(of_lanes, "hsdp, default", loss=summing)),
    "parts": Kind(FOUR, functools.partial(of_lanes, "hsdp, default", parts=True)),
    **dict(_wired()),
    **{
        f"low rank: {name}": Kind(FOUR, functools.partial(of_plan, functools.partial(low_rank.plan_of, spec=name)))
        for name in ("flat", "whole")
    },
    **{
        f"packed: {text}": Kind(TWO, functools.partial(of_plan, functools.partial(packed, text)))
        for text in ("nf4/64", "int4/32", "int8/64", "fp8_e4m3/256")
    },
    **{
        f"outer: {name}": Kind(((2, 2), ("replica", "data")), functools.partial(of_outer, case), reads=3)
        for name, case in {"exact": outer.Case(every=1), "int4": outer.Case(every=1, wire="int4")}.items()
    },
    **{
        f"optimizer: {name}": Kind(TWO, functools.partial(of_optimizer, name))
        for name in ("lion", "ema", "chain", "muon", "adafactor")
    },
    **{f"alone: {what}": Kind(TWO, functools.partial(of_eval, what=what)) for what in ("eval", "gradient", "update")},
}


def waiting(kind: Kind) -> list[str]:
    """What waits in the third step of a kind, on rank 0, beside its reads."""

    def run(mesh: fs.Mesh) -> list[str]:
        step = kind.make(mesh)
        for number in range(2):
            step(number)
        with Waits() as found:
            step(2)
        wrong = [] if len(found.reads) == kind.reads else [f"{len(found.reads)} reads: {found.reads}"]
        return wrong + list(dict.fromkeys(found.others))

    mesh = fs.virtual_mesh(*kind.axes, device=DEVICE)
    return mesh.run(lambda: run(mesh))[0]


SELDOM = (
    *(f"{name}, 1 ranks" for name in LAYERED if name != "plain"),
    *(
        "wire: int8",
        "wire: bf16",
        "wire: gathers alone",
        "wire: reductions alone",
        "wire: microbatches",
        "wire: clipped",
    ),
    *("wire: kept", "wire: update in backward", "wire: replicated", "wire: feedback", "wire: feedback, bf16"),
    *("wire: replicas, all axes", "wire: replicas, the slow axis", "wire: replicas, the fast axis"),
    *("wire: replicas, optimizer everywhere", "wire: replicas, feedback", "low rank: whole", "outer: exact"),
    *("packed: int4/32", "packed: int8/64", "layout: zero, kept", "layout: some whole, default"),
)
"""Kinds that the slow tests try: others have what is in them, too."""


def run(library: str, seldom: bool) -> dict[str, list[str]]:
    """What waits in each kind, where anything does. In a process of a pool."""
    load(library)
    found = {name: waiting(kind) for name, kind in KINDS.items() if (name in SELDOM) == seldom}
    return {name: wrong for name, wrong in found.items() if wrong}
