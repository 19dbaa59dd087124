"""split: a module as a parameter tree and a pure function. The oracle is the module itself."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fshard import tree
from fshard.errors import PlanError, TreeError, UnitError
from fshard.model import split
from tests.model.cases import IDS, Block, Net, Recorder, close, equal, flat


def test_params_are_the_modules_own_tensors_in_its_order() -> None:
    net = Net()
    model = split(net, "blocks.*")
    assert list(flat(model.params)) == [path for path, _ in net.named_parameters()]
    for path, leaf in net.named_parameters():
        ours = flat(model.params)[path]
        assert ours.data_ptr() == leaf.data_ptr() and type(ours) is Tensor and not ours.requires_grad
    assert model.units == ("blocks.0", "blocks.1", "blocks.2")
    assert model.aliases == {"head.weight": "embed.weight"}
    assert repr(model).startswith("Model(")


def test_frozen_parameters_are_recorded() -> None:
    net = Net()
    net.blocks[1].requires_grad_(False)
    expected = {path for path, leaf in net.named_parameters() if not leaf.requires_grad}
    assert split(net).frozen == expected and expected


def test_the_users_module_is_not_touched() -> None:
    net = Net()
    before = [(id(m), dict(vars(m)), list(m._parameters.items())) for m in net.modules()]
    model = split(net, Block)
    model.apply(model.params, IDS)
    after = [(id(m), dict(vars(m)), list(m._parameters.items())) for m in net.modules()]
    assert [(a, b) for a, b, _ in before] == [(a, b) for a, b, _ in after]
    for (_, _, old), (_, _, new) in zip(before, after, strict=True):
        assert all(x is y for (_, x), (_, y) in zip(old, new, strict=True))


def test_the_copy_has_no_memory() -> None:
    model = split(Net(), Block)
    model.apply(model.params, IDS)
    (root, *_) = model._body._template._originals
    assert {leaf.device.type for leaf in root.parameters()} == {"meta"}


@pytest.mark.parametrize("units", [(), "blocks.*", (Block,), ("blocks.*", "head"), ("blocks.*.attn",), (nn.Linear,)])
def test_apply_equals_the_module(units: Any) -> None:
    net = Net()
    model = split(net, units)
    mask = torch.randn(3, 3)
    equal(model.apply(model.params, IDS, mask=mask), net(IDS, mask))


def test_apply_uses_the_parameters_it_is_given() -> None:
    net, other = Net(), Net()
    model = split(net, "blocks.*")
    given = split(other).params
    equal(model.apply(given, IDS), other(IDS))
    equal(model.apply(model.params, IDS), net(IDS))
    half = tree.map(lambda leaf: leaf.double(), given)
    equal(model.apply(half, IDS), copy.deepcopy(other).double()(IDS))


@pytest.mark.parametrize("units", [(), "blocks.*"])
def test_gradients_equal_the_modules(units: Any) -> None:
    net = Net()
    model = split(net, units)
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), model.params)
    model.apply(params, IDS)["logits"].square().mean().backward()
    net(IDS)["logits"].square().mean().backward()
    for path, leaf in net.named_parameters():
        close(flat(params)[path].grad, leaf.grad)


def test_key_order_and_mapping_type_do_not_matter() -> None:
    import collections
    import types

    net = Net()
    model = split(net, "blocks.*")

    def reverse(node: Any, kind: Callable[..., Any]) -> Any:
        return kind({k: reverse(node[k], kind) for k in reversed(node)}) if isinstance(node, dict) else node

    for kind in (dict, collections.OrderedDict, types.MappingProxyType):
        equal(model.apply(reverse(model.params, kind), IDS), net(IDS))


def test_a_meta_module_runs_on_meta_and_on_real_parameters() -> None:
    real = Net()
    with torch.device("meta"):
        net = Net()
    model = split(net, "blocks.*")
    assert all(leaf.is_meta for leaf in flat(model.params).values())
    assert model.apply(model.params, IDS.to("meta"), buffers=model.buffers)[0]["logits"].shape == (2, 3, 11)
    theirs = split(real)
    out, _ = model.apply(theirs.params, IDS, buffers=theirs.buffers)
    equal(out, real(IDS))


def test_mode_is_kept_as_at_the_split() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    model = split(net, "0")
    net.train()
    x = torch.randn(3, 4)
    equal(model.apply(model.params, x), net[0](x))
    train = split(net, "1")
    torch.manual_seed(0)
    dropped = train.apply(train.params, x)
    assert (dropped == 0).any()


def test_a_failing_call_leaves_nothing_behind() -> None:
    net = Net()
    model = split(net, "blocks.*")
    with pytest.raises(IndexError):
        model.apply(model.params, IDS + 100)
    with pytest.raises(RuntimeError):
        model.apply(model.params, IDS, mask=torch.zeros(7, 5))
    equal(model.apply(model.params, IDS), net(IDS))


def test_calls_nest() -> None:
    model = split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "*")
    x = torch.randn(1, 2)
    zero = tree.map(torch.zeros_like, model.params)

    class Inside(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return model.apply(zero, y)

    expected = model.apply(model.params, x)
    outer = split(nn.Sequential(nn.Linear(2, 2), Inside()))
    assert outer.apply(outer.params, x).abs().sum() == 0
    equal(model.apply(model.params, x), expected)


def test_units_get_their_subtree_and_keep_their_identity() -> None:
    net = Net()
    model = split(net, ("blocks.*", "head"))
    engine = Recorder()
    marked = engine.mark(model.params)
    for _ in range(2):
        equal(model.apply(marked, IDS), net(IDS))
    names = [unit.name for unit, _ in engine.calls]
    assert names == ["blocks.0", "blocks.1", "blocks.2", "head"] * 2
    assert [unit for unit, _ in engine.calls[:4]] == [unit for unit, _ in engine.calls[4:]]
    expected = tuple(path for path, _ in net.blocks[0].named_parameters())
    assert engine.calls[0][1] == expected
    assert engine.calls[3][1] == ("weight",)  # the tied weight, under the head's own name


def test_a_unit_is_a_pure_function_that_can_run_again() -> None:
    net = Net()
    model = split(net, "blocks.*")
    engine = Recorder()
    model.apply(engine.mark(model.params), IDS)
    unit = engine.calls[1][0]
    x = torch.randn(2, 3, 8)
    buffers = {"attn.scale": torch.tensor(0.5)}  # a unit with buffers takes them, and returns those that changed
    (out, _), changed = unit(model.params["blocks"]["1"], buffers, x)
    equal(out, net.blocks[1](x)[0])
    assert changed == {}
    ours = torch.func.grad(lambda p: unit(p, buffers, x)[0][0].sum())(model.params["blocks"]["1"])
    theirs = torch.autograd.grad(net.blocks[1](x)[0].sum(), list(net.blocks[1].parameters()))
    close(list(flat(ours).values()), list(theirs))


def test_hooks_of_a_unit_run_once_inside_of_it() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen: list[str] = []
    net[0].register_forward_pre_hook(lambda m, args: seen.append("pre"))
    net[0].register_forward_hook(lambda m, args, out: 2 * out)
    model = split(net, "*")
    engine = Recorder()
    x = torch.randn(1, 2)
    expected = net(x)
    seen.clear()
    equal(model.apply(engine.mark(model.params), x), expected)
    assert seen == ["pre"] and len(engine.calls) == 2
    unit = engine.calls[0][0]
    equal(unit(model.params["0"], x), 2 * nn.functional.linear(x, net[0].weight, net[0].bias))


def test_a_call_of_the_classs_own_runs_once() -> None:
    class Loud(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) + 1

    net = nn.Sequential(Loud(2, 2), Loud(2, 2))
    model = split(net, Loud)
    engine = Recorder()
    x = torch.randn(1, 2)
    equal(model.apply(engine.mark(model.params), x), net(x))
    assert [unit.name for unit, _ in engine.calls] == ["0", "1"]


def test_a_forward_bound_on_the_instance() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    original = net[0].forward
    net[0].forward = original  # a bound method in the instance's dict
    model = split(net, "0")
    double = tree.map(lambda leaf: 2 * leaf, model.params)
    x = torch.randn(3, 2)
    equal(model.apply(double, x), nn.functional.linear(x, 2 * net[0].weight, 2 * net[0].bias).relu())


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.again = self.a  # the same module, by a second path

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = self.again(self.a(x))
        return x if skip else self.b(x)


def test_units_called_twice_skipped_and_reached_by_two_paths() -> None:
    net = Loops()
    model = split(net, ("again", "b"))
    assert model.units == ("a", "b")
    assert model.aliases == {"again.weight": "a.weight", "again.bias": "a.bias"}
    engine = Recorder()
    x = torch.randn(2, 3)
    equal(model.apply(engine.mark(model.params), x, skip=True), net(x, skip=True))
    assert [unit.name for unit, _ in engine.calls] == ["a", "a"]
    equal(model.apply(model.params, x), net(x))


def test_other_methods_of_a_unit_and_calls_into_it_are_plain_code() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.block.norm(x) + self.block.attn(x) + self.block.gain

    net = Reader()
    model = split(net, "block")
    engine = Recorder()
    x = torch.randn(2, 3, 4)
    equal(model.apply(engine.mark(model.params), x), net(x))
    assert engine.calls == []


def test_all_problems_of_a_tree_come_in_one_error() -> None:
    model = split(Net(), "blocks.*")
    bad = flat(model.params)
    del bad["scale"]
    bad["blocks.0.gain"] = torch.zeros(3)
    bad["blocks.9.gain"] = torch.zeros(8)
    bad["blocks.1.norm.bias"] = None
    with pytest.raises(TreeError) as caught:
        model.apply(tree.nest(bad), IDS)
    text = str(caught.value)
    for part in ("scale: missing", "blocks.9.gain: unknown", "blocks.0.gain: shape (3,), expected (8,)", "NoneType"):
        assert part in text
    with pytest.raises(TreeError, match="nested dict"):
        model.apply([1, 2], IDS)  # type: ignore[arg-type]
    with pytest.raises(TreeError, match=r"(?s)buffers.*blocks.0.attn.scale: missing"):
        model.apply(model.params, IDS, buffers={})


def test_only_leaves_of_one_dim_are_taken_for_shards() -> None:
    model = split(nn.Linear(4, 2))
    for weight, shards in ((torch.zeros(8), True), (torch.zeros(4, 4), False), (1.0, False)):
        with pytest.raises(TreeError) as caught:
            model.apply({"weight": weight, "bias": model.params["bias"]}, torch.zeros(4))
        assert ("look like shards" in str(caught.value)) == shards


def test_broadcastable_shapes_are_not_taken() -> None:
    model = split(nn.LayerNorm(4))
    with pytest.raises(TreeError, match=r"bias: shape \(1,\), expected \(4,\)"):
        model.apply({"weight": torch.ones(4), "bias": torch.ones(1)}, torch.ones(2, 4))


def test_a_tensor_with_a_slot_may_have_a_local_shape() -> None:
    model = split(nn.Sequential(nn.Linear(4, 6)), "0")
    local = Recorder().mark(tree.nest({"0.weight": torch.ones(3, 4), "0.bias": torch.ones(3)}))
    assert model.apply(local, torch.ones(2, 4)).shape == (2, 3)


def test_patterns_that_match_nothing() -> None:
    with pytest.raises(PlanError, match=r"(?s)'layers\.\*', Conv2d.*blocks\.\*: Block \(3 times\)"):
        split(Net(), ("layers.*", nn.Conv2d, "blocks.*"))
    with pytest.raises(PlanError, match="no submodules"):
        split(nn.Linear(1, 1), "x")
    with pytest.raises(PlanError, match="3 is of type int"):
        split(Net(), (3,))  # type: ignore[arg-type]


def test_units_inside_of_units() -> None:
    with pytest.raises(PlanError, match=r"blocks\.0 contains blocks\.0\.attn\n"):
        split(Net(), ("blocks.*", "blocks.0.attn"))


def test_units_without_forward() -> None:
    with pytest.raises(PlanError, match=r"blocks: ModuleList"):
        split(Net(), "blocks")


def test_modules_that_cannot_be_copied() -> None:
    import threading

    net = Net()
    net.blocks[1].lock = threading.Lock()
    with pytest.raises(UnitError, match=r"blocks\.1\.lock: lock"):
        split(net)
    with pytest.raises(UnitError, match="no shape yet"):
        split(nn.LazyLinear(3))

    class Own(nn.Linear):
        def __deepcopy__(self, memo: Any) -> "Own":
            return Own(2, 2)

    with pytest.raises(UnitError, match=r"0\.weight: its module is copied"):
        split(nn.Sequential(Own(2, 2)))
