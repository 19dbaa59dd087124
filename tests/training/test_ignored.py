"""Parameters that no plan knows: they stay as they are, on each rank; and leaves that each rank trains by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P, tree
from fshard.errors import PlanError, UnitError
from tests.shared.workers import Pools


class Coded(nn.Parameter):
    """A parameter of a special class, as quantized weights are: codes and a scale."""

    scale: Tensor

    def __new__(cls, codes: Tensor, scale: Tensor) -> "Coded":
        made = torch.Tensor._make_subclass(cls, codes, False)
        made.scale = scale
        return made

    def __deepcopy__(self, memo: Any) -> "Coded":
        raise AssertionError("copied")


class Dense(nn.Module):
    """A layer whose weight is coded, beside one that trains."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        codes = torch.randint(-90, 90, (width, width), generator=draw).to(torch.int8)
        self.base = Coded(codes, torch.tensor(0.01))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.base) is Coded
        return x + self.out(torch.relu(x @ (self.base.float() * self.base.scale).t()))


def module(rank: int = 0) -> nn.Sequential:
    """Two such layers; the base weights depend on the rank."""
    torch.manual_seed(5)
    return nn.Sequential(*[Dense(8, 10 * rank + n) for n in range(2)])


def batch(number: int) -> Tensor:
    """A global batch."""
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(number % 2))


def loss(net: Any, x: Tensor) -> Any:
    """Of any callable."""
    return (net(x) - x.flip(1)).square().mean()


def run(options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], list[bool]]:
    """On a rank: losses and last parameters of a model of which each rank has other base weights."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        net = module(mesh.rank)
        before = {path: leaf.clone() for path, leaf in net.named_parameters() if type(leaf) is Coded}
        model = fs.split(net, units=("*",), ignore=r".*\.base")
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))])
        opt = fs.optim.sgd(0.1, momentum=0.9)
        state = fs.init_state(plan, opt, params=model.params)
        step = fs.make_train_step(lambda p, x: loss(lambda y: model.apply(p, y), x), opt, plan, debug=True, **options)
        losses = []
        for number in range(6):
            state, metrics = step(state, batch(number).chunk(mesh.size)[mesh.rank])
            losses.append(float(metrics.loss))
        facts = [
            step.record == step.schedule.ops,
            list(plan.leaves) == ["0.out.weight", "0.out.bias", "1.out.weight", "1.out.bias"],
            all(net.get_parameter(path) is leaf for path, leaf in tree.paths(model.ignored)),
            all(torch.equal(net.get_parameter(path), leaf) for path, leaf in before.items()),
            len(before) == 2 == len(tree.leaves(model.ignored)),
        ]
        return losses, dict(tree.paths(fs.unshard(state.params, plan))), facts


def plain(world: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process, which has the base weights of every rank."""
    nets = [module(rank) for rank in range(world)]
    leaves = [{path: leaf for path, leaf in net.named_parameters() if type(leaf) is not Coded} for net in nets]
    rule = torch.optim.SGD(leaves[0].values(), 0.1, momentum=0.9)
    losses = []
    for number in range(6):
        for net, own in zip(nets, leaves, strict=True):
            net.zero_grad()
            for path, leaf in own.items():
                leaf.data.copy_(leaves[0][path].data)
        parts = [loss(net, x) / world for net, x in zip(nets, batch(number).chunk(world), strict=True)]
        for part in parts:
            part.backward()
        for path, leaf in leaves[0].items():
            leaf.grad = torch.stack([own[path].grad for own in leaves]).sum(0)
        rule.step()
        losses.append(sum(part.item() for part in parts))
    return losses, {path: leaf.detach() for path, leaf in leaves[0].items()}


@pytest.mark.parametrize("options", [{}, {"compile": "fx", "accumulate": 2}, {"remat": "all"}], ids=str)
def test_training_around_ignored_parameters(pool: Pools, options: dict[str, Any]) -> None:
    losses, params = plain(2)
    assert losses[0] > losses[4]
    for ours, whole, facts in pool(2).run(run, options):
        assert all(facts), facts
        assert ours == pytest.approx(losses, rel=1e-5)
        for path, leaf in whole.items():
            torch.testing.assert_close(leaf, params[path], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_ignored() -> None:
    net = module()
    told = (
        r"(?s)'\(' is not a reg.*'x' matches no parameter; paths are like '0\.base'.*0\.out\.bias  \[8\]: it has requ"
    )
    with pytest.raises(PlanError, match=told):
        fs.split(net, ignore=["(", "x", r".*\.base", r"0\.out\.bias"])
    twice = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    twice["c"], twice["b"].weight = twice["a"], twice["a"].weight
    twice["a"].weight.requires_grad_(False)
    model = fs.split(twice, ignore=r"b\.weight")
    assert [path for path, _ in tree.paths(model.params)] == ["a.bias", "b.bias"]
    assert [path for path, _ in tree.paths(model.ignored)] == ["a.weight"]


def test_an_ignored_parameter_is_not_written() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Parameter(torch.zeros(2), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x + self.seen

    net = Counting()
    with pytest.raises(UnitError, match="seen"):
        fs.split(net, ignore="seen").apply({}, torch.zeros(2))


def apart() -> tuple[list[float], list[Tensor], list[str]]:
    """On a rank: training with a vector of which each rank has one of its own, without any collective for it."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        whole = {"own": torch.arange(mesh.size * 4.0).view(mesh.size, 4), "w": torch.eye(4)}
        rules = [fs.Rule("own", P("shard"), compute=P("shard")), ("w", fs.fsdp("shard"))]
        plan, opt = fs.make_plan(whole, mesh, rules), fs.optim.sgd(0.5)
        state = fs.init_state(plan, opt, params=whole)
        step = fs.make_train_step(lambda p, x: ((x + p["own"]) @ p["w"]).square().mean(), opt, plan)
        norms = []
        for _ in range(2):
            state, metrics = step(state, torch.full((2, 4), 1.0 + mesh.rank))
            norms.append(float(metrics.grad_norm))
        owner = plan.places()["own"][0].name
        # its shard is its slot, and its gradient complete with the backward: nothing is gathered, reduced or summed
        kinds = sorted({op.kind for op in step.record if op.target == owner} - {"forward", "backward"})
        whole = fs.unshard(state.params, plan)
        return norms, [whole["own"], whole["w"]], kinds


def test_a_leaf_that_each_rank_trains_by_itself(pool: Pools) -> None:
    own, w = torch.arange(8.0).view(2, 4).requires_grad_(), torch.eye(4).requires_grad_()
    norms = []
    for _ in range(2):
        parts = [((torch.full((2, 4), 1.0 + rank) + own[rank]) @ w).square().mean() for rank in range(2)]
        grads = torch.autograd.grad(sum(parts) / 2, (own, w))
        norms.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))
        own, w = ((leaf - 0.5 * grad).detach().requires_grad_() for leaf, grad in zip((own, w), grads, strict=True))
    for found, leaves, kinds in pool(2).run(apart):
        assert found == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(leaves, [own.detach(), w.detach()], rtol=1e-5, atol=1e-5)
        assert kinds == ["update"]
