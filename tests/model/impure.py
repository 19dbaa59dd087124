"""Generated modules whose calls write to the modules: attributes, containers, hooks, in random places."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4


class Node(nn.Module):
    """A linear layer with children, which writes what ``acts`` say before and after it computes."""

    def __init__(self, rng: random.Random, depth: int, shared: dict[str, Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.children_ = nn.ModuleList(Node(rng, depth - 1, shared) for _ in range(rng.randint(0, 2) if depth else 0))
        self.acts = tuple(rng.sample(sorted(ACTS), rng.randint(0, 3)))
        self.total: Any = 0.0
        self.seen: deque[Any] = deque(maxlen=2)
        self.table: dict[str, Any] = {"n": 0, "by": {}}
        self.shared = shared
        self.calls = 0
        self.scale = 1.0
        self.gone = 2.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) * self.scale * getattr(self, "gone", 3.0)
        for act in self.acts:
            ACTS[act](self, y)
        for child in self.children_:
            y = y + child(y)
        return y + self.calls * 0.01 + 0.1 * self.total


def _hook(node: Node, y: Tensor) -> None:
    seen = node.seen
    node.linear.register_forward_hook(lambda module, args, out: out * 1.25)
    seen.append(node.linear(y).mean())


def _removed_hook(node: Node, y: Tensor) -> None:
    handle = node.linear.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    node.total = node.total + node.linear(y).sum()
    handle.remove()


def _child(node: Node, y: Tensor) -> None:
    for child in node.children_:
        child.scale = child.scale * 1.5
        child.linear.mark = y.mean()


def _in_place(node: Node, y: Tensor) -> None:
    node.total = node.total + y.square().mean()
    node.total += y.mean()


def _nested(node: Node, y: Tensor) -> None:
    node.table["by"].setdefault("losses", []).append(y.mean())
    node.table["n"] += 1


ACTS: dict[str, Callable[[Node, Tensor], None]] = {
    "new": lambda node, y: setattr(node, "aux", y.square().mean()),
    "old": lambda node, y: setattr(node, "total", node.total + y.mean()),
    "deque": lambda node, y: node.seen.append(y.mean()),
    "nested": _nested,
    "shared list": lambda node, y: node.shared["losses"].append(y.sum()),
    "shared value": lambda node, y: node.shared.update(last=y.mean()),
    "count": lambda node, y: setattr(node, "calls", node.calls + 1),
    "vars": lambda node, y: vars(node).update(late=(y.mean(), {"a": y.sum()})),
    "child": _child,
    "hook": _hook,
    "removed hook": _removed_hook,
    "deleted": lambda node, y: vars(node).pop("gone", None),
    "in place": _in_place,
    "linear": lambda node, y: setattr(node.linear, "mark", y.mean()),
}


class Root(nn.Module):
    """Nodes, some called twice, and code that writes to them and reads what they wrote."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.shared: dict[str, Any] = {"losses": [], "last": 0.0}
        self.nodes = nn.ModuleList(Node(rng, 1, self.shared) for _ in range(3))
        self.order = [0, 1, 2, *rng.sample(range(3), rng.randint(0, 2))]
        self.pushes = rng.random() < 0.3
        self.hooks = rng.random() < 0.3
        self.log: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.pushes:
            for node in self.nodes:
                for below in node.children_:
                    below.scale = 0.7
                node.scale = 0.9
        if self.hooks:
            for node in self.nodes:
                node.register_forward_hook(lambda module, args, out: self.log.append(out.mean()))
                node.linear.register_forward_hook(lambda module, args, out: out + 0.5)
        for number in self.order:
            x = self.nodes[number](x)
        return x.square().mean() + sum(_weights(self.written()))

    def written(self) -> list[Tensor]:
        """All tensors that calls wrote anywhere, in one order."""
        found: list[Tensor] = []
        for module in self.modules():
            for name in sorted(vars(module)):
                if not name.startswith("_"):
                    _tensors(vars(module)[name], found)
        return found


def _tensors(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, dict):
        for key in sorted(value):
            _tensors(value[key], found)
    elif isinstance(value, list | tuple | deque):
        for x in value:
            _tensors(x, found)


def _weights(values: list[Tensor]) -> list[Tensor]:
    return [x.sum() * (0.01 * (i + 1)) for i, x in enumerate(values)]
