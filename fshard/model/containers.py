"""Containers in attributes of modules: how they are copied, compared and written back.

Containers are lists, dicts, sets, deques and tuples, nested in each other. Their elements are never copied, and are
compared by identity.
"""

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

LISTS = (list, deque)
DICTS = (dict, OrderedDict, defaultdict)
MUTABLE = frozenset((*LISTS, *DICTS, set))

LARGE = 1000
"""Larger containers count as tables that no call changes: only their length is compared."""

DEEP = 8
"""Containers nested more deeply count as objects."""


def holds(value: Any, depth: int = 0) -> bool:
    """Tell whether a value is or holds a container that can change.

    >>> holds((1, [2])), holds((1, 2))
    (True, False)
    """
    if type(value) in MUTABLE:
        return True
    return isinstance(value, tuple) and depth < DEEP and any(holds(x, depth + 1) for x in value)


def copied(value: Any, memo: dict[int, Any], depth: int = 0) -> Any:
    """A value with copies of its containers. ``memo`` of ``{id: copy}`` keeps a container that occurs twice one."""
    kind = type(value)
    if depth > DEEP or not (kind in MUTABLE or isinstance(value, tuple)) or len(value) > LARGE:
        return value
    if id(value) in memo:
        return memo[id(value)]
    made = _rebuilt(lambda x: copied(x, memo, depth + 1), value)
    if isinstance(value, tuple) and all(map(operator.is_, made, value)):
        return value
    memo[id(value)] = made
    return made


def mapped(fn: Callable[[Any], Any], value: Any, depth: int = 0) -> Any:
    """A value with copies of its containers, in which ``fn`` is applied to each element."""
    if depth > DEEP or not (type(value) in MUTABLE or isinstance(value, tuple)):
        return fn(value)
    return _rebuilt(lambda x: mapped(fn, x, depth + 1), value)


def _rebuilt(fn: Callable[[Any], Any], value: Any) -> Any:
    """A container of the same kind with ``fn`` of each of its elements."""
    kind = type(value)
    if kind in DICTS:
        made = value.copy()
        made.update({key: fn(x) for key, x in value.items()})
        return made
    parts = [fn(x) for x in value]
    if kind is deque:
        return deque(parts, value.maxlen)
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def inside(value: Any, depth: int = 0) -> Iterator[Any]:
    """The elements of a value, at any depth; the value itself, if it is no container."""
    if depth > DEEP or not (type(value) in MUTABLE or isinstance(value, tuple)):
        yield value
        return
    for x in value.values() if type(value) in DICTS else value:
        yield from inside(x, depth + 1)


def outline(value: Any, depth: int = 0) -> Any:
    """The elements of a value now, for ``matches``."""
    kind = type(value)
    if depth > DEEP or not (kind in MUTABLE or isinstance(value, tuple)):
        return value
    if len(value) > LARGE:
        return _Outline(kind, len(value), value, ())
    if kind is set:
        return _Outline(kind, len(value), None, (frozenset(map(id, value)),))
    below = value.values() if kind in DICTS else value
    keys = tuple(value) if kind in DICTS else None
    return _Outline(kind, len(value), keys, tuple([outline(x, depth + 1) for x in below]))


class _Outline:
    __slots__ = ("held", "keys", "kind", "size")

    def __init__(self, kind: type, size: int, keys: Any, held: tuple[Any, ...]) -> None:
        self.kind, self.size, self.keys, self.held = kind, size, keys, held


def matches(value: Any, kept: Any) -> bool:
    """Tell whether a value has the same elements as when its outline was made."""
    if not isinstance(kept, _Outline):
        return value is kept
    return _matches(value, kept)


def _matches(value: Any, kept: "_Outline") -> bool:
    kind: Any = type(value)
    if kind is not kept.kind or len(value) != kept.size:
        return False
    if kept.size > LARGE:
        return bool(value is kept.keys)
    if kept.kind is set:
        return bool(frozenset(map(id, value)) == kept.held[0])
    if kept.kind in DICTS:
        return tuple(value) == kept.keys and all(map(matches, value.values(), kept.held))
    return all([matches(x, was) for x, was in zip(value, kept.held, strict=True)])


def take(old: Any, new: Any) -> Any:
    """The value of an attribute that held ``old`` after ``new`` is written to it: containers change in place.

    >>> losses = [1]
    >>> take(losses, [1, 2]) is losses, losses
    (True, [1, 2])
    """
    kind = type(old)
    if type(new) is not kind or kind not in MUTABLE or old is new:
        return new
    if kind in DICTS:
        now = {key: take(old.get(key), x) for key, x in new.items()}
        old.clear()
        old.update(now)
    elif kind is set:
        old.clear()
        old.update(new)
    else:
        before = list(old)
        items = [take(before[i], x) if i < len(before) else x for i, x in enumerate(new)]
        old.clear()
        old.extend(items)
    return old
