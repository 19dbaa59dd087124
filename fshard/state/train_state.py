"""The train state: a value that a step takes and returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import described
from fshard.errors import TreeError
from fshard.hints import hinting
from fshard.optim.scaling import Scale
from fshard.runtime.execution import PendingUpdate, Several, Shard, Shards
from fshard.sharding.plan import Plan
from fshard.state.memory_of_all_ranks import MemoryOfAllRanks, host_of
from fshard.state.provenance import Past
from fshard.state.state_memory import Layout, StateMemory
from fshard.state.state_table import arrays, state_html

CALL = (
    "fs.make_eval_step(fn, plan) makes a step that computes with its parameters, evaluate(state, batch), where "
    "fn(params, batch) calls model.apply"
)
"""Calls with a state."""

HINTS = {
    "state_dict": "fs.io.to_state_dict(state) is one of whole tensors; fs.Checkpointer(folder).save(state) writes a "
    "checkpoint, by all ranks",
    "load_state_dict": "states are values: fs.io.from_state_dict(state_dict, plan, opt) makes one, and "
    "fs.Checkpointer(folder).restore(plan, opt) reads one",
    "save": "fs.Checkpointer(folder).save(state) writes a checkpoint",
    "parameters named_parameters": "state.params is the tree of parameters, this rank's shards; "
    "fs.unshard(state.params, plan) gives whole tensors, and dict(fs.tree.paths(tree)) has either by path",
    "train eval": "the mode is an argument of each call: model.apply(params, x, training=False) in the function of "
    "fs.make_eval_step(fn, plan)",
    "apply forward": CALL,
    "to cuda cpu": "fs.make_mesh(device=) says where shards lie; fs.reshard_state(state, plan, opt) moves them to "
    "another plan",
    "zero_grad backward grad grads apply_gradients": "a train step takes gradients and updates: state, metrics = "
    "step(state, batch); fs.value_and_grad and fs.make_update do so one by one",
    "opt optimizer model module": "a state has values alone: state.params and state.opt_state; the optimizer and the "
    "model are what its plan and step were made of",
    "keys items values": "it is no dict: state.params and state.opt_state are, state.step is a number; "
    "fs.tree.leaves(state) has all of them",
}
"""By the names that states of other libraries have: what is done in their place."""


@dataclass(frozen=True, eq=False, repr=False)
class TrainState:
    """Parameters, optimizer state, step number and seed of a training run, as one rank holds them.

    A state is a value: a step takes one and returns the next, and no attribute can be set. With ``donate=True``, the
    default, the step reuses the memory of the state that it takes, and that state says so when it is used again
    (``jax.jit(donate_argnums=0)``).

    It is a pytree of tensors and numbers: the leaves of ``params`` and ``opt_state``, then ``step``, ``seed``,
    ``scale``, ``count`` and ``late``. ``fs.tree.map(f, state)`` returns a state of what ``f`` returned. It trains on,
    from copies of its leaves, if these have the shapes and dtypes of before. ``copy.deepcopy`` and ``pickle`` return
    equal states of their own memory; a pickled one is for steps of an equal plan, on the same rank. Two states are
    equal (``==``) if their plans are equal and all leaves on this rank are equal bit for bit.

    The update of the last step may still be ``pending``, so that the next forward hides it. The first read of a leaf
    applies it: values are always those after the last step. Reading never communicates; see ``fs.settle``.

    Attributes:
        plan: where its leaves live.
        step: the steps made so far. A step that was skipped is not counted.
        seed: of the random numbers inside steps.
        memory: the buffers that hold its tensors.
        scale: where loss scaling stands, ``(value, good)``; None before the first step with ``loss_scale=``.
        count: under ``fs.optim.every``, the elements of ``fs.Mean`` whose gradients are carried, as their sum; else 0,
            and what is carried are gradients of each step's mean. Neither depends on ranks or microbatches.
        late: the step at which a leaf began to train, by path; less than 0 where it has had more updates than steps,
            such as in another run. Leaves that train from the start are left out. Moments
            are corrected by the updates that a leaf has had, as in ``torch.optim``, which counts them for each.
        past: where it comes from.
        summed: whether what rounding has left out, ``opt_state["residual"]``, is of sums over the elements of
            ``fs.Mean``, and not of means; None before the first step, or without ``fs.Wire(feedback=)``.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> state = fs.init_state(plan, fs.optim.sgd(0.1), params={"w": torch.ones(2)})
    >>> double = fs.tree.map(lambda leaf: 2 * leaf if isinstance(leaf, torch.Tensor) else leaf, state)
    >>> double.params, double == state, double.step
    ({'w': tensor([2., 2.])}, False, 0)
    """

    plan: Plan
    step: Any
    seed: Any
    memory: StateMemory
    scale: Scale | None = None
    count: Any = 0.0
    late: Mapping[str, int] = field(default_factory=dict)
    past: Past = field(default_factory=Past)
    summed: bool | None = None

    if not TYPE_CHECKING:
        __getattr__ = hinting(HINTS)

    def __getitem__(self, name: object) -> NoReturn:
        """Refused: a state is no dict.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a TrainState has attributes: state.params, state.opt_state and state.step, not [{name!r}]")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a state has no code.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a TrainState is not called: {CALL}")

    def __repr__(self) -> str:
        if self.memory.donated:
            return f"<TrainState of step {self.step}, donated>"
        mesh = self.plan.mesh
        where = f"all {mesh.size} ranks" if mesh.everywhere else f"rank {mesh.rank}"
        return f"<TrainState of step {self.step}: {len(self.plan.leaves)} leaves on {where}>"

    @property
    def here(self) -> "TrainState":
        """The state as the rank of the caller holds it: the state itself, but that of all ranks of a virtual mesh."""
        memory: Any = self.memory
        if not isinstance(memory, MemoryOfAllRanks) or self.plan.mesh.everywhere:
            return self
        mine = memory.here
        return replace(self, plan=mine.plan, memory=mine)

    def of_all_ranks(self, states: Sequence["TrainState"]) -> "TrainState":
        """The states of all ranks of a virtual mesh, this one first, as one outside of its ``run``."""
        if isinstance(self.memory, MemoryOfAllRanks) and all(state is self for state in states):
            return self  # that of all ranks, which a step has skipped
        plan = replace(self.plan, mesh=host_of([state.plan for state in states], [state.step for state in states]))
        memory: Any = MemoryOfAllRanks(plan, [state.memory for state in states])
        return replace(self, plan=plan, memory=memory)

    def _repr_html_(self) -> str:
        return state_html(self.plan, repr(self), None if self.memory.donated else self.shards())

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """The trees and tensors that treescope shows, as they are after the last step."""
        trees = {} if self.memory.donated else arrays({"params": self.params, "opt_state": self.opt_state})
        render = import_module("treescope.repr_lib").render_object_constructor
        shown = {"step": self.step, "seed": self.seed, **trees}
        return render(type(self), shown, path, subtree_renderer)

    @property
    def params(self) -> dict[str, Any]:
        """This rank's part of the parameters: a nested dict of plain tensors, 1-D where a leaf is flat-sharded.

        Raises:
            DonatedError: this state was donated to a step.
            StateError: other ranks have updated some of it; ``fs.settle(state)`` fetches that.
        """
        params: dict[str, Any] = self.memory.params(self.step)
        return params

    @property
    def opt_state(self) -> dict[str, Any]:
        """This rank's part of the optimizer state: for each of its names a nested dict like ``params``."""
        opt_state: dict[str, Any] = self.memory.opt_state(self.step)
        return opt_state

    @property
    def pending(self) -> PendingUpdate | Several | None:
        """The update that is still to be applied, as data; None if there is none."""
        return self.memory.pending

    @property
    def stale(self) -> dict[int, None]:
        """The groups whose parameters lack what other ranks have updated."""
        return self.memory.stale

    @property
    def made(self) -> Mapping[str, str] | None:
        """The origin of the state as texts by name; None once ranks have compared it and the copies that they hold."""
        return None if self.memory.compared else self.past.made

    def replace(self, *, params: Any) -> "TrainState":
        """This state with other parameters; optimizer state, step and seed stay. Local.

        Args:
            params: this rank's part of each leaf: a tree like ``params``. Its values are copied. On a virtual mesh
                outside of ``run``, whole tensors.

        Raises:
            DonatedError: this state was donated to a step.
            TreeError: leaves are missing, unknown, or of other shapes.

        >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
        >>> state = fs.init_state(plan, fs.optim.sgd(0.1), params={"w": torch.ones(2)})
        >>> state.replace(params=fs.tree.scale(state.params, 3.0)).params
        {'w': tensor([3., 3.])}
        """
        return replace(self, memory=self.memory.with_params(self.step, params))

    def shards(self) -> Shards:
        """The shards as they lie, with ``pending`` still to be applied.

        Raises:
            DonatedError: this state was donated to a step.
        """
        return self.memory.shards(self.step)

    def applied(self) -> Shards:
        """The shards, with no update waiting. Local: what other ranks have updated may be missing."""
        return self.memory.applied(self.step)

    def finished(self) -> Shards:
        """The shards as they are after the last step. Local.

        Raises:
            DonatedError, StateError: as ``params``.
        """
        return self.memory.whole(self.step)

    def check_plan(self, plan: Plan) -> None:
        """Refuse a step that was made for another plan.

        Raises:
            DonatedError: this state was donated to a step.
            TreeError: the plans differ.
        """
        self.shards()
        self.memory.check_unwritten()
        if self.plan is not plan and self.plan != plan.own:
            raise other_plan(self.plan, plan)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainState):
            return NotImplemented
        if self.plan != other.plan or self.stale.keys() != other.stale.keys() or self.summed != other.summed:
            return False
        (mine, form), (theirs, others) = tree.flatten(self._values(True)), tree.flatten(other._values(True))
        return form == others and all(map(_same, mine, theirs))

    def __copy__(self) -> "TrainState":
        """The state itself: it is a value."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainState":
        """An equal state in memory of its own, of the same plan."""
        with torch.inference_mode(False):
            return replace(self, memory=self.memory.clone(self.step))

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled state has no update that waits: it is applied first."""
        if self.plan.mesh.everywhere:
            raise TypeError(
                f"{self!r} cannot be pickled: its mesh is part of this process. fs.Checkpointer(folder).save(state) "
                f"writes it for any mesh, copy.deepcopy(state) copies it, fs.io.to_state_dict(state) has whole tensors"
            )
        numbers = self.step, self.seed, self.scale, self.count, dict(self.late)
        return _unpickled, (self.plan, [*self.applied()], [*self.stale], numbers, self.past.elsewhere(), self.summed)

    def _values(self, stale: bool = False) -> tuple[Any, ...]:
        """The children of the pytree; ``stale`` gives parameters even if other ranks have updated some."""
        params = self.memory.params(self.step, stale=stale)
        return params, self.opt_state, self.step, self.seed, self.scale, self.count, self.late


def _same(mine: Any, theirs: Any) -> bool:
    """Tell whether two leaves are equal, bit for bit."""
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        return type(mine) is type(theirs) and bool(mine == theirs)
    if (mine.dtype, mine.shape, mine.device) != (theirs.dtype, theirs.shape, theirs.device):
        return False
    a, b = (leaf.detach().reshape(-1).contiguous().view(torch.uint8) for leaf in (mine, theirs))
    return torch.equal(a, b)


def _unpickled(
    plan: Plan, shards: list[Shard], stale: list[int], numbers: Any, past: Past, summed: bool | None
) -> TrainState:
    step, seed, scale, count, late = numbers
    memory = StateMemory(plan, Shards(shards), None, dict.fromkeys(stale))
    return TrainState(plan, step, seed, memory, scale, count, late, past, summed)


@dataclass(frozen=True)
class _Form:
    """The structure of a state as a pytree, equal for states of equal plans and optimizers."""

    layout: Layout
    past: Past = field(compare=False)
    summed: bool | None


def _flatten(state: TrainState) -> tuple[tuple[Any, ...], _Form, tuple[str, ...]]:
    return state._values(), _Form(state.memory.layout(state.step), state.past.elsewhere(), state.summed), LEAVES


def _unflatten(form: _Form, values: Any) -> TrainState:
    params, opt_state, step, seed, scale, count, late = values
    memory = StateMemory.of(form.layout, params, opt_state)
    return TrainState(form.layout.plan, step, seed, memory, scale, count, late, form.past, form.summed)


LEAVES = ("params", "opt_state", "step", "seed", "scale", "count", "late")
"""The attributes that hold the leaves of a state."""

tree.register(TrainState, _flatten, _unflatten)


def other_plan(own: Plan, plan: Plan) -> TreeError:
    """A state that was given to a step of another plan, or on another rank."""
    if own.mesh.transport is not None and own.mesh.rank != plan.mesh.rank and own.mesh.shape == plan.mesh.shape:
        return TreeError(
            f"rank {plan.mesh.rank} was given the state of rank {own.mesh.rank}: mesh.run has returned one state for "
            f"each rank, so use results[mesh.rank], or give all of them as mesh.join(results)"
        )
    return TreeError("the state was made for another plan: make the step and the state from the same one")


def expect_state(state: Any, call: str) -> None:
    """Refuse what is no state where one belongs.

    Raises:
        TreeError: naming what it is.
    """
    if not isinstance(state, TrainState):
        raise TreeError(
            f"the first argument is {described(state)}: {call}(state, batch) takes what init_state "
            f"returns{_meant(state)}"
        )


def _meant(given: Any) -> str:
    """Return what somebody who gave this in the place of a state may have meant; or nothing."""
    if isinstance(given, tuple) and given and isinstance(given[0], TrainState):
        return ". This is what a step returns: unpack it, state, metrics = step(state, batch)"
    return ", the state itself and not state.params" if isinstance(given, Mapping) else ""


def not_copied(step: Any) -> NoReturn:
    """The ``__reduce__`` of steps: their units read memory at fixed places, and communicators belong to a process.

    Raises:
        TypeError: always, as for other objects that cannot be pickled.
    """
    raise TypeError(f"{step!r} cannot be copied or pickled: make it again from its function and its plan, which can be")
