"""Operators under every order of derivatives, forward and reverse, against reverse over reverse in float64.

What PyTorch computes wrong without a word is found here: each operator's forward derivative, the two mixed orders,
forward over forward, and three third orders, inside of ``exact``, in which all transforms of this library run.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

import fshard as fs
from fshard import tree
from fshard.model.exact import RULES
from fshard.model.remat_function import exact

Op = Callable[[Tensor], Tensor]
DRAW = torch.Generator().manual_seed(0)


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=DRAW)


Y, LABELS, W, B, M = _randn(4, 6).sigmoid(), torch.tensor([1, 0, 5, 2]), _randn(6), _randn(6), _randn(6, 6)
ROWS, EYE = torch.tensor([0, 1, 1, 3]), torch.eye(4, dtype=torch.float64)


def _square(x: Tensor) -> Tensor:
    return x[:, :4] + 5 * EYE


def _gram(x: Tensor) -> Tensor:
    return x @ x.T + EYE


def _heads(x: Tensor) -> Tensor:
    return x.view(1, 2, 3, 4)


OPS: dict[str, Op] = {
    "layer_norm": lambda x: F.layer_norm(x, (6,), W, B),
    "layer_norm over two dims": lambda x: F.layer_norm(x, (4, 6)),
    "layer_norm by its weight": lambda x: F.layer_norm(Y, (6,), x[0], x[1]),
    "native_layer_norm": lambda x: torch.native_layer_norm(x, (6,), W, B, 1e-5)[0],
    "group_norm": lambda x: F.group_norm(x, 3, W, B),
    "rms_norm": lambda x: F.rms_norm(x, (6,), W),
    "batch_norm": lambda x: F.batch_norm(x, None, None, W, B, True),
    "batch_norm, running": lambda x: F.batch_norm(x, torch.zeros_like(W), torch.ones_like(W), W, B, True),
    "batch_norm, eval": lambda x: F.batch_norm(x, torch.zeros_like(W), torch.ones_like(W), W, B),
    "instance_norm": lambda x: F.instance_norm(x.view(2, 4, 3), weight=W[:4]),
    "weight_norm": lambda x: torch._weight_norm(x, x[:, :1] + 3, 0),
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "silu, computed again": fs.remat(F.silu),
    "mish, computed again": fs.remat(F.mish),
    "softplus": F.softplus,
    "glu": F.glu,
    "elu": F.elu,
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS),
    "cross_entropy, smooth": lambda x: F.cross_entropy(x, LABELS, weight=W.abs(), label_smoothing=0.1),
    "cross_entropy of probabilities": lambda x: F.cross_entropy(x, Y.softmax(-1)),
    "mse_loss": lambda x: F.mse_loss(x, Y),
    "mse_loss, sum": lambda x: F.mse_loss(x, Y, reduction="sum"),
    "mse_loss of both": lambda x: F.mse_loss(x, x.flip(0)),
    "mse_loss, weighted": lambda x: F.mse_loss(x, Y, weight=Y),
    "huber_loss": lambda x: F.huber_loss(x, Y, delta=0.7),
    "huber_loss, weighted": lambda x: F.huber_loss(x, Y, weight=Y),
    "huber_loss, none": lambda x: F.huber_loss(x, Y, reduction="none"),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, Y),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, Y.sign()),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), Y),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, Y, pos_weight=W.abs()),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), Y, reduction="batchmean"),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, Y),
    "cosine_similarity": lambda x: F.cosine_similarity(x, Y),
    "conv1d": lambda x: F.conv1d(x.view(1, 4, 6), x.view(2, 4, 3)),
    "conv2d": lambda x: F.conv2d(_heads(x), M.view(-1)[:12].view(1, 2, 3, 2)),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x.view(2, 2, 6), M.view(-1)[:12].view(2, 2, 3)),
    "max_pool2d": lambda x: F.max_pool2d(_heads(x), 2).square(),
    "interpolate": lambda x: F.interpolate(_heads(x), scale_factor=2, mode="bilinear").square(),
    "grid_sample": lambda x: F.grid_sample(_heads(x), Y.view(1, 3, 4, 2), align_corners=False).square(),
    "embedding": lambda x: F.embedding(ROWS, x),
    "attention": lambda x: F.scaled_dot_product_attention(_heads(x), 2 * _heads(x), _heads(x), is_causal=True),
    "linear": lambda x: F.linear(x, M, B),
    "einsum": lambda x: torch.einsum("ij,kj,ik->i", x, x, _gram(x)),
    "norm": lambda x: x.norm(dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "var": lambda x: x.var(-1),
    "prod": lambda x: x.prod(-1),
    "sort": lambda x: x.sort(-1)[0].square(),
    "scatter_add": lambda x: torch.zeros_like(Y).scatter_add(0, ROWS[:, None].expand(4, 6), x.square()),
    "scatter_reduce": lambda x: torch.ones_like(Y).scatter_reduce(0, ROWS[:, None].expand(4, 6), x, "prod"),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "det": lambda x: torch.linalg.det(_square(x) / 5),
    "logdet": lambda x: torch.logdet(_gram(x)),
    "slogdet": lambda x: _gram(x).slogdet()[1],
    "solve": lambda x: torch.linalg.solve(_square(x), x),
    "inv": lambda x: torch.linalg.inv(_square(x)),
    "cholesky": lambda x: torch.linalg.cholesky(_gram(x)),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(torch.linalg.cholesky(_gram(x))),
    "eigvals": lambda x: torch.linalg.eigvals(_square(x)).abs().sum(),
}
NAN = {"det", "logcumsumexp"}  # PyTorch's third derivatives of these are nan


def orders(f: Op, x: Tensor, v: Tensor, u: Tensor, name: str) -> dict[str, tuple[Callable[[], Tensor], Tensor]]:
    """Every order of derivatives of a scalar function, and what it must be."""

    def forward(f: Op, v: Tensor) -> Op:
        return lambda x: jvp(f, (x,), (v,))[1]

    def hessian(x: Tensor) -> Tensor:
        return vjp(grad(f), x)[1](v)[0]

    with sdpa_kernel(SDPBackend.MATH):
        first, second = grad(f)(x), hessian(x)
        third = (hessian(x + 1e-5 * u) - hessian(x - 1e-5 * u)) / 2e-5
    out: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "forward": (lambda: forward(f, v)(x), (first * v).sum()),
        "forward over reverse": (lambda: forward(grad(f), v)(x), second),
        "reverse over forward": (lambda: grad(forward(f, v))(x), second),
        "forward over forward": (lambda: forward(forward(f, v), u)(x), (second * u).sum()),
    }
    if name not in NAN:
        out["reverse over reverse over reverse"] = (lambda: vjp(hessian, x)[1](u)[0], third)
        out["forward over reverse over reverse"] = (lambda: forward(hessian, u)(x), third)
        out["forward over forward over reverse"] = (lambda: forward(forward(grad(f), v), u)(x), third)
    return out


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("name", OPS)
def test_every_order_of_derivatives(name: str) -> None:
    op, x, v, u = OPS[name], _randn(4, 6), _randn(4, 6), _randn(4, 6)
    weights = _randn(*op(x).shape)

    def f(x: Tensor) -> Tensor:
        with exact():
            out = op(x)
        return (out * weights).sum() + out.square().sum() / 10

    for order, (derive, want) in orders(f, x, v, u, name).items():
        got, near = derive(), 1e-4 if order.count("over") > 1 else 1e-8
        far = (got - want).abs().max().item() / max(want.abs().max().item(), 1e-2)
        assert far < near, f"{order}: {far:.1e}"


def test_the_table_is_needed() -> None:
    """Without it a layer norm is wrong: where PyTorch mends that, the entry can go."""
    x, v = _randn(4, 6), _randn(4, 6)

    def f(x: Tensor) -> Tensor:
        return (F.layer_norm(x, (6,)) ** 3 * Y).sum()

    plain = grad(lambda x: jvp(f, (x,), (v,))[1])(x)
    assert (plain - vjp(grad(f), x)[1](v)[0]).abs().max() > 1e-2
    assert all(rule.formula or callable(op) for op, rule in RULES.items())


def test_an_operator_that_writes_its_input_does_so_in_every_order() -> None:
    def f(x: Tensor) -> Tensor:
        with exact():
            y = x * 1
            F.silu(y, inplace=True)
            return y.sum()

    x, v = _randn(4, 6), _randn(4, 6)

    def curvature(g: Op) -> Tensor:
        found: Tensor = jvp(lambda x: jvp(g, (x,), (v,))[1], (x,), (v,))[1]
        return found

    torch.testing.assert_close(curvature(f), curvature(lambda x: F.silu(x).sum()))


def test_running_statistics_are_written_once() -> None:
    x, v = _randn(4, 6), _randn(4, 6)
    want = [torch.zeros(6).double(), torch.ones(6).double()]
    F.batch_norm(x, *want, training=True)

    def f(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        running = [torch.zeros_like(x[0]), torch.ones_like(x[0])]
        with exact():
            return F.batch_norm(x, *running, training=True).pow(3).sum(), running

    def slope(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        _, moved, running = jvp(f, (x,), (v,), has_aux=True)
        return moved, running

    torch.testing.assert_close(grad(slope, has_aux=True)(x)[1], want)


class Sine(torch.autograd.Function):
    """A custom function with all rules, as PyTorch documents them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """The sine."""
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the argument."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The cosine."""
        return grad * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """The same."""
        return tangent * ctx.saved_tensors[0].cos()


class Backward(Sine):
    """The same without a forward derivative."""

    jvp = torch.autograd.Function.jvp


def test_custom_functions_under_several_forward_derivatives() -> None:
    def f(x: Tensor) -> Tensor:
        with exact():
            return (Sine.apply(x) * Y).sum() ** 3

    def plain(x: Tensor) -> Tensor:
        return (x.sin() * Y).sum() ** 3

    x, v, u = _randn(4, 6), _randn(4, 6), _randn(4, 6)
    wanted = orders(plain, x, v, u, "")
    for order, (derive, _) in orders(f, x, v, u, "").items():
        torch.testing.assert_close(derive(), wanted[order][0](), msg=order)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "huber": F.huber_loss,
    "layer norm": lambda x, y: (F.layer_norm(x, (3,)) * y).exp().mean(),
    "no forward derivative": lambda x, y: (Backward.apply(x) * y).exp().mean(),
    "unknown": lambda x, y: torch._C._nn.huber_loss(x, y, 1, 1.0) + x.square().mean(),
}


def products(name: str) -> list[str]:
    """On a rank: which products are not those of reverse over reverse on whole tensors."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        draw = torch.Generator().manual_seed(1)
        whole, along = (
            {"a": torch.randn(5, 4, generator=draw).double(), "b": torch.randn(4, 3, generator=draw).double()}
            for _ in range(2)
        )
        x, y = torch.randn(4, 5, generator=draw).double(), torch.rand(4, 3, generator=draw).double()
        plan = fs.make_plan(whole, mesh, [(".*", fs.fsdp("shard"))])

        def predict(p: Any, batch: Any) -> Tensor:
            return torch.tanh(batch[0] @ p["a"]) @ p["b"]

        def outer(out: Tensor, batch: Any) -> Tensor:
            return LOSSES[name](out, batch[1])

        def plain(p: Any) -> Tensor:
            return outer(predict(p, (x, y)), (x, y))

        mine = tree.map(lambda one: one.chunk(mesh.size)[mesh.rank], (x, y))
        params, v = fs.shard(whole, plan), fs.shard(along, plan)
        out, pull = vjp(lambda p: predict(p, (x, y)), whole)
        pushed = jvp(lambda p: predict(p, (x, y)), (whole,), (along,))[1]
        bent = vjp(grad(lambda out: outer(out, (x, y))), out)[1](pushed)[0]
        want = {
            "hvp": vjp(grad(plain), whole)[1](along)[0],
            "gnvp": pull(bent)[0],
        }

        def loss(p: Any, batch: Any) -> Tensor:
            return outer(predict(p, batch), batch)

        hvp, gnvp, slope = fs.func.hvp(loss, plan), fs.func.gnvp(predict, outer, plan), fs.func.jvp(loss, plan)
        bad = []
        for _ in range(2):  # the way that is taken the second time may be another one
            got = {"hvp": hvp(params, v, mine), "gnvp": gnvp(params, v, mine)}
            for kind, product in got.items():
                for path, leaf in tree.paths(fs.unshard(product, plan)):
                    if not torch.allclose(leaf, dict(tree.paths(want[kind]))[path], rtol=1e-9, atol=1e-12):
                        bad.append(f"{kind} {path}")
            value, along_v = slope(params, v, mine)
            if not torch.allclose(value, plain(whole)):
                bad.append("value")
            known = sum((g * d).sum() for g, d in zip(grad(plain)(whole).values(), along.values(), strict=True))
            if not torch.allclose(along_v, known):
                bad.append("slope")
        return bad


@pytest.mark.long
@pytest.mark.parametrize("name", LOSSES)
def test_products_where_forward_derivatives_are_missing(name: str) -> None:
    assert fs.virtual_mesh((2,), ("shard",)).run(products, name) == [[], []]


def test_a_gradient_through_a_product() -> None:
    """A Hessian-vector product of a layer norm is differentiated itself: a third derivative."""
    mesh = fs.make_mesh((-1,), ("shard",))
    whole, v = {"w": _randn(4, 6)}, {"w": _randn(4, 6).flatten()}
    plan = fs.make_plan(whole, mesh, [(".*", fs.fsdp("shard"))])

    def loss(p: Any, batch: Any) -> Tensor:
        return (F.layer_norm(p["w"], (6,)) * Y).exp().mean()

    def plain(w: Tensor) -> Tensor:
        centred = w - w.mean(-1, keepdim=True)
        return (centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * Y).exp().mean()

    product = fs.func.hvp(loss, plan)
    got = grad(lambda w: product({"w": w}, v, None)["w"].square().sum())(whole["w"].flatten())
    want = grad(lambda w: vjp(grad(plain), w)[1](v["w"].view(4, 6))[0].square().sum())(whole["w"])
    torch.testing.assert_close(got, want.flatten())
