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

Sparse, quantised, nested and jagged tensors are one call over their plain parts:

    sparse      torch._utils._rebuild_sparse_tensor(layout, (indices…, values, Size[, is_coalesced]))
    quantised   torch._utils._rebuild_qtensor(storage, offset, size, stride, quantiser, requires_grad, OrderedDict())
                    quantiser: (scheme, scale, zero point), or (scheme, scales, zero points, axis)
    nested      torch._utils._rebuild_nested_tensor(buffer, sizes, strides, offsets)
    jagged      torch._tensor._rebuild_from_type_v2(_rebuild_njt, NestedTensor, ({values, offsets, …},), None)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, MutableSequence

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, c_strides
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.limits import Limits
from holdfast.core.opaque import Device, Global, Size
from holdfast.core.rows import RowTensor
from holdfast.core.tensor import Composite, LazyTensor, Part, Traits
from holdfast.core.value import replace
from holdfast.formats.pickle.writer import LONG_PUT, TEXT, TUPLES, PickleWriter, get, integer
from holdfast.formats.torch.records import StorageRecords
from holdfast.formats.torch.table import LAYOUTS
from holdfast.formats.torch.tensors import SPARSE_PARTS

NESTED = "torch.nested._internal.nested_tensor"


def write_sparse(writer: TorchPickle, whole: Composite) -> None:
    writer.name(UTILS, "_rebuild_sparse_tensor")
    writer.layout(whole.kind)
    writer.out.append(b"(")
    for part in SPARSE_PARTS[whole.kind]:
        writer.tensor(whole.parts[part])
    size = Size(whole.shape)
    writer.keep(size)
    writer.size(size)
    coalesced = whole.attributes.get("coalesced")
    if isinstance(coalesced, bool):
        writer.write(coalesced)
    writer.out.append(b"t")
    writer.put()
    writer.end_call(TUPLES[2])


def write_quantized(writer: TorchPickle, whole: Composite) -> None:
    told, parts = whole.attributes, whole.parts
    writer.name(UTILS, "_rebuild_qtensor")
    writer.out.append(b"(")
    writer.view(parts["int_repr"])
    # torch says per_channel_affine for both kinds, and knows them by the dtype of the zero points (2.13).
    scheme = str(told["qscheme"]).removesuffix("_float_qparams")
    if "scale" in told:
        writer.name("torch", scheme)
        writer.write(told["scale"])
        writer.write(told["zero_point"])
        writer.out.append(TUPLES[3])
    else:
        writer.out.append(b"(")
        writer.name("torch", scheme)
        writer.tensor(parts["scales"])
        writer.tensor(parts["zero_points"])
        writer.write(told["axis"])
        writer.out.append(b"t")
    writer.put()
    writer.write(whole.traits.requires_grad and not whole.traits.parameter)
    writer.hooks()
    writer.end_call(b"t")


def write_nested(writer: TorchPickle, whole: Composite) -> None:
    writer.name(UTILS, "_rebuild_nested_tensor")
    writer.out.append(b"(")
    for part in ("buffer", "sizes", "strides", "offsets"):
        writer.tensor(whole.parts[part])
    writer.end_call(b"t")


def write_jagged(writer: TorchPickle, whole: Composite) -> None:
    values, told = whole.parts["values"], whole.attributes
    # torch keeps the shortest and the longest length as the shape of a tensor without elements.
    cached = {
        name: LazyTensor("", values.dtype, (length, 0), (), values.source)
        for name in ("min_seqlen", "max_seqlen")
        if isinstance(length := told.get(name), int)
    }
    given = {
        "values": values,
        "offsets": whole.parts["offsets"],
        "lengths": whole.parts.get("lengths"),
        "_ragged_idx": told["ragged_idx"],
        "_metadata_cache": cached,
        "requires_grad": whole.traits.requires_grad,
    }
    writer.keep(given)
    writer.name("torch._tensor", "_rebuild_from_type_v2")
    writer.out.append(b"(")
    writer.name(NESTED, "_rebuild_njt")
    writer.name(NESTED, "NestedTensor")
    writer.fresh_tuple((given,))
    writer.write(None)
    writer.end_call(b"t")


COMPOSITES: dict[str, Callable[[TorchPickle, Composite], None]] = {
    **dict.fromkeys(SPARSE_PARTS, write_sparse),
    "quantized": write_quantized,
    "nested": write_nested,
    "jagged": write_jagged,
}
"""By the kind of the composite."""


UTILS = "torch._utils"
TENSOR = Global("torch", "Tensor")
STORAGE = "storage"
PAIRS = DTYPES.name("float4_e2m1fn_x2")
"""torch has 4-bit floats in pairs only: an element of a byte, the first float in the low half."""

BUFFER: dict[str, object] = {"persistent": True, "_is_buffer": True}
"""The attributes by which an `nn.Buffer` is known."""

LAYOUT_OF = {name: Global("torch", name) for name in LAYOUTS}
"""One object for each layout, as torch has it."""

CALL = struct.Struct("<cIccIccI").pack
"""LONG_BINPUT, TUPLE, LONG_BINPUT, REDUCE, LONG_BINPUT, with their numbers."""

ZERO = integer(0)
OFFSET = 4
"""From the count of a storage to the offset in it: the tuple's end, its number, BINPERSID."""


class TorchPickle(PickleWriter):
    """The pickle of a torch file, and the storage records that it points at."""

    def __init__(self, limits: Limits | None = None, *, trim: bool = True) -> None:
        super().__init__(limits)
        self.storages = StorageRecords(trim=trim)
        self.rows |= {
            LazyTensor: TorchPickle.tensor,
            RowTensor: TorchPickle.tensor,
            Part: TorchPickle.tensor,
            Composite: TorchPickle._composite,
            Size: TorchPickle.size,
            Device: TorchPickle._device,
            DType: TorchPickle._torch_dtype,
            Global: TorchPickle._global_or_layout,
        }
        self._keys: MutableSequence[int] = []
        """The memo's number of each record's key."""
        self._texts: dict[str, bytes] = {}
        """References to texts that are shared by all tensors."""
        self._tuples: dict[tuple[int, ...], bytes] = {}
        self._met: dict[tuple[DType, bool], tuple[bytes, bytes]] = {}
        """For each kind of ordinary tensor that was written, what all of them have in common."""
        self._open: list[tuple[int, int, int, int]] = []
        """Where in `out` a count and an offset are left open; the number of the record, the first bit, the bits of an element."""

    def finish(self) -> bytes:
        records, out = self.storages.records, self.out
        self.storages.close()
        for at, number, start, bits in self._open:
            record = records[number]
            out[at] = integer(record.count)
            # An empty tensor begins nowhere, and may come before what its record holds.
            out[at + OFFSET] = integer((start - record.base) // bits) if start > record.base else ZERO
        return super().finish()

    def tensor(self, tensor: LazyTensor) -> None:
        """A tensor with all that it is beyond its elements."""
        if self.known(tensor) or self._ordinary(tensor):
            return
        whole, tensor = tensor, _as_pairs(tensor)
        problem = _problem(tensor)
        if problem:
            self.refuse(problem)
            return
        traits = tensor.traits
        if traits.subclass is not None or (not traits.parameter and (traits.state is not None or traits.buffer)):
            self.name("torch._tensor", "_rebuild_from_type_v2")
            self.out.append(b"(")
            self.name(UTILS, _function(tensor))
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
            if self.count > 255 and not traits.meta and tensor.dtype.storage is not None:
                self._met.setdefault((tensor.dtype, traits.requires_grad), self._pieces(tensor.dtype.storage, traits.requires_grad))
        self.memo[id(whole)] = self.count - 1

    def _pieces(self, storage: str, requires_grad: bool) -> tuple[bytes, bytes]:
        """Of tensors like one that was just written: what comes before the key of the storage, and what behind the stride."""
        start = len(self.out)
        self.name(UTILS, "_rebuild_tensor_v2")
        self.out.append(b"((")
        self._shared(STORAGE)
        self.name("torch", storage)
        middle = len(self.out)
        self._bool(requires_grad)
        self.name("collections", "OrderedDict")
        self.out.append(b")R")
        pieces = b"".join(self.out[start:middle]), b"".join(self.out[middle:])
        del self.out[start:]
        return pieces

    def _ordinary(self, tensor: LazyTensor) -> bool:
        """Write a tensor like others before it, in a tenth of the steps; False where this is none.

        Ten thousands of tensors differ in nothing but numbers, so what they have in common is kept as bytes. The outcome is that
        of `_plain`, and the tests hold it to torch's bytes.
        """
        traits, shape = tensor.traits, tensor.shape
        pieces = self._met.get((tensor.dtype, traits.requires_grad))
        if pieces is None or not shape or traits.parameter or traits.meta or traits.conj or traits.neg or traits.buffer:
            return False
        if traits.state is not None or traits.subclass is not None:
            return False
        record, start, strides = self.storages.place(tensor, self.path)
        location = self._texts.get(record.location)
        new = record.number == len(self._keys)
        if location is None or record.number < 10:
            # A new location; or a key of one digit, which is the same text wherever it stands.
            return False
        out, number = self.out, self.count
        if new:
            key = b"%d" % record.number
            self._keys.append(number)
            out += (pieces[0], TEXT(b"X", len(key)) + key, LONG_PUT(b"r", number))
            number += 1
        else:
            out += (pieces[0], get(self._keys[record.number]))
        out.append(location)
        self._open.append((len(out), record.number, start, tensor.dtype.bits))
        out += (b"", b"t", LONG_PUT(b"r", number), b"Q", b"", self._tuple_of(shape), LONG_PUT(b"r", number + 1))
        out += (self._tuple_of(strides), LONG_PUT(b"r", number + 2), pieces[1])
        out.append(CALL(b"r", number + 3, b"t", b"r", number + 4, b"R", b"r", number + 5))
        self.count = number + 6
        self.memo[id(tensor)] = number + 5
        return True

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
        self.name(UTILS, _function(tensor))
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
        record, start, strides = self.storages.place(tensor, self.path)
        out, kind = self.out, tensor.dtype.storage
        out.append(b"(")
        self._shared(STORAGE)
        if kind is None:
            self.name("torch.storage", "UntypedStorage")
        else:
            self.name("torch", kind)
        if record.number == len(self._keys):
            key = str(record.number)
            self.keep(key)
            self._str(key)
            self._keys.append(self.memo[id(key)])
        else:
            out.append(get(self._keys[record.number]))
        self._shared(record.location)
        self._open.append((len(out), record.number, start, tensor.dtype.bits))
        out += (b"", b"t")
        self.put()
        out += (b"Q", b"")
        self._ints(tensor.shape)
        self._ints(strides)

    def _shared(self, text: str) -> None:
        """A text that torch has once, however often it is written."""
        found = self._texts.get(text)
        if found is None:
            self._str(text)
            found = self._texts[text] = get(self.memo[id(text)])
        else:
            self.out.append(found)

    def _ints(self, values: tuple[int, ...]) -> None:
        """A tuple of integers, made anew."""
        self.out.append(self._tuple_of(values))
        if values:
            self.put()

    def _tuple_of(self, values: tuple[int, ...]) -> bytes:
        raw = self._tuples.get(values)
        if raw is None:
            raw = b"".join(map(integer, values))
            raw = raw + TUPLES[len(values)] if len(values) < 4 else b"(" + raw + b"t"
            self._tuples[values] = raw
        return raw

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


def _function(tensor: LazyTensor) -> str:
    """What builds it."""
    if tensor.traits.meta:
        return "_rebuild_meta_tensor_no_storage"
    return "_rebuild_tensor_v2" if tensor.dtype.storage else "_rebuild_tensor_v3"


def _problem(tensor: LazyTensor) -> str | None:
    """Why torch could not have this tensor."""
    if tensor.dtype.name == "float4_e2m1fn":
        return f"4-bit floats of shape {list(tensor.shape)} that do not lie in pairs, as torch has them"
    if tensor.dtype.torch is None:
        return f"a tensor of {tensor.dtype}, which torch does not have"
    if tensor.dtype.kind == "quantized":
        return f"elements of {tensor.dtype} without their scale"
    return None


def _as_pairs(tensor: LazyTensor) -> LazyTensor:
    """4-bit floats as the pairs that torch has; given back as they are where they do not lie in pairs."""
    if tensor.dtype.name != "float4_e2m1fn" or PAIRS is None or not tensor.shape or tensor.shape[-1] % 2:
        return tensor
    chunks = []
    for chunk in tensor.chunks:
        start, stop, last = chunk.box.start, chunk.box.stop, chunk.strides[-1]
        if start[-1] % 2 or stop[-1] % 2 or chunk.offset % 8 or any(s % 8 for s in chunk.strides[:-1]):
            return tensor
        if last != tensor.dtype.bits and tensor.size:
            return tensor
        box = Box((*start[:-1], start[-1] // 2), (*stop[:-1], stop[-1] // 2))
        chunks.append(Chunk(box, chunk.storage, chunk.offset, (*chunk.strides[:-1], PAIRS.bits)))
    return replace(tensor, dtype=PAIRS, shape=(*tensor.shape[:-1], tensor.shape[-1] // 2), chunks=tuple(chunks))
