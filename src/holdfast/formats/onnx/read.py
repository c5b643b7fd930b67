"""An ONNX model: its initializers as tensors. The graph is not read, and nothing of it is run.

    ModelProto ─ graph ─ initializer, initializer, …          a TensorProto each
    TensorProto  dims, data_type, name, and the elements, in one of three places
        raw_data                       little-endian bytes in the model
        float_data, int32_data, …      packed numbers in the model: floats are bytes as well, integers are varints
        external_data                  location, offset, length: bytes of a file beside the model

Models above 2 GB have their elements in such a file. Its name comes from the model: it must stay inside of the model's folder.

Not read are tensors of text, of 2- and 4-bit integers and of 6-bit floats (an `Opaque` stands for each), sparse initializers, the
constants of nodes, and the state of training (notes say so).
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from msgspec import Struct, field

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.keys import check_key
from holdfast.core.opaque import Global, Opaque
from holdfast.core.protocols import Description, Source, Stamp, Store
from holdfast.core.runtime import PortableMethod
from holdfast.core.tensor import LazyTensor
from holdfast.engine.files import ViewTable
from holdfast.errors import (
    FormatError,
    HeaderError,
    HoldfastError,
    LimitExceeded,
    MetadataError,
    Truncated,
    Unsupported,
    error_context,
)
from holdfast.formats.onnx.wire import BYTES, VARINT, Field, WireReader
from holdfast.formats.safetensors.schema import is_addressable
from holdfast.stores.virtual import ContentCache, Virtual, VirtualFile

MODEL_FIELDS = {
    1: "ir_version", 2: "producer_name", 3: "producer_version", 4: "domain", 5: "model_version", 6: "doc_string", 7: "graph",
    8: "opset_import", 14: "metadata_props", 20: "training_info", 25: "functions", 26: "configuration",
}  # fmt: skip

GRAPH, OPSET, PROPERTIES, TRAINING = 7, 8, 14, 20
"""Fields of a model. The last three are repeated, as functions are."""

INITIALIZER, SPARSE_INITIALIZER = 5, 15
"""Fields of a graph."""

DIMS, DATA_TYPE, SEGMENT, NAME, RAW_DATA, EXTERNAL_DATA, DATA_LOCATION = 1, 2, 3, 8, 9, 13, 14
FLOAT_DATA, INT32_DATA, INT64_DATA, DOUBLE_DATA, UINT64_DATA = 4, 5, 7, 10, 11
"""Fields of a tensor."""

DATA_FIELDS = (RAW_DATA, FLOAT_DATA, INT32_DATA, INT64_DATA, DOUBLE_DATA, UINT64_DATA)
SINGLE_FIELDS = frozenset((DATA_TYPE, SEGMENT, NAME, DATA_LOCATION, *DATA_FIELDS))
"""Fields of a tensor that decide what it is, and that writers put there once."""

EXTERNAL = 1
"""The value of DATA_LOCATION for a tensor in another file."""

IR_VERSIONS = range(1, 1 << 16)
"""The first field of a model; its versions are counted from 1, and have come to 14."""

DTYPE_NAMES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn",
    18: "float8_e4m3fnuz", 19: "float8_e5m2", 20: "float8_e5m2fnuz", 23: "float4_e2m1fn", 24: "float8_e8m0fnu",
}  # fmt: skip

UNREAD_TYPES = {
    8: "STRING",
    21: "UINT4",
    22: "INT4",
    25: "UINT2",
    26: "INT2",
    27: "FLOAT6E2M3",
    28: "FLOAT6E3M2",
}

TYPED_FIELDS = {
    "float32": FLOAT_DATA, "complex64": FLOAT_DATA, "float64": DOUBLE_DATA, "complex128": DOUBLE_DATA,
    "int64": INT64_DATA, "uint32": UINT64_DATA, "uint64": UINT64_DATA,
}  # fmt: skip
"""The field for the numbers of a dtype; all others have theirs in INT32_DATA."""

FIXED_FIELDS = (RAW_DATA, FLOAT_DATA, DOUBLE_DATA)
"""The fields whose content is the elements as they are in memory."""

VARINT_NBYTES = 10

DECODED_NBYTES = 64 << 20
"""Decoded tensors that stay in memory beyond the last one."""


def begins_like_onnx(source: Source, key: str) -> bool:
    """Whether a file begins with the fields of a model up to its graph, in their order, as every writer puts them."""
    reader = WireReader(source, key)
    last_number = 0
    try:
        for part in reader.fields(0, reader.nbytes):
            if part.number <= last_number or part.number not in MODEL_FIELDS:
                return False
            if last_number == 0 and not (part.wire_type == VARINT and part.value in IR_VERSIONS):
                return False
            if part.number >= GRAPH:
                return part.number == GRAPH and part.wire_type == BYTES
            last_number = part.number
    except Truncated:
        # A cut-off graph is no reason to call the file something else.
        return 0 < last_number < GRAPH and reader.number == GRAPH
    except HoldfastError:
        return False
    return False


def describe(source: Source) -> Description:
    """Read the messages around the initializers, and find the elements of each."""
    (key,) = source.store.list()
    reader = WireReader(source, key)
    model = read_model(reader)
    initializers = Initializers(source, reader)
    graph = model.graph
    for part in reader.fields(graph.start, graph.stop):
        if part.number == INITIALIZER:
            initializers.add(read_tensor(reader, part))
        elif part.number == SPARSE_INITIALIZER:
            initializers.sparse_count += 1
    table = ViewTable(initializers.tensors)
    is_flat = len(initializers.tree) == len(initializers.tensors)
    return Description(
        "onnx",
        table,
        table if is_flat else initializers.tree,
        notes=(*initializers.notes(), *model.notes),
        metadata=model.metadata,
    )


class ModelMessage(Struct):
    graph: Field
    metadata: dict[str, str]
    notes: list[str]


def read_model(reader: WireReader) -> ModelMessage:
    """Read the fields around the graph. Raises `HeaderError` for a second graph, which readers of protobuf would merge."""
    graph: Field | None = None
    metadata: dict[str, str] = {}
    properties: dict[str, str] = {}
    opsets: list[str] = []
    notes: list[str] = []
    for part in reader.fields(0, reader.nbytes):
        name = MODEL_FIELDS.get(part.number)
        if part.number == GRAPH:
            if graph is not None or part.wire_type != BYTES:
                raise HeaderError("a model has one graph", file=reader.key, offset=part.start)
            graph = part
        elif part.number == OPSET:
            opsets.append(_read_opset(reader, part))
        elif part.number == PROPERTIES:
            entry = _read_entry(reader, part)
            properties.setdefault(*entry)
        elif part.number == TRAINING and not notes:
            notes.append("the model has information for training, whose tensors are not read")
        elif name is not None and part.number < GRAPH:
            is_number = part.wire_type == VARINT
            metadata[name] = str(part.value) if is_number else reader.text(part, name)
    if graph is None:
        raise HeaderError("a model without a graph", file=reader.key)
    if opsets:
        metadata["opset_import"] = ", ".join(opsets)
    # The properties are the user's own, and do not stand for what the model says of itself.
    return ModelMessage(graph, {**properties, **metadata}, notes)


def _read_opset(reader: WireReader, message: Field) -> str:
    domain, version = "", 0
    for part in _message_fields(reader, message, "an opset"):
        if part.number == 1:
            domain = reader.text(part, "the domain of an opset")
        elif part.number == 2:
            version = part.value
    return f"{domain or 'ai.onnx'} {version}"


def _read_entry(reader: WireReader, message: Field) -> tuple[str, str]:
    """Read a key and its value."""
    found = {1: "", 2: ""}
    for part in _message_fields(reader, message, "an entry"):
        if part.number in found:
            found[part.number] = reader.text(part, "the key or value of an entry")
    return found[1], found[2]


def _message_fields(reader: WireReader, message: Field, what: str) -> list[Field]:
    if message.wire_type != BYTES:
        raise reader.wrong_type(message, what)
    return [*reader.fields(message.start, message.stop)]


class TensorMessage(Struct):
    start: int
    """Where the message begins in the file."""
    name: str = ""
    data_type: int = 0
    dims: list[int] = field(default_factory=list)
    data: dict[int, Field] = field(default_factory=dict)
    """The fields with elements that are not empty, by their numbers."""
    is_external: bool = False
    external: dict[str, str] = field(default_factory=dict)


def read_tensor(reader: WireReader, message: Field) -> TensorMessage:
    """Read the fields of a tensor; its elements are only located. Raises for whatever would leave it open which ones count."""
    if message.wire_type != BYTES:
        raise reader.wrong_type(message, "an initializer")
    tensor = TensorMessage(message.start)
    seen: set[int] = set()
    for part in reader.fields(message.start, message.stop):
        if part.number == DIMS:
            _add_dims(reader, part, tensor)
            continue
        if part.number == EXTERNAL_DATA:
            _add_external(reader, part, tensor)
            continue
        if part.number in seen and part.number in SINGLE_FIELDS:
            raise HeaderError(
                f"field {part.number} of a tensor is there twice, and readers may take either",
                file=reader.key,
                tensor=tensor.name,
                offset=part.start,
            )
        seen.add(part.number)
        if part.number == NAME:
            tensor.name = reader.text(part, "the name of a tensor")
        elif part.number in (DATA_TYPE, DATA_LOCATION):
            if part.wire_type != VARINT:
                raise reader.wrong_type(part, "the type or the location of a tensor")
            if part.number == DATA_TYPE:
                tensor.data_type = part.value
            elif part.value > EXTERNAL:
                raise HeaderError("a tensor in an unknown location", found=part.value)
            else:
                tensor.is_external = part.value == EXTERNAL
        elif part.number == SEGMENT:
            raise Unsupported("a tensor in segments, which no writer makes", file=reader.key)
        elif part.number in DATA_FIELDS:
            if part.wire_type != BYTES:
                raise reader.wrong_type(part, "the content of a tensor")
            if part.nbytes:
                tensor.data[part.number] = part
    return tensor


def _add_dims(reader: WireReader, part: Field, tensor: TensorMessage) -> None:
    most = reader.source.limits.rank
    dims = [part.value]
    if part.wire_type == BYTES:
        dims = []
        at = part.start
        while at < part.stop and len(dims) <= most:
            value, at = reader.varint(at, part.stop)
            dims.append(value)
    elif part.wire_type != VARINT:
        raise reader.wrong_type(part, "a dimension")
    tensor.dims += dims
    if len(tensor.dims) > most:
        raise LimitExceeded(
            f"a tensor of more dimensions than Limits(rank={most})",
            file=reader.key,
            tensor=tensor.name,
            expected=most,
        )


def _add_external(reader: WireReader, part: Field, tensor: TensorMessage) -> None:
    key, value = _read_entry(reader, part)
    if key in tensor.external:
        raise HeaderError(
            f"{key[:40]!r} of external data is there twice", file=reader.key, tensor=tensor.name
        )
    tensor.external[key] = value


class Initializers:
    """The tensors of a graph, as far as they were added."""

    def __init__(self, source: Source, reader: WireReader) -> None:
        self._source, self._reader = source, reader
        self._decoded: DecodedVarints | None = None
        self._beside: Source | None = None
        self.tree: dict[object, object] = {}
        self.tensors: dict[str, LazyTensor] = {}
        self.sparse_count = 0
        self._unread_counts: dict[str, int] = {}

    def notes(self) -> list[str]:
        """Sentences about initializers that are not read."""
        counts = {f"of the type {name}": count for name, count in self._unread_counts.items()}
        if self.sparse_count:
            counts["that are sparse"] = self.sparse_count
        return [f"initializers {kind} are not read: {count:,}" for kind, count in counts.items()]

    def add(self, message: TensorMessage) -> None:
        """Add a tensor. Raises `FormatError` or `Unsupported`."""
        key, name = self._reader.key, message.name
        if not name:
            raise HeaderError("an initializer without a name", file=key, offset=message.start)
        if name in self.tree:
            raise HeaderError("two initializers of one name", file=key, tensor=name)
        unread = UNREAD_TYPES.get(message.data_type)
        if unread is not None:
            self.tree[name] = Opaque(Global("onnx", unread), (f"a tensor of {unread}",))
            self._unread_counts[unread] = self._unread_counts.get(unread, 0) + 1
            return
        with error_context(file=key, tensor=name):
            self.tree[name] = self.tensors[name] = self._tensor(message)

    def _tensor(self, message: TensorMessage) -> LazyTensor:
        dtype = DTYPES.name(DTYPE_NAMES.get(message.data_type, ""))
        if dtype is None:
            raise Unsupported(
                f"the tensor has type {message.data_type:,}, which is not known",
                found=message.data_type,
            )
        shape = tuple(message.dims)
        if not is_addressable(shape, dtype.bits):
            raise MetadataError(
                f"{list(shape)} of {dtype} is more than any file can hold", found=shape
            )
        nbytes = dtype.nbytes(math.prod(shape))
        if message.is_external:
            source, storage = self._external_storage(message, nbytes)
        else:
            source, storage = self._internal_storage(message, dtype, nbytes)
        return LazyTensor.contiguous(message.name, dtype, shape, storage, source)

    def _internal_storage(
        self, message: TensorMessage, dtype: DType, nbytes: int
    ) -> tuple[Source, Storage]:
        """Find the elements of a tensor in the model."""
        typed = TYPED_FIELDS.get(dtype.name, INT32_DATA)
        number = next(iter(message.data), RAW_DATA)
        if len(message.data) > 1 or number not in (RAW_DATA, typed):
            raise MetadataError(
                f"a tensor of {dtype} has its elements in the fields {sorted(message.data)}, "
                f"and they belong in {RAW_DATA} or in {typed}",
                found=tuple(message.data),
            )
        part = message.data.get(number)
        if part is None and nbytes:
            raise MetadataError(f"a tensor of {nbytes:,} bytes without content", expected=nbytes)
        start, stored = (0, 0) if part is None else (part.start, part.nbytes)
        if part is not None and number not in FIXED_FIELDS:
            return self._decoded_storage(message.name, part, dtype, nbytes)
        if stored != nbytes:
            raise MetadataError(
                f"a tensor of shape {message.dims} and type {dtype} needs {nbytes:,} bytes, and has {stored:,}",
                expected=nbytes,
                found=stored,
            )
        home = self._source.store
        return self._source, Storage(self._reader.key, start, nbytes, label=message.name, home=home)

    def _decoded_storage(
        self, name: str, part: Field, dtype: DType, nbytes: int
    ) -> tuple[Source, Storage]:
        """Find the elements of a tensor that are varints: they are decoded when they are read."""
        unit = min(max(dtype.bits // 8, 1), 8)
        count = nbytes // unit
        # Before anything is allocated: a varint takes one byte at least.
        if not count <= part.nbytes <= VARINT_NBYTES * count:
            raise MetadataError(
                f"{count:,} numbers cannot be in {part.nbytes:,} bytes",
                expected=count,
                found=part.nbytes,
            )
        if self._decoded is None:
            self._decoded = DecodedVarints(self._source.store, self._reader.key)
        key = self._decoded.add(part, count, dtype)
        source = self._source.with_store(self._decoded)
        return source, Storage(key, 0, nbytes, label=name, home=self._decoded)

    def _external_storage(self, message: TensorMessage, nbytes: int) -> tuple[Source, Storage]:
        """Find the elements of a tensor in a file beside the model."""
        if message.data:
            raise MetadataError("a tensor with elements in the model and in another file")
        external = message.external
        location = check_key(external.get("location", ""))
        start = _decimal(external.get("offset", "0"), "offset")
        length = _decimal(external.get("length", str(nbytes)), "length")
        if length != nbytes:
            raise MetadataError(
                f"a tensor of {nbytes:,} bytes, and {length:,} are said to be in {location!r}",
                expected=nbytes,
                found=length,
            )
        if self._beside is None:
            store = self._source.store.get_folder_store()
            if store is None:
                raise Unsupported(
                    f"the elements are in {location!r}, a file beside the model: open the model by its path",
                    found=location,
                )
            self._beside = self._source.with_store(store)
        store = self._beside.store
        size = store.size(location)
        if start + nbytes > size:
            raise Truncated(
                f"the tensor ends at byte {start + nbytes:,} of {location!r}, and the file at {size:,}",
                expected=start + nbytes,
                found=size,
            )
        return self._beside, Storage(location, start, nbytes, label=message.name, home=store)


def _decimal(text: str, what: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise HeaderError(f"the {what} of external data must be a number, got {text[:40]!r}")
    return int(text)


class DecodedVarints(Virtual):
    """The store of a model, with one more file for each tensor of varints, which are not listed."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__(over=store)
        self._store, self._model_key = store, key
        self._cache = ContentCache(DECODED_NBYTES)

    def add(self, part: Field, count: int, dtype: DType) -> str:
        """Add the tensor whose numbers are in a field, and return its key."""
        unit = min(max(dtype.bits // 8, 1), 8)
        is_signed = dtype.kind == "int"
        read = partial(PortableMethod(self._read), part, count, unit, is_signed)
        entry = VirtualFile(
            count * unit, read, PortableMethod(self._stamp), read_nbytes=part.nbytes
        )
        return self.put(entry, f"{self._model_key}@{part.start}")

    def close(self) -> None:
        self._cache.clear()
        super().close()

    def _stamp(self) -> Stamp:
        return "varints", self._store.stamp(self._model_key)

    def _read(
        self, part: Field, count: int, unit: int, is_signed: bool, start: int, out: memoryview
    ) -> None:
        with self._cache.lock:
            content = self._cache.get(part.start)
            if content is None:
                raw = bytearray(part.nbytes)
                self._store.read(self._model_key, part.start, memoryview(raw))
                try:
                    content = decode_varints(bytes(raw), count, unit, is_signed=is_signed)
                except FormatError as error:
                    error.file, error.offset = self._model_key, part.start
                    raise
                self._cache.put(part.start, content)
        out[:] = content.data[start : start + out.nbytes]


def decode_varints(raw: bytes, count: int, unit: int, *, is_signed: bool) -> np.ndarray:
    """Return the bytes of `count` integers of `unit` bytes, little-endian. Raises `MetadataError` if there are others.

    >>> decode_varints(b"\\x01\\xac\\x02", 2, 2, is_signed=False).tolist()
    [1, 0, 44, 1]
    """
    data = np.frombuffer(raw, np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if len(ends) != count or (len(data) and ends[-1:].tolist() != [len(data) - 1]):
        raise MetadataError(
            f"{len(ends):,} numbers where {count:,} belong", expected=count, found=len(ends)
        )
    starts = np.concatenate(([0], ends[:-1] + 1))[:count]
    lengths = ends + 1 - starts
    if lengths.max(initial=0) > VARINT_NBYTES:
        raise MetadataError("an integer of more than 64 bits")
    values = np.zeros(count, np.uint64)
    for place in range(int(lengths.max(initial=0))):
        is_long = lengths > place
        bits = (data[starts[is_long] + place] & 0x7F).astype(np.uint64)
        # The tenth byte has one bit left of 64.
        if place == VARINT_NBYTES - 1 and bits.max(initial=0) > 1:
            raise MetadataError("an integer of more than 64 bits")
        values[is_long] |= bits << np.uint64(7 * place)
    _check_range(values, 8 * unit, is_signed=is_signed)
    return values.astype(f"<u{unit}").view(np.uint8)


def _check_range(values: np.ndarray, bits: int, *, is_signed: bool) -> None:
    """Raise `MetadataError` for an integer that does not fit into so many bits."""
    if is_signed:
        signed = values.view(np.int64)
        half = 1 << (bits - 1)
        fits = (signed >= -half) & (signed <= half - 1)
    else:
        fits = values <= np.uint64((1 << bits) - 1)
    if not fits.all():
        raise MetadataError(f"an integer that does not fit into {bits} bits")
