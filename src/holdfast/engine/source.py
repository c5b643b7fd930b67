"""`OpenSource`: a store that is open for reading, with its limits and the ways to read from it.

A contiguous tensor is one range of a file, which is read to its array (engine/ranges.py). All other
tensors are read as boxes (engine/boxes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

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
    from holdfast.core.chunk import Chunk
    from holdfast.core.tensor import StridedPosition
    from holdfast.engine.checksums import StorageChecks

HEAD_NBYTES = 4096
"""The first bytes of a file that are read at once. Formats are recognized by them, and many headers
are not longer."""


class FileHead(NamedTuple):
    """The first bytes of a file."""

    key: str | None
    content: Content
    requested_nbytes: int
    """How many bytes were requested. The content is shorter if the file is."""


NO_HEAD = FileHead(None, b"", 0)


class OpenSource:
    """A store that is open for reading.

    Formats read headers from it, and lazy tensors read their elements.
    """

    def __init__(
        self,
        store: Store,
        *,
        limits: Limits | None = None,
        threads: int | None = None,
        mapped: bool = False,
        verify: bool = True,
        policy: JoinPolicy | None = None,
        rules: Sequence[str | PlacementRule] = (),
    ) -> None:
        """Open a store.

        Args:
            store: The store.
            limits: What a file may cost. None for the default limits.
            threads: The most threads that read. None to choose by the machine and the store.
            mapped: Whether arrays are views of mapped memory where that is possible.
            verify: Whether the checksums that files record are compared when a storage is read
                from end to end.
            policy: Which neighboring ranges are read together. None to choose by the store.
            rules: How the tensors of rank files are placed, if the format does not record it.
        """
        profile = store.read_profile
        if limits is None:
            limits = DEFAULTS
        # A remote store prefers a number of requests at the same time. A local store has 0.
        is_remote = profile.request_count > 0
        if not threads:
            threads = profile.request_count if is_remote else DEFAULT_THREADS
        if policy is None:
            policy = REMOTE if is_remote else MEMORY
        self.store = store
        self.rules = tuple(rules)
        self.limits = limits
        self.threads = threads
        self.mapped = mapped
        self.verify = verify
        self.policy = policy
        self.read_nbytes = 0
        """The bytes of tensors that were read so far."""
        self._is_in_memory = profile.is_in_memory
        self._can_read_ahead = not (is_remote or profile.is_exact)
        """Whether more bytes of a file may be read than were requested."""
        self._head = NO_HEAD
        """The first bytes of the file that was read last."""

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle. The cached bytes of a file are left out."""
        return {**vars(self), "_head": NO_HEAD}

    def with_store(self, store: Store, *, threads: int | None = None) -> OpenSource:
        """Return a source with the same settings that reads from another store."""
        return OpenSource(
            store,
            limits=self.limits,
            threads=threads or self.threads,
            mapped=self.mapped,
            verify=self.verify,
            policy=self.policy,
            rules=self.rules,
        )

    def bytes(self, key: str, start: int, stop: int) -> bytes:
        """Read a small range of a file, such as a header or a pickle, on this thread.

        Offsets may come from a damaged file. So ranges that do not lie inside of the file are left
        to the store, which raises the error.

        Args:
            key: The file.
            start: The first byte.
            stop: The byte after the last one.

        Raises:
            Truncated: The file ends before `stop`.
        """
        if self._is_in_memory:
            content = self.store.map(key)
            if content is not None and 0 <= start <= stop <= content.nbytes:
                return bytes(content[start:stop])
        # Formats read several short ranges at the start of a file. One read gets all of them.
        if self._can_read_ahead and 0 <= start <= stop <= HEAD_NBYTES:
            head = self.read_head(key, HEAD_NBYTES)
            if stop <= len(head):
                return head[start:stop]
        out = bytearray(max(stop - start, 0))
        self.store.peek(key, start, memoryview(out))
        return Content(out)

    def read_head(self, key: str, nbytes: int) -> Content:
        """Return the first bytes of a file: `nbytes` of them, or all if the file is shorter.

        The bytes are kept for the next call, because several formats check the same file in turn.
        """
        if self._head.key != key or nbytes > self._head.requested_nbytes:
            requested_nbytes = nbytes
            if self._can_read_ahead:
                requested_nbytes = max(nbytes, HEAD_NBYTES)
            out = bytearray(min(self.store.size(key), requested_nbytes))
            self.store.peek(key, 0, memoryview(out))
            self._head = FileHead(key, Content(out), requested_nbytes)
        return self._head.content[:nbytes]

    def read(self, requests: Sequence[Request]) -> None:
        """Read the elements of every request into its array, in parallel.

        The first error cancels the remaining reads and is raised.
        """
        file_ranges: list[FileRange | None] = []
        for request in requests:
            # None means that the tensor or its array is not one contiguous range of bytes.
            file_range = None
            if request.out.flags.c_contiguous:
                file_range = request.tensor.file_range()
            file_ranges.append(file_range)
        self._read_requests(requests, file_ranges)

    def _read_requests(
        self, requests: Sequence[Request], file_ranges: Sequence[FileRange | None]
    ) -> None:
        """Read the elements of requests into their arrays.

        Args:
            requests: The requests.
            file_ranges: For each request, the range of a file that has exactly the bytes of its
                array. None if the elements are read as boxes.
        """
        pairs = list(zip(requests, file_ranges, strict=True))
        box_requests = [request for request, file_range in pairs if file_range is None]
        range_requests = [request for request, file_range in pairs if file_range is not None]
        if range_requests:
            ranges = [file_range for file_range in file_ranges if file_range is not None]
            # One column for each field of the ranges.
            keys, starts, nbytes, crcs = zip(*ranges, strict=True)
            # A file gets the next index when it occurs for the first time.
            file_indices: dict[str, int] = {}
            files = [file_indices.setdefault(key, len(file_indices)) for key in keys]
            addresses = [address_of(request.out) for request in range_requests]
            self._read_ranges(
                lambda range_index: range_requests[range_index].tensor,
                list(file_indices),
                files,
                starts,
                nbytes,
                addresses,
                crcs,
            )
        if box_requests:
            self._read_as_boxes(box_requests)

    def _read_ranges(
        self,
        make_tensor: Callable[[int], LazyTensor],
        keys: Sequence[str],
        files: Column,
        starts: Column,
        nbytes: Column,
        addresses: Column,
        crcs: Column,
    ) -> None:
        """Read ranges of files to memory. Every column has an entry for each range.

        Args:
            make_tensor: Returns the tensor of a range, given its index. It is called for errors.
            keys: The files.
            files: The file of each range, as an index into `keys`.
            starts: The first byte of each range in its file.
            nbytes: The size of each range.
            addresses: The address in memory that each range is read to.
            crcs: The recorded CRC-32 of each range, or `NO_CRC`.
        """

        def find_tensor_name(range_index: int) -> str:
            return make_tensor(range_index).name

        def describe_damage(range_index: int, crc: int) -> Corrupted:
            # Imported here because only damaged files need it.
            from holdfast.engine.checksums import build_damage_error

            tensor = make_tensor(range_index)
            return build_damage_error(tensor.storages[0], tensor.name, crc)

        if not self.verify:
            crcs = (NO_CRC,) * len(crcs)
        reads = RangeReads(
            keys=keys,
            files=files,
            starts=starts,
            nbytes=nbytes,
            addresses=addresses,
            crcs=crcs,
            find_tensor_name=find_tensor_name,
            describe_damage=describe_damage,
        )
        self.read_nbytes += read_ranges(self.store, reads, threads=self.threads, policy=self.policy)

    def _read_as_boxes(self, requests: Sequence[Request]) -> None:
        """Read the elements of tensors that are not contiguous into their arrays."""
        for request in requests:
            if request.tensor.traits.meta:
                raise Unsupported(
                    "this tensor was saved on the meta device: it has a shape and no data",
                    tensor=request.tensor.name,
                )
        # Imported here because contiguous tensors do not need it.
        from holdfast.engine.checksums import StorageChecks, find_whole_storages

        # Only storages that these requests read completely can be compared with their checksums.
        checked_storages = find_whole_storages(requests) if self.verify else {}
        checks = StorageChecks(checked_storages)
        self.read_boxes(requests, checks)
        checks.finish()
        for request in requests:
            _resolve_flags(request)

    def read_boxes(
        self, requests: Sequence[Request], checks: StorageChecks, *, threads: int | None = None
    ) -> int:
        """Read the elements of every request into its array, box by box.

        This is for callers that read a tensor in several calls. `read` would not compare the
        checksum of a storage that no single call reads completely.

        Args:
            requests: Tensors with their destinations.
            checks: Receives the bytes of storages whose checksum it compares. The caller finishes
                it after the last call.
            threads: The most threads that read. By default the number of this source.

        Returns:
            The number of bytes that were read.
        """
        # Imported here because contiguous tensors do not need it.
        from holdfast.engine.boxes import read_boxes

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
        """Read tensors into new arrays, in parallel."""
        file_ranges = [tensor.file_range() for tensor in tensors]
        # A tensor that is one range has as many bytes as its file stores. Only a limit below 1
        # forbids that, and `LazyTensor.empty` checks it.
        needs_check = self.limits.expansion < 1
        arrays: list[np.ndarray] = []
        for tensor, file_range in zip(tensors, file_ranges, strict=True):
            if file_range is None or needs_check:
                arrays.append(tensor.empty())
            else:
                arrays.append(np.empty(tensor.shape, tensor.dtype.numpy))
        self._read_requests(list(map(Request, tensors, arrays)), file_ranges)
        return arrays

    def read_rows(
        self, rows: ContiguousRows, make_tensor: Callable[[int], LazyTensor]
    ) -> list[np.ndarray]:
        """Read contiguous rows of a table into new arrays, without a lazy tensor for each of them.

        Args:
            rows: The rows.
            make_tensor: Returns the lazy tensor of a request index. It is called for errors only.
        """
        request_indices = rows.request_indices
        # A contiguous row has as many bytes as its file stores. Only a limit below 1 forbids that,
        # and `arrays` checks it.
        if self.limits.expansion < 1:
            return self.arrays([make_tensor(index) for index in request_indices])
        arrays = list(map(np.empty, rows.shapes, rows.dtypes))
        self._read_ranges(
            lambda range_index: make_tensor(request_indices[range_index]),
            rows.keys,
            rows.file_indices,
            rows.starts,
            rows.nbytes,
            list(map(address_of, arrays)),
            rows.crcs,
        )
        return arrays

    @contextmanager
    def lend(self, tensor: LazyTensor) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in C order, little-endian. Packed elements stay packed."""
        # Imported here because only saves and conversions need it.
        from holdfast.engine.blocks import ContiguousBlock, read_block

        yield read_block(ContiguousBlock(tensor, 0))

    def view(self, tensor: LazyTensor) -> np.ndarray | None:
        """Return a tensor as an array over mapped memory.

        Returns:
            The array, or None if the source is not mapped or the elements cannot be used as they
            lie in the file: in several chunks, packed, byte-swapped, conjugated or negated.
        """
        if not self.mapped or tensor.traits.conj or tensor.traits.neg or 0 in tensor.shape:
            return None
        # A row of a table has a position, which is found without the chunks of the tensor.
        position: StridedPosition | Chunk
        if tensor.position is not None:
            position = tensor.position.strided_position()
        else:
            if len(tensor.chunks) != 1:
                return None
            position = tensor.chunks[0]
            # A chunk that is only a part of the tensor leaves other elements undefined.
            if position.shape != tensor.shape:
                return None

        storage = position.storage
        dtype = tensor.dtype
        is_swapped = storage.byteorder != "little" and dtype.swap_nbytes > 1
        if dtype.packed or is_swapped:
            return None
        content = self.store.map(storage.key)
        if content is None:
            return None
        # Positions are in bits. Elements that are not packed start at whole bytes.
        offset = storage.start + position.offset // 8
        byte_strides = [stride // 8 for stride in position.strides]
        return np.ndarray(tensor.shape, dtype.numpy, content, offset, byte_strides)

    def digest(self, tensors: Sequence[LazyTensor]) -> list[int]:
        """Return the CRC-32 of the elements of each tensor.

        Where the file records it, nothing is read. All other tensors are read in parallel.
        """
        # Imported here because few programs compute checksums.
        from holdfast.engine.digest import compute_crcs

        return compute_crcs(tensors, threads=self.threads)


def _resolve_flags(request: Request) -> None:
    """Conjugate and negate the elements that were read, if the tensor is marked so.

    torch conjugates and negates lazily. It saves the elements unchanged, with a flag for each.
    """
    tensor = request.tensor
    out = request.out
    # `paired` marks complex types that numpy does not have. Their arrays have two fields.
    if tensor.traits.conj:
        if tensor.dtype.paired:
            out["imag"] = -out["imag"]
        else:
            np.conjugate(out, out=out)
    if tensor.traits.neg:
        if tensor.dtype.paired:
            out["real"] = -out["real"]
            out["imag"] = -out["imag"]
        elif tensor.dtype.kind in ("float", "complex", "int", "uint"):
            np.negative(out, out=out)
        else:
            raise Unsupported(
                f"cannot negate a {tensor.dtype} tensor, which the file marks as negated",
                tensor=tensor.name,
            )
