"""PowerSGD: sums of matrices over replicas as products of low rank, as one plain process computes them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.errors import PlanError
from fshard.runtime.execution.power_sgd import Product, orthonormal
from fshard.runtime.execution.replica_sums import Replicas
from fshard.sharding.low_rank import gaps_of, matrices, most_travels, travels
from tests.shared.workers import Pools
from tests.training.test_feedback import flat, kept, same
from tests.training.wire_cases import LR, Tree, batch, loss_fn, start

pytestmark = pytest.mark.long

RANK, STEPS = 2, 4
WIRE = fs.Wire(reduce={"replica": "powersgd"}, rank=RANK)
SPECS = {"whole": P(), "flat": P(flat="shard"), "rows": P("shard"), "optimizer apart": P()}


def plan_of(mesh: fs.Mesh, spec: str = "flat", wire: fs.Wire = WIRE) -> fs.Plan:
    opt = P(flat="shard") if spec == "optimizer apart" else None
    wire = fs.Wire(reduce="powersgd", rank=RANK) if spec == "whole" and wire is WIRE else wire
    rules = [fs.Rule(r".*\.w", SPECS[spec], opt=opt), fs.Rule(".*", P(flat="shard") if spec == "rows" else SPECS[spec],
             opt=opt)]  # fmt: skip
    return fs.make_plan(start(), mesh, rules, batch=P(mesh.axis_names), units=("one", "two"), wire=wire)


def mesh_of(*sizes: int) -> Any:
    return fs.virtual_mesh(sizes, ("replica", "shard"))


def trained(mesh: Any, spec: str, steps: int = STEPS) -> tuple[fs.TrainState, Any]:
    plan, opt = plan_of(mesh, spec), fs.optim.sgd(LR)
    step, state = fs.make_train_step(loss_fn, opt, plan, debug=True), fs.init_state(plan, opt, params=start())
    for number in range(steps):
        state, _ = step(state, batch(number, mesh.rank))
    return state, step


def held(plan: fs.Plan, replicas: int) -> list[list[tuple[str, int, int, int]]]:
    """The matrices of each shard: the leaf, its first row, rows, and cols."""
    out = []
    for group in [group.owned for group in plan.groups]:
        for part in range(group.parts):
            for one in matrices(group, part, RANK):
                begin = part * group.chunk + one.begin - group.starts[one.leaf]
                if group.kind == "dim":
                    begin = part * one.rows * one.cols
                out.append((group.leaves[one.leaf].path, begin // one.cols, one.rows, one.cols))
    return out


def plain(plan: fs.Plan, sizes: tuple[int, int]) -> dict[str, Tensor]:
    """PowerSGD of each part of a matrix in one process, and exact sums of the rest."""
    params, replicas = flat(start()), sizes[0]
    left = [{path: torch.zeros_like(leaf) for path, leaf in params.items()} for _ in range(replicas)]
    begun = flat(fs.init_state(plan, fs.optim.sgd(LR), params=start()).opt_state["basis"])
    bases = {key: begun[key[0]].clone() for key in held(plan, replicas)}
    for number in range(STEPS):
        parts = []
        for replica in range(replicas):
            total = {path: torch.zeros_like(leaf) for path, leaf in params.items()}
            for rank in range(replica * sizes[1], (replica + 1) * sizes[1]):
                leaves = {path: leaf.clone().requires_grad_() for path, leaf in params.items()}
                value = loss_fn(nest(leaves), batch(number, rank))
                grads = torch.autograd.grad(value / math.prod(sizes), [*leaves.values()])
                total = {path: total[path] + grad for path, grad in zip(leaves, grads, strict=True)}
            parts.append({path: total[path] + left[replica][path] for path in total})
        summed = {path: sum(part[path] for part in parts) for path in params}
        left = [{path: torch.zeros_like(leaf) for path, leaf in params.items()} for _ in range(replicas)]
        for path, first, rows, cols in bases:
            mine = [part[path].view(-1, cols)[first : first + rows] for part in parts]
            p = orthonormal(sum(m @ orthonormal(bases[path, first, rows, cols]) for m in mine))
            qs = [m.T @ p for m in mine]
            summed[path] = summed[path].clone()
            summed[path].view(-1, cols)[first : first + rows] = p @ sum(qs).T
            for rest, m, q in zip(left, mine, qs, strict=True):
                rest[path].view(-1, cols)[first : first + rows] = m - p @ q.T
            bases[path, first, rows, cols] = sum(qs)
        params = {path: leaf - LR * summed[path] for path, leaf in params.items()}
    return params


def nest(leaves: dict[str, Tensor]) -> Tree:
    out: Tree = {}
    for path, leaf in leaves.items():
        out.setdefault(path.split(".")[0], {})[path.split(".")[1]] = leaf
    return out


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("spec", "sizes"), [("whole", (2, 1)), ("flat", (2, 2)), ("rows", (2, 2)), ("whole", (3, 1)),
                        ("optimizer apart", (2, 2)), ("flat", (1, 2))], ids=str)  # fmt: skip
def test_training_equals_one_process(spec: str, sizes: tuple[int, int]) -> None:
    mesh = mesh_of(*sizes)
    found = mesh.run(lambda: flat(fs.unshard(fs.settle(trained(mesh, spec)[0]).params, plan_of(mesh, spec))))
    exact = plan_of(mesh, spec, fs.Wire())

    def unrounded() -> dict[str, Tensor]:
        opt = fs.optim.sgd(LR)
        step, state = fs.make_train_step(loss_fn, opt, exact), fs.init_state(exact, opt, params=start())
        for number in range(STEPS):
            state, _ = step(state, batch(number, mesh.rank))
        return flat(fs.unshard(fs.settle(state).params, exact))

    want = plain(plan_of(fs.abstract_mesh(sizes, ("replica", "shard")), spec), sizes) if sizes[0] > 1 else None
    others = mesh.run(unrounded)[0]
    for path, leaf in (want or others).items():
        for params in found:
            torch.testing.assert_close(params[path], leaf, rtol=1e-4, atol=1e-5, msg=path)
            assert torch.equal(params[path], found[0][path])
    far = max(float((found[0][path] - others[path]).abs().max()) for path in others)
    assert far > 1e-3 if sizes[0] > 1 else far < 1e-5


def ended(mesh: fs.Mesh) -> dict[str, Tensor]:
    """All that a rank holds after some steps."""
    return kept(fs.settle(trained(mesh, "flat")[0]))


def real() -> dict[str, Tensor]:
    """On a real rank."""
    with fs.make_mesh((2, -1), ("replica", "shard"), shared_memory=False) as mesh:
        return ended(mesh)


def test_real_ranks_equal_played_ranks(pool: Pools) -> None:
    """Two messages a group, over gloo."""
    mesh = mesh_of(2, 1)
    assert all(same(*pair) for pair in zip(mesh.run(lambda: ended(mesh)), pool(2).run(real), strict=True))


def test_second_factors_leave_as_the_next_sum_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """They travel while others compute, and not while their own sum is waited for."""
    mesh, seen = mesh_of(2, 1), list[tuple[int, str]]()
    exact, wait = Replicas._exact, Product.wait

    def sends(self: Replicas, group: Any, own: Tensor, dtype: torch.dtype) -> Any:
        seen.append((self.comms.plan.mesh.rank, f"send {group.name}"))
        return exact(self, group, own, dtype)

    def waits(self: Product) -> None:
        seen.append((mesh.rank, "wait"))
        wait(self)

    monkeypatch.setattr(Replicas, "_exact", sends)
    monkeypatch.setattr(Product, "wait", waits)
    mesh.run(lambda: fs.settle(trained(mesh, "flat", 1)[0]).step)
    for rank in (0, 1):
        order = [what for where, what in seen if where == rank]
        sent = [what for what in order if what != "wait"]
        names = [*dict.fromkeys(sent)]
        assert len(names) == 3 and sent == [name for name in names for _ in (1, 2)]
        assert order.index("wait") > order.index(names[1])


def test_columns_are_orthonormal() -> None:
    draw = torch.Generator().manual_seed(1)
    columns = torch.randn(40, 4, generator=draw)
    columns[:, 2] = 2 * columns[:, 0] - columns[:, 1]
    found = orthonormal(columns)
    torch.testing.assert_close(found.T @ found, torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0])), atol=1e-5, rtol=0)
    assert not orthonormal(torch.zeros(5, 2)).any()
    columns[3, 0] = math.inf
    assert not orthonormal(columns)[:, 0].isfinite().all()


def test_whole_rows_are_products_and_the_rest_is_exact() -> None:
    plan = plan_of(fs.abstract_mesh((2, 2), ("replica", "shard")))
    seen = 0
    for group in plan.groups:
        for part in range(group.parts):
            found = [*matrices(group, part, RANK)]
            rest = sum(end - begin for begin, end in gaps_of(found, group.chunk))
            assert rest + sum(one.rows * one.cols for one in found) == group.chunk
            assert travels(group, part, RANK) == rest + sum(RANK * (one.rows + one.cols) for one in found)
            seen += sum(one.rows for one in found)
    assert seen == 39  # of 40 rows: the end of a shard cuts one


def test_it_is_saved_and_shows(tmp_path: Path) -> None:
    mesh, folder = mesh_of(2, 2), str(tmp_path / "run")

    def main() -> bool:
        state, step = trained(mesh, "flat", 2)
        fs.Checkpointer(folder).save(state)
        restored = fs.Checkpointer(folder).restore(state.plan, step.opt)
        assert restored == state
        fs.verify(fs.make_train_step(loss_fn, step.opt, step.plan), restored, batch(2, mesh.rank))
        before = kept(state)
        failing = fs.make_train_step(lambda p, x: loss_fn(p, x) * math.inf, step.opt, step.plan, donate=False)
        with pytest.raises(fs.errors.NonFiniteError):
            failing(state, batch(3, mesh.rank))
        assert same(kept(state), before)
        ends = []
        for one in (restored, state):
            one, _ = step(one, batch(2, mesh.rank))
            ends.append(kept(one))
        return same(*ends)

    assert all(mesh.run(main))
    for sizes in ((1, 1), (3, 2), (2, 1)):
        other = mesh_of(*sizes)

        def again(mesh: Any = other) -> bool:
            plan, opt = plan_of(mesh), fs.optim.sgd(LR)
            state = fs.Checkpointer(folder).restore(plan, opt)
            state, metrics = fs.make_train_step(loss_fn, opt, plan)(state, batch(2, mesh.rank))
            return bool(metrics.loss.isfinite()) and all(leaf.isfinite().all() for leaf in kept(state).values())

        assert all(other.run(again))
    plan = plan_of(fs.abstract_mesh((2, 2), ("replica", "shard")))
    schedule = fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan).trace(batch(0, 0)).schedule
    move = {m.kind: m for m in schedule.groups[0].transfers}["replica_reduce"]
    assert (move.wire, move.sent) == ("powersgd/2+feedback", 4 * most_travels(plan.groups[0], RANK))
    assert "replica_reduce in powersgd/2+feedback: " in str(plan)


def test_what_cannot_be() -> None:
    mesh = fs.abstract_mesh((2, 2), ("replica", "shard"))
    with pytest.raises(PlanError, match=r"rank=0 must be a positive int"):
        fs.Wire(reduce="powersgd", rank=0)
    with pytest.raises(PlanError, match=r"gather='powersgd': only sums over replicas have a low rank"):
        fs.Wire(gather="powersgd")
    with pytest.raises(PlanError, match=r"(?s)reduce_scatter in powersgd/4.*a gradient of the whole leaf"):
        plan_of(mesh, "flat", fs.Wire(reduce="powersgd"))
    with pytest.raises(PlanError, match=r"powersgd/64\+feedback saves nothing"):
        plan_of(mesh, "flat", fs.Wire(reduce={"replica": "powersgd"}, rank=64))
    with pytest.raises(PlanError, match=r"dim 1 is cut"):
        rules = [(r".*\.w", P(None, "shard")), (".*", P())]
        fs.make_plan(start(), mesh, rules, batch=P(mesh.axis_names), wire=WIRE)
