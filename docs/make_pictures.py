"""Make the pictures of the README and of docs/ from real schedules: ``python docs/make_pictures.py``.

The schedules are traced on a mesh of four ranks that needs no processes, for the model of examples/train_gpt.py.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import fshard as fs

ROOT = Path(__file__).parents[1]
PICTURES = {
    "schedule.png": fs.Policy(),
    "schedule-no-reshard.png": fs.Policy(reshard=False),
}


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


def main() -> None:
    """Draw every picture."""
    for name, policy in PICTURES.items():
        fs.view.timeline(trace(policy)).savefig(ROOT / "docs" / "pictures" / name, dpi=150, metadata={"Software": ""})


if __name__ == "__main__":
    main()
