"""Leaves that begin to train in the middle of a run: their moments are those of a parameter that was added then."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.errors import PlanError
from fshard.optim.contract import contract
from tests.shared.workers import Pools
from tests.training import leaf_rows
from tests.training.leaf_rows import SHARDED

LATE = r"(blocks\.1|tok)\..*"
SOME = [fs.Rule(LATE, fs.fsdp("shard"), trainable=False), SHARDED]
SWITCH, STEPS = 4, 9
EPS = 1e-4  # or Adam makes something of the rounding of gradients that are nearly zero
RATE = fs.optim.schedules.warmup_linear(0.05, warmup=2, total=12)
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "adamw": (
        fs.optim.adamw(RATE, eps=EPS, weight_decay=0.1),
        lambda ps: torch.optim.AdamW(ps, eps=EPS, weight_decay=0.1),
    ),
    "around": (
        fs.optim.chain(
            fs.optim.scale(1.0), fs.optim.partition([(r".*", fs.optim.ema(fs.optim.adamw(RATE, eps=EPS), 0.5))])
        ),
        lambda ps: torch.optim.AdamW(ps, eps=EPS),
    ),
    "nadam": (fs.optim.from_torch(torch.optim.NAdam, lr=RATE, eps=EPS), lambda ps: torch.optim.NAdam(ps, eps=EPS)),
    "dampened": (
        fs.optim.sgd(RATE, momentum=0.9, dampening=0.5),
        lambda ps: torch.optim.SGD(ps, momentum=0.9, dampening=0.5),
    ),
}


def plain(make: Any, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Losses, last parameters and state dict of one plain process, which adds a group of parameters on the way."""
    net = leaf_rows.module()
    named = dict(net.named_parameters())
    late = {path: leaf for path, leaf in named.items() if leaf_rows.re.fullmatch(LATE, path)}
    rule = make([(path, leaf) for path, leaf in named.items() if path not in late])
    losses = []
    for number in range(steps):
        if number == SWITCH:
            rule.add_param_group({"params": list(late.items())})
        for group in rule.param_groups:
            group["lr"] = RATE(number)
        x, y = leaf_rows.batch(number)
        net.zero_grad()
        loss = leaf_rows.loss_of(net(x), y)
        loss.backward()
        rule.step()
        losses.append(loss.item())
    return losses, {path: leaf.detach() for path, leaf in named.items()}, rule.state_dict()


def run(name: str, folder: str) -> tuple[list[float], dict[str, Tensor], dict[str, float], bool]:
    """On a rank: losses, last parameters, each parameter's count of updates, and whether a resumed run is the same."""
    opt, model = OPTIMIZERS[name][0], fs.split(leaf_rows.module(), units=("blocks.*",))
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(model, mesh, SOME)
        state = fs.init_state(plan, opt, params=model.params)
        losses: list[float] = []
        ckpt = fs.Checkpointer(folder)
        resumed: dict[str, Any] = {}
        for number in range(STEPS):
            if number in (0, SWITCH):
                plan = plan.replace(rules=[SHARDED]) if number else plan
                state = fs.reshard_state(state, plan, opt) if number else state
                step = fs.make_train_step(leaf_rows.loss_fn(model), opt, plan, debug=True)
            if number == SWITCH + 2:
                ckpt.save(state)
                resumed = {"state": ckpt.restore(plan, opt), "losses": []}
            if resumed:
                resumed["state"], metrics = step(resumed["state"], leaf_rows.part(number, mesh.rank, mesh.size))
                resumed["losses"].append(float(metrics.loss))
            state, metrics = step(state, leaf_rows.part(number, mesh.rank, mesh.size))
            losses.append(float(metrics.loss))
        counts = {
            p: float(row["step"]) for p, row in fs.io.to_optim_state_dict(state, opt)["state"].items() if "step" in row
        }
        same = resumed["losses"] == losses[SWITCH + 2 :] and resumed["state"].late == state.late
        return losses, dict(tree.paths(fs.unshard(state.params, plan))), counts, same


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("around", "nadam"))) for name in OPTIMIZERS]
)
def test_unfrozen_leaves_train_as_parameters_that_were_added(pool: Pools, tmp_path: Path, name: str) -> None:
    losses, params, found = plain(OPTIMIZERS[name][1])
    counted = {group_path: row["step"].item() for group_path, row in _rows(found).items() if "step" in row}
    for ours, whole, counts, resumed in pool(2).run(run, name, str(tmp_path)):
        assert resumed
        assert ours == pytest.approx(losses, rel=1e-5)
        assert not counts or counts == counted
        for path, leaf in whole.items():
            torch.testing.assert_close(leaf, params[path], rtol=1e-5, atol=1e-5)


def _rows(found: dict[str, Any]) -> dict[str, Any]:
    """The state of torch's optimizer by path."""
    names = {
        n: name
        for group in found["param_groups"]
        for n, name in zip(group["params"], group["param_names"], strict=True)
    }
    return {names[number]: row for number, row in found["state"].items()}


def test_a_common_count_would_show() -> None:
    """The reference is far from one in which all parameters count alike."""
    one, other = plain(OPTIMIZERS["adamw"][1])[1], plain(lambda ps: _Alike(ps, eps=EPS, weight_decay=0.1))[1]
    assert max(float((one[path] - other[path]).abs().max()) for path in one) > 1e-3


class _Alike(torch.optim.AdamW):
    """A parameter that comes late takes over the count of the first one."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        counts = [row["step"] for row in self.state.values()]
        for row in self.state.values():
            row["step"].fill_(max(counts).item())


def _plan(mesh: fs.Mesh, *rules: Any) -> fs.Plan:
    return fs.make_plan({"a": torch.ones(40), "b": torch.ones(24), "c": torch.ones(8)}, mesh, rules)


def _frozen(pattern: str) -> list[Any]:
    return [fs.Rule(pattern, fs.fsdp("shard"), trainable=False), SHARDED]


def test_who_is_late_goes_with_the_state() -> None:
    mesh, opt = fs.make_mesh((1,), ("shard",)), fs.optim.adamw(0.1)
    plan = _plan(mesh, *_frozen("[bc]"))
    state = fs.init_state(plan, opt, params={"a": torch.ones(40), "b": torch.ones(24), "c": torch.ones(8)})

    def train(state: fs.TrainState, steps: int) -> fs.TrainState:
        step = fs.make_train_step(
            lambda p, x: sum((leaf * x).square().mean() for leaf in tree.leaves(p)), opt, state.plan
        )
        for _ in range(steps):
            state, _ = step(state, torch.ones(()))
        return state

    seen = []
    for pattern in ("[c]", "-", "a", "-"):
        state = train(state, 2)
        rules = [SHARDED] if pattern == "-" else _frozen(pattern)
        state = fs.reshard_state(state, state.plan.replace(rules=rules), opt)
        seen.append(state.late)
    assert seen == [{"b": 2}, {"b": 2, "c": 4}, {"b": 2, "c": 4}, {"b": 2, "c": 4, "a": 8}]
    state = train(state, 1)
    steps = {path: row["step"].item() for path, row in fs.io.to_optim_state_dict(state, opt)["state"].items()}
    assert steps == {"a": 1, "b": 7, "c": 5}


def test_counts_of_torch_come_in() -> None:
    leaves = {name: torch.nn.Parameter(torch.ones(n)) for name, n in (("a", 40), ("b", 24), ("c", 8))}
    theirs = torch.optim.AdamW([("a", leaves["a"])], lr=0.1)
    for number in range(5):
        if number == 2:
            theirs.add_param_group({"params": [("b", leaves["b"]), ("c", leaves["c"])]})
        for leaf in leaves.values():
            leaf.grad = leaf.detach().clone()
        theirs.step()
    opt, plan = fs.optim.adamw(0.1), _plan(fs.make_mesh((1,), ("shard",)), SHARDED)
    given = {name: leaf.detach() for name, leaf in leaves.items()}
    state = fs.io.from_state_dict(given, plan, opt, theirs.state_dict())
    assert (state.step, state.late) == (5, {"b": 2, "c": 2})
    step = fs.make_train_step(lambda p, x: sum((leaf * x).square().sum() / 2 for leaf in tree.leaves(p)), opt, plan)
    state, _ = step(state, torch.ones(()))
    for leaf in leaves.values():
        leaf.grad = leaf.detach().clone()
    theirs.step()
    for name, leaf in state.params.items():
        torch.testing.assert_close(leaf, leaves[name].detach(), rtol=1e-6, atol=1e-7)
    fresh = fs.io.from_state_dict(given, plan, opt, step=5)
    assert fresh.late == {"a": 5, "b": 5, "c": 5}  # an optimizer that starts anew corrects its moments


def test_an_optimizer_that_cannot_be_told() -> None:
    class Old:
        """An optimizer of before there was ``late=``."""

        lr = 0.1

        def init(self, param: Tensor) -> dict[str, Tensor]:
            return {}

        def hyper(self, path: str, shape: tuple[int, ...]) -> None:
            return None

        def update(
            self, params: Any, grads: Any, states: Any, *, step: int, hyper: Any, grad_scale: Any, found_inf: Any
        ) -> None:
            torch._foreach_add_(params, grads, alpha=-0.1)

    mesh, opt = fs.make_mesh((1,), ("shard",)), Old()
    plan = _plan(mesh, *_frozen("b"))
    state = fs.init_state(plan, opt, params={"a": torch.ones(40), "b": torch.ones(24), "c": torch.ones(8)})

    def loss(p: Any, x: Tensor) -> Any:
        return sum((leaf * x).square().mean() for leaf in tree.leaves(p))

    state, _ = fs.make_train_step(loss, opt, plan)(state, torch.ones(()))
    state = fs.reshard_state(state, plan.replace(rules=[SHARDED]), opt)
    with pytest.raises(PlanError, match=r"(?s)Old.update takes no late=.*b: since step 1.*argument late: int = 0"):
        fs.make_train_step(loss, opt, state.plan)(state, torch.ones(()))
    assert state.params["a"].shape == (40,)


ALL: list[Any] = [
    fs.optim.adamw(0.1),
    fs.optim.sgd(0.1, momentum=0.9, dampening=0.5),
    fs.optim.lion(0.1),
    fs.optim.adamw8bit(0.1, block=64),
    fs.optim.adafactor(0.1),
    fs.optim.muon(0.1),
    fs.optim.from_torch(torch.optim.RAdam, lr=0.1),
    fs.optim.every(2, fs.optim.adamw(0.1)),
    fs.optim.ema(fs.optim.chain(fs.optim.scale(0.5), fs.optim.masked(fs.optim.adamw(0.1), ".*")), 0.5),
]


@pytest.mark.parametrize("opt", ALL, ids=repr)
def test_what_is_late_is_as_old_as_its_updates(opt: Any) -> None:
    """Steps 5 to 8 of a leaf that came after the fourth are its first four, at the same learning rate."""
    hyper = opt.hyper("w", (16, 8))
    found = []
    for late in (0, 4):
        w = torch.linspace(-1, 1, 128)
        state = contract(opt).init(w, hyper)
        for number in range(1, 5):
            more = {"late": late} if late else {}
            opt.update([w], [torch.sin(w * number)], [state], step=number + late, hyper=hyper, **more)
        found.append([w, *state.values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(found[0][0], torch.linspace(-1, 1, 128))
