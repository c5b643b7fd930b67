"""The opcodes that are seldom met in checkpoints, one small function each; and `RARE`, which finds them by their byte.

Each takes the `State`, whose `pos` stands behind the opcode. What is not listed here or in the machine's loop is refused: among
them EXT1, EXT2, EXT4 (there is no registry of codes) and NEXT_BUFFER, READONLY_BUFFER (a file has no buffers out of band).
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.errors import LimitExceeded
from holdfast.formats.pickle import text
from holdfast.formats.pickle.state import NAME_NBYTES, State

INDEX_NBYTES = 20
"""Digits of a memo index in text."""


def integer(s: State) -> None:
    raw = s.line(most=s.limits.integer_nbytes * 4)
    # Python 2.3 and later write booleans as integers with a leading zero.
    s.stack.append(raw == b"01" if raw in (b"00", b"01") else text.decimal(raw, s.limits.integer_nbytes))


def long(s: State) -> None:
    raw = s.line(most=s.limits.integer_nbytes * 4)
    s.stack.append(text.decimal(raw[:-1] if raw[-1:] == b"L" else raw, s.limits.integer_nbytes))


def long1(s: State) -> None:
    binary_long(s, s.number(1))


def long4(s: State) -> None:
    binary_long(s, text.signed(s.take(4)))


def binary_long(s: State, nbytes: int) -> None:
    if nbytes < 0:
        raise s.fail("an integer of negative length")
    most = s.limits.integer_nbytes
    # One byte more for the sign: numpy's PCG64 keeps 128-bit numbers without one, which take 17 bytes.
    value = text.signed(s.take(nbytes)) if nbytes <= most + 1 else None
    if value is None or value.bit_length() > 8 * most:
        raise LimitExceeded(
            f"{s.stream}: an integer of {nbytes:,} bytes is larger than Limits(integer_nbytes={most})",
            offset=s.at,
            expected=most,
            found=nbytes,
        )
    s.stack.append(value)


def float_(s: State) -> None:
    s.stack.append(text.float_text(s.line(most=text.FLOAT_NBYTES)))


def string(s: State) -> None:
    s.stack.append(s.table.string(text.quoted(s.line())))


def binstring(s: State) -> None:
    nbytes = text.signed(s.take(4))
    if nbytes < 0:
        raise s.fail("a string of negative length")
    s.stack.append(s.table.string(s.take(nbytes)))


def short_binstring(s: State) -> None:
    s.stack.append(s.table.string(s.take(s.number(1))))


def unicode(s: State) -> None:
    s.stack.append(text.raw_unicode(s.line()))


def binunicode8(s: State) -> None:
    s.stack.append(text.utf8(s.take(s.number(8))))


def short_binbytes(s: State) -> None:
    s.stack.append(s.take(s.number(1)))


def binbytes(s: State) -> None:
    s.stack.append(s.take(s.number(4)))


def binbytes8(s: State) -> None:
    s.stack.append(s.take(s.number(8)))


def bytearray8(s: State) -> None:
    s.stack.append(bytearray(s.take(s.number(8))))


def pop(s: State) -> None:
    # As CPython: without a value above the MARK, POP takes the MARK itself.
    if s.stack:
        s.stack.pop()
    else:
        s.pop_mark()


def pop_mark(s: State) -> None:
    s.pop_mark()


def dup(s: State) -> None:
    s.stack.append(s.top())


def empty_list(s: State) -> None:
    s.table.spending.container()
    s.stack.append([])


def list_(s: State) -> None:
    s.table.spending.container()
    above = s.pop_mark()
    s.stack.append(above)


def dict_(s: State) -> None:
    s.table.spending.container()
    above = s.pop_mark()
    if len(above) % 2:
        raise s.fail("a DICT with a key that has no value")
    made: dict[object, object] = {}
    s.table.spending.fill(made, above)
    s.stack.append(made)


def tuple1(s: State) -> None:
    s.table.spending.container()
    s.stack.append((s.pop(),))


def tuple3(s: State) -> None:
    c, b, a = s.pop(), s.pop(), s.pop()
    s.stack.append((a, b, c))


def empty_set(s: State) -> None:
    s.table.spending.container()
    s.stack.append(set())


def additems(s: State) -> None:
    above = s.pop_mark()
    target = s.top()
    if type(target) is set:
        s.table.spending.collect(target, above)
    else:
        s.table.add(target, above)


def frozenset_(s: State) -> None:
    s.table.spending.container()
    made: set[object] = set()
    s.table.spending.collect(made, s.pop_mark())
    s.stack.append(frozenset(made))


def append(s: State) -> None:
    value = s.pop()
    target = s.top()
    if type(target) is list:
        target.append(value)
    else:
        s.table.append(target, [value])


def setitem(s: State) -> None:
    value, key = s.pop(), s.pop()
    target = s.top()
    if type(target) is dict:
        s.table.spending.fill(target, [key, value])
    else:
        s.table.set_item(target, key, value)


def get(s: State) -> None:
    s.stack.append(s.get(index_text(s)))


def put(s: State) -> None:
    s.put(index_text(s))


def index_text(s: State) -> int:
    raw = s.line(most=INDEX_NBYTES)
    if not raw.isdigit():
        raise s.fail(f"{raw!r} is no memo index")
    return int(raw)


def global_(s: State) -> None:
    module, name = text.utf8(s.line(most=NAME_NBYTES)), text.utf8(s.line(most=NAME_NBYTES))
    s.stack.append(s.table.find(module, name))
    s.named()


def stack_global(s: State) -> None:
    name, module = s.pop(), s.pop()
    # Exact types: a subclass of str (numpy has one) is not what a writer puts here.
    if type(name) is not str or type(module) is not str:
        raise s.fail("a STACK_GLOBAL whose module or name is no text")
    if len(name) > NAME_NBYTES or len(module) > NAME_NBYTES:
        raise s.fail(f"a global with a name of more than {NAME_NBYTES} characters")
    s.stack.append(s.table.find(module, name))
    s.named()


def inst(s: State) -> None:
    module, name = text.utf8(s.line(most=NAME_NBYTES)), text.utf8(s.line(most=NAME_NBYTES))
    args = tuple(s.pop_mark())
    made(s, s.table.instance(s.table.find(module, name), args))


def obj(s: State) -> None:
    above = s.pop_mark()
    if not above:
        s.underflow()
    made(s, s.table.instance(above[0], tuple(above[1:])))


def newobj(s: State) -> None:
    args, cls = s.pop(), s.pop()
    made(s, s.table.new(cls, arguments(s, args), None))


def newobj_ex(s: State) -> None:
    kwargs, args, cls = s.pop(), s.pop(), s.pop()
    if type(kwargs) is not dict:
        raise s.fail("a NEWOBJ_EX whose keywords are no dict")
    s.table.spending.copy(len(kwargs))
    if not all(type(key) is str for key in kwargs):
        raise s.fail("a NEWOBJ_EX with a keyword that is no text")
    made(s, s.table.new(cls, arguments(s, args), kwargs))


def arguments(s: State, args: object) -> tuple[object, ...]:
    if type(args) is not tuple:
        raise s.fail("arguments that are no tuple")
    return args


def made(s: State, value: object) -> None:
    s.announce(value)
    s.stack.append(value)


def build(s: State) -> None:
    state = s.pop()
    target = s.top()
    value = s.table.build(target, state)
    if value is not target:
        s.stack[-1] = value
        s.replace(target, value)


def persid(s: State) -> None:
    s.stack.append(s.table.persistent(text.utf8(s.line())))


RARE: dict[int, Callable[[State], None]] = {
    ord("I"): integer,
    ord("L"): long,
    0x8A: long1,
    0x8B: long4,
    ord("F"): float_,
    ord("S"): string,
    ord("T"): binstring,
    ord("U"): short_binstring,
    ord("V"): unicode,
    0x8D: binunicode8,
    ord("C"): short_binbytes,
    ord("B"): binbytes,
    0x8E: binbytes8,
    0x96: bytearray8,
    ord("0"): pop,
    ord("1"): pop_mark,
    ord("2"): dup,
    ord("]"): empty_list,
    ord("l"): list_,
    ord("d"): dict_,
    0x85: tuple1,
    0x87: tuple3,
    0x8F: empty_set,
    0x90: additems,
    0x91: frozenset_,
    ord("a"): append,
    ord("s"): setitem,
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
}

REFUSED = {
    0x80: "PROTO anywhere but at the start",
    0x82: "EXT1: an object by a number that only the writer's process knew",
    0x83: "EXT2: an object by a number that only the writer's process knew",
    0x84: "EXT4: an object by a number that only the writer's process knew",
    0x97: "NEXT_BUFFER: data that was never in this file",
    0x98: "READONLY_BUFFER: data that was never in this file",
}
"""Opcodes that are known and have no place in a file."""
