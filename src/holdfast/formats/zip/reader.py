"""The strict zip reader: what it accepts, every reader (torch, CPython, …) sees as the same bytes and names.

    1. tail       the last 22 to 98 bytes   where is the directory, how many records      layout.py
    2. directory  one read                  names, sizes, checksums, offsets
    3. records    headers in joined reads   each agrees with the directory, end to end

No payload is read, beyond small ones that lie between two headers. No checksum of a payload is verified here:
`ZipRecord.crc32` is for the reader of the payload. Time and memory are linear in the directory and the headers; nothing is
allocated for a count before the bytes for it were seen.

Refused, with the byte where it was seen: other than one end record at the very end, several disks, zip64 records that
disagree, a directory of another size or count, names that are equal or differ in case only, names that are unsafe or
in an unknown encoding, extra fields that rename, encryption and other features, methods other than stored and
deflated, links, comments, local headers and descriptors that disagree with the directory, and any byte that belongs
to nothing.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.crc import crc32
from holdfast.core.protocols import Source
from holdfast.core.tensor import NO_CRC
from holdfast.core.value import Value
from holdfast.engine.coalesce import HEADERS, coalesce
from holdfast.errors import Corrupted, LimitExceeded, Truncated, ZipError
from holdfast.formats.zip import layout
from holdfast.formats.zip.layout import (
    LOCAL,
    MAX16,
    MAX32,
    NARROW,
    WIDE,
    Archive,
    Entries,
    FieldOffsets,
    Records,
    ZipRecord,
    gather,
    make_end,
    refused,
)
from holdfast.formats.zip.writer import (
    EMPTY,
    FILLED,
    NO_BLOCK,
    SHORT_DESCRIPTOR,
    SHORT_ENTRY,
    SIGNATURE,
    header,
)

TAIL = layout.END64.size + layout.LOCATOR.size + layout.END.size
TAIL_NBYTES = 4096
"""Bytes from the end that are read at once: the directory of about fifty records."""

WHOLE_NBYTES = 32 << 10
"""An archive up to this size is read with one call."""

ALIGNMENT = 64

TOGETHER = 4096
"""Records whose headers are compared together: enough to read neighbours with one call, and little memory."""


def read_canonical(source: Source, key: str, *, start: int, stop: int) -> Archive | None:
    """The records of an archive as torch writes it; None for every other one.

    The strict reader checks every rule for every field. But torch's writer leaves no freedom: given names, sizes and checksums,
    every other byte of the archive follows. So:

    1. Compare the end records with what the writer (writer.py) puts there.
    2. Go through the central directory, from record to record, and know from the names and sizes so far where the next one lies.
       Each entry must be what the writer makes of its name, size and checksum.
    3. Compare each header, and the descriptor before it, with what the writer puts there. If all of it is equal, the archive is the
       one that the writer makes, which the strict reader accepts; the records lie where the layout put them.

    Anything else (another alignment, zip64 fields, another writer, a lie, a limit) is `None`: the strict reader decides.
    """
    size, limits = stop - start, source.limits
    if not TAIL <= size < MAX32 or limits.zip_directory_nbytes < WHOLE_NBYTES:
        return None
    read_nbytes = size if size <= WHOLE_NBYTES else TAIL_NBYTES
    last = source.bytes(key, stop - read_nbytes, stop)
    *_, count, nbytes, directory = layout.END64.unpack_from(last, read_nbytes - TAIL)
    if (
        directory + nbytes + TAIL != size
        or count > limits.zip_records
        or nbytes > limits.zip_directory_nbytes
    ):
        return None
    if not count or not last.endswith(make_end(count, directory, nbytes)):
        return None
    if read_nbytes < nbytes + TAIL:
        last = source.bytes(key, stop - TAIL - nbytes, stop)
    entries = last[-TAIL - nbytes : -TAIL]
    whole = last if read_nbytes == size else b""
    records = _match_records(
        entries, count, directory, whole=whole, source=source, key=key, start=start
    )
    return None if records is None else _name_records(records, start)


class _MatchedRecords(Value, frozen=True, eq=False):
    """The records of an archive whose directory and headers are those of torch's writer, as columns."""

    names: list[bytes]
    starts: array[int]
    nbytes: array[int]
    crcs: array[int]
    headers: array[int]


@lru_cache(maxsize=4096)
def _frame(name_nbytes: int, at: int, filled: bool) -> tuple[bytes, bytes, int]:
    """The bytes before and behind a name of such a length in the header of a record, and the length of the header."""
    head, begin = header(bytes(name_nbytes), int(filled), at, alignment=ALIGNMENT)
    return head[: LOCAL.itemsize], head[LOCAL.itemsize + name_nbytes :], begin - at


def _match_records(
    entries: bytes,
    count: int,
    directory: int,
    *,
    whole: bytes,
    source: Source,
    key: str,
    start: int,
) -> _MatchedRecords | None:
    """Compare the directory and the headers of the records with those of torch's writer.

    Args:
        entries: The central directory.
        count: How many entries it has.
        directory: Where it begins, counted from the start of the matched.
        whole: All bytes of the archive; empty if they were not read.
        source: Where other bytes of the archive are read from.
        key: The file of the matched.
        start: Where the archive begins in the file.

    Returns:
        The records; None if anything is different.
    """
    matched = _MatchedRecords([], array("q"), array("q"), array("q"), array("q"))
    unpack, fixed_nbytes = SHORT_ENTRY.unpack_from, SHORT_ENTRY.size
    last_position = len(entries) - fixed_nbytes
    position = place = edge = 0
    descriptor = b""
    """The descriptor of the record before, which begins at `edge`."""
    for first in range(0, count, TOGETHER):
        rows: list[tuple[bytes, int, int, int, int, bytes, int]] = []
        """For each record: name, first byte, length, checksum, header, the bytes before the first byte, and their start."""
        # Few functions are called for a record: this is done for each of a million.
        for _ in range(first, min(first + TOGETHER, count)):
            if position > last_position:
                return None
            fixed, crc, nbytes, content, length, blank, offset = unpack(entries, position)
            name_start = position + fixed_nbytes
            name = entries[name_start : name_start + length]
            opening, padding, head_nbytes = _frame(length, place % ALIGNMENT, nbytes > 0)
            begin = place + head_nbytes
            if (
                fixed != (FILLED if nbytes else EMPTY)
                or nbytes != content
                or blank != NO_BLOCK
                or offset != place
                or begin > directory
                or (crc and not nbytes)
            ):
                return None
            known_crc = crc if crc or not nbytes else NO_CRC
            before = descriptor + opening + name + padding
            rows.append((name, begin, nbytes, known_crc, place, before, edge))
            edge = place = begin + nbytes
            descriptor = b""
            if nbytes:
                # Checksum and sizes stand there as they do in the entry.
                descriptor = SIGNATURE + entries[position + 16 : position + 28]
                place += SHORT_DESCRIPTOR.size
            position = name_start + length
        names, starts, nbytes_column, crcs, headers, expected, edges = zip(*rows, strict=True)
        if first + TOGETHER >= count:
            if position != len(entries) or place != directory:
                return None
            # The descriptor of the last record stands before no other.
            expected, edges = (*expected, descriptor), (*edges, edge)
            edge_stops = (*starts, place)
        else:
            edge_stops = starts
        if whole:
            is_equal = all(map(whole.startswith, expected, edges))
        else:
            is_equal = _lie_in_file(
                expected, edges, edge_stops, source=source, key=key, start=start
            )
        if not is_equal:
            return None
        matched.names.extend(names)
        matched.starts.extend(starts)
        matched.nbytes.extend(nbytes_column)
        matched.crcs.extend(crcs)
        matched.headers.extend(headers)
    return matched


def _lie_in_file(
    expected: Sequence[bytes],
    starts: Sequence[int],
    stops: Sequence[int],
    *,
    source: Source,
    key: str,
    start: int,
) -> bool:
    """Return whether ranges of the archive that begins at `start` of a file hold the expected bytes."""
    groups = [*coalesce(np.array(starts), np.array(stops), HEADERS).tolist(), len(stops)]
    for first, last in pairwise(groups):
        base = starts[first]
        data = source.bytes(key, start + base, start + stops[last - 1])
        positions = [offset - base for offset in starts[first:last]]
        if not all(map(data.startswith, expected[first:last], positions)):
            return False
    return True


def _name_records(records: _MatchedRecords, start: int) -> Archive | None:
    """Return the archive; None if the names of its records need the strict reader."""
    together, count = b"\0".join(records.names), len(records.names)
    folder, slash, _ = records.names[0].partition(b"/")
    root = folder + slash
    is_one_folder = together.startswith(root) and together.count(b"\0" + root) == count - 1
    has_folders = together.endswith(b"/") or b"/\0" in together
    if not slash or not is_one_folder or not together.isascii() or has_folders:
        return None

    text = together.decode("ascii")
    rows = dict(zip(text.split("\0"), range(count), strict=False))
    folded_text = text.casefold()
    folded_count = len(rows if folded_text == text else {*folded_text.split("\0")})
    if text.count("\0") != count - 1 or folded_count != count or layout.unsafe(text):
        return None
    starts, headers = records.starts, records.headers
    if start:
        starts = array("q", [start + offset for offset in starts])
        headers = array("q", [start + offset for offset in headers])
    columns = starts, records.nbytes, records.crcs, bytes(count), headers, records.nbytes
    return Archive(Records(rows, *columns), root.decode("ascii"))


BATCH_NBYTES = 4 << 20
"""Bytes that are checked together: enough to make the cost of a numpy call vanish, and little memory."""


def locate_payloads(
    source: Source, entries: Entries, directory: int, *, key: str, start: int
) -> Ints:
    """Check every local header and descriptor; give where each payload begins, counted from the archive's start.

    `directory` is where the central directory begins, counted from `start`, the archive's place in the file.

        header of i         name  extra   payload of i      descriptor of i │ header of i+1 …
        │       30        │  n  │   x   │  packed (known) │   0, 16 or 24   │
        └──────────────── offset[i + 1] - offset[i] (known) ────────────────┘

    The directory gives every header's offset and every payload's length. Records must lie end to end, so what is left of a
    record beside its payload, its name and the 30 bytes is the room for its extra field and its descriptor. Hence:

    1. Compute each record's room (they are sorted by offset); negative means overlap, more than an extra field means a gap.
    2. Plan reads: for each record its header and up to 24 bytes before it, where the descriptor of the record before lies.
       Neighbours are joined into blocks. Payloads are not read, apart from small ones between joined neighbours.
    3. Read block after block; when some megabytes are together, check all their headers at once, column by column.

    What writers do, beside the plain case of equal fields:

        torch     described:  crc and sizes 0, descriptor after the payload; sizes 0 even beside a zip64 block of
                              [size, 0] if size >= 0xFFFFFFFF, then [offset] if offset >= 0xFFFFFFFF
                  empty:      not described, no descriptor; zip64 block [offset] as above
        CPython   seekable:   true fields, or both sizes saturated and a zip64 block [size, packed]
                  stream:     described, fields 0, or sizes saturated and a zip64 block [0, 0]
        CPython before 3.11.4, and numpy.savez with it, where the size was not known to be small:
                  seekable:   true fields, and a zip64 block [size, packed] that repeats them
                  stream:     described, fields 0, and a zip64 block [0, 0]

    In all of them the descriptor is 24 bytes long if the local header has a zip64 block and 16 bytes if it has none.
    """
    count = len(entries.offsets)
    edges = np.concatenate((entries.offsets, (directory,)))
    if edges[0] != 0:
        raise refused(
            f"{edges[0]} bytes before the first record", key=key, offset=start, found=int(edges[0])
        )
    fixed = LOCAL.itemsize + np.fromiter(map(len, entries.raw_names), np.int64, count)
    rooms = edges[1:] - edges[:-1] - entries.packed - fixed
    headers = FieldOffsets(key, entries.offsets + start)
    headers.require(rooms >= 0, "a record that overlaps the next or the directory")
    headers.require(rooms <= MAX16 + WIDE.itemsize, "bytes that belong to no record after this one")

    # One range more than there are records: the descriptor of the last lies before the directory.
    starts = np.maximum(edges - WIDE.itemsize, 0)
    stops = edges.copy()
    stops[:-1] += fixed + np.minimum(rooms, MAX16)
    groups = [*coalesce(starts, stops, HEADERS).tolist(), count + 1]
    firsts, lasts = starts[groups[:-1]].tolist(), stops[np.array(groups[1:]) - 1].tolist()
    check = _Check(entries, edges, fixed, rooms=rooms, key=key, start=start)
    pieces: list[bytes] = []
    held, done = 0, 0
    for group, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        pieces.append(source.bytes(key, start + first, start + last))
        check.shifts[groups[group] : groups[group + 1]] = held - first
        held += last - first
        if held >= BATCH_NBYTES or group == len(firsts) - 1:
            check.batch(b"".join(pieces), done, groups[group + 1])
            held, done = 0, groups[group + 1]
            pieces.clear()
    return check.payloads


class _Check:
    """The checks of all records, batch by batch."""

    def __init__(
        self, entries: Entries, edges: Ints, fixed: Ints, *, rooms: Ints, key: str, start: int
    ) -> None:
        self.entries, self.edges, self.fixed, self.rooms = entries, edges, fixed, rooms
        self.key, self.start = key, start
        self.shifts = np.zeros(len(edges), np.int64)
        """Position in the batch minus offset in the archive, for each range."""
        self.payloads = np.zeros(len(fixed), np.int64)
        self.widths = np.zeros(len(fixed), np.int64)
        """Bytes of each record's descriptor."""

    def batch(self, raw: bytes, first: int, stop: int) -> None:
        """Check the headers of ranges `first` to `stop`, and the descriptors that lie before those headers."""
        self._headers(raw, slice(first, min(stop, len(self.payloads))))
        self._descriptors(raw, np.arange(max(first, 1), stop) - 1)

    def _headers(self, raw: bytes, rows: slice) -> None:
        entries = self.entries
        offsets = entries.offsets[rows]
        headers = FieldOffsets(self.key, offsets + self.start)
        positions = offsets + self.shifts[:-1][rows]
        fields = gather(raw, positions, LOCAL)
        headers.require(
            fields["signature"] == layout.LOCAL_SIGNATURE,
            "no local header where the directory says",
        )
        headers.require(
            fields["flags"] == entries.flags[rows], "two different sets of flags for one record"
        )
        headers.require(
            fields["method"] == entries.methods[rows], "two different methods for one record"
        )
        names = entries.raw_names[rows]
        same = np.array(
            [*map(raw.startswith, names, (positions + LOCAL.itemsize).tolist())], np.bool_
        )
        fixed = self.fixed[rows]
        same &= fields["name_nbytes"] == fixed - LOCAL.itemsize
        headers.require(same, "two different names for one record")
        extra = fields["extra_nbytes"].astype(np.int64)
        headers.require(extra <= self.rooms[rows], "an extra field that reaches into the payload")
        starts = positions + fixed
        bodies, nbytes = layout.find_zip64(
            raw, starts, starts + extra, known=layout.LOCAL_BLOCKS, places=headers
        )
        described = entries.flags[rows] & layout.DESCRIBED != 0
        good = _consistent(raw, fields, entries, rows=rows, bodies=bodies, nbytes=nbytes)
        headers.require(good, "two different checksums or sizes for one record")
        widths = np.where(described, np.where(bodies >= 0, WIDE.itemsize, NARROW.itemsize), 0)
        left = self.rooms[rows] - extra
        headers.require(left >= widths, "no room for a record's data descriptor")
        headers.require(left == widths, "bytes that belong to no record after this one")
        self.payloads[rows] = offsets + fixed + extra
        self.widths[rows] = widths

    def _descriptors(self, raw: bytes, rows: Ints) -> None:
        for dtype in (NARROW, WIDE):
            chosen = rows[self.widths[rows] == dtype.itemsize]
            ends = self.edges[chosen + 1]
            fields = gather(raw, ends + self.shifts[chosen + 1] - dtype.itemsize, dtype)
            good = (
                (fields["signature"] == layout.DESCRIPTOR_SIGNATURE)
                & (fields["crc"] == self.entries.crcs[chosen])
                & (fields["packed"] == self.entries.packed[chosen].astype(np.uint64))
                & (fields["size"] == self.entries.sizes[chosen].astype(np.uint64))
            )
            offsets = ends - dtype.itemsize + self.start
            FieldOffsets(self.key, offsets).require(
                good, "a data descriptor that disagrees with the directory"
            )


def _consistent(
    raw: bytes, fields: np.ndarray, entries: Entries, *, rows: slice, bodies: Ints, nbytes: Ints
) -> Bools:
    """Whether checksum and sizes of local headers are one of the forms in the module's docstring."""
    crcs, sizes, packed, offsets = (
        entries.crcs[rows],
        entries.sizes[rows],
        entries.packed[rows],
        entries.offsets[rows],
    )
    described = entries.flags[rows] & layout.DESCRIBED != 0
    wide = bodies >= 0
    zeros = (fields["size"] == 0) & (fields["packed"] == 0)
    equal = (fields["size"] == sizes) & (fields["packed"] == packed)
    small = (sizes < MAX32) & (packed < MAX32)
    good: Bools = ~wide & small & (equal | (described & zeros))
    if wide.any():
        values = np.zeros((3, len(bodies)), np.int64)
        for column in range(3):
            there = nbytes >= 8 * (column + 1)
            # Past 2^63 these wrap to negative numbers, which equal nothing that they are compared with.
            values[column, there] = gather(raw, bodies[there] + 8 * column, layout.VALUE)[
                "value"
            ].astype(np.int64)
        saturated = (fields["size"] == MAX32) & (fields["packed"] == MAX32)
        stated = (values[0] == sizes) & (values[1] == packed)
        zeroed = described & (values[0] == 0) & (values[1] == 0)
        standard = saturated & (nbytes == 16) & (stated | zeroed)
        # CPython before 3.11.4 repeats in the block what the fields state: the sizes in a file that it
        # can seek in, and zeros in a pipe. Both must agree, so no reader can see anything else.
        repeated = (nbytes == 16) & np.where(described, zeros & zeroed, equal & stated)
        long_size, long_offset = sizes >= MAX32, offsets >= MAX32
        torch = (
            zeros
            & (described | (sizes == 0))
            & (nbytes > 0)
            & (nbytes == 16 * long_size + 8 * long_offset)
        )
        torch &= ~long_size | ((values[0] == sizes) & (values[1] == 0))
        torch &= ~long_offset | (np.where(long_size, values[2], values[0]) == offsets)
        good |= wide & (standard | repeated | torch)
    good &= (fields["crc"] == crcs) | (described & (fields["crc"] == 0))
    return good


def read_archive(
    source: Source, key: str, *, start: int = 0, stop: int | None = None, fold_case: bool = True
) -> Archive:
    """Read which records the archive in bytes `start` to `stop` of a file has, and where they lie.

    With `fold_case=False` names may differ in case alone: torch sees one record there, and numpy two.

    Raises `ZipError` for an archive that two readers could see differently, `Truncated` for one that was cut short and
    `LimitExceeded` for one with a larger directory than the source's limits allow.
    """
    size = source.store.size(key)
    if stop is None:
        stop = size
    if not 0 <= start <= stop:
        raise refused(f"it cannot lie from byte {start} to byte {stop}", key=key, offset=start)
    if stop > size:
        raise Truncated(
            f"zip archive: it should end at byte {stop}, the file has {size}", file=key, offset=size
        )
    usual = read_canonical(source, key, start=start, stop=stop)
    if usual is not None:
        return usual
    directory, nbytes, count = layout.read_tail(source, key, start=start, stop=stop)
    raw = source.bytes(key, start + directory, start + directory + nbytes)
    entries = layout.read_entries(raw, count, directory, key=key, start=start, fold_case=fold_case)
    payloads = locate_payloads(source, entries, directory, key=key, start=start)
    return _archive(entries, payloads, start)


def _archive(entries: Entries, payloads: Ints, start: int) -> Archive:
    """The archive without folders, with positions counted from the start of the file."""
    names = entries.names
    rows: Sequence[int] = range(len(names))
    if entries.folders.any():
        rows = np.flatnonzero(~entries.folders).tolist()
        names = [names[row] for row in rows]
    crcs = np.where((entries.crcs == 0) & (entries.sizes > 0), NO_CRC, entries.crcs)
    columns = (
        payloads + start,
        entries.packed,
        crcs,
        entries.methods,
        entries.offsets + start,
        entries.sizes,
    )
    records = Records(dict(zip(names, rows, strict=True)), *(column.data for column in columns))
    return Archive(records, _find_root(names))


def _find_root(names: list[str]) -> str:
    """Return the top folder of all names with its slash, or nothing.

    >>> _find_root(["archive/data.pkl", "archive/data/0"]), _find_root(["a/x", "b/x"]), _find_root(["x"]), _find_root([])
    ('archive/', '', '', '')
    """
    folder, slash, _ = names[0].partition("/") if names else ("", "", "")
    root = folder + slash
    return root if slash and all(name.startswith(root) for name in names) else ""


def record_bytes(source: Source, key: str, record: ZipRecord, most: int | None = None) -> bytes:
    """Return the content of a record that is stored plainly, after a comparison with its checksum.

    Args:
        most: The largest number of bytes that is allowed, `Limits.pickle_nbytes` for a pickle.
    """
    if record.method != 0:
        raise ZipError(
            f"the record {record.name!r} is compressed; torch stores it plainly",
            offset=record.header,
        )
    if most is not None and record.nbytes > most:
        message = f"{record.name} is {record.nbytes:,} bytes, above Limits(pickle_nbytes={most:,})"
        raise LimitExceeded(message, expected=most, found=record.nbytes)
    data = source.bytes(key, record.start, record.start + record.nbytes)
    if record.crc32 is not None and crc32(data) != record.crc32:
        message = (
            f"the record {record.name!r} does not have the checksum that the archive records for it"
        )
        raise Corrupted(message, offset=record.start, expected=record.crc32, found=crc32(data))
    return data


BLOCK_NBYTES = 1 << 20
"""Bytes that are read, and that are inflated, at a time."""


def inflated_crc(
    source: Source, key: str, place: tuple[int, int], *, content_nbytes: int
) -> int | None:
    """The CRC-32 of what bytes `place` (start, stop) of a file inflate to; None where they do not, or to another length.

    Never inflates more than a block beyond `content_nbytes`, however well the bytes were packed.
    """
    start, stop = place
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    total = done = 0
    waiting = b""
    while not stream.eof and done <= content_nbytes:
        if not waiting and start < stop:
            waiting = source.bytes(key, start, min(start + BLOCK_NBYTES, stop))
            start += len(waiting)
        ended = not waiting
        try:
            content = stream.decompress(waiting, BLOCK_NBYTES)
        except zlib.error:
            return None
        if ended and not content:
            return None
        waiting = stream.unconsumed_tail
        total, done = crc32(content, total), done + len(content)
    return total if done == content_nbytes and start == stop and not stream.unused_data else None
