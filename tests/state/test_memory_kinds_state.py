"""Memory kinds and everything around a step: states, checkpoints, schedules, other optimizers, failures, bad input."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, errors, tree
from fshard.runtime.memory.memory_spaces import MemorySpace, memory_space
from fshard.schedule import parse
from fshard.schedule.check import check
from tests.optim import runs as optims
from tests.runtime.test_memory_kinds import HERE, HOST, KINDS, hosted
from tests.shared.bad import UNITS, Raised, alike, attempt, weights
from tests.shared.virtual import Job
from tests.shared.workers import Pools

DEVICE = [(r".*\.b", P()), (r".*", fs.fsdp("shard"))]
OPT = fs.optim.adamw(1e-2, weight_decay=0.1)


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """One unit."""
    return torch.tanh(F.linear(x.to(p["w"].dtype), p["w"], p.get("b")))


def loss(p: Any, x: Tensor) -> Tensor:
    """A loss over the tree of ``tests.shared.bad``."""
    for name in UNITS:
        x = layer(p[name], x)
    return x.square().mean() - x.mean()


def rows(step: int, mesh: fs.Mesh) -> Tensor:
    """A rank's part of a batch."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).chunk(mesh.size)[mesh.rank].to(mesh.device)


def planned(mesh: fs.Mesh, kinds: str = "", rules: Any = DEVICE) -> fs.Plan:
    """The plan of the tree, with some kinds."""
    names = mesh.axis_names
    spec = P(names if len(names) > 1 else names[0])
    return fs.make_plan(weights(), mesh, hosted(rules, KINDS.get(kinds, {})), batch=spec, units=UNITS)


def carried(root: str) -> list[str]:
    """On a rank: train half under each of the kinds, carry the state to others, and go on. What differs from a run
    without any of it."""
    out = []
    with fs.make_mesh((-1,), ("shard",)) as mesh:

        def train(state: fs.TrainState, until: int) -> fs.TrainState:
            step = fs.make_train_step(loss, OPT, state.plan, clip_norm=0.5, debug=True)
            while state.step < until:
                state, _ = step(state, rows(state.step, mesh))
            return state

        def kept(state: fs.TrainState) -> dict[str, Tensor]:
            trees = {"params": state.params, **state.opt_state}
            return {
                f"{name}.{path}": leaf
                for name, held in trees.items()
                for path, leaf in tree.paths(fs.unshard(held, state.plan))
            }

        want = kept(train(fs.init_state(planned(mesh), OPT, params=weights()), 4))
        for number, (first, then) in enumerate([("", HERE[0]), (HERE[0], HERE[1]), (HERE[1], HERE[2]), (HERE[2], "")]):
            state = train(fs.init_state(planned(mesh, first), OPT, params=weights()), 2)
            other = planned(mesh, then)
            with fs.Checkpointer(f"{root}/{number}", async_=number % 2 == 1) as ckpt:
                ckpt.save(state)
                ckpt.wait()
                restored = ckpt.restore(other, OPT)
            moved = fs.reshard_state(state, state.plan.replace(rules=hosted(DEVICE, KINDS.get(then, {}))), OPT)
            for way, mine in (("restored", restored), ("moved", moved)):
                found = kept(train(mine, 4))
                out += [f"{first} to {then}, {way}: {n}" for n in want if not torch.equal(found[n], want[n])]
    return out


def test_states_go_from_kind_to_kind(pool: Pools, tmp_path: Path) -> None:
    assert pool(2).run(carried, str(tmp_path)) == [[], []]


def around() -> list[str]:
    """On a rank: what else reads parameters, compared with a plan on the device."""
    out: list[str] = []
    want: dict[str, Tensor] = {}
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        for kinds in ("", *KINDS):
            plan = planned(mesh, kinds)
            state = fs.init_state(plan, fs.optim.ema(OPT, 0.5), params=weights())
            step = fs.make_train_step(loss, fs.optim.ema(OPT, 0.5), plan)
            for number in range(2):
                state, _ = step(state, rows(number, mesh))
            x = rows(7, mesh)
            value, grads = fs.value_and_grad(loss, plan, debug=True)(state.params, x)
            seen = {
                "eval": fs.make_eval_step(loss, plan, debug=True)(state, x),
                "full": fs.make_eval_step(loss, plan, precision=fs.Precision(torch.float64))(state, x),
                "value": value,
                "grad": torch.cat([g.flatten() for _, g in tree.paths(fs.unshard(grads, plan))]),
                "pure": torch.func.grad(fs.func.sharded_loss(loss, plan))(state.params, x)["first"]["w"],
                "whole": torch.cat([g.flatten() for _, g in tree.paths(fs.unshard(fs.settle(state).params, plan))]),
                "mean": fs.averaged(state).params["middle"]["w"],
                "norm": fs.tree.norm(state.params, plan),
            }
            want = want or seen
            out += [f"{kinds}: {name}" for name, x in seen.items() if not torch.equal(x, want[name])]
    return out


def test_whatever_reads_parameters_reads_the_same(pool: Pools) -> None:
    assert pool(2).run(around) == [[], []]


def ruled(names: list[str], axes: Any) -> list[str]:
    """On a rank: optimizers of all kinds, compared with a plan on the device."""
    out = []
    with fs.make_mesh(*axes) as mesh:
        for number, name in enumerate(names):
            case = optims.CASES[name]
            bound = any(isinstance(rule, fs.Rule) and rule.opt is not None for rule in case.rules)
            kinds = HERE[2] if bound else HERE[number % 3]
            want = optims.run(case, mesh)
            mine = optims.run(dataclasses.replace(case, rules=hosted(case.rules, KINDS[kinds])), mesh)
            same = all(torch.equal(leaf, mine.params[path]) for path, leaf in want.params.items())
            out += [] if same and want.losses == mine.losses else [f"{name}, {kinds}"]
    return out


def test_any_optimizer_may_update_on_either_side(job: Job) -> None:
    names = ["muon", "adafactor", "partition", "chain"]
    assert job(2).run(ruled, names, ((-1,), ("shard",)), timeout=110.0) == [[], []]
    axes = ((2, -1), ("replica", "shard"))
    assert job(4).run(ruled, optims.TWO_AXES, axes, timeout=110.0) == [[]] * 4


@pytest.mark.slow
@pytest.mark.long
def test_two_axes_and_eight_bits() -> None:
    mesh = fs.virtual_mesh((2, 2), ("replica", "shard"))
    opt = fs.optim.adamw8bit(1e-2)

    def run(kinds: str) -> dict[str, Tensor]:
        rules = [fs.Rule(r".*\.b", P(), align=256), fs.Rule(r".*", fs.fsdp("shard"), align=256)]
        plan = planned(mesh, kinds, rules)
        state = fs.init_state(plan, opt, params=weights())
        step = fs.make_train_step(loss, opt, plan, clip_norm=0.1, accumulate=2, debug=True)
        for number in range(3):
            state, _ = step(state, rows(number, mesh))
        assert step.record == step.schedule.ops
        return dict(tree.paths(fs.unshard(fs.settle(state).params, plan)))

    want = mesh.run(run, "")[0]
    for kinds in HERE:
        assert all(torch.equal(leaf, want[path]) for path, leaf in mesh.run(run, kinds)[3].items()), kinds


class Careless:
    """An optimizer that writes something, and then fails, at the time it is told to."""

    lr = 0.1

    def __init__(self) -> None:
        self.fails = False

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"seen": torch.zeros_like(param)}

    def hyper(self, path: str, shape: tuple[int, ...]) -> None:
        return None

    def update(self, params: list[Tensor], grads: list[Tensor], states: Any, **_: Any) -> None:
        torch._foreach_add_(params, grads, alpha=-0.1)
        if self.fails:
            raise ValueError("careless")


def test_a_rule_that_fails_on_guests_has_written_nothing() -> None:
    plan, opt = planned(fs.make_mesh((1,), ("shard",)), "kept on the host"), Careless()
    step = fs.make_train_step(loss, opt, plan)
    state = fs.init_state(plan, opt, params=weights())
    state, _ = step(state, rows(0, plan.mesh))
    before = {path: leaf.clone() for path, leaf in tree.paths(state.params)}
    state, _ = step(state, rows(1, plan.mesh))
    opt.fails = True
    with pytest.raises(ValueError, match="careless"):
        state.finished()
    assert all(torch.equal(leaf, shard) for leaf, shard in zip(before.values(), _pieces(state), strict=True))
    opt.fails = False
    assert not all(
        torch.equal(leaf, new) for leaf, (_, new) in zip(before.values(), tree.paths(state.params), strict=True)
    )


def _pieces(state: fs.TrainState) -> list[Tensor]:
    places = state.plan.places()
    out = []
    for path in state.plan.leaves:
        group, number = places[path]
        begin, end = group.shard_range(number, 0)
        out.append(state.shards()[group.id].param[begin:end].view(group.local_shape(number, state.plan.mesh)))
    return out


def test_gradients_wait_where_they_are_needed() -> None:
    mesh = fs.make_mesh((1,), ("shard",))
    for kinds in KINDS:
        plan = planned(mesh, kinds)
        state = fs.init_state(plan, OPT, params=weights())
        lie = [shard.param.data_ptr() for shard in state.shards()]
        step = fs.make_train_step(loss, OPT, plan)
        for number in range(2):
            state, _ = step(state, rows(number, mesh))
        memory = step._runner.programs.memory
        arena = memory.arena
        if plan.groups[0].kinds.hosted:  # units read copies
            assert arena is not None and arena.numel() == sum(-(-g.numel * 4 // 256) * 256 for g in plan.groups)
        host = plan.groups[0].offloaded
        away = {group: each.own for group, each in memory.gradients.items() if each.own is not each.home}
        assert sorted(away) == ([g.id for g in plan.groups] if host else [])
        assert not any(grad.untyped_storage().nbytes() for grad in away.values())
        assert all(grad.untyped_storage().nbytes() for grad in memory.homes.values())
        assert [shard.param.data_ptr() for shard in state.shards()] == lie  # updated where they lie


def traced(kinds: str, policy: fs.Policy, accumulate: int = 1, opt: Any = OPT) -> Any:
    """The schedule on two ranks."""
    mesh = fs.abstract_mesh((2,), ("shard",))
    step = fs.make_train_step(loss, opt, planned(mesh, kinds), schedule=policy, accumulate=accumulate)
    return step.trace(torch.zeros(4 * accumulate, 6)).schedule


@pytest.mark.sample(3)
@pytest.mark.parametrize("kinds", KINDS)
def test_schedules_are_text_and_back(kinds: str) -> None:
    for policy in (fs.Policy(), fs.Policy(0, 1, False, "in_backward"), fs.Policy(3, 3)):
        schedule = traced(kinds, policy, 2)
        assert parse(str(schedule)) == schedule
        ops = [op.kind for op in schedule]
        groups = len(schedule.groups) if "update_on" in KINDS[kinds] or kinds == HERE[0] else 0
        groups = 0 if KINDS[kinds].get("update_on") == "device" else groups
        assert ops.count("offload") == ops.count("wait offload") == groups


@pytest.mark.parametrize(
    ("kind", "policy", "says"),
    [
        ("offload", fs.Policy(), "no offload of .* is under way"),
        ("wait offload", fs.Policy(), "offload of .* is not over"),
        ("wait offload", fs.Policy(update="in_backward"), "offload of .* is not over"),
        ("all_gather", fs.Policy(), "no all_gather of"),
    ],
)
def test_a_schedule_without_one_of_them_is_refused(kind: str, policy: fs.Policy, says: str) -> None:
    schedule = traced(HERE[0], policy)
    at = max(i for i, op in enumerate(schedule) if op.kind == kind)
    if kind == "all_gather":
        at = min(i for i, op in enumerate(schedule) if op.kind == kind)
    with pytest.raises(errors.ScheduleError, match=says):
        check(dataclasses.replace(schedule, ops=schedule.ops[:at] + schedule.ops[at + 1 :]))


def test_an_early_or_second_offload_is_refused() -> None:
    schedule = traced(HERE[0], fs.Policy())
    at = next(i for i, op in enumerate(schedule) if op.kind == "offload")
    again = (*schedule.ops[: at + 1], *schedule.ops[at:])
    with pytest.raises(errors.ScheduleError, match="offload since op .* is under way"):
        check(dataclasses.replace(schedule, ops=again))
    begin = next(i for i, op in enumerate(schedule) if op == fs.schedule.Op("reduce_scatter", schedule[at].target))
    early = (*schedule.ops[:begin], schedule[at], *schedule.ops[begin:at], *schedule.ops[at + 1 :])
    with pytest.raises(errors.ScheduleError, match="reduce_scatter of .* must be waited for before"):
        check(dataclasses.replace(schedule, ops=early))


def test_host_bytes_are_no_device_bytes() -> None:
    device, host, kept = (traced(kinds, fs.Policy()) for kinds in ("", HERE[0], HERE[1]))

    def alive(schedule: Any, item: str, at: int) -> bool:
        return any(first <= at <= last for first, last in schedule.memory.lifetimes[item])

    # With an update on the host the gradient is gone before the step is over; else it waits for the next one's.
    assert alive(device, "shard:middle", len(device) - 1) and alive(device, "shard:middle", 0)
    assert not alive(host, "shard:middle", len(host) - 1) and not alive(host, "shard:middle", 0)
    stored = next(i for i, op in enumerate(host) if (op.kind, op.target) == ("wait offload", "middle"))
    assert alive(host, "shard:middle", stored) and not alive(host, "shard:middle", stored + 1)
    # With one on the device, what comes there for it: the parameter's chunk and two moments of AdamW.
    chunk = next(g for g in planned(fs.abstract_mesh((2,), ("shard",))).groups if g.name == "middle").chunk
    update = next(i for i, op in enumerate(kept) if (op.kind, op.target) == ("update", "middle"))
    assert kept.memory.lifetimes["update:middle"] == ((update, update),)
    assert next(g for g in kept.groups if g.name == "middle").update_bytes == 3 * 4 * chunk
    assert not [item for schedule in (device, host) for item in schedule.memory.sizes if item.startswith("update")]
    fs.view.timeline(host)
    fs.view.timeline(kept)


def test_the_table_says_it() -> None:
    mesh = fs.abstract_mesh((2,), ("shard",), device="cuda")
    rules = [
        fs.Rule(r"first.*", fs.fsdp("shard"), memory_kind="pinned_host"),
        fs.Rule(r"middle.*", fs.fsdp("shard"), opt_memory_kind="pinned_host"),
        fs.Rule(r"last.*", P(), memory_kind="pinned_host", trainable=False),
    ]
    text = str(planned(mesh, rules=rules))
    assert "f32[9, 6]@flat(shard) pinned_host" in text and "f32[9, 9]@flat(shard) opt=pinned_host" in text
    assert "f32[3, 9] frozen pinned_host" in text and "in host memory" in text
    plan = planned(mesh, rules=rules)
    assert {g.unit: (g.gathered, g.offloaded, g.update_staged) for g in plan.groups} == {
        "first": (True, True, False),
        "middle": (True, False, True),
        "last": (True, False, False),
    }
    assert memory_space("pinned_host", mesh) == MemorySpace(torch.device("cpu"), True)
    assert memory_space("device", mesh) == MemorySpace(torch.device("cuda"))


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no pinned memory": (
        {"memory_kind": "pinned_host"},
        ("5 problems", "first.w  [9, 6]: 216 bytes in pinned_host", "the cpu", "'unpinned_host'", "device='cuda'"),
    ),
    "no pinned memory for state": (
        {"opt_memory_kind": "pinned_host"},
        ("middle.w  [9, 9]: 324 bytes", "a mesh of GPUs"),
    ),
    "another word": ({"memory_kind": "cpu"}, ("rules[0]", "memory_kind='cpu'", "'device', 'pinned_host'")),
    "another side": ({"update_on": "cpu", "memory_kind": HOST}, ("update_on='cpu'", "'device', 'host'")),
    "an update away from everything": ({"update_on": "host"}, ("first.b  [9]", "opt_memory_kind='pinned_host'")),
    "state of frozen leaves": (
        {"trainable": False, "opt_memory_kind": HOST},
        ("first.w  [9, 6]", "opt_memory_kind='unpinned_host', but trainable=False", "memory_kind= alone"),
    ),
}


def refused(name: str) -> Raised | None:
    """On a rank: what a plan with bad kinds raises."""
    kinds, _ = BAD[name]
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        return attempt(lambda: planned(mesh, rules=[fs.Rule(r".*", fs.fsdp("shard"), **kinds)]))


@pytest.mark.parametrize("name", BAD)
def test_kinds_that_cannot_be(pool: Pools, name: str) -> None:
    alike(pool(2).run(refused, name), "PlanError", BAD[name][1])


def test_parts_of_host_memory_are_not_exchanged() -> None:
    rules = [fs.Rule(r".*", P(), opt=fs.fsdp("shard"), memory_kind=HOST)]
    with pytest.raises(errors.PlanError, match=r"(?s)first.w.*opt= over \('shard',\).*opt_memory_kind="):
        planned(fs.abstract_mesh((2,), ("shard",)), rules=rules)


def _cuda(rank_kinds: dict[str, Any], precision: fs.Precision | None) -> list[float]:
    mesh = fs.make_mesh((1,), ("shard",))
    rules = hosted(DEVICE, rank_kinds)
    plan = fs.make_plan(weights(), mesh, rules, units=UNITS, precision=precision)
    state = fs.init_state(plan, OPT, params=weights())
    step = fs.make_train_step(loss, OPT, plan, clip_norm=0.5, debug=True)
    out = []
    for number in range(5):
        state, metrics = step(state, rows(number, mesh))
        out.append(metrics.loss.item())
    kind = plan.groups[0].kinds
    param, moment = state.params["first"]["w"], state.opt_state["exp_avg"]["first"]["w"]
    assert (param.is_pinned(), moment.is_pinned()) == (kind.param == "pinned_host", kind.opt == "pinned_host")
    return out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("precision", [None, fs.Precision(torch.bfloat16)], ids=["f32", "bf16"])
def test_pinned_memory_of_a_gpu(kinds: str, precision: fs.Precision | None) -> None:
    pinned = {name: "pinned_host" if word == HOST else word for name, word in KINDS[kinds].items()}
    torch.testing.assert_close(_cuda(pinned, precision), _cuda({}, precision), rtol=0, atol=1e-5)
