"""Optimizers made of optimizers: different rules for different leaves, and changes of gradients in front of a rule."""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from fshard.arguments import expect
from fshard.optim import checks
from fshard.optim.base import Optimizer, Rate, State, States, Tensors, rate, unscale
from fshard.optim.contract import Contract, altered, at_step, contract, with_rate
from fshard.optim.form import Form, Grain, LeafInfo
from fshard.patterns import meant_by
from fshard.torch_internals import foreach_add_, foreach_clamp_max_, foreach_clamp_min_, foreach_mul_

ANY = r"(?s:.*)"
"""Matches every path. A rule of this pattern without an optimizer may decide no leaf."""

REST = -1
"""Stands for a rule's number where a leaf stays as it is."""

Choice = tuple[int, Any]
"""The number of a leaf's rule, and the ``hyper`` of that rule's optimizer."""


@dataclass(frozen=True)
class partition:  # noqa: N801 - reads as the function it is in a train script
    """Different optimizers for different leaves, by path (``optax.multi_transform``).

    Leaves of several optimizers may share a group: each leaf has the buffers of its own optimizer alone.

    Args:
        rules: pairs of a pattern, for ``re.fullmatch`` on paths, and an optimizer, or None for leaves that stay as they
            are. The first match wins.

    Raises:
        PlanError: invalid patterns or optimizers. From ``fs.init_state`` and ``fs.make_train_step``: a trained
            leaf that no pattern matches, or a pattern that decides no trained leaf.

    >>> opt = fs.optim.partition([(r".*bias", fs.optim.sgd(0.1)), (r".*", fs.optim.adamw(1e-3, weight_decay=0.1))])
    >>> opt.hyper("head.bias", (10,)), opt.hyper("head.weight", (10, 4))
    ((0, 0.0), (1, 0.1))
    """

    rules: tuple[tuple[str, Optimizer | None], ...]

    def __init__(self, rules: Sequence[tuple[str, Optimizer | None]]) -> None:
        expect("fs.optim.partition(rules)", [("rules", rules, (list, tuple), "a list of (pattern, optimizer) pairs")])
        problems = [] if rules else ["rules = []: give at least one (pattern, optimizer)"]
        for i, entry in enumerate(rules):
            if not isinstance(entry, tuple) or len(entry) != 2:
                problems.append(f"rules[{i}] = {entry!r}: must be a pair (pattern, optimizer)")
                continue
            problems += checks.pattern(f"rules[{i}][0]", entry[0])
            problems += [] if entry[1] is None else checks.optimizer(f"rules[{i}][1]", entry[1])
        if not problems and all(opt is None for _, opt in rules):
            problems.append("rules: none of them has an optimizer")
        checks.require(self, *problems)
        vars(self).update(rules=tuple(rules))

    @property
    def lr(self) -> Rate:
        """The learning rate of the first optimizer; asking for it checks all of them."""
        opts = [opt for _, opt in self.rules if opt is not None]
        return lambda step: [rate(opt.lr, step + 1) for opt in opts][0]

    def with_rate(self, lr: Any) -> "partition | None":
        """The same with other learning rates.

        Args:
            lr: rates by the patterns of rules; those of other rules stay. Or one, if one rule has an optimizer.

        Returns:
            None where the rates do not fit: patterns of no optimizer, or optimizers that have not exactly one rate.
        """
        own = [pattern for pattern, opt in self.rules if opt is not None]
        given = lr if isinstance(lr, Mapping) else {own[0]: lr} if len(own) == 1 else {}
        made = {pattern: with_rate(opt, given[pattern]) for pattern, opt in self.rules if opt and pattern in given}
        if not given or made.keys() != given.keys() or None in made.values():
            return None
        return partition([(pattern, made.get(pattern, opt)) for pattern, opt in self.rules])

    def at_step(self, step: int) -> "partition":
        """The same with the learning rates of one update, counted from 1."""
        rules = [(pattern, None if opt is None else at_step(opt, step)) for pattern, opt in self.rules]
        return altered(self, "rules", tuple(rules))  # type: ignore[no-any-return]

    def init(self, param: Tensor, hyper: Choice) -> State:
        """The buffers of the leaf's own optimizer."""
        own = self._own(hyper[0])
        return {} if own is None else own.init(param, hyper[1])

    def hyper(self, path: str, shape: tuple[int, ...]) -> Choice:
        """The number of the leaf's rule, and the ``hyper`` of its optimizer."""
        number = self._number(path)
        own = self._own(number)
        return (REST, None) if own is None else (number, own.hyper(path, shape))

    def forms(self, hyper: Choice) -> dict[str, Form]:
        """The buffers' forms of the leaf's own optimizer."""
        own = self._own(hyper[0])
        return {} if own is None else own.forms(hyper[1])

    def grain(self, hyper: Choice) -> Grain:
        """The grain of the leaf's own optimizer."""
        own = self._own(hyper[0])
        return 1 if own is None else own.grain(hyper[1])

    def problems(self, leaves: list[LeafInfo]) -> list[str]:
        """Leaves without a rule, rules without a leaf, and the problems of each optimizer with its own leaves."""
        out = [
            f"partition: no pattern matches {leaf.path}: add (r'.*', optimizer), or None to leave it as it is"
            for leaf in leaves
            if leaf.trainable and self._number(leaf.path) == REST
        ]
        for number, (pattern, opt) in enumerate(self.rules):
            hits = [leaf for leaf in leaves if self._number(leaf.path) == number]
            own = [leaf for leaf in hits if leaf.trainable]
            if not own and (pattern, opt) != (ANY, None):
                why = f"decides no leaf: {self._idle(pattern, [leaf.path for leaf in leaves])}"
                if hits:
                    why = f"decides frozen leaves alone ({', '.join(leaf.path for leaf in hits[:3])}), which have no "
                    why += "optimizer state: train them, or drop the rule"
                out.append(f"partition: rules[{number}] {pattern!r} {why}")
            elif opt is not None:
                out += contract(opt).problems(own)
        return out

    def _idle(self, pattern: str, paths: list[str]) -> str:
        if any(re.fullmatch(pattern, path) for path in paths):
            return "earlier rules take what it matches"
        return f"it matches no path{meant_by(pattern, paths)}"

    def update(self, params: Tensors, grads: Tensors, states: States, *, step: int, hyper: Choice, **more: Any) -> None:
        """One update by the leaves' own optimizer; see ``Optimizer.update``."""
        if (own := self._own(hyper[0])) is not None:
            own.update(params, grads, states, step=step, hyper=hyper[1], **more)

    def _number(self, path: str) -> int:
        return next((i for i, (pattern, _) in enumerate(self.rules) if re.fullmatch(pattern, path)), REST)

    def _own(self, number: int) -> Contract | None:
        """The optimizer of a rule; None for leaves that stay as they are."""
        opt = None if number == REST else self.rules[number][1]
        return None if opt is None else contract(opt)


def masked(opt: Optimizer, pattern: str) -> partition:
    """An optimizer for the leaves that a pattern matches; the others stay as they are (``optax.masked``).

    They still get gradients, which count in the global norm: ``fs.Rule(..., trainable=False)`` freezes leaves for good.

    Args:
        opt: the optimizer.
        pattern: for ``re.fullmatch`` on paths.

    >>> opt = fs.optim.masked(fs.optim.sgd(0.1, momentum=0.9), r"head\\..*")
    >>> opt.forms(opt.hyper("body.weight", (4, 4)))
    {}
    """
    return partition([(pattern, opt), (ANY, None)])


@runtime_checkable
class GradientChange(Protocol):
    """A change of gradients in front of an optimizer: elementwise, in place, without state."""

    def apply(self, params: list[Tensor], grads: list[Tensor], step: int) -> None:
        """Write the new gradients where the old ones lie; ``step`` counts updates from 1."""


@dataclass(frozen=True)
class clip_value:  # noqa: N801
    """Clip each element of the gradient to ``[-limit, limit]``, as ``torch.nn.utils.clip_grad_value_`` does.

    Args:
        limit: the largest size of an element, > 0.

    >>> grads = [torch.tensor([3.0, -0.1])]
    >>> fs.optim.clip_value(1.0).apply([], grads, 1); grads
    [tensor([ 1.0000, -0.1000])]
    """

    limit: float

    def __post_init__(self) -> None:
        checks.require(self, limit="(0, inf)")

    def apply(self, params: list[Tensor], grads: list[Tensor], step: int) -> None:
        """Clip."""
        foreach_clamp_max_(grads, float(self.limit))
        foreach_clamp_min_(grads, -float(self.limit))


@dataclass(frozen=True)
class scale:  # noqa: N801
    """Multiply gradients by a factor >= 0, or by a function of the step, which counts from 0.

    Args:
        factor: a number, or a function from the number of the step to one.

    >>> opt = fs.optim.chain(fs.optim.scale(0.5), fs.optim.sgd(0.1))
    """

    factor: Rate

    def __post_init__(self) -> None:
        checks.require(self, factor=checks.rate)

    def apply(self, params: list[Tensor], grads: list[Tensor], step: int) -> None:
        """Multiply."""
        foreach_mul_(grads, rate(self.factor, step))


@dataclass(frozen=True)
class add_decay:  # noqa: N801
    """Add ``rate * param`` to the gradient: weight decay that passes through whatever follows (L2).

    Args:
        rate: what the parameter is multiplied with, >= 0.

    >>> opt = fs.optim.chain(fs.optim.add_decay(0.01), fs.optim.sgd(0.1))
    """

    rate: float

    def __post_init__(self) -> None:
        checks.require(self, rate="[0, inf)")

    def apply(self, params: list[Tensor], grads: list[Tensor], step: int) -> None:
        """Add."""
        foreach_add_(grads, params, alpha=float(self.rate))


@dataclass(frozen=True)
class Inner:
    """An optimizer around another one, whose behavior it keeps unless it overrides it."""

    opt: Optimizer

    @property
    def lr(self) -> Rate:
        return self.opt.lr

    def init(self, param: Tensor, hyper: Any) -> State:
        return contract(self.opt).init(param, hyper)

    def hyper(self, path: str, shape: tuple[int, ...]) -> Hashable:
        return self.opt.hyper(path, shape)

    def forms(self, hyper: Any) -> dict[str, Form]:
        return contract(self.opt).forms(hyper)

    def grain(self, hyper: Any) -> Grain:
        return contract(self.opt).grain(hyper)

    def problems(self, leaves: list[LeafInfo]) -> list[str]:
        return contract(self.opt).problems(leaves)


@dataclass(frozen=True)
class chain(Inner):  # noqa: N801
    """Changes of the gradient, in order, and then an optimizer (``optax.chain``).

    Changes see the gradient of the global mean loss, reduced over all ranks and clipped by ``clip_norm``.

    Args:
        *parts: ``clip_value``, ``scale``, ``add_decay``, or anything with their ``apply``; an optimizer at the end.

    >>> opt, w = fs.optim.chain(fs.optim.clip_value(1.0), fs.optim.sgd(0.5)), torch.zeros(2)
    >>> opt.update([w], [torch.tensor([4.0, 0.5])], [{}], step=1, hyper=0.0)
    >>> w
    tensor([-0.5000, -0.2500])
    """

    changes: tuple[GradientChange, ...]

    def __init__(self, *parts: Any) -> None:
        problems = checks.optimizer("the last part", parts[-1]) if parts else ["no parts were given"]
        problems += [
            f"part {i} = {p!r}: has no apply()" for i, p in enumerate(parts[:-1]) if not isinstance(p, GradientChange)
        ]
        checks.require(self, *problems)
        vars(self).update(opt=parts[-1], changes=tuple(parts[:-1]))

    def at_step(self, step: int) -> "chain":
        """The same with the learning rate and the factors of one update, counted from 1."""
        changes = [
            altered(change, "factor", rate(change.factor, step)) if isinstance(change, scale) else change
            for change in self.changes
        ]
        return chain(*changes, at_step(self.opt, step))

    def update(self, params: Tensors, grads: Tensors, states: States, *, step: int, hyper: Any, **more: Any) -> None:
        """Change the gradients, then update; see ``Optimizer.update``."""
        if not params:
            return
        unscale(grads, more.pop("grad_scale", None))
        for change in self.changes:
            change.apply(params, grads, step)
        self.opt.update(params, grads, states, step=step, hyper=hyper, **more)
