"""Modules whose parameters are on the meta device: ``empty_weights`` makes them so, and ``split`` copies them so."""

import contextlib
import copy
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fshard.errors import PlanError, lines
from fshard.model import model_refusals

_HOOKS = {"_backward_hooks": "register_hook", "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook"}
"""The attributes in which torch keeps hooks of a tensor, and the methods that add them."""


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Put parameters of modules that are made inside on the meta device: they have shapes and dtypes, and no memory.

    Buffers keep their values: tables of angles, masks, running statistics. Most of them are computed when a module is
    made, no checkpoint holds them, and ``torch.device("meta")`` would lose them. A parameter exists between its
    creation and its registration, so at most one at a time takes memory. (accelerate has
    ``init_empty_weights(include_buffers=False)`` for the same.)

    The scope covers modules that this thread makes. Initialization of such a parameter does nothing;
    ``fs.init_state`` makes values, shard by shard.

    >>> with fs.empty_weights():
    ...     norm = torch.nn.BatchNorm1d(4)
    >>> norm.weight.device.type, norm.running_var.tolist()
    ('meta', [1.0, 1.0, 1.0, 1.0])
    """
    thread = threading.get_ident()

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        elsewhere = threading.get_ident() != thread
        if elsewhere or parameter is None or parameter.device.type == "meta" or nn.parameter.is_lazy(parameter):
            return None  # the parameter stays; a tied one keeps its identity
        made = torch.empty_like(parameter.detach(), device="meta")
        same = type(parameter)(made, requires_grad=parameter.requires_grad)
        vars(same).update(vars(parameter))
        return same

    handle = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Classes of PyTorch whose modules communicate by themselves."""


def _check_undistributed(module: nn.Module) -> None:
    wrapped = [
        f"{path or 'the module itself'}: {type(below).__name__}"
        for path, below in module.named_modules()
        if any(kind.__name__ in WRAPPERS and kind.__module__.startswith("torch.") for kind in type(below).__mro__)
    ]
    if wrapped:
        remedy = (
            "Split the module that was given to it (.module of a wrapper): gradients are reduced, and parameters "
            "sharded, by the rules of fs.make_plan(model, mesh, rules)."
        )
        raise PlanError(lines("fs.split(module) takes modules that nothing else distributes:", wrapped, remedy))


def check_module(module: nn.Module) -> None:
    """Refuse modules that are compiled or distributed otherwise, and hooks of tensors, which no step would call."""
    compiled = {path: name for path, below in module.named_modules() if (name := _compiled(below))}
    if compiled:
        rows = [
            f"{path or 'the module itself'}: {name}, compiled"
            for path, name in compiled.items()
            if not any(path != above and f"{path}.".startswith(f"{above}." * bool(above)) for above in compiled)
        ]
        remedy = (
            "Split the module that was given to torch.compile, torch.jit.script or torch.jit.trace, and let the step "
            "compile its units: fs.make_train_step(..., compile='inductor')."
        )
        raise PlanError(lines("fs.split(module) takes modules as they were before a compiler:", rows, remedy))
    _check_undistributed(module)
    hooked = [
        f"{path}: {', '.join(found)}"
        for path, leaf in [*module.named_parameters(), *module.named_buffers()]
        if (found := [method for name, method in _HOOKS.items() if getattr(leaf, name, None)])
    ]
    if hooked:
        remedy = (
            "A step has no gradient of a whole parameter to call them with. Remove them (handle.remove()), and change "
            "gradients in the optimizer, whose update(...) gets the shards of all of them, or in the loss function."
        )
        raise PlanError(lines("fs.split(module): parameters have hooks of their own:", hooked, remedy))


def private_copy(module: nn.Module, params: Iterable[Tensor], buffers: Iterable[Tensor]) -> nn.Module:
    """A deep copy whose parameters are on the meta device, and whose buffers are the module's own.

    Binding a tensor writes to dicts alone, so no call changes the module's buffers.
    """
    _check_copyable(module)
    memo: dict[int, Any] = {id(buffer): buffer for buffer in buffers}
    for leaf in params:
        empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        memo[id(leaf)] = nn.Parameter(empty, requires_grad=leaf.requires_grad)
    for below in module.modules():
        # torch does not copy a tensor that has a history; weight_norm leaves such an attribute behind.
        plain = (value for value in vars(below).values() if isinstance(value, Tensor) and not value.is_leaf)
        memo |= {id(value): value.detach().clone() for value in plain}
    try:
        twin = copy.deepcopy(module, dict(memo))
    except Exception as error:
        raise model_refusals.cannot_copy(_uncopyable(module, memo) or [f"{type(module).__name__}: {error}"]) from error
    _check_copy(module, twin, memo)
    for below in twin.modules():
        if isinstance(below, nn.RNNBase):
            # On CUDA it would move the bound tensors into a buffer of its own, away from where their owner has them.
            vars(below)["flatten_parameters"] = _nothing
        if isinstance(below, (nn.Embedding, nn.EmbeddingBag)):
            below.sparse = False  # gradients of leaves are dense
    return twin


def _check_copyable(module: nn.Module) -> None:
    problems = [
        f"{path}: has no shape yet: call the module once before"
        for path, leaf in [*module.named_parameters(), *module.named_buffers()]
        if nn.parameter.is_lazy(leaf)
    ]
    if problems:
        raise model_refusals.cannot_copy(problems)


def _compiled(module: nn.Module) -> str:
    """The class of a module that a compiler has wrapped; empty for one as it was written."""
    if isinstance(module, torch.jit.ScriptModule):
        return str(module.original_name)
    original = getattr(module, "_orig_mod", None)
    return type(original).__name__ if isinstance(original, nn.Module) else ""


def _nothing() -> None:
    pass


def _uncopyable(module: nn.Module, memo: Mapping[int, Any]) -> list[str]:
    """The attributes of submodules that cannot be copied, and why."""
    problems = []
    for path, below in module.named_modules():
        for name, value in vars(below).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception as error:
                problems.append(f"{path}.{name}: {type(value).__name__}: {error}".removeprefix("."))
    return problems


def _check_copy(module: nn.Module, twin: nn.Module, memo: Mapping[int, Any]) -> None:
    """A class with a ``__deepcopy__`` of its own may copy less, or more, than its parameters' twins."""
    ours = dict(twin.named_parameters(remove_duplicate=False))
    theirs = dict(module.named_parameters(remove_duplicate=False))
    wrong = [path for path in {**theirs, **ours} if ours.get(path) is not memo.get(id(theirs.get(path)))]
    if wrong:
        raise model_refusals.cannot_copy([f"{path}: its module is copied in a way of its own" for path in wrong])
