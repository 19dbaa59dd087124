"""Ranks that do different things inside of one ``fs.shard_map``: values and derivatives of what it denotes."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

import fshard as fs
from fshard import P
from fshard import collectives as c
from fshard.errors import AxisError, CollectiveError, CommError, TreeError
from tests.shared.workers import Pools

RANKS, ROWS = 3, 3
CALLS = ("psum", "pmean", "ppermute", "all_gather", "psum_scatter")
Step = tuple[str, tuple[bool, ...], tuple[bool, ...], float]


def drawn(seed: int) -> list[Step]:
    """A program: collectives, the ranks that give them a constant, and those that use what comes back."""
    draw = random.Random(seed)

    def some() -> tuple[bool, ...]:
        return tuple(draw.random() < 0.5 for _ in range(RANKS))

    return [(draw.choice(CALLS), some(), some(), draw.uniform(0.5, 2)) for _ in range(draw.randint(1, 4))]


def per_rank(program: list[Step], x: Tensor) -> Tensor:
    """What each rank runs."""
    rank = c.axis_index("i")
    for call, constant, used, factor in program:
        given = torch.full_like(x, factor).detach() if constant[rank] else (x * factor).sin()
        if call == "all_gather":
            got = c.all_gather(given, "i").prod(0)
        elif call == "psum_scatter":
            got = c.psum_scatter(given, "i", tiled=True).expand_as(x)
        elif call == "ppermute":
            got = c.ppermute(given, "i", [(0, 1), (1, 2), (2, 0)])
        else:
            got = getattr(c, call)(given, "i")
        x = x * 1.5 + got if used[rank] else x.cos()
    return x


def denoted(program: list[Step], whole: Tensor) -> Tensor:
    """The same on the values of all ranks at once."""
    xs = list(whole.chunk(RANKS))
    for call, constant, used, factor in program:
        given = [torch.full_like(x, factor) if constant[r] else (x * factor).sin() for r, x in enumerate(xs)]
        total, every = torch.stack(given).sum(0), torch.stack(given).prod(0)
        got = {
            "psum": [total] * RANKS,
            "pmean": [total / RANKS] * RANKS,
            "ppermute": [given[r - 1] for r in range(RANKS)],
            "all_gather": [every] * RANKS,
            "psum_scatter": [total[r : r + 1].expand_as(total) for r in range(RANKS)],
        }[call]
        xs = [x * 1.5 + got[r] if used[r] else x.cos() for r, x in enumerate(xs)]
    return torch.cat(xs)


def derivatives(f: Callable[[Tensor], Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Values and derivatives of a function of a global tensor."""
    x, v = torch.linspace(0.1, 1, RANKS * ROWS).double(), torch.linspace(1, -1, RANKS * ROWS).double()

    def loss(x: Tensor) -> Tensor:
        return f(x).pow(3).sum()

    return {
        "value": lambda: f(x),
        "grad": lambda: grad(loss)(x),
        "jvp": lambda: jvp(f, (x,), (v,))[1],
        "vmap": lambda: torch.vmap(f)(torch.stack([x, v])),
        "vmap of grad": lambda: torch.vmap(grad(loss))(torch.stack([x, v])),
        "forward over reverse": lambda: jvp(grad(loss), (x,), (v,))[1],
        "reverse over reverse": lambda: vjp(grad(loss), x)[1](v)[0],
    }


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("seed", range(4, 10))
def test_generated_functions(seed: int) -> None:
    program, mesh = drawn(seed), fs.virtual_mesh((RANKS,), ("i",))
    mapped = fs.shard_map(lambda x: per_rank(program, x), mesh, P("i"), P("i"))
    got, want = derivatives(mapped), derivatives(lambda x: denoted(program, x))
    for name, value in want.items():
        try:
            found = got[name]()
        except CommError:  # what adjoints give is not tied: derivatives of these may be refused, and are never wrong
            assert "over" in name or "vmap of" in name, (program, name)
        else:
            torch.testing.assert_close(found, value(), msg=f"{program}: {name}")


def gradients(seeds: int) -> list[Tensor]:
    """On a rank: gradients of generated functions by plain autograd."""
    with fs.make_mesh((-1,), ("i",)) as mesh:
        out = []
        for seed in range(seeds):
            whole = torch.linspace(0.1, 1, RANKS * ROWS).double()
            mine = whole.chunk(RANKS)[mesh.rank].clone().requires_grad_()
            mapped = fs.shard_map(functools.partial(per_rank, drawn(seed)), mesh, P("i"), P("i"), slices=True)
            out += torch.autograd.grad(mapped(mine).pow(3).sum(), mine)
        return out


def test_generated_functions_on_real_ranks(pool: Pools) -> None:
    ranks = pool(RANKS).run(gradients, 8)
    for seed, slices in enumerate(zip(*ranks, strict=True)):
        x = torch.linspace(0.1, 1, RANKS * ROWS).double()
        program = drawn(seed)
        want = torch.func.vjp(functools.partial(denoted, program), x)[1](3 * denoted(program, x).square())[0]
        torch.testing.assert_close(torch.cat(slices), want, msg=f"{program}")


class Holder:
    """A plain object."""

    def __init__(self, w: Tensor) -> None:
        self.inner = {"w": [w]}


MESH, X = fs.virtual_mesh((2,), ("i",)), torch.arange(4.0)
NESTED = fs.shard_map(lambda x: x, MESH, P("i"), P("i"))
HOLDER, LEAF = Holder(torch.ones(2, requires_grad=True)), torch.ones(2, requires_grad=True)
w = torch.ones(2, requires_grad=True)  # a global whose name is an attribute elsewhere

BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: fs.shard_map(lambda x: x, MESH, None, P()), CollectiveError, r"in_specs is None: its leaves are specs"),
    (lambda: fs.shard_map(lambda x: x, MESH, P("i"), "i"), CollectiveError, r"out_specs holds 'i', a str"),
    (lambda: fs.shard_map(MESH, lambda x: x, P(), P()), CollectiveError, r"f is a VirtualMesh: give a function"),
    (lambda: fs.shard_map(lambda x: x, None, P(), P()), CollectiveError, r"mesh is None: give what fs\.make_mesh"),
    (
        lambda: fs.shard_map(lambda x, y: x, MESH, (P("i"),), P("i"))(X, X),
        TreeError,
        r"in_specs has 1 entries, and there are 2 args: give one spec for each",
    ),
    (
        lambda: fs.shard_map(lambda x: (x, x), MESH, P("i"), (P("i"),))(X),
        TreeError,
        r"out_specs has 1 entries, and there are 2 result",
    ),
    (lambda: fs.shard_map(lambda x: x, MESH, P("i"), (P("i"),))(X), TreeError, r"a tuple of 1 specs, and the result"),
    (
        lambda: fs.shard_map(lambda x: x, MESH, [P("i")], P("i"))(X),
        TreeError,
        r"is not a prefix of the structure of args",
    ),
    (
        lambda: fs.shard_map(lambda x: x["b"], MESH, ({"a": P("i")},), P("i"))({"b": X}),
        TreeError,
        r"dictionary key mismatch; expected key\(s\): \['a'\], got key\(s\): \['b'\]",
    ),
    (
        lambda: fs.shard_map(lambda x, y: x, MESH, (P("i"), None), P("i"))(X, X),
        CollectiveError,
        r"None for args\[1\], which is a Tensor: give fs\.P\(\)",
    ),
    (lambda: fs.shard_map(NESTED, MESH, P("i"), P("i"))(X), AxisError, "all axes of a mesh are mapped at once"),
    (lambda: fs.shard_map(lambda x: x * HOLDER.inner["w"][0], MESH, P("i"), P("i"))(X), CollectiveError, "HOLDER"),
    (lambda: fs.shard_map(lambda x: x * LEAF, MESH, P("i"), P("i"))(X), CollectiveError, "LEAF"),
]


@pytest.mark.parametrize(("call", "error", "says"), BAD)
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_none_is_the_spec_of_none() -> None:
    mapped = fs.shard_map(lambda x, y: x if y is None else y, MESH, (P("i"), None), P("i"))
    assert torch.equal(mapped(X, None), X)


def test_names_of_attributes_are_no_globals() -> None:
    class Plain:
        w = 2.0

    assert torch.equal(fs.shard_map(lambda x: x * Plain().w, MESH, P("i"), P("i"))(X), 2 * X)


def test_checkpoints_of_pytorch_under_transforms() -> None:
    from torch.utils.checkpoint import checkpoint

    mesh = fs.make_mesh((-1,), ("shard",))
    plan = fs.make_plan({"w": torch.ones(3)}, mesh, [(".*", fs.fsdp("shard"))])

    for reentrant in (False, True):

        def loss(p: Any, x: Tensor, reentrant: bool = reentrant) -> Tensor:
            out: Tensor = checkpoint(lambda w: (w * x).sin().sum(), p["w"], use_reentrant=reentrant)
            return out

        f = fs.func.sharded_loss(loss, plan)
        with pytest.raises(fs.errors.TransformError, match=r"call fs\.remat\(fn\)\(\*args\) in its place"):
            grad(f)({"w": torch.ones(3)}, X[:3])
