"""Rows for plain Python: containers, bytes, numbers, paths, and the calls by which `copyreg` makes objects.

A call with arguments of another form than any Python writes is a lie and raises `PickleError`. It becomes an `Opaque` instead,
because honest files do it, where the factory of a `defaultdict` is not a plain type, a `slice` is not of integers, or text is
encoded otherwise than as Latin-1. No constructor takes a number as a size.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import ClassVar, cast

from holdfast.core.opaque import Global, Opaque
from holdfast.errors import PickleError
from holdfast.formats.pickle.arrays import NUMPY_CALLS, numpy_values
from holdfast.formats.pickle.table import Args, Name, ReducerTable, Row

PATH_CHARACTERS = 4096
"""Linux refuses longer paths. Bounded because a path is cut into its parts when it is made."""

LATIN1 = ("latin1", "latin-1")
BUILTINS = "builtins"

PLAIN_TYPES: dict[str, Callable[[], object]] = {
    kind.__name__: kind for kind in (list, dict, int, float, str, bool, tuple, set)
}  # fmt: skip
"""Factories that a `defaultdict` may have. Using the dict calls them, so they do what they say and cost nothing."""

MENTIONED = ("object", "type")
"""Further builtins whose mention alone says nothing about a file."""

PATHS: dict[str, type[PurePath]] = {
    "PosixPath": PurePosixPath,
    "PurePosixPath": PurePosixPath,
    "WindowsPath": PureWindowsPath,
    "PureWindowsPath": PureWindowsPath,
}
"""Python 3.13 writes them under `pathlib._local`. Pure, so that a file from Windows opens on Linux."""


class DefaultDict(defaultdict[object, object]):
    """A `defaultdict` that can be freed when a million of them nest.

    CPython frees a plain one recursively, in C and without its guard against deep nesting, and overflows the stack; a subclass
    written in Python is freed with that guard (seen in 3.11).
    """

    __slots__ = ()


def path_row(kind: type[PurePath]) -> Row:

    def path(table: ReducerTable, args: Args) -> object:
        table.spending.copy(len(args))
        parts = [part for part in args if isinstance(part, str)]
        if len(parts) != len(args) or sum(map(len, parts)) + len(parts) > PATH_CHARACTERS:
            raise PickleError(
                f"a path of what is no text, or of more than {PATH_CHARACTERS} characters"
            )
        table.spending.copy(sum(map(len, parts)))
        return kind(*parts)

    return path


def empty_row(kind: Callable[[], object]) -> Row:
    """A row that makes an empty container, and leaves a call with arguments as it is."""
    return lambda table, args: NotImplemented if args else kind()


EMPTY: dict[Name, Row] = {(BUILTINS, kind.__name__): empty_row(kind) for kind in (dict, list, set)}


def complex_number(table: ReducerTable, args: Args) -> object:
    match args:
        case (int() | float() as real, int() | float() as imaginary):
            try:
                return complex(real, imaginary)
            except OverflowError:
                raise PickleError("a complex number too large for its kind") from None
        case _:
            raise PickleError("a complex number of what are no two numbers")


def range_of(table: ReducerTable, args: Args) -> object:
    numbers = [a for a in args[:4] if type(a) is int]
    if len(numbers) != len(args) or not 1 <= len(numbers) <= 3 or numbers[2:] == [0]:
        raise PickleError("a range of what are no integers, or by steps of 0")
    return range(*numbers)


def slice_of(table: ReducerTable, args: Args) -> object:
    """Integers only: CPython frees nested slices recursively and overflows the stack (seen in 3.11)."""
    if len(args) != 3:
        raise PickleError("a slice without its three parts")
    return slice(*args) if all(a is None or type(a) is int for a in args) else NotImplemented


class PlainTable(ReducerTable):
    """The table with rows for plain Python and numpy."""

    def ordered_dict(self, args: Args) -> object:
        """Empty, or of the list of pairs that Python 2 gives."""
        made: OrderedDict[object, object] = OrderedDict()
        match args:
            case ():
                pass
            case (list(pairs),):
                self.spending.copy(len(pairs))
                for pair in pairs:
                    if not isinstance(pair, list | tuple) or len(pair) != 2:
                        raise PickleError("an OrderedDict of what are no pairs")
                    self.spending.fill(made, [*pair])
            case _:
                raise PickleError("an OrderedDict of what is no list of pairs")
        return made

    def counter(self, args: Args) -> object:
        match args:
            case ():
                return Counter()
            case (dict(counts),):
                self.spending.copy(len(counts))
                made: Counter[object] = Counter()
                # One by one: the keys may collide here as they did in the dict that they come from.
                for key, count in counts.items():
                    self.spending.fill(cast(dict[object, object], made), [key, count])
                return made
            case _:
                raise PickleError("a Counter of what is no dict of counts")

    def default_dict(self, args: Args) -> object:
        match args:
            case () | (None,):
                return DefaultDict()
            case (Global(module="builtins", name=name),) if name in PLAIN_TYPES:
                return DefaultDict(PLAIN_TYPES[name])
            case (Global(module="collections", name="OrderedDict"),):
                return DefaultDict(OrderedDict)
            case (Global() | Opaque(), *_):
                return NotImplemented
            case _:
                raise PickleError("a defaultdict whose factory is nothing that could be called")

    def set(self, args: Args) -> object:
        made: set[object] = set()
        match args:
            case ():
                pass
            case (list(members) | tuple(members),):
                self.spending.copy(len(members))
                self.spending.collect(made, members)
            case _:
                raise PickleError("a set of what is no list")
        return made

    def frozenset(self, args: Args) -> object:
        made = self.set(args)
        return frozenset(made) if isinstance(made, set) else made

    def bytes(self, args: Args) -> object:
        """Protocols 0 to 2 write empty bytes as `bytes()`, and other bytes as encoded text."""
        match args:
            case ():
                return b""
            case (bytes(raw),):
                return raw
            case _:
                raise PickleError("bytes of what are no bytes")

    def bytearray(self, args: Args) -> object:
        match args:
            case ():
                return bytearray()
            case (bytes(raw),):
                self.spending.copy(len(raw))
                return bytearray(raw)
            case (str(), str(encoding)) if encoding in LATIN1:
                made = self.encode(args)
                return bytearray(made) if isinstance(made, bytes) else made
            case _:
                raise PickleError("a bytearray of what are no bytes")

    def encode(self, args: Args) -> object:
        """How protocols 0 to 2 write bytes: as text, to be encoded as Latin-1."""
        match args:
            case (str(text), str(encoding)) if encoding in LATIN1:
                self.spending.copy(len(text))
                try:
                    return text.encode("latin-1")
                except UnicodeEncodeError:
                    raise PickleError("bytes written as text that is not Latin-1") from None
            case (str(), str()):
                return NotImplemented
            case _:
                raise PickleError("an encoding of what is no text")

    def reconstruct(self, args: Args) -> object:
        """How protocols 0 and 1 make objects: the class, the builtin under it, and what that builtin holds."""
        match args:
            case (Global() | Opaque() as cls, Global(module="builtins", name="object"), None):
                return self.new(cls, (), None)
            case (Global() | Opaque() as cls, Global(module="builtins"), inside):
                made = self.new(cls, (), None)
                if isinstance(made, Opaque) and isinstance(inside, dict):
                    self.spending.copy(len(inside))
                    made.entries.extend(inside.items())
                elif isinstance(made, Opaque) and isinstance(inside, list):
                    self.spending.copy(len(inside))
                    made.items.extend(inside)
                elif isinstance(made, Opaque):
                    made.args = (inside,)
                return made
            case _:
                raise PickleError(
                    "copyreg._reconstructor with other arguments than a class, a builtin and a value"
                )

    def newobj(self, args: Args) -> object:
        """NEWOBJ, written as a call."""
        if not args:
            raise PickleError("copyreg.__newobj__ without a class")
        self.spending.copy(len(args))
        return self.new(args[0], args[1:], None)

    values: ClassVar[Mapping[Name, object]] = {
        **{(BUILTINS, name): Global(BUILTINS, name) for name in (*PLAIN_TYPES, *MENTIONED)},
        **numpy_values(),
    }
    calls: ClassVar[Mapping[Name, Row]] = {
        ("collections", "OrderedDict"): ordered_dict,
        ("collections", "Counter"): counter,
        ("collections", "defaultdict"): default_dict,
        (BUILTINS, "set"): set,
        (BUILTINS, "frozenset"): frozenset,
        (BUILTINS, "bytearray"): bytearray,
        (BUILTINS, "bytes"): bytes,
        (BUILTINS, "complex"): complex_number,
        (BUILTINS, "range"): range_of,
        (BUILTINS, "slice"): slice_of,
        ("_codecs", "encode"): encode,
        ("copyreg", "_reconstructor"): reconstruct,
        ("copyreg", "__newobj__"): newobj,
        **{
            (module, name): path_row(kind)
            for module in ("pathlib", "pathlib._local")
            for name, kind in PATHS.items()
        },
        **NUMPY_CALLS,
    }
    news: ClassVar[Mapping[Name, Row]] = {("collections", "OrderedDict"): ordered_dict, **EMPTY}
