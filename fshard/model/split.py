"""Split a module into a parameter tree and a pure function of it, with chosen submodules as units.

The user's module is never changed. A private copy with parameters on the meta device keeps the code, and
``Model.apply`` runs instances of the copy that hold the given tensors. A unit occurs twice: the *shell* stands at the
unit's place and hands the call to a ``Unit``, which runs an instance of the unit alone, with its hooks and its forward.
The shell holds the unit's tensors too, for code outside that reads its weights.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from fshard import errors, tree
from fshard.hints import hinting
from fshard.model import model_refusals
from fshard.model.around_calls import AroundCall
from fshard.model.changed_buffers import BufferTracker, Place, mark_own
from fshard.model.choose import Pattern, chosen
from fshard.model.defaults import deduce
from fshard.model.initial_values import Initializer
from fshard.model.instance import FORWARD, Body
from fshard.model.later_changes import LaterChanges
from fshard.model.leaves import LeafOrder, find_places, ignored, tied
from fshard.model.meta import check_module, private_copy
from fshard.model.template import Numbers, Template
from fshard.model.train_modes import ModuleModes
from fshard.model.unit import Unit
from fshard.model.unit_shell import Shell
from fshard.model.writes import PriorWrites

CALL = (
    "model.apply(params, x) is the forward, a pure function of the parameters that a loss function is given, or of "
    "model.params; method= calls another method"
)
"""Calls of a model."""

HINTS = {
    "forward": CALL,
    "train eval": "the mode is an argument of each call: model.apply(params, x, training=False); without it, each "
    "module keeps the mode that it had at fs.split",
    "parameters named_parameters": "model.params is the tree of parameters, and dict(fs.tree.paths(model.params)) has "
    "them by path; optimizers take none: fs.init_state(plan, fs.optim.adamw(lr))",
    "named_buffers": "model.buffers is the tree of buffers, and dict(fs.tree.paths(model.buffers)) has them by path",
    "state_dict": "fs.io.to_state_dict(state) is that of a train state, which the module that was split can load",
    "load_state_dict": "fs.io.from_state_dict(state_dict, plan, opt) makes a train state of one; or load it into the "
    "module before fs.split",
    "to cuda cpu half float double bfloat16": "fs.make_mesh(device=) says where tensors lie, and "
    "fs.make_plan(precision=fs.Precision(...)) in which dtype units compute; or convert the module before fs.split",
    "zero_grad backward grad no_sync": "gradients are values: fs.make_train_step(loss_fn, opt, plan) takes them and "
    "updates a state, fs.value_and_grad(loss_fn, plan) returns them",
    "modules named_modules children named_children": "model.module is the module's structure, without values, and "
    "model.units the paths of units",
    "requires_grad_": "freeze parameters of the module before fs.make_plan, or by fs.Rule(pattern, spec, "
    "trainable=False)",
}
"""By the names that an ``nn.Module`` has: what is done with a ``Model`` in their place."""


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A module as data and a pure function. ``split`` makes one.

    Attributes:
        params: the module's own parameters, detached and not copied: a nested dict in the order of registration, with
            a tied parameter once, under its first path.
        buffers: the module's own buffers, likewise.
        units: the paths of the units, in the order of registration.
        aliases: for every further path of a tied parameter, the path under which ``params`` holds it.
        inits: by path, torch's own initial values, where the module that owns the parameter is torch's own.
        ignored: the parameters that ``split(ignore=)`` took out, the module's own: no leaves, but part of its code.
        around: by path of a submodule, code around its calls, as ``fs.parallel.parallelize`` puts there.

    >>> model = fs.split(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh()), units=("0",))
    >>> model.units, list(dict(fs.tree.paths(model.params)))
    (('0',), ['0.weight', '0.bias'])
    >>> model.apply(model.params, torch.ones(4, 2)).shape
    torch.Size([4, 3])
    """

    params: dict[str, Any]
    buffers: dict[str, Any]
    units: tuple[str, ...]
    aliases: Mapping[str, str]
    inits: Mapping[str, Initializer]
    _body: Body = field(repr=False)
    _frozen: frozenset[str]
    _own: Mapping[str, "weakref.ref[Tensor]"]
    _unmade: tuple[str, ...] = ()
    ignored: dict[str, Any] = field(default_factory=dict)
    around: Mapping[str, AroundCall] = field(default_factory=dict)
    _later: LaterChanges | None = None

    if not TYPE_CHECKING:
        __getattr__ = hinting(HINTS)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a model has no parameters of its own to compute with.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a Model is not called: {CALL}")

    def apply(
        self,
        params: Mapping[str, Any],
        /,
        *args: Any,
        method: str = FORWARD,
        training: bool | None = None,
        buffers: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the module with these parameters: a pure function, which every transform of ``torch.func`` takes.

        Hooks and all else but tensors are as they were when the module was split. Attributes that the module's code
        sets last until the end of the call.

        Args:
            params: a tree like ``self.params``; any dtype, and any device that the module's code can work on.
            args: the module's positional arguments.
            method: the method to call, such as ``"encode"``, or the submodule of that name: an ``nn.ModuleDict`` of two
                players needs no forward of its own. The units in it run as in the forward. As in PyTorch, the hooks of
                the module itself belong to its forward alone.
            training: run as after ``module.train(training)``: dropout and batch normalization obey it. None keeps each
                submodule in the mode that it was split in.
            buffers: a tree like ``self.buffers``, which is the default. It is not written.
            kwargs: the module's keyword arguments.

        Returns:
            The module's result; with ``buffers``, the pair of that and the new buffers, detached. An unchanged buffer
            is the given tensor (inside of ``vmap`` it may be an equal one).

        Raises:
            TreeError: leaves are missing, unknown or misshapen.
            UnitError: a buffer changed, but ``buffers`` was not given; or buffers are on meta, without values.
            PlanError: the module has no such method, or ``training`` is not a bool.

        >>> model, x = fs.split(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(1.0))), torch.ones(2)
        >>> model.apply(model.params, x).any().item(), model.apply(model.params, x, training=False).any().item()
        (False, True)
        """
        if self._later is not None:
            self._later.look()
        body = self._modes.of(training, method)
        instance = body.instance(params)
        leaves = instance.tensors.leaves
        if self._unmade and buffers is None and leaves and leaves[0].device.type != "meta":
            raise model_refusals.unmade_buffers(self._unmade)
        given = body.buffers.leaves(self.buffers if buffers is None else buffers)
        versions = self._versions()
        out, changed = body.run(instance, given, args, kwargs, method)
        if versions != self._versions():
            raise errors.written_outside([path for path, _ in tree.paths(self.ignored)])
        if buffers is None:
            if changed:
                raise model_refusals.buffers_changed(changed)
            return out
        new = dict(zip(body.buffers.paths, given, strict=True))
        for path, buffer in changed.items():
            new[path] = buffer.detach() if isinstance(buffer, Tensor) and buffer.requires_grad else buffer
        mark_own(new.values())
        return out, tree.nest(new)

    def _versions(self) -> list[int]:
        """Return how often each ignored parameter was written to."""
        return [leaf._version for leaf in tree.leaves(self.ignored)] if self.ignored else []

    @functools.cached_property
    def _modes(self) -> ModuleModes:
        params, buffers = self._body.params, self._body.buffers
        return ModuleModes(self._body, lambda twin: _body(twin, params, buffers, self.units, self.around))

    @property
    def frozen(self) -> frozenset[str]:
        """The paths of parameters with ``requires_grad=False``: now, or at ``split`` if the module is gone.

        >>> net = torch.nn.Linear(2, 3)
        >>> model = fs.split(net)
        >>> _ = net.weight.requires_grad_(False)
        >>> model.frozen
        frozenset({'weight'})
        """
        own = {path: leaf for path, held in self._own.items() if (leaf := held()) is not None}
        frozen = {path for path in self._frozen if path not in own}
        return frozenset(frozen | {path for path, leaf in own.items() if not leaf.requires_grad})

    @property
    def module(self) -> nn.Module:
        """The private copy that keeps the code, with parameters on the meta device. Do not change it."""
        return self._body.module

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle or a copy splits the module again: instances are bound to the identity of this model's modules."""
        kept = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "_body"}
        return _again, (self.module, kept | {"_frozen": self.frozen, "_own": {}, "_later": None})

    def __repr__(self) -> str:
        sizes = [leaf.numel() for _, leaf in tree.paths(self.params)]
        return f"Model({len(sizes)} leaves, {sum(sizes):,} parameters, units={self.units})"


def split(module: nn.Module, units: Pattern | Iterable[Pattern] = (), *, ignore: str | Iterable[str] = ()) -> Model:
    """Split a module into parameters and a pure function.

    Args:
        module: any module that can be deep-copied, on any device, meta among them. It is not changed, and
            ``Model.params`` shares its memory.
        units: which submodules are units, by path or by class. Paths are given as globs, part by part between dots:
            ``"blocks.*"``, ``"*coder.layers.*"``, and ``"**.mlp"`` at any depth. ``"auto"`` takes the blocks of the
            outermost ``nn.ModuleList`` and ``nn.Sequential``, which suits most models; ``Model.units`` lists them.
        ignore: regular expressions for whole paths of frozen parameters to keep out of the leaves (the
            ``ignored_params`` of FSDP2's ``fully_shard``). They stay on every rank unchanged; they may be tensors of
            special classes, or differ between ranks. ``Model.ignored`` holds them, and no plan, collective, optimizer
            or checkpoint includes them.

    Returns:
        The model.

    Raises:
        PlanError: ``module`` is not a module, or ``torch.compile`` or TorchScript made it or a part of it; a pattern
            matches nothing, a unit cannot be called, or lies inside of another one; a parameter has hooks; an ignored
            parameter is trainable.
        UnitError: the module cannot be copied.

    >>> model = fs.split(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), units=("*",))
    >>> model.units, [path for path, _ in fs.tree.paths(model.params)]
    (('0', '1'), ['0.weight', '0.bias', '1.weight', '1.bias'])
    """
    if not isinstance(module, nn.Module):
        raise model_refusals.not_a_module(module)
    check_module(module)
    names = chosen(module, units)
    every = dict(module.named_parameters(remove_duplicate=False))
    out = ignored(every, [ignore] if isinstance(ignore, str) else ignore)
    params, aliases = tied((path, leaf) for path, leaf in every.items() if path not in out)
    buffers, _ = tied(module.named_buffers(remove_duplicate=False))
    twin = private_copy(module, params.values(), [*buffers.values(), *out.values()])
    _make_attributes(twin, out)
    order = LeafOrder("params", params, {path: leaf.shape for path, leaf in params.items()})
    return Model(
        params=tree.nest({path: leaf.detach() for path, leaf in params.items()}),
        buffers=tree.nest(buffers),
        units=names,
        aliases=aliases,
        inits={path: init for path, init in deduce(module).items() if path not in out},
        _body=_body(twin, order, LeafOrder("buffers", buffers), names),
        _frozen=frozenset(path for path, leaf in params.items() if not leaf.requires_grad),
        _own={path: weakref.ref(leaf) for path, leaf in params.items()},
        _later=LaterChanges(module),
        ignored=tree.nest(tied(out.items())[0]),
        _unmade=tuple(path for path, buffer in buffers.items() if buffer.device.type == "meta"),
    )


def _make_attributes(twin: nn.Module, paths: Iterable[str]) -> None:
    """Turn parameters into plain attributes, which all instances share."""
    for owner, _, name in (path.rpartition(".") for path in paths):
        below = twin.get_submodule(owner)
        if name in below._parameters:  # a module that is reached by two paths is one
            vars(below)[name] = below._parameters.pop(name)


def surround(model: Model, around: Mapping[str, AroundCall]) -> Model:
    """The model with this code around the calls of its submodules, by path. Parameters and buffers are shared.

    Args:
        model: what ``split`` returned.
        around: by path of a submodule; it replaces what the model has.

    Raises:
        PlanError: a submodule's forward was replaced by an attribute, as hooks of some libraries do.
    """
    for path in around:
        if "forward" in vars(model.module.get_submodule(path)):
            raise model_refusals.replaced_forward(path)
    body, shapes = model._body, {path: leaf.shape for path, leaf in tree.paths(model.params)}
    dims = {f"{owner}.{name}": dim for owner, call in around.items() for name, dim, _ in call.cuts}
    order = LeafOrder("params", shapes, shapes, {model.aliases.get(path, path): dim for path, dim in dims.items()})
    made = _body(body.module, order, body.buffers, model.units, around)
    return replace(model, around=dict(around), _body=made)


def _again(module: nn.Module, kept: Mapping[str, Any]) -> Model:
    made = replace(split(module, units=kept["units"]), **kept)
    return surround(made, made.around) if made.around else made


def _body(
    twin: nn.Module,
    params: LeafOrder,
    buffers: LeafOrder,
    units: Sequence[str],
    around: Mapping[str, AroundCall] | None = None,
) -> Body:
    """The whole module as a pure function, with shells in the place of units."""
    calls = {id(twin.get_submodule(path)): call for path, call in (around or {}).items()}
    places = find_places(twin, "_buffers")
    leaves, states = _numbers(find_places(twin, "_parameters"), params), _numbers(places, buffers)
    modules = {name: twin.get_submodule(name) for name in units}
    shells = {id(unit): _shell(name, unit, twin, leaves, states, calls) for name, unit in modules.items()}
    tracker = BufferTracker(twin, [places[path] for path in buffers.paths])
    return Body(Template(twin, twin, leaves, states, shells, calls), params, buffers, tracker)


def _shell(
    name: str,
    module: nn.Module,
    twin: nn.Module,
    leaves: Numbers,
    states: Numbers,
    around: Mapping[int, AroundCall],
) -> Shell:
    """A unit: its own pure function, and its leaves among those of the whole model."""
    own, held = find_places(module, "_parameters"), find_places(module, "_buffers")
    params, buffers = LeafOrder(f"params of {name}", own), LeafOrder(f"buffers of {name}", held)
    template = Template(module, twin, _numbers(own, params), _numbers(held, buffers), {}, around)
    body = Body(template, params, buffers, BufferTracker(module, [held[path] for path in buffers.paths]), name)
    stateful = bool(buffers.paths)

    def number(numbers: Numbers, places: Sequence[Place]) -> int:
        entries, name = places[0]
        return numbers[id(entries), name]

    return Shell(
        # Later calls of a unit without buffers need not find its leaves and its instance.
        unit=Unit(name, _function(body), None if stateful else body.prepared, stateful),
        params=(params, tuple(number(leaves, own[path]) for path in params.paths)),
        buffers={path: number(states, held[path]) for path in buffers.paths},
        views=template.views,
    )


def _numbers(places: Mapping[str, Sequence[Place]], order: LeafOrder) -> Numbers:
    return {(id(entries), name): i for i, path in enumerate(order.paths) for entries, name in places[path]}


def _function(body: Body) -> Callable[..., Any]:
    """The pure function of a unit; one with buffers takes them after the parameters and returns those that changed."""

    def plain(params: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is PriorWrites:
            return body.call(body.begun(params, args[0]), args[1:], kwargs)
        return body.call(body.instance(params), args, kwargs)

    def stateful(params: Mapping[str, Any], buffers: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        given = [buffers[path] for path in body.buffers.paths]
        if args and type(args[0]) is PriorWrites:
            return body.run(body.begun(params, args[0]), given, args[1:], kwargs)
        return body.run(body.instance(params), given, args, kwargs)

    chosen = stateful if body.buffers.paths else plain
    vars(chosen)["kind"] = body.kind  # by which a compiler sees that two units are the same function
    vars(chosen)["tables"] = body.tables  # and what their Python can read
    return chosen
