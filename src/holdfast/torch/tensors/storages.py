"""What very many tensors are, asked in columns: dtypes of all, then shapes of all, then storages of all.

A question to a tensor takes 50 to 100 ns where one call asks it of all of them, and twice that from a line of Python. A dozen
questions make the answers of fifty thousand tensors in 50 ms.

*Plain* is a tensor or Parameter of exactly these classes in memory or on a GPU, strided, with nothing beyond its elements: no
attributes, no hooks, and of a dtype that is not quantised. Those that are not are left out.

`TensorStorages` are the bytes of their storages, as a table asks for them: many together (`read`), and one by itself that is too
long to be copied (`alone`). Those on GPUs are gathered there (cuda/gather.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from typing import cast

import numpy as np
import torch

from holdfast.core.arrays import Ints
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.runtime import memories_at, memory_at
from holdfast.core.table import Kind, StorageMoved
from holdfast.core.tensor import PLAIN, Traits
from holdfast.core.value import Value, replace
from holdfast.plan.saves import BATCH, Data, Memory
from holdfast.plan.table import Tabulated
from holdfast.torch.cuda.gather import GpuStorages

TYPES = (torch.Tensor, torch.nn.Parameter)
"""By exact class."""

ATTRIBUTES, IS_CPU, DEVICE, DTYPE, SHAPE, GRAD, HOOKS, IDENTITY, LAYOUT, NESTED = map(
    attrgetter,
    ("__dict__", "is_cpu", "device", "dtype", "shape", "requires_grad", "_backward_hooks", "_cdata", "layout", "is_nested"),
)

CPU = "cpu"

NO_MARKS = (False, False)
"""Of a tensor that is neither conjugated nor negated."""

TRAITS: dict[tuple[bool, type], Traits] = {
    (False, torch.Tensor): PLAIN,
    (False, torch.nn.Parameter): Traits(parameter=True),
    (True, torch.Tensor): Traits(requires_grad=True),
    (True, torch.nn.Parameter): Traits(requires_grad=True, parameter=True),
}
"""By whether a tensor wants a gradient, and by its class."""


class TensorStorages:
    """The bytes of storages, which stay where they are. `gpus` has those that are not in memory, by their numbers; `alike` as for
    `GpuStorages`."""

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
        self.nbytes, self._addresses = nbytes, addresses
        self._far = gpus or {}
        self._gpus = GpuStorages(gpus, nbytes.tolist(), alike=alike) if gpus else None

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
        some = list(numbers)
        held = [self._storages[number] for number in some]
        addresses, lengths = self._addresses[some].tolist(), self.nbytes[some].tolist()
        now = [*map(torch.UntypedStorage.data_ptr, held)], [*map(torch.UntypedStorage.nbytes, held)]
        if now != (addresses, lengths):
            was = zip(addresses, lengths, *now, strict=True)
            raise StorageMoved(next(at for at, (place, nbytes, here, long) in enumerate(was) if (place, nbytes) != (here, long)))
        return memories_at(addresses, lengths)

    def alone(self, number: int, label: str) -> Memory | Data | bytes:
        """Those of one."""
        nbytes = int(self.nbytes[number])
        if not nbytes:
            return b""
        if self._gpus is not None and number in self._far:
            return self._gpus.alone(number, label)
        return Memory(memory_at(int(self._addresses[number]), nbytes), label, self._storages[number])


def tabulate_tensors(values: list[object]) -> Tabulated:
    """The plain ones among tensors of `TYPES`. Those over one place in memory have one storage."""
    columns = _columns(cast("list[torch.Tensor]", values), marked=True)
    if 0 in columns.filled():
        # What has bytes and no address only looks like a tensor.
        columns = columns.only([at for at, place in enumerate(columns.addresses) if place or not columns.nbytes[at]])
    places = columns.filled()
    if len({*places}) == len(places):
        return columns.tabulated(range(len(columns.rows)), columns.storages, views=False)
    # What is empty has no place, and shares with nobody.
    each = enumerate(zip(columns.addresses, columns.nbytes, strict=True))
    keys: list[object] = [place if place[1] else at for at, place in each]
    firsts = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
    storages = [columns.storages[at] for at in sorted(firsts.values())]
    numbers = dict(zip(dict.fromkeys(keys), range(len(firsts)), strict=True))
    return columns.tabulated([*map(numbers.__getitem__, keys)], storages, views=False)


def tabulate_views(values: list[object]) -> Tabulated:
    """The plain ones among tensors of `TYPES`, with the storages that they share. What sees memory as two dtypes is left out."""
    columns = _columns(cast("list[torch.Tensor]", values), marked=False)
    if 0 in columns.filled():
        columns = columns.only([at for at, place in enumerate(columns.addresses) if place or not columns.nbytes[at]])
    places = columns.addresses
    if len({*places}) == len(places):
        return columns.tabulated(range(len(columns.rows)), columns.storages, views=True)
    # What is empty has no address, and two storages may have the same memory.
    seen: dict[int, DType] = {}
    dtypes = [columns.kinds[kind].dtype for kind in columns.kind]
    # Untyped storages count as bytes.
    clash = {place for place, dtype in zip(places, dtypes, strict=True) if place and seen.setdefault(place, dtype) != dtype}
    if clash:
        columns = columns.only([row for row, place in enumerate(places) if place not in clash])
    identities = list(map(IDENTITY, columns.storages))
    numbers = {identity: number for number, identity in enumerate(dict.fromkeys(identities))}
    storages = [*dict(zip(identities, columns.storages, strict=True)).values()]
    return columns.tabulated([numbers[identity] for identity in identities], storages, views=True)


class _Columns(Value, frozen=True, eq=False):
    """Plain tensors, as columns."""

    rows: Sequence[int]
    """Which of the tensors that were given."""
    tensors: list[torch.Tensor]
    kinds: list[Kind]
    kind: list[int]
    storages: list[torch.UntypedStorage]
    nbytes: list[int]
    """Of the storage of each."""
    addresses: list[int]

    def filled(self) -> Sequence[int]:
        """The addresses of those that have bytes."""
        return self.addresses if all(self.nbytes) else [*compress(self.addresses, self.nbytes)]

    def only(self, places: list[int]) -> _Columns:
        """Some of them."""
        columns = self.rows, self.tensors, self.kind, self.storages, self.nbytes, self.addresses
        rows, tensors, kind, storages, nbytes, addresses = ([column[place] for place in places] for column in columns)
        return _Columns(rows, tensors, self.kinds, kind, storages, nbytes, addresses)  # type: ignore[arg-type]

    def tabulated(self, storage: Sequence[int], storages: Sequence[torch.UntypedStorage], *, views: bool) -> Tabulated:
        """The same as rows of a table; `storage` of each is a number in `storages`.

        With `views`, storages on a GPU that no tensor is all of are read as well.
        """
        nbytes, addresses = self.nbytes, self.addresses
        if len(storages) < len(self.rows):
            nbytes, addresses = [*map(torch.UntypedStorage.nbytes, storages)], [*map(torch.UntypedStorage.data_ptr, storages)]
        distant = {number for number in {*self.kind} if self.kinds[number].location != CPU and (views or self.kinds[number].whole)}
        each = zip(storage, self.kind, self.tensors, strict=True)
        gpus = {number: tensor for number, kind, tensor in each if kind in distant} if distant else {}
        alike = [self.kinds[number] for number in distant]
        # Of dtypes without a storage class, the newer ones, torch may not have all operations.
        one = len({kind.dtype for kind in alike}) == 1 and all(kind.dtype.storage and kind.whole for kind in alike)
        held = TensorStorages(storages, np.array(nbytes, np.int64), np.array(addresses, np.int64), gpus, alike=one)
        return Tabulated(self.rows, self.kinds, self.kind, storage, held, lambda: addresses)


def _columns(tensors: list[torch.Tensor], *, marked: bool) -> _Columns:
    """What plain tensors are; none where somebody wants to be asked about everything that is done with tensors.

    With `marked`, conjugated and negated ones as well.
    """
    rows: list[int] = []
    some: list[torch.Tensor] = []
    known: dict[torch.dtype, DType | None] = {}
    positions: dict[tuple[object, ...], int] = {}
    kind: list[int] = []
    storages: list[torch.UntypedStorage] = []
    nbytes: list[int] = []
    addresses: list[int] = []
    watched = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    for first in range(0, 0 if watched else len(tensors), BATCH):
        batch = _Batch(tensors[first : first + BATCH], first)
        batch.leave_odd(known, marked=marked)
        here, held = batch.tensors, batch.storages
        lengths = list(map(torch.UntypedStorage.nbytes, held))
        shapes, strides, offsets = map(SHAPE, here), map(torch.Tensor.stride, here), map(torch.Tensor.storage_offset, here)
        asked = zip(
            map(DTYPE, here), shapes, strides, offsets, lengths, map(GRAD, here), map(type, here), batch.locations, batch.marks(),
            strict=True,
        )  # fmt: skip
        kind += [positions.setdefault(one, len(positions)) for one in asked]
        rows += batch.rows
        some += here
        storages += held
        nbytes += lengths
        addresses += map(torch.UntypedStorage.data_ptr, held)
    kinds = [_kind(*one) for one in positions]
    return _Columns(rows, some, kinds, kind, storages, nbytes, addresses)


class _Batch:
    """Some tensors, of which those go that are not plain."""

    def __init__(self, tensors: list[torch.Tensor], first: int) -> None:
        self.tensors = tensors
        self.rows: Sequence[int] = range(first, first + len(tensors))
        self.locations: list[str] = []
        self.storages: list[torch.UntypedStorage] = []
        self.complex = False
        """Whether some are complex."""

    def leave_odd(self, known: dict[torch.dtype, DType | None], *, marked: bool) -> None:
        """Leave out what is not plain. `known` are dtypes as files have them; None for those that are not kept as they are."""
        # What is sparse or of another layout has no storage to give, what is nested no strides.
        if {*map(LAYOUT, self.tensors)} - {torch.strided} or any(map(NESTED, self.tensors)):
            each = zip(map(LAYOUT, self.tensors), map(NESTED, self.tensors), strict=True)
            self._keep([layout is torch.strided and not nested for layout, nested in each])
        if any(map(ATTRIBUTES, self.tensors)):
            self._keep([not attributes for attributes in map(ATTRIBUTES, self.tensors)])
        if not marked and any(map(torch.Tensor.is_neg, self.tensors)):
            self._keep([not neg for neg in map(torch.Tensor.is_neg, self.tensors)])
        if any(map(GRAD, self.tensors)) and any(map(HOOKS, self.tensors)):
            self._keep([not hooks for hooks in map(HOOKS, self.tensors)])
        dtypes = {*map(DTYPE, self.tensors)}
        for dtype in dtypes - known.keys():
            row = DTYPES.torch(str(dtype).removeprefix("torch."))
            known[dtype] = None if row is None or row.packed or row.kind == "quantized" else row
        if any(known[dtype] is None for dtype in dtypes):
            self._keep([known[dtype] is not None for dtype in map(DTYPE, self.tensors)])
        self.complex = any(dtype.is_complex for dtype in dtypes)
        if not marked and self.complex and any(map(torch.Tensor.is_conj, self.tensors)):
            self._keep([not conj for conj in map(torch.Tensor.is_conj, self.tensors)])
        locations = _locations(self.tensors)
        usual = {name for name in {*locations} if name.partition(":")[0] in (CPU, "cuda")}
        if {*locations} - usual:
            self._keep([name in usual for name in locations])
            locations = [name for name in locations if name in usual]
        try:
            self.storages = list(map(torch.Tensor.untyped_storage, self.tensors))
        except RuntimeError:
            # What only looks like a plain tensor, inside of vmap.
            fine = list(map(_has_storage, self.tensors))
            self._keep(fine)
            locations = [*compress(locations, fine)]
            self.storages = list(map(torch.Tensor.untyped_storage, self.tensors))
        self.locations = locations

    def marks(self) -> Iterable[tuple[bool, bool]]:
        """Whether each is conjugated, and whether it is negated."""
        neg = [*map(torch.Tensor.is_neg, self.tensors)]
        conj = [*map(torch.Tensor.is_conj, self.tensors)] if self.complex else [False] * len(neg)
        return zip(conj, neg, strict=True) if any(conj) or any(neg) else [NO_MARKS] * len(neg)

    def _keep(self, fine: Sequence[bool]) -> None:
        self.tensors, self.rows = [*compress(self.tensors, fine)], [*compress(self.rows, fine)]


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except RuntimeError:
        return False
    return True


def _locations(tensors: list[torch.Tensor]) -> list[str]:
    """Where each is, as files call it."""
    if all(map(IS_CPU, tensors)):
        return [CPU] * len(tensors)
    devices = list(map(DEVICE, tensors))
    names = {device: str(device) for device in set(devices)}
    return [names[device] for device in devices]


@lru_cache(4096)
def _kind(
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    offset: int,
    nbytes: int,
    grad: bool,
    kind: type,
    location: str,
    marks: tuple[bool, bool],
) -> Kind:
    row = DTYPES.torch(str(dtype).removeprefix("torch."))
    assert row is not None, "tensors of other dtypes are left out"
    bits, traits = row.bits, TRAITS[grad, kind]
    if marks != NO_MARKS:
        traits = replace(traits, conj=marks[0], neg=marks[1])
    return Kind.strided(
        row, tuple(shape), tuple([stride * bits for stride in strides]), offset=offset * bits, storage_nbytes=nbytes,
        traits=traits, location=location,
    )  # fmt: skip
