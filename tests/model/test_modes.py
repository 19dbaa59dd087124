"""Other methods than forward, and modes as arguments. The oracle is the module itself, in that mode."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.errors import PlanError
from tests.model.cases import close, equal

UNITS = [(), ("blocks.*",)]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(self.linear(x)))


class Coder(nn.Module):
    """Blocks with dropout and statistics; two methods and a hook on the forward."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def encode(self, x: Tensor, *, times: int = 1) -> Tensor:
        for _ in range(times):
            for block in self.blocks:
                x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


class Frozen(Coder):
    """The first block's statistics never learn, whatever the mode."""

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.blocks[0].norm.eval()
        return self


def mode(module: nn.Module, training: bool) -> nn.Module:
    return copy.deepcopy(module).train(training)


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", [Coder, Frozen])
def test_a_call_in_a_mode_is_the_modules_in_that_mode(units: Any, own: bool, kind: type[Coder]) -> None:
    net = kind().train(own)
    model = fs.split(net, units)
    for training in (False, True, False):
        there = mode(net, training)
        torch.manual_seed(1)
        expected = there(X)
        torch.manual_seed(1)
        out, buffers = model.apply(model.params, X, training=training, buffers=model.buffers)
        equal(out, expected)
        equal(dict(fs.tree.paths(buffers)), dict(there.named_buffers()))
    assert [below.training for below in net.modules()] == [below.training for below in model.module.modules()]


def test_modes_that_a_user_has_mixed_stay_where_none_is_given() -> None:
    net = Coder().eval()
    net.blocks[1].drop.train()
    model = fs.split(net, "blocks.*")
    torch.manual_seed(1)
    expected = net(X)
    torch.manual_seed(1)
    equal(model.apply(model.params, X), expected)
    equal(model.apply(model.params, X, training=False), mode(net, False)(X))


@pytest.mark.parametrize("units", UNITS)
def test_another_method_runs_with_its_units(units: Any) -> None:
    net = Coder().eval()
    net.register_forward_hook(lambda module, args, out: out * 100)
    model = fs.split(net, units)
    equal(model.apply(model.params, X, method="encode", times=2), net.encode(X, times=2))
    equal(model.apply(model.params, X, method="head"), net.head(X))
    equal(model.apply(model.params, X), net(X))  # with the hook


def test_copies_and_pickles_have_both_modes() -> None:
    net = Coder()
    model = fs.split(net, "blocks.*")
    expected = model.apply(model.params, X, method="encode", training=False)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        equal(again.apply(model.params, X, method="encode", training=False), expected)


def test_modes_share_the_memory_of_tensors() -> None:
    model = fs.split(Coder(), "blocks.*")
    model.apply(model.params, X, training=False)
    body = model._modes.of(False, "forward")
    assert {leaf.device.type for leaf in body.module.parameters()} == {"meta"}
    ours = [buffer.data_ptr() for buffer in body.module.buffers()]
    assert ours == [buffer.data_ptr() for buffer in model.module.buffers()]


def test_transforms_take_calls_in_a_mode() -> None:
    net = Coder()
    model = fs.split(net, "blocks.*")

    def loss(params: Any, x: Tensor) -> Tensor:
        return model.apply(params, x, method="encode", training=False).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(model.params, X[:, None])
    there = mode(net, False)
    there.encode(X).square().sum().backward()
    close(grads["blocks"]["0"]["linear"]["weight"].sum(0), there.blocks[0].linear.weight.grad)


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize("compile", [None, "fx"])
@pytest.mark.parametrize("remat", [None, "all"])
def test_a_step_may_use_both_modes_and_both_methods(compile: Any, remat: Any) -> None:
    """One loss in two modes: dropout acts in one pass of it alone. Two ranks against one plain process."""
    torch.manual_seed(0)
    net = Coder()
    for block in net.blocks:
        block.norm, block.drop = nn.LayerNorm(6), nn.Dropout(1.0)  # of probability 1, so that no random number counts
    model = fs.split(net, "blocks.*")

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        kept = model.apply(params, x, method="encode", training=False)
        return (model.apply(params, x, training=True).square().mean() + kept.square().mean()) / 2

    def main() -> tuple[list[float], Any]:
        mesh = fs.make_mesh((-1,), ("shard",))
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))])
        opt = fs.optim.sgd(0.1)
        state = fs.init_state(plan, opt, params=model.params)
        step = fs.make_train_step(loss_fn, opt, plan, compile=compile, remat=remat)
        losses = []
        for _ in range(3):
            state, metrics = step(state, plan.local_batch(X))
            losses.append(metrics.loss.item())
        params = fs.unshard(state.params, plan)
        evaluate = fs.make_eval_step(lambda p, x: model.apply(p, x, training=False).square().mean(), plan)
        return [*losses, evaluate(state, plan.local_batch(X)).item()], params

    losses, params = fs.virtual_mesh((2,), ("shard",)).run(main)[0]
    plain = copy.deepcopy(net)
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    expected = []
    for _ in range(3):
        sgd.zero_grad()
        loss = (plain.train()(X).square().mean() + plain.eval().encode(X).square().mean()) / 2
        loss.backward()
        sgd.step()
        expected.append(loss.item())
    assert losses == pytest.approx([*expected, plain.eval()(X).square().mean().item()], rel=1e-5)
    for path, leaf in plain.named_parameters():
        close(dict(fs.tree.paths(params))[path], leaf.detach())


class Asked(nn.Linear):
    def forward(self, x: Tensor, training: bool = False) -> Tensor:
        return super().forward(x) * (2 if training else 1)


def test_what_a_call_cannot_do_is_said() -> None:
    model = fs.split(Coder(), "blocks.*")
    with pytest.raises(PlanError, match="'encoder', a str, is not a method of Coder.*the closest is 'encode'"):
        model.apply(model.params, X, method="encoder")
    with pytest.raises(PlanError, match="is not a method of Coder"):
        model.apply(model.params, X, method=Coder.encode)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="training is 1, an int: give True, False, or None"):
        model.apply(model.params, X, training=1)  # type: ignore[arg-type]
    asked = fs.split(Asked(6, 6))
    with pytest.raises(PlanError, match=r"Asked\.forward has an argument of that name too"):
        asked.apply(asked.params, X, training=True)
    equal(asked.apply(asked.params, X, True), asked.apply(asked.params, X) * 2)
