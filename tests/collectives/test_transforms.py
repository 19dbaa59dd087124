"""Every collective under every transform, on virtual meshes; integers in float64, so results are exact."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fshard as fs
from fshard import P
from fshard import collectives as c
from fshard.errors import AxisError, CollectiveError, CommError, TransformError
from tests.collectives.cases import Case, cases, cotangents, curved, pulled, values
from tests.shared.workers import Pools

WORLDS = (1, 2, 3, 4)
CASES = [(n, number) for n in WORLDS for number in range(len(cases(n)))]


def play(n: int, fn: Callable[[int], Any]) -> list[Any]:
    """Run on every rank of a mesh with one axis ``a`` in scope."""
    mesh = fs.virtual_mesh((n,), ("a",))

    def body() -> Any:
        with c.use_mesh(mesh):
            return fn(mesh.rank)

    return mesh.run(body)


def same(case: Case, got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got, want, rtol=1e-12, atol=1e-12) if case.name == "pmean" else torch.equal(got, want)


@pytest.mark.long
@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))])
def test_every_transform_of_every_collective(n: int) -> None:
    """One run, in which every rank checks each case under each nesting."""
    plans = []
    for number, case in enumerate(cases(n)):
        xs, ds = values(case, n, number), values(case, n, number + 50)
        batch = [torch.stack(pair) for pair in zip(xs, ds, strict=True)]
        gs = [torch.stack(pair) for pair in zip(cotangents(case, xs, 1), cotangents(case, xs, 2), strict=True)]
        pulls = [pulled(case, xs, [g[i] for g in gs]) for i in (0, 1)]
        plans.append((case, xs, ds, batch, gs, pulls, curved(case, xs, ds)))

    def check(rank: int) -> list[str]:
        out = []
        for case, xs, ds, batch, gs, pulls, (first, second) in plans:
            results = _nestings(case, xs[rank], ds[rank], batch[rank], gs[rank])
            plain = torch.stack([case.plain(xs)[rank], case.plain(ds)[rank]])
            back = torch.stack([pulls[0][rank], pulls[1][rank]])
            want = {"vmap": plain, "pullback": back, "first": first[rank], "second": second[rank]}
            for name, (kind, got) in results.items():
                if not same(case, got, want[kind]):
                    out.append(f"{case} under {name}")
        return out

    assert play(n, check) == [[]] * n


def _nestings(case: Case, x: Tensor, d: Tensor, batch: Tensor, gs: Tensor) -> dict[str, tuple[str, Tensor]]:
    """Nested transforms of a call: what each must equal, and what it gave."""
    func = torch.func

    def call(x: Tensor) -> Tensor:
        return case.call(x, axis="a")

    def cubes(x: Tensor) -> Tensor:
        return call(x).pow(3).sum()

    def pull(x: Tensor, g: Tensor) -> Tensor:
        return func.vjp(call, x)[1](g)[0]

    last = batch.movedim(0, -1)
    leaf = x.clone().requires_grad_()
    (once,) = torch.autograd.grad(cubes(leaf), leaf, create_graph=True)
    (twice,) = torch.autograd.grad((once * d).sum(), leaf)
    return {
        "vmap": ("vmap", func.vmap(call)(batch)),
        "vmap over the last dim": ("vmap", func.vmap(call, in_dims=-1)(last)),
        "vmap into the last dim": ("vmap", func.vmap(call, out_dims=-1)(batch).movedim(-1, 0)),
        "vmap in vmap": ("vmap", func.vmap(func.vmap(call))(batch[None])[0]),
        "vmap of jvp": ("vmap", func.vmap(lambda t: func.jvp(call, (x,), (t,))[1])(batch)),
        "jvp of vmap": ("vmap", func.jvp(func.vmap(call), (torch.zeros_like(batch),), (batch,))[1]),
        "vmap of vjp": ("pullback", func.vmap(pull, in_dims=(None, 0))(x, gs)),
        "vjp of vmap": ("pullback", func.vjp(func.vmap(call), batch)[1](gs)[0]),
        "grad": ("first", func.grad(cubes)(x)),
        "vmap of grad": ("first", func.vmap(func.grad(cubes))(torch.stack([d, x]))[1]),
        "jvp of grad": ("second", func.jvp(func.grad(cubes), (x,), (d,))[1]),
        "grad of grad": ("second", func.grad(lambda x: (func.grad(cubes)(x) * d).sum())(x)),
        "grad of jvp": ("second", func.grad(lambda x: func.jvp(cubes, (x,), (d,))[1])(x)),
        "vmap of jvp of grad": ("second", func.vmap(lambda t: func.jvp(func.grad(cubes), (x,), (t,))[1])(d[None])[0]),
        "backward": ("first", once.detach()),
        "double backward": ("second", twice),
    }


KINDS = ["psum", "pvary", "all_gather", "psum_scatter", "all_to_all", "ppermute", "assemble", "cut"]


@st.composite
def linear_maps(draw: Any) -> tuple[Any, ...]:
    """A mesh, axes of it, a collective with arguments, and a shape that it takes."""
    sizes, names, axes = draw(
        st.sampled_from(
            [
                ((1,), ("a",), "a"),
                ((3,), ("a",), "a"),
                ((4,), ("a",), ("a",)),
                ((2, 2), ("a", "b"), "b"),
                ((2, 2), ("a", "b"), ("b", "a")),
                ((3, 2), ("a", "b"), "a"),
                ((2, 1, 2), ("a", "b", "c"), ("c", "b", "a")),
            ]
        )
    )
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    n = fs.abstract_mesh(sizes, names).axis_size(axes if isinstance(axes, tuple) else (axes,))
    dims = st.integers(-len(shape), len(shape) - 1)
    kind = draw(
        st.sampled_from(["psum", "pvary", "all_gather", "psum_scatter", "all_to_all", "ppermute", "assemble", "cut"])
    )
    dim, other, tiled = draw(dims), draw(dims), draw(st.booleans())
    if kind in ("psum", "pvary"):
        return sizes, names, axes, lambda x, **k: getattr(c, kind)(x, **k), shape, "VI" if kind == "psum" else "IV"
    if kind == "ppermute":
        ends = draw(st.integers(0, n)), draw(st.permutations(range(n))), draw(st.permutations(range(n)))
        perm = list(zip(ends[1][: ends[0]], ends[2], strict=False))
        return sizes, names, axes, lambda x, **k: c.ppermute(x, perm=perm, **k), shape, "VV"
    if kind in ("cut", "assemble"):
        entries: list[Any] = [None] * len(shape)
        entries[dim] = axes
        shape[dim] *= n if kind == "cut" else 1
        spec = P(*entries)
        types = "IV" if kind == "cut" else "VI"
        return sizes, names, axes, lambda x, axis, **k: getattr(c, kind)(x, spec, **k), shape, types
    if kind == "all_gather":
        to = draw(st.sampled_from(["varying", "invariant"]))
        call = lambda x, **k: c.all_gather(x, dim=dim, tiled=tiled, to=to, **k)  # noqa: E731
        return sizes, names, axes, call, shape, "VI" if to == "invariant" else "VV"
    shape[dim] = shape[dim] * n if tiled else n
    if kind == "psum_scatter":
        return sizes, names, axes, lambda x, **k: c.psum_scatter(x, dim=dim, tiled=tiled, **k), shape, "VV"
    return (
        sizes,
        names,
        axes,
        lambda x, **k: c.all_to_all(x, split_dim=dim, concat_dim=other, tiled=tiled, **k),
        shape,
        "VV",
    )


@pytest.mark.long
@given(linear_maps(), st.integers(0, 99), st.sampled_from([torch.float64, torch.complex128]))
def test_the_adjoint_identity_is_exact(drawn: tuple[Any, ...], seed: int, dtype: torch.dtype) -> None:
    sizes, names, axis, call, shape, types = drawn
    mesh = fs.virtual_mesh(sizes, names)
    axes = axis if isinstance(axis, tuple) else (axis,)

    def draw(rank: int, shape: Any, kind: str, salt: int) -> Tensor:
        group = min(mesh.ranks(axes, rank)) if kind == "I" else rank
        generator = torch.Generator().manual_seed(1000 * seed + 10 * group + salt)
        return torch.randint(-9, 10, (2, *shape), generator=generator).double()

    def number(shape: Any, kind: str, salt: int) -> Tensor:
        parts = draw(mesh.rank, shape, kind, salt)
        return torch.complex(*parts) if dtype.is_complex else parts[0]

    def body() -> tuple[float, float]:
        dx = number(shape, types[0], 1)
        y, back = torch.func.vjp(lambda x: call(x, axis=axis, mesh=mesh), number(shape, types[0], 2))
        g = number(y.shape, types[1], 3)
        right = call(dx, axis=axis, mesh=mesh)
        first = mesh.index(axes) == 0  # an invariant value counts once for each group of ranks
        left_counts, right_counts = types[0] == "V" or first, types[1] == "V" or first
        return left_counts * _inner(back(g)[0], dx), right_counts * _inner(g, right)

    left, right = map(sum, zip(*mesh.run(body), strict=True))
    assert left == right


def _inner(a: Tensor, b: Tensor) -> float:
    return float((a.conj() * b).real.sum())


def largest(x: Tensor) -> Tensor:
    return c.pmax(x, "a")


REFUSED = {
    "unknown axis": ("axis 'b' is not in the mesh: give one of 'a'", AxisError, lambda x: c.psum(x, "b")),
    "a dim of vmap": (
        r"axis=0 is not the name .* torch\.vmap",
        AxisError,
        lambda x: torch.vmap(lambda v: c.psum(v, 0))(x),
    ),
    "a vmap axis too": ("axis 'batch' is not in the mesh", AxisError, lambda x: c.psum(x, ("a", "batch"))),
    "an axis twice": ("none twice", AxisError, lambda x: c.psum(x, ("a", "a"))),
    "no axis": ("at least one", AxisError, lambda x: c.psum(x, ())),
    "bools": ("psum of bools", CollectiveError, lambda x: c.psum(x > 1, "a")),
    "bools scattered": ("psum_scatter of bools", CollectiveError, lambda x: c.psum_scatter(x > 1, "a", tiled=True)),
    "a mean of integers": ("pmean of a tensor of torch.int64", CollectiveError, lambda x: c.pmean(x.long(), "a")),
    "a largest complex": ("complex numbers", CollectiveError, lambda x: c.pmax(x + 1j, "a")),
    "no tensor": ("takes tensors and numbers, not str", CollectiveError, lambda x: c.psum("x", "a")),
    "numbers": ("all_gather takes tensors, not float", CollectiveError, lambda x: c.all_gather(1.0, "a")),
    "no such dim": (r"dim=3 of .* shape \[3, 2\]", CollectiveError, lambda x: c.all_gather(x, "a", dim=3)),
    "a scalar's dim": ("which has 0 dims", CollectiveError, lambda x: c.all_gather(x[0, 0], "a", tiled=True)),
    "a size not divided": ("pad it to 4", CollectiveError, lambda x: c.psum_scatter(x, "a", tiled=True)),
    "a size that is not the axis": ("use tiled=True", CollectiveError, lambda x: c.psum_scatter(x, "a")),
    "an exchange not divided": ("does not divide", CollectiveError, lambda x: c.all_to_all(x, "a", 0, 1, tiled=True)),
    "a source twice": ("source 0 occurs 2 times", CollectiveError, lambda x: c.ppermute(x, "a", [(0, 1), (0, 0)])),
    "a target twice": ("target 1 occurs 2 times", CollectiveError, lambda x: c.ppermute(x, "a", [(0, 1), (1, 1)])),
    "no such rank": (r"target 2 is not in 0\.\.1", CollectiveError, lambda x: c.ppermute(x, "a", [(0, 2)])),
    "another type": ("neither 'varying' nor", CollectiveError, lambda x: c.all_gather(x, "a", to="reduced")),
    "pmax, grad": ("pmax has no derivative", TransformError, torch.func.grad(lambda x: c.pmax(x, "a").sum())),
    "pmax, jvp": ("pmax has no derivative", TransformError, lambda x: torch.func.jvp(largest, (x,), (x,))),
    "make_fx": ("cannot be traced", TransformError, lambda x: make_fx(largest)(x)),
    "jit": ("cannot be traced", TransformError, lambda x: torch.jit.trace(lambda x: c.psum(x, "a"), (x,))),
    "a start under a transform": (
        "outside of the transform",
        TransformError,
        torch.func.grad(lambda x: c.done(c.psum_start(x, "a")).sum()),
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit")  # a DeprecationWarning up to PyTorch 2.14, a FutureWarning since
@pytest.mark.parametrize("what", REFUSED)
def test_refused_on_every_rank(what: str) -> None:
    match, error, call = REFUSED[what]

    def run(rank: int) -> None:
        with pytest.raises(error, match=match):
            call(torch.arange(6.0).view(3, 2))

    play(2, run)


def test_without_a_mesh_in_scope() -> None:
    for call in (lambda: c.psum(1, "a"), lambda: c.axis_index("a"), lambda: c.cut(torch.ones(2), P("a"))):
        with pytest.raises(AxisError, match=r"no mesh is in scope.*use_mesh\(mesh\)"):
            call()


def test_scopes_nest_and_end() -> None:
    outer, inner = fs.virtual_mesh((2,), ("a",)), fs.virtual_mesh((1,), ("i",))
    with c.use_mesh(outer):
        with c.use_mesh(inner):
            assert c.axis_size("i") == 1
            with pytest.raises(AxisError):
                c.axis_size("a")
        assert c.axis_size("a") == 2
    with pytest.raises(AxisError, match="no mesh"):
        c.axis_size("a")


@pytest.mark.parametrize("n", [1, 2])
def test_linearize_is_refused(n: int) -> None:
    """On one rank by us; where ranks are played PyTorch itself refuses a second forward level."""
    if n == 1:
        mesh = fs.make_mesh((1,), ("a",))
        with pytest.raises(TransformError, match="use torch.func.jvp or vjp instead"):
            torch.func.linearize(lambda x: c.psum(x * x, "a", mesh=mesh), torch.ones(2))
        return

    def run(rank: int) -> None:
        with pytest.raises((TransformError, RuntimeError)):
            torch.func.linearize(lambda x: c.psum(x * x, "a"), torch.ones(2))

    play(n, run)


def test_dtypes_that_are_moved_and_added() -> None:
    def run(rank: int) -> None:
        for dtype in (torch.int8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.complex64):
            x = torch.tensor([1, 2, 3]).to(dtype) * (rank + 1)
            total = c.psum(x, "a")
            assert total.dtype == dtype and total.tolist() == [6, 12, 18]
            assert c.psum_scatter(x, "a").item() == 6 * (rank + 1)
        assert c.all_gather(torch.tensor([True, rank == 1]), "a").tolist() == [[True, i == 1] for i in range(3)]
        assert c.psum(torch.zeros(0, 3), "a").shape == (0, 3)
        assert c.pmax(torch.tensor([1.0, torch.nan if rank == 1 else 2.0]), "a").isnan().tolist() == [False, True]
        conj = torch.tensor([1 + 2j]).conj()
        assert c.all_gather(conj, "a", tiled=True).tolist() == [1 - 2j] * 3

    play(3, run)


def test_trees_and_numbers() -> None:
    def run(rank: int) -> None:
        got = c.psum({"x": torch.ones(2) * rank, "n": 2, "deep": [1.5]}, "a")
        assert got["x"].tolist() == [3.0, 3.0] and got["n"] == 6 and got["deep"] == [4.5]
        assert c.pmean(4, "a") == 4.0 and c.pmax(7, "a") == 7

    play(3, run)


def test_a_started_collective() -> None:
    def run(rank: int) -> None:
        x = (torch.arange(6.0) + rank).requires_grad_()
        flying = c.all_gather_start(x, "a")
        other = c.ppermute_start(x, "a", [(0, 1), (1, 0)])
        y = c.done(flying) * torch.arange(12.0)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.equal(grad, (torch.arange(12.0) * 2)[6 * rank : 6 * rank + 6])
        assert torch.equal(c.done(other), torch.arange(6.0) + 1 - rank)
        assert torch.equal(c.done(c.psum_start(x, "a")), 2 * torch.arange(6.0) + 1)
        assert c.done(c.psum_scatter_start(x, "a")).shape == (3,)
        assert c.done(c.all_to_all_start(x.view(2, 3), "a", 0, 1)).shape == (1, 6)
        with pytest.raises(CollectiveError, match="taken before"):
            c.done(flying)
        base = torch.ones(4)
        written = c.psum_start(base, "a")
        base += 1
        with pytest.raises(CollectiveError, match="written to"):
            c.done(written)

    play(2, run)


def test_ranks_with_other_shapes_are_named() -> None:
    with pytest.raises(CommError, match="rank 1 calls all-gather of 12 uint8 on collectives"):
        play(2, lambda rank: c.psum(torch.ones(2 + rank), "a"))


def compiled_on_a_rank(backend: str) -> list[bool]:
    """On a rank: whether compiled code, its gradient, and a compiled gradient are those of eager code.

    Dynamo may give up on a transform whose function breaks the graph, with an error of its own; a wrong number it must
    not give.
    """
    with fs.make_mesh((-1,), ("a",)) as mesh, c.use_mesh(mesh):

        def f(x: Tensor) -> Tensor:
            y = c.psum(x.sin() * 2, "a") + c.axis_index("a")
            z = c.all_gather(c.pvary(y, "a") * x, "a").cos()
            return (c.done(c.ppermute_start(z, "a", [(0, 1)])) * x * c.axis_size("a")).sum() + z.sum()

        x = torch.linspace(0, 1, 6) + mesh.rank
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.compile(f, backend=backend)(leaf).backward()
        f(other).backward()

        def g(x: Tensor) -> Tensor:
            return c.psum(x.sin(), "a").cos().sum()

        pairs = [
            (torch.compile(f, backend=backend)(x), f(x)),
            (leaf.grad, other.grad),
        ]
        with contextlib.suppress(torch._dynamo.exc.TorchDynamoException, AssertionError):
            pairs.append((torch.compile(torch.func.grad(g), backend=backend)(x), torch.func.grad(g)(x)))
        return [torch.allclose(got, want) for got, want in pairs]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))]
)
def test_compiled_code_breaks_its_graph_and_stays_right(pool: Pools, backend: str) -> None:
    assert pool(2).run(compiled_on_a_rank, backend, timeout=120.0) in ([[True] * 3] * 2, [[True] * 2] * 2)
