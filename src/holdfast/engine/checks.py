"""Checksums of bytes as they pass by: block CRCs collected per storage, combined, and compared with what the file records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.core.chunk import Storage
from holdfast.core.crc import Sums
from holdfast.core.protocols import Request, by_source
from holdfast.engine.checksums import Span, Sweep
from holdfast.engine.threads import default_threads
from holdfast.engine.transfer import run_reads
from holdfast.errors import Corrupted


def whole_storages(requests: Sequence[Request]) -> dict[Storage, str]:
    """The storages that record a checksum and will be read from end to end, with the tensor that reads them."""
    found: dict[Storage, str] = {}
    for request in requests:
        tensor = request.tensor
        for chunk in tensor.chunks:
            storage = chunk.storage
            if storage.crc32 is None or storage in found or not storage.nbytes:
                continue
            dense = chunk.box.count * tensor.dtype.bits == storage.nbytes * 8
            if dense and chunk.extent(tensor.dtype) == (0, storage.nbytes):
                found[storage] = tensor.name
    return found


class Checks:
    """Collects block checksums from many threads; `finish` raises for the first storage that is damaged."""

    def __init__(self, storages: dict[Storage, str]) -> None:
        self._storages = storages
        self._sums = {storage: Sums() for storage in storages}

    def wants(self, storage: Storage) -> bool:
        return storage in self._sums

    def add(self, storage: Storage, start: int, data: memoryview) -> None:
        """Take note of bytes of a storage that begin at byte `start` of the file."""
        sums = self._sums.get(storage)
        if sums is not None:
            sums.add(start - storage.start, data)

    def damaged(self) -> Iterable[tuple[Storage, str, int]]:
        """The storages whose blocks are all here and do not sum to the record: with the tensor and what was found."""
        for storage, sums in self._sums.items():
            if sums.covers(storage.nbytes) and (found := sums.crc32()) != storage.crc32:
                yield storage, self._storages[storage], found

    def finish(self) -> None:
        for storage, tensor, found in self.damaged():
            raise damage(storage, tensor, found)


def damage(storage: Storage, tensor: str, found: int) -> Corrupted:
    """What to say of a storage that has another checksum than its file records."""
    return Corrupted(
        f"the {storage.nbytes:,} bytes of {storage.label or 'this tensor'} do not have the checksum that the file records: "
        "they changed after they were written; get the file again, or read it anyway with open(…, verify=False)",
        file=storage.key,
        tensor=tensor,
        offset=storage.start,
        expected=storage.crc32,
        found=found,
    )


def check_first(requests: Sequence[Request]) -> None:
    """Compare the checksums of what these requests will read whole, before any of it is read to its place.

    Raises `Corrupted` for the first storage that is damaged. It is one more reading, of the page cache where memory allows.
    """
    for source, mine in by_source(requests).items():
        storages = whole_storages(mine)
        sweep = Sweep(source.store, [Span(one.key, one.start, one.nbytes) for one in storages])
        run_reads(sweep.tasks(), default_threads(), stores=[source.store])
        for number, (storage, tensor) in enumerate(storages.items()):
            if (found := sweep.crc32(number, name=tensor)) != storage.crc32:
                raise damage(storage, tensor, found)
