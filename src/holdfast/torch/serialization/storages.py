"""The storages of a file that is being loaded: found by their keys, put on their devices, filled as late as possible.

A storage on the CPU or a GPU is allocated when the pickle names it, and filled by `fill`, which reads all of them in parallel, in
the order of the file. Bytes are read at once for other devices, and where code of the file's choice runs while it is unpickled
(`weights_only=False`), which may look at any element.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial

import numpy as np
import torch
from torch.serialization import _serialization_tls as local
from torch.storage import TypedStorage

from holdfast.core.chunk import Storage, StorageRange
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.core.protocols import Source
from holdfast.core.runtime import memory_at
from holdfast.core.tensor import NO_CRC
from holdfast.core.value import Value, replace
from holdfast.engine.checksums import build_damage_error
from holdfast.engine.coalesce import Ranges
from holdfast.engine.ranges import RangeReads, read_ranges
from holdfast.engine.threads import DEFAULT_THREADS
from holdfast.errors import (
    Corrupted,
    FormatError,
    HoldfastWarning,
    LimitExceeded,
    MetadataError,
    Unsupported,
)
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.torch.storages import StorageId, Storages
from holdfast.stores.platform import request_large_pages
from holdfast.torch.cuda.load import LARGE_NBYTES, load_rows, reserve
from holdfast.torch.cuda.plan import DeviceRows
from holdfast.torch.serialization.allowed import MentionedNames
from holdfast.torch.serialization.locations import (
    MapLocation,
    known_device,
    located_by_caller,
    restorer,
)
from holdfast.torch.serialization.pickling import StorageClass
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.scratch import flat
from holdfast.torch.versions import is_faking

CPU = torch.device("cpu")

QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def storage_dtype(what: object) -> DType | None:
    """The dtype of what stands for a class of storages while a file is loaded; uint8 for an untyped one."""
    if isinstance(what, StorageClass):
        return what.row
    if not isinstance(what, type):
        return None
    found = (
        torch.uint8
        if what is torch.UntypedStorage
        else getattr(what, "_dtype", None) or getattr(what, "dtype", None)
    )
    return row_of(found) if isinstance(found, torch.dtype) else None


row_of = cache(DTYPES.from_any)
dtype_named = cache(lambda name: torch_dtype(DTYPES.name(name) or name))
"""The dtype of torch that a dtype of ours, given by its name, stands for."""


def as_text(pid: object) -> object:
    """A persistent id with texts, where `encoding="bytes"` left those of Python 2 as bytes."""
    if isinstance(pid, tuple) and len(pid) <= 6 and bytes in map(type, pid):
        return tuple([part.decode("latin-1") if isinstance(part, bytes) else part for part in pid])
    return pid


def type_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    """Give a storage its dtype.

    This is what torch's constructor does, which would take a tenth of the time of loading a small tensor.
    """
    typed = object.__new__(TypedStorage)
    typed.dtype = dtype
    typed._untyped_storage = storage
    return typed


def _width(dtype: torch.dtype) -> int:
    """Bytes of a number. A complex element is two numbers."""
    return dtype.itemsize // (2 if dtype.is_complex else 1)


def untyped_dtypes(content: bytes) -> dict[str, torch.dtype | None]:
    """By key, the dtype of the tensors over a storage that the pickle calls bytes; None where several widths are seen in one.

    torch stores uint16, uint32, uint64 and complex32 so, and torch 2.13 does not swap them.
    """
    table = _UntypedUses()
    # The load itself raises what is wrong with the pickle.
    with suppress(FormatError, LimitExceeded):
        interpret_whole(content, table, limits=Limits())
    return table.dtypes


V3 = Global("torch._utils", "_rebuild_tensor_v3")
FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")


class _Key(Value, frozen=True):
    """Stands for a storage in `_UntypedUses`."""

    text: str


class _UntypedUses(MentionedNames):
    """Builds nothing, and records the dtype that each `_rebuild_tensor_v3` gives to its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, torch.dtype | None] = {}

    def find(self, module: str, name: str) -> object:
        for known in (V3, FROM_TYPE):
            if (module, name) == (known.module, known.name):
                return known
        found = vars(torch).get(name) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else self.ANYTHING

    def persistent(self, pid: object) -> object:
        return (
            _Key(pid[2])
            if isinstance(pid, tuple) and len(pid) > 4 and isinstance(pid[2], str)
            else self.ANYTHING
        )

    def call(self, what: object, args: tuple[object, ...]) -> object:
        if what is FROM_TYPE and len(args) > 2 and args[0] is V3 and isinstance(args[2], tuple):
            what, args = V3, args[2]
        if (
            what is V3
            and len(args) > 6
            and isinstance(args[0], _Key)
            and isinstance(args[6], torch.dtype)
        ):
            known = self.dtypes.setdefault(args[0].text, args[6])
            if known is None or _width(known) != _width(args[6]):
                self.dtypes[args[0].text] = None
        return self.ANYTHING


def damaged_storage(source: Source, extent: StorageRange, found_crc: int) -> Corrupted:
    """Return the error for a storage whose bytes do not have the checksum that the file records."""
    storage = Storage(
        extent.key,
        extent.start,
        extent.nbytes,
        crc32=extent.crc32,
        label=extent.label,
        home=source.store,
    )
    return build_damage_error(storage, extent.label, found_crc)


class OnGpu:
    """Storages on one GPU that wait for their bytes."""

    def __init__(self) -> None:
        self.extents: list[StorageRange] = []
        """Where their bytes are. A checksum that is there is compared."""
        self.targets: list[torch.Tensor] = []

    def rows(self, source: Source, device: torch.device) -> DeviceRows:
        extents = self.extents

        def damaged(number: int, found_crc: int) -> Corrupted:
            return damaged_storage(source, extents[number], found_crc)

        starts = np.array([extent.start for extent in extents], np.int64)
        nbytes = np.array([extent.nbytes for extent in extents], np.int64)
        ranges = Ranges([extents[0].key], np.zeros(len(extents), np.int64), starts, nbytes)
        crcs = np.array(list_crcs(extents), np.int64)
        targets = [target if target.is_contiguous() else flat(target) for target in self.targets]
        return DeviceRows(
            source, device, ranges, crcs, targets, lambda number: extents[number].label, damaged
        )


def list_crcs(extents: Iterable[StorageRange]) -> list[int]:
    return [NO_CRC if extent.crc32 is None else extent.crc32 for extent in extents]


class LazyStorages(Storages[TypedStorage]):
    """The storages of one file, each made once, and filled as late as possible."""

    dtype_of = staticmethod(storage_dtype)

    def __init__(
        self,
        source: Source,
        find: Callable[[str], StorageRange],
        everything: Callable[[], Mapping[str, StorageRange]],
        *,
        map_location: MapLocation,
        weights_only: bool,
        lengths: tuple[int, ...] = (5,),
        swap: bool = False,
        untyped: Mapping[str, torch.dtype | None] | None = None,
        mapped: torch.UntypedStorage | None = None,
        verify: bool = True,
        ahead: bool = False,
        max_host_memory: int | None = None,
    ) -> None:
        super().__init__(lengths)
        self._source, self._find, self._everything = source, find, everything
        self._restore = restorer(map_location)
        meta = map_location.type if isinstance(map_location, torch.device) else map_location
        self._meta = isinstance(meta, str) and meta == "meta"
        self._skip, self._weights_only = local.skip_data, weights_only
        self.is_faking = is_faking()
        """Whether a FakeTensorMode is active."""
        self._one_place = isinstance(map_location, str | bytes | torch.device)
        """Whether all tags lead to the same device."""
        self._reads: list[tuple[StorageRange, int]] = []
        """Ranges of the file that are to be read, each with the address of its destination in the memory of this process."""
        self._ahead_of_code = ahead
        """Whether all storages are read before the first one is used."""
        self._max_host_memory = max_host_memory
        self._swap = swap
        self._untyped = untyped or {}
        self._mapped = mapped
        self._verify = verify
        self._views: dict[str, TypedStorage] = {}
        self._waiting: list[tuple[torch.UntypedStorage, StorageId]] = []
        """Storages that `fill` will fill, and whose bytes it has to swap."""
        # By tag, remembered for the many storages of one device: to find out takes as long as to read a small tensor.
        self._device_of = cache(partial(known_device, map_location))
        self._is_usual = (
            not (self.is_faking or self._meta or self._skip or ahead) and mapped is None
        )
        """Whether storages are allocated when the pickle names them, and filled later."""
        self._gpus: dict[torch.device, OnGpu] = {}
        self._reserved = False
        self._ahead: dict[str, torch.UntypedStorage] | None = None

    def whole(self, asked: StorageId) -> TypedStorage:
        extent = self._find(asked.key)
        if extent.nbytes != asked.nbytes:
            raise MetadataError(
                f"{extent.label}: record size ({extent.nbytes} bytes) does not match expected size ({asked.nbytes} bytes: "
                f"the pickle says {asked.count:,} elements of {asked.dtype})",
                offset=extent.start,
                expected=asked.nbytes,
                found=extent.nbytes,
            )
        if self._is_usual and self._device_of(asked.location) == CPU:
            storage = torch.UntypedStorage(asked.nbytes)
            self._reads.append((extent, storage.data_ptr()))
            if self._swap:
                self._waiting.append((storage, asked))
        else:
            storage = self._make_unusual(asked, extent)
        return type_storage(storage, dtype_named(asked.dtype.name))

    def part(self, whole: TypedStorage, key: str, start: int, count: int) -> TypedStorage:
        if key not in self._views:
            width = whole.dtype.itemsize
            part = whole._untyped_storage[start * width : (start + count) * width]
            self._views[key] = type_storage(part, whole.dtype)
        return self._views[key]

    def fill(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._read()
        if self._gpus:
            self._fill_gpus()
        if self._swap:
            for storage, asked in waiting:
                self._swap_bytes(storage, asked)

    def _read(self) -> None:
        reads, self._reads = self._reads, []
        if not reads:
            return
        extents, addresses = zip(*reads, strict=True)
        request_large_pages((address, extent.nbytes) for extent, address in reads)

        def damaged(number: int, found_crc: int) -> Corrupted:
            return damaged_storage(self._source, extents[number], found_crc)

        ranges = RangeReads(
            [extents[0].key],
            (0,) * len(reads),
            [extent.start for extent in extents],
            [extent.nbytes for extent in extents],
            addresses,
            list_crcs(extents) if self._verify else (NO_CRC,) * len(reads),
            lambda number: extents[number].label,
            damaged,
        )
        read_ranges(self._source.store, ranges, threads=DEFAULT_THREADS)

    def _swap_bytes(self, storage: torch.UntypedStorage, asked: StorageId) -> None:
        own = dtype_named(asked.dtype.name)
        dtype = self._untyped.get(asked.key, own) if own is torch.uint8 else own
        if dtype is None:
            raise Unsupported(
                f"storage {asked.key} is seen as numbers of several widths, in a file of the other byte order"
            )
        width = _width(dtype)
        if width > 1 and storage.nbytes() >= width:
            words = np.frombuffer(
                memory_at(storage.data_ptr(), storage.nbytes() // width * width), f"u{width}"
            )
            words.byteswap(inplace=True)

    def _make_unusual(self, asked: StorageId, extent: StorageRange) -> torch.UntypedStorage:
        """Make a storage that is not simply CPU memory to be filled later."""
        if self.is_faking or self._meta:
            return self._without_bytes(asked, extent.start)
        if self._skip:
            return self._restore(torch.UntypedStorage(asked.nbytes), asked.location)
        device = self._device_of(asked.location)
        if device is not None and device != CPU and not self._swap:
            return self._on_gpu(asked.key, extent, device)
        if self._mapped is not None:
            storage = self._mapped[extent.start : extent.start + extent.nbytes]
            if self._swap:
                # A copy: where the mapping is shared, torch 2.13 turns the bytes round in the file itself.
                storage = storage.clone()
                self._swap_bytes(storage, asked)
            return self._restore(storage, asked.location)
        if self._ahead_of_code and device == CPU:
            storage = self._read_ahead()[asked.key]
            if self._swap:
                self._swap_bytes(storage, asked)
            return storage
        storage = torch.UntypedStorage(asked.nbytes)
        self._reads.append((extent, storage.data_ptr()))
        self._read()
        if self._swap:
            self._swap_bytes(storage, asked)
        return self._restore(storage, asked.location)

    def _without_bytes(self, asked: StorageId, start: int) -> torch.UntypedStorage:
        """A storage on the meta device, or for fake tensors, with the device that they claim to be on."""
        storage = torch.UntypedStorage(asked.nbytes, device="meta")
        storage._checkpoint_offset = start  # for torch's own tools
        if not self._meta:
            # torch's own functions, which run without `weights_only`, look at `map_location` themselves.
            device = located_by_caller(asked.location) if self._weights_only else asked.location
            storage._fake_device = device  # type: ignore[assignment]  # a text, as torch.load sets it
        return storage

    def _read_ahead(self) -> dict[str, torch.UntypedStorage]:
        """All storages of the file, read in parallel before any code of its choice can look at one."""
        if self._ahead is None:
            self._ahead = {}
            for key, extent in self._everything().items():
                storage = self._ahead[key] = torch.UntypedStorage(extent.nbytes)
                self._reads.append((extent, storage.data_ptr()))
            self._read()
        return self._ahead

    def _on_gpu(self, key: str, found: StorageRange, device: torch.device) -> torch.UntypedStorage:
        """A storage on a GPU. Its bytes are read later, unless code of the file's choice may look at them."""
        self._reserve(device, found.nbytes)
        if not self._ahead_of_code:
            return self._make_on_gpu(found, device)
        if not self._one_place:
            storage = self._make_on_gpu(found, device)
        else:
            if self._ahead is None:
                self._ahead = {
                    other: self._make_on_gpu(one, device)
                    for other, one in self._everything().items()
                }
            storage = self._ahead[key]
        if self._gpus:
            self._fill_gpus()
        return storage

    def _reserve(self, device: torch.device, nbytes: int) -> None:
        """Reserve GPU memory before the first large storage: to look at very many small ones takes time."""
        if nbytes > LARGE_NBYTES and self._one_place and not self._reserved:
            self._reserved = True
            reserve((device, one.nbytes) for one in self._everything().values())

    def _make_on_gpu(self, extent: StorageRange, device: torch.device) -> torch.UntypedStorage:
        """Make a storage on a GPU that is to be filled."""
        storage = torch.UntypedStorage(extent.nbytes, device=device)
        target = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        waiting = self._gpus.get(target.device)
        if waiting is None:
            waiting = self._gpus[target.device] = OnGpu()
        if extent.crc32 is not None and (self._mapped is not None or not self._verify):
            extent = replace(extent, crc32=None)
        waiting.extents.append(extent)
        waiting.targets.append(target)
        return storage

    def _fill_gpus(self) -> None:
        waiting, self._gpus = self._gpus, {}
        groups = [one.rows(self._source, device) for device, one in waiting.items()]
        for note in load_rows(groups, most=self._max_host_memory):
            warnings.warn(note, HoldfastWarning, stacklevel=2)
