"""The route of a step: the files, classes and calls of the package that one steady step of two ranks goes through.

``python -m tests.project.route`` prints it for a train step and for a step function that does the same, and
``--list`` also the files in the order in which the step first enters them. A move is a call from one file of the
package into another one.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs
from tests.shared.workers import Pool

PACKAGE = f"{Path(fs.__file__).parent}{os.sep}"
UNITS, WIDTH, STEADY = 4, 32, 5
"""Of the model; and how many steps go before the one that is looked at."""


@dataclass
class Route:
    """What calls have gone through.

    Attributes:
        files: with the number of calls into each, in the order of the first.
        classes: whose methods were called.
        moves: calls from one file into another.
        calls: of functions of the package.
    """

    files: dict[str, int] = field(default_factory=dict)
    classes: set[tuple[str, str]] = field(default_factory=set)
    moves: int = 0
    calls: int = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        """A call, as ``sys.setprofile`` tells of it."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        file = code.co_filename.removeprefix(PACKAGE)
        self.files[file] = self.files.get(file, 0) + 1
        self.calls += 1
        owner, _, _ = code.co_qualname.rpartition(".")
        if owner and not owner.endswith("<locals>"):
            self.classes.add((file, owner))
        self.moves += _caller(frame) not in ("", code.co_filename)


def _caller(frame: Any) -> str:
    """The file of the nearest caller inside of the package; empty if there is none."""
    while (frame := frame.f_back) is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return str(frame.f_code.co_filename)
    return ""


def steps(mesh: fs.Mesh) -> dict[str, tuple[Callable[..., Any], fs.TrainState]]:
    """A train step with AdamW and clipping, and a step function that does the same, each with a state."""
    torch.manual_seed(0)
    model = fs.split(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))), units=["*"])
    plan, opt = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))]), fs.optim.adamw(1e-3)

    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        loss: Tensor = (model.apply(params, batch) - batch).square().mean()
        return loss

    grad, update = fs.value_and_grad(loss_fn, plan), fs.make_update(opt, plan, clip_norm=1.0)

    def by_parts(state: fs.TrainState, batch: Tensor) -> Any:
        loss, grads = grad(state.params, batch)
        state, metrics = update(state, grads)
        return state, {"loss": loss, "grad_norm": metrics.grad_norm}

    made: dict[str, Callable[..., Any]] = {
        "train step": fs.make_train_step(loss_fn, opt, plan, clip_norm=1.0),
        "step of parts": fs.make_step(by_parts, plan),
    }
    return {name: (step, fs.init_state(plan, opt)) for name, step in made.items()}


def routes() -> dict[str, Route]:
    """On a rank: the route of each of ``steps``."""
    found = {}
    with fs.make_mesh((-1,), ("data",)) as mesh:
        batch = torch.ones(8, WIDTH)
        for name, (step, state) in steps(mesh).items():
            for _ in range(STEADY):
                state, metrics = step(state, batch)
            route, before = Route(), sys.getprofile()
            sys.setprofile(route)
            try:
                state, metrics = step(state, batch)
            finally:
                sys.setprofile(before)
            assert metrics is not None
            found[name] = route
    return found


def main() -> None:
    """Print the routes of rank 0 of two."""
    parser = argparse.ArgumentParser(prog="python -m tests.project.route", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the files, and how often each is called")
    given = parser.parse_args()
    pool = Pool(2)
    try:
        found: dict[str, Route] = pool.run(routes)[0]
    finally:
        pool.close()
    print(f"{'':15}{'files':>8}{'classes':>9}{'moves':>8}{'calls':>8}")
    for name, route in found.items():
        print(f"{name:15}{len(route.files):8,}{len(route.classes):9,}{route.moves:8,}{route.calls:8,}")
    for name, route in found.items() if given.list else ():
        print(f"\n{name}", *(f"  {count:5,}  {file}" for file, count in route.files.items()), sep="\n")


if __name__ == "__main__":
    main()
