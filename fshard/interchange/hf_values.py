"""Values of Hugging Face models that are no trained leaves of files: buffers, and tables that files lack."""

import copy
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fshard import tree
from fshard.errors import TreeError, lines
from fshard.interchange.hf_names import persistent, unsaved
from fshard.interchange.rename import RenameLike, apply_rules
from fshard.interchange.source import PartSource, TensorSource
from fshard.model.initial_values import Initializer
from fshard.model.position_tables import ModuleTable
from fshard.sharding.plan import Plan


def read_buffers(
    source: TensorSource, module: Any, buffers: Mapping[str, Any] | None, decided: Container[str]
) -> TensorSource:
    """Fill buffers from a source, or compare them with it; returns the rest of the source.

    Args:
        source: the tensors, under the module's names.
        module: the module of ``transformers``, whose buffers a call finds; None for none.
        buffers: the tree to fill; None to compare the module's own.
        decided: names that rules of ``rename=`` decide, which are no buffers.

    Raises:
        TreeError: buffers are misshapen, or not what the files hold.
    """
    held = {} if module is None else persistent(module)
    given = held if buffers is None else {**held, **dict(tree.paths(buffers))}
    found = [name for name in source.tensors if name in given and name not in decided]
    wrong = []
    for name in found:
        here = given[name]
        if tuple(here.shape) != source.tensors[name].shape:
            wrong.append(f"{name}: {list(source.tensors[name].shape)}, the module has {list(here.shape)}")
        elif here.device.type != "meta":
            value = torch.empty(here.shape, dtype=here.dtype, device="cpu")
            source.read(name, [((0,) * here.ndim, value)])
            if buffers is not None:
                here.copy_(value)
            elif not torch.equal(value, here.cpu()):
                wrong.append(f"{name}  {list(here.shape)}")
    if wrong:
        head = f"{source.name} holds other values of buffers, which are no leaves, than the module:"
        remedy = "Give buffers=model.buffers to fill them, or leave them out: rename=[(pattern, None)]."
        raise TreeError(lines(head, wrong, remedy))
    return PartSource(source, frozenset(found))


def own_values(
    module: Any, plan: Plan, source: TensorSource, rename: Sequence[RenameLike]
) -> list[tuple[str, Initializer]]:
    """Rules for leaves that files of a module of ``transformers`` lack, with the values that its own code computes."""
    there = apply_rules(rename, source.tensors, source.name)
    lacking = [path for path in unsaved(module) if path in plan.leaves and path not in there]
    values = {path: _own_value(module, path) for path in sorted(lacking)}
    return [(re.escape(path), ModuleTable(value)) for path, value in values.items() if value is not None]


def _own_value(module: Any, path: str) -> Tensor | None:
    """The values that the module's code gives a parameter; None if its owner has others below it."""
    owner, _, name = path.rpartition(".")
    below = module.get_submodule(owner)
    if any(True for _ in below.children()):
        return None
    twin = copy.deepcopy(below).to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        module._init_weights(twin)
    value = getattr(twin, name)
    return value.detach() if isinstance(value, nn.Parameter) else None
