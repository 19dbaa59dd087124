"""Which training digits harm the predictions? Influence functions find wrong labels, on sharded parameters.

Run it as `python examples/influence.py`, or as `torchrun --nproc-per-node 2 examples/influence.py`. Some labels are
made wrong. The influence of a training sample on the loss of held-out ones is `-g_test @ inverse(H) @ g_sample` (Koh
and Liang 2017). The inverse is never formed: conjugate gradients need products with the Hessian alone.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree

try:
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example needs scikit-learn and tqdm: pip install "fshard[examples]"') from None

Batch = tuple[Tensor, Tensor]


def main(args: Namespace, mesh: fs.Mesh) -> None:
    """Train, solve, rank."""
    say = print if mesh.rank == 0 else lambda line: None
    data = load_digits()
    draw = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(1797, generator=draw)[:1788]  # what 1, 2, 3 and 4 ranks divide
    images, labels = torch.tensor(data.data / 16)[order].to(mesh.device), torch.tensor(data.target)[order]
    wrong = torch.rand(1428, generator=draw) < args.wrong
    shift = torch.randint(1, 10, (1428,), generator=draw)
    labels[:1428] = torch.where(wrong, (labels[:1428] + shift) % 10, labels[:1428])
    labels = labels.to(mesh.device)

    model = fs.split(nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double(), units=("0", "2"))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))])
    seen = plan.local_batch((images[:1428], labels[:1428]))
    held = plan.local_batch((images[1428:1788], labels[1428:1788]))

    def data_loss(params: dict, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model.apply(params, batch[0]), batch[1])

    def loss_fn(params: dict, batch: Batch) -> Tensor:
        decay = sum((leaf**2).sum() for _, leaf in tree.paths(params))
        return data_loss(params, batch) + 0.5 * args.decay * decay

    opt = fs.optim.adamw(
        fs.optim.schedules.warmup_cosine(0.02, warmup=min(10, args.steps // 4), total=args.steps), weight_decay=0.0
    )
    state, step = fs.init_state(plan, opt, seed=args.seed), fs.make_train_step(loss_fn, opt, plan)
    for _ in (bar := tqdm(range(args.steps), desc="train", disable=mesh.rank != 0)):
        state, metrics = step(state, seen)
    params = state.params
    bar.set_postfix_str(f"loss {metrics.loss:.3f}")

    _, target = fs.value_and_grad(data_loss, plan)(params, held)
    hessian = fs.func.hvp(loss_fn, plan).linearize(params, seen)  # one gradient, for all products
    with tqdm(total=args.solve, desc="solve", disable=mesh.rank != 0) as bar:
        solved = fs.func.cg(
            hessian,
            target,
            plan,
            damping=args.damping,
            maxiter=args.solve,
            callback=lambda found: bar.update(found.iterations - bar.n),
        )
    x, history = solved.x, solved.history
    say(f"conjugate gradients: residual {history[-1] / history[0]:.1e} after {solved.iterations} products")

    gradients = fs.func.per_sample_grad(data_loss, plan)
    whole, scores = dict(tree.paths(fs.unshard(x, plan))), []
    for part in zip(seen[0].split(119), seen[1].split(119), strict=True):
        grads = dict(tree.paths(gradients(params, part)))
        scores.append(sum(g.flatten(1) @ whole[path].flatten() for path, g in grads.items()))
    # Leaving a sample out changes the held-out loss by this much; below zero, it gets better without it.
    score = fs.collectives.all_gather(torch.cat(scores), "data", tiled=True, mesh=mesh).cpu()
    worst, count = score.argsort()[: int(wrong.sum())], int(wrong.sum())
    found = wrong[worst].float().mean().item()
    ranks = torch.empty(1428)
    ranks[score.argsort()] = torch.arange(1428.0)
    clean, bad = (~wrong).sum(), wrong.sum()
    area = 1 - (ranks[wrong].sum() - bad * (bad - 1) / 2) / (clean * bad)
    guess = model.apply(fs.unshard(params, plan), images[1428:]).argmax(1)
    say(f"accuracy on 360 held-out digits: {(guess == labels[1428:]).double().mean():.1%}")
    say(
        f"{count} of 1428 training labels are wrong. Of the {count} most harmful samples {found:.0%} are wrong labels; "
    )
    say(f"by chance it would be {count / 1428:.0%}. Area under the ROC curve: {area:.3f} (0.5 by chance)")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=300, help="train steps, on all samples at once")
    cli.add_argument("--solve", type=int, default=60, help="at most so many steps of conjugate gradients")
    cli.add_argument("--wrong", type=float, default=0.05, help="share of training labels that are made wrong")
    cli.add_argument("--decay", type=float, default=1e-3, help="L2 regularization")
    cli.add_argument("--damping", type=float, default=1e-2, help="added to the Hessian's diagonal")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and wrong labels")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        main(args, mesh)
