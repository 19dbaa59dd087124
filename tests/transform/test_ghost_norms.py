"""Clipped sums of gradients of single samples, by layers and by vmap alone, in float64; and what is never held."""

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import tree
from fshard.transform.sample_tape import SampleTape

ROWS, VOCAB, WIDTH = 5, 11, 6
Loss = Callable[[Any, Any], Any]


class Words(nn.Module):
    """Embeddings, a norm, a layer that is called twice, a convolution and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH, padding_idx=3), nn.Embedding(16, WIDTH)
        self.norm, self.twice = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv, self.head = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.words(x) + self.places(torch.arange(x.shape[-1], device=x.device))
        h = torch.tanh(self.twice(torch.tanh(self.twice(self.norm(h)))))
        out: Tensor = self.head(h + self.conv(h.mT).mT)
        return out


def words(tied: bool = False, long: int = 4) -> tuple[Any, Loss, Any]:
    """A language model's parameters, loss and batch."""
    torch.manual_seed(0)
    model = fs.split(Words(tied).double(), units=("twice", "head"))
    batch = {"x": torch.randint(VOCAB, (ROWS, long)), "y": torch.randint(VOCAB, (ROWS, long))}

    def loss(p: Any, b: Any) -> Any:
        return F.cross_entropy(model.apply(p, b["x"]).flatten(0, 1), b["y"].flatten())

    return model, loss, batch


def perceptron(inner: Callable[[Any, Tensor], Tensor]) -> tuple[Any, Loss, Any]:
    """Two matrices as a tree, a loss of one output a row, and a batch."""
    torch.manual_seed(0)
    params = {"a": torch.randn(8, WIDTH).double(), "b": torch.randn(2, 8).double()}
    return params, lambda p, x: inner(p, x).square().mean(), torch.randn(ROWS, WIDTH).double()


def layers(p: Any, x: Tensor) -> Tensor:
    """Two layers."""
    return F.linear(torch.tanh(F.linear(x, p["a"])), p["b"])


def slope(p: Any, x: Tensor) -> Tensor:
    """A derivative by the input, as physics-informed losses take."""
    return torch.func.jvp(lambda x: layers(p, x), (x,), (torch.ones_like(x),))[1]


def matrices(p: Any, x: Tensor) -> Tensor:
    """The same with matrices that are transposed."""
    return torch.tanh(x @ p["a"].T) @ p["b"].T


def products(p: Any, x: Tensor) -> Tensor:
    """Two products with matrices as they are."""
    return torch.matmul(torch.tanh(x @ p["c"]), p["d"])


def bare_products() -> tuple[Any, Loss, Any]:
    """Matrices that are multiplied from the right."""
    model, _, batch = perceptron(layers)
    turned = {"c": model["a"].T.contiguous(), "d": model["b"].T.contiguous()}
    return turned, lambda p, x: products(p, x).square().mean(), batch


def attend_once(p: Any, x: Tensor) -> Tensor:
    """Attention of one sequence, with a bias that is trained."""
    q = x.view(1, 4, 2, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=p["b"])


def attend(p: Any, x: Tensor) -> Tensor:
    """Attention of two queries for each sequence, with a bias that is trained."""
    q = torch.cat([x, 2 * x]).view(-1, 4, 2, 3).transpose(1, 2)
    return (
        F.scaled_dot_product_attention(q, q, q[:1], attn_mask=p["b"])
        @ F.scaled_dot_product_attention(q, q, q, attn_mask=p["b"]).mT
    )


def masked(p: Any, x: Tensor) -> Tensor:
    """Attention by the function of ``nn.MultiheadAttention``, with a mask of what is left out."""
    h, left_out = x.transpose(0, 1), torch.ones(4, 4, dtype=torch.bool).triu(1)
    options: Any = {"training": False, "need_weights": False, "attn_mask": left_out}
    weights = p["a"], None, None, None, False, 0.0, p["b"], None
    return F.multi_head_attention_forward(h, h, h, WIDTH, 2, *weights, **options)[0]


def padded(p: Any, x: Tensor) -> Tensor:
    """Embeddings with padding, also of a weight that is computed, and inside of a derivative."""
    found = F.embedding(x, p["a"].tanh(), padding_idx=-4) + F.embedding(x, p["a"], 3)
    return torch.func.grad(lambda y: (F.embedding(x, p["a"], 3) * y).square().sum())(found)


def leaves_read(f: Callable[[Any, Tensor], Tensor], indices: bool = True, **shapes: tuple[int, ...]) -> Any:
    """A function of leaves of these shapes as a case; of indices or of vectors."""

    def made() -> tuple[Any, Loss, Any]:
        torch.manual_seed(0)
        batch = torch.randn(ROWS, 4, WIDTH).double() if not indices else torch.randint(7, (ROWS, 4)).clamp(3)
        params = {name: torch.randn(shape).double() for name, shape in shapes.items()}
        return params, lambda p, x: f(p, x).square().mean(), batch

    return made


CASES: dict[str, tuple[Callable[[], tuple[Any, Loss, Any]], set[str]]] = {
    "words": (words, {"words.weight", "places.weight", "twice.weight", "head.weight"}),
    "long": (lambda: words(long=16), {"words.weight", "places.weight", "twice.weight", "head.weight"}),
    "tied": (lambda: words(tied=True), {"words.weight", "places.weight", "twice.weight"}),
    "layers": (lambda: perceptron(layers), {"a", "b"}),
    "also read elsewhere": (lambda: perceptron(lambda p, x: layers(p, x) + p["a"].sum()), {"a", "b"}),
    "products": (bare_products, {"c", "d"}),
    "transposed": (lambda: perceptron(matrices), {"a", "b"}),
    "leaves alone": (lambda: perceptron(lambda p, x: F.linear(x, F.linear(p["b"], p["a"].T))), {"a"}),
    "derivative": (lambda: perceptron(slope), set()),
    "padded": (leaves_read(padded, a=(7, WIDTH)), {"a"}),
    "trained bias of attention": (leaves_read(attend, False, b=(2, 4, 4)), set()),
    "trained bias of one head": (leaves_read(attend_once, False, b=(4, 4)), set()),
    "mask of bools": (leaves_read(masked, False, a=(3 * WIDTH, WIDTH), b=(WIDTH, WIDTH)), {"a", "b"}),
    "named": (leaves_read(lambda p, x: torch.mm(x[0], mat2=p["a"]), False, a=(WIDTH, 2)), set()),
    "one bias for all": (leaves_read(lambda p, x: F.linear(x[0], p["a"], p["b"]), False, a=(3, WIDTH), b=(1,)), set()),
    "no positions": (
        leaves_read(lambda p, x: torch.cat([F.linear(x[:, :0], p["a"]), x + p["b"]], 1), False, a=(6, 6), b=(6,)),
        {"a"},
    ),
    "recomputed": (lambda: perceptron(lambda p, x: fs.remat(layers)(p, x)), set()),
    "clipped weights": (lambda: perceptron(lambda p, x: layers(tree.map(lambda w: w.clamp(-1, 1), p), x)), set()),
}


def one_by_one(loss: Loss, params: Any, batch: Any) -> dict[str, Tensor]:
    """The gradients of samples by plain PyTorch, one after the other."""
    flat = {path: leaf.detach().requires_grad_() for path, leaf in tree.paths(params)}
    found = []
    for at in range(len(tree.leaves(batch)[0])):
        value = loss(tree.nest(flat), tree.map(lambda x, at=at: x[at : at + 1], batch))
        found.append(torch.autograd.grad(value, [*flat.values()], allow_unused=True, materialize_grads=True))
    return {path: torch.stack(rows) for path, rows in zip(flat, zip(*found, strict=True), strict=True)}


def off(got: Tensor, want: Tensor) -> bool:
    """Tell whether a result is wrong."""
    return not (got - want).abs().max() <= 1e-10 * (want.abs().max() + 1e-3)


def wrong(
    model: Any, loss: Loss, whole: Any, caught: set[str] | None = None, microbatches: Any = (None, 2)
) -> list[str]:
    """On a rank: the results that differ from those of plain PyTorch, and layers that were not caught."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))])
        every = getattr(model, "params", model)
        params = fs.shard(every, plan)
        # Ranks have unequal numbers of rows.
        batch = tree.map(lambda x: x.tensor_split(SPLITS[mesh.size])[mesh.rank], whole)
        want = one_by_one(loss, every, whole)
        norms = sum(g.reshape(len(g), -1).square().sum(1) for g in want.values()).sqrt()  # type: ignore[union-attr]
        mine = norms.tensor_split(SPLITS[mesh.size])[mesh.rank]
        limit = 0.7 * norms.median().item()
        samples = fs.func.per_sample_grad(loss, plan)
        rows = dict(tree.paths(samples(params, batch)))
        out = [path for path, g in want.items() if off(rows[path], g.tensor_split(SPLITS[mesh.size])[mesh.rank])]
        for microbatch in microbatches:
            clipped, seen = fs.func.clipped_grad(loss, plan, limit, microbatch=microbatch), set[str]()
            with patch.object(SampleTape, "norms", functools.partialmethod(noted, SampleTape.norms, seen)):
                total, found = clipped(params, batch)
            got = dict(tree.paths(fs.unshard(total, plan)))
            out += [f"norms {microbatch}"] * off(found, mine)
            factor = (limit / norms).clamp(max=1)
            out += [f"{path} {microbatch}" for path, g in want.items() if off(got[path], torch.tensordot(factor, g, 1))]
            out += [f"caught {seen}"] * (caught is not None and seen != caught)
            again = clipped(params, batch)
            out += ["another sum"] * any(
                map(torch.ne, map(torch.norm, tree.leaves(again[0])), map(torch.norm, tree.leaves(total)))
            )
        return out + [f"{tool}" for tool in (samples, clipped) if tool.record != tool.schedule.ops]


SPLITS: dict[int, list[int]] = {1: [], 2: [2], 4: [2, 3, 4]}


def noted(tape: SampleTape, norms: Any, seen: set[str], *args: Any) -> Tensor:
    """The norms of a tape, whose layers are written down."""
    for left in tape.calls.values():
        seen.update(path for path, parts in left.items() for part in parts if part.kind != "held")
    return norms(tape, *args)


def both(name: str) -> list[str]:
    """On a rank: what is wrong in a case."""
    made, caught = CASES[name]
    return wrong(*made(), caught)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_gradients_of_samples(name: str) -> None:
    assert not both(name)


def of_two() -> list[str]:
    """On a rank: the same, on more ranks."""
    return both("words") + both("layers")


def test_equal_on_two_ranks(pool: Any) -> None:
    assert not sum(pool(2).run(of_two), [])


class Largest(TorchDispatchMode):
    """The most elements of any result, and those of each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree.leaves(out):
            if isinstance(leaf, Tensor):
                self.most = max(self.most, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out


def test_no_gradient_of_a_sample_by_a_large_weight_is_made() -> None:
    wide, rows = 64, 24
    torch.manual_seed(0)
    model = fs.split(nn.Sequential(nn.Embedding(wide, wide), nn.LayerNorm(wide), nn.Linear(wide, wide), nn.Flatten()))
    plan = fs.make_plan(model, fs.make_mesh((1,), ("shard",)), [(r".*", fs.fsdp("shard"))])
    params, x = fs.shard(model.params, plan), torch.randint(wide, (rows, 3))

    def loss(p: Any, x: Tensor) -> Any:
        return model.apply(p, x).square().mean()

    most = []
    for call in (fs.func.clipped_grad(loss, plan, 1.0), fs.func.per_sample_grad(loss, plan)):
        with Largest() as largest:
            call(params, x)
        most.append(largest.most)
    whole = sum(leaf.numel() for _, leaf in tree.paths(model.params))
    assert most[0] <= whole + 64 and most[1] >= rows * wide * wide


def test_what_a_rank_lacks_is_told_before_anything_is_gathered() -> None:
    def on_rank() -> list[str]:
        model, loss, batch = perceptron(layers)
        said = []
        with fs.make_mesh((-1,), ("shard",)) as mesh:
            plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))])
            params = fs.shard(model, plan)
            for tool in (fs.func.clipped_grad(loss, plan, 1.0), fs.func.per_sample_grad(loss, plan)):
                for wrong in ({"a": 3}, params):
                    try:
                        tool(
                            wrong if mesh.rank else params,
                            batch if wrong != params or not mesh.rank else (batch, batch[:1]),
                        )
                    except fs.errors.ShardError as error:
                        said.append(f"{type(error).__name__}: {error}")
        return said

    first, second = fs.virtual_mesh((2,), ("any",)).run(on_rank)
    assert [text.split(":")[0] for text in second] == ["TreeError", "BatchError"] * 2
    assert [text.split(":")[0] for text in first] == ["PeerError"] * 4
