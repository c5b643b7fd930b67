"""A file of `pickle.dump`: arrays or a state dict, in a stream without a container.

    pickle.dump({"model": {"w": array}, "__author__": …}, file)        detectron2's model zoo, and many programs of people's own
    pickle.dump(model.state_dict(), file)                              a whole stream of `torch.save` in place of each storage

The stream goes through the one closed interpreter. Its arrays and storages become lazy tensors: of what protocol 3 and later, or
Python 2, have written as bytes, the elements stay in the file. Protocols 0 to 2 of Python 3 write bytes as escaped or encoded
text, which has to be decoded, so those elements are kept in memory. Arrays of text, of records and of objects are values.

A file of joblib looks like a pickle and has the elements of arrays between the opcodes. It is not read.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import ClassVar

import numpy as np

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.core.protocols import Description, Foreign, Source, Stamp, Store
from holdfast.core.runtime import PortableMethod
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.errors import FormatError, HoldfastError, PickleError, Truncated, UnknownFormat
from holdfast.formats.detect import BLOCK_NBYTES, begins_like_tar, tar_error
from holdfast.formats.pickle.arrays import (
    MULTIARRAY,
    NUMERIC,
    PendingArray,
    array_state,
    checked_axes,
    frombuffer,
)
from holdfast.formats.pickle.arrays import reconstruct as reconstruct_array
from holdfast.formats.pickle.machine import interpret
from holdfast.formats.pickle.payloads import Payloads, StoredBytes, split_payloads
from holdfast.formats.pickle.plain import PlainTable
from holdfast.formats.pickle.rare import State
from holdfast.formats.pickle.table import Args, Name, Row
from holdfast.formats.torch.legacy import build_object, read_stream
from holdfast.formats.torch.table import TorchTable
from holdfast.formats.torch.tensors import checked_shape
from holdfast.formats.torch.zip import SavedFile, describe_saved
from holdfast.stores.virtual import Virtual, VirtualFile

HEAD_NBYTES = 512
"""Bytes of a file without PROTO that have to be opcodes."""

WITHOUT_PROTO = b"(}]c"
"""First opcodes of protocols 0 and 1: MARK, EMPTY_DICT, EMPTY_LIST, GLOBAL. Others begin no checkpoint."""

STREAM = "the pickle"

STORAGE_STREAM_NBYTES = 1 << 12
"""Bytes that are read of a stream of `torch.save` at first. One with a storage in it has some 300 before its elements."""

JOBLIB = b"NumpyArrayWrapper"
"""The class that marks an array in a file of joblib."""

BUFFER_ORDERS = ("C", "F", "A", "K")


def is_bare_pickle(source: Source, key: str) -> bool:
    """Whether a file begins like a pickle: by PROTO, or with opcodes of protocol 0 or 1 that hold together."""
    head = source.read_head(key, HEAD_NBYTES)
    if head[:1] == b"\x80":
        return b"\2" <= head[1:2] <= b"\5"
    if not head or head[0] not in WITHOUT_PROTO:
        return False
    try:
        # Text can begin with any of these letters, and fails after a few of them.
        interpret(head, HeadTable(), limits=source.limits, stream=STREAM)
    except Truncated:
        return source.store.size(key) > len(head)
    except HoldfastError:
        return False
    return True


class HeadTable(PlainTable):
    """The table for the first bytes of a file that may be text."""

    def find(self, module: str, name: str) -> object:
        if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            raise PickleError("a global that Python cannot import")
        return super().find(module, name)


def describe(source: Source) -> Description:
    return describe_saved(source, read_bare_pickle)


def read_bare_pickle(source: Source, key: str) -> SavedFile:
    """Read a file. Raises `UnknownFormat` for a file of joblib, and `FormatError` for bytes behind the pickle."""
    if begins_like_tar(source.read_head(key, BLOCK_NBYTES)):
        raise tar_error(key, "pickle")
    nbytes = source.store.size(key)
    payloads = split_payloads(partial(source.bytes, key), nbytes, source.limits)
    table = BarePickleTable(source, key, payloads)
    opcodes = payloads.opcodes
    try:
        done = interpret(opcodes, table, limits=source.limits, stream=STREAM)
    except HoldfastError as error:
        if JOBLIB in opcodes:
            raise UnknownFormat(
                "this is a file of joblib, which Holdfast does not read: load it with joblib, and save its arrays by themselves",
                file=key,
            ) from None
        if error.offset is not None:
            error.offset = payloads.file_offset(error.offset)
        raise
    stop = payloads.file_offset(done.stop)
    if stop != nbytes:
        raise FormatError(
            f"{nbytes - stop:,} bytes follow the pickle, which pickle.load would not read; "
            "if the file holds several pickles, save each to a file of its own",
            file=key,
            offset=stop,
        )
    foreign = [replace(item, offset=payloads.file_offset(item.offset)) for item in done.foreign]
    return SavedFile("pickle", done.value, len(opcodes), (*foreign, *table.nested_foreign))


class DecodedBytes(Virtual):
    """The store of a pickle, with one more file that is not listed: the byte strings that it has as text, decoded."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__(over=store)
        self._store, self._pickle_key = store, key
        self._content = bytearray()
        self.key = self.put(
            VirtualFile(
                PortableMethod(self._count), PortableMethod(self._read), PortableMethod(self._stamp)
            ),
            f"{key}@decoded",
        )

    def add(self, content: bytes) -> int:
        """Keep some bytes, and return where they begin in the file."""
        start = len(self._content)
        self._content += content
        return start

    def _count(self) -> int:
        return len(self._content)

    def _read(self, start: int, out: memoryview) -> None:
        out[:] = self._content[start : start + out.nbytes]

    def _stamp(self) -> Stamp:
        return "decoded", self._store.stamp(self._pickle_key)


class ByteRange(Value, frozen=True):
    """Where the content of a byte string is."""

    source: Source
    key: str
    start: int
    nbytes: int

    def storage(self, byteorder: str = "little") -> Storage:
        return Storage(self.key, self.start, self.nbytes, byteorder, home=self.source.store)


def refuse_persistent_id(pid: object) -> object:
    raise PickleError(
        "a persistent id in a pickle that has no storages beside it", found=type(pid).__name__
    )


class PendingTensor(PendingArray):
    """An array before its BUILD, which becomes a lazy tensor if it has numbers in it."""

    __slots__ = ()

    def finish(self, state: object) -> object:
        shape, dtype, fortran, data = array_state(state)
        tensor = self.table.tensor(data, dtype, shape, fortran=fortran)
        if tensor is not None:
            return tensor
        if isinstance(data, StoredBytes):
            self.state = state
            return self
        return super().finish(state)


def reconstruct(table: BarePickleTable, args: Args) -> object:
    made = reconstruct_array(table, args)
    if not isinstance(made, PendingArray):
        return made
    return PendingTensor(Global(MULTIARRAY[0], "_reconstruct"), args, table)


def array_from_buffer(table: BarePickleTable, args: Args) -> object:
    """(data, dtype, shape, order[, axes]): how protocol 5 writes an array, a transposed one with its axes"""
    if not 4 <= len(args) <= 5:
        return frombuffer(table, args)  # It refuses them.
    data, dtype, shape, order, axes = (*args, None)[:5]
    tensor = None
    if isinstance(shape, tuple) and isinstance(order, str) and order in BUFFER_ORDERS:
        tensor = table.tensor(data, dtype, shape, fortran=order == "F")
    if tensor is None:
        return NotImplemented if isinstance(data, StoredBytes) else frombuffer(table, args)
    if order == "K":
        return tensor.permute(checked_axes(axes, tensor.ndim))
    if axes is not None:
        raise PickleError("an array from a buffer with other arguments than numpy's")
    return tensor


def load_from_bytes(table: BarePickleTable, args: Args) -> object:
    """How `pickle.dump` of a tensor writes its storage."""
    return table.load(args[0]) if len(args) == 1 else NotImplemented


CALLS: dict[Name, Row] = {
    **{(module, "_reconstruct"): reconstruct for module in MULTIARRAY},
    **{(module, "_frombuffer"): array_from_buffer for module in NUMERIC},
    ("torch.storage", "_load_from_bytes"): load_from_bytes,
}
"""The calls that have the elements of tensors in their arguments, by exact names."""


class BarePickleTable(TorchTable):
    """Torch's table for a stream that holds the elements of its tensors itself."""

    # Not a copy: kinds of composite tensors may be added to torch's rows later.
    calls: ClassVar[MutableMapping[Name, Row]] = ChainMap(CALLS, TorchTable.calls)

    def __init__(self, source: Source, key: str, payloads: Payloads) -> None:
        self._source, self._key, self._payloads = source, key, payloads
        self._decoded = DecodedBytes(source.store, key)
        self._decoded_source = source.with_store(self._decoded)
        super().__init__(source, refuse_persistent_id)

    def begin(self, limits: Limits, nbytes: int) -> None:
        super().begin(limits, nbytes)
        self._payloads.begin()
        self._ranges: dict[int, tuple[object, ByteRange]] = {}
        """Byte strings by their identity, with the place of each."""
        self._loaded: dict[int, tuple[object, object]] = {}
        """Byte strings by their identity, with the object of the stream of `torch.save` in each."""
        self.nested_foreign: list[Foreign] = []

    def end(self) -> None:
        self._payloads.check_all_met()

    def byte_string(self, state: State, nbytes: int, make: Callable[[bytes], object]) -> object:
        stored = self._payloads.meet(state.pos, nbytes)
        if stored is not None:
            return stored
        start = self._payloads.file_offset(state.pos)
        value = make(state.take(nbytes))
        # With the value itself, so that its identity stays its own.
        self._ranges[id(value)] = value, ByteRange(self._source, self._key, start, nbytes)
        return value

    def find_range(self, data: object) -> ByteRange | None:
        """Return the place of a byte string. One that was decoded is kept in memory. None for anything else."""
        if isinstance(data, StoredBytes):
            return ByteRange(self._source, self._key, data.start, data.nbytes)
        known = self._ranges.get(id(data))
        if known is not None and known[0] is data:
            return known[1]
        if not isinstance(data, bytes | bytearray):
            return None
        self.spending.copy(len(data))
        start = self._decoded.add(bytes(data))
        found = ByteRange(self._decoded_source, self._decoded.key, start, len(data))
        self._ranges[id(data)] = data, found
        return found

    def tensor(
        self, data: object, dtype: object, shape: tuple[object, ...], *, fortran: bool
    ) -> LazyTensor | None:
        """Make a lazy tensor of an array. None if its elements are no numbers, or are not bytes."""
        row = DTYPES.numpy(dtype) if isinstance(dtype, np.dtype) and dtype.names is None else None
        # numpy has one element a byte where the table has several, so packed types are left as arrays.
        if row is None or not isinstance(dtype, np.dtype) or row.bits != 8 * dtype.itemsize:
            return None
        lengths = checked_shape(shape, self.limits)
        data_range = self.find_range(data)
        if data_range is None:
            return None
        nbytes = math.prod(lengths) * dtype.itemsize
        if nbytes != data_range.nbytes:
            raise PickleError(
                f"an array of shape {lengths} and type {dtype} needs {nbytes:,} bytes, and has {data_range.nbytes:,}",
                expected=nbytes,
                found=data_range.nbytes,
            )
        storage = data_range.storage("big" if dtype.str.startswith(">") else "little")
        source = data_range.source
        if fortran:
            return LazyTensor.contiguous("", row, lengths[::-1], storage, source).T
        return LazyTensor.contiguous("", row, lengths, storage, source)

    def load(self, data: object) -> object:
        """Return the object in a byte string that is a stream of `torch.save`, usually one storage."""
        known = self._loaded.get(id(data))
        if known is not None and known[0] is data:
            return known[1]
        data_range = self.find_range(data)
        if data_range is None:
            return NotImplemented
        source, start = data_range.source, data_range.start
        stream = read_stream(source, data_range.key, start, window_nbytes=STORAGE_STREAM_NBYTES)
        if stream.end != start + data_range.nbytes:
            raise PickleError("a storage of torch whose stream has not the length of its bytes")
        built = build_object(source, stream)
        self.nested_foreign += built.foreign
        self._loaded[id(data)] = data, built.value
        return built.value
