"""Parallel layers with the rest of fshard: transforms, evaluation, initial values and precision."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fshard as fs
from fshard import tree
from fshard.sharding.wire import WireFormat
from tests.parallel.cases import Case, batch, program, whole
from tests.training.wire_cases import through

TENSOR = Case("sequence", (2, 2), ("tp", "shard"))
EXPERT = Case("dropless", (2, 2), ("ep", "shard"))
CONTEXT = Case("context", (2, 2), ("shard", "cp"))


def kind(case: Case) -> str:
    """For ids."""
    return case.kind


def planned(case: Case, mesh: fs.Mesh) -> tuple[fs.Plan, dict[str, Any], Any]:
    """The plan, the whole start values, and the loss."""
    start, kit = tree.nest(whole(case.moe)), case.kit()
    plan = fs.make_plan(start, mesh, kit.rules, batch=case.batch, units=("embed", "blocks.*", "head"))
    return plan, start, program(kit)


def transformed(case: Case) -> list[str]:
    """On a rank: the ways to derivatives that do not give those of one plain process."""
    out = []
    with fs.make_mesh(case.sizes, case.names) as mesh:
        plan, start, loss = planned(case, mesh)
        params, mine = fs.shard(start, plan), case.cut(batch(0), mesh)
        plain = program(case.plain())
        wanted, value = torch.func.grad_and_value(plain)(start, batch(0))
        found = {
            "sharded_loss": torch.func.grad_and_value(fs.func.sharded_loss(loss, plan))(params, mine),
            "gathered once": torch.func.grad_and_value(fs.func.sharded_loss(loss, plan, reshard=False))(params, mine),
            "value_and_grad": fs.value_and_grad(loss, plan)(params, mine)[::-1],
        }
        for way, (grads, mean) in found.items():
            out += [f"{way}: loss {mean} not {value}"] * (not abs(float(mean) - float(value)) < 1e-5)
            out += _far(way, fs.unshard(grads, plan), wanted)
        along = tree.map(torch.cos, start)
        hv = torch.func.jvp(lambda p: torch.func.grad(plain)(p, batch(0)), (start,), (along,))[1]
        got = fs.func.hvp(loss, plan)(params, fs.shard(along, plan), mine)
        out += _far("hvp", fs.unshard(got, plan), hv)
    return out


def _far(way: str, got: Any, want: Any) -> list[str]:
    right = dict(tree.paths(want))
    gaps = [(p, (leaf - right[p]).abs().max().item(), right[p].abs().max().item()) for p, leaf in tree.paths(got)]
    return [f"{way}: {path} is off by {gap}" for path, gap, size in gaps if not gap <= 1e-5 * max(1, size)]


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize("case", [TENSOR, pytest.param(EXPERT, marks=pytest.mark.slow), CONTEXT], ids=kind)
def test_transforms_give_the_derivatives_of_one_process(case: Case) -> None:
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused attention has no forward mode
        ranks = fs.virtual_mesh(case.sizes, case.names).run(transformed, case)
    assert ranks == [[]] * 4


def rounded_step(case: Case) -> tuple[float, dict[str, Tensor]]:
    """On a rank: the loss and the gradient of a step whose transfers are compressed."""
    with fs.make_mesh(case.sizes, case.names) as mesh:
        plan, start, loss = planned(case, mesh)
        plan, opt = plan.replace(wire=fs.Wire("int8", "int8", block=16)), fs.optim.sgd(1.0)
        state = fs.init_state(plan, opt, params=start)
        state, metrics = fs.make_train_step(loss, opt, plan, debug=True)(state, case.cut(batch(0), mesh))
        after = dict(tree.paths(fs.unshard(state.params, plan)))
        return float(metrics.loss), {path: leaf - after[path] for path, leaf in tree.paths(start)}


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize("case", [EXPERT, CONTEXT], ids=kind)
def test_compressed_transfers_give_the_gradient_at_rounded_weights(case: Case) -> None:
    """The loss of one process there, and its gradient but for the digits that eight bits do not have."""
    form = WireFormat("int8", 16)
    at = {path: through(leaf, form) for path, leaf in whole(case.moe).items()}
    wanted, value = torch.func.grad_and_value(program(case.plain()))(tree.nest(at), batch(0))
    for loss, grads in fs.virtual_mesh(case.sizes, case.names).run(rounded_step, case):
        assert loss == pytest.approx(float(value), rel=1e-6)
        for path, want in tree.paths(wanted):
            far, size = (grads[path] - want).abs().max().item(), want.abs().max().item()
            assert 1e-6 * size < far < 0.03 * size, path


def initial(case: Case) -> list[Tensor]:
    """On a rank: whole initial values."""
    with fs.make_mesh(case.sizes, case.names) as mesh:
        plan, _, _ = planned(case, mesh)
        state = fs.init_state(plan, fs.optim.sgd(0.1), seed=3, init=[(".*", fs.init.normal(0.1))])
        return [leaf.clone() for leaf in tree.leaves(fs.unshard(state.params, plan))]


@pytest.mark.parametrize("kind", ["tensor", "dropless"])
def test_initial_values_do_not_depend_on_the_mesh(kind: str) -> None:
    axis = "tp" if kind == "tensor" else "ep"
    meshes = [
        ((1, 1), (axis, "shard")),
        ((2, 2), (axis, "shard")),
        ((2, 4), ("shard", axis)),
        ((4, 1), (axis, "shard")),
    ]
    found = [fs.virtual_mesh(sizes, names).run(initial, Case(kind, sizes, names)) for sizes, names in meshes]
    for ranks in found:
        for rank in ranks:
            assert all(torch.equal(a, b) for a, b in zip(rank, found[0][0], strict=True))


def evaluated(case: Case, compute: torch.dtype | None) -> tuple[float, float]:
    """On a rank: the evaluated loss, and that of a step, in a dtype of compute."""
    with fs.make_mesh(case.sizes, case.names) as mesh:
        start, kit = tree.nest(whole(case.moe)), case.kit()
        precision = fs.Precision(compute=compute)
        units = ("embed", "blocks.*", "head")
        plan = fs.make_plan(start, mesh, kit.rules, batch=case.batch, units=units, precision=precision)
        state = fs.init_state(plan, fs.optim.sgd(0.1), params=start)
        loss, mine = program(kit), case.cut(batch(0), mesh)
        value = fs.make_eval_step(loss, plan)(state, mine)
        _, metrics = fs.make_train_step(loss, fs.optim.sgd(0.1), plan, debug=True)(state, mine)
        return float(value), metrics.loss.item()


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "compute"), [(TENSOR, None), (EXPERT, torch.bfloat16), (CONTEXT, torch.bfloat16)], ids=["eval", "ep", "cp"]
)
def test_evaluation_and_low_precision(case: Case, compute: torch.dtype | None) -> None:
    """Training in full precision has a test of its own, for every case."""
    want = float(program(case.plain())(tree.nest(whole(case.moe)), batch(0)))
    for rank in fs.virtual_mesh(case.sizes, case.names).run(evaluated, case, compute):
        assert rank == pytest.approx((want, want), abs=1e-5 if compute is None else 0.1)
