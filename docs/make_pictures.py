"""Make the pictures of the README and of docs/ from real schedules: ``python docs/make_pictures.py``.

The schedules are traced on a mesh of four ranks that needs no processes, for the model of examples/train_gpt.py. The
orders of pipelines are those that steps run, in the time that their actions would take.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import fshard as fs
from fshard.pipeline import PipelineOrder, make_order, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
PICTURES = {
    "schedule.png": fs.Policy(),
    "schedule-no-reshard.png": fs.Policy(reshard=False),
}
ORDERS = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
"""The orders that are drawn, each with the stages of a rank."""

COLORS = {"F": ("#3b6ea8", "#a9c4e0"), "B": ("#3f7f5f", "#b3d3c1")}
"""Of a rank's first stage and of its second one."""


def trace(policy: fs.Policy) -> fs.Schedule:
    """The schedule of one step of the example's model."""
    sys.path.insert(0, str(ROOT / "examples"))
    from train_gpt import GPT

    with torch.device("meta"):
        model = fs.split(GPT(depth=6, width=256), units=("blocks.*",))
    mesh = fs.abstract_mesh((4,), ("data",))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))])

    def loss_fn(params: dict, rows: Tensor) -> Tensor:
        logits = model.apply(params, rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    step = fs.make_train_step(loss_fn, fs.optim.adamw(1e-3), plan, schedule=policy)
    return step.trace(torch.zeros(2, 33, dtype=torch.long)).schedule


def draw_orders(ranks: int = 4, microbatches: int = 8) -> None:
    """Draw the orders of pipelines, one below the other on one axis of time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    for ax, (name, chunks) in zip(figure.subplots(len(ORDERS), 1, sharex=True), ORDERS, strict=True):
        draw_order(ax, make_order(name, ranks, microbatches, chunks))
    figure.savefig(ROOT / "docs" / "pictures" / "pipelines.png", dpi=150, metadata={"Software": ""})


def draw_order(ax: "Axes", order: PipelineOrder) -> None:
    """Draw an order: a lane for each rank, a box for each action, with the number of its microbatch."""
    cost = 1 / order.chunks  # a rank has as many layers in every order
    played = times(order, cost, cost, cost)
    for rank, lane in enumerate(order.ranks):
        for action, begin, end in zip(lane, played.starts[rank], played.ends[rank], strict=True):
            pale = action.stage >= len(order.ranks)
            color = COLORS[action.kind][pale]
            ax.barh(rank, end - begin, left=begin, height=0.92, color=color, edgecolor="white", linewidth=0.8)
            style = {"ha": "center", "va": "center", "fontsize": 6.5}
            ax.text((begin + end) / 2, rank, str(action.microbatch), color="#22262e" if pale else "white", **style)
    ax.set_yticks(range(len(order.ranks)), [f"rank {rank}" for rank in range(len(order.ranks))], fontsize=8)
    ax.invert_yaxis()
    ax.set_xticks([])
    ax.set_title(f"{order.name}: forwards blue, backwards green", fontsize=9, loc="left")
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.tick_params(length=0)


def main() -> None:
    """Draw every picture."""
    draw_orders()
    for name, policy in PICTURES.items():
        fs.view.timeline(trace(policy)).savefig(ROOT / "docs" / "pictures" / name, dpi=150, metadata={"Software": ""})


if __name__ == "__main__":
    main()
