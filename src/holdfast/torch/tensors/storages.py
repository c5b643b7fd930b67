"""Plain tensors as rows of a table, and the bytes of their storages.

*Plain* is a tensor or Parameter of exactly these classes in memory or on a GPU, strided, without attributes or hooks, and of a
dtype that is not quantised. Others are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import add, attrgetter
from typing import cast

import numpy as np
import torch

from holdfast.core.arrays import Ints
from holdfast.core.dtype import DTYPES
from holdfast.core.runtime import memories_at, memory_at
from holdfast.core.table import RowKind, StorageMoved, separate_outside_rows
from holdfast.core.tensor import PLAIN_TRAITS, Traits
from holdfast.core.value import replace
from holdfast.engine.saves import Data, Memory
from holdfast.engine.table import TensorColumns
from holdfast.torch.cuda.memory import GpuStorages

TYPES = (torch.Tensor, torch.nn.Parameter)

DEVICE = attrgetter("device")
"""The device of a tensor. Tests on machines without a GPU put another function here."""

ATTRIBUTES = object.__getstate__
"""The attributes of a tensor; None without any. Its `__dict__` would be made by a look at it, and stay."""

CPU = "cpu"

TRAITS: dict[tuple[bool, type], Traits] = {
    (False, torch.Tensor): PLAIN_TRAITS,
    (False, torch.nn.Parameter): Traits(parameter=True),
    (True, torch.Tensor): Traits(requires_grad=True),
    (True, torch.nn.Parameter): Traits(requires_grad=True, parameter=True),
}


class TensorStorages:
    """The bytes of storages, as a table reads them: many together (`read`), and one that is too long to be copied (`alone`).

    `gpus` has the storages that are not in memory, by their numbers; `devices` and `alike` are as for `GpuStorages`.
    """

    def __init__(
        self,
        storages: Sequence[torch.UntypedStorage],
        nbytes: Ints,
        addresses: Ints,
        gpus: Mapping[int, torch.Tensor] | None = None,
        devices: Iterable[torch.device] = (),
        *,
        alike: bool = False,
    ) -> None:
        self._storages = storages
        """Held, so that the memory stays."""
        self.nbytes, self._addresses = nbytes, addresses
        self._on_gpu = gpus or {}
        self._gpus = GpuStorages(gpus, nbytes, devices, alike=alike) if gpus else None

    def addresses(self) -> list[int]:
        found: list[int] = self._addresses.tolist()
        return found

    def read(self, numbers: Sequence[int]) -> list[memoryview]:
        addresses, lengths = self._places(numbers)
        if self._gpus is None:
            return memories_at(addresses, lengths)
        on_gpu = [number for number in numbers if number in self._on_gpu]
        if len(on_gpu) == len(numbers):
            return self._gpus.read(on_gpu)
        local = [at for at, number in enumerate(numbers) if number not in self._on_gpu]
        pieces = dict(zip(on_gpu, self._gpus.read(on_gpu), strict=True))
        memories = memories_at([addresses[at] for at in local], [lengths[at] for at in local])
        pieces.update(zip([numbers[at] for at in local], memories, strict=True))
        return [pieces[number] for number in numbers]

    @property
    def can_read_ranges(self) -> bool:
        return self._gpus is None

    def read_ranges(
        self, numbers: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> list[memoryview]:
        addresses, _ = self._places([*numbers])
        return memories_at([*map(add, addresses, starts)], [*nbytes])

    def segment(self, number: int, label: str) -> Memory | Data | bytes:
        ((address,), (nbytes,)) = self._places([number])
        if not nbytes:
            return b""
        if self._gpus is not None and number in self._on_gpu:
            return self._gpus.segment(number, label)
        return Memory(memory_at(address, nbytes), label, self._storages[number])

    def _places(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """The addresses and lengths of storages. Raises `StorageMoved` where one has changed."""
        # In the order of the state, which is nearly that of memory: in the order of a file it takes three times as long.
        ordered = sorted(numbers)
        held = [*map(self._storages.__getitem__, ordered)]
        now, was = (
            (
                [*map(torch.UntypedStorage.data_ptr, held)],
                [*map(torch.UntypedStorage.nbytes, held)],
            ),
            self._columns(ordered),
        )
        if now != was:
            raise StorageMoved(
                next(at for at, number in enumerate(numbers) if self._has_moved(number))
            )
        return was if ordered == [*numbers] else self._columns(numbers)

    def _columns(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        some = np.array(numbers, np.int64)
        return self._addresses[some].tolist(), self.nbytes[some].tolist()

    def _has_moved(self, number: int) -> bool:
        storage = self._storages[number]
        return (storage.data_ptr(), storage.nbytes()) != (
            self._addresses[number],
            self.nbytes[number],
        )


def tabulate_tensors(values: list[object]) -> TensorColumns:
    """Tabulate the plain tensors among `values`, whose classes are `TYPES`.

    Tensors over one place in memory have one storage. While a mode sees all operations on tensors, none of them is plain.
    """
    rows: list[int] = []
    tensors: list[torch.Tensor] = []
    kind_numbers: dict[_Key, int] = {}
    kind: list[int] = []
    storage_numbers: dict[object, int] = {}
    storage: list[int] = []
    storages: list[torch.UntypedStorage] = []
    element_offsets: dict[int, int] = {}
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        values = []
    for row, value in enumerate(values):
        tensor = cast(torch.Tensor, value)
        try:
            held = tensor.untyped_storage()
            nbytes, address, strides = held.nbytes(), held.data_ptr(), tensor.stride()
        except RuntimeError:
            # A sparse tensor has no storage, a nested one no strides, and a ZeroTensor no memory.
            continue
        dtype, device, grad = tensor.dtype, DEVICE(tensor), tensor.requires_grad
        # Bytes without an address are those of a tensor that is not real.
        if (nbytes and not address) or ATTRIBUTES(tensor) or (grad and tensor._backward_hooks):
            continue
        conj = dtype.is_complex and tensor.is_conj()
        key = (
            dtype,
            tensor.shape,
            strides,
            nbytes,
            device,
            grad,
            type(tensor),
            conj,
            tensor.is_neg(),
        )
        kind_number = kind_numbers.get(key)
        if kind_number is None:
            if not _is_kept(dtype, device):
                continue
            kind_number = kind_numbers[key] = len(kind_numbers)
        kind.append(kind_number)
        # An empty tensor has no place, and shares none.
        place = (address, nbytes) if nbytes else row
        number = storage_numbers.setdefault(place, len(storages))
        if number == len(storages):
            storages.append(held)
        if offset := tensor.storage_offset():
            element_offsets[len(rows)] = int(offset)
        rows.append(row)
        tensors.append(tensor)
        storage.append(number)

    kinds = [_kind(*key) for key in kind_numbers]
    offsets = {at: kinds[kind[at]].dtype.bits * offset for at, offset in element_offsets.items()}
    separate_outside_rows(kinds, kind, offsets)
    bytes_of = _hold_storages(tensors, kinds, kind, storage=storage, storages=storages)
    return TensorColumns(rows, kinds, kind, storage, bytes_of, bytes_of.addresses, offsets)


def _hold_storages(
    tensors: Sequence[torch.Tensor],
    kinds: Sequence[RowKind],
    kind: Sequence[int],
    *,
    storage: Sequence[int],
    storages: Sequence[torch.UntypedStorage],
) -> TensorStorages:
    """Return the bytes of the storages, given the kind of each tensor and the number of its storage."""
    on_gpu = {
        number for number in {*kind} if kinds[number].location != CPU and kinds[number].is_whole
    }
    columns = zip(tensors, kind, storage, strict=True)
    gpus = {number: tensor for tensor, kind_number, number in columns if kind_number in on_gpu}
    gpu_kinds = [kinds[number] for number in on_gpu]
    # Of dtypes without a storage class, the newer ones, torch may not have all operations.
    has_classes = all(kind.dtype.storage for kind in gpu_kinds)
    return TensorStorages(
        storages,
        np.array([*map(torch.UntypedStorage.nbytes, storages)], np.int64),
        np.array([*map(torch.UntypedStorage.data_ptr, storages)], np.int64),
        gpus,
        {torch.device(kind.location) for kind in gpu_kinds},
        alike=has_classes and len({kind.dtype for kind in gpu_kinds}) == 1,
    )


_Key = tuple[torch.dtype, torch.Size, tuple[int, ...], int, torch.device, bool, type, bool, bool]
"""Dtype, shape, strides, bytes of the storage, device, whether a gradient is wanted, class, whether conjugated, whether negated."""


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether torch gives out the address of a strided tensor's bytes.

    It does not for a ZeroTensor, nor for what functions of `torch.func` such as `vmap` receive.
    """
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


@lru_cache(256)
def _is_kept(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tensors of a dtype are kept as they are, and those on a device read in place."""
    row = DTYPES.torch(str(dtype).removeprefix("torch."))
    return (
        row is not None
        and not row.packed
        and row.kind != "quantized"
        and device.type in (CPU, "cuda")
    )


@lru_cache(4096)
def _kind(
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    nbytes: int,
    device: torch.device,
    grad: bool,
    kind: type,
    conj: bool,
    neg: bool,
) -> RowKind:
    row = DTYPES.torch(str(dtype).removeprefix("torch."))
    assert row is not None, "tensors of other dtypes are left out"
    bits, traits = row.bits, TRAITS[grad, kind]
    if conj or neg:
        traits = replace(traits, conj=conj, neg=neg)
    return RowKind.from_strides(
        row, tuple(shape), tuple([stride * bits for stride in strides]), storage_nbytes=nbytes, traits=traits,
        location=str(device),
    )  # fmt: skip
