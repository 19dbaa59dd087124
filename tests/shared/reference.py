"""Training an example of the zoo as one plain PyTorch process does it on the global batch."""

import torch

from tests.shared import parity
from tests.shared.zoo import Example

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def train(example: Example, opt: str, clip: float | None, steps: int = 20) -> parity.Run:
    """Train from the example's start values.

    Args:
        example: the program.
        opt: ``sgd`` or ``adamw``.
        clip: the global gradient norm to clip to, or None.
        steps: how many.
    """
    leaves = example.plain.parameters
    with torch.no_grad():
        for path, leaf in leaves.items():
            leaf.copy_(example.start[path])
    trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
    rule = torch.optim.SGD(trained, **SGD) if opt == "sgd" else torch.optim.AdamW(trained, **ADAMW)  # type: ignore[arg-type]

    def backward(step: int) -> float:
        return parity.backward(example.plain.loss(example.batch(step)))

    return parity.plain(leaves, rule, backward, steps, clip)
