"""Random nests of transforms over random programs equal their unsharded forms, or are refused with a reason."""

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
from fshard.collectives import psum
from fshard.errors import ShardError
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
    except ShardError as error:
        return f"refused: {type(error).__name__}: {str(error).splitlines()[0]}", ""
    except Exception as error:
        return ("as in PyTorch", "") if want is None else ("raised", f"{type(error).__name__}: {error}"[:300])
    if want is None:
        return "only here", ""
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
    counts, bad = outcomes(range(ranks, 12, 3), ranks)
    assert not bad, "\n".join(bad)
    assert counts["equal"] >= 2
