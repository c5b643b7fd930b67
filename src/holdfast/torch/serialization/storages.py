"""The storages of a file that is being loaded: found by their keys, put on their devices, filled as late as possible.

A storage on the CPU or a GPU is allocated when the pickle names it, and filled by `fill`, which reads all of them in parallel, in
the order of the file. Bytes are read at once for other devices, and where code of the file's choice runs while it is unpickled
(`weights_only=False`), which may look at any element.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial

import numpy as np
import torch
from torch.serialization import _serialization_tls as local
from torch.storage import TypedStorage

from holdfast.core.chunk import Extent, Storage
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.core.protocols import Source
from holdfast.core.runtime import memory_at
from holdfast.core.value import Value
from holdfast.engine.checksums import damage
from holdfast.engine.coalesce import Ranges
from holdfast.engine.ranges import UNKNOWN, RangeReads, read_ranges
from holdfast.engine.threads import default_threads
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
    cuda_device,
    located_by_caller,
    restorer,
    stays_on_cpu,
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


dtype_of, row_of = cache(torch_dtype), cache(DTYPES.given)


def as_text(pid: object) -> object:
    """A persistent id with texts, where `encoding="bytes"` left those of Python 2 as bytes."""
    if isinstance(pid, tuple) and len(pid) <= 6 and bytes in map(type, pid):
        return tuple([part.decode("latin-1") if isinstance(part, bytes) else part for part in pid])
    return pid


def typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    """A storage with its dtype. torch's public constructor warns that the class is deprecated."""
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


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


def damaged_storage(
    source: Source, key: str, place: tuple[int, int, int], label: str, found: int
) -> Corrupted:
    start, nbytes, crc = place
    return damage(
        Storage(key, start, nbytes, crc32=crc, label=label, home=source.store), label, found
    )


class OnGpu:
    """Storages on one GPU that wait for their bytes."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int, int]] = []
        """First byte in the file, length, and CRC-32 or `UNKNOWN`."""
        self.targets: list[torch.Tensor] = []
        self.labels: list[str] = []

    def rows(self, source: Source, key: str, device: torch.device) -> DeviceRows:
        starts, nbytes, crcs = np.array(self.places, np.int64).reshape(-1, 3).T
        labels, places = self.labels, self.places

        def damaged(number: int, found: int) -> Corrupted:
            return damaged_storage(source, key, places[number], labels[number], found)

        ranges = Ranges([key], np.zeros(len(starts), np.int64), starts, nbytes)
        targets = [target if target.is_contiguous() else flat(target) for target in self.targets]
        return DeviceRows(source, device, ranges, crcs, targets, labels.__getitem__, damaged)


class LazyStorages(Storages[TypedStorage]):
    """The storages of one file, each made once, and filled as late as possible."""

    dtype_of = staticmethod(storage_dtype)

    def __init__(
        self,
        source: Source,
        key: str,
        find: Callable[[str], Extent],
        everything: Callable[[], Mapping[str, Extent]],
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
        self._source, self._key, self._find, self._everything = source, key, find, everything
        self._restore = restorer(map_location)
        meta = map_location.type if isinstance(map_location, torch.device) else map_location
        self._meta = isinstance(meta, str) and meta == "meta"
        self._fake, self._skip, self._weights_only = is_faking(), local.skip_data, weights_only
        self._one_place = isinstance(map_location, str | bytes | torch.device)
        """Whether all tags lead to the same device."""
        self._places: list[tuple[int, int, int, int]] = []
        """First byte in the file, length, address in memory, and CRC-32 or `UNKNOWN` of each storage."""
        """Memory of this process that is to be filled; its labels are in `_labels`."""
        self._labels: list[str] = []
        self._ahead_of_code = ahead
        """Whether all storages are read before the first one is used."""
        self._max_host_memory = max_host_memory
        self._swap = swap
        self._untyped = untyped or {}
        self._mapped = mapped
        self._verify = verify
        self._views: dict[str, TypedStorage] = {}
        self._waiting: list[tuple[torch.UntypedStorage, StorageId]] = []
        """Storages that `fill` will fill, and whose bytes it may have to swap."""
        # By tag, remembered for the many storages of one device: to find out takes as long as to read a small tensor.
        self._gpu_of = cache(partial(cuda_device, map_location))
        self._stays_on_cpu = cache(partial(stays_on_cpu, map_location))
        self._gpus: dict[torch.device, OnGpu] = {}
        self._reserved = False
        self._ahead: dict[str, torch.UntypedStorage] | None = None

    def whole(self, asked: StorageId) -> TypedStorage:
        return typed(self._storage(asked), dtype_of(asked.dtype))

    def part(self, whole: TypedStorage, key: str, start: int, count: int) -> TypedStorage:
        if key not in self._views:
            width = whole.dtype.itemsize
            self._views[key] = typed(
                whole._untyped_storage[start * width : (start + count) * width], whole.dtype
            )
        return self._views[key]

    def fill(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._read()
        if self._gpus:
            self._fill_gpus()
        if self._swap:
            for storage, asked in waiting:
                self._swap_bytes(storage, asked)

    def _wait(self, start: int, nbytes: int, address: int, crc32: int | None, label: str) -> None:
        self._places.append((start, nbytes, address, UNKNOWN if crc32 is None else crc32))
        self._labels.append(label)

    def _read(self) -> None:
        places, self._places = self._places, []
        labels, self._labels = self._labels, []
        if not places:
            return
        request_large_pages((address, nbytes) for _, nbytes, address, _ in places)

        def damaged(number: int, found: int) -> Corrupted:
            start, nbytes, _, crc = places[number]
            return damaged_storage(
                self._source, self._key, (start, nbytes, crc), labels[number], found
            )

        starts, lengths, addresses, crcs = zip(*places, strict=True)
        reads = RangeReads(
            [self._key],
            (0,) * len(places),
            starts,
            lengths,
            addresses,
            crcs if self._verify else (UNKNOWN,) * len(places),
            labels.__getitem__,
            damaged,
        )
        read_ranges(self._source.store, reads, threads=default_threads())

    def _swap_bytes(self, storage: torch.UntypedStorage, asked: StorageId) -> None:
        own = dtype_of(asked.dtype)
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

    def _storage(self, asked: StorageId) -> torch.UntypedStorage:
        found = self._find(asked.key)
        nbytes = asked.nbytes
        if found.nbytes != nbytes:
            raise MetadataError(
                f"{found.label}: record size ({found.nbytes} bytes) does not match expected size ({nbytes} bytes: "
                f"the pickle says {asked.count:,} elements of {asked.dtype})",
                offset=found.start,
                expected=nbytes,
                found=found.nbytes,
            )
        if self._fake or self._meta:
            return self._without_bytes(asked, found.start)
        gpu = None if self._swap or self._skip else self._gpu_of(asked.location)
        if gpu is not None:
            return self._on_gpu(asked.key, found, gpu)
        if self._mapped is not None and not self._skip:
            storage = self._mapped[found.start : found.start + found.nbytes]
            if self._swap:
                # A copy: where the mapping is shared, torch 2.13 turns the bytes round in the file itself.
                storage = storage.clone()
                self._swap_bytes(storage, asked)
            return self._restore(storage, asked.location)
        if self._skip:
            return self._restore(torch.UntypedStorage(nbytes), asked.location)
        stays = self._stays_on_cpu(asked.location)
        if self._ahead_of_code and stays:
            storage = self._read_ahead()[asked.key]
            if self._swap:
                self._swap_bytes(storage, asked)
            return storage
        storage = torch.UntypedStorage(nbytes)
        self._wait(found.start, found.nbytes, storage.data_ptr(), found.crc32, found.label)
        if stays:
            self._waiting.append((storage, asked))
            return storage
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
            places = self._everything()
            self._ahead = {key: torch.UntypedStorage(found.nbytes) for key, found in places.items()}
            for key, found in places.items():
                self._wait(
                    found.start, found.nbytes, self._ahead[key].data_ptr(), found.crc32, found.label
                )
            self._read()
        return self._ahead

    def _on_gpu(self, key: str, found: Extent, device: torch.device) -> torch.UntypedStorage:
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

    def _make_on_gpu(self, found: Extent, device: torch.device) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(found.nbytes, device=device)
        target = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self._wait_on_gpu(found.start, found.nbytes, found.crc32, found.label, target)
        return storage

    def _wait_on_gpu(
        self, start: int, nbytes: int, crc32: int | None, label: str, target: torch.Tensor
    ) -> None:
        """Add a storage on a GPU that is to be filled, given a tensor over all of it."""
        waiting = self._gpus.get(target.device)
        if waiting is None:
            waiting = self._gpus[target.device] = OnGpu()
        compared = self._verify and self._mapped is None and crc32 is not None
        waiting.places.append((start, nbytes, crc32 if compared and crc32 is not None else UNKNOWN))
        waiting.targets.append(target)
        waiting.labels.append(label)

    def _fill_gpus(self) -> None:
        waiting, self._gpus = self._gpus, {}
        groups = [one.rows(self._source, self._key, device) for device, one in waiting.items()]
        for note in load_rows(groups, most=self._max_host_memory):
            warnings.warn(note, HoldfastWarning, stacklevel=2)
