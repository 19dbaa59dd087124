"""Every error that fshard raises: the classes a caller can catch, and one message builder per failure.

A message names the path or argument, gives the numbers, and ends with the remedy. Builders return the exception, so
that the caller writes ``raise errors.unknown_axis(...)`` and the traceback starts where the failure is. Problems of
one kind are reported together: builders take all of them and list each on a line of its own.
"""

from collections.abc import Iterable, Mapping, Sequence


class ShardError(Exception):
    """Base of every error that fshard raises on purpose."""


class PlanError(ShardError, ValueError):
    """A mesh, a spec, a rule or a plan that cannot be."""


class TreeError(ShardError, ValueError):
    """A tree whose paths, shapes or dtypes are not the ones the plan has."""


class BatchError(ShardError, ValueError):
    """A batch that the step cannot take."""


class LossError(ShardError, TypeError):
    """A loss function that returns something no gradient can start from."""


class UnitError(ShardError, RuntimeError):
    """A unit that is not a pure function of its parameters and arguments."""


class ScheduleError(ShardError, RuntimeError):
    """A schedule that breaks its own rules, or that a rank left."""


class CommError(ShardError, RuntimeError):
    """A collective that failed or timed out. The process group cannot be used any more."""


class PeerError(ShardError, RuntimeError):
    """Another rank failed, so this rank gave up the same step. The state is as it was before the step."""


class DonatedError(ShardError, RuntimeError):
    """A state, or a tensor of it, that was given to a step and no longer exists."""


class StateError(ShardError, RuntimeError):
    """A state whose last update failed half-way, or that lacks what other ranks have updated: see ``fs.settle``."""


class AxisError(ShardError, NameError):
    """An axis that the mesh does not have, or that no mesh in scope has."""


class CollectiveError(ShardError, ValueError):
    """Arguments that a collective cannot take, or that ranks do not agree on."""


class ReplicationError(ShardError, ValueError):
    """Values that differ between ranks where they were said to be equal."""


class TransformError(ShardError, RuntimeError):
    """A transform that a collective has no right answer under."""


class NonFiniteError(ShardError, ArithmeticError):
    """The gradient norm is infinite or nan. The state is as it was before the step."""


class RematError(ShardError, RuntimeError):
    """A function that cannot be computed again: it would give something else, or lose a gradient."""


class CheckpointError(ShardError, RuntimeError):
    """A checkpoint that cannot be written or read. The files on disk are as they were before the call."""


class DamagedError(CheckpointError):
    """A checkpoint whose bytes differ from those that were written, or that is malformed."""


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped."""


class KeyReuseError(ShardError, RuntimeError):
    """The same random numbers were drawn twice from one key, inside of ``fs.random.checked()``."""


MOST = 100
"""Problems that one message lists."""


def lines(head: str, problems: Iterable[str], remedy: str) -> str:
    """A message of one head line, one indented line per problem, and the remedy, which must not scroll away."""
    rows = [f"\n  {problem}" for problem in problems]
    more = f"\n  ... and {len(rows) - MOST} more" if len(rows) > MOST else ""
    return f"{head}{''.join(rows[:MOST])}{more}\n{remedy}"


def bad_arguments(name: str, problems: Iterable[str]) -> PlanError:
    """Arguments out of range: ``name`` is what was called, each problem names an argument, its value and its range."""
    return PlanError(lines(f"{name}(...) cannot be built:", problems, "Give arguments inside these bounds."))


def bad_rate(lr: object, step: int, value: object) -> PlanError:
    """A learning rate that no update can use, or an update number that does not exist."""
    if step < 1:
        return PlanError(f"step = {step}: updates count from 1. Pass the number of the update that is being made.")
    return PlanError(
        f"the learning rate of update {step} is {value!r}, from {lr!r}: it must be a finite Python number >= 0. "
        f"Schedules are called with the step, an int that is 0 for the first update; here {step - 1}."
    )


def not_elementwise(name: str, reason: str) -> PlanError:
    """A class of ``torch.optim`` that cannot run on pieces of leaves."""
    return PlanError(
        f"fs.optim.from_torch({name}): its rule is not elementwise, so it has no meaning on flat shards: {reason}. Use "
        f'fs.optim.muon or fs.optim.adafactor on leaves with fs.Rule(..., align="leaf"), or an elementwise class'
    )


def wrong_leaves(what: str, problems: Iterable[str], remedy: str = "") -> TreeError:
    """A tree whose leaves are not the model's: each problem is ``path: what is wrong with it``."""
    remedy = remedy or "Pass a tree with the model's paths and shapes."
    return TreeError(lines(f"{what}: the tree does not fit the model:", problems, remedy))


def buffers_changed(paths: Iterable[str]) -> UnitError:
    """Buffers that a call changed although it was not asked to return them."""
    return UnitError(
        lines(
            "the call changed buffers, which a pure function must return and not write:",
            paths,
            "Call apply(params, ..., buffers=buffers), which returns (output, new_buffers), or split the module in "
            "eval mode.",
        )
    )


def unmade_buffers(paths: Iterable[str]) -> UnitError:
    """A call that would read buffers without values."""
    head = "the module's buffers are on the meta device, and hold no values:"
    remedy = "Make the module under fs.empty_weights(), which keeps buffers real, or call apply(..., buffers=)."
    return UnitError(lines(head, paths, remedy))


def bad_unit_pattern(pattern: object) -> PlanError:
    """Something in ``units=`` that is neither a path pattern nor a module class."""
    kind = type(pattern).__name__
    return PlanError(f"units: {pattern!r} is of type {kind}; give globs ('blocks.*') or subclasses of nn.Module")


def not_a_module(given: object) -> PlanError:
    """What ``fs.split`` got is no module."""
    hint = f": make one, {given.__name__}(...)" if isinstance(given, type) else ""
    what = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
    return PlanError(
        f"fs.split takes an nn.Module, and got {what}{hint}; fs.make_plan takes a tree of tensors as it is"
    )


def no_such_unit(patterns: Iterable[object], modules: Iterable[tuple[str, str]], hint: str = "") -> PlanError:
    """Patterns in ``units=`` that match no submodule; ``modules`` are the (path, class name) pairs that exist."""
    missing = ", ".join(pattern.__name__ if isinstance(pattern, type) else repr(pattern) for pattern in patterns)
    remedy = "Give a path or a class from this list. The whole module cannot be a unit of itself."
    return PlanError(lines(f"units: {missing} matches no submodule{hint}. What exists:", _exist(modules), remedy))


def no_blocks(modules: Iterable[tuple[str, str]]) -> PlanError:
    """``units="auto"`` for a module without repeated blocks."""
    head = "units='auto' takes what nn.ModuleLists and nn.Sequentials hold, and this module has none. What it has:"
    remedy = "Name the units, units=(path or class, ...), or give none: then all parameters stay gathered together."
    return PlanError(lines(head, _exist(modules), remedy))


def _exist(modules: Iterable[tuple[str, str]]) -> list[str]:
    counts: dict[str, int] = {}
    for path, kind in modules:
        alike = ".".join("*" if part.isdigit() else part for part in path.split("."))
        counts[f"{alike}: {kind}"] = counts.get(f"{alike}: {kind}", 0) + 1
    exist = [f"{line} ({count} times)" if count > 1 else line for line, count in counts.items()]
    return exist or ["nothing: the module has no submodules"]


def nested_units(pairs: Iterable[tuple[str, str]]) -> PlanError:
    """Units that contain other units: (outer path, inner path) pairs."""
    rows = (f"{outer} contains {inner}" for outer, inner in pairs)
    return PlanError(lines("units cannot lie inside of each other:", rows, "Choose the outer or the inner ones."))


def uncallable_unit(kinds: Mapping[str, str]) -> PlanError:
    """Units without a forward, such as module lists: class name by path."""
    problems = (f"{path}: {kind}; its children are {path}.*" for path, kind in kinds.items())
    return PlanError(lines("units must be callable, but these have no forward:", problems, "Choose their children."))


def cannot_copy(problems: Iterable[str]) -> UnitError:
    """A module whose structure cannot be copied."""
    return UnitError(
        lines(
            "the module cannot be split, since its structure cannot be copied:",
            problems,
            "Remove these attributes, give their class a __deepcopy__, or write the model as functions with fs.unit.",
        )
    )


def bad_policy(problems: Iterable[str]) -> PlanError:
    """A policy with values of the wrong type or out of range."""
    remedy = "pass values of the types and ranges that its docstring names"
    return PlanError(lines("this policy cannot be:", problems, remedy))


def bad_costs(problems: Iterable[str]) -> PlanError:
    """Costs that no op can have."""
    return PlanError(lines("these costs cannot be:", problems, "give seconds and bytes a second of ops that exist"))


def memory_too_small(budget: int, least: str, policy: str, items: Sequence[str]) -> PlanError:
    """A limit on memory that no schedule keeps."""
    most = " Most of it is:" if items else ""
    head = f"memory={budget} bytes are too few for any schedule: the least is {least}, with {policy}.{most}"
    return PlanError(lines(head, items, "Allow that much, use smaller units, more ranks or a smaller batch."))


def unknown_rates(missing: Sequence[str]) -> PlanError:
    """A choice of schedule without numbers, where none can be measured."""
    given = ", ".join(f"{name}=..." for name in missing)
    return PlanError(
        f"schedule='auto' measures {' and '.join(missing)} at the first step, and there was none: make a step "
        f"first, or give the numbers: schedule=fs.Auto({given})"
    )


def no_unit_to_keep(patterns: Iterable[str], units: Sequence[str]) -> PlanError:
    """Patterns of ``fs.keep`` that no unit of the program has a name for."""
    some = ", ".join(units[:8]) + (", ..." if len(units) > 8 else "") or "none at all"
    rows = [f"{pattern!r} matches none" for pattern in patterns]
    return PlanError(lines(f"fs.keep names units that this program never calls; it calls {some}:", rows, "drop them"))


def bad_program(problems: Iterable[str]) -> PlanError:
    """A program, its groups and the number of microbatches that no schedule can be built from."""
    remedy = "a program names each call once, in order, and reads groups by their position among the groups"
    return PlanError(lines("no schedule can be built from this program:", problems, remedy))


def broken_lifetime(item: str, at: int, op: str, problem: str) -> ScheduleError:
    """Ops that begin or end a lifetime of an arena item out of turn."""
    remedy = "fshard.schedule.check shows which rule the ops break"
    return ScheduleError(f"{item} at op {at}, '{op}': {problem}; {remedy}")


def broken_schedule(problem: str, excerpt: Iterable[str]) -> ScheduleError:
    """An op that breaks a rule, among its neighbours."""
    remedy = "build the schedule anew from its program, or undo what was changed in its text"
    return ScheduleError(lines(f"this schedule cannot run: {problem}", excerpt, remedy))


def unreadable_schedule(number: int, line: str, problem: str) -> ScheduleError:
    """A line that is no part of a schedule's text form."""
    head = f"line {number} of the schedule's text, {line!r}: {problem}"
    return ScheduleError(f"{head}; parse takes what str(schedule) gives")


def missing_extra(what: str, library: str, extra: str) -> ImportError:
    """An optional library that is not installed."""
    return ImportError(f'{what} needs {library}, which is not installed: pip install "fshard[{extra}]"')


def no_processes() -> PlanError:
    """Something collective on an abstract mesh."""
    return PlanError(
        "an abstract mesh has no processes to run on: make the plan on fs.make_mesh(...). A virtual mesh is abstract "
        "outside of mesh.run(fn), which takes a forward together with its backward"
    )


def left_in_backward() -> ScheduleError:
    """A program that left its schedule when a part of its own step's updates was made."""
    return ScheduleError(
        "the program left its schedule during a step with update='in_backward', after parameters were updated, so the "
        "step cannot be run again: restore the state from a checkpoint, and use update='deferred' for programs whose "
        "units change from step to step"
    )


def weighted_in_backward() -> LossError:
    """An fs.Mean where updates cannot wait for its global count."""
    return LossError(
        "the loss is an fs.Mean, whose gradient must be divided by the count over all ranks and microbatches, which "
        "update='in_backward' does not wait for: use update='deferred', or return a plain mean"
    )


def written_outside(paths: Sequence[str]) -> UnitError:
    """Code between units that writes to parameters in place."""
    remedy = "Parameters change by the optimizer alone: compute new values instead, or return them as aux."
    return UnitError(lines("the program wrote in place to parameters:", paths, remedy))


def foreign_params() -> UnitError:
    """Parameters that some other step handed out."""
    return UnitError(
        "the program reads parameters of another step: use params only inside the loss function that they were given to"
    )


def different_microbatches() -> LossError:
    """Microbatches of one step that return different kinds of things."""
    return LossError(
        "the loss function returned different things for two microbatches of a step: it must return fs.Mean for all or "
        "for none of them, and auxiliary values with the same keys"
    )


def unlike_losses(kinds: Sequence[tuple[bool, int, int]]) -> LossError:
    """Ranks whose functions return different kinds of things."""
    rows = [
        f"rank {rank}: {'an fs.Mean' if weighted else 'no fs.Mean'} for a loss, and {means} other numbers to average"
        f"{f', whose names hash to {names:08x}' if means else ''}"
        for rank, (weighted, means, names) in enumerate(kinds)
    ]
    remedy = "Return the same, by the same names, on every rank; nothing was updated and the state can be used again."
    return LossError(lines("the function returned different things on different ranks:", rows, remedy))


def unlike_skips(said: Sequence[int]) -> LossError:
    """Ranks whose ``skip=`` disagrees."""
    rows = [f"rank {rank}: {'skip' if skip else 'make'} the step" for rank, skip in enumerate(said)]
    remedy = "Decide by metrics.loss, metrics.grad_norm or an fs.Mean in aux, which are equal on all ranks."
    return LossError(lines("skip= says different things of one step:", rows, remedy))


def unknown_axis(axis: object, names: Sequence[str]) -> AxisError:
    """Something that is not the name of an axis of this mesh."""
    have = ", ".join(map(repr, names))
    if not isinstance(axis, str):
        return AxisError(
            f"axis={axis!r} is no name of a mesh axis; give one of {have}, or a tuple of them. To reduce over a dim of "
            f"the tensor, or over the batch of torch.vmap, use an ordinary reduction, such as x.sum(0) after the vmap"
        )
    return AxisError(f"axis {axis!r} is not in the mesh, whose axes are {have}; vmap's dims have no names")


def unbound_axis(axis: object) -> AxisError:
    """An axis where no mesh is in scope."""
    return AxisError(
        f"no mesh is in scope, so axis {axis!r} means nothing here: call this inside of a function that fs.shard_map "
        f"or a train step runs, or under fs.collectives.use_mesh(mesh), or pass mesh="
    )


def wrapped(what: str) -> TransformError:
    """A tensor of a transform that got to where only data may come."""
    return TransformError(
        f"{what} was given a tensor that a transform of torch.func holds, where only its data makes sense: call the "
        f"differentiable form, without _start, or call it outside of the transform"
    )


def untraceable(what: str) -> TransformError:
    """A collective that is being traced into a graph, where its result would become a constant."""
    return TransformError(
        f"{what} cannot be traced into a graph, where it would run once and never again (torch.func.linearize, make_fx "
        f"and torch.jit.trace do this): use torch.func.jvp or vjp instead of linearize"
    )


def no_derivative() -> TransformError:
    """The derivative of a maximum over ranks."""
    return TransformError(
        "pmax has no derivative: pass pmax(x.detach(), axis) where it is a constant, as in a softmax, or take the "
        "maximum of all_gather(x, axis), which has one"
    )


def step_transformed(what: str) -> TransformError:
    """A step inside of a transform."""
    return TransformError(
        f"{what} was called inside of a transform of torch.func: it reuses the memory of the state that it is given, "
        f"which no transform can follow. Transform fs.sharded_loss(loss_fn, plan) or fs.value_and_grad(loss_fn, plan) "
        f"instead, and update with fs.differentiable(opt, plan)"
    )


def half_updated(cause: str) -> StateError:
    """An optimizer that failed after it had written to parameters or to its state."""
    return StateError(
        f"the optimizer failed in the middle of an update, which is half done on this rank ({cause}): this state "
        f"cannot be used any more. Restore the last checkpoint, and let the update rule compute before it writes"
    )
