"""`.npy`: one array. `.npz`: a zip of them, stored or compressed.

An array in Fortran's order is a view: its strides run the other way. The archive records a checksum of each member, header and
elements together; what the elements alone sum to follows from it and from the header, so that a tensor is checked as it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.crc import crc32, rest_of
from holdfast.core.opaque import Global, Opaque
from holdfast.core.protocols import Description, Source
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import LONE_TENSOR_NAME
from holdfast.core.value import Value
from holdfast.engine.files import ViewTable
from holdfast.errors import Corrupted, FormatError, HeaderError, Unsupported, ZipError, located
from holdfast.formats.npy.archive import EMPTY, MAGIC, SUFFIX
from holdfast.formats.npy.inflated import InflatedMembers, inflate_head
from holdfast.formats.npy.schema import NEAR_NBYTES, Layout, read_layout
from holdfast.formats.zip.layout import ZipRecord
from holdfast.formats.zip.reader import read_archive

TORCH_NAMES = ("data.pkl", "constants.pkl")
"""Records by which torch knows an archive of its own."""


def describe_npy(source: Source) -> Description:
    """One array: it is called `tensor`, as one that stands alone in a file of torch is."""
    (key,) = source.store.list()
    nbytes = source.store.size(key)
    with located(file=key):
        layout, _ = _parse_layout(lambda most: source.bytes(key, 0, min(most, nbytes)), nbytes, source)
    storage = Storage(key, layout.data_start, layout.nbytes, layout.byteorder, home=source.store)
    chunk = Chunk(Box.whole(layout.shape), storage, 0, _strides(layout))
    tensor = LazyTensor(LONE_TENSOR_NAME, layout.dtype, layout.shape, (chunk,), source)
    return Description("npy", ViewTable({tensor.name: tensor}), tensor, notes=_guesses([layout]))


def describe_npz(source: Source) -> Description:
    (key,) = source.store.list()
    if source.store.size(key) == len(EMPTY):
        return Description("npz", ViewTable({}), {})
    return Members(source, key).describe()


class Head(Value, frozen=True):
    layout: Layout
    crc32: int
    """Of the header."""
    box: Box
    strides: tuple[int, ...]


class Members:
    """Reads what an archive holds."""

    def __init__(self, source: Source, key: str) -> None:
        self._source, self._key = source, key
        archive = read_archive(source, key, fold_case=False)
        self._records = list(archive.records.values())
        self._inflated: InflatedMembers | None = None
        self._through = source
        """What reads the members; where some are compressed, it has these as files of their own."""
        if not all(record.stored for record in self._records):
            self._inflated = InflatedMembers(source.store, source.limits)
            self._through = source.over(self._inflated)
        self._heads: dict[tuple[bytes, int], Head] = {}
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
                raise ZipError(f"two members of one name, {name[:80]!r} with and without {SUFFIX}", file=self._key)
            with located(file=self._key, tensor=name):
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
            notes.append(f"{compressed:,} members are compressed: reading any part of one inflates all of it")
        table = ViewTable(tensors)
        return Description("npz", table, table if len(tensors) == len(tree) else tree, notes=tuple(notes))

    def _refuse_torch(self) -> None:
        """An archive of which torch would load something else than we show."""
        for record in self._records:
            if record.name.rpartition("/")[2].lower() in TORCH_NAMES:
                raise FormatError(
                    f"the archive is an .npz and has {record.name[:80]!r}, by which torch knows a checkpoint of its own: it was "
                    "made to show one thing and load another; `holdfast scan` shows what both would do",
                    file=self._key,
                )

    def _member(self, name: str, record: ZipRecord) -> tuple[LazyTensor, Layout] | Opaque:
        """A member as a tensor; what is none as it is, with the reason."""
        near = self._first(record, NEAR_NBYTES)
        if not near.startswith(MAGIC):
            return Opaque(Global("numpy", "bytes_"), (f"{record.content_nbytes:,} bytes that are no array",))
        try:
            head = self._head(record, near)
        except Unsupported as error:
            return Opaque(Global("numpy", "ndarray"), (error.message,))
        layout = head.layout
        start, nbytes = layout.data_start, layout.nbytes
        crc = None if record.crc32 is None else rest_of(record.crc32, head.crc32, nbytes)
        if self._inflated is None or record.stored:
            key, start = self._key, record.start + start
        else:
            key = self._inflated.add(self._key, record)
        home = self._through.store
        storage = Storage(key, start, nbytes, layout.byteorder, crc if nbytes else None, label=record.name, home=home)
        chunk = Chunk(head.box, storage, 0, head.strides)
        return LazyTensor(name, layout.dtype, layout.shape, (chunk,), self._through), layout

    def _head(self, record: ZipRecord, near: bytes) -> Head:
        """The header of a member. Members of one shape and dtype have the same bytes there, which are understood once."""
        known = self._heads.get((near[:128], record.content_nbytes))
        if known is not None and known.layout.data_start <= 128:
            return known
        layout, header = _parse_layout(lambda most: self._first(record, most), record.content_nbytes, self._source)
        head = Head(layout, crc32(header), Box.whole(layout.shape), _strides(layout))
        if len(self._heads) < MOST_HEADS:
            self._heads[near[:128], record.content_nbytes] = head
        return head

    def _first(self, record: ZipRecord, nbytes: int) -> bytes:
        """The first bytes of a member's content."""
        if record.stored:
            return self._bytes(record.start, record.start + min(nbytes, record.nbytes))
        # Stored blocks and tables come before what they stand for; a header of a hundred bytes does not need a thousand.
        packed = self._bytes(record.start, record.start + min(nbytes + PACKED_NBYTES, record.nbytes))
        wanted = min(nbytes, record.content_nbytes)
        found = inflate_head(packed, wanted)
        if len(found) < wanted:
            raise Corrupted("the compressed bytes of this member do not inflate: get the file again", offset=record.start)
        return found

    def _bytes(self, start: int, stop: int) -> bytes:
        """A range of the file. Where members are short, what follows is read along, for those behind it."""
        at = start - self._ahead_at
        if at < 0 or stop - self._ahead_at > len(self._ahead):
            near = 0 <= start - self._last < NEXT_NBYTES
            reach = min(max(stop, start + AHEAD_NBYTES), self._source.store.size(self._key)) if near else stop
            self._ahead, self._ahead_at, at = self._source.bytes(self._key, start, reach), start, 0
        self._last = start
        return self._ahead[at : at + stop - start]


NEXT_NBYTES, AHEAD_NBYTES = 4 << 10, 64 << 10
"""How near the next member must be for reading ahead, and how far."""

MOST_HEADS = 10_000
"""Headers that are remembered."""

PACKED_NBYTES = 1 << 10
"""Packed bytes that are read for the first bytes of content, beyond their number."""


def _parse_layout(first: Callable[[int], bytes], nbytes: int, source: Source) -> tuple[Layout, bytes]:
    """The layout of so many bytes, of which `first` gives the first so many; and the header that says so."""
    head = first(NEAR_NBYTES)
    found = read_layout(head, nbytes, rank=source.limits.rank)
    if isinstance(found, int):
        head = first(found)
        found = read_layout(head, nbytes, rank=source.limits.rank)
    if isinstance(found, int):
        raise HeaderError("the header is longer than it says", expected=found, found=len(head))
    return found, head[: found.data_start]


def _strides(layout: Layout) -> tuple[int, ...]:
    """In bits; of an array in Fortran's order they run the other way."""
    shape, bits = layout.shape, layout.dtype.bits
    return tuple(reversed(c_strides(shape[::-1], bits))) if layout.fortran else c_strides(shape, bits)


def _guesses(layouts: Iterable[Layout]) -> tuple[str, ...]:
    found = {layout.guessed: layout.dtype for layout in layouts if layout.guessed}
    return tuple(f"numpy has no name for some elements ({code}); they are read as {dtype}" for code, dtype in sorted(found.items()))
