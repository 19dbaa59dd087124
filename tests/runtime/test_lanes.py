"""Every schedule under the latest and the earliest moves that its collectives allow: the same bits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, tree
from fshard.collectives import pmean
from tests.shared.lanes import LaneError, copies, laned

LAYERS, WIDTH, ROWS = 4, 6, 16
HOST = "unpinned_host"
SHARD, HSDP = ((2,), ("shard",)), ((2, 2), ("replica", "shard"))


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """A linear map and tanh."""
    return torch.tanh(F.linear(x, p["w"], p["b"]))


def loss(p: Any, batch: Tensor) -> Tensor:
    """Layers, of which the first runs twice, and a parameter outside of units."""
    x = batch
    for number in (*range(LAYERS), 0):
        x = layer(p[str(number)], x)
    return (x * p["scale"]).square().mean()


def spoken(p: Any, batch: Tensor) -> Tensor:
    """The same with a collective of its own in it."""
    return loss(p, batch - pmean(batch.mean(), "shard"))


@fs.unit
def inner(p: Any, x: Tensor) -> Tensor:
    """Keeps what nobody else holds, and what the next one keeps too."""
    return torch.tanh(torch.sigmoid(F.linear(x, p["w"], p["b"])))


def keeping(p: Any, batch: Tensor) -> Tensor:
    """Layers of it, of which the first runs twice."""
    x = batch
    for number in (*range(LAYERS), 0):
        x = inner(p[str(number)], x)
    return (x * p["scale"]).square().mean()


def params() -> dict[str, Any]:
    """Start values."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / 2

    return {"scale": draw(WIDTH)} | {str(i): {"w": draw(WIDTH, WIDTH), "b": draw(WIDTH)} for i in range(LAYERS)}


@dataclass(frozen=True)
class Case:
    """A mesh, rules, and options of the step; how the step is made, and what looks at the state after each."""

    axes: Any
    rules: Sequence[Any]
    options: dict[str, Any]
    precision: fs.Precision | None = None
    fn: Any = loss
    wire: fs.Wire | None = None
    make: Callable[..., Any] = lambda case, plan, opt: fs.make_train_step(case.fn, opt, plan, **case.options)
    look: Callable[[], Callable[[fs.TrainState], None]] = lambda: lambda state: None


LAYOUTS: dict[str, tuple[Any, Sequence[Any]]] = {
    "flat": (SHARD, [fs.Rule(".*", fs.fsdp("shard"))]),
    "some whole": (SHARD, [fs.Rule("scale|.*b", P()), fs.Rule(".*", fs.fsdp("shard"))]),
    "hsdp": (HSDP, [fs.Rule(".*", fs.fsdp("shard"))]),
    "opt axes": (HSDP, [fs.Rule(".*", fs.fsdp("shard"), opt=fs.fsdp(("shard", "replica")))]),
    "zero": (SHARD, [fs.Rule(".*", P(), opt=fs.fsdp("shard"))]),
    "host": (SHARD, [fs.Rule(".*", fs.fsdp("shard"), memory_kind=HOST)]),
    "kept on the host": (SHARD, [fs.Rule(".*", fs.fsdp("shard"), memory_kind=HOST, update_on="device")]),
    "host, updated there": (HSDP, [fs.Rule(".*", fs.fsdp("shard"), opt_memory_kind=HOST, update_on="host")]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "nothing ahead": {"schedule": fs.Policy(0, 1)},
    "far ahead": {"schedule": fs.Policy(4, 4), "accumulate": 2, "debug": True},
    "kept": {"schedule": fs.Policy(2, 2, reshard=False), "accumulate": 2},
    "whole gradients": {"schedule": fs.Policy(accumulation="full"), "accumulate": 2, "clip_norm": 0.1},
    "in backward": {"schedule": fs.Policy(update="in_backward")},
    "remat": {"remat": "all", "clip_norm": 0.1, "debug": True},
    "not donated": {"donate": False, "accumulate": 2},
}


def made(mesh: fs.Mesh, rules: Sequence[Any], precision: fs.Precision | None = None, wire: Any = None) -> fs.Plan:
    """The plan of a rank, with a unit for each layer."""
    units = [str(number) for number in range(LAYERS)]
    return fs.make_plan(params(), mesh, rules, batch=P(mesh.axis_names), units=units, precision=precision, wire=wire)


def trained(case: Case, lane: str) -> tuple[Any, list[str]]:
    """Three steps on a virtual mesh: every number and parameter, and the collectives that took the lane."""

    def rank() -> tuple[Any, list[str]]:
        with laned(fs.make_mesh(*case.axes), lane) as (mesh, seen):
            plan = made(mesh, case.rules, case.precision, case.wire)
            opt = fs.optim.adamw(1e-2)
            state = fs.init_state(plan, opt, params=params())
            step = case.make(case, plan, opt)
            numbers = []
            for number in range(3):
                batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).chunk(mesh.size)[
                    mesh.rank
                ]
                state, metrics = step(state, batch)
                numbers += [metrics.loss.item(), metrics.grad_norm.item()]
            leaves = tree.leaves(fs.unshard(fs.settle(state).params, plan))
            return (numbers, [x.tolist() for x in leaves]), seen

    with copies(lane):
        return fs.virtual_mesh(*case.axes).run(rank)[0]


CASES = {
    **{f"{layout}, {option}": Case(*LAYOUTS[layout], OPTIONS[option]) for layout in LAYOUTS for option in OPTIONS},
    "bfloat16": Case(*LAYOUTS["hsdp"], {}, fs.Precision(torch.bfloat16, torch.bfloat16, inputs=True)),
    "a collective of the program": Case(*LAYOUTS["flat"], {"accumulate": 2}, fn=spoken),
    "a collective, computed again": Case(*LAYOUTS["flat"], {"remat": "all"}, fn=spoken),
    "activations on the host": Case(*LAYOUTS["flat"], {"remat": "offload", "accumulate": 2, "debug": True}, fn=keeping),
    "activations on the host, far ahead": Case(
        *LAYOUTS["hsdp"], {"remat": fs.checkpoint_policies.offload(prefetch=2), "schedule": fs.Policy(3, 2)}
    ),
    "packed": Case(*LAYOUTS["hsdp"], {}, wire=fs.Wire(gather="int8", reduce="int8", block=16)),
    "packed updates": Case(*LAYOUTS["opt axes"], {}, wire=fs.Wire(update="int8", block=16)),
    "feedback": Case(*LAYOUTS["hsdp"], {}, wire=fs.Wire(reduce={"replica": "int4"}, feedback=True, block=16)),
    "low rank": Case(*LAYOUTS["hsdp"], {}, wire=fs.Wire(reduce={"replica": "powersgd"}, rank=1)),
    "secondary": Case(
        HSDP,
        [fs.Rule(".*", fs.fsdp(("replica", "shard")))],
        {"schedule": fs.Policy(2, 2, reshard=fs.secondary("shard"))},
    ),
}


def shared_out(names: Iterable[str], which: int) -> list[Any]:
    """Every layout with some options in the default tests, as parameters, and with the others in the slow ones.

    The default tests of one module have another sixth of all pairs than those of another.
    """
    beside = {f"{a}, {b}": (i + j) % 6 != which for i, a in enumerate(LAYOUTS) for j, b in enumerate(OPTIONS)}
    return [pytest.param(name, marks=pytest.mark.slow if beside.get(name) else pytest.mark.long) for name in names]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", shared_out(CASES, 0))
def test_results_do_not_depend_on_when_data_move(name: str) -> None:
    case = CASES[name]
    want, _ = trained(case, "plain")
    for lane in ("lazy", "eager"):
        got, seen = trained(case, lane)
        assert got == want, lane
        assert seen


def parts(lane: str) -> Any:
    """Steps of parts: two passes, arithmetic between them, two updates."""

    def rank() -> Any:
        with laned(fs.make_mesh(*HSDP), lane) as (mesh, seen):
            plan = made(mesh, [(".*", fs.fsdp("shard"))])
            opt = fs.optim.adamw(1e-2)
            grad, update = fs.value_and_grad(loss, plan, accumulate=2), fs.make_update(opt, plan, clip_norm=0.1)

            def sharpness_aware(state: Any, batch: Any) -> Any:
                value, first = grad(state.params, batch)
                value, second = grad(fs.tree.add(state.params, fs.tree.scale(first, 0.05)), batch)
                state, _ = update(state, second)
                return state, value

            step, state, out = fs.make_step(sharpness_aware, plan), fs.init_state(plan, opt, params=params()), []
            for number in range(3):
                batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).chunk(mesh.size)[
                    mesh.rank
                ]
                state, value = step(state, batch)
                out.append(value.item())
            assert seen or lane == "plain"
            return out, [x.tolist() for x in tree.leaves(fs.unshard(fs.settle(state).params, plan))]

    return fs.virtual_mesh(*HSDP).run(rank)[0]


@pytest.mark.long
def test_steps_of_parts() -> None:
    want = parts("plain")
    assert parts("lazy") == want and parts("eager") == want


def lone(fn: Any) -> Any:
    """Run a function with a lazy communicator on two ranks."""

    def rank() -> Any:
        with laned(fs.make_mesh(*SHARD), "lazy") as (mesh, _):
            return fn(mesh.transport.communicator("all_gather", ("shard",)), mesh.rank)

    return fs.virtual_mesh(*SHARD).run(rank)


def test_a_lane_sees_what_breaks_the_contract() -> None:
    def early(comm: Any, rank: int) -> float:
        out = torch.zeros(4)
        comm.all_gather(out, torch.ones(2))
        return float(out.sum())

    assert all(value != value for value in lone(early))  # read before the wait: nan

    def changed(comm: Any, rank: int) -> None:
        shard, out = torch.ones(2), torch.zeros(4)
        handle = comm.all_gather(out, shard)
        shard.add_(1)
        handle.wait()

    with pytest.raises(LaneError, match=r"all-gather on all_gather\(shard\): an input has changed"):
        lone(changed)

    def summed(comm: Any, rank: int) -> list[float]:
        out, full = torch.full((2,), 10.0), torch.arange(4.0)
        comm.reduce_scatter(out, full, torch.empty(4), True).wait()
        return [*out.tolist(), float(full.isnan().all())]

    assert lone(summed) == [[10.0, 12.0, 1.0], [14.0, 16.0, 1.0]]


@pytest.mark.long
def test_a_runtime_that_forgets_a_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of transfer in turn: its wait does nothing, so what it moves is read too early."""
    from fshard.runtime.execution.actions import Actions

    real = Actions._end
    case = CASES["opt axes, default"]
    want, _ = trained(case, "lazy")
    for kind in ("all_gather", "reduce_scatter", "replica_reduce", "update_gather"):

        def forgets(self: Any, key: Any, finish: Any, buffers: Any, kind: str = kind) -> None:
            if key[0] == kind:
                self.handles[key] = _Nothing()
            real(self, key, finish, buffers)

        monkeypatch.setattr(Actions, "_end", forgets)
        try:
            got = trained(case, "lazy")[0]
        except Exception:
            continue
        assert repr(got) != repr(want), kind


class _Nothing:
    """A handle whose wait does nothing."""

    def wait(self) -> None:
        """Does nothing."""
