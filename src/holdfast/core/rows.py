"""`RowTensor`: one of many tensors of a kind in one file, whose chunk is made when somebody asks where its elements lie.

A file of a hundred thousand tensors has a dozen kinds of them: the same dtype, shape and strides over storages of one length. What
they have in common is said once (`RowKind`); of each by itself there are the first byte, the checksum and the name of its storage.
To list them takes no more, and neither does reading all of them (core/columns.py). Otherwise it is a `LazyTensor` like any other:
what is made of it (a slice, another name, a copy in another process) is a plain one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DType
from holdfast.core.protocols import Source
from holdfast.core.tensor import LazyTensor, Traits

__all__ = ["RowKind", "RowTensor"]


@dataclass(frozen=True, slots=True, eq=False)
class RowKind:
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

    def tensor(self, start: int, crc32: int | None, record: str) -> RowTensor:
        """One of them, over the storage that begins at byte `start`."""
        made = _new(RowTensor)
        _set_name(made, "")
        _set_dtype(made, self.dtype)
        _set_shape(made, self.shape)
        _set_source(made, self.source)
        _set_traits(made, self.traits)
        _set_kind(made, self)
        _set_start(made, start)
        _set_crc32(made, crc32)
        _set_record(made, record)
        return made

    def storage(self, start: int, crc32: int | None, record: str) -> Storage:
        """The storage of one of them."""
        label, home = self.folder + record, self.source.store
        return Storage(self.key, start, self.nbytes, self.byteorder, crc32, self.location, label, home=home)


class RowTensor(LazyTensor):
    """A tensor that has its chunk once it was asked for it."""

    __slots__ = ("crc32", "kind", "record", "start")

    kind: RowKind
    start: int
    """First byte of its storage."""
    crc32: int | None
    record: str
    """What the file calls its storage."""

    def __new__(cls, *args: Any, **fields: Any) -> Any:  # noqa: ANN401  # those of a tensor
        # Only a kind makes these. Whoever makes another tensor of one says where that lies.
        return LazyTensor(*args, **fields)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # asked for what is not there: the chunks, at first
        if name != "chunks":
            return super().__getattr__(name)
        kind = self.kind
        made = (Chunk(kind.box, kind.storage(self.start, self.crc32, self.record), kind.offset, kind.strides),)
        _set_chunks(self, made)
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return LazyTensor, (self.name, self.dtype, self.shape, self.chunks, self.source, self.traits)


# A frozen value is filled from below.
_new = object.__new__
_set_name, _set_dtype, _set_shape, _set_chunks, _set_source, _set_traits = (
    vars(LazyTensor)[field].__set__ for field in ("name", "dtype", "shape", "chunks", "source", "traits")
)
_set_kind, _set_start, _set_crc32, _set_record = (vars(RowTensor)[field].__set__ for field in ("kind", "start", "crc32", "record"))
