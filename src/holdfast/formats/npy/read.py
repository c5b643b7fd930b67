"""`.npy`: one array. `.npz`: a zip of them, stored or compressed.

An array in Fortran's order is a view with reversed strides. The archive has a checksum of each member: header and elements.
The checksum of the elements follows from it and from the header, so that a tensor is checked as it is read.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.crc import compute_second_crc, crc32
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.protocols import Description, Source, Stamp, Store
from holdfast.core.runtime import PortableMethod, make_fork_safe
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import LONE_TENSOR_NAME
from holdfast.engine.files import ViewTable
from holdfast.errors import (
    Corrupted,
    FormatError,
    HeaderError,
    LimitExceeded,
    StoreError,
    Unsupported,
    ZipError,
    error_context,
)
from holdfast.formats.npy.archive import EMPTY, MAGIC, SUFFIX
from holdfast.formats.npy.schema import USUAL_NBYTES, Layout, read_layout
from holdfast.formats.zip.layout import ZipRecord
from holdfast.formats.zip.reader import read_archive
from holdfast.stores.virtual import ContentCache, Virtual, VirtualFile

CACHE_NBYTES = 256 << 20
"""Inflated members that stay in memory beyond the last one, so that the blocks of a member are read from one inflation."""

BLOCK_NBYTES = 1 << 20

LOCKS = 16
"""Threads that may inflate at the same time. Every member has one of the locks, so that it is inflated once."""

MADE_NBYTES = 1 << 20

FREE_NBYTES = 16 << 20
"""The most bytes of a member with any packed size."""


def member_key(key: str, record: ZipRecord) -> str:
    return f"{key}@{record.start}"


class InflatedMembers(Virtual):
    """The store of an archive, with each compressed member as one more file, which is not listed.

        weights.npz@4711     the member at byte 4711, inflated

    Deflate cannot be read by range: a member is inflated whole, and the last few stay in memory. The archive has its length, which
    is never exceeded. A member that is many times its packed size is refused when the archive is opened.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        super().__init__(over=store)
        self._store = store
        self._limits = limits
        self._cache = ContentCache(CACHE_NBYTES)
        self._locks = _locks()

    def add(self, key: str, record: ZipRecord) -> str:
        """Add a member as a file, and give its name. Raises `LimitExceeded` if it is many times its packed size."""
        most = max(self._limits.inflation * record.nbytes, FREE_NBYTES)
        if record.content_nbytes > most:
            raise LimitExceeded(
                f"{record.name!r} inflates from {record.nbytes:,} to {record.content_nbytes:,} bytes, more than "
                f"Limits(inflation={self._limits.inflation}) allows; raise it if you trust the file",
                file=key, offset=record.start, expected=most, found=record.content_nbytes,
            )  # fmt: skip
        nbytes, read = record.content_nbytes, partial(PortableMethod(self._read), key, record)
        entry = VirtualFile(
            nbytes,
            read,
            partial(PortableMethod(self._stamp), key, record),
            read_nbytes=record.nbytes,
        )
        return self.put(entry, member_key(key, record))

    def __getstate__(self) -> object:
        state = super().__getstate__()
        return (
            {name: part for name, part in state.items() if name != "_locks"}
            if isinstance(state, dict)
            else state
        )

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._locks = _locks()

    def close(self) -> None:
        self._cache.clear()
        super().close()

    def _stamp(self, key: str, record: ZipRecord) -> Stamp:
        return key, record.start, record.nbytes, self._store.stamp(key)

    def _read(self, key: str, record: ZipRecord, start: int, out: memoryview) -> None:
        with self._locks[record.start % LOCKS]:
            content = self._cache.get(record)
            if content is None:
                content = self._inflate(key, record)
                self._cache.put(record, content)
        out[:] = content.data[start : start + out.nbytes]

    def _inflate(self, key: str, record: ZipRecord) -> np.ndarray:
        try:
            content = np.empty(record.content_nbytes, np.uint8)
        except MemoryError:
            message = f"no memory for a member of {record.content_nbytes:,} bytes, which must be inflated whole"
            raise StoreError(message, file=key) from None
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        done, at, waiting = 0, record.start, b""
        while not stream.eof:
            if not waiting and at < record.stop:
                packed = bytearray(min(BLOCK_NBYTES, record.stop - at))
                self._store.read(key, at, memoryview(packed))
                waiting, at = bytes(packed), at + len(packed)
            made = _inflated(stream, waiting, min(content.nbytes - done + 1, MADE_NBYTES))
            stuck = not made and stream.unconsumed_tail == waiting and not stream.eof
            if made is None or stuck or done + len(made) > content.nbytes:
                break
            content[done : done + len(made)] = np.frombuffer(made, np.uint8)
            done, waiting = done + len(made), stream.unconsumed_tail
        if not stream.eof or done != content.nbytes or at != record.stop or stream.unused_data:
            message = f"the compressed bytes of {record.name!r} do not inflate to the {content.nbytes:,} bytes that they should"
            raise Corrupted(f"{message}: get the file again", file=key, offset=record.start)
        return content


def _locks() -> list[threading.Lock]:
    return [make_fork_safe(threading.Lock()) for _ in range(LOCKS)]


def _inflated(stream: zlib._Decompress, packed: bytes, most: int) -> bytes | None:
    try:
        return stream.decompress(packed, most)
    except zlib.error:
        return None


def inflate_head(packed: bytes, most: int) -> bytes:
    """The first bytes of a member that begins with these packed bytes; none for bytes that were not deflated."""
    return _inflated(zlib.decompressobj(-zlib.MAX_WBITS), packed, most) or b""


TORCH_NAMES = ("data.pkl", "constants.pkl")
"""Records of torch's own archives."""


def describe_npy(source: Source) -> Description:
    """One array. Its name is `tensor`, like that of a lone tensor in a file of torch."""
    (key,) = source.store.list()
    nbytes = source.store.size(key)
    with error_context(file=key):
        layout, _ = _parse_layout(
            lambda most: source.bytes(key, 0, min(most, nbytes)), nbytes, source
        )
    storage = Storage(key, layout.data_start, layout.nbytes, layout.byteorder, home=source.store)
    chunk = Chunk(Box.whole(layout.shape), storage, 0, _strides(layout))
    tensor = LazyTensor(LONE_TENSOR_NAME, layout.dtype, layout.shape, (chunk,), source)
    return Description("npy", ViewTable({tensor.name: tensor}), tensor, notes=_guesses([layout]))


def describe_npz(source: Source) -> Description:
    (key,) = source.store.list()
    if source.store.size(key) == len(EMPTY):
        return Description("npz", ViewTable({}), {})
    return Members(source, key).describe()


class Members:
    def __init__(self, source: Source, key: str) -> None:
        self._source, self._key = source, key
        archive = read_archive(source, key, fold_case=False)
        self._records = list(archive.records.values())
        self._inflated: InflatedMembers | None = None
        self._through = source
        """The source of the members, with compressed members as files of their own."""
        if not all(record.stored for record in self._records):
            self._inflated = InflatedMembers(source.store, source.limits)
            self._through = source.with_store(self._inflated)
        self._heads: dict[tuple[bytes, int], tuple[Layout, int, Box, tuple[int, ...]]] = {}
        self._ahead, self._ahead_at, self._last = b"", 0, -NEXT_NBYTES

    def describe(self) -> Description:
        self._refuse_torch()
        tree: dict[object, object] = {}
        tensors: dict[str, LazyTensor] = {}
        layouts: dict[int, Layout] = {}
        notes: list[str] = []
        for record in self._records:
            name = record.name.removesuffix(SUFFIX)
            if name in tree:
                raise ZipError(
                    f"two members of one name, {name[:80]!r} with and without {SUFFIX}",
                    file=self._key,
                )
            with error_context(file=self._key, tensor=name):
                found = self._member(name, record)
            tree[name] = found if isinstance(found, Opaque) else found[0]
            if isinstance(found, Opaque):
                notes.append(f"{name}: not read: {found.args[0]}")
            else:
                tensors[name] = found[0]
                layouts[id(found[1])] = found[1]
        notes += _guesses(layouts.values())
        compressed = sum(not record.stored for record in self._records)
        if compressed:
            notes.append(
                f"{compressed:,} members are compressed; reading a slice decompresses the whole member"
            )
        table = ViewTable(tensors)
        return Description(
            "npz", table, table if len(tensors) == len(tree) else tree, notes=tuple(notes)
        )

    def _refuse_torch(self) -> None:
        for record in self._records:
            if record.name.rpartition("/")[2].lower() in TORCH_NAMES:
                raise FormatError(
                    f"the archive is an .npz and has {record.name[:80]!r}, by which torch knows a checkpoint of its own: it was "
                    "made to show one thing and load another; `holdfast scan` shows what both would do",
                    file=self._key,
                )

    def _member(self, name: str, record: ZipRecord) -> tuple[LazyTensor, Layout] | Opaque:
        """A member as a tensor; an `Opaque` with the reason if it is none."""
        first = self._first(record, USUAL_NBYTES)
        if not first.startswith(MAGIC):
            return Opaque(
                Global("numpy", "bytes_"), (f"{record.content_nbytes:,} bytes that are no array",)
            )
        try:
            layout, header_crc, box, strides = self._head(record, first)
        except Unsupported as error:
            return Opaque(Global("numpy", "ndarray"), (error.message,))
        start, nbytes = layout.data_start, layout.nbytes
        crc = None if record.crc32 is None else compute_second_crc(record.crc32, header_crc, nbytes)
        if self._inflated is None or record.stored:
            key, start = self._key, record.start + start
        else:
            key = self._inflated.add(self._key, record)
        home = self._through.store
        storage = Storage(
            key,
            start,
            nbytes,
            layout.byteorder,
            crc if nbytes else None,
            label=record.name,
            home=home,
        )
        chunk = Chunk(box, storage, 0, strides)
        return LazyTensor(name, layout.dtype, layout.shape, (chunk,), self._through), layout

    def _head(self, record: ZipRecord, first: bytes) -> tuple[Layout, int, Box, tuple[int, ...]]:
        """Layout, checksum of the header, box and strides of a member. Members of one shape and dtype have equal headers."""
        known = self._heads.get((first[:128], record.content_nbytes))
        if known is not None and known[0].data_start <= 128:
            return known
        layout, header = _parse_layout(
            lambda most: self._first(record, most), record.content_nbytes, self._source
        )
        head = layout, crc32(header), Box.whole(layout.shape), _strides(layout)
        if len(self._heads) < MOST_HEADS:
            self._heads[first[:128], record.content_nbytes] = head
        return head

    def _first(self, record: ZipRecord, nbytes: int) -> bytes:
        if record.stored:
            return self._bytes(record.start, record.start + min(nbytes, record.nbytes))
        # Stored blocks and tables come before what they stand for; a header of a hundred bytes does not need a thousand.
        packed = self._bytes(
            record.start, record.start + min(nbytes + PACKED_NBYTES, record.nbytes)
        )
        wanted = min(nbytes, record.content_nbytes)
        found = inflate_head(packed, wanted)
        if len(found) < wanted:
            raise Corrupted(
                "the compressed bytes of this member do not inflate: get the file again",
                offset=record.start,
            )
        return found

    def _bytes(self, start: int, stop: int) -> bytes:
        at = start - self._ahead_at
        if at < 0 or stop - self._ahead_at > len(self._ahead):
            close = 0 <= start - self._last < NEXT_NBYTES
            reach = (
                min(max(stop, start + AHEAD_NBYTES), self._source.store.size(self._key))
                if close
                else stop
            )
            self._ahead, self._ahead_at, at = self._source.bytes(self._key, start, reach), start, 0
        self._last = start
        return self._ahead[at : at + stop - start]


NEXT_NBYTES, AHEAD_NBYTES = 4 << 10, 64 << 10
"""The most bytes between two members for reading ahead, and the bytes to read."""

MOST_HEADS = 10_000

PACKED_NBYTES = 1 << 10


def _parse_layout(
    first: Callable[[int], bytes], nbytes: int, source: Source
) -> tuple[Layout, bytes]:
    head = first(USUAL_NBYTES)
    found = read_layout(head, nbytes, rank=source.limits.rank)
    if isinstance(found, int):
        head = first(found)
        found = read_layout(head, nbytes, rank=source.limits.rank)
    if isinstance(found, int):
        raise HeaderError("the header is longer than it says", expected=found, found=len(head))
    return found, head[: found.data_start]


def _strides(layout: Layout) -> tuple[int, ...]:
    shape, bits = layout.shape, layout.dtype.bits
    return (
        tuple(reversed(c_strides(shape[::-1], bits))) if layout.fortran else c_strides(shape, bits)
    )


def _guesses(layouts: Iterable[Layout]) -> tuple[str, ...]:
    found = {layout.guessed: layout.dtype for layout in layouts if layout.guessed}
    return tuple(
        f"numpy has no name for some elements ({code}); they are read as {dtype}"
        for code, dtype in sorted(found.items())
    )
