"""Feedback on sums over replicas: what rounding leaves out of one goes with the next, and is part of the state.

That training has the bits of the same feedback in one plain process is tested beside the other formats, in
``test_wire.py``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.errors import LossError, NonFiniteError, PlanError, TreeError
from fshard.runtime.comm.communicator import SingleRank
from fshard.runtime.execution.wires import Residual, summed
from fshard.schedule.schedule import parse
from fshard.sharding.wire import WireFormat
from tests.training.wire_cases import LR, Tree, batch, loss_fn, start

pytestmark = pytest.mark.long

WIRE = fs.Wire(reduce={"replica": "int4"}, block=32, feedback=True)
SIZES = (2, 2)


def mesh_of(*sizes: int) -> Any:
    return fs.virtual_mesh(sizes, ("replica", "shard"))


def plan_of(mesh: fs.Mesh, wire: fs.Wire = WIRE, spec: P | None = None) -> fs.Plan:
    spec = P(flat="shard") if spec is None else spec
    return fs.make_plan(start(), mesh, [(".*", spec)], batch=P(mesh.axis_names), units=("one", "two"), wire=wire)


def begun(mesh: fs.Mesh, steps: int = 2, opt: Any = None, **options: Any) -> tuple[fs.TrainState, Any]:
    """On a rank: a state after some steps, whose last update waits, and the step."""
    plan, opt = plan_of(mesh), opt or fs.optim.sgd(LR, momentum=0.5)
    step = fs.make_train_step(loss_fn, opt, plan, debug=True, **options)
    state = fs.init_state(plan, opt, params=start())
    for number in range(steps):
        state, _ = step(state, batch(number, mesh.rank))
    return state, step


def flat(tree: Tree) -> dict[str, Tensor]:
    return {f"{unit}.{name}": leaf for unit, leaves in tree.items() for name, leaf in leaves.items()}


def kept(state: fs.TrainState) -> dict[str, Tensor]:
    """All that a rank holds, by name."""
    trees = {"params": state.params, **state.opt_state}
    return {f"{name}.{path}": leaf.clone() for name, tree in trees.items() for path, leaf in flat(tree).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(leaf, other[name]) for name, leaf in one.items())


class Others(SingleRank):
    """The communicator of two ranks, whose other one sends what this one sends."""

    def all_gather(self, out: Tensor, shard: Tensor, after: Any = ()) -> Any:
        """Two copies."""
        return super().all_gather(out.view(2, -1), shard, after)


FORMATS = [WireFormat(name, block, feedback=True) for name, block in (("int8", 64), ("int4", 16), ("fp8_e4m3", 32))]


@pytest.mark.parametrize("form", [*FORMATS, WireFormat("bf16", feedback=True)], ids=str)
def test_what_is_sent_and_what_is_left_are_the_gradients(form: WireFormat) -> None:
    """In each step bit for bit; over all steps too, where no sum of a gradient and a rest is rounded."""
    draw = torch.Generator().manual_seed(3)
    before, sent, grads = torch.zeros(256), torch.zeros(256).double(), torch.zeros(256).double()
    for number in range(50):
        grad = torch.randint(-(2**12), 2**12, (256,), generator=draw) * 2.0 ** -(10 + number % 3)
        own, residual = grad.clone(), Residual(before, 1.0, torch.empty(256))
        summed(Others(2), own, form, residual=residual).wait()
        assert torch.equal(own.double() / 2 + residual.after.double(), (grad + before).double())
        sent, grads, before = sent + own.double() / 2, grads + grad.double(), residual.after
        assert before.count_nonzero() > 0
    far = (sent + before.double() - grads).abs().max().item()
    assert far == 0.0 if form.name == "bf16" else far < 1e-4


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_an_element_that_is_not_finite_stays_so(form: WireFormat, wrong: float) -> None:
    own, room = torch.ones(128), torch.empty(128)
    own[70] = wrong
    summed(Others(2), own, form, residual=Residual(torch.ones(128), 1.0, room)).wait()
    assert not own[70].isfinite()
    assert not room[70].isfinite()


def linear(params: Tree, rows: tuple[Tensor, Tensor]) -> Tensor:
    """A loss whose gradient does not depend on the parameters."""
    found = [(leaf * leaf.new_tensor(range(leaf.numel())).cos().view_as(leaf)).sum() for leaf in flat(params).values()]
    return torch.stack(found).sum() * rows[0].mean()


@pytest.mark.parametrize("weighted", [False, True])
def test_updates_and_what_is_left_are_those_of_exact_sums(weighted: bool) -> None:
    """Over some steps, with means and with sums of equal counts, on three replicas too."""
    for sizes in ((2, 2), (3, 1)):
        mesh = mesh_of(*sizes)

        def loss(params: Tree, rows: tuple[Tensor, Tensor]) -> Any:
            return fs.Mean(5.0 * linear(params, rows), 5.0) if weighted else linear(params, rows)

        def main(wire: fs.Wire, mesh: fs.Mesh = mesh, loss: Any = loss) -> tuple[Any, Any]:
            plan, opt = plan_of(mesh, wire), fs.optim.sgd(1.0)
            step, state = fs.make_train_step(loss, opt, plan), fs.init_state(plan, opt, params=start())
            for number in range(4):
                state, _ = step(state, batch(number, mesh.rank))
            left = fs.tree.map(lambda x: x.clone(), state.opt_state.get("residual", {}))
            return flat(fs.unshard(state.params, plan)), flat(fs.unshard(left, plan)) if left else {}

        want, found = mesh.run(lambda m=main: m(fs.Wire())), mesh.run(lambda m=main: m(WIRE))
        per = mesh.size // sizes[0]
        unit = 5.0 * mesh.size if weighted else 1.0  # of the elements of all ranks
        for path, exact in want[0][0].items():
            left = sum(found[replica * per][1][path] for replica in range(sizes[0])) / unit
            assert left.abs().max() > 1e-4
            torch.testing.assert_close(found[0][0][path] - left, exact, rtol=1e-5, atol=1e-6)


def test_a_step_that_fails_or_is_skipped_leaves_it() -> None:
    """On one rank or on all of them; and the same step made again has the bits of an undisturbed one."""
    mesh = mesh_of(*SIZES)

    def main() -> bool:
        wrong: dict[str, Any] = {}

        def loss(params: Tree, rows: tuple[Tensor, Tensor]) -> Tensor:
            if wrong.get("rank") == mesh.rank:
                raise ZeroDivisionError
            return loss_fn(params, rows) * wrong.get("factor", torch.ones(()))

        state, step = begun(mesh)
        again = fs.make_train_step(loss, step.opt, step.plan, donate=False)
        careful = fs.make_train_step(loss_fn, step.opt, step.plan, donate=False, skip_norm=1e-6)
        rows, before = batch(7, mesh.rank), kept(state)
        assert any(leaf.count_nonzero() > 0 for name, leaf in before.items() if name.startswith("residual."))
        want = kept(again(state, rows)[0])
        for change, error in (({"rank": 1}, Exception), ({"factor": torch.tensor(float("inf"))}, NonFiniteError)):
            wrong.update(change)
            with pytest.raises(error):
                again(state, rows)
            wrong.clear()
            assert same(kept(state), before)
        following, metrics = careful(state, rows)
        assert metrics.skipped
        assert same(kept(following), before)
        assert same(kept(state), before)
        return same(kept(again(state, rows)[0]), want) and not same(want, before)

    assert all(mesh.run(main))


def test_loss_scaling_microbatches_and_programs_on_demand_change_no_bit() -> None:
    """The scale is a power of two and changes at every step; an overflow leaves what is kept as it was."""
    mesh = mesh_of(*SIZES)

    def branching(params: Tree, rows: tuple[Tensor, Tensor]) -> Tensor:
        return loss_fn(params, rows) if rows[0].sum().item() > -1e9 else params["one"]["b"].sum()

    def main(loss: Any, scale: fs.LossScale | None, accumulate: int) -> Any:
        plan, opt = plan_of(mesh), fs.optim.sgd(LR)
        step = fs.make_train_step(loss, opt, plan, loss_scale=scale, accumulate=accumulate)
        state, skipped = fs.init_state(plan, opt, params=start()), 0
        for number in range(4):
            rows = batch(number, mesh.rank)
            while True:
                before = kept(state)
                state, metrics = step(state, rows)
                if not metrics.skipped:
                    break
                skipped += 1
                assert same(kept(state), before)
        return kept(state), skipped

    want: Any = mesh.run(lambda: main(loss_fn, None, 2))
    high = fs.LossScale(initial=2.0**126, interval=1)
    for loss, scale in ((branching, None), (loss_fn, fs.LossScale(initial=4.0, interval=1)), (loss_fn, high)):
        found: Any = mesh.run(lambda args=(loss, scale, 2): main(*args))
        assert all(same(one, other) for (one, _), (other, _) in zip(want, found, strict=True))
        assert (found[0][1] > 0) == (scale is high)


def test_a_loss_that_changes_its_kind_is_refused() -> None:
    mesh = mesh_of(2, 1)

    def main() -> str:
        state, step = begun(mesh)
        other = fs.make_train_step(lambda p, x: fs.Mean(loss_fn(p, x), 1.0), step.opt, step.plan, donate=False)
        before = kept(state)
        with pytest.raises(LossError, match=r"fs\.Mean.*feedback makes up for, had a plain mean") as caught:
            other(state, batch(3, mesh.rank))
        assert same(kept(state), before)
        return str(caught.value)

    assert len({*mesh.run(main)}) == 1


@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_run_is_the_same_run(every: int, tmp_path: Path) -> None:
    """Bit for bit, whatever waits when it is saved; pickled and mapped states too."""
    opt = fs.optim.every(every, fs.optim.adamw(1e-2)) if every > 1 else fs.optim.adamw(1e-2)
    mesh, folder = mesh_of(*SIZES), str(tmp_path / "run")

    def main() -> bool:
        state, step = begun(mesh, 3, opt)
        fs.Checkpointer(folder).save(state)
        restored = fs.Checkpointer(folder).restore(state.plan, opt)
        assert restored == state
        mapped = fs.tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state)
        ends = []
        for one in (restored, mapped, state):
            for number in (3, 4):
                one, _ = step(one, batch(number, mesh.rank))
            ends.append(kept(one))
        return same(ends[0], ends[2]) and same(ends[1], ends[2])

    assert all(mesh.run(main))


def rows_of(state: fs.TrainState) -> dict[str, Tensor]:
    return {path: leaf.clone() for path, leaf in flat(fs.unshard(state.opt_state["residual"], state.plan)).items()}


@pytest.mark.parametrize("sizes", [(1, 2), (3, 1), pytest.param((2, 3), marks=pytest.mark.slow)], ids=str)
def test_nothing_is_lost_on_another_mesh(sizes: tuple[int, int], tmp_path: Path) -> None:
    """Fewer replicas take up all rows, more begin with zeros; one alone adds what is left to its next gradient."""
    old, new, folder = mesh_of(*SIZES), mesh_of(*sizes), str(tmp_path / "run")
    opt = fs.optim.sgd(1.0)

    def save() -> Any:
        state, _ = begun(old, 3, opt)
        fs.Checkpointer(folder).save(state)
        return rows_of(state)

    def restore() -> Any:
        plan = plan_of(new)
        state = fs.Checkpointer(folder).restore(plan, opt)
        left, before = rows_of(state), flat(fs.unshard(state.params, plan))
        step = fs.make_train_step(lambda p, x: 0.0 * loss_fn(p, x), opt, plan)
        state, _ = step(state, batch(9, new.rank))
        return left, before, rows_of(state), flat(fs.unshard(state.params, plan))

    saved: Any = old.run(save)
    found: Any = new.run(restore)
    per = new.size // sizes[0]
    for path, first in saved[0].items():
        total, held = first + saved[2][path], [found[replica * per] for replica in range(sizes[0])]
        assert torch.equal(sum((left[path] for left, *_ in held), torch.zeros_like(total)), total)
        assert all(not left[path].any() for left, *_ in held[2:])
        rest = sum((after[path] for _, _, after, _ in held), torch.zeros_like(total))
        _, before, _, now = held[0]
        torch.testing.assert_close(before[path] - now[path] + rest, total, rtol=1e-5, atol=1e-6)
        assert total.any() and (sizes[0] > 1 or not rest.any())


def test_other_wires_and_other_axes_of_replicas(tmp_path: Path) -> None:
    """A run may begin with feedback, and carries what is left to other specs; it is not lost in silence."""
    mesh, opt, folder = mesh_of(*SIZES), fs.optim.sgd(LR), str(tmp_path / "run")

    def main() -> Any:
        plan, whole = plan_of(mesh), plan_of(mesh, fs.Wire(reduce="int4", block=32, feedback=True), P())
        exact = plan_of(mesh, fs.Wire())
        state, _ = begun(mesh, 2, opt)
        moved = fs.reshard_state(state, whole, opt)
        rows = [rows_of(one)["one.w"] for one in (state, moved, fs.reshard_state(moved, plan, opt))]
        lost = r"opt\.residual\.one\.w: only the state has it(?s:.*)a plan whose fs\.Wire has feedback="
        with pytest.raises(TreeError, match=lost):
            fs.reshard_state(state, exact, opt)
        fresh = fs.reshard_state(fs.init_state(exact, opt, params=start()), plan, opt)
        assert not any(leaf.any() for leaf in rows_of(fresh).values())
        ckpt = fs.Checkpointer(folder)
        ckpt.save(fs.init_state(exact, opt, params=start()))
        assert same(kept(ckpt.restore(plan, opt)), kept(fresh))
        ckpt.save(state)
        extra = r"extra  opt\.residual\.one\.w  F32\[2, 24, 16\](?s:.*)rules=\[\('\.\*', r'\\g<0>'\)\] leave it out"
        with pytest.raises(TreeError, match=extra):
            ckpt.restore(exact, opt)
        without = ckpt.restore(exact, opt, rules=[(".*", r"\g<0>")])
        assert same(flat(fs.unshard(without.params, exact)), flat(fs.unshard(fs.settle(state).params, plan)))
        return rows

    # Ranks 0 and 2 are in the two replicas of one plan, and all ranks are replicas of the other.
    before, spread, after = zip(*mesh.run(main), strict=True)
    total = before[0] + before[2]
    assert torch.equal(sum(spread, torch.zeros_like(total)), total) and total.any()
    assert torch.equal(after[0] + after[2], total)


def test_verify_adds_what_is_left() -> None:
    mesh = mesh_of(*SIZES)

    def main() -> bool:
        state, step = begun(mesh, 3)
        fs.verify(step, state, batch(5, mesh.rank))
        return True

    assert all(mesh.run(main))


def test_it_shows_in_plans_and_schedules() -> None:
    mesh = fs.abstract_mesh((2, 2), ("replica", "shard"))
    plain = fs.Wire(reduce={"replica": "int4"}, block=32)
    (with_it, text), (without, _) = [
        (fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan).trace(batch(0, 0)).schedule, str(plan))
        for plan in (plan_of(mesh), plan_of(mesh, plain))
    ]
    moves, others = ({m.kind: m for m in one.groups[0].transfers} for one in (with_it, without))
    own = plan_of(mesh).groups[0].owned.chunk
    assert moves["replica_reduce"].wire == "int4/32+feedback"
    assert moves["replica_reduce"].sent == others["replica_reduce"].sent == own // 2 + own // 32 * 4
    assert with_it.hash != without.hash
    assert parse(str(with_it)).hash == with_it.hash
    assert with_it.groups[0].left_bytes == 4 * own
    (first, until), (since, last) = with_it.memory.lifetimes["left:one"]
    assert str(with_it.ops[until]) == "update one" and str(with_it.ops[since]) == "replica_reduce one"
    assert (first, last) == (0, len(with_it.ops) - 1)
    assert with_it.memory.peak_bytes > without.memory.peak_bytes
    left = sum(group.owned.chunk for group in plan_of(mesh).groups) * 4
    assert "replica_reduce in int4/32+feedback: " in text
    assert f"what rounding leaves out of sums: {left / 1024:.1f} KiB a rank, in 3 groups" in text


REFUSED: dict[str, tuple[Any, str]] = {
    "no sums": (lambda: fs.Wire(gather="int8", feedback=True), "no sums are rounded"),
    "another type": (lambda: fs.Wire(reduce="int8", feedback=1), "must be True, False or axes"),  # type: ignore[arg-type]
    "no key": (lambda: fs.Wire(reduce={"replica": "int8"}, feedback="shard"), "names no axes of reduce=: 'replica'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_wire_can_be(name: str) -> None:
    make, problem = REFUSED[name]
    with pytest.raises(PlanError, match=problem):
        make()


def test_what_cannot_be_kept_is_refused() -> None:
    mesh, opt = fs.abstract_mesh((2, 2), ("replica", "shard")), fs.optim.sgd(LR)
    with pytest.raises(PlanError, match=r"(?s)one\.w.*reduce_scatter in int8.*a gradient of the whole leaf"):
        plan_of(mesh, fs.Wire(reduce="int8", feedback=True))
    with pytest.raises(PlanError, match="names no axes of a sum over replicas: .*over replica"):
        plan_of(mesh, fs.Wire(reduce="int8", feedback="shard+replica"))
    for rule, problem in (
        (fs.Rule(".*", P(flat="shard"), opt=P(flat=("shard", "replica"))), "the shard is cut further"),
        (fs.Rule(".*", P(flat="shard"), opt_memory_kind="unpinned_host"), "in host memory"),
    ):
        with pytest.raises(PlanError, match=problem):
            fs.make_plan(start(), mesh, [rule], batch=P(("replica", "shard")), wire=WIRE)
    plan = plan_of(mesh)
    with pytest.raises(PlanError, match=r"feedback=.*update='in_backward' has updated by then"):
        fs.make_train_step(loss_fn, opt, plan, schedule=fs.Policy(update="in_backward"))
    with pytest.raises(PlanError, match=r"value_and_grad: .*gradients between the parts of a step belong to no state"):
        fs.value_and_grad(loss_fn, plan)
