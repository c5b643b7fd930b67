"""`TorchPickle`: a state with tensors to the `data.pkl` of a torch file.

    tensor       torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, OrderedDict()[, flags])
    untyped      torch._utils._rebuild_tensor_v3(…, OrderedDict(), dtype[, flags])              fp8, uint16, …
    parameter    torch._utils._rebuild_parameter(tensor, requires_grad, OrderedDict())
    attributes   torch._utils._rebuild_parameter_with_state, torch._tensor._rebuild_from_type_v2
    storage      BINPERSID of ('storage', class, key, location, count)

The count of a storage and the offset of a tensor in it are known when all tensors were seen: their places in the pickle are noted,
and filled in by `finish`.

What torch's pickler makes anew for each tensor (the tuples, the empty OrderedDict, the text 'conj') is made anew here, and what it
has once ('storage', 'cpu', the key of a storage) is shared, so that the bytes are the same.

Sparse, quantised, nested and jagged tensors are one call over their plain parts (`formats.torch.composites`).

Tensors of a table (`PickledRows`) are written by templates. Those of a kind have the same opcodes, but for the key of their storage
and the numbers that the memo counts.

1. The opcodes of a kind are known before (`kind_opcodes`): bytes, references to globals and texts, and places where the memo takes
   a number. As long as these numbers have one byte, and for the first tensor that refers to something, they are written one by one.
2. From then on a tensor is its key between two pieces of bytes (`Template`). The numbers are four bytes wide, and are filled in
   together when many pieces are joined (`_settle`), as those of texts and dicts are.

All others (odd rows, composites, lazy tensors that are parts of a storage) are written opcode by opcode, by the same writer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import accumulate, repeat
from typing import cast

import numpy as np

from holdfast.core.chunk import c_strides
from holdfast.core.dtype import DType
from holdfast.core.limits import Limits
from holdfast.core.opaque import Device, Global, Size
from holdfast.core.table import ODD, Kind
from holdfast.core.tensor import Composite, LazyTensor, Traits
from holdfast.formats.pickle.writer import (
    BATCH_ITEMS,
    INT1,
    LONG_PUT,
    PUT1,
    TEXT,
    TUPLES,
    PickleWriter,
    Row,
    get,
    integer,
    put,
)
from holdfast.formats.torch.composites import COMPOSITES
from holdfast.formats.torch.pickled import (
    NO_ROWS,
    RECORD_KEY,
    REMEMBER,
    STORAGE,
    UTILS,
    PickledKind,
    PickledRows,
    StorageRecord,
    StorageRecords,
    Template,
    as_pairs,
    as_texts,
    builder_of,
    fill_in,
    integers,
    is_simple,
    problem_of,
)
from holdfast.formats.torch.table import LAYOUTS
from holdfast.plan.saves import BATCH

TENSOR = Global("torch", "Tensor")
BUFFER: dict[str, object] = {"persistent": True, "_is_buffer": True}
"""The attributes by which an `nn.Buffer` is known."""

LAYOUT_OF = {name: Global("torch", name) for name in LAYOUTS}
"""One object for each layout, as torch has it."""

ZERO = integer(0)
OFFSET = 4
"""From the count of a storage to the offset in it: the tuple's end, its number, BINPERSID."""


SHORT = 255
"""The last number of the memo that takes one byte."""

PUT_LATER = bytes([*b"r", 0, 0, 0, 0])
"""LONG_BINPUT of a number that is filled in later. This very object is looked for."""

PIECES = 4096
"""More pieces than this are joined once a batch of items is written: they take memory."""

MANY = 16
"""Items of a dict that are worth to be looked at together."""

AGAIN = 128
"""After so many items it is tried again to write all others together."""

ONE_DIGIT = 10
"""CPython has a text of one character once, so the key of such a record may be the same object as a text of the state."""

KEY_TEXTS = [TEXT(b"X", length) for length in range(20)]
"""How a text of so many bytes begins."""


class TorchPickle(PickleWriter):
    """The pickle of a torch file, and the records that it points at.

    torch makes the location of a storage on a device anew at each use, and `anew` writes it so.
    """

    def __init__(self, limits: Limits | None = None, *, trim: bool = True, rows: PickledRows = NO_ROWS, anew: bool = False) -> None:
        super().__init__(limits)
        self.storages = StorageRecords(trim=trim)
        self.sources: list[int | StorageRecord] = []
        """Of each record: the number of a storage of the table, or what tensors by themselves asked for."""
        self._anew = anew
        self._given = rows
        self._plain_rows = {kind: self.rows.get(kind, PickleWriter._problem) for kind in (*rows.types, *rows.others)}
        """How values of the types of rows are written that are none: in the attributes of a container."""
        self.rows |= dict.fromkeys(rows.others, TorchPickle._other)
        self.rows |= dict.fromkeys(rows.types, TorchPickle._row)
        self._aside = 0
        """How many containers there are around, of which the attributes are being written."""
        self._come = 0
        """Rows so far: they come in their order."""
        self._places: dict[int, int] | None = None
        """The row of each value, by identity; made when one comes out of its turn."""
        self._records: dict[int, int] = {}
        """The record of each storage of the table."""
        self._kinds: list[PickledKind | None] = [PickledKind.of(kind, anew=anew) for kind in rows.kinds]
        self._alike: dict[tuple[object, ...], PickledKind | None] = {}
        """Kinds of lazy tensors."""
        self._keys: list[int] = []
        """The memo's number of each record's key."""
        self._identities, self._stop = [*map(id, rows.values)], len(rows.values)
        self._templates: dict[int, Template] = {}
        """By the identity of the bytes that stand behind a key: in `out`, these are to be filled in."""
        self._numbers: list[int] = []
        """Of each of them that is not filled in yet: the memo's first number."""
        self._puts: list[int] = []
        """The same for each `PUT_LATER`, also at the begin of a template."""
        self._later = {id(PUT_LATER)}
        """The identities of bytes that begin with one, and of those behind a key."""
        self._refs: dict[str, tuple[str, bytes]] = {}
        """Texts that came twice, and references to them."""
        self._head, self._next_head = KEY_TEXTS[2], 100
        """How the key of a record begins, and the first record where it begins in another way."""
        self._open: list[tuple[int, StorageRecord, int, int]] = []
        """Where in `out` a count and an offset are left open; the record, the first bit, the bits of an element."""

    @staticmethod
    @cache
    def written_types() -> Mapping[type, Row]:
        return {
            **PickleWriter.written_types(),
            dict: TorchPickle._dict,
            LazyTensor: TorchPickle.tensor,
            Composite: TorchPickle._composite,
            Size: TorchPickle.size,
            Device: TorchPickle._device,
            DType: TorchPickle._torch_dtype,
            Global: TorchPickle._global_or_layout,
        }

    def finish(self) -> bytes:
        out = self.out
        self.storages.close()
        for place, record, start, bits in self._open:
            out[place] = integer(record.count)
            # An empty tensor begins nowhere, and may come before what its record holds.
            out[place + OFFSET] = integer((start - record.base) // bits) if start > record.base else ZERO
        out.append(b".")
        self._settle(0, 0, 0)
        return out[0]

    def _settle(self, first: int, row: int, put: int) -> None:
        """Join the pieces from one on, and fill in what is open in them: the numbers from these on."""
        pieces, templates, later = self.out[first:], self._templates, self._later
        content = bytearray().join(pieces)
        if len(self._numbers) > row or len(self._puts) > put:
            lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
            starts = lengths.cumsum() - lengths
            marks = [(at, mark) for at, mark in enumerate(map(id, pieces)) if mark in later]
            places = [(at, templates[mark]) for at, mark in marks if mark in templates]
            for begin in range(0, len(places), BATCH):
                some = places[begin : begin + BATCH]
                numbers = np.array(self._numbers[row + begin : row + begin + BATCH], np.int64)
                fill_in(content, [made for _, made in some], starts[[at for at, _ in some]], numbers)
            holes = starts[[at for at, mark in marks if mark not in templates]] + 1
            filled = np.array(self._puts[put:], "<u4").view(np.uint8).reshape(-1, 4)
            np.frombuffer(content, np.uint8)[holes[:, None] + np.arange(4)] = filled
        self.out[first:] = [bytes(content)]
        del self._numbers[row:], self._puts[put:]

    def attributes(self, value: dict[object, object]) -> None:
        """What stands in the attributes of a container is nobody's row."""
        self._aside += 1
        super().attributes(value)
        self._aside -= 1

    def _dict(self, value: dict[object, object]) -> None:
        """As for all values, in fewer steps."""
        identity, number, count = id(value), self.count, len(value)
        if identity in self.memo or number <= SHORT or not 1 < count < BATCH_ITEMS:
            super()._dict(value)
            return
        self.out += (b"}", PUT_LATER)
        self._puts += (number,)
        self.memo[identity] = number
        self.count = number + 1
        if not self.too_deep():
            self._fill(value.items(), b"u")

    def _fill(self, items: Collection[tuple[object, object]], opcode: bytes) -> None:
        """As for all values. No function is called for a row with a new storage, nor for a text that came twice."""
        if self._aside:
            super()._fill(items, opcode)
            return
        out, memo, path, refs, sources = self.out, self.memo, self.path, self._refs, self.sources
        given, identities, kinds, records = self._given, self._identities, self._kinds, self._records
        values, types, kind_of, storage_of = given.values, given.types, given.kind, given.storage
        numbers, puts, stop, keyed = self._numbers, self._puts, self._stop, opcode in b"su"
        count = len(items)
        again, begin = (0, (len(out), len(numbers), len(puts))) if count >= MANY else (count, None)
        texts: Sequence[bytes] | None = None
        if opcode in b"eu":
            out += (b"(",)
        path += (None,)
        for at, (key, item) in enumerate(items):
            if keyed and at >= again and self.count > SHORT and len(sources) >= ONE_DIGIT:
                if count - at >= MANY and self._fill_many(*zip(*[*items][at:], strict=True)):
                    break
                again = at + AGAIN
            path[-1] = key
            later = False
            if not keyed:
                pass
            elif type(key) is not str:
                if type(key) is int and 0 <= key <= 0xFFFF:
                    out += (INT1[key] if key <= 0xFF else b"M%c%c" % (key & 0xFF, key >> 8),)
                else:
                    self.write(key)
            elif key in refs and refs[key][0] is key:
                out += (refs[key][1],)
            elif (identity := id(key)) in memo:
                refs[key] = key, get(memo[identity])
                out += (refs[key][1],)
            elif (number := self.count) <= SHORT:
                self._str(key)
            else:
                if texts is None:
                    texts = as_texts([key for key, _ in items])
                if later := bool(texts[at]):
                    out += (texts[at],)
                    puts += (number,)
                    memo[identity] = number
                    self.count = number + 1
                else:
                    self._str(key)
            kind = type(item)
            if kind in types:
                row, number, record = self._come, self.count, len(sources)
                if row < stop and values[row] is item and identities[row] not in memo:
                    storage, like = storage_of[row], kinds[kind_of[row]]
                    made = None if like is None else like.new
                    if made is not None and storage != ODD and storage not in records and number > SHORT and record >= ONE_DIGIT:
                        if record >= self._next_head:
                            self._head, self._next_head = KEY_TEXTS[len(str(record))], 10 ** len(str(record))
                        out += (made.behind_text if later else made.before, b"%b%d" % (self._head, record), made.behind)
                        self._keys += (number,)
                        numbers += (number,)
                        records[storage] = record
                        sources += (storage,)
                        self.count = number + made.count
                        memo[identities[row]] = self.count - 1
                        self._come = row + 1
                        continue
            if later:
                out += (PUT_LATER,)
            if kind in types:
                self._row(item)
            elif kind is dict:
                self._dict(item)  # type: ignore[arg-type]
            elif kind is int and 0 <= item <= 0xFFFF:  # type: ignore[operator]
                out += (INT1[item] if item <= 0xFF else b"M%c%c" % (item & 0xFF, item >> 8),)  # type: ignore[operator,call-overload]
            else:
                self.write(item)
        del path[-1]
        out += (opcode,)
        if begin and len(out) - begin[0] > PIECES and (not self._open or self._open[-1][0] < begin[0]):
            self._settle(*begin)

    def _fill_many(self, keys: tuple[object, ...], values: tuple[object, ...]) -> bool:
        """Texts and rows of which none has come before, each with a storage of its own: all at once. False for others."""
        given = self._given
        if {*map(type, keys)} != {str} or not given.types.issuperset(map(type, values)):
            return False
        texts, own, memo, count, first = [*map(id, keys)], [*map(id, values)], self.memo, len(keys), self._come
        stop = first + count
        if not memo.keys().isdisjoint(texts) or [*map(id, given.values[first:stop])] != own or not memo.keys().isdisjoint(own):
            return False
        storages = given.storage[first:stop]
        begin = len(self.sources)
        if begin < ONE_DIGIT or ODD in storages or len({*storages}) < count or not self._records.keys().isdisjoint(storages):
            return False
        for kind in {self._kinds[kind] for kind in {*given.kind[first:stop]}}:
            if kind is None or not self._has_named(kind):
                return False
            if kind.new is None:
                self._template(kind, new=True)
        made = cast("list[Template]", [self._kinds[kind].new for kind in given.kind[first:stop]])  # type: ignore[union-attr]
        numbers = [*accumulate([template.count + 1 for template in made], initial=self.count)]
        raws = [str(key).encode("utf-8", "surrogatepass") for key in keys]
        record_keys = [b"%d" % record for record in range(begin, begin + count)]
        pieces: list[bytes] = [b""] * (7 * count)
        pieces[0::7] = map(TEXT, repeat(b"X"), map(len, raws))
        pieces[1::7] = raws
        pieces[2::7] = map(LONG_PUT, repeat(b"r"), numbers[:-1])
        pieces[3::7] = [template.before for template in made]
        pieces[4::7] = [KEY_TEXTS[len(key)] for key in record_keys]
        pieces[5::7] = record_keys
        pieces[6::7] = [template.behind for template in made]
        content = bytearray().join(pieces)
        puts = np.array(numbers, np.int64)
        ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))[5::7]
        fill_in(content, made, ends, puts[:-1] + 1)
        self.out.append(bytes(content))
        memo.update(zip(texts, numbers, strict=False))
        memo.update(zip(own, [number - 1 for number in numbers[1:]], strict=True))
        self._keys.extend([number + 1 for number in numbers[:-1]])
        self._records.update(zip(storages, range(begin, begin + count), strict=True))
        self.sources += storages
        self.count, self._come = numbers[-1], stop
        return True

    def _row(self, value: object) -> None:
        """A value of the type of a row."""
        given, row = self._given, self._come
        if self._aside:
            self._plain_rows[type(value)](self, value)
            return
        next_one = row < len(given.values) and given.values[row] is value
        self._come = row + next_one
        if self.known(value):
            return
        if not next_one:
            if self._places is None:
                self._places = {id(one): row for row, one in enumerate(given.values)}
            found = self._places.get(id(value))
            if found is None:
                self._other(value)
                return
            row = found
            self._come = row + 1
        storage, kind = given.storage[row], self._kinds[given.kind[row]]
        if storage == ODD or kind is None:
            made = given.view(row)
            self.keep(made)
            self._by_itself(made)
            if id(made) in self.memo:
                self.memo[id(value)] = self.memo[id(made)]
            return
        record = self._records.get(storage)
        if record is None:
            record = self._records[storage] = len(self.sources)
            self.sources.append(storage)
        self._alike_tensor(value, kind, record)

    def _other(self, value: object) -> None:
        """A value for which another is written, where there is one."""
        found = value if self._aside else self._given.described(value)
        if found is value:
            self._plain_rows[type(value)](self, value)
        else:
            self._by_itself(found)

    def _by_itself(self, made: object) -> None:
        """What was made of a value: no row, whatever its type."""
        if isinstance(made, LazyTensor):
            self.tensor(made)
        else:
            self.write(made)

    def _alike_tensor(self, value: object, kind: PickledKind, record: int) -> None:
        """A tensor of which the pickle knows all when it comes."""
        number, new = self.count, record == len(self._keys)
        if number <= SHORT or record < ONE_DIGIT or not self._has_named(kind):
            self._by_opcodes(kind, record)
        else:
            made = (kind.new if new else kind.known) or self._template(kind, new=new)
            if new:
                self._keys.append(number)
                key = b"%d" % record
                self.out += (made.before, KEY_TEXTS[len(key)], key)
            else:
                self.out += (made.before, get(self._keys[record]))
            self._numbers += (number,)
            self.out.append(made.behind)
            self.count = number + made.count
        self.memo[id(value)] = self.count - 1

    def _by_opcodes(self, kind: PickledKind, record: int) -> None:
        references, write = self._references, self.out.append
        if kind.named and kind.joined is None:
            kind.joined = self._joined(kind)
        for opcode in kind.joined or kind.opcodes:
            if type(opcode) is bytes:
                write(opcode)
            elif opcode is REMEMBER:
                number = self.count
                self.count = number + 1
                write(PUT1[number] if number <= SHORT else LONG_PUT(b"r", number))
            elif opcode is RECORD_KEY:
                self._key(record)
            elif opcode in references:
                write(references[opcode])
            elif type(opcode) is str:
                self._shared(opcode)
            else:
                self.name(*opcode)  # type: ignore[misc]  # the name of a global
        kind.named = True

    def _joined(self, kind: PickledKind) -> tuple[object, ...]:
        """The opcodes of a kind with fewer pieces: all that they refer to is known."""
        joined: list[object] = []
        known = b""
        for one in kind.opcodes:
            if one is REMEMBER or one is RECORD_KEY:
                joined += (known, one) if known else (one,)
                known = b""
            else:
                known += one if type(one) is bytes else self._references[one]
        return tuple(joined)

    def _has_named(self, kind: PickledKind) -> bool:
        """Whether all that tensors of a kind refer to is in the pickle."""
        kind.named = kind.named or self._references.keys() >= kind.refers
        return kind.named

    def _template(self, kind: PickledKind, *, new: bool) -> Template:
        """The opcodes of a kind in this pickle, without the key: all that they refer to is known."""
        references = self._references
        pieces = [one if type(one) is bytes else references.get(one, b"r0000") for one in kind.opcodes]
        cut = kind.opcodes.index(RECORD_KEY)
        # The numbers of the memo are filled in later, and then they are long. A new key is remembered as well.
        behind = pieces[cut if new else cut + 1 :]
        ends = [*accumulate(map(len, behind), initial=0)]
        remembers = [at for at, one in enumerate(kind.opcodes[cut if new else cut + 1 :]) if one is REMEMBER or one is RECORD_KEY]
        holes = np.array([ends[at] + 1 for at in remembers], np.int64)
        before = b"".join(pieces[:cut])
        made = Template(before, PUT_LATER + before, b"".join(behind), holes, len(remembers))
        self._templates[id(made.behind)] = made
        self._later |= {id(made.behind), id(made.behind_text)}
        if new:
            kind.new = made
        else:
            kind.known = made
        return made

    def tensor(self, tensor: LazyTensor) -> None:
        """A tensor with all that it is beyond its elements."""
        if self.known(tensor):
            return
        kind = self._whole_kind(tensor)
        if kind is not None:
            self._alike_tensor(tensor, kind, self._place(tensor)[0].number)
            return
        whole, tensor = tensor, as_pairs(tensor)
        problem = problem_of(tensor)
        if problem:
            self.refuse(problem)
            return
        traits = tensor.traits
        if traits.subclass is not None or (not traits.parameter and (traits.state is not None or traits.buffer)):
            self.name("torch._tensor", "_rebuild_from_type_v2")
            self.out.append(b"(")
            self.name(UTILS, builder_of(tensor))
            self._global(traits.subclass or TENSOR)
            self._args(tensor, traits.requires_grad)
            self.write(BUFFER if traits.state is None and traits.buffer else traits.state)
            self.end_call(b"t")
        elif traits.parameter:
            self._begin_parameter(traits)
            self._plain(tensor, requires_grad=False)
            self._end_parameter(traits)
        else:
            self._plain(tensor, traits.requires_grad)
        self.memo[id(whole)] = self.count - 1

    def _whole_kind(self, tensor: LazyTensor) -> PickledKind | None:
        """The kind of a tensor that is all of its storage in C order, and so of its record, whoever shares it; None for others."""
        dtype, traits, shape, chunks = tensor.dtype, tensor.traits, tensor.shape, tensor.chunks
        if len(chunks) != 1 or not is_simple(traits) or problem_of(tensor):
            return None
        (chunk,) = chunks
        storage, bits = chunk.storage, dtype.bits
        if chunk.offset or dtype.packed or math.prod(shape) * bits != storage.nbytes * 8 or not storage.nbytes:
            return None
        key = dtype, shape, chunk.strides, traits.requires_grad, traits.parameter, storage.location
        if key not in self._alike:
            plain = chunk.strides == c_strides(shape, bits)
            self._alike[key] = (
                PickledKind.of(Kind.plain(dtype, shape, traits, location=storage.location), anew=self._anew) if plain else None
            )
        return self._alike[key]

    def _place(self, tensor: LazyTensor) -> tuple[StorageRecord, int, tuple[int, ...]]:
        """The record of a tensor, its first bit in the source storage, and its strides in elements."""
        placed = self.storages.place(tensor, self.path, len(self.sources))
        if placed[0].number == len(self.sources):
            self.sources.append(placed[0])
        return placed

    def _begin_parameter(self, traits: Traits) -> None:
        if traits.state:
            self.name(UTILS, "_rebuild_parameter_with_state")
            self.out.append(b"(")
        else:
            self.name(UTILS, "_rebuild_parameter")

    def _end_parameter(self, traits: Traits) -> None:
        self._bool(traits.requires_grad)
        self.hooks()
        if traits.state:
            self.write(traits.state)
        self.end_call(b"t" if traits.state else TUPLES[3])

    def _plain(self, tensor: LazyTensor, requires_grad: bool) -> None:
        """The tensor without what it is beyond its elements."""
        self.name(UTILS, builder_of(tensor))
        self._args(tensor, requires_grad)
        self.out.append(b"R")
        self.put()

    def _args(self, tensor: LazyTensor, requires_grad: bool) -> None:
        """The tuple of arguments of `_function`."""
        dtype, traits = tensor.dtype, tensor.traits
        self.out.append(b"(")
        if traits.meta:
            self._torch_dtype(dtype)
            self._ints(tensor.shape)
            self._ints(c_strides(tensor.shape, 1))
            self._bool(requires_grad)
        else:
            self.view(tensor)
            self._bool(requires_grad)
            self.hooks()
            if dtype.storage is None:
                self._torch_dtype(dtype)
            if traits.conj or traits.neg:
                self._flags(traits)
        self.out.append(b"t")
        self.put()

    def view(self, tensor: LazyTensor) -> None:
        """A storage, an offset, a size and a stride."""
        record, start, strides = self._place(tensor)
        out = self.out
        self._begin_storage(tensor.dtype)
        self._key(record.number)
        self._location(record.location)
        self._open.append((len(out), record, start, tensor.dtype.bits))
        out += (b"", b"t")
        self.put()
        out += (b"Q", b"")
        self._ints(tensor.shape)
        self._ints(strides)

    def _begin_storage(self, dtype: DType) -> None:
        """A storage, up to its key."""
        self.out.append(b"(")
        self._shared(STORAGE)
        if dtype.storage is None:
            self.name("torch.storage", "UntypedStorage")
        else:
            self.name("torch", dtype.storage)

    def _key(self, record: int) -> None:
        """The name of a record: the text at first, then a reference to it."""
        if record < len(self._keys):
            self.out.append(get(self._keys[record]))
            return
        key = str(record)
        number = self.memo.get(id(key)) if record < ONE_DIGIT else None
        if number is not None:
            self.out.append(get(number))
        else:
            number = self.count
            self.count = number + 1
            self.out += (KEY_TEXTS[len(key)], key.encode(), put(number))
            if record < ONE_DIGIT:
                self.keep(key)
                self.memo[id(key)] = number
        self._keys.append(number)

    def _location(self, location: str) -> None:
        if self._anew and location != "cpu":
            raw = location.encode("utf-8")
            self.out.append(TEXT(b"X", len(raw)) + raw)
            self.put()
        else:
            self._shared(location)

    def _shared(self, text: str) -> None:
        """A text that torch has once, however often it is written."""
        found = self._references.get(text)
        if found is None:
            self._str(text)
            found = self._references[text] = get(self.memo[id(text)])
        else:
            self.out.append(found)

    def _ints(self, values: tuple[int, ...]) -> None:
        """A tuple of integers, made anew."""
        self.out.append(integers(values))
        if values:
            self.put()

    def hooks(self) -> None:
        """An empty OrderedDict, where torch had backward hooks once."""
        self.name("collections", "OrderedDict")
        self.out.append(b")R")
        self.put()

    def _flags(self, traits: Traits) -> None:
        flags = {name: True for name, there in (("neg", traits.neg), ("conj", traits.conj)) if there}
        self.out.append(b"}")
        self.put()
        if len(flags) > 1:
            self.out.append(b"(")
        for flag in flags:
            self.out.append(b"X" + len(flag).to_bytes(4, "little") + flag.encode())
            self.put()
            self.out.append(b"\x88")
        self.out.append(b"u" if len(flags) > 1 else b"s")

    def end_call(self, tuple_opcode: bytes) -> None:
        """The arguments become a tuple, and are called with."""
        self.out.append(tuple_opcode)
        self.put()
        self.out.append(b"R")
        self.put()

    def _composite(self, whole: Composite) -> None:
        if self.known(whole):
            return
        write = COMPOSITES.get(whole.kind)
        if write is None:
            self.refuse(f"a tensor of the unknown kind {whole.kind!r}")
            return
        if self.too_deep():
            return
        if whole.traits.requires_grad and not whole.traits.parameter and whole.kind not in ("quantized", "jagged"):
            # torch's own call has no place for it: such a tensor comes back without from torch.save as well (2.13).
            self.notes.append(f"{self.where()}: requires_grad of a {whole.kind} tensor has no place in a torch file; it is lost")
        self.path.append(whole.kind)
        if whole.traits.parameter:
            self._begin_parameter(whole.traits)
        write(self, whole)
        if whole.traits.parameter:
            self._end_parameter(whole.traits)
        self.path.pop()
        self.memo[id(whole)] = self.count - 1

    def size(self, value: Size) -> None:
        """A torch.Size."""
        if self.known(value):
            return
        self.name("torch", "Size")
        self._ints(tuple(value))
        self.end_call(TUPLES[1])
        self.memo[id(value)] = self.count - 1

    def _device(self, value: Device) -> None:
        self.call(value, "torch.device", (value.type,) if value.index is None else (value.type, value.index))

    def _torch_dtype(self, value: DType) -> None:
        if value.torch is None:
            self.refuse(f"the dtype {value}, which torch does not have")
        else:
            self.name("torch", value.torch)

    def _global_or_layout(self, value: Global) -> None:
        if value.module == "torch" and value.name in LAYOUTS:
            self.layout(value.name)
        else:
            self._global(value)

    def layout(self, name: str) -> None:
        """torch.strided and the like are made by a call, once."""
        self.call(LAYOUT_OF[name], "torch.serialization._get_layout", (f"torch.{name}",))
