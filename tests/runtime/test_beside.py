"""Updates beside compute: the bits of updates in their place, and where they are refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P, tree
from fshard.errors import PeerError, PlanError
from fshard.runtime.execution import PendingUpdate
from tests.runtime.test_happens_before import raced
from tests.runtime.test_lanes import HSDP, LAYOUTS, SHARD, Case, loss, made, params

CASES: dict[str, dict[str, Any]] = {
    "flat": {"accumulate": 2, "clip_norm": 0.1},
    "some whole": {"clip_norm": 0.1, "debug": True},
    "opt axes": {"skip_norm": 1.0},
    "zero": {"donate": False, "loss_scale": fs.LossScale(8.0)},
}
"""Options of the step, by layout."""


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that passes for a device with streams."""
    monkeypatch.setattr("fshard.runtime.steps.step_options.ComputeOrder.kinds", ("cpu", "cuda"))
    monkeypatch.setattr("fshard.runtime.comm.device_streams.compute_stream", lambda device: None)
    yield


def trained(layout: str, update: str, fails: int = -1) -> tuple[list[list[float]], set[str]]:
    """Three steps: numbers and parameters of rank 0; and the kinds of ops that ran. One call fails on the last rank."""
    axes, rules = LAYOUTS[layout]

    def rank() -> Any:
        mesh = fs.make_mesh(*axes)
        plan, opt, calls = made(mesh, rules), fs.optim.adamw(lambda step: 1e-2 / (step + 1)), list[bool]()

        def fn(p: Any, x: Tensor) -> Tensor:
            out = loss(p, x)
            if mesh.rank == mesh.size - 1 and calls and calls.pop():
                raise ValueError("not today")
            return out

        state = fs.init_state(plan, opt, params=params())
        step = fs.make_train_step(fn, opt, plan, schedule=fs.Policy(update=update), **CASES[layout])
        numbers = []
        for number in range(4):
            batch = torch.randn(16, 6, generator=torch.Generator().manual_seed(number)).chunk(mesh.size)[mesh.rank]
            if number == fails:
                calls.append(True)
                with pytest.raises((ValueError, PeerError), match="not today"):
                    step(state, batch)
            state, metrics = step(state, batch)
            numbers.append([metrics.loss.item(), metrics.grad_norm.item()])
        leaves = tree.leaves(fs.unshard(fs.settle(state).params, plan))
        return numbers + [x.flatten().tolist() for x in leaves], {op.kind for op in step.schedule}

    found: tuple[list[list[float]], set[str]] = fs.virtual_mesh(*axes).run(rank)[0]
    return found


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("layout", [*CASES])
def test_bits_are_those_of_updates_in_their_place(layout: str) -> None:
    beside, kinds = trained(layout, "beside", fails=2 if layout != "zero" else -1)
    plain, others = trained(layout, "deferred")
    assert beside == plain
    assert "wait update" in kinds and "wait update" not in others


def raced_in(layout: str, drop: str = "") -> tuple[list[str], set[str]]:
    options = {"schedule": fs.Policy(update="beside"), "accumulate": 2, "clip_norm": 0.1}
    return raced(Case(*LAYOUTS[layout], options), drop)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [*CASES])
def test_every_access_of_memory_is_ordered(layout: str) -> None:
    """And needs the event of what is before an update, and the wait for it."""
    races, sites = raced_in(layout)
    assert not races, "\n".join(races)
    needed = [site for site in sites if "Actions.apply" in site or "Actions._updated" in site]
    assert len(needed) == 2
    for site in needed:
        assert raced_in(layout, site)[0], site


def test_a_gradient_that_goes_while_its_update_runs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PendingUpdate.apply
    monkeypatch.setattr(PendingUpdate, "apply", lambda self, shards, groups, *args: real(self, shards, groups))
    assert any("memory is freed" in race and "updates" in race for race in raced_in("flat")[0])


def refused(mesh: fs.Mesh, **changes: Any) -> str:
    plan = fs.make_plan(params(), mesh, [fs.Rule(".*", fs.fsdp("shard"), **changes)], batch=P("shard"))
    with pytest.raises(PlanError) as caught:
        fs.make_train_step(loss, fs.optim.adamw(1e-2), plan, schedule=fs.Policy(update="beside"))
    return str(caught.value)


def test_refusals_name_what_is_in_the_way() -> None:
    cpu = fs.abstract_mesh(*SHARD)
    assert "update='beside' needs the streams of a GPU, and the mesh is on device 'cpu': use update='def" in refused(
        cpu
    )
    gpu = fs.abstract_mesh(*SHARD, device="cuda")
    hosted = refused(gpu, opt_memory_kind="unpinned_host", update_on="host")
    assert "or its optimizer state is in memory of the host" in hosted and "GPU" not in hosted
    plan = fs.make_plan(params(), fs.abstract_mesh(*HSDP), [(".*", fs.fsdp("shard"))], batch=P(("replica", "shard")))
    with pytest.raises(PlanError, match=r"only fs.make_train_step can have update='beside'"):
        fs.make_step(lambda state, batch: (state, {}), plan, schedule=fs.Policy(update="beside"))
