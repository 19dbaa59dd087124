"""``fs.shard_map``: per-rank code on slices, as a function of global tensors."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fshard import tree
from fshard.arguments import Want, described, expect, kind
from fshard.collectives.linear import Settle, Vary, apply, differentiable
from fshard.collectives.make_linear import untraced
from fshard.collectives.ranks import Ranks
from fshard.collectives.raw import check_invariant
from fshard.collectives.scope import SCOPE, bind, cutting
from fshard.collectives.specs import assemble, check_spec, cut, other_axes
from fshard.collectives.ties import ties_of
from fshard.errors import AxisError, CollectiveError, TreeError
from fshard.model.remat_function import exact
from fshard.played.capture import check_captured
from fshard.played.controller import on_all_ranks
from fshard.played.transport import VirtualTransport
from fshard.played.virtual import VirtualMesh
from fshard.sharding.mesh import Mesh
from fshard.sharding.spec import P
from fshard.torch_internals import peek_interpreter_stack
from fshard.tree import Tree


def shard_map(
    f: Callable[..., Any],
    mesh: Mesh,
    in_specs: Tree,
    out_specs: Tree,
    *,
    slices: bool = False,
    check: bool | None = None,
) -> Callable[..., Any]:
    """Map a function over the slices of global tensors (``jax.shard_map``), on real and on played ranks alike.

    Each rank calls ``f`` with its slices of the arguments, and ``f`` may call ``fs.collectives`` on the mesh's axes.
    Together they are a function of global tensors: cut the arguments by ``in_specs``, run ``f`` on every rank, join the
    results by ``out_specs``.

    * On a mesh of real ranks, and inside of ``mesh.run`` on a virtual one, every rank makes the call, with the same
      global tensors, and gets the same global results. With ``slices=True`` it makes the call with its own slices, and
      gets its own slices back: nothing is cut or gathered.
    * On a virtual mesh outside of ``run``, one call plays all ranks.

    **Derivatives** are those of the function of global tensors, cut by the same specs: where an argument's spec names
    no axis, its gradient is the sum over that axis, the same on all ranks; where a result's spec names none, its
    cotangent is one value, the same on all ranks. Every transform of torch.func and torch.autograd composes with it, in
    any nesting, except ``linearize``. A derivative that is taken *inside* of ``f`` treats every rank's values as
    variables of their own: ``grad(h)(x)`` is the derivative of the sum of all ranks' ``h`` by this rank's ``x``
    (JAX with ``check_vma=False``), so ``psum`` your local gradients, and keep the ``psum`` of a loss out of ``h``.

    Args:
        f: ``f(*slices)``. It must not close over tensors that need a gradient: pass them as arguments.
        mesh: the mesh; its axes are in scope inside.
        in_specs: a pytree prefix of the arguments with specs as leaves: one ``P`` for all, or a tuple with one entry an
            argument. Other arguments than tensors pass through, and need specs without axes.
        out_specs: a pytree prefix of the result.
        slices: on ranks, take and return slices in the place of global tensors.
        check: compare results over the axes that their specs do not name, along which they must be equal, as
            ``jax.shard_map(check_vma=True)`` does by types; and global arguments over all axes. True compares at every
            call, False never. None, the default, compares at the first call for each structure and shapes, and always
            on a virtual mesh.

    Returns:
        A function of slices, or of global tensors.

    Raises:
        AxisError: the mesh lacks an axis of a spec, or a shard_map lies inside of another.
        CollectiveError: a spec does not fit its tensor, ``f`` closes over a tensor that needs a gradient, or there are
            no ranks that could have slices.
        ReplicationError: a result differs between ranks where its spec says that it does not, or an argument does.
        TreeError: specs are not a prefix of the arguments or the result.
        CommError: ``f`` raised on another rank, while this one waited for it.

    >>> mesh = fs.virtual_mesh((4,), ("data",))
    >>> mean = fs.shard_map(lambda x: fs.collectives.psum(x.sum(), "data") / 8, mesh, fs.P("data"), fs.P())
    >>> mean(torch.arange(8.0)), torch.func.grad(mean)(torch.arange(8.0))[0]
    (tensor(3.5000), tensor(0.1250))
    """
    wants: list[Want] = [
        ("f", f, Callable, "a function of slices"),
        ("mesh", mesh, Mesh, "what fs.make_mesh or fs.virtual_mesh returned"),
    ]
    wants.append(("slices", slices, bool, "True or False"))
    expect("fs.shard_map(f, mesh, in_specs, out_specs)", wants, CollectiveError)
    _check_specs(in_specs, "in_specs", "argument")
    _check_specs(out_specs, "out_specs", "result")
    mapped = MappedFunction(f, mesh, in_specs, out_specs, slices, check)

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        return mapped(*args)

    return untraced(call)


@dataclass(frozen=True, eq=False)
class MappedFunction:
    """A function and its specs."""

    f: Callable[..., Any]
    mesh: Mesh
    in_specs: Tree
    out_specs: Tree
    slices: bool
    check: bool | None
    checked: set[Any] = field(default_factory=set)

    def __call__(self, *args: Any) -> Any:
        """Call it with global tensors, or with slices."""
        scope = SCOPE.get()
        if scope is not None and scope.implicit:
            raise AxisError(
                f"a shard_map over {self.mesh.axis_names} inside of a function over {scope.mesh.axis_names}: all axes "
                f"of a mesh are mapped at once, and none is left for another shard_map. Call the inner function "
                f"itself: what it is given are slices already, and its collectives find their axes"
            )
        with cutting(self.mesh):
            return self._called(args)

    def _called(self, args: tuple[Any, ...]) -> Any:
        check_captured(self.f)
        leaves, structure = tree.flatten(args)
        specs = _specs_of(self.in_specs, args, "in_specs", "args")
        everywhere = isinstance(self.mesh, VirtualMesh) and self.mesh.transport is None
        names = [f"shard_map: {name}" for name in tree.names(args, "args")]
        for leaf, spec, name in zip(leaves, specs, names, strict=True):
            _check_leaf(leaf, spec, self.mesh, name, not self.slices)
        if not everywhere:
            return self._here(leaves, specs, structure, names)
        if self.slices:
            raise CollectiveError(
                "shard_map(slices=True) was called outside of mesh.run, where there is no rank that has slices: call "
                "it inside of mesh.run(...), or with global tensors and slices=False"
            )
        assert isinstance(self.mesh, VirtualMesh)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        in_specs = tuple(spec for leaf, spec in zip(leaves, specs, strict=True) if isinstance(leaf, Tensor))

        def spmd(*slices: Tensor) -> Any:
            given = iter(slices)
            mine = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return self.local(mine, specs, structure)

        return on_all_ranks(self.mesh, spmd, in_specs, tensors)

    def _here(self, leaves: list[Any], specs: list[P], structure: Any, names: list[str]) -> Any:
        """The result on a rank that makes the call with all others."""
        if self.slices:
            results, _, rest = self.local(leaves, specs, structure)
            return rest(results)
        self._check_whole(leaves, names)
        mine = [self._cut(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
        results, out_specs, rest = self.local(mine, specs, structure)
        return rest(list(map(self._assemble, results, out_specs)))

    def local(self, leaves: list[Any], specs: list[P], structure: Any) -> tuple[list[Tensor], tuple[P, ...], Any]:
        """Run it on this rank.

        Returns:
            The result's tensors, their specs, and a function from tensors to the result.
        """
        args = [self._enter(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True)]
        ties = ties_of(args)
        with cutting(self.mesh), bind(self.mesh, self.mesh.axis_names, ties), exact():
            result = self.f(*tree.unflatten(structure, args))
        out, form = tree.flatten(result)
        out_specs, names = _specs_of(self.out_specs, result, "out_specs", "result"), tree.names(result, "result")
        check = self._checks(leaves, out)
        for number, (leaf, spec, name) in enumerate(zip(out, out_specs, names, strict=True)):
            _check_leaf(leaf, spec, self.mesh, f"shard_map: {name}", False)
            leaf = leaf if ties is None else ties.tied(leaf)
            out[number] = self._leave(leaf, spec, f"shard_map: {name} with {spec}", check)
        at = [number for number, leaf in enumerate(out) if isinstance(leaf, Tensor)]

        def rest(tensors: list[Tensor]) -> Any:
            final = list(out)
            for number, tensor in zip(at, tensors, strict=True):
                final[number] = tensor
            return tree.unflatten(form, final)

        return [out[number] for number in at], tuple(out_specs[number] for number in at), rest

    def _check_whole(self, leaves: list[Any], names: list[str]) -> None:
        """Compare global tensors between ranks. Inside of a transform their values are not known."""
        check = self._checks(leaves, [])
        if self.mesh.size == 1 or not check or peek_interpreter_stack() is not None:
            return
        for leaf, name in zip(leaves, names, strict=True):
            if isinstance(leaf, Tensor):
                label = f"{name}, a global tensor (slices need slices=True),"
                check_invariant(Ranks(self.mesh, self.mesh.axis_names), leaf.detach(), label)

    def _cut(self, leaf: Any, spec: P) -> Any:
        return cut(leaf, spec, mesh=self.mesh) if isinstance(leaf, Tensor) and spec.axes else leaf

    def _assemble(self, leaf: Tensor, spec: P) -> Tensor:
        return assemble(leaf, spec, mesh=self.mesh) if spec.axes else leaf

    def _enter(self, leaf: Any, spec: P) -> Any:
        axes = other_axes(spec, self.mesh)
        if not axes or not differentiable(leaf):
            return leaf
        return apply(leaf, Vary(Ranks(self.mesh, axes)))

    def _leave(self, leaf: Any, spec: P, label: str, check: bool) -> Any:
        axes = other_axes(spec, self.mesh)
        if not isinstance(leaf, Tensor) or not axes:
            return leaf
        return apply(leaf, Settle(Ranks(self.mesh, axes), label, check))

    def _checks(self, leaves: list[Any], out: list[Any]) -> bool:
        if self.check is not None:
            return self.check
        if isinstance(self.mesh.transport, VirtualTransport):
            return True
        kind = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in (*leaves, *out))
        first = kind not in self.checked
        self.checked.add(kind)
        return first


def _check_specs(specs: Tree, what: str, one: str) -> None:
    """Refuse leaves other than specs. ``None`` stands for an argument that is None, as in JAX."""
    wrong = [leaf for leaf in tree.leaves(specs) if leaf is not None and not isinstance(leaf, P)]
    if wrong or specs is None:
        given = described(wrong[0] if wrong else None)
        raise CollectiveError(
            f"shard_map: {what} {'is' if specs is None else 'holds'} {given}: its leaves are specs, fs.P('data') for "
            f"what the axis divides and fs.P() for what is the same on all ranks: one for all, or a tuple with one for "
            f"each {one}"
        )


def _specs_of(specs: Tree, values: Tree, what: str, root: str) -> list[P]:
    """The spec of each leaf of the arguments, or of the result."""
    count = len(values) if isinstance(values, tuple) else 1
    if isinstance(specs, tuple) and not isinstance(values, tuple):
        values_are = described(values)
        raise TreeError(f"shard_map: {what} is a tuple of {len(specs)} specs, and the {root} is {values_are}: give one")
    if isinstance(specs, tuple) and len(specs) != count:
        raise TreeError(
            f"shard_map: {what} has {len(specs)} entries, and there are {count} {root}: give one spec for each, or one "
            f"fs.P for all of them"
        )
    try:
        found = tree.spread(specs, values)
    except TreeError as error:
        raise TreeError(
            f"shard_map: {what}={specs!r} is not a prefix of the structure of {root}: {_short(error)}. Give one fs.P "
            f"for all, a tuple with one entry for each, and for a dict or list one spec or one of the same structure"
        ) from error
    leaves, names = tree.leaves(values), tree.names(values, root)
    for leaf, spec, name in zip(leaves, found, names, strict=True):
        if spec is None and leaf is not None:
            raise CollectiveError(
                f"shard_map: {what} has None for {name}, which is {described(leaf)}: give fs.P() for what is the same "
                f"on all ranks"
            )
    return [P() if spec is None else spec for spec in found]


def _short(error: Exception) -> str:
    """optree's message without the values."""
    return str(error.__cause__ or error).split("; tuple:")[0].split("; dict:")[0].split(", got (")[0].rstrip(".")


def _check_leaf(leaf: Any, spec: P, mesh: Mesh, label: str, everywhere: bool) -> None:
    if isinstance(leaf, Tensor):
        check_spec(leaf, spec, mesh, label, everywhere)
    elif spec.axes:
        raise CollectiveError(f"{label} is {kind(leaf)}, which {spec} cannot divide: give it P()")
