"""The writer of `.metadata`: the pickle of torch's own classes that makes data files a distributed checkpoint. torch is not needed.

A tensor is a hundred opcodes. Tensors of one kind have the same ones, and so have items but for names and places: since protocol 4
the number of an entry in the memo is not written where the entry is made. So objects are written once for each kind, and the
records are put together from bytes.

All is written as CPython's pickler writes the objects of torch 2.13. Other versions take it: to older ones `version` and `modules`
are fields that they do not ask for, and the strides that torch 2.15 adds are left out, because no version needs them and older
ones refuse them.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.dtype import DTYPES
from holdfast.core.opaque import Global
from holdfast.core.tree import Path
from holdfast.core.value import Value
from holdfast.formats.native.manifest import FileBoxes, as_column

if TYPE_CHECKING:
    from holdfast.formats.sharded import Contents, Receipt


class PickledObject(Value, frozen=True, eq=False):
    """An object of a class, with its state."""

    of: Global
    state: object = None


class Called(Value, frozen=True):
    """The result of a call with one argument."""

    what: Global
    argument: object


PACKAGE = "torch.distributed.checkpoint"
METADATA, STORAGE_META, BYTES, TENSOR, PROPERTIES, CHUNK, INDEX, MEMORY_FORMAT = (
    Global(f"{PACKAGE}.metadata", name)
    for name in (
        "Metadata", "StorageMeta", "BytesStorageMetadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "_MEM_FORMAT_ENCODING",
    )
)  # fmt: skip
INFO, SIZE = Global(f"{PACKAGE}.filesystem", "_StorageInfo"), Global("torch", "Size")
STRIDED, CONTIGUOUS = (
    Called(Global("torch.serialization", "_get_layout"), "torch.strided"),
    Called(MEMORY_FORMAT, 0),
)

DICT = pickle.EMPTY_DICT + pickle.MEMOIZE


def dcp_index(
    contents: Contents,
    files: Sequence[Receipt],
    parts: Sequence[FileBoxes],
    *,
    path: str | None,
    save_id: str,
) -> bytes:
    """The `.metadata` of a directory with these files. `parts` has the boxes of each. It says the path that it is saved under."""
    records, boxes = _Records(), _StoredBoxes(contents, files, parts)
    texts = _texts([*contents.paths, *contents.names, *contents.values])
    begin, before, first, second, third = records.made(_empty_index(path, save_id)).split(DICT, 4)
    held = boxes.tensors(records)
    if contents.values:
        held |= dict.fromkeys(contents.values, records.made(PickledObject(BYTES)))
    state = [b"%b%b" % (texts[name], held[name]) for name in contents.paths if name in held]
    items = boxes.items(records, texts)
    written = (
        before,
        *_dict(state),
        first,
        *_dict(_paths(contents.paths, texts)),
        second,
        *_dict(items),
        third,
    )
    return b"".join((*records.first, begin, DICT, *written, pickle.STOP))


def _empty_index(path: str | None, save_id: str) -> PickledObject:
    saved = PickledObject(
        STORAGE_META, {"checkpoint_id": path, "save_id": save_id, "load_id": None, "modules": []}
    )
    fields = {
        "state_dict_metadata": {},
        "planner_data": {},
        "storage_data": {},
        "storage_meta": saved,
        "version": "1.0.0",
    }
    return PickledObject(METADATA, fields)


class _Records:
    """Opcodes of objects that may stand anywhere in one stream, and as often as is wanted.

    Of each kind an object is written and taken from the stack again, before anything else: so classes and the names of fields have
    their entries in the memo. What is written of that kind later names these entries, and none of its own.
    """

    def __init__(self) -> None:
        self.first = [pickle.PROTO + bytes([pickle.DEFAULT_PROTOCOL])]
        self._memo: dict[object, int] = {}
        self._entries = 0

    def made(self, value: object) -> bytes:
        """The opcodes of an object of a kind."""
        one, record, same = (self._written(value) for _ in range(3))
        self.first += (one, pickle.POP, record, pickle.POP, same, pickle.POP)
        return record

    def _written(self, value: object) -> bytes:
        if isinstance(value, str | Global | Called) and value in self._memo:
            entry = self._memo[value]
            return (
                pickle.BINGET + bytes([entry])
                if entry < 256
                else pickle.LONG_BINGET + struct.pack("<I", entry)
            )
        match value:
            case None | False | True:
                return CONSTANTS[value]
            case int():
                return _numbers(np.array([value], np.int64))[0]
            case str():
                return self._noted(_texts([value])[value], None if value == NAME else value)
            case Global(module, name):
                # torch's size has a text "torch" of its own, which its dtypes do not share.
                where = (
                    self._noted(_texts([module])[module])
                    if value == SIZE
                    else self._written(module)
                )
                return (
                    where
                    + self._written(name)
                    + self._noted(pickle.STACK_GLOBAL + pickle.MEMOIZE, value)
                )
            case Called(what, argument):
                called = self._written(what) + self._written((argument,))
                return called + self._noted(
                    pickle.REDUCE + pickle.MEMOIZE, None if what == SIZE else value
                )
            case PickledObject(of, state):
                made = self._written(of) + self._noted(
                    pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.MEMOIZE
                )
                return made if state is None else made + self._written(state) + pickle.BUILD
            case tuple():
                inside, (begin, end) = [self._written(one) for one in value], _around(len(value))
                return b"".join((begin, *inside, self._noted(end) if value else end))
            case dict():
                made, inside = (
                    self._noted(DICT),
                    [self._written(key) + self._written(one) for key, one in value.items()],
                )
                return made + b"".join(_set(inside, pickle.SETITEMS))
        assert isinstance(value, list)
        made, inside = (
            self._noted(pickle.EMPTY_LIST + pickle.MEMOIZE),
            [self._written(one) for one in value],
        )
        return made + (
            inside[0] + pickle.APPEND
            if len(inside) == 1
            else b"".join(_set(inside, pickle.APPENDS))
        )

    def _noted(self, opcodes: bytes, value: object = None) -> bytes:
        """Opcodes that make an entry in the memo; it is named later where a value is given."""
        if value is not None:
            self._memo[value] = self._entries
        self._entries += 1
        return opcodes


CONSTANTS = {None: pickle.NONE, False: pickle.NEWFALSE, True: pickle.NEWTRUE}


class _StoredBoxes:
    """The boxes in all files, as columns, in the order of the files."""

    def __init__(
        self, contents: Contents, files: Sequence[Receipt], parts: Sequence[FileBoxes]
    ) -> None:
        self._of, self._files = contents, files
        self._positions = (
            {name: at for at, name in enumerate(contents.names)} if contents.aliases else {}
        )
        boxes = [as_column(part.stored.boxes) for part in parts]
        self._file = np.arange(len(parts)).repeat([len(own) for own in boxes])
        self._tensor, self._start, stop = np.zeros((3, len(self._file)), np.int64)
        rank = max(map(len, {*contents.shapes}), default=0)
        self._corner, self._size = (
            np.zeros((rank, len(stop)), np.int64),
            np.ones((rank, len(stop)), np.int64),
        )
        first = 0
        for part, own in zip(parts, boxes, strict=True):
            here, first = slice(first, first + len(own)), first + len(own)
            self._tensor[here] = part.tensors[own]
            self._start[here], stop[here] = (
                as_column(part.stored.starts),
                as_column(part.stored.stops),
            )
            self._corner[: len(part.starts), here] = part.starts[:, own]
            self._size[: len(part.sizes), here] = part.sizes[:, own]
        self._nbytes = stop - self._start
        self._order = self._tensor.argsort(kind="stable")
        self._listed, self._heads, self._counts = np.unique(
            self._tensor[self._order], return_index=True, return_counts=True
        )
        self._number = np.zeros(len(stop), np.int64)
        self._number[self._order] = np.arange(len(stop)) - self._heads.repeat(self._counts)

    def _rows(self, tensor: int) -> Ints:
        at = int(np.searchsorted(self._listed, tensor))
        return self._order[self._heads[at] : self._heads[at] + self._counts[at]]

    def tensors(self, records: _Records) -> dict[str, bytes]:
        """The record of each tensor in the index, by name."""
        contents = self._of
        names, dtypes, shapes = contents.names, contents.dtypes, contents.shapes
        # In one box a tensor is whole.
        cuts = dict.fromkeys(self._listed.tolist(), b"")
        for tensor in self._listed[self._counts > 1].tolist():
            rows = self._rows(tensor)
            cuts[tensor] = self._corner[:, rows].tobytes() + self._size[:, rows].tobytes()
        given = [(names[tensor], tensor) for tensor in cuts]
        given += [(alias, self._positions[base]) for alias, base in contents.aliases.items()]
        keys = [
            (dtypes[tensor], shapes[tensor], name in contents.grads, cuts[tensor])
            for name, tensor in given
        ]
        kinds = dict(zip(keys, [tensor for _, tensor in given], strict=True))
        made = {
            key: records.made(self._tensor_of(tensor, grad=key[2])) for key, tensor in kinds.items()
        }
        return {name: made[key] for (name, _), key in zip(given, keys, strict=True)}

    def _tensor_of(self, tensor: int, *, grad: bool) -> PickledObject:
        shape, dtype, rows = (
            self._of.shapes[tensor],
            DTYPES.name(self._of.dtypes[tensor]),
            self._rows(tensor),
        )
        assert dtype is not None  # or nobody could lay out its data
        assert dtype.torch is not None
        corners, sizes = (
            columns[: len(shape), rows].T.tolist() for columns in (self._corner, self._size)
        )
        chunks = [
            PickledObject(CHUNK, {"offsets": _size(a), "sizes": _size(b)})
            for a, b in zip(corners, sizes, strict=True)
        ]
        properties = PickledObject(
            PROPERTIES, (Global("torch", dtype.torch), STRIDED, grad, CONTIGUOUS, False)
        )
        return PickledObject(
            TENSOR, {"properties": properties, "size": _size(shape), "chunks": chunks}
        )

    def items(self, records: _Records, texts: Mapping[str, bytes]) -> list[bytes]:
        """The records of all places: values, boxes, and boxes of tensors under their other names."""
        made: list[bytes] = []
        for file in self._files:
            if file.values:
                cut = _cut(records.made(_item(file.key, None, None)))
                starts, stops = (
                    np.array([one[side] for one in file.values], np.int64) for side in (1, 2)
                )
                names = [texts[name] for name, _, _ in file.values]
                made += _filled([cut] * len(names), names, starts, stops - starts)
        contents = self._of
        ranks = np.fromiter(map(len, contents.shapes), np.int64, len(contents.shapes))
        kinds, kind = np.unique(
            np.vstack((self._file, self._number, ranks[self._tensor], self._corner)),
            axis=1,
            return_inverse=True,
        )
        cuts = [
            _cut(records.made(_item(self._files[file].key, number, corner[:rank])))
            for file, number, rank, *corner in kinds.T.tolist()
        ]
        each = [cuts[one] for one in kind.reshape(-1).tolist()]
        made += _filled(
            each,
            [texts[contents.names[one]] for one in self._tensor.tolist()],
            self._start,
            self._nbytes,
        )
        for alias, base in contents.aliases.items():
            # Tied tensors: the same items under another name. torch's reader loads each name by itself, and need not know.
            rows = self._rows(self._positions[base])
            own = [each[row] for row in rows.tolist()]
            made += _filled(own, [texts[alias]] * len(own), self._start[rows], self._nbytes[rows])
        return made


NAME, OFFSET, LENGTH = "\ue000name", 0x7E57F00D, 0x7E57BEEF
"""Placeholders in the record of an item."""


def _item(
    key: str, number: int | None, corner: Sequence[int] | None
) -> tuple[PickledObject, PickledObject]:
    where = {} if corner is None else {"offset": _size(corner)}
    place = {"relative_path": key, "offset": OFFSET, "length": LENGTH}
    return PickledObject(INDEX, {"fqn": NAME, "index": number, **where}), PickledObject(INFO, place)


def _size(lengths: Sequence[int]) -> Called:
    return Called(SIZE, tuple(lengths))


def _cut(record: bytes) -> tuple[bytes, ...]:
    """The record of an item, cut where its name, its first byte and its length are filled in. Its two objects are no tuple."""
    (name,), (offset, length) = _texts([NAME]).values(), _numbers(np.array([OFFSET, LENGTH]))
    before, rest = record.removesuffix(pickle.TUPLE2 + pickle.MEMOIZE).split(name)
    middle, rest = rest.split(offset)
    return before, middle, *rest.split(length)


def _filled(
    cuts: Sequence[Sequence[bytes]], names: Sequence[bytes], starts: Ints, lengths: Ints
) -> list[bytes]:
    each = zip(cuts, names, _numbers(starts), _numbers(lengths), strict=True)
    return [
        b"%b%b%b%b%b%b%b" % (a, name, b, start, c, length, d)
        for (a, b, c, d), name, start, length in each
    ]


def _texts(texts: Sequence[str]) -> dict[str, bytes]:
    distinct = [*dict.fromkeys(texts)]
    raws = [*map(str.encode, distinct)]
    each = zip(distinct, raws, map(len, raws), strict=True)
    return {
        text: (b"%b%c%b\x94" % (pickle.SHORT_BINUNICODE, length, raw))
        if length < 256
        else pickle.BINUNICODE + struct.pack("<I", length) + raw + pickle.MEMOIZE
        for text, raw, length in each
    }


WIDTHS = (1, 2, 4, 5, 6, 7, 8)
OPENINGS = (
    pickle.BININT1,
    pickle.BININT2,
    pickle.BININT,
    *(pickle.LONG1 + bytes([width]) for width in WIDTHS[3:]),
)
LIMITS = np.array([1 << 8, 1 << 16, 1 << 31, 1 << 39, 1 << 47, 1 << 55], np.int64)
"""How many bytes pickle takes for a number, what stands before them, and the first number that takes the next width."""


def _numbers(column: Ints) -> list[bytes]:
    raw, widths = (
        column.astype("<i8").tobytes(),
        np.searchsorted(LIMITS, column, side="right").tolist(),
    )
    return [
        OPENINGS[width] + raw[8 * at : 8 * at + WIDTHS[width]] for at, width in enumerate(widths)
    ]


TUPLES = (
    pickle.EMPTY_TUPLE,
    *(code + pickle.MEMOIZE for code in (pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)),
)


def _around(count: int) -> tuple[bytes, bytes]:
    """The opcodes before and behind the elements of a tuple."""
    return (
        (b"", TUPLES[count])
        if count < len(TUPLES)
        else (pickle.MARK, pickle.TUPLE + pickle.MEMOIZE)
    )


def _paths(paths: Mapping[str, Path], texts: Mapping[str, bytes]) -> list[bytes]:
    steps = {step for path in paths.values() for step in path}
    made: dict[str | int, bytes] = dict(
        _texts([step for step in steps if isinstance(step, str)]).items()
    )
    numbers = [step for step in steps if isinstance(step, int)]
    made |= dict(zip(numbers, _numbers(np.array(numbers, np.int64)), strict=True))
    around: dict[Path, tuple[bytes, bytes]] = {}
    for head in {path[:-1] for path in paths.values()}:
        begin, end = _around(len(head) + 1)
        around[head] = begin + b"".join([made[step] for step in head]), end
    return [
        b"%b%b%b%b" % (texts[name], around[path[:-1]][0], made[path[-1]], around[path[:-1]][1])
        if path
        else texts[name] + TUPLES[0]
        for name, path in paths.items()
    ]


ENTRIES = 1000
"""Entries of a dict, or of a list, that are set by one opcode, as pickle does it."""


def _dict(entries: Sequence[bytes]) -> list[bytes]:
    return [DICT, *_set(entries, pickle.SETITEMS)]


def _set(entries: Sequence[bytes], end: bytes) -> list[bytes]:
    cut = (entries[first : first + ENTRIES] for first in range(0, len(entries), ENTRIES))
    return [one for some in cut for one in (pickle.MARK, *some, end)]
