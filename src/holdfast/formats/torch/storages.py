"""Persistent ids, by which torch's pickles point at storages, and the storages behind them.

A storage is a 1-D `LazyTensor` over its record, so that a bare storage in a checkpoint is readable like anything else. Where a
tensor is ordinary and alone over its storage, no more is noted than a row (plan/files.py); the storage is made if somebody asks
for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.opaque import Global
from holdfast.core.protocols import Source
from holdfast.core.table import FilePlace, Kind
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value, replace
from holdfast.errors import HoldfastError, MetadataError, PickleError
from holdfast.formats.pickle.tensor_templates import TensorArguments
from holdfast.formats.torch.tensors import MAX_ELEMENTS, brief, reach, view_traits
from holdfast.formats.zip.layout import STORED, RecordColumns
from holdfast.plan.files import FileRow, FileStorages


def storage_dtype(what: object) -> DType | None:
    """The dtype of a storage class; uint8 for an untyped one; None when it is no storage class."""
    if isinstance(what, DType):
        # Files between torch 1.13 and 2.0 may tag a storage with the dtype itself.
        return what
    if not isinstance(what, Global):
        return None
    if what.module in ("torch", "torch.cuda", "torch.storage") and what.name in ("UntypedStorage", "_UntypedStorage"):
        return DTYPES.name("uint8")
    if what.module in ("torch", "torch.cuda"):
        return DTYPES.storage(what.name)
    return None


class StorageId(Value, frozen=True):
    """One parsed persistent id."""

    dtype: DType
    key: str
    location: str
    count: int
    view: tuple[str, int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole storage. Packed quantised types count bytes already."""
        return self.count * max(self.dtype.bits // 8, 1)


def parse_storage_id(pid: object, lengths: tuple[int, ...]) -> StorageId:
    """Check the shape and types of a persistent id.

        ('storage', storage class, key, location, element count)              zip, since 1.6
        ('storage', storage class, key, location, element count, view)        stream; view = None or (key, offset, count)

    Every reference to one key must agree in dtype and length, and the length must be that of the record, to the byte.
    """
    if not isinstance(pid, tuple) or len(pid) not in lengths or type(pid[0]) is not str or pid[0] != "storage":
        raise PickleError("a persistent id that is no storage", found=type(pid).__name__)
    _, kind, key, location, count, *rest = pid
    dtype = storage_dtype(kind)
    if dtype is None:
        raise PickleError("a storage of an unknown class", found=brief(kind))
    if not isinstance(key, str) or not isinstance(location, str):
        raise PickleError("a storage's key and location must be text", found=type(key).__name__)
    if type(count) is not int or not 0 <= count < MAX_ELEMENTS:
        raise MetadataError("a storage's element count must be a non-negative integer", found=brief(count))
    view = rest[0] if rest else None
    if view is not None:
        if not isinstance(view, tuple) or len(view) != 3 or not isinstance(view[0], str):
            raise PickleError("a storage view must be a key, an offset and a count", found=type(view).__name__)
        if any(type(v) is not int or not 0 <= v < MAX_ELEMENTS for v in view[1:]) or view[1] + view[2] > count:
            raise MetadataError("a storage view that reaches past its storage", found=brief(view))
    return StorageId(dtype, key, location, count, view)


class RecordStorages(FileStorages):
    """The storages of ordinary tensors: each a record of its own in one folder of one archive. They come in runs."""

    def __init__(self, source: Source, key: str, folder: str) -> None:
        self._folder, self._keys = folder, list[str]()
        self._starts, self._lengths, self._sums, self._files = array("q"), array("q"), array("q"), array("q")
        super().__init__(
            [FilePlace(source, key, source.store)], self._files, self._starts, self._lengths, self._sums, names=self._keys
        )

    def extend(self, keys: Sequence[str], starts: Sequence[int], lengths: Sequence[int], sums: Sequence[int]) -> None:
        """More of them."""
        self._keys += keys
        self._files.frombytes(bytes(8 * len(starts)))
        self._starts.extend(starts)
        self._lengths.extend(lengths)
        self._sums.extend(sums)

    def label_of(self, number: int) -> str:
        return self._folder + self._keys[number]


class Rows(Value, frozen=True):
    """How ordinary tensors of a pickle are found."""

    byteorder: str
    folder: str
    """What the names of their records begin with."""
    records: RecordColumns
    storages: RecordStorages


class RecordKind(Value, frozen=True, eq=False):
    """A kind of ordinary tensors, and what all of them say of their storages."""

    storage: StorageId
    kind: Kind


class Storages:
    """The storages of one pickle, each made once: `persistent` is what the interpreter calls."""

    def __init__(
        self,
        source: Source,
        find: Callable[[StorageId], Storage],
        lengths: tuple[int, ...] = (5,),
        *,
        rows: Rows | None = None,
    ) -> None:
        self._source = source
        self._find = find
        self._lengths = lengths
        self._known: dict[str, tuple[StorageId, LazyTensor]] = {}
        self.rows = rows
        self._numbers: dict[str, int] = {}
        """Storages that an ordinary tensor has, and nobody has asked for by themselves: their numbers in `rows`."""
        self._kinds: list[RecordKind] = []
        """Of each number."""

    def kind(self, claim: TensorArguments) -> RecordKind | None:
        """A kind of ordinary tensors; None where they are left to `persistent`."""
        if self.rows is None:
            return None
        try:
            asked = parse_storage_id(("storage", claim.storage, "", claim.location, claim.elements), self._lengths)
            shape, steps, begin, last = reach(claim.offset, claim.size, claim.stride, self._source.limits)
        except HoldfastError:
            return None
        dtype, bits = asked.dtype, asked.dtype.bits
        if last < 0 or dtype.packed or last >= asked.count:
            return None
        strides = tuple(step * bits for step in steps)
        traits = view_traits(claim.grad, False, False)
        kind = Kind.strided(
            dtype, shape, strides, offset=begin * bits, storage_nbytes=asked.nbytes, traits=traits, byteorder=self.rows.byteorder,
            location=claim.location,
        )  # fmt: skip
        return RecordKind(asked, kind)

    def tensors(self, kinds: Sequence[RecordKind], keys: Sequence[str]) -> list[LazyTensor]:
        """Ordinary tensors of these kinds, each over a whole storage.

        They end before the first whose storage is not what its kind says, or was asked for before.
        """
        if self.rows is None:
            return []
        numbers, known, source = self._numbers, self._known, self._source
        folder, records, storages = self.rows.folder, self.rows.records, self.rows.storages
        rows, begins, packed, crcs, methods, sizes = records
        made: list[LazyTensor] = []
        starts: list[int] = []
        lengths: list[int] = []
        sums: list[int] = []
        number = len(self._kinds)
        # No function is called for a tensor: this is done for each of a million, and for runs of two.
        for record, key in zip(kinds, keys, strict=False):
            name = folder + key
            if key in numbers or key in known or name not in rows:
                break
            row, kind = rows[name], record.kind
            if packed[row] != kind.storage_nbytes or methods[row] != STORED:
                break
            crc = crcs[row]
            numbers[key] = number
            starts += (begins[row],)
            lengths += (kind.storage_nbytes,)
            sums += (crc if crc or not sizes[row] else NO_CRC,)
            made += (LazyTensor("", kind.dtype, kind.shape, (), source, kind.traits, FileRow(storages, number, kind)),)
            number += 1
        storages.extend(keys[: len(made)], starts, lengths, sums)
        self._kinds += kinds[: len(made)]
        return made

    def persistent(self, pid: object) -> LazyTensor:
        """The storage behind a persistent id, as a 1-D tensor."""
        asked = parse_storage_id(pid, self._lengths)
        known = self._known.get(asked.key)
        number = self._numbers.pop(asked.key, None)
        if known is None and number is not None and self.rows is not None:
            row = self._kinds[number]
            first, storage = row.storage, self.rows.storages.storage(number, row.kind)
            whole = LazyTensor.contiguous("", first.dtype, (first.count,), storage, self._source)
            known = self._known[asked.key] = first, whole
        if known is None:
            storage = self._find(asked)
            if storage.nbytes != asked.nbytes:
                raise MetadataError(
                    f"storage {asked.key!r} claims {asked.nbytes:,} bytes and its record has {storage.nbytes:,}",
                    expected=storage.nbytes,
                    found=asked.nbytes,
                )
            whole = LazyTensor.contiguous("", asked.dtype, (asked.count,), storage, self._source)
            self._known[asked.key] = (asked, whole)
        else:
            first, whole = known
            if not first.count and not asked.count:
                # torch saves an empty storage under as many dtypes as it was used with.
                return replace(whole, dtype=asked.dtype)
            if first.dtype is not asked.dtype or first.count != asked.count:
                raise MetadataError(
                    f"storage {asked.key!r} is {first.count:,} × {first.dtype} in one place and "
                    f"{asked.count:,} × {asked.dtype} in another",
                    expected=(first.dtype.name, first.count),
                    found=(asked.dtype.name, asked.count),
                )
        if asked.view is None:
            return whole
        _, start, count = asked.view
        return whole[start : start + count]
