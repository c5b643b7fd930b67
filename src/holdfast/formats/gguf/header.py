"""Reads the header of a GGUF file and checks it.

The header does not state its own length, so it is read in growing pieces. Each count is compared with
the bytes that are left in the file before anything is allocated for it. The values of the metadata
are only skipped here: `Metadata` decodes them later.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Source
from holdfast.core.value import Value
from holdfast.errors import HeaderError, LimitExceeded, MetadataError, Truncated, Unsupported
from holdfast.formats.gguf.metadata import ARRAY, NUMBER_CODES, STRING, UINT32, Metadata
from holdfast.formats.safetensors.schema import is_addressable
from holdfast.numeric.dequantize import BLOCK_TYPES

MAGIC = b"GGUF"

VERSIONS = (2, 3)
"""Version 1 had 32-bit counts. No program has written it since August 2023."""

GENERAL_ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32

FIRST_READ_NBYTES = 1 << 16
"""The size of the first read of a header. Each further read is four times as long."""

MIN_METADATA_KV_NBYTES = 14
"""The smallest metadata entry: a key of one character, and a value of one byte."""

MIN_TENSOR_INFO_NBYTES = 25
"""The smallest tensor info: a name of one character, and no dimensions."""

ELEMENT_TYPES = {
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
}
"""The values of ggml_type that mean plain elements, with our names of their dtypes."""

QUANTIZED_TYPES = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""The values of ggml_type that mean quantization blocks."""


class TensorLocation(NamedTuple):
    """Where the data of a tensor is, and how to interpret it."""

    dtype: DType
    shape: tuple[int, ...]
    """The shape of the stored array. For quantization blocks, the last axis counts bytes."""
    start: int
    nbytes: int
    block_type: str | None
    """The type of the quantization blocks, or None for plain elements."""


class GgufHeader(Value, frozen=True):
    """The checked header of one file."""

    key: str
    byteorder: str
    tensors: dict[str, TensorLocation]
    metadata: Metadata


class HeaderCursor:
    """Reads the fields of a header one after the other.

    `offset` is the position of the next field. `content` has the bytes that were read so far.
    """

    def __init__(self, source: Source, key: str) -> None:
        self.key = key
        self.file_nbytes = source.store.size(key)
        self.limits = source.limits
        self._source = source
        self.content = source.bytes(key, 0, min(self.file_nbytes, FIRST_READ_NBYTES))
        self.offset = 0
        self.byte_order = "<"

    def read_until(self, stop: int) -> bytes:
        """Return the bytes of the file from its start, at least up to the offset `stop`."""
        if stop <= len(self.content):
            return self.content
        if stop > self.file_nbytes:
            raise Truncated(
                f"the header continues after the end of the file, which has {self.file_nbytes:,} bytes",
                file=self.key,
                offset=self.offset,
                expected=min(stop, 1 << 70),
                found=self.file_nbytes,
            )
        max_nbytes = self.limits.header_nbytes
        if stop > max_nbytes:
            message = f"the header has more than {max_nbytes:,} bytes, the value of Limits(header_nbytes={max_nbytes:,})"
            raise LimitExceeded(message, file=self.key, expected=max_nbytes)
        next_stop = min(max(stop, 4 * len(self.content)), self.file_nbytes, max_nbytes)
        self.content += self._source.bytes(self.key, len(self.content), next_stop)
        return self.content

    def unpack(self, fields: str) -> tuple[int, ...]:
        """Read integers. `fields` are format characters of the module `struct`."""
        form = self.byte_order + fields
        stop = self.offset + struct.calcsize(form)
        integers: tuple[int, ...] = struct.unpack_from(form, self.read_until(stop), self.offset)
        self.offset = stop
        return integers

    def read_count(self, item_nbytes: int, items: str) -> int:
        """Read a count, and refuse it if the rest of the file is too small for so many items.

        This stops a file of 30 bytes that claims a billion strings.

        Args:
            item_nbytes: The smallest size of one item.
            items: What the count counts, for the error.
        """
        (count,) = self.unpack("Q")
        remaining_nbytes = self.file_nbytes - self.offset
        if count > remaining_nbytes // item_nbytes:
            message = (
                f"{count:,} {items} need at least {count * item_nbytes:,} bytes,"
                f" but the file has only {remaining_nbytes:,} bytes left"
            )
            raise Truncated(
                message,
                file=self.key,
                offset=self.offset - 8,
                expected=count * item_nbytes,
                found=remaining_nbytes,
            )
        return count

    def read_name(self, owner: str) -> str:
        """Read the string that names a value or a tensor, and refuse unusual names."""
        length = self.read_count(1, "bytes of a name")
        start = self.offset
        stop = start + length
        encoded = self.read_until(stop)[start:stop]
        self.offset = stop
        try:
            name = encoded.decode("utf-8")
        except UnicodeDecodeError:
            message = f"the name of a {owner} is not UTF-8: {encoded[:40]!r}"
            raise HeaderError(message, file=self.key, offset=start) from None
        if not name:
            # Readers that lose their place in the header see padding as empty names.
            raise HeaderError(f"the name of a {owner} is empty", file=self.key, offset=start)
        if "\0" in name:
            # C programs end a string at NUL, so they would see another name.
            message = f"the name of a {owner} contains NUL: {name[:40]!r}"
            raise HeaderError(message, file=self.key, offset=start)
        return name

    def skip_value(self, value_type: int, *, depth: int = 1) -> None:
        """Move behind a metadata value, and check its counts."""
        if value_type == STRING:
            self._skip_strings(1)
        elif value_type == ARRAY:
            self._skip_array(depth)
        else:
            self.offset += self._number_nbytes(value_type)

    def _skip_array(self, depth: int) -> None:
        # Arrays contain arrays. The limit protects the stack against a million levels.
        if depth > self.limits.depth:
            message = f"arrays are nested deeper than Limits(depth={self.limits.depth})"
            raise LimitExceeded(message, file=self.key, expected=self.limits.depth)
        (item_type,) = self.unpack("I")
        if item_type == ARRAY:
            for _ in range(self.read_count(12, "arrays")):
                self._skip_array(depth + 1)
        elif item_type == STRING:
            self._skip_strings(self.read_count(8, "strings"))
        else:
            item_nbytes = self._number_nbytes(item_type)
            count = self.read_count(item_nbytes, "numbers")
            self.offset += count * item_nbytes

    def _skip_strings(self, count: int) -> None:
        # A vocabulary has 250,000 strings, so this loop makes no call of `read_count` for each.
        offset = self.offset
        content = self.content
        unpack_length = struct.Struct(f"{self.byte_order}Q").unpack_from
        for _ in range(count):
            if offset + 8 > len(content):
                self.offset = offset
                content = self.read_until(offset + 8)
            offset += 8 + unpack_length(content, offset)[0]
        self.offset = offset
        self.read_until(offset)

    def _number_nbytes(self, value_type: int) -> int:
        code = NUMBER_CODES.get(value_type)
        if code is None:
            message = f"unknown type {value_type:,} of a metadata value"
            raise HeaderError(message, file=self.key, offset=self.offset, found=value_type)
        return int(code[1])


def read_gguf_header(source: Source, key: str) -> GgufHeader:
    """Read the header of one file and check it. No tensor data is read.

    Raises:
        FormatError: The header is damaged or contradicts itself.
        Unsupported: The file has a version or a type of tensors that is not known.
        LimitExceeded: The header is larger or more deeply nested than the limits allow.
    """
    cursor = HeaderCursor(source, key)
    _read_magic_and_version(cursor)
    tensor_count = cursor.read_count(MIN_TENSOR_INFO_NBYTES, "tensors")
    value_count = cursor.read_count(MIN_METADATA_KV_NBYTES, "metadata values")

    value_locations: dict[str, tuple[int, int]] = {}
    for _ in range(value_count):
        name = cursor.read_name("metadata value")
        if name in value_locations:
            message = f"the header has two metadata values with the name {name[:80]!r}"
            raise HeaderError(message, file=key, offset=cursor.offset)
        (value_type,) = cursor.unpack("I")
        value_locations[name] = (value_type, cursor.offset)
        cursor.skip_value(value_type)

    tensor_infos: dict[str, tuple[int, ...]] = {}
    for _ in range(tensor_count):
        name = cursor.read_name("tensor")
        if name in tensor_infos:
            message = f"the header has two tensors with the name {name[:80]!r}"
            raise HeaderError(message, file=key, offset=cursor.offset, tensor=name)
        tensor_infos[name] = _read_tensor_info(cursor, name)

    header_nbytes = cursor.offset
    content = cursor.read_until(header_nbytes)[:header_nbytes]
    metadata = Metadata(content, value_locations, cursor.byte_order)
    alignment = _find_alignment(metadata, key)

    data_start = _round_up(header_nbytes, alignment)
    tensors: dict[str, TensorLocation] = {}
    for name, (*dimensions, ggml_type, offset) in tensor_infos.items():
        if offset % alignment:
            message = f"the offset {offset:,} is not a multiple of the alignment, {alignment:,}"
            raise HeaderError(message, file=key, tensor=name, found=offset)
        shape = tuple(reversed(dimensions))
        tensors[name] = _locate_tensor(name, ggml_type, shape, data_start + offset, key=key)

    _check_tensor_data(tensors, data_start, cursor.file_nbytes, alignment=alignment, key=key)
    byteorder = "big" if cursor.byte_order == ">" else "little"
    return GgufHeader(key, byteorder, tensors, metadata)


def _read_magic_and_version(cursor: HeaderCursor) -> None:
    """Check the magic and the version, and set the byte order of the cursor."""
    if not cursor.read_until(24).startswith(MAGIC):
        raise HeaderError("not a GGUF file", file=cursor.key, offset=0, expected=MAGIC)
    cursor.offset = len(MAGIC)
    (version,) = cursor.unpack("I")
    if version and version & 0xFFFF == 0:
        # A small integer whose upper half is set has the other byte order.
        cursor.byte_order = ">"
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in VERSIONS:
        message = f"GGUF version {version:,} is not supported; supported versions are 2 and 3"
        raise Unsupported(message, file=cursor.key, offset=4, found=version)


def _read_tensor_info(cursor: HeaderCursor, name: str) -> tuple[int, ...]:
    """Read the dimensions of a tensor, its ggml_type and its offset, in this order."""
    (rank,) = cursor.unpack("I")
    max_rank = cursor.limits.rank
    if rank > max_rank:
        raise LimitExceeded(
            f"the tensor has {rank:,} dimensions, more than Limits(rank={max_rank})",
            file=cursor.key,
            tensor=name,
            offset=cursor.offset - 4,
            expected=max_rank,
            found=rank,
        )
    return cursor.unpack(f"{rank}QIQ")


def _find_alignment(metadata: Metadata, key: str) -> int:
    """Return the alignment of the tensor data."""
    if GENERAL_ALIGNMENT not in metadata:
        return DEFAULT_ALIGNMENT
    alignment = None
    if metadata.value_type(GENERAL_ALIGNMENT) == UINT32:
        alignment = metadata.integer(GENERAL_ALIGNMENT)
    if not alignment or alignment & (alignment - 1):
        stated = metadata[GENERAL_ALIGNMENT][:40]
        message = f"{GENERAL_ALIGNMENT} must be a power of two of type uint32, got {stated}"
        raise HeaderError(message, file=key)
    return alignment


def _locate_tensor(
    name: str, ggml_type: int, shape: tuple[int, ...], start: int, *, key: str
) -> TensorLocation:
    """Translate a tensor info to the stored array, and check that its type and shape are possible.

    Quantization blocks become an array of bytes: a row of 256 elements in Q4_K, whose blocks have
    256 elements and 144 bytes, becomes a row of 144 bytes.
    """
    dtype_name = ELEMENT_TYPES.get(ggml_type)
    block_format = None
    if dtype_name is None:
        block_format = BLOCK_TYPES.get(QUANTIZED_TYPES.get(ggml_type, ""))
    dtype = DTYPES.name(dtype_name or "uint8")
    if dtype is None or (dtype_name is None and block_format is None):
        message = f"the tensor has the ggml type {ggml_type:,}, which is unknown or was withdrawn"
        raise Unsupported(message, file=key, tensor=name, found=ggml_type)

    if block_format is not None:
        row_length = shape[-1] if shape else 1
        if not shape or row_length % block_format.elements:
            message = (
                f"a row has {row_length:,} elements, which is not a multiple of the"
                f" {block_format.elements} elements in a {block_format.name} block"
            )
            raise MetadataError(message, file=key, tensor=name, found=shape)
        row_nbytes = row_length // block_format.elements * block_format.nbytes
        shape = (*shape[:-1], row_nbytes)

    if not is_addressable(shape, dtype.bits):
        message = f"the shape {list(shape)} of {dtype} is larger than any file"
        raise MetadataError(message, file=key, tensor=name, found=shape)
    nbytes = math.prod(shape) * dtype.bits // 8
    block_type = None if block_format is None else block_format.name
    return TensorLocation(dtype, shape, start, nbytes, block_type)


def _check_tensor_data(
    tensors: Mapping[str, TensorLocation],
    data_start: int,
    file_nbytes: int,
    *,
    alignment: int,
    key: str,
) -> None:
    """Check that the tensors fill the rest of the file, with no gap but the padding.

    Two readers could disagree about bytes that belong to two tensors or to none.
    """
    stop = data_start
    previous_name = ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        expected_start = _round_up(stop, alignment)
        if tensor.start != expected_start:
            if tensor.start < stop:
                problem = f"overlaps the tensor {previous_name[:80]!r}"
            else:
                unused_nbytes = tensor.start - expected_start
                problem = f"leaves {unused_nbytes:,} bytes before it that belong to no tensor"
            raise HeaderError(
                f"the tensor starts at byte {tensor.start:,} and {problem}",
                file=key,
                tensor=name,
                offset=tensor.start,
                expected=expected_start,
                found=tensor.start,
            )
        stop = tensor.start + tensor.nbytes
        previous_name = name

    if tensors and stop > file_nbytes:
        message = (
            f"the tensor data ends at byte {stop:,}, but the file has only {file_nbytes:,} bytes"
        )
        raise Truncated(message, file=key, expected=stop, found=file_nbytes)
    # Some writers pad after the last tensor, others do not.
    padded_stop = _round_up(stop, alignment)
    if file_nbytes > padded_stop:
        raise HeaderError(
            f"{file_nbytes - padded_stop:,} unexpected bytes follow the last tensor",
            file=key,
            offset=padded_stop,
            expected=padded_stop,
            found=file_nbytes,
        )


def _round_up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
