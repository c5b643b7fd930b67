"""The opcodes that are seldom met in checkpoints, one small function each: `RARE` finds them by their byte, `TOLERANT` for a scan.

Each takes the `State`, whose `pos` stands behind the opcode. What is not listed here or in the machine's loop is refused.

A scan must see what comes behind an oddity, because a loader would run it. So with a tolerant table every opcode does at least what
either of CPython's two unpicklers (in C, and in Python, which joblib and dill use) does. What no writer does is recorded, and
refused only where both of them stop. Still nothing is imported or called.

**`State`** is what the interpreter works on: the stream and the position in it, the stack, the marks, the memo. A MARK puts the
stack aside and starts an empty one, so that an opcode that takes too much finds an empty list and nothing beneath it. The memo
is a list, because writers number its entries 0, 1, 2, …; entries out of that order go to a dict.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import NoReturn

from holdfast.core.limits import Limits
from holdfast.errors import FormatError, LimitExceeded, PickleError, Truncated
from holdfast.formats.pickle import text
from holdfast.formats.pickle.table import Pending, ReducerTable

NAME_NBYTES = 1024
"""The longest module or name of a global. Names are compared and hashed at every mention, so they are short."""


class State:
    """One interpretation. The loop holds `pos` and `stack` in local variables and writes them back for rare opcodes."""

    __slots__ = (
        "at", "count", "counted", "data", "end", "frame_stop", "framed", "limit", "limits", "marked",
        "memo", "pos", "sparse", "stack", "start", "stream", "table", "watched",
    )  # fmt: skip

    def __init__(
        self, data: bytes, table: ReducerTable, limits: Limits, *, stream: str, start: int, end: int
    ) -> None:
        self.data, self.table, self.limits, self.stream, self.start, self.end = (
            data,
            table,
            limits,
            stream,
            start,
            end,
        )
        """The last position for the end of the stream: the end of the data, or of what the limit allows."""
        self.limit = end
        """The end of the frame at work, or `end` between frames."""
        self.framed = False
        self.frame_stop = start
        """The end of the current frame as its header claims it, which may lie beyond `end`."""
        self.pos = start
        self.at = start
        """The position of the current opcode."""
        self.count = 0
        """Opcodes so far."""
        self.stack: list[object] = []
        self.marked: list[list[object]] = []
        self.memo: list[object] = []
        self.sparse: dict[int, object] = {}
        self.counted = 0
        """Entries of `memo` that were looked for in `sparse`."""
        self.watched: dict[int, tuple[Pending, list[int]]] = {}
        """Unfinished objects, by identity, with the memo entries that hold them."""

    def fail(self, message: str) -> PickleError:
        return PickleError(f"{self.stream}: {message}", offset=self.at)

    def misframe(self, message: str) -> PickleError:
        """Return the error for a frame that unpicklers read differently, and record it in the table."""
        self.table.misframed = message
        return self.fail(message)

    def odd(self, message: str) -> None:
        """Refuse what no writer does and CPython accepts; a tolerant table records it instead."""
        if not self.table.tolerant:
            raise self.fail(message)
        self.table.note(message)

    def entries(self) -> int:
        """How many memo entries there are, which is the number that MEMOIZE gives."""
        while self.counted < len(self.memo):
            # Written out of order once, and in order since.
            self.sparse.pop(self.counted, None)
            self.counted += 1
        return len(self.memo) + len(self.sparse)

    def short(self) -> FormatError | LimitExceeded:
        """The error for an opcode that needs bytes beyond `limit`."""
        self.table.reached = self.at
        if self.framed and self.limit == self.frame_stop:
            return self.misframe("an opcode reaches beyond the end of its frame")
        if self.end < len(self.data):
            most = self.end - self.start
            message = f"{self.stream}: the pickle is longer than the {most:,} bytes allowed (Limits.pickle_nbytes)"
            return LimitExceeded(message, offset=self.at, expected=most)
        return Truncated(f"{self.stream} ends before its pickle does", offset=self.end)

    def underflow(self) -> NoReturn:
        raise self.fail("an opcode takes a value or a MARK that is not there")

    def pop(self) -> object:
        if not self.stack:
            self.underflow()
        return self.stack.pop()

    def top(self) -> object:
        if not self.stack:
            self.underflow()
        return self.stack[-1]

    def pop_mark(self) -> list[object]:
        """Everything above the last MARK, which goes away."""
        if not self.marked:
            self.underflow()
        above, self.stack = self.stack, self.marked.pop()
        return above

    def take(self, nbytes: int) -> bytes:
        """The next bytes of the stream; compared with what is there before anything is allocated."""
        stop = self.pos + nbytes
        if stop > self.limit:
            raise self.short()
        raw = self.data[self.pos : stop]
        self.pos = stop
        return raw

    def number(self, nbytes: int) -> int:
        """An unsigned integer, lowest byte first."""
        return int.from_bytes(self.take(nbytes), "little")

    def line(self, most: int | None = None) -> bytes:
        """The bytes up to the next newline, which is skipped; at most `most` of them."""
        reach = self.limit if most is None else min(self.limit, self.pos + most + 1)
        stop = self.data.find(b"\n", self.pos, reach)
        if stop < 0:
            if reach == self.limit:
                raise self.short()
            raise self.fail(f"a text of more than {most} bytes where a name or a number belongs")
        raw = self.data[self.pos : stop]
        self.pos = stop + 1
        return raw

    def put(self, index: int) -> None:
        """Remember the top of the stack under `index`."""
        value = self.top()
        if index < len(self.memo):
            self.memo[index] = value
        elif index == len(self.memo):
            self.memo.append(value)
        else:
            if index > self.count + 1:
                self.odd(
                    f"memo entry {index} after {self.count} opcodes: no writer numbers like that"
                )
            self.sparse[index] = value
        if self.watched:
            self.watch(value, index)

    def get(self, index: int) -> object:
        """The value that was remembered under `index`."""
        if 0 <= index < len(self.memo):
            return self.memo[index]
        if index not in self.sparse:
            raise self.fail(f"memo entry {index} was never written")
        return self.sparse[index]

    def watch(self, value: object, index: int) -> None:
        """Record that a memo entry holds `value`, if that is an object that is not finished yet."""
        found = self.watched.get(id(value))
        if found is not None:
            found[1].append(index)

    def announce(self, value: object) -> None:
        """Record an object that only BUILD will finish."""
        if isinstance(value, Pending):
            self.watched[id(value)] = (value, [])

    def replace(self, old: object, new: object) -> None:
        """Put a finished object where the unfinished one was remembered."""
        found = self.watched.pop(id(old), None)
        for index in found[1] if found is not None else ():
            memo: list[object] | dict[int, object] = (
                self.memo if index < len(self.memo) else self.sparse
            )
            if memo[index] is old:
                memo[index] = new


INDEX_NBYTES = 20
"""Digits of a memo index in text."""

DIGITS = 40
"""Longer numbers are not worth knowing to a scan, and `int` of them is quadratic."""

SHOWN = 8
"""Arguments of one call with keywords that a scan stores."""


class Unread:
    """A value that a scan does not need to know: a huge integer, a buffer from elsewhere."""

    __slots__ = ()


def integer(s: State) -> None:
    raw = s.line(most=s.limits.integer_nbytes * 4)
    # Python 2.3 and later write booleans as integers with a leading zero.
    s.stack.append(
        raw == b"01" if raw in (b"00", b"01") else text.decimal(raw, s.limits.integer_nbytes)
    )


def long(s: State) -> None:
    raw = s.line(most=s.limits.integer_nbytes * 4)
    s.stack.append(text.decimal(raw[:-1] if raw[-1:] == b"L" else raw, s.limits.integer_nbytes))


def any_number(s: State) -> None:
    """INT, LONG, FLOAT in a scan: CPython takes more spellings than any writer uses (`0x10`, `1_000`)."""
    raw = s.line().strip().rstrip(b"L")
    if raw in (b"00", b"01"):
        s.stack.append(raw == b"01")
    elif len(raw) <= DIGITS and raw.removeprefix(b"-").isdigit():
        s.stack.append(int(raw))
    else:
        s.stack.append(Unread())


def binary_long(s: State, nbytes: int) -> None:
    if nbytes < 0:
        raise s.fail("an integer of negative length")
    if s.table.tolerant:
        raw = s.take(nbytes)
        s.stack.append(text.signed(raw) if nbytes <= DIGITS else Unread())
        return
    most = s.limits.integer_nbytes
    # One byte more for the sign: numpy's PCG64 keeps 128-bit numbers without one, which take 17 bytes.
    value = text.signed(s.take(nbytes)) if nbytes <= most + 1 else None
    if value is None or value.bit_length() > 8 * most:
        message = f"{s.stream}: an integer of {nbytes:,} bytes is larger than Limits(integer_nbytes={most})"
        raise LimitExceeded(message, offset=s.at, expected=most, found=nbytes)
    s.stack.append(value)


def string(s: State) -> None:
    raw = s.line()
    raw = raw.strip() if s.table.tolerant else raw
    try:
        content = text.quoted(raw)
    except PickleError:
        if not s.table.tolerant:
            raise
        s.table.note("a STRING that Python 2 never wrote")
        content = raw[1:-1]
    s.stack.append(s.table.string(content))


def binstring(s: State) -> None:
    nbytes = text.signed(s.take(4))
    if nbytes < 0:
        raise s.fail("a string of negative length")
    byte_string(s, nbytes, s.table.string)


def byte_string(s: State, nbytes: int, make: Callable[[bytes], object] = bytes) -> None:
    """A byte string, of which `make` makes the value."""
    s.stack.append(s.table.byte_string(s, nbytes, make))


def pop(s: State) -> None:
    # As CPython: without a value above the MARK, POP takes the MARK itself.
    if s.stack:
        s.stack.pop()
    else:
        s.pop_mark()


def pop_mark(s: State) -> None:
    s.pop_mark()


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
        s.odd("a DICT with a key that has no value")
        above.append(None)
    made: dict[object, object] = {}
    s.table.spending.fill(made, above)
    s.stack.append(made)


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
    members: set[object] = set()
    s.table.spending.collect(members, s.pop_mark())
    s.stack.append(frozenset(members))


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


def memo_index(s: State) -> int:
    raw = (
        (s.line().strip().lstrip(b"+").lstrip(b"0") or b"0")
        if s.table.tolerant
        else s.line(most=INDEX_NBYTES)
    )
    if len(raw) > DIGITS or not raw.isdigit():
        raise s.fail(f"{raw[:DIGITS]!r} is no memo index")
    return int(raw)


def name_line(s: State) -> str:
    if s.table.tolerant:
        return s.line().decode("utf-8", "replace")
    raw = s.line(most=NAME_NBYTES)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return text.utf8(raw)


def find(s: State, module: object, name: object) -> object:
    """The global of two values, which are text unless the stream computed them."""
    # Exact types: a subclass of str (numpy has one) is not what a writer puts here.
    if type(module) is not str or type(name) is not str:
        s.odd("a global whose name the stream computes")
        module = name = "<computed>"
    if len(module) > NAME_NBYTES or len(name) > NAME_NBYTES:
        s.odd(f"a global with a name of more than {NAME_NBYTES} characters")
    return s.table.find(module[: NAME_NBYTES + 1], name[: NAME_NBYTES + 1])


def global_(s: State) -> None:
    module = name_line(s)
    name = name_line(s)
    # Lines are as short as names have to be, except those of a tolerant table.
    value = find(s, module, name) if s.table.tolerant else s.table.find(module, name)
    s.stack.append(value)


def stack_global(s: State) -> None:
    name, module = s.pop(), s.pop()
    s.stack.append(find(s, module, name))


def inst(s: State) -> None:
    module, name = name_line(s), name_line(s)
    args = tuple(s.pop_mark())
    push_made(s, s.table.instance(find(s, module, name), args))


def obj(s: State) -> None:
    above = s.pop_mark()
    if not above:
        s.underflow()
    push_made(s, s.table.instance(above[0], tuple(above[1:])))


def newobj_ex(s: State) -> None:
    kwargs, args, cls = s.pop(), s.pop(), s.pop()
    if type(kwargs) is not dict:
        s.odd("a NEWOBJ_EX whose keywords are no dict")
        kwargs = {}
    if s.table.tolerant:
        given = arguments(s, args)
        # As arguments, and a few of them: one dict of keywords may be named in a million calls.
        s.stack.append(
            s.table.new(
                cls, (*given[:SHOWN], *islice(kwargs.values(), SHOWN)) if kwargs else given, None
            )
        )
        return
    s.table.spending.copy(len(kwargs))
    if not all(type(key) is str for key in kwargs):
        raise s.fail("a NEWOBJ_EX with a keyword that is no text")
    push_made(s, s.table.new(cls, arguments(s, args), kwargs))


def arguments(s: State, args: object) -> tuple[object, ...]:
    if type(args) is tuple:
        return args
    s.odd("arguments that are no tuple")
    return (args,)


def push_made(s: State, value: object) -> None:
    s.announce(value)
    s.stack.append(value)


def persid(s: State) -> None:
    pid = s.line()
    s.stack.append(
        s.table.persistent(pid.decode("utf-8", "replace") if s.table.tolerant else text.utf8(pid))
    )


def extension(nbytes: int) -> Callable[[State], None]:
    """EXT1, EXT2, EXT4: a global by a number that a module may have given it."""

    def run(s: State) -> None:
        code = s.number(nbytes)
        s.odd("EXT: a global by a number that only the loading process knows")
        s.stack.append(s.table.find("<copyreg extension>", str(code)))

    return run


def frame(s: State) -> None:
    # `pickle.loads` has all bytes in one buffer, so it passes over frames.
    s.take(8)


def protocol(s: State) -> None:
    s.odd("PROTO anywhere but at the start")
    if s.number(1) > 5:
        raise s.fail("a protocol above the highest")


def next_buffer(s: State) -> None:
    s.odd("NEXT_BUFFER: data that was never in this file")
    s.stack.append(Unread())


RARE: dict[int, Callable[[State], None]] = {
    ord("I"): integer,
    ord("L"): long,
    0x8A: lambda s: binary_long(s, s.number(1)),  # LONG1
    0x8B: lambda s: binary_long(s, text.signed(s.take(4))),  # LONG4
    ord("F"): lambda s: s.stack.append(text.float_text(s.line(most=text.FLOAT_NBYTES))),  # FLOAT
    ord("S"): string,
    ord("T"): binstring,
    ord("U"): lambda s: byte_string(s, s.number(1), s.table.string),  # SHORT_BINSTRING
    ord("V"): lambda s: s.stack.append(text.raw_unicode(s.line())),  # UNICODE
    0x8D: lambda s: s.stack.append(text.utf8(s.take(s.number(8)))),  # BINUNICODE8
    ord("C"): lambda s: byte_string(s, s.number(1)),  # SHORT_BINBYTES
    ord("B"): lambda s: byte_string(s, s.number(4)),  # BINBYTES
    0x8E: lambda s: byte_string(s, s.number(8)),  # BINBYTES8
    0x96: lambda s: byte_string(s, s.number(8), bytearray),  # BYTEARRAY8
    ord("0"): pop,
    ord("1"): pop_mark,
    ord("2"): lambda s: s.stack.append(s.top()),  # DUP
    ord("]"): empty_list,
    ord("l"): list_,
    ord("d"): dict_,
    0x87: tuple3,
    0x8F: empty_set,
    0x90: additems,
    0x91: frozenset_,
    ord("a"): append,
    ord("s"): setitem,
    ord("g"): lambda s: s.stack.append(s.get(memo_index(s))),  # GET
    ord("p"): lambda s: s.put(memo_index(s)),  # PUT
    ord("c"): global_,
    0x93: stack_global,
    ord("i"): inst,
    ord("o"): obj,
    0x92: newobj_ex,
    ord("P"): persid,
}

TOLERANT: dict[int, Callable[[State], None]] = {
    **RARE,
    **dict.fromkeys(b"ILF", any_number),
    0x80: protocol,
    0x82: extension(1),
    0x83: extension(2),
    0x84: extension(4),
    0x95: frame,
    0x97: next_buffer,
    0x98: lambda s: s.odd("READONLY_BUFFER: data that was never in this file"),
}

REFUSED = {
    0x80: "PROTO anywhere but at the start",
    **{
        0x82 + i: f"EXT{1 << i}: an object by a number that only the writer's process knew"
        for i in range(3)
    },
    0x97: "NEXT_BUFFER: data that was never in this file",
    0x98: "READONLY_BUFFER: data that was never in this file",
}
"""Opcodes that are known and have no place in a file: no registry of codes, no buffers out of band."""
