"""A small model whose linear layers multiply in float8, and runs of it in every form of a step."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

import fshard as fs
from fshard import tree

BF16 = torch.bfloat16
FLOAT8_ROWS = fs.Precision(BF16, products="float8_rowwise", inputs=True)
STEPS, ROWS = 3, 16
RULES: list[Any] = [(r".*", fs.fsdp("data"))]
LR = 0.5

Run = tuple[list[float], dict[str, Tensor]]


class Block(nn.Module):
    """Two linear layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks and a head that is no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 32), nn.Linear(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype))


@functools.cache
def model() -> fs.Model:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return fs.split(Net(), units=("embed", "blocks.*"))


def batch(number: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(number)
    x = torch.randint(0, 16, (ROWS, 4), generator=draw)
    return {"x": x, "y": (x + 1) % 16}


def loss_of(net: Any, params: Any, rows: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(net.apply(params, rows["x"]).float().flatten(0, 1), rows["y"].flatten())


def trained(
    net: fs.Model | None = None,
    *,
    precision: fs.Precision | None = FLOAT8_ROWS,
    rules: list[Any] = RULES,
    steps: int = STEPS,
    **more: Any,
) -> Run:
    """Losses and parameters of a run, on the ranks of the mesh that is there."""
    net = net or model()
    mesh = fs.make_mesh((-1,), ("data",))
    plan = fs.make_plan(net, mesh, rules, precision=precision)
    opt = fs.optim.sgd(LR)
    step = fs.make_train_step(lambda p, rows: loss_of(net, p, rows), opt, plan, **more)
    state = fs.init_state(plan, opt, params=net.params)
    losses = []
    for number in range(steps):
        state, metrics = step(state, {name: plan.local_batch(x) for name, x in batch(number).items()})
        losses.append(float(metrics.loss))
    if more.get("compile") == "fx":
        assert "as it is" not in str(step.units), step.units
        assert net is not model() or str(step.units).count("fx graph 1") == 2, "equal blocks share a graph"
    return losses, dict(tree.paths(fs.unshard(fs.settle(state).params, plan)))


def same(one: Run, other: Run) -> bool:
    return one[0] == other[0] and all(torch.equal(leaf, other[1][path]) for path, leaf in one[1].items())


@functools.cache
def alone() -> Run:
    return trained()


def on_ranks(world: int, **options: Any) -> Run:
    """The run of the first of some played ranks."""
    runs: list[Run] = fs.virtual_mesh((world,), ("any",)).run(lambda _: trained(**options), 0)
    return runs[0]


@functools.cache
def on_two() -> Run:
    """A run on two ranks."""
    return on_ranks(2)
