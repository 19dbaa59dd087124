"""Runs cases: on played or real ranks, and as one plain process."""

import re
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.errors import PlanError
from fshard.runtime.comm.packing import rounded
from fshard.sharding.wire import WireFormat
from fshard.state.entries import assemble, entries, scalars
from fshard.state.init import take
from tests.fuzz import models
from tests.fuzz.draw import ROWS, WHOLE, Case, Leg, spec
from tests.shared.plain import Plain, difference
from tests.shared.workers import Pools

TIGHT, LOOSE = 1e-9, 2e-3
BLOCK = 16
"""Elements of a block that travels in few bits."""


@dataclass(frozen=True)
class Verdict:
    """What came of a case: "right", "refused", or "wrong" and why."""

    kind: str
    why: str = ""
    trace: str = ""


def batch(case: Case, step: int) -> dict[str, Any]:
    """The global batch of a step; every third goes another way through the model."""
    generator = torch.Generator().manual_seed(1000 * case.number + step)
    x = torch.randn(ROWS, case.model.width, generator=generator, dtype=torch.float64)
    return {"x": x, "count": 1.0 + (x[:, 0] > 0), "deep": step % 3 != 2}


def part(whole_batch: Mapping[str, Any], leg: Leg, index: int) -> dict[str, Any]:
    """A data rank's part of it."""
    data = torch.Size(n for n, name in zip(leg.sizes, leg.names, strict=True) if name in leg.batch).numel()
    rows = leg.rows or (ROWS // data,) * data
    return {k: v.split(rows)[index] if isinstance(v, Tensor) else v for k, v in whole_batch.items()}


def loss_of(case: Case, apply: Any, dtype: torch.dtype) -> Any:
    """The loss function."""

    def loss_fn(params: Any, batch: Any) -> Any:
        x, counts = batch["x"].to(dtype), batch["count"]
        losses = (apply(params, x, deep=batch["deep"]) - torch.sin(3 * x)).square().mean(1)
        return fs.Mean((losses * counts).sum(), counts.sum()) if case.mean else losses.mean()

    return loss_fn


def module_of(case: Case) -> models.Net:
    """The model with its first values."""
    return models.make(case.model, case.number, torch.float64)


def train_leg(case: Case, number: int, start: Any, folder: str) -> Any:
    """On a rank: a leg from what the one before has left."""
    leg = case.legs[number]
    with fs.make_mesh(leg.sizes, leg.names) as mesh:
        module, opt = module_of(case), case.optimizer()
        model = fs.split(module, units=case.model.units)
        align = "leaf" if case.opt in WHOLE else 256 if case.opt == "adamw8bit" else None
        weights, others, first = ({"pattern": p, **spec(k, leg, align)} for p, k in _patterns(leg))
        precision = fs.Precision(compute=torch.float32) if case.compute else None
        rules = [fs.Rule(**first), fs.Rule(**weights), fs.Rule(**others)]
        wire = fs.Wire(gather=leg.wire, block=BLOCK) if leg.wire else None
        plan = fs.make_plan(model, mesh, rules, batch=fs.P(leg.batch), precision=precision, wire=wire)
        cast = torch.float32 if case.compute else torch.float64
        step = fs.make_train_step(loss_of(case, model.apply, cast), opt, plan, **_options(case, leg))
        state = _state(case, plan, opt, module, start, folder)
        told = []
        if leg.proven:
            fs.verify(step, state, part(batch(case, state.step), leg, mesh.index(leg.batch)))
        for _ in range(leg.steps):
            mine = part(batch(case, state.step), leg, mesh.index(leg.batch))
            state, metrics = step(state, mine)
            told.append((metrics.loss.item(), metrics.grad_norm.item()))
        if case.through == "checkpoint" and number < len(case.legs) - 1:
            with fs.Checkpointer(folder) as checkpoints:
                checkpoints.save(state)
        pieces = [(e.name, e.shape, e.piece, e.tensor.clone()) for e in entries(fs.settle(state))]
        curved: dict[str, Tensor] = {}
        old = "own" in case.model.kinds  # functions of autograd that torch.func does not take
        if leg.proven and number == len(case.legs) - 1 and not (case.compute or old):
            product = fs.func.hvp(loss_of(case, model.apply, cast), plan)
            last = part(batch(case, state.step), leg, mesh.index(leg.batch))
            curved = dict(tree.paths(fs.unshard(product(state.params, state.params, last), plan)))
        return pieces, scalars(state), dict(tree.paths(fs.unshard(state.params, plan))), told, curved


def curvature(case: Case, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The Hessian of the loss after the last step, times the parameters: by plain PyTorch."""
    module, steps = module_of(case), sum(leg.steps for leg in case.legs)
    leaves = {path: leaf.detach().requires_grad_() for path, leaf in params.items()}

    def apply(params: Any, x: Tensor, deep: bool) -> Any:
        given = {**dict(tree.paths(params)), **dict(module.named_buffers())}
        return torch.func.functional_call(module, given, (x,), {"deep": deep}, tie_weights=True)

    result = loss_of(case, apply, torch.float64)(tree.nest(leaves), batch(case, steps))
    loss = result.total / result.count if isinstance(result, fs.Mean) else result
    trained = {path: leaves[path] for path, leaf in module.named_parameters() if leaf.requires_grad}
    grads = torch.autograd.grad(loss, [*trained.values()], create_graph=True, materialize_grads=True)
    slope = sum((grad * leaf.detach()).sum() for grad, leaf in zip(grads, trained.values(), strict=True))
    found = torch.autograd.grad(slope, [*trained.values()], materialize_grads=True)  # type: ignore[arg-type]
    return {path: torch.zeros_like(leaf) for path, leaf in params.items()} | dict(zip(trained, found, strict=True))


def _patterns(leg: Leg) -> list[tuple[str, str]]:
    return list(zip([r".*weight", r".*", r"blocks\.0\..*"], leg.specs, strict=True))


def _options(case: Case, leg: Leg) -> dict[str, Any]:
    options = dict(leg.options)
    if isinstance(options["remat"], tuple) and not any(unit.startswith("blocks") for unit in case.model.units):
        options["remat"] = None
    if options["remat"] == "offload" and (case.model.units[:1] != ("blocks.*",) or len(case.model.calls) < 3):
        options["remat"] = None  # too few calls of units for one to leave
    if isinstance(options["remat"], tuple):
        options["remat"] = list(options["remat"])
    if "loss_scale" in options:
        options["loss_scale"] = fs.LossScale(initial=options["loss_scale"][0], interval=options["loss_scale"][1])
    if leg.policy == "auto":
        options["schedule"] = fs.Auto(compute=1e9, wire=1e8)
    else:
        policy = dict(leg.policy)
        reshard = policy["reshard"]
        if isinstance(reshard, str):
            policy["reshard"] = fs.keep(last=1) if reshard == "keep" else fs.secondary(reshard)
        options["schedule"] = fs.Policy(**policy)
    clip = list(case.clip) if isinstance(case.clip, tuple) else case.clip
    return {**options, "clip_norm": clip, "accumulate": leg.accumulate}


def _state(case: Case, plan: fs.Plan, opt: Any, module: Any, start: Any, folder: str) -> fs.TrainState:
    if start is None:
        return fs.init_state(plan, opt, params=tree.nest(dict(module.named_parameters())))
    if case.through == "checkpoint":
        with fs.Checkpointer(folder) as checkpoints:
            return checkpoints.restore(plan, opt)
    return assemble(plan, opt, lambda e: e.tensor.copy_(take(start[0][e.name], e.piece)), start[1])


def whole(ranks: list[Any]) -> dict[str, Tensor]:
    """The entries of all ranks put together; where several ranks give an element, they agree on it."""
    out: dict[str, Tensor] = {}
    for same in zip(*ranks, strict=True):
        name, shape, _, first = same[0]
        full, seen = torch.zeros(shape, dtype=first.dtype), torch.zeros(shape, dtype=torch.bool)
        for _, _, piece, tensor in same:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
            values, known = full[box].flatten(), seen[box].flatten()
            inside = slice(piece.start, piece.stop)
            if not torch.equal(values[inside][known[inside]], tensor.flatten()[known[inside]]):
                raise AssertionError(f"{name}: ranks hold different values of the same elements")
            values[inside], known[inside] = tensor.flatten(), True
            full[box], seen[box] = values.view(piece.shape), known.view(piece.shape)
        if not seen.all():
            raise AssertionError(f"{name}: no rank holds some of its elements")
        out[name] = full
    return out


def sharded(case: Case, pools: Pools | None) -> tuple[dict[str, Tensor], list[tuple[float, float]], dict[str, Tensor]]:
    """All legs, one after the other; the whole parameters, each step's loss and norm, and the Hessian's product."""
    start, told, params, curved = None, [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for number, leg in enumerate(case.legs):
            args = (case, number, start, folder)
            if case.real and pools is not None:
                results = pools(leg.ranks).run(train_leg, *args)
            else:
                results = fs.virtual_mesh((leg.ranks,), ("any",)).run(train_leg, *args)
            for result in results:
                if result[3] != results[0][3]:
                    raise AssertionError(f"ranks were told different numbers: {[r[3] for r in results]}")
            start, params = (whole([result[0] for result in results]), results[0][1]), results[0][2]
            told += results[0][3]
            curved = results[0][4]
    return params, told, curved


def plain(case: Case) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """One process on the global batch."""
    module = module_of(case)
    cast = torch.float32 if case.compute else torch.float64
    named = dict(module.named_parameters())

    legs = [leg for leg in case.legs for _ in range(leg.steps)]
    told: list[tuple[float, float]] = []

    def apply(params: Any, x: Tensor, deep: bool) -> Tensor:
        flat = {path: travelled(leaf.to(cast), path, legs[len(told)]) for path, leaf in tree.paths(params)}
        buffers = dict(module.named_buffers())
        out: Tensor = torch.func.functional_call(module, {**flat, **buffers}, (x,), {"deep": deep}, tie_weights=True)
        return out

    frozen = [path for path, leaf in named.items() if not leaf.requires_grad]
    one = Plain(
        loss_of(case, apply, cast), case.optimizer(), {k: v.detach() for k, v in named.items()}, case.clip, frozen
    )
    for step in range(len(legs)):
        told.append((one.step(batch(case, step)), one.norm))
    return one.params, told


def travelled(leaf: Tensor, path: str, leg: Leg) -> Tensor:
    """A leaf as units read it: rounded, if it is gathered in few bits. Its gradient is that of the leaf."""
    weights, others, first = _patterns(leg)
    key = next(key for pattern, key in (first, weights, others) if re.fullmatch(pattern, path))
    if not leg.wire or spec(key, leg, None)["at_rest"] == fs.P():
        return leaf
    flat = leaf.detach().flatten()
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % BLOCK)])
    values = torch.empty_like(flat)
    rounded(flat, WireFormat(leg.wire, 1 if leg.wire == "bf16" else BLOCK), values)
    return leaf + (values[: leaf.numel()].view_as(leaf) - leaf.detach())


def check(case: Case, pools: Pools | None = None) -> Verdict:
    """Run a case both ways and compare."""
    try:
        params, told, curved = sharded(case, pools)
    except PlanError as error:
        return Verdict("refused", str(error).splitlines()[0])
    except Exception as error:
        if "fshard.errors.PlanError" in str(error):  # from a real rank
            return Verdict("refused", "on a rank")
        return Verdict("wrong", f"{type(error).__name__}: {error}", traceback.format_exc())
    want, numbers = plain(case)
    # Codes of eight bits may differ where a number lies between two of them.
    limit = LOOSE if case.compute or case.opt == "adamw8bit" else TIGHT
    if (found := difference(params, want)) > limit:
        return Verdict("wrong", f"parameters differ by {found:.2e}")
    for step, (mine, other) in enumerate(zip(told, numbers, strict=True)):
        if abs(mine[0] - other[0]) > limit * max(1.0, abs(other[0])):
            return Verdict("wrong", f"step {step}: the loss is {mine[0]!r}, and {other[0]!r} in one process")
        if case.every == 1 and abs(mine[1] - other[1]) > limit * max(1.0, other[1]):
            return Verdict("wrong", f"step {step}: the norm is {mine[1]!r}, and {other[1]!r} in one process")
    if curved and (found := difference(curved, curvature(case, params))) > max(limit, 1e-8):
        return Verdict("wrong", f"products with the Hessian differ by {found:.2e}")
    return Verdict("right")
