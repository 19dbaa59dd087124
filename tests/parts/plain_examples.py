"""The steps of examples/ in plain PyTorch, on whole tensors and the global batch, and what they are given."""

import copy
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, mse_loss, softplus

FOLDER = Path(__file__).parents[2] / "examples"
STEPS, ROWS = 3, 12


def example(name: str) -> Any:
    """An example as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def plain_optimizer(opt: str, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The same rule of PyTorch."""
    if opt == "adamw":
        return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def perceptron(seed: int = 0, inner: int = 7, out: int = 3) -> nn.Sequential:
    """Rows (rows, 5) to (rows, out)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, inner), nn.Tanh(), nn.Linear(inner, out)).double()


def rows(seed: int, many: int = ROWS) -> tuple[Tensor, Tensor]:
    """A global batch: numbers (rows, 5), and labels (rows, 2) of three kinds."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(many, 5, generator=draw, dtype=torch.float64)
    return x, torch.randint(3, (many, 2), generator=draw)


def slopes(loss: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of a loss."""
    return list(torch.autograd.grad(loss, params))


def clipped(grads: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Gradients of a norm of at most ``limit``."""
    size = norm(grads)
    return [g * min(1.0, limit / (float(size) + 1e-6)) for g in grads]


def norm(grads: Sequence[Tensor]) -> Tensor:
    """Of all of them."""
    return torch.stack([g.square().sum() for g in grads]).sum().sqrt()


def move(opt: torch.optim.Optimizer, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """An update."""
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    opt.step()


def shift(params: Sequence[Tensor], grads: Sequence[Tensor], by: Any) -> None:
    """Add to parameters in place."""
    with torch.no_grad():
        for p, g in zip(params, grads, strict=True):
            p += by * g


def result(net: nn.Module, told: list[list[Tensor]]) -> Any:
    """What ``Sharded.run`` returns."""
    return {path: p.detach() for path, p in net.named_parameters()}, [
        [float(x.detach()) for x in each] for each in told
    ]


def sam(opt: str) -> Any:
    net, told = perceptron(), []
    params = list(net.parameters())
    rule = plain_optimizer(opt, params)
    for i in range(STEPS):
        x, y = rows(i)
        loss = cross_entropy(net(x), y[:, 0])
        grads = slopes(loss, params)
        kept, size = [p.detach().clone() for p in params], norm(grads)
        shift(params, grads, 0.3 / size)
        near = cross_entropy(net(x), y[:, 0])
        grads = slopes(near, params)
        for p, old in zip(params, kept, strict=True):
            p.data.copy_(old)
        move(rule, params, grads)
        told.append([loss, near])
    return result(net, told)


def players() -> Any:
    """A small pair."""
    torch.manual_seed(0)
    return example("gan").players(6).double()


def points(seed: int) -> dict[str, Tensor]:
    """What a GAN is given."""
    draw = torch.Generator().manual_seed(seed)
    real, noise = (torch.randn(ROWS, wide, generator=draw, dtype=torch.float64) for wide in (2, 8))
    return {"real": real, "noise": noise}


def gan(opt: str) -> Any:
    net, told = players(), []
    gen, dis = list(net["gen"].parameters()), list(net["dis"].parameters())
    rules = plain_optimizer(opt, gen), plain_optimizer(opt, dis)
    for i in range(STEPS):
        batch = points(i)
        fake = net["gen"](batch["noise"])
        tell = softplus(-net["dis"](batch["real"])).mean() + softplus(net["dis"](fake.detach())).mean()
        fool = softplus(-net["dis"](fake)).mean()
        to_dis, to_gen = slopes(tell, dis), slopes(fool, gen)
        move(rules[0], gen, to_gen)
        move(rules[1], dis, to_dis)
        told.append([tell, fool])
    return result(net, told)


def both_heads() -> Any:
    """A small actor and critic."""
    torch.manual_seed(0)
    head = example("actor_critic").head
    return nn.ModuleDict({"actor": head(2, 6), "critic": head(1, 6)}).double()


def turns(seed: int) -> list[dict[str, Tensor]]:
    """Two minibatches."""
    draw, out = torch.Generator().manual_seed(seed), []
    for _ in range(2):
        obs = torch.randn(ROWS, 4, generator=draw, dtype=torch.float64)
        log, gain, back = torch.randn(3, ROWS, generator=draw, dtype=torch.float64)
        action = torch.randint(2, (ROWS,), generator=draw)
        out.append({"obs": obs, "action": action, "log": -log.abs(), "gain": gain, "return": back})
    return out


def actor_critic(opt: str) -> Any:
    net, told = both_heads(), []
    actor, critic = list(net["actor"].parameters()), list(net["critic"].parameters())
    rules = plain_optimizer(opt, actor), plain_optimizer(opt, critic)
    for i in range(STEPS):
        for part in turns(i):
            chances = torch.distributions.Categorical(logits=net["actor"](part["obs"]))
            ratio = (chances.log_prob(part["action"]) - part["log"]).exp()
            gain = torch.where(part["gain"] > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8)) * part["gain"]
            loss = -gain.mean() - 0.01 * chances.entropy().mean()
            error = mse_loss(net["critic"](part["obs"])[:, 0], part["return"])
            to_actor, to_critic = clipped(slopes(loss, actor), 0.5), clipped(slopes(error, critic), 0.5)
            move(rules[0], actor, to_actor)
            move(rules[1], critic, to_critic)
        told.append([loss, error])
    return result(net, told)


def writer(seed: int) -> Any:
    """A small language model."""
    torch.manual_seed(seed)
    return example("dpo").Writer(8, 1).double()


def preferences(seed: int) -> tuple[Tensor, Tensor]:
    """Pairs of answers."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(12, (2, ROWS, 16), generator=draw))  # type: ignore[return-value]


def dpo(opt: str) -> Any:
    net, reference, told = writer(0), writer(1), []
    params = list(net.parameters())
    rule = plain_optimizer(opt, params)

    def prefers(net: nn.Module, better: Tensor, worse: Tensor) -> Tensor:
        chances = [net(x).exp()[:, :-1].gather(-1, x[:, 1:, None]).squeeze(-1) for x in (better, worse)]
        return chances[0].prod(-1).log() - chances[1].prod(-1).log()

    for i in range(STEPS):
        better, worse = preferences(i)
        before = prefers(reference, better, worse).detach()
        loss = -logsigmoid(0.5 * (prefers(net, better, worse) - before)).mean()
        move(rule, params, clipped(slopes(loss, params), 1.0))
        told.append([loss])
    return result(net, told)


def distill(opt: str) -> Any:
    net, teacher, told = perceptron(), perceptron(1, 11), []
    params = list(net.parameters())
    rule = plain_optimizer(opt, params)
    for i in range(STEPS):
        x, _ = rows(i)
        chances = (teacher(x).detach() / 2).softmax(-1)
        loss = 4 * -(chances * (net(x) / 2).log_softmax(-1)).sum(-1).mean()
        grads = slopes(loss, params)
        move(rule, params, grads)
        told.append([loss, norm(grads)])
    return result(net, told)


def pcgrad(opt: str) -> Any:
    net, told = perceptron(), []
    params = list(net.parameters())
    rule = plain_optimizer(opt, params)
    for i in range(STEPS):
        x, y = rows(i)
        losses = [cross_entropy(net(x), y[:, task]) for task in (0, 1)]
        a, b = (torch.cat([g.flatten() for g in slopes(loss, params)]) for loss in losses)
        mine, other, against = a.clone(), b.clone(), bool(a @ b < 0)
        if against:
            mine, other = a - (a @ b) / (b @ b) * b, b - (a @ b) / (a @ a) * a
        split = (mine + other).split([p.numel() for p in params])
        move(rule, params, [g.view_as(p) for g, p in zip(split, params, strict=True)])
        told.append([torch.tensor(against), *losses])
    return result(net, told)


def tasks(seed: int) -> list[list[Any]]:
    """Two tasks of three batches each."""
    return [[rows(100 * seed + 10 * task + turn) for turn in range(3)] for task in range(2)]


def reptile(opt: str) -> Any:
    net, told = perceptron(), []
    params = list(net.parameters())
    rule = plain_optimizer(opt, params)
    for i in range(STEPS):
        back, losses = [torch.zeros_like(p) for p in params], []
        for task in tasks(i):
            learner = copy.deepcopy(net)
            for x, y in task:
                loss = cross_entropy(learner(x), y[:, 0])
                shift(list(learner.parameters()), slopes(loss, list(learner.parameters())), -0.1)
            losses.append(loss)
            shift(back, [p - q for p, q in zip(params, learner.parameters(), strict=True)], 0.5)
        back = [b.detach() for b in back]
        move(rule, params, back)
        told.append([*losses, norm(back)])
    return result(net, told)


def lbfgs(opt: str) -> Any:
    net, told = perceptron(), []
    x, y = rows(0)
    params = list(net.parameters())

    def at(point: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(point, params)
        return cross_entropy(net(x), y[:, 0])

    def slope(point: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in slopes(at(point), params)])

    point = nn.utils.parameters_to_vector(params).detach()
    grad, moves = slope(point), list[tuple[Tensor, Tensor]]()
    for _ in range(8):
        way, sizes = grad, []
        for s, c in reversed(moves):
            sizes.append((s @ way) / (s @ c))
            way = way - sizes[-1] * c
        way = way * ((moves[-1][0] @ moves[-1][1]) / (moves[-1][1] @ moves[-1][1]) if moves else 1 / grad.norm())
        for (s, c), size in zip(moves, reversed(sizes), strict=True):
            way = way + (size - (c @ way) / (s @ c)) * s
        before, length = at(point), 1.0
        while length > 0.125 and at(point - length * way) > before - 1e-4 * length * (grad @ way):
            length /= 2
        following = slope(point - length * way)
        moves = [*moves, (-length * way, following - grad)][-3:]
        point, grad = point - length * way, following
        told.append([torch.tensor(length), at(point)])
    return result(net, told)


def newton_direction(net: nn.Module, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and three steps of conjugate gradients for the damped Gauss-Newton matrix, as one vector."""
    leaves = dict(net.named_parameters())
    at = torch.cat([leaf.detach().flatten() for leaf in leaves.values()])

    def outputs(vector: Tensor) -> Tensor:
        parts = vector.split([leaf.numel() for leaf in leaves.values()])
        given = {name: part.view(leaf.shape) for (name, leaf), part in zip(leaves.items(), parts, strict=True)}
        found: Tensor = torch.func.functional_call(net, given, (x,))
        return found

    def of(out: Tensor) -> Tensor:
        return cross_entropy(out, labels)

    out, pull = torch.func.vjp(outputs, at)
    along = rest = pull(torch.func.grad(of)(out))[0]
    square, found = rest @ rest, torch.zeros_like(rest)
    for _ in range(3):
        moved = torch.func.jvp(outputs, (at,), (along,))[1]
        bent = pull(torch.func.jvp(torch.func.grad(of), (out,), (moved,))[1])[0] + 0.1 * along
        far = square / (along @ bent)
        found, rest = found + far * along, rest - far * bent
        before, square = square, rest @ rest
        along = rest + square / before * along
    return of(out), found


def newton_cg(opt: str) -> Any:
    net, told = perceptron(), []
    params = list(net.parameters())
    rule = plain_optimizer(opt, params)
    for i in range(STEPS):
        x, y = rows(i)
        loss, found = newton_direction(net, x, y[:, 0])
        parts = found.split([p.numel() for p in params])
        move(rule, params, [part.view(p.shape) for part, p in zip(parts, params, strict=True)])
        told.append([loss])
    return result(net, told)


PLAIN = {f.__name__: f for f in (sam, gan, actor_critic, dpo, distill, pcgrad, reptile, lbfgs, newton_cg)}
