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

import ml_dtypes
import numpy as np

from holdfast.core.arrays import AnyDType
from holdfast.core.opaque import Global, Opaque
from holdfast.errors import PickleError
from holdfast.formats.pickle.table import Name, Pending, ReducerTable, Row

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


def numpy_calls(table: ReducerTable) -> dict[Name, Row]:
    """Rows for REDUCE; `table` is where the limits are."""

    def scalar(args: tuple[object, ...]) -> object:
        return _scalar(args, table)

    def frombuffer(args: tuple[object, ...]) -> object:
        return _frombuffer(args, table)

    def reconstruct(args: tuple[object, ...]) -> object:
        if len(args) != 3 or not isinstance(args[1], tuple):
            raise PickleError("an array that begins with other arguments than numpy's")
        if not isinstance(args[0], Global) or args[0] != NDARRAY:
            return NotImplemented
        return PendingArray(Global(MULTIARRAY[0], "_reconstruct"), args, table)

    def dtype(args: tuple[object, ...]) -> object:
        return PendingDType(Global("numpy", "dtype"), args, table) if _known_dtype(args) is not None else NotImplemented

    rows: dict[Name, Row] = {("numpy", "dtype"): dtype}
    for module in MULTIARRAY:
        rows[module, "scalar"] = scalar
        rows[module, "_reconstruct"] = reconstruct
    for module in NUMERIC:
        rows[module, "_frombuffer"] = frombuffer
    return rows


class PendingArray(Pending):
    """An array before its BUILD: `(version, shape, dtype, fortran, data)`."""

    __slots__ = ("table",)

    def __init__(self, what: Global, args: tuple[object, ...], table: ReducerTable) -> None:
        super().__init__(what, args)
        self.table = table

    def finish(self, state: object) -> object:
        match state:
            # The version was left out before numpy 1.0.
            case (int(), tuple(shape), dtype, fortran, data) | (tuple(shape), dtype, fortran, data):
                pass
            case _:
                raise PickleError("an array whose state has not the form of numpy's")
        self.state = state
        if not isinstance(dtype, np.dtype) or isinstance(data, list):
            return self
        if not isinstance(fortran, int):
            raise PickleError("an array whose order is neither of numpy's two")
        made = _array(data, dtype, shape, fortran=bool(fortran), table=self.table)
        return self if made is NotImplemented else made


class PendingDType(Pending):
    """A dtype before its BUILD: `(version, byte order, subarray, names, fields, item size, alignment, flags[, metadata])`."""

    __slots__ = ("table",)

    def __init__(self, what: Global, args: tuple[object, ...], table: ReducerTable) -> None:
        super().__init__(what, args)
        self.table = table

    def finish(self, state: object) -> object:
        # By type first: an array in the place of the text would be compared element by element.
        if not isinstance(state, tuple) or not 5 <= len(state) <= 9 or type(state[1]) is not str or state[1] not in ORDERS:
            raise PickleError("a dtype whose state has not the form of numpy's")
        self.state = state
        plain = _known_dtype(self.args)
        order, subarray, names, fields = state[1:5]
        if plain is None or subarray is not None:
            return self
        if names is not None or fields is not None:
            return _structured(self.args, names, fields, table=self.table) or self
        if len(state) == 9:
            made = _with_unit(plain, state[8])
            if made is None:
                return self
            plain = made
        return plain.newbyteorder(order) if plain.byteorder != "|" else plain


def _known_dtype(args: tuple[object, ...]) -> AnyDType | None:
    """The dtype that a call of `numpy.dtype` names, in native byte order; None for one that we keep as it is."""
    if not 1 <= len(args) <= 3:
        raise PickleError("a numpy.dtype with too many or too few arguments")
    code = args[0]
    if isinstance(code, Global):
        return ML_DTYPES.get(code.name) if code.module == "ml_dtypes" else None
    if type(code) is not str:
        raise PickleError(f"a numpy.dtype of a {type(code).__name__}", found=type(code).__name__)
    if not CODE.fullmatch(code):
        return None
    try:
        return np.dtype(code)
    except (TypeError, ValueError):
        return None


def _with_unit(plain: AnyDType, metadata: object) -> AnyDType | None:
    """A datetime64 or timedelta64 with its unit, which stands as `(metadata, (unit, count, 1, 1))`."""
    match metadata:
        case (_, (str() | bytes() as unit, int(count), int(), int())) if plain.kind in "mM" and 0 < count < 1 << 31:
            raw = unit.encode("ascii", "replace") if isinstance(unit, str) else unit
        case _:
            return None
    if not UNIT.fullmatch(raw):
        raise PickleError("a datetime64 in a unit that numpy does not have")
    return plain if raw == b"generic" else np.dtype(f"{plain.kind}8[{count}{raw.decode()}]")


def _structured(args: tuple[object, ...], names: object, fields: object, *, table: ReducerTable) -> AnyDType | None:
    """A dtype with named fields of plain types; None for one with nested or titled fields."""
    if not isinstance(names, tuple) or not isinstance(fields, dict) or len(names) != len(fields):
        raise PickleError("a structured dtype whose names and fields do not agree")
    table.spending.copy(len(names))
    whole = np.dtype(str(args[0])).itemsize
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
        return np.dtype({"names": list(names), "formats": formats, "offsets": offsets, "itemsize": whole})
    except (TypeError, ValueError) as error:
        raise PickleError(f"a structured dtype that numpy refuses: {error}") from None


def _scalar(args: tuple[object, ...], table: ReducerTable) -> object:
    """One element: its dtype and its bytes."""
    match args:
        case (np.dtype() as dtype, (bytes() | str()) as data):
            pass
        case (Opaque(), *_):
            return NotImplemented
        case _:
            raise PickleError("a numpy scalar with other arguments than a dtype and its bytes")
    if dtype.itemsize == 0 and not data:
        return np.str_("") if dtype.kind == "U" else np.bytes_(b"") if dtype.kind == "S" else NotImplemented
    # An element is a copy, where an array only looks at the bytes.
    table.spending.copy(len(data))
    made = _array(data, dtype, (), fortran=False, table=table)
    if not isinstance(made, np.ndarray):
        return made
    try:
        return made[()]
    except (ValueError, OverflowError, SystemError) as error:  # the last from a U1 that is no character (numpy 2.4)
        raise PickleError(f"a numpy scalar that numpy refuses: {error}") from None


def _frombuffer(args: tuple[object, ...], table: ReducerTable) -> object:
    """An array as protocol 5 writes it: data, dtype, shape, order, and the axes of a transposed one."""
    match args:
        case (bytes() | bytearray() as data, np.dtype() as dtype, tuple(shape), str(order)) | (
            bytes() | bytearray() as data, np.dtype() as dtype, tuple(shape), str(order), None
        ) if order in ("C", "F", "A"):  # fmt: skip
            return _array(data, dtype, shape, fortran=order == "F", table=table)
        case (bytes() | bytearray() as data, np.dtype() as dtype, tuple(shape), str(order), tuple(axes)) if order == "K":
            made = _array(data, dtype, shape, fortran=False, table=table)
            if len(axes) != len(shape) or set(map(type, axes)) - {int} or sorted(axes) != list(range(len(shape))):
                raise PickleError("an array whose axes are no permutation")
            return made.transpose(axes) if isinstance(made, np.ndarray) else made
        case (_, Opaque(), *_):
            return NotImplemented
        case _:
            raise PickleError("an array from a buffer with other arguments than numpy's")


def _array(data: object, dtype: AnyDType, shape: tuple[object, ...], *, fortran: bool, table: ReducerTable) -> object:
    """An array over `data`, or `NotImplemented` for elements of no bytes. Nothing is allocated from a claimed size."""
    if isinstance(data, str):
        # A Python 2 string that happened to be UTF-8; see `text.python2_string`.
        table.spending.copy(len(data))
        data = data.encode("utf-8", "surrogatepass")
    if not isinstance(data, bytes | bytearray):
        raise PickleError(f"an array whose data is a {type(data).__name__}", found=type(data).__name__)
    if len(shape) > table.limits.rank:
        raise PickleError(f"an array of {len(shape):,} dimensions", expected=table.limits.rank, found=len(shape))
    sizes = [size for size in shape if type(size) is int and 0 <= size < 1 << 63]
    if len(sizes) != len(shape):
        raise PickleError("an array with a size that is no number of elements")
    if dtype.itemsize == 0:
        return NotImplemented
    nbytes = math.prod(sizes) * dtype.itemsize
    if nbytes != len(data):
        raise PickleError(
            f"an array of shape {tuple(sizes)} and type {dtype} needs {nbytes:,} bytes, and has {len(data):,}",
            expected=nbytes,
            found=len(data),
        )
    try:
        made = np.ndarray(sizes, dtype, buffer=data, order="F" if fortran else "C")
    except (TypeError, ValueError, OverflowError) as error:
        raise PickleError(f"an array that numpy refuses: {error}") from None
    if made.dtype.kind == "U" or made.dtype.names:
        # Looked through for every array that is made over these bytes, and there may be many.
        table.spending.copy(len(data) * max(len(made.dtype.names or ()), 1))
        if (wrong := wrong_character(made)) is not None:
            raise PickleError("text of numpy with a character that Unicode has not", found=wrong)
    return made


def wrong_character(array: np.ndarray) -> int | None:
    """A character in the texts of an array that Unicode has not: taking out such an element breaks the interpreter (numpy 2.4)."""
    for name in array.dtype.names or ():
        if (wrong := wrong_character(np.ascontiguousarray(array[name]))) is not None:
            return wrong
    if array.dtype.kind == "U" and array.size:
        most = int(np.ascontiguousarray(array).reshape(-1).view(array.dtype.byteorder + "u4").max())
        return most if most > sys.maxunicode else None
    return None
