"""One plain process on the global batch, with any optimizer of ``fs.optim`` on whole leaves: what shards must equal."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.optim.contract import contract


class Plain:
    """Trains whole leaves by autograd, an explicit clip and the optimizer's own update of each whole leaf.

    Args:
        loss_fn: as for ``fs.make_train_step``.
        opt: an optimizer of ``fs.optim``; ``every`` is done here, its inner optimizer gets whole gradients.
        params: the first values, by path.
        clip: the limit of the global norm, or rules ``(pattern, limit)``.
        frozen: paths that are not trained.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        opt: Any,
        params: Mapping[str, Tensor],
        clip: Any = None,
        frozen: Sequence[str] = (),
    ) -> None:
        self.loss_fn, self.clip, self.every = loss_fn, clip, int(getattr(opt, "steps", 1))
        self.opt = opt.opt if self.every > 1 else opt
        self.params = {path: leaf.detach().clone() for path, leaf in params.items()}
        self.trained = [path for path in params if path not in frozen]
        self.hypers = {path: self.opt.hyper(path, tuple(params[path].shape)) for path in self.trained}
        self.states = {path: contract(self.opt).init(self.params[path].view(-1), h) for path, h in self.hypers.items()}
        self.sums = {path: torch.zeros_like(self.params[path]) for path in self.trained}
        self.weight, self.number, self.norm = 0.0, 0, 0.0

    def step(self, batch: Any) -> float:
        """One step on the global batch; its loss."""
        leaves = {path: leaf.clone().requires_grad_(path in self.sums) for path, leaf in self.params.items()}
        result = self.loss_fn(tree.nest(leaves), batch)
        mean = isinstance(result, fs.Mean)
        total, count = (result.total, float(result.count)) if mean else (result, 1.0)
        grads = torch.autograd.grad(total, [leaves[path] for path in self.trained], allow_unused=True)
        for path, grad in zip(self.trained, grads, strict=True):
            if grad is not None:
                self.sums[path] += grad.resolve_conj()
        self.weight += count
        self.number += 1
        if self.number % self.every == 0:
            self._update()
        return total.item() / count

    @torch.no_grad()
    def _update(self) -> None:
        grads = {path: total / self.weight for path, total in self.sums.items()}
        self.norm = _norm(grads.values())
        rules = self.clip if isinstance(self.clip, tuple | list) else [(r".*", self.clip)]
        rule = {path: next(i for i, (p, _) in enumerate(rules) if re.fullmatch(p, path)) for path in grads}
        for path, grad in grads.items():
            limit = rules[rule[path]][1]
            norm = _norm([other for name, other in grads.items() if rule[name] == rule[path]])
            factor = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
            leaf, state = self.params[path].view(-1), self.states[path]
            number, hyper = self.number // self.every, self.hypers[path]
            self.opt.update([leaf], [(grad * factor).reshape(-1)], [state], step=number, hyper=hyper)
        for total in self.sums.values():
            total.zero_()
        self.weight = 0.0


def _norm(grads: Iterable[Tensor]) -> float:
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(grad)) ** 2 for grad in grads))


def difference(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """The largest difference of an element, relative to the largest of its leaf where that is above 1."""
    assert got.keys() == want.keys()
    found = [0.0]
    for path, leaf in want.items():
        if leaf.numel():
            found.append(float((got[path] - leaf).abs().max() / leaf.abs().max().clamp(min=1.0)))
    return max(found)
