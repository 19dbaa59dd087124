"""Code of a module that runs again, or later, or beside itself, finds the tensors of its own call."""

import copy
import inspect
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fshard import tree
from fshard.model import Slot, Unit, attach, checkpointed, split
from tests.model.cases import IDS, Net, close, equal, flat


class Checkpointed(nn.Module):
    """Regions that are computed again in the backward: around units, inside of units, and outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(2))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return checkpoint(lambda y: self.head(y).tanh(), x, use_reentrant=False)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: self.norm(self.a(y)).tanh(), x, use_reentrant=False)


class Static:
    """An engine whose leaves are the same objects on every call."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.units: list[str] = []
        marked = {path: leaf.detach().clone().requires_grad_() for path, leaf in tree.paths(params)}
        for path, leaf in marked.items():
            attach(leaf, Slot(self, path))
        self.params = tree.nest(marked)

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.units.append(unit.name)
        return unit.fn(params, *args, **kwargs)


def gradients(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    net(x).square().sum().backward()
    return {path: leaf.grad.clone() for path, leaf in net.named_parameters() if leaf.grad is not None}


def leaves_of(params: dict[str, Any]) -> dict[str, Tensor]:
    return {path: leaf.grad for path, leaf in tree.paths(params)}


@pytest.mark.long
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("units", [(), "blocks.*", (nn.Linear,)])
def test_checkpointed_regions_find_the_weights_of_their_own_call(units: Any, static: bool) -> None:
    torch.manual_seed(0)
    student, teacher = Checkpointed(), Checkpointed()
    model = split(student, units)
    both = [model.params, split(teacher).params]
    ours = [Static(p).params if static else tree.map(lambda leaf: leaf.clone().requires_grad_(), p) for p in both]
    x = torch.randn(6, 3)
    given = tree.map(torch.clone, model.buffers)
    losses = []
    for params in (*ours, *ours):
        out, new = model.apply(params, x, buffers=given)
        losses.append((out.square().sum(), new, tree.map(torch.clone, new)))
    for loss, new, before in losses:  # in another order than a stack's
        loss.backward()
        equal(new, before)
    equal(given, model.buffers)
    for net, params in zip((student, teacher), ours, strict=True):
        close({path: 2 * grad for path, grad in gradients(net, x).items()}, leaves_of(params))


def test_an_engines_instance_is_made_once_and_dies_with_its_leaves() -> None:
    model = split(Net(), "blocks.*")
    engine = Static(model.params)
    before = model.apply(engine.params, IDS)["logits"]
    first = next(leaf for _, leaf in tree.paths(engine.params))
    (held,) = first._fshard_slot.instances.values()
    equal(model.apply(engine.params, IDS)["logits"], before)
    assert list(first._fshard_slot.instances.values()) == [held]
    with torch.no_grad():
        first.mul_(2)  # the tensors stay, their values change
    assert not torch.equal(model.apply(engine.params, IDS)["logits"], before)
    mixed = tree.nest({**flat(engine.params), "blocks.0.gain": torch.zeros(8)})
    other = tree.nest({**flat(engine.params), "blocks.0.gain": torch.ones(8)})
    outs = [model.apply(params, IDS)["logits"] for params in (mixed, other, mixed)]
    equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])


def test_threads_do_not_disturb_each_other() -> None:
    nets = [Net() for _ in range(2)]
    model = split(nets[0], "blocks.*")
    params = [split(net).params for net in nets]
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad():
            expected = nets[i](IDS)["logits"]
            for _ in range(20):
                if not torch.equal(model.apply(params[i], IDS)["logits"], expected):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_unit_inside_of_itself_by_another_call() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor, depth: int = 1) -> Tensor:
            return self.norm(self(x, depth - 1) if depth else x)

    net = nn.Sequential(Recursive())
    x = torch.randn(4, 3)
    for units in ((), "0"):
        model = split(net, units)
        mirror = nn.Sequential(Recursive())
        out, new = model.apply(model.params, x, buffers=model.buffers)
        close(out, mirror(x))
        close(flat(new), dict(mirror.named_buffers()))


def test_a_shell_has_its_modules_signature_and_class() -> None:
    seen: list[Any] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Inner()])

        def forward(self, x: Tensor) -> Tensor:
            block = self.blocks[0]
            seen.append((type(block), str(inspect.signature(block.forward)), len(list(self.modules()))))
            return block(x)

    net = Looks().eval()
    x = torch.zeros(1, 3)
    net(x)
    model = split(net, "blocks.*")
    model.apply(model.params, x)
    assert seen[0] == seen[1]


def test_what_a_call_leaves_in_attributes_is_gone() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            out = x if self.last is None else x + self.last
            self.last = out
            return out

    model = split(nn.Sequential(Remembers()))
    for _ in range(2):
        equal(model.apply({}, torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_models_are_copied_and_pickled(again: Any) -> None:
    """What comes back computes the same, from tensors and modules of its own."""
    net = Net()
    net.embed.weight.requires_grad_(False)
    model = split(net, units=("blocks.*",))
    other = again(model)
    assert (other.units, other.aliases, other.frozen) == (model.units, model.aliases, model.frozen)
    assert other.inits == model.inits and list(flat(other.params)) == list(flat(model.params))
    equal(other.apply(other.params, IDS), model.apply(model.params, IDS))
    assert other.module is not model.module


def test_a_pickled_model_updates_its_buffers_and_keeps_its_ties() -> None:
    """Its units read and return the buffers that they are given, and a tied leaf is one."""
    model = split(Checkpointed(), units=("blocks.*",))
    other = pickle.loads(pickle.dumps(model))
    x = torch.ones(4, 3)
    for ours, theirs in zip(
        *(tree.leaves(m.apply(m.params, x, buffers=m.buffers)) for m in (model, other)), strict=True
    ):
        equal(ours, theirs)


def test_an_error_in_a_checkpoint_is_raised_when_its_hooks_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch before 2.13 removes them: after a forward that did not raise."""
    told = []

    def before(fn: Any, *args: Any, **options: Any) -> Any:
        told.append("set")
        result = fn(*args)
        told.append("removed")
        return result

    def fail(x: Any) -> Any:
        raise KeyError(float(x))

    monkeypatch.setattr(checkpointed, "checkpoint", before)
    with pytest.raises(KeyError, match=r"2\.0"):
        checkpointed.checkpointed(fail, 2.0)
    assert told == ["set", "removed"]
