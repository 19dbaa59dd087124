"""What ``fs.split`` leaves alone of a module, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fshard as fs
from fshard.errors import PlanError

NORMED = {
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "the old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "spectral_norm of a convolution": lambda: parametrizations.spectral_norm(nn.ConvTranspose2d(2, 4, 3, groups=2)),
    "spectral_norm of an embedding": lambda: parametrizations.spectral_norm(nn.Embedding(4, 4)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("units", [(), "*"])
def test_no_bit_of_the_module_moves(name: str, units: Any) -> None:
    net = nn.Sequential(NORMED[name]()).train()
    before = {path: leaf.clone() for path, leaf in net.state_dict().items()}
    versions = [leaf._version for leaf in net.state_dict(keep_vars=True).values()]
    model = fs.split(net, units)
    repr(model)
    assert versions == [leaf._version for leaf in net.state_dict(keep_vars=True).values()]
    assert all(torch.equal(leaf, before[path]) for path, leaf in net.state_dict().items())


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused(register: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    handle = getattr(net[0].weight, register)(lambda x: None)
    with pytest.raises(PlanError, match=rf"0.weight: {register}\n"):
        fs.split(net)
    handle.remove()
    fs.split(net)


def test_compiled_modules_are_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"the module itself: Sequential, compiled\n.*compile='inductor'"):
        fs.split(torch.compile(net))
    with pytest.raises(PlanError, match="0: Linear, compiled"):
        fs.split(nn.Sequential(torch.compile(net[0])))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("units", ["0", "0.*", ()])
def test_modules_of_torchscript_are_refused(units: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    for compiled in (torch.jit.script(net), torch.jit.trace(net, torch.ones(1, 2))):
        with pytest.raises(PlanError, match=r"compiler:\n  0: Sequential, compiled\nSplit .* torch.jit.script"):
            fs.split(nn.Sequential(compiled), units)


def test_embeddings_with_sparse_gradients_have_dense_ones() -> None:
    net = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    model = fs.split(net)
    assert net[0].sparse
    opt = fs.optim.sgd(0.1)
    plan = fs.make_plan(model, fs.make_mesh((-1,), ("shard",)), [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    step = fs.make_train_step(lambda params, x: model.apply(params, x).square().mean(), opt, plan)
    x = torch.tensor([1, 3])
    state, _ = step(fs.init_state(plan, opt, params=model.params), x)
    net(x).square().mean().backward()
    expected = net[0].weight.detach() - 0.1 * net[0].weight.grad.to_dense()
    torch.testing.assert_close(fs.unshard(state.params, plan)["0"]["weight"], expected)
