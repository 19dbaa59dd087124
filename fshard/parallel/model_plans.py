"""``parallelize``: a model of Hugging Face's transformers, parallel as its own plans say.

A plan maps paths of modules and parameters to names of styles: ``{"layers.*.mlp.up_proj": "colwise"}``. Models bring
one for tensor parallelism and one for experts. Nothing of transformers is imported: plans are read as data.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fshard.arguments import Want, expect
from fshard.errors import PlanError, lines
from fshard.model.split import Model, surround
from fshard.parallel.plan_entries import EXPERT_STYLES, STYLES, PlanEntry, made, problem, tied
from fshard.patterns import closest, glob_matches, glob_meant
from fshard.sharding.mesh import Mesh

PLANS = ("_tp_plan", "_ep_plan")
"""The attributes in which models bring their plans: for layers, and for experts."""


def parallelize(
    model: Model,
    mesh: Mesh,
    plan: Mapping[str, str | None] | None = None,
    *,
    axis: str = "tp",
    expert_axis: str = "ep",
) -> Model:
    """Make the layers of a Hugging Face model parallel over axes of a mesh, as the plans say that the model brings.

    Layers communicate in ``apply`` of the model that is returned; neither the user's module nor the given model is
    changed. ``fs.suggest_rules`` of that model has the rules that cut its leaves. Outside of a step it computes with
    whole parameters, as the given model does.

    Args:
        model: what ``fs.split`` returned.
        mesh: the mesh, with one of the two axes, which may have one rank. Over ``axis`` layers are cut: its ranks work
            on the same rows. On the ranks of ``expert_axis`` lie experts, and tokens travel to them: name it in
            ``batch=``. Without the latter experts lie on the ranks of ``axis``.
        plan: entries beside those that the model brings, by path of a module or parameter, with ``*`` for one part of
            the path; they replace equal ones. ``None`` takes an entry away.
        axis: the tensor-parallel axis.
        expert_axis: the axis of experts.

    Returns:
        The model, with ``around``; its parameters are the given model's.

    Raises:
        PlanError: an entry has an unknown style, or names no module; a module is not what its entry is for; the ranks
            do not divide its features, heads or experts; there is no plan; or the mesh has neither axis.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    >>> mesh = fs.virtual_mesh((2, 2), ("data", "tp"))
    >>> model = fs.parallel.parallelize(fs.split(net), mesh, {"0": "colwise", "2": "rowwise"})
    >>> plan = fs.make_plan(model, mesh, "auto", batch=fs.P("data"))
    >>> plan.leaves["0.weight"].at_rest, plan.leaves["2.weight"].at_rest
    (P('tp', None, flat='data'), P(None, 'tp', flat='data'))
    """
    wants: list[Want] = [
        ("model", model, Model, "what fs.split returned"),
        ("mesh", mesh, Mesh, "what fs.make_mesh returned"),
        ("plan", plan, (Mapping, type(None)), "a mapping of paths to styles"),
    ]
    expect("parallelize(model, mesh)", wants)
    _check_axes(mesh, axis, expert_axis)
    asked = [mesh.shape.get(one, 1) > 1 for one in (axis, expert_axis)]
    entries = list(_entries(model, _given(model, plan or {}, asked), plan or {}))
    axes = {style: expert_axis if style in EXPERT_STYLES else axis for style in STYLES}
    entries = [entry for entry in entries if mesh.shape.get(axes[entry.style], 1) > 1]
    wrong = [problem(entry, axes[entry.style], mesh, entries) for entry in entries]
    if wrong := list(filter(None, dict.fromkeys(wrong))):
        raise PlanError(lines(f"a model's plan cannot be followed on {mesh}:", wrong, _REMEDY))
    calls = {entry.path: made(entry, axes[entry.style], entries) for entry in entries}
    return surround(model, tied(model, {path: call for path, call in calls.items() if call is not None}))


def _check_axes(mesh: Mesh, axis: str, expert_axis: str) -> None:
    """Refuse a mesh with neither axis."""
    if axis not in mesh.axis_names and expert_axis not in mesh.axis_names:
        raise PlanError(
            f"parallelize: the mesh has the axes {mesh.axis_names}, and neither {axis!r} for layers nor "
            f"{expert_axis!r} for experts: nothing would be cut. Name the axis, axis={mesh.axis_names[-1]!r}, or "
            f"add one to the mesh; it may have one rank"
        )


_REMEDY = "Replace or take away entries: fs.parallel.parallelize(model, mesh, {'lm_head': None})."


def _given(model: Model, plan: Mapping[str, str | None], asked: list[bool]) -> dict[str, str]:
    """The entries by pattern: those that the model brings for the axes of the mesh, and those of the user."""
    found = _brought(model, asked, bool(plan))
    if gone := [path for path, style in plan.items() if style is None and path not in found]:
        near = closest(gone[0], found) if found else ""
        raise PlanError(f"parallelize: the plan of the model has no entry {gone[0]!r} to take away{near}")
    kept = {path: style for path, style in found.items() if path not in plan}
    kept |= {path: style for path, style in plan.items() if style is not None}
    if wrong := [f"{pattern}: {style!r}{_unknown(style)}" for pattern, style in kept.items() if not _known(style)]:
        raise PlanError(lines("a model's plan has entries that fshard does not know:", wrong, _REMEDY))
    return kept


def _brought(model: Model, asked: list[bool], more: bool) -> dict[str, str]:
    """The entries that the model brings; ``more`` if the user has some."""
    layers, experts = (dict(getattr(model.module, name, None) or {}) for name in PLANS)
    for wanted, brought, what in zip(asked, (layers, experts), ("tensor-parallel", "expert-parallel"), strict=True):
        if wanted and not brought and not more:
            raise PlanError(
                f"parallelize: a {type(model.module).__name__} brings no {what} plan: give one, such as "
                "{'layers.*.mlp.up': 'colwise', 'layers.*.mlp.down': 'rowwise'}, or a mesh without that axis"
            )
    found = layers if asked[0] else {}
    if not asked[1]:
        return found
    # Experts on an axis of their own are not cut over the other one, too.
    below = tuple(f"{path}." for path in experts)
    return {path: style for path, style in found.items() if not f"{path}.".startswith(below)} | experts


def _known(style: object) -> bool:
    return isinstance(style, str) and style in STYLES


def _unknown(style: object) -> str:
    return closest(style, STYLES) if isinstance(style, str) else ", which is no name of a style"


def _entries(model: Model, given: Mapping[str, str], own: Mapping[str, Any]) -> Iterator[PlanEntry]:
    """Each module and parameter with an entry of the plan; the last pattern that matches a path decides.

    Families declare entries for layers that some of their models have and others lack. Entries that somebody wrote for
    this model must match.
    """
    modules, leaves = dict(model.module.named_modules()), dict(model.module.named_parameters(remove_duplicate=False))
    declared = _declared(model.module)
    found: dict[str, PlanEntry] = {}
    idle = []
    for pattern, style in given.items():
        paths = [path for path in (*modules, *leaves) if glob_matches(pattern, path)]
        if not paths and (pattern in own or not any(pattern == k or pattern.endswith(f".{k}") for k in declared)):
            idle.append(f"{pattern}: {style!r}, and there is no such module{glob_meant(pattern, modules)}")
        for path in paths:
            owner = path.rpartition(".")[0]
            found[path] = PlanEntry(path, style, modules.get(path), modules.get(owner), leaves.get(path))
    if idle:
        raise PlanError(lines("a model's plan has entries for modules that it lacks:", idle, _REMEDY))
    yield from found.values()


def _declared(module: nn.Module) -> set[str]:
    """The patterns that classes and configurations declare for a whole family of models."""
    plans: list[Any] = []
    for below in module.modules():
        plans += [getattr(type(below), name, None) for name in PLANS]
        plans += [getattr(getattr(below, "config", None), f"base_model{name}", None) for name in PLANS]
    return {"embed_tokens"} | {key for plan in plans if isinstance(plan, Mapping) for key in plan}
