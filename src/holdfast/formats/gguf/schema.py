"""The header of a GGUF file: from bytes to values and to where tensors lie.

    GGUF │ version u32 │ tensors u64 │ values u64 │ values … │ tensors … │ padding │ data
                                                    │           │
        value    text, type u32, content            ┘           │      text      length u64, UTF-8
        tensor   text, rank u32, dims u64…, type u32, offset u64┘      array     type u32, count u64, contents

The header does not contain its length: it is read in growing pieces. Offsets count from the start of the data, a multiple of the
alignment. Dims are reversed, the fastest first. The version tells the byte order.

Every count is compared with the bytes that are left before anything is allocated. Texts and arrays are skipped, and made when they
are asked for (`Values`): a vocabulary has a quarter of a million texts.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np

from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Source
from holdfast.core.value import Value
from holdfast.errors import HeaderError, LimitExceeded, MetadataError, Truncated, Unsupported
from holdfast.formats.safetensors.schema import addressable
from holdfast.numeric.dequantize import BLOCK_TYPES

MAGIC = b"GGUF"

VERSIONS = (2, 3)
"""Version 1 had 32-bit counts; nobody writes it since August 2023."""

ALIGNMENT = "general.alignment"
USUAL_ALIGNMENT = 32

FIRST_NBYTES = 1 << 16
"""Bytes of the first read; each further read is four times as long."""

TEXT, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    0: "u1",
    1: "i1",
    2: "u2",
    3: "i2",
    4: "u4",
    5: "i4",
    6: "f4",
    BOOL: "u1",
    10: "u8",
    11: "i8",
    12: "f8",
}
"""Types of values, by numpy's codes."""

PLAIN = {
    0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16",
}  # fmt: skip

PACKED = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


class TensorInfo(NamedTuple):
    dtype: DType
    shape: tuple[int, ...]
    """The stored shape: the last axis of blocks counts bytes."""
    start: int
    nbytes: int
    blocks: str | None


class GgufHeader(Value, frozen=True):
    key: str
    byteorder: str
    version: int
    places: dict[str, TensorInfo]
    values: Values


class Values(Mapping[str, str]):
    """The values of a file as text, made when they are asked for. All values except texts are JSON."""

    def __init__(self, raw: bytes, places: Mapping[str, tuple[int, int]], order: str) -> None:
        """`places` has the type and the first byte of each value."""
        self._raw, self._places, self._order = raw, places, order

    def __getitem__(self, name: str) -> str:
        kind, at = self._places[name]
        value, _ = self._value(kind, at)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __repr__(self) -> str:
        # Names alone, and few of them: a vocabulary is a value, too.
        shown = [name[:64] for name in islice(self, 4)] + ["…"] * (len(self) > 4)
        return (
            f"<{len(self):,} value{'s' * (len(self) != 1)}{': ' * bool(shown)}{', '.join(shown)}>"
        )

    def number(self, name: str) -> int | None:
        """A whole number; None for a missing value or one of another type."""
        found = self._places.get(name)
        value = None if found is None or found[0] in (TEXT, ARRAY, BOOL) else self._value(*found)[0]
        return value if isinstance(value, int) else None

    def kind(self, name: str) -> int | None:
        return self._places[name][0] if name in self._places else None

    def _value(self, kind: int, at: int) -> tuple[object, int]:
        if kind == TEXT:
            stop = at + 8 + self._count(at)
            return self._raw[at + 8 : stop].decode("utf-8", "backslashreplace"), stop
        if kind != ARRAY:
            made, stop = self._row(kind, at, 1)
            return made[0], stop
        inner = int.from_bytes(self._raw[at : at + 4], "big" if self._order == ">" else "little")
        count, at = self._count(at + 4), at + 12
        if inner not in (TEXT, ARRAY):
            return self._row(inner, at, count)
        items = []
        for _ in range(count):
            item, at = self._value(inner, at)
            items.append(item)
        return items, at

    def _row(self, kind: int, at: int, count: int) -> tuple[list[object], int]:
        array = np.frombuffer(self._raw, np.dtype(self._order + SCALARS[kind]), count, at)
        if kind == BOOL:
            array = array != 0
        # The shortest digits that mean the same 32-bit float.
        made = (
            [float(str(n)) for n in array]
            if array.dtype.itemsize == 4 and array.dtype.kind == "f"
            else array.tolist()
        )
        return made, at + count * np.dtype(SCALARS[kind]).itemsize

    def _count(self, at: int) -> int:
        return int.from_bytes(self._raw[at : at + 8], "big" if self._order == ">" else "little")


class HeaderCursor:
    """Steps through a header of unknown length."""

    def __init__(self, source: Source, key: str) -> None:
        self._source, self._key = source, key
        self._size = source.store.size(key)
        self.raw = source.bytes(key, 0, min(self._size, FIRST_NBYTES))
        self.at = len(MAGIC)
        self.order = "<"

    def need(self, stop: int) -> bytes:
        """The bytes of the file, at least up to `stop`."""
        if stop <= len(self.raw):
            return self.raw
        if stop > self._size:
            raise Truncated(
                f"the header would reach beyond byte {stop:,}, and the file has {self._size:,}" if stop < 1 << 70 else
                "the header would reach beyond any file",
                file=self._key, offset=self.at, expected=min(stop, 1 << 70), found=self._size,
            )  # fmt: skip
        most = self._source.limits.header_nbytes
        if stop > most:
            message = f"a header of more than {most:,} bytes, above Limits(header_nbytes={most:,})"
            raise LimitExceeded(message, file=self._key, expected=most)
        reach = min(max(stop, 4 * len(self.raw)), self._size, most)
        self.raw += self._source.bytes(self._key, len(self.raw), reach)
        return self.raw

    def unpack(self, form: str) -> tuple[int, ...]:
        """The next numbers, in the form of the module `struct`."""
        form = self.order + form
        stop = self.at + struct.calcsize(form)
        found: tuple[int, ...] = struct.unpack_from(form, self.need(stop), self.at)
        self.at = stop
        return found

    def count(self, each: int, what: str) -> int:
        """A count of things that take at least `each` bytes; the file must have as many."""
        (count,) = self.unpack("Q")
        if count > (self._size - self.at) // each:
            message = f"{count:,} {what} need {count * each:,} bytes at the least, and {self._size - self.at:,} are left"
            raise Truncated(
                message,
                file=self._key,
                offset=self.at - 8,
                expected=count * each,
                found=self._size - self.at,
            )
        return count

    def text(self, what: str) -> str:
        length = self.count(1, "bytes of a name")
        start, stop = self.at, self.at + length
        raw = self.need(stop)[start:stop]
        self.at = stop
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise HeaderError(
                f"{what} that is no UTF-8: {raw[:40]!r}", file=self._key, offset=start
            ) from None
        if not name:
            raise HeaderError(
                f"{what} that is empty: no name, or padding that was taken for one",
                file=self._key,
                offset=start,
            )
        if "\0" in name:
            raise HeaderError(
                f"{what} with a NUL, where some readers end it: {name[:40]!r}",
                file=self._key,
                offset=start,
            )
        return name

    def skip(self, kind: int, depth: int) -> None:
        if kind == TEXT:
            length = self.count(1, "bytes of a text")  # moves `at`
            self.at += length
        elif kind == ARRAY:
            if depth > self._source.limits.depth:
                limit = self._source.limits.depth
                raise LimitExceeded(
                    f"arrays in arrays, deeper than Limits(depth={limit})",
                    file=self._key,
                    expected=limit,
                )
            (inner,) = self.unpack("I")
            if inner == ARRAY:
                for _ in range(self.count(12, "arrays")):
                    self.skip(ARRAY, depth + 1)
            elif inner == TEXT:
                self._skip_texts(self.count(8, "texts"))
            else:
                width = self._width(inner)
                count = self.count(width, "numbers")
                self.at += width * count
        else:
            self.at += self._width(kind)

    def _skip_texts(self, count: int) -> None:
        at, raw, unpack = self.at, self.raw, struct.Struct(f"{self.order}Q").unpack_from
        for _ in range(count):
            if at + 8 > len(raw):
                self.at = at
                raw = self.need(at + 8)
            at += 8 + unpack(raw, at)[0]
        self.at = at
        self.need(at)

    def _width(self, kind: int) -> int:
        code = SCALARS.get(kind)
        if code is None:
            raise HeaderError(
                f"there is no type {kind:,} of values", file=self._key, offset=self.at, found=kind
            )
        return int(code[1])


def read_gguf_header(source: Source, key: str) -> GgufHeader:
    """Read and check the header of one file. Raises every `FormatError`, `Unsupported` or `LimitExceeded`."""
    walk = HeaderCursor(source, key)
    version, tensors, values = _begin(walk, key)
    found: dict[str, tuple[int, int]] = {}
    for _ in range(values):
        name = walk.text("the name of a value")
        if name in found:
            raise HeaderError(f"the value {name[:80]!r} is there twice", file=key, offset=walk.at)
        (kind,) = walk.unpack("I")
        found[name] = (kind, walk.at)
        walk.skip(kind, 1)
    infos: dict[str, tuple[int, ...]] = {}
    for _ in range(tensors):
        name = walk.text("the name of a tensor")
        if name in infos:
            raise HeaderError(
                f"the tensor {name[:80]!r} is there twice", file=key, offset=walk.at, tensor=name
            )
        (rank,) = walk.unpack("I")
        if rank > source.limits.rank:
            limit = source.limits.rank
            message = f"{rank:,} dimensions are more than Limits(rank={limit})"
            raise LimitExceeded(
                message, file=key, tensor=name, offset=walk.at - 4, expected=limit, found=rank
            )
        infos[name] = walk.unpack(f"{rank}QIQ")
    header = walk.need(walk.at)[: walk.at]
    texts = Values(header, found, walk.order)
    alignment = _alignment(texts, key)
    start = -(-walk.at // alignment) * alignment
    places = {
        name: _place(name, info, start, alignment=alignment, key=key)
        for name, info in infos.items()
    }
    _check_layout(places, walk.at, source.store.size(key), alignment=alignment, key=key)
    return GgufHeader(key, "big" if walk.order == ">" else "little", version, places, texts)


def _begin(walk: HeaderCursor, key: str) -> tuple[int, int, int]:
    if not walk.need(24).startswith(MAGIC):
        raise HeaderError("no GGUF file begins here", file=key, offset=0, expected=MAGIC)
    (version,) = walk.unpack("I")
    if version & 0xFFFF == 0 and version:
        version, walk.order = int.from_bytes(version.to_bytes(4, "little"), "big"), ">"
    if version not in VERSIONS:
        raise Unsupported(
            f"version {version:,} of GGUF; 2 and 3 are known", file=key, offset=4, found=version
        )
    # The least that one takes: a name of one letter, and a byte of value; or no dims at all.
    tensors = walk.count(25, "tensors")
    return version, tensors, walk.count(14, "values")


def _alignment(texts: Values, key: str) -> int:
    if ALIGNMENT not in texts:
        return USUAL_ALIGNMENT
    alignment = texts.number(ALIGNMENT) if texts.kind(ALIGNMENT) == 4 else None
    if not alignment or alignment & (alignment - 1):
        raise HeaderError(
            f"{ALIGNMENT} is {texts[ALIGNMENT][:40]}, and no 32-bit power of two", file=key
        )
    return alignment


def _place(name: str, info: tuple[int, ...], start: int, *, alignment: int, key: str) -> TensorInfo:
    *dims, kind, offset = info
    shape = tuple(reversed(dims))
    plain = PLAIN.get(kind)
    dtype = DTYPES.name(plain or "uint8")
    blocks = None if plain else BLOCK_TYPES.get(PACKED.get(kind, ""))
    if dtype is None or (plain is None and blocks is None):
        raise Unsupported(
            f"the tensor has type {kind:,}, which is not known (or was withdrawn)",
            file=key,
            tensor=name,
            found=kind,
        )
    if blocks is not None:
        row, each = shape[-1] if shape else 1, blocks.elements
        if not shape or row % each:
            message = (
                f"rows of {row:,} elements are no whole blocks of {blocks.name}, which have {each}"
            )
            raise MetadataError(message, file=key, tensor=name, found=shape)
        shape = (*shape[:-1], row // each * blocks.nbytes)
    if not addressable(shape, dtype.bits):
        raise MetadataError(
            f"{list(shape)} of {dtype} is more than any file can hold",
            file=key,
            tensor=name,
            found=shape,
        )
    if offset % alignment:
        message = f"an offset of {offset:,}, which is no multiple of the alignment, {alignment:,}"
        raise HeaderError(message, file=key, tensor=name, found=offset)
    return TensorInfo(
        dtype,
        shape,
        start + offset,
        math.prod(shape) * dtype.bits // 8,
        None if blocks is None else blocks.name,
    )


def _check_layout(
    places: Mapping[str, TensorInfo], header_stop: int, size: int, *, alignment: int, key: str
) -> None:
    stop, before = -(-header_stop // alignment) * alignment, ""
    first = True
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        expected = stop if first else -(-stop // alignment) * alignment
        if place.start != expected:
            found = (
                f"overlaps {before[:80]!r}"
                if place.start < stop
                else f"leaves {place.start - expected:,} bytes to nobody"
            )
            message = f"it begins at byte {place.start:,}, and {found}"
            raise HeaderError(
                message,
                file=key,
                tensor=name,
                offset=place.start,
                expected=expected,
                found=place.start,
            )
        stop, before, first = place.start + place.nbytes, name, False
    if stop > size and places:
        raise Truncated(
            f"the tensors end at byte {stop:,}, and the file at {size:,}",
            file=key,
            expected=stop,
            found=size,
        )
    last = -(-stop // alignment) * alignment
    if size > last:
        raise HeaderError(
            f"{size - last:,} bytes follow the last tensor",
            file=key,
            offset=last,
            expected=last,
            found=size,
        )
