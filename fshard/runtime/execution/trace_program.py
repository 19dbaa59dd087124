"""Finding a program: the loss is run once on fake tensors, and the engine writes down what it calls.

Fake tensors have shapes and no data, so this needs neither memory nor communication, and every error that shows in
shapes, writes or aliases is raised before anything real happened. A program whose Python control flow reads tensor
values cannot run so; the first real step then finds the program on demand.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard import tree
from fshard.errors import RematError, UnitError, written_data
from fshard.model.float8 import attach_rows, read_otherwise, rounded_rows, rows_of
from fshard.model.foreign_objects import held, opaque
from fshard.model.unit import slot_of
from fshard.runtime.engine.activations import Activations, TracedCopies, written_by
from fshard.runtime.engine.batch import check_kept, faked
from fshard.runtime.engine.engine import Engine
from fshard.runtime.engine.fake_fallback import explaining, needs_values, quiet
from fshard.runtime.engine.hosted_activations import HostedActivations
from fshard.runtime.engine.loss_result import check_differentiable, foreign_loss, read_loss
from fshard.runtime.engine.program_mode import ProgramMode
from fshard.runtime.engine.remat_rules import NO_REMAT, Remat, differentiated, nothing_leaves, own_generator
from fshard.runtime.execution.executor import OnDemand
from fshard.runtime.execution.tracing import TracedMoves, Tracing, program_of, tell_dropping, tell_untrained
from fshard.runtime.memory.slots import storage_of
from fshard.schedule.activation_moves import called
from fshard.schedule.footprint import Need
from fshard.schedule.ops import Program
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.plan import Plan
from fshard.torch_internals import FakeTensor, TorchDispatchMode, UnsupportedFakeTensorException

ASKED: Mapping[Any, Callable[..., Any]] = {
    torch.ops.prim.device.default: lambda x: x.fake_device,
    torch.ops.aten.is_same_size.default: lambda x, y: x.shape == y.shape,
    torch.ops.aten._has_same_storage_numel.default: lambda x, y: (
        x.untyped_storage().nbytes() // x.element_size() == y.untyped_storage().nbytes() // y.element_size()
    ),
}
"""Answers to operators by which autograd asks about fake tensors, more often than it computes on them."""

SCALING = frozenset((torch.ops.aten.embedding.default, torch.ops.aten._embedding_bag.default))
"""Reads of a table whose gradient is divided by how often the batch has a row, where their fourth argument is true."""

DROPPING = frozenset((torch.ops.aten.bernoulli_.float, torch.ops.aten.native_dropout.default))
"""Draws of masks, as in dropout and stochastic depth where these are in training mode."""


@dataclass(frozen=True)
class ProgramTrace:
    """A traced program.

    Attributes:
        program: its calls.
        weighted: whether its loss is an ``fs.Mean``.
        foreign: whether its loss may depend on tensors that require grad and are no parameters.
        inner: the units that it differentiates itself.
        needs: what its compute ops need on the batch that it was traced with; nothing if it was not traced.
        axes: those over which it communicates itself.
        idle: the trained leaves that it gives no gradient; None if it was not traced.
        exact: whether its loss takes derivatives that PyTorch gets wrong.
        again: floating-point operations, of those in ``needs``, that compute activations again in the backward.
        remat: with which units computed again it was traced, and runs.
        scaled: the tables whose gradients are divided by counts of the batch.
    """

    program: Program
    weighted: bool
    foreign: bool
    inner: frozenset[str] = frozenset()
    needs: tuple[Need, ...] = ()
    axes: tuple[Axes, ...] = ()
    idle: tuple[str, ...] | None = None
    exact: bool = False
    again: int = 0
    remat: Remat = NO_REMAT
    scaled: tuple[str, ...] = ()

    @functools.cached_property
    def flops(self) -> int | None:
        """Floating-point operations of the model on the batch that was traced; None if only a run has found it."""
        return sum(need.flops for need in self.needs) - self.again if self.needs else None


class GlueWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which slot leaves code outside of units reads, and tells the executor before the read happens.

    An exception cannot leave from here: it would pass through C++ code of torch, some of which ends the process. So the
    first fault is noted, and raised when the program is over.

    Args:
        engine: runs the program.
        executor: is told.
        train: whether it is a loss, and not an evaluation.
    """

    def __init__(self, engine: Engine, executor: Tracing | OnDemand, train: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.engine, self.executor, self.train = engine, executor, train
        self.drops = False
        self.places = engine.plan.places()
        self.fault: BaseException | None = None
        self.written: UnitError | None = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if self.fault is not None:
            raise self.fault from error
        if self.written is not None and not isinstance(error, UnitError):
            raise self.written from error
        if self.drops and not self.train and error is None:
            tell_dropping()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note slot leaves among the arguments, then run the op."""
        if func in ASKED and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return ASKED[func](*args)  # the modes below add nothing to it
        if not self.engine.differentiating and self.fault is None:
            self._check_reads(args, kwargs or {})
            if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
                self._check_draws(kwargs["generator"])
            if func in SCALING:
                self._note_scaled(*args)
            elif func in DROPPING:
                self.drops = True
            if self.written is None:
                self._check_writes(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _check_draws(self, generator: torch.Generator) -> None:
        """Note a unit that draws from a generator of its own, and would draw other numbers where it is run again."""
        unit = self.engine.inside
        if unit and self.engine.units.remat.of(unit) is not None and generator is not torch.default_generator:
            self.fault = own_generator(unit)

    def _note_scaled(self, table: Tensor, ids: Tensor, _: Any = None, scaled: bool = False, *others: Any) -> None:
        """Note a table that is read with ``scale_grad_by_freq=True``."""
        slot = slot_of(table)
        if scaled and torch.is_grad_enabled():
            self.executor.scaled[slot.path if slot is not None else "a table"] = None

    def _check_reads(self, args: Any, kwargs: Any) -> None:
        for leaf in tree.leaves((args, kwargs)):
            slot = slot_of(leaf) if isinstance(leaf, Tensor) else None
            if slot is not None and slot.engine is self.engine:
                try:
                    self._note(leaf, slot.path)
                except BaseException as fault:
                    self.fault = fault

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note an op that writes to the memory of a parameter: ``.data`` has a version of its own, which hides it."""
        engine = self.engine
        if self.executor.busy:
            return  # gathers write there
        for x in written_by(func, args, kwargs):
            if storage_of(x) in engine.slots.storages:
                self.written = written_data(engine.inside, [engine.slots.path_of(x)])

    def _note(self, leaf: Tensor, path: str) -> None:
        unit = self.engine.inside
        if unit and path in self.engine.units.reads[unit].paths:
            return
        if not unit or any(leaf is x for x in self.engine.passed):  # code outside of the unit passed it on
            if self.engine.plan.leaves[path].products is not None:
                raise read_otherwise(path, "by code outside of units")
            self.executor.touch(self.places[path][0].id)
            return
        raise UnitError(
            f"unit {unit} reads the parameter {path}, which it was not given: what it needs must come in through "
            f"its arguments, or the parameter's memory may hold something else by then"
        )


def trace(fn: Callable[..., Any], plan: Plan, batch: Any, train: bool, remat: Remat = NO_REMAT) -> ProgramTrace | None:
    """The program of a function on a batch, or None if it depends on tensor values.

    Args:
        fn: ``fn(params, batch)``.
        plan: the plan.
        batch: this rank's batch, or one microbatch of it.
        train: whether ``fn`` returns a loss, of which the backward is traced too.
        remat: which units are computed again in their backward. It changes what activations take, and no call.

    Raises:
        LossError, UnitError: the function breaks a rule, or whatever it raises itself.
    """
    found = trace_in(ProgramMode(), fn, plan, batch, train, remat)
    return None if found is None else found[0]


class Watched(NamedTuple):
    """A look at the calls of a traced program.

    Attributes:
        engine: makes the engine that runs it.
        watch: makes the context in which it runs; the last of all modes.
    """

    engine: type[Engine] = Engine
    watch: Callable[[Engine], AbstractContextManager[object]] = nullcontext


def trace_in(
    mode: ProgramMode,
    fn: Callable[..., Any],
    plan: Plan,
    batch: Any,
    train: bool,
    remat: Remat = NO_REMAT,
    watched: Watched = Watched(),  # noqa: B008 - a frozen value
) -> tuple[ProgramTrace, Any] | None:
    """The program of a function, and what it returned, on a batch whose tensors may be fake ones of this mode already.

    Arguments and errors are those of ``trace``; ``watched`` sees the calls.
    """
    plan = traceable(plan)
    try:
        found = _traced_in(mode, fn, plan, batch, train, remat, watched)
    except RematError:  # of a unit that the eager engine cannot compute again; a graph of it may
        found = _traced_in(mode, fn, plan, batch, train, NO_REMAT, watched)
        return None if found is None else (replace(found[0], remat=remat), found[1])
    hosted = remat.hosted(found[0].program) if found is not None and train else {}
    if found is None or not hosted:
        return found
    if taken := sorted(found[0].inner.intersection(hosted)):
        raise differentiated(taken)
    # Where activations move to depends on all calls: a second run follows them.
    program = replace(found[0].program, hosted=hosted)
    if not called(program):
        raise nothing_leaves(len(program.backward), min(hosted.values()))
    return _traced_in(mode, fn, plan, batch, train, remat, watched, program)


def traceable(plan: Plan) -> Plan:
    """A plan for a device that this process has, with the same leaves and groups.

    Where a run on GPUs is planned on a machine without any, its program is found on tensors of the host: autograd ends
    the process on fake ones of a device that torch was not built for.
    """
    return plan if plan.mesh.device_here else on_device(plan, "cpu")


def on_device(plan: Plan, device: str) -> Plan:
    """The same leaves and groups, for planning, on a device that need not be here."""
    mesh = plan.mesh
    return replace(plan, mesh=Mesh(mesh.sizes, mesh.axis_names, mesh.rank, torch.device(device)))


def _traced_in(
    mode: ProgramMode,
    fn: Callable[..., Any],
    plan: Plan,
    batch: Any,
    train: bool,
    remat: Remat,
    watched: Watched,
    hosted: Program | None = None,
) -> tuple[ProgramTrace, Any] | None:
    moved: set[str] = set()
    watching: list[Activations] = []
    engine = watched.engine(plan, functools.partial(_note_moved, plan, moved, watching), remat)
    own: dict[Axes, None] = {}
    objects = [held(x) for x in opaque(batch)]
    try:
        with mode:
            fake_leaves(engine, plan)
        fake = faked(batch, functools.partial(as_fake, mode))
        activations = Activations(
            [x for x in (*tree.leaves(fake), *_read(engine)) if isinstance(x, Tensor)],
            lambda: bool(engine.inside),
        )
        watching.append(activations)
        copies = TracedCopies(activations)
        seen = Tracing(activations.turn, _moves(engine, hosted, copies))
        engine.start(seen)
        inside = without_data(batch, mode, activations, plan.mesh, own)
        with inside, GlueWatch(engine, seen, train), torch.set_grad_enabled(train):
            with watched.watch(engine):
                result = engine.run(fn, fake, train)
            activations.begin_backward()
            weighted, foreign = _backward(engine, result) if train else (False, False)
    except Exception as error:
        if not needs_values(error):
            raise
        return None
    finally:
        engine.stop()
        check_kept(batch, objects)
    groups = {name: list(reads.groups) for name, reads in engine.units.reads.items()}
    for _ in range(2 - train):
        activations.turn()  # the second stands for a backward of the code between units
    idle = _unmoved(plan, moved) if train else ()
    inner, program = frozenset(engine.inner), program_of(seen, groups)
    needs = copies.told(program, activations.needs) if hosted is not None else tuple(activations.needs)
    program = program if hosted is None else replace(program, hosted=hosted.hosted)
    exact, again, scaled = engine.exact, activations.again, tuple(seen.scaled)
    return ProgramTrace(program, weighted, foreign, inner, needs, tuple(own), idle, exact, again, remat, scaled), result


def _moves(engine: Engine, program: Program | None, copies: TracedCopies) -> TracedMoves | None:
    """Return what moves activations in a run of a program whose calls are known; None without one."""
    if program is None:
        return None
    engine.units.activations = moves = HostedActivations(engine.slots, called(program), copies)
    return TracedMoves(program, moves)


def as_fake(mode: ProgramMode, x: Tensor) -> Tensor:
    """A tensor of a batch as a fake one of a mode."""
    try:
        x = x if x.is_leaf else x.detach().requires_grad_()  # whose gradient nobody asks for, which torch would say
        return x if isinstance(x, FakeTensor) else mode.from_tensor(x)
    except AssertionError as error:  # of a kind that has no fake form here, such as a jagged one
        raise UnsupportedFakeTensorException(f"{x.layout}: {error}") from error


@contextmanager
def without_data(
    batch: Any, mode: ProgramMode, activations: Activations, mesh: Mesh, axes: dict[Axes, None]
) -> Iterator[None]:
    """Inside, run a program on fake tensors of this mode.

    What activations take is written down, and the axes of the mesh over which the program communicates.
    """
    with explaining(batch), quiet(), mode, activations, mode.noting(mesh, axes):
        yield


def _read(engine: Engine) -> Iterator[Tensor]:
    """The tensors that units read of an engine's leaves."""
    for leaf in engine.slots.by_path.values():
        yield from (leaf, *(rows_of(leaf) or ()))


def fake_leaves(engine: Engine, plan: Plan) -> None:
    """Put fake leaves of the current mode in the place of an engine's."""
    for slots in engine.slots.groups:
        for number, leaf in enumerate(slots.group.leaves):
            fake = torch.empty(leaf.compute_shape, dtype=slots.group.compute_dtype, device=plan.mesh.device)
            engine.slots.replace(slots, number, fake.requires_grad_(slots.leaves[number].requires_grad))
            if slots.group.row:
                attach_rows(fake, rounded_rows(fake.detach()))


def _backward(engine: Engine, result: Any) -> tuple[bool, bool]:
    loss = read_loss(result)
    check_differentiable(loss)
    known = {id(leaf) for leaf in engine.slots.by_path.values()}
    below = _leaves_below(loss.total)
    foreign = [leaf for leaf in below if id(leaf) not in known]
    if below and len(foreign) == len(below):
        raise foreign_loss()
    tell_untrained([leaf for leaf in foreign if isinstance(leaf, nn.Parameter) or not isinstance(leaf, FakeTensor)])
    with torch.autograd.set_multithreading_enabled(False):  # as in a step: units find their context again
        engine.differentiate(loss.total, torch.ones_like(loss.total))
    return loss.count is not None, bool(foreign)


def _leaves_below(total: Tensor) -> list[Tensor]:
    """The leaves of autograd's graph that a tensor depends on."""
    found, seen, stack = [], set(), [total.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        stack.extend(below for below, _ in node.next_functions)
    return found


def _unmoved(plan: Plan, moved: set[str]) -> tuple[str, ...]:
    """The trained leaves that got no gradient."""
    return tuple(path for path, leaf in plan.leaves.items() if leaf.trainable and path not in moved)


def _note_moved(
    plan: Plan,
    moved: set[str],
    watching: Sequence[Activations],
    group: int,
    numbers: list[int],
    grads: list[Tensor | None],
) -> None:
    """Fake gradients go nowhere; whose they are is noted."""
    for activations in watching:
        activations.gradients(grads)
    leaves = plan.groups[group].leaves
    moved.update(leaves[n].path for n, grad in zip(numbers, grads, strict=True) if grad is not None)
