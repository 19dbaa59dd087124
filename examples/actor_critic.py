"""Proximal policy optimization on gymnasium's CartPole: an actor and a critic in one state, many updates a step.

Run it as `python examples/actor_critic.py`, or as `torchrun --nproc-per-node 2 examples/actor_critic.py`. Ranks share
the environments. After each round of play some epochs of minibatches follow (Schulman et al. 2017); an epoch is one
step: all its gradients and updates are one schedule, and happen on all ranks or on none.
"""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from gymnasium.wrappers.vector import RecordEpisodeStatistics
    from tqdm import tqdm
except ImportError:
    raise SystemExit('this example needs gymnasium and tqdm: pip install "fshard[examples]"') from None

ACTOR, CRITIC = r"actor\..*", r"critic\..*"


class ActorCritic(nn.Module):
    """Observations (rows, 4) to logits (rows, 2) by the actor, or to values (rows,) by the critic."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        for head, out in (("actor", 2), ("critic", 1)):
            layers = [nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out)]
            self.add_module(head, nn.Sequential(*layers))

    def forward(self, head: str, obs: Tensor) -> Tensor:
        return getattr(self, head)(obs).squeeze(-1)


def ppo_step(model: fs.Model, opt: fs.optim.Optimizer, plan: fs.Plan, clip: float = 0.2, bonus: float = 0.01) -> Any:
    """A step over a list of minibatches, each of which updates the actor and the critic."""

    def actor_loss(params: Any, rows: dict[str, Tensor]) -> Tensor:
        logs = model.apply(params, "actor", rows["obs"]).log_softmax(-1)
        ratio = (logs.gather(1, rows["action"][:, None])[:, 0] - rows["log"]).exp()
        gain = torch.minimum(ratio * rows["gain"], ratio.clamp(1 - clip, 1 + clip) * rows["gain"])
        return -gain.mean() + bonus * (logs.exp() * logs).sum(-1).mean()

    def critic_loss(params: Any, rows: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model.apply(params, "critic", rows["obs"]), rows["return"])

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


def arena(seeds: range) -> tuple[Any, Any]:
    """Environments that begin again when an episode ends, and their first observations."""
    envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * len(seeds), autoreset_mode=AutoresetMode.SAME_STEP)
    return (kept := RecordEpisodeStatistics(envs)), kept.reset(seed=list(seeds))[0]


def play(envs: Any, obs: Any, model: fs.Model, params: Any, draws: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """One turn for each row of draws (turns, environments): the next observations, and what happened."""
    told = []
    for draw in draws:
        now = torch.tensor(obs)
        logs = model.apply(params, "actor", now).log_softmax(-1)
        action = (draw > logs[:, 0].exp()).long()
        obs, reward, dead, over, info = envs.step(action.numpy())
        after, done, log = torch.tensor(obs), dead | over, logs.gather(1, action[:, None])[:, 0]
        for i in done.nonzero()[0]:  # there, obs is the first of the next episode
            after[i] = torch.tensor(info["final_obs"][i])
        told.append((now, action, log, torch.tensor(reward).float(), torch.tensor(dead), torch.tensor(done), after))
    now, action, log, reward, dead, done, after = map(torch.stack, zip(*told, strict=True))
    values, gain, gains = model.apply(params, "critic", now), torch.zeros(len(draws[0])), []
    delta = reward + 0.99 * model.apply(params, "critic", after) * ~dead - values
    for i in reversed(range(len(draws))):  # generalized advantage estimation (Schulman et al. 2016)
        gains.insert(0, gain := delta[i] + 0.99 * 0.95 * ~done[i] * gain)
    gained = torch.stack(gains)
    return obs, {"obs": now, "action": action, "log": log, "gain": gained, "return": gained + values}


def main(args: Namespace, mesh: fs.Mesh) -> None:
    """Play, learn, repeat."""
    model = fs.split(ActorCritic(), units=("actor.*", "critic.*"))
    plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.adamw(fs.optim.schedules.linear(args.lr, 0.0, 16 * args.steps), weight_decay=0.0)
    state, step = fs.init_state(plan, opt, seed=args.seed), ppo_step(model, opt, plan)
    draw, mine = torch.Generator().manual_seed(args.seed), range(8)[mesh.rank :: mesh.size]
    envs, obs = arena(mine)
    for _ in tqdm(range(args.steps), disable=mesh.rank != 0):
        whole = fs.unshard(state.params, plan)
        obs, told = play(envs, obs, model, whole, torch.rand(128, 8, generator=draw)[:, mine])
        for _ in range(4):
            turns = torch.randperm(128, generator=draw).chunk(4)
            state, _ = step(state, [{k: x[some].flatten(0, 1) for k, x in told.items()} for some in turns])
    envs, obs = arena(range(100, 120))  # all ranks play the same, and take the likelier action
    play(envs, obs, model, fs.unshard(state.params, plan), torch.full((500, 20), 0.5))
    if mesh.rank == 0:
        rewards = torch.tensor(list(envs.return_queue))
        print(f"rewards of the {len(rewards)} episodes that ended within 500 turns of 20 new environments:")
        print(f"mean {rewards.mean():.1f} of at most 500, least {rewards.min():.0f}")


if __name__ == "__main__":
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("--steps", type=int, default=80, help="rounds of 128 turns in 8 environments")
    cli.add_argument("--lr", type=float, default=1e-3, help="learning rate at first")
    cli.add_argument("--seed", type=int, default=0, help="of initial values and actions")
    args = cli.parse_args()
    with fs.make_mesh((-1,), ("data",)) as mesh:
        main(args, mesh)
