"""The contents of a checkpoint: one train state, or several by name, under the names ``generator.params.w``."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fshard.arguments import described
from fshard.errors import PlanError, TreeError
from fshard.played.transport import VirtualTransport
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.state.entries import Scalars, entries, scalars
from fshard.state.pieces import Entry
from fshard.state.replica_entries import of_all_replicas
from fshard.state.train_state import TrainState

States = TrainState | Mapping[str, TrainState]
"""One state, or several of one mesh by name: those of a generator and a discriminator."""

T = TypeVar("T")


def by_name(given: Any, kind: type[T], call: str) -> dict[str, T]:
    """The values by name; one alone has the name ``""``.

    Raises:
        TreeError: a value of another type, a name that is not an identifier, or none at all.
    """
    if isinstance(given, kind):
        return {"": given}
    if not isinstance(given, Mapping) or not given:
        raise TreeError(
            f"{call} takes one {kind.__name__}, or a dict of them by name, and was given {described(given)}"
        )
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise TreeError(f"{call}: {name!r} cannot name a state: give an identifier, such as 'generator'")
        if not isinstance(value, kind):
            raise TreeError(f"{call}: {name!r} is {described(value)}, no {kind.__name__}")
    return dict(given)


def beside(given: Any, names: Iterable[str], call: str, what: str) -> dict[str, Any]:
    """A further argument for each name; None stands for None for each.

    Raises:
        PlanError: it has other names.
    """
    names = list(names)
    if names == [""]:
        return {"": given}
    if given is None:
        return dict.fromkeys(names)
    if not isinstance(given, Mapping) or list(given) != names:
        told = list(given) if isinstance(given, Mapping) else described(given)
        raise PlanError(f"{call}: {what} is {told}: give a dict with {', '.join(map(repr, names))}, as the plans have")
    return dict(given)


def one_mesh(states: Mapping[str, TrainState | Plan]) -> Mesh:
    """The mesh of all of these states or plans.

    Raises:
        PlanError: they have several.
    """
    plans = {name: one.plan if isinstance(one, TrainState) else one for name, one in states.items()}
    meshes = {name: plan.mesh for name, plan in plans.items()}
    first = next(iter(meshes.values()))
    other = [name for name, mesh in meshes.items() if _other_mesh(mesh, first)]
    if other:
        raise PlanError(
            f"{other[0]!r} lives on another mesh than {next(iter(meshes))!r}: states of one checkpoint share one"
        )
    return first.whole


def _other_mesh(mesh: Mesh, first: Mesh) -> bool:
    return mesh.whole != first.whole or mesh.whole.transport is not first.whole.transport


def seen_here(mesh: Mesh | None) -> Mesh | None:
    """A mesh as the rank that runs sees it; None outside of the runs of a virtual mesh.

    Args:
        mesh: as any rank sees it; None for none.
    """
    if mesh is not None and isinstance(mesh.transport, VirtualTransport):
        mesh = mesh.transport.host.here
    return None if mesh is None or mesh.everywhere else mesh


def step_of(states: Mapping[str, TrainState]) -> int:
    """The step of a checkpoint: the largest of its states."""
    steps: list[int] = [state.step for state in states.values()]
    return max(steps)


def all_entries(states: Mapping[str, TrainState]) -> list[Entry]:
    """The entries of all states, as all replicas hold them."""
    return [replace(e, name=named(name, e.name)) for name, state in states.items() for e in whole_entries(state)]


def whole_entries(state: TrainState) -> list[Entry]:
    """The entries of a state, of all replicas where these train apart."""
    return of_all_replicas(entries(state), state.plan.mesh)


def all_scalars(states: Mapping[str, TrainState]) -> Scalars:
    """The scalars of all states, and the step of the checkpoint."""
    own = {named(name, key): value for name, state in states.items() for key, value in scalars(state).items()}
    return {**own, "step": step_of(states)}


def named(state: str, name: str) -> str:
    """The name of an entry of a state among those of all."""
    return f"{state}.{name}" if state else name
