"""FedBN's ``<domain>_train.pkl`` and ``<domain>_test.pkl``, read without unpickling.

The lists are pickles, and unpickling can run any code. `read` walks the opcodes itself and knows only those
that build lists, tuples, strings and whole numbers. numpy arrays of these are admitted too: the handful of
names that numpy writes into a pickle are compared as text and their effect is re-enacted here, so nothing is
imported and nothing is called. Every other opcode or name ends in a `UserError`.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fedc2i.core.errors import UserError, one_line
from fedc2i.data.npz import check_letters

MAX_BYTES = 2 * 2**20  # FedBN's longest list is below 100 kB
MAX_DECODED = 16 * MAX_BYTES  # a list may name one string many times, and ask each time for it to be decoded
EXPECTED = "a pickled pair (paths, labels) of lists of strings and whole numbers"

_NUMPY = {
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",
    **{f"numpy.{core}.multiarray {name}": name for core in ("core", "_core") for name in ("_reconstruct", "scalar")},
    **{f"numpy.{core}.numeric _frombuffer": "_frombuffer" for core in ("core", "_core")},
}
_LITERALS = re.compile(r"(BIN)?INT[12]?|LONG[14]?|(SHORT_)?(BIN)?(STRING|UNICODE8?|BYTES8?)|BYTEARRAY8")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_IGNORED = frozenset({"PROTO", "FRAME", "STOP"})


@dataclass(frozen=True)
class _Name:
    """A name that numpy pickles; only its text is kept."""

    text: str


@dataclass
class _Type:
    """A numpy dtype in the making."""

    code: str
    order: str = "="


@dataclass
class _Array:
    """A numpy array in the making."""

    values: list[Any]


class _Stack(list[Any]):
    """The interpreter's stack, and how many bytes may still be decoded on it."""

    left = MAX_DECODED

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise ValueError(f"it unpacks to more than {MAX_DECODED:,} bytes")


class _Mark:
    """The opcode MARK on the stack."""


def read(path: Path) -> list[tuple[str, str | int]]:
    """The list's entries as ``(path, label)``, in list order.

    Raises:
        UserError: if the file is too large, cut off, or holds anything but strings and whole numbers.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes, allowed are {MAX_BYTES:,}")
        return _pairs(_interpret(path.read_bytes()))
    except (ValueError, TypeError, LookupError, ArithmeticError, OSError, RuntimeError, struct.error) as error:
        reason = one_line(error, 160)
        raise UserError(f"{path}: refused ({reason}), expected {EXPECTED}") from None


def class_and_file(path: Path, entry: str) -> tuple[str, str]:
    """The last two components ``(class, file)`` of an entry of the list ``path``; what stands before is not used.

    Raises:
        UserError: if there are fewer than two, or one of them is not a plain name.
    """
    parts = PurePosixPath(entry.replace("\\", "/")).parts[-2:]
    if len(parts) < 2 or any(part in ("/", "..") or "\0" in part for part in parts):
        raise UserError(f"{path}: '{one_line(entry, 120)}' does not end in <class>/<file>")
    return parts[0], parts[1]


def _pairs(content: Any) -> list[tuple[str, str | int]]:
    outer = _items(content)
    if len(outer) != 2:
        raise ValueError(f"{len(outer)} parts instead of 2")
    paths, labels = (_items(part) for part in outer)
    if len(paths) != len(labels):
        raise ValueError(f"{len(paths)} paths but {len(labels)} labels")
    for kind, values in (((str,), paths), ((str, int), labels)):
        for value in values:
            if type(value) not in kind:
                raise ValueError(f"an entry of type {type(value).__name__.strip('_')}")
            if isinstance(value, int) and not 0 <= value < 2**31:
                raise ValueError("a label below 0 or above 2**31")
    return list(zip(paths, labels, strict=True))


def _items(value: Any) -> list[Any]:
    if isinstance(value, _Array):
        return value.values
    if isinstance(value, list | tuple):
        return list(value)
    raise ValueError(f"{type(value).__name__.strip('_')} instead of a list")


def _interpret(data: bytes) -> Any:
    stack = _Stack()
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if _LITERALS.fullmatch(name):
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in _BUILDERS:
            _BUILDERS[name](stack)
        elif name == "GLOBAL":
            stack.append(_name(argument))
        elif name not in _IGNORED:
            raise ValueError(f"opcode {name} is not allowed")
    if len(stack) != 1:
        raise ValueError("the pickle is not one object")
    return stack[0]


def _name(text: str) -> _Name:
    if text not in _NUMPY:
        raise ValueError(f"the name '{text}' is not allowed")
    return _Name(_NUMPY[text])


def _pop_mark(stack: _Stack) -> list[Any]:
    """Everything above the topmost mark, which goes too."""
    items: list[Any] = []
    while not isinstance(top := stack.pop(), _Mark):
        items.append(top)
    return items[::-1]


def _tuple(count: int) -> Callable[[_Stack], None]:
    def build(stack: _Stack) -> None:
        items = [stack.pop() for _ in range(count)]
        stack.append(tuple(items[::-1]))

    return build


def _extend(stack: _Stack, items: list[Any]) -> None:
    if not isinstance(stack[-1], list):
        raise ValueError("entries are added to something that is not a list")
    stack[-1].extend(items)


def _stack_global(stack: _Stack) -> None:
    attribute, module = stack.pop(), stack.pop()
    if not (isinstance(module, str) and isinstance(attribute, str)):  # a nest of lists would be written out
        raise ValueError("a name that is no text")
    stack.append(_name(f"{module} {attribute}"))


def _reduce(stack: _Stack) -> None:
    """Re-enact the few calls by which numpy rebuilds arrays and scalars."""
    arguments, function = stack.pop(), stack.pop()
    match function, arguments:
        case _Name("_reconstruct"), (_Name("ndarray"), (0,), _):
            stack.append(_Array([]))
        case _Name("dtype"), (str(code), _, _) if re.fullmatch(r"U\d{1,5}|[iu][1248]|O8?", code):
            stack.append(_Type(code))
        case _Name("encode"), (str(text), "latin1"):
            stack.spend(len(text))
            stack.append(text.encode("latin1"))
        case _Name("scalar"), (_Type() as kind, bytes(content)):
            stack.append(_decode(stack, kind, content, (1,))[0])
        case _Name("_frombuffer"), (bytes() | bytearray() as content, _Type() as kind, tuple(shape), "C"):
            stack.append(_Array(_decode(stack, kind, bytes(content), shape)))
        case _:
            raise ValueError("a call is not allowed")


def _build(stack: _Stack) -> None:
    """Re-enact how numpy fills a fresh dtype or array."""
    state, target = stack.pop(), stack[-1]
    match target, state:
        case _Type(), (_, "<" | ">" | "|" | "=" as order, *_):
            target.order = order
        case _Array(), (_, (int(count),), _Type(code="O" | "O8"), _, list(values)) if len(values) == count:
            target.values = values
        case _Array(), (_, tuple(shape), _Type() as kind, False, bytes(content)):
            target.values = _decode(stack, kind, content, shape)
        case _:
            raise ValueError("a state is not allowed")


def _decode(stack: _Stack, kind: _Type, content: bytes, shape: tuple[int, ...]) -> list[Any]:
    dtype = np.dtype(f"{kind.order}{kind.code}")
    if dtype.hasobject or not 1 <= len(shape) <= 2 or not all(type(side) is int for side in shape):
        raise ValueError(f"an array of type {dtype.str} and {len(shape)} axes")
    stack.spend(len(content))
    if dtype.kind == "U":
        check_letters(np.frombuffer(content, np.uint8), dtype)
    values: list[Any] = np.frombuffer(content, dtype=dtype).reshape(shape).tolist()
    return values


_BUILDERS: dict[str, Callable[[_Stack], None]] = {
    "MARK": lambda stack: stack.append(_Mark()),
    "EMPTY_LIST": lambda stack: stack.append([]),
    "LIST": lambda stack: stack.append(_pop_mark(stack)),
    "APPEND": lambda stack: _extend(stack, [stack.pop()]),
    "APPENDS": lambda stack: _extend(stack, _pop_mark(stack)),
    "TUPLE": lambda stack: stack.append(tuple(_pop_mark(stack))),
    "EMPTY_TUPLE": _tuple(0),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "BUILD": _build,
}
