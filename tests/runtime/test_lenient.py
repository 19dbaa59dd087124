"""Operators that refuse fake tensors though they take real ones, and programs that cannot be computed again."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import tree
from fshard.errors import RematError
from fshard.runtime.execution.trace_program import trace
from tests.shared import zoo
from tests.shared.bad import alike, attempt
from tests.shared.workers import Pools

RULES = [(r".*", fs.fsdp("shard"))]


class Experts(nn.Module):
    """Rows go to experts by turns, which compute in one grouped product, whose rule for fakes knows no float32."""

    def __init__(self, experts: int = 3, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """The rows in order of their experts, and each row with its expert's matrix."""
        number = torch.arange(len(x)) % len(self.weight)
        order = number.argsort()
        ends = (number == torch.arange(len(self.weight))[:, None]).sum(1).cumsum(0).int()
        return torch._grouped_mm(x[order], self.weight, offs=ends)[order.argsort()].tanh()


class Cache:
    """What a model keeps for later calls."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []


class Block(nn.Module):
    """Writes to the cache that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """A residual map."""
        keys = self.map(x)
        if cache is not None:
            cache.layers.append({"keys": keys})
        return x + keys.tanh()


class Net(nn.Module):
    """Blocks of some kind."""

    def __init__(self, kind: type[nn.Module], cached: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.blocks, self.cached, self.reentrant = nn.ModuleList(kind() for _ in range(2)), cached, reentrant

    def forward(self, x: Tensor) -> Tensor:
        """All blocks."""
        x, more = self.inp(x), [Cache()] if self.cached else []
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x, *more)
        return x.square().mean()


def made(module: nn.Module, mesh: fs.Mesh, **options: Any) -> tuple[fs.Plan, Any, Any]:
    """A plan, a state and a step."""
    model = fs.split(module, units="auto")
    plan = fs.make_plan(model, mesh, RULES, batch=fs.P("shard"))
    opt = fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, params=tree.map(torch.clone, model.params))
    return plan, state, fs.make_train_step(model.apply, opt, plan, debug=True, **options)


def grouped() -> list[str]:
    """On each rank: train experts, and say what differs from plain PyTorch."""
    torch.manual_seed(1)
    module, problems = Net(Experts), []
    twin = copy.deepcopy(module)
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, state, step = made(module, mesh)
        rule = torch.optim.SGD(twin.parameters(), lr=0.1)
        for number in range(3):
            x = torch.randn(12, 8, generator=torch.Generator().manual_seed(number))
            state, metrics = step(state, zoo.cut({"x": x}, mesh.rank, mesh.size)["x"])
            rule.zero_grad()
            plain = twin(x)
            plain.backward()
            rule.step()
            if abs(metrics.loss.item() - plain.item()) > 1e-6 or tuple(step.record) != step.schedule.ops:
                problems.append(f"step {number}: {metrics.loss.item()}, plain {plain.item()}")
        whole = dict(tree.paths(fs.unshard(state.params, plan)))
    return problems + [path for path, x in twin.named_parameters() if not torch.allclose(whole[path], x, atol=1e-6)]


def test_what_fakes_refuse_is_asked_of_the_kernel(pool: Pools, caplog: pytest.LogCaptureFixture) -> None:
    plan = fs.make_plan(fs.split(Net(Experts), units="auto"), fs.abstract_mesh((2,), ("shard",)), RULES)
    model = fs.split(Net(Experts), units="auto")
    found = trace(model.apply, plan, torch.ones(6, 8), True)
    assert found is not None and [call.unit for call in found.program.backward] == ["blocks.1", "blocks.0"]
    assert not caplog.records
    assert pool(2).run(grouped) == [[], []]


def test_errors_of_shapes_stay_errors_and_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    step = made(Net(Block), fs.make_mesh((1,), ("shard",)))[2]
    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError, match=r"\[4, 7\] X \[8, 8\]"):
        step.trace(torch.ones(4, 7))
    assert not [record for record in caplog.records if "failed while attempting" in record.getMessage()]
    with pytest.raises(RuntimeError, match="4x7 and 8x8"):  # what a user's own code raises later is logged as ever
        F.linear(torch.ones(4, 7), torch.ones(8, 8))


def refused(kind: str) -> Any:
    """On each rank: the error of a program that cannot be computed again, or brings its own backward."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        if kind == "cache":
            plan, state, step = made(Net(Block, cached=True), mesh, remat="all")
        else:
            plan, state, step = made(Net(Block, reentrant=True), mesh)
        first = attempt(lambda: step(state, torch.ones(4, 8)))
        step = made(Net(Block, cached=True), mesh)[2]  # the state can still be used
        return first, step(state, torch.ones(4, 8))[1].loss.isfinite().item()


REFUSED = {
    "cache": ("unit blocks.0 writes tensors into its argument, a Cache", "use_cache=False", "('blocks.0', None)"),
    "reentrant": ("use_reentrant=True", "use_reentrant=False", "remat='all'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_programs_that_cannot_be_computed_again(pool: Pools, kind: str) -> None:
    results = pool(2).run(refused, kind)
    alike([error for error, _ in results], "RematError", REFUSED[kind])
    assert [good for _, good in results] == [True, True]


def test_a_cache_alone_is_fine_with_remat_of_other_units() -> None:
    rules = [("blocks.*", None)]
    _, state, step = made(Net(Block, cached=True), fs.make_mesh((1,), ("shard",)), remat=rules)
    assert step(state, torch.ones(4, 8))[1].loss.isfinite()
    assert issubclass(RematError, RuntimeError)


def test_a_unit_with_a_cache_says_why_it_has_no_graph() -> None:
    _, state, step = made(Net(Block, cached=True), fs.make_mesh((1,), ("shard",)), compile="fx")
    step(state, torch.ones(4, 8))
    assert "an argument is a Cache, neither a plain tensor" in step.units and "use_cache=False" in step.units


class Routed(Experts):
    """Each row goes to the expert that its values choose."""

    def forward(self, x: Tensor) -> Tensor:
        """The rows, each with its expert's matrix."""
        order = x[:, : len(self.weight)].argmax(1).sort()
        counts = torch.histc(order.values.float(), len(self.weight), 0, len(self.weight) - 1)
        y = torch._grouped_mm(x[order.indices], self.weight, offs=counts.cumsum(0).int())
        return x + torch.zeros_like(y).index_copy(0, order.indices, y).tanh()


def routed(compile: str) -> tuple[list[float], str]:
    """The losses of five batches that are routed differently, and what became of the units."""
    torch.manual_seed(1)
    module = Net(Routed)
    _, state, step = made(module, fs.make_mesh((1,), ("shard",)), compile=compile)
    losses = []
    for number in range(5):
        state, metrics = step(state, torch.randn(12, 8, generator=torch.Generator().manual_seed(number)))
        losses.append(metrics.loss.item())
    return losses, str(step.units)


def test_experts_in_one_grouped_product_are_graphs_however_rows_are_routed(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    twin = Net(Routed)
    rule = torch.optim.SGD(twin.parameters(), lr=0.1)
    wanted = []
    for number in range(5):
        rule.zero_grad()
        loss = twin(torch.randn(12, 8, generator=torch.Generator().manual_seed(number)))
        loss.backward()
        rule.step()
        wanted.append(loss.item())
    losses, units = routed("fx")
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert units.count("fx graph 0") == 2 and "fx graph 1" not in units and "as it is" not in units, units
    assert not [record for record in caplog.records if "failed while attempting" in record.getMessage()]
