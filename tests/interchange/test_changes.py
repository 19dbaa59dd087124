"""Exports by difference: a receiver that applies the changes has the bits of a whole export, and few bytes travel."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fshard as fs
from fshard import P, tree
from fshard.errors import DonatedError, PeerError, PlanError, TreeError

pytestmark = pytest.mark.long

OPT = fs.optim.adamw(1e-2)
WHOLE = {"a": torch.randn(13, 8), "b": {"w": torch.randn(8, 12), "s": torch.randn(6)}, "e": torch.randn(0, 2)}
RULES: dict[str, list[Any]] = {
    "flat": [(".*", fs.fsdp("x"))],
    "rows": [(r"b\.w", P("x")), (".*", fs.fsdp("x"))],
    "columns": [(r"b\.w", P(None, "x")), (".*", P())],
    "both": [(r"b\.w", P("y", None, flat="x")), ("a", P(None, "y", flat="x")), (".*", fs.fsdp("x"))],
}
TURNED = (fs.io.Rename(r"b\.(w)", r"engine.\1", transpose=True),)


class Engine:
    """A receiver, which has an eye on what it might have missed."""

    def __init__(self) -> None:
        self.leaves: dict[str, Tensor] = {}
        self.numbers: dict[str, int] = {}
        self.last: list[fs.io.Change] = []

    def take(self, stream: Any) -> None:
        self.last = list(stream)
        for change in self.last:
            assert change.base is None or change.base == self.numbers[change.name]
            self.leaves[change.name] = change.apply(self.leaves.get(change.name))
            self.numbers[change.name] = change.number


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal names, shapes, dtypes and bits."""
    pairs = [(a[name].contiguous(), b[name].contiguous()) for name in a if name in b]
    kinds = all(one.dtype == two.dtype and one.shape == two.shape for one, two in pairs)
    return a.keys() == b.keys() and kinds and all(torch.equal(bits(one), bits(two)) for one, two in pairs)


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8) if x.numel() else x.reshape(-1)


def moved(params: Any, seed: int, share: float) -> Any:
    """The tree with a share of its elements changed, some of them to what compares as equal, or to nothing at all."""
    random = torch.Generator().manual_seed(seed)

    def change(leaf: Tensor) -> Tensor:
        hit = torch.rand(leaf.shape, generator=random) < share
        to = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-30, 3.0])
        return torch.where(hit, to[torch.randint(len(to), leaf.shape, generator=random)], leaf)

    return fs.tree.map(change, params)


def follow(kind: str, sizes: tuple[int, ...], options: dict[str, Any], shares: list[float], what: str) -> None:
    """On a rank: an engine that gets changes has what an engine that gets everything has."""
    mesh = fs.make_mesh(sizes, ("x", "y")[: len(sizes)])
    plan = fs.make_plan(WHOLE, mesh, RULES[kind], batch=P("x"))
    params, exporter, engine = WHOLE, fs.io.Exporter(what=what, **options), Engine()
    for seed, share in enumerate(shares):
        params = moved(params, seed, share)
        state = fs.init_state(plan, OPT, params=params)
        engine.take(exporter(state))
        assert same(engine.leaves, dict(fs.io.export(state, what=what, **options)))
    assert engine.leaves or options["to"] not in (None, mesh.rank)
    engine.take(exporter(state))
    assert engine.last == [] and "exports" in repr(exporter)


SIZES = {"flat": [(1,), (3,), (2, 2)], "rows": [(2,), (2, 2)], "columns": [(3,), (2, 2)], "both": [(2, 2)]}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_an_engine_that_gets_changes_has_the_bits_of_a_whole_export(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(RULES)))
    sizes = data.draw(st.sampled_from(SIZES[kind]))
    world = torch.Size(sizes).numel()
    options = {
        "to": data.draw(st.sampled_from([None, 0, world - 1])),
        "dtype": data.draw(st.sampled_from([None, torch.bfloat16, torch.float64])),
        "axes": data.draw(st.sampled_from(["all", ()])),
        "rename": data.draw(st.sampled_from([(), TURNED])),
    }
    shares = [0.0, *data.draw(st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.4, 1.0]), min_size=1, max_size=4))]
    what = data.draw(st.sampled_from(["params", "state"])) if not options["rename"] else "params"
    fs.virtual_mesh(sizes, ("x", "y")[: len(sizes)]).run(follow, kind, sizes, options, shares, what)


def trained() -> list[int]:
    """On a rank: exports after steps; returns the bytes of each."""
    mesh = fs.make_mesh((2,), ("x",))
    params = {"w": torch.linspace(0.5, 2.0, 4096).view(64, 64), "frozen": torch.randn(64, 64)}
    rules = [fs.Rule("frozen", fs.fsdp("x"), trainable=False), (".*", fs.fsdp("x"))]
    plan = fs.make_plan(params, mesh, rules)
    opt = fs.optim.sgd(1.0)
    step = fs.make_train_step(lambda p, x: 2e-4 * ((x @ p["w"]) @ p["frozen"]).mean(), opt, plan)
    state, exporter, engine, sent = fs.init_state(plan, opt, params=params), None, Engine(), []
    exporter = fs.io.Exporter(dtype=torch.bfloat16)
    for seed in range(4):
        engine.take(exporter(state))
        sent.append(sum(change.nbytes for change in engine.last))
        assert seed == 0 or [change.name for change in engine.last] in ([], ["w"])
        assert same(engine.leaves, dict(fs.io.export(state, dtype=torch.bfloat16)))
        state, _ = step(state, torch.ones(4, 64))
    return sent


def test_updates_below_the_rounding_of_the_engine_do_not_travel() -> None:
    first, *others = fs.virtual_mesh((2,), ("x",)).run(trained)[0]
    assert first == 2 * 2 * 4096 and all(0 < sent < first // 20 for sent in others), (first, others)


def made(mesh: fs.Mesh, seed: int = 0, kind: str = "flat") -> fs.TrainState:
    plan = fs.make_plan(WHOLE, mesh, RULES[kind])
    return fs.init_state(plan, OPT, params=moved(WHOLE, seed, 0.05 * (seed > 0)))


def failing() -> None:
    """On a rank: a callback that fails on rank 0, and the exports after that."""
    mesh, engine = fs.make_mesh((2,), ("x",)), Engine()
    exporter = fs.io.Exporter(to=0)
    exporter(made(mesh), callback=lambda change: engine.take([change]))

    def hang_up(change: fs.io.Change) -> None:
        raise OSError("the engine hung up")

    with pytest.raises(OSError if mesh.rank == 0 else PeerError, match="hung up"):
        exporter(made(mesh, 1), callback=hang_up)
    engine.take(exporter(made(mesh, 2)))
    assert all(change.places is None for change in engine.last) and len(engine.last) == 4 * (mesh.rank == 0)
    engine.take(exporter(made(mesh, 3)))
    assert mesh.rank or (engine.last and all(change.places is not None for change in engine.last))
    assert same(engine.leaves, dict(fs.io.export(made(mesh, 3), to=0)))
    if mesh.rank == 1:
        exporter.forget()
    engine.take(exporter(made(mesh, 3)))
    assert mesh.rank or all(change.places is None for change in engine.last)


def test_what_may_be_lost_is_sent_again() -> None:
    fs.virtual_mesh((2,), ("x",)).run(failing)


def test_a_stream_that_is_left_is_sent_again_and_one_that_is_overtaken_counts_for_nothing() -> None:
    mesh, exporter, engine = fs.make_mesh((1,), ("x",)), fs.io.Exporter(), Engine()
    next(iter(exporter(made(mesh))))
    stream = exporter(made(mesh, 1))
    engine.take(exporter(made(mesh, 2)))
    assert [change.base for change in engine.last] == [None] * 4
    list(stream)
    engine.take(exporter(made(mesh, 3)))
    assert same(engine.leaves, dict(fs.io.export(made(mesh, 3))))
    state = made(mesh, 4)
    stream = exporter(state)
    state.memory.donate()
    with pytest.raises(DonatedError):
        next(stream)


def another_plan() -> None:
    """On a rank: the leaves lie elsewhere, in pieces of the same size."""
    mesh, engine, exporter = fs.make_mesh((2,), ("x",)), Engine(), fs.io.Exporter()
    for kind in ("flat", "rows", "flat"):
        plan = fs.make_plan({"w": torch.zeros(4, 4)}, mesh, [("w", P(None, "x") if kind == "rows" else P("x"))])
        state = fs.init_state(plan, params={"w": torch.arange(16.0).view(4, 4)})
        engine.take(exporter(state))
        assert [change.base for change in engine.last] == [None]


def test_leaves_that_lie_elsewhere_are_sent_whole() -> None:
    fs.virtual_mesh((2,), ("x",)).run(another_plan)


def test_a_change_does_not_fit_every_leaf() -> None:
    mesh, exporter = fs.make_mesh((1,), ("x",)), fs.io.Exporter()
    list(exporter(made(mesh)))
    change = next(iter(exporter(made(mesh, 1))))
    for leaf, words in ((None, "was given None"), (torch.zeros(2), r"was given torch.float32\[2\]")):
        with pytest.raises(TreeError, match=rf"change of a in export 2 is for a leaf torch.float32\[13, 8\].*{words}"):
            change.apply(leaf)
    with pytest.raises(TreeError, match=r"was given torch.bfloat16"):
        change.apply(WHOLE["a"].bfloat16())  # type: ignore[union-attr]
    kept = torch.nn.Parameter(WHOLE["a"].clone())  # type: ignore[union-attr]
    assert change.apply(kept) is kept and torch.equal(
        bits(kept.detach()), bits(dict(tree.paths(moved(WHOLE, 1, 0.05)))["a"])
    )


def test_arguments_that_cannot_be() -> None:
    mesh = fs.make_mesh((1,), ("x",))
    for options, words in (({"to": 1}, "to=1"), ({"what": "grads"}, "what='grads'"), ({"dtype": torch.int8}, "dtype")):
        with pytest.raises(PlanError, match=words):
            fs.io.Exporter(**options)(made(mesh))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="callback is 3"):
        fs.io.Exporter()(made(mesh), callback=3)  # type: ignore[call-overload]
