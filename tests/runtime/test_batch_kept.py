"""Finding a program leaves nothing in the batch, and no function may write to the batch's tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.errors import BatchError, TransformError

MODEL = fs.split(nn.Sequential(nn.Linear(2, 2)), "*")
OPT = fs.optim.sgd(0.1)


class Cache:
    """An object that functions put tensors into."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.last: Any = None
        self.by: dict[str, Any] = {}


class Locked(Cache):
    """One that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not this one")


def _plan() -> fs.Plan:
    mesh = fs.make_mesh((-1,), ("shard",))
    return fs.make_plan(MODEL, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))


def _store(params: Any, batch: Any) -> Any:
    out = MODEL.apply(params, batch["x"])
    cache = batch["cache"]
    cache.layers.append(out)
    cache.by["x"], cache.last = [out], (out,)
    return len(cache.layers), cache.layers


def test_objects_of_the_batch_get_what_real_calls_put_there() -> None:
    plan = _plan()
    evaluate = fs.make_eval_step(_store, plan)
    state = fs.init_state(plan, OPT)
    for _ in range(2):
        cache = Cache()
        for count in (1, 2, 3):
            length, layers = evaluate(state, {"x": torch.ones(1, 2), "cache": cache})
            assert int(length) == count == len(cache.layers)
            assert {type(x) for x in [*layers, *cache.layers, *cache.by["x"], *cache.last]} == {Tensor}


def test_an_object_that_cannot_be_copied_is_refused_if_it_is_written_to() -> None:
    plan = _plan()
    with pytest.raises(BatchError, match=r"batch\['cache'\]: a Locked"):
        fs.make_eval_step(_store, plan)(fs.init_state(plan, OPT), {"x": torch.ones(1, 2), "cache": Locked()})
    read = fs.make_eval_step(lambda params, batch: MODEL.apply(params, batch["x"]), plan)
    read(fs.init_state(plan, OPT), {"x": torch.ones(1, 2), "cache": Locked()})


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("values", [False, True], ids=["traced", "on demand"])
def test_a_tensor_of_the_batch_that_is_written_to_is_named(accumulate: int, values: bool) -> None:
    def loss(params: Any, batch: Any) -> Tensor:
        if values and float(batch["x"].sum()) > 1e9:
            return MODEL.apply(params, batch["x"]).sum()
        batch["rows"][1].mul_(2)
        return MODEL.apply(params, batch["x"]).mean()

    plan = _plan()
    step = fs.make_train_step(loss, OPT, plan, accumulate=accumulate)
    batch = {"x": torch.ones(2, 2), "rows": (torch.ones(2), torch.ones(2, 3))}
    with pytest.raises(BatchError, match=r"in place to the batch:\n  batch\['rows'\]\[1\] \[\d, 3\]\n"):
        step(fs.init_state(plan, OPT), batch)


def test_inference_mode_is_explained() -> None:
    plan = _plan()
    step = fs.make_train_step(lambda params, x: MODEL.apply(params, x).mean(), OPT, plan)
    state = fs.init_state(plan, OPT)
    with torch.inference_mode():
        batch = torch.ones(2, 2)
        with pytest.raises(TransformError, match="called under torch.inference_mode"):
            step(state, batch)
        fs.make_eval_step(lambda params, x: MODEL.apply(params, x).mean(), plan)(state, batch)
    with pytest.raises(BatchError, match=r"made under torch.inference_mode\(\)"):
        step(state, batch)
