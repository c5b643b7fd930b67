"""`Storage` and `Chunk`: where the elements of a tensor are stored.

A storage is a range of bytes in one file that its writer treated as a unit: a record of a zip
archive, a block of a legacy stream, or the bytes of one safetensors tensor. Two storages are equal
if they are the same bytes of the same store. This is how tied tensors are recognized
(`core/sharing.py`).

A chunk contains the elements of one box of one tensor. Most tensors have one chunk. A tensor that
several ranks saved has one for each shard. Offsets and strides of a chunk are counted in bits, so
that types of 4 and 6 bits need no special treatment. The element p of the box is stored at

    bit   offset + Σ (p[d] − box.start[d]) · strides[d]   of the storage

Strides may be 0 (an expanded tensor), negative (a reversed slice), or smaller than the elements
that they skip (windows that overlap). This does no harm, because nothing is written to a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.box import Box
from holdfast.core.dtype import DType
from holdfast.core.value import Value, replace


class StorageRange(Value, frozen=True):
    """A range of bytes in one file, written as a unit: a `Storage` without its store."""

    key: str
    """The name of the file in its store."""
    start: int
    """The offset of the first byte in the file."""
    nbytes: int
    byteorder: str = "little"
    """The byte order of the elements, `little` or `big`."""
    crc32: int | None = None
    """The CRC-32 of the bytes as they are in the file, or None if the file does not record it."""
    location: str = ""
    """The device of the tensor when it was saved (`cpu`, `cuda:3`). Empty if it is not recorded."""
    label: str = ""
    """The name of the storage in the file (`data/17`), for messages."""


class Storage(StorageRange, frozen=True, kw_only=True, eq=False):
    """A range of bytes of a file in a store. Tensors share memory if their storages are equal.

    Storages are equal if key, start, size, byte order and checksum are equal and the store is the
    same object. The location and the label are not compared.
    """

    home: object
    """The store that has the file. It is only compared, because two stores may use the same key."""

    def with_home(self, home: object) -> Storage:
        """Return the same range of the same file in another store.

        Args:
            home: The store of the result.
        """
        return replace(self, home=home)

    @property
    def ranges(self) -> tuple[tuple[str, int, int], ...]:
        """The bytes of files that contain the storage, as `(key, start, stop)`. Reads no file.

        A subclass may return several ranges, or one that includes the frame around its bytes.
        """
        return ((self.key, self.start, self.start + self.nbytes),)

    @property
    def copies(self) -> int:
        """The number of files that contain the bytes. Readers compare them if there are several."""
        return 1

    def __repr__(self) -> str:
        field_names = [name for name in self.__struct_fields__ if name != "home"]
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in field_names)
        return f"{type(self).__name__}({fields})"

    def __eq__(self, other: object) -> bool:
        """Compare everything but location and label, which do not change the bytes.

        Checksums are compared, so that both are checked if two references to the same bytes have
        different ones.
        """
        if not isinstance(other, Storage):
            return NotImplemented
        return (
            self.home is other.home
            and self.start == other.start
            and self.key == other.key
            and self.nbytes == other.nbytes
            and self.crc32 == other.crc32
            and self.byteorder == other.byteorder
        )

    # msgspec defines `__ne__` for structs, which would not call the `__eq__` above.
    __ne__ = object.__ne__

    def __hash__(self) -> int:
        return hash((id(self.home), self.key, self.start, self.nbytes))


class Chunk(Value, frozen=True):
    """The elements of one box of a tensor, and where they are in a storage.

    The element p of the box is stored at bit `offset + Σ (p[d] − box.start[d]) · strides[d]`.

    Raises:
        ValueError: There are not as many strides as the box has dimensions.
    """

    box: Box
    """The indices of the elements in the tensor."""
    storage: Storage
    offset: int
    """The bit of the storage where the first element of the box starts."""
    strides: tuple[int, ...]
    """The bits from one element to the next, in each dimension."""

    def __post_init__(self) -> None:
        if len(self.strides) != len(self.box.start):
            raise ValueError(
                f"a chunk of rank {self.box.rank} cannot have {len(self.strides)} strides"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return self.box.shape

    def with_storage(self, storage: Storage) -> Chunk:
        """Return a chunk with the same box, offset and strides in another storage.

        Args:
            storage: The storage of the result.
        """
        return Chunk(self.box, storage, self.offset, self.strides)

    def narrow(self, box: Box) -> Chunk:
        """Return the elements of a smaller box as a chunk.

        Args:
            box: A box inside of the chunk's box, in the coordinates of the tensor.

        Raises:
            ValueError: The box is not inside of the chunk's box.
        """
        if not self.box.contains(box):
            raise ValueError(f"{box} is not inside {self.box}")
        offset = self.offset
        for start, old_start, stride in zip(box.start, self.box.start, self.strides, strict=True):
            offset += (start - old_start) * stride
        return Chunk(box, self.storage, offset, self.strides)

    def byte_range(self, dtype: DType) -> tuple[int, int]:
        """Return which bytes of its storage the chunk spans.

        Args:
            dtype: The dtype of the tensor.

        Returns:
            The offset of the first byte, and the offset after the last byte. Both are 0 for a
            chunk without elements.
        """
        if self.box.count == 0:
            return 0, 0
        first_bit = self.offset
        last_bit = self.offset
        for length, stride in zip(self.shape, self.strides, strict=True):
            # With a negative stride, the last element of an axis has the lowest offset.
            if stride < 0:
                first_bit += (length - 1) * stride
            else:
                last_bit += (length - 1) * stride
        return first_bit // 8, (last_bit + dtype.bits + 7) // 8


def c_strides(shape: Sequence[int], bits: int) -> tuple[int, ...]:
    """Return the strides of a C-ordered array without gaps.

    Args:
        shape: The shape of the array.
        bits: The size of an element. The strides are in the same unit.

    >>> c_strides((2, 3, 4), 32)
    (384, 128, 32)
    """
    strides = []
    stride = bits
    for length in reversed(shape):
        strides.append(stride)
        # Like numpy and torch, treat an axis without elements as if it had one.
        stride *= length or 1
    return tuple(reversed(strides))


def has_overlapping_elements(
    shape: Sequence[int], strides: Sequence[int], itemsize: int = 1
) -> bool:
    """Return whether two elements of an array may share bytes.

    They do in an expanded tensor, where a stride is 0, and in windows that overlap. The result may
    also be true for unusual strides that interleave axes without a collision.

    Args:
        shape: The shape of the array.
        strides: The distance from one element to the next in each dimension. None is negative.
        itemsize: The size of an element, in the unit of the strides.

    >>> has_overlapping_elements((2, 3), (3, 1)), has_overlapping_elements((2, 3), (0, 1))
    (False, True)
    """
    # From the smallest stride to the largest: each must step over all that the smaller ones span.
    span = itemsize
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1:
            if stride < span:
                return True
            span += stride * (length - 1)
    return False


def is_c_ordered(shape: Sequence[int], strides: Sequence[int], bits: int) -> bool:
    """Return whether elements follow each other in C order without gaps.

    The stride of an axis of length 1 does not matter.

    Args:
        shape: The shape of an array.
        strides: Its strides, in bits.
        bits: The size of an element.

    >>> is_c_ordered((2, 1, 3), (96, 7, 32), 32), is_c_ordered((2, 3), (32, 64), 32)
    (True, False)
    """
    expected_stride = bits
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1:
            if stride != expected_stride:
                return False
            expected_stride *= length
    return True
