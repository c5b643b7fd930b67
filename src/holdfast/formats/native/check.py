"""What opening a native directory does not read: do the data files' own headers say what the manifest says?

No tensor depends on it, so it is for verifications. Files are looked at one after the other: the header of one is in memory at a
time, and of a million tensors that is what a verification needs the most memory for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.crc import crc32
from holdfast.core.protocols import Source
from holdfast.core.sparse.storage import SparseStorage
from holdfast.core.table import Kind
from holdfast.core.tensor import LazyTensor
from holdfast.errors import Corrupted, MetadataError
from holdfast.formats.native.base import parts_of
from holdfast.formats.native.boxes import carried
from holdfast.formats.native.schema import SEALED_VERSION, OtherFile
from holdfast.formats.native.tensors import Stored, box_of, dtype_named
from holdfast.formats.safetensors.read import Header, read_header
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.formats.safetensors.schema import HeaderEntry
from holdfast.formats.strict_json import hexadecimal

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
        dead = sum([header.columns.nbytes[outline] for outline in header.columns.outline]) - living
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
        wrong |= np.array(columns.begins, np.int64)[at] + header.data_start != held.start[numbers]
        wrong |= np.array(columns.nbytes, np.int64)[outline] != held.nbytes[numbers]
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
