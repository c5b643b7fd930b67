"""Lay out a state as the zip that `torch.save` writes, record for record and byte for byte.

    data.pkl                  the state, with a persistent id where a storage belongs
    .format_version           '1': storages are in the order of their numbers
    .storage_alignment        '64'
    byteorder                 'little'
    data/0, data/1 …          the storages, in the order in which the pickle first asks for them
    version                   '3'
    .data/serialization_id    40 digits over the names and checksums of all the others

1. Write the pickle. Every tensor in it asks for a storage record and gets one; nothing is read.
2. All problems together are one `CannotHold`.
3. The zip is laid out around the pickle, the storages, and the id, which is known when the checksums are.

For tensors that fill their storages, the file is the one that torch 2.13 writes for the same objects. A view of a part of a
storage differs: torch writes all of the storage, this writes what is reached (unless `trim=False`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Ints
from holdfast.core.crc import crc32
from holdfast.core.dtype import DTYPES
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.opaque import Global
from holdfast.core.protocols import State
from holdfast.core.runtime import gc_paused
from holdfast.core.table import IRREGULAR, Storages
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.engine import saves
from holdfast.engine.saves import (
    MISTAKEN_KEY,
    Data,
    FilePlan,
    Hole,
    Late,
    Memory,
    SavePlan,
    Segment,
)
from holdfast.errors import CannotHold
from holdfast.formats.torch.composites import NESTED, QSCHEMES, UTILS
from holdfast.formats.torch.pickled import UNTYPED, PickledRows, is_usual
from holdfast.formats.torch.reducers import REDUCERS
from holdfast.formats.torch.tensors import TENSOR_CLASSES
from holdfast.formats.torch.writer import TorchPickle
from holdfast.formats.zip.writer import (
    Payload,
    RecordBytes,
    Records,
    SmallRecord,
    lay_out_zip,
)

Words = npt.NDArray[np.uint64]

NBYTES = 40
"""The length of a serialization id: two numbers of 64 bits, 20 digits each."""

BUCKETS = (
    13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229, 172933, 351061, 712697, 1447153, 2938679, 5967347,
    12117689,
)  # fmt: skip
"""How many buckets a libstdc++ set has as it grows, one element at a time (seen with GCC 13); it holds at most one element a
bucket."""

MASK = (1 << 64) - 1
MULTIPLIER = np.uint64(0xC6A4A7935BD1E995)
SEED = np.uint64(0xC70F6907)
SHIFT = np.uint64(47)


def fold_names(names: Iterable[str]) -> int:
    """Return the first half of a serialization id: a fold over hashes in the order of a libstdc++ set."""
    hashes = hash_texts([name.encode("utf-8") for name in names])

    # The set grows from each number of buckets to the next.
    order = np.zeros(0, np.int64)
    for bucket_count in BUCKETS:
        entered = np.concatenate([order, np.arange(len(order), min(bucket_count, len(hashes)))])
        buckets = hashes[entered] % np.uint64(bucket_count)
        _, firsts, which = np.unique(buckets, return_index=True, return_inverse=True)
        order = entered[np.lexsort((-np.arange(len(entered)), -firsts[which]))]
        if len(order) == len(hashes):
            break
    return fold(hashes[order].tolist())


def fold(values: Iterable[int], seed: int = 0) -> int:
    for value in values:
        seed ^= (value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & MASK
    return seed


def hash_texts(texts: Sequence[bytes]) -> Words:
    """Return libstdc++'s hash of each text."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    hashes = np.zeros(len(texts), np.uint64)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        # Zeros behind the text, so that its last bytes are a word as well; the sum of a text without a rest has no such word.
        padded = np.zeros((len(rows), -(-length // 8) * 8), np.uint8)
        joined = b"".join(texts[row] for row in rows.tolist())
        padded[:, :length] = np.frombuffer(joined, np.uint8).reshape(len(rows), length)
        words = padded.view("<u8").astype(np.uint64)

        mixed = np.full(len(rows), SEED ^ np.uint64(length * int(MULTIPLIER) & MASK))
        for column in range(length // 8):
            word = words[:, column] * MULTIPLIER
            word ^= word >> SHIFT
            mixed = (mixed ^ word * MULTIPLIER) * MULTIPLIER
        if length % 8:
            mixed = (mixed ^ words[:, -1]) * MULTIPLIER
        mixed = (mixed ^ mixed >> SHIFT) * MULTIPLIER
        hashes[rows] = mixed ^ mixed >> SHIFT
    return hashes


def mistaken_crc(payload: Payload) -> int | None:
    """Return the bytes at the beginning of a payload that torch's writer mistakes for a checksum.

    torch finds the checksums in its own output, behind the signature of a data descriptor, and looks at payloads as well.

    >>> mistaken_crc(b"PK\\7\\x08\\1\\0\\0\\0..."), mistaken_crc(b"PK\\7\\x08\\1\\0\\0"), mistaken_crc(bytes(8))
    (1, None, None)

    Returns:
        The number; None if there is none, or if a read is needed to know it.
    """
    head = b""
    match payload:
        case bytes():
            head = payload[:8]
        case Memory():
            head = bytes(payload.content[:8])
        case Data():
            source, chunks = payload.tensor.source, payload.tensor.chunks
            if payload.nbytes >= 8 and len(chunks) == 1 and source.mapped:
                memory = source.store.map(chunks[0].storage.key)
                begin = chunks[0].storage.start + chunks[0].offset // 8
                head = b"" if memory is None else bytes(memory[begin : begin + 8])
    if head.startswith(b"PK\x07\x08") and len(head) == 8:
        return int.from_bytes(head[4:8], "little")
    return None


ALIGNMENT = 64
"""torch's default since 2.7."""

SERIALIZATION_ID = ".data/serialization_id"


FORBIDDEN = frozenset("\\:\0")
"""Characters that names in an archive do not have."""


def archive_name(path: str) -> str:
    """The folder in the archive, for a file: its name without the last suffix; `archive` where torch would not take that.

    >>> archive_name("out/model.v2.pt"), archive_name("modèle.pt"), archive_name(".pt")
    ('model.v2', 'archive', '.pt')
    """
    name = os.path.basename(path.rstrip("/"))
    dot = name.rfind(".")
    stem = name[:dot] if 0 < dot < len(name) - 1 else name
    return stem if stem.isascii() and stem.strip(". ") and FORBIDDEN.isdisjoint(stem) else "archive"


def lay_out_torch_zip(
    state: State, *, name: str = "archive", alignment: int = ALIGNMENT, crc: bool = True, trim: bool = True,
    limits: Limits | None = None,
) -> SavePlan:  # fmt: skip
    """The plan of one file, format `torch-zip`. `name` is the folder in the archive: see `archive_name`.

    `trim=False` writes whole storages, as torch does, however little of them the tensors reach. Raises
    `CannotHold` with every value that has no place in such a file, by its path.
    """
    with gc_paused():
        pickled = TorchPickle(limits, trim=trim, rows=pickled_rows(state))
        pickled.write(state.tree)
        if pickled.problems:
            raise CannotHold("a torch file cannot hold some of this state", pickled.problems)
        content = pickled.finish()
        if len(content) > DEFAULTS.pickle_nbytes:
            problem = (
                f"its pickle has {len(content):,} bytes, more than "
                f"Limits(pickle_nbytes={DEFAULTS.pickle_nbytes:,})"
            )
            raise CannotHold("a torch file of this state would not open", [problem])
        records = pickled_records(pickled, state.tensors.storages)
        files = (
            FilePlan("", lay_out_container(name, content, records, alignment=alignment, crc=crc)),
        )
        notes = (*_notes(pickled), *unkept_texts(state.metadata, "a torch file"))
        return SavePlan("torch-zip", files, notes, expected_table=state.tensors)


def without_origin(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file without safetensors' `format: pt`, which a torch file need not say."""
    return {key: text for key, text in metadata.items() if (key, text) != ("format", "pt")}


def pickled_rows(state: State) -> PickledRows:
    """The rows of a state that a pickle writes by their kinds: each is all of its storage, which has one class in torch."""
    leaves, table = state.leaves, state.tensors
    storage, kinds = table.storage_indices, table.kinds
    classes = [kind.dtype.storage or UNTYPED for kind in kinds]
    alone = {
        at
        for at, kind in enumerate(kinds)
        if not (kind.is_whole and kind.nbytes and is_usual(kind))
    }
    # A record has one dtype, and a tensor that is written by itself needs one of its own: lazy tensors know which share it.
    shared = (
        {number for kind, number in zip(table.kind_indices, storage, strict=True) if kind in alone}
        if alone
        else set[int]()
    )
    if len({*storage}) < len(storage):
        seen: dict[int, str] = {}
        each = zip(storage, [classes[one] for one in table.kind_indices], strict=True)
        shared |= {number for number, one in {*each} if seen.setdefault(number, one) != one}
    parts = {id(part) for whole in leaves.composites() for part in whole.parts.values()}
    shared |= (
        {
            number
            for value, number in zip(map(id, leaves.values), storage, strict=True)
            if value in parts
        }
        if parts
        else set()
    )
    if shared:
        storage = [IRREGULAR if number in shared else number for number in storage]
    others = (
        frozenset(type(value) for value, made in leaves.conversions.values() if made is not value)
        - leaves.tensor_types
    )

    made: dict[int, LazyTensor] = {}

    def view(row: int) -> object:
        value = leaves.values[row]
        found = leaves.describe(value)
        if found is not value and isinstance(found, LazyTensor | Composite):
            return found
        # The value in the tree is only a place: a lazy tensor there may be of another dtype. One object stays one object.
        if id(value) not in made:
            made[id(value)] = table.lazy_tensor(row)
        return made[id(value)]

    return PickledRows(
        leaves.values,
        kinds,
        table.kind_indices,
        storage,
        leaves.tensor_types,
        view,
        leaves.describe,
        others,
    )


def pickled_records(pickled: TorchPickle, storages: Storages) -> Iterator[tuple[str, Payload]]:
    """Yield the records of the storages that a pickle asks for: storages of a table, and what lazy tensors by themselves reach."""
    tensors = {record.number: record.tensor() for record in pickled.storages.records}
    payloads = storage_payloads(storages, storages.read_nbytes)
    for record_number, storage_number in enumerate(pickled.sources):
        label = f"data/{record_number}"
        if storage_number != IRREGULAR:
            yield label, payloads(storage_number, label)
            continue
        tensor = tensors[record_number]
        yield label, Data(tensor, label) if tensor.nbytes else b""


def storage_payloads(
    storages: RecordBytes, read_nbytes: Ints | None = None
) -> Callable[[int, str], Payload]:
    """Return a function that makes the payload of a storage from its number and its label.

    `read_nbytes` is what is read for each storage if it is computed.
    """
    all_nbytes = storages.nbytes.tolist()
    all_read_nbytes = all_nbytes if read_nbytes is None else read_nbytes.tolist()

    def make_payload(number: int, label: str) -> Payload:
        nbytes = all_nbytes[number]
        if 0 < nbytes <= saves.SMALL_NBYTES:
            return SmallRecord(storages, number, nbytes, all_read_nbytes[number])
        return storages.segment(number, label)

    return make_payload


def lay_out_container(
    name: str,
    content: bytes,
    storages: Records,
    *,
    alignment: int = ALIGNMENT,
    crc: bool = True,
    order_first: bool = True,
) -> tuple[Segment, ...]:
    """The archive around a pickle and its storages, which are named `data/N`.

    With `order_first=False` the record of the byte order comes late, where torch's
    `_disable_byteorder_record` puts it.
    """
    order: list[tuple[str, Payload]] = [("byteorder", sys.byteorder.encode())]
    first: list[tuple[str, Payload]] = [
        ("data.pkl", content),
        (".format_version", b"1"),
        (".storage_alignment", b"%d" % alignment),
    ]
    last: list[tuple[str, Payload]] = [("version", b"3\n")]
    if order_first:
        first += order
    else:
        last += order
    records = add_serialization_id(chain(first, storages, last), crc=crc)
    return lay_out_zip(name, records, alignment=alignment, crc=crc)


def add_serialization_id(records: Records, *, crc: bool) -> Records:
    """Yield records, and behind them `.data/serialization_id`: 40 digits, as torch's zip writer computes them.

        │ 20 digits: a fold over the names of the records │ 20 digits: a fold over their CRC-32s │

    Both fold with seed ← seed xor (value + 0x9E3779B9 + (seed << 6) + (seed >> 2)), modulo 2^64, from 0. The names are without the
    archive's prefix. The checksums are those of all records that are not empty, but for the id's own, as they were written: 0 where
    checksums are off, and a `mistaken_crc` before the record's own. The names come in the order in which a libstdc++
    `unordered_set` gives them back, each as libstdc++'s hash of the text (MurmurHash2, 64 bits, variant A). Hence the work:

    1. Hash all names. Names of one length are the rows of a matrix, and one column of 8 bytes is mixed into all of them at once.
    2. Find the order. The set is one linked list: an element goes to the front of its bucket, which is a stretch of the list, or to
       the front of the whole list where its bucket is empty. So, for a fixed number of buckets, the list is: buckets in reverse
       order of their first element, and elements in reverse order inside each. When the set grows it puts its elements, in the
       order of the list, into more buckets by the same rule, and goes on with new ones: each growth is one stable sort.

    torch on another C++ library orders its set differently. No reader compares the id; it is reported and kept.
    """
    # Names are kept, and no payloads: there may be a million.
    names: list[str] = []
    sums: list[int | str] = []
    """Numbers that are known, and labels of data whose checksum is not."""
    for name, payload in records:
        yield name, payload
        names.append(name)
        if isinstance(payload, SmallRecord):
            sums.append(name)
            continue
        if not (payload if isinstance(payload, bytes) else payload.nbytes):
            continue
        mistaken = mistaken_crc(payload)
        if mistaken is not None:
            sums.append(mistaken)
        if not crc or isinstance(payload, Hole):
            sums.append(0)
        elif isinstance(payload, bytes):
            sums.append(crc32(payload))
        elif isinstance(payload, Data | Memory):
            sums.append(payload.label)
        else:
            sums.append(name)
    make = partial(_fold_id, names, sums, crc)
    is_late = any(isinstance(value, str) for value in sums)
    yield SERIALIZATION_ID, Late(NBYTES, make) if is_late else make({})


def _fold_id(
    names: Sequence[str], sums: Sequence[int | str], crc: bool, crcs: Mapping[str, int]
) -> bytes:
    values: list[int] = []
    has_mistaken = MISTAKEN_KEY in crcs
    for value in sums:
        if isinstance(value, int):
            values.append(value)
            continue
        if has_mistaken and value + MISTAKEN_KEY in crcs:
            values.append(crcs[value + MISTAKEN_KEY])
        values.append(crcs[value] if crc else 0)
    return b"%020d%020d" % (fold_names(names), fold(values))


def _notes(pickled: TorchPickle) -> list[str]:
    """Notes for people about the file."""
    refused = [
        f"{what} ({pickled.where(path)})"
        for what, path in pickled.mentioned.items()
        if what not in LOADED
    ]
    notes = list(pickled.notes)
    if refused:
        shown = ", ".join(refused[:8]) + (
            f" and {len(refused) - 8} more" if len(refused) > 8 else ""
        )
        notes.append(
            f"torch.load(weights_only=True) refuses this file unless it is told to allow {shown}"
        )
    for one, other in pickled.storages.lost():
        notes.append(
            f"{one.name!r} ({one.sample.dtype}) and {other.name!r} ({other.sample.dtype}) share bytes in a way that torch has no "
            "form for (two dtypes, a reversed axis): they are written apart"
        )
    return notes


def unkept_texts(metadata: Mapping[str, str], what: str) -> list[str]:
    kept = sorted(without_origin(metadata))[:8]
    return (
        [f"the metadata ({', '.join(kept)}) has no place in {what} and is not kept"] if kept else []
    )


DTYPE_NAMES = [name for row in DTYPES.rows for name in (row.torch, row.storage) if name]
LOADED = frozenset(
    [
        *(Global(module, name) for module, name in REDUCERS if module == UTILS),
        *(
            Global("torch", name)
            for name in (*DTYPE_NAMES, *QSCHEMES, *TENSOR_CLASSES, "Tensor", "Size", "device")
        ),
        *(Global("builtins", name) for name in ("bytearray", "set", "complex")),
        *(Global("collections", name) for name in ("OrderedDict", "Counter")),
        *(Global(NESTED, name) for name in ("NestedTensor", "_rebuild_njt")),
        *(
            Global("torch._tensor", "_rebuild_from_type_v2"),
            Global("torch.nn.parameter", "Parameter"),
            Global("_codecs", "encode"),
        ),
        *(Global("torch.serialization", "_get_layout"), Global("torch.storage", "UntypedStorage")),
    ]
)
"""The globals that torch 2.13 builds with `weights_only=True`, of all that a pickle of ours may name."""
