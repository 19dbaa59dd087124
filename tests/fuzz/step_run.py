"""Runs generated step functions: on played or real ranks, and in plain PyTorch."""

import traceback
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, tree
from fshard.errors import PeerError
from tests.fuzz.run import Verdict
from tests.fuzz.step_draw import Case, Op, Program
from tests.parts.plain import RULES, Parts, Plain, PlainState, batch, close, local, whole
from tests.parts.ways import OPTS, asking
from tests.shared.workers import Pools

FROZEN = 7
"""The seed of the state that comes in the batch."""
PLANS: dict[str, Any] = {
    "mixed": RULES,
    "flat": [(r".*", fs.fsdp("shard"))],
    "spread": [fs.Rule(r".*norm|scale", P(), opt=fs.fsdp("shard")), (r".*", fs.fsdp("shard"))],
}
"""Rules by name. The last cuts optimizer state further than parameters."""


def plan_of(rules: str, mesh: fs.Mesh) -> fs.Plan:
    """A plan."""
    model = SimpleNamespace(params=whole(), units=("gen.0", "gen.1", "dis.0"), frozen=frozenset())
    return fs.make_plan(model, mesh, PLANS[rules], batch=P(mesh.axis_names))


def perform(op: Op, parts: Sequence[Any], plans: Sequence[int], held: Sequence[Any], data: Any) -> list[Any]:
    """What an op makes of registers.

    Args:
        op: the op.
        parts: the parts of each plan.
        plans: the number of the plan of each register.
        held: the registers.
        data: the batch.
    """
    given, b = [held[n] for n in op.of], parts[max(0, plans[op.of[0]])]
    if op.kind in ("params", "replace"):
        given[0] = readable(given[0])
    if op.kind == "grad":
        loss, grads = b.grad(op.what, given[0], data, op.only)
        return [grads, loss[0] if isinstance(loss, tuple) else loss]
    if op.kind == "evaluate":
        return [b.evaluate(op.what, given[0], data)["loss"]]
    if op.kind == "params":
        return [given[0].params]
    if op.kind == "norm":
        return [b.norm(given[0])]
    if op.kind == "mix":
        return [given[0] * 0.5 + given[1].tanh()]
    if op.kind == "where":
        return [torch.where(given[0] < given[1], 0.3, 0.6)]
    if op.kind == "update":
        return list(b.update(given[0], given[1], op.only, op.number, op.lr))
    if op.kind == "replace":
        return [given[0].replace(params=given[1])]
    trees = 2 if op.kind == "add" else 1
    factor: Any = op.number
    if len(given) > trees:
        factor = op.number / (1.0 + given[trees] * given[trees])
    return [b.add(given[0], given[1], factor) if op.kind == "add" else b.scale(given[0], factor)]


def readable(state: Any) -> Any:
    """A state whose parameters can be read: outside of steps that may need what other ranks have updated."""
    outside = isinstance(state, fs.TrainState) and not hasattr(state.memory, "running") and not state.memory.lent
    return fs.settle(state) if outside else state


class Stopped(Exception):  # noqa: N818 - as an interrupt, no error of the step
    """A step function ends here, once."""


def interpret(does: Program, parts: Sequence[Any], states: Sequence[Any], given: Any, stop: int = -1) -> Any:
    """The step function, which ends before the op of a number."""
    data = {name: given[name] for name in ("x", "y", "w")}
    held = [*states, given["frozen"]]
    plans = [*range(len(states)), len(states) - 1]
    for number, op in enumerate(does.ops):
        if number == stop:
            raise Stopped
        made = perform(op, parts, plans, held, data)
        numbers = op.kind in ("evaluate", "norm", "mix", "where")
        plans += [-1 if numbers else plans[op.of[0]], -1][: len(made)]
        held += made
    return tuple(held[n] for n in does.returned), {str(n): held[n] for n in does.told}


def sharded(case: Case) -> tuple[list[dict[str, Tensor]], list[list[float]]]:
    """On a rank: the whole parameters of each state after some steps, and what was told."""
    with fs.make_mesh(case.sizes, case.names) as mesh:
        plans = [plan_of(rules, mesh) for rules in case.rules]
        opt, policy = OPTS[case.opt], dict(case.policy)
        parts = [Parts(plan, opt, case.donate, debug=case.debug, **dict(case.options)) for plan in plans]
        policy["reshard"] = fs.keep(last=1) if policy["reshard"] == "keep" else policy["reshard"]

        flag, stop = [0], [-1]

        def fn(states: Any, given: Any) -> Any:
            states, metrics = interpret(case.programs[flag[0]], parts, states, given, stop[0])
            own = {"drawn": torch.rand((), dtype=torch.float64), "own": given["x"].mean(), "python": 0.1, "whole": 3}
            return states, metrics | own

        options: dict[str, Any] = {"schedule": fs.Policy(**policy), "donate": case.donate, "debug": case.debug}
        made = fs.make_step(asking(fn) if case.how == "asking" else fn, plans[0], **options)
        step = fn if case.how == "eager" else made
        states: Any = tuple(fs.init_state(plan, opt, params=whole(n)) for n, plan in enumerate(plans))
        frozen, told, drawn = fs.init_state(plans[-1], opt, params=whole(FROZEN)), [], set[float]()
        for number, flag[0] in enumerate(case.flags):
            does = case.programs[flag[0]]
            if case.stop is not None and case.stop[0] == number and case.stop[1] < len(does.ops):
                stop[0] = case.stop[1] if mesh.rank == case.stop[2] else -1
                try:
                    step(states, {**local(batch(number), plans[0]), "frozen": frozen})
                    raise AssertionError(f"call {number} did not stop before op {case.stop[1]}")
                except (Stopped, PeerError):
                    stop[0] = -1
            states, metrics = step(states, {**local(batch(number), plans[0]), "frozen": frozen})
            told.append([float(metrics[str(n)]) for n in does.told])
            drawn.add(float(metrics["drawn"]))
            own = float(metrics["own"]), metrics["python"], metrics["whole"]
            if case.how != "eager" and not (close(own[0], float(batch(number)["x"].mean())) and own[1:] == (0.1, 3)):
                raise AssertionError(f"call {number} returned {own}")
            if case.how != "eager" and ([s.step for s in states] != [number + 1] * len(states) or len(drawn) <= number):
                raise AssertionError(f"call {number} is not one step: {states}, and draws {drawn}")
            scheduled = any(op.kind in ("grad", "evaluate") for op in does.ops)
            if case.how == "step" and not any(case.flags) and scheduled and made.record != made.schedule.ops:
                raise AssertionError(f"step {number} left its schedule: {made.record}")
        if any(
            not torch.equal(fs.unshard(frozen.params, plans[-1])[k], v)
            for k, v in whole(FROZEN).items()
            if k == "scale"
        ):
            raise AssertionError("the frozen state has changed")
        return [dict(tree.paths(fs.unshard(fs.settle(s).params, p))) for s, p in zip(states, plans, strict=True)], told


def plain(case: Case) -> tuple[list[dict[str, Tensor]], list[list[float]]]:
    """The same in plain PyTorch on the global batch."""
    parts = [Plain(OPTS[case.opt])] * len(case.rules)
    states: Any = tuple(PlainState(whole(n)) for n in range(len(parts)))
    told = []
    for number, flag in enumerate(case.flags):
        does, given = case.programs[flag], {**batch(number), "frozen": PlainState(whole(FROZEN))}
        states, metrics = interpret(does, parts, states, given)
        told.append([float(metrics[str(n)]) for n in does.told])
    return [dict(tree.paths(state.params)) for state in states], told


def check(case: Case, pools: Pools | None = None) -> Verdict:
    """Run a case both ways and compare."""
    want, numbers = plain(case)
    largest = max(leaf.abs().max().item() for state in want for leaf in state.values())
    if not largest < 1e4 or not all(abs(x) < 1e8 for row in numbers for x in row):
        return Verdict("refused", "it diverges")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(run one by one|left their schedule)")
            if case.real and pools is not None:
                results = pools(case.ranks).run(sharded, case, timeout=60.0)
            else:
                results = fs.virtual_mesh((case.ranks,), ("any",)).run(sharded, case)
    except Exception as error:
        return Verdict("wrong", f"{type(error).__name__}: {error}", traceback.format_exc())
    params, told = results[0]
    if any(result[1] != told for result in results):
        return Verdict("wrong", f"ranks were told different numbers: {[result[1] for result in results]}")
    for step, (mine, other) in enumerate(zip(told, numbers, strict=True)):
        for number, a, b in zip(case.programs[case.flags[step]].told, mine, other, strict=True):
            if not close(a, b):
                return Verdict("wrong", f"step {step}: register {number} is {a!r}, and {b!r} in plain PyTorch")
    for number, (found, state) in enumerate(zip(params, want, strict=True)):
        for path, leaf in state.items():
            if not torch.allclose(found[path], leaf, rtol=1e-9, atol=1e-9):
                return Verdict("wrong", f"state {number}: {path} differs by {(found[path] - leaf).abs().max():.1e}")
    return Verdict("right")
