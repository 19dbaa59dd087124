"""Direct preference optimization: a policy learns which of two answers is better, beside a frozen reference.

Run it as `python examples/dpo.py`, or as `torchrun --nproc-per-node 2 examples/dpo.py`. A small network learns to write
sequences of digits that climb or fall by one. From pairs of answers alone it then learns that more climbs are better
(Rafailov et al. 2023). The reference is a state in the batch, which is only read.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
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
    """Tokens (rows, time) to the log probability of each next token, (rows, time, DIGITS)."""

    def __init__(self, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(DIGITS, width), nn.Linear(width, DIGITS)
        self.blocks = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)[0]
        return self.head(x).log_softmax(-1)


def log_prob(model: fs.Model, params: Any, tokens: Tensor) -> Tensor:
    """The log probability of each answer, (rows,)."""
    return model.apply(params, tokens[:, :-1]).gather(-1, tokens[:, 1:, None]).sum((1, 2))


def dpo_step(model: fs.Model, opt: fs.optim.Optimizer, plan: fs.Plan, beta: float) -> Any:
    """A step of DPO: its batch has pairs of answers, and the reference, a state that is only read."""

    def prefers(params: Any, pairs: tuple[Tensor, Tensor]) -> Tensor:
        better, worse = log_prob(model, params, torch.cat(pairs)).chunk(2)
        return better - worse

    def loss_fn(params: Any, batch: tuple[Any, Tensor]) -> Tensor:
        pairs, before = batch
        return -nn.functional.logsigmoid(beta * (prefers(params, pairs) - before)).mean()

    judge, grad = fs.make_eval_step(prefers, plan), fs.value_and_grad(loss_fn, plan)
    update = fs.make_update(opt, plan, clip_norm=1.0)

    def fn(state: fs.TrainState, batch: dict[str, Any]) -> tuple[fs.TrainState, Tensor]:
        before = judge(batch["reference"], batch["pairs"])
        loss, grads = grad(state, (batch["pairs"], before))
        state, _ = update(state, grads)
        return state, loss

    return fs.make_step(fn, plan)


def answers(rows: int, draw: torch.Generator) -> Tensor:
    """Walks around the circle of digits, one up or one down at each step: (rows, LENGTH)."""
    steps = torch.where(torch.rand(rows, LENGTH, generator=draw) < torch.rand(rows, 1, generator=draw), 1, -1)
    return (torch.randint(DIGITS, (rows, 1), generator=draw) + steps.cumsum(1)) % DIGITS


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=400, help="train steps of the reference, and again of the policy")
    cli.add_argument("--batch", type=int, default=96, help="answers, or pairs of them, in a step, over all ranks")
    cli.add_argument("--beta", type=float, default=0.1, help="how much a departure from the reference costs")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and answers")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        model = fs.split(Writer(), units=("blocks.*",))
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))
        opt, draw = fs.optim.adamw(3e-3, weight_decay=0.0), torch.Generator().manual_seed(args.seed)
        learn = fs.make_train_step(lambda params, tokens: -log_prob(model, params, tokens).mean(), opt, plan)
        reference = fs.init_state(plan, opt, seed=args.seed)
        for _ in tqdm(range(args.steps), desc="write", disable=mesh.rank != 0):
            reference, _ = learn(reference, plan.local_batch(answers(args.batch, draw)))
        opt, whole = fs.optim.adamw(3e-4, weight_decay=0.0), fs.unshard(reference.params, plan)
        state, step = fs.init_state(plan, opt, params=whole), dpo_step(model, opt, plan, args.beta)
        for _ in tqdm(range(args.steps), desc="prefer", disable=mesh.rank != 0):
            pair = torch.stack((answers(args.batch, draw), answers(args.batch, draw)))
            order = (pair.diff(dim=-1) % DIGITS == 1).sum(-1, keepdim=True).argsort(0, descending=True)
            pairs = plan.local_batch(tuple(pair.take_along_dim(order, 0)))
            state, loss = step(state, {"pairs": pairs, "reference": reference})
        tokens = answers(1000, draw)
        logs = [model.apply(fs.unshard(each.params, plan), tokens) for each in (reference, state)]
        before, after = [each.exp().gather(-1, (tokens[..., None] + 1) % DIGITS).mean() for each in logs]
        if mesh.rank == 0:
            print(f"the chance that the next digit climbs: {before:.1%} by the reference, {after:.1%} by the policy")
