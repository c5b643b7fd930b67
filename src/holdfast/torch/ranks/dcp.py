"""A nested state as torch's distributed checkpoint flattens it: every leaf under one flat name, non-tensors as archives.

    {"optim": {3: {"lr": 0.1}}, "list": [tensor, {}]}     "optim.3.lr"   ("optim", "3", "lr")     a value
                                                          "list.0"       ("list", 0)              a tensor
                                                          "list.1"       ("list", 1)              a value: an empty mapping

Mappings are entered, and their keys become text; lists are entered where a tensor or a mapping is in them; tuples never (torch
2.13, `_traverse.py`). torch drops empty mappings; here they are values. A value is a `torch.save` of the caller's own object.

`dcp_index` makes the index of a DCP directory, of torch's own classes: no other pickle is understood by torch's reader.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import torch
from msgspec import Struct, field
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

from holdfast.core import value as values
from holdfast.core.arrays import Ints
from holdfast.core.dtype import DTYPES
from holdfast.core.leaves import PLAIN, Leaves
from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import State
from holdfast.core.table import Table
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import Path, Unrolled, dotted, every_child, unroll, values_inside, walk
from holdfast.engine.stream import write_stream
from holdfast.engine.table import value_state
from holdfast.formats.native.manifest import as_column
from holdfast.formats.pickle.writer import ENDS_IN_NUL, ends_in_nul
from holdfast.formats.sharded import Contents, Delivered
from holdfast.formats.torch.write import lay_out_torch_zip
from holdfast.formats.tree_json.encode import encode_value
from holdfast.formats.tree_json.scalars import NO_UNICODE, is_unicode
from holdfast.saving.rows import lazy_tree
from holdfast.saving.state import tabulate_state
from holdfast.torch import versions
from holdfast.torch.serialization.pickling import StorageIds, pickle_object
from holdfast.torch.serialization.save import plan_object
from holdfast.torch.tensors.from_lazy import torch_dtype

REMEDY = "give its class state_dict() and load_state_dict(), or put the tensors into the state under names of their own"
"""Advice about an object with tensors in it."""


NUMPY_TAG = b'"numpy.'
"""In the JSON of every element of numpy."""


class Value(values.Value, frozen=True):
    """A leaf that is no tensor."""

    raw: object
    described: object
    """The object without torch's classes."""

    def digest(self) -> bytes:
        """A hash that is the same on every rank that has an equal value. Raises ValueError for one that cannot be pickled."""
        encoded = encode_value(self.described)
        # A pickle of equal values may differ: it tells whether two equal strings in them are one object.
        content = self._pickled() if encoded.problems else msgspec.json.encode(encoded.value)
        if NUMPY_TAG in content and any(ends_in_nul(one) for _, one in walk(self.described, every_child)):
            raise ValueError(ENDS_IN_NUL)
        return hashlib.blake2b(content, digest_size=16).digest()

    def _pickled(self) -> bytes:
        ids = StorageIds()
        kind = type(self.raw).__name__
        try:
            content = pickle_object(self.raw, ids, pickle_module=pickle, protocol=pickle.DEFAULT_PROTOCOL)
        except Exception as error:  # whatever the object's own methods raise
            raise ValueError(f"a {kind} that cannot be pickled ({type(error).__name__}: {error})") from error
        if ids.storages:
            raise ValueError(f"a {kind} with tensors in it, which would be out of reach in a pickle; {REMEDY}")
        return content

    def archive(self) -> bytes:
        """The bytes of `torch.save` for it; later changes of the object do not reach them."""
        out = io.BytesIO()
        # Values of an open checkpoint stand for torch's own, and are written as those.
        opened = any(type(one).__module__.split(".")[0] == "holdfast" for _, one in walk(self.raw, every_child))
        plan = lay_out_torch_zip(value_state(self.described)) if opened else plan_object(self.raw, None)
        write_stream(plan.files[0], out)
        return out.getvalue()


class FlatState(Struct):
    """A state by flat names."""

    values: dict[str, Value] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    pickled: set[str] = field(default_factory=set)
    """Arrays in tuples: they are pickled with the tuple, as torch does it, and are no tensors there."""
    problems: list[str] = field(default_factory=list)
    """What DCP has no form for."""

    def digests(self) -> dict[str, bytes]:
        """A hash of every value; what must not be pickled becomes a problem."""
        found = {}
        for name, value in self.values.items():
            try:
                found[name] = value.digest()
            except ValueError as error:
                self.problems.append(f"{name}: {error}")
        return found


def flatten(state: State, raw: object) -> FlatState:
    """Flatten a described state. `raw` is what it describes."""
    flat = FlatState()
    unroll(_Flattening(flat, state.leaves).take(state.tree, raw, ()))
    for name in [name for name in state.tensors if name not in flat.paths]:
        path = tuple(name.split("."))
        above = (flat.values.get(dotted(path[:i])) for i in range(len(path)))
        holder = next(filter(None, above), None)
        if holder is not None and not any(isinstance(inner, torch.Tensor | LazyTensor) for inner in values_inside(holder.raw)):
            flat.pickled.add(name)
        else:
            flat.problems.append(f"{name}: a tensor inside of a tuple; make it a list")
    return flat


def common_problems(state: State, table: Table, flat: FlatState) -> list[str]:
    """Problems with a state that no message between ranks, or no format, could hold."""
    problems = [f"metadata {key!r}: no Unicode text" for key, text in state.metadata.items() if not is_unicode(key + text)]
    most = DEFAULTS.rank
    wrong = {k: kind for k, kind in enumerate(table.kinds) if kind.traits.meta or len(kind.shape) > most}
    for name, kind in zip(table.names, table.kind, strict=True) if wrong else ():
        if kind in wrong and wrong[kind].traits.meta:
            problems.append(f"{name}: it is on the meta device, without data")
        if kind in wrong and len(wrong[kind].shape) > most:
            problems.append(f"{name}: {len(wrong[kind].shape)} dimensions are more than Limits(rank={most})")
    if is_unicode("".join(table.names)) and is_unicode("".join(flat.paths)):
        return problems
    names = dict.fromkeys([*table.names, *flat.paths])
    return problems + [f"{name}: {NO_UNICODE}" for name in names if not is_unicode(name)]


class _Flattening:
    """One walk through a described state and the caller's own, together."""

    def __init__(self, flat: FlatState, leaves: Leaves) -> None:
        self._flat, self._leaves = flat, leaves
        self._plain = not leaves.odd and not leaves.composites()

    def take(self, value: object, raw: object, path: Path) -> Unrolled[None]:
        inside = self._pairs(value, raw, path)
        if inside is None:
            self._add(value, raw, path)
        for key, inner, own in inside or ():
            if isinstance(inner, Mapping | list):
                yield self.take(inner, own, (*path, key))
            else:
                self._add(inner, own, (*path, key))

    def _pairs(self, value: object, raw: object, path: Path) -> Iterable[tuple[str | int, object, object]] | None:
        """The children of a mapping or a list that is entered: key, described value, the caller's own; None for a leaf."""
        if isinstance(value, Mapping) and isinstance(raw, Mapping) and (value or not path):
            return () if self._all_tensors(value, path) else zip(map(str, value), value.values(), raw.values(), strict=True)
        if isinstance(value, list) and isinstance(raw, list) and self._is_entered(value):
            return zip(range(len(value)), value, raw, strict=True)
        return None

    def _add(self, value: object, raw: object, path: Path) -> None:
        flat, made = self._flat, self._described(value)
        name = ".".join(map(str, path))
        if name in flat.paths:
            flat.problems.append(f"{name}: the name of two things")
        flat.paths[name] = path
        if isinstance(made, Composite):
            flat.problems.append(f"{name}: a {made.kind} tensor")
            flat.paths |= {f"{name}.{part}": (*path, part) for part in made.parts}
        elif not isinstance(made, LazyTensor) and not self._leaves.is_tensor(value):
            flat.values[name] = Value(raw, made)

    def _all_tensors(self, value: Mapping[object, object], path: Path) -> bool:
        """Take a mapping of plain tensors as a whole; False where it is another one, and nothing is done."""
        leaves, flat = self._leaves, self._flat
        if not self._plain or not value or not leaves.kinds.issuperset(map(type, value.values())):
            return False
        before = "".join([f"{key}." for key in path])
        names = {f"{before}{key}": (*path, str(key)) for key in value}
        if len(names) < len(value) or not flat.paths.keys().isdisjoint(names):
            return False
        flat.paths |= names
        return True

    def _described(self, value: object) -> object:
        # Without types of tensors it is the tree of a checkpoint.
        if not self._leaves.kinds or type(value) in PLAIN:
            return value
        if isinstance(value, Mapping | list | tuple):
            plain = PLAIN.issuperset(map(type, value)) and not isinstance(value, Mapping)
            return value if plain else lazy_tree(tabulate_state(value))
        return self._leaves.described(value)

    def _is_entered(self, value: object) -> bool:
        leaves = self._leaves
        inside = (inner for _, inner in walk(value, lambda one: enumerate(one) if isinstance(one, list) else None))
        return any(isinstance(leaves.described(one), LazyTensor | Composite | Mapping) or leaves.is_tensor(one) for one in inside)


def dcp_index(contents: Contents, delivered: Delivered, *, path: str) -> bytes:
    """The `.metadata` of a directory with these files, which is saved under a path.

    A tensor is a hundred opcodes. Tensors of one kind have the same ones, and so have items but for names and places: since
    protocol 4 the number of an entry in the memo is not written where the entry is made. So torch's objects are pickled once for
    each kind, and the records are put together from bytes.
    """
    records, boxes = _Records(), _DeliveredBoxes(contents, delivered)
    begin, before, first, second, third = records.made(partial(_empty_index, path, str(uuid.uuid4()))).split(DICT, 4)
    texts = _texts([*contents.paths, *contents.catalogue.names, *contents.values])
    held = boxes.tensors(records)
    if contents.values:
        held |= dict.fromkeys(contents.values, records.made(m.BytesStorageMetadata))
    state = [b"%b%b" % (texts[name], held[name]) for name in contents.paths if name in held]
    items = boxes.items(records, texts)
    listed = before, *_dict(state), first, *_dict(_paths(contents.paths, texts)), second, *_dict(items), third
    return b"".join((*records.first, begin, DICT, *listed, pickle.STOP))


DICT = pickle.EMPTY_DICT + pickle.MEMOIZE


def _empty_index(path: str, save_id: str) -> m.Metadata:
    made = m.Metadata({}, {}, {}, m.StorageMeta(checkpoint_id=str(path), save_id=save_id))
    if versions.VERSIONED:
        made.version = "1.0.0"
    return made


class _Records:
    """Pickles of torch's objects that may stand anywhere in one stream, and as often as is wanted.

    Of each kind an object is pickled and taken from the stack again, before anything else: so classes and the names of fields have
    their entries in the memo. What is pickled of that kind later names these entries, and none of its own.
    """

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self._pickler = _Pickler(self._out) if versions.STRIDES else pickle.Pickler(self._out)
        self.first = [pickle.PROTO + bytes([pickle.DEFAULT_PROTOCOL])]

    def made(self, make: Callable[[], object]) -> bytes:
        """The opcodes of an object of a kind."""
        one, record, same = (self._dumped(make()) for _ in range(3))
        assert record == same, "a record that names entries of its own"
        self.first += (one, pickle.POP, record, pickle.POP, same, pickle.POP)
        return record

    def _dumped(self, value: object) -> bytes:
        self._out.seek(0)
        self._out.truncate()
        self._pickler.dump(value)
        raw = self._out.getvalue()[2:-1]
        return raw[9:] if raw[:1] == pickle.FRAME else raw


class _DeliveredBoxes:
    """The boxes in the files of all ranks, as columns, in the order of the files."""

    def __init__(self, contents: Contents, delivered: Delivered) -> None:
        self._contents = contents
        self._files = [receipt for _, receipts in delivered for receipt in receipts]
        parts = [(writes, receipt.stored) for writes, receipts in delivered for receipt in receipts]
        boxes = [as_column(stored.boxes) for _, stored in parts]
        self._file = np.arange(len(parts)).repeat([len(own) for own in boxes])
        self._tensor, self._start, stop = np.zeros((3, len(self._file)), np.int64)
        rank = contents.catalogue.rank
        self._corner, self._size = np.zeros((rank, len(stop)), np.int64), np.ones((rank, len(stop)), np.int64)
        first = 0
        for (writes, stored), own in zip(parts, boxes, strict=True):
            here, first = slice(first, first + len(own)), first + len(own)
            self._tensor[here], self._start[here], stop[here] = (
                writes.tensors[own],
                as_column(stored.starts),
                as_column(stored.stops),
            )
            self._corner[: len(writes.offsets), here] = writes.offsets[:, own]
            self._size[: len(writes.sizes), here] = writes.sizes[:, own]
        self._nbytes = stop - self._start
        self._order = self._tensor.argsort(kind="stable")
        self._listed, self._heads, self._counts = np.unique(self._tensor[self._order], return_index=True, return_counts=True)
        self._number = np.zeros(len(stop), np.int64)
        self._number[self._order] = np.arange(len(stop)) - self._heads.repeat(self._counts)

    def _rows(self, tensor: int) -> Ints:
        at = int(np.searchsorted(self._listed, tensor))
        return self._order[self._heads[at] : self._heads[at] + self._counts[at]]

    def tensors(self, records: _Records) -> dict[str, bytes]:
        """The record of each tensor in the index, by name."""
        catalogue, grads = self._contents.catalogue, self._contents.grads
        names, dtypes, shapes = catalogue.names, catalogue.dtypes, catalogue.shapes
        # In one box a tensor is whole.
        cuts = dict.fromkeys(self._listed.tolist(), b"")
        for tensor in self._listed[self._counts > 1].tolist():
            rows = self._rows(tensor)
            cuts[tensor] = self._corner[:, rows].tobytes() + self._size[:, rows].tobytes()
        given = [(names[tensor], tensor) for tensor in cuts]
        given += [(alias, catalogue.positions[base]) for alias, base in self._contents.aliases.items()]
        keys = [(dtypes[tensor], shapes[tensor], name in grads, cuts[tensor]) for name, tensor in given]
        kinds = dict(zip(keys, [tensor for _, tensor in given], strict=True))
        made = {key: records.made(partial(self._tensor_of, tensor, grad=key[2])) for key, tensor in kinds.items()}
        return {name: made[key] for (name, _), key in zip(given, keys, strict=True)}

    def _tensor_of(self, tensor: int, *, grad: bool) -> m.TensorStorageMetadata:
        catalogue, rows = self._contents.catalogue, self._rows(tensor)
        shape, dtype = catalogue.shapes[tensor], DTYPES.name(catalogue.dtypes[tensor])
        assert dtype is not None  # the catalogue has looked it up
        corners, sizes = (columns[: len(shape), rows].T.tolist() for columns in (self._corner, self._size))
        chunks = [m.ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in zip(corners, sizes, strict=True)]
        properties = m.TensorProperties(dtype=torch_dtype(dtype), requires_grad=grad)
        return m.TensorStorageMetadata(properties, torch.Size(shape), chunks)

    def items(self, records: _Records, texts: Mapping[str, bytes]) -> list[bytes]:
        """The records of all places: values, boxes, and boxes of tensors under their other names."""
        made: list[bytes] = []
        for file in self._files:
            if file.values:
                cut = _cut(records.made(partial(_item, file.key, None, None)))
                starts, stops = (np.array([one[side] for one in file.values], np.int64) for side in (1, 2))
                names = [texts[name] for name, _, _ in file.values]
                made += _filled([cut] * len(names), names, starts, stops - starts)
        catalogue = self._contents.catalogue
        ranks = np.fromiter(map(len, catalogue.shapes), np.int64, len(catalogue))
        kinds, kind = np.unique(
            np.vstack((self._file, self._number, ranks[self._tensor], self._corner)), axis=1, return_inverse=True
        )
        cuts = [
            _cut(records.made(partial(_item, self._files[file].key, number, corner[:rank])))
            for file, number, rank, *corner in kinds.T.tolist()
        ]
        each = [cuts[one] for one in kind.reshape(-1).tolist()]
        made += _filled(each, [texts[catalogue.names[one]] for one in self._tensor.tolist()], self._start, self._nbytes)
        for alias, base in self._contents.aliases.items():
            # Tied tensors: the same items under another name. torch's reader loads each name by itself, and need not know.
            rows = self._rows(catalogue.positions[base])
            own = [each[row] for row in rows.tolist()]
            made += _filled(own, [texts[alias]] * len(own), self._start[rows], self._nbytes[rows])
        return made


NAME, OFFSET, LENGTH = "\ue000name", 0x7E57F00D, 0x7E57BEEF
"""Placeholders in the record of an item."""


def _item(key: str, number: int | None, corner: Sequence[int] | None) -> tuple[m.MetadataIndex, _StorageInfo]:
    """The record of an item. The text of its name is another object each time, as that of two items is."""
    name = NAME[:1] + NAME[1:]
    return m.MetadataIndex(name, None if corner is None else torch.Size(corner), number), _StorageInfo(key, OFFSET, LENGTH)


def _cut(record: bytes) -> tuple[bytes, ...]:
    """The record of an item, cut where its name, its first byte and its length are filled in. Its two objects are no tuple."""
    (name,), (offset, length) = _texts([NAME]).values(), _numbers(np.array([OFFSET, LENGTH]))
    before, rest = record.removesuffix(pickle.TUPLE2 + pickle.MEMOIZE).split(name)
    middle, rest = rest.split(offset)
    return before, middle, *rest.split(length)


def _filled(cuts: Sequence[Sequence[bytes]], names: Sequence[bytes], starts: Ints, lengths: Ints) -> list[bytes]:
    each = zip(cuts, names, _numbers(starts), _numbers(lengths), strict=True)
    return [b"%b%b%b%b%b%b%b" % (a, name, b, start, c, length, d) for (a, b, c, d), name, start, length in each]


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
OPENINGS = (pickle.BININT1, pickle.BININT2, pickle.BININT, *(pickle.LONG1 + bytes([width]) for width in WIDTHS[3:]))
LIMITS = np.array([1 << 8, 1 << 16, 1 << 31, 1 << 39, 1 << 47, 1 << 55], np.int64)
"""How many bytes pickle takes for a number, what stands before them, and the first number that takes the next width."""


def _numbers(column: Ints) -> list[bytes]:
    raw, widths = column.astype("<i8").tobytes(), np.searchsorted(LIMITS, column, side="right").tolist()
    return [OPENINGS[width] + raw[8 * at : 8 * at + WIDTHS[width]] for at, width in enumerate(widths)]


TUPLES = (pickle.EMPTY_TUPLE, *(code + pickle.MEMOIZE for code in (pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)))


def _paths(paths: Mapping[str, Path], texts: Mapping[str, bytes]) -> list[bytes]:
    steps = {step for path in paths.values() for step in path}
    made: dict[str | int, bytes] = dict(_texts([step for step in steps if isinstance(step, str)]).items())
    numbers = [step for step in steps if isinstance(step, int)]
    made |= dict(zip(numbers, _numbers(np.array(numbers, np.int64)), strict=True))
    around: dict[Path, tuple[bytes, bytes]] = {}
    for head in {path[:-1] for path in paths.values()}:
        inside = b"".join([made[step] for step in head])
        short = len(head) < len(TUPLES) - 1
        around[head] = (inside, TUPLES[len(head) + 1]) if short else (pickle.MARK + inside, pickle.TUPLE + pickle.MEMOIZE)
    return [
        b"%b%b%b%b" % (texts[name], around[path[:-1]][0], made[path[-1]], around[path[:-1]][1]) if path else texts[name] + TUPLES[0]
        for name, path in paths.items()
    ]


ENTRIES = 1000
"""Entries of a dict that are set by one opcode, as pickle does it."""


def _dict(entries: Sequence[bytes]) -> list[bytes]:
    made = [DICT]
    for first in range(0, len(entries), ENTRIES):
        made += (pickle.MARK, *entries[first : first + ENTRIES], pickle.SETITEMS)
    return made


def pickled_index(metadata: m.Metadata) -> bytes:
    """An index as every torch understands it."""
    if not versions.STRIDES:
        return pickle.dumps(metadata)
    out = io.BytesIO()
    _Pickler(out).dump(metadata)
    return out.getvalue()


class _Pickler(pickle.Pickler):
    """Leaves out the strides that torch 2.15 adds to the properties of a tensor: older versions refuse them, none needs them."""

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401 (the pickler's own)
        if type(obj) is not m.TensorProperties:
            return NotImplemented
        made, args, state, *_ = cast(tuple[Any, ...], obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL))
        return made, args, state[:5]
