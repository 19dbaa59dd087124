"""Units and slots: an ordinary function on ordinary tensors, an engine's call on marked ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fshard.model import Slot, Unit, attach, slot_of, split, unit


@unit
def affine(params: Any, x: Tensor, *, shift: float = 0.0) -> Tensor:
    """An affine map."""
    return params["w"] * x + shift


class Doubler:
    """An engine that doubles what a unit returns."""

    def __init__(self) -> None:
        self.seen: list[tuple[Unit, Any, tuple[Any, ...], dict[str, Any]]] = []

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.seen.append((unit, params, args, kwargs))
        return 2 * unit.fn(params, *args, **kwargs)


def marked(engine: Doubler, value: float, path: str = "w") -> Tensor:
    tensor = torch.tensor(value)
    attach(tensor, Slot(engine, path))
    return tensor


def test_a_unit_is_its_function_on_ordinary_tensors() -> None:
    assert affine({"w": torch.tensor(2.0)}, torch.tensor(3.0), shift=1.0) == 7.0
    assert affine({"w": 2.0}, 3.0) == 6.0


def test_a_unit_keeps_its_functions_name_and_has_a_stable_repr() -> None:
    assert affine.__name__ == "affine" and affine.__doc__ == "An affine map."
    assert affine.__wrapped__ is affine.fn and affine.name == ""
    assert repr(affine) == "unit(affine)" and repr(Unit("blocks.3", affine.fn)) == "unit(blocks.3)"
    assert unit(affine) is affine
    assert repr(unit(nn.Linear(1, 1))) == "unit(Linear)"


def test_units_compare_by_identity_and_are_frozen() -> None:
    assert Unit("a", affine.fn) != Unit("a", affine.fn) and len({affine, affine}) == 1
    assert Unit("a", unhashable := [].append).fn == unhashable  # type: ignore[func-returns-value]
    with pytest.raises(AttributeError):
        affine.name = "b"  # type: ignore[misc]


def test_the_engine_of_a_slot_runs_the_call() -> None:
    engine = Doubler()
    params = {"w": marked(engine, 2.0)}
    assert affine(params, torch.tensor(3.0), shift=1.0) == 14.0
    [(called, tree, args, kwargs)] = engine.seen
    assert called is affine and tree is params and args == (3.0,) and kwargs == {"shift": 1.0}


@pytest.mark.parametrize("place", ["first", "last", "deep", "list", "bare"])
def test_a_slot_is_found_wherever_it_is(place: str) -> None:
    engine = Doubler()
    w, plain = marked(engine, 1.0), torch.tensor(1.0)
    trees = {
        "first": {"w": w, "x": plain},
        "last": {"a": plain, "b": {"w": w}},
        "deep": {"a": {"b": {"c": w}}},
        "list": [plain, (w,)],
        "bare": w,
    }
    one = unit(lambda params: torch.ones(()))
    assert one(trees[place]) == 2.0


@pytest.mark.parametrize("params", [{}, {"a": {}}, [], None, {"a": None}, {"a": {}, "b": torch.ones(())}])
def test_trees_without_a_slot(params: Any) -> None:
    assert unit(lambda params: 5)(params) == 5


def test_a_slot_stays_on_its_tensor() -> None:
    w = marked(Doubler(), 2.0, "a.w")
    slot = slot_of(w)
    assert slot is not None and slot.path == "a.w"
    assert slot_of(w * 1) is None and slot_of(w.view(1)) is None and slot_of(w.detach()) is None and slot_of(3) is None


def test_engines_do_not_mix_between_calls() -> None:
    one, two = Doubler(), Doubler()
    affine({"w": marked(one, 1.0)}, 1.0)
    affine({"w": marked(two, 1.0)}, 1.0)
    affine({"w": torch.ones(())}, 1.0)
    assert len(one.seen) == len(two.seen) == 1


def test_a_hand_written_unit_holds_a_module_made_of_units() -> None:
    engine = Doubler()
    model = split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "*")

    @unit
    def both(params: Any, x: Tensor) -> Tensor:
        return model.apply(params, x)

    x = torch.randn(3, 2)
    assert torch.equal(both(model.params, x), model.apply(model.params, x))
    for leaf in (params := {k: dict(v) for k, v in model.params.items()})["0"].values():
        attach(leaf, Slot(engine, "?"))
    both(params, x)
    assert engine.seen[0][0] is both
