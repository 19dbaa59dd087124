"""Views of plans and tensors, and what shows itself in notebooks: every element on its ranks, all text escaped."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import PlanError, TreeError

NET = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
MODEL = fs.split(NET, units=("0", "2"))
THREE = fs.abstract_mesh((2, 2, 2), ("r", "s", "t"))
RULES = [("w", fs.P(("r", "s"), "t")), ("v", fs.fsdp(("r", "s"))), ("u", fs.P())]
PARAMS = {"w": torch.zeros(8, 6), "v": torch.zeros(3, 5, 4), "u": torch.zeros(())}


def planned(mesh: fs.Mesh) -> fs.Plan:
    return fs.make_plan(MODEL, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))


class Checked(HTMLParser):
    """Refuses tags that are not closed in order, and anything that runs or loads."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in ("div", "b", "table", "tr", "th", "td", "details", "summary", "pre", "span"), tag
        assert {name for name, _ in attrs} <= {"style", "title", "open"}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def html(value: Any) -> str:
    """The text of what a notebook shows, well-formed and without anything that runs."""
    parser = Checked()
    parser.feed(value._repr_html_())
    parser.close()
    assert not parser.open
    return " ".join(parser.texts)


@pytest.mark.parametrize("path", list(PARAMS))
def test_each_element_is_on_the_ranks_that_hold_it(path: str) -> None:
    """Against the shards that fs.shard cuts."""
    whole = {name: torch.arange(float(leaf.numel())).view(leaf.shape) for name, leaf in PARAMS.items()}
    plan = fs.make_plan(PARAMS, THREE, RULES, batch=fs.P(("r", "s")))
    view = fs.view.sharding(plan, path)
    held: dict[int, list[int]] = {}
    for rank in range(8):
        seen = fs.make_plan(PARAMS, fs.abstract_mesh((2, 2, 2), ("r", "s", "t"), rank=rank), RULES, batch=plan.batch)
        state = fs.init_state(seen, params=whole)
        for element in state.params[path].reshape(-1).tolist():
            held.setdefault(int(element), []).append(rank)
    assert {element: list(view.holders(element)) for element in held} == held
    assert len(held) == PARAMS[path].numel()


def test_the_text_of_a_tensor_and_of_a_plan() -> None:
    plan = planned(fs.abstract_mesh((2,), ("shard",)))
    text = str(fs.view.sharding(plan, "0.weight"))
    assert text.startswith("0.weight [6, 6] with P(flat='shard') on shard=2\n")
    assert text.splitlines()[-3] == "| 0   0 | 1   1   1   1 |" and text.endswith("elements: rank 0: 32, rank 1: 4")
    rows = str(fs.view.plan(plan)).splitlines()
    assert rows[1:4] == ["unit  rank 0  rank 1", "0        128      40", "2         72      12"]
    assert rows[-1].endswith("52 B") and "shard=1" in rows[-1]
    many = fs.view.plan(planned(fs.abstract_mesh((16,), ("shard",))))
    assert (
        "least" in str(many)
        and len(many.totals) == 16
        and sum(many.totals) == 4 * sum(leaf.numel() for leaf in NET.parameters())
    )
    assert "no elements" in str(
        fs.view.sharding(fs.make_plan({"e": torch.zeros(0, 3)}, THREE, [("e", fs.P())], batch=fs.P("r")), "e")
    )


def test_the_table_of_a_plan_shows_all_ranks() -> None:
    two, many = (str(planned(fs.abstract_mesh((size,), ("shard",)))) for size in (2, 16))
    assert re.search(r"rank 0 +rank 1\n", two) and "200 B on rank 0, 52 B on rank 1" in two
    assert "least bytes  most bytes" in many and re.search(r"\d+ B to \d+ B a rank", many)


def test_slices_inside_of_shard_map() -> None:
    mesh, seen = fs.virtual_mesh((2,), ("shard",)), []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(str(fs.view.sharding(x, fs.P(None, "shard"))))
        return x

    fs.shard_map(look, mesh, fs.P(None, "shard"), fs.P(None, "shard"))(torch.zeros(3, 8))
    assert seen[0] == seen[1] and "slice [3, 8]" in seen[0] and "| 0   0   0   0 | 1   1   1   1 |" in seen[0]
    with pytest.raises(PlanError, match="no mesh is in scope"):
        fs.view.sharding(torch.zeros(2), fs.P("shard"))


def test_bad_arguments() -> None:
    plan = planned(fs.abstract_mesh((2,), ("shard",)))
    with pytest.raises(TreeError, match="no leaf '0.wight'"):
        fs.view.sharding(plan, "0.wight")
    with pytest.raises(PlanError, match="a plan and the path of a leaf, or a rank's slice and its spec"):
        fs.view.sharding(plan, 3)
    with pytest.raises(PlanError, match="give what fs.make_plan returned"):
        fs.view.plan(MODEL)  # type: ignore[arg-type]


def test_everything_shows_itself() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))
    plan, opt = planned(mesh), fs.optim.adamw(1e-2)
    step = fs.make_train_step(lambda params, x: MODEL.apply(params, x).square().mean(), opt, plan)
    first = fs.init_state(plan, opt)
    state, _ = step(first, torch.ones(4, 6))
    trace = step.trace(torch.ones(4, 6))
    auto = fs.make_train_step(
        step.opt and (lambda params, x: MODEL.apply(params, x).sum()),
        opt,
        plan,
        schedule=fs.Auto(compute=1e9, wire=1e8),
    )
    choice = auto.trace(torch.ones(4, 6)).choice
    assert "0.weight" in html(plan) and "rank 1" in html(plan)
    assert "a virtual mesh of 2 ranks" in html(mesh) and "r=0" in html(THREE) and "t=1" in html(THREE)
    assert "exp_avg" in html(state) and "a step has taken its memory" in html(first)
    assert "all_gather" in html(step.schedule) and "reduce_scatter" in html(trace)
    assert "activations" in html(trace.footprint) and "exposed" in html(step.measured)
    assert choice is not None and "chosen" in html(choice)
    assert "rank" in html(fs.view.plan(plan)) and "elements" in html(fs.view.sharding(plan, "0.bias"))


def test_treescope_shows_the_trees_of_a_state() -> None:
    treescope = pytest.importorskip("treescope")
    plan, opt = planned(fs.virtual_mesh((2,), ("shard",))), fs.optim.adamw(1e-2)
    first = fs.init_state(plan, opt)
    step = fs.make_train_step(lambda params, x: MODEL.apply(params, x).square().mean(), opt, plan)
    text = treescope.render_to_text(first)
    assert text.startswith("TrainState(") and "exp_avg_sq" in text and "(6, 6)" in text
    state, _ = step(first, torch.ones(4, 6))
    assert "step=1" in treescope.render_to_text(state) and "params" not in treescope.render_to_text(first)


def test_text_is_escaped() -> None:
    params = {"<script>alert(1)</script>": torch.zeros(4)}
    plan = fs.make_plan(params, fs.abstract_mesh((2,), ("shard",)), [(".*", fs.fsdp("shard"))])
    for value in (plan, fs.view.plan(plan), fs.view.sharding(plan, "<script>alert(1)</script>")):
        assert "<script" not in value._repr_html_()
    assert "<script>alert(1)</script>" in html(plan)


@pytest.mark.long
def test_pictures() -> None:
    pytest.importorskip("matplotlib")
    plan = fs.make_plan(PARAMS, THREE, RULES, batch=fs.P(("r", "s")))
    figure = fs.view.plan(plan).figure()
    bars = figure.axes[0].patches
    assert sum(bar.get_width() for bar in bars) == sum(fs.view.plan(plan).totals)
    assert figure._repr_png_().startswith(b"\x89PNG")
    drawn = fs.view.sharding(plan, "w").figure()
    assert len(drawn.axes[0].patches) == 8 * 6 and "w [8, 6]" in drawn.axes[0].get_title(loc="left")
