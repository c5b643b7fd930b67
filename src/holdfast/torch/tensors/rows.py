"""What very many tensors are, asked in columns: dtypes of all, then shapes of all, then storages of all.

A question to a tensor takes 50 to 100 ns where one call asks it of all of them, and twice that from a line of Python. A dozen
questions make the answers of fifty thousand tensors in 50 ms.

*Ordinary* is a plain tensor or Parameter in memory or on a GPU, strided, with nothing beyond its elements: no attributes, no hooks,
neither conjugated nor negated, and of a dtype that is not quantised. `ask` says None where one of them is not.

`StorageRows` are the bytes of their storages, as `plan.rows` asks for them: many together (`read`), and one by itself that is too
long to be copied (`alone`). Those on GPUs are gathered there (cuda/rows.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import cast

import numpy as np
import torch

from holdfast.core.arrays import Ints, are_apart
from holdfast.core.chunk import c_strides
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.runtime import memories_at, memory_at
from holdfast.core.table import Kind
from holdfast.core.tensor import Traits
from holdfast.errors import Refused
from holdfast.plan.rows import BATCH, RowKind, TensorRows
from holdfast.plan.saves import Data, Memory
from holdfast.torch.cuda.rows import GpuRows

TYPES = (torch.Tensor, torch.nn.Parameter)
"""By exact class."""

ATTRIBUTES, IS_CPU, DEVICE, DTYPE, SHAPE, GRAD, HOOKS, IDENTITY = map(
    attrgetter, ("__dict__", "is_cpu", "device", "dtype", "shape", "requires_grad", "_backward_hooks", "_cdata")
)

CPU = "cpu"


class StorageRows:
    """The bytes of storages, which stay where they are. `gpus` has those that are not in memory, by their numbers; `alike` as for
    `GpuRows`."""

    def __init__(
        self,
        storages: Sequence[torch.UntypedStorage],
        nbytes: Ints,
        addresses: Ints,
        gpus: Mapping[int, torch.Tensor] | None = None,
        *,
        alike: bool = False,
    ) -> None:
        self._storages = storages
        """Kept, so that the memory is."""
        self._nbytes, self._addresses = nbytes, addresses
        self._far = gpus or {}
        self._gpus = GpuRows(gpus, nbytes.tolist(), alike=alike) if gpus else None

    def read(self, numbers: Sequence[int]) -> list[memoryview]:
        """The bytes of storages of these numbers."""
        if self._gpus is None:
            return self._near(numbers)
        far = [number for number in numbers if number in self._far]
        if len(far) == len(numbers):
            return self._gpus.read(far)
        near = [number for number in numbers if number not in self._far]
        pieces = dict(zip(far, self._gpus.read(far), strict=True))
        pieces.update(zip(near, self._near(near), strict=True))
        return [pieces[number] for number in numbers]

    def _near(self, numbers: Sequence[int]) -> list[memoryview]:
        some = slice(numbers.start, numbers.stop) if isinstance(numbers, range) else list(numbers)
        return memories_at(self._addresses[some].tolist(), self._nbytes[some].tolist())

    def alone(self, number: int, label: str) -> Memory | Data | bytes:
        """Those of one."""
        nbytes = int(self._nbytes[number])
        if not nbytes:
            return b""
        if self._gpus is not None and number in self._far:
            return self._gpus.alone(number, label)
        return Memory(memory_at(int(self._addresses[number]), nbytes), label, self._storages[number])


def ask(values: list[object], *, whole: bool) -> TensorRows | None:
    """The rows of tensors of `TYPES`; None where one is not ordinary.

    With `whole`, one that is not all of its storage in C order is none, and neither are two storages over the same memory.
    """
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        # Somebody wants to be asked about everything that is done with tensors.
        return None
    tensors = cast("list[torch.Tensor]", values)
    try:
        return _ask(tensors, whole=whole)
    except (RuntimeError, Refused):
        # What is sparse or of another layout has no storage to give, what is nested no strides; nor has what only looks like a
        # plain tensor, inside of vmap. Nothing is read while a CUDA graph is captured.
        return None


def ask_whole(values: list[object]) -> TensorRows | None:
    """The rows of tensors that are all of their storages, each of another memory or the same storage."""
    return ask(values, whole=True)


def ordinary(values: list[object]) -> list[bool]:
    """Whether each of some tensors is ordinary, all of its storage in C order, and over memory that no other of them has."""
    tensors = cast("list[torch.Tensor]", values)
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return [False] * len(tensors)
    addresses: list[int | None] = [None] * len(tensors)
    found: list[bool] = []
    for number, tensor in enumerate(tensors):
        try:
            fine = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
            if fine:
                storage = tensor.untyped_storage()
                nbytes = storage.nbytes()
                addresses[number] = storage.data_ptr() if nbytes else None
                row = DTYPES.torch(str(tensor.dtype).removeprefix("torch."))
                fine = row is not None and not row.packed and tensor.device.type in (CPU, "cuda")
                fine = fine and not (tensor.is_conj() or tensor.is_neg() or vars(tensor) or tensor._backward_hooks)
                fine = fine and tensor.is_contiguous() and nbytes == tensor.numel() * tensor.element_size()
        except RuntimeError:
            fine = False
        found.append(fine)
    counts = Counter(addresses)
    return [fine and (address is None or counts[address] == 1) for fine, address in zip(found, addresses, strict=True)]


def _ask(tensors: list[torch.Tensor], *, whole: bool) -> TensorRows | None:
    locations = _locations(tensors)
    if locations is None:
        return None
    gpus = {*locations} != {CPU}
    known: dict[torch.dtype, DType] = {}
    positions: dict[tuple[object, ...], int] = {}
    kinds: list[int] = []
    storages: list[torch.UntypedStorage] = []
    nbytes, addresses = np.empty(len(tensors), np.int64), np.empty(len(tensors), np.int64)
    for first in range(0, len(tensors), BATCH):
        batch = slice(first, first + BATCH)
        some = tensors[batch]
        dtypes, grads = list(map(DTYPE, some)), list(map(GRAD, some))
        if any(map(ATTRIBUTES, some)) or any(map(torch.Tensor.is_neg, some)) or (True in grads and any(map(HOOKS, some))):
            return None
        for dtype in set(dtypes):
            row = DTYPES.torch(str(dtype).removeprefix("torch."))
            if row is None or row.packed or row.kind == "quantized":
                return None
            if dtype.is_complex and any(tensor.is_conj() for tensor in some):
                return None
            known[dtype] = row
        here = list(map(torch.Tensor.untyped_storage, some))
        lengths = list(map(torch.UntypedStorage.nbytes, here))
        shapes, strides, offsets = map(SHAPE, some), map(torch.Tensor.stride, some), map(torch.Tensor.storage_offset, some)
        asked = zip(dtypes, shapes, strides, offsets, lengths, grads, map(type, some), locations[batch], strict=True)
        kinds += [positions.setdefault(one, len(positions)) for one in asked]
        storages += here
        nbytes[batch], addresses[batch] = lengths, list(map(torch.UntypedStorage.data_ptr, here))
    table = [_kind(known, *one) for one in positions]  # type: ignore[arg-type]  # as they were put together
    if whole and not all(map(_is_whole, table)):
        return None
    records: Sequence[int] = range(len(tensors))
    over = tensors
    if not are_apart(addresses):
        # What is empty has no address, and two storages may have the same memory.
        identities = list(map(IDENTITY, storages))
        numbers = {identity: number for number, identity in enumerate(dict.fromkeys(identities))}
        records = [numbers[identity] for identity in identities]
        over = list(dict(zip(identities, tensors, strict=True)).values())
        storages = list(dict(zip(identities, storages, strict=True)).values())
        nbytes = np.array(list(map(torch.UntypedStorage.nbytes, storages)), np.int64)
        addresses = np.array(list(map(torch.UntypedStorage.data_ptr, storages)), np.int64)
        if not _is_one_dtype_each(addresses.tolist(), records, [table[kind].dtype for kind in kinds], apart=whole):
            return None
    if not addresses[nbytes > 0].all():
        return None
    far = {record: over[record] for record, location in zip(records, locations, strict=True) if location != CPU} if gpus else {}
    distant = [kind for kind in table if kind.location != CPU]
    # Of dtypes without a storage class, the newer ones, torch may not have all operations.
    alike = len({kind.dtype for kind in distant}) == 1 and all(kind.dtype.storage and _is_whole(kind) for kind in distant)
    held = StorageRows(storages, nbytes, addresses, far, alike=alike)
    own = np.fromiter(map(id, tensors), np.int64, len(tensors))
    return TensorRows(own, kinds, table, records, nbytes, addresses, held.read, held.alone)


def _locations(tensors: list[torch.Tensor]) -> list[str] | None:
    """Where each is, as files call it; None where one is neither in memory nor on a GPU."""
    if all(map(IS_CPU, tensors)):
        return [CPU] * len(tensors)
    devices = list(map(DEVICE, tensors))
    names = {device: str(device) for device in set(devices)}
    return [names[device] for device in devices] if {device.type for device in names} <= {CPU, "cuda"} else None


def _kind(
    known: dict[torch.dtype, DType],
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    offset: int,
    nbytes: int,
    grad: bool,
    kind: type,
    location: str,
) -> RowKind:
    row = known[dtype]
    count = nbytes if row.storage is None else nbytes // dtype.itemsize
    return RowKind(row, tuple(shape), strides, offset, count, grad, kind is torch.nn.Parameter, location)


def kind_of(kind: RowKind) -> Kind:
    """The same as rows of a table have it."""
    bits = kind.dtype.bits
    return Kind.strided(
        kind.dtype, kind.shape, tuple([stride * bits for stride in kind.strides]), offset=kind.offset * bits,
        storage_nbytes=kind.count * (1 if kind.dtype.storage is None else bits // 8),
        traits=Traits(requires_grad=kind.requires_grad, parameter=kind.parameter), location=kind.location,
    )  # fmt: skip


def _is_whole(kind: RowKind) -> bool:
    """Whether a tensor is all of its storage, in C order."""
    count = math.prod(kind.shape) * (1 if kind.dtype.storage else kind.dtype.bits // 8)
    return kind.offset == 0 and kind.count == count and kind.strides == c_strides(kind.shape, 1)


def _is_one_dtype_each(addresses: list[int], records: Sequence[int], dtypes: list[DType], *, apart: bool) -> bool:
    """Whether no memory is seen as two dtypes, which torch refuses; `apart`: whether no two storages have the same."""
    if apart and len(set(addresses)) < len(addresses):
        return False
    seen: dict[int, DType] = {}
    # Untyped storages count as bytes.
    wide = ((addresses[record], dtype) for record, dtype in zip(records, dtypes, strict=True))
    return all(not address or seen.setdefault(address, dtype) == dtype for address, dtype in wide)
