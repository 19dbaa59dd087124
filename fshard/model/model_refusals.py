"""Refusals of modules, trees and derivatives, one message builder per failure, as in ``fshard.errors``."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from fshard.errors import PlanError, TransformError, TreeError, UnitError, lines

MISSING = re.compile(
    r"derivative for '?(?:aten::)?(?P<op>\w+)'? is not implemented"
    r"|use forward AD with (?:aten::)?(?P<forward>\w+) that does not support it"
    r"|function '(?P<by>\w+)' is not differentiable with respect to argument '(?P<argument>\w+)'"
)
"""PyTorch's errors about operators without a derivative."""

NO_FORWARD = "has no forward derivative"
"""A part of the error about an operator without one."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Around a derivative: name the operator that has none.

    Args:
        what: whose derivative it is, such as ``"unit blocks.0"``; empty if nothing is known of it.

    Raises:
        TransformError: PyTorch lacks a derivative.
    """
    try:
        yield
    except TransformError:
        raise
    except RuntimeError as error:
        found = MISSING.search(str(error))
        if found is None:
            raise
        raise _missing(what, found) from error


def _missing(what: str, found: re.Match[str]) -> TransformError:
    where = f"in {what}, " if what else ""
    if found["by"]:
        return TransformError(
            f"{where}{found['by']} has no derivative by its argument {found['argument']!r}, which depends on what the "
            f"derivative is taken by: give it {found['argument']}.detach() if it is a constant"
        )
    if found["forward"]:
        return TransformError(
            f"{where}PyTorch's operator {found['forward']} {NO_FORWARD}: take reverse ones, torch.func.vjp in "
            f"the place of torch.func.jvp, or use fs.func.hvp and fs.func.jvp, which do so where they must"
        )
    op = found["op"]
    order = "derivative of this order" if op.endswith("_backward") else "derivative"
    return TransformError(
        f"{where}PyTorch's operator {op} has no {order}: compute it of other operators "
        f"(torch.exp, where, matmul, ... have derivatives of all orders), or keep it out of the differentiated part by "
        f".detach()"
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
            "Let the batch bring them, model.buffers at first: "
            'out, new = model.apply(params, x, buffers=batch["buffers"]), and return loss, {"buffers": new}. The next '
            'batch brings metrics.aux["buffers"]. With model.apply(params, x, training=False) they stay as they are.',
        )
    )


def reaches_outside(unit: str, modules: Iterable[str]) -> UnitError:
    """A unit calls a module outside of it, whose parameters it was not given."""
    head = f"unit {unit} reaches modules outside of it, whose parameters it is not given:"
    remedy = (
        "Call them outside of the unit, and pass it their results; register them in it as modules, whose parameters "
        "are tied then; or take more, or fewer, modules as units."
    )
    return UnitError(lines(head, modules, remedy))


def changed_from_outside(unit: str, spot: str) -> UnitError:
    """Code outside of a unit changed which modules or parameters the unit has."""
    return UnitError(
        f"code outside of unit {unit} replaced, added or removed {spot}, a module or a parameter of the unit, which "
        f"reads the parameters that the plan has for it and runs the modules that it had at fs.split: make this change "
        f"before fs.split, or let no unit contain {spot} (units=), where such a change lasts until the call is over"
    )


def assigned(unit: str, said: str) -> UnitError:
    """A call put a tensor into the place of a parameter."""
    where = f"unit {unit}" if unit else "the module"
    return UnitError(
        f"the call of {where} assigns a tensor, or another module's parameter, in the place of a parameter ({said}), "
        f"and a pure function must not change its parameters: tie parameters before fs.split, or use the tensor "
        f"where it is read (F.linear(x, other.weight))"
    )


def written_elsewhere(unit: str, spot: str) -> UnitError:
    """A unit's code changed a module outside of the unit."""
    return UnitError(
        f"unit {unit} changes {spot}, which belongs to a module outside of it, and units are pure functions: let the "
        f"code that calls both make the change, or let no unit contain the module that makes it (units=)"
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


def replaced_forward(path: str) -> PlanError:
    """Code is to be put around a module whose forward is an attribute."""
    return PlanError(
        f"{path}: its forward was replaced by an attribute, as hooks of accelerate do, and fs.parallel would have to "
        f"replace it again: remove those hooks before fs.split"
    )
