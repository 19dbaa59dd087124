"""Checks of arguments: an error at the call, instead of an AttributeError from inside."""

import re
from collections.abc import Iterable
from math import inf
from typing import Any

from fshard.errors import PlanError, ShardError, lines

Want = tuple[str, Any, Any, str]
"""A name, the value that was given, the class or classes that it should be of, and what to give instead."""


def expect(call: str, wants: Iterable[Want], error: type[ShardError] = PlanError) -> None:
    """Refuse arguments of the wrong type, all in one report.

    Args:
        call: how the function is called.
        wants: its arguments: name, value, type, and what to give instead.
        error: what to raise.

    Raises:
        PlanError: or ``error``, naming each argument, what it is, and what to give.

    >>> expect("f(x)", [("x", 3, int, "an int")])
    """
    wrong = [(name, given, remedy) for name, given, kinds, remedy in wants if not _is(given, kinds)]
    if wrong:
        problems = [f"{name} is {described(given)}: give {remedy}" for name, given, remedy in wrong]
        raise error(lines(f"{call}: arguments of the wrong type:", problems, "See its docstring."))


def described(value: Any) -> str:
    """A value in a few words.

    >>> described("data"), described(int), described([1] * 100)
    ("'data', a str", 'the class int', 'a list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return "None" if value is None else f"{value!r}, {kind(value)}"
    return kind(value)


def kind(value: Any) -> str:
    """Return what a value is, in two words.

    >>> kind(3), kind([])
    ('an int', 'a list')
    """
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def counted(number: int, noun: str) -> str:
    """A number of things in words.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def alike(rows: Iterable[tuple[str, str]], names: int = 3) -> list[str]:
    """The lines of a report on leaves. Leaves with the same problem share a line, which names the first of them.

    Args:
        rows: pairs of a leaf and its problem, which begins with the characters between the two.
        names: how many leaves a line names, if more than one would follow.

    >>> alike([(f"w{i}", ": too long") for i in range(5)] + [("b", ": too short")])
    ['w0, w1, w2 and 2 others: too long', 'b: too short']
    """
    of: dict[str, list[str]] = {}
    for leaf, text in rows:
        of.setdefault(text, []).append(leaf)
    out = []
    for text, leaves in of.items():
        if len(leaves) > names + 1:
            out.append(f"{', '.join(leaves[:names])} and {len(leaves) - names} others{text}")
        else:
            out += [f"{leaf}{text}" for leaf in leaves]
    return out


def size_text(count: float) -> str:
    """A number of bytes for people.

    >>> size_text(1536)
    '1.5 KiB'
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1023.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def bytes_of(text: str, name: str = "") -> int:
    """A number of bytes: ``80G`` and ``80GB`` are 80 * 10**9, ``80Gi`` and ``80GiB`` 80 * 2**30.

    Args:
        text: the number.
        name: what it is, for the error.

    Raises:
        PlanError: not such a number.

    >>> bytes_of("80G"), bytes_of("1.5GiB")
    (80000000000, 1610612736)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?)B?", text.upper())
    count = float(found[1]) * UNITS.get(found[2], 0) if found is not None else 0.0
    if not 1 <= count < inf:
        raise PlanError(f"{name}{text!r} is not a number of bytes: give one such as 80G, or 80Gi for 80 * 2**30")
    return int(count)


def raised(error: BaseException) -> str:
    """An exception in words, for ranks that did not raise it.

    >>> raised(ValueError("no")), raised(KeyboardInterrupt())
    ('ValueError: no', 'KeyboardInterrupt')
    """
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is(value: Any, kinds: Any) -> bool:
    # True is an int to Python, and never what is meant where a number is.
    return isinstance(value, kinds) and not (isinstance(value, bool) and kinds in (int, float, (int, float)))
