"""Learning to learn new digits from four examples each: MAML, the gradient through sharded inner steps.

Run it as `python examples/maml.py`, or as `torchrun --nproc-per-node 2 examples/maml.py`. A task is to tell three
digits apart after a few steps of gradient descent on four examples of each. Start values are trained so that these
steps work well (Finn, Abbeel and Levine 2017). The digits 7, 8 and 9 are kept for the end: no task has shown them
before. Every task is cut over all ranks, and so are the parameters, in inner steps, too.
"""

import random
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace

import torch
from torch import Tensor, nn

import fshard as fs

try:
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example needs scikit-learn and tqdm: pip install "fshard[examples]"') from None

WAYS, SHOTS = 3, 4
ROWS = WAYS * SHOTS


class Tasks:
    """Support and query rows of random tasks, this rank's part: ``(tasks, rows, ...)``."""

    def __init__(self, plan: fs.Plan) -> None:
        data = load_digits()
        self.plan, self.images = plan, torch.tensor(data.images / 16, dtype=torch.float32)
        self.places = [torch.tensor(data.target == digit).nonzero().flatten().tolist() for digit in range(10)]

    def __call__(self, digits: list[int], count: int, seed: str, turns: int = 4) -> list[Tensor]:
        draw, images = random.Random(seed), []
        kinds = [(digit, turn) for digit in digits for turn in range(turns)]  # a turned digit is a digit of its own
        for _ in range(count):
            task = []
            for digit, turn in draw.sample(kinds, WAYS):
                rows = draw.sample(self.places[digit], 2 * SHOTS)
                task.append(self.images[rows].rot90(turn, (1, 2)).flatten(1))
            images.append(torch.stack(task).unflatten(1, (2, SHOTS)))
        x = torch.stack(images).transpose(1, 2).flatten(2, 3)  # (tasks, support or query, rows, 64)
        y = torch.arange(WAYS).repeat_interleave(SHOTS).expand(count, ROWS)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))  # every rank gets some of each digit
        mine = self.plan.local_batch(order)
        found = [x[:, 0, mine], y[:, mine], x[:, 1, mine], y[:, mine]]
        return [part.to(self.plan.mesh.device) for part in found]


def main(args: Namespace, mesh: fs.Mesh) -> None:
    """Meta-train, then learn the digits that were kept."""
    wide = args.width
    layers = [nn.Linear(64, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU()]
    model = fs.split(nn.Sequential(*layers, nn.Linear(wide, WAYS)), units=("0", "2", "4", "6"))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))])
    tasks = Tasks(plan)

    def loss_fn(params: dict, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict]:
        logits = model.apply(params, batch[0])
        right = (logits.argmax(-1) == batch[1]).float()
        return nn.functional.cross_entropy(logits, batch[1]), {"right": fs.Mean(right.sum(), right.numel())}

    f = fs.func.sharded_loss(loss_fn, plan, has_aux=True, reshard=False)

    def after_learning(
        params: dict, rate: float, x: Tensor, y: Tensor, query: Tensor, answers: Tensor
    ) -> tuple[Tensor, Tensor]:
        inner = fs.func.differentiable(fs.optim.sgd(rate), plan)
        state = inner.init(params)
        for _ in range(args.inner_steps):
            grads, _ = torch.func.grad(f, has_aux=True)(params, (x, y))
            params, state = inner(params, grads, state)
        loss, aux = f(params, (query, answers))
        return loss, aux["right"]

    over_tasks = torch.vmap(after_learning, (None, None, 0, 0, 0, 0))

    def meta_loss(params: dict, task: list[Tensor], rate: float = args.inner_lr) -> tuple[Tensor, Tensor]:
        losses, right = over_tasks(params, rate, *task)
        return losses.mean(), right.mean()

    def test(params: dict, rate: float = args.inner_lr) -> float:
        with torch.no_grad():
            return meta_loss(params, tasks([7, 8, 9], 100, "test", turns=1), rate)[1].item()

    opt = fs.optim.adamw(args.lr, weight_decay=0.0)
    params = fs.init_state(plan, opt, seed=args.seed).params
    update = fs.func.differentiable(opt, plan)
    state, before = update.init(params), {rate: test(params, rate) for rate in (0.1, 0.3, 1.0, 2.0, 4.0)}
    for i in (bar := tqdm(range(args.steps), disable=mesh.rank != 0)):
        batch = tasks(list(range(7)), args.tasks, f"{args.seed} {i}")
        grads, (loss, right) = torch.func.grad_and_value(meta_loss, has_aux=True)(params, batch)
        params, state = update(params, grads, state)
        if i % 20 == 0:
            bar.set_postfix_str(f"loss {loss:.3f}, right {right:.0%}")
    after = test(params)
    if mesh.rank == 0:
        best = max(before, key=before.__getitem__)
        print(f"7, 8 and 9 after {args.inner_steps} steps on {SHOTS} examples of each ({1 / WAYS:.0%} by chance):")
        print(f"{after:.1%} right from learned start values, with learning rate {args.inner_lr}")
        print(f"{before[best]:.1%} right from random ones, with learning rate {best}, the best of {list(before)}")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=250, help="meta-train steps")
    cli.add_argument("--tasks", type=int, default=16, help="tasks in a step")
    cli.add_argument("--inner-steps", type=int, default=3, help="steps of gradient descent within a task")
    cli.add_argument("--inner-lr", type=float, default=0.4, help="learning rate within a task")
    cli.add_argument("--lr", type=float, default=3e-3, help="learning rate of the start values")
    cli.add_argument("--width", type=int, default=64, help="features of the hidden layer")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and tasks")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        if ROWS % mesh.size:
            raise SystemExit(f"{ROWS} rows of a task cannot be cut over {mesh.size} ranks: use 1, 2, 3, 4, 6 or 12")
        main(args, mesh)
