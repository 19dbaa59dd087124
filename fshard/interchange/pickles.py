"""Pickles, read as data: an interpreter that looks up no names, calls nothing, and bounds memory by the text.

A pickle is a program. Python's unpickler runs it and can only restrict the names that are looked up: it still allocates
a memo of four gigabytes for an index of four bytes, sets attributes of any object, and returns values that share parts
so that printing one never ends. Here names stay names, and a call becomes a record of its function and arguments. Only
the opcodes in files of PyTorch are known; any other is refused. The number of containers and calls is bounded by the
number of bytes, so a value takes memory of a few times its text.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

DIGITS = 16
"""The most bytes of an integer."""

SPARE, SPACING = 4096, 4
"""The containers and calls of any pickle, and the bytes for each further one: files of PyTorch have at least seven."""


class GlobalName(NamedTuple):
    """A name of a module that a pickle contains."""

    module: str
    name: str


ATTRIBUTE = GlobalName("builtins", "getattr")
"""The function by whose calls Python 3.11.0 to 3.11.3 write members of an enum."""

PERSISTENT = GlobalName("", "persistent")
"""The function of a reference to data outside of the pickle, such as the storage of a tensor."""


@dataclass(eq=False, slots=True)
class CallRecord:
    """A call that was not made: the function, its arguments, and the state for its result."""

    of: GlobalName
    args: tuple[Any, ...]
    state: Any = None

    def get(self, name: str) -> Any:
        """A field of its state; None if the state has none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class UnknownNameError(ValueError):
    """A pickle contains a name that its reader does not know."""


def read_pickle(text: bytes | bytearray, known: Callable[[GlobalName], bool]) -> Any:
    """The value of a pickle: None, bools, numbers, strings, tuples, lists, dicts, names and call records.

    Keys of dicts are strings or call records, which are equal only to themselves. Values may share parts and contain
    themselves: readers must look only where they expect something, and never print or compare a whole value.

    Raises:
        UnknownNameError: a name is not allowed.
        ValueError: the text is not a pickle, or has opcodes that files of tensors do not need.
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
    """The stack, the memo and the position in the text."""

    def __init__(self, text: bytes | bytearray, known: Callable[[GlobalName], bool]) -> None:
        self.text, self.known = text, known
        self.at, self.done = 0, False
        self.value: Any = None
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.names: dict[GlobalName, GlobalName] = {}
        self.room = SPARE + len(text) // SPACING

    def hold(self, value: Any) -> None:
        """Push a value that takes much more memory than its opcode."""
        self.room -= 1
        if self.room < 0:
            raise ValueError(f"byte {self.at} of {len(self.text)} makes more containers than files of tensors have")
        self.stack.append(value)

    def take(self, count: int) -> bytes | bytearray:
        """The next bytes."""
        begin, self.at = self.at, self.at + count
        if self.at > len(self.text):
            raise ValueError(f"it ends before byte {self.at}")
        return self.text[begin : self.at]

    def number(self, count: int) -> int:
        """An unsigned integer of ``count`` bytes."""
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        """The rest of the line."""
        end = self.text.find(b"\n", self.at, self.at + 200)
        if end < 0:
            raise ValueError(f"no line ends after byte {self.at}")
        return self.take(end + 1 - self.at)[:-1].decode()

    def mark(self) -> None:
        """Begin a list of values, which counts as a container."""
        self.hold(None)
        self.stack.pop()
        self.marks.append(self.stack)
        self.stack = []

    def marked(self) -> list[Any]:
        """Pop the values since the last mark, and the mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def last(self, count: int) -> list[Any]:
        """Pop the last values."""
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def end(self) -> None:
        """Pop the result."""
        self.value, self.done = self.stack.pop(), True

    def name(self, module: Any, name: Any) -> None:
        """Push a name, if it is allowed."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError(f"a name before byte {self.at} is not made of two strings")
        found = GlobalName(module, name)
        if found != ATTRIBUTE and not self.known(found):
            raise UnknownNameError(f"{module[:100]}.{name[:100]}")
        self.stack.append(self.names.setdefault(found, found))

    def attribute(self, of: Any = None, name: Any = None, *more: Any) -> None:
        """Push the attribute of a name as a dotted name, if that is allowed."""
        if more or not isinstance(of, GlobalName) or not isinstance(name, str):
            raise UnknownNameError(".".join(ATTRIBUTE))
        self.name(of.module, f"{of.name}.{name}")

    def recall(self, key: int) -> None:
        """Push an entry of the memo."""
        if key not in self.memo:
            raise ValueError(f"the memo has no entry {key} at byte {self.at}")
        self.stack.append(self.memo[key])

    def call(self) -> None:
        """Push the record of a call that is not made."""
        of, args = self.last(2)
        if not isinstance(of, GlobalName) or not isinstance(args, tuple):
            raise ValueError(f"the call before byte {self.at} is of no name with arguments")
        if of == ATTRIBUTE:
            return self.attribute(*args)
        self.hold(CallRecord(of, args))

    def build(self) -> None:
        """Add the state to a call record that has none."""
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, CallRecord) or made.of == PERSISTENT or made.state is not None:
            raise ValueError(f"the state before byte {self.at} is for a value that cannot have one")
        made.state = state

    def extend(self, items: list[Any]) -> None:
        """Append to a list."""
        if not isinstance(self.stack[-1], list):
            raise ValueError(f"the items before byte {self.at} are for no list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        """Add keys and values to a dict."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError(f"the items before byte {self.at} are for no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | CallRecord) or key in target:
                raise ValueError(f"a key before byte {self.at} is not a string, or there twice")
            target[key] = value


Step = Callable[[_Machine], Any]


def _proto(m: _Machine) -> None:
    if not 2 <= m.number(1) <= 5:
        raise ValueError("its protocol is none of 2 to 5")


def _frame(m: _Machine) -> None:
    if m.number(8) > len(m.text) - m.at:
        raise ValueError(f"the frame at byte {m.at} is longer than the rest of the text")


def _long(m: _Machine) -> None:
    count = m.number(1)
    if count > DIGITS:
        raise ValueError(f"a number of {count} bytes at byte {m.at}, of at most {DIGITS}")
    m.stack.append(int.from_bytes(m.take(count), "little", signed=True))


def _text(count: int) -> Step:
    return lambda m: m.stack.append(m.take(m.number(count)).decode())


def _store(count: int) -> Step:
    return lambda m: m.memo.__setitem__(m.number(count), m.stack[-1])


STEPS: dict[int, Step] = {
    0x80: _proto,
    0x95: _frame,
    ord("."): _Machine.end,
    ord("("): _Machine.mark,
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("K"): lambda m: m.stack.append(m.number(1)),
    ord("M"): lambda m: m.stack.append(m.number(2)),
    ord("J"): lambda m: m.stack.append(struct.unpack("<i", m.take(4))[0]),
    0x8A: _long,
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    0x8C: _text(1),
    ord("X"): _text(4),
    0x8D: _text(8),
    ord(")"): lambda m: m.stack.append(()),
    0x85: lambda m: m.hold(tuple(m.last(1))),
    0x86: lambda m: m.hold(tuple(m.last(2))),
    0x87: lambda m: m.hold(tuple(m.last(3))),
    ord("t"): lambda m: m.hold(tuple(m.marked())),
    ord("]"): lambda m: m.hold([]),
    ord("a"): lambda m: m.extend(m.last(1)),
    ord("e"): lambda m: m.extend(m.marked()),
    ord("}"): lambda m: m.hold({}),
    ord("s"): lambda m: m.update(m.last(2)),
    ord("u"): lambda m: m.update(m.marked()),
    0x94: lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    ord("q"): _store(1),
    ord("r"): _store(4),
    ord("h"): lambda m: m.recall(m.number(1)),
    ord("j"): lambda m: m.recall(m.number(4)),
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: lambda m: m.name(*m.last(2)),
    ord("R"): _Machine.call,
    0x81: _Machine.call,
    ord("b"): _Machine.build,
    ord("Q"): lambda m: m.hold(CallRecord(PERSISTENT, (m.stack.pop(),))),
}
"""The effect of each known opcode."""
