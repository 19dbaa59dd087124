"""split: a module as a parameter tree and a pure function. The oracle is the module itself, or functional_call."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fshard import tree
from fshard.errors import PlanError, TreeError, UnitError
from fshard.model import Slot, Unit, attach, split


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores + mask
        return self.proj(scores.softmax(-1) @ v)


class Block(nn.Module):
    """Returns a tuple, as the blocks of Hugging Face models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.attn(self.norm(x), mask=mask)
        return x + self.gain * y, {"norm": y.norm()}


class Net(nn.Module):
    """Direct parameters, a tied head, code that indexes, tests and reads into its blocks."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 1.5))
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids) * self.scale
        norms = []
        for block in self.blocks:
            assert isinstance(block, Block)
            x, aux = block(x, mask=mask)
            norms.append(aux["norm"])
        x = x + self.blocks[0].attn.qkv.weight.mean() + self.blocks[-1].gain.sum()
        return {"logits": self.head(x), "norms": torch.stack(norms)}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Recorder:
    """An engine that notes the calls it gets and runs them as they are."""

    def __init__(self) -> None:
        self.calls: list[tuple[Unit, tuple[str, ...]]] = []

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((unit, tuple(path for path, _ in tree.paths(params))))
        plain = tree.map(lambda leaf: leaf.detach(), params)
        return unit.fn(plain, *args, **kwargs)

    def mark(self, params: dict[str, Any]) -> dict[str, Any]:
        marked = {path: leaf.detach() for path, leaf in tree.paths(params)}
        for path, leaf in marked.items():
            attach(leaf, Slot(self, path))
        return tree.nest(marked)


def flat(nested: dict[str, Any]) -> dict[str, Any]:
    return dict(tree.paths(nested))


def equal(a: Any, b: Any) -> None:
    one, spec = tree.flatten(a)
    two, other = tree.flatten(b)
    assert spec == other
    for x, y in zip(one, two, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


IDS = torch.tensor([[1, 2, 3], [4, 5, 10]])


# ---------------------------------------------------------------------------------------------- data


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
    assert all(x is y for (_, _, p), (_, _, q) in zip(before, after, strict=True) for (_, x), (_, y) in zip(p, q, strict=True))


def test_the_copy_has_no_memory() -> None:
    model = split(Net(), Block)
    held = [leaf.device.type for leaf in model._body.module.parameters()]
    assert set(held) == {"meta"}
    model.apply(model.params, IDS)
    assert {leaf.device.type for leaf in model._body.module.parameters()} == {"meta"}


# ---------------------------------------------------------------------------------------------- apply


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


def test_a_failing_call_leaves_nothing_bound() -> None:
    net = Net()
    model = split(net, "blocks.*")
    with pytest.raises(IndexError):
        model.apply(model.params, IDS + 100)
    with pytest.raises(RuntimeError):
        model.apply(model.params, IDS, mask=torch.zeros(7, 5))
    assert all(leaf.is_meta for leaf in model._body.module.parameters())
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


# ---------------------------------------------------------------------------------------------- containers


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(3) for _ in range(2)])
        self.named = nn.ParameterDict({"left": torch.randn(3), "right": torch.randn(3)})
        self.mods = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Sequential(nn.Linear(3, 3), nn.GELU())})
        self.plain = [self.mods["a"]]

    def forward(self, x: Tensor, *, flip: bool = False) -> tuple[Tensor, list[Tensor]]:
        for p in self.many:
            x = x + p
        for key in self.named:
            x = x * self.named[key]
        order = sorted(self.mods, reverse=flip)
        outs = [self.mods[key](x) for key in order]
        return self.plain[0](x), outs


@pytest.mark.parametrize("units", [(), "mods.*", (nn.Linear,), ("many",), ("mods.b",)])
def test_containers(units: Any) -> None:
    net = Containers()
    x = torch.randn(2, 3)
    if units == ("many",):
        with pytest.raises(PlanError, match=r"many: ParameterList"):
            split(net, units)
        return
    model = split(net, units)
    for flip in (False, True):
        equal(model.apply(model.params, x, flip=flip), net(x, flip=flip))


def test_a_reference_in_a_plain_list_is_the_unit_too() -> None:
    net = Containers()
    model = split(net, "mods.*")
    engine = Recorder()
    equal(model.apply(engine.mark(model.params), torch.ones(1, 3)), net(torch.ones(1, 3)))
    assert [unit.name for unit, _ in engine.calls] == ["mods.a", "mods.b", "mods.a"]


def test_a_module_without_parameters_and_without_units() -> None:
    model = split(nn.GELU())
    assert model.params == {} and model.units == ()
    equal(model.apply({}, torch.ones(2)), nn.GELU()(torch.ones(2)))


@pytest.mark.parametrize("make", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_modules(make: Any) -> None:
    module = nn.Sequential(make(3, 4, num_layers=2, bidirectional=True))
    x = torch.randn(5, 2, 3)
    for units in ((), "0"):
        model = split(module, units)
        equal(model.apply(model.params, x), module(x))
        double = tree.map(lambda leaf: 2 * leaf, model.params)
        equal(model.apply(double, x), functional_call(module, flat(double), (x,)))
        equal(model.apply(model.params, x), module(x))


def test_torchs_own_transformer() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 8)
    for mode in (True, False):
        net.train(mode)
        model = split(net, nn.TransformerEncoderLayer)
        with torch.no_grad():
            close(model.apply(model.params, x), net(x))


# ---------------------------------------------------------------------------------------------- parametrizations


def test_parametrizations_and_weight_norm() -> None:
    nets = [
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2)),
        nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), nn.Linear(3, 2)),
    ]
    with pytest.warns(FutureWarning):
        nets.append(nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2)))
    x = torch.randn(2, 3)
    for net in nets:
        for units in ((), "*"):
            model = split(net, units)
            equal(model.apply(model.params, x), net(x))
            double = tree.map(lambda leaf: 2 * leaf, model.params)
            close(model.apply(double, x), functional_call(net, flat(double), (x,)))


# ---------------------------------------------------------------------------------------------- units


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


# ---------------------------------------------------------------------------------------------- torch.func


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own forward-mode rules
@pytest.mark.parametrize("units", [(), "blocks.*"])
def test_transforms_equal_functional_call(units: Any) -> None:
    net = Net()
    model = split(net, units)

    def ours(params: Any, ids: Tensor) -> Tensor:
        return model.apply(params, ids)["logits"].square().mean()

    def theirs(params: Any, ids: Tensor) -> Tensor:
        return functional_call(net, params, (ids,))["logits"].square().mean()

    plain = {path: leaf.detach() for path, leaf in net.named_parameters()}
    direction = {path: torch.randn_like(leaf) for path, leaf in plain.items()}
    nested = tree.nest(direction)
    close(flat(torch.func.grad(ours)(model.params, IDS)), torch.func.grad(theirs)(plain, IDS))
    close(
        torch.func.jvp(lambda p: ours(p, IDS), (model.params,), (nested,)),
        torch.func.jvp(lambda p: theirs(p, IDS), (plain,), (direction,)),
    )
    close(
        flat(torch.vmap(torch.func.grad(ours), in_dims=(None, 0))(model.params, IDS)),
        torch.vmap(torch.func.grad(theirs), in_dims=(None, 0))(plain, IDS),
    )
    close(
        flat(torch.func.jvp(lambda p: torch.func.grad(ours)(p, IDS), (model.params,), (nested,))[1]),
        torch.func.jvp(lambda p: torch.func.grad(theirs)(p, IDS), (plain,), (direction,))[1],
    )


def test_an_ensemble_by_vmap_over_parameters_and_buffers() -> None:
    nets = [Normed() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(nets)  # type: ignore[arg-type]
    x = torch.randn(5, 4)
    for units in ((), "blocks.*"):
        model = split(nets[0], units)

        def member(p: Any, b: Any, model: Any = model) -> Any:
            return model.apply(p, x, buffers=b)

        stacked = tree.nest({path: leaf.detach() for path, leaf in params.items()})
        out, new = torch.vmap(member)(stacked, tree.nest(buffers))
        for i, net in enumerate(copy.deepcopy(nets)):
            close(out[i], net(x))
            for path, buffer in net.named_buffers():
                close(flat(new)[path][i], buffer)


# ---------------------------------------------------------------------------------------------- buffers


@pytest.mark.parametrize("units", [(), "blocks.*", "stem", nn.BatchNorm1d])
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_changed_buffers_are_returned_and_never_written(units: Any, guard: Any) -> None:
    net = Normed()
    model = split(net, units)
    x = torch.randn(6, 4)
    given = tree.map(torch.clone, model.buffers)
    before = tree.map(torch.clone, model.buffers)
    with guard():
        out, new = model.apply(model.params, x, buffers=given)
    equal(given, before)
    equal(model.buffers, before)
    mirror = copy.deepcopy(net)
    equal(out.detach(), mirror(x).detach())
    equal(flat(new), {path: buffer for path, buffer in mirror.named_buffers()})
    out, new = model.apply(model.params, x, buffers=new)
    equal(out, mirror(x))
    equal(flat(new), {path: buffer for path, buffer in mirror.named_buffers()})


@pytest.mark.parametrize("units", [(), "blocks.*"])
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.inference_mode])
def test_unchanged_buffers_are_the_same_tensors(units: Any, guard: Any) -> None:
    net = Normed().eval()
    model = split(net, units)
    with guard():
        _, new = model.apply(model.params, torch.randn(2, 4), buffers=model.buffers)
    same = {path for path, buffer in tree.paths(new) if buffer is flat(model.buffers)[path]}
    assert same == set(flat(model.buffers)) - {"calls"}


@pytest.mark.parametrize("units", [(), "blocks.*"])
def test_a_change_without_buffers_is_an_error_naming_them(units: Any) -> None:
    model = split(Normed(), units)
    with pytest.raises(UnitError, match=r"(?s)calls.*stem\.running_mean.*blocks\.1\.1\.running_var.*buffers=buffers"):
        model.apply(model.params, torch.randn(3, 4))
    with pytest.raises(UnitError, match="blocks.0.1.num_batches_tracked"):
        torch.func.grad(lambda p: model.apply(p, torch.randn(3, 4)).sum())(model.params)


def test_buffers_through_grad_with_aux() -> None:
    net = Normed()
    model = split(net, "blocks.*")
    x = torch.randn(3, 4)

    def loss(p: Any, b: Any) -> Any:
        out, new = model.apply(p, x, buffers=b)
        return out.square().sum(), new

    _, new = torch.func.grad(loss, has_aux=True)(model.params, model.buffers)
    net(x)
    equal(flat(new), dict(net.named_buffers()))


def test_a_unit_called_twice_sees_its_own_change() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.same = self.norm

        def forward(self, x: Tensor) -> Tensor:
            return self.same(self.norm(x)) + self.norm.running_mean

    net = Twice()
    model = split(net, "norm")
    x = torch.randn(5, 3)
    out, new = model.apply(model.params, x, buffers=model.buffers)
    equal(out, net(x))
    equal(flat(new), {path: buffer for path, buffer in net.named_buffers()})


class Statistics(nn.Module):
    """A batch normalization of its own: the kernel writes the statistics, and no version counter tells."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.frozen = frozen
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=not self.frozen)


@pytest.mark.parametrize("units", [(), "0"])
def test_statistics_that_a_kernel_writes_silently(units: Any) -> None:
    x = torch.randn(5, 3)
    net = nn.Sequential(Statistics())
    model = split(net, units)
    with pytest.raises(UnitError, match=r"(?s)0\.mean.*0\.var"):
        model.apply({}, x)
    out, new = model.apply({}, x, buffers=model.buffers)
    assert model.buffers["0"]["mean"].abs().sum() == 0
    equal(out, net(x))
    equal(flat(new), dict(net.named_buffers()))
    frozen = split(nn.Sequential(Statistics(frozen=True)), units)
    equal(frozen.apply({}, x), nn.Sequential(Statistics(frozen=True))(x))


@pytest.mark.parametrize("norm", [nn.InstanceNorm1d(4, track_running_stats=True), nn.BatchNorm1d(4, momentum=None)])
def test_running_statistics_of_torchs_own_norms(norm: nn.Module) -> None:
    x = torch.randn(5, 4, 6)
    model = split(norm)
    _, new = model.apply(model.params, x, buffers=model.buffers)
    norm(x)
    equal(flat(new), dict(norm.named_buffers()))


def test_replaced_buffers_and_buffers_with_a_history() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2)
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x)
            self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
            return y - self.mean

    net = nn.Sequential(Average())
    for units in ((), "0"):
        model = split(net, units)
        params = tree.map(lambda leaf: leaf.clone().requires_grad_(), model.params)
        out, new = model.apply(params, torch.ones(3, 2), buffers=model.buffers)
        assert not new["0"]["mean"].requires_grad and out.requires_grad
        equal(new["0"]["mean"], 0.1 * net[0].lin(torch.ones(3, 2)).mean(0).detach())


# ---------------------------------------------------------------------------------------------- errors


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
    with pytest.raises(PlanError, match="3 is a int"):
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
