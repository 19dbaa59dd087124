"""Equality between ranks: of a step, and of the state that it is given."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard.optim.base import Optimizer
from fshard.optim.contract import contract
from fshard.runtime.comm import Facts, digest
from fshard.runtime.comm.copies import Copy
from fshard.runtime.comm.facts import Tiers
from fshard.sharding.fact_texts import Texts, sampled, text, texts, walk
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.state.entries import entries, scalars
from fshard.state.replica_entries import of_all_replicas
from fshard.state.settle import complete
from fshard.state.train_state import TrainState
from fshard.version import VERSION

RATE = "learning rate"


@dataclass(frozen=True)
class Equal:
    """Facts of a step, a save or a restore that must be equal on all ranks.

    Attributes:
        settings: its options, by name.
        opt: the optimizer, if there is one.
        always: whether copies are compared each time, and not only those of a state that was just made.
        replicas: whether replicas that train apart compare, and not the ranks of each.
    """

    plan: Plan
    settings: Mapping[str, Any]
    opt: Optimizer | None = None
    always: bool = False
    replicas: bool = False

    @functools.cached_property
    def tiers(self) -> tuple[Texts, Texts]:
        """Return what does not change from step to step."""
        head, rest = self.plan.texts
        versions = {"version of fshard": VERSION, "version of torch": str(torch.__version__)}
        told = head | versions | optimizer_texts(self.opt)
        for name, value in self.settings.items():
            told |= texts(name, value)
        return told, rest | hyper_texts(self.opt, self.plan)

    @functools.cached_property
    def number(self) -> int:
        """The number of what does not change."""
        return digest([sorted(tier.items()) for tier in self.tiers])

    @functools.cached_property
    def rates(self) -> tuple[tuple[str, Callable[[int], Any]], ...]:
        """The functions of the step in the optimizer, which are asked at every step."""
        found = [] if self.opt is None else list(walk("optimizer", self.opt))
        return tuple((_named(name), value) for name, value in found if _is_rate(value))

    def fixed(self) -> Facts:
        """The facts of what is given no state."""
        return Facts(self.number, lambda: self.tiers)

    def of(self, state: TrainState, lr: float | Mapping[str, float] | None = None) -> Facts:
        """The facts of a step that is given this state, and a learning rate of its own."""
        step = state.step if self.opt is None else state.step // (contract(self.opt).steps or 1)
        rates = [sampled(value, step) for _, value in self.rates]
        made, given = state.made, sorted(lr.items()) if isinstance(lr, Mapping) else lr
        values = state.step, state.seed, state.count, state.scale, state.summed, rates, made is None, given
        number = digest((self.number, values, state.late or None, sorted(made.items()) if made else None))

        def items() -> Tiers:
            told = {f"{name} of step {state.step}": repr(r) for (name, _), r in zip(self.rates, rates, strict=True)}
            told |= {} if lr is None else {f"{RATE} of this call": repr(given)}
            told |= {f"the state's {name}": repr(value) for name, value in scalars(state).items()}
            told |= {"the state": "returned by a step" if made is None else "made or restored"}
            return self.tiers[0] | told, {**self.tiers[1], **(made or {})}

        fresh = made is not None
        exact = fresh and state.past.exact
        held = functools.partial(copies, state, self.plan.mesh, exact, self.replicas)
        return Facts(number, items, held if fresh or self.always else None)


def optimizer_texts(opt: Optimizer | None) -> Texts:
    """The class of an optimizer, and its hyper-parameters."""
    return {} if opt is None else {_named(name): text(value) for name, value in walk("optimizer", opt)}


def hyper_texts(opt: Optimizer | None, plan: Plan) -> Texts:
    """Return what an optimizer says of each leaf, where its own functions decide."""
    if opt is None:
        return {}
    trained = [leaf for leaf in plan.leaves.values() if leaf.trainable]
    return {f"hyper-parameters of {leaf.path}": text(opt.hyper(leaf.path, leaf.shape)) for leaf in trained}


def _named(name: str) -> str:
    return name.replace("optimizer.lr", RATE, 1) if name.startswith("optimizer.lr") else name


def _is_rate(value: Any) -> bool:
    return callable(value) and not isinstance(value, type) and sampled(value, 0) is not None


def copies(state: TrainState, ranks: Mesh, exact: bool, replicas: bool = False) -> Sequence[Copy]:
    """Return what this rank holds of a state, as other ranks do. Collective where the state needs that to be whole.

    Args:
        ranks: the mesh that joins them.
        exact: whether all of it is equal bit for bit. Else that holds along data axes, where gradients are summed to
            the same bits; along others each rank computes its own, and they may differ by rounding.
        replicas: whether replicas that train apart take part.
    """
    mesh, data = state.plan.mesh, set(state.plan.data_axes)
    others = any(size > 1 and axis not in data for axis, size in mesh.shape.items())
    staged = state.plan.whole is not None  # ranks of other stages hold other leaves
    found = entries(complete(state, mesh if staged else ranks))
    return [
        Copy(entry.name, entry.holders, entry.tensor, exact or not others, entry.piece.start)
        for entry in (of_all_replicas(found, ranks) if replicas else found)
        if len(entry.holders) > 1
    ]
