"""Arithmetic on shards is elementwise and equal on every mesh, or refused where a step is traced."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.errors import TreeError
from fshard.state.elementwise import LeafCut, ShardArithmetic

PARAMS = {"w": torch.arange(40.0).view(8, 5) / 40, "v": torch.linspace(-1, 1, 33), "b": torch.ones(5)}
OPT = fs.optim.sgd(0.1)
map_ = fs.tree.map


def loss_fn(params: Any, x: Tensor) -> Tensor:
    """A loss of all leaves."""
    return ((x @ params["w"] + params["b"]) ** 2).mean() + (params["v"] ** 3).sum()


def stepped(size: int, change: Callable[[Any, Any, fs.Plan], Any]) -> dict[str, Any]:
    """The parameters after a step whose gradients were changed, on a mesh of so many ranks."""
    mesh = fs.virtual_mesh((size,), ("data",)) if size > 1 else fs.make_mesh((1,), ("data",))
    plan = fs.make_plan(PARAMS, mesh, [("b", fs.P()), (".*", fs.fsdp("data"))], batch=fs.P("data"))
    grad, update = fs.value_and_grad(loss_fn, plan), fs.make_update(OPT, plan)

    def fn(state: Any, batch: Tensor) -> Any:
        loss, grads = grad(state, batch)
        state, _ = update(state, change(state.params, grads, plan))
        return state, loss

    step = fs.make_step(fn, plan)
    state, _ = step(fs.init_state(plan, OPT, params=PARAMS), torch.linspace(-1, 1, 64).view(8, 8))
    return fs.unshard(state.params, plan)


RIGHT: dict[str, Callable[[Any, Any, fs.Plan], Any]] = {
    "signs": lambda p, g, plan: map_(torch.sign, g),
    "whole leaves": lambda p, g, plan: {**g, "b": (g["b"] / g["b"].norm()).sort()[0]},
    "lars": lambda p, g, plan: map_(
        lambda g, mine, norm: g * mine / norm, g, fs.tree.norms(p, plan), fs.tree.norms(g, plan)
    ),
    "norms of changed": lambda p, g, plan: fs.tree.scale(g, fs.tree.norm(map_(torch.abs, g), plan)),
    "subtrees": lambda p, g, plan: fs.tree.scale(g, fs.tree.vdot({"w": g["w"]}, {"w": p["w"]}, plan)),
    "norms of a subtree": lambda p, g, plan: {**g, "v": g["v"] / fs.tree.norms({"v": g["v"]}, plan)["v"]},
    "random trees": lambda p, g, plan: map_(torch.add, g, fs.tree.normal(fs.random.key(3), plan)),
    "masks": lambda p, g, plan: map_(lambda x: torch.where(x > 0.1, x, torch.zeros_like(x)), g),
    "constants": lambda p, g, plan: map_(lambda x: x.clamp(-1, 1) + torch.full(x.shape, 2.0), g),
    "in place": lambda p, g, plan: map_(lambda x: x.mul_(2).add_(1), g),
    "flattened": lambda p, g, plan: map_(lambda x: x.reshape(-1).view(x.shape), g),
    "cut here": lambda p, g, plan: map_(torch.mul, g, fs.shard(PARAMS, plan)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_equal_on_every_mesh(name: str) -> None:
    alone, *others = [stepped(size, RIGHT[name]) for size in (1, 2, 4)]
    for other in others:
        for path, leaf in fs.tree.paths(alone):
            torch.testing.assert_close(dict(fs.tree.paths(other))[path], leaf)


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "norm": (lambda x: x / x.norm(), "linalg_vector_norm of the leaf v .*not elementwise.*fs.tree.norms"),
    "mean": (lambda x: x - x.mean(), "mean of the leaf v"),
    "max": (lambda x: x / x.abs().max(), "max of the leaf v"),
    "sort": (lambda x: x.sort()[0], "sort of the leaf v"),
    "roll": (lambda x: x.roll(1), "roll of the leaf v"),
    "median": (lambda x: x - x.median(), "median of the leaf v"),
    "flip": (lambda x: x.flip(0), "flip of the leaf v"),
    "cumsum": (lambda x: x.cumsum(0), "cumsum of the leaf v"),
    "slice": (lambda x: x * (x[:1] + x[-1:]), "slice of the leaf v"),
    "transpose": (lambda x: x - x.T, "permute of the leaf v"),
    "arange": (lambda x: x * torch.arange(x.numel()), "mul of the leaf v and a tensor that is not cut as it is"),
    "draws": (lambda x: x + torch.randn_like(x), "randn_like draws numbers.*fs.tree.normal"),
    "draws by shape": (lambda x: x + torch.randn(x.shape), "add of the leaf v and a tensor that is not cut"),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", WRONG)
def test_what_depends_on_the_mesh_is_refused(name: str, size: int) -> None:
    call, says = WRONG[name]
    with pytest.raises(TreeError, match=says) as error:
        stepped(size, lambda p, g, plan: {**g, "v": call(g["v"])})
    assert "test_arithmetic.py" in str(error.value)


@pytest.mark.parametrize("size", [1, 2])
def test_outside_of_steps_it_is_refused_too(size: int) -> None:
    mesh = fs.virtual_mesh((size,), ("data",)) if size > 1 else fs.make_mesh((1,), ("data",))
    plan = fs.make_plan(PARAMS, mesh, [("b", fs.P()), (".*", fs.fsdp("data"))], batch=fs.P("data"))
    grad, adam = fs.value_and_grad(loss_fn, plan), fs.optim.adamw(0.1)

    def ranks() -> Any:
        state = fs.init_state(plan, adam, params=PARAMS)
        _, grads = grad(state, plan.local_batch(torch.linspace(-1, 1, 64).view(8, 8)))
        step = fs.make_train_step(loss_fn, adam, plan)
        state, _ = step(state, plan.local_batch(torch.linspace(-1, 1, 64).view(8, 8)))
        trees = [state.params, state.opt_state["exp_avg"], grads, map_(torch.neg, state.params), {"v": grads["v"]}]
        for given in trees:
            for call, says in WRONG.values():
                with pytest.raises(TreeError, match=says):
                    map_(call, {"v": given["v"]})
            for look in (repr, print, Tensor.tolist, lambda x: x.shape, Tensor.clone, Tensor.numpy):
                map_(look, given)  # type: ignore[operator]
        for right in RIGHT.values():
            right(state.params, map_(torch.clone, grads), plan)
        file = io.BytesIO()
        torch.save(copy.deepcopy(state.params), file)  # files know nothing of it
        file.seek(0)
        return map_(torch.norm, torch.load(file, weights_only=True))

    assert mesh.run(ranks) if size > 1 else ranks()  # type: ignore[attr-defined]


def test_a_line_of_a_notebook_is_named_by_its_cell() -> None:
    cell = compile("\nchange = lambda x: x - x.mean()", "/tmp/ipykernel_123/456789.py", "exec")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(cell, names)
    with pytest.raises(TreeError, match=r"mean of the leaf . \(line 2 of cell\) is not elementwise"):
        stepped(1, lambda p, g, plan: map_(names["change"], g))


def test_subtrees_that_are_cut_differently_are_refused() -> None:
    nets = {name: {"inp": torch.ones(5, 5), "out": torch.ones(7)} for name in ("student", "teacher")}
    for size in (1, 2):
        mesh = fs.virtual_mesh((size,), ("data",)) if size > 1 else fs.make_mesh((1,), ("data",))
        plan = fs.make_plan(nets, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
        for mix in (lambda a, b: fs.tree.add(a, b, 0.5), lambda a, b: map_(lambda x, y: torch.lerp(x, y, 0.5), a, b)):

            def fn(state: Any, batch: Any, mix: Any = mix) -> Any:
                params = state.params
                return state.replace(params={**params, "teacher": mix(params["teacher"], params["student"])}), 0.0

            step = fs.make_step(fn, plan)
            state, says = (
                fs.init_state(plan, OPT, params=nets),
                r"teacher\.\w+ and student\.\w+.*cut at different elements",
            )
            with pytest.raises(TreeError, match=says):
                step(state, torch.zeros(4))
            outside: Any = getattr(mesh, "run", lambda call: call())
            with pytest.raises(TreeError, match=says):
                outside(lambda mix=mix, state=state: mix(state.params["teacher"], state.params["student"]))


def test_models_of_their_own_units_are_cut_alike() -> None:
    def averaged(size: int) -> dict[str, Any]:
        torch.manual_seed(0)
        net = torch.nn.ModuleDict({name: torch.nn.Linear(5, 3) for name in ("student", "teacher")})
        model = fs.split(net, units=("student", "teacher"))
        mesh = fs.virtual_mesh((size,), ("data",)) if size > 1 else fs.make_mesh((1,), ("data",))
        plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))

        def fn(state: Any, batch: Any) -> Any:
            params = state.params
            mean = map_(lambda a, b: torch.lerp(a, b, 0.25), params["teacher"], params["student"])
            return state.replace(params={**params, "teacher": mean}), 0.0

        state, _ = fs.make_step(fn, plan)(fs.init_state(plan, OPT, params=model.params), torch.zeros(4))
        return fs.unshard(state.params, plan)

    alone, both = averaged(1), averaged(2)
    for path, leaf in fs.tree.paths(alone):
        torch.testing.assert_close(dict(fs.tree.paths(both))[path], leaf)


def on_pieces(call: Callable[..., Any], parts: int, *args: Any) -> list[Any]:
    """The results of a call on each part of its arguments; None where the guard refuses it."""
    out: list[Any] = []
    for part in range(parts):
        own = [x.chunk(parts)[part].clone() if isinstance(x, Tensor) else x for x in args]
        guard = ShardArithmetic(lambda x: None)
        for x in own:
            if isinstance(x, Tensor):
                guard.know(x, LeafCut("w", ()))
        try:
            with guard:
                found = call(*own)
        except Exception:
            assert guard.fault, f"{call} raises what is no refusal"
        out.append(None if guard.fault else found)
    return out


NOT_COMPARED = {"empty_like", "chalf", "new_tensor"}
"""Calls whose results have no values, half precision, or nothing of their argument."""


def _calls() -> list[tuple[str, Callable[..., Any]]]:
    """Calls that take tensors, by name; others would change settings of PyTorch (``torch.set_printoptions``)."""
    taken = set(torch.overrides.get_testing_overrides())
    homes = (torch, torch.Tensor, torch.nn.functional, torch.special)
    named = [(f"{home.__name__}.{name}", getattr(home, name)) for home in homes for name in dir(home)]
    public = [(name, call) for name, call in named if name.rpartition(".")[2][0] != "_" and callable(call)]
    return [x for x in public if x[1] in taken and x[0].rpartition(".")[2] not in NOT_COMPARED]


def _same(pieces: list[Any], whole: Any) -> bool:
    if isinstance(whole, tuple):
        return all(_same([piece[i] for piece in pieces], x) for i, x in enumerate(whole))
    if any(piece.ndim == 0 for piece in pieces):
        return False
    joined = torch.cat(pieces)
    wide = torch.complex128  # holds the values of every dtype
    return joined.shape == whole.shape and torch.allclose(joined.to(wide), whole.to(wide), equal_nan=True)


@pytest.mark.long
def test_every_operator_is_elementwise_or_refused() -> None:
    x, y = torch.linspace(-0.9, 0.9, 16) + 0.01, torch.linspace(0.1, 2.0, 16)
    allowed, refused, wrong = 0, 0, list[str]()
    for name, call in _calls():
        for args in ((x,), (x, y), (x, 2.0)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    whole = call(*[a.clone() if isinstance(a, Tensor) else a for a in args])
                except Exception:
                    continue
                tensors = whole if isinstance(whole, tuple) else (whole,)
                if not tensors or not all(isinstance(found, Tensor) for found in tensors):
                    continue
                pieces = on_pieces(call, 2, *args)
            if pieces == [None, None]:
                refused += 1
            elif any(piece is None for piece in pieces) or not _same(pieces, whole):
                wrong.append(f"{name} of {len(args)}")
            else:
                allowed += 1
    assert not wrong and allowed > 300 and refused > 100
