"""A directory of safetensors files, with or without an index.

Which files count:

1. With an index, the files that it names, and no others: a `consolidated.safetensors` beside them is another copy.
2. Without one, every `*.safetensors` at the top of the directory, which is how transformers and torch look for them.
3. Without any at the top, those in `sharded/`: torch's writer puts the pieces there when it is to consolidate them, and where that
   fails, or has yet to be done, there is nothing else.

How they go together: every tensor comes from exactly one file, or from several that say which piece each holds
(`record`) and whose pieces tile the whole. Anything else would depend on the order in which a reader happens to go
through the files.

The index is `model.safetensors.index.json`, as `transformers` and torch write it.

    {"metadata": {"total_size": 58}, "weight_map": {"a": "model-00001-of-00002.safetensors", …}}

`metadata` may be missing, and its `total_size` is a float in some files on the hub; no reader depends on it. Holdfast
writes a record in there (`record`), as text: a checksum, and what there is to say beyond which file has which tensor. Where ranks
have saved pieces of tensors to a bucket, `metadata` lists all files (`holdfast.files`): a name is mapped to one of them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from holdfast.core.columns import Columns, joined_columns
from holdfast.core.dtype import DType
from holdfast.core.protocols import Description, Source
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.errors import (
    Corrupted,
    HeaderError,
    LimitExceeded,
    MetadataError,
    StoreError,
    UnknownFormat,
    UnsafePath,
    Unsupported,
    located,
)
from holdfast.formats.recorded import Recorded, restore
from holdfast.formats.safetensors.read import Header, HeaderTensors, read_header, refuse_orphans
from holdfast.formats.safetensors.record import FILES, RECORD, SHARDING_INFO, About, Record, join, read_record, saved_offsets
from holdfast.formats.strict_json import kind, parse, pointer, quoted

__all__ = ["INDEX_SUFFIX", "SUFFIX", "SafetensorsDirectory", "choose_index", "read_index"]


INDEX_SUFFIX = ".safetensors.index.json"
USUAL_INDEX = "model.safetensors.index.json"
WEIGHT_MAP = "weight_map"
SHOWN_FILES = 5
"""Names of missing files that an error lists."""


class Index(Value, frozen=True):
    """What an index says."""

    weight_map: dict[str, str]
    """The file of every tensor, in the order of the index."""
    record: object
    """Holdfast's record; None where there is none."""
    texts: dict[str, object]
    """What `metadata` has beside it."""

    @property
    def files(self) -> list[str]:
        """Every file that counts, once."""
        more = self.texts.get(FILES)
        return list(dict.fromkeys([*self.weight_map.values(), *(more if isinstance(more, list) else ())]))


def choose_index(keys: Sequence[str], directory: str) -> str | None:
    """The index that counts: `model.safetensors.index.json`, else the only one at the top; None where there is none.

    Raises `Unsupported` where there are several and none has the usual name (variants of one model, as diffusers
    keeps them).
    """
    found = [key for key in keys if key.endswith(INDEX_SUFFIX) and "/" not in key and not key.startswith(".")]
    if USUAL_INDEX in found:
        return USUAL_INDEX
    if len(found) > 1:
        raise Unsupported(
            f"this directory has {len(found)} indexes ({', '.join(map(quoted, found[:SHOWN_FILES]))}): several "
            "checkpoints in one place; open one safetensors file, or give one index and its files a directory",
            file=directory,
            found=tuple(found),
        )
    return found[0] if found else None


def read_index(source: Source, key: str) -> Index:
    """The file of every tensor. Every file is there, and none has a name that leads away.

    Raises `HeaderError`, `LimitExceeded`, `UnsafePath` for a name that is not plain and relative, or `StoreError` for
    files that are missing.
    """
    size = source.store.size(key)
    if size > source.limits.index_nbytes:
        raise LimitExceeded(
            f"an index of {size:,} bytes is more than Limits(index_nbytes={source.limits.index_nbytes:,})",
            file=key,
            expected=source.limits.index_nbytes,
            found=size,
        )
    document = parse(source.bytes(key, 0, size), source.limits, file=key)
    if not isinstance(document, dict):
        raise HeaderError(f"at $: expected an object, found {kind(document)}", file=key)
    if WEIGHT_MAP not in document:
        raise HeaderError(f"at $: the field {WEIGHT_MAP} is missing", file=key)
    weight_map = document[WEIGHT_MAP]
    if not isinstance(weight_map, dict):
        raise HeaderError(f"at {pointer(WEIGHT_MAP)}: expected an object, found {kind(weight_map)}", file=key)
    present = set(source.store.list())
    plain: set[str] = set()
    missing: dict[str, None] = {}
    metadata = document.get("metadata")
    beside = metadata if isinstance(metadata, dict) else {}
    more = beside.get(FILES, [])
    if not isinstance(more, list):
        raise HeaderError(f"at {pointer('metadata', FILES)}: expected a list, found {kind(more)}", file=key)
    for name, file in (*weight_map.items(), *((FILES, file) for file in more)):
        if not isinstance(file, str):
            raise HeaderError(f"at {pointer(WEIGHT_MAP, name)}: expected text, found {kind(file)}", file=key, tensor=name)
        if file not in plain:
            _check_plain(file, name, key)
            plain.add(file)
            if file not in present:
                missing[file] = None
    if missing:
        shown = ", ".join(quoted(file) for file in list(missing)[:SHOWN_FILES])
        more = f" and {len(missing) - SHOWN_FILES:,} more" if len(missing) > SHOWN_FILES else ""
        raise StoreError(f"the index names files that are not there: {shown}{more}", file=key, found=tuple(missing))
    return Index(weight_map, beside.get(RECORD), {name: value for name, value in beside.items() if name != RECORD})


def _check_plain(file: str, name: str, key: str) -> None:
    """Raise `UnsafePath` for anything but a relative path of ordinary names."""
    if "\\" in file or "\0" in file or any(part in ("", ".", "..") for part in file.split("/")):
        raise UnsafePath(
            f"at {pointer(WEIGHT_MAP, name)}: {quoted(file)} is not the plain name of a file inside the directory",
            file=key,
            tensor=name,
            found=file,
        )


SUFFIX = ".safetensors"

PIECES = "sharded/"
"""The folder of torch's `HuggingFaceStorageWriter` for what is to be consolidated (torch 2.8 and later)."""

SHOWN_NAMES = 5
"""Names that a message lists before it says how many more there are."""


class DirectoryTensors(Mapping[str, LazyTensor]):
    """The tensors of several files. Those in pieces are made at once, all others when they are asked for."""

    def __init__(self, places: Mapping[str, Header | LazyTensor], source: Source) -> None:
        self._places = places
        self._source = source
        self._files: dict[int, HeaderTensors] = {}
        """The tensors of each file, by the identity of its header."""

    def __getitem__(self, name: str) -> LazyTensor:
        place = self._places[name]
        return place if isinstance(place, LazyTensor) else self._file(place)[name]

    def outline(self, name: str) -> tuple[DType, tuple[int, ...]]:
        place = self._places[name]
        return (place.dtype, place.shape) if isinstance(place, LazyTensor) else self._file(place).outline(name)

    def columns(self, names: Sequence[str]) -> tuple[Source, Columns] | None:
        wanted: dict[int, tuple[Header, list[int]]] = {}
        for number, name in enumerate(names):
            place = self._places.get(name) if isinstance(name, str) else None
            if place is None:
                return None
            if not isinstance(place, LazyTensor):
                wanted.setdefault(id(place), (place, []))[1].append(number)
        found: list[tuple[Sequence[int], Columns]] = []
        for header, numbers in wanted.values():
            columns = header.columns([names[number] for number in numbers])
            if columns is None:
                return None
            found.append(([numbers[number] for number in columns.numbers], columns))
        return self._source, joined_columns(found)

    def _file(self, header: Header) -> HeaderTensors:
        return self._files.get(id(header)) or self._files.setdefault(id(header), HeaderTensors(header, self._source))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __repr__(self) -> str:
        return f"<{len(self):,} tensors of {self._source.store.name!r}>"


class SafetensorsDirectory:
    """The format of a directory."""

    name = "safetensors-dir"

    def matches(self, source: Source) -> bool:
        """Whether several files were opened, safetensors or an index of them at the top, and it is no DCP directory."""
        keys = source.store.list()
        if len(keys) < 2 or any(key == ".metadata" or (key.endswith(".distcp") and "/" not in key) for key in keys):
            return False
        return bool(_candidates(keys)) or any(key.endswith(INDEX_SUFFIX) and "/" not in key for key in keys)

    def describe(self, source: Source) -> Description:
        """Read the index and the header of every file that counts, and check that they agree."""
        keys = source.store.list()
        index = choose_index(keys, source.store.name)
        listed = None if index is None else read_index(source, index)
        weight_map = None if listed is None else listed.weight_map
        files = _candidates(keys) if listed is None else listed.files
        if not files and weight_map is None:
            raise UnknownFormat("there is no safetensors file at the top of this directory", file=source.store.name)
        headers = {key: read_header(source, key) for key in files}
        refuse_orphans(headers.values())
        places = _places(headers, source)
        notes: list[str] = []
        if weight_map is not None and index is not None:
            places = _mapped(places, weight_map, headers, index=index, notes=notes)
            others = [key for key in _at_the_top(keys) if key not in headers]
            if others:
                notes.append(f"{index!r} does not name {_some(others)}; not read")
        metadata = _common_metadata(headers.values(), notes)
        stored = DirectoryTensors(places, source)
        with located(file=index):
            record = Record()
            if listed is not None:
                record = read_record(listed.record, About(listed.weight_map, listed.texts), source.limits)
            alone = next(iter(headers.values())) if listed is None and len(headers) == 1 else None
            recorded = _together(headers.values(), record, stored, alone=alone, notes=notes)
            tensors, tree = restore(stored, recorded, source)
        changed = _changes(headers.values(), record, index, notes=notes)
        return Description(self.name, tensors, tree, notes=tuple(notes), metadata=metadata, changed=changed)


def _changes(headers: Iterable[Header], record: Record, index: str | None, *, notes: list[str]) -> tuple[Corrupted, ...]:
    """Files that are not as they were written, for a verification; the index among them, where it lost what it said of them all."""
    found = [header.record.changed for header in headers if header.record.changed is not None]
    if record.changed is not None:
        record.changed.file = index
        found.append(record.changed)
    missing = next((h.record.rest for h in headers if h.record.rest is not None and not record.present), None)
    if missing is not None:
        said = (
            f"{missing} is gone, or has lost the record that Holdfast wrote there: second names, nested values and true dtypes are "
            "not known. Get it again; if it was meant, write the checkpoint again with `holdfast convert`"
        )
        notes.append(said)
        found.append(Corrupted(said, file=index or missing))
    return tuple(found)


def _together(
    headers: Iterable[Header], index: Record, stored: Mapping[str, LazyTensor], *, alone: Header | None, notes: list[str]
) -> Recorded:
    """What was noted about the whole: in the index or, in a folder of files that were saved one by one, in each of them.

    `alone` is the one file of a folder that has no index: what it says of itself is said of the whole.
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
        aliases |= {name: first for name, first in recorded.aliases.items() if first in stored and name not in stored}
        pairs |= {name for name in recorded.pairs if name in stored}
        if not recorded.flat:
            trees.append(header.key)
    if trees:
        notes.append(f"a tree is recorded in {_some(trees)}; open one alone to see it")
    return Recorded(aliases, pairs=frozenset(pairs))


def _at_the_top(keys: Sequence[str]) -> list[str]:
    """The safetensors files that a reader of the directory finds; names with a leading dot are hidden from it."""
    return [key for key in keys if key.endswith(SUFFIX) and "/" not in key and not key.startswith(".")]


def _candidates(keys: Sequence[str]) -> list[str]:
    """The files that count where no index says which."""
    return _at_the_top(keys) or [key for key in keys if key.startswith(PIECES) and key.endswith(SUFFIX)]


def _places(headers: Mapping[str, Header], source: Source) -> dict[str, Header | LazyTensor]:
    """Every tensor of every file, in their order: the header that has it whole, or the tensor joined from pieces."""
    offsets = {key: saved_offsets(header, source.limits) for key, header in headers.items()}
    owners: dict[str, list[Header]] = {}
    for header in headers.values():
        for name in header.entries:
            owners.setdefault(name, []).append(header)
    places: dict[str, Header | LazyTensor] = {}
    for name, holding in owners.items():
        if len(holding) == 1 and not any(offsets[holding[0].key].get(name, ())):
            places[name] = holding[0]
            continue
        pieces = [(header, begin) for header in holding if (begin := offsets[header.key].get(name)) is not None]
        if len(pieces) != len(holding):
            raise MetadataError(
                f"{_some([header.key for header in holding])} all claim this tensor, and do not say that they "
                "hold pieces of it; open one of them alone",
                file=holding[-1].key,
                tensor=name,
                found=tuple(header.key for header in holding),
            )
        places[name] = join(name, pieces, source)
    return places


def _mapped(
    places: Mapping[str, Header | LazyTensor],
    weight_map: Mapping[str, str],
    headers: Mapping[str, Header],
    *,
    index: str,
    notes: list[str],
) -> dict[str, Header | LazyTensor]:
    """What the index names, in its order. Raises where a file lacks it; what the index leaves out becomes a note."""
    for name, key in weight_map.items():
        if name not in headers[key].entries:
            raise MetadataError(
                f"at {pointer('weight_map', name)}: {quoted(key)} has no such tensor",
                file=index,
                tensor=name,
                found=key,
            )
    left_out = [name for name in places if name not in weight_map]
    if left_out:
        # transformers passes over them in silence.
        shown = _some(left_out)
        notes.append(f"{len(left_out):,} tensors are in the files and not in {index!r}, so not listed: {shown}")
    return {name: places[name] for name in weight_map}


def _common_metadata(headers: Iterable[Header], notes: list[str]) -> dict[str, str]:
    """The text on which all files agree; keys with several values become a note. Where pieces lie has been used up."""
    values: dict[str, set[str]] = {}
    for header in headers:
        for key, text in header.metadata.items():
            values.setdefault(key, set()).add(text)
    values.pop(SHARDING_INFO, None)
    differing = [key for key, texts in values.items() if len(texts) > 1]
    if differing:
        notes.append(f"the files differ in their __metadata__ under {_some(differing)}; open one to see its own")
    return {key: texts.pop() for key, texts in values.items() if len(texts) == 1}


def _some(names: Sequence[str]) -> str:
    """The first few of a list of names from a file, in words."""
    shown = ", ".join(map(quoted, names[:SHOWN_NAMES]))
    return f"{shown} and {len(names) - SHOWN_NAMES:,} more" if len(names) > SHOWN_NAMES else shown
