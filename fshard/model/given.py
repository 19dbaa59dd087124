"""What ``fs.split`` refuses of a module before it looks any further."""

from typing import Any

from torch import Tensor, nn

from fshard.errors import PlanError, lines

_HOOKS = {"_backward_hooks": "register_hook", "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook"}
"""Where torch keeps hooks of a tensor, and what puts them there."""


def check_given(module: nn.Module) -> None:
    """Refuse modules whose code a copy would not run, and hooks that no step would call.

    Raises:
        PlanError: ``torch.compile`` has made a module; a parameter or a buffer has hooks.
    """
    compiled = [
        f"{path or 'the module itself'}: {type(below._orig_mod).__name__}, compiled"
        for path, below in module.named_modules()
        if isinstance(getattr(below, "_orig_mod", None), nn.Module)
    ]
    if compiled:
        remedy = (
            "Split the module that was given to torch.compile, and let the step compile its units: "
            "fs.make_train_step(..., compile='inductor')."
        )
        raise PlanError(lines("fs.split(module) takes modules as they were before torch.compile:", compiled, remedy))
    hooked = [
        f"{path}: {', '.join(found)}"
        for path, leaf in [*module.named_parameters(), *module.named_buffers()]
        if (found := _hooks(leaf))
    ]
    if hooked:
        remedy = (
            "A step has no gradient of a whole parameter to call them with. Remove them (handle.remove()), and change "
            "gradients in the optimizer, whose update(...) gets the shards of all of them, or in the loss function."
        )
        raise PlanError(lines("fs.split(module): parameters have hooks of their own:", hooked, remedy))


def _hooks(leaf: Tensor) -> list[str]:
    held: dict[str, Any] = {name: getattr(leaf, name, None) for name in _HOOKS}
    return [_HOOKS[name] for name, hooks in held.items() if hooks]
