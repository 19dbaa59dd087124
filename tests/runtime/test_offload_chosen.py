"""Activations on the host, chosen: where nothing fits without, and the copies take less time than recomputation."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, tree
from fshard.foresight.foresee import foresee
from fshard.foresight.foresight_tables import sections
from tests.shared.workers import Pools

ROWS, LAYERS = 256, 6


class Block(nn.Module):
    """Keeps two tensors of four times its width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(F.gelu(self.up(x))))


def made(mesh: fs.Mesh, **options: Any) -> Any:
    """A step, its plan and its model."""
    torch.manual_seed(0)
    model = fs.split(nn.Sequential(*(Block() for _ in range(LAYERS))), units=("*",))
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=P("data"))
    step = fs.make_train_step(lambda p, x: model.apply(p, x).square().mean(), fs.optim.sgd(0.1), plan, **options)
    return step, plan, model


GPU = fs.abstract_mesh((2,), ("data",), device="cuda")
BATCH = torch.empty(ROWS, 16)


def peaks() -> tuple[int, int, int]:
    """What a step holds without, with activations on the host, and computed again."""
    steps = [made(GPU, remat=remat)[0] for remat in (None, "offload", "all")]
    kept, hosted, again = [step.trace(BATCH).footprint.peak_bytes for step in steps]
    return kept, hosted, again


def choice(memory: int | None, copies: float) -> Any:
    """The choice under a limit, at a rate of copies."""
    auto = fs.Auto(memory=memory, compute=1e9, wire=1e9, copies=copies)
    return made(GPU, schedule=auto)[0].trace(BATCH).choice


def test_the_limit_and_the_rate_decide() -> None:
    kept, hosted, _ = peaks()
    assert hosted < 0.6 * kept
    free = choice(None, 1e12)
    assert not free.task.again and not free.task.hosted
    fast, slow = choice(int(1.1 * hosted), 1e12), choice(int(1.1 * hosted), 1e6)
    assert fast.task.hosted and fast.task.again and not slow.task.hosted and slow.task.again
    assert f"offload={len(fast.task.again)} units, 0 to" in str(fast).splitlines()[0]
    assert fast.chosen.memory.host_bytes > 0 == slow.chosen.memory.host_bytes
    assert any(op.kind == "activation_offload" for op in fast.schedule)
    both = {(each.hosted, bool(each.again)) for each in fast.candidates}
    assert both == {(False, False), (False, True), (True, True)}  # all are told
    assert "MB/s to the host" in fast.reason


def test_on_the_host_itself_nothing_is_offloaded() -> None:
    kept, hosted, again = peaks()
    mesh = fs.abstract_mesh((2,), ("data",))
    auto = fs.Auto(memory=int(1.1 * max(hosted, again)), compute=1e9, wire=1e9, copies=1e12)
    found = made(mesh, schedule=auto)[0].trace(torch.empty(ROWS, 16)).choice
    assert not any(each.hosted for each in found.candidates)


def _trained(memory: int | None, offload: bool) -> tuple[list[float], list[torch.Tensor], list[str], list[bool]]:
    """Losses and parameters of three steps under a limit; the ops, and whether each step ran its schedule."""
    with pytest.MonkeyPatch.context() as change:
        change.setattr("fshard.runtime.steps.measured_rates.ways", lambda plan: (True,))
        change.setattr("fshard.runtime.steps.programs.ways", lambda plan: (True,))
        mesh = fs.make_mesh((-1,), ("data",))
        auto = fs.Auto(memory=memory, compute=1e9, wire=1e9, copies=1e12)
        step, plan, model = made(mesh, schedule=auto if offload else None)
        state, losses, ran = fs.init_state(plan, step.opt, params=model.params), [], []
        for number in range(3):
            x = torch.randn(ROWS * mesh.size, 16, generator=torch.Generator().manual_seed(number))
            state, metrics = step(state, x.chunk(mesh.size)[mesh.rank])
            losses.append(metrics.loss.item())
            ran.append(tuple(step.record) == tuple(step.schedule.ops))
        whole = tree.leaves(fs.unshard(fs.settle(state).params, plan))
        return losses, whole, [op.kind for op in step.schedule], ran


def test_steps_run_what_was_chosen(pool: Pools) -> None:
    """On ranks, as on a device with a memory of its own: chosen together, traced anew once, and run."""
    limit = int(0.55 * peaks()[0])
    (want, leaves, kinds, _), _ = pool(2).run(_trained, None, False)
    assert "activation_offload" not in kinds
    for losses, whole, kinds, ran in pool(2).run(_trained, limit, True):
        assert losses == want and all(map(torch.equal, whole, leaves))
        assert kinds.count("activation_offload") == kinds.count("wait activation_fetch") > 0
        assert all(ran)


def test_foresight_has_it() -> None:
    hardware = fs.sim.hardware("a100", communicator=0)
    seen = {remat: foresee(made(GPU, remat=remat)[0], BATCH, hardware) for remat in (None, "offload")}
    assert seen["offload"].chosen.memory.peak_bytes < 0.6 * seen[None].chosen.memory.peak_bytes
    assert seen[None].host_bytes == 0 < seen["offload"].host_bytes == seen["offload"].chosen.memory.host_bytes
    copies = hardware.of(seen["offload"].task, seen["offload"].plan).copies
    assert {kind for kind, _ in copies} == {"activation_offload", "activation_fetch"}
    each = 4 * ROWS * (2 * 64 + 16)  # what a block keeps: two wide tensors, and its input
    assert copies["activation_offload", "1"] == pytest.approx(each / 25.6e9)  # 80 % of the table's rate
    page = str([*sections(seen["offload"])])
    assert "state, gradients and activations" in page and "a second to a rank's host" in page
