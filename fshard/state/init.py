"""Train states from nothing or from whole tensors, and whole trees to shards and back."""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import Want, expect
from fshard.collectives.linear import Collect, LinearCut, apply
from fshard.collectives.ranks import Ranks
from fshard.errors import PlanError, TreeError, lines, no_processes
from fshard.hints import teaching
from fshard.model.initial_values import Initializer, Scaled, fill
from fshard.model.philox import fold
from fshard.optim.base import Optimizer
from fshard.patterns import bad_regex, meant_by
from fshard.played.everywhere import called_on_each_rank, play_joined
from fshard.runtime.comm import collective_call, enter
from fshard.runtime.execution import Shard, Shards, start_shard
from fshard.runtime.memory import keep, memory_space
from fshard.sharding.code import initialized_by
from fshard.sharding.layout import Group, Piece, global_index
from fshard.sharding.plan import Plan
from fshard.state.elementwise import know_shards
from fshard.state.fit import check_optimizer
from fshard.state.flat_maps import cut_leaves, cut_pieces, join_leaves, join_pieces, narrow, of_all_stages, widen
from fshard.state.provenance import Past, initializers_told, samples
from fshard.state.state_memory import StateMemory
from fshard.state.train_state import TrainState

Inits = Sequence[tuple[str, Initializer]]


@teaching
@called_on_each_rank
def init_state(
    plan: Plan,
    opt: Optimizer | None = None,
    seed: int = 0,
    *,
    params: Mapping[str, Any] | None = None,
    shards: Mapping[str, Any] | None = None,
    init: Inits = (),
) -> TrainState:
    """The state before the first step. Local: no rank ever holds more than its own part.

    On a virtual mesh outside of ``run`` it is the state of all ranks.

    Args:
        plan: the plan.
        opt: the optimizer, whose state starts for each shard; None for parameters alone: a state for eval steps.
        seed: fresh values depend on ``(seed, path, global index)`` alone: they are the same on any mesh. It also seeds
            the random numbers inside steps.
        params: whole tensors to start from, instead of fresh values. A wider dtype of the plan's takes them as they
            are; a narrower one would round them, and is refused.
        shards: this rank's part of them instead, as ``fs.shard`` and ``fs.io.from_dtensor`` give it.
        init: ``(pattern, initializer)`` rules on paths, the first match wins, before what the model's own modules say.

    Raises:
        PlanError: a leaf without an initializer, a rule that matches nothing, or an optimizer that does not fit.
        TreeError: ``params`` or ``shards`` is not the plan's tree, or holds values that the plan's dtypes would round.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> state = fs.init_state(plan, fs.optim.sgd(0.1, momentum=0.9), params={"w": w})
    >>> state.step, state.params["w"], list(state.opt_state)
    (0, tensor([1., 2., 3., 4.]), ['momentum_buffer'])
    >>> fs.init_state(plan, fs.optim.sgd(0.1), seed=1, init=[("w", fs.init.ones())]).params["w"]
    tensor([1., 1., 1., 1.])
    """
    expect(
        "init_state(plan, opt, seed)",
        [("plan", plan, Plan, "what fs.make_plan returned"), ("seed", seed, int, "an int")],
    )
    plan = plan.whole or plan
    own = plan.own
    if shards is not None:
        if params is not None:
            raise PlanError("init_state was given params= and shards=: give whole tensors, or this rank's part of them")
        flat = own.check_tree(shards, whole=False, what="shards")
        refuse_rounding(own, flat, "shards")

        def value(path: str, piece: Piece) -> Tensor:
            return flat[path].detach().reshape(-1)
    elif params is not None:
        flat = plan.check_tree(params, whole=True)
        refuse_rounding(plan, flat, "params")

        def value(path: str, piece: Piece) -> Tensor:
            return take(flat[path].detach(), piece)
    else:
        inits = first_values(plan, init)

        def value(path: str, piece: Piece) -> Tensor:
            return fresh_values(inits[path], fold(seed, path), plan.leaves[path].shape, piece, plan.mesh.device)

    if plan.mesh.size == 1:
        return start(own, opt, value, 0, seed)
    told = samples(flat) if params is not None else {} if shards is not None else initializers_told(inits.items())
    return start(own, opt, value, 0, seed, Past(told, exact=shards is None))


def first_values(plan: Plan, init: Inits) -> dict[str, Any]:
    """The initializer of each leaf, by path: that of the first pattern that matches, or that of its module.

    Raises:
        PlanError: leaves without one, or patterns that match nothing.
    """
    given = initializers(plan, init)
    inits = {**plan.inits, **given}
    missing = [f"{path}  {list(leaf.shape)}" for path, leaf in plan.leaves.items() if path not in inits]
    if missing:
        remedy = "Give init=[(pattern, fs.init.normal(0.02)), ...], or params= with values to start from."
        raise PlanError(lines(f"{len(missing)} leaves have no initializer:", missing, remedy))
    _warn_of_own(plan, [path for path in plan.leaves if path not in given])
    return inits


def _warn_of_own(plan: Plan, paths: Sequence[str]) -> None:
    """Warn of leaves that begin with PyTorch's defaults, where a module above them has code for their first values."""
    own = initialized_by(plan.code.module, paths)
    if own:
        some = f"{next(iter(own))}{f' and {len(own) - 1} more' * (len(own) > 1)}"
        warnings.warn(
            f"fs.init_state: {some} begin with PyTorch's default, and not with what {next(iter(own.values()))} gives "
            f"them, which it does not call. Give that method's values as init=[(pattern, fs.init.normal(0.02)), ...], "
            f"a rule for each of these leaves, or make the module with values and give params=model.params",
            UserWarning,
            stacklevel=6,
        )


def start(
    plan: Plan,
    opt: Optimizer | None,
    value: Callable[[str, Piece], Tensor],
    step: int,
    seed: int,
    past: Past | None = None,
) -> TrainState:
    """A state whose optimizer starts from given parameters. Local.

    Args:
        opt: the optimizer; None for parameters alone.
        value: gives the elements of a piece of the leaf with this path, 1-D.
        step: the number of updates that were made, none of which the optimizer's state has seen.
        seed: of random numbers inside of steps.
        past: where its values come from.

    Raises:
        PlanError: an optimizer that does not fit.
    """
    made = None if opt is None else check_optimizer(plan, opt)
    plan.mesh.check_device()
    shards = []
    for group in plan.groups:
        param = _shard_of(plan, group, value)
        shards.append(Shard(param, {}) if made is None else start_shard(group, plan.mesh, made, param))
    late = [path for path, leaf in plan.leaves.items() if leaf.trainable and step and made is not None]
    memory, begun = StateMemory(plan, Shards(shards)), dict.fromkeys(late, step)
    return TrainState(plan, step, seed, memory, late=begun, past=past or Past(made={}))


def shard(full: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """This rank's part of a tree of whole tensors. Local; the inverse of ``unshard``.

    It is a linear map, right under every transform of ``torch.func``, and its adjoint is ``unshard``: a tree of whole
    tensors counts as one value, of which every rank holds a copy. (Its gradient is collective, then.)

    Args:
        full: a nested dict of whole tensors, the same on every rank.
        plan: the plan.

    Raises:
        TreeError: leaves are missing, unknown or of another shape, or of a dtype that the plan's would round.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> fs.shard({"w": w}, plan)  # all of it, on a mesh of one
    {'w': tensor([1., 2., 3., 4.])}
    """
    expect("fs.shard(full, plan)", [("plan", plan, Plan, "what fs.make_plan returned")])
    plan = plan.whole or plan
    flat = plan.check_tree(full, whole=True, what="full")
    refuse_rounding(plan, flat, "full")
    plan.mesh.check_device()
    if plan.mesh.everywhere:
        return tree.nest(flat)
    plan = plan.own
    out: dict[str, Tensor] = {}
    for group in plan.groups:
        placed = [flat[leaf.path].to(device=plan.mesh.device, dtype=group.dtype) for leaf in group.leaves]
        leaves = [narrow(leaf, plan.mesh, tensor) for leaf, tensor in zip(group.leaves, placed, strict=True)]
        chunk = apply(join_leaves(group, leaves), LinearCut(_ranks(plan, group), -1))
        pieces = cut_pieces(group, plan.mesh, chunk)
        out.update((leaf.path, piece) for leaf, piece in zip(group.leaves, pieces, strict=True))
    made = tree.nest({path: out[path] for path in plan.leaves})
    know_shards(made, plan)
    return made


@teaching
@collective_call
def unshard(params: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """The whole tensors of a sharded tree, on every rank. Collective; the inverse of ``shard``.

    On a virtual mesh outside of ``run`` trees are of whole tensors already, and this copies them. There it also takes
    what ``mesh.run`` returned of trees of shards, such as gradients: a list of one tree for each rank.

    It is a linear map, right under every transform of ``torch.func``, and its adjoint is ``shard``. What is computed
    from the whole tensors must be the same on all ranks for gradients to be right; a loss of each rank's own batch is
    what ``fs.func.sharded_loss`` is for.

    Args:
        params: a nested dict of local tensors, such as ``state.params``. A tree of the leaves that are trained will do,
            such as ``state.opt_state["exp_avg"]``.
        plan: the plan.

    Returns:
        A nested dict of whole tensors that share no memory with ``params``.

    Raises:
        TreeError: ``params`` is not this rank's part of the plan's tree.
        PlanError: the plan's mesh is abstract.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> fs.unshard({"w": torch.arange(4.0)}, plan)["w"]
    tensor([[0., 1.],
            [2., 3.]])
    """
    expect("fs.unshard(params, plan)", [("plan", plan, Plan, "what fs.make_plan returned")])
    if plan.mesh.everywhere:
        if isinstance(params, list):
            return _of_each_rank(params, plan)
        given = _some_leaves(params, plan, True)
        return tree.nest({path: leaf.detach().clone() for path, leaf in given.items()})
    if plan.mesh.transport is None and plan.mesh.size > 1:
        raise no_processes()
    plan = plan.whole or plan
    own = plan.own
    flat = _some_leaves(params, own, False)
    enter(plan.mesh, "unshard")
    out = _gathered(flat, own)
    if plan.stages is not None:
        out = of_all_stages(out, plan, plan.stages)
    return tree.nest({path: out[path] for path in plan.leaves if path in out})


def _gathered(flat: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """The whole tensors of this rank's parts of some leaves, on every rank that has a part."""
    out: dict[str, Tensor] = {}
    for group in [group for group in plan.groups if group.leaves[0].path in flat]:
        chunk = join_pieces(group, plan.mesh, [flat[leaf.path] for leaf in group.leaves])
        full = apply(chunk.to(plan.mesh.device), Collect(_ranks(plan, group), -1))
        for leaf, tensor in zip(group.leaves, cut_leaves(group, full), strict=True):
            # Its own memory: the buffer of the group would live as long as any view of it.
            out[leaf.path] = widen(leaf, plan.mesh, tensor).clone(memory_format=torch.contiguous_format)
    return out


def _of_each_rank(trees: list[Any], plan: Plan) -> dict[str, Any]:
    """The whole tensors of a tree, from the parts that the ranks of a virtual mesh gave."""
    mesh: Any = plan.mesh
    if len(trees) != mesh.size:
        raise TreeError(
            f"params is a list of {len(trees)}: outside of mesh.run give a nested dict of whole tensors, or what "
            f"mesh.run returned, a list of {mesh.size} trees of shards"
        )
    made: dict[str, Any] = play_joined(mesh, lambda: unshard(trees[mesh.rank], plan))
    return made


def _some_leaves(params: Any, plan: Plan, whole: bool) -> dict[str, Tensor]:
    """The leaves of a tree of all leaves of a plan, or, as trees of the optimizer's state are, of those that it trains.

    Raises:
        TreeError: of other leaves, or of other shapes.
    """
    idle = {path for path, leaf in plan.leaves.items() if not leaf.trainable}
    given = dict(tree.paths(params)) if isinstance(params, Mapping) else {}
    if not idle or len(idle) == len(plan.leaves) or not idle.isdisjoint(given):
        return plan.check_tree(params, whole=whole)
    shapes = {path: leaf.shape for path, leaf in plan.leaves.items()}
    if not whole:
        shapes = {path: group.local_shape(number, plan.mesh) for path, (group, number) in plan.places().items()}
    filled = given | {path: torch.zeros((), device="cpu").expand(shapes[path]) for path in idle}
    flat = plan.check_tree(tree.nest(filled), whole=whole)
    return {path: leaf for path, leaf in flat.items() if path not in idle}


def refuse_rounding(plan: Plan, flat: Mapping[str, Tensor], what: str) -> None:
    """Refuse leaves of a dtype whose values the plan's dtype cannot hold.

    Raises:
        TreeError: naming them.
    """
    pairs = [(path, leaf.dtype, plan.leaves[path].dtype) for path, leaf in flat.items()]
    wrong = [f"{path}: {have}, the plan has {want}" for path, have, want in pairs if not _holds(want, have)]
    if wrong:
        remedy = (
            f"Cast them first ({what} = fs.tree.map(lambda x: x.to(dtype), {what})), or make the plan of such leaves."
        )
        raise TreeError(lines(f"{what} has leaves that the plan's dtypes would round:", wrong, remedy))


def _holds(want: torch.dtype, have: torch.dtype) -> bool:
    """Tell whether a dtype holds all values of another of its kind."""
    alike = (want.is_floating_point, want.is_complex) == (have.is_floating_point, have.is_complex)
    return want == have or (alike and torch.promote_types(have, want) == want)


def _ranks(plan: Plan, group: Group) -> Ranks:
    return Ranks(plan.mesh, group.gather_axes)


def take(whole: Tensor, piece: Piece) -> Tensor:
    """The elements of a piece, 1-D."""
    box = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]
    return box.reshape(-1)[piece.start : piece.stop]


def _shard_of(plan: Plan, group: Group, value: Callable[[str, Piece], Tensor]) -> Tensor:
    buffer = memory_space(group.kinds.param, plan.mesh).zeros(group.chunk, group.dtype)
    part = plan.mesh.index(group.gather_axes)
    for number, leaf in enumerate(group.leaves):
        begin, end = group.shard_range(number, part)
        if end > begin:
            buffer[begin:end] = value(leaf.path, group.piece(number, plan.mesh)).to(buffer)
    return keep(group, plan.mesh, buffer)


def initializers(plan: Plan, rules: Inits, paths: Iterable[str] | None = None) -> dict[str, Initializer]:
    """The initializer that rules give to each leaf, the first match wins; leaves that none matches are left out.

    Args:
        rules: ``(pattern, initializer)`` pairs.
        paths: the leaves in question; None for all.

    Raises:
        PlanError: a rule that matches nothing, or scales by a fan that a leaf does not have.
    """
    _check_rules(rules)
    out: dict[str, Initializer] = {}
    used: set[int] = set()
    for path in plan.leaves if paths is None else paths:
        hits = [i for i, (pattern, _) in enumerate(rules) if re.fullmatch(pattern, path)]
        used.update(hits)
        if hits:
            out[path] = rules[hits[0]][1]
    idle = [f"init[{i}] {pattern!r}" for i, (pattern, _) in enumerate(rules) if i not in used]
    if idle:
        which = "leaf" if paths is None else "missing leaf"
        hint = meant_by(rules[min(set(range(len(rules))) - used)][0], plan.leaves)
        raise PlanError(lines(f"rules of init= match no {which}:", idle, f"Patterns must match a whole path{hint}."))
    shapes = {path: plan.leaves[path].shape for path, initializer in out.items() if isinstance(initializer, Scaled)}
    flat = [f"{path}  {list(shape)}" for path, shape in shapes.items() if len(shape) < 2]
    if flat:
        remedy = 'Give these a rule of their own before it, such as (r".*bias", fs.init.zeros()).'
        raise PlanError(lines("init= scales values by a fan, which takes two dims, and these have none:", flat, remedy))
    return out


def _check_rules(rules: Any) -> None:
    """Refuse what are no rules; functions of ``torch.nn.init`` among them, which fill whole tensors in place."""
    form = 'a list of (pattern, initializer) pairs, such as [(r".*", fs.init.normal(0.02))]'
    expect("init_state", [("init=", rules, (list, tuple), form)])
    for number, rule in enumerate(rules):
        pair = rule if isinstance(rule, (list, tuple)) and len(rule) == 2 else (None, None)
        foreign = getattr(pair[1], "__module__", "") == "torch.nn.init"
        what = "an initializer of fs.init, such as fs.init.normal(0.02)"
        wants: list[Want] = [(f"init[{number}]", rule, (list, tuple), form)]
        if rule is pair:
            wants = [(f"init[{number}] pattern", pair[0], str, "a regular expression for whole paths")]
            wants += [(f"init[{number}]", None if foreign else pair[1], Callable, what)]
        expect("init_state", wants)
        if problem := bad_regex(pair[0]):
            raise PlanError(f"init[{number}]: {problem}")


def fresh_values(init: Initializer, key: Any, shape: tuple[int, ...], piece: Piece, device: torch.device) -> Tensor:
    """The initial values of a piece of a leaf, 1-D."""
    return fill(init, key, shape, global_index(shape, piece, device))
