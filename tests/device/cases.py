"""What runs on the device of our own, in a process of its own. Each case returns what it found wrong."""

import functools
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, init, tree
from fshard.checkpoint import save
from tests.device.own import DEVICE, load

LAYERS, WIDTH, ROWS = 3, 8, 12
HOSTED = (
    *("host, default", "host, far ahead", "kept on the host, default", "host, updated there, in backward"),
    *("host, parts", "kept on the host, parts", "host, snapshots", "host, exports", "snapshots", "late snapshots"),
    "activations on the host",
)
"""Cases of the model of streams in which memory of the host takes part."""
LIKE_OTHERS = (
    *("order: host, far ahead", "order: kept on the host, default", "order: snapshots", "order: host, exports"),
    *("remat, dots", "remat outside of steps, dots", "collectives by name, ranks", "one read: remat"),
)
"""Cases that the slow tests run: others of the default tests take the same ways."""


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """A linear map and tanh."""
    return torch.tanh(F.linear(x, p["w"], p["b"]))


def loss(p: Any, batch: Any) -> Tensor:
    """A stack of layers, with a parameter that code outside of units reads."""
    x = batch["x"]
    for number in range(LAYERS):
        x = layer(p[str(number)], x)
    return (x * p["scale"] - batch["y"]).square().mean()


def params() -> dict[str, Any]:
    """Start values, on the CPU."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / WIDTH**0.5

    return {"scale": draw(WIDTH)} | {str(i): {"w": draw(WIDTH, WIDTH), "b": draw(WIDTH)} for i in range(LAYERS)}


def batch(step: int, mesh: fs.Mesh) -> dict[str, Tensor]:
    """A rank's part of a global batch."""
    generator = torch.Generator().manual_seed(100 + step)
    whole = {name: torch.randn(ROWS, WIDTH, generator=generator) for name in ("x", "y")}
    return {name: x.chunk(mesh.size)[mesh.rank].to(mesh.device) for name, x in whole.items()}


def planned(mesh: fs.Mesh) -> fs.Plan:
    """The plan of a rank, with a unit for each layer."""
    units = [str(number) for number in range(LAYERS)]
    return fs.make_plan(params(), mesh, [(r".*", fs.fsdp("shard"))], batch=P("shard"), units=units)


def trained(mesh: fs.Mesh, loss_fn: Callable[..., Any] = loss, **options: Any) -> dict[str, Any]:
    """Three steps: losses, norms and whole parameters, on the CPU."""
    plan = planned(mesh)
    opt = fs.optim.adamw(1e-2)
    state = fs.init_state(plan, opt, params=params())
    step = fs.make_train_step(loss_fn, opt, plan, debug=True, **options)
    losses, norms = [], []
    for number in range(3):
        state, metrics = step(state, batch(number, mesh))
        losses.append(metrics.loss.item())
        norms.append(metrics.grad_norm.item())
    whole = {path: leaf.cpu() for path, leaf in tree.paths(fs.unshard(fs.settle(state).params, plan))}
    return {"losses": losses, "norms": norms, "params": whole}


def apart(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """What differs between two runs, in any bit."""
    wrong = [f"{name}: {got[name]} != {want[name]}" for name in ("losses", "norms") if got[name] != want[name]]
    return wrong + [path for path, leaf in want["params"].items() if not torch.equal(leaf, got["params"][path])]


def on(device: str, ranks: int, run: Callable[[fs.Mesh], Any]) -> Any:
    """What a function of a mesh returns on rank 0 of a virtual mesh on a device."""
    mesh = fs.virtual_mesh((ranks,), ("shard",), device=device)
    return mesh.run(lambda: run(mesh))[0]


def same(ranks: int, **options: Any) -> list[str]:
    """Whether training on the device equals that on the CPU, bit for bit."""
    return apart(on(DEVICE, ranks, lambda m: trained(m, **options)), on("cpu", ranks, lambda m: trained(m, **options)))


def alone() -> list[str]:
    """The same on a mesh of one rank that is not played: its own steps turn the device's thread off."""
    mesh = fs.make_mesh((1,), ("shard",), device=DEVICE)
    return apart(trained(mesh, named, remat="all"), on("cpu", 1, lambda m: trained(m, named, remat="all")))


def device_thread() -> list[str]:
    """The device is worth its name: without care, a backward runs on another thread, without context."""
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    seen: list[int] = []
    x.register_hook(lambda grad: seen.append(threading.get_ident()))
    x.sum().backward()
    return ["the backward ran on the thread that called it"] if seen == [threading.get_ident()] else []


@fs.unit
def summing(p: Any, x: Tensor) -> Tensor:
    """A layer that is computed again, with a sum over ranks by the name of an axis in it."""

    def inner(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, w)) + fs.collectives.pmean(x.mean(), "shard")

    return fs.remat(inner)(p["w"], x) + p["b"]


def named(p: Any, batch: Any) -> Tensor:
    """A loss of such layers."""
    x = batch["x"]
    for number in range(LAYERS):
        x = summing(p[str(number)], x)
    return (x * p["scale"] - batch["y"]).square().mean()


def named_outside(policy: Any = None, device: str = DEVICE) -> list[str]:
    """A backward outside of steps: the second run finds its axes, wherever it runs."""
    mesh = fs.virtual_mesh((1,), ("shard",), device=device)
    seen: list[str] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(threading.current_thread().name)
        return fs.collectives.psum(torch.tanh(x), "shard")

    def mapped(x: Tensor) -> Tensor:
        torch.autograd.set_multithreading_enabled(True)  # as in a process that is no played rank
        y = fs.remat(fn, policy)(x.requires_grad_()).sum()
        return torch.autograd.grad(y, x)[0]

    grad = fs.shard_map(mapped, mesh, in_specs=P(), out_specs=P(), check=False)(torch.ones(3, device=device))
    wrong = [] if torch.allclose(grad.cpu(), 1 - torch.ones(3).tanh() ** 2) else [f"the gradient is {grad}"]
    return wrong + (["it did not run again on the device's thread"] if len(set(seen)) < 2 else [])


class Fails(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("no gradient today")


def failing(ranks: int, device: str = DEVICE, rel: float = 0.0) -> list[str]:
    """A backward that raises on one rank fails the step of all, and the next step is as if it had not been.

    Its loss and norm are those of the CPU, up to a relative error.
    """

    def sometimes(p: Any, batch: Any) -> Tensor:
        x = layer(p["0"], batch["x"])
        x = Fails.apply(x) if batch["bad"] else x  # type: ignore[no-untyped-call]
        for number in range(1, LAYERS):
            x = layer(p[str(number)], x)
        return (x * p["scale"] - batch["y"]).square().mean()

    def run(mesh: fs.Mesh) -> tuple[list[str], list[float]]:
        plan = planned(mesh)
        opt, wrong = fs.optim.adamw(1e-2), []
        state = fs.init_state(plan, opt, params=params())
        step = fs.make_train_step(sometimes, opt, plan, debug=True)
        state, _ = step(state, batch(0, mesh) | {"bad": False})
        try:
            step(state, batch(1, mesh) | {"bad": mesh.rank == mesh.size - 1})
            wrong.append(f"rank {mesh.rank}: the step did not fail")
        except (ValueError, fs.errors.PeerError) as error:
            if "no gradient today" not in str(error):
                wrong.append(f"rank {mesh.rank}: {error}")
        state, metrics = step(state, batch(1, mesh) | {"bad": False})
        return wrong, [metrics.loss.item(), metrics.grad_norm.item()]

    def good(mesh: fs.Mesh) -> list[float]:
        found = trained(mesh)
        return [found["losses"][1], found["norms"][1]]

    (wrong, got), want = on(device, ranks, run), on("cpu", ranks, good)
    near = all(abs(a - b) <= rel * abs(b) for a, b in zip(got, want, strict=True))
    return wrong if near else [*wrong, f"{got} != {want}"]


def products(ranks: int) -> list[str]:
    """Gradients and Hessian-vector products by torch.func, against the CPU."""

    def run(mesh: fs.Mesh) -> list[Tensor]:
        plan = planned(mesh)
        shards = fs.shard(params(), plan)
        f = fs.func.sharded_loss(loss, plan)
        part = batch(0, mesh)
        grads = torch.func.grad(f)(shards, part)
        second = torch.func.grad(lambda p: sum(x.square().sum() for x in tree.leaves(torch.func.grad(f)(p, part))))
        return [x.cpu() for x in (*tree.leaves(grads), *tree.leaves(second(shards)))]

    got, want = on(DEVICE, ranks, run), on("cpu", ranks, run)
    return [f"{i}: {a} != {b}" for i, (a, b) in enumerate(zip(got, want, strict=True)) if not torch.equal(a, b)]


@contextmanager
def threaded() -> Iterator[None]:
    """The bug: backwards run where PyTorch runs them by itself."""
    real = torch.autograd.set_multithreading_enabled
    torch.autograd.set_multithreading_enabled = lambda mode: real(True)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.autograd.set_multithreading_enabled = real  # type: ignore[misc]


def on_its_thread(ranks: int) -> str:
    """The error of a step whose backward runs on the device's thread, with a collective by name in it."""
    with threaded():
        try:
            on(DEVICE, ranks, lambda m: trained(m, named, remat="all"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def ordered(name: str) -> list[str]:
    """Accesses of the memory of the device and of the host that nothing orders."""
    from tests.runtime.test_happens_before import CASES, raced

    return raced(CASES[name], device=DEVICE)[0]


def random_numbers() -> list[str]:
    """Draws of more numbers than one block of the CPU has, which is a part of one of the device: equal bits."""
    key, shape = fs.random.key(3), (2, 1 << 17)
    drawn = {
        device: (
            fs.random.uniform(key.to(device), shape),
            fs.random.normal(key.to(device), shape, start=(0, 3), of=(2, 1 << 18)),
            fs.random.uniform(key.to(device), shape, start=torch.tensor(5)),
            init.normal()(7, shape, torch.arange(1 << 18, device=device)),
        )
        for device in ("cpu", DEVICE)
    }
    return [str(n) for n, (a, b) in enumerate(zip(*drawn.values(), strict=True)) if not torch.equal(a, b.cpu())]


def saved_beside_steps() -> list[str]:
    """Asynchronous saves in small chunks, on a thread beside steps: each holds the state of its step."""
    mesh, wrong = fs.make_mesh((1,), ("shard",), device=DEVICE), []
    plan, opt = planned(mesh), fs.optim.adamw(1e-2)
    state, step = fs.init_state(plan, opt, params=params()), fs.make_train_step(loss, opt, plan)
    kept = {}
    with (
        pytest.MonkeyPatch.context() as change,
        tempfile.TemporaryDirectory() as folder,
        fs.Checkpointer(folder, keep=None, async_=True) as checkpoints,
    ):
        change.setattr(save, "CHUNK", 100)
        for number in range(1, 4):
            state, _ = step(state, batch(number, mesh))
            checkpoints.save(state)
            kept[number] = [leaf.clone() for leaf in tree.leaves((state.params, state.opt_state))]
        checkpoints.wait()
        for number, want in kept.items():
            again = checkpoints.restore(plan, opt, step=number)
            got = tree.leaves((again.params, again.opt_state))
            wrong += [f"step {number}" for a, b in zip(got, want, strict=True) if not torch.equal(a, b)]
    return wrong


def whole_graph(ranks: int, case: str, policy: str = "step") -> list[str]:
    """Steps that are captured with raw addresses, without what waits for the device, and replayed: bits of eager ones.

    The host's copies and reads of the device are errors in a capture.
    """
    from tests.whole_graph import test_whole_graph as graphs

    def run(mesh: fs.Mesh, policy: fs.Policy) -> graphs.Trace:
        return graphs.trained(mesh, policy, **graphs.CASES[case])

    wrong = []
    for graphed, eager in graphs.both(ranks, run, DEVICE, graphs.POLICIES[policy]):
        graphed.same(eager)
        wrong += [] if graphed.how.count("replayed") == graphs.STEPS - 3 else graphed.how
    return wrong


CASES: dict[str, Callable[[], list[str]]] = {
    "the backward has a thread": device_thread,
    "steps": lambda: same(1),
    "steps of ranks": lambda: same(3),
    "accumulation": lambda: same(2, accumulate=2),
    "clipping": lambda: same(2, clip_norm=[(r"0\..*", 0.01), (r".*", 0.1)]),
    "remat": lambda: same(2, remat="all"),
    "remat, dots": lambda: same(1, remat=fs.checkpoint_policies.dots),
    "activations on the host": lambda: same(2, remat="offload", accumulate=2),
    "graphs, activations on the host": lambda: same(1, remat="offload", compile="fx"),
    "update in backward": lambda: same(2, schedule=fs.Policy(update="in_backward")),
    "collectives by name": lambda: same(1, loss_fn=named),
    "collectives by name, ranks": lambda: same(3, loss_fn=named),
    "collectives by name, remat": lambda: same(2, loss_fn=named, remat="all"),
    "collectives by name, alone": alone,
    "graphs": lambda: same(2, compile="fx"),
    "whole graphs": lambda: whole_graph(2, "dropout, scale"),
    "whole graphs, segments": lambda: whole_graph(2, "dropout, scale", "segments"),
    "whole graphs, remat": lambda: whole_graph(1, "remat"),
    "whole graphs, clip": lambda: whole_graph(2, "clip by rule, rates"),
    "remat outside of steps": named_outside,
    "remat outside of steps, dots": lambda: named_outside(fs.checkpoint_policies.dots),
    "failure": lambda: failing(1),
    "failure of a rank": lambda: failing(3),
    **{f"order: {name}": functools.partial(ordered, name) for name in HOSTED},
    "random numbers": random_numbers,
    "saves beside steps": saved_beside_steps,
    "products": lambda: products(1),
    "products of ranks": lambda: products(2),
}


def run(library: str, case: str) -> list[str]:
    """Run a case. In the process of a pool of its own: autograd makes its threads at the first backward."""
    load(library)
    return CASES[case]()


def run_threaded(library: str, ranks: int) -> str:
    """What goes wrong where backwards run on the device's thread."""
    load(library)
    return on_its_thread(ranks)


def run_events(library: str, name: str) -> dict[str, bool]:
    """Whether each event and wait of a case is needed."""
    load(library)
    from tests.runtime.test_happens_before import events

    return events(name, DEVICE)


def run_dropped(library: str) -> dict[str, bool]:
    """Whether each event and wait of snapshots is needed; and whether an update must let them end."""
    load(library)
    from fshard.runtime.execution.shards import Shards
    from tests.runtime.test_happens_before import CASES, raced

    cases = {name: CASES[name] for name in ("snapshots", "late snapshots")}
    sites = [
        site for site in sorted(raced(cases["snapshots"], device=DEVICE)[1]) if "Snapshot" in site or "Staging" in site
    ]
    found = {site: bool(raced(cases["snapshots"], site, DEVICE)[0]) for site in sites}
    with pytest.MonkeyPatch.context() as change:
        change.setattr(Shards, "overwrite", lambda self: self)
        found["overwrite"] = bool(raced(cases["late snapshots"], device=DEVICE)[0])
    return found
