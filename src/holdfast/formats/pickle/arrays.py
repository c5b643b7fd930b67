"""Rows for numpy: arrays, scalars and dtypes, built over the bytes of the stream without copying them.

numpy announces an array with `_reconstruct` and a dtype with `dtype('f4', …)`, and BUILD brings the rest, so both are `Pending`.
Every size is checked with exact integers before numpy sees it: elements × item size is the number of bytes, or it is a lie.

Arrays are read-only, because they are views of the stream's bytes. Kept as `Opaque`, since that is more use to an honest file
than a refusal: arrays of Python objects, subclasses of `ndarray`, subarray and nested structured dtypes, dtypes that
this numpy lacks, and elements of no bytes.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any
from weakref import proxy

import ml_dtypes
import numpy as np

from holdfast.core.arrays import AnyDType
from holdfast.core.opaque import Global, Opaque
from holdfast.errors import PickleError
from holdfast.formats.pickle.table import Args, Name, Pending, ReducerTable, Row

CODE = re.compile(r"[?biufcSUVmM][0-9]{0,9}")
"""Type codes without objects: `f4`, `U12`, `M8`."""

ORDERS = ("<", ">", "|", "=")

UNIT = re.compile(rb"Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as|generic")

ML_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in (
        "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
        "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "int2", "int4", "uint2", "uint4",
    )
    if hasattr(ml_dtypes, name)
}  # fmt: skip

NDARRAY = Global("numpy", "ndarray")
MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
"""numpy 2 renamed `core` to `_core`, and still writes the old names in some versions."""


def numpy_values() -> dict[Name, object]:
    """Globals that are only ever mentioned: the classes of arrays and of elements."""
    known = [NDARRAY, *(Global("ml_dtypes", name) for name in ML_DTYPES)]
    scalars = ("bool_", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
               "float64", "complex64", "complex128", "str_", "bytes_", "void", "datetime64", "timedelta64")  # fmt: skip
    known += [Global("numpy", name) for name in scalars]
    return {(g.module, g.name): g for g in known}


def reconstruct(table: ReducerTable, args: Args) -> object:
    if len(args) != 3 or not isinstance(args[1], tuple):
        raise PickleError("an array that begins with other arguments than numpy's")
    if not isinstance(args[0], Global) or args[0] != NDARRAY:
        return NotImplemented
    return PendingArray(Global(MULTIARRAY[0], "_reconstruct"), args, table)


def dtype(table: ReducerTable, args: Args) -> object:
    return (
        PendingDType(Global("numpy", "dtype"), args, table)
        if _known_dtype(args) is not None
        else NotImplemented
    )


class PendingArray(Pending):
    """An array before its BUILD: `(version, shape, dtype, fortran, data)`."""

    __slots__ = ("table",)

    def __init__(self, what: Global, args: Args, table: ReducerTable) -> None:
        super().__init__(what, args)
        self.table = proxy(table)

    def finish(self, state: object) -> object:
        shape, dtype, fortran, data = array_state(state)
        self.state = state
        if not isinstance(dtype, np.dtype) or isinstance(data, list):
            return self
        made = array_over(data, dtype, shape, fortran=fortran, table=self.table)
        return self if made is NotImplemented else made


def array_state(state: object) -> tuple[tuple[object, ...], object, bool, object]:
    """The shape, dtype, order and elements that an array's state speaks of."""
    match state:
        # The version was left out before numpy 1.0.
        case (int(), tuple(shape), dtype, fortran, data) | (tuple(shape), dtype, fortran, data):
            pass
        case _:
            raise PickleError("an array whose state has not the form of numpy's")
    if not isinstance(fortran, int):
        raise PickleError("an array whose order is neither of numpy's two")
    return shape, dtype, bool(fortran), data


class PendingDType(Pending):
    """A dtype before its BUILD: `(version, byte order, subarray, names, fields, item size, alignment, flags[, metadata])`."""

    __slots__ = ("table",)

    def __init__(self, what: Global, args: Args, table: ReducerTable) -> None:
        super().__init__(what, args)
        self.table = proxy(table)

    def finish(self, state: object) -> object:
        # By type first: an array in the place of the text would be compared element by element.
        if (
            not isinstance(state, tuple)
            or not 5 <= len(state) <= 9
            or type(state[1]) is not str
            or state[1] not in ORDERS
        ):
            raise PickleError("a dtype whose state has not the form of numpy's")
        self.state = state
        made = self.made(state)
        return self if made is None else made

    def made(self, state: tuple[Any, ...]) -> AnyDType | None:
        """The dtype of a state that has the form of numpy's; None for one that we keep as it is."""
        plain = _known_dtype(self.args)
        order, subarray, names, fields = state[1:5]
        if plain is None or subarray is not None:
            return None
        if names is not None or fields is not None:
            return _structured(plain.itemsize, names, fields, table=self.table) or None
        if len(state) == 9:
            plain = _with_unit(plain, state[8])
        turned = None if plain is None else plain.newbyteorder(order)
        return plain if turned is None or turned.isnative else turned


def _known_dtype(args: Args) -> AnyDType | None:
    """The dtype that a call of `numpy.dtype` names, in native byte order; None for one that we keep as it is."""
    if not 1 <= len(args) <= 3:
        raise PickleError("a numpy.dtype with too many or too few arguments")
    code = args[0]
    if isinstance(code, Global):
        return ML_DTYPES.get(code.name) if code.module == "ml_dtypes" else None
    if isinstance(code, str) and type(code) is str:
        if not CODE.fullmatch(code):
            return None
    elif not isinstance(code, type) or not issubclass(code, np.generic):
        # A load has the class itself, where the user allowed it.
        raise PickleError(f"a numpy.dtype of a {type(code).__name__}", found=type(code).__name__)
    try:
        made: AnyDType = np.dtype(code)
    except (TypeError, ValueError):
        return None
    return made


def _with_unit(plain: AnyDType, metadata: object) -> AnyDType | None:
    """A datetime64 or timedelta64 with its unit, which stands as `(metadata, (unit, count, 1, 1))`."""
    match metadata:
        case (_, (str() | bytes() as unit, int(count), int(), int())) if (
            plain.kind in "mM" and 0 < count < 1 << 31
        ):
            raw = unit.encode("ascii", "replace") if isinstance(unit, str) else unit
        case _:
            return None
    if not UNIT.fullmatch(raw):
        raise PickleError("a datetime64 in a unit that numpy does not have")
    return plain if raw == b"generic" else np.dtype(f"{plain.kind}8[{count}{raw.decode()}]")


def _structured(
    whole: int, names: object, fields: object, *, table: ReducerTable
) -> AnyDType | None:
    """A dtype with named fields of plain types; None for one with nested or titled fields."""
    if not isinstance(names, tuple) or not isinstance(fields, dict) or len(names) != len(fields):
        raise PickleError("a structured dtype whose names and fields do not agree")
    table.spending.copy(len(names))
    formats: list[AnyDType] = []
    offsets: list[int] = []
    for name in names:
        match fields.get(name) if type(name) is str else None:
            case (np.dtype() as inner, int(offset)) if inner.names is None:
                if not 0 <= offset <= whole - inner.itemsize:
                    raise PickleError("a structured dtype with a field beyond its end")
                formats.append(inner)
                offsets.append(offset)
            case _:
                return None
    try:
        return np.dtype(
            {"names": list(names), "formats": formats, "offsets": offsets, "itemsize": whole}
        )
    except (TypeError, ValueError) as error:
        raise PickleError(f"a structured dtype that numpy refuses: {error}") from None


def scalar(table: ReducerTable, args: Args) -> object:
    """One element: its dtype and its bytes."""
    match args:
        case (np.dtype() as dtype, (bytes() | str()) as data):
            pass
        case (Opaque(), *_):
            return NotImplemented
        case _:
            raise PickleError("a numpy scalar with other arguments than a dtype and its bytes")
    if dtype.itemsize == 0 and not data:
        return (
            np.str_("")
            if dtype.kind == "U"
            else np.bytes_(b"")
            if dtype.kind == "S"
            else NotImplemented
        )
    # An element is a copy, where an array only looks at the bytes.
    table.spending.copy(len(data))
    made = array_over(data, dtype, (), fortran=False, table=table)
    if not isinstance(made, np.ndarray):
        return made
    try:
        return made[()]
    except (
        ValueError,
        OverflowError,
        SystemError,
    ) as error:  # the last from a U1 that is no character (numpy 2.4)
        raise PickleError(f"a numpy scalar that numpy refuses: {error}") from None


def frombuffer(table: ReducerTable, args: Args) -> object:
    """An array as protocol 5 writes it: data, dtype, shape, order, and the axes of a transposed one."""
    match args:
        case (bytes() | bytearray() as data, np.dtype() as dtype, tuple(shape), str(order)) | (
            bytes() | bytearray() as data, np.dtype() as dtype, tuple(shape), str(order), None
        ) if order in ("C", "F", "A"):  # fmt: skip
            return array_over(data, dtype, shape, fortran=order == "F", table=table)
        case (
            bytes() | bytearray() as data,
            np.dtype() as dtype,
            tuple(shape),
            str(order),
            tuple(axes),
        ) if order == "K":
            made = array_over(data, dtype, shape, fortran=False, table=table)
            order_of_axes = checked_axes(axes, len(shape))
            return made.transpose(order_of_axes) if isinstance(made, np.ndarray) else made
        case (_, Opaque(), *_):
            return NotImplemented
        case _:
            raise PickleError("an array from a buffer with other arguments than numpy's")


def checked_axes(axes: object, rank: int) -> tuple[int, ...]:
    """The axes of a transposed array. Raises `PickleError` if they are not a permutation."""
    if not isinstance(axes, tuple) or len(axes) != rank or set(map(type, axes)) - {int}:
        raise PickleError("an array whose axes are no permutation")
    if sorted(axes) != list(range(rank)):
        raise PickleError("an array whose axes are no permutation")
    return axes


def array_over(
    data: object, dtype: AnyDType, shape: tuple[object, ...], *, fortran: bool, table: ReducerTable
) -> object:
    """An array over `data`, or `NotImplemented` for elements of no bytes. Nothing is allocated from a claimed size."""
    if isinstance(data, str):
        table.spending.copy(len(data))
        data = table.raw(data)
    if not isinstance(data, bytes | bytearray):
        raise PickleError(
            f"an array whose data is a {type(data).__name__}", found=type(data).__name__
        )
    if dtype.hasobject or dtype.subdtype is not None:
        raise PickleError(f"an array of bytes whose type is {dtype}")
    sizes = array_sizes(shape, table)
    if dtype.itemsize == 0:
        return NotImplemented
    nbytes = math.prod(sizes) * dtype.itemsize
    if nbytes != len(data):
        message = f"an array of shape {tuple(sizes)} and type {dtype} needs {nbytes:,} bytes, and has {len(data):,}"
        raise PickleError(message, expected=nbytes, found=len(data))
    try:
        made = np.ndarray(sizes, dtype, buffer=data, order="F" if fortran else "C")
    except (TypeError, ValueError, OverflowError) as error:
        raise PickleError(f"an array that numpy refuses: {error}") from None
    if text := text_nbytes(dtype):
        # Looked through for every array that is made over these bytes, and there may be many.
        table.spending.copy(math.prod(sizes) * text)
        if (wrong := wrong_character(made)) is not None:
            raise PickleError("text of numpy with a character that Unicode has not", found=wrong)
    return made


def array_sizes(shape: tuple[object, ...], table: ReducerTable) -> list[int]:
    """The sizes of an array, which are numbers of elements."""
    if len(shape) > table.limits.rank:
        raise PickleError(
            f"an array of {len(shape):,} dimensions", expected=table.limits.rank, found=len(shape)
        )
    sizes = [size for size in shape if type(size) is int and 0 <= size < 1 << 63]
    if len(sizes) != len(shape):
        raise PickleError("an array with a size that is no number of elements")
    return sizes


def text_nbytes(dtype: AnyDType) -> int:
    """How many bytes of an element are text."""
    if dtype.subdtype is not None:
        return text_nbytes(dtype.subdtype[0]) * math.prod(dtype.shape)
    if dtype.names is None or dtype.fields is None:
        return dtype.itemsize if dtype.kind == "U" else 0
    return sum(text_nbytes(dtype.fields[name][0]) for name in dtype.names)


def wrong_character(array: np.ndarray) -> int | None:
    """A character in the texts of an array that Unicode has not: taking out such an element breaks the interpreter (numpy 2.4)."""
    for name in array.dtype.names or ():
        if (wrong := wrong_character(array[name])) is not None:
            return wrong
    if array.dtype.kind == "U" and array.size:
        most = int(np.ascontiguousarray(array).reshape(-1).view(array.dtype.byteorder + "u4").max())
        return most if most > sys.maxunicode else None
    return None


NUMPY_CALLS: dict[Name, Row] = {
    ("numpy", "dtype"): dtype,
    **{(module, "scalar"): scalar for module in MULTIARRAY},
    **{(module, "_reconstruct"): reconstruct for module in MULTIARRAY},
    **{(module, "_frombuffer"): frombuffer for module in NUMERIC},
}
"""Rows for REDUCE."""
