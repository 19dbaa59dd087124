"""Step functions over parts, and what each is measured against: peers for ``steps_rank.py``.

All train models of the same 25 MB. The GAN's players have half of the blocks each. DPO's reference is a second model.
"""

import functools
from collections.abc import Callable
from typing import Any

import peers
import torch
from model import GPT, Block, Size, loss_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

import fshard as fs

ADAMW = fs.optim.adamw(**peers.ADAMW)
RADIUS, BETA = 0.05, 0.1
PLAYERS = r"gen\..*", r"dis\..*"


class Alone(peers.Torch):
    """Compute alone: forward and backward of this rank's rows on whole weights, without an update."""

    def update(self) -> None:
        """Nothing."""


class Step:
    """A step of fshard.

    Args:
        train: the step.
        state: the state.
        batch: what the step is given for some rows.
    """

    def __init__(self, train: Any, state: Any, batch: Callable[[Tensor], Any] = lambda rows: rows) -> None:
        self.train, self.state, self.batch = train, state, batch
        self.loss = torch.tensor(0.0)

    def step(self, rows: Tensor) -> None:
        """One step."""
        self.state, metrics = self.train(self.state, self.batch(rows))
        self.loss = metrics["loss"] if isinstance(metrics, dict) else metrics.loss

    @property
    def schedules(self) -> list[fs.Schedule]:
        """Those of the latest step."""
        return [self.train.schedule]


class Both:
    """Two steps, one after the other."""

    def __init__(self, one: Step, two: Step) -> None:
        self.parts = one, two
        self.loss = torch.tensor(0.0)

    def step(self, rows: Tensor) -> None:
        """A step of each."""
        for part in self.parts:
            part.step(rows)
        self.loss = self.parts[1].loss

    @property
    def schedules(self) -> list[fs.Schedule]:
        """Those of the latest steps."""
        return [schedule for part in self.parts for schedule in part.schedules]


def planned(module: nn.Module, *units: str, mesh: fs.Mesh | None = None, **options: Any) -> tuple[fs.Model, fs.Plan]:
    """A module as a function, and its plan: all ranks share all leaves."""
    model = fs.split(module, units=units or ("blocks.*",))
    mesh = mesh or fs.make_mesh((-1,), ("shard",))
    return model, fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))], **options)


def loss_with(model: fs.Model) -> Callable[[Any, Tensor], Tensor]:
    """The loss of a GPT."""
    return lambda params, rows: loss_of(model.apply(params, rows[:, :-1]), rows)


def train_step(module: nn.Module, clip: float | None = None, precision: Any = None, **options: Any) -> Step:
    """The ready-made step."""
    model, plan = planned(module, precision=precision)
    train = fs.make_train_step(loss_with(model), ADAMW, plan, clip_norm=clip, **options)
    return Step(train, fs.init_state(plan, ADAMW, params=model.params))


def by_parts(module: nn.Module, clip: float | None = None, precision: Any = None, **options: Any) -> Step:
    """The same step, written by hand."""
    model, plan = planned(module, precision=precision)
    grad = fs.value_and_grad(loss_with(model), plan, **options)
    update = fs.make_update(ADAMW, plan, clip_norm=clip)

    def fn(state: fs.TrainState, rows: Tensor) -> tuple[fs.TrainState, dict[str, Tensor]]:
        loss, grads = grad(state, rows)
        state, metrics = update(state, grads)
        return state, {"loss": loss, "norm": metrics.grad_norm}

    return Step(fs.make_step(fn, plan), fs.init_state(plan, ADAMW, params=model.params))


def sam(module: nn.Module) -> Step:
    """Sharpness-aware minimization: the gradient at weights that have gone up the first gradient."""
    model, plan = planned(module)
    grad, update = fs.value_and_grad(loss_with(model), plan), fs.make_update(ADAMW, plan)

    def fn(state: fs.TrainState, rows: Tensor) -> tuple[fs.TrainState, dict[str, Tensor]]:
        loss, grads = grad(state, rows)
        near = fs.tree.add(state.params, grads, RADIUS / (fs.tree.norm(grads, plan) + 1e-12))
        _, grads = grad(near, rows)
        state, _ = update(state, grads)
        return state, {"loss": loss}

    return Step(fs.make_step(fn, plan), fs.init_state(plan, ADAMW, params=model.params))


@fs.unit
def climbed(params: Any, up: Any, size: Tensor) -> Any:
    """The parameters of a block, moved up a gradient. As a unit it is gathered, and reduced, block by block."""
    return fs.tree.map(lambda p, g: p + size * g, params, up)


@fs.unit
def copied(params: Any) -> Any:
    """The parameters of a block, as they are."""
    return fs.tree.map(torch.clone, params)


def by_block(fn: Callable[..., Any], *trees: Any) -> Any:
    """``fn`` of the subtrees of each block of a GPT, and of all other leaves."""
    rest = fn(*({name: value for name, value in tree.items() if name != "blocks"} for tree in trees))
    return {**rest, "blocks": {name: fn(*(tree["blocks"][name] for tree in trees)) for name in trees[0]["blocks"]}}


def sam_own(module: nn.Module) -> Step:
    """The same with the worst point of each rank's own rows: one gather, one reduction."""
    model, plan = planned(module)
    loss_fn = loss_with(model)

    def own(params: Any, rows: Tensor) -> Tensor:
        mine = fs.tree.map(lambda p: p.requires_grad_(), by_block(copied, fs.stop_gradient(params)))
        up = torch.autograd.grad(loss_fn(mine, rows), fs.tree.leaves(mine))
        size = RADIUS / torch.stack([g.norm() for g in up]).norm()
        climb = functools.partial(climbed, size=size)
        return loss_fn(by_block(climb, params, fs.tree.unflatten(fs.tree.flatten(mine)[1], up)), rows)

    policy = fs.Policy(prefetch=2, reduces=2, reshard=False)
    return Step(fs.make_train_step(own, ADAMW, plan, schedule=policy), fs.init_state(plan, ADAMW, params=model.params))


class Players(nn.Module):
    """A generator of sequences of embeddings, and a discriminator that tells them from those of a table."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        half = size.depth // 2
        self.gen = nn.Sequential(nn.Embedding(size.vocabulary, size.width), *(Block(size) for _ in range(half)))
        self.dis = nn.Sequential(*(Block(size) for _ in range(half)), nn.Linear(size.width, 1))
        self.register_buffer("table", torch.randn(size.vocabulary, size.width))

    def forward(self, rows: Tensor, player: str) -> Tensor:
        """The loss of a player."""
        if player == "gen":
            return F.softplus(-self.dis(self.gen(rows))).mean()
        fake, real = self.gen(rows).detach(), F.embedding(rows, self.table)
        return F.softplus(self.dis(fake)).mean() + F.softplus(-self.dis(real)).mean()


def player(model: fs.Model, name: str) -> Callable[[Any, Tensor], Tensor]:
    """The loss of a player."""
    return lambda params, rows: model.apply(params, rows[:, :-1], player=name)


def gan(module: nn.Module) -> Step:
    """Two losses, two updates, one plan: both players move at once."""
    model, plan = planned(players(size_of(module)), "gen.*", "dis.*")
    parts = [
        (fs.value_and_grad(player(model, name), plan, only=only), fs.make_update(ADAMW, plan, only=only))
        for name, only in zip(("dis", "gen"), PLAYERS[::-1], strict=True)
    ]

    def fn(state: fs.TrainState, rows: Tensor) -> tuple[fs.TrainState, dict[str, Tensor]]:
        found = [grad(state, rows) for grad, _ in parts]
        for (_, update), (_, grads) in zip(parts, found, strict=True):
            state, _ = update(state, grads)
        return state, {"loss": found[1][0]}

    return Step(fs.make_step(fn, plan), fs.init_state(plan, ADAMW, params=model.params))


def gan_apart(module: nn.Module) -> Both:
    """A train step for each player, on a plan in which the other's leaves are frozen."""
    model, plan = planned(players(size_of(module)), "gen.*", "dis.*")

    def step(name: str, only: str) -> Step:
        own = plan.only(only)
        train = fs.make_train_step(player(model, name), ADAMW, own)
        return Step(train, fs.init_state(own, ADAMW, params=model.params))

    return Both(step("dis", PLAYERS[1]), step("gen", PLAYERS[0]))


def dpo(module: nn.Module) -> Step:
    """Direct preference optimization: the frozen reference is a state in the batch."""
    model, plan = planned(module)
    fixed, theirs = planned(module.requires_grad_(False), mesh=plan.mesh)
    module.requires_grad_(True)
    reference = fs.init_state(theirs, ADAMW, params=fixed.params)
    score = fs.make_eval_step(lambda params, rows: log_ratio(fixed, params, rows), theirs)
    grad = fs.value_and_grad(
        lambda params, batch: -F.logsigmoid(BETA * (log_ratio(model, params, batch[0]) - batch[1])).mean(), plan
    )
    update = fs.make_update(ADAMW, plan)

    def fn(state: fs.TrainState, batch: tuple[fs.TrainState, Tensor]) -> tuple[fs.TrainState, dict[str, Tensor]]:
        reference, rows = batch
        loss, grads = grad(state, (rows, score(reference, rows)))
        state, _ = update(state, grads)
        return state, {"loss": loss}

    step = fs.make_step(fn, plan)
    return Step(step, fs.init_state(plan, ADAMW, params=model.params), lambda rows: (reference, rows))


def log_ratio(model: fs.Model, params: Any, rows: Tensor) -> Tensor:
    """How much likelier each row is than the one behind it, by a model: log-probabilities, (batch,)."""
    logits = model.apply(params, rows[:, :-1]).log_softmax(-1)
    found = logits.gather(-1, rows[:, 1:, None]).sum((1, 2))
    return found - found.roll(1)


def size_of(module: nn.Module) -> Size:
    """The size of a GPT."""
    assert isinstance(module, GPT)
    block = module.blocks[0]
    return Size(len(module.blocks), module.embed.embedding_dim, block.heads, module.place.num_embeddings)


def players(size: Size) -> Players:
    """The players, with the same weights in every process."""
    torch.manual_seed(0)
    return Players(size)


PEERS: dict[str, Callable[[nn.Module], Any]] = {
    "alone": Alone,
    "train step": train_step,
    "by parts": by_parts,
    "train step clip": lambda module: train_step(module, peers.CLIP),
    "by parts clip": lambda module: by_parts(module, peers.CLIP),
    "sam": sam,
    "sam own": sam_own,
    "gan": gan,
    "gan apart": gan_apart,
    "dpo": dpo,
}
"""By name."""

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": peers.CLIP},
    "accumulate": {"clip": peers.CLIP, "accumulate": 2},
    "remat": {"remat": "all"},
    "fx": {"compile": "fx"},
    "bfloat16": {"clip": peers.CLIP, "precision": fs.Precision(torch.bfloat16, torch.bfloat16)},
}
"""Ways to make a train step that must have the same bits as the same parts by hand."""
