"""``fs.shard_map`` against its plain reference, on the virtual mesh and on real ranks."""

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fshard as fs
from fshard import P
from fshard import collectives as c
from fshard.collectives.specs import slice_of
from fshard.errors import AxisError, CollectiveError, ReplicationError, TransformError, TreeError
from tests.played.mapped import STEPS, on_rank, program_of, reference
from tests.shared.workers import Pools

SIDE = 12
MESHES = {
    ((1,), ("a",)): [("a",)],
    ((2,), ("a",)): [("a",)],
    ((3,), ("a",)): [("a",)],
    ((4,), ("a",)): [("a",)],
    ((2, 2), ("a", "b")): [("a",), ("b",), ("a", "b"), ("b", "a")],
    ((3, 2), ("a", "b")): [("a",), ("b",), ("b", "a")],
}
Global = Callable[..., tuple[Tensor, Tensor]]


@st.composite
def settings_of(draw: Any) -> tuple[Any, Any, list[tuple[str, tuple[str, ...]]], int]:
    """A mesh, the specs of a matrix and of a weight, and the steps of a program."""
    mesh = draw(st.sampled_from(sorted(MESHES)))
    spec = draw(st.sampled_from([P(), P("a"), P(None, "a")] if len(mesh[0]) == 1 else SPECS))
    weight = draw(st.sampled_from([P(), P("a")]))
    steps = draw(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(MESHES[mesh])), min_size=1, max_size=4))
    return mesh, (spec, weight), steps, draw(st.integers(0, 1000))


SPECS = [P(), P("a"), P("b"), P(("b", "a")), P("a", "b"), P(("a", "b")), P(None, "b")]


def numbers(seed: int) -> tuple[Tensor, ...]:
    """A matrix, a weight that every mesh divides, and tangents of both."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(SIDE, SIDE, generator=draw, dtype=torch.float64) / 2 for _ in range(4))


def derivatives(f: Global, x: Tensor, w: Tensor, dx: Tensor, dw: Tensor) -> dict[str, Any]:
    """What transforms give of a function of a matrix and a weight that returns a matrix and a loss."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        out, loss = f(x, w)
        return loss.sin() + out.sin().sum()

    def grads(x: Tensor, w: Tensor) -> Any:
        return torch.func.grad(loss, (0, 1))(x, w)

    both = torch.func.jvp(grads, (x, w), (dx, dw))[1]
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    twice = torch.autograd.grad(sum((g * d).sum() for g, d in zip(first, (dx, dw), strict=True)), leaves)
    reverse_forward = torch.func.grad(lambda x: torch.func.jvp(lambda w: loss(x, w), (w,), (dw,))[1])(x)
    return {
        "value": f(x, w),
        "grad": grads(x, w),
        "jvp": torch.func.jvp(f, (x, w), (dx, dw))[1],
        "forward over reverse": both,
        "double backward": twice,
        "reverse over forward": reverse_forward,
        "vmap": torch.vmap(f, in_dims=(1, None))(torch.stack([x, dx], 1), w),
        "vmap of grad": torch.vmap(grads, in_dims=(None, 0))(x, torch.stack([w, dw])),
    }


def differences(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """The transforms whose results are further apart than 1e-9, relative to the largest element."""
    out = []
    for what, plain in want.items():
        for number, (mine, right) in enumerate(zip(got[what], plain, strict=True) if plain is not None else ()):
            if not torch.allclose(mine, right, rtol=1e-9, atol=1e-9 * float(right.abs().max() + 1e-30)):
                out.append(f"{what}[{number}]: {(mine - right).abs().max()}")
    return out


@pytest.mark.long
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(settings_of())
def test_generated_programs_equal_the_reference(case: Any) -> None:
    (sizes, names), (spec, weight), steps, seed = case
    mesh, program = fs.virtual_mesh(sizes, names), program_of(steps, names)
    outs = (P(names), P())
    mapped = fs.shard_map(on_rank(program), mesh, (spec, weight), outs)
    plain = reference(program, mesh, (spec, weight), outs)
    xs = numbers(seed)
    want = derivatives(plain, *xs)
    assume(not differences(derivatives(plain, *[x * (1 + 2**-50) for x in xs]), want))  # else nothing is so exact there
    assert not differences(derivatives(mapped, *xs), want)


def programs(names: tuple[str, ...], count: int) -> list[Any]:
    """Some settings for real ranks, the same on all of them."""
    draw = random.Random(3)
    weights = [P(), P("a")]
    steps = [(step, axes) for step in STEPS for axes in (("a",), names)]
    specs = [P(), P("a"), P(None, "a"), P(names)]
    return [((draw.choice(specs), draw.choice(weights)), draw.sample(steps, 4), seed) for seed in range(count)]


def on_slices(sizes: tuple[int, ...], names: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    """On a rank: what transforms give of the local form, on this rank's slices."""
    out = []
    with fs.make_mesh(sizes, names) as mesh:
        for (spec, weight), steps, seed in programs(names, count):
            mapped = fs.shard_map(on_rank(program_of(steps, names)), mesh, (spec, weight), (P(names), P()), slices=True)
            x, w, dx, dw = numbers(seed)
            slices = [slice_of(t, s, mesh, mesh.rank) for t, s in ((x, spec), (w, weight), (dx, spec), (dw, weight))]
            out.append(derivatives(mapped, *(part.contiguous() for part in slices)))
    return out


def sliced(name: str, plain: Any, specs: tuple[P, P], names: tuple[str, ...], mesh: fs.Mesh, rank: int) -> Any:
    """A rank's slices of what a transform gives of the global form."""
    results = (P(names), P()) if name in ("value", "jvp", "vmap") else specs
    if name == "reverse over forward":
        return slice_of(plain, specs[0], mesh, rank)
    if name.startswith("vmap"):
        results = tuple(P(None, *spec.dims) for spec in results)  # type: ignore[assignment]
    return tuple(slice_of(x, spec, mesh, rank) for x, spec in zip(plain, results, strict=True))


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (4, (2, 2)),
        *(pytest.param(world, (world,), marks=pytest.mark.slow) for world in (1, 2, 3, 4)),
    ],
)
def test_real_ranks_hold_the_slices_of_the_reference(pool: Pools, world: int, sizes: tuple[int, ...]) -> None:
    names, count = ("a", "b")[: len(sizes)], 2
    real = pool(world).run(on_slices, sizes, names, count)
    played = fs.virtual_mesh((world,), ("any",)).run(on_slices, sizes, names, count)
    mesh = fs.abstract_mesh(sizes, names)
    for number, (specs, steps, seed) in enumerate(programs(names, count)):
        plain = reference(program_of(steps, names), mesh, specs, (P(names), P()))
        want = derivatives(plain, *numbers(seed))
        for rank in range(world):
            mine = {name: sliced(name, value, specs, names, mesh, rank) for name, value in want.items()}
            assert not differences(real[rank][number], mine), (specs, steps)
            for name, value in played[rank][number].items():
                assert all(map(torch.equal, value, real[rank][number][name])), (name, specs, steps)


FOUR = fs.virtual_mesh((4,), ("a",))
EIGHT = torch.arange(8.0)


def test_trees_of_arguments_and_results() -> None:
    def f(tree: dict[str, Any], scale: float, none: None) -> dict[str, Any]:
        return {"x": tree["x"] * scale, "deep": [c.psum(tree["x"].sum(), "a"), tree["n"]], "none": none}

    specs = {"x": P("a"), "deep": P(), "none": P()}
    out = fs.shard_map(f, FOUR, (P(), P(), P()), {**specs, "x": P()})({"x": EIGHT, "n": 3}, 2.0, None)
    assert torch.equal(out["x"], 2 * EIGHT) and out["deep"] == [torch.tensor(112.0), 3] and out["none"] is None
    out = fs.shard_map(f, FOUR, ({"x": P("a"), "n": P()}, P(), P()), specs)({"x": EIGHT, "n": 3}, 2.0, None)
    assert torch.equal(out["x"], 2 * EIGHT) and out["deep"] == [torch.tensor(28.0), 3]


def test_random_numbers_are_drawn_again_in_derivatives() -> None:
    def f(x: Tensor) -> Tensor:
        return c.psum((x * torch.rand(2) * (1 + c.axis_index("a"))).sum(), "a")

    mapped = fs.shard_map(f, FOUR, P("a"), P())
    torch.manual_seed(1)
    grad = torch.func.grad(mapped)(EIGHT)
    torch.manual_seed(1)
    draw = torch.rand(2)
    assert torch.equal(grad, torch.cat([draw * (1 + rank) for rank in range(4)]))
    first, second = mapped(EIGHT), mapped(EIGHT)
    assert first != second


def test_a_derivative_inside_is_that_of_the_sum_of_all_ranks() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: c.psum(x.square().sum(), "a"))(x)

    assert torch.equal(fs.shard_map(f, FOUR, P("a"), P("a"))(EIGHT), 4 * 2 * EIGHT)


def test_integers_and_unused_arguments() -> None:
    mapped = fs.shard_map(lambda x, i, w: (x[i], i + 1), FOUR, (P("a"), P("a"), P()), (P("a"), P("a")))
    index = torch.tensor([1, 0] * 4)
    x = EIGHT.clone().requires_grad_()
    w = torch.ones(3, requires_grad=True)
    y, more = mapped(x, index, w)
    assert more.tolist() == (index + 1).tolist() and not more.requires_grad
    gx, gw = torch.autograd.grad((y * EIGHT).sum(), (x, w))
    assert gx.tolist() == [1, 0, 3, 2, 5, 4, 7, 6] and gw.tolist() == [0, 0, 0]


def test_cut_and_assemble_are_inverse() -> None:
    mesh = fs.virtual_mesh((2, 2), ("a", "b"))
    x = torch.arange(32.0).view(4, 8)

    def body() -> bool:
        with c.use_mesh(mesh):
            for spec in (P("a", "b"), P(("b", "a")), P(None, ("a", "b")), P(), P(None, "a")):
                assert torch.equal(c.assemble(c.cut(x, spec), spec), x)
                assert torch.equal(c.cut(x, spec), slice_of(x, spec, mesh, mesh.rank))
        return True

    assert mesh.run(body) == [True] * 4
    within = fs.shard_map(lambda x: c.assemble(c.cut(x * 2, P("a", "b")), P("a", "b")), mesh, P(), P())
    assert torch.equal(torch.func.grad(lambda x: within(x).square().sum())(x), 8 * x)


def test_results_that_differ_are_found() -> None:
    def f(x: Tensor) -> dict[str, Tensor]:
        y = torch.ones(2, 3)
        y[1, 2] += c.axis_index("a") // 2
        return {"y": y, "x": x}

    match = (
        r"(?s)result\['y'\] with P\(\) must be the same along 'a'.*"
        r"rank 2: 1 of 6 differ; first at \[1, 2\]: 2.0, not 1.0\n  rank 3: 1 of 6 differ.*Name the axis in its spec"
    )
    with pytest.raises(ReplicationError, match=match):
        fs.shard_map(f, FOUR, P("a"), {"y": P(), "x": P("a")})(EIGHT)
    mapped = fs.shard_map(f, FOUR, P("a"), {"y": P(), "x": P("a")}, check=False)
    assert torch.equal(mapped(EIGHT)["y"], torch.ones(2, 3))
    nans = fs.shard_map(lambda x: x * torch.nan, FOUR, P(), P())
    assert nans(EIGHT).isnan().all()


def checked_on_a_rank() -> list[str]:
    """On a rank: when results are compared, with each value of ``check``."""
    out = []
    with fs.make_mesh((-1,), ("a",)) as mesh:
        for check in (None, True, False):
            bad = [False]
            mapped = fs.shard_map(lambda x: x + bad[0] * c.axis_index("a"), mesh, P(), P(), check=check)  # noqa: B023
            seen = ""
            for differ, x in ((False, torch.ones(2)), (True, torch.ones(2)), (True, torch.ones(3))):
                bad[0] = differ
                try:
                    mapped(x)
                    seen += "-"
                except ReplicationError:
                    seen += "x"
            out.append(seen)
    return out


def test_when_results_are_compared(pool: Pools) -> None:
    assert pool(2).run(checked_on_a_rank) == [["--x", "-xx", "---"]] * 2


W = torch.ones(2, requires_grad=True)


def _captures() -> dict[str, tuple[Callable[..., Any], str]]:
    w, module = torch.ones(2, requires_grad=True), torch.nn.Linear(2, 2)

    def default(x: Tensor, w: Tensor = w) -> Tensor:
        return x * w

    def inner(x: Tensor) -> Tensor:
        return x * w

    return {
        "closure": (lambda x: x * w, "w"),
        "global": (lambda x: x * W, "W"),
        "module": (module, "Linear"),
        "closure over a module": (lambda x: module(x), "module"),
        "method": (module.forward, "self"),
        "default": (default, "default argument"),
        "partial": (functools.partial(torch.mul, w), "partial argument"),
        "function in a closure": (lambda x: inner(x), "inner: w"),
    }


@pytest.mark.parametrize("what", _captures())
def test_tensors_that_need_gradients_must_be_arguments(what: str) -> None:
    f, name = _captures()[what]
    mapped = fs.shard_map(f, FOUR, P("a"), P("a"))
    with pytest.raises(CollectiveError, match=f"(?s)need a gradient:\n  {name}.*pass them as arguments"):
        mapped(EIGHT)
    with torch.no_grad():
        assert mapped(EIGHT).shape == (8,)


def test_a_captured_tensor_of_a_transform() -> None:
    def loss(w: Tensor) -> Tensor:
        return fs.shard_map(lambda x: c.psum((x * w).sum(), "a"), FOUR, P("a"), P())(EIGHT)

    with pytest.raises(CollectiveError, match="pass them as arguments"):
        torch.func.grad(loss)(torch.ones(2))


def refuse(f: Any, in_specs: Any, out_specs: Any, *args: Any) -> Callable[[], Any]:
    """A call on four ranks."""
    return lambda: fs.shard_map(f, FOUR, in_specs, out_specs)(*args)


REFUSED = {
    "an unknown axis": (AxisError, "axis 'b' is not in the mesh", refuse(torch.sin, P("b"), P(), EIGHT)),
    "an unknown axis of a result": (AxisError, "axis 'b' is not", refuse(torch.sin, P("a"), P("b"), EIGHT)),
    "an axis outside": (AxisError, "no mesh is in scope", lambda: c.psum(EIGHT, "a")),
    "a size": (CollectiveError, r"args\[0\] has shape \[7\]: dim 0 .* of 4", refuse(torch.sin, P("a"), P(), EIGHT[1:])),
    "dims": (CollectiveError, r"args\[0\] .* names 2 dims", refuse(torch.sin, P(None, "a"), P(), EIGHT)),
    "dims of a result": (CollectiveError, r"result .* names 1 dims", refuse(torch.sum, P("a"), P("a"), EIGHT)),
    "flat": (CollectiveError, "flat-shards", refuse(torch.sin, P(flat="a"), P(), EIGHT)),
    "an axis twice": (CollectiveError, "names an axis twice", refuse(torch.sin, P("a", "a"), P(), EIGHT.view(2, 4))),
    "no spec": (CollectiveError, "in_specs holds 'a'", refuse(torch.sin, "a", P(), EIGHT)),
    "a number": (CollectiveError, r"args\[0\] is a float", refuse(lambda x: x, P("a"), P(), 1.0)),
    "no prefix": (TreeError, "2 entries, and there are 1 args", refuse(torch.sin, (P(), P()), P(), EIGHT)),
    "shapes": (
        CollectiveError,
        "different shapes",
        refuse(lambda x: x[: c.axis_index("a")], P("a"), P("a"), EIGHT),
    ),
    "nesting": (
        AxisError,
        "inside of a function over",
        refuse(lambda x: fs.shard_map(torch.sin, FOUR, P(), P())(x), P("a"), P("a"), EIGHT),
    ),
    "another mesh": (
        AxisError,
        "collectives there use its axes",
        refuse(lambda x: c.psum(x, "b", mesh=fs.abstract_mesh((4,), ("b",))), P("a"), P(), EIGHT),
    ),
    "linearize": (
        TransformError,
        "cannot be traced",
        lambda: torch.func.linearize(fs.shard_map(torch.sin, FOUR, P("a"), P("a")), EIGHT),
    ),
    "pmax": (
        TransformError,
        "pmax has no derivative",
        lambda: torch.func.grad(fs.shard_map(lambda x: c.pmax(x.sum(), "a"), FOUR, P("a"), P()))(EIGHT),
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    error, match, call = REFUSED[what]
    with pytest.raises(error, match=match):
        call()


def on_whole(sizes: tuple[int, ...], names: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    """On a rank: what transforms give of the global form."""
    mesh, out = fs.make_mesh(sizes, names), []
    for (spec, weight), steps, seed in programs(names, count):
        mapped = fs.shard_map(on_rank(program_of(steps, names)), mesh, (spec, weight), (P(names), P()))
        out.append(derivatives(mapped, *numbers(seed)))
    return out


def on_whole_alone(sizes: tuple[int, ...], names: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    """The same, on a mesh of real ranks that is closed at the end."""
    with fs.make_mesh(sizes, names):
        return on_whole(sizes, names, count)


@pytest.mark.parametrize(
    ("real", "sizes", "names"), [(False, (2, 2), ("a", "b")), (True, (2,), ("a",))], ids=["played", "real"]
)
def test_ranks_take_global_tensors_and_give_them(pool: Pools, real: bool, sizes: Any, names: Any) -> None:
    count = 2
    if real:
        ranks = pool(math.prod(sizes)).run(on_whole_alone, sizes, names, count)
    else:
        ranks = fs.virtual_mesh(sizes, names).run(lambda: on_whole(sizes, names, count))
    mesh = fs.abstract_mesh(sizes, names)
    for number, ((spec, weight), steps, seed) in enumerate(programs(names, count)):
        plain = reference(program_of(steps, names), mesh, (spec, weight), (P(names), P()))
        want = derivatives(plain, *numbers(seed))
        assert not [problem for rank in ranks for problem in differences(rank[number], want)], number


def test_slices_in_the_place_of_global_tensors_are_told() -> None:
    mesh = fs.virtual_mesh((2,), ("a",))
    mapped = fs.shard_map(lambda x: 2 * x, mesh, P("a"), P("a"))
    with pytest.raises(
        ReplicationError, match=r"args\[0\], a global tensor \(slices need slices=True\), must be the same"
    ):
        mesh.run(lambda: mapped(torch.full((2,), float(mesh.rank))))
    sliced = fs.shard_map(lambda x: 2 * x, mesh, P("a"), P("a"), slices=True)
    assert [x.tolist() for x in mesh.run(lambda: sliced(torch.full((1,), float(mesh.rank))))] == [[0.0], [2.0]]
    with pytest.raises(CollectiveError, match="no rank that has slices"):
        sliced(torch.ones(2))
