"""fs.chunked_cross_entropy against whole logits: every option, derivative, dtype and cut of the vocabulary."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard.errors import PlanError
from tests.losses.plain import DOUBLE, close, most_rows, problem, whole

NAMES = ("reduction", "z_loss", "label_smoothing", "softcap", "biased", "ignore_index", "chunks")
CASES = [*itertools.product(("mean", "sum"), (0.0, 0.01), (0.0, 0.1), (None, 2.0), (False, True), (-100, 3), (1, 3, 7))]
FULL: dict[str, Any] = {"z_loss": 0.01, "label_smoothing": 0.1, "softcap": 2.0}


def both(chunks: int, **options: Any) -> tuple[Any, Any, list[Tensor]]:
    """The function by chunks, the whole one, and their tensors, hidden, weight and bias."""
    hidden, weight, bias, labels = problem(ignored=options.get("ignore_index", -100))
    mine = lambda h, w, b=None: fs.chunked_cross_entropy(h, w, labels, chunks=chunks, bias=b, **options)  # noqa: E731
    plain = lambda h, w, b=None: whole(h, w, labels, b, **options)  # noqa: E731
    return mine, plain, [hidden, weight, bias]


@pytest.mark.parametrize("chunks", [1, 3, 7])
def test_every_option(chunks: int) -> None:
    for case in CASES:
        options = dict(zip(NAMES, case, strict=True))
        if options.pop("chunks") != chunks:
            continue
        count = 3 if options.pop("biased") else 2
        mine, plain, tensors = both(chunks, **options)
        given = [each.requires_grad_() for each in tensors[:count]]
        got, want = mine(*given), plain(*given)
        close(got, want)
        close(torch.autograd.grad(got, given), torch.autograd.grad(want, given))


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
def test_every_derivative(options: dict[str, Any]) -> None:
    mine, plain, tensors = both(3, **options)
    along = tuple(torch.randn_like(each) for each in tensors)
    every = (0, 1, 2)

    def derivatives(f: Any) -> list[Any]:
        slope = torch.func.grad(f, every)
        product = lambda *given: sum((a * b).sum() for a, b in zip(slope(*given), along, strict=True))  # noqa: E731
        pushed = lambda *given: torch.func.jvp(f, given, along)[1]  # noqa: E731
        return [
            slope(*tensors),
            pushed(*tensors),
            torch.func.grad(product, every)(*tensors),
            torch.func.jvp(slope, tuple(tensors), along)[1],
            torch.func.grad(pushed, every)(*tensors),
        ]

    close(derivatives(mine), derivatives(plain))


def test_a_second_backward_and_one_with_a_graph() -> None:
    mine, plain, tensors = both(3, **FULL)
    given = [each.requires_grad_() for each in tensors]
    got, want = mine(*given), plain(*given)
    first = torch.autograd.grad(got * 3, given, retain_graph=True)
    slopes = torch.autograd.grad(want, given, create_graph=True)
    close(first, tuple(3 * each for each in slopes))
    close(torch.autograd.grad(got, given, retain_graph=True), slopes)
    graph = torch.autograd.grad(got, given, create_graph=True)
    close(graph, slopes)
    sums = [sum(each.square().sum() for each in found) for found in (graph, slopes)]
    close(*(torch.autograd.grad(each, given) for each in sums))


def test_dual_numbers_of_plain_autograd() -> None:
    mine, plain, (hidden, weight, bias) = both(3, **FULL)
    along = torch.ones_like(hidden)
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(mine(forward_ad.make_dual(hidden, along), weight, bias)).tangent
    close(got, torch.func.jvp(lambda h: plain(h, weight, bias), (hidden,), (along,))[1])


def test_gradients_of_samples() -> None:
    hidden, weight, labels = torch.randn(4, 6, 5, dtype=DOUBLE), torch.randn(11, 5, dtype=DOUBLE), torch.arange(24) % 11
    mine = torch.func.grad(lambda w, h, y: fs.chunked_cross_entropy(h, w, y, chunks=4))
    plain = torch.func.grad(lambda w, h, y: whole(h, w, y))
    got, want = (torch.vmap(each, (None, 0, 0))(weight, hidden, labels.view(4, 6)) for each in (mine, plain))
    close(got, want)


def test_losses_of_rows_and_parts() -> None:
    hidden, weight, bias, labels = problem(6)
    given = [each.requires_grad_() for each in (hidden.view(2, 3, 5), weight, bias)]
    got = fs.chunked_cross_entropy(*given[:2], labels.view(2, 3), bias=bias, chunks=4, reduction="none", **FULL)
    want = whole(hidden, weight, labels, bias, reduction="none", **FULL).view(2, 3)
    close(got, want)
    close(*(torch.autograd.grad(each.square().sum(), given[1:]) for each in (got, want)))
    parts = fs.chunked_cross_entropy(*given[:2], labels.view(2, 3), chunks=4, reduction="parts")
    assert int(parts.count) == 5
    close(parts.value, whole(hidden, weight, labels))


def test_products_that_add() -> None:
    """A frozen head beside its adapter: the frozen weight has no gradient."""
    hidden, weight, _, labels = problem()
    a, b = torch.randn(2, 5, dtype=DOUBLE, requires_grad=True), torch.randn(11, 2, dtype=DOUBLE, requires_grad=True)
    got = fs.chunked_cross_entropy([hidden, hidden @ a.t()], [weight, b], labels, chunks=3)
    want = whole(hidden, weight + b @ a, labels)
    close(*(torch.autograd.grad(each, (a, b)) for each in (got, want)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_no_further_off_than_whole_logits(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    exact = [torch.randn(shape, generator=gen).to(dtype).double().requires_grad_() for shape in ((64, 32), (50, 32))]
    short = [each.detach().to(dtype).requires_grad_() for each in exact]
    labels = torch.randint(50, (64,), generator=gen)
    got = fs.chunked_cross_entropy(*short, labels, chunks=8)
    assert got.dtype == torch.float32
    found = [torch.autograd.grad(got, short)]
    found.append(torch.autograd.grad(F.cross_entropy((short[0] @ short[1].t()).float(), labels), short))
    want = torch.autograd.grad(whole(*exact, labels), exact)
    mine, theirs = ([float((a - b).norm() / b.norm()) for a, b in zip(each, want, strict=True)] for each in found)
    assert all(a < 1.5 * b for a, b in zip(mine, theirs, strict=True))


def test_autocast_is_that_of_the_head() -> None:
    hidden, weight, _, labels = problem()
    hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fs.chunked_cross_entropy(hidden, weight, labels, chunks=2)
    want = fs.chunked_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels, chunks=2)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert [each.dtype for each in torch.autograd.grad(got, (hidden, weight))] == [torch.float32] * 2


@pytest.mark.parametrize("chunks", [1, 5, 8])
@pytest.mark.parametrize("order", [1, 2])
def test_logits_are_never_whole(chunks: int, order: int) -> None:
    hidden, weight = torch.randn(40, 4, requires_grad=True), torch.randn(29, 4, requires_grad=True)
    with most_rows(29) as most:
        loss = fs.chunked_cross_entropy(hidden, weight, torch.arange(40) % 29, chunks=chunks)
        slope = torch.autograd.grad(loss, hidden, create_graph=order == 2)[0]
        if order == 2:
            torch.autograd.grad(slope.square().sum(), weight)
    assert most() == 40 // chunks


@pytest.mark.parametrize("options", [{}, {**FULL}, {"vocab": 9, "label_smoothing": 0.1}], ids=str)
def test_vocabulary_that_an_axis_cuts(options: dict[str, Any]) -> None:
    mesh = fs.virtual_mesh((2,), ("tp",))
    hidden, weight, bias, labels = problem(classes=10)
    whole_options = {name: each for name, each in options.items() if name != "vocab"}
    along = torch.randn_like(weight)

    def plain(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        rows = options.get("vocab", 10)
        return whole(h, w[:rows], labels, b[:rows], **whole_options)

    want = torch.func.grad(plain, (0, 1, 2))(hidden, weight, bias)
    second = torch.func.jvp(lambda w: torch.func.grad(plain, (0, 1, 2))(hidden, w, bias), (weight,), (along,))[1]

    def rank() -> None:
        mine = slice(5 * mesh.rank, 5 * mesh.rank + 5)
        given = [each.clone().requires_grad_() for each in (hidden, weight[mine], bias[mine])]
        f = lambda h, w, b: fs.chunked_cross_entropy(h, w, labels, chunks=3, bias=b, axis="tp", mesh=mesh, **options)  # noqa: E731
        loss = f(*given)
        close(loss, plain(hidden, weight, bias))
        for graph in (False, True):
            got = torch.autograd.grad(loss, given, create_graph=graph, retain_graph=True)
            close(got, (want[0], want[1][mine], want[2][mine]))
        own = [each.detach() for each in given]
        slope = torch.func.grad(f, (0, 1, 2))
        got = torch.func.jvp(lambda w: slope(own[0], w, own[2]), (own[1],), (along[mine],))[1]
        close(got, (second[0], second[1][mine], second[2][mine]))

    mesh.run(rank)


def test_no_logits_are_kept_on_played_ranks() -> None:
    """Forward-mode differentiation has a level there, without tangents."""
    mesh = fs.virtual_mesh((2,), ("tp",))

    def rank() -> list[list[int]]:
        hidden, weight = torch.randn(40, 4, requires_grad=True), torch.randn(29, 4, requires_grad=True)
        kept: list[list[int]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append([*x.shape]) or x, lambda x: x):
            fs.chunked_cross_entropy(hidden, weight, torch.arange(40), chunks=8, axis="tp", mesh=mesh)
        return [shape for shape in kept if shape[-1:] == [29]]

    assert mesh.run(rank) == [[], []]


def test_vocabulary_inside_of_a_shard_map() -> None:
    hidden, weight, _, labels = problem(classes=10)
    specs = (fs.P(), fs.P("tp"), fs.P())
    inside = lambda h, w, y: fs.chunked_cross_entropy(h, w, y, chunks=2, axis="tp")  # noqa: E731
    mine = fs.shard_map(inside, fs.virtual_mesh((2,), ("tp",)), specs, fs.P())
    given = [hidden.requires_grad_(), weight.requires_grad_()]
    close(*(torch.autograd.grad(f(*given, labels), given) for f in (mine, whole)))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"chunks": 8}, "chunks=8 of 7 rows (labels [7]): give at most 7 chunks"),
    ({"chunks": 0}, "chunks=0: give a number of chunks, from 1 on"),
    ({"chunks": True}, "chunks=True"),
    ({"reduction": "max"}, "reduction='max' is none of 'mean', 'sum', 'none', 'parts'"),
    ({"softcap": 0.0}, "softcap=0.0: give a number above 0"),
    ({"softcap": "a"}, "softcap is 'a', a str: give a number"),
    ({"label_smoothing": 2.0}, "label_smoothing=2.0: give a number from 0 to 1"),
    ({"z_loss": -1.0}, "z_loss=-1.0: give a weight from 0 on"),
    ({"bias": torch.ones(3)}, "bias [3] of a weight [11, 5]"),
    ({"vocab": 12}, "vocab=12, but 1 ranks with 11 rows of the weight each have 11"),
    ({"labels": torch.full((7,), 11)}, "7 of 7 numbers, the first 11, are not in a vocabulary of 11"),
    ({"labels": torch.zeros(6, dtype=torch.long)}, "hidden [7, 5] needs labels [7], and got [6]"),
    ({"labels": torch.zeros(7)}, "labels of torch.float32: give integers"),
    ({"labels": [1]}, "labels is a list: give a tensor"),
    ({"hidden": torch.ones(7, 4, dtype=DOUBLE)}, "hidden [7, 4] and weight [11, 5]"),
    ({"weight": torch.ones(11, 5)}, "of torch.float32, torch.float64: give one floating dtype"),
    ({"hidden": [torch.ones(7, 5)] * 2}, "2 hidden and 1 weight"),
]


@pytest.mark.parametrize(("change", "says"), BAD, ids=[says for _, says in BAD])
def test_bad_input(change: dict[str, Any], says: str) -> None:
    hidden, weight, _, labels = problem()
    given = {"hidden": hidden, "weight": weight, "labels": labels, "chunks": 3, **change}
    with pytest.raises(PlanError) as caught:
        fs.chunked_cross_entropy(**given)
    assert says in str(caught.value)
