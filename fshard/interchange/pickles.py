"""Pickles, read as data: Python's own unpickler, which looks up no names and calls nothing, and has few opcodes.

A pickle is a program. Python's unpickler runs it and can only restrict the names that are looked up: it still allocates
a memo of four gigabytes for an index of four bytes, sets attributes of any object, and returns values that share parts
so that printing one never ends. Here names stay names, and a call becomes a record of its function and arguments. Only
the opcodes in files of PyTorch are known; any other is refused. The number of containers and calls is bounded by the
number of bytes, so a value takes memory of a few times its text. The memo is a dict, as in the unpickler that Python
has in Python.
"""

import io
import pickle
import struct
from collections.abc import Callable, Container
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


def read_pickle(text: bytes | bytearray, known: Container[GlobalName]) -> Any:
    """The value of a pickle: None, bools, numbers, strings, tuples, lists, dicts, names and call records.

    Keys of dicts are strings or call records, which are equal only to themselves. Values may share parts and contain
    themselves: readers must look only where they expect something, and never print or compare a whole value.

    Raises:
        UnknownNameError: a name is not allowed.
        ValueError: the text is not a pickle, or has opcodes that files of tensors do not need.
    """
    stream = io.BytesIO(text)
    reader = PickleReader(stream, known, SPARE + len(text) // SPACING)
    try:
        value = reader.load()
    except (pickle.UnpicklingError, EOFError, IndexError, AttributeError, TypeError, struct.error) as error:
        raise ValueError(f"it ends early, or an opcode does not find what it takes: {error}") from None
    if stream.tell() != len(text):
        raise ValueError(f"it ends at byte {stream.tell()} of {len(text)}")
    return value


UNPICKLER: Any = pickle._Unpickler
"""The unpickler that Python has in Python, whose opcodes are methods."""


class PickleReader(UNPICKLER):  # type: ignore[misc]
    """The unpickler, without what runs or sets anything."""

    def __init__(self, stream: io.BytesIO, known: Container[GlobalName], room: int) -> None:
        super().__init__(stream)
        self.known, self.room = known, room
        self.names: dict[GlobalName, GlobalName] = {}

    def find_class(self, module: str, name: str) -> GlobalName:
        """The name itself, if it is allowed."""
        found = GlobalName(module, name)
        if found != ATTRIBUTE and found not in self.known:
            raise UnknownNameError(f"{module[:100]}.{name[:100]}")
        return self.names.setdefault(found, found)

    def persistent_load(self, pid: Any) -> CallRecord:
        """The record of data outside of the pickle."""
        return CallRecord(PERSISTENT, (pid,))

    def attribute(self, of: Any = None, name: Any = None, *more: Any) -> GlobalName:
        """The attribute of a name as a dotted name, if that is allowed."""
        if more or not isinstance(of, GlobalName) or not isinstance(name, str):
            raise UnknownNameError(".".join(ATTRIBUTE))
        return self.find_class(of.module, f"{of.name}.{name}")

    def hold(self) -> None:
        """Count a value that takes much more memory than its opcode."""
        self.room -= 1
        if self.room < 0:
            raise ValueError("it makes more containers than files of tensors have")

    def load_call(self) -> None:
        """Push the record of a call that is not made."""
        args, of = self.stack.pop(), self.stack.pop()
        if not isinstance(of, GlobalName) or not isinstance(args, tuple):
            raise ValueError("a call is of no name with arguments")
        self.append(self.attribute(*args) if of == ATTRIBUTE else CallRecord(of, args))

    def load_state(self) -> None:
        """Add the state to a call record that has none."""
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, CallRecord) or made.of == PERSISTENT or made.state is not None:
            raise ValueError("a state is for a value that cannot have one")
        made.state = state

    def load_pair(self) -> None:
        """Add a key and its value to a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self.update([key, value])

    def load_pairs(self) -> None:
        """Add the keys and values since the last mark to a dict."""
        self.update(self.pop_mark())

    def update(self, items: list[Any]) -> None:
        """Add keys and values to the dict on the stack."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("items are for no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | CallRecord) or key in target:
                raise ValueError("a key is not a string, or there twice")
            target[key] = value

    def load_number(self) -> None:
        """Push a number of bounded length: to print a long one takes time."""
        self.load_long1()
        if self.stack[-1].bit_length() > 8 * DIGITS:
            raise ValueError(f"a number has more than {DIGITS} bytes")


class _Opcodes(dict[int, Callable[[PickleReader], Any]]):
    """The effect of each known opcode; a ValueError for any other."""

    def __missing__(self, code: int) -> None:
        raise ValueError(f"a byte is the opcode {bytes([code])!r}, which files of tensors do not have")


def _holding(effect: Callable[[PickleReader], Any]) -> Callable[[PickleReader], Any]:
    def held(reader: PickleReader) -> None:
        reader.hold()
        effect(reader)

    return held


OWN = {
    pickle.REDUCE: _holding(PickleReader.load_call),
    pickle.NEWOBJ: _holding(PickleReader.load_call),
    pickle.BUILD: PickleReader.load_state,
    pickle.SETITEM: PickleReader.load_pair,
    pickle.SETITEMS: PickleReader.load_pairs,
    pickle.LONG1: PickleReader.load_number,
}
CONTAINERS = (
    *(pickle.MARK, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.BINPERSID),
)
OTHERS = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.APPEND, pickle.APPENDS),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.BINFLOAT),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8, pickle.EMPTY_TUPLE),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)
PickleReader.dispatch = _Opcodes(
    {code[0]: load for code, load in OWN.items()}
    | {code[0]: _holding(PickleReader.dispatch[code[0]]) for code in CONTAINERS}
    | {code[0]: PickleReader.dispatch[code[0]] for code in OTHERS}
)
