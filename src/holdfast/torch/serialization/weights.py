"""`WeightsTable`: the table of the closed interpreter for a `weights_only` load. It builds torch's own objects.

1. A global is found by its exact name: among the 144 that torch allows (`default_globals`), or among those that the user allowed
   (`allowed.py`). Every other name ends the load.
2. A callable has a row (`formats/torch/reducers.py`), which checks its arguments and calls the `TorchBuilder`. The real functions
   behind the 144 names are never called.
3. What the user allowed is called as it is, made by its own `__new__`, given its state by `__setstate__` or as attributes. It is
   the user's code: storages are filled before it runs, and its errors are not changed. What a file could break the interpreter
   with, of numpy and Python, has a row, too.
4. Nothing else is called, filled or changed: containers are exact lists, dicts, OrderedDicts and Counters.

Rows are found by identity, never by comparing or hashing what a stream put together.

numpy trusts a pickle (2.4): a dtype takes any item size from its state, even a negative one, and an array of objects reads as many
of them as its shape says from a list of any length. So the rows check arguments first, and numpy makes the rest:

1. A dtype is announced by its call, and made by numpy's constructor when BUILD brings its state. No code sees it before.
2. An array is made empty, so that what holds it by then holds the finished one. It gets its state once: as many bytes, or objects,
   as it has elements. What a subclass passes on to numpy is checked as well. `ndarray(…)`, which takes bytes for addresses of
   objects, is not called.
3. What CPython and numpy free recursively, in C, nests at most `DEPTH` deep (arrays of objects, slices) or not at all (a
   `partial` of one, entries of a `defaultdict`).
4. What costs more than its bytes in the file is counted (`formats/pickle/table.py`).
"""

from __future__ import annotations

import codecs
import copyreg
import datetime
import math
import pathlib
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from types import BuiltinMethodType, MethodType
from typing import Any

import numpy as np
import torch

from holdfast.core.arrays import AnyDType
from holdfast.core.opaque import Global
from holdfast.errors import PickleError
from holdfast.formats.pickle import arrays
from holdfast.formats.pickle.plain import PlainTable, path_row
from holdfast.formats.pickle.table import LONG_TEXT, Args, Name, Pending, ReducerTable, Row
from holdfast.formats.torch.reducers import BuildingTable
from holdfast.formats.torch.tensors import brief
from holdfast.torch.serialization.allowed import (
    BLOCKED,
    default_globals,
    known_globals,
    python3_name,
    user_globals,
)
from holdfast.torch.serialization.rebuild import TorchBuilder, refused_by_torch
from holdfast.torch.serialization.refusals import DEFAULT_PROTOCOL, REGISTERED, forbidden, label
from holdfast.torch.serialization.storages import LazyStorages, as_text
from holdfast.torch.tensors.composites import function_name

HARMLESS = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of arguments that give no access to tensors, so that storages need not be filled."""


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


@cache
def _names() -> dict[int, Name]:
    names = ((full.rpartition(".")[::2], value) for full, value in known_globals().items())
    return {id(value): name for name, value in names if name in BuildingTable.calls}


class WeightsTable(BuildingTable):
    def __init__(self, storages: LazyStorages, *, encoding: str = "utf-8") -> None:
        if encoding != "bytes":
            codecs.lookup(encoding)
        self._encoding = encoding
        self.storages = storages
        self.protocol = DEFAULT_PROTOCOL
        self._user: Mapping[str, object] | None = None
        self._allowed: dict[int, object] = {}
        self.unfinished: dict[int, object] = {}
        """Objects that are nothing without their state, by identity: dtypes, and objects of C++, whose memory holds anything."""
        self.blank: dict[int, object] = {}
        """Arrays that were announced and have no state yet."""
        self.depths: dict[int, tuple[int, object]] = {}
        """How deep objects nest that are freed recursively, by identity, with the object."""
        self._torchs: set[int] = set()
        """The identities among `_allowed` that torch registered by itself."""
        self._rows: dict[int, Row] = {}
        self.builder: TorchBuilder = TorchBuilder(storages, self)
        super().__init__()
        if encoding != "bytes":
            self.persistent = storages.persistent  # type: ignore[method-assign]  # one call less for each

    def row(self, what: object) -> Row | None:
        row = self._rows.get(id(what))
        if row is None:
            name = _names().get(id(what)) or function_name(what)
            row = (
                self.calls[name]
                if name is not None
                else allowed_row(what)
                if self.is_allowed(what)
                else None
            )
            if row is not None:
                self._rows[id(what)] = row
        return row

    def declare(self, protocol: int) -> None:
        self.protocol = protocol
        if protocol != DEFAULT_PROTOCOL:
            warnings.warn(
                f"Detected pickle protocol {protocol} in the checkpoint, which was not the default pickle protocol used by "
                f"`torch.load` ({DEFAULT_PROTOCOL}). Holdfast reads protocols 0 to 5; torch.load(weights_only=True) may not.",
                UserWarning,
                stacklevel=2,
            )

    def raw(self, text: str) -> bytes:
        try:
            return text.encode(self._encoding)
        except UnicodeEncodeError as error:
            raise PickleError(
                f"a Python 2 string that is not {self._encoding}: {error.reason}"
            ) from None

    def string(self, raw: bytes) -> str | bytes:
        """A Python 2 string in the caller's `encoding`, which `bytes` turns off."""
        if self._encoding == "bytes":
            return raw
        try:
            return raw.decode(self._encoding)
        except UnicodeDecodeError as error:
            raise PickleError(
                f"a Python 2 string that is not {self._encoding}: {error.reason}"
            ) from None

    def find(self, module: str, name: str) -> object:
        module, name = python3_name(module, name)
        full = f"{module}.{name}"
        if module in BLOCKED:
            raise forbidden(module, name, blocked=True)
        value = default_globals().get(full)
        if value is not None:
            return value
        user = self._users()
        if full not in user:
            raise forbidden(module, name, blocked=False)
        return user[full]

    def call(self, what: object, args: Args) -> object:
        self.spending.container()
        row = self._rows.get(id(what)) or self.row(what)
        if row is None:
            return self.call_allowed(what, args)
        value = row(self, args)
        if value is NotImplemented:
            raise PickleError(f"{label(what)} with arguments that no writer gives it")
        return value

    def new(self, cls: object, args: Args, kwargs: dict[str, object] | None) -> object:
        self.spending.container()
        if isinstance(cls, type):
            if self.row(cls) is not None:
                if not kwargs:
                    return self.call(cls, args)
            elif self.is_allowed(cls):
                self._fill_for(args, kwargs)
                made = self.run(cls, partial(cls.__new__, cls, *args, **(kwargs or {})))
                if any(base.__module__ == "pybind11_builtins" for base in type(made).__mro__):
                    self.unfinished[id(made)] = made
                return made
        raise PickleError(
            f"Can only create new object for nn.Parameter or classes allowlisted via `add_safe_globals` but got {label(cls)}"
        )

    def instance(self, cls: object, args: Args) -> object:
        """As Python 3 does for OBJ and INST: the class is called, or only made where there is nothing to call it with."""
        if (
            isinstance(cls, type)
            and self.row(cls) is None
            and (args or hasattr(cls, "__getinitargs__"))
        ):
            return self.call(cls, args)
        return self.new(cls, args, None)

    def build(self, obj: object, state: object) -> object:
        if self.unfinished.pop(id(obj), None) is not None and isinstance(obj, Pending):
            obj = obj.finish(state)
            if self.is_allowed(type(obj)):
                return obj
        kind = type(obj)
        if kind is OrderedDict:
            self._set_entries(obj, state)
        elif kind is torch.nn.Parameter and isinstance(obj, torch.nn.Parameter):
            self.builder.fill_parameter(obj, state)
        elif isinstance(obj, torch.Tensor) and (kind is torch.Tensor or not self.is_allowed(kind)):
            self.builder.fill_blank(obj, state)
        elif self.is_allowed(kind):
            self._give_state(obj, state)
        else:
            raise PickleError(
                f"Can only build Tensor, Parameter, OrderedDict or types allowlisted via `add_safe_globals`, but got {kind}"
            )
        return obj

    def append(self, obj: object, values: list[object]) -> None:
        verb = "append to" if len(values) == 1 else "extend"
        raise PickleError(f"Can only {verb} lists, but got {type(obj)}", found=type(obj).__name__)

    def set_item(self, obj: object, key: object, value: object) -> None:
        self._set_items(obj, [key, value], "SETITEM")

    def set_items(self, obj: object, flat: list[object]) -> None:
        self._set_items(obj, flat, "SETITEMS")

    def _set_items(self, obj: object, flat: list[object], opcode: str) -> None:
        if type(obj) not in (OrderedDict, Counter) or not isinstance(obj, dict):
            known = "dict, collections.OrderedDict, collections.Counter"
            raise PickleError(
                f"Can only {opcode} for {known}, but got {type(obj)}", found=type(obj).__name__
            )
        self.spending.fill(obj, flat)

    def add(self, obj: object, values: list[object]) -> None:
        raise PickleError(f"Can only add to sets, but got {type(obj)}", found=type(obj).__name__)

    def persistent(self, pid: object) -> object:
        return self.storages.persistent(as_text(pid))

    def _set_entries(self, target: object, state: object) -> None:
        """Set attributes of an OrderedDict, such as `_metadata`. None may hide one that it has."""
        if not isinstance(state, dict):
            raise PickleError(
                "the attributes of an OrderedDict must be a dict", found=type(state).__name__
            )
        self.spending.copy(len(state))
        for name in state:
            if type(name) is not str or hasattr(OrderedDict, name):
                raise PickleError(
                    "an OrderedDict with an attribute that it cannot have had", found=brief(name)
                )
        vars(target).update(state)

    # What the user allowed.

    def _users(self) -> Mapping[str, object]:
        if self._user is None:
            self._user = user_globals()
            self._allowed = {id(value): value for value in self._user.values()}
            self._torchs = {id(value) for name, value in self._user.items() if name in REGISTERED}
        return self._user

    def is_allowed(self, what: object) -> bool:
        self._users()
        if id(what) in self._allowed:
            return True
        if isinstance(what, MethodType | BuiltinMethodType):
            # Each access makes another method object; two are equal when owner and function are the same.
            return any(type(each) is type(what) and each == what for each in self._allowed.values())
        return False

    def call_allowed(self, what: object, args: Args) -> object:
        if not self.is_allowed(what) or not callable(what):
            raise PickleError(f"Trying to call reduce for unrecognized function {label(what)}")
        self._fill_for(args, None)
        return self.run(what, partial(what, *args))

    def run(self, what: object, ready: Callable[[], object]) -> object:
        """Run what was allowed. Errors are the user's, except those of what torch registered."""
        self.end()
        try:
            value = ready()
        except Exception as error:
            if id(what) in self._torchs:
                raise refused_by_torch(f"to run {label(what)}", error) from error
            raise
        self.builder.check_jagged(value)
        return value

    def end(self) -> None:
        """Raise for an object without a state: only its own BUILD may use it."""
        for each in self.unfinished.values():
            if isinstance(each, Pending):
                raise PickleError(f"a {each.name} that BUILD has not finished")
            kind = type(each).__name__
            raise PickleError(
                f"Object created by NEWOBJ was not initialized by BUILD: a {kind}, whose memory holds anything"
            )

    def _fill_for(self, args: Args, kwargs: dict[str, object] | None) -> None:
        """Fill the storages, unless the code that is about to run has no access to any."""
        self.spending.copy(len(args))
        if kwargs or not all(type(arg) in HARMLESS for arg in args):
            self.storages.fill()

    def _give_state(self, obj: object, state: object) -> None:
        """Give an object its state: by `__setstate__`, or as attributes from a dict, or from two dicts (the second for slots)."""
        if isinstance(obj, np.ndarray):
            give_array_state(self, obj, state)
            return
        if isinstance(obj, np.dtype):
            raise PickleError("a BUILD of a dtype that is complete")
        if (
            isinstance(obj, partial)
            and isinstance(state, tuple)
            and state
            and isinstance(state[0], partial)
        ):
            raise PickleError("a partial of a partial, which Python makes one")
        method = getattr(obj, "__setstate__", None)
        if isinstance(obj, torch.Tensor) and type(obj).__setstate__ is torch.Tensor.__setstate__:
            raise PickleError("a BUILD of a tensor that is complete", found=type(obj).__name__)
        if method is not None:
            self.storages.fill()
            self.run(type(obj), partial(method, state))
            return
        attributes, slots = map(
            _by_name, state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        )
        self.spending.copy(len(attributes) + len(slots))
        if attributes:
            if not hasattr(obj, "__dict__"):
                raise PickleError(f"a {type(obj).__name__} has no attributes to be set")
            vars(obj).update(attributes)
        if slots:
            self.storages.fill()  # a class may do anything when one of its attributes is set
            for name, value in slots.items():
                if name.startswith("__"):
                    raise PickleError("a slot that belongs to Python", found=name[:64])
                if not hasattr(type(obj), name) and not hasattr(obj, "__dict__"):
                    raise PickleError(
                        f"a {type(obj).__name__} has no slot of that name", found=name[:64]
                    )
                setattr(obj, name, value)


def _by_name(state: object) -> dict[str, object]:
    """Attributes and their values, from a part of an object's state."""
    if state is not None and (
        not isinstance(state, dict) or not all(type(name) is str for name in state)
    ):
        raise PickleError(
            "an object whose state is not attributes by name", found=type(state).__name__
        )
    return state or {}


# Rows for what users allow, where a file could break the interpreter by its arguments.


def checked(what: str, function: Callable[..., Any], *args: object, **more: object) -> Any:  # noqa: ANN401  # whatever it makes
    try:
        return function(*args, **more)
    except REFUSALS as error:
        raise PickleError(f"{what} that cannot be made: {error}") from None


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
            raise PickleError(
                "a subarray of another size than its own",
                expected=made.itemsize,
                found=self._nbytes(),
            )
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
                case (np.dtype() as inner, int(offset), *title) if not title or (
                    len(title) == 1 and type(title[0]) is str
                ):
                    formats.append(inner)
                    offsets.append(offset)
                    titles.append(title[0] if title else None)
                case _:
                    raise PickleError("a structured dtype whose names and fields do not agree")
        code = self.args[0]
        whole = size if isinstance(code, type) else self._nbytes()
        spec = {
            "names": list(names),
            "formats": formats,
            "offsets": offsets,
            "itemsize": whole,
            "aligned": bool(flags & ALIGNED),
        }
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
        level = inner + [
            each.fields[name][0] for each in level if each.fields for name in each.names or ()
        ]
        if not level:
            table.spending.copy(count)
            return
    raise PickleError(f"a dtype of more than {FIELDS:,} fields, or of {LEVELS} levels")


def scalar(table: WeightsTable, args: Args) -> object:
    match args:
        case (np.dtype(kind="O"), value):
            return value
        case (np.dtype() as dtype, np.ndarray() as whole) if (
            dtype.hasobject and dtype.names is not None
        ):
            if (
                type(whole) is not np.ndarray
                or whole.shape != ()
                or whole.dtype != dtype
                or id(whole) in table.blank
            ):
                raise PickleError("a numpy scalar of another type than its array")
            made: object = checked("a numpy scalar", SCALAR, dtype, whole)
            table.depths[id(made)] = nesting_depth(table, [whole]), made
            return made
        case (np.dtype() as dtype, str(data)):
            table.spending.copy(len(data))
            args = dtype, table.raw(data)
    arrays.scalar(table, args)
    return checked("a numpy scalar", SCALAR, *args)


def reconstruct(table: WeightsTable, args: Args) -> object:
    match args:
        case (type() as kind, tuple(), bytes() | str()) if issubclass(
            kind, np.ndarray
        ) and table.is_allowed(kind):
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
        proven = check_state(table, array, state)
        checked("an array", array.__setstate__, proven)
        return
    # Its class hands the beginning of the state on to numpy, or a part of it.
    table.depths[id(array)] = 0, array
    for part in (state, *state) if isinstance(state, tuple | list) else ():
        if isinstance(part, tuple | list) and any(
            isinstance(each, np.dtype | UnfinishedDType) for each in part[1:3]
        ):
            check_state(table, array, tuple(part[: 5 if isinstance(part[0], int) else 4]))
    table.storages.fill()
    table.run(type(array), lambda: array.__setstate__(state))


def check_state(table: WeightsTable, array: np.ndarray, state: object) -> tuple[object, ...]:
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
            raise PickleError(
                f"an array of shape {tuple(sizes)} and type {dtype} from a list of {len(data):,} objects"
            )
        table.spending.copy(len(data) * max(dtype.itemsize // PER_OBJECT, 1))
        table.depths[id(array)] = (
            nesting_depth(
                table, (each for item in data for each in objects_in(table, item, dtype))
            ),
            array,
        )
    else:
        if arrays.array_over(data, dtype, shape, fortran=fortran, table=table) is NotImplemented:
            table.spending.copy(
                math.prod(sizes)
            )  # elements of no bytes, which whoever looks at them pays for
        if not dtype.isnative and dtype.kind != "U":
            # numpy turns the bytes round. That of text was paid for when it was looked through.
            table.spending.copy(math.prod(sizes) * dtype.itemsize)
    return 1, tuple(sizes), dtype, fortran, data


def objects_in(table: WeightsTable, item: object, dtype: AnyDType) -> Iterator[object]:
    """The objects that an element will hold. Raises where a number is not plain."""
    if dtype.kind == "O":
        yield item
    elif dtype.names is None or dtype.fields is None:
        if type(item) not in PLAIN or dtype.subdtype is not None:
            raise PickleError(
                f"a {type(item).__name__} as an element of type {dtype}", found=type(item).__name__
            )
        if isinstance(item, str | bytes) and len(item) > LONG_TEXT:
            table.spending.copy(len(item))
    else:
        if not isinstance(item, tuple) or len(item) != len(dtype.names):
            raise PickleError("a structured element that has not as many parts as its type")
        table.spending.copy(len(item))
        for name, part in zip(dtype.names, item, strict=True):
            yield from objects_in(table, part, dtype.fields[name][0])


def nesting_depth(table: WeightsTable, objects: Iterable[object]) -> int:
    depth = 0
    for each in objects:
        # Most objects are plain values, and there may be a million of them: these nest nothing.
        if type(each) in PLAIN:
            continue
        identity = id(each)
        if identity in table.blank:
            raise PickleError("an array of objects that holds an array which is not finished")
        if identity in table.depths:
            depth = max(depth, table.depths[identity][0])
    if depth == DEPTH:
        raise PickleError(f"arrays of objects or slices in each other, more than {DEPTH} deep")
    return depth + 1


def no_array(table: WeightsTable, args: Args) -> object:
    """Refuse `ndarray(…)`, or a subclass: no pickle of numpy's calls it, and it would allocate any size."""
    return NotImplemented


def makes_arrays(what: object) -> bool:
    if not isinstance(what, type) or not issubclass(what, np.ndarray):
        return False
    maker = next(kind for kind in what.__mro__ if "__new__" in vars(kind))
    return maker.__module__.partition(".")[0] == "numpy"


def empty_default(table: WeightsTable, args: Args) -> object:
    """A `defaultdict` of a factory alone. Its entries would come by SETITEMS, which a load refuses as torch does."""
    return NotImplemented if len(args) > 1 else checked("a defaultdict", defaultdict, *args)


def flat_partial(table: WeightsTable, args: Args) -> object:
    """A `partial` of a function. Python makes one of a `partial` of a `partial`, unless it has attributes."""
    nested = bool(args) and isinstance(args[0], partial)
    return NotImplemented if nested else checked("a partial", partial, *args)


def counted_slice(table: WeightsTable, args: Args) -> object:
    made = checked("a slice", slice, *args)
    table.depths[id(made)] = nesting_depth(table, args), made
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
    id(partial): flat_partial,
    id(slice): counted_slice,
    **{
        id(kind): path_row(kind)
        for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
    },
}
"""By identity: numpy 1 and 2 have these under different names."""


def allowed_row(what: object) -> Row | None:
    return ROWS.get(id(what)) or (no_array if makes_arrays(what) else None)
