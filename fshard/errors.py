"""Every error that fshard raises: the classes a caller can catch, and one message builder per failure.

A message names the path or argument, gives the numbers, and ends with the remedy. Builders return the exception, so
that the caller writes ``raise errors.unknown_axis(...)`` and the traceback starts where the failure is. Problems of
one kind are reported together: builders take all of them and list each on a line of its own.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


class ShardError(Exception):
    """Base of every error that fshard raises on purpose."""


class PlanError(ShardError, ValueError):
    """An invalid argument, mesh, spec, rule or plan."""


class TreeError(ShardError, ValueError):
    """A tree whose paths, shapes or dtypes differ from those of the plan."""


class BatchError(ShardError, ValueError):
    """A batch that the step cannot use."""


class LossError(ShardError, TypeError):
    """A loss function returned something that has no gradient."""


class UnitError(ShardError, RuntimeError):
    """A unit that is not a pure function of its parameters and arguments."""


class ScheduleError(ShardError, RuntimeError):
    """A schedule breaks its rules, or a rank left it."""


class CommError(ShardError, RuntimeError):
    """A collective that failed or timed out. The process group cannot be used any more."""


class PeerError(ShardError, RuntimeError):
    """Another rank failed, so this rank gave up the same step. The state is as it was before the step."""


class DonatedError(ShardError, RuntimeError):
    """A state, or a tensor of it, was used after it was donated to a step, which reused its memory."""


class StateError(ShardError, RuntimeError):
    """A state whose last update failed half-way, or that lacks what other ranks have updated; see ``fs.settle``."""


class AxisError(ShardError, NameError):
    """The mesh has no such axis, or no mesh is in scope."""


class CollectiveError(ShardError, ValueError):
    """Arguments that a collective cannot use, or that differ between ranks."""


class ReplicationError(ShardError, ValueError):
    """Values differ between ranks where they must be equal."""


class TransformError(ShardError, RuntimeError):
    """A collective or a step was called under a transform that it does not support."""


class NonFiniteError(ShardError, ArithmeticError):
    """The gradient norm is infinite or nan. The state is as it was before the step."""


class RematError(ShardError, RuntimeError):
    """A function cannot be recomputed: it would return other values, or lose a gradient."""


class CheckpointError(ShardError, RuntimeError):
    """A checkpoint cannot be written or read. The files on disk are as they were before the call."""


class DamagedError(CheckpointError):
    """A checkpoint is malformed, or its bytes differ from those that were written."""


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped."""


class LaunchError(ShardError, RuntimeError):
    """A rank of ``fs.launch`` died, or failed in a way that cannot be raised in the process that launched it."""


class KeyReuseError(ShardError, RuntimeError):
    """The same random numbers were drawn twice from one key, inside of ``fs.random.checked()``."""


MOST = 100
"""The number of problems that one message lists."""


def lines(head: str, problems: Iterable[str], remedy: str) -> str:
    """A message of one head line, one indented line per problem, and the remedy, which must not scroll away."""
    rows = [f"\n  {problem}" for problem in problems]
    more = f"\n  ... and {len(rows) - MOST} more" if len(rows) > MOST else ""
    return f"{head}{''.join(rows[:MOST])}{more}\n{remedy}"


def bad_arguments(name: str, problems: Iterable[str]) -> PlanError:
    """Arguments out of range. Each problem names an argument of the function ``name``, its value and its range."""
    return PlanError(lines(f"{name}(...): invalid arguments:", problems, "Give arguments within these bounds."))


def bad_rate(lr: object, step: int, value: object) -> PlanError:
    """An invalid learning rate or update number."""
    if step < 1:
        return PlanError(f"step = {step}: updates count from 1. Pass the number of the update that is being made.")
    return PlanError(
        f"the learning rate of update {step} is {value!r}, from {lr!r}: give a finite Python number >= 0. "
        f"A schedule is called with the number of updates made before, an int; here {step - 1}."
    )


def not_elementwise(name: str, reason: str) -> PlanError:
    """A class of ``torch.optim`` that cannot run on pieces of leaves."""
    return PlanError(
        f"fs.optim.from_torch({name}): its rule is not elementwise, so it cannot run on flat shards: {reason}. Use "
        f'fs.optim.muon or fs.optim.adafactor on leaves with fs.Rule(..., align="leaf"), or an elementwise class'
    )


def wrong_leaves(what: str, problems: Iterable[str], remedy: str = "") -> TreeError:
    """A tree whose leaves are not the model's: each problem is ``path: what is wrong with it``."""
    remedy = remedy or "Pass a tree with the model's paths and shapes."
    return TreeError(lines(f"{what}: the tree does not fit the model:", problems, remedy))


def buffers_changed(paths: Iterable[str]) -> UnitError:
    """A call changed buffers that it was not asked to return."""
    return UnitError(
        lines(
            "the call changed buffers in place, but a pure function must return them:",
            paths,
            "Call apply(params, ..., buffers=buffers), which returns (output, new_buffers), or apply(..., "
            "training=False).",
        )
    )


def unmade_buffers(paths: Iterable[str]) -> UnitError:
    """A call would read buffers that have no values."""
    head = "the module has buffers on the meta device, which hold no values:"
    remedy = "Make the module under fs.empty_weights(), which keeps buffers real, or call apply(..., buffers=)."
    return UnitError(lines(head, paths, remedy))


def bad_unit_pattern(pattern: object) -> PlanError:
    """An item of ``units=`` is neither a path pattern nor a module class."""
    kind = type(pattern).__name__
    return PlanError(f"units: {pattern!r} is of type {kind}; give globs ('blocks.*') or subclasses of nn.Module")


def not_a_module(given: object) -> PlanError:
    """``fs.split`` was called with something other than a module."""
    hint = f": make one, {given.__name__}(...)" if isinstance(given, type) else ""
    what = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
    return PlanError(
        f"fs.split takes an nn.Module, and got {what}{hint}; pass a tree of tensors directly to fs.make_plan"
    )


def no_such_unit(patterns: Iterable[object], modules: Iterable[tuple[str, str]], hint: str = "") -> PlanError:
    """Patterns in ``units=`` that match no submodule; ``modules`` are the (path, class name) pairs that exist."""
    missing = ", ".join(pattern.__name__ if isinstance(pattern, type) else repr(pattern) for pattern in patterns)
    remedy = "Give a path or a class from this list. The whole module cannot be a unit of itself."
    return PlanError(lines(f"units: {missing} matches no submodule{hint}. The module has:", _exist(modules), remedy))


def no_blocks(modules: Iterable[tuple[str, str]]) -> PlanError:
    """``units="auto"`` for a module without repeated blocks."""
    head = "units='auto' finds no unit: it takes children of nn.ModuleLists and nn.Sequentials. The module has:"
    remedy = "Name the units, units=(path or class, ...), or leave units= out to gather all parameters together."
    return PlanError(lines(head, _exist(modules), remedy))


def _exist(modules: Iterable[tuple[str, str]]) -> list[str]:
    parts = ((path.split("."), kind) for path, kind in modules)
    counts = Counter(f"{'.'.join('*' if part.isdigit() else part for part in path)}: {kind}" for path, kind in parts)
    exist = [f"{line} ({count} times)" if count > 1 else line for line, count in counts.items()]
    return exist or ["no submodules"]


def nested_units(pairs: Iterable[tuple[str, str]]) -> PlanError:
    """Units that contain other units: (outer path, inner path) pairs."""
    rows = (f"{outer} contains {inner}" for outer, inner in pairs)
    return PlanError(lines("units cannot contain each other:", rows, "Choose the outer or the inner ones."))


def uncallable_unit(kinds: Mapping[str, str]) -> PlanError:
    """Units without a forward, such as module lists: class name by path."""
    problems = (f"{path}: {kind}; its children are {path}.*" for path, kind in kinds.items())
    return PlanError(lines("units must be callable, and these have no forward:", problems, "Choose their children."))


def cannot_copy(problems: Iterable[str]) -> UnitError:
    """A module whose structure cannot be copied."""
    return UnitError(
        lines(
            "the module cannot be split, because its structure cannot be copied:",
            problems,
            "Remove these attributes, give their class a __deepcopy__, or write the model as functions with fs.unit.",
        )
    )


def bad_policy(problems: Iterable[str]) -> PlanError:
    """A policy with values of the wrong type or out of range."""
    return PlanError(lines("invalid policy:", problems, "Give values of the types and ranges in its docstring."))


def bad_costs(problems: Iterable[str]) -> PlanError:
    """Costs with values out of range, or of unknown ops."""
    return PlanError(lines("invalid costs:", problems, "Give seconds, and bytes a second, of the ops that are there."))


def memory_too_small(budget: int, least: str, policy: str, items: Sequence[str]) -> PlanError:
    """A limit on memory that every schedule exceeds."""
    most = " Most of it is:" if items else ""
    head = f"memory={budget} bytes is too small for every schedule: the smallest takes {least}, with {policy}.{most}"
    return PlanError(lines(head, items, "Allow that much, use smaller units, more ranks or a smaller batch."))


def unknown_rates(missing: Sequence[str]) -> PlanError:
    """A choice of schedule before its inputs were given or measured."""
    given = ", ".join(f"{name}=..." for name in missing)
    return PlanError(
        f"schedule='auto' needs {' and '.join(missing)}, which the first step measures, and no step was made: make a "
        f"step first, or give the numbers: schedule=fs.Auto({given})"
    )


def no_unit_to_keep(patterns: Mapping[str, str], units: Sequence[str]) -> PlanError:
    """Globs of ``fs.keep`` that match no unit of the program, each with a hint."""
    some = ", ".join(units[:8]) + (", ..." if len(units) > 8 else "") or "none at all"
    rows = [f"{pattern!r} matches none{hint}" for pattern, hint in patterns.items()]
    return PlanError(
        lines(f"fs.keep names units that this program never calls; it calls {some}:", rows, "Remove them.")
    )


def bad_program(problems: Iterable[str]) -> PlanError:
    """A program, groups or a number of microbatches that no schedule can be built from."""
    remedy = "Name each call once, in order, and name groups by their position among the groups."
    return PlanError(lines("no schedule can be built from this program:", problems, remedy))


def broken_lifetime(item: str, at: int, op: str, problem: str) -> ScheduleError:
    """An op begins or ends the lifetime of an arena item out of order."""
    remedy = "call fshard.schedule.check, which shows the rule that the ops break"
    return ScheduleError(f"{item} at op {at}, '{op}': {problem}; {remedy}")


def broken_schedule(problem: str, excerpt: Iterable[str]) -> ScheduleError:
    """An op that breaks a rule, among its neighbours."""
    remedy = "Build the schedule again from its program, or undo the changes to its text."
    return ScheduleError(lines(f"this schedule cannot run: {problem}", excerpt, remedy))


def unreadable_schedule(number: int, line: str, problem: str) -> ScheduleError:
    """A malformed line of a schedule's text."""
    head = f"line {number} of the schedule's text, {line!r}: {problem}"
    return ScheduleError(f"{head}; give parse the text of str(schedule)")


def missing_extra(what: str, library: str, extra: str) -> ImportError:
    """An optional library that is not installed."""
    return ImportError(f'{what} needs {library}, which is not installed: pip install "fshard[{extra}]"')


def no_processes() -> PlanError:
    """A collective call on an abstract mesh."""
    return PlanError(
        "an abstract mesh has no processes to run on: make the plan on fs.make_mesh(...). A virtual mesh is abstract "
        "outside of mesh.run(fn): make a forward and its backward in one fn"
    )


def weighted_in_backward() -> LossError:
    """A loss that is an ``fs.Mean``, with updates before its global count is known."""
    return LossError(
        "the loss is an fs.Mean, but update='in_backward' updates before the count over all ranks and microbatches is "
        "known: use update='deferred', or return a plain mean"
    )


def written_outside(paths: Sequence[str]) -> UnitError:
    """Code between units wrote to parameters in place."""
    remedy = "Only the optimizer changes parameters: compute new values instead, or return them as aux."
    return UnitError(lines("the program wrote in place to parameters:", paths, remedy))


def foreign_params() -> UnitError:
    """A program uses parameters that belong to another step."""
    return UnitError(
        "the program reads parameters of another step: use params only inside the loss function that receives them"
    )


def different_microbatches() -> LossError:
    """The loss function returned different types for microbatches of one step."""
    return LossError(
        "the loss function returned different types for two microbatches of one step: return an fs.Mean for all or for "
        "none of them, and auxiliary values with the same keys"
    )


def unlike_losses(kinds: Sequence[tuple[bool, int, int]]) -> LossError:
    """The function returned different types on different ranks."""
    rows = [
        f"rank {rank}: {'an fs.Mean' if weighted else 'a tensor'} as the loss, and {means} other numbers to average"
        f"{f', whose names hash to {names:08x}' if means else ''}"
        for rank, (weighted, means, names) in enumerate(kinds)
    ]
    remedy = "Return the same types and names on every rank. Nothing was updated, and the state can be used again."
    return LossError(lines("the function returned different types on different ranks:", rows, remedy))


def unlike_skips(said: Sequence[int]) -> LossError:
    """``skip=`` returned different decisions on different ranks."""
    rows = [f"rank {rank}: {'skip' if skip else 'make'} the step" for rank, skip in enumerate(said)]
    remedy = "Decide by metrics.loss, metrics.grad_norm or an fs.Mean in aux, which are equal on all ranks."
    return LossError(lines("skip= returned different decisions for one step:", rows, remedy))


def unknown_axis(axis: object, names: Sequence[str]) -> AxisError:
    """A value that is not the name of an axis of this mesh."""
    have = ", ".join(map(repr, names))
    if not isinstance(axis, str):
        return AxisError(
            f"axis={axis!r} is not the name of a mesh axis: give one of {have}, or a tuple of them. To reduce over a "
            f"dim of the tensor or the batch of torch.vmap, use an ordinary reduction, such as x.sum(0) after the vmap"
        )
    return AxisError(f"axis {axis!r} is not in the mesh: give one of {have}; dims of torch.vmap have no names")


def unbound_axis(axis: object) -> AxisError:
    """An axis name was used where no mesh is in scope."""
    return AxisError(
        f"no mesh is in scope that defines axis {axis!r}: call this inside of a function that fs.shard_map "
        f"or a train step runs, or under fs.collectives.use_mesh(mesh), or pass mesh="
    )


def wrapped(what: str) -> TransformError:
    """A tensor wrapped by a transform was given to a function of plain data."""
    return TransformError(
        f"{what} takes plain data, and was given a tensor that a transform of torch.func wraps: call the "
        f"differentiable form, without _start, or call it outside of the transform"
    )


def untraceable(what: str) -> TransformError:
    """A collective was traced into a graph, where its result would become a constant."""
    return TransformError(
        f"{what} cannot be traced into a graph, where its result would become a constant (torch.func.linearize, "
        f"make_fx and torch.jit.trace do this): use torch.func.jvp or vjp instead of linearize"
    )


def no_derivative() -> TransformError:
    """A derivative of ``pmax`` was requested."""
    return TransformError(
        "pmax has no derivative: use pmax(x.detach(), axis) where it is a constant, as in a softmax, or take the "
        "maximum of all_gather(x, axis), which has one"
    )


def step_transformed(what: str) -> TransformError:
    """A step was called inside of a transform."""
    return TransformError(
        f"{what} was called inside of a transform of torch.func, which cannot follow it, because it reuses the memory "
        f"of its state. Transform fs.func.sharded_loss(loss_fn, plan) or fs.value_and_grad(loss_fn, plan) "
        f"instead, and update with fs.func.differentiable(opt, plan)"
    )


def half_updated(cause: str) -> StateError:
    """An optimizer failed after it had written to parameters or to its state."""
    return StateError(
        f"the optimizer failed in the middle of an update, so this state is half updated on this rank and cannot "
        f"be used ({cause}): restore the last checkpoint, and let the update rule compute before it writes"
    )


def __dir__() -> list[str]:
    return sorted(name for name, value in globals().items() if isinstance(value, type) and value.__module__ == __name__)
