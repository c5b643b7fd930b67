"""`OpenSource`: a store, the limits that hold for it, and the way its bytes reach memory.

Dense rows that are short are read many together (`read_dense`) and copied out of scratch memory: each array owns its bytes. Long
ones are left to a plan, which reads straight into place. A read that fails is done again row by row, so that its error names the
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from weakref import ref

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.crc import crc32
from holdfast.core.dense import NO_ARRAY, DenseRows
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.placement_rules import PlacementRule
from holdfast.core.protocols import Content, Request, Store, by_source
from holdfast.core.table import Piece
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.engine.array_sink import execute
from holdfast.engine.blocks import ContiguousBlock, read_block
from holdfast.engine.checksums import Checks, damage, whole_storages
from holdfast.engine.coalesce import MEMORY, REMOTE, Policy, coalesce
from holdfast.engine.reads import ReadPlan, plan_reads
from holdfast.engine.threads import default_threads, run_all
from holdfast.engine.transfer import INLINE_NBYTES, TASK_READS, Scratch
from holdfast.errors import HoldfastError, Unsupported, located
from holdfast.stores.virtual import Virtual

HEAD_NBYTES = (
    4096  # First bytes of a file that are read at once, since formats are recognised by them.
)
NO_FILE = (None, b"", 0)


class OpenSource:
    """What formats read headers from and lazy tensors read elements from."""

    def __init__(
        self, store: Store, *, limits: Limits | None = None, threads: int | None = None, mapped: bool = False,
        verify: bool = True, policy: Policy | None = None, rules: Sequence[str | PlacementRule] = (),
    ) -> None:  # fmt: skip
        medium = store.medium
        self.store = store
        self.rules = tuple(rules)
        self.limits = limits or DEFAULTS
        self.threads = threads or medium.requests or default_threads()
        self.mapped = mapped
        self.verify = verify  # Whether checksums that the file records are compared when a storage is read from end to end.
        self.policy = policy or (REMOTE if medium.requests else MEMORY)
        self._resident = medium.resident
        self._reads_ahead = not (
            medium.requests or medium.exact
        )  # Whether more may be read of a file than was asked for.
        self._first: tuple[str | None, bytes, int] = NO_FILE
        """The file whose first bytes were read last, these, and how many were wanted."""
        self.read_nbytes = 0

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_first": NO_FILE}

    def over(self, store: Store, *, threads: int | None = None) -> OpenSource:
        return OpenSource(
            store, limits=self.limits, threads=threads or self.threads, mapped=self.mapped, verify=self.verify, policy=self.policy,
            rules=self.rules,
        )  # fmt: skip

    def bytes(self, key: str, start: int, stop: int) -> bytes:
        content = self.store.map(key) if self._resident else None
        if content is not None and 0 <= start <= stop <= content.nbytes:
            return bytes(content[start:stop])
        if self._reads_ahead and 0 <= start <= stop <= HEAD_NBYTES:
            head = self.first(key, HEAD_NBYTES)
            if stop <= len(head):
                return head[start:stop]
        return self._read(key, start, stop)

    def first(self, key: str, nbytes: int) -> Content:
        known, head, wanted = self._first
        if known != key or nbytes > wanted:
            wanted = max(nbytes, HEAD_NBYTES) if self._reads_ahead else nbytes
            head = self._read(key, 0, min(self.store.size(key), wanted))
            self._first = key, head, wanted
        return head[:nbytes]

    def _read(self, key: str, start: int, stop: int) -> Content:
        out = bytearray(max(stop - start, 0))
        self.store.peek(key, start, memoryview(out))
        return Content(out)

    def plan(self, requests: Sequence[Request]) -> ReadPlan:
        return plan_reads(requests, self.policy)

    def read(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.tensor.traits.meta:
                message = "this tensor was saved on the meta device: it has a shape and no data"
                raise Unsupported(message, tensor=request.tensor.name)
        checks = Checks(whole_storages(requests) if self.verify else {})
        self.carry_out(requests, checks)
        checks.finish()
        for request in requests:
            _resolve(request)

    def arrays(
        self, rows: DenseRows, others: Sequence[int], tensor: Callable[[int], LazyTensor]
    ) -> list[np.ndarray]:
        arrays, left = [NO_ARRAY] * (len(rows) + len(others)), [*range(len(rows))]
        if self.limits.expansion >= 1 and left:
            policy, verify = self.policy, self.verify
            left, nbytes = read_dense(
                self.store, rows, arrays, tensor, policy=policy, verify=verify, threads=self.threads
            )
            self.read_nbytes += nbytes
        if left or others:
            numbers = rows.numbers
            wanted = [(at, tensor(numbers[at])) for at in left] + [
                (at, tensor(one)) for at, one in enumerate(others, len(rows))
            ]
            requests = []
            for at, one in wanted:
                arrays[at] = one.empty()
                requests.append(Request(one, arrays[at]))
            for source, own in by_source(requests).items():
                source.read(own)
        return arrays

    def fetch(self, tensor: LazyTensor) -> np.ndarray:
        place = tensor.file_range() if self.limits.expansion >= 1 else None
        if (
            place is None
            or place[2] > SMALL_NBYTES
            or self.store.medium.requests
            or self.store.medium.in_order
        ):
            out = tensor.empty()
            self.read([Request(tensor, out)])
            return out
        array = fetch(self.store, tensor, place, verify=self.verify)
        self.read_nbytes += array.nbytes
        return array

    @contextmanager
    def lend(self, tensor: LazyTensor) -> Iterator[memoryview]:
        yield read_block(ContiguousBlock(tensor, 0))

    def carry_out(self, requests: Sequence[Request], checks: Checks) -> None:
        """Read as the plan says; `checks` sees every block that passes by, and it is up to the caller to finish them."""
        plan = self.plan(requests)
        execute(plan, self.store, self.threads, checks)
        self.read_nbytes += plan.read_nbytes

    def view(self, tensor: LazyTensor) -> np.ndarray | None:
        if not self.mapped or tensor.traits.conj or tensor.traits.neg:
            return None
        if tensor.position is not None:
            storage, offset, strides = tensor.position.layout()
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
        from holdfast.engine.digest import tensor_crcs

        return tensor_crcs(tensors, threads=self.threads)


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


class Sourced(Virtual):
    """A virtual store that makes tensors over itself. They keep their source, and it keeps the store; nothing else keeps it."""

    _given: ref[OpenSource] | None = None

    @property
    def source(self) -> OpenSource:
        """The source of its tensors: the same one, for as long as one of them has it."""
        found = None if self._given is None else self._given()
        if found is None:
            found = OpenSource(self, threads=1)
            self._given = ref(found)
        return found


SMALL_NBYTES = (
    16 << 10
)  # Above this a call for each is little beside the copy, which other threads can do meanwhile.

SHARED_NBYTES = 2 << 10
"""Of tensors that are shorter than this on the average, one thread makes all arrays: to make one takes the interpreter lock, which
two threads would only hand to each other."""


def read_dense(
    store: Store, rows: DenseRows, out: list[np.ndarray], tensor: Callable[[int], LazyTensor], *, policy: Policy,
    verify: bool, threads: int,
) -> tuple[list[int], int]:  # fmt: skip
    """Put the arrays of rows that are small in their places in `out`. The rows that are left, and how many bytes were read.
    `tensor` gives the one of a number, for messages. A store that wants few long requests, or to be read in order, is read by a
    plan alone."""
    if store.medium.requests or store.medium.in_order:
        return [*range(len(rows))], 0
    several = len(rows.keys) > 1
    order = np.lexsort((rows.starts, rows.files)) if several else rows.starts.argsort(kind="stable")
    lengths = rows.nbytes[order]
    left: list[int] = []
    if not 0 < lengths.item(lengths.argmin()) <= lengths.item(lengths.argmax()) <= SMALL_NBYTES:
        small = (lengths > 0) & (lengths <= SMALL_NBYTES)
        left = order[lengths > SMALL_NBYTES].tolist()
        # What has no bytes lies nowhere, whatever its place.
        for row in order[lengths == 0].tolist():
            out[row] = np.empty(rows.shapes[row], rows.dtypes[row])
        order, lengths = order[small], lengths[small]
    starts = rows.starts[order]
    stops = starts + lengths
    files = rows.files[order] if several else rows.files
    edges = (np.flatnonzero(np.diff(files)) + 1).tolist() if several else []
    arrays = _Arrays(store, rows, out, tensor, verify=verify)
    work: list[Callable[[], None]] = []
    for low, high in pairwise([0, *edges, len(order)]):
        if low < high:
            work += arrays.tasks(
                rows.keys[files.item(low)],
                order[low:high],
                starts[low:high],
                stops[low:high],
                policy,
            )
    if len(work) > 1 and threads > 1:
        wanted = int(lengths.sum())
        threads = 1 if wanted < INLINE_NBYTES or wanted < SHARED_NBYTES * len(order) else threads
    run_all(work, threads)
    arrays.check()
    return left, arrays.read_nbytes


def fetch(
    store: Store, tensor: LazyTensor, place: tuple[str, int, int, int], *, verify: bool
) -> np.ndarray:
    """A small dense tensor by itself: one call straight into the array."""
    key, start, nbytes, crc = place
    if not nbytes:
        return np.empty(tensor.shape, tensor.dtype.numpy)
    try:
        (data,) = store.scattered(key, (start,), (nbytes,))
    except HoldfastError as error:
        with located(tensor=tensor.name):
            raise error
    if verify and crc != NO_CRC and crc != (found := crc32(data)):
        raise damage(tensor.storages[0], tensor.name, found)
    # To copy a few bytes takes less than to tell the system where they shall go.
    return np.ndarray(tensor.shape, tensor.dtype.numpy, data).copy()


class _Arrays:
    def __init__(
        self,
        store: Store,
        rows: DenseRows,
        out: list[np.ndarray],
        tensor: Callable[[int], LazyTensor],
        *,
        verify: bool,
    ) -> None:
        self._store, self._rows, self._out, self._tensor = store, rows, out, tensor
        self._verify = verify and rows.crcs.item(rows.crcs.argmax()) != NO_CRC
        self._scratch = Scratch()
        self.read_nbytes = 0
        self._changed: dict[
            int, int
        ] = {}  # Rows with another checksum than their file records, and the one that was found.

    def check(self) -> None:
        if self._changed:
            row = min(self._changed)
            tensor = self._tensor(self._rows.numbers[row])
            raise damage(tensor.storages[0], tensor.name, self._changed[row])

    def tasks(
        self, key: str, members: Ints, starts: Ints, stops: Ints, policy: Policy
    ) -> Iterator[Callable[[], None]]:
        """The reads of one file: of rows in its order, with their first bytes and the bytes after their last."""
        single: list[int] = []
        for first, last in pairwise([*coalesce(starts, stops, policy).tolist(), len(members)]):
            if last == first + 1:
                single.append(first)
            else:
                stop = stops.item(first + int(stops[first:last].argmax()))
                self.read_nbytes += stop - starts.item(first)
                yield partial(self._read, key, stop, members[first:last], starts[first:last])
        if single:
            self.read_nbytes += int((stops - starts)[single].sum())
            for at in range(0, len(single), TASK_READS):
                yield partial(self._scattered, key, members[single[at : at + TASK_READS]])

    def _read(self, key: str, stop: int, members: Ints, starts: Ints) -> None:
        rows, out, start = self._rows, self._out, starts.item(0)
        data = self._scratch.of(stop - start)
        try:
            self._store.read(key, start, data)
        except HoldfastError as error:
            raise self._named(key, members, error) from None
        array, shapes, dtypes, places = (
            np.ndarray,
            rows.shapes,
            rows.dtypes,
            (starts - start).tolist(),
        )
        for number, place in zip(members.tolist(), places, strict=True):
            out[number] = array(shapes[number], dtypes[number], data, place).copy()
        if self._verify:
            ends = (starts - start + rows.nbytes[members]).tolist()
            self._compare(
                members, [data[place:end] for place, end in zip(places, ends, strict=True)]
            )

    def _scattered(self, key: str, members: Ints) -> None:
        rows, out = self._rows, self._out
        try:
            pieces = self._store.scattered(
                key, rows.starts[members].tolist(), rows.nbytes[members].tolist()
            )
        except HoldfastError as error:
            raise self._named(key, members, error) from None
        numbers = members.tolist()
        shapes, dtypes = (
            [rows.shapes[number] for number in numbers],
            [rows.dtypes[number] for number in numbers],
        )
        if shapes[0] and shapes.count(shapes[0]) == dtypes.count(dtypes[0]) == len(numbers):
            # The rows of one array, of which there are views in half of the time that it takes to make arrays.
            made: Iterable[np.ndarray] = np.frombuffer(b"".join(pieces), dtypes[0]).reshape(
                -1, *shapes[0]
            )
        else:
            made = map(np.ndarray, shapes, dtypes, pieces)
        for number, row in zip(numbers, made, strict=True):
            out[number] = row.copy()
        if self._verify:
            self._compare(members, pieces)

    def _compare(self, members: Ints, pieces: Sequence[Piece | bytearray]) -> None:
        """Record the rows whose bytes do not have the checksum that their file records."""
        for row, crc, piece in zip(
            members.tolist(), self._rows.crcs[members].tolist(), pieces, strict=True
        ):
            if crc != NO_CRC and (found := crc32(piece)) != crc:
                self._changed[row] = found

    def _named(self, key: str, members: Ints, error: HoldfastError) -> HoldfastError:
        """The error of the first of these rows that cannot be read, with the name of its tensor."""
        for row in sorted(members.tolist()):
            try:
                self._store.read(
                    key,
                    self._rows.starts.item(row),
                    memoryview(bytearray(self._rows.nbytes.item(row))),
                )
            except HoldfastError as found:
                found.tensor = found.tensor or self._tensor(self._rows.numbers[row]).name
                return found
        return error
