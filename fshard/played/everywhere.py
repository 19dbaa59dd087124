"""Virtual meshes outside of ``run``: the caller stands for all ranks, and sees values of all of them.

What is made there is made for each rank, and is inside of ``run`` that of the rank that runs. A call made there is made
on every rank.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from fshard.arguments import described
from fshard.errors import PlanError, TreeError
from fshard.played.cooperative import Interrupted, playing
from fshard.runtime.execution import Shield
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan

P = ParamSpec("P")
R = TypeVar("R")


class Playable(Protocol):
    """A mesh on whose ranks functions can be called."""

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every rank."""

    def run_waiting(self, fn: Callable[[], Any], waiting: Callable[[], AbstractContextManager[None]]) -> list[Any]:
        """The same, waiting for the ranks in a context."""

    def join(self, results: Sequence[Any]) -> Any:
        """The results as one value."""


def made_on_each_rank(batches: bool) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that makes a step: outside of ``run`` of a virtual mesh it makes one for each rank.

    Args:
        batches: whether the second argument of the step is a batch, so that it can be called outside of ``run`` with a
            global one.
    """

    def decorate(make: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(make)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            __tracebackhide__ = True
            plan = _plan(args, kwargs)
            if plan is None or plan.mesh.here is plan.mesh and not plan.mesh.everywhere:
                return make(*args, **kwargs)

            here = functools.partial(_on_this_rank, make, args, kwargs)
            return _of_all_ranks(here, plan, batches) if plan.mesh.everywhere else here()

        return call

    return decorate


def called_on_each_rank(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of plans or states: outside of ``run`` of a virtual mesh it is called on every rank.

    The caller gets the results joined, a state of all ranks among them. Under ``torch.inference_mode()`` it makes
    ordinary tensors, too: a state that is made there can be trained.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return call(*args, **kwargs)
        mesh = next((mesh for mesh in map(_mesh, [*args, *kwargs.values()]) if mesh is not None), None)
        if mesh is None or mesh.here is mesh and not mesh.everywhere:
            return fn(*args, **kwargs)
        if mesh.everywhere:
            check_unwritten(args, kwargs)
            joined: R = play_joined(mesh, call, *args, **kwargs)
            return joined
        return _on_this_rank(fn, args, kwargs)

    return call


def _on_this_rank(fn: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """The result of a call with plans and states as the rank that runs holds them."""
    __tracebackhide__ = True
    return fn(*map(_here, args), **{name: _here(value) for name, value in kwargs.items()})


def play_joined(mesh: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function on every rank, and join what it returns."""
    __tracebackhide__ = True
    playable: Playable = mesh
    return playable.join(playable.run(fn, *args, **kwargs))


class OfAllRanks:
    """A stand-in for one object of each rank, made when it is first asked for. Its attributes are the rank's.

    Outside of ``run`` they are those of rank 0, or, before a run, of what was made there to plan with.
    """

    def __init__(self, make: Callable[[], Any], plan: Plan, batches: bool) -> None:
        self._all_plan, self._all_make, self._all_batches = plan, make, batches
        self._all_made: dict[int | None, Any] = {None: make()}
        self._all_late: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_all_"):  # copying asks before there is one
            raise AttributeError(name)
        return getattr(self._all_here(), name)

    def _all_here(self) -> Any:
        """The object of the rank that runs."""
        made, thread = self._all_made, playing()
        if self._all_plan.mesh.everywhere:
            return made.get(0, made[None])
        assert thread is not None
        if thread.rank not in made:
            made[thread.rank] = self._all_make()
        return made[thread.rank]

    def __repr__(self) -> str:
        return repr(self._all_here())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object of the rank that runs; outside of ``run`` those of all ranks, with a global batch."""
        __tracebackhide__ = True
        plan = self._all_plan
        if not plan.mesh.everywhere:
            return self._all_here()(*args, **kwargs)
        if not self._all_batches:
            raise PlanError(
                f"{self!r} was called outside of mesh.run, where no rank has shards: call it in a function that "
                f"mesh.run(fn) or fs.make_step(fn, plan) calls"
            )
        for value in args[:1]:
            _check_of_all(value, plan.mesh)
        check_unwritten(args, kwargs)

        def on_rank() -> Any:
            own = [args[0], *(part_of(batch, plan) for batch in args[1:2]), *args[2:]] if args else []
            named = {name: part_of(v, plan) if name == "batch" else v for name, v in kwargs.items()}
            return self._all_here()(*own, **named)

        return self._all_played(on_rank)

    def _all_played(self, on_rank: Callable[[], Any]) -> Any:
        """The joined results. An interrupt that came too late for this call is raised by the next one."""
        __tracebackhide__ = True
        if self._all_late is not None:
            late, self._all_late = self._all_late, None
            raise late
        mesh: Playable = self._all_plan.mesh  # type: ignore[assignment]
        joined: Any = None
        try:
            # What comes while no rank runs would take the joined state away from a caller whose state is donated.
            with Shield() as shield:
                try:
                    joined = mesh.run_waiting(on_rank, shield.opened)
                except Interrupted as error:
                    self._all_late, joined, error.results = KeyboardInterrupt(), error.results, []
                joined = _joined_results(mesh, joined)
            self._all_late = shield.late or self._all_late
            return joined
        except BaseException:
            joined = None  # a traceback that is kept must not hold the next state, which nobody else has
            raise

    def trace(self, *args: Any) -> Any:
        """As on a rank; outside of ``run`` the last argument is a global batch."""
        plan = self._all_plan
        if plan.mesh.everywhere and tree_states(args[:-1]):  # of a step function, whose parts are those of a rank
            return self._all_on_first(lambda own: own.trace(*args[:-1], part_of(args[-1], plan)))
        if plan.mesh.everywhere and args:
            args = (*args[:-1], _first_part(args[-1], plan))
        return self._all_here().trace(*args)

    def _all_on_first(self, ask: Callable[[Any], Any]) -> Any:
        """The answer of the object of rank 0, where it runs."""
        plan = self._all_plan
        mesh: Playable = plan.mesh  # type: ignore[assignment]
        return mesh.run(lambda: None if plan.mesh.rank else ask(self._all_here()))[0]


def on_each_rank(fn: Callable[..., Any], step: Any, state: Any, batch: Any) -> Any:
    """Return what a function of a step, a state and a batch returns on every rank, joined, for those of all ranks."""
    plan = step._all_plan
    check_unwritten([state], {})
    return play_joined(plan.mesh, lambda: fn(step._all_here(), state.here, part_of(batch, plan)))


def _joined_results(mesh: Playable, results: list[Any]) -> Any:
    """The joined results of a call. If they cannot be joined, nobody holds them, and states are as before the call."""
    try:
        return mesh.join(results)
    except TreeError as error:
        raise error.with_traceback(None) from None
    finally:
        results.clear()


def _first_part(batch: Any, plan: Plan) -> Any:
    """The part of a global batch that rank 0 gets."""
    mesh = plan.mesh
    seen = dataclasses.replace(plan, mesh=Mesh(mesh.sizes, mesh.axis_names, 0, mesh.device))
    return seen.local_batch(batch)


def _of_all_ranks(make: Callable[[], R], plan: Plan, batches: bool) -> R:
    """An object of the class of what is made, with one object for each rank."""
    found: Any = OfAllRanks(make, plan, batches)
    found.__class__ = _class_of_all_ranks(found._all_made[None].__class__)
    out: R = found
    return out


@functools.lru_cache(maxsize=32)
def _class_of_all_ranks(kind: Any) -> type:
    """A class of objects that ``isinstance`` takes for those of another, and that are one for each rank."""
    return type(kind.__name__, (OfAllRanks, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def join(results: Sequence[Any], size: int) -> Any:
    """Return what all ranks returned, as one value; see ``VirtualMesh.join``."""
    if not isinstance(results, (list, tuple)) or len(results) != size:
        raise TreeError(
            f"mesh.join(results): give what mesh.run returned, a list of {size} results, not {described(results)}"
        )
    return _joined(list(results), "results")


def _joined(values: list[Any], path: str) -> Any:
    first = values[0]
    if (joined := getattr(first, "of_all_ranks", None)) is not None:
        return joined(values)
    if (keys := _keys(values)) is not None:
        parts = {key: _joined([value[key] for value in values], f"{path}[{key!r}]") for key in keys}
        if isinstance(first, Mapping):
            return parts
        return type(first)(*parts.values()) if hasattr(first, "_fields") else type(first)(parts.values())
    if dataclasses.is_dataclass(first):
        return first
    differ = [rank for rank, value in enumerate(values) if not _same(first, value)]
    if differ:
        raise TreeError(
            f"{path} differs between ranks, on rank 0 and on rank {differ[0]}: outside of mesh.run a call returns what "
            f"is equal on all ranks, and states, which are as they were before the call. Give a number as "
            f"fs.Mean(total, count) from the loss or evaluation that makes it, or make the call in mesh.run(fn), which "
            f"returns the result of each rank: of trees of shards among those, such as gradients, "
            f"fs.unshard(results, plan) makes whole tensors"
        )
    return first


def _keys(values: list[Any]) -> list[Any] | None:
    """The keys of dicts, tuples or lists that are alike; None for other values."""
    first = values[0]
    if isinstance(first, Mapping):
        return list(first) if all(isinstance(v, Mapping) and v.keys() == first.keys() for v in values) else None
    if isinstance(first, (tuple, list)):
        return [*range(len(first))] if all(type(v) is type(first) and len(v) == len(first) for v in values) else None
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        equal = one.shape == other.shape and one.dtype == other.dtype
        return equal and torch.equal(one.nan_to_num(), other.nan_to_num())
    if one is other or isinstance(one, float) and one != one and other != other:
        return True
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # what cannot be compared as a whole
        return False


def _check_of_all(value: Any, mesh: Mesh) -> None:
    """Refuse the state of one rank where one of all ranks is needed, and a list of states that were not joined."""
    alone = [one for one in tree_states(value) if not one.plan.mesh.everywhere]
    if alone:
        listed = isinstance(value, list) and len(value) == mesh.size
        remedy = "mesh.join(states)" if listed else "mesh.join(results) makes one of what mesh.run returned"
        raise TreeError(
            f"outside of mesh.run a step takes the state of all {mesh.size} ranks, and was given that of rank "
            f"{alone[0].plan.mesh.rank}: {remedy}"
        )


def check_unwritten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse states whose whole tensors a caller has written to, which no rank would see."""
    for state in tree_states([*args, kwargs]):
        state.memory.check_unwritten()


def tree_states(value: Any) -> list[Any]:
    """The states in a nest of tuples, lists and dicts."""
    if hasattr(value, "of_all_ranks"):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [found for one in value for found in tree_states(one)] if isinstance(value, (tuple, list)) else []


def _plan(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Plan)), None)


def _here(value: Any) -> Any:
    """Plans and states as the rank that runs holds them."""
    if isinstance(value, Plan) or hasattr(value, "of_all_ranks"):
        return value.here
    return {name: _here(one) for name, one in value.items()} if type(value) is dict else value


def part_of(batch: Any, plan: Plan) -> Any:
    """The part of a global batch that the rank that runs gets. States in it are those of the rank."""
    apart = {name: one for name, one in batch.items() if tree_states(one)} if type(batch) is dict else {}
    if not apart:
        return plan.local_batch(batch)
    rest = plan.local_batch({name: one for name, one in batch.items() if name not in apart})
    return {name: apart.get(name, rest.get(name)) for name in batch}


def _mesh(value: Any) -> Mesh | None:
    """The mesh of a plan or of a state, or of the first of several by name."""
    if isinstance(value, Plan):
        return value.mesh
    plan = getattr(value, "plan", None)
    if isinstance(plan, Plan):
        return plan.mesh
    if type(value) is dict and value:
        return _mesh(next(iter(value.values())))
    return None
