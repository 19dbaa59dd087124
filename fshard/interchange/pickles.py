"""Pickles, read as data: a small machine of opcodes that names nothing, calls nothing, and takes memory by the text.

A pickle is a program. Python's own unpickler runs it, and can be told what names to look up and no more: it still makes
a memo of four gigabytes for an index of four bytes, sets attributes of whatever a name gave, and gives back values that
share parts so that printing one never ends. Here names stay names, and a call becomes a record of what was to be called
and with what. There is an opcode for each thing that files of PyTorch consist of; any other is refused. Containers and
calls are counted against the bytes, so that a value takes memory of some times its text.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

DIGITS = 16
"""Bytes of a whole number, at most."""

SPARE, SPACING = 4096, 4
"""Containers and calls that any pickle may have, and bytes for each one more: files of PyTorch have seven or more."""


class Name(NamedTuple):
    """A name of a module that a pickle mentions."""

    module: str
    name: str


PERSISTENT = Name("", "persistent")
"""What stands for a reference to something outside of the pickle, such as the storage of a tensor."""


@dataclass(eq=False, slots=True)
class Made:
    """What a call would have made: of what, with which arguments, and the state that was to be given to it."""

    of: Name
    args: tuple[Any, ...]
    state: Any = None

    def get(self, name: str) -> Any:
        """A field of its state; None if there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class UnknownNameError(ValueError):
    """A pickle mentions a name that its reader does not know."""


def read_pickle(text: bytes | bytearray, known: Callable[[Name], bool]) -> Any:
    """What a pickle describes: None, bools, numbers, strings, tuples, lists, dicts, names and ``Made``.

    Dicts have strings or ``Made`` as keys, which are equal only to themselves. Values may share parts, and may contain
    themselves: whoever reads them looks where he expects something, and never prints or compares them as a whole.

    Args:
        text: the bytes, all of the pickle and nothing else.
        known: whether a name may be mentioned.

    Raises:
        UnknownNameError: it mentions another.
        ValueError: it is no pickle, or has opcodes that files of tensors do not need.
    """
    machine = _Machine(text, known)
    while not machine.done:
        code = machine.take(1)[0]
        step = STEPS.get(code)
        if step is None:
            raise ValueError(
                f"byte {machine.at - 1} is the opcode {bytes([code])!r}, which files of tensors do not have"
            )
        try:
            step(machine)
        except IndexError:
            raise ValueError(f"the opcode at byte {machine.at - 1} finds nothing on the stack") from None
        except UnicodeDecodeError:
            raise ValueError(f"the text that ends at byte {machine.at} is not UTF-8") from None
    if machine.stack or machine.marks:
        raise ValueError("it ends with more than one value")
    if machine.at != len(text):
        raise ValueError(f"it ends at byte {machine.at} of {len(text)}")
    return machine.value


class _Machine:
    """The stack, the memo and the place in the text."""

    def __init__(self, text: bytes | bytearray, known: Callable[[Name], bool]) -> None:
        self.text, self.known = text, known
        self.at, self.done = 0, False
        self.value: Any = None
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.names: dict[Name, Name] = {}
        self.room = SPARE + len(text) // SPACING

    def hold(self, value: Any) -> None:
        """Push a value that takes much more memory than its opcode."""
        self.room -= 1
        if self.room < 0:
            raise ValueError(f"byte {self.at} of {len(self.text)} makes one container more than files of tensors have")
        self.stack.append(value)

    def take(self, count: int) -> bytes | bytearray:
        """The next bytes."""
        end = self.at + count
        if end > len(self.text):
            raise ValueError(f"it ends before byte {end}")
        part = self.text[self.at : end]
        self.at = end
        return part

    def number(self, count: int) -> int:
        """A whole number without a sign in so many bytes."""
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        """The text up to the next end of a line."""
        end = self.text.find(b"\n", self.at, self.at + 200)
        if end < 0:
            raise ValueError(f"no line ends after byte {self.at}")
        line = self.text[self.at : end].decode()
        self.at = end + 1
        return line

    def marked(self) -> list[Any]:
        """What was pushed since the last mark, which is taken away."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def name(self, module: Any, name: Any) -> Name:
        """A name that is known."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError(f"a name before byte {self.at} is not made of two strings")
        found = Name(module, name)
        if not self.known(found):
            raise UnknownNameError(f"{module[:100]}.{name[:100]}")
        return self.names.setdefault(found, found)

    def recall(self, key: int) -> None:
        """Push what the memo has."""
        if key not in self.memo:
            raise ValueError(f"the memo has no entry {key} at byte {self.at}")
        self.stack.append(self.memo[key])

    def call(self, of: Any, args: Any) -> None:
        """Push the record of a call."""
        if not isinstance(of, Name) or not isinstance(args, tuple):
            raise ValueError(f"the call before byte {self.at} is of no name with arguments")
        self.hold(Made(of, args))

    def build(self) -> None:
        """Give a state to what a call has made; only to that, and only once."""
        state = self.stack.pop()
        made = self.stack[-1]
        if not isinstance(made, Made) or made.of == PERSISTENT or made.state is not None:
            raise ValueError(f"the state before byte {self.at} is for nothing that could have one")
        made.state = state

    def extend(self, items: list[Any]) -> None:
        """Append to a list."""
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError(f"the items before byte {self.at} are for no list")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        """Add keys and values to a dict."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError(f"the items before byte {self.at} are for no dict")
        for at in range(0, len(items), 2):
            key = items[at]
            if not isinstance(key, str | Made) or key in target:
                raise ValueError(f"a key before byte {self.at} is no string, or there twice")
            target[key] = items[at + 1]

    def end(self) -> None:
        """Take the result."""
        self.value, self.done = self.stack.pop(), True

    def frame(self) -> None:
        """A frame says how long it is, which nothing here needs."""
        if self.number(8) > len(self.text) - self.at:
            raise ValueError(f"the frame at byte {self.at} is longer than what is left")

    def long(self) -> None:
        """A whole number with its length."""
        count = self.number(1)
        if count > DIGITS:
            raise ValueError(f"a number of {count} bytes at byte {self.at}, of at most {DIGITS}")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def tuple_of(self, count: int) -> None:
        """A tuple of the last values."""
        if len(self.stack) < count:
            raise IndexError
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.hold(items)


Step = Callable[[_Machine], Any]


def _proto(m: _Machine) -> None:
    if not 2 <= m.number(1) <= 5:
        raise ValueError("its protocol is none of 2 to 5")


def _text(count: int) -> Step:
    return lambda m: m.stack.append(m.take(m.number(count)).decode())


def _store(count: int) -> Step:
    return lambda m: m.memo.__setitem__(m.number(count), m.stack[-1])


def _mark(m: _Machine) -> None:
    m.hold(None)
    m.stack.pop()
    m.marks.append(m.stack)
    m.stack = []


def _tuple(m: _Machine) -> None:
    items = tuple(m.marked())
    m.hold(items)


def _pair(m: _Machine, then: Callable[[Any, Any], None]) -> None:
    last = m.stack.pop()
    then(m.stack.pop(), last)


def _one(m: _Machine, then: Callable[[list[Any]], None], count: int) -> None:
    if len(m.stack) <= count:
        raise IndexError
    items = m.stack[-count:]
    del m.stack[-count:]
    then(items)


STEPS: dict[int, Step] = {
    0x80: _proto,
    0x95: _Machine.frame,
    ord("."): _Machine.end,
    ord("("): _mark,
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("K"): lambda m: m.stack.append(m.number(1)),
    ord("M"): lambda m: m.stack.append(m.number(2)),
    ord("J"): lambda m: m.stack.append(struct.unpack("<i", m.take(4))[0]),
    0x8A: _Machine.long,
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    0x8C: _text(1),
    ord("X"): _text(4),
    0x8D: _text(8),
    ord(")"): lambda m: m.stack.append(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): _tuple,
    ord("]"): lambda m: m.hold([]),
    ord("a"): lambda m: _one(m, m.extend, 1),
    ord("e"): lambda m: m.extend(m.marked()),
    ord("}"): lambda m: m.hold({}),
    ord("s"): lambda m: _one(m, m.update, 2),
    ord("u"): lambda m: m.update(m.marked()),
    0x94: lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    ord("q"): _store(1),
    ord("r"): _store(4),
    ord("h"): lambda m: m.recall(m.number(1)),
    ord("j"): lambda m: m.recall(m.number(4)),
    ord("c"): lambda m: m.stack.append(m.name(m.line(), m.line())),
    0x93: lambda m: _pair(m, lambda module, name: m.stack.append(m.name(module, name))),
    ord("R"): lambda m: _pair(m, m.call),
    0x81: lambda m: _pair(m, m.call),
    ord("b"): _Machine.build,
    ord("Q"): lambda m: m.hold(Made(PERSISTENT, (m.stack.pop(),))),
}
"""What each opcode does. Those that are not here are refused."""
