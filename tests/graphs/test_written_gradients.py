"""A backward that Inductor compiles writes gradients of leaves to the flat gradient: no copy is left."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard.runtime.graphs import inductor
from fshard.runtime.graphs.inductor import product_into, write_gradients


def backward(x: Tensor, g: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """A part, and gradients: products, one of which is read again, sums, and what no kernel of Inductor's computes."""
    product, other = g.t() @ x, x.t() @ g
    return g * 2, product, other, other.relu(), g.sum(0), (g * g).sum(0).view(2, -1), torch.cumsum(table, 0), g.sin()


def test_results_go_to_memory_that_is_given() -> None:
    values = torch.randn(6, 4), torch.randn(6, 8), torch.randn(3, 2)
    want = backward(*values)
    graph = make_fx(backward, tracing_mode="fake")(*values)
    unchanged = str(graph.graph)
    written, kept, like = write_gradients(graph, 1)
    assert [x.shape for x in like] == [x.shape for x in want[1:]]
    assert str(graph.graph) == unchanged
    assert kept == [1, 5]  # the product that is read again, and the running sum
    made = [torch.full_like(x, torch.nan, memory_format=torch.contiguous_format) for x in want[1:]]
    first, *rest = written(*values, *made)
    assert len(rest) == len(kept) and torch.equal(first, want[0])
    for number, (one, other) in enumerate(zip(made, want[1:], strict=True)):
        if number in kept:
            assert torch.equal(rest[kept.index(number)], other) and one.isnan().all()
        else:
            assert torch.equal(one, other), number
    called = [node.target for node in written.graph.nodes if node.op == "call_function"]
    assert called.count(product_into()) == 1
    assert called.count(torch.ops.aten.copy_.default) == 4
    written.graph.lint()


def test_a_gradient_of_two_leaves_is_copied() -> None:
    graph = make_fx(lambda x, g: (x + 1, *[g.t() @ x] * 2), tracing_mode="fake")(torch.randn(3, 2), torch.randn(3, 5))
    flat: Any = graph.graph.output_node().args[0]
    assert flat[1] is flat[2] and write_gradients(graph, 1)[1] == [0, 1]


class Block(nn.Module):
    """Products, sums and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """A residual block."""
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_copies_no_gradient(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    real = inductor.foreach_copy_
    monkeypatch.setattr(inductor, "foreach_copy_", lambda into, given: (copies.append(len(into)), real(into, given)))

    def trained(how: Any) -> list[float]:
        torch.manual_seed(0)
        with fs.make_mesh((1,), ("data",)) as mesh:
            model = fs.split(nn.Sequential(Block(), Block()), units=("*",))
            plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
            opt, losses = fs.optim.sgd(0.1), []
            state = fs.init_state(plan, opt, params=model.params)
            options = {"compile": how, "accumulate": accumulate}
            step = fs.make_train_step(lambda p, x: (model.apply(p, x) - x).square().mean(), opt, plan, **options)
            for _ in range(4):
                state, metrics = step(state, torch.linspace(-1, 1, 128).view(8, 16))
                losses.append(float(metrics.loss))
            assert how is None or "as it is" not in step.units
            return losses

    assert trained("inductor") == pytest.approx(trained(None), rel=1e-5)
    assert not copies
