"""One safetensors file: eight bytes of length, a JSON header, and the tensors without holes; and directories of them.

Opening costs one read of the header. A file of 100,000 tensors has a header of 10 MB, so it becomes columns (`core/table.py`); a
`LazyTensor` is made when it is asked for.

Files of a directory:

1. With an index, the files that it names: a `consolidated.safetensors` beside them is another copy.
2. Without an index, every `*.safetensors` at the top of the directory, as for transformers and torch.
3. Without any at the top, those in `sharded/`: torch's writer puts pieces there before it consolidates them.

Every tensor comes from one file, or from several files with pieces (`record`) that tile the whole.

The index is `model.safetensors.index.json`, as `transformers` and torch write it (`formats/index_file.py`). Holdfast adds a
record to its `metadata` and, where ranks saved pieces of tensors to a bucket, a list of all files (`holdfast.files`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain

from holdfast.core.chunk import Storage
from holdfast.core.protocols import Description, Source, Store
from holdfast.core.runtime import copied_together
from holdfast.core.table import ODD, FilePlace, Kind, Table
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value
from holdfast.engine.files import FileStorages
from holdfast.errors import Corrupted, HeaderError, LimitExceeded, Truncated, UnknownFormat, located
from holdfast.formats.index_file import (
    INDEX,
    WeightFiles,
    by_index,
    check_mapped,
    claimed_twice,
    other_copies,
    some,
)
from holdfast.formats.recorded import Recorded, restore
from holdfast.formats.safetensors.record import (
    MANIFEST,
    RECORD,
    SHARDING_INFO,
    HeaderRecord,
    join,
    read_record,
    saved_offsets,
)
from holdfast.formats.safetensors.schema import (
    PREFIX_NBYTES,
    ROWS,
    HeaderColumns,
    HeaderEntry,
    Outline,
    check_layout,
    parse_document,
)

SMALLEST_NBYTES = 2

LONGEST_CLAIM = 1 << 48
"""A first word above this is not a length but text, a pickle or a zip, which have no two zero bytes there."""

LFS_POINTER = b"version https://git-lfs"
"""The first bytes of the file that Git leaves in place of a large file."""


class Header(Value, frozen=True, dict=True):
    key: str
    data_start: int
    """The byte of the file that data offsets count from."""
    names: Sequence[str]
    metadata: dict[str, str]
    """The file's `__metadata__`, without the record."""
    columns: HeaderColumns
    record: HeaderRecord
    unknown_fields: Sequence[str]
    """Fields of its entries that the format does not define, each once."""

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The position of each tensor in the columns, for lookups one by one."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    def entry(self, name: str) -> HeaderEntry:
        at, columns = self.positions[name], self.columns
        begin = columns.starts[at] - self.data_start
        return HeaderEntry(
            *columns.outlines[columns.outline[at]], (begin, begin + columns.nbytes[at])
        )

    def storage(self, name: str, home: Store) -> Storage:
        at, columns = self.positions[name], self.columns
        crc32 = self.record.crcs[at] if self.record.crcs else None
        return Storage(
            self.key, columns.starts[at], columns.nbytes[at], crc32=crc32, label=name, home=home
        )


def header_table(
    headers: Sequence[Header], source: Source, places: Mapping[str, int | LazyTensor] | None = None
) -> Table:
    """The tensors of checked headers: all of one file, or those in `places`.

    A place is the number of a tensor that is whole, counted through all headers, or a tensor that was joined from pieces.
    """
    positions: dict[Outline, int] = {}
    kind = array("q")
    for header in headers:
        own = [positions.setdefault(outline, len(positions)) for outline in header.columns.outlines]
        # Those of the first file count alike.
        outline = header.columns.outline
        kind += array(
            "q", outline if own == [*range(len(own))] else [*map(own.__getitem__, outline)]
        )
    kinds = [Kind.plain(ROWS[code], shape) for code, shape in positions]
    storages = _storages(headers, source)
    if places is None:
        return Table(storages.names, kinds, kind, range(len(storages)), storages, {})
    storage = array(
        "q", [ODD if isinstance(place, LazyTensor) else place for place in places.values()]
    )
    odd = {row: place for row, place in enumerate(places.values()) if isinstance(place, LazyTensor)}
    chosen = (
        array("q", [kind[number] for number in storage])
        if kind
        else array("q", bytes(8 * len(storage)))
    )
    for row, place in odd.items():
        chosen[row] = len(kinds)
        kinds.append(Kind.of(place))
    return Table([*places], kinds, chosen, storage, storages, odd)


def _storages(headers: Sequence[Header], source: Source) -> FileStorages:
    names: Sequence[str] = (
        headers[0].names
        if len(headers) == 1
        else [name for header in headers for name in header.names]
    )
    file, start, nbytes, crcs = array("q"), array("q"), array("q"), array("q")
    for number, header in enumerate(headers):
        columns, count = header.columns, len(header.names)
        file += array("q", [number]) * count
        start += columns.starts
        nbytes += columns.nbytes
        crcs.extend(header.record.crcs or array("q", [NO_CRC]) * count)
    return FileStorages(
        [FilePlace(source, one.key, source.store) for one in headers],
        file,
        start,
        nbytes,
        crcs,
        names=names,
    )


def read_header(source: Source, key: str) -> Header:
    """Read and check the header of one file. Raises `HeaderError`, `Truncated` for a short file, or `LimitExceeded`."""
    size = source.store.size(key)
    if size < PREFIX_NBYTES:
        raise Truncated(
            f"a safetensors file begins with 8 bytes of length, this one has {size}",
            file=key,
            offset=size,
        )
    length = int.from_bytes(source.first(key, PREFIX_NBYTES), "little")
    if length < SMALLEST_NBYTES:
        raise HeaderError(f"a header of {length} bytes cannot be", file=key, offset=0, found=length)
    if length > size - PREFIX_NBYTES:
        if source.bytes(key, 0, min(size, len(LFS_POINTER))) == LFS_POINTER:
            raise HeaderError(
                "this is a Git LFS pointer in place of the file: run `git lfs pull`",
                file=key,
                offset=0,
            )
        message = f"the header would take {length:,} bytes, but the file ends after {size:,}"
        raise Truncated(message, file=key, offset=0, expected=PREFIX_NBYTES + length, found=size)
    if length > source.limits.header_nbytes:
        message = f"a header of {length:,} bytes is more than Limits(header_nbytes={source.limits.header_nbytes:,})"
        raise LimitExceeded(
            message, file=key, offset=0, expected=source.limits.header_nbytes, found=length
        )
    data_start = PREFIX_NBYTES + length
    document = parse_document(source.bytes(key, PREFIX_NBYTES, data_start), source.limits, file=key)
    columns = check_layout(document.entries, range(data_start, size), source.limits, file=key)
    metadata = {name: text for name, text in document.metadata.items() if name != RECORD}
    with located(file=key):
        record = read_record(
            document.metadata.get(RECORD),
            document.entries,
            metadata,
            header=True,
            limits=source.limits,
        )
        if record.changed is not None:
            record.changed.file = key
    return Header(
        key,
        data_start,
        copied_together([*document.entries]),
        metadata,
        columns,
        record,
        document.unknown_fields,
    )


def describe_unknown_fields(headers: Iterable[Header]) -> list[str]:
    """Return a note about fields that the format does not define, or nothing if there are none."""
    fields: dict[str, None] = {}
    for header in headers:
        fields |= dict.fromkeys(header.unknown_fields)
    if not fields:
        return []
    return [
        f"tensors in the header have fields that safetensors does not define: {some([*fields])}. "
        "They are ignored, and copies of the file do not have them"
    ]


def begins_like_safetensors(source: Source, key: str) -> bool:
    """Whether a file begins with a believable length and something that could be a JSON object."""
    start = source.first(key, PREFIX_NBYTES + 1)
    if len(start) <= PREFIX_NBYTES:
        return False
    length = int.from_bytes(start[:PREFIX_NBYTES], "little")
    if start[PREFIX_NBYTES:] == b"{":
        return SMALLEST_NBYTES <= length < LONGEST_CLAIM
    # The safetensors library opens a header that begins with blanks. We refuse it, and it takes a match to say why.
    return (
        start[PREFIX_NBYTES:].isspace()
        and SMALLEST_NBYTES <= length <= source.store.size(key) - PREFIX_NBYTES
    )


def describe(source: Source) -> Description:
    keys = source.store.list()
    if len(keys) != 1:
        raise HeaderError(
            f"one safetensors file was expected, {len(keys):,} files are there",
            file=source.store.name,
        )
    header = read_header(source, keys[0])
    if source.store.folder:
        refuse_orphans([header])
    pieces = sum([any(offsets) for offsets in saved_offsets(header, source.limits).values()])
    notes = [*header.record.notes, *describe_unknown_fields([header])]
    if pieces:
        notes.append(
            f"{pieces:,} tensors are pieces of larger ones, as they lie in this file; open its directory"
        )
    with located(file=header.key):
        tensors, tree = restore(header_table([header], source), header.record.recorded, source)
    changed = () if header.record.changed is None else (header.record.changed,)
    return Description(
        "safetensors", tensors, tree, notes=tuple(notes), metadata=header.metadata, changed=changed
    )


def refuse_orphans(headers: Iterable[Header]) -> None:
    """Raise for files of a native directory whose manifest is missing."""
    for header in headers:
        if header.record.rest == MANIFEST:
            message = (
                f"a data file of a native checkpoint, and its manifest {MANIFEST} is not in the folder: values and second names "
                "are lost without it. Get the manifest again; the tensors are in the data files, which open one by one"
            )
            raise Corrupted(message, file=header.key, expected=MANIFEST)


SUFFIX = ".safetensors"
INDEX_SUFFIX = SUFFIX + INDEX

PIECES = "sharded/"
"""The folder in which torch's `HuggingFaceStorageWriter` puts files before it consolidates them (torch 2.8 and later)."""

Places = dict[str, int | LazyTensor]
"""By name: the number of a whole tensor, counted through all files, or a tensor joined from pieces."""


def is_directory(source: Source) -> bool:
    """Whether there are several files, with safetensors or an index of them at the top, and no DCP directory."""
    keys = source.store.list()
    if source.store.index:
        return source.store.index.endswith(SUFFIX + INDEX)
    if len(keys) < 2 or any(
        key == ".metadata" or (key.endswith(".distcp") and "/" not in key) for key in keys
    ):
        return False
    return bool(_candidates(keys)) or any(
        key.endswith(INDEX_SUFFIX) and "/" not in key for key in keys
    )


def describe_directory(source: Source) -> Description:
    """Read and compare the index and the headers of all files."""
    keys = source.store.list()
    chosen = weight_files(source)
    files, index, listed = chosen.files, chosen.index, chosen.listed
    if not files and listed is None:
        raise UnknownFormat(
            "there is no safetensors file at the top of this directory", file=source.store.name
        )
    record = HeaderRecord()
    if listed is not None:
        with located(file=index):
            texts = {name: value for name, value in listed.metadata.items() if name != RECORD}
            found = listed.metadata.get(RECORD)
            record = read_record(
                found, listed.weight_map, texts, header=False, limits=source.limits
            )
    headers = {key: read_header(source, key) for key in files}
    refuse_orphans(headers.values())
    alone = next(iter(headers.values())) if listed is None and len(headers) == 1 else None
    places, first = _places(headers, source)
    notes: list[str] = []
    if listed is not None and index is not None:
        places = _mapped(listed.weight_map, headers, places, first=first, index=index, notes=notes)
        if others := [key for key in _at_the_top(keys) if key not in headers]:
            notes.append(f"{index!r} does not name {some(others)}; not read")
    del chosen, listed  # a second set of names
    notes += other_copies(keys)
    notes += describe_unknown_fields(headers.values())
    metadata = _common_metadata(headers.values(), notes)
    stored = header_table([*headers.values()], source, places)
    with located(file=index):
        recorded = _together(headers.values(), record, stored, alone=alone, notes=notes)
        tensors, tree = restore(stored, recorded, source)
    changed = _changes(headers.values(), record, index, notes=notes)
    return Description(
        "safetensors-dir", tensors, tree, notes=tuple(notes), metadata=metadata, changed=changed
    )


def weight_files(source: Source) -> WeightFiles:
    """The weight files of a folder, or the only file. Raises as `by_index` does."""
    keys = source.store.list()
    return (
        WeightFiles(keys)
        if len(keys) == 1 and not source.store.index
        else by_index(source, keys) or WeightFiles(_candidates(keys))
    )


def _mapped(
    weight_map: Mapping[str, str],
    headers: Mapping[str, Header],
    places: Places,
    *,
    first: Mapping[str, int],
    index: str,
    notes: list[str],
) -> Places:
    parted = {
        name: key
        for name, key in weight_map.items()
        if type(place := places.get(name)) is not int
        or not 0 <= place - first[key] < len(headers[key].names)
    }
    check_mapped(parted, {key: headers[key].positions for key in {*parted.values()}}, index)
    if (
        left_out := [name for name in places if name not in weight_map]
        if len(weight_map) < len(places)
        else []
    ):
        # transformers passes over them in silence.
        notes.append(
            f"{len(left_out):,} tensors are in the files and not in {index!r}, so not listed: {some(left_out)}"
        )
    # By the texts of the headers, which stay: those of the index go.
    own = [*chain.from_iterable(header.names for header in headers.values())]
    in_order = [places[name] for name in weight_map]
    return {
        place.name if isinstance(place, LazyTensor) else own[place]: place for place in in_order
    }


def _changes(
    headers: Iterable[Header], record: HeaderRecord, index: str | None, *, notes: list[str]
) -> tuple[Corrupted, ...]:
    """Files that changed after they were written, for a verification; also an index that lost its record."""
    found = [header.record.changed for header in headers if header.record.changed is not None]
    if record.changed is not None:
        record.changed.file = index
        found.append(record.changed)
    missing = next(
        (h.record.rest for h in headers if h.record.rest is not None and not record.present), None
    )
    if missing is not None:
        said = (
            f"{missing} is gone, or has lost the record that Holdfast wrote there: second names, nested values and true dtypes are "
            "not known. Get it again; if it was meant, write the checkpoint again with `holdfast convert`"
        )
        notes.append(said)
        found.append(Corrupted(said, file=index or missing))
    return tuple(found)


def _together(
    headers: Iterable[Header],
    index: HeaderRecord,
    stored: Mapping[str, LazyTensor],
    *,
    alone: Header | None,
    notes: list[str],
) -> Recorded:
    """The records of the whole: that of the index or, in a folder of files that were saved one by one, those of all files.

    `alone` is the only file of a folder without an index: its record is that of the whole.
    """
    notes += index.notes
    if index.recorded:
        return index.recorded
    if alone is not None:
        notes += alone.record.notes
        return alone.record.recorded
    aliases: dict[str, str] = {}
    pairs: set[str] = set()
    trees = []
    for header in headers:
        recorded = header.record.recorded
        notes += [f"{header.key}: {note}" for note in header.record.notes]
        # An index of another program may leave some of them out.
        aliases |= {
            name: first
            for name, first in recorded.aliases.items()
            if first in stored and name not in stored
        }
        pairs |= {name for name in recorded.pairs if name in stored}
        if not recorded.flat:
            trees.append(header.key)
    if trees:
        notes.append(f"a tree is recorded in {some(trees)}; open one alone to see it")
    return Recorded(aliases, pairs=frozenset(pairs))


def _at_the_top(keys: Sequence[str]) -> list[str]:
    return [
        key for key in keys if key.endswith(SUFFIX) and "/" not in key and not key.startswith(".")
    ]


def _candidates(keys: Sequence[str]) -> list[str]:
    return _at_the_top(keys) or [
        key for key in keys if key.startswith(PIECES) and key.endswith(SUFFIX)
    ]


def _places(headers: Mapping[str, Header], source: Source) -> tuple[Places, dict[str, int]]:
    """Every tensor of every file, in order, and by file the number of its first tensor."""
    offsets = {key: saved_offsets(header, source.limits) for key, header in headers.items()}
    firsts = dict(
        zip(
            headers,
            accumulate([len(header.names) for header in headers.values()], initial=0),
            strict=False,
        )
    )
    places: Places = {}
    several: dict[str, None] = {}
    for key, header in headers.items():
        several |= dict.fromkeys(name for name, begin in offsets[key].items() if any(begin))
        several |= dict.fromkeys(places.keys() & header.names)
        places |= zip(
            header.names, range(firsts[key], firsts[key] + len(header.names)), strict=True
        )
    for name in [name for name in places if name in several] if several else ():
        holding = [header for header in headers.values() if name in header.positions]
        pieces = [
            (header, begin)
            for header in holding
            if (begin := offsets[header.key].get(name)) is not None
        ]
        if len(pieces) != len(holding):
            raise claimed_twice(name, [header.key for header in holding])
        places[name] = join(name, pieces, source)
    return places, firsts


def _common_metadata(headers: Iterable[Header], notes: list[str]) -> dict[str, str]:
    values: dict[str, set[str]] = {}
    for header in headers:
        for key, text in header.metadata.items():
            values.setdefault(key, set()).add(text)
    values.pop(SHARDING_INFO, None)
    differing = [key for key, texts in values.items() if len(texts) > 1]
    if differing:
        notes.append(
            f"the files differ in their __metadata__ under {some(differing)}; open one to see its own"
        )
    return {key: texts.pop() for key, texts in values.items() if len(texts) == 1}
