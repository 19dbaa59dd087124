"""The plan: mesh, specs, units and groups. Steps, transforms and checkpoints share it, and it never changes."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Literal

import torch

from fshard import tree
from fshard.arguments import Want, described, expect
from fshard.errors import PlanError, TreeError, lines
from fshard.hints import teaching
from fshard.model.precision import Precision
from fshard.patterns import bad_regex, meant_by
from fshard.sharding.code import Code, code_of
from fshard.sharding.fact_texts import Texts, plan_texts
from fshard.sharding.layout import Group, make_groups
from fshard.sharding.leaf import Leaf
from fshard.sharding.local_batch import local_part
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.model_cuts import check_cuts, model_cuts
from fshard.sharding.owners import ROOT, Modelled, owned_by, owners_of
from fshard.sharding.part_mesh import joined_part
from fshard.sharding.plan_table import render, render_html
from fshard.sharding.resolve_leaves import Inputs, resolve_leaves, stages_of
from fshard.sharding.rules import RuleLike, match
from fshard.sharding.spec import P, Shape
from fshard.sharding.stage_table import StageCut, StageTable
from fshard.sharding.suggest_rules import suggest_rules, warn_of_no_units
from fshard.sharding.validate import batch_spec, check_rounding, check_specs, misfit, tensors_of
from fshard.sharding.validate_wires import check_wires, expect_wire
from fshard.sharding.wire import Wire


@dataclass(frozen=True)
class Plan:
    """The layout of every leaf of a model on a mesh. Made by ``fs.make_plan``; ``print(plan)`` is a table.

    Attributes:
        mesh: the mesh.
        batch: the spec of the batch; its axes are the data axes.
        leaves: by path, in the order of the parameter tree.
        groups: the flat buffers.
        inits: initializers by path, where the model knows them.
        precision: the dtypes of compute and communication.
        source: its inputs, for ``replace``.
        code: the module that it was made for, without values.
        stages: the stages of a pipeline; None without.
        whole: of a plan of this rank's stages alone, that of all stages; else None.

    >>> mesh = fs.abstract_mesh((4,), ("data",))
    >>> plan = fs.make_plan({"w": torch.zeros(6, 2)}, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    >>> plan.leaves["w"].shape, plan.data_size, len(plan.groups)
    ((6, 2), 4, 1)
    """

    mesh: Mesh
    batch: P
    leaves: Mapping[str, Leaf]
    groups: tuple[Group, ...]
    inits: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    precision: Precision = Precision()
    source: Inputs | None = field(default=None, compare=False, repr=False)
    code: Code = field(default=Code(), compare=False, repr=False)
    stages: StageTable | None = None
    whole: "Plan | None" = field(default=None, compare=False, repr=False)

    @functools.cached_property
    def data_axes(self) -> Axes:
        """The axes that cut the batch, over which gradients are reduced."""
        return self.batch.axes

    @functools.cached_property
    def data_size(self) -> int:
        """The number of different parts of the global batch."""
        return self.mesh.axis_size(self.data_axes)

    @functools.cached_property
    def compute_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes in which units read the groups."""
        return tuple(group.compute_dtype for group in self.groups)

    @property
    def here(self) -> "Plan":
        """The plan as the rank of the caller holds it: the plan itself, but on a virtual mesh."""
        mesh = self.mesh.here
        return self if mesh is self.mesh else dataclasses.replace(self, mesh=mesh)

    @property
    def data_rank(self) -> int:
        """The number of this rank's part of the global batch, from 0 to ``data_size - 1``.

        Ranks that differ along other axes alone, such as a tensor-parallel one, work on the same part.
        """
        return self.mesh.index(self.data_axes)

    def local_batch(self, batch: Any) -> Any:
        """This rank's part of a global batch: what a step takes. Local, and nothing is copied.

        On a virtual mesh outside of ``run``, where the caller stands for all ranks, it is the global batch.

        Args:
            batch: a pytree, the same on every rank. Each dim of a tensor is cut into equal parts along the axes that
                the plan's ``batch=`` names for it; dims that a tensor does not have are not cut. What is no tensor,
                such as a number or an ``fs.Whole``, stays as it is. Leaves of unequal sizes there are told of.

        Returns:
            The same structure, with views of the tensors.

        Raises:
            TreeError: the size of a dim is not a multiple of the ranks that share it, an array is not a tensor, or no
                tensor has rows.

        >>> mesh = fs.abstract_mesh((2, 2), ("data", "tp"), rank=3)
        >>> plan = fs.make_plan({"w": torch.zeros(4)}, mesh, [("w", fs.fsdp("data"))], batch=fs.P("data"))
        >>> plan.data_rank, plan.local_batch({"x": torch.arange(4)})
        (1, {'x': tensor([2, 3])})
        """
        part = local_part(batch, self.batch, self.mesh.whole)
        return batch if self.mesh.everywhere else part

    @functools.cached_property
    def texts(self) -> tuple[Texts, Texts]:
        """The facts that must be equal on all ranks."""
        if self.whole is not None:
            return self.whole.texts
        head, leaves = plan_texts(self.mesh, self.batch, self.precision, self.groups, self.code.evaluated)
        return (head, leaves) if self.stages is None else (head, {**leaves, **self.stages.texts})

    @functools.cached_property
    def own(self) -> "Plan":
        """The plan of what this rank holds: the plan itself, or, in a pipeline, that of the leaves of its stages."""
        if self.stages is None:
            return self
        return self.at_position(self.mesh.index(self.stages.axis), joined_part(self.mesh, self.stages.axis))

    def at_position(self, position: int, mesh: Mesh) -> "Plan":
        """The plan of the stages at a position on their axis, on the mesh of their ranks."""
        assert self.stages is not None
        held = {path for path in self.leaves if position in self.stages.positions(path)}
        mine = [group for group in self.groups if group.leaves[0].path in held]
        leaves = {path: leaf for path, leaf in self.leaves.items() if path in held}
        counts = [len(self.stages.positions(group.leaves[0].path)) for group in mine]
        groups = tuple([dataclasses.replace(one, id=n, holders=counts[n]) for n, one in enumerate(mine)])
        return Plan(mesh, self.batch, leaves, groups, self.inits, self.precision, None, self.code, None, self)

    def places(self) -> dict[str, tuple[Group, int]]:
        """The group of each leaf, and the leaf's number in it, by path."""
        return {leaf.path: (group, i) for group in self.groups for i, leaf in enumerate(group.leaves)}

    def replace(
        self,
        *,
        rules: Sequence[RuleLike] | None = None,
        precision: Precision | None = None,
        wire: Wire | None = None,
        stages: StageCut | EllipsisType | None = ...,
        **others: Any,
    ) -> "Plan":
        """The plan of the same model on the same mesh with other rules, precision, wire or stages.

        This freezes or unfreezes leaves in the middle of a run. ``fs.reshard_state(state, plan, opt)`` carries a state.

        Args:
            rules: all rules of the new plan; None keeps the old ones.
            precision: the new precision; None keeps the old one.
            wire: the new formats of what travels; None keeps the old ones, ``fs.Wire()`` compresses nothing.
            stages: the new stages of a pipeline; None for none, ``...`` keeps the old ones.
            others: nothing else can be replaced: a PlanError.

        >>> mesh = fs.abstract_mesh((2,), ("data",))
        >>> plan = fs.make_plan({"w": torch.zeros(4)}, mesh, [fs.Rule("w", fs.P("data"), trainable=False)])
        >>> plan.replace(rules=[("w", fs.P("data"))]).leaves["w"].trainable
        True
        """
        if self.whole is not None:
            return self.whole.replace(rules=rules, precision=precision, wire=wire, stages=stages, **others)
        if others or self.source is None:
            what = ", ".join(f"{name}=" for name in others) or "a plan that make_plan did not make"
            raise PlanError(
                f"plan.replace: {what} cannot be replaced, only rules=, precision=, wire= and stages=: another model, "
                f"mesh or batch spec is another plan, which fs.make_plan makes; a checkpoint carries a state over to it"
            )
        expect("plan.replace(rules=)", [("rules", rules, (list, tuple, type(None)), _RULES)])
        expect_wire("plan.replace: ", wire)
        source = self.source if rules is None else dataclasses.replace(self.source, rules=tuple(rules))
        source = source if wire is None else dataclasses.replace(source, wire=wire)
        source = source if isinstance(stages, EllipsisType) else dataclasses.replace(source, stages=stages)
        return plan_of(source, self.mesh, self.batch, self.precision if precision is None else precision)

    def only(self, pattern: str) -> "Plan":
        """This plan with every leaf frozen whose path the pattern does not match as a whole. Shards stay as they are.

        Args:
            pattern: a regular expression.

        Raises:
            PlanError: it matches no trained leaf.

        >>> params = {"a": torch.zeros(4), "b": torch.zeros(4)}
        >>> plan = fs.make_plan(params, fs.abstract_mesh((2,), ("data",)), [(".*", fs.fsdp("data"))])
        >>> [path for path, leaf in plan.only("b").leaves.items() if leaf.trainable]
        ['b']
        """
        trained = [path for path, leaf in self.leaves.items() if leaf.trainable]
        problem = bad_regex(pattern)
        if problem is None and not any(re.fullmatch(pattern, path) for path in trained):
            problem = f"{pattern!r} matches no trained leaf as a whole{meant_by(pattern, trained)}"
        if problem is not None:
            raise PlanError(f"only={problem}" if problem.startswith(repr(pattern)) else f"only=: {problem}")
        leaves = {
            path: dataclasses.replace(leaf, trainable=leaf.trainable and bool(re.fullmatch(pattern, path)))
            for path, leaf in self.leaves.items()
        }
        return self._with(leaves)

    def read_in(self, precision: Precision) -> "Plan":
        """This plan with the same shards, whose steps read all leaves in another precision."""
        leaves = {path: leaf.read_in(precision) for path, leaf in self.leaves.items()}
        return self._with(leaves, precision=precision)

    def _with(self, leaves: Mapping[str, Leaf], **more: Any) -> "Plan":
        """This plan with other leaves at the same places."""
        groups = [dataclasses.replace(one, leaves=tuple([leaves[x.path] for x in one.leaves])) for one in self.groups]
        return dataclasses.replace(self, leaves=leaves, groups=tuple(groups), source=None, **more)

    def check_tree(self, params: Mapping[str, Any], *, whole: bool, what: str = "params") -> dict[str, torch.Tensor]:
        """The leaves of a parameter tree by path, in the plan's order.

        Args:
            params: a nested dict of tensors.
            whole: whether leaves have their whole shape; else they have this rank's.
            what: the argument's name, for errors.

        Raises:
            TreeError: leaves that are missing, unknown, misshapen or not tensors; all in one report.
        """
        if not isinstance(params, Mapping):
            meant = "give state.params" if hasattr(params, "params") else "state.params and model.params are such"
            if isinstance(params, torch.nn.Module):
                meant = "give the params of fs.split(module)"
            raise TreeError(f"{what} is {described(params)}, not a nested dict of tensors: {meant}")
        given = dict(tree.paths(params))
        wrong = [f"missing  {path}  {list(leaf.shape)}" for path, leaf in self.leaves.items() if path not in given]
        wrong += [f"unknown  {path}" for path in given if path not in self.leaves]
        shapes = self._shapes(whole)
        wrong += [
            found for path, shape in shapes.items() if path in given and (found := misfit(path, given[path], shape))
        ]
        if wrong:
            kind = "whole" if whole else "this rank's"
            head = f"{what} has {len(given)} leaves and is not the plan's parameter tree of {len(self.leaves)}:"
            remedy = f"Give a nested dict of {kind} tensors with just the plan's paths."
            raise TreeError(lines(head, wrong, self._other_kind(given, whole, what) or remedy))
        return {path: given[path] for path in self.leaves}

    def _shapes(self, whole: bool) -> dict[str, Shape]:
        """The shape of each leaf: the whole one, or this rank's."""
        if whole:
            return {path: leaf.shape for path, leaf in self.leaves.items()}
        return {path: group.local_shape(number, self.mesh) for path, (group, number) in self.places().items()}

    def _other_kind(self, given: Mapping[str, Any], whole: bool, what: str) -> str:
        """The remedy for shards in the place of whole tensors, and the reverse; else empty."""
        if {path: tuple(getattr(value, "shape", ())) for path, value in given.items()} != self._shapes(not whole):
            return ""
        if whole:
            what = "results of mesh.run" if self.mesh.everywhere else what
            return f"These are shards, this rank's parts: give fs.unshard({what}, plan), whole tensors."
        run = self.mesh.everywhere * " in mesh.run"
        return f"These are whole tensors: give fs.shard({what}, plan), this rank's parts of them{run}."

    def __repr__(self) -> str:
        return f"<Plan: {len(self.leaves)} leaves in {len(self.groups)} groups on {dict(self.mesh.shape)}>"

    def __str__(self) -> str:
        return render(self.mesh, self.batch, self.leaves, self.places(), self.precision, self.stages)

    def _repr_html_(self) -> str:
        return render_html(self.mesh, self.batch, self.leaves, self.places(), self.precision, repr(self), self.stages)


@teaching
def make_plan(
    model: Any,
    mesh: Mesh,
    rules: Sequence[RuleLike] | Literal["auto"],
    *,
    batch: P | None = None,
    units: Sequence[str] = (),
    precision: Precision | None = None,
    wire: Wire | None = None,
    stages: StageCut | None = None,
) -> Plan:
    """Say where every leaf of a model lives.

    Args:
        model: what ``fs.split`` returned, or a nested dict of tensors (real or meta) for hand-written functions.
        mesh: a real or an abstract mesh.
        rules: ``(pattern, spec or tactic)`` pairs or ``fs.Rule``; ``re.fullmatch`` on paths, the first match wins.
            ``"auto"`` for those of ``fs.suggest_rules``.
        batch: the spec of the batch; its axes are the data axes. The default on a mesh of one axis is that axis.
        units: for a nested dict, globs of subtrees that form units, as in ``fs.split``.
        precision: the dtypes of compute and communication, ``fs.Precision(...)``; None keeps those of the leaves.
        wire: the formats in which parameters and gradients travel, ``fs.Wire(...)``; None compresses nothing.
        stages: the stages of a pipeline, ``fs.Stages("stage")``; None for a model that each rank computes whole.

    Returns:
        The plan. It holds no tensor and needs no process group.

    Raises:
        PlanError: invalid arguments; one report names every problem of one kind.

    >>> params = {"w": torch.zeros(4, 2), "b": torch.zeros(2)}
    >>> plan = fs.make_plan(params, fs.abstract_mesh((2,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> plan.groups[0].chunk
    16
    """
    code = code_of(model)
    if rules == "auto":
        rules = suggest_rules(model, mesh)
    wants: list[Want] = [
        ("model", model, (Mapping, Modelled), "what fs.split returned, or a nested dict of tensors"),
        ("mesh", mesh, Mesh, 'a mesh, fs.make_mesh((-1,), ("data",))'),
        ("rules", rules, (list, tuple), _RULES),
        ("batch", batch, (P, type(None)), 'a spec, batch=fs.P("data")'),
        ("units", units, (str, list, tuple), "a list of globs"),
        ("stages", stages, (StageCut, type(None)), 'stages, fs.Stages("stage")'),
    ]
    expect("make_plan(model, mesh, rules)", wants)
    precision = Precision() if precision is None else precision
    if not isinstance(precision, Precision):
        raise PlanError(f"precision={precision!r} must be fs.Precision(...)")
    expect_wire("", wire)
    units = (units,) if isinstance(units, str) else tuple(units)
    batch = batch_spec(batch, mesh)
    source = _inputs_of(model, code, rules, units, wire or Wire(), stages)
    plan = plan_of(source, mesh, batch, precision)
    if any(group.gathered and group.parts > 1 for group in plan.groups):
        warn_of_no_units(source.shapes, source.dtypes, {*source.owners.values()} - {ROOT})
    return plan


def _inputs_of(
    model: Any, code: Code, rules: Sequence[RuleLike], units: Sequence[str], wire: Wire, stages: StageCut | None
) -> Inputs:
    """The inputs of a plan beside the mesh, the batch and the dtypes."""
    tensors = tensors_of(model if isinstance(model, Mapping) else model.params)
    shapes = {path: tuple(t.shape) for path, t in tensors.items()}
    return Inputs(
        shapes=shapes,
        dtypes={path: t.dtype for path, t in tensors.items()},
        owners=owners_of(shapes, units) if isinstance(model, Mapping) else owned_by(shapes, model.units),
        aliases=dict(getattr(model, "aliases", {})),
        frozen=frozenset(getattr(model, "frozen", ())),
        inits=dict(getattr(model, "inits", {})),
        rules=tuple(rules),
        wire=wire,
        code=code,
        stages=stages,
        cuts=model_cuts(model),
    )


_RULES = 'a list of (pattern, spec) pairs, such as [(r".*", fs.fsdp("data"))], or "auto"'


def plan_of(inputs: Inputs, mesh: Mesh, batch: P, precision: Precision) -> Plan:
    """The plan of a model on a mesh.

    Raises:
        PlanError: rules do not fit the leaves, or the mesh.
    """
    decided = match(inputs.rules, inputs.shapes)
    check_specs({path: (d.at_rest, d.compute) for path, d in decided.items()}, inputs.shapes, mesh, batch.axes)
    stages = stages_of(inputs, decided, mesh, batch)
    leaves = resolve_leaves(inputs, decided, mesh, batch, precision)
    check_rounding(leaves)
    check_cuts(inputs.cuts, leaves, mesh)
    check_wires(leaves.values(), mesh, batch.axes)
    groups = make_groups(leaves, dict(inputs.owners), mesh, batch.axes, stages.leaves if stages else {})
    return Plan(mesh, batch, leaves, groups, inputs.inits, precision, inputs, inputs.code, stages)
