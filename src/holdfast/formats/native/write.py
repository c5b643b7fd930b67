"""The writer of native directories: data files, the Hugging Face index, and the manifest, which comes last.

    holdfast.json                      every tensor with its boxes: file, bytes, checksum
    data-00001-of-00004.safetensors    what one process, or one rank of a mesh or a group, has written
    model.safetensors.index.json       where every tensor lies whole in one file

One process lays out all of it at once (`lay_out_native`). What a mesh or a group of ranks writes is in `boxes.py`.

The data files are ordinary safetensors. A dtype that the format lacks is carried by one that has the same bytes, and the manifest
has the true one:

    complex128, complex32         F64, F16    with a last dimension of 2; bcomplex32 as BF16
    float4_e2m1fn_x2              F4          with the last dimension doubled
    quantised, bits, narrow ints  U8, I8, U16, I32      whatever numpy has for them
    packed, not in whole bytes    U8          the bytes, flat

What did not change since another directory is taken over from there (`formats.native.base`), and only the rest is laid out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat

import msgspec
import numpy as np
from msgspec import field

from holdfast.core.arrays import Ints
from holdfast.core.content_hash import HASH, HEAD_NBYTES, Hashed
from holdfast.core.crc import crc32
from holdfast.core.dtype import DTYPES
from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import State
from holdfast.core.sparse.storage import SparseParts
from holdfast.core.table import Kind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.errors import CannotHold
from holdfast.formats.native.base import Reuse
from holdfast.formats.native.chunks import entries_of, hash_in, stored_chunk, without_clashes
from holdfast.formats.native.schema import (
    BESIDE_VERSION,
    FORMAT,
    HASHED_VERSION,
    VERSION,
    DataFile,
    Manifest,
    OtherFile,
    StoredChunk,
    StoredTensor,
)
from holdfast.formats.recorded import PAIRS, Shared, order_fields, share, sharing_fields
from holdfast.formats.safetensors.record import CRC_DIGITS, MANIFEST, checksum_digits
from holdfast.formats.safetensors.write import (
    FileLayout,
    HeaderKind,
    fill_shards,
    is_flat,
    metadata_problems,
    plain_index,
    plan_file,
)
from holdfast.formats.strict_json import SEAL_NBYTES, as_keys, paid_nbytes, sealing
from holdfast.formats.tree_json.encode import encode_state
from holdfast.plan.saves import BATCH, HASH_KEY, FilePlan, Hashing, Late, Literal, SavePlan
from holdfast.plan.table import table_of

SHARD_NBYTES = 5 << 30
"""Bytes of tensors in a data file where the caller does not say: few files, each small enough to be moved about."""

INDEX = "model.safetensors.index.json"
"""What `transformers` looks for."""

HALVES = {"complex128": "F64", "complex32": "F16", "bcomplex32": "BF16"}
"""What carries the two parts of a complex number."""

CANNOT = "a native checkpoint cannot hold this state"

OWN: Mapping[str, object] = {"rest": MANIFEST}
"""What the record of each data file says: that it is one, so that a folder that has lost its manifest is known for what it was."""


Pack = Callable[[Mapping[str, LazyTensor]], Mapping[str, SparseParts]]
"""Finds the tensors that are stored packed, with their parts."""


HashAll = Callable[[Mapping[str, LazyTensor]], Mapping[str, Hashed]]
"""Hashes tensors now: those that are stored packed, whose elements do not pass by when they are written."""

TakeOver = Callable[[Table, Sequence[int]], Reuse[str]]
"""From the rows of a table that would be written to those that are there already."""


def data_name(number: int, count: int, save: str = "") -> str:
    """What a data file is called; in an object store it carries the id of its save, so that no two saves write the same name.

    >>> data_name(0, 4), data_name(0, 4, "5f3a")
    ('data-00001-of-00004.safetensors', 'data-5f3a-00001-of-00004.safetensors')
    """
    return f"data-{save + '-' if save else ''}{number + 1:05}-of-{count:05}.safetensors"


def lay_out_native(
    state: State,
    *,
    max_shard_size: int | None = None,
    pack: Pack | None = None,
    hashes: HashAll | None = None,
    take_over: TakeOver | None = None,
    save: str = "",
) -> SavePlan:
    """The plan of a native directory, its data files with at most `max_shard_size` bytes of tensors.

    With `hashes`, every chunk has its hash in the manifest. What `take_over` finds is not written: its files are linked.

    Where tensors are stored packed there is no Hugging Face index: `transformers` could not read them.

    Raises `CannotHold` with every problem: Python objects that have no form in the manifest, names that are no Unicode.
    """
    table = table_of(state)
    kept = what_is_kept(state, table)
    rows = kept.sharing.rows
    reuse = take_over(table, rows) if take_over else NOTHING
    names = table.names
    new = [row for row in rows if names[row] not in reuse.chunks] if reuse.chunks else rows
    packed = without_clashes(pack({names[row]: table.view(row) for row in new}), [names[row] for row in rows]) if pack else {}
    known = hashes({name: table[name] for name in packed}) if hashes else {}
    hashing = (
        {names[row]: "head" if names[row] in reuse.changed else "hash" for row in new if names[row] not in packed} if hashes else {}
    )

    def shards_of(own: Sequence[int]) -> list[tuple[Table, Sequence[int]]]:
        if not own:
            return []
        part, inside = table, own
        if packed:
            entries = {row: entries_of(names[row], table.view(row), packed[names[row]]) for row in own if names[row] in packed}
            part = table.with_entries(own, entries)
            inside = range(len(part))
        return [(part, [inside[at] for at in some]) for some in fill_shards(part.nbytes_of(inside), max_shard_size or SHARD_NBYTES)]

    # What only moved is expected to stay. It is not mixed with what changes, and has the lower numbers, which the next step keeps.
    moved = [row for row in new if names[row] in reuse.moved] if reuse.moved else []
    shards = shards_of(moved) + shards_of([row for row in new if names[row] not in reuse.moved] if moved else new)
    if not shards and not reuse.linked:
        shards = [(table, [])]
    keys = [data_name(i, len(shards), save) for i in range(len(shards))] if save else reuse.names(len(shards))
    files = [
        plan_file(key, part, inside, [carried(kind) for kind in part.kinds], {}, fields=OWN, hashed=hashing)
        for key, (part, inside) in zip(keys, shards, strict=True)
    ]
    most = DEFAULTS.header_nbytes
    if any(file.header_nbytes > most for file in files):
        raise CannotHold(CANNOT, [f"the header of a data file would be longer than {most:,} bytes"])
    listed = [*reuse.files, *(DataFile(file.plan.key, file.plan.nbytes) for file in files)]
    places = _places(files, len(reuse.linked), table, packed)
    taken, apart = taken_over(reuse.chunks)
    _set_places(places, table, taken)
    text = ManifestText(table, rows, places, taken, apart, packed, known, hashing)
    index = lay_out_manifest(text, listed, fields=kept.fields, metadata=state.metadata, alone=bool(save))
    plans, notes = tuple(file.plan for file in files), (*kept.notes, *reuse.notes)
    return SavePlan("native", plans, notes, directory=True, index=index, linked=reuse.linked)


NOTHING: Reuse[str] = Reuse()

Entries = dict[str, tuple[int, tuple[int, int]]]
"""By the name of an entry: the number of its file, its first byte there and the byte after its last."""


class Places(Value, frozen=True, eq=False):
    """Where the rows of a table lie in data files; what is stored packed, by the names of its entries."""

    file: Ints
    start: Ints
    stop: Ints
    entries: Entries


def _places(files: Sequence[FileLayout], first: int, table: Table, packed: Mapping[str, SparseParts]) -> Places:
    """The places in files of which the first has the number `first`."""
    columns = np.zeros((3, len(table)), np.int64)
    entries: Entries = {}
    for number, file in enumerate(files, first):
        starts = file.starts
        rows, here = list(file.rows), np.arange(len(starts))
        if packed:
            spans = zip(file.names, starts.tolist(), file.stops.tolist(), strict=True)
            entries |= {name: (number, (start, stop)) for name, start, stop in spans}
            here = np.array([at for at, name in enumerate(file.names) if name in table.rows and name not in packed], np.int64)
            rows = [table.rows[file.names[at]] for at in here.tolist()]
        columns[:, rows] = np.stack((np.full(len(here), number), starts[here], file.stops[here]))
    file_of, starts_of, stops_of = columns
    return Places(file_of, starts_of, stops_of, entries)


def taken_over(
    chunks: Mapping[str, tuple[StoredChunk, ...]],
) -> tuple[Mapping[str, StoredChunk], Mapping[str, tuple[StoredChunk, ...]]]:
    """Of what is taken over: what is whole and in one piece, and all else."""
    whole = {name: chunk for name, (chunk, *more) in chunks.items() if not more and chunk.sparse is None and chunk.start is None}
    return whole, {name: own for name, own in chunks.items() if name not in whole} if len(whole) < len(chunks) else {}


def _set_places(places: Places, table: Table, taken: Mapping[str, StoredChunk]) -> None:
    """Set the places of what is taken over."""
    if taken:
        row_of = table.rows
        rows = [row_of[name] for name in taken]
        columns = np.array([(chunk.file, *chunk.bytes) for chunk in taken.values()], np.int64).T
        places.file[rows], places.start[rows], places.stop[rows] = columns


class ManifestText(Value, frozen=True, eq=False):
    """The tensors of a manifest, made from the checksums of their data: by kind, a batch at a time."""

    table: Table
    rows: Sequence[int]
    """What the manifest names, in order."""
    places: Places
    taken: Mapping[str, StoredChunk]
    """What is taken over whole and in one piece, by name. Its place is among the others."""
    there: Mapping[str, tuple[StoredChunk, ...]]
    """What is taken over in another form."""
    packed: Mapping[str, SparseParts]
    known: Mapping[str, Hashed]
    """The hashes of what is stored packed."""
    hashing: Mapping[str, Hashing]
    """Which others are hashed, and how."""
    known_texts: dict[str, str] = field(default_factory=dict)
    """Of what is taken over in another form, once it was asked for."""
    known_tails: dict[str, str] = field(default_factory=dict)
    """Hash and head of what is taken over, once they were asked for."""

    @property
    def hashed(self) -> bool:
        """Whether a chunk has a hash."""
        taken = ((*self.taken.values(),), *self.there.values())
        return bool(self.hashing or self.known) or any(c.hash or c.head for chunks in taken for c in chunks)

    @property
    def whole(self) -> bool:
        """Whether every tensor lies whole in one file, as it is in memory."""
        return not self.packed and not self.there

    def weights(self, files: Sequence[DataFile]) -> tuple[list[str], list[str], int]:
        """The names of all tensors in the order in which they lie in files, the file of each, and the bytes of all together."""
        places, names, listed = self.places, self.table.names, [file.name for file in files]
        rows = np.array(self.rows, np.int64)
        file, start, stop = places.file[rows], places.start[rows], places.stop[rows]
        order = np.lexsort((stop, start, file)).tolist()
        if (start == stop).any():
            order.sort(key=lambda at: (file[at], start[at], stop[at], names[self.rows[at]]))
        numbers = file.tolist()
        return [names[self.rows[at]] for at in order], [listed[numbers[at]] for at in order], int((stop - start).sum())

    def pieces(self, crcs: Mapping[str, int]) -> Iterator[bytes]:
        """The text, from the first name to the end of the last tensor."""
        names, kind = self.table.names, self.table.kind
        quote, keys = as_keys([names[row] for row in self.rows])
        openings = [f"{quote}{tensor_opening(one.dtype.name, one.shape)}" for one in self.table.kinds]
        odd, taken = self.there or self.packed, self.taken
        for first in range(0, len(self.rows), BATCH):
            rows = self.rows[first : first + BATCH]
            here = [names[row] for row in rows]
            files, starts, stops = (column[rows].tolist() for column in (self.places.file, self.places.start, self.places.stop))
            sums = DIGITS(digits_of(crcs, here, starts, stops))
            if taken:
                sums = [taken[name].crc32 if name in taken else crc for name, crc in zip(here, sums, strict=True)]
            tails = self._tails(crcs, rows, here) if self.hashing or taken else repeat("")
            each = zip(keys[first : first + BATCH], rows, files, starts, stops, sums, tails, strict=False)
            listed = [
                f'{key}{openings[kind[row]]}{file},"bytes":[{start},{stop}],"crc32":"{crc}"{tail}}}]}}'
                for key, row, file, start, stop, crc, tail in each
            ]
            if odd:
                for at, (row, name) in enumerate(zip(rows, here, strict=True)):
                    if name in self.there or name in self.packed:
                        listed[at] = f"{keys[first + at]}{quote}:{self._stored(row, name, crcs)}"
            yield f"{',' * bool(first)}{quote}{f',{quote}'.join(listed)}".encode()

    def measure(self) -> tuple[int, int]:
        """How long the text will be, and how many lists and objects it will have; whatever the checksums are."""
        if self.there or self.packed:
            made = b"".join(self.pieces(NO_SUMS))
            return len(made), made.count(b"[") + made.count(b"{")
        names, rows = [self.table.names[row] for row in self.rows], np.array(self.rows, np.int64)
        quote, keys = as_keys(names)
        every = "".join(keys)
        around = [f"{quote}{quote}{tensor_opening(kind.dtype.name, kind.shape)}{CHUNK}" for kind in self.table.kinds]
        counts = np.bincount(np.array(self.table.kind, np.int64)[rows], minlength=len(around)) if len(rows) else [0] * len(around)
        length = len(every.encode()) + int(np.dot(counts, [len(text) for text in around])) + max(len(rows) - 1, 0)
        length += sum(_digits(column[rows]) for column in (self.places.file, self.places.start, self.places.stop))
        length += sum(map(len, self._taken_tails.values()))
        if self.hashing:
            long = [kind.nbytes > HEAD_NBYTES for kind in self.table.kinds]
            new = [(name, row) for name, row in zip(names, self.rows, strict=True) if name not in self.taken]
            ways = Counter([(self.hashing[name], long[self.table.kind[row]]) for name, row in new])
            length += sum(count * TAILS[way] for way, count in ways.items())
        brackets = [text.count("[") + text.count("{") for text in around]
        return length, int(np.dot(counts, brackets)) + every.count("[") + every.count("{")

    def _tails(self, crcs: Mapping[str, int], rows: Sequence[int], names: Sequence[str]) -> list[str]:
        """What stands behind the checksum of each: its hash, its head."""
        kind, hashing, taken = self.table.kind, self.hashing, self._taken_tails
        short = [0 < one.nbytes <= HEAD_NBYTES for one in self.table.kinds]
        return [
            taken[name]
            if name in taken
            else f',"hash":"{crcs[name + HASH_KEY]:032x}"'
            if short[kind[row]] and name in hashing
            else self._tail(crcs, row, name)
            for row, name in zip(rows, names, strict=True)
        ]

    def _tail(self, crcs: Mapping[str, int], row: int, name: str) -> str:
        """The same of one that is empty, longer than a head, or not hashed."""
        how = self.hashing.get(name)
        if how is None:
            return ""
        hash, head = hash_in(crcs, name, self.table.kind_of(row).nbytes, head_alone=how == "head")
        tail = "" if hash is None else f',"hash":"{hash:032x}"'
        return tail if head is None else f'{tail},"head":"{head:08x}"'

    @property
    def _taken_tails(self) -> Mapping[str, str]:
        """The same of what is taken over, as the base says it."""
        if len(self.known_tails) != len(self.taken):
            tails = {
                name: (f',"hash":"{chunk.hash}"' if chunk.hash is not None else "")
                + (f',"head":"{chunk.head}"' if chunk.head is not None else "")
                for name, chunk in self.taken.items()
            }
            self.known_tails.update(tails)
        return self.known_tails

    def _stored(self, row: int, name: str, crcs: Mapping[str, int]) -> str:
        """The text of a tensor that is taken over, or stored packed."""
        text = self.known_texts.get(name)
        if text is not None:
            return text
        kind = self.table.kinds[self.table.kind[row]]
        chunks = self.there.get(name)
        if chunks is None:
            place = self.places.entries.__getitem__
            chunks = (stored_chunk(name, place, crcs.__getitem__, parts=self.packed[name], hashed=self.known.get(name)),)
        text = msgspec.json.encode(StoredTensor(kind.dtype.name, kind.shape, chunks)).decode()
        if name in self.there:
            self.known_texts[name] = text
        return text


CHUNK = ',"bytes":[,],"crc32":"%s"}]}' % ("0" * CRC_DIGITS)
"""The text of a chunk behind the number of its file, without its two places."""

TAILS = {("hash", False): 42, ("hash", True): 60, ("head", False): 18, ("head", True): 18}
"""How long the text of hash and head is, by what is computed, and whether there is more than a head."""

POWERS = 10 ** np.arange(1, 19)
"""The first number of two digits, of three, and so on."""


def _digits(numbers: Ints) -> int:
    """How many digits numbers have together."""
    return len(numbers) + int(np.searchsorted(POWERS, numbers, side="right").sum())


def digits_of(crcs: Mapping[str, int], names: Sequence[str], starts: Sequence[int], stops: Sequence[int]) -> str:
    """The digits of checksums; of what has no bytes, or is not of this plan, zeros."""
    try:
        return checksum_digits(crcs, names)
    except KeyError:
        known = {name: crcs[name] if name in crcs else 0 for name in names}  # noqa: SIM401  # a call each
        return checksum_digits(known, names)


@lru_cache(1024)
def tensor_opening(dtype: str, shape: tuple[int, ...]) -> str:
    """The text of a tensor behind its name, up to the number of its file."""
    text = msgspec.json.encode(StoredTensor(dtype, shape, (StoredChunk(0, (0, 0), ""),))).decode()
    return ":" + text[: text.rindex('"file":') + len('"file":')]


DIGITS = re.compile("." * CRC_DIGITS).findall
"""The digits of many checksums, those of each by themselves."""


def lay_out_manifest(
    text: ManifestText,
    files: Sequence[DataFile],
    *,
    fields: Mapping[str, object],
    metadata: Mapping[str, str],
    alone: bool,
) -> tuple[FilePlan, ...]:
    """What makes the data files of one process a native directory, in the order in which it is written: the manifest is last.

    There is an index for `transformers` where it could read the files; and not with `alone`, in an object store, where the index
    would be the one name that two saves at once both write. Raises `CannotHold` where the manifest would be longer than a reader
    takes.
    """
    others = [plain_index(INDEX, *text.weights(files))] if text.whole and not alone else []
    version, hash = (HASHED_VERSION, HASH) if text.hashed else (VERSION, msgspec.UNSET)
    version = BESIDE_VERSION if any("/" in file.name for file in files) else version
    rest = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    manifest = Manifest(FORMAT, version, tuple(files), {}, dict(metadata), others=other_files(others), hash=hash)
    raw = msgspec.json.encode(msgspec.structs.replace(manifest, **rest))
    at = raw.index(b'"tensors":{') + len(b'"tensors":{')
    before, behind = raw[:at], raw[at:-1]
    length, containers = text.measure()
    nbytes = max(len(before) + length + len(behind) + SEAL_NBYTES, paid_nbytes(raw, containers))
    most = DEFAULTS.index_nbytes
    if nbytes > most:
        raise CannotHold(CANNOT, [f"the manifest would have {nbytes:,} bytes, more than {most:,}"])

    def make(crcs: Mapping[str, int]) -> bytes:
        pieces = [before, *text.pieces(crcs), behind]
        crc, done = 0, 0
        for piece in pieces:
            crc, done = crc32(piece, crc), done + len(piece)
        return b"".join([*pieces, sealing(crc, done, nbytes)])

    return (*others, FilePlan(MANIFEST, (Late(nbytes, make),)))


class _NoSums(dict[str, int]):
    """The checksums of data that is not written yet: 0 each."""

    def __missing__(self, label: str) -> int:
        return 0


NO_SUMS = _NoSums()


def other_files(plans: Sequence[FilePlan]) -> tuple[OtherFile, ...] | msgspec.UnsetType:
    """The manifest's field about files that are known before any data is: their names, lengths and checksums."""
    listed = []
    for plan in plans:
        crc = 0
        for segment in plan.segments:
            crc = crc32(segment.data, crc) if isinstance(segment, Literal) else crc
        listed.append(OtherFile(plan.key, plan.nbytes, f"{crc:08x}"))
    return tuple(listed) or msgspec.UNSET


class Kept(Value, frozen=True):
    """What a native directory keeps of a state beside its elements."""

    sharing: Shared
    """What is written once."""
    fields: Mapping[str, object]
    """What the manifest says beside the tensors."""
    notes: Sequence[str]
    """What a person should know."""


def what_is_kept(state: State, table: Table) -> Kept:
    """Raises `CannotHold` with everything that has no place in a native checkpoint."""
    sharing = share(table)
    problems = metadata_problems(state, table)
    notes = sharing.notes()
    fields = sharing_fields(sharing)
    if not is_flat(state):
        encoded = encode_state(state, table)
        problems += encoded.problems
        notes += encoded.notes
        fields["tree"] = encoded.value
    else:
        fields |= order_fields(table.names, sharing.aliases)
    if problems:
        raise CannotHold(CANNOT, list(dict.fromkeys(problems)))
    return Kept(sharing, fields, notes)


def carried(kind: Kind) -> HeaderKind:
    """What a safetensors header can say of tensors of a kind, with the same bytes."""
    dtype, shape = kind.dtype, kind.shape
    if dtype.name == PAIRS and shape:
        return HeaderKind("F4", (*shape[:-1], 2 * shape[-1]))
    if dtype.safetensors is not None and math.prod(shape) * dtype.bits % 8 == 0:
        return HeaderKind(dtype.safetensors, shape)
    if dtype.packed:
        return HeaderKind("U8", (kind.nbytes,))
    if dtype.kind == "complex":
        return HeaderKind(HALVES[dtype.name], (*shape, 2))
    plain = DTYPES.numpy(dtype.numpy)
    if plain is None or plain.safetensors is None:
        return HeaderKind("U8", (kind.nbytes,))
    return HeaderKind(plain.safetensors, shape)
