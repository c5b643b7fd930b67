"""`Storage` and `Chunk`: where the elements of a tensor lie.

A storage is a range of bytes in one file that its writer treated as a unit: a zip record, a block of a legacy stream, the
bytes of one safetensors tensor. It knows its home, the store that has the file, so that two storages are equal when they are the
same bytes: `core/sharing.py` builds on that. A chunk places the elements of one box of one tensor inside a storage:

    element p of the box is at bit   offset + Σ (p[d] − box.start[d]) · strides[d]    of the storage

Offsets and strides are counted in bits, so that packed 4- and 6-bit types need no second mechanism; for every other type they
are multiples of 8. Strides may be 0 (an expanded view), negative (a reversed slice) or smaller than an element's row (windows
that overlap): a chunk is read-only, so none of that matters.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.box import Box
from holdfast.core.dtype import DType
from holdfast.core.value import Value, replace


class StorageRange(Value, frozen=True):
    """A range of bytes in one file, and what is known of it: all of a storage but its home."""

    key: str
    """The file, as its store names it."""
    start: int
    nbytes: int
    byteorder: str = "little"
    """`little` or `big`."""
    crc32: int | None = None
    """CRC-32 of the bytes as they lie in the file, where the file records it."""
    location: str = ""
    """The device that the writer had it on (`cpu`, `cuda:3`), where the file says so."""
    label: str = ""
    """What the file calls it (`data/17`), for messages."""


class Storage(StorageRange, frozen=True, kw_only=True, eq=False):
    """A range of bytes in one file, written as a unit. Two tensors share memory when their storages are equal."""

    home: object
    """The store that has the file. Nothing is asked of it but whether it is the same object: two stores may use one key."""

    def with_home(self, home: object) -> Storage:
        """This range in another home, which has the same file."""
        return replace(self, home=home)

    @property
    def ranges(self) -> tuple[tuple[str, int, int], ...]:
        """The files and bytes that hold it, `(key, start, stop)` each, without asking them: what frames it may be among those."""
        return ((self.key, self.start, self.start + self.nbytes),)

    @property
    def copies(self) -> int:
        """How many places hold it, where a reader compares several that must be equal."""
        return 1

    def __repr__(self) -> str:
        fields = (
            f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "home"
        )
        return f"{type(self).__name__}({', '.join(fields)})"

    # A device or a name is no part of it: the memory is the same. A checksum is: where two differ, both are checked.

    def __eq__(self, other: object) -> bool:
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

    __ne__ = object.__ne__  # a struct's own would compare otherwise

    def __hash__(self) -> int:
        return hash((id(self.home), self.key, self.start, self.nbytes))


class Chunk(Value, frozen=True):
    """One stored piece of one tensor. See the module's docstring for the formula."""

    box: Box
    storage: Storage
    offset: int
    """Bit of the storage where the lowest corner of the box lies."""
    strides: tuple[int, ...]
    """Bits from one element to the next, a dimension each."""

    def __post_init__(self) -> None:
        if len(self.strides) != len(self.box.start):
            raise ValueError(
                f"a chunk of rank {self.box.rank} cannot have {len(self.strides)} strides"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.shape

    def with_storage(self, storage: Storage) -> Chunk:
        """A chunk at the same place of another storage."""
        return Chunk(self.box, storage, self.offset, self.strides)

    def narrow(self, box: Box) -> Chunk:
        """The part of this chunk that covers `box`, which must lie inside."""
        if not self.box.contains(box):
            raise ValueError(f"{box} is not inside {self.box}")
        moved = sum(
            (a - b) * s for a, b, s in zip(box.start, self.box.start, self.strides, strict=True)
        )
        return Chunk(box, self.storage, self.offset + moved, self.strides)

    def byte_range(self, dtype: DType) -> tuple[int, int]:
        """First byte and the byte after the last one that this chunk touches, relative to its storage; (0, 0) if empty."""
        if self.box.count == 0:
            return (0, 0)
        low = high = self.offset
        for n, s in zip(self.shape, self.strides, strict=True):
            if s < 0:
                low += (n - 1) * s
            else:
                high += (n - 1) * s
        return low // 8, (high + dtype.bits + 7) // 8


def c_strides(shape: Sequence[int], bits: int) -> tuple[int, ...]:
    """Strides, in bits, of a C-ordered array without gaps.

    >>> c_strides((2, 3, 4), 32)
    (384, 128, 32)
    """
    strides = []
    for n in reversed(shape):
        strides.append(bits)
        bits *= n or 1
    return tuple(reversed(strides))


def has_overlapping_elements(shape: Sequence[int], strides: Sequence[int], width: int = 1) -> bool:
    """Whether two elements of a width may lie in one place: an expanded tensor, or windows that overlap.

    >>> has_overlapping_elements((2, 3), (3, 1)), has_overlapping_elements((2, 3), (0, 1)), has_overlapping_elements((3, 2), (1, 1))
    (False, True, True)
    """
    for n, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: pair[1]):
        if n > 1:
            if stride < width:
                return True
            width += stride * (n - 1)
    return False


def is_c_ordered(shape: Sequence[int], strides: Sequence[int], bits: int) -> bool:
    """Whether elements of this many bits follow each other in C order without gaps. The stride of a single row does not matter.

    >>> is_c_ordered((2, 3), (96, 32), 32), is_c_ordered((2, 1, 3), (96, 7, 32), 32), is_c_ordered((2, 3), (32, 64), 32)
    (True, True, False)
    """
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1:
            if stride != bits:
                return False
            bits *= n
    return True
