"""Rules give each leaf its spec: ``re.fullmatch`` on paths, the first match wins, every leaf needs a match."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, NamedTuple

from fshard.arguments import described
from fshard.errors import PlanError, lines
from fshard.model.precision import Precision
from fshard.patterns import bad_regex, meant_by
from fshard.sharding.kinds import KINDS, SIDES, MemoryKind, Side
from fshard.sharding.spec import P, Shape, Tactic, fsdp
from fshard.sharding.wire import Wire, packed_format

Align = int | Literal["leaf"] | None
"""Where a flat-sharded leaf may be cut: at multiples of this many elements, nowhere, or anywhere."""


@dataclass(frozen=True)
class Rule:
    """One rule: leaves whose whole path matches ``pattern`` live as ``at_rest`` says.

    Args:
        pattern: a regular expression for the whole path.
        at_rest: a spec, or a tactic that makes one from the leaf's shape.
        compute: the spec of the leaf in compute. By default the leaf is gathered over the data axes and stays local on
            every other axis. Expert-parallel leaves stay local on a data axis, and name it here.
        trainable: False freezes the leaf: it gets no gradient and no optimizer state. True trains it even if the
            module's parameter has ``requires_grad=False``. None: as the model says, and every leaf of a plain tree.
            (``fs.split(ignore=)`` leaves parameters out of the plan altogether, as FSDP2's ``ignored_params``.)
        precision: the dtypes of this leaf, instead of the plan's: ``fs.Precision()`` keeps it as it is.
        align: where a flat-sharded leaf may be cut: ``"leaf"`` nowhere, so that one rank holds the whole of it, and
            whole leaves are packed into equal chunks; a number n only at multiples of n elements of the leaf. None:
            anywhere. Some optimizers need it, such as ``fs.optim.muon`` and ``fs.optim.adamw8bit``.
        opt: where the optimizer's state and update live, if over more axes than the leaf: ``at_rest`` with further
            data axes behind its flat ones. ``Rule(".*", P(), opt=P(flat="data"))`` is ZeRO-1 and 2 (Rajbhandari et
            al., 2020): gradients are reduce-scattered, each rank updates its part, and the ranks that hold the same
            parameters exchange their updated parts behind the next forward. HSDP with the optimizer over all
            ranks is ``Rule(".*", fs.fsdp("data"), opt=fs.fsdp(("data", "replica")))``.
        wire: the formats in which this leaf travels, instead of the plan's: ``fs.Wire()`` compresses nothing.
        packed: the format in which a frozen leaf is kept and gathered, ``"fp8_e4m3"``, ``"int8"``, ``"int4"`` or
            ``"nf4"`` (QLoRA, Dettmers et al., 2023), with the elements that share a scale: ``"nf4/64"``. Units read the
            rounded values, in the dtype of compute.
        memory_kind: the memory of parameters and their optimizer state: that of the ``"device"``, the default, or of
            its host: ``"pinned_host"`` (page-locked, which copies beside compute need) or ``"unpinned_host"``. Such
            parameters are copied to the device just before they are gathered, also where they are not sharded; their
            gradients go to the host, and their update runs there (FSDP2's ``CPUOffloadPolicy``).
        opt_memory_kind: the memory of optimizer state, if not that of ``memory_kind``.
        update_on: the side of the update, ``"device"`` or ``"host"``. Tensors on the other side are copied there and
            back. By default the host if parameters and state are both there, else the device.

    >>> fs.Rule("embed.*", fs.P("data"), trainable=False)
    Rule('embed.*', P('data'), trainable=False)
    """

    pattern: str
    at_rest: P | Tactic
    compute: P | None = None
    _: KW_ONLY
    trainable: bool | None = None
    precision: Precision | None = None
    align: Align = None
    opt: P | Tactic | None = None
    wire: Wire | None = None
    packed: str | None = None
    memory_kind: MemoryKind | None = None
    opt_memory_kind: MemoryKind | None = None
    update_on: Side | None = None

    def __repr__(self) -> str:
        said = [f"{f.name}={value!r}" for f in fields(self)[2:] if (value := getattr(self, f.name)) is not None]
        return f"Rule({', '.join([repr(self.pattern), repr(self.at_rest), *said])})"


RuleLike = Rule | tuple[str, P | Tactic]


class Decision(NamedTuple):
    """The rule that decides on one leaf, and its specs: what tactics made, and None where the rule gives none."""

    at_rest: P
    compute: P | None
    rule: Rule
    opt: P | None = None


def match(rules: Sequence[RuleLike], shapes: Mapping[str, Shape]) -> dict[str, Decision]:
    """The decision of the rules on every leaf; each leaf needs a rule, and each rule a leaf."""
    full = [_as_rule(rule, number) for number, rule in enumerate(rules)]
    decided: set[int] = set()
    touched: set[int] = set()
    out: dict[str, Decision] = {}
    unmatched, idle = [], []
    for path, shape in shapes.items():
        hits = [i for i, rule in enumerate(full) if re.fullmatch(rule.pattern, path)]
        touched.update(hits)
        if not hits:
            unmatched.append(f"{path}  {list(shape)}")
            continue
        first = full[hits[0]]
        decided.add(hits[0])
        spec = _spec(first.at_rest, path, shape)
        opt = None if first.opt is None else _spec(first.opt, path, shape)
        out[path] = Decision(spec, first.compute, first, opt)
    if unmatched:
        raise PlanError(
            lines(
                f"{len(unmatched)} of {len(shapes)} leaves are matched by none of the {len(full)} rules:",
                unmatched,
                "Say where they live: add a rule such as (r'.*', P()) for replicated at the end of the list.",
            )
        )
    for i, rule in enumerate(full):
        if i not in decided:
            missed = f"its pattern matches no path{meant_by(rule.pattern, shapes)}"
            why = "every leaf it matches is taken by an earlier rule" if i in touched else missed
            idle.append(f"rules[{i}] {rule.pattern!r}: {why}")
    if idle:
        raise PlanError(
            lines(
                f"{len(idle)} of {len(full)} rules decide no leaf:",
                idle,
                f"Patterns must match a whole path, such as {next(iter(shapes), 'w')!r}; remove the rule or fix it.",
            )
        )
    return out


def _spec(given: Any, path: str, shape: Shape) -> P:
    """The spec that a rule gives a leaf."""
    if given is fsdp:
        raise PlanError("the rules hold the class fs.fsdp itself: name the axis, fs.fsdp('data')")
    spec = given if isinstance(given, P) else given(shape)
    if not isinstance(spec, P):
        raise PlanError(
            f"{path}  {list(shape)}: a tactic must return fs.P(...), and {given!r} returned {described(spec)}"
        )
    return spec


def _as_rule(rule: RuleLike, number: int) -> Rule:
    if isinstance(rule, tuple) and len(rule) == 2:
        rule = Rule(*rule)
    spec = rule.at_rest if isinstance(rule, Rule) else None
    if not isinstance(rule, Rule) or not (isinstance(spec, P) or callable(spec)):
        raise PlanError(
            f"rules[{number}] is {rule!r}: a rule is (pattern, P(...)), (pattern, tactic) or fs.Rule(...). Rules leave "
            "no leaf out: fs.split(module, ignore=pattern) does, and trainable=False freezes one"
        )
    if rule.trainable not in (None, True, False) or not isinstance(rule.precision, Precision | None):
        raise PlanError(
            f"rules[{number}] {rule.pattern!r}: trainable={rule.trainable!r} must be True, False or None, and "
            f"precision={rule.precision!r} fs.Precision(...) or None"
        )
    _check_words(rule, number)
    if rule.align not in (None, "leaf") and not (type(rule.align) is int and rule.align > 0):
        raise PlanError(f"rules[{number}] {rule.pattern!r}: align={rule.align!r} must be 'leaf', an int > 0 or None")
    if problem := bad_regex(rule.pattern):
        raise PlanError(f"rules[{number}]: {problem}")
    return rule


def _check_words(rule: Rule, number: int) -> None:
    if not isinstance(rule.wire, Wire | None):
        raise PlanError(f"rules[{number}] {rule.pattern!r}: wire={rule.wire!r} must be fs.Wire(...) or None")
    try:
        packed_format(rule.packed)
    except PlanError as error:
        raise PlanError(f"rules[{number}] {rule.pattern!r}: {error}") from None
    for name, words in (("memory_kind", KINDS), ("opt_memory_kind", KINDS), ("update_on", SIDES)):
        if getattr(rule, name) not in (None, *words):
            known = ", ".join(map(repr, words))
            raise PlanError(f"rules[{number}] {rule.pattern!r}: {name}={getattr(rule, name)!r} must be one of {known}")
