"""`record`: run a pickle through the machine for what it *would do*, not for its value.

The table of a scan builds nothing. It records each global with everything that the stream does with it and with its results:

    mention      it is named, so a loader imports its module        append, setitem, additem
    call         REDUCE, INST, OBJ: it is called                                 methods of what came out of it are called
    new          NEWOBJ, NEWOBJ_EX: `__new__` is called             attributes   BUILD on the class or the module itself
    build        its state is set, or handed to `__setstate__`      result       what came out of a call is called
    resolved     `getattr` of a class: as if the dotted name stood there

What is popped again, or stands before a break, is recorded like anything else. Time and memory are linear in the bytes: three calls
of a global are stored, and the results of all others are one shared object.

A joblib file has the elements of its arrays between the opcodes. `pickle.load` and `joblib.load` read such a file differently, so
a scan records it twice, once with `joblib=True`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy

from msgspec import Struct, field

from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.value import Value, replace
from holdfast.errors import HoldfastError, LimitExceeded, PickleError, Truncated, drop_tracebacks
from holdfast.formats.pickle.frames import read_like_c_unpickler
from holdfast.formats.pickle.machine import interpret
from holdfast.formats.pickle.rare import Unread
from holdfast.formats.pickle.table import ReducerTable, Spending, modern

STORED_CALLS = 3
"""Calls of one global that are stored: enough to see what it does."""

GLOBALS = 100_000
"""Different globals in one stream. A large pickle of a large program has some hundreds."""

NOTES = 20
"""Oddities that are stored."""

LONG_KEY = 1024
"""Keys up to this length are stored as they are; comparing them costs a constant."""

GETATTR = ("builtins", "getattr")
ENCODE = (("_codecs", "encode"), ("codecs", "encode"))
DTYPE = ("numpy", "dtype")
WRAPPERS = (
    ("joblib.numpy_pickle", "NumpyArrayWrapper"),
    ("sklearn.externals.joblib.numpy_pickle", "NumpyArrayWrapper"),
)
STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
KEEPERS = {DTYPE, *WRAPPERS, STORAGE_INFO}
"""Globals whose state is looked at afterwards."""

NESTED = {
    ("torch.storage", "_load_from_bytes"),
    *((module, "loads") for module in ("pickle", "dill", "dill._dill", "cloudpickle")),
}
"""Loaders that take a whole file as bytes."""

CALLERS = {
    ("torch._tensor", "_rebuild_from_type_v2"),
    *((m, "_rebuild_from_type") for m in ("torch._tensor", "torch.tensor")),
}
"""Known functions that call their first argument."""

SIZES = {"?": 1, "b": 1, "B": 1}


class Seen(Struct, eq=False):
    """One global of a stream and all that was done with it."""

    what: Global
    offset: int
    uses: set[str] = field(default_factory=lambda: {"mention"})
    calls: list[Opaque] = field(default_factory=list)
    given: bool = False
    """Whether `__new__` got arguments: then it is called with what the file gives it, as a constructor is."""
    shared: Made | None = None


class Made(Opaque):
    """The result that a call would have had."""

    __slots__ = ("root",)

    def __init__(self, what: object, args: tuple[object, ...], root: Seen) -> None:
        super().__init__(what, args)
        self.root = root


class IdentityKey:
    """A key or a member that is not hashed: by identity, whatever is in it."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Loose(Spending):
    """Nothing is hashed but short text, and nothing is copied, so only the number of containers is left to count."""

    __slots__ = ()

    def copy(self, count: int) -> None:
        pass

    def fill(self, target: dict[object, object], flat: list[object]) -> None:
        pairs = iter(flat)
        for key, value in zip(pairs, pairs, strict=True):
            target[key if type(key) is str and len(key) <= LONG_KEY else IdentityKey(key)] = value

    def collect(self, target: set[object], values: list[object] | tuple[object, ...]) -> None:
        target.update(map(IdentityKey, values))


class RecordingTable(ReducerTable):
    """Records what a stream does."""

    tolerant = True

    def __init__(self, *, joblib: bool = False, framed: bool = True) -> None:
        self.joblib, self.framed = joblib, framed
        self.seen: dict[tuple[str, str], Seen] = {}
        self.notes: list[str] = []
        self.nested: list[tuple[bytes, Seen, int]] = []
        """Whole files handed to a loader: the bytes, once for each object, with the loader and the place of the call."""
        self.unread: list[Seen] = []
        """Loaders whose argument is not in the file as it stands."""
        self.items: list[dict[object, object]] = []
        """The items of a distributed checkpoint: `relative_path`, `offset`, `length`."""
        self._followed: dict[int, object] = {}
        self._encoded: dict[int, tuple[object, bytes]] = {}
        self._array: object = None
        self.arrays = 0
        """Arrays of joblib that were met."""
        super().__init__()

    def begin(self, limits: Limits, nbytes: int) -> None:
        super().begin(limits, nbytes)
        self.spending = Loose(limits, nbytes)

    # Called by the machine.

    def note(self, oddity: str) -> None:
        if len(self.notes) < NOTES and oddity not in self.notes:
            self.notes.append(oddity)

    def find(self, module: str, name: str) -> object:
        return self._named(*modern(module, name)).what

    def call(self, what: object, args: tuple[object, ...]) -> object:
        place = (what.module, what.name) if type(what) is Global else None
        if place is None:
            return self._make(what, args, "result")
        if (
            place == GETATTR
            and len(args) in (2, 3)
            and type(args[0]) is Global
            and type(args[1]) is str
        ):
            # The same as a dotted name, and judged as one.
            cls, attribute = args[0], args[1]
            if len(cls.name) + len(attribute) < LONG_KEY:
                self._named(*place).uses.add("resolved")
                return self.find(cls.module, f"{cls.name}.{attribute}")
        if place == ("builtins", "type") and len(args) == 1:
            return self._named(*place).what  # the type of None and its like, as every writer has it
        if place in ENCODE:
            return self._encode(what, args)
        if place == ("builtins", "bytes") and len(args) == 1 and type(args[0]) is bytes:
            self._named(*place).uses.add("call")
            return args[0]
        if place == ("copyreg", "_reconstructor") and len(args) == 3:
            self._named(*place).uses.add("call")
            if args[1] != Global("builtins", "object"):
                self._make(args[1], args[2:], "call")
            return self._make(args[0], (), "new")
        if place in (("copyreg", "__newobj__"), ("copyreg", "__newobj_ex__")) and args:
            self._named(*place).uses.add("call")
            return self.new(args[0], args[1:4], None)
        if place in CALLERS and args:
            self._make(args[0], (), "call")
        if place in NESTED:
            self._nest(place, args)
        return self._make(what, args, "call")

    def instance(self, cls: object, args: tuple[object, ...]) -> object:
        return self._make(cls, args, "call" if args else "new")

    def new(
        self, cls: object, args: tuple[object, ...], kwargs: dict[str, object] | None
    ) -> object:
        made = self._make(cls, args, "new")
        if isinstance(made, Made) and (args or kwargs):
            made.root.given = True
        return made

    def build(self, obj: object, state: object) -> object:
        self._array = None
        if isinstance(obj, Made):
            obj.root.uses.add("build")
            place = (obj.root.what.module, obj.root.what.name)
            if place in KEEPERS and obj is not obj.root.shared:
                obj.state = state
                if place in WRAPPERS:
                    self._array = state
                    self.arrays += 1
                elif place == STORAGE_INFO and isinstance(state, dict):
                    self.items.append(state)
        elif isinstance(obj, Global):
            self._named(obj.module, obj.name).uses.add("attributes")
        elif not isinstance(obj, Unread):
            self.note(f"a BUILD of a {type(obj).__name__}, which has no state")
        return obj

    def append(self, obj: object, values: list[object]) -> None:
        self._method(obj, "append")

    def set_items(self, obj: object, flat: list[object]) -> None:
        self._method(obj, "setitem")

    def add(self, obj: object, values: list[object]) -> None:
        self._method(obj, "additem")

    def persistent(self, pid: object) -> object:
        """A class that comes with its source text; of a storage or a tensor nothing is needed."""
        if type(pid) is tuple:
            if len(pid) == 4 and type(pid[0]) is str and pid[0] == "module":
                return pid[1]
            if len(pid) == 3 and isinstance(pid[0], Global):
                return pid[0]
        return Unread()

    def behind(self, data: bytes, start: int, stop: int) -> int:
        """The elements of an array of joblib, or the pickle of its objects."""
        state, self._array = self._array, None
        if not self.joblib or state is None:
            return 0
        return self._elements(state, data, start, stop=stop)

    # How it is recorded.

    def _named(self, module: str, name: str) -> Seen:
        seen = self.seen.get((module, name))
        if seen is None:
            if len(self.seen) >= GLOBALS:
                raise LimitExceeded(
                    f"more than {GLOBALS:,} different globals in one pickle", expected=GLOBALS
                )
            seen = self.seen[module, name] = Seen(Global(module, name), self.offset)
        return seen

    def _make(self, what: object, args: tuple[object, ...], use: str) -> object:
        if type(what) is Global:
            root = self._named(what.module, what.name)
        elif isinstance(what, Made):
            root, use = what.root, "result"
        else:
            if not isinstance(what, Unread):
                self.note(f"a {type(what).__name__} where a class or a function belongs")
            return Unread()
        root.uses.add(use)
        place = (root.what.module, root.what.name)
        if len(root.calls) < STORED_CALLS:
            made = Made(what, args, root)
            root.calls.append(made)
            return made
        if place in KEEPERS:
            self.spending.container()
            return Made(what, args, root)
        if root.shared is None:
            root.shared = Made(root.what, (), root)
        return root.shared

    def _method(self, obj: object, use: str) -> None:
        if isinstance(obj, Made):
            obj.root.uses.add(use)
        elif isinstance(obj, Global):
            self._named(obj.module, obj.name).uses.add(use)
        elif not isinstance(obj, Unread | list | dict | set | bytearray):
            self.note(f"an {use} to a {type(obj).__name__}")

    def _encode(self, what: object, args: tuple[object, ...]) -> object:
        """Bytes as protocols 0 to 2 write them; each text once, however often it is named."""
        if (
            len(args) == 2
            and type(args[0]) is str
            and type(args[1]) is str
            and args[1] in ("latin1", "latin-1")
        ):
            known = self._encoded.get(id(args[0]))
            if known is not None:
                return known[1]
            try:
                raw = args[0].encode("latin-1")
            except UnicodeEncodeError:
                raise PickleError("bytes written as text that is not Latin-1") from None
            self._encoded[id(args[0])] = (
                args[0],
                raw,
            )  # with the text, so that its id stays its own
            self._named("_codecs", "encode").uses.add("call")
            return raw
        return self._make(what, args, "call")

    def _nest(self, place: tuple[str, str], args: tuple[object, ...]) -> None:
        seen = self._named(*place)
        if len(args) != 1 or not isinstance(args[0], bytes | bytearray):
            self.unread.append(seen)
        elif id(args[0]) not in self._followed:
            self._followed[id(args[0])] = args[0]
            self.nested.append((bytes(args[0]), seen, self.offset))

    # Arrays of joblib.

    def _elements(self, state: object, data: bytes, start: int, *, stop: int) -> int:
        if not isinstance(state, dict):
            raise PickleError("an array of joblib whose state is no dict")
        shape, dtype = state.get("shape"), state.get("dtype")
        if (
            not isinstance(shape, tuple)
            or len(shape) > 64
            or not all(type(n) is int and n >= 0 for n in shape)
        ):
            raise PickleError("an array of joblib with an odd shape")
        width = _item_nbytes(dtype, 0)
        if width is None:
            # joblib hands the rest of the file to pickle for one object. What that does is recorded in the same lists.
            inner = copy(self)
            inner.joblib = False
            try:
                done = interpret(
                    data,
                    inner,
                    limits=self.limits,
                    stream="array",
                    start=start,
                    max_nbytes=stop - start,
                )
            finally:
                self.misframed = self.misframed or inner.misframed
            return done.stop - start
        padding = 0
        if type(state.get("numpy_array_alignment_bytes")) is int:
            if start >= stop:
                raise Truncated("the stream ends before the elements of an array", offset=stop)
            padding = 1 + data[start]
        nbytes = padding + width * math.prod(shape)
        if nbytes > stop - start:
            raise Truncated("the stream ends inside the elements of an array", offset=stop)
        return nbytes


def _item_nbytes(dtype: object, depth: int) -> int | None:
    """Bytes of one element of a dtype as it was pickled; None where there are Python objects in it."""
    if not isinstance(dtype, Made) or not dtype.args or type(dtype.args[0]) is not str or depth > 8:
        raise PickleError("an array of joblib of an odd type")
    code, state = dtype.args[0], dtype.state
    kind, digits = code[:1], code[1:]
    if kind == "O":
        return None
    if kind in SIZES and not digits:
        return SIZES[kind]
    if kind not in "biufcSUVmM" or not digits.isdigit() or len(digits) > 9:
        raise PickleError(f"an array of joblib of the type {code[:20]!r}")
    fields = state[4] if isinstance(state, tuple) and len(state) > 4 else None
    if fields is not None:
        if not isinstance(fields, dict) or len(fields) > 10_000:
            raise PickleError("an array of joblib with odd fields")
        for field in fields.values():
            if (
                not isinstance(field, tuple)
                or not field
                or _item_nbytes(field[0], depth + 1) is None
            ):
                return None
    return int(digits) * (4 if kind == "U" else 1)


class RecordedStream(Value, frozen=True):
    """The record of one stream, as far as it could be read."""

    table: RecordingTable
    value: object
    stop: int | None
    """Behind its STOP; None where there was none."""
    error: HoldfastError | None

    @property
    def cut(self) -> bool:
        """Whether it broke off because the bytes ended."""
        return isinstance(self.error, Truncated)

    @property
    def acts(self) -> bool:
        """Whether a loader would have done more than name things."""
        return any(seen.uses != {"mention"} for seen in self.table.seen.values())


def record(data: bytes, *, limits: Limits, joblib: bool = False) -> RecordedStream:
    """Record what a stream does. Raises nothing: an error is part of the result.

    A stream whose opcodes do not stay inside their frames is recorded as `pickle.loads` reads it,
    which passes over frames.
    """
    table = RecordingTable(joblib=joblib)
    recorded = _record(data, table, limits)
    if table.misframed:
        frameless_table = RecordingTable(joblib=joblib, framed=False)
        frameless_table.misframed = table.misframed
        return _record(data, frameless_table, limits)
    return recorded


def record_from_file(data: bytes, *, limits: Limits) -> RecordedStream:
    """Record what a stream does when the C unpickler reads it from a file. Raises nothing.

    Where this reading leaves out bytes, the offsets of what comes later are too small by their number.
    """
    unpickled, stop = read_like_c_unpickler(data)
    recorded = _record(unpickled, RecordingTable(framed=False), limits)
    return recorded if recorded.stop is None else replace(recorded, stop=stop)


def _record(data: bytes, table: RecordingTable, limits: Limits) -> RecordedStream:
    try:
        done = interpret(
            data, table, limits=limits, stream="pickle", max_nbytes=limits.pickle_nbytes
        )
    except HoldfastError as error:
        return RecordedStream(table, None, None, drop_tracebacks(error))
    return RecordedStream(table, done.value, done.stop, None)


Read = Callable[[int, int], bytes]
"""Bytes from a start to a stop, fewer where they end."""

FIRST_NBYTES = 1 << 12
"""Bytes that are read at first."""

GROWTH = 8

ELISIONS = 16
"""Long texts at the start of what may be a pickle that are passed over."""

LENGTHS = {ord("B"): 4, ord("X"): 4, ord("T"): 4, 0x8D: 8, 0x8E: 8, 0x96: 8}
"""Opcodes with a length that may be large, and the bytes that it takes."""


def read_ahead(read: Read, nbytes: int, limits: Limits, *, joblib: bool = False) -> RecordedStream:
    """Record the pickle that begins these bytes. Raises nothing about the pickle: an error is in the result.

    Data that is no pickle fails in its first bytes, so a few are read, and more only while the stream needs more than there are.
    """
    size = min(FIRST_NBYTES, nbytes)
    # One byte more than a pickle may have: so a pickle that the limit cuts differs from one that ends.
    most = min(limits.pickle_nbytes + 1, nbytes)
    while True:
        data = read(0, size)
        found = record(data, limits=limits, joblib=joblib)
        if not found.cut or size >= nbytes or len(data) < size:
            return found
        need = _needed(data, found.table.reached)
        if need > nbytes:
            return found  # beyond the end of everything: a loader breaks off there, too
        if size >= most or need > most:
            return (
                _too_long(found, limits)
                if data[:1] == b"\x80" or found.acts
                else _passing_over(read, limits, found)
            )
        size = min(max(size * GROWTH, need), most)


def _needed(data: bytes, at: int) -> int:
    """How far the opcode at a position reaches, where it says so."""
    width = LENGTHS.get(data[at]) if at < len(data) else None
    if width is None or at + 1 + width > len(data):
        return 0
    return at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")


def _too_long(found: RecordedStream, limits: Limits) -> RecordedStream:
    error = LimitExceeded(
        f"a pickle longer than Limits(pickle_nbytes={limits.pickle_nbytes:,})",
        expected=limits.pickle_nbytes,
    )
    return RecordedStream(found.table, None, None, error)


def _passing_over(read: Read, limits: Limits, found: RecordedStream) -> RecordedStream:
    """Look behind a first text that is longer than any pickle may be, in data without PROTO.

    The elements of a tensor begin like this once in a thousand times, and have nothing behind that text.
    """
    data, skipped = read(0, FIRST_NBYTES), 0
    for _ in range(ELISIONS):
        at = found.table.reached
        need = _needed(data, at)
        if not found.cut or not need:
            return found
        # An empty text in its place.
        behind = skipped + need
        rest = read(behind, behind + FIRST_NBYTES)
        skipped = behind - at - 2
        data = data[:at] + b"C\0" + rest
        found = record(data, limits=limits)
        if not found.cut or not rest:
            return _too_long(found, limits) if found.acts or found.stop is not None else found
    return _too_long(found, limits)
