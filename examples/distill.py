"""Distillation: a small student learns from a large teacher, a frozen state that is gathered unit by unit.

Run it as `python examples/distill.py`, or as `torchrun --nproc-per-node 2 examples/distill.py`. A teacher learns
digits. One student learns from the labels of a few digits alone, another from what the teacher says of all of them
(Hinton, Vinyals and Dean 2015). Teacher and student have plans of their own on one mesh.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fshard as fs

try:
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example needs scikit-learn and tqdm: pip install "fshard[examples]"') from None

Model = tuple[fs.Model, fs.Plan]


def distill_step(student: Model, teacher: Model, opt: fs.optim.Optimizer, heat: float) -> Any:
    """A step of a student, whose batch has images and the teacher's state."""
    small, plan = student

    def loss_fn(params: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, told = batch
        return heat**2 * cross_entropy(small.apply(params, images) / heat, (told / heat).softmax(-1))

    ask = fs.make_eval_step(teacher[0].apply, teacher[1])
    grad, update = fs.value_and_grad(loss_fn, plan), fs.make_update(opt, plan)

    def fn(state: fs.TrainState, batch: dict[str, Any]) -> tuple[fs.TrainState, dict[str, Tensor]]:
        told = ask(batch["teacher"], batch["images"])
        loss, grads = grad(state, (batch["images"], told))
        state, metrics = update(state, grads)
        return state, {"loss": loss, "norm": metrics.grad_norm}

    return fs.make_step(fn, plan)


def perceptron(mesh: fs.Mesh, width: int) -> Model:
    """Images (rows, 64) to logits (rows, 10), and where its parameters lie."""
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model = fs.split(nn.Sequential(*layers), units=("0", "2", "4"))
    return model, fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))


def main(args: Namespace, mesh: fs.Mesh) -> None:
    """Train the teacher, and both students."""
    data, draw = load_digits(), torch.Generator().manual_seed(1)
    order = torch.randperm(1797, generator=draw)
    images, labels = torch.tensor(data.data / 16, dtype=torch.float32)[order], torch.tensor(data.target)[order]
    teacher, student = perceptron(mesh, args.width), perceptron(mesh, args.small)

    def train(name: str, model: Model, step: Callable[..., Any], seen: int, extra: dict[str, Any]) -> fs.TrainState:
        state = fs.init_state(model[1], opt, seed=args.seed)
        for _ in tqdm(range(args.steps), desc=name, disable=mesh.rank != 0):
            rows = torch.randint(360, 360 + seen, (args.batch,), generator=draw)
            batch = model[1].local_batch({"images": images[rows], "labels": labels[rows]})
            state, _ = step(state, {k: x.to(mesh.device) for k, x in batch.items()} | extra)
        guess = model[0].apply(fs.unshard(state.params, model[1]), images[:360].to(mesh.device)).argmax(1).cpu()
        right = (guess == labels[:360]).float().mean()
        if mesh.rank == 0:
            print(f"{name}: {right:.1%} of 360 held-out digits right")
        return state

    def by_labels(model: Model) -> Any:
        return fs.make_train_step(
            lambda params, batch: cross_entropy(model[0].apply(params, batch["images"]), batch["labels"]), opt, model[1]
        )

    opt = fs.optim.adamw(fs.optim.schedules.linear(args.lr, 0.0, args.steps), weight_decay=0.0)
    taught = train("teacher", teacher, by_labels(teacher), 1437, {})
    train(f"student of {args.few} labels", student, by_labels(student), args.few, {})
    train("student of the teacher", student, distill_step(student, teacher, opt, args.heat), 1437, {"teacher": taught})


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=1000, help="train steps of the teacher, and again of each student")
    cli.add_argument("--batch", type=int, default=96, help="digits in a step, over all ranks")
    cli.add_argument("--width", type=int, default=256, help="features of the teacher")
    cli.add_argument("--small", type=int, default=16, help="features of a student")
    cli.add_argument("--lr", type=float, default=0.002, help="learning rate")
    cli.add_argument("--few", type=int, default=50, help="labels that the student without a teacher sees")
    cli.add_argument("--heat", type=float, default=2.0, help="temperature of the logits")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and data order")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        main(args, mesh)
