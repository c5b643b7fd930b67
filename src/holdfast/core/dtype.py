"""The one table of element types. Every dtype name in the library comes from here.

A row says how many bits an element takes where it is stored, which numpy dtype holds it in memory (ml_dtypes supplies what
numpy lacks), and what safetensors and torch call it. Elements narrower than a byte are packed on disk, lowest bits first, and
take one byte each in numpy.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from holdfast.core.value import Value
from holdfast.errors import Unsupported


class DType(Value, frozen=True, eq=False):
    """One element type. There is one instance a row.

    It equals its name and what numpy and torch call it, byte order included: `dtype == "float32"`, `dtype == np.float32`,
    `dtype == torch.float32`. It hashes as its name, so that a name finds it in a dict; numpy's and torch's dtypes, which hash
    otherwise, do not (as `np.dtype("float32") == "float32"`, and neither finds the other).
    """

    name: str
    """What Holdfast calls it: torch's name where torch has one."""
    bits: int
    numpy: np.dtype[np.generic]
    """What one element is in memory. For types that numpy cannot compute with, an integer of the same bits."""
    safetensors: str | None = None
    """The code in a safetensors header, or None where that format has no such type."""
    torch: str | None = None
    """The attribute of the torch module, or None where torch has no such type."""
    storage: str | None = None
    """torch's typed storage class; None for types that torch stores as untyped bytes."""
    kind: str = "other"
    """`float`, `int`, `uint`, `bool`, `complex`, `quantized` or `other`."""

    @property
    def swap_nbytes(self) -> int:
        """The unit whose bytes a change of byte order reverses: half an element for complex numbers."""
        return self.bits // 16 if self.kind == "complex" else max(self.bits // 8, 1)

    @property
    def paired(self) -> bool:
        """Whether numpy has an element as a record of a real and an imaginary part, and so computes with neither."""
        return self.numpy.names is not None

    @property
    def packed(self) -> bool:
        """Whether several elements share one byte on disk."""
        return self.bits < 8

    def nbytes(self, count: int) -> int:
        """Bytes that `count` elements take when packed without gaps."""
        return (count * self.bits + 7) // 8

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, str):
            return other == self.name
        if isinstance(other, np.dtype) and not other.isnative:
            return False
        # Not implemented, and so False, for what is no dtype: the other one may know better.
        return (
            NotImplemented
            if isinstance(other, DType)
            else DTYPES.from_any(other) is self or NotImplemented
        )

    __ne__ = object.__ne__  # a struct's own would compare otherwise

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"DType({self.name})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_by_name, (self.name,))


def _rows() -> list[DType]:
    plain = [
        # name, numpy, safetensors, torch storage class, kind
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
        # torch packs two 4-bit floats in this one-byte element; numpy has nothing like it, so the bytes are shown.
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
    rows = []
    for name, scalar, code, storage, kind in plain:
        array_dtype = np.dtype(scalar)
        rows.append(DType(name, array_dtype.itemsize * 8, array_dtype, code, name, storage, kind))
    # Pairs of halves: older numpy and ml_dtypes have no scalar for them, so each is a record with two named fields.
    for name, half in (("complex32", np.float16), ("bcomplex32", ml_dtypes.bfloat16)):
        rows.append(
            DType(name, 32, np.dtype([("real", half), ("imag", half)]), None, name, None, "complex")
        )
    rows.append(
        DType("quint4x2", 4, np.dtype(np.uint8), None, "quint4x2", "QUInt4x2Storage", "quantized")
    )
    rows.append(
        DType("quint2x4", 2, np.dtype(np.uint8), None, "quint2x4", "QUInt2x4Storage", "quantized")
    )
    # torch's shell types for narrow integers take a whole byte each (torch.uint4.itemsize == 1).
    for width in range(1, 8):
        rows.append(
            DType(f"uint{width}", 8, np.dtype(np.uint8), None, f"uint{width}", None, "uint")
        )
        rows.append(DType(f"int{width}", 8, np.dtype(np.int8), None, f"int{width}", None, "int"))
    rows.append(
        DType("float4_e2m1fn", 4, np.dtype(ml_dtypes.float4_e2m1fn), "F4", None, None, "float")
    )
    rows.append(
        DType("float6_e2m3fn", 6, np.dtype(ml_dtypes.float6_e2m3fn), "F6_E2M3", None, None, "float")
    )
    rows.append(
        DType("float6_e3m2fn", 6, np.dtype(ml_dtypes.float6_e3m2fn), "F6_E3M2", None, None, "float")
    )
    return rows


ABBREVIATIONS = {"f16": "float16", "half": "float16", "fp16": "float16", "bf16": "bfloat16", "f32": "float32", "fp32": "float32",
         "float": "float32", "f64": "float64", "double": "float64", "fp8": "float8_e4m3fn"}  # fmt: skip


class DTypes:
    """The table, with one look-up for each way of naming a row. An unknown name gives None; the caller knows the error."""

    def __init__(self, rows: list[DType]) -> None:
        self.rows = tuple(rows)
        self._name = {row.name: row for row in rows}
        self._safetensors = {row.safetensors: row for row in rows if row.safetensors}
        self._torch = {row.torch: row for row in rows if row.torch}
        self._storage = {row.storage: row for row in rows if row.storage}
        # The first row with a numpy dtype is the plain one: uint8 itself stands before the types that borrow its bytes.
        self._numpy = {row.numpy: row for row in reversed(rows)}

    def name(self, name: str) -> DType | None:
        return self._name.get(name)

    def safetensors(self, code: str) -> DType | None:
        return self._safetensors.get(code)

    def torch(self, attribute: str) -> DType | None:
        return self._torch.get(attribute)

    def storage(self, class_name: str) -> DType | None:
        return self._storage.get(class_name)

    def numpy(self, dtype: np.dtype[np.generic]) -> DType | None:
        return self._numpy.get(dtype.newbyteorder("="))

    def parse(self, text: str) -> DType | None:
        """By its name or a usual abbreviation, as torch and numpy print it as well: `bf16`, `torch.bfloat16`."""
        name = text.strip().removeprefix("torch.").removeprefix("np.")
        return self._name.get(ABBREVIATIONS.get(name, name))

    def from_any(self, dtype: object) -> DType | None:
        """The row of a dtype of ours, of numpy's (or the class of its scalars) or of torch's, which is not imported for it."""
        if isinstance(dtype, DType):
            return dtype
        if isinstance(dtype, np.dtype):
            return self.numpy(dtype)
        if isinstance(dtype, type):
            return (
                self.numpy(np.dtype(dtype))
                if issubclass(dtype, np.generic) and dtype is not np.generic
                else None
            )
        kind = type(dtype)
        return (
            self.torch(str(dtype).removeprefix("torch."))
            if (kind.__module__, kind.__name__) == ("torch", "dtype")
            else None
        )


DTYPES = DTypes(_rows())

WIDEST_NBYTES = 16  # Bytes of the widest element, complex128: what begins at a multiple of it begins at an element of every dtype.


def _by_name(name: str) -> DType:
    row = DTYPES.name(name)
    if row is None:
        raise Unsupported(f"there is no dtype called {name!r}", found=name)
    return row
