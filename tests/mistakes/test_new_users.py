"""What stopped people who had README alone: each error names the mistake and the way."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.errors import LossError, PlanError, TreeError, UnitError
from fshard.hints import OF_CALLS

MESH = fs.make_mesh((1,), ("data",))
RULES = [(".*", fs.fsdp("data"))]
OPT = fs.optim.sgd(1.0)
NET = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 1)))
MODEL = fs.split(NET, units=("2",))
PLAN = fs.make_plan(MODEL, MESH, RULES, batch=fs.P("data"))


def loss(params: Any, x: Tensor) -> Tensor:
    """The mean of squares."""
    mean: Tensor = MODEL.apply(params, x, training=False).square().mean()
    return mean


def told(fn: Any, batch: Any) -> str:
    """What a step of a loss function raises, with its notes."""
    with pytest.raises(Exception) as caught:
        fs.make_train_step(fn, OPT, PLAN)(fs.init_state(PLAN, OPT), batch)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize("name", OF_CALLS)
def test_arguments_that_do_not_fit_are_told_a_right_call(name: str) -> None:
    right, hints = OF_CALLS[name]
    fn: Any = fs.data.Loader if name == "Loader" else getattr(fs, name)
    with pytest.raises(TypeError, match="missing a required") as caught:
        fn()
    assert right in str(caught.value)
    for words, hint in hints.items():
        for word in words.split():
            with pytest.raises(TypeError) as caught:
                fn(1, 2, **{word: 0})
            assert f"For {word}=: {hint}" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"device": 0}, "device=0 is no device|device='cuda:0'"),
        ({"timeout": "5m"}, "timeout is '5m', a str: give seconds"),
        ({"timeout": 0}, "timeout=0 must be a positive number"),
    ],
)
def test_options_of_a_mesh_of_one_are_checked_too(given: Any, says: str) -> None:
    if torch.cuda.is_available() and "device" in given:
        pytest.skip("it is a device here")
    with pytest.raises(PlanError, match=says):
        fs.make_mesh((-1,), ("data",), **given)


def test_one_rank_is_one_rank() -> None:
    with pytest.raises(PlanError, match="the world has 1 rank: start 2 ranks"):
        fs.make_mesh((2,), ("data",))


def test_a_batch_without_rows_is_named() -> None:
    assert "No tensor of it has a row" in told(lambda p, x: nn.functional.mse_loss(loss(p, x) + x, x), torch.ones(0, 3))
    assert "No tensor of it has a row" not in told(lambda p, x: loss(p, x[0]) / 0, torch.ones(2, 3))


def test_a_module_without_data_is_named() -> None:
    with fs.empty_weights():
        bare = nn.Linear(3, 1)
    assert "compute from params alone, with model.apply" in told(lambda p, x: bare(x).mean(), torch.ones(2, 3))


def test_dtypes_that_meet_outside_of_units_are_named() -> None:
    said = told(loss, torch.ones(2, 3, dtype=torch.float64))
    assert "The batch has float64, and parameters are computed with in float32: cast the batch, or make" in said


def test_statistics_that_change_are_told_what_to_do() -> None:
    """The remedy is followed, word by word."""

    def forgetful(params: Any, batch: Any) -> Tensor:
        out: Tensor = MODEL.apply(params, batch["x"]).mean()
        return out

    def right(params: Any, batch: Any) -> Any:
        out, new = MODEL.apply(params, batch["x"], buffers=batch["buffers"])
        return nn.functional.mse_loss(out, out.detach() + 1), {"buffers": new}

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    state = fs.init_state(PLAN, OPT)
    with pytest.raises(UnitError) as caught:
        fs.make_train_step(forgetful, OPT, PLAN)(state, {"x": x})
    assert 'return loss, {"buffers": new}' in str(caught.value)
    step, buffers = fs.make_train_step(right, OPT, PLAN), MODEL.buffers
    for _ in range(2):
        state, metrics = step(state, {"x": x, "buffers": buffers})
        buffers = metrics.aux["buffers"]
    assert buffers["1"]["num_batches_tracked"] == 2


def test_warnings_name_the_line_of_the_user() -> None:
    class Own(nn.Sequential):
        def _init_weights(self, module: nn.Module) -> None:
            """Code for first values that only its library calls."""

    model = fs.split(Own(nn.Linear(2, 2)))
    plan = fs.make_plan(model, MESH, RULES)
    with pytest.warns(UserWarning, match="begin with PyTorch's default") as seen:
        fs.init_state(plan, OPT)
    assert [one.filename for one in seen] == [__file__]


def test_parameters_of_all_ranks_become_a_state_dict() -> None:
    """As docs/from-fsdp2.md writes it; inside of a run whole tensors are still refused."""
    mesh = fs.virtual_mesh((2,), ("data",))
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    plan = fs.make_plan(fs.split(net), mesh, RULES)
    state = fs.init_state(plan, OPT, params=fs.split(net).params)
    found = fs.io.to_state_dict(state.params, plan)
    assert found.keys() == net.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in net.state_dict().items())
    assert found.keys() == fs.io.to_state_dict(state=state.params, plan=plan, nested=False).keys()
    with pytest.raises(TreeError, match="These are whole tensors"):
        mesh.run(lambda: fs.io.to_state_dict(fs.split(net).params, plan.here))
    with pytest.raises(TreeError, match="missing"):
        fs.io.to_state_dict({}, plan)


def test_a_data_set_without_samples_is_named() -> None:
    with pytest.raises(PlanError, match="fs.data.Loader: the data set, a list, has no samples"):
        fs.data.Loader([], PLAN, batch=4)


@pytest.mark.parametrize("options", [{"foo": 1}, {"num_workers": -1}])
def test_options_that_the_loader_of_pytorch_refuses_are_refused_at_once(options: Any) -> None:
    with pytest.raises(PlanError, match=f"PyTorch's data loader refuses {next(iter(options))}="):
        fs.data.Loader([1, 2], PLAN, batch=2, **options)


def test_an_update_that_is_not_unpacked_is_told_so() -> None:
    grad, update = fs.value_and_grad(loss, PLAN), fs.make_update(OPT, PLAN)

    def step(state: Any, batch: Any) -> Any:
        value, grads = grad(state, batch)
        state = update(state, grads)
        return state, value

    with pytest.raises(LossError, match=r"unpack them, state, metrics = update\(state, grads\)"):
        fs.make_step(step, PLAN)(fs.init_state(PLAN, OPT), torch.ones(2, 3))
