"""Steps that are captured and replayed come to the bits of eager steps, whatever changes from one to the next."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import tree
from fshard.played.transport import VirtualCommunicator
from tests.device import cases
from tests.shared.capture_device import capturing

STEPS = 20
POLICIES = {graph: fs.Policy(graph=graph) for graph in ("step", "segments")}
GRAPH, SEGMENTS = POLICIES.values()


def noisy(p: Any, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    """A loss with dropout, and values that the step returns."""
    x = F.dropout(batch["x"], 0.3)
    loss = cases.loss(p, batch | {"x": x})
    return loss, {"rows": x, "mean": fs.Mean(x.sum(), x.numel()), "number": loss.detach() * 2}


@dataclass
class Trace:
    """What some steps came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    aux: list[Any] = field(default_factory=list)
    how: list[str] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    graphs: int = 0

    def note(self, metrics: fs.types.Metrics) -> None:
        """Keep the metrics of a step as they are: what belongs to the step must not change later."""
        self.losses.append(metrics.loss.item())
        self.norms.append(metrics.grad_norm.item())
        self.aux.append((metrics.aux, tree.mapped(lambda x: x.clone() if isinstance(x, Tensor) else x, metrics.aux)))
        self.how.append(metrics.ran.graph)
        self.skipped.append(metrics.skipped)

    def end(self, state: fs.TrainState) -> "Trace":
        """The state after the last step."""
        settled = fs.settle(state)
        self.params = [leaf.clone() for leaf in tree.leaves((settled.params, settled.opt_state))]
        return self

    def same(self, other: "Trace") -> None:
        """Compare all bits."""
        assert self.losses == other.losses and self.norms == other.norms and self.skipped == other.skipped
        for held, then in self.aux:
            assert all(torch.equal(a, b) for a, b in zip(tree.leaves(held), tree.leaves(then), strict=True))
        for a, b in zip(
            tree.leaves([held for held, _ in self.aux]), tree.leaves([x for x, _ in other.aux]), strict=True
        ):
            assert torch.equal(a, b)
        assert all(torch.equal(a, b) for a, b in zip(self.params, other.params, strict=True))


Run = Callable[[fs.Mesh, fs.Policy], Trace]


def both(ranks: int, run: Run, device: str = "cpu", policy: fs.Policy = GRAPH) -> list[tuple[Trace, Trace]]:
    """What each rank comes to, with graphs and without."""
    axes = (ranks,), ("shard",)

    def rank() -> tuple[Trace, Trace]:
        mesh, captured = on(fs.make_mesh(*axes))
        graphed = run(mesh, policy)
        graphed.graphs = len(captured.graphs)
        assert all([bool(graph.cuts) is (policy is SEGMENTS and ranks > 1) for graph in captured.graphs])
        return graphed, run(mesh, fs.Policy())

    with capturing() as on:
        return fs.virtual_mesh(*axes, device=device).run(rank)


def trained(mesh: fs.Mesh, policy: fs.Policy, steps: int = STEPS, rates: bool = False, **options: Any) -> Trace:
    """Some steps. Rates are numbers of float32, so that graphs round none."""
    found, start = Trace(), cases.params()
    plan = cases.planned(mesh)
    if options.pop("short", False):
        start = tree.map(torch.Tensor.bfloat16, start)
        rules, units = [(r".*", fs.fsdp("shard"))], [str(number) for number in range(cases.LAYERS)]
        stochastic = fs.Precision(rounding="stochastic")
        plan = fs.make_plan(start, mesh, rules, batch=fs.P("shard"), units=units, precision=stochastic)
    opt = options.pop("opt", fs.optim.adamw(lambda step: 2.0 ** -(7 + step % 4)))
    state = fs.init_state(plan, opt, params=start)
    step = fs.make_train_step(options.pop("loss", cases.loss), opt, plan, schedule=policy, **options)
    for number in range(steps):
        lr = {"lr": 2.0 ** -(5 + number % 3)} if rates else {}
        state, metrics = step(state, cases.batch(number, mesh), **lr)
        found.note(metrics)
    return found.end(state)


def short(p: Any, batch: Any) -> Tensor:
    """A loss of a batch in bfloat16."""
    return cases.loss(p, tree.map(torch.Tensor.bfloat16, batch))


CASES: dict[str, dict[str, Any]] = {
    "stochastic rounding": {"loss": short, "short": True, "clip_norm": 0.1},
    "clip": {"clip_norm": 0.1},
    "clip by rule, rates": {"clip_norm": [(r"0\..*", 0.01), (".*", None)], "rates": True, "norms": "groups"},
    "dropout, scale": {"loss": noisy, "loss_scale": fs.LossScale(2.0**8, interval=3)},
    "microbatches": {"accumulate": 3, "loss": noisy},
    "skips": {"skip_norm": 0.17, "clip_norm": 0.1},
    "sgd": {"opt": fs.optim.sgd(lambda step: 2.0 ** -(5 + step % 3), momentum=0.5)},
    "unit graphs": {"compile": "fx", "clip_norm": 0.1},
    "remat": {"remat": "all", "loss": noisy},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("policy", "ranks"), [(GRAPH, 1), (GRAPH, 2), (SEGMENTS, 2)], ids=["one", "step", "segments"])
@pytest.mark.parametrize("case", CASES)
def test_replays_have_the_bits_of_eager_steps(case: str, policy: fs.Policy, ranks: int) -> None:
    for graphed, eager in both(ranks, lambda mesh, policy: trained(mesh, policy, **CASES[case]), policy=policy):
        graphed.same(eager)
        first = 2 + (case == "stochastic rounding")
        assert graphed.graphs == 1 and graphed.how.count("replayed") == STEPS - 1 - first
        assert graphed.how[first] == "captured" and set(eager.how) == {""}
    assert any(graphed.skipped) == (case == "skips")


@pytest.mark.parametrize("policy", [GRAPH, SEGMENTS], ids=["step", "segments"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"remat": "all", "clip_norm": 0.1}], ids=str)
def test_the_footprint_knows_what_a_graph_holds(options: dict[str, Any], policy: fs.Policy) -> None:
    """The most that its pool gives at once, up to what pads items to 256 bytes, and the copy of the batch."""

    def rank() -> tuple[Any, int, int]:
        mesh, device = on(fs.make_mesh((2,), ("shard",)))
        plan, opt = cases.planned(mesh), fs.optim.sgd(2.0**-6)
        state = fs.init_state(plan, opt, params=cases.params())
        step = fs.make_train_step(cases.loss, opt, plan, schedule=policy, **options)
        batch = tree.map(lambda x: x.repeat(16, 1), cases.batch(0, mesh))
        for _ in range(4):
            state, _ = step(state, batch)
        graph = next(each for each in step._runner.held if each.replay is not None)
        copied = sum(x.nbytes for x in tree.leaves(graph.batch))
        return step.trace(batch).footprint, device.graphs[0].most, copied

    with capturing() as on:
        found, most, copied = fs.virtual_mesh((2,), ("shard",), device="cpu").run(rank)[0]
    assert copied <= found.graph_bytes <= found.peak_bytes and "; a graph holds" in str(found)
    assert found.graph_bytes - copied == pytest.approx(most, rel=0.05)


def test_states_are_read_and_steps_repeated_between_replays() -> None:
    """The update that waits is applied where the state is read; a step that failed is made again."""

    def run(mesh: fs.Mesh, policy: fs.Policy) -> Trace:
        plan, opt, found = cases.planned(mesh), fs.optim.adamw(2.0**-6), Trace()
        state = fs.init_state(plan, opt, params=cases.params())
        step = fs.make_train_step(cases.loss, opt, plan, schedule=policy, clip_norm=0.1)
        for number in range(12):
            batch = cases.batch(number, mesh)
            if number in (5, 9):
                found.aux.append(({}, {}))
                found.losses.append(float(sum(leaf.sum() for leaf in tree.leaves(state.params))))
            if number == 7:
                with pytest.raises(fs.errors.NonFiniteError):
                    step(state, batch | {"x": batch["x"] * float("inf")})
            state, metrics = step(state, batch)
            found.note(metrics)
        return found.end(state)

    for graphed, eager in both(2, run):
        graphed.same(eager)
        assert graphed.graphs == 1 and graphed.how[3:] == ["replayed"] * 9


def test_batches_of_two_shapes_have_a_graph_each() -> None:
    def run(mesh: fs.Mesh, policy: fs.Policy) -> Trace:
        plan, opt, found = cases.planned(mesh), fs.optim.adamw(2.0**-6), Trace()
        state = fs.init_state(plan, opt, params=cases.params())
        step = fs.make_train_step(cases.loss, opt, plan, schedule=policy)
        for number in range(12):
            batch = cases.batch(number, mesh)
            if number % 2:
                batch = tree.map(lambda x: x[:4], batch)
            state, metrics = step(state, batch)
            found.note(metrics)
        return found.end(state)

    ((graphed, eager),) = both(1, run)
    graphed.same(eager)
    assert graphed.graphs == 2 and graphed.how[6:] == ["replayed"] * 6


@dataclass(frozen=True)
class Unplugged:
    """The handle of a collective whose wait fails."""

    handle: Any

    def wait(self) -> None:
        """Wait until all ranks have made it, and fail."""
        self.handle.wait()
        raise fs.errors.CommError("the cable is out")


def lost(at: int, policy: fs.Policy) -> list[tuple[int, list[Tensor]]]:
    """What each rank's state is after a step in which the wait for a collective, by its number, fails on all ranks.

    Returns:
        By rank, how many groups still wait for their update then, and the state with all of it applied.
    """
    left: dict[int, int] = {}
    real = VirtualCommunicator._arrive

    def arrive(self: VirtualCommunicator, *args: Any) -> Any:
        handle = real(self, *args)
        if self.rank not in left or self.role.startswith("control"):
            return handle
        left[self.rank] -= 1
        return Unplugged(handle) if left[self.rank] < 0 else handle

    def rank() -> tuple[int, list[Tensor]]:
        mesh, _ = on(fs.make_mesh((2,), ("shard",)))
        plan, opt = cases.planned(mesh), fs.optim.adamw(2.0**-6)
        state = fs.init_state(plan, opt, params=cases.params())
        step = fs.make_train_step(cases.loss, opt, plan, schedule=policy)
        for number in range(4):
            state, metrics = step(state, cases.batch(number, mesh))
        assert metrics.ran.graph == ("replayed" if policy is SEGMENTS else "")
        left[mesh.rank] = at
        with pytest.raises(fs.errors.CommError, match=r"^op \d+ of \d+, 'wait \w+ \w+' \(unit .*\): the cable is out"):
            step(state, cases.batch(4, mesh))
        waiting = len(state.memory.pending.waiting)  # type: ignore[union-attr]
        settled = fs.settle(state)
        return waiting, [leaf.clone() for leaf in tree.leaves((settled.params, settled.opt_state))]

    with capturing() as on, pytest.MonkeyPatch.context() as change:
        change.setattr(VirtualCommunicator, "_arrive", arrive)
        return fs.virtual_mesh((2,), ("shard",), device="cpu").run(rank)


@pytest.mark.parametrize("at", [0, 2, 6])
def test_a_transfer_that_fails_between_segments_leaves_the_state_of_an_eager_step(at: int) -> None:
    """Groups whose update was in a segment that has run are updated, and no others: none is twice."""
    found = lost(at, SEGMENTS)
    for (_, state), (_, eager) in zip(found, lost(at, fs.Policy()), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(state, eager, strict=True))
    assert at or any(0 < waiting < 4 for waiting, _ in found)


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 5, pytest.param(60, marks=pytest.mark.slow)])
def test_a_capture_that_raises_on_one_rank_leaves_no_trace(at: int) -> None:
    def rank() -> tuple[Trace, Trace, int]:
        mesh, device = on(fs.make_mesh((2,), ("shard",)))
        device.fails = at if mesh.rank == 1 else None
        graphed = trained(mesh, GRAPH, 8, clip_norm=0.1)
        return graphed, trained(mesh, fs.Policy(), 8, clip_norm=0.1), device.replayed

    with capturing() as on, pytest.warns(UserWarning, match="run eagerly from now on, since") as told:
        found = fs.virtual_mesh((2,), ("shard",), device="cpu").run(rank)
    assert len(told) == 2  # once on each rank
    why = "its capture failed: RuntimeError: operation not permitted when stream is capturing"
    for number, (graphed, eager, replays) in enumerate(found):
        graphed.same(eager)
        assert replays == 0 and graphed.how[2] == (
            f"eager: {why}" if number == 1 else "eager: rank 1: its capture failed"
        )


def test_an_error_of_the_loss_in_a_capture_is_that_of_the_step() -> None:
    raises: list[bool] = []

    def loss(p: Any, batch: Any) -> Tensor:
        if raises:
            raises.clear()
            raise ValueError("not today")
        return cases.loss(p, batch)

    def run(mesh: fs.Mesh, policy: fs.Policy) -> Trace:
        plan, opt, found = cases.planned(mesh), fs.optim.adamw(2.0**-6), Trace()
        state, step = fs.init_state(plan, opt, params=cases.params()), None
        step = fs.make_train_step(loss, opt, plan, schedule=policy)
        for number in range(6):
            if number == 2:
                raises.append(True)
                if not policy.graph == "step":
                    raises.clear()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state, metrics = step(state, cases.batch(number, mesh))
            found.note(metrics)
        return found.end(state)

    ((graphed, eager),) = both(1, run)
    graphed.same(eager)
    assert graphed.how[2] == "eager: its capture failed: ValueError: not today"


def test_a_value_that_the_loss_reads_is_noticed_where_it_changes() -> None:
    held = {"factor": 1.0}

    def loss(p: Any, batch: Any) -> Tensor:
        return cases.loss(p, batch) * held["factor"]

    def run(mesh: fs.Mesh, policy: fs.Policy) -> Trace:
        plan, opt, found = cases.planned(mesh), fs.optim.adamw(2.0**-6), Trace()
        state = fs.init_state(plan, opt, params=cases.params())
        step = fs.make_train_step(loss, opt, plan, schedule=policy)
        for number in range(10):
            held["factor"] = 1.0 if number < 5 else 3.0
            state, metrics = step(state, cases.batch(number, mesh))
            found.note(metrics)
        return found.end(state)

    ((graphed, eager),) = both(1, run)
    graphed.same(eager)
    assert "a value has changed" in graphed.how[5] and graphed.how[-1] == "replayed" and graphed.graphs == 2


def reads(p: Any, batch: Any) -> Tensor:
    """A loss for which the host reads the device."""
    return cases.loss(p, batch) * (2.0 if batch["x"].sum().item() > 1e9 else 1.0)


def test_a_loss_that_reads_its_device_runs_eagerly_and_says_where() -> None:
    def run(mesh: fs.Mesh, policy: fs.Policy) -> Trace:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return trained(mesh, policy, 6, loss=reads)

    for graphed, eager in both(2, run):
        graphed.same(eager)
        assert graphed.graphs == 0 and "aten._local_scalar_dense.default at " in graphed.how[-1]
        assert "test_whole_graph.py" in graphed.how[-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES)
def test_graphs_of_cuda_have_the_bits_of_eager_steps(case: str) -> None:
    mesh = fs.make_mesh((1,), ("shard",), device="cuda")
    graphed, eager = [trained(mesh, policy, **CASES[case]) for policy in (GRAPH, fs.Policy())]
    graphed.same(eager)
    assert graphed.how[2:] == ["captured"] + ["replayed"] * (STEPS - 3)
