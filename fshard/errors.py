"""Every error that fshard raises: the classes a caller can catch, and message builders that several rooms share.

A message names the path or argument, gives the numbers, and ends with the remedy. Builders return the exception, so
that the caller writes ``raise errors.unknown_axis(...)`` and the traceback starts where the failure is. Problems of
one kind are reported together: builders take all of them and list each on a line of its own.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate


class ShardError(Exception):
    """Base of every error that fshard raises on purpose.

    >>> try:
    ...     fs.make_mesh((3,), ("data",))
    ... except fs.errors.ShardError as error:
    ...     print(type(error).__name__)
    PlanError
    """


class PlanError(ShardError, ValueError):
    """An invalid argument, mesh, spec, rule or plan.

    >>> fs.make_mesh((1, 1), ("data", "data"))
    Traceback (most recent call last):
    fshard.errors.PlanError: ...
    """


class TreeError(ShardError, ValueError):
    """A tree whose paths, shapes or dtypes differ from those of the plan.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> fs.shard({"w": torch.ones(3)}, plan)
    Traceback (most recent call last):
    fshard.errors.TreeError: ...
    """


class BatchError(ShardError, ValueError):
    """A batch that the step cannot use.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.1)
    >>> step = fs.make_train_step(lambda params, x: (params["w"] * x).mean(), opt, plan, accumulate=2)
    >>> step(fs.init_state(plan, opt, params={"w": torch.ones(2)}), torch.ones(3, 2))
    Traceback (most recent call last):
    fshard.errors.BatchError: ...
    """


class LossError(ShardError, TypeError):
    """A loss function returned something that has no gradient.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.1)
    >>> step = fs.make_train_step(lambda params, x: params["w"] * x, opt, plan)
    >>> step(fs.init_state(plan, opt, params={"w": torch.ones(2)}), torch.ones(2))
    Traceback (most recent call last):
    fshard.errors.LossError: ...
    """


class UnitError(ShardError, RuntimeError):
    """A unit that is not a pure function of its parameters and arguments.

    >>> model = fs.split(torch.nn.BatchNorm1d(2))
    >>> model.apply(model.params, torch.randn(3, 2), training=True)
    Traceback (most recent call last):
    fshard.errors.UnitError: the call changed buffers in place, but a pure function must return them:...
    """


class ScheduleError(ShardError, RuntimeError):
    """A schedule breaks its rules, or a rank left it.

    Example::

        try:
            state, metrics = step(state, batch)
        except fs.errors.ScheduleError as error:
            print(error)  # which calls of units each rank made, in which order
            raise
    """


class CommError(ShardError, RuntimeError):
    """A collective that failed or timed out. The process group cannot be used any more.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> mesh.run(lambda: mesh.rank == 0 and fs.collectives.psum(torch.ones(2), "data", mesh=mesh))
    Traceback (most recent call last):
    fshard.errors.CommError: ...
    """


class PeerError(ShardError, RuntimeError):
    """Another rank failed, so this rank gave up the same step. The state is as it was before the step.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> plan = fs.make_plan({"w": torch.ones(2)}, mesh, [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.1)
    >>> def loss_fn(params, x):
    ...     return params["w"].sum() * (1 // (1 - mesh.rank))
    >>> def program():
    ...     step = fs.make_train_step(loss_fn, opt, plan)
    ...     try:
    ...         step(fs.init_state(plan, opt, params={"w": torch.ones(2)}), torch.ones(2))
    ...     except Exception as error:
    ...         return type(error).__name__
    >>> mesh.run(program)
    ['PeerError', 'ZeroDivisionError']
    """


class DonatedError(ShardError, RuntimeError):
    """A state, or a tensor of it, was used after it was donated to a step, which reused its memory.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.1)
    >>> state = fs.init_state(plan, opt, params={"w": torch.ones(2)})
    >>> step = fs.make_train_step(lambda params, x: (params["w"] * x).sum(), opt, plan)
    >>> after, _ = step(state, torch.ones(2))
    >>> state.params
    Traceback (most recent call last):
    fshard.errors.DonatedError: ...
    """


class StateError(ShardError, RuntimeError):
    """A state whose last update failed half-way, or that lacks what other ranks have updated; see ``fs.settle``.

    Example::

        rules = [fs.Rule(".*", fs.P(), opt=fs.P(flat="data"))]  # ZeRO-1: each rank updates a part
        ...
        state, metrics = step(state, batch)
        state = fs.settle(state)  # without it, reading is a StateError: other ranks hold updates of its leaves
        print(state.params["head"]["weight"])
    """


class AxisError(ShardError, NameError):
    """The mesh has no such axis, or no mesh is in scope.

    >>> fs.collectives.psum(torch.ones(2), "data")
    Traceback (most recent call last):
    fshard.errors.AxisError: no mesh is in scope that defines axis 'data': ...
    """


class CollectiveError(ShardError, ValueError):
    """Arguments that a collective cannot use, or that differ between ranks.

    >>> with fs.collectives.use_mesh(fs.make_mesh((1,), ("data",))):
    ...     fs.collectives.pmean(torch.ones(2, dtype=torch.int64), "data")
    Traceback (most recent call last):
    fshard.errors.CollectiveError: pmean of a tensor of torch.int64: cast it to a floating-point dtype, or use psum
    """


class ReplicationError(ShardError, ValueError):
    """Values differ between ranks where they must be equal.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> fs.shard_map(lambda x: x, mesh, in_specs=fs.P("data"), out_specs=fs.P())(torch.arange(2.0))
    Traceback (most recent call last):
    fshard.errors.ReplicationError: ...
    """


class TransformError(ShardError, RuntimeError):
    """A collective or a step was called under a transform that it does not support.

    >>> mesh = fs.make_mesh((1,), ("data",))
    >>> torch.func.grad(lambda x: fs.collectives.pmax(x, "data", mesh=mesh))(torch.tensor(1.0))
    Traceback (most recent call last):
    fshard.errors.TransformError: pmax has no derivative: ...
    """


class NonFiniteError(ShardError, ArithmeticError):
    """The gradient norm is infinite or nan. The state is as it was before the step.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.1)
    >>> step = fs.make_train_step(lambda params, x: (params["w"] * x).sum(), opt, plan)
    >>> step(fs.init_state(plan, opt, params={"w": torch.ones(2)}), torch.tensor([1.0, torch.inf]))
    Traceback (most recent call last):
    fshard.errors.NonFiniteError: ...
    """


class SolverError(ShardError, ArithmeticError):
    """A linear map that a solver cannot use: not symmetric, not positive, or not finite.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> fs.func.cg(lambda v: {"w": -v["w"]}, {"w": torch.ones(2)}, plan)
    Traceback (most recent call last):
    fshard.errors.SolverError: ...
    """


class CorruptionError(ShardError, RuntimeError):
    """A rank computed a step twice, with different results (``fs.recheck``). The state is as it was before.

    >>> raise fs.errors.CorruptionError("step 100 was computed twice, ...")
    Traceback (most recent call last):
    fshard.errors.CorruptionError: step 100 was computed twice, ...
    """


class RematError(ShardError, RuntimeError):
    """A function cannot be recomputed: it would return other values, or lose a gradient.

    >>> fs.remat(torch.nn.functional.dropout)(torch.ones(3, requires_grad=True))
    Traceback (most recent call last):
    fshard.errors.RematError: the function given to fs.remat draws from torch's generator on cpu, ...
    """


class CheckpointError(ShardError, RuntimeError):
    """A checkpoint cannot be written or read. The files on disk are as they were before the call.

    >>> import tempfile
    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fs.Checkpointer(folder).restore(plan, fs.optim.sgd(0.1))
    Traceback (most recent call last):
    fshard.errors.CheckpointError: ...
    """


class DamagedError(CheckpointError):
    """A checkpoint is malformed, or its bytes differ from those that were written.

    Example::

        try:
            state = checkpoints.restore(plan, opt)
        except fs.errors.DamagedError as error:
            print(error)  # which bytes of which file are not those that were written
            state = checkpoints.restore(plan, opt, fallback=True)  # the newest one that is whole
    """


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped, or a part of a state was left out of another library's format.

    Example::

        with warnings.catch_warnings(record=True, action="always", category=fs.errors.CheckpointWarning) as skipped:
            state = checkpoints.restore(plan, opt, fallback=True)
    """


class LaunchError(ShardError, RuntimeError):
    """A rank of ``fs.launch`` died, or failed in a way that cannot be raised in the process that launched it.

    Example::

        try:
            losses = fs.launch(main, ranks=2)
        except fs.errors.LaunchError as error:
            print(error)  # which rank died, how, and the last that it printed
    """


class KeyReuseError(ShardError, RuntimeError):
    """The same random numbers were drawn twice from one key, inside of ``fs.random.checked()``.

    >>> key = fs.random.key(0)
    >>> with fs.random.checked():
    ...     fs.random.normal(key, (2,)), fs.random.uniform(key, (2,))
    Traceback (most recent call last):
    fshard.errors.KeyReuseError: ...
    """


MOST = 100
"""The number of problems that one message lists."""

LONGEST, ROOM = 2_000, 12_000
"""Characters of one of them, and of all together: some are as long as what a file holds."""


def lines(head: str, problems: Iterable[str], remedy: str) -> str:
    """A message of one head line, one indented line per problem, and the remedy, which must not scroll away."""
    rows = [f"\n  {problem if len(problem) <= LONGEST else f'{problem[:LONGEST]}...'}" for problem in problems]
    fit = min(MOST, sum(total <= ROOM for total in accumulate(map(len, rows))))
    more = f"\n  ... and {len(rows) - fit} more" if len(rows) > fit else ""
    return f"{head}{''.join(rows[:fit])}{more}\n{remedy}"


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


def missing_extra(what: str, library: str, extra: str) -> ImportError:
    """An optional library that is not installed."""
    return ImportError(f'{what} needs {library}, which is not installed: pip install "fshard[{extra}]"')


def no_processes() -> PlanError:
    """A collective call on an abstract mesh."""
    return PlanError(
        "an abstract mesh has no processes to run on: make the plan on fs.make_mesh(...). A virtual mesh is abstract "
        "outside of mesh.run(fn): make a forward and its backward in one fn"
    )


def written_outside(paths: Sequence[str]) -> UnitError:
    """Code between units wrote to parameters in place."""
    remedy = (
        "Only the optimizer changes parameters: compute new values instead, or return them as aux. An embedding with "
        "max_norm= scales rows of its weight in place: look up F.embedding(x, w) without it, and scale what it "
        "returns, rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)."
    )
    return UnitError(lines("the program wrote in place to parameters:", paths, remedy))


def written_data(unit: str, paths: Sequence[str]) -> UnitError:
    """A program wrote to the memory of parameters, or gave them other memory, past their versions."""
    head = f"unit {unit}" if unit else "the program"
    remedy = (
        "What a call reads is a gathered copy, so such a write is lost: only the optimizer changes parameters. Compute "
        "new values (w = self.weight.clamp(0)), or change them between steps, by state.replace(params=...)."
    )
    return UnitError(lines(f"{head} wrote to the .data of parameters:", paths, remedy))


def stopped_by_program(paths: Sequence[str]) -> UnitError:
    """A program called ``requires_grad_(False)`` on parameters that its plan trains."""
    remedy = (
        "A plan decides what is trained, once for all steps: freeze them before fs.make_plan, give them a rule with "
        "trainable=False, or stop a gradient where it flows (fs.stop_gradient(params), weight.detach())."
    )
    return UnitError(
        lines("the program called requires_grad_(False) on parameters that the plan trains:", paths, remedy)
    )


def unknown_axis(axis: object, names: Sequence[str]) -> AxisError:
    """A value that is not the name of an axis of this mesh."""
    have = ", ".join(map(repr, names))
    if not isinstance(axis, str):
        return AxisError(
            f"axis={axis!r} is not the name of a mesh axis: give one of {have}, or a tuple of them. To reduce over a "
            f"dim of the tensor or the batch of torch.vmap, use an ordinary reduction, such as x.sum(0) after the vmap"
        )
    return AxisError(f"axis {axis!r} is not in the mesh: give one of {have}; dims of torch.vmap have no names")


def half_updated(cause: str) -> StateError:
    """An optimizer failed after it had written to parameters or to its state."""
    return StateError(
        f"the optimizer failed in the middle of an update, so this state is half updated on this rank and cannot "
        f"be used ({cause}): restore the last checkpoint, and let the update rule compute before it writes"
    )


def __dir__() -> list[str]:
    return sorted(name for name, value in globals().items() if isinstance(value, type) and value.__module__ == __name__)
