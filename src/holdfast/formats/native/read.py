"""Read a native directory. Opening reads the manifest and asks for the lengths of the files.

The manifest is checked before anything uses it: files are present and have the right lengths, byte ranges lie inside of them and do
not overlap, boxes tile each tensor, byte counts fit dtype and shape.

A verification (`check_files`) compares the headers of the data files with the manifest. That reads every file, one after the other,
so that one header is in memory at a time.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count
from operator import attrgetter, itemgetter
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.crc import crc32
from holdfast.core.documents import check_length, parse_crc
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.keys import parse_sibling_key
from holdfast.core.limits import Limits
from holdfast.core.protocols import Description, Source
from holdfast.core.runtime import copy_compactly
from holdfast.core.strict_json import format_pointer, quote
from holdfast.core.table import IRREGULAR, RowKind, StoredFile, Table
from holdfast.core.tensor import PLAIN_TRAITS, LazyTensor
from holdfast.core.tiling import is_shape_tiled_by_columns, is_tiled_by
from holdfast.core.value import Value, replace
from holdfast.engine.files import FileStorages
from holdfast.errors import (
    Corrupted,
    HeaderError,
    LimitExceeded,
    MetadataError,
    StoreError,
    Truncated,
    UnsafePath,
    Unsupported,
    error_context,
)
from holdfast.formats.native.boxes import carried
from holdfast.formats.native.chunks import (
    CutChunks,
    CutColumns,
)
from holdfast.formats.native.schema import (
    BESIDE_VERSION,
    COLUMNS_VERSION,
    DOCUMENT,
    SEALED_VERSION,
    DataFile,
    OtherFile,
    Parsed,
    StoredChunk,
    StoredTensor,
    parse_manifest,
)
from holdfast.formats.recorded import restore
from holdfast.formats.safetensors.read import Header, read_header
from holdfast.formats.safetensors.schema import (
    ADDRESSABLE,
    MANIFEST,
    PREFIX_NBYTES,
    HeaderEntry,
    is_addressable,
)

BYTES_OF, CRC_OF, FILE_OF = attrgetter("bytes"), attrgetter("crc32"), attrgetter("file")

WHOLE = {row.name for row in DTYPES.rows if not row.packed}
"""Dtypes whose elements fill whole bytes, which lie in a file as in memory."""


class Stored(Value, frozen=True, eq=False):
    """The tensors of a checked manifest as rows of a table.

    A manifest is a dozen objects for each of a million tensors. Almost all tensors are one plain chunk: a few numbers in columns,
    after which their entries are freed. A tensor that is split or shares bytes between elements is an irregular row.
    """

    table: Table
    """File numbers in its storages are those of the manifest."""
    storages: FileStorages
    manifest: Parsed
    """The manifest with the entries of irregular rows alone."""
    source: Source


def stored_tensors(manifest: Parsed, source: Source) -> Stored:
    # While all else is there: what is freed later has gaps, and the copies are not to lie in these.
    names, tensors = copy_compactly([*manifest.tensors]), [*manifest.tensors.values()]
    # The manifest was checked: a chunk that has no box is the whole tensor, and has as many bytes as its elements take.
    rows = [
        row
        for row, stored in enumerate(tensors)
        if not stored.chunks
        or stored.chunks[1:]
        or stored.chunks[0].start is not None
        or stored.dtype not in WHOLE
    ]
    entries = {names[row]: tensors[row] for row in rows}
    irregular = dict(
        zip(
            rows,
            _irregular_tensors(entries, [file.name for file in manifest.files], source),
            strict=True,
        )
    )
    dtypes, shapes = [stored.dtype for stored in tensors], [stored.shape for stored in tensors]
    positions = dict(zip(dict.fromkeys(zip(dtypes, shapes, strict=True)), count()))
    kinds = [RowKind.from_shape(dtype_named(dtype), shape) for dtype, shape in positions]
    kind = array("q", map(positions.__getitem__, zip(dtypes, shapes, strict=True)))
    labels: Sequence[str] = names
    storage: Sequence[int] = range(len(names))
    if irregular:
        for row, tensor in irregular.items():
            kind[row] = len(kinds)
            later = entries[names[row]].columns is not None
            kinds.append(
                RowKind(tensor.dtype, tensor.shape, PLAIN_TRAITS, tensor.nbytes)
                if later
                else RowKind.from_tensor(tensor)
            )
        labels, counter = [name for row, name in enumerate(names) if row not in irregular], count()
        storage = array(
            "q", [IRREGULAR if row in irregular else next(counter) for row in range(len(names))]
        )
    chunks = [stored.chunks[0] for row, stored in enumerate(tensors) if row not in irregular]
    edges = np.fromiter(
        chain.from_iterable(map(BYTES_OF, chunks)), np.int64, 2 * len(chunks)
    ).reshape(-1, 2)
    starts, lengths = edges[:, 0].copy(), edges[:, 1] - edges[:, 0]
    crcs = np.frombuffer(bytes.fromhex("".join(map(CRC_OF, chunks))), ">u4").astype(np.int64)
    files = array("q", map(FILE_OF, chunks))
    places = [StoredFile(source, file.name, source.store) for file in manifest.files]
    storages = FileStorages(places, files, starts, lengths, crcs, names=labels)
    return Stored(
        Table(names, kinds, kind, storage, storages, irregular),
        storages,
        replace(manifest, tensors=entries),
        source,
    )


def _irregular_tensors(
    entries: Mapping[str, StoredTensor], files: Sequence[str], source: Source
) -> Iterator[LazyTensor]:
    home = source.store
    for name, stored in entries.items():
        dtype, chunks = dtype_named(stored.dtype), []
        if stored.columns is not None:
            yield LazyTensor(
                name, dtype, stored.shape, CutChunks(name, dtype, stored, files, home), source
            )
            continue
        for chunk in stored.chunks:
            (start, stop), box = chunk.bytes, box_of(stored, chunk)
            storage = Storage(
                files[chunk.file],
                start,
                stop - start,
                crc32=int(chunk.crc32, 16),
                label=name,
                home=home,
            )
            chunks.append(Chunk(box, storage, 0, c_strides(box.shape, dtype.bits)))
        yield LazyTensor(name, dtype, stored.shape, tuple(chunks), source)


def dtype_named(name: str) -> DType:
    dtype = DTYPES.name(name)
    if dtype is None:  # the check has looked every name up
        raise HeaderError(f"there is no dtype {quote(name)}")
    return dtype


def box_of(stored: StoredTensor, chunk: StoredChunk) -> Box:
    return (
        Box.whole(stored.shape)
        if chunk.start is None or chunk.stop is None
        else Box(chunk.start, chunk.stop)
    )


NOT_NEEDED = "nothing in it is needed to open the checkpoint"


class StoredPart(NamedTuple):
    """A part of a tensor, and what the header of its file must say about it."""

    row: int
    name: str
    code: str
    shape: tuple[int, ...]
    bytes: tuple[int, int]


def check_files(tensors: Stored) -> list[str]:
    """Check that the header of each data file is unchanged and agrees with the manifest, and that the other files are unchanged.

    Reads the headers and the other files, and gives notes on what else they contain. Raises `MetadataError` or `Corrupted` for the
    first difference.
    """
    parts: dict[int, list[StoredPart]] = {}
    for file_index, part in chain(_list_plain_parts(tensors), _list_irregular_parts(tensors)):
        parts.setdefault(file_index, []).append(part)
    wrong: list[tuple[int, str]] = []
    """For each file with a difference: the row of its first wrong tensor, and the file."""
    changed: list[Corrupted] = []
    notes: list[str] = []
    for number, file in enumerate(tensors.manifest.files):
        header = read_header(tensors.source, file.name)
        expected = parts.get(number, [])
        wrong_rows = [part.row for part in expected if not _is_in_header(part, header)]
        if wrong_rows:
            wrong.append((min(wrong_rows), file.name))
        if header.record.mismatch is not None:
            changed.append(header.record.mismatch)
        elif tensors.manifest.version >= SEALED_VERSION and header.record.metadata_file != MANIFEST:
            message = "the header has lost the record that was written with it; get the file again"
            changed.append(Corrupted(message, file=file.name))
        elif header.unknown_fields:
            message = "another program added fields to the header; get the file again"
            changed.append(Corrupted(message, file=file.name))
        # Files that are shared with other steps have bytes of those (`formats.native.base`).
        living_nbytes = sum(stop - start for *_, (start, stop) in expected)
        dead = sum(header.columns.nbytes) - living_nbytes
        if dead > 0:
            notes.append(f"{file.name}: {dead:,} bytes belong to other steps that share the file")
    if wrong:
        row, key = min(wrong)
        raise MetadataError(
            "the manifest and the file's own header do not say the same",
            file=key,
            tensor=tensors.table.names[row],
        )
    if changed:
        raise changed[0]
    for other in tensors.manifest.others:
        _check_other(other, tensors.source)
    return notes


def _is_in_header(part: StoredPart, header: Header) -> bool:
    start, stop = part.bytes
    span = (start - header.data_start, stop - header.data_start)
    is_there = part.name in header.positions
    return is_there and header.entry(part.name) == HeaderEntry(part.code, part.shape, span)


def _list_plain_parts(tensors: Stored) -> Iterator[tuple[int, StoredPart]]:
    """List the tensors that are one plain chunk, each with the position of its file."""
    table, storages = tensors.table, tensors.storages
    kinds = [carried(kind) for kind in table.kinds]
    stops = storages.starts + storages.nbytes
    places = zip(
        storages.file_indices.tolist(), storages.starts.tolist(), stops.tolist(), strict=True
    )
    rows = [row for row in range(len(table.names)) if table.storage_indices[row] != IRREGULAR]
    for row, (file_index, start, stop) in zip(rows, places, strict=True):
        kind = kinds[table.kind_indices[row]]
        yield file_index, StoredPart(row, table.names[row], *kind, (start, stop))


def _list_irregular_parts(tensors: Stored) -> Iterator[tuple[int, StoredPart]]:
    """List the parts of all other tensors, each with the position of its file."""
    files = {file.name: number for number, file in enumerate(tensors.manifest.files)}
    for name, stored in tensors.manifest.tensors.items():
        row = tensors.table.row_indices[name]
        whole = tensors.table.irregular[row]
        if stored.columns is not None:
            for chunk in whole.chunks:
                if chunk.box.count:
                    kind = carried(RowKind.from_shape(whole.dtype, chunk.box.shape))
                    storage = chunk.storage
                    span = (storage.start, storage.start + storage.nbytes)
                    yield files[storage.key], StoredPart(row, name, *kind, span)
        for stored_chunk in stored.chunks:
            box = box_of(stored, stored_chunk)
            if len(stored.chunks) > 1 and not box.count:
                continue
            tensor = whole if len(stored.chunks) == 1 else whole[box.slices]
            kind = carried(RowKind.from_tensor(tensor))
            yield stored_chunk.file, StoredPart(row, tensor.name, *kind, stored_chunk.bytes)


def _check_other(other: OtherFile, source: Source) -> None:
    if not source.store.has_key(other.name):
        raise Corrupted(
            f"the manifest names this file, and it is not there; {NOT_NEEDED}", file=other.name
        )
    found = crc32(source.bytes(other.name, 0, source.store.size(other.name)))
    if f"{found:08x}" != other.crc32:
        message = f"the file does not have the checksum that the manifest records: it changed after it was written; {NOT_NEEDED}"
        raise Corrupted(message, file=other.name, expected=parse_crc(other.crc32), found=found)


CRC = re.compile(r"[0-9a-f]{8}\Z")
HASH = re.compile(r"[0-9a-f]{32,128}\Z")

BITS = {row.name: row.bits for row in DTYPES.rows}


def describe(source: Source) -> Description:
    """Read and check the manifest. Of the data files only lengths are read."""
    stored = stored_tensors(read_manifest(source), source)
    with error_context(file=MANIFEST):
        tensors, tree = restore(stored.table, stored.manifest.recorded, source)
    return Description(
        "native",
        tensors,
        tree,
        metadata=stored.manifest.metadata,
        check=partial(check_files, stored),
    )


def read_manifest(source: Source) -> Parsed:
    size = source.store.size(MANIFEST)
    check_length(DOCUMENT, size, source.limits)
    with error_context(file=MANIFEST):
        manifest = parse_manifest(source.bytes(MANIFEST, 0, size), source.limits)
        check_names(
            manifest.files,
            "files",
            reaches=source.store.can_read_sibling if manifest.version >= BESIDE_VERSION else None,
        )
        check_names((*manifest.files, *manifest.others), "others", first=len(manifest.files))
        local = [
            file for file in manifest.files if not source.store.expect_size(file.name, file.nbytes)
        ]
        present = set(source.store.list()) if local else set()
        missing = [file.name for file in local if file.name not in present]
        if missing:
            shown = ", ".join(map(quote, missing[:5]))
            raise StoreError(
                f"the manifest names files that are not there: {shown}", found=tuple(missing)
            )
        check_tensors(manifest, source.limits)
    for file in local:
        found = source.store.size(file.name)
        if found != file.nbytes:
            wrong = Truncated if found < file.nbytes else MetadataError
            said = f"the manifest says {file.nbytes:,} bytes, the file has {found:,}"
            raise wrong(said, file=file.name, expected=file.nbytes, found=found)
    return manifest


def check_names(
    files: Sequence[DataFile | OtherFile],
    field: str,
    *,
    first: int = 0,
    reaches: Callable[[str], bool] | None = None,
) -> None:
    """Refuse names that are not plain names of files in this directory, and impossible lengths; from the `first` file on.

    `reaches` tells whether the store has a file of a folder beside this one.
    """
    seen: set[str] = {file.name for file in files[:first]}
    for i, file in enumerate(files[first:]):
        name = file.name
        if reaches is not None and parse_sibling_key(name):
            if not reaches(name):
                told = "a step that shares data with others beside it opens in its bucket alone; `holdfast cp` makes it whole"
                raise UnsafePath(
                    f"at {format_pointer(field, i, 'name')}: {quote(name)}: {told}", found=name
                )
        elif not name or name.startswith(".") or any(sign in name for sign in "/\\\0"):
            at = format_pointer(field, i, "name")
            raise UnsafePath(
                f"at {at}: {quote(name)} is not the plain name of a file in the directory",
                found=name,
            )
        if name in seen or name == MANIFEST:
            raise HeaderError(
                f"at {format_pointer(field, i, 'name')}: {quote(name)} is there already"
            )
        if not 0 <= file.nbytes <= ADDRESSABLE:
            raise HeaderError(
                f"at {format_pointer(field, i, 'nbytes')}: {file.nbytes} is no length"
            )
        seen.add(name)


def check_tensors(manifest: Parsed, limits: Limits) -> None:
    """Check every tensor, and that no two overlap. The loop is fast for a valid manifest; `_explain` names what is wrong."""
    ends = [file.nbytes for file in manifest.files]
    count_files = len(ends)
    ranges: list[int] = []
    """File number, start and stop of each chunk, one chunk after the other."""
    cut: dict[str, StoredTensor] = {}
    judged: dict[str, dict[tuple[int, ...], int | None]] = {}
    for name, stored in manifest.tensors.items():
        shape, chunks = stored.shape, stored.chunks
        several = bool(chunks[1:])
        try:
            count = judged[stored.dtype][shape]
        except KeyError:
            count = judged.setdefault(stored.dtype, {})[shape] = _bits_of(
                stored.dtype, shape, limits
            )
        if count is None or not (chunks or stored.columns):
            _explain(name, stored, limits)
        if stored.columns is not None:
            cut[name] = stored
        for number, chunk in enumerate(chunks):
            start, stop = chunk.bytes
            file = chunk.file
            if chunk.start is None and chunk.stop is None and not several:
                whole = (count + 7) // 8
            else:
                whole = _box_nbytes(name, stored, number, bits=BITS[stored.dtype])
            if chunk.hash is not None or chunk.head is not None:
                _check_hash(name, manifest, number)
            if chunk.sparse is not msgspec.UNSET:
                place = format_pointer("tensors", name, "chunks", number, "sparse")
                raise Unsupported(
                    f"at {place}: this tensor is stored packed, as its non-zero elements and their"
                    " positions, which only earlier versions of Holdfast read; save the checkpoint"
                    " again from its source",
                    tensor=name,
                )
            if (
                not 0 <= file < count_files
                or not PREFIX_NBYTES <= start <= stop <= ends[file]
                or stop - start != whole
            ):
                _explain_chunk(name, number, chunk, ends=ends, whole=whole)
            if not CRC.match(chunk.crc32):
                _refuse(
                    name,
                    f"{quote(chunk.crc32)} is no CRC-32 in eight digits",
                    "chunks",
                    number,
                    "crc32",
                )
            ranges += (file, start, stop)
        if several and not is_tiled_by(
            Box.whole(shape), (box_of(stored, chunk) for chunk in chunks)
        ):
            _lie(name, f"{len(chunks):,} chunks do not cover {list(shape)} exactly once", "chunks")
    places = np.array(ranges, np.int64).reshape(-1, 3)
    if not cut or not _follow(cut, places, manifest):
        more = [found.places() for stored in cut.values() if (found := CutColumns.of(stored))]
        _check_apart(np.concatenate((places, *more)), manifest)


def _follow(cut: Mapping[str, StoredTensor], places: Ints, manifest: Parsed) -> bool:
    """Check tensors in columns. Tells whether it has seen that they, and the other places, lie apart.

    Taken in the order of their first bytes, tensors mostly follow each other in every file: then no place is kept, or sorted.
    """
    ends = np.array([file.nbytes for file in manifest.files], np.int64)
    reached, apart = np.zeros(len(ends), np.int64), True
    firsts: list[tuple[int, str | int]] = [
        (sum(stored.columns.bytes[:1]), name) for name, stored in cut.items() if stored.columns
    ]
    firsts += zip(places[:, 1].tolist(), range(len(places)), strict=True)
    for _, one in sorted(firsts, key=itemgetter(0)):
        if isinstance(one, str):
            file, (start, stop) = _check_columns(one, cut[one], ends, manifest=manifest)
            apart &= bool((file[1:] > file[:-1]).all())
        else:
            file, start, stop = places[one : one + 1].T
        apart &= bool((start >= reached[file]).all())
        reached[file] = stop
    return apart


def _check_columns(
    name: str, stored: StoredTensor, ends: Ints, *, manifest: Parsed
) -> tuple[Ints, Ints]:
    """The file numbers of the chunks of a tensor in columns, and their first and last bytes."""
    if manifest.version < COLUMNS_VERSION or manifest.hash is not None or stored.chunks:
        told = (
            "has no chunks in columns"
            if manifest.version < COLUMNS_VERSION
            else "has either columns, or hashes and chunks"
        )
        _refuse(name, f"a manifest of version {manifest.version} {told}", "columns")
    found = CutColumns.of(stored)
    # There may be 100 MB of digits.
    if found is None or found.crc32.encode().translate(None, b"0123456789abcdef"):
        _refuse(
            name, "columns of different lengths, or with numbers that no chunk can have", "columns"
        )
    if (found.starts > found.stops).any() or not is_shape_tiled_by_columns(
        stored.shape, found.starts, found.stops
    ):
        _lie(
            name,
            f"{len(found.file):,} chunks do not cover {list(stored.shape)} exactly once",
            "columns",
        )
    (first, last), inside = found.spans, found.file < len(ends)
    inside &= (
        (first >= PREFIX_NBYTES) & (last >= first) & (last <= ends.take(found.file, mode="clip"))
    )
    if not inside.all():
        at = int(inside.argmin())
        _lie(
            name,
            f"{first[at]:,} to {last[at]:,} is not inside of a file, number {found.file[at]:,}",
            "columns",
            at,
        )
    return found.file, found.spans


def _bits_of(dtype: str, shape: tuple[int, ...], limits: Limits) -> int | None:
    bits = BITS.get(dtype, 0)
    # The rank before the product: that of a million long dimensions would take hours.
    if (
        not bits
        or len(shape) > limits.rank
        or not all(0 <= n <= ADDRESSABLE for n in shape)
        or not is_addressable(shape, bits)
    ):
        return None
    return bits * math.prod(shape)


def _box_nbytes(name: str, stored: StoredTensor, number: int, *, bits: int) -> int:
    chunk, rank = stored.chunks[number], len(stored.shape)
    start, stop = chunk.start, chunk.stop
    if start is None or stop is None:
        _refuse(name, "one of several chunks needs a start and a stop", "chunks", number)
    if len(start) != rank or len(stop) != rank:
        _refuse(name, f"a box of another rank than {rank}", "chunks", number)
    if not all(0 <= a <= b <= n for a, b, n in zip(start, stop, stored.shape, strict=True)):
        _lie(
            name,
            f"{list(start)} to {list(stop)} is no box in {list(stored.shape)}",
            "chunks",
            number,
        )
    if len(stored.chunks) == 1 and not is_tiled_by(Box.whole(stored.shape), [Box(start, stop)]):
        _lie(name, f"one chunk does not cover {list(stored.shape)}", "chunks")
    return (Box(start, stop).count * bits + 7) // 8


def _check_hash(name: str, manifest: Parsed, number: int) -> None:
    chunk = manifest.tensors[name].chunks[number]
    if manifest.hash is None:
        _refuse(name, "a hash needs a manifest that names its algorithm", "chunks", number)
    if chunk.hash is not None and not HASH.match(chunk.hash):
        _refuse(
            name, f"{quote(chunk.hash)} is no hash in hexadecimal digits", "chunks", number, "hash"
        )
    if chunk.head is not None and not CRC.match(chunk.head):
        _refuse(name, f"{quote(chunk.head)} is no CRC-32 in eight digits", "chunks", number, "head")


def _check_apart(places: Ints, manifest: Parsed) -> None:
    """Refuse byte ranges that overlap: shared bytes are named by `aliases`."""
    places = places[places[:, 1] < places[:, 2]]
    files, starts, stops = places.take(np.lexsort((places[:, 1], places[:, 0])), axis=0).T
    over = ((files[1:] == files[:-1]) & (starts[1:] < stops[:-1])).nonzero()[0]
    if len(over):
        wanted = (int(files[over[0] + 1]), int(starts[over[0] + 1]))
        for name, stored in manifest.tensors.items():
            if (cut := CutColumns.of(stored)) and (cut.places()[:, :2] == wanted).all(axis=1).any():
                _lie(name, "bytes of a chunk belong to another tensor as well", "columns", "bytes")
            for number, chunk in enumerate(stored.chunks):
                if (chunk.file, chunk.bytes[0]) == wanted and chunk.bytes[0] < chunk.bytes[1]:
                    _lie(
                        name,
                        "these bytes belong to another tensor as well",
                        "chunks",
                        number,
                        "bytes",
                    )


def _explain(name: str, stored: StoredTensor, limits: Limits) -> NoReturn:
    if stored.dtype not in BITS:
        _refuse(name, f"there is no dtype {quote(stored.dtype)}", "dtype")
    if len(stored.shape) > limits.rank:
        raise LimitExceeded(
            f"at {format_pointer('tensors', name, 'shape')}: {len(stored.shape):,} dimensions are more than "
            f"Limits(rank={limits.rank})",
            tensor=name,
            expected=limits.rank,
            found=len(stored.shape),
        )
    if not stored.chunks:
        _refuse(name, "a tensor without chunks", "chunks")
    for i, n in enumerate(stored.shape):
        if not 0 <= n <= ADDRESSABLE:
            _refuse(name, "this is no length", "shape", i)
    _lie(name, "more than any file can hold", "shape")


def _explain_chunk(
    name: str, number: int, chunk: StoredChunk, *, ends: list[int], whole: int
) -> NoReturn:
    start, stop = chunk.bytes
    if not 0 <= chunk.file < len(ends):
        _refuse(
            name,
            f"there are {len(ends):,} files, and no number {chunk.file}",
            "chunks",
            number,
            "file",
        )
    if not PREFIX_NBYTES <= start <= stop <= ends[chunk.file]:
        _lie(
            name,
            f"{start:,} to {stop:,} is not inside of a file of {ends[chunk.file]:,} bytes",
            "chunks",
            number,
            "bytes",
        )
    _lie(
        name, f"{stop - start:,} bytes for elements that take {whole:,}", "chunks", number, "bytes"
    )


def _refuse(name: str, found: str, *steps: str | int) -> NoReturn:
    raise HeaderError(f"at {format_pointer('tensors', name, *steps)}: {found}", tensor=name)


def _lie(name: str, found: str, *steps: str | int) -> NoReturn:
    raise MetadataError(f"at {format_pointer('tensors', name, *steps)}: {found}", tensor=name)
