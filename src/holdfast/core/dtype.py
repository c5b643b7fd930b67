"""The table of element types. Every name of a dtype in Holdfast comes from here.

A row of the table (`DType`) has the size of a stored element, the numpy dtype of an element in
memory, and the names that safetensors and torch use. ml_dtypes provides types that numpy does not
have, such as bfloat16. Elements that are narrower than a byte are packed in files, lowest bits
first. In numpy each of them takes one byte.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from holdfast.core.value import Value
from holdfast.errors import Unsupported


class DType(Value, frozen=True, eq=False):
    """The type of the elements of a tensor. There is one instance for each type, in `DTYPES`.

    A dtype is equal to its name, and to the dtypes of numpy and torch that it stands for:
    `dtype == "float32"`, `dtype == np.float32`, `dtype == torch.float32`. A numpy dtype with the
    other byte order is not equal.

    It hashes like its name, so `"float32"` finds it in a dict. The dtypes of numpy and torch have
    other hashes and do not find it.
    """

    name: str
    """The name in Holdfast. It is the name in torch if torch has the type."""
    bits: int
    """The size of an element in a file, in bits."""
    numpy: np.dtype[np.generic]
    """The dtype of an element in memory. If numpy cannot compute with the type, this is an integer
    with the same bits."""
    safetensors: str | None = None
    """The code in a safetensors header, or None if the format does not have the type."""
    torch: str | None = None
    """The attribute of the torch module, or None if torch does not have the type."""
    storage: str | None = None
    """The class of a typed storage in torch. None if torch stores the type as untyped bytes."""
    kind: str = "other"
    """`float`, `int`, `uint`, `bool`, `complex`, `quantized` or `other`."""

    @property
    def swap_nbytes(self) -> int:
        """The size of the units whose bytes a change of byte order reverses.

        This is the size of an element. A complex number has two units.
        """
        if self.kind == "complex":
            return self.bits // 16
        return max(self.bits // 8, 1)

    @property
    def paired(self) -> bool:
        """Whether an element in numpy is a record with a real and an imaginary part.

        numpy cannot compute with such records.
        """
        return self.numpy.names is not None

    @property
    def packed(self) -> bool:
        """Whether several elements share one byte in a file."""
        return self.bits < 8

    def nbytes(self, count: int) -> int:
        """Return how many bytes elements take in a file.

        Args:
            count: The number of elements.

        >>> DTYPES.name("float6_e2m3fn").nbytes(4)
        3
        """
        return (count * self.bits + 7) // 8

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, str):
            return other == self.name
        if isinstance(other, np.dtype) and not other.isnative:
            return False
        if not isinstance(other, DType) and DTYPES.from_any(other) is self:
            return True
        # Python then asks the other object, and the result is False if that declines as well.
        return NotImplemented

    # msgspec defines `__ne__` for structs, which would not call the `__eq__` above.
    __ne__ = object.__ne__

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"DType({self.name})"

    def __reduce__(self) -> tuple[object, ...]:
        # A pickle has only the name, so that a loaded dtype is the instance of the table.
        return (_find_by_name, (self.name,))


PLAIN_TYPES: list[tuple[str, type[np.generic], str | None, str | None, str]] = [
    # name, numpy, safetensors, storage class in torch, kind
    ("bool", np.bool_, "BOOL", "BoolStorage", "bool"),
    ("uint8", np.uint8, "U8", "ByteStorage", "uint"),
    ("int8", np.int8, "I8", "CharStorage", "int"),
    ("int16", np.int16, "I16", "ShortStorage", "int"),
    ("int32", np.int32, "I32", "IntStorage", "int"),
    ("int64", np.int64, "I64", "LongStorage", "int"),
    ("uint16", np.uint16, "U16", None, "uint"),
    ("uint32", np.uint32, "U32", None, "uint"),
    ("uint64", np.uint64, "U64", None, "uint"),
    ("float16", np.float16, "F16", "HalfStorage", "float"),
    ("bfloat16", ml_dtypes.bfloat16, "BF16", "BFloat16Storage", "float"),
    ("float32", np.float32, "F32", "FloatStorage", "float"),
    ("float64", np.float64, "F64", "DoubleStorage", "float"),
    ("float8_e5m2", ml_dtypes.float8_e5m2, "F8_E5M2", None, "float"),
    ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, "F8_E4M3", None, "float"),
    ("float8_e5m2fnuz", ml_dtypes.float8_e5m2fnuz, "F8_E5M2FNUZ", None, "float"),
    ("float8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz, "F8_E4M3FNUZ", None, "float"),
    ("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, "F8_E8M0", None, "float"),
    ("complex64", np.complex64, "C64", "ComplexFloatStorage", "complex"),
    ("complex128", np.complex128, None, "ComplexDoubleStorage", "complex"),
    # torch packs two 4-bit floats into one element of this type. numpy has nothing like it, so an
    # element is shown as its byte.
    ("float4_e2m1fn_x2", np.uint8, None, None, "other"),
    ("bits8", np.uint8, None, None, "other"),
    ("bits16", np.uint16, None, None, "other"),
    ("bits1x8", np.uint8, None, None, "other"),
    ("bits2x4", np.uint8, None, None, "other"),
    ("bits4x2", np.uint8, None, None, "other"),
    ("qint8", np.int8, None, "QInt8Storage", "quantized"),
    ("quint8", np.uint8, None, "QUInt8Storage", "quantized"),
    ("qint32", np.int32, None, "QInt32Storage", "quantized"),
]
"""The types whose elements are scalars of numpy or ml_dtypes with the same number of bits."""


def _make_rows() -> list[DType]:
    """Return all rows of the table.

    Several types borrow a numpy dtype. The first of its rows is the type that numpy means.
    """
    rows = []
    for name, scalar, code, storage, kind in PLAIN_TYPES:
        array_dtype = np.dtype(scalar)
        bits = 8 * array_dtype.itemsize
        rows.append(DType(name, bits, array_dtype, code, name, storage, kind))

    # Older versions of numpy and ml_dtypes have no scalar for these complex numbers, so each is a
    # record of two fields.
    for name, scalar in (("complex32", np.float16), ("bcomplex32", ml_dtypes.bfloat16)):
        record = np.dtype([("real", scalar), ("imag", scalar)])
        rows.append(DType(name, 32, record, torch=name, kind="complex"))

    uint8 = np.dtype(np.uint8)
    int8 = np.dtype(np.int8)
    for name, bits, storage in (
        ("quint4x2", 4, "QUInt4x2Storage"),
        ("quint2x4", 2, "QUInt2x4Storage"),
    ):
        rows.append(DType(name, bits, uint8, torch=name, storage=storage, kind="quantized"))

    # torch has these integers in name only: each takes a whole byte (torch.uint4.itemsize == 1).
    for bits in range(1, 8):
        rows.append(DType(f"uint{bits}", 8, uint8, torch=f"uint{bits}", kind="uint"))
        rows.append(DType(f"int{bits}", 8, int8, torch=f"int{bits}", kind="int"))

    for name, bits, scalar, code in (
        ("float4_e2m1fn", 4, ml_dtypes.float4_e2m1fn, "F4"),
        ("float6_e2m3fn", 6, ml_dtypes.float6_e2m3fn, "F6_E2M3"),
        ("float6_e3m2fn", 6, ml_dtypes.float6_e3m2fn, "F6_E3M2"),
    ):
        rows.append(DType(name, bits, np.dtype(scalar), safetensors=code, kind="float"))
    return rows


ABBREVIATIONS = {
    "f16": "float16",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "fp32": "float32",
    "float": "float32",
    "f64": "float64",
    "double": "float64",
    "fp8": "float8_e4m3fn",
}


class DTypes:
    """All dtypes, with a method for each way of naming one. Each returns None for an unknown name.

    >>> DTYPES.name("float32"), DTYPES.safetensors("BF16"), DTYPES.parse("torch.half")
    (DType(float32), DType(bfloat16), DType(float16))
    """

    def __init__(self, rows: list[DType]) -> None:
        """Index the rows of the table by each of their names."""
        self.rows = tuple(rows)
        self._by_name = {row.name: row for row in rows}
        self._by_safetensors = {row.safetensors: row for row in rows if row.safetensors}
        self._by_torch = {row.torch: row for row in rows if row.torch}
        self._by_storage = {row.storage: row for row in rows if row.storage}
        # Several types borrow a numpy dtype, such as uint8. The plain type comes before these in
        # the table, so it must be entered last.
        self._by_numpy = {row.numpy: row for row in reversed(rows)}

    def name(self, name: str) -> DType | None:
        """Return the dtype with this name in Holdfast."""
        return self._by_name.get(name)

    def safetensors(self, code: str) -> DType | None:
        """Return the dtype with this code in safetensors headers, such as `BF16`."""
        return self._by_safetensors.get(code)

    def torch(self, attribute: str) -> DType | None:
        """Return the dtype that is this attribute of the torch module, such as `bfloat16`."""
        return self._by_torch.get(attribute)

    def storage(self, class_name: str) -> DType | None:
        """Return the dtype of a class of typed storages in torch, such as `FloatStorage`."""
        return self._by_storage.get(class_name)

    def numpy(self, dtype: np.dtype[np.generic]) -> DType | None:
        """Return the dtype of a numpy dtype, whatever its byte order."""
        return self._by_numpy.get(dtype.newbyteorder("="))

    def parse(self, text: str) -> DType | None:
        """Return the dtype that a person means: a name of torch or numpy, or an abbreviation.

        >>> DTYPES.parse("bf16"), DTYPES.parse("torch.bfloat16")
        (DType(bfloat16), DType(bfloat16))
        """
        name = text.strip().removeprefix("torch.").removeprefix("np.")
        return self._by_name.get(ABBREVIATIONS.get(name, name))

    def from_any(self, dtype: object) -> DType | None:
        """Return the dtype of a `DType`, a numpy dtype, a class of numpy scalars or a torch dtype.

        torch is not imported. A text is not accepted: see `name` and `parse`.
        """
        if isinstance(dtype, DType):
            return dtype
        if isinstance(dtype, np.dtype):
            return self.numpy(dtype)
        if isinstance(dtype, type):
            # numpy converts other classes too, such as float or np.generic itself, which name no
            # particular type.
            if issubclass(dtype, np.generic) and dtype is not np.generic:
                return self.numpy(np.dtype(dtype))
            return None
        type_of_dtype = type(dtype)
        if (type_of_dtype.__module__, type_of_dtype.__name__) == ("torch", "dtype"):
            return self.torch(str(dtype).removeprefix("torch."))
        return None


DTYPES = DTypes(_make_rows())

WIDEST_NBYTES = 16
"""The size of the widest element, complex128. An offset that is a multiple of it is the start of an
element in data of any dtype."""


def _find_by_name(name: str) -> DType:
    """Return a dtype of the table when a pickle is loaded."""
    dtype = DTYPES.name(name)
    if dtype is None:
        raise Unsupported(f"there is no dtype called {name!r}", found=name)
    return dtype
