"""The tokens that lines of a schedule's text are made of: names, numbers and ``key=value``."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from fshard.reading.texts import parse_json

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
PLAIN = re.compile(r'[^\s"#@][^\s"]*')
WIDTH = 100


def quoted(name: str) -> str:
    """A name as one token.

    >>> quoted("blocks.0"), quoted("a b")
    ('blocks.0', '"a b"')
    """
    return name if PLAIN.fullmatch(name) and name.isprintable() else json.dumps(name)


def read_name(token: str) -> str:
    """The name that a token is.

    Raises:
        ValueError: it is none.
    """
    if token.startswith('"'):
        return str(parse_json(token.encode(errors="surrogatepass")))
    if not PLAIN.fullmatch(token):
        raise ValueError(f"{token!r} is not a name")
    return token


def read_number(token: str, prefix: str = "") -> int:
    """The number behind a prefix.

    Raises:
        ValueError: it is no such token.
    """
    if not re.fullmatch(re.escape(prefix) + r"-?[0-9]{1,100}", token, re.ASCII):
        raise ValueError(f"{token[:40]!r} is not of the form {prefix}NUMBER, of at most 100 digits")
    return int(token[len(prefix) :])


def read_values(tokens: Sequence[str], keys: Sequence[str]) -> list[str]:
    """The values of tokens that are ``key=value``, of these keys in this order.

    Raises:
        ValueError: the keys are others.
    """
    if [token.partition("=")[0] for token in tokens] != list(keys):
        raise ValueError(f"expected {' '.join(f'{key}=...' for key in keys)}")
    return [token.partition("=")[2] for token in tokens]


def wrapped(word: str, items: Iterable[str]) -> Iterator[str]:
    """Lines of a word and items, as many as fit; none without items.

    >>> list(wrapped("forward", ["a", "b"]))
    ['forward a b']
    """
    line = word
    for item in items:
        if len(line) + len(item) + 1 > WIDTH and line != word:
            yield line
            line = word
        line += f" {item}"
    if line != word:
        yield line
