"""Rename rules: names of leaves in other formats."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fshard.arguments import expect
from fshard.errors import PlanError, TreeError, lines
from fshard.patterns import bad_regex, first_matches, idle

T = TypeVar("T")


@dataclass(frozen=True)
class Rename:
    """A rule: a name that ``pattern`` matches as a whole becomes ``to``.

    Args:
        pattern: a regular expression for the whole name (``re.fullmatch``).
        to: the new name, in which ``\\1`` or ``\\g<name>`` stand for groups of the pattern; None leaves the tensor out.
        transpose: whether the two dims of the tensor are swapped. Hugging Face's GPT-2 stores the weights of its
            ``Conv1D`` as (in, out); ``nn.Linear`` has (out, in).

    >>> rename = fs.io.Rename(r"h\\.(\\d+)\\.mlp\\.c_fc\\.weight", r"blocks.\\1.up.weight", transpose=True)
    >>> rename.of("h.3.mlp.c_fc.weight")
    'blocks.3.up.weight'
    """

    pattern: str
    to: str | None
    transpose: bool = False

    def __post_init__(self) -> None:
        """Check the pattern and the groups that ``to`` names."""
        if problem := bad_regex(self.pattern):
            raise PlanError(f"rename rule ({self.pattern!r}, {self.to!r}): {problem}, for a whole name")
        try:
            if self.to is not None:
                re.sub(self.pattern, self.to, "")  # reads the template even where nothing matches
        except (re.error, TypeError, IndexError) as error:
            raise PlanError(
                f"rename rule ({self.pattern!r}, {self.to!r}): {error}. Give a regular expression for a whole name, "
                f"and a new name in which \\1 stands for its first group; or None to leave the tensor out."
            ) from error

    def of(self, name: str) -> str | None:
        """The new name of a name that the pattern matches."""
        found = re.fullmatch(self.pattern, name)
        return found.expand(self.to) if found is not None and self.to is not None else None


RenameLike = Rename | tuple[str, str | None]


def _rule(number: int, given: Any) -> Rename:
    """One element of ``rename=`` as a rule."""
    rule = Rename(*given) if isinstance(given, tuple) and len(given) in (2, 3) else given
    if not isinstance(rule, Rename):
        raise PlanError(f"rename[{number}] is {rule!r}: a rule is (pattern, new name) or fs.io.Rename(...)")
    return rule


WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""The names under which wrappers of PyTorch hold a module; its own tools take them off."""


def plain_name(name: str) -> str:
    """A name without wrappers of PyTorch, and without the ``module`` of DistributedDataParallel in front.

    >>> plain_name("module._orig_mod.blocks.0._checkpoint_wrapped_module.weight")
    'blocks.0.weight'
    """
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def written_name(name: str, known: Collection[str]) -> str:
    """The name under which PyTorch writes a leaf, without wrappers; its own name if that is another leaf's.

    >>> written_name("blocks.0._checkpoint_wrapped_module.weight", ())
    'blocks.0.weight'
    """
    plain = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    return name if plain in known else plain


def unwrapped(names: Mapping[str, T], known: Collection[str]) -> dict[str, T]:
    """Names of a source, where one is not known but for wrappers, by the known one that it means."""
    meant = {plain_name(name): name for name in known}
    out = {name: value for name, value in names.items() if name in known}
    for name, value in names.items():
        target = meant.get(plain_name(name), name)
        if name not in known:
            out[name if target in out else target] = value
    return out


def decided(rules: Sequence[RenameLike], names: Iterable[str]) -> frozenset[str]:
    """The names that rules decide, as ``apply_rules`` applies them.

    >>> sorted(decided([("a.*", None)], ["ab", "b"]))
    ['ab']
    """
    expect("rename=", [("rules", rules, (list, tuple), "a list of (pattern, new name) or fs.io.Rename(...)")])
    hits = first_matches([_rule(number, given).pattern for number, given in enumerate(rules)], names)
    return frozenset(name for name, hit in hits.items() if hit is not None)


def apply_rules(rules: Sequence[RenameLike], names: Iterable[str], what: str) -> dict[str, tuple[str, bool]]:
    """The old name of each new name, and whether its dims are swapped. The first rule that matches applies.

    Names without a matching rule stay as they are; names that a rule leaves out are not in the result. ``what`` the
    names belong to is for errors.

    Raises:
        PlanError: an invalid rule, or one that applies to no name.
        TreeError: two names become one.
    """
    expect("rename=", [("rules", rules, (list, tuple), "a list of (pattern, new name) or fs.io.Rename(...)")])
    full = [_rule(number, given) for number, given in enumerate(rules)]
    hits = first_matches([rule.pattern for rule in full], names)
    out: dict[str, tuple[str, bool]] = {}
    clashes = []
    for name, hit in hits.items():
        used = None if hit is None else full[hit[0]]
        new = name if used is None else used.of(name)
        if new in out:
            clashes.append(f"{new}: from {out[new][0]} and from {name}")
        elif new is not None:
            out[new] = (name, used is not None and used.transpose)
    unused = [f"rename[{number}] {full[number].pattern!r}" for number in idle(len(full), hits)]
    if unused:
        remedy = f"Patterns must match a whole name, such as {next(iter(hits), '')!r}; earlier rules win."
        raise PlanError(lines(f"rename rules that decide no name of {what}:", unused, remedy))
    if clashes:
        raise TreeError(lines(f"rename= gives tensors of {what} the same name:", clashes, "Make the rules narrower."))
    return out
