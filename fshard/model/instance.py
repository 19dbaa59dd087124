"""A module's structure as a pure function of its parameters and buffers.

``torch.func.functional_call`` puts tensors into the module and takes them out again after the call. Code of the module
that runs later then finds other weights, for example a checkpointed region that the backward computes again. An
instance belongs to one set of tensors as long as anything refers to it, so any reference to one of its modules finds
the right tensors, and calls of one model do not disturb each other.

An engine's tensors are the same objects in every step. Their instance is kept with them, until a call writes to it.
"""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import nn

from fshard.model.accumulating import tell_accumulating
from fshard.model.changed_buffers import BufferTracker
from fshard.model.foreign_objects import held
from fshard.model.leaves import LeafOrder
from fshard.model.model_refusals import assigned, reaches_outside, written_elsewhere
from fshard.model.template import Instance, Template
from fshard.model.unit import Slot, slot_of
from fshard.model.writes import (
    OBJECTS,
    PriorWrites,
    ResultAndWrites,
    WrittenObject,
    refuse,
    unreturnable,
    version,
    written_in_place,
)

FORWARD = "forward"
"""The method that a call of a module runs."""


class LeftCall(BaseException):  # noqa: N818 - not an error: code must not catch it
    """An engine needs nothing more of a call of a whole model, and leaves it."""


class Body:
    """A structure as a pure function of parameters and buffers.

    Args:
        template: the structure.
        params: the order of the parameters.
        buffers: the order of the buffers.
        tracker: finds the buffers that a call changed.
        unit: the unit's name; empty for a whole model.
    """

    def __init__(
        self, template: Template, params: LeafOrder, buffers: LeafOrder, tracker: BufferTracker, unit: str = ""
    ) -> None:
        self.params = params
        self.buffers = buffers
        self.unit = unit
        self._template = template
        self._tracker = tracker
        self._tensors = template.tensors()
        self._elsewhere = template.watched_outside() if unit else None
        self._examined = set[str]()

    @property
    def module(self) -> nn.Module:
        """The module that the structure was compiled from."""
        return self._template.root

    def kind(self) -> Hashable:
        """A key, equal for structures that are the same function: of the same classes, attributes and shapes."""
        return self._template.kind(), self.params.paths, self.buffers.paths

    def tables(self) -> list[tuple[type[nn.Module], Mapping[str, Any]]]:
        """The class and the attributes of each module of the structure."""
        return self._template.tables()

    def instance(self, params: Mapping[str, Any]) -> Instance:
        """An instance with the leaves of a tree: the one made of them before, if it can be called again.

        Raises:
            TreeError: leaves are missing, unknown, misshapen or no tensors.
        """
        leaves = self.params.read(params)
        slot = slot_of(leaves[0]) if leaves else None
        kept: Instance | None = None if slot is None else slot.instances.get(self)
        if leaves and kept is not None and not kept.busy and all(map(operator.is_, kept.tensors.leaves, leaves)):
            return kept  # its leaves were checked when it was made
        made = self._template.make(self.params.leaves(params))
        slot = self._slot(made)
        if slot is not None:
            slot.instances[self] = made
            made.kept = True
        return made

    def begun(self, params: Mapping[str, Any], given: PriorWrites) -> Instance:
        """A new instance, after the writes of an earlier call to the unit's modules."""
        made = self._template.make(self.params.leaves(params))
        made.surface.begin(given.writes)
        return made

    def prepared(self, params: Mapping[str, Any]) -> Callable[..., Any]:
        """The function of the arguments alone, with one tree of parameters."""
        kept = self.instance(params)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal kept
            if args and type(args[0]) is PriorWrites:
                return self.call(self.begun(params, args[0]), args[1:], kwargs)
            if kept.busy or not kept.kept:
                kept = self.instance(params)
            return self.call(kept, args, kwargs)

        return call

    def call(self, instance: Instance, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = FORWARD) -> Any:
        """Call an instance whose buffers are bound: its forward with its hooks, or another of its methods.

        Returns:
            The module's result; ``ResultAndWrites`` for a unit whose call wrote to its modules.
        """
        instance.busy = True
        versions = list(map(version, self._tensors.values())) if self._tensors else None
        try:
            first = instance.modules[0]
            out = first(*args, **kwargs) if method == FORWARD else getattr(first, method)(*args, **kwargs)
        except LeftCall:
            self._finish(instance, None)
            raise
        except BaseException as error:
            self._retire(instance)
            self._explain(error)
            raise
        finally:
            instance.busy = False
        if versions is not None and versions != list(map(version, self._tensors.values())):
            now = zip(self._tensors.items(), versions, strict=True)
            self._retire(instance)
            raise written_in_place([spot for (spot, x), before in now if version(x) != before])
        # A glance costs little where nothing was written.
        if instance.glance is not None and instance.tensors.unwritten and instance.glance():
            if self.unit or self._template.shared.clean():
                return out
        return self._finish(instance, out)

    def _explain(self, error: BaseException) -> None:
        """Raise a clearer error in the place of one that PyTorch raises of an instance."""
        if isinstance(error, TypeError) and "as parameter" in str(error) and str(error).startswith("cannot assign"):
            raise assigned(self.unit, str(error)) from error
        if isinstance(error, RuntimeError) and "meta" in str(error) and (reached := self._template.reaches()):
            raise reaches_outside(self.unit, reached) from error

    def run(
        self,
        instance: Instance,
        given: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = FORWARD,
    ) -> tuple[Any, dict[str, Any]]:
        """Call an instance with these buffers.

        Returns:
            The result of ``call``, and by path the buffers that it changed.
        """
        if not given:
            return self.call(instance, args, kwargs, method), {}
        own = self._tracker.clones(given)
        versions = [buffer._version for buffer in own]
        for i, buffer in enumerate(own):
            instance.tensors.bind(i, buffer)
        with self._tracker.watch() as watch:
            out = self.call(instance, args, kwargs, method)
        changed: dict[str, Any] = {}
        now = [instance.tensors.bound(i) for i in range(len(own))]
        for i, new in self._tracker.changed(given, own, now, versions, watch):
            changed[self.buffers.paths[i]] = new
            # A region that the backward computes again must start from the same values, and write elsewhere.
            instance.tensors.bind(i, given[i].clone())
        return out, changed

    def _finish(self, instance: Instance, out: Any) -> Any:
        """The result of a call that may have written to the instance."""
        if not self.unit:
            self._finish_whole(instance)
            return out
        if self._elsewhere is not None and (spot := self._elsewhere.written()) is not None:
            self._retire(instance)
            raise written_elsewhere(self.unit, spot)
        shared = self._template.shared
        clean = shared.clean()
        if not clean:
            refuse(self.unit, {spot: x for spot, x in shared.changed().items() if held(x)}, whole=False)
        if (moved := self._moved(instance)) is not None:
            self._retire(instance)
            raise unreturnable(self.unit, moved, "another module or parameter")
        if clean and instance.surface.clean():
            self._mark_unwritten(instance)
            return out
        self._retire(instance)
        writes = instance.surface.writes()
        refuse(self.unit, writes)
        if not clean:
            writes[OBJECTS] = WrittenObject()
        return ResultAndWrites(out, writes) if writes else out

    def _finish_whole(self, instance: Instance) -> None:
        shared, surface = self._template.shared, instance.surface
        clean = shared.clean()
        shared.restore()
        if clean and instance.kept and surface.clean() and self._moved(instance) is None:
            self._mark_unwritten(instance)
            return
        if not instance.surface.clean():
            tell_accumulating(instance.surface, self._examined)
        self._retire(instance)

    def _moved(self, instance: Instance) -> str | None:
        return self._template.moved(instance.tensors.leaves, dict(enumerate(instance.modules)))

    def _mark_unwritten(self, instance: Instance) -> None:
        if instance.kept:
            instance.tensors.unwritten = True
            instance.glance = instance.glance or self._template.glance(instance)

    def _retire(self, instance: Instance) -> None:
        """Use an instance in no further call."""
        slot = self._slot(instance)
        if slot is not None and slot.instances.get(self) is instance:
            del slot.instances[self]
        instance.kept = False

    def _slot(self, instance: Instance) -> Slot | None:
        leaves = instance.tensors.leaves
        return slot_of(leaves[0]) if leaves else None
