"""Runs on GPUs are planned where there are none: plans, schedules, footprints and choices."""

import pytest
import torch

import fshard as fs
from fshard.errors import PlanError

if torch.cuda.is_available():
    pytest.skip("this machine has GPUs, on which programs are found on fake tensors of theirs", allow_module_level=True)

MODEL = fs.split(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)), units=("0", "2"))


def loss_fn(params, x):
    return MODEL.apply(params, x).pow(2).mean()


def planned(device, **options):
    mesh = fs.abstract_mesh((4,), ("data",), device=device)
    plan = fs.make_plan(MODEL, mesh, [fs.Rule(".*", fs.fsdp("data"), **options)], batch=fs.P("data"))
    return plan, torch.ones(4, 8)


@pytest.mark.parametrize("options", [{}, {"memory_kind": "unpinned_host"}, {"trainable": False}], ids=str)
def test_schedules_of_gpus_are_those_of_the_host_but_for_staging(options):
    traces = []
    for device in ("cuda", "cpu"):
        plan, x = planned(device, **options)
        step = fs.make_eval_step(lambda params, x: {"x": MODEL.apply(params, x).mean()}, plan)
        if options.get("trainable", True):
            step = fs.make_train_step(loss_fn, fs.optim.adamw(1e-3), plan, clip_norm=1.0, remat="all", accumulate=2)
        traces.append(step.trace(x))
    on_gpus, on_host = traces
    assert on_gpus.schedule.ops == on_host.schedule.ops
    assert (
        on_gpus.footprint.peak_bytes <= on_host.footprint.peak_bytes
    )  # NCCL adds on the way, so that fewer chunks arrive


def test_auto_chooses_for_gpus_from_numbers_that_it_is_given():
    plan, x = planned("cuda")
    step = fs.make_train_step(loss_fn, fs.optim.sgd(0.1), plan, schedule=fs.Auto(compute=1e12, wire=1e9))
    choice = step.trace(x).choice
    assert choice.policy == choice.candidates[0].policy


def test_gradients_too():
    plan, x = planned("cuda")
    assert fs.value_and_grad(loss_fn, plan).trace(x).schedule.ops[0].kind == "handshake"


def test_a_state_needs_the_device_itself():
    plan, _ = planned("cuda")
    for make in (
        lambda: fs.init_state(plan, fs.optim.sgd(0.1)),
        lambda: fs.shard(MODEL.params, plan),
    ):
        with pytest.raises(PlanError, match=r"cuda.*no such device.*abstract_mesh\(device='cpu'\)"):
            make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_addresses_on_gpus_are_those_that_fast_kernels_need(dtype):
    """Groups begin at multiples of 256 bytes of the arena; leaves and shards at 16 elements: kernels load 16 bytes."""
    params = {str(i): {"w": torch.ones(7, 5 + i), "b": torch.ones(3 + i), "odd": torch.ones(1)} for i in range(3)}
    for rules in ([fs.Rule(".*", fs.fsdp("data"))], [fs.Rule(".*w", fs.P(None, None)), fs.Rule(".*", fs.fsdp("data"))]):
        mesh = fs.abstract_mesh((4,), ("data",), device="cuda")
        precision = fs.Precision(dtype, dtype)
        plan = fs.make_plan(params, mesh, rules, batch=fs.P("data"), units=[*params], precision=precision)
        step = fs.make_train_step(
            lambda p, x: sum(leaf.sum() for each in p.values() for leaf in each.values()) * x.mean(),
            fs.optim.sgd(0.1),
            plan,
        )
        memory = step.trace(torch.ones(4)).schedule.memory
        assert memory.offsets and all(offset % 256 == 0 for offset in memory.offsets.values())
        for group in plan.groups:
            places = [*group.starts, group.chunk, group.numel]
            assert all(place * group.compute_dtype.itemsize % 32 == 0 for place in places), group.name
