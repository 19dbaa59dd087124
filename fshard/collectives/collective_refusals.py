"""Refusals of collectives: one message builder per failure, as in ``fshard.errors``."""

from fshard.errors import AxisError, TransformError


def unbound_axis(axis: object) -> AxisError:
    """An axis name was used where no mesh is in scope."""
    return AxisError(
        f"no mesh is in scope that defines axis {axis!r}: call this inside of a function that fs.shard_map "
        f"or a train step runs, or under fs.collectives.use_mesh(mesh), or pass mesh="
    )


def mixed_samples(axes: tuple[str, ...]) -> TransformError:
    """A loss of single samples asked for a collective between ranks with other samples."""
    return TransformError(
        f"a collective over axis {' and '.join(map(repr, axes))} in a loss of single samples: it would mix one sample "
        f"of each rank along the axis. Compute what samples share before, and give it with the batch, or take "
        f"fs.value_and_grad, whose loss sees all of them"
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
