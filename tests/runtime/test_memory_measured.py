"""What a step allocates, seen from outside: the arena once, as large as the schedule says, and then nothing like it."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile, record_function

import fshard as fs
from fshard import P
from tests.shared.workers import Pools

WIDTH = 256
LAYERS = 6
UNIT_BYTES = WIDTH * WIDTH * 4
"""A unit's one leaf. Activations are a hundredth of it, so what is as large must hold parameters or gradients."""

SCRATCH = UNIT_BYTES
"""Bytes: the pieces in which a shard is packed, which is half of a unit."""
SLACK = 24 * 1024
"""Bytes: activations, and other small things."""

BEGIN = "Peak.begin"


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """A linear map and tanh."""
    return torch.tanh(F.linear(x, p["w"]))


def loss(p: Any, b: Any) -> Tensor:
    """A stack of layers."""
    x = b
    for number in range(LAYERS):
        x = layer(p[str(number)], x)
    return x.square().mean()


def _params() -> dict[str, Any]:
    return {str(number): {"w": torch.ones(WIDTH, WIDTH) / WIDTH} for number in range(LAYERS)}


class Peak:
    """The allocations of the host's allocator while it is entered, as the profiler saw them.

    Attributes:
        sizes: of all allocations.
        above: the most bytes at once, since ``begin`` was called if it was.
    """

    def __enter__(self) -> "Peak":
        # What an earlier test left for the collector must not be freed inside of the measurement.
        gc.collect()
        gc.disable()
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()
        return self

    def begin(self) -> None:
        """From here on the most bytes count. Profilers do not see the end of what was there before them."""
        with record_function(BEGIN):
            pass

    def __exit__(self, *exc: Any) -> None:
        self.profile.__exit__(*exc)
        gc.enable()
        events = self.profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        self.sizes = []
        level = self.above = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            if event.name() == BEGIN:
                self.above = level
            elif event.name() == "[memory]":
                self.sizes += [event.nbytes()] if event.nbytes() > 0 else []
                level += event.nbytes()
                self.above = max(self.above, level)


def measured(policy: fs.Policy, accumulate: int, spec: P, wire: fs.Wire | None = None) -> dict[str, Any]:
    """On a rank: what three steps allocated."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(_params(), mesh, [(".*", spec)], units=("*",), wire=wire)
        rule = fs.optim.adamw(1e-3)
        state = fs.init_state(plan, rule, params=_params())
        step = fs.make_train_step(loss, rule, plan, schedule=policy, accumulate=accumulate)
        batch = torch.ones(2 * accumulate, WIDTH)
        memory = step.trace(batch).schedule.memory
        peaks = []
        for _ in range(3):
            with Peak() as peak:
                state, _ = step(state, batch)
            peaks.append(peak)
        shard = sum(group.chunk * 4 for group in plan.groups)
        kept = sum(t.untyped_storage().nbytes() for t in (step._runner.programs.memory.arena,) if t is not None)
        pending = sum(g.untyped_storage().nbytes() for g in step._runner.programs.memory.homes.values())
        fs.settle(state)
        return {
            "arena": memory.arena_bytes,
            "peak": memory.peak_bytes,
            "shard": shard,
            "kept": kept,
            "pending": pending,
            "settled": sum(g.untyped_storage().nbytes() for g in step._runner.programs.memory.homes.values()),
            "first_above": peaks[0].above,
            "above": max(peak.above for peak in peaks[1:]),
            "largest": max(size for peak in peaks[1:] for size in peak.sizes),
        }


CASES = {
    "prefetch 1": (fs.Policy(), 1, P(flat="shard")),
    "prefetch 0": (fs.Policy(prefetch=0, reduces=1), 1, P(flat="shard")),
    "prefetch 3": (fs.Policy(prefetch=3, reduces=3), 1, P(flat="shard")),
    "keep": (fs.Policy(reshard=False), 1, P(flat="shard")),
    "accumulate": (fs.Policy(), 3, P(flat="shard")),
    "accumulate fully": (fs.Policy(accumulation="full"), 2, P(flat="shard")),
    "rows": (fs.Policy(), 1, P("shard")),
    "replicated": (fs.Policy(), 1, P()),
}
ONCE_MORE = ("rows",)
"""Cases that are measured on one and on four ranks by default."""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=[] if world == 2 or name in ONCE_MORE else [pytest.mark.slow])
        for name in CASES
        for world in (1, 2, 4)
    ],
)
def test_a_step_allocates_its_arena_once_and_holds_what_it_said(pool: Pools, world: int, name: str) -> None:
    summing = UNIT_BYTES if not CASES[name][2].axes else 0  # what an all-reduce takes for itself, while it lasts
    for rank, seen in enumerate(pool(world).run(measured, *CASES[name])):
        text = f"rank {rank}: {seen}"
        assert seen["kept"] == seen["arena"], text
        assert seen["largest"] <= 2 * UNIT_BYTES, text
        assert 0.98 * seen["peak"] <= seen["first_above"] <= 1.02 * seen["peak"] + SLACK + summing, text
        assert seen["above"] + seen["arena"] + seen["pending"] <= 1.02 * seen["peak"] + SLACK + summing, text
        assert seen["settled"] == 0, text  # no gradient outlives its update


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_packed_takes_what_the_schedule_says(pool: Pools, accumulate: int) -> None:
    """Packed shards, what travels, and gradients that go as soon as they are packed."""
    for seen in pool(2).run(measured, fs.Policy(), accumulate, P(flat="shard"), fs.Wire("int8", "int8")):
        assert seen["first_above"] <= 1.02 * seen["peak"] + SCRATCH, seen
        assert seen["first_above"] >= 0.98 * seen["peak"], seen
        assert seen["kept"] == seen["arena"], seen


def test_prefetch_costs_what_the_schedule_says() -> None:
    sizes = []
    plan = fs.make_plan(_params(), fs.abstract_mesh((4,), ("shard",)), [(".*", fs.fsdp("shard"))], units=("*",))
    for prefetch in range(4):
        step = fs.make_train_step(loss, fs.optim.adamw(1e-3), plan, schedule=fs.Policy(prefetch=prefetch))
        sizes.append(step.trace(torch.ones(2, WIDTH)).schedule.memory.arena_bytes)
    assert [b - a for a, b in zip(sizes, sizes[1:], strict=False)] == [UNIT_BYTES] * 3


def _replaced(compile: str | None) -> bool:
    """Whether an arena that became too small is gone at once, without the collector."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(_params(), mesh, [(".*", P(flat="shard"))], units=("*",))
        rule = fs.optim.sgd(1e-3)

        def some(p: Any, b: Any) -> Tensor:
            x = b["x"]
            for number in range(b["layers"]):
                x = layer(p[str(number)], x)
            return x.square().mean()

        step = fs.make_train_step(some, rule, plan, schedule=fs.Policy(reshard=False), compile=compile)
        state = fs.init_state(plan, rule, params=_params())
        gc.collect()
        gc.disable()
        sizes, old = [], []
        for layers in (1, LAYERS, 1):
            state, _ = step(state, {"x": torch.ones(2, WIDTH), "layers": layers})
            sizes.append(step._runner.programs.memory.arena.nbytes)
            old.append(weakref.ref(step._runner.programs.memory.arena.untyped_storage()))
        gc.enable()
        assert sizes[0] < sizes[1] == sizes[2]
        return old[0]() is None


@pytest.mark.parametrize("compile", [None, "fx"])
def test_an_arena_that_became_too_small_is_gone_at_once(pool: Pools, compile: str | None) -> None:
    assert all(pool(2).run(_replaced, compile))
