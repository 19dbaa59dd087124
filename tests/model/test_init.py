"""Initial values: independent of how a leaf is cut, and distributed as torch's own."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fshard import tree
from fshard.model import Initializer, split
from fshard.model import initial_values as init
from fshard.model.philox import fold

EVERY: dict[str, Initializer] = {
    "zeros": init.zeros(),
    "ones": init.ones(),
    "constant": init.constant(0.25),
    "uniform": init.uniform(-2, 3),
    "normal": init.normal(0.02, mean=1.0),
    "trunc_normal": init.trunc_normal(0.5, -0.75, 1.0, mean=0.1),
    "kaiming_uniform": init.kaiming_uniform(math.sqrt(5)),
    "kaiming_normal": init.kaiming_normal(mode="fan_out"),
    "xavier_uniform": init.xavier_uniform(0.5),
    "xavier_normal": init.xavier_normal(),
    "zero_row": init.ZeroRow(init.normal(), -2),
}


def whole(initializer: Initializer, shape: tuple[int, ...], key: int = 5) -> Tensor:
    return init.fill(initializer, key, shape, range(math.prod(shape))).view(shape)


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("name", EVERY)
@given(data=st.data())
@settings(deadline=None, max_examples=15)
def test_values_do_not_depend_on_the_cut(name: str, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(6, 35), (3, 5, 14), (30, 7, 1, 1)]))
    size = math.prod(shape)
    full = whole(EVERY[name], shape).view(-1)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=6)))
    parts = [init.fill(EVERY[name], 5, shape, range(a, b)) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    assert torch.equal(torch.cat(parts), full)
    some = torch.tensor(data.draw(st.permutations(range(size))))[: size // 2]
    assert torch.equal(EVERY[name](5, shape, some), full[some])


def test_chunks_do_not_show() -> None:
    size = init.CHUNK + 12345
    full = init.fill(init.normal(), 9, (size,), range(size))
    assert full.dtype == torch.float32 and full.shape == (size,)
    assert torch.equal(full[-20000:], init.fill(init.normal(), 9, (size,), torch.arange(size - 20000, size)))
    strided = init.fill(init.normal(), 9, (size,), range(3, size, 1000))
    assert torch.equal(strided, full[3::1000])


def test_fill_writes_where_it_is_told_and_rounds_once() -> None:
    full = whole(init.normal(), (100,))
    out = torch.full((100,), 7.0, dtype=torch.bfloat16)
    assert init.fill(init.normal(), 5, (100,), range(100), out) is out
    assert torch.equal(out, full.bfloat16())
    with pytest.raises(ValueError, match=r"\(99,\).*100 positions"):
        init.fill(init.normal(), 5, (100,), range(100), torch.empty(99))


@pytest.mark.parametrize("name", EVERY)
def test_initializers_are_values(name: str) -> None:
    made = EVERY[name]
    assert hash(made) == hash(EVERY[name]) and eval(repr(made), vars(init)) == made


TORCH: list[tuple[Initializer, Callable[[Tensor], Any]]] = [
    (init.uniform(-2, 3), lambda t: nn.init.uniform_(t, -2, 3)),
    (init.normal(0.02, 1.0), lambda t: nn.init.normal_(t, 1.0, 0.02)),
    (EVERY["trunc_normal"], lambda t: nn.init.trunc_normal_(t, 0.1, 0.5, -0.75, 1.0)),
    (init.kaiming_uniform(math.sqrt(5)), lambda t: nn.init.kaiming_uniform_(t, math.sqrt(5))),
    (init.kaiming_normal(0.3, "fan_out"), lambda t: nn.init.kaiming_normal_(t, 0.3, "fan_out")),
    (init.xavier_uniform(2.0), lambda t: nn.init.xavier_uniform_(t, 2.0)),
    (init.xavier_normal(), nn.init.xavier_normal_),
]


def alike(ours: Tensor, theirs: Tensor) -> None:
    """The same distribution, by the largest distance of two empirical ones (Kolmogorov and Smirnov)."""
    a, b = ours.flatten().double().sort().values, theirs.flatten().double().sort().values
    points = torch.cat([a, b])
    below = [torch.searchsorted(some, points, right=True) / len(some) for some in (a, b)]
    limit = 2.2 * math.sqrt(1 / len(a) + 1 / len(b))  # equal distributions exceed it in 1 case of 8000
    assert (below[0] - below[1]).abs().max() < limit
    spread = max(float(b.std()), 1e-12)
    assert abs(float(a.min() - b.min())) < 1.5 * spread and abs(float(a.max() - b.max())) < 1.5 * spread


@pytest.mark.parametrize(("ours", "theirs"), TORCH)
def test_distributions_equal_torchs(ours: Initializer, theirs: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    shape = (40, 30, 3, 5)
    reference = torch.empty(shape)
    theirs(reference)
    alike(whole(ours, shape), reference)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(50, 40),
    "Conv1d": lambda: nn.Conv1d(12, 24, 5, groups=3),
    "Conv2d": lambda: nn.Conv2d(12, 24, (3, 5)),
    "Conv3d": lambda: nn.Conv3d(4, 24, 3),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(24, 12, 3, groups=2),
    "Embedding": lambda: nn.Embedding(60, 30, padding_idx=7),
    "EmbeddingBag": lambda: nn.EmbeddingBag(60, 30),
    "LayerNorm": lambda: nn.LayerNorm(9),
    "RMSNorm": lambda: nn.RMSNorm(9),
    "GroupNorm": lambda: nn.GroupNorm(3, 9),
    "BatchNorm2d": lambda: nn.BatchNorm2d(9),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(9),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(9, affine=True),
    "MultiheadAttention": lambda: nn.MultiheadAttention(32, 4, add_bias_kv=True),
    "MultiheadAttention kdim": lambda: nn.MultiheadAttention(32, 4, kdim=20, vdim=24),
    "RNN": lambda: nn.RNN(20, 30),
    "LSTM": lambda: nn.LSTM(20, 30, num_layers=2, proj_size=10),
    "GRU": lambda: nn.GRU(20, 30, bidirectional=True),
    "GRUCell": lambda: nn.GRUCell(20, 30),
    "Bilinear": lambda: nn.Bilinear(20, 30, 10),
    "PReLU": lambda: nn.PReLU(4, init=0.1),
    "Transformer": lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_deduced_values_are_distributed_as_the_modules_own(name: str) -> None:
    torch.manual_seed(1)
    model = split(MODULES[name]())
    assert list(model.inits) == [path for path, _ in tree.paths(model.params)]
    for path, leaf in tree.paths(model.params):
        ours = whole(model.inits[path], tuple(leaf.shape), fold(0, path))
        if (leaf == leaf.flatten()[0]).all():
            assert torch.equal(ours, leaf), path
        elif leaf.numel() >= 500:
            alike(ours, leaf)
        else:
            assert abs(float(ours.abs().max() / leaf.abs().max()) - 1) < 0.5, path
    if name == "Embedding":
        embedded = whole(model.inits["weight"], (60, 30))
        assert (embedded[7] == 0).all() and (embedded[[6, 8]] != 0).all()


def test_bounds_of_a_linear() -> None:
    model = split(nn.Linear(64, 256))
    weight, bias = (whole(model.inits[name], tuple(model.params[name].shape)) for name in ("weight", "bias"))
    for drawn in (weight, bias):
        assert 0.97 / 8 < drawn.max() <= 1 / 8 and -0.97 / 8 > drawn.min() >= -1 / 8


def test_what_is_not_known_is_absent() -> None:
    class Own(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight)

    class More(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.gain = nn.Parameter(torch.ones(2))

    net = nn.ModuleDict({"own": Own(2, 2), "more": More(), "list": nn.ParameterList([torch.ones(2)])})
    assert set(split(net).inits) == {"more.weight", "more.bias"}


def test_a_tied_leaf_has_its_first_owners_values() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    net[1].weight = net[0].weight
    assert split(net).inits == {"0.weight": init.normal()}


def test_fans_and_bounds_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"\[3\] has no fan"):
        init.xavier_uniform()(0, (3,), torch.arange(3))
    with pytest.raises(ValueError, match="a < b"):
        init.trunc_normal(1.0, 2.0, -2.0)
    with pytest.raises(ValueError, match="no mass"):
        init.trunc_normal(0.01, 0.5, 0.6)
