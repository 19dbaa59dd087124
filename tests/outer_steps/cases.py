"""DiLoCo on ranks, and in one plain process: replicas one after the other, leaves whole, torch's own optimizers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.outer_steps.outer_step import OuterStep
from fshard.sharding.wire import SCALED, WireFormat
from tests.training.wire_cases import Tree, batch, loss_fn, start, through

STEPS, BLOCK = 7, 256
Flat = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: ``outer`` are the arguments of the outer SGD, ``make`` those of the inner optimizer."""

    every: int = 3
    wire: str | None = None
    fragments: int | tuple[str, ...] = 1
    delay: int = 0
    mix: float | None = None
    outer: tuple[tuple[str, Any], ...] = (("lr", 0.7), ("momentum", 0.9), ("nesterov", True))
    inner: str = "adamw"
    spec: P = P(flat="data")
    opt: P | None = None
    sizes: tuple[int, int] = (2, 2)
    more: tuple[tuple[str, Any], ...] = ()
    early: tuple[int, int] | None = None
    """Exchanges of the whole model every so many steps, up to a step."""

    def at(self, number: int) -> "Case":
        """What goes on in a step, from 1."""
        if self.early is None or number > self.early[1]:
            return self
        return dataclasses.replace(self, every=self.early[0], fragments=1, delay=0, early=None)


CASES = {
    "DiLoCo": Case(),
    "local SGD": Case(every=1, outer=(("lr", 1.0),), inner="sgd"),
    "fragments": Case(every=4, fragments=3),
    "named fragments": Case(every=4, fragments=(r"two\..*", r".*")),
    "delay": Case(every=3, fragments=2, delay=2),
    "all under way": Case(every=2, fragments=2, delay=1, mix=0.0),
    "int4": Case(every=2, wire="int4"),
    "int8, fragments under way": Case(every=4, wire="int8", fragments=2, delay=2),
    "bf16": Case(wire="bf16", spec=P("data")),
    "three replicas": Case(wire="int8", sizes=(3, 1), spec=P()),
    "optimizer state apart": Case(wire="int8", spec=P(), opt=P(flat="data")),
    "clipped": Case(more=(("clip_norm", 0.1),)),
    "more exchanges at first": Case(every=3, fragments=2, delay=1, wire="int4", early=(1, 5)),
    "one replica": Case(every=2, wire="int4", fragments=2, sizes=(1, 2)),
    "that keep nothing": Case(every=3, fragments=2, delay=1, early=(1, 5)),
}
OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "sgd": (lambda: fs.optim.sgd(0.125), lambda leaves: torch.optim.SGD(leaves, 0.125)),
    "adamw": (
        lambda: fs.optim.adamw(0.01, weight_decay=0.0),
        lambda leaves: torch.optim.AdamW(leaves, 0.01, weight_decay=0.0),
    ),
}


def flat_of(tree: Any) -> Flat:
    return {f"{unit}.{name}": leaf for unit, leaves in tree.items() for name, leaf in leaves.items()}


def nested(flat: Flat) -> Tree:
    tree: Tree = {}
    for path, leaf in flat.items():
        tree.setdefault(path.split(".")[0], {})[path.split(".")[1]] = leaf
    return tree


def plan_of(case: Case, mesh: fs.Mesh) -> fs.Plan:
    rule = fs.Rule(".*", case.spec, opt=case.opt)
    return fs.make_plan(start(), mesh, [rule], batch=P(("replica", "data")), units=("one", "two"))


def step_of(case: Case, mesh: fs.Mesh) -> OuterStep:
    """The outer step of a rank."""
    inner = fs.make_train_step(loss_fn, OPTIMIZERS[case.inner][0](), plan_of(case, mesh), **dict(case.more))
    given = {"wire": case.wire, "fragments": case.fragments, "delay": case.delay, "mix": case.mix}
    return fs.outer(inner, fs.optim.sgd(**dict(case.outer)), every=case.every, **given)


def steps_of(step: OuterStep, state: fs.TrainState, begin: int, end: int) -> tuple[fs.TrainState, list[float]]:
    """On a rank: steps from one number to another."""
    losses = []
    for number in range(begin, end):
        state, metrics = step(state, batch(number, step.plan.mesh.whole.rank))
        losses.append(float(metrics.loss))
    return state, losses


def whole(step: OuterStep, state: fs.TrainState) -> tuple[Flat, Flat]:
    """On a rank: the parameters of its replica, and the anchor."""
    anchor = fs.averaged(state, "anchor")
    return tuple(flat_of(fs.unshard(fs.settle(one).params, step.plan)) for one in (state, anchor))  # type: ignore[return-value]


def trained(case: Case, mesh: fs.Mesh, steps: int = STEPS) -> tuple[list[float], Flat, Flat]:
    """On a rank: losses, the parameters of its replica, and the anchor."""
    step, begin, losses = step_of(case.at(1), mesh), 0, []
    state = fs.init_state(step.plan, step.opt, params=start())
    if case.early is not None:
        begin = case.early[1]
        state, losses = steps_of(step, state, 0, begin)
        step = step_of(case, mesh)
        state = fs.reshard_state(state, step.plan, step.opt)
    state, more = steps_of(step, state, begin, steps)
    return losses + more, *whole(step, state)


def played(case: Case, steps: int = STEPS) -> list[tuple[list[float], Flat, Flat]]:
    mesh = fs.virtual_mesh(case.sizes, ("replica", "data"))
    return list(mesh.run(lambda: trained(case, mesh, steps)))


def masks_of(case: Case, block: int) -> list[dict[str, Tensor]]:
    """For each fragment, the elements of each leaf that are in it, in the order of a plan's buffers."""
    plan = plan_of(case, fs.abstract_mesh((2, 1), ("replica", "data")))
    leaves = [leaf for group in plan.groups for leaf in group.leaves]
    if not isinstance(case.fragments, int):
        first, found = "two", []
        for inside in (True, False):
            found.append(
                {leaf.path: torch.full((leaf.numel,), leaf.path.startswith(first) == inside) for leaf in leaves}
            )
        return found
    counts = [-(-leaf.numel // block) for leaf in leaves]
    ends = [sum(counts) * (n + 1) // case.fragments for n in range(case.fragments)]
    out: list[dict[str, Tensor]] = [{} for _ in ends]
    at = 0
    for leaf, count in zip(leaves, counts, strict=True):
        numbers = torch.arange(leaf.numel) // block + at
        for n, end in enumerate(ends):
            out[n][leaf.path] = (numbers < end) & (numbers >= (ends[n - 1] if n else 0))
        at += count
    return out


class Replica:
    """One replica in the plain process."""

    def __init__(self, case: Case, number: int) -> None:
        self.case, self.number = case, number
        self.params = {path: leaf.clone().requires_grad_() for path, leaf in flat_of(start()).items()}
        self.opt = OPTIMIZERS[case.inner][1](list(self.params.values()))
        self.left = {path: torch.zeros_like(leaf) for path, leaf in self.params.items()}
        self.sent: dict[int, Flat] = {}

    def step(self, number: int) -> float:
        """A step on the rows of all of its ranks."""
        self.opt.zero_grad()
        ranks, value = self.case.sizes[1], torch.zeros(())
        for rank in range(ranks):
            value = value + loss_fn(nested(self.params), batch(number, self.number * ranks + rank)) / ranks
        value.backward()
        if (limit := dict(self.case.more).get("clip_norm")) is not None:
            torch.nn.utils.clip_grad_norm_(self.params.values(), limit)
        self.opt.step()
        return float(value.detach())


def plain(case: Case, steps: int = STEPS) -> tuple[list[list[float]], list[Flat], Flat]:
    """Losses and parameters of each replica, and the anchor."""
    form = None if case.wire is None else WireFormat(case.wire, BLOCK if case.wire in SCALED else 1)
    replicas = [Replica(case, number) for number in range(case.sizes[0])]
    anchor = {path: leaf.clone() for path, leaf in flat_of(start()).items()}
    momentum: Flat = {path: torch.zeros_like(leaf) for path, leaf in anchor.items()}
    rule, losses = dict(case.outer), [[] for _ in replicas]  # type: ignore[var-annotated]
    for number in range(1, steps + 1):
        for replica, seen in zip(replicas, losses, strict=True):
            seen.append(replica.step(number - 1))
        now = case.at(number)
        mix = (0.5 if now.delay else 0.0) if now.mix is None else now.mix
        masks = masks_of(now, form.block if form is not None else 1)
        for fragment, mask in enumerate(masks):
            offset = fragment * now.every // len(masks)
            if (number - offset) % now.every == 0 and number > 0:
                for replica in replicas:
                    replica.sent[fragment] = leave(replica, anchor, mask, form)
            if (number - now.delay - offset) % now.every == 0 and number > now.delay:
                arrive(replicas, fragment, mask, anchor, momentum, rule, mix)
    params = [{path: leaf.detach() for path, leaf in replica.params.items()} for replica in replicas]
    return losses, params, anchor


def leave(replica: Replica, anchor: Flat, mask: Flat, form: WireFormat | None) -> Flat:
    """What a replica sends of a fragment: rounded, with what was left of the one before."""
    out = {}
    for path, leaf in replica.params.items():
        there = mask[path].view(leaf.shape)
        exact = anchor[path] - leaf.detach() + replica.left[path]
        out[path] = through(exact, form)
        if form is not None:
            replica.left[path] = torch.where(there, exact - out[path], replica.left[path])
    return out


def arrive(
    replicas: list[Replica], fragment: int, mask: Flat, anchor: Flat, momentum: Flat, rule: dict[str, Any], mix: float
) -> None:
    """The outer update, as in ``torch.optim.SGD``, and what replicas go on from."""
    kept = rule.get("momentum", 0.0)
    for path, leaf in anchor.items():
        there = mask[path].view(leaf.shape)
        grad = sum(replica.sent[fragment][path] for replica in replicas) / len(replicas)
        moved = kept * momentum[path] + grad
        direction = grad + kept * moved if rule.get("nesterov") else moved
        momentum[path] = torch.where(there, moved, momentum[path])
        anchor[path] = torch.where(there, leaf - rule["lr"] * direction, leaf)
        for replica in replicas:
            own = replica.params[path]
            with torch.no_grad():
                own.copy_(torch.where(there, mix * own + (1 - mix) * anchor[path], own))
