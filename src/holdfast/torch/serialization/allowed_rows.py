"""Rows for what users allow in a `weights_only` load, where a file could break the interpreter by its arguments.

numpy trusts a pickle (2.4): a dtype takes any item size from its state, even a negative one, and an array of objects reads as many
of them as its shape says from a list of any length. So arguments are checked first, and numpy makes the rest:

1. A dtype is announced by its call, and made by numpy's constructor when BUILD brings its state. No code sees it before.
2. An array is made empty, so that what holds it by then holds the finished one. It gets its state once: as many bytes, or objects,
   as it has elements. What a subclass passes on to numpy is checked as well.
3. Arrays are made in no other way: `ndarray(…)` takes bytes for addresses of objects.
4. What CPython and numpy free recursively, in C, nests at most `DEPTH` deep (arrays of objects, slices) or not at all (a
   `partial` of one, entries of a `defaultdict`).
5. What costs more than its bytes in the file is counted (`formats/pickle/spending.py`).
"""

from __future__ import annotations

import copyreg
import datetime
import functools
import math
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.core.arrays import AnyDType
from holdfast.core.opaque import Global
from holdfast.errors import PickleError
from holdfast.formats.pickle import arrays
from holdfast.formats.pickle.plain import PlainTable, path_row
from holdfast.formats.pickle.spending import LONG_TEXT
from holdfast.formats.pickle.table import Args, ReducerTable, Row

if TYPE_CHECKING:
    from holdfast.torch.serialization.weights import WeightsTable

REFUSALS = (TypeError, ValueError, OverflowError, RuntimeError, SystemError, MemoryError, KeyError)

DEPTH = 64
"""Levels of arrays of objects in each other."""

FIELDS = 10_000
"""Fields of a dtype, each counted wherever it is repeated. numpy visits all of them at every use."""

LEVELS = 16
"""Levels of fields in fields. numpy visits them recursively."""

ALIGNED = 0x80
"""The flag of a dtype whose fields are aligned as in a struct of C."""

PER_OBJECT = 16
"""Bytes of an element that are not counted where each comes as an object: a text of any length (`StringDType`) takes as many."""

PLAIN = frozenset({
    str, bytes, bool, int, float, complex, type(None), datetime.date, datetime.datetime, datetime.timedelta,
})  # fmt: skip
"""Types that numpy takes for an element that is no object. It would call `str` of anything else, which may not end."""


def checked(what: str, function: Callable[..., Any], *args: object, **more: object) -> Any:  # noqa: ANN401  # whatever it makes
    try:
        return function(*args, **more)
    except REFUSALS as error:
        raise PickleError(f"{what} that cannot be made: {error}") from None


# Dtypes.


def dtype(table: WeightsTable, args: Args) -> object:
    objects = bool(args) and type(args[0]) is str and args[0] in OBJECTS
    if not objects and arrays.dtype(table, args) is NotImplemented:
        return NotImplemented
    made = UnfinishedDType(Global("numpy", "dtype"), args, table)
    table.unfinished[id(made)] = made
    return made


class UnfinishedDType(arrays.PendingDType):
    """A dtype before its BUILD, of every kind that numpy writes."""

    def made(self, state: tuple[Any, ...]) -> AnyDType:
        subarray, names, fields = state[2:5]
        metadata = state[8] if len(state) == 9 else None
        made: AnyDType | None
        if subarray is not None:
            made = self._repeated(subarray)
        elif names is not None or fields is not None:
            made = self._structured(names, fields, state[5:8])
        elif self.args[0] in OBJECTS:
            made = np.dtype("O")
        else:
            made = super().made(state[:8] if isinstance(metadata, dict) else state)
        if made is None:
            raise PickleError("a dtype whose state has not the form of numpy's")
        match metadata:
            case dict(notes) | (dict(notes), _):  # the pair is that of a datetime64, with its unit
                self.table.spending.copy(len(notes))
                made = checked("a dtype with metadata", np.dtype, made, metadata=notes)
        check_fields(made, self.table)
        return made

    def _repeated(self, subarray: object) -> AnyDType:
        match subarray:
            case (np.dtype() as inner, tuple(shape)):
                sizes = arrays.array_sizes(shape, self.table)
            case _:
                raise PickleError("a subarray of what is no dtype and shape")
        made: AnyDType = checked("a subarray", np.dtype, (inner, tuple(sizes)))
        if made.itemsize != self._nbytes():
            raise PickleError("a subarray of another size than its own", expected=made.itemsize, found=self._nbytes())
        return made

    def _structured(self, names: object, fields: object, rest: tuple[object, ...]) -> AnyDType:
        match names, fields, rest:
            case tuple(), dict(), (int(size), _, int(flags)):
                self.table.spending.copy(len(names))
            case _:
                raise PickleError("a structured dtype whose names and fields do not agree")
        formats, offsets, titles = [], [], []
        for name in names:
            match fields.get(name) if type(name) is str else None:
                case (np.dtype() as inner, int(offset), *title) if not title or (len(title) == 1 and type(title[0]) is str):
                    formats.append(inner)
                    offsets.append(offset)
                    titles.append(title[0] if title else None)
                case _:
                    raise PickleError("a structured dtype whose names and fields do not agree")
        code = self.args[0]
        whole = size if isinstance(code, type) else self._nbytes()
        spec = {"names": list(names), "formats": formats, "offsets": offsets, "itemsize": whole, "aligned": bool(flags & ALIGNED)}
        if any(titles):
            spec["titles"] = titles
        made: AnyDType = checked("a structured dtype", np.dtype, spec)
        # An element of another class than `void`: a `numpy.record`, or a number whose parts have names.
        other = isinstance(code, type) or not str(code).startswith("V")
        return checked("a structured dtype", np.dtype, (code, made)) if other else made

    def _nbytes(self) -> int:
        named: AnyDType = np.dtype(self.args[0])  # type: ignore[call-overload]  # which knew it
        return named.itemsize


def check_fields(made: AnyDType, table: ReducerTable) -> None:
    """Refuse a dtype of too many fields in fields, and count those that it has."""
    count, level = 0, [made]
    for _ in range(LEVELS):
        count += len(level)
        if count > FIELDS:
            break
        inner = [each.subdtype[0] for each in level if each.subdtype is not None]
        level = inner + [each.fields[name][0] for each in level if each.fields for name in each.names or ()]
        if not level:
            table.spending.copy(count)
            return
    raise PickleError(f"a dtype of more than {FIELDS:,} fields, or of {LEVELS} levels")


# Elements and arrays.


def scalar(table: WeightsTable, args: Args) -> object:
    match args:
        case (np.dtype(kind="O"), value):
            return value
        case (np.dtype() as dtype, np.ndarray() as whole) if dtype.hasobject and dtype.names is not None:
            if type(whole) is not np.ndarray or whole.shape != () or whole.dtype != dtype or id(whole) in table.blank:
                raise PickleError("a numpy scalar of another type than its array")
            made: object = checked("a numpy scalar", SCALAR, dtype, whole)
            table.depths[id(made)] = deeper(table, [whole]), made
            return made
        case (np.dtype() as dtype, str(data)):
            table.spending.copy(len(data))
            args = dtype, table.raw(data)
    arrays.scalar(table, args)
    return checked("a numpy scalar", SCALAR, *args)


def reconstruct(table: WeightsTable, args: Args) -> object:
    """Make an empty array of a class, which gets everything by BUILD."""
    match args:
        case (type() as kind, tuple(), bytes() | str()) if issubclass(kind, np.ndarray) and table.is_allowed(kind):
            made = table.run(kind, lambda: np.ndarray.__new__(kind, (0,), "b"))
            table.blank[id(made)] = made
            return made
    return NotImplemented


def give_array_state(table: WeightsTable, array: np.ndarray, state: Any) -> None:  # noqa: ANN401  # until it is proven
    """BUILD of an array: its state is checked before numpy gets it, and its memory is never replaced twice."""
    own = type(array).__setstate__ is np.ndarray.__setstate__
    if table.blank.pop(id(array), None) is None and (own or id(array) in table.depths):
        raise PickleError("a BUILD of an array that is complete")
    if own:
        proven = prove(table, array, state)
        checked("an array", array.__setstate__, proven)
        return
    # Its class hands the beginning of the state on to numpy, or a part of it.
    table.depths[id(array)] = 0, array
    for part in (state, *state) if isinstance(state, tuple | list) else ():
        if isinstance(part, tuple | list) and any(isinstance(each, np.dtype | UnfinishedDType) for each in part[1:3]):
            prove(table, array, tuple(part[: 5 if isinstance(part[0], int) else 4]))
    table.storages.fill()
    table.run(type(array), lambda: array.__setstate__(state))


def prove(table: WeightsTable, array: np.ndarray, state: object) -> tuple[object, ...]:
    """Check the state of an array, and give it back as numpy takes it."""
    shape, dtype, fortran, data = arrays.array_state(state)
    if not isinstance(dtype, np.dtype):
        raise PickleError("an array without a finished dtype", found=type(dtype).__name__)
    if isinstance(data, str):
        table.spending.copy(len(data))
        data = table.raw(data)
    sizes = arrays.array_sizes(shape, table)
    if isinstance(data, list):
        if not dtype.hasobject or dtype.subdtype is not None or math.prod(sizes) != len(data):
            raise PickleError(f"an array of shape {tuple(sizes)} and type {dtype} from a list of {len(data):,} objects")
        table.spending.copy(len(data) * max(dtype.itemsize // PER_OBJECT, 1))
        table.depths[id(array)] = deeper(table, (each for item in data for each in held(table, item, dtype))), array
    else:
        if arrays.array_over(data, dtype, shape, fortran=fortran, table=table) is NotImplemented:
            table.spending.copy(math.prod(sizes))  # elements of no bytes, which whoever looks at them pays for
        if not dtype.isnative and dtype.kind != "U":
            # numpy turns the bytes round. That of text was paid for when it was looked through.
            table.spending.copy(math.prod(sizes) * dtype.itemsize)
    return 1, tuple(sizes), dtype, fortran, data


def held(table: WeightsTable, item: object, dtype: AnyDType) -> Iterator[object]:
    """The objects that an element will hold. Raises where a number is not plain."""
    if dtype.kind == "O":
        yield item
    elif dtype.names is None or dtype.fields is None:
        if type(item) not in PLAIN or dtype.subdtype is not None:
            raise PickleError(f"a {type(item).__name__} as an element of type {dtype}", found=type(item).__name__)
        if isinstance(item, str | bytes) and len(item) > LONG_TEXT:
            table.spending.copy(len(item))
    else:
        if not isinstance(item, tuple) or len(item) != len(dtype.names):
            raise PickleError("a structured element that has not as many parts as its type")
        table.spending.copy(len(item))
        for name, part in zip(dtype.names, item, strict=True):
            yield from held(table, part, dtype.fields[name][0])


def deeper(table: WeightsTable, objects: Iterable[object]) -> int:
    """How deep arrays of objects nest in what holds these."""
    depth = 0
    for each in objects:
        if id(each) in table.blank:
            raise PickleError("an array of objects that holds an array which is not finished")
        if id(each) in table.depths:
            depth = max(depth, table.depths[id(each)][0])
    if depth == DEPTH:
        raise PickleError(f"arrays of objects or slices in each other, more than {DEPTH} deep")
    return depth + 1


def no_array(table: WeightsTable, args: Args) -> object:
    """Refuse `ndarray(…)`, or a subclass: no pickle of numpy's calls it, and it would allocate any size."""
    return NotImplemented


def makes_arrays(what: object) -> bool:
    """Whether calling a class means that numpy makes an array."""
    if not isinstance(what, type) or not issubclass(what, np.ndarray):
        return False
    maker = next(kind for kind in what.__mro__ if "__new__" in vars(kind))
    return maker.__module__.partition(".")[0] == "numpy"


# Python's own.


def empty_default(table: WeightsTable, args: Args) -> object:
    """A `defaultdict` of a factory alone. Its entries would come by SETITEMS, which a load refuses as torch does."""
    return NotImplemented if len(args) > 1 else checked("a defaultdict", defaultdict, *args)


def flat_partial(table: WeightsTable, args: Args) -> object:
    """A `partial` of a function. Python makes one of a `partial` of a `partial`, unless it has attributes."""
    nested = bool(args) and isinstance(args[0], functools.partial)
    return NotImplemented if nested else checked("a partial", functools.partial, *args)


def counted_slice(table: WeightsTable, args: Args) -> object:
    made = checked("a slice", slice, *args)
    table.depths[id(made)] = deeper(table, args), made
    return made


def reconstructor(table: WeightsTable, args: Args) -> object:
    """Make an object as protocols 0 and 1 do: (class, builtin, what that builtin makes of it), which is copied."""
    if len(args) == 3 and isinstance(args[2], list | tuple | dict | set | frozenset | str | bytes):
        table.spending.copy(len(args[2]))
    return table.call_allowed(RECONSTRUCTOR, args)


RECONSTRUCTOR = copyreg._reconstructor  # type: ignore[attr-defined]  # written into files of every Python
SCALAR: Any = np.float32(0).__reduce__()[0]
OBJECTS = frozenset({"O", "O4", "O8"})

ROWS: dict[int, Row] = {
    id(np.dtype): dtype,
    id(SCALAR): scalar,
    id(np.zeros(1).__reduce__()[0]): reconstruct,
    id(np.zeros(1).__reduce_ex__(5)[0]): arrays.frombuffer,
    id(RECONSTRUCTOR): reconstructor,
    id(frozenset): PlainTable.frozenset,
    id(bytes): PlainTable.bytes,
    id(defaultdict): empty_default,
    id(functools.partial): flat_partial,
    id(slice): counted_slice,
    **{id(kind): path_row(kind) for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)},
}
"""By identity: numpy 1 and 2 have these under different names."""


def allowed_row(what: object) -> Row | None:
    return ROWS.get(id(what)) or (no_array if makes_arrays(what) else None)
