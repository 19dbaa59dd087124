"""What ranks must have in common beside their program: rows where no spec cuts them, and modes of the interpreter."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P
from fshard.errors import BatchError, LossError, ReplicationError


def loss(params: Any, x: Tensor) -> Tensor:
    """The distance from a row."""
    return (params["w"] - x).square().mean()


def parts_step(plan: fs.Plan, opt: Any) -> Callable[..., Any]:
    """The same as a train step, of parts."""
    grad, update = fs.value_and_grad(loss, plan), fs.make_update(opt, plan)

    def step(state: Any, x: Any) -> Any:
        value, grads = grad(state, x)
        return update(state, grads)[0], value

    return fs.make_step(step, plan)


def trained(mesh: Any, batch: P, row: Callable[[Any], int], parts: bool = False, steps: int = 2) -> list[list[float]]:
    """The parameters on each rank after some steps on rows of its own."""
    plan = fs.make_plan({"w": torch.zeros(4)}, mesh, [(".*", fs.fsdp("data"))], batch=batch)
    opt = fs.optim.sgd(0.5)
    step = parts_step(plan, opt) if parts else fs.make_train_step(loss, opt, plan)

    def main() -> list[float]:
        state = fs.init_state(plan, opt, params={"w": torch.zeros(4)})
        for _ in range(steps):
            state, _ = step(state, torch.full((1, 4), float(row(plan.mesh.here))))
        return fs.unshard(state.params, plan)["w"].tolist()

    found: list[list[float]] = mesh.run(main)
    return found


@pytest.mark.parametrize("parts", [False, True])
def test_rows_of_replicas_are_cut_or_equal(parts: bool) -> None:
    """The case: HSDP whose batch names the shards' axis alone. The remedy gives the mean of all rows."""
    mesh = fs.virtual_mesh((2, 2), ("replica", "data"))
    with pytest.raises(BatchError, match=r"ranks 0 and 2 have different rows.*batch=P\(\('replica', 'data'\)\)"):
        trained(mesh, P("data"), lambda here: here.rank, parts)
    right = [0.25 * 1.5 + 0.75 * 0.25 * 1.5] * 4
    assert trained(mesh, P(("replica", "data")), lambda here: here.rank, parts) == [right] * 4
    assert trained(mesh, P("data"), lambda here: 3 * here.index(("data",)), parts) == [right] * 4


def test_any_mesh_with_an_idle_axis() -> None:
    """Meshes of two and three axes: refused if and only if ranks along axes that no spec names have different rows."""
    draw = random.Random(3)
    for sizes in [(2, 2), (2, 1, 2), (2, 2, 2)]:
        for order in itertools.permutations(range(len(sizes))):
            names = [("data", "a", "b")[at] for at in order][: len(sizes)]
            if "data" not in names:
                continue
            mesh = fs.virtual_mesh(sizes, names)
            idle = tuple(name for name, size in zip(names, sizes, strict=True) if name != "data" and size > 1)
            trained(mesh, P("data"), lambda here: here.index(("data",)), steps=1)
            if idle:
                odd = draw.randrange(mesh.size)
                with pytest.raises(BatchError, match="drift apart"):
                    trained(mesh, P("data"), lambda here, odd=odd: 9 * (here.rank == odd), steps=1)


def test_ranks_that_exchange_values_may_have_other_rows() -> None:
    """A loss that sums over the axis itself, and evaluations, are right with any rows."""
    mesh = fs.virtual_mesh((2,), ("cp",))
    plan = fs.make_plan({"w": torch.zeros(4)}, mesh, [(".*", P())], batch=P())
    opt = fs.optim.sgd(0.5)

    def summed(params: Any, x: Tensor) -> Tensor:
        shared = fs.parallel.shared(params["w"], axis="cp")
        return fs.collectives.pmean((shared - x).square().mean(), "cp")

    step, evaluate = fs.make_train_step(summed, opt, plan), fs.make_eval_step(loss, plan)

    def main() -> tuple[list[float], float]:
        state = fs.init_state(plan, opt, params={"w": torch.zeros(4)})
        x = torch.full((1, 4), float(plan.mesh.here.rank))
        value = evaluate(state, x)
        state, _ = step(state, x)
        return state.params["w"].tolist(), value.item()

    assert mesh.run(main) == [([0.125] * 4, 0.5)] * 2


@contextmanager
def grad_off() -> Iterator[None]:
    """Gradients off, as a caller may have forgotten."""
    with torch.no_grad():
        yield


MODES = {
    "autocast on the CPU": lambda: torch.autocast("cpu", torch.bfloat16),
    "torch.is_grad_enabled": grad_off,
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("parts", [False, True])
def test_modes_that_differ_by_rank_are_refused(name: str, parts: bool) -> None:
    """With the mode and its value by rank, before anything runs; equal modes are taken."""
    mesh = fs.virtual_mesh((2,), ("data",))
    plan = fs.make_plan({"w": torch.zeros(4)}, mesh, [(".*", fs.fsdp("data"))], batch=P("data"))
    opt = fs.optim.sgd(0.5)
    step = parts_step(plan, opt) if parts else fs.make_train_step(loss, opt, plan)

    def main(which: Callable[[int], bool]) -> None:
        state = fs.init_state(plan, opt, params={"w": torch.zeros(4)})
        with MODES[name]() if which(plan.mesh.here.rank) else nullcontext():
            step(state, torch.zeros(1, 4))

    with pytest.raises(ReplicationError, match=name):
        mesh.run(main, bool)
    with pytest.raises(LossError, match="no_grad") if name == "torch.is_grad_enabled" else nullcontext():
        mesh.run(main, lambda rank: True)


def test_modes_of_processes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes that threads of a virtual mesh share: each changes the number, and is named."""
    from fshard.runtime.comm.facts import Facts
    from fshard.runtime.steps.handshake import modes, number_of, with_modes

    def changed(change: Callable[[], object], back: Callable[[], object]) -> list[str]:
        before = modes()
        change()
        try:
            after = modes()
        finally:
            back()
        assert number_of(before) != number_of(after)
        (old,), (new,) = with_modes(Facts(), before).items(), with_modes(Facts(), after).items()
        return [name for name in old if old[name] != new[name]]

    dtype, f32 = torch.set_default_dtype, torch.float32
    assert changed(lambda: dtype(torch.float64), lambda: dtype(f32)) == ["torch.get_default_dtype()"]
    strict = torch.use_deterministic_algorithms
    found = changed(lambda: strict(True), lambda: strict(False))
    assert found == ["torch.are_deterministic_algorithms_enabled()"]
    precise = torch.set_float32_matmul_precision
    assert changed(lambda: precise("high"), lambda: precise("highest")) == ["torch.get_float32_matmul_precision()"]


def test_modules_split_in_other_modes_are_named() -> None:
    """One rank has called ``.eval()`` before ``fs.split``."""
    mesh = fs.virtual_mesh((2,), ("data",))

    def main() -> None:
        here = fs.make_mesh((2,), ("data",))
        net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        if here.rank:
            net[1].eval()
        model = fs.split(net)
        plan = fs.make_plan(model, here, [(".*", P())], batch=P("data"))
        opt = fs.optim.sgd(0.5)
        step = fs.make_train_step(lambda params, x: model.apply(params, x).mean(), opt, plan)
        step(fs.init_state(plan, opt, seed=0), torch.zeros(1, 2))

    with pytest.raises(ReplicationError, match="modules in evaluation mode: rank 0: nothing, rank 1: 1"):
        mesh.run(main)
