"""State dicts of ``torch.nn`` and ``torch.optim``: whole tensors by name, to and from train states."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import Want, expect
from fshard.errors import PlanError, TreeError, lines
from fshard.interchange.export import export, export_entries, stream
from fshard.interchange.export_plan import plan_export
from fshard.interchange.optimizer_state import STEP, left_out, load_with_optimizer
from fshard.interchange.rename import RenameLike, apply_rules, unwrapped, written_name
from fshard.interchange.source import MemorySource
from fshard.optim import adamw, chain, ema, every, from_torch, partition, rate, sgd
from fshard.optim.base import Optimizer
from fshard.optim.combinators import REST
from fshard.played.everywhere import called_on_each_rank, play_joined
from fshard.runtime.comm import collective_call
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan
from fshard.state.fit import check_optimizer
from fshard.state.init import Inits, shard
from fshard.state.pieces import split_name
from fshard.state.train_state import TrainState

P = ParamSpec("P")
R = TypeVar("R")


def _cut_for_each_rank(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of (state, plan): outside of ``run`` of a virtual mesh each rank gets its part of a tree."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given: dict[str, Any] = dict(zip(("state", "plan"), args, strict=False)) | kwargs
        whole, plan = given.pop("state", None), given.pop("plan", None)
        if not isinstance(plan, Plan) or not plan.mesh.everywhere or isinstance(whole, TrainState):
            return fn(*args, **kwargs)
        plan.check_tree(whole, whole=True)
        on_rank: Callable[..., R] = fn
        joined: R = play_joined(plan.mesh, lambda: on_rank(shard(whole, plan.here), plan.here, **given))
        return joined

    return call


@_cut_for_each_rank
@called_on_each_rank
@collective_call
def to_state_dict(
    state: TrainState | Mapping[str, Any],
    plan: Plan | None = None,
    *,
    to: int | None = None,
    axes: Axes | Literal["all"] = "all",
    rename: Sequence[RenameLike] = (),
    buffers: Mapping[str, Any] | None = None,
    nested: bool = False,
) -> dict[str, Any]:
    """A full state dict, as ``module.load_state_dict`` takes it. Collective.

    Args:
        state: a state, or a tree such as ``state.params`` together with ``plan``: shards, or, on a virtual mesh outside
            of ``run``, whole tensors.
        plan: the plan of a tree.
        to: the rank that receives it; other ranks receive an empty dict. None for all ranks.
        axes: as for ``export``: with ``()`` experts are not gathered, and each rank has its own under the leaf's name.
        rename: rules from paths to names.
        buffers: a tree of whole tensors to add, such as ``model.buffers``.
        nested: return a nested dict, in which a tied leaf occurs once, in place of a flat dict, in which it occurs
            under each of its names, as in PyTorch.

    Raises:
        PlanError, TreeError, CheckpointError: as ``export``.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> fs.io.to_state_dict({"w": w.flatten()}, plan)
    {'w': tensor([[1., 2.],
            [3., 4.]])}
    """
    out = dict(export(state, plan, to=to, axes=axes, rename=rename))
    if out:
        out |= {name: leaf.detach().clone() for name, leaf in tree.paths(buffers or {})}
    plan = state.plan if isinstance(state, TrainState) else plan
    for path, leaf in plan.leaves.items() if plan is not None and not rename and not nested else ():
        out |= {alias: out[path] for alias in leaf.aliases if path in out}
    out = out if rename else {written_name(name, out): tensor for name, tensor in out.items()}
    return tree.nest(out) if nested else out


@called_on_each_rank
def from_state_dict(
    params: Mapping[str, Any],
    plan: Plan,
    opt: Optimizer | None = None,
    optim: Mapping[str, Any] | None = None,
    *,
    rename: Sequence[RenameLike] = (),
    init: Inits = (),
    seed: int = 0,
    step: int | None = None,
    cast: bool = False,
) -> TrainState:
    """A train state from full state dicts. Local: each rank copies its own part.

    Args:
        params: whole tensors, as from ``module.state_dict()``, or a nested dict.
        plan: the plan.
        opt: the optimizer, which gives the hyper-parameters; those in ``optim`` are ignored. None reads parameters
            alone.
        optim: the result of ``optimizer.state_dict()``, or of ``get_optimizer_state_dict`` with
            ``full_state_dict=True``; None to start the optimizer's state anew.
        rename: rules from the names in ``params`` to paths; ``(pattern, None)`` leaves a tensor, such as a buffer, out.
        init: ``(pattern, initializer)`` rules for missing leaves.
        seed: the seed of these values, and of random numbers inside of steps.
        step: the number of updates of every leaf; by default the number in ``optim``, or 0.
        cast: whether floating-point tensors may be rounded to the leaf's dtype.

    Raises:
        PlanError, TreeError: as ``load_hf``, also for the optimizer's state.

    >>> module = torch.nn.Linear(2, 3)
    >>> plan = fs.make_plan(fs.split(module), fs.make_mesh((-1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> fs.io.from_state_dict(module.state_dict(), plan, fs.optim.sgd(0.1))
    <TrainState of step 0: 2 leaves on rank 0>
    """
    wants: list[Want] = [
        ("params", params, Mapping, "a state dict"),
        ("plan", plan, Plan, "what fs.make_plan returned"),
        ("optim", optim, (Mapping, type(None)), "what optimizer.state_dict() returned, or None"),
        ("seed", seed, int, "an int"),
        ("step", step, (int, type(None)), "the number of updates, or None"),
        ("cast", cast, bool, "True or False"),
    ]
    expect("from_state_dict(params, plan, opt)", wants)
    if optim is not None and opt is None:
        raise PlanError("from_state_dict: optim= is the state of an optimizer: give opt, such as fs.optim.adamw(1e-3)")
    source = MemorySource("the state dict", flat_tensors(params, "params"))
    state = None
    if optim is not None:
        rows = unwrapped(_by_name(plan, optim, rename, source), source.tensors)
        tensors = flat_tensors({"state": rows}, "optim")
        state = MemorySource("the optimizer's state dict", tensors)
    return load_with_optimizer(plan, opt, source, state, step=step, cast=cast, rename=rename, init=init, seed=seed)


@called_on_each_rank
@collective_call
def to_optim_state_dict(
    state: TrainState,
    opt: Optimizer,
    *,
    keys: Literal["name", "index"] = "name",
    to: int | None = None,
    axes: Axes | Literal["all"] = "all",
) -> dict[str, Any]:
    """A full optimizer state dict in the form of ``torch.optim``. Collective.

    It lacks what sums over replicas keep for the next ones (``fs.Wire(feedback=)``); a ``CheckpointWarning`` says so.

    Args:
        state: the state.
        opt: its optimizer; each of its sets of hyper-parameters becomes one of the ``param_groups``.
        keys: ``"name"`` for the paths of parameters, as in ``get_optimizer_state_dict``; ``"index"`` for numbers, as
            for ``optimizer.load_state_dict``: those of the trainable leaves in the order of the tree, group by group.
        to: the rank that receives it; other ranks receive an empty dict. None for all ranks.
        axes: as for ``export``: with ``()`` experts are not gathered, and each rank has its own under the leaf's name.

    Returns:
        ``{"state": {parameter: {"step": ..., "exp_avg": ...}}, "param_groups": [...]}``.

    Raises:
        PlanError, CheckpointError: as ``export``.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.1, momentum=0.9)
    >>> fs.io.to_optim_state_dict(fs.init_state(plan, opt, params={"w": w}), opt)["param_groups"][0]["params"]
    ['w']
    """
    if keys not in ("name", "index"):
        raise PlanError(f"keys={keys!r} must be 'name' or 'index'")
    expect("to_optim_state_dict(state, opt)", [("state", state, TrainState, "what a step returned")])
    check_optimizer(state.plan, opt)
    plan = state.plan
    groups = param_groups(plan, opt, state.step)
    found = _buffers(state, to, axes)
    if to is not None and not found and plan.mesh.rank != to:
        return {}
    rows: dict[str, dict[str, Any]] = {path: {} for group in groups for path in group["params"]}
    for path, row in rows.items():
        if counts(opt, plan, path):
            row[STEP] = torch.tensor(float(state.step - state.late.get(path, 0)), device="cpu")
    for name, tensor in found.items():
        buffer, path = split_name(name, plan.leaves)
        if path in rows:
            rows[path][buffer] = tensor
    if keys == "index":
        return _by_number(rows, groups)
    groups = [{**group, "params": [written_name(path, rows) for path in group["params"]]} for group in groups]
    return {"state": {written_name(path, rows): row for path, row in rows.items()}, "param_groups": groups}


def _buffers(state: TrainState, to: int | None, axes: Axes | Literal["all"]) -> dict[str, Tensor]:
    """The whole buffers of an optimizer by name. Collective."""
    plan, listed, check_alive = export_entries(state, None, "opt_state")
    without = left_out("to_optim_state_dict", [f"opt.{entry.name}" for entry in listed], plan.leaves)
    kept = [entry for entry in listed if f"opt.{entry.name}" not in without]
    return dict(pair for pair in stream(plan_export(plan, kept, to=to, axes=axes), check_alive) if pair is not None)


def _by_number(rows: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """An optimizer's state dict with numbers in place of names."""
    number = {path: i for i, path in enumerate(rows)}
    for group in groups:
        group["param_names"], group["params"] = group["params"], [number[path] for path in group["params"]]
    return {"state": {number[path]: row for path, row in rows.items()}, "param_groups": groups}


def param_groups(plan: Plan, opt: Optimizer, step: int) -> list[dict[str, Any]]:
    """The ``param_groups`` of torch's equivalent optimizer, one for each set of hyper-parameters.

    Without an equivalent, groups hold the fields of ``opt`` and the leaf's hyper-parameters unchanged.
    """
    by_hyper: dict[Any, list[str]] = {}
    for path, leaf in plan.leaves.items():
        if leaf.trainable:
            by_hyper.setdefault(opt.hyper(path, leaf.shape), []).append(path)
    groups = []
    for hyper, paths in by_hyper.items():
        own, value, updates = own_rule(opt, hyper, step)
        lr = 0.0 if own is None else rate(own.lr, updates + 1)
        groups.append({**_torch_group(own or _any_rule(opt), lr, value), "params": paths})
    return groups


def own_rule(opt: Optimizer, hyper: Any, step: int) -> tuple[Optimizer | None, Any, int]:
    """The innermost optimizer of a set of leaves, its hyper-parameters, and the number of its updates.

    Args:
        opt: the optimizer.
        hyper: what it says of these leaves.
        step: the number of steps so far.

    Returns:
        None for the optimizer of leaves that stay as they are.
    """
    while True:
        if isinstance(opt, partition):
            number, hyper = hyper
            rule = None if number == REST else opt.rules[number][1]
            if rule is None:
                return None, 0.0, step
            opt = rule
        elif isinstance(opt, ema | every | chain):
            step = opt.number(step) if isinstance(opt, every) else step
            opt = opt.opt
        else:
            return opt, hyper, step


def _any_rule(opt: Optimizer) -> Optimizer:
    """The first innermost optimizer."""
    while isinstance(opt, partition | ema | every | chain):
        opt = next(rule for _, rule in opt.rules if rule is not None) if isinstance(opt, partition) else opt.opt
    return opt


def counts(opt: Optimizer, plan: Plan, path: str) -> bool:
    """Tell whether torch's equivalent optimizer counts the updates of a leaf."""
    own, _, _ = own_rule(opt, opt.hyper(path, plan.leaves[path].shape), 0)
    return own is not None and _counts(own)


def _counts(opt: Optimizer) -> bool:
    param = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    twin = _twin(opt, [param], 0.0, 0.0)
    if twin is None:
        return True
    param.sum().backward()  # type: ignore[no-untyped-call]
    twin.step()
    return STEP in twin.state[param]


def flat_tensors(given: Mapping[str, Any], what: str) -> dict[str, Tensor]:
    """The tensors of a flat, nested or mixed dict by dotted name; a TreeError for any other value but None."""
    out, wrong = {}, []
    for name, value in dotted(given):
        if value is None:  # torch.optim.SGD without momentum keeps None
            continue
        if type(value).__name__ == "DTensor":
            wrong.append(f"{name}: a DTensor; use fs.io.from_dtensor, or give value.full_tensor()")
        elif not isinstance(value, Tensor):
            wrong.append(f"{name}: {type(value).__name__}")
        else:
            out[name] = value
    if wrong:
        raise TreeError(lines(f"{what} holds values that are not plain tensors:", wrong, "Give whole tensors by name."))
    return out


def dotted(given: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a flat, nested or mixed dict with their dotted names."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _by_name(
    plan: Plan, optim: Mapping[str, Any], rename: Sequence[RenameLike], params: MemorySource
) -> dict[str, Any]:
    """The state of an optimizer's state dict by parameter name, with numbers as tensors.

    Parameters that have numbers alone get the names that they have in ``params``, which ``rename`` turns into paths.
    """
    state, groups = optim.get("state"), optim.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, Sequence):
        raise TreeError(f"optim has the keys {sorted(map(str, optim))}: give a dict of 'state' and 'param_groups'")
    if all(isinstance(key, str) for key in state):
        names = {key: key for key in state}
    else:
        names = _numbered(plan, groups)
        if rename:
            origins = apply_rules(rename, params.tensors, params.name)
            names = {key: origins[path][0] if path in origins else path for key, path in names.items()}
        lost = [key for key in state if key not in names]
        if lost:
            raise TreeError(f"optim's state has parameters {lost}, and its param_groups hold {len(names)}")
    return {
        names[key]: {what: _as_tensor(value) for what, value in row.items()} if isinstance(row, Mapping) else row
        for key, row in state.items()
    }


def _as_tensor(value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return torch.tensor(float(value), device="cpu") if number else value


def _numbered(plan: Plan, groups: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """The path of each numbered parameter."""
    numbers = [number for group in groups for number in group.get("params", ())]
    given = [name for group in groups for name in group.get("param_names", ())]
    if len(given) == len(numbers):
        return dict(zip(numbers, given, strict=True))
    every = list(plan.leaves)
    trained = [path for path, leaf in plan.leaves.items() if leaf.trainable]
    order = every if len(numbers) == len(every) else trained
    if len(groups) > 1 or len(order) != len(numbers):
        raise TreeError(
            f"optim numbers {len(numbers)} parameters in {len(groups)} groups, and the plan has {len(every)} leaves, "
            f"of which {len(trained)} train: numbers alone do not say which is which. Build the optimizer from "
            f"module.named_parameters(), or give get_optimizer_state_dict(module, optimizer)"
        )
    return dict(zip(numbers, order, strict=True))


def _torch_group(opt: Optimizer, lr: float, hyper: Any) -> dict[str, Any]:
    """The settings of a group, as the installed torch writes them."""
    twin = _twin(opt, [torch.nn.Parameter(torch.empty(0, device="cpu"))], lr, hyper)
    if twin is not None:
        return {key: value for key, value in twin.state_dict()["param_groups"][0].items() if key != "params"}
    plain = {k: v for k, v in vars(opt).items() if isinstance(v, int | float | str | bool | tuple)}
    return {**plain, "lr": lr, "hyper": repr(hyper)}


def _twin(opt: Optimizer, params: list[torch.nn.Parameter], lr: float, hyper: Any) -> torch.optim.Optimizer | None:
    """torch's equivalent optimizer; None if there is none."""
    if isinstance(opt, adamw):
        return torch.optim.AdamW(params, lr, betas=opt.betas, eps=opt.eps, weight_decay=hyper)
    if isinstance(opt, sgd):
        return torch.optim.SGD(
            params, lr, momentum=opt.momentum, dampening=opt.dampening, weight_decay=hyper, nesterov=opt.nesterov
        )
    if isinstance(opt, from_torch):
        twin = opt.cls(params, **{**opt.kwargs, "lr": lr})
        if not hyper and "weight_decay" in twin.defaults:
            twin.param_groups[0]["weight_decay"] = 0.0
        return twin
    return None
