"""Names of other libraries that people try first on this library's values, and the way to what they mean."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn


def hinting(hints: Mapping[str, str]) -> Callable[[Any, str], NoReturn]:
    """A ``__getattr__``, which Python calls for attributes that are not there.

    Args:
        hints: by names, separated by spaces: what is done in their place.

    >>> class Value:
    ...     __getattr__ = hinting({"train eval": "the mode is an argument"})
    >>> Value().eval()
    Traceback (most recent call last):
    AttributeError: 'Value' object has no attribute 'eval': the mode is an argument
    """
    told = {name: hint for names, hint in hints.items() for name in names.split()}

    def hint(self: Any, name: str) -> NoReturn:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{text}: {told[name]}" if name in told else text, name=name, obj=self)

    return hint
