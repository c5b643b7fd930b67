"""Directories of safetensors files, with or without an index.

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
from itertools import accumulate, chain

from holdfast.core.protocols import Description, Source
from holdfast.core.table import IRREGULAR, RowKind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.errors import Corrupted, UnknownFormat, error_context
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
from holdfast.formats.safetensors.read import (
    Header,
    collect_storages,
    describe_unknown_fields,
    read_header,
    refuse_orphans,
)
from holdfast.formats.safetensors.record import join_shards, read_record, read_saved_offsets
from holdfast.formats.safetensors.schema import (
    DTYPE_OF_CODE,
    NO_RECORD,
    RECORD,
    SHARDING_INFO,
    HeaderRecord,
    TensorKind,
)

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
    record = NO_RECORD
    if listed is not None:
        with error_context(file=index):
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
    if fields := dict.fromkeys(field for one in headers.values() for field in one.unknown_fields):
        notes.append(describe_unknown_fields(fields))
    metadata = _common_metadata(headers.values(), notes)
    stored = _headers_table([*headers.values()], source, places)
    with error_context(file=index):
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
    found = [header.record.mismatch for header in headers if header.record.mismatch is not None]
    if record.mismatch is not None:
        record.mismatch.file = index
        found.append(record.mismatch)
    missing = next(
        (
            h.record.metadata_file
            for h in headers
            if h.record.metadata_file is not None and not record.is_present
        ),
        None,
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
        return alone.record.recorded or Recorded()
    aliases: dict[str, str] = {}
    pairs: set[str] = set()
    trees = []
    for header in headers:
        notes += [f"{header.key}: {note}" for note in header.record.notes]
        recorded = header.record.recorded
        if recorded is None:
            continue
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
    offsets = {key: read_saved_offsets(header, source.limits) for key, header in headers.items()}
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
        places[name] = join_shards(name, pieces, source)
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


def _headers_table(headers: Sequence[Header], source: Source, places: Places) -> Table:
    """Return the tensors in `places` of checked headers.

    A place is the number of a tensor that is whole, counted through all headers, or a tensor that was joined from pieces.
    """
    positions: dict[TensorKind, int] = {}
    kind = array("q")
    for header in headers:
        own = [positions.setdefault(outline, len(positions)) for outline in header.columns.kinds]
        # Those of the first file count alike.
        outline = header.columns.kind_indices
        kind += array(
            "q", outline if own == [*range(len(own))] else [*map(own.__getitem__, outline)]
        )
    kinds = [RowKind.from_shape(DTYPE_OF_CODE[code], shape) for code, shape in positions]
    storages = collect_storages(headers, source)
    storage = array(
        "q", [IRREGULAR if isinstance(place, LazyTensor) else place for place in places.values()]
    )
    irregular = {
        row: place for row, place in enumerate(places.values()) if isinstance(place, LazyTensor)
    }
    chosen = (
        array("q", [kind[number] for number in storage])
        if kind
        else array("q", bytes(8 * len(storage)))
    )
    for row, place in irregular.items():
        chosen[row] = len(kinds)
        kinds.append(RowKind.from_tensor(place))
    return Table([*places], kinds, chosen, storage, storages, irregular)
