"""Tracing: what a program does is found on fake tensors, without memory, communication or a trace in the program."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.errors import LossError, PlanError, UnitError
from fshard.runtime.engine.program_mode import ProgramMode
from fshard.runtime.execution.trace_program import ASKED, ProgramTrace, trace
from fshard.schedule.ops import ROOT, Call
from tests.shared import zoo

MESH = fs.abstract_mesh((4,), ("shard",), rank=2)
BATCH = {"x": torch.ones(3, 6), "y": torch.ones(3, 6)}


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """An affine map and tanh."""
    return torch.tanh(F.linear(x, p["w"], p["b"]))


@torch.library.custom_op("fshard_tests::plus_one", mutates_args=())
def plus_one(x: Tensor) -> Tensor:
    """An operator that fake tensors know nothing of."""
    return x + 1


@fs.unit
def blend(p: Any, x: Tensor) -> Tensor:
    """Reads two subtrees."""
    return F.linear(x, p["one"]["w"]) + F.linear(x, p["two"]["w"])


def _params() -> dict[str, Any]:
    return {
        **{name: {"w": torch.empty(6, 6), "b": torch.empty(6)} for name in ("one", "two", "three")},
        "gain": torch.empty(()),
        "shift": {"v": torch.empty(6)},
    }


def _plan(mesh: fs.Mesh = MESH) -> fs.Plan:
    return fs.make_plan(_params(), mesh, [(".*", fs.fsdp("shard"))], units=("one", "two", "three", "shift"))


def _trace(fn: Callable[[Any, Any], Any], train: bool = True) -> ProgramTrace:
    found = trace(fn, _plan(), BATCH, train)
    assert found is not None
    return found


def _calls(*names: str) -> tuple[Call, ...]:
    seen: dict[str, int] = {}
    out = []
    for name in names:
        out.append(Call(name, seen.get(name, 0)))
        seen[name] = seen.get(name, 0) + 1
    return tuple(out)


def _reads(found: ProgramTrace) -> dict[str, list[str]]:
    names = [group.name for group in _plan().groups]
    return {unit: [names[g] for g in groups] for unit, groups in found.program.reads.items()}


def test_order_and_reads() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        x = layer(p["two"], layer(p["one"], b["x"]))
        return F.mse_loss(layer(p["three"], x), b["y"])

    found = _trace(loss)
    names = ("layer(two)", "layer(three)")
    assert found.program.forward == _calls("layer(one)", *names)[:1] + _calls(*names)
    assert found.program.backward == tuple(reversed(found.program.forward))
    assert not found.weighted
    assert _reads(found) == {"layer(one)": ["one"], "layer(two)": ["two"], "layer(three)": ["three"], ROOT: []}


def test_units_called_twice_and_in_lists() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        towers = [layer(p[name], b["x"]) for name in ("one", "two", "one")]
        return layer(p["three"], torch.stack(towers).sum(0)).mean()

    found = _trace(loss)
    assert found.program.forward == _calls("layer(one)", "layer(two)", "layer(one)", "layer(three)")
    # Autograd runs what came last first.
    assert found.program.backward == tuple(reversed(found.program.forward))


def test_reads_of_code_between_units() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        x = layer(p["one"], b["x"]) * p["gain"]
        with torch.no_grad():
            norm = p["two"]["w"].norm()
        return (layer(p["three"], x) + p["shift"]["v"].detach()).mean() + norm

    found = _trace(loss)
    assert _reads(found)[ROOT] == ["two", "root", "shift"]
    assert [call.unit for call in found.program.forward] == ["layer(one)", "layer(three)"]


def test_looking_at_a_shape_is_no_read() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        assert p["two"]["w"].shape == (6, 6) and p["two"]["w"].dtype == torch.float32 and p["gain"].ndim == 0
        return layer(p["one"], b["x"]).mean()

    assert _reads(_trace(loss))[ROOT] == []


def test_a_unit_of_several_subtrees() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        return blend({"one": p["one"], "two": p["two"]}, b["x"]).mean()

    found = _trace(loss)
    (call,) = found.program.forward
    assert call.unit == "blend(one.b,one.w,two.b,two.w)"
    assert _reads(found)[call.unit] == ["one", "two"]


def test_units_without_gradient_have_no_backward() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        with torch.no_grad():
            target = layer(p["one"], b["x"])
        left, _ = layer(p["two"], b["x"]), layer(p["three"], b["x"])
        return F.mse_loss(left, target)

    program = _trace(loss).program
    assert [call.unit for call in program.forward] == ["layer(one)", "layer(two)", "layer(three)"]
    assert program.backward == _calls("layer(two)")


def test_a_unit_inside_of_a_unit_is_part_of_it() -> None:
    @fs.unit
    def outer(p: Any, x: Tensor) -> Tensor:
        return layer(p["two"], layer(p["one"], x))

    program = _trace(lambda p, b: outer({"one": p["one"], "two": p["two"]}, b["x"]).sum()).program
    assert [call.unit for call in program.forward] == ["outer(one.b,one.w,two.b,two.w)"]


def test_two_functions_on_one_subtree_have_names_of_their_own() -> None:
    @fs.unit
    def other(p: Any, x: Tensor) -> Tensor:
        return F.linear(x, p["w"])

    program = _trace(lambda p, b: other(p["one"], layer(p["one"], b["x"])).sum()).program
    assert [call.unit for call in program.forward] == ["layer(one)", "other(one)"]


def test_one_function_on_parts_of_one_subtree() -> None:
    @fs.unit
    def some(p: Any, x: Tensor) -> Tensor:
        return x * sum(leaf.sum() for leaf in p.values())

    def loss(p: Any, b: Any) -> Tensor:
        return some(p["one"], some({"w": p["one"]["w"]}, b["x"])).sum()

    names = [call.unit for call in _trace(loss).program.forward]
    assert len(set(names)) == 2, names


def test_evaluation_has_no_backward() -> None:
    found = _trace(lambda p, b: {"y": layer(p["one"], b["x"])}, train=False)
    assert (found.program.forward, found.program.backward, found.weighted) == (_calls("layer(one)"), (), False)


def test_a_weighted_loss_is_noted() -> None:
    assert _trace(lambda p, b: (fs.Mean(layer(p["one"], b["x"]).sum(), 5), {"aux": 1})).weighted


def test_checkpointed_units_are_called_once() -> None:
    def loss(p: Any, b: Any, reentrant: bool = False) -> Tensor:
        x = layer(p["one"], b["x"])
        return checkpoint(lambda x: layer(p["two"], x), x, use_reentrant=reentrant).mean()

    program = _trace(loss).program
    assert program.forward == _calls("layer(one)") + _calls("layer(two)")
    assert program.backward == _calls("layer(two)") + _calls("layer(one)")
    # PyTorch itself refuses the old kind, and says what to do.
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        _trace(lambda p, b: loss(p, b, True))


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, b: layer(p["one"], b["x"]).sum() if b["x"].sum() > 0 else layer(p["two"], b["x"]).sum(),
        lambda p, b: layer(p["one"], b["x"]).sum() * b["x"].sum().item(),
        lambda p, b: layer(p["one"], b["x"][b["x"] > 0][:, None].expand(-1, 6)).sum(),
        lambda p, b: layer(p["one"], b["x"][b["x"].nonzero()[0, 0]]).sum(),
        lambda p, b: layer(p["one"], b["x"]).sum() * len(b["x"].unique()),
        lambda p, b: layer(p["one"], b["x"]).sum() * max(b["x"].flatten().tolist()),
        lambda p, b: layer(p["one"], b["x"]).sum() * float(b["x"].numpy().max()),
        lambda p, b: layer(p["one"], plus_one(b["x"])).sum(),
    ],
)
def test_what_depends_on_values_is_left_to_a_real_run(fn: Callable[[Any, Any], Any]) -> None:
    assert trace(fn, _plan(), BATCH, True) is None
    step = fs.make_train_step(fn, fs.optim.sgd(0.1), _plan())
    with pytest.raises(PlanError, match="depends on values"):
        step.trace(BATCH)


def test_python_values_and_constants_are_real() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        x = b["x"]
        for _ in range(b["depth"]):
            x = layer(p["one"], x)
        return x.sum() * torch.tensor(3.0).item()

    found = trace(loss, _plan(), {**BATCH, "depth": 3}, True)
    assert found is not None and len(found.program.forward) == 3


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda p, b: layer(p["one"], b["x"]), LossError),
        (lambda p, b: b["x"].sum(), LossError),
        (lambda p, b: layer({"w": p["one"]["w"] * 2, "b": p["one"]["b"]}, b["x"]).sum(), UnitError),
        (lambda p, b: layer(p["one"], b["x"][:, :5]).sum(), RuntimeError),
        (lambda p, b: p["nothing"], KeyError),
    ],
)
def test_errors_show_before_anything_runs(fn: Callable[[Any, Any], Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        trace(fn, _plan(), BATCH, True)


def test_a_step_traces_on_an_abstract_mesh_and_leaves_nothing() -> None:
    kept: list[Any] = []

    def loss(p: Any, b: Any) -> Tensor:
        kept.append(p)
        return layer(p["one"], b["x"]).sum()

    step = fs.make_train_step(loss, fs.optim.sgd(0.1), _plan())
    found = step.trace(BATCH)
    assert step.trace(BATCH) == found and len(kept) == 1 and str(found) == str(found.schedule)
    with pytest.raises(PlanError, match="no schedule yet"):
        print(step.schedule)
    with pytest.raises(UnitError, match="a step that is over"):
        layer(kept[0]["one"], torch.ones(2, 6))
    with pytest.raises(PlanError, match="no processes"):
        step(fs.init_state(_plan(), fs.optim.sgd(0.1), init=[(".*", fs.init.zeros())]), BATCH)


def test_every_rank_traces_one_schedule() -> None:
    texts = set()
    for rank in range(4):
        plan = _plan(fs.abstract_mesh((4,), ("shard",), rank=rank))
        step = fs.make_train_step(lambda p, b: layer(p["two"], layer(p["one"], b["x"])).sum(), fs.optim.sgd(0.1), plan)
        texts.add(str(step.trace(BATCH)))
    assert len(texts) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(zoo.EXAMPLES))
def test_tracing_consumes_no_random_numbers_and_no_memory_of_the_model(name: str) -> None:
    example = zoo.build(name)
    plan = example.plan(fs.abstract_mesh((2,), ("shard",)))
    before = torch.random.get_rng_state()
    start = {path: leaf.clone() for path, leaf in example.plain.parameters.items()}
    assert trace(example.loss_fn, plan, zoo.cut(example.batch(0), 0, 2), True) is not None
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(leaf, start[path]) for path, leaf in example.plain.parameters.items())


def test_names_of_module_units() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 1))
    model = fs.split(module, units=("1", "2"))
    plan = fs.make_plan(model, MESH, [(".*", fs.fsdp("shard"))])
    found = trace(lambda p, b: model.apply(p, b["x"]).sum(), plan, BATCH, True)
    assert found is not None
    assert found.program.forward == _calls("1") + _calls("2")
    assert found.program.reads == {"1": (1,), "2": (2,), ROOT: (0,)}


def test_a_trace_answers_what_autograd_asks_as_pytorch_does() -> None:
    with ProgramMode():
        x = torch.empty(4, 3)
        others = x, x.t(), x[:2], x.flatten(), torch.empty(4, 3), torch.empty(6), torch.empty(6).double()
        for ask, answer in ASKED.items():
            number = len(ask._schema.arguments)
            answers = [answer(*(x, y)[:number]) for y in others]
            assert answers == [ask(*(x, y)[:number]) for y in others]
            assert len(set(answers)) == number
