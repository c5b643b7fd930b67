"""The properties of very many tensors, read in columns: dtypes of all, then shapes of all, then storages of all.

A property of a tensor takes 50 to 100 ns where one call reads it of all of them, and twice that from a line of Python. A dozen
properties of fifty thousand tensors take 50 ms.

*Plain* is a tensor or Parameter of exactly these classes in memory or on a GPU, strided, without attributes or hooks, and of a
dtype that is not quantised. Others are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import compress, count, repeat
from operator import add, attrgetter
from typing import cast

import numpy as np
import torch

from holdfast.core.arrays import Ints
from holdfast.core.dtype import DTYPES
from holdfast.core.runtime import memories_at, memory_at
from holdfast.core.table import Kind, StorageMoved, with_outside
from holdfast.core.tensor import PLAIN, Traits
from holdfast.core.value import Value, replace
from holdfast.engine.saves import BATCH, Data, Memory
from holdfast.engine.table import Tabulated
from holdfast.torch.cuda.memory import GpuStorages

TYPES = (torch.Tensor, torch.nn.Parameter)

DEVICE, DTYPE, SHAPE, GRAD, HOOKS, LAYOUT, NESTED = map(
    attrgetter,
    ("device", "dtype", "shape", "requires_grad", "_backward_hooks", "layout", "is_nested"),
)

ATTRIBUTES = object.__getstate__
"""The attributes of a tensor; None without any. Its `__dict__` would be made by a look at it, and stay."""

CPU = "cpu"

TRAITS: dict[tuple[bool, type], Traits] = {
    (False, torch.Tensor): PLAIN,
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
    def divisible(self) -> bool:
        return self._gpus is None

    def read_parts(
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


def tabulate_tensors(values: list[object]) -> Tabulated:
    """The plain tensors among `values`, whose classes are `TYPES`, as columns. Those over one place in memory have one storage."""
    columns = _columns(cast("list[torch.Tensor]", values))
    if 0 in columns.filled():
        # Bytes without an address: no real tensor.
        columns = columns.only(
            [at for at, place in enumerate(columns.addresses) if place or not columns.nbytes[at]]
        )
    places = columns.filled()
    if len({*places}) == len(places):
        return columns.tabulated(range(len(columns.rows)), columns.storages)
    # An empty tensor has no place, and shares none.
    each = enumerate(zip(columns.addresses, columns.nbytes, strict=True))
    keys: list[object] = [place if place[1] else at for at, place in each]
    firsts = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
    storages = [columns.storages[at] for at in sorted(firsts.values())]
    numbers = dict(zip(dict.fromkeys(keys), range(len(firsts)), strict=True))
    return columns.tabulated([*map(numbers.__getitem__, keys)], storages)


class _Columns(Value, frozen=True, eq=False):
    rows: Sequence[int]
    """The positions of these tensors among those that were given."""
    tensors: list[torch.Tensor]
    kinds: list[Kind]
    kind: list[int]
    storages: list[torch.UntypedStorage]
    nbytes: list[int]
    addresses: list[int]
    offsets: Mapping[int, int]
    """Elements of the storage before the first one, by position, where there are some."""

    def filled(self) -> Sequence[int]:
        return self.addresses if all(self.nbytes) else [*compress(self.addresses, self.nbytes)]

    def only(self, places: list[int]) -> _Columns:
        columns = self.rows, self.tensors, self.kind, self.storages, self.nbytes, self.addresses
        rows, tensors, kind, storages, nbytes, addresses = (
            [column[place] for place in places] for column in columns
        )
        offsets = _moved(self.offsets, places)
        return _Columns(rows, tensors, self.kinds, kind, storages, nbytes, addresses, offsets)  # type: ignore[arg-type]

    def tabulated(
        self, storage: Sequence[int], storages: Sequence[torch.UntypedStorage]
    ) -> Tabulated:
        """The tensors as rows of a table; `storage` has the number of each in `storages`."""
        nbytes, addresses = self.nbytes, self.addresses
        if len(storages) < len(self.rows):
            nbytes, addresses = (
                [*map(torch.UntypedStorage.nbytes, storages)],
                [*map(torch.UntypedStorage.data_ptr, storages)],
            )
        on_gpu = {
            number
            for number in {*self.kind}
            if self.kinds[number].location != CPU and self.kinds[number].whole
        }
        each = zip(storage, self.tensors, strict=True)
        gpus = dict(compress(each, map(on_gpu.__contains__, self.kind))) if on_gpu else {}
        alike = [self.kinds[number] for number in on_gpu]
        # Of dtypes without a storage class, the newer ones, torch may not have all operations.
        one = len({kind.dtype for kind in alike}) == 1 and all(kind.dtype.storage for kind in alike)
        devices = {torch.device(kind.location) for kind in alike}
        held = TensorStorages(
            storages,
            np.array(nbytes, np.int64),
            np.array(addresses, np.int64),
            gpus,
            devices,
            alike=one,
        )
        kinds, kind = self.kinds, self.kind
        offsets = {at: offset * kinds[kind[at]].dtype.bits for at, offset in self.offsets.items()}
        with_outside(kinds, kind, offsets)
        return Tabulated(self.rows, kinds, kind, storage, held, held.addresses, offsets)


def _moved(offsets: Mapping[int, int], places: Sequence[int]) -> Mapping[int, int]:
    return (
        {at: offsets[place] for at, place in enumerate(places) if place in offsets}
        if offsets
        else offsets
    )


def _columns(tensors: list[torch.Tensor]) -> _Columns:
    """The columns of plain tensors; of none where a mode is active that sees all operations on tensors.

    Each tensor is read once. Dtypes and devices that are left out are found for each kind.
    """
    rows: Sequence[int] = range(len(tensors))
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        rows, tensors = [], []
    while True:
        try:
            numbers, offsets, columns = _tensor_columns(tensors)
            break
        except RuntimeError:
            fine = _with_places(tensors)
            if all(fine):
                raise
            rows, tensors = [*compress(rows, fine)], [*compress(tensors, fine)]
    keys = [*numbers]
    kind, storages, nbytes, addresses = columns
    kept = [_is_kept(key[0], key[4]) for key in keys]
    hooked = any(key[5] for key in keys) and any(map(HOOKS, tensors))
    if hooked or not all(kept) or any(map(ATTRIBUTES, tensors)):
        each = zip(kind, map(ATTRIBUTES, tensors), map(HOOKS, tensors), strict=True)
        fine = [kept[one] and not attributes and not hooks for one, attributes, hooks in each]
        rows, tensors, storages = (
            [*compress(rows, fine)],
            [*compress(tensors, fine)],
            [*compress(storages, fine)],
        )
        kind, nbytes, addresses = (
            [*compress(column, fine)] for column in (kind, nbytes, addresses)
        )
        offsets = _moved(offsets, [*compress(range(len(fine)), fine)])
        left = {number: at for at, number in enumerate(dict.fromkeys(kind))}
        keys, kind = [keys[number] for number in left], [*map(left.__getitem__, kind)]
    return _Columns(
        rows, tensors, [_kind(*key) for key in keys], kind, storages, nbytes, addresses, offsets
    )


_Key = tuple[torch.dtype, torch.Size, tuple[int, ...], int, torch.device, bool, type, bool, bool]
"""Dtype, shape, strides, bytes of the storage, device, whether a gradient is wanted, class, whether conjugated, whether negated."""


def _tensor_columns(
    tensors: list[torch.Tensor],
) -> tuple[
    Iterable[_Key],
    Mapping[int, int],
    tuple[list[int], list[torch.UntypedStorage], list[int], list[int]],
]:
    """The kinds of tensors; the offsets of those that have one; and columns: the kind of each, its storage, the storage's bytes
    and address.

    Raises `RuntimeError` for a sparse tensor, which has no storage, a nested one, which has no strides, and one
    without memory (`has_memory`).
    """
    numbers: defaultdict[_Key, int] = defaultdict(count().__next__)
    kind: list[int] = []
    storages: list[torch.UntypedStorage] = []
    nbytes: list[int] = []
    addresses: list[int] = []
    offsets: dict[int, int] = {}
    for first in range(0, len(tensors), BATCH):
        here = tensors[first : first + BATCH]
        held = [*map(torch.Tensor.untyped_storage, here)]
        dtypes, lengths = [*map(DTYPE, here)], [*map(torch.UntypedStorage.nbytes, held)]
        conj = (
            map(torch.Tensor.is_conj, here)
            if any(dtype.is_complex for dtype in {*dtypes})
            else repeat(False, len(here))
        )
        kind += map(
            numbers.__getitem__,
            zip(
                dtypes, map(SHAPE, here), map(torch.Tensor.stride, here), lengths, map(DEVICE, here), map(GRAD, here),
                map(type, here), conj, map(torch.Tensor.is_neg, here), strict=True,
            ),
        )  # fmt: skip
        begins = [*map(torch.Tensor.storage_offset, here)]
        if any(begins):
            offsets |= {at: int(begin) for at, begin in enumerate(begins, first) if begin}
        storages += held
        nbytes += lengths
        addresses += map(torch.UntypedStorage.data_ptr, held)
    return numbers, offsets, (kind, storages, nbytes, addresses)


def _with_places(tensors: list[torch.Tensor]) -> list[bool]:
    """Which tensors have strides; where all of them do, which have memory."""
    each = zip(map(LAYOUT, tensors), map(NESTED, tensors), strict=True)
    fine = [layout is torch.strided and not nested for layout, nested in each]
    return [*map(has_memory, tensors)] if all(fine) else fine


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
) -> Kind:
    row = DTYPES.torch(str(dtype).removeprefix("torch."))
    assert row is not None, "tensors of other dtypes are left out"
    bits, traits = row.bits, TRAITS[grad, kind]
    if conj or neg:
        traits = replace(traits, conj=conj, neg=neg)
    return Kind.strided(
        row, tuple(shape), tuple([stride * bits for stride in strides]), storage_nbytes=nbytes, traits=traits,
        location=str(device),
    )  # fmt: skip
