"""`PickleWriter`: plain values to a pickle of protocol 2, byte for byte as CPython's own pickler writes them.

1. Each type has a row, a function that appends opcodes. What has no row is a problem, with its path; writing goes on, so that all
   problems are found. No method of a value is called, so no code of the caller runs.
2. Every value that can be shared is remembered (BINPUT) behind its opcodes, and met again it is a reference (BINGET): containers
   that are shared stay shared. Lists and dicts are remembered before they are filled, so they may contain themselves.
3. As in CPython, sameness is identity: the same object twice is one, two equal texts are two. Globals and dtypes go by their value,
   since there is one of each. A value that the writer makes itself only takes a number: it does not come again.
4. Protocol 2 has no opcodes for bytes, sets and the like: they are calls of their types, under the names of Python 2.

One deviation: CPython writes empty bytes as `bytes()`, which torch refuses to load with `weights_only=True`; they are written like
other bytes, as encoded text.

Used by subclassing: formats add rows of their own (`rows`) and write with `write`.

Scalars, dtypes and arrays are written as numpy itself does (since numpy 2, under `numpy._core`):

    scalar    numpy._core.multiarray.scalar(dtype, bytes)
    dtype     numpy.dtype('f4', False, True)  BUILD (3, '<', None, None, None, -1, -1, 0)
    array     numpy._core.multiarray._reconstruct(ndarray, (0,), b'b')  BUILD (1, shape, dtype, fortran, bytes)
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import islice
from pathlib import PurePath

import numpy as np

from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.tree import join_path
from holdfast.formats.pickle.plain import PATHS, PLAIN_TYPES, DefaultDict
from holdfast.formats.pickle.table import ATTRIBUTES

BYTE = [bytes([i]) for i in range(256)]
PUT1, GET1, INT1 = [b"q" + b for b in BYTE], [b"h" + b for b in BYTE], [b"K" + b for b in BYTE]
INT2, INT4 = struct.Struct("<cH").pack, struct.Struct("<ci").pack

LONG_PUT = LONG_GET = TEXT = struct.Struct("<cI").pack
"""Packs `r` (LONG_BINPUT) or `j` (LONG_BINGET) and a number, or `X` (BINUNICODE) and the length of the text that follows. Of
every ten opcodes three are LONG_BINPUT, so these are here without a function around them."""

FLOAT = struct.Struct(">cd").pack
"""Packs `G`, BINFLOAT, and the number; the one place where a pickle has the highest byte first."""

TUPLES = (b")", b"\x85", b"\x86", b"\x87")
"""EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3: tuples without a MARK."""


def put(number: int) -> bytes:
    """BINPUT, LONG_BINPUT: remember the top of the stack under a number."""
    return PUT1[number] if number < 256 else LONG_PUT(b"r", number)


def get(number: int) -> bytes:
    """BINGET, LONG_BINGET: what was remembered under a number."""
    return GET1[number] if number < 256 else LONG_GET(b"j", number)


def integer(value: int) -> bytes:
    """The shortest opcode for an integer: BININT1, BININT2, BININT, LONG1 or LONG4.

    >>> integer(7), integer(-1), integer(1 << 31)
    (b'K\\x07', b'J\\xff\\xff\\xff\\xff', b'\\x8a\\x05\\x00\\x00\\x00\\x80\\x00')
    """
    if 0 <= value <= 0xFFFF:
        return INT1[value] if value <= 0xFF else INT2(b"M", value)
    if -(1 << 31) <= value < 1 << 31:
        return INT4(b"J", value)
    raw = value.to_bytes((value.bit_length() >> 3) + 1, "little", signed=True)
    if raw[-1] == 0xFF and raw[-2] & 0x80:
        # -(2 ** (8 * n - 1)) fits in n bytes, and its bit length asks for one more.
        raw = raw[:-1]
    return (b"\x8a" + BYTE[len(raw)] if len(raw) < 256 else INT4(b"\x8b", len(raw))) + raw


NDARRAY = Global("numpy", "ndarray")

ENDS_IN_NUL = "text or bytes of numpy that end in NUL, which numpy cuts off when it reads them"


def ends_in_nul(value: object) -> bool:
    """Whether a value is text or bytes of numpy that a pickle cannot keep."""
    return isinstance(value, np.str_ | np.bytes_) and value[-1:] in ("\0", b"\0")


def write_scalar(writer: PickleWriter, value: np.generic) -> None:
    if value.dtype.hasobject:
        writer.refuse("a numpy scalar with Python objects in it")
    elif ends_in_nul(value):
        writer.refuse(ENDS_IN_NUL)
    else:
        # An empty text has no bytes in numpy's own pickle, and four of them in `tobytes` (numpy 2.4).
        content = value.tobytes() if value.dtype.itemsize else b""
        writer.call(value, "numpy._core.multiarray.scalar", (value.dtype, content))


def write_dtype(writer: PickleWriter, dtype: np.dtype[np.generic]) -> None:
    if dtype in writer.dtypes:
        writer.out.append(writer.dtypes[dtype])
        return
    # numpy's own description of it: numbers, texts, other dtypes, and the class of an element that numpy itself lacks.
    described = dtype.__reduce__()
    args, state = described[1], described[2]
    if dtype.hasobject or not isinstance(args, tuple) or not isinstance(state, tuple):
        writer.refuse(f"the numpy dtype {dtype!r:.80}")
        return
    named = tuple(Global(a.__module__, a.__name__) if isinstance(a, type) else a for a in args)
    writer.keep((named, state))
    writer.name("numpy", "dtype")
    writer.fresh_tuple(named)
    writer.out.append(b"R")
    writer.dtypes[dtype] = get(writer.put())
    writer.fresh_tuple(state)
    writer.out.append(b"b")


def write_array(writer: PickleWriter, array: np.ndarray) -> None:
    if writer.known(array):
        return
    if array.dtype.hasobject:
        writer.refuse("a numpy array of Python objects")
        return
    if not array.dtype.itemsize:
        writer.refuse(f"a numpy array of {array.dtype}, whose elements have no bytes")
        return
    # The tuple is made anew for each array, as numpy does: a constant would be taken for one that is shared.
    length = 0
    writer.call(array, "numpy._core.multiarray._reconstruct", (NDARRAY, (length,), b"b"))
    fortran = array.flags.fnc
    state = (1, array.shape, array.dtype, fortran, array.tobytes("F" if fortran else "C"))
    writer.keep(state)
    writer.fresh_tuple(state)
    writer.out.append(b"b")


Row = Callable[..., None]
"""A function that appends the opcodes of a value of its own type to those of a writer."""

BATCH_ITEMS = 1000
"""Items between a MARK and the opcode that takes them, as CPython has it."""

HASHED_WHOLE = (tuple, frozenset)
"""Keys whose hash needs all values inside of them."""

TENSOR_MARKS = 2
"""MARKs that are open within a tensor or an array: of its arguments, and of its storage or dtype."""

WITHOUT_MARKS = frozenset({
    type(None), bool, int, float, str, bytes, bytearray, complex, range, slice, Global,
    list, tuple, dict, OrderedDict, Counter, defaultdict, DefaultDict, set, frozenset,
})  # fmt: skip
"""Types of values that have no MARK besides those that the writer counts."""

MAX_TEXT_NBYTES = 0xFFFFFFFF
"""BINUNICODE has a 32-bit length; its 64-bit sister came with protocol 4."""

OLD_MODULES = {"builtins": "__builtin__", "copyreg": "copy_reg"}
OLD_NAMES = {
    "builtins.range": "xrange",
    "builtins.str": "unicode",
    "builtins.int": "long",
    "builtins.chr": "unichr",
}
"""Protocol 2 names things as Python 2 did, whatever writes it."""

FACTORIES: dict[object, Global] = {
    **{kind: Global("builtins", name) for name, kind in PLAIN_TYPES.items()},
    OrderedDict: Global("collections", "OrderedDict"),
}
"""Factories that a `defaultdict` may have."""


@lru_cache(1024)
def _global_line(module: str, name: str) -> bytes:
    """The opcode of a global; empty where its name has no place in a pickle."""
    text = module + name
    if "\n" in text or (not text.isascii() and any("\ud800" <= sign <= "\udfff" for sign in text)):
        return b""
    old = OLD_MODULES.get(module, module), OLD_NAMES.get(f"{module}.{name}", name)
    return b"c%b\n%b\n" % (old[0].encode(), old[1].encode())


class PickleWriter:
    """Writes one pickle: `write` a value, then take the bytes from `finish`, unless there are `problems`."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or DEFAULTS
        self.out: list[bytes] = [b"\x80\x02"]
        self.problems: list[str] = []
        """Values that this pickle cannot hold, each with its path."""
        self.notes: list[str] = []
        """Notes for people about the file."""
        self.mentioned: dict[Global, Sequence[object]] = {}
        """Every global that the pickle names, and the path where it does first."""
        self.count = 0
        """Numbers of the memo that are taken."""
        self.memo: dict[int, int] = {}
        self.path: list[object] = []
        self._marks = 0
        """MARKs of containers that are open."""
        self._references: dict[object, bytes] = {}
        """By their names: references to globals that were written before."""
        self.dtypes: dict[np.dtype[np.generic], bytes] = {}
        """References to dtypes that were written before."""
        self._kept: list[object] = []
        """Values made while writing. The memo knows them by identity, which must not be given to another."""
        # Functions and not methods of this object, which would keep it alive, and with it all that it wrote.
        self.rows: dict[type, Row] = {**self.written_types()}

    @staticmethod
    @cache
    def written_types() -> Mapping[type, Row]:
        """How values of each type are written."""
        return {
            type(None): lambda writer, _: writer.out.append(b"N"),
            bool: PickleWriter._bool,
            int: PickleWriter._int,
            float: lambda writer, value: writer.out.append(FLOAT(b"G", value)),
            str: PickleWriter._str,
            bytes: lambda writer, value: writer.call(
                value, "_codecs.encode", (value.decode("latin1"), "latin1")
            ),
            bytearray: lambda writer, value: writer.call(
                value, "builtins.bytearray", (bytes(value),) if value else ()
            ),
            list: PickleWriter._list,
            tuple: PickleWriter._tuple,
            dict: PickleWriter._dict,
            OrderedDict: PickleWriter._ordered_dict,
            Counter: lambda writer, value: writer.call(
                value, "collections.Counter", (dict(value),)
            ),
            defaultdict: PickleWriter._default_dict,
            DefaultDict: PickleWriter._default_dict,
            set: PickleWriter._set,
            frozenset: PickleWriter._set,
            complex: lambda writer, value: writer.call(
                value, "builtins.complex", (value.real, value.imag)
            ),
            range: PickleWriter._range,
            slice: PickleWriter._range,
            Global: PickleWriter._global,
            np.ndarray: write_array,
        }

    def finish(self) -> bytes:
        """The whole pickle."""
        self.out.append(b".")
        return b"".join(self.out)

    def write(self, value: object) -> None:
        """Append the opcodes of a value."""
        row = self.rows.get(type(value))
        if row is None:
            row = self._rare(value)
        row(self, value)

    def refuse(self, what: str) -> None:
        """Record a problem at the path of the value being written; None is written in its place."""
        self.problems.append(f"{self.where()}: {what}")
        self.out.append(b"N")

    def where(self, path: Sequence[object] | None = None) -> str:
        """A path, that of the value at work unless another is given, for people."""
        steps = self.path if path is None else path
        return (
            join_path(
                tuple(k if isinstance(k, str | int) else f"<{type(k).__name__}>" for k in steps)
            )
            or "the state"
        )

    # For rows.

    def put(self) -> int:
        """Remember the top of the stack; its number."""
        number = self.count
        self.count = number + 1
        self.out.append(LONG_PUT(b"r", number) if number > 255 else put(number))
        return number

    def known(self, value: object) -> bool:
        """Write a reference to a value that was written before, if it was."""
        number = self.memo.get(id(value))
        if number is None:
            return False
        self.out.append(get(number))
        return True

    def name(self, module: str, name: str) -> None:
        """A global."""
        found = self._references.get((module, name))
        if found is not None:
            self.out.append(found)
            return
        line = _global_line(module, name)
        if not line:
            self.refuse(
                f"the global {module[:80]!r} {name[:80]!r}, whose name has no place in a pickle"
            )
            return
        self.mentioned.setdefault(Global(module, name), [*self.path])
        self.out.append(line)
        number = self.put()
        self._references[module, name] = get(number)

    def fresh_tuple(self, items: tuple[object, ...]) -> None:
        """A tuple that is written once: its identity is not remembered."""
        if len(items) > 3:
            self.out.append(b"(")
        for item in items:
            self.write(item)
        self.out.append(b"t" if len(items) > 3 else TUPLES[len(items)])
        if items:
            self.put()

    def call(self, value: object, what: str, args: tuple[object, ...]) -> None:
        """A value as the call that makes it."""
        if self.known(value):
            return
        self.keep(args)
        self.name(*what.rsplit(".", 1))
        self.fresh_tuple(args)
        self.out.append(b"R")
        self.memo[id(value)] = self.put()

    def keep(self, value: object) -> None:
        """Hold a value that was made while writing, so that its identity is not given to another."""
        self._kept.append(value)

    def _rare(self, value: object) -> Row:
        """The row of a type that is not listed by itself: numpy's scalars and dtypes, and paths."""
        row: Row = PickleWriter._problem
        if isinstance(value, np.generic):
            row = write_scalar
        elif isinstance(value, np.dtype):
            row = write_dtype
        elif isinstance(value, PurePath) and type(value).__name__ in PATHS:
            row = PickleWriter._path
        self.rows[type(value)] = row
        return row

    def _problem(self, value: object) -> None:
        if isinstance(value, Opaque):
            self.refuse(
                f"an object of {value.module}.{value.name}, which was not built when the file was opened"
            )
        else:
            self.refuse(
                f"a {type(value).__module__}.{type(value).__qualname__}, which is not plain data"
            )

    def _bool(self, value: bool) -> None:
        self.out.append(b"\x88" if value else b"\x89")

    def _int(self, value: int) -> None:
        if value.bit_length() > 8 * self.limits.integer_nbytes:
            self.refuse(
                f"an integer of {value.bit_length():,} bits, above Limits(integer_nbytes={self.limits.integer_nbytes})"
            )
            return
        self.out.append(integer(value))

    def _str(self, value: str) -> None:
        if self.known(value):
            return
        raw = value.encode("utf-8", "surrogatepass")
        if len(raw) > MAX_TEXT_NBYTES:
            self.refuse(
                f"a text of {len(raw):,} bytes, above the {MAX_TEXT_NBYTES:,} of protocol 2"
            )
            return
        self.out.append(TEXT(b"X", len(raw)) + raw)
        self.memo[id(value)] = self.put()

    def _range(self, value: range | slice) -> None:
        self.call(value, f"builtins.{type(value).__name__}", (value.start, value.stop, value.step))

    def _path(self, value: PurePath) -> None:
        if type(value)(*value.parts) != value:
            # `/C:` on Windows is another path once it has been parts (Python 3.11).
            self.refuse("a path that its parts do not give back")
            return
        self.call(value, f"pathlib.{type(value).__name__}", value.parts)

    def _global(self, value: Global) -> None:
        # A name is a line of text in this protocol. One that is not would be read as something else.
        for text in (value.module, value.name):
            if not text or not text.isprintable() or " " in text:
                self.refuse(
                    f"a global whose name is no name ({value.module[:40]!r}, {value.name[:40]!r})"
                )
                return
        self.name(value.module, value.name)

    def _list(self, value: list[object]) -> None:
        if self.known(value):
            return
        self.out.append(b"]")
        self.memo[id(value)] = self.put()
        if self.too_deep():
            return
        for batch in _batches(enumerate(value)):
            self._fill(batch, b"a" if len(value) == 1 else b"e")

    def _dict(self, value: dict[object, object]) -> None:
        if self.known(value):
            return
        self.out.append(b"}")
        self.memo[id(value)] = self.put()
        if self.too_deep():
            return
        for batch in _batches(value.items()):
            self._fill(batch, b"s" if len(value) == 1 else b"u")
        if value and len(value) % BATCH_ITEMS == 0:
            # The C pickler begins another batch before it sees that nothing is left; with plain dicts only (3.11).
            self.out.append(b"(u")

    def _items(self, value: Mapping[object, object]) -> None:
        """The items of what is like a dict; unlike in a dict, the last one of 1,001 gets no MARK."""
        if self.too_deep():
            return
        for batch in _batches(value.items()):
            self._fill(batch, b"s" if len(batch) == 1 else b"u")

    def _fill(self, items: Collection[tuple[object, object]], opcode: bytes) -> None:
        """One batch of values under their keys (SETITEM, SETITEMS) or one behind the other (APPEND, APPENDS)."""
        is_marked = opcode in b"eu"
        if is_marked:
            self.out.append(b"(")
            self._marks += 1
        if self._marks + TENSOR_MARKS > self.limits.marks:
            self._check_marks(item for _, item in items)
        path, write, keys = self.path, self.write, opcode in b"su"
        path.append(None)
        for key, item in items:
            path[-1] = key
            if keys:
                if isinstance(key, HASHED_WHOLE):
                    self._check_key(key)
                write(key)
            write(item)
        path.pop()
        self._marks -= is_marked
        self.out.append(opcode)

    def _check_key(self, key: tuple[object, ...] | frozenset[object]) -> None:
        """Record a problem where a dict key or set member has more values inside than a reader hashes."""
        count = 1
        waiting: list[Collection[object]] = [key]
        while waiting:
            members = waiting.pop()
            count += len(members)
            if count > self.limits.key_nodes:
                self.problems.append(
                    f"{self.where()}: a dict key or set member holds more than "
                    f"Limits(key_nodes={self.limits.key_nodes}) values"
                )
                return
            waiting += [member for member in members if isinstance(member, HASHED_WHOLE)]

    def _check_marks(self, items: Iterable[object]) -> None:
        """Record a problem where a tensor nests so deeply that its own MARKs exceed the limit."""
        for item in items:
            if type(item) not in WITHOUT_MARKS:
                self.problems.append(
                    f"{self.where()}: its containers nest too deeply for a tensor inside of them, "
                    f"above Limits(marks={self.limits.marks})"
                )
                return

    def too_deep(self) -> bool:
        """Record a problem where containers nest deeper than the limit, as those that contain themselves do."""
        if len(self.path) < self.limits.depth:
            return False
        self.problems.append(
            f"{self.where()}: nested deeper than Limits(depth={self.limits.depth}), or inside of itself"
        )
        return True

    def _tuple(self, value: tuple[object, ...]) -> None:
        if self.known(value):
            return
        if self.too_deep():
            value = ()
        is_marked = len(value) > 3
        if is_marked:
            self.out.append(b"(")
            self._marks += 1
        if self._marks + TENSOR_MARKS > self.limits.marks:
            self._check_marks(value)
        self.path.append(None)
        for position, item in enumerate(value):
            self.path[-1] = position
            self.write(item)
        self.path.pop()
        self._marks -= is_marked
        if value and id(value) in self.memo:
            # It is inside of itself, by way of a list or a dict: what was just written goes, and the inner one is used.
            self.out.append(b"1" if len(value) > 3 else b"0" * len(value))
            self.known(value)
            return
        self.out.append(b"t" if len(value) > 3 else TUPLES[len(value)])
        if value:
            self.memo[id(value)] = self.put()

    def _ordered_dict(self, value: OrderedDict[object, object]) -> None:
        if self.known(value):
            return
        self.call(value, "collections.OrderedDict", ())
        self._items(value)
        state = vars(value)
        if state:
            self.attributes(state.get(ATTRIBUTES, state))
            self.out.append(b"b")

    def attributes(self, value: dict[object, object]) -> None:
        """Write the attributes of a container."""
        self._dict(value)

    def _default_dict(self, value: defaultdict[object, object]) -> None:
        if self.known(value):
            return
        factory = value.default_factory
        if factory is not None and factory not in FACTORIES:
            self.refuse("a defaultdict that is filled by something else than a plain type")
            return
        self.call(
            value, "collections.defaultdict", () if factory is None else (FACTORIES[factory],)
        )
        self._items(value)

    def _set(self, value: set[object] | frozenset[object]) -> None:
        if self.known(value):
            return
        for member in value:
            if isinstance(member, HASHED_WHOLE):
                self._check_key(member)
        self.call(value, f"builtins.{type(value).__name__}", (list(value),))


def _batches(items: Iterable[tuple[object, object]]) -> Iterator[list[tuple[object, object]]]:
    rest = iter(items)
    while batch := list(islice(rest, BATCH_ITEMS)):
        yield batch
