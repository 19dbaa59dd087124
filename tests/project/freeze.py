"""What steps come to, bit for bit: a record that a change of the package must leave as it is.

``python -m tests.project.freeze --write before.json`` notes what each of some sixty steps computes and sends in five
calls, and the texts of errors; ``--against before.json`` says what differs now. Run both on one machine and one
release of PyTorch: other kernels have other bits. All ranks are played in this process.
"""

import argparse
import hashlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P, tree
from fshard.errors import ShardError
from fshard.played.transport import VirtualCommunicator
from fshard.state.entries import entries
from tests.mistakes.test_swapped import CALLS as GIVEN
from tests.mistakes.test_swapped import OPTIONS

CALLS, ROWS, WIDTH = 5, 8, 24
TOLD = ("loss", "grad_norm", "aux", "lr", "grad_norms", "skipped", "elements")

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "1": ((1,), ("shard",)),
    "2": ((2,), ("shard",)),
    "4": ((4,), ("shard",)),
    "2x2": ((2, 2), ("replica", "shard")),
}
INIT = [(".*gain", fs.init.ones())]
BOTH = ("replica", "shard")
FLAT: tuple[Any, ...] = ((".*", fs.fsdp("shard")),)
ZERO1: tuple[Any, ...] = (fs.Rule(".*", P(), opt=fs.fsdp("shard")),)
FURTHER: tuple[Any, ...] = (fs.Rule(".*", fs.fsdp("shard"), opt=fs.fsdp(("shard", "replica"))),)
PACKED: tuple[Any, ...] = (fs.Rule("0.up.*", fs.fsdp("shard"), packed="int8/64"), *FLAT)
HOST: tuple[Any, ...] = (fs.Rule(".*", fs.fsdp("shard"), memory_kind="unpinned_host"),)
HOST_STATE: tuple[Any, ...] = (fs.Rule(".*", fs.fsdp("shard"), opt_memory_kind="unpinned_host"),)
DIM: tuple[Any, ...] = ((".*weight", P("shard")), *FLAT)
MIXED: tuple[Any, ...] = ((".*bias", P()), *FLAT)
CLIP = (("0.*", 0.1), (".*", 0.5))


@dataclass(frozen=True)
class Setting:
    """A step.

    Attributes:
        mesh: a key of ``MESHES``.
        rules: of the plan.
        opt: makes the optimizer.
        policy: of the schedule.
        options: of the train step, or of its parts.
        plan: further arguments of ``fs.make_plan``.
        how: "train", "parts", "outer", or "demand" for a loss that no trace finds.
    """

    mesh: str = "2"
    rules: Sequence[Any] = FLAT
    opt: Callable[[], Any] = lambda: fs.optim.adamw(1e-2)
    policy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    how: str = "train"


def settings() -> Iterator[tuple[str, Setting]]:
    """The steps by name."""
    for mesh in MESHES:
        yield f"flat on {mesh}", Setting(mesh)
        yield f"parts on {mesh}", Setting(mesh, how="parts")
        yield f"by dims on {mesh}", Setting(mesh, DIM)
        yield f"on demand on {mesh}", Setting(mesh, how="demand")
    for mesh in ("2", "4", "2x2"):
        yield f"sharded state on {mesh}", Setting(mesh, ZERO1)
        yield f"some replicated on {mesh}", Setting(mesh, MIXED, options={"clip_norm": 0.3})
        yield f"accumulated on {mesh}", Setting(mesh, options={"accumulate": 2})
        yield f"compiled on {mesh}", Setting(mesh, options={"compile": "fx"})
    for prefetch, reduces, reshard in ((0, 0, True), (1, 1, False), (3, 2, fs.keep(last=1))):
        policy = {"prefetch": prefetch, "reduces": reduces, "reshard": reshard}
        yield f"policy {prefetch} {reduces} {reshard}", Setting(policy=policy)
        yield f"policy {prefetch} {reduces} {reshard}, by parts", Setting(policy=policy, how="parts")
    full = {"accumulation": "full"}
    yield "whole gradients accumulated", Setting("2x2", policy=full, options={"accumulate": 2})
    yield "updated in backward", Setting(policy={"update": "in_backward"})
    yield "secondary shards", Setting("2x2", ((".*", fs.fsdp(BOTH)),), policy={"reshard": fs.secondary("shard")})
    yield "state cut further", Setting("2x2", FURTHER)
    yield "state cut further, by parts", Setting("2x2", FURTHER, how="parts")
    yield "sharded state, by parts", Setting("2", ZERO1, how="parts")
    yield "a packed leaf", Setting(rules=PACKED, plan={"frozen": True})
    yield "in host memory", Setting(rules=HOST)
    yield "state in host memory", Setting(rules=HOST_STATE)
    for wire in ("bf16", "int8", "int4"):
        yield f"gathers in {wire}", Setting(plan={"wire": fs.Wire(gather=wire, block=16)})
        sums = fs.Wire(reduce={"replica": wire}, block=16, feedback=wire != "bf16")
        yield f"sums over replicas in {wire}", Setting("2x2", plan={"wire": sums})
    yield "gathers in int8, by parts", Setting(plan={"wire": fs.Wire(gather="int8", block=16)}, how="parts")
    yield "reductions in int8", Setting(plan={"wire": fs.Wire(reduce="int8", block=16, rotate=True)})
    yield "updates in int8", Setting(rules=ZERO1, plan={"wire": fs.Wire(update="int8", block=16)})
    yield "low rank", Setting("2x2", plan={"wire": fs.Wire(reduce={"replica": "powersgd"}, rank=2)})
    yield "computed in bf16", Setting(plan={"precision": fs.Precision(compute=torch.bfloat16, inputs=True)})
    yield "every second step", Setting(opt=lambda: fs.optim.every(2, fs.optim.adamw(1e-2)))
    yield "momentum", Setting(opt=lambda: fs.optim.sgd(1e-2, momentum=0.9, nesterov=True, weight_decay=0.1))
    yield "an average", Setting(opt=lambda: fs.optim.ema(fs.optim.sgd(1e-2), 0.5))
    yield (
        "several optimizers",
        Setting(opt=lambda: fs.optim.partition([(".*bias", fs.optim.sgd(0.1)), (".*", fs.optim.lion(1e-3))])),
    )
    yield (
        "muon",
        Setting(
            rules=(fs.Rule(".*", fs.fsdp("shard"), align="leaf"),),
            opt=lambda: fs.optim.partition([(".*up.weight", fs.optim.muon(0.02)), (".*", fs.optim.adamw(1e-2))]),
        ),
    )
    yield "clip rules", Setting(options={"clip_norm": list(CLIP)})
    yield "clipped, by parts", Setting(options={"clip_norm": 0.3}, how="parts")
    yield "a loss scale", Setting(options={"loss_scale": fs.LossScale(initial=64.0, interval=2)})
    yield "norms by unit", Setting(options={"norms": "groups"})
    yield "skipped above a norm", Setting(options={"skip_norm": 0.4})
    yield "computed again", Setting(options={"remat": "all"})
    yield "not donated", Setting(options={"donate": False})
    yield "debugged", Setting(options={"debug": True})
    yield "outer steps", Setting("2x2", how="outer")


class Block(nn.Module):
    """A residual block that drops some of what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop, self.gain = nn.Dropout(0.2), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.drop(self.down(torch.tanh(self.up(x))))
        return x + self.gain * added


def digest(values: Any) -> str:
    """A text that differs where any bit of tensors and numbers does."""
    found = hashlib.sha256()
    leaves, structure = tree.flatten(values)
    found.update(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            found.update(bytes(leaf.detach().contiguous().flatten().view(torch.uint8).tolist()))
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()[:16]


def made(setting: Setting, mesh: fs.Mesh) -> tuple[Any, fs.TrainState, fs.Plan]:
    """The step of a setting, its first state, and its plan."""
    torch.manual_seed(0)
    net, more = nn.Sequential(Block(), Block(), Block()), dict(setting.plan)
    if more.pop("frozen", False):
        net.get_submodule("0.up").requires_grad_(False)
    model = fs.split(net, units=["*"])
    plan = fs.make_plan(model, mesh, list(setting.rules), batch=P(mesh.axis_names), **more)
    opt, options = setting.opt(), dict(setting.options)

    def loss_fn(params: Any, batch: Tensor) -> Any:
        out = model.apply(params, batch)
        if setting.how == "demand":
            out = out * float(out.detach().abs().max() < 1e9)  # asks for a value, which a trace has not
        loss = (out.float() - batch.roll(1, 1)).square().mean()
        return loss, {"noise": torch.rand(()), "mean": out.float().mean()}

    if setting.how == "parts":
        clip = options.pop("clip_norm", None)
        grad, update = fs.value_and_grad(loss_fn, plan, has_aux=True), fs.make_update(opt, plan, clip_norm=clip)

        def by_parts(state: fs.TrainState, batch: Tensor) -> Any:
            (loss, aux), grads = grad(state.params, batch)
            state, metrics = update(state, fs.tree.map(lambda g: 2 * g, grads))
            return state, {"loss": loss, "norm": metrics.grad_norm, "drawn": torch.rand(()), **aux}

        step: Any = fs.make_step(by_parts, plan, schedule=fs.Policy(**setting.policy), **options)
        return step, fs.init_state(plan, opt, init=INIT), plan
    step = fs.make_train_step(loss_fn, opt, plan, schedule=fs.Policy(**setting.policy), **options)
    if setting.how == "outer":
        step = fs.outer(step, fs.optim.sgd(0.7, momentum=0.9), every=2, fragments=2)
        return step, fs.init_state(step.plan, step.opt, init=INIT), step.plan
    return step, fs.init_state(plan, opt, init=INIT), plan


def on_rank(setting: Setting) -> dict[str, Any]:
    """What a rank finds in five calls."""
    sizes, names = MESHES[setting.mesh]
    with fs.make_mesh(sizes, names) as mesh:
        step, state, plan = made(setting, mesh)
        told = []
        for number in range(CALLS):
            batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * number + mesh.rank))
            state, metrics = step(state, batch)
            told.append(metrics)
        schedule = getattr(step, "schedule", None)
        numbers = [m if isinstance(m, dict) else [getattr(m, name) for name in TOLD] for m in told]
        held = [(entry.name, entry.tensor) for entry in entries(fs.settle(state))]
        ops = [str(op) for op in getattr(step, "record", ())]
        return {
            "state": digest(held),
            "metrics": digest(numbers),
            "ops": f"{len(ops)} {digest(ops)}",
            "sent": sum(move.sent for group in schedule.groups for move in group.transfers) if schedule else None,
            "step": int(state.step),
        }


def frozen(setting: Setting) -> dict[str, Any]:
    """What all ranks find, and the collectives that they called."""
    sizes, _ = MESHES[setting.mesh]
    calls: list[list[str]] = [[] for _ in range(torch.Size(sizes).numel())]
    arrive = VirtualCommunicator._arrive

    def noted(self: VirtualCommunicator, call: str, *rest: Any) -> Any:
        calls[self.rank].append(f"{call} among {self.size}")
        return arrive(self, call, *rest)

    VirtualCommunicator._arrive = noted  # type: ignore[assignment, method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ranks = fs.virtual_mesh((len(calls),), ("any",)).run(on_rank, setting)
    except ShardError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        VirtualCommunicator._arrive = arrive  # type: ignore[method-assign]
    for found, own in zip(ranks, calls, strict=True):
        found["collectives"] = f"{len(own)} {digest(own)}"
    return {f"rank {number}": found for number, found in enumerate(ranks)}


def errors() -> dict[str, str]:
    """The texts of errors about two arguments that have changed places, by the name of what is called."""
    found = {}
    for name, given in GIVEN.items():
        function: Any = fs
        for part in name.split("."):
            function = getattr(function, part)
        first, second, *rest = given()
        try:
            function(second, first, *rest, **OPTIONS.get(name, {}))
            found[name] = "accepted"
        except Exception as error:
            found[name] = re.sub(r"0x[0-9a-f]+|'/[^']*'", "...", f"{type(error).__name__}: {error}")
    return found


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Lines that say what differs between two records."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{path} / {key}".removeprefix(" / "))
    elif before != after:
        yield f"{path}: {before!r} before, {after!r} now"


def main() -> int:
    """Write a record, or compare with one."""
    parser = argparse.ArgumentParser(prog="python -m tests.project.freeze", description=__doc__)
    parser.add_argument("--write", type=Path, help="the file for the record")
    parser.add_argument("--against", type=Path, help="a record of before")
    parser.add_argument("--only", default="", help="a part of the names of steps")
    given = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {}
    for name, setting in settings():
        if given.only in name:
            record[name] = frozen(setting)
            print(f"{name}: {record[name].get('error') or record[name]['rank 0']}", file=sys.stderr, flush=True)
    if not given.only:
        record["errors"] = errors()
    if given.write is not None:
        given.write.write_text(json.dumps(record, indent=1, sort_keys=True))
    found = []
    if given.against is not None:
        before = json.loads(given.against.read_text())
        found = [*differences({name: before.get(name) for name in record} if given.only else before, record)]
    print(*found, f"{len(record)} entries, {len(found)} differences", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
