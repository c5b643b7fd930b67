"""`OpenSource`: a store, the limits that hold for it, and the way its bytes reach memory.

A contiguous tensor is one range, which is read to its array (engine/ranges.py). All others are boxes (engine/boxes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.placement_rules import PlacementRule
from holdfast.core.protocols import Content, Request, Store
from holdfast.core.runtime import address_of
from holdfast.core.table import Column, ContiguousRows
from holdfast.core.tensor import NO_CRC, FileRange, LazyTensor
from holdfast.engine.coalesce import MEMORY, REMOTE, JoinPolicy
from holdfast.engine.ranges import RangeReads, read_ranges
from holdfast.engine.threads import DEFAULT_THREADS
from holdfast.errors import Corrupted, Unsupported

if TYPE_CHECKING:
    from holdfast.engine.checksums import StorageChecks

HEAD_NBYTES = (
    4096  # First bytes of a file that are read at once, since formats are recognised by them.
)
NO_FILE = (None, b"", 0)


class OpenSource:
    """What formats read headers from and lazy tensors read elements from."""

    def __init__(
        self, store: Store, *, limits: Limits | None = None, threads: int | None = None, mapped: bool = False,
        verify: bool = True, policy: JoinPolicy | None = None, rules: Sequence[str | PlacementRule] = (),
    ) -> None:  # fmt: skip
        profile = store.read_profile
        self.store = store
        self.rules = tuple(rules)
        self.limits = limits or DEFAULTS
        self.threads = threads or profile.request_count or DEFAULT_THREADS
        self.mapped = mapped
        self.verify = verify  # Whether checksums that the file records are compared when a storage is read from end to end.
        self.policy = policy or (REMOTE if profile.request_count else MEMORY)
        self._resident = profile.is_in_memory
        self._reads_ahead = not (
            profile.request_count or profile.is_exact
        )  # Whether more may be read of a file than was asked for.
        self._first: tuple[str | None, bytes, int] = NO_FILE
        """The file whose first bytes were read last, these, and how many were wanted."""
        self.read_nbytes = 0

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_first": NO_FILE}

    def with_store(self, store: Store, *, threads: int | None = None) -> OpenSource:
        return OpenSource(
            store, limits=self.limits, threads=threads or self.threads, mapped=self.mapped, verify=self.verify, policy=self.policy,
            rules=self.rules,
        )  # fmt: skip

    def bytes(self, key: str, start: int, stop: int) -> bytes:
        content = self.store.map(key) if self._resident else None
        if content is not None and 0 <= start <= stop <= content.nbytes:
            return bytes(content[start:stop])
        if self._reads_ahead and 0 <= start <= stop <= HEAD_NBYTES:
            head = self.read_head(key, HEAD_NBYTES)
            if stop <= len(head):
                return head[start:stop]
        out = bytearray(max(stop - start, 0))
        self.store.peek(key, start, memoryview(out))
        return Content(out)

    def read_head(self, key: str, nbytes: int) -> Content:
        known, head, wanted = self._first
        if known != key or nbytes > wanted:
            wanted = max(nbytes, HEAD_NBYTES) if self._reads_ahead else nbytes
            out = bytearray(min(self.store.size(key), wanted))
            self.store.peek(key, 0, memoryview(out))
            head = Content(out)
            self._first = key, head, wanted
        return head[:nbytes]

    def read(self, requests: Sequence[Request]) -> None:
        ranges = [
            request.tensor.file_range() if request.out.flags.c_contiguous else None
            for request in requests
        ]
        self._fill(requests, ranges)

    def _fill(self, requests: Sequence[Request], ranges: Sequence[FileRange | None]) -> None:
        """Fill requests, each of which is one range or, where that is None, is made of boxes."""
        other_requests = [one for one, place in zip(requests, ranges, strict=True) if place is None]
        places = [place for place in ranges if place is not None]
        if places:
            contiguous = requests
            if other_requests:
                pairs = zip(requests, ranges, strict=True)
                contiguous = [request for request, place in pairs if place is not None]
            positions: dict[str, int] = {}
            files = [positions.setdefault(key, len(positions)) for key, _, _, _ in places]
            _, starts, nbytes, crcs = zip(*places, strict=True)
            addresses = [address_of(request.out) for request in contiguous]
            tensors = [request.tensor for request in contiguous]
            keys = [*positions]
            self._read_ranges(tensors.__getitem__, keys, files, starts, nbytes, addresses, crcs)
        if other_requests:
            self._read_as_boxes(other_requests)

    def _read_ranges(
        self,
        tensor: Callable[[int], LazyTensor],
        keys: Sequence[str],
        files: Column,
        starts: Column,
        nbytes: Column,
        addresses: Column,
        crcs: Column,
    ) -> None:
        """Read columns of ranges. `tensor` makes the lazy tensor of a range by its number, for messages."""

        def name(number: int) -> str:
            return tensor(number).name

        def damaged(number: int, crc: int) -> Corrupted:
            from holdfast.engine.checksums import build_damage_error  # for damaged files

            return build_damage_error(tensor(number).storages[0], name(number), crc)

        if not self.verify:
            crcs = (NO_CRC,) * len(crcs)
        reads = RangeReads(keys, files, starts, nbytes, addresses, crcs, name, damaged)
        self.read_nbytes += read_ranges(self.store, reads, threads=self.threads, policy=self.policy)

    def _read_as_boxes(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.tensor.traits.meta:
                message = "this tensor was saved on the meta device: it has a shape and no data"
                raise Unsupported(message, tensor=request.tensor.name)
        from holdfast.engine.checksums import (  # contiguous tensors need neither
            StorageChecks,
            find_whole_storages,
        )

        checks = StorageChecks(find_whole_storages(requests) if self.verify else {})
        self.read_boxes(requests, checks)
        checks.finish()
        for request in requests:
            _resolve(request)

    def read_boxes(
        self, requests: Sequence[Request], checks: StorageChecks, *, threads: int | None = None
    ) -> int:
        """Fill requests box by box and return how many bytes were read. The caller finishes `checks`.

        For parts of tensors: `read` would compare the checksum of what is whole in these requests, and a large storage never is.
        """
        from holdfast.engine.boxes import read_boxes  # contiguous tensors are ranges

        nbytes = read_boxes(
            self.store,
            requests,
            threads=threads or self.threads,
            policy=self.policy,
            checks=checks,
        )
        self.read_nbytes += nbytes
        return nbytes

    def arrays(self, tensors: Sequence[LazyTensor]) -> list[np.ndarray]:
        ranges = [tensor.file_range() for tensor in tensors]
        # One range has as many bytes as are stored: an expansion that only a limit below 1 forbids.
        needs_check = self.limits.expansion < 1
        arrays = [
            tensor.empty()
            if place is None or needs_check
            else np.empty(tensor.shape, tensor.dtype.numpy)
            for tensor, place in zip(tensors, ranges, strict=True)
        ]
        self._fill([*map(Request, tensors, arrays)], ranges)
        return arrays

    def read_rows(
        self, rows: ContiguousRows, tensor: Callable[[int], LazyTensor]
    ) -> list[np.ndarray]:
        if self.limits.expansion < 1:
            return self.arrays([tensor(number) for number in rows.request_indices])
        arrays = list(map(np.empty, rows.shapes, rows.dtypes))
        addresses = list(map(address_of, arrays))
        self._read_ranges(
            lambda position: tensor(rows.request_indices[position]),
            rows.keys,
            rows.file_indices,
            rows.starts,
            rows.nbytes,
            addresses,
            rows.crcs,
        )
        return arrays

    @contextmanager
    def lend(self, tensor: LazyTensor) -> Iterator[memoryview]:
        from holdfast.engine.blocks import ContiguousBlock, read_block  # for conversions

        yield read_block(ContiguousBlock(tensor, 0))

    def view(self, tensor: LazyTensor) -> np.ndarray | None:
        if not self.mapped or tensor.traits.conj or tensor.traits.neg:
            return None
        if tensor.position is not None:
            place = tensor.position.strided_position()
            storage, offset, strides = place.storage, place.offset, place.strides
            if 0 in tensor.shape:
                return None
        else:
            if len(tensor.chunks) != 1:
                return None
            (chunk,) = tensor.chunks
            if chunk.shape != tensor.shape or chunk.box.count == 0:
                return None
            storage, offset, strides = chunk.storage, chunk.offset, chunk.strides
        dtype = tensor.dtype
        foreign_order = storage.byteorder != "little" and dtype.swap_nbytes > 1
        memory = None if dtype.packed or foreign_order else self.store.map(storage.key)
        if memory is None:
            return None
        return np.ndarray(
            tensor.shape,
            dtype.numpy,
            memory,
            storage.start + offset // 8,
            tuple([s // 8 for s in strides]),
        )

    def digest(self, tensors: Sequence[LazyTensor]) -> list[int]:
        from holdfast.engine.digest import compute_crcs

        return compute_crcs(tensors, threads=self.threads)


def _resolve(request: Request) -> None:
    """torch stores a lazily conjugated or negated tensor unresolved; give the elements that it stands for."""
    traits, out = request.tensor.traits, request.out
    if traits.conj:
        if request.tensor.dtype.paired:
            out["imag"] = -out["imag"]
        else:
            np.conjugate(out, out=out)
    if traits.neg:
        if request.tensor.dtype.paired:
            for part in ("real", "imag"):
                out[part] = -out[part]
        elif request.tensor.dtype.kind in ("float", "complex", "int", "uint"):
            np.negative(out, out=out)
        else:
            raise Unsupported(
                f"a {request.tensor.dtype} tensor that is marked as negated",
                tensor=request.tensor.name,
            )
