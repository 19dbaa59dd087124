"""Ranks that transform a loss in different ways, or call different tools, raise an error that names them, at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import tree
from tests.shared.bad import Raised, attempt
from tests.shared.workers import Pools
from tests.transform import cases as cases
from tests.transform.test_transforms import FLAT, mine

F = torch.func
Case = tuple[Callable[..., Any], Callable[..., Any], str, str]


def recorded(f: Any, p: Any, v: Any, x: Any) -> Any:
    """By plain autograd."""
    return f(tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), p), x)


CASES: dict[str, Case] = {
    # what rank 0 does, what the others do, and what the error says of each
    "grad and jvp": (
        lambda f, p, v, x: F.grad(f)(p, x),
        lambda f, p, v, x: F.jvp(lambda p: f(p, x), (p,), (v,)),
        "under grad by table and 10 more leaves",
        "under jvp by table and 10 more leaves",
    ),
    "nested otherwise": (
        cases.CASES["forward over reverse"],
        cases.CASES["reverse over forward"],
        "jvp by table and 10 more leaves, grad by table",
        "grad by table and 10 more leaves, jvp by table",
    ),
    "of other arguments": (
        lambda f, p, v, x: F.grad(f)(p, x),
        lambda f, p, v, x: F.grad(lambda scale: f({**p, "scale": scale}, x))(p["scale"]),
        "under grad by table and 10 more leaves",
        "under grad by scale,",
    ),
    "of more members": (
        lambda f, p, v, x: torch.vmap(f, (0, None))(cases.stacked(p), x),
        lambda f, p, v, x: torch.vmap(f, (0, None))(tree.map(lambda leaf: leaf[:2], cases.stacked(p)), x),
        "under vmap of 3 by table",
        "under vmap of 2 by table",
    ),
    "none on one rank": (lambda f, p, v, x: f(p, x), recorded, "under no transform", "under torch.autograd by table"),
}


def apart(name: str, reshard: bool) -> tuple[Raised | None, bool]:
    """On a rank: what it raised, and whether a call that all ranks make alike is right after it."""
    first, others, *_ = CASES[name]
    with fs.make_mesh(*FLAT) as mesh:
        plan, x = cases.plan_on(mesh), mine(cases.batch(), mesh)
        params, v = fs.shard(cases.whole(), plan), fs.shard(cases.directions(), plan)
        f = fs.func.sharded_loss(cases.weighted_loss, plan, reshard=reshard)
        found = attempt(lambda: (others if mesh.rank else first)(f, params, v, x))
        want = cases.reference(cases.weighted_loss)(cases.whole(), cases.batch())
        return found, torch.allclose(f(params, x), want)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_an_error_names_the_transforms_of_each_rank(name: str, reshard: bool) -> None:
    check(fs.virtual_mesh((2,), ("any",)).run(apart, name, reshard), *CASES[name][2:])


def test_it_does_on_processes(pool: Pools) -> None:
    check(pool(2).run(apart, "grad and jvp", True), *CASES["grad and jvp"][2:])


def check(found: list[tuple[Raised | None, bool]], first: str, second: str) -> None:
    """All ranks raised the same error, and go on."""
    for raised, right in found:
        assert raised is not None and "ScheduleError" in raised.kinds, raised
        one, other = raised.text.partition("rank 1:")[::2]
        assert first in one and second in other and right, raised.text


def other_tools() -> list[Raised | None]:
    """On a rank: what pairs of different tools raise."""
    with fs.make_mesh(*FLAT) as mesh:
        plan, x = cases.plan_on(mesh), mine(cases.batch(), mesh)
        params, v = fs.shard(cases.whole(), plan), fs.shard(cases.directions(), plan)
        f = fs.func.sharded_loss(cases.weighted_loss, plan)
        products = {kept: fs.func.hvp(cases.weighted_loss, plan, reshard=not kept) for kept in (True, False)}
        pairs: list[tuple[Any, Any]] = [
            (lambda: products[True](params, v, x), lambda: F.grad(f)(params, x)),
            (lambda: products[True](params, v, x), lambda: fs.func.linearize(cases.predict, plan)(params, x)),
            (lambda: products[True](params, v, x), lambda: products[False](params, v, x)),
        ]
        return [attempt(one if mesh.rank else other) for one, other in pairs]


def test_different_tools_are_told_apart() -> None:
    for own in fs.virtual_mesh((2,), ("any",)).run(other_tools):
        assert all(each is not None and {"ScheduleError", "ReplicationError"} & set(each.kinds) for each in own), own
        assert "schedule.reshard: rank 0: True, rank 1: False" in own[2].text, own[2]


def tools(loss: Any, plan: fs.Plan) -> dict[str, Callable[[Any, Any, Any], Any]]:
    """Calls of all tools that run on schedules, each of a loss of outputs, which are the loss itself."""
    of, key = fs.func, fs.random.key(0)
    return {
        "hvp": of.hvp(loss, plan),
        "gnvp": of.gnvp(lambda p, x: loss(p, x).sin(), lambda out, x: out.square(), plan),
        "jvp": of.jvp(loss, plan),
        "trace": lambda p, v, x: of.hessian_trace_samples(loss, plan, 2)(p, x, key),
        "per_sample_grad": lambda p, v, x: of.per_sample_grad(loss, plan)(p, x),
        "clipped_grad": lambda p, v, x: of.clipped_grad(loss, plan, 1.0)(p, x),
        "clipped_grad in parts": lambda p, v, x: of.clipped_grad(loss, plan, 1.0, microbatch=2)(p, x),
        "sharded_loss": lambda p, v, x: F.grad(of.sharded_loss(loss, plan))(p, x),
    }


def lacking(raising: bool) -> list[tuple[str, Any]]:
    """On a rank: what tools do where the loss of the other one fails, always, or where it has no values."""
    with fs.make_mesh(*FLAT) as mesh:
        plan, x = cases.plan_on(mesh), mine(cases.batch(), mesh)
        params, v = fs.shard(cases.whole(), plan), fs.shard(cases.directions(), plan)

        def loss(p: Any, x: Any) -> Any:
            if mesh.rank == 1 and (raising or x["y"].sum() < 0):
                raise ZeroDivisionError("no such luck")
            return cases.mean_loss(p, x)

        own, plain, out = tools(loss, plan), tools(cases.mean_loss, plan), list[tuple[str, Any]]()
        for name, tool in own.items():
            if raising:
                out.append((name, attempt(lambda tool=tool: tool(params, v, x))))
            elif name not in ("per_sample_grad", "clipped_grad", "clipped_grad in parts"):  # there it is an error
                found = zip(*[tree.leaves(each(params, v, x)) for each in (tool, plain[name])], strict=True)
                out.append((name, all(torch.allclose(one, other) for one, other in found)))
        return out


def check_peers(found: list[list[tuple[str, Raised | None]]]) -> None:
    """All ranks say which of them failed, and with what."""
    for (name, told), (_, own) in zip(*found, strict=True):
        assert own is not None and own.kinds[0] == "ZeroDivisionError", (name, own)
        assert told is not None and told.kinds[0] == "PeerError" and "rank 1: ZeroDiv" in told.text, (name, told)


def test_a_loss_that_raises_on_one_rank_is_told_on_all(pool: Pools) -> None:
    check_peers(pool(2).run(lacking, True))


def test_no_rank_uses_a_schedule_that_another_lacks() -> None:
    for own in fs.virtual_mesh((2,), ("any",)).run(lacking, False):
        assert own and all(right for _, right in own), own
