"""Direct preference optimization: a policy learns which of two answers is better, beside a frozen reference.

Run it as `python examples/dpo.py`, or as `torchrun --nproc-per-node 2 examples/dpo.py`. A small network first learns to
write any sequence of digits that climbs or falls by one. In each pair of answers the one that climbs more often is the
better one. The policy learns that from pairs alone (Rafailov et al. 2023); the reference is a state in the batch.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs

try:
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example shows its progress with tqdm: pip install "fshard[examples]"') from None

DIGITS, LENGTH = 12, 16


class Writer(nn.Module):
    """Tokens (rows, time) to the log probability of each answer, (rows,)."""

    def __init__(self, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(DIGITS, width), nn.Linear(width, DIGITS)
        self.blocks = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(depth))

    def logits(self, tokens: Tensor) -> Tensor:
        """Of the next token: (rows, time, DIGITS)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)[0]
        return self.head(x)

    def forward(self, tokens: Tensor) -> Tensor:
        logs = self.logits(tokens[:, :-1]).log_softmax(-1)
        return logs.gather(-1, tokens[:, 1:, None]).sum((1, 2))


def dpo_step(model: fs.Model, opt: fs.optim.Optimizer, plan: fs.Plan, beta: float) -> Any:
    """A step of DPO: its batch has pairs of answers, and the reference, a state that is only read."""

    def logs(params: Any, pairs: tuple[Tensor, Tensor]) -> Tensor:
        better, worse = model.apply(params, torch.cat(pairs)).chunk(2)
        return better - worse

    def loss_fn(params: Any, batch: tuple[Any, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        margin = beta * (logs(params, batch[0]) - batch[1])
        right = (margin > 0).to(margin.dtype)
        return -nn.functional.logsigmoid(margin).mean(), {"right": fs.Mean(right.sum(), right.numel())}

    judge, grad = fs.make_eval_step(logs, plan), fs.value_and_grad(loss_fn, plan, has_aux=True)
    update = fs.make_update(opt, plan, clip_norm=1.0)

    def fn(state: fs.TrainState, batch: dict[str, Any]) -> tuple[fs.TrainState, dict[str, Tensor]]:
        before = judge(batch["reference"], batch["pairs"])
        (loss, aux), grads = grad(state, (batch["pairs"], before))
        state, _ = update(state, grads)
        return state, {"loss": loss, "right": aux["right"]}

    return fs.make_step(fn, plan)


def answers(rows: int, draw: torch.Generator) -> Tensor:
    """Walks around the circle of digits, one up or one down at each step: (rows, LENGTH)."""
    steps = torch.where(torch.rand(rows, LENGTH, generator=draw) < torch.rand(rows, 1, generator=draw), 1, -1)
    return (torch.randint(DIGITS, (rows, 1), generator=draw) + steps.cumsum(1)) % DIGITS


def climbs(tokens: Tensor, by: int = 1) -> Tensor:
    """The share of steps that climb, of each answer: (rows,)."""
    return ((tokens.diff(dim=1) % DIGITS) == by).float().mean(1)


def written(model: fs.Model, params: Any) -> str:
    """What there is in the answers that a model writes."""
    tokens, draw = torch.arange(200)[:, None] % DIGITS, torch.Generator().manual_seed(1)
    for _ in range(LENGTH - 1):
        chances = model.apply(params, tokens, method="logits")[:, -1].softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(chances, 1, generator=draw)), dim=1)
    up, down = climbs(tokens).mean(), climbs(tokens, DIGITS - 1).mean()
    return f"{up:.1%} of its steps climb by one, {down:.1%} fall by one"


def main(args: Namespace, mesh: fs.Mesh) -> None:
    """Learn to write, then which answers are better."""
    model = fs.split(Writer(), units=("blocks.*",))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt, draw = fs.optim.adamw(3e-3, weight_decay=0.0), torch.Generator().manual_seed(args.seed)
    state = fs.init_state(plan, opt, seed=args.seed)
    learn = fs.make_train_step(lambda params, tokens: -model.apply(params, tokens).mean(), opt, plan, clip_norm=1.0)
    for _ in tqdm(range(args.steps), desc="write", disable=mesh.rank != 0):
        state, _ = learn(state, plan.local_batch(answers(args.batch, draw)))
    opt, whole = fs.optim.adamw(3e-4, weight_decay=0.0), fs.unshard(state.params, plan)
    reference, state = fs.init_state(plan, opt, params=whole), fs.init_state(plan, opt, params=whole)
    step, before = dpo_step(model, opt, plan, args.beta), written(model, whole)
    for _ in tqdm(range(args.steps), desc="prefer", disable=mesh.rank != 0):
        one, two = answers(args.batch, draw), answers(args.batch, draw)
        first = (climbs(one) > climbs(two))[:, None]
        pairs = torch.where(first, one, two), torch.where(first, two, one)
        state, metrics = step(state, {"pairs": plan.local_batch(pairs), "reference": reference})
    after = written(model, fs.unshard(state.params, plan))
    if mesh.rank == 0:
        print(f"the last loss {metrics['loss']:.3f}; {metrics['right']:.1%} of its pairs in the right order")
        print(f"reference: {before}\npolicy: {after}")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=400, help="train steps of the reference, and again of the policy")
    cli.add_argument("--batch", type=int, default=96, help="answers, or pairs of them, in a step, over all ranks")
    cli.add_argument("--beta", type=float, default=0.1, help="how much a departure from the reference costs")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and answers")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        main(args, mesh)
