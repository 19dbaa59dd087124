"""Random nests of transforms over random programs equal their unsharded forms, or are refused with a reason."""

import itertools
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.collectives import pmean, psum, use_mesh
from fshard.errors import CommError, PeerError, ShardError
from tests.transform.nests import Point, draw_nest, nested
from tests.transform.programs import Program, draw_program
from tests.transform.test_transforms import differences, mine

F = torch.func
PARTS = 2


def in_parts(x: Any, ranks: int) -> Any:
    """A batch of this many ranks as parts with rows of each."""

    def cut(leaf: Tensor) -> Tensor:
        return leaf.unflatten(0, (ranks, PARTS, -1)).transpose(0, 1).flatten(1, 2)

    return tree.map(cut, x)


def over_parts(f: Callable[[Any, Any], Tensor], parts: Any) -> Callable[[Any], Tensor]:
    """Losses of parts of the batch, at once, with weights."""
    weights = torch.tensor([1.0, 0.5]).double()
    return lambda p: (torch.vmap(f, (None, 0))(p, parts) * weights).sum()


def plain(program: Program, base: str, v: Any, ranks: int) -> Callable[[Any], Any]:
    """The base of a nest, on whole leaves and the global batch."""
    x = program.batch()

    def still(p: Any) -> Any:
        return {**p, "frozen": p["frozen"].detach()}

    def value(found: Any) -> Tensor:
        return found.value if isinstance(found, fs.Mean) else found

    def loss(p: Any, x: Any) -> Tensor:
        return value(program.loss()(still(p), x))

    def product(p: Any) -> Any:
        def out(p: Any) -> Tensor:
            return program.predict(still(p), x)

        at, moved = F.jvp(out, (p,), (v,))
        curved = F.jvp(F.grad(lambda out: value(program.of(out, x))), (at,), (moved,))[1]
        return F.vjp(out, p)[1](curved)[0]

    return {
        "loss": lambda p: loss(p, x),
        "parts": over_parts(loss, in_parts(x, ranks)),
        "slope": lambda p: F.jvp(lambda p: loss(p, x), (p,), (v,))[1],
        "value_and_grad": F.grad(lambda p: loss(p, x)),
        "hvp": lambda p: F.jvp(F.grad(lambda p: loss(p, x)), (p,), (v,))[1],
        "gnvp": product,
    }[base]


def sharded(program: Program, base: str, v: Any, plan: fs.Plan, reshard: bool) -> Callable[[Any], Any]:
    """The same on this rank's shards and rows."""
    x, total = mine(program.batch(), plan.mesh), lambda x: psum(x, "shard")
    loss = program.loss(total)
    if base in ("loss", "parts"):
        f = fs.func.sharded_loss(loss, plan, reshard=reshard)
        return (lambda p: f(p, x)) if base == "loss" else over_parts(f, in_parts(x, 1))
    if base == "value_and_grad":
        gradient = fs.value_and_grad(loss, plan, schedule=fs.Policy(reshard=reshard))
        return lambda p: gradient(p, x)[1]
    if base == "slope":
        along = fs.func.jvp(loss, plan, reshard=reshard)
        return lambda p: along(p, v, x)[1]
    if base == "hvp":
        product = fs.func.hvp(loss, plan, reshard=reshard)
        return lambda p: product(p, v, x)
    product = fs.func.gnvp(lambda p, x: program.predict(p, x, total), program.of, plan)
    return lambda p: product(p, v, x)


def drawn(seed: int) -> tuple[Program, tuple[str, ...], bool]:
    """The program of a seed, a nest, and whether units are gathered again."""
    draw = random.Random(seed)
    return draw_program(draw), draw_nest(draw), draw.random() < 0.5


def whole(seed: int, ranks: int) -> Any:
    """What the unsharded form gives; None where PyTorch has no such derivative."""
    program, (base, *names), _ = drawn(seed)
    params, v = program.params(), program.params(1)

    def dot(a: Any, b: Any) -> Tensor:
        return sum([(x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)])

    try:
        return nested(plain(program, base, v, ranks), tuple(names), Point(params, v, dot))(params)
    except (RuntimeError, NotImplementedError):
        return None


def one(seed: int, want: Any, mesh: fs.Mesh) -> tuple[str, str]:
    """On a rank: the outcome of a seed, and what is wrong with it."""
    program, (base, *names), reshard = drawn(seed)
    plan = program.plan(mesh)
    params, v = fs.shard(program.params(), plan), fs.shard(program.params(1), plan)
    at = Point(params, v, lambda a, b: fs.tree.vdot(a, b, plan))
    try:
        got = nested(sharded(program, base, v, plan, reshard), tuple(names), at)(params)
    except Exception as error:
        if isinstance(error, ShardError) and not isinstance(error, CommError | PeerError):
            return f"refused: {type(error).__name__}: {str(error).splitlines()[0]}", ""
        return ("as in PyTorch", "") if want is None else ("raised", f"{type(error).__name__}: {error}"[:300])
    if want is None:
        return "only here", ""
    if not all([bool(leaf.isfinite().all()) for leaf in tree.leaves(want)]):
        return "not finite", ""  # an inner step that diverges
    wrong = differences(got, want, plan, "")
    return "equal", "; ".join(wrong)


def every(seeds: list[int], wants: list[Any]) -> list[tuple[str, str]]:
    """On a rank: the outcomes of seeds."""
    with fs.make_mesh((-1,), ("shard",)) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [one(seed, want, mesh) for seed, want in zip(seeds, wants, strict=True)]


def outcomes(seeds: range, ranks: int) -> tuple[Counter[str], list[str]]:
    """How many seeds came to what, and those that went wrong on some rank."""
    wants = [whole(seed, ranks) for seed in seeds]
    found = fs.virtual_mesh((ranks,), ("shard",)).run(every, [*seeds], wants)
    bad, counts = [], Counter[str]()
    for seed, results in zip(seeds, zip(*found, strict=True), strict=True):
        counts[results[0][0]] += 1
        wrong = {text for _, text in results if text} | ({str(results)} if len({r for r, _ in results}) > 1 else set())
        bad += [f"{seed} on {ranks}: {drawn(seed)}\n   {text}" for text in wrong]
    return counts, bad


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_nests_of_transforms_over_programs(ranks: int) -> None:
    counts, bad = outcomes(range(ranks, 10, 3), ranks)
    assert not bad, "\n".join(bad)
    assert counts["equal"] == 3


CHUNK = 10


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(0, 1000, CHUNK))
def test_a_thousand(begin: int) -> None:
    counts, bad = outcomes(range(begin, begin + CHUNK), 1 + begin // CHUNK % 3)
    assert not bad, "\n".join(bad)
    assert counts["equal"] >= CHUNK * 0.8, counts


CALLS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "grad": lambda f: F.grad(f),
    "along": lambda f: lambda x: F.jvp(f, (x,), (DIRECTION,))[1],
    "directions": lambda f: (
        lambda x: torch.vmap(lambda v: F.jvp(f, (x,), (v,))[1])(torch.stack([DIRECTION, X / 2])).sum(0)
    ),
    "ensemble": lambda f: lambda x: torch.vmap(f)(torch.stack([x, 2 * x])).sum(0),
    "dot": lambda f: lambda x: (f(x) * DIRECTION).sum(),
}
X, DIRECTION = torch.linspace(-1, 1, 3).double(), torch.tensor([0.3, -0.2, 0.5]).double()


def chains(length: int) -> list[tuple[str, ...]]:
    """Nests of that many transforms, which take up to three derivatives."""
    found = []
    for names in itertools.product(CALLS, repeat=length):
        scalar, fits = True, sum(name in ("grad", "along", "directions") for name in names) <= 3
        for name in names:
            fits &= name != ("dot" if scalar else "grad")
            scalar = name == "dot" or (scalar and name != "grad")
        found += [names] * fits
    return found


def cubes(x: Tensor) -> Tensor:
    """A scalar."""
    return (x.sin() ** 3).sum()


def averaged(x: Tensor) -> Tensor:
    """The same of equal values on all ranks."""
    return pmean(pmean(x, "shard").sin() ** 3, "shard").sum()


def collectives(names: list[tuple[str, ...]]) -> list[str]:
    """On a rank: the nests in which a sum over ranks is not the linear map that it is."""
    mesh, out = fs.make_mesh((-1,), ("shard",)), []
    with use_mesh(mesh):
        for nest in names:
            ours, plain = averaged, cubes
            for name in nest:
                ours, plain = CALLS[name](ours), CALLS[name](plain)
            out += [str(nest)] * (not torch.allclose(ours(X), plain(X), rtol=1e-9))
    return out


@pytest.mark.parametrize("length", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_collectives_under_chains_of_transforms(length: int) -> None:
    assert not collectives(chains(length))


def members() -> Tensor:
    """On a rank: the slopes of an ensemble along one direction, which is no batch."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        whole = {"a": torch.arange(5.0).double(), "b": torch.arange(30.0).double()}
        plan = fs.make_plan(whole, mesh, [(".*", fs.fsdp("shard"))])
        params, v = fs.shard(whole, plan), fs.shard(tree.map(torch.ones_like, whole), plan)
        along = fs.func.jvp(lambda p, x: p["a"].square().sum() * p["b"].sum() * x, plan, reshard=False)
        two = tree.map(lambda leaf: torch.stack([leaf, 2 * leaf]), params)
        found: Tensor = torch.vmap(lambda p: along(p, v, torch.ones(()).double())[1])(two)
        return found


def test_a_batch_of_a_tangent_is_one_on_every_rank() -> None:
    """PyTorch copies a tangent that lies otherwise than its primal to a batch like that, and no other."""
    slope = 20 * 435 + 30 * 30  # at the first member; the second is twice as far
    for found in fs.virtual_mesh((2,), ("shard",)).run(members):
        assert found.tolist() == [slope, 4 * slope]
