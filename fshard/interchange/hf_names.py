"""Names in the files of Hugging Face models: the conversions that ``transformers`` makes when it reads and writes.

Files of a mixture have one tensor an expert where the module has all of them in one; others have other prefixes. The
mapping is that of ``transformers``, run on tensors that stand for parts of the files (``woven``): so a rank still reads
only its own part.
"""

import copy
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fshard.checkpoint.tensorfile import TensorMeta
from fshard.errors import TreeError, lines
from fshard.interchange.rename import RenameLike, decided
from fshard.interchange.source import TensorSource
from fshard.interchange.woven import Woven
from fshard.sharding.plan import Plan
from fshard.sharding.spec import Shape


def family(plan: Plan) -> Any:
    """The module of a plan if it is one of ``transformers``, and these have conversions; else None."""
    module, library = plan.code.module, sys.modules.get("transformers.modeling_utils")
    if module is None or library is None or not isinstance(module, library.PreTrainedModel):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5
        return None
    return module if callable(get_model_conversion_mapping) and callable(revert_weight_conversion) else None


class Converted:
    """A source of files under the names of a module of ``transformers``.

    Attributes:
        tensors: by the module's names; by those in the files where user's rules decide, or no leaf has the name.
    """

    def __init__(self, source: TensorSource, module: Any, rename: Sequence[RenameLike] = ()) -> None:
        self.name, self.source = source.name, source
        kept = decided(rename, source.tensors)
        self.made: dict[str, Woven] = {name: _woven(name, source.tensors[name]) for name in kept}
        found = _to_module(module, {name: meta for name, meta in source.tensors.items() if name not in kept}, self.name)
        if both := sorted(found.keys() & self.made.keys()):
            raise TreeError(lines(f"rename= keeps names of {self.name} that others become:", both, "Name them anew."))
        self.made |= found
        self.tensors = {name: TensorMeta(tuple(one.shape), one.dtype) for name, one in self.made.items()}

    def read(self, name: str, parts: Sequence[tuple[Shape, Tensor]]) -> None:
        """Read the boxes of the files that these consist of."""
        for offset, out in parts:
            self.made[name].fill(offset, out, self.source.read)


def _woven(name: str, meta: TensorMeta) -> Woven:
    return Woven.of(name, meta.shape, meta.dtype)


def _to_module(module: Any, stored: Mapping[str, TensorMeta], what: str) -> dict[str, Woven]:
    """The tensors of files by the names of a module, as ``from_pretrained`` converts them."""
    from transformers.core_model_loading import dot_natural_key

    rules = _Rules(module)
    found: list[tuple[str, Woven]] = []
    groups: dict[str, Any] = {}
    for name in sorted(stored, key=dot_natural_key):
        new, pattern = rules.of(name)
        one = _woven(name, stored[name])
        if new not in rules.known:
            found += [] if _left_out(module, new) else [(name, one)]
        elif pattern is None:
            found.append((new, one))
        else:
            group = groups.setdefault(new, copy.deepcopy(rules.converters[pattern]))
            group.add_tensor(new, name, pattern, one)
    for first, group in groups.items():
        found += _run(first, group, module, what).items()
    out: dict[str, Woven] = {}
    clashes = [f"{name}: from {min(one.names)}" for name, one in found if out.setdefault(name, one) is not one]
    if clashes:
        remedy = "Leave one of each out with rename=[(pattern, None)]."
        raise TreeError(lines(f"tensors of {what} have one name in {type(module).__name__}:", clashes, remedy))
    return out


class _Rules:
    """The rules by which ``transformers`` renames tensors of files.

    Attributes:
        known: the names of a module's state dict.
        converters: by the pattern of names that they convert.
    """

    def __init__(self, module: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(module)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self.known: dict[str, Any] = dict(module.state_dict())
        self.converters = {pattern: one for one in converters for pattern in one.source_patterns}
        self._rules, self._prefix = (renamings, converters), module.base_model_prefix

    def of(self, name: str) -> tuple[str, str | None]:
        """The module's name for a name in files, and the pattern of its converter if there is one."""
        from transformers.core_model_loading import rename_source_key

        new, pattern = rename_source_key(name, *self._rules, self._prefix, self.known)
        if new not in self.known and name in self.known:
            new, pattern = rename_source_key(name, [], [], self._prefix, self.known)
        return new, pattern


def _run(first: str, group: Any, module: Any, what: str) -> dict[str, Woven]:
    """Return what a converter of ``transformers`` makes of the tensors that it has collected."""
    names = sorted(name for row in group.layer_targets.values() for name in row)
    try:
        made = group.convert(first, model=module, config=module.config)
    except Exception as error:
        raise TreeError(
            f"{what}: transformers cannot make {first} of {names[0]} and {len(names) - 1} others: "
            f"{type(error).__name__}: {error}. Fetch or write the files again, or name them with rename="
        ) from error
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def _left_out(module: Any, name: str) -> bool:
    """Tell whether the module's class says that files may have a tensor that it has no use for."""
    patterns = set(module._keys_to_ignore_on_load_unexpected or ()) | {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    return any(re.search(pattern, name) for pattern in patterns)


def unsaved(module: Any) -> frozenset[str]:
    """The leaves that files of a module of ``transformers`` lack: tables that its configuration determines."""
    return frozenset(module._keys_to_ignore_on_save or ())


def to_files(module: Any, leaves: Mapping[str, TensorMeta]) -> dict[str, Woven]:
    """The tensors of files by their names, made of leaves as ``save_pretrained`` makes them."""
    from transformers.core_model_loading import revert_weight_conversion

    made: dict[str, Woven] = revert_weight_conversion(
        module, {path: _woven(path, meta) for path, meta in leaves.items()}
    )
    return made


def persistent(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module that its state dict has."""
    held = module.state_dict(keep_vars=True)
    buffers = dict(module.named_buffers())
    return {path: buffers[path] for path in held if path in buffers}
