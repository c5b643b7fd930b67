"""`TorchPickle`: a state with tensors to the `data.pkl` of a torch file.

    tensor       torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, OrderedDict()[, flags])
    untyped      torch._utils._rebuild_tensor_v3(…, OrderedDict(), dtype[, flags])              fp8, uint16, …
    parameter    torch._utils._rebuild_parameter(tensor, requires_grad, OrderedDict())
    attributes   torch._utils._rebuild_parameter_with_state, torch._tensor._rebuild_from_type_v2
    storage      BINPERSID of ('storage', class, key, location, count)

The count of a storage and the offset of a tensor in it are known when all tensors were seen: their places in the pickle are
recorded, and filled in by `finish`.

What torch's pickler makes anew for each tensor (the tuples, the empty OrderedDict, the text 'conj') is made anew here, and what it
has once ('storage', 'cpu', the key of a storage) is shared, so that the bytes are the same.

Sparse, quantised, nested and jagged tensors are one call over their plain parts (`formats.torch.composites`).

Tensors of a table (`PickledRows`) of a kind have the same opcodes, but for the key of their storage and the numbers that the memo
counts. So the opcodes of a kind are made once (`opcodes_of`): bytes, references to globals and texts, and places where the memo
takes a number.

All others (irregular rows, composites, lazy tensors that are parts of a storage) are written opcode by opcode, by the same writer.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Mapping
from functools import cache

from holdfast.core.chunk import c_strides
from holdfast.core.dtype import DType
from holdfast.core.limits import Limits
from holdfast.core.opaque import Device, Global, Size
from holdfast.core.table import IRREGULAR, RowKind
from holdfast.core.tensor import Composite, LazyTensor, Traits
from holdfast.formats.pickle.writer import (
    LONG_PUT,
    PUT1,
    TUPLES,
    PickleWriter,
    get,
    integer,
)
from holdfast.formats.torch import pickled
from holdfast.formats.torch.composites import KINDS, UTILS
from holdfast.formats.torch.pickled import (
    RECORD_KEY,
    REMEMBER,
    SHORT,
    Opcodes,
    PickledRows,
    StorageRecord,
)
from holdfast.formats.torch.reducers import LAYOUTS

TENSOR = Global("torch", "Tensor")
BUFFER: dict[str, object] = {"persistent": True, "_is_buffer": True}
"""The attributes by which an `nn.Buffer` is known."""

LAYOUT_OF = {name: Global("torch", name) for name in LAYOUTS}
"""One object for each layout, as torch has it."""

ZERO = integer(0)
OFFSET = 4
"""From the count of a storage to the offset in it: the tuple's end, its number, BINPERSID."""

PIECES = 1024
"""More pieces than this are joined once a batch of items is written: they take memory."""

ONE_DIGIT = 10
"""CPython has a text of one character once, so the key of such a record may be the same object as a text of the state."""


def _own(record: int) -> int:
    """The key in `_records` of a record that is no storage of the table: a number below `IRREGULAR`."""
    return IRREGULAR - 1 - record


def _has_state(traits: Traits) -> bool:
    """Return whether a parameter has attributes. Those of a crafted file may be an array, which has no truth value."""
    state = traits.state
    return bool(state) if isinstance(state, dict) else state is not None


class TorchPickle(PickleWriter):
    """The pickle of a torch file, and the records that it points at."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        trim: bool = True,
        rows: PickledRows = pickled.NO_ROWS,
    ) -> None:
        super().__init__(limits)
        self.storages = pickled.StorageRecords(trim=trim)
        self._given = rows
        self._plain_rows = {
            kind: self.rows.get(kind, PickleWriter._problem) for kind in (*rows.types, *rows.others)
        }
        """How values of these types are written where they are no rows: in the attributes of a container."""
        self.rows |= dict.fromkeys(rows.others, TorchPickle._other)
        self.rows |= dict.fromkeys(rows.types, TorchPickle._row)
        self._aside = 0
        """The number of containers around whose attributes are being written."""
        self._come = 0
        """Rows so far: they come in their order."""
        self._places: dict[int, int] | None = None
        """The row of each value, by identity; made when one comes out of its turn."""
        self._records: dict[int, int] = {}
        """The records in their order. The key is the number of a storage of the table, or `_own` for a record of tensors by
        themselves; the value is the memo's number of the record's key."""
        self._kinds: list[Opcodes | None] = [*map(pickled.opcodes_of, rows.kinds)]
        self._alike: dict[tuple[object, ...], Opcodes | None] = {}
        """Kinds of lazy tensors."""
        self._open: list[tuple[int, StorageRecord, int, int]] = []
        """Positions in `out` where a count and an offset are left open; the record, the first bit, the bits of an element."""

    @staticmethod
    @cache
    def written_types() -> Mapping[type, Callable[..., None]]:
        return {
            **PickleWriter.written_types(),
            LazyTensor: TorchPickle.tensor,
            Composite: TorchPickle._composite,
            Size: TorchPickle.size,
            Device: TorchPickle._device,
            DType: TorchPickle._torch_dtype,
            Global: TorchPickle._global_or_layout,
        }

    @property
    def sources(self) -> array[int]:
        """For each record, the number of a storage of the table; `IRREGULAR` for a record of tensors by themselves."""
        found = array("q", self._records)
        for record in self.storages.records:
            found[record.number] = IRREGULAR
        return found

    def finish(self) -> bytes:
        out = self.out
        self.storages.close()
        for place, record, start, bits in self._open:
            out[place] = integer(record.count)
            # An empty tensor begins nowhere, and may come before what its record holds.
            out[place + OFFSET] = (
                integer((start - record.base) // bits) if start > record.base else ZERO
            )
        out.append(b".")
        # What is remembered of a million tensors takes more memory than the pickle.
        self.memo, self.out = {}, []
        return b"".join(out)

    def attributes(self, value: dict[object, object]) -> None:
        """Write the attributes of a container; values in them are no rows."""
        self._aside += 1
        super().attributes(value)
        self._aside -= 1

    def _fill(self, items: Collection[tuple[object, object]], opcode: bytes) -> None:
        """Write one batch as `PickleWriter` does, and join its pieces if there are many, since they take memory."""
        out, begin = self.out, len(self.out)
        super()._fill(items, opcode)
        if len(out) - begin > PIECES and (not self._open or self._open[-1][0] < begin):
            out[begin:] = [b"".join(out[begin:])]

    def _row(self, value: object) -> None:
        """Write a value of the type of a row."""
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
        if storage == IRREGULAR or kind is None:
            made = given.view(row)
            self.keep(made)
            self._by_itself(made)
            if id(made) in self.memo:
                self.memo[id(value)] = self.memo[id(made)]
            return
        self._alike_tensor(value, kind, storage)

    def _other(self, value: object) -> None:
        """Write a value that is no row, or what stands for it."""
        found = value if self._aside else self._given.described(value)
        if found is value:
            self._plain_rows[type(value)](self, value)
        else:
            self._by_itself(found)

    def _by_itself(self, made: object) -> None:
        """Write what was made of a value: no row, whatever its type."""
        if isinstance(made, LazyTensor):
            self.tensor(made)
        else:
            self.write(made)

    def _alike_tensor(self, value: object, opcodes: Opcodes, source: int) -> None:
        """Write a tensor of a kind whose opcodes are known; `source` is as in `_records`."""
        references, write = self._references, self.out.append
        for opcode in opcodes:
            if type(opcode) is bytes:
                write(opcode)
            elif opcode is REMEMBER:
                number = self.count
                self.count = number + 1
                write(PUT1[number] if number <= SHORT else LONG_PUT(b"r", number))
            elif opcode is RECORD_KEY:
                self._key(source)
            elif opcode in references:
                write(references[opcode])
            elif type(opcode) is str:
                self._shared(opcode)
            else:
                self.name(*opcode)  # type: ignore[misc]  # the name of a global
        self.memo[id(value)] = self.count - 1

    def tensor(self, tensor: LazyTensor) -> None:
        """Write a tensor with all that it is beyond its elements."""
        if self.known(tensor):
            return
        kind = self._whole_kind(tensor)
        if kind is not None:
            self._alike_tensor(tensor, kind, _own(self._place(tensor)[0].number))
            return
        whole, tensor = tensor, pickled.as_pairs(tensor)
        problem = pickled.problem_of(tensor)
        if problem:
            self.refuse(problem)
            return
        traits = tensor.traits
        if traits.subclass is not None or (
            not traits.parameter and (traits.state is not None or traits.buffer)
        ):
            self.name("torch._tensor", "_rebuild_from_type_v2")
            self.out.append(b"(")
            self.name(UTILS, pickled.builder_of(tensor))
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

    def _whole_kind(self, tensor: LazyTensor) -> Opcodes | None:
        """The kind of a tensor that is all of its storage in C order, and so all of its record; None for others."""
        dtype, traits, shape, chunks = tensor.dtype, tensor.traits, tensor.shape, tensor.chunks
        if len(chunks) != 1 or not pickled.is_simple(traits) or pickled.problem_of(tensor):
            return None
        (chunk,) = chunks
        storage, bits = chunk.storage, dtype.bits
        if (
            chunk.offset
            or dtype.packed
            or math.prod(shape) * bits != storage.nbytes * 8
            or not storage.nbytes
        ):
            return None
        key = dtype, shape, chunk.strides, traits.requires_grad, traits.parameter, storage.location
        if key not in self._alike:
            plain = chunk.strides == c_strides(shape, bits)
            self._alike[key] = (
                pickled.opcodes_of(
                    RowKind.from_shape(dtype, shape, traits, location=storage.location)
                )
                if plain
                else None
            )
        return self._alike[key]

    def _place(self, tensor: LazyTensor) -> tuple[StorageRecord, int, tuple[int, ...]]:
        """The record of a tensor, its first bit in the source storage, and its strides in elements."""
        return self.storages.place(tensor, self.path, len(self._records))

    def _begin_parameter(self, traits: Traits) -> None:
        if _has_state(traits):
            self.name(UTILS, "_rebuild_parameter_with_state")
            self.out.append(b"(")
        else:
            self.name(UTILS, "_rebuild_parameter")

    def _end_parameter(self, traits: Traits) -> None:
        self._bool(traits.requires_grad)
        self.hooks()
        has_state = _has_state(traits)
        if has_state:
            self.write(traits.state)
        self.end_call(b"t" if has_state else TUPLES[3])

    def _plain(self, tensor: LazyTensor, requires_grad: bool) -> None:
        """Write a tensor without what it is beyond its elements."""
        self.name(UTILS, pickled.builder_of(tensor))
        self._args(tensor, requires_grad)
        self.out.append(b"R")
        self.put()

    def _args(self, tensor: LazyTensor, requires_grad: bool) -> None:
        """Write the tuple of arguments of torch's function that builds a tensor."""
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
        out, storage_class = self.out, tensor.dtype.storage
        out.append(b"(")
        self._shared(pickled.STORAGE)
        self.name(
            *("torch", storage_class) if storage_class else ("torch.storage", "UntypedStorage")
        )
        self._key(_own(record.number))
        self._shared(record.location)
        self._open.append((len(out), record, start, tensor.dtype.bits))
        out += (b"", b"t")
        self.put()
        out += (b"Q", b"")
        self._ints(tensor.shape)
        self._ints(strides)

    def _key(self, source: int) -> None:
        """Write the key of a record: the text at first, then a reference to it. `source` is as in `_records`."""
        known, record = self._records.get(source), len(self._records)
        if known is not None:
            self.out.append(get(known))
            return
        key = str(record)
        number = self.memo.get(id(key)) if record < ONE_DIGIT else None
        if number is not None:
            self.out.append(get(number))
        else:
            self.out += (pickled.KEY_TEXTS[len(key)], key.encode())
            number = self.put()
            if record < ONE_DIGIT:
                self.keep(key)
                self.memo[id(key)] = number
        self._records[source] = number

    def _shared(self, text: str) -> None:
        """Write a text that torch has as one object."""
        found = self._references.get(text)
        if found is None:
            self._str(text)
            found = self._references[text] = get(self.memo[id(text)])
        else:
            self.out.append(found)

    def _ints(self, values: tuple[int, ...]) -> None:
        self.out.append(pickled.integers(values))
        if values:
            self.put()

    def hooks(self) -> None:
        """An empty OrderedDict, where torch had backward hooks once."""
        self.name("collections", "OrderedDict")
        self.out.append(b")R")
        self.put()

    def _flags(self, traits: Traits) -> None:
        flags = {
            name: True for name, there in (("neg", traits.neg), ("conj", traits.conj)) if there
        }
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
        """Make a tuple of the arguments, and call."""
        self.out.append(tuple_opcode)
        self.put()
        self.out.append(b"R")
        self.put()

    def _composite(self, whole: Composite) -> None:
        if self.known(whole):
            return
        kind = KINDS.get(whole.kind)
        if kind is None:
            self.refuse(f"a tensor of the unknown kind {whole.kind!r}")
            return
        if self.too_deep():
            return
        if whole.traits.requires_grad and not whole.traits.parameter and not kind.keeps_grad:
            # torch's own call has no place for it: such a tensor comes back without from torch.save as well (2.13).
            self.notes.append(
                f"{self.where()}: requires_grad of a {whole.kind} tensor has no place in a torch file; it is lost"
            )
        self.path.append(whole.kind)
        if whole.traits.parameter:
            self._begin_parameter(whole.traits)
        kind.write(self, whole)
        if whole.traits.parameter:
            self._end_parameter(whole.traits)
        self.path.pop()
        self.memo[id(whole)] = self.count - 1

    def size(self, value: Size) -> None:
        if self.known(value):
            return
        self.name("torch", "Size")
        self._ints(tuple(value))
        self.end_call(TUPLES[1])
        self.memo[id(value)] = self.count - 1

    def _device(self, value: Device) -> None:
        self.call(
            value,
            "torch.device",
            (value.type,) if value.index is None else (value.type, value.index),
        )

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
        """Write `torch.strided` and the like: a call, made once."""
        self.call(LAYOUT_OF[name], "torch.serialization._get_layout", (f"torch.{name}",))
