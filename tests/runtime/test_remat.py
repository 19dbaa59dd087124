"""``fs.remat``: right under every transform, smaller in memory, and honest about what it cannot do."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import checkpoint_policies as policies
from fshard import tree
from fshard.errors import KeyReuseError, PlanError, RematError
from tests.runtime.test_policies import Count

KEY = fs.random.key(3)
aten = torch.ops.aten


def body(p: Any, x: Tensor, key: Tensor, *, layers: int = 2) -> tuple[Tensor, dict[str, Any]]:
    """A network with keyed noise, whose result is a pytree of tensors of several dtypes and other things."""
    h = x
    for _ in range(layers):
        h = torch.tanh(h @ p["w"] + p["b"])
    h = fs.random.dropout(key, h, 0.3)
    return h.square().sum(), {"h": h, "index": h.argmax(), "layers": layers, "none": None, "same": x}


def params(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(4, 4, generator=draw, dtype=torch.float64),
        "b": torch.randn(4, generator=draw, dtype=torch.float64),
    }


P, V, X = params(0), params(1), torch.randn(3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
F = torch.func
Body = Callable[..., Any]


def scalar(f: Body) -> Callable[[Any, Tensor], Tensor]:
    return lambda p, x: f(p, x, KEY)[0]


def hidden(f: Body) -> Callable[[Tensor], Tensor]:
    return lambda x: f(P, x, KEY)[1]["h"]


def third(f: Body) -> Any:
    def inner(p: Any) -> Tensor:
        (hv,) = F.vjp(lambda p: F.grad(scalar(f))(p, X), p)[1](V)
        return hv["w"].sum() + hv["b"].sum()

    return F.grad(inner)(P)


def twice(f: Body) -> Any:
    leaves = {k: v.clone().requires_grad_() for k, v in P.items()}
    grads = torch.autograd.grad(scalar(f)(leaves, X), list(leaves.values()), create_graph=True)
    return torch.autograd.grad(sum((g**2).sum() for g in grads), list(leaves.values()))  # type: ignore[arg-type]


CASES: dict[str, Callable[[Body], Any]] = {
    "value": lambda f: f(P, X, KEY),
    "grad": lambda f: F.grad(scalar(f), argnums=(0, 1))(P, X),
    "grad with aux": lambda f: F.grad(lambda p: (f(p, X, KEY)[0], f(p, X, KEY)[1]["index"]), has_aux=True)(P),
    "vjp": lambda f: F.vjp(scalar(f), P, X)[1](torch.tensor(2.0).double()),
    "jvp": lambda f: F.jvp(scalar(f), (P, X), (V, X)),
    "forward over reverse": lambda f: F.jvp(lambda p: F.grad(scalar(f))(p, X), (P,), (V,)),
    "reverse over forward": lambda f: F.grad(lambda p: F.jvp(lambda p: scalar(f)(p, X), (p,), (V,))[1])(P),
    "reverse over reverse": lambda f: F.vjp(lambda p: F.grad(scalar(f))(p, X), P)[1](V),
    "third order": third,
    "hessian": lambda f: F.hessian(scalar(f))(P, X),
    "hessian of a plain sum": lambda f: F.hessian(lambda x: hidden(f)(x).sum())(X),  # cotangents are expanded
    "jacrev": lambda f: F.jacrev(hidden(f))(X),
    "jacfwd": lambda f: F.jacfwd(hidden(f))(X),
    "vmap of grad": lambda f: torch.vmap(F.grad(scalar(f)), (None, 0))(P, X),
    "vmap over keys": lambda f: torch.vmap(lambda x, k: f(P, x, k)[1]["h"])(X, fs.random.split(KEY, 3)),
    "grad of vmap": lambda f: F.grad(lambda p: torch.vmap(scalar(f), (None, 0))(p, X).sum())(P),
    "double backward": twice,
    "nested": lambda f: F.grad(scalar(fs.remat(lambda p, x, k: f(p, f(p, x, k)[1]["h"], k))))(P, X),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_function_itself(case: str) -> None:
    got, expected = tree.leaves(CASES[case](fs.remat(body))), tree.leaves(CASES[case](body))
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14) if isinstance(b, Tensor) else a == b


@pytest.mark.parametrize(
    "policy",
    [policies.dots, policies.everything, policies.saving(aten.tanh)],
    ids=repr,
)
def test_policies_in_plain_autograd(policy: policies.SavePolicy) -> None:
    leaves = {k: v.clone().requires_grad_() for k, v in P.items()}
    grads = [torch.autograd.grad(scalar(f)(leaves, X), list(leaves.values())) for f in (body, fs.remat(body, policy))]
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*grads, strict=True))
    if policy.ops:
        with pytest.raises(RuntimeError, match="selective activation checkpoint"):
            twice(fs.remat(body, policy))


def test_policies_decide_what_runs_again() -> None:
    products = {}
    for policy in (None, policies.dots, policies.everything):
        leaves = {k: v.clone().requires_grad_() for k, v in P.items()}
        with Count() as count:
            scalar(fs.remat(body, policy))(leaves, X).backward()
        products[policy] = count.calls[aten.mm]
    assert list(products.values()) == [7, 5, 5]  # none has a product for the gradient of X, which nobody wants


@pytest.mark.long
def test_under_compile() -> None:
    def step(p: Any, f: Body, g: Body) -> Any:
        return F.jvp(lambda p: F.grad(scalar(f))(p, X), (p,), (V,))[1], (scalar(f)(p, X) + scalar(g)(p, X)).sin()

    leaves = {k: v.clone().requires_grad_() for k, v in P.items()}
    f, g = fs.remat(body), fs.remat(body, policies.dots)
    compiled = torch.compile(lambda p: step(p, f, g), backend="aot_eager", fullgraph=True)
    results = [
        [*hv.values(), *torch.autograd.grad(loss, list(leaves.values()))]
        for hv, loss in (compiled(leaves), step(leaves, body, body))
    ]
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*results, strict=True))


class Most(TorchDispatchMode):
    """The most bytes of storages made inside that were alive after any operator."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree.leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weak = storage._weak_ref()
                    self.watched = [*getattr(self, "watched", []), (storage._cdata, weak)]
        for number, weak in list(getattr(self, "watched", [])):
            if torch.UntypedStorage._expired(weak):
                self.alive.pop(number, None)
                self.watched.remove((number, weak))
                torch.UntypedStorage._free_weak_ref(weak)
        self.most = max(self.most, sum(self.alive.values()))
        return out


def chain(f: Body, depth: int) -> Callable[[Any, Tensor], Tensor]:
    def loss(p: Any, x: Tensor) -> Tensor:
        for _ in range(depth):
            x = f(p, x)
        return x.sum()

    return loss


@pytest.mark.long
@pytest.mark.parametrize("transform", [F.grad, lambda f: lambda p, x: F.vjp(lambda p: F.grad(f)(p, x), p)[1](p)])
def test_it_saves_memory(transform: Any) -> None:
    def wide(p: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(torch.cat([x] * 8, 1).sin() @ torch.cat([p["w"]] * 8) / 8)
        return x

    x = torch.randn(512, 4, dtype=torch.float64)
    most = []
    for f in (wide, fs.remat(wide)):
        gc.collect()
        with Most() as watch:
            transform(chain(f, 6))(P, x)
        most.append(watch.most)
    assert most[1] < 0.5 * most[0]


def test_tensors_from_outside_are_refused() -> None:
    w = P["w"]

    def closed(w: Tensor, x: Tensor = X) -> Tensor:
        return fs.remat(lambda x: torch.cat([x @ w, x]).sum())(x)

    assert closed(w) == torch.cat([X @ w, X]).sum()  # a constant
    closed(w.clone().requires_grad_().detach())
    for call in (
        lambda: closed(w.clone().requires_grad_()),
        lambda: F.grad(closed)(w),
        lambda: F.jvp(closed, (w,), (w,)),
        lambda: F.grad(lambda w: torch.vmap(closed, (None, 0))(w, X).sum())(w),
        lambda: fs.remat(torch.nn.Linear(4, 4).double())(X),
    ):
        with pytest.raises(RematError, match=r"shape \[4, 4\].*pass it as an argument"):
            call()


def test_what_is_differentiated_inside_is_its_own() -> None:
    def forces(w: Tensor, x: Tensor) -> Tensor:
        return F.grad(lambda x: torch.tanh(x @ w).sum())(x).square().sum()

    assert torch.allclose(F.grad(fs.remat(forces))(P["w"], X), F.grad(forces)(P["w"], X))


def test_torchs_generator_is_refused() -> None:
    with pytest.raises(RematError, match="fs.random"):
        fs.remat(lambda x: torch.dropout(x, 0.5, True))(X)


def test_policies_that_a_transform_cannot_honour() -> None:
    with pytest.raises(RematError, match="fs.checkpoint_policies.dots"):
        F.grad(scalar(fs.remat(body, policies.dots)))(P, X)
    with pytest.raises(PlanError, match="fs.checkpoint_policies.nothing"):
        fs.remat(body, "dots")  # type: ignore[arg-type]


def test_autocast_is_that_of_the_call() -> None:
    w = torch.randn(8, 8, requires_grad=True)
    grads = []
    for f in (lambda w: torch.tanh(w @ w), fs.remat(lambda w: torch.tanh(w @ w))):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = f(w).float().sum()
        grads.append(torch.autograd.grad(out, w)[0])
    assert torch.allclose(*grads, rtol=0.1, atol=0.05)


def test_recomputation_is_no_second_use_of_a_key() -> None:
    again, x = scalar(fs.remat(body)), X.clone().requires_grad_()
    with fs.random.checked():
        again(P, x).backward()  # which draws once more
        with pytest.raises(KeyReuseError):
            again(P, x)


@pytest.mark.parametrize(
    "fn",
    [lambda p, x: x + p, lambda p, x: x * 1, lambda p, x: torch.nn.functional.silu(x * p), lambda p, x: (x + p, x + p)],
    ids=["sum", "one input", "silu", "twice"],
)
def test_derivatives_that_are_what_came_in(fn: Any) -> None:
    """The gradient of a sum is the gradient that came; and forward derivatives need formulas that have some."""

    def loss(f: Any) -> Any:
        return lambda p, x: sum(out.square().sum() for out in tree.leaves(f(p, x)))

    p, x = P["b"], X[0]
    for transform in (
        lambda f: F.grad(f, (0, 1))(p, x),
        lambda f: F.jvp(lambda p: F.grad(f, (0, 1))(p, x), (p,), (x,))[1],
        lambda f: F.vjp(lambda p: F.grad(f, (0, 1))(p, x), p)[1]((x, p)),
        lambda f: F.grad(lambda p: F.jvp(lambda p: f(p, x), (p,), (x,))[1])(p),
        lambda f: F.vmap(lambda x: F.jvp(lambda p: F.grad(f)(p, x), (p,), (p,))[1])(X),
    ):
        torch.testing.assert_close(transform(loss(fs.remat(fn))), transform(loss(fn)))
