"""Read a native directory. Opening reads the manifest and measures the files; tensors are made when asked for (tensors.py).

What the manifest says is checked before anything uses it: files that are there and as long as they should be, byte ranges inside of
them that do not overlap, boxes that tile each tensor, bytes that fit dtype and shape.

That the data files' own headers agree with the manifest is for a verification (`check_files`): it costs a read of every file, and
no tensor depends on it. Files are looked at one after the other: the header of one is in memory at a time, and of a million tensors
that is what a verification needs the most memory for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import NoReturn

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.box import Box
from holdfast.core.crc import crc32
from holdfast.core.documents import check_length, hexadecimal
from holdfast.core.dtype import DTYPES
from holdfast.core.keys import sibling_key
from holdfast.core.limits import Limits
from holdfast.core.protocols import Description, Source
from holdfast.core.strict_json import pointer, quoted
from holdfast.core.table import Kind
from holdfast.core.tensor import LazyTensor
from holdfast.core.tiling import tiles
from holdfast.errors import (
    Corrupted,
    HeaderError,
    HoldfastError,
    LimitExceeded,
    MetadataError,
    StoreError,
    Truncated,
    UnsafePath,
    located,
)
from holdfast.formats.native.base import parts_of
from holdfast.formats.native.boxes import carried
from holdfast.formats.native.chunks import check_sparse
from holdfast.formats.native.schema import (
    BESIDE_VERSION,
    DOCUMENT,
    SEALED_VERSION,
    SPARSE_VERSION,
    DataFile,
    OtherFile,
    Parsed,
    StoredChunk,
    StoredPart,
    StoredTensor,
    parse_manifest,
)
from holdfast.formats.native.tensors import Stored, box_of, dtype_named, stored_tensors
from holdfast.formats.recorded import restore
from holdfast.formats.safetensors.read import Header, read_header
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.formats.safetensors.schema import ADDRESSABLE, PREFIX_NBYTES, HeaderEntry, addressable
from holdfast.numeric.pack import SparseStorage

NOT_NEEDED = "nothing in it is needed to open the checkpoint"

Part = tuple[int, int, str, str, tuple[int, ...], tuple[int, int]]
"""Of a tensor its row, and what a header has to say of a part of it: the file, the name there, code, shape, bytes in the file."""


def check_files(tensors: Stored) -> list[str]:
    """Check that the header of every data file is as it was written and says of each tensor what the manifest says, and that the
    other files are as they were; reads headers and those. Gives notes on what else is in them.

    Raises `MetadataError` or `Corrupted` for the first that does not.
    """
    names, held = tensors.table.names, tensors.storages
    kinds, numbers = np.asarray(tensors.table.kind, np.int64), np.asarray(tensors.table.storage, np.int64)
    plain = np.flatnonzero(numbers >= 0)
    odd = list(_odd_parts(tensors, names))
    wrong: list[tuple[int, str]] = []
    """The first tensor of each file of which the two do not say the same: its row, and the file."""
    changed: list[Corrupted] = []
    notes: list[str] = []
    for number, file in enumerate(tensors.files):
        header = read_header(tensors.source, file.name)
        here = [part for part in odd if part[1] == number]
        rows = plain[held.file == number]
        differing = (*_differing_rows(tensors, header, rows, kinds[rows]), *_differing_parts(header, here))
        wrong += [(min(differing), file.name)] if differing else []
        if header.record.changed is not None:
            changed.append(header.record.changed)
        elif tensors.version >= SEALED_VERSION and header.record.rest != MANIFEST:
            message = "the header has lost the record that was written with it; get the file again"
            changed.append(Corrupted(message, file=file.name))
        # Files that are shared with other steps have bytes of those (`formats.native.base`).
        living = int(held.nbytes[numbers[rows]].sum()) + sum(stop - start for *_, (start, stop) in here)
        dead = sum(header.columns.nbytes) - living
        if dead > 0:
            notes.append(f"{file.name}: {dead:,} bytes are of other steps that share the file, and not of this one")
    if wrong:
        row, key = min(wrong)
        raise MetadataError("the manifest and the file's own header do not say the same", file=key, tensor=names[row])
    if changed:
        raise changed[0]
    for other in tensors.others:
        _check_other(other, tensors.source)
    return notes


def _differing_rows(tensors: Stored, header: Header, rows: Ints, kinds: Ints) -> list[int]:
    """The first of these ordinary tensors that the header does not have so."""
    table, held, columns = tensors.table, tensors.storages, header.columns
    names = [table.names[row] for row in rows.tolist()]
    at = np.fromiter(map(header.positions.get, names, repeat(-1)), np.int64, len(names))
    wrong = at < 0
    if len(columns.outline):
        numbers, outline = np.asarray(table.storage, np.int64)[rows], np.array(columns.outline, np.int64)[at]
        wrong |= np.array(columns.starts, np.int64)[at] != held.start[numbers]
        wrong |= np.array(columns.nbytes, np.int64)[at] != held.nbytes[numbers]
        # A kind, and what the header says of it, are compared once.
        pairs, where = np.unique(kinds * len(columns.outlines) + outline, return_inverse=True)
        judged = [(carried(table.kinds[one // len(columns.outlines)]), one % len(columns.outlines)) for one in pairs.tolist()]
        wrong |= np.array([(kind.code, kind.shape) != columns.outlines[own] for kind, own in judged], np.bool_)[where]
    return rows[wrong][:1].tolist()  # type: ignore[no-any-return]  # of integers


def _differing_parts(header: Header, parts: list[Part]) -> Iterator[int]:
    for row, _, name, code, shape, (start, stop) in parts:
        expected = HeaderEntry(code, shape, (start - header.data_start, stop - header.data_start))
        if name not in header.positions or header.entry(name) != expected:
            yield row


def _odd_parts(tensors: Stored, names: Sequence[str]) -> Iterator[Part]:
    """What the headers have of tensors that are split, packed or share bytes between elements."""
    rows = [row for row, name in enumerate(names) if name in tensors.odd] if tensors.odd else []
    for row, stored in zip(rows, tensors.odd.values(), strict=True):
        for chunk in stored.chunks:
            box = box_of(stored, chunk)
            if len(stored.chunks) > 1 and not box.count:
                continue
            whole = tensors.table.odd[row]
            tensor = whole if len(stored.chunks) == 1 else whole[box.slices]
            for at, part in zip(parts_of(chunk), _stored_parts(tensor), strict=True):
                piece = carried(Kind.of(part))
                yield row, at.file, part.name, piece.code, piece.shape, at.bytes


def _check_other(other: OtherFile, source: Source) -> None:
    """Compare a file that no tensor depends on with what the manifest says of it."""
    if not source.store.holds(other.name):
        raise Corrupted(f"the manifest names this file, and it is not there; {NOT_NEEDED}", file=other.name)
    found = crc32(source.bytes(other.name, 0, source.store.size(other.name)))
    if f"{found:08x}" != other.crc32:
        raise Corrupted(
            f"the file does not have the checksum that the manifest records: it changed after it was written; {NOT_NEEDED}",
            file=other.name,
            expected=hexadecimal(other.crc32),
            found=found,
        )


def _stored_parts(tensor: LazyTensor) -> list[LazyTensor]:
    """A tensor of one chunk as it is in its file: itself, or its packed parts, each under the name that it has there."""
    storage = tensor.chunks[0].storage
    if not isinstance(storage, SparseStorage):
        return [tensor]
    dtypes = (tensor.dtype, dtype_named("uint8"), dtype_named("uint64"))
    return [
        LazyTensor.contiguous(part.label, dtype, (part.nbytes * 8 // dtype.bits,), part, tensor.source)
        for part, dtype in zip(storage.parts, dtypes, strict=False)
    ]


CRC = re.compile(r"[0-9a-f]{8}\Z")
HASH = re.compile(r"[0-9a-f]{32,128}\Z")

BITS = {row.name: row.bits for row in DTYPES.rows}


def is_native(source: Source) -> bool:
    """Whether there is a `holdfast.json` at the top, whatever is in it: a damaged one is damaged, not another format."""
    return source.store.holds(MANIFEST)


def describe(source: Source) -> Description:
    """Read the manifest and check everything that it says; only lengths are asked of the files."""
    stored = stored_tensors(read_manifest(source), source)
    with located(file=MANIFEST):
        tensors, tree = restore(stored.table, stored.recorded, source)
    return Description("native", tensors, tree, metadata=stored.metadata, check=partial(check_files, stored))


def read_manifest(source: Source) -> Parsed:
    """The checked manifest of a directory."""
    size = source.store.size(MANIFEST)
    check_length(DOCUMENT, size, source.limits)
    with located(file=MANIFEST):
        manifest = parse_manifest(source.bytes(MANIFEST, 0, size), source.limits)
        check_names(manifest.files, "files", reaches=source.store.reaches if manifest.version >= BESIDE_VERSION else None)
        check_names((*manifest.files, *manifest.others), "others", first=len(manifest.files))
        near = [file for file in manifest.files if not source.store.expect(file.name, file.nbytes)]
        present = set(source.store.list()) if near else set()
        missing = [file.name for file in near if file.name not in present]
        if missing:
            shown = ", ".join(map(quoted, missing[:5]))
            raise StoreError(f"the manifest names files that are not there: {shown}", found=tuple(missing))
        check_tensors(manifest, source.limits)
    for file in near:
        found = source.store.size(file.name)
        if found != file.nbytes:
            wrong = Truncated if found < file.nbytes else MetadataError
            said = f"the manifest says {file.nbytes:,} bytes, the file has {found:,}"
            raise wrong(said, file=file.name, expected=file.nbytes, found=found)
    return manifest


def check_names(
    files: Sequence[DataFile | OtherFile], field: str, *, first: int = 0, reaches: Callable[[str], bool] | None = None
) -> None:
    """Refuse names that are not those of files in this directory, and lengths that are none; from the `first` one on.

    `reaches` says of a name in a folder beside it whether the store has such a thing.
    """
    seen: set[str] = {file.name for file in files[:first]}
    for i, file in enumerate(files[first:]):
        name = file.name
        if reaches is not None and sibling_key(name):
            if not reaches(name):
                told = "a step that shares data with others beside it opens in its bucket alone; `holdfast cp` makes it whole"
                raise UnsafePath(f"at {pointer(field, i, 'name')}: {quoted(name)}: {told}", found=name)
        elif not name or name.startswith(".") or any(sign in name for sign in "/\\\0"):
            at = pointer(field, i, "name")
            raise UnsafePath(f"at {at}: {quoted(name)} is not the plain name of a file in the directory", found=name)
        if name in seen or name == MANIFEST:
            raise HeaderError(f"at {pointer(field, i, 'name')}: {quoted(name)} is there already")
        if not 0 <= file.nbytes <= ADDRESSABLE:
            raise HeaderError(f"at {pointer(field, i, 'nbytes')}: {file.nbytes} is no length")
        seen.add(name)


def check_tensors(manifest: Parsed, limits: Limits) -> None:
    """Check every tensor, and that no two lie over each other. Written for the honest file; `_explain` says what is wrong."""
    ends = [file.nbytes for file in manifest.files]
    count_files = len(ends)
    ranges: list[int] = []
    """A file, a first byte and the byte after the last, of one part after the other."""
    judged: dict[str, dict[tuple[int, ...], int | None]] = {}
    # All digits at once; where some are wrong, the loop says which.
    every = [chunk for stored in manifest.tensors.values() for chunk in stored.chunks]
    sums_fine = _are_digits([chunk.crc32 for chunk in every], 8, 8)
    heads_fine = _are_digits([chunk.head for chunk in every if chunk.head is not None], 8, 8)
    hashes_fine = _are_digits([chunk.hash for chunk in every if chunk.hash is not None], 32, 128)
    for name, stored in manifest.tensors.items():
        shape, chunks = stored.shape, stored.chunks
        several = bool(chunks[1:])
        try:
            count = judged[stored.dtype][shape]
        except KeyError:
            count = judged.setdefault(stored.dtype, {})[shape] = _bits_of(stored.dtype, shape, limits)
        if count is None or not chunks:
            _explain(name, stored, limits)
        for number, chunk in enumerate(chunks):
            start, stop = chunk.bytes
            file = chunk.file
            if chunk.start is None and chunk.stop is None and not several:
                whole = (count + 7) // 8
            else:
                whole = _box_nbytes(name, stored, number, bits=BITS[stored.dtype])
            if chunk.hash is not None or chunk.head is not None:
                digits, head = chunk.hash, chunk.head
                wrong = not hashes_fine and digits is not None and not HASH.match(digits)
                wrong |= not heads_fine and head is not None and not CRC.match(head)
                if wrong or manifest.hash is None:
                    _explain_hash(name, manifest, number)
            if chunk.sparse is not None:
                ranges += _check_packed(name, manifest, number, limits=limits)
                continue
            if not 0 <= file < count_files or not PREFIX_NBYTES <= start <= stop <= ends[file] or stop - start != whole:
                _explain_chunk(name, number, chunk, ends=ends, whole=whole)
            if not sums_fine and not CRC.match(chunk.crc32):
                _refuse(name, f"{quoted(chunk.crc32)} is no CRC-32 in eight digits", "chunks", number, "crc32")
            ranges += (file, start, stop)
        if several and not tiles(Box.whole(shape), (box_of(stored, chunk) for chunk in chunks)):
            _lie(name, f"{len(chunks):,} chunks do not cover {list(shape)} exactly once", "chunks")
    _check_apart(ranges, manifest)


def _are_digits(texts: Sequence[str], least: int, most: int) -> bool:
    """Whether all texts are hexadecimal digits, so many at least and at most."""
    lengths = {*map(len, texts)}
    return all(least <= length <= most for length in lengths) and not "".join(texts).strip("0123456789abcdef")


def _bits_of(dtype: str, shape: tuple[int, ...], limits: Limits) -> int | None:
    """Bits of a tensor of a dtype and shape; None where there can be no such tensor."""
    bits = BITS.get(dtype, 0)
    # The rank before the product: that of a million long dimensions would take hours.
    if not bits or len(shape) > limits.rank or not all(0 <= n <= ADDRESSABLE for n in shape) or not addressable(shape, bits):
        return None
    return bits * math.prod(shape)


def _box_nbytes(name: str, stored: StoredTensor, number: int, *, bits: int) -> int:
    """Bytes of a chunk that says which box it is; refuses a box that is none, or not inside of the tensor."""
    chunk, rank = stored.chunks[number], len(stored.shape)
    start, stop = chunk.start, chunk.stop
    if start is None or stop is None:
        _refuse(name, "one of several chunks needs a start and a stop", "chunks", number)
    if len(start) != rank or len(stop) != rank:
        _refuse(name, f"a box of another rank than {rank}", "chunks", number)
    if not all(0 <= a <= b <= n for a, b, n in zip(start, stop, stored.shape, strict=True)):
        _lie(name, f"{list(start)} to {list(stop)} is no box in {list(stored.shape)}", "chunks", number)
    if len(stored.chunks) == 1 and not tiles(Box.whole(stored.shape), [Box(start, stop)]):
        _lie(name, f"one chunk does not cover {list(stored.shape)}", "chunks")
    return (Box(start, stop).count * bits + 7) // 8


def _explain_hash(name: str, manifest: Parsed, number: int) -> NoReturn:
    """Raise for a hash of a wrong form, whatever its algorithm; nothing that is read depends on it."""
    chunk = manifest.tensors[name].chunks[number]
    if manifest.hash is None:
        _refuse(name, "a hash needs a manifest that names its algorithm", "chunks", number)
    if chunk.hash is not None and not HASH.match(chunk.hash):
        _refuse(name, f"{quoted(chunk.hash)} is no hash in hexadecimal digits", "chunks", number, "hash")
    _refuse(name, f"{quoted(chunk.head or '')} is no CRC-32 in eight digits", "chunks", number, "head")


def _check_packed(name: str, manifest: Parsed, number: int, *, limits: Limits) -> list[int]:
    """Check a chunk that is stored packed; the ranges of its parts."""
    stored, ends = manifest.tensors[name], [file.nbytes for file in manifest.files]
    chunk = stored.chunks[number]
    sparse = chunk.sparse
    if sparse is None or manifest.version < SPARSE_VERSION:
        _refuse(name, f"a manifest of version {manifest.version} has no packed chunks", "chunks", number, "sparse")
    parts = parts_of(chunk)
    for part in parts:
        _check_place(name, part, ends, number=number)
    if not CRC.match(chunk.crc32):
        _refuse(name, f"{quoted(chunk.crc32)} is no CRC-32 in eight digits", "chunks", number, "crc32")
    try:
        check_sparse(chunk, sparse, dtype_named(stored.dtype), shape=box_of(stored, chunk).shape, limits=limits)
    except HoldfastError as error:
        error.message = f"at {pointer('tensors', name, 'chunks', number, 'sparse')}: {error.message}"
        error.args, error.tensor = (error.message,), name
        raise
    return [one for part in parts for one in (part.file, *part.bytes)]


def _check_place(name: str, part: StoredPart, ends: list[int], *, number: int) -> None:
    start, stop = part.bytes
    if not 0 <= part.file < len(ends):
        _refuse(name, f"there are {len(ends):,} files, and no number {part.file}", "chunks", number)
    if not PREFIX_NBYTES <= start <= stop <= ends[part.file]:
        _lie(name, f"{start:,} to {stop:,} is not inside of a file of {ends[part.file]:,} bytes", "chunks", number)
    if not CRC.match(part.crc32):
        _refuse(name, f"{quoted(part.crc32)} is no CRC-32 in eight digits", "chunks", number, "sparse")


def _check_apart(ranges: list[int], manifest: Parsed) -> None:
    """Refuse byte ranges that overlap: what is shared is said by `aliases`, and everything else has bytes of its own."""
    places = np.array(ranges, np.int64).reshape(-1, 3)
    places = places[places[:, 1] < places[:, 2]]
    files, starts, stops = places.take(np.lexsort((places[:, 1], places[:, 0])), axis=0).T
    over = ((files[1:] == files[:-1]) & (starts[1:] < stops[:-1])).nonzero()[0]
    if len(over):
        wanted = (int(files[over[0] + 1]), int(starts[over[0] + 1]))
        for name, stored in manifest.tensors.items():
            for number, chunk in enumerate(stored.chunks):
                for part in parts_of(chunk):
                    if (part.file, part.bytes[0]) == wanted and part.bytes[0] < part.bytes[1]:
                        _lie(name, "these bytes belong to another tensor as well", "chunks", number, "bytes")


def _explain(name: str, stored: StoredTensor, limits: Limits) -> NoReturn:
    """Raise for a tensor that cannot be true, naming the first field that shows it."""
    if stored.dtype not in BITS:
        _refuse(name, f"there is no dtype {quoted(stored.dtype)}", "dtype")
    if len(stored.shape) > limits.rank:
        raise LimitExceeded(
            f"at {pointer('tensors', name, 'shape')}: {len(stored.shape):,} dimensions are more than Limits(rank={limits.rank})",
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


def _explain_chunk(name: str, number: int, chunk: StoredChunk, *, ends: list[int], whole: int) -> NoReturn:
    start, stop = chunk.bytes
    if not 0 <= chunk.file < len(ends):
        _refuse(name, f"there are {len(ends):,} files, and no number {chunk.file}", "chunks", number, "file")
    if not PREFIX_NBYTES <= start <= stop <= ends[chunk.file]:
        _lie(name, f"{start:,} to {stop:,} is not inside of a file of {ends[chunk.file]:,} bytes", "chunks", number, "bytes")
    _lie(name, f"{stop - start:,} bytes for elements that take {whole:,}", "chunks", number, "bytes")


def _refuse(name: str, found: str, *steps: str | int) -> NoReturn:
    """Raise for what is no value of its field."""
    raise HeaderError(f"at {pointer('tensors', name, *steps)}: {found}", tensor=name)


def _lie(name: str, found: str, *steps: str | int) -> NoReturn:
    """Raise for numbers that cannot be true together."""
    raise MetadataError(f"at {pointer('tensors', name, *steps)}: {found}", tensor=name)
