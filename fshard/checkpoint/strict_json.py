"""JSON of strangers: weighed before it is parsed, and parsed strictly.

A short text can become a large value (``[],`` takes three bytes, and a list some sixty), and a deep one can end the
interpreter's stack. So a pass over the bytes, in time and memory of their order, finds how deep the text goes and what
its value would take, and the parser sees only what is within bounds.
"""

import json
import math
from typing import Any

import torch

DEPTH = 200
"""Objects and lists inside of each other, at most."""

SPACE = 64 << 20
"""Bytes that the value of any text may take."""

FACTOR = 16
"""Bytes that the value may take for each byte of a longer text. Headers and manifests take some ten."""

DIGITS = 4000
"""Digits of a number, at most."""

BLOCK = 1 << 20
"""Bytes that are weighed at once."""

OBJECT, LIST, ITEM = 240, 88, 40
"""Bytes that an object, a list, and one more value in either take, about."""


def parse_json(text: bytes, most: int | None = None) -> Any:
    """The value of a text that is strict JSON.

    It must be UTF-8 with no key twice in an object, no NaN or Infinity, and no value deeper, larger or with longer
    numbers than the bounds above.

    Args:
        text: the bytes.
        most: bytes that the value may take in any case; None leaves it to the length of the text.

    Raises:
        ValueError: it is not.

    >>> parse_json(b'{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    check_bounds(text, most)
    try:
        return json.loads(
            text.decode(), object_pairs_hook=_once, parse_constant=_never, parse_float=_finite, parse_int=_whole
        )
    except RecursionError:  # a caller that is deep in its own stack
        raise ValueError("it is nested too deeply") from None


def check_bounds(text: bytes, most: int | None = None) -> None:
    """Refuse a text whose value would be too deep or too large, without making it.

    Raises:
        ValueError: it is one.
    """
    depth, size = weigh(text)
    if depth > DEPTH:
        raise ValueError(f"it is nested too deeply: {depth} objects and lists inside of each other, of at most {DEPTH}")
    bound = max(SPACE, FACTOR * len(text))
    bound = bound if most is None else min(bound, most)
    if size > bound:
        raise ValueError(f"its {len(text)} bytes would take some {size} bytes of memory, of at most {bound}")


def weigh(text: bytes) -> tuple[int, int]:
    """How deep a text goes, and about how many bytes its value takes. Exact for JSON up to its first mistake.

    >>> weigh(b'{"a": [[1], "]"]}')[0]
    3
    """
    # Without escapes each quote is where a string begins or ends: what lies outside is every other part.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    depth = deepest = 0
    size = len(text)
    inside = 0
    for at in range(0, len(plain), BLOCK):
        parts = plain[at : at + BLOCK].split(b'"')
        outside = b",".join(parts[inside::2])  # a comma for each string: it is a value of its own
        inside = (inside + len(parts) - 1) % 2
        objects, lists = outside.count(b"{"), outside.count(b"[")
        size += OBJECT * objects + LIST * lists + ITEM * outside.count(b",")
        ends = outside.count(b"}") + outside.count(b"]")
        if objects + lists or ends:
            codes = torch.frombuffer(bytearray(outside), dtype=torch.uint8) | 0x20  # [ ] become { }
            steps = (codes == 0x7B).to(torch.int32) - (codes == 0x7D).to(torch.int32)
            deepest = max(deepest, depth + int(steps.cumsum(0).max()))
            depth += objects + lists - ends
    return deepest, size


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name[:80]!r} occurs twice")
            seen.add(name)
    return out


def _never(constant: str) -> float:
    raise ValueError(f"{constant[:40]} is no number that JSON and Python share")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) and len(digits) <= DIGITS else _never(digits)


def _whole(digits: str) -> int:
    return int(digits) if len(digits) <= DIGITS else int(_never(digits))
