"""The index of a distributed checkpoint: read, put together, and checked, before anything uses it.

1. `.metadata` is used if it exists. Otherwise the chunks and items of every rank's `__<rank>.metadata` are merged
   (`use_collectives=False`). Of items that several ranks saved, the lowest rank's is read.
2. Each chunk of a tensor finds its item by name and offset: both are sorted, so that numbers of the file are never hashed.
3. Checks: sizes are possible, boxes cover their tensor exactly once, items are long enough and do not overlap, files exist under
   names inside of the directory. Of data files only lengths are read.

The checksum of `.metadata` is in a file beside it, since torch's pickle has no place for one:

    .holdfast.json     {"version":1,"nbytes":612,"crc32":"5bb0e7a9","self":"1c291ca3"}

torch's writer may save into a folder with a checkpoint of ours, and leave this file there. torch's metadata has a save id, and so
another length. So metadata of the recorded length with another checksum is damaged. Metadata of another length is another
program's, or damaged: it is used, and `verify` reports it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from operator import add, gt
from pathlib import PurePath

import msgspec
import numpy as np
from msgspec import Struct, field

from holdfast.core.crc import crc32
from holdfast.core.documents import SELF, DocumentType, parse_crc, read_document, write_document
from holdfast.core.dtype import DType
from holdfast.core.keys import is_plain_path
from holdfast.core.limits import Limits
from holdfast.core.opaque import Opaque
from holdfast.core.protocols import Foreign, Source
from holdfast.core.tiling import is_shape_tiled
from holdfast.core.value import Value
from holdfast.errors import (
    Corrupted,
    FormatError,
    HeaderError,
    HoldfastError,
    LimitExceeded,
    MetadataError,
    PickleError,
    StoreError,
    Truncated,
    UnsafePath,
    Unsupported,
    error_context,
)
from holdfast.formats.dcp.schema import (
    Item,
    ItemIndex,
    Metadata,
    MetadataTable,
    Properties,
    StoredBox,
    StoredBytes,
    StoredTensor,
)
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.torch.tensors import checked_shape

BESIDE = ".holdfast.json"
MOST_NBYTES = 4096
"""The longest `.holdfast.json`, which has four short fields."""


class SideFileFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    nbytes: int
    crc32: str
    sealed: str | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name=SELF)


DOCUMENT = DocumentType(
    name="file with the checksum of the index",
    file=BESIDE,
    decoder=msgspec.json.Decoder(SideFileFields),
    versions=(1,),
    field_versions={SELF: 1},
    max_nbytes=MOST_NBYTES,
    remedy="nothing else needs it, and it may be deleted",
)


def checksum_file(metadata: bytes) -> bytes:
    return write_document(DOCUMENT, SideFileFields(1, len(metadata), f"{crc32(metadata):08x}"))


def _compare_with_checksum(source: Source, metadata: bytes) -> Corrupted | None:
    """Compare the metadata with its checksum file.

    Returns an error if one of the two may be damaged. Raises `Corrupted` if the metadata certainly is.
    """
    try:
        raw = source.bytes(BESIDE, 0, min(source.store.size(BESIDE), MOST_NBYTES))
        recorded = read_document(DOCUMENT, raw)
    except Corrupted as error:
        return error
    except (FormatError, LimitExceeded, Unsupported):
        return None  # of a later version
    if len(metadata) != recorded.nbytes:
        message = (
            f"{METADATA} is not the one that Holdfast wrote: another program saved into this folder, or the file is damaged. If "
            f"the save was meant, delete {BESIDE}"
        )
        return Corrupted(message, file=METADATA, expected=recorded.nbytes)
    expected, actual = parse_crc(recorded.crc32), crc32(metadata)
    if actual != expected:
        message = (
            f"the index does not have the checksum that {BESIDE} records ({recorded.crc32}, not {actual:08x}): it changed after it "
            "was written; download or copy it again"
        )
        raise Corrupted(message, file=METADATA, expected=expected, found=actual)
    return None


METADATA = ".metadata"

RANK_FILE = re.compile(r"__([0-9]{1,9})\.metadata")

ADDRESSABLE = 1 << 61


class SavedChunk(Value, frozen=True):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


class SavedTensor(Value, frozen=True):
    """A tensor whose pieces, in the order of their offsets, cover it exactly once if `read_index` checked `whole`."""

    dtype: DType
    size: tuple[int, ...]
    properties: Properties
    pieces: tuple[SavedChunk, ...]


class Index(Struct):
    entries: dict[str, SavedTensor | Item | Opaque] = field(default_factory=dict)
    """By name, in the order of the file: a tensor, the item of another value, or an object that was not built."""
    planner: object = None
    """The paths of names, from the planner."""
    items: list[tuple[str, Item]] = field(default_factory=list)
    """Every item, with the name of its tensor or value."""
    texts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    foreign: tuple[Foreign, ...] = ()
    files: tuple[str, ...] = ()
    nbytes: int = 0
    """Bytes of the metadata."""
    damage: Corrupted | None = None
    """Set if the metadata or its checksum file may be damaged."""


def is_index(key: str) -> bool:
    return key == METADATA or RANK_FILE.fullmatch(key) is not None


def read_index(source: Source, *, rank: int | None = None, whole: bool = True) -> Index:
    """Read and check the index of a directory; with `rank`, only the part of this rank.

    Without `whole`, chunks of a tensor may overlap and leave holes. Raises `FormatError`, `LimitExceeded`, `UnsafePath`,
    `StoreError` for missing files, `Truncated` for short ones.
    """
    metadata, index = read_metadata(source, rank=rank)
    with error_context(file=METADATA if METADATA in source.store.list() else None):
        _fill(index, metadata, source.limits, whole=whole)
        _check_items(index, source)
    return index


def ranks_alone(source: Source) -> list[int]:
    """The ranks that saved without the others (`use_collectives=False`); none if there is one index for all."""
    keys = source.store.list()
    return (
        [] if METADATA in keys else sorted(_rank(key) for key in keys if RANK_FILE.fullmatch(key))
    )


def read_metadata(source: Source, *, rank: int | None = None) -> tuple[Metadata, Index]:
    """The metadata of a directory, that of several ranks merged; and its index, still empty."""
    keys = source.store.list()
    shares = sorted(
        (key for key in keys if RANK_FILE.fullmatch(key) and rank in (None, _rank(key))), key=_rank
    )
    names = [METADATA] if METADATA in keys and rank is None else shares
    if not names:
        raise HeaderError(
            "a distributed checkpoint without .metadata, which is written last: the save did not finish, or it was left behind",
            file=source.store.name,
        )
    index = Index()
    index.nbytes = sum(source.store.size(name) for name in names)
    if index.nbytes > source.limits.dcp_metadata_nbytes:
        raise LimitExceeded(
            f"metadata of {index.nbytes:,} bytes is more than Limits(dcp_metadata_nbytes={source.limits.dcp_metadata_nbytes:,})",
            file=names[0],
            expected=source.limits.dcp_metadata_nbytes,
            found=index.nbytes,
        )
    found = []
    for name in names:
        with error_context(file=name):
            raw = source.bytes(name, 0, source.store.size(name))
            if name == METADATA and BESIDE in keys:
                index.damage = _compare_with_checksum(source, raw)
            most = source.limits.dcp_metadata_nbytes
            done = interpret_whole(
                raw, MetadataTable(), limits=source.limits, stream=name, max_nbytes=most
            )
            if not isinstance(done.value, Metadata) or not done.value.filled:
                raise PickleError(
                    f"{name} holds no Metadata of a distributed checkpoint",
                    found=type(done.value).__name__,
                )
        found.append(done.value)
        index.foreign += done.foreign
    return (found[0] if len(found) == 1 else _together(found, index)), index


def _some(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    shown = ", ".join([repr(name[:80]) for name in names[:5]])
    return f"{shown} and {len(names) - 5:,} more" if len(names) > 5 else shown


def _rank(key: str) -> int:
    match = RANK_FILE.fullmatch(key)
    return int(match[1]) if match else 0


def _together(shares: Sequence[Metadata], index: Index) -> Metadata:
    """The shares of several ranks as one: all chunks of each tensor, and for each chunk the item of the lowest rank."""
    whole = Metadata(True, version=shares[0].version, note=shares[0].note)
    planner: dict[object, object] = {}
    places: dict[str, list[tuple[ItemIndex, object]]] = {}
    boxes: dict[object, list[object]] = {}
    chunks = sum(
        len(stored.boxes)
        for share in shares
        for stored in share.tensors.values()
        if isinstance(stored, StoredTensor)
    )
    items = sum(len(share.items) for share in shares)
    if chunks > items:
        raise MetadataError(
            f"{chunks:,} chunks and {items:,} items; one for each was expected",
            expected=chunks,
            found=items,
        )
    for share in shares:
        if isinstance(share.planner, dict):
            planner = {**share.planner, **planner}
        for name, stored in share.tensors.items():
            first = whole.tensors.setdefault(name, stored)
            if type(first) is not type(stored):
                raise MetadataError(
                    "a tensor on one rank, and none on another", tensor=str(name)[:256]
                )
            if isinstance(first, StoredTensor) and isinstance(stored, StoredTensor):
                if (first.size, first.properties.dtype) != (stored.size, stored.properties.dtype):
                    raise MetadataError(
                        "two ranks say different sizes or dtypes of one tensor",
                        tensor=str(name)[:256],
                    )
                boxes.setdefault(name, []).extend(stored.boxes)
        for place, item in share.items.items():
            if not isinstance(place, ItemIndex):
                raise PickleError(
                    "storage_data with a key that is no MetadataIndex", found=type(place).__name__
                )
            places.setdefault(place.name, []).append((place, item))
    doubles = 0
    for found in places.values():
        # Stable: of several with one offset the first is the lowest rank's.
        found.sort(key=lambda pair: (pair[0].offset is not None, pair[0].offset or ()))
        for number, (place, item) in enumerate(found):
            if number and place.offset == found[number - 1][0].offset:
                doubles += 1
            else:
                whole.items[place] = item
    for name, together in boxes.items():
        ordered = sorted(together, key=_extent)
        first = whole.tensors[name]
        if isinstance(first, StoredTensor):
            # A new one: one record may stand for many names.
            distinct = [
                box
                for i, box in enumerate(ordered)
                if not i or _extent(box) != _extent(ordered[i - 1])
            ]
            whole.tensors[name] = StoredTensor(first.filled, first.properties, first.size, distinct)
    whole.planner = planner or None
    index.notes.append(
        f"{len(shares):,} ranks wrote metadata of their own (use_collectives=False); put together here"
    )
    if doubles:
        index.notes.append(
            f"{doubles:,} items are there from several ranks; the lowest rank's are read"
        )
    return whole


def _extent(box: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not isinstance(box, StoredBox):
        raise PickleError("a chunk that is no ChunkStorageMetadata", found=type(box).__name__)
    return box.offsets, box.sizes


def _fill(index: Index, metadata: Metadata, limits: Limits, *, whole: bool) -> None:
    """Give every name its items, and check what the metadata claims about tensors."""
    items_of_name: dict[str, list[tuple[ItemIndex, Item]]] = {}
    for place, item in metadata.items.items():
        if (
            not isinstance(place, ItemIndex)
            or not isinstance(item, Item)
            or not place.filled
            or not item.filled
        ):
            raise PickleError(
                "storage_data is no dict of MetadataIndex and _StorageInfo",
                found=type(item).__name__,
            )
        items_of_name.setdefault(place.name, []).append((place, item))

    for name, stored in metadata.tensors.items():
        if type(name) is not str:
            raise PickleError(
                "state_dict_metadata with a name that is no text", found=type(name).__name__
            )
        items = items_of_name.pop(name, [])
        try:
            if isinstance(stored, StoredTensor):
                tensor = _read_tensor(stored, items, limits, whole=whole)
                index.entries[name] = tensor
                index.items += [(name, piece.item) for piece in tensor.pieces]
            elif isinstance(stored, StoredBytes):
                if len(items) != 1:
                    message = (
                        f"{len(items):,} items for a value that is no tensor; one was expected"
                    )
                    raise MetadataError(message, expected=1, found=len(items))
                index.entries[name] = items[0][1]
                index.items.append((name, items[0][1]))
            elif isinstance(stored, Opaque):
                index.entries[name] = stored
            else:
                raise PickleError(
                    "neither a tensor nor bytes in state_dict_metadata", found=type(stored).__name__
                )
        except HoldfastError as error:
            # As `error_context` does, which would take a tenth of the time for 100,000 names.
            error.tensor = error.tensor or name
            raise

    if items_of_name:
        index.notes.append(
            f"{len(items_of_name):,} names have items and no metadata, so they are not listed: {_some([*items_of_name])}"
        )
    index.planner = metadata.planner
    if isinstance(metadata.version, str):
        index.texts["version"] = metadata.version
    if metadata.note is not None:
        for key in ("save_id", "checkpoint_id"):
            value = getattr(metadata.note, key)
            if isinstance(value, str | PurePath):
                index.texts[key] = str(value)[:4096]
    fields = metadata.state if isinstance(metadata.state, dict) else {}
    foreign_keys = [key for key in fields if isinstance(key, str) and key not in Metadata.fields]
    if foreign_keys:
        index.notes.append(
            f"the metadata has further fields, which torch does not know: {', '.join(foreign_keys[:5])}"
        )


class Geometry(Value, frozen=True):
    """The claims of a `StoredTensor` that do not depend on its items, checked."""

    dtype: DType
    size: tuple[int, ...]
    extents: list[tuple[tuple[int, ...], tuple[int, ...]]]
    """The offsets and the sizes of each chunk, in the order of the offsets."""
    nbytes: list[int]
    """The size of the elements of each chunk."""


def _read_tensor(
    stored: StoredTensor, items: list[tuple[ItemIndex, Item]], limits: Limits, *, whole: bool
) -> SavedTensor:
    """Return a tensor with an item for each chunk. Without `whole`, several ranks may list one chunk."""
    geometry = stored.checked
    if not isinstance(geometry, Geometry):
        geometry = stored.checked = _check_geometry(stored, len(items), limits, whole=whole)
    if len(geometry.extents) != len(items):
        raise _count_error(len(geometry.extents), len(items))
    is_alone = len(items) == 1
    if not is_alone:
        if any(place.offset is None for place, _ in items):
            raise MetadataError("an item that does not say which of several chunks it holds")
        items.sort(key=lambda pair: pair[0].offset or ())

    pieces = []
    for extent, nbytes, (place, item) in zip(geometry.extents, geometry.nbytes, items, strict=True):
        offsets, sizes = extent
        if place.offset != offsets and not (is_alone and place.offset is None):
            message = f"no item for the chunk at {list(offsets)}, or two for one"
            raise MetadataError(message, expected=offsets, found=place.offset and place.offset[:64])
        if nbytes > item.length and not item.transforms:
            message = f"an item of {item.length:,} bytes for elements that take {nbytes:,}"
            raise MetadataError(
                message, file=item.file, offset=item.offset, expected=nbytes, found=item.length
            )
        pieces.append(SavedChunk(offsets, sizes, item))
    return SavedTensor(geometry.dtype, geometry.size, stored.properties, tuple(pieces))


def _check_geometry(
    stored: StoredTensor, item_count: int, limits: Limits, *, whole: bool
) -> Geometry:
    """Check that the chunks of a tensor cover it exactly once."""
    properties = stored.properties
    dtype = properties.dtype
    if not stored.filled or dtype is None:
        raise PickleError("a TensorStorageMetadata without its state")
    if properties.layout.name != "strided":
        raise MetadataError(
            f"a tensor of layout {properties.layout.name}, which torch does not save in this format"
        )
    size = checked_shape(stored.size, limits)
    extents: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for box in stored.boxes:
        if not isinstance(box, StoredBox):
            raise PickleError("a chunk that is no ChunkStorageMetadata", found=type(box).__name__)
        extents.append((box.offsets, box.sizes))
    extents.sort()
    if not whole:
        extents = [extent for extent, _ in itertools.groupby(extents)]
    if len(extents) != item_count:
        raise _count_error(len(extents), item_count)
    for offsets, sizes in extents:
        if len(offsets) != len(size) or len(sizes) != len(size):
            message = f"a chunk of another rank than the tensor's {len(size)}"
            raise MetadataError(message, expected=size, found=sizes[:64])
        if 0 not in sizes and any(map(gt, map(add, offsets, sizes), size)):
            message = f"a chunk {list(sizes)} at {list(offsets)} is not inside of {list(size)}"
            raise MetadataError(message, expected=size, found=sizes)
    filled_extents = [extent for extent in extents if 0 not in extent[1]]
    # Most tensors are one chunk.
    is_one_chunk = extents == [((0,) * len(size), size)]
    if whole and not is_one_chunk and not is_shape_tiled(size, filled_extents):
        count = sum(math.prod(sizes) for _, sizes in filled_extents)
        raise MetadataError(
            f"{len(extents):,} chunks with {count:,} elements do not cover {list(size)} exactly once: they overlap or leave holes",
            expected=size,
            found=count,
        )
    nbytes = [dtype.nbytes(math.prod(sizes)) for _, sizes in extents]
    return Geometry(dtype, size, extents, nbytes)


def _count_error(chunk_count: int, item_count: int) -> MetadataError:
    message = f"{chunk_count:,} chunks and {item_count:,} items; one for each was expected"
    return MetadataError(message, expected=chunk_count, found=item_count)


def _check_items(index: Index, source: Source) -> None:
    """Check the places of all items.

    Refuses names outside of the directory, missing files, items beyond the ends of files, and items
    that overlap. Tied tensors may have the same item.
    """
    items = index.items
    for name, item in items:
        if not 0 <= item.offset <= ADDRESSABLE or not 0 <= item.length <= ADDRESSABLE:
            raise MetadataError(
                "an item with an offset or a length that cannot be",
                tensor=name,
                found=(item.offset, item.length),
            )
    numbers: dict[str, int] = {}
    file = np.array([numbers.setdefault(item.file, len(numbers)) for _, item in items], np.int64)
    start = np.array([item.offset for _, item in items], np.int64)
    stop = start + np.array([item.length for _, item in items], np.int64)
    index.files = tuple(numbers)

    present_files = set(source.store.list())
    for number, key in enumerate(index.files):
        if not is_plain_path(key):
            name, _ = items[int(np.flatnonzero(file == number)[0])]
            raise UnsafePath(
                f"{key[:256]!r} is not the plain name of a file inside the directory",
                tensor=name,
                found=key[:256],
            )
    missing_files = [key for key in index.files if key not in present_files]
    if missing_files:
        raise StoreError(
            f"the metadata names data files that are not there: {_some(missing_files)}; "
            "a distributed checkpoint is opened by its folder",
            found=tuple(missing_files[:64]),
        )
    sizes = np.array([source.store.size(key) for key in index.files], np.int64)
    for row in np.flatnonzero(stop > sizes[file]).tolist():
        name, item = items[row]
        raise cut_short(item, int(sizes[file[row]]), name)

    order = np.lexsort((stop, start, file))
    file, start, stop = file[order], start[order], stop[order]
    # Sorted by start, then by stop: the first pair that is not the same item twice is found beside each other.
    for row in np.flatnonzero((file[1:] == file[:-1]) & (start[1:] < stop[:-1])).tolist():
        (other, first), (name, item) = items[int(order[row])], items[int(order[row + 1])]
        is_same = (first.offset, first.length, first.transforms) == (
            item.offset,
            item.length,
            item.transforms,
        )
        entries = index.entries[name], index.entries[other]
        if not is_same or not all(isinstance(entry, SavedTensor) for entry in entries):
            message = f"these bytes belong to {other[:80]!r} as well"
            raise MetadataError(
                message, file=item.file, tensor=name, offset=item.offset, found=item.length
            )


def cut_short(item: Item, size: int, name: str) -> Truncated:
    """Return the error for an item beyond the end of its file."""
    return Truncated(
        f"an item should end at byte {item.stop:,}, and the file has {size:,}: it was cut short or belongs to another save",
        file=item.file, tensor=name, offset=size, expected=item.stop, found=size,
    )  # fmt: skip
