"""`RowTensor`: one of many tensors of a kind in one file, whose chunk is made when somebody asks where its elements lie.

A file of a hundred thousand tensors has a dozen kinds of them: the same dtype, shape and strides over storages of one length. What
they have in common is said once (`RowKind`); of each by itself there are the first byte, the checksum and the name of its storage.
To list them takes no more, and neither does reading all of them (core/columns.py). Otherwise it is a `LazyTensor` like any other.
"""

from __future__ import annotations

import math

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.dtype import DType
from holdfast.core.protocols import Source
from holdfast.core.tensor import PLAIN, Deferred, LazyTensor, Traits
from holdfast.core.value import Value


class RowKind(Value, frozen=True, eq=False):
    """What tensors of one kind have in common."""

    dtype: DType
    shape: tuple[int, ...]
    source: Source
    traits: Traits
    key: str
    """The file."""
    nbytes: int
    """Bytes of the storage of each."""
    offset: int
    """Bit of the storage where the first element lies."""
    strides: tuple[int, ...]
    """In bits."""
    dense: int
    """Bytes of the elements where they are ordinary (core/columns.py says what that is); -1 where they are not."""
    byteorder: str
    location: str
    folder: str
    """What stands before the name of a storage, for messages."""
    box: Box

    def tensor(self, start: int, crc32: int | None, record: str, name: str = "") -> RowTensor:
        """One of them, over the storage that begins at byte `start`."""
        return RowTensor(
            name, self.dtype, self.shape, (), self.source, self.traits, kind=self, start=start, crc32=crc32, record=record
        )

    @classmethod
    def plain(cls, dtype: DType, shape: tuple[int, ...], source: Source, *, key: str) -> RowKind:
        """Tensors of whole bytes in C order that are all of their storages, which the file calls by their names."""
        nbytes = dtype.nbytes(math.prod(shape))
        box, strides = Box.whole(shape), c_strides(shape, dtype.bits)
        return cls(dtype, shape, source, PLAIN, key, nbytes, 0, strides, nbytes, "little", "", "", box)

    def storage(self, start: int, crc32: int | None, record: str) -> Storage:
        """The storage of one of them."""
        label, home = self.folder + record, self.source.store
        return Storage(self.key, start, self.nbytes, self.byteorder, crc32, self.location, label, home=home)


class RowTensor(Deferred, frozen=True, eq=False, kw_only=True):
    """One tensor of a kind."""

    kind: RowKind
    start: int
    """First byte of its storage."""
    crc32: int | None
    record: str
    """What the file calls its storage."""

    def placed(self) -> tuple[Chunk, ...]:
        kind = self.kind
        return (Chunk(kind.box, kind.storage(self.start, self.crc32, self.record), kind.offset, kind.strides),)


# What messages about a file call it, in which a tensor is of one class whether its chunks were made or not.
RowTensor.__name__ = LazyTensor.__name__
