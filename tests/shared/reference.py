"""Training as one plain PyTorch process does it on the global batch: what every sharded run must equal."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.shared.zoo import Example

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@dataclass(frozen=True)
class Result:
    """The loss and the gradient norm (before clipping) of each step, and the parameters after the last."""

    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]


def train(example: Example, opt: str, clip: float | None, steps: int = 20) -> Result:
    """Train from the example's start values.

    A leaf that a step does not use has gradient zero, as in JAX, and decays like any other; PyTorch's own
    optimizers would leave it out.

    Args:
        example: the program.
        opt: ``sgd`` or ``adamw``.
        clip: the global gradient norm to clip to, or None.
        steps: how many.
    """
    with torch.no_grad():
        for path, leaf in example.plain.parameters.items():
            leaf.copy_(example.start[path])
    trained = [leaf for leaf in example.plain.parameters.values() if leaf.requires_grad]
    rule = torch.optim.SGD(trained, **SGD) if opt == "sgd" else torch.optim.AdamW(trained, **ADAMW)  # type: ignore[arg-type]
    losses, norms = [], []
    for step in range(steps):
        for leaf in trained:
            leaf.grad = torch.zeros_like(leaf)
        loss = example.plain.loss(example.batch(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, float("inf") if clip is None else clip)
        rule.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return Result(losses, norms, {k: v.detach().clone() for k, v in example.plain.parameters.items()})
