"""The train state: a value that a step takes and returns."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import described
from fshard.errors import DonatedError, TreeError, lines
from fshard.optim.scaling import Scale
from fshard.runtime.update import Shard, Update
from fshard.sharding.layout import Group
from fshard.sharding.plan import Plan
from fshard.state.past import Past


class Donated(Tensor):
    """What a tensor of a donated state becomes: any use of it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every operation."""
        raise DonatedError(
            "this tensor belongs to a state that was donated to a train step, which updated its memory in place: "
            "read it from the state that the step returned, clone it first, or build the step with donate=False"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<a tensor of a donated state>"


class TrainState:
    """Parameters, optimizer state, step number and seed of a training run, as one rank holds them.

    A state is a value: a step takes one and returns the next. With ``donate=True``, the default, the step reuses the
    memory of the state that it takes, and that state says so when it is used again (``jax.jit(donate_argnums=0)``).
    The update of the last step may still be waiting for the next forward to hide behind; reading ``params`` or
    ``opt_state`` finishes it first.

    Attributes:
        plan: where its leaves live.
        step: the steps made so far. A step that was skipped is not counted.
        seed: of the random numbers inside steps.
        scale: where loss scaling stands, ``(value, good)``; None before the first step with ``loss_scale=``.
        count: under ``fs.optim.every``, the elements of ``fs.Mean`` whose gradients are carried, as their sum; else 0,
            and what is carried are gradients of each step's mean. Neither depends on ranks or microbatches.
        late: the step at which a leaf began to train, by path; leaves that train from the start are left out. Moments
            are corrected by the updates that a leaf has had, as in ``torch.optim``, which counts them for each.
        past: where it comes from.
    """

    def __init__(
        self,
        plan: Plan,
        step: int,
        seed: int,
        shards: list[Shard],
        update: Update | None = None,
        scale: Scale | None = None,
        count: float = 0.0,
        late: Mapping[str, int] | None = None,
        past: Past | None = None,
    ) -> None:
        self.past = Past() if past is None else past
        self.count = count
        self.late = dict(late or {})
        self.plan = plan
        self.scale = scale
        self.step = step
        self.seed = seed
        self._shards: list[Shard] | None = shards
        self._update = update
        self._params: dict[str, Any] | None = None
        self._opt: dict[str, Any] | None = None
        self._read: list[tuple[Tensor, int]] = []

    def __repr__(self) -> str:
        if self._shards is None:
            return f"<TrainState of step {self.step}, donated>"
        return f"<TrainState of step {self.step}: {len(self.plan.leaves)} leaves on rank {self.plan.mesh.rank}>"

    @property
    def params(self) -> dict[str, Any]:
        """This rank's part of the parameters: a nested dict of plain tensors, 1-D where a leaf is flat-sharded."""
        if self._params is None:
            self._params = self._tree(self._param, self.finished())
            self._read = [(leaf, _version(leaf)) for _, leaf in tree.paths(self._params)]
        self.finished()
        return self._params

    @property
    def opt_state(self) -> dict[str, Any]:
        """This rank's part of the optimizer state: for each of its names a nested dict like ``params``."""
        if self._opt is None:
            shards = self.finished()
            names = dict.fromkeys(name for shard in shards for name in shard.opt)
            self._opt = {name: self._tree(functools.partial(self._named, name), shards) for name in names}
        self.finished()
        return self._opt

    def finished(self) -> list[Shard]:
        """The shards of each group, with no update waiting."""
        shards = self.shards()
        if self._update is not None:
            self._update.finish()
            self._update = None
        return shards

    def shards(self) -> list[Shard]:
        """The shards as they lie, with ``waiting`` still to be applied.

        Raises:
            DonatedError: this state was donated to a step.
        """
        if self._shards is None:
            raise DonatedError(
                f"the state of step {self.step} was donated to a train step, which updated its memory in place: "
                f"use the state that the step returned, or build the step with donate=False"
            )
        return self._shards

    def check_plan(self, plan: Plan) -> None:
        """Refuse a step that was made for another plan.

        Raises:
            DonatedError: this state was donated to a step.
            TreeError: the plans differ.
        """
        self.shards()
        self._check_unwritten()
        if self.plan is not plan and self.plan != plan:
            raise TreeError("the state was made for another plan: make the step and the state from the same one")

    def _check_unwritten(self) -> None:
        """Refuse a state whose ``params`` were written to: what is assigned there never reaches its memory."""
        if self._params is None:
            return
        now = dict(tree.paths(self._params))
        kept = list(zip(self.plan.leaves, self._read, strict=True))
        wrong = [f"{path}: was replaced" for path, (leaf, _) in kept if now.get(path) is not leaf]
        wrong += [f"{path}: is not in the plan" for path in now if path not in self.plan.leaves]
        wrong += [
            f"{path}, or a leaf beside it in its group: was written to in place"
            for path, (leaf, n) in kept
            if not wrong and _version(leaf) != n
        ]
        if wrong:
            raise TreeError(
                lines(
                    "state.params is read-only, and it was written to:",
                    wrong,
                    "A state is a value: make one of new parameters with fs.init_state(plan, opt, params=whole), where "
                    "whole = fs.unshard(state.params, plan) with your changes.",
                )
            )

    @property
    def waiting(self) -> Update | None:
        """The update that is still to be applied, if there is one."""
        return self._update

    def compared(self) -> None:
        """Note that ranks have compared what they hold copies of."""
        self.past = self.past.compared()

    def donate(self) -> None:
        """Give the memory away: this state, and every tensor that was read from it, can no longer be used."""
        for tensor in tree.leaves((self._params, self._opt)):
            if isinstance(tensor, Tensor):
                with torch.no_grad():
                    tensor.set_()  # type: ignore[call-overload]
                tensor.__class__ = Donated
        self._shards = self._update = self._params = self._opt = None

    def _tree(self, part: Callable[[Shard, Group, int], Tensor | None], shards: list[Shard]) -> dict[str, Any]:
        flat = {}
        for path, (group, number) in self.plan.places().items():
            tensor = part(shards[group.id], group, number)
            if tensor is not None:
                flat[path] = tensor
        ordered = {path: flat[path] for path in self.plan.leaves if path in flat}
        return tree.nest(ordered)

    def _param(self, shard: Shard, group: Group, number: int) -> Tensor:
        return local_view(self.plan, group, number, shard.param)

    def _named(self, name: str, shard: Shard, group: Group, number: int) -> Tensor | None:
        held, group = shard.held.get(name), group.owned
        if held is None or number not in held.ranges:
            return None
        if held.plain:
            return local_view(self.plan, group, number, shard.opt[name])
        begin, end = held.ranges[number]
        form, local = held.forms[number], group.local_shape(number, self.plan.mesh)
        view = shard.opt[name][begin:end].detach()
        if form.shape is None:
            return view.view(local) if form.block == 1 else view
        return view.view(form.shape) if end > begin else view


def _version(leaf: Tensor) -> int:
    return 0 if leaf.is_inference() else leaf._version


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
    """What somebody who gave this in the place of a state may have meant; or nothing."""
    if isinstance(given, tuple) and given and isinstance(given[0], TrainState):
        return ". This is what a step returns: unpack it, state, metrics = step(state, batch)"
    return ", the state itself and not state.params" if isinstance(given, Mapping) else ""


def not_copied(step: Any) -> NoReturn:
    """The ``__reduce__`` of steps: their units read memory at fixed places, and communicators belong to a process.

    Raises:
        TypeError: always, as for other objects that cannot be pickled.
    """
    raise TypeError(f"{step!r} cannot be copied or pickled: make it again from its function and its plan, which can be")


def local_view(plan: Plan, group: Group, number: int, shard: Tensor) -> Tensor:
    """This rank's tensor of one leaf, as a view of its group's shard."""
    begin, end = group.shard_range(number, plan.mesh.index(group.gather_axes))
    return shard[begin:end].detach().view(group.local_shape(number, plan.mesh))
