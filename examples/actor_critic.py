"""Proximal policy optimization on gymnasium's CartPole: an actor and a critic in one state, many updates a step.

Run it as `python examples/actor_critic.py`, or as `torchrun --nproc-per-node 2 examples/actor_critic.py`. Ranks share
the environments. After each round of play some epochs of minibatches follow (Schulman et al. 2017); an epoch is one
step: all its gradients and updates are one schedule, and happen on all ranks or on none.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs

try:
    import gymnasium
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example needs gymnasium and tqdm: pip install "fshard[examples]"') from None

ACTOR, CRITIC = r"actor\..*", r"critic\..*"


def ppo_step(model: fs.Model, opt: fs.optim.Optimizer, plan: fs.Plan, clip: float = 0.2, bonus: float = 0.01) -> Any:
    """A step over a list of minibatches, each of which updates the actor and the critic."""

    def actor_loss(params: Any, rows: dict[str, Tensor]) -> Tensor:
        logs = model.apply(params, rows["obs"], method="actor").log_softmax(-1)
        ratio = (logs.gather(1, rows["action"][:, None])[:, 0] - rows["log"]).exp()
        gain = torch.minimum(ratio * rows["gain"], ratio.clamp(1 - clip, 1 + clip) * rows["gain"])
        return -gain.mean() + bonus * (logs.exp() * logs).sum(-1).mean()

    def critic_loss(params: Any, rows: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model.apply(params, rows["obs"], method="critic")[:, 0], rows["return"])

    actor_grad = fs.value_and_grad(actor_loss, plan, only=ACTOR)
    critic_grad = fs.value_and_grad(critic_loss, plan, only=CRITIC)
    actor_update, critic_update = [fs.make_update(opt, plan, only=part, clip_norm=0.5) for part in (ACTOR, CRITIC)]

    def fn(state: fs.TrainState, minibatches: list[Any]) -> tuple[fs.TrainState, dict[str, Tensor]]:
        for rows in minibatches:
            actor, to_actor = actor_grad(state, rows)
            critic, to_critic = critic_grad(state, rows)
            state, _ = actor_update(state, to_actor)
            state, _ = critic_update(state, to_critic)
        return state, {"actor": actor, "critic": critic}

    return fs.make_step(fn, plan)


def head(out: int, width: int = 64) -> nn.Sequential:
    """Observations (rows, 4) to (rows, out)."""
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))


def play(seeds: range, model: fs.Model, params: Any, draws: Tensor) -> dict[str, Tensor]:
    """Some turns, one for each row of draws (turns, environments), in new environments: what happened in each turn."""
    again = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    envs = gymnasium.make_vec("CartPole-v1", len(seeds), "sync", vector_kwargs=again)
    seen, told = [torch.tensor(envs.reset(seed=list(seeds))[0])], []
    for draw in draws:
        logs = model.apply(params, seen[-1], method="actor").log_softmax(-1)
        action = (draw > logs[:, 0].exp()).long()
        obs, _, dead, over, _ = envs.step(action.numpy())
        told.append((action, logs.gather(1, action[:, None])[:, 0], torch.tensor(dead | over)))
        seen.append(torch.tensor(obs))
    obs, (action, log, done) = torch.stack(seen), map(torch.stack, zip(*told, strict=True))
    values = model.apply(params, obs, method="critic")[..., 0]
    delta = 1.0 + 0.99 * values[1:] * ~done - values[:-1]  # the reward of each turn is 1
    gains = [torch.zeros_like(values[0])]
    for i in reversed(range(len(draws))):  # generalized advantage estimation (Schulman et al. 2016)
        gains.insert(0, delta[i] + 0.99 * 0.95 * ~done[i] * gains[0])
    gain = torch.stack(gains[:-1])
    return {"obs": obs[:-1], "action": action, "log": log, "gain": gain, "return": gain + values[:-1], "done": done}


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=80, help="rounds of 256 turns in 8 environments")
    cli.add_argument("--lr", type=float, default=1e-3, help="learning rate at first")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and actions")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        model = fs.split(nn.ModuleDict({"actor": head(2), "critic": head(1)}), units=("actor.*", "critic.*"))
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))
        opt = fs.optim.adamw(fs.optim.schedules.linear(args.lr, 0.0, 32 * args.steps), weight_decay=0.0)
        state, step = fs.init_state(plan, opt, seed=args.seed), ppo_step(model, opt, plan)
        draw, mine = torch.Generator().manual_seed(args.seed), slice(mesh.rank, None, mesh.size)
        for i in tqdm(range(args.steps), disable=mesh.rank != 0):
            chances, seeds = torch.rand(256, 8, generator=draw)[:, mine], range(8 * i, 8 * i + 8)[mine]
            told = play(seeds, model, fs.unshard(state.params, plan), chances)
            for _ in range(4):
                turns = torch.randperm(256, generator=draw).chunk(8)
                state, _ = step(state, [{k: x[some].flatten(0, 1) for k, x in told.items()} for some in turns])
        told = play(range(1000, 1020), model, fs.unshard(state.params, plan), torch.full((500, 20), 0.5))
        rewards = 1.0 + told["done"].logical_not().cumprod(0)[:-1].sum(0)  # of the first episodes
        if mesh.rank == 0:
            print(f"rewards of 20 new episodes: mean {rewards.mean():.1f} of at most 500, least {rewards.min():.0f}")
