"""Warnings about what a trace has seen: most often mistakes."""

import warnings

from torch import Tensor


def tell_untrained(leaves: list[Tensor]) -> None:
    """Say that a loss depends on tensors from outside that the step does not train: most often by mistake."""
    if leaves:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves[:3]) + (", ..." if len(leaves) > 3 else "")
        kinds = " and ".join(sorted({type(leaf).__name__ for leaf in leaves}))
        warnings.warn(
            f"the loss depends on {len(leaves)} leaves ({kinds}) that the step neither trains nor updates, of shape "
            f"{shapes}. A closure or a hook that names a module, such as lambda x: x * self.scale, reads the module "
            f"that was split: use a method, or the module that a hook is given. Call another model, such as a teacher, "
            f"under torch.no_grad()",
            stacklevel=2,
        )


def tell_dropping() -> None:
    """Say that an evaluation runs dropout: ``module.eval()`` after the split, which users know, changes nothing."""
    warnings.warn(
        "an evaluation draws masks, as dropout in training does. A model has the modes of its module at fs.split, and "
        "module.eval() later does not reach it: call model.apply(..., training=False)",
        stacklevel=2,
    )
