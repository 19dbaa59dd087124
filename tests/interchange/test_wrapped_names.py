"""Names under wrappers of PyTorch: those of compiled, checkpointed and data-parallel modules are the module's own."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fshard as fs
from fshard import tree
from fshard.errors import TreeError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def planned(module: nn.Module) -> fs.Plan:
    return fs.make_plan(fs.split(module), fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("inside", ["", "_checkpoint_wrapped_module."])
@pytest.mark.parametrize("wrapped", [False, True])
def test_wrappers_are_taken_off(prefix: str, inside: str, wrapped: bool) -> None:
    module, other = net(), net()
    if wrapped:
        other[1] = checkpoint_wrapper(other[1])
    given = {f"{prefix}{name.replace('1.', f'1.{inside}')}": leaf for name, leaf in module.state_dict().items()}
    state = fs.io.from_state_dict(given, planned(other))
    found = [leaf for _, leaf in tree.paths(fs.unshard(state.params, state.plan))]
    assert all(torch.equal(a, b) for a, b in zip(found, module.state_dict().values(), strict=True))


def test_a_name_that_is_there_is_not_taken_twice() -> None:
    given = dict(net().state_dict())
    given["module.0.weight"] = given["0.weight"]
    with pytest.raises(TreeError, match=r"unexpected  module.0.weight"):
        fs.io.from_state_dict(given, planned(net()))


def test_names_are_written_as_pytorch_writes_them() -> None:
    module = net()
    module[1] = checkpoint_wrapper(module[1])
    plan, opt = planned(module), fs.optim.adamw(1e-3)
    state = fs.init_state(plan, opt, params=fs.split(module).params)
    written = fs.io.to_state_dict(state)
    assert list(written) == list(module.state_dict())
    module.load_state_dict(written)
    optim = fs.io.to_optim_state_dict(state, opt)
    assert list(optim["state"]) == optim["param_groups"][0]["params"] == list(written)
    again = fs.io.from_state_dict(written, plan, opt, optim)
    assert again.opt_state["exp_avg"]["1"] and torch.equal(again.params["0"]["weight"], state.params["0"]["weight"])


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module)  # type: ignore[return-value]


def checkpointed(module: nn.Module) -> nn.Module:
    module[0] = checkpoint_wrapper(module[0])  # type: ignore[operator, index]
    return module


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("wrap", [nn.Sequential, compiled, checkpointed, nn.DataParallel])
def test_optimizers_of_wrapped_modules_are_read(wrap: Callable[[nn.Module], nn.Module], named: bool) -> None:
    module = net()
    given = wrap(module) if wrap is not nn.Sequential else module
    theirs = torch.optim.AdamW(given.named_parameters() if named else given.parameters(), 1e-2)
    module(torch.ones(2, 3)).sum().backward()
    theirs.step()
    opt = fs.optim.adamw(1e-2)
    state = fs.io.from_state_dict(given.state_dict(), planned(net()), opt, theirs.state_dict())
    ours = fs.io.to_optim_state_dict(state, opt)["state"]
    want = [theirs.state[leaf]["exp_avg"] for leaf in module.parameters()]
    assert state.step == 1 and all(torch.equal(a["exp_avg"], b) for a, b in zip(ours.values(), want, strict=True))


@pytest.mark.parametrize("named", [False, True])
def test_numbered_optimizers_follow_the_rules_of_names(named: bool) -> None:
    module = nn.Sequential(net())
    theirs = torch.optim.AdamW(module.named_parameters() if named else module.parameters(), 1e-2)
    module(torch.ones(2, 3)).sum().backward()
    theirs.step()
    opt, rules = fs.optim.adamw(1e-2), [(r"0\.(.*)", r"\1")]
    state = fs.io.from_state_dict(module.state_dict(), planned(net()), opt, theirs.state_dict(), rename=rules)
    found = fs.io.to_optim_state_dict(state, opt)["state"]["1.weight"]["exp_avg"]
    assert torch.equal(found, theirs.state[module[0][1].weight]["exp_avg"])  # type: ignore[index, union-attr]
