"""The opcodes as CPython reads them, for a table that is tolerant: what strictness refuses and a stock unpickler carries out.

A scan must see what comes behind an oddity, because a loader would run it. So here every opcode does at least what either of
CPython's two unpicklers (in C, and in Python, which joblib and dill use) does, notes what no writer does, and is refused only where
both of them stop. Still nothing is imported or called: the table is asked, as always.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from holdfast.errors import HoldfastError
from holdfast.formats.pickle import text
from holdfast.formats.pickle.rare import RARE
from holdfast.formats.pickle.state import NAME_NBYTES, State

DIGITS = 40
"""Longer numbers are not worth knowing, and `int` of them is quadratic."""

SHOWN = 8
"""Arguments of one call with keywords that are kept."""


class Unread:
    """A value that nobody here needs to know: a huge integer, a buffer from elsewhere."""

    __slots__ = ()


def number(s: State) -> None:
    """INT, LONG, FLOAT: CPython takes more spellings than any writer uses (`0x10`, `1_000`)."""
    raw = s.line().strip().rstrip(b"L")
    if raw in (b"00", b"01"):
        s.stack.append(raw == b"01")
    elif len(raw) <= DIGITS and raw.lstrip(b"-").isdigit():
        s.stack.append(int(raw))
    else:
        s.stack.append(Unread())


def long1(s: State) -> None:
    binary_long(s, s.number(1))


def long4(s: State) -> None:
    nbytes = text.signed(s.take(4))
    if nbytes < 0:
        raise s.fail("an integer of negative length")
    binary_long(s, nbytes)


def binary_long(s: State, nbytes: int) -> None:
    raw = s.take(nbytes)
    s.stack.append(text.signed(raw) if nbytes <= DIGITS else Unread())


def string(s: State) -> None:
    raw = s.line()
    try:
        s.stack.append(s.table.string(text.quoted(raw.strip())))
    except HoldfastError:
        s.odd("a STRING that Python 2 never wrote")
        s.stack.append(s.table.string(raw.strip()[1:-1]))


def dict_(s: State) -> None:
    s.table.spending.container()
    above = s.pop_mark()
    if len(above) % 2:
        s.odd("a DICT with a key that has no value")
        above.append(None)
    made: dict[object, object] = {}
    s.table.spending.fill(made, above)
    s.stack.append(made)


def get(s: State) -> None:
    s.stack.append(s.get(index_text(s)))


def put(s: State) -> None:
    s.put(index_text(s))


def index_text(s: State) -> int:
    raw = s.line().strip().lstrip(b"+").lstrip(b"0") or b"0"
    if len(raw) > DIGITS or not raw.isdigit():
        raise s.fail(f"{raw[:DIGITS]!r} is no memo index")
    return int(raw)


def find(s: State, module: object, name: object) -> object:
    """The global of two values, which are text unless the stream computed them."""
    if not isinstance(module, str) or not isinstance(name, str):
        s.odd("a global whose name the stream computes")
        return s.table.find("<computed>", "<computed>")
    if len(module) > NAME_NBYTES or len(name) > NAME_NBYTES:
        s.odd(f"a global with a name of more than {NAME_NBYTES} characters")
    return s.table.find(module[: NAME_NBYTES + 1], name[: NAME_NBYTES + 1])


def line_text(s: State) -> str:
    return s.line().decode("utf-8", "replace")


def global_(s: State) -> None:
    module, name = line_text(s), line_text(s)
    s.stack.append(find(s, module, name))


def stack_global(s: State) -> None:
    name, module = s.pop(), s.pop()
    s.stack.append(find(s, module, name))


def inst(s: State) -> None:
    module, name = line_text(s), line_text(s)
    args = tuple(s.pop_mark())
    s.stack.append(s.table.instance(find(s, module, name), args))


def obj(s: State) -> None:
    above = s.pop_mark()
    if not above:
        s.underflow()
    s.stack.append(s.table.instance(above[0], tuple(above[1:])))


def newobj(s: State) -> None:
    args, cls = s.pop(), s.pop()
    s.stack.append(s.table.new(cls, arguments(s, args), None))


def newobj_ex(s: State) -> None:
    kwargs, args, cls = s.pop(), s.pop(), s.pop()
    given = arguments(s, args)
    if type(kwargs) is not dict:
        s.odd("a NEWOBJ_EX whose keywords are no dict")
        kwargs = {}
    # As arguments, and a few of them: one dict of keywords may be named in a million calls.
    s.stack.append(s.table.new(cls, (*given[:SHOWN], *islice(kwargs.values(), SHOWN)) if kwargs else given, None))


def arguments(s: State, args: object) -> tuple[object, ...]:
    if type(args) is tuple:
        return args
    s.odd("arguments that are no tuple")
    return (args,)


def persid(s: State) -> None:
    s.stack.append(s.table.persistent(line_text(s)))


def extension(nbytes: int) -> Callable[[State], None]:
    """EXT1, EXT2, EXT4: a global by a number that a module may have given it."""

    def run(s: State) -> None:
        code = s.number(nbytes)
        s.odd("EXT: a global by a number that only the loading process knows")
        s.stack.append(s.table.find("<copyreg extension>", str(code)))

    return run


def frame(s: State) -> None:
    """Skipped: a frame says how to read, not what, and the C unpickler does not keep to it."""
    s.take(8)


def protocol(s: State) -> None:
    s.odd("PROTO anywhere but at the start")
    if s.number(1) > 5:
        raise s.fail("a protocol above the highest")


def next_buffer(s: State) -> None:
    s.odd("NEXT_BUFFER: data that was never in this file")
    s.stack.append(Unread())


def readonly_buffer(s: State) -> None:
    s.odd("READONLY_BUFFER: data that was never in this file")


def build(s: State) -> None:
    state = s.pop()
    s.table.build(s.top(), state)
    s.pos += s.table.behind(s.data, s.pos, s.limit)


TOLERANT: dict[int, Callable[[State], None]] = {
    **RARE,
    ord("I"): number,
    ord("L"): number,
    ord("F"): number,
    0x8A: long1,
    0x8B: long4,
    ord("S"): string,
    ord("d"): dict_,
    ord("g"): get,
    ord("p"): put,
    ord("c"): global_,
    0x93: stack_global,
    ord("i"): inst,
    ord("o"): obj,
    0x81: newobj,
    0x92: newobj_ex,
    ord("b"): build,
    ord("P"): persid,
    0x80: protocol,
    0x82: extension(1),
    0x83: extension(2),
    0x84: extension(4),
    0x95: frame,
    0x97: next_buffer,
    0x98: readonly_buffer,
}
