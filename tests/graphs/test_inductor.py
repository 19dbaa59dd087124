"""Units compiled by Inductor: they train like the units themselves, and what cannot be is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard.errors import PlanError
from fshard.runtime.graphs import inductor
from tests.graphs.cases import affine, params_of, rows, step_of, train, trained


def _close(loss: Callable[..., Any], params: dict[str, Any], batches: list[Any]) -> Any:
    """Train with Inductor and without, assert that both agree, and return the step."""
    seen = [trained(loss, params, batches, compile) for compile in (None, "inductor")]
    assert seen[0][1] == pytest.approx(seen[1][1], rel=1e-5)
    for want, got in zip(seen[0][2], seen[1][2], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    return seen[1][0]


@pytest.mark.long
def test_inductor_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[object] = []
    monkeypatch.setattr(inductor, "foreach_copy_", lambda *both: copies.append(both))  # gradients are written in place

    @fs.unit
    def unit(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.gelu(affine(p, F.dropout(F.layer_norm(x, (6,), p["b"]), 0.5)))
        return x + y, y.sum(1)

    def loss(params: Any, x: Tensor) -> Tensor:
        for name in "ab":
            x, s = unit(params[name], x)
        return x.square().mean() + s.mean()

    step = _close(loss, params_of("a", "b"), [rows(n) for n in range(4)])
    assert "as it is" not in step.units and tuple(step.record) == step.schedule.ops
    assert not copies


@pytest.mark.slow
def test_inductor_notices_writes_to_what_it_keeps() -> None:
    unit = fs.unit(affine)

    def loss(params: Any, x: Tensor) -> Tensor:
        y = unit(params["a"], x)
        z = unit(params["b"], y)
        y.mul_(2.0)
        return z.mean() + y.mean()

    step, state = step_of(loss, params_of("a", "b"), compile="inductor")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(state, rows(0))


def test_inductor_needs_a_compiler() -> None:
    without = torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with without, pytest.raises(PlanError, match="install g\\+\\+"):
        step_of(lambda params, x: x.sum(), params_of("a"), compile="inductor")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "adapted", "conv", "handwritten"])
def test_inductor_trains_every_kind_alike(name: str) -> None:
    mesh = fs.make_mesh((1,), ("shard",))
    want, _ = train(name, None, mesh, debug=True)
    got, step = train(name, "inductor", mesh, debug=True)
    assert "as it is" not in step.units and not got.problems
    assert got.losses + got.norms == pytest.approx(want.losses + want.norms, rel=1e-4)
    for path, leaf in want.params.items():
        torch.testing.assert_close(got.params[path], leaf, rtol=1e-3, atol=1e-5)
